"""Lists the partitions of a directory and the kinds of files, from the names alone.

Rules:
- Nothing is written, locked or repaired; a running writer is not disturbed.
- Only the name decides: a name with twenty digits that are not an offset is not a file
  of a log.

This module reads no file. dump.py shows the content of a file, and verify.py checks it.
"""

from __future__ import annotations

import os

from logcore.errors import LogNotFoundError
from logcore.fs import FS, OS
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import DIRECTORY_FILES, PARTITION_FILES
from logcore.metadata.filenames import parse_file_name, partition_of, without_state


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its name, None for a file of another kind.

    The kinds are "log", "index", "timeindex", "txnindex", "snapshot", "seal", and the
    names in DIRECTORY_FILES and PARTITION_FILES.
    """
    if name in DIRECTORY_FILES or name in PARTITION_FILES:
        return name
    file = parse_file_name(name)
    if file is None:
        return None
    return file.suffix[1:]


def final_name(name: str) -> str:
    """Return a name without the suffixes of files that are being created or deleted."""
    if name == checkpoint.CHECKSUMS_VALID:
        return name
    return without_state(name)


def partitions(path: str | os.PathLike[str], *, fs: FS = OS) -> list[str]:
    """Return the partition directories at a path: the directory itself, or those in it.

    Raises:
        LogNotFoundError: there is no partition directory.
    """
    directory = os.fspath(path)
    if not fs.is_directory(fs.real_path(directory)):
        raise LogNotFoundError("there is no such directory", path=directory)
    names = fs.listdir(directory)
    if _is_partition(fs, directory, names):
        return [directory]
    paths = [
        os.path.join(directory, name)
        for name in names
        if partition_of(name) is not None
    ]
    # The partitions are only read, so symbolic links to partitions are allowed.
    found = sorted(
        (path for path in paths if fs.is_directory(fs.real_path(path))),
        key=_by_partition,
    )
    if not found and not any(name in DIRECTORY_FILES for name in names):
        raise LogNotFoundError(
            "this is neither a partition directory (like orders-0, with .log files) nor a directory that holds some",
            path=directory,
        )
    return found


def _is_partition(fs: FS, directory: str, names: list[str]) -> bool:
    if any(kind_of(name) == "log" or name in PARTITION_FILES for name in names):
        return True
    return (
        not names
        and partition_of(os.path.basename(fs.real_path(directory))) is not None
    )


def _by_partition(path: str) -> tuple[str, int]:
    return partition_of(os.path.basename(path)) or ("", 0)
