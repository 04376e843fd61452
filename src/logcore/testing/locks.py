"""The locks of a simulated disk, and the watch of those who wait for changes on it.

This module makes no change of a disk; disk.py hands these out.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import attrs

from logcore.errors import LogLockedError, StorageWriteError
from logcore.fs import Lock, Shared
from logcore.testing.nodes import Directory, File
from logcore.watches import Watch

if TYPE_CHECKING:
    from logcore.testing.disk import SimulatedDisk


@attrs.define(eq=False)
class LockMembers:
    members: set[str] = attrs.field(factory=set)
    shared: Shared = attrs.field(factory=Shared)


class MemberLock:
    def __init__(self, disk: SimulatedDisk, node: Directory, held: LockMembers, member: str) -> None:
        self._disk = disk
        self._node = node
        self._held = held
        self._member = member
        self.shared = held.shared

    @property
    def is_last(self) -> bool:
        return self._held.members <= {self._member}

    def release(self) -> None:
        with self._disk._mutex:
            self._held.members.discard(self._member)
            if not self._held.members and self._disk._locks.get(self._node) is self._held:
                del self._disk._locks[self._node]


class DiskWatch:
    def __init__(self, disk: SimulatedDisk) -> None:
        self.saw_close = False
        self.saw_removal = False
        self._disk = disk
        self._seen = len(disk.operations)

    def wait(self, timeout: float | None) -> bool:
        time.sleep(0)  # for a writer in another thread
        before = self._seen
        self._seen = len(self._disk.operations)
        if self._seen != before:
            return True
        if timeout is not None:
            self._disk.advance(max(1, int(timeout * 1000)))
        return False

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class ByteLocks:
    """Locks on single bytes of files, each held by one handle."""

    def __init__(self) -> None:
        self._holders: dict[tuple[File, int], int] = {}

    def take(self, file: File, byte: int, handle: int) -> bool:
        return self._holders.setdefault((file, byte), handle) == handle

    def drop(self, file: File, byte: int, handle: int) -> None:
        if self._holders.get((file, byte)) == handle:
            del self._holders[file, byte]

    def holder(self, file: File, byte: int) -> int | None:
        return self._holders.get((file, byte))

    def forget(self, handle: int) -> None:
        """A handle was closed."""
        if self._holders:
            self._holders = {place: holder for place, holder in self._holders.items() if holder != handle}

    def clear(self) -> None:
        self._holders.clear()


class DiskLocks:
    """A part of SimulatedDisk: what the operating system does for those who share files."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._locks: dict[Directory, LockMembers] = {}
        self.byte_locks = ByteLocks()

    def lock(self, directory: str, member: str) -> Lock:
        """As OsFS.lock, within this object: it stands for one machine, whose crash frees all locks. Makes no file."""
        disk = cast("SimulatedDisk", self)
        with self._mutex:
            disk._ask("lock", directory)
            node = disk._directory(directory, StorageWriteError)
            held = self._locks.setdefault(node, LockMembers())
            if member in held.members:
                raise LogLockedError(
                    "this process has the log open for writing already", path=posixpath.join(directory, member)
                )
            held.members.add(member)
            return MemberLock(disk, node, held, member)

    def lock_byte(self, handle: int, byte: int, *, timeout_ms: int = 0) -> bool:
        """As OsFS.lock_byte. Where another handle holds the byte, the time that it was to wait passes at once."""
        disk = cast("SimulatedDisk", self)
        file, path, _ = disk._held(handle)
        with self._mutex:
            disk._ask("lock_byte", path)
            if self.byte_locks.take(file, byte, handle):
                return True
            disk.advance(timeout_ms)
            return False

    def unlock_byte(self, handle: int, byte: int) -> None:
        file, _, _ = cast("SimulatedDisk", self)._held(handle)
        with self._mutex:
            self.byte_locks.drop(file, byte, handle)

    def is_byte_locked(self, handle: int, byte: int) -> bool:
        file, _, _ = cast("SimulatedDisk", self)._held(handle)
        return self.byte_locks.holder(file, byte) not in (None, handle)

    def after_fork(self, forget: Callable[[], None]) -> None:
        """Nothing: a process that forks has two of these disks then."""

    def watch(self, *directories: str, closing: Sequence[str] = ()) -> Watch:
        """Tells of changes anywhere on the disk. Where there was none, the time that it was to wait passes at once."""
        return DiskWatch(cast("SimulatedDisk", self))
