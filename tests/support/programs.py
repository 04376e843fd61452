"""Programs that make calls on one log on a simulated disk. Each program has a history,
with which the log is compared after a crash.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Sequence
from typing import Any

import attrs

import logcore
from logcore.cleaner import clean
from logcore.kernels import Record
from logcore.log import Log
from logcore.recordbatch import encode
from logcore.testing import (
    Explorer,
    FoundLog,
    LogHistory,
    Report,
    SimulatedDisk,
)
from logcore.testing.explore import Seen
from logcore.testing.oracle import RecoveredLogCache, recover_log
from logcore.testing.result_cache import ResultCache

# The number of states that `make check` has time for.
STATES = int(os.environ.get("LOGCORE_EXPLORE_STATES", "1500"))
# The number of states of a run of `make slow`.
MANY_STATES = int(os.environ.get("LOGCORE_EXPLORE_STATES", "50000"))
POLICIES = ("group", "always", "every(3)", "interval(20)", "os")
CONFIG: dict[str, Any] = {
    "segment.bytes": 400,
    "index.interval.bytes": 100,
    "batch.size": 200,
}
COMPACTED: dict[str, Any] = {
    **CONFIG,
    "cleanup.policy": "compact,delete",
    "delete.retention.ms": 0,
}
# The first producer ids. After a truncation of its batches, a producer gets the next id.
IDEMPOTENT = 100
TRANSACTIONAL = 200


@attrs.define
class SharedCaches:
    """Caches of the results for disks. Programs share them if their policies, settings
    and seeds are equal.
    """

    seen: Seen[FoundLog] = attrs.field(factory=Seen)
    cache: RecoveredLogCache = attrs.field(factory=RecoveredLogCache)


class Program:
    """A program that makes calls on one log, with its history and its explorer. Each
    call appends other values, so only equal sequences of calls leave equal disks.
    """

    def __init__(
        self,
        durability: str,
        *,
        config: dict[str, Any] = CONFIG,
        disk: SimulatedDisk | None = None,
        caches: SharedCaches | None = None,
        seed: int = 0,
        limit: int | None = 200,
        explore: bool = True,
        thorough_every: int = 10,
    ) -> None:
        self.durability = durability
        self.config = config
        self.history = LogHistory(durability)
        self.is_compacted = "cleanup.policy" in config
        #: For each producer id, the next sequence number, and the offset and bytes of
        #: the last batch.
        self.sent: dict[int, tuple[int, int, bytes]] = {}
        # The producer ids in use.
        self.producers = {
            IDEMPOTENT: IDEMPOTENT,
            TRANSACTIONAL: TRANSACTIONAL,
        }
        self.disk = SimulatedDisk(seed=seed) if disk is None else disk
        self.count = seed * 1000
        caches = SharedCaches() if caches is None else caches
        recover = functools.partial(
            recover_log, config=config, durability=durability, cache=caches.cache
        )
        self.explorer = Explorer(
            recover,
            self.history.check,
            thorough=functools.partial(recover, thorough=True),
            thorough_every=thorough_every,
            same=lambda found_log, other: (
                (found_log.start, found_log.records) == (other.start, other.records)
            ),
            restart=self._restart,
            seed=seed,
            limit=limit,
            again_every=20,
            seen=caches.seen,
        )
        if explore:
            self.explorer.attach(self.disk)
        self.log: Log | None = None

    def _restart(self, disk: SimulatedDisk) -> None:
        """Recover the log. The explorer may interrupt the recovery."""
        logcore.open(
            "t-0",
            create=True,
            config=self.config,
            durability=self.durability,
            fs=disk,
        ).close()

    def run(self, actions: Sequence[str]) -> Report:
        for action in ["open", *actions, "close"]:
            getattr(self, action)()
            self.explorer.check_promises()
        return self.explorer.finish()

    # Each action makes a call to the log, and records in the history which records the log
    # may or must contain afterwards.

    def open(self) -> None:
        if self.log is None:
            self.log = logcore.open(
                "t-0",
                create=True,
                config=self.config,
                durability=self.durability,
                fs=self.disk,
            )
            self.history.continue_at_end(self.log.log_end_offset)

    def close(self) -> None:
        if self.log is not None:
            log = self.log
            self.log = None
            failed = log.host.writer.commit.failure
            log.close()
            if failed is None:
                self.history.acknowledge(len(self.history.records), "disk")

    def opened(self) -> Log:
        self.open()
        assert self.log is not None
        return self.log

    def rows(
        self, sizes: Sequence[int]
    ) -> list[tuple[bytes | None, bytes, tuple[()], int]]:
        made = []
        for size in sizes:
            self.count += 1
            key = (
                b"k%d" % (size % 3) if self.is_compacted else b"k" if size % 2 else None
            )
            made.append(
                (key, (b"%d." % self.count * size)[:size], (), 1_000 + self.count)
            )
        return made

    def _append(self, sizes: Sequence[int], level: Any = None) -> None:
        log = self.opened()
        rows = self.rows(sizes)
        end = log.log_end_offset
        if log.host.writer.commit.failure is None:
            self.history.issue(
                Record(end + at, row[3], row[0], row[1]) for at, row in enumerate(rows)
            )
        receipt = log.append_many(rows, durability=level)
        self.history.acknowledge(receipt.last_offset + 1, receipt.durability)

    def append(self) -> None:
        self._append([40])

    def append_two(self) -> None:
        self._append([60, 10])

    def append_big(self) -> None:
        self._append([150, 3, 150, 80, 150])

    def append_os(self) -> None:
        self._append([50], "os")

    def append_disk(self) -> None:
        self._append([30], "disk")

    def flush(self) -> None:
        log = self.opened()
        log.flush()
        self.history.acknowledge(log.log_end_offset, "disk")

    def roll(self) -> None:
        self.opened().roll()

    def tick(self) -> None:
        """Run the maintenance. The third call after an opening runs retention, by which
        all records are expired.
        """
        self.disk.advance(10_000)
        log = self.opened()
        self.history.delete(log.high_watermark)
        log.tick()
        self.history.deleted(log.log_start_offset)

    def delete(self) -> None:
        self._delete(2, 3)

    def delete_all(self) -> None:
        self._delete(1, 1)

    def _delete(self, part: int, whole: int) -> None:
        log = self.opened()
        start = log.log_start_offset
        visible = log.high_watermark
        before = start + (visible - start) * part // whole
        self.history.delete(before)
        log.delete_records(before)
        self.history.deleted()

    def truncate(self) -> None:
        self._truncate(1, 2)

    def truncate_all(self) -> None:
        self._truncate(0, 1)

    def _truncate(self, part: int, whole: int) -> None:
        log = self.opened()
        start = log.log_start_offset
        end = log.log_end_offset
        offset = start + (end - start) * part // whole
        self.history.truncate(offset)
        self.explorer.check_promises()
        log.truncate(offset)
        self.history.truncated()
        for role, producer_id in self.producers.items():
            if producer_id in self.sent and self.sent[producer_id][1] >= offset:
                # The next sequence number of this producer would be refused.
                self.producers[role] += 1

    def retain(self) -> None:
        log = self.opened()
        facts = log.host.maintenance.facts()
        start = log.log_start_offset
        if facts.deletable:
            start = max(start, facts.segments[0].end_offset)
        self.history.delete(start)
        log.retain(segments=1)
        assert log.log_start_offset == start
        self.history.deleted()

    def compact(self) -> None:
        log = self.opened()
        if not self.is_compacted:
            return self.roll()
        log.roll()
        self.history.compact(
            log.last_stable_offset, self.disk.now_ms(), log.config.delete_retention_ms
        )
        self.explorer.check_promises()
        report = clean(log, force=True)
        if report is not None:
            self.history.compacted(
                FoundLog.of(log), report.first_dirty, report.end_offset
            )

    def epoch(self) -> None:
        log = self.opened()
        log.begin_epoch(log.leader_epoch + 1)

    def _send(self, role: int, size: int) -> None:
        log = self.opened()
        rows = self.rows([size])
        producer_id = self.producers[role]
        sequence = self.sent.get(producer_id, (0,))[0]
        end = log.log_end_offset
        is_transactional = role == TRANSACTIONAL
        rows = [
            (key, value, headers, self.disk.now_ms()) for key, value, headers, _ in rows
        ]
        data = encode(
            rows,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=is_transactional,
        )
        if log.host.writer.commit.failure is None:
            records = [Record(end, row[3], row[0], row[1]) for row in rows]
            self.history.issue(
                records, transaction_of=producer_id if is_transactional else None
            )
        receipt = log.append_batch(data)
        self.sent[producer_id] = sequence + 1, end, data
        self.history.acknowledge(receipt.last_offset + 1, receipt.durability)

    def idempotent(self) -> None:
        self._send(IDEMPOTENT, 35)

    def again(self) -> None:
        """Send the last batch again. While the log has the batch, it is not stored
        twice.
        """
        log = self.opened()
        _, offset, data = self.sent.get(self.producers[IDEMPOTENT], (0, -1, b""))
        if offset >= log.log_start_offset:
            end = log.log_end_offset
            assert log.append_batch(data).offset == offset, "a batch was stored twice"
            assert log.log_end_offset == end

    def transact(self) -> None:
        self._send(TRANSACTIONAL, 50)

    def commit(self) -> None:
        self._end(commit=True)

    def abort(self) -> None:
        self._end(commit=False)

    def _end(self, *, commit: bool) -> None:
        log = self.opened()
        producer_id = self.producers[TRANSACTIONAL]
        if log.host.writer.commit.failure is None:
            self.history.issue_marker(producer_id, commit=commit)
        receipt = log.end_transaction(producer_id, 0, commit=commit)
        self.history.acknowledge(receipt.last_offset + 1, receipt.durability)

    def reopen(self) -> None:
        self.close()
        self.explorer.check_promises()
        self.open()

    def kill(self) -> None:
        """Kill the process and start it again. The machine continues."""
        self.opened()
        self.disk.kill()
        self.log = None
        log = self.opened()
        found = FoundLog.of(log)
        self.history.check(found, "kill")
        self.history.continue_from(
            found
        )  # records that are served after an opening are durable

    def append_in_sync(self) -> None:
        """Append while the disk runs the sync of another append, then flush."""
        log = self.opened()
        before = self.disk.observer
        if log.durability.kind not in ("group", "os"):
            return self.append()  # the other policies sync under the lock, so no append can happen during the sync

        def observe(operation: str, is_done: bool) -> None:
            if before is not None:
                before(operation, is_done)
            if operation == "fdatasync" and is_done and not appended:
                appended.append(True)
                self._append([20], "os")

        appended: list[bool] = []
        self.disk.observer = observe
        try:
            self._append([45], "disk")
        finally:
            self.disk.observer = before
        self.explorer.check_promises()
        self.history.acknowledge(log.durable_end_offset, "disk")
        self.explorer.check_promises()
        self.flush()

    def write_back(self) -> None:
        self.disk.write_back()
        self.explorer.check_promises()


ERRNOS = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM,
)  # fmt: skip

FAILING_OPERATIONS = (
    "pwrite", "fdatasync", "fsync", "sync_dir", "create", "rename", "truncate", "unlink", "mkdir", "open", "pread",
    "size", "map", "listdir", "identity",
)  # fmt: skip


class Recoveries:
    """Caches the results of recovery on the disks that failures leave. Most failures
    leave a disk that another failure has left too.
    """

    def __init__(self, durability: str, config: dict[str, Any]) -> None:
        self.known: ResultCache[FoundLog] = ResultCache()
        self.run = functools.partial(
            recover_log,
            config=config,
            durability=durability,
            cache=RecoveredLogCache(),
        )

    def find(self, disk: SimulatedDisk) -> FoundLog:
        """Return the recovered log of a disk. The disk must not be used afterwards."""
        return self.known.run(disk, self.run)
