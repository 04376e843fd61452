"""The only access to the disk, the clock and the operating system's locks.

Rules:
- All other modules use one `FS` object. Files are opened to handles; every other call
  takes a handle or a path.
- A failed read raises StorageReadError. A failed write raises StorageWriteError or
  DiskFullError. A lack of descriptors or memory raises ResourceError. Each is chained to
  the OSError. FileNotFoundError and FileExistsError are raised unchanged, because callers
  handle them as results.
- A symbolic link is not followed when a file or directory is opened, examined or
  removed by its name.
- pwrite() repeats short writes until all bytes are written, or raises. There is no
  buffering, and no write uses a mapping.
- A mapping exists until its last view is dropped; it is never closed explicitly.

This module does not handle records and makes no decisions: log.py decides how to react
to a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib
import itertools
import json
import mmap
import os
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NoReturn, Protocol

import attrs

from logcore.errors import (
    DiskFullError,
    LogcoreError,
    LogLockedError,
    ResourceError,
    StorageReadError,
    StorageWriteError,
)
from logcore.fs.lock_holders import lock_holders
from logcore.fs.watch import DirectoryWatch, Inotify, Polling, libc

#: Errors of a write that mean that the disk is full. Truncating the file to its old size
#: undoes such a write.
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LINK: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}
)
_NO_SUCH_NAME: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
_NO_RESOURCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: Permissions of new files and directories, unless the caller gives others; the umask
#: removes some of them.
FILE_PERMISSIONS: Final = 0o644
DIRECTORY_PERMISSIONS: Final = 0o755
_OTHERS_WRITE: Final = 0o022
#: The first and the longest pause between two attempts to lock a byte.
_LOCK_PAUSE_SECONDS: Final = 0.0002
_LOCK_PAUSE_LIMIT_SECONDS: Final = 0.005
#: Bytes of each read and write of copy_range().
_COPY_BYTES: Final = 1 << 20
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW

Data = bytes | bytearray | memoryview


def _find_guard() -> Any:
    """Return the compiled module, which guards against unreadable pages of a mapping.

    Return None if there is no compiled module. Without the guard, reading such a page
    kills the process.
    """
    try:
        return importlib.import_module("logcore.kernels._compiled")
    except ImportError:
        return None


_guard: Final = _find_guard()

_HAS_TRACKFD: bool = sys.version_info >= (3, 13)
_IS_LINUX: bool = sys.platform == "linux"
#: Linux caches pages in folios, which are dropped as a whole. This is the largest folio
#: on most machines.
_FOLIO_BYTES: Final = 2 << 20


@attrs.frozen
class Boot:
    """Processes with the same boot (16 bytes) and the same time namespace may compare
    their monotonic clocks.
    """

    boot_id: bytes
    time_namespace: int


@attrs.define(eq=False)
class Shared:
    """State common to all shares of a lock, for as long as this process holds it."""

    mutex: threading.Lock = attrs.Factory(threading.Lock)
    #: The facts that logcore.claim stores about the directory; None at first, written
    #: under the mutex.
    state: Any = None


class Lock(Protocol):
    """One share of the claim on a log directory, for a partition or a LogDir.

    The share is held until release(). `is_last` means that this process has no other
    claim on the directory. `handle` is the lock file, for lock_byte(), or -1 if this
    process uses the directory alone.
    """

    shared: Shared

    @property
    def handle(self) -> int: ...
    @property
    def is_last(self) -> bool: ...
    def release(self) -> None: ...


class FS(Protocol):
    """The operations of a disk that the library uses.

    Paths are absolute or relative strings; handles are opaque ints. `forks` is the
    number of forks between this process and the one that created the object. Files
    opened at another number belong to a parent process.
    """

    forks: int

    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
    ) -> int: ...
    def close(self, handle: int) -> None: ...
    def pread(self, handle: int, size: int, position: int) -> bytes: ...
    def pwrite(self, handle: int, data: Data, position: int) -> None: ...
    def truncate(self, handle: int, size: int) -> None: ...
    def fdatasync(self, handle: int) -> None: ...
    def fsync(self, handle: int) -> None: ...
    def drop_cache(self, handle: int, position: int) -> bool: ...
    def size(self, handle: int) -> int: ...
    def map(self, handle: int, size: int) -> memoryview: ...
    def is_readable(self, view: memoryview, *, touch: bool = False) -> bool: ...
    def file_size(self, path: str) -> int: ...
    def identity(self, path_or_handle: str | int) -> tuple[int, int]: ...
    def exists(self, path: str) -> bool: ...
    def is_directory(self, path: str) -> bool: ...
    def listdir(self, path: str) -> list[str]: ...
    def mkdir(self, path: str) -> None: ...
    def rename(self, source: str, target: str) -> None: ...
    def link(self, source: str, target: str) -> bool: ...
    def unlink(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def modified_ms(self, path: str) -> int: ...
    def sync_dir(self, path: str) -> None: ...
    def free_bytes(self, path: str) -> int: ...
    def total_bytes(self, path: str) -> int: ...
    def real_path(self, path: str) -> str: ...
    def lock(self, directory: str, member: str, *, shared: bool = False) -> Lock: ...
    def after_fork(self, forget: Callable[[], None]) -> None: ...
    def watch(self, *directories: str) -> DirectoryWatch: ...
    def now_ms(self) -> int: ...
    def monotonic_ms(self) -> int: ...

    def thread_us(self) -> int:
        """Return the processor time that this thread has used, in microseconds."""
        ...

    def random_bytes(self, size: int) -> bytes: ...
    def yield_thread(self) -> None: ...


class SharedFS(FS, Protocol):
    """Further operations for changing the same files in several processes.

    The registry and the writers of a shared log directory use them.
    """

    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
        permissions: int = FILE_PERMISSIONS,
    ) -> int: ...
    def mkdir(self, path: str, *, permissions: int = DIRECTORY_PERMISSIONS) -> None: ...
    def permissions(self, path: str) -> int: ...
    def lock_byte(
        self, handle: int, byte: int, *, timeout_ms: int = 0, shared: bool = False
    ) -> bool: ...
    def unlock_byte(self, handle: int, byte: int) -> None: ...
    def is_byte_locked(self, handle: int, byte: int) -> bool: ...
    def watch(
        self, *directories: str, closing: Sequence[str] = ()
    ) -> DirectoryWatch: ...
    def boot(self) -> Boot: ...
    def host_name(self) -> str: ...


@contextlib.contextmanager
def opened(
    fs: FS,
    path: str,
    *,
    write: bool = False,
    create: bool = False,
    exclusive: bool = False,
) -> Generator[int, None, None]:
    """Open a file for the duration of a `with`. Raises the same errors as FS.open()."""
    handle = fs.open(path, write=write, create=create, exclusive=exclusive)
    try:
        yield handle
    finally:
        fs.close(handle)


def copy_range(fs: FS, source: int, target: int, start: int, stop: int) -> int:
    """Copy the bytes in [start, stop) of `source` to the beginning of `target`.

    Return the number of copied bytes, which is lower if the file has become shorter.
    """
    at = start
    while at < stop:
        chunk = fs.pread(source, min(_COPY_BYTES, stop - at), at)
        if not chunk:
            break
        fs.pwrite(target, chunk, at - start)
        at += len(chunk)
    return at - start


class _Reading:
    """Converts OSError to StorageReadError, except FileNotFoundError and FileExistsError.

    A context manager made from a generator would cost 2 us.
    """

    __slots__ = ("_path",)

    _kind: type[LogcoreError] = StorageReadError
    _operation = "read"

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, OSError) and not isinstance(
            error, (FileNotFoundError, FileExistsError)
        ):
            _raise(error, self._path, self._kind, self._operation)


class _Writing(_Reading):
    """Converts errors like _Reading, to StorageWriteError."""

    __slots__ = ()

    _kind = StorageWriteError
    _operation = "write"


def _raise(
    error: OSError, path: str, kind: type[LogcoreError], operation: str
) -> NoReturn:
    if error.errno in _NO_RESOURCE:
        raise ResourceError(
            f"{operation} failed for lack of resources: {error.strerror}", path=path
        ) from error
    if error.errno in _NO_SPACE and kind is StorageWriteError:
        raise DiskFullError(f"no space left: {error.strerror}", path=path) from error
    raise kind(f"{operation} failed: {error.strerror}", path=path) from error


class OsFS:
    """The operating system's files."""

    def __init__(self) -> None:
        self.forks = 0
        self._paths: dict[int, str] = {}
        # Guards _locks and members. A fork acquires it, so that no other thread holds it
        # at the moment of the fork: it would remain locked in the child.
        self.guard = threading.RLock()
        self._locks: dict[tuple[int, int], _DirectoryLock] = {}
        self._fork_callbacks: dict[
            int, tuple[weakref.ref[Any], Callable[[Any], None]]
        ] = {}
        self._fork_hook_numbers = itertools.count()
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork_in_parent,
            after_in_child=self._begin_child,
        )

    def _before_fork(self) -> None:
        self.guard.acquire()

    def _after_fork_in_parent(self) -> None:
        self.guard.release()

    def _begin_child(self) -> None:
        self.forks += 1
        self.guard = threading.RLock()
        for held in self._locks.values():
            # An open descriptor in the child would keep the lock after the parent's death.
            held.close()
        self._locks.clear()
        for owner, forget in list(self._fork_callbacks.values()):
            target = owner()
            if target is not None:
                forget(target)

    def after_fork(self, forget: Callable[[], None]) -> None:
        """Register a bound method to call in forked children while its object exists.

        The method must replace the object's locks. A lock that another thread held during
        the fork would remain locked forever in the child.
        """
        number = next(self._fork_hook_numbers)
        callbacks = self._fork_callbacks
        method: Any = forget
        # Not WeakMethod: when the process ends, the module `weakref` may be deleted
        # before its callback runs.
        callbacks[number] = (
            weakref.ref(method.__self__, lambda _: callbacks.pop(number, None)),
            method.__func__,
        )

    # -- files -------------------------------------------------------------------------

    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
        permissions: int = FILE_PERMISSIONS,
    ) -> int:
        """Open a file. `permissions` apply to a new file.

        If the permissions let other users write, a call with `exclusive` sets them
        regardless of the umask.
        """
        flags = _OPEN
        errors: _Reading
        if write:
            flags |= os.O_RDWR
            errors = _Writing(path)
        else:
            flags |= os.O_RDONLY
            errors = _Reading(path)
        if create:
            flags |= os.O_CREAT
        if exclusive:
            flags |= os.O_EXCL
        with errors:
            handle = os.open(path, flags, permissions)
            if exclusive and permissions & _OTHERS_WRITE:
                try:
                    os.fchmod(handle, permissions)
                except BaseException:
                    os.close(handle)
                    raise
        self._paths[handle] = path
        return handle

    def close(self, handle: int) -> None:
        self._paths.pop(handle, None)
        os.close(handle)

    def path_of(self, handle: int) -> str:
        """Return the path of a handle, for messages."""
        return self._paths.get(handle, f"handle {handle}")

    def pread(self, handle: int, size: int, position: int) -> bytes:
        """Read up to `size` bytes; fewer only at the end of the file."""
        try:
            data = os.pread(handle, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]
            got = len(data)
            # A read may be short anywhere, not only at the end.
            while got < size:
                data = os.pread(handle, size - got, position + got)
                if not data:
                    break
                parts.append(data)
                got += len(data)
            return b"".join(parts)
        except OSError as error:
            _raise(error, self.path_of(handle), StorageReadError, "read")

    def pwrite(self, handle: int, data: Data, position: int) -> None:
        try:
            written = os.pwrite(handle, data, position)
            if written == len(data):
                return
            rest = memoryview(data)[written:]
            while rest:
                if written == 0:
                    raise OSError(errno.ENOSPC, "the system wrote nothing")
                position += written
                written = os.pwrite(handle, rest, position)
                rest = rest[written:]
        except OSError as error:
            _raise(error, self.path_of(handle), StorageWriteError, "write")

    def truncate(self, handle: int, size: int) -> None:
        with _Writing(self.path_of(handle)):
            os.ftruncate(handle, size)

    def fdatasync(self, handle: int) -> None:
        if sys.platform == "darwin":
            self.fsync(handle)
            return
        try:
            os.fdatasync(handle)
        except OSError as error:
            _raise_sync(error, self.path_of(handle))

    def fsync(self, handle: int) -> None:
        try:
            # On this system fsync leaves the data in the drive's cache.
            if sys.platform == "darwin":
                fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            else:
                os.fsync(handle)
        except OSError as error:
            _raise_sync(error, self.path_of(handle))

    def drop_cache(self, handle: int, position: int) -> bool:
        """Drop the pages of a file from `position` on, so that they are read from the disk.

        Return True if the cache contains no such page. Return False otherwise, or if that
        is unknown. Pages that are not synced are kept.
        """
        if not hasattr(os, "posix_fadvise") or not _IS_LINUX:
            return False
        start = position // _FOLIO_BYTES * _FOLIO_BYTES
        try:
            size = os.fstat(handle).st_size - start
            os.posix_fadvise(handle, start, 0, os.POSIX_FADV_DONTNEED)
            return size <= 0 or not _is_cached(handle, start, size)
        # The file system does not support this.
        except OSError:
            return False

    def size(self, handle: int) -> int:
        with _Reading(self.path_of(handle)):
            return os.fstat(handle).st_size

    def map(self, handle: int, size: int) -> memoryview:
        """Map the first `size` bytes read-only, 0 < size <= the file's size.

        The mapping is valid while a view of it is referenced. It uses no file descriptor,
        because a log of a thousand segments would otherwise need a thousand.
        """
        options: Any = {}
        if _HAS_TRACKFD:
            options["trackfd"] = False
        with _Reading(self.path_of(handle)):
            if _IS_LINUX:
                return _map(handle, size)
            return memoryview(
                mmap.mmap(handle, size, access=mmap.ACCESS_READ, **options)
            )

    def is_readable(self, view: memoryview, *, touch: bool = False) -> bool:
        """Return whether all pages of a view's mapping could be read.

        The guard replaces a page by zeros if the file was truncated or the disk cannot
        read it. With `touch`, each page of the view is read first.
        """
        if _guard is None:
            return True
        if touch:
            _guard.touch(view)
        return not _guard.unreadable_pages(view)

    # -- names -------------------------------------------------------------------------

    def file_size(self, path: str) -> int:
        with _Reading(path):
            return os.lstat(path).st_size

    def identity(self, path_or_handle: str | int) -> tuple[int, int]:
        """Return a value that changes if the file is replaced by another file."""
        with _Reading(str(path_or_handle)):
            if isinstance(path_or_handle, int):
                facts = os.fstat(path_or_handle)
            else:
                facts = os.lstat(path_or_handle)
        return facts.st_dev, facts.st_ino

    def exists(self, path: str) -> bool:
        """Return whether a name exists. A failing disk raises StorageReadError."""
        return _mode_of(path, os.lstat) is not None

    def is_directory(self, path: str) -> bool:
        """Return whether this is a directory; False for a symbolic link.

        Links inside a log directory are not followed. real_path() resolves a user's
        path.
        """
        mode = _mode_of(path, os.lstat)
        return mode is not None and stat.S_ISDIR(mode)

    def listdir(self, path: str) -> list[str]:
        with _Reading(path):
            return os.listdir(path)

    def mkdir(self, path: str, *, permissions: int = DIRECTORY_PERMISSIONS) -> None:
        """Create a directory. For `permissions` see open()."""
        with _Writing(path):
            os.mkdir(path, permissions)
            if permissions & _OTHERS_WRITE:
                os.chmod(path, permissions)

    def permissions(self, path: str) -> int:
        """Return the nine permission bits."""
        with _Reading(path):
            return os.stat(path).st_mode & 0o777

    def rename(self, source: str, target: str) -> None:
        with _Writing(source):
            os.rename(source, target)

    def link(self, source: str, target: str) -> bool:
        """Create a hard link. Returns False if the file system cannot, for example
        between file systems.
        """
        with _Writing(target):
            try:
                os.link(source, target, follow_symlinks=False)
            except OSError as error:
                if error.errno in _NO_LINK:
                    return False
                raise
        return True

    def unlink(self, path: str) -> None:
        with _Writing(path):
            os.unlink(path)

    def rmdir(self, path: str) -> None:
        with _Writing(path):
            os.rmdir(path)

    def modified_ms(self, path: str) -> int:
        """Return the time of the last change of a file, or of the names in a directory.

        The time is by the wall clock.
        """
        with _Reading(path):
            return os.lstat(path).st_mtime_ns // 1_000_000

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        with _Writing(path):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            _raise_sync(error, path)
        finally:
            os.close(handle)

    def free_bytes(self, path: str) -> int:
        """Return how many bytes this process may still write to a directory's disk."""
        with _Reading(path):
            facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def total_bytes(self, path: str) -> int:
        """Return the size of the file system of a directory."""
        with _Reading(path):
            facts = os.statvfs(path)
        return facts.f_blocks * facts.f_frsize

    def real_path(self, path: str) -> str:
        return os.path.realpath(path)

    # -- time, threads, processes ------------------------------------------------------

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def thread_us(self) -> int:
        return time.thread_time_ns() // 1000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def boottime_ms(self) -> int:
        """Return the time of a clock that also runs while the machine is suspended.

        Use it for limits that other machines observe too. If the system has no such
        clock, this is the monotonic clock.
        """
        if hasattr(time, "CLOCK_BOOTTIME"):
            return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        return self.monotonic_ms()

    def random_bytes(self, size: int) -> bytes:
        """Return random bytes, for ids that are unique among all directories."""
        return os.urandom(size)

    def yield_thread(self) -> None:
        """Let other ready threads of this process run; takes about a microsecond if
        there are none.
        """
        time.sleep(0)

    # -- locks and watches -------------------------------------------------------------

    def lock(self, directory: str, member: str, *, shared: bool = False) -> Lock:
        """Claim `member`, a partition directory's name, under the log directory's lock.

        The directory's lock is acquired first if necessary. With `shared`, other
        processes may claim the directory too, if they also use `shared`.

        Raises:
            LogLockedError: a process holds the directory in the other mode, or this
                process already holds the member.
        """
        path = os.path.join(directory, ".lock")
        with _Writing(path):
            facts = os.stat(directory)
        identity = (facts.st_dev, facts.st_ino)
        held: _DirectoryLock | None = None
        claimed: _MemberLock | None = None
        try:
            with self.guard:
                held = self._locks.get(identity)
                # This process does not hold the lock, but the parent of a fork may.
                if held is None or held.handle < 0 or held.pid != os.getpid():
                    held = _DirectoryLock(self, identity, directory, is_shared=shared)
                    held.acquire()
                claimed = held.claim(member, is_shared=shared)
            return claimed
        # After an interrupt, the caller gets no claim that it could release.
        except BaseException:
            if held is not None:
                held.drop(claimed)
            raise

    def remember_lock(self, held: _DirectoryLock) -> None:
        self._locks[held.identity] = held

    def forget_lock(self, held: _DirectoryLock) -> None:
        if self._locks.get(held.identity) is held:
            del self._locks[held.identity]

    def lock_byte(
        self, handle: int, byte: int, *, timeout_ms: int = 0, shared: bool = False
    ) -> bool:
        """Lock one byte of an open file against all other openings of the file.

        The byte may be beyond the end of the file. Return False if another opening holds
        the lock until the timeout. With `shared`, other openings may hold a shared lock on
        the byte too. If this opening already holds a lock on the byte, the lock becomes
        shared or exclusive.

        The lock belongs to the opening, not to a thread. The lock ends with unlock_byte(),
        with close(), or with the death of the process and its forked children. This needs
        open-file-description locks, which Linux has.
        """
        kind = fcntl.F_WRLCK
        if shared:
            kind = fcntl.F_RDLCK
        if self._set_lock(handle, byte, kind):
            return True
        deadline = time.monotonic() + timeout_ms / 1000
        pause = _LOCK_PAUSE_SECONDS
        while not self._set_lock(handle, byte, kind):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LOCK_PAUSE_LIMIT_SECONDS)
        return True

    def unlock_byte(self, handle: int, byte: int) -> None:
        self._set_lock(handle, byte, fcntl.F_UNLCK)

    def is_byte_locked(self, handle: int, byte: int) -> bool:
        """Return whether another opening of the file holds a lock on the byte.

        This acquires no lock itself.
        """
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        with _Reading(self.path_of(handle)):
            answer = fcntl.fcntl(handle, self._ofd("F_OFD_GETLK", handle), request)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _set_lock(self, handle: int, byte: int, kind: int) -> bool:
        request = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(handle, self._ofd("F_OFD_SETLK", handle), request)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            _raise(error, self.path_of(handle), StorageWriteError, "lock")
        return True

    def _ofd(self, command: str, handle: int) -> int:
        number = getattr(fcntl, command, None)
        if number is None:
            raise StorageWriteError(
                "this system has no open-file-description locks",
                path=self.path_of(handle),
            )
        return int(number)

    def watch(self, *directories: str, closing: Sequence[str] = ()) -> DirectoryWatch:
        """Watch directories with inotify, or by a check every millisecond.

        inotify detects an append in 0.35 ms. In the directories in `closing`, only three
        changes are detected: a file that was open for writing is closed, a file is
        renamed, and a file is deleted.
        """
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                return Inotify(directories, closing)
        return Polling([*directories, *closing])

    def boot(self) -> Boot:
        """Return the ids of this boot; zeros if the system has none."""
        boot_id = bytes(16)
        time_namespace = 0
        with (
            contextlib.suppress(OSError, ValueError),
            open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file,
        ):
            boot_id = bytes.fromhex(file.read().strip().replace("-", ""))
        with contextlib.suppress(OSError):
            time_namespace = os.stat("/proc/self/ns/time").st_ino
        return Boot(boot_id, time_namespace)

    def host_name(self) -> str:
        """Return a name for messages. The name does not identify a machine."""
        return os.uname().nodename


def _mode_of(path: str, stat: Callable[[str], os.stat_result]) -> int | None:
    try:
        return stat(path).st_mode
    # No file system can contain this name.
    except ValueError:
        return None
    except OSError as error:
        if error.errno in _NO_SUCH_NAME:
            return None
        _raise(error, path, StorageReadError, "stat")


def _raise_sync(error: OSError, path: str) -> NoReturn:
    # This is never DiskFullError, because the state of the file is unknown after a failed
    # sync with any errno.
    raise StorageWriteError(f"sync failed: {error.strerror}", path=path) from error


#: Bytes of the lock file. Each process that shares the directory holds a shared lock on
#: PRESENCE_BYTE. A process that uses the directory alone locks all bytes, so a lock on
#: PRIVATE_BYTE identifies such a process. byte_lock.py lists the other bytes.
PRESENCE_BYTE: Final = 0
PRIVATE_BYTE: Final = 4
#: How long to wait for a process that closes the directory, and holds an exclusive lock
#: on PRESENCE_BYTE while it does so.
JOIN_SECONDS: Final = 10
#: Maximum number of lock holders that an error names.
_MAX_NAMED_HOLDERS: Final = 3
#: struct flock of 64-bit Linux: type, whence, start, len, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")


class _DirectoryLock:
    """Kafka's `.lock`: a record lock that a Java broker respects, shared by all
    partitions that this process writes.

    A POSIX record lock is lost without an error when any descriptor of the file in this
    process is closed. An open-file-description lock is not. On a system without
    open-file-description locks, lockf is used, and this object never opens the file twice.
    """

    def __init__(
        self, fs: OsFS, identity: tuple[int, int], directory: str, *, is_shared: bool
    ) -> None:
        self.fs = fs
        self.identity = identity
        self.directory = directory
        self.is_shared = is_shared
        self.pid = os.getpid()
        self.forks = fs.forks
        # drop() may run when there is no memory for bound methods, so they are created
        # here.
        self._enter = fs.guard.acquire
        self._leave = fs.guard.release
        self.members: set[str] = set()
        self.shared = Shared()
        self.handle = -1
        # Whether this lock has written logcore.owner, the file that names the holder.
        self.is_named = False

    def acquire(self) -> None:
        """Acquire the lock and remember it. The caller drops it after an error."""
        self._acquire()
        self.fs.remember_lock(self)

    def _acquire(self) -> None:
        path = os.path.join(self.directory, ".lock")
        with _Writing(path):
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN, 0o644)
        owner = os.path.join(self.directory, "logcore.owner")
        try:
            if self.is_shared:
                _join(self.handle)
            else:
                _lock_file(self.handle)
        except OSError as error:
            pid, host = _holder(self.handle, owner)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise StorageWriteError(
                    f"lock failed: {error.strerror}", path=path
                ) from error
            holder = "another process"
            if pid:
                holder = f"process {pid}"
            if host:
                holder += f" on {host}"
            if holders := lock_holders(self.directory):
                holder = " and ".join(map(str, holders[:_MAX_NAMED_HOLDERS]))
                if len(holders) > _MAX_NAMED_HOLDERS:
                    holder += f" and {len(holders) - _MAX_NAMED_HOLDERS} others"
                pid = pid or holders[0].pid
            raise LogLockedError(
                f"the log directory is being written by {holder}; "
                "close it there, open with read_only=True, or with shared=True in both",
                path=self.directory,
                pid=pid,
                host=host,
            ) from None
        if self.is_shared:
            return
        # The file names the holder for the message above, because the kernel does not
        # report the holder of such a lock.
        self.is_named = True
        with contextlib.suppress(OSError):
            handle = os.open(
                owner, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN, 0o644
            )
            try:
                os.write(
                    handle,
                    json.dumps({"pid": self.pid, "host": os.uname().nodename}).encode()
                    + b"\n",
                )
            finally:
                os.close(handle)

    def claim(self, member: str, *, is_shared: bool) -> _MemberLock:
        reason, path = "", self.directory
        if is_shared != self.is_shared:
            reason = (
                "this process has the log directory open with another value of shared;"
                " pass shared=True in both calls, or in none"
            )
        elif member in self.members:
            reason, path = (
                "this process has the log open for writing already",
                os.path.join(self.directory, member),
            )
        if reason:
            raise LogLockedError(
                reason, path=path, pid=self.pid, host=os.uname().nodename
            )
        claimed = _MemberLock(self, member, self.shared)
        # No call follows, because an interrupt in it would leave the member without a
        # claim.
        self.members |= {member}
        return claimed

    def drop(self, member: _MemberLock | None) -> None:
        """Release a member, if one is given, and the lock if no member is left.

        This allocates no memory, because it also runs after a MemoryError. After an
        interrupt, a second call does the rest.
        """
        # In a forked child the lock belongs to the parent.
        if self.forks != self.fs.forks:
            return
        try:
            # The guard prevents another thread from claiming a member of a lock that is
            # about to be released.
            self._enter()
            # Checked, because the name of a released member may belong to a later claim.
            if member is not None and not member.is_released:
                member.is_released = True
                self.members.discard(member.name)
            if not self.members:
                # The file is closed before the lock is forgotten. With POSIX record locks,
                # closing it later would release the next lock of the directory.
                self.close()
                self.fs.forget_lock(self)
                if self.is_named:
                    self.is_named = False
                    # The file is only informative, so an error does not matter.
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.directory, "logcore.owner"))
        finally:
            try:
                self._leave()
            # An interrupt came before the guard was acquired.
            except RuntimeError:
                pass

    def close(self) -> None:
        """Close the file, which releases the lock. A second call does nothing."""
        if self.handle >= 0:
            # There is no call between these lines, so an interrupt cannot cause a second
            # close of the same number.
            handle = self.handle
            self.handle = -1
            os.close(handle)


@attrs.define
class _MemberLock:
    directory: _DirectoryLock
    name: str
    shared: Shared
    is_released: bool = False

    @property
    def handle(self) -> int:
        if self.directory.is_shared:
            return self.directory.handle
        return -1

    @property
    def is_last(self) -> bool:
        return self.directory.members <= {self.name}

    def release(self) -> None:
        self.directory.drop(self)


def _lock_file(handle: int) -> None:
    if hasattr(fcntl, "F_OFD_SETLK"):
        fcntl.fcntl(
            handle, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        )
    else:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _join(handle: int) -> None:
    """Acquire a shared lock on PRESENCE_BYTE.

    This waits for a process that holds an exclusive lock on the byte while it closes the
    directory. It does not wait for a process that uses the directory alone, which has
    locked all bytes. Raises OSError like _lock_file().
    """
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            fcntl.fcntl(
                handle,
                fcntl.F_OFD_SETLK,
                _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, PRESENCE_BYTE, 1, 0),
            )
            return
        except OSError as error:
            probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, PRIVATE_BYTE, 1, 0)
            answer = fcntl.fcntl(handle, fcntl.F_OFD_GETLK, probe)
            is_private = _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK
            if (
                error.errno not in (errno.EACCES, errno.EAGAIN)
                or is_private
                or time.monotonic() >= deadline
            ):
                raise
        time.sleep(_LOCK_PAUSE_LIMIT_SECONDS)


def _holder(handle: int, owner: str) -> tuple[int | None, str | None]:
    """Return (pid, host) of the lock's holder.

    The kernel reports a Java broker. logcore.owner names a logcore process.
    """
    if hasattr(fcntl, "F_OFD_GETLK"):
        with contextlib.suppress(OSError):
            answer = fcntl.fcntl(
                handle,
                fcntl.F_OFD_GETLK,
                _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0),
            )
            pid = _FLOCK.unpack(answer)[4]
            if pid > 0:
                return pid, os.uname().nodename
    try:
        with open(owner, "rb") as file:
            facts = json.loads(file.read(4096))
        return int(facts["pid"]), str(facts["host"])
    except (OSError, ValueError, KeyError, TypeError):
        # Without the file, the message names no holder.
        return None, None


def _map(handle: int, size: int) -> memoryview:
    """Call mmap(2) directly, because before 3.13 Python's mmap keeps a duplicate of the
    descriptor.
    """
    library = libc()
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong
    ]  # fmt: skip
    try:
        address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
    # There was no memory for an argument.
    except ctypes.ArgumentError as error:
        raise MemoryError from error
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mapped = (ctypes.c_char * size).from_address(address)
    guard = 0
    if _guard is not None:
        guard = _guard.guard_mapping(address, size)
    # The finalizer must not run at exit, when views may still be used. The mapping ends
    # with the process.
    weakref.finalize(mapped, _unmap, address, size, guard).atexit = False
    return memoryview(mapped).cast("B").toreadonly()


def _is_cached(handle: int, start: int, size: int) -> bool:
    """Return whether memory holds any page of a part of a file, by mincore(2)."""
    library = libc()
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    with mmap.mmap(handle, size, access=mmap.ACCESS_COPY, offset=start) as mapped:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        byte = ctypes.c_char.from_buffer(mapped)
        try:
            if library.mincore(ctypes.addressof(byte), size, pages):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del byte
    return any(page & 1 for page in pages.raw)


def _unmap(address: int, size: int, guard: int) -> None:
    # The guard is removed first, because the next mapping at this address may belong to
    # other code.
    if guard:
        _guard.release_mapping(guard)
    libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


def offers_descriptors(fs: FS) -> bool:
    """Return whether handles of `fs` are descriptors that compiled code may write to.

    Handles of a subclass of OsFS are not, because the subclass intercepts each call.
    """
    return type(fs) is OsFS


#: The operating system's files, shared by all logs of this process, because record
#: locks belong to the process as a whole.
OS: Final = OsFS()
