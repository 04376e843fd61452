"""Producer state: duplicates of the last five batches, gaps, fencing and restarts."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import logcore
from logcore import recordbatch, retention
from logcore.index import TXN_ENTRY
from logcore.log import Log
from logcore.partition.producer_state import coordinator_epochs
from logcore.partition.producers import (
    Producers,
    SequencedBatch,
    last_sequence,
    snapshot_entries,
)
from logcore.recordbatch import Marker, encode
from logcore.segment import Segment
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from support.vectors import VECTORS

NOW_MS = 10**15  # so late that no producer expires


def batch(
    sequence: int,
    *,
    count: int = 1,
    producer: int = 7,
    epoch: int = 0,
    transactional: bool = False,
) -> bytes:
    return recordbatch.encode(
        [(b"k", b"%d" % (sequence + number), (), NOW_MS) for number in range(count)],
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        yield log


def offsets(log: Log) -> list[int]:
    return [record.offset for record in log.read(0)]


def test_P47_last_five_batches_are_known_and_stored_once(log: Log) -> None:
    receipts = [log.append_batch(batch(2 * number, count=2)) for number in range(6)]
    for number in range(1, 6):
        duplicate = log.append_batch(batch(2 * number, count=2))
        assert (
            (duplicate.offset, duplicate.last_offset)
            == (receipts[number].offset, receipts[number].last_offset)
            == (2 * number, 2 * number + 1)
        )
    with pytest.raises(logcore.OutOfOrderSequenceError, match="expected sequence 12"):
        log.append_batch(batch(0, count=2))
    assert offsets(log) == list(range(12))


def test_duplicate_of_an_interrupted_append_makes_the_batch_visible(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt came after the batch was written and before it was published."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(log.host.writer, "settle_locked", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.append_batch(batch(0))
    assert log.append_batch(batch(0)).offset == 0
    assert offsets(log) == [0]


def test_P48_overlaps_gaps_and_other_sizes_are_out_of_order(log: Log) -> None:
    log.append_batch(batch(5, count=2))  # unknown producer: any sequence
    log.append_batch(batch(7, count=2))
    for out_of_order in (
        batch(6, count=2),
        batch(10),
        batch(8),
        batch(7, count=1),
        batch(5, count=4),
        batch(0),
    ):
        with pytest.raises(logcore.OutOfOrderSequenceError):
            log.append_batch(out_of_order)
    assert log.append_batch(batch(9)).offset == 4
    assert log.append_batch(batch(0, producer=8)).offset == 5, (
        "other producers have their own sequences"
    )


def test_P49_new_epoch_starts_at_sequence_zero_and_fences_old_one(log: Log) -> None:
    log.append_batch(batch(0, count=3))
    with pytest.raises(logcore.OutOfOrderSequenceError):
        log.append_batch(batch(3, epoch=1))
    assert log.append_batch(batch(0, epoch=1)).offset == 3
    for sequence in (1, 3, 0):
        with pytest.raises(logcore.InvalidProducerEpochError, match="epoch 1 or newer"):
            log.append_batch(batch(sequence, epoch=0))
    assert log.append_batch(batch(0, epoch=1)).offset == 3, "a duplicate"


def test_P48_sequences_wrap(log: Log) -> None:
    top = 2**31 - 1
    log.append_batch(batch(top - 1, count=1))
    assert log.append_batch(batch(top, count=3)).last_offset == 3
    assert log.append_batch(batch(top, count=3)).offset == 1, (
        "a duplicate whose sequence numbers wrap"
    )
    assert log.append_batch(batch(2)).offset == 4
    assert last_sequence(top, 3) == 1


def test_batches_of_one_call_must_be_in_sequence(log: Log) -> None:
    log.append_batch(batch(0) + batch(1) + batch(0, producer=9))
    with pytest.raises(logcore.OutOfOrderSequenceError):
        log.append_batch(batch(2) + batch(4))
    assert log.append_batch(batch(2) + batch(3)).last_offset == 4
    log.append_batch(batch(50), check_sequence=False)
    assert log.append_batch(batch(51)).offset == 6, (
        "unchecked batches are also remembered"
    )


def test_repeated_batch_in_a_call_refuses_the_whole_call(log: Log) -> None:
    plain = recordbatch.encode([(b"k", b"plain", (), NOW_MS)])
    assert log.append_batch(batch(0) + plain + batch(1)).last_offset == 2, (
        "one of the batches has no producer"
    )
    for call_bytes in (batch(1) + batch(2), batch(2) + plain + batch(1)):
        with pytest.raises(logcore.OutOfOrderSequenceError):
            log.append_batch(call_bytes)
    assert log.append_batch(batch(2) + plain).offset == 3
    assert log.append_batch(batch(1)).offset == 2, "the same batch alone is a duplicate"
    assert offsets(log) == [0, 1, 2, 3, 4]


def test_damage_that_hides_producers_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t-0"
    with logcore.open(path, create=True) as log:
        for number in range(3):
            log.append_batch(batch(number))
        size = (path / f"{0:020d}.log").stat().st_size // 3
    for snapshot in path.glob("*.snapshot"):
        snapshot.unlink()
    with logcore.open(path) as log:
        with (path / f"{0:020d}.log").open("r+b") as file:
            file.seek(size + 8)
            file.write(b"\xff")  # the length in the header of the second batch
        for sequence in (1, 3):
            with pytest.raises(logcore.CorruptBatchError):
                log.append_batch(batch(sequence))
        assert log.log_end_offset == 3
        assert log.append(b"of no producer").offset == 3


def test_damage_outside_batch_headers_hides_no_producer(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    with logcore.open(path, create=True) as log:
        for number in range(3):
            log.append_batch(batch(number))
    for snapshot in path.glob("*.snapshot"):
        snapshot.unlink()
    file = path / f"{0:020d}.log"
    data = bytearray(file.read_bytes())
    data[len(data) // 3 - 1] ^= 1
    file.write_bytes(data)
    with logcore.open(path) as log:
        assert [log.append_batch(batch(number)).offset for number in (1, 2, 3)] == [
            1,
            2,
            3,
        ]


def test_marker_fences_after_a_crash_and_after_its_deletion() -> None:
    """Because of the stored metadata, the next opening searches for the marker, and the
    next roll saves its epoch.
    """
    disk = SimulatedDisk(now_ms=NOW_MS)
    config = {"index.interval.bytes": 0, "file.delete.delay.ms": 0}
    log = logcore.open("t-0", create=True, config=config, fs=disk)
    log.append(b"first")
    log.end_transaction(7, 3, commit=True)
    for _ in range(20):
        log.append(b"behind it")
    log.flush()
    disk.advance(10_000)
    log.tick()
    disk.kill()
    with logcore.open("t-0", config=config, fs=disk) as log:
        assert not log.host.writer.active.is_resumed, (
            "all headers are read, because there are producers"
        )
        log.roll()
        log.append(b"behind a roll")
        log.delete_records(22)
        log.tick()
        assert not disk.exists(f"t-0/{0:020d}.log")
    with logcore.open("t-0", config=config, fs=disk) as log:
        with pytest.raises(logcore.InvalidProducerEpochError):
            log.append_batch(batch(0, epoch=2))
        assert log.append_batch(batch(0, epoch=3)).offset == 23


def test_marker_accepts_the_largest_numbers_and_refuses_larger_ones(log: Log) -> None:
    largest = (2**63 - 1, 2**15 - 1, 2**31 - 1)
    for index in range(3):
        for invalid in (-1, largest[index] + 1):
            numbers = [1, 1, 1]
            numbers[index] = invalid
            with pytest.raises(logcore.InvalidRecordError, match="a marker needs"):
                log.end_transaction(
                    numbers[0], numbers[1], commit=True, coordinator_epoch=numbers[2]
                )
    assert (
        log.end_transaction(
            *largest[:2], commit=True, coordinator_epoch=largest[2]
        ).offset
        == 0
    )
    assert log.end_transaction(0, 0, commit=True).offset == 1


def test_snapshot_below_the_log_start_is_ignored(tmp_path: Path) -> None:
    """The batches of its producers were deleted, and a newer producer may have the same
    id.
    """
    path = tmp_path / "t-0"
    with logcore.open(path, create=True) as log:
        log.append_batch(batch(0))
        log.roll()
        stale = (path / f"{1:020d}.snapshot").read_bytes()
        log.append_batch(batch(1))
        log.roll()
        log.append_batch(batch(2))
        log.delete_records(2)
    for snapshot in path.glob("*.snapshot"):
        snapshot.unlink()
    (path / f"{1:020d}.snapshot").write_bytes(stale)
    with logcore.open(path) as log:
        assert log.append_batch(batch(2)).offset == 2, (
            "the batches show that it is a duplicate"
        )
        assert log.append_batch(batch(3)).offset == 3


@pytest.mark.parametrize(
    "event", ["close", "crash", "roll", "truncate", "snapshot lost", "snapshot damaged"]
)
def test_P50_producer_state_survives_reopening(tmp_path: Path, event: str) -> None:
    path = tmp_path / "t-0"
    log = logcore.open(path, create=True)
    log.append_many([(b"k", b"plain")] * 3)
    for number in range(4):
        log.append_batch(batch(number))
    if event == "roll":
        log.roll()
        log.append_batch(batch(4))
    if event == "truncate":
        log.truncate(6)
    if event == "crash":
        copy = tmp_path / "copy"
        copy.mkdir()
        os.system(f"cp -r {path} {copy}")
        log.close()
        path = copy / "t-0"
    else:
        log.close()
    snapshots = sorted(path.glob("*.snapshot"))
    assert [file.name for file in snapshots] == {
        "crash": [],
        "roll": [f"{7:020d}.snapshot", f"{8:020d}.snapshot"],
        "truncate": [],
    }.get(event, [f"{7:020d}.snapshot"])
    if event == "snapshot lost":
        snapshots[0].unlink()
    if event == "snapshot damaged":
        content = bytearray(snapshots[0].read_bytes())
        content[20] ^= 1
        snapshots[0].write_bytes(content)
    with logcore.open(path) as log:
        last_sequence = {"roll": 4, "truncate": 2}.get(event, 3)
        end = log.log_end_offset
        assert log.append_batch(batch(last_sequence)).offset == end - 1, "a duplicate"
        with pytest.raises(logcore.OutOfOrderSequenceError):
            log.append_batch(batch(last_sequence + 2))
        assert log.append_batch(batch(last_sequence + 1)).offset == end


def test_snapshot_above_the_recovered_end_is_deleted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t-0"
    with logcore.open(path, create=True) as log:
        log.append_batch(batch(0))
    (path / f"{50:020d}.snapshot").write_bytes(
        (path / f"{1:020d}.snapshot").read_bytes()
    )
    with logcore.open(path) as log:
        assert not (path / f"{50:020d}.snapshot").exists()
        log.append_many([(b"k", b"v")] * 60)
        assert log.append_batch(batch(1)).offset == 61


def test_log_without_idempotent_producers_has_no_snapshots(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append(b"v")
        log.append_batch(recordbatch.encode([(b"k", b"v")], now_ms=1))
        log.roll()
    assert not list((tmp_path / "t-0").glob("*.snapshot"))


def test_failed_append_is_not_a_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append_batch(batch(0))
        with monkeypatch.context() as patch:
            patch.setattr(log.host.writer, "store_locked", _raise_disk_full)
            with pytest.raises(logcore.DiskFullError):
                log.append_batch(batch(1))
        assert log.append_batch(batch(1)).offset == 1
        assert log.append_batch(batch(1)).offset == 1
        assert log.log_end_offset == 2


def _raise_disk_full(*_: Any) -> None:
    raise logcore.DiskFullError("no space")


@pytest.mark.parametrize("nth", [2, 3])
def test_stored_part_of_a_failed_append_is_a_duplicate(nth: int) -> None:
    """Batches of a failed append remain if they are in a later segment. In a retry,
    those batches are duplicates, and the other batches are new.
    """
    disk = SimulatedDisk(now_ms=NOW_MS)
    with logcore.open(
        "t-0", create=True, config={"segment.bytes": 250}, durability="os", fs=disk
    ) as log:
        log.append_batch(batch(0))
        disk.faults = FaultPlan(Fault("pwrite", errno.ENOSPC, path="*.log", at=nth))
        with pytest.raises(logcore.DiskFullError, match="were stored"):
            log.append_batch(b"".join(batch(number) for number in range(1, 10)))
        disk.faults = None
        assert 1 < log.log_end_offset < 10
        for number in range(max(0, log.log_end_offset - 5), 10):
            assert log.append_batch(batch(number)).offset == number
        assert offsets(log) == list(range(10))


def test_roll_with_unreadable_batches_saves_no_snapshot(
    tmp_path: Path,
) -> None:
    """With a snapshot that lacks their producers, the log would accept these batches a
    second time. An append with a producer id raises the error about the damage.
    """
    path = tmp_path / "t-0"
    with logcore.open(path, create=True) as log:
        log.append_batch(batch(0))
    for snapshot in path.glob("*.snapshot"):
        snapshot.unlink()
    with logcore.open(path) as log:
        with (path / f"{0:020d}.log").open("r+b") as file:
            file.seek(8)
            file.write(b"\xff")  # the length in the header
        log.roll()
        assert log.append(b"of no producer").offset == 1
        log.roll()
        assert not list(path.glob("*.snapshot"))
        with pytest.raises(logcore.CorruptBatchError):
            log.append_batch(batch(0))


def test_snapshot_that_disappears_before_it_is_read_is_ignored() -> None:
    """Another process that shares the log may write a newer snapshot and delete the
    older one.
    """

    class DeletingDisk(SimulatedDisk):
        deleted_name = ""

        def listdir(self, path: str) -> list[str]:
            names = super().listdir(path)
            if self.deleted_name in names:
                self.unlink(f"{path}/{self.deleted_name}")
            return names

    disk = DeletingDisk(now_ms=NOW_MS)
    with logcore.open("t-0", create=True, fs=disk) as log:
        for number in range(4):
            log.append_batch(batch(number))
            log.roll()
    with logcore.open("t-0", fs=disk) as log:
        disk.deleted_name = f"{4:020d}.snapshot"
        assert [log.append_batch(batch(number)).offset for number in (3, 4)] == [3, 4]
        assert not disk.exists(f"t-0/{disk.deleted_name}")


def test_duplicates_below_a_snapshot_are_found_within_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search begins at an index entry below the snapshot. A batch below that entry
    is refused as out of order, so that it is never stored twice.
    """
    size = len(batch(0))
    disk = SimulatedDisk(now_ms=NOW_MS)
    config = {"index.interval.bytes": 0}
    with logcore.open("t-0", create=True, config=config, fs=disk) as log:
        for number in range(20):
            log.append_batch(batch(number))
    for limit in (0, 1, 3, 5):
        monkeypatch.setattr(
            "logcore.partition.producer_state._READ_BACK_BYTES", limit * size
        )
        with logcore.open("t-0", config=config, fs=disk) as log:
            for number in range(14, 20):
                if number < 20 - max(limit, 1):  # the snapshot contains the last batch
                    with pytest.raises(logcore.OutOfOrderSequenceError):
                        log.append_batch(batch(number))
                else:
                    assert log.append_batch(batch(number)).offset == number
            assert log.log_end_offset == 20


def test_torn_marker_has_no_coordinator_epoch() -> None:
    data = recordbatch.transaction_marker(
        0, 0, NOW_MS, producer=(7, 0), marker=Marker("COMMIT", 3)
    )
    disk = SimulatedDisk({f"t-0/{0:020d}.log": data})
    assert coordinator_epochs(Segment(disk, "t-0", 0))(0) == 3
    disk = SimulatedDisk({f"t-0/{0:020d}.log": data[:-1]})
    assert coordinator_epochs(Segment(disk, "t-0", 0))(0) == -1


def test_P51_producers_expire_by_record_timestamps(tmp_path: Path) -> None:
    old_batch = recordbatch.encode(
        [(b"k", b"v", (), 1000)], producer_id=7, producer_epoch=0, base_sequence=0
    )
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append_batch(old_batch)
        assert log.append_batch(old_batch).offset == 0
        log.roll()
        assert log.append_batch(batch(99)).offset == 1, (
            "the producer expired, so that any sequence is accepted"
        )


@pytest.mark.parametrize("end", ["close", "kill"])
def test_retry_of_batches_without_timestamps_is_known_after_reopening(end: str) -> None:
    """encode() sets no timestamp by default, and clients may omit it. A batch without a
    timestamp does not make its producer expire.
    """
    disk = SimulatedDisk(now_ms=NOW_MS)
    untimed = recordbatch.encode(
        [(b"k", b"v")], producer_id=7, producer_epoch=0, base_sequence=0
    )
    log = logcore.open("t-0", create=True, fs=disk)
    log.append_batch(untimed)
    if end == "kill":
        disk.advance(retention.FIRST_CHECK_MS)
        log.tick()  # saves the clock, as closing does
    getattr(log if end == "close" else disk, end)()
    for _ in range(2):
        with logcore.open("t-0", fs=disk) as log:
            assert log.append_batch(untimed).offset == 0
            assert log.log_end_offset == 1
    disk.advance(24 * 3_600_000 + 1)
    with logcore.open("t-0", fs=disk) as log:
        log.append_batch(untimed)
        assert log.log_end_offset == 2, (
            "the producer expired after a day without batches"
        )


# -- snapshots -------------------------------------------------------------------------


def test_kafka_snapshots_are_read() -> None:
    directory = VECTORS / "partition-clean" / "orders-0"
    content = (directory / f"{16:020d}.snapshot").read_bytes()
    producers = Producers.unpack(content, 16)
    assert producers is not None and len(producers) == 3 and producers.next_offset == 16
    known_producers = producers._known
    assert known_producers[4000].epoch == 7
    assert list(known_producers[4000].batches) == [
        SequencedBatch(4, 5, 6, 7, 0x18BCFE5680D)
    ]
    assert (
        known_producers[6000].coordinator_epoch,
        known_producers[5000].coordinator_epoch,
    ) == (12, 11)
    later_producers = Producers.unpack(
        (directory / f"{29:020d}.snapshot").read_bytes(), 29
    )
    assert (
        later_producers is not None and later_producers._known[7000].open_offset == 28
    )
    entries = snapshot_entries(content)
    assert entries is not None
    written = snapshot_entries(producers.pack())
    assert written is not None and sorted(written.tolist()) == sorted(entries.tolist())


def test_kafka_snapshot_equals_the_state_of_its_batches() -> None:
    directory = VECTORS / "partition-clean" / "orders-0"
    with logcore.open(directory, read_only=True) as log:
        producers = Producers()
        for kafka_batch in log.batches(log.log_start_offset):
            from logcore.kernels import kernel
            from logcore.partition.producer_state import coordinator_epochs

            if kafka_batch.base_offset >= 16:
                break
            headers, _, _ = kernel.walk(
                kafka_batch.data, 0, len(kafka_batch.data), 2, False
            )
            segment = next(
                segment
                for segment in reversed(log._state.segments)
                if segment.base_offset <= kafka_batch.base_offset
            )
            producers.add_facts(
                headers,
                lambda _, kafka_batch=kafka_batch, segment=segment: coordinator_epochs(
                    segment
                )(kafka_batch.position),
            )  # type: ignore[misc]
    kafka_entries = snapshot_entries((directory / f"{16:020d}.snapshot").read_bytes())
    entries = snapshot_entries(producers.pack())
    assert entries is not None and kafka_entries is not None
    assert sorted(entries.tolist()) == sorted(kafka_entries.tolist())


def test_empty_snapshot_has_the_bytes_of_kafka() -> None:
    assert Producers().pack() == bytes.fromhex("0001 48674bc7 00000000")


@given(st.binary(max_size=200))
def test_random_bytes_are_not_a_snapshot(content: bytes) -> None:
    assert Producers.unpack(content, 5) is None


@given(st.data())
def test_snapshot_with_a_flipped_bit_is_refused(data: st.DataObject) -> None:
    producers = Producers()
    for number in range(3):
        producers.add(
            number,
            number,
            SequencedBatch(0, number, 5, 5 + number, NOW_MS),
            is_transactional=False,
        )
    content = bytearray(producers.pack())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    assert Producers.unpack(bytes(content), 9) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3),
            st.integers(1, 3),
            st.sampled_from(["next", "again", "gap"]),
        ),
        max_size=40,
    )
)
def test_any_sequence_of_retries_stores_each_batch_once(
    steps: list[tuple[int, int, int, str]],
) -> None:
    """A model that keeps the full history gives the same result."""
    producers = Producers()
    end = 0
    model: dict[
        int, list[tuple[int, int, int]]
    ] = {}  # producer -> (first sequence, count, offset) of one epoch
    for producer, back, count, action in steps:
        stored = model.setdefault(producer, [])
        next_sequence = stored[-1][0] + stored[-1][1] if stored else 0
        if action == "again" and back < len(stored):
            sequence, count, offset = stored[-1 - back]
            duplicate = producers.duplicate_of(producer, 0, sequence, count)
            assert duplicate is not None and duplicate.first_offset == offset
        elif action == "gap" and stored:
            with pytest.raises(logcore.OutOfOrderSequenceError):
                producers.duplicate_of(producer, 0, next_sequence + 1 + back, count)
        elif action == "next":
            assert producers.duplicate_of(producer, 0, next_sequence, count) is None
            last = next_sequence + count - 1
            producers.add(
                producer,
                0,
                SequencedBatch(next_sequence, last, end, end + count - 1, NOW_MS),
                is_transactional=False,
            )
            stored.append((next_sequence, count, end))
            end += count


@pytest.mark.parametrize("damage", ["below the segment", "after the end", "falling"])
def test_wrong_index_of_aborted_transactions_is_rebuilt(
    tmp_path: Path, damage: str
) -> None:
    """Opening checks the file even after a clean close, because another program may
    have replaced it, and Kafka relies on it.
    """
    path = tmp_path / "t-0"
    config = {"index.interval.bytes": 0, "segment.ms": 2**62}
    with logcore.open(path, create=True, config=config) as log:
        log.append(b"first", timestamp_ms=NOW_MS)
        log.roll()
        for number in range(2):
            log.append_batch(batch(number, transactional=True))
            log.end_transaction(7, 0, commit=False)
    file = path / f"{1:020d}.txnindex"
    undamaged = file.read_bytes()
    entries = np.frombuffer(undamaged, TXN_ENTRY).copy()
    assert entries["last_offset"].tolist() == [2, 4]
    entries["last_offset"] = {
        "below the segment": [0, 4],
        "after the end": [2, 5],
        "falling": [4, 2],
    }[damage]
    file.write_bytes(entries.tobytes())
    with logcore.open(path, config=config):
        assert file.read_bytes() == undamaged


def test_producer_fields_are_at_their_offsets_in_the_batch_header() -> None:
    raw = batch(3, count=2, producer=5, epoch=9)
    assert struct.unpack_from(">qhii", raw, 43) == (5, 9, 3, 2)


def test_roll_during_an_append_leaves_no_partial_snapshot(
    tmp_path: Path,
) -> None:
    """The snapshot of the roll lacked the earlier batches of the same call, so that a
    retry stored them again.
    """
    path = tmp_path / "t-0"
    with logcore.open(path, create=True, config={"segment.bytes": 400}) as log:
        log.append_batch(batch(0))
        batches = b"".join(batch(number) for number in range(1, 13))
        log.append_batch(batches)
        assert log.statistics().rolls > 1
        copy = tmp_path / "copy"
        copy.mkdir()
        os.system(f"cp -r {path} {copy}")
    with logcore.open(copy / "t-0", config={"segment.bytes": 400}) as log:
        end = log.log_end_offset
        for number in range(8, 13):
            assert log.append_batch(batch(number)).offset == number
        assert log.log_end_offset == end == 13
        assert log.append_batch(batch(13)).offset == 13


def test_roll_during_an_unchecked_append_leaves_no_partial_snapshot(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t-0"
    config = {"segment.bytes": 400}
    with logcore.open(path, create=True, config=config) as log:
        log.append_batch(batch(0))
        log.append_batch(
            b"".join(batch(number) for number in range(1, 13)), check_sequence=False
        )
        assert log.statistics().rolls > 1
        copy = tmp_path / "copy"
        copy.mkdir()
        os.system(f"cp -r {path} {copy}")
    with logcore.open(copy / "t-0", config=config) as log:
        assert [
            log.append_batch(batch(number)).offset for number in range(8, 13)
        ] == list(range(8, 13))


def test_roll_reads_no_batch_twice_when_all_producers_have_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Because the records are old, all producers have expired. Each roll then read the
    whole log again.
    """
    disk = SimulatedDisk(now_ms=NOW_MS + 2 * 86_400_000)
    read_count = 0
    add_facts = Producers.add_facts

    def counting_add_facts(self: Producers, facts: Any, coordinator_epoch: Any) -> None:
        nonlocal read_count
        read_count += len(facts)
        add_facts(self, facts, coordinator_epoch)

    monkeypatch.setattr(Producers, "add_facts", counting_add_facts)
    monkeypatch.setattr("logcore.partition.producer_state._READ_BACK_BYTES", 0)
    with logcore.open(
        "t-0", create=True, config={"segment.bytes": 300}, durability="os", fs=disk
    ) as log:
        for number in range(40):
            log.append_batch(batch(number), check_sequence=False)
        assert log.statistics().rolls > 8
    assert read_count < 40 * 2


@pytest.mark.long
def test_no_flipped_bit_below_a_snapshot_makes_a_batch_new() -> None:
    """Opening reads the headers below a snapshot for batches that the snapshot does not
    contain. Such a header may not override the snapshot.
    """
    disk = SimulatedDisk(now_ms=NOW_MS)
    with logcore.open("/d/t-0", create=True, durability="os", fs=disk) as log:
        for number in range(3):
            log.append_batch(batch(number, transactional=True))
        log.end_transaction(7, 0, commit=True)
        log.append(b"plain")
        log.roll()
    path = f"/d/t-0/{0:020d}.log"
    with logcore.open("/d/t-0", durability="os", fs=disk) as log:
        for number in range(3):
            assert log.append_batch(batch(number, transactional=True)).offset == number
    files = disk.files()
    for position in range(len(files[path])):
        for bit in (0, 6, 7):
            damaged_disk = SimulatedDisk(files, now_ms=NOW_MS)
            damaged_disk.flip(path, position, bit)
            with logcore.open("/d/t-0", durability="os", fs=damaged_disk) as log:
                assert log.append_batch(batch(2, transactional=True)).offset == 2
                with contextlib.suppress(logcore.OutOfOrderSequenceError):
                    assert log.append_batch(batch(1, transactional=True)).offset == 1


_HISTORIES = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "append", "copy", "plain", "roll", "delete", "reopen", "kill"]
        ),
        st.integers(0, 2),
        st.integers(1, 6),
    ),
    max_size=25,
)


@given(_HISTORIES)
# Appends roll the segment.
@example(
    [("append", 0, 1)] + [("append", 1, 1)] * 6 + [("delete", 0, 1), ("kill", 0, 1)]
)
@example([("append", 0, 1), ("append", 1, 6), ("delete", 0, 1), ("kill", 0, 1)])
@example([("copy", 0, 1)] * 6 + [("roll", 0, 1), ("plain", 0, 1), ("delete", 0, 1)])
@example([("copy", 0, 6), ("roll", 0, 1), ("plain", 0, 1), ("delete", 0, 1)])
def test_batch_sent_twice_is_stored_once_through_any_history(
    history: list[tuple[str, int, int]],
) -> None:
    """A model that keeps the full history gives the same result. Retention deletes
    batches, and a kill loses the state in memory.
    """
    disk = SimulatedDisk(now_ms=NOW_MS)

    def open_log() -> Log:
        config = {"segment.bytes": 300}
        return logcore.open(
            "/d/t-0", create=True, config=config, durability="os", fs=disk
        )

    log = open_log()
    stored: dict[
        int, list[tuple[bytes, int]]
    ] = {}  # producer -> each of its batches with its offset
    # The number of the newest batches of each producer that the log remembers.
    remembered = dict.fromkeys(range(3), 0)
    deleted = 0
    for action, producer, count in history:
        if action in ("append", "copy"):
            batches_of_producer = stored.setdefault(producer, [])
            end = log.log_end_offset
            raws = [
                batch(len(batches_of_producer) + number, producer=producer)
                for number in range(count)
            ]
            log.append_batch(b"".join(raws), check_sequence=action == "append")
            batches_of_producer += [
                (raw, end + number) for number, raw in enumerate(raws)
            ]
            remembered[producer] = min(5, remembered[producer] + count)
        elif action == "plain":
            log.append_many([(None, b"x" * 60)] * count)
        elif action == "roll":
            log.roll()
        elif action == "delete":
            deleted = log.delete_records(log.log_end_offset)
        elif action == "reopen":
            log.close()
        elif action == "kill":
            disk.kill()
        if action in ("reopen", "kill"):
            log = open_log()
        # The next opening finds the newest batch and all batches that were not deleted.
        if action in (
            "reopen",
            "kill",
            "copy",
        ):
            for producer_id, batches in stored.items():
                remaining_count = sum(offset >= deleted for _, offset in batches)
                remembered[producer_id] = max(1, min(5, remaining_count))
        end = log.log_end_offset
        for producer_id, batches in stored.items():
            for raw, offset in batches[-remembered[producer_id] :]:
                assert log.append_batch(raw).offset == offset, (
                    f"a batch of producer {producer_id}, after {action}"
                )
        assert log.log_end_offset == end
    log.close()


def test_producers_expire_while_the_log_is_open() -> None:
    disk = SimulatedDisk(now_ms=NOW_MS)
    with logcore.open(
        "t-0", create=True, config={"retention.ms": -1}, durability="os", fs=disk
    ) as log:
        log.append_batch(batch(0))
        log.append_batch(batch(0, producer=8, transactional=True))
        for _ in range(24 * 60 // 5 + 2):
            disk.advance(5 * 60_000)
            log.tick()
        # The producer has expired, so that any sequence is its first.
        log.append_batch(batch(77))
        # An open transaction keeps its producer.
        with pytest.raises(logcore.OutOfOrderSequenceError):
            log.append_batch(batch(77, producer=8, transactional=True))


@pytest.mark.parametrize("codec", ["uncompressed", "lz4"])
def test_transaction_without_a_producer_is_refused(log: Log, codec: str) -> None:
    """No process could end the transaction, so that read_committed consumers would wait
    forever.
    """
    with pytest.raises(logcore.InvalidRecordError, match="producer id"):
        log.append_batch(
            recordbatch.encode([(b"k", b"v")], codec=codec, transactional=True)
        )
    assert log.log_end_offset == 0


def test_batches_outside_an_open_transaction_are_refused(log: Log) -> None:
    log.append_batch(batch(0, transactional=True))
    with pytest.raises(logcore.InvalidTransactionStateError):
        log.append_batch(batch(1))
    log.end_transaction(7, 0, commit=True, coordinator_epoch=5)
    log.append_batch(batch(1))
    with pytest.raises(logcore.CoordinatorFencedError):
        log.end_transaction(7, 0, commit=True, coordinator_epoch=4)
    with pytest.raises(logcore.InvalidProducerEpochError):
        log.append_batch(batch(0, epoch=3)) and log.end_transaction(
            7, 2, commit=True, coordinator_epoch=5
        )
    for invalid in ((-1, 0), (7, -1), (1 << 63, 0), (7, 1 << 15)):
        with pytest.raises(logcore.InvalidRecordError):
            log.end_transaction(*invalid, commit=True)


def test_transaction_index_has_the_entries_of_kafka(tmp_path: Path) -> None:
    """The index is correct also after a crash, a truncation and a roll, because Kafka
    relies on it.
    """
    path = tmp_path / "t-0"

    def index_entries() -> list[tuple[int, ...]]:
        files = sorted(path.glob("*.txnindex"))
        return [
            tuple(row)[1:]
            for file in files
            for row in np.frombuffer(file.read_bytes(), TXN_ENTRY).tolist()
        ]

    config = {"segment.ms": 2**62}  # the timestamps of records and markers differ
    with logcore.open(path, create=True, config=config, durability="os") as log:
        log.append_batch(batch(0, producer=7, transactional=True))
        log.append_batch(batch(0, producer=8, transactional=True))
        log.end_transaction(7, 0, commit=False)
        assert index_entries() == [(7, 0, 2, 1)]
        log.roll()
        log.end_transaction(8, 0, commit=False)
        log.append_batch(batch(1, producer=7, transactional=True))
        log.end_transaction(7, 0, commit=True)
        log.append_batch(batch(2, producer=7, transactional=True))
        log.end_transaction(7, 0, commit=False)
        expected = [(7, 0, 2, 1), (8, 1, 3, 4), (7, 6, 7, 8)]
        assert index_entries() == expected
    for file in path.glob("*.txnindex"):
        # A crash may leave any content in the file of the last segment.
        if int(file.name[:20]):
            file.write_bytes(b"garbage")
    with logcore.open(path, config=config, durability="os") as log:
        assert index_entries() == expected
        log.truncate(7)
        assert index_entries() == expected[:2]
        log.end_transaction(7, 0, commit=False)
        assert index_entries() == expected


def test_empty_snapshot_means_no_producers() -> None:
    """An empty snapshot is valid: opening does not read the batches below it."""
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk) as log:
        log.append_batch(
            encode([(None, b"x")], producer_id=7, producer_epoch=0, base_sequence=0)
        )
    (path,) = (path for path in disk.files() if path.endswith(".snapshot"))
    disk.put(path, Producers().pack())
    with logcore.open("t-0", fs=disk) as log:
        assert len(log.host.writer.producers.known()) == 0
