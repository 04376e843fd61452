"""Crash states: enumerates the disks that a crash may leave, from the unsynced changes.

Rules:
- Durable content survives. Each other change may survive or be lost. A write may be
  torn between sectors and at any byte. A part by which a file grew may contain zeros or
  garbage, and a file may have its new size without the data.
- Every subset of up to EXHAUSTIVE changes is tried. Of more changes, selected and
  random subsets are tried.
- The same changes and the same random state result in the same choices in the same
  order.

This module changes no disk and reads no clock. disk.py creates disks from the choices.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import attrs

from logcore.testing.nodes import DirectoryNode, File, Naming, Node

#: Size in bytes of the unit that a disk writes atomically.
SECTOR: Final = 512
#: Up to this number of changes, of files and names together, every subset is tried.
EXHAUSTIVE: Final = 10

Kind = Literal["kill", "power"]
Names = Literal["posix", "journal"]
#: A disk that a crash may leave: a bit mask of the name changes that survive, the
#: contents of files, a description, and the kind of crash that can leave it.
Choice = tuple[int, Mapping[File, bytes], str | Callable[[], str], Kind]


class Tree(NamedTuple):
    """The directory tree after a crash."""

    #: Durable contents by path, None for a directory.
    files: dict[str, bytes | None]
    #: Files whose content may differ from the durable one.
    open: list[tuple[str, File]]
    #: Hash of all entries except the open files. Callers add the hashes of those.
    key: int


@attrs.frozen(eq=False)
class UnsyncedChanges:
    """The unsynced changes of a disk at one moment.

    It is valid until the disk changes.
    """

    root: DirectoryNode
    #: Changes of names, in order.
    journal: tuple[Naming, ...]
    #: Files with unsynced changes.
    files: tuple[File, ...]
    #: The file changed last, None if the last change was of a name.
    newest: File | None
    #: The file to which a write is in progress.
    writing: File | None
    #: See SimulatedDisk.
    names: Names
    path_of: Callable[[File], str]

    def choices(self, rng: random.Random, newest: bool) -> Iterator[Choice]:
        """Yield the disks that a crash may leave.

        With `newest`, only those disks are yielded that depend on the last change.
        """
        names = len(self.journal)
        files = self.files
        all_names = (1 << names) - 1
        new = {file: file.content_with((1 << len(file.pending)) - 1) for file in files}
        old = {file: file.durable for file in files}
        by_name = newest and self.newest is None
        # The file whose last change must survive, in part or in whole.
        changed = None
        if newest:
            changed = self.newest

        yield all_names, {file: bytes(file.content) for file in files}, "killed", "kill"
        if by_name and not names:
            return
        if not newest:
            yield 0, old, "all unsynced changes are lost", "power"
        masks = self._name_masks(names)
        if by_name:
            masks = [mask for mask in masks if mask >> (names - 1) & 1]
        if changed is not None:
            masks_of_old = []
        else:
            masks_of_old = masks
        for mask in masks:
            yield (
                mask,
                new,
                functools.partial(_description, self.journal, mask, "with all data"),
                "power",
            )
        for mask in masks_of_old:
            yield (
                mask,
                old,
                functools.partial(
                    _description, self.journal, mask, "without unsynced data"
                ),
                "power",
            )
        if changed is not None and len(files) > 1:
            yield (
                all_names,
                {**old, changed: new[changed]},
                f"only the data of {changed.number}",
                "power",
            )
        torn_files: Sequence[File] = []
        if changed is not None:
            torn_files = [changed]
        elif not by_name:
            torn_files = files
        for file in torn_files:
            if len(files) > 1:
                contents_of_others = [new, old]
            else:
                contents_of_others = [new]
            path = self.path_of(file)
            for content, description, split in _torn_versions(file, rng):
                for mask in {all_names, 0}:
                    for base_contents in contents_of_others:
                        kind: Kind = "power"
                        if (
                            split
                            and mask == all_names
                            and base_contents is new
                            and file is self.writing
                        ):
                            kind = "kill"
                        yield (
                            mask,
                            {**base_contents, file: content},
                            f"{description} of {path}",
                            kind,
                        )
        yield from self._subsets(names, files, by_name, changed)
        for _ in range(4):
            if self.names == "journal":
                mask = rng.choice(masks)
            else:
                mask = 0
                if names:
                    mask = rng.getrandbits(names)
                if by_name:
                    mask |= 1 << (names - 1)
            mixed = {file: _random_content(file, rng) for file in files}
            yield mask, mixed, "a random mixture", "power"

    def random_choice(self, rng: random.Random) -> Choice:
        """Return one disk that a power cut may leave.

        A third of these disks have lost all unsynced changes, and a third have lost
        none.
        """
        names = len(self.journal)
        part = rng.randrange(3)
        if part == 0:
            contents = {file: file.durable for file in self.files}
            return 0, contents, "all unsynced changes are lost", "power"
        if part == 1:
            contents = {file: bytes(file.content) for file in self.files}
            return (1 << names) - 1, contents, "no change is lost", "power"
        if self.names == "journal":
            mask = (1 << rng.randint(0, names)) - 1
        else:
            mask = rng.getrandbits(names) if names else 0
        contents = {file: _random_content(file, rng) for file in self.files}
        return mask, contents, "a random mixture", "power"

    def _subsets(
        self, names: int, files: Sequence[File], by_name: bool, changed: File | None
    ) -> Iterator[Choice]:
        count = names + sum(len(file.pending) for file in files)
        if count <= EXHAUSTIVE:
            choices: list[Iterable[tuple[int, ...]]] = []
            ranges = [range(1 << len(file.pending)) for file in files]
            for index, file in enumerate(files):
                if file is changed:
                    ranges[index] = range(
                        1 << (len(file.pending) - 1), 1 << len(file.pending)
                    )
            lowest = 0
            if by_name:
                lowest = 1 << (names - 1)
            name_masks: Iterable[int]
            if self.names == "posix":
                name_masks = range(lowest, 1 << names)
            else:
                name_masks = self._name_masks(names)
            choices = [[(mask,) for mask in name_masks], itertools.product(*ranges)]
            for (mask,), masks in itertools.product(*choices):
                contents = {
                    file: file.content_with(bits)
                    for file, bits in zip(files, masks, strict=True)
                }
                yield mask, contents, "a subset of the changes", "power"
            return
        all_names = (1 << names) - 1
        new = {file: file.content_with((1 << len(file.pending)) - 1) for file in files}
        for file in files:
            full = (1 << len(file.pending)) - 1
            path = self.path_of(file)
            for index in range(len(file.pending)):
                if file is changed and index == len(file.pending) - 1:
                    continue
                contents = {**new, file: file.content_with(full & ~(1 << index))}
                yield all_names, contents, f"without change {index} of {path}", "power"
                contents = {**new, file: file.content_with((1 << index) - 1)}
                yield all_names, contents, f"only {index} changes of {path}", "power"

    def _name_masks(self, names: int) -> list[int]:
        """Return masks of name changes that a crash may keep: none, all, and each prefix.

        With names="posix", there is also a mask without each single change.
        """
        all_names = (1 << names) - 1
        masks = [all_names, *((1 << count) - 1 for count in range(names))]
        if self.names == "posix":
            masks += [all_names & ~(1 << index) for index in range(names - 1)]
        return list(dict.fromkeys(masks))

    def tree(self, mask: int, open: Container[File]) -> Tree:
        """Return the directory tree if a crash keeps the name changes in `mask`."""
        changed: dict[DirectoryNode, dict[str, Node]] = {}
        for index, naming in enumerate(self.journal):
            if mask >> index & 1:
                if naming.removed is not None:
                    directory = naming.removed[0]
                    if directory not in changed:
                        changed[directory] = dict(directory.durable)
                    changed[directory].pop(naming.removed[1], None)
                if naming.added is not None:
                    directory = naming.added[0]
                    if directory not in changed:
                        changed[directory] = dict(directory.durable)
                    changed[directory][naming.added[1]] = naming.added[2]
        tree = Tree({}, [], 0)
        key = 0
        stack = [("", self.root)]
        while stack:
            parent, directory = stack.pop()
            for name, node in changed.get(directory, directory.durable).items():
                path = f"{parent}/{name}"
                content = None
                if isinstance(node, DirectoryNode):
                    stack.append((path, node))
                else:
                    content = node.durable
                    if node in open:
                        tree.open.append((path, node))
                tree.files[path] = content
                if not tree.open or tree.open[-1][0] != path:
                    key ^= hash((path, content))
        return tree._replace(key=key)

    def ordered(self, mask: int, contents: Mapping[File, bytes]) -> dict[File, bytes]:
        """Keep the data written before a rename if the rename itself is kept.

        A renamed file then has at least the content that was written before the rename.
        """
        ordered = dict(contents)
        for index, naming in enumerate(self.journal):
            if (
                mask >> index & 1
                and naming.removed is not None
                and naming.added is not None
            ):
                node = naming.added[2]
                if isinstance(node, File) and node in ordered:
                    before = sum(change.order < naming.order for change in node.pending)
                    if before == len(node.pending):
                        ordered[node] = node.content_with((1 << before) - 1)
                    elif before:
                        ordered[node] = node.content_with(
                            (1 << before) - 1 | 1 << before
                        )
        return ordered


def _description(journal: Sequence[Naming], mask: int, data_state: str) -> str:
    surviving = [
        naming.description for index, naming in enumerate(journal) if mask >> index & 1
    ]
    names = ""
    if 0 < len(surviving) < 5:
        names = f" ({', '.join(surviving)})"
    return (
        f"{len(surviving)} of {len(journal)} name changes survive{names}, {data_state}"
    )


def _torn_versions(file: File, rng: random.Random) -> Iterator[tuple[bytes, str, bool]]:
    """Yield versions of a file in which its last change is incomplete.

    Each item is (content, description, whether a killed process can leave it).
    """
    if not file.pending:
        return
    count = len(file.pending)
    before = file.content_with((1 << (count - 1)) - 1)
    after = file.content_with((1 << count) - 1)
    change = file.pending[-1]
    if change.data is None:
        return
    start = change.position
    size = len(change.data)
    stop = start + size
    sectors = range(start // SECTOR * SECTOR + SECTOR, stop, SECTOR)
    cuts = dict.fromkeys(
        [
            *sectors,
            *(
                start + split
                for split in (1, size // 3, size // 2, size - 1)
                if 0 < split < size
            ),
        ]
    )
    if len(before) >= start:
        base = before
    else:
        base = before + bytes(start - len(before))
    for split in list(cuts)[:12]:
        yield (
            base[:start] + after[start:split] + base[split:],
            f"the first {split - start} bytes of the last write",
            True,
        )
        torn = after[:split] + base[split:].ljust(len(after) - split, b"\0")
        yield (
            torn[: len(after)],
            f"the first {split - start} bytes of the last write, at its full size",
            False,
        )
        hole = base[start:split].ljust(split - start, b"\0")
        yield (
            after[:start] + hole + after[split:],
            f"all but the first {split - start} bytes of the last write",
            False,
        )
    if len(after) > len(file.durable):
        old_size = len(file.durable)
        yield (
            after[:old_size] + bytes(len(after) - old_size),
            "zeros in the new part",
            False,
        )
        garbage = rng.randbytes(len(after) - old_size)
        yield after[:old_size] + garbage, "garbage in the new part", False
        yield (
            before + rng.randbytes(max(0, len(after) - len(before))),
            "garbage for the last write",
            False,
        )
        yield (
            before + bytes(max(0, len(after) - len(before))),
            "zeros for the last write",
            False,
        )
        yield (
            file.durable + bytes(len(after) - old_size),
            "the new size and the old data",
            False,
        )
    else:
        yield (
            after[:start] + bytes(size) + after[stop:],
            "zeros for the last write",
            False,
        )
    for _ in range(4):
        yield _random_content(file, rng), "a random mixture of sectors", False


def _random_content(file: File, rng: random.Random) -> bytes:
    """Return a random content of a file with unsynced changes.

    Each sector has the result of some of the changes. A part that was added to the file
    may have zeros or garbage. The size is one that the changes allow.
    """
    if not file.pending:
        return file.durable
    full = (1 << len(file.pending)) - 1
    sizes = [
        len(file.content_with((1 << count) - 1))
        for count in range(len(file.pending) + 1)
    ]
    size = rng.choice([*sizes, rng.randint(min(sizes), max(sizes))])
    content = bytearray(
        file.content_with(rng.choice([full, 0])).ljust(size, b"\0")[:size]
    )
    changed_bytes = sorted(
        {
            index
            for change in file.pending
            if change.data
            for index in range(
                change.position // SECTOR,
                -(-(change.position + len(change.data)) // SECTOR),
            )
        }
    )
    for sector in changed_bytes:
        index = sector * SECTOR
        stop = min(size, (sector + 1) * SECTOR)
        if index >= stop:
            continue
        choice = rng.randrange(4)
        if choice < 2:
            content[index:stop] = file.content_with(rng.getrandbits(len(file.pending)))[
                index:stop
            ].ljust(stop - index, b"\0")
        elif choice == 2 and index >= len(file.durable):
            content[index:stop] = bytes(stop - index)
        elif choice == 3 and index >= len(file.durable):
            content[index:stop] = rng.randbytes(stop - index)
    return bytes(content)
