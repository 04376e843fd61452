"""Divides offset ranges into Spark tasks.

Rules:
- Tasks are few and large: one for each partition. A range above maxPartitionBytes is
  divided at index entries, so that no batch is decoded by two tasks. minPartitions
  divides by Kafka's formula.
- Small ranges share a task up to packBytes, because each task costs Spark 14 to 30 ms.
  A task reads its ranges one after another. If the user limits tasks or records
  (minPartitions, maxRecordsPerPartition), ranges do not share tasks.

This module reads no files: a source reports sizes as a SizeIndex.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from pyspark_logcore.options import ReadOptions
from pyspark_logcore.ranges import OffsetRange

#: Assumed size of a record if the origin reports no sizes.
_GUESSED_BYTES: Final = 100


@attrs.frozen
class SizeIndex:
    """Starts of some batches of a range, at which the range may be divided."""

    #: The size of the whole range, or 0 if it is unknown.
    size_bytes: int
    #: The number of bytes before each batch: shape (batches,), int64, ascending.
    before_bytes: npt.NDArray[np.int64]
    #: Maps the index of a batch to its first offset, or to None if it cannot be read.
    offset_at: Callable[[int], int | None]

    def offset_near(self, at_bytes: int, within_bytes: int) -> int | None:
        """Return the first offset of the batch that is nearest to `at_bytes`.

        Return None if no batch is within `within_bytes` of it.
        """
        if not len(self.before_bytes):
            return None
        nearest = int(np.abs(self.before_bytes - at_bytes).argmin())
        if abs(int(self.before_bytes[nearest]) - at_bytes) > within_bytes:
            return None
        return self.offset_at(nearest)


#: For an origin without sizes: its ranges are divided by offsets.
NO_SIZES = SizeIndex(0, np.zeros(0, np.int64), lambda _: None)


@attrs.frozen
class _SizedRange:
    """A range that one task reads; `size_bytes` is its approximate size."""

    range: OffsetRange
    size_bytes: int


def into_tasks(
    ranges: Sequence[OffsetRange],
    size_index_of: Callable[[OffsetRange], SizeIndex],
    options: ReadOptions,
) -> list[list[OffsetRange]]:
    """Return the ranges of each task, in the order of the given ranges."""
    sized_ranges: list[_SizedRange] = []
    for offset_range in ranges:
        size_index = size_index_of(offset_range)
        size = (
            size_index.size_bytes
            or (offset_range.end - offset_range.start) * _GUESSED_BYTES
        )
        sized_ranges += _parts(
            offset_range,
            size_index,
            -(-size_index.size_bytes // options.max_partition_bytes),
            size,
        )
    most = options.max_records
    if most is None and options.min_partitions is None:
        return _packed(sized_ranges, options)
    if most is not None:
        sized_ranges = [
            _SizedRange(
                part,
                sized_range.size_bytes
                * (part.end - part.start)
                // (sized_range.range.end - sized_range.range.start),
            )
            for sized_range in sized_ranges
            for part in _of_records(sized_range.range, most)
        ]
    if (
        options.min_partitions is not None
        and len(sized_ranges) < options.min_partitions
    ):
        counts = part_counts(
            [
                sized_range.range.end - sized_range.range.start
                for sized_range in sized_ranges
            ],
            options.min_partitions,
        )
        sized_ranges = [
            part
            for sized_range, count in zip(sized_ranges, counts, strict=True)
            for part in _parts(
                sized_range.range,
                size_index_of(sized_range.range),
                count,
                sized_range.size_bytes,
            )
        ]
    return [[sized_range.range] for sized_range in sized_ranges]


def _parts(
    offset_range: OffsetRange, size_index: SizeIndex, count: int, size_bytes: int
) -> list[_SizedRange]:
    parts = split(offset_range, size_index, count)
    return [_SizedRange(part, size_bytes // len(parts)) for part in parts]


def _of_records(offset_range: OffsetRange, most: int) -> list[OffsetRange]:
    return [
        attrs.evolve(offset_range, start=at, end=min(at + most, offset_range.end))
        for at in range(offset_range.start, offset_range.end, most)
    ]


def _packed(
    sized_ranges: Sequence[_SizedRange], options: ReadOptions
) -> list[list[OffsetRange]]:
    """Combine adjacent ranges while their sum is small."""
    tasks: list[list[OffsetRange]] = []
    free_bytes = 0
    for sized_range in sized_ranges:
        size = sized_range.size_bytes + options.open_cost_bytes
        if not tasks or size > free_bytes or not options.pack_bytes:
            tasks.append([])
            free_bytes = min(options.pack_bytes, options.max_partition_bytes)
        tasks[-1].append(sized_range.range)
        free_bytes -= size
    return tasks


def part_counts(sizes: list[int], least: int) -> list[int]:
    """Return the number of parts of each range, for about `least` parts in all.

    The formula is Kafka's: small ranges are not divided.
    """

    def count(size: int, total: int, parts: int) -> int:
        if total:
            return max(1, int(size / total * parts + 0.5))
        return 1

    total = sum(sizes)
    small = [count(size, total, least) == 1 for size in sizes]
    rest = sum(
        size for size, is_small in zip(sizes, small, strict=True) if not is_small
    )
    parts = max(least - sum(small), 1)
    return [
        1 if is_small else count(size, rest, parts)
        for size, is_small in zip(sizes, small, strict=True)
    ]


def split(
    offset_range: OffsetRange, size_index: SizeIndex, parts: int
) -> list[OffsetRange]:
    """Divide a range into about this many parts of equal size in bytes.

    The range is divided at batches if their positions are known.
    """
    boundaries = [offset_range.start]
    for part in range(1, parts):
        size = size_index.size_bytes // parts
        offset = size_index.offset_near(part * size, size // 2)
        if offset is None:
            offset = (
                offset_range.start
                + (offset_range.end - offset_range.start) * part // parts
            )
        if boundaries[-1] < offset < offset_range.end:
            boundaries.append(offset)
    boundaries.append(offset_range.end)
    return [
        attrs.evolve(offset_range, start=low, end=high)
        for low, high in itertools.pairwise(boundaries)
    ]
