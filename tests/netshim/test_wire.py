"""The wire codec compared with other codecs: same values, same bytes, in both
directions, for every version that is served.

Goal: each byte is equal to the bytes of kio, kafka-python and aiokafka, except for
their errors, which are listed here. Method: values are drawn from our table with fixed
seeds, and converted to the classes of the other codec by field name (aiokafka: by
position). Behavior that no other codec can check (tolerance, hostile bytes, views) is
tested separately.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import random
import struct
import subprocess
import sys
import tracemalloc
import typing
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from logcore.errors import LogcoreError
from netshim import wire
from netshim.wire import messages
from netshim.wire.codec import Message
from netshim.wire.fields import Field, Struct
from support import group_messages
from support.messages import DATA, MESSAGES, draw, encode

VERSIONED = [
    (m, version)
    for m in MESSAGES
    for version in range(m.min_version, m.max_version + 1)
]
EXAMPLES = 4  # values per message, version and oracle

#: The messages that each oracle has checked in this process. The tests of one file may
#: run in several processes.
TRIED: dict[str, set[Message]] = {"kio": set(), "kafka-python": set()}
COMPARED: dict[str, set[tuple[Message, int]]] = {
    "kio": set(),
    "kafka-python": set(),
    "aiokafka": set(),
}


def examples(message: Message, version: int, tame: bool = False) -> Iterator[Any]:
    yield draw(
        message.schema, version, message.is_flexible(version), random.Random(0), tame
    )
    for number in range(1, EXAMPLES):
        rng = random.Random(f"{message!r} {version} {number}")
        yield draw(message.schema, version, message.is_flexible(version), rng, tame)


# --- kio ------------------------------------------------------------------------------


def kio_class(message: Message, version: int) -> Any:
    """Return kio's class for a message in a version, or None if it has none."""
    index = pytest.importorskip("kio.index")
    kinds = index.EntityType
    kind = {"": kinds.data, "request": kinds.request, "response": kinds.response}[
        message.kind
    ]
    name = "".join("_" + c.lower() if c.isupper() else c for c in message.name).lstrip(
        "_"
    )
    try:
        return index.load_entity_schema(name, version, kind)
    except index.UnknownEntity:
        return None


def to_kio(cls: Any, value: Any) -> Any:
    hints = typing.get_type_hints(cls)
    content = {}
    for field in dataclasses.fields(cls):
        name = field.name if hasattr(value, field.name) else f"{field.name}_ms"
        content[field.name] = kio_content(
            hints[field.name], field.metadata.get("kafka_type"), getattr(value, name)
        )
    return cls(**content)


def kio_content(hint: Any, kind: str | None, value: Any) -> Any:
    from kio.schema.errors import ErrorCode

    if isinstance(value, list):
        return tuple(kio_content(hint, kind, element) for element in value)
    if value is None:
        return None
    if kind is None:
        return to_kio(dataclass_in(hint), value)
    if kind == "error_code":
        return ErrorCode(value)
    if kind.startswith("timedelta"):
        return datetime.timedelta(milliseconds=value)
    if kind == "datetime_i64":
        optional = type(None) in typing.get_args(hint)
        return (
            None
            if value == -1 and optional
            else datetime.datetime.fromtimestamp(value / 1000, datetime.UTC)
        )
    if kind == "uuid":
        return uuid.UUID(bytes=value) if any(value) else None
    return value


def dataclass_in(hint: Any) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    return next(
        (found for part in typing.get_args(hint) if (found := dataclass_in(part))), None
    )


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_same_bytes_as_kio(message: Message) -> None:
    TRIED["kio"].add(message)
    serial = pytest.importorskip("kio.serial")
    for version in range(message.min_version, message.max_version + 1):
        cls = kio_class(message, version)
        if cls is None:
            continue
        for value in examples(message, version, tame=True):
            kio_value = to_kio(cls, value)
            buffer = io.BytesIO()
            serial.entity_writer(cls)(buffer, kio_value)
            ours = encode(message, version, value)
            assert ours == buffer.getvalue(), (version, value)
            assert serial.entity_reader(cls)(ours, 0) == (kio_value, len(ours))
            assert message.decode(version, buffer.getvalue()) == value
            COMPARED["kio"].add((message, version))


@pytest.mark.slow
@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_same_bytes_as_kio_for_many_values(
    message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "EXAMPLES", 200)
    test_same_bytes_as_kio(message)


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_same_defaults_as_kio(message: Message) -> None:
    def compare(cls: Any, shape: Struct) -> None:
        hints = typing.get_type_hints(cls)
        value = shape.cls()
        by_name = {field.name: field for field in shape.fields}
        for field in dataclasses.fields(cls):
            ours = by_name.get(field.name) or by_name[f"{field.name}_ms"]
            if field.default is not dataclasses.MISSING:
                kio_default = kio_content(
                    hints[field.name],
                    field.metadata.get("kafka_type"),
                    getattr(value, ours.name),
                )
                assert kio_default == field.default, (cls, field.name)
            if ours.struct:
                compare(dataclass_in(hints[field.name]), ours.struct)

    for version in range(message.min_version, message.max_version + 1):
        if (cls := kio_class(message, version)) is not None:
            compare(cls, message.schema)


# --- kafka-python ---------------------------------------------------------------------

# kafka-python 3 represents some messages differently from Kafka's schemas. The bytes are
# the same.
#
# - The authorized operations are sets of bit numbers, and two of these fields have
#   shorter names.
# - Its consumer protocol messages include the version that precedes them.
# - A tagged field is written if it was given, even as the default. Kafka, kio and netshim
#   leave defaults out, so kafka-python gets only the other fields.
# - A response to ApiVersions with any error is read as version 0, so the errors drawn
#   for it are all 0.
OPERATIONS = {
    "Metadata": {
        "topic_authorized_operations": "authorized_operations",
        "cluster_authorized_operations": "authorized_operations",
    },
    "DescribeCluster": {"cluster_authorized_operations": "authorized_operations"},
    "DescribeGroups": {"authorized_operations": "authorized_operations"},
}
_UNSET = -(2**31)


def kafka_python_class(message: Message) -> Any:
    protocol = pytest.importorskip("kafka.protocol")
    import kafka.protocol.admin
    import kafka.protocol.consumer
    import kafka.protocol.metadata
    import kafka.protocol.producer
    import kafka.protocol.sasl  # noqa: F401

    name = message.name + message.kind.capitalize()
    packages = (
        protocol.consumer,
        protocol.producer,
        protocol.metadata,
        protocol.admin,
        protocol.sasl,
    )
    return next(
        (getattr(package, name) for package in packages if hasattr(package, name)), None
    )


class KafkaPython:
    """Converts values of one message and version to kafka-python's objects and back."""

    def __init__(self, message: Message, version: int) -> None:
        self.version = version
        self.flexible = message.is_flexible(version)
        self.operations = (
            OPERATIONS.get(message.name, {}) if message.kind == "response" else {}
        )

    def fields(self, shape: Struct) -> list[Field]:
        return shape.untagged(self.version) + (
            shape.tagged(self.version) if self.flexible else []
        )

    def there(self, fields: Any, shape: Struct, value: Any) -> dict[str, Any]:
        by_name = {field.name: field for field in fields}
        default = shape.cls()
        content = {}
        for field in self.fields(shape):
            content_of = getattr(value, field.name)
            if field.tag is None or content_of != getattr(default, field.name):
                name = self.operations.get(field.name, field.name)
                content[name] = self.one_there(by_name[name], field, content_of)
        return content

    def one_there(self, kafka_field: Any, field: Field, value: Any) -> Any:
        if isinstance(value, list):
            return [self.one_there(kafka_field, field, element) for element in value]
        if field.struct and value is not None:
            return kafka_field.data_class(
                version=self.version,
                **self.there(kafka_field.fields.values(), field.struct, value),
            )
        if field.name in self.operations:
            return {bit for bit in range(32) if value >> bit & 1}
        if field.type == "uuid":
            return uuid.UUID(bytes=value) if any(value) else None
        return value

    def back(self, shape: Struct, decoded: Any) -> Any:
        value = shape.cls()
        for field in self.fields(shape):
            if field.tag is None or field.name in (decoded.tags or ()):
                content = getattr(decoded, self.operations.get(field.name, field.name))
                setattr(value, field.name, self.one_back(field, content))
        return value

    def one_back(self, field: Field, value: Any) -> Any:
        if isinstance(value, list):
            return [self.one_back(field, element) for element in value]
        if field.name in self.operations:
            bits = sum(1 << bit for bit in value) if value is not None else 2**31
            return bits - 2**32 if bits >= 2**31 else bits
        if field.type == "uuid":
            return value.bytes if value else bytes(16)
        return (
            self.back(field.struct, value)
            if field.struct and value is not None
            else value
        )


@pytest.mark.long
@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_same_bytes_as_kafka_python(message: Message) -> None:
    TRIED["kafka-python"].add(message)
    cls = kafka_python_class(message)
    if cls is None:
        pytest.skip("kafka-python has no such message")
    is_request_or_response = bool(message.kind)
    last = cls.max_version if is_request_or_response else message.max_version
    for version in range(message.min_version, min(message.max_version, last) + 1):
        carry = KafkaPython(message, version)
        for value in examples(message, version):
            if message is wire.API_VERSIONS.response:
                value.error_code = 0
            kafka_python_message = cls(
                version=version,
                **carry.there(cls._struct.fields.values(), message.schema, value),
            )
            encoded = bytes(kafka_python_message.encode(version=version))
            ours = encode(message, version, value)
            if not is_request_or_response:
                ours = wire.encode_versioned(message, version, value)
                encoded = encoded[2:]
                ours = ours[2:]
                assert (
                    carry.back(
                        message.schema, cls.decode(struct.pack(">h", version) + ours)
                    )
                    == value
                )
            else:
                assert (
                    carry.back(message.schema, cls.decode(ours, version=version))
                    == value
                )
            assert ours == encoded, (version, value)
            assert message.decode(version, encoded) == value
            COMPARED["kafka-python"].add((message, version))


# --- aiokafka -------------------------------------------------------------------------


def aiokafka_schemas() -> dict[tuple[Message, int], Any]:
    """Return aiokafka's hand-written schemas of the served versions that are not
    flexible.
    """
    api = pytest.importorskip("aiokafka.protocol.api")
    for module in (
        "admin",
        "commit",
        "coordination",
        "fetch",
        "group",
        "metadata",
        "offset",
        "produce",
        "transaction",
    ):
        pytest.importorskip(f"aiokafka.protocol.{module}")
    schemas = {}
    for cls in api.RequestStruct.__subclasses__():
        ours = wire.APIS.get(cls.API_KEY)
        if ours is None or ours.is_flexible(cls.API_VERSION):
            continue
        if ours.min_version <= cls.API_VERSION <= ours.max_version:
            schemas[ours.request, cls.API_VERSION] = cls.SCHEMA
            schemas[ours.response, cls.API_VERSION] = cls.RESPONSE_TYPE.SCHEMA
    return schemas


def by_position(shape: Struct, version: int, value: Any) -> tuple[Any, ...]:
    def of_field(field: Field, content: Any) -> Any:
        if isinstance(content, list):
            return [of_field(field, element) for element in content]
        return (
            by_position(field.struct, version, content)
            if field.struct and content is not None
            else content
        )

    return tuple(
        of_field(field, getattr(value, field.name)) for field in shape.untagged(version)
    )


# Schemas of aiokafka 0.14 that differ from Kafka's. In all of these, kio and
# kafka-python agree with netshim.
AIOKAFKA_DIFFERS = {
    (
        "DescribeGroups",
        "response",
        3,
    ): "the request names the response of version 2, without authorized operations",
    (
        "ListOffsets",
        "request",
        4,
    ): "current_leader_epoch as int64 where Kafka has int32",
    (
        "ListOffsets",
        "request",
        5,
    ): "current_leader_epoch as int64 where Kafka has int32",
    (
        "CreatePartitions",
        "request",
        0,
    ): "same bytes, other nesting: count and assignments are a struct of their own",
    (
        "CreatePartitions",
        "request",
        1,
    ): "same bytes, other nesting: count and assignments are a struct of their own",
}


def test_same_bytes_as_aiokafka() -> None:
    for (message, version), schema in aiokafka_schemas().items():
        if (message.name, message.kind, version) in AIOKAFKA_DIFFERS:
            continue
        for value in examples(message, version):
            ours = encode(message, version, value)
            items = by_position(message.schema, version, value)
            # kio's items are names of topics; ours are structs with one name.
            if message is wire.METADATA.request:
                items = (items[0] and [name for (name,) in items[0]], *items[1:])
            assert schema.encode(items) == ours, (message, version, value)
            assert tuple(schema.decode(io.BytesIO(ours))) == items, (message, version)
            COMPARED["aiokafka"].add((message, version))


def test_oracles_have_checked_every_version_that_they_support() -> None:
    """Check the extent of the comparisons, after them, so that a silent skip does not
    count as agreement.
    """
    if not all(COMPARED.values()) or any(
        tried != set(MESSAGES) for tried in TRIED.values()
    ):
        pytest.skip(
            "needs the three oracles and a run of the whole file in one process"
        )
    without = {
        name
        for (m, v) in VERSIONED
        if (m, v) not in COMPARED["kio"]
        for name in [m.name]
    }
    # kio has the consumer protocol, but no record of a coordinator.
    assert without <= {message.name for message in DATA}
    counts = {name: len(versions) for name, versions in COMPARED.items()}
    assert counts == {"kio": 466, "kafka-python": 458, "aiokafka": 155}


# --- records of the coordinators: bytes that Kafka wrote ------------------------------

V = group_messages.GROUP_METADATA_VALUE
COORDINATOR = [
    (
        group_messages.OFFSET_COMMIT_KEY,
        1,
        "0001 0003 677270 0006 6f7264657273 00000000",
        {"group": "grp", "topic": "orders"},
    ),
    (
        group_messages.OFFSET_COMMIT_VALUE,
        3,
        "0003 000000000000001d 00000004 0001 6d 0000018bcfe56800",
        {
            "offset": 29,
            "leader_epoch": 4,
            "metadata": "m",
            "commit_timestamp": 1_700_000_000_000,
        },
    ),
    (
        group_messages.OFFSET_COMMIT_VALUE,
        4,
        "0004 000000000000001d 00000004 02 6d 0000018bcfe56800 00",
        {
            "offset": 29,
            "leader_epoch": 4,
            "metadata": "m",
            "commit_timestamp": 1_700_000_000_000,
        },
    ),
    (group_messages.GROUP_METADATA_KEY, 2, "0002 0003 677270", {"group": "grp"}),
    (
        V,
        3,
        "0003 0008 636f6e73756d6572 00000001 0005 72616e6765 0002 6d31 0000018bcfe56800 00000001 0002 6d31 ffff"
        "0001 63 000a 2f3132372e302e302e31 0000ea60 0000afc8 00000002 0001 00000001 02",
        {
            "protocol_type": "consumer",
            "generation": 1,
            "protocol": "range",
            "leader": "m1",
            "current_state_timestamp": 1_700_000_000_000,
            "members": [
                V.Value.Member(
                    member_id="m1",
                    client_id="c",
                    client_host="/127.0.0.1",
                    rebalance_timeout=60_000,
                    session_timeout=45_000,
                    subscription=b"\0\1",
                    assignment=b"\2",
                )
            ],
        },
    ),
    (
        wire.TRANSACTION_LOG_KEY,
        0,
        "0000 0005 74786e2d31",
        {"transactional_id": "txn-1"},
    ),
    (
        wire.TRANSACTION_LOG_VALUE,
        0,
        "0000 0000000000000fa0 0007 0000ea60 01 00000001 0006 6f7264657273 00000002 00000000 00000001"
        "0000018bcfe56801 0000018bcfe56800",
        {
            "producer_id": 4000,
            "producer_epoch": 7,
            "transaction_timeout_ms": 60_000,
            "transaction_status": 1,
            "transaction_partitions": [
                wire.TRANSACTION_LOG_VALUE.Value.Topic(
                    topic="orders", partition_ids=[0, 1]
                )
            ],
            "transaction_last_update_timestamp_ms": 1_700_000_000_001,
            "transaction_start_timestamp_ms": 1_700_000_000_000,
        },
    ),
]


@pytest.mark.parametrize(
    ("message", "version", "text", "content"), COORDINATOR, ids=repr
)
def test_coordinator_records_are_those_of_kafka(
    message: Message, version: int, text: str, content: Any
) -> None:
    value = message.Value(**content)
    written = bytes.fromhex(text)
    assert wire.encode_versioned(message, version, value) == written
    assert wire.decode_versioned(message, written) == (version, value)


def test_tags_of_the_transaction_log_come_last() -> None:
    value = wire.TRANSACTION_LOG_VALUE.Value(
        previous_producer_id=3999, client_transaction_version=2
    )
    written = wire.encode_versioned(wire.TRANSACTION_LOG_VALUE, 1, value)
    assert written.endswith(bytes.fromhex("02 00 08 0000000000000f9f 02 02 0002"))
    assert wire.decode_versioned(wire.TRANSACTION_LOG_VALUE, written) == (1, value)


def test_a_newer_consumer_protocol_is_read_as_the_newest_known() -> None:
    message = wire.CONSUMER_PROTOCOL_SUBSCRIPTION
    value = message.Value(topics=["a"], rack_id="r")
    newer = struct.pack(">h", 9) + wire.encode_data(message, 3, value) + b"more"
    assert wire.decode_versioned(message, newer) == (9, value)
    with pytest.raises(wire.UnsupportedVersionError):
        wire.decode_versioned(
            group_messages.OFFSET_COMMIT_VALUE, struct.pack(">h", 9) + bytes(40)
        )


# --- types ----------------------------------------------------------------------------


def test_the_types_of_messages_are_those_of_the_table() -> None:
    """Type checkers read stubs instead of the table. `python tools/wire_stubs.py`
    writes them.
    """
    script = Path(__file__).resolve().parents[2] / "tools" / "wire_stubs.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert messages.FetchRequest is wire.FETCH.Request
    assert messages.TransactionLogKey is wire.TRANSACTION_LOG_KEY.Value
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = messages.Nonsense  # type: ignore[attr-defined]


# --- round trip, frames, tolerance ----------------------------------------------------


@pytest.mark.long
@hypothesis.settings(max_examples=300)
@hypothesis.given(st.sampled_from(VERSIONED), st.randoms(use_true_random=False))
def test_round_trip(which: tuple[Message, int], rng: random.Random) -> None:
    message, version = which
    value = draw(message.schema, version, message.is_flexible(version), rng)
    assert message.decode(version, encode(message, version, value)) == value


@pytest.mark.parametrize("api", wire.APIS.values(), ids=repr)
def test_frames_round_trip(api: wire.Api) -> None:
    for version in range(api.min_version, api.max_version + 1):
        request = next(examples(api.request, version))
        response = next(examples(api.response, version))
        frame = wire.encode_request(api, version, -5, "cliént", request)
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        header = wire.decode_header(memoryview(frame)[4:])
        assert (header.api_key, header.api_version) == (api.key, version)
        assert (header.correlation_id, header.client_id) == (-5, "cliént")
        assert wire.decode_request(header, memoryview(frame)[4:]) == request
        response_frame = b"".join(
            wire.encode_response(api, version, 2**31 - 1, response)
        )
        assert int.from_bytes(response_frame[:4], "big") == len(response_frame) - 4
        assert wire.decode_response(api, version, memoryview(response_frame)[4:]) == (
            2**31 - 1,
            response,
        )


def test_client_id_has_an_int16_length_even_in_flexible_requests() -> None:
    frame = wire.encode_request(wire.METADATA, 12, 1, "me", wire.METADATA.Request())[4:]
    assert frame[:13] == bytes.fromhex("0003 000c 00000001 0002 6d65 00")
    null = wire.encode_request(wire.METADATA, 1, 1, None, wire.METADATA.Request())[4:]
    assert null[8:10] == b"\xff\xff"
    assert wire.decode_header(memoryview(null)).client_id == ""


@pytest.mark.parametrize("version", range(5))
def test_api_versions_is_answered_under_the_oldest_header(version: int) -> None:
    (frame,) = wire.encode_response(
        wire.API_VERSIONS, version, 7, wire.API_VERSIONS.Response(error_code=35)
    )
    assert frame[4:10] == bytes.fromhex("00000007 0023")


@pytest.mark.parametrize("version", [-1, 5, 127])
def test_api_versions_of_an_unserved_version_still_has_a_header(version: int) -> None:
    frame = struct.pack(">hhih", 18, version, 9, 1) + b"c" + b"\xff" * 5
    header = wire.decode_header(memoryview(frame))
    assert (header.api_version, header.correlation_id, header.client_id) == (
        version,
        9,
        "c",
    )
    with pytest.raises(wire.UnsupportedVersionError):
        wire.decode_request(header, memoryview(frame))


def test_produce_is_advertised_from_0_and_refused_below_3() -> None:
    assert (wire.PRODUCE.advertised_min, wire.PRODUCE.min_version) == (0, 3)
    with pytest.raises(wire.UnsupportedVersionError, match="Produce") as caught:
        wire.decode_header(memoryview(struct.pack(">hhih", 0, 2, 9, -1)))
    assert caught.value.header is not None
    assert caught.value.header.correlation_id == 9


def test_metadata_of_librdkafka_with_three_bytes_too_many() -> None:
    """librdkafka 2.16 reserves four bytes for the count of a compact array. For "all
    topics", three of them remain.
    """
    frame = wire.encode_request(
        wire.METADATA, 13, 1, "rdkafka", wire.METADATA.Request(topics=None)
    )[4:] + bytes(3)
    request = wire.decode_request(
        wire.decode_header(memoryview(frame)), memoryview(frame)
    )
    assert request == wire.METADATA.Request(topics=None)


def test_unknown_tagged_fields_are_skipped() -> None:
    """A newer client may add tagged fields anywhere: to the header, beside known tags,
    or to a struct without any.
    """
    request = wire.FETCH.Request(cluster_id="c")
    plain = wire.encode_request(wire.FETCH, 12, 1, "", request)[4:]
    assert plain.endswith(bytes.fromhex("01 00 02 0263"))
    head = plain[:11]
    body = plain[11:-5]
    more = bytes.fromhex("03 00 02 0263 07 00 8101 82 01".replace(" ", "")) + bytes(130)
    frame = head[:-1] + bytes.fromhex("01 05 02 abcd") + body + more
    header = wire.decode_header(memoryview(frame))
    assert wire.decode_request(header, memoryview(frame)) == request
    # Heartbeat v4, tags 9 and 100.
    response_frame = bytes.fromhex("00000001 00 00000000 0000 02 09 03 aabbcc 64 00")
    assert wire.decode_response(wire.HEARTBEAT, 4, response_frame) == (
        1,
        wire.HEARTBEAT.Response(),
    )


def test_a_nullable_struct() -> None:
    Request = wire.DESCRIBE_TOPIC_PARTITIONS.Request
    message = wire.DESCRIBE_TOPIC_PARTITIONS.request
    assert encode(message, 0, Request()) == bytes.fromhex("01 000007d0 ff 00")
    value = Request(cursor=Request.Cursor(topic_name="t", partition_index=2))
    assert encode(message, 0, value) == bytes.fromhex(
        "01 000007d0 01 0274 00000002 00 00"
    )
    assert message.decode(0, encode(message, 0, value)) == value


def test_records_are_not_copied() -> None:
    Request = wire.PRODUCE.Request
    Response = wire.FETCH.Response
    stored = bytes(1000)
    topic = Request.Topic(
        name="t", partition_data=[Request.Topic.Partition(records=stored)]
    )
    frame = memoryview(
        wire.encode_request(wire.PRODUCE, 9, 1, "", Request(topic_data=[topic]))
    )[4:]
    records = (
        wire.decode_request(wire.decode_header(frame), frame)
        .topic_data[0]
        .partition_data[0]
        .records
    )
    assert isinstance(records, memoryview)
    assert records.obj is frame.obj

    views = [memoryview(stored)[:10], memoryview(stored)[10:]]
    for given in (stored, views[0], views, tuple(views), b"", []):
        partitions = [
            Response.Topic.Partition(records=given),
            Response.Topic.Partition(records=b"end"),
        ]
        response = Response(
            responses=[Response.Topic(topic="t", partitions=partitions)]
        )
        pieces = wire.encode_response(wire.FETCH, 12, 1, response)
        buffers = list(given) if isinstance(given, list | tuple) else [given]
        for buffer in buffers:
            assert not len(buffer) or any(piece is buffer for piece in pieces)
        whole = b"".join(pieces)
        assert int.from_bytes(whole[:4], "big") == len(whole) - 4
        _, read = wire.decode_response(wire.FETCH, 12, whole[4:])
        assert [p.records for p in read.responses[0].partitions] == [
            b"".join(buffers),
            b"end",
        ]


def test_values_are_created_by_keyword_with_schema_defaults() -> None:
    Partition = wire.FETCH.Response.Topic.Partition
    assert Partition(high_watermark=5) == Partition(
        high_watermark=5, log_start_offset=-1
    )
    assert (
        repr(Partition(high_watermark=5))
        == "Fetch.Response.Topic.Partition(high_watermark=5)"
    )
    assert wire.FETCH.Response().responses is not wire.FETCH.Response().responses
    with pytest.raises(AttributeError, match="assign a new one"):
        Partition().current_leader.leader_id = 3  # shared by all values
    with pytest.raises(TypeError):
        Partition(offset=1)


def test_a_value_that_does_not_fit_names_its_field() -> None:
    Response = wire.PRODUCE.Response
    bad = Response(
        responses=[
            Response.Topic(
                name="t", partition_responses=[Response.Topic.Partition(index=2**40)]
            )
        ]
    )
    with pytest.raises(
        ValueError, match=r"Produce v9 response, responses\.partition_responses"
    ):
        wire.encode_response(wire.PRODUCE, 9, 1, bad)
    with pytest.raises(ValueError, match="Metadata v0 request, topics"):
        wire.encode_request(wire.METADATA, 0, 1, "", wire.METADATA.Request(topics=None))


def test_codes_have_names() -> None:
    assert wire.codes.name(wire.codes.NOT_COORDINATOR) == "NOT_COORDINATOR"
    assert wire.codes.name(999) == "error 999"
    errors = pytest.importorskip("kio.schema.errors")
    assert {
        code.value: code.name.upper() for code in errors.ErrorCode
    } == wire.codes.NAMES


# --- hostile bytes --------------------------------------------------------------------


def decodes_or_refuses(message: Message, version: int, data: bytes) -> None:
    try:
        message.decode(version, data)
    except wire.ProtocolError as error:
        assert message.name in str(error)


def test_protocol_error_contains_the_field_and_the_position() -> None:
    frame = bytearray(
        wire.encode_request(wire.METADATA, 1, 1, "me", wire.METADATA.Request())[4:]
    )
    frame[12:16] = struct.pack(">i", 1_000_000)
    header = wire.decode_header(memoryview(frame))
    with pytest.raises(wire.ProtocolError) as caught:
        wire.decode_request(header, memoryview(frame))
    assert isinstance(caught.value, LogcoreError)
    text = "position 16: Metadata v1 request, topics: an array of 1000000 elements (expected 0 to 0, found 1000000)"
    assert str(caught.value) == text


@pytest.mark.parametrize(("message", "version"), VERSIONED, ids=str)
def test_every_truncated_frame_is_refused(message: Message, version: int) -> None:
    data = encode(
        message,
        version,
        draw(message.schema, version, message.is_flexible(version), random.Random(7)),
    )
    for cut in range(len(data)):
        with pytest.raises(wire.ProtocolError):
            message.decode(version, data[:cut])


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_random_changes_are_refused_or_read(message: Message) -> None:
    rng = random.Random(repr(message))
    versions = range(message.min_version, message.max_version + 1)
    for _ in range(150):
        version = rng.choice(versions)
        data = bytearray(
            encode(
                message,
                version,
                draw(message.schema, version, message.is_flexible(version), rng),
            )
        )
        for _ in range(rng.choice((1, 1, 2, 8))):
            if data:
                position = rng.randrange(len(data))
                new = rng.choice(
                    (
                        b"\xff",
                        b"\x80",
                        b"\x7f\xff\xff\xff",
                        b"\xff" * 5,
                        rng.randbytes(1),
                        b"",
                    )
                )
                data[position : position + rng.choice((1, len(new)))] = new
        decodes_or_refuses(message, version, bytes(data))


@hypothesis.given(
    st.binary(max_size=60), st.sampled_from(sorted(wire.APIS)), st.integers(-1, 20)
)
def test_random_headers_are_refused_or_read(
    content: bytes, api_key: int, version: int
) -> None:
    frame = memoryview(struct.pack(">hh", api_key, version) + content)
    try:
        header = wire.decode_header(frame)
    except wire.ProtocolError:
        return
    assert (header.api_key, header.api_version) == (api_key, version)
    assert api_key == wire.API_VERSIONS.key or header.body_start <= len(frame)


@hypothesis.given(
    st.sampled_from(list(wire.APIS.values())), st.data(), st.binary(max_size=60)
)
def test_random_bodies_are_refused_or_read(
    api: wire.Api[Any, Any], data: st.DataObject, content: bytes
) -> None:
    """Random bytes follow a valid header, because random bytes are hardly ever a valid
    header, and the body would not be reached.
    """
    version = data.draw(st.integers(api.min_version, api.max_version))
    sound = wire.encode_request(api, version, 1, "me", api.Request())[4:]
    frame = memoryview(
        sound[: wire.decode_header(memoryview(sound)).body_start] + content
    )
    header = wire.decode_header(frame)
    with contextlib.suppress(wire.ProtocolError):
        wire.decode_request(header, frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0" * 7,
        b"\0" * 9,
        b"\x16\x03\x01\x02\0\1\0\1\xfc\3",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_frames_of_another_protocol_are_refused(frame: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.decode_header(memoryview(frame))


@pytest.mark.long
def test_wrong_lengths_allocate_nothing() -> None:
    """The test sets a length of two billion at every four bytes, and a varint of four
    billion at every byte. Memory use must remain small.
    """
    messages = [
        wire.PRODUCE.request,
        wire.FETCH.request,
        wire.METADATA.request,
        wire.JOIN_GROUP.request,
    ]
    tracemalloc.start()
    try:
        for message in messages:
            for version in (message.min_version, message.max_version):
                value = draw(
                    message.schema,
                    version,
                    message.is_flexible(version),
                    random.Random(3),
                )
                data = encode(message, version, value)[:600]
                # Compile the codec before the measurement.
                decodes_or_refuses(message, version, data)
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                for position in range(len(data)):
                    tail = data[position + 4 :]
                    decodes_or_refuses(
                        message, version, data[:position] + b"\x7f\xff\xff\xff" + tail
                    )
                    decodes_or_refuses(
                        message,
                        version,
                        data[:position] + b"\xff\xff\xff\xff\x0f" + tail,
                    )
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < 100 * len(data) + 100_000
    finally:
        tracemalloc.stop()
