"""The indexes of a segment: sorted entries with starting positions for searches in the
.log file.

Layout (storage format section 4), big-endian, without head and checksum:
    .index      relative_offset:i32 position:i32
                last offset of a batch, and the position where that batch starts
    .timeindex  timestamp:i64 relative_offset:i32
                no record before that offset has a larger timestamp
    .txnindex   version:i16 producer_id:i64 first_offset:i64 last_offset:i64
                last_stable_offset:i64

Rules:
- An index is never evidence about the log. Callers check the batch at the position, and
  start at 0 if it does not match. An index that is missing, short, zero-padded or
  garbage only costs time. (A forged entry that points at a batch inside a value is
  trusted: the files of a log are trusted as a whole, SECURITY.md.)
- The index of an active segment is in memory and is written to the file in parts.
  Indexes of sealed segments are mapped.
- Offsets in an offset index strictly increase. Timestamps in a time index strictly
  increase, and its offsets never decrease.

This module does not read the .log file. partition/recovery.py walks its batches and
rebuilds the indexes, with ActiveSegment of segment.py.
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
#: One for each aborted transaction, by the offset of its marker (storage format section
#: 4.3).
TXN_ENTRY: Final = np.dtype(
    [
        ("version", ">i2"),
        ("producer_id", ">i8"),
        ("first_offset", ">i8"),
        ("last_offset", ">i8"),
        ("last_stable_offset", ">i8"),
    ]
)
#: Number of new entries after which index entries are written, and the remaining room
#: is checked.
_CHECK_ENTRIES: Final = 512
_ZEROS_AT_ONCE: Final = 64 << 10
_ZEROS: Final = bytes(_ZEROS_AT_ONCE)
_OFFSET: Final = struct.Struct(">ii")
_TXN: Final = struct.Struct(">hqqqq")
_TIME: Final = struct.Struct(">qi")


class AbortedTransaction(NamedTuple):
    """An entry of a .txnindex file: one aborted transaction, in the segment of its
    marker.
    """

    producer_id: int
    first_offset: int
    #: The offset of the marker.
    last_offset: int
    #: The last stable offset of the partition right after the marker.
    last_stable_offset: int


class _Entries:
    """Entries of one index file: a growing bytearray in an active segment, else a
    mapping.
    """

    entry_size: int

    def __init__(
        self, path: str, data: bytearray | memoryview, *, is_synced: bool = False
    ) -> None:
        """Create entries. `is_synced` means that the present content of the file is
        durable.
        """
        self.path = path
        self.data = data
        # Number of bytes of `data` in the file. None: unknown, -1: the file must first
        # be truncated or created.
        self._on_file: int | None = None
        # Whether the content of the file is durable.
        self._is_synced = is_synced

    def __len__(self) -> int:
        return len(self.data) // self.entry_size

    def keep(self, count: int) -> None:
        """Drop all entries after the first `count`."""
        # A new bytearray, because one with an array over it cannot shrink.
        self.data = self.data[: count * self.entry_size]

    def write(
        self,
        fs: FS,
        *,
        whole: bool = False,
        sync: bool = False,
        keeps_other_entries: bool = False,
    ) -> None:
        """Write new entries to the file.

        With `whole`, the file is read first and other entries are removed from it. With
        `sync`, the file becomes durable. With `keeps_other_entries`, other entries in the file
        are valid too, and are kept until there are more entries here.
        """
        if whole or self._on_file is None:
            self._on_file = self._matching_bytes(fs, keeps_other_entries)
        if self._on_file == len(self.data) and (self._is_synced or not sync):
            return
        with opened(fs, self.path, write=True, create=True) as handle:
            if self._on_file != len(self.data):
                start = max(0, self._on_file)
                self._is_synced = False
                # A copy: the traceback of an error may keep a view, and a bytearray
                # with a view cannot grow.
                fs.pwrite(handle, bytes(memoryview(self.data)[start:]), start)
                # Zeros written by Kafka, or entries that are no longer valid.
                if fs.size(handle) != len(self.data):
                    fs.truncate(handle, len(self.data))
                self._on_file = len(self.data)
            if sync and not self._is_synced:
                fs.fsync(handle)
                self._is_synced = True

    def _matching_bytes(self, fs: FS, keeps_other_entries: bool) -> int:
        """Return how many bytes of the file equal the front of these entries.

        The result is -1 if the file must be truncated or created. A file with other
        entries is removed, durably. If it were overwritten, a power failure could leave
        a mix of old and new entries, each of which is valid.
        """
        try:
            with opened(fs, self.path) as handle:
                size = fs.size(handle)
                length = min(size, len(self.data))
                content = (
                    fs.pread(handle, length, 0)
                    if keeps_other_entries
                    else _read_without_zeros(fs, handle, size)
                )
        except FileNotFoundError:
            return -1
        prefix = content[:length].ljust(length, b"\0")
        if prefix == bytes(self.data[:length]) and (
            keeps_other_entries or len(content) <= length
        ):
            if keeps_other_entries or length == size:
                return length
            return -1
        fs.unlink(self.path)
        fs.sync_dir(os.path.dirname(self.path))
        return -1


class OffsetIndex(_Entries):
    """Positions of batches, by their last offsets."""

    entry_size = OFFSET_ENTRY.itemsize

    def add(self, relative_offset: int, position: int) -> None:
        assert isinstance(self.data, bytearray), "only an active index grows"
        self.data += _OFFSET.pack(relative_offset, position)

    def entry(self, slot: int) -> tuple[int, int]:
        """Return (relative_offset, position)."""
        return _OFFSET.unpack_from(self.data, slot * self.entry_size)

    def find(self, relative_offset: int) -> int:
        """Return the slot of the last entry at or below an offset, -1 for none."""
        bounded = max(-1, min(relative_offset, 2**31 - 1))
        if self.data:
            return kernel.search_offsets(self.data, len(self), bounded)
        return -1

    def array(self) -> npt.NDArray[Any]:
        """Return all entries, dtype OFFSET_ENTRY, without copying them."""
        return np.frombuffer(self.data, OFFSET_ENTRY, len(self))


class TimeIndex(_Entries):
    """Entries that bound the offset of the first record with at least a timestamp.

    `last_timestamp` belongs to the last entry, -1 without entries. In a sealed segment
    it is the largest timestamp.
    """

    entry_size = TIME_ENTRY.itemsize

    def __init__(
        self, path: str, data: bytearray | memoryview, *, is_synced: bool = False
    ) -> None:
        super().__init__(path, data, is_synced=is_synced)
        if len(self):
            self.last_timestamp = self.entry(len(self) - 1)[0]
        else:
            self.last_timestamp = -1

    def add(self, timestamp: int, relative_offset: int) -> None:
        """Add an entry, unless its timestamp is not larger than all before (Kafka's
        maybeAppend).
        """
        assert isinstance(self.data, bytearray), "only an active index grows"
        if timestamp > self.last_timestamp:
            self.data += _TIME.pack(timestamp, relative_offset)
            self.last_timestamp = timestamp

    def entry(self, slot: int) -> tuple[int, int]:
        """Return (timestamp, relative_offset)."""
        return _TIME.unpack_from(self.data, slot * self.entry_size)

    def array(self) -> npt.NDArray[Any]:
        """Return all entries, dtype TIME_ENTRY."""
        return np.frombuffer(self.data, TIME_ENTRY, len(self))

    def keep(self, count: int) -> None:
        super().keep(count)
        if count:
            self.last_timestamp = self.entry(count - 1)[0]
        else:
            self.last_timestamp = -1


class TransactionIndex(_Entries):
    """Aborted transactions, in the order of their markers.

    Kafka's readers trust this index; logcore's readers use the batches.
    """

    entry_size = TXN_ENTRY.itemsize

    def add(
        self,
        producer_id: int,
        first_offset: int,
        last_offset: int,
        last_stable_offset: int,
    ) -> None:
        assert isinstance(self.data, bytearray), "only an active index grows"
        self.data += _TXN.pack(
            0, producer_id, first_offset, last_offset, last_stable_offset
        )

    def array(self) -> npt.NDArray[Any]:
        """Return all entries, dtype TXN_ENTRY."""
        return np.frombuffer(self.data, TXN_ENTRY, len(self))


def size_without_zeros(data: bytes | memoryview) -> int:
    """Return the number of bytes without trailing zeros."""
    values = np.frombuffer(data, np.uint8)
    end = len(values)
    while end and not values[max(0, end - _ZEROS_AT_ONCE) : end].any():
        end = max(0, end - _ZEROS_AT_ONCE)
    if not end:
        return 0
    start = max(0, end - _ZEROS_AT_ONCE)
    return start + int(np.flatnonzero(values[start:end])[-1]) + 1


def read_front(fs: FS, handle: int, entry_size: int) -> bytes:
    """Return the entries of an index file before the zero padding of Kafka's 10 MiB
    files.
    """
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
    """Return the content of a file of `size` bytes without trailing zeros."""
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
    """Map an index file without trailing zeros; empty if the file does not exist."""
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
    # Kafka keeps the index of an active segment at its full size, and a crash leaves it
    # so. Zeros are not entries.
    # The last one may itself end in zeros.
    used_entries = -(-size_without_zeros(view) // kind.entry_size)
    return view[: used_entries * kind.entry_size]


def rises(values: npt.NDArray[Any]) -> bool:
    """Return whether values strictly increase, from 0 or above."""
    return bool((values[:1] >= 0).all() and (values[1:] > values[:-1]).all())


class IndexWriter:
    """The indexes of a segment that is being written.

    Entries are in memory and are written to the files in parts. `offsets` and `times`
    are the entries. The first `entries_from_file` offset entries come from the file; later ones
    belong to batches that this process has read or written. `entries_until_check` is the number
    of entries before the next check_room(), when room may run out. `extends_files` is True if the
    files contain the front of these entries, so that new ones can be appended.

    The writer calls all methods under the lock of its log. Readers in this process use
    `offsets` and `times` without it.
    """

    def __init__(self, fs: FS, paths: Sequence[str], *, is_synced: bool) -> None:
        """Create empty indexes.

        `paths` are the three files, in the order of names.INDEXES. `is_synced` means
        that the present content of the files is durable.
        """
        self._fs = fs
        self.offsets = OffsetIndex(paths[0], bytearray(), is_synced=is_synced)
        self.times = TimeIndex(paths[1], bytearray(), is_synced=is_synced)
        self._aborted = TransactionIndex(paths[2], bytearray())
        self.entries_from_file = 0
        self.extends_files = False
        self.entries_until_check = 1

    def resume(
        self, offsets: OffsetIndex, offset_count: int, times: TimeIndex, time_count: int
    ) -> None:
        """Use the first entries that were read from the files."""
        offsets.keep(offset_count)
        times.keep(time_count)
        self.offsets = offsets
        self.times = times
        self.entries_from_file = offset_count

    def resume_aborted(self, base_offset: int, end: int, *, is_whole: bool) -> bool:
        """Read the aborted transactions of a log that ends at `end`; False if they are
        invalid.
        """
        path = self._aborted.path
        index = TransactionIndex(
            path, bytearray(load(self._fs, path, TransactionIndex)), is_synced=is_whole
        )
        # The offsets of the markers are in this segment, below the log end, and
        # increase. Otherwise a crash left garbage.
        markers = index.array()["last_offset"].astype(np.int64)
        if (
            np.any(markers < base_offset)
            or np.any(markers >= end)
            or not rises(markers)
        ):
            return False
        self._aborted = index
        return True

    def add(
        self,
        relative_offset: int,
        position: int,
        largest_timestamp: int,
        its_relative_offset: int,
    ) -> None:
        """Add an entry to both indexes, for the batch at a position with this last
        offset.

        The compiled kernels contain a copy of this method (kernels/_appending.pxi).
        """
        offsets = self.offsets.data
        times = self.times
        assert isinstance(offsets, bytearray), "only an active index grows"
        offsets += _OFFSET.pack(relative_offset, position)
        if largest_timestamp > times.last_timestamp:
            times.add(largest_timestamp, its_relative_offset)
        self.entries_until_check -= 1

    def check_room(self, most_bytes: int) -> int:
        """Return how many more entries fit, and schedule the next check."""
        free_entries = self.room(most_bytes)
        self.entries_until_check = max(1, min(free_entries, _CHECK_ENTRIES))
        return free_entries

    def room(self, most_bytes: int) -> int:
        """Return how many entries still fit.

        One time entry is reserved for the closing one (storage format section 3.2).
        """
        offsets = most_bytes // self.offsets.entry_size - len(self.offsets)
        times = most_bytes // self.times.entry_size - 1 - len(self.times)
        return min(offsets, times)

    def try_write(self) -> None:
        """Write new entries if the files contain those before them.

        An index is a cache. Entries that cannot be written now are written when the
        segment is sealed, where a failure is an error.
        """
        if self.extends_files:
            with contextlib.suppress(DiskFullError, StorageWriteError, ResourceError):
                self.write()

    def write(
        self,
        *,
        whole: bool = False,
        sync: bool = False,
        keeps_other_entries: bool = False,
    ) -> None:
        """Write the indexes to their files; see ActiveSegment.write_indexes()."""
        indexes: list[OffsetIndex | TimeIndex | TransactionIndex] = [
            self.offsets,
            self.times,
        ]
        # Otherwise there is no such file.
        if self.has_aborted:
            indexes.append(self._aborted)
        for index in indexes:
            index.write(
                self._fs,
                whole=whole,
                sync=sync,
                keeps_other_entries=keeps_other_entries,
            )
        self.extends_files |= whole

    @property
    def has_aborted(self) -> bool:
        return len(self._aborted) > 0

    def set_aborted(self, entries: Iterable[AbortedTransaction]) -> None:
        """Replace all aborted transactions with markers in this segment.

        If there are none, their file is deleted.
        """
        self._aborted = TransactionIndex(self._aborted.path, bytearray())
        for entry in entries:
            self._aborted.add(*entry)
        if not self.has_aborted:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(self._aborted.path)

    def write_aborted(self) -> None:
        """Write the aborted transactions to their file, if there are any.

        Raises:
            StorageWriteError, DiskFullError: writing failed.
        """
        if self.has_aborted:
            self._aborted.write(self._fs, whole=True)

    def add_aborted(self, entry: AbortedTransaction) -> None:
        """Add an aborted transaction and write it at once.

        Raises:
            StorageWriteError, DiskFullError: writing failed.
        """
        self._aborted.add(*entry)
        self._aborted.write(self._fs)
