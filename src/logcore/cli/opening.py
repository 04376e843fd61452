"""How commands open a log directory for writing: for themselves, or beside processes
that share it.

This module takes no argument of the command line but --shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

import logcore
from logcore.errors import LogLockedError

_Opened = TypeVar("_Opened", logcore.Log, logcore.LogDir)

shared_option = click.option(
    "--shared",
    is_flag=True,
    help="Let other processes open it for writing meanwhile, if they say so too.",
)


def open_to_write(
    directory: str, *, shared: bool = False, **options: Any
) -> logcore.LogDir:
    """The directory, for itself if that is possible, else beside processes that share
    it. Errors as open_dir().
    """
    return _open(logcore.open_dir, directory, shared, options)


def open_log_to_write(
    directory: str, *, shared: bool = False, **options: Any
) -> logcore.Log:
    """The same for the directory of one partition. Errors as logcore.open()."""
    return _open(logcore.open, directory, shared, options)


def _open(
    opening: Callable[..., _Opened],
    directory: str,
    shared: bool,
    options: Mapping[str, Any],
) -> _Opened:
    try:
        return opening(directory, shared=shared, **options)
    except LogLockedError as error:
        if shared:
            raise
        with contextlib.suppress(LogLockedError):
            return opening(directory, shared=True, **options)
        raise error
