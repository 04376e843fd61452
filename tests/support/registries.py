"""The conformance suite of registries. A test file imports all tests of this module, and
defines the fixture `registries`.

`registries()` opens a registry with a new session. All these registries share one tree,
which is empty at first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from logcore.errors import (
    BadVersionError,
    CorruptRegistryError,
    InvalidConfigError,
    InvalidNodeError,
    NodeExistsError,
    NodeNotEmptyError,
    NodeNotFoundError,
    RegistryClosedError,
    SessionExpiredError,
)
from logcore.registry import offsets, paths, views
from logcore.registry.protocol import (
    NAME_LIMIT_BYTES,
    VALUE_LIMIT_BYTES,
    Node,
    NodeWrite,
    Registry,
)
from logcore.registry.views import TopicView

Registries = Callable[[], Registry]


def is_removed_soon(act: Callable[[], object]) -> bool:
    """Return whether a call finds no node within four seconds, because a server may detect
    the end of a session late.
    """
    for _ in range(400):
        try:
            act()
        except NodeNotFoundError:
            return True
        time.sleep(0.01)
    return False


# -- create and get --------------------------------------------------------------------


def test_node_is_read_as_it_was_created(registries: Registries) -> None:
    registry = registries()
    assert registry.create("/a", b"one") == 0
    assert registry.get("/a") == Node(b"one", 0, None)


def test_a_value_may_be_empty(registries: Registries) -> None:
    registry = registries()
    registry.create("/a")
    assert registry.get("/a") == Node(b"", 0)


def test_get_many_omits_missing_nodes(
    registries: Registries,
) -> None:
    registry = registries()
    node_paths = [f"/many/{number}" for number in range(40)]
    for path in node_paths[::2]:
        registry.create(path, path.encode())
    registry.set(node_paths[0], b"new")
    registry.create("/many/own", ephemeral=True)
    found = registry.get_many([*node_paths, "/many/own", "/%/odd name"])
    assert found == {
        path: registry.get(path) for path in [*node_paths[::2], "/many/own"]
    }
    assert registry.get_many([]) == {}
    with pytest.raises(InvalidNodeError):
        registry.get_many(["/many/0", "no path"])


def test_write_many_returns_a_result_for_each_node(
    registries: Registries,
) -> None:
    registry = registries()
    registry.create("/w/old", b"0")
    registry.create("/w/changed", b"0")
    registry.set("/w/changed", b"1")
    found = registry.write_many(
        [
            NodeWrite("/w/new/below", b"a", None),
            NodeWrite("/w/old", b"b", 0),
            NodeWrite("/w/old", b"c", None),
            NodeWrite("/w/changed", b"d", 0),
            NodeWrite("/w/missing", b"e", 3),
            NodeWrite("/w/new/beside", b"f", None),
        ]
    )
    refusals = [NodeExistsError, BadVersionError, NodeNotFoundError]
    assert found[:2] == [0, 1]
    assert [type(each) for each in found[2:5]] == refusals
    assert found[5:] == [0]
    values = {path: registry.get(path).value for path in ("/w/old", "/w/changed")}
    assert values == {"/w/old": b"b", "/w/changed": b"1"}
    assert registry.get("/w/new/below") == Node(b"a", 0)
    assert registry.write_many([]) == []
    with pytest.raises(InvalidNodeError):
        registry.write_many([NodeWrite("no path", b"", None)])


def test_a_missing_node_is_an_error(registries: Registries) -> None:
    registry = registries()
    for act in (registry.get, registry.delete, lambda path: registry.set(path, b"")):
        with pytest.raises(NodeNotFoundError):
            act("/missing")


def test_node_is_created_once(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a", b"one")
    for registry in (first, other):
        with pytest.raises(NodeExistsError):
            registry.create("/a", b"two")
    assert other.get("/a").value == b"one"


def test_parents_are_created_with_the_node(registries: Registries) -> None:
    registry = registries()
    registry.create("/a/b/c", b"x")
    assert registry.get("/a") == registry.get("/a/b") == Node(b"", 0, None)
    assert registry.children("/") == ["a"]
    assert registry.children("/a/b") == ["c"]


def test_parents_are_created_across_domains(registries: Registries) -> None:
    registry = registries()
    registry.create("/consumers/g/ids/c1", ephemeral=True)
    registry.create("/consumers/h", b"x")
    assert registry.children("/consumers") == ["g", "h"]
    assert registry.get("/consumers/g/ids").session is None


def test_parents_remain_when_the_last_child_is_deleted(registries: Registries) -> None:
    registry = registries()
    registry.create("/a/b")
    registry.delete("/a/b")
    assert registry.get("/a") == Node(b"", 0)
    registry.delete("/a")
    assert registry.children("/") == []


# -- set and versions ------------------------------------------------------------------


def test_each_change_adds_one_to_the_version(registries: Registries) -> None:
    registry = registries()
    registry.create("/a", b"0")
    for version in range(1, 6):
        assert registry.set("/a", b"%d" % version) == version
        assert registry.get("/a") == Node(b"%d" % version, version)


def test_change_may_require_a_version(registries: Registries) -> None:
    registry = registries()
    registry.create("/a", b"0")
    assert registry.set("/a", b"1", version=0) == 1
    with pytest.raises(BadVersionError):
        registry.set("/a", b"2", version=0)
    assert registry.get("/a") == Node(b"1", 1)


def test_one_of_two_changes_of_a_version_succeeds(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a", b"0")
    other.set("/a", b"other", version=0)
    with pytest.raises(BadVersionError):
        first.set("/a", b"one", version=0)
    assert first.get("/a").value == b"other"


def test_versions_begin_at_0_when_a_node_is_created_again(
    registries: Registries,
) -> None:
    registry = registries()
    registry.create("/a", b"0")
    registry.set("/a", b"1")
    registry.delete("/a")
    assert registry.create("/a", b"new") == 0
    assert registry.get("/a") == Node(b"new", 0)


def test_change_is_visible_to_other_sessions(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a", b"0")
    for version in range(1, 4):
        first.set("/a", b"%d" % version)
        assert other.get("/a") == Node(b"%d" % version, version)


def test_values_grow_and_shrink(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a", b"")
    for version, size in enumerate(
        [10, 5_000, 100, 70_000, VALUE_LIMIT_BYTES, 0, 20_000], 1
    ):
        value = bytes([version]) * size
        assert first.set("/a", value) == version
        assert other.get("/a") == Node(value, version)


def test_node_is_created_with_a_large_value(registries: Registries) -> None:
    registry = registries()
    registry.create("/a", b"x" * VALUE_LIMIT_BYTES)
    assert registry.get("/a").value == b"x" * VALUE_LIMIT_BYTES


def test_value_above_the_limit_changes_nothing(registries: Registries) -> None:
    registry = registries()
    registry.create("/a", b"0")
    large = b"x" * (VALUE_LIMIT_BYTES + 1)
    for act in (
        lambda: registry.set("/a", large),
        lambda: registry.create("/b", large),
        lambda: registry.update("/a", lambda _: large),
    ):
        with pytest.raises(InvalidNodeError):
            act()
    assert registry.get("/a") == Node(b"0", 0)
    assert registry.children("/") == ["a"]


@pytest.mark.parametrize("value", ["text", 5, None])
def test_value_that_is_not_bytes_is_refused(
    registries: Registries, value: object
) -> None:
    registry = registries()
    with pytest.raises(InvalidNodeError):
        registry.create("/a", value)  # type: ignore[arg-type]


# -- delete and children ---------------------------------------------------------------


def test_deleted_node_does_not_exist(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a/b", b"x")
    other.delete("/a/b")
    with pytest.raises(NodeNotFoundError):
        first.get("/a/b")
    assert first.children("/a") == []


def test_a_node_with_children_is_not_deleted(registries: Registries) -> None:
    registry = registries()
    registry.create("/a/b/c")
    for path in ("/a", "/a/b"):
        with pytest.raises(NodeNotEmptyError):
            registry.delete(path)
    registry.delete("/a/b/c")
    registry.delete("/a/b")
    registry.delete("/a")
    assert registry.children("/") == []


def test_deletion_may_require_a_version(registries: Registries) -> None:
    registry = registries()
    registry.create("/a")
    registry.set("/a", b"1")
    with pytest.raises(BadVersionError):
        registry.delete("/a", version=0)
    registry.delete("/a", version=1)
    assert registry.children("/") == []


def test_children_are_names_in_order(registries: Registries) -> None:
    registry = registries()
    for name in ("b", "a", "10", "9", "B"):
        registry.create(f"/t/{name}")
    registry.create("/t/a/deeper")
    assert registry.children("/t") == ["10", "9", "B", "a", "b"]


def test_a_missing_node_has_no_children(registries: Registries) -> None:
    registry = registries()
    assert registry.children("/missing") == []
    assert registry.children("/missing/more") == []
    registry.create("/leaf")
    assert registry.children("/leaf") == []


def test_parent_node_of_all_groups_cannot_be_deleted(registries: Registries) -> None:
    registry = registries()
    registry.create("/consumers")
    with pytest.raises(InvalidNodeError):
        registry.delete("/consumers")


def test_group_is_deleted_as_a_whole(registries: Registries) -> None:
    registry = registries()
    registry.create("/consumers/g/offsets/t/0", b"5")
    for path in ("/offsets/t/0", "/offsets/t", "/offsets", ""):
        registry.delete(f"/consumers/g{path}")
    assert registry.children("/consumers") == []


# -- names -----------------------------------------------------------------------------

NAMES = [
    "a b",
    "a%2Fb",
    "Größe",
    "日本",
    ".hidden",
    ".sessions",
    ".lock",
    "..",
    ".",
    "a.node",
    "a",
    "a.tmp",
    "a.node.tmp",
    "x\ny\t",
    "%hash-",
    "\x01\x7f",
    "\ufff0",
    "\ue000",
    "😀",
    "-",
    "host:1234",
    "n" * 181,
    "n" * 5_000,
]


def test_any_text_may_be_a_name(registries: Registries) -> None:
    first = registries()
    other = registries()
    for name in NAMES:
        first.create(f"/names/{name}", name.encode())
        first.create(f"/names/{name}/child", b"of " + name.encode())
    assert other.children("/names") == sorted(NAMES)
    for name in NAMES:
        assert other.get(f"/names/{name}").value == name.encode()
        assert other.get(f"/names/{name}/child").value == b"of " + name.encode()
        assert other.children(f"/names/{name}") == ["child"]


def test_a_name_may_be_as_long_as_the_limit(registries: Registries) -> None:
    registry = registries()
    name = "x" * NAME_LIMIT_BYTES
    registry.create(f"/{name}", b"1")
    registry.set(f"/{name}", b"2")
    assert registry.get(f"/{name}") == Node(b"2", 1)
    assert registry.children("/") == [name]
    registry.delete(f"/{name}")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "a",
        "//",
        "/a/",
        "/a//b",
        "/a\0b",
        "/" + "x" * (NAME_LIMIT_BYTES + 1),
        "/\ud800",
        "/",
        5,
        None,
        b"/a",
    ],
    ids=lambda path: repr(path)[:12],
)
def test_invalid_path_is_refused(registries: Registries, path: str) -> None:
    registry = registries()
    for act in (
        lambda: registry.create(path),
        lambda: registry.get(path),
        lambda: registry.set(path, b""),
        lambda: registry.delete(path),
        lambda: registry.update(path, lambda value: value),
        lambda: registry.watch([path]),
    ):
        with pytest.raises(InvalidNodeError):
            act()
    assert registry.children("/") == []


# -- update ----------------------------------------------------------------------------


def test_update_gets_the_current_value(registries: Registries) -> None:
    registry = registries()
    assert registry.update(
        "/a/n", lambda value: b"1" if value is None else value + b"!"
    ) == Node(b"1", 0)
    assert registry.update(
        "/a/n", lambda value: b"?" if value is None else value + b"!"
    ) == Node(b"1!", 1)
    assert registry.get("/a/n") == Node(b"1!", 1)


def test_update_may_change_nothing(registries: Registries) -> None:
    registry = registries()
    assert registry.update("/a/b", lambda value: None) is None
    assert registry.children("/") == []
    registry.create("/a/b", b"x")
    assert registry.update("/a/b", lambda value: None) == Node(b"x", 0)


def test_an_update_that_raises_changes_nothing(registries: Registries) -> None:
    registry = registries()
    registry.create("/a", b"x")

    def change(value: bytes | None) -> bytes:
        raise KeyError(value)

    with pytest.raises(KeyError):
        registry.update("/a", change)
    assert registry.get("/a") == Node(b"x", 0)
    assert registry.set("/a", b"y") == 1


def test_no_update_is_lost(registries: Registries) -> None:
    """Each of four threads adds 1 to one counter 25 times, with its own registry."""
    opened = [registries() for _ in range(4)]

    def count(registry: Registry) -> None:
        for _ in range(25):
            registry.update(
                "/consumers/g/count", lambda value: b"%d" % (int(value or b"0") + 1)
            )

    threads = [threading.Thread(target=count, args=(registry,)) for registry in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened[0].get("/consumers/g/count") == Node(b"100", 99)


def test_one_registry_serves_several_threads(registries: Registries) -> None:
    registry = registries()

    def count() -> None:
        for _ in range(25):
            registry.update("/count", lambda value: b"%d" % (int(value or b"0") + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.get("/count").value == b"100"


def test_one_of_many_creators_succeeds(registries: Registries) -> None:
    opened = [registries() for _ in range(4)]
    won: list[int] = []

    def create(number: int) -> None:
        for at in range(10):
            try:
                opened[number].create(f"/race/{at}", b"%d" % number, ephemeral=True)
                won.append(at)
            except NodeExistsError:
                pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(10))


# -- sessions --------------------------------------------------------------------------


def test_sessions_have_different_ids(registries: Registries) -> None:
    first = registries()
    other = registries()
    assert first.session.id != other.session.id
    assert first.session.state == other.session.state == "alive"


def test_ephemeral_node_contains_its_session(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a/e", b"x", ephemeral=True)
    assert other.get("/a/e") == Node(b"x", 0, first.session.id)
    assert other.get("/a").session is None


def test_ephemeral_node_is_removed_with_its_session(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a/e", b"x", ephemeral=True)
    first.create("/consumers/g/ids/c", b"x", ephemeral=True)
    first.create("/a/p", b"x")
    first.close()
    assert is_removed_soon(lambda: other.get("/a/e"))
    assert is_removed_soon(lambda: other.get("/consumers/g/ids/c"))
    assert other.children("/a") == ["p"]
    assert other.children("/consumers/g/ids") == []


def test_other_session_changes_and_deletes_an_ephemeral_node(
    registries: Registries,
) -> None:
    first = registries()
    other = registries()
    first.create("/e", b"x", ephemeral=True)
    assert other.set("/e", b"y") == 1
    assert first.get("/e") == Node(b"y", 1, first.session.id)
    other.delete("/e")
    with pytest.raises(NodeNotFoundError):
        first.get("/e")


def test_an_ephemeral_node_has_no_children(registries: Registries) -> None:
    registry = registries()
    registry.create("/e", ephemeral=True)
    with pytest.raises(InvalidNodeError):
        registry.create("/e/child")
    assert registry.children("/e") == []


def test_name_can_be_claimed_after_its_session_ends(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/controller", b"one", ephemeral=True)
    with pytest.raises(NodeExistsError):
        other.create("/controller", b"other", ephemeral=True)
    first.close()
    assert is_removed_soon(lambda: other.get("/controller"))
    other.create("/controller", b"other", ephemeral=True)
    assert other.get("/controller") == Node(b"other", 0, other.session.id)


def test_a_large_ephemeral_node_grows_and_keeps_its_owner(
    registries: Registries,
) -> None:
    first = registries()
    other = registries()
    first.create("/e", b"", ephemeral=True)
    first.set("/e", b"x" * 50_000)
    assert other.get("/e") == Node(b"x" * 50_000, 1, first.session.id)
    first.close()
    assert is_removed_soon(lambda: other.get("/e"))


def test_a_closed_registry_refuses_everything(registries: Registries) -> None:
    registry = registries()
    registry.create("/a")
    registry.close()
    registry.close()
    for act in (
        lambda: registry.get("/a"),
        lambda: registry.children("/"),
        lambda: registry.create("/b"),
        lambda: registry.set("/a", b""),
        lambda: registry.delete("/a"),
        lambda: registry.update("/a", lambda value: value),
        lambda: registry.watch(["/a"]),
    ):
        with pytest.raises((RegistryClosedError, SessionExpiredError)):
            act()


# -- watches ---------------------------------------------------------------------------

QUIET_SECONDS = 0.05  # if nothing is reported for this time, all is reported
LONG_SECONDS = 300  # time limit for events that must happen


def settle(registry: Registry, watch: object) -> None:
    """Receive reports that are still in transit."""
    while watch.wait(QUIET_SECONDS):  # type: ignore[attr-defined]
        pass


def test_watch_without_a_change_reports_none(registries: Registries) -> None:
    registry = registries()
    registry.create("/a", b"0")
    watch = registry.watch(["/a"])
    settle(registry, watch)
    assert not watch.wait(0)
    assert not watch.wait(QUIET_SECONDS)
    watch.close()


@pytest.mark.parametrize("change", ["set", "delete", "create", "grow", "update"])
def test_a_watch_reports_a_change_of_a_value(
    registries: Registries, change: str
) -> None:
    first = registries()
    other = registries()
    path = "/w/new" if change == "create" else "/w/a"
    first.create("/w/a", b"0")
    watch = first.watch([path])
    settle(first, watch)
    acts: dict[str, Callable[[], object]] = {
        "set": lambda: other.set("/w/a", b"1"),
        "delete": lambda: other.delete("/w/a"),
        "create": lambda: other.create("/w/new"),
        "grow": lambda: other.set("/w/a", b"x" * 9_000),
        "update": lambda: other.update("/w/a", lambda value: b"1"),
    }
    acts[change]()
    assert watch.wait(LONG_SECONDS)
    watch.close()


def test_watch_continues_after_its_first_report(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a", b"0")
    watch = first.watch(["/a"])
    for version in range(1, 4):
        settle(first, watch)
        other.set("/a", b"%d" % version)
        assert watch.wait(LONG_SECONDS)
        assert first.get("/a").version == version
    watch.close()


@pytest.mark.parametrize("change", ["create", "delete", "end"])
def test_a_watch_reports_children(registries: Registries, change: str) -> None:
    first = registries()
    other = registries()
    other.create("/t/e", ephemeral=True)
    watch = first.watch([], children=["/t"])
    settle(first, watch)
    acts: dict[str, Callable[[], object]] = {
        "create": lambda: other.create("/t/b"),
        "delete": lambda: other.delete("/t/e"),
        "end": other.close,
    }
    acts[change]()
    assert watch.wait(LONG_SECONDS)
    watch.close()


def test_watch_reports_the_creation_of_a_missing_node(registries: Registries) -> None:
    first = registries()
    other = registries()
    watch = first.watch(["/x/y/z"], children=["/p/q"])
    settle(first, watch)
    other.create("/x/y/z", b"1")
    assert watch.wait(LONG_SECONDS)
    settle(first, watch)
    other.set("/x/y/z", b"2")
    assert watch.wait(LONG_SECONDS)
    settle(first, watch)
    other.create("/p/q/r")
    assert watch.wait(LONG_SECONDS)
    settle(first, watch)
    other.delete("/p/q/r")
    assert watch.wait(LONG_SECONDS)
    watch.close()


def test_watch_survives_deletion_and_creation_of_its_node(
    registries: Registries,
) -> None:
    first = registries()
    other = registries()
    first.create("/a/b/c")
    watch = first.watch(["/a/b/c"], children=["/a/b"])
    for path in ("/a/b/c", "/a/b", "/a"):
        other.delete(path)
    settle(first, watch)
    other.create("/a/b/c")
    assert watch.wait(LONG_SECONDS)
    settle(first, watch)
    other.set("/a/b/c", b"1")
    assert watch.wait(LONG_SECONDS)
    watch.close()


def test_watch_survives_deletion_and_creation_between_two_waits(
    registries: Registries,
) -> None:
    """On many file systems, the new directory has the inode number of the old
    directory.
    """
    first = registries()
    other = registries()
    first.create("/a/b/c")
    watch = first.watch(["/a/b/c"])
    settle(first, watch)
    other.delete("/a/b/c")
    other.delete("/a/b")
    other.create("/a/b/c")
    settle(first, watch)
    other.set("/a/b/c", b"1")
    assert watch.wait(LONG_SECONDS)
    watch.close()


def test_a_change_between_two_waits_is_not_lost(registries: Registries) -> None:
    first = registries()
    other = registries()
    first.create("/a", b"0")
    watch = first.watch(["/a"])
    settle(first, watch)
    other.set("/a", b"1")
    time.sleep(QUIET_SECONDS)
    assert watch.wait(0)
    watch.close()


def test_end_of_an_owner_is_reported_to_watches(
    registries: Registries,
) -> None:
    """A group member claims a partition like this: it tries to create the node of the
    owner, and waits for a report while another owner exists.
    """
    first = registries()
    other = registries()
    first.create("/owners/t/0", b"one", ephemeral=True)
    claimed = threading.Event()

    def claim() -> None:
        watch = other.watch(["/owners/t/0"])
        while not claimed.is_set():
            try:
                other.create("/owners/t/0", b"other", ephemeral=True)
                claimed.set()
            except NodeExistsError:
                watch.wait(LONG_SECONDS)
        watch.close()

    thread = threading.Thread(target=claim)
    thread.start()
    first.close()
    thread.join(LONG_SECONDS)
    assert claimed.is_set()
    assert other.get("/owners/t/0").value == b"other"


# -- brokers, topics and the controller ------------------------------------------------


def test_broker_id_is_exclusive(registries: Registries) -> None:
    first = registries()
    other = registries()
    views.register_broker(first, 1, "here", 9092, timestamp_ms=5)
    assert other.get("/brokers/ids/1").value == (
        b'{"version":5,"host":"here","port":9092,"endpoints":["PLAINTEXT://here:9092"],"timestamp":"5"}'
    )
    with pytest.raises(NodeExistsError, match=r"number 1.*here"):
        views.register_broker(other, 1, "there", 9093, timestamp_ms=6)
    views.register_broker(
        other, 2, "there", 9093, endpoints=["SSL://there:9094"], timestamp_ms=6
    )
    assert first.children("/brokers/ids") == ["1", "2"]
    first.close()
    assert is_removed_soon(lambda: other.get("/brokers/ids/1"))
    views.register_broker(other, 1, "there", 9093, timestamp_ms=6)


def test_registry_belongs_to_one_cluster(registries: Registries) -> None:
    registry = registries()
    for _ in range(2):
        views.claim_cluster(registry, "A" * 22)
    with pytest.raises(InvalidConfigError, match="another cluster"):
        views.claim_cluster(registries(), "B" * 22)
    assert registry.get("/cluster/id") == Node(
        b'{"version":"1","id":"AAAAAAAAAAAAAAAAAAAAAA"}', 0
    )


def topic_view(partitions: int, *, epoch: int = 0, **config: str) -> TopicView:
    numbers = range(partitions)
    return TopicView(
        "i" * 22, dict.fromkeys(numbers, (1,)), dict.fromkeys(numbers, epoch), config
    )


def all_nodes(registry: Registry, path: str = "") -> dict[str, Node]:
    found = {}
    for name in registry.children(path or "/"):
        below = f"{path}/{name}"
        found[below] = registry.get(below)
        found.update(all_nodes(registry, below))
    return found


def test_published_topics_match_the_directory(registries: Registries) -> None:
    registry = registries()
    topics = {
        "a": topic_view(2, epoch=3, retention="7"),
        "b": topic_view(3),
        "c": topic_view(1),
    }
    assert list(views.publishing(registry, topics, topics.__getitem__, 4)) == [
        "a",
        "b",
        "c",
    ]
    nodes = all_nodes(registry)
    assert nodes["/brokers/topics/a"].value == (
        b'{"version":2,"partitions":{"0":[1],"1":[1]},"topic_id":"iiiiiiiiiiiiiiiiiiiiii"}'
    )
    assert nodes["/brokers/topics/a/partitions/1/state"].value == (
        b'{"controller_epoch":4,"leader":1,"version":1,"leader_epoch":3,"isr":[1]}'
    )
    assert (
        nodes["/config/topics/a"].value == b'{"version":1,"config":{"retention":"7"}}'
    )
    assert registry.children("/brokers/topics/b/partitions") == ["0", "1", "2"]
    # The second call writes nothing. Before the third call, c was deleted, and b was
    # deleted and created again.
    list(views.publishing(registries(), topics, topics.__getitem__, 4))
    assert all_nodes(registry) == nodes
    topics = {"a": topics["a"], "b": topic_view(1)}
    assert list(views.publishing(registry, topics, topics.__getitem__, 4)) == [
        "c",
        "a",
        "b",
    ]
    after = all_nodes(registry)
    assert {
        path for path in after if "/c" in path[1:] and "config" not in path
    } == set()
    assert registry.children("/config/topics") == ["a", "b"]
    assert registry.children("/brokers/topics/b/partitions") == ["0"]
    assert {
        path: node
        for path, node in after.items()
        if path.startswith("/brokers/topics/a")
    } == {
        path: node
        for path, node in nodes.items()
        if path.startswith("/brokers/topics/a")
    }


def test_interrupted_deletion_is_completed_by_the_next_controller(
    registries: Registries,
) -> None:
    registry = registries()
    topics = {"a": topic_view(2)}
    list(views.publishing(registry, topics, topics.__getitem__, 1))
    registry.delete("/brokers/topics/a/partitions/0/state")
    registry.delete("/config/topics/a")
    assert list(views.publishing(registry, (), topics.__getitem__, 2)) == ["a"]
    assert (
        registry.children("/brokers/topics")
        == registry.children("/config/topics")
        == []
    )


def test_next_controller_is_elected_after_the_session_ends(
    registries: Registries,
) -> None:
    first = registries()
    other = registries()
    assert paths.elect(first, 1, 5) == 1
    assert paths.elect(other, 2, 6) is None
    assert (
        other.get("/controller").value == b'{"version":1,"brokerid":1,"timestamp":"5"}'
    )
    first.close()
    assert is_removed_soon(lambda: other.get("/controller"))
    assert paths.elect(other, 2, 6) == 2
    assert other.get("/controller_epoch").value == b"2"


# -- offsets ---------------------------------------------------------------------------


def test_offsets_are_read_as_they_were_committed(registries: Registries) -> None:
    first = registries()
    other = registries()
    assert offsets.committed(first, "a/b") == {}
    stored = {("t", 0): 5, ("t", 12): 0, ("u%", 1): 1 << 40}
    offsets.commit(first, "a/b", stored)
    assert offsets.committed(other, "a/b") == stored
    assert other.get("/consumers/a%2Fb/offsets/t/0") == Node(b"5", 0)
    offsets.commit(other, "a/b", {("t", 0): 3})
    assert offsets.committed(first, "a/b") == {**stored, ("t", 0): 3}
    assert offsets.committed(first, "a") == {}


def test_offsets_of_the_oldest_layout_are_read(registries: Registries) -> None:
    """`<broker>-<partition>`, as in Kafka before 0.8."""
    registry = registries()
    registry.create("/consumers/g/offsets/t/0-0", b"7")
    registry.create("/consumers/g/offsets/t/0-1", b"8")
    registry.create("/consumers/g/offsets/t/1", b"9")
    assert offsets.committed(registry, "g") == {("t", 0): 7, ("t", 1): 9}
    offsets.commit(registry, "g", {("t", 0): 4})
    assert offsets.committed(registry, "g")["t", 0] == 7
    offsets.rewind(registry, "g", {("t", 0): 4})
    assert offsets.committed(registry, "g") == {("t", 0): 4, ("t", 1): 9}
    registry.create("/consumers/g/offsets/t/2-1", b"3")
    with pytest.raises(CorruptRegistryError, match="brokers 0 and 2"):
        offsets.committed(registry, "g")


@pytest.mark.parametrize(
    ("name", "value"), [("x", b"1"), ("1-2-3", b"1"), ("0", b"many"), ("0", b"")]
)
def test_node_without_an_offset_is_an_error(
    registries: Registries, name: str, value: bytes
) -> None:
    registry = registries()
    registry.create(f"/consumers/g/offsets/t/{name}", value)
    with pytest.raises(CorruptRegistryError):
        offsets.committed(registry, "g")


def test_offsets_are_deleted_with_their_group_or_topic(
    registries: Registries,
) -> None:
    registry = registries()
    for group in ("g", "h"):
        offsets.commit(registry, group, {("t", 0): 1, ("u", 0): 2})
    offsets.forget_topics(registry, ["u", "v"])
    assert (
        offsets.committed(registry, "g")
        == offsets.committed(registry, "h")
        == {("t", 0): 1}
    )
    offsets.forget(registry, "g")
    assert offsets.committed(registry, "g") == {}
    assert "offsets" not in registry.children("/consumers/g")
    assert offsets.committed(registry, "h") == {("t", 0): 1}
