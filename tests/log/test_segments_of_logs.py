"""Segments of a log: rolls, indexes, recovery points, and reads across segments."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import logcore
from logcore.config import Durability
from logcore.fs import OsFS
from logcore.index import TXN_ENTRY, read_front
from logcore.kernels import layout
from logcore.reader import avoid_mapping, segments_between
from logcore.recordbatch import encode, read_batches
from logcore.segment import ActiveSegment, GrowingSegment, PreadSegment, Segment
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from support.logs import SMALL, T0, describe_operations, segments, values

# -- segments --------------------------------------------------------------------------


def test_segment_rolls_by_size(partition: Path) -> None:
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
def test_segment_rolls_by_age_of_its_records(partition: Path, first: int) -> None:
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


def test_segment_of_records_without_timestamps_rolls_by_its_own_age() -> None:
    disk = SimulatedDisk()
    timeless = encode([(None, b"x", (), -1)])
    with logcore.open("t-0", create=True, config={"segment.ms": 1000}, fs=disk) as log:
        for wait_ms, segments_then in ((0, 1), (1000, 1), (1, 2), (1001, 3)):
            disk.advance(wait_ms)
            log.append_batch(timeless)
            assert log.statistics().segments == segments_then, wait_ms
        log.append(b"from 1970", timestamp_ms=0)
        log.roll()
        log.append(b"from 1970", timestamp_ms=0)
        disk.advance(1001)
        log.append(b"from 1970", timestamp_ms=1000)
        assert log.statistics().segments == 4, "0 is a timestamp"
        log.truncate(4)
    with logcore.open("t-0", config={"segment.ms": 1000}, fs=disk) as log:
        assert [record.timestamp_ms for record in log.read(0)] == [-1] * 4
        assert log.newest() is None


@pytest.mark.parametrize("setting", ["segment.ms", "max.compaction.lag.ms"])
@pytest.mark.parametrize("action", ["tick", "append", "reopen"])
def test_compacted_log_rolls_within_its_compaction_lag(
    setting: str, action: str
) -> None:
    """The active segment is never compacted, so that it must roll even if the log is
    reopened repeatedly.
    """
    disk = SimulatedDisk(now_ms=1_700_000_000_000)
    config = {"cleanup.policy": "compact", setting: 500}
    log = logcore.open("t-0", create=True, config=config, fs=disk)
    log.append(b"old", key=b"k")
    for _ in range(3):
        disk.advance(200)
        if action == "append":
            log.append(b"new", key=b"k")
        if action == "reopen":
            log.close()
            log = logcore.open("t-0", config=config, fs=disk)
        if action != "append":
            log.tick()
    assert log.statistics().segments == 2
    log.close()


def test_log_of_records_without_timestamps_opens_from_its_index() -> None:
    disk = SimulatedDisk()
    config = {"index.interval.bytes": 60}
    with logcore.open("t-0", create=True, config=config, fs=disk) as log:
        for _ in range(20):
            log.append_batch(encode([(None, b"x" * 50, (), -1)]))
    with logcore.open("t-0", config=config, fs=disk) as log:
        assert log.host.writer.active.is_resumed
        assert (log.log_end_offset, log.newest()) == (20, None)
        log.reconfigure({**config, "segment.ms": 1000})
        log.append(b"from 1970", timestamp_ms=1000)
        assert log.statistics().segments == 1, "the segment contains no older record"
        log.truncate(20)
        assert log.append(b"young", timestamp_ms=T0).offset == 20
        assert log.newest() == (20, T0)
        assert log.offset_for_timestamp(T0) == 20


@pytest.mark.parametrize(
    ("step_ms", "records_per_segment"), [(1, 4), (0, 7)], ids=["times", "offsets"]
)
def test_segment_rolls_when_an_index_is_full(
    partition: Path, step_ms: int, records_per_segment: int
) -> None:
    """An index file holds 6 offset entries, or 4 time entries. The last time entry is
    written at the roll. The first batch of a segment gets no entry.
    """
    with logcore.open(
        partition,
        create=True,
        config={"segment.index.bytes": 48, "index.interval.bytes": 0},
    ) as log:
        for number in range(28):
            log.append(b"x", timestamp_ms=T0 + number * step_ms)
        assert segments(partition) == list(range(0, 28, records_per_segment))
        assert values(log) == [b"x"] * 28


def test_batch_larger_than_a_segment_is_refused(partition: Path) -> None:
    batch = encode([(None, b"x" * 500)])
    with logcore.open(
        partition, create=True, config={"segment.bytes": len(batch)}
    ) as log:
        for number in range(2):
            assert log.append_batch(batch).offset == number
        with pytest.raises(logcore.SegmentTooSmallError):
            log.append_batch(encode([(None, b"x" * 501)]))
        assert (segments(partition), log.log_end_offset) == ([0, 1], 2)


@pytest.mark.parametrize("operation", ["pwrite", "create"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_partial_append_on_a_full_disk_can_be_continued(
    operation: str, nth: int
) -> None:
    """Batches in the segment that was active before the append are removed. Batches in
    later segments are kept.
    """
    disk = SimulatedDisk()
    config = {"segment.bytes": 1000, "batch.size": 300}
    with logcore.open(
        "t-0", create=True, durability="os", config=config, fs=disk
    ) as log:
        aborted = encode(
            [(b"k", b"a")],
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
            transactional=True,
        )
        log.append_batch(aborted)
        log.end_transaction(7, 0, commit=False)
        rows = [(None, b"%d" % number * 200) for number in range(10)]
        size = log.statistics().size_bytes
        disk.faults = FaultPlan(Fault(operation, errno.ENOSPC, path="*.log", at=nth))
        with pytest.raises(logcore.DiskFullError):
            log.append_many(rows)
        stored = log.log_end_offset - 2
        if log.statistics().segments == 1:
            assert (
                stored,
                log.statistics().size_bytes,
                log.host.writer.written_bytes,
            ) == (
                0,
                size,
                size,
            )
        log.append_many(rows[stored:])
        log.roll()
        assert values(log, 2) == [value for _, value in rows]
        assert [
            record.value for record in log.read(0, isolation="read_committed")
        ] == values(log, 2)
    assert len(disk.content(f"t-0/{0:020d}.txnindex")) == TXN_ENTRY.itemsize


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["one", "many", "batch", "abort"]), st.integers(0, 2)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["os", "always", "group"]),
)
@settings(max_examples=40)
@example(
    [("batch", 0), ("batch", 1), ("abort", 1), ("abort", 0), ("many", 1), ("one", 0)],
    "os",
)
@example(
    [("batch", 0), ("batch", 2), ("abort", 2), ("abort", 0), ("many", 2), ("one", 0)],
    "os",
)
def test_failed_append_changes_no_file(
    calls: list[tuple[str, int]], policy: str
) -> None:
    """The files are the same as without the failed append. The number of a call is 0 if
    it succeeds, 1 if the disk is full, and 2 if it is interrupted after its bytes were
    written.
    """

    def interrupt(*_: object) -> None:
        patch.undo()
        raise KeyboardInterrupt

    def files_after_calls(*, with_failures: bool) -> dict[str, bytes]:
        disk = SimulatedDisk()
        config = {"index.interval.bytes": 100, "batch.size": 200}
        sequence = 1
        with logcore.open(
            "t-0", create=True, durability=policy, config=config, fs=disk
        ) as log:
            producer = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
            log.append_batch(encode([(b"k", b"v")], base_sequence=0, **producer))
            log.end_transaction(7, 0, commit=False)
            for index, (call, failure) in enumerate(calls):
                rows = [(b"k%d" % index, b"x" * 90, (), T0 + index)] * 9
                batch = encode(rows[:2], base_sequence=sequence, **producer)
                call_log = {
                    "one": lambda: log.append(b"v", timestamp_ms=T0 + index),  # noqa: B023
                    "many": lambda: log.append_many(rows),  # noqa: B023
                    "batch": lambda: log.append_batch(batch),  # noqa: B023
                    "abort": lambda: log.end_transaction(7, 0, commit=False),
                }[call]
                if not failure:
                    call_log()
                    sequence += 2 * (call == "batch")
                elif with_failures:
                    before = log.statistics()
                    if failure == 1:
                        disk.faults = FaultPlan(
                            Fault("pwrite", errno.ENOSPC, path="*.log")
                        )
                    else:
                        patch.setattr(ActiveSegment, "record_batch", interrupt)
                        patch.setattr(ActiveSegment, "record_batches", interrupt)
                    with pytest.raises(
                        logcore.DiskFullError if failure == 1 else KeyboardInterrupt
                    ):
                        call_log()
                    assert (
                        attrs.evolve(log.statistics(), appends=before.appends) == before
                    )
                    disk.faults = None
        # Without a snapshot of producers, an opening only scans batch headers.
        files = disk.files()
        return {
            path: content
            for path, content in files.items()
            if not path.endswith(".snapshot")
        }

    with pytest.MonkeyPatch.context() as patch:
        assert files_after_calls(with_failures=True) == files_after_calls(
            with_failures=False
        )


def test_writes_are_as_large_as_the_unsynced_limit_of_the_policy() -> None:
    """A write is larger only if it contains a single batch, because a batch is never
    split.
    """
    rows = [(None, b"x" * 200)] * 10
    for policy, max_unsynced in (
        ("os", 1 << 30),
        ("every(2)", 1 << 30),
        (Durability("group", max_bytes=600), 600),
        ("always", 1),
    ):
        disk = SimulatedDisk()
        with logcore.open(
            "t-0", create=True, durability=policy, config={"batch.size": 1}, fs=disk
        ) as log:
            before = len(disk.operations)
            log.append_many(rows)
            size = log.statistics().size_bytes // 10
        batches_per_write = max(1, max_unsynced // size)
        writes = [
            operation
            for operation in disk.operations[before:]
            if operation == ("pwrite", f"/t-0/{0:020d}.log")
        ]
        assert len(writes) == -(-10 // batches_per_write), policy


def test_each_call_does_only_the_expected_disk_operations() -> None:
    """Recovery from a crash between two operations relies on their order. Finished work
    is not repeated.
    """
    disk = SimulatedDisk()
    config = {"index.interval.bytes": 0, "file.delete.delay.ms": 0}
    log = logcore.open("t-0", create=True, config=config, fs=disk)

    def batch_of_producer(sequence: int) -> bytes:
        return encode(
            [(b"k", b"")],
            producer_id=7,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=True,
        )

    synced = "; fdatasync {}.log; pwrite logcore.durable"
    point = "replace /recovery-point-offset-checkpoint"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: log.append(b"x"), "pwrite 000.log" + synced.format("000")),
        (
            lambda: log.append(b"x", durability="os"),
            "pwrite 000.log; pwrite 000.index; pwrite 000.timeindex",
        ),
        (log.flush, synced.format("000")[2:]),
        (log.flush, ""),
        (
            log.roll,
            "fsync 000.log; fsync 000.index; fsync 000.timeindex; create 002.log; sync_dir /t-0; create 002.index; "
            f"create 002.timeindex; {point}; create 000.seal; pwrite 000.seal",
        ),
        (log.roll, ""),
        (
            lambda: log.append_batch(batch_of_producer(0)),
            "replace logcore.policy; pwrite 002.log" + synced.format("002"),
        ),
        (
            lambda: log.append_batch(batch_of_producer(1)),
            "pwrite 002.log; pwrite 002.index" + synced.format("002"),
        ),
        (
            lambda: log.end_transaction(7, 0, commit=False),
            "pwrite 002.log; create 002.txnindex; pwrite 002.txnindex"
            + synced.format("002"),
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
            "unlink logcore.durable; replace /logcore.clock; replace /.kafka_cleanshutdown",
        ),
    ]
    for index, (call, expected) in enumerate(calls):
        before = len(disk.operations)
        call()
        assert (
            index,
            sorted(describe_operations(disk.operations[before:]).split("; ")),
        ) == (
            index,
            sorted(expected.split("; ")),
        )
        # No caller may rely on the order of names in a listing.
        if ".deleted" not in expected:
            assert describe_operations(disk.operations[before:]) == expected, index


def test_reopening_a_cleanly_closed_log_writes_almost_nothing() -> None:
    """Only the clean shutdown marker and the durable end file are replaced."""
    disk = SimulatedDisk()
    for _ in range(3):
        before = len(disk.operations)
        files = disk.files()
        with logcore.open(
            "t-0", create=True, config={"index.interval.bytes": 0}, fs=disk
        ) as log:
            if not files:
                log.append_batch(
                    encode(
                        [(None, b"x")], producer_id=7, producer_epoch=0, base_sequence=0
                    )
                )
                for number in range(5):
                    log.append(b"%d" % number)
    assert disk.files() == files
    paths = [
        operation.path.removesuffix(".tmp") for operation in disk.operations[before:]
    ]
    assert set(paths) == {"/", "/.kafka_cleanshutdown", "/t-0", "/t-0/logcore.durable"}
    assert len(paths) <= 14


def test_snapshots_are_kept_for_each_segment_and_the_log_end() -> None:
    disk = SimulatedDisk()
    for number in range(6):
        with logcore.open("t-0", create=True, fs=disk) as log:
            log.append_batch(
                encode(
                    [(None, b"x")],
                    producer_id=7,
                    producer_epoch=0,
                    base_sequence=number,
                )
            )
            if number == 3:
                log.roll()
    names = [path for path in disk.files() if path.endswith(".snapshot")]
    assert sorted(names) == [f"/t-0/{offset:020d}.snapshot" for offset in (4, 6)]
    with logcore.open("t-0", fs=disk) as log:
        log.truncate(5)
        assert not disk.exists(f"t-0/{6:020d}.snapshot")
        log.append_batch(
            encode([(None, b"x")], producer_id=7, producer_epoch=0, base_sequence=5)
        )


def test_log_file_is_deleted_before_its_indexes() -> None:
    """A .log file without its .txnindex would make Kafka return aborted records."""
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        for number in range(3):
            log.append_batch(
                encode(
                    [(None, b"x")],
                    producer_id=7,
                    producer_epoch=0,
                    base_sequence=number,
                    transactional=True,
                )
            )
            log.end_transaction(7, 0, commit=False)
            log.roll()
        before = len(disk.operations)
        log.delete_records(4)
        renamed = [
            operation.path
            for operation in disk.operations[before:]
            if operation.name == "rename"
        ]
        assert len(renamed) > 2 * len([path for path in renamed if ".log" in path])
        for base in (0, 2):
            assert next(path for path in renamed if f"{base:020d}" in path).endswith(
                (".log", ".log.deleted")
            )


def test_full_index_remains_full_after_reopening_and_reconfiguring(
    tmp_path: Path,
) -> None:
    """With entries beyond segment.index.bytes, Kafka would not open the index."""
    config = {"segment.index.bytes": 24, "index.interval.bytes": 0}
    for record_count in range(1, 8):
        path = tmp_path / f"t-{record_count}"
        with logcore.open(path, create=True, config=config) as log:
            for number in range(record_count):
                log.append(b"x", timestamp_ms=T0 + number)
        with logcore.open(path, config=config) as log:
            log.append(b"x", timestamp_ms=T0 + record_count)
            log.reconfigure({**config, "segment.bytes": 1 << 20})
            for number in range(record_count + 1, 8):
                log.append(b"x", timestamp_ms=T0 + number)
            assert values(log) == [b"x"] * 8
            log.roll()
        assert {index.stat().st_size <= 24 for index in path.glob("*index")} == {
            True
        }, record_count


def test_segment_rolls_before_its_relative_offsets_overflow(partition: Path) -> None:
    partition.mkdir(parents=True)
    (partition / f"{0:020d}.log").write_bytes(
        encode([(None, b"far")], base_offset=2**31 - 2, leader_epoch=0)
    )
    with logcore.open(partition) as log:
        log.append(b"last that fits")
        log.append(b"first that does not")
        assert segments(partition) == [0, 2**31]
        assert [record.offset for record in log.read(0)] == [
            2**31 - 2,
            2**31 - 1,
            2**31,
        ]


def test_large_append_rolls_by_age_between_its_batches() -> None:
    policy = Durability("group", max_bytes=600)
    with logcore.open(
        "t-0",
        create=True,
        durability=policy,
        config={"segment.ms": 1000, "batch.size": 1},
        fs=SimulatedDisk(),
    ) as log:
        # Three batches at a time may be unsynced.
        times = [
            T0,
            T0,
            T0,
            T0 + 5000,
            T0,
            T0,
        ]
        log.append_many([(None, b"x" * 120, (), time) for time in times])
        assert [segment.base_offset for segment in segments_between(log, 0, 6)] == [
            0,
            3,
        ]


@pytest.mark.parametrize("rolls", [True, False])
def test_index_files_contain_last_offsets_and_batch_positions(
    partition: Path, rolls: bool
) -> None:
    with logcore.open(
        partition, create=True, config={"index.interval.bytes": 100}
    ) as log:
        for number in range(10):
            log.append(b"x" * 32, timestamp_ms=T0 + number)
        if rolls:
            log.roll()
    entries = np.fromfile(partition / f"{0:020d}.index", ">i4").reshape(-1, 2).tolist()
    assert entries == [[2, 200], [4, 400], [6, 600], [8, 800]]
    times = (partition / f"{0:020d}.timeindex").read_bytes()
    assert [
        int.from_bytes(times[position : position + 8], "big")
        for position in range(0, len(times), 12)
    ] == [
        T0 + 2,
        T0 + 4,
        T0 + 6,
        T0 + 8,
        T0 + 9,
    ]


def test_fetch_returns_the_stored_bytes_below_an_end(partition: Path) -> None:
    with logcore.open(partition, create=True, durability="os") as log:
        for number in range(5_000):
            log.append(b"%04d" % number, timestamp_ms=T0 + number)
        data = (partition / f"{0:020d}.log").read_bytes()
        step = len(data) // 5_000
        assert b"".join(log.stored(0, max_bytes=1 << 30)) == data, (
            "more batches than one walk step covers"
        )
        assert (
            b"".join(log.stored(10, 20, max_bytes=1 << 30))
            == data[10 * step : 20 * step]
        )
        assert b"".join(log.stored(0, 4_500, max_bytes=1 << 30)) == data[: 4_500 * step]
        assert log.stored(20, 20, max_bytes=1 << 30) == []
        assert b"".join(log.stored(7, max_bytes=1)) == data[7 * step : 8 * step], (
            "at least one batch"
        )
        assert log.stored(7, max_bytes=1, at_least_one=False) == []
        assert log.offset_for_timestamp(T0 + 4_999) == 4_999
        with (partition / f"{0:020d}.log").open("r+b") as file:
            file.seek(7 * step + 16)
            file.write(b"\x09")  # an invalid magic
        for _ in range(2):  # first growing, then sealed
            with pytest.raises(logcore.CorruptBatchError) as caught:
                log.stored(7, max_bytes=1 << 30)
            assert caught.value.position == 7 * step
            assert (
                b"".join(log.stored(5, max_bytes=1 << 30)) == data[5 * step : 7 * step]
            ), "only complete batches before the damage"
            log.roll()


@pytest.mark.parametrize("damaged_number", [0, 7, 4_000])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_fetch_error_contains_the_file_and_position_of_damage(
    partition: Path, is_sealed: bool, damaged_number: int
) -> None:
    """The search for the batch begins at different positions."""
    with logcore.open(partition, create=True, durability="os") as log:
        for number in range(5_000):
            log.append(b"%04d" % number)
        if is_sealed:
            log.roll()
        file = partition / f"{0:020d}.log"
        position = file.stat().st_size // 5_000 * damaged_number
        with file.open("r+b") as writer:
            writer.seek(position + 16)
            writer.write(b"\x09")  # an invalid magic
        with pytest.raises(logcore.CorruptBatchError) as caught:
            log.stored(damaged_number, max_bytes=1 << 30)
        assert (caught.value.path, caught.value.position) == (str(file), position)


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    is_sealed=st.booleans(),
    start_slot=st.integers(0, 40),
    end=st.integers(0, 40),
    max_bytes=st.integers(-1, 450),
    at_least_one=st.booleans(),
    tail=st.sampled_from([0, 5, 40]),
)
@example(
    sizes=[1, 2, 3],
    is_sealed=True,
    start_slot=0,
    end=9,
    max_bytes=1,
    at_least_one=True,
    tail=0,
)
@example(
    sizes=[1, 2, 3],
    is_sealed=False,
    start_slot=1,
    end=9,
    max_bytes=1,
    at_least_one=True,
    tail=0,
)
@example(
    sizes=[1, 2, 3],
    is_sealed=True,
    start_slot=2,
    end=9,
    max_bytes=1,
    at_least_one=True,
    tail=5,
)
@example(
    sizes=[1, 2, 3],
    is_sealed=False,
    start_slot=0,
    end=1,
    max_bytes=1,
    at_least_one=True,
    tail=5,
)
@example(
    sizes=[1, 2, 3],
    is_sealed=True,
    start_slot=3,
    end=9,
    max_bytes=1,
    at_least_one=True,
    tail=5,
)
@example(
    sizes=[1, 2, 3],
    is_sealed=False,
    start_slot=3,
    end=9,
    max_bytes=1,
    at_least_one=True,
    tail=5,
)
def test_fetch_returns_as_many_whole_batches_as_fit(
    sizes: list[int],
    is_sealed: bool,
    start_slot: int,
    end: int,
    max_bytes: int,
    at_least_one: bool,
    tail: int,
) -> None:
    """A fetch of one segment, which may end with a torn batch."""
    at_least_one &= max_bytes > 0
    data = b""
    starts = [0]
    for size in sizes:
        data += encode([(None, b"x" * (40 * size % 70))] * size, base_offset=starts[-1])
        starts.append(starts[-1] + size)
    batches = list(read_batches(data))
    path = f"t-0/{0:020d}.log"
    disk = SimulatedDisk({path: data + encode([(None, b"torn")])[:tail]})
    segment = Segment(disk, "t-0", 0) if is_sealed else GrowingSegment(disk, "t-0", 0)
    slot = min(start_slot, len(batches))  # the last slot belongs to the torn batch
    expected = b""
    for batch in batches[slot:]:
        is_first = at_least_one and not expected
        if batch.last_offset >= end or (
            len(expected) + batch.size_bytes > max_bytes and not is_first
        ):
            break
        expected += batch.data
    position = [*(batch.position for batch in batches), len(data)][slot]
    fetched, ends_at_file_end = segment.stored(
        position, max_bytes, end, at_least_one, lambda facts: None
    )
    assert (bytes(fetched), ends_at_file_end) == (
        expected,
        position + len(expected) == len(data) + tail,
    )


@given(
    sizes=st.lists(st.integers(0, 90), max_size=10),
    step_bytes=st.integers(1, 400),
    start=st.integers(0, 10),
    stop=st.none() | st.integers(0, 11),
    damage=st.none()
    | st.tuples(
        st.integers(0, 9), st.sampled_from([8, 16, 61]), st.sampled_from([0x01, 0x80])
    ),
    crc=st.booleans(),
)
def test_walk_of_a_growing_segment_equals_a_walk_of_a_mapping(
    sizes: list[int],
    step_bytes: int,
    start: int,
    stop: int | None,
    damage: tuple[int, int, int] | None,
    crc: bool,
) -> None:
    """The walks are equal for any read size, any end, and damage in the length, the
    magic or a record.
    """

    def walk(segment: Segment) -> tuple[list[Any], int, int]:
        steps = list(
            segment.walk(
                positions[first], crc=crc, stop=end_position, step_bytes=step_bytes
            )
        )
        return [row for headers, _, _ in steps for row in headers.tolist()], *steps[-1][
            1:
        ]

    data = bytearray()
    positions = [0]
    for index, size in enumerate(sizes):
        data += encode([(None, b"x" * size)], base_offset=index)
        positions.append(len(data))
    first = min(start, len(sizes))
    end_position = (
        None if stop is None else positions[max(first, min(stop, len(sizes)))]
    )
    if damage is not None and damage[0] < len(sizes):
        data[positions[damage[0]] + damage[1]] ^= damage[2]
    disk = SimulatedDisk({f"t-0/{0:020d}.log": bytes(data)})
    mapped = walk(Segment(disk, "t-0", 0))
    growing = walk(GrowingSegment(disk, "t-0", 0))
    assert growing == mapped
    if damage is None:
        rows, position, reason = growing
        end = len(data) if end_position is None else end_position
        assert [row[0] for row in rows] == [
            position
            for position in positions[:-1]
            if positions[first] <= position < end
        ]
        assert (position, reason) == (end, layout.WALK_END)


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=10),
    base=st.sampled_from([0, 1_000]),
    index_errors=st.none()
    | st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 0, 1, -1])), max_size=5
    ),
    file_states=st.lists(
        st.tuples(st.integers(0, 10), st.sampled_from([0, 0, 11, 40])), max_size=5
    ),
    seek_bytes=st.sampled_from([61, 100, 300]),
)
@example(
    counts=[1, 2, 1], base=0, index_errors=None, file_states=[(3, 0)], seek_bytes=300
)
@example(
    counts=[1] * 9,
    base=1_000,
    index_errors=[(2, 0), (4, 0), (7, 0)],
    file_states=[(9, 0), (3, 0), (6, 11)],
    seek_bytes=61,
)
@example(
    counts=[3] * 9,
    base=0,
    index_errors=[(2, 0), (4, 1), (7, -1)],
    file_states=[(9, 0), (3, 0), (6, 11)],
    seek_bytes=300,
)
def test_growing_segment_finds_every_existing_batch(
    counts: list[int],
    base: int,
    index_errors: list[tuple[int, int]] | None,
    file_states: list[tuple[int, int]],
    seek_bytes: int,
) -> None:
    """Each batch is found with any read size, any index, and after any change of its
    file. Each pair of `index_errors` is the slot of a batch with an index entry, and
    the error of the position in that entry. Each pair of `file_states` is the number of
    complete batches in the file, and the number of bytes of a torn batch after them.
    """
    name = f"t-0/{base:020d}"
    data = b""
    batches = list[tuple[int, int]]()
    end = base
    for count in counts:
        data += encode([(None, b"x" * 50)] * count, base_offset=end)
        end += count
        batches.append((end - 1, len(data)))
    entries = [
        (batches[slot][0] - base, batches[slot - 1][1] + error)
        for slot, error in index_errors or ()
        if 0 < slot < len(batches)
    ]
    disk = SimulatedDisk({f"{name}.log": b""})
    if index_errors is not None:
        disk.put(
            f"{name}.index",
            b"".join(struct.pack(">ii", *entry) for entry in sorted(entries))
            + bytes(16),
        )
    segment = GrowingSegment(disk, "t-0", base)
    handle = disk.open(f"{name}.log", write=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logcore.segment._SEEK_BYTES", seek_bytes)
        for number, torn in file_states:
            existing = batches[:number]
            size = existing[-1][1] if existing else 0
            disk.truncate(handle, 0)
            disk.pwrite(handle, data[: size + torn], 0)
            assert segment.refresh() == len(data[: size + torn])
            assert segment.next_offset() == (existing[-1][0] + 1 if existing else base)
            for offset in range(base - 1, end + 2):
                starts = [0, *(end_position for _, end_position in existing)]
                slot = next(
                    (
                        candidate_slot
                        for candidate_slot, (last_offset, _) in enumerate(existing)
                        if last_offset >= offset
                    ),
                    len(existing),
                )
                assert segment.find(offset) == starts[slot] or (
                    torn and slot == len(existing) and segment.find(offset) >= size
                )
                record = segment.read_one(offset, segment.next_offset(), True)
                assert (
                    isinstance(record, int)
                    or record.offset == max(offset, base) <= existing[-1][0]
                )
                # The read must also contain the next header or the end of the file.
                if (
                    slot < len(existing)
                    and min(starts[slot + 1] + layout.HEADER_SIZE, size + torn)
                    <= seek_bytes
                    and not entries
                ):
                    assert not isinstance(record, int), (
                        "the first read contains the record"
                    )
                if slot < len(existing) and not entries:
                    assert segment.batch(starts[slot]).last_offset == existing[slot][0]  # type: ignore[union-attr]
    disk.close(handle)
    assert disk.open_handles == [f"{name}.log"]


class CountingDisk(SimulatedDisk):
    """A disk that counts its mappings in `maps`."""

    maps = 0

    def map(self, handle: int, size: int) -> memoryview:
        self.maps += 1
        return super().map(handle, size)


def test_fetches_map_a_growing_segment_once_until_it_grows() -> None:
    disk = CountingDisk()
    with logcore.open("t-0", create=True, durability="os", fs=disk) as log:
        for number in range(10):
            log.append(b"%d" % number * 50_000)
        data = disk.content(f"t-0/{0:020d}.log")
        for start in (0, 1, 2):
            assert (
                b"".join(log.stored(start, max_bytes=1 << 20))
                == data[len(data) // 10 * start :]
            )
        assert disk.maps == 1
        log.append(b"more" * 50_000)
        assert b"".join(log.stored(0, max_bytes=1 << 20)) == disk.content(
            f"t-0/{0:020d}.log"
        )
        assert disk.maps == 2


def test_single_reads_remap_a_segment_that_grew_by_an_eighth() -> None:
    disk = CountingDisk()
    with logcore.open("t-0", create=True, durability="os", fs=disk) as log:
        log.append_many([(None, b"%d" % number * 1_000) for number in range(10)] * 100)
        size = log.statistics().size_bytes
        for offset in range(0, 1_000, 100):
            assert log.get(offset).value == b"0" * 1_000
        assert disk.maps == 1
        log.append(b"x" * (size // 8 - 1_000))
        assert len(log.get(1_000).value or b"") == size // 8 - 1_000
        assert disk.maps == 1
        log.append(b"x" * 2_000)
        assert log.get(1_001).value == b"x" * 2_000
        assert disk.maps == 2


class UnreadableDisk(SimulatedDisk):
    """Pages of a mapping that contain `lost` are unreadable and appear as zeros."""

    lost = b""

    def is_readable(self, view: memoryview, *, touch: bool = False) -> bool:
        return not self.lost or self.lost not in bytes(view)


def test_fetch_of_unreadable_pages_fails_and_other_fetches_succeed() -> None:
    """The mapping of a sealed segment is read in parts before it is sent for the first
    time.
    """
    size = 300_000
    disk = UnreadableDisk()
    with logcore.open("t-0", create=True, durability="os", fs=disk) as log:
        for value in (b"good", b"lost", b"fine"):
            log.append(value * (size // 4))
        log.roll()
        data = disk.content(f"t-0/{0:020d}.log")
        step = len(data) // 3
        disk.lost = b"lost"
        assert b"".join(log.stored(0, 1, max_bytes=step)) == data[:step]
        for _ in range(2):
            with pytest.raises(logcore.StorageReadError) as caught:
                log.stored(1, 2, max_bytes=step)
            assert caught.value.position == step
        assert b"".join(log.stored(2, 3, max_bytes=step)) == data[2 * step :]
        disk.lost = b""
        assert b"".join(log.stored(1, 2, max_bytes=step)) == data[step : 2 * step], (
            "the second fetch reads again"
        )
        disk.lost = b"lost"
        assert b"".join(log.stored(1, 2, max_bytes=step)) == data[step : 2 * step], (
            "a readable page is checked once"
        )


def test_fetch_of_a_shrunken_file_fails_and_of_a_replaced_file_succeeds() -> None:
    """If a file shrinks, pages of its mapping are lost. If it is replaced, the mapping
    still has all pages.
    """
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability="os", fs=disk) as log:
        log.append(b"1")
        log.append(b"2")
        log.roll()
        path = f"t-0/{0:020d}.log"
        data = disk.content(path)
        assert b"".join(log.stored(0, max_bytes=1 << 20)) == data
        disk.unlink(path)
        disk.put(path, data[:70])
        assert b"".join(log.stored(0, max_bytes=1 << 20)) == data
        disk.unlink(path)
    disk.put(path, data)
    with logcore.open("t-0", read_only=True, fs=disk) as log:
        assert b"".join(log.stored(0, max_bytes=1 << 20)) == data
        handle = disk.open(path, write=True)
        disk.truncate(handle, len(data) - 1)
        disk.close(handle)
        with pytest.raises(logcore.StorageReadError) as caught:
            log.stored(1, max_bytes=1 << 20)
        assert caught.value.position == len(data) // 2


@pytest.mark.parametrize("suffix", [".log", ".index", ".timeindex"])
def test_zeros_of_unreadable_pages_are_not_reported_as_damage(
    suffix: str,
) -> None:
    disk = UnreadableDisk()
    with logcore.open(
        "t-0", create=True, config={"index.interval.bytes": 0}, fs=disk
    ) as log:
        for number in range(3):
            log.append(b"%d" % number * 50, timestamp_ms=T0 + number)
    files = disk.files()
    path = f"/t-0/{0:020d}.log"
    files[path] = files[path][:-40] + bytes(40)
    files[f"/t-0/{3:020d}.log"] = b""
    for lost_bytes in (b"", files[path.replace(".log", suffix)][:8]):
        disk = UnreadableDisk(files)
        disk.lost = lost_bytes
        with logcore.open("t-0", read_only=True, fs=disk) as log:
            assert log.offset_for_timestamp(T0 + 1) == 1  # the indexes are mapped now
            with pytest.raises(
                logcore.StorageReadError if lost_bytes else logcore.CorruptBatchError
            ) as caught:
                list(log.read(0))
            assert str(caught.value.path).endswith(f"{0:020d}.log")


@pytest.mark.parametrize("is_mapped", [True, False])
def test_newest_timestamp_of_a_sealed_segment_needs_no_index(
    is_mapped: bool,
) -> None:
    """A reader uses the entries of the index that agree with the batches. A process
    that may not map files reads in chunks.
    """
    disk = SimulatedDisk()
    with logcore.open(
        "t-0", create=True, config={"index.interval.bytes": 0}, fs=disk
    ) as log:
        for ms in (5, 9, 7):
            log.append(b"x", timestamp_ms=T0 + ms)
        log.roll()
    index = f"/t-0/{0:020d}.timeindex"
    contents = [disk.content(index), b"", struct.pack(">qi", T0 + 99, 2)]
    for content in contents:
        disk.put(index, content)
        with logcore.open("t-0", read_only=True, fs=disk) as reader:
            if not is_mapped:
                avoid_mapping(reader)
            (sealed, _) = reader._state.segments
            assert isinstance(sealed, PreadSegment) is not is_mapped
            assert sealed.max_timestamp() == T0 + 9
            assert sealed.is_max_timestamp_exact is (content == contents[0])
            assert reader.newest() == (1, T0 + 9)


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "zeros", "random", "shifted", "moved"]
)
def test_broken_index_is_rebuilt_or_bypassed(partition: Path, damage: str) -> None:
    with logcore.open(
        partition, create=True, config={**SMALL, "segment.bytes": 3000}
    ) as log:
        log.append_many(
            [(None, b"%d" % number, (), T0 + number) for number in range(300)]
        )
        expected = list(log.read(0))
    rng = np.random.default_rng(5)
    for path in partition.glob("*.index"):
        size = path.stat().st_size
        undamaged = path.read_bytes()
        path.unlink()
        if damage == "empty":
            path.write_bytes(b"")
        elif damage == "zeros":
            path.write_bytes(bytes(size + 80))
        elif damage == "random":
            path.write_bytes(rng.bytes(size))
        elif damage == "shifted":
            path.write_bytes(undamaged[4:] + undamaged[:4])
        elif damage == "moved":  # rising, but no entry has the position of its batch
            entries = np.frombuffer(undamaged, ">i4").reshape(-1, 2) + np.array([0, 1])
            path.write_bytes(entries.astype(">i4").tobytes())
    for read_only in (True, False):
        with logcore.open(partition, read_only=read_only) as log:
            assert log.log_end_offset == 300
            for start in range(0, 300, 7):
                assert next(log.read(start)) == expected[start]
                assert log.get(start) == expected[start]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(0, 2**32))
@settings(max_examples=30)
def test_offset_for_timestamp_is_the_first_record_at_or_after_it(
    tmp_path_factory: pytest.TempPathFactory, times: list[int], seed: int
) -> None:
    partition = tmp_path_factory.mktemp("times") / "orders-0"
    rng = np.random.default_rng(seed)
    with logcore.open(
        partition, create=True, config={**SMALL, "segment.ms": 1 << 60}, durability="os"
    ) as log:
        offset = 0
        while offset < len(times):
            step = int(rng.integers(1, 5))
            log.append_many(
                [(None, b"x", (), T0 + time) for time in times[offset : offset + step]]
            )
            offset += step
        for reader in (log, logcore.open(partition, read_only=True)):
            for time in range(-1, 42):
                expected = next(
                    (
                        offset
                        for offset, timestamp in enumerate(times)
                        if timestamp >= time
                    ),
                    None,
                )
                assert reader.offset_for_timestamp(T0 + time) == expected, time
            if reader is not log:
                reader.close()


class ShrinkingFile:
    """A file system with one file, which may be shorter than its reported size."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data = data
        self.size_bytes = size

    def size(self, handle: int) -> int:
        return self.size_bytes

    def pread(self, handle: int, count: int, position: int) -> bytes:
        return self.data[position : position + count]


@pytest.mark.parametrize("zeros", [0, 7, 100_000])
@pytest.mark.parametrize("missing", [0, 50_000])
def test_large_index_is_read_up_to_its_zeros(zeros: int, missing: int) -> None:
    entries = b"\0\0\0\1\0\0\1\0" * 25_000
    file: Any = ShrinkingFile(entries + bytes(zeros), len(entries) + zeros + missing)
    assert read_front(file, 0, 8).rstrip(b"\0") == entries.rstrip(b"\0")


class CountingFS(OsFS):
    """A file system that counts the bytes that are read."""

    read_bytes = 0

    def pread(self, handle: int, size: int, position: int) -> bytes:
        self.read_bytes += size
        return super().pread(handle, size, position)


def test_batches_of_all_sizes_are_found_by_their_headers(tmp_path: Path) -> None:
    """A search reads only the header of a batch that is larger than one read."""
    sizes = [10, 2_000_000, 33_000, 40_000, 10, 10, 900_000, *[500] * 70, 100_000, 10]
    path = tmp_path / "t-0"
    fs = CountingFS()
    config = {"batch.size": "9000000", "max.message.bytes": "9000000"}
    with logcore.open(path, create=True, durability="os", config=config, fs=fs) as log:
        for size in sizes:
            log.append_many([(None, bytes(size // 2))] * 2)
        batches = []
        (segment,) = log._state.segments
        for headers, _, _ in segment.walk(0, crc=True):
            batches += [
                (int(row["last_offset"]), int(row["position"])) for row in headers
            ]
        assert len(batches) == len(sizes)
        check_find(segment, batches, fs)
        with logcore.open(path, read_only=True, fs=fs) as reader:
            check_find(reader._state.segments[-1], batches, fs)
    with logcore.open(path, durability="os", fs=fs) as log:
        check_find(log._state.segments[-1], batches, fs)


def check_find(
    segment: Segment, batches: list[tuple[int, int]], fs: CountingFS
) -> None:
    for last_offset, position in batches:
        for offset in (last_offset - 1, last_offset):
            fs.read_bytes = 0
            assert segment.find(offset) == position
            assert fs.read_bytes <= 300_000
    assert segment.find(batches[-1][0] + 1) == segment.size_bytes
