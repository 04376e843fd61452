"""Builds compressed bodies byte by byte, including bodies that inflate to a gibibyte."""

from __future__ import annotations

import gzip
import struct
import zlib

import cramjam
import lz4.frame

from logcore.format.compression import Codec, compress
from support.varints import encode_unsigned

MIB = 1 << 20


def lz4_frame(
    *blocks: bytes,
    flags: int = 0x60,
    descriptor: int = 0x40,
    extra: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """Return a frame of the given blocks. xxh32() calculates the header checksum."""
    head = bytes((flags, descriptor)) + extra
    return (
        b"\x04\x22\x4d\x18"
        + head
        + bytes([xxh32(head) >> 8 & 0xFF])
        + b"".join(blocks)
        + bytes(4)
        + tail
    )


def xxh32(data: bytes) -> int:
    """Return XXH32 with seed 0. LZ4 calculates it as the content checksum at the end of a
    frame.
    """
    return int.from_bytes(
        lz4.frame.compress(data, content_checksum=True, store_size=False)[-4:], "little"
    )


def zstd_frame(
    blocks: bytes, *, window: int | None = 0x58, content_size: int | None = None
) -> bytes:
    """Return a frame of given blocks. window=0x58 means 2 MiB, 0x88 means 128 MiB."""
    descriptor = 0 if content_size is None else 0xC0
    size = b"" if content_size is None else struct.pack("<Q", content_size)
    return b"\x28\xb5\x2f\xfd" + bytes((descriptor, window)) + size + blocks


def zstd_rle(count: int, size: int = 128 * 1024, last: bool = True) -> bytes:
    block = (size << 3 | 1 << 1).to_bytes(3, "little") + b"\x00"
    final = (size << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\x00"
    return block * (count - 1) + final if last else block * count


def bombs(size: int = 1 << 30) -> dict[str, tuple[Codec, bytes]]:
    """Return bodies that inflate to `size` zeros. Each body repeats one compressed chunk,
    so that it is built fast.
    """
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    # Each mebibyte is compressed alone and refers to no earlier data.
    mebibyte = deflate.compress(bytes(MIB)) + deflate.flush(zlib.Z_FULL_FLUSH)
    gzip_head = b"\x1f\x8b\x08" + bytes(7)
    # A larger body is refused before its CRC is checked.
    crc = zlib.crc32(bytes(size)) if size <= 4 * MIB else 0
    gzip_tail = deflate.flush() + struct.pack("<II", crc, size)

    block = bytes(cramjam.snappy.compress_raw(bytes(32768)))
    # A literal zero, a copy of 63 bytes from one back, then copies of 64.
    raw = (
        encode_unsigned(size)
        + b"\x00\x00\xfa\x01\x00"
        + b"\xfe\x01\x00" * (size // 64 - 1)
    )
    lz4_block = lz4.frame.compress(bytes(65536), block_linked=False, store_size=False)[
        7:-4
    ]
    checked = lz4.frame.compress(
        bytes(65536), block_linked=False, store_size=False, block_checksum=True
    )[7:-4]
    rle = zstd_rle(size // 131072)
    sized = struct.pack("<Q", size)
    return {
        "gzip": (Codec.GZIP, gzip_head + mebibyte * (size // MIB) + gzip_tail),
        "gzip members": (
            Codec.GZIP,
            gzip.compress(bytes(MIB // 2)) * (2 * size // MIB),
        ),
        "snappy": (
            Codec.SNAPPY,
            compress(Codec.SNAPPY, b"")
            + (struct.pack(">i", len(block)) + block) * (size // 32768),
        ),
        "snappy raw": (Codec.SNAPPY, raw),
        "lz4": (Codec.LZ4, lz4_frame(lz4_block * (size // 65536))),
        "lz4 checked": (Codec.LZ4, lz4_frame(checked * (size // 65536), flags=0x70)),
        "lz4 sized": (
            Codec.LZ4,
            lz4_frame(lz4_block * (size // 65536), flags=0x68, extra=sized),
        ),
        "zstd": (Codec.ZSTD, zstd_frame(rle)),
        "zstd sized": (Codec.ZSTD, zstd_frame(rle, content_size=size)),
        "zstd window": (Codec.ZSTD, zstd_frame(rle, window=0x88)),
        "zstd frames": (Codec.ZSTD, zstd_frame(zstd_rle(4)) * (size // 524288)),
    }


BOMBS = bombs()
