"""Planning of a query: converts options to partitions and ranges of offsets.

Rules:
- Every bound is resolved to a number once. Two plans of one log with equal options
  differ only by appended records.
- A requested partition or offset that is missing is an error, or with
  failOnDataLoss=false a warning.

This module decodes nothing and imports no pyspark. tasks.py cuts the ranges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from logcore.errors import InvalidConfigError, OffsetOutOfRangeError, TopicNotFoundError
from pyspark_logcore.options import EARLIEST, LATEST, RangeEnd, ReadOptions
from pyspark_logcore.origin import Origin
from pyspark_logcore.ranges import Bounds, OffsetRange, TopicPartition, report_loss
from pyspark_logcore.tasks import into_tasks


def plan(options: ReadOptions, origin: Origin) -> list[list[OffsetRange]]:
    """Return the ranges of each task of a batch read, without empty ranges.

    Raises:
        LogcoreError: the offsets cannot be read, or records were deleted.
    """
    requested = requested_partitions(options, origin)
    check_names(options.start, requested, "startingOffsets")
    check_names(options.end, requested, "endingOffsets")
    bounds = origin.bounds(requested)
    for key in requested:
        if key not in bounds:
            _report(options, origin, key, "the partition was deleted")
    starts = starting_offsets(options, origin, bounds)
    ends = _ending_offsets(options, origin, bounds)
    ranges = [
        OffsetRange(*key, starts[key], ends[key])
        for key in bounds
        if starts[key] < ends[key]
    ]
    return into_tasks(ranges, origin.size_index, options)


def present_partitions(options: ReadOptions, origin: Origin) -> list[TopicPartition]:
    """Return requested_partitions() without missing partitions."""
    known = {
        topic: origin.partitions(topic)
        for topic in origin.topics()
        if _is_requested(options, topic)
    }
    found = [
        (topic, partition)
        for topic, partitions in known.items()
        for partition in partitions
    ]
    if options.assign is None:
        return found
    return [key for key in found if key in options.assign]


def _is_requested(options: ReadOptions, topic: str) -> bool:
    if options.assign is not None:
        return any(topic == name for name, _ in options.assign)
    if options.pattern is not None:
        return re.fullmatch(options.pattern, topic) is not None
    return topic in (options.subscribe or ())


def requested_partitions(options: ReadOptions, origin: Origin) -> list[TopicPartition]:
    """Return the present partitions that assign, subscribe or subscribePattern name.

    Raises:
        TopicNotFoundError: a named topic does not exist.
    """
    if options.assign is not None:
        pairs = list(options.assign)
        for topic, partition in pairs:
            numbers = origin.partitions(topic)
            if partition not in numbers:
                raise TopicNotFoundError(
                    f"topic {topic!r} has no partition {partition}",
                    path=origin.location,
                    expected=f"some of {list(numbers)}",
                )
        return pairs
    if options.pattern is not None:
        names = [
            name for name in origin.topics() if re.fullmatch(options.pattern, name)
        ]
    else:
        names = list(options.subscribe or ())
    return [
        (name, partition)
        for name in sorted(names)
        for partition in origin.partitions(name)
    ]


def check_names(
    range_end: RangeEnd, requested: Iterable[TopicPartition], name: str
) -> None:
    """Check that JSON offsets name exactly the partitions to read, as in Kafka's source."""
    for given in (range_end.offsets, range_end.timestamps_ms):
        if isinstance(given, Mapping) and given.keys() != set(requested):
            missing = sorted(set(requested) - given.keys())
            unknown = sorted(given.keys() - set(requested))
            raise InvalidConfigError(
                f"option {name} must name the partitions that are read",
                expected=f"also {missing}" if missing else "no others",
                found=unknown or "no others",
            )


def starting_offsets(
    options: ReadOptions, origin: Origin, bounds: Mapping[TopicPartition, Bounds]
) -> dict[TopicPartition, int]:
    """Return the first offset of each partition.

    Raises:
        OffsetOutOfRangeError: no record is at or after a start by time.
    """
    range_end = options.start
    found = _by_time(range_end, origin, bounds)
    starts = {}
    for key, bound in bounds.items():
        if key in found:
            offset = found[key]
            if offset is None and range_end.strategy == "error":
                raise OffsetOutOfRangeError(
                    f"topic {key[0]} partition {key[1]}: no record is at or after {_time_of(range_end, key)} ms; "
                    "startingOffsetsByTimestampStrategy=latest makes that an empty read",
                    path=origin.location,
                )
            starts[key] = bound.end if offset is None else offset
            continue
        requested_offset = _offset_or_bound(range_end, key)
        if requested_offset == EARLIEST:
            starts[key] = bound.start
        elif requested_offset == LATEST:
            starts[key] = bound.end
        else:
            starts[key] = _within(options, origin, key, requested_offset, bound)
    return starts


def _within(
    options: ReadOptions,
    origin: Origin,
    key: TopicPartition,
    requested_offset: int,
    bound: Bounds,
) -> int:
    """Return the requested offset, or the next existing one if losses are allowed."""
    if requested_offset < bound.start:
        _report(
            options,
            origin,
            key,
            f"offset {requested_offset} was asked for, and the log begins at {bound.start}",
        )
        return bound.start
    if requested_offset > bound.end:
        _report(
            options,
            origin,
            key,
            f"offset {requested_offset} was asked for, and the log ends at {bound.end}",
        )
        return bound.end
    return requested_offset


def _ending_offsets(
    options: ReadOptions, origin: Origin, bounds: Mapping[TopicPartition, Bounds]
) -> dict[TopicPartition, int]:
    range_end = options.end
    found = _by_time(range_end, origin, bounds)
    ends = {}
    for key, bound in bounds.items():
        offset = found.get(key)
        if key in found:
            requested_offset = LATEST
        else:
            requested_offset = _offset_or_bound(range_end, key)
        if offset is not None:
            ends[key] = offset
        elif requested_offset == LATEST:
            ends[key] = bound.end
        elif requested_offset > bound.end:
            reason = f"records up to offset {requested_offset} were asked for, and the log ends at {bound.end}"
            _report(options, origin, key, reason)
            ends[key] = bound.end
        else:
            ends[key] = requested_offset
    return ends


def _by_time(
    range_end: RangeEnd, origin: Origin, requested: Iterable[TopicPartition]
) -> dict[TopicPartition, int | None]:
    times = {key: _time_of(range_end, key) for key in requested}
    return origin.offsets_at(
        {key: time_ms for key, time_ms in times.items() if time_ms is not None}
    )


def _time_of(range_end: RangeEnd, key: TopicPartition) -> int | None:
    times = range_end.timestamps_ms
    if times is None or isinstance(times, int):
        return times
    return times[key]


def _offset_or_bound(range_end: RangeEnd, key: TopicPartition) -> int:
    if range_end.offsets is not None:
        return range_end.offsets[key]
    if range_end.bound == "latest":
        return LATEST
    return EARLIEST


def _report(
    options: ReadOptions, origin: Origin, key: TopicPartition, reason: str
) -> None:
    report_loss(options.fail_on_data_loss, origin.location, *key, reason)
