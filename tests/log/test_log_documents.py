"""Sentences of Kafka's documentation of the log: one test for each sentence, listed in
docs/map.md. Each test is short and checks only its sentence. The tests of the modules
cover more cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.cleaner import clean
from logcore.directory.maintenance import MaintenanceConfig
from logcore.recordbatch import encode
from logcore.retention import PartitionFacts
from logcore.testing import SimulatedDisk

KEYED: dict[str, Any] = {
    "cleanup.policy": "compact",
    "segment.bytes": 400,
    "delete.retention.ms": 1000,
}


def open_orders(path: Path, **config: Any) -> logcore.Log:
    return logcore.open(path / "orders-0", create=True, config=config, durability="os")


def offsets(log: logcore.Log, start: int | None = None) -> list[int]:
    return [
        record.offset
        for record in log.read(log.log_start_offset if start is None else start)
    ]


# -- appends ---------------------------------------------------------------------------


def test_appends_are_serial_and_change_only_the_last_file(tmp_path: Path) -> None:
    with open_orders(tmp_path, **{"segment.bytes": 300}) as log:
        for number in range(20):
            before = {
                path.name: path.stat().st_size
                for path in (tmp_path / "orders-0").glob("*.log")
            }
            assert log.append(b"v" * 50).offset == number
            after = {
                path.name: path.stat().st_size
                for path in (tmp_path / "orders-0").glob("*.log")
            }
            changed = [name for name, size in after.items() if before.get(name) != size]
            assert changed == [max(after)]


def test_appends_roll_the_file_over_at_a_configurable_size(tmp_path: Path) -> None:
    with open_orders(tmp_path, **{"segment.bytes": 300}) as log:
        log.append_many([(None, b"v" * 90)])
        for _ in range(9):
            log.append(b"v" * 90)
    sizes = [
        path.stat().st_size for path in sorted((tmp_path / "orders-0").glob("*.log"))
    ]
    assert len(sizes) > 3 and max(sizes) <= 300


def test_appends_name_each_file_by_its_first_offset(tmp_path: Path) -> None:
    with open_orders(tmp_path, **{"segment.bytes": 300}) as log:
        for _ in range(9):
            log.append(b"v" * 90)
        for path in sorted((tmp_path / "orders-0").glob("*.log")):
            batch = next(logcore.recordbatch.read_batches(path.read_bytes()))
            assert path.name == f"{batch.base_offset:020d}.log"


# -- flush -----------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["flush.messages", "policy"])
def test_flush_M_messages_loses_fewer_than_M(setting: str) -> None:
    """M: the number of messages to write before forcing the system to flush."""
    disk = SimulatedDisk()
    config = {"flush.messages": 5} if setting == "flush.messages" else {}
    log = logcore.open(
        "t-0",
        create=True,
        config=config,
        durability="os" if config else "every(5)",
        fs=disk,
    )
    for _ in range(13):
        log.append(b"v")
    assert log.durable_end_offset == 10
    disk.crash()
    least_records = min(
        len(list(read_reopened(state.disk()))) for state in disk.crash_states(limit=50)
    )
    assert least_records == 10


@pytest.mark.parametrize("setting", ["flush.ms", "policy"])
def test_flush_S_seconds_loses_only_younger_records(setting: str) -> None:
    """S: the number of seconds after which a flush is forced by the caller of tick()."""
    disk = SimulatedDisk()
    config = {"flush.ms": 2_000} if setting == "flush.ms" else {}
    log = logcore.open(
        "t-0",
        create=True,
        config=config,
        durability="os" if config else "interval(2000)",
        fs=disk,
    )
    log.append(b"old")
    disk.advance(1_999)
    log.tick()
    assert log.durable_end_offset == 0
    disk.advance(1)
    log.tick()
    assert log.durable_end_offset == 1
    log.append(b"young")
    disk.crash()
    record_counts = {
        len(list(read_reopened(state.disk()))) for state in disk.crash_states(limit=50)
    }
    assert record_counts == {1, 2}


def read_reopened(disk: SimulatedDisk) -> list[logcore.Record]:
    with logcore.open("t-0", create=True, fs=disk) as log:
        return list(log.read(0))


# -- reads -----------------------------------------------------------------------------


def test_reads_take_an_offset_and_a_chunk_size(tmp_path: Path) -> None:
    with open_orders(tmp_path) as log:
        for _ in range(20):
            log.append(b"v" * 100)
        chunk_offsets = [record.offset for record in log.read(5, max_bytes=1000)]
        assert chunk_offsets == [5, 6, 7, 8, 9]
        assert [record.offset for record in log.read(5, max_bytes=1)] == [5], (
            "at least one batch"
        )


def test_reads_of_a_large_message_succeed_whatever_the_chunk(tmp_path: Path) -> None:
    with open_orders(tmp_path) as log:
        log.append(b"v" * 900_000)
        assert len(log.stored(0, max_bytes=1000)) == 1
        assert next(log.read(0, max_bytes=1000)).value == b"v" * 900_000
        with pytest.raises(logcore.RecordTooLargeError):
            log.append(b"v" * 1_100_000)


def test_reads_find_the_segment_by_binary_search(tmp_path: Path) -> None:
    with open_orders(tmp_path, **{"segment.bytes": 300}) as log:
        for _ in range(60):
            log.append(b"v" * 50)
        for offset in range(60):
            assert log.get(offset).offset == offset
            assert next(log.read(offset)).offset == offset


def test_reads_may_start_right_now(tmp_path: Path) -> None:
    with open_orders(tmp_path) as log:
        log.append(b"before")
        tail = log.tail(timeout=300)
        log.append(b"after")
        assert next(tail).value == b"after"


def test_reads_outside_the_log_are_out_of_range(tmp_path: Path) -> None:
    with open_orders(tmp_path) as log:
        log.append(b"v")
        for offset in (-1, 2, 1 << 62):
            with pytest.raises(logcore.OffsetOutOfRangeError):
                log.read(offset)
        log.delete_records(1)
        with pytest.raises(logcore.OffsetOutOfRangeError):
            log.read(0)


# -- deletes ---------------------------------------------------------------------------


def test_deletes_take_one_segment_at_a_time(tmp_path: Path) -> None:
    with open_orders(tmp_path, **{"segment.bytes": 300, "retention.bytes": 700}) as log:
        for _ in range(40):
            log.append(b"v" * 50)
        bases = [segment.base_offset for segment in log._state.segments]
        log.retain()
        assert log.log_start_offset in bases
        assert offsets(log)[0] == log.log_start_offset


def test_deletes_follow_pluggable_policies(tmp_path: Path) -> None:
    def every_other_day(log_facts: PartitionFacts) -> int:
        return len(log_facts.segments) // 2

    with open_orders(tmp_path, **{"segment.bytes": 300}) as log:
        for _ in range(40):
            log.append(b"v" * 50)
        count = len(log._state.segments)
        assert log.retain(policy=every_other_day) == count // 2
        assert len(log._state.segments) == count - count // 2


def test_deletes_leave_readers_a_consistent_view(tmp_path: Path) -> None:
    with open_orders(tmp_path, **{"segment.bytes": 300}) as log:
        for _ in range(40):
            log.append(b"v" * 50)
        reader = log.read(0)
        first = [next(reader).offset for _ in range(3)]
        log.retain(policy=lambda facts: 99)
        log.append(b"later")
        assert first + [record.offset for record in reader] == list(range(40))


# -- guarantees ------------------------------------------------------------------------


def test_guarantees_recovery_truncates_to_the_last_valid_offset(tmp_path: Path) -> None:
    with open_orders(tmp_path) as log:
        for _ in range(5):
            log.append(b"v" * 50)
    path = tmp_path / "orders-0" / f"{0:020d}.log"
    undamaged = path.read_bytes()
    (tmp_path / "recovery-point-offset-checkpoint").unlink()
    path.write_bytes(undamaged[:-1])
    with open_orders(tmp_path) as log:
        assert log.log_end_offset == 4
        assert log.recovery_report is not None and log.recovery_report.cut_bytes > 0


def test_guarantees_truncation_and_nonsense_are_both_handled(tmp_path: Path) -> None:
    """A crash loses an unwritten block or adds a nonsense block, because the disk
    writes sizes and data in any order.
    """
    with open_orders(tmp_path) as log:
        for _ in range(5):
            log.append(b"v" * 50)
    path = tmp_path / "orders-0" / f"{0:020d}.log"
    undamaged = path.read_bytes()
    (tmp_path / "recovery-point-offset-checkpoint").unlink()
    for tail in (b"\0" * 4096, bytes(range(256)) * 16, undamaged[:30]):
        path.write_bytes(undamaged + tail)
        with logcore.open(tmp_path / "orders-0", read_only=True) as reader:
            assert reader.log_end_offset == 5
        (tmp_path / "recovery-point-offset-checkpoint").unlink(missing_ok=True)
        with open_orders(tmp_path) as log:
            assert log.log_end_offset == 5 and path.read_bytes() == undamaged


# -- compaction ------------------------------------------------------------------------


def log_to_compact(disk: SimulatedDisk, count: int = 60) -> logcore.Log:
    log = logcore.open("t-0", create=True, config=KEYED, durability="os", fs=disk)
    for number in range(count):
        log.append(b"%d" % number, key=b"k%d" % (number % 7))
    log.roll()
    return log


def test_compaction_keeps_order() -> None:
    with log_to_compact(SimulatedDisk()) as log:
        clean(log)
        kept_offsets = offsets(log)
        assert kept_offsets == sorted(kept_offsets) and len(kept_offsets) < 60


def test_compaction_never_changes_an_offset() -> None:
    with log_to_compact(SimulatedDisk()) as log:
        before = {record.offset: (record.key, record.value) for record in log.read(0)}
        clean(log)
        assert all(
            before[record.offset] == (record.key, record.value)
            for record in log.read(0)
        )
        assert log.get(3).offset == min(
            offset for offset in offsets(log) if offset >= 3
        ), "the next record is returned in its place"


def test_compaction_leaves_the_final_state_to_any_read_from_offset_zero() -> None:
    with log_to_compact(SimulatedDisk()) as log:
        clean(log)
        state = {record.key: record.value for record in log.read(0)}
        assert state == {b"k%d" % (number % 7): b"%d" % number for number in range(60)}


def test_compaction_leaves_the_head_dense() -> None:
    with log_to_compact(SimulatedDisk()) as log:
        for _ in range(4):  # in the active segment, which is not compacted
            log.append(b"v", key=b"k1")
        clean(log)
        assert offsets(log, 60) == [60, 61, 62, 63]


def test_compaction_shows_tombstones_to_readers_that_keep_up() -> None:
    disk = SimulatedDisk()
    with log_to_compact(disk) as log:
        log.append(None, key=b"k1")
        for wait_ms, is_there in ((0, True), (999, True), (1, False)):
            disk.advance(wait_ms)
            log.append(b"x", key=b"other")
            log.roll()
            clean(log, force=True)
            assert (b"k1" in {record.key for record in log.read(0)}) is is_there


def test_compaction_does_not_block_reads_and_appends() -> None:
    with log_to_compact(SimulatedDisk()) as log:
        reader = log.read(0)
        steps = 0
        for _ in logcore.cleaner.cleaning(log):
            log.append(b"%d" % steps, key=b"k0")
            next(reader)
            steps += 1
        assert steps > 3


def test_compaction_can_be_throttled() -> None:
    disk = SimulatedDisk()
    maintenance = MaintenanceConfig(compaction_bytes_per_s=1_000)
    with logcore.open_dir(
        "d",
        create=True,
        config=KEYED,
        durability="os",
        maintenance=maintenance,
        fs=disk,
    ) as logdir:
        logdir.create_topic("t")
        for number in range(200):
            logdir.partition("t", 0).append(b"%d" % number, key=b"k%d" % (number % 7))
        disk.advance(15_000)
        seconds = 0
        while logdir.size_bytes("t", 0) > 3_000:
            disk.advance(1_000)
            logdir.tick()
            seconds += 1
        assert seconds > 10, "about 15 kB, processed twice, at 1 kB per second"


# -- control batches -------------------------------------------------------------------


def test_control_batches_are_not_passed_on_to_applications(tmp_path: Path) -> None:
    with open_orders(tmp_path) as log:
        producer_fields: dict[str, Any] = {
            "producer_id": 7,
            "producer_epoch": 0,
            "transactional": True,
        }
        log.append_batch(encode([(b"k", b"kept")], base_sequence=0, **producer_fields))
        log.end_transaction(7, 0, commit=True)
        log.append_batch(encode([(b"k", b"gone")], base_sequence=1, **producer_fields))
        log.end_transaction(7, 0, commit=False)
        assert [record.value for record in log.read(0)] == [b"kept", b"gone"]
        assert [record.value for record in log.read(0, isolation="read_committed")] == [
            b"kept"
        ]
        kinds = [batch.control_type() for batch in log.batches(0) if batch.is_control]
        assert kinds == ["COMMIT", "ABORT"]


def test_control_batches_hold_one_record_with_version_and_type(tmp_path: Path) -> None:
    with open_orders(tmp_path) as log:
        log.end_transaction(7, 0, commit=True)
        log.end_transaction(7, 0, commit=False, coordinator_epoch=3)
        records_by_batch = [batch.records() for batch in log.batches(0)]
        assert [[record.key for record in records] for records in records_by_batch] == [
            [b"\0\0\0\1"],
            [b"\0\0\0\0"],
        ]
        assert [records[0].value for records in records_by_batch] == [
            b"\0\0\0\0\0\0",
            b"\0\0\0\0\0\3",
        ]


def test_control_batches_hold_back_committed_readers_while_a_transaction_is_open(
    tmp_path: Path,
) -> None:
    with open_orders(tmp_path) as log:
        log.append(b"before")
        batch = encode(
            [(b"k", b"v")],
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
            transactional=True,
        )
        log.append_batch(batch)
        log.append(b"after")
        assert log.last_stable_offset == 1 < log.high_watermark == 3
        log.end_transaction(7, 0, commit=True)
        assert log.last_stable_offset == 4
