"""Group commit: threads that wait for an fsync share one.

Rules (docs/crashes.md, sections 2 and 3):
- A sync covers the data that was written before the sync began. The target is read
  first, and then the sync starts. Only waiters at or below the target are released.
- There is no helper thread and no timer. The first waiting thread syncs at once.
  Threads that arrive while the sync runs share the next one.
- A failed sync is never repeated. The log is poisoned, every waiter gets
  DurabilityUnknownError, and the durable end keeps its value.

This module writes no data and does not depend on segments: the log passes it a function
that syncs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Final, NamedTuple

from logcore.errors import DurabilityUnknownError, LogFailedError, StorageWriteError
from logcore.fs import FS

#: Before a sync, the leader yields to other threads so that they can share it. It stops
#: once as many arrived as in recent syncs, or after this many yields without an
#: arrival. We measured 64 threads on a disk that syncs in 0.25 ms: 20 appends share a
#: sync without this wait, and 63 with it, at twice the throughput. A single thread
#: never yields.
_IDLE_CHECKS: Final = 6


class Hooks(NamedTuple):
    """The functions of a log that its GroupCommit calls."""

    #: Returns (bytes, log end offset) written so far.
    written: Callable[[], tuple[int, int]]
    #: Syncs all written data.
    sync: Callable[[], None]
    #: Called with each new durable end.
    moved: Callable[[int], None]
    #: Called once with the cause when the log is poisoned.
    failed: Callable[[BaseException], None]
    #: For a log that other processes write too: called before the durable end moves.
    #: Returns False if another process has truncated the log, so that the end is
    #: invalid.
    publish: Callable[[int], bool] | None = None


class GroupCommit:
    """The durable end of one log, and the threads that wait for it."""

    def __init__(self, fs: FS, path: str, hooks: Hooks, *, durable_end: int) -> None:
        #: All records below this offset are durable. Raised under the mutex by the
        #: thread that leads a sync, and lowered by a thread that holds syncs back. Read
        #: without the mutex: a stale value only costs a call of wait() that returns at
        #: once.
        self.durable_end = durable_end
        #: Number of durable bytes, by the same count as written().
        self.synced_bytes = 0
        #: Number of successful syncs.
        self.syncs = 0
        #: The reason why the log is poisoned, or None. Set once, by the thread that
        #: meets the failure.
        self.failure: LogFailedError | None = None
        # Created now, because there may be no memory later.
        self._write_refused_error = LogFailedError("a write or sync failed", path=path)
        self._fs = fs
        self._path = path
        self._written = hooks.written
        self._sync = hooks.sync
        self._moved = hooks.moved
        self._failed = hooks.failed
        self._publish = hooks.publish
        # The lock is acquired in C, its condition in Python: that would add 0.4 us to
        # an append with durability.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._blocked = 0  # threads in _changed.wait()
        # The thread that syncs or holds syncs back. A thread never waits for itself: an
        # interrupt, between any two instructions, may have left its id here.
        self._leader: int | None = None
        self._arrived = 0  # threads that arrived since the last sync began
        self._expected = 0  # number of threads that recently shared a sync

    def wait(self, target: int) -> None:
        """Block until all records below `target` are durable.

        Also returns if another process has truncated the log in the meantime.

        Raises:
            DurabilityUnknownError: the sync failed.
        """
        this_thread = threading.get_ident()
        try:
            with self._mutex:
                self._arrived += 1
                while (
                    self._leader not in (None, this_thread)
                    and self.durable_end < target
                    and self.failure is None
                ):
                    self._block()
                # Released by the leader. Its sync covered the target, failed, or began
                # too early for the target.
                if self.durable_end >= target:
                    return
                self._check()
                self._leader = this_thread
            # Without the mutex, so that others can join this sync or wait for the next.
            self._gather()
            self._lead_sync()
        finally:
            self._release(this_thread)

    @contextlib.contextmanager
    def held(self, *, failed: bool = False) -> Generator[None, None, None]:
        """Hold syncs back, for work that replaces the file that they would sync.

        With failed=True, this works on a poisoned log too.

        Raises:
            DurabilityUnknownError: the log is poisoned, and failed=False.
        """
        this_thread = threading.get_ident()
        try:
            with self._mutex:
                while self._leader not in (None, this_thread):
                    self._block()
                if not failed:
                    self._check()
                self._leader = this_thread
            yield
        finally:
            self._release(this_thread)

    def advance(self, end: int, written_bytes: int) -> None:
        """Raise the durable end to `end`.

        The caller holds syncs back, and has synced the file.
        """
        self._record_sync(end, written_bytes)

    def learn(self, end: int) -> None:
        """Raise the durable end to an end that another process has synced."""
        with self._mutex:
            self.durable_end = max(self.durable_end, end)
            # The other process does not count our bytes. Their number is known only if
            # no unsynced data is left.
            written_bytes, log_end = self._written()
            if self.durable_end >= log_end:
                self.synced_bytes = written_bytes

    def renew(self, end: int) -> None:
        """Set the durable end after a shared log was reopened."""
        with self._mutex:
            self.durable_end = end
            written_bytes, log_end = self._written()
            if end >= log_end:
                self.synced_bytes = written_bytes

    def set_back(self, end: int) -> None:
        """Lower the durable end after a truncation. The caller holds syncs back."""
        self.durable_end = end
        self.synced_bytes = self._written()[0]

    def poison(self, cause: BaseException) -> None:
        """Make the log refuse writes from now on. Only the first cause is kept."""
        if self.failure is None:
            self._write_refused_error.__cause__ = cause
            self.failure = self._write_refused_error
            self._failed(cause)

    def _check(self) -> None:
        if self.failure is not None:
            raise DurabilityUnknownError(
                "the sync failed that this call waited for", path=self._path
            ) from self.failure

    def _block(self) -> None:
        self._blocked += 1
        try:
            self._changed.wait()
        finally:
            self._blocked -= 1

    def _release(self, this_thread: int) -> None:
        with self._mutex:
            if self._leader == this_thread:
                self._leader = None
                if self._blocked:
                    self._changed.notify_all()

    def _gather(self) -> None:
        """Let threads that the last sync released append again, while more arrive."""
        idle = 0
        seen = self._arrived
        while seen < self._expected and idle < _IDLE_CHECKS:
            self._fs.yield_thread()
            arrived = self._arrived
            if arrived == seen:
                idle = idle + 1
            else:
                idle = 0
            seen = arrived
        # Decreases slowly, so that one sync with few threads does not end the gathering
        # for the next syncs.
        self._expected = max(seen, self._expected * 7 // 8)
        self._arrived = 0

    def _lead_sync(self) -> None:
        """Sync in the leader thread, and raise the durable end.

        Raises:
            DurabilityUnknownError: the sync failed.
        """
        # Read before the sync begins, because the sync need not cover later writes.
        written_bytes, target = self._written()
        try:
            self._sync()
        except StorageWriteError as error:
            self.poison(error)
            raise DurabilityUnknownError(
                "a sync failed: the written records may not be on disk",
                path=self._path,
            ) from error
        except BaseException as error:
            # Interrupted: the result is unknown, and another sync would not reveal it.
            self.poison(error)
            raise
        self._record_sync(target, written_bytes)

    def _record_sync(self, end: int, written_bytes: int) -> None:
        self.syncs += 1
        if self._publish is not None and not self._publish(end):
            return
        with self._mutex:
            self.synced_bytes = max(self.synced_bytes, written_bytes)
            is_news = end > self.durable_end
            if is_news:
                self.durable_end = end
        if is_news:
            self._moved(end)
