"""The locks of a simulated disk, and the watch that reports changes on it.

disk.py creates these objects. This module changes no content of a disk.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from logcore.errors import LogLockedError, StorageWriteError
from logcore.fs import JOIN_SECONDS, PRESENCE_BYTE, Lock, Shared, SharedFS
from logcore.fs.watch import DirectoryWatch
from logcore.testing.nodes import DirectoryNode, File

if TYPE_CHECKING:
    from logcore.testing.disk import SimulatedDisk


@attrs.define(eq=False)
class LockMembers:
    """The members for which one process has locked a directory.

    `handle` is the handle of the lock file, if other processes may lock the directory.
    """

    members: set[str] = attrs.field(factory=set)
    shared: Shared = attrs.field(factory=Shared)
    handle: int = -1


class MemberLock:
    def __init__(
        self,
        disk: SimulatedDisk,
        node: DirectoryNode,
        lock_members: LockMembers,
        member: str,
    ) -> None:
        self._disk = disk
        self._node = node
        self._lock_members = lock_members
        self._member = member
        self.shared = lock_members.shared

    @property
    def handle(self) -> int:
        return self._lock_members.handle

    @property
    def is_last(self) -> bool:
        return self._lock_members.members <= {self._member}

    def release(self) -> None:
        self._disk.release_member(self._node, self._lock_members, self._member)


class ProcessLock:
    """The lock of one member on a directory that several processes share.

    `locks` maps the path of a directory to the members of this process that locked it.
    """

    def __init__(
        self, fs: SharedFS, locks: dict[str, LockMembers], directory: str, member: str
    ) -> None:
        self._fs = fs
        self._locks = locks
        self._directory = directory
        self._member = member
        self._lock_members = locks[directory]
        self._lock_members.members.add(member)
        self.shared = self._lock_members.shared

    @property
    def handle(self) -> int:
        return self._lock_members.handle

    @property
    def is_last(self) -> bool:
        return self._lock_members.members <= {self._member}

    def release(self) -> None:
        self._lock_members.members.discard(self._member)
        if (
            not self._lock_members.members
            and self._locks.get(self._directory) is self._lock_members
        ):
            del self._locks[self._directory]
            self._fs.close(self._lock_members.handle)


def lock_among_processes(
    fs: SharedFS,
    locks: dict[str, LockMembers],
    directory: str,
    member: str,
    *,
    shared: bool,
) -> ProcessLock:
    """Lock a directory like OsFS.lock, for one of several simulated processes.

    The process locks the directory with a byte lock on the lock file.
    """
    lock_members = locks.get(directory)
    if lock_members is None:
        handle = fs.open(posixpath.join(directory, ".lock"), write=True, create=True)
        if not fs.lock_byte(
            handle,
            PRESENCE_BYTE,
            timeout_ms=1000 * JOIN_SECONDS * shared,
            shared=shared,
        ):
            fs.close(handle)
            raise LogLockedError(
                "another simulated process writes to the log directory", path=directory
            )
        lock_members = locks[directory] = LockMembers(handle=handle)
    if member in lock_members.members:
        path = posixpath.join(directory, member)
        raise LogLockedError(
            "this process has the log open for writing already", path=path
        )
    return ProcessLock(fs, locks, directory, member)


class DiskWatch:
    def __init__(self, disk: SimulatedDisk) -> None:
        self.saw_close = False
        self.saw_removal = False
        self._disk = disk
        self._seen_operations = len(disk.operations)

    def wake(self) -> None:
        self._seen_operations = -1

    def wait(self, timeout: float | None) -> bool:
        time.sleep(0)  # lets a writer in another thread run
        before = self._seen_operations
        self._seen_operations = len(self._disk.operations)
        if self._seen_operations != before:
            return True
        if timeout is not None:
            self._disk.advance(max(1, int(timeout * 1000)))
        return False

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class ByteLocks:
    """Locks on bytes of files. One handle holds a lock, or several if it is shared."""

    def __init__(self) -> None:
        self._holders: dict[tuple[File, int], set[int]] = {}
        self._is_shared: dict[tuple[File, int], bool] = {}

    def acquire(
        self, file: File, byte: int, handle: int, *, shared: bool = False
    ) -> bool:
        key = file, byte
        holders = self._holders.get(key, set())
        others = holders - {handle}
        if others and not (shared and self._is_shared[key]):
            return False
        self._holders[key] = others | {handle}
        self._is_shared[key] = shared
        return True

    def release_byte(self, file: File, byte: int, handle: int) -> None:
        key = file, byte
        remaining = self._holders.get(key, set()) - {handle}
        if remaining:
            self._holders[key] = remaining
        else:
            self._holders.pop(key, None)

    def is_held_by_others(self, file: File, byte: int, handle: int) -> bool:
        return bool(self._holders.get((file, byte), set()) - {handle})

    def release_all(self, handle: int) -> None:
        """Release the locks of a handle that was closed."""
        for file, byte in [
            key for key, holders in self._holders.items() if handle in holders
        ]:
            self.release_byte(file, byte, handle)

    def clear(self) -> None:
        self._holders.clear()


class DiskLocks:
    """The part of SimulatedDisk that implements locks and watches."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._locks: dict[DirectoryNode, LockMembers] = {}
        self.byte_locks = ByteLocks()

    if TYPE_CHECKING:  # attributes of SimulatedDisk

        def _fault_for(self, operation: str, path: str) -> int | str | None: ...
        def _directory(self, path: str, kind: Any = ...) -> DirectoryNode: ...
        def _open_handle(self, handle: int) -> tuple[File, str, bool]: ...

    def lock(self, directory: str, member: str, *, shared: bool = False) -> Lock:
        """Lock a directory like OsFS.lock, within this object.

        The object represents one machine. A crash of the machine frees all locks.
        A lock file is created only for a shared directory.
        """
        disk = cast("SimulatedDisk", self)
        with self._mutex:
            self._fault_for("lock", directory)
            node = self._directory(directory, StorageWriteError)
            lock_members = self._locks.get(node)
            if lock_members is None:
                lock_members = LockMembers()
                if shared:
                    lock_members.handle = disk.open(
                        posixpath.join(directory, ".lock"), write=True, create=True
                    )
                    try:
                        disk.lock_byte(lock_members.handle, PRESENCE_BYTE, shared=True)
                    except BaseException:
                        disk.close(lock_members.handle)
                        raise
                self._locks[node] = lock_members
            if shared != (lock_members.handle >= 0):
                raise LogLockedError(
                    "this process has the log directory open with another value of shared",
                    path=directory,
                )
            if member in lock_members.members:
                raise LogLockedError(
                    "this process has the log open for writing already",
                    path=posixpath.join(directory, member),
                )
            lock_members.members.add(member)
            return MemberLock(disk, node, lock_members, member)

    def release_member(
        self, node: DirectoryNode, lock_members: LockMembers, member: str
    ) -> None:
        """Release the lock of a member. The last member releases the directory."""
        with self._mutex:
            lock_members.members.discard(member)
            if not lock_members.members and self._locks.get(node) is lock_members:
                del self._locks[node]
                if lock_members.handle >= 0:
                    cast("SimulatedDisk", self).close(lock_members.handle)

    def lock_byte(
        self, handle: int, byte: int, *, timeout_ms: int = 0, shared: bool = False
    ) -> bool:
        """Lock a byte like OsFS.lock_byte.

        If another handle holds the byte, the clock advances by the timeout at once.
        """
        disk = cast("SimulatedDisk", self)
        file, path, _ = self._open_handle(handle)
        with self._mutex:
            self._fault_for("lock_byte", path)
            if self.byte_locks.acquire(file, byte, handle, shared=shared):
                return True
            disk.advance(timeout_ms)
            return False

    def unlock_byte(self, handle: int, byte: int) -> None:
        file, _, _ = self._open_handle(handle)
        with self._mutex:
            self.byte_locks.release_byte(file, byte, handle)

    def is_byte_locked(self, handle: int, byte: int) -> bool:
        file, _, _ = self._open_handle(handle)
        return self.byte_locks.is_held_by_others(file, byte, handle)

    def after_fork(self, forget: Callable[[], None]) -> None:
        """Do nothing. After a fork, each process has its own copy of this disk."""

    def watch(self, *directories: str, closing: Sequence[str] = ()) -> DirectoryWatch:
        """Return a watch that reports changes anywhere on the disk.

        If nothing has changed, the clock advances by the timeout of the wait at once.
        """
        return DiskWatch(cast("SimulatedDisk", self))
