"""Files and directories of a simulated disk, with visible and durable state.

The two states differ by the pending changes: the writes and truncations of a file since
its last sync, and changes of names. Changes are numbered in one order for the whole
disk.

This module handles no paths and makes no decisions. disk.py changes these objects, and
crash_states.py derives from them the states after a crash.
"""

from __future__ import annotations

import weakref
from typing import Final, NamedTuple

from logcore.fs import Data

_PAGE: Final = 4096


class Change(NamedTuple):
    """A write of `data` at `position`.

    If `data` is None, a change of size to `position`.

    `order` is the number of the change among all changes of the disk.
    """

    order: int
    position: int
    data: bytes | None

    def rewrites(self, other: Change) -> bool:
        mine = self.data
        theirs = other.data
        return (
            mine is not None
            and theirs is not None
            and (self.position, len(mine)) == (other.position, len(theirs))
        )

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


class MappedPages(bytearray):
    """The memory of a mapped file. It is freed with the last view of it."""


class File:
    __slots__ = (
        "content",
        "durable",
        "forgot",
        "mappings",
        "modified_ms",
        "number",
        "pending",
        "variants",
    )

    def __init__(self, number: int, content: bytes, modified_ms: int) -> None:
        self.number = number
        self.content: bytes | bytearray = content
        self.durable = content
        self.pending: list[Change] = []
        # After a failed sync, content differs from durable with pending applied.
        self.forgot = False
        self.modified_ms = modified_ms
        self.mappings: list[weakref.ref[MappedPages]] | None = None
        self.variants: dict[int, bytes] = {}

    def seen(self) -> bytes:
        """Return the content that programs see."""
        return bytes(self.content)

    def of(self, mask: int) -> bytes:
        """Return the durable content with those pending changes whose bits are set."""
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
        """Apply the effect of a failed sync.

        The pages are marked clean, so their data is lost. Only the size remains
        pending.
        """
        self.forgot = True
        if len(self.content) != len(self.durable):
            self.pending = [Change(order, len(self.content), None)]
        else:
            self.pending = []
        self.variants = {}

    def apply_to_content(self, start: int, data: Data | None) -> None:
        """Update mappings after a write, or after a truncation if `data` is None."""
        assert self.mappings is not None
        living = [
            (reference, memory)
            for reference in self.mappings
            if (memory := reference()) is not None
        ]
        self.mappings = [reference for reference, _ in living] or None
        for _, memory in living:
            if data is not None:
                stop = min(len(memory), start + len(data))
                if start < stop:
                    memory[start:stop] = data[: stop - start]
            elif start < len(memory):
                # Access to whole pages past the end would kill the process. Here they
                # read as 0xDE bytes.
                edge = min(len(memory), -(-start // _PAGE) * _PAGE)
                memory[start:edge] = bytes(edge - start)
                memory[edge:] = b"\xde" * (len(memory) - edge)


class DirectoryNode:
    __slots__ = ("durable", "entries", "modified_ms", "number")

    def __init__(self, number: int, modified_ms: int) -> None:
        self.number = number
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}
        self.modified_ms = modified_ms

    def seen(self) -> None:
        return None


Node = File | DirectoryNode


class Naming(NamedTuple):
    """A change of names: the first name is removed, then the second name is added.

    `order` is the number of the change among all changes of the disk.
    """

    order: int
    what: str
    gone: tuple[DirectoryNode, str] | None
    come: tuple[DirectoryNode, str, Node] | None

    def touches(self, directory: DirectoryNode) -> bool:
        return any(
            place is not None and place[0] is directory
            for place in (self.gone, self.come)
        )
