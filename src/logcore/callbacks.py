"""Calls of what a user gave: callbacks and interceptors, whose errors disturb nothing
else.

This module does not know the arguments of these functions.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any


def call(function: Callable[..., object], *given: object) -> object:
    """Calls what a user gave; what it raises goes to sys.unraisablehook, and None is
    returned.
    """
    try:
        return function(*given)
    except Exception as error:
        report(error, function)
        return None


def report(error: Exception, function: Callable[..., object]) -> None:
    """Shows what a function of the user raised: by sys.unraisablehook, where the
    program has set one. A hook that fails must not keep other callbacks from their
    call.
    """
    with contextlib.suppress(Exception):
        _show(error, function)


def _show(error: Exception, function: Callable[..., object]) -> None:
    if (
        sys.unraisablehook is sys.__unraisablehook__
    ):  # it accepts only arguments that the interpreter has made
        sys.stderr.write(f"Exception ignored in: {function!r}\n")
        traceback.print_exception(error)
        return
    told: Any = types.SimpleNamespace(
        exc_type=type(error),
        exc_value=error,
        exc_traceback=error.__traceback__,
        err_msg=None,
        object=function,
    )
    sys.unraisablehook(told)
