"""Variable-length integers: the field encoding inside v2 records and flexible messages.

    zig-zag:  n -> (n << 1) ^ (n >> 63), so that small negative numbers stay small
    bytes:    seven bits each, lowest group first; the high bit says that another byte follows

Rules (as Kafka's reader has them):
- An int32 takes at most 5 bytes and an int64 at most 10; a high bit on the last one is an error.
- What the last byte carries beyond the width of the type is dropped without a word.
- Longer forms than needed are read, never written.

This module does not know which field it decodes, and does not check lengths or counts against what is left.
Decoding walks one value at a time; it is meant for a handful of values, not for the columns of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logcore.errors import InvalidRecordError

if TYPE_CHECKING:
    from typing import TypeAlias

    Bytes: TypeAlias = bytes | bytearray | memoryview

#: Most bytes of one value: ceil(32 / 7) and ceil(64 / 7).
MAX_INT32_SIZE_BYTES = 5
MAX_INT64_SIZE_BYTES = 10

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_UINT32_MAX = (1 << 32) - 1
_UINT64_MAX = (1 << 64) - 1

# Lengths, deltas and header counts nearly always fit one byte, so that case is a look-up.
_ONE_BYTE = tuple(bytes([value]) for value in range(0x80))


def encode(n: int) -> bytes:
    """The shortest zig-zag form of `n`, 1-10 bytes; an int32 never takes more than 5.

    The bytes are the same whether the field is called varint or varlong. A value outside int64 raises
    InvalidRecordError.
    """
    if not _INT64_MIN <= n <= _INT64_MAX:
        raise InvalidRecordError("a varint holds 64 bits", expected="an int64", found=n)
    return _encode_groups((n << 1) ^ (n >> 63))


def size(n: int) -> int:
    """How many bytes `encode(n)` has, without building them. A value outside int64 raises InvalidRecordError."""
    if not _INT64_MIN <= n <= _INT64_MAX:
        raise InvalidRecordError("a varint holds 64 bits", expected="an int64", found=n)
    return (((n << 1) ^ (n >> 63)).bit_length() + 6) // 7 or 1


def decode_int32(data: Bytes, position: int) -> tuple[int, int]:
    """Read a varint at `position` of `data`: (value, position after it).

    Raises InvalidRecordError, with the position where the value starts, if `data` ends inside it or its fifth
    byte asks for another.
    """
    groups, position = _decode_groups(data, position, MAX_INT32_SIZE_BYTES)
    groups &= _UINT32_MAX
    return (groups >> 1) ^ -(groups & 1), position


def decode_int64(data: Bytes, position: int) -> tuple[int, int]:
    """Read a varlong at `position` of `data`: (value, position after it). Errors as decode_int32, after 10 bytes."""
    groups, position = _decode_groups(data, position, MAX_INT64_SIZE_BYTES)
    groups &= _UINT64_MAX
    return (groups >> 1) ^ -(groups & 1), position


def encode_unsigned(n: int) -> bytes:
    """The shortest form of `n` without zig-zag, 1-5 bytes: lengths and tags of flexible messages.

    A value outside uint32 raises InvalidRecordError.
    """
    if not 0 <= n <= _UINT32_MAX:
        raise InvalidRecordError("an unsigned varint holds 32 bits", expected="a uint32", found=n)
    return _encode_groups(n)


def decode_unsigned(data: Bytes, position: int) -> tuple[int, int]:
    """Read an unsigned varint at `position`: (value in 0..2^32-1, position after it). Errors as decode_int32."""
    groups, position = _decode_groups(data, position, MAX_INT32_SIZE_BYTES)
    return groups & _UINT32_MAX, position


def _encode_groups(n: int) -> bytes:
    if n < 0x80:
        return _ONE_BYTE[n]
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _decode_groups(data: Bytes, start: int, max_size_bytes: int) -> tuple[int, int]:
    assert start >= 0, start  # a negative one would quietly read from the end
    try:
        byte = data[start]
        if byte < 0x80:
            return byte, start + 1
        groups = byte & 0x7F
        for index in range(1, max_size_bytes):
            byte = data[start + index]
            groups |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return groups, start + index + 1
    except IndexError:
        raise InvalidRecordError(
            "the data ends inside a varint",
            position=start,
            expected=f"up to {max_size_bytes} bytes",
            found=f"{max(0, len(data) - start)} bytes",
        ) from None
    raise InvalidRecordError(
        "a varint does not end",
        position=start,
        expected=f"at most {max_size_bytes} bytes",
        found=f"a continuation bit in byte {max_size_bytes}",
    )
