"""Restores a snapshot as a new log directory.

Rules:
- A crash leaves the complete directory or none: it is created with a name that ends in
  `-partial`, and renamed when it is complete and durable.
- The checksum of every part is verified.
- Indexes are not part of a snapshot. The first opening rebuilds them, and checks the
  last segment of each partition.

This module does not choose the snapshot (catalog.py does).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial

from logcore.backup.manifest import SnapshotManifest, StoredPart, StoredPartition
from logcore.backup.store import Store
from logcore.directory.topic_file import write_topics
from logcore.directory.topics import remove_tree
from logcore.errors import CorruptLogError, InvalidConfigError
from logcore.fs import FS, SharedFS, opened
from logcore.kernels.checksum import crc32c
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key, OffsetCheckpoints, make_directories
from logcore.metadata.filenames import LOG, file_name, parse_partition_name
from logcore.registry import open_registry, registry_path

Tick = Callable[[int], object]


def restore_snapshot(
    fs: FS,
    store: Store,
    manifest: SnapshotManifest,
    target: str,
    *,
    tick: Tick | None = None,
) -> None:
    """Write the directory of a snapshot to a path that does not exist yet.

    Raises:
        InvalidConfigError: the path, or the path of its registry, contains files.
        CorruptLogError: a part is damaged. The path does not exist then.
        StorageReadError, StorageWriteError, DiskFullError: the restore failed.
    """
    for path in (target, registry_path(target)):
        if fs.exists(path) and (fs.listdir(path) if fs.is_directory(path) else True):
            raise InvalidConfigError(
                "a snapshot is restored to a path that does not exist",
                path=path,
                expected="another path",
                found="files",
            )
    parent, name = os.path.split(target)
    unfinished = os.path.join(
        parent, f"{name[:200]}.{fs.random_bytes(8).hex()}-partial"
    )
    make_directories(fs, unfinished)
    try:
        _Restore(fs, store, tick or (lambda _: None)).write(manifest, unfinished)
        with contextlib.suppress(FileNotFoundError):
            # The target may be an empty directory, such as a mount point.
            fs.rmdir(target)
        if manifest.nodes:
            fs.rename(registry_path(unfinished), registry_path(target))
        fs.rename(unfinished, target)
        fs.sync_dir(parent)
    except BaseException:
        for path in (unfinished, registry_path(unfinished)):
            _remove(fs, path)
        raise


def _remove(fs: FS, path: str) -> None:
    """Remove a directory with all directories in it, as far as possible."""
    if not fs.is_directory(path):
        return
    for child in fs.listdir(path):
        _remove(fs, os.path.join(path, child))
    remove_tree(fs, path)


def _value_from_snapshot(value: bytes, current: bytes | None) -> bytes:
    return value


class _Restore:
    """One restore while it runs."""

    def __init__(self, fs: FS, store: Store, tick: Tick) -> None:
        self._fs = fs
        self._store = store
        self._tick = tick

    def write(self, manifest: SnapshotManifest, directory: str) -> None:
        fs = self._fs
        points: dict[Key, int | None] = {}
        starts: dict[Key, int | None] = {}
        for name, partition in manifest.partitions.items():
            path = os.path.join(directory, name)
            fs.mkdir(path)
            self._partition(partition, path)
            key = parse_partition_name(name)
            # The last segment is checked when the directory is opened.
            points[key] = partition.segments[-1].base_offset
            starts[key] = min(partition.log_start, partition.end) or None
        checkpoints = OffsetCheckpoints(fs, directory)
        checkpoints.set(checkpoint.LOG_START, starts)
        checkpoints.set(checkpoint.RECOVERY_POINT, points)
        for name, content in manifest.files.items():
            checkpoint.write(fs, directory, name, content)
        if manifest.topics:
            write_topics(fs, directory, manifest.topics, may_use_reserve=False)
        if manifest.nodes:
            shared: SharedFS = fs  # type: ignore[assignment]  # other file systems have no registry
            with open_registry(directory, fs=shared) as registry:
                for path, value in manifest.nodes.items():
                    # The update of a child may have created this node already.
                    registry.update(path, partial(_value_from_snapshot, value))
        fs.sync_dir(directory)

    def _partition(self, partition: StoredPartition, directory: str) -> None:
        fs = self._fs
        for segment in partition.segments:
            path = os.path.join(directory, file_name(segment.base_offset, LOG))
            if segment.identity is not None and len(segment.parts) == 1:
                # Sealed segments never change, so a hard link shares the file.
                part = segment.parts[0]
                if self._store.link_to(part.name, path):
                    self._check_file(path, part)
                    continue
            with opened(fs, path, write=True, create=True, exclusive=True) as handle:
                position = 0
                for part in segment.parts:
                    for chunk in self._checked(self._store.read(part.name), part):
                        fs.pwrite(handle, chunk, position)
                        position += len(chunk)
                fs.fsync(handle)
        for name, content in partition.files.items():
            checkpoint.write(fs, directory, name, content)
        fs.sync_dir(directory)

    def _check_file(self, path: str, part: StoredPart) -> None:
        for _ in self._checked(self._store.read(part.name), part):
            pass

    def _checked(self, chunks: Iterator[bytes], part: StoredPart) -> Iterator[bytes]:
        """Yield the chunks of a part, and verify its size and checksum at the end."""
        size = 0
        crc = 0
        for chunk in chunks:
            size += len(chunk)
            crc = crc32c(chunk, crc)
            self._tick(len(chunk))
            yield chunk
        if (size, crc) != (part.size_bytes, part.crc32c):
            raise CorruptLogError(
                "a part of the snapshot is damaged; restore another snapshot",
                path=f"{self._store.location}/{part.name}",
                expected=f"{part.size_bytes} bytes with CRC-32C {part.crc32c:08x}",
                found=f"{size} bytes with {crc:08x}",
            )
