"""How opening a log treats files that a crash left: indexes, segment checksums and
temporary files.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.recordbatch import encode
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from support.crashed_logs import LOG, disk_of_killed_log


def test_lost_time_index_is_rebuilt() -> None:
    disk = disk_of_killed_log([*range(1000, 1050), *[-1] * 50])
    disk.put(f"/t-0/{0:020d}.timeindex", b"")
    with logcore.open("t-0", fs=disk, config={"index.interval.bytes": 100}) as log:
        assert log.offset_for_timestamp(1010) == 10
        assert log.host.writer.active.largest_timestamp == 1049


def test_rewrite_of_a_segment_leaves_one_file_open() -> None:
    disk = disk_of_killed_log([1000] * 20)
    disk.put("/t-0/logcore.unsynced", b"")
    disk.put("/recovery-point-offset-checkpoint", None)
    with logcore.open("t-0", fs=disk) as log:
        assert sum(path.endswith((LOG, ".tmp")) for path in disk.open_handles) == 1
        assert len(list(log.read(0))) == 20
    assert "/t-0/logcore.unsynced" not in disk.files()


def test_time_index_is_synced_before_the_directory_is_marked_clean() -> None:
    disk = disk_of_killed_log([1000] * 20)
    before = len(disk.operations)
    with logcore.open_dir("/", fs=disk) as logdir:
        assert not logdir.host.was_clean
        for _ in range(20):
            logdir.partition("t", 0).append(b"x" * 500)
    name = f"/t-0/{20:020d}.timeindex"
    operations = [str(operation) for operation in disk.operations[before:]]
    assert operations.index("rename /.kafka_cleanshutdown") > operations.index(
        f"fsync {name}"
    )
    synced_bytes = disk.files()[name]
    for state in disk.crash_states():
        if "/.kafka_cleanshutdown" in state.files:
            # The index may also be absent, because opening rebuilds it.
            assert state.files.get(name, synced_bytes) == synced_bytes, state.what


def test_open_after_failed_sync_rewrites_damaged_and_sealed_segments() -> None:
    """After a failed sync, the data may exist only in the page cache."""
    config = {"segment.bytes": 300}
    disk = disk_of_killed_log([1000] * 6, **config)
    disk.put("/t-0/logcore.unsynced", b"")
    disk.put("/recovery-point-offset-checkpoint", None)
    before = {
        path: disk.identity(path) for path in disk.files() if path.endswith(".log")
    }
    last = max(before)
    disk.flip(last, 70)
    disk.put(
        "/t-0/logcore.policy",
        b'{"durability": "always", "max_bytes": 1, "dense_from": 0}',
    )
    with logcore.open("t-0", fs=disk, config=config, on_corruption="quarantine") as log:
        assert log.recovery_report is not None and log.recovery_report.damage
        assert all(disk.identity(path) != number for path, number in before.items())


def test_markers_left_by_a_crash_override_the_stored_metadata() -> None:
    """Kafka wrote a transaction into a log whose metadata claims that it has none."""
    config = {"index.interval.bytes": 100, "segment.ms": 1 << 60}
    disk = disk_of_killed_log([1000] * 6, **config)
    rows = [(b"k", b"aborted")]
    disk_of_kafka = SimulatedDisk(disk.files())
    with logcore.open("t-0", fs=disk_of_kafka, config=config) as log:
        log.append_batch(
            encode(
                rows,
                transactional=True,
                producer_id=5,
                producer_epoch=0,
                base_sequence=0,
            )
        )
        log.end_transaction(5, 0, commit=False)
    name = f"/t-0/{0:020d}"
    disk.put(name + ".log", disk_of_kafka.files()[name + ".log"])
    with logcore.open("t-0", fs=disk, config=config) as log:
        assert len(list(log.read(0, isolation="read_committed"))) == 6
    assert len(disk.files()[name + ".txnindex"]) == 34
    with logcore.open(
        "t-0", fs=disk
    ) as log:  # after a clean close, so that opening does not check the file
        assert log.host.writer.metadata.sidecar.producers


@pytest.mark.parametrize("is_full", [False, True])
def test_indexes_of_sealed_segments_left_by_a_kafka_crash_are_rebuilt(
    is_full: bool,
) -> None:
    """Kafka syncs a segment some time after the roll, and a power cut before that can
    leave its indexes in any state. Kafka rebuilds the indexes above the recovery point,
    but would no longer do so once the directory was opened and closed by this library.
    """
    config = {"segment.bytes": 600, "index.interval.bytes": 100}
    disk = SimulatedDisk()
    with logcore.open_dir("d", create=True, fs=disk, config=config) as directory:
        directory.create_topic("t", partitions=1)
        log = directory.partition("t", 0)
        for number in range(12):
            batch = encode(
                [(None, b"x" * 100, (), 1_000 + number)],
                producer_id=7,
                producer_epoch=0,
                base_sequence=number,
                transactional=True,
            )
            log.append_batch(batch)
            if number % 3 == 2:
                log.end_transaction(7, 0, commit=False)
        assert len(log._state.segments) > 3
    clean = disk.files()
    sound = {path: data for path, data in clean.items() if path.endswith(("index",))}
    assert len([path for path in sound if path.endswith(".txnindex")]) > 1
    for path in sound:
        if path.endswith(".timeindex"):
            disk.put(path, b"\x11" * 12 + b"\x7f" * 12)
        elif path.endswith(".txnindex"):
            disk.put(path, b"")
        else:
            disk.put(path, b"\0\0\0\x01\0\0\0\x05" + b"\x7f" * 80)
    disk.unlink("/d/.kafka_cleanshutdown")
    disk.unlink("/d/recovery-point-offset-checkpoint")
    disk.unlink("/d/t-0/logcore.policy")  # the state that Kafka leaves
    disk = SimulatedDisk(disk.files())
    if is_full:
        disk.faults = FaultPlan(
            Fault("pwrite", errno.ENOSPC, path="*index", times=None)
        )
    with logcore.open_dir("d", fs=disk, config=config) as directory:
        directory.partition("t", 0)
        disk.faults = None
    files_after = disk.files()
    assert "/d/.kafka_cleanshutdown" in files_after
    assert {path for path in files_after if path.endswith(".log")} == {
        path for path in clean if path.endswith(".log")
    }
    *sealed, _ = sorted(path for path in clean if path.endswith(".log"))
    for path, data in sound.items():
        if is_full and path[: path.index(".")] + ".log" in sealed:
            assert path not in files_after, "Kafka rebuilds missing indexes"
        else:
            assert files_after[path] == data, path


@pytest.mark.parametrize(
    "position", [0, 3, 16, 70], ids=["offset", "far offset", "magic", "marker"]
)
def test_indexes_of_a_segment_with_old_damage_are_kept(position: int) -> None:
    """Opening does not check records below the recovery point. Readers find records
    after such damage through the index.
    """
    config = {"segment.bytes": 3_000, "index.interval.bytes": 200}
    disk = SimulatedDisk()
    with logcore.open("t-0", create=True, fs=disk, config=config) as log:
        rows = [(None, b"x" * 50, (), disk.now_ms())]
        log.append_batch(
            encode(
                rows,
                producer_id=7,
                producer_epoch=0,
                base_sequence=0,
                transactional=True,
            )
        )
        marker_position = log.host.writer.active.size_bytes
        log.end_transaction(7, 0, commit=False)
        size = log.host.writer.active.size_bytes - marker_position
        while len(log._state.segments) < 3:
            log.append(b"y" * 50)
        log.append_batch(
            encode(
                rows,
                producer_id=7,
                producer_epoch=0,
                base_sequence=1,
                transactional=True,
            )
        )
        log.end_transaction(7, 0, commit=False)
        log.roll()
        end = log.log_end_offset
        first, second = log._state.segments[:2]
    files = disk.files()
    damaged_data = bytearray(files[first.path])
    damaged_data[marker_position + position] ^= 64
    recovery_point = second.base_offset - 1 if position < size else first.base_offset
    files |= {
        first.path: bytes(damaged_data),
        "/recovery-point-offset-checkpoint": b"0\n1\nt 0 %d\n" % recovery_point,
    }
    damaged_disk = SimulatedDisk(
        {path: data for path, data in files.items() if "clean" not in path}
    )
    with logcore.open("t-0", fs=damaged_disk, config=config) as log:
        assert log.log_end_offset == end
        assert log.get(first.base_offset + 20).value == b"y" * 50
    assert damaged_disk.files()[first.file(".index")] == files[first.file(".index")]


def test_wrong_index_is_deleted_before_the_recovery_point_moves() -> None:
    disk = SimulatedDisk()
    config = {"segment.bytes": 300}
    with logcore.open("t-0", create=True, fs=disk, config=config) as log:
        for number in range(8):
            log.append(b"%d" % number * 60)
        first = log._state.segments[0]
    files_after_kill = {
        path: data
        for path, data in disk.files().items()
        if "clean" not in path and "recovery" not in path
    }
    crashed = SimulatedDisk({**files_after_kill, first.file(".txnindex"): bytes(34)})
    log = logcore.open("t-0", fs=crashed, config=config)
    assert not crashed.exists(first.file(".txnindex")) and log.recovery_point == 8
    for state in crashed.crash_states():
        recovery_point = state.files.get("/recovery-point-offset-checkpoint")
        assert recovery_point is None or first.file(".txnindex") not in state.files, (
            state
        )
    crashed.crash()


def test_failed_open_leaves_no_file_open() -> None:
    disk = killed_disk()
    for number in range(1, 200):
        disk.faults = FaultPlan(Fault("*", errno.EIO, at=number))
        with contextlib.suppress(logcore.LogcoreError):
            logcore.open("t-0", fs=disk).close()
        gc.collect()  # the traceback held a segment
        assert not disk.open_handles, number
        if not disk.faults.hits:
            break
    else:
        pytest.fail("each opening failed")
    disk.faults = None


def killed_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk)
    log.append(b"one")
    disk.kill()
    return disk


@pytest.mark.parametrize("leftover", [".log.deleted", ".log.cleaned", ".index.tmp"])
def test_recovery_deletes_leftover_files_to_free_space(leftover: str) -> None:
    """Recovery copies a torn tail to a quarantine file before it truncates the tail. On
    a full disk, only leftover files can free space for that copy.
    """
    disk = SimulatedDisk()
    log = logcore.open("t-0", create=True, fs=disk, durability="os")
    for _ in range(20):
        log.append(b"v" * 300)
    path = log.host.writer.active.path
    disk.kill()
    files = {
        **disk.files(),
        path: disk.files()[path][:-50],
        path.removesuffix(".log") + leftover: bytes(8_000),
    }
    capacity = sum(map(len, files.values())) + 100
    full = SimulatedDisk(files, capacity_bytes=capacity)
    with logcore.open("t-0", fs=full) as log:
        assert log.log_end_offset == 19
        report = log.recovery_report
        assert report is not None and report.quarantine_path is not None
    other_files = {
        name: data for name, data in files.items() if not name.endswith(leftover)
    }
    small = SimulatedDisk(
        other_files, capacity_bytes=sum(map(len, other_files.values())) + 100
    )
    for _ in range(2):
        with pytest.raises(logcore.DiskFullError):
            logcore.open("t-0", fs=small)
        assert not [name for name in small.files() if "quarantine" in name], (
            "each attempt leaves another quarantine file"
        )


def test_reader_opens_while_the_log_is_truncated() -> None:
    """The reader had opened the old file, and the recovery point referred to the new
    one, so that every read failed.
    """
    disk = SimulatedDisk()
    writer = logcore.open("t-0", create=True, fs=disk, durability="always")
    for number in range(5):
        writer.append(b"old%d" % number)
    real = disk.open
    acted = []

    def open_then_truncate(path: str, **options: Any) -> int:
        handle = real(path, **options)
        if path.endswith(".log") and not acted:
            acted.append(path)
            writer.truncate(0)
            for number in range(20):
                writer.append(b"new%d" % number)
            writer.flush()
            with writer.host.writer.state.lock:
                writer.host.writer.save_recovery_point_locked()
        return handle

    disk.open = open_then_truncate  # type: ignore[method-assign]
    with logcore.open("t-0", read_only=True, fs=disk) as log:
        assert {record.value[:3] for record in log.read(0) if record.value} <= {
            b"old",
            b"new",
        }
        log.refresh()
        assert [record.value for record in log.read(0)] == [
            b"new%d" % number for number in range(20)
        ]
    writer.close()


def test_refresh_of_a_deleted_directory_raises(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True) as log:
        log.append(b"one")
    with logcore.open(tmp_path / "t-0", read_only=True) as log:
        shutil.rmtree(tmp_path / "t-0")
        with pytest.raises(logcore.LogNotFoundError):
            log.refresh()


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("count", [1, 40])
def test_flipped_length_does_not_turn_the_last_batch_into_a_torn_tail(
    is_clean: bool, count: int
) -> None:
    """After one bit of its length was cleared, the last durable batch looked like a
    torn tail. Opening truncated the batch and reported the log as sound.
    """
    disk = SimulatedDisk()
    config = {"index.interval.bytes": 200}
    with logcore.open("t-0", create=True, fs=disk, config=config) as log:
        for number in range(count):
            log.append(b"%d" % number * 40)
        position = next(batch.position for batch in log.batches(count - 1))
        path = log.host.writer.active.path
    files = {
        name: data
        for name, data in disk.files().items()
        if is_clean or "clean" not in name
    }
    for bit in [
        bit for bit in (1, 2, 4, 8, 16, 32) if files[path][position + 11] & bit
    ]:
        damaged_data = bytearray(files[path])
        damaged_data[position + 11] ^= bit
        damaged_disk = SimulatedDisk({**files, path: bytes(damaged_data)})
        with pytest.raises(logcore.CorruptLogError, match="this batch was on disk"):
            logcore.open("t-0", fs=damaged_disk, config=config)
        assert damaged_disk.files()[path] == bytes(damaged_data)
        with logcore.open(
            "t-0", fs=damaged_disk, config=config, on_corruption="quarantine"
        ) as log:
            assert (
                log.recovery_report is not None
                and log.recovery_report.damage[0].first_offset == count - 1
            )
