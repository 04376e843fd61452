"""One segment: a .log file and the indexes that make it searchable.

Rules:
- Bytes are only ever added at the end, by the single writer of the partition.
- An index may lag behind its .log file and may always be rebuilt from it; never the other way round.
- A sealed segment does not change again: it is mapped, and readers share the mapping. The active segment is read with
  pread, because a mapping over a file that recovery shortens is a SIGBUS for the whole process. If another program
  shortens a sealed file, pages of the mapping turn to zeros (fs.is_readable()), which is reported as StorageReadError
  and not as damage.

This module does not decide when to roll (log.py), what to cut (partition/recovery.py) or what to delete.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from logcore.config import INT64_MAX, LogConfig
from logcore.errors import (
    CorruptBatchError,
    LogcoreError,
    OffsetOutOfRangeError,
    ResourceError,
    StorageReadError,
    StorageWriteError,
)
from logcore.fs import FS, opened
from logcore.index import AbortedTransaction, IndexWriter, OffsetIndex, TimeIndex, load, read_front, rises
from logcore.kernels import Record, SegmentFields, kernel, layout
from logcore.kernels.layout import EncodedBatch
from logcore.names import DELETED, INDEX, INDEXES, LOG, TIME_INDEX
from logcore.recordbatch import RecordBatch, are_markers

#: Read from an active segment at once. The walk for one offset covers at most an index interval and a batch.
_SEEK_BYTES: Final = 32 << 10
_WALK_BATCHES: Final = 4096
_WALK_BYTES: Final = 4 << 20
#: From this size on a mapping of the growing segment is cheaper than a copy: 0.02 ms a MB instead of 0.25.
_MAPPED_BYTES: Final = 128 << 10
#: How much of the segment that is written single reads take with system calls before it is mapped again.
_UNMAPPED_BYTES: Final = 64 << 10
#: How much a segment may grow until its index is worth reading again.
_REREAD_BYTES: Final = 1 << 20
#: How much of a mapping is read at once before it is sent for the first time.
_TOUCHED_BYTES: Final = 256 << 10
_UNREADABLE: Final = "a part of the file cannot be read: another program shortened it, or the disk fails"
#: Later than every other timestamp.
_NEVER: Final = INT64_MAX


class Piece(NamedTuple):
    """Borrowed bytes of a segment: data[i] is byte origin + i of the file at path, for i below limit."""

    data: memoryview
    at: int
    limit: int
    origin: int
    path: str


class Segment(SegmentFields):
    """A segment that is read. Its end is given with each call: what lies behind it may still be growing.

    state: what is appended to the names of its files, ".cleaned" or ".swap" for one that is to replace others.
    """

    def __init__(self, fs: FS, directory: str, base_offset: int, state: str = "") -> None:
        self.fs = fs
        self.directory = directory
        self.base_offset = base_offset
        self.held = None  # set by read_one(), for kernel.get_quickly()
        self.handle = -1  # of a file that is kept open
        self.state = state
        # Without os.path.join(): an opening makes this for each of thousands of segments.
        self._plain = f"{directory}{os.sep}{base_offset:020d}"
        self.path = self.file(LOG)
        # The fields below are filled at the first use, by any thread and without a lock: two that come together find
        # the same, and the later one replaces the other's.
        self._view: memoryview | None = None
        self._identity: tuple[int, int] | None = None  # of the file that was opened, whatever its name is now
        self._max_timestamp: int | None = None
        self._next_offset: int | None = None
        #: Whether max_timestamp() is what was written: the time index agreed, or partition/gaps.py walked all batches.
        self.is_newest_sure = False
        self._touched: set[int] = set()  # parts of the mapping that were read once; threads may read one twice
        #: What partition/gaps.py has read of the seal beside the file: written once, by whichever thread comes first.
        self.known_seal: Any = None
        self.is_seal_known = False
        self._offset_index: OffsetIndex | None = None
        self._time_index: TimeIndex | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"

    def file(self, suffix: str) -> str:
        return self._plain + suffix + self.state

    @property
    def size_bytes(self) -> int:
        return len(self.view())

    @property
    def offset_index(self) -> OffsetIndex:
        if self._offset_index is None:
            path = self.file(INDEX)
            self._offset_index = OffsetIndex(path, load(self.fs, path, OffsetIndex))
        return self._offset_index

    @property
    def time_index(self) -> TimeIndex:
        if self._time_index is None:
            path = self.file(TIME_INDEX)
            self._time_index = TimeIndex(path, load(self.fs, path, TimeIndex))
        return self._time_index

    def view(self) -> memoryview:
        """The whole sealed file, mapped at first use; valid as long as anything refers to it."""
        if self._view is None:
            handle = self._open_file()
            try:
                self._identity = self.fs.identity(handle)
                size = self.fs.size(handle)
                if size:
                    self._view = self.fs.map(handle, size)
                else:
                    self._view = memoryview(b"")
            finally:
                self.fs.close(handle)
        return self._view

    def _open_file(self) -> int:
        """The file, also under the name that its writer gave it meanwhile: a new one, or one that is to go soon."""
        plain = self._plain + LOG
        for path in (self.path, plain, plain + DELETED):
            with contextlib.suppress(FileNotFoundError):
                return self.fs.open(path)
        raise OffsetOutOfRangeError("the segment was removed by its writer", path=self.path, offset=self.base_offset)

    def piece(self, position: int, size: int) -> Piece:
        """Bytes from position on, at least size of them unless the segment ends before; a mapping gives all."""
        view = self.view()
        return Piece(view, position, len(view), 0, self.path)

    def lasting_piece(self, position: int, size: int) -> Piece:
        """As piece(), for bytes below the visible end that will be held for long, such as until a client reads them."""
        return self.piece(position, size)

    def start_position(self, offset: int) -> int:
        """A position at or before the first batch whose last offset is at or after offset, by the index.

        What the index says is believed only if a batch head stands there whose last offset the entry could mean.
        """
        view = self.view()
        index = self.offset_index
        return kernel.start_position(index.data, len(index), view, len(view), self.base_offset, offset)

    def find(self, offset: int) -> int:
        """Position of the first batch whose last offset reaches offset, or of damage before it; else size_bytes."""
        view = self.view()
        return kernel.find_batch(view, self.start_position(offset), len(view), offset)

    def read_one(self, offset: int, end_offset: int, dense: bool) -> Record | int:
        """The first record at or after offset; an int when it takes more than a plain batch and the next head to tell.

        end_offset: of the segment. dense: whether there are no gaps in the offsets.
        """
        view = self.view()
        index = self.offset_index
        size = len(view)
        base_offset = self.base_offset
        if self.held is None and size:
            self.held = kernel.hold(view, index, INT64_MAX)
        return kernel.get_one(index.data, len(index), view, size, base_offset, offset, self.path, end_offset, dense)

    def head(self, position: int) -> tuple[memoryview, int, int]:
        """(data, at, limit) with enough bytes at position for the whole batch that seems to stand there."""
        piece = self.piece(position, layout.HEADER_SIZE)
        if piece.limit - piece.at >= layout.PREFIX_SIZE:
            size = int.from_bytes(piece.data[piece.at + 8 : piece.at + 12], "big") + layout.LOG_OVERHEAD
            # A length that the segment cannot hold is damage, or a torn batch: the head alone shows which.
            if layout.HEADER_SIZE < size <= self.size_bytes - position:
                piece = self.piece(position, size)
        return piece.data, piece.at, piece.limit

    def batch(self, position: int) -> RecordBatch | None:
        """The batch at a position; None when it is not whole. Raises CorruptBatchError for an impossible head."""
        data, at, limit = self.head(position)
        return RecordBatch.parse(data, at, limit, path=self.path, origin=position - at)

    def walk(
        self, position: int, *, crc: bool, stop: int | None = None, step_bytes: int = _WALK_BYTES
    ) -> Iterator[tuple[layout.Facts, int, int]]:
        """Walks batch heads from position to stop or the end, some thousand at a time: (facts, next position, why).

        facts: array of layout.BATCH_FACTS, positions in the file. The last item has why != WALK_LIMIT. step_bytes: read
        at once of a file that is not mapped.
        """
        if stop is None:
            size = self.size_bytes
        else:
            size = stop
        while True:
            piece = self.piece(position, min(step_bytes, size - position))
            data = piece.data
            start = piece.at
            limit = min(piece.limit, size - piece.origin)
            origin = piece.origin
            facts, at, why = kernel.walk(data, start, limit, _WALK_BATCHES, crc)
            if why == layout.WALK_SHORT and at == start and origin + limit < size:
                data, start, limit = self.head(position)  # a batch larger than the piece
                origin = position - start
                facts, at, why = kernel.walk(data, start, limit, 1, crc)
            facts["position"] += origin
            position = origin + at
            # The end of a piece is not the end of the segment, unless nothing was read: a file that was cut meanwhile.
            if at > start and (
                (why == layout.WALK_SHORT and origin + limit < size) or (why == layout.WALK_END and position < size)
            ):
                why = layout.WALK_LIMIT
            yield facts, position, why
            if why != layout.WALK_LIMIT:
                return

    def stored(
        self, position: int, max_bytes: int, end: int, at_least_one: bool, check: Callable[[layout.Facts], None]
    ) -> tuple[memoryview, bool]:
        """(bytes, whole): whole batches from position on, up to max_bytes, that lie below offset end.

        at_least_one: the first even if it is larger. check: is shown the heads of all of them, in order. whole: whether
        they reach the end of the segment. Raises CorruptBatchError, and what check raises.
        """
        size = self.size_bytes
        piece = self.lasting_piece(position, max(0, min(max_bytes, size - position)))
        data = piece.data
        start = piece.at
        origin = piece.origin
        self._check_sendable(data[start : start + max_bytes], position)
        at = start  # behind the batches that were walked
        stop = min(piece.limit, start + max(0, max_bytes))
        while True:
            facts, next_at, why = kernel.walk(data, at, stop, _WALK_BATCHES, False)
            # Offsets rise, or check() raises: so the first batch that reaches end, and all behind it, are left out.
            if len(facts) and int(facts["last_offset"][-1]) >= end:
                above = int((facts["last_offset"] >= end).argmax())
                check(facts[:above])
                return data[start : int(facts["position"][above])], False
            check(facts)
            # Not even the first batch fits: once more, with as many bytes as its head asks for.
            if why == layout.WALK_SHORT and next_at == start and at_least_one and origin + stop < size:
                data, start, limit = self.head(position)
                at = start
                origin = position - start
                at_least_one = False
                length = 0
                if limit - at >= 12:
                    length = int.from_bytes(data[at + 8 : at + 12], "big", signed=True)
                stop = min(limit, at + max(layout.HEADER_SIZE, length + layout.LOG_OVERHEAD))
                continue
            if why not in (layout.WALK_LIMIT, layout.WALK_END, layout.WALK_SHORT) and next_at == start:
                raise CorruptBatchError(layout.WALK_REASONS[why], path=self.path, position=origin + next_at)
            if why != layout.WALK_LIMIT:
                return data[start:next_at], origin + next_at >= size
            at = next_at

    def _check_sendable(self, data: memoryview, position: int) -> None:
        """Raises StorageReadError when bytes of a mapping at a position cannot be read. A socket that met them first
        could only close the connection. Pages are touched when they are sent for the first time; the size of the file
        shows whether any were cut off since.
        """
        if self._view is None:
            return  # not mapped
        try:
            size = self.fs.file_size(self.path)
        except FileNotFoundError:
            size = len(self._view)  # who has it mapped goes on reading a file that has no name
        if size < len(self._view) and self.is_current():
            raise StorageReadError(_UNREADABLE, path=self.path, position=position)
        if not len(data):
            return
        for part in range(position // _TOUCHED_BYTES, (position + len(data) - 1) // _TOUCHED_BYTES + 1):
            if part in self._touched:
                continue
            start = part * _TOUCHED_BYTES
            if self.fs.is_readable(self._view[start : start + _TOUCHED_BYTES], touch=True):
                self._touched.add(part)
            elif not self.fs.is_readable(data, touch=True):  # else what cannot be read lies beside what is sent
                raise StorageReadError(_UNREADABLE, path=self.path, position=position)

    def max_timestamp(self) -> int:
        """Largest timestamp of a sealed segment, -1 for none: the closing entry of its time index, if the batches from
        there on confirm it, else by walking all of it. Raises CorruptBatchError for damage met then.
        """
        if self._max_timestamp is None:
            self._max_timestamp = self._find_max_timestamp()
        return self._max_timestamp

    def _find_max_timestamp(self) -> int:
        index = self.time_index
        if len(index):
            timestamp, relative_offset = index.entry(len(index) - 1)
            position = self.find(self.base_offset + relative_offset)
            newest = [int(facts["max_timestamp"].max(initial=-1)) for facts, _, _ in self.walk(position, crc=False)]
            if position < self.size_bytes and newest and max(newest) == timestamp:
                self.is_newest_sure = True
                return timestamp
        largest = -1
        for facts, at, why in self.walk(0, crc=True):
            if why not in (layout.WALK_END, layout.WALK_LIMIT):
                raise CorruptBatchError(layout.WALK_REASONS[why], path=self.path, position=at)
            largest = max(largest, int(facts["max_timestamp"].max(initial=-1)))
        return largest

    def next_offset(self) -> int:
        """The offset after the last whole batch, found from the last index entry on; base_offset when empty."""
        if self._next_offset is None:
            position = self.start_position(self.base_offset + 2**31 - 1)
            end = self.base_offset
            for facts, _, _ in self.walk(position, crc=False):
                if len(facts):
                    end = int(facts["last_offset"][-1]) + 1
            self._next_offset = end
        return self._next_offset

    def check_readable(self, error: BaseException | None = None) -> None:
        """Raises StorageReadError when a page of the mapped file could not be read, so that zeros stand in its place.

        error: what these led to.
        """
        views = [self._view, *(index.data for index in (self._offset_index, self._time_index) if index is not None)]
        for view in views:
            if isinstance(view, memoryview) and len(view) and not self.fs.is_readable(view):
                raise StorageReadError(_UNREADABLE, path=self.path) from error

    def is_there(self) -> bool:
        """Whether a file stands under the name."""
        return self.fs.exists(self.path)

    def is_current(self) -> bool:
        """Whether the file that was opened, if any was, still stands under its name."""
        try:
            return self._identity is None or self._identity == self.fs.identity(self.path)
        except FileNotFoundError:
            return False

    def keep(self) -> None:
        """Makes the segment readable by those who hold it after its files were removed."""
        self.view()
        _ = self.offset_index, self.time_index


class GrowingSegment(Segment):
    """The last segment of a log that another process may be writing: read with pread, never mapped.

    The file stays open as long as anyone holds the segment: a handle that is closed under a reader may be given to
    another file, and then its bytes would be read as this log's.
    """

    def __init__(self, fs: FS, directory: str, base_offset: int) -> None:
        super().__init__(fs, directory, base_offset)
        self._hold(fs.open(self.path))

    def _hold(self, handle: int) -> None:
        self.handle = handle
        self._closing = weakref.finalize(self, self.fs.close, handle)
        self._identity = self.fs.identity(handle)
        self._size = self.fs.size(handle)
        # (position, expected offset) where gaps.check_growing() goes on. Replaced whole: several threads may check.
        self.checked: tuple[int, int] = (0, self.base_offset)
        self._whole_position = 0  # where the whole batches seen by next_offset end
        self._whole_end = self.base_offset

    @property
    def size_bytes(self) -> int:
        return self._size

    def keep(self) -> None:
        """Nothing to do: the open file is what keeps it."""

    def refresh(self) -> int:
        """Looks at how long the file is now; an index read before is read again once it lags far behind."""
        size = self.fs.size(self.handle)
        if not self._size <= size < self._size + _REREAD_BYTES:
            self._offset_index = self._time_index = None
        if size < self._size:  # its writer has taken back an append, or recovered: nothing of it is known any more
            self._whole_position = 0
            self.checked = (0, self.base_offset)
        self._size = size
        return size

    def next_offset(self) -> int:
        """As Segment.next_offset, going on where the last call ended."""
        if self._whole_position and self._walk_on():
            return self._whole_end
        # The first look, or what was seen was cut back meanwhile and other batches stand there.
        self._whole_position = self.start_position(self.base_offset + layout.INT32_MAX)
        if not self._whole_position:
            self._whole_end = self.base_offset
        else:
            self._whole_end = -1
        self._walk_on()
        return max(self._whole_end, self.base_offset)

    def _walk_on(self) -> bool:
        """Walks whole batches from where the last walk ended; False if the bytes there are no batch that follows."""
        for facts, position, _ in self.walk(self._whole_position, crc=False):
            if not len(facts):
                return position >= self._size
            # A file that was cut and has grown again may have a batch of lower offsets there.
            if self._whole_end >= 0 and facts["magic"][0] == 2 and int(facts["base_offset"][0]) < self._whole_end:
                return False
            self._whole_end = int(facts["last_offset"][-1]) + 1
            self._whole_position = position
        return True

    def piece(self, position: int, size: int) -> Piece:
        data = memoryview(self.fs.pread(self.handle, max(0, min(size, self._size - position)), position))
        return Piece(data, 0, len(data), position, self.path)

    def view(self) -> memoryview:
        return memoryview(self.fs.pread(self.handle, self._size, 0))

    @property
    def offset_index(self) -> OffsetIndex:
        if self._offset_index is None:
            path = self.file(INDEX)  # copied, because its writer may shorten the file at any time
            self._offset_index = OffsetIndex(path, memoryview(bytes(_read(self.fs, path, OffsetIndex))))
        return self._offset_index

    @property
    def time_index(self) -> TimeIndex:
        if self._time_index is None:
            path = self.file(TIME_INDEX)
            self._time_index = TimeIndex(path, memoryview(bytes(_read(self.fs, path, TimeIndex))))
        return self._time_index

    def start_position(self, offset: int) -> int:
        index = self.offset_index
        slot = index.find(offset - self.base_offset)
        if slot < 0:
            return 0
        relative, position = index.entry(slot)
        before = -1
        if slot:
            before = index.entry(slot - 1)[0]
        # Kafka's entries name the last offset of an append of several batches, so the batch may end before the entry;
        # but not before the entry in front of it.
        if 0 < position < self._size:
            facts, _, _ = kernel.walk(*self.head(position), 1, False)
            if len(facts) and before < int(facts["last_offset"][0]) - self.base_offset <= relative:
                return position
        return 0

    def read_one(self, offset: int, end_offset: int, dense: bool) -> Record | int:
        """As Segment.read_one, with one read of the file in the usual case; 0 when that does not find it."""
        position = self.start_position(offset)
        data = self.fs.pread(self.handle, min(_SEEK_BYTES, self._size - position), position)
        if position + len(data) < self._size:
            end_offset = -1  # the bytes that were read do not reach it
        found = kernel.read_one(data, 0, len(data), offset, self.path, end_offset, dense)
        if not isinstance(found, int):
            return found
        return 0

    def find(self, offset: int) -> int:
        position = self.start_position(offset)
        while position < self._size:
            data: memoryview | bytes = self.fs.pread(self.handle, min(_SEEK_BYTES, self._size - position), position)
            if not data:  # the file was cut meanwhile
                break
            at = kernel.find_batch(data, 0, len(data), offset)
            if at == 0 and position + len(data) < self._size:  # the batch may be larger than what was read
                data, _, _ = self.head(position)
                at = kernel.find_batch(data, 0, len(data), offset)
            is_found = at < len(data)
            is_last_piece = position + len(data) >= self._size
            if is_found and at and not is_last_piece:
                # It may be cut off by the end of the bytes that were read: then it is read from its start.
                is_found = RecordBatch.parse(data, at, path=self.path, origin=position) is not None
            if is_found:
                return position + at
            position += at
        return position

    def max_timestamp(self) -> int:
        """By walking the heads: a growing time index says nothing of what came after its last entry."""
        return max((int(facts["max_timestamp"].max(initial=-1)) for facts, _, _ in self.walk(0, crc=False)), default=-1)


class PiecedSegment(GrowingSegment):
    """A sealed segment that is read with pread, for a process that may not map it, or cannot."""

    def max_timestamp(self) -> int:
        return Segment.max_timestamp(self)


def _read(fs: FS, path: str, kind: type[OffsetIndex] | type[TimeIndex]) -> bytes:
    try:
        with opened(fs, path) as handle:
            return read_front(fs, handle, kind.entry_size)
    except FileNotFoundError:
        return b""


class ActiveSegment(GrowingSegment):
    """The segment that is written, with what appends need to know of it in plain attributes.

    Those that each append looks at or changes are SegmentFields, which the compiled kernels reach without Python.
    """

    _indexes: IndexWriter

    def __init__(
        self, fs: FS, directory: str, base_offset: int, config: LogConfig, *, create: bool, state: str = ""
    ) -> None:
        Segment.__init__(self, fs, directory, base_offset, state)
        self._hold(fs.open(self.path, write=True, create=create, exclusive=create))
        self.config = config
        self.index_interval_bytes = config.index_interval_bytes
        self._mapping: memoryview | None = None
        self.created_ms = fs.now_ms()
        self.is_own = create  # whether all of its bytes were written through this object
        self._own_from = self._size  # from where on they were
        self.limit_offset = base_offset + layout.INT32_MAX
        self.reset()
        self._indexes.offers = create

    def reset(self, *, is_synced: bool = False) -> None:
        """Forgets the indexes and all that was learnt from the batches. is_synced: the indexes' files are on disk."""
        self.held = None
        self._indexes = IndexWriter(self.fs, [self.file(suffix) for suffix in INDEXES], is_synced=is_synced)
        self._offset_index = self._indexes.offsets
        self._time_index = self._indexes.times
        self.since_entry_bytes = 0
        self.has_producers = False  # batches of idempotent producers, of those found by walking
        self.has_markers = False  # control batches of transactions, of those found by walking
        self.first_timestamp = -1
        self.largest_timestamp = -1
        self.largest_timestamp_offset = self.base_offset
        self._unseen = 0, 0  # where batches lie whose times are not known yet
        self.last_offset = self.base_offset - 1
        self.was_cut_back = False  # a write failed, and what it left may come back in a power cut
        # An append that stays within these needs no further look at whether to roll; is_full() has the rules.
        self.limit_bytes = self.config.segment_bytes
        self.limit_timestamp = _NEVER

    def resume(self, below: int, *, is_whole: bool) -> int:
        """Takes what the index files say of the batches below an offset, as if these had been walked; returns where the
        batches begin that are to be walked still, 0 when the files are of no use.

        The last offset entry that is taken has to point at its batch, and the last time entry at a batch of that time;
        other entries are checked when they are used (start_position). is_whole: the files lack nothing. After a crash
        one of them may, so that the heads from the last time entry on are walked for a newer one.
        """
        # 1. The last offset entry that may be taken: below the offset, and within the file.
        index_path = self.file(INDEX)
        time_path = self.file(TIME_INDEX)
        offsets = OffsetIndex(index_path, bytearray(_read(self.fs, index_path, OffsetIndex)), is_synced=is_whole)
        times = TimeIndex(time_path, bytearray(_read(self.fs, time_path, TimeIndex)), is_synced=is_whole)
        relative, position = (offsets.array()[name].astype(np.int64) for name in ("relative_offset", "position"))
        slot = int(min(relative.searchsorted(below - self.base_offset), position.searchsorted(self._size))) - 1
        # A hole in front of the first entries reads as an entry of zeros; no batch at 0 has an entry.
        if slot < 0 or not rises(relative) or not rises(position) or not position[0]:
            return 0
        # 2. The time entries up to there, and the last of them: the newest record up to the batch at that entry.
        kept = times.array()
        if np.any(np.diff(kept["relative_offset"].astype(np.int64)) < 0):
            return 0
        kept = kept[: kept["relative_offset"].searchsorted(relative[slot], side="right")]
        # Without a time entry no batch up to there may have a time: all of them are read.
        newest = -1
        newest_offset = -1
        if len(kept):
            newest, newest_offset = kept[-1].tolist()
        # 3. Walk the heads that have to confirm it: from the offset entry before the newest record to the next entry,
        # or, where a crash may have cut the time index, to the last one.
        near = int(relative.searchsorted(newest_offset, side="right")) - 1
        start = 0
        if near >= 0:
            start = int(position[near])
        stop = int(position[slot])
        if is_whole and len(kept) and near < slot:
            until = int(position[near + 1])
        else:
            until = stop
        parts = [facts for facts, _, _ in self.walk(start, stop=until, crc=False)]
        last, first = (kernel.walk(*self.head(at), 1, False)[0] for at in (stop, 0))
        rows = np.concatenate([*parts, last])
        rows = rows[rows["last_offset"] >= self.base_offset + newest_offset]
        is_confirmed = (
            len(first)
            and len(last)
            and rises(kept["timestamp"])
            and (not len(kept) or int(first["max_timestamp"][0]) <= int(kept["timestamp"][0]))
            and int(last["last_offset"][0]) == self.base_offset + int(relative[slot])
            and (not len(kept) or int(rows["last_offset"][0]) == self.base_offset + newest_offset)
            and int(rows["max_timestamp"].max()) == newest == int(rows["max_timestamp"][0])
        )
        if not is_confirmed:
            return 0
        # 4. Take them, as if the batches had been walked.
        self._indexes.resume(offsets, slot + 1, times, len(kept))
        self._offset_index = offsets
        self._time_index = times
        self._begin_at(int(first["max_timestamp"][0]))
        if len(kept):
            self.largest_timestamp = newest
            self.largest_timestamp_offset = self.base_offset + newest_offset
        self._unseen = until, stop
        if self._indexes.room(self.config.segment_index_bytes) <= 0:
            self.limit_bytes = -1  # full: the next append rolls
        self.last_offset = int(last["last_offset"][0])
        self.since_entry_bytes = int(last["size_bytes"][0])
        return stop + self.since_entry_bytes

    def max_timestamp(self) -> int:
        """Of all batches, also of those that opening passed over: a time index that lost its last entries names too
        early a time, and retention would delete by it.
        """
        position, stop = self._unseen
        if position < stop:
            for facts, _, _ in self.walk(position, stop=stop, crc=False):
                newest = int(facts["max_timestamp"].max(initial=-1))
                if newest > self.largest_timestamp:
                    row = int(facts["max_timestamp"].argmax())
                    self.largest_timestamp = newest
                    self.largest_timestamp_offset = int(facts["last_offset"][row])
            self._unseen = 0, 0
        return self.largest_timestamp

    @property
    def begun_ms(self) -> int:
        """When the segment was begun, by the wall clock: what its age is counted from.

        For a file that was found it is the time of its first record, whenever it was opened. For one that was made here
        that alone would not do: if old records are written now, each new segment would be rolled at once.
        """
        if not self.is_own and self.first_timestamp >= 0:
            return self.first_timestamp
        return max(self.first_timestamp, self.created_ms)

    @property
    def is_resumed(self) -> bool:
        """Whether what is known of it comes from index files, and only the rest from batches."""
        return self._indexes.believed > 0

    def resume_aborted(self, end: int, *, is_whole: bool) -> bool:
        """Takes the aborted transactions from their file, of a log that ends at end; False when it cannot be right, or
        may lack some: after a crash, when batches were walked that have markers.
        """
        if self.has_markers and not is_whole:
            return False
        return self._indexes.resume_aborted(self.base_offset, end, is_whole=is_whole)

    def _begin_at(self, timestamp: int) -> None:
        """Notes the largest timestamp of the first batch, by whose age the segment is rolled."""
        self.first_timestamp = timestamp
        self.limit_timestamp = _NEVER
        if timestamp >= 0:
            self.limit_timestamp = min(timestamp + self.config.max_segment_ms, _NEVER)

    def reconfigure(self, config: LogConfig) -> None:
        """Other limits from now on; a segment that is full for its index stays full."""
        self.config = config
        self.index_interval_bytes = config.index_interval_bytes
        if self.limit_bytes >= 0:
            self.limit_bytes = config.segment_bytes
        if self.first_timestamp >= 0:
            self.limit_timestamp = min(self.first_timestamp + config.max_segment_ms, _NEVER)

    def _look_at_indexes(self) -> None:
        indexes = self._indexes
        if indexes.look(self.config.segment_index_bytes) <= 0:
            self.limit_bytes = -1
        indexes.offer()

    def offer_indexes(self) -> None:
        """Writes waiting index entries, for readers in other processes and for an opening after a crash."""
        self._indexes.offer()

    def lasting_piece(self, position: int, size: int) -> Piece:
        """Mapped when there is much of it, or when single reads have had it mapped, which costs a fraction of a copy.

        Only the writer may do so: what is visible is never cut from this file, and no other process writes it, so that
        no page of the mapping that is read can vanish.
        """
        if size < _MAPPED_BYTES and (self._mapping is None or len(self._mapping) < position + size):
            return self.piece(position, size)
        return Piece(self._mapped(position + size), position, position + size, 0, self.path)

    def _mapped(self, size: int) -> memoryview:
        """The first size bytes at least."""
        if self._mapping is None or len(self._mapping) < size:
            self._mapping = self.fs.map(self.handle, self._size)
        return self._mapping

    def read_one(self, offset: int, end_offset: int, dense: bool) -> Record | int:
        """As GrowingSegment.read_one; maps the file, so that kernel.get_quickly() answers later calls for what it holds
        now.
        """
        # Mapped again when it has grown by an eighth, and by 64 KiB at least.
        held = self.held
        if held is None or self._size - held.size_bytes > max(_UNMAPPED_BYTES, held.size_bytes // 8):
            with contextlib.suppress(StorageReadError, ResourceError):  # too many mappings: the file can still be read
                self.held = kernel.hold(self._mapped(self._size), self._indexes.offsets, self._own_from)
        return super().read_one(offset, end_offset, dense)

    def start_position(self, offset: int) -> int:
        index = self.offset_index
        slot = index.find(offset - self.base_offset)
        if slot < self._indexes.believed:  # from the file, so its batch is checked; later entries are of batches we saw
            return super().start_position(offset)
        return index.entry(slot)[1]

    def adopt(self, size: int) -> Iterator[layout.Facts]:
        """Takes in what another process has appended up to a size: whole batches. Gives their heads."""
        start = self._size
        self._size = size
        self._own_from = size
        self.held = None
        parts: Iterable[layout.Facts]
        if size - start < _WALK_BYTES:  # one read, and no look at where it ends
            data = self.fs.pread(self.handle, size - start, start)
            facts, _, _ = kernel.walk(data, 0, len(data), len(data) // layout.HEADER_SIZE + 1, False)
            facts["position"] += start
            parts = [facts]
        else:
            parts = (facts for facts, _, _ in self.walk(start, crc=False))
        for facts in parts:
            self.note_all(facts)
            yield facts

    def note_all(self, facts: layout.Facts) -> None:
        """As note_each(), for batches found by walking the file."""
        columns = (facts[name].tolist() for name in ("position", "size_bytes", "last_offset", "max_timestamp"))
        for position, size, last_offset, max_timestamp in zip(*columns, strict=True):
            self.note(position, size, last_offset, max_timestamp)
        if facts["producer_id"].max(initial=-1) >= 0:  # markers have a producer too
            self.has_producers = True
            self.has_markers |= bool(np.any(are_markers(facts)))

    def append(
        self,
        data: bytes | memoryview,
        last_offset: int,
        max_timestamp: int,
        batches: Iterable[EncodedBatch] | None = None,
    ) -> None:
        """Writes whole batches at the end. On any error the file is as long as before, or the error says it is not.

        last_offset, max_timestamp: of all of data. batches: where each batch lies in it; None for a single one. Raises
        DiskFullError after a cut back, StorageWriteError when the state of the file is not known.
        """
        start = self._size
        size = len(data)
        try:
            self.fs.pwrite(self.handle, data, start)
            self._size = start + size
        except BaseException:
            # Also for KeyboardInterrupt: a batch without a receipt must not stay behind.
            self._size = start
            self.cut_back()
            raise
        if batches is None:
            self.note(start, size, last_offset, max_timestamp)
        else:
            self.note_each(start, batches)

    def cut_back(self) -> None:
        """Removes what a failed write has left behind the end. Raises StorageWriteError when that fails too."""
        self.was_cut_back = True
        try:
            self.fs.truncate(self.handle, self._size)
        except LogcoreError as error:
            raise StorageWriteError("a failed write could not be cut back", path=self.path) from error

    def set_aborted(self, entries: Iterable[AbortedTransaction], *, writes: bool = False) -> None:
        """All aborted transactions whose markers stand in this segment; a file that says otherwise goes. writes: the
        file says so at once.
        """
        self._indexes.set_aborted(entries)
        if writes:
            self._indexes.write_aborted()

    def add_aborted(self, entry: AbortedTransaction) -> None:
        """Takes note of an aborted transaction whose marker stands in this segment. Raises what a write raises."""
        self._indexes.add_aborted(entry)

    def reopen(self) -> None:
        """Goes on with the file that stands under the name now, of the same batches. No other thread holds the
        segment."""
        close = self._closing
        self.held = None
        self._hold(self.fs.open(self.path, write=True))
        close()

    def cut(self, size: int) -> None:
        """Shortens the file, durably. For recovery and for taking back an append: these bytes were never visible, so no
        mapping that was handed out reaches them.
        """
        self._mapping = None
        self.held = None
        self.checked = (0, self.base_offset)
        self.fs.truncate(self.handle, size)
        self.fs.fsync(self.handle)
        self._size = size

    def write_indexes(self, *, whole: bool = False, sync: bool = False, keeps_rest: bool = False) -> None:
        """Brings the indexes to their files. whole: also removes other entries from them. sync: on disk, for a Kafka
        that will not check the segment again. keeps_rest: keeps other entries, such as a closing entry, which are true
        of this segment.
        """
        self._indexes.write(whole=whole, sync=sync, keeps_rest=keeps_rest)

    def seal(self) -> Segment:
        """Ends the writing: all data on disk, indexes whole, with the closing time entry that retention reads.

        Returns the segment to read from. Raises StorageWriteError when the sync failed.
        """
        # In the order of docs/crashes.md, section 3: the data, its indexes, and only then the next segment.
        self.fs.fsync(self.handle)
        self._indexes.times.add(self.max_timestamp(), self.largest_timestamp_offset - self.base_offset)
        self.write_indexes(whole=True, sync=True)
        if self._indexes.has_aborted:
            # Its name before that of the next segment: the index of a sealed segment is not rebuilt, and Kafka takes
            # aborted records for committed without it.
            self.fs.sync_dir(self.directory)
        return Segment(self.fs, self.directory, self.base_offset, self.state)

    def is_too_old(self, now_ms: int) -> bool:
        """Whether a segment whose first batch has no timestamp is to be rolled for its age."""
        return now_ms - self.created_ms > self.config.max_segment_ms
