"""Into how many tasks ranges are cut, and where.

Rules:
- Tasks are few and large: one for each partition, cut above maxPartitionBytes where index entries stand, so that no
  batch is decoded by two tasks. minPartitions cuts by Kafka's formula.

This module reads nothing: an origin says what it knows of sizes, see Marks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pyspark_logcore.options import ReadOptions
from pyspark_logcore.ranges import OffsetRange


@attrs.frozen
class Marks:
    """Places in a range where it may be cut: how many bytes lie before each, and what batch stands there.

    size_bytes: of the whole range, 0 where that is not known. before_bytes: shape (marks,), int64, rising. offset_at:
    from the number of a mark to the first offset of its batch; None where that cannot be read.
    """

    size_bytes: int
    before_bytes: npt.NDArray[np.int64]
    offset_at: Callable[[int], int | None]

    def offset_near(self, at_bytes: int, within_bytes: int) -> int | None:
        """First offset of a batch about so many bytes into the range; None when no mark lies within that distance."""
        if not len(self.before_bytes):
            return None
        nearest = int(np.abs(self.before_bytes - at_bytes).argmin())
        if abs(int(self.before_bytes[nearest]) - at_bytes) > within_bytes:
            return None
        return self.offset_at(nearest)


#: Of an origin that knows no sizes: its ranges are cut by offsets.
NO_MARKS = Marks(0, np.zeros(0, np.int64), lambda _: None)


def cut(
    ranges: Sequence[OffsetRange], marks_of: Callable[[OffsetRange], Marks], options: ReadOptions
) -> list[OffsetRange]:
    """The ranges of single tasks, in the order of the ranges given."""
    pieces: list[OffsetRange] = []
    for one in ranges:
        marks = marks_of(one)
        pieces += split(one, marks, -(-marks.size_bytes // options.max_partition_bytes))
    if options.max_records is not None:
        most = options.max_records
        pieces = [
            attrs.evolve(one, start=at, end=min(at + most, one.end))
            for one in pieces
            for at in range(one.start, one.end, most)
        ]
    if options.min_partitions is not None and len(pieces) < options.min_partitions:
        parts = part_counts([one.end - one.start for one in pieces], options.min_partitions)
        pieces = [piece for one, count in zip(pieces, parts, strict=True) for piece in split(one, marks_of(one), count)]
    return pieces


def part_counts(sizes: list[int], least: int) -> list[int]:
    """Into how many parts to cut each range for about `least` in all: Kafka's formula, small ones stay whole."""

    def count(size: int, total: int, parts: int) -> int:
        return max(1, int(size / total * parts + 0.5)) if total else 1

    total = sum(sizes)
    small = [count(size, total, least) == 1 for size in sizes]
    rest = sum(size for size, is_small in zip(sizes, small, strict=True) if not is_small)
    parts = max(least - sum(small), 1)
    return [1 if is_small else count(size, rest, parts) for size, is_small in zip(sizes, small, strict=True)]


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
