"""Finds the sound batches of one file that may be damaged, and the damage between them.

A file is read batch by batch, with CRCs and records, as long as each batch follows the
previous one. After damage, the next batch is found by the first of these methods that
succeeds:

1. The length in the damaged head leads to a sound batch or to the end of the file.
2. That length with one bit flipped back results in the right CRC: only the length was
   wrong.
3. A search at every byte. A record's value may contain a batch, so a batch that is found
   in this way counts only if the bytes after it resemble a log too.

Offsets, which no CRC covers, must rise. If two batches contradict each other, the batch
that does not continue the previous batch is dropped.

Rules:
- No process may be writing the file: it is mapped.
- A batch is sound if its CRC is right and its records can be decoded. If the records
  cannot be decoded because the codec's package is missing, or because they inflate to
  more than the memory limit, a right CRC is sufficient.
- The work is proportional to the size of the file for any content. Foreign bytes may
  resemble a head at every position, and the length in each such head may extend to the
  end of the file.
- A search keeps a few numbers for each stretch between two damages. If parts will be cut
  out of the result, it also keeps a few numbers for every 64 batches, so that a cut reads
  little more than the part.

This module handles one file. salvage.py determines the missing offsets and the files
that may fill a gap.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import numpy as np

from logcore.config import INT64_MAX
from logcore.errors import (
    LogcoreError,
    RecordTooLargeError,
    StorageReadError,
    UnsupportedCodecError,
)
from logcore.format.compression import Codec
from logcore.fs import FS, opened
from logcore.kernels import kernel, layout
from logcore.kernels.checksum import crc32c
from logcore.partition import order
from logcore.recordbatch import SLICE_ROWS, RecordBatch

ZEROS: Final = "zeros"
WALK_BATCHES: Final = 1024
_PIECE_BYTES: Final = 1 << 20
_SECTOR_BYTES: Final = 4096
#: Number of batches from one mark to the next.
_MARK_BATCHES: Final = 64
#: Number of records decoded at once to check that they can be decoded.
_DECODE_ROWS: Final = 1 << 16
#: Kafka's max.message.bytes. A longer chain of batches does not fit into the value of one
#: record, so it is part of a log.
_LARGEST_BATCH_BYTES: Final = (1 << 20) + layout.LOG_OVERHEAD
#: Maximum number of offsets between a batch and the next head, if that head is
#: recognised without its CRC.
_NEAR_OFFSETS: Final = 1 << 20
#: Base offset, length, leader epoch, magic: the same four fields at the same positions
#: in v2. v0 and v1 have the CRC in place of the leader epoch.
_PREFIX: Final = struct.Struct(">qiib")
#: Position in a v2 batch of the byte that names its codec.
_ATTRIBUTES: Final = layout.CRC_START + 1


class BatchFile:
    """A file of batches, mapped.

    Bytes that cannot be read are zeros in the mapping; `unreadable` lists them as
    [start, end).
    """

    def __init__(self, fs: FS, path: str, scratch: str) -> None:
        self.path = path
        self.unreadable: list[tuple[int, int]] = []
        with opened(fs, path) as handle:
            self.size = fs.size(handle)
            # Read everything once before mapping it. Access to an unreadable page of a
            # mapping kills the process.
            for position in range(0, self.size, _PIECE_BYTES):
                try:
                    fs.pread(handle, _PIECE_BYTES, position)
                except StorageReadError:
                    self.view = self._copy_readable(fs, handle, scratch)
                    return
            if self.size:
                self.view = fs.map(handle, self.size)
            else:
                self.view = memoryview(b"")

    def _copy_readable(self, fs: FS, handle: int, scratch: str) -> memoryview:
        copy = fs.open(scratch, write=True, create=True)
        try:
            fs.truncate(copy, self.size)
            for position in range(0, self.size, _SECTOR_BYTES):
                try:
                    fs.pwrite(
                        copy,
                        fs.pread(
                            handle, min(_SECTOR_BYTES, self.size - position), position
                        ),
                        position,
                    )
                except StorageReadError:
                    self.unreadable.append((position, position + _SECTOR_BYTES))
            return fs.map(copy, self.size)
        finally:
            fs.close(copy)
            fs.unlink(scratch)

    def batch(self, position: int) -> RecordBatch | None:
        return RecordBatch.parse(self.view, position, self.size, path=self.path)

    def is_zero(self, start: int, end: int) -> bool:
        return not any(
            np.frombuffer(self.view[at : min(at + _PIECE_BYTES, end)], np.uint8).any()
            for at in range(start, end, _PIECE_BYTES)
        )

    def describe_damage(self, start: int, end: int, reason: str) -> str:
        cannot = any(low < end and start < high for low, high in self.unreadable)
        if cannot:
            return "a part of it cannot be read"
        if start < end and self.is_zero(start, end):
            return ZEROS
        return reason


@attrs.define
class Extent:
    """Consecutive sound batches.

    `base` is the base offset of their segment in the copy, and `first` is their lowest
    offset. `marks` are (offset, position) of some batches, if marks were requested.
    """

    source: BatchFile
    base: int
    position: int
    end: int
    first: int
    next_offset: int
    batches: int = 0
    records: int = 0
    has_gaps: bool = False
    marks: list[tuple[int, int]] = attrs.Factory(list)

    def around(self, low: int, high: int) -> tuple[int, int]:
        """Return (start, end) in the file of a part that contains all batches in
        [low, high), and few others.
        """
        if low >= self.next_offset or high <= self.first:
            return self.end, self.end
        mark_below = bisect_right(self.marks, low, key=lambda mark: mark[0]) - 1
        mark_above = bisect_left(self.marks, high, key=lambda mark: mark[0])
        start = self.position
        if mark_below >= 0:
            start = self.marks[mark_below][1]
        end = self.end
        if mark_above < len(self.marks):
            end = self.marks[mark_above][1]
        return start, end

    def cut(self, base: int, low: int, high: int) -> list[Extent]:
        """Return the batches that are completely in [low, high), for a segment."""
        start, stop = self.around(low, high)
        return Search(self.source, base, low, high, start=start, stop=stop).extents


@attrs.define
class DamagedRange:
    """Bytes that are not a sound batch.

    If position == end, no bytes are damaged, but batches before the position are
    missing. `next_offset` is one above the last offset that the bytes certainly
    contained, or 0 if it is unknown.
    """

    source: BatchFile
    base: int
    position: int
    end: int
    reason: str
    next_offset: int = 0


class Search:
    """Finds the sound batches between two positions, with offsets in [low, high).

    With `is_dense`, each batch must continue the one before it. With `is_marked`, marks
    are kept so that parts of the extents can be cut out. `found` is the result, in file
    order.
    """

    def __init__(
        self,
        source: BatchFile,
        base: int,
        low: int,
        high: int,
        *,
        is_dense: bool = False,
        is_marked: bool = False,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.source = source
        self.base = base
        self.high = high
        self.is_dense = is_dense
        self.is_marked = is_marked
        if stop is None:
            self.stop = source.size
        else:
            self.stop = stop
        self.expected = low  # the lowest offset that the next batch may have
        # The last batch that was kept, for _drop_last_batch(). last_size is 0 if that
        # batch cannot be dropped.
        self.last_size = 0
        self.last_base = 0
        self.last_records = 0
        self.before_last = low  # `expected` before that batch was kept
        self.found: list[Extent | DamagedRange] = []
        #: Whether the batches have format v0 or v1 -> their checksums.
        self.checksums: dict[bool, _Checksums] = {}
        position = start
        while position < self.stop:
            position, reason = self._chain(position)
            if reason:
                next_position = self._end_of_damage(position)
                self._damage(position, next_position, reason)
                position = next_position

    @property
    def extents(self) -> list[Extent]:
        return [extent for extent in self.found if isinstance(extent, Extent)]

    def _walk(
        self, position: int, count: int = 1, *, crc: bool = True
    ) -> tuple[layout.Facts, int, int]:
        return kernel.walk(self.source.view, position, self.stop, count, crc)

    # -- sound batches -----------------------------------------------------------------

    def _chain(self, position: int) -> tuple[int, str]:
        """Keep complete batches from a position on.

        Return the position after them, and the reason why it is not the end, or "".
        """
        while True:
            facts, position, stop_reason = self._walk(position, WALK_BATCHES)
            while len(facts):
                row, reason = self._order_fault(facts)
                self._add_batches(facts[:row])
                facts = facts[row:]
                if not len(facts):
                    break
                # The first batch of `facts` contradicts the last batch kept: one of them
                # has a wrong offset.
                if self._is_last_wrong(facts[0]) or (
                    reason == _GAP and self._is_last_unproven()
                ):
                    self._drop_last_batch()
                elif (
                    reason == _GAP
                    and self._base_at(facts[0]) == int(facts[0]["last_offset"]) + 1
                ):
                    # Both offsets are right: the next batch continues this one, so
                    # batches before this one are missing.
                    start = int(facts[0]["position"])
                    self._damage(start, start, _GAP)
                    self._add_batches(facts[:1])
                    facts = facts[1:]
                else:  # the offset of this batch is wrong
                    start = int(facts[0]["position"])
                    self._damage(start, start + int(facts[0]["size_bytes"]), reason)
                    facts = facts[1:]
            if stop_reason == layout.WALK_END:
                return position, ""
            if stop_reason != layout.WALK_LIMIT:
                return position, layout.WALK_REASONS[stop_reason]

    def _order_fault(self, facts: layout.Facts) -> tuple[int, str]:
        """Return the row of the first batch that does not continue the log, and the
        reason. Without such a batch, return the number of batches and "".
        """
        dense_from = 0
        if not self.is_dense:
            dense_from = order.NEVER
        if self.is_dense and self.found and isinstance(self.found[-1], DamagedRange):
            # The damage explains a gap before the first batch.
            dense_from = int(facts["base_offset"][0])
        row, fault = order.first_fault(
            facts, self.expected, self.high, dense_from=dense_from
        )
        if fault is None:
            return row, ""
        return row, fault.value

    def _base_at(self, before: Any) -> int | None:
        """Return the base offset of the batch after another one, from its head."""
        facts, _, _ = self._walk(
            int(before["position"] + before["size_bytes"]), crc=False
        )
        if len(facts):
            return int(facts["base_offset"][0])
        return None

    def _is_last_wrong(self, facts: Any) -> bool:
        """Return whether the last batch kept has a wrong offset.

        If it does not, the batch of `facts`, which begins below the end of the last
        batch, has the wrong offset.
        """
        base = int(facts["base_offset"])
        last = int(facts["last_offset"])
        if (
            not self.last_size
            or self.last_base == self.before_last
            or not self.before_last <= base < self.expected
        ):
            return False
        # The batch of `facts` continues the batch before the last one, or leaves as many
        # offsets as the last one has.
        if base in (
            self.before_last,
            self.before_last + self.expected - self.last_base,
        ):
            return True
        return self._base_at(facts) == last + 1

    def _is_last_unproven(self) -> bool:
        """Return whether the offset of the last kept batch comes only from its header.

        If damage precedes the batch, no other batch confirms the offset.
        """
        extent = None
        if self.last_size:
            extent = self.found[-1]
        is_first_of_extent = isinstance(extent, Extent) and extent.batches == 1
        return is_first_of_extent and isinstance(self.found[-2:][0], DamagedRange)

    def _add_batches(self, facts: layout.Facts) -> None:
        """Keep batches with sound heads. A batch with undecodable records is damage."""
        while len(facts):
            is_old = facts["magic"] != 2
            if is_old.any():
                count = int(is_old.argmax())
            else:
                count = len(facts)
            reason = ""
            if count:
                count, reason = self._count_decodable(facts[:count])
                if count:
                    records = int(facts["record_count"][:count].sum(dtype=np.int64))
                    self._add(facts[:count], int(facts["base_offset"][0]), records)
            else:
                first, records, reason = self._old_offsets(int(facts["position"][0]))
                if not reason:
                    self._add(facts[:1], first, records)
                    count = 1
            facts = facts[count:]
            if reason:
                start = int(facts["position"][0])
                next_offset = int(facts["last_offset"][0]) + 1
                self._damage(
                    start, start + int(facts["size_bytes"][0]), reason, next_offset
                )
                facts = facts[1:]

    def _count_decodable(self, facts: layout.Facts) -> tuple[int, str]:
        """Return how many v2 batches precede the first undecodable one, and why."""
        positions = facts["position"]
        row = 0
        stop = int(positions[-1]) + int(facts["size_bytes"][-1])
        while row < len(facts):
            at = int(positions[row])
            view = self.source.view
            end, rows, _ = kernel.plan_run(
                view, at, stop, _DECODE_ROWS, _PIECE_BYTES, INT64_MAX
            )
            next_row = int(np.searchsorted(positions, end))
            try:
                if end > at:
                    kernel.decode_columns(
                        view, at, end, np.empty(rows * layout.ROW_SIZE, np.uint8), rows
                    )
                    row = next_row
                    continue
            except LogcoreError:
                pass  # one batch cannot be decoded: decode them one by one to find it
            for single in range(row, max(row + 1, next_row)):
                if reason := self._undecodable_reason(int(positions[single])):
                    return single, reason
            row = max(row + 1, next_row)
        return len(facts), ""

    def _undecodable_reason(self, position: int) -> str:
        """Return the fault in the records of a v2 batch whose CRC is right, or "" if there
        is none or the records cannot be checked.
        """
        try:
            batch = self.source.batch(position)
            if batch is not None:
                for _ in batch.column_slices(SLICE_ROWS):
                    pass
        except RecordTooLargeError:
            return ""
        except UnsupportedCodecError as error:
            if _is_codec(self.source.view[position + _ATTRIBUTES]):
                return ""
            return error.reason
        except LogcoreError as error:
            return f"its records cannot be decoded: {error.reason}"
        return ""

    def _old_offsets(self, position: int) -> tuple[int, int, str]:
        """Return (first offset, number of records, "") of a v0 or v1 entry, or (0, 0,
        fault). The entry must be decoded for that.
        """
        reason = "it contains no record"
        try:
            batch = self.source.batch(position)
            if batch is not None:
                records = batch.records()
            else:
                records = []
            if records:
                return records[0].offset, len(records), ""
        except UnsupportedCodecError as error:
            if _is_codec(self.source.view[position + layout.PREFIX_SIZE]):
                raise  # its offsets are unknown until the package is installed
            reason = error.reason
        except LogcoreError as error:
            reason = f"its records cannot be decoded: {error.reason}"
        return 0, 0, reason

    def _add(self, facts: layout.Facts, first: int, records: int) -> None:
        position = int(facts["position"][0])
        last = facts["last_offset"]
        extent = None
        if self.found:
            extent = self.found[-1]
        if not isinstance(extent, Extent):
            extent = Extent(self.source, self.base, position, position, first, first)
            self.found.append(extent)
        if len(facts) > 1:
            self.before_last = int(last[-2]) + 1
        else:
            self.before_last = self.expected
        self.last_size = int(facts["size_bytes"][-1])
        self.last_base = int(facts["base_offset"][-1])
        if facts["magic"][-1] == 2:
            self.last_records = int(facts["record_count"][-1])
        else:
            self.last_records = records
        self.expected = int(last[-1]) + 1
        if self.is_marked:
            marked = facts[::_MARK_BATCHES]
            extent.marks += zip(
                [first, *marked["base_offset"][1:].tolist()],
                marked["position"].tolist(),
                strict=True,
            )
        extent.end = int(facts["position"][-1]) + self.last_size
        extent.batches += len(facts)
        extent.records += records
        extent.has_gaps |= records < self.expected - extent.next_offset
        extent.next_offset = self.expected

    def _drop_last_batch(self) -> None:
        """Remove the last batch kept, and record it as damage."""
        extent = self.found[-1]
        assert isinstance(extent, Extent), "last_size is set only if a batch was kept"
        end = extent.end
        extent.end -= self.last_size
        extent.batches -= 1
        extent.records -= self.last_records
        extent.next_offset = self.expected = self.before_last
        while extent.marks and extent.marks[-1][1] >= extent.end:
            extent.marks.pop()
        if not extent.batches:
            self.found.pop()
        self._damage(end - self.last_size, end, _FAR)

    # -- damage ------------------------------------------------------------------------

    def _damage(
        self, position: int, end: int, reason: str, next_offset: int = 0
    ) -> None:
        self.last_size = 0
        last = None
        if self.found:
            last = self.found[-1]
        if isinstance(last, DamagedRange) and end > position:
            last.end = end
            last.next_offset = max(last.next_offset, next_offset)
        else:
            self.found.append(
                DamagedRange(self.source, self.base, position, end, reason, next_offset)
            )

    def _end_of_damage(self, position: int) -> int:
        """Return the position of the next sound batch after damage, or the end."""
        end = self._proven_end(position)
        if end is not None:
            return end
        # If only the insides of batches are damaged, the lengths in their heads lead to
        # the next sound batch.
        at = position
        while (next_position := self._head_end(at)) is not None:
            if next_position == self.stop or len(self._walk(next_position)[0]):
                return next_position
            position = at
            at = next_position
        # There is no head at `at`. Either the head at `at` is damaged, or the length of
        # the previous head is wrong. The search begins right after the previous head.
        end = self._proven_end(at)
        if end is not None:
            return end
        return self._search(position + 1)

    def _head_end(self, position: int) -> int | None:
        """Return the end of the batch at a position, from its head. Return None if the
        bytes there cannot be a head.
        """
        remaining = self.stop - position
        if remaining < layout.PREFIX_SIZE:
            return None
        offset, length, _, magic = _PREFIX.unpack_from(self.source.view, position)
        is_head = (
            self.expected <= offset < self.high
            and layout.MIN_LENGTH <= length <= remaining - layout.LOG_OVERHEAD
        )
        if is_head and 0 <= magic <= 2:
            return position + int(length) + layout.LOG_OVERHEAD
        return None

    def _proven_end(self, position: int) -> int | None:
        """Return the end of a v2 batch if only its magic or one bit of its length is
        wrong. Its CRC is right for the right length.
        """
        view = self.source.view
        if self.stop - position < layout.HEADER_SIZE:
            return None
        crc = int.from_bytes(
            view[position + layout.PREFIX_SIZE : position + layout.CRC_START], "big"
        )
        length = int.from_bytes(
            view[position + 8 : position + layout.LOG_OVERHEAD], "big", signed=True
        )
        for flipped in (0, *(1 << bit for bit in range(31)), -1 << 31):
            end = position + (length ^ flipped) + layout.LOG_OVERHEAD
            if not position + layout.HEADER_SIZE <= end <= self.stop:
                continue
            if end < self.stop and self._head_end(end) is None:
                continue
            if self._crc(position + layout.CRC_START, end, is_old=False) == crc:
                return end
        return None

    def _search(self, start: int) -> int:
        """Return the position of the next sound batch that is part of this log, or the
        end of the file. The search checks every byte.
        """
        for candidate in self._candidates(start):
            if candidate >= start:
                start, is_log = self._chain_end(candidate)
                if is_log:
                    return candidate
        return self.stop

    def _chain_end(self, position: int) -> tuple[int, bool]:
        """Return the end of the chain of sound batches that begins at a position.

        The end is the position itself if there is no chain. The second result is
        whether the chain counts as a part of this log.
        """
        facts, _, _ = self._walk(position, crc=False)
        if not len(facts) or not self._is_whole(facts[0]):
            return position, False
        end = position
        expected = self.expected
        count = 1
        stop_reason = layout.WALK_LIMIT
        # Each step walks about as many batches as the chain has so far. Batches after
        # the end of the chain are walked again later. The doubling keeps the work
        # proportional to the size of the file.
        while stop_reason == layout.WALK_LIMIT and count <= WALK_BATCHES:
            facts, next_position, stop_reason = self._walk(end, count, crc=count > 1)
            base = facts["base_offset"]
            last = facts["last_offset"]
            before = np.concatenate(([expected - 1], last[:-1]))
            wrong = (np.where(facts["magic"] == 2, base, last) <= before) | (
                last >= self.high
            )
            if wrong.any():
                next_position = int(facts["position"][wrong.argmax()])
                stop_reason = layout.WALK_COUNT
                last = last[: int(wrong.argmax())]
            end = next_position
            count = count * 2
            if len(last):
                expected = int(last[-1]) + 1
        # A chain inside a record's value is short, and no head of this log follows it.
        is_long = (
            stop_reason == layout.WALK_LIMIT or end - position > _LARGEST_BATCH_BYTES
        )
        is_log = is_long or end == self.stop or self._is_like_head(end, expected)
        return end, end > position and is_log

    def _is_whole(self, facts: Any) -> bool:
        """Return whether the CRC of a batch with this head is right."""
        position = int(facts["position"])
        end = position + int(facts["size_bytes"])
        is_old = int(facts["magic"]) != 2
        crc_start = position + layout.CRC_START
        if is_old:
            crc_start = position + layout.MAGIC_POSITION
        return self._crc(crc_start, end, is_old=is_old) == int(facts["crc"])

    def _crc(self, start: int, end: int, *, is_old: bool) -> int:
        if is_old not in self.checksums:
            self.checksums[is_old] = _Checksums(self.source.view, is_old=is_old)
        return self.checksums[is_old].of(start, end)

    def _is_like_head(self, position: int, expected: int) -> bool:
        """Return whether the bytes at a position were probably the head of the next
        batch: two of three fields are plausible, or all bytes are zeros.
        """
        remaining = self.stop - position
        if remaining < layout.HEADER_SIZE:
            return False
        offset, length, _, magic = _PREFIX.unpack_from(self.source.view, position)
        is_near = expected <= offset <= expected + _NEAR_OFFSETS
        is_length = layout.MIN_LENGTH <= length <= remaining - layout.LOG_OVERHEAD
        matching_fields = is_near + is_length + (magic == 2)
        return matching_fields >= 2 or self.source.is_zero(
            position, position + layout.HEADER_SIZE
        )

    def _candidates(self, start: int) -> Iterator[int]:
        """Yield positions from `start` on with the bytes of a head.

        The offset of the head must be above the offsets of the batches kept.
        """
        size = self.stop
        chunk = _SECTOR_BYTES
        while start <= size - layout.PREFIX_SIZE:
            stop = min(start + chunk + layout.MAGIC_POSITION, size)
            data = np.frombuffer(self.source.view[start:stop], np.uint8)
            count = len(data) - layout.MAGIC_POSITION
            # A known magic, and neither the offset nor the length is negative.
            is_known = data[layout.MAGIC_POSITION :] <= 2
            positions = np.flatnonzero(
                is_known & (data[:count] < 0x80) & (data[8 : 8 + count] < 0x80)
            )
            length = _big_endian(data, positions + 8, 4)
            positions = positions[
                (length >= layout.MIN_LENGTH)
                & (length + layout.LOG_OVERHEAD <= size - start - positions)
            ]
            offset = _big_endian(data, positions, 8)
            for at in positions[
                (offset >= self.expected) & (offset < self.high)
            ].tolist():
                yield start + at
            start += count
            # The first chunk is small, because the next batch is usually near.
            chunk = min(2 * chunk, _PIECE_BYTES)


class _Checksums:
    """CRCs of stretches of a file, which may overlap.

    The CRC of a stretch reads at most two blocks, regardless of its length. crc(AB) is
    crc(A), extended by as many zero bytes as B has, xor crc(B); see zlib's
    crc32_combine. With `is_old` the CRC is CRC-32, as in formats v0 and v1, else CRC-32C.
    """

    def __init__(self, data: memoryview, *, is_old: bool) -> None:
        self.data = data
        self.crc: Callable[[memoryview, int], int] = crc32c
        self.polynomial = 0x82F63B78
        if is_old:
            self.crc = zlib.crc32
            self.polynomial = 0xEDB88320
        self.fronts = array("I", [0])  # the CRC of all bytes before each block
        # powers[bit] appends 2^bit zero bytes to a CRC. The powers are x^8, its square,
        # the square of that, and so on. The highest bit of a CRC, as a polynomial, is
        # the coefficient of 1.
        self.powers = [1 << 23]
        for _ in range(47):
            self.powers.append(self._product(self.powers[-1], self.powers[-1]))

    def of(self, start: int, end: int) -> int:
        if end - start <= _SECTOR_BYTES:
            return self.crc(self.data[start:end], 0)
        shifted = self._front(start)
        size = end - start
        for bit in range(size.bit_length()):
            if size >> bit & 1:
                shifted = self._product(self.powers[bit], shifted)
        return shifted ^ self._front(end)

    def _front(self, end: int) -> int:
        """Return the CRC of the file up to a position."""
        while len(self.fronts) <= end // _SECTOR_BYTES:
            at = (len(self.fronts) - 1) * _SECTOR_BYTES
            self.fronts.append(
                self.crc(self.data[at : at + _SECTOR_BYTES], self.fronts[-1])
            )
        start = end - end % _SECTOR_BYTES
        return self.crc(self.data[start:end], self.fronts[start // _SECTOR_BYTES])

    def _product(self, first: int, other: int) -> int:
        """Return the product of two polynomials over bits, modulo the CRC's polynomial."""
        product = 0
        while first:
            if first & 1 << 31:
                product ^= other
            first = first << 1 & 0xFFFFFFFF
            if other & 1:
                other = other >> 1 ^ self.polynomial
            else:
                other = other >> 1
        return product


_FAR: Final = order.OrderFault.FAR.value
_GAP: Final = order.OrderFault.GAP.value


def _big_endian(data: Any, positions: Any, size: int) -> Any:
    value = np.zeros(len(positions), np.int64)
    for byte in range(size):
        value = value << 8 | data[positions + byte]
    return value


def _is_codec(attributes: int) -> bool:
    """Return whether the lowest byte of attributes contains an existing codec."""
    return attributes & layout.CODEC_MASK in set(Codec)
