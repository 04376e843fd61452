"""Decoder of message formats v0 and v1, which Kafka wrote before version 0.11.

    entry    offset i64 | size i32 | crc u32 | magic i8 | attributes i8 | [timestamp i64, v1] |
             key length i32 | key | value length i32 | value
    crc      CRC-32 (zlib) of all bytes after it
    wrapper  an entry whose attributes name a codec; its value, inflated, is a run of plain entries of the same magic

                             v0                 v1
    wrapper offset           of last inner      of last inner; 0 if a producer wrote no offset
    inner offsets            absolute           relative: wrapper - last inner + inner (wrapper 0: as they are)
    inner timestamp          -1                 its own; the wrapper's if that is of type LogAppendTime

Rules:
- Callers call check() first: the other functions assume that the entry's own CRC is
  valid.
- Nevertheless, each length is checked against the remaining bytes, and each inner entry
  is verified.
- A negative length means null, and bytes after the value are ignored, as in Kafka.
- A truncated inner entry ends its wrapper without an error, as in Kafka. A wrapper
  without any complete inner entry is an error.

This module does not encode. These formats have no headers, producers or leader epochs.
The module does not find the end of an entry: each function takes one whole entry,
including its 12-byte prefix.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TypeAlias

from logcore.errors import CorruptBatchError, InvalidRecordError
from logcore.format.compression import DEFAULT_MAX_INFLATED, Codec, codec_of, decompress

#: Offset and size, before the message.
PREFIX_SIZE_BYTES = 12
#: Smallest message: v0, null key, null value.
MIN_MESSAGE_SIZE_BYTES = 14
#: Timestamp of v0 messages.
NO_TIMESTAMP_MS = -1

_HEAD = struct.Struct(">qiIbb")  # offset, size, crc, magic, attributes
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")
_CRC_START = 16  # the CRC covers magic to the end of the message
_LOG_APPEND_TIME = 0x08  # bit of the attributes
_INT64_MIN = -(1 << 63)
_INT64_MAX = (1 << 63) - 1
_MIN_ENTRY_SIZE_BYTES = PREFIX_SIZE_BYTES + MIN_MESSAGE_SIZE_BYTES
assert _HEAD.size == 18

#: offset, timestamp_ms, key, value. A tuple is cheap to create for each record.
Record: TypeAlias = tuple[int, int, bytes | None, bytes | None]


def check(
    entry: memoryview,
    *,
    path: str | os.PathLike[str] | None = None,
    position: int | None = None,
) -> None:
    """Raise CorruptBatchError unless `entry` is one whole v0 or v1 entry with a
    matching CRC.

    For a wrapper, the CRC covers its compressed value; decode() verifies the inner
    entries. `path` and `position` locate `entry`, for errors only.
    """
    _, size, crc, _, _ = _head(entry, path, position)
    if size != len(entry) - PREFIX_SIZE_BYTES:
        raise CorruptBatchError(
            "the size of a message differs from the size of its entry",
            path=path,
            position=position,
            expected=f"{len(entry) - PREFIX_SIZE_BYTES} bytes",
            found=f"{size} bytes",
        )
    found = zlib.crc32(entry[_CRC_START:])
    if found != crc:
        raise CorruptBatchError(
            "CRC-32 of a message does not match",
            path=path,
            position=position,
            expected=f"{crc:#010x}",
            found=f"{found:#010x}",
        )


def last_offset(entry: memoryview) -> int:
    """Return the stored offset of the entry: for a wrapper, the offset of its last record.

    The result is 0 for a wrapper that a producer sent without offsets.

    Raises:
        CorruptBatchError: the entry has less than 26 bytes, or is not of v0 or v1.
    """
    return _head(entry, None, None)[0]


def max_timestamp(entry: memoryview) -> int:
    """Return the stored timestamp of the entry, in ms since the epoch; -1 for v0.

    In a wrapper that a broker wrote, the timestamp is the largest inner timestamp or the
    append time. In a wrapper from a producer, the timestamp can have any value.

    Raises:
        CorruptBatchError: the entry has less than 26 bytes, or is not of v0 or v1.
    """
    return _timestamp_ms(entry, _head(entry, None, None)[3])


def decode(
    entry: memoryview,
    *,
    max_size: int = DEFAULT_MAX_INFLATED,
    path: str | os.PathLike[str] | None = None,
    position: int | None = None,
) -> list[Record]:
    """Return the records of one entry: one record, or all records of a wrapper.

    A record is (offset, timestamp in ms, key, value). The entry must have passed
    check(). Errors inside a wrapper carry the position of the wrapper, because inflated
    bytes have no position in the file.

    Args:
        entry: one whole entry.
        max_size: maximum size of the inflated content of a wrapper.
        path, position: the file and the position of `entry` in it, for errors only.

    Raises:
        CorruptBatchError: a CRC or compressed bytes inside a wrapper are wrong.
        InvalidRecordError: the entry breaks a rule of the format.
        RecordTooLargeError: a wrapper inflates to more than `max_size` bytes.
        UnsupportedCodecError: the compression type is 5-7.
    """
    wrapper_offset, _, _, magic, attributes = _head(entry, path, position)
    codec = codec_of(attributes, path=path, position=position)
    key, value, value_end = _key_and_value(entry, magic, path, position)
    if codec is Codec.NONE:
        return [(wrapper_offset, _timestamp_ms(entry, magic), _copy(key), _copy(value))]
    if codec is Codec.ZSTD:
        raise InvalidRecordError(
            "zstd is not allowed before format v2",
            path=path,
            position=position,
            expected="codec 0-3",
            found=codec,
        )
    if value is None:
        raise InvalidRecordError(
            "a compressed wrapper has no value", path=path, position=position
        )
    value_position = (position or 0) + value_end - len(value)
    inflated = memoryview(
        decompress(
            codec,
            value,
            max_size=max_size,
            legacy_lz4=magic == 0,
            path=path,
            position=value_position,
        )
    )
    records = _inner_records(inflated, magic, path, position)
    if not records:
        raise InvalidRecordError(
            "a compressed wrapper holds no message", path=path, position=position
        )
    if magic == 0:  # inner offsets are absolute already, and there are no timestamps
        return records
    append_time_ms = None
    if attributes & _LOG_APPEND_TIME:
        append_time_ms = _timestamp_ms(entry, magic)
    return _absolute(records, wrapper_offset, append_time_ms, path, position)


def _inner_records(
    inflated: memoryview,
    wrapper_magic: int,
    path: str | os.PathLike[str] | None,
    position: int | None,
) -> list[Record]:
    """Return the entries inside a wrapper, with their stored offsets and timestamps."""
    records: list[Record] = []
    start = 0
    end = len(inflated)
    while end - start >= PREFIX_SIZE_BYTES:
        (size,) = _INT32.unpack_from(inflated, start + 8)
        if size < MIN_MESSAGE_SIZE_BYTES:
            raise CorruptBatchError(
                "a message inside a wrapper is too small",
                path=path,
                position=position,
                expected=f"at least {MIN_MESSAGE_SIZE_BYTES} bytes",
                found=f"{size} bytes",
            )
        entry_end = start + PREFIX_SIZE_BYTES + size
        if entry_end > end:  # truncated, see the rules above
            break
        inner = inflated[start:entry_end]
        offset, _, crc, magic, attributes = _HEAD.unpack_from(inner)
        if magic != wrapper_magic:
            raise InvalidRecordError(
                "a message inside a wrapper is of another format",
                path=path,
                position=position,
                expected=f"magic {wrapper_magic}",
                found=f"magic {magic}",
            )
        if codec_of(attributes, path=path, position=position) is not Codec.NONE:
            raise InvalidRecordError(
                "a message inside a wrapper is compressed itself",
                path=path,
                position=position,
            )
        found = zlib.crc32(inner[_CRC_START:])
        if found != crc:
            raise CorruptBatchError(
                "CRC-32 of a message inside a wrapper does not match",
                path=path,
                position=position,
                expected=f"{crc:#010x}",
                found=f"{found:#010x}",
            )
        key, value, _ = _key_and_value(inner, magic, path, position)
        records.append((offset, _timestamp_ms(inner, magic), _copy(key), _copy(value)))
        start = entry_end
    return records


def _absolute(
    records: list[Record],
    wrapper_offset: int,
    append_time_ms: int | None,
    path: str | os.PathLike[str] | None,
    position: int | None,
) -> list[Record]:
    """Return the records of a v1 wrapper with absolute offsets and final timestamps."""
    last_inner_offset = records[-1][0]
    # A producer writes 0 into the wrapper and numbers its messages from 0. Their inner
    # offsets are then absolute.
    base_offset = 0
    if wrapper_offset:
        base_offset = wrapper_offset - last_inner_offset
    if base_offset < 0:
        raise InvalidRecordError(
            "the offset of a wrapper is below the offset of its last message",
            path=path,
            position=position,
            expected=f"0, or at least {last_inner_offset}",
            found=wrapper_offset,
        )
    absolute = []
    for inner_offset, timestamp_ms, key, value in records:
        offset = base_offset + inner_offset
        if not _INT64_MIN <= offset <= _INT64_MAX:
            raise InvalidRecordError(
                "an offset inside a wrapper exceeds 64 bits",
                path=path,
                position=position,
                offset=wrapper_offset,
                expected="an int64",
                found=offset,
            )
        absolute.append((offset, timestamp_ms, key, value))
    if append_time_ms is None:
        return absolute
    return [(offset, append_time_ms, key, value) for offset, _, key, value in absolute]


def _head(
    entry: memoryview, path: str | os.PathLike[str] | None, position: int | None
) -> tuple[int, int, int, int, int]:
    """Return offset, size, crc, magic (0 or 1) and attributes."""
    if len(entry) < _MIN_ENTRY_SIZE_BYTES:
        raise CorruptBatchError(
            "an entry is too small",
            path=path,
            position=position,
            expected=f"at least {_MIN_ENTRY_SIZE_BYTES} bytes",
            found=f"{len(entry)} bytes",
        )
    offset, size, crc, magic, attributes = _HEAD.unpack_from(entry)
    if magic not in (0, 1):
        raise CorruptBatchError(
            "not a message of format v0 or v1",
            path=path,
            position=position,
            expected="magic 0 | 1",
            found=magic,
        )
    return offset, size, crc, magic, attributes


def _timestamp_ms(entry: memoryview, magic: int) -> int:
    if magic == 0:
        return NO_TIMESTAMP_MS
    # _head() has checked that the entry has 26 bytes.
    timestamp_ms: int = _INT64.unpack_from(entry, _HEAD.size)[0]
    return timestamp_ms


def _key_and_value(
    entry: memoryview,
    magic: int,
    path: str | os.PathLike[str] | None,
    position: int | None,
) -> tuple[memoryview | None, memoryview | None, int]:
    """Return the key, the value, and the position in `entry` after the value."""
    key_position = _HEAD.size
    if magic == 1:
        key_position += _INT64.size  # the timestamp
    key, value_position = _sized(entry, key_position, "key", path, position)
    value, value_end = _sized(entry, value_position, "value", path, position)
    return key, value, value_end


def _sized(
    entry: memoryview,
    start: int,
    field: str,
    path: str | os.PathLike[str] | None,
    position: int | None,
) -> tuple[memoryview | None, int]:
    """Return the length-prefixed bytes at `start` of `entry`, or None for null, and the
    position after them.
    """
    left = len(entry) - start - 4
    if left < 0:
        raise InvalidRecordError(
            f"a message ends before its {field}",
            path=path,
            position=position,
            expected="4 bytes of length",
            found=f"{left + 4} bytes",
        )
    (size,) = _INT32.unpack_from(entry, start)
    if size < 0:
        return None, start + 4
    if size > left:
        raise InvalidRecordError(
            f"the {field} of a message is longer than the message",
            path=path,
            position=position,
            expected=f"at most {left} bytes",
            found=f"{size} bytes",
        )
    return entry[start + 4 : start + 4 + size], start + 4 + size


def _copy(data: memoryview | None) -> bytes | None:
    if data is None:
        return None
    return bytes(data)
