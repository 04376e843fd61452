"""Retention: decides which segments at the front of a log may be deleted, by age, by
size and by consumer progress.

A policy is a pure function from the facts of a partition to the number of segments to
delete at its front. `kafka_rules` has Kafka's rules (storage format section 8) and is
the default. `hold_for` makes another policy wait for consumer groups. Any callable with
this signature can be used.

Rules:
- Only whole segments are deleted, from the front. If a policy returns too many, the log
  itself reduces the number.
- A segment with records at or above the high watermark is never deleted. The active
  segment is deleted only if it has records, after a new one was started.
- Time is the trusted time (trusted_clock.py) and the timestamps of the batches. The age
  of a segment without timestamps counts from the last write of its file.

This module reads no file and deletes nothing: log.py does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import attrs

from logcore.config import LogConfig

#: Kafka's log.retention.check.interval.ms, and the delay of the first check after the
#: start.
CHECK_MS: Final = 300_000
FIRST_CHECK_MS: Final = 30_000


class SegmentFacts(NamedTuple):
    """The facts of one segment."""

    base_offset: int
    #: Base offset of the next segment, or the log end.
    end_offset: int
    size_bytes: int
    #: The largest timestamp of its batches in ms, or the time of the last write of the
    #: file.
    largest_timestamp: int


@attrs.frozen(kw_only=True)
class PartitionFacts:
    """The facts of a partition that a policy uses."""

    #: All segments, the active one last.
    segments: Sequence[SegmentFacts]
    log_start: int
    high_watermark: int
    now_ms: int
    config: LogConfig
    #: Consumer group -> its next offset in this partition, if the owner of the log has
    #: it.
    committed: Mapping[str, int] = attrs.Factory(dict)

    @property
    def deletable(self) -> int:
        """The number of segments at the front that no rule protects."""
        count = 0
        for segment in self.segments:
            is_active = segment is self.segments[-1]
            if segment.end_offset > self.high_watermark or (
                is_active and not segment.size_bytes
            ):
                break
            count += 1
        return count


Policy = Callable[[PartitionFacts], int]


def below_start(facts: PartitionFacts) -> int:
    """Return how many segments are entirely below the log start.

    This rule applies to compacted topics too.
    """
    count = 0
    for segment in facts.segments[:-1]:
        if segment.end_offset > facts.log_start:
            break
        count += 1
    return count


def above_size(facts: PartitionFacts) -> int:
    """Return how many segments to delete so that at least retention.bytes remain."""
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
    """Return the number of segments before the first with a record newer than
    retention.ms allows.
    """
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
    """Return the number of segments to delete by Kafka's rules (storage format section
    8).

    These are the segments below the log start. If the topic's policy contains `delete`,
    size and age count too.
    """
    if "delete" not in facts.config.cleanup_policy:
        return below_start(facts)
    return max(
        below_start(facts), min(facts.deletable, max(above_size(facts), too_old(facts)))
    )


def hold_for(*groups: str, policy: Policy = kafka_rules) -> Policy:
    """Return a policy that keeps records which one of these groups has not read yet.

    A group without commits keeps everything.
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


def to_fit(
    partitions: Mapping[tuple[str, int], PartitionFacts], excess_bytes: int
) -> dict[tuple[str, int], int]:
    """Return how many segments of each partition to delete to free `excess_bytes`.

    The oldest segments are chosen first. Only topics with `delete` in their policy are
    considered, and never active segments. The result may free less if there are too few
    segments.
    """
    queue = []
    for key, facts in partitions.items():
        if "delete" in facts.config.cleanup_policy:
            # A segment is deleted only together with the earlier ones, so the newest of
            # them determines its age.
            newest = 0
            for count, segment in enumerate(
                facts.segments[: min(facts.deletable, len(facts.segments) - 1)], 1
            ):
                newest = max(newest, segment.largest_timestamp)
                queue.append((newest, key, count, segment.size_bytes))
    chosen: dict[tuple[str, int], int] = {}
    for _, key, count, size_bytes in sorted(queue):
        if excess_bytes <= 0:
            break
        chosen[key] = count
        excess_bytes -= size_bytes
    return chosen
