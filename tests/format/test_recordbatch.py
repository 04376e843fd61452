"""Tests of batches with the vectors that Kafka and its clients wrote, and of the checks
of a leader.

A leader must accept and refuse the same batches as Kafka. OUTCOMES contains the outcomes
of Kafka's validator for each mutation, from section 1.9 of the format notes.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AiokafkaBatch
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch as KafkaPythonBatch

import logcore
from logcore import recordbatch
from logcore.config import LogConfig
from logcore.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidTimestampError,
    LogcoreError,
    RecordTooLargeError,
    UnsupportedCodecError,
)
from logcore.format.compression import codec_named, compress
from logcore.inspect.salvage import salvage
from logcore.recordbatch import (
    RecordBatch,
    empty_batch,
    encode,
    front_of,
    prepare_append,
    read_batches,
    stamp_crc,
)
from support import varints
from support.kernels import KERNELS
from support.vectors import EXPECTED, VECTORS

T0 = 1_700_000_000_000
NAMES = sorted(EXPECTED)
V2 = [name for name in NAMES if name.startswith("v2")]
CODECS = ["uncompressed", "gzip", "snappy", "lz4", "zstd"]


def vector(name: str) -> bytes:
    return (VECTORS / "records" / name).read_bytes()


def line(record: Any) -> str:
    def piece(data: bytes | None) -> str:
        return "-" if data is None else data.hex()

    headers = ",".join(
        f"{name.encode('utf-8', 'surrogateescape').hex()}={piece(value)}"
        for name, value in record.headers
    )
    return f"{record.offset}|{record.timestamp_ms}|{piece(record.key)}|{piece(record.value)}|{headers}"


@pytest.mark.parametrize("name", NAMES)
def test_records_of_every_vector_equal_the_expected_records(name: str) -> None:
    records = [
        record for batch in read_batches(vector(name)) for record in batch.records()
    ]
    assert len(records) == EXPECTED[name]["record_count"]
    lines = "".join(line(record) + "\n" for record in records)
    assert (
        hashlib.sha256(lines.encode()).hexdigest() == EXPECTED[name]["records_sha256"]
    )
    columns = [
        record
        for batch in read_batches(vector(name))
        for record in batch.columns().records()
    ]
    assert [tuple(record) for record in columns] == [
        tuple(record) for record in records
    ]


@pytest.mark.parametrize("name", NAMES)
def test_heads_of_every_vector_equal_the_expected_heads(name: str) -> None:
    for batch, want in zip(
        read_batches(vector(name)), EXPECTED[name]["batches"], strict=True
    ):
        batch.verify()
        assert (batch.magic, batch.size_bytes, batch.crc) == (
            want["magic"],
            want["size"],
            want["crc"],
        )
        assert (batch.last_offset, batch.max_timestamp) == (
            want["last_offset"],
            want["max_timestamp"],
        )
        assert batch.codec_name == want["compression"]
        assert batch.is_append_time == (want["timestamp_type"] == "LogAppendTime")
        assert (batch.producer_id, batch.producer_epoch) == (
            want["producer_id"],
            want["producer_epoch"],
        )
        assert (batch.base_sequence, batch.record_count) == (
            want["base_sequence"],
            want["count"],
        )
        assert batch.partition_leader_epoch == want["partition_leader_epoch"]
        assert (batch.is_transactional, batch.is_control) == (
            want["transactional"],
            want["control"],
        )
        assert (batch.delete_horizon_ms or -1) == want["delete_horizon_ms"]
        if batch.magic == 2:
            assert batch.base_offset == want["base_offset"]


def test_control_batches_report_their_type() -> None:
    kinds = {"abort": "ABORT", "commit": "COMMIT", "leader-change": "LEADER_CHANGE"}
    for name, kind in kinds.items():
        (batch,) = read_batches(vector(f"v2-control-{name}.kafka-java.bin"))
        assert batch.control_type() == kind


def test_unknown_control_type_is_reported() -> None:
    for key in (None, b"\0\0\0", struct.pack(">hh", 0, 99)):
        (batch,) = read_batches(encode([(key, b"")], control=True))
        assert batch.control_type() == "UNKNOWN"
    (batch,) = read_batches(encode([(struct.pack(">hh", 5, 1), b"")], control=True))
    assert batch.control_type() == "COMMIT", "the version of the key is ignored"
    (batch,) = read_batches(
        encode([(struct.pack(">hhq", 9, 0, -1), b"")], control=True)
    )
    assert batch.control_type() == "ABORT", "later versions may add fields"
    (batch,) = read_batches(encode([(struct.pack(">hh", 0, 1), b"")]))
    assert batch.control_type() == "UNKNOWN", "a batch of data has a key like a marker"


def test_batch_repr_shows_its_kind_and_timestamp_type() -> None:
    (batch,) = read_batches(encode([(b"k", b"v")] * 3, base_offset=7, codec="lz4"))
    size = batch.size_bytes
    assert (
        repr(batch)
        == f"<RecordBatch offsets 7..9 records=3 codec=lz4 size_bytes={size} position=0>"
    )
    for codec in (5, 7):
        (odd,) = read_batches(mutated(attributes=codec))
        assert odd.codec_name == f"unknown({codec})" in repr(odd)
    (stamped,) = read_batches(encode([(b"k", b"v")], append_time=True))
    old = [next(read_batches(vector(name))) for name in NAMES if name.startswith("v0")]
    assert (
        batch.timestamp_type,
        stamped.timestamp_type,
        {batch.timestamp_type for batch in old},
    ) == (0, 1, {-1})


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.startswith(("v0", "v1"))] + ["v2"]
)
@pytest.mark.parametrize(
    "decode", ["verify", "records", "columns", "to_arrow", "control_type"]
)
def test_batch_with_a_wrong_crc_is_not_decoded(name: str, decode: str) -> None:
    pytest.importorskip("pyarrow")
    good = (
        encode([(struct.pack(">hh", 0, 1), b"v")], control=True)
        if name == "v2"
        else vector(name)
    )
    bad = bytearray(good)
    bad[next(read_batches(good)).size_bytes - 1] ^= (
        1  # a bit of a value: without the CRC, the decoded record would be valid
    )
    batch = next(read_batches(bytes(bad)))
    if decode == "control_type" and name != "v2":
        assert batch.control_type() == "UNKNOWN"
        return
    with pytest.raises(logcore.CorruptBatchError):
        getattr(batch, decode)()


def test_worked_example_equals_kafkas_bytes() -> None:
    data = encode(
        [(b"k1", b"hello", (("h", b"x"),), T0), (None, b"world!", (), T0 + 5)]
    )
    assert data == vector("v2-none-two-records.kafka-java.bin")


def test_sequence_wraps_to_0_after_the_largest() -> None:
    (batch,) = read_batches(vector("v2-txn-sequence-wrap.kafka-python.bin"))
    assert (batch.base_sequence, batch.last_sequence) == (2**31 - 2, 0)
    (batch,) = read_batches(
        encode([(None, b"first")] * 2, producer_id=1, producer_epoch=0, base_sequence=0)
    )
    assert (batch.base_sequence, batch.last_sequence) == (0, 1)
    (batch,) = read_batches(encode([(None, b"of no producer")] * 2))
    assert (batch.base_sequence, batch.last_sequence) == (-1, -1)


@pytest.mark.parametrize("codec", CODECS)
@given(
    rows=st.lists(
        st.tuples(st.none() | st.binary(), st.none() | st.binary()),
        min_size=1,
        max_size=30,
    )
)
def test_other_clients_read_every_codec(codec: str, rows: Any) -> None:
    data = encode(rows, now_ms=T0, codec=codec)
    found = [[(entry.key, entry.value) for entry in AiokafkaBatch(data)]]
    # kafka-python reads snappy only with a package that no other test needs.
    if codec != "snappy":
        found.append([(entry.key, entry.value) for entry in KafkaPythonBatch(data)])
    assert all(entry == rows for entry in found)


@pytest.mark.parametrize("magic", [-128, -1, 3, 127])
def test_complete_batch_with_an_unknown_magic_is_an_error(magic: int) -> None:
    raw = bytearray(encode([(b"k", b"v")]))
    struct.pack_into(">b", raw, 16, magic)
    with pytest.raises(
        CorruptBatchError, match=f"unknown magic.*expected 0, 1 or 2, found {magic}"
    ):
        RecordBatch.parse(raw)


def test_incomplete_tail_ends_reading_without_an_error() -> None:
    data = vector("v2-none-two-records.kafka-java.bin")
    for cut in range(len(data)):
        assert list(read_batches(data[:cut])) == []
    assert [batch.size_bytes for batch in read_batches(data + data[:40])] == [len(data)]


@pytest.mark.long
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_each_bit_flip_of_a_vector_is_detected_or_harmless(
    name: str, step: int
) -> None:
    """The CRC does not cover base offset, length, leader epoch and magic (v2), offset
    and size (v0 and v1).
    """
    data = vector(name)
    sound = [
        tuple(record) for batch in read_batches(data) for record in batch.records()
    ]
    for bit in range(0, len(data) * 8, step):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            found = [
                tuple(record)
                for batch in read_batches(bytes(bad))
                for record in batch.records()
            ]
        except LogcoreError:
            continue
        same_but_offset = [record[1:] for record in found] == [
            record[1:] for record in sound[: len(found)]
        ]
        assert same_but_offset, f"bit {bit}"
        assert bit // 8 < 17 or data[16] < 2, (
            f"bit {bit} of a v2 batch is under the CRC"
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_truncated_vector_is_a_prefix_or_an_error(name: str) -> None:
    data = vector(name)
    sound = [
        tuple(record) for batch in read_batches(data) for record in batch.records()
    ]
    for cut in range(len(data)):
        try:
            found = [
                tuple(record)
                for batch in read_batches(data[:cut])
                for record in batch.records()
            ]
        except LogcoreError:
            continue
        assert found == sound[: len(found)]


@given(st.binary(max_size=200), st.booleans(), st.integers(0, 0xFF))
def test_random_bytes_raise_only_documented_errors(
    body: bytes, has_head: bool, attributes: int
) -> None:
    if has_head:  # a valid head before the random bytes
        raw = bytearray(
            struct.pack(
                ">qiibIhiqqqhii",
                0,
                49 + len(body),
                0,
                2,
                0,
                attributes,
                4,
                T0,
                T0,
                -1,
                -1,
                -1,
                5,
            )
            + body
        )
        stamp_crc(raw)
        body = bytes(raw)
    try:
        batches = list(read_batches(body))
    except LogcoreError:
        return
    for batch in batches:
        # Both methods check the batch. Any other exception fails the test.
        for decode in (
            batch.records,
            batch.columns,
        ):
            with contextlib.suppress(LogcoreError):
                decode()


@pytest.mark.parametrize("codec", CODECS[1:])
def test_bomb_is_refused_at_the_limit(codec: str) -> None:
    data = encode([(None, bytes(8 << 20))], codec=codec)
    (batch,) = read_batches(data)
    with pytest.raises(RecordTooLargeError):
        batch.records(max_size=1 << 20)
    assert len(batch.records()[0].value or b"") == 8 << 20


# -- accepted by a leader -------------------------------------------------------------

TWO = [(b"k1", b"hello", (), T0), (b"k2", b"world!", (), T0 + 5)]
HEAD = {
    "base_offset": ">q@0",
    "length": ">i@8",
    "leader_epoch": ">i@12",
    "crc": ">I@17",
    "attributes": ">h@21",
    "last_offset_delta": ">i@23",
    "max_timestamp": ">q@35",
    "producer_id": ">q@43",
    "base_sequence": ">i@53",
    "count": ">i@57",
}


def mutated(
    codec: str = "uncompressed", *, crc: bool = True, tail: bytes = b"", **fields: int
) -> bytes:
    raw = bytearray(encode(TWO, codec=codec))
    for name, value in fields.items():
        form, at = HEAD[name].split("@")
        struct.pack_into(form, raw, int(at), value)
    if crc and "length" not in fields:
        stamp_crc(raw)
    return bytes(raw) + tail


def leader(data: bytes, **config: object) -> tuple[RecordBatch, list[Any]]:
    out, stored = prepare_append(
        data,
        base_offset=100,
        leader_epoch=7,
        now_ms=T0 + 99,
        config=LogConfig.parse(config),
    )
    (batch,) = read_batches(bytes(out))
    assert stored == [(0, len(out), batch.last_offset, batch.max_timestamp)]
    return batch, batch.records()


def rebuilt_body(change: Callable[[bytearray], None], **fields: int) -> bytes:
    """Return the two records with changed bytes, and with a correct length and CRC."""
    raw = bytearray(encode(TWO))
    body = raw[61:]
    change(body)
    raw[61:] = body
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    for name, value in fields.items():
        form, at = HEAD[name].split("@")
        struct.pack_into(form, raw, int(at), value)
    stamp_crc(raw)
    return bytes(raw)


#: Kafka's observed outcomes for a client's append of a mutated 2-record batch.
OUTCOMES: list[tuple[str, bytes, dict[str, object], type[LogcoreError] | None]] = [
    ("leader epoch 99, CRC unchanged", mutated(leader_epoch=99, crc=False), {}, None),
    ("length 40", mutated(length=40), {}, CorruptBatchError),
    (
        "count 1 but 2 records",
        mutated(count=1, last_offset_delta=0),
        {},
        InvalidRecordError,
    ),
    (
        "count 3 but 2 records",
        mutated(count=3, last_offset_delta=2),
        {},
        InvalidRecordError,
    ),
    ("count 0", mutated(count=0), {}, InvalidRecordError),
    (
        "count 0, last offset delta -1",
        mutated(count=0, last_offset_delta=-1),
        {},
        InvalidRecordError,
    ),
    ("count -1", mutated(count=-1), {}, InvalidRecordError),
    ("last offset delta -1", mutated(last_offset_delta=-1), {}, InvalidRecordError),
    ("codec 5", mutated(attributes=5), {}, UnsupportedCodecError),
    ("gzip bit over plain bytes", mutated(attributes=1), {}, CorruptBatchError),
    ("zstd bit over plain bytes", mutated(attributes=4), {}, CorruptBatchError),
    ("delete horizon bit", mutated(attributes=0x40), {}, None),
    # Kafka accepts this batch. Its read_committed consumers then wait forever, because no
    # producer can end the transaction.
    (
        "transactional without producer id",
        mutated(attributes=0x10),
        {},
        InvalidRecordError,
    ),
    ("bits 7-15", mutated(attributes=0x7F80), {}, None),
    ("control batch", mutated(attributes=0x20), {}, InvalidRecordError),
    ("producer id without sequence", mutated(producer_id=5), {}, InvalidRecordError),
    ("producer id 0 without sequence", mutated(producer_id=0), {}, InvalidRecordError),
    ("max timestamp too low", mutated(max_timestamp=T0), {}, None),
    ("LogAppendTime bit on CreateTime", mutated(attributes=8), {}, None),
    (
        "LogAppendTime bit on LogAppendTime",
        mutated(attributes=8),
        {"message.timestamp.type": "LogAppendTime"},
        InvalidTimestampError,
    ),
    (
        "record attributes 0x7f",
        rebuilt_body(lambda body: body.__setitem__(1, 0x7F)),
        {},
        None,
    ),
    (
        "offset deltas 0, 0",
        rebuilt_body(lambda body: body.__setitem__(body[0] // 2 + 4, 0)),
        {},
        None,
    ),
    ("7 bytes after the batch", mutated(tail=b"garbage"), {}, None),
    (
        "a wrong CRC",
        mutated(crc=False, count=2, max_timestamp=T0 + 6),
        {},
        CorruptBatchError,
    ),
    (
        "a wrong CRC and a wrong count",
        mutated(crc=False, count=1),
        {},
        CorruptBatchError,
    ),
    ("too large", mutated(), {"max.message.bytes": 80}, RecordTooLargeError),
    (
        "too large, gzip topic",
        encode([(b"k", bytes(500))]),
        {"max.message.bytes": 300, "compression.type": "gzip"},
        RecordTooLargeError,
    ),
    ("plain batch, gzip topic", mutated(), {"compression.type": "gzip"}, None),
    (
        "gzip batch, plain topic",
        mutated("gzip"),
        {"compression.type": "uncompressed"},
        None,
    ),
    (
        "too old",
        mutated(),
        {"message.timestamp.before.max.ms": 50},
        InvalidTimestampError,
    ),
    (
        "young enough",
        mutated(),
        {"message.timestamp.before.max.ms": 99, "message.timestamp.after.max.ms": 0},
        None,
    ),
    (
        "young enough, gzip topic",
        mutated(),
        {"message.timestamp.before.max.ms": 99, "compression.type": "gzip"},
        None,
    ),
    ("all in the past", mutated(), {"message.timestamp.after.max.ms": 0}, None),
    (
        "from the future",
        encode([(b"k", b"v", (), T0 + 107)]),
        {"message.timestamp.after.max.ms": 7},
        InvalidTimestampError,
    ),
    (
        "no key, compacted topic",
        encode([(None, b"v", (), T0)]),
        {"cleanup.policy": "compact"},
        InvalidRecordError,
    ),
    ("not a batch", b"garbage", {}, CorruptBatchError),
    (
        "magic 3",
        b"\0" * 11 + b"\x50" + b"\0" * 4 + b"\3" + bytes(80),
        {},
        CorruptBatchError,
    ),
]


def _varint(number: int, surplus: int | None = None) -> bytes:
    """Encode a varint as in a record.

    `surplus` are the bits above the 32 bits of a length, in an encoding of five bytes.
    """
    if surplus is None:
        return varints.encode(number)
    zigzag = number << 1 if number >= 0 else -number * 2 - 1
    return bytes([zigzag & 0x7F | 0x80, 0x80, 0x80, 0x80, surplus << 4])


def _body_with(field: str, number: bytes | None) -> bytes:
    """Return a record with a header, and with `number` as the length, delta or count that
    is named `field`.
    """
    fields = {
        "timestamp delta": _varint(0),
        "offset delta": _varint(0),
        "key length": _varint(1),
        "value length": _varint(1),
        "header count": _varint(1),
        "header key length": _varint(1),
        "header value length": _varint(1),
    }
    follows = {
        "key length": b"k",
        "value length": b"v",
        "header key length": b"h",
        "header value length": b"x",
    }
    if number is not None:
        fields[field] = number
        if number[-1] & 1 and len(number) == 1:  # a negative length has no bytes
            follows.pop(field, None)
    content = b"\0" + b"".join(
        part + follows.get(name, b"") for name, part in fields.items()
    )
    return _varint(len(content)) + content


def _batch_with(
    field: str, number: bytes | None, codec: str, valid_records: int
) -> bytes:
    raw = bytearray(encode([(b"k", b"v", (), T0)] * (1 + valid_records), codec=codec))
    body = _body_with(field, number) + _body_with("nothing", None) * valid_records
    raw[61:] = body if codec == "uncompressed" else compress(codec_named(codec), body)
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    stamp_crc(raw)
    return bytes(raw)


LENGTHS = ["key length", "value length", "header key length", "header value length"]


@pytest.mark.parametrize("codec", ["uncompressed", "gzip"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("valid_records", [0, 20])
@pytest.mark.parametrize(
    ("field", "number", "is_accepted"),
    [
        ("nothing", None, True),
        *((field, _varint(-1), field != "header key length") for field in LENGTHS),
        *((field, _varint(low), False) for field in LENGTHS for low in (-2, -54)),
        *(
            (field, _varint(1, surplus=1), False)
            for field in [*LENGTHS, "header count"]
        ),
        *((field, _varint(1, surplus=0), True) for field in [*LENGTHS, "header count"]),
        ("offset delta", _varint(0, surplus=7), False),
        ("header count", _varint(-1), False),
        ("header count", _varint(-2), False),
    ],
)
def test_leader_refuses_records_that_some_readers_refuse(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Any,
    codec: str,
    valid_records: int,
    field: str,
    number: bytes | None,
    is_accepted: bool,
) -> None:
    """A record with a key length of -54 was stored, and consumers with librdkafka could
    not read beyond it.
    """
    monkeypatch.setattr(recordbatch, "kernel", kernel)
    data = _batch_with(field, number, codec, valid_records)
    if not is_accepted:
        with pytest.raises(InvalidRecordError):
            leader(data)
    else:
        assert len(leader(data)[1]) == 1 + valid_records
    stored = next(iter(read_batches(data)))
    if (
        field.startswith("header")
        and number is not None
        and number[-1] & 1
        and "value" not in field
    ):
        return
    assert stored.records()[0].value in (b"v", None), (
        "logcore and Kafka read the stored batch differently"
    )


@pytest.mark.parametrize("codec", ["uncompressed", "gzip"])
@pytest.mark.parametrize("deltas", [(0, 0), (1, 0), (0, 5), (3, 4)])
def test_leader_replaces_the_offsets_of_the_sender(
    codec: str, deltas: tuple[int, int]
) -> None:
    raw = bytearray(encode(TWO))
    body = raw[61:]
    body[3], body[body[0] // 2 + 4] = 2 * deltas[0], 2 * deltas[1]
    raw = bytearray(encode(TWO, codec=codec))
    raw[61:] = body if codec == "uncompressed" else compress(codec_named(codec), body)
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    stamp_crc(raw)
    batch, records = leader(bytes(raw))
    assert [record.offset for record in records] == [
        100,
        101,
    ] and batch.last_offset == 101


@pytest.mark.parametrize(
    ("data", "config", "error"),
    [case[1:] for case in OUTCOMES],
    ids=[case[0] for case in OUTCOMES],
)
def test_leader_accepts_and_refuses_like_kafka(
    data: bytes, config: dict[str, object], error: type[LogcoreError] | None
) -> None:
    if error is not None:
        with pytest.raises(error):
            leader(data, **config)
        return
    batch, records = leader(data, **config)
    assert [(record.key, record.value) for record in records] == [
        (b"k1", b"hello"),
        (b"k2", b"world!"),
    ]
    assert (batch.base_offset, batch.last_offset, batch.partition_leader_epoch) == (
        100,
        101,
        7,
    )
    assert not batch.is_append_time


@pytest.mark.parametrize("count", [-(2**31), -1, 0, 1, 3, 2**31 - 1])
def test_wrong_record_count_is_an_error(count: int) -> None:
    (batch,) = read_batches(mutated(count=count))
    for decode in (batch.records, batch.columns):
        if count:
            with pytest.raises(InvalidRecordError):
                decode()
        else:
            assert len(decode()) == 0, "compaction writes batches without records"


def test_records_at_the_limits_of_a_topic_are_accepted() -> None:
    """The limits are of the timestamp, the size and the key. The batch is appended alone,
    and together with another batch.
    """
    data = encode([(b"", b"v", (), T0 + 106)])
    config = {
        "message.timestamp.after.max.ms": 7,
        "max.message.bytes": len(data),
        "cleanup.policy": "compact",
    }
    for sent in (data, data * 2):
        prepared = prepare_append(
            sent,
            base_offset=0,
            leader_epoch=0,
            now_ms=T0 + 99,
            config=LogConfig.parse(config),
        )
        assert len(prepared[0]) == len(sent)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {
            "message.timestamp.before.max.ms": 99,
            "message.timestamp.after.max.ms": 0,
            "cleanup.policy": "compact",
        },
        {"compression.type": "uncompressed", "max.message.bytes": len(mutated())},
    ],
    ids=["default", "limits", "size"],
)
def test_valid_batch_is_checked_once(
    config: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second check would take half of the time of an append."""

    def refuse_second_check(*_: object) -> None:
        raise AssertionError("a second check")

    monkeypatch.setattr(recordbatch, "read_batches", refuse_second_check)
    topic = LogConfig.parse(config)
    sent = [
        mutated(),
        encode([(b"k", b"v", (), -1)]),
        encode(TWO, producer_id=2**62, producer_epoch=0, base_sequence=0),
    ]
    for data in sent[: 2 if "max.message.bytes" in config else 3]:
        prepare_append(
            data, base_offset=0, leader_epoch=0, now_ms=T0 + 99, config=topic
        )
    for name, value in (
        ("compression.type", "gzip"),
        ("message.timestamp.type", "LogAppendTime"),
    ):
        with pytest.raises(AssertionError, match="second check"):
            prepare_append(
                sent[0],
                base_offset=0,
                leader_epoch=0,
                now_ms=0,
                config=LogConfig.parse({**config, name: value}),
            )


def test_valid_batch_is_stored_with_only_offset_and_epoch_changed() -> None:
    for name in (
        "v2-none-two-records.librdkafka.bin",
        "v2-lz4-40-records.kafka-python.bin",
        "v2-snappy-40-records.librdkafka.bin",
    ):
        for base_offset in (0, 1_000):  # 1,000 is the offset in another log
            data = struct.pack(">q", base_offset) + vector(name)[8:]
            out, _ = prepare_append(
                data, base_offset=5, leader_epoch=3, now_ms=T0, config=LogConfig()
            )
            assert (
                bytes(out)
                == struct.pack(">q", 5) + data[8:12] + struct.pack(">i", 3) + data[16:]
            )


@pytest.mark.long
@pytest.mark.parametrize("codec", CODECS)
@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kept=st.sampled_from(["producer", "uncompressed", "gzip"]),
    append_time=st.booleans(),
    producer=st.sampled_from([(-1, -1, -1), (2**56 + 5, 3, 0), (0, 0, 2**31 - 2)]),
    is_transactional=st.booleans(),
    now_ms=st.integers(T0 - 3, T0 + 20),
    limits=st.tuples(st.none() | st.integers(0, 12), st.none() | st.integers(0, 12)),
    data=st.data(),
)
@settings(max_examples=25)
def test_leader_stores_the_bytes_that_were_sent(
    codec: str,
    counts: list[int],
    kept: str,
    append_time: bool,
    producer: tuple[int, int, int],
    is_transactional: bool,
    now_ms: int,
    limits: tuple[int | None, int | None],
    data: st.DataObject,
) -> None:
    """The stored batches have the records, the producer and the codec of the sent batches,
    and the offsets and times of the topic.
    """
    time = st.just(-1) | st.integers(T0, T0 + 15)
    sent = [
        [(b"k", b"v%d" % at, (), data.draw(time)) for at in range(count)]
        for count in counts
    ]
    producer_id, producer_epoch, sequence = producer
    is_transactional &= producer_id >= 0
    raw = b"".join(
        encode(
            rows,
            base_offset=50,
            codec=codec,
            transactional=is_transactional,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=sequence,
        )
        for rows in sent
    )
    config: dict[str, object] = {"compression.type": kept}
    names = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")
    config |= {
        name: limit
        for name, limit in zip(names, limits, strict=True)
        if limit is not None
    }
    if append_time:
        config["message.timestamp.type"] = "LogAppendTime"
    given_times = [row[3] for rows in sent for row in rows if row[3] >= 0]
    before, after = (1 << 62 if limit is None else limit for limit in limits)
    topic = LogConfig.parse(config)
    if not append_time and any(
        now_ms - time > before or time - now_ms > after for time in given_times
    ):
        with pytest.raises(InvalidTimestampError):
            prepare_append(
                raw, base_offset=7, leader_epoch=2, now_ms=now_ms, config=topic
            )
        return
    out, stored = prepare_append(
        raw, base_offset=7, leader_epoch=2, now_ms=now_ms, config=topic
    )
    batches = list(read_batches(bytes(out)))
    assert stored == [
        (batch.position, batch.size_bytes, batch.last_offset, batch.max_timestamp)
        for batch in batches
    ]
    first = 7
    for rows, batch in zip(sent, batches, strict=True):
        times = [now_ms if append_time else row[3] for row in rows]
        records = [
            (record.offset, record.timestamp_ms, record.key, record.value)
            for record in batch.records()
        ]
        assert records == [
            (first + at, time, b"k", b"v%d" % at) for at, time in enumerate(times)
        ]
        assert batch.max_timestamp == max(times)
        assert (batch.is_append_time, batch.is_transactional, batch.is_control) == (
            append_time,
            is_transactional,
            False,
        )
        assert (
            batch.producer_id,
            batch.producer_epoch,
            batch.base_sequence,
        ) == producer
        want = codec if kept == "producer" else kept
        assert (batch.partition_leader_epoch, batch.codec_name) == (
            2,
            want.replace("uncompressed", "none"),
        )
        first += len(rows)


def test_one_append_of_different_formats_is_refused() -> None:
    old = vector(next(name for name in NAMES if name.startswith("v1")))
    with pytest.raises(InvalidRecordError, match="different formats"):
        leader(old + mutated())


def test_batch_that_exceeds_the_limit_after_recompression_is_refused() -> None:
    data = encode([(None, np.random.default_rng(1).bytes(500), (), T0)])
    config = {"compression.type": "gzip", "max.message.bytes": len(data)}
    with pytest.raises(RecordTooLargeError, match="rebuilt") as met:
        leader(data, **config)
    assert f"at most {len(data)} bytes" in str(met.value)
    config["compression.type"] = "producer"
    assert leader(data, **config)[0].size_bytes == len(data)


def test_wrong_max_timestamp_is_corrected_with_the_crc() -> None:
    batch, _ = leader(mutated(max_timestamp=T0))
    assert batch.max_timestamp == T0 + 5


def test_log_append_time_overrides_the_time_of_the_client() -> None:
    batch, records = leader(mutated(), **{"message.timestamp.type": "LogAppendTime"})
    assert batch.is_append_time
    assert [record.timestamp_ms for record in records] == [T0 + 99] * 2


def test_compressed_offsets_with_gaps_are_renumbered() -> None:
    raw = bytearray(encode(TWO))
    body = raw[61:]
    body[body[0] // 2 + 4] = (
        0  # the offset delta of the second record is 0 instead of 1
    )
    from logcore.format.compression import Codec, compress

    raw = raw[:61] + compress(Codec.GZIP, bytes(body))
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    struct.pack_into(">h", raw, 21, 1)
    stamp_crc(raw)
    batch, records = leader(bytes(raw))
    assert [record.offset for record in records] == [100, 101]
    assert batch.codec_name == "gzip"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("v2")])
def test_old_formats_are_stored_as_v2(name: str) -> None:
    old = [record for batch in read_batches(vector(name)) for record in batch.records()]
    out, stored = prepare_append(
        vector(name), base_offset=7, leader_epoch=0, now_ms=T0, config=LogConfig()
    )
    (batch,) = read_batches(bytes(out))
    assert len(stored) == 1
    assert (batch.magic, batch.base_offset, batch.record_count) == (2, 7, len(old))
    assert batch.codec_name == next(read_batches(vector(name))).codec_name
    assert [tuple(record)[1:] for record in batch.records()] == [
        tuple(record)[1:] for record in old
    ]
    assert [record.offset for record in batch.records()] == list(range(7, 7 + len(old)))


def test_log_append_time_batch_from_a_client_is_refused() -> None:
    with pytest.raises(InvalidTimestampError, match="LogAppendTime"):
        leader(encode([(b"k", b"v", (), -1)], append_time=True))


def test_old_batch_with_the_transactional_bit_of_v2_is_not_a_transaction() -> None:
    raw = bytearray(next(vector(name) for name in NAMES if name.startswith("v1-none")))
    first = next(read_batches(bytes(raw)))
    raw = raw[: first.size_bytes]
    raw[17] |= 0x30
    struct.pack_into(">I", raw, 12, zlib.crc32(raw[16:]))
    batch, records = leader(bytes(raw))
    assert (batch.magic, batch.is_transactional, batch.is_control) == (2, False, False)
    assert records[0].value == first.records()[0].value


@pytest.mark.parametrize("name", NAMES)
def test_batches_report_their_positions_in_the_file(name: str) -> None:
    """The bytes may begin in the middle of a file. Positions are in the file."""
    data = vector(name)
    batches = list(read_batches(data))
    assert [batch.position for batch in batches] == [
        sum(batch.size_bytes for batch in batches[:at]) for at in range(len(batches))
    ]
    for batch in batches:
        again = RecordBatch.parse(data, batch.position, path="x", origin=1_000)
        assert again is not None
        assert (again.position, again.path) == (1_000 + batch.position, "x")


@pytest.mark.parametrize("magic", [0, 1, 2])
@pytest.mark.parametrize("length", [13, 0, -1, -(2**31)])
def test_impossible_length_is_damage_and_not_an_incomplete_batch(
    magic: int, length: int
) -> None:
    raw = bytearray(100)
    struct.pack_into(">qiibi", raw, 7, 5, length, 0, magic, 0)
    with pytest.raises(CorruptBatchError, match="smaller than the minimum") as met:
        RecordBatch.parse(raw, 7, origin=1_000)
    assert met.value.position == 1_007


@pytest.mark.parametrize("codec", CODECS)
@given(count=st.integers(1, 12), data=st.data())
def test_truncated_batch_keeps_exactly_the_records_below_the_offset(
    codec: str, count: int, data: st.DataObject
) -> None:
    rows = [
        (b"k%d" % at, b"v" * at, (("h", None),) if at % 3 == 0 else (), T0 + at % 5)
        for at in range(count)
    ]
    (batch,) = read_batches(
        encode(
            rows,
            base_offset=50,
            codec=codec,
            producer_id=9,
            producer_epoch=1,
            base_sequence=3,
        )
    )
    offset = data.draw(st.integers(50, 50 + count))
    front = list(read_batches(front_of(batch, offset, LogConfig())))
    if offset == 50:
        assert front == []
        return
    (kept,) = front
    assert [tuple(record) for record in kept.records()] == [
        tuple(record) for record in batch.records() if record.offset < offset
    ]
    assert (kept.base_offset, kept.next_offset, kept.base_sequence) == (50, offset, 3)
    assert kept.max_timestamp == max(record.timestamp_ms for record in kept.records())


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("v2")])
def test_front_of_an_old_batch_is_a_v2_batch_per_record(name: str) -> None:
    batch = max(read_batches(vector(name)), key=lambda batch: len(batch.records()))
    records = batch.records()
    for offset in (
        records[0].offset,
        records[len(records) // 2].offset,
        records[-1].offset + 1,
    ):
        front = list(read_batches(front_of(batch, offset, LogConfig())))
        assert [record for batch in front for record in batch.records()] == [
            record for record in records if record.offset < offset
        ]
        assert {batch.magic for batch in front} <= {2}
        assert {batch.partition_leader_epoch for batch in front} <= {0}, (
            "the old formats have no producers"
        )


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_empty_batch_with_a_codec_is_not_decompressed(codec: int) -> None:
    """Compaction keeps an empty batch of a producer, with the codec of the removed records."""
    raw = bytearray(encode(TWO, base_offset=50)[:61])
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    struct.pack_into(">h", raw, 21, codec)
    struct.pack_into(">i", raw, 57, 0)
    stamp_crc(raw)
    (batch,) = read_batches(bytes(raw))
    assert (bytes(batch.body()), batch.records(), len(batch.columns())) == (b"", [], 0)
    (front,) = read_batches(front_of(batch, 51, LogConfig()))
    assert (front.base_offset, front.next_offset, front.records()) == (50, 51, [])


@pytest.mark.parametrize("codec", [0, 1])
def test_front_of_a_compacted_batch_covers_the_removed_offsets(
    codec: int,
) -> None:
    from logcore.format.compression import Codec, compress

    raw = bytearray(encode(TWO, base_offset=50))
    body = raw[61:]
    # The offset deltas are 3 and 4, because compaction removed the first three records.
    body[3], body[body[0] // 2 + 4] = (
        2 * 3,
        2 * 4,
    )
    raw[61:] = compress(Codec(codec), bytes(body)) if codec else body
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    struct.pack_into(">h", raw, 21, codec)
    struct.pack_into(">i", raw, 23, 4)
    stamp_crc(raw)
    (batch,) = read_batches(bytes(raw))
    assert [record.offset for record in batch.records()] == [53, 54]
    (front,) = read_batches(front_of(batch, 52, LogConfig()))
    assert (front.base_offset, front.next_offset, front.records()) == (50, 52, [])
    assert front.codec_name == "none", "an empty batch has no compressed body"
    (front,) = read_batches(front_of(batch, 54, LogConfig()))
    assert (front.next_offset, [record.offset for record in front.records()]) == (
        54,
        [53],
    )


def test_front_of_a_batch_keeps_its_log_append_time() -> None:
    raw = bytearray(
        encode([(b"k", b"v", (), T0 + at) for at in range(3)], append_time=True)
    )
    struct.pack_into(">q", raw, 35, T0 + 50)
    stamp_crc(raw)
    (batch,) = read_batches(bytes(raw))
    (front,) = read_batches(front_of(batch, 2, LogConfig()))
    assert front.is_append_time
    assert [record.timestamp_ms for record in front.records()] == [T0 + 50] * 2


def test_empty_batch_has_offsets_and_no_records() -> None:
    (batch,) = read_batches(vector("v2-empty-batch.kafka-java.bin"))
    made = next(read_batches(empty_batch(batch.base_offset, batch.last_offset, 3)))
    assert (made.base_offset, made.last_offset, made.partition_leader_epoch) == (
        100,
        104,
        3,
    )
    made.verify()
    for nothing in (
        made.base_timestamp,
        made.max_timestamp,
        made.producer_id,
        made.producer_epoch,
        made.base_sequence,
    ):
        assert nothing == -1
    assert (batch.records(), len(batch.columns()), batch.next_offset) == ([], 0, 105)


def test_columns_are_selected_between_offsets() -> None:
    (batch,) = read_batches(vector("v2-gzip-20-records.kafka-java.bin"))
    columns = batch.columns()
    assert columns.between(1005, 1008).offsets.tolist() == [1005, 1006, 1007]
    assert len(columns.between(0, 10)) == 0
    assert columns[3:5].keys() == columns.keys()[3:5]


def test_columns_are_converted_to_arrow() -> None:
    pa = pytest.importorskip("pyarrow")
    (batch,) = read_batches(vector("v2-none-nulls-empties-headers.kafka-python.bin"))
    table = batch.to_arrow()
    assert table.schema.field("timestamp").type == pa.timestamp("ms", "UTC")
    assert table["key"].to_pylist() == batch.columns().keys()
    assert table["value"].to_pylist() == batch.columns().values()
    assert table["offset"].to_pylist() == [0, 1, 2, 3]
    assert [
        [(entry["key"], entry["value"]) for entry in row]
        for row in table["headers"].to_pylist()
    ] == [list(record.headers) for record in batch.records()]
    assert batch.columns().to_arrow(["value"]).schema.names == ["value"]
    with pytest.raises(logcore.InvalidConfigError):
        batch.columns().to_arrow(["nonsense"])


def test_timestamps_wrap_as_in_java() -> None:
    raw = bytearray(encode(TWO))
    struct.pack_into(">q", raw, 27, 2**63 - 1)
    stamp_crc(raw)
    (batch,) = read_batches(bytes(raw))
    assert [record.timestamp_ms for record in batch.records()] == [
        2**63 - 1,
        -(2**63) + 4,
    ]
    assert np.array_equal(batch.columns().timestamps_ms, [2**63 - 1, -(2**63) + 4])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", V2)
def test_slices_of_a_batch_contain_all_its_records(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, name: str
) -> None:
    monkeypatch.setattr(recordbatch, "kernel", kernel)
    for batch in read_batches(vector(name)):
        records = batch.records()
        for rows in (1, 2, 3, 7, 1000):
            slices = list(batch.record_slices(rows))
            assert all(len(part) <= rows for part in slices)
            assert [record for part in slices for record in part] == records
            columns = list(batch.column_slices(rows))
            assert [len(part) for part in columns] == [len(part) for part in slices]
            assert [tuple(record) for part in columns for record in part.records()] == [
                *map(tuple, records)
            ]


@pytest.mark.parametrize("kernel", KERNELS)
@given(data=st.data())
@settings(max_examples=30)
def test_slices_detect_the_same_damage_as_the_whole_batch(
    kernel: Any, data: st.DataObject
) -> None:
    """The slices are the records of the whole batch, or both methods refuse the batch."""
    rows = [(b"k%d" % at, b"v" * at, [("h", b"x")], T0 + at) for at in range(9)]
    raw = bytearray(encode(rows))
    at = data.draw(st.integers(61, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    stamp_crc(raw)
    (batch,) = read_batches(bytes(raw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordbatch, "kernel", kernel)
        found: list[Any] = []
        whole = sliced = False
        try:
            wanted = batch.records()
        except InvalidRecordError:
            whole = True
        try:
            for part in batch.record_slices(2):
                found += part
        except InvalidRecordError:
            sliced = True
    assert whole == sliced
    assert whole or found == wanted


def test_impossible_count_is_an_error_before_the_first_slice() -> None:
    """Otherwise a reader would get thousands of records of a damaged batch."""
    raw = bytearray(encode([(None, b"v")] * 9))
    count = (len(raw) - 61) // 7 + 1  # a record takes seven bytes at least
    raw[57:61] = count.to_bytes(4, "big")
    raw[23:27] = (count - 1).to_bytes(4, "big")
    stamp_crc(raw)
    (batch,) = read_batches(bytes(raw))
    for slices in (batch.record_slices(2), batch.column_slices(2)):
        with pytest.raises(InvalidRecordError, match="more than the bytes can hold"):
            next(slices)


MANY = 100_000


@pytest.mark.long
@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
@pytest.mark.parametrize(
    "how",
    [
        "read",
        "get",
        "columns",
        "arrow",
        "time",
        "committed",
        "append",
        "rebuild",
        "recover",
    ],
)
def test_batch_of_very_many_records_is_decoded_in_slices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, codec: str, how: str
) -> None:
    """A few bytes inflate to millions of records. Objects for all of them would take ten
    times as much memory.
    """
    decoded: list[int] = []
    kernel = recordbatch.kernel

    class Counting:
        def __getattr__(self, name: str) -> Any:
            call = getattr(kernel, name)
            if name not in ("decode_body_columns", "decode_body_objects"):
                return call

            def counted(body: Any, count: int, *rest: Any) -> Any:
                decoded.append(count)
                return call(body, count, *rest)

            return counted

    raw = encode([(None, None, (), T0)] * MANY, codec=codec)
    config = {
        "max.message.bytes": 1 << 30,
        "compression.type": "gzip" if how == "rebuild" else "producer",
    }
    with logcore.open(
        tmp_path / "t-0", create=True, config=config, durability="os"
    ) as log:
        if how in ("append", "rebuild"):
            monkeypatch.setattr(recordbatch, "kernel", Counting())
        log.append_batch(raw)
        monkeypatch.setattr(recordbatch, "kernel", Counting())
        if how == "read":
            assert sum(1 for _ in log.read(0)) == MANY
        elif how == "committed":
            assert sum(1 for _ in log.read(0, isolation="read_committed")) == MANY
        elif how == "get":
            assert log.get(MANY - 1).offset == MANY - 1
        elif how == "columns":
            assert [
                offset for part in log.scan() for offset in part.offsets.tolist()
            ] == list(range(MANY))
        elif how == "arrow":
            assert log.scan().to_table().num_rows == MANY
        elif how == "time":
            assert log.offset_for_timestamp(T0) == 0
    if how == "recover":
        salvage(tmp_path / "t-0", tmp_path / "copy-0")
    assert all(count <= recordbatch.SLICE_ROWS for count in decoded)
    if codec == "zstd" and how != "append":
        assert decoded, "nothing was decoded"
