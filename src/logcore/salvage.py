"""Saves what is whole of damaged partitions: every sound batch, copied around the damage into a new directory.

How a file is read: batch by batch, CRCs and all, as long as one follows the other. Behind damage the next batch is
looked for in this order:
1. By the length in the damaged head, where a sound batch or the end of the file stands there.
2. By that length with one bit turned back, where the CRC then is right: only the length was wrong.
3. By a search at every byte. A batch may stand inside the value of another, so one that is found so counts only if
   what follows it looks like a log, too.
Offsets, which no CRC covers, have to rise. Of two batches that contradict each other, the one goes that does not
continue the batch before.

Rules:
- The source is never written, locked or repaired. Nobody may be writing it: its files are mapped.
- A batch is copied byte for byte or not at all, and keeps its offsets; a segment keeps the base offset of its file.
- What is lost is reported as bytes of a file and as a range of offsets. No offset is given out twice: where the end is
  lost, the copy goes on behind it.
- What an interrupted compaction, a deletion or a recovery left (.swap, .deleted, .cleaned, .quarantine) fills gaps.
- Indexes, snapshots and checkpoints are made anew.

The plan of a partition is made first and is small: a few numbers for each stretch between two damages. This module
judges no file (verify.py) and mends none in place (recovery.py).
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import attrs
import numpy as np

from logcore import checkpoint
from logcore.config import INT64_MAX, LogConfig
from logcore.dump import DUMPERS
from logcore.errors import InvalidConfigError, LogcoreError, StorageReadError
from logcore.fs import FS, OS
from logcore.kernels import active, layout
from logcore.log import _coordinator_epochs, claim_directory, leave_directory, make_directories
from logcore.producers import Transactions
from logcore.reader import parse_partition_name
from logcore.recordbatch import RecordBatch
from logcore.segment import LOG, ActiveSegment, Segment, base_offset_of, file_name
from logcore.sequences import SNAPSHOT, Producers
from logcore.survey import partition_of, partitions

#: Files that hold batches and belong to no log, those first that were nearest to belonging to one.
_SPARE_SUFFIXES: Final = (".log.swap", ".log.deleted", ".log.cleaned", ".quarantine")
_WALK_BATCHES: Final = 1024
_PIECE_BYTES: Final = 1 << 20
_SECTOR_BYTES: Final = 4096
#: Kafka's max.message.bytes. A longer chain of batches lies in no value of a usual batch.
_LARGEST_BATCH_BYTES: Final = (1 << 20) + layout.LOG_OVERHEAD
#: How far behind the last offset a head may go on that has to be recognised without its CRC.
_NEAR_OFFSETS: Final = 1 << 20
_PREFIX: Final = struct.Struct(">qiib")
_ZEROS: Final = "zeros"
_T = TypeVar("_T")
_U = TypeVar("_U")


@attrs.frozen(kw_only=True)
class Part:
    """Something of the source that was not copied.

    position, size_bytes: where in the file; position is None for a file as a whole. first_offset, last_offset: what is
    missing; None where no offset is missing or nobody can say which.
    """

    path: str
    position: int | None = None
    size_bytes: int = 0
    first_offset: int | None = None
    last_offset: int | None = None
    reason: str

    def __str__(self) -> str:
        offsets = "" if self.first_offset is None else f"offsets {self.first_offset} to {self.last_offset}, "
        where = "" if self.position is None else f", {self.size_bytes} bytes at position {self.position}"
        return f"{offsets}{self.path}{where}: {self.reason}"


@attrs.frozen(kw_only=True)
class PartitionReport:
    """What was saved of one partition. lost: what is missing now. left_out: what was not copied and is no loss.

    files: how many were read. batches, records, size_bytes: that were copied.
    """

    source: str
    target: str
    files: int
    batches: int
    records: int
    size_bytes: int
    log_start_offset: int
    log_end_offset: int
    lost: tuple[Part, ...]
    left_out: tuple[Part, ...]


@attrs.frozen(kw_only=True)
class SalvageReport:
    """What salvage() did. lost, left_out: of the log directory itself, such as its file of topics."""

    source: str
    target: str
    partitions: tuple[PartitionReport, ...]
    lost: tuple[Part, ...] = ()
    left_out: tuple[Part, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing was lost."""
        return not self.lost and not any(one.lost for one in self.partitions)

    def as_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


def salvage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    fs: FS = OS,
    tick: Callable[[int], None] = lambda size_bytes: None,
) -> SalvageReport:
    """Copies every sound batch of a partition directory, or of a log directory with its partitions, to a new directory.

    target: must not be there, or be empty; for a partition it has a partition's name. tick: is told the size of each
    file that was read. Raises LogNotFoundError when the source holds nothing of the kind, InvalidConfigError and
    InvalidNameError for the target, and errors of writing there. What the files of the source hold never raises.
    """
    origin, goal = os.fspath(source), os.fspath(target)
    found = partitions(origin, fs=fs)
    real, root = fs.real_path(goal), fs.real_path(origin)
    if real == root or real.startswith(root + os.sep):
        raise InvalidConfigError("the target lies in the source, which is not to be changed", path=goal)
    if fs.exists(goal) and (not fs.is_directory(goal) or fs.listdir(goal)):
        raise InvalidConfigError("there is something here already; name a new or an empty directory", path=goal)
    if found == [origin]:
        parent, name = os.path.split(real)
        parse_partition_name(name)
        jobs = {origin: goal}
    else:
        parent, name = real, "."
        jobs = {path: os.path.join(goal, os.path.basename(path)) for path in found if _is_canonical(path)}
    make_directories(fs, parent)
    lock = claim_directory(fs, parent, name)
    try:
        done, lost, left_out = [], list[Part](), list[Part]()
        known = _or_none(checkpoint.read_offsets, fs, origin, checkpoint.RECOVERY_POINT) or {}
        gone: dict[tuple[str, int], int | None] = {}
        for path, place in jobs.items():
            try:
                partition = _Partition(fs, path, place, tick)
            except StorageReadError as error:
                lost.append(Part(path=path, reason=f"its files cannot be listed: {error.reason}"))
                # So that opening the copy calls it gone, and does not make it anew from offset 0.
                gone |= {key: end for key, end in known.items() if key == partition_of(os.path.basename(path))}
            else:
                done.append(partition.save())
        if name == ".":
            _copy_directory(fs, origin, goal, done, lost, left_out)
        _write_checkpoints(fs, parent, [one.report for one in done], gone)
        leave_directory(fs, parent, lock)
    except BaseException:
        lock.shared["failed"] = True
        raise
    finally:
        lock.release()
    reports = tuple(one.report for one in done)
    return SalvageReport(source=origin, target=goal, partitions=reports, lost=tuple(lost), left_out=tuple(left_out))


def _is_canonical(path: str) -> bool:
    """Whether a partition's directory has the one name that checkpoints know it by: t-00 would be taken for t-0."""
    topic, number = partition_of(os.path.basename(path)) or ("", -1)
    return os.path.basename(path) == f"{topic}-{number}"


def _copy_directory(
    fs: FS, source: str, target: str, done: Sequence[_Saved], lost: list[Part], left_out: list[Part]
) -> None:
    """Copies what a log directory holds beside partitions, and adds what is lost and what is left out of it."""
    lost += _copy_small(fs, source, target, checkpoint.META_PROPERTIES, checkpoint.TOPICS)
    lost += (ids := _copy_small(fs, source, target, checkpoint.PRODUCER_IDS))
    if ids:  # an id that was given out must not be given to another producer
        end = max(one.producer_ids for one in done) if done else 0
        checkpoint.write(fs, target, checkpoint.PRODUCER_IDS, checkpoint.pack_producer_ids(end))
    for name in sorted(fs.listdir(source)):
        path = os.path.join(source, name)
        if fs.is_directory(path) and (partition_of(name) is None or not _is_canonical(path)):
            left_out.append(Part(path=path, reason="not a partition directory"))


def _copy_small(fs: FS, source: str, target: str, *names: str) -> list[Part]:
    """Copies small files that can be understood; those that cannot be, as lost parts."""
    lost = []
    for name in names:
        path = os.path.join(source, name)
        if not fs.exists(path):
            continue
        try:
            content = checkpoint.read(fs, source, name)
            for _ in DUMPERS[name](fs, path):
                pass
        except LogcoreError as error:
            lost.append(Part(path=path, reason=error.reason))
        else:
            checkpoint.write(fs, target, name, content or b"")
    return lost


def _write_checkpoints(
    fs: FS, directory: str, reports: Sequence[PartitionReport], gone: Mapping[tuple[str, int], int | None]
) -> None:
    keys = [parse_partition_name(os.path.basename(fs.real_path(report.target))) for report in reports]
    starts = {key: one.log_start_offset or None for key, one in zip(keys, reports, strict=True)}
    ends = {**gone, **{key: one.log_end_offset for key, one in zip(keys, reports, strict=True)}}
    checkpoint.write_offsets(fs, directory, checkpoint.LOG_START, starts)
    checkpoint.write_offsets(fs, directory, checkpoint.RECOVERY_POINT, ends)


# -- one file --------------------------------------------------------------------------------------------------------


class _Source:
    """A file of batches, mapped. Where it cannot be read, its bytes are zeros, and unreadable has [start, end)."""

    def __init__(self, fs: FS, path: str, scratch: str) -> None:
        self.path = path
        self.unreadable: list[tuple[int, int]] = []
        handle = fs.open(path)
        try:
            self.size = fs.size(handle)
            # Read once before it is mapped: what a mapping cannot read kills the process.
            for position in range(0, self.size, _PIECE_BYTES):
                try:
                    fs.pread(handle, _PIECE_BYTES, position)
                except StorageReadError:
                    self.view = self._copy_readable(fs, handle, scratch)
                    return
            self.view = fs.map(handle, self.size) if self.size else memoryview(b"")
        finally:
            fs.close(handle)

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
        return "a part of it cannot be read" if cannot else _ZEROS if self.is_zero(start, end) else reason


@attrs.define
class _Extent:
    """Sound batches, one behind the other. base: of the segment they go to. first: the lowest offset in them."""

    source: _Source
    base: int
    position: int
    end: int
    first: int
    next_offset: int
    batches: int = 0
    records: int = 0
    has_gaps: bool = False


@attrs.define
class _Damage:
    """Bytes that are no sound batch, or none where there should be some."""

    source: _Source
    base: int
    position: int
    end: int
    reason: str


class _Search:
    """Finds the sound batches of a file whose offsets lie in [low, high).

    is_dense: each batch continues the one before it. found: all of the file, in order.
    """

    def __init__(self, source: _Source, base: int, low: int, high: int, *, is_dense: bool) -> None:
        self.source, self.base, self.high, self.is_dense = source, base, high, is_dense
        self.expected = self.before_last = low
        self.last_size = 0  # of the last batch that was kept, while it can be taken back
        self.last_base = self.last_records = 0
        self.found: list[_Extent | _Damage] = []
        position = 0
        while position < source.size:
            position, reason = self._chain(position)
            if reason:
                behind = self._behind(position)
                self._damage(position, behind, reason)
                position = behind

    def _walk(self, position: int, count: int = 1, *, crc: bool = True) -> tuple[layout.Facts, int, int]:
        return active.walk(self.source.view, position, self.source.size, count, crc)

    # -- sound batches ---------------------------------------------------------------------------------------------

    def _chain(self, position: int) -> tuple[int, str]:
        """Keeps batches from a position on while they are whole: (where that ends, why if it is not the end)."""
        while True:
            facts, position, why = self._walk(position, _WALK_BATCHES)
            while len(facts):
                row, reason = self._misfit(facts)
                self._keep(facts[:row])
                facts = facts[row:]
                if not len(facts):
                    break
                if self._is_last_wrong(facts[0]):
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
        last = facts["last_offset"]
        # The offset of a v0/v1 wrapper is that of its last record, so only v2 tells where a batch begins.
        base = np.where(facts["magic"] == 2, facts["base_offset"], last)
        before = np.concatenate(([self.expected - 1], last[:-1]))
        falls = (base <= before) | (last < base)
        far = last >= self.high
        gap = (base > before + 1) & (facts["magic"] == 2) & self.is_dense
        if self.found and isinstance(self.found[-1], _Damage):
            gap[0] = False
        bad = falls | far | gap
        if not bad.any():
            return len(facts), ""
        row = int(bad.argmax())
        return row, _FALLS if falls[row] else _FAR if far[row] else _GAP

    def _base_at(self, before: Any) -> int | None:
        """The base offset of the batch behind another, by its head."""
        facts, _, _ = self._walk(int(before["position"] + before["size_bytes"]), crc=False)
        return int(facts["base_offset"][0]) if len(facts) else None

    def _is_last_wrong(self, facts: Any) -> bool:
        """Whether it is the last batch kept that has a wrong offset, rather than this one, which lies below its end."""
        base, last = int(facts["base_offset"]), int(facts["last_offset"])
        if not self.last_size or self.last_base == self.before_last or not self.before_last <= base < self.expected:
            return False
        # This one continues the batch before the last, or leaves just the room that the last one takes.
        if base in (self.before_last, self.before_last + self.expected - self.last_base):
            return True
        return self._base_at(facts) == last + 1

    def _keep(self, facts: layout.Facts) -> None:
        while len(facts):
            old = np.flatnonzero(facts["magic"] != 2)
            count = int(old[0]) if len(old) else len(facts)
            if count:
                records = int(facts["record_count"][:count].sum(dtype=np.int64))
                self._add(facts[:count], int(facts["base_offset"][0]), records)
            elif (offsets := self._old_offsets(int(facts["position"][0]))) is not None:
                self._add(facts[:1], *offsets)
                count = 1
            else:
                start = int(facts["position"][0])
                self._damage(start, start + int(facts["size_bytes"][0]), "its records cannot be decoded")
                count = 1
            facts = facts[count:]

    def _old_offsets(self, position: int) -> tuple[int, int] | None:
        """(first offset, records) of a v0 or v1 entry, None if it is damaged inside, which no head tells."""
        try:
            batch = self.source.batch(position)
            records = batch.records() if batch is not None else []
        except LogcoreError:
            return None
        return (records[0].offset, len(records)) if records else None

    def _add(self, facts: layout.Facts, first: int, records: int) -> None:
        position, last = int(facts["position"][0]), facts["last_offset"]
        extent = self.found[-1] if self.found else None
        if not isinstance(extent, _Extent):
            extent = _Extent(self.source, self.base, position, position, first, first)
            self.found.append(extent)
        self.before_last = int(last[-2]) + 1 if len(facts) > 1 else self.expected
        self.last_size, self.last_base = int(facts["size_bytes"][-1]), int(facts["base_offset"][-1])
        self.last_records = int(facts["record_count"][-1]) if facts["magic"][-1] == 2 else records
        self.expected = int(last[-1]) + 1
        extent.end = int(facts["position"][-1]) + self.last_size
        extent.batches += len(facts)
        extent.records += records
        extent.has_gaps |= records < self.expected - extent.next_offset
        extent.next_offset = self.expected

    def _take_back(self) -> None:
        """Takes the last batch out again."""
        extent = self.found[-1]
        assert isinstance(extent, _Extent), "last_size says that a batch was kept"
        end = extent.end
        extent.end -= self.last_size
        extent.batches -= 1
        extent.records -= self.last_records
        extent.next_offset = self.expected = self.before_last
        if not extent.batches:
            self.found.pop()
        self._damage(end - self.last_size, end, _FAR)

    # -- damage ----------------------------------------------------------------------------------------------------

    def _damage(self, position: int, end: int, reason: str) -> None:
        self.last_size = 0
        last = self.found[-1] if self.found else None
        if isinstance(last, _Damage) and end > position:
            last.end = end
        else:
            self.found.append(_Damage(self.source, self.base, position, end, reason))

    def _behind(self, position: int) -> int:
        """Where the next sound batch behind the damage at a position stands, or the end of the file."""
        end = self._proven_end(position)
        if end is not None:
            return end
        at = position
        while (behind := self._head_end(at)) is not None:  # damage inside a batch leaves the lengths alone
            if behind == self.source.size or len(self._walk(behind)[0]):
                return behind
            position, at = at, behind
        # Either the head here is damaged, or the length that led here was.
        end = self._proven_end(at)
        return end if end is not None else next(self._search(position + 1), self.source.size)

    def _head_end(self, position: int) -> int | None:
        """Where the batch ends whose head seems to stand at a position."""
        left = self.source.size - position
        if left < layout.PREFIX_SIZE:
            return None
        offset, length, _, magic = _PREFIX.unpack_from(self.source.view, position)
        is_head = self.expected <= offset < self.high and layout.MIN_LENGTH <= length <= left - layout.LOG_OVERHEAD
        return position + length + layout.LOG_OVERHEAD if is_head and 0 <= magic <= 2 else None

    def _proven_end(self, position: int) -> int | None:
        """Where a v2 batch ends of which only the magic, or one bit of the length, is wrong: there its CRC is right."""
        view, size = self.source.view, self.source.size
        if size - position < layout.HEADER_SIZE:
            return None
        crc = int.from_bytes(view[position + layout.PREFIX_SIZE : position + layout.CRC_START], "big")
        length = int.from_bytes(view[position + 8 : position + layout.LOG_OVERHEAD], "big", signed=True)
        for flipped in (0, *(1 << bit for bit in range(31)), -1 << 31):
            end = position + (length ^ flipped) + layout.LOG_OVERHEAD
            if position + layout.HEADER_SIZE <= end < size and self._head_end(end) is None:
                continue
            if position + layout.HEADER_SIZE <= end <= size and _crc32c(view[position + layout.CRC_START : end]) == crc:
                return end
        return None

    def _search(self, start: int) -> Iterator[int]:
        """Positions of sound batches from start on that are part of this log, found byte by byte."""
        position = start
        while position < self.source.size:
            for candidate in self._candidates(position):
                end, is_log = self._judge(candidate)
                if is_log:
                    yield candidate
                if end > candidate:
                    position = end
                    break
            else:
                return

    def _judge(self, position: int) -> tuple[int, bool]:
        """(where the chain of sound batches from a position on ends, whether it is taken for a part of this log)."""
        facts, end, why = self._walk(position, _WALK_BATCHES)
        base, last = facts["base_offset"], facts["last_offset"]
        before = np.concatenate(([self.expected - 1], last[:-1]))
        wrong = (np.where(facts["magic"] == 2, base, last) <= before) | (last >= self.high)
        if wrong.any():
            end, why = int(facts["position"][wrong.argmax()]), layout.WALK_COUNT
        if end == position:
            return position, False
        expected = int(last[np.searchsorted(facts["position"], end) - 1]) + 1
        long = why == layout.WALK_LIMIT or end - position > _LARGEST_BATCH_BYTES
        return end, long or end == self.source.size or self._is_like_head(end, expected)

    def _is_like_head(self, position: int, expected: int) -> bool:
        """Whether what stands at a position was the head of the next batch, or zeros came over it."""
        left = self.source.size - position
        if left < layout.HEADER_SIZE:
            return False
        offset, length, _, magic = _PREFIX.unpack_from(self.source.view, position)
        is_near = expected <= offset <= expected + _NEAR_OFFSETS
        is_length = layout.MIN_LENGTH <= length <= left - layout.LOG_OVERHEAD
        return is_near + is_length + (magic == 2) >= 2 or self.source.is_zero(position, position + layout.HEADER_SIZE)

    def _candidates(self, start: int) -> Iterator[int]:
        """Positions from start on where a head could stand whose offset lies behind what was kept."""
        size = self.source.size
        for origin in range(start, size - layout.PREFIX_SIZE + 1, _PIECE_BYTES):
            stop = min(origin + _PIECE_BYTES + layout.MAGIC_POSITION, size)
            data = np.frombuffer(self.source.view[origin:stop], np.uint8)
            count = len(data) - layout.MAGIC_POSITION
            here = np.flatnonzero(
                (data[layout.MAGIC_POSITION :] <= 2) & (data[:count] < 0x80) & (data[8 : 8 + count] < 0x80)
            )
            length = _big_endian(data, here + 8, 4)
            fits = (length >= layout.MIN_LENGTH) & (length + layout.LOG_OVERHEAD <= size - origin - here)
            here = here[fits]
            offset = _big_endian(data, here, 8)
            for at in here[(offset >= self.expected) & (offset < self.high)].tolist():
                if len(self._walk(origin + at)[0]):
                    yield origin + at


_FALLS: Final = "its offsets lie before the end of the batch before it"
_FAR: Final = "its offsets lie in a later segment, or behind batches that follow"
_GAP: Final = "it does not continue the batch before it"


def _big_endian(data: Any, positions: Any, size: int) -> Any:
    value = np.zeros(len(positions), np.int64)
    for byte in range(size):
        value = value << 8 | data[positions + byte]
    return value


def _crc32c(data: memoryview) -> int:
    from crc32c import crc32c  # 40-70 ms to import, see kernels

    return int(crc32c(data))


# -- one partition ---------------------------------------------------------------------------------------------------


@attrs.frozen
class _Saved:
    """producer_ids: above all that any batch kept has."""

    report: PartitionReport
    producer_ids: int


class _Partition:
    """Plans the copy of one partition, then makes it."""

    def __init__(self, fs: FS, source: str, target: str, tick: Callable[[int], None]) -> None:
        self.fs, self.source, self.target, self.tick = fs, source, target, tick
        self.names = sorted(fs.listdir(source))
        self.bases = sorted(base for name in self.names if (base := base_offset_of(name)) is not None)
        spares = [name for suffix in _SPARE_SUFFIXES for name in self.names if name.endswith(suffix)]
        self.spares: dict[str, _Source | None] = dict.fromkeys(name for name in spares if _base_in(name) is not None)
        self.files = 0
        self.lost: list[Part] = []
        self.left_out: list[Part] = []
        self.found: list[_Extent | _Damage] = []  # in the files of the log
        self.judged: dict[str, bool] = {}  # spare files -> whether they tell of this log
        parent, name = os.path.split(fs.real_path(source))
        self.parent, self.key = parent, partition_of(name) or ("", -1)
        notes = _or_none(checkpoint.read_notes, fs, source) or checkpoint.Notes()
        compacted_to = self._noted(checkpoint.CLEANER)
        self.is_dense = notes.dense and not compacted_to
        self.is_compacted = compacted_to > 0 or (notes.policy is not None and not notes.dense)

    def _noted(self, name: str) -> int:
        """What an offset checkpoint of the source says of this partition; 0 when nothing."""
        offset = (_or_none(checkpoint.read_offsets, self.fs, self.parent, name) or {}).get(self.key, 0)
        return offset if 0 <= offset <= INT64_MAX else 0

    def save(self) -> _Saved:
        fs = self.fs
        start, end, extents = self._plan()
        segments: dict[int, list[_Extent]] = {}
        for extent in extents:
            segments.setdefault(extent.base, []).append(extent)
        if not extents or extents[-1].next_offset < end:
            segments[end] = []  # no offset is given out twice
        if not fs.exists(self.target):
            fs.mkdir(self.target)
        copy = _Copy(fs, self.target, self._producers(start, end))
        for base, parts in segments.items():
            copy.write(base, parts)
        epochs = _or_none(checkpoint.read_epochs, fs, self.source) or copy.epochs
        checkpoint.write_epochs(fs, self.target, [one for one in epochs if one[1] <= end] or [(0, start)])
        if len(copy.producers):
            checkpoint.write(fs, self.target, file_name(end, SNAPSHOT), copy.producers.pack())
        self.lost += _copy_small(fs, self.source, self.target, checkpoint.PARTITION_METADATA)
        if self.is_dense and not self.lost:  # with a gap it is a log as Kafka leaves them
            _copy_small(fs, self.source, self.target, checkpoint.POLICY)
        fs.sync_dir(self.target)
        fs.sync_dir(os.path.dirname(self.target))
        report = PartitionReport(
            source=self.source,
            target=self.target,
            files=self.files,
            batches=sum(one.batches for one in extents),
            records=sum(one.records for one in extents),
            size_bytes=sum(one.end - one.position for one in extents),
            log_start_offset=start,
            log_end_offset=end,
            lost=tuple(self.lost),
            left_out=tuple(self.left_out),
        )
        return _Saved(report, copy.producer_ids)

    def _producers(self, start: int, end: int) -> Producers:
        """What the newest sound snapshot within the copy says."""
        offsets = [offset for name in self.names if (offset := base_offset_of(name, SNAPSHOT)) is not None]
        for offset in sorted(offsets, reverse=True):
            content = _or_none(checkpoint.read, self.fs, self.source, file_name(offset, SNAPSHOT))
            producers = Producers.unpack(content, offset) if content and start <= offset <= end else None
            if producers is not None:
                return producers
        return Producers()

    # -- the plan --------------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[int, int, list[_Extent]]:
        """(log start offset, log end offset, what is copied, by offset); notes what is lost and what is left out."""
        found: list[_Extent | _Damage] = []
        swapped = self._take_swaps()
        for base, next_base in itertools.zip_longest(self.bases, self.bases[1:]):
            source = swapped.get(base) or self._open(file_name(base, LOG))
            if source is not None:
                high = _limit(base) if next_base is None else min(next_base, _limit(base))
                found += _Search(source, base, base, high, is_dense=self.is_dense).found
        # What was on disk or was shown to readers had its offsets, wherever it is now.
        known = [self._noted(checkpoint.RECOVERY_POINT), self._noted(checkpoint.HIGH_WATERMARK)]
        durable = _or_none(checkpoint.read_durable_end, self.fs, self.source) or 0
        ends = [one.next_offset for one in found if isinstance(one, _Extent)]
        end = max([durable, *known, *self.bases[-1:], *ends[-1:]])
        start = self._noted(checkpoint.LOG_START)
        if start > end:
            path = os.path.join(self.parent, checkpoint.LOG_START)
            self.lost.append(Part(path=path, reason=f"the log start offset {start} lies behind the end of the log"))
            start = 0
        start = max([start, *self.bases[:1]])
        for base, next_base in itertools.pairwise(self.bases):
            if next_base <= start:
                self._leave(file_name(base, LOG), "all of it lies below the log start offset")
                found = [one for one in found if one.base != base]
        self.found = found
        extents = self._account(found, start, end)
        for name in self.spares:
            self._leave(name, "left by a recovery, a deletion or a compaction; used to fill gaps only")
        for before, after in itertools.pairwise(extents):
            after.base = max(before.base, after.base)
            if after.next_offset > _limit(after.base):
                after.base = after.first
        return start, max([end, *(one.next_offset for one in extents[-1:])]), extents

    def _take_swaps(self) -> dict[int, _Source]:
        """The new segments of compactions that got as far as taking the first old one away: they are the log, instead
        of those that they replace (recovery.decide_swap). A damaged one is left among the spare files.
        """
        taken: dict[int, _Source] = {}
        for name in [name for name in self.spares if name.endswith(".log.swap")]:
            base = _base_in(name)
            source = None if base is None or base in self.bases else self._open(name)
            if base is None or source is None:
                continue
            self.spares[name] = source
            parts = _Search(source, base, base, _limit(base), is_dense=False).found
            if parts and all(isinstance(one, _Extent) for one in parts):
                end = max(one.next_offset for one in parts if isinstance(one, _Extent))
                for old in [old for old in self.bases if base <= old < end]:
                    self.bases.remove(old)
                    self._leave(file_name(old, LOG), f"replaced by {name}, which a compaction has made")
                taken[base] = source
                self.bases = sorted([*self.bases, base])
                del self.spares[name]
        return taken

    def _open(self, name: str) -> _Source | None:
        path = os.path.join(self.source, name)
        self.files += 1
        try:
            source = _Source(self.fs, path, os.path.join(os.path.dirname(self.target), ".logcore-recover.tmp"))
        except (FileNotFoundError, StorageReadError) as error:
            self.lost.append(Part(path=path, reason=f"it cannot be opened: {error}"))
            return None
        self.tick(source.size)
        return source

    def _leave(self, name: str, reason: str) -> None:
        self.left_out.append(Part(path=os.path.join(self.source, name), reason=reason))

    def _account(self, found: Sequence[_Extent | _Damage], start: int, end: int) -> list[_Extent]:
        """All extents by offset, with those that fill gaps; says of each gap and each damage what is missing."""
        is_compacted = self.is_compacted or any(one.has_gaps for one in found if isinstance(one, _Extent))
        extents: list[_Extent] = []
        here: list[_Damage] = []
        low = start
        for one in (*found, None):
            if isinstance(one, _Damage):
                here.append(one)
                continue
            high = end if one is None else one.first
            filling: list[_Extent] = []
            # Compaction leaves gaps between batches. Where something is damaged, nobody knows.
            if low < high and (here or one is None or not is_compacted):
                filling = self._fill(low, high)
                self._note_lost(low, high, here, filling, is_end=one is None)
            else:
                self._note_damage(here, is_end=one is None)
            extents += filling
            here = []
            if one is not None:
                extents.append(one)
                low = max(start, one.next_offset)
        return extents

    def _fill(self, low: int, high: int) -> list[_Extent]:
        """Sound batches from spare files whose offsets lie in [low, high), by offset."""
        filling: list[_Extent] = []
        for name in self.spares:
            source = self.spares[name] = self.spares[name] or self._open(name)
            if source is None or not self._is_of_this_log(name, source):
                continue
            more: list[_Extent] = []
            for gap_low, gap_high in _gaps(low, high, filling):
                # Not across the border of a segment.
                borders = [gap_low, *(base for base in self.bases if gap_low < base < gap_high), gap_high]
                for part_low, part_high in itertools.pairwise(borders):
                    base = _base_in(name) or 0
                    if not part_low <= base < part_high:
                        base = max([base for base in self.bases if base <= part_low], default=part_low)
                    search = _Search(source, base, part_low, part_high, is_dense=False)
                    more += [one for one in search.found if isinstance(one, _Extent)]
            filling = sorted(filling + more, key=lambda one: one.first)
        return filling

    def _is_of_this_log(self, name: str, source: _Source) -> bool:
        """Whether a spare file tells of this log and not of what had its offsets before. Without gaps the batches that
        both have are the same ones; and what a recovery cut off was not written again.
        """
        if name not in self.judged:
            ours = [one for one in self.found if isinstance(one, _Extent)]
            low = _base_in(name) or 0
            parts = _Search(source, low, low, _limit(low), is_dense=False).found
            theirs = [one for one in parts if isinstance(one, _Extent)]
            # <base>.<position of the cut>.quarantine: whatever stands there now has its offsets.
            cut = name.split(".")[1] if name.endswith(".quarantine") else ""
            goes_on = cut.isdecimal() and any(
                one.base > low or (one.base == low and one.end > int(cut)) for one in self.found
            )
            same = True
            if self.is_dense and theirs:
                known = _crcs(ours, theirs[0].first, theirs[-1].next_offset)
                same = all(known.get(offset, crc) == crc for offset, crc in _crcs(theirs, low, _limit(low)).items())
            self.judged[name] = same and not goes_on
        return self.judged[name]

    def _note_lost(
        self, low: int, high: int, here: Sequence[_Damage], filling: Sequence[_Extent], *, is_end: bool
    ) -> None:
        gaps = _gaps(low, high, filling)
        if not gaps:
            self._note_damage(here, is_end=False)
        path, position, size = self.source, None, 0
        reason = "the log went on to here" if is_end else "no file holds these offsets"
        if here:
            first = here[0]
            path, position, size = first.source.path, first.position, sum(one.end - one.position for one in here)
            reason = first.source.why(first.position, first.end, first.reason)
        for gap_low, gap_high in gaps:
            offsets = {"first_offset": gap_low, "last_offset": gap_high - 1}
            self.lost.append(Part(path=path, position=position, size_bytes=size, reason=reason, **offsets))

    def _note_damage(self, here: Sequence[_Damage], *, is_end: bool) -> None:
        """Notes damage without which no offset is missing. Behind the end of the log nobody knows that."""
        for one in here:
            size = one.end - one.position
            reason = one.source.why(one.position, one.end, one.reason)
            part = Part(path=one.source.path, position=one.position, size_bytes=size, reason=reason)
            (self.lost if is_end and reason != _ZEROS else self.left_out).append(part)


def _or_none(call: Callable[..., _T], *arguments: Any) -> _T | None:
    """None for a file that cannot be read: what it says can be found in another way or is not needed."""
    return _or(None, call, *arguments)


def _or(otherwise: _U, call: Callable[..., _T], *arguments: Any) -> _T | _U:
    try:
        return call(*arguments)
    except LogcoreError:
        return otherwise


def _base_in(name: str) -> int | None:
    """The base offset that the name of any file of a segment begins with."""
    return base_offset_of(name[:20] + LOG)


def _limit(base: int) -> int:
    """The first offset that has no place in a segment."""
    return min(INT64_MAX, base + layout.INT32_MAX + 1)


def _crcs(extents: Sequence[_Extent], low: int, high: int) -> dict[int, int]:
    """Base offset -> CRC of the batches that begin in [low, high)."""
    found: dict[int, int] = {}
    for one in extents:
        position = one.position if one.first < high and one.next_offset > low else one.end
        while position < one.end:
            facts, position, _ = active.walk(one.source.view, position, one.end, _WALK_BATCHES, False)
            facts = facts[(facts["base_offset"] >= low) & (facts["base_offset"] < high)]
            found.update(zip(facts["base_offset"].tolist(), facts["crc"].tolist(), strict=True))
    return found


def _gaps(low: int, high: int, filling: Sequence[_Extent]) -> list[tuple[int, int]]:
    """What of [low, high) the extents, by offset, leave open."""
    edges = [low, *(offset for one in filling for offset in (one.first, one.next_offset)), high]
    return [(edges[at], edges[at + 1]) for at in range(0, len(edges), 2) if edges[at] < edges[at + 1]]


class _Copy:
    """Writes the segments of one partition in order, and learns from their heads what else is to be written.

    epochs: (leader epoch, start offset), rising in both. producer_ids: above all in the heads.
    """

    def __init__(self, fs: FS, directory: str, producers: Producers) -> None:
        self.fs, self.directory, self.producers = fs, directory, producers
        self.config = LogConfig.parse(None)
        self.transactions = Transactions()
        self.epochs: list[tuple[int, int]] = []
        self.producer_ids = 0

    def write(self, base: int, parts: Sequence[_Extent]) -> None:
        """One segment with its indexes, on disk when this returns."""
        segment = ActiveSegment(self.fs, self.directory, base, self.config, create=True)
        for part in parts:
            view, position = part.source.view, part.position
            while position < part.end:
                facts, behind, _ = active.walk(view, position, part.end, _WALK_BATCHES, False)
                columns = (facts[name].tolist() for name in ("position", "size_bytes", "last_offset", "max_timestamp"))
                batches = [(at - position, size, last, newest) for at, size, last, newest in zip(*columns, strict=True)]
                segment.append(view[position:behind], *batches[-1][2:], batches)
                self._note(facts, part.source, segment)
                position = behind
        segment.seal()

    def _note(self, facts: layout.Facts, source: _Source, segment: ActiveSegment) -> None:
        modern = facts[facts["magic"] == 2]
        ids = modern[modern["producer_id"] >= 0]
        if len(ids):
            self.producer_ids = max(self.producer_ids, int(ids["producer_id"].max()) + 1)
            behind = ids[ids["base_offset"] >= self.producers.next_offset]
            epochs_of = _coordinator_epochs(cast(Segment, source))
            self.producers.add_facts(behind, lambda position: _or(-1, epochs_of, position))
        # An epoch that the next batch takes back is a damaged one: no CRC covers it.
        epochs = modern["partition_leader_epoch"]
        steps = np.flatnonzero((np.diff(epochs, prepend=-2) != 0) & (epochs <= np.append(epochs[1:], layout.INT32_MAX)))
        for row in steps.tolist():
            if epochs[row] > (self.epochs[-1][0] if self.epochs else -1):
                self.epochs.append((int(epochs[row]), int(modern["base_offset"][row])))
        known = len(self.transactions.entries)
        self.transactions.add(modern, lambda position: _control_type(source, position))
        for entry in self.transactions.entries[known:]:
            segment.add_aborted(entry)


def _control_type(source: _Source, position: int) -> str:
    batch = _or_none(source.batch, position)
    return (batch and _or_none(batch.control_type)) or "UNKNOWN"
