"""Simulated processes that write one partition together, and the invariants of every
schedule.

A ledger, which is not lost if a process is killed, records the attempted appends, the
acknowledgements with their durability, and the truncations. Each process has its own
producer id. A killed process is replaced by a process with the same number, which sends
unacknowledged batches again.

Invariants, by name. The numbers refer to crashes.md:
- dense (C16): the offsets of the log have no gaps, and each exists once.
- acked (C15, C18, C20): an acknowledged record is at its offset, with its value, unless
  the log was truncated below it after the append began.
- once (C15): each value exists once. The values of a process are in the order in which
  it sent them.
- stable (C17, C19): a reader never sees another record at an offset, unless the log was
  truncated below it.
- innocent: no call fails unless a process dies, a disk fails, or the log is truncated.
- committed (C25): a reader of committed records sees all records of a committed
  transaction, and none of an aborted one.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from typing import Any, Final

import attrs

import logcore
from logcore import recordbatch
from logcore.fs import SharedFS
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine, SimulatedProcess

PATH: Final = "data/t-0"
CONFIG: Final = {"segment.bytes": 700, "index.interval.bytes": 90}
NOW_MS: Final = 1_700_000_000_000  # the initial time of a simulated disk


@attrs.define
class Sender:
    """The state that a process and its replacements share."""

    number: int
    value_count: int = 0
    #: The number of acknowledged batches of the idempotent producer.
    batch_count: int = 0
    #: The values of a batch whose result is unknown.
    pending: list[bytes] | None = None
    #: The values of a transaction that was not ended.
    open_values: list[bytes] = attrs.Factory(list)

    def value(self) -> bytes:
        self.value_count += 1
        return b"%d:%d" % (self.number, self.value_count)


@attrs.frozen
class AckedRecord:
    """An acknowledged record."""

    value: bytes
    durability: str
    #: The step at which the append was called.
    began_step: int


@attrs.define
class Truncation:
    """A truncation."""

    offset: int
    #: The step at which the call returned, or infinity if it failed or was interrupted.
    ended: float = math.inf


class PartitionSimulation:
    """The processes and the ledger; see the description of the module.

    `kinds` are letters of actions, which _act() lists. With `checks_acks`, each
    acknowledgement is checked on the disks that a power cut at its time would leave.
    """

    def __init__(
        self,
        seed: int,
        *,
        chances: Chances,
        processes: int = 2,
        operations: int = 10,
        durability: str = "group",
        kinds: str = "amprdfbo",
        checks_acks: bool = False,
    ) -> None:
        self.checks_acks = checks_acks
        self.expects_errors = bool(chances.kill or chances.power or "t" in kinds)
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk({"data": None}, seed=seed)
        self.machine = Machine(self.disk, seed=seed, chances=chances)
        self.machine.on_locks_released = self._replace_killed
        self.durability = durability
        self.kinds = kinds
        self.config = {
            **CONFIG,
            "cleanup.policy": "compact" if "c" in kinds else "delete",
        }
        self.operations = operations
        self.acked: dict[int, AckedRecord] = {}
        self.truncations: list[Truncation] = []
        self.seen: dict[int, bytes] = {}
        self.lowest_truncation = 1 << 62
        self.log_start = 0
        self.committed: set[bytes] = set()
        self.aborted: set[bytes] = set()
        self.senders = [Sender(number) for number in range(processes)]
        self.sender_of: dict[SimulatedProcess, Sender] = {}
        self.failures: list[BaseException] = []
        for sender in self.senders:
            self._start_process(sender)
        self.machine.start(self._read)

    def run(self) -> None:
        self.machine.run()

    def _start_process(self, sender: Sender) -> None:
        self.sender_of[self.machine.start(lambda fs: self._run_process(fs, sender))] = (
            sender
        )

    def _replace_killed(self, process: SimulatedProcess) -> None:
        if (
            not self.machine.is_powered_off
            and process in self.sender_of
            and len(self.sender_of) < 12
        ):
            self._start_process(self.sender_of[process])

    # -- actions of processes ----------------------------------------------------------

    def _run_process(self, fs: SharedFS, sender: Sender) -> None:
        """Open the log, act on it and close it, several times."""
        left = self.operations
        while left > 0:
            count = self.rng.randrange(1, left + 1)
            left -= count
            with self._open_log(fs) as log:
                if log is None:
                    continue
                for _ in range(count):
                    self._act(log, sender)

    @contextlib.contextmanager
    def _open_log(self, fs: SharedFS) -> Any:
        """Yield the log, which other processes also have open, or None if it cannot be
        opened because a sync of another process failed.
        """
        try:
            log = logcore.open(
                PATH,
                create=True,
                shared=True,
                durability=self.durability,
                config=self.config,
                on_corruption="fail",
                fs=fs,
            )
        except logcore.StorageWriteError:
            yield None
            return
        try:
            yield log
        except (
            logcore.LogFailedError,
            logcore.StorageWriteError,
        ):
            # After these errors a log must be opened again, which the caller does.
            if not self.expects_errors:
                raise
        finally:
            with contextlib.suppress(
                logcore.DurabilityUnknownError, logcore.StorageWriteError
            ):
                log.close()

    def _act(self, log: logcore.Log, sender: Sender) -> None:
        kind = self.rng.choice(self.kinds)
        acts: dict[str, Callable[[logcore.Log, Sender], None]] = {
            "a": self._append,
            "o": self._append_os,
            "m": self._append_many,
            "b": self._append_batch,
            "r": lambda log, _: log.roll(),
            "d": self._delete,
            "t": self._truncate,
            "f": self._flush,
            "c": lambda log, _: logcore.clean(log, force=True),
            "x": self._transact,
        }
        try:
            acts[kind](log, sender)
        except logcore.CompactionAbandonedError:
            pass
        except logcore.LogLockedError:  # another process compacts
            assert kind == "c"

    def _record_ack(
        self, began_step: int, receipt: logcore.Receipt, values: list[bytes]
    ) -> None:
        for offset, value in enumerate(values, receipt.offset):
            before = self.acked.get(offset)
            # Otherwise this append returned late, and its record was truncated before.
            if before is None or before.began_step <= began_step:
                self.acked[offset] = AckedRecord(value, receipt.durability, began_step)
        if receipt.durability == "disk":
            self._check_ack()

    def _check_ack(self) -> None:
        if self.checks_acks:
            for state in self.disk.crash_states(limit=2):
                self.check_disk(state.disk(), after_power=True)

    def _append(self, log: logcore.Log, sender: Sender) -> None:
        value = sender.value()
        began_step = self.machine.steps
        self._record_ack(began_step, log.append(value, key=value), [value])

    def _append_os(self, log: logcore.Log, sender: Sender) -> None:
        value = sender.value()
        began_step = self.machine.steps
        self._record_ack(
            began_step, log.append(value, key=value, durability="os"), [value]
        )

    def _append_many(self, log: logcore.Log, sender: Sender) -> None:
        values = [sender.value() for _ in range(self.rng.randrange(1, 5))]
        began_step = self.machine.steps
        self._record_ack(
            began_step, log.append_many([(value, value) for value in values]), values
        )

    def _append_batch(self, log: logcore.Log, sender: Sender) -> None:
        """Append a batch of an idempotent producer, which is stored once even if it is
        sent again.
        """
        if sender.pending is None:
            sender.pending = [sender.value() for _ in range(2)]
        values = sender.pending
        batch = recordbatch.encode(
            [(value, value) for value in values],
            now_ms=NOW_MS,
            producer_id=100 + sender.number,
            producer_epoch=0,
            base_sequence=2 * sender.batch_count,
        )
        began_step = self.machine.steps
        self._record_ack(began_step, log.append_batch(batch), values)
        sender.pending = None
        sender.batch_count += 1

    def _transact(self, log: logcore.Log, sender: Sender) -> None:
        """Commit or abort a transaction of two batches. First, a transaction that a
        kill has left open is aborted.
        """
        producer_id = 500 + sender.number
        if sender.open_values:
            log.end_transaction(producer_id, 0, commit=False)
            self.aborted.update(sender.open_values)
            sender.open_values = []
        for _ in range(2):
            value = sender.value()
            sender.open_values.append(value)
            batch = recordbatch.encode(
                [(value, value)],
                now_ms=NOW_MS,
                transactional=True,
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=0,
            )
            log.append_batch(batch, check_sequence=False)
        if self.rng.random() < 0.5:
            values = sender.open_values
            # A kill during the next call leaves the transaction open, or ended.
            sender.open_values = []
            log.end_transaction(producer_id, 0, commit=True)
            self.committed.update(values)
        else:
            log.end_transaction(producer_id, 0, commit=False)
            self.aborted.update(sender.open_values)
            sender.open_values = []

    def _flush(self, log: logcore.Log, sender: Sender) -> None:
        """Flush the log. It makes all records durable that were acknowledged before."""
        before = dict(self.acked)
        log.flush()
        for offset, acked in before.items():
            if self.acked[offset] is acked:
                self.acked[offset] = attrs.evolve(acked, durability="disk")
        self._check_ack()

    def _delete(self, log: logcore.Log, sender: Sender) -> None:
        log.refresh()
        if log.high_watermark > log.log_start_offset + 12:
            offset = log.high_watermark - 10
            self.log_start = max(self.log_start, offset)
            # Another process may have truncated the log below the offset.
            with contextlib.suppress(logcore.OffsetOutOfRangeError):
                log.delete_records(offset)

    def _truncate(self, log: logcore.Log, sender: Sender) -> None:
        log.refresh()
        offset = log.log_end_offset - self.rng.randrange(4)
        if offset > self.log_start:
            self.lowest_truncation = min(self.lowest_truncation, offset)
            truncation = Truncation(offset)
            self.truncations.append(truncation)
            # Another process may have deleted records above the offset.
            with contextlib.suppress(logcore.OffsetOutOfRangeError):
                log.truncate(offset)
            truncation.ended = self.machine.steps

    def _read(self, fs: SharedFS) -> None:
        """Read the log repeatedly, in a process that does not write."""
        while not fs.is_directory(PATH):
            if all(
                process.has_ended or process.is_killed for process in self.sender_of
            ):
                return
        with logcore.open(PATH, read_only=True, fs=fs) as log:
            for _ in range(6):
                with contextlib.suppress(logcore.OffsetOutOfRangeError):
                    log.refresh()
                    for record in log.read(log.log_start_offset):
                        value = self.seen.setdefault(record.offset, record.value or b"")
                        assert (
                            value == record.value
                            or record.offset >= self.lowest_truncation
                        ), (
                            f"stable: {record.offset} was {value!r} and is {record.value!r}"
                        )

    # -- invariants --------------------------------------------------------------------

    def check_disk(self, fs: Any, *, after_power: bool) -> None:
        """Check a disk that no process uses any more."""
        if not fs.exists(f"{PATH}"):
            assert after_power or not self.acked, "acked: the partition is missing"
            return
        with logcore.open(
            PATH, create=True, durability=self.durability, config=self.config, fs=fs
        ) as log:
            # A transaction that a kill left open hides later records.
            for sender in self.senders if "x" in self.kinds else ():
                log.end_transaction(500 + sender.number, 0, commit=False)
            records = list(log.read(log.log_start_offset))
            committed = {
                record.value
                for record in log.read(log.log_start_offset, isolation="read_committed")
            }
            start = log.log_start_offset
            end = log.high_watermark
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets)), f"dense: {offsets}"
        if "c" not in self.kinds and "x" not in self.kinds:
            assert offsets == list(range(start, end)), (
                f"dense: {start} to {end} {offsets}"
            )
        found = {record.offset: record.value for record in records}
        for offset, acked in self.acked.items():
            is_promised = acked.durability == "disk" or not after_power
            is_untruncated = all(
                truncation.offset > offset or truncation.ended < acked.began_step
                for truncation in self.truncations
            )
            if is_promised and is_untruncated and start <= offset:
                assert found.get(offset) == acked.value, (
                    f"acked: {acked} at {offset}, found {found.get(offset)!r}"
                )
        values = [record.value for record in records]
        assert len(values) == len(set(values)), f"once: {values}"
        for sender in self.senders:
            own = [
                int(value.split(b":")[1])
                for value in values
                if value and value.startswith(b"%d:" % sender.number)
            ]
            # A batch that is sent again may follow later batches.
            if "b" not in self.kinds:
                assert own == sorted(own), f"once: {own}"
        if not after_power and self.lowest_truncation > end:
            kept = {value for value in self.committed if value in set(values)}
            assert kept <= committed, f"committed: {kept - committed}"
            assert not self.aborted & committed, (
                f"committed: {self.aborted & committed}"
            )
