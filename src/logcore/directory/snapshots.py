"""Snapshots: copies the whole directory to a path that does not exist yet.

Rules:
- The copy is made under a name that ends in `-partial`. It is renamed when it is
  complete and durable.
- Committed offsets of groups are copied first, so each of them is within the copy of
  its topic.

This module does not read segments: copying.py copies a log.
"""

from __future__ import annotations

import os
from typing import Final

from logcore.directory.copying import copy_log
from logcore.directory.incidents import Incidents
from logcore.directory.interface import PartitionDirectory
from logcore.directory.topics import remove_tree
from logcore.errors import InvalidConfigError
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key, OffsetCheckpoints, make_directories
from logcore.metadata.filenames import OFFSETS_TOPIC, partition_name

# Maximum length of a file name on Linux.
_NAME_BYTES: Final = 255


def take_snapshot(
    fs: FS, directory: PartitionDirectory, incidents: Incidents, target: str
) -> None:
    """Copy all partitions up to their high watermarks, one after the other.

    If this fails, the incomplete copy is deleted. An incident reports any files that
    could not be deleted.

    Raises:
        InvalidConfigError: the target exists.
        StorageReadError, StorageWriteError, DiskFullError: the copy failed.
    """
    if fs.exists(target):
        raise InvalidConfigError(
            "there is something at the path of the snapshot", found=repr(target)
        )
    parent, name = os.path.split(target)
    suffix = f".{fs.random_bytes(8).hex()}-partial"
    partial = os.path.join(parent, name[: _NAME_BYTES - len(suffix)] + suffix)
    make_directories(fs, partial)
    try:
        _copy_directory(fs, directory, partial)
        fs.rename(partial, target)
        fs.sync_dir(parent)
    except BaseException:
        with incidents.going_on("deletion", partial):
            for inside in fs.listdir(partial):
                if fs.is_directory(os.path.join(partial, inside)):
                    remove_tree(fs, os.path.join(partial, inside))
            remove_tree(fs, partial)
        raise


def _copy_directory(fs: FS, directory: PartitionDirectory, target: str) -> None:
    """Copy all partitions and the directory's metadata to an existing empty directory."""
    points: dict[Key, int | None] = {}
    starts: dict[Key, int | None] = {}
    # Committed offsets first, so that they are within the copies of the topics.
    for name in sorted(
        directory.topics(), key=lambda name: (name != OFFSETS_TOPIC, name)
    ):
        directory.topic_id(name)
        for number in directory.partitions(name):
            log = directory.partition(name, number)
            path = os.path.join(target, partition_name(name, number))
            fs.mkdir(path)
            # Kafka reads the topic id from this file.
            content = checkpoint.read(fs, log.path, checkpoint.PARTITION_METADATA)
            if content is not None:
                checkpoint.write(fs, path, checkpoint.PARTITION_METADATA, content)
            end = copy_log(log, path)
            points[name, number] = end
            starts[name, number] = min(log.log_start_offset, end) or None
    copied = OffsetCheckpoints(fs, target)
    copied.set(checkpoint.LOG_START, starts)
    copied.set(checkpoint.RECOVERY_POINT, points)
    for file in (
        checkpoint.META_PROPERTIES,
        checkpoint.PRODUCER_IDS,
        checkpoint.GROUPS,
        checkpoint.TOPICS,
    ):
        content = checkpoint.read(fs, directory.path, file)
        if content is not None:
            checkpoint.write(fs, target, file, content)
    fs.sync_dir(target)
