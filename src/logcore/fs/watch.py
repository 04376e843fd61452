"""Watches directories with inotify, or by polling on systems without inotify.

OsFS.watch() creates the watches. This module does not read the content of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import struct
import time
from collections.abc import Sequence
from typing import Final, Protocol

#: struct inotify_event: watch, mask, cookie, length of the name after it.
_EVENT: Final = struct.Struct("iIII")
_CLOSED: Final = 0x8
_IGNORED: Final = 0x8000


class DirectoryWatch(Protocol):
    """Reports that files in some directories may have changed. wait() may return early.

    fileno() is a descriptor that becomes readable with each change, or -1 if the files
    are polled. wait() sets `saw_close` when a file that was open for writing was closed
    in one of the directories in `closing`. wait() sets `saw_removal` when a directory was
    removed, which ends the watch of that directory.
    """

    saw_close: bool
    saw_removal: bool

    def wait(self, timeout: float | None) -> bool:
        """Wait for a change for `timeout` seconds, None for no limit.

        Return False if the time has passed.
        """
        ...

    def wake(self) -> None:
        """End the current wait(), or the next wait(). Any thread may call this."""
        ...

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Inotify:
    """Detects writes, creations, deletions and renames in any of the directories.

    inotify detects a pwrite(), but no store through a mapping.
    """

    # IN_MODIFY | IN_CREATE | IN_MOVED_TO | IN_DELETE
    MASK: Final = 0x2 | 0x100 | 0x80 | 0x200
    # IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE
    CLOSING: Final = 0x8 | 0x40 | 0x80 | 0x200

    def __init__(self, directories: Sequence[str], closing: Sequence[str] = ()) -> None:
        self.saw_close = False
        self.saw_removal = False
        self._handle = self._wakeup_fd = -1
        library = libc()
        self._handle = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._handle < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        masks = [
            *((name, self.MASK) for name in directories),
            *((name, self.CLOSING) for name in closing),
        ]
        for directory, mask in masks:
            name = os.fsencode(directory)
            if library.inotify_add_watch(self._handle, name, mask) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._handle, select.POLLIN)
        self._poll.register(self._wakeup_fd, select.POLLIN)

    def wait(self, timeout: float | None) -> bool:
        if not self._poll.poll(
            None if timeout is None else max(0, int(timeout * 1000))
        ):
            return False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup_fd)
        with contextlib.suppress(BlockingIOError):
            while events := os.read(self._handle, 65536):
                at = 0
                while at < len(events):
                    _, mask, _, length = _EVENT.unpack_from(events, at)
                    self.saw_close |= bool(mask & _CLOSED)
                    self.saw_removal |= bool(mask & _IGNORED)
                    at += _EVENT.size + length
        return True

    def wake(self) -> None:
        os.eventfd_write(self._wakeup_fd, 1)

    def fileno(self) -> int:
        return int(self._handle)

    def close(self) -> None:
        # The numbers are reset before the files are closed. Otherwise a second close()
        # could close other files, which were opened with the same numbers.
        handles = self._handle, self._wakeup_fd
        self._handle = self._wakeup_fd = -1
        for handle in handles:
            if handle >= 0:
                os.close(handle)

    def __del__(self) -> None:
        # This runs also after an error in __init__(), and in the child of a fork.
        self.close()


class Polling:
    """Checks the files every millisecond, on systems without inotify.

    An append is detected after half a millisecond on average.
    """

    def __init__(self, directories: Sequence[str]) -> None:
        self.saw_close = False
        self.saw_removal = False
        self._directories = directories
        self._is_woken = False
        self._seen = self._scan()

    def _scan(self) -> dict[str, tuple[int, int]]:
        seen = {}
        for directory in self._directories:
            try:
                entries = os.scandir(directory)
            except FileNotFoundError:
                self.saw_removal = True
                continue
            with entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        facts = entry.stat()
                        seen[entry.path] = (facts.st_size, facts.st_mtime_ns)
        return seen

    def wait(self, timeout: float | None) -> bool:
        deadline = None
        if timeout is not None:
            deadline = time.monotonic() + timeout
        while (seen := self._scan()) == self._seen and not self._is_woken:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        self._seen = seen
        self._is_woken = False
        return True

    def wake(self) -> None:
        self._is_woken = True

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
