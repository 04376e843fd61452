"""Disks that stop: a process that dies at a chosen operation, and a machine that loses what was not synced.

CrashFS counts the operations that change something and raises Crash at the one chosen, and at every one after it, since
a dead process does nothing more. A pwrite that crashes has written half of its data.

With power=True the disk also forgets: restore() brings back, for each name that a sync of its directory made durable,
the content that a sync of the file made durable. This is the harshest disk; one that keeps everything is power=False.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from logcore.fs import OsFS


class Crash(BaseException):
    """The process is gone; nothing catches this."""


class CrashFS(OsFS):
    """The operating system's files below root, until the operation with number `at`."""

    def __init__(self, root: Path, at: int | None = None, *, power: bool = False) -> None:
        super().__init__()
        self.root = str(root)
        self.at = at
        self.power = power
        self.operations: list[str] = []
        self._content: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int]] = {}
        self._kept: list[int] = []  # open handles, so that no inode number is used twice
        if power:
            for directory, _, files in os.walk(self.root):
                self._names[directory] = self._entries(directory)
                for name in files:
                    self._remember(os.path.join(directory, name))

    def _step(self, name: str, path: str) -> bool:
        """Counts; True when this is the operation to die in."""
        if self.at is not None and len(self.operations) > self.at:
            raise Crash
        self.operations.append(f"{name} {os.path.relpath(path, self.root)}")
        return self.at is not None and len(self.operations) > self.at

    def _entries(self, directory: str) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(directory)}

    def _remember(self, path: str) -> None:
        handle = os.open(path, os.O_RDONLY)
        self._kept.append(handle)
        self._content[os.fstat(handle).st_ino] = Path(path).read_bytes()

    def open(self, path: str, *, write: bool = False, create: bool = False, exclusive: bool = False) -> int:
        if create and not os.path.exists(path) and self._step("create", path):
            raise Crash
        return super().open(path, write=write, create=create, exclusive=exclusive)

    def pwrite(self, handle: int, data: Any, position: int) -> None:
        if self._step("pwrite", self.path_of(handle)):
            os.pwrite(handle, memoryview(data)[: len(data) // 2], position)
            raise Crash
        super().pwrite(handle, data, position)

    def truncate(self, handle: int, size: int) -> None:
        if self._step("truncate", self.path_of(handle)):
            raise Crash
        super().truncate(handle, size)

    def fsync(self, handle: int) -> None:
        if self._step("fsync", self.path_of(handle)):
            raise Crash
        if self.power:
            size = os.fstat(handle).st_size
            self._kept.append(os.dup(handle))
            self._content[os.fstat(handle).st_ino] = os.pread(handle, size, 0)

    def fdatasync(self, handle: int) -> None:
        self.fsync(handle)

    def mkdir(self, path: str) -> None:
        if self._step("mkdir", path):
            raise Crash
        super().mkdir(path)
        if self.power:
            self._names[path] = {}

    def rename(self, source: str, target: str) -> None:
        if self._step("rename", target):
            raise Crash
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        if self._step("unlink", path):
            raise Crash
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        if self._step("rmdir", path):
            raise Crash
        super().rmdir(path)

    def sync_dir(self, path: str) -> None:
        if self._step("sync_dir", path):
            raise Crash
        if self.power:
            self._names[path] = self._entries(path)

    def close(self, handle: int) -> None:
        if handle in self._paths:  # not what an object closes that outlived the process
            super().close(handle)

    def die(self) -> None:
        """What the end of a process does: files are closed, locks released, objects that are left do nothing more."""
        self.forks += 1
        for handle in list(self._paths):
            self.close(handle)
        for lock in self._locks.values():
            os.close(lock.handle)
        self._locks = {}

    def restore(self) -> None:
        """After a power cut: puts what was durable into place of what is there."""
        kept: dict[str, bytes] = {}
        directories = [self.root]
        for directory in directories:
            for name, inode in self._names.get(directory, {}).items():
                path = os.path.join(directory, name)
                if path in self._names:
                    directories.append(path)
                else:
                    kept[path] = self._content.get(inode, b"")
        shutil.rmtree(self.root)
        for directory in directories:
            os.makedirs(directory, exist_ok=True)
        for path, content in kept.items():
            Path(path).write_bytes(content)
        self.close_kept()

    def close_kept(self) -> None:
        for handle in self._kept:
            os.close(handle)
        self._kept = []
