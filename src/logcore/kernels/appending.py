"""What an append changes, as plain attributes: the bases of the classes that hold them, and the quick way to append.

The compiled kernels have the same classes, with these attributes as C fields, so that Appender.append_quickly() can
look at them and change them within nanoseconds. There is one place for each number: whoever reads or sets the
attribute, in C or in Python, means the same.

This plain form has no quick way: each append goes the one of log.py and partition/writer.py, which is the rule book for
the other. See _appending.pxi for what the compiled one does, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from logcore.kernels.layout import EncodedBatch, Receipt

#: What the quick way takes, head and record together. It keeps the other threads of the process waiting while it
#: writes, so the write has to be a short one.
QUICK_BYTES = 4096


class PartitionFields:
    """The base of partition.state.PartitionState, which documents its fields."""

    end: int
    visible: int
    is_closed: bool
    listeners: tuple[Callable[[], None], ...]
    lock: Any
    segments: list[Any]
    log_start: int
    gaps: Any


class SegmentFields:
    """The base of segment.Segment and its kinds, which document its fields. Each number fits into 64 bits.

    held: what get_quickly() reads the segment with, None where it may not. What is done here for each batch is compiled
    too: of 8 us that a call of 1,000 records spends beside its write and its encoding, 0.6.
    """

    base_offset: int
    held: Any
    handle: int
    _size: int
    since_entry_bytes: int
    index_interval_bytes: int
    first_timestamp: int
    largest_timestamp: int
    largest_timestamp_offset: int
    last_offset: int
    limit_bytes: int
    limit_timestamp: int
    limit_offset: int
    _indexes: Any

    def is_full(self, size: int, max_timestamp: int, last_offset: int, now_ms: int) -> bool:
        """Whether an append needs a new segment first (storage format section 3.2)."""
        if self._size == 0:
            return last_offset > self.limit_offset
        if self.first_timestamp < 0 and self.is_too_old(now_ms):
            return True
        return (
            self._size + size > self.limit_bytes
            or max_timestamp > self.limit_timestamp
            or last_offset > self.limit_offset
        )

    def note(self, position: int, size: int, last_offset: int, max_timestamp: int) -> None:
        """Keeps indexes and largest timestamp current for one batch (storage format sections 4.1 and 4.2)."""
        if max_timestamp > self.largest_timestamp:
            self.largest_timestamp = max_timestamp
            self.largest_timestamp_offset = last_offset
        if position == 0:
            self._begin_at(max_timestamp)
        if self.since_entry_bytes > self.index_interval_bytes:
            self._add_entries(position, last_offset)
        self.since_entry_bytes += size
        self.last_offset = last_offset

    def note_each(self, start: int, batches: Iterable[EncodedBatch]) -> None:
        """The same for batches that lie behind start as they say."""
        for position, size, last_offset, max_timestamp in batches:
            self.note(start + position, size, last_offset, max_timestamp)

    def is_too_old(self, now_ms: int) -> bool:
        raise NotImplementedError

    def _begin_at(self, timestamp: int) -> None:
        raise NotImplementedError

    def _add_entries(self, position: int, last_offset: int) -> None:
        indexes = self._indexes
        base_offset = self.base_offset
        its_offset = self.largest_timestamp_offset - base_offset
        indexes.add(last_offset - base_offset, position, self.largest_timestamp, its_offset)
        self.since_entry_bytes = 0
        if indexes.until_look <= 0:
            self._look_at_indexes()

    def _look_at_indexes(self) -> None:
        raise NotImplementedError


class Appender:
    """The base of partition.writer.Writer, which documents its fields.

    quick_bytes: the largest batch that may go the quick way; 0 where none may, because of the policy, the settings, the
    disk or other processes. slow_until_ns: by the monotonic clock, until when none may, because a write took long.
    """

    state: Any
    active: Any
    fs: Any
    commit: Any
    key: tuple[str, int]
    forks: int
    leader_epoch: int
    written_bytes: int
    appends: int
    quick_bytes: int
    slow_until_ns: int
    requires_key: bool
    is_midway: bool
    is_held: bool
    is_resting: bool

    def append_quickly(
        self,
        value: object,
        key: object,
        headers: object,
        timestamp_ms: object,
        durability: object,
        expected_offset: object,
    ) -> Receipt | None:
        """Appends one record under the policy `os` where nothing about it is unusual; None where something is, and
        then nothing has happened. Takes what Log.append() takes. Raises StorageWriteError when what a failed write left
        could not be cut back.
        """
        return None
