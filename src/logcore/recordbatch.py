"""Record batches: Kafka's unit of storage and transfer, converted between bytes and
values.

Layout of a v2 batch: a 61-byte head (kernels/layout.py, HEADER), then the records,
compressed as one stream if the attributes contain a codec. Base offset, length and
leader epoch precede the range of the CRC, so a leader can write them in place.

Rules:
- Reading trusts nothing: length, magic, CRC, count and every length inside a record are
  checked, in Kafka's order and with Kafka's result (storage format sections 1.8 and
  1.9).
- A batch covers the offsets base_offset..last_offset, whatever records compaction has
  left in it.
- Formats v0 and v1 are read through format/legacy.py and never written.

This module does not access files: paths and positions are only used in errors.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from logcore.config import INT64_MAX, MAX_DECOMPRESSED_BYTES, LogConfig
from logcore.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidTimestampError,
    RecordTooLargeError,
)
from logcore.format import legacy, varint
from logcore.format.columns import RecordColumns
from logcore.format.compression import (
    Codec,
    codec_named,
    codec_of,
    compress,
    decompress,
)
from logcore.kernels import Record, kernel, layout
from logcore.kernels.checksum import crc32c
from logcore.kernels.layout import (
    APPEND_TIME_BIT,
    BODY_COUNT,
    BODY_REASONS,
    CODEC_MASK,
    CONTROL_BIT,
    CRC_START,
    DELETE_HORIZON_BIT,
    HEADER,
    HEADER_SIZE,
    INT32_MAX,
    LOG_OVERHEAD,
    MAGIC_POSITION,
    MIN_LENGTH,
    MIN_RECORD_SIZE,
    PREFIX_SIZE,
    ROW_SIZE,
    TRANSACTIONAL_BIT,
    BatchEncoding,
    Buffer,
    EncodedBatch,
)

if TYPE_CHECKING:
    import pyarrow

__all__ = ["HEADER", "RecordBatch", "encode", "prepare_append", "read_batches"]

#: Enough for a batch with the default batch.size, so that its encoder rarely needs to
#: allocate more memory.
_USUAL_BYTES: Final = 20 << 10
_HEADER: Final = struct.Struct(layout.HEADER_FORMAT)
_PREFIX: Final = struct.Struct(">qiib")
_BASE_OFFSET: Final = struct.Struct(">q")
_LEADER_EPOCH: Final = struct.Struct(">i")
#: Number of records of one batch that are decoded at once for callers that iterate: 2
#: to 5 MB of objects.
SLICE_ROWS: Final = 32_768

#: Types of control records (storage format section 1.10).
CONTROL_TYPES: Final = {
    0: "ABORT",
    1: "COMMIT",
    2: "LEADER_CHANGE",
    3: "SNAPSHOT_HEADER",
    4: "SNAPSHOT_FOOTER",
    5: "KRAFT_VERSION",
    6: "KRAFT_VOTERS",
}


#: The types that end a transaction.
TRANSACTION_ENDS: Final = frozenset({"ABORT", "COMMIT"})
_MARKER_BITS: Final = CONTROL_BIT | TRANSACTIONAL_BIT
_MARKER_KEY: Final = struct.Struct(">hh")  # version, type
_MARKER_VALUE: Final = struct.Struct(">hi")  # version, coordinator epoch


class Marker(NamedTuple):
    """The content of a control batch."""

    #: ABORT, COMMIT and so on; UNKNOWN for other types and batches.
    kind: str
    #: Epoch of the coordinator that ended the transaction, -1 if the batch has none.
    coordinator_epoch: int


@attrs.frozen(kw_only=True, repr=False, eq=False)
class RecordBatch:
    """One batch, or one v0/v1 entry, over borrowed bytes.

    `data` contains exactly the bytes of the batch, and is valid as long as the batch
    object is referenced. `path` and `position` are its source. The other fields are
    those of the head (milliseconds, -1 for none). In v0 and v1 entries, missing fields
    are -1. The base_offset of a compressed wrapper there is the offset of its last
    record.
    """

    data: memoryview
    path: str | None
    position: int
    base_offset: int
    last_offset: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @classmethod
    def parse(
        cls,
        data: Buffer,
        at: int = 0,
        limit: int | None = None,
        *,
        path: str | None = None,
        origin: int = 0,
    ) -> RecordBatch | None:
        """Return the batch that starts at byte `at`, or None if it is incomplete at
        `limit`.

        `origin` is the position of `data` in its file, for errors. The CRC is not
        checked here, see verify().

        Raises:
            CorruptBatchError: no batch has this length or magic.
        """
        view = memoryview(data).cast("B")
        if limit is None:
            limit = len(view)
        else:
            limit = min(limit, len(view))
        if limit - at < PREFIX_SIZE:
            return None
        offset, length, word, magic = _PREFIX.unpack_from(view, at)
        if length < MIN_LENGTH:
            raise CorruptBatchError(
                "batch length is smaller than the minimum overhead",
                path=path,
                position=origin + at,
                expected=f"at least {MIN_LENGTH}",
                found=length,
            )
        if not 0 <= magic <= 2:
            raise CorruptBatchError(
                "unknown magic",
                path=path,
                position=origin + at,
                expected="0, 1 or 2",
                found=magic,
            )
        size = length + LOG_OVERHEAD
        if size > limit - at:
            return None
        raw = view[at : at + size]
        if magic < 2:
            last = legacy.last_offset(raw)
            timestamp = legacy.max_timestamp(raw)
            return cls(
                data=raw,
                path=path,
                position=origin + at,
                base_offset=last,
                last_offset=last,
                partition_leader_epoch=-1,
                magic=magic,
                crc=word & 0xFFFFFFFF,
                attributes=raw[17],
                base_timestamp=timestamp,
                max_timestamp=timestamp,
                producer_id=-1,
                producer_epoch=-1,
                base_sequence=-1,
                record_count=-1,
            )
        if size < HEADER_SIZE:
            raise CorruptBatchError(
                "v2 batch is shorter than its head",
                path=path,
                position=origin + at,
                expected=f"at least {HEADER_SIZE}",
                found=size,
            )
        head = _HEADER.unpack_from(raw)
        # Each field by its name: a loop over names and values takes a microsecond more.
        return cls(
            data=raw,
            path=path,
            position=origin + at,
            base_offset=offset,
            last_offset=offset + head[6],
            partition_leader_epoch=head[2],
            magic=magic,
            crc=head[4],
            attributes=head[5],
            base_timestamp=head[7],
            max_timestamp=head[8],
            producer_id=head[9],
            producer_epoch=head[10],
            base_sequence=head[11],
            record_count=head[12],
        )

    def __repr__(self) -> str:
        return (
            f"<RecordBatch offsets {self.base_offset}..{self.last_offset} records={self.record_count} "
            f"codec={self.codec_name} size_bytes={self.size_bytes} position={self.position}>"
        )

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    @property
    def next_offset(self) -> int:
        """The offset after this batch, even if compaction removed its last records."""
        return self.last_offset + 1

    @property
    def codec(self) -> Codec:
        """The compression codec. Raises UnsupportedCodecError for the undefined types
        5-7.
        """
        return codec_of(self.attributes)

    @property
    def codec_name(self) -> str:
        code = self.attributes & CODEC_MASK
        if code < 5:
            return Codec(code).name.lower()
        return f"unknown({code})"

    @property
    def is_append_time(self) -> bool:
        return self.magic > 0 and bool(self.attributes & APPEND_TIME_BIT)

    @property
    def timestamp_type(self) -> int:
        """Kafka's number for the clock of the timestamps.

        0 is CreateTime, 1 is LogAppendTime, and -1 is v0, which has no timestamps.
        """
        if self.magic:
            return int(self.is_append_time)
        return -1

    @property
    def is_transactional(self) -> bool:
        return self.magic == 2 and bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return self.magic == 2 and bool(self.attributes & CONTROL_BIT)

    @property
    def delete_horizon_ms(self) -> int | None:
        """The time from which the tombstones in this batch may be removed, if the
        cleaner set one.
        """
        if self.magic == 2 and self.attributes & DELETE_HORIZON_BIT:
            return self.base_timestamp
        return None

    @property
    def last_sequence(self) -> int:
        """Sequence of the last offset; wraps to 0 after 2^31-1; -1 if there is none."""
        if self.base_sequence < 0:
            return -1
        return (self.base_sequence + self.last_offset - self.base_offset) & INT32_MAX

    def verify(self) -> None:
        """Check the CRC of the whole batch. Raises CorruptBatchError."""
        if self.magic < 2:
            legacy.check(self.data, path=self.path, position=self.position)
            return
        found = crc32c(self.data[CRC_START:])
        if found != self.crc:
            raise CorruptBatchError(
                "CRC-32C does not match",
                path=self.path,
                position=self.position,
                expected=f"{self.crc:#010x}",
                found=f"{found:#010x}",
            )

    def body(self, max_size: int = MAX_DECOMPRESSED_BYTES) -> Buffer:
        """Return the records of a v2 batch, inflated to at most max_size bytes.

        Raises RecordTooLargeError for a larger body.
        """
        raw = self.data[HEADER_SIZE:]
        if self.codec is Codec.NONE or self.record_count == 0:
            return raw
        return decompress(
            self.codec, raw, max_size=max_size, path=self.path, position=self.position
        )

    def records(self, *, max_size: int = MAX_DECOMPRESSED_BYTES) -> list[Record]:
        """Return all records after checking the CRC; control records for a control
        batch.

        `max_size` limits the inflated size of the batch.

        Raises:
            CorruptBatchError, InvalidRecordError: the batch is damaged.
            RecordTooLargeError: the batch inflates to more than `max_size`.
            UnsupportedCodecError: the codec is undefined.
        """
        if self.magic == 2 and not self.attributes & CODEC_MASK:
            # In one call; a `with` of contextlib.suppress would take 0.6 us.
            try:
                return kernel.decode_objects(self.data, 0, len(self.data))
            except (CorruptBatchError, InvalidRecordError):
                # record_slices() raises it again, with the path and the position in the
                # file.
                pass
        (records,) = self.record_slices(INT32_MAX, max_size=max_size)
        return records

    def columns(self, *, max_size: int = MAX_DECOMPRESSED_BYTES) -> RecordColumns:
        """Return all records as numpy columns. Raises the same errors as records()."""
        if self.magic == 2 and not self.attributes & CODEC_MASK:
            rows = self.record_count
            if 0 <= rows <= len(self.data) // MIN_RECORD_SIZE:
                block = np.empty(rows * ROW_SIZE, np.uint8)
                try:
                    kernel.decode_columns(self.data, 0, len(self.data), block, rows)
                    return RecordColumns.from_block(self.data, block, rows)
                except (CorruptBatchError, InvalidRecordError):
                    # Handled as in records().
                    pass
        (columns,) = self.column_slices(INT32_MAX, max_size=max_size)
        return columns

    def record_slices(
        self, rows: int, *, max_size: int = MAX_DECOMPRESSED_BYTES
    ) -> Iterator[list[Record]]:
        """Yield the records in lists of at most `rows`.

        A few bytes may inflate to millions of records, and their objects take ten times
        as much memory. The errors of records() are raised during the iteration.
        """
        self.verify()
        if self.magic < 2:
            yield [Record(*fields, ()) for fields in self._legacy(max_size)]
            return
        for body, count in self._bodies(rows, max_size):
            yield kernel.decode_body_objects(
                body, count, *self._bases(), self.path, self.position
            )

    def column_slices(
        self, rows: int, *, max_size: int = MAX_DECOMPRESSED_BYTES, strict: bool = False
    ) -> Iterator[RecordColumns]:
        """Yield the records as columns in parts of at most `rows`, at least one part.

        With `strict`, lengths that only some readers accept are refused.
        """
        self.verify()
        if self.magic < 2:
            yield RecordColumns.from_records(
                Record(*fields, ()) for fields in self._legacy(max_size)
            )
            return
        for body, count in self._bodies(rows, max_size):
            # The kernel checks the count against the bytes before it writes. The
            # allocation must check it too.
            block = np.empty(max(0, min(count, len(body))) * ROW_SIZE, np.uint8)
            kernel.decode_body_columns(
                body, count, *self._bases(), block, self.path, self.position, strict
            )
            yield RecordColumns.from_block(memoryview(body), block, count)

    def _bodies(self, rows: int, max_size: int) -> Iterator[tuple[Buffer, int]]:
        """Yield the bytes of at most `rows` inflated records and their number, at least
        once.
        """
        count = self.record_count
        body: Buffer = b""
        if count:
            body = self.body(max_size)
        if count <= rows:
            yield body, count
            return
        # Checked here too, because the slices would detect it only after many of them
        # were returned.
        if count > len(body) // MIN_RECORD_SIZE:
            raise InvalidRecordError(
                BODY_REASONS[BODY_COUNT], path=self.path, position=self.position
            )
        view = memoryview(body)
        at = 0
        while count > rows:
            stop = kernel.skip_records(view, at, rows, self.path, self.position)
            yield view[at:stop], rows
            at = stop
            count -= rows
        yield view[at:], count

    def _legacy(
        self, max_size: int
    ) -> list[tuple[int, int, bytes | None, bytes | None]]:
        return legacy.decode(
            self.data, max_size=max_size, path=self.path, position=self.position
        )

    def _bases(self) -> tuple[int, int, int | None]:
        """Return the values for the deltas of records.

        These are the base offset, the base timestamp, and under LogAppendTime the
        timestamp of all records.
        """
        append_time_ms = None
        if self.is_append_time:
            append_time_ms = self.max_timestamp
        return self.base_offset, self.base_timestamp, append_time_ms

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the records as a pyarrow.RecordBatch, see columns.arrow_schema.

        Raises the same errors as records(), and MissingDependencyError without pyarrow.
        """
        return self.columns().to_arrow()

    def marker(self) -> Marker:
        """Return the content of a control batch. Raises the same errors as records()."""
        if self.is_control:
            records = self.records()
        else:
            records = []
        key = None
        if records:
            key = records[0].key
        if key is None or len(key) < _MARKER_KEY.size:
            return Marker("UNKNOWN", -1)
        kind = CONTROL_TYPES.get(_MARKER_KEY.unpack_from(key)[1], "UNKNOWN")
        value = records[0].value or b""
        if kind not in TRANSACTION_ENDS or len(value) < _MARKER_VALUE.size:
            return Marker(kind, -1)
        return Marker(kind, _MARKER_VALUE.unpack_from(value)[1])

    def control_type(self) -> str:
        """Return ABORT, COMMIT and so on for a control batch, UNKNOWN otherwise.

        Raises the same errors as records().
        """
        return self.marker().kind


def read_batches(data: Buffer, *, path: str | None = None) -> Iterator[RecordBatch]:
    """Yield the batches in a buffer from a .log file, a Produce request or a Fetch
    response.

    An incomplete last batch ends the iteration without an error, as in Kafka's readers.
    CRCs are checked when a batch's records are read.

    Raises:
        CorruptBatchError: no batch has this length or magic.
    """
    at = 0
    while (batch := RecordBatch.parse(data, at, path=path)) is not None:
        yield batch
        at += batch.size_bytes


def compressor(codec: Codec, config: LogConfig) -> Callable[[Buffer], bytes] | None:
    """Return a function that compresses a batch's records; None for no compression."""
    if codec is Codec.NONE:
        return None
    levels = {
        Codec.GZIP: config.compression_gzip_level,
        Codec.LZ4: config.compression_lz4_level,
        Codec.ZSTD: config.compression_zstd_level,
    }
    level = levels.get(codec)
    return lambda data: compress(codec, data, level=level)


def target_codec(config: LogConfig, source: Codec) -> Codec:
    """Return the codec to store a batch with: its own under compression.type=producer."""
    if config.compression_type == "producer":
        return source
    return codec_named(config.compression_type)


def encode(
    records: Iterable[Any],
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    now_ms: int = -1,
    codec: str = "uncompressed",
    append_time: bool = False,
    transactional: bool = False,
    control: bool = False,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    max_bytes: int = INT32_MAX,
) -> bytes:
    """Return one v2 batch of (key, value[, headers[, timestamp_ms]]) tuples.

    `now_ms` is the timestamp of records without one; the default -1 means no timestamp.
    Raises InvalidRecordError, InvalidTimestampError and RecordTooLargeError.
    """
    encoding = _encoding(
        codec,
        append_time,
        transactional,
        control,
        producer_id,
        producer_epoch,
        base_sequence,
        max_bytes,
    )
    out = bytearray(_USUAL_BYTES)
    size, _ = kernel.encode_records(
        out, records, base_offset, leader_epoch, now_ms, encoding
    )
    return bytes(memoryview(out)[:size])


# Creating the value takes as long as encoding about 20 records.
@functools.lru_cache(maxsize=64)
def _encoding(
    codec: str,
    append_time: bool,
    transactional: bool,
    control: bool,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    max_bytes: int,
) -> BatchEncoding:
    kind = codec_named(codec)
    return BatchEncoding(
        batch_bytes=INT32_MAX,
        max_bytes=max_bytes,
        attributes=kind
        | APPEND_TIME_BIT * append_time
        | TRANSACTIONAL_BIT * transactional
        | CONTROL_BIT * control,
        compress=compressor(kind, LogConfig()),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def prepare_append(
    data: Buffer, *, base_offset: int, leader_epoch: int, now_ms: int, config: LogConfig
) -> tuple[bytearray, list[EncodedBatch]]:
    """Check batches that a client encoded and prepare them for storage, like a Kafka
    leader (section 1.9).

    `data` contains whole batches of any magic. Incomplete bytes after the last one are
    dropped, as in Kafka. Returns the bytes to store, with offsets from base_offset on,
    and the position of each batch in them. The client's bytes are changed only in base
    offset and leader epoch, and if necessary in max timestamp, timestamp type and CRC.
    A batch is encoded again only if its codec is not the topic's, its offsets are not
    0, 1, 2, ... or it is v0 or v1.

    After an error nothing may be stored. The broker must check the rules of the Produce
    request (exactly one batch, base offset 0).

    Raises:
        CorruptBatchError: a batch is damaged, or there is no whole batch.
        InvalidRecordError, InvalidTimestampError, RecordTooLargeError: the topic does
            not accept a record.
        UnsupportedCodecError: the codec is undefined.
    """
    # The usual case: one valid v2 batch that the topic accepts unchanged. Only its head
    # is written.
    checked = kernel.check_client_batch(data)
    # A transaction without a producer can never be ended: checks the second byte of the
    # attributes, and the sign of the id.
    is_orphan = checked is not None and bool(
        data[CRC_START + 1] & TRANSACTIONAL_BIT and data[43] & 0x80
    )
    if (
        checked is not None
        and not is_orphan
        and _is_accepted_unchanged(checked, len(data), now_ms, config)
    ):
        copy = bytearray(data)
        _BASE_OFFSET.pack_into(copy, 0, base_offset)
        _LEADER_EPOCH.pack_into(copy, 12, leader_epoch)
        return copy, [(0, len(copy), base_offset + checked[0] - 1, checked[2])]
    batches = list(read_batches(data))
    if not batches:
        raise CorruptBatchError(
            "no whole batch to append",
            expected="complete record batches",
            found=f"{len(data)} bytes",
        )
    if any(batch.magic != batches[0].magic for batch in batches):
        raise InvalidRecordError(
            "batches of different formats in one append",
            expected=f"magic {batches[0].magic} throughout",
        )
    for batch in batches:
        if batch.size_bytes > config.max_message_bytes:
            raise RecordTooLargeError(
                "batch is larger than max.message.bytes",
                position=batch.position,
                expected=f"at most {config.max_message_bytes} bytes",
                found=f"{batch.size_bytes} bytes",
            )
        batch.verify()
    out = bytearray()
    stored: list[EncodedBatch] = []
    # Uncompressed entries of the old formats contain one record each, and become one
    # batch together, as in Kafka.
    if batches[0].magic < 2 and not batches[0].codec:
        groups = [batches]
    else:
        groups = [[batch] for batch in batches]
    for group in groups:
        raw, last_offset, max_timestamp = _prepare_one(
            group, base_offset, leader_epoch, now_ms, config
        )
        if len(raw) > config.max_message_bytes:
            raise RecordTooLargeError(
                "batch is larger than max.message.bytes after it was rebuilt",
                position=group[0].position,
                expected=f"at most {config.max_message_bytes} bytes",
                found=f"{len(raw)} bytes",
            )
        stored.append((len(out), len(raw), last_offset, max_timestamp))
        out += raw
        base_offset = last_offset + 1
    return out, stored


def _is_accepted_unchanged(
    checked: tuple[int, int, int, int], size: int, now_ms: int, config: LogConfig
) -> bool:
    """Return whether the topic accepts a batch as the client sent it, without further
    checks.

    This is the most frequent case.
    """
    _, oldest, newest, keyless = checked
    return (
        size <= config.max_message_bytes
        and config.compression_type in ("producer", "uncompressed")
        and not config.is_append_time
        and not (keyless and config.is_compacted)
        # Both are unlimited by default, and no time is near enough to the limits of
        # int64 to need more care.
        and (newest == -1 or newest - now_ms <= config.message_timestamp_after_max_ms)
        and (oldest == -1 or now_ms - oldest <= config.message_timestamp_before_max_ms)
    )


def _prepare_one(
    group: list[RecordBatch],
    base_offset: int,
    leader_epoch: int,
    now_ms: int,
    config: LogConfig,
) -> tuple[Buffer, int, int]:
    """Return (bytes, last_offset, max_timestamp) of one v2 batch, or of v0/v1 entries.

    The entries become one batch.
    """
    first = group[0]
    where = first.position
    if first.magic == 2:
        _check_client_head(first)
    # 1. Check every record.
    has_append_time = any(batch.is_append_time for batch in group)
    count = 0
    max_timestamp = -1
    dense = True
    for batch in group:
        for part in batch.column_slices(
            SLICE_ROWS, max_size=config.max_decompressed_bytes, strict=True
        ):
            times = part.timestamps_ms
            checked_times: npt.NDArray[np.int64] | None = times
            if config.is_append_time:
                # Replaced by the time of the append.
                checked_times = None
            keyless = None
            if config.is_compacted:
                keyless = part.key_sizes < 0
            _check_records(
                checked_times, keyless, now_ms, config, where, first_row=count
            )
            if has_append_time and (config.is_append_time or np.any(times == -1)):
                raise InvalidTimestampError(
                    "a client may not mark a batch as LogAppendTime", position=where
                )
            # Readers number the records of a batch from its head on: 0, 1, 2. If a
            # client left gaps, the batch is encoded again.
            dense = dense and np.array_equal(
                part.offsets - first.base_offset, np.arange(count, count + len(part))
            )
            count += len(part)
            max_timestamp = max(max_timestamp, int(times.max(initial=-1)))
    # Under LogAppendTime the one timestamp in the head applies to all records.
    if config.is_append_time:
        max_timestamp = now_ms
    # 2. Encode the batch again, if the bytes cannot be used.
    source = Codec(first.attributes & CODEC_MASK)
    target = target_codec(config, source)
    if first.magic < 2 or source is not target or not dense:
        rows = (
            (record.key, record.value, record.headers, record.timestamp_ms)
            for batch in group
            for records in batch.record_slices(
                SLICE_ROWS, max_size=config.max_decompressed_bytes
            )
            for record in records
        )
        scratch = bytearray()
        kept = 0
        if first.magic == 2:
            # Codec and timestamp type follow from the topic. Only this bit of the
            # client is kept.
            kept = first.attributes & TRANSACTIONAL_BIT
        encoding = BatchEncoding(
            batch_bytes=INT32_MAX,
            max_bytes=INT32_MAX,
            attributes=target | kept | APPEND_TIME_BIT * config.is_append_time,
            compress=compressor(target, config),
            producer_id=first.producer_id,
            producer_epoch=first.producer_epoch,
            base_sequence=first.base_sequence,
        )
        size, _ = kernel.encode_records(
            scratch, rows, base_offset, leader_epoch, now_ms, encoding
        )
        return memoryview(scratch)[:size], base_offset + count - 1, max_timestamp
    # 3. Otherwise write the head. The CRC does not cover base offset and leader epoch,
    #    so this needs no second pass over the data.
    raw = bytearray(first.data)
    struct.pack_into(">q", raw, 0, base_offset)
    struct.pack_into(">i", raw, 12, leader_epoch)
    # The CRC covers attributes and times, so it is computed again if they change.
    if max_timestamp != first.max_timestamp or has_append_time != config.is_append_time:
        attributes = (
            first.attributes & 0xFF & ~APPEND_TIME_BIT
            | APPEND_TIME_BIT * config.is_append_time
        )
        struct.pack_into(">h", raw, CRC_START, attributes)
        struct.pack_into(">q", raw, 35, max_timestamp)
        stamp_crc(raw)
    return raw, base_offset + count - 1, max_timestamp


def _check_client_head(batch: RecordBatch) -> None:
    if (
        batch.record_count < 1
        or batch.last_offset - batch.base_offset + 1 != batch.record_count
    ):
        raise InvalidRecordError(
            "record count and last offset delta of a client's batch must agree",
            position=batch.position,
            expected=f"{batch.last_offset - batch.base_offset + 1} records, at least 1",
            found=batch.record_count,
        )
    if batch.is_control:
        raise InvalidRecordError(
            "a client may not append control batches", position=batch.position
        )
    if batch.is_transactional and batch.producer_id < 0:
        raise InvalidRecordError(
            "a transactional batch needs a producer id", position=batch.position
        )
    if batch.producer_id >= 0 and batch.base_sequence < 0:
        raise InvalidRecordError(
            "a batch with a producer id needs a sequence",
            position=batch.position,
            found=batch.base_sequence,
        )


def time_ms(given: layout.Time | None) -> int | None:
    """Return a user's time in milliseconds since the epoch, or None.

    Raises InvalidTimestampError.
    """
    if given is None:
        return None
    found = layout.milliseconds(given)
    if found is None:
        raise InvalidTimestampError(
            "not a timestamp",
            expected="an int of milliseconds, or a datetime with a time zone",
            found=repr(given),
        )
    return found


def check_timestamps(times: Any, now_ms: int, config: LogConfig) -> None:
    """Raise InvalidTimestampError if a time is outside the topic's limits.

    `times` is an array of int64 ms; -1 means no timestamp.
    """
    _check_records(times, None, now_ms, config, None)


def _check_records(
    times: Any,
    keyless: Any,
    now_ms: int,
    config: LogConfig,
    position: int | None,
    *,
    first_row: int = 0,
) -> None:
    """Refuse times like check_timestamps(), and records that `keyless` marks.

    The error names all refused records. As in Kafka, its type is that for times if any
    time is refused. `times` is None for a topic that writes them itself. `first_row` is
    the number of earlier records in the batch.
    """
    # Number of the record in its batch -> reason.
    refused: dict[int, str] = {}
    # The refused times.
    outside = np.zeros(0, np.int64)
    before_ms = config.message_timestamp_before_max_ms
    after_ms = config.message_timestamp_after_max_ms
    expected = f"{now_ms} - {before_ms} to {now_ms} + {after_ms}"
    if times is not None and len(times) and min(before_ms, after_ms) < INT64_MAX:
        # Compared with the limits, which are ints of any size, before they become
        # int64.
        low = max(now_ms - before_ms, -(2**63))
        high = min(now_ms + after_ms, 2**63 - 1)
        found = np.flatnonzero(((times < low) | (times > high)) & (times != -1))
        outside = times[found]
        refused.update(
            (
                first_row + int(at),
                f"timestamp {int(times[at])} is not within {expected}",
            )
            for at in found
        )
    if keyless is not None:
        reason = "a compacted topic takes no record without a key"
        refused.update((first_row + int(at), reason) for at in np.flatnonzero(keyless))
    if not refused:
        return
    if len(outside):
        error: InvalidRecordError = InvalidTimestampError(
            "timestamp outside the limits of the topic",
            position=position,
            expected=expected,
            found=f"{int(outside.min())} to {int(outside.max())}",
        )
    else:
        error = InvalidRecordError(
            "a compacted topic takes no record without a key", position=position
        )
    error.record_errors = tuple(sorted(refused.items()))
    raise error


def front_of(batch: RecordBatch, offset: int, config: LogConfig) -> bytes:
    """Return a batch truncated to the offsets below `offset`; empty if it begins there.

    A v2 batch keeps its head, its codec and the bytes of the remaining records. It
    covers the offsets up to offset - 1, even those without a record. Entries of the old
    formats become v2 batches with one record each.
    """
    records = batch.records(max_size=config.max_decompressed_bytes)
    kept = list(itertools.takewhile(lambda record: record.offset < offset, records))
    if batch.magic < 2:
        inputs = [
            (record, [(record.key, record.value, (), record.timestamp_ms)])
            for record in kept
        ]
        return b"".join(
            encode(rows, base_offset=record.offset, leader_epoch=0)
            for record, rows in inputs
        )
    if batch.base_offset >= offset:
        return b""
    # The lengths before the records give the bytes of the kept records, so none is
    # encoded again.
    body = memoryview(batch.body(config.max_decompressed_bytes))
    stop = 0
    for _ in kept:
        length, stop = varint.decode_int32(body, stop)
        stop += length
    front: Buffer = body[:stop]
    pack = None
    if kept:
        pack = compressor(batch.codec, config)
    if pack is not None:
        front = pack(front)
    raw = bytearray(batch.data[:HEADER_SIZE])
    raw += front
    # Fields of the head that depend on the records: length, attributes, last offset
    # delta, max timestamp, count.
    struct.pack_into(">i", raw, 8, len(raw) - LOG_OVERHEAD)
    # An emptied batch is marked as not compressed.
    if not kept:
        struct.pack_into(">h", raw, CRC_START, batch.attributes & ~CODEC_MASK)
    struct.pack_into(">i", raw, 23, offset - 1 - batch.base_offset)
    if kept and not batch.is_append_time:
        struct.pack_into(">q", raw, 35, max(record.timestamp_ms for record in kept))
    struct.pack_into(">i", raw, 57, len(kept))
    stamp_crc(raw)
    return bytes(raw)


def empty_batch(base_offset: int, last_offset: int, leader_epoch: int) -> bytes:
    """Return a v2 batch without records that covers offsets, as after compaction
    (storage format section 1.4).
    """
    head = (
        base_offset,
        HEADER_SIZE - LOG_OVERHEAD,
        leader_epoch,
        2,
        0,
        0,
        last_offset - base_offset,
    )
    raw = bytearray(_HEADER.pack(*head, -1, -1, -1, -1, -1, 0))
    stamp_crc(raw)
    return bytes(raw)


def are_markers(facts: layout.Facts) -> npt.NDArray[np.bool_]:
    """Return which batches are control batches of transactions, by their heads."""
    are: npt.NDArray[np.bool_] = (facts["magic"] == 2) & (
        facts["attributes"] & _MARKER_BITS == _MARKER_BITS
    )
    return are


def transaction_marker(
    offset: int,
    leader_epoch: int,
    timestamp_ms: int,
    *,
    producer: tuple[int, int],
    marker: Marker,
    append_time: bool = False,
) -> bytes:
    """Return the control batch that ends a transaction (storage format section 1.10).

    `producer` is an id and an epoch. `marker` must be of kind ABORT or COMMIT.
    """
    assert marker.kind in TRANSACTION_ENDS, marker
    producer_id, producer_epoch = producer
    types = {kind: number for number, kind in CONTROL_TYPES.items()}
    key = _MARKER_KEY.pack(0, types[marker.kind])
    value = _MARKER_VALUE.pack(0, marker.coordinator_epoch)
    return encode(
        [(key, value, (), timestamp_ms)],
        base_offset=offset,
        leader_epoch=leader_epoch,
        now_ms=timestamp_ms,
        append_time=append_time,
        transactional=True,
        control=True,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )


def stamp_crc(raw: bytearray) -> None:
    """Write the CRC of a whole v2 batch after its attributes or timestamps were
    changed.
    """
    struct.pack_into(">I", raw, PREFIX_SIZE, crc32c(memoryview(raw)[CRC_START:]))


assert MAGIC_POSITION == PREFIX_SIZE - 1
