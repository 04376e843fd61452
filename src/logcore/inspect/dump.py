"""Returns the content of one file of a log as plain dicts, without opening the log.

json.dumps accepts the dicts. Each has "type"; sizes and positions are bytes, times are
milliseconds. Bytes are encoded by one scheme, which is reversible:

Rules:
- Nothing is written, locked or repaired. A running writer is not disturbed, and its
  last batch may appear torn.
- Foreign bytes result in a dict or a LogcoreError, and in no other error.
- Memory is bounded by one batch and one index, not by the length of a log.

This module does not check the content; verify.py does.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from logcore.config import INT64_MAX, Durability
from logcore.errors import (
    CorruptLogError,
    InvalidNameError,
    LogcoreError,
    LogNotFoundError,
    StorageReadError,
)
from logcore.format import group_settings
from logcore.format.cluster_metadata_records import (
    describe_control,
    describe_metadata,
)
from logcore.format.consumer_group_records import describe_consumer_record
from logcore.format.group_records import describe_group_record
from logcore.format.transaction_records import describe_transaction
from logcore.fs import FS, OS, opened
from logcore.index import OFFSET_ENTRY, TIME_ENTRY, TXN_ENTRY, size_without_zeros
from logcore.inspect.catalog import final_name, kind_of
from logcore.kernels import Record, layout
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import DIRECTORY_FILES, PARTITION_FILES
from logcore.metadata.filenames import (
    LOG,
    METADATA_LOG,
    OFFSETS_TOPIC,
    SUFFIXES,
    TRANSACTIONS_TOPIC,
    base_offset_of,
    partition_of,
)
from logcore.partition import checksum_file
from logcore.partition.producers import SNAPSHOT_ENTRY, snapshot_entries
from logcore.recordbatch import Marker, RecordBatch
from logcore.segment import GrowingSegment

#: Files up to this size are read whole, except .log files. A million index entries are
#: 8 MB.
_MAX_SIZE: Final = 256 << 20

#: Snapshot of the log of a quorum, by its end offset and epoch, and its first records.
_QUORUM_SNAPSHOT: Final = re.compile(r"(\d{20}-\d{10}|bootstrap)\.checkpoint")
#: Key of a control record: version and type.
_CONTROL_KEY: Final = struct.Struct(">hh")

Row = dict[str, Any]


# -- values ----------------------------------------------------------------------------


def shown(data: bytes | memoryview | None) -> str | dict[str, str] | None:
    """Return bytes in their JSON form; see the module docstring."""
    if data is None:
        return None
    raw = bytes(data)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return {"hex": raw.hex()}
    if text.isprintable() or text.translate(_WHITESPACE).isprintable():
        return text
    return {"hex": raw.hex()}


_WHITESPACE: Final = {ord(sign): None for sign in "\t\r\n"}


#: Classes of values that are their own JSON form.
_PLAIN: Final = frozenset((str, int, bool, type(None)))


def shown_value(value: Any) -> Any:
    """Return a value of a query or of a decoded record in its JSON form."""
    kind = value.__class__
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {str(name): shown_value(inner) for name, inner in value.items()}
    if kind is float:
        if math.isfinite(value):
            return value
        # JSON has no number for NaN and infinities.
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return _shown_other(value)


def _shown_other(value: Any) -> Any:
    from datetime import UTC, date, datetime, time
    from decimal import Decimal

    if isinstance(value, bytes):
        return shown(value)
    if isinstance(value, Decimal):
        if value == value.to_integral_value() and value.as_tuple().exponent == 0:
            return int(value)
        return float(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        precision = "milliseconds"
        if value.microsecond % 1000:
            precision = "microseconds"
        return (
            value.astimezone(UTC).isoformat(timespec=precision).replace("+00:00", "Z")
        )
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(name): shown_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [shown_value(inner) for inner in value]
    return str(value)


def shown_record(record: Record) -> Row:
    """Return a record as a dict.

    Its keys are offset, timestamp_ms, key, value, and headers as [{"key": ..., "value":
    ...}].
    """
    offset, timestamp_ms, key, value, headers = record
    return {
        "offset": offset,
        "timestamp_ms": timestamp_ms,
        "key": shown(key),
        "value": shown(value),
        "headers": [
            {"key": shown(_header_name(name)), "value": shown(content)}
            for name, content in headers
        ],
    }


def _header_name(name: str) -> bytes:
    return name.encode("utf-8", layout.HEADER_NAME_ERRORS)


# -- dump ------------------------------------------------------------------------------


def dump(
    path: str | os.PathLike[str], *, records: bool = False, fs: FS = OS
) -> Iterator[Row]:
    """Yield the content of one file, in order.

    With `records`, each batch of a .log file is followed by its records. Damage in a
    .log file is a row too ("damage", or "crc_ok": false), and the walk continues as far
    as the heads allow.

    Raises:
        CorruptLogError: A file other than a .log file cannot be decoded.
        LogNotFoundError: The file does not exist.
        InvalidNameError: This is not the name of a file of a log.
        StorageReadError: The file cannot be read.
    """
    file_path = os.fspath(path)
    kind = kind_of(os.path.basename(file_path))
    if kind is None and _QUORUM_SNAPSHOT.fullmatch(os.path.basename(file_path)):
        kind = "log"
    if kind is None:
        known = ", ".join(DIRECTORY_FILES + PARTITION_FILES)
        raise InvalidNameError(
            "not a file of a log",
            path=file_path,
            expected=f"an offset of 20 digits (at most {INT64_MAX}) and {' or '.join(SUFFIXES)}, "
            f"a .checkpoint file of a quorum, or {known}",
            found=repr(os.path.basename(file_path)),
        )
    if not fs.exists(file_path):
        raise LogNotFoundError("there is no such file", path=file_path)
    if kind == "log":
        return _dump_log(fs, file_path, records)
    return DUMPERS[kind](fs, file_path)


class LogFile(GrowingSegment):
    """A .log file under any of its names.

    It is read with pread, because it may be growing.
    """

    def __init__(self, fs: FS, path: str) -> None:
        self._file = path
        name = final_name(os.path.basename(path))
        if _QUORUM_SNAPSHOT.fullmatch(name):
            # The number in the name is the end of the log. The offsets in the file begin
            # with 0.
            name = f"{0:020}{LOG}"
        base_offset = base_offset_of(name)
        assert base_offset is not None, "kind_of() has accepted the name"
        super().__init__(fs, os.path.dirname(path), base_offset)

    def file(self, suffix: str) -> str:
        if suffix == LOG:
            return self._file
        return super().file(suffix)


def _dump_log(fs: FS, path: str, records: bool) -> Iterator[Row]:
    segment = LogFile(fs, path)
    key = partition_of(os.path.basename(os.path.dirname(fs.real_path(path))))
    topic = "" if key is None else key[0]
    if _QUORUM_SNAPSHOT.fullmatch(os.path.basename(path)):
        topic = METADATA_LOG
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
            yield _damage(
                position, segment.size_bytes, layout.WALK_REASONS[layout.WALK_SHORT]
            )
            return
        yield from _batch_rows(batch, records, topic)
        position += batch.size_bytes


def _damage(position: int, end: int, reason: str) -> Row:
    return {
        "type": "damage",
        "position": position,
        "size_bytes": end - position,
        "reason": reason,
    }


def _described(topic: str, record: Record, is_control: bool) -> Row | None:
    """Return the content of a record of one of Kafka's own topics, or None."""
    key, value = record.key, record.value
    if is_control:
        if topic != METADATA_LOG or key is None or len(key) < _CONTROL_KEY.size:
            return None
        return describe_control(_CONTROL_KEY.unpack_from(key)[1], value)
    if topic == OFFSETS_TOPIC:
        return describe_group_record(key, value) or describe_consumer_record(key, value)
    if topic == TRANSACTIONS_TOPIC:
        return describe_transaction(key, value)
    if topic == METADATA_LOG:
        return describe_metadata(value)
    return None


def _batch_rows(batch: RecordBatch, records: bool, topic: str) -> Iterator[Row]:
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
    marker: Marker | None = None
    try:
        batch.verify()
    except LogcoreError as error:
        row["crc_ok"] = False
        row["error"] = error.reason
    else:
        try:
            if batch.is_control:
                marker = batch.marker()
                row["control_type"] = marker.kind
            if records:
                found = batch.records()
        except LogcoreError as error:
            row["error"] = error.reason
    yield row
    for record in found:
        line = {"type": "record", **shown_record(record)}
        description = _described(topic, record, batch.is_control)
        if description is not None:
            line["says"] = description
        if marker is not None:
            line["control_type"] = marker.kind
            if marker.coordinator_epoch >= 0:
                line["coordinator_epoch"] = marker.coordinator_epoch
        yield line


def _content(fs: FS, path: str) -> bytes:
    try:
        with opened(fs, path) as handle:
            size = fs.size(handle)
            if size > _MAX_SIZE:
                raise CorruptLogError(
                    "far too large",
                    path=path,
                    expected=f"at most {_MAX_SIZE} bytes",
                    found=size,
                )
            return fs.pread(handle, size, 0)
    except FileNotFoundError:
        raise LogNotFoundError("there is no such file", path=path) from None


@attrs.frozen
class IndexTable:
    """The entries of an index file, and the bytes after them.

    The bytes after the entries are zeros in a file that is not trimmed yet, or a torn
    entry.
    """

    entries: npt.NDArray[Any]
    padding_bytes: int
    fragment_bytes: int

    @classmethod
    def read(cls, fs: FS, path: str, kind: np.dtype[Any]) -> IndexTable:
        data = _content(fs, path)
        fragment = len(data) % kind.itemsize
        whole = len(data) - fragment
        used = -(-size_without_zeros(data[:whole]) // kind.itemsize) * kind.itemsize
        return cls(
            np.frombuffer(data, kind, used // kind.itemsize), whole - used, fragment
        )

    def rest(self) -> Iterator[Row]:
        if self.padding_bytes:
            yield {"type": "padding", "size_bytes": self.padding_bytes}
        if self.fragment_bytes:
            yield {"type": "fragment", "size_bytes": self.fragment_bytes}


def _base_of(path: str) -> int:
    name = final_name(os.path.basename(path))
    return int(name[:20])


def _dump_index(fs: FS, path: str) -> Iterator[Row]:
    table = IndexTable.read(fs, path, OFFSET_ENTRY)
    base = _base_of(path)
    for relative, position in table.entries.tolist():
        yield {"type": "index_entry", "offset": base + relative, "position": position}
    yield from table.rest()


def _dump_timeindex(fs: FS, path: str) -> Iterator[Row]:
    table = IndexTable.read(fs, path, TIME_ENTRY)
    base = _base_of(path)
    for timestamp, relative in table.entries.tolist():
        yield {
            "type": "timeindex_entry",
            "timestamp_ms": timestamp,
            "offset": base + relative,
        }
    yield from table.rest()


def _dump_txnindex(fs: FS, path: str) -> Iterator[Row]:
    table = IndexTable.read(fs, path, TXN_ENTRY)
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


def _dump_snapshot(fs: FS, path: str) -> Iterator[Row]:
    names = SNAPSHOT_ENTRY.names
    assert names is not None
    for entry in snapshot_entries(_content(fs, path), path).tolist():
        row = {"type": "producer", **dict(zip(names, entry, strict=True))}
        row["timestamp_ms"] = row.pop("timestamp")
        yield row


def _dump_checksum_file(fs: FS, path: str) -> Iterator[Row]:
    seal = checksum_file.Seal.unpack(_content(fs, path))
    if seal is None:
        raise CorruptLogError("not a seal, or its CRC does not match", path=path)
    yield {"type": "seal", **attrs.asdict(seal), "crc32c": f"{seal.crc32c:#010x}"}


def _is_empty_checkpoint(content: bytes) -> bool:
    return not content or content.split() == [b"0", b"0"]


def _dump_offsets(fs: FS, path: str) -> Iterator[Row]:
    offsets = checkpoint.read_offsets(fs, os.path.dirname(path), os.path.basename(path))
    if not offsets and not _is_empty_checkpoint(_content(fs, path)):
        raise CorruptLogError(
            "not an offset checkpoint; Kafka counts it as absent",
            path=path,
            expected=_CHECKPOINT,
        )
    for (topic, partition), offset in offsets.items():
        yield {
            "type": "checkpoint_entry",
            "topic": topic,
            "partition": partition,
            "offset": offset,
        }


_CHECKPOINT: Final = "lines '0', the count, then that many 'topic partition offset'"


def _dump_epochs(fs: FS, path: str) -> Iterator[Row]:
    epochs = checkpoint.read_epochs(fs, os.path.dirname(path))
    if not epochs and not _is_empty_checkpoint(_content(fs, path)):
        raise CorruptLogError(
            "not a leader epoch checkpoint",
            path=path,
            expected="lines '0', the count, then that many 'epoch start_offset', rising",
        )
    for leader_epoch, start_offset in epochs:
        yield {
            "type": "leader_epoch",
            "leader_epoch": leader_epoch,
            "start_offset": start_offset,
        }


def _dump_metadata(fs: FS, path: str) -> Iterator[Row]:
    fields: dict[str, str] = {}
    for line in _content(fs, path).decode("utf-8", "replace").splitlines():
        pair = line.split()
        if len(pair) != 2 or not pair[0].endswith(":"):
            raise CorruptLogError(
                "a line that is not 'name: value'", path=path, found=repr(line[:80])
            )
        fields[pair[0][:-1]] = pair[1]
    version = fields.get("version", "")
    if (
        not (version.isascii() and version.isdigit())
        or len(fields.get("topic_id", "")) != 22
    ):
        raise CorruptLogError(
            "not partition metadata",
            path=path,
            expected="version: 0 and a topic_id of 22 characters",
            found=str(fields)[:80],
        )
    yield {
        "type": "partition_metadata",
        "version": int(version[:9]),
        "topic_id": fields["topic_id"],
    }


def _dump_properties(fs: FS, path: str) -> Iterator[Row]:
    fields = {}
    for name, value in checkpoint.property_lines(_content(fs, path)):
        if value is None:
            raise CorruptLogError(
                "a line that is not 'name=value'", path=path, found=repr(name[:80])
            )
        fields[name] = value
    if fields.get("version", "0") not in ("0", "1"):
        raise CorruptLogError(
            "unknown version",
            path=path,
            expected="0 or 1",
            found=repr(fields["version"][:80]),
        )
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
    # Only the existence of this file matters. Older versions of Kafka wrote it empty,
    # so unreadable content is not damage.
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
        raise CorruptLogError(
            "not a durability policy",
            path=path,
            found=repr(facts.get("durability"))[:80],
        ) from None
    yield {
        "type": "policy",
        "durability": facts["durability"],
        "max_bytes": facts.get("max_bytes"),
    }


def _dump_durable(fs: FS, path: str) -> Iterator[Row]:
    shown = checkpoint.unpack_visible_end(_content(fs, path))
    if shown is None:
        raise CorruptLogError("the durable end offset fails its CRC", path=path)
    yield {
        "type": "high_watermark" if shown.is_replicated else "durable_end",
        "offset": shown.offset,
    }


def _dump_topics(fs: FS, path: str) -> Iterator[Row]:
    rows = checkpoint.unpack_topics(_content(fs, path))
    if rows is None:
        raise CorruptLogError("the file of topics fails its CRC", path=path)
    for row in rows:
        if not isinstance(row, dict):
            raise CorruptLogError(
                "the file of topics has content that no program writes",
                path=path,
                found=repr(row)[:80],
            )
        yield {"type": "topic", **row}


def _dump_groups(fs: FS, path: str) -> Iterator[Row]:
    rows = checkpoint.unpack_groups(_content(fs, path))
    if rows is None:
        raise CorruptLogError("the file of groups' settings fails its CRC", path=path)
    try:
        settings = group_settings.from_rows(rows)
    except ValueError as error:
        raise CorruptLogError(
            "the file of groups' settings is damaged", path=path, found=str(error)
        ) from error
    for row in group_settings.to_rows(settings):
        yield {"type": "group", **row}


def _dump_producer_ids(fs: FS, path: str) -> Iterator[Row]:
    content = _content(fs, path)
    end = checkpoint.unpack_producer_ids(content)
    if end is None:
        raise CorruptLogError(
            "not a number of producer ids", path=path, found=repr(content[:80])
        )
    yield {"type": "producer_ids", "given_below": end}


def _dump_clock(fs: FS, path: str) -> Iterator[Row]:
    content = _content(fs, path)
    facts = checkpoint.unpack_checked(content)
    if facts is None:
        raise CorruptLogError(
            "the clock file fails its CRC", path=path, found=repr(content[:80])
        )
    yield {"type": "clock", **facts}


#: Functions that return the rows of a file other than a .log file, by its kind. They
#: raise CorruptLogError for a file that cannot be decoded.
DUMPERS: Final[dict[str, Callable[[FS, str], Iterator[Row]]]] = {
    "index": _dump_index,
    "timeindex": _dump_timeindex,
    "txnindex": _dump_txnindex,
    "snapshot": _dump_snapshot,
    "seal": _dump_checksum_file,
    **dict.fromkeys(checkpoint.OFFSET_FILES, _dump_offsets),
    checkpoint.LEADER_EPOCH: _dump_epochs,
    "partition.metadata": _dump_metadata,
    "meta.properties": _dump_properties,
    checkpoint.CLEAN_SHUTDOWN: _dump_clean_shutdown,
    checkpoint.POLICY: _dump_policy,
    checkpoint.DURABLE_END: _dump_durable,
    checkpoint.TOPICS: _dump_topics,
    checkpoint.GROUPS: _dump_groups,
    checkpoint.PRODUCER_IDS: _dump_producer_ids,
    checkpoint.CLOCK: _dump_clock,
}
