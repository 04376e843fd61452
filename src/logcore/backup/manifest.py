"""Manifests: the list of a snapshot's files, with the stored parts of each file.

Rules:
- A manifest is stored after all of its parts, so a snapshot that is listed is complete.
- A part is never changed. A later snapshot refers to the parts of an earlier one.
- The id of a snapshot begins with the time in UTC, so sorted ids are in order of time.
- A manifest may come from any source. Its names become paths, so unpack() accepts only
  names that logcore itself would write.

This module does not access the disk: taking.py and restoring.py do.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import attrs

from logcore.config import INT64_MAX
from logcore.directory.topic_file import TopicEntry
from logcore.errors import CorruptLogError
from logcore.metadata import checkpoint
from logcore.metadata.filenames import (
    SNAPSHOT,
    base_offset_of,
    partition_of,
)

_FORMAT: Final = 1
#: Directories of a backup, which contain the manifests and the parts.
MANIFESTS: Final = "snapshots"
PARTS: Final = "parts"
_SUFFIX: Final = ".json"
_ID: Final = re.compile(r"\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{8}")
_PART: Final = re.compile(
    rf"{PARTS}/[A-Za-z0-9._-]{{1,260}}/\d{{20}}\.{_ID.pattern}\.\d{{1,19}}"
)
#: Small files of a log directory and of a partition that a snapshot contains.
DIRECTORY_FILES: Final = (
    checkpoint.META_PROPERTIES,
    checkpoint.PRODUCER_IDS,
    checkpoint.GROUPS,
)
PARTITION_FILES: Final = (
    checkpoint.LEADER_EPOCH,
    checkpoint.PARTITION_METADATA,
    checkpoint.POLICY,
)


@attrs.frozen
class StoredPart:
    """A range of a .log file, stored as one object."""

    name: str
    size_bytes: int
    crc32c: int


@attrs.frozen
class FileIdentity:
    """Facts of a sealed .log file that change if the file is replaced."""

    inode: int
    size_bytes: int
    modified_ms: int


@attrs.frozen
class StoredSegment:
    """A .log file of a snapshot."""

    base_offset: int
    parts: tuple[StoredPart, ...]
    #: The file of a sealed segment when the snapshot was taken, None for the last segment.
    identity: FileIdentity | None = None

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@attrs.frozen
class StoredPartition:
    """A partition of a snapshot."""

    log_start: int
    end: int
    segments: tuple[StoredSegment, ...]
    #: Content of the small files by name.
    files: Mapping[str, bytes]


@attrs.frozen
class SnapshotManifest:
    """A snapshot: everything that restore() writes."""

    id: str
    time_ms: int
    #: Kafka's id of the cluster, which is unique for each directory.
    cluster_id: str
    topics: tuple[TopicEntry, ...]
    #: Partitions by the name of their directory.
    partitions: Mapping[str, StoredPartition]
    files: Mapping[str, bytes]
    #: Values of persistent nodes of the registry by path.
    nodes: Mapping[str, bytes]

    @property
    def size_bytes(self) -> int:
        """The size of all .log files."""
        return sum(
            segment.size_bytes
            for partition in self.partitions.values()
            for segment in partition.segments
        )

    def parts(self) -> Iterator[StoredPart]:
        for partition in self.partitions.values():
            for segment in partition.segments:
                yield from segment.parts


def new_id(time_ms: int, random: bytes) -> str:
    """Return the id of a snapshot that begins at a time. `random` is four bytes."""
    moment = datetime.fromtimestamp(time_ms // 1000, UTC)
    return f"{moment:%Y%m%dT%H%M%S}.{time_ms % 1000:03}Z-{random.hex()}"


def id_time_ms(snapshot_id: str) -> int:
    """Return the time of a snapshot id, in milliseconds."""
    moment = datetime.strptime(snapshot_id[:19], "%Y%m%dT%H%M%S.%f")
    return round(moment.replace(tzinfo=UTC).timestamp() * 1000)


def manifest_name(snapshot_id: str) -> str:
    return f"{MANIFESTS}/{snapshot_id}{_SUFFIX}"


def snapshot_id_of(name: str) -> str | None:
    """Return the id of a manifest's or a part's name, None for another object."""
    found = _ID.search(name)
    if found is None:
        return None
    if name == manifest_name(found[0]) or _PART.fullmatch(name):
        return found[0]
    return None


def part_name(partition: str, base_offset: int, snapshot_id: str, position: int) -> str:
    return f"{PARTS}/{partition}/{base_offset:020}.{snapshot_id}.{position}"


def pack(manifest: SnapshotManifest) -> bytes:
    """Return a manifest as a line of JSON with its checksum."""
    return checkpoint.pack_checked(
        {
            "format": _FORMAT,
            "id": manifest.id,
            "time_ms": manifest.time_ms,
            "cluster_id": manifest.cluster_id,
            "topics": [topic.as_json() for topic in manifest.topics],
            "partitions": {
                name: {
                    "log_start": partition.log_start,
                    "end": partition.end,
                    "segments": [
                        _segment_row(segment) for segment in partition.segments
                    ],
                    "files": _texts(partition.files),
                }
                for name, partition in manifest.partitions.items()
            },
            "files": _texts(manifest.files),
            "nodes": _texts(manifest.nodes),
        }
    )


def _texts(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def _segment_row(segment: StoredSegment) -> dict[str, Any]:
    row: dict[str, Any] = {
        "base_offset": segment.base_offset,
        "parts": [[part.name, part.size_bytes, part.crc32c] for part in segment.parts],
    }
    if segment.identity is not None:
        row["identity"] = list(attrs.astuple(segment.identity))
    return row


def unpack(content: bytes, path: str) -> SnapshotManifest:
    """Return the manifest of an object; `path` is for errors.

    Raises:
        CorruptLogError: the object is damaged, or logcore has not written it.
    """
    facts = checkpoint.unpack_checked(content)
    if facts is None:
        raise CorruptLogError(
            "the manifest of a snapshot is damaged; restore another snapshot",
            path=path,
            expected="JSON with a correct checksum",
            found=repr(content[:80]),
        )
    try:
        if facts["format"] != _FORMAT:
            raise ValueError(f"format {facts['format']!r:.80}")
        return _manifest(facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptLogError(
            "the manifest of a snapshot has content that this version does not write",
            path=path,
            expected=f"format {_FORMAT}",
            found=f"{type(error).__name__}: {error}",
        ) from error


def _manifest(facts: dict[str, Any]) -> SnapshotManifest:
    partitions = {}
    for name, row in facts["partitions"].items():
        if partition_of(name) is None:
            raise ValueError(f"a partition named {name!r:.80}")
        partitions[name] = StoredPartition(
            _number(row["log_start"]),
            _number(row["end"]),
            tuple(map(_segment, row["segments"])),
            {
                _checked(file, _is_partition_file(file)): _bytes(text)
                for file, text in row["files"].items()
            },
        )
    return SnapshotManifest(
        _checked(facts["id"], _ID.fullmatch(facts["id"]) is not None),
        _number(facts["time_ms"]),
        _checked(facts["cluster_id"], isinstance(facts["cluster_id"], str)),
        tuple(map(TopicEntry.from_json, facts["topics"])),
        partitions,
        {
            _checked(file, file in DIRECTORY_FILES): _bytes(text)
            for file, text in facts["files"].items()
        },
        {path: _bytes(text) for path, text in facts["nodes"].items()},
    )


def _is_partition_file(name: str) -> bool:
    return name in PARTITION_FILES or base_offset_of(name, SNAPSHOT) is not None


def _segment(row: dict[str, Any]) -> StoredSegment:
    identity = None
    if "identity" in row:
        identity = FileIdentity(*map(_number, row["identity"]))
    return StoredSegment(
        _number(row["base_offset"]),
        tuple(
            StoredPart(
                _checked(name, _PART.fullmatch(name) is not None),
                _number(size),
                _number(crc),
            )
            for name, size, crc in row["parts"]
        ),
        identity,
    )


def _checked(name: str, is_valid: bool) -> str:
    if not is_valid:
        raise ValueError(f"the name {name!r:.80}")
    return name


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= 2 * INT64_MAX + 1:
        raise ValueError(f"the number {value!r:.80}")
    return value


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
