"""The nodes of a forwarder in the directory's registry: its progress, and its lock.

    /forward/<name>            {"by": "cluster" | "directory", "cluster": id, "progress": [[topic, partition, offset,
                               witness], ...]}
    .forward-<name>            a file beside the nodes; a running forwarder holds a lock on its first byte

Rules:
- The progress is replaced as a whole, in one write, and is on disk when set() returns.
- The progress is written after the deliveries that it records, never before.
- "by" names the keeper of the progress. It is this directory, or the remote cluster. In
  the second case the node only confirms the progress.

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

Keeper = Literal["cluster", "directory"]
_FORWARD: Final = "/forward"


@attrs.frozen
class RecordedProgress:
    """The recorded progress, by partition of the remote cluster with this id."""

    by: Keeper
    cluster_id: str
    progress: Mapping[Partition, ShippedProgress]


def packed(recorded: RecordedProgress) -> bytes:
    rows = [[*key, *its] for key, its in sorted(recorded.progress.items())]
    return json.dumps(
        {"by": recorded.by, "cluster": recorded.cluster_id, "progress": rows}
    ).encode()


def unpacked(content: bytes, path: str) -> RecordedProgress:
    """Decode the recorded progress. Raises CorruptRegistryError."""
    try:
        given = json.loads(content)
        rows = given["progress"]
        progress = {
            (str(topic), int(number)): ShippedProgress(int(at), str(witness))
            for topic, number, at, witness in rows
        }
        by = given["by"]
        cluster_id = str(given["cluster"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRegistryError(
            "not the progress of a forwarder", path=path, found=repr(content[:80])
        ) from error
    if by not in ("cluster", "directory"):
        raise CorruptRegistryError(
            "not the progress of a forwarder", path=path, found=repr(by)
        )
    return RecordedProgress(by, cluster_id, progress)


class ProgressStore:
    """The recorded progress of one forwarder. Its calls may raise any RegistryError."""

    def __init__(self, fs: FS, directory: str, name: str) -> None:
        self._fs = cast(SharedFS, fs)
        self._registry = open_registry(directory, fs=self._fs)
        self._lock_path = os.path.join(self._registry.path, f".forward-{name}")
        self._handle: int | None = None  # of the lock
        self._path = f"{_FORWARD}/{name}"
        self._name = name

    def read(self) -> RecordedProgress | None:
        try:
            return unpacked(self._registry.get(self._path).value, self._path)
        except NodeNotFoundError:
            return None

    def write(self, recorded: RecordedProgress) -> None:
        content = packed(recorded)
        try:
            self._registry.set(self._path, content)
        except NodeNotFoundError:
            self._registry.create(self._path, content)

    def own(self) -> None:
        """Lock the name of this forwarder.

        The lock is needed if the directory keeps the progress, because the cluster does
        not fence a second forwarder then. The operating system releases the lock when
        the process dies.

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
            f"another forwarder of the name {self._name!r} is running in process {pid}; end it, or give this one "
            "another name and other topics"
        )

    def close(self) -> None:
        if self._handle is not None:
            self._fs.close(self._handle)  # releases the lock
            self._handle = None
        self._registry.close()
