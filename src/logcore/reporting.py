"""Reports of the library: log lines, and incidents for callers that request them.

Rules:
- The loggers are named `logcore` and `logcore.<area>`, in the logging of the standard
  library. They are silent until a handler is added.
- `logging` is never imported here, because that takes milliseconds. A program that has
  not imported it has no handler.
- Lines are written with locks held: a handler must not write to the log that a line
  describes.
- If a line cannot be written, it is left out: the error that it reports is more
  important.

This module makes no decision and keeps no state; logdir.py collects incidents.
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
    """A failure in work that no caller waits for, such as tick()."""

    #: The work that failed, such as "retention".
    work: str
    #: The name of the partition or topic, or a path.
    where: str
    #: The name of the error's class.
    kind: str
    #: The text of the latest error.
    reason: str
    #: Number of such errors.
    count: int
    #: The wall clock at the first and at the latest error.
    first_ms: int
    last_ms: int


def log_line(area: str, level: int, text: str, *values: object) -> None:
    """Write a line to the logger `logcore.<area>`."""
    logging = sys.modules.get("logging")
    if logging is None:
        return
    with contextlib.suppress(MemoryError):
        root = logging.getLogger("logcore")
        if not root.handlers:  # otherwise Python writes warnings to standard error
            root.addHandler(logging.NullHandler())
        logger = logging.getLogger(f"logcore.{area}")
        if logger.isEnabledFor(level):
            # As text, because a handler may keep the error, and with its traceback all
            # objects of its frames.
            logger.log(level, "%s", text % values)
