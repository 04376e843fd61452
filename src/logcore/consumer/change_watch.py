"""Waits of a consumer for changes by other processes.

Rules:
- A watch is reused until the directories change. Creating a watch for each wait took a
  third of the system calls of an idle consumer.
- Events between two waits end the next wait at once.
- The kernel closes the files of a dead process one after the other, so its locks may
  still exist when the closing of one file is reported, and no report follows. So for
  _DEATH_CHECKS_MS after a report, the consumer must check for deaths by polling.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Final, cast

from logcore.fs import FS, SharedFS
from logcore.fs.watch import DirectoryWatch

_DEATH_CHECKS_MS: Final = 500


class ChangeWatch:
    """Watches directories. One thread waits; any thread may call wake()."""

    def __init__(self, fs: FS) -> None:
        self._fs = fs
        self._watch: DirectoryWatch | None = None
        self._watched: tuple[Sequence[str], Sequence[str]] = ((), ())
        self._death_checks_end_ms = 0
        # Guards _watch against wake() of another thread, and _is_waiting.
        self._mutex = threading.Lock()
        self._is_waiting = False

    def watch(self, directories: Sequence[str], closing: Sequence[str]) -> bool:
        """Watch these directories and no others; see SharedFS.watch().

        Return whether a new watch was created, which does not report earlier changes.
        """
        if self.is_current(directories, closing):
            return False
        self.close()
        if closing:
            watch = cast(SharedFS, self._fs).watch(*directories, closing=closing)
        else:
            watch = self._fs.watch(*directories)
        with self._mutex:
            self._watch = watch
        self._watched = directories, closing
        return True

    def is_current(self, directories: Sequence[str], closing: Sequence[str]) -> bool:
        """Return whether watch() would reuse the present watch."""
        return (
            self._watch is not None
            and (directories, closing) == self._watched
            and not self._watch.saw_removal
        )

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a directory changes, or -1 if
        the system has none.
        """
        assert self._watch is not None
        return self._watch.fileno()

    @property
    def reports_deaths(self) -> bool:
        """Whether the death of another process ends a wait."""
        return (
            self._watch is not None
            and self._watch.fileno() >= 0
            and bool(self._watched[1])
            and self._fs.monotonic_ms() >= self._death_checks_end_ms
        )

    @contextlib.contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Make wake() end the wait() in this block, even if wake() is called first."""
        with self._mutex:
            self._is_waiting = True
        try:
            yield
        finally:
            with self._mutex:
                self._is_waiting = False

    def wait(self, seconds: float) -> None:
        """Wait for a change or for wake(), at most `seconds`."""
        assert self._watch is not None
        self._watch.wait(seconds)
        if self._watch.saw_close:
            self._watch.saw_close = False
            self._death_checks_end_ms = self._fs.monotonic_ms() + _DEATH_CHECKS_MS

    def wake(self) -> None:
        """End the present wait."""
        with self._mutex:
            if self._is_waiting and self._watch is not None:
                self._watch.wake()

    def close(self) -> None:
        with self._mutex:
            if self._watch is not None:
                self._watch.close()
                self._watch = None
