"""What the library tells of by itself: log lines for those who listen, incidents for those who ask.

Rules:
- Loggers are those of the standard library, named `logcore` and `logcore.<area>`; silent until a handler is added.
- `logging` is imported when the first line is said: it takes longer to import than the rest of this library.
- To tell never fails: what went wrong is more important than the line about it.

This module decides nothing and keeps nothing; logdir.py collects incidents.
"""

from __future__ import annotations

import contextlib
from typing import Final

import attrs

from logcore.errors import LogcoreError

#: Levels of the standard library's loggers.
INFO: Final = 20
WARNING: Final = 30
ERROR: Final = 40


@attrs.frozen(kw_only=True)
class Incident:
    """Something that went wrong in work nobody waited for, such as tick().

    work: what was being done. where: the partition's or topic's name, or a path. error: the newest of its kind. count:
    how often it was met. first_ms, last_ms: the wall clock then.
    """

    work: str
    where: str
    error: LogcoreError | OSError
    count: int
    first_ms: int
    last_ms: int


def tell(area: str, level: int, text: str, *values: object) -> None:
    """Says a line to the logger `logcore.<area>`."""
    with contextlib.suppress(MemoryError, OSError):  # there may be no memory or descriptor to import it with
        import logging

        root = logging.getLogger("logcore")
        if not root.handlers:  # else warnings would appear on standard error, where nobody asked for them
            root.addHandler(logging.NullHandler())
        logging.getLogger(f"logcore.{area}").log(level, text, *values)
