"""Encode and decode the records of Kafka's `__consumer_offsets`: the committed offsets
and the states of groups.

Layout (storage format section 12.1): key and value begin with their version, an int16.
The key names a group, topic and partition (versions 0 and 1) or a group (2). A null
value deletes the record of its key. Strings have an int16 length. In values of version
4, lengths are varints of length + 1, and a section of tagged fields ends each struct.

Rules:
- Written records equal Kafka's byte for byte: keys of versions 1 and 2, and values of
  version 3. A commit has version 1 with an expiry, and 4 with the id of its topic.
- A record with an unknown or invalid layout reads as None, without an error.
- This module reads no log. logcore.coordinators.stored_offsets selects the last record of
  each key.

The subscription and the assignment of a member are blobs inside a group's record. This
module encodes and decodes them too, in version 3 of Kafka's consumer protocol.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import attrs

from logcore.errors import InvalidRecordError
from logcore.format import varint

_SHORT: Final = struct.Struct(">h")
_UNIT: Final = struct.Struct(">H")
_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")
_OFFSET_HEAD: Final = struct.Struct(">hq")
_EPOCH_HEAD: Final = struct.Struct(">hqi")
#: Fields before a commit's metadata, by the version of the value. In version 4, these
#: fields are the same, and a different layout follows.
_HEADS: Final = {
    0: _OFFSET_HEAD,
    1: _OFFSET_HEAD,
    2: _OFFSET_HEAD,
    3: _EPOCH_HEAD,
    4: _EPOCH_HEAD,
}
#: First version in which lengths are varints and structs end with tagged fields.
_FLEXIBLE: Final = 4
_VERSIONS: Final = range(5)
#: The tagged fields of a commit before the 16 bytes of the topic's id: their number, the
#: tag 0 and the size. KIP-848 added the field in Kafka 4.1.
_TOPIC_ID_HEAD: Final = b"\1\0\x10"
#: The newest known version of a subscription. Newer versions only add fields at the end.
_SUBSCRIPTION_VERSION: Final = 3
#: Errors that the decoders below raise for bytes of another layout. UnicodeDecodeError
#: is a ValueError.
_DECODE_ERRORS: Final = (ValueError, IndexError, struct.error, InvalidRecordError)

#: First bytes of the known keys: two versions of a commit's key, one of a group's key.
KEY_VERSIONS: Final = frozenset({b"\0\0", b"\0\1", b"\0\2"})

GroupRecord = tuple[bytes, bytes | None]
#: The name and the id of a topic.
TopicWithId = tuple[str, bytes]
#: Maximum number of bytes that a record in a batch needs besides its key and value.
RECORD_HEAD_BYTES: Final = 32
_T = TypeVar("_T")


class Committed(NamedTuple):
    """One committed offset. `expire_ms` is -1, or the time that the client requested.
    `topic_id` is empty if the record does not contain it.
    """

    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    expire_ms: int = -1
    topic_id: bytes = b""


class CommitKey(NamedTuple):
    """Key of the record of a commit."""

    group_id: str
    topic: str
    partition: int


@attrs.frozen(kw_only=True)
class StoredMember:
    """Member of a stored group. `rebalance_timeout_ms` is -1 in records of older brokers."""

    member_id: str
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    session_timeout_ms: int = 0
    subscription: bytes = b""
    assignment: bytes = b""


@attrs.frozen(kw_only=True)
class StoredGroup:
    """Record of a group. `state_ms` is the time at which the group entered its state, or
    -1 if the record has no time.
    """

    protocol_type: str
    generation: int
    protocol: str | None = None
    leader: str | None = None
    state_ms: int = -1
    members: tuple[StoredMember, ...] = ()


def partition_of(group_id: str, partition_count: int) -> int:
    """Return the partition that stores a group.

    It is |String.hashCode of Java| modulo the number of partitions, with |-2^31| = 0.
    """
    if partition_count == 1:
        return 0
    value = 0
    for (unit,) in _UNIT.iter_unpack(group_id.encode("utf-16-be", "surrogatepass")):
        value = (31 * value + unit) & 0xFFFFFFFF
    if value >= 1 << 31:  # negative as Java's int
        value = (1 << 32) - value
    if value == 1 << 31:
        return 0
    return value % partition_count


# -- writing ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=1_024)
def commit_key(group_id: str, topic: str, partition: int) -> bytes:
    """Encode the key of a commit. Keys are cached, because consumers commit repeatedly."""
    return b"\0\1" + _text(group_id) + _text(topic) + _INT.pack(partition)


def commit_value(committed: Committed) -> bytes:
    """Encode a commit: in version 1 if it has an expiry, in version 4 if it has the id of
    its topic, otherwise in version 3.

    Only version 1 has an expiry. It has neither a leader epoch nor the id of the topic.
    """
    if committed.expire_ms < 0 and committed.topic_id:
        metadata = committed.metadata.encode()
        return b"".join(
            (
                _EPOCH_HEAD.pack(_FLEXIBLE, committed.offset, committed.leader_epoch),
                varint.encode_unsigned(len(metadata) + 1),
                metadata,
                _LONG.pack(committed.commit_ms),
                _TOPIC_ID_HEAD,
                committed.topic_id,
            )
        )
    if committed.expire_ms < 0:
        head = _EPOCH_HEAD.pack(3, committed.offset, committed.leader_epoch)
        return head + _text(committed.metadata) + _LONG.pack(committed.commit_ms)
    head = _OFFSET_HEAD.pack(1, committed.offset)
    return (
        head
        + _text(committed.metadata)
        + _LONG.pack(committed.commit_ms)
        + _LONG.pack(committed.expire_ms)
    )


def group_key(group_id: str) -> bytes:
    return b"\0\2" + _text(group_id)


def group_value(group: StoredGroup) -> bytes:
    parts = [
        b"\0\3",
        _text(group.protocol_type),
        _INT.pack(group.generation),
        _text(group.protocol),
        _text(group.leader),
        _LONG.pack(group.state_ms),
        _INT.pack(len(group.members)),
    ]
    for member in group.members:
        parts += (
            _text(member.member_id),
            _text(member.instance_id),
            _text(member.client_id),
            _text(member.client_host),
            _INT.pack(member.rebalance_timeout_ms),
            _INT.pack(member.session_timeout_ms),
            _blob(member.subscription),
            _blob(member.assignment),
        )
    return b"".join(parts)


def _text(text: str | None) -> bytes:
    """Encode a string with an int16 length.

    Callers check the length of ids from clients before this function.

    Raises:
        ValueError: the text has more than 32,767 bytes.
    """
    if text is None:
        return b"\xff\xff"
    encoded = text.encode()
    if len(encoded) > 32_767:
        raise ValueError(
            f"expected a text of at most 32767 bytes, found {len(encoded)}"
        )
    return _SHORT.pack(len(encoded)) + encoded


def _blob(data: bytes) -> bytes:
    return _INT.pack(len(data)) + data


# -- reading ---------------------------------------------------------------------------


class _Fields:
    """Decodes consecutive fields. Invalid bytes raise one of _DECODE_ERRORS."""

    def __init__(self, data: bytes, *, is_flexible: bool = False) -> None:
        self.data = data
        self.at = 0
        self.is_flexible = is_flexible

    def number(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return int(value)

    def text(self) -> str:
        return _present(self.nullable_text())

    def nullable_text(self) -> str | None:
        raw = self._read_bytes(self._length(_SHORT))
        if raw is None:
            return None
        return raw.decode()

    def blob(self) -> bytes:
        return _present(self.nullable_blob())

    def nullable_blob(self) -> bytes | None:
        return self._read_bytes(self._length(_INT))

    def count(self) -> int:
        """Return the number of elements that follow.

        Each element takes at least one byte, so a loop over them ends with the data.
        """
        count = self._length(_INT)
        if count < 0:
            raise ValueError("expected an array, found null")
        return count

    def end_struct(self) -> dict[int, bytes]:
        """Return the tagged fields at the end of a struct by their tags."""
        fields: dict[int, bytes] = {}
        if self.is_flexible:
            for _ in range(self._varint()):
                tag = self._varint()
                fields[tag] = _present(self._read_bytes(self._varint()))
        return fields

    def _length(self, kind: struct.Struct) -> int:
        if self.is_flexible:
            return self._varint() - 1
        return self.number(kind)

    def _read_bytes(self, size: int) -> bytes | None:
        if size < -1:
            raise ValueError(f"expected a length of -1 or more, found {size}")
        if size > len(self.data) - self.at:
            raise ValueError(
                f"expected {size} bytes at {self.at}, found {len(self.data) - self.at}"
            )
        if size == -1:
            return None
        self.at += size
        return self.data[self.at - size : self.at]

    def _varint(self) -> int:
        value, self.at = varint.decode_unsigned(self.data, self.at)
        return value


def _present(value: _T | None) -> _T:
    if value is None:
        raise ValueError("expected a value, found null")
    return value


def _understood(read: Callable[[bytes], _T], data: bytes) -> _T | None:
    try:
        return read(data)
    except _DECODE_ERRORS:
        return None


def read_key(key: bytes) -> CommitKey | str | None:
    """Decode the key of a record to the key of a commit or the id of a group."""
    return _understood(_read_key, key)


def read_commit(value: bytes) -> Committed | None:
    return _understood(_read_commit, value)


def read_group(value: bytes) -> StoredGroup | None:
    return _understood(_read_group, value)


def _read_key(key: bytes) -> CommitKey | str | None:
    """Decode a key.

    This function and _read_commit track positions themselves, because a starting broker
    may read a million of these records.
    """
    version = key[:2]
    if version == b"\0\2":
        return _text_at(key, 2)[0]
    if version not in (b"\0\0", b"\0\1"):
        return None
    group_id, at = _text_at(key, 2)
    topic, at = _text_at(key, at)
    (partition,) = _INT.unpack_from(key, at)
    return CommitKey(group_id, topic, partition)


def _text_at(data: bytes, at: int) -> tuple[str, int]:
    (size,) = _SHORT.unpack_from(data, at)
    stop = at + 2 + size
    if size < 0 or stop > len(data):
        raise ValueError(f"expected a text at {at}, found {size} bytes of {len(data)}")
    return str(data[at + 2 : stop], "utf-8"), stop


def _read_commit(value: bytes) -> Committed | None:
    (version,) = _SHORT.unpack_from(value)
    head = _HEADS.get(version)
    if head is None:
        return None
    _, offset, *epoch = head.unpack_from(value)
    if version == _FLEXIBLE:
        # The form that commit_value() writes, with metadata of less than 127 bytes. The
        # general form takes three times as long.
        at = head.size + value[head.size]
        if value[head.size] < 0x80 and value[at + 8 : -16] == _TOPIC_ID_HEAD:
            metadata = str(value[head.size + 1 : at], "utf-8")
            (commit_ms,) = _LONG.unpack_from(value, at)
            topic_id = _topic_id(value[-16:])
            return Committed(offset, epoch[0], metadata, commit_ms, -1, topic_id)
        fields = _Fields(value, is_flexible=True)
        fields.at = head.size
        metadata = fields.text()
        commit_ms = fields.number(_LONG)
        topic_id = _topic_id(fields.end_struct().get(0, b""))
        return Committed(offset, epoch[0], metadata, commit_ms, -1, topic_id)
    metadata, at = _text_at(value, head.size)
    (commit_ms,) = _LONG.unpack_from(value, at)
    leader_epoch = -1
    if epoch:  # versions 3 and 4
        leader_epoch = epoch[0]
    expire_ms = -1
    if version == 1:
        expire_ms = _LONG.unpack_from(value, at + 8)[0]
    return Committed(offset, leader_epoch, metadata, commit_ms, expire_ms)


@functools.lru_cache(maxsize=1_024)
def _topic_id(stored: bytes) -> bytes:
    """Return the id of a topic; empty for zeros, which mean that there is none.

    Equal arguments have one result, so that a million offsets of a topic share it.
    """
    return stored if any(stored) else b""


def _read_group(value: bytes) -> StoredGroup | None:
    fields = _Fields(value)
    version = fields.number(_SHORT)
    if version not in _VERSIONS:
        return None
    fields.is_flexible = version >= _FLEXIBLE
    protocol_type = fields.text()
    generation = fields.number(_INT)
    protocol = fields.nullable_text()
    leader = fields.nullable_text()
    state_ms = -1
    if version >= 2:
        state_ms = fields.number(_LONG)
    members = tuple(_read_member(fields, version) for _ in range(fields.count()))
    fields.end_struct()
    return StoredGroup(
        protocol_type=protocol_type,
        generation=generation,
        protocol=protocol,
        leader=leader,
        state_ms=state_ms,
        members=members,
    )


def _read_member(fields: _Fields, version: int) -> StoredMember:
    """Decode a member; the fields are read in their stored order."""
    member_id = fields.text()
    instance_id = None
    if version >= 3:
        instance_id = fields.nullable_text()
    client_id = fields.text()
    client_host = fields.text()
    rebalance_timeout_ms = -1
    if version >= 1:
        rebalance_timeout_ms = fields.number(_INT)
    member = StoredMember(
        member_id=member_id,
        instance_id=instance_id,
        client_id=client_id,
        client_host=client_host,
        rebalance_timeout_ms=rebalance_timeout_ms,
        session_timeout_ms=fields.number(_INT),
        subscription=fields.blob(),
        assignment=fields.blob(),
    )
    fields.end_struct()
    return member


class Subscription(NamedTuple):
    """Metadata that a consumer sends when it joins.

    `owned` holds the (topic, partition) pairs that the consumer still has, and
    `generation` is the generation that assigned them, or -1 if it is not given.
    `rack_id` names the rack of the consumer.
    """

    topics: tuple[str, ...]
    user_data: bytes | None = None
    owned: tuple[tuple[str, int], ...] = ()
    generation: int = -1
    rack_id: str | None = None


class ProtocolAssignment(NamedTuple):
    """Assignment of a member by the group leader.

    `user_data` holds additional data of the assignor.
    """

    partitions: tuple[tuple[str, int], ...]
    user_data: bytes | None = None


def subscription_value(subscription: Subscription) -> bytes:
    """Encode a subscription as Kafka's clients send it in JoinGroup."""
    parts = [
        b"\0\3",
        _INT.pack(len(subscription.topics)),
        *map(_text, subscription.topics),
    ]
    parts.append(_nullable_blob(subscription.user_data))
    parts.append(_partitions(subscription.owned))
    parts += (_INT.pack(subscription.generation), _text(subscription.rack_id))
    return b"".join(parts)


def assignment_value(partitions: Iterable[tuple[str, int]]) -> bytes:
    """Encode the assignment of a member."""
    return b"\0\3" + _partitions(partitions) + _nullable_blob(None)


def _nullable_blob(data: bytes | None) -> bytes:
    if data is None:
        return b"\xff\xff\xff\xff"
    return _blob(data)


def _partitions(partitions: Iterable[tuple[str, int]]) -> bytes:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in partitions:
        by_topic.setdefault(topic, []).append(partition)
    parts = [_INT.pack(len(by_topic))]
    for topic, numbers in by_topic.items():
        parts += (_text(topic), _INT.pack(len(numbers)), *map(_INT.pack, numbers))
    return b"".join(parts)


def subscribed_topics(subscription: bytes) -> list[str] | None:
    """Return the topics of an encoded subscription, or None for invalid bytes."""
    found = read_subscription(subscription)
    if found is None:
        return None
    return list(found.topics)


def read_subscription(data: bytes) -> Subscription | None:
    """Decode a subscription; return None for invalid bytes.

    A newer version is decoded as the newest known version, as in Kafka's clients.
    """
    return _understood(_read_subscription, data)


def read_assignment(data: bytes) -> tuple[tuple[str, int], ...] | None:
    """Decode an assignment to (topic, partition) pairs; return None for invalid bytes.

    Empty bytes assign no partition.
    """
    found = read_whole_assignment(data)
    if found is None:
        return None
    return found.partitions


def read_whole_assignment(data: bytes) -> ProtocolAssignment | None:
    """Decode an assignment together with the additional data of the assignor."""
    if data:
        return _understood(_read_assignment, data)
    return ProtocolAssignment(())


def _read_subscription(data: bytes) -> Subscription | None:
    fields = _Fields(data)
    version = fields.number(_SHORT)
    if version < 0:
        return None
    version = min(version, _SUBSCRIPTION_VERSION)
    topics = tuple(fields.text() for _ in range(fields.count()))
    user_data = fields.nullable_blob()
    if version >= 1:
        owned = _read_partitions(fields)
    else:
        owned = ()
    generation = -1
    if version >= 2:
        generation = fields.number(_INT)
    rack_id = None
    if version >= 3:
        rack_id = fields.nullable_text()
    return Subscription(topics, user_data, owned, generation, rack_id)


def _read_assignment(data: bytes) -> ProtocolAssignment | None:
    fields = _Fields(data)
    if fields.number(_SHORT) < 0:
        return None
    return ProtocolAssignment(_read_partitions(fields), fields.nullable_blob())


def _read_partitions(fields: _Fields) -> tuple[tuple[str, int], ...]:
    found = []
    for _ in range(fields.count()):
        topic = fields.text()
        found += [(topic, fields.number(_INT)) for _ in range(fields.count())]
    return tuple(found)


def describe_group_record(
    key: bytes | None, value: bytes | None
) -> dict[str, Any] | None:
    """Return a record as a dict for JSON, or None if its version or layout is unknown.

    {"group", "topic", "partition", "committed": {"offset", "leader_epoch", "metadata",
    "commit_timestamp_ms", "expire_timestamp_ms"} or None}, or {"group", "metadata":
    {"protocol_type", "generation", "protocol", "leader", "current_state_timestamp_ms",
    "members": [...]} or None}.
    """
    name = None
    if key is not None:
        name = read_key(key)
    if name is None:
        return None
    if isinstance(name, str):
        if value is None:
            return {"group": name, "metadata": None}
        group = read_group(value)
        if group is None:
            return None
        return {"group": name, "metadata": _described_group(group)}
    place = {"group": name.group_id, "topic": name.topic, "partition": name.partition}
    if value is None:
        return {**place, "committed": None}
    committed = read_commit(value)
    if committed is None:
        return None
    return {
        **place,
        "committed": {
            "offset": committed.offset,
            "leader_epoch": committed.leader_epoch,
            "metadata": committed.metadata,
            "commit_timestamp_ms": committed.commit_ms,
            "expire_timestamp_ms": committed.expire_ms,
        },
    }


def _described_group(group: StoredGroup) -> dict[str, Any]:
    return {
        "protocol_type": group.protocol_type,
        "generation": group.generation,
        "protocol": group.protocol,
        "leader": group.leader,
        "current_state_timestamp_ms": group.state_ms,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "rebalance_timeout_ms": member.rebalance_timeout_ms,
                "session_timeout_ms": member.session_timeout_ms,
            }
            for member in group.members
        ],
    }
