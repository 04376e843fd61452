"""Result cache: reuses the result of a function on a disk for equivalent disks.

Two disks are equivalent for a function if it reads the same content from both. Many
disks left by a crash differ only in content that recovery never reads, for example in a
file that recovery deletes unread. explore.py uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from logcore.testing.disk import SimulatedDisk
from logcore.testing.nodes import File, Node

#: pytest hides the frames of this module in the traceback of a failure.
__tracebackhide__ = True

Result = TypeVar("Result")


class FileReads:
    """Records which files of a disk a function reads, in order.

    Only files that existed at the start count. An entry is (path, True) for the content
    and (path, False) for the size.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        self.nodes = disk.nodes()
        #: The reads in order, each of them once.
        self.entries: dict[tuple[str, bool], None] = {}
        #: Files that the function has changed.
        self.written: set[File] = set()
        #: Files that were truncated to zero. Later reads of them are not recorded.
        self._emptied: set[File] = set()
        self._paths: dict[Node, list[str]] = {}
        for path, node in self.nodes.items():
            self._paths.setdefault(node, []).append(path)

    def record(self, file: Node, is_whole: bool) -> None:
        if file not in self._emptied:
            for path in self._paths.get(file, ()):
                self.entries[path, is_whole] = None

    def record_truncation(self, file: File, size: int) -> None:
        self.written.add(file)
        if size == 0:
            self._emptied.add(file)


class _ReadNode:
    """A node of the tree: one read, and the child for each content or size."""

    __slots__ = ("children", "entry")

    def __init__(self, entry: tuple[str, bool]) -> None:
        self.entry = entry
        self.children: dict[int, Any] = {}


class ResultCache(Generic[Result]):
    """A cache of the results of a function on disks.

    The cache is a tree. The file names and the time select the root. Each level of the
    tree is one read of a size or a content, in the order of the reads. On disks that
    have the same contents, the function takes the same path and returns the same result,
    so it is called once for all of them. The result must depend only on the disk, and
    not on the order in which names are listed.
    """

    def __init__(self) -> None:
        self._roots: dict[int, Any] = {}

    def get(self, files: Mapping[str, bytes | None], now_ms: int) -> Result | None:
        """Return the cached result for such a disk, None if there is none."""
        return self._find(files, now_ms)[0]

    def run(
        self, disk: SimulatedDisk, function: Callable[[SimulatedDisk], Result]
    ) -> Result:
        """Return the result for this disk, by calling the function if it is not cached.

        The function may call run() itself.
        """
        outer_reads = disk.reads
        reads = FileReads(disk)
        files = {path: node.visible() for path, node in reads.nodes.items()}
        now_ms = disk.now_ms()
        result, entries = self._find(files, now_ms)
        if result is None:
            disk.reads = reads
            try:
                result = function(disk)
            finally:
                disk.reads = outer_reads
            entries = list(reads.entries)
            self._add(files, now_ms, entries, result)
        if outer_reads is not None:
            for path, is_whole in entries:
                outer_reads.record(reads.nodes[path], is_whole)
            outer_reads.written |= reads.written
        return result

    def _find(
        self, files: Mapping[str, bytes | None], now_ms: int
    ) -> tuple[Result | None, list[tuple[str, bool]]]:
        node = self._roots.get(self._root(files, now_ms))
        entries = []
        while type(node) is _ReadNode:
            entries.append(node.entry)
            node = node.children.get(self._content_key(files, node.entry))
        return node, entries

    def _add(
        self,
        files: Mapping[str, bytes | None],
        now_ms: int,
        entries: list[tuple[str, bool]],
        result: Result,
    ) -> None:
        children = self._roots
        key = self._root(files, now_ms)
        for entry in entries:
            node = children.get(key)
            if type(node) is not _ReadNode or node.entry != entry:
                node = children[key] = _ReadNode(entry)
            children = node.children
            key = self._content_key(files, entry)
        children[key] = result

    @staticmethod
    def _root(files: Mapping[str, bytes | None], now_ms: int) -> int:
        return hash(
            (
                now_ms,
                frozenset(
                    [
                        path + "/" if content is None else path
                        for path, content in files.items()
                    ]
                ),
            )
        )

    @staticmethod
    def _content_key(files: Mapping[str, bytes | None], entry: tuple[str, bool]) -> int:
        content = files[entry[0]]
        if content is None:
            return -1
        if entry[1]:
            return hash(content)
        return len(content)
