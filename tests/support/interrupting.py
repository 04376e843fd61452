"""A tracer that interrupts a thread at the nth line of some files, or of the library:
sys.settrace(Interrupt(7)).

It interrupts only at lines at which CPython itself handles a signal: after calls of C
functions, at the beginning of Python functions and in loops.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

#: The beginnings of some lines. CPython handles no signal between such a line and the
#: line before it.
_EDGES: Final = ("with ", "try:", "finally:", "except ", "pass", "async with ")
#: A return, a yield or a condition without a call.
_BARE: Final = re.compile(r"((return|yield)( [\w.]+)?|if [\w. !=<>]+:)( +#.*)?")
#: An assignment without a call.
_PLAIN: Final = re.compile(r"[\w.]+ [|+-]?= [^()]*")


class Interrupt:
    """Raises KeyboardInterrupt at the nth line of some files, or of the whole library.

    `left` is the number of lines before the interrupt. It is 0 once the interrupt was
    raised.
    """

    def __init__(self, nth: int, *files: str | None) -> None:
        self.left = nth
        self.place = ""  # file and line of the interrupt
        self._files = files

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        # weakref calls finalizers, and Python only prints their exceptions.
        if (
            event == "call"
            and frame.f_back is not None
            and frame.f_back.f_code.co_filename == weakref.__file__
        ):
            return None
        if not is_traced(code) or (self._files and code.co_filename not in self._files):
            return None
        if event == "line" and not is_edge(code.co_filename, frame.f_lineno):
            self.left -= 1
            if self.left == 0:
                self.place = f"{code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(call: Callable[[], object], nth: int, *files: str | None) -> Interrupt:
    """Make a call, and interrupt it at its nth line. Exceptions of the call, except
    KeyboardInterrupt, are raised.
    """
    tracer = Interrupt(nth, *files)
    before = sys.gettrace()  # a coverage run has one
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        assert tracer.left == 0
    finally:
        sys.settrace(before)
    return tracer


@functools.cache
def is_traced(code: Any) -> bool:
    """Return whether the lines of a function count. Python only prints the exceptions
    of `__del__` and of callbacks of weak references, so these functions are not
    interrupted.
    """
    is_finalizer = (
        code.co_name == "__del__"
        or code.co_qualname == "OsFS.after_fork.<locals>.<lambda>"
    )
    return (
        "/logcore/" in code.co_filename
        and "/testing/" not in code.co_filename
        and not is_finalizer
    )


@functools.cache
def is_edge(path: str, line: int) -> bool:
    """Return whether no interrupt may be raised at a line.

    A tracer may raise where the interpreter itself handles no signal, such as between
    an assignment and the return after it.
    """
    text = linecache.getline(path, line).strip()
    if text.startswith(_EDGES):
        return True
    before = linecache.getline(path, line - 1).strip()
    if before == "try:":
        before = linecache.getline(path, line - 2).strip()
    if before.startswith(("finally:", "except ")):
        return True
    follows_plain = _PLAIN.fullmatch(before) is not None and indent(
        path, line
    ) == indent(path, line - 1)
    return follows_plain or (
        _BARE.fullmatch(before) is not None
        and is_edge(path, line - 1)
        and (_BARE.fullmatch(text) or _PLAIN.fullmatch(text)) is not None
    )


def indent(path: str, line: int) -> int:
    text = linecache.getline(path, line)
    return len(text) - len(text.lstrip())
