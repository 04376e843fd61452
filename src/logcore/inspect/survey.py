"""A directory surveyed by its names: which partitions it holds, and what kind of file each name says.

Rules:
- Nothing is written, locked or repaired; a running writer is not disturbed.
- A name is judged alone: twenty digits that no offset can have name no file of a log.

This module looks into no file on its own: dump.py shows what is in one, verify.py judges it.
"""

from __future__ import annotations

import os
from typing import Final

from logcore import checkpoint
from logcore.checkpoint import DIRECTORY_FILES, PARTITION_FILES
from logcore.errors import LogNotFoundError
from logcore.fs import FS, OS
from logcore.names import parse_file_name, partition_of, without_state

OFFSET_CHECKPOINTS: Final = (
    checkpoint.RECOVERY_POINT,
    checkpoint.LOG_START,
    checkpoint.HIGH_WATERMARK,
    checkpoint.CLEANER,
)


def kind_of(name: str) -> str | None:
    """The kind of a file by its name: "log", "index", "timeindex", "txnindex", "snapshot", "seal", or one of the
    names in DIRECTORY_FILES and PARTITION_FILES; None for any other file."""
    if name in DIRECTORY_FILES or name in PARTITION_FILES:
        return name
    file = parse_file_name(name)
    if file is None:
        return None
    return file.suffix[1:]


def living_name(name: str) -> str:
    """A name without the suffixes of files that are going or coming."""
    if name == checkpoint.SEALS_HOLD:
        return name
    return without_state(name)


def partitions(path: str | os.PathLike[str], *, fs: FS = OS) -> list[str]:
    """The partition directories at a path: itself, or those in it. Raises LogNotFoundError when there is none."""
    directory = os.fspath(path)
    if not fs.is_directory(fs.real_path(directory)):
        raise LogNotFoundError("there is no such directory", path=directory)
    names = fs.listdir(directory)
    if _is_partition(fs, directory, names):
        return [directory]
    paths = [os.path.join(directory, name) for name in names if partition_of(name) is not None]
    # These are read and not written to, so that links to partitions may be followed.
    found = sorted((path for path in paths if fs.is_directory(fs.real_path(path))), key=_by_partition)
    if not found and not any(name in DIRECTORY_FILES for name in names):
        raise LogNotFoundError(
            "this is neither a partition directory (like orders-0, with .log files) nor a directory that holds some",
            path=directory,
        )
    return found


def _is_partition(fs: FS, directory: str, names: list[str]) -> bool:
    if any(kind_of(name) == "log" or name in PARTITION_FILES for name in names):
        return True
    return not names and partition_of(os.path.basename(fs.real_path(directory))) is not None


def _by_partition(path: str) -> tuple[str, int]:
    return partition_of(os.path.basename(path)) or ("", 0)
