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
    """A write, or a change of the size of a file."""

    #: Number of the change among all changes of the disk.
    order: int
    #: Position of the write, or the new size.
    position: int
    #: None for a change of the size.
    data: bytes | None

    def rewrites(self, other: Change) -> bool:
        data = self.data
        other_data = other.data
        return (
            data is not None
            and other_data is not None
            and (self.position, len(data)) == (other.position, len(other_data))
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
    """The memory of a mapped file. It is freed together with the last view."""


class File:
    __slots__ = (
        "content",
        "durable",
        "has_lost_sync",
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
        # Whether a sync has failed. The visible content then differs from the durable
        # content with the pending changes.
        self.has_lost_sync = False
        self.modified_ms = modified_ms
        self.mappings: list[weakref.ref[MappedPages]] | None = None
        self.variants: dict[int, bytes] = {}

    def visible(self) -> bytes:
        """Return the content that programs see."""
        return bytes(self.content)

    def content_with(self, mask: int) -> bytes:
        """Return the durable content with the pending changes whose bits are set."""
        variant = self.variants.get(mask)
        if variant is None:
            if mask == 0:
                variant = self.durable
            elif not self.has_lost_sync and mask == (1 << len(self.pending)) - 1:
                variant = bytes(self.content)
            else:
                content = bytearray(self.durable)
                for index, change in enumerate(self.pending):
                    if mask >> index & 1:
                        change.apply(content)
                variant = bytes(content)
            self.variants[mask] = variant
        return variant

    def sync(self) -> None:
        self.durable = self.content_with((1 << len(self.pending)) - 1)
        self.pending = []
        self.variants = {}

    def apply_failed_sync(self, order: int) -> None:
        """Apply the effect of a failed sync.

        The kernel marks the pages as clean, so their data is lost. Only the size
        remains pending.
        """
        self.has_lost_sync = True
        if len(self.content) != len(self.durable):
            self.pending = [Change(order, len(self.content), None)]
        else:
            self.pending = []
        self.variants = {}

    def apply_to_content(self, start: int, data: Data | None) -> None:
        """Update mappings after a write, or after a truncation if `data` is None."""
        assert self.mappings is not None
        mapped = [
            (reference, memory)
            for reference in self.mappings
            if (memory := reference()) is not None
        ]
        self.mappings = [reference for reference, _ in mapped] or None
        for _, memory in mapped:
            if data is not None:
                stop = min(len(memory), start + len(data))
                if start < stop:
                    memory[start:stop] = data[: stop - start]
            elif start < len(memory):
                # Access to whole pages beyond the end would kill the process. Here they
                # contain 0xDE bytes.
                page_end = min(len(memory), -(-start // _PAGE) * _PAGE)
                memory[start:page_end] = bytes(page_end - start)
                memory[page_end:] = b"\xde" * (len(memory) - page_end)


class DirectoryNode:
    __slots__ = ("durable", "entries", "modified_ms", "number")

    def __init__(self, number: int, modified_ms: int) -> None:
        self.number = number
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}
        self.modified_ms = modified_ms

    def visible(self) -> None:
        return None


Node = File | DirectoryNode


class Naming(NamedTuple):
    """A change of names: the first name is removed, then the second name is added.

    `order` is the number of the change among all changes of the disk.
    """

    order: int
    description: str
    removed: tuple[DirectoryNode, str] | None
    added: tuple[DirectoryNode, str, Node] | None

    def affects(self, directory: DirectoryNode) -> bool:
        return any(
            entry is not None and entry[0] is directory
            for entry in (self.removed, self.added)
        )
