"""A log against a list: hypothesis calls anything in any order, and the power goes inside the calls.

    TestMyLog = LogStateMachine.TestCase

Rules:
- Each call on the log has its twin on a `LogHistory`. After each step the log holds what the list holds.
- A call may be crashed at any change that it makes on the disk, and recovery from that again. What is left is any disk
  that such a crash may leave. A machine that crashes only between calls misses bugs.
- A reader that was begun before goes on with what it was promised, whatever is rolled, deleted or truncated meanwhile.

Subclass it to change `durabilities`, `configs` or `path`, or to add rules for a service that stands on the log:
`self.log` is open between the rules, and `self.restarted()` is called after each crash. Needs the extra `testing`.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from logcore.errors import LogcoreError, LogFailedError, OffsetOutOfRangeError, StorageReadError
from logcore.kernels import Record
from logcore.log import Log, Receipt, open_log
from logcore.recordbatch import encode
from logcore.testing import strategies
from logcore.testing.disk import Fault, FaultPlan, SimulatedCrash, SimulatedDisk
from logcore.testing.oracle import FoundLog, LogHistory
from logcore.testing.strategies import CrashPoint, Row

_crash = st.none() | st.none() | strategies.crash_points()
_part = st.integers(0, 100)


class LogStateMachine(RuleBasedStateMachine):
    """See the top of this file. log: the log under test. history: what must be in it. disk: the one it is on.

    counts: steps, crashes and faults of all machines of this class, for tests that state how much was tried.
    """

    path = "t-0"
    durabilities: st.SearchStrategy[str] = strategies.durabilities()
    configs: st.SearchStrategy[dict[str, Any]] = strategies.configs()
    counts: ClassVar[dict[str, int]] = {}

    log: Log
    history: LogHistory
    disk: SimulatedDisk

    def restarted(self) -> None:
        """For subclasses: the log was opened after a crash or a fault."""

    # -- crashing ------------------------------------------------------------------------------------------------

    @initialize(data=st.data(), seed=st.integers(0, 1 << 16))
    def begin(self, data: st.DataObject, seed: int) -> None:
        self.durability = data.draw(self.durabilities)
        self.config = data.draw(self.configs)
        self.history = LogHistory(self.durability)
        self.disk = SimulatedDisk(seed=seed)
        self.readers: list[tuple[Iterator[Record], list[Record]]] = []
        self._open()

    def _open(self) -> None:
        self.log = open_log(self.path, create=True, config=self.config, durability=self.durability, fs=self.disk)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def call(self, action: Callable[[], Any], crash: CrashPoint | None) -> bool:
        """Does it, and crashes in it if asked to; whether it was completed."""
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
        """Goes on with one of the disks that a crash at this moment may leave."""
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
                *_, second = itertools.islice(self.disk.crash_states(seed=crash.again.choice), crash.again.choice + 1)
                self.disk.crash()
                self.disk = second.disk()
                self._open()
            else:
                self.disk.crash_in(None)
        else:
            self._open()
        found = FoundLog(self.log.log_start_offset, list(self.log.read(self.log.log_start_offset)))
        assert found.end == self.log.log_end_offset
        self.history.judge(found, state.kind)
        self.history.take(found)
        self.restarted()

    # -- writing -------------------------------------------------------------------------------------------------

    def _append(self, rows: list[Row], action: Callable[[], Receipt], crash: CrashPoint | None) -> None:
        end, now_ms = self.log.log_end_offset, self.disk.now_ms()
        assert end == len(self.history.records)
        self.history.issue(row.at(end + at, now_ms) for at, row in enumerate(rows))
        receipts: list[Receipt] = []
        if self.call(lambda: receipts.append(action()), crash):
            assert (receipts[0].offset, receipts[0].last_offset) == (end, end + len(rows) - 1)
            self.history.acknowledge(end + len(rows), receipts[0].durability)

    @rule(row=strategies.records(), level=st.sampled_from([None, None, "os", "disk"]), crash=_crash)
    def append(self, row: Row, level: Any, crash: CrashPoint | None) -> None:
        self._append(
            [row],
            lambda: self.log.append(
                row.value, key=row.key, headers=row.headers, timestamp_ms=row.timestamp_ms, durability=level
            ),
            crash,
        )

    @rule(rows=st.lists(strategies.records(), max_size=8), crash=_crash)
    def append_many(self, rows: list[Row], crash: CrashPoint | None) -> None:
        self._append(rows, lambda: self.log.append_many(rows), crash)

    @rule(values=st.lists(st.binary(max_size=20), min_size=1, max_size=5), crash=_crash)
    def append_columns(self, values: list[bytes], crash: CrashPoint | None) -> None:
        ends = [0, *itertools.accumulate(map(len, values))]
        self._append(
            [Row(None, value) for value in values],
            lambda: self.log.append_columns(values=(b"".join(values), ends)),
            crash,
        )

    @rule(rows=st.lists(strategies.records(max_size=20), min_size=1, max_size=3), crash=_crash)
    def append_batch(self, rows: list[Row], crash: CrashPoint | None) -> None:
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
        self.disk.advance(milliseconds)
        self.call(self.log.tick, crash)

    @rule(part=_part, crash=_crash)
    def truncate(self, part: int, crash: CrashPoint | None) -> None:
        start, end = self.log.log_start_offset, self.log.log_end_offset
        offset = start + (end - start) * part // 100
        self.history.truncate(offset)
        if self.call(lambda: self.log.truncate(offset), crash):
            self.history.truncated()

    @rule(part=_part, crash=_crash)
    def delete_records(self, part: int, crash: CrashPoint | None) -> None:
        start, end = self.log.log_start_offset, self.log.high_watermark
        before = start + (end - start) * part // 100
        self.history.delete(before)
        if self.call(lambda: self.log.delete_records(before), crash):
            self.history.deleted()
            assert self.log.log_start_offset == before

    # -- ends and beginnings -------------------------------------------------------------------------------------

    @rule(crash=_crash)
    def close_and_open(self, crash: CrashPoint | None) -> None:
        self.readers.clear()
        if self.call(self.log.close, crash):
            self.history.acknowledge(len(self.history.records), "disk")
            if self.disk.open_handles:
                gc.collect()  # the traceback of an error that a fault raised may hold a segment
            assert not self.disk.open_handles, self.disk.open_handles
            self.call(self._open, crash)

    @rule(choice=st.integers(0, 200))
    def power_cut(self, choice: int) -> None:
        self._count("steps")
        self.lose_power(CrashPoint(0, choice))

    @rule()
    def system_writes_back(self) -> None:
        self._count("steps")
        self.disk.write_back()

    @rule(row=strategies.records(), fault=strategies.faults(), then=st.sampled_from(["append", "roll", "reopen"]))
    def failing_disk(self, row: Row, fault: Fault, then: str) -> None:
        """One operation fails: nothing acknowledged goes, and after reopening all is as before."""
        self._count("steps")
        end = self.log.log_end_offset
        self.disk.faults = FaultPlan(fault)
        try:
            if then == "append":
                self.history.issue([row.at(end)])
                receipt = self.log.append_many([row])
                self.history.acknowledge(end + 1, receipt.durability)
            elif then == "roll":
                self.log.roll()
            else:
                self.readers.clear()
                self.log.close()
                self._open()
        except LogcoreError:
            self._count("faults")
        finally:
            self.disk.faults = None
        self._heal()

    def _heal(self) -> None:
        """Reopens the log if the fault left it closed or poisoned; either way what is there is judged."""
        try:
            self.log.flush()
            self.history.take_end(self.log.log_end_offset)
            self.history.acknowledge(self.log.log_end_offset, "disk")
            return
        except LogcoreError:
            self.readers.clear()
        try:
            self.log.close()
        except LogFailedError:
            pass
        self._open()
        found = FoundLog(self.log.log_start_offset, list(self.log.read(self.log.log_start_offset)))
        self.history.judge(found, "kill")
        self.history.take(found)
        self.restarted()

    # -- reading -------------------------------------------------------------------------------------------------

    @rule(part=_part)
    def begin_reading(self, part: int) -> None:
        start, end = self.log.log_start_offset, self.log.high_watermark
        at = start + (end - start) * part // 100
        self.readers.append((self.log.read(at), self.history.records[at:end]))

    @precondition(lambda self: self.readers)
    @rule(count=st.integers(1, 10))
    def go_on_reading(self, count: int) -> None:
        reader, expected = self.readers[0]
        found = list(itertools.islice(reader, count))
        assert found == expected[:count], "a reader gets other records than when it began"
        del expected[:count]
        if not expected:
            assert next(reader, None) is None
            del self.readers[0]

    @rule(timestamp_ms=st.integers(0, 1_001))
    def look_up_by_time(self, timestamp_ms: int) -> None:
        visible = self.history.records[self.log.log_start_offset : self.log.high_watermark]
        late = [record.offset for record in visible if record.timestamp_ms >= timestamp_ms]
        found = self.log.offset_for_timestamp(timestamp_ms)
        # Kafka's rule goes by whole segments, of which deleted and unseen records are a part.
        assert found == (late[0] if late else None) or found is None, (found, late[:1])

    @rule()
    def another_process_reads(self) -> None:
        with open_log(self.path, read_only=True, fs=self.disk) as reader:
            seen = list(reader.read(reader.log_start_offset))
            assert reader.high_watermark <= self.log.log_end_offset
        start = self.log.log_start_offset
        assert seen == self.history.records[start : start + len(seen)]

    @rule()
    def ask_outside(self) -> None:
        for offset in (self.log.log_start_offset - 1, self.log.log_end_offset + 1):
            try:
                self.log.read(offset)
                raise AssertionError("read outside the log")
            except OffsetOutOfRangeError:
                pass

    @invariant()
    def holds_what_the_list_holds(self) -> None:
        if not hasattr(self, "log"):
            return
        start, end = self.log.log_start_offset, self.log.log_end_offset
        assert end == len(self.history.records), (end, len(self.history.records))
        assert self.history.start_low == start, (start, self.history.start_low)
        assert self.history.durable_end <= self.log.durable_end_offset or not self.history.durability.waits
        assert list(self.log.read(start)) == self.history.records[start : self.log.high_watermark]

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.readers.clear()
            self.disk.faults = None
            self.disk.crash_in(None)
            try:
                self.log.close()
            except (LogFailedError, StorageReadError):
                pass
