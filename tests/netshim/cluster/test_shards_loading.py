"""A coordinator of a cluster loads its partition: when, and without which offsets."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logcore import LogConfig, LogcoreError, LogDir, NotLeaderError
from logcore.coordination.group_requests import Committer, GroupError
from logcore.errors import NodeNotFoundError
from logcore.format.group_records import Committed, commit_key, commit_value
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from logcore.registry import open_registry, paths
from netshim.cluster.registry_nodes import TopicNode, pack_topic
from netshim.cluster.shards import GroupShards
from netshim.cluster.view import ClusterView, TopicOfCluster
from netshim.groups import BrokerGroups
from netshim.leadership import SoleLeadership
from netshim.transactions import TransactionHost
from support.broker_harness import BrokerHarness


class HeldLeadership(SoleLeadership):
    """A leader whose records are committed by the test."""

    def __init__(self, state: Any) -> None:
        super().__init__(state.fetches, state.syncs)
        self.waiting: list[tuple[int, Callable[[LogcoreError | None], None]]] = []

    def when_committed(
        self, key: Any, log: Any, end: int, done: Any, _: Any = None
    ) -> None:
        self.waiting.append((end, done))


@pytest.fixture(params=["groups", "transactions"])
def loading(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a coordinator, its leadership, and the list of its reads."""
    broker_harness = BrokerHarness(tmp_path / "data")
    topic = OFFSETS_TOPIC if request.param == "groups" else TRANSACTIONS_TOPIC
    broker_harness.logdir.create_topic(topic)
    broker_harness.logdir.append(topic, b"1", partition=0)
    state = broker_harness.broker.state
    held = HeldLeadership(state)
    state.leadership = held
    host: Any = (
        BrokerGroups(state, only=0)
        if request.param == "groups"
        else TransactionHost(state, only=0)
    )
    reads: list[int] = []
    host._read = lambda: reads.append(1) or []
    yield host, held, reads
    broker_harness.logdir.close()


def test_partition_is_read_once_its_records_are_committed(loading: Any) -> None:
    """A coordinator that read its partition too early did not see the records that were
    not committed yet, and reported an older offset than the acknowledged offset.
    """
    host, held, reads = loading
    outcomes: list[bool] = []
    host.load(0, outcomes.append)
    ((end, committed),) = held.waiting
    assert (end, reads, outcomes) == (1, [], [])
    assert not host.is_loaded
    committed(None)
    assert (reads, outcomes, host.is_loaded) == ([1], [True], True)


def test_partition_that_is_led_elsewhere_is_not_read(loading: Any) -> None:
    host, held, reads = loading
    outcomes: list[bool] = []
    host.load(0, outcomes.append)
    held.waiting[0][1](NotLeaderError("another broker leads"))
    assert (reads, outcomes, host.is_loaded) == ([], [False], False)


def store_commit(logdir: LogDir, topic: str, topic_id: bytes = b"") -> None:
    logdir.append(
        OFFSETS_TOPIC,
        commit_value(Committed(42, -1, "", 5, topic_id=topic_id)),
        key=commit_key("g", topic, 0),
        partition=0,
    )


def view_of(
    ids: Mapping[str, uuid.UUID], deleted: Iterable[uuid.UUID] = ()
) -> ClusterView:
    return ClusterView(
        topics={
            name: TopicOfCluster(TopicNode(topic_id, {0: (1,)}), {}, LogConfig())
            for name, topic_id in ids.items()
        },
        deleted_ids=frozenset(map(str, deleted)),
    )


def test_offsets_of_former_topics_are_deleted_after_a_load(tmp_path: Path) -> None:
    """The coordinator of a group crashed before it deleted the offsets of a deleted
    topic. The next coordinator used these offsets for a new topic of the same name.
    """
    ids = {
        name: uuid.UUID(int=number)
        for number, name in enumerate(
            ("recreated", "deleted", "present", "lost", "newer"), 1
        )
    }
    # The view is older than the offset of topic "newer": the view contains an earlier
    # topic of that name.
    current_ids = {name: ids[name] for name in ("present", "newer")}
    view_ids = {**current_ids, "newer": uuid.UUID(int=8)}
    current_ids["recreated"] = view_ids["recreated"] = uuid.UUID(int=9)
    view = view_of(view_ids, deleted=[ids["deleted"]])
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.logdir.create_topic(OFFSETS_TOPIC)
    for name, topic_id in ids.items():
        store_commit(broker_harness.logdir, name, topic_id.bytes)
    store_commit(broker_harness.logdir, "without id")
    with open_registry(tmp_path / "registry", topics="truth") as registry:
        for name, topic_id in current_ids.items():
            node = pack_topic(TopicNode(topic_id, {0: (1,)}))
            registry.create(paths.topic(name), node)
        member: Any = SimpleNamespace(has_lease=True, view=view, registry=registry)
        groups = GroupShards(broker_harness.broker.state, member, lambda: "id")
        groups.apply_view(view)
        groups.shards.lead((OFFSETS_TOPIC, 0))
    group = groups.get("g")
    assert group is not None
    assert {*group.offsets} == {"present", "lost", "newer", "without id"}
    tombstones = [
        record.key
        for record in broker_harness.logdir.read(OFFSETS_TOPIC)
        if record.value is None
    ]
    assert sorted(tombstones) == [
        commit_key("g", name, 0) for name in ("deleted", "recreated")
    ]
    # A commit contains the id of the topic in the view.
    errors: list[Any] = []
    groups.request_commit(
        Committer("g", -1, "", None),
        {("present", 0): Committed(7, -1, "", 6)},
        errors.append,
    )
    *_, commit = broker_harness.logdir.read(OFFSETS_TOPIC)
    assert commit.value == commit_value(
        Committed(7, -1, "", 6, topic_id=ids["present"].bytes)
    )
    broker_harness.logdir.close()


def test_topic_deleted_during_a_load_loses_its_offsets(tmp_path: Path) -> None:
    """The deletion reached only loaded coordinators, so a new topic of that name
    inherited the offsets, and its consumers skipped its first records.
    """
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.logdir.create_topic(OFFSETS_TOPIC)
    for topic in ("deleted", "kept"):
        store_commit(broker_harness.logdir, topic)
    state = broker_harness.broker.state
    held = HeldLeadership(state)
    state.leadership = held
    member: Any = SimpleNamespace(has_lease=True, view=ClusterView(), registry=None)
    groups = GroupShards(state, member, lambda: "id")
    groups.shards.lead((OFFSETS_TOPIC, 0))
    errors: list[Any] = []
    groups.topics_deleted({"deleted"}, 0, errors.append)
    assert errors == [None], "a deletion does not wait for the load"
    # ListGroups omitted the groups of partitions that are being loaded.
    listed = partial(groups.when_groups_loaded, lambda: None, lambda error: error, 0)
    assert listed() is GroupError.COORDINATOR_LOAD_IN_PROGRESS
    held.waiting.pop()[1](None)
    assert listed() is None
    group = groups.get("g")
    assert group is not None
    assert [*group.offsets] == ["kept"]
    *_, tombstone = broker_harness.logdir.read(OFFSETS_TOPIC)
    assert (tombstone.key, tombstone.value) == (commit_key("g", "deleted", 0), None)
    broker_harness.logdir.close()


def test_offsets_of_topics_that_left_the_view_are_deleted(tmp_path: Path) -> None:
    """Deletions were found by comparing the replicas of this broker. A topic without
    replicas here, or deleted before they were created, kept its offsets, and a later
    report deleted the offsets of the next topic with its name.
    """
    names = ("deleted", "recreated", "newer", "lost", "returned", "present")
    ids = {name: uuid.UUID(int=number) for number, name in enumerate(names, 1)}
    next_ids = {"recreated": uuid.UUID(int=11), "newer": uuid.UUID(int=12)}
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.logdir.create_topic(OFFSETS_TOPIC)
    for name, topic_id in {**ids, "newer": next_ids["newer"]}.items():
        store_commit(broker_harness.logdir, name, topic_id.bytes)
    registry: Any = SimpleNamespace(sync=lambda: None, get=missing_node)
    member: Any = SimpleNamespace(has_lease=True, view=view_of(ids), registry=registry)
    groups = GroupShards(broker_harness.broker.state, member, lambda: "id")
    groups.apply_view(view_of(ids))
    groups.shards.lead((OFFSETS_TOPIC, 0))

    def topics_with_offsets() -> set[str]:
        group = groups.get("g")
        assert group is not None
        return {*group.offsets}

    assert topics_with_offsets() == {*names}
    kept = {"present": ids["present"]}
    groups.apply_view(view_of({**kept, **next_ids}, deleted=[ids["deleted"]]))
    assert topics_with_offsets() == {"newer", "lost", "returned", "present"}
    # The deletion of a missing topic may be published later.
    groups.apply_view(
        view_of(
            {**kept, **next_ids, "returned": ids["returned"]}, deleted=[ids["lost"]]
        )
    )
    assert topics_with_offsets() == {"newer", "returned", "present"}
    # The client that deleted the topic reports it late: it was created again.
    member.view = view_of(next_ids)
    errors: list[Any] = []
    groups.topics_deleted({"newer", "present"}, 0, errors.append)
    assert (topics_with_offsets(), errors) == ({"newer", "returned"}, [None])
    broker_harness.logdir.close()


def missing_node(path: str) -> Any:
    raise NodeNotFoundError("no such node", path=path)


def test_commit_has_the_topic_id_of_the_applied_view(tmp_path: Path) -> None:
    """The view of the member may contain the next topic of a name already. Its offsets
    would be deleted with the offsets of the former topic.
    """
    former, current, new = (uuid.UUID(int=number) for number in (1, 2, 3))
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.logdir.create_topic(OFFSETS_TOPIC)
    registry: Any = SimpleNamespace(sync=lambda: None, get=missing_node)
    member: Any = SimpleNamespace(
        has_lease=True, view=view_of({"t": former}), registry=registry
    )
    groups = GroupShards(broker_harness.broker.state, member, lambda: "id")
    groups.apply_view(member.view)
    groups.shards.lead((OFFSETS_TOPIC, 0))
    member.view = view_of({"t": current, "new": new})
    for name in ("t", "new"):
        groups.request_commit(
            Committer("g", -1, "", None), {(name, 0): Committed(7, -1, "", 6)}, list
        )
    stored = [record.value for record in broker_harness.logdir.read(OFFSETS_TOPIC)]
    assert stored == [
        commit_value(Committed(7, -1, "", 6, topic_id=topic_id.bytes))
        for topic_id in (former, new)
    ]
    broker_harness.logdir.close()
