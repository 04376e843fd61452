"""Log: records are read back as appended, in order and by every method, across rolls,
reopening and truncations.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import logcore
from logcore.recordbatch import encode, read_batches
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from support.logs import POLICIES, SMALL, T0, values
from support.staged import SMALL as STAGED
from support.staged import create, publish
from support.staged import rows as staged_rows
from support.vectors import VECTORS


@pytest.mark.parametrize("policy", POLICIES)
def test_records_are_read_back_after_reopening(partition: Path, policy: str) -> None:
    with logcore.open(partition, create=True, config=SMALL, durability=policy) as log:
        for number in range(20):
            receipt = log.append(
                b"v%d" % number,
                key=b"k",
                headers=[("h", b"1"), ("n", None)],
                timestamp_ms=T0 + number,
            )
            assert (receipt.offset, receipt.last_offset) == (number, number)
            assert receipt.durability == (
                "disk" if policy in ("always", "group") else "os"
            )
        assert log.high_watermark == log.log_end_offset == 20
        assert log.append(b"on disk", durability="disk").durability == "disk"
        assert log.durable_end_offset == 21
        assert log.append(b"written", durability="os").durability == "os"
    with logcore.open(partition, durability=policy) as log:
        assert log.log_end_offset == 22
        first = next(log.read(0))
        assert first == (0, T0, b"k", b"v0", (("h", b"1"), ("n", None)))
        assert values(log) == [b"v%d" % number for number in range(20)] + [
            b"on disk",
            b"written",
        ]


def test_every_append_method_stores_the_same_records(partition: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    rows = [
        (b"k%d" % number, b"v" * number if number % 3 else None) for number in range(50)
    ]
    keys = pa.array([key for key, _ in rows], pa.binary())
    payload = pa.array([value for _, value in rows], pa.large_binary())
    ends = np.cumsum([0] + [len(key) for key, _ in rows])
    with logcore.open(partition, create=True, config=SMALL) as log:
        for key, value in rows:
            log.append(value, key=key, timestamp_ms=T0)
        log.append_many([(key, value, (), T0) for key, value in rows])
        log.append_columns(keys=keys, values=payload, timestamps_ms=np.full(50, T0))
        log.append_columns(
            keys=(b"".join(key for key, _ in rows), ends),
            values=payload,
            timestamps_ms=pa.array([T0] * 50),
        )
        for start in range(0, 50, 10):
            batch = encode(
                [(key, value, (), T0) for key, value in rows[start : start + 10]],
                codec="lz4",
            )
            log.append_batch(batch)
        records = [
            (record.key, record.value, record.timestamp_ms) for record in log.read(0)
        ]
        assert records == [(key, value, T0) for key, value in rows] * 5
        assert [record.offset for record in log.read(0)] == list(range(250))
        heads = {
            (batch.magic, batch.producer_id, batch.producer_epoch, batch.base_sequence)
            for batch in log.batches(0)
        }
        assert heads == {(2, -1, -1, -1)}, "without a producer"
        assert log.append_many([]).last_offset == 249
        assert log.append_columns(values=pa.array([], pa.binary())).offset == 250


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_log_compresses_with_its_configured_codec(partition: Path, codec: str) -> None:
    with logcore.open(
        partition,
        create=True,
        config={**SMALL, "compression.type": codec, "segment.bytes": 4096},
    ) as log:
        log.append_many([(b"k", b"value %d" % number) for number in range(300)])
        assert {batch.codec_name for batch in log.batches(0)} == {
            "none" if codec == "uncompressed" else codec
        }
        assert values(log) == [b"value %d" % number for number in range(300)]
        assert values(log, 123, 127) == [
            b"value %d" % number for number in range(123, 127)
        ]
        assert sum(len(columns) for columns in log.scan(100, 250)) == 150


def test_reading_between_any_two_offsets(partition: Path) -> None:
    with logcore.open(partition, create=True, config=SMALL) as log:
        log.append_many([(None, b"%d" % number) for number in range(60)])
        for start in range(61):
            assert log.get(start).offset == start if start < 60 else True
            for end in (start, start + 1, start + 7, 60, 99):
                expected = [b"%d" % number for number in range(start, min(end, 60))]
                assert values(log, start, end) == expected
                assert [
                    value
                    for columns in log.scan(start, end)
                    for value in columns.values()
                ] == expected
        for outside in (-1, 61):
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.read(outside)
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.scan(outside)
        with pytest.raises(logcore.OffsetOutOfRangeError):
            log.get(60)


def test_read_stops_at_its_byte_limit_but_returns_a_batch(partition: Path) -> None:
    with logcore.open(partition, create=True, config={"batch.size": 400}) as log:
        log.append_many([(None, b"x" * 100) for _ in range(20)])
        assert (
            len(list(log.read(0, max_bytes=1)))
            == len(next(log.batches(0)).records())
            > 0
        )
        assert 0 < len(list(log.read(0, max_bytes=900))) < 20
        assert [batch.base_offset for batch in log.batches(3, max_bytes=1)] == [2]


def test_append_columns_accepts_keys_or_values_alone(partition: Path) -> None:
    column = (b"abc", [0, 1, 1, 3])
    with logcore.open(partition, create=True) as log:
        log.append_columns(keys=column)
        log.append_columns(values=column)
        values = [b"a", b"", b"bc"]
        assert [(record.key, record.value) for record in log.read(0)] == [
            *((value, None) for value in values),
            *((None, value) for value in values),
        ]
        with pytest.raises(logcore.InvalidRecordError, match="same number of rows"):
            log.append_columns(keys=column, values=(b"abc", [0, 3]))


def test_batches_cover_all_offsets_in_order(partition: Path) -> None:
    with logcore.open(partition, create=True, config=SMALL) as log:
        log.append_many(
            [(b"k", b"%d" % number, (), T0 + number) for number in range(30)]
        )
        batches = list(log.batches(0))
        assert batches[0].base_offset == 0
        assert all(
            batch.next_offset == next_batch.base_offset
            for batch, next_batch in itertools.pairwise(batches)
        )
        assert [
            offset for batch in batches for offset in batch.columns().offsets.tolist()
        ] == list(range(30))


def test_scan_is_readable_by_arrow_polars_and_duckdb(partition: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    with logcore.open(partition, create=True, config=SMALL) as log:
        log.append_many(
            [
                (b"k%d" % (number % 3), b"%d" % number, (("h", b"x"),), T0 + number)
                for number in range(100)
            ]
        )
        scan = log.scan()
        table = pa.table(scan)
        assert table["value"].to_pylist() == [b"%d" % number for number in range(100)]
        assert table.column_names == ["offset", "timestamp", "key", "value", "headers"]
        assert pa.table(scan.select("key")).column_names == ["key"]
        assert scan.to_table().equals(table), "a scan can be read twice"
        polars = pytest.importorskip("polars")
        assert polars.DataFrame(scan.select("offset", "value")).height == 100
        duckdb = pytest.importorskip("duckdb")
        row = duckdb.sql(
            'select count(distinct key), max("offset") from scan'
        ).fetchall()
        assert row == [(3, 99)]


def test_columns_outlive_the_log(partition: Path) -> None:
    with logcore.open(partition, create=True, config=SMALL) as log:
        log.append_many([(None, b"%d" % number) for number in range(50)])
        chunks = list(log.scan())
        log.delete_records(50)
    shutil.rmtree(partition.parent)
    assert [value for columns in chunks for value in columns.values()] == [
        b"%d" % number for number in range(50)
    ]


# -- directories written by Kafka ------------------------------------------------------


@pytest.mark.parametrize("name", ["partition-clean", "partition-crash"])
def test_kafka_partition_is_read(name: str) -> None:
    with logcore.open(VECTORS / name / "orders-0", read_only=True) as log:
        assert (log.log_start_offset, log.log_end_offset, log.last_stable_offset) == (
            0,
            29,
            28,
        )
        assert [record.offset for record in log.read(0)] == [
            number for number in range(29) if number not in (10, 11)
        ]
        committed = [
            record.offset for record in log.read(0, isolation="read_committed")
        ]
        assert committed == [
            number for number in range(28) if number not in (8, 10, 11)
        ]
        assert [len(columns) for columns in log.scan(isolation="read_committed")] != []
        assert next(log.read(0)) == (0, T0, b"k1", b"hello", (("h", b"x"),))
        kinds = {
            batch.base_offset: batch.control_type()
            for batch in log.batches(0)
            if batch.is_control
        }
        assert kinds == {10: "ABORT", 11: "COMMIT"}
        assert {batch.codec_name for batch in log.batches(0)} == {
            "none",
            "gzip",
            "snappy",
            "lz4",
            "zstd",
        }


def test_compacted_kafka_partition_is_read() -> None:
    with logcore.open(
        VECTORS / "partition-compact-after" / "compacted-0", read_only=True
    ) as log:
        assert [record.offset for record in log.read(0)] == [4, 5, 6, 12, 13]
        assert log.get(0).offset == 4
        assert log.log_end_offset == 14


@pytest.mark.parametrize("name", ["partition-clean", "partition-crash"])
def test_kafka_partition_is_continued(tmp_path: Path, name: str) -> None:
    shutil.copytree(VECTORS / name, tmp_path / name)
    before = (tmp_path / name / "orders-0" / f"{16:020d}.log").read_bytes()
    with logcore.open(
        tmp_path / name / "orders-0", config={"segment.ms": 1 << 60}
    ) as log:
        assert not (tmp_path / name / ".kafka_cleanshutdown").exists(), (
            "deleted before the first write"
        )
        assert log.append(b"appended", key=b"k").offset == 29
        assert [record.offset for record in log.read(27)] == [27, 28, 29]
    after = (tmp_path / name / "orders-0" / f"{16:020d}.log").read_bytes()
    assert after.startswith(before)
    added = list(read_batches(after[len(before) :]))
    assert [batch.partition_leader_epoch for batch in added] == [4], (
        "the latest epoch of the checkpoint"
    )
    recovery_points = (tmp_path / name / "recovery-point-offset-checkpoint").read_text()
    assert "orders 0 30\n" in recovery_points
    if name == "partition-clean":
        assert (tmp_path / name / ".kafka_cleanshutdown").exists()
        assert "orders 0 30" in recovery_points


# -- many threads ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["group", "always", "every(7)"])
def test_threads_append_without_loss_and_in_their_own_order(
    partition: Path, policy: str
) -> None:
    def work(thread_number: int) -> None:
        for number in range(30):
            receipts[thread_number].append(
                log.append(b"%d" % number, key=b"%d" % thread_number).offset
            )

    with logcore.open(
        partition, create=True, config={"segment.bytes": 4000}, durability=policy
    ) as log:
        receipts: list[list[int]] = [[] for _ in range(8)]
        threads = [
            threading.Thread(target=work, args=(thread_number,))
            for thread_number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(
            offset for offsets_of_thread in receipts for offset in offsets_of_thread
        ) == list(range(240))
        records = {record.offset: (record.key, record.value) for record in log.read(0)}
        for thread_number, offsets in enumerate(receipts):
            assert offsets == sorted(offsets)
            assert [records[offset] for offset in offsets] == [
                (b"%d" % thread_number, b"%d" % number) for number in range(30)
            ]


def test_readers_run_while_a_writer_rolls(partition: Path) -> None:
    def read() -> None:
        while not done.is_set():
            for record in log.read(max(0, log.high_watermark - 8)):
                if record.value != b"%d" % record.offset:
                    wrong_records.append(record)
            done.wait(0.0001)  # lets the writer run

    done = threading.Event()
    wrong_records = []
    with logcore.open(partition, create=True, config=SMALL, durability="os") as log:
        log.append(b"0")
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(1, 150):
            log.append(b"%d" % number)
        done.set()
        for thread in threads:
            thread.join()
    assert wrong_records == []


# -- compared with a list --------------------------------------------------------------


class LogAsList(RuleBasedStateMachine):
    """A log behaves like a list whose first items may be deleted. Each rule changes
    both.
    """

    @initialize(
        policy=st.sampled_from(POLICIES), codec=st.sampled_from(["producer", "lz4"])
    )
    def start(self, policy: str, codec: str) -> None:
        import tempfile

        self.directory = tempfile.mkdtemp()
        self.policy = policy
        self.config = {**SMALL, "compression.type": codec}
        self.model: list[bytes] = []
        self.first = 0
        self.log = logcore.open(
            f"{self.directory}/m-0", create=True, config=self.config, durability=policy
        )

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
        assert (receipt.offset, receipt.last_offset) == (
            len(self.model),
            len(self.model) + len(rows) - 1,
        )
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
        self.log = logcore.open(
            f"{self.directory}/m-0", config=self.config, durability=self.policy
        )
        assert self.log.recovery_report is not None
        assert self.log.recovery_report.cut_position is None

    @precondition(lambda self: hasattr(self, "log"))
    @invariant()
    def reads_agree(self) -> None:
        self.log.flush()
        expected = list(enumerate(self.model))[self.first :]
        assert (self.log.log_start_offset, self.log.log_end_offset) == (
            self.first,
            len(self.model),
        )
        assert [
            (record.offset, record.value) for record in self.log.read(self.first)
        ] == expected
        with logcore.open(f"{self.directory}/m-0", read_only=True) as reader:
            assert [
                (record.offset, record.value) for record in reader.read(self.first)
            ] == expected


TestLogAsList = LogAsList.TestCase
TestLogAsList.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None
)


def test_read_segments_hold_no_file_descriptors(tmp_path: Path) -> None:
    with logcore.open(
        tmp_path / "t-0", create=True, config={"segment.bytes": 2_000}, durability="os"
    ) as log:
        for number in range(300):
            log.append(b"%d" % number * 300)
        before = (
            len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        )
        assert log.statistics().segments > 100
        assert len(list(log.read(0))) == 300
        assert len(log.stored(0, max_bytes=1 << 20)) > 100
        after = (
            len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        )
        assert after <= before + 2


@pytest.mark.parametrize("times", [[100, 50, 50], [50, 100, 70], [100, 100, 1]])
def test_timestamps_of_deleted_records_are_not_found(
    tmp_path: Path, times: list[int]
) -> None:
    """The largest timestamp of a segment may belong to a record below the log start.
    The search then continues in later segments.
    """
    with logcore.open(tmp_path / "t-0", create=True) as log:
        for time in times:
            log.append(b"v", timestamp_ms=time)
            log.roll()
        log.append(b"end", timestamp_ms=60)
        # A kill leaves this state between saving the new log start and deleting the
        # first file.
        log._state.log_start = 1
        remaining = [*times[1:], 60]
        for timestamp in (1, 50, 60, 100):
            expected = next(
                (
                    1 + index
                    for index, time in enumerate(remaining)
                    if time >= timestamp
                ),
                None,
            )
            assert log.offset_for_timestamp(timestamp) == expected
        assert log.newest() == (1 + remaining.index(max(remaining)), max(remaining))


def test_open_on_a_failing_disk_is_a_read_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append(b"v")

    def failing_stat(path: object, **options: object) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing_stat)
        patch.setattr(os, "lstat", failing_stat)
        for read_only in (False, True):
            with pytest.raises(logcore.StorageReadError):
                logcore.open(tmp_path / "t-0", read_only=read_only)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_failed_write_of_the_durable_end_hides_no_record(end: str) -> None:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, durability="os", fs=disk)
    log.append(b"v")
    getattr(log if end == "close" else disk, end)()
    paths = ("*logcore.durable*", "*logcore.reserve")
    disk.faults = FaultPlan(
        *(Fault("pwrite", errno.ENOSPC, path=path, times=None) for path in paths)
    )
    with pytest.raises(logcore.DiskFullError):
        logcore.open("t-0", durability="group", fs=disk)
    with logcore.open("t-0", read_only=True, fs=disk) as reader:
        assert [record.value for record in reader.read(0)] == [b"v"]


def test_staged_records_are_appended_after_all_existing_ones(tmp_path: Path) -> None:
    """An empty active segment is deleted. The segments before it are kept."""
    path = create(tmp_path / "data", STAGED)
    with logcore.open_dir(path) as directory:
        for number in range(3):
            directory.partition("t", 0).roll()
            directory.partition("t", 0).append(b"%d" % number)
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
        assert (
            after.appends - before.appends,
            after.records_appended - before.records_appended,
        ) == (1, 300)
        assert (
            after.bytes_appended - before.bytes_appended
            == after.size_bytes - before.size_bytes
        )
        assert after.rolls - before.rolls == after.segments - before.segments > 0
    with logcore.open(path / "t-0", read_only=True) as reader:
        assert values(reader) == [*expected, b"after", *staged_rows("again", 0, 300)]


@pytest.mark.parametrize("limits", [{}, {"message.timestamp.after.max.ms": "3600000"}])
def test_datetime_is_accepted_as_a_timestamp_in_every_call(
    tmp_path: Path, limits: dict[str, str]
) -> None:
    # 1_700_000_000_001.999 ms, which is rounded down.
    utc = datetime(2023, 11, 14, 22, 13, 20, 1999, tzinfo=UTC)
    other_zone = utc.astimezone(timezone(timedelta(hours=5)))
    with logcore.open(tmp_path / "t-0", create=True, config=limits) as log:
        log.append(b"a", timestamp_ms=utc)
        log.append_many(
            [
                (None, b"b", (), other_zone),
                (None, b"c", (), np.datetime64("2023-11-14T22:13:20.001")),
            ]
        )
        assert [record.timestamp_ms for record in log.read(0)] == [
            1_700_000_000_001
        ] * 3
        assert (
            log.offset_for_timestamp(utc) == log.offset_for_timestamp(other_zone) == 0
        )
        assert log.offset_for_timestamp(utc + timedelta(days=1)) is None
        for invalid in (
            utc.replace(tzinfo=None),
            1.5,
            "now",
            1 << 63,
            np.datetime64("NaT"),
        ):
            for call in (
                lambda invalid=invalid: log.append(b"x", timestamp_ms=invalid),
                lambda invalid=invalid: log.append_many([(None, b"x", (), invalid)]),
                lambda invalid=invalid: log.offset_for_timestamp(invalid),
            ):
                with pytest.raises(
                    logcore.InvalidTimestampError, match="a datetime with a time zone"
                ):
                    call()
        assert log.log_end_offset == 3


def test_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "t-0", tmp_path / "file" / "deeper" / "t-0"):
        with pytest.raises(
            logcore.StorageWriteError, match="the directory cannot be made"
        ):
            logcore.open(path, create=True)
    for path in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(
            logcore.StorageWriteError, match="the directory cannot be made"
        ):
            logcore.open_dir(path, create=True)


def test_error_text_contains_only_fields_that_are_set() -> None:
    assert (
        str(logcore.LogcoreError("x", expected=1, found=2)) == "x (expected 1, found 2)"
    )
    assert str(logcore.LogcoreError("x", expected=1)) == "x (expected 1)"
    assert str(logcore.LogcoreError("x", found=2)) == "x (found 2)"
    assert str(logcore.LogcoreError("x")) == "x"


def test_tail_does_not_continue_with_records_that_replaced_its_own(
    partition: Path,
) -> None:
    """The log is truncated below the position of the tail and grows beyond it before
    the next read, so that other records have the next offsets.
    """
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
