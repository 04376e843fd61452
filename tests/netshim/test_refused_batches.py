"""Batches that are out of order because an earlier one was refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logcore import NotLeaderError, recordbatch
from logcore.config import INT32_MAX
from logcore.errors import NotEnoughReplicasError
from logcore.partition.producers import KNOWN_BATCHES
from netshim import wire
from netshim.leadership import SoleLeadership
from netshim.refused_batches import RefusedBatches
from netshim.wire import codes
from support.conformance import build
from support.group_harness import T0, GroupHarness

KEY = ("t", 0)


class ChangingLeadership(SoleLeadership):
    """A broker of a cluster whose role the test changes."""

    is_clustered = True

    def __init__(self, state: Any) -> None:
        super().__init__(state.fetches, state.syncs)
        self.refusal: type[Exception] | None = None

    def check_leader(self, key: Any) -> None:
        if self.refusal is NotLeaderError:
            raise NotLeaderError("another broker leads this partition, or none")

    def check_in_sync(self, key: Any) -> None:
        if self.refusal is NotEnoughReplicasError:
            raise NotEnoughReplicasError("too few replicas are in sync")


@pytest.fixture
def clustered(tmp_path: Path) -> Iterator[tuple[GroupHarness, ChangingLeadership]]:
    with GroupHarness(tmp_path / "data") as group_harness:
        group_harness.logdir.create_topic("t")
        group_harness.logdir.partition("t", 0)
        leadership = ChangingLeadership(group_harness.state)
        group_harness.state.leadership = leadership
        group_harness.state.logs.check_leader = leadership.check_leader
        yield group_harness, leadership


def produce(
    group_harness: GroupHarness, sequence: int, epoch: int = 0
) -> tuple[int, int]:
    """Send a batch of producer 5, and return the code and the offset."""
    records = recordbatch.encode(
        [(b"k", b"v", (), T0)],
        producer_id=5,
        producer_epoch=epoch,
        base_sequence=sequence,
    )
    part = {"index": 0, "records": records}
    asked = {
        "acks": -1,
        "timeout_ms": 1_000,
        "topic_data": [{"name": "t", "partition_data": [part]}],
    }
    request = build(wire.PRODUCE.request.schema, asked)
    pending = group_harness.send(wire.PRODUCE, 9, request)
    result = pending.value.responses[0].partition_responses[0]
    return result.error_code, result.base_offset


@pytest.mark.parametrize("stored", [0, 1], ids=["new-producer", "known-producer"])
@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (NotLeaderError, codes.NOT_LEADER_OR_FOLLOWER),
        (NotEnoughReplicasError, codes.NOT_ENOUGH_REPLICAS),
    ],
)
def test_batches_after_a_refused_batch_are_not_out_of_order(
    clustered: tuple[GroupHarness, ChangingLeadership],
    refusal: type[Exception],
    code: int,
    stored: int,
) -> None:
    """For OUT_OF_ORDER_SEQUENCE_NUMBER, librdkafka sends unanswered batches again in a
    new epoch, and those that were stored already are then stored twice.
    """
    group_harness, leadership = clustered
    if stored:
        assert produce(group_harness, 0) == (codes.NONE, 0)
    leadership.refusal = refusal
    assert produce(group_harness, stored)[0] == code
    leadership.refusal = None
    in_flight = range(stored, stored + KNOWN_BATCHES)
    assert [produce(group_harness, each)[0] for each in in_flight[1:]] == [code] * 4
    assert [produce(group_harness, each) for each in in_flight] == [
        (codes.NONE, each) for each in in_flight
    ]


def test_copy_of_a_refused_batch_does_not_change_the_code_of_those_in_flight(
    clustered: tuple[GroupHarness, ChangingLeadership],
) -> None:
    """A copy on an earlier connection may be stored between two batches in flight. The
    batches before them were refused, so those after it are not out of order.
    """
    group_harness, leadership = clustered
    assert produce(group_harness, 0) == (codes.NONE, 0)
    leadership.refusal = NotEnoughReplicasError
    assert produce(group_harness, 1)[0] == codes.NOT_ENOUGH_REPLICAS
    leadership.refusal = None
    assert produce(group_harness, 2)[0] == codes.NOT_ENOUGH_REPLICAS
    assert produce(group_harness, 1) == (codes.NONE, 1)
    assert produce(group_harness, 3)[0] == codes.NOT_ENOUGH_REPLICAS
    assert [produce(group_harness, each) for each in (1, 2, 3)] == [
        (codes.NONE, each) for each in (1, 2, 3)
    ]


def test_batch_that_is_missing_for_long_is_out_of_order(
    clustered: tuple[GroupHarness, ChangingLeadership],
) -> None:
    """A client that gave up the refused batch gets OUT_OF_ORDER_SEQUENCE_NUMBER, so
    that it begins a new epoch.
    """
    group_harness, leadership = clustered
    assert produce(group_harness, 0) == (codes.NONE, 0)
    leadership.refusal = NotLeaderError
    assert produce(group_harness, 1)[0] == codes.NOT_LEADER_OR_FOLLOWER
    leadership.refusal = None
    error_codes = [produce(group_harness, 2)[0] for _ in range(KNOWN_BATCHES)]
    assert error_codes == [codes.NOT_LEADER_OR_FOLLOWER] * 4 + [
        codes.OUT_OF_ORDER_SEQUENCE_NUMBER
    ]
    assert produce(group_harness, 0, epoch=1) == (codes.NONE, 1)


def test_refused_batch_is_removed_by_time_or_a_new_epoch() -> None:
    refused = RefusedBatches()
    refused.add(KEY, 5, 0, 7, codes.NOT_LEADER_OR_FOLLOWER, 0)
    assert refused.code_for(KEY, 6, 0, 8, 0) == codes.NONE
    assert refused.code_for(("t", 1), 5, 0, 8, 0) == codes.NONE
    assert refused.code_for(KEY, 5, 0, 6, 0) == codes.NONE  # a late batch
    assert refused.code_for(KEY, 5, 0, 8, 0) == codes.NOT_LEADER_OR_FOLLOWER
    assert refused.code_for(KEY, 5, 1, 0, 0) == codes.NONE
    assert not refused
    refused.add(KEY, 5, 0, 7, codes.NOT_LEADER_OR_FOLLOWER, 0)
    assert refused.code_for(KEY, 5, 0, 8, 30_000) == codes.NONE
    assert not refused


def test_refused_batch_of_a_producer_that_ended_is_removed_by_time() -> None:
    """While there are refused batches, no producer uses the fast path."""
    refused = RefusedBatches()
    refused.add(KEY, 5, 0, 7, codes.NOT_LEADER_OR_FOLLOWER, 0)
    refused.add(KEY, 6, 0, 7, codes.NOT_LEADER_OR_FOLLOWER, 1)
    refused.add(KEY, 5, 0, 8, codes.NOT_LEADER_OR_FOLLOWER, 20_000)
    assert refused.code_for(KEY, 7, 0, 0, 30_001) == codes.NONE
    assert len(refused) == 1
    assert refused.code_for(KEY, 7, 0, 0, 50_000) == codes.NONE
    assert not refused


def test_sequence_0_follows_the_largest_sequence() -> None:
    refused = RefusedBatches()
    refused.add(KEY, 5, 0, INT32_MAX, codes.NOT_ENOUGH_REPLICAS, 0)
    assert refused.code_for(KEY, 5, 0, 0, 0) == codes.NOT_ENOUGH_REPLICAS
    assert refused.code_for(KEY, 5, 0, INT32_MAX, 0) == codes.NONE


def test_memory_for_refused_batches_is_bounded() -> None:
    refused = RefusedBatches()
    for producer_id in range(1_500):
        refused.add(KEY, producer_id, 0, 0, codes.NOT_LEADER_OR_FOLLOWER, 0)
    assert len(refused) == 1_000
    assert refused.code_for(KEY, 0, 0, 1, 0) == codes.NONE
    assert refused.code_for(KEY, 1_499, 0, 1, 0) == codes.NOT_LEADER_OR_FOLLOWER
