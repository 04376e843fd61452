"""Tests that the compiled fast path to one record returns the record of a full read, or
leaves the record to the general path.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore.fs import OsFS
from logcore.kernels import kernel, layout
from logcore.kernels.checksum import crc32c
from logcore.segment import ActiveSegment
from logcore.testing import SimulatedDisk
from support.kernels import runs_compiled

T0 = 1_700_000_000_000
PATH = "t-0"
FIRST = f"{PATH}/{0:020d}.log"
CONFIG = {"batch.size": "300", "segment.bytes": "3000", "index.interval.bytes": "200"}


def rows(count: int, first: int = 0) -> list[tuple[Any, ...]]:
    return [
        (b"k%d" % number, b"v" * (number % 90), (), T0 + number)
        for number in range(first, first + count)
    ]


def count_fast_reads(log: logcore.Log) -> int:
    """Return how many reads take the fast path, after checking that each read by offset
    equals a full read.
    """
    expected = {record.offset: record for record in log.read(log.log_start_offset)}
    fast_count = 0
    offsets = [*range(-1, log.log_end_offset + 2), 2**63, -(2**63), 2**70]
    random.Random(len(expected)).shuffle(offsets)
    for _ in range(4):  # the first read checks, the third read stores record positions
        fast_count = 0
        for offset in offsets:
            record = kernel.get_fast(log._state, offset)
            if record is not None:
                fast_count += 1
                assert record == expected[offset]
            if offset in expected:
                assert log.get(offset) == expected[offset]
    return fast_count


@pytest.fixture
def log() -> Iterator[logcore.Log]:
    """Create a log of several segments."""
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open(
        PATH, create=True, durability="os", config=CONFIG, fs=disk
    ) as log:
        for number in range(10):
            log.append_many(rows(30, 30 * number))
        yield log


@runs_compiled
def test_plain_records_take_the_fast_path(log: logcore.Log) -> None:
    assert len(log._state.segments) > 5
    assert count_fast_reads(log) == 300
    with logcore.open(PATH, read_only=True, fs=log._fs) as reader:
        in_sealed = log._state.segments[-1].base_offset
        assert count_fast_reads(reader) == in_sealed, (
            "a reader maps a file that another process writes"
        )


@runs_compiled
def test_read_without_cached_segment_takes_the_general_path(log: logcore.Log) -> None:
    assert kernel.get_fast(log._state, 0) is None, (
        "a segment is cached only after a read"
    )
    log.get(0)
    assert kernel.get_fast(log._state, 0) is not None
    for offset in (-1, 300, 2**63, 1.0, None, "0", True):
        assert kernel.get_fast(log._state, offset) is None
    log.delete_records(1)
    assert kernel.get_fast(log._state, 0) is None
    log.close()
    assert kernel.get_fast(log._state, 1) is None


steps = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(1, 60)),
        st.tuples(st.just("one"), st.integers(0, 3)),
        st.tuples(st.just("headers")),
        st.tuples(st.just("lz4")),
        st.tuples(st.just("marker")),
        st.tuples(st.just("roll")),
        st.tuples(st.just("sync")),
        st.tuples(st.just("truncate"), st.integers(0, 40)),
        st.tuples(st.just("delete"), st.integers(0, 40)),
        st.tuples(st.just("compact")),
        st.tuples(st.just("reopen")),
    ),
    max_size=12,
)


@given(steps, st.sampled_from(["os", "group"]))
def test_each_record_equals_the_record_of_a_full_read(
    program: list[tuple[Any, ...]], durability: str
) -> None:
    disk = SimulatedDisk(now_ms=T0)
    log = logcore.open(PATH, create=True, durability=durability, config=CONFIG, fs=disk)
    try:
        for action, *arguments in program:
            if action == "rows":
                log.append_many(rows(arguments[0], log.log_end_offset), durability="os")
            elif action == "one":
                log.append(b"x" * arguments[0], key=b"k", durability="os")
            elif action == "headers":
                log.append(b"x", headers=[("h", b"1")], durability="os")
            elif action == "lz4":
                log.reconfigure({**CONFIG, "compression.type": "lz4"})
                log.append_many(rows(20, log.log_end_offset), durability="os")
                log.reconfigure(CONFIG)
            elif action == "marker":
                log.end_transaction(7, 0, commit=True, durability="os")
            elif action == "roll":
                log.roll()
            elif action == "sync":
                log.flush()
            elif action == "truncate":
                log.truncate(
                    max(log.log_start_offset, log.log_end_offset - arguments[0])
                )
            elif action == "delete":
                log.delete_records(
                    min(log.high_watermark, log.log_start_offset + arguments[0])
                )
            elif action == "compact":
                log.reconfigure({**CONFIG, "cleanup.policy": "compact"})
                logcore.clean(log)
                log.reconfigure(CONFIG)
            else:
                log.close()
                log = logcore.open(PATH, durability=durability, config=CONFIG, fs=disk)
            count_fast_reads(log)
    finally:
        log.close()


@runs_compiled
def test_damage_is_reported_by_each_check(log: logcore.Log) -> None:
    log.close()
    disk = SimulatedDisk(log._fs.files())
    disk.flip(FIRST, layout.HEADER_SIZE + 20, 1)
    with logcore.open(PATH, config=CONFIG, fs=disk) as damaged_log:
        for _ in range(3):
            with pytest.raises(logcore.CorruptBatchError):
                damaged_log.get(0)
        assert damaged_log.get(200) == log_record(200)


def log_record(offset: int) -> logcore.Record:
    key, value, headers, timestamp_ms = rows(1, offset)[0]
    return logcore.Record(offset, timestamp_ms, key, value, headers)


@runs_compiled
def test_batches_are_distinguished_by_their_positions(tmp_path: Path) -> None:
    """Two batches begin in the same 64 bytes of the file. The CRC of one batch is
    checked, and the CRC of the other batch is wrong.
    """
    with logcore.open(tmp_path / PATH, create=True, durability="os") as log:
        for _ in range(4):
            log.append(b"")
        log.roll()
    path = tmp_path / FIRST
    data = bytearray(path.read_bytes())
    size = len(data) // 4
    assert size < 2 * 64, "two batches must begin in the same 64 bytes"
    data[2 * size + 30] ^= 1
    path.write_bytes(data)
    with logcore.open(tmp_path / PATH) as log:
        for _ in range(2):
            assert [log.get(offset).offset for offset in (0, 1, 3)] == [0, 1, 3]
            with pytest.raises(logcore.CorruptBatchError):
                log.get(2)


@runs_compiled
@pytest.mark.parametrize("damaged_number", [0, 1, 2])
def test_one_batch_of_each_4_kib_is_indexed(
    tmp_path: Path, damaged_number: int
) -> None:
    """The first two batches are in the first 4 KiB. Only the third batch, which ends
    after them, is indexed and therefore checked only once.
    """
    with logcore.open(tmp_path / PATH, create=True, durability="os") as log:
        for index in range(0, 60, 20):
            log.append_many(
                [
                    (None, b"v" * 60 + b"%d" % number)
                    for number in range(index, index + 20)
                ]
            )
        positions = [batch.position for batch in log.batches(0)]
        assert positions[2] < 4096 < (tmp_path / FIRST).stat().st_size
        log.roll()
    path = tmp_path / FIRST
    data = bytearray(path.read_bytes())
    data[positions[damaged_number] + 100] ^= 1
    path.write_bytes(data)
    with logcore.open(tmp_path / PATH) as log:
        for offset in 2 * [*range(60), *reversed(range(60))]:
            if offset // 20 == damaged_number:
                with pytest.raises(logcore.CorruptBatchError):
                    log.get(offset)
            else:
                assert log.get(offset).value == b"v" * 60 + b"%d" % offset


@runs_compiled
def test_batches_written_by_another_program_are_checked(tmp_path: Path) -> None:
    """A writer skips the check only for batches that it appended itself after it opened
    the segment.
    """
    with logcore.open(tmp_path / PATH, create=True, durability="os") as log:
        log.append_many(rows(300))
    path = tmp_path / FIRST
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    with logcore.open(tmp_path / PATH, durability="os") as log:
        path.write_bytes(data)  # without the writer
        log.append_many(rows(300, 300))
        for _ in range(2):
            assert log.get(300 + 7) == log_record(307)
            with pytest.raises(logcore.CorruptBatchError):
                log.get(0)


@runs_compiled
@pytest.mark.parametrize("size", [0, 1, 20, 100, 1000, 20_000])
def test_records_of_any_size_are_found(tmp_path: Path, size: int) -> None:
    """The fast path estimates the position of a record as if all records had the same
    size. Here all sizes are equal, sizes increase, one record is longer, or only the
    last records are long.
    """
    size_lists = (
        [size] * 300,
        [size * number // 300 for number in range(300)],
        [size if number == 7 else 0 for number in range(300)],
        [size if number > 290 else 1 for number in range(300)],
    )
    expected = []
    with logcore.open(
        tmp_path / PATH, create=True, durability="os", config={"batch.size": "1000000"}
    ) as log:
        for sizes in size_lists:
            log.append_many(
                [(b"%d" % number, bytes(length)) for number, length in enumerate(sizes)]
            )
            expected += [
                (b"%d" % number, length) for number, length in enumerate(sizes)
            ]
        for _ in range(4):
            records = [log.get(offset) for offset in range(len(expected))]
            assert [
                (record.key, len(record.value or b"")) for record in records
            ] == expected
            assert (
                sum(
                    kernel.get_fast(log._state, offset) is not None
                    for offset in range(1200)
                )
                == 1200
            )
            log.roll()


@runs_compiled
def test_truncated_batches_are_not_returned(
    log: logcore.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt, a written batch is truncated. Other batches then replace it, in
    the same bytes of the file.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    assert count_fast_reads(log) == 300
    with monkeypatch.context() as patch:
        patch.setattr(
            ActiveSegment,
            "record_batches",
            lambda segment, *_: (segment.read_one(0, 0, True), interrupt()),
        )
        with pytest.raises(KeyboardInterrupt):
            log.append_many(rows(2, 400))
    log.append_many(rows(2, 300))
    assert count_fast_reads(log) == 302


def test_batches_of_other_processes_are_checked(tmp_path: Path) -> None:
    """A writer of a shared log skips the check only for its own appends after the last
    append of another process.
    """
    options: Any = {"create": True, "shared": True, "durability": "os"}
    with (
        logcore.open(tmp_path / PATH, fs=OsFS(), **options) as first,
        logcore.open(tmp_path / PATH, fs=OsFS(), **options) as other,
    ):
        first.append_many(rows(20))
        assert first.get(7) == log_record(7)
        other.append_many(rows(20, 20))
        first.append_many(rows(20, 40))
        path = tmp_path / FIRST
        data = bytearray(path.read_bytes())
        data[next(iter(first.batches(20))).position + 80] ^= 1
        path.write_bytes(data)
        for _ in range(2):
            with pytest.raises(logcore.CorruptBatchError):
                first.get(25)
            assert first.get(45) == log_record(45)


@runs_compiled
def test_records_with_unordered_offsets_take_the_general_path(tmp_path: Path) -> None:
    """The header declares dense offsets, but two of the records are swapped."""
    with logcore.open(tmp_path / PATH, create=True, durability="os") as log:
        log.append_many([(None, b"%d" % number) for number in range(30)])
        log.roll()
    path = tmp_path / FIRST
    data = bytearray(path.read_bytes())
    positions = [layout.HEADER_SIZE]
    while positions[-1] < len(data):
        positions.append(positions[-1] + 1 + (data[positions[-1]] >> 1))
    data[positions[12] + 3], data[positions[13] + 3] = (
        data[positions[13] + 3],
        data[positions[12] + 3],
    )
    data[17:21] = crc32c(bytes(data[layout.CRC_START :])).to_bytes(4, "big")
    path.write_bytes(data)
    with logcore.open(tmp_path / PATH, read_only=True) as log:
        assert log.get(5).value == b"5"
        for offset in (12, 13):
            assert kernel.get_fast(log._state, offset) is None
        assert kernel.get_fast(log._state, 14) == log.get(14)
