"""A forwarder's files in the registry of the directory: its progress, and its lock.

    /forward/<name>            {"by": "cluster" | "directory", "cluster": id, "progress": [[topic, partition, offset,
                               fingerprint], ...]}
    .forward-<name>            a file beside the nodes; a running forwarder holds a lock on its first byte

Rules:
- The whole progress is replaced in one write, and is durable when set() returns.
- The progress is written after the deliveries that it records, never before.
- "by" is the owner of the progress: this directory, or the remote cluster. If the
  cluster owns it, this copy is only used to detect that the cluster has lost it.

This module makes no decisions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Final, Literal, cast

import attrs

from logcore.errors import CorruptRegistryError, NodeNotFoundError, ShippingError
from logcore.fs import FS, SharedFS
from logcore.registry import open_registry
from logcore.shipping.cluster import Partition, ShippedProgress

ProgressOwner = Literal["cluster", "directory"]
_FORWARD: Final = "/forward"


@attrs.frozen
class RecordedProgress:
    """The progress of a forwarder, as stored in the directory."""

    #: Whether the cluster or this directory owns the progress.
    owner: ProgressOwner
    #: Id of the remote cluster.
    cluster_id: str
    #: By partition of the remote cluster.
    progress: Mapping[Partition, ShippedProgress]


def encode_progress(recorded: RecordedProgress) -> bytes:
    rows = [[*key, *progress] for key, progress in sorted(recorded.progress.items())]
    return json.dumps(
        {"by": recorded.owner, "cluster": recorded.cluster_id, "progress": rows}
    ).encode()


def decode_progress(content: bytes, path: str) -> RecordedProgress:
    """Decode the recorded progress. Raises CorruptRegistryError."""
    try:
        document = json.loads(content)
        rows = document["progress"]
        progress = {
            (str(topic), int(number)): ShippedProgress(int(offset), str(fingerprint))
            for topic, number, offset, fingerprint in rows
        }
        owner = document["by"]
        cluster_id = str(document["cluster"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRegistryError(
            "not the progress of a forwarder", path=path, found=repr(content[:80])
        ) from error
    if owner not in ("cluster", "directory"):
        raise CorruptRegistryError(
            "not the progress of a forwarder", path=path, found=repr(owner)
        )
    return RecordedProgress(owner, cluster_id, progress)


class ProgressStore:
    """The recorded progress of one forwarder. Its calls may raise any RegistryError."""

    def __init__(self, fs: FS, directory: str, name: str) -> None:
        self._fs = cast(SharedFS, fs)
        self._registry = open_registry(directory, fs=self._fs)
        self._lock_path = os.path.join(self._registry.path, f".forward-{name}")
        self._handle: int | None = None  # of the lock file
        self._path = f"{_FORWARD}/{name}"
        self._name = name

    def read(self) -> RecordedProgress | None:
        try:
            return decode_progress(self._registry.get(self._path).value, self._path)
        except NodeNotFoundError:
            return None

    def write(self, recorded: RecordedProgress) -> None:
        content = encode_progress(recorded)
        try:
            self._registry.set(self._path, content)
        except NodeNotFoundError:
            self._registry.create(self._path, content)

    def acquire_lock(self) -> None:
        """Lock the name of this forwarder.

        The lock is needed if the directory owns the progress, because the cluster does
        not fence a second forwarder in that case. The operating system releases the
        lock when the process dies.

        Raises:
            ShippingError: Another forwarder of this name is running.
        """
        handle = self._fs.open(self._lock_path, write=True, create=True)
        if self._fs.lock_byte(handle, 0):
            self._handle = handle
            self._fs.pwrite(handle, b"%-10d" % os.getpid(), 0)
            return
        pid = self._fs.pread(handle, 10, 0).decode("ascii", "replace").strip()
        self._fs.close(handle)
        raise ShippingError(
            f"another forwarder with the name {self._name!r} is running in process {pid}; stop that process, or give "
            "this forwarder another name and other topics"
        )

    def close(self) -> None:
        if self._handle is not None:
            self._fs.close(self._handle)  # releases the lock
            self._handle = None
        self._registry.close()
