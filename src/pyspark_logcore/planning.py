"""From options to ranges of offsets: which partitions, from where to where, and in how many tasks.

Rules:
- All is resolved to numbers once; two plans of the same log with the same options differ only by what was appended.
- Tasks are few and large: one for each partition, cut above maxPartitionBytes where index entries stand, so that no
  batch is decoded by two tasks. minPartitions cuts by Kafka's formula.
- A plan says which directory it was made of. A task that sees another one, or none, fails.
- What was asked for and is not there is an error, or with failOnDataLoss=false a warning.

This module decodes nothing and imports no pyspark.
"""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable

import attrs
import numpy as np

import logcore
from logcore import checkpoint
from logcore.errors import (
    InvalidConfigError,
    LogcoreError,
    LogNotFoundError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
)
from logcore.fs import OS
from logcore.names import partition_name
from logcore.reader import LogReader, segments_between
from logcore.segment import Segment
from pyspark_logcore.options import EARLIEST, LATEST, At, OffsetMap, ReadOptions


@attrs.frozen
class OffsetRange:
    """The records of one partition with start <= offset < end."""

    topic: str
    partition: int
    start: int
    end: int


class DataLossError(LogcoreError):
    """Records that a query asked for are gone. failOnDataLoss=false makes it a warning."""


class OtherDirectoryError(LogcoreError):
    """A task does not see the log directory that its query was planned with, or sees another one at its path."""


@attrs.frozen
class Identity:
    """What tells a log directory, and a topic in it, from others at the same path: on other machines, or later.

    directory_id: Kafka's, in meta.properties; "" where Kafka wrote none. cluster_id: from there. topic_id: Kafka's,
    in partition.metadata, "" where there is none. head: offset and CRC of the log's first batch, where no id is known.
    """

    directory_id: str = ""
    cluster_id: str = ""
    topic_id: str = ""
    head: tuple[int, int] | None = None

    @classmethod
    def of(cls, path: str, topic: str, partition: int) -> Identity:
        """As it is here and now. Raises LogcoreError."""
        properties = checkpoint.properties(checkpoint.read(OS, path, checkpoint.META_PROPERTIES) or b"")
        where = os.path.join(path, partition_name(topic, partition))
        metadata = checkpoint.read(OS, where, checkpoint.PARTITION_METADATA)
        found = cls(
            properties.get("directory.id", ""), properties.get("cluster.id", ""), checkpoint.topic_id(metadata or b"")
        )
        return found if found.directory_id or found.topic_id else attrs.evolve(found, head=cls._head(where))

    @staticmethod
    def _head(path: str) -> tuple[int, int] | None:
        try:
            with logcore.open(path, read_only=True) as log:
                first = next(iter(log.batches(log.log_start_offset)), None)
                return None if first is None else (first.base_offset, first.crc)
        except LogNotFoundError:
            return None


def check_identity(planned: Identity, path: str, topic: str, partition: int) -> str | None:
    """Raises OtherDirectoryError in a task that sees another directory than its plan, or none. Returns why the topic in
    it is not the one that was planned with, None if it is.
    """
    host = os.uname().nodename
    if not os.path.isdir(path):
        raise OtherDirectoryError(
            f"the machine {host} does not see the log directory that this query was planned with; share it under this "
            "path, or run the query where it is",
            path=path,
        )
    found = Identity.of(path, topic, partition)
    for name in ("directory_id", "cluster_id"):
        expected = getattr(planned, name)
        if expected and getattr(found, name) != expected:
            raise OtherDirectoryError(
                f"the machine {host} has another log directory at this path than the one that this query was planned "
                "with; share that one, or run the query where it is",
                path=path,
                expected=f"{name} {expected}",
                found=getattr(found, name) or "none",
            )
    if planned.topic_id and found.topic_id and planned.topic_id != found.topic_id:
        return "the topic was deleted and made again since the query was planned"
    head = planned.head
    if head is None or found.head is None or head[0] != found.head[0]:  # one that retention took says nothing
        return None
    if head[1] != found.head[1]:
        raise OtherDirectoryError(
            f"the machine {host} has another log at this path than the one that this query was planned with, or it was "
            "compacted since",
            path=path,
            expected=f"a first batch with CRC {head[1]:#010x}",
            found=f"{found.head[1]:#010x}",
        )
    return None


def plan(options: ReadOptions) -> list[OffsetRange]:
    """The ranges of a batch read, one for each task, none empty. Raises LogcoreError."""
    with logcore.open_dir(options.path, read_only=True) as directory:
        wanted = _partitions(directory, options)
        for where, name in ((options.start, "startingOffsets"), (options.end, "endingOffsets")):
            _check_names(where, wanted, name)
        ranges: list[tuple[OffsetRange, LogReader]] = []
        for topic, partition in wanted:
            log = directory.partition(topic, partition)
            visible = log.last_stable_offset if options.isolation == "read_committed" else log.high_watermark
            loss = _loss(options, topic, partition)
            start = _start(options.start, log, topic, partition, visible, loss)
            end = _end(options.end, log, topic, partition, visible, loss)
            if start < end:
                ranges.append((OffsetRange(topic, partition, start, end), log))
        return list(_tasks(ranges, options))


def _partitions(directory: logcore.LogDir, options: ReadOptions) -> list[tuple[str, int]]:
    if options.assign is not None:
        pairs = list(options.assign)
        for topic, partition in pairs:
            if partition not in directory.partitions(topic):
                raise TopicNotFoundError(
                    f"topic {topic!r} has no partition {partition}",
                    path=options.path,
                    expected=f"some of {list(directory.partitions(topic))}",
                )
        return pairs
    if options.pattern is not None:
        names = [name for name in directory.topics() if re.fullmatch(options.pattern, name)]
    else:
        names = list(options.subscribe or ())
    return [(name, partition) for name in sorted(names) for partition in directory.partitions(name)]


def _check_names(where: At, wanted: Iterable[tuple[str, int]], name: str) -> None:
    """Kafka: JSON must name each partition that is read, and no other."""
    for given in (where.offsets, where.timestamps_ms):
        if isinstance(given, dict) and given.keys() != set(wanted):
            missing = sorted(set(wanted) - given.keys())
            unknown = sorted(given.keys() - set(wanted))
            raise InvalidConfigError(
                f"option {name} must name the partitions that are read",
                expected=f"also {missing}" if missing else "no others",
                found=unknown or "no others",
            )


def _loss(options: ReadOptions, topic: str, partition: int) -> Callable[[str], None]:
    def report(reason: str) -> None:
        report_loss(options.fail_on_data_loss, options.path, topic, partition, reason)

    return report


def report_loss(fail: bool, path: str, topic: str, partition: int, reason: str) -> None:
    """Raises DataLossError, or warns when the user said failOnDataLoss=false."""
    text = f"topic {topic} partition {partition}: {reason}"
    if fail:
        raise DataLossError(f"{text}. The option failOnDataLoss=false reads what is there", path=path)
    warnings.warn(f"{path}: {text}; reading what is there", stacklevel=2)


def _start(where: At, log: LogReader, topic: str, partition: int, visible: int, loss: Callable[[str], None]) -> int:
    first = log.log_start_offset
    timestamp_ms = _time_of(where.timestamps_ms, topic, partition)
    if timestamp_ms is not None:
        found = log.offset_for_timestamp(timestamp_ms)
        if found is None and where.strategy == "error":
            raise OffsetOutOfRangeError(
                f"topic {topic} partition {partition}: no record is as young as {timestamp_ms} ms; "
                "startingOffsetsByTimestampStrategy=latest makes that an empty read",
                path=log.path,
            )
        return visible if found is None else found
    asked = EARLIEST if where.offsets is None else where.offsets[topic, partition]
    if asked == EARLIEST:
        return first
    if asked < first:
        loss(f"offset {asked} was asked for, and the log begins at {first}")
        return first
    if asked > visible:
        loss(f"offset {asked} was asked for, and the log ends at {visible}")
        return visible
    return asked


def _end(where: At, log: LogReader, topic: str, partition: int, visible: int, loss: Callable[[str], None]) -> int:
    timestamp_ms = _time_of(where.timestamps_ms, topic, partition)
    if timestamp_ms is not None:
        found = log.offset_for_timestamp(timestamp_ms)
        return visible if found is None else found
    asked = LATEST if where.offsets is None else where.offsets[topic, partition]
    if asked == LATEST:
        return visible
    if asked > visible:
        loss(f"records up to offset {asked} were asked for, and the log ends at {visible}")
        return visible
    return asked


def _time_of(times: OffsetMap | int | None, topic: str, partition: int) -> int | None:
    return times if times is None or isinstance(times, int) else times[topic, partition]


# -- tasks -----------------------------------------------------------------------------------------------------------


def _tasks(ranges: list[tuple[OffsetRange, LogReader]], options: ReadOptions) -> Iterable[OffsetRange]:
    cut: list[OffsetRange] = []
    for one, log in ranges:
        marks = Marks.of(log, one.start, one.end)
        cut += split(one, marks, -(-marks.size_bytes // options.max_partition_bytes))
    if options.max_records is not None:
        most = options.max_records
        cut = [
            attrs.evolve(one, start=at, end=min(at + most, one.end))
            for one in cut
            for at in range(one.start, one.end, most)
        ]
    if options.min_partitions is not None and len(cut) < options.min_partitions:
        logs = {(one.topic, one.partition): log for one, log in ranges}
        parts = part_counts([one.end - one.start for one in cut], options.min_partitions)
        cut = [
            piece
            for one, count in zip(cut, parts, strict=True)
            for piece in split(one, Marks.of(logs[one.topic, one.partition], one.start, one.end), count)
        ]
    return cut


def part_counts(sizes: list[int], least: int) -> list[int]:
    """Into how many parts to cut each range for about `least` in all: Kafka's formula, small ones stay whole."""

    def count(size: int, total: int, parts: int) -> int:
        return max(1, int(size / total * parts + 0.5)) if total else 1

    total = sum(sizes)
    small = [count(size, total, least) == 1 for size in sizes]
    rest = sum(size for size, is_small in zip(sizes, small, strict=True) if not is_small)
    parts = max(least - sum(small), 1)
    return [1 if is_small else count(size, rest, parts) for size, is_small in zip(sizes, small, strict=True)]


@attrs.frozen
class Marks:
    """Places in a stretch of a log where it may be cut: how many bytes lie before each, and what batch stands there.

    size_bytes: of the whole stretch. before_bytes: int64, rising. places: (segment, position) for each.
    """

    size_bytes: int
    before_bytes: np.ndarray[tuple[int], np.dtype[np.int64]]
    segments: list[Segment]
    slots: np.ndarray[tuple[int], np.dtype[np.int64]]
    positions: np.ndarray[tuple[int], np.dtype[np.int64]]

    @classmethod
    def of(cls, log: LogReader, start: int, end: int) -> Marks:
        stretch = segments_between(log, start, end)
        total = 0
        before = []
        slots = []
        positions = []
        for slot, segment in enumerate(stretch):
            low = segment.find(start) if segment.base_offset < start else 0
            high = segment.find(end) if slot == len(stretch) - 1 else segment.size_bytes
            entries = segment.offset_index.array()["position"].astype(np.int64)
            here = np.concatenate([[low], entries[(entries > low) & (entries < high)]])
            before.append(here - low + total)
            slots.append(np.full(len(here), slot, np.int64))
            positions.append(here)
            total += max(0, high - low)
        empty = np.zeros(0, np.int64)
        return cls(
            total,
            np.concatenate([empty, *before]),
            stretch,
            np.concatenate([empty, *slots]),
            np.concatenate([empty, *positions]),
        )

    def offset_near(self, at_bytes: int, within_bytes: int) -> int | None:
        """First offset of a batch about so many bytes into the stretch; None when no mark lies within that distance."""
        if not len(self.before_bytes):
            return None
        slot = int(np.abs(self.before_bytes - at_bytes).argmin())
        if abs(int(self.before_bytes[slot]) - at_bytes) > within_bytes:
            return None
        try:
            batch = self.segments[int(self.slots[slot])].batch(int(self.positions[slot]))
        except LogcoreError:  # an index is no evidence, and damage is for the task to meet
            return None
        return None if batch is None else batch.base_offset


def split(one: OffsetRange, marks: Marks, parts: int) -> list[OffsetRange]:
    """Cuts a range into about that many parts of equal size in bytes, at batches where marks tell of them."""
    borders = [one.start]
    for part in range(1, parts):
        size = marks.size_bytes // parts
        offset = marks.offset_near(part * size, size // 2)
        if offset is None:
            offset = one.start + (one.end - one.start) * part // parts
        if borders[-1] < offset < one.end:
            borders.append(offset)
    borders.append(one.end)
    return [attrs.evolve(one, start=low, end=high) for low, high in itertools.pairwise(borders)]
