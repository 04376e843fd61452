"""The identity of a log directory: its ids, the producer ids it allocates, and its
detection.

Rules (storage format section 6):
- meta.properties is written if it does not exist. A file that Kafka wrote is not
  changed.
- Producer ids are reserved on disk in blocks of a thousand before the first id of a
  block is allocated, so that no id is allocated twice.
- Without a saved block, as in a directory that Kafka wrote, ids start above the ids in
  the logs. A batch with a reused id would count as a duplicate and not be stored.

The caller (logdir.py) holds the lock of the directory.
"""

from __future__ import annotations

import os
from typing import Final

from logcore.config import INT32_MAX
from logcore.directory.topic_file import id_text, new_id
from logcore.errors import CorruptLogError, InvalidConfigError, LogNotFoundError
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import DIRECTORY_FILES, LOCK_RECORD, PARTITION_FILES
from logcore.metadata.filenames import (
    base_offset_of,
    is_deleted_partition,
    partition_of,
)

_PRODUCER_ID_BLOCK: Final = 1_000  # as in Kafka


class DirectoryIdentity:
    """The content of meta.properties."""

    def __init__(self, fs: FS, path: str, *, can_write: bool) -> None:
        self._properties = _read(fs, path, can_write=can_write)

    @property
    def cluster_id(self) -> str:
        return self._properties.get("cluster.id", "")

    @property
    def node_id(self) -> int:
        text = (
            self._properties.get("node.id") or self._properties.get("broker.id") or "1"
        )
        if text.isdecimal() and int(text) <= INT32_MAX:
            return int(text)
        return 1

    @property
    def directory_id(self) -> str:
        """The id of this directory. It is "" in a directory that an older Kafka wrote."""
        return self._properties.get("directory.id", "")


def claim_for_cluster(fs: FS, path: str, cluster_id: str, node_id: int) -> str:
    """Assign an existing directory to a broker; return its directory.id.

    Raises:
        InvalidConfigError: the directory belongs to another cluster or broker.
    """
    if checkpoint.read(fs, path, checkpoint.META_PROPERTIES) is None:
        _write(fs, path, cluster_id, node_id)
    identity = DirectoryIdentity(fs, path, can_write=False)
    for name, expected, found in (
        ("cluster.id", cluster_id, identity.cluster_id),
        ("node.id", node_id, identity.node_id),
    ):
        if found != expected:
            raise InvalidConfigError(
                f"the directory has another {name}",
                path=os.path.join(path, checkpoint.META_PROPERTIES),
                expected=expected,
                found=found,
            )
    return identity.directory_id


def _write(fs: FS, path: str, cluster_id: str, node_id: int) -> dict[str, str]:
    properties = {
        "version": "1",
        "cluster.id": cluster_id,
        "node.id": str(node_id),
        "directory.id": id_text(new_id(fs)),
    }
    text = "#\n" + "".join(f"{name}={value}\n" for name, value in properties.items())
    checkpoint.write(fs, path, checkpoint.META_PROPERTIES, text.encode())
    return properties


def _read(fs: FS, path: str, *, can_write: bool) -> dict[str, str]:
    content = checkpoint.read(fs, path, checkpoint.META_PROPERTIES)
    if content is not None:
        return checkpoint.properties(content)
    cluster_id = id_text(new_id(fs))
    if can_write:
        return _write(fs, path, cluster_id, 1)
    return {"cluster.id": cluster_id, "node.id": "1"}


class ProducerIds:
    """Allocates producer ids. The caller holds the directory's lock."""

    def __init__(self, fs: FS, path: str) -> None:
        self._fs = fs
        self._path = path
        self._next = 0
        # End of the reserved block.
        self._end = 0

    @property
    def has_reservation(self) -> bool:
        return self._next < self._end or self._read_reservation() is not None

    def _read_reservation(self) -> bytes | None:
        return checkpoint.read(self._fs, self._path, checkpoint.PRODUCER_IDS)

    def next(self, minimum: int = 0) -> int:
        """Return a producer id that was never allocated.

        `minimum` is the first unused number, for a directory without a saved block.

        Raises:
            CorruptLogError: the saved block is damaged.
        """
        if self._next >= self._end:
            # Read for each block, because another process that shares the directory may
            # have reserved blocks since.
            content = self._read_reservation()
            first: int | None = minimum
            if content is not None:
                first = checkpoint.unpack_producer_ids(content)
            if first is None:
                raise CorruptLogError(
                    "the file of producer ids is damaged; restore it, or remove it if no producer with an id from "
                    "this directory writes any more",
                    path=os.path.join(self._path, checkpoint.PRODUCER_IDS),
                    expected="a number and its CRC",
                    found=repr(content),
                )
            # Durable before the first id of the block is allocated: a crash loses ids
            # but never repeats one.
            end = first + _PRODUCER_ID_BLOCK
            checkpoint.write(
                self._fs,
                self._path,
                checkpoint.PRODUCER_IDS,
                checkpoint.pack_producer_ids(end),
            )
            self._next = first
            self._end = end
        next_id = self._next
        self._next += 1
        return next_id


def check_kind(fs: FS, real_path: str, *, create: bool) -> None:
    """Raise LogNotFoundError if a directory is not a log directory.

    Without this check, it would be opened as a log directory without topics. An empty
    directory is accepted, and so is a directory that contains a file of a log directory
    or a partition directory.
    """
    names = fs.listdir(real_path)
    of_partitions = {*PARTITION_FILES, LOCK_RECORD}
    if not of_partitions.isdisjoint(names) or any(
        base_offset_of(name) is not None for name in names
    ):
        raise LogNotFoundError(
            "this is the directory of one partition: open it with logcore.open(), or open the directory that holds it",
            path=real_path,
        )
    # A crash during creation may have left only the reserve, or a file that was not
    # renamed yet.
    known_names = (*DIRECTORY_FILES, checkpoint.RESERVE)
    if (
        create
        or not names
        or any(name.removesuffix(".tmp") in known_names for name in names)
    ):
        return
    if not any(
        (partition_of(name) is not None or is_deleted_partition(name))
        and fs.is_directory(os.path.join(real_path, name))
        for name in names
    ):
        raise LogNotFoundError(
            "this is not a log directory: it has neither a file of one nor a directory of a partition; create=True "
            "makes it one",
            path=real_path,
            expected="directories like orders-0",
            found=", ".join(sorted(names)[:5]),
        )
