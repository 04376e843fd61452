"""Forks of topics: they are complete or do not exist, and are independent of the source."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.cleaner import clean
from logcore.inspect.verify import verify
from logcore.recordbatch import encode
from logcore.testing import Fault, FaultPlan, SimulatedDisk, explore

SMALL: dict[str, Any] = {"segment.bytes": 400, "retention.ms": -1}


def fill(logdir: logcore.LogDir, count: int = 40, partitions: int = 2) -> None:
    logdir.create_topic("src", partitions=partitions, config=SMALL)
    for number in range(count):
        for part in range(partitions):
            logdir.partition("src", part).append_many(
                [(b"k%d" % (number % 5), b"%d" % number * 9), (b"z", b"w")]
            )


def rows(log: logcore.Log) -> list[tuple[int, bytes | None, bytes | None]]:
    return [
        (record.offset, record.key, record.value)
        for record in log.read(log.log_start_offset)
    ]


@pytest.mark.long
@pytest.mark.parametrize("at", [0, 1, 7, 12, 13, 40, 79, 80, None])
def test_fork_contains_records_below_its_offset(tmp_path: Path, at: int | None) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        fill(logdir)
        before = [rows(logdir.partition("src", part)) for part in range(2)]
        logdir.fork("src", at, "new")
        end = 80 if at is None else at
        assert (
            logdir.describe_topic("new").overrides
            == logdir.describe_topic("src").overrides
        )
        assert logdir.topic_id("new") != logdir.topic_id("src")
        for part in range(2):
            log = logdir.partition("new", part)
            assert rows(log) == before[part][:end] and log.log_end_offset == end
            assert log.append(b"new").offset == end
            assert rows(logdir.partition("src", part)) == before[part], (
                "the source is unchanged"
            )
            logdir.partition("src", part).append(b"old")
            assert rows(log)[-1] == (end, None, b"new")
    assert not [
        verdict for verdict in verify(tmp_path / "data") if verdict.status == "damaged"
    ]
    with logcore.open_dir(tmp_path / "data") as logdir:
        assert logdir.topics() == ["new", "src"]
        assert rows(logdir.partition("new", 1))[: end or 0] == before[1][:end]


def test_sealed_segments_are_shared_until_one_side_replaces_them(
    tmp_path: Path,
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        fill(logdir, partitions=1)
        logdir.fork("src", {0: 70}, "new")
        shared = [
            path.name
            for path in (tmp_path / "data" / "new-0").glob("*.log")
            if path.stat().st_nlink == 2
        ]
        assert len(shared) > 5
        assert all(
            path.stat().st_nlink == 1
            for path in sorted((tmp_path / "data" / "new-0").glob("*.log"))[-1:]
        )
        source = logdir.partition("src", 0)
        copy = logdir.partition("new", 0)
        before = rows(source)
        logdir.alter_topic("new", {"cleanup.policy": "compact"})
        copy.roll()
        clean(copy, force=True)
        copy.truncate(copy.log_end_offset - 3)
        assert rows(source) == before
        source.truncate(11)
        source.delete_records(5)
        logdir.delete_topic("src")
        assert rows(copy)[-1][:2] == (66, b"k3")


def test_fork_copies_transactions_and_producers(tmp_path: Path) -> None:
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
        logdir.fork("src", None, "new")
        copy = logdir.partition("new", 0)
        assert copy.last_stable_offset == 2
        duplicate = copy.append_batch(encode([(b"a", b"2")], base_sequence=1, **more))
        assert duplicate.offset == 2
        copy.end_transaction(5, 1, commit=True)
        committed = [
            record.value for record in copy.read(0, isolation="read_committed")
        ]
        assert committed == [b"2"] and log.last_stable_offset == 2


def test_invalid_forks_have_no_effect(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        fill(logdir)
        logdir.partition("src", 0).delete_records(10)
        for at in (5, 81, -1, {0: 20, 1: 99}):
            with pytest.raises(logcore.OffsetOutOfRangeError):
                logdir.fork("src", at, "new")
        with pytest.raises(logcore.TopicExistsError):
            logdir.fork("src", 20, "src")
        with pytest.raises(logcore.InvalidNameError):
            logdir.fork("src", 20, "no/name")
        with pytest.raises(logcore.TopicNotFoundError):
            logdir.fork("nothing", 20, "new")
        assert logdir.topics() == ["src"]
        assert not [
            name for name in os.listdir(tmp_path / "data") if name.startswith("new")
        ]
        logdir.fork("src", 20, "new")
        assert logdir.partition("new", 0).log_start_offset == 10


@pytest.mark.long
@pytest.mark.parametrize("limit", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_crash_during_a_fork_leaves_a_complete_topic_or_none(limit: int) -> None:
    def run(disk: SimulatedDisk, promise: Any) -> None:
        with logcore.open_dir("d", create=True, fs=disk) as logdir:
            fill(logdir, count=8, partitions=1)
            logdir.fork("src", 9, "new")
            promise("forked")
            logdir.partition("new", 0).append(b"more")
            promise("appended")

    def recover(disk: SimulatedDisk) -> Any:
        with logcore.open_dir("d", create=True, fs=disk) as logdir:
            found = {
                name: rows(logdir.partition(name, 0))
                for name in logdir.topics()
                if logdir.partitions(name)
            }
        assert not [name for name in disk.files() if "delete" in name]
        return found

    def check(promised: list[str], found: dict[str, Any]) -> None:
        if "new" in found:
            assert len(found["new"]) >= 9 and found["new"][:9] == found["src"][:9]
        assert "new" in found or not promised
        assert "appended" not in promised or found["new"][9:] == [(9, None, b"more")]

    assert explore(run, recover, check, limit=limit, again_every=30).states > 100


@pytest.mark.long
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EXDEV])
@pytest.mark.parametrize(
    "operation", ["link", "pwrite", "fsync", "sync_dir", "rename", "create"]
)
def test_a_fork_that_fails_is_undone(operation: str, number: int) -> None:
    for at in range(1, 60):
        disk = SimulatedDisk()
        with logcore.open_dir("d", create=True, fs=disk) as logdir:
            fill(logdir, count=8, partitions=1)
            before = rows(logdir.partition("src", 0))
            plan = disk.faults = FaultPlan(Fault(operation, number, at=at))
            try:
                logdir.fork("src", 9, "new")
            except (logcore.LogcoreError, OSError):
                disk.faults = None
                assert "new" not in logdir.topics()
            disk.faults = None
            logdir.tick()
        with logcore.open_dir("d", fs=disk) as logdir:
            assert rows(logdir.partition("src", 0)) == before
            assert (
                "new" not in logdir.topics()
                or rows(logdir.partition("new", 0)) == before[:9]
            )
        if not plan.hits:
            return


def test_fork_has_records_acknowledged_without_a_sync(tmp_path: Path) -> None:
    """The high watermark was read before the sync that advances it, so the copy lacked
    every record appended with durability "os".
    """
    with logcore.open_dir(tmp_path / "data", create=True) as source:
        source.create_topic("t")
        for number in range(50):
            source.append("t", b"%d" % number, partition=0, durability="os")
        source.fork("t", None, "copy")
        assert source.partition("copy", 0).high_watermark == 50
