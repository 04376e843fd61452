"""The offsets of the records of each key, in memory, for appends that expect a key's
last offset and for the history of a key.

Rules:
- The index is built at its first use, by reading the log once. Later uses read the
  records that were appended since.
- It contains records that are not synced yet, because an append must not overlook them.
  A record without a key is left out, and so is a marker.
- A truncation makes it start over. Records that were deleted or compacted are checked
  when they are returned.

Memory: about 200 bytes for each key, and 8 for each record.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from logcore.errors import (
    InvalidConfigError,
    OffsetConflictError,
    OffsetOutOfRangeError,
)
from logcore.kernels import Record
from logcore.kernels.layout import Buffer
from logcore.reader import LogReader, fs_of, stored_batches

#: The expected offset of a key without records.
NO_RECORD: Final = -1


class KeyIndex:
    """The offsets of a log by key. Several threads may use it."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._offsets: dict[bytes, array[int]] = {}
        self._next_offset = log.log_start_offset
        self._times_truncated = log.times_truncated
        self._make_lock()
        fs_of(log).after_fork(self._make_lock)

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def _catch_up(self, end: int) -> None:
        times_truncated = self._log.times_truncated
        if times_truncated != self._times_truncated or end < self._next_offset:
            self._offsets = {}
            self._next_offset = self._log.log_start_offset
            self._times_truncated = times_truncated
        start = max(self._next_offset, self._log.log_start_offset)
        for batch in stored_batches(self._log, start, end):
            for record in batch.records():
                if record.key is not None and record.offset >= start:
                    known = self._offsets.get(record.key)
                    if known is None:
                        known = self._offsets[record.key] = array("q")
                    known.append(record.offset)
        self._next_offset = end

    def check(self, expected: Mapping[Buffer, int], end: int) -> None:
        """Check that the last record of each key below `end` has the expected offset.

        Raises:
            OffsetConflictError: a key has another last record.
            InvalidConfigError: `expected` is not a mapping of keys to offsets.
        """
        for key, offset in checked_offsets(expected).items():
            with self._lock:
                self._catch_up(end)
                offsets: Sequence[int] = self._offsets.get(key, ())
                found = NO_RECORD
                if offsets:
                    found = offsets[-1]
                # The record may be deleted. An older one is then the last.
                if found != offset:
                    found = next(self._present(key, reversed(offsets)), NO_RECORD)
            if found != offset:
                raise OffsetConflictError(
                    f"the last record of key {key!r:.80} is not the expected one",
                    path=self._log.path,
                    expected=offset,
                    found=found,
                )

    def add(self, key: bytes, offset: int) -> None:
        """Add a record that was just appended, without reading it back."""
        with self._lock:
            if self._next_offset == offset:
                self._offsets.setdefault(key, array("q")).append(offset)
                self._next_offset = offset + 1

    def history(self, key: bytes, start: int, end: int) -> list[int]:
        """Return the offsets of a key's records in [start, end), in order.

        Records that were compacted may be among them.
        """
        with self._lock:
            self._catch_up(max(end, self._next_offset))
            offsets: Sequence[int] = self._offsets.get(key, ())
            return [offset for offset in offsets if start <= offset < end]

    def _present(self, key: bytes, offsets: Iterator[int]) -> Iterator[int]:
        for offset in offsets:
            if offset < self._log.log_start_offset:
                return
            # A record that is not synced yet is not compacted either.
            if offset >= self._log.high_watermark or read_one(self._log, key, offset):
                yield offset


def read_one(log: LogReader, key: bytes, offset: int) -> Record | None:
    """Return the record of a key at an offset, or None if it was deleted."""
    try:
        record = log.get(offset)
    except OffsetOutOfRangeError:
        return None
    if record.offset == offset and record.key == key:
        return record
    return None


def checked_offsets(expected: object) -> dict[bytes, int]:
    """Return the expected offsets by key, or raise InvalidConfigError."""
    found: dict[bytes, int] = {}
    if isinstance(expected, Mapping):
        for key, offset in expected.items():
            if not isinstance(key, (bytes, bytearray, memoryview)) or (
                type(offset) is not int or offset < NO_RECORD
            ):
                break
            found[bytes(key)] = offset
        else:
            return found
    raise InvalidConfigError(
        "expected offsets by key",
        expected="a mapping of keys to the offset of their last record, -1 for none",
        found=repr(expected)[:80],
    )
