"""Waits of a consumer for changes by other processes.

Rules:
- One watch is used until the directories change: creating one for each wait took a third
  of the system calls of an idle consumer.
- Events between two waits end the next wait at once.
- The kernel closes the files of a dead process one after the other, so its locks may
  still exist when the end of one file is reported. For _ECHO_MS, deaths must be checked
  without further reports.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence
from typing import Final, cast

from logcore.fs import FS, SharedFS
from logcore.fs.watch import DirectoryWatch

_ECHO_MS: Final = 500


class ChangeWatch:
    """Watches directories. One thread waits; any thread may call wake()."""

    def __init__(self, fs: FS) -> None:
        self._fs = fs
        self._watch: DirectoryWatch | None = None
        self._watched: tuple[Sequence[str], Sequence[str]] = ((), ())
        self._echo_ms = 0
        # Protects the watch from wake(), and the next field.
        self._mutex = threading.Lock()
        self._is_waiting = False

    def watch(self, directories: Sequence[str], closing: Sequence[str]) -> bool:
        """Watch these directories instead of the former ones; see SharedFS.watch().

        Returns whether the watch is new. Changes before this call are then not reported.
        """
        if self.is_current(directories, closing):
            return False
        self.close()
        if closing:
            made = cast(SharedFS, self._fs).watch(*directories, closing=closing)
        else:
            made = self._fs.watch(*directories)
        with self._mutex:
            self._watch = made
        self._watched = directories, closing
        return True

    def is_current(self, directories: Sequence[str], closing: Sequence[str]) -> bool:
        """Return whether watch() keeps the present watch for these directories."""
        return (
            self._watch is not None
            and (directories, closing) == self._watched
            and not self._watch.saw_removal
        )

    def fileno(self) -> int:
        """Return a descriptor that becomes readable with a change, or -1 without one."""
        assert self._watch is not None
        return self._watch.fileno()

    @property
    def reports_deaths(self) -> bool:
        """Whether the death of another process ends a wait."""
        return (
            self._watch is not None
            and self._watch.fileno() >= 0
            and bool(self._watched[1])
            and self._fs.monotonic_ms() >= self._echo_ms
        )

    @contextlib.contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Let wake() end the wait() of this block, also if it is called before."""
        with self._mutex:
            self._is_waiting = True
        try:
            yield
        finally:
            with self._mutex:
                self._is_waiting = False

    def wait(self, seconds: float) -> None:
        """Wait for a change or for wake(), at most for some seconds."""
        assert self._watch is not None
        self._watch.wait(seconds)
        if self._watch.saw_close:
            self._watch.saw_close = False
            self._echo_ms = self._fs.monotonic_ms() + _ECHO_MS

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
