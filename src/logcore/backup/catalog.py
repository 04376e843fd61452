"""Lists, finds and deletes the snapshots of a backup.

Rules:
- A snapshot with a damaged manifest is listed too, without its time and sizes.
- A part is deleted only if no manifest refers to it. Parts without a manifest may belong
  to a snapshot that is being taken, and are kept for a day.
"""

from __future__ import annotations

import contextlib
from typing import Final

import attrs

from logcore.backup import manifest as manifests
from logcore.backup.manifest import SnapshotManifest
from logcore.backup.store import Store
from logcore.errors import CorruptLogError, LogNotFoundError

_UNFINISHED_MS: Final = 86_400_000


@attrs.frozen
class SnapshotInfo:
    """A snapshot in a backup."""

    #: The argument of restore().
    id: str
    #: When the snapshot began, or None if its manifest is damaged.
    time_ms: int | None = None
    #: Numbers of topics and partitions.
    topics: int = 0
    partitions: int = 0
    #: The size of all .log files.
    size_bytes: int = 0


def snapshot_ids(store: Store) -> list[str]:
    """Return the ids of all snapshots, the oldest first."""
    names = store.names(manifests.MANIFESTS)
    found = map(manifests.snapshot_id_of, names)
    return sorted(snapshot_id for snapshot_id in found if snapshot_id is not None)


def read_manifest(store: Store, snapshot_id: str) -> SnapshotManifest:
    """Return a manifest.

    Raises:
        CorruptLogError: the manifest is damaged.
        StorageReadError: the manifest cannot be read.
    """
    name = manifests.manifest_name(snapshot_id)
    return manifests.unpack(b"".join(store.read(name)), f"{store.location}/{name}")


def newest(store: Store) -> SnapshotManifest | None:
    """Return the newest manifest that is not damaged."""
    for snapshot_id in reversed(snapshot_ids(store)):
        with contextlib.suppress(CorruptLogError):
            return read_manifest(store, snapshot_id)
    return None


def summaries(store: Store) -> list[SnapshotInfo]:
    """Return all snapshots, the oldest first."""
    found = []
    for snapshot_id in snapshot_ids(store):
        info = SnapshotInfo(snapshot_id)
        with contextlib.suppress(CorruptLogError):
            manifest = read_manifest(store, snapshot_id)
            info = SnapshotInfo(
                manifest.id,
                manifest.time_ms,
                len(manifest.topics),
                len(manifest.partitions),
                manifest.size_bytes,
            )
        found.append(info)
    return found


def choose(store: Store, at: str | int | None) -> SnapshotManifest:
    """Return the snapshot with an id, the newest up to a time, or the newest of all.

    Raises:
        LogNotFoundError: no snapshot matches. The error lists the newest ids.
        CorruptLogError: the manifest of the snapshot is damaged.
    """
    ids = snapshot_ids(store)
    chosen = None
    if isinstance(at, str):
        if at in ids:
            chosen = at
    elif at is None:
        chosen = ids[-1] if ids else None
    else:
        limit = manifests.new_id(at, b"\xff\xff\xff\xff")
        chosen = max(
            (snapshot_id for snapshot_id in ids if snapshot_id <= limit), default=None
        )
    if chosen is None:
        raise LogNotFoundError(
            "there is no such snapshot in the backup",
            path=store.location,
            expected=", ".join(ids[-5:])
            or "a directory that `logcore snapshot` has written",
            found=None if at is None else at,
        )
    return read_manifest(store, chosen)


def prune(store: Store, keep: int, now_ms: int) -> int:
    """Delete all snapshots but the newest `keep`; return the number of deleted parts.

    The manifests are deleted first, and the remaining manifests are read after that. So
    the parts of a snapshot that another process completes during this call are kept.

    Raises:
        CorruptLogError: a remaining manifest is damaged. No part is deleted then,
            because the parts of that snapshot are unknown.
    """
    ids = snapshot_ids(store)
    for snapshot_id in ids[: max(0, len(ids) - keep)]:
        store.delete(manifests.manifest_name(snapshot_id))
    remaining = snapshot_ids(store)
    used = {
        part.name
        for snapshot_id in remaining
        for part in read_manifest(store, snapshot_id).parts()
    }
    deleted = 0
    oldest_kept = manifests.new_id(max(0, now_ms - _UNFINISHED_MS), b"\0\0\0\0")
    ids_before = set(ids)
    for name in store.names(manifests.PARTS):
        part_snapshot_id = manifests.snapshot_id_of(name)
        if name in used or part_snapshot_id is None:
            continue
        if part_snapshot_id in ids_before or part_snapshot_id < oldest_kept:
            store.delete(name)
            deleted += 1
    return deleted
