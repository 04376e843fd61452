"""Varints: the table of known encodings, round trips, and Kafka's rules for forms that no writer makes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logcore.errors import InvalidRecordError, LogcoreError
from logcore.format import varint

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)

KNOWN_32 = {
    0: "00",
    -1: "01",
    1: "02",
    -2: "03",
    2: "04",
    63: "7e",
    -64: "7f",
    64: "8001",
    -65: "8101",
    150: "ac02",
    300: "d804",
    -300: "d704",
    1000: "d00f",
    8191: "fe7f",
    -8192: "ff7f",
    8192: "808001",
    -8193: "818001",
    1048575: "feff7f",
    1048576: "80808001",
    86400000: "80f0b252",
    2**31 - 1: "feffffff0f",
    -(2**31): "ffffffff0f",
}
KNOWN_64 = {
    2**31: "8080808010",
    -86400994: "c3ffb252",
    1700000000000: "80a0abfef962",
    2**63 - 1: "fe" + "ff" * 8 + "01",
    -(2**63): "ff" * 9 + "01",
}


@pytest.mark.parametrize(("n", "encoded"), (KNOWN_32 | KNOWN_64).items())
def test_known_values_have_their_known_bytes(n, encoded):
    assert varint.encode(n).hex() == encoded
    assert varint.size(n) == len(encoded) // 2
    assert varint.decode_int64(bytes.fromhex(encoded), 0) == (n, len(encoded) // 2)


@pytest.mark.parametrize(("n", "encoded"), KNOWN_32.items())
def test_known_int32_values_decode_as_int32(n, encoded):
    assert varint.decode_int32(bytes.fromhex(encoded), 0) == (n, len(encoded) // 2)


@pytest.mark.parametrize("bits", range(0, 63))
def test_size_changes_exactly_where_the_encoding_does(bits):
    for n in (1 << bits, (1 << bits) - 1, -(1 << bits), -(1 << bits) - 1):
        assert varint.size(n) == len(varint.encode(n))


@settings(deadline=None)
@given(INT32, st.binary(max_size=5), st.binary(max_size=5))
def test_int32_round_trips_inside_a_larger_buffer(n, before, after):
    encoded = varint.encode(n)
    assert len(encoded) == varint.size(n) <= 5
    data = before + encoded + after
    for form in (data, bytearray(data), memoryview(data)):
        assert varint.decode_int32(form, len(before)) == (n, len(before) + len(encoded))


@settings(deadline=None)
@given(INT64, st.binary(max_size=5), st.binary(max_size=5))
def test_int64_round_trips_inside_a_larger_buffer(n, before, after):
    encoded = varint.encode(n)
    assert len(encoded) == varint.size(n) <= 10
    assert varint.decode_int64(before + encoded + after, len(before)) == (n, len(before) + len(encoded))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_unsigned_round_trips(n):
    encoded = varint.encode_unsigned(n)
    assert varint.decode_unsigned(encoded, 0) == (n, len(encoded))


@pytest.mark.parametrize(("n", "encoded"), {0: "00", 127: "7f", 128: "8001", 2**32 - 1: "ffffffff0f"}.items())
def test_unsigned_has_no_zig_zag(n, encoded):
    assert varint.encode_unsigned(n).hex() == encoded


@pytest.mark.parametrize("decode", [varint.decode_int32, varint.decode_int64, varint.decode_unsigned])
def test_longer_forms_than_needed_are_accepted(decode):
    expected = 1 if decode is varint.decode_unsigned else -1
    assert decode(b"\x81\x80\x80\x80\x00", 0) == (expected, 5)


def test_bits_of_the_last_byte_beyond_the_type_are_dropped():
    assert varint.decode_int32(b"\xfe\xff\xff\xff\x7f", 0) == (2**31 - 1, 5)
    assert varint.decode_unsigned(b"\xff\xff\xff\xff\x7f", 0) == (2**32 - 1, 5)
    assert varint.decode_int64(b"\xfe" + b"\xff" * 8 + b"\x7f", 0) == (2**63 - 1, 10)


@pytest.mark.parametrize(
    ("decode", "most"), [(varint.decode_int32, 5), (varint.decode_int64, 10), (varint.decode_unsigned, 5)]
)
def test_a_continuation_bit_on_the_last_allowed_byte_is_an_error(decode, most):
    with pytest.raises(InvalidRecordError) as caught:
        decode(b"\x00\x00" + b"\x80" * most + b"\x00", 2)
    assert caught.value.position == 2


@pytest.mark.parametrize(
    ("decode", "most"), [(varint.decode_int32, 5), (varint.decode_int64, 10), (varint.decode_unsigned, 5)]
)
def test_data_that_ends_inside_a_varint_is_an_error(decode, most):
    for length in range(most):
        with pytest.raises(InvalidRecordError) as caught:
            decode(b"\x00" + b"\xff" * length, 1)
        assert caught.value.position == 1
    with pytest.raises(InvalidRecordError):
        decode(b"", 7)


@settings(deadline=None)
@given(st.binary(max_size=12), st.integers(0, 14))
def test_any_bytes_decode_or_raise_a_logcore_error(data, position):
    for decode, most in ((varint.decode_int32, 5), (varint.decode_int64, 10), (varint.decode_unsigned, 5)):
        try:
            _, end = decode(data, position)
        except LogcoreError:
            continue
        assert position < end <= min(len(data), position + most)


@pytest.mark.parametrize("n", [2**63, -(2**63) - 1])
def test_values_beyond_64_bits_are_refused(n):
    with pytest.raises(InvalidRecordError):
        varint.encode(n)
    with pytest.raises(InvalidRecordError):
        varint.size(n)


@pytest.mark.parametrize("n", [2**32, -1])
def test_values_beyond_unsigned_32_bits_are_refused(n):
    with pytest.raises(InvalidRecordError):
        varint.encode_unsigned(n)
