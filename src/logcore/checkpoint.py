"""The small text files of a log directory: offset checkpoints, leader epochs, our own notes.

Rules (storage format section 6; docs/crashes.md, section 3):
- One way to write: `<name>.tmp`, sync, rename, sync of the directory. A reader sees the old content or the new.
- A reserve beside them lets a full disk be emptied: it becomes the `.tmp`.
- A file that cannot be understood counts as absent: the caller gets None or an empty result. Only a failing disk
  raises. All files are caches but the topics and the given producer ids, whose caller refuses to guess.

This module knows no segment and makes no decision from what it reads.
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
from typing import Any, Final, NamedTuple

import attrs

from logcore.config import INT32_MAX, INT64_MAX, Durability
from logcore.errors import DiskFullError, InvalidConfigError, LogcoreError, LogNotFoundError, StorageWriteError
from logcore.fs import FS, opened

#: (topic, partition)
Key = tuple[str, int]

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
TURN: Final = "logcore.turn"
#: Exists while this library alone has written a partition since its seals were checked. Kafka compacts a partition
#: without updating its seals, but first it loads the partition, and then it removes all files that end in .deleted.
SEALS_HOLD: Final = "logcore.seals-hold.deleted"
RESERVE: Final = "logcore.reserve"
_RESERVE_BYTES: Final = 16 << 10  # a checkpoint of some hundred partitions; more where one is larger already
_RESERVE_MARK: Final = b"logcore reserve\n"

#: The files that tell a log directory, and the directory of a partition, from any other.
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
#: Those of them that grow with the number of partitions.
_GROWING_FILES: Final = (RECOVERY_POINT, LOG_START, HIGH_WATERMARK, CLEANER, TOPICS)
PARTITION_FILES: Final = (LEADER_EPOCH, PARTITION_METADATA, POLICY, DURABLE_END)

_MAX_SIZE: Final = 64 << 20  # a checkpoint of a million partitions; anything larger is not one of ours
_DURABLE: Final = struct.Struct(">8sI")


def ensure_directory(fs: FS, path: str) -> None:
    """Makes a directory unless it exists, and makes sure that its name survives a power cut. Raises StorageWriteError.

    An empty directory is treated as new: the process that created it may have been killed before it synced the name, or
    that sync may have failed. A process that creates a directory puts nothing into it before the name is durable.
    """
    if not fs.is_directory(path) or not fs.listdir(path):
        make_directories(fs, path)


def make_directories(fs: FS, path: str) -> None:
    """Like mkdir -p, and makes each new name durable in its parent."""
    parent = os.path.dirname(path)
    if parent == path:  # a root exists
        return
    if parent:
        ensure_directory(fs, parent)
    is_new = True
    try:
        fs.mkdir(path)
    except FileExistsError:
        if not fs.is_directory(path):
            raise StorageWriteError("the directory cannot be made: there is a file of that name", path=path) from None
        is_new = False
    except FileNotFoundError as error:
        raise StorageWriteError("the directory cannot be made: not here", path=path) from error
    except StorageWriteError as error:
        error.reason = f"the directory cannot be made: {error.reason}"
        raise
    try:
        fs.sync_dir(parent or ".")
    except StorageWriteError as error:
        # The parent of a directory that an administrator made for us may be closed to us. We cannot have made it.
        if is_new or not isinstance(error.__cause__, PermissionError):
            raise


@contextlib.contextmanager
def expecting_directory(fs: FS, directory: str) -> Generator[None, None, None]:
    """Turns the FileNotFoundError of a directory that was removed while it was open into LogNotFoundError."""
    try:
        yield
    except FileNotFoundError as error:
        if fs.is_directory(directory):
            raise
        raise LogNotFoundError("the directory was removed while it was open", path=directory) from error


def write(
    fs: FS, directory: str, name: str, content: bytes, *, reserve: str | None = None, temporary: str | None = None
) -> None:
    """Replaces a file so that a crash leaves either the old content or the new, durable when this returns.

    reserve: a log directory whose reserve may be used when the disk is full; for a write that precedes a deletion, or
    that closes a directory. temporary: the path that gets the new content first, where several writers may replace the
    file at once; each has its own.
    """
    path = os.path.join(directory, name)
    if temporary is None:
        temporary = path + ".tmp"
    try:
        with expecting_directory(fs, directory), opened(fs, temporary, write=True, create=True) as handle:
            fs.truncate(handle, 0)
            fs.pwrite(handle, content, 0)
            fs.fsync(handle)
    except DiskFullError:
        with contextlib.suppress(FileNotFoundError):  # the part that was written takes room
            fs.unlink(temporary)
        if reserve is None or not _write_to_reserve(fs, reserve, temporary, content):
            raise
    else:
        reserve = None
    fs.rename(temporary, path)
    fs.sync_dir(directory)
    if reserve is not None:  # it was used: make another one. The file that was replaced has left room for it
        if reserve != directory:  # the reserve was renamed from one directory into another; this one has lost a name
            fs.sync_dir(reserve)
        keep_reserve(fs, reserve)


def keep_reserve(fs: FS, directory: str) -> None:
    """Holds room on the disk for the small files that go before a deletion, so that a full disk can be emptied."""
    path = os.path.join(directory, RESERVE)
    with contextlib.suppress(LogcoreError, OSError):  # a missing reserve is no reason to fail
        largest = max(_size_or_zero(fs, os.path.join(directory, name)) for name in _GROWING_FILES)
        size_bytes = _RESERVE_BYTES + largest // _RESERVE_BYTES * _RESERVE_BYTES
        if _size_or_zero(fs, path) >= size_bytes:
            return
        # Make a new file instead of extending the old one, which may be a checkpoint too: see _write_to_reserve().
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)
        with opened(fs, path, write=True, create=True, exclusive=True) as handle:
            # Random bytes: a file system that compresses would keep no room for zeros.
            fs.pwrite(handle, _RESERVE_MARK + fs.random_bytes(size_bytes - len(_RESERVE_MARK)), 0)
            fs.fsync(handle)


def _size_or_zero(fs: FS, path: str) -> int:
    try:
        return fs.file_size(path)
    except FileNotFoundError:
        return 0


def _write_to_reserve(fs: FS, directory: str, temporary: str, content: bytes) -> bool:
    """Makes the reserve the temporary file, whose room on the disk is already taken. False if there is no reserve.

    The rename comes first, so that two threads never write to one file. After a crash the name of the reserve may exist
    beside that of a checkpoint, for the same file, so the file is written to only if it begins as a reserve does.
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
    """Content of a small file, None when there is none."""
    try:
        with opened(fs, os.path.join(directory, name)) as handle:
            return fs.pread(handle, min(fs.size(handle), _MAX_SIZE), 0)
    except FileNotFoundError:
        return None


def _numbered_lines(content: bytes | None, fields: int) -> list[list[str]]:
    """Lines of a version 0 checkpoint, [] when any of it is not as it should be."""
    try:
        lines = (content or b"").decode().split("\n")
        if len(lines) < 2 or int(lines[0]) != 0:
            return []
        rows = [line.split() for line in lines[2:] if line]  # behind the version and the number of rows
        if len(rows) != int(lines[1]) or any(len(row) != fields for row in rows):
            return []
        return rows
    except ValueError:
        return []


def _checkpoint(rows: Iterable[str]) -> bytes:
    lines = list(rows)
    return "\n".join(["0", str(len(lines)), *lines, ""]).encode()


def read_offsets(fs: FS, directory: str, name: str) -> dict[Key, int]:
    """An offset checkpoint: (topic, partition) -> offset. Empty when absent or damaged, as in Kafka."""
    offsets = {}
    try:
        for topic, partition, offset in _numbered_lines(read(fs, directory, name), 3):
            offsets[topic, int(partition)] = int(offset)
    except ValueError:
        return {}
    return offsets


class OffsetCheckpoints:
    """The offset checkpoints of a directory: where no other process writes it, parsed once and written from memory.

    All methods may be called from several threads.
    """

    def __init__(
        self, fs: FS, directory: str, *, changing: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    ) -> None:
        """changing(): keeps other processes that write to the directory away; None if there are none."""
        self._fs = fs
        self._directory = directory
        self._changing = changing
        self._lock = threading.Lock()
        self._files: dict[str, dict[Key, int]] = {}  # as on disk, by name; replaced whole, under _lock

    def get(self, name: str, key: Key) -> int | None:
        """The offset of a partition in a checkpoint."""
        return self.all(name).get(key)

    def all(self, name: str) -> Mapping[Key, int]:
        """All offsets of a checkpoint; not to be changed. Raises StorageReadError."""
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
        """Sets offsets of a checkpoint, or removes those that are None, and keeps the others.

        holds: asked just before the write, with no other write between, whether a change is still true.
        may_use_reserve: for a write that makes room on a full disk, or closes. Raises what write() raises.
        """
        keeps_others_away: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._changing is not None:
            keeps_others_away = self._changing()
        with keeps_others_away, self._lock:
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
            rows = (f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items()))
            # Forget what is known before the write: if it fails, the disk may have the old content or the new.
            self._files.pop(name, None)
            reserve = None
            if may_use_reserve:
                reserve = self._directory
            write(self._fs, self._directory, name, _checkpoint(rows), reserve=reserve)
            self._files[name] = offsets

    def _read_locked(self, name: str) -> dict[Key, int]:
        known = self._files.get(name)
        if known is None or self._changing is not None:  # another process may have replaced the file
            known = self._files[name] = read_offsets(self._fs, self._directory, name)
        return known


def read_epochs(fs: FS, directory: str) -> list[tuple[int, int]]:
    """Leader epochs as (leader_epoch, start_offset), rising in both. Empty when absent or damaged."""
    try:
        epochs = [(int(epoch), int(start)) for epoch, start in _numbered_lines(read(fs, directory, LEADER_EPOCH), 2)]
    except ValueError:
        return []
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(epochs))
    fits = all(0 <= epoch <= INT32_MAX and 0 <= start <= INT64_MAX for epoch, start in epochs)
    if rising and fits:
        return epochs
    return []


def write_epochs(fs: FS, directory: str, epochs: Iterable[tuple[int, int]], *, reserve: str | None = None) -> None:
    content = _checkpoint(f"{epoch} {start}" for epoch, start in epochs)
    write(fs, directory, LEADER_EPOCH, content, reserve=reserve)


@attrs.frozen
class Notes:
    """Content of logcore.policy: what the next opening is to know of a partition.

    policy: how the last writer promised durability, None when unknown, as in directories that Kafka wrote. dense_from:
    from this offset on the log has no gap, because logcore made it and compacted nothing above; INT64_MAX where no
    note says so. producers: whether there may be batches of idempotent producers, or markers. replicated: whether the
    last writer left the high watermark to replication.
    """

    policy: Durability | None = None
    dense_from: int = INT64_MAX
    producers: bool = True
    replicated: bool = False


def read_notes(fs: FS, directory: str) -> Notes:
    try:
        facts = json.loads(read(fs, directory, POLICY) or b"")
        policy = attrs.evolve(Durability.parse(facts["durability"]), max_bytes=int(facts["max_bytes"]))
        dense_from = facts.get("dense_from")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, InvalidConfigError):
        return Notes()
    if type(dense_from) is not int or not 0 <= dense_from <= INT64_MAX:
        dense_from = INT64_MAX
    return Notes(policy, dense_from, facts.get("producers") is not False, facts.get("replicated") is True)


def write_notes(fs: FS, directory: str, notes: Notes, *, reserve: str | None = None) -> None:
    assert notes.policy is not None, "a writer has one"
    facts: dict[str, object] = {
        "durability": str(notes.policy),
        "max_bytes": notes.policy.max_bytes,
        "producers": notes.producers,
    }
    if notes.dense_from < INT64_MAX:
        facts["dense_from"] = notes.dense_from
    if notes.replicated:
        facts["replicated"] = True
    write(fs, directory, POLICY, json.dumps(facts).encode() + b"\n", reserve=reserve)


def properties(content: bytes) -> dict[str, str]:
    """The values in meta.properties, by name."""
    return {name: value or "" for name, value in property_lines(content)}


def property_lines(content: bytes) -> Iterator[tuple[str, str | None]]:
    """Each (name, value) of meta.properties; None where a line has no '='."""
    for line in content.decode("utf-8", "replace").splitlines():
        line = line.strip()
        if line and not line.startswith(("#", "!")):
            name, sign, value = line.partition("=")
            found = None
            if sign:
                found = value.strip()
            yield name.strip(), found


def topic_id(content: bytes) -> str:
    """The id that partition.metadata has for its topic, 22 characters of base64url; "" when it has none."""
    found = re.search(rb"^topic_id: *([A-Za-z0-9_-]{22})$", content, re.MULTILINE)
    if found:
        return found[1].decode()
    return ""


def pack_topics(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Content of logcore.topics: a first line with the CRC-32 of the rest, then a JSON object for each topic."""
    return _pack_rows("topics", rows)


def unpack_topics(content: bytes) -> list[dict[str, Any]] | None:
    """The rows of logcore.topics, None when its CRC does not match."""
    return _unpack_rows("topics", content)


def pack_groups(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Content of logcore.groups, which is built like that of topics."""
    return _pack_rows("groups", rows)


def unpack_groups(content: bytes) -> list[dict[str, Any]] | None:
    """The rows of logcore.groups, None when its CRC does not match."""
    return _unpack_rows("groups", content)


def _pack_rows(what: str, rows: Iterable[Mapping[str, Any]]) -> bytes:
    lines = [json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows]
    body = b"".join(lines)
    head = json.dumps({"version": 1, "crc32": zlib.crc32(body), what: len(lines)}).encode() + b"\n"
    return head + body


def _unpack_rows(what: str, content: bytes) -> list[dict[str, Any]] | None:
    head, _, body = content.partition(b"\n")
    try:
        facts = json.loads(head)
        rows = [json.loads(line) for line in body.splitlines()]
        sound = facts["version"] == 1 and facts["crc32"] == zlib.crc32(body) and facts[what] == len(rows)
        if sound:
            return rows
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def unpack_producer_ids(content: bytes) -> int | None:
    """The end of the producer ids that logcore.producer-ids says were given out, None when it is no number."""
    found = re.fullmatch(rb"(\d{1,18}) ([0-9a-f]{8})\n", content)
    if found and int(found[2], 16) == zlib.crc32(found[1]):
        return int(found[1])
    return None


def pack_producer_ids(end: int) -> bytes:
    """Content of logcore.producer-ids: the number and its CRC-32, because a wrong one would give ids out twice."""
    return b"%d %08x\n" % (end, zlib.crc32(b"%d" % end))


def pack_checked(facts: Mapping[str, Any], *, copies: int = 1) -> bytes:
    """A JSON object on a line behind the CRC-32 of its text. copies: 2 for content that must survive a damaged byte."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    return (b"%08x %s\n" % (zlib.crc32(text), text)) * copies


def unpack_checked(content: bytes) -> dict[str, Any] | None:
    """The object of the first line whose CRC is right, None when there is no such line."""
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


class ShownEnd(NamedTuple):
    """Up to where readers in other processes may read.

    offset: -1 where the file is damaged. is_replicated: whether it is a high watermark that replication moves, which
    may be anywhere in the log; else it is the durable end, which is in the last segment.
    """

    offset: int
    is_replicated: bool = False


def pack_shown_end(offset: int, *, is_replicated: bool = False) -> bytes:
    """Content of logcore.durable, with its own CRC; the complement of the offset for a replicated log."""
    number = offset
    if is_replicated:
        number = ~offset
    content = number.to_bytes(8, "big", signed=True)
    return _DURABLE.pack(content, zlib.crc32(content))


def read_shown_end(fs: FS, directory: str) -> ShownEnd | None:
    """The content of logcore.durable; None if the file does not exist."""
    for _ in range(3):  # the file is rewritten in place, so a read may see half of a write
        content = read(fs, directory, DURABLE_END)
        if content is None:
            return None
        shown = unpack_shown_end(content)
        if shown is not None:
            return shown
    return ShownEnd(-1)


def unpack_shown_end(content: bytes) -> ShownEnd | None:
    """The content of logcore.durable from its bytes, None when the CRC does not match."""
    if len(content) < _DURABLE.size:
        return None
    packed, crc = _DURABLE.unpack_from(content)
    if crc != zlib.crc32(packed):
        return None
    offset = int.from_bytes(packed, "big", signed=True)
    if offset < 0:
        return ShownEnd(~offset, is_replicated=True)
    return ShownEnd(offset)
