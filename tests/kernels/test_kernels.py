"""Tests that the compiled kernels equal the plain kernels, and that both agree with the
codecs of other clients.

The plain module is the specification. With the same arguments, for valid, changed and
truncated batches, each function of both modules must return the same result or raise
the same error.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AiokafkaBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder
from hypothesis import example, given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch as KafkaPythonBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder

import logcore
from logcore.errors import (
    InvalidRecordError,
    InvalidTimestampError,
    LogcoreError,
    RecordTooLargeError,
)
from logcore.kernels import layout, plain
from logcore.kernels.checksum import crc32c
from support.kernels import KERNELS, compiled, needs_compiler
from support.partitions import reference_murmur2
from support.vectors import EXPECTED, VECTORS

T0 = 1_700_000_000_000

maybe_bytes = st.none() | st.binary(max_size=40)
header = st.tuples(st.text(max_size=8), maybe_bytes)
timestamps = (
    st.none() | st.just(-1) | st.integers(0, 2**62) | st.integers(T0 - 100, T0 + 100)
)
record = st.tuples(
    maybe_bytes, maybe_bytes, st.lists(header, max_size=3).map(tuple), timestamps
)
records = st.lists(record, max_size=40)


def encode(
    kernel: Any,
    rows: Any,
    *,
    base_offset: int = 0,
    batch_bytes: int = 1 << 20,
    **fields: Any,
) -> bytes:
    buffer = bytearray()
    encoding = layout.BatchEncoding(batch_bytes, 1 << 30, **fields)
    size, _ = kernel.encode_records(buffer, rows, base_offset, 0, T0, encoding)
    return bytes(buffer[:size])


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call for comparison, or the type and text of its error."""
    try:
        result = call()
    except LogcoreError as error:
        return type(error).__name__, str(error), error.position
    if isinstance(result, tuple):
        return tuple(
            value.tolist() if isinstance(value, np.ndarray) else value
            for value in result
        )
    if isinstance(result, list):
        return [
            number if isinstance(number, int) else tuple(number) for number in result
        ]
    if type(result).__name__ == "Record":
        return tuple(result)
    return result


def columns_of(kernel: Any, data: bytes, rows: int) -> Any:
    block = np.zeros(max(rows, 0) * layout.ROW_SIZE, np.uint8)
    return kernel.decode_columns(
        data, 0, len(data), block, max(rows, 0), "f"
    ), block.tolist()


def all_results(kernel: Any, data: bytes) -> list[Any]:
    """Return the results of all kernel functions that read, for some bytes."""
    size = len(data)
    end, rows, _ = kernel.plan_run(data, 0, size, 1 << 20, 1 << 20, 2**62)
    return [
        outcome(lambda: kernel.walk(data, 0, size, 100, False)),
        outcome(lambda: kernel.walk(data, 0, size, 100, True)),
        outcome(lambda: kernel.find_batch(data, 0, size, 7)),
        (end, rows),
        outcome(lambda: kernel.plan_run(data, 0, size, 3, 100, 9)),
        outcome(lambda: kernel.plan_run(data, 0, size, 1 << 20, 1 << 20, 2**62, 3)),
        outcome(
            lambda: kernel.plan_run(data, 0, size, 1 << 20, 1 << 20, 2**62, 0, True)
        ),
        outcome(lambda: columns_of(kernel, data[:end], rows)),
        outcome(lambda: kernel.decode_objects(data, 0, size, "f")),
        outcome(lambda: kernel.decode_topic_records(data, 0, size, "t", 3, "f")),
        *(
            outcome(
                lambda offset=offset, arguments=arguments: kernel.read_one(
                    data, 0, size, offset, "f", *arguments
                )
            )
            for offset in (0, 3, 11, 30)
            for arguments in ((), (31,), (31, True), (2**62,))
        ),
        outcome(
            lambda: kernel.decode_body_objects(
                data[61:], min(5, len(data)), 3, T0, None, "f", 9
            )
        ),
    ]


@needs_compiler
@given(records, st.sampled_from([1, 200, 1 << 20]), st.integers(0, 2**40))
def test_both_kernels_write_the_same_bytes(
    rows: Any, batch_bytes: int, base_offset: int
) -> None:
    assert encode(
        plain, rows, base_offset=base_offset, batch_bytes=batch_bytes
    ) == encode(compiled, rows, base_offset=base_offset, batch_bytes=batch_bytes)


@needs_compiler
@given(records, st.sampled_from([1, 200, 1 << 20]))
def test_both_kernels_decode_valid_batches_equally(rows: Any, batch_bytes: int) -> None:
    data = encode(plain, rows, batch_bytes=batch_bytes)
    assert all_results(plain, data) == all_results(compiled, data)


@needs_compiler
@given(records, st.data())
def test_both_kernels_report_damaged_batches_equally(
    rows: Any, choices: st.DataObject
) -> None:
    data = bytearray(encode(plain, rows, batch_bytes=300))
    if data:
        position = choices.draw(st.integers(0, len(data) - 1))
        data[position] ^= 1 << choices.draw(st.integers(0, 7))
        data = data[: choices.draw(st.integers(0, len(data)))]
    assert all_results(plain, bytes(data)) == all_results(compiled, bytes(data))


@needs_compiler
@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=20), st.data())
def test_both_kernels_decode_bodies_with_a_changed_byte_equally(
    values: list[bytes], choices: st.DataObject
) -> None:
    """This test skips the CRC check, which would detect the change before the records
    are decoded.
    """
    body = bytearray(
        encode(plain, [(b"k", value, (("h", b"1"),)) for value in values])[
            layout.HEADER_SIZE :
        ]
    )
    for _ in range(choices.draw(st.integers(0, 3))):
        body[choices.draw(st.integers(0, len(body) - 1))] = choices.draw(
            st.integers(0, 255)
        )
    body = body[: choices.draw(st.integers(0, len(body)))]
    count = choices.draw(st.integers(-1, len(values) + 2))

    def columns(kernel: Any, strict: bool) -> Any:
        block = np.zeros(max(count, 0) * layout.ROW_SIZE, np.uint8)
        kernel.decode_body_columns(
            bytes(body), count, 5, T0, None, block, "f", 3, strict
        )
        return block.tolist()

    for strict in (False, True):
        assert outcome(functools.partial(columns, plain, strict)) == outcome(
            functools.partial(columns, compiled, strict)
        )
    assert outcome(
        lambda: plain.decode_body_objects(bytes(body), count, 5, T0, 9, "f", 3)
    ) == outcome(
        lambda: compiled.decode_body_objects(bytes(body), count, 5, T0, 9, "f", 3)
    )


def with_crc(batch: bytearray) -> bytes:
    """Return the batch with the CRC of its damaged content, like a faulty producer."""
    batch[17:21] = crc32c(bytes(batch[layout.CRC_START :])).to_bytes(4, "big")
    return bytes(batch)


@needs_compiler
@given(records.filter(len), st.integers(-1, 45), st.integers(0, 2**40), st.data())
def test_both_kernels_find_the_same_record_in_a_damaged_batch(
    rows: Any, relative_offset: int, base_offset: int, choices: st.DataObject
) -> None:
    """If the header declares dense offsets, a search skips records by their lengths.
    The declaration and the lengths may be wrong.
    """
    batch = bytearray(encode(plain, rows, base_offset=base_offset))
    for _ in range(choices.draw(st.integers(0, 3))):
        position = choices.draw(st.integers(layout.CRC_START, len(batch) - 1))
        batch[position] = choices.draw(
            st.sampled_from(
                [0, 1, 2, 4, 8, batch[position] ^ 2, batch[position] ^ 0x80]
            )
        )
    data = with_crc(batch)
    offset = base_offset + relative_offset
    end = 2**62
    assert outcome(
        lambda: plain.read_one(data, 0, len(data), offset, "f", end)
    ) == outcome(lambda: compiled.read_one(data, 0, len(data), offset, "f", end))
    assert all_results(plain, data) == all_results(compiled, data)


@pytest.mark.parametrize("kernel", KERNELS)
@given(records.filter(len), st.sampled_from([1, 200, 1 << 20]))
def test_each_record_is_found_by_its_offset(
    kernel: Any, rows: Any, batch_bytes: int
) -> None:
    data = encode(plain, rows, base_offset=1000, batch_bytes=batch_bytes)
    headers, _, _ = plain.walk(data, 0, len(data), 100, False)
    index = b"".join(
        int(header["last_offset"] - 1000).to_bytes(4, "big")
        + int(header["position"]).to_bytes(4, "big")
        for header in headers
    )
    size = len(data)
    end = 1000 + len(rows)
    for record in plain.decode_objects(data, 0, size):
        assert tuple(
            kernel.read_one(data, 0, size, record.offset, "f", end, True)
        ) == tuple(record)
        indexed_record = kernel.get_one(
            index, len(headers), data, size, 1000, record.offset, "f", end, True
        )
        assert tuple(indexed_record) == tuple(record)
        assert tuple(
            kernel.read_one(data, 0, size, record.offset, "f", end + 1)
        ) == tuple(record), "a gap follows"
    last = int(headers["position"][-1])
    for arguments in ((), (-1, True), (end - 1,), (end + 1, True)):
        assert (
            kernel.get_one(
                index, len(headers), data, size, 1000, end - 1, "f", *arguments
            )
            == last
        ), "the next batch does not confirm the offset"
    assert (
        kernel.get_one(index, len(headers), data, size, 1000, end, "f", end, True)
        == size
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dense", [True, False])
def test_offset_is_compared_with_the_next_batch(kernel: Any, dense: bool) -> None:
    """No CRC covers the offset in the head of a batch. After a bit of the offset
    flipped, a search for offsets of other batches would return records of this batch.
    """
    batches = [
        encode(plain, [(None, b"%d" % index)] * 8, base_offset=1000 + 8 * index)
        for index in range(4)
    ]
    sizes = [len(batch) for batch in batches]
    for index, bit in itertools.product(range(4), range(64)):
        data = bytearray(b"".join(batches))
        data[sum(sizes[:index]) + 7 - bit // 8] ^= 1 << bit % 8
        for offset in range(1000, 1032):
            record = kernel.read_one(
                bytes(data), 0, len(data), offset, "f", 1032, dense
            )
            if (
                not isinstance(record, int)
                and record.offset == offset
                and (dense or index < 3)
            ):
                assert record.value == b"%d" % ((offset - 1000) // 8), (
                    index,
                    bit,
                    offset,
                )


invalid_values = st.sampled_from(
    ["text", 7, bytearray(b"b"), memoryview(b"m"), 1.5, True, 2**63, -2, (), b"x" * 400]
)


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    st.tuples(
        maybe_bytes | invalid_values,
        maybe_bytes | invalid_values,
        st.none() | st.lists(header, max_size=2) | st.tuples(header) | invalid_values,
        timestamps | invalid_values,
    ),
    st.integers(60, 400),
    st.sampled_from([0, layout.APPEND_TIME_BIT]),
    st.sampled_from([None, bytes, lambda data: bytes(data)[:20]]),
    st.booleans(),
)
def test_one_record_is_encoded_as_a_batch_of_one(
    kernel: Any,
    row: Any,
    max_bytes: int,
    attributes: int,
    compress: Any,
    requires_key: bool,
) -> None:
    encoding = layout.BatchEncoding(300, max_bytes, attributes, compress, requires_key)

    def encode_as_list() -> Any:
        buffer = bytearray()
        size, batches = plain.encode_records(buffer, [row], 2**40, 3, T0, encoding)
        return bytes(buffer[:size]), batches[0][3]

    def encode_alone() -> Any:
        return kernel.encode_one(row, 2**40, 3, T0, encoding)

    assert outcome(encode_alone) == outcome(encode_as_list)


mixed_rows = (
    st.tuples(st.binary(max_size=300), st.binary(max_size=9))
    | st.tuples(st.none(), st.binary(max_size=9))
    | record
)


@needs_compiler
@given(
    st.lists(mixed_rows, max_size=60),
    st.sampled_from([1, 200, 400, 1000, 2**31 - 1, 2**62]),
    st.sampled_from([250, 600, 1 << 30]),
    st.sampled_from([None, lambda data: bytes(data)[:60]]),
    st.integers(0, 300),
)
def test_rows_of_all_kinds_are_split_into_the_same_batches(
    rows: Any, batch_bytes: int, max_bytes: int, compress: Any, buffer_size: int
) -> None:
    """The fast path for plain rows and the general path alternate inside one batch, and the
    buffer grows between them.
    """

    def encode_rows(kernel: Any) -> Any:
        buffer = bytearray(buffer_size)
        encoding = layout.BatchEncoding(
            batch_bytes, max_bytes, 0, compress, False, 1, 2, 3
        )
        size, batches = kernel.encode_records(buffer, rows, 7, 0, T0, encoding)
        return bytes(buffer[:size]), tuple(batches)

    assert outcome(lambda: encode_rows(plain)) == outcome(lambda: encode_rows(compiled))


@needs_compiler
@given(
    st.lists(
        st.tuples(maybe_bytes, st.binary(max_size=300), st.integers(-2, 3)),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([1, 200, 400, 1000, 2**31 - 1, 2**62]),
    st.sampled_from([150, 600, 1 << 30]),
    st.integers(0, 7),
    st.integers(0, 300),
)
def test_columns_of_all_kinds_are_split_into_the_same_batches(
    rows: Any, batch_bytes: int, max_bytes: int, column_bits: int, buffer_size: int
) -> None:
    def column(cells: list[bytes | None], with_nulls: bool) -> Any:
        data = np.frombuffer(
            b"--" + b"".join(cell or b"" for cell in cells) + b"-", np.uint8
        )
        offsets = np.cumsum([2, *(len(cell or b"") for cell in cells)], dtype=np.int64)
        nulls = np.array([cell is None for cell in cells], np.uint8)
        return data, offsets, nulls if with_nulls else None

    keys = column([key for key, _, _ in rows], True) if column_bits & 1 else None
    values = column([value for _, value, _ in rows], bool(column_bits & 2))
    keys = (
        column([value[:9] for _, value, _ in rows], False) if column_bits & 2 else keys
    )
    times = (
        np.array([T0 if time > -2 else time for _, _, time in rows], np.int64)
        if column_bits & 4
        else None
    )

    def encode_columns(kernel: Any) -> Any:
        buffer = bytearray(buffer_size)
        columns = layout.InputColumns(keys, values, times, len(rows))
        encoding = layout.BatchEncoding(batch_bytes, max_bytes, 0, None, False, 1, 2, 3)
        size, batches = kernel.encode_columns(buffer, columns, 7, 0, T0, encoding)
        return bytes(buffer[:size]), tuple(batches)

    assert outcome(lambda: encode_columns(plain)) == outcome(
        lambda: encode_columns(compiled)
    )


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.none() | st.binary(max_size=300), max_size=20), st.integers(0, 5000))
def test_bytes_list_copies_slices_and_refuses_slices_outside(
    kernel: Any, cells: list[bytes | None], gap: int
) -> None:
    data = b"".join(b"-" * gap + (cell or b"") for cell in cells)
    sizes = np.array([-1 if cell is None else len(cell) for cell in cells], np.int32)
    positions = np.cumsum([gap, *(gap + len(cell or b"") for cell in cells)])[
        :-1
    ].astype(np.int32)
    assert kernel.bytes_list(memoryview(data), positions, sizes) == cells
    if cells:
        for outside in (positions + len(data) + 1, positions - len(data) - 301):
            with pytest.raises(ValueError, match="outside"):
                kernel.bytes_list(data, outside.astype(np.int32), np.maximum(sizes, 1))
        with pytest.raises(ValueError, match="length"):
            kernel.bytes_list(data, positions[1:], sizes)


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.tuples(maybe_bytes, maybe_bytes), max_size=30), st.booleans())
def test_columns_are_encoded_like_the_same_records(
    kernel: Any, rows: Any, with_times: bool
) -> None:
    def column(cells: list[bytes | None]) -> Any:
        nulls = np.array([cell is None for cell in cells], np.uint8)
        data = np.frombuffer(b"".join(cell or b"" for cell in cells), np.uint8)
        offsets = np.concatenate(
            [[0], np.cumsum([len(cell or b"") for cell in cells])]
        ).astype(np.int64)
        return data, offsets, nulls if nulls.any() else None

    times = np.arange(len(rows), dtype=np.int64) * 1000 + T0 if with_times else None
    buffer = bytearray()
    keys = column([key for key, _ in rows])
    values = column([value for _, value in rows])
    columns = layout.InputColumns(keys, values, times, len(rows))
    encoding = layout.BatchEncoding(300, 1 << 30)
    size, _ = kernel.encode_columns(buffer, columns, 5, 0, T0, encoding)
    timed_rows = [
        (*row, (), T0 + 1000 * index if with_times else None)
        for index, row in enumerate(rows)
    ]
    assert bytes(buffer[:size]) == encode(
        plain, timed_rows, base_offset=5, batch_bytes=300
    )


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    st.lists(
        st.tuples(
            maybe_bytes,
            maybe_bytes,
            st.lists(header, max_size=2),
            st.integers(0, 2**61),
        ),
        min_size=1,
    )
)
def test_aiokafka_and_kafka_python_read_written_batches(kernel: Any, rows: Any) -> None:
    data = encode(
        kernel,
        [(key, value, tuple(headers), time) for key, value, headers, time in rows],
    )
    for batch in (AiokafkaBatch(data), KafkaPythonBatch(data)):
        assert batch.validate_crc()
        records = [
            (
                record.offset,
                record.timestamp,
                record.key,
                record.value,
                [tuple(header) for header in record.headers],
            )
            for record in batch
        ]
        assert records == [
            (index, time, key, value, headers)
            for index, (key, value, headers, time) in enumerate(rows)
        ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("builder", [AiokafkaBuilder, KafkaPythonBuilder])
@given(
    rows=st.lists(
        st.tuples(
            maybe_bytes,
            maybe_bytes,
            st.lists(header, max_size=2),
            st.integers(0, 2**61),
        ),
        min_size=1,
    )
)
def test_batches_of_aiokafka_and_kafka_python_are_read(
    kernel: Any, builder: Any, rows: Any
) -> None:
    writer = builder(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    for index, (key, value, headers, time) in enumerate(rows):
        assert writer.append(
            index, timestamp=time, key=key, value=value, headers=headers
        )
    data = bytes(writer.build())
    records = [tuple(record) for record in kernel.decode_objects(data, 0, len(data))]
    assert records == [
        (index, time, key, value, tuple(headers))
        for index, (key, value, headers, time) in enumerate(rows)
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "name", [name for name in EXPECTED if name.startswith("v2-none")]
)
def test_columns_and_objects_of_the_vectors_agree(kernel: Any, name: str) -> None:
    data = (VECTORS / "records" / name).read_bytes()
    end, rows, _ = kernel.plan_run(data, 0, len(data), 1 << 20, 1 << 20, 2**62)
    assert (end, rows) == (len(data), EXPECTED[name]["record_count"])
    block = np.empty(rows * layout.ROW_SIZE, np.uint8)
    assert kernel.decode_columns(data, 0, end, block, rows) == rows
    objects = kernel.decode_objects(data, 0, end)
    assert block[: 8 * rows].view(np.int64).tolist() == [
        record.offset for record in objects
    ]
    assert block[8 * rows : 16 * rows].view(np.int64).tolist() == [
        record.timestamp_ms for record in objects
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([("text", b"v")], InvalidRecordError),
        ([(b"k", "text")], InvalidRecordError),
        ([(b"k",)], InvalidRecordError),
        ([(b"k", b"v", (), 1, 2)], InvalidRecordError),
        ([7], InvalidRecordError),
        ([(b"k", b"v", (("h",),))], InvalidRecordError),
        ([(b"k", b"v", ((b"h", b"1"),))], InvalidRecordError),
        ([(b"k", b"v", (("h", "1"),))], InvalidRecordError),
        ([(b"k", b"v", (), -2)], InvalidTimestampError),
        ([(b"k", b"v", (), "now")], InvalidTimestampError),
        ([(b"k", b"v", (), 2**63)], InvalidTimestampError),
        ([(b"k", bytes(2000))], RecordTooLargeError),
    ],
)
def test_error_contains_the_number_of_the_invalid_record(
    kernel: Any, rows: Any, error: type[LogcoreError]
) -> None:
    with pytest.raises(error, match=r"record 1"):
        kernel.encode_records(
            bytearray(),
            [(b"fine", b"fine"), *rows],
            0,
            0,
            T0,
            layout.BatchEncoding(1 << 20, 1000),
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_sequence_wraps_between_batches(kernel: Any) -> None:
    data = encode(
        kernel,
        [(b"k", b"v")] * 3,
        batch_bytes=1,
        producer_id=1,
        producer_epoch=0,
        base_sequence=2**31 - 2,
    )
    headers, _, reason = kernel.walk(data, 0, len(data), 10, True)
    assert headers["base_sequence"].tolist() == [2**31 - 2, 2**31 - 1, 0]
    assert reason == layout.WALK_END


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.integers(0, 1000), unique=True, max_size=30), st.integers(-5, 1005))
def test_index_search_finds_the_last_entry_at_or_below(
    kernel: Any, offsets: list[int], target: int
) -> None:
    offsets.sort()
    index = b"".join(offset.to_bytes(4, "big") + b"\0\0\0\0" for offset in offsets)
    expected = sum(offset <= target for offset in offsets) - 1
    assert kernel.search_offsets(index, len(offsets), target) == expected


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.none() | st.binary(max_size=300), max_size=20))
def test_gather_copies_slices_in_order(kernel: Any, cells: list[bytes | None]) -> None:
    data = b"".join(b"-" + (cell or b"") for cell in cells)
    sizes = np.array([-1 if cell is None else len(cell) for cell in cells], np.int32)
    steps = (
        np.cumsum([0] + [1 + len(cell or b"") for cell in cells[:-1]]) if cells else []
    )
    positions = (np.array(steps) + 1).astype(np.int32)
    offsets, gathered = kernel.gather(data, positions, sizes)
    assert gathered.tobytes() == b"".join(cell or b"" for cell in cells)
    assert offsets.tolist() == np.cumsum([0, *np.maximum(sizes, 0)]).tolist()
    if len(cells):
        with pytest.raises(ValueError, match="outside"):
            kernel.gather(data, positions + len(data), np.maximum(sizes, 1))


@given(st.binary(max_size=70))
def test_all_kernels_hash_keys_like_kafka(key: bytes) -> None:
    for kernel in KERNELS:
        assert kernel.murmur2(key) == reference_murmur2(key)


def test_record_behaves_like_a_named_tuple() -> None:
    record_types = (
        [layout.Record] if compiled is None else [layout.Record, compiled.Record]
    )
    for record_type in record_types:
        row = record_type(3, T0, b"k", None, (("h", b"1"),))
        offset, timestamp_ms, key, value, headers = row
        assert (offset, timestamp_ms, key, value, headers) == row
        assert row == (3, T0, b"k", None, (("h", b"1"),))
        assert row != record_type(4, T0, b"k", None)
        assert hash(row) == hash(record_type(*row))
        assert eval(repr(row), {"Record": record_type}) == row
        assert row._replace(offset=9).offset == 9
        assert row._asdict()["key"] == b"k"
        with pytest.raises(AttributeError):
            row.offset = 5  # type: ignore[misc]
        plain = tuple(row)
        assert hash(row) == hash(plain)
        changed = record_type(4, T0, b"k", None)
        assert row < changed
        assert row <= row
        assert changed > plain
        assert not row >= changed
        assert sorted([changed, row]) == [row, changed]
        extra = (1,)
        assert row + extra == (*plain, 1)
        assert extra + row == (1, *plain)
        assert row.index(b"k") == 2
        assert row.count(None) == 1
        with pytest.raises(TypeError):
            _ = row < 3


def test_topic_record_behaves_like_a_named_tuple() -> None:
    record_types = (
        [layout.TopicRecord]
        if compiled is None
        else [layout.TopicRecord, compiled.TopicRecord]
    )
    records = [
        layout.Record(3, T0, b"k", None, (("h", b"1"),)),
        layout.Record(4, T0, None, b"v"),
    ]
    for kernel, record_type in zip(KERNELS, record_types, strict=True):
        kernel_records = [kernel.Record(*record) for record in records]
        topic_records = kernel.to_topic_records("t", 1, kernel_records)
        assert [type(topic_record) for topic_record in topic_records] == [
            record_type,
            record_type,
        ]
        assert [tuple(topic_record) for topic_record in topic_records] == [
            ("t", 1, *record) for record in records
        ]
        assert kernel.to_topic_record("t", 1, kernel_records[0]) == topic_records[0]
        first = topic_records[0]
        topic, partition, offset, timestamp_ms, key, value, headers = first
        assert (topic, partition, offset, timestamp_ms, key, value, headers) == first
        assert hash(first) == hash(tuple(first)) == hash(record_type(*first))
        assert eval(repr(first), {"TopicRecord": record_type}) == first
        assert first._replace(value={"a": 1}).value == {"a": 1}
        assert first._asdict()["topic"] == "t"
        with pytest.raises(AttributeError):
            first.offset = 5
        assert (
            first < topic_records[1]
            and first <= first
            and topic_records[1] > tuple(first)
            and not first >= topic_records[1]
        )
        assert (*first, 1) == first + (1,) and (1,) + first == (1, *first)  # noqa: RUF005
        assert (first.index("t"), first.count(None), len(first), first[-1]) == (
            0,
            1,
            7,
            (("h", b"1"),),
        )
        assert type(pickle.loads(pickle.dumps(first))) is logcore.TopicRecord
        assert copy.copy(first) == first
        match first:
            case record_type(topic="t", offset=found):
                assert found == 3
            case _:
                raise AssertionError("no match")
        with pytest.raises(TypeError):
            kernel.to_topic_record("t", 1, None)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_record_is_read_by_both_kernels(protocol: int) -> None:
    """A process with compiled kernels may send records to a process without them."""
    record_types = (
        [layout.Record] if compiled is None else [layout.Record, compiled.Record]
    )
    for record_type in record_types:
        row = record_type(3, T0, b"k", None, (("h", b"1"),))
        packed = pickle.dumps(row, protocol)
        assert b"_compiled" not in packed
        assert type(pickle.loads(packed)) is logcore.Record
        assert pickle.loads(packed) == row
        assert copy.copy(row) == row


#: Functions that need C, for the handler of SIGBUS. logcore.fs also works without them.
COMPILED_ONLY = {"guard_mapping", "release_mapping", "touch", "unreadable_pages"}


@needs_compiler
def test_both_kernels_have_the_same_functions() -> None:
    public = {
        name
        for name in vars(plain)
        if callable(getattr(plain, name))
        and getattr(plain, name).__module__ == plain.__name__
    }
    public = {name for name in public if not name.startswith("_")}
    assert public | COMPILED_ONLY == {
        name
        for name in vars(compiled)
        if not name.startswith("_")
        and type(getattr(compiled, name)).__name__
        in ("builtin_function_or_method", "cython_function_or_method")
    }


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [2**31 - 1, 2**31 - 12, 2**31 - 13])
def test_length_whose_size_needs_33_bits_ends_the_walk(
    kernel: Any, length: int
) -> None:
    """The size wrapped to a negative number, so that the walk continued before the
    buffer.
    """
    data = bytes(8) + length.to_bytes(4, "big") + bytes(4) + b"\2" + bytes(60)
    _, position, reason = kernel.walk(data, 0, len(data), 9, False)
    assert (position, reason) == (
        0,
        layout.WALK_LENGTH if length > 2**31 - 13 else layout.WALK_SHORT,
    )


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(-1, 3)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 4),
)
@example([(2, 0, 0), (2, 1, 2), (2, 4, 0)], 0)
@example([(2, 0, 0), (2, 2, 0)], 0)
def test_both_kernels_decide_whether_batches_are_consecutive(
    kernel: Any, batches: list[tuple[int, int, int]], first_offset: int
) -> None:
    headers = np.zeros(len(batches), layout.BATCH_FACTS)
    is_expected = True
    next_offset = first_offset
    for row, (magic, base, delta) in enumerate(batches):
        headers[row]["magic"] = magic
        headers[row]["base_offset"] = base
        headers[row]["last_offset"] = base + delta
        is_expected &= magic == 2 and base == next_offset and delta >= 0
        next_offset = base + delta + 1
    assert kernel.are_consecutive(headers, first_offset) == is_expected
