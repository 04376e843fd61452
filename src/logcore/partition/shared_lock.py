"""Shared write lock: lets several processes append to one partition, one at a time.

    logcore.turn, in the partition's directory

    position 0    the lock record, which describes the state of the partition:
                  written by the lock holder when it acquires and when it releases
    position 512  the durable end, in two slots: written after a sync, under a
                  lock of its own (`publishing`)

Rules:
- The write lock is a record lock on one byte of the log directory's lock file.
  The kernel releases it when the process that holds it dies.
- The lock record is marked "busy" while the lock is held. A process that acquires the
  lock and finds the record busy knows that the previous holder crashed, and runs
  recovery first.
- A lock record that is damaged, or that was written before the last reboot, is ignored:
  the file is never synced.
- A write of the durable end replaces the older slot, and a read uses the newest valid
  one. A crash during a write therefore leaves the previous value.
- The durable end decreases only when the log is truncated. Truncations are counted. A
  process whose sync began before a truncation must not record its result afterwards.

This module does not interpret the content of a partition; shared_writer.py does.
"""

from __future__ import annotations

import itertools
import os
import struct
import weakref
import zlib
from typing import Final, NamedTuple, cast

import attrs

from logcore.errors import LogLockedError
from logcore.fs import FS, SharedFS
from logcore.fs.byte_lock import FIRST_PARTITION_BYTE, LOCK_WAIT_SECONDS, ByteLock
from logcore.metadata.checkpoint import LOCK_RECORD, Key

#: Number of truncations that are kept. The oldest entry also represents all earlier
#: truncations, with the lowest of their offsets.
_MAX_TRUNCATIONS: Final = 8
#: If a process appears to have missed more truncations, the count was restarted.
_MAX_MISSED: Final = 1 << 32

# boot id, structure, end, size, flags; followed by their crc and the holder
_RECORD: Final = struct.Struct(">16sQqqI")
# pid, mark. The mark is last, so that a write that is interrupted leaves the old mark.
_HOLDER: Final = struct.Struct(">I8s")
_HOLDER_AT: Final = _RECORD.size + 4
_RECORD_BYTES: Final = _HOLDER_AT + _HOLDER.size
# mark, boot id, number, durable end, count of truncations, the latest truncations,
# flags, crc
_SYNCED: Final = struct.Struct(f">8s16sQqQ{_MAX_TRUNCATIONS}qII")
_IDLE_MARK: Final = b"LCTURN1\n"
#: Replaces _IDLE_MARK while the write lock is held.
_BUSY_MARK: Final = b"LCBUSY1\n"
_SYNCED_MARK: Final = b"LCSYNC2\n"
_SYNCED_AT: Final = 512
_SYNCED_BYTES: Final = 2 * _SYNCED.size
_DELETED: Final = 1
_FAILED: Final = 1
#: Maximum number of reads. A slot is written and read with one call each, but the
#: system does not promise that a reader never sees a partial write.
_MAX_READS: Final = 100


class LockRecord(NamedTuple):
    """The lock record: the state of the partition that the last holder left."""

    #: Changes with anything except the end, so that other processes reopen the
    #: partition.
    structure: int
    #: The log end offset.
    end: int
    #: The size of the active segment.
    size_bytes: int
    #: Whether the write lock is held, or its holder crashed.
    is_busy: bool = False
    #: Whether a process is deleting the partition.
    is_deleted: bool = False
    #: The process id of the last holder, for messages.
    pid: int = 0


@attrs.frozen
class DurableEnd:
    """The durable end of a partition, shared by its processes."""

    #: Every record below this offset is covered by a completed fsync.
    durable_end: int
    #: How often the log was truncated or recovered.
    truncations: int
    #: The offsets of the latest truncations, oldest first.
    latest: tuple[int, ...] = ()
    #: Whether a sync has failed.
    has_failed: bool = False

    def truncated(self, offset: int) -> DurableEnd:
        """Return the state after a truncation at `offset`.

        Records at and above the offset are no longer durable, even if a sync that began
        before the truncation completes after it.
        """
        latest = (*self.latest, offset)
        if len(latest) > _MAX_TRUNCATIONS:
            latest = (min(latest[:2]), *latest[2:])
        return DurableEnd(
            min(self.durable_end, offset), self.truncations + 1, latest, self.has_failed
        )

    def lowest_truncation_since(self, truncations: int, log_start: int) -> int | None:
        """Return the lowest offset of the truncations since the count was `truncations`.

        Returns None if there was none, and `log_start` if that offset is unknown.
        """
        new_truncations = self.truncations - truncations
        if new_truncations == 0:
            return None
        is_counted = new_truncations <= len(self.latest) or (
            len(self.latest) == _MAX_TRUNCATIONS and new_truncations < _MAX_MISSED
        )
        if new_truncations < 0 or not is_counted:
            return log_start
        return min(self.latest[-new_truncations:])


class _Slot(NamedTuple):
    """A slot as found in the file: its write number, its position and its content."""

    number: int
    #: Relative to _SYNCED_AT.
    at: int
    synced: DurableEnd


class WriteLock:
    """The shared write lock of one partition, as used by one process.

    `publishing` is the byte lock under which the durable end is written.
    """

    def __init__(self, fs: FS, handle: int, key: Key, path: str) -> None:
        """Open the record file of the partition, and create it if it is missing.

        `handle` is the lock file of the log directory. `path` is the partition's
        directory, which must exist.
        """
        import hashlib  # late: few directories are shared

        self._fs = cast(SharedFS, fs)
        self._lock_handle = handle
        # Each partition uses four bytes of the lock file, chosen by a hash of its name:
        # the write lock, publishing, rewriting and one spare. Two partitions must not
        # share a byte: within one process, releasing one lock would release the other.
        # With 56 bits this happens in one of a billion directories of 10,000
        # partitions.
        number = int.from_bytes(
            hashlib.sha256("{}-{}".format(*key).encode()).digest()[:7], "big"
        )
        self._byte = FIRST_PARTITION_BYTE + 4 * number
        self._path = path
        self._boot = self._fs.boot().boot_id
        self._pid = os.getpid()
        self._busy = _HOLDER.pack(self._pid, _BUSY_MARK)
        self._idle = _HOLDER.pack(self._pid, _IDLE_MARK)
        # (bytes, their decoded form) as read or written last. If this process also was
        # the previous holder, the bytes are unchanged and need no decoding.
        self._known_record: tuple[bytes, LockRecord] = b"", LockRecord(0, 0, 0)
        self._known_synced: tuple[bytes, DurableEnd] = b"", DurableEnd(0, 0)
        self._record_handle = self._fs.open(
            os.path.join(path, LOCK_RECORD), write=True, create=True
        )
        # Closed once no thread refers to this object: a reader may be about to read it.
        weakref.finalize(self, self._fs.close, self._record_handle).atexit = False
        self.publishing = ByteLock(self._fs, handle, self._byte + 1, path)

    def acquire(self, *, waits: bool = True) -> bool:
        """Acquire the write lock and return True.

        With waits=False, return False if another process holds the lock.

        Raises:
            LogLockedError: one other process has held the lock for LOCK_WAIT_SECONDS.
        """
        if self._fs.lock_byte(self._lock_handle, self._byte):
            return True
        if not waits:
            return False
        record = self.read_lock_record()
        while not self._fs.lock_byte(
            self._lock_handle, self._byte, timeout_ms=1000 * LOCK_WAIT_SECONDS
        ):
            previous = record
            record = self.read_lock_record()
            if (
                record == previous
            ):  # if it changed, others acquired the lock: wait again
                raise self._timeout_error(record)
        return True

    def _timeout_error(self, record: LockRecord | None) -> LogLockedError:
        pid = None
        holder = "another process"
        if record is not None and record.pid:
            pid = record.pid
            holder = f"process {pid}"
        return LogLockedError(
            f"{holder} has held the write lock for {LOCK_WAIT_SECONDS} seconds; "
            "if it is stopped, resume it or end it",
            path=self._path,
            pid=pid,
        )

    def release(self) -> None:
        """Release the write lock."""
        self._fs.unlock_byte(self._lock_handle, self._byte)

    def acquire_rewrite(self) -> bool:
        """Acquire the right to write replacement segments, as a compaction does.

        Returns False if another process has that right.
        """
        return self._fs.lock_byte(self._lock_handle, self._byte + 2)

    def release_rewrite(self) -> None:
        """Release the right that acquire_rewrite() acquired."""
        self._fs.unlock_byte(self._lock_handle, self._byte + 2)

    # -- the lock record ---------------------------------------------------------------

    def read_records(self) -> tuple[LockRecord | None, DurableEnd | None]:
        """Return the lock record and the durable end. The caller holds the write lock.

        Returns the same objects as the last call (or the objects written last) if the
        bytes are unchanged, so that the caller can compare them with `is`.
        """
        content = self._fs.pread(self._record_handle, _SYNCED_AT + _SYNCED_BYTES, 0)
        record: LockRecord | None = self._known_record[1]
        if content[:_RECORD_BYTES] != self._known_record[0]:
            record = self._unpack_record(content)
            if record is not None:
                self._known_record = content[:_RECORD_BYTES], record
        synced: DurableEnd | None = self._known_synced[1]
        if content[_SYNCED_AT:] != self._known_synced[0]:
            newest = self._newest_slot(content[_SYNCED_AT:])
            synced = None
            if newest is not None:
                synced = newest.synced
                self._known_synced = content[_SYNCED_AT:], synced
        return record, synced

    def read_lock_record(self) -> LockRecord | None:
        """Return the lock record, or None if it is unknown, as after a power cut.

        May be called without the write lock.
        """
        return self._unpack_record(
            self._fs.pread(self._record_handle, _RECORD_BYTES, 0)
        )

    def _unpack_record(self, content: bytes) -> LockRecord | None:
        if len(content) < _RECORD_BYTES:
            return None
        boot, structure, end, size_bytes, flags = _RECORD.unpack_from(content)
        pid, mark = _HOLDER.unpack_from(content, _HOLDER_AT)
        is_valid = zlib.crc32(content[: _RECORD.size]) == int.from_bytes(
            content[_RECORD.size : _HOLDER_AT], "big"
        )
        if not is_valid or boot != self._boot or mark not in (_IDLE_MARK, _BUSY_MARK):
            return None
        return LockRecord(
            structure, end, size_bytes, mark == _BUSY_MARK, bool(flags & _DELETED), pid
        )

    def mark_busy(self) -> None:
        """Mark the existing lock record as busy. The caller holds the write lock."""
        # Writes 12 bytes only. The rest of the record is unchanged.
        self._fs.pwrite(self._record_handle, self._busy, _HOLDER_AT)

    def write_lock_record(self, record: LockRecord) -> None:
        """Replace the lock record. The caller holds the write lock."""
        packed = _RECORD.pack(
            self._boot,
            record.structure,
            record.end,
            record.size_bytes,
            _DELETED * record.is_deleted,
        )
        if record.is_busy:
            holder = self._busy
        else:
            holder = self._idle
        content = packed + zlib.crc32(packed).to_bytes(4, "big") + holder
        self._fs.pwrite(self._record_handle, content, 0)
        self._known_record = content, record

    def new_structure_number(self) -> int:
        """Return a structure number that no running process has seen."""
        # Two bits less, so that the number can be counted up within 64 bits.
        return int.from_bytes(self._fs.random_bytes(8), "big") >> 2

    # -- the durable end ---------------------------------------------------------------

    def read_durable_end(self) -> DurableEnd | None:
        """Return the durable end, or None if it is unknown. Needs no lock."""
        # Both slots may be partially written, if one write follows the other.
        for _ in range(_MAX_READS):
            content = self._fs.pread(self._record_handle, _SYNCED_BYTES, _SYNCED_AT)
            newest = self._newest_slot(content)
            if newest is not None:
                return newest.synced
            if len(content) < _SYNCED.size:
                return None
        return None

    def write_durable_end(self, synced: DurableEnd) -> None:
        """Write the durable end to the older slot. The caller holds `publishing`."""
        content = self._fs.pread(self._record_handle, _SYNCED_BYTES, _SYNCED_AT).ljust(
            _SYNCED_BYTES, b"\0"
        )
        newest = self._newest_slot(content)
        number = 1
        slot_position = 0
        if newest is not None:
            number = newest.number + 1
            slot_position = _SYNCED.size - newest.at
        packed = self._packed_slot(number, synced)
        self._fs.pwrite(self._record_handle, packed, _SYNCED_AT + slot_position)
        self._known_synced = (
            content[:slot_position] + packed + content[slot_position + _SYNCED.size :],
            synced,
        )

    def _newest_slot(self, content: bytes) -> _Slot | None:
        """Return the newest valid slot in `content`, or None if neither is valid."""
        newest: _Slot | None = None
        for slot_position in (0, _SYNCED.size):
            slot = content[slot_position : slot_position + _SYNCED.size]
            if len(slot) < _SYNCED.size:
                continue
            mark, boot, number, durable_end, truncations, *latest, flags, crc = (
                _SYNCED.unpack(slot)
            )
            if (
                mark != _SYNCED_MARK
                or boot != self._boot
                or crc != zlib.crc32(slot[:-4])
            ):
                continue
            if newest is None or number > newest.number:
                known = tuple(offset for offset in latest if offset >= 0)
                newest = _Slot(
                    number,
                    slot_position,
                    DurableEnd(durable_end, truncations, known, bool(flags & _FAILED)),
                )
        return newest

    def _packed_slot(self, number: int, synced: DurableEnd) -> bytes:
        flags = _FAILED * synced.has_failed
        latest = (
            *synced.latest,
            *itertools.repeat(-1, _MAX_TRUNCATIONS - len(synced.latest)),
        )
        packed = _SYNCED.pack(
            _SYNCED_MARK,
            self._boot,
            number,
            synced.durable_end,
            synced.truncations,
            *latest,
            flags,
            0,
        )
        return packed[:-4] + zlib.crc32(packed[:-4]).to_bytes(4, "big")
