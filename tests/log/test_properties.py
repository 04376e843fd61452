"""Properties of logs, records, indexes and recovery: P01 to P29 and some others, each
with one short test named by its id. A test is the shortest program that fails when its
property does not hold. Other tests check each property in more depth (see the table in
docs/crashes.md). P30 to P46 are in test_retention.py and test_cleaner.py.
"""

from __future__ import annotations

import bisect
import itertools
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import logcore
from logcore.index import OffsetIndex, TimeIndex, TransactionIndex, load
from logcore.log import Log
from logcore.recordbatch import encode, read_batches
from logcore.testing import Fault, FaultPlan, SimulatedCrash, SimulatedDisk, recover_log
from support.vectors import VECTORS

CONFIG: dict[str, Any] = {"segment.bytes": 500, "index.interval.bytes": 100}
ROWS = [(b"k%d" % at, b"%d" % at * 20, (("h", b"x"),), 1_000 + at) for at in range(30)]


def open_log(disk: SimulatedDisk, **options: Any) -> Log:
    return logcore.open("t-0", create=True, fs=disk, **{"config": CONFIG, **options})


def write_killed_log(**options: Any) -> SimulatedDisk:
    """Write 30 records in several segments, and kill the process, so that the directory
    is not marked clean.
    """
    disk = SimulatedDisk()
    log = open_log(disk, **options)
    for row in ROWS:
        log.append_many([row])
    log.flush()
    disk.kill()
    return disk


def contents(log: Log) -> list[Any]:
    return [
        (record.key, record.value, record.headers, record.timestamp_ms)
        for record in log.read(log.log_start_offset)
    ]


def newest(disk: SimulatedDisk) -> str:
    return max(path for path in disk.files() if path.endswith(".log"))


def test_P01_offsets_are_dense_at_append() -> None:
    with open_log(SimulatedDisk()) as log:
        receipts = [log.append_many(ROWS[:count]) for count in (1, 3, 2)]
        assert [(receipt.offset, receipt.last_offset) for receipt in receipts] == [
            (0, 0),
            (1, 3),
            (4, 5),
        ]


def test_P02_read_from_an_offset_begins_there() -> None:
    with open_log(write_killed_log()) as log:
        assert [next(log.read(number)).offset for number in range(30)] == list(
            range(30)
        )


def test_P03_P07_records_are_read_back_unchanged_by_all_readers() -> None:
    disk = write_killed_log()
    with open_log(disk) as log, logcore.open("t-0", read_only=True, fs=disk) as reader:
        assert contents(log) == contents(reader) == contents(log) == ROWS


def test_P04_P05_acknowledged_records_survive_a_crash() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    acknowledged = log.append_many(ROWS[:3]).last_offset + 1
    log.append_many(ROWS[3:5], durability="os")
    for crashed_disk in disk.after_crash():
        with open_log(crashed_disk) as reopened:
            assert (
                ROWS[:acknowledged] == contents(reopened)[:acknowledged]
                and contents(reopened) == ROWS[: len(contents(reopened))]
            )
    log.close()


def test_P06_log_keeps_the_order_of_records_of_a_producer() -> None:
    with open_log(SimulatedDisk()) as log:
        for number in range(3):
            log.append_batch(
                encode(
                    ROWS[number : number + 1],
                    producer_id=7,
                    producer_epoch=0,
                    base_sequence=number,
                )
            )
        with pytest.raises(logcore.OutOfOrderSequenceError):
            log.append_batch(
                encode(ROWS[4:5], producer_id=7, producer_epoch=0, base_sequence=4)
            )
        log.append_batch(
            encode(ROWS[:1])
            + encode(ROWS[3:4], producer_id=7, producer_epoch=0, base_sequence=3)
        )
        duplicate = log.append_batch(
            encode(ROWS[3:4], producer_id=7, producer_epoch=0, base_sequence=3)
        )
        assert duplicate.offset == 4, (
            "the batch is stored after a batch without a producer"
        )
        assert contents(log) == [*ROWS[:3], ROWS[0], ROWS[3]]


def test_P08_P09_log_end_and_start_never_decrease() -> None:
    disk = SimulatedDisk()
    ends = [0]
    starts = [0]
    for _ in range(3):
        with open_log(disk) as log:
            log.append_many(ROWS[:5])
            log.delete_records(log.log_end_offset - 2)
            ends.append(log.log_end_offset)
            starts.append(log.log_start_offset)
            assert log.delete_records(0) == starts[-1]
    assert ends == sorted(set(ends)) and starts == sorted(set(starts))


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_P10_P11_decoding_inverts_encoding_for_any_split(
    codec: str,
) -> None:
    def decoded(data: bytes) -> list[list[Any]]:
        return [
            [
                (record.key, record.value, record.headers, record.timestamp_ms)
                for record in batch.records()
            ]
            for batch in read_batches(data)
        ]

    first = encode(ROWS[:3], codec=codec)
    second = encode(ROWS[3:7], codec=codec, base_offset=3)
    assert (
        decoded(first + second)
        == decoded(first) + decoded(second)
        == [ROWS[:3], ROWS[3:7]]
    )


def test_P12_P13_too_large_record_is_refused_without_a_change() -> None:
    disk = SimulatedDisk()
    with open_log(disk, config={"segment.bytes": 500}) as log:
        log.append_many(ROWS[:1])
        before = disk.files()
        for call in (
            lambda: log.append(b"x" * 600),
            lambda: log.append_batch(encode([(None, b"x" * 600)])),
        ):
            with pytest.raises(logcore.LogcoreError):
                call()
        assert disk.files() == before
        log.append(b"x" * 350)
        assert log.statistics().segments == 2, (
            "a record that does not fit causes a roll"
        )


@given(
    st.lists(st.integers(0, 2**31 - 1), unique=True).map(sorted),
    st.integers(-(2**33), 2**33),
)
@example([0, 5], -1)
@example([0, 2**31 - 1], 2**31)
def test_P14_index_finds_the_last_entry_at_or_below(
    offsets: list[int], searched: int
) -> None:
    index = OffsetIndex("t-0/0.index", bytearray())
    for position, offset in enumerate(offsets):
        index.add(offset, position)
    for relative in (searched, *offsets[:3], *(offset + 1 for offset in offsets[-3:])):
        assert index.find(relative) == bisect.bisect_right(offsets, relative) - 1
    index.keep(len(offsets) // 2)
    assert [index.entry(slot) for slot in range(len(index))] == [
        (offset, position)
        for position, offset in enumerate(offsets[: len(offsets) // 2])
    ]


@given(
    st.lists(st.tuples(st.integers(-1, 50), st.integers(0, 50)), max_size=8),
    st.integers(0, 8),
)
def test_P14_time_index_stores_only_rising_timestamps(
    given_entries: list[tuple[int, int]], stored_count: int
) -> None:
    index = TimeIndex("t-0/0.timeindex", bytearray())
    expected = list[tuple[int, int]]()
    for timestamp, offset in given_entries:
        index.add(timestamp, offset)
        if timestamp > max(
            [-1, *(stored_timestamp for stored_timestamp, _ in expected)]
        ):
            expected.append((timestamp, offset))
    for entries in (expected, expected[:stored_count]):
        index.keep(len(entries))
        assert [index.entry(slot) for slot in range(len(index))] == entries
        assert index.last_timestamp == (entries[-1][0] if entries else -1)
        assert (
            TimeIndex("t-0/0.timeindex", index.data).last_timestamp
            == index.last_timestamp
        )


def test_P14_P18_P19_indexes_rise_and_refer_to_batches() -> None:
    with open_log(write_killed_log()) as log:
        sealed = log._state.segments[:-1]
        assert sealed
        for segment in sealed:
            heads = [
                row
                for headers, _, _ in segment.walk(0, crc=True)
                for row in headers.tolist()
            ]
            positions = {row[0] for row in heads}
            index = segment.offset_index.array().tolist()
            assert [entry[1] for entry in index] == sorted(
                {entry[1] for entry in index}
            )
            assert {entry[1] for entry in index} <= positions
            for entry, next_entry in zip(
                [(0, 0), *index], [*index, (0, segment.size_bytes)], strict=True
            ):
                between = [
                    position
                    for position in positions
                    if entry[1] < position < next_entry[1]
                ]
                assert next_entry[1] - entry[1] <= 100 + 2 * 120, (
                    between,
                    "at least one entry per interval and batch",
                )
            times = segment.time_index.array().tolist()
            assert (
                times == sorted(times)
                and times[-1][1] + segment.base_offset <= heads[-1][3]
            )


@pytest.mark.parametrize("writes", [True, False])
def test_P14_lookup_reads_one_index_interval_and_one_batch(writes: bool) -> None:
    """The limits are multiples of 32 KiB, the size of a read. Without an index, a
    lookup would read half of the log.
    """
    disk = CountingDisk()
    config = {"index.interval.bytes": 1_000}
    with open_log(disk, config=config) as log:
        for number in range(600):
            log.append(b"%03d" % number * 100, timestamp_ms=1_000 + number)
        log.host.writer.active.try_write_indexes()
        with logcore.open("t-0", read_only=True, fs=disk) as reader:
            source = log if writes else reader
            assert source.get(0).offset == 0
            for number in (0, 1, 200, 399, 598, 599):
                disk.read_bytes = 0
                assert source.get(number).offset == number
                assert disk.read_bytes <= 33 << 10
                disk.read_bytes = 0
                assert (
                    next(iter(source.batches(number, number + 1))).base_offset == number
                )
                assert disk.read_bytes <= 3 * (33 << 10)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\0" * 64, b"\x01" * 7])
def test_P15_P16_broken_index_is_rebuilt(content: bytes) -> None:
    disk = write_killed_log()
    for path in disk.files():
        if path.endswith("index"):
            disk.put(path, content)
    with open_log(disk) as log:
        assert [log.get(number).offset for number in range(30)] == list(range(30))
        assert [
            log.offset_for_timestamp(1_000 + number) for number in range(30)
        ] == list(range(30))
        assert log.offset_for_timestamp(2_000) is None


def test_P17_rebuilt_index_equals_the_original() -> None:
    disk = write_killed_log(config={"index.interval.bytes": 100})
    with open_log(disk, config={"index.interval.bytes": 100}):
        rebuilt = disk.files()
    with open_log(SimulatedDisk(), config={"index.interval.bytes": 100}) as log:
        for row in ROWS:
            log.append_many([row])
        active = log._state.segments[-1]
        path = active.file(".index")
        assert (
            load(SimulatedDisk(rebuilt), path, OffsetIndex)
            == active.offset_index.array().tobytes()
        )
        times = active.time_index.array().tobytes()
        assert bytes(
            load(SimulatedDisk(rebuilt), active.file(".timeindex"), TimeIndex)
        ).startswith(times)


@given(
    times=st.lists(st.just(-1) | st.integers(1, 9), min_size=12, max_size=24),
    flush_and_tick=st.tuples(st.integers(0, 12), st.integers(3, 12)),
    interval=st.sampled_from([0, 150, 300]),
    index_bytes=st.sampled_from([60, 120, *range(88, 184, 8), 1 << 20]),
    lost_bytes=st.none() | st.integers(0, 300),
    appended_times=st.sampled_from([(), (10, 20, 20, 21)]),
)
def test_P17_resumed_index_equals_a_rebuilt_one(
    times: list[int],
    flush_and_tick: tuple[int, int],
    interval: int,
    index_bytes: int,
    lost_bytes: int | None,
    appended_times: tuple[int, ...],
) -> None:
    """The property holds for any timestamps, any recovery point and any loss at the end
    of the file by a crash. If `lost_bytes` is None, the log is closed cleanly.
    """
    config = {"index.interval.bytes": interval}
    flushed, ticked = sorted(flush_and_tick)
    disk = SimulatedDisk()
    log = open_log(disk, config=config, durability="os")
    log.append(b"in an earlier segment", timestamp_ms=1)
    log.roll()
    for index, time in enumerate(times):
        if index == flushed:
            log.flush()
        # The indexes are written, including entries for unsynced records.
        if index == ticked:
            disk.advance(6_000)
            log.tick()
        log.append_batch(encode([(None, b"x" * (index % 5), (), time)]))
    recovery_point = log.recovery_point
    if lost_bytes is None:
        log.close()
        recovery_point = len(times) + 1
    else:
        disk.kill()
        data = disk.files()[newest(disk)]
        disk.put(newest(disk), data[: max(0, len(data) - lost_bytes)])
    entries = struct.iter_unpack(
        ">ii", bytes(load(disk, f"t-0/{1:020d}.index", OffsetIndex))
    )
    has_use = any(1 + offset < recovery_point for offset, _ in entries)
    config |= {"segment.ms": 15, "segment.index.bytes": index_bytes}
    results: list[Any] = []
    for suffixes in ((), (".index", ".timeindex")):
        copied = SimulatedDisk(
            {
                path: data
                for path, data in disk.files().items()
                if not path.endswith(suffixes)
            }
        )
        try:
            log = open_log(copied, config=config, durability="os")
        except logcore.CorruptLogError:
            results.append(None)
            continue
        with log:
            assert log.host.writer.active.is_resumed == (not suffixes and has_use)
            assert log.log_end_offset >= recovery_point
            results.append(
                [
                    log.newest(),
                    contents(log),
                    [log.offset_for_timestamp(time) for time in range(11)],
                ]
            )
            for time in appended_times:
                log.append(b"later", timestamp_ms=time)
            if appended_times:
                log.roll()
        after = copied.files()
        results[-1] += [
            {
                path: after[path]
                for path in after
                if path.endswith((".log", "index")) and f"{0:020d}" not in path
            }
        ]
    assert results[0] == results[1]


@given(
    old=st.none()
    | st.integers(0, 6).map(bytes)
    | st.lists(st.integers(1, 9), max_size=6).map(bytes),
    new=st.lists(st.integers(1, 9), max_size=4),
    keeps_other_entries=st.booleans(),
    is_complete=st.booleans(),
)
@example(b"\1\2\3", [1, 2], False, True)
@example(b"\1\2\3", [1, 2], True, True)
@example(b"\1\2\0", [1, 2], False, True)
@example(b"\7\7\7", [1, 2], False, True)
@example(b"\1", [1, 2], False, False)
@example(b"\7", [], False, True)
def test_P18_index_file_never_mixes_old_and_new_entries(
    old: bytes | None, new: list[int], keeps_other_entries: bool, is_complete: bool
) -> None:
    """The property also holds after a power cut. Each entry is one byte, repeated 8
    times.
    """

    def entries(numbers: Iterable[int]) -> bytes:
        return b"".join(bytes([number] * 8) for number in numbers)

    def add(number: int) -> None:
        index.add(number * 0x01010101, number * 0x01010101)

    before = None if old is None else entries(old)
    disk = SimulatedDisk(
        {"t-0/x.index": before, "t-0": None} if before is not None else {"t-0": None}
    )
    index = OffsetIndex("t-0/x.index", bytearray())
    new_bytes = entries(new)
    for number in new:
        add(number)
    index.write(disk, whole=is_complete, keeps_other_entries=keeps_other_entries)
    written = disk.files().get("/t-0/x.index")
    is_prefix = (
        before is not None and before[: len(new_bytes)] == new_bytes[: len(before)]
    )
    other_entries = (
        before[len(new_bytes) :]
        if is_prefix and keeps_other_entries and before is not None
        else b""
    )
    assert written == new_bytes + other_entries
    if written == before:
        assert not disk.operations, "an up-to-date file is not written again"
    old_numbers, new_numbers = (set(numbers) - {0} for numbers in (old or b"", new))
    for crashed_disk in disk.after_crash(kind="power"):
        remaining = crashed_disk.files().get("/t-0/x.index", b"")
        numbers = {
            remaining[position]
            for position in range(0, len(remaining), 8)
            if remaining[position : position + 8] == entries([remaining[position]])
        }
        assert is_prefix or not (
            numbers & (old_numbers - new_numbers)
            and numbers & (new_numbers - old_numbers)
        )
    index.write(
        disk, sync=True, whole=is_complete, keeps_other_entries=keeps_other_entries
    )
    assert {
        crashed_disk.files().get("/t-0/x.index")
        for crashed_disk in disk.after_crash(kind="power")
    } <= {new_bytes + other_entries, None}
    disk.operations.clear()
    index.write(disk, sync=True)
    assert not disk.operations, "an up-to-date file is not synced again"
    if not other_entries:
        disk.faults = FaultPlan(Fault("pread", path="*.index", times=None))
        add(10)
        index.write(disk)
        assert [str(operation) for operation in disk.operations] == [
            "pwrite t-0/x.index"
        ], "the file is extended without being read"
        assert disk.files()["/t-0/x.index"] == new_bytes + entries([10])
        index.write(disk, sync=True)
        assert [str(operation) for operation in disk.operations[1:]] == [
            "fsync t-0/x.index"
        ]
    assert not disk.open_handles


@pytest.mark.parametrize("kind", [OffsetIndex, TimeIndex, TransactionIndex])
@given(
    entries=st.lists(st.binary(min_size=34, max_size=34), max_size=4),
    zeros=st.integers(0, 100),
)
@example([b"\0" * 33 + b"\1"], 0)
@example([b"\1" + b"\0" * 33], 40)
@example([], 40)
def test_P15_trailing_zeros_of_an_index_are_ignored(
    kind: type[OffsetIndex], entries: list[bytes], zeros: int
) -> None:
    """Kafka preallocates the index of its active segment with zeros, and a power cut
    can leave zeros at the end of any file.
    """
    stored = [entry[: kind.entry_size] for entry in entries]
    while stored and not any(stored[-1]):
        stored.pop()
    disk = SimulatedDisk({"x.index": b"".join(stored) + bytes(zeros)})
    assert bytes(load(disk, "x.index", kind)) == b"".join(stored)
    assert not disk.open_handles
    assert bytes(load(disk, "y.index", kind)) == b""
    torn = SimulatedDisk(
        {"x.index": b"".join(stored) + b"\1" * (zeros % kind.entry_size)}
    )
    assert bytes(load(torn, "x.index", kind)) == b"".join(stored), (
        "a partial entry is ignored"
    )


def test_P20_P21_P24_recovery_finds_a_prefix_and_is_idempotent() -> None:
    """recover_log opens the log, appends, opens it again and compares."""
    disk = write_killed_log(config={})
    path = newest(disk)
    content = disk.files()[path]
    for size in range(0, len(content), 61):
        truncated = SimulatedDisk({path: content[:size]})
        recovered = recover_log(truncated, thorough=True)
        assert [
            (record.key, record.value, record.headers, record.timestamp_ms)
            for record in recovered.records
        ] == ROWS[: recovered.end]


def test_P22_P25_data_below_the_recovery_point_is_kept_and_tails_are_quarantined() -> (
    None
):
    disk = write_killed_log(config={})
    path = newest(disk)
    with open_log(disk, config={}) as log:
        recovery_point = log.recovery_point
    before = disk.files()[path]
    assert recovery_point == 30
    disk.put(path, before + b"garbage")
    with open_log(disk, config={}) as log:
        report = log.recovery_report
        assert report is not None and report.quarantine_path is not None
        assert disk.files()[report.quarantine_path] == b"garbage"
        assert disk.files()[path] == before
    disk.flip(path, 100)
    disk.put(path, disk.files()[path][:-1])
    damaged_files = disk.files()
    with pytest.raises(logcore.CorruptLogError):
        open_log(disk, config={})
    assert disk.files()[path] == damaged_files[path]


def test_P25_tail_is_quarantined_durably_before_it_is_truncated() -> None:
    """The power may fail at each step of the opening, and any unsynced data may be
    lost.
    """
    before = SimulatedDisk(write_killed_log(config={}).files())
    path = newest(before)
    before.put(path, before.files()[path] + b"garbage")
    for step in itertools.count():
        disk = SimulatedDisk(before.files())
        disk.crash_in(step)
        try:
            open_log(disk, config={}).close()
        except SimulatedCrash:
            for crashed_disk in disk.after_crash(kind="power"):
                files = crashed_disk.files()
                assert files[path].endswith(b"garbage") or b"garbage" in (
                    content
                    for name, content in files.items()
                    if name.endswith(".quarantine")
                )
            continue
        break
    assert step > 5


def test_P23_read_error_modifies_no_file() -> None:
    disk = write_killed_log()
    before = disk.files()
    disk.faults = FaultPlan(Fault("pread", path="*.log", times=None))
    with pytest.raises(logcore.StorageReadError):
        open_log(disk)
    assert disk.files() == before


@pytest.mark.parametrize("failed", [False, True])
def test_P26_records_served_after_opening_are_durable(failed: bool) -> None:
    """After a failed sync, the records may exist only in the page cache."""
    disk = SimulatedDisk()
    log = open_log(disk, durability="os")
    log.append_many(ROWS)
    if failed:
        disk.faults = FaultPlan(Fault("fdatasync"))
        with pytest.raises(logcore.DurabilityUnknownError):
            log.flush()
    disk.kill()
    with open_log(disk, durability="os") as reopened:
        served = contents(reopened)
        for crashed_disk in disk.after_crash(kind="power", limit=20):
            with open_log(crashed_disk, durability="os") as after_power_cut:
                assert contents(after_power_cut) == served


def test_P27_log_files_alone_are_sufficient() -> None:
    disk = write_killed_log()
    with open_log(
        SimulatedDisk(
            {path: data for path, data in disk.files().items() if path.endswith(".log")}
        )
    ) as log:
        assert contents(log) == ROWS


def test_P28_kafka_partition_recovers_to_the_same_records() -> None:
    crashed, clean = (VECTORS / f"partition-{name}" for name in ("crash", "clean"))
    recovered = []
    for directory in (crashed, clean):
        with logcore.open("orders-0", fs=SimulatedDisk.load(directory)) as log:
            recovered.append(
                [
                    (record.offset, record.key, record.value)
                    for record in log.read(log.log_start_offset)
                ]
            )
    assert recovered[0] == recovered[1][: len(recovered[0])] and recovered[0]


class CountingDisk(SimulatedDisk):
    """Counts the bytes that are read from .log files. A mapping counts as a read of all
    its bytes.
    """

    read_bytes = 0

    def pread(self, handle: int, size: int, position: int) -> bytes:
        data = super().pread(handle, size, position)
        self.read_bytes += len(data) * self._handles[handle][1].endswith(".log")
        return data

    def map(self, handle: int, size: int) -> memoryview:
        self.read_bytes += size * self._handles[handle][1].endswith(".log")
        return super().map(handle, size)


@pytest.mark.long
@pytest.mark.parametrize("producer_id", [-1, 7])
@pytest.mark.parametrize("is_clean", [True, False])
def test_P29_open_reads_unsynced_bytes_and_an_index_interval(
    is_clean: bool, producer_id: int
) -> None:
    """After a crash of a log with idempotent producers, opening also reads the batch
    headers of the active segment.
    """
    interval = 2_000
    unsynced = 60
    config = {"segment.bytes": 200_000, "index.interval.bytes": interval}
    for count in (300, 900, 6_000):
        disk = SimulatedDisk()
        log = open_log(disk, config=config, durability="os")
        for number in range(count + unsynced):
            batch = encode(
                [(None, b"x" * 200, (), disk.now_ms())],
                producer_id=producer_id,
                producer_epoch=min(producer_id, 0),
                base_sequence=-1 if producer_id < 0 else number,
            )
            log.append_batch(batch)
            disk.advance(1)
            if number == count - 1:
                log.flush()
                disk.advance(6_000)
                log.tick()
        size_bytes = log.host.writer.active.size_bytes
        batch_bytes = len(batch)
        if is_clean:
            log.close()
        else:
            disk.kill()
        copied = CountingDisk(disk.files())
        with open_log(copied, config=config, durability="os") as log:
            report = log.recovery_report
            assert log.log_end_offset == count + unsynced and report is not None
            assert report.checked_bytes == (0 if is_clean else unsynced * batch_bytes)
            read_bytes = copied.read_bytes
        if producer_id < 0 or is_clean:
            assert read_bytes <= report.checked_bytes + 2 * interval + 6 * batch_bytes
        else:
            assert read_bytes <= 3 * size_bytes


def test_P29_records_with_equal_timestamps_are_not_read_again() -> None:
    """Such records have one entry in the time index, and many entries in the offset
    index.
    """
    disk = SimulatedDisk()
    config = {"index.interval.bytes": 1_000}
    with open_log(disk, config=config) as log:
        for _ in range(300):
            log.append_batch(batch := encode([(None, b"x" * 200, (), 5)]))
    copied = CountingDisk(disk.files())
    with open_log(copied, config=config) as log:
        assert copied.read_bytes <= 2 * 1_000 + 6 * len(batch)
        assert (log.log_end_offset, log.newest()) == (300, (0, 5))


def transactional(producer_id: int, sequence: int, *, epoch: int = 0) -> bytes:
    return encode(
        [(b"k", b"v")],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=True,
    )


@given(
    st.lists(
        st.sampled_from(
            [
                "plain",
                "unsynced",
                "send 1",
                "send 2",
                "end 1",
                "end 2",
                "abort 1",
                "flush",
            ]
        )
    ),
    st.sampled_from(["group", "os"]),
)
@example(["send 1", "send 2", "end 1", "plain", "abort 1", "end 2"], "group")
def test_P53_last_stable_offset_never_decreases_or_exceeds_the_high_watermark(
    calls: list[str], policy: str
) -> None:
    disk = SimulatedDisk()
    sequences = {1: 0, 2: 0}
    open_since: dict[int, int] = {}
    with (
        open_log(disk, durability=policy) as log,
        logcore.open("t-0", read_only=True, fs=disk) as reader,
    ):
        before = (0, 0, 0)
        for call in calls:
            action, _, number = call.partition(" ")
            producer_id = int(number or 0)
            if action == "send":
                open_since.setdefault(producer_id, log.log_end_offset)
                log.append_batch(
                    transactional(producer_id, sequences[producer_id]),
                    durability="disk",
                )
                sequences[producer_id] += 1
            elif action in ("end", "abort"):
                log.end_transaction(
                    producer_id, 0, commit=action == "end", durability="disk"
                )
                open_since.pop(producer_id, None)
            elif action == "flush":
                log.flush()
            else:
                log.append(b"x", durability="os" if action == "unsynced" else "disk")
            after = log.last_stable_offset, log.high_watermark, log.log_end_offset
            assert list(after) == sorted(after) and all(
                lower <= higher for lower, higher in zip(before, after, strict=True)
            )
            assert after[0] == min([after[1], *open_since.values()])
            reader.refresh()
            assert (reader.last_stable_offset, reader.high_watermark) == after[:2]
            before = after


def test_P55_end_of_transaction_with_an_older_epoch_is_refused() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        log.append_batch(transactional(7, 0))
        # A coordinator that expired the producer writes this marker.
        log.end_transaction(7, 1, commit=False)
        before = disk.files()
        for commit in (True, False):
            with pytest.raises(logcore.InvalidProducerEpochError):
                log.end_transaction(7, 0, commit=commit)
        with pytest.raises(logcore.InvalidProducerEpochError):
            log.append_batch(transactional(7, 1))
        assert disk.files() == before
        assert list(log.read(0, isolation="read_committed")) == []


@pytest.mark.parametrize("policy", ["always", "group", "os"])
def test_P56_commit_is_durable_when_it_is_acknowledged(policy: str) -> None:
    disk = SimulatedDisk()
    log = open_log(disk, durability=policy)
    log.append_batch(transactional(7, 0))
    assert (
        log.end_transaction(7, 0, commit=True, durability="disk").durability == "disk"
    )
    for crashed_disk in disk.after_crash(kind="power"):
        with open_log(crashed_disk) as reopened:
            assert [
                record.value for record in reopened.read(0, isolation="read_committed")
            ] == [b"v"]
    log.close()


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 5)), max_size=8
    )
)
@example([(0, 3, 1), (1, 2, 0), (0, 2, 1), (1, 1, 5)])
@example([(0, 2, 2), (1, 2, 0), (0, 2, 0), (1, 2, 9), (0, 0, 9)])
def test_P62_follower_that_truncates_by_epochs_has_a_prefix_of_its_leader(
    terms: list[tuple[int, int, int]],
) -> None:
    """A term gives the log that leads, the number of records that it appends, and the
    number that the other log copies.
    """
    logs = [open_log(SimulatedDisk()) for _ in range(2)]
    for epoch, (number, appended, copied) in enumerate(terms, 1):
        leader = logs[number]
        follower = logs[1 - number]
        leader.begin_epoch(epoch)
        for index in range(appended):
            leader.append(b"%d-%d" % (epoch, index))
        # Repeat until the leader also has the epoch of the follower. The epoch then
        # ends at the same offset in both logs.
        while True:
            follower_epoch = follower.leader_epoch
            leader_epoch, end = leader.end_of_epoch(follower_epoch)
            follower.truncate_to_epoch(leader_epoch, end)
            if (
                leader_epoch in (follower_epoch, -1)
                or follower.leader_epoch == follower_epoch
            ):
                break
        for batch in (
            list(leader.batches(follower.log_end_offset))[:copied]
            if follower.log_end_offset < leader.log_end_offset
            else ()
        ):
            if batch.partition_leader_epoch > follower.leader_epoch:
                follower.begin_epoch(batch.partition_leader_epoch)
            follower.append_batch(batch.data)
        assert contents(follower) == contents(leader)[: follower.log_end_offset]
    for log in logs:
        log.close()


def test_every_property_id_of_the_table_has_a_test() -> None:
    tests = Path(__file__).resolve().parents[1]
    names = " ".join(
        re.findall(
            r"def (test_\w+)",
            " ".join(path.read_text() for path in tests.rglob("test_*.py")),
        )
    )
    table = (
        (tests.parent / "docs" / "crashes.md")
        .read_text()
        .split("## 7.", 1)[1]
        .split("\n## ", 1)[0]
    )
    claimed: set[str] = set()
    for first, last in re.findall(
        r"^\| P(\d\d)(?: to P(\d\d))? \|", table, re.MULTILINE
    ):
        claimed |= {
            f"P{number:02}" for number in range(int(first), int(last or first) + 1)
        }
    assert {f"P{number:02}" for number in range(1, 30)} <= claimed
    missing = sorted(name for name in claimed if f"_{name}" not in names)
    assert not missing, missing
