"""Calls functions of the user, such as callbacks and interceptors, whose errors must
not affect other work.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any


def call(function: Callable[..., object], *given: object) -> object:
    """Call a function of the user. If it raises, report the error to sys.unraisablehook
    and return None.
    """
    try:
        return function(*given)
    except Exception as error:
        report(error, function)
        return None


def report(error: Exception, function: Callable[..., object]) -> None:
    """Report an exception of a user's function to sys.unraisablehook, if the program
    has set one.

    A hook that fails must not prevent other callbacks.
    """
    with contextlib.suppress(Exception):
        _show(error, function)


def _show(error: Exception, function: Callable[..., object]) -> None:
    # Python's own hook accepts only arguments that the interpreter has created.
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.stderr.write(f"Exception ignored in: {function!r}\n")
        traceback.print_exception(error)
        return
    details: Any = types.SimpleNamespace(
        exc_type=type(error),
        exc_value=error,
        exc_traceback=error.__traceback__,
        err_msg=None,
        object=function,
    )
    sys.unraisablehook(details)
