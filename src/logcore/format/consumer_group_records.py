"""Encode and decode the records of groups of the consumer protocol (KIP-848) in Kafka's
`__consumer_offsets`.

Layout: a key is an int16, the kind of the record, then texts with int16 lengths: the
group, and for some kinds the member or the regular expression. A value is an int16 0,
then flexible fields: lengths are varints of length + 1, and tagged fields end each
struct. A null value deletes the record of its key.

    kind                  key              value
    GROUP         3       group            epoch, tag 0: a hash of the metadata of its topics, omitted when it is 0
    TOPICS        4       group            written by Kafka before 4.1; since then the hash replaces it
    MEMBER        5       group, member    the facts that a member sent about itself
    TARGET_EPOCH  6       group            the epoch of the group for which the targets were computed
    TARGET        7       group, member    the partitions that a member must get
    CURRENT       8       group, member    the state and the current partitions of a member
    PATTERN      16       group, pattern   the topics that match a regular expression

Rules:
- Written records equal Kafka 4.1's byte for byte, except that lists of partitions are
  sorted.
- A record with an unknown or invalid layout reads as None, without an error.

This module reads no log. The records of the classic protocol and of commits are in
group_records.py.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import attrs

from logcore.errors import InvalidRecordError
from logcore.format.varint import FieldReader, encode_unsigned


class RecordKind(enum.IntEnum):
    """Kind of a record, which is the first number of its key.

    CLASSIC is the kind of a group in group_records.py.
    """

    CLASSIC = 2
    GROUP = 3
    TOPICS = 4
    MEMBER = 5
    TARGET_EPOCH = 6
    TARGET = 7
    CURRENT = 8
    PATTERN = 16


class MemberState(enum.IntEnum):
    """State of a member, by Kafka's numbers. Other numbers mean UNKNOWN."""

    STABLE = 0
    UNREVOKED = 1
    UNRELEASED = 2
    UNKNOWN = 127


_NAMED: Final = frozenset(
    {RecordKind.MEMBER, RecordKind.TARGET, RecordKind.CURRENT, RecordKind.PATTERN}
)
_KINDS: Final = {
    int(kind): kind for kind in RecordKind if kind is not RecordKind.CLASSIC
}
#: First bytes of the known keys.
CONSUMER_KEY_VERSIONS: Final = frozenset(kind.to_bytes(2, "big") for kind in _KINDS)
_STATES: Final = {int(state): state for state in MemberState}

_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")
_EPOCHS: Final = struct.Struct(">iib")
_TIMES: Final = struct.Struct(">qq")
_ID_BYTES: Final = 16
_TEXT_BYTES: Final = 32_767
_DECODE_ERRORS: Final = (ValueError, IndexError, struct.error, InvalidRecordError)

#: The id of a topic and the number of its partition.
Partition = tuple[bytes, int]
Partitions = frozenset[Partition]


class ConsumerKey(NamedTuple):
    """Key of a record. `name` is the member or the pattern; it is empty for records of
    the group itself.
    """

    kind: RecordKind
    group_id: str
    name: str = ""


@attrs.frozen
class GroupEpoch:
    """Epoch of a group.

    `metadata_hash` is a hash of the subscribed topics, and is only compared for
    equality.
    """

    epoch: int
    metadata_hash: int = 0


@attrs.frozen
class ClassicMember:
    """Additional facts of a member of the classic protocol.

    `protocols` holds the name and the metadata of each protocol, the preferred protocol
    first.
    """

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


@attrs.frozen(kw_only=True)
class ConsumerMember:
    """Facts of a member from its own requests.

    `pattern` is a regular expression of topics. `classic` is set for a member of the
    classic protocol, in a group that migrates between the protocols.
    """

    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topic_names: tuple[str, ...] = ()
    pattern: str | None = None
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicMember | None = None


@attrs.frozen(kw_only=True)
class Current:
    """State of a member.

    `assigned` holds the partitions that the member may use. `revoking` holds the
    partitions that the member must still release. `previous_epoch` is the member epoch
    before the last change of this record.
    """

    member_epoch: int = 0
    previous_epoch: int = -1
    state: MemberState = MemberState.STABLE
    assigned: Partitions = frozenset()
    revoking: Partitions = frozenset()


@attrs.frozen
class Resolved:
    """Topics that match a pattern, at a `version` of the cluster's metadata."""

    topics: tuple[str, ...]
    version: int
    timestamp_ms: int


#: A number is the epoch of TARGET_EPOCH, and a set of partitions is a TARGET. Values of
#: TOPICS are not decoded.
ConsumerValue = (
    GroupEpoch | ConsumerMember | int | Partitions | Current | Resolved | None
)


# -- writing ---------------------------------------------------------------------------


def consumer_key(key: ConsumerKey) -> bytes:
    """Encode a key.

    Callers check the length of ids from clients before this function.

    Raises:
        ValueError: a text has more than 32,767 bytes.
    """
    data = _SHORT.pack(key.kind) + _key_text(key.group_id)
    if key.kind in _NAMED:
        return data + _key_text(key.name)
    return data


def _key_text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > _TEXT_BYTES:
        raise ValueError(
            f"expected a text of at most {_TEXT_BYTES} bytes, found {len(encoded)}"
        )
    return _SHORT.pack(len(encoded)) + encoded


def consumer_value(value: ConsumerValue) -> bytes | None:
    match value:
        case None:
            return None
        case GroupEpoch(epoch, metadata_hash):
            tags = b"\0"
            if metadata_hash:
                tags = b"\1\0" + encode_unsigned(_LONG.size) + _LONG.pack(metadata_hash)
            return b"\0\0" + _INT.pack(epoch) + tags
        case ConsumerMember():
            return b"\0\0" + _member(value)
        case int():
            return b"\0\0" + _INT.pack(value) + b"\0"
        case frozenset():
            return b"\0\0" + _partitions(value) + b"\0"
        case Current():
            head = _EPOCHS.pack(value.member_epoch, value.previous_epoch, value.state)
            return (
                b"\0\0"
                + head
                + _partitions(value.assigned)
                + _partitions(value.revoking)
                + b"\0"
            )
        case Resolved():
            times = _TIMES.pack(value.version, value.timestamp_ms)
            return b"\0\0" + _texts(value.topics) + times + b"\0"


def _member(member: ConsumerMember) -> bytes:
    parts = (
        _text(member.instance_id),
        _text(member.rack_id),
        _text(member.client_id),
        _text(member.client_host),
        _texts(member.topic_names),
        _text(member.pattern or ""),
        _INT.pack(member.rebalance_timeout_ms),
        _text(member.assignor),
        _classic(member.classic),
    )
    return b"".join(parts)


def _classic(classic: ClassicMember | None) -> bytes:
    """Encode the tagged fields of a member: tag 0 holds a nullable struct.

    The first byte of the struct is 1, or 0 for null. Tagged fields with their default
    are usually omitted, but Kafka writes the null, and so does this function.
    """
    if classic is None:
        struct_bytes = b"\0"
    else:
        parts = [
            b"\1",
            _INT.pack(classic.session_timeout_ms),
            encode_unsigned(len(classic.protocols) + 1),
        ]
        for name, metadata in classic.protocols:
            parts += (_text(name), encode_unsigned(len(metadata) + 1), metadata, b"\0")
        struct_bytes = b"".join((*parts, b"\0"))
    return b"\1\0" + encode_unsigned(len(struct_bytes)) + struct_bytes


def _text(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    encoded = text.encode()
    return encode_unsigned(len(encoded) + 1) + encoded


def _texts(texts: Iterable[str]) -> bytes:
    all_texts = [*texts]
    return b"".join((encode_unsigned(len(all_texts) + 1), *map(_text, all_texts)))


def _partitions(partitions: Partitions) -> bytes:
    by_topic: dict[bytes, list[int]] = {}
    for topic_id, number in sorted(partitions):
        by_topic.setdefault(topic_id, []).append(number)
    parts = [encode_unsigned(len(by_topic) + 1)]
    for topic_id, numbers in by_topic.items():
        parts += (
            topic_id,
            encode_unsigned(len(numbers) + 1),
            *map(_INT.pack, numbers),
            b"\0",
        )
    return b"".join(parts)


# -- reading ---------------------------------------------------------------------------


def read_consumer_key(key: bytes) -> ConsumerKey | None:
    """Decode a key; return None for another kind of record and for invalid bytes."""
    try:
        (kind,) = _SHORT.unpack_from(key)
        record_kind = _KINDS.get(kind)
        if record_kind is None:
            return None
        fields = _RecordFields(key, _SHORT.size)
        group_id = fields.key_text()
        name = ""
        if record_kind in _NAMED:
            name = fields.key_text()
        return ConsumerKey(record_kind, group_id, name)
    except _DECODE_ERRORS:
        return None


def read_consumer_value(kind: RecordKind, value: bytes) -> ConsumerValue:
    """Decode a value; return None for an unknown layout, and for every value of TOPICS."""
    try:
        if value[:2] != b"\0\0":
            return None
        return _read(kind, _RecordFields(value, _SHORT.size))
    except _DECODE_ERRORS:
        return None


def _read(kind: RecordKind, fields: _RecordFields) -> ConsumerValue:
    match kind:
        case RecordKind.GROUP:
            epoch = fields.number(_INT)
            hash_bytes = fields.tags().get(0)
            metadata_hash = 0
            if hash_bytes is not None:
                (metadata_hash,) = _LONG.unpack(hash_bytes)
            return GroupEpoch(epoch, metadata_hash)
        case RecordKind.MEMBER:
            return _read_member(fields)
        case RecordKind.TARGET_EPOCH:
            return fields.number(_INT)
        case RecordKind.TARGET:
            return fields.partitions()
        case RecordKind.CURRENT:
            member_epoch = fields.number(_INT)
            previous_epoch = fields.number(_INT)
            state = fields.byte()
            assigned = fields.partitions()
            return Current(
                member_epoch=member_epoch,
                previous_epoch=previous_epoch,
                state=_STATES.get(state, MemberState.UNKNOWN),
                assigned=assigned,
                revoking=fields.partitions(),
            )
        case RecordKind.PATTERN:
            return Resolved(fields.texts(), fields.number(_LONG), fields.number(_LONG))
        case RecordKind.CLASSIC | RecordKind.TOPICS:
            return None


def _read_member(fields: _RecordFields) -> ConsumerMember:
    """Decode a member; Python evaluates the arguments in the stored order of the fields."""
    return ConsumerMember(
        instance_id=fields.nullable_text(),
        rack_id=fields.nullable_text(),
        client_id=fields.text(),
        client_host=fields.text(),
        topic_names=fields.texts(),
        pattern=fields.nullable_text() or None,
        rebalance_timeout_ms=fields.number(_INT),
        assignor=fields.nullable_text(),
        classic=_read_classic(fields.tags().get(0, b"\0")),
    )


def _read_classic(data: bytes) -> ClassicMember | None:
    fields = _RecordFields(data, 0)
    if not fields.byte():
        return None
    session_timeout_ms = fields.number(_INT)
    return ClassicMember(session_timeout_ms, fields.protocols())


def describe_consumer_record(
    key: bytes | None, value: bytes | None
) -> dict[str, Any] | None:
    """Return a record as a dict for JSON, or None if its kind or layout is unknown.

    The keys are "group", "kind" (a name of RecordKind in lower case), "name" (the member
    or the pattern), and "value" (the fields, or None). Partitions are lists by topic id.
    Classic protocols are included by name only, without their metadata.
    """
    decoded_key = None
    if key is not None:
        decoded_key = read_consumer_key(key)
    if decoded_key is None:
        return None
    found: dict[str, Any] = {
        "group": decoded_key.group_id,
        "kind": decoded_key.kind.name.lower(),
    }
    if decoded_key.kind in _NAMED:
        found["name"] = decoded_key.name
    if value is None:
        return {**found, "value": None}
    fields = read_consumer_value(decoded_key.kind, value)
    if fields is None:
        return None
    return {**found, "value": _json_value(fields)}


def _json_value(value: Any) -> Any:
    match value:
        case frozenset():
            partitions: dict[str, list[int]] = {}
            for topic_id, number in sorted(value):
                partitions.setdefault(topic_id.hex(), []).append(number)
            return partitions
        case MemberState():
            return value.name.lower()
        case ClassicMember(session_timeout_ms, protocols):
            return {
                "session_timeout_ms": session_timeout_ms,
                "protocols": [name for name, _ in protocols],
            }
        case GroupEpoch() | ConsumerMember() | Current() | Resolved():
            return {
                field.name: _json_value(getattr(value, field.name))
                for field in attrs.fields(type(value))
            }
        case tuple():
            return list(value)
        case _:
            return value


class _RecordFields(FieldReader):
    """Decodes a record. Invalid bytes raise one of _DECODE_ERRORS."""

    def number(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return int(value)

    def byte(self) -> int:
        return self.read_bytes(1)[0]

    def key_text(self) -> str:
        return str(self.read_bytes(self.number(_SHORT)), "utf-8")

    def nullable_text(self) -> str | None:
        size = self.varint() - 1
        if size < 0:
            return None
        return str(self.read_bytes(size), "utf-8")

    def text(self) -> str:
        return str(self.read_bytes(self.varint() - 1), "utf-8")

    def _count(self) -> int:
        """Return the number of elements that follow.

        Each element takes at least one byte, so a loop over them ends with the data.
        """
        count = self.varint() - 1
        if count < 0:
            raise ValueError("expected an array, found null")
        return count

    def texts(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self._count()))

    def protocols(self) -> tuple[tuple[str, bytes], ...]:
        found = []
        for _ in range(self._count()):
            name = self.text()
            found.append((name, self.read_bytes(self.varint() - 1)))
            self.tags()
        return tuple(found)

    def partitions(self) -> Partitions:
        found = []
        for _ in range(self._count()):
            topic_id = self.read_bytes(_ID_BYTES)
            found += [(topic_id, self.number(_INT)) for _ in range(self._count())]
            self.tags()
        return frozenset(found)

    def tags(self) -> dict[int, bytes]:
        found = {}
        for _ in range(self.varint()):
            tag = self.varint()
            found[tag] = self.read_bytes(self.varint())
        return found
