"""One segment: a .log file and its indexes.

Rules:
- Bytes are only appended, by the single writer of the partition.
- An index may lack batches of its .log file and can always be rebuilt from it, but not vice
  versa.
- A sealed segment does not change again: it is mapped, and readers share the mapping.
  The active segment is read with pread, because a mapping of a file that recovery
  truncates causes a SIGBUS, which kills the process. If another program truncates a
  sealed file, pages of the mapping become zeros (fs.is_readable()). This is reported as
  StorageReadError and not as damage.

This module does not decide when to roll (log.py), when to truncate
(partition/recovery.py) or when to delete.
"""

from __future__ import annotations

import contextlib
import os
import struct
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
from logcore.index import (
    AbortedTransaction,
    IndexWriter,
    OffsetIndex,
    TimeIndex,
    load,
    read_front,
    rises,
)
from logcore.kernels import Record, SegmentFields, kernel, layout
from logcore.kernels.layout import EncodedBatch
from logcore.metadata.filenames import DELETED, INDEX, INDEXES, LOG, TIME_INDEX
from logcore.recordbatch import RecordBatch, are_markers

#: Bytes read from an active segment at once. The walk for one offset covers at most an
#: index interval and a batch.
_SEEK_BYTES: Final = 32 << 10
_HEAD: Final = struct.Struct(layout.HEADER_FORMAT)
_WALK_BATCHES: Final = 4096
_WALK_BYTES: Final = 4 << 20
#: From this size on, mapping the growing segment is cheaper than a copy: 0.02 ms a MB
#: instead of 0.25.
_MAPPED_BYTES: Final = 128 << 10
#: Bytes of the active segment that single reads access with system calls before it is
#: mapped again.
_UNMAPPED_BYTES: Final = 64 << 10
#: Growth of a segment after which its index is read again.
_REREAD_BYTES: Final = 1 << 20
#: Bytes of a mapping that are touched at once before they are first sent.
_TOUCHED_BYTES: Final = 256 << 10
_UNREADABLE: Final = (
    "a part of the file cannot be read: another program shortened it, or the disk fails"
)
#: Later than every other timestamp.
_NEVER: Final = INT64_MAX


class SegmentBytes(NamedTuple):
    """Borrowed bytes of a segment: data[i] is byte origin + i of the file, for i below
    limit.
    """

    data: memoryview
    at: int
    limit: int
    origin: int
    path: str


class Segment(SegmentFields):
    """A segment for reading. Callers pass its end, because the file may still grow.

    `state` is a suffix of its file names: ".cleaned" or ".swap" if it will replace
    others.
    """

    def __init__(
        self, fs: FS, directory: str, base_offset: int, state: str = ""
    ) -> None:
        self.fs = fs
        self.directory = directory
        self.base_offset = base_offset
        # Set by read_one(), for kernel.get_fast().
        self.held = None
        # Descriptor of a file that is kept open.
        self.handle = -1
        self.state = state
        # os.path.join() would be slower, and an opening creates thousands of segments.
        self._plain = f"{directory}{os.sep}{base_offset:020d}"
        self.path = self.file(LOG)
        # The fields below are computed on first use, by any thread and without a lock.
        # Two threads compute the same value, and the later one replaces the other.
        self._view: memoryview | None = None
        # Of the opened file, whatever its present name is.
        self._identity: tuple[int, int] | None = None
        self._max_timestamp: int | None = None
        self._next_offset: int | None = None
        #: Whether max_timestamp() is exact: the time index agreed, or partition/gaps.py
        #: walked all batches.
        self.is_max_timestamp_exact = False
        # Parts of the mapping that were read once. Two threads may read the same part.
        self._touched: set[int] = set()
        #: The content of the checksum file, read by partition/gaps.py. Written once, by
        #: the first thread.
        self.checksum_file: Any = None
        self.is_checksum_file_read = False
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
        """Return the whole sealed file, mapped at first use; valid while it is
        referenced.
        """
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
        """Open the file, which its writer may have renamed: to its final name, or for
        deletion.
        """
        plain = self._plain + LOG
        for path in (self.path, plain, plain + DELETED):
            with contextlib.suppress(FileNotFoundError):
                return self.fs.open(path)
        raise OffsetOutOfRangeError(
            "the segment was removed by its writer",
            path=self.path,
            offset=self.base_offset,
        )

    def bytes_at(self, position: int, size: int) -> SegmentBytes:
        """Return bytes from `position` on, at least `size` unless the segment ends
        before.

        A mapping returns all bytes.
        """
        view = self.view()
        return SegmentBytes(view, position, len(view), 0, self.path)

    def retained_bytes_at(self, position: int, size: int) -> SegmentBytes:
        """Return bytes like bytes_at(), below the visible end, that will be referenced for
        long.

        An example are bytes that wait until a client reads them.
        """
        return self.bytes_at(position, size)

    def start_position(self, offset: int) -> int:
        """Return a position at or before the first batch that ends at or after an
        offset.

        The position is from the index. It is used only if there is a batch head at that
        position, with a last offset that matches the entry.
        """
        view = self.view()
        index = self.offset_index
        return kernel.start_position(
            index.data, len(index), view, len(view), self.base_offset, offset
        )

    def find(self, offset: int) -> int:
        """Return the position of the first batch that ends at or after an offset.

        The result can be the position of damage before that batch, or size_bytes.
        """
        view = self.view()
        return kernel.find_batch(view, self.start_position(offset), len(view), offset)

    def read_one(self, offset: int, end_offset: int, dense: bool) -> Record | int:
        """Return the first record at or after an offset.

        An int is returned if a plain batch and the next head do not suffice.
        `end_offset` is the end of the segment. `dense` means that there are no gaps in
        the offsets.
        """
        view = self.view()
        index = self.offset_index
        size = len(view)
        base_offset = self.base_offset
        if self.held is None and size:
            self.held = kernel.hold(view, index, INT64_MAX)
        return kernel.get_one(
            index.data,
            len(index),
            view,
            size,
            base_offset,
            offset,
            self.path,
            end_offset,
            dense,
        )

    def head(self, position: int) -> tuple[memoryview, int, int]:
        """Return (data, at, limit) with enough bytes for the apparent batch at a
        position.
        """
        piece = self.bytes_at(position, layout.HEADER_SIZE)
        if piece.limit - piece.at >= layout.PREFIX_SIZE:
            size = (
                int.from_bytes(piece.data[piece.at + 8 : piece.at + 12], "big")
                + layout.LOG_OVERHEAD
            )
            # A length beyond the segment is damage or a torn batch; the head alone
            # shows which.
            if layout.HEADER_SIZE < size <= self.size_bytes - position:
                piece = self.bytes_at(position, size)
        return piece.data, piece.at, piece.limit

    def batch(self, position: int) -> RecordBatch | None:
        """Return the batch at a position, or None if it is incomplete.

        Raises CorruptBatchError for an invalid head.
        """
        data, at, limit = self.head(position)
        return RecordBatch.parse(data, at, limit, path=self.path, origin=position - at)

    def walk(
        self,
        position: int,
        *,
        crc: bool,
        stop: int | None = None,
        step_bytes: int = _WALK_BYTES,
    ) -> Iterator[tuple[layout.Facts, int, int]]:
        """Yield batch heads from `position` to `stop` or the end: (facts, next
        position, why).

        `facts` is an array of layout.BATCH_FACTS with positions in the file, for some
        thousand heads. The last item has why != WALK_LIMIT. `step_bytes` are read at
        once if the file is not mapped.
        """
        if stop is None:
            size = self.size_bytes
        else:
            size = stop
        while True:
            piece = self.bytes_at(position, min(step_bytes, size - position))
            data = piece.data
            start = piece.at
            limit = min(piece.limit, size - piece.origin)
            origin = piece.origin
            facts, at, why = kernel.walk(data, start, limit, _WALK_BATCHES, crc)
            if why == layout.WALK_SHORT and at == start and origin + limit < size:
                # The batch is larger than the piece.
                data, start, limit = self.head(position)
                origin = position - start
                facts, at, why = kernel.walk(data, start, limit, 1, crc)
            facts["position"] += origin
            position = origin + at
            # The end of a piece is not the end of the segment, unless nothing was read
            # because the file was truncated concurrently.
            if at > start and (
                (why == layout.WALK_SHORT and origin + limit < size)
                or (why == layout.WALK_END and position < size)
            ):
                why = layout.WALK_LIMIT
            yield facts, position, why
            if why != layout.WALK_LIMIT:
                return

    def stored(
        self,
        position: int,
        max_bytes: int,
        end: int,
        at_least_one: bool,
        check: Callable[[layout.Facts], None],
    ) -> tuple[memoryview, bool]:
        """Return whole batches from `position` on below offset `end`, and whether they
        reach the segment's end.

        At most `max_bytes` are returned. With `at_least_one`, the first batch may be
        larger. `check` is called with the heads of all batches, in order. Raises
        CorruptBatchError and the errors of `check`.
        """
        size = self.size_bytes
        piece = self.retained_bytes_at(
            position, max(0, min(max_bytes, size - position))
        )
        data = piece.data
        start = piece.at
        origin = piece.origin
        self._check_sendable(data[start : start + max_bytes], position)
        # The position after the batches walked so far.
        at = start
        stop = min(piece.limit, start + max(0, max_bytes))
        while True:
            facts, next_at, why = kernel.walk(data, at, stop, _WALK_BATCHES, False)
            # Offsets increase, or check() raises. So the first batch that reaches
            # `end`, and all later ones, are excluded.
            if len(facts) and int(facts["last_offset"][-1]) >= end:
                above = int((facts["last_offset"] >= end).argmax())
                check(facts[:above])
                return data[start : int(facts["position"][above])], False
            check(facts)
            # Not even the first batch fits: read again, with the size in its head.
            if (
                why == layout.WALK_SHORT
                and next_at == start
                and at_least_one
                and origin + stop < size
            ):
                data, start, limit = self.head(position)
                at = start
                origin = position - start
                at_least_one = False
                length = 0
                if limit - at >= 12:
                    length = int.from_bytes(data[at + 8 : at + 12], "big", signed=True)
                stop = min(
                    limit, at + max(layout.HEADER_SIZE, length + layout.LOG_OVERHEAD)
                )
                continue
            if (
                why not in (layout.WALK_LIMIT, layout.WALK_END, layout.WALK_SHORT)
                and next_at == start
            ):
                raise CorruptBatchError(
                    layout.WALK_REASONS[why], path=self.path, position=origin + next_at
                )
            if why != layout.WALK_LIMIT:
                return data[start:next_at], origin + next_at >= size
            at = next_at

    def _check_sendable(self, data: memoryview, position: int) -> None:
        """Raise StorageReadError if bytes of a mapping cannot be read.

        If a socket read them first, it could only close the connection. Pages are
        touched before they are first sent. The file size shows whether any were removed
        since.
        """
        if self._view is None:
            # The segment is not mapped.
            return
        try:
            size = self.fs.file_size(self.path)
        except FileNotFoundError:
            # A process can still read a mapped file that was deleted.
            size = len(self._view)
        if size < len(self._view) and self.is_current():
            raise StorageReadError(_UNREADABLE, path=self.path, position=position)
        if not len(data):
            return
        for part in range(
            position // _TOUCHED_BYTES, (position + len(data) - 1) // _TOUCHED_BYTES + 1
        ):
            if part in self._touched:
                continue
            start = part * _TOUCHED_BYTES
            if self.fs.is_readable(
                self._view[start : start + _TOUCHED_BYTES], touch=True
            ):
                self._touched.add(part)
            # Otherwise the unreadable page is outside the bytes to send.
            elif not self.fs.is_readable(data, touch=True):
                raise StorageReadError(_UNREADABLE, path=self.path, position=position)

    def max_timestamp(self) -> int:
        """Return the largest timestamp of a sealed segment, -1 for none.

        It is the closing entry of the time index if the later batches confirm it.
        Otherwise the whole segment is read, which raises CorruptBatchError for damage.
        """
        if self._max_timestamp is None:
            self._max_timestamp = self._find_max_timestamp()
        return self._max_timestamp

    def _find_max_timestamp(self) -> int:
        index = self.time_index
        if len(index):
            timestamp, relative_offset = index.entry(len(index) - 1)
            position = self.find(self.base_offset + relative_offset)
            newest = [
                int(facts["max_timestamp"].max(initial=-1))
                for facts, _, _ in self.walk(position, crc=False)
            ]
            if position < self.size_bytes and newest and max(newest) == timestamp:
                self.is_max_timestamp_exact = True
                return timestamp
        largest = -1
        for facts, at, why in self.walk(0, crc=True):
            if why not in (layout.WALK_END, layout.WALK_LIMIT):
                raise CorruptBatchError(
                    layout.WALK_REASONS[why], path=self.path, position=at
                )
            largest = max(largest, int(facts["max_timestamp"].max(initial=-1)))
        return largest

    def next_offset(self) -> int:
        """Return the offset after the last whole batch; base_offset if the segment is
        empty.

        The search starts at the last index entry.
        """
        if self._next_offset is None:
            position = self.start_position(self.base_offset + 2**31 - 1)
            end = self.base_offset
            for facts, _, _ in self.walk(position, crc=False):
                if len(facts):
                    end = int(facts["last_offset"][-1]) + 1
            self._next_offset = end
        return self._next_offset

    def check_readable(self, error: BaseException | None = None) -> None:
        """Raise StorageReadError, caused by `error`, if a mapped page could not be
        read.

        Such a page contains zeros.
        """
        views = [
            self._view,
            *(
                index.data
                for index in (self._offset_index, self._time_index)
                if index is not None
            ),
        ]
        for view in views:
            if (
                isinstance(view, memoryview)
                and len(view)
                and not self.fs.is_readable(view)
            ):
                raise StorageReadError(_UNREADABLE, path=self.path) from error

    def exists(self) -> bool:
        """Return whether the .log file exists under its name."""
        return self.fs.exists(self.path)

    def is_current(self) -> bool:
        """Return whether the name still refers to the file that was opened, if any."""
        try:
            return self._identity is None or self._identity == self.fs.identity(
                self.path
            )
        except FileNotFoundError:
            return False

    def keep(self) -> None:
        """Keep the segment readable for its holders after its files are removed."""
        self.view()
        _ = self.offset_index, self.time_index


class GrowingSegment(Segment):
    """The last segment of a log that another process may be writing, read with pread.

    The file remains open while the segment is referenced. If a handle were closed
    during a read, the system could assign it to another file, and the reader would
    return that file's bytes.
    """

    def __init__(self, fs: FS, directory: str, base_offset: int) -> None:
        super().__init__(fs, directory, base_offset)
        self._keep_open(fs.open(self.path))

    def _keep_open(self, handle: int) -> None:
        self.handle = handle
        self._closing = weakref.finalize(self, self.fs.close, handle)
        self._identity = self.fs.identity(handle)
        self._size = self.fs.size(handle)
        # (position, expected offset) where gaps.check_growing() continues. Replaced as
        # a whole, because several threads may check.
        self.checked: tuple[int, int] = (0, self.base_offset)
        # End of the whole batches that next_offset has read.
        self._whole_position = 0
        self._whole_end = self.base_offset

    @property
    def size_bytes(self) -> int:
        return self._size

    def keep(self) -> None:
        """Do nothing: the open file keeps the segment readable."""

    def refresh(self) -> int:
        """Read the present file size, and drop an index that lacks many entries."""
        size = self.fs.size(self.handle)
        if not self._size <= size < self._size + _REREAD_BYTES:
            self._offset_index = self._time_index = None
        # Its writer undid an append or ran recovery, so all cached facts are invalid.
        if size < self._size:
            self._whole_position = 0
            self.checked = (0, self.base_offset)
        self._size = size
        return size

    def next_offset(self) -> int:
        """Return Segment.next_offset(), continuing at the end of the last call."""
        if self._whole_position and self._walk_on():
            return self._whole_end
        # This is the first call, or the file was truncated and now contains other
        # batches there.
        self._whole_position = self.start_position(self.base_offset + layout.INT32_MAX)
        if not self._whole_position:
            self._whole_end = self.base_offset
        else:
            self._whole_end = -1
        self._walk_on()
        return max(self._whole_end, self.base_offset)

    def _walk_on(self) -> bool:
        """Walk whole batches from the end of the last walk; False if no batch continues
        there.
        """
        for facts, position, _ in self.walk(self._whole_position, crc=False):
            if not len(facts):
                return position >= self._size
            # A file that was truncated and has grown again may contain a batch with
            # lower offsets there.
            if (
                self._whole_end >= 0
                and facts["magic"][0] == 2
                and int(facts["base_offset"][0]) < self._whole_end
            ):
                return False
            self._whole_end = int(facts["last_offset"][-1]) + 1
            self._whole_position = position
        return True

    def bytes_at(self, position: int, size: int) -> SegmentBytes:
        data = memoryview(
            self.fs.pread(
                self.handle, max(0, min(size, self._size - position)), position
            )
        )
        return SegmentBytes(data, 0, len(data), position, self.path)

    def view(self) -> memoryview:
        return memoryview(self.fs.pread(self.handle, self._size, 0))

    @property
    def offset_index(self) -> OffsetIndex:
        if self._offset_index is None:
            # Copied, because its writer may truncate the file at any time.
            path = self.file(INDEX)
            self._offset_index = OffsetIndex(
                path, memoryview(bytes(_read(self.fs, path, OffsetIndex)))
            )
        return self._offset_index

    @property
    def time_index(self) -> TimeIndex:
        if self._time_index is None:
            path = self.file(TIME_INDEX)
            self._time_index = TimeIndex(
                path, memoryview(bytes(_read(self.fs, path, TimeIndex)))
            )
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
        # Kafka's entries contain the last offset of an append of several batches. The
        # batch may therefore end before the entry, but not before the preceding entry.
        if 0 < position < self._size:
            data = self.fs.pread(self.handle, layout.HEADER_SIZE, position)
            batch = self._whole_batch(data, position)
            if batch and before < batch[1] - self.base_offset <= relative:
                return position
        return 0

    def read_one(self, offset: int, end_offset: int, dense: bool) -> Record | int:
        """Return a record like Segment.read_one(), usually with one read of the file.

        The result is 0 if that read does not find it.
        """
        position = self.start_position(offset)
        data = self.fs.pread(
            self.handle, min(_SEEK_BYTES, self._size - position), position
        )
        if position + len(data) < self._size:
            # The batch may be after the bytes that were read.
            end_offset = -1
        found = kernel.read_one(
            data, 0, len(data), offset, self.path, end_offset, dense
        )
        if not isinstance(found, int):
            return found
        return 0

    def find(self, offset: int) -> int:
        position = self.start_position(offset)
        while position < self._size:
            data = self.fs.pread(
                self.handle, min(_SEEK_BYTES, self._size - position), position
            )
            # The file was truncated concurrently.
            if not data:
                break
            at = kernel.find_batch(data, 0, len(data), offset)
            if at == 0 and position + len(data) < self._size:
                # The batch is larger than the bytes that were read: its head suffices.
                batch = self._whole_batch(data, position)
                if batch is None or batch[1] >= offset:
                    return position
                position += batch[0]
                continue
            is_found = at < len(data)
            is_last_piece = position + len(data) >= self._size
            if is_found and at and not is_last_piece:
                # The batch may continue after the bytes that were read. If so, it is
                # read again from its start.
                is_found = (
                    RecordBatch.parse(data, at, path=self.path, origin=position)
                    is not None
                )
            if is_found:
                return position + at
            position += at
        return position

    def _whole_batch(self, data: bytes, position: int) -> tuple[int, int] | None:
        """Return size and last offset of the whole batch at a position of the file.

        `data` begins with its head. The result is None for damage and for a torn batch.
        """
        if len(data) < layout.HEADER_SIZE:
            return None
        last_offset, length, _, magic, _, _, delta, *_ = _HEAD.unpack_from(data)
        if magic == 2:
            last_offset += (
                delta  # in older formats, the field itself contains the last offset
            )
        size = length + layout.LOG_OVERHEAD
        least = layout.HEADER_SIZE
        if magic < 2:
            least = layout.MIN_LENGTH + layout.LOG_OVERHEAD
        if 0 <= magic <= 2 and least <= size <= self._size - position:
            return size, last_offset
        return None

    def max_timestamp(self) -> int:
        """Return the largest timestamp by walking the heads.

        A growing time index does not cover batches after its last entry.
        """
        return max(
            (
                int(facts["max_timestamp"].max(initial=-1))
                for facts, _, _ in self.walk(0, crc=False)
            ),
            default=-1,
        )


class PreadSegment(GrowingSegment):
    """A sealed segment read with pread, for a process that may not or cannot map it."""

    def max_timestamp(self) -> int:
        return Segment.max_timestamp(self)


def _read(fs: FS, path: str, kind: type[OffsetIndex] | type[TimeIndex]) -> bytes:
    try:
        with opened(fs, path) as handle:
            return read_front(fs, handle, kind.entry_size)
    except FileNotFoundError:
        return b""


class ActiveSegment(GrowingSegment):
    """The segment that is written, with the facts for appends in plain attributes.

    The attributes that each append uses are SegmentFields, which the compiled kernels
    access without Python.
    """

    _indexes: IndexWriter

    def __init__(
        self,
        fs: FS,
        directory: str,
        base_offset: int,
        config: LogConfig,
        *,
        create: bool,
        state: str = "",
    ) -> None:
        Segment.__init__(self, fs, directory, base_offset, state)
        self._keep_open(fs.open(self.path, write=True, create=create, exclusive=create))
        self.config = config
        self.index_interval_bytes = config.index_interval_bytes
        self._mapping: memoryview | None = None
        self.created_ms = fs.now_ms()
        # Whether all of its bytes were written through this object.
        self.is_own = create
        # The first byte that was.
        self._own_from = self._size
        self.limit_offset = base_offset + layout.INT32_MAX
        self.reset()
        self._indexes.extends_files = create

    def reset(self, *, is_synced: bool = False) -> None:
        """Drop the indexes and all facts from batches.

        `is_synced` means that the index files are durable.
        """
        self.held = None
        self._indexes = IndexWriter(
            self.fs, [self.file(suffix) for suffix in INDEXES], is_synced=is_synced
        )
        self._offset_index = self._indexes.offsets
        self._time_index = self._indexes.times
        self.since_entry_bytes = 0
        # Whether a walk found batches of idempotent producers.
        self.has_producers = False
        # Whether a walk found control batches of transactions.
        self.has_markers = False
        self.first_timestamp = -1
        self.largest_timestamp = -1
        self.largest_timestamp_offset = self.base_offset
        # Range of batches whose times are unknown.
        self._unwalked_range = 0, 0
        self.last_offset = self.base_offset - 1
        # A write failed, and a power failure may restore its remains.
        self.had_failed_write = False
        # An append within these limits needs no check whether to roll; is_full() has
        # the rules.
        self.limit_bytes = self.config.segment_bytes
        self.limit_timestamp = _NEVER

    def resume(self, below: int, *, is_whole: bool) -> int:
        """Restore the facts of batches below an offset from the index files.

        Returns the position from which batches must still be walked, 0 if the files are
        useless. The last offset entry must point at its batch, and the last time entry
        at a batch with that time. Other entries are checked on use (start_position).
        `is_whole` means that the files are complete. After a crash they may not be, so
        the heads from the last time entry on are searched for a later time.
        """
        # 1. Find the last usable offset entry: below the offset, and within the file.
        index_path = self.file(INDEX)
        time_path = self.file(TIME_INDEX)
        offsets = OffsetIndex(
            index_path,
            bytearray(_read(self.fs, index_path, OffsetIndex)),
            is_synced=is_whole,
        )
        times = TimeIndex(
            time_path,
            bytearray(_read(self.fs, time_path, TimeIndex)),
            is_synced=is_whole,
        )
        relative, position = (
            offsets.array()[name].astype(np.int64)
            for name in ("relative_offset", "position")
        )
        slot = (
            int(
                min(
                    relative.searchsorted(below - self.base_offset),
                    position.searchsorted(self._size),
                )
            )
            - 1
        )
        # A hole before the first entries reads as an entry of zeros. No batch at 0 has
        # an entry.
        if slot < 0 or not rises(relative) or not rises(position) or not position[0]:
            return 0
        # 2. Take the time entries up to there. The last one has the newest record up to
        #    the batch at that entry.
        kept = times.array()
        if np.any(np.diff(kept["relative_offset"].astype(np.int64)) < 0):
            return 0
        kept = kept[
            : kept["relative_offset"].searchsorted(relative[slot], side="right")
        ]
        # Without a time entry no batch up to there may have a time, so all of them are
        # read.
        newest = -1
        newest_offset = -1
        if len(kept):
            newest, newest_offset = kept[-1].tolist()
        # 3. Walk the heads that must confirm it: from the offset entry before the
        #    newest record to the next entry. If a crash may have truncated the time
        #    index, walk to the last entry.
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
            and (
                not len(kept)
                or int(first["max_timestamp"][0]) <= int(kept["timestamp"][0])
            )
            and int(last["last_offset"][0]) == self.base_offset + int(relative[slot])
            and (
                not len(kept)
                or int(rows["last_offset"][0]) == self.base_offset + newest_offset
            )
            and int(rows["max_timestamp"].max())
            == newest
            == int(rows["max_timestamp"][0])
        )
        if not is_confirmed:
            return 0
        # 4. Use them as if the batches had been walked.
        self._indexes.resume(offsets, slot + 1, times, len(kept))
        self._offset_index = offsets
        self._time_index = times
        self._begin_at(int(first["max_timestamp"][0]))
        if len(kept):
            self.largest_timestamp = newest
            self.largest_timestamp_offset = self.base_offset + newest_offset
        self._unwalked_range = until, stop
        if self._indexes.room(self.config.segment_index_bytes) <= 0:
            # The index is full: the next append rolls.
            self.limit_bytes = -1
        self.last_offset = int(last["last_offset"][0])
        self.since_entry_bytes = int(last["size_bytes"][0])
        return stop + self.since_entry_bytes

    def max_timestamp(self) -> int:
        """Return the largest timestamp of all batches, including those that opening
        skipped.

        A time index that lost its last entries has too small a time, and retention
        would use it.
        """
        position, stop = self._unwalked_range
        if position < stop:
            for facts, _, _ in self.walk(position, stop=stop, crc=False):
                newest = int(facts["max_timestamp"].max(initial=-1))
                if newest > self.largest_timestamp:
                    row = int(facts["max_timestamp"].argmax())
                    self.largest_timestamp = newest
                    self.largest_timestamp_offset = int(facts["last_offset"][row])
            self._unwalked_range = 0, 0
        return self.largest_timestamp

    @property
    def begun_ms(self) -> int:
        """The wall-clock time from which the age of the segment counts.

        For an existing file it is the time of its first record. For a file created here
        that is not enough: if old records are appended, each new segment would be
        rolled at once.
        """
        if not self.is_own and self.first_timestamp >= 0:
            return self.first_timestamp
        return max(self.first_timestamp, self.created_ms)

    @property
    def is_resumed(self) -> bool:
        """Whether facts come from index files, and only the rest from batches."""
        return self._indexes.entries_from_file > 0

    def resume_aborted(self, end: int, *, is_whole: bool) -> bool:
        """Read the aborted transactions of a log that ends at `end`; return whether
        they are valid.

        They may be incomplete after a crash, if walked batches include markers. The
        result is then False.
        """
        if self.has_markers and not is_whole:
            return False
        return self._indexes.resume_aborted(self.base_offset, end, is_whole=is_whole)

    def _begin_at(self, timestamp: int) -> None:
        """Store the largest timestamp of the first batch, whose age decides when to
        roll.
        """
        self.first_timestamp = timestamp
        self.limit_timestamp = _NEVER
        if timestamp >= 0:
            self.limit_timestamp = min(timestamp + self.config.max_segment_ms, _NEVER)

    def reconfigure(self, config: LogConfig) -> None:
        """Use other limits from now on. A segment with a full index remains full."""
        self.config = config
        self.index_interval_bytes = config.index_interval_bytes
        if self.limit_bytes >= 0:
            self.limit_bytes = config.segment_bytes
        if self.first_timestamp >= 0:
            self.limit_timestamp = min(
                self.first_timestamp + config.max_segment_ms, _NEVER
            )

    def _check_indexes(self) -> None:
        indexes = self._indexes
        if indexes.check_room(self.config.segment_index_bytes) <= 0:
            self.limit_bytes = -1
        indexes.try_write()

    def try_write_indexes(self) -> None:
        """Write new index entries, for readers in other processes and an opening after
        a crash.
        """
        self._indexes.try_write()

    def retained_bytes_at(self, position: int, size: int) -> SegmentBytes:
        """Return a mapping for a large piece, or if single reads have mapped the file
        already.

        A mapping costs a fraction of a copy. Only the writer may use one: visible bytes
        are never truncated from this file, and no other process writes it, so no page
        in use can disappear.
        """
        if size < _MAPPED_BYTES and (
            self._mapping is None or len(self._mapping) < position + size
        ):
            return self.bytes_at(position, size)
        return SegmentBytes(
            self._mapped(position + size), position, position + size, 0, self.path
        )

    def _mapped(self, size: int) -> memoryview:
        """Return a mapping of at least the first `size` bytes."""
        if self._mapping is None or len(self._mapping) < size:
            self._mapping = self.fs.map(self.handle, self._size)
        return self._mapping

    def read_one(self, offset: int, end_offset: int, dense: bool) -> Record | int:
        """Return a record like GrowingSegment.read_one(), and map the file.

        With the mapping, kernel.get_fast() can answer later calls for the present
        content.
        """
        # Mapped again after it has grown by an eighth, and by at least 64 KiB.
        held = self.held
        if held is None or self._size - held.size_bytes > max(
            _UNMAPPED_BYTES, held.size_bytes // 8
        ):
            # There are too many mappings, but the file can still be read.
            with contextlib.suppress(StorageReadError, ResourceError):
                self.held = kernel.hold(
                    self._mapped(self._size), self._indexes.offsets, self._own_from
                )
        return super().read_one(offset, end_offset, dense)

    def find(self, offset: int) -> int:
        position = self.find_recent(offset)
        if position < 0:
            position = super().find(offset)
        return position

    def begins_recent_batch(self, offset: int) -> bool:
        """Return whether a batch that was appended recently begins at an offset.

        No file is read: a follower calls this after each append, and a read takes 30 us.
        """
        return self.find_recent(offset) > self.find_recent(offset - 1) >= 0

    def start_position(self, offset: int) -> int:
        index = self.offset_index
        slot = index.find(offset - self.base_offset)
        # The entry is from the file, so its batch is checked. Later entries belong to
        # batches read here.
        if slot < self._indexes.entries_from_file:
            return super().start_position(offset)
        return index.entry(slot)[1]

    def reload(self) -> None:
        """Read the size again after another writer added bytes.

        They are unchecked, so a roll must not write a checksum file for them.
        """
        self.refresh()
        self.is_own = False

    def record_markers(self, are_present: bool) -> None:
        """Record that the segment has transaction markers, if they are present."""
        self.has_markers |= are_present

    def adopt(self, size: int) -> Iterator[layout.Facts]:
        """Add whole batches that another process appended up to a size; yield their
        heads.
        """
        start = self._size
        self._size = size
        self._own_from = size
        self.held = None
        parts: Iterable[layout.Facts]
        # One read, and no search for its end.
        if size - start < _WALK_BYTES:
            data = self.fs.pread(self.handle, size - start, start)
            facts, _, _ = kernel.walk(
                data, 0, len(data), len(data) // layout.HEADER_SIZE + 1, False
            )
            facts["position"] += start
            parts = [facts]
        else:
            parts = (facts for facts, _, _ in self.walk(start, crc=False))
        for facts in parts:
            self.record_all_batches(facts)
            yield facts

    def record_all_batches(self, facts: layout.Facts) -> None:
        """Record batches like record_batches(), after walking the file."""
        for batch in layout.encoded_batches(facts, 0):
            self.record_batch(*batch)
        # Markers have a producer too.
        if facts["producer_id"].max(initial=-1) >= 0:
            self.has_producers = True
            self.has_markers |= bool(np.any(are_markers(facts)))

    def append(
        self,
        data: bytes | memoryview,
        last_offset: int,
        max_timestamp: int,
        batches: Iterable[EncodedBatch] | None = None,
    ) -> None:
        """Write whole batches at the end. After an error the file has its old size, or
        the error reports otherwise.

        `last_offset` and `max_timestamp` apply to all of `data`. `batches` has the
        position of each batch in it, None for a single batch.

        Raises:
            DiskFullError: the disk is full; the write was undone.
            StorageWriteError: the state of the file is unknown.
        """
        start = self._size
        size = len(data)
        try:
            self.fs.pwrite(self.handle, data, start)
            self._size = start + size
        except BaseException:
            # After a KeyboardInterrupt too, a batch without a receipt must not remain.
            self._size = start
            self.undo_write()
            raise
        if batches is None:
            self.record_batch(start, size, last_offset, max_timestamp)
        else:
            self.record_batches(start, batches)

    def undo_write(self) -> None:
        """Remove the remains of a failed write after the end.

        Raises:
            StorageWriteError: this failed too.
        """
        self.had_failed_write = True
        try:
            self.fs.truncate(self.handle, self._size)
        except LogcoreError as error:
            raise StorageWriteError(
                "a failed write could not be cut back", path=self.path
            ) from error

    def set_aborted(
        self, entries: Iterable[AbortedTransaction], *, writes: bool = False
    ) -> None:
        """Replace all aborted transactions with markers in this segment.

        If there are none, their file is deleted. With `writes`, the file is written at
        once.
        """
        self._indexes.set_aborted(entries)
        if writes:
            self._indexes.write_aborted()

    def add_aborted(self, entry: AbortedTransaction) -> None:
        """Add an aborted transaction whose marker is in this segment, and write it.

        Raises:
            StorageWriteError, DiskFullError: writing failed.
        """
        self._indexes.add_aborted(entry)

    def reopen(self) -> None:
        """Continue with the file that has the name now and contains the same batches.

        No other thread holds the segment.
        """
        close = self._closing
        self.held = None
        self._keep_open(self.fs.open(self.path, write=True))
        close()

    def cut(self, size: int) -> None:
        """Truncate the file durably, for recovery and for undoing an append.

        These bytes were never visible, so no returned mapping contains them.
        """
        self._mapping = None
        self.held = None
        self.checked = (0, self.base_offset)
        self.fs.truncate(self.handle, size)
        self.fs.fsync(self.handle)
        self._size = size

    def write_indexes(
        self,
        *,
        whole: bool = False,
        sync: bool = False,
        keeps_other_entries: bool = False,
    ) -> None:
        """Write the indexes to their files.

        With `whole`, other entries are removed from them. With `sync`, they become
        durable, for a Kafka that will not check the segment again. With `keeps_other_entries`,
        other valid entries are kept, such as a closing entry.
        """
        self._indexes.write(
            whole=whole, sync=sync, keeps_other_entries=keeps_other_entries
        )

    def seal(self) -> Segment:
        """Sync the data and complete the indexes, with the closing time entry for
        retention.

        Returns the segment to read from.

        Raises:
            StorageWriteError: the sync failed.
        """
        # The order of docs/crashes.md, section 3: the data, its indexes, and only then
        # the next segment.
        self.fs.fsync(self.handle)
        self._indexes.times.add(
            self.max_timestamp(), self.largest_timestamp_offset - self.base_offset
        )
        self.write_indexes(whole=True, sync=True)
        if self._indexes.has_aborted:
            # The name becomes durable before the next segment's name. The index of a
            # sealed segment below the recovery point is not rebuilt. Without the index,
            # Kafka treats aborted records as committed.
            self.fs.sync_dir(self.directory)
        return Segment(self.fs, self.directory, self.base_offset, self.state)

    def is_too_old(self, now_ms: int) -> bool:
        """Return whether to roll a segment by age if its first batch has no timestamp."""
        return now_ms - self.created_ms > self.config.max_segment_ms
