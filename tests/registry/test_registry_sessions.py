"""Stuck sessions, which each caller detects on its own steady clock, and the content of
a session's record.
"""

from __future__ import annotations

import attrs
import pytest

from logcore.errors import (
    InvalidConfigError,
    NodeNotFoundError,
    ReadOnlyLogError,
    RegistryError,
    RegistryLockedError,
    SessionExpiredError,
)
from logcore.fs import Boot, DirectoryWatch, SharedFS
from logcore.registry import open_registry
from logcore.registry.files import Layout, domain_byte
from logcore.registry.sessions import Observer, SessionInfo, SessionRecord
from logcore.registry.views import agree_on_clock
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine

INTERVAL_MS = 300


def session(
    polls: int, interval_ms: int = INTERVAL_MS, state: str = "alive"
) -> SessionInfo:
    facts = SessionRecord(Boot(bytes(16), 0), 1, interval_ms, polls)
    return SessionInfo("a" * 32, state, facts)  # type: ignore[arg-type]


def looks(*steps: tuple[int, int], interval_ms: int = INTERVAL_MS) -> list[bool]:
    """Return whether the session is stuck at each (time, polls)."""
    observer = Observer()
    return [
        bool(observer.find_stuck(at, [session(polls, interval_ms)]))
        for at, polls in steps
    ]


def test_session_without_polls_for_its_interval_is_stuck() -> None:
    assert looks((0, 5), (100, 5), (200, 5), (299, 5), (300, 5)) == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_a_poll_begins_a_new_interval() -> None:
    assert looks((0, 5), (100, 5), (200, 6), (300, 6), (400, 6), (499, 6), (500, 6))[
        -2:
    ] == [False, True]


def test_observer_that_was_stopped_starts_a_new_interval() -> None:
    """The observer was stopped, perhaps together with the session; see B50."""
    assert looks(
        (0, 5), (100, 5), (10_000, 5), (10_100, 5), (10_200, 5), (10_300, 5)
    ) == [False] * 5 + [True]


def test_a_session_without_an_interval_is_never_stuck() -> None:
    assert not any(looks(*((at, 5) for at in range(0, 100_000, 50)), interval_ms=0))


def test_dead_and_expired_sessions_are_not_stuck() -> None:
    observer = Observer()
    for state in ("dead", "expired"):
        assert not any(
            observer.find_stuck(at, [session(1, state=state)])
            for at in range(0, 1_000, 50)
        )


def test_jumps_of_the_wall_clock_end_no_session() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        open_registry("/data", fs=disk, max_poll_interval_ms=INTERVAL_MS) as member,
        open_registry("/data", fs=disk) as observer,
    ):
        for _ in range(20):
            disk.set_wall_clock(disk.now_ms() + 99)
            assert observer.stuck() == []
        for _ in range(4):
            disk.advance(75)
            found = observer.stuck()
        assert found == [member.session.id]
        member.poll()
        assert observer.stuck() == []


def test_expired_session_writes_nothing() -> None:
    disk = SimulatedDisk({"data": None})
    first = open_registry("/data", fs=disk)
    with open_registry("/data", fs=disk) as other:
        first.create("/e", ephemeral=True)
        first.create("/p")
        other.expire(first.session.id)
        assert first.session.state == "expired"
        for act in (
            lambda: first.create("/q"),
            lambda: first.set("/p", b"1"),
            lambda: first.delete("/p"),
            lambda: first.update("/p", lambda value: b"1"),
            first.poll,
            lambda: first.holding("/p").__enter__(),
        ):
            with pytest.raises(SessionExpiredError):
                act()
        assert other.children("/") == ["p"]
        first.close()
        assert [info.id for info in other.sessions()] == [other.session.id]


def test_holding_a_domain_blocks_other_writers() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        open_registry("/data", fs=disk) as first,
        open_registry("/data", fs=disk, lock_timeout_ms=50) as other,
    ):
        first.create("/consumers/g/group", b"0")
        with first.holding("/consumers/g"):
            assert first.get("/consumers/g/group").value == b"0"
            with pytest.raises(RegistryLockedError) as caught:
                other.set("/consumers/g/group", b"1")
            assert caught.value.pids
            other.create("/consumers/h/group")
            with pytest.raises(RegistryError, match="during a change"):
                first.set("/consumers/h/group", b"1")
        assert other.set("/consumers/g/group", b"1") == 1


def test_expired_session_has_no_nodes_while_it_holds_a_domain() -> None:
    """The process that expires the session cannot remove the files of the session yet."""
    disk = SimulatedDisk({"data": None})
    first = open_registry("/data", fs=disk)
    with open_registry("/data", fs=disk, lock_timeout_ms=50) as other:
        first.create("/e", ephemeral=True)
        with first.holding("/e"):
            first.set("/e", b"1")
            with pytest.raises(RegistryLockedError):
                other.expire(first.session.id)
            for registry in (first, other):
                with pytest.raises(NodeNotFoundError):
                    registry.get("/e")
            with pytest.raises(NodeNotFoundError):
                first.set("/e", b"2")
            with pytest.raises(NodeNotFoundError):
                first.delete("/e")
        first.close()


def test_change_of_an_own_node_checks_the_session_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_registry("/data", fs=SimulatedDisk({"data": None})) as registry:
        registry.create("/e", ephemeral=True)
        monkeypatch.setattr(registry._sessions, "is_alive", None)
        assert registry.set("/e", b"1") == 1
        registry.delete("/e")


def test_after_holding_a_domain_can_be_changed_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a block left its domain marked as held, later changes of the domain would not
    take the lock.
    """
    disk = SimulatedDisk({"data": None})
    with (
        open_registry("/data", fs=disk) as first,
        open_registry("/data", fs=disk, lock_timeout_ms=0) as other,
    ):
        with first.holding("/a"):
            first.create("/a", b"1")
        first.create("/b", b"1")
        other.set("/a", b"2")
        with other.holding("/a"), pytest.raises(RegistryLockedError):
            monkeypatch.setattr(first, "_lock_timeout_ms", 0)
            first.set("/a", b"3")
        assert first.get("/a").value == b"2"


def test_clock_is_agreed_on_once_for_each_boot() -> None:
    disk = SimulatedDisk({"data": None})
    with open_registry("/data", fs=disk) as registry:
        assert [agree_on_clock(registry, "first", value) for value in (5, 7)] == [5, 5]
        assert [agree_on_clock(registry, "second", value) for value in (9, 7)] == [9, 9]


def test_changes_inside_of_holding_are_atomic_for_others() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        open_registry("/data", fs=disk) as first,
        open_registry("/data", fs=disk, lock_timeout_ms=50) as other,
    ):
        first.create("/consumers/g/group", b"0")
        with first.holding("/consumers/g"):
            first.create("/consumers/g/owners/t/0", b"one", ephemeral=True)
            with first.holding("/consumers/g/group"):
                first.set("/consumers/g/group", b"1")
            with pytest.raises(RegistryLockedError):
                other.create("/consumers/g/owners/t/1", b"other", ephemeral=True)
            with pytest.raises(RegistryError, match="during a change"):
                first.update(
                    "/consumers/g/group",
                    lambda value: b"%d" % first.set("/consumers/g/group", b"2"),
                )
            first.delete("/consumers/g/owners/t/0")
        other.create("/consumers/g/owners/t/0", b"other", ephemeral=True)
        assert first.get("/consumers/g/group").value == b"1"


def test_a_change_that_uses_the_registry_is_refused() -> None:
    with open_registry("/data", fs=SimulatedDisk({"data": None})) as registry:
        with pytest.raises(RegistryError, match="during a change"):
            registry.update("/a", lambda value: registry.create("/b") and b"")  # type: ignore[func-returns-value]
        registry.create("/b")


def test_reader_opens_no_session_and_changes_nothing() -> None:
    disk = SimulatedDisk({"data": None})
    with open_registry("/data", fs=disk) as writer:
        writer.create("/a", b"x")
        disk.operations.clear()
        with open_registry("/data", fs=disk, read_only=True) as reader:
            assert reader.get("/a").value == b"x"
            assert len(reader.sessions()) == 1
            with pytest.raises(ReadOnlyLogError):
                reader.create("/b")
            with pytest.raises(ReadOnlyLogError):
                _ = reader.session
        assert not disk.operations


@attrs.define
class Elsewhere(SimulatedDisk):
    """A process of another boot or time namespace on the same disk."""

    def __init__(self, disk: SimulatedDisk, boot: Boot) -> None:
        self.__dict__.update(disk.__dict__)
        self.elsewhere = boot

    def boot(self) -> Boot:
        return self.elsewhere


@pytest.mark.parametrize("boot", [Boot(b"b" * 16, 1), Boot(bytes(16), 99)])
def test_live_session_of_another_machine_is_an_error(boot: Boot) -> None:
    disk = SimulatedDisk({"data": None})
    if boot.time_namespace == 99:
        boot = attrs.evolve(disk.boot(), time_namespace=99)
    with open_registry("/data", fs=disk) as registry:
        registry.create("/a", b"x")
        before = disk.files()
        with pytest.raises(
            InvalidConfigError, match="another machine or another time namespace"
        ):
            open_registry("/data", fs=Elsewhere(disk, boot))
        assert disk.files() == before
    with open_registry(
        "/data", fs=Elsewhere(disk, boot)
    ) as registry:  # the other session has ended
        assert registry.get("/a").value == b"x"


def test_domain_is_the_first_path_element_or_a_group() -> None:
    domain_of = Layout().domain_of
    assert domain_of(("controller",)) == "controller"
    assert domain_of(("brokers", "ids", "1")) == "brokers"
    assert domain_of(("consumers",)) == "consumers"
    assert (
        domain_of(("consumers", "g", "ids", "c"))
        == domain_of(("consumers", "g"))
        == "consumers/g"
    )
    assert 0 <= domain_byte("consumers/g") < 1 << 62
    assert domain_byte("consumers/g") != domain_byte("consumers/h")


@pytest.mark.long
def test_cleaning_never_expires_a_live_session() -> None:
    for seed in range(40):
        machine = Machine(
            SimulatedDisk({"data": None}, seed=seed),
            seed=seed,
            chances=Chances(switch=0.5),
        )

        def live(fs: SharedFS) -> None:
            for _ in range(3):
                with open_registry("/data", fs=fs) as registry:
                    registry.create("/e/" + registry.session.id, ephemeral=True)
                    registry.get("/e/" + registry.session.id)

        def clean(fs: SharedFS) -> None:
            with open_registry("/data", fs=fs) as registry:
                for _ in range(6):
                    registry.clean()

        machine.start(live)
        machine.start(clean)
        machine.run()


class Reports:
    """A watch that returns the given reports."""

    def __init__(self, reports: list[bool]) -> None:
        self.reports = reports
        self.saw_close = False
        self.saw_removal = False

    def wait(self, timeout: float | None) -> bool:
        self.saw_close = bool(self.reports)
        return self.reports.pop() if self.reports else False

    def fileno(self) -> int:
        return 5

    def close(self) -> None:
        pass


class WatchedDisk(SimulatedDisk):
    watched: tuple[str, ...] = ()

    def watch(self, *directories: str, closing: object = ()) -> DirectoryWatch:
        self.watched = directories
        return Reports([True])


def test_nearest_existing_parent_of_a_missing_directory_is_watched() -> None:
    disk = WatchedDisk({"data": None})
    with open_registry("/data", fs=disk) as registry:
        watch = registry.watch(["/x/y/z"], children=["/x"])
        assert disk.watched == ("/data.registry",)
        registry.create("/x/y/other")
        assert watch.wait(0)
        assert disk.watched == ("/data.registry/x", "/data.registry/x/y")


def test_the_end_of_a_session_is_reported_again_while_its_lock_may_be_held() -> None:
    disk = WatchedDisk({"data": None})
    with open_registry("/data", fs=disk) as registry:
        watch = registry.watch(["/e"])
        assert watch.wait(0)
        reported = []
        for at in range(200):
            disk.advance(1)
            if watch.wait(0):
                reported.append(at + 1)
        assert reported == [1, 3, 7, 15, 31, 63, 127]


@pytest.mark.long
@pytest.mark.parametrize("stay", [False, True], ids=["left", "stay"])
def test_session_in_more_domains_than_its_record_holds(
    stay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session record kept every domain, so a process could not join another group
    after 1,334 groups.
    """
    monkeypatch.setattr("logcore.registry.sessions._CAPACITY", 4096)
    disk = SimulatedDisk({"data": None})
    registry = open_registry("/data", fs=disk, max_poll_interval_ms=INTERVAL_MS)
    with open_registry("/data", fs=disk) as other:
        registry.create("/consumers/kept/ids/a", ephemeral=True)
        for number in range(300):
            registry.create(f"/consumers/group-{number}/ids/a", ephemeral=True)
            registry.poll()
            if not stay:
                registry.delete(f"/consumers/group-{number}/ids/a")
        registry.create("/consumers/last/ids/a", ephemeral=True)
        [facts] = [
            info.record for info in other.sessions() if info.id == registry.session.id
        ]
        assert facts is not None and facts.polls == 300
        assert (facts.domains is None) == stay
        other.expire(registry.session.id)
        nodes = [
            name
            for name in other.children("/consumers")
            if other.children(f"/consumers/{name}/ids")
        ]
        assert nodes == []
        assert [file for file in disk.files() if file.endswith("/ids/a.node")] == []
    registry.close()
