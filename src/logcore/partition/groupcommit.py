"""Group commit: threads that wait for the disk share its syncs.

Rules (docs/crashes.md, sections 2 and 3):
- A sync covers what was written before it began: the target is read first, then the disk is asked. Only waiters at or
  below the target are released.
- No helper thread and no timer. The first to wait syncs at once; those who come meanwhile share the next sync.
- A sync that failed is never tried again: the log is poisoned, every waiter gets DurabilityUnknownError, and the
  durable end stays where it was.

This module does not write, and does not know what a segment is: it is given a function that syncs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Final, NamedTuple

from logcore.errors import DurabilityUnknownError, LogFailedError, StorageWriteError
from logcore.fs import FS

#: A leader lets others run, to share its sync, until as many came as lately, or this many looks in a row found no
#: other thread.
#: 64 threads on a disk that syncs in 0.25 ms: without it 20 appends share a sync, with it 63, and twice as many are
#: appended in a second. One thread alone never looks.
_IDLE_LOOKS: Final = 6


class Hooks(NamedTuple):
    """The functions of a log that its GroupCommit calls.

    written(): (bytes, log end) written so far. sync(): syncs all of it. moved(end): called with each new durable end.
    failed(cause): called once, when the log is poisoned. publish(end): for a log that other processes write too, called
    before the durable end moves; False when one of them has cut the log meanwhile, so that the end is no longer valid.
    """

    written: Callable[[], tuple[int, int]]
    sync: Callable[[], None]
    moved: Callable[[int], None]
    failed: Callable[[BaseException], None]
    publish: Callable[[int], bool] | None = None


class GroupCommit:
    """The durable end of one log, and who waits for it to move.

    durable_end: all offsets below it are on disk. synced_bytes: bytes ever written that are, by the same count as
    written(). syncs: how many syncs succeeded. failure: why the log is poisoned, else None.
    """

    def __init__(self, fs: FS, path: str, hooks: Hooks, *, durable_end: int) -> None:
        # Moved up under the mutex by the thread that leads a sync, and set back by one that keeps syncs away. Read
        # without it: an old value costs its reader a call of wait() that returns at once.
        self.durable_end = durable_end
        self.synced_bytes = 0
        self.syncs = 0
        self.failure: LogFailedError | None = None  # set once, by whichever thread meets the failure
        self._refusal = LogFailedError("a write or sync failed", path=path)  # made now: later there may be no memory
        self._fs = fs
        self._path = path
        self._written = hooks.written
        self._sync = hooks.sync
        self._moved = hooks.moved
        self._failed = hooks.failed
        self._publish = hooks.publish
        # The lock itself is entered in C, the condition around it in Python: 0.4 us of an append to disk.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._blocked = 0  # threads in _changed.wait()
        # The thread that syncs, or keeps syncs away. A thread never waits for itself: an interrupt may have left its
        # name here, between any two instructions.
        self._leader: int | None = None
        self._arrived = 0  # threads that came since the last sync began
        self._expected = 0  # how many shared a sync lately

    def wait(self, target: int) -> None:
        """Returns when all offsets below target are on disk, or another process has cut the log meanwhile. Raises
        DurabilityUnknownError when the sync fails.
        """
        me = threading.get_ident()
        try:
            with self._mutex:
                self._arrived += 1
                while self._leader not in (None, me) and self.durable_end < target and self.failure is None:
                    self._block()
                # Released by the leader: its sync covered the target, or failed, or began too early for it.
                if self.durable_end >= target:
                    return
                self._check()
                self._leader = me
            # Outside the mutex, so that others come and share this sync or wait for the next.
            self._gather()
            self._lead()
        finally:
            self._release(me)

    @contextlib.contextmanager
    def held(self, *, failed: bool = False) -> Generator[None, None, None]:
        """Keeps syncs away, for work that replaces the file they would sync. failed: also of a poisoned log."""
        me = threading.get_ident()
        try:
            with self._mutex:
                while self._leader not in (None, me):
                    self._block()
                if not failed:
                    self._check()
                self._leader = me
            yield
        finally:
            self._release(me)

    def advance(self, end: int, written_bytes: int) -> None:
        """Notes that all below end is on disk; for a caller that keeps syncs away and has synced the file."""
        self._note(end, written_bytes)

    def learn(self, end: int) -> None:
        """Another process says that all below end is on disk."""
        with self._mutex:
            self.durable_end = max(self.durable_end, end)
            # The other process counts no bytes for us: only when nothing is left unsynced is their number known.
            written_bytes, log_end = self._written()
            if self.durable_end >= log_end:
                self.synced_bytes = written_bytes

    def renew(self, end: int) -> None:
        """The log was opened again, where other processes write it too: all below end is on disk."""
        with self._mutex:
            self.durable_end = end
            written_bytes, log_end = self._written()
            if end >= log_end:
                self.synced_bytes = written_bytes

    def set_back(self, end: int) -> None:
        """Moves the durable end back, after a truncation; for the caller that holds syncs away."""
        self.durable_end = end
        self.synced_bytes = self._written()[0]

    def poison(self, cause: BaseException) -> None:
        """Makes the log refuse writes from now on; only the first cause counts."""
        if self.failure is None:
            self._refusal.__cause__ = cause
            self.failure = self._refusal
            self._failed(cause)

    def _check(self) -> None:
        if self.failure is not None:
            raise DurabilityUnknownError("the sync failed that this call waited for", path=self._path) from self.failure

    def _block(self) -> None:
        self._blocked += 1
        try:
            self._changed.wait()
        finally:
            self._blocked -= 1

    def _release(self, me: int) -> None:
        with self._mutex:
            if self._leader == me:
                self._leader = None
                if self._blocked:
                    self._changed.notify_all()

    def _gather(self) -> None:
        """Lets the threads that the last sync released append again before this one begins, as long as they do."""
        idle = 0
        seen = self._arrived
        while seen < self._expected and idle < _IDLE_LOOKS:
            self._fs.yield_thread()
            arrived = self._arrived
            if arrived == seen:
                idle = idle + 1
            else:
                idle = 0
            seen = arrived
        # Falls slowly, so that one sync which few threads happened to share does not end the waiting for the next.
        self._expected = max(seen, self._expected * 7 // 8)
        self._arrived = 0

    def _lead(self) -> None:
        """The sync itself, by the one thread that leads."""
        # Read before the sync begins: it need not cover what is written meanwhile.
        written_bytes, target = self._written()
        try:
            self._sync()
        except StorageWriteError as error:
            self.poison(error)
            raise DurabilityUnknownError(
                "a sync failed: what was written may or may not be on disk", path=self._path
            ) from error
        except BaseException as error:  # interrupted: whether it failed is not known, and asking again would not tell
            self.poison(error)
            raise
        self._note(target, written_bytes)

    def _note(self, end: int, written_bytes: int) -> None:
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
