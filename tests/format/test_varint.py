"""Tests of varints with known encodings, and of Kafka's rules for encodings that no writer
produces.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logcore.errors import InvalidRecordError, LogcoreError
from logcore.format import varint
from support.varints import encode, encode_unsigned

INT32 = st.integers(-(2**31), 2**31 - 1)
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


@pytest.mark.parametrize(("n", "encoded"), KNOWN_32.items())
def test_known_int32_values_have_their_known_bytes(n, encoded):
    assert encode(n).hex() == encoded
    assert varint.decode_int32(bytes.fromhex(encoded), 0) == (n, len(encoded) // 2)


@settings(deadline=None)
@given(INT32, st.binary(max_size=5), st.binary(max_size=5))
def test_int32_round_trips_inside_a_larger_buffer(n, before, after):
    encoded = encode(n)
    data = before + encoded + after
    for form in (data, bytearray(data), memoryview(data)):
        assert varint.decode_int32(form, len(before)) == (n, len(before) + len(encoded))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_unsigned_round_trips(n):
    encoded = encode_unsigned(n)
    assert varint.decode_unsigned(encoded, 0) == (n, len(encoded))


@pytest.mark.parametrize(
    ("n", "encoded"), {0: "00", 127: "7f", 128: "8001", 2**32 - 1: "ffffffff0f"}.items()
)
def test_unsigned_has_no_zig_zag(n, encoded):
    assert varint.decode_unsigned(bytes.fromhex(encoded), 0) == (n, len(encoded) // 2)


@pytest.mark.parametrize("decode", [varint.decode_int32, varint.decode_unsigned])
def test_longer_encodings_than_necessary_are_accepted(decode):
    expected = 1 if decode is varint.decode_unsigned else -1
    assert decode(b"\x81\x80\x80\x80\x00", 0) == (expected, 5)


def test_bits_beyond_the_width_of_the_type_are_ignored():
    assert varint.decode_int32(b"\xfe\xff\xff\xff\x7f", 0) == (2**31 - 1, 5)
    assert varint.decode_unsigned(b"\xff\xff\xff\xff\x7f", 0) == (2**32 - 1, 5)


@pytest.mark.parametrize("decode", [varint.decode_int32, varint.decode_unsigned])
def test_continuation_bit_in_the_fifth_byte_is_an_error(decode):
    with pytest.raises(InvalidRecordError) as caught:
        decode(b"\x00\x00" + b"\x80" * 5 + b"\x00", 2)
    assert caught.value.position == 2


@pytest.mark.parametrize("decode", [varint.decode_int32, varint.decode_unsigned])
def test_data_that_ends_inside_a_varint_is_an_error(decode):
    for length in range(5):
        with pytest.raises(InvalidRecordError) as caught:
            decode(b"\x00" + b"\xff" * length, 1)
        assert caught.value.position == 1
    with pytest.raises(InvalidRecordError):
        decode(b"", 7)


@settings(deadline=None)
@given(st.binary(max_size=12), st.integers(0, 14))
def test_any_bytes_are_decoded_or_raise_a_logcore_error(data, position):
    for decode in (varint.decode_int32, varint.decode_unsigned):
        try:
            _, end = decode(data, position)
        except LogcoreError:
            continue
        assert position < end <= min(len(data), position + 5)
