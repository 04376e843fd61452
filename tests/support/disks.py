"""A disk that fails when told to: the operating system's, with scripted errors. And a bug: who believes memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from logcore.errors import StorageReadError, StorageWriteError
from logcore.fs import OsFS, _raise, _raise_sync


class FaultyFS(OsFS):
    """OsFS whose calls fail once `plan` says so.

    plan(operation, nth, path) -> errno or None; nth counts calls of that operation from 1. A pwrite that is to fail
    first writes half of its data, which is what a full disk does.
    """

    def __init__(self, plan: Callable[[str, int, str], int | None] | None = None) -> None:
        super().__init__()
        self.plan = plan or (lambda operation, nth, path: None)
        self.counts: dict[str, int] = {}

    def _fault(self, operation: str, path: str) -> int | None:
        self.counts[operation] = self.counts.get(operation, 0) + 1
        return self.plan(operation, self.counts[operation], path)

    def pwrite(self, handle: int, data: Any, position: int) -> None:
        path = self.path_of(handle)
        fault = self._fault("pwrite", path)
        if fault is not None:
            os.pwrite(handle, memoryview(data)[: len(data) // 2], position)
            _raise(OSError(fault, os.strerror(fault)), path, StorageWriteError, "write")
        super().pwrite(handle, data, position)

    def pread(self, handle: int, size: int, position: int) -> bytes:
        fault = self._fault("pread", self.path_of(handle))
        if fault is not None:
            _raise(OSError(fault, os.strerror(fault)), self.path_of(handle), StorageReadError, "read")
        return super().pread(handle, size, position)

    def fdatasync(self, handle: int) -> None:
        self._sync("fdatasync", handle)
        super().fdatasync(handle)

    def fsync(self, handle: int) -> None:
        self._sync("fsync", handle)
        super().fsync(handle)

    def _sync(self, operation: str, handle: int) -> None:
        fault = self._fault(operation, self.path_of(handle))
        if fault is not None:
            _raise_sync(OSError(fault, os.strerror(fault)), self.path_of(handle))

    def truncate(self, handle: int, size: int) -> None:
        fault = self._fault("truncate", self.path_of(handle))
        if fault is not None:
            _raise(OSError(fault, os.strerror(fault)), self.path_of(handle), StorageWriteError, "write")
        super().truncate(handle, size)


def always(operation: str, code: int = errno.EIO, *, suffix: str = "") -> Callable[[str, int, str], int | None]:
    """A plan: every call of an operation on paths with a suffix fails."""
    return lambda name, nth, path: code if name == operation and path.endswith(suffix) else None


def once(operation: str, nth: int, code: int = errno.EIO, *, suffix: str = "") -> Callable[[str, int, str], int | None]:
    """A plan: the nth call fails, those after it succeed."""
    return lambda name, count, path: code if name == operation and count == nth and path.endswith(suffix) else None


def believe_memory(fs: Any, segment: Any, position: int) -> bool:
    """In the place of recovery._settle: syncs a segment, and takes what memory shows of it for what the disk has."""
    handle = fs.open(segment.path)
    fs.fsync(handle)
    fs.close(handle)
    return True
