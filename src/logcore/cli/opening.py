"""Opening of log directories for writing: exclusively, or shared with other processes.

This module defines one option of the command line, --shared.
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
    help="Let other processes write the directory at the same time, if they share it too.",
)


def open_to_write(
    directory: str, *, shared: bool = False, **options: Any
) -> logcore.LogDir:
    """Open the log directory exclusively if possible, otherwise shared.

    Errors are the same as in logcore.open_dir().
    """
    return _open(logcore.open_dir, directory, shared, options)


def open_log_to_write(
    directory: str, *, shared: bool = False, **options: Any
) -> logcore.Log:
    """Open the directory of one partition exclusively if possible, otherwise shared.

    Errors are the same as in logcore.open().
    """
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
