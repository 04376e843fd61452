"""Binary layouts: the head of a v2 batch, its facts, and the columns of its records.

These tables are the only definition of the layouts. The plain kernels use them
directly, the compiled kernels check their constants against them when they are
imported, and recordbatch, columns and the dump tool use their names.

This module reads and writes no bytes. It has one algorithm, which both kinds of kernels
need: the conversion of timestamps.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

#: Head of a v2 batch, big-endian. Field names follow Kafka's message format page.
HEADER: Final = np.dtype(
    [
        ("base_offset", ">i8"),
        ("batch_length", ">i4"),
        ("partition_leader_epoch", ">i4"),
        ("magic", "i1"),
        ("crc", ">u4"),
        ("attributes", ">i2"),
        ("last_offset_delta", ">i4"),
        ("base_timestamp", ">i8"),
        ("max_timestamp", ">i8"),
        ("producer_id", ">i8"),
        ("producer_epoch", ">i2"),
        ("base_sequence", ">i4"),
        ("record_count", ">i4"),
    ]
)
HEADER_SIZE: Final = HEADER.itemsize
HEADER_FORMAT: Final = ">qiibIhiqqqhii"  # the same head as a format of struct
CRC_START: Final = 21  # the CRC covers attributes to the end of the batch
LOG_OVERHEAD: Final = 12  # base offset and length, which the length does not count
MAGIC_POSITION: Final = 16
PREFIX_SIZE: Final = 17  # bytes needed to choose a decoder
#: A length below this cannot even hold the fixed part of a v0 message
#: (LegacyRecord.RECORD_OVERHEAD_V0).
MIN_LENGTH: Final = 14
#: Length, attributes, two deltas, two lengths and a header count, of one byte each.
MIN_RECORD_SIZE: Final = 7
#: Maximum size of a record in addition to its key, value and headers: 36 bytes, if all
#: its varints have their full width. The rule for closing a batch uses it, so that no
#: kernel needs the exact size of a record in advance.
OVERHEAD: Final = 41
INT32_MAX: Final = 2**31 - 1

CODEC_MASK: Final = 0x07
APPEND_TIME_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40

assert HEADER_SIZE == 61
assert HEADER.fields is not None
assert HEADER.fields["attributes"][1] == CRC_START
assert HEADER.fields["magic"][1] == MAGIC_POSITION

#: The result of a walk over batch heads, in native byte order. v0 and v1 entries have
#: -1 in the producer fields and as record_count. Their base_offset is the offset in the
#: entry, which for a wrapper is its last offset.
BATCH_FACTS: Final = np.dtype(
    [
        ("position", "i8"),
        ("base_offset", "i8"),
        ("last_offset", "i8"),
        ("base_timestamp", "i8"),
        ("max_timestamp", "i8"),
        ("producer_id", "i8"),
        ("size_bytes", "i4"),
        ("partition_leader_epoch", "i4"),
        ("base_sequence", "i4"),
        ("record_count", "i4"),
        ("crc", "u4"),
        ("producer_epoch", "i2"),
        ("attributes", "i2"),
        ("magic", "i1"),
    ],
    align=True,
)
assert BATCH_FACTS.itemsize == 80

#: Columns of decoded records, stored one after the other in one block: all offsets,
#: then all timestamps, and so on. Positions are bytes in the decoded data. A size of -1
#: is null. A header position is the start of the first header. An i4 is large enough,
#: because neither a batch nor a segment can exceed 2^31-1 bytes.
COLUMNS: Final = (
    ("offsets", "i8"),
    ("timestamps_ms", "i8"),
    ("key_positions", "i4"),
    ("key_sizes", "i4"),
    ("value_positions", "i4"),
    ("value_sizes", "i4"),
    ("header_positions", "i4"),
    ("header_counts", "i4"),
)
ROW_SIZE: Final = sum(np.dtype(kind).itemsize for _, kind in COLUMNS)

#: Reasons for the end of a walk over batch heads.
WALK_END, WALK_LIMIT, WALK_SHORT, WALK_LENGTH, WALK_MAGIC, WALK_CRC, WALK_COUNT = range(
    7
)
WALK_REASONS: Final = {
    WALK_END: "end of data",
    WALK_LIMIT: "the maximum number of batches",
    WALK_SHORT: "incomplete batch",
    WALK_LENGTH: "batch length is smaller than the minimum overhead",
    WALK_MAGIC: "unknown magic",
    WALK_CRC: "CRC does not match",
    WALK_COUNT: "record count or last offset delta is impossible",
}

#: Faults in the records of a batch whose CRC is right. Kafka: INVALID_RECORD.
(
    BODY_SHORT,
    BODY_VARINT,
    BODY_LENGTH,
    BODY_HEADERS,
    BODY_HEADER_KEY,
    BODY_SIZE,
    BODY_LEFT,
    BODY_COUNT,
) = range(1, 9)
BODY_BELOW_NULL = 9
BODY_REASONS: Final = {
    BODY_SHORT: "fewer records than the batch header declares",
    BODY_VARINT: "malformed varint in a record",
    BODY_LENGTH: "a length in a record is longer than the rest of the batch",
    BODY_HEADERS: "header count is negative or larger than the bytes left in the record",
    BODY_HEADER_KEY: "header key is null",
    BODY_SIZE: "record fields do not add up to the record length",
    BODY_LEFT: "bytes are left over after the last record",
    BODY_BELOW_NULL: "a length in a record is below -1 (null)",
    BODY_COUNT: "record count is negative or more than the bytes can hold",
}

#: Header names are UTF-8 in Kafka but nothing enforces it; undecodable bytes survive a
#: round trip as surrogates.
HEADER_NAME_ERRORS: Final = "surrogateescape"

#: Any contiguous bytes, such as the input of kernels, or a key or value to append.
Buffer = bytes | bytearray | memoryview
#: An array of BATCH_FACTS.
Facts = npt.NDArray[Any]
Headers = tuple[tuple[str, bytes | None], ...]
#: Safety of an append: in the page cache, or on the disk.
Level = Literal["os", "disk"]


class Record(NamedTuple):
    """One record, as applications read it."""

    #: The offset in the log.
    offset: int
    #: Milliseconds since 1970, or -1 for none. It is the append time if the topic is
    #: configured for it.
    timestamp_ms: int
    #: None for null.
    key: bytes | None
    value: bytes | None
    #: Pairs of name and value, in order. Names may repeat, and dict(headers) has the
    #: last value of each name.
    headers: Headers = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return record_of, tuple(self)


def record_of(*fields: Any) -> Record:
    """Return a record of the kernels of this process.

    Pickles of all kernels refer to it.
    """
    from logcore.kernels import Record as kind  # defined after this module is imported

    return kind(*fields)


class TopicRecord(NamedTuple):
    """A record of a topic: a Record, with its topic and partition.

    Attributes:
        timestamp_ms: Milliseconds since the epoch; -1 for none.
        key: Bytes, or None for null. From a consumer with a deserializer, its result.
        value: Bytes, or None for null. From a consumer with a deserializer, its result.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return topic_record_of, tuple(self)


def topic_record_of(*fields: Any) -> TopicRecord:
    """Return a record of a topic, like record_of()."""
    from logcore.kernels import TopicRecord as kind

    return kind(*fields)


class Receipt(NamedTuple):
    """The result of an append.

    Attributes:
        offset: The offset of the first record.
        last_offset: The offset of the last record.
        timestamp_ms: The time of the append.
        durability: "disk" if an fdatasync that began after the write has returned, else
            "os". With "os", the records survive the kill of the process, but may be lost
            in a power cut.
        topic: The topic of the log.
        partition: The partition of the log.
    """

    offset: int
    last_offset: int
    timestamp_ms: int
    durability: Level
    topic: str
    partition: int

    def __reduce__(self) -> tuple[Any, ...]:
        return receipt_of, tuple(self)


def receipt_of(*fields: Any) -> Receipt:
    """Return a receipt, like record_of()."""
    from logcore.kernels import Receipt as kind

    return kind(*fields)


#: Headers as appends accept them: a dict, or pairs, because a name may repeat.
HeadersInput = Mapping[str, Buffer | None] | Iterable[tuple[str, Buffer | None]]


def header_pairs(headers: HeadersInput) -> Iterable[tuple[str, Buffer | None]]:
    """Return headers as pairs."""
    if isinstance(headers, Mapping):
        return cast("Mapping[str, Buffer | None]", headers).items()
    return headers


#: Milliseconds since the epoch, or a datetime with a time zone (numpy's are UTC).
Time = int | datetime.datetime | np.datetime64
#: A record as append_many() accepts it: (key, value[, headers[, time]]).
RecordInput = (
    tuple[Buffer | None, Buffer | None]
    | tuple[Buffer | None, Buffer | None, HeadersInput | None]
    | tuple[Buffer | None, Buffer | None, HeadersInput | None, Time | None]
)

#: One encoded batch in an output buffer: (position, size_bytes, last_offset,
#: max_timestamp). A plain tuple, because building a named one costs a tenth of encoding
#: a 16 KiB batch.
EncodedBatch = tuple[int, int, int, int]


class BatchEncoding(NamedTuple):
    """How an encoder writes batches: fields of their heads, and limits."""

    #: A batch is closed before a record would exceed this size. A larger record gets
    #: its own batch.
    batch_bytes: int
    #: Maximum size of a batch. A batch has its size in 32 bits.
    max_bytes: int
    #: Attributes of each batch. They must name the codec of `compress`.
    attributes: int = 0
    #: Turns the records of a batch into its body.
    compress: Callable[[Buffer], bytes] | None = None
    #: Whether each record needs a key, as in a compacted topic.
    requires_key: bool = False
    producer_id: int = -1
    producer_epoch: int = -1
    #: Sequence number of the first record. The number after 2^31-1 is 0.
    base_sequence: int = -1


#: Keys or values of many rows: (data, offsets, nulls). The data is uint8. The offsets
#: are int64 of shape (n + 1,), rise, and are inside the data. The nulls are uint8 of
#: shape (n,) with 1 for null, or None if no row is null.
InputColumn = tuple[
    npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.uint8] | None
]


class InputColumns(NamedTuple):
    """Records to encode, as columns."""

    #: None if all keys are null.
    keys: InputColumn | None
    #: None if all values are null.
    values: InputColumn | None
    #: int64, shape (row_count,); None for the time of the call.
    timestamps_ms: npt.NDArray[np.int64] | None
    row_count: int


def encoded_batches(facts: Facts, start: int) -> list[EncodedBatch]:
    """Return the places of walked batches, in a buffer that begins at `start`."""
    columns = (
        facts[name].tolist()
        for name in ("position", "size_bytes", "last_offset", "max_timestamp")
    )
    return [
        (position - start, size, last, newest)
        for position, size, last, newest in zip(*columns, strict=True)
    ]


_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def milliseconds(given: object) -> int | None:
    """Return a timestamp as milliseconds since the epoch, None if it is none.

    A datetime must have a time zone, because it is ambiguous without one; those of
    numpy are UTC.
    """
    if isinstance(given, datetime.datetime) and given.tzinfo is not None:
        given = (given - _EPOCH) // datetime.timedelta(milliseconds=1)
    elif isinstance(given, np.datetime64) and not np.isnat(given):
        given = given.astype("datetime64[ms]").astype(np.int64)
    if isinstance(given, (int, np.integer)) and -(1 << 63) <= given < 1 << 63:
        return int(given)
    return None
