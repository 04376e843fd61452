"""A power cut at each change that transactions make to the directory of a broker.

Goal: the next broker runs without clients until every open transaction has timed out.
Then it shows each transaction whole or not at all, with its offsets; no transaction
remains open, and none that was answered as committed is lost. Method:
logcore.testing.explore over the directory of a broker without sockets, whose requests
pass through their wire forms.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from typing import Any

import pytest

from logcore import LogcoreError
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk, explore
from logcore.testing.faults import Fault, FaultPlan
from netshim import wire
from support.simulated_disk_broker import SimulatedDiskBroker


class ProducerHistory:
    """A producer that writes a number to two partitions, with an offset of the same
    number, in each turn.

    version: the version of the transaction protocol. The transactions of turns 2, 6, 10
    and so on are aborted.
    """

    def __init__(
        self,
        version: int,
        turns: tuple[int, ...] = (1, 2, 3),
        durability: str = "group",
    ) -> None:
        self.version = version
        self.turns = turns
        self.durability = durability

    def begin(self, disk: SimulatedDisk) -> SimulatedDiskBroker:
        return SimulatedDiskBroker(disk, disk.now_ms(), self.durability)

    def run_history(self, disk: SimulatedDisk, promise: Any) -> None:
        broker_harness = self.begin(disk)
        for name, count in (("t", 2), ("in", 1)):
            if name not in broker_harness.logdir:
                broker_harness.logdir.create_topic(name, count)
        initialized = broker_harness.ask(
            wire.INIT_PRODUCER_ID,
            4,
            transactional_id="x",
            transaction_timeout_ms=60_000,
        )
        assert initialized.error_code == 0
        owner = (initialized.producer_id, initialized.producer_epoch)
        sequence = 0
        for turn in self.turns:
            self.write(broker_harness, owner, turn, sequence)
            sequence += 1
            commit = turn % 4 != 2
            if commit:
                promise(("requested", turn))
            end = broker_harness.ask(
                wire.END_TXN,
                5 if self.version == 2 else 3,
                transactional_id="x",
                producer_id=owner[0],
                producer_epoch=owner[1],
                committed=commit,
            )
            assert end.error_code == 0
            if commit:
                promise(("acknowledged", turn))
            if self.version == 2:
                owner = (end.producer_id, end.producer_epoch)
                sequence = 0
        broker_harness.stop()

    def write(
        self,
        broker_harness: SimulatedDiskBroker,
        owner: tuple[int, int],
        turn: int,
        sequence: int,
    ) -> None:
        fields = {
            "transactional_id": "x",
            "producer_id": owner[0],
            "producer_epoch": owner[1],
        }
        if self.version == 1:
            topic_type = wire.ADD_PARTITIONS_TO_TXN.Request.Topic
            added = broker_harness.ask(
                wire.ADD_PARTITIONS_TO_TXN,
                3,
                v3_and_below_transactional_id="x",
                v3_and_below_producer_id=owner[0],
                v3_and_below_producer_epoch=owner[1],
                v3_and_below_topics=[topic_type(name="t", partitions=[0, 1])],
            )
            assert {
                part.partition_error_code
                for part in added.results_by_topic_v3_and_below[0].results_by_partition
            } == {0}
            assert (
                broker_harness.ask(
                    wire.ADD_OFFSETS_TO_TXN, 3, group_id="g", **fields
                ).error_code
                == 0
            )
        request = wire.PRODUCE.Request
        batch = encode(
            [(None, b"%d" % turn, (), broker_harness.now_ms)],
            transactional=True,
            producer_id=owner[0],
            producer_epoch=owner[1],
            base_sequence=sequence,
        )
        parts = [
            request.Topic.Partition(index=number, records=batch) for number in (0, 1)
        ]
        response = broker_harness.ask(
            wire.PRODUCE,
            12 if self.version == 2 else 9,
            transactional_id="x",
            acks=-1,
            timeout_ms=1_000,
            topic_data=[request.Topic(name="t", partition_data=parts)],
        )
        assert [
            part.error_code for part in response.responses[0].partition_responses
        ] == [
            0,
            0,
        ]
        topic_type = wire.TXN_OFFSET_COMMIT.Request.Topic
        part = topic_type.Partition(
            partition_index=0, committed_offset=turn, committed_metadata=""
        )
        offsets = broker_harness.ask(
            wire.TXN_OFFSET_COMMIT,
            5 if self.version == 2 else 3,
            group_id="g",
            generation_id=-1,
            topics=[topic_type(name="in", partitions=[part])],
            **fields,
        )
        assert offsets.topics[0].partitions[0].error_code == 0


def recover(disk: SimulatedDisk) -> dict[str, Any]:
    """Start the next broker, let open transactions time out, and return the state that
    read_committed readers see.
    """
    broker_harness = SimulatedDiskBroker(disk, disk.now_ms())
    broker_harness.tick(60_001)
    broker_harness.tick(2_000)
    recovered: dict[str, Any] = {"hangs": [], "seen": [], "offset": -1, "error": 0}
    if "in" in broker_harness.logdir:  # created last
        for number in broker_harness.logdir.partitions("t"):
            log = broker_harness.logdir.partition("t", number)
            if log.last_stable_offset != log.log_end_offset:
                recovered["hangs"].append(number)
            records = log.read(0, isolation="read_committed")
            recovered["seen"].append([int(record.value or b"") for record in records])
        group = wire.OFFSET_FETCH.Request.Group
        topic = group.Topic(name="in", partition_indexes=[0])
        requests = [group(group_id="g", topics=[topic])]
        response = broker_harness.ask(
            wire.OFFSET_FETCH, 8, require_stable=True, groups=requests
        )
        (part,) = response.groups[0].topics[0].partitions
        recovered["error"] = part.error_code
        recovered["offset"] = part.committed_offset
    initialized = broker_harness.ask(
        wire.INIT_PRODUCER_ID, 4, transactional_id="x", transaction_timeout_ms=60_000
    )
    recovered["error"] = recovered["error"] or initialized.error_code
    broker_harness.logdir.close()
    return recovered


def check(promised: list[Any], recovered: dict[str, Any]) -> None:
    requested = {turn for event, turn in promised if event == "requested"}
    acknowledged = {turn for event, turn in promised if event == "acknowledged"}
    assert not recovered["error"], recovered
    assert not recovered["hangs"], recovered
    if not recovered["seen"]:
        assert not acknowledged
        return
    first, second = recovered["seen"]
    assert first == second, f"a transaction is split: {recovered}"
    assert acknowledged <= set(first) <= requested, (promised, recovered)
    assert recovered["offset"] == (first[-1] if first else -1), (
        f"the offset does not belong to the records: {recovered}"
    )


@pytest.mark.long
def test_no_crash_splits_loses_or_hangs_a_transaction() -> None:
    report = explore(
        ProducerHistory(2, turns=(1,)).run_history,
        recover,
        check,
        limit=8,
        again_every=0,
    )
    assert report.states > 50


def life_by_number(number: int) -> ProducerHistory:
    """Return a life of one to four random turns, in either protocol version and with
    either durability policy that makes promises.
    """
    chance = random.Random(number)
    turns = tuple(chance.sample(range(1, 13), chance.randint(1, 4)))
    return ProducerHistory(1 + number % 2, turns, ("group", "always")[number // 2 % 2])


@pytest.mark.slow
def test_no_crash_damages_a_transaction_in_many_histories() -> None:
    """Check LOGCORE_TRANSACTION_STATES different disks that crashes leave."""
    goal = int(os.environ.get("LOGCORE_TRANSACTION_STATES", "10000"))
    states = 0
    number = int(os.environ.get("LOGCORE_TRANSACTION_LIFE", "0"))
    while states < goal:
        states += explore(
            life_by_number(number).run_history, recover, check, limit=200, again_every=0
        ).states
        number += 1
        print(f"{states} of {goal} states after life {number}", flush=True)


def check_open_ends(_promised: list[Any], recovered: dict[str, Any]) -> None:
    """Check that no transaction remains open.

    Without a wait for the disk, a crash may lose records, even in one partition only.
    """
    assert not recovered["error"], recovered
    assert not recovered["hangs"], recovered


@pytest.mark.long
@pytest.mark.parametrize("limit", [4, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_crash_hangs_a_transaction_without_a_record(
    version: int, limit: int
) -> None:
    """Under "os" a power cut may keep the records of a transaction and lose the record
    of the coordinator.
    """
    history = ProducerHistory(
        version, turns=(1,) if limit == 4 else (1, 2, 3), durability="os"
    )
    report = explore(
        history.run_history, recover, check_open_ends, limit=limit, again_every=0
    )
    assert report.states > 50


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_no_crash_splits_loses_or_hangs_a_transaction_in_either_version(
    version: int,
) -> None:
    explore(
        ProducerHistory(version).run_history, recover, check, limit=500, again_every=10
    )


def live_with_a_failure(operation: str, at: int, version: int) -> bool:
    """Run a life in which one disk call fails once and the producer gives up at its
    first error.

    Then time passes, and a broker starts again. Return False if the life has fewer
    calls.
    """
    disk = SimulatedDisk()
    promised: list[Any] = []
    disk.faults = FaultPlan(Fault(operation, errno.EIO, path="*.log", at=at, times=1))
    brokers: list[SimulatedDiskBroker] = []

    class Failing(ProducerHistory):
        def begin(self, disk: SimulatedDisk) -> SimulatedDiskBroker:
            brokers.append(super().begin(disk))
            return brokers[0]

    # A refused request, or one that waits forever, raises an AssertionError in the
    # life. The promises made before it count.
    with contextlib.suppress(AssertionError, LogcoreError):
        Failing(version, (1, 2, 3)).run_history(disk, promised.append)
    has_failed = bool(disk.faults.hits)
    disk.faults = FaultPlan()
    (broker_harness,) = brokers
    if not broker_harness.is_stopped:
        broker_harness.tick(2_000)
        broker_harness.tick(60_001)
        broker_harness.tick(2_000)
        broker_harness.stop()
    check(promised, recover(disk))
    return has_failed


@pytest.mark.parametrize("operation", ["fdatasync", "pwrite"])
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_failed_disk_call_splits_and_hangs_no_transaction(
    operation: str, stride: int
) -> None:
    at = 1
    while live_with_a_failure(operation, at, 1 + at // stride % 2):
        at += stride
    assert at > 15
