"""The indexes of a segment: sorted entries that say where to start looking in the .log file.

Layout (storage format section 4), big-endian, no head and no checksum:
    .index      relative_offset:i32 position:i32    last offset of a batch, and the position where that batch starts
    .timeindex  timestamp:i64 relative_offset:i32   no record before that offset has a larger timestamp
    .txnindex   version:i16 producer_id:i64 first_offset:i64 last_offset:i64 last_stable_offset:i64

Rules:
- An index is never evidence about the log. Callers check what they find at the position, and start at 0 when it does
  not fit; an index that is missing, short, zero-padded or garbage costs time only. (One forged to point at a batch
  inside a value is believed: the files of a log are trusted as a whole, SECURITY.md.)
- While its segment is active an index lives in memory and reaches the file in pieces; sealed ones are mapped.
- Offsets in an offset index rise strictly; timestamps in a time index rise strictly and its offsets never fall.

This module does not read the .log file: segment.py does, and rebuilds an index from it when needed.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from logcore.errors import DiskFullError, ResourceError, StorageWriteError
from logcore.fs import FS, opened
from logcore.kernels import kernel

OFFSET_ENTRY: Final = np.dtype([("relative_offset", ">i4"), ("position", ">i4")])
TIME_ENTRY: Final = np.dtype([("timestamp", ">i8"), ("relative_offset", ">i4")])
#: One for each aborted transaction, by the offset of its marker (storage format section 4.3).
TXN_ENTRY: Final = np.dtype(
    [
        ("version", ">i2"),
        ("producer_id", ">i8"),
        ("first_offset", ">i8"),
        ("last_offset", ">i8"),
        ("last_stable_offset", ">i8"),
    ]
)
#: Index entries are written, and counted against the room for them, when this many have come.
_LOOK_ENTRIES: Final = 512
_ZEROS_AT_ONCE: Final = 64 << 10
_ZEROS: Final = bytes(_ZEROS_AT_ONCE)
_OFFSET: Final = struct.Struct(">ii")
_TXN: Final = struct.Struct(">hqqqq")
_TIME: Final = struct.Struct(">qi")


class AbortedTransaction(NamedTuple):
    """An entry of a .txnindex file: one aborted transaction, in the segment that holds its marker.

    last_offset: of the marker. last_stable_offset: of the partition right after it.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class _Entries:
    """Entries of one index file: a growing bytearray while the segment is active, a mapping afterwards."""

    entry_size: int

    def __init__(self, path: str, data: bytearray | memoryview, *, is_synced: bool = False) -> None:
        """is_synced: what the file holds now is on disk."""
        self.path = path
        self.data = data
        # How many bytes of data are in the file; None: not known yet, -1: it has to be cut or made first.
        self._on_file: int | None = None
        self._is_synced = is_synced  # whether what is in the file is on disk

    def __len__(self) -> int:
        return len(self.data) // self.entry_size

    def keep(self, count: int) -> None:
        """Forgets all entries but the first count."""
        self.data = self.data[: count * self.entry_size]  # a new bytearray: one with an array over it cannot shrink

    def write(self, fs: FS, *, whole: bool = False, sync: bool = False, keeps_rest: bool = False) -> None:
        """Brings waiting entries to the file. whole: reads the file first, and removes other entries from it. sync:
        makes it durable. keeps_rest: other entries in the file are true as well, and stay until there are more here.
        """
        if whole or self._on_file is None:
            self._on_file = self._front_on_file(fs, keeps_rest)
        if self._on_file == len(self.data) and (self._is_synced or not sync):
            return
        with opened(fs, self.path, write=True, create=True) as handle:
            if self._on_file != len(self.data):
                start = max(0, self._on_file)
                self._is_synced = False
                # A copy: the traceback of an error may keep a view, and a bytearray with a view cannot grow.
                fs.pwrite(handle, bytes(memoryview(self.data)[start:]), start)
                if fs.size(handle) != len(self.data):  # zeros of Kafka's, or entries that are no longer true
                    fs.truncate(handle, len(self.data))
                self._on_file = len(self.data)
            if sync and not self._is_synced:
                fs.fsync(handle)
                self._is_synced = True

    def _front_on_file(self, fs: FS, keeps_rest: bool) -> int:
        """How many bytes of the file are the front of these entries, -1 where it has to be cut or made.

        A file with other entries is removed, durably. If it were overwritten, a power cut could leave old entries among
        new ones, each of which looks right.
        """
        try:
            with opened(fs, self.path) as handle:
                size = fs.size(handle)
                length = min(size, len(self.data))
                content = fs.pread(handle, length, 0) if keeps_rest else _read_without_zeros(fs, handle, size)
        except FileNotFoundError:
            return -1
        front = content[:length].ljust(length, b"\0")
        if front == bytes(self.data[:length]) and (keeps_rest or len(content) <= length):
            if keeps_rest or length == size:
                return length
            return -1
        fs.unlink(self.path)
        fs.sync_dir(os.path.dirname(self.path))
        return -1


class OffsetIndex(_Entries):
    """Where batches start, by the last offset in them."""

    entry_size = OFFSET_ENTRY.itemsize

    def add(self, relative_offset: int, position: int) -> None:
        assert isinstance(self.data, bytearray), "only an active index grows"
        self.data += _OFFSET.pack(relative_offset, position)

    def entry(self, slot: int) -> tuple[int, int]:
        """(relative_offset, position)."""
        return _OFFSET.unpack_from(self.data, slot * self.entry_size)

    def find(self, relative_offset: int) -> int:
        """Slot of the last entry at or below an offset, -1 for none."""
        bounded = max(-1, min(relative_offset, 2**31 - 1))
        if self.data:
            return kernel.search_offsets(self.data, len(self), bounded)
        return -1

    def array(self) -> npt.NDArray[Any]:
        """All entries, dtype OFFSET_ENTRY, over the mapped file or the memory of the active index."""
        return np.frombuffer(self.data, OFFSET_ENTRY, len(self))


class TimeIndex(_Entries):
    """From which offset on there may be records with at least a timestamp.

    last_timestamp: of the last entry, -1 without one; for a sealed segment its largest timestamp.
    """

    entry_size = TIME_ENTRY.itemsize

    def __init__(self, path: str, data: bytearray | memoryview, *, is_synced: bool = False) -> None:
        super().__init__(path, data, is_synced=is_synced)
        if len(self):
            self.last_timestamp = self.entry(len(self) - 1)[0]
        else:
            self.last_timestamp = -1

    def add(self, timestamp: int, relative_offset: int) -> None:
        """Ignored unless the timestamp is larger than all before (Kafka's maybeAppend)."""
        assert isinstance(self.data, bytearray), "only an active index grows"
        if timestamp > self.last_timestamp:
            self.data += _TIME.pack(timestamp, relative_offset)
            self.last_timestamp = timestamp

    def entry(self, slot: int) -> tuple[int, int]:
        """(timestamp, relative_offset)."""
        return _TIME.unpack_from(self.data, slot * self.entry_size)

    def array(self) -> npt.NDArray[Any]:
        """All entries, dtype TIME_ENTRY."""
        return np.frombuffer(self.data, TIME_ENTRY, len(self))

    def keep(self, count: int) -> None:
        super().keep(count)
        if count:
            self.last_timestamp = self.entry(count - 1)[0]
        else:
            self.last_timestamp = -1


class TransactionIndex(_Entries):
    """Aborted transactions, in the order of their markers. Kafka's readers believe it; ours walk the batches."""

    entry_size = TXN_ENTRY.itemsize

    def add(self, producer_id: int, first_offset: int, last_offset: int, last_stable_offset: int) -> None:
        assert isinstance(self.data, bytearray), "only an active index grows"
        self.data += _TXN.pack(0, producer_id, first_offset, last_offset, last_stable_offset)

    def array(self) -> npt.NDArray[Any]:
        """All entries, dtype TXN_ENTRY."""
        return np.frombuffer(self.data, TXN_ENTRY, len(self))


def size_without_zeros(data: bytes | memoryview) -> int:
    """How many bytes there are without the zeros at the end."""
    values = np.frombuffer(data, np.uint8)
    end = len(values)
    while end and not values[max(0, end - _ZEROS_AT_ONCE) : end].any():
        end = max(0, end - _ZEROS_AT_ONCE)
    if not end:
        return 0
    start = max(0, end - _ZEROS_AT_ONCE)
    return start + int(np.flatnonzero(values[start:end])[-1]) + 1


def read_front(fs: FS, handle: int, entry_size: int) -> bytes:
    """The entries at the front of an index file, up to the zeros that Kafka's files of 10 MiB end in."""
    size = fs.size(handle)
    data = fs.pread(handle, min(size, _ZEROS_AT_ONCE), 0)
    while len(data) < size and size_without_zeros(data) > len(data) - entry_size:
        more = fs.pread(handle, min(size - len(data), len(data)), len(data))
        if not more:
            break
        data += more
    # An entry may itself end in zeros.
    used_entries = -(-size_without_zeros(data) // entry_size)
    return data[: min(used_entries, len(data) // entry_size) * entry_size]


def _read_without_zeros(fs: FS, handle: int, size: int) -> bytes:
    """The content of a file of so many bytes, without the zeros at the end."""
    end = size
    while end > 0:
        start = max(0, end - _ZEROS_AT_ONCE)
        chunk = fs.pread(handle, end - start, start)
        if chunk != _ZEROS[: len(chunk)]:
            used = start + size_without_zeros(chunk)
            return chunk[:used] if not start else fs.pread(handle, used, 0)
        end = start
    return b""


def load(fs: FS, path: str, kind: type[_Entries]) -> memoryview:
    """A mapped index file without the zeros that an untrimmed one ends in; empty when there is none."""
    try:
        with opened(fs, path) as handle:
            size = fs.size(handle)
            size -= size % kind.entry_size
            if not size:
                return memoryview(b"")
            view = fs.map(handle, size)
    except FileNotFoundError:
        return memoryview(b"")
    if any(view[size - kind.entry_size :]):
        return view
    # Kafka keeps the index of an active segment at its full size, and a crash leaves it so: zeros are no entries.
    used_entries = -(-size_without_zeros(view) // kind.entry_size)  # the last one may itself end in zeros
    return view[: used_entries * kind.entry_size]


def rises(values: npt.NDArray[Any]) -> bool:
    """Strictly, and from 0 on or above."""
    return bool((values[:1] >= 0).all() and (values[1:] > values[:-1]).all())


class IndexWriter:
    """The indexes of a segment that is being written: entries in memory, which reach the files in pieces.

    offsets, times: the entries. believed: how many of the offset entries come from the file; later ones are of batches
    that were seen. until_look: how many entries may come before look(), since there may be no room for more. offers:
    whether the files hold the front of these entries, so that new ones may be written behind them. The writer calls all
    of this under the lock of its log; readers in this process look at offsets and times without it.
    """

    def __init__(self, fs: FS, paths: Sequence[str], *, is_synced: bool) -> None:
        """paths: of the three files, in the order of names.INDEXES. is_synced: what the files hold now is on disk."""
        self._fs = fs
        self.offsets = OffsetIndex(paths[0], bytearray(), is_synced=is_synced)
        self.times = TimeIndex(paths[1], bytearray(), is_synced=is_synced)
        self._aborted = TransactionIndex(paths[2], bytearray())
        self.believed = 0
        self.offers = False
        self.until_look = 1

    def resume(self, offsets: OffsetIndex, offset_count: int, times: TimeIndex, time_count: int) -> None:
        """Takes the first entries that were read from the files."""
        offsets.keep(offset_count)
        times.keep(time_count)
        self.offsets = offsets
        self.times = times
        self.believed = offset_count

    def resume_aborted(self, base_offset: int, end: int, *, is_whole: bool) -> bool:
        """Takes the aborted transactions from their file, of a log that ends at end; False when it cannot be right."""
        path = self._aborted.path
        index = TransactionIndex(path, bytearray(load(self._fs, path, TransactionIndex)), is_synced=is_whole)
        # The offsets of the markers lie in this segment, below the log end, and rise: else a crash has left garbage.
        markers = index.array()["last_offset"].astype(np.int64)
        if np.any(markers < base_offset) or np.any(markers >= end) or not rises(markers):
            return False
        self._aborted = index
        return True

    def add(self, relative_offset: int, position: int, largest_timestamp: int, its_relative_offset: int) -> None:
        """Adds an entry to both indexes, for the batch at a position whose last offset this is. The compiled kernels
        have their own copy of this (kernels/_appending.pxi).
        """
        offsets = self.offsets.data
        times = self.times
        assert isinstance(offsets, bytearray), "only an active index grows"
        offsets += _OFFSET.pack(relative_offset, position)
        if largest_timestamp > times.last_timestamp:
            times.add(largest_timestamp, its_relative_offset)
        self.until_look -= 1

    def look(self, most_bytes: int) -> int:
        """Says how many more entries have room, and when that is to be asked again."""
        left = self.room(most_bytes)
        self.until_look = max(1, min(left, _LOOK_ENTRIES))
        return left

    def room(self, most_bytes: int) -> int:
        """How many entries still fit. One time entry is kept back for the closing one (storage format section 3.2)."""
        offsets = most_bytes // self.offsets.entry_size - len(self.offsets)
        times = most_bytes // self.times.entry_size - 1 - len(self.times)
        return min(offsets, times)

    def offer(self) -> None:
        """Writes waiting entries, if the files hold those before them. An index is a cache: entries that do not reach
        the file now are written with all others when the segment is sealed, where a failure counts.
        """
        if self.offers:
            with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
                self.write()

    def write(self, *, whole: bool = False, sync: bool = False, keeps_rest: bool = False) -> None:
        """Brings the indexes to their files. whole, sync and keeps_rest as ActiveSegment.write_indexes() has them."""
        indexes: list[OffsetIndex | TimeIndex | TransactionIndex] = [self.offsets, self.times]
        if self.has_aborted:  # else there is no such file
            indexes.append(self._aborted)
        for index in indexes:
            index.write(self._fs, whole=whole, sync=sync, keeps_rest=keeps_rest)
        self.offers |= whole

    @property
    def has_aborted(self) -> bool:
        return len(self._aborted) > 0

    def set_aborted(self, entries: Iterable[AbortedTransaction]) -> None:
        """All aborted transactions whose markers stand in this segment; a file that says otherwise goes."""
        self._aborted = TransactionIndex(self._aborted.path, bytearray())
        for entry in entries:
            self._aborted.add(*entry)
        if not self.has_aborted:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(self._aborted.path)

    def write_aborted(self) -> None:
        """Brings the aborted transactions to their file, where there are any. Raises what a write raises."""
        if self.has_aborted:
            self._aborted.write(self._fs, whole=True)

    def add_aborted(self, entry: AbortedTransaction) -> None:
        """One more, written at once. Raises what a write raises."""
        self._aborted.add(*entry)
        self._aborted.write(self._fs)
