"""Reports of the library: log lines, and incidents for callers that ask for them.

Rules:
- Loggers are those of the standard library, named `logcore` and `logcore.<area>`;
  silent until a handler is added.
- `logging` is never imported here, for that takes milliseconds: a program that did not
  cannot listen.
- Lines are written with locks held: a handler must not write to the log that a line is
  about.
- A line that cannot be said is left out: the error it speaks of is more important.

This module decides nothing and keeps nothing; logdir.py collects incidents.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Final

import attrs

#: Levels of the standard library's loggers.
INFO: Final = 20
WARNING: Final = 30
ERROR: Final = 40


@attrs.frozen(kw_only=True)
class Incident:
    """Something that failed in work that no caller waits for, such as tick().

    work: what was being done. where: the partition's or topic's name, or a path. kind:
    the name of the error's class.
    reason: its text, the newest. count: how often it was met. first_ms, last_ms: the
    wall clock then.
    """

    work: str
    where: str
    kind: str
    reason: str
    count: int
    first_ms: int
    last_ms: int


def log_line(area: str, level: int, text: str, *values: object) -> None:
    """Says a line to the logger `logcore.<area>`."""
    logging = sys.modules.get("logging")
    if logging is None:
        return
    with contextlib.suppress(MemoryError):
        root = logging.getLogger("logcore")
        if not root.handlers:  # else Python writes warnings to standard error
            root.addHandler(logging.NullHandler())
        logger = logging.getLogger(f"logcore.{area}")
        if logger.isEnabledFor(level):
            # As text: an error that a handler keeps would keep open what its traceback
            # knows.
            logger.log(level, "%s", text % values)
