"""Checks of our own code that are too slow to run always. They run with
LOGCORE_VERIFY=1 in the environment, as in all tests.

A failed check raises AssertionError and is a defect of this library. Mistakes of users
and errors of disks are always checked by other modules.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

VERIFIES: Final = os.environ.get("LOGCORE_VERIFY") == "1"

_Call = TypeVar("_Call", bound=Callable[..., Any])


def locked(call: _Call) -> _Call:
    """Mark a function that runs under the lock of a log. Its first argument is the
    writer of the log, or has one.
    """
    if not VERIFIES:
        return call

    @functools.wraps(call)
    def checked(writer: Any, *arguments: Any, **options: Any) -> Any:
        assert writer.state.lock.locked(), (
            f"{call.__name__} without the lock of the log"
        )
        return call(writer, *arguments, **options)

    return checked  # type: ignore[return-value]


def keeps_order(call: _Call) -> _Call:
    """Mark a function that changes the segments of a log. It must leave PartitionState
    in order. Implies locked().
    """
    if not VERIFIES:
        return call

    @functools.wraps(call)
    def checked(writer: Any, *arguments: Any, **options: Any) -> Any:
        result = call(writer, *arguments, **options)
        writer.state.check(writer.active)
        return result

    return locked(checked)  # type: ignore[return-value]
