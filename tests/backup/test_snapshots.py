"""Tests that snapshots are complete, incremental and verified when they are restored."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.backup.manifest import new_id
from logcore.cleaner import clean
from logcore.inspect.verify import verify
from logcore.recordbatch import encode
from logcore.registry import open_registry
from logcore.testing import Fault, FaultPlan, SimulatedCrash, SimulatedDisk

SMALL: dict[str, Any] = {"segment.bytes": 400, "retention.ms": -1}


def fill(logdir: logcore.LogDir, topic: str = "src", count: int = 40) -> None:
    for number in range(count):
        for part in logdir.partitions(topic):
            logdir.partition(topic, part).append_many(
                [(b"k%d" % (number % 5), b"%d" % number * 9), (b"z", b"w")]
            )


def rows(log: logcore.Log) -> list[tuple[int, bytes | None, bytes | None]]:
    return [
        (record.offset, record.key, record.value)
        for record in log.read(log.log_start_offset)
    ]


def content(logdir: logcore.LogDir) -> dict[tuple[str, int], Any]:
    return {
        (topic, number): rows(logdir.partition(topic, number))
        for topic in logdir.topics()
        for number in logdir.partitions(topic)
    }


def restored(backup: Path, target: Path, at: str | None = None) -> dict[Any, Any]:
    """Restore a snapshot, check that no file is damaged, and return its records."""
    logcore.restore(backup, target, at=at)
    with logcore.open_dir(target) as logdir:
        found = content(logdir)
    assert [verdict for verdict in verify(target) if verdict.status == "damaged"] == []
    return found


def test_snapshot_is_restored_with_topics_offsets_and_start(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", partitions=2, config=SMALL)
        fill(logdir)
        logdir.partition("src", 1).delete_records(30)
        logdir.create_topic("empty")
        with logdir.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
            consumer.subscribe(["src"])
            assert consumer.poll(1).count == 130
            consumer.commit()
        before = content(logdir)
        logdir.snapshot(tmp_path / "backup")
        for part in range(2):
            logdir.partition("src", part).append(b"later")
        logdir.partition("src", 0).truncate(3)
        ids = {topic: logdir.topic_id(topic) for topic in logdir.topics()}
        cluster = logdir.cluster_id
    assert restored(tmp_path / "backup", tmp_path / "copy") == before
    with logcore.open_dir(tmp_path / "copy") as copy:
        assert copy.cluster_id == cluster
        assert {topic: copy.topic_id(topic) for topic in copy.topics()} == ids
        assert copy.describe_topic("src").overrides["segment.bytes"] == "400"
        assert copy.partition("src", 1).log_start_offset == 30
        assert copy.partition("src", 0).append(b"on").offset == 80
        with copy.consumer(group_id="g") as consumer:
            consumer.subscribe(["src"])
            assert [record.value for record in consumer.poll(1).records()] == [b"on"]


def test_snapshot_has_records_that_are_acknowledged_and_not_synced(
    tmp_path: Path,
) -> None:
    """A reader in another process returns only synced records. A snapshot must contain
    all acknowledged records.
    """
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        for number in range(50):
            logdir.append("t", b"%d" % number, partition=0, durability="os")
        with logcore.open_dir(tmp_path / "data", read_only=True) as reader:
            reader.snapshot(tmp_path / "backup")
    assert len(restored(tmp_path / "backup", tmp_path / "copy")["t", 0]) == 50


def test_abandoned_attempt_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment is compacted while it is stored. The second attempt failed, because the
    first attempt had stored parts with the same names.
    """
    from logcore.backup import taking

    attempts = itertools.count()

    def check_current(segment: Any) -> None:
        if next(attempts) == 3:
            raise logcore.CompactionAbandonedError("compacted", path=segment.path)

    monkeypatch.setattr(taking, "check_current", check_current)
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", config=SMALL)
        fill(logdir)
        before = content(logdir)
        logdir.snapshot(tmp_path / "backup")
    assert next(attempts) > 10
    assert restored(tmp_path / "backup", tmp_path / "copy") == before


def test_snapshot_of_a_reader_closes_the_logs_it_opened(tmp_path: Path) -> None:
    """With 10,000 partitions, the process ran out of file handles."""
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", partitions=5)
    with logcore.open_dir(tmp_path / "data", read_only=True) as reader:
        used = reader.partition("t", 3)
        reader.snapshot(tmp_path / "backup")
        assert list(reader.host.open_logs()) == [("t", 3)]
        assert used.log_end_offset == 0


def test_ids_increase_after_the_clock_is_set_back(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("data", create=True, fs=disk) as logdir:
        logdir.create_topic("t")
        taken = []
        for number in range(4):
            logdir.append("t", b"%d" % number)
            taken.append(logdir.snapshot("backup").id)
            disk.set_wall_clock(disk.now_ms() - 3_600_000)
    assert taken == sorted(taken)
    logcore.restore("backup", "copy", fs=disk)
    with logcore.open_dir("copy", fs=disk) as copy:
        assert copy.partition("t", 0).log_end_offset == 4


def test_later_snapshot_stores_only_new_bytes(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", partitions=2, config=SMALL)
        fill(logdir)
        first = logdir.snapshot(tmp_path / "backup")
        assert first.stored_bytes + first.linked_bytes == first.size_bytes
        again = logdir.snapshot(tmp_path / "backup")
        assert (again.stored_bytes, again.linked_bytes) == (0, 0)
        before = logdir.partition("src", 0).log_end_offset
        logdir.append("src", b"x" * 10, partition=0)
        third = logdir.snapshot(tmp_path / "backup")
        assert third.stored_bytes == third.size_bytes - again.size_bytes > 0
        fill(logdir)
        fourth = logdir.snapshot(tmp_path / "backup")
        assert fourth.stored_bytes + fourth.linked_bytes < fourth.size_bytes
    for number, info in enumerate(logcore.snapshots(tmp_path / "backup")):
        found = restored(tmp_path / "backup", tmp_path / f"copy{number}", info.id)
        assert (
            len(found["src", 0]) == [before, before, before + 1, 2 * before + 1][number]
        )


def test_bytes_that_were_truncated_are_stored_again(tmp_path: Path) -> None:
    """A part is used again only if its bytes are the same."""
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        log = logdir.partition("t", 0)
        for number in range(20):
            log.append(b"old %02d" % number)
        logdir.snapshot(tmp_path / "backup")
        log.truncate(10)
        for number in range(20):
            log.append(b"new %02d" % number)
        before = content(logdir)
        logdir.snapshot(tmp_path / "backup")
    assert restored(tmp_path / "backup", tmp_path / "copy") == before


def test_topic_that_was_created_again_is_stored_again(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        for value in (b"old", b"new"):
            logdir.create_topic("t", config=SMALL)
            for _ in range(20):
                logdir.append("t", value * 20)
            before = content(logdir)
            logdir.snapshot(tmp_path / "backup")
            logdir.delete_topic("t")
    assert restored(tmp_path / "backup", tmp_path / "copy") == before


def test_compacted_segments_are_stored_again(tmp_path: Path) -> None:
    compacted = {**SMALL, "cleanup.policy": "compact"}
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", config=compacted)
        fill(logdir)
        logdir.snapshot(tmp_path / "backup")
        log = logdir.partition("src", 0)
        log.roll()
        clean(log, force=True)
        before = content(logdir)
        logdir.snapshot(tmp_path / "backup")
    assert restored(tmp_path / "backup", tmp_path / "copy") == before


def test_sealed_segments_are_hard_links(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", config=SMALL)
        fill(logdir)
        result = logdir.snapshot(tmp_path / "backup")
    assert result.linked_bytes > 0.8 * result.size_bytes
    linked = [
        path
        for path in (tmp_path / "data" / "src-0").glob("*.log")
        if path.stat().st_nlink == 2
    ]
    assert len(linked) > 5
    logcore.restore(tmp_path / "backup", tmp_path / "copy")
    with logcore.open_dir(tmp_path / "copy") as copy:
        copy.append("src", b"on")
        copy.partition("src", 0).truncate(5)
    # Changes of the copy change neither the directory nor the backup.
    assert len(restored(tmp_path / "backup", tmp_path / "again")["src", 0]) == 80
    with logcore.open_dir(tmp_path / "data") as logdir:
        assert logdir.partition("src", 0).log_end_offset == 80


def test_aborted_and_open_transactions_are_restored(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "producer_id": 5,
        "producer_epoch": 1,
        "transactional": True,
    }
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", config=SMALL)
        log = logdir.partition("src", 0)
        log.append_batch(encode([(b"a", b"1")], base_sequence=0, **more))
        log.end_transaction(5, 1, commit=False)
        log.roll()
        log.append_batch(encode([(b"a", b"2")], base_sequence=1, **more))
        logdir.snapshot(tmp_path / "backup")
    logcore.restore(tmp_path / "backup", tmp_path / "copy")
    with logcore.open_dir(tmp_path / "copy") as copy:
        log = copy.partition("src", 0)
        assert log.last_stable_offset == 2
        duplicate = log.append_batch(encode([(b"a", b"2")], base_sequence=1, **more))
        assert duplicate.offset == 2
        log.end_transaction(5, 1, commit=True)
        committed = [record.value for record in log.read(0, isolation="read_committed")]
        assert committed == [b"2"]


def test_registry_is_restored_without_sessions(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True, shared=True) as logdir:
        logdir.create_topic("t")
        logdir.append("t", b"1")
        with open_registry(str(tmp_path / "data")) as registry:
            registry.create("/config/clients/importer", b"{}")
            registry.create("/brokers/ids/7", b"me", ephemeral=True)
            logdir.snapshot(tmp_path / "backup")
    logcore.restore(tmp_path / "backup", tmp_path / "copy")
    with open_registry(str(tmp_path / "copy"), read_only=True) as registry:
        assert registry.get("/config/clients/importer").value == b"{}"
        assert registry.children("/brokers/ids") == []


def test_group_of_a_shared_directory_continues_in_the_copy(tmp_path: Path) -> None:
    """The members of the group exist in the original directory only."""
    options: dict[str, Any] = {"group_id": "g", "auto_offset_reset": "earliest"}
    with logcore.open_dir(tmp_path / "data", create=True, shared=True) as logdir:
        logdir.create_topic("t", partitions=2)
        for number in range(10):
            logdir.append("t", b"%d" % number, partition=number % 2)
        with logdir.consumer(**options) as consumer:
            consumer.subscribe(["t"])
            assert consumer.poll(1).count == 10
            consumer.commit()
            with logcore.open_dir(tmp_path / "data", read_only=True) as reader:
                reader.snapshot(tmp_path / "backup")
    logcore.restore(tmp_path / "backup", tmp_path / "copy")
    with logcore.open_dir(tmp_path / "copy", shared=True) as copy:
        copy.append("t", b"new", partition=1)
        with copy.consumer(**options) as consumer:
            consumer.subscribe(["t"])
            found = [record.value for record in consumer.poll(10).records()]
    assert found == [b"new"]


def test_snapshot_is_chosen_by_id_or_time(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        taken = []
        for number in range(3):
            logdir.append("t", b"%d" % number)
            taken.append(logdir.snapshot(tmp_path / "backup"))
    moment = datetime.fromtimestamp(taken[1].time_ms / 1000, UTC)
    for name, at, count in (
        ("a", None, 3),
        ("b", taken[0].id, 1),
        ("c", moment, 2),
    ):
        logcore.restore(tmp_path / "backup", tmp_path / name, at=at)
        with logcore.open_dir(tmp_path / name) as copy:
            assert copy.partition("t", 0).log_end_offset == count
    for missing in ("monday", datetime.fromtimestamp(0, UTC)):
        with pytest.raises(logcore.LogNotFoundError, match=taken[2].id):
            logcore.restore(tmp_path / "backup", tmp_path / "d", at=missing)
    assert not (tmp_path / "d").exists()


def test_older_snapshots_are_deleted_with_their_parts(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", config=SMALL)
        for _ in range(4):
            fill(logdir)
            # The records of each round are deleted after its snapshot.
            log = logdir.partition("src", 0)
            logdir.snapshot(tmp_path / "backup", keep=2)
            log.delete_records(log.high_watermark)
        infos = logcore.snapshots(tmp_path / "backup")
        assert len(infos) == 2
        sizes = sum(
            path.stat().st_size
            for path in (tmp_path / "backup" / "parts").rglob("*")
            if path.is_file()
        )
        assert sizes <= sum(info.size_bytes for info in infos)
    for number, info in enumerate(infos):
        restored(tmp_path / "backup", tmp_path / f"copy{number}", info.id)


def test_parts_of_an_unfinished_snapshot_are_kept_for_a_day(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        logdir.append("t", b"1")
        logdir.snapshot(tmp_path / "backup")
        parts = tmp_path / "backup" / "parts" / "t-0"
        now_ms = logdir.host.fs.now_ms()
        for age_ms in (0, 100_000_000):
            part = f"{0:020}.{new_id(now_ms - age_ms, bytes(4))}.0"
            (parts / part).write_bytes(b"x")
        logdir.snapshot(tmp_path / "backup", keep=5)
    assert len([path for path in parts.iterdir() if path.read_bytes() == b"x"]) == 1


def test_backup_of_another_directory_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with logcore.open_dir(tmp_path / name, create=True) as logdir:
            logdir.create_topic("t")
    with logcore.open_dir(tmp_path / "one") as logdir:
        logdir.snapshot(tmp_path / "backup")
    with (
        logcore.open_dir(tmp_path / "two") as logdir,
        pytest.raises(logcore.InvalidConfigError, match="another log directory"),
    ):
        logdir.snapshot(tmp_path / "backup")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # it may be a hard link
    path.write_bytes(data)


def shorten(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-2])


@pytest.mark.parametrize("damage", [flip, shorten, os.unlink])
@pytest.mark.parametrize("which", ["parts", "snapshots"])
def test_damaged_backup_is_not_restored(
    tmp_path: Path, damage: Callable[[Path], None], which: str
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", config=SMALL)
        fill(logdir)
        logdir.snapshot(tmp_path / "backup")
        damage(
            next(
                path
                for path in (tmp_path / "backup" / which).rglob("*")
                if path.is_file()
            )
        )
        with pytest.raises(logcore.LogcoreError):
            logcore.restore(tmp_path / "backup", tmp_path / "copy")
        assert not list(tmp_path.glob("copy*"))
        # The next snapshot ignores the damaged manifest, and is complete.
        if which == "snapshots":
            logdir.snapshot(tmp_path / "backup")
            restored(tmp_path / "backup", tmp_path / "copy")


@pytest.mark.parametrize(
    "name", ["../../evil-0", "orders", "/etc-0", "a-0/b-1", "x" * 300 + "-0"]
)
def test_hostile_manifest_writes_nothing(tmp_path: Path, name: str) -> None:
    from logcore.metadata.checkpoint import pack_checked, unpack_checked

    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        logdir.append("t", b"1")
        logdir.snapshot(tmp_path / "backup")
    (path,) = (tmp_path / "backup" / "snapshots").iterdir()
    facts = unpack_checked(path.read_bytes())
    assert facts is not None
    facts["partitions"][name] = facts["partitions"].pop("t-0")
    path.write_bytes(pack_checked(facts))
    with pytest.raises(logcore.CorruptLogError, match="does not write"):
        logcore.restore(tmp_path / "backup", tmp_path / "copy")
    assert not list(tmp_path.glob("copy*"))


def test_restore_to_existing_files_is_refused(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        logdir.snapshot(tmp_path / "backup")
    with pytest.raises(logcore.InvalidConfigError, match="does not exist"):
        logcore.restore(tmp_path / "backup", tmp_path / "data")
    (tmp_path / "empty").mkdir()
    assert restored(tmp_path / "backup", tmp_path / "empty") == {("t", 0): []}
    for path in (tmp_path / "data", tmp_path / "nothing"):
        with pytest.raises(logcore.LogNotFoundError):
            logcore.restore(path, tmp_path / "other")


def test_damaged_last_segment_is_reported(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t")
        for _ in range(10):
            logdir.append("t", b"value")
    flip(next((tmp_path / "data" / "t-0").glob("*.log")))
    with (
        logcore.open_dir(tmp_path / "data", read_only=True) as reader,
        pytest.raises(logcore.CorruptBatchError),
    ):
        reader.snapshot(tmp_path / "backup")
    assert logcore.snapshots(tmp_path / "backup") == []


def test_directory_written_by_kafka_is_restored(tmp_path: Path) -> None:
    """Without logcore's own files, only the directories contain the names of topics."""
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", partitions=2)
        logdir.append("t", b"1", partition=1)
        before = content(logdir)
    for path in (tmp_path / "data").glob("logcore.*"):
        path.unlink()
    with logcore.open_dir(tmp_path / "data", read_only=True) as reader:
        reader.snapshot(tmp_path / "backup")
    assert restored(tmp_path / "backup", tmp_path / "copy") == before


@pytest.mark.long
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_crash_leaves_only_complete_snapshots(step: int) -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("data", create=True, fs=disk) as logdir:
        for topic in ("a", "b"):
            logdir.create_topic(topic)
            logdir.append(topic, b"x")
        logdir.snapshot("backup", keep=1)
        logdir.append("a", b"y")
    files = disk.files()
    seen = set()
    for at in itertools.count(1, step):
        disk = SimulatedDisk(files, faults=FaultPlan(Fault("*", "crash", at=at)))
        with (
            contextlib.suppress(SimulatedCrash),
            logcore.open_dir("data", read_only=True, fs=disk) as logdir,
        ):
            logdir.snapshot("backup", keep=1)
        if not disk.faults.hits:
            break
        for left in disk.after_crash(limit=4):
            infos = logcore.snapshots("backup", fs=left)
            assert infos
            for number, info in enumerate(infos):
                logcore.restore("backup", f"copy{number}", at=info.id, fs=left)
                with logcore.open_dir(f"copy{number}", fs=left) as copy:
                    found = [
                        len(rows(copy.partition(topic, 0))) for topic in ("a", "b")
                    ]
                assert found in ([1, 1], [2, 1])
                seen.add((len(infos), *found))
    assert seen >= {(1, 1, 1), (2, 2, 1), (1, 2, 1)}


def test_crash_of_a_restore_leaves_no_partial_directory() -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("data", create=True, fs=disk) as logdir:
        for topic in ("a", "b"):
            logdir.create_topic(topic)
            logdir.append(topic, b"x")
        logdir.snapshot("backup")
    files = disk.files()
    seen = set()
    for at in itertools.count(1, 2):
        disk = SimulatedDisk(files, faults=FaultPlan(Fault("*", "crash", at=at)))
        with contextlib.suppress(SimulatedCrash):
            logcore.restore("backup", "copy", fs=disk)
        if not disk.faults.hits:
            break
        for left in disk.after_crash(limit=4):
            seen.add(left.is_directory("/copy"))
            if left.is_directory("/copy"):
                with logcore.open_dir("copy", fs=left) as copy:
                    found = content(copy)
                assert {key: len(value) for key, value in found.items()} == {
                    ("a", 0): 1,
                    ("b", 0): 1,
                }
    assert seen == {True, False}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["pwrite", "rename", "fsync"])
def test_failed_snapshot_is_not_listed(call: str, error: int) -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("data", create=True, fs=disk) as logdir:
        logdir.create_topic("a")
        logdir.append("a", b"x")
        disk.faults = FaultPlan(Fault(call, error, path="*/backup/*"))
        with pytest.raises((logcore.StorageWriteError, logcore.DiskFullError)):
            logdir.snapshot("backup")
        assert logcore.snapshots("backup", fs=disk) == []
        assert not [path for path in disk.files() if path.endswith(".partial")]
        disk.faults = FaultPlan()
        logdir.snapshot("backup")
        logdir.append("a", b"after the failure")
    logcore.restore("backup", "copy", fs=disk)


def test_copy_of_a_backup_is_restored(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("src", config=SMALL)
        fill(logdir)
        before = content(logdir)
        logdir.snapshot(tmp_path / "backup")
    shutil.copytree(tmp_path / "backup", tmp_path / "moved")
    assert restored(tmp_path / "moved", tmp_path / "copy") == before
