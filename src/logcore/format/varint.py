"""Variable-length integers: the field encoding inside v2 records and flexible messages.

    zig-zag:  n -> (n << 1) ^ (n >> 31), so that small negative numbers remain small
    bytes:    seven bits each, lowest group first; a high bit of 1 means that another byte follows

Rules, the same as in Kafka's reader:
- An int32 takes at most 5 bytes; a high bit in the fifth byte is an error.
- Bits of the last byte beyond the width of the type are ignored.
- Encodings that are longer than necessary are accepted.

The functions do not check lengths or counts against the remaining bytes. The kernels
encode and decode the records of batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logcore.errors import InvalidRecordError

if TYPE_CHECKING:
    from typing import TypeAlias

    Bytes: TypeAlias = bytes | bytearray | memoryview

#: Maximum number of bytes of one value: ceil(32 / 7).
MAX_INT32_SIZE_BYTES = 5

_UINT32_MAX = (1 << 32) - 1


def decode_int32(data: Bytes, position: int) -> tuple[int, int]:
    """Read a varint at `position` of `data`: (value, position after it).

    Raises:
        InvalidRecordError: `data` ends inside the value, or its fifth byte has the high
            bit. The error has the start position of the value.
    """
    groups, position = _decode_groups(data, position)
    groups &= _UINT32_MAX
    return (groups >> 1) ^ -(groups & 1), position


def decode_unsigned(data: Bytes, position: int) -> tuple[int, int]:
    """Read an unsigned varint at `position`: (value in 0..2^32-1, position after it).

    Raises:
        InvalidRecordError: see decode_int32().
    """
    groups, position = _decode_groups(data, position)
    return groups & _UINT32_MAX, position


def encode_unsigned(number: int) -> bytes:
    """Return the unsigned varint of a number from 0 to 2^32-1."""
    if not 0 <= number <= _UINT32_MAX:
        raise ValueError(f"{number} does not fit an unsigned varint of 32 bits")
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class FieldReader:
    """Decodes consecutive fields, from position `at` of `data`."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def varint(self) -> int:
        """Read an unsigned varint. Raises InvalidRecordError like decode_unsigned()."""
        value, self.at = decode_unsigned(self.data, self.at)
        return value

    def read_bytes(self, size: int) -> bytes:
        """Read `size` bytes. Raises ValueError if there are fewer."""
        if not 0 <= size <= len(self.data) - self.at:
            raise ValueError(
                f"expected {size} bytes at {self.at}, found {len(self.data) - self.at}"
            )
        self.at += size
        return bytes(self.data[self.at - size : self.at])


def _decode_groups(data: Bytes, start: int) -> tuple[int, int]:
    # A negative index would read from the end, without an error.
    assert start >= 0, start
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
