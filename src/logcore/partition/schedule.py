"""Maintenance of a log over time: syncs, rolls by age, retention, recovery point.

Rules:
- There is no thread and no timer. tick() runs the tasks that are due, and rest()
  returns the time of the next call.
- The monotonic clock decides when a task is due. The age of records is measured with
  trusted time (metadata/trusted_clock.py), so a wall clock that is set ahead deletes nothing.
- A sync runs without the log's lock, so that other threads can append concurrently.

This module deletes by the policies that it is given (logcore.retention). It does not
use other logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from logcore import retention
from logcore.partition.truncation import delete_below_locked
from logcore.partition.writer import RECOVERY_LAG_MS, Writer
from logcore.segment import Segment

#: Under policies whose appends wait for a sync, tick() syncs data that has been
#: unsynced for longer than this.
_LEFT_BEHIND_MS: Final = 100


class LogMaintenance:
    """The maintenance tasks of one log, and their due times."""

    def __init__(self, writer: Writer, left_below: Sequence[int]) -> None:
        """Create the tasks of a log.

        `left_below` contains the base offsets below the log start of which an
        interrupted deletion left files.
        """
        self.path = writer.path
        self._writer = writer
        self._left_below = left_below
        self._policy: retention.Policy = retention.kafka_rules
        self._committed: Callable[[], Mapping[str, int]] = dict
        clock_ms = writer.fs.monotonic_ms()
        self._next_retention_ms = clock_ms + retention.FIRST_CHECK_MS

    def tick(self, now_ms: int | None = None) -> bool:
        """Run the tasks that are due; see Log.tick()."""
        acted, recovery_point = self.tick_gathered(now_ms)
        if recovery_point is None:
            return acted
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            self._writer.save_recovery_point_locked()
        return True

    def tick_gathered(self, now_ms: int | None = None) -> tuple[bool, int | None]:
        """Run the due tasks, but return a due recovery point instead of storing it.

        A LogDir uses this to store the recovery points of all its logs in one write.
        """
        writer = self._writer
        with writer.state.lock:
            writer.check_writable_locked()
            clock_ms = writer.fs.monotonic_ms()
            target = writer.state.end
            is_sync_due = (
                writer.commit.durable_end < target
                and clock_ms - writer.last_sync_ms >= self._sync_wait_ms
            )
        # A deletion is enough work for one call. The next call runs the other due
        # tasks.
        if self._retain_when_due(clock_ms, now_ms):
            return True, None
        # Without the lock, so that others can append while the disk syncs. They may
        # also close the log.
        if is_sync_due:
            writer.commit.wait(target)
        with writer.state.lock:
            writer.check_writable_locked()
            if is_sync_due:
                writer.last_sync_ms = clock_ms
            acted = is_sync_due
            acted |= writer.files.unlink_retired(clock_ms)
            # An empty segment has no age. A segment with records is rolled here too,
            # and not only by the next append.
            if writer.active.size_bytes:
                if now_ms is None:
                    wall_ms = writer.fs.now_ms()
                else:
                    wall_ms = now_ms
                if (
                    wall_ms - writer.active.begun_ms
                    > writer.state.config.max_segment_ms
                ):
                    writer.roll_locked()
                    acted = True
            point = writer.commit.durable_end
            if (
                point <= writer.recovery_point
                or clock_ms - writer.last_recovery_ms < RECOVERY_LAG_MS
            ):
                return acted, None
            # The lag of the recovery point bounds the data that opening checks after a
            # crash.
            writer.recovery_bytes = writer.commit.synced_bytes
            writer.last_recovery_ms = clock_ms
            writer.active.offer_indexes()
            writer.recovery_point = point
            return acted, point

    def rest(self) -> int:
        """Return the monotonic time of the next task.

        If on_stir() is called before that, a task may be due earlier.
        """
        writer = self._writer
        with writer.state.lock:
            writer.check_writable_locked()
            writer.is_resting = True
            due_ms = min(self._next_retention_ms, writer.files.next_ms)
            if writer.commit.durable_end < writer.state.end:
                due_ms = min(due_ms, writer.last_sync_ms + self._sync_wait_ms)
            if writer.recovery_point < writer.commit.durable_end:
                due_ms = min(due_ms, writer.last_recovery_ms + RECOVERY_LAG_MS)
            if writer.active.size_bytes:
                age_ms = writer.fs.now_ms() - writer.active.begun_ms
                left_ms = max(0, writer.state.config.max_segment_ms - age_ms + 1)
                due_ms = min(due_ms, writer.fs.monotonic_ms() + left_ms)
            return due_ms

    @property
    def _sync_wait_ms(self) -> int:
        """How long data may remain unsynced before tick() syncs it."""
        wait_ms = self._writer.state.config.flush_ms
        policy = self._writer.durability
        if policy.kind == "interval":
            return min(wait_ms, policy.amount)
        # An append that requested "os" must not remain invisible until the next append.
        if policy.waits:
            return min(wait_ms, _LEFT_BEHIND_MS)
        return wait_ms

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
    ) -> int:
        """Delete segments by a policy; see Log.retain()."""
        writer = self._writer
        with writer.state.lock:
            writer.check_writable_locked()
            left = self._left_below
            self._left_below = ()
            writer.files.retire(left, writer.state.config.file_delete_delay_ms)
            facts = self._facts_locked(now_ms, committed)
            if segments is None:
                wanted = policy(facts)
            else:
                wanted = segments
            # The policy is limited: segments below the log start are always deleted,
            # and other segments only if they are below the high watermark.
            count = max(retention.below_start(facts), min(wanted, facts.deletable))
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
        """Run retention every five minutes, by trusted time."""
        if clock_ms < self._next_retention_ms:
            return False
        self._next_retention_ms = clock_ms + retention.CHECK_MS
        claim = self._writer.claim
        if not claim.takes_care():  # one of several processes deletes
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
        return self.retain(now_ms, policy=self._policy, committed=committed) > 0
