"""The quick way to one record, compiled, against reading all: what it answers, and what it leaves to the slow way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore.kernels import kernel, layout
from logcore.testing import SimulatedDisk
from support.kernels import needs_compiler

T0 = 1_700_000_000_000
PATH = "t-0"
FIRST = f"{PATH}/{0:020d}.log"
CONFIG = {"batch.size": "300", "segment.bytes": "3000", "index.interval.bytes": "200"}


def rows(count: int, at: int = 0) -> list[tuple[Any, ...]]:
    return [(b"k%d" % number, b"v" * (number % 90), (), T0 + number) for number in range(at, at + count)]


def agree(log: logcore.Log) -> int:
    """Each offset is answered as reading says, the first time and later; returns how many were answered quickly."""
    expected = {record.offset: record for record in log.read(log.log_start_offset)}
    quick = 0
    offsets = [*range(-1, log.log_end_offset + 2), 2**63, -(2**63), 2**70]
    random.Random(len(expected)).shuffle(offsets)
    for _ in range(2):
        quick = 0
        for offset in offsets:
            found = kernel.get_quickly(log._state, offset)
            if found is not None:
                quick += 1
                assert found == expected[offset]
            if offset in expected:
                assert log.get(offset) == expected[offset]
    return quick


@pytest.fixture
def log() -> Iterator[logcore.Log]:
    """A log of several segments."""
    disk = SimulatedDisk(now_ms=T0)
    with logcore.open(PATH, create=True, durability="os", config=CONFIG, fs=disk) as log:
        for at in range(10):
            log.append_many(rows(30, 30 * at))
        yield log


@needs_compiler
def test_plain_records_are_found_quickly(log: logcore.Log) -> None:
    assert len(log._state.segments) > 5
    assert agree(log) == 300
    with logcore.open(PATH, read_only=True, fs=log._fs) as reader:
        in_sealed = log._state.segments[-1].base_offset
        assert agree(reader) == in_sealed, "a reader does not map what another process writes"


@needs_compiler
def test_what_has_no_answer_yet_goes_the_slow_way(log: logcore.Log) -> None:
    assert kernel.get_quickly(log._state, 0) is None, "no segment is held before it was read from"
    log.get(0)
    assert kernel.get_quickly(log._state, 0) is not None
    for offset in (-1, 300, 2**63, 1.0, None, "0", True):
        assert kernel.get_quickly(log._state, offset) is None
    log.delete_records(1)
    assert kernel.get_quickly(log._state, 0) is None
    log.close()
    assert kernel.get_quickly(log._state, 1) is None


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
def test_records_are_the_same_one_by_one(program: list[tuple[Any, ...]], durability: str) -> None:
    disk = SimulatedDisk(now_ms=T0)
    log = logcore.open(PATH, create=True, durability=durability, config=CONFIG, fs=disk)
    try:
        for kind, *given_ in program:
            if kind == "rows":
                log.append_many(rows(given_[0], log.log_end_offset), durability="os")
            elif kind == "one":
                log.append(b"x" * given_[0], key=b"k", durability="os")
            elif kind == "headers":
                log.append(b"x", headers=[("h", b"1")], durability="os")
            elif kind == "lz4":
                log.reconfigure({**CONFIG, "compression.type": "lz4"})
                log.append_many(rows(20, log.log_end_offset), durability="os")
                log.reconfigure(CONFIG)
            elif kind == "marker":
                log.end_transaction(7, 0, commit=True, durability="os")
            elif kind == "roll":
                log.roll()
            elif kind == "sync":
                log.flush()
            elif kind == "truncate":
                log.truncate(max(log.log_start_offset, log.log_end_offset - given_[0]))
            elif kind == "delete":
                log.delete_records(min(log.high_watermark, log.log_start_offset + given_[0]))
            elif kind == "compact":
                log.reconfigure({**CONFIG, "cleanup.policy": "compact"})
                logcore.clean(log)
                log.reconfigure(CONFIG)
            else:
                log.close()
                log = logcore.open(PATH, durability=durability, config=CONFIG, fs=disk)
            agree(log)
    finally:
        log.close()


@needs_compiler
def test_damage_is_met_by_each_look(log: logcore.Log) -> None:
    log.close()
    disk = SimulatedDisk(log._fs.files())
    disk.flip(FIRST, layout.HEADER_SIZE + 20, 1)
    with logcore.open(PATH, config=CONFIG, fs=disk) as damaged:
        for _ in range(3):
            with pytest.raises(logcore.CorruptBatchError):
                damaged.get(0)
        assert damaged.get(200) == log_record(200)


def log_record(offset: int) -> logcore.Record:
    key, value, headers, timestamp_ms = rows(1, offset)[0]
    return logcore.Record(offset, timestamp_ms, key, value, headers)


@needs_compiler
def test_batches_are_told_apart_by_their_positions(tmp_path: Path) -> None:
    """Small batches that begin near each other: of the second the CRC is wrong, of the first it was checked."""
    with logcore.open(tmp_path / PATH, create=True, durability="os") as log:
        for _ in range(4):
            log.append(b"")
        log.roll()
    path = tmp_path / FIRST
    data = bytearray(path.read_bytes())
    size = len(data) // 4
    assert size < 2 * 64, "they share pieces of 64 bytes with their neighbours"
    data[2 * size + 30] ^= 1
    path.write_bytes(data)
    with logcore.open(tmp_path / PATH) as log:
        for _ in range(2):
            assert [log.get(offset).offset for offset in (0, 1, 3)] == [0, 1, 3]
            with pytest.raises(logcore.CorruptBatchError):
                log.get(2)


@needs_compiler
def test_what_another_program_has_written_is_checked(tmp_path: Path) -> None:
    """A writer believes only the batches that it has appended itself in this life of the segment."""
    with logcore.open(tmp_path / PATH, create=True, durability="os") as log:
        log.append_many(rows(300))
    path = tmp_path / FIRST
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    with logcore.open(tmp_path / PATH, durability="os") as log:
        path.write_bytes(data)  # behind the back of its writer
        log.append_many(rows(300, 300))
        for _ in range(2):
            assert log.get(300 + 7) == log_record(307)
            with pytest.raises(logcore.CorruptBatchError):
                log.get(0)
