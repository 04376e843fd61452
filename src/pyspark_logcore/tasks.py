"""Divides offset ranges into Spark tasks.

Rules:
- Tasks are few and large: one for each partition. A range above maxPartitionBytes is
  divided at index entries, so that no batch is decoded by two tasks. minPartitions
  divides by Kafka's formula.
- Small ranges share a task up to packBytes, because each task costs Spark 14 to 30 ms.
  A task reads its ranges one after another. If the user limits tasks or records
  (minPartitions, maxRecordsPerPartition), ranges do not share tasks.

This module reads no files: a source reports sizes as Marks.
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
class Marks:
    """Places at which a range may be divided, each at the start of a batch.

    `size_bytes` is the size of the whole range, or 0 if it is unknown. `before_bytes` is
    the number of bytes before each mark: shape (marks,), int64, ascending. `offset_at`
    maps the index of a mark to the first offset of its batch, or to None if the batch
    cannot be read.
    """

    size_bytes: int
    before_bytes: npt.NDArray[np.int64]
    offset_at: Callable[[int], int | None]

    def offset_near(self, at_bytes: int, within_bytes: int) -> int | None:
        """Return the first offset of the batch whose mark is nearest to `at_bytes`.

        Return None if no mark is within `within_bytes` of it.
        """
        if not len(self.before_bytes):
            return None
        nearest = int(np.abs(self.before_bytes - at_bytes).argmin())
        if abs(int(self.before_bytes[nearest]) - at_bytes) > within_bytes:
            return None
        return self.offset_at(nearest)


#: Marks of an origin without sizes; its ranges are divided by offsets.
NO_MARKS = Marks(0, np.zeros(0, np.int64), lambda _: None)


@attrs.frozen
class _Piece:
    """A range that one task reads; `size_bytes` is its approximate size."""

    range: OffsetRange
    size_bytes: int


def into_tasks(
    ranges: Sequence[OffsetRange],
    marks_of: Callable[[OffsetRange], Marks],
    options: ReadOptions,
) -> list[list[OffsetRange]]:
    """Return the ranges of each task, in the order of the given ranges."""
    pieces: list[_Piece] = []
    for offset_range in ranges:
        marks = marks_of(offset_range)
        size = (
            marks.size_bytes or (offset_range.end - offset_range.start) * _GUESSED_BYTES
        )
        pieces += _parts(
            offset_range,
            marks,
            -(-marks.size_bytes // options.max_partition_bytes),
            size,
        )
    most = options.max_records
    if most is None and options.min_partitions is None:
        return _packed(pieces, options)
    if most is not None:
        pieces = [
            _Piece(
                part,
                piece.size_bytes
                * (part.end - part.start)
                // (piece.range.end - piece.range.start),
            )
            for piece in pieces
            for part in _of_records(piece.range, most)
        ]
    if options.min_partitions is not None and len(pieces) < options.min_partitions:
        counts = part_counts(
            [piece.range.end - piece.range.start for piece in pieces],
            options.min_partitions,
        )
        pieces = [
            part
            for piece, count in zip(pieces, counts, strict=True)
            for part in _parts(
                piece.range, marks_of(piece.range), count, piece.size_bytes
            )
        ]
    return [[piece.range] for piece in pieces]


def _parts(
    offset_range: OffsetRange, marks: Marks, count: int, size_bytes: int
) -> list[_Piece]:
    parts = split(offset_range, marks, count)
    return [_Piece(part, size_bytes // len(parts)) for part in parts]


def _of_records(offset_range: OffsetRange, most: int) -> list[OffsetRange]:
    return [
        attrs.evolve(offset_range, start=at, end=min(at + most, offset_range.end))
        for at in range(offset_range.start, offset_range.end, most)
    ]


def _packed(pieces: Sequence[_Piece], options: ReadOptions) -> list[list[OffsetRange]]:
    """Combine adjacent ranges while their sum is small."""
    tasks: list[list[OffsetRange]] = []
    room = 0
    for piece in pieces:
        size = piece.size_bytes + options.open_cost_bytes
        if not tasks or size > room or not options.pack_bytes:
            tasks.append([])
            room = min(options.pack_bytes, options.max_partition_bytes)
        tasks[-1].append(piece.range)
        room -= size
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


def split(offset_range: OffsetRange, marks: Marks, parts: int) -> list[OffsetRange]:
    """Divide a range into about this many parts of equal size in bytes.

    The range is divided at batches if marks of batches exist.
    """
    borders = [offset_range.start]
    for part in range(1, parts):
        size = marks.size_bytes // parts
        offset = marks.offset_near(part * size, size // 2)
        if offset is None:
            offset = (
                offset_range.start
                + (offset_range.end - offset_range.start) * part // parts
            )
        if borders[-1] < offset < offset_range.end:
            borders.append(offset)
    borders.append(offset_range.end)
    return [
        attrs.evolve(offset_range, start=low, end=high)
        for low, high in itertools.pairwise(borders)
    ]
