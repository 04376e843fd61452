"""Maintenance of a log over time: syncs, rolls by age, retention, recovery point.

Rules:
- There is no thread and no timer. tick() runs the tasks that are due, and next_due_ms()
  returns the time of the next call. Both use the same table: due_times().
- The monotonic clock decides when a task is due. The age of records is measured with
  trusted time (metadata/trusted_clock.py), so a wall clock that is set ahead deletes nothing.
- A sync runs without the log's lock, so that other threads can append concurrently.

This module deletes by the policies that it is given (logcore.retention). It does not
use other logs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from logcore import retention
from logcore.config import Durability
from logcore.partition.truncation import delete_below_locked
from logcore.partition.writer import RECOVERY_LAG_MS, Writer
from logcore.segment import Segment

#: Under policies whose appends wait for a sync, tick() syncs data that has been
#: unsynced for longer than this.
_MAX_UNSYNCED_MS: Final = 100
#: Maximum number of segments that retention removes in one tick(). Appends to the log
#: wait while their files are renamed.
RETIRED_AT_ONCE: Final = 32


#: A maintenance task of a log.
MaintenanceTask = Literal["retention", "unlink", "sync", "recovery point", "roll"]


class ScheduleState(NamedTuple):
    """The state from which due_times() computes. All times are monotonic."""

    #: The current time.
    clock_ms: int
    #: When retention runs next.
    next_retention_ms: int
    #: When the next retired file may be deleted.
    next_unlink_ms: int
    #: Whether records are not durable yet.
    has_unsynced: bool
    #: Time of the last sync.
    synced_ms: int
    #: Maximum time for which records may remain unsynced.
    sync_wait_ms: int
    #: Whether records above the recovery point are durable.
    recovery_point_lags: bool
    #: When the recovery point was last stored.
    recovered_ms: int
    #: Time until the active segment is too old; negative if it is, None if it is empty.
    roll_in_ms: int | None


def due_times(facts: ScheduleState) -> dict[MaintenanceTask, int]:
    """Return the monotonic time at which each pending task is due.

    task            pending if                         due
    retention       always                             at its fixed time
    unlink          always                             when the oldest file may be deleted
    sync            records are not durable            sync_wait_ms after the last sync
    recovery point  it is below the durable end        5 s after the last one was stored
    roll            the active segment has records     at the age of segment.ms
    """
    times: dict[MaintenanceTask, int] = {
        "retention": facts.next_retention_ms,
        "unlink": facts.next_unlink_ms,
    }
    if facts.has_unsynced:
        times["sync"] = facts.synced_ms + facts.sync_wait_ms
    if facts.recovery_point_lags:
        times["recovery point"] = facts.recovered_ms + RECOVERY_LAG_MS
    if facts.roll_in_ms is not None:
        times["roll"] = facts.clock_ms + max(0, facts.roll_in_ms)
    return times


def due(facts: ScheduleState, now_ms: int) -> list[MaintenanceTask]:
    """Return the tasks that are due at the monotonic time `now_ms`."""
    return [duty for duty, due_ms in due_times(facts).items() if due_ms <= now_ms]


def sync_wait_ms(flush_ms: int, durability: Durability) -> int:
    """Return how long data may remain unsynced before tick() syncs it.

    `flush_ms` is the setting flush.ms of the topic.
    """
    if durability.kind == "interval":
        return min(flush_ms, durability.amount)
    # An append that requested "os" must not remain invisible until the next append.
    if durability.waits:
        return min(flush_ms, _MAX_UNSYNCED_MS)
    return flush_ms


class LogMaintenance:
    """The maintenance tasks of one log, and their due times."""

    def __init__(self, writer: Writer, leftover_bases: Sequence[int]) -> None:
        """Create the tasks of a log.

        `leftover_bases` contains the base offsets below the log start of which an
        interrupted deletion left files.
        """
        self.path = writer.path
        self._writer = writer
        self._leftover_bases = leftover_bases
        self._policy: retention.Policy = retention.kafka_rules
        self._committed: Callable[[], Mapping[str, int]] = dict
        clock_ms = writer.fs.monotonic_ms()
        self._next_retention_ms = clock_ms + retention.FIRST_CHECK_MS

    def tick(self, now_ms: int | None = None) -> bool:
        """Run the tasks that are due; see Log.tick()."""
        acted, recovery_point = self.tick_without_recovery_point(now_ms)
        if recovery_point is None:
            return acted
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            self._writer.save_recovery_point_locked()
        return True

    def tick_without_recovery_point(
        self, now_ms: int | None = None
    ) -> tuple[bool, int | None]:
        """Run the due tasks, but return a due recovery point instead of storing it.

        A LogDir uses this to store the recovery points of all its logs in one write.
        """
        writer = self._writer
        with writer.state.lock:
            writer.check_writable_locked()
            clock_ms = writer.fs.monotonic_ms()
            target = writer.state.end
            duties = due(self._schedule_state_locked(clock_ms, now_ms), clock_ms)
            if "retention" not in duties and "sync" not in duties:
                return self._run_locked(duties, clock_ms, now_ms)
        # 1. Retention. A deletion is enough work for one call. The next call runs the
        # other due tasks, unless it continues the deletion.
        retained = "retention" in duties and self._retain_when_due(clock_ms, now_ms)
        if retained and self._next_retention_ms > clock_ms:
            return True, None
        # 2. Sync, without the lock, so that other threads can append during the sync.
        # Another thread may also close the log.
        syncs = "sync" in duties
        if syncs:
            writer.commit.wait(target)
        # 3. The tasks that need the lock, as they are due after the sync.
        with writer.state.lock:
            writer.check_writable_locked()
            if syncs:
                writer.progress.record_sync(clock_ms)
            duties = due(self._schedule_state_locked(clock_ms, now_ms), clock_ms)
            acted, point = self._run_locked(duties, clock_ms, now_ms)
            return retained or syncs or acted, point

    def _run_locked(
        self, duties: Collection[MaintenanceTask], clock_ms: int, now_ms: int | None
    ) -> tuple[bool, int | None]:
        """Run the due tasks that need the lock. Return the same values as
        tick_without_recovery_point().
        """
        writer = self._writer
        acted = "unlink" in duties and writer.files.unlink_retired(clock_ms)
        if "roll" in duties:
            writer.roll_locked()
            acted = True
            duties = due(self._schedule_state_locked(clock_ms, now_ms), clock_ms)
        if "recovery point" not in duties:
            return acted, None
        point = writer.commit.durable_end
        writer.start_recovery_point_locked(clock_ms)
        writer.progress.set_recovery_point(point)
        return acted, point

    def next_due_ms(self) -> int:
        """Return the monotonic time of the next task.

        If the writer reports work before that, a task may be due earlier.
        """
        writer = self._writer
        with writer.state.lock:
            writer.check_writable_locked()
            writer.set_maintenance_idle_locked()
            facts = self._schedule_state_locked(writer.fs.monotonic_ms(), None)
            return min(due_times(facts).values())

    def _schedule_state_locked(
        self, clock_ms: int, wall_ms: int | None
    ) -> ScheduleState:
        """Return the current ScheduleState."""
        writer = self._writer
        config = writer.state.config
        if wall_ms is None:
            wall_ms = writer.fs.now_ms()
        # An empty segment has no age. A segment with records is rolled by age here too,
        # and not only by the next append.
        roll_in_ms = None
        if writer.active.size_bytes:
            age_ms = wall_ms - writer.active.begun_ms
            roll_in_ms = config.max_segment_ms - age_ms + 1
        return ScheduleState(
            clock_ms=clock_ms,
            next_retention_ms=self._next_retention_ms,
            next_unlink_ms=writer.files.next_ms,
            has_unsynced=writer.commit.durable_end < writer.state.end,
            synced_ms=writer.progress.synced_ms,
            sync_wait_ms=sync_wait_ms(config.flush_ms, writer.durability),
            recovery_point_lags=writer.progress.recovery_point
            < writer.commit.durable_end,
            recovered_ms=writer.progress.recovered_ms,
            roll_in_ms=roll_in_ms,
        )

    # -- retention ---------------------------------------------------------------------

    def retain_by(
        self, policy: retention.Policy, committed: Callable[[], Mapping[str, int]]
    ) -> None:
        """Set the policy by which tick() deletes from now on.

        `committed` returns the committed offsets of consumer groups, for policies that
        keep uncommitted records.
        """
        self._policy = policy
        self._committed = committed

    def facts(
        self, now_ms: int | None = None, committed: Mapping[str, int] | None = None
    ) -> retention.PartitionFacts:
        """Return the facts from which a retention policy decides.

        PartitionFacts documents `committed`.

        Raises:
            StorageReadError, CorruptBatchError: a segment cannot be read.
        """
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            return self._facts_locked(now_ms, committed)

    def _facts_locked(
        self, now_ms: int | None, committed: Mapping[str, int] | None
    ) -> retention.PartitionFacts:
        state = self._writer.state
        ends = [*(segment.base_offset for segment in state.segments[1:]), state.end]
        if now_ms is None:
            now_ms = self._writer.fs.now_ms()
        return retention.PartitionFacts(
            segments=[
                self._age_of(segment, end)
                for segment, end in zip(state.segments, ends, strict=True)
            ],
            log_start=state.log_start,
            high_watermark=state.visible,
            now_ms=now_ms,
            config=state.config,
            committed=committed or {},
        )

    def _age_of(self, segment: Segment, end_offset: int) -> retention.SegmentFacts:
        largest = segment.max_timestamp()
        if largest < 0:  # no record has a timestamp, so use the file's time, like Kafka
            largest = self._writer.fs.modified_ms(segment.path)
        return retention.SegmentFacts(
            base_offset=segment.base_offset,
            end_offset=end_offset,
            size_bytes=segment.size_bytes,
            largest_timestamp=largest,
        )

    def retain(
        self,
        now_ms: int | None = None,
        *,
        policy: retention.Policy = retention.kafka_rules,
        committed: Mapping[str, int] | None = None,
        segments: int | None = None,
        max_segments: int | None = None,
    ) -> int:
        """Delete segments by a policy, at most `max_segments` of them; see Log.retain()."""
        writer = self._writer
        with writer.state.lock:
            writer.check_writable_locked()
            leftover_bases = self._leftover_bases
            self._leftover_bases = ()
            writer.files.retire(
                leftover_bases, writer.state.config.file_delete_delay_ms
            )
            facts = self._facts_locked(now_ms, committed)
            if segments is None:
                requested = policy(facts)
            else:
                requested = segments
            # Regardless of the policy, segments below the log start are deleted, and
            # segments above the high watermark are not.
            count = max(retention.below_start(facts), min(requested, facts.deletable))
            if max_segments is not None:
                count = min(count, max_segments)
            if count <= 0:
                return 0
            # If the active segment is deleted too, the next append needs a new one.
            if count == len(writer.state.segments):
                writer.roll_locked()
            delete_below_locked(
                writer,
                max(writer.state.log_start, writer.state.segments[count].base_offset),
            )
            return count

    def _retain_when_due(self, clock_ms: int, now_ms: int | None) -> bool:
        """Run retention every five minutes, by trusted time.

        If it may have more to delete, the next call continues.
        """
        if clock_ms < self._next_retention_ms:
            return False
        self._next_retention_ms = clock_ms + retention.CHECK_MS
        claim = self._writer.claim
        if not claim.runs_maintenance():  # one of several processes deletes
            return False
        if now_ms is None:
            now_ms = self._writer.fs.now_ms()
        now_ms = claim.clock.now_ms(now_ms)
        claim.clock.save()
        with self._writer.state.lock:
            self._writer.producers.expire(now_ms)
        # Kafka's own rules do not depend on groups. Reading the committed offsets means
        # reading a whole topic.
        if self._policy is not retention.kafka_rules:
            committed = self._committed()
        else:
            committed = {}
        count = self.retain(
            now_ms,
            policy=self._policy,
            committed=committed,
            max_segments=RETIRED_AT_ONCE,
        )
        if count == RETIRED_AT_ONCE:
            self._next_retention_ms = clock_ms
        return count > 0
