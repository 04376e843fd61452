"""Maintenance of a directory: visits its logs, enforces its limits, compacts, and writes
checkpoints.

Rules:
- Each call does a limited amount of work.
- A log is visited when a task in it is due, and soon after a change that may make one
  due.
- Partitions that are not open are checked one at a time. They are opened only if
  retention must delete segments.
- An error in one log is reported as an incident and does not delay other logs. The log
  is visited again later.
- Recovery points and high watermarks are written for many logs at once.

This module does not manage topics: the directory (logdir.py) lists its partitions and
owns its lock.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Final

import attrs

from logcore.claim import Claim
from logcore.config import DEDUPE_BYTES
from logcore.directory.incidents import Incidents
from logcore.directory.interface import HostDirectory
from logcore.directory.visit_queue import VisitQueue
from logcore.errors import InvalidConfigError, LogcoreError
from logcore.fs import FS
from logcore.log import Log
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import partition_name
from logcore.metadata.trusted_clock import JUMP_MS
from logcore.partition.checksum_file import ScrubProgress
from logcore.partition.segment_files import list_bases
from logcore.retention import Policy, kafka_rules, to_fit
from logcore.segment import Segment

#: Kafka's replica.high.watermark.checkpoint.interval.ms.
_HIGH_WATERMARK_MS: Final = 5_000
#: One tick() ends after this number of actions with disk I/O, after this time, or after
#: this number of logs.
_TICK_ACTIONS: Final = 4
_TICK_MS: Final = 2
_TICK_LOGS: Final = 1_000
#: Delay before a log is visited again after an error, which may be temporary.
_RETRY_MS: Final = 1_000
# Minimum interval between checks of the used and free space.
_SPACE_MS: Final = 1_000
#: Delay before the next attempt after a failed compaction. It doubles up to the
#: maximum.
_UNCLEANABLE_MS: Final = 60_000
_UNCLEANABLE_MAX_MS: Final = 3_600_000
#: Maximum processor time of compaction in a tick, and maximum total time while the
#: processor is free. It counts as free while the time that passes is little more than
#: the processor time of the cleaner.
_CLEANER_TICK_US: Final = 5_000
_CLEANER_FREE_MS: Final = 25


@attrs.frozen(kw_only=True)
class MaintenanceConfig:
    """Settings of the maintenance that tick() does besides the topic settings."""

    #: The retention policy, see logcore.retention.
    retention: Policy = kafka_rules
    #: Returns consumer group -> committed offset of a partition, for policies that wait
    #: for groups. By default `__consumer_offsets` of this directory is read.
    committed: Callable[[str, int], Mapping[str, int]] | None = None
    #: Limit for all logs together. Above it, the oldest segments of topics with
    #: `delete` are deleted.
    max_bytes: int | None = None
    #: With less free space on the disk, appends raise DiskFullError. The remaining space
    #: is reserved for reads, deletions and compaction.
    min_free_bytes: int = 0
    #: Whether tick() compacts.
    compacts: bool = True
    #: Interval of checks for a log to compact if there was none (Kafka:
    #: log.cleaner.backoff.ms).
    compaction_backoff_ms: int = 15_000
    #: Limit for bytes read and written together; None for no limit.
    compaction_bytes_per_s: int | None = None
    #: Memory for the table of keys.
    compaction_memory_bytes: int = DEDUPE_BYTES

    def __attrs_post_init__(self) -> None:
        minimums = {
            "max_bytes": 0,
            "min_free_bytes": 0,
            "compaction_backoff_ms": 0,
            "compaction_bytes_per_s": 1,
            "compaction_memory_bytes": 1024,
        }
        for name, low in minimums.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InvalidConfigError(
                    f"maintenance {name!r}", expected=f"at least {low}", found=value
                )


class DirectoryMaintenance:
    """Does the maintenance of one directory that is open for writing.

    All fields except the visit queue are written under the directory's lock, or by the
    thread that calls tick().
    """

    def __init__(
        self,
        fs: FS,
        directory: HostDirectory,
        claim: Claim | None,
        incidents: Incidents,
        settings: MaintenanceConfig,
    ) -> None:
        self._fs = fs
        # Weak, so that a directory that was not closed warns as soon as it is dropped.
        self._directory: HostDirectory = weakref.proxy(directory)
        self._claim = claim
        self._incidents = incidents
        self.settings = settings
        #: Whether the disk is nearly full.
        self.is_disk_low = False
        self._make_lock()
        # A thread of the parent may hold the lock and does not exist in the child.
        fs.after_fork(self._make_lock)
        # Logs to visit, with their due times. due() and schedule() are called under
        # _visits_lock.
        self._visits: VisitQueue[tuple[Key, Log]] = VisitQueue()
        #: Difference between wall clock and monotonic clock at the last tick.
        self._clock_gap_ms = fs.now_ms() - fs.monotonic_ms()
        #: Recovery points that are not written yet.
        self._unsaved_recovery_points: list[tuple[Key, Log, int]] = []
        #: When the used and free space is checked next.
        self._next_check_ms = fs.monotonic_ms()
        #: Partitions to check for retention, whether open or not.
        self._partitions_to_check: list[Key] = []
        self._cleaning: tuple[Log, Generator[ScrubProgress, None, object]] | None = None
        # Bytes that the compaction in progress has processed.
        self._cleaned_bytes = 0
        self._cleaning_since_ms = 0
        self._next_cleaning_ms = fs.monotonic_ms() + settings.compaction_backoff_ms
        #: Logs whose compaction failed, with the time of the next attempt and the last
        #: wait.
        self._uncleanable: dict[Key, tuple[Log, int, int]] = {}
        self._high_watermarks_saved_ms = fs.monotonic_ms()
        self._saved_high_watermarks: dict[Key, int | None] = {}

    def _make_lock(self) -> None:
        # Several threads may call tick().
        self._visits_lock = threading.Lock()

    def admit(self, key: Key, log: Log) -> None:
        """Register a log, so that it is visited after changes that may make a task due."""
        log.host.writer.hold_appends(self.is_disk_low)
        log.host.writer.attach(functools.partial(self._visits.make_due, (key, log)))

    def visit(self, key: Key, log: Log) -> None:
        """Make the next tick() run the due tasks of a log."""
        self._visits.make_due((key, log))

    # -- open logs ------------------------------------------------------------------

    def visit_open_logs(self, now_ms: int) -> bool:
        """Run the due tasks of open logs: timed syncs, rolls, retention and recovery
        points.

        Return False if the time limit of a tick was reached. The next tick then writes
        the recovery points.
        """
        recovery_points = self._unsaved_recovery_points
        actions = 0
        began_ms = self._fs.monotonic_ms()
        with self._visits_lock:
            # If the wall clock was set, the due times of segments are wrong, and every
            # log is checked again.
            gap_ms = now_ms - began_ms
            if abs(gap_ms - self._clock_gap_ms) > JUMP_MS:
                for item in self._directory.host.open_logs().items():
                    self._visits.make_due(item)
            self._clock_gap_ms = gap_ms
            # A limited number, because 10,000 logs may be due, and a tick often ends
            # after a few of them.
            due = self._visits.due(began_ms, _TICK_LOGS)
        visited = 0
        try:
            for key, log in due:
                visited += 1
                acted, recovery_point = self._visit_log(key, log, now_ms)
                actions += acted
                if recovery_point is not None:
                    recovery_points.append((key, log, recovery_point))
                is_late = actions and self._fs.monotonic_ms() - began_ms >= _TICK_MS
                if actions >= _TICK_ACTIONS or is_late:
                    break
        # Also after an interrupt: a log that is not scheduled again is never visited.
        finally:
            with self._visits_lock:
                for item in due[visited:]:
                    self._visits.schedule(item, began_ms)
        if actions and self._fs.monotonic_ms() - began_ms >= _TICK_MS:
            return False
        if recovery_points:
            self._unsaved_recovery_points = []
            self._save_recovery_points(recovery_points)
        return True

    def _visit_log(
        self, key: tuple[str, int], log: Log, now_ms: int
    ) -> tuple[bool, int | None]:
        """Run the due tasks of one log and schedule its next visit.

        Return whether the tasks did any work, and a recovery point to write or None.
        """
        acted = False
        recovery_point = None
        next_ms = self._fs.monotonic_ms() + _RETRY_MS
        try:
            # A shared log writes its recovery point while it holds the write lock.
            # Otherwise, another process could truncate the log below the recovery point
            # before this is written.
            if log.host.writer.sharing is not None:
                acted = log.host.maintenance.tick(now_ms)
            else:
                acted, recovery_point = (
                    log.host.maintenance.tick_without_recovery_point(now_ms)
                )
            next_ms = log.host.maintenance.next_due_ms()
        except (LogcoreError, OSError) as error:
            self._incidents.record("tick", "{}-{}".format(*key), error)
        finally:
            if (
                self._directory.host.known_logs().get(key) is log
                and not log.is_closed
                and not log.has_failed
            ):
                with self._visits_lock:
                    self._visits.schedule((key, log), next_ms)
        return acted, recovery_point

    # -- limits and compaction ---------------------------------------------------------

    def enforce_limits(self, clock_ms: int, now_ms: int) -> bool:
        """Enforce the directory's limits, check one closed partition, and compact.

        Return True after a longer piece of work. The caller holds the directory's lock.
        """
        assert self._claim is not None
        now_ms = self._claim.clock.now_ms(now_ms)
        if self._check_space(clock_ms, now_ms):
            return True
        self._check_closed_partition(now_ms)
        return self.settings.compacts and self._compact(clock_ms, now_ms)

    def _check_space(self, clock_ms: int, now_ms: int) -> bool:
        """Enforce the limits for used and free space; return whether segments were
        deleted.
        """
        if clock_ms < self._next_check_ms:
            return False
        maintenance = self.settings
        acted = False
        if maintenance.max_bytes is not None:
            total = sum(
                self._directory.size_bytes(name, number)
                for name in self._directory.topics()
                for number in self._directory.partitions(name)
            )
            if total > maintenance.max_bytes:
                acted = self._delete_oldest_segments(
                    total - maintenance.max_bytes, now_ms
                )
        if maintenance.min_free_bytes:
            self.is_disk_low = (
                self._fs.free_bytes(self._directory.path) < maintenance.min_free_bytes
            )
            for log in self._directory.host.open_logs().values():
                log.host.writer.hold_appends(self.is_disk_low)
        # With 10,000 partitions a check takes 0.2 s. The interval keeps checks below 1
        # % of the time.
        self._next_check_ms = clock_ms + max(
            _SPACE_MS, 100 * (self._fs.monotonic_ms() - clock_ms)
        )
        return acted

    def _delete_oldest_segments(self, excess_bytes: int, now_ms: int) -> bool:
        """Delete the oldest segments of all partitions until this many bytes are free,
        or no more segments may be deleted.
        """
        facts = {}
        for name in self._directory.topics():
            for number in self._directory.partitions(name):
                with self._incidents.reporting_errors(
                    "retention", partition_name(name, number)
                ):
                    # The only segment of a partition is never deleted here, so it is
                    # not worth opening.
                    if (
                        len(list_bases(self._fs, self._partition_path(name, number)))
                        > 1
                    ):
                        facts[name, number] = self._directory.partition(
                            name, number
                        ).host.maintenance.facts(now_ms)
        acted = False
        for (name, number), count in to_fit(facts, excess_bytes).items():
            with self._incidents.reporting_errors(
                "retention", partition_name(name, number)
            ):
                acted |= (
                    self._directory.partition(name, number).retain(
                        now_ms, segments=count
                    )
                    > 0
                )
        return acted

    def _check_closed_partition(self, now_ms: int) -> None:
        """Check one partition that is not open, and open it if retention has work in
        it.
        """
        if not self._partitions_to_check:
            self._partitions_to_check = [
                (name, number)
                for name in self._directory.topics()
                for number in self._directory.partitions(name)
            ]
        if not self._partitions_to_check:
            return
        name, number = self._partitions_to_check.pop()
        if name not in self._directory:
            return
        if self._directory.host.opened(name, number) is not None:
            return
        config = self._directory.settings(name)
        if "delete" not in config.cleanup_policy:
            return
        path = self._partition_path(name, number)
        with self._incidents.reporting_errors(
            "retention", partition_name(name, number)
        ):
            bases = list_bases(self._fs, path)
            if len(bases) < 2 and not (
                bases and self._directory.size_bytes(name, number)
            ):
                # The log is empty.
                return
            # Computing the size reads the metadata of every file, so it is done only if
            # it matters.
            too_large = (
                0 <= config.retention_bytes < self._directory.size_bytes(name, number)
            )
            age_ms = now_ms - Segment(self._fs, path, bases[0]).max_timestamp()
            if too_large or 0 <= config.retention_ms < age_ms:
                assert self._claim is not None
                self._claim.clock.save()
                self._directory.partition(name, number).retain(
                    now_ms, policy=self.settings.retention
                )

    def _compact(self, clock_ms: int, now_ms: int) -> bool:
        """Continue the round in progress, or start the most urgent one.

        Return whether it did any work.
        """
        if self._cleaning is None:
            if clock_ms < self._next_cleaning_ms:
                return False
            self._next_cleaning_ms = clock_ms + self.settings.compaction_backoff_ms
            self._cleaning = self._next_to_clean(now_ms)
            self._cleaned_bytes = 0
            self._cleaning_since_ms = clock_ms
            if self._cleaning is None:
                return False
        log, steps = self._cleaning
        rate = self.settings.compaction_bytes_per_s
        began_us = self._fs.thread_us()
        try:
            while self._may_clean(clock_ms, began_us):
                # With a rate limit, the round may be 100 ms ahead, so that its first
                # step is allowed.
                if (
                    rate is not None
                    and self._cleaned_bytes
                    > rate * (clock_ms - self._cleaning_since_ms + 100) / 1000
                ):
                    return True
                self._cleaned_bytes = next(steps).done_bytes
            return True
        except StopIteration:
            # The next round may begin at once, because another log may be waiting.
            self._next_cleaning_ms = clock_ms
            self._uncleanable = {
                key: entry
                for key, entry in self._uncleanable.items()
                if entry[0] is not log
            }
        except LogcoreError as error:
            key = next(
                (
                    key
                    for key, known_log in self._directory.host.known_logs().items()
                    if known_log is log
                ),
                None,
            )
            if key is not None:
                self._record_failed_cleaning(key, log, error)
        self._cleaning = None
        return True

    def _may_clean(self, began_ms: int, began_us: int) -> bool:
        """Return whether compaction may continue in this tick.

        The limit is processor time. With a limit by the clock, compaction would get
        almost no time on a busy machine, because it mostly waits for other processes.
        """
        cleaner_us = self._fs.thread_us() - began_us
        passed_ms = self._fs.monotonic_ms() - began_ms
        return cleaner_us < _CLEANER_TICK_US or (
            passed_ms < _CLEANER_FREE_MS and passed_ms * 1000 <= cleaner_us * 3 // 2
        )

    def _next_to_clean(
        self, now_ms: int
    ) -> tuple[Log, Generator[ScrubProgress, None, object]] | None:
        """Return the due log with the highest dirty ratio (storage format section 9.2)."""
        # Imported late because only compaction needs it.
        from logcore import cleaner

        best: tuple[float, Log] | None = None
        for key, log in self._directory.host.open_logs().items():
            if not log.config.is_compacted or log.has_failed:
                continue
            failed, retry_ms, _ = self._uncleanable.get(key, (None, 0, 0))
            if failed is log and self._fs.monotonic_ms() < retry_ms:
                continue
            try:
                plan = cleaner.plan_of(log, now_ms)
            except (LogcoreError, OSError) as error:
                self._record_failed_cleaning(key, log, error)
                continue
            if plan.is_due and (best is None or plan.ratio > best[0]):
                best = plan.ratio, log
        if best is None:
            return None
        memory_bytes = self.settings.compaction_memory_bytes
        return best[1], cleaner.cleaning(
            best[1], now_ms=now_ms, memory_bytes=memory_bytes
        )

    def _record_failed_cleaning(
        self, key: tuple[str, int], log: Log, error: LogcoreError | OSError
    ) -> None:
        """Report a failed compaction.

        After damage, further attempts follow at growing intervals, because the file may
        be restored.
        """
        self._incidents.record("compaction", "{}-{}".format(*key), error)
        if not getattr(error, "retriable", False):
            if key in self._uncleanable:
                previous_wait_ms = self._uncleanable[key][2]
            else:
                previous_wait_ms = _UNCLEANABLE_MS // 2
            wait_ms = min(2 * previous_wait_ms, _UNCLEANABLE_MAX_MS)
            self._uncleanable[key] = log, self._fs.monotonic_ms() + wait_ms, wait_ms

    def stop_compacting(self, *logs: Log) -> None:
        """End the round in progress if it compacts one of these logs.

        Files that are not in place yet are deleted.
        """
        if self._cleaning is not None and self._cleaning[0] in logs:
            steps = self._cleaning[1]
            self._cleaning = None
            steps.close()

    def _partition_path(self, topic: str, number: int) -> str:
        return os.path.join(self._directory.path, partition_name(topic, number))

    # -- checkpoints -------------------------------------------------------------------

    def _save_recovery_points(
        self, recovery_points: Iterable[tuple[tuple[str, int], Log, int]]
    ) -> None:
        """Write gathered recovery points for all logs at once.

        If a recovery point is lost, the next opening only checks more. Logs that were
        truncated or deleted in the meantime are left out, because a recovery point above
        the end would prevent a log from opening.
        """
        assert self._claim is not None
        logs = {key: log for key, log, _ in recovery_points}
        points: dict[Key, int | None] = {
            key: point for key, _, point in recovery_points
        }

        def holds(key: Key, point: int | None) -> bool:
            log = logs[key]
            return (
                self._directory.host.known_logs().get(key) is log
                and log.recovery_point == point
            )

        with self._incidents.reporting_errors("checkpoints", self._directory.path):
            self._claim.checkpoints.set(checkpoint.RECOVERY_POINT, points, holds=holds)

    @property
    def has_unsaved_high_watermarks(self) -> bool:
        """Whether the interval since the last write of high watermarks has passed."""
        return (
            self._fs.monotonic_ms() - self._high_watermarks_saved_ms
            >= _HIGH_WATERMARK_MS
        )

    def save_high_watermarks(self, offsets: dict[tuple[str, int], int | None]) -> None:
        """Write replication-offset-checkpoint, from which Kafka starts its high
        watermarks.
        """
        self._high_watermarks_saved_ms = self._fs.monotonic_ms()
        if offsets != self._saved_high_watermarks:
            assert self._claim is not None
            self._claim.checkpoints.set(checkpoint.HIGH_WATERMARK, offsets)
            self._saved_high_watermarks = offsets


def high_watermarks(
    logs: Mapping[tuple[str, int], Log],
) -> dict[tuple[str, int], int | None]:
    return {key: log.high_watermark for key, log in logs.items() if not log.is_closed}
