"""Tests of the ends that TransactionCut chooses, for every moment of a history.

A test writes the records of a coordinator and of producers, in random order, on a
simulated disk. Then it chooses the ends of a snapshot for each earlier time, as if the
later records had been written while the snapshot was taken. A restored transaction must
be complete in all of its partitions, or in none.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import attrs
import pytest

import logcore
from logcore.backup.transaction_cut import TransactionCut, first_after
from logcore.errors import CompactionAbandonedError
from logcore.format.transaction_records import (
    Status,
    StoredTransaction,
    read_transaction,
    transaction_key,
    transaction_value,
)
from logcore.metadata.filenames import TRANSACTIONS_TOPIC
from logcore.reader import segments_between
from logcore.recordbatch import encode
from logcore.testing import SimulatedDisk

PARTITIONS = (("a", 0), ("a", 1), ("b", 0))


@attrs.define
class History:
    """A directory in which two producers commit and abort transactions."""

    logdir: logcore.LogDir
    disk: SimulatedDisk
    rng: random.Random
    numbers: Iterator[int] = attrs.Factory(itertools.count)
    sequences: dict[tuple[int, str, int], int] = attrs.Factory(dict)
    #: Number of a transaction -> (time of its decision, is committed, its partitions).
    decided: dict[int, tuple[int, bool, list[tuple[str, int]]]] = attrs.Factory(dict)

    def steps(self, producer_id: int) -> Iterator[None]:
        """Run transactions of one producer, and yield after each written record."""
        name = f"t{producer_id}"
        while True:
            number = next(self.numbers)
            partitions = self.rng.sample(PARTITIONS, self.rng.randint(1, 3))
            stored = StoredTransaction(
                producer_id=producer_id,
                producer_epoch=0,
                timeout_ms=1000,
                status=Status.ONGOING,
                partitions=frozenset(partitions),
                start_ms=self.disk.now_ms(),
            )
            self.store(name, stored)
            yield
            for topic, partition in partitions:
                key = (producer_id, topic, partition)
                sequence = self.sequences.get(key, 0)
                self.sequences[key] = sequence + 1
                batch = encode(
                    [(None, b"%d" % number)],
                    producer_id=producer_id,
                    producer_epoch=0,
                    base_sequence=sequence,
                    transactional=True,
                )
                self.logdir.partition(topic, partition).append_batch(batch)
                yield
            is_committed = self.rng.random() < 0.7
            status = Status.PREPARE_ABORT
            if is_committed:
                status = Status.PREPARE_COMMIT
            self.decided[number] = self.disk.now_ms(), is_committed, partitions
            stored = self.store(name, attrs.evolve(stored, status=status))
            yield
            for topic, partition in partitions:
                self.logdir.partition(topic, partition).end_transaction(
                    producer_id, 0, commit=is_committed
                )
                yield
            complete = Status(status + 2)
            self.store(
                name, attrs.evolve(stored, status=complete, partitions=frozenset())
            )
            yield

    def store(self, name: str, stored: StoredTransaction) -> StoredTransaction:
        now_ms = self.disk.now_ms()
        stored = attrs.evolve(stored, update_ms=now_ms)
        self.logdir.partition(TRANSACTIONS_TOPIC, 0).append(
            transaction_value(stored), key=transaction_key(name), timestamp_ms=now_ms
        )
        return stored


def check_ends(history: History, time_ms: int) -> bool:
    """Choose the ends of a snapshot of a time, and check the restored transactions.

    Return False if TransactionCut requires another snapshot.
    """
    logdir = history.logdir
    states_log = logdir.partition(TRANSACTIONS_TOPIC, 0)
    try:
        cut = TransactionCut([states_log], time_ms)
        ends = {}
        for topic, partition in PARTITIONS:
            log = logdir.partition(topic, partition)
            end = log.log_end_offset
            segments = segments_between(log, 0, end + 1)
            ends[topic, partition] = cut.choose((topic, partition), segments, end)
        states_end = cut.end_of_states(states_log, states_log.log_end_offset)
    except CompactionAbandonedError:
        return False
    states: dict[int, StoredTransaction] = {}
    for record in states_log.read(0, states_end):
        stored = read_transaction(record.value or b"")
        states[stored.producer_id] = stored
    visible = {
        key: numbers_after_restore(history, key, end, states)
        for key, end in ends.items()
    }
    for number, (decided_ms, is_committed, partitions) in history.decided.items():
        found = {key for key in PARTITIONS if number in visible[key]}
        if decided_ms <= time_ms:
            assert found == (set(partitions) if is_committed else set()), (
                number,
                found,
            )
        else:
            assert found in (set(), set(partitions)), (number, found)
            assert is_committed or not found
    return True


def numbers_after_restore(
    history: History,
    key: tuple[str, int],
    end: int,
    states: dict[int, StoredTransaction],
) -> set[int]:
    """Return the numbers of the transactions that are committed in a restored partition,
    after the coordinator has completed decided transactions.
    """
    visible: set[int] = set()
    pending: dict[int, list[int]] = {}
    for batch in history.logdir.partition(*key).batches(0):
        if batch.base_offset >= end:
            break
        if not batch.is_control:
            numbers = [int(record.value or b"") for record in batch.records()]
            pending.setdefault(batch.producer_id, []).extend(numbers)
            continue
        done = pending.pop(batch.producer_id, [])
        (marker,) = batch.records()
        # The key of a control record is the version, then 0 for abort or 1 for commit.
        if (marker.key or b"")[3] == 1:
            visible.update(done)
    for producer_id, numbers in pending.items():
        state = states.get(producer_id)
        if (
            state is not None
            and state.status is Status.PREPARE_COMMIT
            and key in state.partitions
        ):
            visible.update(numbers)
    return visible


@pytest.mark.long
@pytest.mark.parametrize("seed", range(25))
def test_cut_at_every_moment_leaves_complete_transactions(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimulatedDisk()
    with logcore.open_dir("d", create=True, fs=disk, durability="os") as logdir:
        logdir.create_topic("a", partitions=2)
        logdir.create_topic("b")
        logdir.create_topic(TRANSACTIONS_TOPIC)
        history = History(logdir, disk, rng)
        producers = [history.steps(7), history.steps(8)]
        times = [disk.now_ms()]
        refused = 0
        for _ in range(60):
            next(rng.choice(producers))
            if rng.random() < 0.7:
                disk.advance(rng.choice((1, 1, 3)))
            times.append(disk.now_ms())
        # The millisecond of the last step has not ended, so it is no time of a snapshot.
        moments = sorted(set(times))[:-1]
        for time_ms in moments:
            refused += not check_ends(history, time_ms)
        assert refused < len(moments) / 3


def test_refresh_raises_for_a_late_stored_state() -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("d", create=True, fs=disk) as logdir:
        logdir.create_topic(TRANSACTIONS_TOPIC)
        log = logdir.partition(TRANSACTIONS_TOPIC, 0)
        value = transaction_value(
            StoredTransaction(producer_id=1, producer_epoch=0, timeout_ms=1)
        )
        now_ms = disk.now_ms()
        log.append(value, key=transaction_key("a"), timestamp_ms=now_ms + 1)
        cut = TransactionCut([log], now_ms)
        log.append(value, key=transaction_key("b"), timestamp_ms=now_ms)
        with pytest.raises(CompactionAbandonedError, match="take the snapshot again"):
            cut.refresh()


def test_first_after_finds_batches_in_any_segment() -> None:
    disk = SimulatedDisk()
    config = {"segment.bytes": 200}
    with logcore.open("t-0", create=True, fs=disk, config=config) as log:
        start_ms = disk.now_ms()
        for number in range(20):
            log.append(b"x" * 50, timestamp_ms=start_ms + number)
        segments = segments_between(log, 0, 21)
        assert len(segments) > 3
        for number in range(20):
            assert first_after(segments, 20, start_ms + number) == number + 1
