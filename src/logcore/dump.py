"""Files of a log, looked at one by one without opening the log: dump() shows what is in them, verify() judges them.

What dump() yields are plain dicts that json.dumps takes. Each has "type"; sizes and positions are bytes, times are
milliseconds. Bytes are shown by one scheme (shown() and unshown() are inverse to each other):
    null -> None      printable UTF-8 (tab, CR and LF allowed) -> the text      all else -> {"hex": "00ff"}

What verify() means by its three verdicts:
- damaged: bytes that were written and acknowledged may be lost or wrong, or Kafka would refuse the file.
- warning: opening the log mends it by itself: a torn tail, an index that misleads (an index is only ever a cache).
- ok: as it should be.

Rules:
- Nothing is written, locked or repaired; a running writer is not disturbed, and its last batch may look torn.
- Foreign bytes never cause anything but a dict, a verdict or a LogcoreError.
- Memory is bounded by one batch and one index, not by the length of a log.

verify() checks each batch's head, CRC and place in the log, not the records inside: dump(records=True) decodes those.
This module repairs nothing; recovery.py does, and verify() asks its decision table what it would do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, Protocol, cast

import attrs
import numpy as np
import numpy.typing as npt

from logcore import checkpoint, recovery
from logcore.compression import Codec
from logcore.config import INT64_MAX, Durability
from logcore.errors import (
    CorruptLogError,
    InvalidNameError,
    LogcoreError,
    LogNotFoundError,
    StorageReadError,
)
from logcore.fs import FS, OS
from logcore.index import OFFSET_ENTRY, TIME_ENTRY
from logcore.kernels import Record, layout
from logcore.log import Log, open_log, parse_partition_name
from logcore.recordbatch import RecordBatch
from logcore.recovery import Action, TailFacts, decide
from logcore.segment import LOG, ActiveSegment, GrowingSegment, Segment, base_offset_of, file_name

#: Storage format section 4.3, big-endian. Entries of .txnindex, one for each aborted transaction.
TXN_ENTRY: Final = np.dtype(
    [
        ("version", ">i2"),
        ("producer_id", ">i8"),
        ("first_offset", ">i8"),
        ("last_offset", ">i8"),
        ("last_stable_offset", ">i8"),
    ]
)
#: Storage format section 5.5: head and entries of .snapshot, the producers up to the offset in its name.
SNAPSHOT_HEAD: Final = np.dtype([("version", ">i2"), ("crc", ">u4"), ("count", ">i4")])
SNAPSHOT_ENTRY: Final = np.dtype(
    [
        ("producer_id", ">i8"),
        ("producer_epoch", ">i2"),
        ("last_sequence", ">i4"),
        ("last_offset", ">i8"),
        ("offset_delta", ">i4"),
        ("timestamp", ">i8"),
        ("coordinator_epoch", ">i4"),
        ("current_txn_first_offset", ">i8"),
    ]
)
_SNAPSHOT_CRC_START: Final = 6
assert TXN_ENTRY.itemsize == 34 and SNAPSHOT_HEAD.itemsize == 10 and SNAPSHOT_ENTRY.itemsize == 46

#: Files of a segment or of a point in the log: base offset, then one of these.
SEGMENT_SUFFIXES: Final = (LOG, ".index", ".timeindex", ".txnindex", ".snapshot")
#: What Kafka puts behind the name of a file that is going or coming (section 3.1).
LIFE_SUFFIXES: Final = (".deleted", ".cleaned", ".swap")
OFFSET_CHECKPOINTS: Final = (
    checkpoint.RECOVERY_POINT,
    checkpoint.LOG_START,
    "replication-offset-checkpoint",
    "cleaner-offset-checkpoint",
)
#: Files with names of their own: of a log directory, then of a partition.
DIRECTORY_FILES: Final = (*OFFSET_CHECKPOINTS, "meta.properties", checkpoint.CLEAN_SHUTDOWN)
PARTITION_FILES: Final = (checkpoint.LEADER_EPOCH, "partition.metadata", checkpoint.POLICY, checkpoint.DURABLE_END)

#: A whole file is read up to this size, a .log file never whole: a million index entries are 8 MB.
_MAX_SIZE: Final = 256 << 20

Status = Literal["ok", "warning", "damaged"]
Row = dict[str, Any]


@attrs.frozen(kw_only=True)
class Verdict:
    """What verify() says of one file.

    kind: as kind_of() gives it, or "other". detail: what was found, empty where there is nothing to say. position,
    offset: where in the file and in the log the first damage is. batches, records: how many were whole. size_bytes: of
    the file.
    """

    path: str
    kind: str
    status: Status
    detail: str = ""
    position: int | None = None
    offset: int | None = None
    batches: int = 0
    records: int = 0
    size_bytes: int = 0

    def as_dict(self) -> Row:
        return attrs.asdict(self)


@attrs.frozen(kw_only=True)
class PartitionFacts:
    """A partition at a glance. Timestamps are -1 where there are none; codecs counts the active segment's batches."""

    path: str
    topic: str
    partition: int
    segments: int
    size_bytes: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    codecs: dict[str, int]

    def as_dict(self) -> Row:
        return attrs.asdict(self)


# -- names -----------------------------------------------------------------------------------------------------------


def kind_of(name: str) -> str | None:
    """What a file name says the file holds: "log", "index", "timeindex", "txnindex", "snapshot", or one of the names in
    DIRECTORY_FILES and PARTITION_FILES; None for any other file."""
    if name in DIRECTORY_FILES or name in PARTITION_FILES:
        return name
    return next((suffix[1:] for suffix in SEGMENT_SUFFIXES if _base_in(_living(name), suffix) is not None), None)


def _base_in(name: str, suffix: str = LOG) -> int | None:
    """The base offset in a name; None also for 20 digits that are no offset."""
    base = base_offset_of(name, suffix)
    return base if base is not None and base <= INT64_MAX else None


def _living(name: str) -> str:
    for suffix in LIFE_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def partitions(path: str | os.PathLike[str], *, fs: FS = OS) -> list[str]:
    """The partition directories at a path: itself, or those in it. Raises LogNotFoundError when there is none."""
    directory = os.fspath(path)
    if not fs.is_directory(directory):
        raise LogNotFoundError("there is no such directory", path=directory)
    names = fs.listdir(directory)
    if _is_partition(fs, directory, names):
        return [directory]
    paths = [os.path.join(directory, name) for name in names if _partition_of(name) is not None]
    found = sorted((path for path in paths if fs.is_directory(path)), key=_by_partition)
    if not found and not any(name in DIRECTORY_FILES for name in names):
        raise LogNotFoundError(
            "this is neither a partition directory (like orders-0, with .log files) nor a directory that holds some",
            path=directory,
        )
    return found


def _is_partition(fs: FS, directory: str, names: list[str]) -> bool:
    if any(kind_of(name) == "log" or name in PARTITION_FILES for name in names):
        return True
    return not names and _partition_of(os.path.basename(fs.real_path(directory))) is not None


def _partition_of(name: str) -> tuple[str, int] | None:
    try:
        return parse_partition_name(name)
    except InvalidNameError:
        return None


def _by_partition(path: str) -> tuple[str, int]:
    return _partition_of(os.path.basename(path)) or ("", 0)


# -- values ----------------------------------------------------------------------------------------------------------


def shown(data: bytes | memoryview | None) -> str | dict[str, str] | None:
    """Bytes as JSON can say them, see the top of this file."""
    if data is None:
        return None
    raw = bytes(data)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return {"hex": raw.hex()}
    return text if text.isprintable() or text.translate(_WHITESPACE).isprintable() else {"hex": raw.hex()}


_WHITESPACE: Final = {ord(sign): None for sign in "\t\r\n"}


def unshown(value: object) -> bytes | None:
    """The bytes that shown() showed; raises ValueError for anything it does not make."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and len(value) == 1 and isinstance(value.get("hex"), str):
        return bytes.fromhex(value["hex"])
    raise ValueError('expected text, null or {"hex": "..."}')


def shown_record(record: Record) -> Row:
    """A record as dict: offset, timestamp_ms, key, value, headers as [{"key": ..., "value": ...}]."""
    offset, timestamp_ms, key, value, headers = record
    return {
        "offset": offset,
        "timestamp_ms": timestamp_ms,
        "key": shown(key),
        "value": shown(value),
        "headers": [{"key": shown(_header_name(name)), "value": shown(content)} for name, content in headers],
    }


def _header_name(name: str) -> bytes:
    return name.encode("utf-8", layout.HEADER_NAME_ERRORS)


# -- dump ------------------------------------------------------------------------------------------------------------


def dump(path: str | os.PathLike[str], *, records: bool = False, fs: FS = OS) -> Iterator[Row]:
    """What one file holds, in order. records: of a .log file also the records of each batch, behind it.

    Damage in a .log file is a row too ("damage", or "crc_ok": false) and the walk goes on where the heads let it; what
    makes any other file unreadable raises CorruptLogError. Also raises LogNotFoundError, InvalidNameError for a name
    that no file of a log has, and StorageReadError.
    """
    where = os.fspath(path)
    kind = kind_of(os.path.basename(where))
    if kind is None:
        known = ", ".join(DIRECTORY_FILES + PARTITION_FILES)
        raise InvalidNameError(
            "not a file of a log",
            path=where,
            expected=f"20 digits and {' or '.join(SEGMENT_SUFFIXES)}, or {known}",
            found=repr(os.path.basename(where)),
        )
    if not fs.exists(where):
        raise LogNotFoundError("there is no such file", path=where)
    return _dump_log(fs, where, records) if kind == "log" else _DUMPERS[kind](fs, where)


class _LogFile(GrowingSegment):
    """A .log file by its path: read with pread, because it may be growing, and under any of its names."""

    def __init__(self, fs: FS, path: str) -> None:
        self._file = path
        base_offset = base_offset_of(_living(os.path.basename(path)))
        assert base_offset is not None, "kind_of was asked first"
        super().__init__(fs, os.path.dirname(path), base_offset)

    def file(self, suffix: str) -> str:
        return self._file if suffix == LOG else super().file(suffix)


def _dump_log(fs: FS, path: str, records: bool) -> Iterator[Row]:
    segment = _LogFile(fs, path)
    position = 0
    while position < segment.size_bytes:
        try:
            batch = segment.batch(position)
        except StorageReadError:
            raise
        except LogcoreError as error:
            yield _damage(position, segment.size_bytes, error.reason)
            return
        if batch is None:
            yield _damage(position, segment.size_bytes, layout.WALK_REASONS[layout.WALK_SHORT])
            return
        yield from _batch_rows(batch, records)
        position += batch.size_bytes


def _damage(position: int, end: int, reason: str) -> Row:
    return {"type": "damage", "position": position, "size_bytes": end - position, "reason": reason}


def _batch_rows(batch: RecordBatch, records: bool) -> Iterator[Row]:
    row: Row = {
        "type": "batch",
        "position": batch.position,
        "size_bytes": batch.size_bytes,
        "base_offset": batch.base_offset,
        "last_offset": batch.last_offset,
        "record_count": batch.record_count,
        "magic": batch.magic,
        "codec": batch.codec_name,
        "timestamp_type": "LogAppendTime" if batch.is_append_time else "CreateTime",
        "base_timestamp_ms": batch.base_timestamp,
        "max_timestamp_ms": batch.max_timestamp,
        "delete_horizon_ms": batch.delete_horizon_ms,
        "producer_id": batch.producer_id,
        "producer_epoch": batch.producer_epoch,
        "base_sequence": batch.base_sequence,
        "last_sequence": batch.last_sequence,
        "partition_leader_epoch": batch.partition_leader_epoch,
        "is_transactional": batch.is_transactional,
        "is_control": batch.is_control,
        "crc": f"{batch.crc:#010x}",
        "crc_ok": True,
    }
    found: list[Record] = []
    try:
        batch.verify()
    except LogcoreError as error:
        row["crc_ok"] = False
        row["error"] = error.reason
    else:
        try:
            if batch.is_control:
                row["control_type"] = batch.control_type()
            if records:
                found = batch.records()
        except LogcoreError as error:
            row["error"] = error.reason
    yield row
    for record in found:
        one = {"type": "record", **shown_record(record)}
        if batch.is_control:
            one["control_type"] = row["control_type"]
            if row["control_type"] in ("ABORT", "COMMIT") and len(record.value or b"") >= 6:
                one["coordinator_epoch"] = int.from_bytes((record.value or b"")[2:6], "big", signed=True)
        yield one


def _content(fs: FS, path: str) -> bytes:
    try:
        handle = fs.open(path)
    except FileNotFoundError:
        raise LogNotFoundError("there is no such file", path=path) from None
    try:
        size = fs.size(handle)
        if size > _MAX_SIZE:
            raise CorruptLogError("far too large", path=path, expected=f"at most {_MAX_SIZE} bytes", found=size)
        return fs.pread(handle, size, 0)
    finally:
        fs.close(handle)


@attrs.frozen
class _Table:
    """Entries of an index file, and what stands behind them: zeros of a file not trimmed yet, and a cut entry."""

    entries: npt.NDArray[Any]
    padding_bytes: int
    fragment_bytes: int

    @classmethod
    def read(cls, fs: FS, path: str, kind: np.dtype[Any]) -> _Table:
        data = _content(fs, path)
        fragment = len(data) % kind.itemsize
        whole = len(data) - fragment
        used = -(-len(data[:whole].rstrip(b"\0")) // kind.itemsize) * kind.itemsize
        return cls(np.frombuffer(data, kind, used // kind.itemsize), whole - used, fragment)

    def rest(self) -> Iterator[Row]:
        if self.padding_bytes:
            yield {"type": "padding", "size_bytes": self.padding_bytes}
        if self.fragment_bytes:
            yield {"type": "fragment", "size_bytes": self.fragment_bytes}


def _base_of(path: str) -> int:
    name = _living(os.path.basename(path))
    return int(name[:20])


def _dump_index(fs: FS, path: str) -> Iterator[Row]:
    table, base = _Table.read(fs, path, OFFSET_ENTRY), _base_of(path)
    for relative, position in table.entries.tolist():
        yield {"type": "index_entry", "offset": base + relative, "position": position}
    yield from table.rest()


def _dump_timeindex(fs: FS, path: str) -> Iterator[Row]:
    table, base = _Table.read(fs, path, TIME_ENTRY), _base_of(path)
    for timestamp, relative in table.entries.tolist():
        yield {"type": "timeindex_entry", "timestamp_ms": timestamp, "offset": base + relative}
    yield from table.rest()


def _dump_txnindex(fs: FS, path: str) -> Iterator[Row]:
    table = _Table.read(fs, path, TXN_ENTRY)
    for version, producer_id, first, last, stable in table.entries.tolist():
        yield {
            "type": "txnindex_entry",
            "version": version,
            "producer_id": producer_id,
            "first_offset": first,
            "last_offset": last,
            "last_stable_offset": stable,
        }
    yield from table.rest()


def _snapshot(fs: FS, path: str) -> npt.NDArray[Any]:
    """The entries of a .snapshot file; raises CorruptLogError as Kafka would reject it."""
    data = _content(fs, path)
    if len(data) < SNAPSHOT_HEAD.itemsize:
        raise CorruptLogError(
            "a snapshot cut short", path=path, expected="at least 10 bytes", found=f"{len(data)} bytes"
        )
    version, crc, count = np.frombuffer(data, SNAPSHOT_HEAD, 1)[0].tolist()
    if version != 1:
        raise CorruptLogError("unknown version of a snapshot", path=path, position=0, expected=1, found=version)
    from crc32c import crc32c

    found = crc32c(memoryview(data)[_SNAPSHOT_CRC_START:])
    if found != crc:
        raise CorruptLogError(
            "CRC-32C of the snapshot does not match",
            path=path,
            position=2,
            expected=f"{crc:#010x}",
            found=f"{found:#010x}",
        )
    if count * SNAPSHOT_ENTRY.itemsize != len(data) - SNAPSHOT_HEAD.itemsize:
        raise CorruptLogError(
            "entry count of the snapshot does not fit its size", path=path, position=6, expected=count, found=len(data)
        )
    return np.frombuffer(data, SNAPSHOT_ENTRY, count, SNAPSHOT_HEAD.itemsize)


def _dump_snapshot(fs: FS, path: str) -> Iterator[Row]:
    names = SNAPSHOT_ENTRY.names
    assert names is not None
    for entry in _snapshot(fs, path).tolist():
        row = {"type": "producer", **dict(zip(names, entry, strict=True))}
        row["timestamp_ms"] = row.pop("timestamp")
        yield row


def _is_empty_checkpoint(content: bytes) -> bool:
    return not content or content.split() == [b"0", b"0"]


def _dump_offsets(fs: FS, path: str) -> Iterator[Row]:
    content = _content(fs, path)
    offsets = checkpoint.read_offsets(fs, os.path.dirname(path), os.path.basename(path))
    if not offsets and not _is_empty_checkpoint(content):
        raise CorruptLogError("not an offset checkpoint; Kafka counts it as absent", path=path, expected=_CHECKPOINT)
    for (topic, partition), offset in offsets.items():
        yield {"type": "checkpoint_entry", "topic": topic, "partition": partition, "offset": offset}


_CHECKPOINT: Final = "lines '0', the count, then that many 'topic partition offset'"


def _dump_epochs(fs: FS, path: str) -> Iterator[Row]:
    content = _content(fs, path)
    epochs = checkpoint.read_epochs(fs, os.path.dirname(path))
    if not epochs and not _is_empty_checkpoint(content):
        raise CorruptLogError(
            "not a leader epoch checkpoint",
            path=path,
            expected="lines '0', the count, then that many 'epoch start_offset', rising",
        )
    for leader_epoch, start_offset in epochs:
        yield {"type": "leader_epoch", "leader_epoch": leader_epoch, "start_offset": start_offset}


def _dump_metadata(fs: FS, path: str) -> Iterator[Row]:
    fields: dict[str, str] = {}
    for line in _content(fs, path).decode("utf-8", "replace").splitlines():
        pair = line.split()
        if len(pair) != 2 or not pair[0].endswith(":"):
            raise CorruptLogError("a line that is not 'name: value'", path=path, found=repr(line[:80]))
        fields[pair[0][:-1]] = pair[1]
    version = fields.get("version", "")
    if not (version.isascii() and version.isdigit()) or len(fields.get("topic_id", "")) != 22:
        raise CorruptLogError(
            "not partition metadata",
            path=path,
            expected="version: 0 and a topic_id of 22 characters",
            found=str(fields)[:80],
        )
    yield {"type": "partition_metadata", "version": int(version[:9]), "topic_id": fields["topic_id"]}


def _dump_properties(fs: FS, path: str) -> Iterator[Row]:
    fields = {}
    for line in _content(fs, path).decode("utf-8", "replace").splitlines():
        line = line.strip()
        if line and line[0] not in "#!":
            name, sign, value = line.partition("=")
            if not sign:
                raise CorruptLogError("a line that is not 'name=value'", path=path, found=repr(line[:80]))
            fields[name.strip()] = value.strip()
    if fields.get("version", "0") not in ("0", "1"):
        raise CorruptLogError("unknown version", path=path, expected="0 or 1", found=repr(fields["version"][:80]))
    yield {"type": "meta_properties", "properties": fields}


def _json_object(fs: FS, path: str) -> Row:
    try:
        facts = json.loads(_content(fs, path))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise CorruptLogError("not a JSON object", path=path)
    return facts


def _dump_clean_shutdown(fs: FS, path: str) -> Iterator[Row]:
    # That it exists is what counts; older versions of Kafka wrote it empty, and content that cannot be read is no harm.
    try:
        facts = _json_object(fs, path)
    except CorruptLogError:
        facts = {}
    yield {"type": "clean_shutdown", "broker_epoch": facts.get("brokerEpoch")}


def _dump_policy(fs: FS, path: str) -> Iterator[Row]:
    facts = _json_object(fs, path)
    try:
        Durability.parse(facts.get("durability"))  # type: ignore[arg-type]
    except LogcoreError:
        raise CorruptLogError("not a durability policy", path=path, found=repr(facts.get("durability"))[:80]) from None
    yield {"type": "policy", "durability": facts["durability"], "max_bytes": facts.get("max_bytes")}


def _dump_durable(fs: FS, path: str) -> Iterator[Row]:
    offset = checkpoint.unpack_durable_end(_content(fs, path))
    if offset is None:
        raise CorruptLogError("the durable end offset fails its CRC", path=path)
    yield {"type": "durable_end", "offset": offset}


_DUMPERS: Final[dict[str, Callable[[FS, str], Iterator[Row]]]] = {
    "index": _dump_index,
    "timeindex": _dump_timeindex,
    "txnindex": _dump_txnindex,
    "snapshot": _dump_snapshot,
    **dict.fromkeys(OFFSET_CHECKPOINTS, _dump_offsets),
    checkpoint.LEADER_EPOCH: _dump_epochs,
    "partition.metadata": _dump_metadata,
    "meta.properties": _dump_properties,
    checkpoint.CLEAN_SHUTDOWN: _dump_clean_shutdown,
    checkpoint.POLICY: _dump_policy,
    checkpoint.DURABLE_END: _dump_durable,
}


# -- describe --------------------------------------------------------------------------------------------------------


def describe(path: str | os.PathLike[str], *, fs: FS = OS) -> PartitionFacts:
    """One partition directory at a glance, read-only. Walks the heads of its last segment. Errors of open_log()."""
    with open_log(path, read_only=True, fs=fs) as log:
        statistics = log.statistics()
        topic, partition = _partition_of(os.path.basename(fs.real_path(log.path))) or ("", -1)
        return PartitionFacts(
            path=log.path,
            topic=topic,
            partition=partition,
            segments=statistics.segments,
            size_bytes=statistics.size_bytes,
            log_start_offset=statistics.log_start_offset,
            high_watermark=statistics.high_watermark,
            log_end_offset=statistics.log_end_offset,
            first_timestamp_ms=next((batch.base_timestamp for batch in log.batches(log.log_start_offset)), -1),
            max_timestamp_ms=max((segment.max_timestamp() for segment in log._segments), default=-1),
            codecs=_codecs(log),
        )


def _codecs(log: Log) -> dict[str, int]:
    counts = np.zeros(8, np.int64)
    for segment in log._segments[-1:]:
        for facts, _, _ in segment.walk(0, crc=False):
            counts += np.bincount(facts["attributes"] & layout.CODEC_MASK, minlength=8)
    names = {code.value: code.name.lower() for code in Codec}
    return {names.get(code, f"unknown({code})"): int(count) for code, count in enumerate(counts) if count}


# -- verify ----------------------------------------------------------------------------------------------------------


def verify(path: str | os.PathLike[str], *, fs: FS = OS) -> Iterator[Verdict]:
    """A verdict for each file of a partition directory, of a log directory with its partitions, or for one file.

    Each .log is walked once, CRCs and all, together with its indexes. Raises LogNotFoundError at once when there is
    nothing of that kind at the path; what is found in files never raises.
    """
    where = os.fspath(path)
    if not fs.is_directory(where):
        if not fs.exists(where):
            raise LogNotFoundError("there is no such file or directory", path=where)
        directory, name = os.path.split(where)
        if kind_of(name) is None:
            raise InvalidNameError("not a file of a log", path=where, found=repr(name))
        if name in DIRECTORY_FILES:
            return iter([_verify_small(fs, where, name)])
        return _verify_partition(fs, directory or ".", only=name)
    found = partitions(where, fs=fs)
    if found == [where]:
        return _verify_partition(fs, where)
    return _verify_directory(fs, where, found)


def _verify_directory(fs: FS, directory: str, found: list[str]) -> Iterator[Verdict]:
    for name in sorted(fs.listdir(directory)):
        if name in DIRECTORY_FILES:
            yield _verify_small(fs, os.path.join(directory, name), name)
    for partition in found:
        yield from _verify_partition(fs, partition)


def _verify_small(fs: FS, path: str, kind: str) -> Verdict:
    """A verdict on a file that is small and judged by itself: it can be understood, or not."""
    size = 0
    try:
        size = fs.file_size(path)
        rows = sum(1 for row in _DUMPERS[kind](fs, path) if row["type"] not in ("padding", "fragment"))
        return Verdict(path=path, kind=kind, status="ok", detail=_entries(rows) if rows != 1 else "", size_bytes=size)
    except (FileNotFoundError, LogNotFoundError):
        return Verdict(path=path, kind=kind, status="ok", detail="removed meanwhile")
    except LogcoreError as error:
        # These two are notes of ours that readers and recovery can do without.
        status: Status = "warning" if kind in (checkpoint.POLICY, checkpoint.DURABLE_END) else "damaged"
        return Verdict(
            path=path, kind=kind, status=status, detail=_reason(error), position=error.position, size_bytes=size
        )


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _reason(error: LogcoreError) -> str:
    if error.expected is None and error.found is None:
        return error.reason
    return f"{error.reason} (expected {error.expected}, found {error.found})"


@attrs.frozen
class _Place:
    """What else is known of the partition a segment lies in: where the next segment begins (None for the active one),
    below which offset all was on disk, and how its last writer promised durability, None for Kafka."""

    next_base: int | None
    recovery_point: int
    policy: Durability | None


def _verify_partition(fs: FS, directory: str, *, only: str | None = None) -> Iterator[Verdict]:
    # The checkpoints before the segments: a running writer moves both forward.
    recovery_point = _recovery_point(fs, directory)
    policy = _policy(fs, directory)
    try:
        names = sorted(fs.listdir(directory))
    except FileNotFoundError:
        return  # deleted meanwhile
    bases = sorted(base for name in names if (base := _base_in(name)) is not None)
    known = set(bases)
    if _is_failed_roll(fs, directory, bases):
        name = file_name(bases.pop(), LOG)
        if only is None or only == name:
            detail = "empty, left by a roll that failed; opening the log removes it"
            yield Verdict(path=os.path.join(directory, name), kind="log", status="warning", detail=detail)
    for base, next_base in zip(bases, [*bases[1:], None], strict=True):
        own = [name for name in names if name.startswith(f"{base:020d}.") and kind_of(name) and _living(name) == name]
        if only is None or only in own:
            place = _Place(next_base, recovery_point, policy)
            for verdict in _verify_segment(fs, directory, base, own, place):
                if only is None or os.path.basename(verdict.path) == only:
                    yield verdict
    for name in names:
        if only is None or name == only:
            other = _verify_other(fs, os.path.join(directory, name), name, known)
            if other is not None:
                yield other


def _is_failed_roll(fs: FS, directory: str, bases: list[int]) -> bool:
    """Whether the last segment is an empty one that the segment before has outgrown, as log.py judges when it opens."""
    try:
        if len(bases) < 2 or fs.file_size(os.path.join(directory, file_name(bases[-1], LOG))):
            return False
        return Segment(fs, directory, bases[-2]).next_offset() > bases[-1]
    except (FileNotFoundError, LogcoreError):
        return False  # the verdict on that file says so


def _recovery_point(fs: FS, directory: str) -> int:
    real = fs.real_path(directory)
    key = _partition_of(os.path.basename(real))
    try:
        return checkpoint.read_offsets(fs, os.path.dirname(real), checkpoint.RECOVERY_POINT).get(key or ("", -1), 0)
    except LogcoreError:
        return 0  # its own verdict says so


def _policy(fs: FS, directory: str) -> Durability | None:
    try:
        return checkpoint.read_policy(fs, directory)
    except (LogcoreError, OverflowError, RecursionError):
        return None  # its own verdict says so


def _verify_other(fs: FS, path: str, name: str, bases: set[int]) -> Verdict | None:
    """Files that belong to no segment of the log."""
    if name in PARTITION_FILES:
        return _verify_small(fs, path, name)
    kind = kind_of(name)
    try:
        size = fs.file_size(path)
    except (FileNotFoundError, LogcoreError):
        size = 0
    if name != _living(name):
        if name.endswith(".swap"):
            detail = "a compaction was interrupted; Kafka finishes it when it opens the partition"
            return Verdict(path=path, kind=kind or "other", status="warning", detail=detail, size_bytes=size)
        what = "waits for deletion" if name.endswith(".deleted") else "left by a compaction"
        return Verdict(path=path, kind=kind or "other", status="ok", detail=f"{what}; not checked", size_bytes=size)
    base = None if kind is None else _base_in(name, f".{kind}")
    if kind is not None and base is not None and base not in bases:
        if kind == "snapshot":
            return _verify_small(fs, path, kind)
        detail = "belongs to no .log file"
        return Verdict(path=path, kind=kind, status="warning", detail=detail, size_bytes=size)
    if kind is None and name.endswith(".quarantine"):
        detail = "what a recovery cut off; kept for you"
        return Verdict(path=path, kind="other", status="ok", detail=detail, size_bytes=size)
    return None


def _verify_segment(fs: FS, directory: str, base: int, names: list[str], place: _Place) -> Iterator[Verdict]:
    """Verdicts on a .log file and the files that go with it, from one walk."""
    is_active = place.next_base is None
    checks: list[_Check] = []
    early: list[Verdict] = []
    for suffix, kind in ((".index", _IndexCheck), (".timeindex", _TimeCheck), (".txnindex", _TxnCheck)):
        name = file_name(base, suffix)
        if name in names:
            try:
                checks.append(kind(fs, os.path.join(directory, name), base, is_active))
            except LogNotFoundError:
                pass  # went with its segment
            except LogcoreError as error:
                path = os.path.join(directory, name)
                early.append(Verdict(path=path, kind=suffix[1:], status="damaged", detail=_reason(error)))
    yield _verify_log(fs, directory, base, place, checks)
    yield from early
    for check in checks:
        yield check.verdict()
    if file_name(base, ".snapshot") in names:
        yield _verify_small(fs, os.path.join(directory, file_name(base, ".snapshot")), "snapshot")


@attrs.define
class _Walked:
    """What a walk over a segment found, up to the first damage."""

    batches: int = 0
    records: int = 0
    end_offset: int = 0
    bad_position: int | None = None
    reason: str = ""
    recovery_position: int | None = None
    has_gaps: bool = False
    #: Opening the log neither accepts nor cuts what is bad.
    is_refused: bool = False


def _verify_log(fs: FS, directory: str, base: int, place: _Place, checks: list[_Check]) -> Verdict:
    path = os.path.join(directory, file_name(base, LOG))
    try:
        # The last segment may be growing or be cut by its writer, which would be the death of whoever maps it. Sealed
        # ones do not change, and mapped they are walked half as fast again.
        growing = _LogFile(fs, path)
        segment = growing if place.next_base is None else Segment(fs, directory, base)
        walked = _walk(segment, place, checks)
        for check in checks:  # an index is judged only by what can be walked
            check.finish(growing.size_bytes if walked.bad_position is None else None)
        return _judge_log(growing, walked, place)
    except FileNotFoundError:
        return Verdict(path=path, kind="log", status="ok", detail="removed meanwhile")
    except LogcoreError as error:
        return Verdict(
            path=path, kind="log", status="damaged", detail=_reason(error), position=error.position, offset=error.offset
        )


def _walk(segment: Segment, place: _Place, checks: list[_Check]) -> _Walked:
    walked = _Walked(end_offset=segment.base_offset)
    for facts, position, why in segment.walk(0, crc=True):
        count, reason = _in_order(facts, walked, segment.base_offset, place)
        count, reason = _count(segment, facts, count, reason, walked)
        if count:
            good = facts[:count]
            walked.end_offset = int(good["last_offset"][-1]) + 1
            if walked.recovery_position is None and walked.end_offset > place.recovery_point:
                walked.recovery_position = int(good["position"][np.argmax(good["last_offset"] >= place.recovery_point)])
            for check in checks:
                check.add(good)
        if reason:
            walked.bad_position, walked.reason = int(facts["position"][count]), reason
            return walked
        if why not in (layout.WALK_END, layout.WALK_LIMIT):
            walked.bad_position, walked.reason = position, layout.WALK_REASONS[why]
    return walked


def _in_order(facts: layout.Facts, walked: _Walked, base_offset: int, place: _Place) -> tuple[int, str]:
    """(how many batches continue the log inside this segment's range, why the next one does not)."""
    if not len(facts):
        return 0, ""
    last = facts["last_offset"]
    # The offset of a v0/v1 wrapper is that of its last record, so only v2 tells where a batch begins.
    base = np.where(facts["magic"] == 2, facts["base_offset"], last)
    before = np.concatenate(([walked.end_offset - 1], last[:-1]))
    falls = (base <= before) | (last < base)
    far = last.astype(np.float64) - base_offset > layout.INT32_MAX  # as floats, because foreign offsets overflow
    none = np.zeros(len(facts), bool)
    beyond = last >= place.next_base if place.next_base is not None else none
    # This library leaves no gap in an active segment, so one means that an offset is damaged or a batch lost, and
    # opening the log refuses it; Kafka may leave some.
    is_dense = place.next_base is None and place.policy is not None
    gap = (base > before + 1) & (facts["magic"] == 2) & (last >= place.recovery_point) if is_dense else none
    bad = falls | far | beyond | gap
    if not bad.any():
        return len(facts), ""
    row = int(bad.argmax())
    walked.is_refused = bool(gap[row])
    if falls[row] or gap[row]:
        return row, f"offset {base[row]} does not follow {before[row]}"
    if beyond[row]:
        return row, f"offset {last[row]} lies in the next segment, which begins at {place.next_base}"
    return row, f"offset {last[row]} is further from {base_offset} than a segment can hold"


def _count(segment: Segment, facts: layout.Facts, count: int, reason: str, walked: _Walked) -> tuple[int, str]:
    """Counts the first batches and their records. (count, reason) as given, or cut to before a bad v0 or v1 entry: how
    many records such an entry holds shows only when it is decoded."""
    modern = facts["magic"] == 2
    for row in np.flatnonzero(~modern[:count]).tolist():
        try:
            batch = segment.batch(int(facts["position"][row]))
            walked.records += len(batch.records()) if batch is not None else 0
        except StorageReadError:
            raise
        except LogcoreError as error:
            count, reason, walked.is_refused = row, error.reason, True
            break
    good = facts[:count][modern[:count]]
    walked.batches += count
    walked.records += int(good["record_count"].sum(dtype=np.int64))
    walked.has_gaps |= bool(np.any(good["record_count"] < good["last_offset"] - good["base_offset"] + 1))
    return count, reason


def _judge_log(segment: GrowingSegment, walked: _Walked, place: _Place) -> Verdict:
    size, position = segment.size_bytes, walked.bad_position
    verdict = Verdict(
        path=segment.path,
        kind="log",
        status="ok",
        batches=walked.batches,
        records=walked.records,
        size_bytes=size,
    )
    is_active = place.next_base is None
    lost = is_active and walked.end_offset < place.recovery_point
    if position is None and not lost:
        if is_active or walked.end_offset == place.next_base:
            return verdict
        gap = f"offsets {walked.end_offset} to {(place.next_base or 0) - 1} lie in no segment"
        if walked.has_gaps:
            return attrs.evolve(verdict, detail=f"{gap}: compacted away")
        return attrs.evolve(
            verdict, status="warning", detail=f"{gap}: normal only after compaction", offset=walked.end_offset
        )
    if position is None:
        detail = f"the log ends at offset {walked.end_offset}, but up to {place.recovery_point} it was on disk"
        return attrs.evolve(verdict, status="damaged", detail=detail, position=size, offset=walked.end_offset)
    # Asked of the same table that opening the log asks. Its writer may have cut the file since.
    segment.refresh()
    only_zeros, next_batch_bytes = recovery._look_behind(cast(ActiveSegment, segment), position, walked.end_offset)
    known = size + 1 if lost else walked.recovery_position if walked.recovery_position is not None else position
    action = decide(TailFacts(position, known, only_zeros, next_batch_bytes, place.policy or Durability("os")))
    left = f"{size - position} {'zero ' if only_zeros else ''}bytes from here on"
    if is_active and next_batch_bytes is None and action is not Action.FAIL and not walked.is_refused:
        detail = f"torn tail: {walked.reason}; opening the log cuts the {left}"
        status: Status = "warning"
    else:
        status = "damaged"
        detail = f"{walked.reason}; {left} cannot be trusted"
        if next_batch_bytes is not None:
            detail = f"{walked.reason}; the next whole batch is {next_batch_bytes} bytes further, {left}"
        elif lost:
            detail += f", but up to offset {place.recovery_point} all was on disk"
    return attrs.evolve(verdict, status=status, detail=detail, position=position, offset=walked.end_offset)


class _Check(Protocol):
    """What is learnt about a file beside the .log while that is walked."""

    def __init__(self, fs: FS, path: str, base: int, is_active: bool) -> None: ...
    def add(self, facts: layout.Facts) -> None:
        """Takes in the next good batches of the segment."""

    def finish(self, size: int | None) -> None:
        """The walk is over; size: of the .log file, None when the walk did not reach its end."""

    def verdict(self) -> Verdict: ...


class _EntriesCheck:
    """Common to the three index files: the entries, and the first thing that is wrong with them."""

    kind = ""
    dtype: np.dtype[Any]
    status: Status = "warning"

    def __init__(self, fs: FS, path: str, base: int, is_active: bool) -> None:
        self.path, self.base = path, base
        self.table = _Table.read(fs, path, self.dtype)
        self.entries = self.table.entries
        self.reason = ""
        self.slot: int | None = None
        self.is_active = is_active
        self.judge()

    def judge(self) -> None:
        raise NotImplementedError

    def add(self, facts: layout.Facts) -> None:
        pass

    def finish(self, size: int | None) -> None:
        pass

    def fault(self, bad: npt.NDArray[np.bool_], reason: str, first: int = 0) -> None:
        """Notes the first True of bad, whose element 0 is slot first, unless something was found before."""
        if not self.reason and bad.any():
            self.slot = first + int(bad.argmax())
            self.reason = f"entry {self.slot}: {reason}"

    def verdict(self) -> Verdict:
        table = self.table
        size = len(self.entries) * self.dtype.itemsize + table.padding_bytes + table.fragment_bytes
        detail = _entries(len(self.entries)) + (", zero-padded while it is written" if table.padding_bytes else "")
        found = Verdict(path=self.path, kind=self.kind, status="ok", detail=detail, size_bytes=size)
        if self.reason:
            position = None if self.slot is None else self.slot * self.dtype.itemsize
            return attrs.evolve(found, status=self.status, detail=self.reason, position=position)
        if table.fragment_bytes:
            detail = f"{table.fragment_bytes} bytes of an entry at the end"
            return attrs.evolve(found, status="warning", detail=detail, position=size - table.fragment_bytes)
        if table.padding_bytes and not self.is_active:
            return attrs.evolve(found, status="warning", detail="zero-padded, but the segment is sealed")
        return found


class _IndexCheck(_EntriesCheck):
    """.index: entries rise, and each points at a batch that lies at or before its offset."""

    kind = "index"
    dtype = OFFSET_ENTRY

    def judge(self) -> None:
        self.offsets = self.base + self.entries["relative_offset"].astype(np.int64)
        self.positions = self.entries["position"].astype(np.int64)
        self.fault(self.entries["relative_offset"] < 0, "offset below the segment's")
        self.fault(self.positions < 0, "negative position")
        self.fault(np.diff(self.offsets) <= 0, "offset does not rise", 1)
        self.fault(np.diff(self.positions) <= 0, "position does not rise", 1)

    def add(self, facts: layout.Facts) -> None:
        if self.reason or not len(self.entries):
            return
        end = int(facts["position"][-1]) + int(facts["size_bytes"][-1])
        first, stop = np.searchsorted(self.positions, [int(facts["position"][0]), end]).tolist()
        rows = np.searchsorted(facts["position"], self.positions[first:stop], side="right") - 1
        here = self.positions[first:stop]
        self.fault(facts["position"][rows] != here, "no batch begins at its position", first)
        self.fault(
            facts["last_offset"][rows] > self.offsets[first:stop], "the batch it points at lies behind it", first
        )

    def finish(self, size: int | None) -> None:
        if size is not None:
            self.fault(self.positions >= size, "points behind the end of the log")


class _TimeCheck(_EntriesCheck):
    """.timeindex: entries rise, no older record is younger than one says, a sealed one ends with the largest time."""

    kind = "timeindex"
    dtype = TIME_ENTRY

    def judge(self) -> None:
        self.offsets = self.base + self.entries["relative_offset"].astype(np.int64)
        self.timestamps = self.entries["timestamp"].astype(np.int64)
        self.largest = -1
        self.fault(self.entries["relative_offset"] < 0, "offset below the segment's")
        self.fault(self.timestamps[1:] <= self.timestamps[:-1], "timestamp does not rise", 1)
        self.fault(np.diff(self.offsets) < 0, "offset falls", 1)
        self.end = self.base

    def add(self, facts: layout.Facts) -> None:
        if not self.reason and len(self.entries):
            # A search for an entry's time starts at its offset, so what lies wholly before must not be younger.
            largest = np.maximum(np.maximum.accumulate(facts["max_timestamp"]), self.largest)
            last = facts["last_offset"]
            first, stop = np.searchsorted(self.offsets, [int(self.end), int(last[-1]) + 1]).tolist()
            rows = np.searchsorted(last, self.offsets[first:stop]) - 1
            before = np.where(rows >= 0, largest[np.maximum(rows, 0)], self.largest)
            self.fault(before > self.timestamps[first:stop], "an older record has a larger timestamp", first)
        self.largest = max(self.largest, int(facts["max_timestamp"].max(initial=-1)))
        self.end = int(facts["last_offset"][-1]) + 1

    def finish(self, size: int | None) -> None:
        if size is None or self.reason:
            return
        self.fault(self.offsets >= self.end, "offset behind the end of the log")
        last = int(self.timestamps[-1]) if len(self.timestamps) else -1
        if not self.reason and not self.is_active and last != self.largest:
            self.slot = None
            self.reason = (
                f"its last timestamp is {last}, the segment's largest {self.largest}; retention goes by the former"
            )


class _TxnCheck(_EntriesCheck):
    """.txnindex: aborted transactions that end in this segment, in the order of their markers.

    Damaged rather than doubtful when wrong: readers of committed data go by it, and Kafka rebuilds it only after a
    crash.
    """

    kind = "txnindex"
    dtype = TXN_ENTRY
    status: Status = "damaged"

    def judge(self) -> None:
        entries = self.entries
        last = entries["last_offset"].astype(np.int64)
        # As in Kafka, the high byte of the version decides.
        self.fault(entries["version"] >> 8 != 0, "unknown version")
        self.fault(last < self.base, "ends before the segment")
        self.fault(entries["first_offset"] > last, "ends before it begins")
        self.fault(last[1:] <= last[:-1], "markers do not rise", 1)
        self.end = self.base

    def add(self, facts: layout.Facts) -> None:
        self.end = int(facts["last_offset"][-1]) + 1

    def finish(self, size: int | None) -> None:
        if size is not None:
            self.fault(self.entries["last_offset"] >= self.end, "its marker lies behind the end of the segment")
