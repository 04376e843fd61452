"""Lock of a log that several processes write: excludes threads, then processes.

A thread that acquires it holds the shared write lock of shared_lock.py. By then this process
has caught up with the partition:

    the lock record shows     this process
    no change                 continues
    a larger end              reads the batch headers that others appended
    another structure         reopens the partition, trusting it up to the recorded end
    busy, or no valid record  recovers the partition: the previous holder crashed
    deleted, or a failed sync refuses writes

Rules:
- The partition is changed only by the holder. At the end, the holder leaves the lock
  record that the next holder needs. If the holder dies, or fails half way, the record
  remains "busy".
- The record names another structure whenever anything except the end has changed:
  segments, the log start, leader epochs, the partition metadata. The change is found by
  comparison, so no operation can forget to report it.
- The durable end is written by the process that synced, without the write lock; see
  shared_lock.py.

writer.py changes the log. It uses this module as its lock, and to publish the durable
end to other processes.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Final, Protocol

import attrs

from logcore.config import Durability
from logcore.errors import (
    DiskFullError,
    DurabilityUnknownError,
    LogClosedError,
    LogLockedError,
    LogNotFoundError,
    StorageWriteError,
)
from logcore.fs import FS
from logcore.metadata.checkpoint import Key
from logcore.partition.group_commit import GroupCommit
from logcore.partition.opening import Opened
from logcore.partition.shared_lock import DurableEnd, LockRecord, WriteLock
from logcore.partition.state import PartitionState
from logcore.partition.writer_fields import Metadata
from logcore.segment import ActiveSegment

#: No lock record has its structure number, so the next acquire() reopens the partition.
_UNKNOWN: Final = LockRecord(-1, 0, 0)

#: Reopens the partition. The argument is the end up to which it is trusted, or None to
#: run recovery as after a crash.
Open = Callable[[int | None], Opened]


class SharedLogWriter(Protocol):
    """The part of the writer (writer.py) that this module uses and brings up to date.

    All methods except write_visible_end() are called with the log lock held.
    """

    state: PartitionState
    active: ActiveSegment
    commit: GroupCommit
    metadata: Metadata
    durability: Durability
    has_unfinished_write: bool

    def sync_from_peer_locked(self, end: int, size_bytes: int) -> None: ...
    def reload_locked(
        self, opened: Opened, durable_end: int, cut_offset: int | None
    ) -> None: ...
    def finish_opening_locked(self, opened: Opened) -> None: ...
    def write_visible_end(self, end: int) -> None: ...


class SharedLock:
    """The lock of a log that several processes write; see the top of this module.

    Used like a threading.Lock. open_log() creates it and enters it with opening().
    """

    def __init__(self, fs: FS, handle: int, key: Key, path: str) -> None:
        """Create the lock; no process is excluded yet.

        `handle` is the lock file of the log directory. `path` is the partition's
        directory, which must exist.
        """
        self._fs = fs
        self._forks = fs.forks
        self._path = path
        # Reentrant only to detect an interrupted release(): no thread acquires it
        # twice.
        self._mutex: Any = threading.RLock()
        self._is_lock_held = False
        # The frame that holds the lock or waits for it, by thread. Each thread writes
        # its own entry only, before it acquires the mutex and after it releases it.
        self._frames: dict[int, FrameType] = {}
        self._write_lock = WriteLock(fs, handle, key, path)
        self._has_write_lock = False  # under the mutex
        #: Whether the log was trusted when it was opened, because other processes had
        #: it open.
        self.is_end_trusted = False
        # The state that this process has read or is about to record; guarded by the
        # mutex.
        self._record = LockRecord(0, 0, 0)
        self._synced: DurableEnd | None = (
            None  # value at the last read; guarded by the mutex
        )
        # The objects that the structure number represents; guarded by the mutex.
        self._shape: tuple[Any, ...] = ()
        self._truncations = (
            0  # value at the last read; guarded by publishing and the mutex
        )
        self._visible_end_lock = threading.Lock()
        self._writer: SharedLogWriter | None = None
        self._open: Open | None = None

    # -- as a lock ---------------------------------------------------------------------

    def __enter__(self) -> bool:
        return self._acquire(True, _holder_above(inspect.currentframe()))

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock, and catch up with the changes of other processes.

        With blocking=False, return False if another thread or process holds it.

        Raises:
            LogLockedError: another process has held the write lock for too long, or
                this thread holds it: a signal handler or a finalizer interrupted an
                append and appends to the same log.
            StorageReadError, CorruptLogError and others of open_partition(): the state
                could not be brought up to date.
        """
        return self._acquire(blocking, _holder_above(inspect.currentframe()))

    def _acquire(self, blocking: bool, holder: FrameType) -> bool:
        thread = threading.get_ident()
        former = self._frames.get(thread)
        if former is not None:
            # The earlier change is unfinished, and another inside it would corrupt it.
            if _is_above(former, inspect.currentframe()):
                raise LogLockedError(
                    "this thread is changing the log already; "
                    "a signal handler or finalizer cannot write to it",
                    path=self._path,
                )
            # The earlier frame has ended: Ctrl-C came at the entry of __exit__().
            if self._mutex._is_owned():
                self.release()
        self._frames[thread] = holder
        # Threads first, then processes, because record locks do not exclude threads.
        if not self._mutex.acquire(blocking):
            self._frames.pop(thread, None)
            return False
        try:
            self._is_lock_held = True
            if self._is_over():
                return True
            if not self._write_lock.acquire(waits=blocking):
                self._release()
                return False
            self._has_write_lock = True
            # The call returns the same objects while the file is unchanged, so the
            # usual case costs one read.
            record, synced = self._write_lock.read_records()
            if record is not self._record or synced is not self._synced:
                self._catch_up(record, synced)
            # From here on, a crash leaves "busy". A log that refuses writes is not
            # marked, because it will not be changed.
            if not self._is_over():
                self._write_lock.mark_busy()
            return True
        except BaseException:
            self._release()
            raise

    def release(self) -> None:
        """Record the present state for the next holder, and release the lock."""
        try:
            if self._has_write_lock:
                self.write_record()
        finally:
            self._release()

    def locked(self) -> bool:
        """Return whether a thread of this process holds the lock."""
        return self._is_lock_held

    @property
    def has_write_lock(self) -> bool:
        """Whether this process may change the partition. The caller holds the lock."""
        return self._has_write_lock

    def _release(self) -> None:
        try:
            if self._has_write_lock:
                self._has_write_lock = False
                self._write_lock.release()
        finally:
            self._is_lock_held = False
            self._mutex.release()
            self._frames.pop(threading.get_ident(), None)

    def _is_over(self) -> bool:
        """Return whether the log is closed, refuses writes or is a parent process's.

        In each case, this process will not change the partition.
        """
        writer = self._writer
        assert writer is not None, "entered before the log was opened"
        is_own_process = self._fs.forks == self._forks
        return (
            writer.state.is_closed
            or writer.commit.failure is not None
            or not is_own_process
        )

    # -- opening and closing -----------------------------------------------------------

    @contextlib.contextmanager
    def opening(
        self, *, is_alone: bool, check: Callable[[], object]
    ) -> Generator[int | None]:
        """Hold the lock while the log is opened; the caller calls attach() inside.

        Yields the end up to which the partition is trusted, or None to run recovery.
        `is_alone`: no other process has the directory open, so the lock record is
        stale. `check` is called before anything is changed, if others have the
        partition open. An exception that it raises ends the attempt.
        """
        with self._mutex:
            self._write_lock.acquire()
            try:
                self._is_lock_held = True
                record = self._write_lock.read_lock_record()
                synced = self._write_lock.read_durable_end()
                if record is not None and record.is_deleted and not is_alone:
                    raise LogNotFoundError(
                        "another process is deleting the partition", path=self._path
                    )
                if record is not None and not is_alone:
                    check()
                # Recover unless running processes keep the log in order. After a power
                # cut, a crash of a holder or a failed sync, they do not. A record whose
                # processes have all ended is not trusted either.
                if (
                    record is None
                    or synced is None
                    or is_alone
                    or record.is_busy
                    or synced.has_failed
                ):
                    self._record = LockRecord(
                        self._write_lock.new_structure_number(), 0, 0, is_busy=True
                    )
                    trusted_end = None
                else:
                    self._record = record._replace(is_busy=True)
                    trusted_end = record.end
                self._write_lock.write_lock_record(self._record)
                yield trusted_end
                self.write_record()
            finally:
                self._is_lock_held = False
                self._write_lock.release()

    def attach(
        self,
        writer: SharedLogWriter,
        opened: Opened,
        open_again: Open,
        *,
        trusted_end: int | None,
    ) -> None:
        """Bind the lock to the writer of the log that was just opened.

        The writer has not changed anything yet. `trusted_end` is the value that
        opening() yielded.
        """
        self._writer = writer
        self._open = open_again
        with self._write_lock.publishing.held():
            synced = self._write_durable_end(opened, trusted_end)
            self._truncations = synced.truncations
        writer.commit.renew(synced.durable_end)
        if writer.durability.waits:
            writer.state.publish(visible=synced.durable_end)
        self.is_end_trusted = trusted_end is not None
        self._shape = self._present_shape()

    def _write_durable_end(self, opened: Opened, trusted_end: int | None) -> DurableEnd:
        """Return the durable end after opening, and write it if it changed.

        The caller holds `publishing`. After a recovery, the whole log is durable. A
        sync that began before the recovery does not count, because the file may have
        been replaced, or records that were not durable truncated.
        """
        synced = self._write_lock.read_durable_end()
        if trusted_end is not None and synced is not None:
            return synced
        if synced is None:
            durable_end = opened.end
            if trusted_end is not None:  # other processes appended, but synced nothing
                durable_end = opened.log_start
            synced = DurableEnd(durable_end, self._write_lock.new_structure_number())
        else:
            synced = attrs.evolve(
                synced.truncated(opened.end), durable_end=opened.end, has_failed=False
            )
        self._write_lock.write_durable_end(synced)
        return synced

    def write_record(self) -> None:
        """Write the lock record for the next holder. The caller holds the lock."""
        writer = self._writer
        assert writer is not None, "attach() was not called"
        # After an error half way, the record remains "busy" and the next holder
        # recovers.
        failure = writer.commit.failure
        has_failed = failure is not None and not isinstance(
            failure.__cause__, LogClosedError
        )
        if writer.has_unfinished_write or has_failed:
            return
        # Each part is replaced when it changes: identical objects mean the same
        # structure.
        shape = self._present_shape()
        structure = self._record.structure
        if not all(map(operator.is_, shape, self._shape)):
            structure += 1
        self._shape = shape
        self._record = LockRecord(structure, writer.state.end, writer.active.size_bytes)
        # If the record cannot be written, it remains "busy": the next holder recovers,
        # and finds all records.
        with contextlib.suppress(DiskFullError, StorageWriteError):
            self._write_lock.write_lock_record(self._record)

    def release_write_lock(self) -> None:
        """Record the state and release the write lock, but not the mutex.

        Called when the log is closed, because the lock file may be closed next.
        """
        try:
            if self._has_write_lock:
                self.write_record()
        finally:
            self._write_lock.release_rewrite()
            if self._has_write_lock:
                self._has_write_lock = False
                self._write_lock.release()

    def acquire_rewrite(self) -> bool:
        """Acquire the right to compact the partition, separately from the write lock.

        Returns False if another process has that right.
        """
        return self._write_lock.acquire_rewrite()

    def release_rewrite(self) -> None:
        """Release the right that acquire_rewrite() acquired."""
        self._write_lock.release_rewrite()

    def _present_shape(self) -> tuple[Any, ...]:
        """Return the parts that others can only learn by reopening the partition.

        Each part is an object that is replaced as a whole and never changed.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        state = writer.state
        return (
            state.segments,
            writer.active,
            writer.metadata,
            state.gaps.persisted,
            state.log_start,
        )

    # -- changes by other processes ----------------------------------------------------

    def follow(self) -> bool:
        """Catch up with other processes, for readers; True if the visible end moved.

        Acquires the write lock only if there is a change. Raises the errors of
        acquire().
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        before = writer.state.visible
        if self.is_behind():
            with self:
                pass
        return writer.state.visible != before

    def is_behind(self) -> bool:
        """Return whether other processes made changes that are not loaded yet.

        Costs two small reads, and needs no lock.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        if self._is_over():
            return False
        record = self._write_lock.read_lock_record()
        synced = self._write_lock.read_durable_end()
        known = self._record
        # The record of a holder that is still busy does not differ: it has no news yet.
        if (
            record is None
            or record.is_deleted
            or (record.structure, record.end) != (known.structure, known.end)
        ):
            return True
        return (
            synced is None
            or synced.durable_end > writer.commit.durable_end
            or synced.truncations != self._truncations
        )

    def _catch_up(self, record: LockRecord | None, synced: DurableEnd | None) -> None:
        """Load the changes of other processes. The caller holds the write lock.

        Raises:
            StorageReadError, CorruptLogError and others of open_partition().
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        if record is not None and record.is_deleted:
            writer.commit.poison(
                LogNotFoundError(
                    "another process has deleted the partition", path=self._path
                )
            )
        elif synced is not None and synced.has_failed:
            writer.commit.poison(
                StorageWriteError("a sync failed in another process", path=self._path)
            )
        elif record is None or synced is None or record.is_busy:
            self._record = _UNKNOWN
            self._renew(None)
            self._record = LockRecord(self._write_lock.new_structure_number(), 0, 0)
        elif (
            record.structure != self._record.structure
            or synced.truncations != self._truncations
        ):
            self._record = _UNKNOWN
            self._renew(record.end)
            self._record = record
        else:
            if record.end != writer.state.end:
                self._record = _UNKNOWN  # if this fails half way, the next try reopens
                writer.sync_from_peer_locked(record.end, record.size_bytes)
            self._record = record
            if synced.durable_end > writer.commit.durable_end:
                writer.commit.learn(synced.durable_end)
            self._synced = synced
            visible = writer.state.end
            if writer.durability.waits:
                visible = writer.commit.durable_end
            self.raise_visible_end(visible)

    def _renew(self, trusted_end: int | None) -> None:
        """Reopen the partition: the state is stale, or it needs recovery."""
        writer = self._writer
        assert writer is not None and self._open is not None, "the log is open"
        # Syncs of this process are held back: they could sync a file that is replaced.
        with writer.commit.held():
            opened = self._open(trusted_end)
            with self._write_lock.publishing.held():
                synced = self._write_durable_end(opened, trusted_end)
                cut_offset = synced.lowest_truncation_since(
                    self._truncations, opened.log_start
                )
                self._truncations = synced.truncations
                writer.reload_locked(opened, synced.durable_end, cut_offset)
        self._shape = self._present_shape()
        writer.finish_opening_locked(opened)

    # -- the durable end ---------------------------------------------------------------

    def raise_visible_end(self, end: int) -> None:
        """Raise the visible end to `end`.

        Two threads may call this with different ends; the larger one wins.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        with self._visible_end_lock:
            if end > writer.state.visible:
                writer.state.raise_visible_end(end)

    def publish(self, end: int) -> bool:
        """Record for the other processes that all records below `end` are durable.

        Returns False if another process has truncated the log since this process last
        read the record, or if a sync failed in another process.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        with self._write_lock.publishing.held():
            synced = self._write_lock.read_durable_end()
            if synced is None or synced.truncations != self._truncations:
                return False
            if synced.has_failed:
                writer.commit.poison(
                    StorageWriteError(
                        "a sync failed in another process", path=self._path
                    )
                )
                return False
            if end > synced.durable_end:
                # If the write fails, others read the new end after the next sync.
                with contextlib.suppress(DiskFullError, StorageWriteError):
                    self._write_lock.write_durable_end(
                        attrs.evolve(synced, durable_end=end)
                    )
                    writer.write_visible_end(end)
        return True

    def record_truncation(self, offset: int) -> None:
        """Record a truncation at `offset` before it happens. The caller holds the lock.

        Records above the offset are no longer durable, and a sync that began earlier
        can no longer report them as durable.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        with self._write_lock.publishing.held():
            synced = self._write_lock.read_durable_end() or DurableEnd(
                offset, self._truncations
            )
            self._truncations = synced.truncations + 1
            self._write_lock.write_durable_end(synced.truncated(offset))
            writer.write_visible_end(min(writer.state.visible, offset))

    def record_failure(self) -> None:
        """Record for the other processes that a write or a sync failed.

        After that, none of them may report a record as durable.
        """
        with self._write_lock.publishing.held():
            synced = self._write_lock.read_durable_end()
            if synced is not None:
                with contextlib.suppress(DiskFullError, StorageWriteError):
                    self._write_lock.write_durable_end(
                        attrs.evolve(synced, has_failed=True)
                    )

    def wait(self, last: int) -> None:
        """Block until this process's record at offset `last` is durable.

        Raises:
            DurabilityUnknownError: the log was truncated below it, or a sync failed.
        """
        writer = self._writer
        assert writer is not None, "the log is open"
        truncations = writer.state.truncations
        known = len(truncations)
        while writer.commit.durable_end <= last:
            # Acquiring the lock loads truncations and durable ends of other processes.
            with self:
                has_failed = writer.commit.failure is not None
                # The truncation may have been loaded by another thread, before this
                # wait.
                is_truncated = writer.state.end <= last or any(
                    offset <= last for offset in truncations[known:]
                )
            if has_failed or is_truncated:
                raise DurabilityUnknownError(
                    "the log was truncated or has failed while a record waited for the disk",
                    path=self._path,
                )
            if writer.commit.durable_end <= last:
                writer.commit.wait(last + 1)


def announce_deleted(fs: FS, handle: int, key: Key, path: str) -> None:
    """Mark a partition as about to be deleted, for processes that have it open.

    Each of them finds the mark when it next acquires the lock. `handle` is the lock
    file of the log directory.

    Raises:
        LogLockedError: another process has held the write lock for too long.
    """
    lock = WriteLock(fs, handle, key, path)
    lock.acquire()
    try:
        record = lock.read_lock_record() or LockRecord(
            lock.new_structure_number(), 0, 0
        )
        lock.write_lock_record(record._replace(is_busy=False, is_deleted=True))
    finally:
        lock.release()


# A function that kept its own frame in a variable would leave a reference cycle.


def _holder_above(frame: FrameType | None) -> FrameType:
    """Return the frame whose `with` block will hold the lock that `frame` acquires.

    A generator that contextlib entered is suspended, and on no stack, while the block
    of its caller runs. The result is then the frame of that caller.
    """
    assert frame is not None and frame.f_back is not None, "nothing called the lock"
    holder = frame.f_back
    while True:
        is_generator = holder.f_code.co_flags & inspect.CO_GENERATOR
        is_contextlib = holder.f_code.co_filename == contextlib.__file__
        if not (is_generator or is_contextlib):  # the usual case
            return holder
        above = holder.f_back
        if above is None:
            return holder
        if is_generator and above.f_code.co_filename != contextlib.__file__:
            return holder
        holder = above


def _is_above(frame: FrameType, start: FrameType | None) -> bool:
    """Return whether `frame` is `start` or one of its callers."""
    while start is not None and start is not frame:
        start = start.f_back
    return start is not None
