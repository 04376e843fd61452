"""A disk in memory that knows what a crash may leave of it, and fails when a plan (faults.py) says so.

`SimulatedDisk` is an `fs.FS`: what runs on the operating system's files runs on it unchanged. What it models:

- A file has the content that programs see and the content that is on the disk; between the two stand the writes and
  truncations since its last sync. A sync of the file makes them durable, but not its name.
- Names are changed in order (create, rename, unlink, mkdir, rmdir) and are durable once their directory is synced.
- A crash keeps what is durable. Of the rest it may keep anything: each change or none, writes torn between sectors and
  at any byte, zeros or garbage where a file grew, the new size without the data. `crash_states` lists these disks.
- A sync that failed has forgotten the data: programs still see it, the next sync succeeds, and it is not on the disk.

Rules:
- The same calls give the same disks. Chance comes from `seed`, time from `advance`; nothing waits.
- Errors are those of `fs.OsFS`, with the OSError as their cause; `FaultPlan` says which call gets which.
- After a crash this object is dead: calls raise `SimulatedCrash`. Life goes on in the disks it lists.

It does not model permissions, links, free blocks beyond `capacity_bytes`, or two processes at once.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import posixpath
import random
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

import attrs

from logcore.errors import LogLockedError, StorageReadError, StorageWriteError
from logcore.fs import Data, Lock, Shared, Watch, _raise, _raise_sync
from logcore.testing.faults import FaultPlan, Operation

#: What a disk writes whole or not at all.
SECTOR: Final = 512
_PAGE: Final = 4096
#: Changes of a file or of names, of which every subset is tried; of more, chosen and random ones.
EXHAUSTIVE: Final = 10
#: Writes of the same place in a row that are remembered.
_REWRITES: Final = 3
_START_MS: Final = 1_700_000_000_000

Kind = Literal["kill", "power"]
Names = Literal["posix", "journal"]


class SimulatedCrash(BaseException):
    """The machine is off. No `except Exception` catches it, as nothing catches a power cut."""


class _Change(NamedTuple):
    """A write (data at position) or, with data None, a change of size to position. order: among all of the disk."""

    order: int
    position: int
    data: bytes | None

    def rewrites(self, other: _Change) -> bool:
        mine, theirs = self.data, other.data
        return mine is not None and theirs is not None and (self.position, len(mine)) == (other.position, len(theirs))

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            if len(content) > self.position:
                del content[self.position :]
            else:
                content.extend(bytes(self.position - len(content)))
            return
        if len(content) < self.position:
            content.extend(bytes(self.position - len(content)))
        content[self.position : self.position + len(self.data)] = self.data


class _Mapping(bytearray):
    """Memory that stands for mapped pages; it goes when the last view of it does."""


class _File:
    __slots__ = ("content", "durable", "forgot", "mappings", "modified_ms", "number", "pending", "variants")

    def __init__(self, number: int, content: bytes, modified_ms: int) -> None:
        self.number = number
        self.content: bytes | bytearray = content
        self.durable = content
        self.pending: list[_Change] = []
        self.forgot = False  # a sync failed: content is not what durable and pending make
        self.modified_ms = modified_ms
        self.mappings: list[weakref.ref[_Mapping]] | None = None
        self.variants: dict[int, bytes] = {}

    def seen(self) -> bytes:
        """What programs see."""
        return bytes(self.content)

    def of(self, mask: int) -> bytes:
        """The content with those pending changes whose bits are set."""
        found = self.variants.get(mask)
        if found is None:
            if mask == 0:
                found = self.durable
            elif not self.forgot and mask == (1 << len(self.pending)) - 1:
                found = bytes(self.content)
            else:
                content = bytearray(self.durable)
                for at, change in enumerate(self.pending):
                    if mask >> at & 1:
                        change.apply(content)
                found = bytes(content)
            self.variants[mask] = found
        return found

    def sync(self) -> None:
        self.durable = self.of((1 << len(self.pending)) - 1)
        self.pending = []
        self.variants = {}

    def forget(self, order: int) -> None:
        """What a failed sync does: the pages are called clean, and only the size is still to be written."""
        self.forgot = True
        self.pending = [_Change(order, len(self.content), None)] if len(self.content) != len(self.durable) else []
        self.variants = {}

    def show(self, start: int, data: Data | None) -> None:
        """Lets mappings see a write, or (data None) that the file now ends at start."""
        assert self.mappings is not None
        living = [(reference, memory) for reference in self.mappings if (memory := reference()) is not None]
        self.mappings = [reference for reference, _ in living] or None
        for _, memory in living:
            if data is not None:
                stop = min(len(memory), start + len(data))
                if start < stop:
                    memory[start:stop] = data[: stop - start]
            elif start < len(memory):  # whole pages behind the end would kill the process; they read as ruins here
                edge = min(len(memory), -(-start // _PAGE) * _PAGE)
                memory[start:edge] = bytes(edge - start)
                memory[edge:] = b"\xde" * (len(memory) - edge)


class _Directory:
    __slots__ = ("durable", "entries", "modified_ms", "number")

    def __init__(self, number: int, modified_ms: int) -> None:
        self.number = number
        self.entries: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}
        self.modified_ms = modified_ms

    def seen(self) -> None:
        return None


_Node = _File | _Directory
#: Of the disks that a crash may leave: the changed names that stay, contents of files, what it is, and what can do it.
_Choice = tuple[int, Mapping[_File, bytes], str | Callable[[], str], Kind]


class _Naming(NamedTuple):
    """A change of names: what goes from `gone`, then what comes to `come`. order: among all changes of the disk."""

    order: int
    what: str
    gone: tuple[_Directory, str] | None
    come: tuple[_Directory, str, _Node] | None

    def touches(self, directory: _Directory) -> bool:
        return any(place is not None and place[0] is directory for place in (self.gone, self.come))


def _said(journal: Sequence[_Naming], mask: int, how: str) -> str:
    kept = [naming.what for at, naming in enumerate(journal) if mask >> at & 1]
    names = f" ({', '.join(kept)})" if 0 < len(kept) < 5 else ""
    return f"of the changed names {len(kept)} of {len(journal)}{names}, {how}"


class _Tree(NamedTuple):
    """What names lead to after a crash. files: durable contents by path. open: those of which content may be lost.
    key: of the others, to which these are added.
    """

    files: dict[str, bytes | None]
    open: list[tuple[str, _File]]
    key: int


class CrashState:
    """A disk that a crash may leave. files: path -> content, None for a directory. what: how it came to be.

    kind: "kill" when the end of the process alone leaves it (all that was written is there, the last write perhaps cut
    short), "power" when it takes a loss of power. key: 64 bits that are the same for the same files, within this
    process. now_ms: when it happened.
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
        self._origin, self._tree, self._changed, self._what = origin, tree, changed, what
        self.key = key
        self.kind: Kind = kind
        self.now_ms = origin.now_ms()

    @property
    def files(self) -> dict[str, bytes | None]:
        return {**self._tree, **self._changed}

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def disk(self) -> SimulatedDisk:
        """A new disk with these files, all of them durable."""
        disk = SimulatedDisk(self.files, seed=self._origin.seed, now_ms=self.now_ms)
        disk.history = f"{self._origin.history}, {self.what}" if self._origin.history else self.what
        return disk

    def __repr__(self) -> str:
        sizes = ", ".join(f"{path}: {len(data)}" for path, data in sorted(self.files.items()) if data is not None)
        return f"<CrashState {self.kind}: {self.what}; {sizes}>"


class Asked:
    """What a function asked a disk about the files that were there when it began, in order: (path, True) for the
    content, (path, False) for the size.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        self.nodes = disk._nodes()
        self.questions: dict[tuple[str, bool], None] = {}
        self.written: set[_File] = set()
        self._blank: set[_File] = set()  # cut to nothing: what was in it plays no part any more
        self._paths: dict[_Node, list[str]] = {}
        for path, node in self.nodes.items():
            self._paths.setdefault(node, []).append(path)

    def ask(self, file: _Node, is_whole: bool) -> None:
        if file not in self._blank:
            for path in self._paths.get(file, ()):
                self.questions[path, is_whole] = None

    def cut(self, file: _File, size: int) -> None:
        self.written.add(file)
        if size == 0:
            self._blank.add(file)


_Failure = type[StorageReadError] | type[StorageWriteError]


def _fail(code: int, path: str, kind: _Failure) -> NoReturn:
    what = "read" if kind is StorageReadError else "write"
    _raise(OSError(code, os.strerror(code)), path, kind, what)


@functools.lru_cache(1 << 16)
def _parts(path: str) -> tuple[str, ...]:
    normal = posixpath.normpath("/" + os.fspath(path))
    return tuple(part for part in normal.split("/") if part)


class SimulatedDisk:
    """A disk in memory; give it as `fs=` to logcore.open and logcore.open_dir.

    files: what is there at first, durably: path -> content, None for an empty directory. Paths that are not absolute
    begin at the root. seed: of random_bytes and of the garbage in crash states. faults: see FaultPlan; may be set and
    removed at any time. capacity_bytes: what all files may hold together. names: "posix", where each change of a name
    may be lost by itself, or "journal", as on ext4, where they are kept in order, any fsync keeps all before it, and a
    rename not without the data written before it. operations: all that changed something or synced, in order.
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
        self.seed = seed
        self.faults = faults
        self.capacity_bytes = capacity_bytes
        self.names = names
        self.history = ""
        self.operations: list[Operation] = []
        self.is_dead = False
        #: Called with (operation, whether it is done) around each change and sync; for explorers.
        self.observer: Any = None
        self._now_ms, self._monotonic_ms = now_ms, 0
        self._mutex = threading.RLock()
        self._numbers = itertools.count(1)
        self._handles: dict[int, tuple[_File, str, bool]] = {}
        self._next_handle = itertools.count(3)
        self._locks: dict[_Directory, _LockMembers] = {}
        self._journal: list[_Naming] = []
        self._dirty: dict[_File, None] = {}
        self._newest: _File | None = None  # whose change came last; None when it was one of names
        self._writing: _File | None = None  # during a write
        self._crash_in: int | None = None
        self._asked: Asked | None = None  # for Known
        self._root = _Directory(next(self._numbers), now_ms)
        self._found: dict[str, _Node] = {}  # paths that were looked up since a name changed
        for path, content in (files or {}).items():
            self._plant(path, content)

    @functools.cached_property
    def _random(self) -> random.Random:
        return random.Random(self.seed)

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else f"{len(self._journal)} names and {len(self._dirty)} files not synced"
        return f"<SimulatedDisk {len(self.files())} files, {state}{f'; {self.history}' if self.history else ''}>"

    # -- for tests -----------------------------------------------------------------------------------------------

    def _plant(self, path: str, content: bytes | None) -> None:
        """Puts a file or a directory there, durably."""
        self._found.clear()
        place = self._root
        parts = _parts(path)
        for name in parts[:-1] if content is not None else parts:
            node = place.entries.get(name)
            if node is None:
                node = place.entries[name] = place.durable[name] = _Directory(next(self._numbers), self._now_ms)
            assert isinstance(node, _Directory), path
            place = node
        if content is not None:
            place.entries[parts[-1]] = place.durable[parts[-1]] = _File(next(self._numbers), content, self._now_ms)

    def files(self) -> dict[str, bytes]:
        """What programs see now: path -> content of every file."""
        self._read_all()
        return {path: content for path, content in self.view().items() if content is not None}

    def view(self) -> dict[str, bytes | None]:
        """What programs see now, with None for directories; for Known, this asks for nothing but names."""
        return {path: node.seen() for path, node in self._nodes().items()}

    def _nodes(self) -> dict[str, _Node]:
        found: dict[str, _Node] = {}
        waiting: list[tuple[str, _Directory]] = [("", self._root)]
        while waiting:
            path, directory = waiting.pop()
            for name, node in directory.entries.items():
                found[f"{path}/{name}"] = node
                if isinstance(node, _Directory):
                    waiting.append((f"{path}/{name}", node))
        return found

    def content(self, path: str) -> bytes:
        """What programs see in a file."""
        file = self._file(path)
        if self._asked is not None:
            self._asked.ask(file, True)
        return bytes(file.content)

    def is_as(self, before: Mapping[str, bytes | None]) -> bool:
        """Whether view() is what it was when the function began that Known runs, or (without that) just what it was."""
        asked, nodes = self._asked, self._nodes()
        if asked is not None:
            for path, node in asked.nodes.items():
                if node in asked.written or nodes.get(path) is not node:
                    asked.questions[path, True] = None
        return before == {path: node.seen() for path, node in nodes.items()}

    def note_read(self, path: str) -> None:
        """For Known: the content that was there when its function began decides something, of which view() told."""
        if self._asked is not None:
            self._asked.questions[path, True] = None

    def _read_all(self) -> None:
        if self._asked is not None:
            self._asked.questions |= dict.fromkeys((path, True) for path in self._asked.nodes)

    def replace(self, path: str, content: bytes | None) -> None:
        """Puts other content into a file, or (None) removes it, durably and behind everybody's back."""
        if content is None:
            directory, name = self._place(path)
            self._found.clear()
            directory.entries.pop(name, None)
            directory.durable.pop(name, None)
        else:
            self._plant(path, content)

    def flip(self, path: str, position: int, bit: int = 0) -> None:
        """Bit rot: turns one bit of a file around, on the disk and for whoever reads it."""
        file = self._file(path)
        for content in (rotten := bytearray(file.content), durable := bytearray(file.durable)):
            if position < len(content):
                content[position] ^= 1 << bit
        file.content, file.durable, file.variants = rotten, bytes(durable), {}

    @property
    def open_handles(self) -> list[str]:
        """Paths of the files that are open."""
        return [path for _, path, _ in self._handles.values()]

    def advance(self, milliseconds: int) -> None:
        """Lets time pass, on both clocks."""
        self._now_ms += milliseconds
        self._monotonic_ms += milliseconds

    def set_wall_clock(self, now_ms: int) -> None:
        """A jump of the wall clock, which the monotonic one does not see."""
        self._now_ms = now_ms

    def write_back(self) -> None:
        """What the system does from time to time unasked: all that was written and renamed so far becomes durable."""
        self._keep_names(None)
        for file in self._dirty:
            file.sync()
        self._dirty = {}

    def crash_in(self, changes: int | None) -> None:
        """The power goes in the changes-th call from now on that changes or syncs something, 0 being the next: a change
        has reached the disk's queue then, a sync has not begun. None takes that back.
        """
        self._crash_in = None if changes is None else len(self.operations) + changes

    def kill(self) -> None:
        """The process dies and the machine lives: files are closed and locks freed, the system keeps what was written.
        Objects of the process that died stay silent; open the log again on this disk.
        """
        self.forks += 1
        self._handles.clear()
        self._locks.clear()

    def crash(self) -> None:
        """The power goes now. What runs on this disk gets SimulatedCrash from each call; no SimulatedCrash is raised
        here.
        """
        self.is_dead = True
        self.forks += 1  # so that the objects of the process that died stay silent

    def after_crash(
        self, *, limit: int | None = None, seed: int | None = None, kind: Kind | None = None
    ) -> Iterator[SimulatedDisk]:
        """Every disk that a crash at this moment may leave, each once and ready to be opened; see crash_states."""
        return (state.disk() for state in self.crash_states(limit=limit, seed=seed, kind=kind))

    def crash_states(
        self,
        *,
        limit: int | None = None,
        seed: int | None = None,
        kind: Kind | None = None,
        newest: bool = False,
    ) -> Iterator[CrashState]:
        """What a crash at this moment may leave, each state once.

        The first is a kill that loses nothing, the second a power cut that loses all that was not synced; then names
        without data, data without names, every prefix of the changed names and every change left out, torn and
        garbled writes, random mixtures; and every subset of the changes, as long as there are at most EXHAUSTIVE.
        limit: not more than so many, the first of them and others by chance. seed: of the random ones, by default the
        disk's. kind: only these. newest: only states in which the last change plays a part; what could be before it,
        can still be.
        """
        self._read_all()
        rng = random.Random((self.seed if seed is None else seed) * 1_000_003 + len(self.operations))
        states: dict[int, CrashState] = {}
        trees: dict[int, _Tree] = {}
        for mask, contents, what, state_kind in self._states(rng, newest):
            if kind is not None and state_kind != kind:
                continue
            if self.names == "journal":
                contents = self._ordered(mask, contents)
            tree = trees.get(mask)
            if tree is None:
                tree = trees[mask] = self._tree(mask, contents)
            changed = {path: contents[file] for path, file in tree.open}
            key = tree.key
            for item in changed.items():
                key ^= hash(item)
            if key not in states:
                states[key] = CrashState(self, tree.files, changed, key, state_kind, what)
        found = list(states.values())
        if limit is not None and len(found) > limit:
            first = max(2, limit // 4)
            found = [*found[:first], *rng.sample(found[first:], max(0, limit - first))][:limit]
        return iter(found)

    # -- what a crash leaves ------------------------------------------------------------------------------------

    def _states(self, rng: random.Random, newest: bool) -> Iterator[_Choice]:
        names, files, journal = len(self._journal), list(self._dirty), tuple(self._journal)
        every = (1 << names) - 1
        new = {file: file.of((1 << len(file.pending)) - 1) for file in files}
        old = {file: file.durable for file in files}
        by_name = newest and self._newest is None
        changed = self._newest if newest else None  # the file that must not be as it was before its last change

        yield every, {file: bytes(file.content) for file in files}, "killed", "kill"
        if by_name and not names:
            return
        if not newest:
            yield 0, old, "all that was not synced is gone", "power"
        masks = self._name_masks(names)
        if by_name:
            masks = [mask for mask in masks if mask >> (names - 1) & 1]
        if changed is not None:
            masks_of_old = []
        else:
            masks_of_old = masks
        for mask in masks:
            yield mask, new, functools.partial(_said, journal, mask, "with all data"), "power"
        for mask in masks_of_old:
            yield mask, old, functools.partial(_said, journal, mask, "without unsynced data"), "power"
        if changed is not None and len(files) > 1:
            yield every, {**old, changed: new[changed]}, f"only the data of {changed.number}", "power"
        for file in files if changed is None and not by_name else [changed] if changed is not None else []:
            others = [new, old] if len(files) > 1 else [new]
            path = self._path_of(file)
            for content, what, cut in self._garbled(file, rng):
                for mask in {every, 0}:
                    for rest in others:
                        kind: Kind = (
                            "kill" if cut and mask == every and rest is new and file is self._writing else "power"
                        )
                        yield mask, {**rest, file: content}, f"{what} of {path}", kind
        yield from self._subsets(names, files, by_name, changed)
        for _ in range(4):
            if self.names == "journal":
                mask = rng.choice(masks)
            else:
                mask = rng.getrandbits(names) if names else 0
                if by_name:
                    mask |= 1 << (names - 1)
            mixed = {file: self._random_content(file, rng) for file in files}
            yield mask, mixed, "a random mixture", "power"

    def _subsets(self, names: int, files: list[_File], by_name: bool, changed: _File | None) -> Iterator[_Choice]:
        count = names + sum(len(file.pending) for file in files)
        if count <= EXHAUSTIVE:
            choices: list[Iterable[tuple[int, ...]]] = []
            ranges = [range(1 << len(file.pending)) for file in files]
            for at, file in enumerate(files):
                if file is changed:
                    ranges[at] = range(1 << (len(file.pending) - 1), 1 << len(file.pending))
            lowest = 1 << (names - 1) if by_name else 0
            name_masks = range(lowest, 1 << names) if self.names == "posix" else self._name_masks(names)
            choices = [[(mask,) for mask in name_masks], itertools.product(*ranges)]
            for (mask,), masks in itertools.product(*choices):
                contents = {file: file.of(bits) for file, bits in zip(files, masks, strict=True)}
                yield mask, contents, "a subset of the changes", "power"
            return
        every = (1 << names) - 1
        new = {file: file.of((1 << len(file.pending)) - 1) for file in files}
        for file in files:
            full = (1 << len(file.pending)) - 1
            path = self._path_of(file)
            for at in range(len(file.pending)):
                if file is changed and at == len(file.pending) - 1:
                    continue
                contents = {**new, file: file.of(full & ~(1 << at))}
                yield every, contents, f"without change {at} of {path}", "power"
                contents = {**new, file: file.of((1 << at) - 1)}
                yield every, contents, f"only {at} changes of {path}", "power"

    def _name_masks(self, names: int) -> list[int]:
        """All, none, every prefix and every change left out; only prefixes where a journal keeps the order."""
        every = (1 << names) - 1
        masks = [every, *((1 << count) - 1 for count in range(names))]
        if self.names == "posix":
            masks += [every & ~(1 << at) for at in range(names - 1)]
        return list(dict.fromkeys(masks))

    def _tree(self, mask: int, open: Container[_File]) -> _Tree:
        """What stands where, after a crash that keeps these changes of names."""
        changed: dict[_Directory, dict[str, _Node]] = {}
        for at, naming in enumerate(self._journal):
            if mask >> at & 1:
                if naming.gone is not None:
                    directory = naming.gone[0]
                    if directory not in changed:
                        changed[directory] = dict(directory.durable)
                    changed[directory].pop(naming.gone[1], None)
                if naming.come is not None:
                    directory = naming.come[0]
                    if directory not in changed:
                        changed[directory] = dict(directory.durable)
                    changed[directory][naming.come[1]] = naming.come[2]
        tree = _Tree({}, [], 0)
        key = 0
        waiting = [("", self._root)]
        while waiting:
            above, directory = waiting.pop()
            for name, node in changed.get(directory, directory.durable).items():
                path = f"{above}/{name}"
                content = None
                if isinstance(node, _Directory):
                    waiting.append((path, node))
                else:
                    content = node.durable
                    if node in open:
                        tree.open.append((path, node))
                tree.files[path] = content
                if not tree.open or tree.open[-1][0] != path:
                    key ^= hash((path, content))
        return tree._replace(key=key)

    def _ordered(self, mask: int, contents: Mapping[_File, bytes]) -> dict[_File, bytes]:
        """A renamed file has at least what was written before the rename, where the file system sees to that."""
        ordered = dict(contents)
        for at, naming in enumerate(self._journal):
            if mask >> at & 1 and naming.gone is not None and naming.come is not None:
                node = naming.come[2]
                if isinstance(node, _File) and node in ordered:
                    before = sum(change.order < naming.order for change in node.pending)
                    if before == len(node.pending):
                        ordered[node] = node.of((1 << before) - 1)
                    elif before:
                        ordered[node] = node.of((1 << before) - 1 | 1 << before)
        return ordered

    def _garbled(self, file: _File, rng: random.Random) -> Iterator[tuple[bytes, str, bool]]:
        """(content, what it is, whether the end of a process can leave it): the last change of a file, half done."""
        if not file.pending:
            return
        count = len(file.pending)
        before, after = file.of((1 << (count - 1)) - 1), file.of((1 << count) - 1)
        change = file.pending[-1]
        if change.data is None:
            return
        start, size = change.position, len(change.data)
        stop = start + size
        sectors = range(start // SECTOR * SECTOR + SECTOR, stop, SECTOR)
        cuts = dict.fromkeys(
            [*sectors, *(start + cut for cut in (1, size // 3, size // 2, size - 1) if 0 < cut < size)]
        )
        base = before if len(before) >= start else before + bytes(start - len(before))
        for cut in list(cuts)[:12]:
            yield base[:start] + after[start:cut] + base[cut:], f"the first {cut - start} bytes of the last write", True
            torn = after[:cut] + base[cut:].ljust(len(after) - cut, b"\0")
            yield torn[: len(after)], f"the first {cut - start} bytes of the last write, at its full size", False
            hole = base[start:cut].ljust(cut - start, b"\0")
            yield after[:start] + hole + after[cut:], f"all but the first {cut - start} bytes of the last write", False
        if len(after) > len(file.durable):
            grown = len(file.durable)
            yield after[:grown] + bytes(len(after) - grown), "zeros in the new part", False
            garbage = rng.randbytes(len(after) - grown)
            yield after[:grown] + garbage, "garbage in the new part", False
            yield before + rng.randbytes(max(0, len(after) - len(before))), "garbage for the last write", False
            yield before + bytes(max(0, len(after) - len(before))), "zeros for the last write", False
            yield file.durable + bytes(len(after) - grown), "the new size and the old data", False
        else:
            yield after[:start] + bytes(size) + after[stop:], "zeros for the last write", False
        for _ in range(4):
            yield self._random_content(file, rng), "a random mixture of sectors", False

    def _random_content(self, file: _File, rng: random.Random) -> bytes:
        """Each sector as some of the changes left it, or zeros, or garbage where the file grew; any size between."""
        if not file.pending:
            return file.durable
        full = (1 << len(file.pending)) - 1
        sizes = [len(file.of((1 << count) - 1)) for count in range(len(file.pending) + 1)]
        size = rng.choice([*sizes, rng.randint(min(sizes), max(sizes))])
        content = bytearray(file.of(rng.choice([full, 0])).ljust(size, b"\0")[:size])
        touched = sorted(
            {
                at
                for change in file.pending
                if change.data
                for at in range(change.position // SECTOR, -(-(change.position + len(change.data)) // SECTOR))
            }
        )
        for sector in touched:
            at, stop = sector * SECTOR, min(size, (sector + 1) * SECTOR)
            if at >= stop:
                continue
            choice = rng.randrange(4)
            if choice < 2:
                content[at:stop] = file.of(rng.getrandbits(len(file.pending)))[at:stop].ljust(stop - at, b"\0")
            elif choice == 2 and at >= len(file.durable):
                content[at:stop] = bytes(stop - at)
            elif choice == 3 and at >= len(file.durable):
                content[at:stop] = rng.randbytes(stop - at)
        return bytes(content)

    # -- paths and steps ----------------------------------------------------------------------------------------

    def _find(self, path: str) -> _Node | None:
        known = self._found.get(path)
        if known is not None:
            return known
        node: _Node = self._root
        for name in _parts(path):
            if not isinstance(node, _Directory):
                return None
            found = node.entries.get(name)
            if found is None:
                return None
            node = found
        self._found[path] = node
        return node

    def _get(self, path: str, kind: _Failure = StorageReadError) -> _Node:
        """What stands there, with the errors of a system call."""
        node = self._find(path)
        if node is None:
            self._place(path, kind)  # which fails, if a directory on the way is none
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def _file(self, path: str) -> _File:
        node = self._get(path)
        if isinstance(node, _Directory):
            _fail(errno.EISDIR, path, StorageReadError)
        return node

    def _directory(self, path: str, kind: _Failure = StorageReadError) -> _Directory:
        node = self._get(path, kind)
        if isinstance(node, _File):
            _fail(errno.ENOTDIR, path, kind)
        return node

    def _place(self, path: str, kind: _Failure = StorageWriteError) -> tuple[_Directory, str]:
        """The directory that a name is in, or is to be in."""
        parts = _parts(path)
        node = self._root
        for name in parts[:-1]:
            found = node.entries.get(name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if isinstance(found, _File):
                _fail(errno.ENOTDIR, path, kind)
            node = found
        return node, parts[-1] if parts else ""

    def _held(self, handle: int) -> tuple[_File, str, bool]:
        if self.is_dead:
            raise SimulatedCrash
        try:
            return self._handles[handle]
        except KeyError:
            raise StorageReadError(f"handle {handle} is not open") from OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _ask(self, operation: str, path: str) -> int | str | None:
        """What is to go wrong with a call that is about to be made."""
        if self.is_dead:
            raise SimulatedCrash
        return None if self.faults is None else self.faults.ask(operation, path)

    def _reading(self, operation: str, path: str) -> None:
        action = self._ask(operation, path)
        if action == "crash":
            self._die()
        if isinstance(action, int):
            _fail(action, path, StorageReadError)

    def _begin(self, operation: str, path: str) -> int | str | None:
        """Before a change or a sync: notes it, and says what is to go wrong."""
        action = self._ask(operation, path)
        self._writing = None
        if self.observer is not None:
            self.observer(operation, False)
        self.operations.append(Operation(operation, path))
        return action

    def _end(self, operation: str, action: int | str | None, path: str) -> None:
        """After a change: a crash, the error that was asked for, or nothing."""
        if self.observer is not None:
            self.observer(operation, True)
        if action == "crash" or (self._crash_in is not None and len(self.operations) > self._crash_in):
            self._die()
        if isinstance(action, int):
            _fail(action, path, StorageWriteError)

    def _die(self) -> None:
        self.crash()
        raise SimulatedCrash

    def _name(self, what: str, gone: tuple[_Directory, str] | None, come: tuple[_Directory, str, _Node] | None) -> None:
        if gone is not None:
            del gone[0].entries[gone[1]]
            gone[0].modified_ms = self._now_ms
        if come is not None:
            come[0].entries[come[1]] = come[2]
            come[0].modified_ms = self._now_ms
        self._found.clear()
        self._journal.append(_Naming(len(self.operations), what, gone, come))
        self._newest = None

    def _change(self, file: _File, change: _Change) -> None:
        if self._asked is not None:
            self._asked.written.add(file)
        content = file.content
        if isinstance(content, bytes):
            content = file.content = bytearray(content)
        change.apply(content)
        pending = file.pending
        if len(pending) >= _REWRITES and all(change.rewrites(before) for before in pending[-_REWRITES:]):
            del pending[
                -_REWRITES
            ]  # a note that is rewritten in place for ever: its oldest version never got to the disk
            file.variants = {}
        pending.append(change)
        file.modified_ms = self._now_ms
        self._dirty[file] = None
        self._newest = file
        if file.mappings is not None:
            file.show(change.position, change.data)

    def _path_of(self, file: _File) -> str:
        waiting = [("", self._root)]
        while waiting:
            path, directory = waiting.pop()
            for name, node in directory.entries.items():
                if node is file:
                    return f"{path}/{name}"
                if isinstance(node, _Directory):
                    waiting.append((f"{path}/{name}", node))
        return f"removed file {file.number}"

    # -- files ---------------------------------------------------------------------------------------------------

    def open(self, path: str, *, write: bool = False, create: bool = False, exclusive: bool = False) -> int:
        with self._mutex:
            node = self._find(path)
            if node is None and create:
                directory, name = self._place(path)
                action = self._begin("create", path)
                if isinstance(action, int):
                    self._end("create", action, path)
                node = _File(next(self._numbers), b"", self._now_ms)
                self._name(f"create {path}", None, (directory, name, node))
                self._end("create", action, path)
            else:
                kind = StorageWriteError if write else StorageReadError
                action = self._ask("open", path)
                if action == "crash":
                    self._die()
                if isinstance(action, int):
                    _fail(action, path, kind)
                if node is None:
                    node = self._get(path, kind)
                if create and exclusive:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                if isinstance(node, _Directory):
                    _fail(errno.EISDIR, path, kind)
            handle = next(self._next_handle)
            self._handles[handle] = node, path, write
            return handle

    def close(self, handle: int) -> None:
        self._handles.pop(handle, None)

    def pread(self, handle: int, size: int, position: int) -> bytes:
        file, path, _ = self._held(handle)
        if self.faults is not None:
            self._reading("pread", path)
        if self._asked is not None:
            self._asked.ask(file, True)
        return bytes(file.content[position : position + size])

    def pwrite(self, handle: int, data: Data, position: int) -> None:
        file, path, writable = self._held(handle)
        if not len(data) and self.faults is None:
            return
        with self._mutex:
            action = self._begin("pwrite", path)
            if not writable:
                action, data = errno.EBADF, b""
            written = bytes(data)
            if isinstance(action, int):
                written = written[: len(written) // 2]
            elif action == "rot" and written:
                at = self._random.randrange(len(written))
                written = written[:at] + bytes([written[at] ^ 1 << self._random.randrange(8)]) + written[at + 1 :]
            elif action == "misdirect":
                position += SECTOR
            if self.capacity_bytes is not None:
                room = self.free_bytes("/")
                grown = max(0, position + len(written) - len(file.content))
                if grown > room:
                    written, action = written[: max(0, len(written) - (grown - room))], errno.ENOSPC
            if written:
                self._change(file, _Change(len(self.operations), position, written))
                self._writing = file
            self._end("pwrite", action, path)
            self._writing = None

    def truncate(self, handle: int, size: int) -> None:
        file, path, writable = self._held(handle)
        with self._mutex:
            if size == len(file.content) and self.faults is None:
                if self._asked is not None:
                    self._asked.cut(file, size)
                return
            action = self._begin("truncate", path)
            if not writable:
                action = errno.EINVAL
            if isinstance(action, int):
                self._end("truncate", action, path)
            if self._asked is not None:
                self._asked.cut(file, size)
            if size != len(file.content):
                self._change(file, _Change(len(self.operations), size, None))
            self._end("truncate", action, path)

    def fdatasync(self, handle: int) -> None:
        self._sync("fdatasync", handle)

    def fsync(self, handle: int) -> None:
        self._sync("fsync", handle)

    def _sync(self, operation: str, handle: int) -> None:
        file, path, _ = self._held(handle)
        with self._mutex:
            action = self._begin(operation, path)
            if action == "crash" or (self._crash_in is not None and len(self.operations) > self._crash_in):
                self._die()
            if isinstance(action, int):
                file.forget(len(self.operations))
                if not file.pending:
                    self._dirty.pop(file, None)
                _raise_sync(OSError(action, os.strerror(action)), path)
            if action != "lie":
                if file.pending:
                    file.sync()
                    self._dirty.pop(file, None)
                if self.names == "journal" and operation == "fsync":
                    self._keep_names(None)
            if self.observer is not None:
                self.observer(operation, True)

    def size(self, handle: int) -> int:
        file, path, _ = self._held(handle)
        if self.faults is not None:
            self._reading("size", path)
        if self._asked is not None:
            self._asked.ask(file, False)
        return len(file.content)

    def drop_cache(self, handle: int, position: int) -> bool:
        """What a failed sync lost is gone from now on. Not while a part of the file is mapped."""
        file, _, _ = self._held(handle)
        with self._mutex:
            if file.mappings is not None and any(reference() is not None for reference in file.mappings):
                return False
            if file.forgot:
                file.content = file.of((1 << len(file.pending)) - 1)
                file.forgot = False
            return True

    def map(self, handle: int, size: int) -> memoryview:
        """As OsFS.map. Later writes show in the view; where the file was cut since, it shows ruins (0xDE) instead of
        killing the process.
        """
        file, path, _ = self._held(handle)
        if self.faults is not None:
            self._reading("map", path)
        if not 0 < size <= len(file.content):
            _fail(errno.EINVAL, path, StorageReadError)
        if self._asked is not None:
            self._asked.ask(file, True)
        memory = _Mapping(file.content[:size])
        file.mappings = [*(file.mappings or ()), weakref.ref(memory)]
        return memoryview(memory).toreadonly()

    # -- names ---------------------------------------------------------------------------------------------------

    def is_readable(self, view: memoryview, *, touch: bool = False) -> bool:
        """Always: a mapping of this disk is a copy in memory."""
        return True

    def file_size(self, path: str) -> int:
        self._reading("file_size", path)
        file = self._file(path)
        if self._asked is not None:
            self._asked.ask(file, False)
        return len(file.content)

    def identity(self, path_or_handle: str | int) -> tuple[int, int]:
        if isinstance(path_or_handle, int):
            file, path, _ = self._held(path_or_handle)
            self._reading("identity", path)
            return 1, file.number
        self._reading("identity", path_or_handle)
        return 1, self._get(path_or_handle).number

    def exists(self, path: str) -> bool:
        self._ask("exists", path)
        return self._find(path) is not None

    def is_directory(self, path: str) -> bool:
        self._ask("is_directory", path)
        return isinstance(self._find(path), _Directory)

    def listdir(self, path: str) -> list[str]:
        """Beginning anywhere: a real directory's order is one of chance too."""
        self._reading("listdir", path)
        names = list(self._directory(path).entries)
        turn = (self.seed + len(self.operations)) % len(names) if names else 0
        return names[turn:] + names[:turn]

    def mkdir(self, path: str) -> None:
        with self._mutex:
            directory, name = self._place(path)
            if not name or name in directory.entries:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            action = self._begin("mkdir", path)
            if not isinstance(action, int):
                self._name(f"mkdir {path}", None, (directory, name, _Directory(next(self._numbers), self._now_ms)))
            self._end("mkdir", action, path)

    def free_bytes(self, path: str) -> int:
        """What capacity_bytes leaves; without it an exabyte."""
        if self.capacity_bytes is None:
            return 1 << 60
        return self.capacity_bytes - sum(len(content) for content in self.view().values() if content is not None)

    def total_bytes(self, path: str) -> int:
        return 1 << 60 if self.capacity_bytes is None else self.capacity_bytes

    def rename(self, source: str, target: str) -> None:
        with self._mutex:
            old, old_name = self._place(source)
            new, new_name = self._place(target)
            node = self._get(source, StorageWriteError)
            there = new.entries.get(new_name)
            if there is node:
                return
            action = self._begin("rename", target)
            if isinstance(node, _Directory) and _parts(target)[: len(_parts(source))] == _parts(source):
                action = errno.EINVAL
            elif isinstance(there, _Directory):
                action = errno.EISDIR if isinstance(node, _File) else errno.ENOTEMPTY if there.entries else action
            elif there is not None and isinstance(node, _Directory):
                action = errno.ENOTDIR
            if not isinstance(action, int):
                self._name(f"rename {source} to {target}", (old, old_name), (new, new_name, node))
            self._end("rename", action, source)

    def link(self, source: str, target: str) -> bool:
        """As OsFS.link. After a crash the two names are files of their own: they hold the same all the same."""
        with self._mutex:
            node = self._get(source, StorageWriteError)
            place, name = self._place(target)
            action = self._begin("link", target)
            if name in place.entries:
                action = errno.EEXIST
            if not isinstance(action, int):
                self._name(f"link {source} to {target}", None, (place, name, node))
            self._end("link", action, target)
        return True

    def unlink(self, path: str) -> None:
        with self._mutex:
            node = self._get(path, StorageWriteError)
            directory, name = self._place(path)
            action = self._begin("unlink", path)
            if isinstance(node, _Directory):
                action = errno.EISDIR
            if not isinstance(action, int):
                self._name(f"unlink {path}", (directory, name), None)
            self._end("unlink", action, path)

    def rmdir(self, path: str) -> None:
        with self._mutex:
            node = self._get(path, StorageWriteError)
            directory, name = self._place(path)
            action = self._begin("rmdir", path)
            if isinstance(node, _File):
                action = errno.ENOTDIR
            elif node.entries:
                action = errno.ENOTEMPTY
            if not isinstance(action, int):
                self._name(f"rmdir {path}", (directory, name), None)
            self._end("rmdir", action, path)

    def modified_ms(self, path: str) -> int:
        self._reading("modified_ms", path)
        return self._get(path).modified_ms

    def sync_dir(self, path: str) -> None:
        with self._mutex:
            directory = self._directory(path, StorageWriteError)
            action = self._begin("sync_dir", path)
            if action == "crash" or (self._crash_in is not None and len(self.operations) > self._crash_in):
                self._die()
            if isinstance(action, int):
                _raise_sync(OSError(action, os.strerror(action)), path)
            if action != "lie" and self._journal:
                self._keep_names(None if self.names == "journal" else directory)
            if self.observer is not None:
                self.observer("sync_dir", True)

    def _keep_names(self, directory: _Directory | None) -> None:
        """Makes changes of names durable: those of one directory, or (None) all."""
        left = []
        for naming in self._journal:
            if directory is not None and not naming.touches(directory):
                left.append(naming)
                continue
            if naming.gone is not None:
                naming.gone[0].durable.pop(naming.gone[1], None)
            if naming.come is not None:
                naming.come[0].durable[naming.come[1]] = naming.come[2]
        self._journal = left
        if len(self._dirty) > 4:
            living = {naming.come[2] for naming in left if naming.come is not None}
            waiting = [self._root]
            while waiting:
                place = waiting.pop()
                for node in {*place.entries.values(), *place.durable.values()}:
                    living.add(node)
                    if isinstance(node, _Directory):
                        waiting.append(node)
            self._dirty = {file: None for file in self._dirty if file in living}

    def real_path(self, path: str) -> str:
        return "/" + "/".join(_parts(path))

    # -- time, locks, watches ------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def thread_us(self) -> int:
        return self._monotonic_ms * 1000

    def random_bytes(self, size: int) -> bytes:
        return self._random.randbytes(size)

    def yield_thread(self) -> None:
        time.sleep(0)

    def lock(self, directory: str, member: str) -> Lock:
        """As OsFS.lock, within this object: it stands for one machine, whose crash frees all locks. Makes no file."""
        with self._mutex:
            self._ask("lock", directory)
            node = self._directory(directory, StorageWriteError)
            held = self._locks.setdefault(node, _LockMembers())
            if member in held.members:
                raise LogLockedError(
                    "this process has the log open for writing already", path=posixpath.join(directory, member)
                )
            held.members.add(member)
            return _MemberLock(self, node, held, member)

    def after_fork(self, forget: Callable[[], None]) -> None:
        """Nothing: a process that forks has two of these disks then."""

    def watch(self, directory: str) -> Watch:
        """Tells of changes anywhere on the disk. Where there was none, the time that it was to wait passes at once."""
        return _Watch(self)

    # -- to and from real directories ----------------------------------------------------------------------------

    @classmethod
    def load(cls, directory: str | os.PathLike[str], **options: Any) -> SimulatedDisk:
        """A disk that has a copy of a real directory as its root."""
        root = Path(directory)
        files: dict[str, bytes | None] = {}
        for path in sorted(root.rglob("*")):
            files[path.relative_to(root).as_posix()] = path.read_bytes() if path.is_file() else None
        return cls(files, **options)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes what programs see now into a real directory, to be looked at with other tools."""
        self._read_all()
        for path, content in sorted(self.view().items()):
            target = Path(directory, path.lstrip("/"))
            if content is None:
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)


@attrs.define(eq=False)
class _LockMembers:
    members: set[str] = attrs.field(factory=set)
    shared: Shared = attrs.field(factory=Shared)


class _MemberLock:
    def __init__(self, disk: SimulatedDisk, node: _Directory, held: _LockMembers, member: str) -> None:
        self._disk, self._node, self._held, self._member = disk, node, held, member
        self.shared = held.shared

    @property
    def is_last(self) -> bool:
        return self._held.members <= {self._member}

    def release(self) -> None:
        with self._disk._mutex:
            self._held.members.discard(self._member)
            if not self._held.members and self._disk._locks.get(self._node) is self._held:
                del self._disk._locks[self._node]


class _Watch:
    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self._seen = len(disk.operations)

    def wait(self, timeout: float | None) -> bool:
        time.sleep(0)  # for a writer in another thread
        before, self._seen = self._seen, len(self._disk.operations)
        if self._seen != before:
            return True
        if timeout is not None:
            self._disk.advance(max(1, int(timeout * 1000)))
        return False

    def close(self) -> None:
        pass
