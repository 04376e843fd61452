"""Remembers what a function finds on disks, so that it is called once for all disks that look the same to it.

Many disks that a crash may leave differ only in what recovery never looks at, such as the content of a file that it
removes unread. This module opens no log and makes no disks; explore.py asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from logcore.testing.disk import SimulatedDisk
from logcore.testing.nodes import File, Node

#: pytest leaves frames of this module out of what it shows of a failure.
__tracebackhide__ = True

Result = TypeVar("Result")


class Asked:
    """What a function asked a disk about the files that were there when it began, in order: (path, True) for the
    content, (path, False) for the size.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        self.nodes = disk.nodes()
        self.questions: dict[tuple[str, bool], None] = {}
        self.written: set[File] = set()
        self._blank: set[File] = set()  # cut to nothing: what was in it plays no part any more
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
    """A place in the tree of Known: what is asked there, and where each answer leads."""

    __slots__ = ("about", "answers")

    def __init__(self, about: tuple[str, bool]) -> None:
        self.about = about
        self.answers: dict[int, Any] = {}


class Known(Generic[Result]):
    """What a function finds on disks, as a tree: names and time at the root, then each size and content that it asks
    for, in its order. On disks that give it the same answers it goes the same way and finds the same, so it is called
    once for all of them. What it finds must come from the disk alone, and not from the order in which names are listed.
    """

    def __init__(self) -> None:
        self._roots: dict[int, Any] = {}

    def get(self, files: Mapping[str, bytes | None], now_ms: int) -> Result | None:
        """What was found on such a disk; None when that is not known."""
        return self._find(files, now_ms)[0]

    def run(self, disk: SimulatedDisk, function: Callable[[SimulatedDisk], Result]) -> Result:
        """What is known of this disk, or else what the function finds there. May be called by what is run so itself."""
        outer = disk.asked
        asked = Asked(disk)
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

    def _find(self, files: Mapping[str, bytes | None], now_ms: int) -> tuple[Result | None, list[tuple[str, bool]]]:
        found = self._roots.get(self._root(files, now_ms))
        questions = []
        while type(found) is _Question:
            questions.append(found.about)
            found = found.answers.get(self._answer(files, found.about))
        return found, questions

    def _add(
        self, files: Mapping[str, bytes | None], now_ms: int, questions: list[tuple[str, bool]], result: Result
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
        return hash((now_ms, frozenset([path + "/" if content is None else path for path, content in files.items()])))

    @staticmethod
    def _answer(files: Mapping[str, bytes | None], about: tuple[str, bool]) -> int:
        content = files[about[0]]
        if content is None:
            return -1
        if about[1]:
            return hash(content)
        return len(content)
