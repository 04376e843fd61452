"""Base classes for the state that an append changes, with plain attributes.

The compiled kernels have the same classes with these attributes as C fields, so that
Appender.append_fast() can read and change them within nanoseconds. Each number is
stored once: C and Python read and set the same attribute.

This plain form has no fast path. Each append takes the path of log.py and
partition/writer.py, which defines the behavior of the fast one. See _appending.pxi for
the conditions and the steps of the compiled fast path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from logcore.kernels.layout import Buffer, EncodedBatch, Receipt
from logcore.kernels.requests import UsualFetch, UsualProduce

#: Maximum size of an append on the fast path, head and record together. Other threads of the
#: process cannot run during the write, so the write must be short.
FAST_PATH_MAX_BYTES = 4096


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
    """The base of segment.Segment and its subclasses, which document its fields.

    Each number fits into 64 bits. The work for each batch is compiled too: a call with
    1,000 records takes 8 us in addition to its write and its encoding, and 0.6 us of
    that is spent here.
    """

    base_offset: int
    #: The data with which get_fast() reads the segment, None if it must not.
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

    def find_recent(self, offset: int) -> int:
        """Return the position of the batch with an offset if it was appended recently.

        Otherwise, return -1.
        """
        return -1

    def is_full(
        self, size: int, max_timestamp: int, last_offset: int, now_ms: int
    ) -> bool:
        """Return whether an append needs a new segment first (storage format section 3.2)."""
        if self._size == 0:
            return last_offset > self.limit_offset
        if self.first_timestamp < 0 and self.is_too_old(now_ms):
            return True
        return (
            self._size + size > self.limit_bytes
            or max_timestamp > self.limit_timestamp
            or last_offset > self.limit_offset
        )

    def record_batch(
        self, position: int, size: int, last_offset: int, max_timestamp: int
    ) -> None:
        """Update indexes and largest timestamp for a batch (storage format 4.1, 4.2)."""
        if max_timestamp > self.largest_timestamp:
            self.largest_timestamp = max_timestamp
            self.largest_timestamp_offset = last_offset
        if position == 0:
            self._begin_at(max_timestamp)
        if self.since_entry_bytes > self.index_interval_bytes:
            self._add_entries(position, last_offset)
        self.since_entry_bytes += size
        self.last_offset = last_offset

    def record_batches(self, start: int, batches: Iterable[EncodedBatch]) -> None:
        """Update them for several batches, whose positions are relative to `start`."""
        for position, size, last_offset, max_timestamp in batches:
            self.record_batch(start + position, size, last_offset, max_timestamp)

    def is_too_old(self, now_ms: int) -> bool:
        raise NotImplementedError

    def _begin_at(self, timestamp: int) -> None:
        raise NotImplementedError

    def _add_entries(self, position: int, last_offset: int) -> None:
        indexes = self._indexes
        base_offset = self.base_offset
        its_offset = self.largest_timestamp_offset - base_offset
        indexes.add(
            last_offset - base_offset, position, self.largest_timestamp, its_offset
        )
        self.since_entry_bytes = 0
        if indexes.entries_until_check <= 0:
            self._check_indexes()

    def _check_indexes(self) -> None:
        raise NotImplementedError


class Appender:
    """The base of partition.writer.Writer, which documents its fields."""

    state: Any
    active: Any
    fs: Any
    commit: Any
    key: tuple[str, int]
    forks: int
    leader_epoch: int
    written_bytes: int
    appends: int
    #: Maximum size of a batch for the fast path. It is 0 if the policy, the settings,
    #: the disk or other processes prevent the fast path.
    fast_path_bytes: int
    #: Monotonic time until which the fast path is not used, because a write took long.
    slow_until_ns: int
    requires_key: bool
    has_unfinished_write: bool
    is_held: bool
    is_maintenance_idle: bool
    #: Whether the segments have descriptors of the operating system, and no other process
    #: writes the log.
    has_descriptors: bool
    #: Maximum size of a client batch for append_request() and append_encoded(). It is 0
    #: if the policy, the settings, the disk or other processes prevent that path.
    client_batch_bytes: int
    #: Maximum size of a batch for append_stored(), or 0 as above.
    stored_batch_bytes: int
    #: Maximum number of unsynced bytes after an append that does not sync.
    unsynced_limit: int
    #: Limits of the timestamps of records, relative to the clock.
    max_ahead_ms: int
    max_behind_ms: int
    #: Whether readers see an append before a sync.
    shows_appends: bool

    def append_fast(
        self,
        value: object,
        key: object,
        headers: object,
        timestamp_ms: object,
        durability: object,
        expected_offset: object,
    ) -> Receipt | None:
        """Append one record under the policy `os` if nothing about it is unusual.

        Returns None without any effect if something is unusual. The arguments are those
        of Log.append().

        Raises:
            StorageWriteError: A write failed, and its bytes could not be removed.
        """
        return None

    def append_request(self, request: UsualProduce, frame: Buffer) -> int | None:
        """Append the batch of a Produce without waiting for its durability.

        Returns the offset of the first record. Returns None without any effect if the
        batch or the log is unusual, or if the append would wait: the caller then calls
        Log.append_batch(), which defines the behavior and the errors.

        Raises:
            StorageWriteError: a write failed, and its bytes could not be removed. The
                log refuses writes.
        """
        return None

    def append_stored(self, data: Buffer) -> Receipt | None:
        """Append a batch of the leader without waiting for its durability.

        Returns None without any effect if the batch or the log is unusual: the caller
        then follows Log.append_as_follower().

        Raises:
            StorageWriteError: a write failed, and its bytes could not be removed. The
                log refuses writes.
        """
        return None

    def append_encoded(self, data: object) -> Receipt | None:
        """Append an encoded batch without waiting for its durability.

        Otherwise, this is append_request(). The durability of the receipt is "os".
        """
        return None

    def respond_recent(
        self, request: UsualFetch, stable: int, most_bytes: int
    ) -> bytes | None:
        """Return the response to a Fetch of the newest batches, with its size.

        It has whole batches below the offset `stable`, from the one that contains the
        requested offset on. They are all there, and have at most `most_bytes`. Returns
        None if they were not appended recently, if they are too many, or if they cannot
        be read. The log must be the one that the request is for.
        """
        return None
