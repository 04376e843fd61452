"""Variable-length integers: the field encoding inside v2 records and flexible messages.

    zig-zag:  n -> (n << 1) ^ (n >> 31), so that small negative numbers stay small
    bytes:    seven bits each, lowest group first; the high bit says that another byte follows

Rules (as Kafka's reader has them):
- An int32 takes at most 5 bytes; a high bit on the last one is an error.
- Bits of the last byte beyond the width of the type are ignored.
- Longer forms than needed are accepted.

This module does not know which field it decodes, and does not check lengths or counts
against what is left. It decodes one value at a time, for a handful of values; the
columns of a batch and all encoding are the kernels'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logcore.errors import InvalidRecordError

if TYPE_CHECKING:
    from typing import TypeAlias

    Bytes: TypeAlias = bytes | bytearray | memoryview

#: Most bytes of one value: ceil(32 / 7).
MAX_INT32_SIZE_BYTES = 5

_UINT32_MAX = (1 << 32) - 1


def decode_int32(data: Bytes, position: int) -> tuple[int, int]:
    """Read a varint at `position` of `data`: (value, position after it).

    Raises InvalidRecordError, with the position where the value starts, if `data` ends
    inside it or its fifth byte asks for another.
    """
    groups, position = _decode_groups(data, position)
    groups &= _UINT32_MAX
    return (groups >> 1) ^ -(groups & 1), position


def decode_unsigned(data: Bytes, position: int) -> tuple[int, int]:
    """Read an unsigned varint at `position`: (value in 0..2^32-1, position after it).
    Errors as decode_int32.
    """
    groups, position = _decode_groups(data, position)
    return groups & _UINT32_MAX, position


def _decode_groups(data: Bytes, start: int) -> tuple[int, int]:
    assert start >= 0, start  # a negative one would quietly read from the end
    try:
        byte = data[start]
        if byte < 0x80:  # nearly all lengths take one byte
            return byte, start + 1
        groups = byte & 0x7F
        for index in range(1, MAX_INT32_SIZE_BYTES):
            byte = data[start + index]
            groups |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return groups, start + index + 1
    except IndexError:
        raise InvalidRecordError(
            "the data ends inside a varint",
            position=start,
            expected=f"up to {MAX_INT32_SIZE_BYTES} bytes",
            found=f"{max(0, len(data) - start)} bytes",
        ) from None
    raise InvalidRecordError(
        "a varint does not end",
        position=start,
        expected=f"at most {MAX_INT32_SIZE_BYTES} bytes",
        found=f"a continuation bit in byte {MAX_INT32_SIZE_BYTES}",
    )
