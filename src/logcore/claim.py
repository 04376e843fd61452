"""The right to write to a log directory, which the members of one process share.

Rules:
- One process at a time writes to a directory; it holds Kafka's lock. Members (logs by the names of their directories,
  a LogDir) share it, and what is known of the directory.
- The last member that leaves puts the marker of a clean shutdown (.kafka_cleanshutdown) back, if all of them closed
  well.
- Several processes may claim a directory where each of them says so. What belongs to no single partition is then
  changed under the directory's turn; one of them does the work that is due by time; and no marker is put back, because
  none of them knows that the others closed well.

claiming.py takes the lock. This module opens no log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import cast

import attrs

from logcore import checkpoint
from logcore.bytelocks import UPKEEP_BYTE, ByteLock, Presence
from logcore.checkpoint import Key, OffsetCheckpoints
from logcore.errors import DiskFullError, LogcoreError, ResourceError
from logcore.fs import FS, Lock, SharedFS
from logcore.trustedclock import SAVE_AT_CLOSE_MS, TrustedClock


@attrs.define(eq=False)
class Common:
    """The facts of a directory that all its members share. Lives as long as this process holds its lock.

    Written under the mutex of the lock; has_failed and is_unfinished also without, but then only ever set to True.
    """

    was_clean: bool  # nothing that was in it when the lock was taken needs checking
    checkpoints: OffsetCheckpoints
    clock: TrustedClock
    has_failed: bool = False  # a member did not close well
    is_unfinished: bool = True  # there may be staged writes to roll forward
    turn: ByteLock | None = None  # of the directory, where other processes write to it too
    transactions: ByteLock | None = None  # who decides about them, the same
    presence: Presence | None = None  # the same
    takes_care: bool = False  # of what is due by time, where other processes could
    blocked: Mapping[str, LogcoreError] = attrs.Factory(dict)  # by member: why that was not possible
    closing: dict[Key, int | None] | None = None  # recovery points of members that close, while a LogDir gathers them


class Claim:
    """The right of one member to write to its directory, from claim_directory() until release()."""

    def __init__(self, fs: FS, directory: str, lock: Lock, common: Common) -> None:
        self.directory = directory
        self.checkpoints = common.checkpoints
        self.clock = common.clock
        self._mutex = lock.shared.mutex
        self._fs = fs
        self._lock = lock
        self._common = common

    @property
    def is_shared(self) -> bool:
        """Whether other processes may write to the directory too."""
        return self._common.turn is not None

    @property
    def lock_handle(self) -> int:
        """Of the lock file, for the turns of a shared directory."""
        return self._lock.handle

    @contextlib.contextmanager
    def changing(self) -> Generator[None, None, None]:
        """Keeps other processes from changing what belongs to no single partition. Reentrant. Raises LogLockedError."""
        turn = self._common.turn
        if turn is None:
            yield
            return
        with turn.held():
            yield

    @contextlib.contextmanager
    def deciding(self) -> Generator[None, None, None]:
        """Keeps other processes from deciding about transactions. Raises LogLockedError."""
        turn = self._common.transactions
        if turn is None:
            yield
            return
        with turn.held():
            yield

    @contextlib.contextmanager
    def alone(self) -> Generator[bool, None, None]:
        """Whether no other process has the directory open; then none can open it before the end of the block."""
        presence = self._common.presence
        if presence is None:
            yield True
            return
        with presence.alone() as is_alone:
            yield is_alone

    def takes_care(self) -> bool:
        """Whether retention, compaction and the like are this process's to do: of several, the first that asks."""
        common = self._common
        if common.turn is None:
            return True
        if not common.takes_care:
            common.takes_care = cast(SharedFS, self._fs).lock_byte(self._lock.handle, UPKEEP_BYTE)
        return common.takes_care

    @property
    def is_clean(self) -> bool:
        """Whether nothing in the directory needs checking, and no member has failed since."""
        return self._common.was_clean and not self._common.has_failed

    def call_clean(self) -> None:
        """Every log in the directory was checked."""
        with self._mutex:
            self._common.was_clean = True

    def fail(self) -> None:
        """A member may not be left as clean: no marker is written when the last one leaves."""
        self._common.has_failed = True

    def expect_unfinished(self) -> None:
        """Staged writes failed half way: the next claim of the directory rolls them forward."""
        self._common.is_unfinished = True

    @contextlib.contextmanager
    def gathering(self) -> Generator[dict[Key, int | None], None, None]:
        """Members that close meanwhile leave their recovery points in the mapping, to be written once for all."""
        gathered: dict[Key, int | None] = {}
        with self._mutex:
            self._common.closing = gathered
        try:
            yield gathered
        finally:
            with self._mutex:
                self._common.closing = None

    def hand_over(self, key: Key, recovery_point: int) -> bool:
        """Leaves a recovery point to the member that gathers them; False when none does."""
        with self._mutex:
            closing = self._common.closing
            if closing is None:
                return False
            closing[key] = recovery_point
            return True

    def leave(self) -> None:
        """For the last member: saves the clock, and puts the marker of a clean shutdown back if all closed well."""
        with self._mutex:
            if self._lock.is_last:
                self.clock.now_ms(self._fs.now_ms())
                self.clock.save(max_age_ms=SAVE_AT_CLOSE_MS)
            if self._lock.is_last and self.is_clean and not self.is_shared:
                # Without room for it the next opening checks more; all records are on disk all the same.
                with contextlib.suppress(DiskFullError, ResourceError):
                    content = b'{"version":0,"brokerEpoch":-1}'
                    checkpoint.write(self._fs, self.directory, checkpoint.CLEAN_SHUTDOWN, content)

    def release(self) -> None:
        """Gives the member up; the last one gives up the lock. Needs no memory."""
        self._lock.release()
