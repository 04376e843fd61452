"""Checks of our own code that cost too much to run always: with LOGCORE_VERIFY=1 in the
environment, as in all tests.

A check that fails raises AssertionError and is a defect of this library, never of its
user. What a user or a disk can get wrong is checked always, elsewhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

VERIFIES: Final = os.environ.get("LOGCORE_VERIFY") == "1"

_Call = TypeVar("_Call", bound=Callable[..., Any])


def locked(call: _Call) -> _Call:
    """Marks what is called under the lock of a log. The first argument is its writer,
    or what has one.
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
    """Marks what changes the segments of a log: afterwards its PartitionState is in
    order. Implies locked().
    """
    if not VERIFIES:
        return call

    @functools.wraps(call)
    def checked(writer: Any, *arguments: Any, **options: Any) -> Any:
        result = call(writer, *arguments, **options)
        writer.state.check(writer.active)
        return result

    return locked(checked)  # type: ignore[return-value]
