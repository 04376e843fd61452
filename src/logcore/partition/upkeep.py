"""What a log that is written owes when time passes: syncs, rolls by age, retention, and its recovery point.

Rules:
- No thread and no timer: tick() does what is due, and rest() says when it is to be called next.
- The monotonic clock decides when something is due. Records are as old as the trusted time says (trustedclock.py), so
  a wall clock that is set ahead deletes nothing.
- A sync waits outside the log's lock, so that others append meanwhile.

This module deletes by policies that are given to it (logcore.retention), and does not know other logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from logcore import retention
from logcore.partition.cutting import delete_below_locked
from logcore.partition.writer import RECOVERY_LAG_MS, Writer
from logcore.segment import Segment

#: Under policies whose appends wait, tick() syncs what is unsynced for longer than this.
_LEFT_BEHIND_MS: Final = 100


class Upkeep:
    """The duties of one log, and when they are due."""

    def __init__(self, writer: Writer, left_below: Sequence[int]) -> None:
        """left_below: base offsets below the log start, of which a crash in a deletion has left files."""
        self.path = writer.path
        self._writer = writer
        self._left_below = left_below
        self._policy: retention.Policy = retention.kafka_rules
        self._committed: Callable[[], Mapping[str, int]] = dict
        clock_ms = writer.fs.monotonic_ms()
        self._next_retention_ms = clock_ms + retention.FIRST_CHECK_MS

    def tick(self, now_ms: int | None = None) -> bool:
        """See Log.tick()."""
        acted, recovery_point = self.tick_gathered(now_ms)
        if recovery_point is None:
            return acted
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            self._writer.save_recovery_point_locked()
        return True

    def tick_gathered(self, now_ms: int | None = None) -> tuple[bool, int | None]:
        """As tick(), but for the recovery point, which is returned when it is due: for a LogDir, which writes those of
        all its logs at once.
        """
        writer = self._writer
        with writer.state.lock:
            writer.check_writable_locked()
            clock_ms = writer.fs.monotonic_ms()
            target = writer.state.end
            is_sync_due = writer.commit.durable_end < target and clock_ms - writer.last_sync_ms >= self._sync_wait_ms
        # Deleting is enough for one call; what else is due is done by the next.
        if self._retain_when_due(clock_ms, now_ms):
            return True, None
        # Without the lock: others append while the disk works, and may close the log.
        if is_sync_due:
            writer.commit.wait(target)
        with writer.state.lock:
            writer.check_writable_locked()
            if is_sync_due:
                writer.last_sync_ms = clock_ms
            acted = is_sync_due
            acted |= writer.files.unlink_retired(clock_ms)
            # An empty segment has no age. One with records is rolled by tick() too, not only by the next append.
            if writer.active.size_bytes:
                if now_ms is None:
                    wall_ms = writer.fs.now_ms()
                else:
                    wall_ms = now_ms
                if wall_ms - writer.active.begun_ms > writer.state.config.max_segment_ms:
                    writer.roll_locked()
                    acted = True
            point = writer.commit.durable_end
            if point <= writer.recovery_point or clock_ms - writer.last_recovery_ms < RECOVERY_LAG_MS:
                return acted, None
            # How far it lags bounds what opening has to check after a crash.
            writer.recovery_bytes = writer.commit.synced_bytes
            writer.last_recovery_ms = clock_ms
            writer.active.offer_indexes()
            writer.recovery_point = point
            return acted, point

    def rest(self) -> int:
        """The monotonic time at which tick() next has something to do, unless on_stir() is called before."""
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
        """How long something may be unsynced before tick() syncs it."""
        wait_ms = self._writer.state.config.flush_ms
        policy = self._writer.durability
        if policy.kind == "interval":
            return min(wait_ms, policy.amount)
        if policy.waits:  # an append that asked for "os" must not stay invisible until the next append
            return min(wait_ms, _LEFT_BEHIND_MS)
        return wait_ms

    # -- retention -----------------------------------------------------------------------------------------------

    def retain_by(self, policy: retention.Policy, committed: Callable[[], Mapping[str, int]]) -> None:
        """What tick() deletes by from now on. committed(): the offsets of consumer groups, for policies that hold."""
        self._policy = policy
        self._committed = committed

    def facts(self, now_ms: int | None = None, committed: Mapping[str, int] | None = None) -> retention.PartitionFacts:
        """The facts by which a retention policy decides; see there for committed. Raises what reading raises."""
        with self._writer.state.lock:
            self._writer.check_writable_locked()
            return self._facts_locked(now_ms, committed)

    def _facts_locked(self, now_ms: int | None, committed: Mapping[str, int] | None) -> retention.PartitionFacts:
        state = self._writer.state
        ends = [*(segment.base_offset for segment in state.segments[1:]), state.end]
        if now_ms is None:
            now_ms = self._writer.fs.now_ms()
        return retention.PartitionFacts(
            segments=[self._age_of(segment, end) for segment, end in zip(state.segments, ends, strict=True)],
            log_start=state.log_start,
            high_watermark=state.visible,
            now_ms=now_ms,
            config=state.config,
            committed=committed or {},
        )

    def _age_of(self, segment: Segment, end_offset: int) -> retention.SegmentFacts:
        largest = segment.max_timestamp()
        if largest < 0:  # no record has a timestamp: Kafka goes by the file then
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
        """See Log.retain()."""
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
            # Whatever the policy says: segments below the log start always go, and others only below the high
            # watermark.
            count = max(retention.below_start(facts), min(wanted, facts.deletable))
            if count <= 0:
                return 0
            if count == len(writer.state.segments):  # the active segment too: the next append needs a new one
                writer.roll_locked()
            delete_below_locked(writer, max(writer.state.log_start, writer.state.segments[count].base_offset))
            return count

    def _retain_when_due(self, clock_ms: int, now_ms: int | None) -> bool:
        """Retention every five minutes, by the trusted time."""
        if clock_ms < self._next_retention_ms:
            return False
        self._next_retention_ms = clock_ms + retention.CHECK_MS
        claim = self._writer.claim
        if not claim.takes_care():  # of several processes one deletes
            return False
        if now_ms is None:
            now_ms = self._writer.fs.now_ms()
        now_ms = claim.clock.now_ms(now_ms)
        claim.clock.save()
        with self._writer.state.lock:
            self._writer.producers.expire(now_ms)
        # Kafka's own rules ask no group, and what groups have committed takes reading a whole topic.
        if self._policy is not retention.kafka_rules:
            committed = self._committed()
        else:
            committed = {}
        return self.retain(now_ms, policy=self._policy, committed=committed) > 0
