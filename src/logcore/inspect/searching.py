"""The sound batches of one file that may be damaged, and where damage lies between them.

How a file is read: batch by batch, CRCs, records and all, as long as one follows the other. Behind damage the next
batch is looked for in this order:
1. By the length in the damaged head, where a sound batch or the end of the file stands there.
2. By that length with one bit turned back, where the CRC then is right: only the length was wrong.
3. By a search at every byte. A batch may stand inside the value of another, so one that is found so counts only if
   what follows it looks like a log, too.
Offsets, which no CRC covers, have to rise. Of two batches that contradict each other, the one goes that does not
continue the batch before.

Rules:
- No process may be writing the file: it is mapped.
- A batch is sound if its CRC is right and its records can be decoded. Where only the codec's package is missing, or
  they inflate to more than memory should hold, the CRC has to do.
- The work grows with the size of the file, whatever stands in it: foreign bytes may look like a head at every place,
  and each such head may claim all of the rest.
- What is kept of a file is small: a few numbers for each stretch between two damages. Only where parts are going to be
  cut out, some for each few batches too, so that a cut costs what it cuts.

This module knows no partition: what is missing, and what may take its place, is the matter of salvage.py.
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
from logcore.errors import LogcoreError, RecordTooLargeError, StorageReadError, UnsupportedCodecError
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
#: From one mark to the next.
_MARK_BATCHES: Final = 64
#: Records decoded at once, to see whether they can be.
_DECODE_ROWS: Final = 1 << 16
#: Kafka's max.message.bytes. A longer chain of batches lies in no value of a usual batch.
_LARGEST_BATCH_BYTES: Final = (1 << 20) + layout.LOG_OVERHEAD
#: How far behind the last offset a head may go on that has to be recognised without its CRC.
_NEAR_OFFSETS: Final = 1 << 20
_PREFIX: Final = struct.Struct(">qiib")
#: Where in a v2 batch the byte stands that names its codec.
_ATTRIBUTES: Final = layout.CRC_START + 1


class Source:
    """A file of batches, mapped. Where it cannot be read, its bytes are zeros, and unreadable has [start, end)."""

    def __init__(self, fs: FS, path: str, scratch: str) -> None:
        self.path = path
        self.unreadable: list[tuple[int, int]] = []
        with opened(fs, path) as handle:
            self.size = fs.size(handle)
            # Read once before it is mapped: what a mapping cannot read kills the process.
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
                    fs.pwrite(copy, fs.pread(handle, min(_SECTOR_BYTES, self.size - position), position), position)
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

    def why(self, start: int, end: int, reason: str) -> str:
        cannot = any(low < end and start < high for low, high in self.unreadable)
        if cannot:
            return "a part of it cannot be read"
        if start < end and self.is_zero(start, end):
            return ZEROS
        return reason


@attrs.define
class Extent:
    """Sound batches, one behind the other. base: of the segment they go to. first: the lowest offset in them. marks:
    (offset, position) of some batches, if these were asked for.
    """

    source: Source
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
        """Where in the file the batches begin and end among which those in [low, high) are, with few others."""
        if low >= self.next_offset or high <= self.first:
            return self.end, self.end
        start = bisect_right(self.marks, low, key=lambda mark: mark[0]) - 1
        stop = bisect_left(self.marks, high, key=lambda mark: mark[0])
        return (
            self.marks[start][1] if start >= 0 else self.position,
            self.marks[stop][1] if stop < len(self.marks) else self.end,
        )

    def cut(self, base: int, low: int, high: int) -> list[Extent]:
        """Its batches that lie wholly in [low, high), for a segment."""
        start, stop = self.around(low, high)
        return Search(self.source, base, low, high, start=start, stop=stop).extents


@attrs.define
class BadStretch:
    """Bytes that are no sound batch, or none where there should be some. next_offset: behind the offsets that they
    certainly had, 0 where that is not known.
    """

    source: Source
    base: int
    position: int
    end: int
    reason: str
    next_offset: int = 0


class Search:
    """Finds the sound batches in a file, from start to stop, whose offsets lie in [low, high).

    is_dense: each batch continues the one before it. is_marked: parts of what is found will be cut out. found: all of
    the file, in order.
    """

    def __init__(
        self,
        source: Source,
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
        self.expected = self.before_last = low
        self.last_size = 0  # of the last batch that was kept, while it can be taken back
        self.last_base = self.last_records = 0
        self.found: list[Extent | BadStretch] = []
        self.sums: dict[bool, _Checksums] = {}
        position = start
        while position < self.stop:
            position, reason = self._chain(position)
            if reason:
                behind = self._behind(position)
                self._damage(position, behind, reason)
                position = behind

    @property
    def extents(self) -> list[Extent]:
        return [one for one in self.found if isinstance(one, Extent)]

    def _walk(self, position: int, count: int = 1, *, crc: bool = True) -> tuple[layout.Facts, int, int]:
        return kernel.walk(self.source.view, position, self.stop, count, crc)

    # -- sound batches ---------------------------------------------------------------------------------------------

    def _chain(self, position: int) -> tuple[int, str]:
        """Keeps batches from a position on while they are whole: (where that ends, why if it is not the end)."""
        while True:
            facts, position, why = self._walk(position, WALK_BATCHES)
            while len(facts):
                row, reason = self._misfit(facts)
                self._keep(facts[:row])
                facts = facts[row:]
                if not len(facts):
                    break
                if self._is_last_wrong(facts[0]) or (reason == _GAP and self._is_last_unproven()):
                    self._take_back()
                elif reason == _GAP and self._base_at(facts[0]) == int(facts[0]["last_offset"]) + 1:
                    start = int(facts[0]["position"])
                    self._damage(start, start, _GAP)  # it is what was before this batch that is gone
                    self._keep(facts[:1])
                    facts = facts[1:]
                else:
                    start = int(facts[0]["position"])
                    self._damage(start, start + int(facts[0]["size_bytes"]), reason)
                    facts = facts[1:]
            if why != layout.WALK_LIMIT:
                return position, "" if why == layout.WALK_END else layout.WALK_REASONS[why]

    def _misfit(self, facts: layout.Facts) -> tuple[int, str]:
        """(the first batch whose offsets do not follow, why), or their count."""
        dense_from = 0
        if not self.is_dense:
            dense_from = order.NEVER
        if self.is_dense and self.found and isinstance(self.found[-1], BadStretch):
            dense_from = int(facts["base_offset"][0])  # what is missing in front of the first is known to be damaged
        row, fault = order.first_fault(facts, self.expected, self.high, dense_from=dense_from)
        return row, "" if fault is None else fault.value

    def _base_at(self, before: Any) -> int | None:
        """The base offset of the batch behind another, by its head."""
        facts, _, _ = self._walk(int(before["position"] + before["size_bytes"]), crc=False)
        if len(facts):
            return int(facts["base_offset"][0])
        return None

    def _is_last_wrong(self, facts: Any) -> bool:
        """Whether it is the last batch kept that has a wrong offset, rather than this one, which lies below its end."""
        base = int(facts["base_offset"])
        last = int(facts["last_offset"])
        if not self.last_size or self.last_base == self.before_last or not self.before_last <= base < self.expected:
            return False
        # This one continues the batch before the last, or leaves just the room that the last one takes.
        if base in (self.before_last, self.before_last + self.expected - self.last_base):
            return True
        return self._base_at(facts) == last + 1

    def _is_last_unproven(self) -> bool:
        """Whether nothing but its own head tells the offset of the last batch kept: it came right behind damage."""
        extent = None
        if self.last_size:
            extent = self.found[-1]
        return isinstance(extent, Extent) and extent.batches == 1 and isinstance(self.found[-2:][0], BadStretch)

    def _keep(self, facts: layout.Facts) -> None:
        """Keeps batches whose heads are sound, but for those whose records cannot be decoded."""
        while len(facts):
            is_old = facts["magic"] != 2
            if is_old.any():
                count = int(is_old.argmax())
            else:
                count = len(facts)
            reason = ""
            if count:
                count, reason = self._decodable(facts[:count])
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
                behind = int(facts["last_offset"][0]) + 1
                self._damage(start, start + int(facts["size_bytes"][0]), reason, behind)
                facts = facts[1:]

    def _decodable(self, facts: layout.Facts) -> tuple[int, str]:
        """(how many v2 batches come before the first whose records cannot be decoded, why these cannot)."""
        positions = facts["position"]
        row = 0
        stop = int(positions[-1]) + int(facts["size_bytes"][-1])
        while row < len(facts):
            at = int(positions[row])
            view = self.source.view
            end, rows, _ = kernel.plan_run(view, at, stop, _DECODE_ROWS, _PIECE_BYTES, INT64_MAX)
            behind = int(np.searchsorted(positions, end))
            try:
                if end > at:
                    kernel.decode_columns(view, at, end, np.empty(rows * layout.ROW_SIZE, np.uint8), rows)
                    row = behind
                    continue
            except LogcoreError:
                pass  # one of them: which, shows when they are decoded one by one
            for single in range(row, max(row + 1, behind)):
                if reason := self._why_undecodable(int(positions[single])):
                    return single, reason
            row = max(row + 1, behind)
        return len(facts), ""

    def _why_undecodable(self, position: int) -> str:
        """The fault in the records of a v2 batch whose CRC is right; none where that cannot be judged."""
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
        """(first offset, records, why not) of a v0 or v1 entry, of which no head tells whether it is damaged inside."""
        reason = "it holds no record"
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
                raise  # which offsets it has is not known until the package is installed
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
            extent.marks += zip([first, *marked["base_offset"][1:].tolist()], marked["position"].tolist(), strict=True)
        extent.end = int(facts["position"][-1]) + self.last_size
        extent.batches += len(facts)
        extent.records += records
        extent.has_gaps |= records < self.expected - extent.next_offset
        extent.next_offset = self.expected

    def _take_back(self) -> None:
        """Takes the last batch out again."""
        extent = self.found[-1]
        assert isinstance(extent, Extent), "last_size says that a batch was kept"
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

    # -- damage ----------------------------------------------------------------------------------------------------

    def _damage(self, position: int, end: int, reason: str, next_offset: int = 0) -> None:
        self.last_size = 0
        last = None
        if self.found:
            last = self.found[-1]
        if isinstance(last, BadStretch) and end > position:
            last.end = end
            last.next_offset = max(last.next_offset, next_offset)
        else:
            self.found.append(BadStretch(self.source, self.base, position, end, reason, next_offset))

    def _behind(self, position: int) -> int:
        """The position of the next sound batch behind the damage at a position, or the end of the file."""
        end = self._proven_end(position)
        if end is not None:
            return end
        at = position
        while (behind := self._head_end(at)) is not None:  # damage inside a batch leaves the lengths alone
            if behind == self.stop or len(self._walk(behind)[0]):
                return behind
            position = at
            at = behind
        # Either the head here is damaged, or the length that led here was.
        end = self._proven_end(at)
        if end is not None:
            return end
        return self._search(position + 1)

    def _head_end(self, position: int) -> int | None:
        """The end of the batch whose head seems to be at a position."""
        left = self.stop - position
        if left < layout.PREFIX_SIZE:
            return None
        offset, length, _, magic = _PREFIX.unpack_from(self.source.view, position)
        is_head = self.expected <= offset < self.high and layout.MIN_LENGTH <= length <= left - layout.LOG_OVERHEAD
        if is_head and 0 <= magic <= 2:
            return position + int(length) + layout.LOG_OVERHEAD
        return None

    def _proven_end(self, position: int) -> int | None:
        """Where a v2 batch ends of which only the magic, or one bit of the length, is wrong: there its CRC is right."""
        view = self.source.view
        if self.stop - position < layout.HEADER_SIZE:
            return None
        crc = int.from_bytes(view[position + layout.PREFIX_SIZE : position + layout.CRC_START], "big")
        length = int.from_bytes(view[position + 8 : position + layout.LOG_OVERHEAD], "big", signed=True)
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
        """Position of the first sound batch from start on that is part of this log, or the end, byte by byte."""
        for candidate in self._candidates(start):
            if candidate >= start:
                start, is_log = self._judge(candidate)
                if is_log:
                    return candidate
        return self.stop

    def _judge(self, position: int) -> tuple[int, bool]:
        """(where the chain of sound batches from a position on ends, or the position where there is none; whether it
        counts as a part of this log).
        """
        facts, _, _ = self._walk(position, crc=False)
        if not len(facts) or not self._is_whole(facts[0]):
            return position, False
        end = position
        expected = self.expected
        count = 1
        why = layout.WALK_LIMIT
        # Not more at once than was walked before: what turns out not to belong to the chain is walked again.
        while why == layout.WALK_LIMIT and count <= WALK_BATCHES:
            facts, behind, why = self._walk(end, count, crc=count > 1)
            base = facts["base_offset"]
            last = facts["last_offset"]
            before = np.concatenate(([expected - 1], last[:-1]))
            wrong = (np.where(facts["magic"] == 2, base, last) <= before) | (last >= self.high)
            if wrong.any():
                behind = int(facts["position"][wrong.argmax()])
                why = layout.WALK_COUNT
                last = last[: int(wrong.argmax())]
            end = behind
            count = count * 2
            if len(last):
                expected = int(last[-1]) + 1
        long = why == layout.WALK_LIMIT or end - position > _LARGEST_BATCH_BYTES
        return end, end > position and (long or end == self.stop or self._is_like_head(end, expected))

    def _is_whole(self, facts: Any) -> bool:
        """Whether the CRC of a batch is right that is known by its head."""
        position = int(facts["position"])
        magic = int(facts["magic"])
        start = position + (layout.CRC_START if magic == 2 else layout.MAGIC_POSITION)
        return self._crc(start, position + int(facts["size_bytes"]), is_old=magic != 2) == int(facts["crc"])

    def _crc(self, start: int, end: int, *, is_old: bool) -> int:
        if is_old not in self.sums:
            self.sums[is_old] = _Checksums(self.source.view, is_old=is_old)
        return self.sums[is_old].of(start, end)

    def _is_like_head(self, position: int, expected: int) -> bool:
        """Whether what stands at a position was the head of the next batch, or zeros came over it."""
        left = self.stop - position
        if left < layout.HEADER_SIZE:
            return False
        offset, length, _, magic = _PREFIX.unpack_from(self.source.view, position)
        is_near = expected <= offset <= expected + _NEAR_OFFSETS
        is_length = layout.MIN_LENGTH <= length <= left - layout.LOG_OVERHEAD
        return is_near + is_length + (magic == 2) >= 2 or self.source.is_zero(position, position + layout.HEADER_SIZE)

    def _candidates(self, start: int) -> Iterator[int]:
        """Positions from start on where a head stands whose offset lies behind what was kept."""
        size = self.stop
        piece = _SECTOR_BYTES
        while start <= size - layout.PREFIX_SIZE:
            stop = min(start + piece + layout.MAGIC_POSITION, size)
            data = np.frombuffer(self.source.view[start:stop], np.uint8)
            count = len(data) - layout.MAGIC_POSITION
            here = np.flatnonzero(
                (data[layout.MAGIC_POSITION :] <= 2) & (data[:count] < 0x80) & (data[8 : 8 + count] < 0x80)
            )
            length = _big_endian(data, here + 8, 4)
            here = here[(length >= layout.MIN_LENGTH) & (length + layout.LOG_OVERHEAD <= size - start - here)]
            offset = _big_endian(data, here, 8)
            for at in here[(offset >= self.expected) & (offset < self.high)].tolist():
                yield start + at
            start += count
            piece = min(2 * piece, _PIECE_BYTES)  # most often the next batch is near


class _Checksums:
    """CRCs of stretches of a file that may overlap, at the cost of two blocks each, however long the stretch.

    crc(AB) is crc(A), with as many zero bytes put behind it as B has, xor crc(B); see zlib's crc32_combine. is_old: as
    in formats v0 and v1, CRC-32; else CRC-32C.
    """

    def __init__(self, data: memoryview, *, is_old: bool) -> None:
        self.data = data
        self.crc: Callable[[memoryview, int], int] = zlib.crc32 if is_old else crc32c
        if is_old:
            self.polynomial = 0xEDB88320
        else:
            self.polynomial = 0x82F63B78
        self.fronts = array("I", [0])  # CRCs of all that lies before each block
        self.powers = [1 << 23]  # x^8, its square, the square of that: a CRC is a polynomial with its highest bit as 1
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
        """CRC of the file up to a position."""
        while len(self.fronts) <= end // _SECTOR_BYTES:
            at = (len(self.fronts) - 1) * _SECTOR_BYTES
            self.fronts.append(self.crc(self.data[at : at + _SECTOR_BYTES], self.fronts[-1]))
        start = end - end % _SECTOR_BYTES
        return self.crc(self.data[start:end], self.fronts[start // _SECTOR_BYTES])

    def _product(self, one: int, other: int) -> int:
        """Of two polynomials over bits, modulo the CRC's."""
        product = 0
        while one:
            if one & 1 << 31:
                product ^= other
            one = one << 1 & 0xFFFFFFFF
            if other & 1:
                other = other >> 1 ^ self.polynomial
            else:
                other = other >> 1
        return product


_FAR: Final = order.Fault.FAR.value
_GAP: Final = order.Fault.GAP.value


def _big_endian(data: Any, positions: Any, size: int) -> Any:
    value = np.zeros(len(positions), np.int64)
    for byte in range(size):
        value = value << 8 | data[positions + byte]
    return value


def _is_codec(attributes: int) -> bool:
    """Whether the lowest byte of some attributes names a codec that there is."""
    return attributes & layout.CODEC_MASK in set(Codec)
