"""Hypothesis state machine that compares a log with a `LogHistory`, and injects crashes.

    TestMyLog = LogStateMachine.TestCase

Rules:
- Each call on the log is recorded in a `LogHistory`. After each step, the log has the
  content that the history expects.
- A call may crash at any change that it makes on the disk, and so may the recovery
  after that. The test continues on any of the disks that such a crash may leave.
  Crashes only between calls would miss bugs.
- A reader returns the records that existed when it was created, even if segments are
  rolled, deleted, truncated or compacted while it reads.
- A batch that a producer sends again is stored once. Readers of committed records get
  whole transactions.

A subclass may change `durabilities`, `configs` or `path`, and add rules for a service
that uses the log. `self.log` is open between the rules, and `self.restarted()` is
called after each crash. This module needs the extra `testing`.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from logcore import cleaner, retention
from logcore.errors import (
    InvalidProducerEpochError,
    LogcoreError,
    LogFailedError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    StorageReadError,
)
from logcore.kernels import Receipt, Record
from logcore.log import Log, open_log
from logcore.partition import epochs
from logcore.recordbatch import encode
from logcore.testing import strategies
from logcore.testing.disk import SimulatedCrash, SimulatedDisk
from logcore.testing.faults import Fault, FaultPlan
from logcore.testing.oracle import FoundLog, LogHistory, check_epochs
from logcore.testing.strategies import CrashPoint, Row

#: pytest hides the frames of this module in the traceback of a failure.
__tracebackhide__ = True

_crash = st.none() | st.none() | strategies.crash_points()
_percentages = st.integers(0, 100)
_rarely_true = st.sampled_from([False, False, False, False, True])
_record_lists = st.lists(strategies.records(max_size=20), min_size=1, max_size=3)
#: Ids of producers that are only idempotent, and of those that write transactions.
_IDEMPOTENT = (100, 101)
_TRANSACTIONAL = (200, 201)
_KNOWN_BATCHES = 5
_FAILING_CALLS = ("append", "roll", "reopen", "compact", "abort")


@attrs.define
class _SentBatch:
    """A batch of a producer, as it was stored."""

    epoch: int
    sequence: int
    count: int
    offset: int
    data: bytes
    #: Whether the log must still recognize the batch if it is sent again.
    is_known: bool = True
    #: Whether a truncation removed part of the batch.
    is_truncated: bool = False

    @property
    def next_sequence(self) -> int:
        return self.sequence + self.count


class LogStateMachine(RuleBasedStateMachine):
    """Runs random calls on a log; see the module docstring."""

    path = "t-0"
    durabilities: st.SearchStrategy[str] = strategies.durabilities()
    configs: st.SearchStrategy[dict[str, Any]] = (
        strategies.configs() | strategies.configs(compacted=True)
    )
    #: Number of steps, crashes and faults of all machines of this class. Tests assert
    #: that enough of each were tried.
    counts: ClassVar[dict[str, int]] = {}

    #: The log under test.
    log: Log
    #: The expected content of the log.
    history: LogHistory
    #: The disk of the log.
    disk: SimulatedDisk

    def restarted(self) -> None:
        """Hook for subclasses, called after the log was reopened after a crash or fault."""

    # -- crashing ----------------------------------------------------------------------

    @initialize(data=st.data(), seed=st.integers(0, 1 << 16))
    def begin(self, data: st.DataObject, seed: int) -> None:
        self.durability = data.draw(self.durabilities)
        self.config = data.draw(self.configs)
        self.history = LogHistory(self.durability)
        self.disk = SimulatedDisk(seed=seed)
        self.readers: list[tuple[Iterator[Record], list[Record]]] = []
        self.sent: dict[int, list[_SentBatch]] = {}
        self.newest_epochs: dict[int, int] = {}  # producer id -> epoch
        self.epochs: list[epochs.Entry] = [(0, 0)]
        self._open()

    def _open(self) -> None:
        self.log = open_log(
            self.path,
            create=True,
            config=self.config,
            durability=self.durability,
            fs=self.disk,
        )

    def _reduce_expected_state(self) -> None:
        """Reduce the expected producer and epoch state after an open or a truncation.

        The log must still have the last batch of each producer, the epochs with records
        and the latest epoch.
        """
        self._reduce_known_batches()
        self.epochs = self._below_end(self.epochs)

    def _below_end(self, entries: list[epochs.Entry]) -> list[epochs.Entry]:
        end = len(self.history.records)
        remaining = [entry for entry in entries if entry[1] < end]
        if remaining != entries:
            # Clients may have used the last epoch, so it must not decrease.
            remaining.append((entries[-1][0], end))
        return epochs.truncate_start(remaining, self.log.log_start_offset)

    def _reduce_known_batches(self) -> None:
        """Mark the batches that the log may have forgotten.

        If no batch of a producer remains, the expected state of the producer is unknown,
        and the rules do not check it.
        """
        end = len(self.history.records)
        start = self.log.log_start_offset
        for producer_id, batches in self.sent.items():
            remaining_batches = [
                attrs.evolve(batch, is_known=False)
                for batch in batches
                if batch.offset + batch.count <= end
            ]
            truncated_batches = [
                batch
                for batch in batches
                if batch.offset < end < batch.offset + batch.count
            ]
            remaining_batches += [
                attrs.evolve(
                    sent, count=end - sent.offset, is_known=False, is_truncated=True
                )
                for sent in truncated_batches
            ]
            if (
                remaining_batches
                and not remaining_batches[-1].is_truncated
                and remaining_batches[-1].offset >= start
            ):
                remaining_batches[-1].is_known = True
            self.sent[producer_id] = remaining_batches

    def _count(self, event: str) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1

    def call(self, action: Callable[[], Any], crash: CrashPoint | None) -> bool:
        """Run a call, with a crash inside it if requested.

        Return whether it completed.
        """
        self._count("steps")
        if crash is None:
            action()
            return True
        try:
            self.disk.crash_in(crash.changes)
            action()
            self.disk.crash_in(None)
            return True
        except SimulatedCrash:
            self.lose_power(crash)
            return False

    def lose_power(self, crash: CrashPoint) -> None:
        """Continue on one of the disks that a crash at this moment may leave."""
        self._count("crashes")
        self.readers.clear()
        states = self.disk.crash_states(seed=crash.choice)
        *_, state = itertools.islice(states, crash.choice + 1)
        self.disk.crash()
        self.disk = state.disk()
        if crash.again is not None:
            try:
                self.disk.crash_in(crash.again.changes)
                self._open()
            except SimulatedCrash:
                self._count("crashes in recovery")
                *_, second = itertools.islice(
                    self.disk.crash_states(seed=crash.again.choice),
                    crash.again.choice + 1,
                )
                self.disk.crash()
                self.disk = second.disk()
                self._open()
            else:
                self.disk.crash_in(None)
        else:
            self._open()
        self._continue_after_crash(state.kind)

    def _continue_after_crash(self, kind: Any) -> None:
        """Check the log that was opened after a crash or a fault, and continue."""
        found = FoundLog.of(self.log)
        assert found.end == self.log.log_end_offset
        self.history.check(found, kind)
        self.history.continue_from(found)
        self._reduce_expected_state()
        self.restarted()

    # -- writing -----------------------------------------------------------------------

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.config.get("cleanup.policy", "")

    def _with_keys(self, rows: list[Row]) -> list[Row]:
        """Return rows with keys for a compacted log. Few distinct keys are used."""
        if not self.is_compacted:
            return rows
        return [
            row._replace(key=b"abcd"[(index := len(row.key or b"") % 4) : index + 1])
            for row in rows
        ]

    def _append(
        self,
        rows: list[Row],
        action: Callable[[], Receipt],
        crash: CrashPoint | None,
        transaction_of: int | None = None,
    ) -> None:
        end = self.log.log_end_offset
        now_ms = self.disk.now_ms()
        assert end == len(self.history.records)
        self.history.issue(
            (row.at(end + index, now_ms) for index, row in enumerate(rows)),
            transaction_of=transaction_of,
        )
        receipts: list[Receipt] = []
        if self.call(lambda: receipts.append(action()), crash):
            assert (receipts[0].offset, receipts[0].last_offset) == (
                end,
                end + len(rows) - 1,
            )
            self.history.acknowledge(end + len(rows), receipts[0].durability)

    @rule(
        row=strategies.records(),
        level=st.sampled_from([None, None, "os", "disk"]),
        crash=_crash,
    )
    def append(self, row: Row, level: Any, crash: CrashPoint | None) -> None:
        (row,) = self._with_keys([row])
        self._append(
            [row],
            lambda: self.log.append(
                row.value,
                key=row.key,
                headers=row.headers,
                timestamp_ms=row.timestamp_ms,
                durability=level,
            ),
            crash,
        )

    @rule(rows=st.lists(strategies.records(), max_size=8), crash=_crash)
    def append_many(self, rows: list[Row], crash: CrashPoint | None) -> None:
        rows = self._with_keys(rows)
        self._append(rows, lambda: self.log.append_many(rows), crash)

    @rule(values=st.lists(st.binary(max_size=20), min_size=1, max_size=5), crash=_crash)
    def append_columns(self, values: list[bytes], crash: CrashPoint | None) -> None:
        ends = [0, *itertools.accumulate(map(len, values))]
        rows = self._with_keys([Row(None, value) for value in values])
        keys = None
        if self.is_compacted:
            keys = (b"a" * len(rows), range(len(rows) + 1))
        self._append(
            rows,
            lambda: self.log.append_columns(keys=keys, values=(b"".join(values), ends)),
            crash,
        )

    @rule(rows=_record_lists, crash=_crash)
    def append_batch(self, rows: list[Row], crash: CrashPoint | None) -> None:
        rows = self._with_keys(rows)
        data = encode(rows, leader_epoch=0)
        if len(data) <= self.config["segment.bytes"]:
            self._append(rows, lambda: self.log.append_batch(data), crash)

    @rule(crash=_crash)
    def flush(self, crash: CrashPoint | None) -> None:
        if self.call(self.log.flush, crash):
            self.history.acknowledge(self.log.log_end_offset, "disk")

    @rule(crash=_crash)
    def roll(self, crash: CrashPoint | None) -> None:
        self.call(self.log.roll, crash)

    @rule(milliseconds=st.integers(1, 10_000), crash=_crash)
    def tick(self, milliseconds: int, crash: CrashPoint | None) -> None:
        """Run maintenance.

        Retention may be due and may delete all records, because their timestamps are
        near 0.
        """
        self.disk.advance(milliseconds)
        self.history.delete(self.log.high_watermark)
        if self.call(self.log.tick, crash):
            self._record_new_start(self.log.log_start_offset)

    def _record_new_start(self, start: int) -> None:
        self.history.deleted(start)
        for batches in self.sent.values():
            for batch in batches:  # the log may have forgotten a batch that was deleted
                batch.is_known &= batch.offset >= start
        self.epochs = epochs.truncate_start(self.epochs, start)

    @rule(percent=_percentages, crash=_crash)
    def truncate(self, percent: int, crash: CrashPoint | None) -> None:
        start = self.log.log_start_offset
        end = self.log.log_end_offset
        offset = start + (end - start) * percent // 100
        self.history.truncate(offset)
        if self.call(lambda: self.log.truncate(offset), crash):
            self.history.truncated()
            if offset < end:
                self._reduce_expected_state()

    @rule(back=st.integers(0, 2), percent=_percentages, crash=_crash)
    def truncate_to_epoch(
        self, back: int, percent: int, crash: CrashPoint | None
    ) -> None:
        """Truncate to the end offset of an epoch as a leader reports it.

        The reported end offset may be any offset of the log.
        """
        start = self.log.log_start_offset
        end = self.log.log_end_offset
        leader_epoch = max(0, self.log.leader_epoch - back)
        leader_end = start + (end - start) * percent // 100
        known, own_end = epochs.end_of(self.epochs, leader_epoch, end)
        offset = max(start, min(leader_end, own_end) if known >= 0 else leader_end)
        self.history.truncate(offset)
        ends: list[int] = []
        previous_epochs = self.epochs
        if self.call(
            lambda: ends.append(self.log.truncate_to_epoch(leader_epoch, leader_end)),
            crash,
        ):
            assert ends == [offset]
            self.history.truncated()
            if offset < end:
                self._reduce_expected_state()
                self.epochs = self._epochs_below(offset, previous_epochs)
            return
        # After a crash, the epoch file may still contain the removed epochs. The latest
        # epoch then remains.
        remaining = epochs.truncate_start(
            self._epochs_below(self.log.log_end_offset, previous_epochs),
            self.log.log_start_offset,
        )
        if self.log.leader_epoch == remaining[-1][0]:
            self.epochs = remaining

    @staticmethod
    def _epochs_below(offset: int, entries: list[epochs.Entry]) -> list[epochs.Entry]:
        return [entry for entry in entries if entry[1] < offset] or entries[:1]

    @rule(increment=st.integers(0, 2), crash=_crash)
    def begin_epoch(self, increment: int, crash: CrashPoint | None) -> None:
        leader_epoch = self.log.leader_epoch + increment
        previous_epochs = self.epochs
        if increment:
            end = self.log.log_end_offset
            self.epochs = [
                *(entry for entry in previous_epochs if entry[1] < end),
                (leader_epoch, end),
            ]
        if self.call(lambda: self.log.begin_epoch(leader_epoch), crash):
            assert self.log.leader_epoch == leader_epoch
            return
        allowed = [
            self._below_end(entries) for entries in (previous_epochs, self.epochs)
        ]
        (self.epochs, *_) = [
            entries for entries in allowed if entries[-1][0] == self.log.leader_epoch
        ]

    @rule()
    def epochs_agree_with_batches(self) -> None:
        check_epochs(self.log)
        for leader_epoch in range(self.log.leader_epoch + 2):
            expected = epochs.end_of(self.epochs, leader_epoch, self.log.log_end_offset)
            assert self.log.end_of_epoch(leader_epoch) == expected, (
                leader_epoch,
                self.epochs,
            )

    @rule(
        segments=st.none() | st.integers(1, 3),
        size=st.sampled_from([-1, 0, 500]),
        crash=_crash,
    )
    def retain(self, segments: int | None, size: int, crash: CrashPoint | None) -> None:
        """Delete whole segments from the start, by number or by the retention rules."""
        self.log.reconfigure({**self.config, "retention.bytes": size})
        facts = self.log.host.maintenance.facts()
        expected_count = min(
            facts.deletable,
            retention.kafka_rules(facts) if segments is None else segments,
        )
        start = self.log.log_start_offset
        if expected_count:
            start = max(start, facts.segments[expected_count - 1].end_offset)
        self.history.delete(start)
        counts: list[int] = []
        if self.call(lambda: counts.append(self.log.retain(segments=segments)), crash):
            assert self.log.log_start_offset == start, (
                self.log.log_start_offset,
                start,
            )
            assert counts == [max(expected_count, retention.below_start(facts))]
            self._record_new_start(start)

    @precondition(lambda self: self.is_compacted)
    @rule(
        rolls=st.booleans(), wait_ms=st.sampled_from([0, 0, 600, 2_000]), crash=_crash
    )
    def compact(self, rolls: bool, wait_ms: int, crash: CrashPoint | None) -> None:
        self.disk.advance(wait_ms)
        reports: list[cleaner.CleaningReport] = []
        if self.call(lambda: reports.extend(self._compact(rolls)), crash) and reports:
            self._count("compactions")
            self.log.flush()  # readers get durable records only
            self.history.acknowledge(self.log.log_end_offset, "disk")
            self.history.compacted(
                FoundLog.of(self.log), reports[0].first_dirty, reports[0].end_offset
            )

    def _compact(self, rolls: bool) -> list[cleaner.CleaningReport]:
        if rolls:
            self.log.roll()
        end = min(
            self.log.last_stable_offset,
            self.log.host.maintenance.facts().segments[-1].base_offset,
        )
        self.history.compact(
            end, self.disk.now_ms(), self.log.config.delete_retention_ms
        )
        report = cleaner.clean(self.log, force=True)
        if report is None:
            return []
        return [report]

    # -- producers ---------------------------------------------------------------------

    def _send(
        self,
        producer_id: int,
        rows: list[Row],
        new_epoch: bool,
        crash: CrashPoint | None,
    ) -> None:
        batches = self.sent.setdefault(producer_id, [])
        if batches and batches[-1].is_known and not new_epoch:
            epoch = batches[-1].epoch
            sequence = batches[-1].next_sequence
        else:
            # This is also correct if the log may or may not contain the last batch: a
            # new epoch is accepted in both cases.
            epoch = self.newest_epochs.get(producer_id, -1) + 1
            sequence = 0
            self.newest_epochs[producer_id] = epoch
        now_ms = self.disk.now_ms()
        # A record of time 0 would have expired from the producer state.
        rows = [row._replace(timestamp_ms=now_ms) for row in self._with_keys(rows)]
        is_transactional = producer_id in _TRANSACTIONAL
        data = encode(
            rows,
            leader_epoch=0,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=is_transactional,
        )
        if len(data) > self.config["segment.bytes"]:
            return
        batches.append(
            _SentBatch(epoch, sequence, len(rows), self.log.log_end_offset, data)
        )
        transaction_of = None
        if is_transactional:
            transaction_of = producer_id
        self._append(rows, lambda: self.log.append_batch(data), crash, transaction_of)

    @rule(
        producer_id=st.sampled_from(_IDEMPOTENT),
        rows=_record_lists,
        new_epoch=_rarely_true,
        crash=_crash,
    )
    def append_idempotent(
        self,
        producer_id: int,
        rows: list[Row],
        new_epoch: bool,
        crash: CrashPoint | None,
    ) -> None:
        self._send(producer_id, rows, new_epoch, crash)

    @rule(producer_id=st.sampled_from(_TRANSACTIONAL), rows=_record_lists, crash=_crash)
    def append_in_transaction(
        self, producer_id: int, rows: list[Row], crash: CrashPoint | None
    ) -> None:
        self._send(producer_id, rows, False, crash)

    @rule(
        producer_id=st.sampled_from(_TRANSACTIONAL), commit=st.booleans(), crash=_crash
    )
    def end_transaction(
        self, producer_id: int, commit: bool, crash: CrashPoint | None
    ) -> None:
        batches = self.sent.get(producer_id)
        if batches:
            epoch = batches[-1].epoch
        else:
            epoch = self.newest_epochs.get(producer_id, 0)
        end = self.log.log_end_offset
        self.history.issue_marker(producer_id, commit=commit)
        receipts: list[Receipt] = []
        if self.call(
            lambda: receipts.append(
                self.log.end_transaction(producer_id, epoch, commit=commit)
            ),
            crash,
        ):
            self._count("transactions ended")
            assert (receipts[0].offset, receipts[0].last_offset) == (end, end)
            self.history.acknowledge(end + 1, receipts[0].durability)

    @precondition(lambda self: any(self.sent.values()))
    @rule(choice=_percentages, back=st.integers(0, _KNOWN_BATCHES - 1), crash=_crash)
    def send_again(self, choice: int, back: int, crash: CrashPoint | None) -> None:
        """Send one of the last five batches of a producer again.

        The receipt equals the first receipt, and nothing is stored.
        """
        producers = [
            producer_id for producer_id, batches in self.sent.items() if batches
        ]
        batches = self.sent[producers[choice % len(producers)]]
        in_epoch = [batch for batch in batches if batch.epoch == batches[-1].epoch]
        again = in_epoch[-1 - min(back, len(in_epoch) - 1)]
        if not again.is_known:
            return
        end = self.log.log_end_offset
        receipts: list[Receipt] = []
        if self.call(lambda: receipts.append(self.log.append_batch(again.data)), crash):
            self._count("sent again")
            assert (receipts[0].offset, receipts[0].last_offset) == (
                again.offset,
                again.offset + again.count - 1,
            )
            assert self.log.log_end_offset == end, "a batch was stored twice"

    @precondition(lambda self: any(self.sent.values()))
    @rule(choice=_percentages, gap=st.integers(1, 3), is_old=st.booleans())
    def send_out_of_order(self, choice: int, gap: int, is_old: bool) -> None:
        """Send a batch with a gap in its sequence, or with an old epoch.

        The log rejects such batches.
        """
        producers = [
            producer_id for producer_id, batches in self.sent.items() if batches
        ]
        producer_id = producers[choice % len(producers)]
        last = self.sent[producer_id][-1]
        is_old &= last.epoch > 0
        if not last.is_known:
            return
        data = encode(
            self._with_keys([Row(b"k", b"out of order")]),
            leader_epoch=0,
            producer_id=producer_id,
            producer_epoch=last.epoch - is_old,
            base_sequence=last.next_sequence + gap,
            transactional=producer_id in _TRANSACTIONAL,
        )
        try:
            self.log.append_batch(data)
            raise AssertionError("the log has stored a batch that is out of order")
        except (OutOfOrderSequenceError, InvalidProducerEpochError) as error:
            self._count("refused")
            assert isinstance(error, InvalidProducerEpochError) == is_old

    @rule(percent=_percentages, crash=_crash)
    def delete_records(self, percent: int, crash: CrashPoint | None) -> None:
        start = self.log.log_start_offset
        end = self.log.high_watermark
        before = start + (end - start) * percent // 100
        self.history.delete(before)
        if self.call(lambda: self.log.delete_records(before), crash):
            assert self.log.log_start_offset == before
            self._record_new_start(before)

    # -- closing, crashes and faults ---------------------------------------------------

    @rule(crash=_crash)
    def close_and_open(self, crash: CrashPoint | None) -> None:
        self.readers.clear()
        if self.call(self.log.close, crash):
            self.history.acknowledge(len(self.history.records), "disk")
            if self.disk.open_handles:
                gc.collect()  # the traceback of an injected error may reference a segment
            assert not self.disk.open_handles, self.disk.open_handles
            if self.call(self._open, crash):
                self._reduce_expected_state()

    @rule(choice=st.integers(0, 200))
    def power_cut(self, choice: int) -> None:
        self._count("steps")
        self.lose_power(CrashPoint(0, choice))

    @rule()
    def system_writes_back(self) -> None:
        self._count("steps")
        self.disk.write_back()

    @rule(
        row=strategies.records(),
        fault=strategies.faults(),
        failing_call=st.sampled_from(_FAILING_CALLS),
    )
    def failing_disk(self, row: Row, fault: Fault, failing_call: str) -> None:
        """Let one operation fail.

        Acknowledged records survive, and after reopening the log has the same content.
        """
        self._count("steps")
        end = self.log.log_end_offset
        (row,) = self._with_keys([row])
        self.disk.faults = FaultPlan(fault)
        try:
            if failing_call == "append":
                self.history.issue([row.at(end)])
                receipt = self.log.append_many([row])
                self.history.acknowledge(end + 1, receipt.durability)
            elif failing_call == "roll":
                self.log.roll()
            elif failing_call == "compact" and self.is_compacted:
                self._compact(True)
            elif failing_call == "abort" and self.sent.get(_TRANSACTIONAL[0]):
                self.history.issue_marker(_TRANSACTIONAL[0], commit=False)
                receipt = self.log.end_transaction(
                    _TRANSACTIONAL[0],
                    self.sent[_TRANSACTIONAL[0]][-1].epoch,
                    commit=False,
                )
                self.history.acknowledge(end + 1, receipt.durability)
            elif failing_call == "reopen":
                self.readers.clear()
                self.log.close()
                self._open()
                self._reduce_expected_state()
        except LogcoreError:
            self._count("faults")
        finally:
            self.disk.faults = None
        self._recover_from_fault()

    def _recover_from_fault(self) -> None:
        """Reopen the log if it has failed, and check its content."""
        try:
            self.log.flush()
            self.history.continue_at_end(self.log.log_end_offset)
            self.history.acknowledge(self.log.log_end_offset, "disk")
            self.history.check_failed_call(FoundLog.of(self.log))
            self._reduce_known_batches()
            return
        except LogcoreError:
            self.readers.clear()
        try:
            self.log.close()
        except LogFailedError:
            pass
        self._open()
        self._continue_after_crash("kill")

    # -- reading -----------------------------------------------------------------------

    @rule(percent=_percentages)
    def begin_reading(self, percent: int) -> None:
        start = self.log.log_start_offset
        end = self.log.high_watermark
        offset = start + (end - start) * percent // 100
        self.readers.append((self.log.read(offset), self.history.between(offset, end)))

    @precondition(lambda self: self.readers)
    @rule(count=st.integers(1, 10))
    def continue_reading(self, count: int) -> None:
        reader, expected = self.readers[0]
        found = list(itertools.islice(reader, count))
        assert found == expected[:count], (
            "a reader returns other records than those that existed when it was created"
        )
        del expected[:count]
        if not expected:
            assert next(reader, None) is None
            del self.readers[0]

    @rule(timestamp_ms=st.integers(0, 1_001))
    def look_up_by_time(self, timestamp_ms: int) -> None:
        visible = self.history.between(
            self.log.log_start_offset, self.log.high_watermark
        )
        late = [
            record.offset for record in visible if record.timestamp_ms >= timestamp_ms
        ]
        found = self.log.offset_for_timestamp(timestamp_ms)
        assert found == (late[0] if late else None), (found, late[:1])

    @rule()
    def another_process_reads(self) -> None:
        with open_log(self.path, read_only=True, fs=self.disk) as reader:
            seen = list(reader.read(reader.log_start_offset))
            end = reader.high_watermark
            assert end <= self.log.log_end_offset
            committed = [
                record.offset
                for record in reader.read(
                    reader.log_start_offset, isolation="read_committed"
                )
            ]
        start = self.log.log_start_offset
        assert seen == self.history.between(start, end)
        self.history.check_committed(committed, start, end)

    @rule()
    def read_outside_the_log(self) -> None:
        for offset in (self.log.log_start_offset - 1, self.log.log_end_offset + 1):
            try:
                self.log.read(offset)
                raise AssertionError("read outside the log")
            except OffsetOutOfRangeError:
                pass

    @invariant()
    def content_equals_history(self) -> None:
        if not hasattr(self, "log"):
            return
        start = self.log.log_start_offset
        end = self.log.log_end_offset
        assert end == len(self.history.records), (end, len(self.history.records))
        assert self.history.start_low == start, (start, self.history.start_low)
        assert (
            self.history.durable_end <= self.log.durable_end_offset
            or not self.history.durability.waits
        )
        visible = self.log.high_watermark
        assert list(self.log.read(start)) == self.history.between(start, visible)
        if self.history.transactional:
            committed = [
                record.offset
                for record in self.log.read(start, isolation="read_committed")
            ]
            self.history.check_committed(committed, start, visible)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.readers.clear()
            self.disk.faults = None
            self.disk.crash_in(None)
            try:
                self.log.close()
            except (LogFailedError, StorageReadError):
                pass
