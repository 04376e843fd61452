"""Which segments at the front of a log may go, by age, by size and by who still needs them.

A policy is a pure function from what is known of a partition to how many of its first segments go. `kafka_rules` is
Kafka's (storage format section 8) and the default; `hold_for` makes another wait for consumer groups; any callable of
the same shape will do.

Rules:
- Segments go whole and from the front; what a policy says beyond what may go is cut back by the log itself.
- Nothing at or above the high watermark goes, and the active segment only when it has records, after a new one began.
- Time is the trusted time (trustedclock.py) and the times in the batches. A segment without times counts from when its
  file was written.

This module reads no file and deletes nothing: log.py does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import attrs

from logcore.config import LogConfig

#: Kafka: log.retention.check.interval.ms, and how long after the start it first looks.
CHECK_MS: Final = 300_000
FIRST_CHECK_MS: Final = 30_000


class SegmentFacts(NamedTuple):
    """One segment. end_offset: the next one's base offset, or the log end. largest_timestamp: of its batches in ms, or
    when the file was last written.
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    largest_timestamp: int


@attrs.frozen(kw_only=True)
class PartitionFacts:
    """The facts by which a policy decides. segments: all of them, the active one last. committed: consumer group -> the
    offset it will read next in this partition, as far as the owner of the log knows.
    """

    segments: Sequence[SegmentFacts]
    log_start: int
    high_watermark: int
    now_ms: int
    config: LogConfig
    committed: Mapping[str, int] = attrs.Factory(dict)

    @property
    def deletable(self) -> int:
        """How many of the first segments no rule forbids to delete."""
        count = 0
        for segment in self.segments:
            is_active = segment is self.segments[-1]
            if segment.end_offset > self.high_watermark or (is_active and not segment.size_bytes):
                break
            count += 1
        return count


Policy = Callable[[PartitionFacts], int]


def below_start(facts: PartitionFacts) -> int:
    """Segments that lie wholly below the log start; this rule holds for compacted topics too."""
    count = 0
    for segment in facts.segments[:-1]:
        if segment.end_offset > facts.log_start:
            break
        count += 1
    return count


def above_size(facts: PartitionFacts) -> int:
    """As many as must go so that retention.bytes are left at least."""
    limit = facts.config.retention_bytes
    if limit < 0:
        return 0
    excess = sum(segment.size_bytes for segment in facts.segments) - limit
    count = 0
    for segment in facts.segments:
        if excess < segment.size_bytes:
            break
        excess -= segment.size_bytes
        count += 1
    return count


def too_old(facts: PartitionFacts) -> int:
    """The number of segments before the first with a record newer than retention.ms allows."""
    limit = facts.config.retention_ms
    if limit < 0:
        return 0
    count = 0
    for segment in facts.segments:
        if facts.now_ms - segment.largest_timestamp <= limit:
            break
        count += 1
    return count


def kafka_rules(facts: PartitionFacts) -> int:
    """Storage format section 8: below the log start; and where the topic's policy has `delete`, by size and by time."""
    if "delete" not in facts.config.cleanup_policy:
        return below_start(facts)
    return max(below_start(facts), min(facts.deletable, max(above_size(facts), too_old(facts))))


def hold_for(*groups: str, policy: Policy = kafka_rules) -> Policy:
    """A policy that keeps what one of these consumer groups has yet to read. A group that has committed nothing holds
    everything.
    """

    def held(facts: PartitionFacts) -> int:
        reached = min(facts.committed.get(group, -1) for group in groups)
        free = 0
        for segment in facts.segments:
            if segment.end_offset > reached:
                break
            free += 1
        return max(below_start(facts), min(policy(facts), free))

    if groups:
        return held
    return policy


def to_fit(partitions: Mapping[tuple[str, int], PartitionFacts], excess_bytes: int) -> dict[tuple[str, int], int]:
    """How many segments of each partition go so that a directory loses excess_bytes: the oldest of all first.

    Only of topics whose policy has `delete`, and never the active segment. Less goes where there is no more to go.
    """
    queue = []
    for key, facts in partitions.items():
        if "delete" in facts.config.cleanup_policy:
            newest = 0  # a segment goes only with those before it, so the newest of them gives its age
            for count, segment in enumerate(facts.segments[: min(facts.deletable, len(facts.segments) - 1)], 1):
                newest = max(newest, segment.largest_timestamp)
                queue.append((newest, key, count, segment.size_bytes))
    chosen: dict[tuple[str, int], int] = {}
    for _, key, count, size_bytes in sorted(queue):
        if excess_bytes <= 0:
            break
        chosen[key] = count
        excess_bytes -= size_bytes
    return chosen
