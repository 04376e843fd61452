"""Varints for tests that encode or decode records by hand."""

from __future__ import annotations


def encode(n: int) -> bytes:
    """Return the shortest zig-zag form."""
    return encode_unsigned((n << 1) ^ (n >> 63))


def encode_unsigned(n: int) -> bytes:
    """Return the shortest form without zig-zag."""
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def decode_int64(data: bytes, position: int) -> tuple[int, int]:
    """Decode a zig-zag varint of up to ten bytes, and return the value and the position
    after it.
    """
    groups = shift = 0
    while True:
        byte = data[position]
        position += 1
        groups |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (groups >> 1) ^ -(groups & 1), position
