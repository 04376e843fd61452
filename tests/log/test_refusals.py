"""Refusals: bad input, closed logs and wrong settings."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import logcore
from logcore.fs import OsFS
from logcore.index import TXN_ENTRY
from logcore.log import rewriting_of
from logcore.metadata import checkpoint
from logcore.partition.rewriting import adopting
from logcore.partition.writer import Writer
from logcore.reader import segments_between
from logcore.recordbatch import encode
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from support.logs import POLICIES, values

# -- bad input -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "orders",
        "orders-",
        "orders-x",
        "or ders-0",
        "..-0x",
        "-0",
        "ä-0",
        "a" * 250 + "-0",
        "orders-99999999999",
    ],
)
def test_directory_name_that_kafka_refuses_is_refused(
    tmp_path: Path, name: str
) -> None:
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
def test_invalid_config_error_names_the_setting(
    partition: Path, config: dict[str, object]
) -> None:
    with pytest.raises(logcore.InvalidConfigError, match=next(iter(config))):
        logcore.open(partition, create=True, config=config)
    assert not partition.exists()


@pytest.mark.parametrize(
    "policy", ["sometimes", "every", "every(0)", "interval(-1)", "always(3)", 7, None]
)
def test_invalid_durability_is_refused(partition: Path, policy: Any) -> None:
    with pytest.raises(logcore.InvalidConfigError):
        logcore.open(partition, create=True, durability=policy)


def test_invalid_records_change_nothing(partition: Path) -> None:
    with logcore.open(
        partition, create=True, config={"max.message.bytes": 1000}
    ) as log:
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


def test_timestamps_outside_the_configured_limits_are_refused(partition: Path) -> None:
    config = {
        "message.timestamp.before.max.ms": 60_000,
        "message.timestamp.after.max.ms": 60_000,
    }
    with logcore.open(partition, create=True, config=config) as log:
        now = log.append(b"now").timestamp_ms
        for time, limit in ((now - 120_000, "before"), (now + 120_000, "after")):
            log.reconfigure({f"message.timestamp.{limit}.max.ms": 60_000})
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


def test_timestamps_replaced_by_log_append_time_are_not_checked(
    partition: Path,
) -> None:
    config = {
        "message.timestamp.type": "LogAppendTime",
        "message.timestamp.before.max.ms": 1_000,
    }
    with logcore.open(partition, create=True, config=config) as log:
        log.append_many([(None, b"old", (), 5)])
        assert log.get(0).timestamp_ms > 5


def test_compacted_topic_requires_keys(partition: Path) -> None:
    with logcore.open(
        partition, create=True, config={"cleanup.policy": "compact"}
    ) as log:
        log.append(None, key=b"tombstone")
        with pytest.raises(logcore.InvalidRecordError):
            log.append(b"no key")
        with pytest.raises(logcore.InvalidRecordError):
            log.append_columns(values=(b"abc", [0, 3]))


def test_open_of_a_missing_log_raises(partition: Path) -> None:
    for read_only in (True, False):
        with pytest.raises(logcore.LogNotFoundError):
            logcore.open(partition, read_only=read_only)
    with pytest.raises(logcore.InvalidConfigError):
        logcore.open(partition, create=True, read_only=True)


def test_repr_of_a_log_shows_its_path_offsets_and_state(partition: Path) -> None:
    log = logcore.open(partition, create=True)
    log.append_many([(None, b"x")] * 3)
    log.delete_records(1)
    assert repr(log) == f"<Log {partition} offsets 1..3 writing>"
    with logcore.open(partition, read_only=True) as reader:
        assert repr(reader) == f"<Log {partition} offsets 1..3 read-only>"
        assert (
            repr(segments_between(reader, 1, 3))
            == f"[<GrowingSegment {partition}/{0:020d}.log>]"
        )
    log.close()
    assert repr(log) == f"<Log {partition} offsets 1..3 closed>"


@pytest.mark.parametrize(
    ("policy", "syncs"), [("always", 3), ("group", 3), ("every(4)", 1), ("os", 0)]
)
def test_statistics_count_the_operations_of_a_log(policy: str, syncs: int) -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability=policy, fs=disk) as log:
        log.append(b"x")
        log.append_many([(None, b"y")] * 2)
        log.append_columns(values=(b"zz", np.array([0, 1, 2])))
        log.append_many([])
        size = len(disk.content(f"t-0/{0:020d}.log"))
        statistics = log.statistics()
        durable = {"every(4)": 5, "os": 0}.get(policy, 5)
        assert statistics == logcore.LogStatistics(
            segments=1, size_bytes=size, log_start_offset=0, high_watermark=5, log_end_offset=5,
            durable_end_offset=durable, appends=3, records_appended=5, bytes_appended=size, syncs=syncs, rolls=0,
        )  # fmt: skip
        log.roll()
        log.delete_records(5)
        assert (
            log.statistics().rolls,
            log.statistics().segments,
            log.statistics().size_bytes,
        ) == (1, 1, 0)
        assert (log.host.writer.written_bytes, log.durable_end_offset) == (size, 5)
    with logcore.open("t-0", read_only=True, fs=disk) as reader:
        statistics = reader.statistics()
        assert (
            statistics.segments,
            statistics.log_start_offset,
            statistics.log_end_offset,
        ) == (
            1,
            5,
            5,
        )
        assert {
            statistics.appends,
            statistics.records_appended,
            statistics.bytes_appended,
            statistics.syncs,
            statistics.rolls,
        } == {0}
    with logcore.open("t-0", durability=policy, fs=disk) as log:
        log.append(b"x")
        statistics = log.statistics()
        assert (
            statistics.log_end_offset,
            statistics.appends,
            statistics.records_appended,
        ) == (
            6,
            1,
            1,
        )


def test_log_in_the_child_of_a_fork_refuses_writes(partition: Path) -> None:
    """The file system object reports another process id, as after a fork. A real fork
    is tested in tests/faults/test_processes.py.
    """
    fs = OsFS()
    with logcore.open(partition, create=True, fs=fs) as log:
        log.append(b"parent")
        fs.forks += 1
        for call in (
            lambda: log.append(b"child"),
            log.roll,
            log.flush,
            lambda: log.truncate(0),
        ):
            with pytest.raises(logcore.ForkedWriterError, match="in the child"):
                call()
        fs.forks -= 1
        assert log.append(b"parent").offset == 1


def test_failed_open_releases_the_lock(
    partition: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logcore.open(partition, create=True) as log:
        log.append(b"x")

    def no_memory(*arguments: object, **options: object) -> None:
        raise MemoryError

    for owner, name in (
        (Writer, "__init__"),
        (Writer, "start_locked"),
        (logcore.Log, "__init__"),
    ):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(owner, name, no_memory)
            logcore.open(partition)
    with logcore.open(partition) as log:
        assert values(log) == [b"x"]


def test_segment_created_by_another_program_is_not_overwritten(
    partition: Path,
) -> None:
    with logcore.open(partition, create=True) as log:
        log.append(b"x")
        foreign = partition / f"{1:020d}.log"
        foreign.write_bytes(b"other content")
        with pytest.raises(logcore.CorruptLogError, match="another program"):
            log.roll()
        with pytest.raises(logcore.LogFailedError):
            log.append(b"y")
    assert foreign.read_bytes() == b"other content"


def test_append_many_accepts_an_iterator_that_appends_to_the_log(
    partition: Path,
) -> None:
    with logcore.open(partition, create=True) as log:

        def rows() -> Iterator[tuple[bytes | None, bytes]]:
            log.append(b"inner", headers=((name, b"") for name in ("x", "y")))
            yield None, b"a"
            yield None, b"b"

        receipt = log.append_many(rows())
        assert (receipt.offset, receipt.last_offset) == (1, 2)
        assert values(log) == [b"inner", b"a", b"b"]
        for invalid_call in (
            lambda: log.append_many(7),
            lambda: log.append_batch("text"),
        ):  # type: ignore[arg-type]
            with pytest.raises(logcore.InvalidRecordError, match="takes"):
                invalid_call()
        assert log.log_end_offset == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_tail_is_woken_when_records_become_visible(
    partition: Path, policy: str
) -> None:
    with logcore.open(partition, create=True, durability=policy) as log:
        values: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=lambda: [values.put(record.value) for record in log.tail(0)]
        )
        thread.start()
        try:
            for number in range(10):
                log.append(b"%d" % number)
                assert values.get(timeout=60) == b"%d" % number
        finally:
            log.close()
            thread.join()


def test_close_without_room_for_indexes_is_not_marked_clean() -> None:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, config={"index.interval.bytes": 60}, fs=disk)
    for number in range(20):
        log.append(b"%d" % number * 20)
    written = log.host.writer.written_bytes
    disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.index", times=None))
    log.close()
    disk.faults = None
    assert written == len(disk.content(f"t-0/{0:020d}.log"))
    assert not disk.exists(checkpoint.CLEAN_SHUTDOWN)
    with logcore.open("t-0", config={"index.interval.bytes": 60}, fs=disk) as log:
        assert values(log) == [b"%d" % number * 20 for number in range(20)]


def test_tick_syncs_at_the_end_of_an_interval() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, durability="interval(1000)", fs=disk) as log:
        log.append(b"x")
        disk.advance(999)
        assert (log.tick(), log.durable_end_offset) == (False, 0)
        disk.advance(1)
        assert (log.tick(), log.durable_end_offset) == (True, 1)


def test_idle_tick_returns_false_and_writes_nothing() -> None:
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


def test_recovery_point_advances_with_the_synced_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An opening after a crash then checks a limited number of bytes, even if the
    caller never calls tick().
    """
    monkeypatch.setattr("logcore.partition.writer._RECOVERY_LAG_BYTES", 1_000)
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        for number in range(1, 31):
            log.append(b"x" * 232)  # 300 bytes
            # 1,200 bytes are the first size above the lag of 1,000.
            assert log.recovery_point == number // 4 * 4, number
        saved = checkpoint.read_offsets(disk, ".", checkpoint.RECOVERY_POINT)
        assert saved == {("t", 0): log.recovery_point} != {("t", 0): 0}


@pytest.mark.parametrize("truncates", [True, False])
def test_indexes_are_written_with_the_recovery_point(
    monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    """Then an opening after a crash and readers in other processes find a batch without
    reading the whole log.
    """
    monkeypatch.setattr("logcore.partition.writer._RECOVERY_LAG_BYTES", 1_000)
    disk = SimulatedDisk()
    config = {"index.interval.bytes": 100}
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
        assert log.host.writer.active.is_resumed
        assert log.append(b"next").offset == 20 + truncates


def test_abort_is_indexed_with_the_oldest_open_transaction() -> None:
    """An abort marker without a transaction gets no entry, because Kafka's readers skip
    the records that an entry covers.
    """
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        for producer_id in (1, 2, 3):
            batch = encode(
                [(b"k", b"v")],
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=0,
                transactional=True,
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


def test_index_of_nonexistent_aborted_transactions_is_deleted() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        log.append(b"x")
        disk.kill()
    path = f"t-0/{0:020d}.txnindex"
    disk.put(path, np.array([(0, 7, 0, 0, 0)], TXN_ENTRY).tobytes())
    with logcore.open("t-0", fs=disk):
        assert not disk.exists(path)


def test_file_of_a_failed_rewrite_does_not_block_the_next_rewrite() -> None:
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        disk.faults = FaultPlan(
            Fault("unlink", errno.EIO, path="*.cleaned", times=None)
        )
        with rewriting_of(log) as view:
            view.create(0)
        disk.faults = None
        assert disk.exists(f"t-0/{0:020d}.log.cleaned")
        with rewriting_of(log) as view:
            view.create(0)
        assert not [path for path in disk.files() if path.endswith(".cleaned")]


def test_append_synced_before_a_concurrent_close_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each append moves the recovery point.
    monkeypatch.setattr("logcore.partition.writer._RECOVERY_LAG_BYTES", -1)
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk)
    lock = log._state.lock
    wait = log.host.writer.commit.wait

    class LockAcquiredLate:
        """The lock of the log. Another thread acquires it first and closes the log."""

        def __enter__(self) -> None:
            log._state.lock = lock
            log.close()
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

        def locked(self) -> bool:
            return lock.locked()

    def synced(target: int) -> None:
        wait(target)
        log._state.lock = LockAcquiredLate()  # type: ignore[assignment]

    monkeypatch.setattr(log.host.writer.commit, "wait", synced)
    assert log.append(b"x") == (0, 0, disk.now_ms(), "disk", "t", 0)
    assert log.is_closed
    with logcore.open("t-0", fs=disk) as log:
        assert (log.recovery_point, values(log)) == (1, [b"x"])


def test_failed_segment_seal_refuses_writes_except_on_a_full_disk() -> None:
    for code, continues in ((errno.ENOSPC, True), (errno.EIO, False)):
        disk = SimulatedDisk()
        with logcore.open("t-0", create=True, fs=disk) as log:
            log.append(b"x")
            with (
                adopting(log.host.writer) as adoption,
                pytest.raises(logcore.LogcoreError),
            ):
                disk.faults = FaultPlan(
                    Fault("pwrite", code, path="*index", times=None)
                )
                adoption.seal()
            disk.faults = None
            assert log.has_failed is not continues
            if continues:
                assert log.append(b"y").offset == 1
            else:
                with pytest.raises(logcore.LogFailedError):
                    log.append(b"y")
            assert values(log)[0] == b"x"


@pytest.mark.parametrize("path", ["orders\0-0", "\ud800-0", b"orders-0"])
def test_path_that_no_file_system_supports_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for read_only in (True, False):
        with pytest.raises(logcore.InvalidNameError):
            logcore.open(path, create=not read_only, read_only=read_only)
    assert not list(tmp_path.iterdir())


def test_table_of_a_log_is_kept_up_to_date(partition: Path) -> None:
    with logcore.open(partition, create=True) as log:
        table = log.table()
        for value in (b"old", b"new"):
            log.append(value, key=b"k")
            assert dict(table) == {b"k": value}


#: Each call that may change a log, with arguments that are valid up to the refusal.
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
    "retention_facts": lambda log: log.host.maintenance.facts(),
    "reconfigure": lambda log: log.reconfigure({}),
    "roll": lambda log: log.roll(),
    "flush": lambda log: log.flush(),
    "tick": lambda log: log.tick(),
    "adopting": lambda log: adopting(log.host.writer).__enter__(),
    "rewriting": lambda log: rewriting_of(log).__enter__(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reason", ["closed", "read only", "forked", "failed"])
def test_log_without_write_access_refuses_every_change(
    change: str, reason: str
) -> None:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, durability="os", fs=disk)
    log.append(b"x")
    expected: type[logcore.LogcoreError] = logcore.LogFailedError
    if reason == "failed":
        disk.faults = FaultPlan(Fault("fdatasync", errno.EIO))
        with pytest.raises(logcore.DurabilityUnknownError):
            log.flush()
    elif reason == "forked":
        disk.forks += 1
        expected = logcore.ForkedWriterError
    else:
        log.close()
        log.close()
        expected = logcore.LogClosedError
        if reason == "read only":
            log = logcore.open("t-0", read_only=True, fs=disk)
            expected = logcore.ReadOnlyLogError
    before = disk.files()
    with pytest.raises(expected):
        CHANGES[change](log)
    assert disk.files() == before
    disk.forks = 0
    log.close()


def test_reader_gets_epochs_and_recovery_point_from_the_files(
    partition: Path,
) -> None:
    with (
        logcore.open(partition, create=True) as log,
        logcore.open(partition, read_only=True) as reader,
    ):
        log.append(b"one")
        log.begin_epoch(4)
        log.append(b"two")
        log.flush()
        reader.refresh()
        for epoch in range(6):
            assert reader.end_of_epoch(epoch) == log.end_of_epoch(epoch)
        assert reader.leader_epoch == log.leader_epoch == 4
        assert reader.recovery_point == log.recovery_point
        (partition / "leader-epoch-checkpoint").unlink()
        assert reader.end_of_epoch(0) == (0, 1) and reader.leader_epoch == 4, (
            "read from the batches"
        )


def test_reader_has_no_recovery_report_and_is_not_replicated(
    partition: Path,
) -> None:
    with logcore.open(partition, create=True, replicated=True) as log:
        assert log.recovery_report is not None
        assert log.is_replicated
    with logcore.open(partition, read_only=True) as reader:
        assert reader.recovery_report is None
        assert not reader.is_replicated


def test_closed_log_refuses_reads(partition: Path) -> None:
    log = logcore.open(partition, create=True)
    log.close()
    for call in (
        lambda: log.read(0),
        log.scan,
        lambda: log.get(0),
        lambda: log.batches(0),
        log.tail,
    ):
        with pytest.raises(logcore.LogClosedError):
            call()


def test_log_that_was_not_closed_warns(partition: Path) -> None:
    log = logcore.open(partition, create=True)
    with pytest.warns(ResourceWarning, match="was not closed"):
        log.__del__()
    log.close()
