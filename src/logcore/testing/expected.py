"""Caches the results of a function on disks, and reuses them for equivalent disks.

Two disks are equivalent for a function if it reads the same from both. Many disks left
by a crash differ only in content that recovery never reads, for example in a file that
it deletes unread. This module opens no log and makes no disks; explore.py uses it.
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
        self.questions: dict[tuple[str, bool], None] = {}
        self.written: set[File] = set()
        self._blank: set[File] = (
            set()
        )  # truncated to zero: later reads are not recorded
        self._paths: dict[Node, list[str]] = {}
        for path, node in self.nodes.items():
            self._paths.setdefault(node, []).append(path)

    def ask(self, file: Node, is_whole: bool) -> None:
        if file not in self._blank:
            for path in self._paths.get(file, ()):
                self.questions[path, is_whole] = None

    def cut(self, file: File, size: int) -> None:
        self.written.add(file)
        if size == 0:
            self._blank.add(file)


class _Question:
    """A node in the tree of Known: a question, and the node of each answer."""

    __slots__ = ("about", "answers")

    def __init__(self, about: tuple[str, bool]) -> None:
        self.about = about
        self.answers: dict[int, Any] = {}


class ResultCache(Generic[Result]):
    """A cache of the results of a function on disks.

    The cache is a tree. The root is selected by the file names and the time. Each level
    below is one size or content that the function reads, in its order. On disks that
    give the same answers, the function takes the same path and returns the same result,
    so it is called once for all of them. Its result must depend on the disk alone, and
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
        outer = disk.asked
        asked = FileReads(disk)
        files = {path: node.seen() for path, node in asked.nodes.items()}
        now_ms = disk.now_ms()
        result, questions = self._find(files, now_ms)
        if result is None:
            disk.asked = asked
            try:
                result = function(disk)
            finally:
                disk.asked = outer
            questions = list(asked.questions)
            self._add(files, now_ms, questions, result)
        if outer is not None:
            for path, is_whole in questions:
                outer.ask(asked.nodes[path], is_whole)
            outer.written |= asked.written
        return result

    def _find(
        self, files: Mapping[str, bytes | None], now_ms: int
    ) -> tuple[Result | None, list[tuple[str, bool]]]:
        found = self._roots.get(self._root(files, now_ms))
        questions = []
        while type(found) is _Question:
            questions.append(found.about)
            found = found.answers.get(self._answer(files, found.about))
        return found, questions

    def _add(
        self,
        files: Mapping[str, bytes | None],
        now_ms: int,
        questions: list[tuple[str, bool]],
        result: Result,
    ) -> None:
        answers = self._roots
        answer = self._root(files, now_ms)
        for about in questions:
            question = answers.get(answer)
            if type(question) is not _Question or question.about != about:
                question = answers[answer] = _Question(about)
            answers = question.answers
            answer = self._answer(files, about)
        answers[answer] = result

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
    def _answer(files: Mapping[str, bytes | None], about: tuple[str, bool]) -> int:
        content = files[about[0]]
        if content is None:
            return -1
        if about[1]:
            return hash(content)
        return len(content)
