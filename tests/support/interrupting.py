"""A tracer that interrupts a thread at the nth line of some files: sys.settrace(Interrupt(7, module.__file__))."""

from __future__ import annotations

import linecache
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt, but not at the edges of with and try, where the interpreter itself handles no signal.
    left: how many lines were still to come; 0 once it has raised.
    """

    def __init__(self, nth: int, *files: str | None) -> None:
        self.left = nth
        self._files = files

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith(("with ", "try:", "finally:")):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self
