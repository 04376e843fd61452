"""Watches of a file registry: inotify on directories, or checks of the files without
inotify.

Rules:
- A watch is armed before the first read and again before each later one. A directory
  that was created, deleted or replaced is a report.
- A report means that something may have changed; there are more reports than changes.
- When a session's file is closed, its lock may still be held for a moment. Its report
  is therefore repeated a few times.
- Without inotify, the state of the nodes is compared every 20 ms.

This module does not read nodes: the caller passes a function that does.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable
from typing import Final

from logcore.errors import RegistryClosedError
from logcore.fs import SharedFS
from logcore.fs.watch import DirectoryWatch

#: A report of an ended session is repeated after these times, because the kernel
#: releases its lock shortly after the event.
_REPEAT_DELAYS_MS: Final = (1, 3, 7, 15, 31, 63, 127)
_CHECK_SECONDS: Final = 0.02


class FileWatch:
    """A protocol.Watch on files. Used by one thread at a time.

    The files in `directories` are watched, even if a directory does not exist.
    `sessions` is the directory of sessions. `state` returns a value to compare without
    inotify.
    """

    def __init__(
        self,
        fs: SharedFS,
        root: str,
        directories: Iterable[str],
        sessions: str,
        state: Callable[[], object],
    ) -> None:
        self._fs = fs
        self._root = root
        self._directories = sorted(directories)
        self._sessions = sessions
        self._state = state
        self._armed: dict[str, tuple[int, int]] = {}
        self._watch: DirectoryWatch | None = None
        # Times at which reports of ended sessions are repeated.
        self._repeat_times: list[int] = []
        self._arm()
        self._last_state: object = None
        if self.fileno() < 0:
            self._last_state = state()

    def fileno(self) -> int:
        if self._watch is None:
            return -1
        return self._watch.fileno()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            deadline = None
        else:
            deadline = self._fs.monotonic_ms() + max(0, round(timeout * 1000))
        while True:
            if self._arm() or self._is_repeat_due():
                return True
            if self._has_changed(self._pause(deadline)):
                self._arm()
                return True
            if deadline is not None and self._fs.monotonic_ms() >= deadline:
                return False

    def _pause(self, deadline: int | None) -> float | None:
        """Return how many seconds to wait for the next event."""
        ends = [end for end in (deadline, *self._repeat_times[:1]) if end is not None]
        if ends:
            return max(0, min(ends) - self._fs.monotonic_ms()) / 1000
        return None

    def _is_repeat_due(self) -> bool:
        if not self._repeat_times or self._repeat_times[0] > self._fs.monotonic_ms():
            return False
        del self._repeat_times[0]
        return True

    def _has_changed(self, pause: float | None) -> bool:
        if self._watch is None:
            raise RegistryClosedError("the watch was closed", path=self._root)
        # The operating system reports no events, so compare the nodes at intervals.
        if self._watch.fileno() < 0:
            seconds = _CHECK_SECONDS
            if pause is not None:
                seconds = min(pause, _CHECK_SECONDS)
            self._watch.wait(seconds)
            before = self._last_state
            self._last_state = self._state()
            return self._last_state != before
        happened = self._watch.wait(pause)
        if self._watch.saw_removal:
            # A new directory may have the inode number of the old one.
            self._armed = {}
        if self._watch.saw_close:
            self._watch.saw_close = False
            now = self._fs.monotonic_ms()
            self._repeat_times = [now + delay_ms for delay_ms in _REPEAT_DELAYS_MS]
        return happened

    def _arm(self) -> bool:
        """Watch the directories that exist now; return whether they have changed."""
        identities: dict[str, tuple[int, int]] = {}
        for requested in (*self._directories, self._sessions):
            directory = requested
            while True:
                try:
                    identities[directory] = self._fs.identity(directory)
                    break
                except FileNotFoundError:
                    if directory == self._root:
                        raise
                    directory = posixpath.dirname(directory)
        if identities == self._armed:
            return False
        self.close()
        try:
            ordinary = [watched for watched in identities if watched != self._sessions]
            self._watch = self._fs.watch(*ordinary, closing=[self._sessions])
        # Deleted again; the next call watches the remaining ones.
        except FileNotFoundError:
            identities = {}
            self._watch = self._fs.watch(self._root, closing=[self._sessions])
        self._armed = identities
        return True
