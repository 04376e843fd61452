"""Encode and decode the records of Kafka's `__transaction_state`: the states of
transactional ids.

Layout (storage format section 12.2): the key is an int16 0 and the transactional id.
The value begins with its version, an int16. Version 0 has lengths of fixed size, and
version 1 has varints of length + 1 and tagged fields. A null value deletes the id.

Rules:
- Version 1 is written; both versions are read.
- Tags 0 and 1 are the producer ids before and after a change. They are written although
  Kafka 4.1 only reads them. Without them, a crash between prepare and complete would
  lose the producer id that was allocated for the client.
- A key of an unknown version reads as None. An invalid value raises an error, because
  skipping the value would leave a transaction open forever.

This module reads no log, and does not change states.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, Final

import attrs

from logcore.errors import CorruptLogError, InvalidRecordError
from logcore.format import varint

_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
# Version, producer id, producer epoch, timeout, status.
_HEAD: Final = struct.Struct(">hqhib")
_TIMES: Final = struct.Struct(">qq")
_LONG: Final = struct.Struct(">q")
_DECODE_ERRORS: Final = (ValueError, IndexError, struct.error, InvalidRecordError)
_FLEXIBLE: Final = 1

#: The length of a text in a record has 16 bits.
LONGEST_ID_BYTES: Final = 32_767

#: A topic and the number of its partition.
Partition = tuple[str, int]


class Status(enum.IntEnum):
    """State of a transactional id, by Kafka's numbers.

    6 and 7 (Dead, PrepareEpochFence) are never stored.
    """

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5

    @property
    def label(self) -> str:
        """Kafka's name of the state, such as PrepareCommit."""
        return "".join(word.capitalize() for word in self.name.split("_"))


@attrs.frozen(kw_only=True)
class StoredTransaction:
    """Value of a record.

    Times are in milliseconds since the epoch; `start_ms` is -1 before the first
    partition. `client_version` is the transaction version of the client that requested
    the change, 0 to 2. `previous_producer_id` and `next_producer_id` are -1, unless all
    epochs of a producer id are used.
    """

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    status: Status = Status.EMPTY
    partitions: frozenset[Partition] = frozenset()
    update_ms: int = -1
    start_ms: int = -1
    previous_producer_id: int = -1
    next_producer_id: int = -1
    client_version: int = 0


def transaction_key(transactional_id: str) -> bytes:
    """Encode a key.

    Raises:
        ValueError: the id has more than 32,767 bytes.
    """
    text = transactional_id.encode()
    if len(text) > LONGEST_ID_BYTES:
        raise ValueError(
            f"expected a transactional id of at most 32767 bytes, found {len(text)}"
        )
    return b"\0\0" + _SHORT.pack(len(text)) + text


def transaction_value(stored: StoredTransaction) -> bytes:
    """Encode a value in version 1.

    Topics and partitions are sorted. In the state Empty they are null, as in Kafka.
    """
    head = _HEAD.pack(
        1, stored.producer_id, stored.producer_epoch, stored.timeout_ms, stored.status
    )
    parts = [head]
    if stored.status is Status.EMPTY:
        parts.append(b"\0")
    else:
        by_topic: dict[str, list[int]] = {}
        for topic, number in sorted(stored.partitions):
            by_topic.setdefault(topic, []).append(number)
        parts.append(varint.encode_unsigned(len(by_topic) + 1))
        for topic, numbers in by_topic.items():
            name = topic.encode()
            parts += (
                varint.encode_unsigned(len(name) + 1),
                name,
                varint.encode_unsigned(len(numbers) + 1),
                *map(_INT.pack, numbers),
                b"\0",
            )
    parts.append(_TIMES.pack(stored.update_ms, stored.start_ms))
    tags = []
    if stored.previous_producer_id != -1:
        tags.append((0, _LONG.pack(stored.previous_producer_id)))
    if stored.next_producer_id != -1:
        tags.append((1, _LONG.pack(stored.next_producer_id)))
    if stored.client_version:
        tags.append((2, _SHORT.pack(stored.client_version)))
    parts.append(varint.encode_unsigned(len(tags)))
    for tag, content in tags:
        parts += (
            varint.encode_unsigned(tag),
            varint.encode_unsigned(len(content)),
            content,
        )
    return b"".join(parts)


def read_transaction_key(key: bytes) -> str | None:
    """Decode the transactional id of a key.

    Return None for a key of another version, and for invalid bytes.
    """
    if key[:2] != b"\0\0" or len(key) < 4:
        return None
    (size,) = _SHORT.unpack_from(key, 2)
    if size < 0 or len(key) < 4 + size:
        return None
    try:
        return str(key[4 : 4 + size], "utf-8")
    except UnicodeDecodeError:
        return None


def read_transaction(value: bytes) -> StoredTransaction:
    """Decode a value.

    Raises:
        CorruptLogError: the version or the state is unknown, or the layout is invalid.
    """
    try:
        return _read(value)
    except _DECODE_ERRORS as error:
        raise CorruptLogError(
            f"a record of __transaction_state is not understood: {error}",
            expected="a value of version 0 or 1",
            found=bytes(value[:40]).hex(),
        ) from error


def describe_transaction(
    key: bytes | None, value: bytes | None
) -> dict[str, Any] | None:
    """Return a record as a dict for JSON, or None if its version or layout is unknown.

    {"transactional_id", "transaction": {"producer_id", "producer_epoch", "timeout_ms",
    "state", "partitions": [[topic, number], ...], "update_timestamp_ms",
    "start_timestamp_ms", "previous_producer_id", "next_producer_id", "client_version"} or
    None}.
    """
    name = None if key is None else read_transaction_key(key)
    if name is None:
        return None
    if value is None:
        return {"transactional_id": name, "transaction": None}
    try:
        found = read_transaction(value)
    except CorruptLogError:
        return None
    return {
        "transactional_id": name,
        "transaction": {
            "producer_id": found.producer_id,
            "producer_epoch": found.producer_epoch,
            "timeout_ms": found.timeout_ms,
            "state": found.status.label,
            "partitions": [list(partition) for partition in sorted(found.partitions)],
            "update_timestamp_ms": found.update_ms,
            "start_timestamp_ms": found.start_ms,
            "previous_producer_id": found.previous_producer_id,
            "next_producer_id": found.next_producer_id,
            "client_version": found.client_version,
        },
    }


def _read(value: bytes) -> StoredTransaction:
    version, producer_id, epoch, timeout_ms, status = _HEAD.unpack_from(value)
    if version not in (0, 1):
        raise ValueError(f"version {version}")
    is_flexible = version >= _FLEXIBLE
    at = _HEAD.size
    partitions = set()
    topics, at = _count(value, at, is_flexible)
    for _ in range(max(0, topics)):  # null in Empty
        topic, at = _text(value, at, is_flexible)
        numbers, at = _count(value, at, is_flexible)
        for _ in range(max(0, numbers)):
            (number,) = _INT.unpack_from(value, at)
            partitions.add((topic, number))
            at += _INT.size
        if is_flexible:
            _, at = _tags(value, at)
    update_ms, start_ms = _TIMES.unpack_from(value, at)
    at += _TIMES.size
    tags: dict[int, bytes] = {}
    if is_flexible:
        tags, at = _tags(value, at)
    return StoredTransaction(
        producer_id=producer_id,
        producer_epoch=epoch,
        timeout_ms=timeout_ms,
        status=Status(status),
        partitions=frozenset(partitions),
        update_ms=update_ms,
        start_ms=start_ms,
        previous_producer_id=_tagged(_LONG, tags, 0, -1),
        next_producer_id=_tagged(_LONG, tags, 1, -1),
        client_version=_tagged(_SHORT, tags, 2, 0),
    )


def _tagged(kind: struct.Struct, tags: dict[int, bytes], tag: int, default: int) -> int:
    """Return the number in a tagged field, or the default if the field is omitted."""
    if tag not in tags:
        return default
    (number,) = kind.unpack(tags[tag])
    return int(number)


def _count(value: bytes, at: int, is_flexible: bool) -> tuple[int, int]:
    """Return the number of elements, or -1 for null, and the position of the first element.

    Each element takes at least one byte, so a loop over them ends with the data.
    """
    if is_flexible:
        count, at = varint.decode_unsigned(value, at)
        return count - 1, at
    (count,) = _INT.unpack_from(value, at)
    return count, at + _INT.size


def _text(value: bytes, at: int, is_flexible: bool) -> tuple[str, int]:
    if is_flexible:
        size, at = varint.decode_unsigned(value, at)
        size -= 1
    else:
        (size,) = _SHORT.unpack_from(value, at)
        at += _SHORT.size
    if size < 0 or at + size > len(value):
        raise ValueError(f"expected a text at {at}, found {size} bytes of {len(value)}")
    return str(value[at : at + size], "utf-8"), at + size


def _tags(value: bytes, at: int) -> tuple[dict[int, bytes], int]:
    found = {}
    count, at = varint.decode_unsigned(value, at)
    for _ in range(count):
        tag, at = varint.decode_unsigned(value, at)
        size, at = varint.decode_unsigned(value, at)
        if at + size > len(value):
            raise ValueError(f"expected {size} bytes at {at}, found {len(value) - at}")
        found[tag] = bytes(value[at : at + size])
        at += size
    return found, at
