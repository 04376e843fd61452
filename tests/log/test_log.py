"""A partition: what is appended is read back, in order, in every form, across rolls, reopenings and truncations."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
import re
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import logcore
from logcore import checkpoint
from logcore.config import Durability
from logcore.fs import OsFS
from logcore.index import TXN_ENTRY
from logcore.kernels import layout
from logcore.recordbatch import encode, read_batches
from logcore.segment import ActiveSegment, GrowingSegment, Segment
from logcore.testing import Fault, FaultPlan, Operation, SimulatedDisk
from support.staged import SMALL as STAGED
from support.staged import create, publish
from support.staged import rows as staged_rows
from support.vectors import VECTORS

T0 = 1_700_000_000_000
SMALL = {"segment.bytes": 600, "index.interval.bytes": 60, "batch.size": 200}
POLICIES = ["always", "group", "every(3)", "interval(1)", "os"]


def values(log: logcore.Log, start: int | None = None, end: int | None = None) -> list[bytes | None]:
    return [record.value for record in log.read(log.log_start_offset if start is None else start, end)]


@pytest.mark.parametrize("policy", POLICIES)
def test_records_come_back_after_reopening(partition: Path, policy: str) -> None:
    with logcore.open(partition, create=True, config=SMALL, durability=policy) as log:
        for at in range(20):
            receipt = log.append(b"v%d" % at, key=b"k", headers=[("h", b"1"), ("n", None)], timestamp_ms=T0 + at)
            assert (receipt.offset, receipt.last_offset) == (at, at)
            assert receipt.durability == ("disk" if policy in ("always", "group") else "os")
        assert log.high_watermark == log.log_end_offset == 20
        assert log.append(b"on disk", durability="disk").durability == "disk"
        assert log.durable_end_offset == 21
        assert log.append(b"written", durability="os").durability == "os"
    with logcore.open(partition, durability=policy) as log:
        assert log.log_end_offset == 22
        first = next(log.read(0))
        assert first == (0, T0, b"k", b"v0", (("h", b"1"), ("n", None)))
        assert values(log) == [b"v%d" % at for at in range(20)] + [b"on disk", b"written"]


def test_every_way_to_append_gives_the_same_records(partition: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    rows = [(b"k%d" % at, b"v" * at if at % 3 else None) for at in range(50)]
    keys = pa.array([key for key, _ in rows], pa.binary())
    payload = pa.array([value for _, value in rows], pa.large_binary())
    ends = np.cumsum([0] + [len(key) for key, _ in rows])
    with logcore.open(partition, create=True, config=SMALL) as log:
        for key, value in rows:
            log.append(value, key=key, timestamp_ms=T0)
        log.append_many([(key, value, (), T0) for key, value in rows])
        log.append_columns(keys=keys, values=payload, timestamps_ms=np.full(50, T0))
        log.append_columns(
            keys=(b"".join(key for key, _ in rows), ends), values=payload, timestamps_ms=pa.array([T0] * 50)
        )
        for start in range(0, 50, 10):
            batch = encode([(key, value, (), T0) for key, value in rows[start : start + 10]], codec="lz4")
            log.append_batch(batch)
        found = [(record.key, record.value, record.timestamp_ms) for record in log.read(0)]
        assert found == [(key, value, T0) for key, value in rows] * 5
        assert [record.offset for record in log.read(0)] == list(range(250))
        heads = {(one.magic, one.producer_id, one.producer_epoch, one.base_sequence) for one in log.batches(0)}
        assert heads == {(2, -1, -1, -1)}, "of no producer"
        assert log.append_many([]).last_offset == 249
        assert log.append_columns(values=pa.array([], pa.binary())).offset == 250


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_a_log_compresses_as_its_config_says(partition: Path, codec: str) -> None:
    with logcore.open(
        partition, create=True, config={**SMALL, "compression.type": codec, "segment.bytes": 4096}
    ) as log:
        log.append_many([(b"k", b"value %d" % at) for at in range(300)])
        assert {batch.codec_name for batch in log.batches(0)} == {"none" if codec == "uncompressed" else codec}
        assert values(log) == [b"value %d" % at for at in range(300)]
        assert values(log, 123, 127) == [b"value %d" % at for at in range(123, 127)]
        assert sum(len(columns) for columns in log.scan(100, 250)) == 150


def test_reading_between_any_two_offsets(partition: Path) -> None:
    with logcore.open(partition, create=True, config=SMALL) as log:
        log.append_many([(None, b"%d" % at) for at in range(60)])
        for start in range(61):
            assert log.get(start).offset == start if start < 60 else True
            for end in (start, start + 1, start + 7, 60, 99):
                want = [b"%d" % at for at in range(start, min(end, 60))]
                assert values(log, start, end) == want
                assert [value for columns in log.scan(start, end) for value in columns.values()] == want
        for outside in (-1, 61):
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.read(outside)
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.scan(outside)
        with pytest.raises(logcore.OffsetOutOfRangeError):
            log.get(60)


def test_a_read_stops_at_its_byte_budget_but_gives_a_batch(partition: Path) -> None:
    with logcore.open(partition, create=True, config={"batch.size": 400}) as log:
        log.append_many([(None, b"x" * 100) for _ in range(20)])
        assert len(list(log.read(0, max_bytes=1))) == len(next(log.batches(0)).records()) > 0
        assert 0 < len(list(log.read(0, max_bytes=900))) < 20
        assert [batch.base_offset for batch in log.batches(3, max_bytes=1)] == [2]


def test_columns_may_be_of_keys_or_of_values_alone(partition: Path) -> None:
    column = (b"abc", [0, 1, 1, 3])
    with logcore.open(partition, create=True) as log:
        log.append_columns(keys=column)
        log.append_columns(values=column)
        pieces = [b"a", b"", b"bc"]
        assert [(record.key, record.value) for record in log.read(0)] == [
            *((piece, None) for piece in pieces),
            *((None, piece) for piece in pieces),
        ]
        with pytest.raises(logcore.InvalidRecordError, match="as many rows"):
            log.append_columns(keys=column, values=(b"abc", [0, 3]))


def test_batches_give_columns_arrow_and_their_heads(partition: Path) -> None:
    with logcore.open(partition, create=True, config=SMALL) as log:
        log.append_many([(b"k", b"%d" % at, (), T0 + at) for at in range(30)])
        batches = list(log.batches(0))
        assert batches[0].base_offset == 0
        assert all(one.next_offset == two.base_offset for one, two in itertools.pairwise(batches))
        assert [offset for batch in batches for offset in batch.columns().offsets.tolist()] == list(range(30))


def test_a_scan_goes_to_arrow_polars_and_duckdb(partition: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    with logcore.open(partition, create=True, config=SMALL) as log:
        log.append_many([(b"k%d" % (at % 3), b"%d" % at, (("h", b"x"),), T0 + at) for at in range(100)])
        scan = log.scan()
        table = pa.table(scan)
        assert table["value"].to_pylist() == [b"%d" % at for at in range(100)]
        assert table.column_names == ["offset", "timestamp", "key", "value", "headers"]
        assert pa.table(scan.select("key")).column_names == ["key"]
        assert scan.to_table().equals(table), "a scan may be read twice"
        polars = pytest.importorskip("polars")
        assert polars.DataFrame(scan.select("offset", "value")).height == 100
        duckdb = pytest.importorskip("duckdb")
        found = duckdb.sql('select count(distinct key), max("offset") from scan').fetchall()
        assert found == [(3, 99)]


def test_columns_outlive_the_log(partition: Path) -> None:
    with logcore.open(partition, create=True, config=SMALL) as log:
        log.append_many([(None, b"%d" % at) for at in range(50)])
        chunks = list(log.scan())
        log.delete_records(50)
    shutil.rmtree(partition.parent)
    assert [value for columns in chunks for value in columns.values()] == [b"%d" % at for at in range(50)]


# -- segments --------------------------------------------------------------------------


def segments(partition: Path) -> list[int]:
    return sorted(int(path.name[:20]) for path in partition.glob("*.log"))


def test_a_segment_is_rolled_by_size(partition: Path) -> None:
    with logcore.open(partition, create=True, config={"segment.bytes": 250}) as log:
        for _ in range(6):
            log.append(b"x" * 32)  # 100 bytes a batch
        assert segments(partition) == [0, 2, 4]
        with pytest.raises(logcore.RecordTooLargeError):
            log.append(b"x" * 300)
        with pytest.raises(logcore.RecordTooLargeError):
            log.append_batch(encode([(None, b"x" * 300)]))
        assert log.append(b"y").offset == 6


@pytest.mark.parametrize("first", [0, T0])
def test_a_segment_is_rolled_by_age_of_its_records(partition: Path, first: int) -> None:
    with logcore.open(partition, create=True, config={"segment.ms": 1000}) as log:
        for ms in (0, 1000, 1001, 2001, 2002, 0):
            log.append(b"x", timestamp_ms=first + ms)
        assert segments(partition) == [0, 2, 4]
        log.roll()
        log.append(b"x", timestamp_ms=first)
        log.reconfigure({"segment.ms": 500})
        for ms in (500, 501):
            log.append(b"x", timestamp_ms=first + ms)
        assert segments(partition) == [0, 2, 4, 6, 8]


def test_a_segment_of_records_without_times_is_rolled_by_its_own_age() -> None:
    disk = SimulatedDisk()
    timeless = encode([(None, b"x", (), -1)])
    with logcore.open("t-0", create=True, config={"segment.ms": 1000}, fs=disk) as log:
        for wait_ms, segments_then in ((0, 1), (1000, 1), (1, 2), (1001, 3)):
            disk.advance(wait_ms)
            log.append_batch(timeless)
            assert log.statistics().segments == segments_then, wait_ms
        log.append(b"of 1970", timestamp_ms=0)
        log.roll()
        log.append(b"of 1970", timestamp_ms=0)
        disk.advance(1001)
        log.append(b"of 1970", timestamp_ms=1000)
        assert log.statistics().segments == 4, "0 is a time"
        log.truncate(4)
    with logcore.open("t-0", config={"segment.ms": 1000}, fs=disk) as log:
        assert [record.timestamp_ms for record in log.read(0)] == [-1] * 4
        assert log.newest() is None


@pytest.mark.parametrize("setting", ["segment.ms", "max.compaction.lag.ms"])
@pytest.mark.parametrize("way", ["tick", "append", "reopen"])
def test_a_compacted_log_rolls_within_its_compaction_lag(setting: str, way: str) -> None:
    """What is in the active segment is not compacted, also when the log is opened again and again."""
    disk = SimulatedDisk(now_ms=1_700_000_000_000)
    config = {"cleanup.policy": "compact", setting: 500}
    log = logcore.open("t-0", create=True, config=config, fs=disk)
    log.append(b"old", key=b"k")
    for _ in range(3):
        disk.advance(200)
        if way == "append":
            log.append(b"new", key=b"k")
        if way == "reopen":
            log.close()
            log = logcore.open("t-0", config=config, fs=disk)
        if way != "append":
            log.tick()
    assert log.statistics().segments == 2
    log.close()


def test_a_log_of_records_without_times_is_opened_by_its_index() -> None:
    disk, config = SimulatedDisk(), {"index.interval.bytes": 60}
    with logcore.open("t-0", create=True, config=config, fs=disk) as log:
        for _ in range(20):
            log.append_batch(encode([(None, b"x" * 50, (), -1)]))
    with logcore.open("t-0", config=config, fs=disk) as log:
        assert log._active.is_resumed
        assert (log.log_end_offset, log.newest()) == (20, None)
        log.reconfigure({**config, "segment.ms": 1000})
        log.append(b"of 1970", timestamp_ms=1000)
        assert log.statistics().segments == 1, "nothing in it is older"
        log.truncate(20)
        assert log.append(b"young", timestamp_ms=T0).offset == 20
        assert log.newest() == (20, T0)
        assert log.offset_for_timestamp(T0) == 20


@pytest.mark.parametrize(("step_ms", "each"), [(1, 4), (0, 7)], ids=["times", "offsets"])
def test_a_segment_is_rolled_when_an_index_is_full(partition: Path, step_ms: int, each: int) -> None:
    """Six offset entries fit, or three time entries and the closing one; the first batch of a segment has none."""
    with logcore.open(partition, create=True, config={"segment.index.bytes": 48, "index.interval.bytes": 0}) as log:
        for at in range(28):
            log.append(b"x", timestamp_ms=T0 + at * step_ms)
        assert segments(partition) == list(range(0, 28, each))
        assert values(log) == [b"x"] * 28


def test_a_batch_may_be_as_large_as_a_segment_and_no_larger(partition: Path) -> None:
    batch = encode([(None, b"x" * 500)])
    with logcore.open(partition, create=True, config={"segment.bytes": len(batch)}) as log:
        for at in range(2):
            assert log.append_batch(batch).offset == at
        with pytest.raises(logcore.SegmentTooSmallError):
            log.append_batch(encode([(None, b"x" * 501)]))
        assert (segments(partition), log.log_end_offset) == ([0, 1], 2)


@pytest.mark.parametrize("operation", ["pwrite", "create"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_append_in_parts_that_finds_no_room_can_be_gone_on_with(operation: str, at: int) -> None:
    """What is in the segment that was active before it is taken back; what stands in later ones stays, and is said."""
    disk, config = SimulatedDisk(), {"segment.bytes": 1000, "batch.size": 300}
    with logcore.open("t-0", create=True, durability="os", config=config, fs=disk) as log:
        aborted = encode([(b"k", b"a")], producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
        log.append_batch(aborted)
        log.end_transaction(7, 0, commit=False)
        rows = [(None, b"%d" % number * 200) for number in range(10)]
        size = log.statistics().size_bytes
        disk.faults = FaultPlan(Fault(operation, errno.ENOSPC, path="*.log", at=at))
        with pytest.raises(logcore.DiskFullError):
            log.append_many(rows)
        stored = log.log_end_offset - 2
        if log.statistics().segments == 1:
            assert (stored, log.statistics().size_bytes, log.written_bytes) == (0, size, size)
        log.append_many(rows[stored:])
        log.roll()
        assert values(log, 2) == [value for _, value in rows]
        assert [record.value for record in log.read(0, isolation="read_committed")] == values(log, 2)
    assert len(disk.content(f"t-0/{0:020d}.txnindex")) == TXN_ENTRY.itemsize


@given(
    st.lists(st.tuples(st.sampled_from(["one", "many", "batch", "abort"]), st.integers(0, 2)), min_size=1, max_size=8),
    st.sampled_from(["os", "always", "group"]),
)
@settings(max_examples=40)
@example([("batch", 0), ("batch", 1), ("abort", 1), ("abort", 0), ("many", 1), ("one", 0)], "os")
@example([("batch", 0), ("batch", 2), ("abort", 2), ("abort", 0), ("many", 2), ("one", 0)], "os")
def test_an_append_that_failed_leaves_no_trace(calls: list[tuple[str, int]], policy: str) -> None:
    """The files of a log are those of one in which it was never tried. With each call: 1 when the disk has no room for
    it, 2 when it is interrupted once its bytes are written.
    """

    def interrupt(*_: object) -> None:
        patch.undo()
        raise KeyboardInterrupt

    def lived(*, with_failures: bool) -> dict[str, bytes]:
        disk = SimulatedDisk()
        config = {"index.interval.bytes": 100, "batch.size": 200}
        sequence = 1
        with logcore.open("t-0", create=True, durability=policy, config=config, fs=disk) as log:
            sent = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
            log.append_batch(encode([(b"k", b"v")], base_sequence=0, **sent))
            log.end_transaction(7, 0, commit=False)
            for at, (call, failing) in enumerate(calls):
                rows = [(b"k%d" % at, b"x" * 90, (), T0 + at)] * 9
                batch = encode(rows[:2], base_sequence=sequence, **sent)
                do = {
                    "one": lambda: log.append(b"v", timestamp_ms=T0 + at),  # noqa: B023
                    "many": lambda: log.append_many(rows),  # noqa: B023
                    "batch": lambda: log.append_batch(batch),  # noqa: B023
                    "abort": lambda: log.end_transaction(7, 0, commit=False),
                }[call]
                if not failing:
                    do()
                    sequence += 2 * (call == "batch")
                elif with_failures:
                    before = log.statistics()
                    if failing == 1:
                        disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log"))
                    else:
                        patch.setattr(ActiveSegment, "note", interrupt)
                    with pytest.raises(logcore.DiskFullError if failing == 1 else KeyboardInterrupt):
                        do()
                    assert attrs.evolve(log.statistics(), appends=before.appends) == before
                    disk.faults = None
        files = disk.files()  # a snapshot of producers that is missing costs a walk over heads
        return {path: content for path, content in files.items() if not path.endswith(".snapshot")}

    with pytest.MonkeyPatch.context() as patch:
        assert lived(with_failures=True) == lived(with_failures=False)


def test_as_much_is_written_at_once_as_the_policy_lets_be_unsynced() -> None:
    """And no more; a batch is never cut."""
    rows = [(None, b"x" * 200)] * 10
    for policy, most in (
        ("os", 1 << 30),
        ("every(2)", 1 << 30),
        (Durability("group", max_bytes=600), 600),
        ("always", 1),
    ):
        disk = SimulatedDisk()
        with logcore.open("t-0", create=True, durability=policy, config={"batch.size": 1}, fs=disk) as log:
            before = len(disk.operations)
            log.append_many(rows)
            size = log.statistics().size_bytes // 10
        each = max(1, most // size)
        writes = [one for one in disk.operations[before:] if one == ("pwrite", f"/t-0/{0:020d}.log")]
        assert len(writes) == -(-10 // each), policy


def done(operations: Sequence[Operation]) -> str:
    """Without the directory and most zeros of names; what is written beside and renamed, durably, is replaced."""
    text = "; ".join(map(str, operations)).replace("/t-0/", "").replace("0" * 17, "")
    return re.sub(r"create (\S+)\.tmp; pwrite \S+; fsync \S+; rename \1; sync_dir [^;]+", r"replace \1", text)


def test_what_each_call_asks_of_the_disk() -> None:
    """And in which order, which is what a crash between any two of them relies on. What is done is not repeated."""
    disk, config = SimulatedDisk(), {"index.interval.bytes": 0, "file.delete.delay.ms": 0}
    log = logcore.open("t-0", create=True, config=config, fs=disk)

    def sent(sequence: int) -> bytes:
        return encode([(b"k", b"")], producer_id=7, producer_epoch=0, base_sequence=sequence, transactional=True)

    synced, point = "; fdatasync {}.log; pwrite logcore.durable", "replace /recovery-point-offset-checkpoint"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: log.append(b"x"), "pwrite 000.log" + synced.format("000")),
        (lambda: log.append(b"x", durability="os"), "pwrite 000.log; pwrite 000.index; pwrite 000.timeindex"),
        (log.flush, synced.format("000")[2:]),
        (log.flush, ""),
        (
            log.roll,
            "fsync 000.log; fsync 000.index; fsync 000.timeindex; create 002.log; sync_dir /t-0; create 002.index; "
            f"create 002.timeindex; {point}; create 000.seal; pwrite 000.seal",
        ),
        (log.roll, ""),
        (lambda: log.append_batch(sent(0)), "replace logcore.policy; pwrite 002.log" + synced.format("002")),
        (lambda: log.append_batch(sent(1)), "pwrite 002.log; pwrite 002.index" + synced.format("002")),
        (
            lambda: log.end_transaction(7, 0, commit=False),
            "pwrite 002.log; create 002.txnindex; pwrite 002.txnindex" + synced.format("002"),
        ),
        (
            log.roll,
            "fsync 002.log; pwrite 002.index; fsync 002.index; pwrite 002.timeindex; fsync 002.timeindex; "
            "fsync 002.txnindex; sync_dir /t-0; create 005.log; sync_dir /t-0; replace 005.snapshot; create 005.index; "
            f"create 005.timeindex; {point}; create 002.seal; pwrite 002.seal",
        ),
        (lambda: log.append(b"x"), "pwrite 005.log" + synced.format("005")),
        (lambda: disk.advance(10_000), ""),
        (log.tick, point),
        (log.tick, ""),
        (
            lambda: log.delete_records(2),
            "replace /log-start-offset-checkpoint; rename 000.log.deleted; rename 000.seal.deleted; "
            "rename 000.index.deleted; rename 000.timeindex.deleted; sync_dir /t-0; replace leader-epoch-checkpoint",
        ),
        (lambda: log.delete_records(2), ""),
        (
            log.tick,
            "unlink 000.log.deleted; unlink 000.seal.deleted; unlink 000.index.deleted; unlink 000.timeindex.deleted",
        ),
        (lambda: log.reconfigure(config), ""),
        (
            log.close,
            "fsync 005.index; pwrite 005.timeindex; fsync 005.timeindex; sync_dir /t-0; replace 006.snapshot; "
            "unlink logcore.durable; replace /.kafka_cleanshutdown",
        ),
    ]
    for at, (call, expected) in enumerate(calls):
        before = len(disk.operations)
        call()
        assert (at, sorted(done(disk.operations[before:]).split("; "))) == (at, sorted(expected.split("; ")))
        if ".deleted" not in expected:  # the order of names in a listing is nobody's
            assert done(disk.operations[before:]) == expected, at


def test_opening_and_closing_a_log_that_was_closed_writes_next_to_nothing() -> None:
    """The marker goes and comes, and what says how far readers may read; nothing else is touched."""
    disk = SimulatedDisk()
    for _ in range(3):
        before, files = len(disk.operations), disk.files()
        with logcore.open("t-0", create=True, config={"index.interval.bytes": 0}, fs=disk) as log:
            if not files:
                log.append_batch(encode([(None, b"x")], producer_id=7, producer_epoch=0, base_sequence=0))
                for at in range(5):
                    log.append(b"%d" % at)
    assert disk.files() == files
    paths = [one.path.removesuffix(".tmp") for one in disk.operations[before:]]
    assert set(paths) == {"/", "/.kafka_cleanshutdown", "/t-0", "/t-0/logcore.durable"}
    assert len(paths) <= 14


def test_snapshots_are_kept_of_each_segment_and_of_the_end() -> None:
    disk = SimulatedDisk()
    for at in range(6):
        with logcore.open("t-0", create=True, fs=disk) as log:
            log.append_batch(encode([(None, b"x")], producer_id=7, producer_epoch=0, base_sequence=at))
            if at == 3:
                log.roll()
    names = [path for path in disk.files() if path.endswith(".snapshot")]
    assert sorted(names) == [f"/t-0/{offset:020d}.snapshot" for offset in (4, 6)]
    with logcore.open("t-0", fs=disk) as log:
        log.truncate(5)
        assert not disk.exists(f"t-0/{6:020d}.snapshot")
        log.append_batch(encode([(None, b"x")], producer_id=7, producer_epoch=0, base_sequence=5))


def test_what_goes_goes_with_its_log_file_first() -> None:
    """A .log file that stayed without its .txnindex would show Kafka what was aborted."""
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        for at in range(3):
            log.append_batch(
                encode([(None, b"x")], producer_id=7, producer_epoch=0, base_sequence=at, transactional=True)
            )
            log.end_transaction(7, 0, commit=False)
            log.roll()
        before = len(disk.operations)
        log.delete_records(4)
        renamed = [one.path for one in disk.operations[before:] if one.name == "rename"]
        assert len(renamed) > 2 * len([path for path in renamed if ".log" in path])
        for base in (0, 2):
            assert next(path for path in renamed if f"{base:020d}" in path).endswith((".log", ".log.deleted"))


def test_a_full_index_is_full_after_reopening_and_with_other_settings(tmp_path: Path) -> None:
    """Entries beyond segment.index.bytes would make an index that Kafka does not open."""
    config = {"segment.index.bytes": 24, "index.interval.bytes": 0}
    for fill in range(1, 8):
        path = tmp_path / f"t-{fill}"
        with logcore.open(path, create=True, config=config) as log:
            for at in range(fill):
                log.append(b"x", timestamp_ms=T0 + at)
        with logcore.open(path, config=config) as log:
            log.append(b"x", timestamp_ms=T0 + fill)
            log.reconfigure({**config, "segment.bytes": 1 << 20})
            for at in range(fill + 1, 8):
                log.append(b"x", timestamp_ms=T0 + at)
            assert values(log) == [b"x"] * 8
            log.roll()
        assert {index.stat().st_size <= 24 for index in path.glob("*index")} == {True}, fill


def test_a_segment_is_rolled_before_its_offsets_overflow(partition: Path) -> None:
    partition.mkdir(parents=True)
    (partition / f"{0:020d}.log").write_bytes(encode([(None, b"far")], base_offset=2**31 - 2, leader_epoch=0))
    with logcore.open(partition) as log:
        log.append(b"last that fits")
        log.append(b"first that does not")
        assert segments(partition) == [0, 2**31]
        assert [record.offset for record in log.read(0)] == [2**31 - 2, 2**31 - 1, 2**31]


def test_a_large_append_is_rolled_by_age_where_its_records_grow_too_young() -> None:
    policy = Durability("group", max_bytes=600)
    with logcore.open(
        "t-0", create=True, durability=policy, config={"segment.ms": 1000, "batch.size": 1}, fs=SimulatedDisk()
    ) as log:
        times = [T0, T0, T0, T0 + 5000, T0, T0]  # three batches at a time may be unsynced
        log.append_many([(None, b"x" * 120, (), time) for time in times])
        assert [one.base_offset for one in log.segments_between(0, 6)] == [0, 3]


@pytest.mark.parametrize("rolls", [True, False])
def test_index_files_hold_the_last_offset_and_start_of_batches(partition: Path, rolls: bool) -> None:
    with logcore.open(partition, create=True, config={"index.interval.bytes": 100}) as log:
        for at in range(10):
            log.append(b"x" * 32, timestamp_ms=T0 + at)
        if rolls:
            log.roll()
    entries = np.fromfile(partition / f"{0:020d}.index", ">i4").reshape(-1, 2).tolist()
    assert entries == [[2, 200], [4, 400], [6, 600], [8, 800]]
    times = (partition / f"{0:020d}.timeindex").read_bytes()
    assert [int.from_bytes(times[at : at + 8], "big") for at in range(0, len(times), 12)] == [
        T0 + 2,
        T0 + 4,
        T0 + 6,
        T0 + 8,
        T0 + 9,
    ]


def test_a_fetch_gets_the_bytes_of_the_file_below_an_end(partition: Path) -> None:
    with logcore.open(partition, create=True, durability="os") as log:
        for at in range(5_000):
            log.append(b"%04d" % at, timestamp_ms=T0 + at)
        data = (partition / f"{0:020d}.log").read_bytes()
        step = len(data) // 5_000
        assert b"".join(log.stored(0, max_bytes=1 << 30)) == data, "more batches than are walked at once"
        assert b"".join(log.stored(10, 20, max_bytes=1 << 30)) == data[10 * step : 20 * step]
        assert b"".join(log.stored(0, 4_500, max_bytes=1 << 30)) == data[: 4_500 * step]
        assert log.stored(20, 20, max_bytes=1 << 30) == []
        assert b"".join(log.stored(7, max_bytes=1)) == data[7 * step : 8 * step], "never less than one"
        assert log.stored(7, max_bytes=1, at_least_one=False) == []
        assert log.offset_for_timestamp(T0 + 4_999) == 4_999
        with (partition / f"{0:020d}.log").open("r+b") as file:
            file.seek(7 * step + 16)
            file.write(b"\x09")  # a magic that no batch has
        for _ in range(2):  # growing, and sealed
            with pytest.raises(logcore.CorruptBatchError) as met:
                log.stored(7, max_bytes=1 << 30)
            assert met.value.position == 7 * step
            assert b"".join(log.stored(5, max_bytes=1 << 30)) == data[5 * step : 7 * step], "what is whole before it"
            log.roll()


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    is_sealed=st.booleans(),
    at=st.integers(0, 40),
    end=st.integers(0, 40),
    max_bytes=st.integers(-1, 450),
    at_least_one=st.booleans(),
    tail=st.sampled_from([0, 5, 40]),
)
@example(sizes=[1, 2, 3], is_sealed=True, at=0, end=9, max_bytes=1, at_least_one=True, tail=0)
@example(sizes=[1, 2, 3], is_sealed=False, at=1, end=9, max_bytes=1, at_least_one=True, tail=0)
@example(sizes=[1, 2, 3], is_sealed=True, at=2, end=9, max_bytes=1, at_least_one=True, tail=5)
@example(sizes=[1, 2, 3], is_sealed=False, at=0, end=1, max_bytes=1, at_least_one=True, tail=5)
def test_a_fetch_gets_as_many_whole_batches_as_fit(
    sizes: list[int], is_sealed: bool, at: int, end: int, max_bytes: int, at_least_one: bool, tail: int
) -> None:
    """Of one segment, behind which may stand a batch that is not whole."""
    at_least_one &= max_bytes > 0
    data, starts = b"", [0]
    for size in sizes:
        data += encode([(None, b"x" * (40 * size % 70))] * size, base_offset=starts[-1])
        starts.append(starts[-1] + size)
    batches = list(read_batches(data))
    path = f"t-0/{0:020d}.log"
    disk = SimulatedDisk({path: data + encode([(None, b"torn")])[:tail]})
    segment = Segment(disk, "t-0", 0) if is_sealed else GrowingSegment(disk, "t-0", 0)
    slot = min(at, len(batches) - 1)
    want = b""
    for batch in batches[slot:]:
        is_first_of_all = at_least_one and not want
        if batch.last_offset >= end or (len(want) + batch.size_bytes > max_bytes and not is_first_of_all):
            break
        want += batch.data
    position = batches[slot].position
    found, is_all = segment.stored(position, max_bytes, end, at_least_one, lambda facts: None)
    assert (bytes(found), is_all) == (want, position + len(want) == len(data) + tail)


@given(
    sizes=st.lists(st.integers(0, 90), max_size=10),
    step_bytes=st.integers(1, 400),
    start=st.integers(0, 10),
    stop=st.none() | st.integers(0, 11),
    damage=st.none() | st.tuples(st.integers(0, 9), st.sampled_from([8, 16, 61]), st.sampled_from([0x01, 0x80])),
    crc=st.booleans(),
)
def test_a_walk_in_steps_sees_what_a_walk_over_a_mapping_sees(
    sizes: list[int],
    step_bytes: int,
    start: int,
    stop: int | None,
    damage: tuple[int, int, int] | None,
    crc: bool,
) -> None:
    """However little is read at once, up to any batch, and as far as damage: of a length, of a magic, of a record."""

    def walked(segment: Segment) -> tuple[list[Any], int, int]:
        steps = list(segment.walk(positions[begin], crc=crc, stop=until, step_bytes=step_bytes))
        return [row for facts, _, _ in steps for row in facts.tolist()], *steps[-1][1:]

    data, positions = bytearray(), [0]
    for at, size in enumerate(sizes):
        data += encode([(None, b"x" * size)], base_offset=at)
        positions.append(len(data))
    begin = min(start, len(sizes))
    until = None if stop is None else positions[max(begin, min(stop, len(sizes)))]
    if damage is not None and damage[0] < len(sizes):
        data[positions[damage[0]] + damage[1]] ^= damage[2]
    disk = SimulatedDisk({f"t-0/{0:020d}.log": bytes(data)})
    mapped, growing = walked(Segment(disk, "t-0", 0)), walked(GrowingSegment(disk, "t-0", 0))
    assert growing == mapped
    if damage is None:
        rows, position, why = growing
        end = len(data) if until is None else until
        assert [row[0] for row in rows] == [one for one in positions[:-1] if positions[begin] <= one < end]
        assert (position, why) == (end, layout.WALK_END)


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=10),
    base=st.sampled_from([0, 1_000]),
    index=st.none() | st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 0, 1, -1])), max_size=5),
    lengths=st.lists(st.tuples(st.integers(0, 10), st.sampled_from([0, 0, 11, 40])), max_size=5),
    seek_bytes=st.sampled_from([61, 100, 300]),
)
@example(counts=[1] * 9, base=1_000, index=[(2, 0), (4, 0), (7, 0)], lengths=[(9, 0), (3, 0), (6, 11)], seek_bytes=61)
@example(counts=[3] * 9, base=0, index=[(2, 0), (4, 1), (7, -1)], lengths=[(9, 0), (3, 0), (6, 11)], seek_bytes=300)
def test_a_growing_segment_finds_what_is_there(
    counts: list[int],
    base: int,
    index: list[tuple[int, int]] | None,
    lengths: list[tuple[int, int]],
    seek_bytes: int,
) -> None:
    """However little is read at once, whatever its index says, and however often it grew, was cut, or ends torn.

    index: the slots of batches that have entries, and how far these are wrong. lengths: how many batches are there, and
    how many bytes of the next.
    """
    name, data, batches, end = f"t-0/{base:020d}", b"", list[tuple[int, int]](), base
    for count in counts:
        data += encode([(None, b"x" * 50)] * count, base_offset=end)
        end += count
        batches.append((end - 1, len(data)))
    entries = [
        (batches[slot][0] - base, batches[slot - 1][1] + wrong)
        for slot, wrong in index or ()
        if 0 < slot < len(batches)
    ]
    disk = SimulatedDisk({f"{name}.log": b""})
    if index is not None:
        disk.replace(f"{name}.index", b"".join(struct.pack(">ii", *entry) for entry in sorted(entries)) + bytes(16))
    segment, handle = GrowingSegment(disk, "t-0", base), disk.open(f"{name}.log", write=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logcore.segment._SEEK_BYTES", seek_bytes)
        for number, torn in lengths:
            there = batches[:number]
            size = there[-1][1] if there else 0
            disk.truncate(handle, 0)
            disk.pwrite(handle, data[: size + torn], 0)
            assert segment.refresh() == len(data[: size + torn])
            assert segment.next_offset() == (there[-1][0] + 1 if there else base)
            for offset in range(base - 1, end + 2):
                starts = [0, *(after for _, after in there)]
                found = next((at for at, (last, _) in enumerate(there) if last >= offset), len(there))
                assert segment.find(offset) == starts[found] or (
                    torn and found == len(there) and segment.find(offset) >= size
                )
                one = segment.read_one(offset, segment.next_offset(), True)
                assert isinstance(one, int) or one.offset == max(offset, base) <= there[-1][0]
                if found < len(there) and starts[found + 1] <= seek_bytes and not entries:
                    assert not isinstance(one, int), "what is read at once has it"
                if found < len(there) and not entries:
                    assert segment.batch(starts[found]).last_offset == there[found][0]  # type: ignore[union-attr]
    disk.close(handle)
    assert disk.open_handles == [f"{name}.log"]


def test_what_is_fetched_from_the_growing_segment_is_mapped_once_until_it_has_grown() -> None:
    class Counting(SimulatedDisk):
        maps = 0

        def map(self, handle: int, size: int) -> memoryview:
            self.maps += 1
            return super().map(handle, size)

    disk = Counting()
    with logcore.open("t-0", create=True, durability="os", fs=disk) as log:
        for at in range(10):
            log.append(b"%d" % at * 50_000)
        data = disk.content(f"t-0/{0:020d}.log")
        for start in (0, 1, 2):
            assert b"".join(log.stored(start, max_bytes=1 << 20)) == data[len(data) // 10 * start :]
        assert disk.maps == 1
        log.append(b"more" * 50_000)
        assert b"".join(log.stored(0, max_bytes=1 << 20)) == disk.content(f"t-0/{0:020d}.log")
        assert disk.maps == 2


@pytest.mark.parametrize("damage", ["missing", "empty", "zeros", "random", "shifted", "moved"])
def test_a_broken_index_costs_time_only(partition: Path, damage: str) -> None:
    with logcore.open(partition, create=True, config={**SMALL, "segment.bytes": 3000}) as log:
        log.append_many([(None, b"%d" % at, (), T0 + at) for at in range(300)])
        want = list(log.read(0))
    rng = np.random.default_rng(5)
    for path in partition.glob("*.index"):
        size = path.stat().st_size
        old = path.read_bytes()
        path.unlink()
        if damage == "empty":
            path.write_bytes(b"")
        elif damage == "zeros":
            path.write_bytes(bytes(size + 80))
        elif damage == "random":
            path.write_bytes(rng.bytes(size))
        elif damage == "shifted":
            path.write_bytes(old[4:] + old[:4])
        elif damage == "moved":  # rising, and none of them points at its batch
            entries = np.frombuffer(old, ">i4").reshape(-1, 2) + np.array([0, 1])
            path.write_bytes(entries.astype(">i4").tobytes())
    for read_only in (True, False):
        with logcore.open(partition, read_only=read_only) as log:
            assert log.log_end_offset == 300
            for start in range(0, 300, 7):
                assert next(log.read(start)) == want[start]
                assert log.get(start) == want[start]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(0, 2**32))
@settings(max_examples=30)
def test_offset_for_timestamp_is_the_first_record_as_young(
    tmp_path_factory: pytest.TempPathFactory, times: list[int], seed: int
) -> None:
    partition = tmp_path_factory.mktemp("times") / "orders-0"
    rng = np.random.default_rng(seed)
    with logcore.open(partition, create=True, config={**SMALL, "segment.ms": 1 << 60}, durability="os") as log:
        at = 0
        while at < len(times):
            step = int(rng.integers(1, 5))
            log.append_many([(None, b"x", (), T0 + time) for time in times[at : at + step]])
            at += step
        for log_ in (log, logcore.open(partition, read_only=True)):
            for time in range(-1, 42):
                want = next((at for at, other in enumerate(times) if other >= time), None)
                assert log_.offset_for_timestamp(T0 + time) == want, time
            if log_ is not log:
                log_.close()


# -- shortening --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
def test_truncating_anywhere_keeps_exactly_what_is_below(tmp_path: Path, codec: str) -> None:
    for offset in range(0, 41, 3):
        partition = tmp_path / f"t-{offset}"
        with logcore.open(partition, create=True, config={**SMALL, "compression.type": codec}) as log:
            log.append_many([(b"k%d" % at, b"%d" % at, (("h", b"%d" % at),), T0 + at) for at in range(40)])
            log.truncate(offset)
            assert (log.log_end_offset, log.high_watermark) == (offset, offset)
            assert values(log) == [b"%d" % at for at in range(offset)]
            assert log.append(b"new").offset == offset
        with logcore.open(partition) as log:
            assert values(log) == [b"%d" % at for at in range(offset)] + [b"new"]
            assert log.recovery_report is not None
            assert log.recovery_report.cut_position is None
        assert not list(partition.glob("*.tmp"))


def test_a_reader_of_a_growing_segment_notices_when_other_batches_stand_there(partition: Path) -> None:
    """A crash has taken batches that a reader elsewhere saw under `os`, and others were appended in their place."""

    def batch(base: int, size: int) -> bytes:
        tries = (encode([(None, b"%d" % base * count)], base_offset=base, leader_epoch=0) for count in range(size))
        return next(data for data in tries if len(data) == size)

    def found() -> list[tuple[int, int]]:
        return [(one.base_offset, one.size_bytes) for one in reader.batches(0) if one.records()]

    partition.mkdir(parents=True)
    file = partition / f"{0:020d}.log"
    file.write_bytes(batch(0, 100) + batch(1, 100) + batch(2, 100))
    with logcore.open(partition, read_only=True) as reader, file.open("ab") as writer:
        assert found() == [(0, 100), (1, 100), (2, 100)]
        for kept, now in (
            (100, [(0, 100)]),
            (100, [(0, 100), (1, 200)]),
            (300, [(0, 100), (1, 200), (2, 100), (3, 100)]),
            (100, [(0, 100), (1, 200), (2, 200), (3, 100)]),  # where the last look ended another batch begins
        ):
            os.truncate(file, kept)
            for base, size in now[1 if kept == 100 else 2 :]:
                writer.write(batch(base, size))
            writer.flush()
            reader.refresh()
            assert found() == now
            assert reader.log_end_offset == len(now)


def test_a_reader_is_told_when_what_it_wants_to_read_was_removed(partition: Path) -> None:
    config = {"file.delete.delay.ms": 0}
    with logcore.open(partition, create=True, config=config) as log:
        for at in range(3):
            log.append(b"%d" % at)
            log.roll()
        with logcore.open(partition, read_only=True) as reader:
            log.delete_records(2)
            log.tick()
            assert segments(partition) == [2, 3]
            with pytest.raises(logcore.OffsetOutOfRangeError, match="removed by its writer"):
                list(reader.read(0))
            assert [record.value for record in reader.read(2)] == [b"2"]


def test_a_seal_of_another_file_is_not_believed(partition: Path) -> None:
    """It says that a segment follows; of a file that was put in the place of the sealed one, that is not known."""
    with logcore.open(partition, create=True) as log:
        log.append(b"x")
        log.roll()
        log.append(b"y")
        log.scrub()
    (partition.parent / checkpoint.RECOVERY_POINT).unlink()
    for file in partition.glob(f"{1:020d}.*"):
        file.unlink()
    with pytest.raises(logcore.CorruptLogError, match="the one that followed is gone"):
        logcore.open(partition)
    os.utime(partition / f"{0:020d}.log", (1, 1))
    with logcore.open(partition) as log:
        assert values(log) == [b"x"]
        assert not list(partition.glob("*.seal"))


def test_a_reader_follows_a_truncation_into_an_earlier_segment(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        for at in range(4):
            log.append(b"%d" % at)
            log.roll()
        with logcore.open(partition, read_only=True) as reader:
            assert values(reader) == [b"0", b"1", b"2", b"3"]
            log.truncate(1)
            log.append(b"new")
            assert reader.refresh()
            assert values(reader) == [b"0", b"new"]
            assert reader.times_truncated == 1
            shape = reader.statistics()
            assert (shape.segments, shape.log_end_offset, shape.appends, shape.syncs) == (
                len(segments(partition)),
                2,
                0,
                0,
            )
            assert shape.size_bytes == sum(file.stat().st_size for file in partition.glob("*.log"))


def test_a_reader_of_a_file_that_became_shorter_comes_to_an_end(partition: Path) -> None:
    """Its writer takes back an append that was interrupted: what the reader knows of the size is too much."""
    calls: list[Callable[[logcore.Log], object]] = [
        lambda reader: list(reader.read(0)),
        lambda reader: list(reader.read(0, isolation="read_committed")),
        lambda reader: reader.get(4),
        lambda reader: reader.newest(),
        lambda reader: reader.offset_for_timestamp(T0 + 99),
        lambda reader: reader.stored(4, max_bytes=100),
    ]
    with logcore.open(partition, create=True, durability="os") as log:
        for at in range(5):
            log.append(b"x" * 32, timestamp_ms=T0 + at)
        data = (partition / f"{0:020d}.log").read_bytes()
        for call in calls:
            with logcore.open(partition, read_only=True) as reader:
                os.truncate(partition / f"{0:020d}.log", len(data) // 5 * 3)
                with contextlib.suppress(logcore.LogcoreError):
                    call(reader)
                reader.refresh()
                assert [record.offset for record in reader.read(0)] == [0, 1, 2]
                assert reader.offset_for_timestamp(T0 + 99) is None
            (partition / f"{0:020d}.log").write_bytes(data)


def test_a_reader_of_a_growing_segment_looks_at_the_index_again(partition: Path) -> None:
    with logcore.open(partition, create=True, config={"index.interval.bytes": 10_000}) as log:
        log.append(b"first")
        with logcore.open(partition, read_only=True) as reader:
            assert reader.get(0).value == b"first"
            (segment,) = reader.segments_between(0, 1)
            known = segment.offset_index
            log.append(b"little")
            assert reader.refresh() and segment.offset_index is known
            log.truncate(1)
            for at in range(1, 200):
                log.append(b"%03d" % at * 5_000)
            log._active.offer_indexes()
            assert reader.refresh()
            (segment,) = reader.segments_between(0, 200)
            assert reader.get(199).value == b"199" * 5_000
            assert len(segment.offset_index) > 100, "without it each lookup would walk three megabytes"


def test_what_a_reader_takes_of_a_growing_segment_is_a_copy(partition: Path) -> None:
    """Its writer may shorten the files, after which a mapping of them would end the process."""
    with logcore.open(partition, create=True, config={"index.interval.bytes": 0}) as log:
        for at in range(10):
            log.append(b"x" * 1_000, timestamp_ms=T0 + at)
        log._active.offer_indexes()
        with logcore.open(partition, read_only=True) as reader:
            (segment,) = reader.segments_between(0, 10)
            taken = segment.view(), segment.offset_index.data, segment.time_index.data
            files = [partition / f"{0:020d}{suffix}" for suffix in (".log", ".index", ".timeindex")]
            before = [file.read_bytes() for file in files]
            for file in files:
                os.truncate(file, 0)
            assert [bytes(piece) for piece in taken] == before
            assert (before[1], before[2]) != (b"", b"")
            for file, content in zip(files, before, strict=True):
                file.write_bytes(content)


@pytest.mark.parametrize("sealed", [True, False])
def test_damage_that_may_hide_a_time_is_an_error(partition: Path, sealed: bool) -> None:
    with logcore.open(partition, create=True) as log:
        for at in range(3):
            log.append(b"x" * 32, timestamp_ms=T0 + at)
        if sealed:
            log.roll()
            log.append(b"last", timestamp_ms=T0)
    (partition / f"{0:020d}.timeindex").unlink()
    file = partition / f"{0:020d}.log"
    data = bytearray(file.read_bytes())
    data[150] ^= 1
    file.write_bytes(data)
    with logcore.open(partition, read_only=True) as log:
        with pytest.raises(logcore.CorruptBatchError) as met:
            log.offset_for_timestamp(T0 + 99)
        assert met.value.position == 100


def test_truncating_outside_the_log_is_refused(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        log.append(b"x")
        for offset in (-1, 2):
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.truncate(offset)
        log.truncate(1)
        assert (log.log_end_offset, log.times_truncated) == (1, 0), "nothing is cut at the end"


@pytest.mark.parametrize("policy", ["group", "always"])
def test_what_comes_behind_a_truncation_is_not_shown_before_it_is_on_disk(policy: str) -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability=policy, fs=disk) as log:
        for _ in range(3):
            log.append(b"gone")
        log.truncate(1)
        log.append(b"new", durability="os")
        with logcore.open("t-0", read_only=True, fs=disk) as reader:
            assert (log.high_watermark, reader.high_watermark) == (1, 1)
            log.flush()
            reader.refresh()
            assert values(reader) == values(log) == [b"gone", b"new"]


def test_deleting_records_moves_the_start_and_frees_whole_segments(partition: Path) -> None:
    with logcore.open(partition, create=True, config={"segment.bytes": 250}) as log:
        for at in range(8):
            log.append(b"%d" % at * 32)
        iterator = log.read(0)
        first = next(iterator)
        assert log.delete_records(5) == 5
        assert segments(partition) == [4, 6]
        assert log.delete_records(3) == 5
        assert [record.offset for record in log.read(5)] == [5, 6, 7]
        assert [first.offset, *(record.offset for record in iterator)] == list(range(8)), "readers keep what they hold"
        with pytest.raises(logcore.OffsetOutOfRangeError):
            log.read(4)
        for outside in (-1, 9):
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.delete_records(outside)
    with logcore.open(partition) as log:
        assert (log.log_start_offset, log.log_end_offset) == (5, 8)
        log.delete_records(8)
        assert log.append(b"x").offset == 8
    with logcore.open(partition, read_only=True) as log:
        assert (log.log_start_offset, values(log)) == (8, [b"x"])


# -- directories that Kafka wrote --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["partition-clean", "partition-crash"])
def test_kafkas_partition_is_read(name: str) -> None:
    with logcore.open(VECTORS / name / "orders-0", read_only=True) as log:
        assert (log.log_start_offset, log.log_end_offset, log.last_stable_offset) == (0, 29, 28)
        assert [record.offset for record in log.read(0)] == [at for at in range(29) if at not in (10, 11)]
        committed = [record.offset for record in log.read(0, isolation="read_committed")]
        assert committed == [at for at in range(28) if at not in (8, 10, 11)]
        assert [len(columns) for columns in log.scan(isolation="read_committed")] != []
        assert next(log.read(0)) == (0, T0, b"k1", b"hello", (("h", b"x"),))
        kinds = {batch.base_offset: batch.control_type() for batch in log.batches(0) if batch.is_control}
        assert kinds == {10: "ABORT", 11: "COMMIT"}
        assert {batch.codec_name for batch in log.batches(0)} == {"none", "gzip", "snappy", "lz4", "zstd"}


def test_kafkas_compacted_partition_is_read() -> None:
    with logcore.open(VECTORS / "partition-compact-after" / "compacted-0", read_only=True) as log:
        assert [record.offset for record in log.read(0)] == [4, 5, 6, 12, 13]
        assert log.get(0).offset == 4
        assert log.log_end_offset == 14


@pytest.mark.parametrize("name", ["partition-clean", "partition-crash"])
def test_kafkas_partition_is_continued(tmp_path: Path, name: str) -> None:
    shutil.copytree(VECTORS / name, tmp_path / name)
    before = (tmp_path / name / "orders-0" / f"{16:020d}.log").read_bytes()
    with logcore.open(tmp_path / name / "orders-0", config={"segment.ms": 1 << 60}) as log:
        assert not (tmp_path / name / ".kafka_cleanshutdown").exists(), "gone before the first write"
        assert log.append(b"ours", key=b"k").offset == 29
        assert [record.offset for record in log.read(27)] == [27, 28, 29]
    after = (tmp_path / name / "orders-0" / f"{16:020d}.log").read_bytes()
    assert after.startswith(before)
    added = list(read_batches(after[len(before) :]))
    assert [batch.partition_leader_epoch for batch in added] == [4], "the latest epoch of the checkpoint"
    points = (tmp_path / name / "recovery-point-offset-checkpoint").read_text()
    assert "orders 0 30\n" in points
    if name == "partition-clean":
        assert (tmp_path / name / ".kafka_cleanshutdown").exists()
        assert "orders 0 30" in points


# -- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["orders", "orders-", "orders-x", "or ders-0", "..-0x", "-0", "ä-0", "a" * 250 + "-0", "orders-99999999999"]
)
def test_a_directory_that_kafka_would_refuse_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(logcore.InvalidNameError):
        logcore.open(tmp_path / name, create=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "config",
    [
        {"segment.byte": 1},
        {"segment.bytes": 13},
        {"segment.bytes": 2**31},
        {"segment.bytes": "many"},
        {"segment.bytes": True},
        {"compression.type": "brotli"},
        {"cleanup.policy": "shred"},
    ],
)
def test_a_bad_config_is_named(partition: Path, config: dict[str, object]) -> None:
    with pytest.raises(logcore.InvalidConfigError, match=next(iter(config))):
        logcore.open(partition, create=True, config=config)
    assert not partition.exists()


@pytest.mark.parametrize("policy", ["sometimes", "every", "every(0)", "interval(-1)", "always(3)", 7, None])
def test_a_bad_durability_is_named(partition: Path, policy: Any) -> None:
    with pytest.raises(logcore.InvalidConfigError):
        logcore.open(partition, create=True, durability=policy)


def test_records_that_cannot_be_stored_change_nothing(partition: Path) -> None:
    with logcore.open(partition, create=True, config={"max.message.bytes": 1000}) as log:
        log.append(b"before")
        size = os.path.getsize(partition / f"{0:020d}.log")
        with pytest.raises(logcore.InvalidRecordError):
            log.append("text")  # type: ignore[arg-type]
        with pytest.raises(logcore.RecordTooLargeError):
            log.append_many([(b"k", b"fine"), (b"k", b"x" * 2000)])
        with pytest.raises(logcore.InvalidTimestampError):
            log.append(b"x", timestamp_ms=-5)
        with pytest.raises(logcore.InvalidRecordError):
            log.append_columns()
        with pytest.raises(logcore.InvalidRecordError):
            log.append_columns(keys=(b"abc", [0, 3]), values=(b"abc", [0, 1, 3]))
        for offsets in ([0, 4], [2, 1, 3], [-1, 3], [], [0.5, 1.5]):
            with pytest.raises(logcore.InvalidRecordError):
                log.append_columns(values=(b"abc", offsets))
        with pytest.raises(logcore.InvalidTimestampError):
            log.append_columns(values=(b"abc", [0, 3]), timestamps_ms=[1, 2])
        with pytest.raises(logcore.CorruptBatchError):
            log.append_batch(b"no batch")
        with pytest.raises(logcore.InvalidConfigError):
            log.append(b"x", durability="tape")  # type: ignore[arg-type]
        assert log.log_end_offset == 1
        assert os.path.getsize(partition / f"{0:020d}.log") == size
        assert values(log)[0] == b"before"


def test_timestamps_outside_the_topics_limits_are_refused(partition: Path) -> None:
    config = {"message.timestamp.before.max.ms": 60_000, "message.timestamp.after.max.ms": 60_000}
    with logcore.open(partition, create=True, config=config) as log:
        now = log.append(b"now").timestamp_ms
        for time, alone in ((now - 120_000, "before"), (now + 120_000, "after")):
            log.reconfigure({f"message.timestamp.{alone}.max.ms": 60_000})
            with pytest.raises(logcore.InvalidTimestampError):
                log.append(b"x", timestamp_ms=time)
            with pytest.raises(logcore.InvalidTimestampError):
                log.append_many([(None, b"x"), (None, b"x", (), time)])
            with pytest.raises(logcore.InvalidTimestampError):
                log.append_columns(values=(b"ab", [0, 1, 2]), timestamps_ms=[now, time])
            with pytest.raises(logcore.InvalidTimestampError):
                log.append_batch(encode([(None, b"x", (), time)]))
        log.reconfigure(config)
        log.append_many([(None, b"x"), (None, b"x", (), now), (None, b"x", (), -1)])
        assert log.log_end_offset == 4


def test_a_compacted_topic_needs_keys(partition: Path) -> None:
    with logcore.open(partition, create=True, config={"cleanup.policy": "compact"}) as log:
        log.append(None, key=b"tombstone")
        with pytest.raises(logcore.InvalidRecordError):
            log.append(b"no key")
        with pytest.raises(logcore.InvalidRecordError):
            log.append_columns(values=(b"abc", [0, 3]))


def test_a_log_that_is_not_there(partition: Path) -> None:
    for read_only in (True, False):
        with pytest.raises(logcore.LogNotFoundError):
            logcore.open(partition, read_only=read_only)
    with pytest.raises(logcore.InvalidConfigError):
        logcore.open(partition, create=True, read_only=True)


def test_a_log_says_where_it_is_and_what_it_does(partition: Path) -> None:
    log = logcore.open(partition, create=True)
    log.append_many([(None, b"x")] * 3)
    log.delete_records(1)
    assert repr(log) == f"<Log {partition} offsets 1..3 writing>"
    with logcore.open(partition, read_only=True) as reader:
        assert repr(reader) == f"<Log {partition} offsets 1..3 read-only>"
        assert repr(reader.segments_between(1, 3)) == f"[<GrowingSegment {partition}/{0:020d}.log>]"
    log.close()
    assert repr(log) == f"<Log {partition} offsets 1..3 closed>"


@pytest.mark.parametrize(("policy", "syncs"), [("always", 3), ("group", 3), ("every(4)", 1), ("os", 0)])
def test_a_log_counts_what_it_does(policy: str, syncs: int) -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability=policy, fs=disk) as log:
        log.append(b"x")
        log.append_many([(None, b"y")] * 2)
        log.append_columns(values=(b"zz", np.array([0, 1, 2])))
        log.append_many([])
        size = len(disk.content(f"t-0/{0:020d}.log"))
        found = log.statistics()
        durable = {"every(4)": 5, "os": 0}.get(policy, 5)
        assert found == logcore.LogStatistics(
            segments=1, size_bytes=size, log_start_offset=0, high_watermark=5, log_end_offset=5,
            durable_end_offset=durable, appends=3, records_appended=5, bytes_appended=size, syncs=syncs, rolls=0,
        )  # fmt: skip
        log.roll()
        log.delete_records(5)
        assert (log.statistics().rolls, log.statistics().segments, log.statistics().size_bytes) == (1, 1, 0)
        assert (log.written_bytes, log.durable_end_offset) == (size, 5)
    with logcore.open("t-0", read_only=True, fs=disk) as reader:
        found = reader.statistics()
        assert (found.segments, found.log_start_offset, found.log_end_offset) == (1, 5, 5)
        assert {found.appends, found.records_appended, found.bytes_appended, found.syncs, found.rolls} == {0}
    with logcore.open("t-0", durability=policy, fs=disk) as log:
        log.append(b"x")
        found = log.statistics()
        assert (found.log_end_offset, found.appends, found.records_appended) == (6, 1, 1)


def test_what_a_child_of_a_fork_has_of_a_log_refuses_writes(partition: Path) -> None:
    """tests/faults/test_processes.py forks; here the object is made to believe so."""
    fs = OsFS()
    with logcore.open(partition, create=True, fs=fs) as log:
        log.append(b"parent")
        fs.forks += 1
        for call in (lambda: log.append(b"child"), log.roll, log.flush, lambda: log.truncate(0)):
            with pytest.raises(logcore.ForkedWriterError, match="in the child"):
                call()
        fs.forks -= 1
        assert log.append(b"parent").offset == 1


def test_an_opening_that_fails_gives_the_lock_back(partition: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with logcore.open(partition, create=True) as log:
        log.append(b"x")

    def no_memory(*arguments: object, **options: object) -> None:
        raise MemoryError

    for name in ("__init__", "start"):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(logcore.Log, name, no_memory)
            logcore.open(partition)
    with logcore.open(partition) as log:
        assert values(log) == [b"x"]


def test_a_segment_that_another_program_has_made_is_not_written_to(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        log.append(b"x")
        foreign = partition / f"{1:020d}.log"
        foreign.write_bytes(b"theirs")
        with pytest.raises(logcore.CorruptLogError, match="another program"):
            log.roll()
        with pytest.raises(logcore.LogFailedError):
            log.append(b"y")
    assert foreign.read_bytes() == b"theirs"


def test_records_may_come_from_what_appends_itself(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:

        def rows() -> Iterator[tuple[bytes | None, bytes]]:
            log.append(b"inner", headers=((name, b"") for name in ("x", "y")))
            yield None, b"a"
            yield None, b"b"

        receipt = log.append_many(rows())
        assert (receipt.offset, receipt.last_offset) == (1, 2)
        assert values(log) == [b"inner", b"a", b"b"]
        for wrong in (lambda: log.append_many(7), lambda: log.append_batch("text")):  # type: ignore[arg-type]
            with pytest.raises(logcore.InvalidRecordError, match="takes"):
                wrong()
        assert log.log_end_offset == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_who_follows_is_woken_by_what_becomes_visible(partition: Path, policy: str) -> None:
    with logcore.open(partition, create=True, durability=policy) as log:
        seen: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: [seen.put(record.value) for record in log.tail(0)])
        thread.start()
        try:
            for at in range(10):
                log.append(b"%d" % at)
                assert seen.get(timeout=60) == b"%d" % at
        finally:
            log.close()
            thread.join()


def test_a_close_without_room_for_indexes_is_a_close_after_which_more_is_checked() -> None:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, config={"index.interval.bytes": 60}, fs=disk)
    for at in range(20):
        log.append(b"%d" % at * 20)
    written = log.written_bytes
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.index", times=None))
    log.close()
    disk.faults = None
    assert written == len(disk.content(f"t-0/{0:020d}.log"))
    assert not disk.exists(checkpoint.CLEAN_SHUTDOWN)
    with logcore.open("t-0", config={"index.interval.bytes": 60}, fs=disk) as log:
        assert values(log) == [b"%d" % at * 20 for at in range(20)]


def test_tick_syncs_what_an_interval_has_left() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability="interval(1000)", fs=disk) as log:
        log.append(b"x")
        disk.advance(999)
        assert (log.tick(), log.durable_end_offset) == (False, 0)
        disk.advance(1)
        assert (log.tick(), log.durable_end_offset) == (True, 1)


def test_a_tick_with_nothing_to_do_says_so_and_writes_nothing() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        log.append(b"x")
        disk.advance(10_000)
        assert (log.tick(), log.recovery_point) == (True, 1)
        before = len(disk.operations)
        for _ in range(3):
            disk.advance(6_000)
            assert log.tick() is False
        assert len(disk.operations) == before


def test_the_recovery_point_follows_what_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an opening after a crash has a bounded part of the log to check, also where nobody calls tick()."""
    monkeypatch.setattr("logcore.log._RECOVERY_LAG_BYTES", 1_000)
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        for at in range(1, 31):
            log.append(b"x" * 232)  # 300 bytes
            assert log.recovery_point == at // 4 * 4, at  # 1,200 bytes are the first above the lag of 1,000
        noted = checkpoint.read_offsets(disk, ".", checkpoint.RECOVERY_POINT)
        assert noted == {("t", 0): log.recovery_point} != {("t", 0): 0}


@pytest.mark.parametrize("truncates", [True, False])
def test_the_indexes_reach_their_files_with_the_recovery_point(
    monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    """So that an opening after a crash, and readers in other processes, find their way without a walk over all."""
    monkeypatch.setattr("logcore.log._RECOVERY_LAG_BYTES", 1_000)
    disk, config = SimulatedDisk(), {"index.interval.bytes": 100}
    log = logcore.open("t-0", create=True, config=config, fs=disk)
    for _ in range(3 if truncates else 20):
        log.append(b"x" * 232)
    if truncates:
        log.truncate(1)
        for _ in range(20):
            log.append(b"x" * 232)
    disk.kill()
    assert len(disk.content(f"t-0/{0:020d}.index")) >= 10 * 8
    with logcore.open("t-0", config=config, fs=disk) as log:
        assert log._active.is_resumed
        assert log.append(b"next").offset == 20 + truncates


def test_an_abort_is_indexed_with_what_was_open_beside_it() -> None:
    """And one without a transaction is not: Kafka's readers leave out what the file names."""
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        for producer_id in (1, 2, 3):
            batch = encode(
                [(b"k", b"v")], producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True
            )
            log.append_batch(batch)
        log.end_transaction(9, 0, commit=False)
        assert not disk.exists(f"t-0/{0:020d}.txnindex")
        log.end_transaction(3, 0, commit=False)
        log.end_transaction(1, 0, commit=False)
        log.end_transaction(2, 0, commit=True)
        log.end_transaction(1, 0, commit=False)
    entries = np.frombuffer(disk.content(f"t-0/{0:020d}.txnindex"), TXN_ENTRY)
    assert entries.tolist() == [(0, 3, 2, 4, 0), (0, 1, 0, 5, 1)]


def test_an_index_of_aborted_transactions_that_are_not_there_goes() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        log.append(b"x")
        disk.kill()
    path = f"t-0/{0:020d}.txnindex"
    disk.replace(path, np.array([(0, 7, 0, 0, 0)], TXN_ENTRY).tobytes())
    with logcore.open("t-0", fs=disk):
        assert not disk.exists(path)


def test_what_a_rewriting_could_not_remove_is_not_in_the_way_of_the_next() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        disk.faults = FaultPlan(Fault("unlink", errno.EIO, path="*.cleaned", times=None))
        with log.rewriting() as view:
            view.create(0)
        disk.faults = None
        assert disk.exists(f"t-0/{0:020d}.log.cleaned")
        with log.rewriting() as view:
            view.create(0)
        assert not [path for path in disk.files() if path.endswith(".cleaned")]


def test_an_append_that_is_on_disk_succeeds_though_the_log_was_closed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("logcore.log._RECOVERY_LAG_BYTES", -1)  # each append wants to move the recovery point
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk)
    lock, wait = log._lock, log._commit.wait

    class Late:
        """The log's lock, which another thread gets first: it closes the log."""

        def __enter__(self) -> None:
            log._lock = lock
            log.close()
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    def synced(target: int) -> None:
        wait(target)
        log._lock = Late()  # type: ignore[assignment]

    monkeypatch.setattr(log._commit, "wait", synced)
    assert log.append(b"x") == (0, 0, disk.now_ms(), "disk")
    assert log.is_closed
    with logcore.open("t-0", fs=disk) as log:
        assert (log.recovery_point, values(log)) == (1, [b"x"])


def test_a_failed_seal_refuses_writes_unless_there_was_no_room() -> None:
    for code, goes_on in ((errno.ENOSPC, True), (errno.EIO, False)):
        disk = SimulatedDisk()
        with logcore.open("t-0", create=True, fs=disk) as log:
            log.append(b"x")
            with log.adopting() as adoption, pytest.raises(logcore.LogcoreError):
                disk.faults = FaultPlan(Fault("pwrite", code, path="*index", times=None))
                adoption.seal()
            disk.faults = None
            assert log.has_failed is not goes_on
            if goes_on:
                assert log.append(b"y").offset == 1
            else:
                with pytest.raises(logcore.LogFailedError):
                    log.append(b"y")
            assert values(log)[0] == b"x"


@pytest.mark.parametrize("path", ["orders\0-0", "\ud800-0", b"orders-0"])
def test_what_no_file_system_can_hold_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for read_only in (True, False):
        with pytest.raises(logcore.InvalidNameError):
            logcore.open(path, create=not read_only, read_only=read_only)
    assert not list(tmp_path.iterdir())


def test_the_table_of_a_log_follows_it(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        table = log.table()
        for value in (b"old", b"new"):
            log.append(value, key=b"k")
            assert dict(table) == {b"k": value}


#: Every call that may change a log, and what it takes to get as far as being refused.
CHANGES: dict[str, Callable[[logcore.Log], object]] = {
    "append": lambda log: log.append(b"y"),
    "append_many": lambda log: log.append_many([(None, b"y")]),
    "append_columns": lambda log: log.append_columns(values=(b"y", np.array([0, 1]))),
    "append_batch": lambda log: log.append_batch(encode([(None, b"y")])),
    "end_transaction": lambda log: log.end_transaction(1, 0, commit=True),
    "begin_epoch": lambda log: log.begin_epoch(1),
    "truncate": lambda log: log.truncate(0),
    "truncate_to_epoch": lambda log: log.truncate_to_epoch(0, 0),
    "delete_records": lambda log: log.delete_records(1),
    "retain": lambda log: log.retain(segments=1),
    "retention_facts": lambda log: log.retention_facts(),
    "reconfigure": lambda log: log.reconfigure({}),
    "roll": lambda log: log.roll(),
    "flush": lambda log: log.flush(),
    "tick": lambda log: log.tick(),
    "adopting": lambda log: log.adopting().__enter__(),
    "rewriting": lambda log: log.rewriting().__enter__(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("why", ["closed", "read only", "forked", "failed"])
def test_a_log_that_may_not_be_written_refuses_every_change(change: str, why: str) -> None:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, durability="os", fs=disk)
    log.append(b"x")
    expected: type[logcore.LogcoreError] = logcore.LogFailedError
    if why == "failed":
        disk.faults = FaultPlan(Fault("fdatasync", errno.EIO))
        with pytest.raises(logcore.DurabilityUnknownError):
            log.flush()
    elif why == "forked":
        disk.forks += 1
        expected = logcore.ForkedWriterError
    else:
        log.close()
        log.close()
        expected = logcore.LogClosedError
        if why == "read only":
            log, expected = logcore.open("t-0", read_only=True, fs=disk), logcore.ReadOnlyLogError
    before = disk.files()
    with pytest.raises(expected):
        CHANGES[change](log)
    assert disk.files() == before
    disk.forks = 0
    log.close()


def test_a_reader_knows_epochs_and_the_recovery_point_as_its_writer_noted_them(partition: Path) -> None:
    with logcore.open(partition, create=True) as log, logcore.open(partition, read_only=True) as reader:
        log.append(b"one")
        log.begin_epoch(4)
        log.append(b"two")
        log.flush()
        reader.refresh()
        for asked in range(6):
            assert reader.end_of_epoch(asked) == log.end_of_epoch(asked)
        assert reader.leader_epoch == log.leader_epoch == 4
        assert reader.recovery_point == log.recovery_point
        (partition / "leader-epoch-checkpoint").unlink()
        assert reader.end_of_epoch(0) == (0, 1) and reader.leader_epoch == 4, "by the batches"


def test_a_closed_log_is_not_read(partition: Path) -> None:
    log = logcore.open(partition, create=True)
    log.close()
    for call in (lambda: log.read(0), log.scan, lambda: log.get(0), lambda: log.batches(0), log.tail):
        with pytest.raises(logcore.LogClosedError):
            call()


def test_a_log_left_open_warns(partition: Path) -> None:
    log = logcore.open(partition, create=True)
    with pytest.warns(ResourceWarning, match="was not closed"):
        log.__del__()
    log.close()


# -- many threads --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["group", "always", "every(7)"])
def test_threads_append_without_loss_and_in_their_own_order(partition: Path, policy: str) -> None:
    def work(name: int) -> None:
        for at in range(30):
            receipts[name].append(log.append(b"%d" % at, key=b"%d" % name).offset)

    with logcore.open(partition, create=True, config={"segment.bytes": 4000}, durability=policy) as log:
        receipts: list[list[int]] = [[] for _ in range(8)]
        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(offset for one in receipts for offset in one) == list(range(240))
        found = {record.offset: (record.key, record.value) for record in log.read(0)}
        for name, offsets in enumerate(receipts):
            assert offsets == sorted(offsets)
            assert [found[offset] for offset in offsets] == [(b"%d" % name, b"%d" % at) for at in range(30)]


def test_readers_run_while_a_writer_rolls(partition: Path) -> None:
    def read() -> None:
        while not done.is_set():
            for record in log.read(max(0, log.high_watermark - 8)):
                if record.value != b"%d" % record.offset:
                    wrong.append(record)
            done.wait(0.0001)  # lets the writer have the interpreter

    done, wrong = threading.Event(), []
    with logcore.open(partition, create=True, config=SMALL, durability="os") as log:
        log.append(b"0")
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for at in range(1, 150):
            log.append(b"%d" % at)
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []


# -- against a list --------------------------------------------------------------------------


class LogAsList(RuleBasedStateMachine):
    """A log is a list whose front may be dropped: every rule is done to both."""

    @initialize(policy=st.sampled_from(POLICIES), codec=st.sampled_from(["producer", "lz4"]))
    def start(self, policy: str, codec: str) -> None:
        import tempfile

        self.directory = tempfile.mkdtemp()
        self.policy = policy
        self.config = {**SMALL, "compression.type": codec}
        self.model: list[bytes] = []
        self.first = 0
        self.log = logcore.open(f"{self.directory}/m-0", create=True, config=self.config, durability=policy)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()
            shutil.rmtree(self.directory)

    @rule(value=st.binary(max_size=30))
    def append(self, value: bytes) -> None:
        assert self.log.append(value, key=b"k").offset == len(self.model)
        self.model.append(value)

    @rule(rows=st.lists(st.binary(max_size=30), max_size=40))
    def append_many(self, rows: list[bytes]) -> None:
        receipt = self.log.append_many([(None, row) for row in rows])
        assert (receipt.offset, receipt.last_offset) == (len(self.model), len(self.model) + len(rows) - 1)
        self.model += rows

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.first, len(self.model)))
        self.log.truncate(offset)
        del self.model[offset:]

    @rule(data=st.data())
    def delete_records(self, data: st.DataObject) -> None:
        self.log.flush()
        self.first = data.draw(st.integers(self.first, len(self.model)))
        self.log.delete_records(self.first)

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = logcore.open(f"{self.directory}/m-0", config=self.config, durability=self.policy)
        assert self.log.recovery_report is not None
        assert self.log.recovery_report.cut_position is None

    @precondition(lambda self: hasattr(self, "log"))
    @invariant()
    def reads_agree(self) -> None:
        self.log.flush()
        want = list(enumerate(self.model))[self.first :]
        assert (self.log.log_start_offset, self.log.log_end_offset) == (self.first, len(self.model))
        assert [(record.offset, record.value) for record in self.log.read(self.first)] == want
        with logcore.open(f"{self.directory}/m-0", read_only=True) as reader:
            assert [(record.offset, record.value) for record in reader.read(self.first)] == want


TestLogAsList = LogAsList.TestCase
TestLogAsList.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_segments_that_were_read_take_no_descriptors(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True, config={"segment.bytes": 2_000}, durability="os") as log:
        for number in range(300):
            log.append(b"%d" % number * 300)
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        assert log.statistics().segments > 100
        assert len(list(log.read(0))) == 300
        assert len(log.stored(0, max_bytes=1 << 20)) > 100
        after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        assert after <= before + 2


@pytest.mark.parametrize("times", [[100, 50, 50], [50, 100, 70], [100, 100, 1]])
def test_times_of_what_was_deleted_are_not_found(tmp_path: Path, times: list[int]) -> None:
    """The largest time of a segment may be that of a record below the log start; later segments are looked at too."""
    with logcore.open(tmp_path / "t-0", create=True) as log:
        for time in times:
            log.append(b"v", timestamp_ms=time)
            log.roll()
        log.append(b"end", timestamp_ms=60)
        log._log_start = 1  # as a kill leaves it between the note of the new start and the first file that goes
        left = [*times[1:], 60]
        for asked in (1, 50, 60, 100):
            expected = next((1 + at for at, time in enumerate(left) if time >= asked), None)
            assert log.offset_for_timestamp(asked) == expected
        assert log.newest() == (1 + left.index(max(left)), max(left))


def test_a_disk_that_fails_to_tell_is_no_empty_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append(b"v")

    def failing(path: object, **more: object) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        patch.setattr(os, "lstat", failing)
        for read_only in (False, True):
            with pytest.raises(logcore.StorageReadError):
                logcore.open(tmp_path / "t-0", read_only=read_only)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_no_room_for_the_note_of_the_durable_end_hides_nothing(end: str) -> None:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, durability="os", fs=disk)
    log.append(b"v")
    getattr(log if end == "close" else disk, end)()
    paths = ("*logcore.durable*", "*logcore.reserve")
    disk.faults = FaultPlan(*(Fault("pwrite", errno.ENOSPC, path=path, times=None) for path in paths))
    with pytest.raises(logcore.DiskFullError):
        logcore.open("t-0", durability="group", fs=disk)
    with logcore.open("t-0", read_only=True, fs=disk) as reader:
        assert [record.value for record in reader.read(0)] == [b"v"]


def test_what_was_staged_comes_behind_all_that_is_there(tmp_path: Path) -> None:
    """Also behind an empty active segment, which goes, and segments before it, which stay."""
    path = create(tmp_path / "data", STAGED)
    with logcore.open_dir(path) as directory:
        for at in range(3):
            directory.partition("t", 0).roll()
            directory.partition("t", 0).append(b"%d" % at)
        directory.partition("t", 0).roll()
    publish(path, "more", config=STAGED, count=300)
    with logcore.open_dir(path) as directory:
        log = directory.partition("t", 0)
        expected = [b"before", b"0", b"1", b"2", *staged_rows("more", 0, 300)]
        assert values(log) == expected
        assert [record.offset for record in log.read(0)] == list(range(304))
        log.append(b"after")
        before = log.statistics()
        publish(path, "again", version=1, config=STAGED, count=300)
        directory.tick()
        after = log.statistics()
        assert (after.appends - before.appends, after.records_appended - before.records_appended) == (1, 300)
        assert after.bytes_appended - before.bytes_appended == after.size_bytes - before.size_bytes
        assert after.rolls - before.rolls == after.segments - before.segments > 0
    with logcore.open(path / "t-0", read_only=True) as reader:
        assert values(reader) == [*expected, b"after", *staged_rows("again", 0, 300)]


@pytest.mark.parametrize("checks", [{}, {"message.timestamp.after.max.ms": "3600000"}])
def test_a_datetime_is_a_timestamp_everywhere(tmp_path: Path, checks: dict[str, str]) -> None:
    moment = datetime(2023, 11, 14, 22, 13, 20, 1999, tzinfo=UTC)  # 1_700_000_000_001.999 ms: cut, as it has passed
    elsewhere = moment.astimezone(timezone(timedelta(hours=5)))
    with logcore.open(tmp_path / "t-0", create=True, config=checks) as log:
        log.append(b"a", timestamp_ms=moment)
        log.append_many([(None, b"b", (), elsewhere), (None, b"c", (), np.datetime64("2023-11-14T22:13:20.001"))])
        assert [record.timestamp_ms for record in log.read(0)] == [1_700_000_000_001] * 3
        assert log.offset_for_timestamp(moment) == log.offset_for_timestamp(elsewhere) == 0
        assert log.offset_for_timestamp(moment + timedelta(days=1)) is None
        for wrong in (moment.replace(tzinfo=None), 1.5, "now", 1 << 63, np.datetime64("NaT")):
            for call in (
                lambda wrong=wrong: log.append(b"x", timestamp_ms=wrong),
                lambda wrong=wrong: log.append_many([(None, b"x", (), wrong)]),
                lambda wrong=wrong: log.offset_for_timestamp(wrong),
            ):
                with pytest.raises(logcore.InvalidTimestampError, match="a datetime with a time zone"):
                    call()
        assert log.log_end_offset == 3


def test_a_directory_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "t-0", tmp_path / "file" / "deeper" / "t-0"):
        with pytest.raises(logcore.StorageWriteError, match="the directory cannot be made"):
            logcore.open(path, create=True)
    for path in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(logcore.StorageWriteError, match="the directory cannot be made"):
            logcore.open_dir(path, create=True)


def test_errors_say_only_what_is_known() -> None:
    assert str(logcore.LogcoreError("x", expected=1, found=2)) == "x (expected 1, found 2)"
    assert str(logcore.LogcoreError("x", expected=1)) == "x (expected 1)"
    assert str(logcore.LogcoreError("x", found=2)) == "x (found 2)"
    assert str(logcore.LogcoreError("x")) == "x"


def test_a_tail_does_not_go_on_with_what_took_the_place_of_its_records(partition: Path) -> None:
    """Truncated below where it has read, and grown beyond that before it looks: other records have the next offsets."""
    with logcore.open(partition, create=True, durability="os") as log:
        for number in range(5):
            log.append(b"%d" % number)
        records = log.tail(0, timeout=0)
        assert [next(records).offset for _ in range(5)] == [0, 1, 2, 3, 4]
        log.truncate(3)
        for _ in range(4):
            log.append(b"another")
        with pytest.raises(logcore.OffsetOutOfRangeError):
            next(records)
