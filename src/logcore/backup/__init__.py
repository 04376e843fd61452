"""Backups: snapshots of a log directory in another directory or in an object store."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime

from logcore.backup.catalog import SnapshotInfo, choose, summaries
from logcore.backup.restoring import restore_snapshot
from logcore.backup.store import open_store
from logcore.backup.taking import SnapshotResult, take_snapshot
from logcore.fs import FS, OS

__all__ = [
    "SnapshotInfo",
    "SnapshotResult",
    "open_store",
    "restore",
    "snapshots",
    "take_snapshot",
]


def snapshots(backup: str | os.PathLike[str], *, fs: FS = OS) -> list[SnapshotInfo]:
    """Return the snapshots of a backup, the oldest first.

    A snapshot whose manifest is damaged has no time. See LogDir.snapshot() for `backup`.

    Raises:
        LogNotFoundError: the path does not exist.
        StorageReadError: the backup cannot be read.
    """
    return summaries(open_store(backup, fs, create=False))


def restore(
    backup: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    at: str | datetime | None = None,
    tick: Callable[[int], object] | None = None,
    fs: FS = OS,
) -> SnapshotInfo:
    """Write a snapshot to a new log directory, which can be opened for writing.

    Args:
        backup: a path or a URL; see LogDir.snapshot().
        directory: a path that does not exist, or an empty directory.
        at: the id of a snapshot, or a time with time zone. A time selects the newest
            snapshot that began at or before the time. The default is the newest snapshot.
        tick: called with the number of bytes that were just written.

    Raises:
        LogNotFoundError: there is no such snapshot.
        InvalidConfigError: files are at the path.
        CorruptLogError: the snapshot is damaged. The path does not exist then.
        StorageReadError, StorageWriteError, DiskFullError: the restore failed.
    """
    store = open_store(backup, fs, create=False)
    id_or_time_ms: str | int | None = None
    if isinstance(at, datetime):
        id_or_time_ms = int(at.timestamp() * 1000)
    else:
        id_or_time_ms = at
    manifest = choose(store, id_or_time_ms)
    target = fs.real_path(os.fspath(directory))
    restore_snapshot(fs, store, manifest, target, tick=tick)
    return SnapshotInfo(
        manifest.id,
        manifest.time_ms,
        len(manifest.topics),
        len(manifest.partitions),
        manifest.size_bytes,
    )
