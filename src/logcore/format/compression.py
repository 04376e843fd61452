"""Compressed bodies in Kafka's framings.

A body holds the records of a v2 batch, or the inner entries of a v0/v1 wrapper.

    codec   body                                          level (default)     written form
    gzip    RFC 1952 members, read as one stream          1..9 or -1 (-1)     one member, mtime 0
    snappy  xerial stream of blocks, or one raw block     none                xerial, blocks of 32 KiB of plaintext
    lz4     one LZ4 frame of independent blocks           1..17 (9 = fast)    FLG 60, BD 40: 64 KiB, no checksums
    zstd    zstd frames, read as one stream               -131072..22 (3)     one frame with its content size

Rules:
- Any bytes may be stored. For all of them, decompress() returns a body or raises a
  LogcoreError.
- The size that a body declares is never trusted. Decompression stops once max_size is
  exceeded. No more memory is allocated than the largest content that the compressed
  bytes can encode.
- decompress() accepts everything that Kafka's own readers accept, except truncated ends
  that Kafka's readers ignore: 1-3 bytes after the last xerial block, the first bytes of
  another gzip member, a zstd body without bytes. xerial version numbers, which Java
  compares with 1, are not checked, because some writers write them in little-endian.
- A body that was truncated exactly between two gzip members, xerial blocks or zstd
  frames is valid for this module. The CRC and the record count of the batch detect the
  damage.

Peak memory of decompress() is the result plus at most 8 MiB. To keep to that limit,
a zstd frame of levels 20-22 without a content size takes two passes and a copy of its
compressed bytes.

This module does not check the CRCs of batches, does not read the decompressed data and
does not choose the codec.
"""

from __future__ import annotations

import enum
import functools
import importlib
import io
import os
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any

from logcore.errors import (
    CorruptBatchError,
    InvalidConfigError,
    InvalidRecordError,
    LogcoreError,
    RecordTooLargeError,
    ResourceError,
    UnsupportedCodecError,
)
from logcore.format.varint import decode_unsigned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

#: Maximum size of a decompressed body, in bytes. It is 64 times Kafka's default
#: max.message.bytes. That allows any real compression ratio of JSON. A few hostile
#: bodies at the same time do not exhaust the memory of a process.
DEFAULT_MAX_INFLATED = 64 * 1024 * 1024

#: The bits of a batch's attributes that hold its codec.
CODEC_MASK = 0x07


class Codec(enum.IntEnum):
    """The compression types of Kafka, numbered as in bits 0-2 of the attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


# The lowest, the highest and the default level of each codec.
_LEVELS = {
    Codec.GZIP: (-1, 9, -1),
    Codec.LZ4: (1, 17, 9),
    Codec.ZSTD: (-131072, 22, 3),
}
_INSTALL = {Codec.SNAPPY: "cramjam", Codec.LZ4: "lz4", Codec.ZSTD: "zstandard"}
_NAMES = {"none": Codec.NONE, "uncompressed": Codec.NONE} | {
    codec.name.lower(): codec for codec in list(Codec)[1:]
}


def codec_of(
    attributes: int,
    *,
    path: str | os.PathLike[str] | None = None,
    position: int | None = None,
) -> Codec:
    """Return the codec in the `attributes` of a batch or message.

    Types 5-7 raise UnsupportedCodecError.
    """
    found = attributes & CODEC_MASK
    if found > Codec.ZSTD:
        raise UnsupportedCodecError(
            "unknown compression type",
            path=path,
            position=position,
            expected="0-4",
            found=found,
        )
    return Codec(found)


def codec_named(name: str) -> Codec:
    """Return the codec for a `name` in Kafka's settings.

    "none" and "uncompressed" have the same meaning. Any other name raises
    InvalidConfigError, including "producer", which means the choice of the producer.
    """
    try:
        return _NAMES[name]
    except KeyError:
        raise InvalidConfigError(
            "unknown compression type",
            expected=" | ".join(sorted(_NAMES)),
            found=repr(name),
        ) from None


def compress(
    codec: Codec,
    data: Buffer,
    *,
    level: int | None = None,
    legacy_lz4_checksum: bool = False,
) -> bytes:
    """Return `data` as a body of `codec`. The codec NONE copies the data.

    Args:
        level: Kafka's compression.<codec>.level, None for its default. For LZ4, level 9
            is the fast compressor. All other levels are the slower compressor, which
            compresses better, as in Kafka.
        legacy_lz4_checksum: LZ4 only, for messages of format v0, whose readers expect a
            wrong header checksum.

    Raises:
        InvalidConfigError: The level is outside the codec's range, or the codec has no
            levels.
        UnsupportedCodecError: The package of the codec is not installed.
    """
    codec = Codec(codec)  # a bare int would match no branch below
    if level is None:
        level = 0
        if codec in _LEVELS:
            level = _LEVELS[codec][2]
    else:
        _check_level(codec, level)
    if codec is Codec.NONE:
        return bytes(data)
    if codec is Codec.GZIP:
        return zlib.compress(data, level, wbits=_GZIP_WBITS)
    if codec is Codec.SNAPPY:
        return _compress_snappy(data)
    if codec is Codec.LZ4:
        return _compress_lz4(data, level, legacy_checksum=legacy_lz4_checksum)
    compressed: bytes = _zstd_compressor(level).compress(data)
    return compressed


def decompress(
    codec: Codec,
    data: Buffer,
    *,
    max_size: int = DEFAULT_MAX_INFLATED,
    legacy_lz4: bool = False,
    path: str | os.PathLike[str] | None = None,
    position: int | None = None,
) -> bytes:
    """Return the decompressed content of a body of `codec`, as a new `bytes` object.

    The codec NONE copies the data.

    Args:
        data: Any contiguous buffer. It is read in place.
        max_size: Maximum number of bytes to return.
        legacy_lz4: Do not check the LZ4 header checksum, which writers of format v0
            computed wrongly.
        path, position: The file and the position in it at which `data` begins, for
            errors only.

    Raises:
        CorruptBatchError: The body is damaged, truncated or not of this codec.
        RecordTooLargeError: The content exceeds `max_size`.
        UnsupportedCodecError: The package of the codec is not installed.
        ResourceError: Memory ran out. The body may be valid.
    """
    assert max_size >= 0, max_size
    codec = Codec(codec)  # a bare int would match no branch below
    view = memoryview(data).cast("B")
    body = _Body(codec, view, max_size, path, position)
    try:
        if codec is Codec.GZIP:
            return _decompress_gzip(body)
        if codec is Codec.SNAPPY:
            return _decompress_snappy(body)
        if codec is Codec.LZ4:
            return _decompress_lz4(body, checks_header=not legacy_lz4)
        if codec is Codec.ZSTD:
            return _decompress_zstd(body)
        if len(view) > max_size:
            raise body.too_large(f"{len(view)} bytes")
        return bytes(view)
    except MemoryError as error:
        raise body.out_of_memory() from error


class _Body:
    """The bytes to decompress, the maximum size of the content, and the errors."""

    __slots__ = ("codec", "data", "max_size", "path", "position")

    def __init__(
        self,
        codec: Codec,
        data: memoryview,
        max_size: int,
        path: str | os.PathLike[str] | None,
        position: int | None,
    ) -> None:
        self.codec = codec
        self.data = data
        self.max_size = max_size
        self.path = path
        self.position = position

    def corrupt(
        self, reason: str, at: int = 0, *, expected: object = None, found: object = None
    ) -> CorruptBatchError:
        return CorruptBatchError(
            f"damaged {self.codec.name.lower()} body: {reason}",
            path=self.path,
            position=(self.position or 0) + at,
            expected=expected,
            found=found,
        )

    def too_large(self, found: str) -> RecordTooLargeError:
        return RecordTooLargeError(
            f"{self.codec.name.lower()} body inflates to more than the limit",
            path=self.path,
            position=self.position,
            expected=f"at most {self.max_size} bytes",
            found=found,
        )

    def out_of_memory(self) -> ResourceError:
        return ResourceError(
            f"no memory to inflate a {self.codec.name.lower()} body",
            path=self.path,
            position=self.position,
        )

    def refused(self, error: Exception, at: int = 0) -> LogcoreError:
        """Return the error for an exception of a codec's package.

        All packages raise the same class for lack of memory and for damage, and only the
        message differs. zlib's message contains the number -4 of Z_MEM_ERROR; the other
        libraries use words.
        """
        text = str(error)
        if "not enough memory" in text or text.startswith("Error -4 "):
            return self.out_of_memory()
        return self.corrupt(text, at)


# --- gzip -----------------------------------------------------------------------------

_GZIP_WBITS = 31  # 15 bits of window, plus 16 for gzip's header and trailer
_GZIP_MAGIC = b"\x1f\x8b\x08"
#: Maximum number of bytes that one call passes to zlib, and that it returns. Both are
#: far below the 8 MiB in the module docstring.
_GZIP_INPUT_BYTES = 256 * 1024
_GZIP_OUTPUT_BYTES = 1024 * 1024


def _decompress_gzip(body: _Body) -> bytes:
    data = body.data
    end = len(body.data)
    out = io.BytesIO()
    start = 0
    # At the end of a member zlib copies the rest of its input. A hostile body may contain
    # thousands of tiny members. So every member after the first starts with little input,
    # and all copies together remain proportional to the body.
    first_input_bytes = _GZIP_INPUT_BYTES
    while True:
        member_end = _decompress_gzip_member(body, start, first_input_bytes, out)
        # Java's reader ignores bytes after a member unless another member begins there.
        if data[member_end : member_end + 3] != _GZIP_MAGIC or member_end == end:
            return out.getvalue()
        start = member_end
        first_input_bytes = 4096


def _decompress_gzip_member(
    body: _Body, start: int, input_bytes: int, out: io.BytesIO
) -> int:
    """Decompress the member at `start` into `out`. Returns the position after it."""
    data = body.data
    position = start
    member = zlib.decompressobj(wbits=_GZIP_WBITS)
    pending: memoryview | bytes = (
        b""  # input that zlib left, because its output reached the limit
    )
    is_drained = True  # whether zlib has returned all content of the input so far
    while not member.eof:
        if not pending and is_drained:
            if position == len(data):
                raise body.corrupt("it ends inside a member", position)
            pending = data[position : position + input_bytes]
            position += len(pending)
            input_bytes = min(4 * input_bytes, _GZIP_INPUT_BYTES)
        try:
            plain = member.decompress(pending, _GZIP_OUTPUT_BYTES)
        except zlib.error as error:
            raise body.refused(error, start) from error
        # After a full chunk of output, zlib may have more output without more input.
        is_drained = len(plain) < _GZIP_OUTPUT_BYTES
        pending = member.unconsumed_tail
        out.write(plain)
        if out.tell() > body.max_size:
            raise body.too_large("more")
    return position - len(member.unused_data)


# --- snappy ---------------------------------------------------------------------------

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
# The version of the stream, and the oldest compatible version.
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES = 32 * 1024
assert len(_XERIAL_HEADER) == 16

# The densest element of a raw block is a copy of 64 bytes written in 3.
_SNAPPY_MAX_RATIO = 64 / 3


def _compress_snappy(data: Buffer) -> bytes:
    compress_raw = _package("cramjam", Codec.SNAPPY).snappy.compress_raw
    view = memoryview(data).cast("B")
    chunks: list[Any] = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = compress_raw(view[start : start + _XERIAL_BLOCK_BYTES])
        chunks += len(block).to_bytes(4, "big"), block
    return b"".join(chunks)


def _decompress_snappy(body: _Body) -> bytes:
    cramjam = _package("cramjam", Codec.SNAPPY)
    total = 0  # the sum of the declared sizes; _snappy_plain_size() refuses impossible sizes
    for _, _, plain_size in _snappy_blocks(body):
        total += plain_size
        if total > body.max_size:
            raise body.too_large(f"{total} bytes or more")

    # The blocks are read a second time, because a list of thousands of tiny blocks
    # would need more memory than the body.
    # getvalue() below returns this memory without a copy.
    out = io.BytesIO(bytes(total))
    with out.getbuffer() as target:
        plain_start = 0
        for start, end, plain_size in _snappy_blocks(body):
            plain_end = plain_start + plain_size
            try:
                written = cramjam.snappy.decompress_raw_into(
                    body.data[start:end], target[plain_start:plain_end]
                )
            except cramjam.DecompressionError as error:
                raise body.refused(error, start) from error
            if written != plain_size:
                raise body.corrupt(
                    "a block is shorter than its declared size",
                    start,
                    expected=plain_size,
                    found=written,
                )
            plain_start = plain_end
    return out.getvalue()


def _snappy_blocks(body: _Body) -> Iterator[tuple[int, int, int]]:
    """Return start, end and content size of each raw block.

    A body that is not a xerial stream is one block.
    """
    data = body.data
    end = len(body.data)
    # Only the magic is compared: some writers put the version numbers in little-endian.
    # No raw block begins with the magic, because the first element of that block would
    # copy from before its start.
    if data[:8] != _XERIAL_MAGIC:
        yield 0, end, _snappy_plain_size(body, 0, end)
        return
    position = 0
    while position < end:
        # A xerial header is at the start of the data, and of each appended stream.
        if data[position : position + 8] == _XERIAL_MAGIC:
            position += len(_XERIAL_HEADER)
            if position > end:
                raise body.corrupt("it ends inside a xerial header", end)
            continue
        if end - position < 4:
            raise body.corrupt(
                "it ends inside a block length",
                position,
                expected="4 bytes",
                found=end - position,
            )
        size = int.from_bytes(data[position : position + 4], "big", signed=True)
        start = position + 4
        if not 0 < size <= end - start:
            raise body.corrupt(
                "bad block length", position, expected=f"1..{end - start}", found=size
            )
        position = start + size
        yield start, position, _snappy_plain_size(body, start, position)


def _snappy_plain_size(body: _Body, start: int, end: int) -> int:
    """Return the declared content size of a raw block, if that size is possible."""
    try:
        plain_size, _ = decode_unsigned(body.data[start:end], 0)
    except InvalidRecordError as error:
        raise body.corrupt("bad length in a block", start) from error
    if plain_size > _SNAPPY_MAX_RATIO * (end - start):
        raise body.corrupt(
            "a block cannot inflate to its declared size",
            start,
            expected=f"at most {int(_SNAPPY_MAX_RATIO * (end - start))} bytes",
            found=f"{plain_size} bytes",
        )
    return plain_size


# --- lz4 ------------------------------------------------------------------------------

_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_LZ4_VERSION_MASK = 0xC0
_LZ4_VERSION_01 = 0x40
_LZ4_INDEPENDENT = 0x20
_LZ4_BLOCK_CHECKSUM = 0x10
_LZ4_CONTENT_SIZE = 0x08
_LZ4_CONTENT_CHECKSUM = 0x04
_LZ4_RESERVED = 0x03  # bit 0 announces a dictionary in newer versions of the format; Kafka supports none
_LZ4_STORED = 0x80000000  # bit of a block's size word: the block is not compressed
#: Maximum size of a block, by the BD byte of the header.
_LZ4_BLOCK_BYTES = {bd: 1 << 2 * (bd >> 4) + 8 for bd in (0x40, 0x50, 0x60, 0x70)}
assert list(_LZ4_BLOCK_BYTES.values()) == [64 << 10, 256 << 10, 1 << 20, 4 << 20]
_LZ4_CHECKSUM_POSITION = 6  # in our own frames, which have no content size
_LZ4_FAST_LEVEL = 9
_UINT32 = struct.Struct("<I")


def _compress_lz4(data: Buffer, level: int, *, legacy_checksum: bool) -> bytes:
    frame = _package("lz4.frame", Codec.LZ4)
    # Kafka's levels are 1-17 and 9 means the fast compressor. The package's levels 0-2
    # mean the fast compressor, and 12 is its highest.
    package_level = min(max(level, 3), 12)
    if level == _LZ4_FAST_LEVEL:
        package_level = 0
    compressed: bytes = frame.compress(
        data,
        compression_level=package_level,
        block_size=frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        store_size=False,
    )
    if legacy_checksum:
        # The wrong checksum of format v0 covers the magic too; the right one begins
        # after it.
        head = compressed[:_LZ4_CHECKSUM_POSITION]
        checksum = bytes([_lz4_checksum(head)])
        compressed = b"".join(
            (head, checksum, compressed[_LZ4_CHECKSUM_POSITION + 1 :])
        )
    return compressed


def _decompress_lz4(body: _Body, *, checks_header: bool) -> bytes:
    # The package's frame reader has no size limit and cannot reject linked blocks. So
    # this function reads the frame block by block, each of up to 64 KiB.
    decompress_block, block_error = _lz4_block_reader()
    data = body.data
    end = len(body.data)
    flags, block_bytes, position = _lz4_header(body, checks_header=checks_header)
    has_checksums = bool(flags & _LZ4_BLOCK_CHECKSUM)
    checksum_bytes = 0
    if has_checksums:
        checksum_bytes = 4
    out = io.BytesIO()
    while True:
        if end - position < 4:
            raise body.corrupt("it ends without an end mark", position)
        (size_word,) = _UINT32.unpack_from(data, position)
        size = size_word & ~_LZ4_STORED
        if size == 0:  # the end mark
            break
        start = position + 4
        block_end = position + 4 + size
        if size > block_bytes or block_end + checksum_bytes > end:
            limit = min(block_bytes, end - start - checksum_bytes)
            raise body.corrupt(
                "bad block length", position, expected=f"0..{limit}", found=size
            )
        if has_checksums:
            out.write(
                _decompress_lz4_checked(body, position, block_end + checksum_bytes)
            )
        elif size_word & _LZ4_STORED:
            out.write(data[start:block_end])
        else:
            try:
                out.write(
                    decompress_block(
                        data[start:block_end], uncompressed_size=block_bytes
                    )
                )
            except block_error as error:
                raise body.refused(error, start) from error
        if out.tell() > body.max_size:
            raise body.too_large("more")
        position = block_end + checksum_bytes
    # Like Kafka's reader, require the content checksum after the end mark (4 bytes
    # each) and do not compare it, because the CRC of the batch covers the same bytes.
    if flags & _LZ4_CONTENT_CHECKSUM and end - position < 8:
        raise body.corrupt("it ends inside the content checksum", position + 4)
    return out.getvalue()


def _lz4_header(body: _Body, *, checks_header: bool) -> tuple[int, int, int]:
    """Return the flags, the maximum block size and the position of the first block.

    It rejects the same headers as Kafka's reader.
    """
    data = body.data
    if data[:4] != _LZ4_MAGIC:
        raise body.corrupt(
            "not an LZ4 frame", expected=_LZ4_MAGIC.hex(), found=bytes(data[:4]).hex()
        )
    checksum_position = 6
    if len(data) > 4 and data[4] & _LZ4_CONTENT_SIZE:
        checksum_position += 8
    if len(data) <= checksum_position:
        raise body.corrupt("it ends inside the frame header", len(data))
    flags = data[4]
    block_descriptor = data[5]
    if (
        flags & _LZ4_VERSION_MASK != _LZ4_VERSION_01
        or flags & _LZ4_RESERVED
        or not flags & _LZ4_INDEPENDENT
    ):
        raise body.corrupt(
            "unusable frame flags",
            4,
            expected="version 01, independent blocks, no dictionary",
            found=f"{flags:#04x}",
        )
    block_bytes = _LZ4_BLOCK_BYTES.get(block_descriptor)
    if block_bytes is None:
        raise body.corrupt(
            "bad block size",
            5,
            expected="0x40 | 0x50 | 0x60 | 0x70",
            found=f"{block_descriptor:#04x}",
        )
    if checks_header:
        expected = _lz4_checksum(bytes(data[4:checksum_position]))
        found = data[checksum_position]
        if found != expected:
            raise body.corrupt(
                "bad header checksum",
                checksum_position,
                expected=f"{expected:#04x}",
                found=f"{found:#04x}",
            )
    return flags, block_bytes, checksum_position + 1


def _decompress_lz4_checked(body: _Body, start: int, end: int) -> bytes:
    """Return the content of one block, from its length to its checksum.

    The package checks the checksum of a block only inside a frame, so this builds a
    frame of one block.
    """
    block_descriptor = body.data[5]
    descriptor = bytes(
        (_LZ4_VERSION_01 | _LZ4_INDEPENDENT | _LZ4_BLOCK_CHECKSUM, block_descriptor)
    )
    head = _LZ4_MAGIC + descriptor + bytes([_lz4_checksum(descriptor)])
    end_mark = bytes(4)
    frame = _package("lz4.frame", Codec.LZ4)
    try:
        plain: bytes = frame.decompress(
            b"".join((head, body.data[start:end], end_mark))
        )
    except RuntimeError as error:
        raise body.refused(error, start) from error
    return plain


def _lz4_block_reader() -> tuple[Any, type[Exception]]:
    block = _package("lz4.block", Codec.LZ4)
    return block.decompress, block.LZ4BlockError


@functools.lru_cache(maxsize=64)
def _lz4_checksum(head: bytes) -> int:
    """Return the second byte of XXH32 with seed 0 over fewer than 16 bytes.

    The LZ4 frame format prescribes it for headers. Format v0 also includes the magic of
    the frame, because of an old mistake in Kafka's writer.
    """
    assert len(head) < 16, head
    prime_1 = 0x9E3779B1
    prime_2 = 0x85EBCA77
    prime_3 = 0xC2B2AE3D
    prime_4 = 0x27D4EB2F
    prime_5 = 0x165667B1
    value = prime_5 + len(head)
    words_end = len(head) & ~3
    for (word,) in _UINT32.iter_unpack(head[:words_end]):
        value = _rotate_left(value + word * prime_3, 17) * prime_4
    for byte in head[words_end:]:
        value = _rotate_left(value + byte * prime_5, 11) * prime_1
    value &= 0xFFFFFFFF
    value = (value ^ value >> 15) * prime_2 & 0xFFFFFFFF
    value = (value ^ value >> 13) * prime_3 & 0xFFFFFFFF
    return (value ^ value >> 16) >> 8 & 0xFF


def _rotate_left(value: int, count: int) -> int:
    value &= 0xFFFFFFFF
    return (value << count | value >> 32 - count) & 0xFFFFFFFF


# --- zstd -----------------------------------------------------------------------------

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE_MASK = 0xFFFFFFF0  # sixteen magics mark a skippable frame
_ZSTD_SKIPPABLE = 0x184D2A50
_ZSTD_MAX_BLOCK_BYTES = 128 * 1024
_ZSTD_RLE_BLOCK = 1
_ZSTD_COMPRESSED_BLOCK = 2
_ZSTD_CONTENT_CHECKSUM = 0x04  # bit of a frame's descriptor
#: The largest window for which a decompressor is kept. It is the 8 MiB in the module
#: docstring.
_ZSTD_KEPT_WINDOW_BYTES = 8 * 1024 * 1024
#: Chunk size for measuring a frame without a content size. The content is discarded.
_ZSTD_MEASURED_BYTES = 256 * 1024
#: Number of compressors that each thread keeps, one for each level.
_ZSTD_KEPT_COMPRESSORS = 8

# Creating a zstd context takes longer than decompressing a small batch, and a context
# must not serve two threads at a time, so each thread keeps its own. A context keeps
# nothing of a previous call, and a fork copies it like any memory.
_CONTEXTS = threading.local()


def _zstd_compressor(level: int) -> Any:
    compressors: dict[int, Any] | None = getattr(_CONTEXTS, "zstd_compressors", None)
    if compressors is None:
        compressors = _CONTEXTS.zstd_compressors = {}
    compressor = compressors.get(level)
    if compressor is None:
        if len(compressors) >= _ZSTD_KEPT_COMPRESSORS:
            compressors.clear()
        compressor = compressors[level] = _package(
            "zstandard", Codec.ZSTD
        ).ZstdCompressor(level=level)
    return compressor


def _zstd_decompressor(zstandard: Any, window_bytes: int) -> Any:
    if window_bytes > _ZSTD_KEPT_WINDOW_BYTES:
        # A decompressor keeps a buffer as large as the window, so this one is not
        # reused.
        return zstandard.ZstdDecompressor()
    decompressor = getattr(_CONTEXTS, "zstd_decompressor", None)
    if decompressor is None:
        decompressor = _CONTEXTS.zstd_decompressor = zstandard.ZstdDecompressor()
    return decompressor


def _decompress_zstd(body: _Body) -> bytes:
    if not body.data:
        raise body.corrupt("it is empty")
    chunks = _decompress_zstd_frames(body)
    first = next(chunks, b"")
    out = None  # made for a second frame: nearly every body is one frame, whose content is returned without a copy
    for chunk in chunks:
        if out is None:
            out = io.BytesIO()
            out.write(first)
        out.write(chunk)
    if out is None:
        return first
    return out.getvalue()


def _decompress_zstd_frames(body: _Body) -> Iterator[bytes]:
    zstandard = _package("zstandard", Codec.ZSTD)
    position = 0
    end = len(body.data)
    remaining = body.max_size  # the maximum content of the frames from `position`
    while position < end:
        if end - position < 4:
            raise body.corrupt("it ends inside a frame header", end)
        (magic,) = _UINT32.unpack_from(body.data, position)
        if magic & _ZSTD_SKIPPABLE_MASK == _ZSTD_SKIPPABLE:
            position = _skip_zstd_frame(body, position)
            continue
        if magic != _ZSTD_MAGIC:
            raise body.corrupt(
                "not a zstd frame",
                position,
                expected=f"{_ZSTD_MAGIC:#010x}",
                found=f"{magic:#010x}",
            )
        start = position
        content_size, window_bytes, max_content_bytes, position = _zstd_frame(
            body, start
        )
        if content_size is not None and content_size > max_content_bytes:
            raise body.corrupt(
                "a frame cannot inflate to its declared size",
                start,
                expected=f"at most {max_content_bytes} bytes",
                found=f"{content_size} bytes",
            )
        if content_size is not None and content_size > remaining:
            inflated_bytes = (
                body.max_size - remaining
            )  # the content of the earlier frames
            raise body.too_large(f"{inflated_bytes + content_size} bytes")
        decompressor = _zstd_decompressor(zstandard, window_bytes)
        frame: Buffer = body.data[start:position]
        try:
            # Frames of levels 20-22 without a content size, see above
            # _measure_zstd_frame().
            if (
                content_size is None
                and min(window_bytes, max_content_bytes, remaining)
                > _ZSTD_KEPT_WINDOW_BYTES
            ):
                content_size = _measure_zstd_frame(decompressor, frame, remaining)
                if content_size > remaining:
                    raise body.too_large("more")
                frame = _with_content_size(body.data[start:position], content_size)
                # The decompressor that measured the content still holds its window.
                decompressor = zstandard.ZstdDecompressor()
            is_bounded = content_size is None and max_content_bytes <= remaining
            if content_size or is_bounded:
                # max_output_size=0 would mean no limit.
                plain = decompressor.decompress(
                    frame, max_output_size=max_content_bytes or 1
                )
            else:
                # The frame may inflate to more than the limit: read one byte more than
                # the limit, which the check below finds. A frame with a declared size of
                # 0 is read like this too, because decompress() would return nothing
                # without reading its blocks.
                plain = decompressor.stream_reader(frame).read(
                    min(max_content_bytes, remaining) + 1
                )
        except zstandard.ZstdError as error:
            raise body.refused(error, start) from error
        if len(plain) > remaining:
            raise body.too_large("more")
        remaining -= len(plain)
        yield plain


def _zstd_frame(body: _Body, start: int) -> tuple[int | None, int, int, int]:
    """Return content size, if any, window, maximum content and end of a frame.

    Only lengths are read (RFC 8878, 3.1.1); libzstd checks the content. The end allows
    decompressing frames one by one. With the maximum content, no header decides how
    much memory is allocated.
    """
    data = body.data
    end = len(body.data)
    # Magic 4, descriptor 1, window 0-1, dictionary id 0-4, content size 0-8.
    descriptor = 0
    if end - start > 4:
        descriptor = data[start + 4]
    # A single segment has no window: its content is inflated into one buffer.
    is_single_segment = bool(descriptor & 0x20)
    content_size_bytes = (0, 2, 4, 8)[descriptor >> 6]
    window_field_bytes = 1
    if is_single_segment:
        window_field_bytes = 0
        content_size_bytes = content_size_bytes or 1
    dictionary_id_bytes = (0, 1, 2, 4)[descriptor & 3]
    content_size_position = start + 5 + window_field_bytes + dictionary_id_bytes
    position = content_size_position + content_size_bytes
    if position > end:
        raise body.corrupt("it ends inside a frame header", end)
    content_size = None
    if content_size_bytes:
        content_size = int.from_bytes(data[content_size_position:position], "little")
        if content_size_bytes == 2:
            content_size += 256  # two bytes encode sizes above 255
    if is_single_segment:
        assert content_size is not None
        window_bytes = content_size
    else:
        # 5 bits are the exponent, and 3 bits are the number of eighths to add.
        window_field = data[start + 5]
        window_bytes = 1 << 10 + (window_field >> 3)
        window_bytes += (window_bytes >> 3) * (window_field & 7)

    block_bytes = min(window_bytes, _ZSTD_MAX_BLOCK_BYTES)
    max_content_bytes = 0
    is_last = False
    while not is_last:
        if end - position < 3:
            raise body.corrupt("it ends inside a frame", min(position, end))
        head = data[position] | data[position + 1] << 8 | data[position + 2] << 16
        is_last = bool(head & 1)
        kind = head >> 1 & 3
        # A raw block stores its content. One byte of an RLE block expands to `size`
        # bytes. A compressed block holds any number of bytes up to the limit of the
        # frame.
        size = head >> 3
        plain_bytes = size
        stored_bytes = size
        if kind == _ZSTD_COMPRESSED_BLOCK:
            plain_bytes = block_bytes
        elif kind == _ZSTD_RLE_BLOCK:
            stored_bytes = 1
        max_content_bytes += plain_bytes
        position += 3 + stored_bytes
    if descriptor & _ZSTD_CONTENT_CHECKSUM:
        position += 4
    if position > end:
        raise body.corrupt("it ends inside a frame", end)
    return content_size, window_bytes, max_content_bytes, position


# Without a content size, libzstd decompresses into its own window and copies from there.
# So a frame with a window as large as the limit would need the limit twice. With a content
# size, libzstd decompresses directly into the result. Frames with such a window are rare,
# and are decompressed twice: first to measure the content, then with the size added to
# the header.


def _measure_zstd_frame(decompressor: Any, frame: Buffer, remaining: int) -> int:
    reader = decompressor.stream_reader(frame)
    size = 0
    while size <= remaining and (plain := reader.read(_ZSTD_MEASURED_BYTES)):
        size += len(plain)
    return size


def _with_content_size(frame: memoryview, content_size: int) -> bytes:
    """Return `frame`, which has a window and no content size, with an 8-byte content size."""
    descriptor = frame[4]
    dictionary_id_bytes = (0, 1, 2, 4)[descriptor & 3]
    blocks_start = 6 + dictionary_id_bytes
    new_descriptor = bytes([descriptor | 0xC0])  # announces 8 bytes of content size
    head = b"".join((frame[:4], new_descriptor, frame[5:blocks_start]))
    return b"".join((head, content_size.to_bytes(8, "little"), frame[blocks_start:]))


def _skip_zstd_frame(body: _Body, start: int) -> int:
    data = body.data
    end = len(body.data)
    frame_end = start + 8
    if frame_end <= end:
        frame_end += _UINT32.unpack_from(data, start + 4)[0]
    if frame_end > end:
        raise body.corrupt("it ends inside a skippable frame", start)
    return frame_end


# --- all ------------------------------------------------------------------------------


def _package(name: str, codec: Codec) -> Any:
    """Import the module `name` at its first use.

    So importing logcore remains fast, and unused packages may be missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedCodecError(
            f"{codec.name.lower()} needs a package that is not installed: pip install {_INSTALL[codec]}"
        ) from error


def _check_level(codec: Codec, level: int) -> None:
    if codec not in _LEVELS:
        raise InvalidConfigError(
            f"{codec.name.lower()} has no levels", expected="no level", found=level
        )
    lowest, highest, _ = _LEVELS[codec]
    if not lowest <= level <= highest or (codec is Codec.GZIP and level == 0):
        allowed = "-1 | 1..9"
        if codec is not Codec.GZIP:
            allowed = f"{lowest}..{highest}"
        raise InvalidConfigError(
            f"level out of range for {codec.name.lower()}",
            expected=allowed,
            found=level,
        )
