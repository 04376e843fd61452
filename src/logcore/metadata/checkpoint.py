"""The small text files of a log directory: offset checkpoints, leader epochs, logcore's
own metadata.

Rules (storage format section 6; docs/crashes.md, section 3):
- There is one way to write: `<name>.tmp`, sync, rename, sync of the directory. A reader
  sees the old content or the new.
- A reserve file beside them allows a full disk to be emptied: it becomes the `.tmp`.
- An invalid file counts as missing: the caller gets None or an empty result. Only a
  failing disk raises an error. All files are caches except the topics and the producer
  ids, whose callers refuse to guess.

This module does not read segments and makes no decisions from the content.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import attrs

from logcore.config import INT32_MAX, INT64_MAX, Durability
from logcore.errors import (
    DiskFullError,
    InvalidConfigError,
    LogcoreError,
    LogNotFoundError,
    StorageWriteError,
)
from logcore.fs import FS, opened

#: (topic, partition)
Key = tuple[str, int]
#: The key of a mapping that a caller gives: TopicPartition, or a tuple like it. Mapping
#: is invariant in its key, so one of these types would refuse the other.
PartitionKey = TypeVar("PartitionKey", bound=tuple[str, int])

RECOVERY_POINT: Final = "recovery-point-offset-checkpoint"
LOG_START: Final = "log-start-offset-checkpoint"
CLEANER: Final = "cleaner-offset-checkpoint"
HIGH_WATERMARK: Final = "replication-offset-checkpoint"
LEADER_EPOCH: Final = "leader-epoch-checkpoint"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"
META_PROPERTIES: Final = "meta.properties"
PARTITION_METADATA: Final = "partition.metadata"
TOPICS: Final = "logcore.topics"
GROUPS: Final = "logcore.groups"
CLOCK: Final = "logcore.clock"
PRODUCER_IDS: Final = "logcore.producer-ids"
POLICY: Final = "logcore.policy"
DURABLE_END: Final = "logcore.durable"
LOCK_RECORD: Final = "logcore.turn"
#: Exists while only this library has written a partition since its checksum files were
#: checked. Kafka compacts a partition without updating them. But first it loads the
#: partition, and then it removes all files that end in .deleted.
CHECKSUMS_VALID: Final = "logcore.seals-hold.deleted"
RESERVE: Final = "logcore.reserve"
# A checkpoint of some hundred partitions; more if a file is already larger.
_RESERVE_BYTES: Final = 16 << 10
_RESERVE_MARK: Final = b"logcore reserve\n"

#: The files that distinguish a log directory, and a partition's directory, from any
#: other.
DIRECTORY_FILES: Final = (
    RECOVERY_POINT,
    LOG_START,
    HIGH_WATERMARK,
    CLEANER,
    META_PROPERTIES,
    CLEAN_SHUTDOWN,
    TOPICS,
    GROUPS,
    PRODUCER_IDS,
    CLOCK,
)
#: The files with an offset of each partition.
OFFSET_FILES: Final = (RECOVERY_POINT, LOG_START, HIGH_WATERMARK, CLEANER)
#: The files whose size depends on the number of partitions.
_GROWING_FILES: Final = (*OFFSET_FILES, TOPICS)
PARTITION_FILES: Final = (LEADER_EPOCH, PARTITION_METADATA, POLICY, DURABLE_END)

# A checkpoint of a million partitions. A larger file is not from logcore.
_MAX_SIZE: Final = 64 << 20
_DURABLE: Final = struct.Struct(">8sI")


def ensure_directory(fs: FS, path: str) -> None:
    """Create a directory unless it exists, and make its name durable. Raises
    StorageWriteError.

    An empty directory is treated as new: the process that created it may have been
    killed before it synced the name, or that sync may have failed. A process that
    creates a directory adds no files before the name is durable.
    """
    if not fs.is_directory(path) or not fs.listdir(path):
        make_directories(fs, path)


def make_directories(fs: FS, path: str) -> None:
    """Create a directory like mkdir -p, and make each new name durable in its parent."""
    parent = os.path.dirname(path)
    # A root exists.
    if parent == path:
        return
    if parent:
        ensure_directory(fs, parent)
    is_new = True
    try:
        fs.mkdir(path)
    except FileExistsError:
        if not fs.is_directory(path):
            raise StorageWriteError(
                "the directory cannot be made: there is a file of that name", path=path
            ) from None
        is_new = False
    except FileNotFoundError as error:
        raise StorageWriteError(
            "the directory cannot be made: not here", path=path
        ) from error
    except StorageWriteError as error:
        error.reason = f"the directory cannot be made: {error.reason}"
        raise
    try:
        fs.sync_dir(parent or ".")
    except StorageWriteError as error:
        # An administrator may have created the directory in a parent that this process
        # cannot open. This process cannot have created it.
        if is_new or not isinstance(error.__cause__, PermissionError):
            raise


@contextlib.contextmanager
def expecting_directory(fs: FS, directory: str) -> Generator[None, None, None]:
    """Raise LogNotFoundError for a FileNotFoundError because the directory was removed."""
    try:
        yield
    except FileNotFoundError as error:
        if fs.is_directory(directory):
            raise
        raise LogNotFoundError(
            "the directory was removed while it was open", path=directory
        ) from error


def write(
    fs: FS,
    directory: str,
    name: str,
    content: bytes,
    *,
    reserve: str | None = None,
    temporary: str | None = None,
) -> None:
    """Replace a file durably; a crash leaves either the old content or the new.

    `reserve` is a log directory whose reserve may be used on a full disk. It is for a
    write before a deletion, or at close. `temporary` is the path that first gets the
    new content. If several writers may replace the file concurrently, each needs its
    own.
    """
    path = os.path.join(directory, name)
    if temporary is None:
        temporary = path + ".tmp"
    try:
        with (
            expecting_directory(fs, directory),
            opened(fs, temporary, write=True, create=True) as handle,
        ):
            fs.truncate(handle, 0)
            fs.pwrite(handle, content, 0)
            fs.fsync(handle)
    except DiskFullError:
        # The part that was written uses space.
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(temporary)
        if reserve is None or not _write_to_reserve(fs, reserve, temporary, content):
            raise
    else:
        reserve = None
    fs.rename(temporary, path)
    fs.sync_dir(directory)
    # The reserve was used, so create another one. The replaced file has left space for
    # it.
    if reserve is not None:
        # The reserve was moved from one directory to another, so this one has lost a
        # name.
        if reserve != directory:
            fs.sync_dir(reserve)
        create_reserve(fs, reserve)


def create_reserve(fs: FS, directory: str) -> None:
    """Reserve disk space for the small files written before a deletion.

    With the reserve, records can be deleted from a full disk.
    """
    path = os.path.join(directory, RESERVE)
    # A missing reserve is not an error.
    with contextlib.suppress(LogcoreError, OSError):
        largest = max(
            _size_or_zero(fs, os.path.join(directory, name)) for name in _GROWING_FILES
        )
        size_bytes = _RESERVE_BYTES + largest // _RESERVE_BYTES * _RESERVE_BYTES
        if _size_or_zero(fs, path) >= size_bytes:
            return
        # Create a new file instead of extending the old one, which may be a checkpoint
        # too: see _write_to_reserve().
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)
        with opened(fs, path, write=True, create=True, exclusive=True) as handle:
            # Random bytes, because a file system with compression would reserve no
            # space for zeros.
            fs.pwrite(
                handle,
                _RESERVE_MARK + fs.random_bytes(size_bytes - len(_RESERVE_MARK)),
                0,
            )
            fs.fsync(handle)


def _size_or_zero(fs: FS, path: str) -> int:
    try:
        return fs.file_size(path)
    except FileNotFoundError:
        return 0


def _write_to_reserve(fs: FS, directory: str, temporary: str, content: bytes) -> bool:
    """Use the reserve, whose disk space is allocated, as the temporary file.

    Returns False if there is no reserve. The rename comes first, so that two threads
    never write to one file. After a crash the reserve and a checkpoint may be names of
    the same file. The file is therefore written only if it begins like a reserve.
    """
    try:
        fs.rename(os.path.join(directory, RESERVE), temporary)
    except FileNotFoundError:
        return False
    with opened(fs, temporary, write=True) as handle:
        if fs.pread(handle, len(_RESERVE_MARK), 0) != _RESERVE_MARK:
            fs.rename(temporary, os.path.join(directory, RESERVE))
            return False
        fs.pwrite(handle, content, 0)
        fs.truncate(handle, len(content))
        fs.fsync(handle)
        return True


def read(fs: FS, directory: str, name: str) -> bytes | None:
    """Return the content of a small file, None if it does not exist."""
    try:
        with opened(fs, os.path.join(directory, name)) as handle:
            return fs.pread(handle, min(fs.size(handle), _MAX_SIZE), 0)
    except FileNotFoundError:
        return None


def _numbered_lines(content: bytes | None, fields: int) -> list[list[str]]:
    """Return the lines of a version 0 checkpoint, [] if any part of it is invalid."""
    try:
        lines = (content or b"").decode().split("\n")
        if len(lines) < 2 or int(lines[0]) != 0:
            return []
        # After the version and the number of rows.
        rows = [line.split() for line in lines[2:] if line]
        if len(rows) != int(lines[1]) or any(len(row) != fields for row in rows):
            return []
        return rows
    except ValueError:
        return []


def _checkpoint(rows: Iterable[str]) -> bytes:
    lines = list(rows)
    return "\n".join(["0", str(len(lines)), *lines, ""]).encode()


def read_offsets(fs: FS, directory: str, name: str) -> dict[Key, int]:
    """Return an offset checkpoint: (topic, partition) -> offset.

    A missing or damaged file is empty, as in Kafka.
    """
    offsets = {}
    try:
        for topic, partition, offset in _numbered_lines(read(fs, directory, name), 3):
            offsets[topic, int(partition)] = int(offset)
    except ValueError:
        return {}
    return offsets


class OffsetCheckpoints:
    """The offset checkpoints of a directory. Any thread may call its methods.

    If no other process writes the directory, they are parsed once and written from
    memory.
    """

    def __init__(
        self,
        fs: FS,
        directory: str,
        *,
        changing: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        """Create the checkpoints of a directory.

        `changing` locks out other processes that write to the directory; None if there
        are none.
        """
        self._fs = fs
        self._directory = directory
        self._changing = changing
        self._lock = threading.Lock()
        # Content on disk, by name; replaced as a whole, under _lock.
        self._files: dict[str, dict[Key, int]] = {}

    def get(self, name: str, key: Key) -> int | None:
        """Return the offset of a partition in a checkpoint."""
        return self.all(name).get(key)

    def all(self, name: str) -> Mapping[Key, int]:
        """Return all offsets of a checkpoint, which must not be changed.

        Raises StorageReadError.
        """
        with self._lock:
            return self._read_locked(name)

    def set(
        self,
        name: str,
        changes: Mapping[Key, int | None],
        *,
        holds: Callable[[Key, int | None], bool] | None = None,
        may_use_reserve: bool = False,
    ) -> None:
        """Set offsets of a checkpoint, or remove those that are None, and keep the
        others.

        `holds` is called just before the write, with no other write in between, and
        returns whether a change is still valid. `may_use_reserve` is for a write that
        makes room on a full disk, or at close. Raises the same errors as write().
        """
        other_processes_excluded: contextlib.AbstractContextManager[None] = (
            contextlib.nullcontext()
        )
        if self._changing is not None:
            other_processes_excluded = self._changing()
        with other_processes_excluded, self._lock:
            before = self._read_locked(name)
            offsets = dict(before)
            for key, offset in changes.items():
                if holds is not None and not holds(key, offset):
                    continue
                if offset is None:
                    offsets.pop(key, None)
                else:
                    offsets[key] = offset
            if offsets == before:
                return
            rows = (
                f"{topic} {partition} {offset}"
                for (topic, partition), offset in sorted(offsets.items())
            )
            # Drop the cached content before the write: if it fails, the disk may have
            # the old content or the new.
            self._files.pop(name, None)
            reserve = None
            if may_use_reserve:
                reserve = self._directory
            write(self._fs, self._directory, name, _checkpoint(rows), reserve=reserve)
            self._files[name] = offsets

    def _read_locked(self, name: str) -> dict[Key, int]:
        known = self._files.get(name)
        # Another process may have replaced the file.
        if known is None or self._changing is not None:
            known = self._files[name] = read_offsets(self._fs, self._directory, name)
        return known


def read_epochs(fs: FS, directory: str) -> list[tuple[int, int]]:
    """Return leader epochs as (leader_epoch, start_offset), increasing in both.

    Empty if the file is missing or damaged.
    """
    try:
        epochs = [
            (int(epoch), int(start))
            for epoch, start in _numbered_lines(read(fs, directory, LEADER_EPOCH), 2)
        ]
    except ValueError:
        return []
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(epochs))
    fits = all(
        0 <= epoch <= INT32_MAX and 0 <= start <= INT64_MAX for epoch, start in epochs
    )
    if rising and fits:
        return epochs
    return []


def write_epochs(
    fs: FS,
    directory: str,
    epochs: Iterable[tuple[int, int]],
    *,
    reserve: str | None = None,
) -> None:
    write(fs, directory, LEADER_EPOCH, pack_epochs(epochs), reserve=reserve)


def pack_epochs(epochs: Iterable[tuple[int, int]]) -> bytes:
    return _checkpoint(f"{epoch} {start}" for epoch, start in epochs)


@attrs.frozen
class PartitionMetadata:
    """The content of logcore.policy: partition metadata for the next opening."""

    #: The durability of the last writer; None if unknown, as in directories that Kafka
    #: wrote.
    policy: Durability | None = None
    #: From this offset on the log has no gap, because logcore wrote it and compacted
    #: nothing above. INT64_MAX if unknown.
    dense_from: int = INT64_MAX
    #: Whether there may be batches of idempotent producers, or markers.
    producers: bool = True
    #: Whether replication moved the high watermark of the last writer.
    replicated: bool = False


def read_partition_metadata(fs: FS, directory: str) -> PartitionMetadata:
    try:
        facts = json.loads(read(fs, directory, POLICY) or b"")
        policy = attrs.evolve(
            Durability.parse(facts["durability"]), max_bytes=int(facts["max_bytes"])
        )
        dense_from = facts.get("dense_from")
    except (
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
        InvalidConfigError,
    ):
        return PartitionMetadata()
    if type(dense_from) is not int or not 0 <= dense_from <= INT64_MAX:
        dense_from = INT64_MAX
    return PartitionMetadata(
        policy,
        dense_from,
        facts.get("producers") is not False,
        facts.get("replicated") is True,
    )


def write_metadata(
    fs: FS, directory: str, metadata: PartitionMetadata, *, reserve: str | None = None
) -> None:
    """Write the metadata of a partition, see write()."""
    assert metadata.policy is not None, "a writer has one"
    facts: dict[str, object] = {
        "durability": str(metadata.policy),
        "max_bytes": metadata.policy.max_bytes,
        "producers": metadata.producers,
    }
    if metadata.dense_from < INT64_MAX:
        facts["dense_from"] = metadata.dense_from
    if metadata.replicated:
        facts["replicated"] = True
    write(fs, directory, POLICY, json.dumps(facts).encode() + b"\n", reserve=reserve)


def properties(content: bytes) -> dict[str, str]:
    """Return the values in meta.properties by name."""
    return {name: value or "" for name, value in property_lines(content)}


def property_lines(content: bytes) -> Iterator[tuple[str, str | None]]:
    """Yield each (name, value) of meta.properties; no '=' in a line gives value None."""
    for line in content.decode("utf-8", "replace").splitlines():
        line = line.strip()
        if line and not line.startswith(("#", "!")):
            name, sign, value = line.partition("=")
            found = None
            if sign:
                found = value.strip()
            yield name.strip(), found


def topic_id(content: bytes) -> str:
    """Return the topic id in partition.metadata, 22 characters of base64url, or ""."""
    found = re.search(rb"^topic_id: *([A-Za-z0-9_-]{22})$", content, re.MULTILINE)
    if found:
        return found[1].decode()
    return ""


def pack_topics(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of logcore.topics.

    The first line has the CRC-32 of the rest. Each topic is a JSON object.
    """
    return _pack_rows("topics", rows)


def unpack_topics(content: bytes) -> list[dict[str, Any]] | None:
    """Return the rows of logcore.topics, None if the CRC does not match."""
    return _unpack_rows("topics", content)


def pack_groups(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of logcore.groups, in the format of logcore.topics."""
    return _pack_rows("groups", rows)


def unpack_groups(content: bytes) -> list[dict[str, Any]] | None:
    """Return the rows of logcore.groups, None if the CRC does not match."""
    return _unpack_rows("groups", content)


def _pack_rows(what: str, rows: Iterable[Mapping[str, Any]]) -> bytes:
    lines = [json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows]
    body = b"".join(lines)
    head = (
        json.dumps({"version": 1, "crc32": zlib.crc32(body), what: len(lines)}).encode()
        + b"\n"
    )
    return head + body


def _unpack_rows(what: str, content: bytes) -> list[dict[str, Any]] | None:
    head, _, body = content.partition(b"\n")
    try:
        facts = json.loads(head)
        rows = [json.loads(line) for line in body.splitlines()]
        sound = (
            facts["version"] == 1
            and facts["crc32"] == zlib.crc32(body)
            and facts[what] == len(rows)
        )
        if sound:
            return rows
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def unpack_producer_ids(content: bytes) -> int | None:
    """Return the end of the allocated producer ids, None if the content is invalid."""
    found = re.fullmatch(rb"(\d{1,18}) ([0-9a-f]{8})\n", content)
    if found and int(found[2], 16) == zlib.crc32(found[1]):
        return int(found[1])
    return None


def pack_producer_ids(end: int) -> bytes:
    """Return the content of logcore.producer-ids: the number and its CRC-32.

    A wrong number would allocate ids twice.
    """
    return b"%d %08x\n" % (end, zlib.crc32(b"%d" % end))


def pack_checked(facts: Mapping[str, Any], *, copies: int = 1) -> bytes:
    """Return a line with the CRC-32 of a JSON object, then the object.

    Two `copies` are for content that must survive a damaged byte.
    """
    text = json.dumps(facts, separators=(",", ":")).encode()
    return (b"%08x %s\n" % (zlib.crc32(text), text)) * copies


def unpack_checked(content: bytes) -> dict[str, Any] | None:
    """Return the object of the first line with a correct CRC, None if there is none."""
    for line in content.splitlines():
        crc, _, text = line.partition(b" ")
        try:
            if len(crc) == 8 and int(crc, 16) == zlib.crc32(text):
                facts = json.loads(text)
                if isinstance(facts, dict):
                    return facts
                return None
        except (ValueError, RecursionError):
            continue
    return None


class StoredWatermark(NamedTuple):
    """The offset up to which readers in other processes may read."""

    #: -1 if the file is damaged.
    offset: int
    #: True for a high watermark moved by replication, which may be anywhere in the log.
    #: False for the durable end, which is in the last segment.
    is_replicated: bool = False


def pack_visible_end(offset: int, *, is_replicated: bool = False) -> bytes:
    """Return the content of logcore.durable, with its own CRC.

    For a replicated log it contains the complement of the offset.
    """
    number = offset
    if is_replicated:
        number = ~offset
    content = number.to_bytes(8, "big", signed=True)
    return _DURABLE.pack(content, zlib.crc32(content))


def read_visible_end(fs: FS, directory: str) -> StoredWatermark | None:
    """Return the content of logcore.durable; None if the file does not exist."""
    # The file is rewritten in place, so a read may see part of a write.
    for _ in range(3):
        content = read(fs, directory, DURABLE_END)
        if content is None:
            return None
        shown = unpack_visible_end(content)
        if shown is not None:
            return shown
    return StoredWatermark(-1)


def unpack_visible_end(content: bytes) -> StoredWatermark | None:
    """Return the end from the content of logcore.durable, None if the CRC does not
    match.
    """
    if len(content) < _DURABLE.size:
        return None
    packed, crc = _DURABLE.unpack_from(content)
    if crc != zlib.crc32(packed):
        return None
    offset = int.from_bytes(packed, "big", signed=True)
    if offset < 0:
        return StoredWatermark(~offset, is_replicated=True)
    return StoredWatermark(offset)
