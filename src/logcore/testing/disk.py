"""A disk in memory that lists the states a crash may leave, and injects faults.

`SimulatedDisk` is an `fs.FS`: code for the operating system's files runs on it
unchanged. Its model:

- A file has a visible content, which programs read, and a durable content. They differ
  by the writes and truncations since its last sync. A sync of the file makes these
  durable, but not its name.
- Changes of names (create, rename, unlink, mkdir, rmdir) are ordered. They are durable
  after a sync of their directory.
- A crash keeps all durable content. Each other change may survive or be lost. A write
  may be torn between sectors or at any byte. The part by which a file grew may contain
  zeros or garbage, or have its new size without the data. `crash_states` lists the
  resulting disks; crash_states.py chooses them.
- A failed sync loses the data: programs still read it, and the next sync succeeds, but
  the data is not durable. Each open handle gets the error once, as on Linux.

Rules:
- The same calls result in the same disks. Random choices depend on `seed`. Time passes
  only in `advance`, and no call blocks.
- `open()` with a mode returns a file object, for programs that keep their own files
  (file_objects.py).
- Errors are those of `fs.OsFS`, with the OSError as their cause. A `FaultPlan` selects
  the calls that fail.
- After a crash, all calls on this object raise `SimulatedCrash`. A test continues on
  the disks that `after_crash` returns.

It does not model permissions, symbolic links or free blocks beyond `capacity_bytes`.
processes.py runs several processes on one disk.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import posixpath
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, overload

from logcore.errors import InvalidConfigError, StorageReadError, StorageWriteError
from logcore.fs import (
    DIRECTORY_PERMISSIONS,
    FILE_PERMISSIONS,
    Data,
    _raise,
    _raise_sync,
)
from logcore.testing.crash_states import SECTOR, Kind, Names, Tree, UnsyncedChanges
from logcore.testing.environment import Environment
from logcore.testing.faults import FaultPlan, Operation, Slow
from logcore.testing.file_objects import (
    AnyFile,
    BinaryFile,
    Handle,
    RawFile,
    TextFile,
    open_file,
)
from logcore.testing.locks import DiskLocks
from logcore.testing.nodes import Change, DirectoryNode, File, MappedPages, Naming, Node

if TYPE_CHECKING:
    from _typeshed import OpenBinaryMode, OpenTextMode

    from logcore.testing.result_cache import FileReads

#: pytest hides the frames of this module in the traceback of a failure.
__tracebackhide__ = True

#: Number of consecutive writes to the same position that are kept as separate changes.
_REWRITES: Final = 3
_START_MS: Final = 1_700_000_000_000


class SimulatedCrash(BaseException):
    """The machine is off.

    It is a BaseException, so that `except Exception` does not hide it.
    """


class CrashState:
    """A disk that a crash may leave.

    Attributes:
        files: Path to content, None for a directory.
        what: A description of the crash.
        kind: "kill" if a killed process can leave this disk: all writes are complete,
            except perhaps the last one. "power" if only a power cut can leave it.
        key: A 64-bit hash that is equal for equal files, within this process.
        now_ms: The time of the crash.
    """

    __slots__ = ("_changed", "_origin", "_tree", "_what", "key", "kind", "now_ms")

    def __init__(
        self,
        origin: SimulatedDisk,
        tree: dict[str, bytes | None],
        changed: dict[str, bytes],
        key: int,
        kind: Kind,
        what: str | Callable[[], str],
    ) -> None:
        self._origin = origin
        self._tree = tree
        self._changed = changed
        self._what = what
        self.key = key
        self.kind: Kind = kind
        self.now_ms = origin.now_ms()

    @property
    def files(self) -> dict[str, bytes | None]:
        return {**self._tree, **self._changed}

    @property
    def what(self) -> str:
        if isinstance(self._what, str):
            return self._what
        return self._what()

    def disk(self) -> SimulatedDisk:
        """Return a new disk with these files, all of them durable."""
        disk = SimulatedDisk(self.files, seed=self._origin.seed, now_ms=self.now_ms)
        disk.crashes = self._origin.crashes + 1
        if self._origin.history:
            disk.history = f"{self._origin.history}, {self.what}"
        else:
            disk.history = self.what
        return disk

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{path}: {len(data)}"
            for path, data in sorted(self.files.items())
            if data is not None
        )
        return f"<CrashState {self.kind}: {self.what}; {sizes}>"


_Failure = type[StorageReadError] | type[StorageWriteError]


def _fail(code: int, path: str, kind: _Failure) -> NoReturn:
    what = "write"
    if kind is StorageReadError:
        what = "read"
    _raise(OSError(code, os.strerror(code)), path, kind, what)


@functools.lru_cache(1 << 16)
def _parts(path: str) -> tuple[str, ...]:
    normal = posixpath.normpath("/" + os.fspath(path))
    return tuple(part for part in normal.split("/") if part)


class SimulatedDisk(Environment, DiskLocks):
    """A disk in memory. Pass it as `fs=` to logcore.open and logcore.open_dir.

    Args:
        files: The initial durable files: path to content, None for an empty directory.
            Relative paths begin at the root.
        seed: Seed of random_bytes and of the garbage in crash states.
        faults: See FaultPlan. It may be set and removed at any time.
        capacity_bytes: Maximum total size of all files.
        names: With "posix", each change of a name may be lost without the others. With
            "journal", as on ext4, changes of names become durable in order, any fsync
            makes all earlier ones durable, and a rename becomes durable only together
            with the data written before it.

    The attribute `operations` lists all changes and syncs, in order.
    """

    def __init__(
        self,
        files: Mapping[str, bytes | None] | None = None,
        *,
        seed: int = 0,
        faults: FaultPlan | None = None,
        capacity_bytes: int | None = None,
        names: Names = "posix",
        now_ms: int = _START_MS,
    ) -> None:
        self.forks = 0
        self.faults = faults
        self.capacity_bytes = capacity_bytes
        self.names: Names = names
        self.operations: list[Operation] = []
        self.is_dead = False
        #: Called before and after each change and sync, with the operation and whether
        #: it is done. Explorers set it.
        self.observer: Any = None
        Environment.__init__(self, seed, now_ms)
        DiskLocks.__init__(self)
        self._numbers = itertools.count(1)
        self._handles: dict[int, tuple[File, str, bool]] = {}
        #: Handle -> error of a failed sync that the handle has not reported.
        self._unreported_sync_errors: dict[int, int] = {}
        self._next_handle = itertools.count(3)
        self._journal: list[Naming] = []
        self._dirty: dict[File, None] = {}
        #: The file changed last; None if the last change was of a name.
        self._newest: File | None = None
        #: The file that is being written.
        self._writing: File | None = None
        self._crash_in: int | None = None
        self.reads: FileReads | None = None  # for ResultCache
        self._root = DirectoryNode(next(self._numbers), now_ms)
        #: The paths that were looked up since a name changed.
        self._node_cache: dict[str, Node] = {}
        for path, content in (files or {}).items():
            self._create_durable(path, content)

    def __repr__(self) -> str:
        state = "dead"
        if not self.is_dead:
            state = (
                f"{len(self._journal)} names and {len(self._dirty)} files not synced"
            )
        return f"<SimulatedDisk {len(self.files())} files, {state}{f'; {self.history}' if self.history else ''}>"

    # -- called by tests ---------------------------------------------------------------

    def _create_durable(self, path: str, content: bytes | None) -> None:
        """Create a file or a directory that is durable at once."""
        self._node_cache.clear()
        parent = self._root
        parts = _parts(path)
        for name in parts[:-1] if content is not None else parts:
            node = parent.entries.get(name)
            if node is None:
                node = parent.entries[name] = parent.durable[name] = DirectoryNode(
                    next(self._numbers), self._now_ms
                )
            assert isinstance(node, DirectoryNode), path
            parent = node
        if content is not None:
            parent.entries[parts[-1]] = parent.durable[parts[-1]] = File(
                next(self._numbers), content, self._now_ms
            )

    def files(self) -> dict[str, bytes]:
        """Return the visible content of every file, by path."""
        self._read_all()
        return {
            path: content
            for path, content in self.view().items()
            if content is not None
        }

    def view(self) -> dict[str, bytes | None]:
        """Return the content of each file, and None for each directory."""
        return {path: node.visible() for path, node in self.nodes().items()}

    def nodes(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        stack: list[tuple[str, DirectoryNode]] = [("", self._root)]
        while stack:
            path, directory = stack.pop()
            for name, node in directory.entries.items():
                found[f"{path}/{name}"] = node
                if isinstance(node, DirectoryNode):
                    stack.append((f"{path}/{name}", node))
        return found

    def content(self, path: str) -> bytes:
        """Return the visible content of a file."""
        file = self._file(path)
        if self.reads is not None:
            self.reads.record(file, True)
        return bytes(file.content)

    def is_unchanged_since(self, before: Mapping[str, bytes | None]) -> bool:
        """Return whether view() still equals `before`.

        In a ResultCache, only files that its function has changed are read.
        """
        reads = self.reads
        nodes = self.nodes()
        if reads is not None:
            for path, node in reads.nodes.items():
                if node in reads.written or nodes.get(path) is not node:
                    reads.entries[path, True] = None
        return before == {path: node.visible() for path, node in nodes.items()}

    def record_read(self, path: str) -> None:
        """Record for a ResultCache that the result depends on the content of a file.

        This is necessary after view(), which records no reads.
        """
        if self.reads is not None:
            self.reads.entries[path, True] = None

    def _read_all(self) -> None:
        if self.reads is not None:
            self.reads.entries |= dict.fromkeys(
                (path, True) for path in self.reads.nodes
            )

    def put(self, path: str, content: bytes | None) -> None:
        """Replace the content of a file, or remove the file (None).

        The change is durable and is not recorded as an operation.
        """
        if content is None:
            directory, name = self._parent_and_name(path)
            self._node_cache.clear()
            directory.entries.pop(name, None)
            directory.durable.pop(name, None)
        else:
            self._create_durable(path, content)

    def flip(self, path: str, position: int, bit: int = 0) -> None:
        """Simulate bit rot: flip one bit of a file, on the disk and for its readers."""
        file = self._file(path)
        for content in (
            rotten := bytearray(file.content),
            durable := bytearray(file.durable),
        ):
            if position < len(content):
                content[position] ^= 1 << bit
        file.content = rotten
        file.durable = bytes(durable)
        file.variants = {}

    def is_open(self, handle: int) -> bool:
        return handle in self._handles

    @property
    def open_handles(self) -> list[str]:
        """Return the paths of the open files."""
        return [path for _, path, _ in list(self._handles.values())]

    def write_back(self) -> None:
        """Make all changes so far durable, as the kernel does periodically."""
        self._persist_names(None)
        for file in self._dirty:
            file.sync()
        self._dirty = {}

    def crash_in(self, changes: int | None) -> None:
        """Cut the power in a later call that changes or syncs something.

        0 selects the next such call, and 1 the call after that. None cancels. A change
        is made before the crash, but a sync is not.
        """
        if changes is not None:
            self._crash_in = len(self.operations) + changes
        else:
            self._crash_in = None

    def kill(self) -> None:
        """Kill the process, but not the machine: close files, free locks, keep writes.

        Objects of the killed process become ineffective. A test opens the log again on
        this disk.
        """
        self.forks += 1
        self._handles.clear()
        self._locks.clear()
        self.byte_locks.clear()

    def crash(self) -> None:
        """Cut the power now.

        Every later call on this disk raises SimulatedCrash; crash() itself does not.
        """
        self.is_dead = True
        self.forks += 1  # makes objects of the killed process ineffective

    def after_crash(
        self,
        *,
        limit: int | None = None,
        seed: int | None = None,
        kind: Kind | None = None,
    ) -> Iterator[SimulatedDisk]:
        """Yield each disk that a crash now may leave, once; see crash_states."""
        return (
            state.disk()
            for state in self.crash_states(limit=limit, seed=seed, kind=kind)
        )

    def after_power_cut(self, rng: random.Random) -> SimulatedDisk:
        """Return one disk that a power cut now may leave, chosen by `rng`.

        In a third of the cases, all unsynced changes are lost, and in another third, no
        change is lost. In the other cases, a random part of the changes survives, and
        writes may be torn. This is faster than crash_states(), which lists all disks.
        """
        self._read_all()
        unsynced = self._unsynced_changes()
        mask, contents, what, kind = unsynced.random_choice(rng)
        if self.names == "journal":
            contents = unsynced.ordered(mask, contents)
        tree = unsynced.tree(mask, contents)
        changed = {path: contents[file] for path, file in tree.open}
        return CrashState(self, tree.files, changed, 0, kind, what).disk()

    def crash_states(
        self,
        *,
        limit: int | None = None,
        seed: int | None = None,
        kind: Kind | None = None,
        newest: bool = False,
    ) -> Iterator[CrashState]:
        """Yield the states that a crash at this moment may leave, each once.

        The first state follows a kill, which loses nothing. The second follows a power
        cut that loses all unsynced changes. Then follow names without data, data
        without names, each prefix of the changed names, all changes except one, torn
        and garbled writes, and random mixtures. If there are at most EXHAUSTIVE changes,
        every subset of them is included.

        Args:
            limit: Maximum number of states: the first ones, and a random choice of
                others.
            seed: Seed of the random states, by default the disk's seed.
            kind: Only states of this kind.
            newest: Only states that depend on the last change. A crash before that
                change could have left all other states.
        """
        self._read_all()
        rng = random.Random(
            (self.seed if seed is None else seed) * 1_000_003 + len(self.operations)
        )
        states: dict[int, CrashState] = {}
        trees: dict[int, Tree] = {}
        unsynced = self._unsynced_changes()
        for mask, contents, what, state_kind in unsynced.choices(rng, newest):
            if kind is not None and state_kind != kind:
                continue
            if self.names == "journal":
                contents = unsynced.ordered(mask, contents)
            tree = trees.get(mask)
            if tree is None:
                tree = trees[mask] = unsynced.tree(mask, contents)
            changed = {path: contents[file] for path, file in tree.open}
            key = tree.key
            for item in changed.items():
                key ^= hash(item)
            if key not in states:
                states[key] = CrashState(
                    self, tree.files, changed, key, state_kind, what
                )
        found = list(states.values())
        if limit is not None and len(found) > limit:
            first = max(2, limit // 4)
            found = [*found[:first], *rng.sample(found[first:], max(0, limit - first))][
                :limit
            ]
        return iter(found)

    # -- paths and steps ---------------------------------------------------------------

    def _unsynced_changes(self) -> UnsyncedChanges:
        return UnsyncedChanges(
            self._root,
            tuple(self._journal),
            tuple(self._dirty),
            self._newest,
            self._writing,
            self.names,
            self._path_of,
        )

    def _find(self, path: str) -> Node | None:
        known = self._node_cache.get(path)
        if known is not None:
            return known
        node: Node = self._root
        for name in _parts(path):
            if not isinstance(node, DirectoryNode):
                return None
            found = node.entries.get(name)
            if found is None:
                return None
            node = found
        self._node_cache[path] = node
        return node

    def _get(self, path: str, kind: _Failure = StorageReadError) -> Node:
        """Return the node at a path, or raise the error of a system call."""
        node = self._find(path)
        if node is None:
            # This raises if a part of the path is not a directory.
            self._parent_and_name(path, kind)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def _file(self, path: str) -> File:
        node = self._get(path)
        if isinstance(node, DirectoryNode):
            _fail(errno.EISDIR, path, StorageReadError)
        return node

    def _directory(self, path: str, kind: _Failure = StorageReadError) -> DirectoryNode:
        node = self._get(path, kind)
        if isinstance(node, File):
            _fail(errno.ENOTDIR, path, kind)
        return node

    def _parent_and_name(
        self, path: str, kind: _Failure = StorageWriteError
    ) -> tuple[DirectoryNode, str]:
        """Return the parent directory of a path that exists or will be created."""
        parts = _parts(path)
        node = self._root
        for name in parts[:-1]:
            found = node.entries.get(name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if isinstance(found, File):
                _fail(errno.ENOTDIR, path, kind)
            node = found
        return node, parts[-1] if parts else ""

    def _open_handle(self, handle: int) -> tuple[File, str, bool]:
        if self.is_dead:
            raise SimulatedCrash
        try:
            return self._handles[handle]
        except KeyError:
            raise StorageReadError(f"handle {handle} is not open") from OSError(
                errno.EBADF, os.strerror(errno.EBADF)
            )

    def _fault_for(self, operation: str, path: str) -> int | str | None:
        """Return the fault for the next call, None if there is none."""
        if self.is_dead:
            raise SimulatedCrash
        if self.faults is None:
            return None
        action = self.faults.action_for(operation, path)
        if isinstance(action, Slow):
            raise InvalidConfigError(
                "the action of a fault of SimulatedDisk",
                expected="an action other than Slow, because the clock does not run during a call",
                found=repr(action),
            )
        return action

    def _check_read_fault(self, operation: str, path: str) -> None:
        action = self._fault_for(operation, path)
        if action == "crash":
            self._crash_now()
        if isinstance(action, int):
            _fail(action, path, StorageReadError)

    def _begin(self, operation: str, path: str) -> int | str | None:
        """Record a change or a sync before it happens, and return its fault, if any."""
        action = self._fault_for(operation, path)
        self._writing = None
        if self.observer is not None:
            self.observer(operation, False)
        self.operations.append(Operation(operation, path))
        return action

    def _end(self, operation: str, action: int | str | None, path: str) -> None:
        """Crash or raise the planned error after a change, if there is one."""
        if self.observer is not None:
            self.observer(operation, True)
        self._crash_if_due(action)
        if isinstance(action, int):
            _fail(action, path, StorageWriteError)

    def _crash_if_due(self, action: int | str | None) -> None:
        if action == "crash" or (
            self._crash_in is not None and len(self.operations) > self._crash_in
        ):
            self._crash_now()

    def _crash_now(self) -> None:
        self.crash()
        raise SimulatedCrash

    def _change_names(
        self,
        what: str,
        removed: tuple[DirectoryNode, str] | None,
        added: tuple[DirectoryNode, str, Node] | None,
    ) -> None:
        if removed is not None:
            del removed[0].entries[removed[1]]
            removed[0].modified_ms = self._now_ms
        if added is not None:
            added[0].entries[added[1]] = added[2]
            added[0].modified_ms = self._now_ms
        self._node_cache.clear()
        self._journal.append(Naming(len(self.operations), what, removed, added))
        self._newest = None

    def _change(self, file: File, change: Change) -> None:
        if self.reads is not None:
            self.reads.written.add(file)
        content = file.content
        if isinstance(content, bytes):
            content = file.content = bytearray(content)
        change.apply(content)
        pending = file.pending
        if len(pending) >= _REWRITES and all(
            change.rewrites(before) for before in pending[-_REWRITES:]
        ):
            # After several writes to one position, the number of subsets would explode.
            # The oldest version is assumed to be lost.
            del pending[-_REWRITES]
            file.variants = {}
        pending.append(change)
        file.modified_ms = self._now_ms
        self._dirty[file] = None
        self._newest = file
        if file.mappings is not None:
            file.apply_to_content(change.position, change.data)

    def _path_of(self, file: File) -> str:
        stack = [("", self._root)]
        while stack:
            path, directory = stack.pop()
            for name, node in directory.entries.items():
                if node is file:
                    return f"{path}/{name}"
                if isinstance(node, DirectoryNode):
                    stack.append((f"{path}/{name}", node))
        return f"removed file {file.number}"

    # -- files -------------------------------------------------------------------------

    @overload
    def open(
        self,
        path: str | os.PathLike[str],
        mode: OpenTextMode,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> TextFile: ...
    @overload
    def open(  # type: ignore[overload-overlap]
        self, path: str | os.PathLike[str], mode: OpenBinaryMode, buffering: Literal[0]
    ) -> RawFile: ...
    @overload
    def open(
        self, path: str | os.PathLike[str], mode: OpenBinaryMode, buffering: int = -1
    ) -> BinaryFile: ...
    @overload
    def open(
        self,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
        permissions: int = FILE_PERMISSIONS,
    ) -> int: ...
    def open(
        self,
        path: str | os.PathLike[str],
        mode: str | None = None,
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
        permissions: int = FILE_PERMISSIONS,
    ) -> int | AnyFile:
        """Open a file.

        With a mode, return a file object like the standard library's open(), with
        `sync()` instead of a descriptor. Without a mode, return a handle, like
        FS.open().
        """
        path = os.fspath(path)
        if mode is not None:
            return open_file(self, path, mode, buffering, encoding, errors, newline)
        with self._mutex:
            node = self._find(path)
            if node is None and create:
                directory, name = self._parent_and_name(path)
                action = self._begin("create", path)
                if isinstance(action, int):
                    self._end("create", action, path)
                node = File(next(self._numbers), b"", self._now_ms)
                self._change_names(f"create {path}", None, (directory, name, node))
                self._end("create", action, path)
            else:
                kind: _Failure = StorageReadError
                if write:
                    kind = StorageWriteError
                action = self._fault_for("open", path)
                if action == "crash":
                    self._crash_now()
                if isinstance(action, int):
                    _fail(action, path, kind)
                if node is None:
                    node = self._get(path, kind)
                if create and exclusive:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                if isinstance(node, DirectoryNode):
                    _fail(errno.EISDIR, path, kind)
            handle = Handle(next(self._next_handle))
            self._handles[handle] = node, path, write
            return handle

    def close(self, handle: int) -> None:
        self._handles.pop(handle, None)
        self._unreported_sync_errors.pop(handle, None)
        self.byte_locks.release_all(handle)

    def pread(self, handle: int, size: int, position: int) -> bytes:
        file, path, _ = self._open_handle(handle)
        if self.faults is not None:
            self._check_read_fault("pread", path)
        if self.reads is not None:
            self.reads.record(file, True)
        return bytes(file.content[position : position + size])

    def pwrite(self, handle: int, data: Data, position: int) -> None:
        file, path, writable = self._open_handle(handle)
        if not len(data) and self.faults is None:
            return
        with self._mutex:
            action = self._begin("pwrite", path)
            if not writable:
                action = errno.EBADF
                data = b""
            written = bytes(data)
            if isinstance(action, int):
                written = written[: len(written) // 2]
            elif action == "rot" and written:
                index = self._random.randrange(len(written))
                written = (
                    written[:index]
                    + bytes([written[index] ^ 1 << self._random.randrange(8)])
                    + written[index + 1 :]
                )
            elif action == "misdirect":
                position += SECTOR
            if self.capacity_bytes is not None:
                free_bytes = self.free_bytes("/")
                growth = max(0, position + len(written) - len(file.content))
                if growth > free_bytes:
                    written = written[: max(0, len(written) - (growth - free_bytes))]
                    action = errno.ENOSPC
            if written:
                self._change(file, Change(len(self.operations), position, written))
                self._writing = file
            self._end("pwrite", action, path)
            self._writing = None

    def truncate(self, handle: int, size: int) -> None:
        file, path, writable = self._open_handle(handle)
        with self._mutex:
            if size == len(file.content) and self.faults is None:
                if self.reads is not None:
                    self.reads.record_truncation(file, size)
                return
            action = self._begin("truncate", path)
            if not writable:
                action = errno.EINVAL
            if isinstance(action, int):
                self._end("truncate", action, path)
            if self.reads is not None:
                self.reads.record_truncation(file, size)
            if size != len(file.content):
                self._change(file, Change(len(self.operations), size, None))
            self._end("truncate", action, path)

    def fdatasync(self, handle: int) -> None:
        self._sync("fdatasync", handle)

    def fsync(self, handle: int | AnyFile) -> None:
        """Sync a handle or a file object, like os.fsync()."""
        if isinstance(handle, int):
            self._sync("fsync", handle)
        else:
            handle.sync()

    def _sync(self, operation: str, handle: int) -> None:
        file, path, _ = self._open_handle(handle)
        with self._mutex:
            action = self._begin(operation, path)
            self._crash_if_due(action)
            if isinstance(action, int):
                file.apply_failed_sync(len(self.operations))
                if not file.pending:
                    self._dirty.pop(file, None)
                # A copy, because garbage collection may close handles during the loop.
                handles = list(self._handles.items())
                others = [
                    other
                    for other, held in handles
                    if held[0] is file and other != handle
                ]
                self._unreported_sync_errors.update((other, action) for other in others)
                _raise_sync(OSError(action, os.strerror(action)), path)
            if action != "lie":
                if file.pending:
                    file.sync()
                    self._dirty.pop(file, None)
                if self.names == "journal" and operation == "fsync":
                    self._persist_names(None)
            if self.observer is not None:
                self.observer(operation, True)
            failed_before = self._unreported_sync_errors.pop(handle, None)
            if failed_before is not None:
                _raise_sync(OSError(failed_before, os.strerror(failed_before)), path)

    def size(self, handle: int) -> int:
        file, path, _ = self._open_handle(handle)
        if self.faults is not None:
            self._check_read_fault("size", path)
        if self.reads is not None:
            self.reads.record(file, False)
        return len(file.content)

    def drop_cache(self, handle: int, position: int) -> bool:
        """Discard the pages that a failed sync has marked clean, so that programs no
        longer read the lost data.

        While the file is mapped, return False without any effect.
        """
        file, _, _ = self._open_handle(handle)
        with self._mutex:
            if file.mappings is not None and any(
                reference() is not None for reference in file.mappings
            ):
                return False
            if file.has_lost_sync:
                file.content = file.content_with((1 << len(file.pending)) - 1)
                file.has_lost_sync = False
            return True

    def map(self, handle: int, size: int) -> memoryview:
        """Map a file like OsFS.map. Later writes change the view.

        Bytes beyond a truncation are read as 0xDE. On a real disk, the process would be
        killed by SIGBUS.
        """
        file, path, _ = self._open_handle(handle)
        if self.faults is not None:
            self._check_read_fault("map", path)
        if not 0 < size <= len(file.content):
            _fail(errno.EINVAL, path, StorageReadError)
        if self.reads is not None:
            self.reads.record(file, True)
        memory = MappedPages(file.content[:size])
        file.mappings = [*(file.mappings or ()), weakref.ref(memory)]
        return memoryview(memory).toreadonly()

    # -- names -------------------------------------------------------------------------

    def is_readable(self, view: memoryview, *, touch: bool = False) -> bool:
        """Return True, because a mapping of this disk is a copy in memory."""
        return True

    def file_size(self, path: str) -> int:
        self._check_read_fault("file_size", path)
        file = self._file(path)
        if self.reads is not None:
            self.reads.record(file, False)
        return len(file.content)

    def identity(self, path_or_handle: str | int) -> tuple[int, int]:
        if isinstance(path_or_handle, int):
            file, path, _ = self._open_handle(path_or_handle)
            self._check_read_fault("identity", path)
            return 1, file.number
        self._check_read_fault("identity", path_or_handle)
        return 1, self._get(path_or_handle).number

    def exists(self, path: str) -> bool:
        self._fault_for("exists", path)
        return self._find(path) is not None

    def is_directory(self, path: str) -> bool:
        self._fault_for("is_directory", path)
        return isinstance(self._find(path), DirectoryNode)

    def listdir(self, path: str) -> list[str]:
        """Return the names of a directory in a rotated order.

        The order in a real directory is arbitrary too.
        """
        self._check_read_fault("listdir", path)
        names = list(self._directory(path).entries)
        rotation = 0
        if names:
            rotation = (self.seed + len(self.operations)) % len(names)
        return names[rotation:] + names[:rotation]

    def mkdir(self, path: str, *, permissions: int = DIRECTORY_PERMISSIONS) -> None:
        with self._mutex:
            directory, name = self._parent_and_name(path)
            if not name or name in directory.entries:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            action = self._begin("mkdir", path)
            if not isinstance(action, int):
                self._change_names(
                    f"mkdir {path}",
                    None,
                    (directory, name, DirectoryNode(next(self._numbers), self._now_ms)),
                )
            self._end("mkdir", action, path)

    def free_bytes(self, path: str) -> int:
        """Return the free part of capacity_bytes; without a capacity, an exabyte."""
        if self.capacity_bytes is None:
            return 1 << 60
        return self.capacity_bytes - sum(
            len(content) for content in self.view().values() if content is not None
        )

    def total_bytes(self, path: str) -> int:
        if self.capacity_bytes is None:
            return 1 << 60
        return self.capacity_bytes

    def rename(self, source: str, target: str) -> None:
        with self._mutex:
            old, old_name = self._parent_and_name(source)
            new, new_name = self._parent_and_name(target)
            node = self._get(source, StorageWriteError)
            existing = new.entries.get(new_name)
            if existing is node:
                return
            action = self._begin("rename", target)
            if isinstance(node, DirectoryNode) and _parts(target)[
                : len(_parts(source))
            ] == _parts(source):
                action = errno.EINVAL
            elif isinstance(existing, DirectoryNode):
                if isinstance(node, File):
                    action = errno.EISDIR
                elif existing.entries:
                    action = errno.ENOTEMPTY
            elif existing is not None and isinstance(node, DirectoryNode):
                action = errno.ENOTDIR
            if not isinstance(action, int):
                self._change_names(
                    f"rename {source} to {target}",
                    (old, old_name),
                    (new, new_name, node),
                )
            self._end("rename", action, source)

    def replace(
        self, source: str | os.PathLike[str], target: str | os.PathLike[str]
    ) -> None:
        """Rename a file, like os.replace(). This is another name for rename()."""
        self.rename(os.fspath(source), os.fspath(target))

    def link(self, source: str, target: str) -> bool:
        """Link a file like OsFS.link.

        After a crash, the two names are separate files with the same content.
        """
        with self._mutex:
            node = self._get(source, StorageWriteError)
            parent, name = self._parent_and_name(target)
            action = self._begin("link", target)
            if name in parent.entries:
                action = errno.EEXIST
            if not isinstance(action, int):
                self._change_names(
                    f"link {source} to {target}", None, (parent, name, node)
                )
            self._end("link", action, target)
        return True

    def unlink(self, path: str) -> None:
        with self._mutex:
            node = self._get(path, StorageWriteError)
            directory, name = self._parent_and_name(path)
            action = self._begin("unlink", path)
            if isinstance(node, DirectoryNode):
                action = errno.EISDIR
            if not isinstance(action, int):
                self._change_names(f"unlink {path}", (directory, name), None)
            self._end("unlink", action, path)

    def rmdir(self, path: str) -> None:
        with self._mutex:
            node = self._get(path, StorageWriteError)
            directory, name = self._parent_and_name(path)
            action = self._begin("rmdir", path)
            if isinstance(node, File):
                action = errno.ENOTDIR
            elif node.entries:
                action = errno.ENOTEMPTY
            if not isinstance(action, int):
                self._change_names(f"rmdir {path}", (directory, name), None)
            self._end("rmdir", action, path)

    def modified_ms(self, path: str) -> int:
        self._check_read_fault("modified_ms", path)
        return self._get(path).modified_ms

    def sync_dir(self, path: str) -> None:
        with self._mutex:
            directory = self._directory(path, StorageWriteError)
            action = self._begin("sync_dir", path)
            self._crash_if_due(action)
            if isinstance(action, int):
                _raise_sync(OSError(action, os.strerror(action)), path)
            if action != "lie" and self._journal:
                self._persist_names(None if self.names == "journal" else directory)
            if self.observer is not None:
                self.observer("sync_dir", True)

    def _persist_names(self, directory: DirectoryNode | None) -> None:
        """Make changes of names durable, in one directory or everywhere (None)."""
        remaining = []
        may_have_unlinked = False  # whether a file may have lost its last name
        for naming in self._journal:
            if directory is not None and not naming.affects(directory):
                remaining.append(naming)
                continue
            if naming.removed is not None:
                naming.removed[0].durable.pop(naming.removed[1], None)
                may_have_unlinked = True
            if naming.added is not None:
                parent, name, node = naming.added
                may_have_unlinked = may_have_unlinked or name in parent.durable
                parent.durable[name] = node
        self._journal = remaining
        # Only for many dirty files, because this loop over all directories is slow.
        if may_have_unlinked and len(self._dirty) > 4:
            reachable = {
                naming.added[2] for naming in remaining if naming.added is not None
            }
            stack = [self._root]
            while stack:
                parent = stack.pop()
                for node in {
                    *parent.entries.values(),
                    *parent.durable.values(),
                }:
                    reachable.add(node)
                    if isinstance(node, DirectoryNode):
                        stack.append(node)
            self._dirty = {file: None for file in self._dirty if file in reachable}

    def permissions(self, path: str) -> int:
        """Return the permissions that all files or all directories have here."""
        if isinstance(self._get(path), DirectoryNode):
            return DIRECTORY_PERMISSIONS
        return FILE_PERMISSIONS

    def real_path(self, path: str) -> str:
        return "/" + "/".join(_parts(path))

    # -- to and from real directories --------------------------------------------------

    @classmethod
    def load(cls, directory: str | os.PathLike[str], **options: Any) -> SimulatedDisk:
        """Return a disk that has a copy of a real directory as its root."""
        root = Path(directory)
        files: dict[str, bytes | None] = {}
        for path in sorted(root.rglob("*")):
            files[path.relative_to(root).as_posix()] = (
                path.read_bytes() if path.is_file() else None
            )
        return cls(files, **options)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the visible content into a real directory, for other tools."""
        self._read_all()
        for path, content in sorted(self.view().items()):
            target = Path(directory, path.lstrip("/"))
            if content is None:
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
