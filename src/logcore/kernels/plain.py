"""The hot loops in Python and numpy: the fallback and the oracle for _compiled.pyx.

Rules:
- Every function here exists in _compiled.pyx with the same arguments, results and
  errors. Property tests compare the two. The docstrings here are the specification of
  both.
- Nothing is read past the given buffer. Every length in the bytes is first checked
  against the remaining size.
- The given buffers are held only during the call; results own their memory.

This module makes no decisions about which batches to read, when to check a CRC, and how
to handle damage.
"""

from __future__ import annotations

import functools
import itertools
import struct
import types
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from logcore.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidTimestampError,
    LogcoreError,
    RecordTooLargeError,
)
from logcore.kernels.appending import PartitionFields
from logcore.kernels.checksum import crc32c
from logcore.kernels.iterating import PositionFields
from logcore.kernels.layout import (
    APPEND_TIME_BIT,
    BATCH_FACTS,
    BODY_BELOW_NULL,
    BODY_COUNT,
    BODY_HEADER_KEY,
    BODY_HEADERS,
    BODY_LEFT,
    BODY_LENGTH,
    BODY_REASONS,
    BODY_SHORT,
    BODY_SIZE,
    BODY_VARINT,
    CODEC_MASK,
    COLUMNS,
    CONTROL_BIT,
    CRC_START,
    HEADER_FORMAT,
    HEADER_NAME_ERRORS,
    HEADER_SIZE,
    INT32_MAX,
    LOG_OVERHEAD,
    MAGIC_POSITION,
    MIN_LENGTH,
    MIN_RECORD_SIZE,
    OVERHEAD,
    PREFIX_SIZE,
    ROW_SIZE,
    TRANSACTIONAL_BIT,
    WALK_COUNT,
    WALK_CRC,
    WALK_END,
    WALK_LENGTH,
    WALK_LIMIT,
    WALK_MAGIC,
    WALK_REASONS,
    WALK_SHORT,
    BatchEncoding,
    Buffer,
    EncodedBatch,
    Headers,
    InputColumns,
    Record,
    TopicRecord,
    header_pairs,
    milliseconds,
)
from logcore.kernels.requests import UsualFetch, UsualProduce

NAME: Final = "plain"

_HEADER = struct.Struct(HEADER_FORMAT)
_PREFIX = struct.Struct(">qiib")
#: Masks a number to 64 bits.
_U64 = (1 << 64) - 1
#: Below this many records the set-up of the vectorised decoder costs more than a loop.
_MIN_VECTOR_RECORDS: Final = 12
#: Half the time of TopicRecord(...), which is a function in Python.
_NEW_TOPIC_RECORD: Final = functools.partial(tuple.__new__, TopicRecord)
#: A slice of a memoryview takes 300 ns and one of bytes 60, so it is still faster to
#: copy this much first.
_COPIED_BYTES: Final = 2048

_new_tuple: Final[Any] = tuple.__new__

Path = str | None


def _int64(value: int) -> int:
    """Wrap around as a long in Java does."""
    return ((value + (1 << 63)) & _U64) - (1 << 63)


def _check_head(data: memoryview, position: int, limit: int) -> int:
    """Return WALK_END if a whole batch of a known magic starts at `position`.

    Returns the WALK_ constant of the fault otherwise.
    """
    left = limit - position
    if left < PREFIX_SIZE:
        return WALK_SHORT
    _, length, _, magic = _PREFIX.unpack_from(data, position)
    # A size is kept in 32 bits.
    if not MIN_LENGTH <= length <= INT32_MAX - LOG_OVERHEAD:
        return WALK_LENGTH
    # Only these three are known. The fields after the magic depend on it.
    if not 0 <= magic <= 2:
        return WALK_MAGIC
    if length + LOG_OVERHEAD > left:
        return WALK_SHORT
    # A v0 record can have the least length, and the head of a v2 batch is longer.
    if magic == 2 and length + LOG_OVERHEAD < HEADER_SIZE:
        return WALK_LENGTH
    return WALK_END


class _BatchHead(NamedTuple):
    """A row of BATCH_FACTS."""

    position: int
    base_offset: int
    last_offset: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    size_bytes: int
    partition_leader_epoch: int
    base_sequence: int
    record_count: int
    crc: int
    producer_epoch: int
    attributes: int
    magic: int


def _facts(data: memoryview, position: int) -> _BatchHead:
    """Return the fields of BATCH_FACTS for the whole batch at position."""
    offset, length, epoch, magic = _PREFIX.unpack_from(data, position)
    size = length + LOG_OVERHEAD
    if magic == 2:
        (
            _,
            _,
            _,
            _,
            crc,
            attributes,
            delta,
            base_ts,
            max_ts,
            pid,
            pid_epoch,
            sequence,
            count,
        ) = _HEADER.unpack_from(data, position)
        found = (
            position,
            offset,
            _int64(offset + delta),
            base_ts,
            max_ts,
            pid,
            size,
            epoch,
            sequence,
            count,
            crc,
            pid_epoch,
            attributes,
            magic,
        )
        # Same effect as _BatchHead(...), which takes 2 us more.
        head: _BatchHead = _new_tuple(_BatchHead, found)
        return head
    timestamp = -1
    # A v1 record has its timestamp after the magic and the attributes. A v0 record has
    # none.
    if magic == 1 and size >= 26:
        timestamp = struct.unpack_from(">q", data, position + 18)[0]
    # v0 and v1 have the CRC at the position where v2 has the leader epoch.
    crc = epoch & 0xFFFFFFFF
    return _BatchHead(
        position=position,
        base_offset=offset,
        last_offset=offset,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        producer_id=-1,
        size_bytes=size,
        partition_leader_epoch=-1,
        base_sequence=-1,
        record_count=-1,
        crc=crc,
        producer_epoch=-1,
        attributes=data[position + 17],
        magic=magic,
    )


def _crc_matches(data: memoryview, position: int, size: int) -> bool:
    if data[position + MAGIC_POSITION] == 2:
        (stored,) = struct.unpack_from(">I", data, position + PREFIX_SIZE)
        return bool(crc32c(data[position + CRC_START : position + size]) == stored)
    (stored,) = struct.unpack_from(">I", data, position + LOG_OVERHEAD)
    return bool(zlib.crc32(data[position + MAGIC_POSITION : position + size]) == stored)


def walk(
    data: Buffer, position: int, limit: int, max_batches: int, crc: bool
) -> tuple[npt.NDArray[Any], int, int]:
    """Walk batch heads from `position` towards `limit`, and check CRCs if `crc` is set.

    Returns (facts, next_position, why). `facts` is an array of at most `max_batches`
    BATCH_FACTS, `next_position` is the position after the last good batch, and `why` is
    the WALK_ constant for the end of the walk.
    """
    view = memoryview(data).cast("B")
    limit = min(limit, len(view))
    found: list[_BatchHead] = []
    why = WALK_END
    while position < limit:
        if len(found) >= max_batches:
            why = WALK_LIMIT
            break
        why = _check_head(view, position, limit)
        if why != WALK_END:
            break
        facts = _facts(view, position)
        if crc and not _crc_matches(view, position, facts.size_bytes):
            why = WALK_CRC
            break
        # A matching CRC does not exclude this, because it leaves out the base offset.
        if facts.magic == 2 and (
            facts.record_count < 0 or facts.last_offset < facts.base_offset
        ):
            why = WALK_COUNT
            break
        found.append(facts)
        position += facts.size_bytes
    return np.array(found, BATCH_FACTS), position, why


def are_consecutive(facts: npt.NDArray[Any], expected: int) -> bool:
    """Return whether one or more batches are all v2 and continue each other without a gap.

    The first batch must begin at offset `expected`. `facts` is an array of
    layout.BATCH_FACTS as returned by walk().
    """
    bases = facts["base_offset"]
    lasts = facts["last_offset"]
    return bool(
        bases[0] == expected
        and (bases[1:] == lasts[:-1] + 1).all()
        and (lasts >= bases).all()
        and (facts["magic"] == 2).all()
    )


def find_batch(data: Buffer, position: int, limit: int, offset: int) -> int:
    """Return the position of the first whole batch whose last offset is >= `offset`.

    No CRC is checked. The search stops at anything that is not a whole batch, and
    returns that position. Without any such batch it returns `limit`.
    """
    view = memoryview(data).cast("B")
    limit = min(limit, len(view))
    while position < limit:
        if _check_head(view, position, limit) != WALK_END:
            return position
        base, length, _, magic = _PREFIX.unpack_from(view, position)
        if magic == 2:
            # The last offset delta.
            base += struct.unpack_from(">i", view, position + 23)[0]
        if base >= offset:
            return position
        position += length + LOG_OVERHEAD
    return limit


def plan_run(
    data: Buffer,
    position: int,
    limit: int,
    max_rows: int,
    max_bytes: int,
    end_offset: int,
    expected: int = -1,
    dense: bool = False,
) -> tuple[int, int, int]:
    """Return the longest run of plain batches from `position`.

    A plain batch is whole, v2, not compressed, not a control batch, and below
    `end_offset`. `expected` is the offset at which the run should continue, -1 if it is
    unknown. Each batch must begin at or above the end of the one before it, and with
    `dense` exactly there. At least one batch is taken if there is a plain one,
    regardless of the maxima.

    Returns (next_position, rows, offset after the run). If next_position equals
    `position`, the batch there is of another kind, is damaged, or has an offset that
    does not continue from `expected`.
    """
    view = memoryview(data).cast("B")
    limit = min(limit, len(view))
    start = position
    rows = 0
    while (
        position < limit
        and _check_head(view, position, limit) == WALK_END
        and view[position + MAGIC_POSITION] == 2
    ):
        facts = _facts(view, position)
        last = facts.last_offset
        size = facts.size_bytes
        count = facts.record_count
        attributes = facts.attributes
        if (
            attributes & (CODEC_MASK | CONTROL_BIT)
            or last >= end_offset
            # The last offset overflows int64, or the delta is negative.
            or last < facts.base_offset
        ):
            break
        # No CRC covers the base offset, so it is compared with its neighbor.
        if expected >= 0 and (
            facts.base_offset < expected or (dense and facts.base_offset > expected)
        ):
            break
        # A damaged count must not allocate gigabytes.
        if not 0 <= count <= (size - HEADER_SIZE) // MIN_RECORD_SIZE:
            break
        # The first batch is taken whatever its size is, so that reading makes progress.
        if position > start and (
            rows + count > max_rows or position + size - start > max_bytes
        ):
            break
        rows += count
        position += size
        expected = last + 1
    return position, rows, expected


class _Wrong(Exception):
    """The bytes break a rule of the record format. Carries the BODY_ constant."""


def _read_varint(
    data: memoryview, position: int, end: int, bits: int
) -> tuple[int, int]:
    value = 0
    # Five bytes hold 35 bits, and ten bytes 70: the limits of Kafka for 32 and 64 bits.
    for shift in range(0, 35 if bits == 32 else 70, 7):
        if position >= end:
            raise _Wrong(BODY_VARINT)
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            value &= (
                1 << bits
            ) - 1  # surplus high bits of the last byte are dropped, as Kafka does
            # Zig-zag: the lowest bit is the sign.
            return (value >> 1) ^ -(value & 1), position
    raise _Wrong(BODY_VARINT)


def _read_size(
    data: memoryview, position: int, end: int, strict: bool
) -> tuple[int, int]:
    """Read a 32-bit varint.

    With `strict`, surplus bits are an error, because a reader of 64-bit varints would
    include them in the value.
    """
    value, next_position = _read_varint(data, position, end, 32)
    # The fifth byte has room for the 4 upper bits of 32.
    if strict and next_position - position == 5 and data[next_position - 1] > 0x0F:
        raise _Wrong(BODY_VARINT)
    return value, next_position


def _read_headers(
    data: memoryview, position: int, end: int, count: int, strict: bool = False
) -> Headers:
    headers = []
    for _ in range(count):
        size, position = _read_size(data, position, end, strict)
        # A name cannot be null, unlike a value.
        if size < 0:
            raise _Wrong(BODY_HEADER_KEY)
        if size > end - position:
            raise _Wrong(BODY_LENGTH)
        name = str(data[position : position + size], "utf-8", HEADER_NAME_ERRORS)
        size, position = _read_size(data, position + size, end, strict)
        if strict and size < -1:
            raise _Wrong(BODY_BELOW_NULL)
        # A negative size is null, and takes no bytes.
        if size > end - position and size > 0:
            raise _Wrong(BODY_LENGTH)
        headers.append(
            (name, None if size < 0 else bytes(data[position : position + size]))
        )
        position += max(size, 0)
    if position != end:
        raise _Wrong(BODY_SIZE)
    return tuple(headers)


def _read_row(
    data: memoryview, position: int, end: int, strict: bool = False
) -> tuple[tuple[int, ...], int]:
    """Read one record.

    Returns (fields, next position) with the fields (timestamp_delta, offset_delta,
    key_position, key_size, ..., header_count). With `strict`, the record must be one
    that a leader accepts. Kafka's readers read any length below 0 as null and drop
    surplus bits of a varint, but other readers do not, and a consumer on librdkafka
    never gets past such a record. Stored records are read without `strict`.
    """
    if position >= end:
        raise _Wrong(BODY_SHORT)
    length, position = _read_size(data, position, end, strict)
    if length < 0 or length > end - position:
        raise _Wrong(BODY_LENGTH)
    stop = position + length
    if position >= stop:
        raise _Wrong(BODY_SIZE)
    # The first byte of a record is its attributes, which have no meaning yet.
    timestamp_delta, position = _read_varint(data, position + 1, stop, 64)
    offset_delta, position = _read_size(data, position, stop, strict)
    key_size, key_position = _read_size(data, position, stop, strict)
    if key_size > stop - key_position:
        raise _Wrong(BODY_LENGTH)
    value_size, value_position = _read_size(
        data, key_position + max(key_size, 0), stop, strict
    )
    if value_size > stop - value_position:
        raise _Wrong(BODY_LENGTH)
    if strict and min(key_size, value_size) < -1:
        raise _Wrong(BODY_BELOW_NULL)
    header_count, position = _read_size(
        data, value_position + max(value_size, 0), stop, strict
    )
    if header_count == 0:
        if position != stop:
            raise _Wrong(BODY_SIZE)
    # Each header takes at least one byte, so a larger count is damage.
    elif header_count < 0 or header_count > stop - position:
        raise _Wrong(BODY_HEADERS)
    else:
        _read_headers(data, position, stop, header_count, strict)
    sizes = (
        key_position,
        max(key_size, -1),
        value_position,
        max(value_size, -1),
        position,
        header_count,
    )
    return (timestamp_delta, offset_delta, *sizes), stop


def _read_rows(
    data: memoryview, position: int, end: int, count: int, strict: bool
) -> npt.NDArray[np.int64]:
    """Read all records of one batch one by one.

    Returns the fields of _read_row as shape (8, count).
    """
    rows = []
    for _ in range(count):
        row, position = _read_row(data, position, end, strict)
        rows.append(row)
    # The records must fill the batch exactly.
    if position != end:
        raise _Wrong(BODY_LEFT)
    return np.array(rows, np.int64).reshape(count, 8).T


def _varints(
    data: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64], bits: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Read many varints at once.

    Returns None if any is malformed or exceeds the data.
    """
    # A damaged length can lead past the data.
    if positions.size and int(positions.max()) >= data.size:
        return None
    byte = data[positions]
    value = (byte & 0x7F).astype(np.uint64)
    positions = positions + 1
    # The varints that have more bytes. Most have one, so this shrinks quickly.
    open_ = np.flatnonzero(byte >= 0x80)
    shift = 7
    while open_.size:
        if shift >= (35 if bits == 32 else 70):
            return None
        at = positions[open_]
        if int(at.max()) >= data.size:
            return None
        byte = data[at]
        value[open_] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        positions[open_] += 1
        open_ = open_[byte >= 0x80]
        shift += 7
    # As in _read_varint(), surplus bits are dropped.
    if bits == 32:
        value &= np.uint64(0xFFFFFFFF)
    return (value >> np.uint64(1)).astype(np.int64) ^ -(value & np.uint64(1)).astype(
        np.int64
    ), positions


def _read_rows_at_once(
    raw: bytes, spans: list[tuple[int, int, int]], strict: bool = False
) -> npt.NDArray[np.int64] | None:
    """Read the (position, end, count) of several batches like _read_rows, by column.

    Returns None if anything is unusual; _read_rows then decides.
    """
    # 1. Find the start and the end of each record by its length.
    starts: list[int] = []
    stops: list[int] = []
    add_start = starts.append
    add_stop = stops.append
    try:
        for position, end, count in spans:
            for _ in range(count):
                length = raw[position]
                position += 1
                if length >= 0x80:
                    # Two bytes are enough for records of less than 8 KiB.
                    second = raw[position]
                    if second < 0x80:
                        position += 1
                        length = length & 0x7F | second << 7
                    else:
                        value, position = _read_size(
                            memoryview(raw), position - 1, end, strict
                        )
                        length = value << 1
                if length & 1 or length < 0:  # a negative number, zig-zag or not
                    return None
                add_start(position)
                position += length >> 1
                add_stop(position)
            if position != end:
                return None
    except (IndexError, _Wrong):
        return None
    # 2. Read each field of all records in one step.
    view = np.frombuffer(raw, np.uint8)
    stop = np.array(stops, np.int64)
    fields: list[npt.NDArray[np.int64]] = []
    at = np.array(starts, np.int64) + 1  # after the attributes
    # Timestamp delta, offset delta, key size, value size, header count.
    for bits, is_size in (
        (64, False),
        (32, False),
        (32, True),
        (32, True),
        (32, False),
    ):
        found = _varints(view, at, bits)
        if found is None:
            return None
        numbers, next_at = found
        if (
            strict
            and bits == 32
            and np.any((next_at - at == 5) | (is_size & (numbers < -1)))
        ):
            return None
        at = next_at
        if is_size:
            numbers = np.maximum(numbers, -1)
            fields += [at, numbers]
            at = at + np.maximum(numbers, 0)
        else:
            fields.append(numbers)
    # 3. Check that the fields end inside their record, and check the headers.
    # The result has the position of the headers before their count.
    header_count = fields.pop()
    # Positions only grow within a record, so when the last is inside its record all
    # are.
    if np.any(at > stop) or np.any((header_count == 0) & (at != stop)):
        return None
    for slot in np.flatnonzero(header_count).tolist():
        first = int(at[slot])
        last = int(stop[slot])
        headers = int(header_count[slot])
        if not 0 < headers <= last - first:
            return None
        try:
            _read_headers(memoryview(raw), first, last, headers, strict)
        except _Wrong:
            return None
    return np.stack([*fields, at, header_count])


def _run_at_once(raw: bytes, position: int, limit: int) -> npt.NDArray[np.int64] | None:
    """Return the rows of all plain batches in [position, limit), checking each CRC.

    The rows have shape (8, rows) and are those of _read_rows with timestamps and
    offsets in place of their deltas. Returns None if anything is unusual, and for few
    records. One pass of numpy over a run costs 60 us, which would be half of the total
    time for the 120 records of a single 16 KiB batch.
    """
    # 1. Check the heads. The CRCs are checked after the number of records is known.
    view = memoryview(raw)
    spans = []
    crcs = []
    heads = []
    counts = []
    while position < limit:
        if (
            _check_head(view, position, limit) != WALK_END
            or view[position + MAGIC_POSITION] != 2
        ):
            return None
        facts = _facts(view, position)
        size = facts.size_bytes
        count = facts.record_count
        if not 0 <= count <= (size - HEADER_SIZE) // MIN_RECORD_SIZE:
            return None
        crcs.append((position + CRC_START, position + size, facts.crc))
        # With LogAppendTime, the largest timestamp is the time of each record.
        appended = facts.attributes & APPEND_TIME_BIT
        spans.append((position + HEADER_SIZE, position + size, count))
        heads.append(
            (
                facts.base_offset,
                facts.max_timestamp if appended else facts.base_timestamp,
                0 if appended else 1,
            )
        )
        counts.append(count)
        position += size
    if sum(counts) < _MIN_VECTOR_RECORDS or any(
        crc32c(view[start:stop]) != crc for start, stop, crc in crcs
    ):
        return None
    # 2. Decode the records of all batches, and resolve their deltas.
    rows = _read_rows_at_once(raw, spans)
    if rows is not None:
        offsets, timestamps, is_delta = np.repeat(
            np.array(heads, np.int64), counts, axis=0
        ).T
        rows[0] = rows[0] * is_delta + timestamps
        rows[1] += offsets
    return rows


def _rows(
    data: memoryview,
    position: int,
    end: int,
    count: int,
    path: Path,
    batch_position: int | None,
    strict: bool = False,
) -> npt.NDArray[np.int64]:
    try:
        if count >= _MIN_VECTOR_RECORDS:
            rows = _read_rows_at_once(
                bytes(data[position:end]), [(0, end - position, count)], strict
            )
            if rows is not None:
                return _moved(rows, position)
        return _read_rows(data, position, end, count, strict)
    except _Wrong as wrong:
        raise InvalidRecordError(
            BODY_REASONS[wrong.args[0]], path=path, position=batch_position
        ) from None


def _moved(rows: npt.NDArray[np.int64], distance: int) -> npt.NDArray[np.int64]:
    """Return the rows with positions relative to an earlier origin."""
    for field in (2, 4, 6):
        rows[field] += distance
    return rows


def _columns(block: npt.NDArray[np.uint8], rows: int) -> list[npt.NDArray[Any]]:
    columns = []
    start = 0
    for _, kind in COLUMNS:
        size = rows * np.dtype(kind).itemsize
        columns.append(block[start : start + size].view(kind))
        start += size
    return columns


def _fill(
    columns: list[npt.NDArray[Any]],
    at: int,
    rows: npt.NDArray[np.int64],
    base_offset: int,
    base_timestamp: int,
    append_timestamp: int | None,
) -> None:
    stop = at + rows.shape[1]
    # Offsets and timestamps wrap around as a long in Java does.
    with np.errstate(over="ignore"):
        columns[0][at:stop] = rows[1] + np.int64(base_offset)
        columns[1][at:stop] = (
            rows[0] + np.int64(base_timestamp)
            if append_timestamp is None
            else append_timestamp
        )
    for column, field in zip(columns[2:], rows[2:], strict=True):
        column[at:stop] = field


def _check_whole(data: memoryview, position: int, limit: int, path: Path) -> _BatchHead:
    """Return the facts of the v2 batch at `position`. Checks its head and CRC."""
    why = _check_head(data, position, limit)
    if why != WALK_END:
        raise CorruptBatchError(WALK_REASONS[why], path=path, position=position)
    facts = _facts(data, position)
    crc = crc32c(data[position + CRC_START : position + facts.size_bytes])
    if crc != facts.crc:
        raise CorruptBatchError(
            "CRC-32C does not match",
            path=path,
            position=position,
            expected=f"{facts.crc:#010x}",
            found=f"{crc:#010x}",
        )
    return facts


def _append_time(facts: _BatchHead) -> int | None:
    return facts.max_timestamp if facts.attributes & APPEND_TIME_BIT else None


def decode_columns(
    data: Buffer,
    position: int,
    limit: int,
    block: npt.NDArray[np.uint8],
    rows: int,
    path: Path = None,
) -> int:
    """Decode at most `rows` records of the plain batches in [position, limit).

    Each CRC is checked. `block` is writable and has at least rows * ROW_SIZE bytes. It
    is filled as COLUMNS specifies. Returns the number of filled rows.

    Raises:
        CorruptBatchError: A length or a CRC is wrong.
        InvalidRecordError: The record structure is wrong (format section 1.8).

    Both errors have the position of the batch. The content of the block is then
    undefined.
    """
    view = memoryview(data).cast("B")
    limit = min(limit, len(view))
    columns = _columns(block, rows)
    at = 0
    # 1. Usually, all batches can be decoded in one step.
    run = (
        _run_at_once(view[position:limit].tobytes(), 0, limit - position)
        if position < limit
        else None
    )
    # With too little room, the loop below raises the error of the right batch.
    if run is not None and run.shape[1] <= rows:
        _fill(columns, 0, _moved(run, position), 0, 0, None)
        return int(run.shape[1])
    # 2. Otherwise decode one batch after the other.
    while position < limit:
        facts = _check_whole(view, position, limit, path)
        size = facts.size_bytes
        count = facts.record_count
        if not 0 <= count <= rows - at:
            raise InvalidRecordError(
                BODY_REASONS[BODY_COUNT], path=path, position=position
            )
        found = _rows(
            view, position + HEADER_SIZE, position + size, count, path, position
        )
        _fill(
            columns,
            at,
            found,
            facts.base_offset,
            facts.base_timestamp,
            _append_time(facts),
        )
        at += count
        position += size
    return at


def check_client_batch(data: Buffer) -> tuple[int, int, int, int] | None:
    """Check whether `data` is one v2 batch that a leader may store unchanged.

    Only its offset and epoch may then change. The batch must be uncompressed, must not
    be a control batch and must have create times. Its CRC must be right and its records
    sound, with the offset deltas 0, 1, 2, ..., and the largest record time must be the
    one in the head.

    Returns (record count, oldest time or -1 if no record has one, newest time, number
    of records without a key). Returns None for every other batch, good or bad, which
    needs a full check.
    """
    # 1. Check the head and the CRC.
    view = memoryview(data).cast("B")
    facts, _, why = walk(view, 0, len(view), 2, True)
    if why != WALK_END or len(facts) != 1:
        return None
    head = facts[0]
    count = int(head["record_count"])
    if (
        head["magic"] != 2
        # Compression, LogAppendTime and control batches need a full check.
        or head["attributes"] & ~TRANSACTIONAL_BIT
        or not 1 <= count <= len(view)
        or head["last_offset"] - head["base_offset"] != count - 1
        # An idempotent producer numbers its records.
        or (head["producer_id"] >= 0 and head["base_sequence"] < 0)
    ):
        return None
    # 2. Check the structure of the records.
    block = np.empty(count * ROW_SIZE, np.uint8)
    try:
        first = int(head["base_offset"])
        base_timestamp = int(head["base_timestamp"])
        decode_body_columns(
            view[HEADER_SIZE:], count, first, base_timestamp, None, block, strict=True
        )
    except LogcoreError:
        return None
    # 3. Compare offsets and times with the head. Consumers and retention rely on the
    #    largest timestamp of the head.
    columns = dict(
        zip((name for name, _ in COLUMNS), _columns(block, count), strict=True)
    )
    times = columns["timestamps_ms"]
    # -1 means no timestamp, as in Kafka.
    newest = max(-1, int(times.max()))
    offsets = columns["offsets"] - int(head["base_offset"])
    if newest != int(head["max_timestamp"]) or not np.array_equal(
        offsets, np.arange(count)
    ):
        return None
    given = times[times != -1]
    return (
        count,
        int(given.min()) if len(given) else -1,
        newest,
        int((columns["key_sizes"] < 0).sum()),
    )


def decode_body_columns(
    body: Buffer,
    count: int,
    base_offset: int,
    base_timestamp: int,
    append_timestamp: int | None,
    block: npt.NDArray[np.uint8],
    path: Path = None,
    position: int | None = None,
    strict: bool = False,
) -> None:
    """Decode the decompressed records of one batch.

    `append_timestamp` is the time of all records, None for CreateTime. `strict` rejects
    lengths that only some readers accept; see _read_row. `block` is the one of
    decode_columns, for `count` rows. `path` and `position` identify the batch in
    errors.

    Raises:
        InvalidRecordError: The record structure is wrong.
    """
    view = memoryview(body).cast("B")
    if not 0 <= count <= len(view) // MIN_RECORD_SIZE:
        raise InvalidRecordError(BODY_REASONS[BODY_COUNT], path=path, position=position)
    rows = _rows(view, 0, len(view), count, path, position, strict)
    _fill(
        _columns(block, count), 0, rows, base_offset, base_timestamp, append_timestamp
    )


def skip_records(
    body: Buffer,
    position: int,
    count: int,
    path: Path = None,
    batch_position: int | None = None,
) -> int:
    """Return the position after `count` decompressed records of one batch.

    Only their lengths are read. `path` and `batch_position` identify the batch in
    errors.

    Raises:
        InvalidRecordError: A length is wrong.
    """
    view = memoryview(body).cast("B")
    try:
        for _ in range(count):
            if position >= len(view):
                raise _Wrong(BODY_SHORT)
            length, position = _read_varint(view, position, len(view), 32)
            if not 0 <= length <= len(view) - position:
                raise _Wrong(BODY_LENGTH)
            position += length
    except _Wrong as wrong:
        raise InvalidRecordError(
            BODY_REASONS[wrong.args[0]], path=path, position=batch_position
        ) from None
    return position


def _objects(
    raw: bytes,
    rows: npt.NDArray[np.int64],
    base_offset: int,
    base_timestamp: int,
    append_timestamp: int | None,
) -> list[Record]:
    with np.errstate(over="ignore"):
        offsets = (rows[1] + np.int64(base_offset)).tolist()
        if append_timestamp is None:
            timestamps = (rows[0] + np.int64(base_timestamp)).tolist()
        else:
            timestamps = [append_timestamp] * len(offsets)
    keys = _cut(raw, rows[2], rows[3])
    values = _cut(raw, rows[4], rows[5])
    headers: Iterable[Headers] = itertools.repeat(())
    # Most records have no headers.
    if rows[7].any():
        view = memoryview(raw)
        starts = rows[6].tolist()
        counts = rows[7].tolist()
        headers = [
            _read_headers(view, at, _headers_end(view, at, count), count)
            for at, count in zip(starts, counts, strict=True)
        ]
    # Same effect as Record(...), without calling a Python function: 110 ns in place of
    # 290.
    fields = zip(offsets, timestamps, keys, values, headers, strict=False)
    return list(map(_new_tuple, itertools.repeat(Record), fields))


def _cut(
    raw: bytes, positions: npt.NDArray[Any], sizes: npt.NDArray[Any]
) -> list[bytes | None]:
    """Return the slices of `raw`. A size below 0 gives None."""
    edges = zip(positions.tolist(), (positions + sizes).tolist(), strict=True)
    # Without nulls, a comparison for each value is saved.
    if sizes.size and int(sizes.min()) < 0:
        return [None if stop < at else raw[at:stop] for at, stop in edges]
    return [raw[at:stop] for at, stop in edges]


def _headers_end(data: memoryview, position: int, count: int) -> int:
    for _ in range(2 * count):  # name and value of headers that were already validated
        size, position = _read_varint(data, position, len(data), 32)
        # A null value has the size -1.
        position += max(size, 0)
    return position


def decode_objects(
    data: Buffer, position: int, limit: int, path: Path = None
) -> list[Record]:
    """Decode the plain batches in [position, limit) to records, and check each CRC.

    Errors are those of decode_columns.
    """
    view = memoryview(data).cast("B")
    limit = min(limit, len(view))
    if position < limit:
        raw = view[position:limit].tobytes()
        run = _run_at_once(raw, 0, len(raw))
        if run is not None:
            return _objects(raw, run, 0, 0, None)
    records: list[Record] = []
    while position < limit:
        facts = _check_whole(view, position, limit, path)
        size = facts.size_bytes
        count = facts.record_count
        if not 0 <= count <= (size - HEADER_SIZE) // MIN_RECORD_SIZE:
            raise InvalidRecordError(
                BODY_REASONS[BODY_COUNT], path=path, position=position
            )
        body = view[position + HEADER_SIZE : position + size]
        rows = _rows(body, 0, len(body), count, path, position)
        records += _objects(
            bytes(body),
            rows,
            facts.base_offset,
            facts.base_timestamp,
            _append_time(facts),
        )
        position += size
    return records


def decode_topic_records(
    data: Buffer,
    position: int,
    limit: int,
    topic: str,
    partition: int,
    path: Path = None,
) -> list[TopicRecord]:
    """Decode like decode_objects(), to records with their topic and partition."""
    return to_topic_records(
        topic, partition, decode_objects(data, position, limit, path)
    )


def decode_body_objects(
    body: Buffer,
    count: int,
    base_offset: int,
    base_timestamp: int,
    append_timestamp: int | None,
    path: Path = None,
    position: int | None = None,
) -> list[Record]:
    """Decode the decompressed records of one batch to records.

    Arguments and errors are those of decode_body_columns.
    """
    view = memoryview(body).cast("B")
    if not 0 <= count <= len(view) // MIN_RECORD_SIZE:
        raise InvalidRecordError(BODY_REASONS[BODY_COUNT], path=path, position=position)
    rows = _rows(view, 0, len(view), count, path, position)
    return _objects(bytes(view), rows, base_offset, base_timestamp, append_timestamp)


def to_topic_record(topic: str, partition: int, record: Record) -> TopicRecord:
    """Return a record with its topic and partition."""
    return TopicRecord(topic, partition, *record)


def to_topic_records(
    topic: str, partition: int, records: list[Record]
) -> list[TopicRecord]:
    """Return a list of records with their topic and partition."""
    return [_NEW_TOPIC_RECORD((topic, partition, *record)) for record in records]


def read_one(
    data: Buffer,
    position: int,
    limit: int,
    offset: int,
    path: Path = None,
    end_offset: int = -1,
    dense: bool = False,
) -> Record | int:
    """Return the first record at or after `offset`, searching from `position`.

    A batch begins at `position`. The CRC of the batch found is checked. In these cases
    the result is an int, the position at which to continue:
    - The batch found is not plain (compressed, control, v0, v1, damaged), or has no
      such record.
    - `limit` was reached.
    - The next batch contradicts the offset of the batch found, which no CRC covers. The
      next batch must begin at the next offset, or (unless `dense`) at a later one.

    `end_offset` is the base offset of a batch at `limit`, -1 if it is unknown. If the
    head shows that the offsets have no gaps (the last delta is the record count less
    one), the records before the wanted one are skipped by their lengths. If that does
    not lead to the offset, all records are read. Records after the one found are not
    read.

    Errors are those of decode_columns.
    """
    # 1. Find the batch. Batches that are not plain are left to the caller.
    view = memoryview(data).cast("B")
    limit = min(limit, len(view))
    position = find_batch(view, position, limit, offset)
    if (
        position >= limit
        or _check_head(view, position, limit) != WALK_END
        or view[position + MAGIC_POSITION] != 2
    ):
        return position
    if int.from_bytes(view[position + CRC_START : position + CRC_START + 2], "big") & (
        CODEC_MASK | CONTROL_BIT
    ):
        return position
    # 2. Check its CRC, and its base offset by the next batch.
    facts = _check_whole(view, position, limit, path)
    size = facts.size_bytes
    count = facts.record_count
    if not 0 <= count <= (size - HEADER_SIZE) // MIN_RECORD_SIZE:
        raise InvalidRecordError(BODY_REASONS[BODY_COUNT], path=path, position=position)
    # A flipped bit in the base offset would return the record of another offset.
    if not _is_followed(
        view, position + size, limit, facts.last_offset, end_offset, dense
    ):
        return position
    body = view[position + HEADER_SIZE : position + size]
    at = 0
    end = len(body)
    before = _int64(offset - facts.base_offset)
    # 3. Skip the records before by their lengths. Without gaps, the requested record is
    #    the one after `before` others.
    if (
        0 < before < count
        and _int64(facts.last_offset - facts.base_offset) == count - 1
    ):
        try:
            for _ in range(before):
                length, at = _read_varint(body, at, end, 32)
                if not 0 <= length <= end - at:
                    raise _Wrong(BODY_LENGTH)
                at += length
            row, _ = _read_row(body, at, end)
            if _int64(facts.base_offset + row[1]) == offset:
                return _record(body, row, facts)
        except _Wrong:
            pass  # the full walk reports the fault, if it reaches it
        at = 0
    # 4. The offsets have gaps, or the lengths did not lead to the offset: read all.
    try:
        for _ in range(count):
            row, at = _read_row(body, at, end)
            if _int64(facts.base_offset + row[1]) >= offset:
                return _record(body, row, facts)
        if at != end:
            raise _Wrong(BODY_LEFT)
    except _Wrong as wrong:
        raise InvalidRecordError(
            BODY_REASONS[wrong.args[0]], path=path, position=position
        ) from None
    return position + size


def _is_followed(
    view: memoryview,
    behind: int,
    limit: int,
    last_offset: int,
    end_offset: int,
    dense: bool,
) -> bool:
    # The next batch begins with its base offset.
    if behind + 8 <= limit:
        following = int.from_bytes(view[behind : behind + 8], "big", signed=True)
    elif behind == limit:
        following = end_offset
    else:
        return False
    return _int64(following - 1) == last_offset if dense else following > last_offset


def _record(body: memoryview, row: tuple[int, ...], facts: _BatchHead) -> Record:
    (
        timestamp_delta,
        offset_delta,
        key_at,
        key_size,
        value_at,
        value_size,
        headers_at,
        header_count,
    ) = row
    appended = _append_time(facts)
    return Record(
        _int64(facts.base_offset + offset_delta),
        _int64(facts.base_timestamp + timestamp_delta)
        if appended is None
        else appended,
        None if key_size < 0 else bytes(body[key_at : key_at + key_size]),
        None if value_size < 0 else bytes(body[value_at : value_at + value_size]),
        _read_headers(
            body, headers_at, _headers_end(body, headers_at, header_count), header_count
        ),
    )


def get_one(
    index: Buffer,
    entries: int,
    data: Buffer,
    limit: int,
    base_offset: int,
    offset: int,
    path: Path = None,
    end_offset: int = -1,
    dense: bool = False,
) -> Record | int:
    """Run start_position and then read_one from there.

    Arguments, results and errors are theirs.
    """
    position = start_position(index, entries, data, limit, base_offset, offset)
    return read_one(data, position, limit, offset, path, end_offset, dense)


def hold(data: Buffer, index: Any, own_from: int) -> Any:
    """Return the data with which get_fast() reads a segment, kept as Segment.held.

    It has the attribute size_bytes. `data` is the mapping of the segment, and `index`
    its OffsetIndex. `own_from` is the position from which this process has appended the
    batches. Those need no check of their CRC; the CRC of each other batch is checked
    when it is first read.
    """
    return types.SimpleNamespace(size_bytes=len(data))


def get_fast(state: PartitionFields, offset: int) -> Record | None:
    """Return the record at an offset of a partition, None if the fast path cannot read it.

    It must be in a plain batch of a held segment, and the offsets must have no gaps.
    See _getting.pxi for the rules.
    """
    return None


def yield_records(
    reading: PositionFields, ahead: list[TopicRecord], start: int, stop: int
) -> Iterator[TopicRecord]:
    """Yield ahead[start:stop], and move the position just before each record.

    The iteration ends early if reading.records is replaced. A record whose position has
    moved reaches the caller: an interrupt cannot come between the two.
    """
    records = reading.records
    for record in ahead[start:stop]:
        reading.finished = reading.position
        reading.position = record.offset + 1
        # No call here: an interrupt would lose the record.
        yield record
        if reading.records is not records:
            return


def read_request(frame: Buffer) -> UsualProduce | UsualFetch | None:
    """Read a Produce or Fetch request, or return None if it is not usual.

    `frame` is a request without its size. _requests.pxi defines the usual requests.
    This form reads none.
    """
    return None


def search_offsets(data: Buffer, count: int, target: int) -> int:
    """Return the slot of the greatest entry at or below `target`, a relative offset.

    Only the first `count` entries of the offset index are searched. Returns -1 if there
    is no such entry.
    """
    view = memoryview(data).cast("B")
    low = 0
    high = min(count, len(view) // 8)
    while low < high:
        middle = (low + high) >> 1
        if struct.unpack_from(">i", view, middle * 8)[0] <= target:
            low = middle + 1
        else:
            high = middle
    return low - 1


def start_position(
    index: Buffer, entries: int, data: Buffer, limit: int, base_offset: int, offset: int
) -> int:
    """Return the position of a whole batch at or before `offset`, by the offset index.

    `index` and `entries` are an offset index and the number of its valid entries.
    `data` and `limit` are the bytes of the segment. The entry found is used if a whole
    batch starts at its position. The last offset of that batch must be at most the
    entry's offset and above the offset of the entry before. Otherwise the result is 0.
    """
    slot = search_offsets(index, entries, min(offset - base_offset, INT32_MAX))
    # The offset is below the first entry.
    if slot < 0:
        return 0
    relative, position = struct.unpack_from(">ii", index, slot * 8)
    before = struct.unpack_from(">i", index, slot * 8 - 8)[0] if slot else -1
    # An entry is only a hint: the index may be damaged.
    if not 0 < position < limit:
        return 0
    facts, _, _ = walk(data, position, limit, 1, False)
    if len(facts) and before < int(facts["last_offset"][0]) - base_offset <= relative:
        return int(position)
    return 0


def gather(
    data: Buffer, positions: npt.NDArray[np.int32], sizes: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Copy scattered slices into one buffer, in Arrow's layout of a binary column.

    `positions` and `sizes` are int32, shape (n,), contiguous; a size of -1 or 0 adds
    nothing. Returns (offsets, data): int32 of shape (n + 1,) and uint8 of shape
    (offsets[-1],).

    Raises:
        ValueError: A slice is outside `data`, or the slices exceed 2^31-1 bytes.
    """
    view = np.frombuffer(memoryview(data).cast("B"), np.uint8)
    lengths = np.maximum(sizes, 0).astype(np.int64)
    if np.any((lengths > 0) & ((positions < 0) | (positions > view.size - lengths))):
        raise ValueError("a slice is outside the data")
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    # Arrow addresses a binary column with 32-bit offsets.
    if total > INT32_MAX:
        raise ValueError("more than 2^31-1 bytes in one chunk")
    source = np.repeat(positions.astype(np.int64) - offsets[:-1], lengths) + np.arange(
        total
    )
    return offsets.astype(np.int32), view[source]


def bytes_list(
    data: Buffer, positions: npt.NDArray[np.int32], sizes: npt.NDArray[np.int32]
) -> list[bytes | None]:
    """Copy scattered slices to bytes objects. A size below 0 gives None.

    `positions` and `sizes` are int32, shape (n,), contiguous.

    Raises:
        ValueError: A slice is outside `data`, or the two arrays differ in length.
    """
    view = memoryview(data).cast("B")
    if len(positions) != len(sizes):
        raise ValueError("positions and sizes differ in length")
    used = np.flatnonzero(sizes > 0)
    if not len(used):
        return [None if size < 0 else b"" for size in sizes.tolist()]
    starts = positions.astype(np.int64)
    first = int(starts[used].min())
    stop = int((starts + sizes)[used].max())
    if first < 0 or stop > len(view):
        raise ValueError("a slice is outside the data")
    # The slices are far apart, for example keys beside large values.
    if stop - first > _COPIED_BYTES * len(used):
        pairs = zip(starts.tolist(), sizes.tolist(), strict=True)
        return [
            None if size < 0 else bytes(view[at : at + size]) if size else b""
            for at, size in pairs
        ]
    # The slices are close together: one copy of their range, then slices of bytes.
    raw = bytes(view[first:stop])
    starts -= first
    # Positions of empty and null values may be anywhere.
    starts[sizes <= 0] = 0
    return _cut(raw, starts, sizes)


def _encode(value: int) -> bytes:
    """Return the zig-zag varint of a number of at most 64 bits."""
    value = (value << 1) ^ (value >> 63)
    if 1 << 14 <= value < 1 << 21:  # offset deltas of a large batch
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.cache
def _small_varints() -> list[bytes]:
    """Return the varints of the lengths and deltas of nearly all records.

    Building the table takes 10 ms once, and it saves 300 ns for each record.
    """
    return [_encode(value) for value in range(1 << 14)]


def _varint(value: int) -> bytes:
    small = _small_varints()
    return small[value] if 0 <= value < len(small) else _encode(value)


def _as_bytes(value: object, what: str, index: int) -> bytes:
    # str is refused: the caller chooses the encoding.
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise InvalidRecordError(
        f"record {index}: {what} must be bytes or None",
        expected="bytes",
        found=type(value).__name__,
    )


def _as_headers(headers: Any, index: int) -> tuple[Any, ...]:
    try:
        return tuple(header_pairs(headers))
    except TypeError as error:
        raise InvalidRecordError(
            f"record {index}: headers must be a dict or (name, value) pairs",
            found=type(headers).__name__,
        ) from error


def _pack_headers(headers: Iterable[tuple[str, bytes | None]], index: int) -> bytes:
    packed = bytearray()
    for header in headers:
        try:
            name, value = header
        except (TypeError, ValueError):
            raise InvalidRecordError(
                f"record {index}: a header is a (name, value) pair", found=repr(header)
            ) from None
        if not isinstance(name, str):
            raise InvalidRecordError(
                f"record {index}: a header name must be str", found=type(name).__name__
            )
        try:
            raw = name.encode("utf-8", HEADER_NAME_ERRORS)
        except UnicodeEncodeError as error:
            raise InvalidRecordError(
                f"record {index}: a header name cannot be encoded as UTF-8"
            ) from error
        packed += _encode(len(raw)) + raw
        if value is None:
            # The varint of -1, the size of null.
            packed.append(1)
        else:
            raw = _as_bytes(value, "a header value", index)
            packed += _encode(len(raw)) + raw
    return bytes(packed)


class _Writer:
    """The output of one encode call: consecutive batches."""

    def __init__(
        self, base_offset: int, leader_epoch: int, now_ms: int, encoding: BatchEncoding
    ) -> None:
        #: The finished batches.
        self.done = bytearray()
        self.batches: list[EncodedBatch] = []
        #: The parts of the open batch, which finish() joins.
        self.body: list[bytes] = []
        #: The size of the open batch before compression.
        self.size = HEADER_SIZE
        #: The number of records of the open batch.
        self.count = 0
        self.base_timestamp = self.max_timestamp = -1
        self.base_offset = base_offset
        self.leader_epoch = leader_epoch
        self.now_ms = now_ms
        self.encoding = encoding
        self.max_bytes = min(encoding.max_bytes, INT32_MAX)
        self.base_sequence = encoding.base_sequence
        self.small = _small_varints()

    def finish(self) -> None:
        """Compress the open batch, write its head, and start the next batch."""
        if not self.count:
            return
        body = b"".join(self.body)
        if self.encoding.compress is not None:
            body = self.encoding.compress(body)
        size = HEADER_SIZE + len(body)
        # Kafka checks the compressed size too.
        if size > self.max_bytes:
            raise RecordTooLargeError(
                "batch is larger than max.message.bytes",
                expected=f"at most {self.max_bytes} bytes",
                found=f"{size} bytes",
            )
        last = self.base_offset + self.count - 1
        # With LogAppendTime, readers take this time for all records.
        if self.encoding.attributes & APPEND_TIME_BIT:
            self.max_timestamp = self.now_ms
        fields = (
            self.encoding.attributes,
            self.count - 1,
            self.base_timestamp,
            self.max_timestamp,
        )
        producer = (
            self.encoding.producer_id,
            self.encoding.producer_epoch,
            self.base_sequence,
            self.count,
        )
        head = (self.base_offset, size - LOG_OVERHEAD, self.leader_epoch, 2)
        # The CRC covers everything after itself, so it is computed first.
        covered = _HEADER.pack(*head, 0, *fields, *producer)[CRC_START:] + body
        self.batches.append((len(self.done), size, last, self.max_timestamp))
        self.done += (
            _HEADER.pack(*head, crc32c(covered), *fields, *producer)[:CRC_START]
            + covered
        )
        # The sequence after 2^31-1 is 0.
        if self.base_sequence >= 0:
            self.base_sequence = (self.base_sequence + self.count) & INT32_MAX
        self.base_offset = last + 1
        self.body = []
        self.size = HEADER_SIZE
        self.count = 0

    def add(
        self,
        index: int,
        timestamp: int,
        key: bytes | None,
        value: bytes | None,
        header_count: int,
        headers: bytes,
    ) -> None:
        """Add one record. Closes the open batch first if it would get too large."""
        payload = (len(key) if key else 0) + (len(value) if value else 0) + len(headers)
        if timestamp < -1:
            raise InvalidTimestampError(
                f"record {index}: a timestamp is -1 or at least 0", found=timestamp
            )
        # OVERHEAD is the most that the lengths and deltas can take.
        if self.count and self.size + payload + OVERHEAD > self.encoding.batch_bytes:
            self.finish()
        # A compressed batch may still fit, and finish() checks that.
        if payload > self.max_bytes and self.encoding.compress is None:
            raise RecordTooLargeError(
                f"record {index} is larger than max.message.bytes",
                expected=f"at most {self.max_bytes} bytes",
                found=f"{payload} bytes",
            )
        if not self.count:
            self.base_timestamp = self.max_timestamp = timestamp
        elif timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        small = self.small
        count = self.count
        delta = timestamp - self.base_timestamp
        limit = len(small)
        fields = b"".join(
            (
                b"\0",
                small[delta] if 0 <= delta < limit else _encode(delta),
                small[count] if count < limit else _encode(count),
                b"\1"
                if key is None
                else small[len(key)]
                if len(key) < limit
                else _encode(len(key)),
                key or b"",
                b"\1"
                if value is None
                else small[len(value)]
                if len(value) < limit
                else _encode(len(value)),
                value or b"",
                _encode(header_count) + headers if header_count else b"\0",
            )
        )
        head = _varint(len(fields))
        self.body.append(head)
        self.body.append(fields)
        self.size += len(head) + len(fields)
        self.count = count + 1

    def extend(self, records: Iterable[Any]) -> None:
        """Add records in the form that encode_records() accepts.

        The most common record, a tuple of two bytes objects that fits into the open
        batch, takes a fast path. Its parts are looked up in tables and joined with the
        parts of the whole batch: 350 ns instead of 1000.
        """
        small = self.small
        now_ms = self.now_ms
        requires_key = self.encoding.requires_key
        limit = len(small)
        heads: dict[tuple[int, int, int], tuple[bytes, bytes, bytes, int]] = {}
        body = self.body
        size = self.size
        count = self.count
        # The size up to which the fast path may fill the batch. 0 before the first
        # record, which sets the base timestamp.
        room = 0
        for index, record in enumerate(records):
            if type(record) is tuple and len(record) == 2:
                key, value = record
                if type(key) is bytes and type(value) is bytes:
                    key_size = len(key)
                    value_size = len(value)
                    if size + key_size + value_size + OVERHEAD <= room:
                        number = small[count] if count < limit else _encode(count)
                        shape = key_size, value_size, len(number)
                        if shape in heads:
                            head, key_head, value_head, total = heads[shape]
                        else:
                            key_head = _varint(key_size)
                            value_head = _varint(value_size)
                            length = (
                                3
                                + len(number)
                                + len(key_head)
                                + key_size
                                + len(value_head)
                                + value_size
                            )
                            # The two zeros are the attributes and the timestamp delta.
                            head = _varint(length) + b"\0\0"
                            total = length + len(head) - 2
                            heads[shape] = head, key_head, value_head, total
                        body += (head, number, key_head, key, value_head, value, b"\0")
                        size += total
                        count += 1
                        continue
            self.size = size
            self.count = count
            self.add(index, *_normalised(record, index, now_ms, requires_key))
            body = self.body
            size = self.size
            count = self.count
            # The fast path writes a timestamp delta of 0.
            room = (
                min(self.encoding.batch_bytes, self.max_bytes)
                if self.base_timestamp == now_ms
                else 0
            )
        self.size = size
        self.count = count

    def result(self, out: bytearray) -> tuple[int, list[EncodedBatch]]:
        self.finish()
        size = len(self.done)
        if len(out) < size:
            out.extend(bytes(size - len(out)))
        out[:size] = self.done
        return size, self.batches


def encode_records(
    out: bytearray,
    records: Iterable[Any],
    base_offset: int,
    leader_epoch: int,
    now_ms: int,
    encoding: BatchEncoding,
) -> tuple[int, list[EncodedBatch]]:
    """Encode (key, value[, headers[, timestamp_ms]]) tuples into v2 batches.

    Offsets are consecutive from `base_offset` on.

    Args:
        out: Receives the batches from position 0 on. It grows if needed, never shrinks,
            and should be reused.
        now_ms: Timestamp of records that have none.

    Returns (size_bytes, batches): the number of used bytes in `out`, and one
    EncodedBatch for each batch.

    Raises:
        InvalidRecordError, InvalidTimestampError, RecordTooLargeError: The error names
            the record. The content of `out` is then undefined.
    """
    writer = _Writer(base_offset, leader_epoch, now_ms, encoding)
    writer.extend(records)
    return writer.result(out)


def encode_one(
    record: tuple[Any, Any, Any, Any],
    base_offset: int,
    leader_epoch: int,
    now_ms: int,
    encoding: BatchEncoding,
) -> tuple[bytes, int]:
    """Encode one record as its own batch. Returns (batch, max_timestamp).

    `record` is (key, value, headers, timestamp_ms), and the last two may be None. The
    batch and the errors are those of encode_records() for this one tuple, except that
    `encoding.batch_bytes` has no effect.
    """
    writer = _Writer(base_offset, leader_epoch, now_ms, encoding)
    writer.add(0, *_normalised(record, 0, now_ms, encoding.requires_key))
    writer.finish()
    return bytes(writer.done), writer.max_timestamp


def _normalised(
    record: Any, index: int, now_ms: int, requires_key: bool
) -> tuple[int, bytes | None, bytes | None, int, bytes]:
    """Return (timestamp, key, value, header_count, encoded headers) of a record."""
    shape = "give (key, value[, headers[, timestamp_ms]])"
    try:
        row = record if type(record) is tuple else tuple(record)
    except TypeError:
        raise InvalidRecordError(
            f"record {index}: {shape}", found=type(record).__name__
        ) from None
    fields = len(row)
    if not 2 <= fields <= 4:
        raise InvalidRecordError(
            f"record {index}: {shape}", expected="2 to 4 fields", found=fields
        )
    key = row[0]
    value = row[1]
    if type(key) is not bytes:
        if key is not None:
            key = _as_bytes(key, "a key", index)
        elif requires_key:
            raise InvalidRecordError(
                f"record {index}: a compacted topic takes no record without a key"
            )
    if type(value) is not bytes and value is not None:
        value = _as_bytes(value, "a value", index)
    header_count = 0
    headers = b""
    timestamp = now_ms
    if fields > 2:
        # Most records have no headers.
        if row[2] is not None and row[2] != ():
            given = _as_headers(row[2], index)
            header_count = len(given)
            headers = _pack_headers(given, index)
        if fields > 3 and row[3] is not None:
            timestamp = row[3]
            found = milliseconds(row[3])
            if found is None:
                raise InvalidTimestampError(
                    f"record {index}: not a timestamp",
                    expected="an int of milliseconds, or a datetime with a time zone",
                    found=repr(row[3]),
                )
            timestamp = found
    return timestamp, key, value, header_count, headers


def encode_columns(
    out: bytearray,
    columns: InputColumns,
    base_offset: int,
    leader_epoch: int,
    now_ms: int,
    encoding: BatchEncoding,
) -> tuple[int, list[EncodedBatch]]:
    """Encode rows given as columns into v2 batches without headers.

    The caller has checked the columns. The other arguments, the result and the errors
    are those of encode_records().
    """
    writer = _Writer(base_offset, leader_epoch, now_ms, encoding)
    keys, values, timestamps_ms, count = columns
    cells = []
    for column in (keys, values):
        if column is None:
            cells.append([None] * count)
            continue
        data, offsets, nulls = column
        # A sliced Arrow array does not begin at 0, and only the slice is copied.
        first = int(offsets[0]) if len(offsets) else 0
        raw = data[first : int(offsets[-1]) if len(offsets) else 0].tobytes()
        edges = (offsets - first).tolist()
        cut: list[Any] = [raw[start:stop] for start, stop in itertools.pairwise(edges)]
        if nulls is not None:
            for row in np.flatnonzero(nulls):
                cut[row] = None
        cells.append(cut)
    if encoding.requires_key and None in cells[0]:
        raise InvalidRecordError(
            f"record {cells[0].index(None)}: a compacted topic takes no record without a key"
        )
    # Pairs take the fast path of extend().
    if timestamps_ms is None:
        writer.extend(zip(*cells, strict=True))
    else:
        writer.extend(
            zip(*cells, itertools.repeat(()), timestamps_ms.tolist(), strict=False)
        )
    return writer.result(out)


def longest_value(edges: npt.NDArray[np.int64], size: int) -> int:
    """Return the length of the longest value of a column of bytes, by its edges.

    Returns -1 if the edges do not rise from 0 or more, or exceed `size`. `edges` is
    int64, shape (n + 1,), contiguous.
    """
    # A decrease is a huge number when read as unsigned, so one maximum detects it and a
    # value that is too large.
    longest = int(np.diff(edges).view(np.uint64).max(initial=0))
    if edges[0] < 0 or edges[-1] > size or longest > size:
        return -1
    return longest


def hash_keys(
    data: Buffer,
    positions: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int32],
    coefficients: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    """Return 128-bit hashes of keys, shape (n, 2).

    Two different keys collide with probability 2^-128. `positions` and `sizes` are
    int32, shape (n,), contiguous. `coefficients` is uint64, shape (words + 2, 4),
    random and secret. A key has at most words * 4 bytes; the result for a longer or
    null key has no meaning.

    The hashes are the upper halves of four 64-bit multilinear hashes (Thorup: High
    Speed Hashing for Integers and Strings, section 4.2). Unlike for a fixed function,
    collisions cannot be searched for.

    Raises:
        ValueError: A key is outside `data`.
    """
    raw = np.frombuffer(memoryview(data).cast("B"), np.uint8)
    most = 4 * (len(coefficients) - 2)
    found = np.zeros((len(sizes), 2), np.uint64)
    used = np.flatnonzero((sizes >= 0) & (sizes <= most))
    starts = positions[used].astype(np.int64)
    lengths = sizes[used].astype(np.int64)
    if np.any((lengths > 0) & ((starts < 0) | (starts > raw.size - lengths))):
        raise ValueError("a key is outside the data")
    # Keys with the same number of words are hashed together, as rows of one matrix.
    words = -(-lengths // 4)
    for count in np.unique(words).tolist():
        rows = np.flatnonzero(words == count)
        # The last word of a key is filled with zeros.
        columns = np.arange(4 * count)
        inside = columns < lengths[rows, None]
        cells = np.where(
            inside, raw[np.where(inside, starts[rows, None] + columns, 0)], 0
        ).astype(np.uint8)
        keys = (
            np.ascontiguousarray(cells)
            .view("<u4")
            .reshape(len(rows), count)
            .astype(np.uint64)
        )
        # The length is part of the hash, so that trailing zeros differ.
        sums = coefficients[0] + lengths[rows, None].astype(np.uint64) * coefficients[1]
        for word in range(count):
            sums = sums + keys[:, word, None] * coefficients[word + 2]
        # Modulo 2^64, a low bit of a sum depends on lower bits only, so the upper halves
        # are used.
        halves = sums >> np.uint64(32)
        found[used[rows], 0] = halves[:, 0] << np.uint64(32) | halves[:, 1]
        found[used[rows], 1] = halves[:, 2] << np.uint64(32) | halves[:, 3]
    return found


def plain_rows(
    rows: list[Any],
) -> tuple[list[bytes | None] | None, npt.NDArray[np.int64]] | None:
    """Return the keys and sizes of records if all are tuples of key and value.

    Returns None otherwise. Each key and value must be bytes or None. The keys are None
    if no record has one. The sizes, int64 of shape (n,), are upper bounds of the size
    of each record in a batch, in bytes. The compiled form takes 20 ns a record.
    bulk.keys_and_sizes() takes 100 ns, accepts other records too, and specifies the
    rules. This plain form leaves all records to it.
    """
    return None


def murmur2(key: bytes) -> int:
    """Return Kafka's Utils.toPositive(Utils.murmur2(key)), from 0 to 2^31-1.

    The constants and the order of the operations are Kafka's.
    """
    factor = 0x5BD1E995
    mask = 0xFFFFFFFF
    size = len(key)
    whole = size & ~3
    # Kafka's seed.
    found = 0x9747B28C ^ size
    for (word,) in struct.iter_unpack("<I", key[:whole]):
        mixed = word * factor & mask
        mixed ^= mixed >> 24
        found = (found * factor & mask) ^ (mixed * factor & mask)
    # The last one to three bytes.
    if whole < size:
        found ^= int.from_bytes(key[whole:], "little")
        found = found * factor & mask
    found ^= found >> 13
    found = found * factor & mask
    return (found ^ found >> 15) & 0x7FFFFFFF


def _slots_of(hashes: npt.NDArray[np.uint64], slots: int) -> npt.NDArray[np.int64]:
    # A multiplication maps the upper 32 bits to a slot in less time than a remainder.
    return ((hashes[:, 0] >> np.uint64(32)) * np.uint64(slots) >> np.uint64(32)).astype(
        np.int64
    )


def _mark(
    superseded: npt.NDArray[np.uint8], first: int, offsets: npt.NDArray[np.int64]
) -> None:
    """Set the bits of the offsets. Offsets without a bit are skipped."""
    bits = offsets - first
    bits = bits[(bits >= 0) & (bits < 8 * len(superseded))]
    # at() handles several bits of one byte; a plain |= would keep only the last.
    np.bitwise_or.at(superseded, bits >> 3, (1 << (bits & 7)).astype(np.uint8))


def _decoded(
    data: Buffer, position: int, limit: int, path: Path
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of the plain batches in [position, limit), by name."""
    facts, _, _ = walk(
        data, position, limit, max(1, (limit - position) // HEADER_SIZE), False
    )
    rows = int(np.maximum(facts["record_count"], 0).sum())
    block = np.empty(rows * ROW_SIZE, np.uint8)
    decode_columns(data, position, limit, block, rows, path)
    names = [name for name, _ in COLUMNS]
    return dict(zip(names, _columns(block, rows), strict=True))


def hash_run(
    data: Buffer,
    position: int,
    limit: int,
    coefficients: npt.NDArray[np.uint64],
    hashes: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.int64],
    superseded: npt.NDArray[np.uint8],
    first: int,
    path: Path = None,
) -> int:
    """Decode plain batches to key hashes and offsets, and check each CRC.

    The batches are those in [position, limit). Fills `hashes`, shape (n, 2), and
    `offsets`, int64 of shape (n,), for the records with a key, and sets the bits of the
    others. n is at least the number of records. `superseded` has a bit for each offset
    from `first` on, the lowest bit of a byte first, and is changed in place. Offsets
    without a bit are skipped.

    Returns the number of filled rows, or -1 if a key is longer than the coefficients
    allow. The bits are set in that case too. Errors are those of decode_columns().
    """
    columns = _decoded(data, position, limit, path)
    sizes = columns["key_sizes"]
    has_key = sizes >= 0
    # Compaction removes records without a key.
    _mark(superseded, first, columns["offsets"][~has_key])
    if np.any(sizes > 4 * (len(coefficients) - 2)):
        return -1
    positions = np.ascontiguousarray(columns["key_positions"][has_key])
    taken = len(positions)
    hashes[:taken] = hash_keys(
        data, positions, np.ascontiguousarray(sizes[has_key]), coefficients
    )
    offsets[:taken] = columns["offsets"][has_key]
    return taken


def survey_run(
    data: Buffer,
    position: int,
    limit: int,
    superseded: npt.NDArray[np.uint8],
    first: int,
    keep: npt.NDArray[np.uint8],
    batches: int,
    path: Path = None,
) -> npt.NDArray[np.int64]:
    """Decide which records of plain batches are kept, and check each CRC.

    The batches are those in [position, limit). `superseded` and `first` are the ones
    that hash_run() and map_put() have filled. A record is kept if its bit is not set.
    `keep` is uint8, and is filled with 1 for each kept record. `batches` is the number
    of batches.

    Returns int64 of shape (batches, 3). For each batch: the number of kept records, the
    number of those without a value, and the timestamp of the first kept record (0 if
    there is none).

    Errors are those of decode_columns(), but damage after the offset of a removed
    record need not be detected, because hash_run() has decoded the same bytes.
    """
    columns = _decoded(data, position, limit, path)
    facts, _, _ = walk(data, position, limit, batches, False)
    bits = columns["offsets"] - first
    has_bit = (bits >= 0) & (bits < 8 * len(superseded))
    is_marked = np.zeros(len(bits), bool)
    is_marked[has_bit] = (
        superseded[bits[has_bit] >> 3] >> (bits[has_bit] & 7).astype(np.uint8) & 1
    )
    stays = ~is_marked
    keep[: len(stays)] = stays
    # The number of the batch of each record.
    owner = np.repeat(np.arange(batches), facts["record_count"])
    found = np.zeros((batches, 3), np.int64)
    found[:, 0] = np.bincount(owner[stays], minlength=batches)
    found[:, 1] = np.bincount(
        owner[stays & (columns["value_sizes"] < 0)], minlength=batches
    )
    # The first record of each batch is assigned last.
    rows = np.flatnonzero(stays)[::-1]
    found[owner[rows], 2] = columns["timestamps_ms"][rows]
    return found


def map_put(
    slots: npt.NDArray[np.uint64],
    hashes: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.int64],
    used: int,
    most: int,
    superseded: npt.NDArray[np.uint8],
    first: int,
) -> tuple[int, int]:
    """Store the offset of each key in a hash table with linear probing.

    A later row of the same key replaces an earlier one. `slots` is uint64, shape (n, 3)
    with n < 2^32: hash and offset + 1, all zero if the slot is free. It is changed in
    place. `hashes` has shape (m, 2), `offsets` is int64, shape (m,), contiguous. `used`
    is the number of used slots, at most `most` < n. `superseded` and `first` are those
    of hash_run(); the bit of each offset that a larger one replaces is set.

    Returns (number of rows stored, used). It stops before the first row of a new key
    once `most` slots are used.
    """
    count = len(slots)
    # 1. Near the limit, the order of the rows decides which row is left out, so insert
    #    them one by one.
    if used + len(hashes) > most:
        for row in range(len(hashes)):
            slot = int(_slots_of(hashes[row : row + 1], count)[0])
            while slots[slot, 2] and not (slots[slot, :2] == hashes[row]).all():
                slot = slot + 1 if slot + 1 < count else 0
            if not slots[slot, 2]:
                if used == most:
                    return row, used
                used += 1
            # The slot holds offset + 1, so an equal offset is not marked.
            elif slots[slot, 2] <= offsets[row]:
                _mark(superseded, first, slots[slot : slot + 1, 2].astype(np.int64) - 1)
            slots[slot, :2] = hashes[row]
            slots[slot, 2] = offsets[row] + 1
        return len(hashes), used
    # 2. Of the rows with the same key, store only the newest. lexsort is stable, so the
    #    newest of equal rows is the last.
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    ranked = hashes[order]
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (ranked[1:] != ranked[:-1]).any(axis=1)
    left = order[is_last]
    followed = np.flatnonzero(~is_last)
    ranked_offsets = offsets[order]
    _mark(
        superseded,
        first,
        ranked_offsets[followed][
            ranked_offsets[followed] < ranked_offsets[followed + 1]
        ],
    )
    # For each key, the smallest new offset decides whether the stored one is older.
    is_first = np.ones(len(order), bool)
    is_first[1:] = is_last[:-1]
    earliest = ranked_offsets[is_first]
    # 3. Insert all keys in parallel. Each turn tries one slot for each remaining key.
    at = _slots_of(hashes[left], count)
    while len(left):
        free = slots[at, 2] == 0
        same = (
            ~free
            & (slots[at, 0] == hashes[left, 0])
            & (slots[at, 1] == hashes[left, 1])
        )
        # If several keys choose one slot, the last key gets it.
        slots[at[free], :2] = hashes[left[free]]
        has = same | free & (slots[at, 0] == hashes[left, 0]) & (
            slots[at, 1] == hashes[left, 1]
        )
        before = slots[at[same], 2].astype(np.int64) - 1
        _mark(superseded, first, before[before < earliest[same]])
        slots[at[has], 2] = (offsets[left[has]] + 1).astype(np.uint64)
        used += int((has & free).sum())
        left = left[~has]
        earliest = earliest[~has]
        # The slot has another key: try the next one.
        at = (at[~has] + 1) % count
    return len(hashes), used


def map_move(source: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64]) -> int:
    """Copy all keys of a table to a larger empty one. Returns the number of keys."""
    taken = source[source[:, 2] != 0]
    offsets = taken[:, 2].astype(np.int64) - 1
    none = np.zeros(0, np.uint8)
    _, used = map_put(
        slots, np.ascontiguousarray(taken[:, :2]), offsets, 0, len(slots) - 1, none, 0
    )
    return used


def map_get(
    slots: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Return the offset stored for each key, int64 of shape (m,); -1 if none."""
    found = np.full(len(hashes), -1, np.int64)
    # Rows of the keys that are still searched.
    left = np.arange(len(hashes))
    at = _slots_of(hashes, len(slots))
    while len(left):
        taken = slots[at, 2] != 0
        same = (
            taken
            & (slots[at, 0] == hashes[left, 0])
            & (slots[at, 1] == hashes[left, 1])
        )
        found[left[same]] = slots[at[same], 2].astype(np.int64) - 1
        # A free slot ends the search.
        on = taken & ~same
        left = left[on]
        at = (at[on] + 1) % len(slots)
    return found


#: The action of rewrite_batches() for a batch.
DROP, COPY, FILTER, EMPTY = range(4)


def rewrite_batches(
    data: Buffer,
    positions: npt.NDArray[np.int64],
    actions: npt.NDArray[np.uint8],
    attributes: npt.NDArray[np.int16],
    base_timestamps: npt.NDArray[np.int64],
    keep: npt.NDArray[np.uint8],
    out: npt.NDArray[np.uint8],
) -> npt.NDArray[np.int32]:
    """Write the batches of a plain run as compaction leaves them, one after another.

    Args:
        positions: The positions of the batches, int64 of shape (n,).
        actions: uint8 (n,): DROP; COPY unchanged; FILTER keeps the records with `keep`,
            with timestamps relative to `base_timestamps`; EMPTY keeps the head alone,
            with time -1 and its largest timestamp.
        attributes: int16 (n,), of rewritten batches.
        keep: uint8, for each record of all batches in order.
        out: uint8, with room for all bytes of the batches and 14 more for each record.

    A rewritten batch keeps its offsets, epochs, producer and sequence, and gets a new
    CRC. The batches belong to a run that was decoded: whole, v2, not compressed.
    Returns the size of each batch in `out`.

    Raises:
        InvalidRecordError: The records do not fit.
    """
    view = memoryview(data).cast("B")
    sizes = np.zeros(len(positions), np.int32)
    at = row = 0
    columns = (
        array.tolist() for array in (positions, actions, attributes, base_timestamps)
    )
    for batch, (position, action, attribute, base_timestamp) in enumerate(
        zip(*columns, strict=True)
    ):
        facts = _facts(view, position)
        size = facts.size_bytes
        count = max(0, facts.record_count)
        if action == COPY:
            out[at : at + size] = np.frombuffer(
                view[position : position + size], np.uint8
            )
        elif action != DROP:
            head = list(_HEADER.unpack_from(view, position))
            # Fields of HEADER_FORMAT: 1 is the length, 5 the attributes, 7 and 8 the
            # base and the largest timestamp, 12 the record count.
            head[5] = attribute
            head[7] = base_timestamp
            body = b""
            head[12] = 0
            if action == FILTER:
                body, head[12], newest = _filter(
                    view, position, facts, keep[row : row + count], base_timestamp
                )
                # With LogAppendTime, the largest timestamp is the time of all records,
                # and remains.
                if not attribute & APPEND_TIME_BIT:
                    head[8] = newest
            size = HEADER_SIZE + len(body)
            head[1] = size - LOG_OVERHEAD
            raw = bytearray(_HEADER.pack(*head) + body)
            struct.pack_into(
                ">I", raw, PREFIX_SIZE, crc32c(memoryview(raw)[CRC_START:])
            )
            out[at : at + size] = np.frombuffer(raw, np.uint8)
        sizes[batch] = 0 if action == DROP else size
        at += int(sizes[batch])
        row += count
    return sizes


def _filter(
    view: memoryview,
    position: int,
    facts: _BatchHead,
    keep: npt.NDArray[np.uint8],
    base_timestamp: int,
) -> tuple[bytes, int, int]:
    """Return (kept records, their count, their largest timestamp)."""
    at = position + HEADER_SIZE
    end = position + facts.size_bytes
    append_time = _append_time(facts)
    parts: list[bytes] = []
    newest = -1
    try:
        for kept in keep.tolist():
            length, start = _read_varint(view, at, end, 32)
            at = start + length
            # Each record has at least its attributes.
            if length < 1 or at > end:
                raise _Wrong(BODY_LENGTH)
            if not kept:
                continue
            delta, rest = _read_varint(view, start + 1, at, 64)
            timestamp = (
                _int64(facts.base_timestamp + delta)
                if append_time is None
                else append_time
            )
            newest = max(newest, timestamp)
            record = (
                bytes(view[start : start + 1])
                + _varint(_int64(timestamp - base_timestamp))
                + bytes(view[rest:at])
            )
            parts.append(_varint(len(record)) + record)
    except _Wrong as wrong:
        raise InvalidRecordError(
            BODY_REASONS[wrong.args[0]], position=position
        ) from None
    return b"".join(parts), len(parts), newest
