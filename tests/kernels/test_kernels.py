"""Tests that the compiled kernels equal the plain kernels, and that both agree with the
codecs of other clients.

The plain module is the specification. Every function gets the same arguments in both
modules, for valid, changed and truncated batches, and must return the same result or
raise the same error.
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
    out = bytearray()
    encoding = layout.BatchEncoding(batch_bytes, 1 << 30, **fields)
    size, _ = kernel.encode_records(out, rows, base_offset, 0, T0, encoding)
    return bytes(out[:size])


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call for comparison, or the type and text of its error."""
    try:
        result = call()
    except LogcoreError as error:
        return type(error).__name__, str(error), error.position
    if isinstance(result, tuple):
        return tuple(
            part.tolist() if isinstance(part, np.ndarray) else part for part in result
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


def everything(kernel: Any, data: bytes) -> list[Any]:
    """Return the results of every reading kernel for some bytes."""
    size = len(data)
    stop, rows, _ = kernel.plan_run(data, 0, size, 1 << 20, 1 << 20, 2**62)
    return [
        outcome(lambda: kernel.walk(data, 0, size, 100, False)),
        outcome(lambda: kernel.walk(data, 0, size, 100, True)),
        outcome(lambda: kernel.find_batch(data, 0, size, 7)),
        (stop, rows),
        outcome(lambda: kernel.plan_run(data, 0, size, 3, 100, 9)),
        outcome(lambda: kernel.plan_run(data, 0, size, 1 << 20, 1 << 20, 2**62, 3)),
        outcome(
            lambda: kernel.plan_run(data, 0, size, 1 << 20, 1 << 20, 2**62, 0, True)
        ),
        outcome(lambda: columns_of(kernel, data[:stop], rows)),
        outcome(lambda: kernel.decode_objects(data, 0, size, "f")),
        outcome(lambda: kernel.decode_topic_records(data, 0, size, "t", 3, "f")),
        *(
            outcome(
                lambda offset=offset, more=more: kernel.read_one(
                    data, 0, size, offset, "f", *more
                )
            )
            for offset in (0, 3, 11, 30)
            for more in ((), (31,), (31, True), (2**62,))
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
    assert everything(plain, data) == everything(compiled, data)


@needs_compiler
@given(records, st.data())
def test_both_kernels_report_damaged_batches_equally(
    rows: Any, draw: st.DataObject
) -> None:
    data = bytearray(encode(plain, rows, batch_bytes=300))
    if data:
        at = draw.draw(st.integers(0, len(data) - 1))
        data[at] ^= 1 << draw.draw(st.integers(0, 7))
        data = data[: draw.draw(st.integers(0, len(data)))]
    assert everything(plain, bytes(data)) == everything(compiled, bytes(data))


@needs_compiler
@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=20), st.data())
def test_both_kernels_treat_bodies_with_a_changed_byte_equally(
    values: list[bytes], draw: st.DataObject
) -> None:
    """The CRC is not checked here, because it would detect the change before the records
    are decoded.
    """
    body = bytearray(
        encode(plain, [(b"k", value, (("h", b"1"),)) for value in values])[
            layout.HEADER_SIZE :
        ]
    )
    for _ in range(draw.draw(st.integers(0, 3))):
        body[draw.draw(st.integers(0, len(body) - 1))] = draw.draw(st.integers(0, 255))
    body = body[: draw.draw(st.integers(0, len(body)))]
    count = draw.draw(st.integers(-1, len(values) + 2))

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
    """Return the batch with the CRC of its content, as a broken producer would send it."""
    batch[17:21] = crc32c(bytes(batch[layout.CRC_START :])).to_bytes(4, "big")
    return bytes(batch)


@needs_compiler
@given(records.filter(len), st.integers(-1, 45), st.integers(0, 2**40), st.data())
def test_both_kernels_find_the_same_record_with_wrong_headers(
    rows: Any, before: int, base_offset: int, draw: st.DataObject
) -> None:
    """If the header declares dense offsets, records are skipped by their lengths. The
    declaration and the lengths may be wrong.
    """
    batch = bytearray(encode(plain, rows, base_offset=base_offset))
    for _ in range(draw.draw(st.integers(0, 3))):
        at = draw.draw(st.integers(layout.CRC_START, len(batch) - 1))
        batch[at] = draw.draw(
            st.sampled_from([0, 1, 2, 4, 8, batch[at] ^ 2, batch[at] ^ 0x80])
        )
    data = with_crc(batch)
    offset = base_offset + before
    end = 2**62
    assert outcome(
        lambda: plain.read_one(data, 0, len(data), offset, "f", end)
    ) == outcome(lambda: compiled.read_one(data, 0, len(data), offset, "f", end))
    assert everything(plain, data) == everything(compiled, data)


@pytest.mark.parametrize("kernel", KERNELS)
@given(records.filter(len), st.sampled_from([1, 200, 1 << 20]))
def test_each_record_is_found_by_its_offset(
    kernel: Any, rows: Any, batch_bytes: int
) -> None:
    data = encode(plain, rows, base_offset=1000, batch_bytes=batch_bytes)
    facts, _, _ = plain.walk(data, 0, len(data), 100, False)
    index = b"".join(
        int(fact["last_offset"] - 1000).to_bytes(4, "big")
        + int(fact["position"]).to_bytes(4, "big")
        for fact in facts
    )
    size = len(data)
    end = 1000 + len(rows)
    for record in plain.decode_objects(data, 0, size):
        assert tuple(
            kernel.read_one(data, 0, size, record.offset, "f", end, True)
        ) == tuple(record)
        found = kernel.get_one(
            index, len(facts), data, size, 1000, record.offset, "f", end, True
        )
        assert tuple(found) == tuple(record)
        assert tuple(
            kernel.read_one(data, 0, size, record.offset, "f", end + 1)
        ) == tuple(record), "a gap follows"
    last = int(facts["position"][-1])
    for more in ((), (-1, True), (end - 1,), (end + 1, True)):
        assert (
            kernel.get_one(index, len(facts), data, size, 1000, end - 1, "f", *more)
            == last
        ), "the offset is not confirmed by the next batch"
    assert (
        kernel.get_one(index, len(facts), data, size, 1000, end, "f", end, True) == size
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dense", [True, False])
def test_offset_is_compared_with_the_next_batch(kernel: Any, dense: bool) -> None:
    """No CRC covers the offset in the head of a batch. With a flipped bit, a search for
    offsets of other batches would find this batch.
    """
    batches = [
        encode(plain, [(None, b"%d" % at)] * 8, base_offset=1000 + 8 * at)
        for at in range(4)
    ]
    sizes = [len(batch) for batch in batches]
    for at, bit in itertools.product(range(4), range(64)):
        data = bytearray(b"".join(batches))
        data[sum(sizes[:at]) + 7 - bit // 8] ^= 1 << bit % 8
        for offset in range(1000, 1032):
            found = kernel.read_one(bytes(data), 0, len(data), offset, "f", 1032, dense)
            if (
                not isinstance(found, int)
                and found.offset == offset
                and (dense or at < 3)
            ):
                assert found.value == b"%d" % ((offset - 1000) // 8), (at, bit, offset)


unfit = st.sampled_from(
    ["text", 7, bytearray(b"b"), memoryview(b"m"), 1.5, True, 2**63, -2, (), b"x" * 400]
)


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    st.tuples(
        maybe_bytes | unfit,
        maybe_bytes | unfit,
        st.none() | st.lists(header, max_size=2) | st.tuples(header) | unfit,
        timestamps | unfit,
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

    def many() -> Any:
        out = bytearray()
        size, batches = plain.encode_records(out, [row], 2**40, 3, T0, encoding)
        return bytes(out[:size]), batches[0][3]

    def single() -> Any:
        return kernel.encode_one(row, 2**40, 3, T0, encoding)

    assert outcome(single) == outcome(many)


mixed = (
    st.tuples(st.binary(max_size=300), st.binary(max_size=9))
    | st.tuples(st.none(), st.binary(max_size=9))
    | record
)


@needs_compiler
@given(
    st.lists(mixed, max_size=60),
    st.sampled_from([1, 200, 400, 1000, 2**31 - 1, 2**62]),
    st.sampled_from([250, 600, 1 << 30]),
    st.sampled_from([None, lambda data: bytes(data)[:60]]),
    st.integers(0, 300),
)
def test_rows_of_all_kinds_are_split_into_the_same_batches(
    rows: Any, batch_bytes: int, max_bytes: int, compress: Any, room: int
) -> None:
    """The fast path for plain rows and the general path alternate inside one batch, and the
    buffer grows between them.
    """

    def written(kernel: Any) -> Any:
        out = bytearray(room)
        encoding = layout.BatchEncoding(
            batch_bytes, max_bytes, 0, compress, False, 1, 2, 3
        )
        size, batches = kernel.encode_records(out, rows, 7, 0, T0, encoding)
        return bytes(out[:size]), tuple(batches)

    assert outcome(lambda: written(plain)) == outcome(lambda: written(compiled))


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
    rows: Any, batch_bytes: int, max_bytes: int, parts: int, room: int
) -> None:
    def column(cells: list[bytes | None], with_nulls: bool) -> Any:
        data = np.frombuffer(
            b"--" + b"".join(cell or b"" for cell in cells) + b"-", np.uint8
        )
        offsets = np.cumsum([2, *(len(cell or b"") for cell in cells)], dtype=np.int64)
        nulls = np.array([cell is None for cell in cells], np.uint8)
        return data, offsets, nulls if with_nulls else None

    keys = column([key for key, _, _ in rows], True) if parts & 1 else None
    values = column([value for _, value, _ in rows], bool(parts & 2))
    keys = column([value[:9] for _, value, _ in rows], False) if parts & 2 else keys
    times = (
        np.array([T0 if time > -2 else time for _, _, time in rows], np.int64)
        if parts & 4
        else None
    )

    def written(kernel: Any) -> Any:
        out = bytearray(room)
        columns = layout.InputColumns(keys, values, times, len(rows))
        encoding = layout.BatchEncoding(batch_bytes, max_bytes, 0, None, False, 1, 2, 3)
        size, batches = kernel.encode_columns(out, columns, 7, 0, T0, encoding)
        return bytes(out[:size]), tuple(batches)

    assert outcome(lambda: written(plain)) == outcome(lambda: written(compiled))


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.none() | st.binary(max_size=300), max_size=20), st.integers(0, 5000))
def test_slices_are_copied_out(
    kernel: Any, cells: list[bytes | None], gap: int
) -> None:
    data = b"".join(b"-" * gap + (cell or b"") for cell in cells)
    sizes = np.array([-1 if cell is None else len(cell) for cell in cells], np.int32)
    positions = np.cumsum([gap, *(gap + len(cell or b"") for cell in cells)])[
        :-1
    ].astype(np.int32)
    assert kernel.bytes_list(memoryview(data), positions, sizes) == cells
    if cells:
        for beside in (positions + len(data) + 1, positions - len(data) - 301):
            with pytest.raises(ValueError, match="outside"):
                kernel.bytes_list(data, beside.astype(np.int32), np.maximum(sizes, 1))
        with pytest.raises(ValueError, match="length"):
            kernel.bytes_list(data, positions[1:], sizes)


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.tuples(maybe_bytes, maybe_bytes), max_size=30), st.booleans())
def test_columns_are_encoded_like_the_same_records(
    kernel: Any, rows: Any, with_times: bool
) -> None:
    def column(pieces: list[bytes | None]) -> Any:
        nulls = np.array([piece is None for piece in pieces], np.uint8)
        data = np.frombuffer(b"".join(piece or b"" for piece in pieces), np.uint8)
        offsets = np.concatenate(
            [[0], np.cumsum([len(piece or b"") for piece in pieces])]
        ).astype(np.int64)
        return data, offsets, nulls if nulls.any() else None

    times = np.arange(len(rows), dtype=np.int64) * 1000 + T0 if with_times else None
    out = bytearray()
    keys = column([key for key, _ in rows])
    values = column([value for _, value in rows])
    columns = layout.InputColumns(keys, values, times, len(rows))
    encoding = layout.BatchEncoding(300, 1 << 30)
    size, _ = kernel.encode_columns(out, columns, 5, 0, T0, encoding)
    stamped = [
        (*row, (), T0 + 1000 * index if with_times else None)
        for index, row in enumerate(rows)
    ]
    assert bytes(out[:size]) == encode(plain, stamped, base_offset=5, batch_bytes=300)


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
        found = [
            (
                entry.offset,
                entry.timestamp,
                entry.key,
                entry.value,
                [tuple(h) for h in entry.headers],
            )
            for entry in batch
        ]
        assert found == [
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
    found = [tuple(entry) for entry in kernel.decode_objects(data, 0, len(data))]
    assert found == [
        (index, time, key, value, tuple(headers))
        for index, (key, value, headers, time) in enumerate(rows)
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "name", [name for name in EXPECTED if name.startswith("v2-none")]
)
def test_columns_and_objects_of_the_vectors_agree(kernel: Any, name: str) -> None:
    data = (VECTORS / "records" / name).read_bytes()
    stop, rows, _ = kernel.plan_run(data, 0, len(data), 1 << 20, 1 << 20, 2**62)
    assert (stop, rows) == (len(data), EXPECTED[name]["record_count"])
    block = np.empty(rows * layout.ROW_SIZE, np.uint8)
    assert kernel.decode_columns(data, 0, stop, block, rows) == rows
    objects = kernel.decode_objects(data, 0, stop)
    assert block[: 8 * rows].view(np.int64).tolist() == [
        entry.offset for entry in objects
    ]
    assert block[8 * rows : 16 * rows].view(np.int64).tolist() == [
        entry.timestamp_ms for entry in objects
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
def test_error_names_the_record_that_cannot_be_stored(
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
    facts, _, why = kernel.walk(data, 0, len(data), 10, True)
    assert facts["base_sequence"].tolist() == [2**31 - 2, 2**31 - 1, 0]
    assert why == layout.WALK_END


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.integers(0, 1000), unique=True, max_size=30), st.integers(-5, 1005))
def test_index_search_finds_the_last_entry_at_or_below(
    kernel: Any, offsets: list[int], target: int
) -> None:
    offsets.sort()
    index = b"".join(offset.to_bytes(4, "big") + b"\0\0\0\0" for offset in offsets)
    want = sum(offset <= target for offset in offsets) - 1
    assert kernel.search_offsets(index, len(offsets), target) == want


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.none() | st.binary(max_size=300), max_size=20))
def test_gather_copies_slices_in_order(kernel: Any, pieces: list[bytes | None]) -> None:
    data = b"".join(b"-" + (piece or b"") for piece in pieces)
    sizes = np.array(
        [-1 if piece is None else len(piece) for piece in pieces], np.int32
    )
    steps = (
        np.cumsum([0] + [1 + len(piece or b"") for piece in pieces[:-1]])
        if pieces
        else []
    )
    positions = (np.array(steps) + 1).astype(np.int32)
    offsets, gathered = kernel.gather(data, positions, sizes)
    assert gathered.tobytes() == b"".join(piece or b"" for piece in pieces)
    assert offsets.tolist() == np.cumsum([0, *np.maximum(sizes, 0)]).tolist()
    if len(pieces):
        with pytest.raises(ValueError, match="outside"):
            kernel.gather(data, positions + len(data), np.maximum(sizes, 1))


@given(st.binary(max_size=70))
def test_all_kernels_hash_keys_like_kafka(key: bytes) -> None:
    for kernel in KERNELS:
        assert kernel.murmur2(key) == reference_murmur2(key)


def test_record_behaves_like_a_named_tuple() -> None:
    kinds = [layout.Record] if compiled is None else [layout.Record, compiled.Record]
    for kind in kinds:
        row = kind(3, T0, b"k", None, (("h", b"1"),))
        offset, timestamp_ms, key, value, headers = row
        assert (offset, timestamp_ms, key, value, headers) == row
        assert row == (3, T0, b"k", None, (("h", b"1"),))
        assert row != kind(4, T0, b"k", None)
        assert hash(row) == hash(kind(*row))
        assert eval(repr(row), {"Record": kind}) == row
        assert row._replace(offset=9).offset == 9
        assert row._asdict()["key"] == b"k"
        with pytest.raises(AttributeError):
            row.offset = 5  # type: ignore[misc]
        plain = tuple(row)
        assert hash(row) == hash(plain)
        later = kind(4, T0, b"k", None)
        assert row < later
        assert row <= row
        assert later > plain
        assert not row >= later
        assert sorted([later, row]) == [row, later]
        extra = (1,)
        assert row + extra == (*plain, 1)
        assert extra + row == (1, *plain)
        assert row.index(b"k") == 2
        assert row.count(None) == 1
        with pytest.raises(TypeError):
            _ = row < 3


def test_topic_record_behaves_like_a_named_tuple() -> None:
    kinds = (
        [layout.TopicRecord]
        if compiled is None
        else [layout.TopicRecord, compiled.TopicRecord]
    )
    records = [
        layout.Record(3, T0, b"k", None, (("h", b"1"),)),
        layout.Record(4, T0, None, b"v"),
    ]
    for kernel, kind in zip(KERNELS, kinds, strict=True):
        mine = [kernel.Record(*record) for record in records]
        placed = kernel.to_topic_records("t", 1, mine)
        assert [type(entry) for entry in placed] == [kind, kind]
        assert [tuple(entry) for entry in placed] == [
            ("t", 1, *record) for record in records
        ]
        assert kernel.to_topic_record("t", 1, mine[0]) == placed[0]
        first = placed[0]
        topic, partition, offset, timestamp_ms, key, value, headers = first
        assert (topic, partition, offset, timestamp_ms, key, value, headers) == first
        assert hash(first) == hash(tuple(first)) == hash(kind(*first))
        assert eval(repr(first), {"TopicRecord": kind}) == first
        assert first._replace(value={"a": 1}).value == {"a": 1}
        assert first._asdict()["topic"] == "t"
        with pytest.raises(AttributeError):
            first.offset = 5
        assert (
            first < placed[1]
            and first <= first
            and placed[1] > tuple(first)
            and not first >= placed[1]
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
            case kind(topic="t", offset=found):
                assert found == 3
            case _:
                raise AssertionError("no match")
        with pytest.raises(TypeError):
            kernel.to_topic_record("t", 1, None)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_record_is_read_by_both_kernels(protocol: int) -> None:
    """A process with compiled kernels may send records to one without."""
    kinds = [layout.Record] if compiled is None else [layout.Record, compiled.Record]
    for kind in kinds:
        row = kind(3, T0, b"k", None, (("h", b"1"),))
        packed = pickle.dumps(row, protocol)
        assert b"_compiled" not in packed
        assert type(pickle.loads(packed)) is logcore.Record
        assert pickle.loads(packed) == row
        assert copy.copy(row) == row


#: What takes C: a handler of SIGBUS. logcore.fs does without it.
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
def test_a_length_whose_size_needs_33_bits_is_none(kernel: Any, length: int) -> None:
    """Its size wrapped to a negative number, and the walk went on in front of the
    buffer.
    """
    data = bytes(8) + length.to_bytes(4, "big") + bytes(4) + b"\2" + bytes(60)
    _, position, why = kernel.walk(data, 0, len(data), 9, False)
    assert (position, why) == (
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
def test_batches_follow_on_without_a_gap(
    kernel: Any, batches: list[tuple[int, int, int]], expected: int
) -> None:
    facts = np.zeros(len(batches), layout.BATCH_FACTS)
    wanted = True
    following = expected
    for row, (magic, base, delta) in enumerate(batches):
        facts[row]["magic"] = magic
        facts[row]["base_offset"] = base
        facts[row]["last_offset"] = base + delta
        wanted &= magic == 2 and base == following and delta >= 0
        following = base + delta + 1
    assert kernel.are_consecutive(facts, expected) == wanted
