"""Offsets at which a micro-batch begins and ends, with the limits of Spark's Kafka
source.

Rules:
- An offset is the next offset to read of a partition. A checkpoint contains offsets in
  the format of Kafka's source, {"topic": {"0": 23}}, with topics sorted by name and
  partitions by number, because Spark compares the text.
- maxOffsetsPerTrigger is divided in proportion to the records of each partition. A
  partition with records gets at least one offset.
- An added partition is read from offset 0.
- An end below the start means that the topic was deleted and created again. The log is
  then read from its beginning.

This module is pure: it uses no origin and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from logcore.errors import InvalidConfigError
from pyspark_logcore.ranges import OffsetRange, TopicPartition

Offsets = Mapping[TopicPartition, int]


def to_json(offsets: Offsets) -> dict[str, dict[str, int]]:
    """Return offsets in the form that Spark stores."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(partition)] = int(offset)
    return found


def from_json(given: Any) -> dict[TopicPartition, int]:
    """Parse a map of topics and partitions.

    Raises:
        InvalidConfigError: the text is not such a map.
    """
    invalid = InvalidConfigError(
        "offsets of a checkpoint",
        expected='{"topic": {"0": 23}}, offsets of at least 0',
        found=repr(given)[:200],
    )
    if not isinstance(given, dict):
        raise invalid
    offsets: dict[TopicPartition, int] = {}
    for topic, partitions in given.items():
        if not isinstance(partitions, dict):
            raise invalid
        for partition, offset in partitions.items():
            if not partition.isdecimal() or type(offset) is not int or offset < 0:
                raise invalid
            offsets[topic, int(partition)] = offset
    return offsets


def backlog(start: Offsets, ends: Offsets) -> dict[TopicPartition, int]:
    """Return the number of offsets of each partition for the next batch."""
    return {key: end - beginning(start, ends, key) for key, end in ends.items()}


def beginning(start: Offsets, ends: Offsets, key: TopicPartition) -> int:
    """Return the offset at which a batch begins to read a partition."""
    before = start.get(key, 0)
    if before <= ends[key]:
        return before
    return 0


def at_most(start: Offsets, ends: Offsets, most: int) -> dict[TopicPartition, int]:
    """Return the ends of a batch of about `most` offsets, divided as in Kafka's source."""
    sizes = backlog(start, ends)
    total = sum(sizes.values())
    if total <= most:
        return dict(ends)
    limited = {}
    for key, size in sizes.items():
        share = 0
        if size:
            share = max(1, most * size // total)
        limited[key] = min(ends[key], beginning(start, ends, key) + share)
    return limited


def is_waiting(
    start: Offsets,
    ends: Offsets,
    least: int | None,
    since_seconds: float | None,
    delay: float,
) -> bool:
    """Return whether a batch waits for more records.

    `least` is minOffsetsPerTrigger. `since_seconds` is the time since the last batch, or
    None before the first batch, which does not wait. `delay` is maxTriggerDelay in
    seconds.
    """
    if least is None or since_seconds is None or since_seconds >= delay:
        return False
    return sum(backlog(start, ends).values()) < least


def made_again(
    start: Offsets, ends: Offsets, again: set[TopicPartition]
) -> dict[TopicPartition, int]:
    """Return ends below the start for partitions that must be read again, whatever
    their present size is.
    """
    return {
        key: min(end, start[key] - 1) if key in again and start.get(key, 0) > 0 else end
        for key, end in ends.items()
    }


def ranges(start: Offsets, ends: Offsets) -> list[OffsetRange]:
    """Return the ranges of a batch, by topic and partition, without empty ranges."""
    found = [
        OffsetRange(*key, beginning(start, ends, key), end)
        for key, end in sorted(ends.items())
    ]
    return [
        offset_range for offset_range in found if offset_range.start < offset_range.end
    ]
