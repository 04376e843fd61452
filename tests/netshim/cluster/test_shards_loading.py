"""A coordinator of a cluster reads its partition once the records are committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logcore import LogcoreError, NotLeaderError
from logcore.format.group_records import Committed, commit_key, commit_value
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from netshim.cluster.shards import GroupShards
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
    found: list[bool] = []
    host.load(0, found.append)
    ((end, committed),) = held.waiting
    assert (end, reads, found) == (1, [], [])
    assert not host.is_loaded
    committed(None)
    assert (reads, found, host.is_loaded) == ([1], [True], True)


def test_partition_that_is_led_elsewhere_is_not_read(loading: Any) -> None:
    host, held, reads = loading
    found: list[bool] = []
    host.load(0, found.append)
    held.waiting[0][1](NotLeaderError("another broker leads"))
    assert (reads, found, host.is_loaded) == ([], [False], False)


def test_topic_deleted_during_a_load_loses_its_offsets(tmp_path: Path) -> None:
    """The deletion reached only loaded coordinators, so a new topic of that name
    inherited the offsets, and its consumers skipped its first records.
    """
    broker_harness = BrokerHarness(tmp_path / "data")
    broker_harness.logdir.create_topic(OFFSETS_TOPIC)
    for topic in ("deleted", "kept"):
        broker_harness.logdir.append(
            OFFSETS_TOPIC,
            commit_value(Committed(42, -1, "", 5)),
            key=commit_key("g", topic, 0),
            partition=0,
        )
    state = broker_harness.broker.state
    held = HeldLeadership(state)
    state.leadership = held
    member: Any = SimpleNamespace(has_lease=True)
    groups = GroupShards(state, member, lambda: "id")
    groups.shards.lead((OFFSETS_TOPIC, 0))
    errors: list[Any] = []
    groups.topics_deleted({"deleted"}, 0, errors.append)
    assert errors == [None], "a deletion does not wait for the load"
    held.waiting.pop()[1](None)
    group = groups.get("g")
    assert group is not None
    assert [*group.offsets] == ["kept"]
    *_, tombstone = broker_harness.logdir.read(OFFSETS_TOPIC)
    assert (tombstone.key, tombstone.value) == (commit_key("g", "deleted", 0), None)
    broker_harness.logdir.close()
