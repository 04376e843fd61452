"""Values of the registry nodes of a cluster, and the controller's writes."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from logcore import LogConfig
from logcore.errors import (
    BadVersionError,
    CorruptRegistryError,
    DiskFullError,
    NodeNotFoundError,
)
from logcore.registry import FileRegistry, open_registry, paths
from logcore.replication.state import (
    InSyncReplica,
    LeaderAndIsr,
    pack_state,
    unpack_state,
)
from netshim.cluster import registry_nodes
from netshim.cluster.controller import review_cluster, write_state
from netshim.cluster.registry_nodes import (
    DELETED,
    WHOLE_TOPIC,
    BrokerNode,
    PublishedChanges,
    TopicNode,
)
from netshim.cluster.view import ClusterView, StoredState, TopicOfCluster

ID = uuid.UUID(int=5)
BROKERS = {
    number: BrokerNode(10 + number, f"disk-{number}", "127.0.0.1", 9000 + number)
    for number in (1, 2, 3)
}


def test_a_broker_is_packed_and_unpacked() -> None:
    node = BrokerNode(3, "d", "::1", 9092, "rack-a", is_leaving=True, was_clean=True)
    assert registry_nodes.unpack_broker(registry_nodes.pack_broker(node), "/p") == node
    assert node.live.epoch == 3
    assert node.live.rack == "rack-a"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"version":5}',
        registry_nodes.pack_broker(BROKERS[1]).replace(b'"port":9001', b'"port":true'),
        registry_nodes.pack_broker(BROKERS[1]).replace(b'"version":5', b'"version":6'),
    ],
)
def test_a_damaged_broker_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptRegistryError):
        registry_nodes.unpack_broker(data, "/brokers/ids/1")


def test_a_topic_is_packed_and_unpacked() -> None:
    node = TopicNode(ID, {0: (1, 2), 1: (2, 3)})
    assert registry_nodes.unpack_topic(registry_nodes.pack_topic(node), "/p") == node


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"version":2', b'"version":3'),
        (b'"0":[1,2]', b'"0":[]'),
        (b'"0":[1,2]', b'"0":[1,1]'),
        (b'"0":[1,2]', b'"7":[1,2]'),
        (b'"0":[1,2]', b'"0":["1",2]'),
        (str(ID).encode(), b"no id"),
        (b'"partitions":{', b'"partition":{'),
    ],
)
def test_a_damaged_topic_is_refused(old: bytes, new: bytes) -> None:
    data = registry_nodes.pack_topic(TopicNode(ID, {0: (1, 2)}))
    assert old in data
    with pytest.raises(CorruptRegistryError):
        registry_nodes.unpack_topic(data.replace(old, new), "/brokers/topics/t")


def test_partitions_are_added_to_the_topic_that_they_were_placed_for() -> None:
    known = TopicNode(ID, {0: (1, 2)})
    data = registry_nodes.add_partitions(
        registry_nodes.pack_topic(known), "/p", known, {1: (2, 3)}
    )
    assert registry_nodes.unpack_topic(data, "/p") == TopicNode(
        ID, {0: (1, 2), 1: (2, 3)}
    )


@pytest.mark.parametrize(
    "stored_topic",
    [
        None,
        TopicNode(uuid.uuid4(), {0: (1, 2)}),  # deleted and created again
        TopicNode(ID, {0: (1, 2), 1: (1,)}),
    ],
)
def test_no_partitions_are_added_to_another_topic(
    stored_topic: TopicNode | None,
) -> None:
    data = None if stored_topic is None else registry_nodes.pack_topic(stored_topic)
    with pytest.raises(BadVersionError):
        registry_nodes.add_partitions(
            data, "/p", TopicNode(ID, {0: (1, 2)}), {1: (2, 3)}
        )


def test_published_changes_since_a_number() -> None:
    published = (
        PublishedChanges().with_changes([("t", 0), ("t", 1)]).with_changes([("u", -1)])
    )
    published = registry_nodes.unpack_changes(
        registry_nodes.pack_changes(published), "/p"
    )
    assert published.last == 3
    assert published.since(3) == set()
    assert published.since(1) == {("t", 1), ("u", -1)}
    assert published.since(0) == {("t", 0), ("t", 1), ("u", -1)}


def test_reader_that_missed_too_many_changes_reads_all() -> None:
    published = PublishedChanges().with_changes([(str(ID), DELETED)])
    assert published.deleted_ids == {str(ID)}
    published = PublishedChanges().with_changes(
        [("t", n) for n in range(registry_nodes.MAX_CHANGES + 5)]
    )
    assert published.since(3) is None
    assert published.since(-1) is None
    assert published.since(6) is not None


def test_damaged_list_of_changes_is_refused() -> None:
    with pytest.raises(CorruptRegistryError):
        registry_nodes.unpack_changes(b'{"n":1,"recent":[[1]]}', "/p")


# -- the controller --------------------------------------------------------------------


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FileRegistry]:
    with open_registry(tmp_path / "c", topics="truth") as opened:
        yield opened


def put_topic(registry: FileRegistry, name: str, node: TopicNode) -> None:
    registry.create(paths.topic_config(name), paths.pack_config({}))
    registry.create(paths.topic(name), registry_nodes.pack_topic(node))


def read_view(registry: FileRegistry, brokers: Any = None) -> ClusterView:
    """Read the registry as a member does."""
    topics, states = {}, {}
    for name in registry.children(paths.TOPICS):
        stored_node = registry.get(paths.topic(name))
        node = registry_nodes.unpack_topic(stored_node.value, name)
        config = LogConfig.parse({"min.insync.replicas": 2})
        topics[name] = TopicOfCluster(node, {}, config)
        for number in registry.children(registry_nodes.partitions_path(name)):
            path = registry_nodes.state_path(name, int(number), node.topic_id)
            with contextlib.suppress(NodeNotFoundError):
                stored = registry.get(path)
                states[name, int(number)] = StoredState(
                    unpack_state(stored.value, path), stored.version, path
                )
    return ClusterView(
        brokers=BROKERS if brokers is None else brokers,
        known_brokers=frozenset(BROKERS),
        topics=topics,
        states=states,
        deletions=frozenset(registry.children(registry_nodes.DELETIONS)),
    )


def review(registry: FileRegistry, brokers: Any = None) -> list[Any]:
    view = read_view(registry, brokers)
    return list(review_cluster(registry, view, 4, waits_for_disk=True))


def test_the_controller_creates_the_states_of_a_new_topic(
    registry: FileRegistry,
) -> None:
    put_topic(registry, "t", TopicNode(ID, {0: (1, 2), 1: (2, 3)}))
    assert review(registry) == [("t", 0), ("t", 1)]
    state = read_view(registry).states["t", 1].state
    assert state.leader == 2
    assert state.controller_epoch == 4
    assert review(registry) == []


def test_controller_replaces_a_dead_leader(registry: FileRegistry) -> None:
    put_topic(registry, "t", TopicNode(ID, {0: (1, 2, 3)}))
    review(registry)
    left = {number: BROKERS[number] for number in (2, 3)}
    assert review(registry, left) == [("t", 0)]
    state = read_view(registry).states["t", 0].state
    assert state.leader == 2
    assert state.leader_epoch == 1
    assert set(state.isr) == {2, 3}


def test_a_decision_from_an_old_view_writes_nothing(registry: FileRegistry) -> None:
    put_topic(registry, "t", TopicNode(ID, {0: (1, 2, 3)}))
    review(registry)
    old = read_view(registry, {2: BROKERS[2], 3: BROKERS[3]})
    path = registry_nodes.state_path("t", 0, ID)
    newer = attrs.evolve(old.states["t", 0].state, leader_epoch=9)
    registry.set(path, pack_state(newer))
    # The partition is reported, so that its node is read again.
    assert list(review_cluster(registry, old, 4, waits_for_disk=True)) == [
        ("t", WHOLE_TOPIC)
    ]
    assert unpack_state(registry.get(path).value, path).leader_epoch == 9


def test_states_that_were_written_before_an_error_are_reported(
    registry: FileRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the report, a new leader would receive its role only after minutes."""
    put_topic(registry, "t", TopicNode(ID, {0: (1,), 1: (2,), 2: (3,)}))
    create = FileRegistry.create

    def fail(self: FileRegistry, path: str, *given: Any, **named: Any) -> int:
        if path == registry_nodes.state_path("t", 1, ID):
            raise DiskFullError("no space left")
        return create(self, path, *given, **named)

    monkeypatch.setattr(FileRegistry, "create", fail)
    changes = []
    with pytest.raises(DiskFullError):
        for change in review_cluster(
            registry, read_view(registry), 4, waits_for_disk=True
        ):
            changes.append(change)
    assert ("t", 0) in changes
    assert read_view(registry).states.keys() == {("t", 0)}


def test_the_state_of_a_deleted_topic_is_not_created_again(
    registry: FileRegistry,
) -> None:
    put_topic(registry, "t", TopicNode(ID, {0: (1,), 1: (2,)}))
    review(registry)
    registry.create(paths.deletion("t"))
    assert review(registry) == [(str(ID), DELETED), ("t", WHOLE_TOPIC)]
    assert registry.children(paths.TOPICS) == []
    assert registry.children(paths.TOPIC_CONFIGS) == []
    assert registry.children(registry_nodes.DELETIONS) == []


@pytest.mark.parametrize("step", range(6))
def test_the_next_controller_completes_a_deletion(
    registry: FileRegistry, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_topic(registry, "t", TopicNode(ID, {0: (1,)}))
    review(registry)
    registry.create(paths.deletion("t"))
    deletions = 0
    delete = FileRegistry.delete

    def failing(self: FileRegistry, path: str, *, version: int = -1) -> None:
        nonlocal deletions
        deletions += 1
        if deletions > step:
            raise KeyboardInterrupt  # the controller is killed
        delete(self, path, version=version)

    with monkeypatch.context() as patch:
        patch.setattr(FileRegistry, "delete", failing)
        with pytest.raises(KeyboardInterrupt):
            review(registry)
    assert registry.children(registry_nodes.DELETIONS) == ["t"]
    review(registry)
    assert registry.children(paths.TOPICS) == []
    assert registry.children(registry_nodes.DELETIONS) == []


def test_a_reassignment_is_finished_once_the_target_is_in_sync(
    registry: FileRegistry,
) -> None:
    put_topic(registry, "t", TopicNode(ID, {0: (1, 2)}))
    isr = {n: InSyncReplica(BROKERS[n].epoch, BROKERS[n].disk) for n in (2, 3)}
    state = LeaderAndIsr(2, 5, isr, (2, 3, 1), adding=(3,), removing=(1,))
    registry.create(registry_nodes.state_path("t", 0, ID), pack_state(state))
    assert review(registry) == [("t", 0)]
    view = read_view(registry)
    finished = view.states["t", 0].state
    assert (finished.replicas, finished.adding, finished.removing) == ((2, 3), (), ())
    assert view.replicas_of(("t", 0)) == (2, 3)


def test_late_write_for_a_deleted_topic_does_not_change_the_next_topic(
    registry: FileRegistry,
) -> None:
    """Both states have the same version, because the first write creates the node."""
    put_topic(registry, "t", TopicNode(ID, {0: (1, 2)}))
    review(registry)
    late = read_view(registry).states["t", 0]
    registry.create(paths.deletion("t"))
    review(registry)
    put_topic(registry, "t", TopicNode(uuid.uuid4(), {0: (3,)}))
    review(registry)
    assert read_view(registry).states["t", 0].version == late.version
    with pytest.raises(NodeNotFoundError):
        write_state(registry, late)
    assert read_view(registry).states["t", 0].state.leader == 3


def test_damaged_state_is_not_replaced(registry: FileRegistry) -> None:
    put_topic(registry, "t", TopicNode(ID, {0: (1,), 1: (2,)}))
    view = attrs.evolve(read_view(registry), damaged=frozenset({("t", 0)}))
    assert list(review_cluster(registry, view, 4, waits_for_disk=True)) == [("t", 1)]
