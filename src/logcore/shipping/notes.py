"""What a forwarder notes in the directory's registry: how far it came, and that it is at work.

    /forward/<name>            {"by": "cluster" | "directory", "cluster": id, "progress": [[topic, partition, offset,
                               witness], ...]}
    /forward/<name>/owner      ephemeral: a forwarder of that name is at work

Rules:
- A note is replaced whole, in one write, and is on disk when set() returns.
- It is written after the deliveries it speaks of, never before.
- "by" says who keeps the progress: the remote cluster, and the note is a witness; or this directory.

This module decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Final, Literal, cast

import attrs

from logcore.errors import CorruptRegistryError, NodeExistsError, NodeNotFoundError, RegistryError, ShippingError
from logcore.fs import FS, SharedFS
from logcore.registry import open_registry
from logcore.registry.protocol import Registry
from logcore.shipping.remote import Partition, Progress

Keeper = Literal["cluster", "directory"]
_FORWARD: Final = "/forward"


@attrs.frozen
class Note:
    """cluster_id: of the remote cluster. progress: by its partitions."""

    by: Keeper
    cluster_id: str
    progress: Mapping[Partition, Progress]


def packed(note: Note) -> bytes:
    rows = [[*one, *its] for one, its in sorted(note.progress.items())]
    return json.dumps({"by": note.by, "cluster": note.cluster_id, "progress": rows}).encode()


def unpacked(content: bytes, path: str) -> Note:
    """Raises CorruptRegistryError."""
    try:
        given = json.loads(content)
        rows = given["progress"]
        progress = {(str(topic), int(number)): Progress(int(at), str(witness)) for topic, number, at, witness in rows}
        by = given["by"]
        cluster_id = str(given["cluster"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRegistryError("not the note of a forwarder", path=path, found=repr(content[:80])) from error
    if by not in ("cluster", "directory"):
        raise CorruptRegistryError("not the note of a forwarder", path=path, found=repr(by))
    return Note(by, cluster_id, progress)


class Notes:
    """The notes of one forwarder. Raises RegistryError of any kind."""

    def __init__(self, fs: FS, directory: str, name: str) -> None:
        self._registry: Registry = open_registry(directory, fs=cast(SharedFS, fs))
        self._path = f"{_FORWARD}/{name}"
        self._name = name

    def read(self) -> Note | None:
        try:
            content = self._registry.get(self._path).value
        except NodeNotFoundError:
            return None
        return unpacked(content, self._path) if content else None  # empty: only its child was made yet

    def write(self, note: Note) -> None:
        content = packed(note)
        try:
            self._registry.set(self._path, content)
        except NodeNotFoundError:
            self._registry.create(self._path, content)

    def own(self) -> None:
        """Says that this forwarder is at work. Raises ShippingError where another one of its name is.

        Nothing but the directory keeps the progress then, so nothing else would tell two of them apart.
        """
        try:
            self._registry.create(f"{self._path}/owner", str(os.getpid()).encode(), ephemeral=True)
        except NodeExistsError:
            pid = "?"
            with contextlib.suppress(RegistryError):
                pid = self._registry.get(f"{self._path}/owner").value.decode()
            raise ShippingError(
                f"another forwarder of the name {self._name!r} is at work in process {pid}; end it, or give this one "
                "another name and other topics"
            ) from None

    def close(self) -> None:
        self._registry.close()
