"""How fast are batches encoded and decoded, without any file?

Method: 20,000 records of 16-byte keys and 100-byte values, in batches of 16 KiB (the
default batch.size), compared with the compiled codec of aiokafka. The plain kernels,
which run if logcore was built without a compiler, are compared with the pure Python codec
of kafka-python. All sides read the same bytes and check every CRC. Results of each side:
- encode: bytes of whole batches. From Python bytes, both take a list of (key, value);
  from columns, logcore takes joined bytes and offsets, for which aiokafka has no form.
- decode to columns: logcore gives numpy arrays of offsets, timestamps, and of positions
  and sizes of keys and values in the borrowed bytes; aiokafka's records are read into
  four lists of offset, timestamp, key and value. These are the forms in which each
  library passes whole batches on. The row "and keys and values as bytes" makes the same
  four lists on both sides.
- decode to records: a list of logcore.Record and a list of aiokafka's record objects.

Not shown: compressed batches (the codecs are the same C libraries on both sides),
headers, and the cost of a disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import common
import numpy as np
from common import NOW_MS, Result, Settings

from logcore.format.columns import RecordColumns, input_columns
from logcore.kernels import kernel, layout, plain
from logcore.kernels.layout import BatchEncoding
from logcore.recordbatch import encode, read_batches

BATCH_BYTES: Final = 16_384
#: Number of records with 16-byte keys and 100-byte values in such a batch.
BATCH_ROWS: Final = 127
MAX_BYTES: Final = 1_048_588
ENCODING = BatchEncoding(BATCH_BYTES, MAX_BYTES)
Rows = list[tuple[bytes, bytes]]


def run(settings: Settings) -> Iterator[Result]:
    rows = common.make_rows(2_000 if settings.quick else 20_000)
    aiokafka = common.peer(
        "aiokafka.record.default_records", "encode and decode beside aiokafka"
    )
    if aiokafka is not None:
        if aiokafka.DefaultRecordBatch is aiokafka._DefaultRecordBatchPy:
            print(
                "note: this aiokafka has no compiled codec; its rows show the pure Python one"
            )
        yield from beside_aiokafka(settings, rows, aiokafka)
    kafka = common.peer(
        "kafka.record.default_records", "the plain kernels beside kafka-python"
    )
    if kafka is not None:
        yield from beside_kafka_python(settings, rows, kafka)


def beside_aiokafka(
    settings: Settings, rows: Rows, aiokafka: ModuleType
) -> Iterator[Result]:
    from aiokafka.record.memory_records import MemoryRecords

    name = "aiokafka"
    count = len(rows)
    out = bytearray()
    size = encode_records(kernel, rows, out)
    data = bytes(out[:size])

    def their_encode() -> None:
        foreign_encode(aiokafka.DefaultRecordBatchBuilder, rows)

    def their_columns() -> None:
        offsets: list[int] = []
        times: list[int] = []
        keys: list[bytes] = []
        values: list[bytes] = []
        add_offset = offsets.append
        add_time = times.append
        add_key = keys.append
        add_value = values.append
        records = MemoryRecords(data)
        while (batch := records.next_batch()) is not None:
            if not batch.validate_crc():
                raise AssertionError("the CRC does not match")
            for record in batch:
                add_offset(record.offset)
                add_time(record.timestamp)
                add_key(record.key)
                add_value(record.value)

    def their_records() -> list[Any]:
        found: list[Any] = []
        records = MemoryRecords(data)
        while (batch := records.next_batch()) is not None:
            if not batch.validate_crc():
                raise AssertionError("the CRC does not match")
            found += batch
        return found

    def our_lists() -> tuple[object, ...]:
        columns = decode_columns(data)
        return (
            columns.offsets.tolist(),
            columns.timestamps_ms.tolist(),
            columns.keys(),
            columns.values(),
        )

    columns = input_columns("a benchmark", *common.columns_of(rows), None)

    def our_columns_encode() -> object:
        return kernel.encode_columns(out, columns, 0, 0, NOW_MS, ENCODING)

    theirs = [
        (record.offset, record.timestamp, record.key, record.value)
        for record in their_records()
    ]
    assert theirs == [
        tuple(record)[:4] for record in kernel.decode_objects(data, 0, len(data))
    ], "both decode alike"
    assert [(key, value) for _, _, key, value in theirs] == rows, (
        "the decoded records equal the encoded records"
    )

    yield common.speed(
        "encode from Python bytes", count, lambda: encode_records(kernel, rows, out), {name: their_encode}, settings,
        target=6, method="A list of (key, value) to 16 KiB batches; the peer: builder.append of each, then build().",
    )  # fmt: skip
    parts = [rows[at : at + BATCH_ROWS] for at in range(0, count, BATCH_ROWS)]
    yield common.speed(
        "encode one batch a call", count, lambda: [encode(part, now_ms=NOW_MS) for part in parts],
        {name: their_encode}, settings, target=6,
        method="recordbatch.encode of lists of (key, value) that make 16 KiB batches; the peer as in the row before.",
    )  # fmt: skip
    yield common.speed(
        "encode from columns", count, our_columns_encode, {name: their_encode}, settings, target=12,
        method="Joined bytes and offsets to 16 KiB batches; the peer as before.",
    )  # fmt: skip
    yield common.speed(
        "decode to columns", count, lambda: decode_columns(data), {name: their_columns}, settings, target=15,
        method="CRCs checked; numpy arrays over the borrowed bytes; the peer: lists of offset, timestamp, key, value.",
    )  # fmt: skip
    yield common.speed(
        "decode to columns, batch by batch", count, lambda: [batch.columns() for batch in read_batches(data)],
        {name: their_columns}, settings, method="RecordBatch.columns of each 16 KiB batch; the peer as before.",
    )  # fmt: skip
    yield common.speed(
        "decode to columns, and keys and values as bytes", count, our_lists, {name: their_columns}, settings,
        method="The same four Python lists on both sides.",
    )  # fmt: skip
    yield common.speed(
        "decode to records", count, lambda: kernel.decode_objects(data, 0, len(data)), {name: their_records}, settings,
        target=2, method="CRCs checked; a list of Record; the peer: a list of its record objects.",
    )  # fmt: skip


def beside_kafka_python(
    settings: Settings, rows: Rows, kafka: ModuleType
) -> Iterator[Result]:
    name = "kafka-python"
    count = len(rows)
    out = bytearray()
    size = encode_records(plain, rows, out)
    data = bytes(out[:size])
    batches = [bytes(batch.data) for batch in read_batches(data)]

    def their_records() -> list[Any]:
        found: list[Any] = []
        for raw in batches:
            batch = kafka.DefaultRecordBatch(raw)
            if not batch.validate_crc():
                raise AssertionError("the CRC does not match")
            found += batch
        return found

    assert [(record.key, record.value) for record in their_records()] == rows, (
        "both decode alike"
    )
    yield common.speed(
        "plain kernels: encode", count, lambda: encode_records(plain, rows, out),
        {name: lambda: foreign_encode(kafka.DefaultRecordBatchBuilder, rows)}, settings, target=3,
        method="A list of (key, value) to 16 KiB batches, in pure Python and numpy.",
    )  # fmt: skip
    yield common.speed(
        "plain kernels: decode", count, lambda: plain.decode_objects(data, 0, len(data)), {name: their_records},
        settings, target=3, method="CRCs checked; a list of records on both sides.",
    )  # fmt: skip


def encode_records(kernels: Any, rows: Rows, out: bytearray) -> int:
    """Encode batches into out; return the number of used bytes."""
    size: int
    size, _ = kernels.encode_records(out, rows, 0, 0, NOW_MS, ENCODING)
    return size


def decode_columns(data: bytes) -> RecordColumns:
    """Decode bytes in the way in which Log.scan decodes a segment."""
    size, rows, _ = kernel.plan_run(data, 0, len(data), 1 << 30, 1 << 30, 1 << 62)
    assert size == len(data), "all of it are plain batches"
    block = np.empty(rows * layout.ROW_SIZE, np.uint8)
    kernel.decode_columns(data, 0, size, block, rows, None)
    return RecordColumns.from_block(memoryview(data), block, rows)


def foreign_encode(builder: Any, rows: Rows) -> list[bytes]:
    """Encode with the builder of either client; each full batch needs a new builder."""
    batches = []
    batch = builder(2, 0, False, -1, -1, -1, BATCH_BYTES)
    append = batch.append
    offset = 0
    for key, value in rows:
        if append(offset, NOW_MS, key, value, []) is None:
            batches.append(batch.build())
            batch = builder(2, 0, False, -1, -1, -1, BATCH_BYTES)
            append = batch.append
            offset = 0
            append(offset, NOW_MS, key, value, [])
        offset += 1
    batches.append(batch.build())
    return batches
