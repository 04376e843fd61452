"""Tests of formats v0 and v1 with the vectors of four writers, and with entries that no
writer produces.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logcore.errors import (
    CorruptBatchError,
    InvalidRecordError,
    LogcoreError,
    RecordTooLargeError,
    UnsupportedCodecError,
)
from logcore.format import legacy
from logcore.format.compression import Codec, compress
from support.vectors import EXPECTED, VECTORS

NAMES = sorted(name for name in EXPECTED if name.startswith(("v0", "v1")))
LOG_APPEND_TIME = 0x08


def message(
    magic: int,
    offset: int = 0,
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    *,
    attributes: int = 0,
    timestamp: int = 1000,
    body: bytes | None = None,
) -> bytes:
    """Return an entry. `body` replaces key and value with their lengths."""

    def sized(data):
        return (
            struct.pack(">i", -1)
            if data is None
            else struct.pack(">i", len(data)) + data
        )

    if body is None:
        body = sized(key) + sized(value)
    checked = (
        struct.pack(">bb", magic, attributes)
        + (struct.pack(">q", timestamp) if magic == 1 else b"")
        + body
    )
    return struct.pack(">qiI", offset, 4 + len(checked), zlib.crc32(checked)) + checked


def wrapper(
    magic: int,
    offset: int,
    *inner: bytes,
    codec: Codec = Codec.GZIP,
    attributes: int = 0,
    **fields,
) -> bytes:
    value = compress(codec, b"".join(inner), legacy_lz4_checksum=magic == 0)
    return message(magic, offset, None, value, attributes=attributes | codec, **fields)


def decode(
    entry: bytes, **options
) -> list[tuple[int, int, bytes | None, bytes | None]]:
    legacy.check(memoryview(entry))
    return legacy.decode(memoryview(entry), **options)


def refused(error: type[LogcoreError], entry: bytes, reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        decode(entry, path="00.log", position=500)
    assert type(caught.value) is error
    assert (caught.value.path, caught.value.position) == ("00.log", 500)


def entries_of(data: bytes) -> list[memoryview]:
    entries = []
    position = 0
    while position < len(data):
        end = position + 12 + struct.unpack_from(">i", data, position + 8)[0]
        entries.append(memoryview(data)[position:end])
        position = end
    return entries


def line(record) -> str:
    offset, timestamp, key, value = record
    return f"{offset}|{timestamp}|{'-' if key is None else key.hex()}|{'-' if value is None else value.hex()}|\n"


# --- vectors ---


@pytest.mark.parametrize("name", NAMES)
def test_vectors_of_every_writer_decode_to_their_records(name):
    expected = EXPECTED[name]
    lines = []
    for entry in entries_of((VECTORS / "records" / name).read_bytes()):
        legacy.check(entry)
        lines += map(line, legacy.decode(entry))
    assert len(lines) == expected["record_count"]
    assert (
        hashlib.sha256("".join(lines).encode()).hexdigest()
        == expected["records_sha256"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_offset_and_timestamp_of_vectors_are_read_without_decoding(name):
    entries = entries_of((VECTORS / "records" / name).read_bytes())
    for entry, expected in zip(entries, EXPECTED[name]["batches"], strict=True):
        assert legacy.last_offset(entry) == expected["last_offset"]
        assert legacy.max_timestamp(entry) == expected["max_timestamp"]


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if "2-messages" in name or "wrapper-logappendtime" in name],
)
def test_check_finds_every_flipped_bit_after_the_offset(name):
    for entry in entries_of((VECTORS / "records" / name).read_bytes()):
        for position in range(8, len(entry)):
            for bit in range(8):
                flipped = bytearray(entry)
                flipped[position] ^= 1 << bit
                with pytest.raises(CorruptBatchError):
                    legacy.check(memoryview(flipped))


@pytest.mark.parametrize("name", NAMES)
def test_check_finds_every_truncation_and_extension(name):
    for entry in entries_of((VECTORS / "records" / name).read_bytes()):
        for cut in range(len(entry)):
            with pytest.raises(CorruptBatchError):
                legacy.check(entry[:cut])
        with pytest.raises(CorruptBatchError):
            legacy.check(memoryview(bytes(entry) + b"\x00"))


# --- plain entries ---


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("key", [None, b"", b"key"])
@pytest.mark.parametrize("value", [None, b"", b"value"])
def test_plain_entry_is_one_record(magic, key, value):
    assert decode(message(magic, 77, key, value)) == [
        (77, 1000 if magic else -1, key, value)
    ]


def test_plain_entry_keeps_its_timestamp_with_any_type():
    entry = message(1, 5, attributes=LOG_APPEND_TIME, timestamp=42)
    assert decode(entry) == [(5, 42, b"k", b"v")]
    assert legacy.max_timestamp(memoryview(entry)) == 42


def test_v0_has_no_timestamp():
    assert legacy.max_timestamp(memoryview(message(0))) == -1


@pytest.mark.parametrize("magic", [0, 1])
def test_any_negative_length_is_null(magic):
    assert decode(message(magic, body=struct.pack(">ii", -7, -(2**31))))[0][2:] == (
        None,
        None,
    )


@pytest.mark.parametrize("magic", [0, 1])
def test_bytes_after_the_value_are_ignored(magic):
    assert decode(message(magic, body=struct.pack(">ii", -1, 1) + b"v+more"))[0][
        2:
    ] == (None, b"v")


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize(
    "body",
    [
        struct.pack(">ii", 5, -1),
        struct.pack(">ii", 2**31 - 1, -1),
        struct.pack(">ii", -1, 1),
        struct.pack(">ii", -1, 2**31 - 1) + b"v",
        struct.pack(">i", 4) + b"keys",
        struct.pack(">i", 2) + b"ke" + b"\x00\x00",
    ],
)
def test_lengths_beyond_the_message_are_refused(magic, body):
    refused(InvalidRecordError, message(magic, body=body), "a message")


def test_v1_message_too_small_for_its_fields_is_refused():
    """check() accepts 14 bytes, which is the minimum of both formats."""
    refused(InvalidRecordError, message(1, body=b""), "ends before its key")
    refused(InvalidRecordError, message(1, body=b"\xff\xff\xff"), "ends before its key")
    refused(
        InvalidRecordError,
        message(1, body=b"\xff\xff\xff\xff"),
        "ends before its value",
    )


@pytest.mark.parametrize("magic", [2, 3, -1])
def test_other_formats_are_refused(magic):
    entry = memoryview(message(magic, body=bytes(20)))
    for call in (legacy.check, legacy.decode, legacy.last_offset, legacy.max_timestamp):
        with pytest.raises(CorruptBatchError, match="format"):
            call(entry)


@pytest.mark.parametrize("attributes", [5, 6, 7])
def test_unknown_compression_types_are_refused(attributes):
    refused(
        UnsupportedCodecError,
        message(1, attributes=attributes),
        "unknown compression type",
    )


@pytest.mark.parametrize("length", range(26))
def test_entries_below_the_minimum_size_are_refused(length):
    entry = memoryview(message(0, key=None, value=None))[:length]
    for call in (legacy.check, legacy.decode, legacy.last_offset, legacy.max_timestamp):
        with pytest.raises(CorruptBatchError):
            call(entry)


def test_smallest_entry_is_accepted():
    assert decode(message(0, 3, None, None)) == [(3, -1, None, None)]


# --- wrappers ---


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4])
def test_v0_inner_offsets_are_absolute(codec):
    entry = wrapper(0, 12, message(0, 10), message(0, 12, None, None), codec=codec)
    assert decode(entry) == [(10, -1, b"k", b"v"), (12, -1, None, None)]
    assert legacy.last_offset(memoryview(entry)) == 12


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4])
def test_v1_inner_offsets_count_back_from_the_wrapper(codec):
    entry = wrapper(1, 105, message(1, 0), message(1, 2), message(1, 5), codec=codec)
    assert [record[0] for record in decode(entry)] == [100, 102, 105]


def test_v1_inner_offsets_below_wrapper_offset_0_are_absolute():
    assert [
        record[0] for record in decode(wrapper(1, 0, message(1, 0), message(1, 1)))
    ] == [0, 1]
    assert [
        record[0] for record in decode(wrapper(1, 0, message(1, 40), message(1, 50)))
    ] == [40, 50]


def test_v1_wrapper_with_the_last_inner_offset_starts_at_0():
    assert [
        record[0] for record in decode(wrapper(1, 1, message(1, 0), message(1, 1)))
    ] == [0, 1]


def test_v1_wrapper_offset_below_the_last_inner_offset_is_refused():
    refused(InvalidRecordError, wrapper(1, 4, message(1, 0), message(1, 5)), "below")


def test_v1_offsets_beyond_64_bits_are_refused():
    refused(
        InvalidRecordError,
        wrapper(1, 2**63 - 1, message(1, 0), message(1, -1)),
        "64 bits",
    )


def test_v1_inner_timestamps_are_kept_with_create_time():
    entry = wrapper(
        1, 1, message(1, 0, timestamp=7), message(1, 1, timestamp=5), timestamp=99
    )
    assert [record[1] for record in decode(entry)] == [7, 5]
    assert legacy.max_timestamp(memoryview(entry)) == 99


def test_v1_inner_timestamp_type_is_ignored():
    inner = message(1, 0, timestamp=7, attributes=LOG_APPEND_TIME)
    assert decode(wrapper(1, 0, inner, timestamp=99))[0][1] == 7


def test_v1_inner_timestamps_are_the_wrappers_with_log_append_time():
    entry = wrapper(
        1,
        1,
        message(1, 0, timestamp=7),
        message(1, 1),
        timestamp=99,
        attributes=LOG_APPEND_TIME,
    )
    assert [record[1] for record in decode(entry)] == [99, 99]


def test_v0_ignores_the_timestamp_type_bit():
    assert decode(wrapper(0, 0, message(0, 0), attributes=LOG_APPEND_TIME)) == [
        (0, -1, b"k", b"v")
    ]


@pytest.mark.parametrize("magic", [0, 1])
def test_zstd_is_refused(magic):
    refused(
        InvalidRecordError, wrapper(magic, 0, message(magic), codec=Codec.ZSTD), "zstd"
    )


@pytest.mark.parametrize("magic", [0, 1])
def test_wrapper_without_value_is_refused(magic):
    refused(InvalidRecordError, message(magic, 0, None, None, attributes=1), "no value")


@pytest.mark.parametrize("magic", [0, 1])
def test_wrapper_without_messages_is_refused(magic):
    refused(InvalidRecordError, wrapper(magic, 0), "no message")
    refused(InvalidRecordError, wrapper(magic, 0, message(magic)[:-1]), "no message")


@pytest.mark.parametrize("magic", [0, 1])
def test_compressed_message_inside_a_wrapper_is_refused(magic):
    refused(
        InvalidRecordError,
        wrapper(magic, 0, wrapper(magic, 0, message(magic))),
        "compressed itself",
    )
    refused(
        UnsupportedCodecError,
        wrapper(magic, 0, message(magic, attributes=7)),
        "unknown",
    )


@pytest.mark.parametrize(("outer", "inner"), [(0, 1), (1, 0), (1, 2)])
def test_message_of_another_format_inside_a_wrapper_is_refused(outer, inner):
    refused(
        InvalidRecordError,
        wrapper(outer, 0, message(inner, body=bytes(40))),
        "another format",
    )


@pytest.mark.parametrize("magic", [0, 1])
def test_wrong_crc_inside_a_wrapper_is_refused(magic):
    bad = bytearray(message(magic, 1))
    bad[-1] ^= 1
    refused(
        CorruptBatchError,
        wrapper(magic, 1, message(magic), bytes(bad)),
        "CRC-32 of a message inside",
    )


@pytest.mark.parametrize("size", [13, 0, -1, -(2**31)])
def test_message_below_the_minimum_size_in_a_wrapper_is_refused(size):
    inner = message(1)
    refused(
        CorruptBatchError,
        wrapper(1, 0, inner[:8] + struct.pack(">i", size) + inner[12:]),
        "too small",
    )


def test_lengths_beyond_the_message_inside_a_wrapper_are_refused():
    refused(
        InvalidRecordError,
        wrapper(1, 0, message(1, body=struct.pack(">ii", 9, -1))),
        "longer than the message",
    )


def test_truncated_message_ends_its_wrapper_without_an_error():
    last = message(1, 1)
    for cut in range(1, len(last)):
        assert [
            record[0] for record in decode(wrapper(1, 0, message(1, 0), last[:cut]))
        ] == [0]


def test_damaged_body_is_refused():
    entry = message(1, 0, None, b"not gzip", attributes=Codec.GZIP)
    with pytest.raises(CorruptBatchError, match="gzip"):
        decode(entry)


def test_lz4_header_checksum_is_verified_in_v1_only():
    right, wrong = (
        compress(Codec.LZ4, message(1), legacy_lz4_checksum=legacy_sum)
        for legacy_sum in (False, True)
    )
    assert len(decode(message(1, 0, None, right, attributes=Codec.LZ4))) == 1
    with pytest.raises(CorruptBatchError, match="header checksum"):
        decode(message(1, 0, None, wrong, attributes=Codec.LZ4))
    right, wrong = (
        compress(Codec.LZ4, message(0), legacy_lz4_checksum=legacy_sum)
        for legacy_sum in (False, True)
    )
    assert len(decode(message(0, 0, None, right, attributes=Codec.LZ4))) == 1
    assert len(decode(message(0, 0, None, wrong, attributes=Codec.LZ4))) == 1


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4])
def test_wrapper_above_the_limit_is_refused(codec):
    inner = message(1, value=bytes(100_000))
    entry = wrapper(1, 0, inner, codec=codec)
    assert len(decode(entry, max_size=len(inner))) == 1
    with pytest.raises(RecordTooLargeError) as caught:
        decode(entry, max_size=len(inner) - 1, path="00.log", position=500)
    assert (caught.value.path, caught.value.position) == ("00.log", 534)


def test_error_in_a_compressed_value_has_the_position_of_the_wrapper():
    entry = wrapper(1, 0, message(1), codec=Codec.LZ4)
    damaged = memoryview(entry[:34] + b"\xff" + entry[35:])
    with pytest.raises(CorruptBatchError) as caught:
        legacy.decode(damaged, position=500)
    assert caught.value.position == 534


# --- anything ---


def decode_or_refuse(entry: bytes) -> None:
    """Decode an entry without check(). Other exceptions than LogcoreError fail the test."""
    for call in (legacy.check, legacy.last_offset, legacy.max_timestamp, legacy.decode):
        try:
            result = call(memoryview(entry))
        except LogcoreError:
            continue
        if call is legacy.decode:
            assert result
            assert all(-(2**63) <= offset < 2**63 for offset, _, _, _ in result)


ENTRIES = [
    bytes(entry)
    for name in NAMES
    for entry in entries_of((VECTORS / "records" / name).read_bytes())
]


@settings(deadline=None)
@given(st.sampled_from(ENTRIES), st.data())
def test_entry_with_any_change_is_decoded_or_refused(entry, draw):
    start = draw.draw(st.integers(0, len(entry)))
    end = draw.draw(st.integers(0, len(entry)))
    decode_or_refuse(entry[:start] + draw.draw(st.binary(max_size=12)) + entry[end:])


@settings(deadline=None)
@given(
    st.sampled_from([0, 1]),
    st.binary(max_size=60),
    st.integers(-128, 127),
    st.integers(-(2**63), 2**63 - 1),
)
def test_any_fields_are_decoded_or_refused(magic, body, attributes, offset):
    decode_or_refuse(message(magic, offset, attributes=attributes, body=body))


INNER = st.builds(
    message,
    st.sampled_from([0, 1]),
    st.integers(-(2**63), 2**63 - 1),
    attributes=st.sampled_from([0, 0, 0, 1, 8]),
    body=st.one_of(st.none(), st.binary(max_size=20)),
)


@settings(deadline=None)
@given(
    st.sampled_from([0, 1]),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(INNER, max_size=4),
    st.binary(max_size=30),
)
def test_any_wrapper_is_decoded_or_refused(magic, offset, inner, tail):
    decode_or_refuse(wrapper(magic, offset, *inner, tail))
