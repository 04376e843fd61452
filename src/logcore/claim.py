"""The right to write to a log directory, shared by the members of one process.

Rules:
- One process at a time writes to a directory, and holds Kafka's lock. Its members
  (logs, named by their directories, and a LogDir) share the lock and the state of the
  directory.
- The last member that leaves restores the marker of a clean shutdown
  (.kafka_cleanshutdown), if all members were closed without errors.
- Several processes may claim a directory if all of them request sharing. Files that
  belong to no single partition are then changed under the directory's lock, and one of
  the processes runs maintenance. The marker is not restored, because no process can
  detect whether the others were closed without errors.

acquire.py acquires the lock. This module opens no log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import cast

import attrs

from logcore.errors import DiskFullError, LogcoreError, ResourceError
from logcore.fs import FS, Lock, SharedFS
from logcore.fs.byte_lock import MAINTENANCE_BYTE, ByteLock, Presence
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key, OffsetCheckpoints
from logcore.metadata.trusted_clock import SAVE_AT_CLOSE_MS, TrustedClock


@attrs.define(eq=False)
class Common:
    """The state of a directory that all its members share.

    It exists while this process holds the directory's lock. Fields are written under
    the mutex of the lock. has_failed and is_unfinished are also written without it, but
    then they are only set to True.
    """

    #: Whether no file needed a check when the lock was acquired.
    was_clean: bool
    checkpoints: OffsetCheckpoints
    clock: TrustedClock
    #: Whether a member was not closed without errors.
    has_failed: bool = False
    #: Whether there may be staged writes to roll forward.
    is_unfinished: bool = True
    #: The lock of the directory among processes; None if no other process writes to it.
    directory_lock: ByteLock | None = None
    #: The lock for decisions about transactions, or None like `directory_lock`.
    transactions: ByteLock | None = None
    #: Shows whether other processes have the directory open, or None like `directory_lock`.
    presence: Presence | None = None
    #: Whether this process runs maintenance, in a directory that several processes
    #: share.
    runs_maintenance: bool = False
    #: By member: the reason why staged writes could not be rolled forward.
    blocked: Mapping[str, LogcoreError] = attrs.Factory(dict)
    #: The recovery points of closing members, while a LogDir collects them.
    closing: dict[Key, int | None] | None = None


class Claim:
    """The right of one member to write to its directory, from claim_directory() until
    release().
    """

    def __init__(self, fs: FS, directory: str, lock: Lock, common: Common) -> None:
        self.directory = directory
        self.checkpoints = common.checkpoints
        self.clock = common.clock
        self._mutex = lock.shared.mutex
        self._fs = fs
        self._lock = lock
        self._common = common
        #: Whether other processes may write to the directory too.
        self.is_shared = common.directory_lock is not None

    @property
    def lock_handle(self) -> int:
        """The handle of the lock file, for the locks of a shared directory."""
        return self._lock.handle

    def changing(self) -> AbstractContextManager[None]:
        """Prevent other processes from changing files of the whole directory.

        These are the files that belong to no single partition. Reentrant.

        Raises:
            LogLockedError: another process has held the lock for too long.
        """
        return _held(self._common.directory_lock)

    def deciding(self) -> AbstractContextManager[None]:
        """Prevent other processes from deciding about transactions.

        Raises:
            LogLockedError: another process has held the lock for too long.
        """
        return _held(self._common.transactions)

    @contextlib.contextmanager
    def alone(self) -> Generator[bool, None, None]:
        """Yield whether no other process has the directory open.

        If so, none can open it before the end of the block.
        """
        presence = self._common.presence
        if presence is None:
            yield True
            return
        with presence.alone() as is_alone:
            yield is_alone

    def runs_maintenance(self) -> bool:
        """Return whether this process runs retention, compaction and other maintenance.

        Of several processes, the first that calls this does.
        """
        common = self._common
        if common.directory_lock is None:
            return True
        if not common.runs_maintenance:
            common.runs_maintenance = cast(SharedFS, self._fs).lock_byte(
                self._lock.handle, MAINTENANCE_BYTE
            )
        return common.runs_maintenance

    @property
    def is_clean(self) -> bool:
        """Whether no file in the directory needs a check, and no member has failed."""
        return self._common.was_clean and not self._common.has_failed

    def call_clean(self) -> None:
        """Mark the directory as clean, after every log in it was checked."""
        with self._mutex:
            self._common.was_clean = True

    def fail(self) -> None:
        """Record that a member failed: the clean marker will not be written."""
        self._common.has_failed = True

    def expect_unfinished(self) -> None:
        """Record that a staged write failed: the next claim rolls it forward."""
        self._common.is_unfinished = True

    @contextlib.contextmanager
    def batched_recovery_points(self) -> Generator[dict[Key, int | None], None, None]:
        """Collect the recovery points of members that close inside the block.

        The caller writes the yielded mapping once for all of them.
        """
        gathered: dict[Key, int | None] = {}
        with self._mutex:
            self._common.closing = gathered
        try:
            yield gathered
        finally:
            with self._mutex:
                self._common.closing = None

    def defer_recovery_point(self, key: Key, recovery_point: int) -> bool:
        """Give a recovery point to the member that collects them.

        Returns False if no member does.
        """
        with self._mutex:
            closing = self._common.closing
            if closing is None:
                return False
            closing[key] = recovery_point
            return True

    def leave(self) -> None:
        """Save the clock and restore the clean marker, if this is the last member.

        The marker is only restored if all members were closed without errors.
        """
        with self._mutex:
            if self._lock.is_last:
                self.clock.now_ms(self._fs.now_ms())
                self.clock.save(max_age_ms=SAVE_AT_CLOSE_MS)
            if self._lock.is_last and self.is_clean and not self.is_shared:
                # If there is no space for the marker, the next opening only checks more.
                # All records are durable.
                with contextlib.suppress(DiskFullError, ResourceError):
                    content = b'{"version":0,"brokerEpoch":-1}'
                    checkpoint.write(
                        self._fs, self.directory, checkpoint.CLEAN_SHUTDOWN, content
                    )

    def release(self) -> None:
        """Release the member; the last one releases the lock. Needs no memory."""
        self._lock.release()


def _held(lock: ByteLock | None) -> AbstractContextManager[None]:
    """Hold a lock of a shared directory. Other directories have none."""
    return contextlib.nullcontext() if lock is None else lock.held()
