"""Tests of logcore.directory.maintenance: which work tick() does and when, and how
failures in tick() are reported.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logcore
from logcore.directory.visit_queue import VisitQueue
from logcore.fs import OS
from logcore.metadata import checkpoint
from logcore.partition.schedule import LogMaintenance
from logcore.testing import Fault, FaultPlan, SimulatedDisk


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def test_tick_rolls_and_syncs_by_time() -> None:
    disk = SimulatedDisk(now_ms=10_000)
    with logcore.open_dir("data", create=True, durability="os", fs=disk) as logdir:
        logdir.create_topic("t", config={"segment.ms": 1000, "flush.ms": 0})
        log = logdir.partition("t", 0)
        log.append(b"v", timestamp_ms=10_000)
        assert log.statistics().syncs == 0
        disk.advance(500)
        logdir.tick()
        assert log.statistics().syncs == 1 and log.statistics().segments == 1
        disk.advance(501)
        logdir.tick()
        assert log.statistics().segments == 2
        disk.advance(90_000)
        logdir.tick()
        assert log.statistics().segments == 2, "an empty segment is not rolled"


def test_many_ticks_visit_every_log(data: str) -> None:
    with logcore.open_dir(data, create=True, durability="os") as logdir:
        logdir.create_topic("t", partitions=40, config={"flush.ms": 0})
        for n in range(40):
            logdir.partition("t", n).append(b"v")
        for _ in range(40):
            logdir.tick()
        assert all(logdir.partition("t", n).durable_end_offset == 1 for n in range(40))


@pytest.mark.parametrize("shared", [False, True])
def test_idle_tick_skips_quiet_logs(
    data: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker ticks twenty times a second: visiting each of 1,000 logs would cost a
    seventh of a core.
    """
    with logcore.open_dir(data, create=True, durability="os", shared=shared) as logdir:
        logdir.create_topic("t", partitions=10)
        for number in range(10):
            logdir.partition("t", number).append(b"v")
        logdir.tick()
        asked: list[str] = []
        real = logcore.LogDir.settings
        monkeypatch.setattr(
            logcore.LogDir,
            "settings",
            lambda self, name: asked.append(name) or real(self, name),
        )
        logdir.tick()
        assert asked == []


def visits_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each tick() adds the paths of the visited logs."""
    visited: list[str] = []
    real = LogMaintenance.tick_without_recovery_point

    def tick_without_recovery_point(
        maintenance: LogMaintenance, now_ms: int | None = None
    ) -> Any:
        visited.append(maintenance.path)
        return real(maintenance, now_ms)

    monkeypatch.setattr(
        LogMaintenance, "tick_without_recovery_point", tick_without_recovery_point
    )
    return visited


@pytest.mark.long
@pytest.mark.parametrize(
    "durability", ["group", "always", "os", "every(2)", "interval(100)"]
)
def test_tick_visits_only_logs_with_due_work(
    monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """tick() visited every open log twenty times a second: a broker with 1,000 idle
    partitions used 14 % of a core.
    """
    visited = visits_of(monkeypatch)
    disk = SimulatedDisk(now_ms=10_000)
    with logcore.open_dir(
        "data", create=True, durability=durability, fs=disk
    ) as logdir:
        logdir.create_topic("t", partitions=50)
        for number in range(50):
            logdir.partition("t", number).append(b"v")
        for _ in range(400):  # 20 s: all is synced, and the recovery points are written
            disk.advance(50)
            logdir.tick()
        visited.clear()
        for _ in range(200):  # before the first check of retention
            disk.advance(45)
            logdir.tick()
        assert visited == []
        logdir.partition("t", 7).append(b"v", durability="os")
        for _ in range(4):
            disk.advance(50)
            logdir.tick()
        assert 1 <= len(visited) <= 4 and {
            path.rsplit("-", 1)[1] for path in visited
        } == {"7"}
        assert logdir.partition("t", 7).durable_end_offset == (
            0 if durability == "os" else 2
        )
        visited.clear()
        for _ in range(20 * 60):  # 20 minutes: retention checks each log every five
            disk.advance(1_000)
            logdir.tick()
        assert 3 * 50 <= len(visited) <= 6 * 50


@pytest.mark.parametrize(
    "change", ["roll by time", "a setting", "a retired file", "the wall clock was set"]
)
def test_tick_visits_an_idle_log_on_time(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    disk = SimulatedDisk(now_ms=10_000)
    with logcore.open_dir("data", create=True, durability="os", fs=disk) as logdir:
        logdir.create_topic(
            "t",
            config={
                "segment.ms": 80_000,
                "retention.ms": -1,
                "file.delete.delay.ms": 60_000,
            },
        )
        log = logdir.partition("t", 0)
        log.append(b"v")
        if change == "a retired file":
            log.roll()
            log.append(b"v")
        for _ in range(20):
            disk.advance(1_000)
            logdir.tick()
        shape = log.statistics().segments
        if change == "a setting":
            logdir.alter_topic("t", {"segment.ms": 5_000})
        elif change == "a retired file":
            log.delete_records(1)
            disk.advance(59_000)
            logdir.tick()
            assert any(name.endswith(".deleted") for name in disk.files())
            disk.advance(2_000)
            logdir.tick()
            assert not any(name.endswith(".deleted") for name in disk.files())
            return
        elif change == "roll by time":
            disk.advance(59_000)
            logdir.tick()
            assert log.statistics().segments == shape
            disk.advance(2_000)
        else:
            disk._now_ms += 24 * 3_600_000
        logdir.tick()
        assert log.statistics().segments == shape + 1


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 30)) | st.integers(0, 9),
        max_size=60,
    ),
    st.integers(1, 6),
)
def test_deadline_queue_returns_each_task_when_due(
    steps: list[Any], limit: int
) -> None:
    """Each call returns at most `limit` tasks, and each task once."""
    queue: VisitQueue[int] = VisitQueue()
    times: dict[int, int] = {}
    now = 0
    for step in steps:
        if isinstance(step, tuple):
            queue.schedule(step[0], step[1])
            times[step[0]] = -1 if times.get(step[0]) == -1 else step[1]
        elif step < 5:
            queue.make_due(step)
            times[step] = -1
        else:
            now += step - 4
            due = queue.due(now, limit)
            while more := queue.due(now, limit):
                assert len(more) <= limit
                due += more
            expected = sorted(thing for thing, time in times.items() if time <= now)
            assert sorted(due) == expected
            times = {thing: time for thing, time in times.items() if time > now}


def test_item_made_due_twice_is_returned_once() -> None:
    """The second call remained in the queue if the first reached the limit."""
    queue: VisitQueue[str] = VisitQueue()
    for item in ("a", "b", "a"):
        queue.make_due(item)
    assert queue.due(0, 1) == ["a"]
    assert queue.due(0, 1) == ["b"]
    assert queue.due(0, 1) == []


def test_tick_makes_unsynced_append_visible(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t")
        log = logdir.partition("t", 0)
        log.append(b"v", durability="os")
        assert log.high_watermark == 0
        log.host.writer.progress.synced_ms -= 1_000
        logdir.tick()
        assert log.high_watermark == 1


def test_recovery_points_are_written_once_for_all_logs(
    data: str, monkeypatch: Any
) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t", partitions=30)
        for n in range(30):
            log = logdir.partition("t", n)
            log.append(b"v")
            log.host.writer.progress.recovered_ms -= 60_000
        written: list[str] = []
        real = checkpoint.write
        monkeypatch.setattr(
            checkpoint,
            "write",
            lambda fs, d, name, c, **how: (
                written.append(name),
                real(fs, d, name, c, **how),
            )[1],
        )
        logdir.tick()
        assert written.count(checkpoint.RECOVERY_POINT) == 1
        assert len(checkpoint.read_offsets(OS, data, checkpoint.RECOVERY_POINT)) == 30


def test_log_opened_during_tick_is_visited_later() -> None:
    disk = SimulatedDisk()
    with logcore.open_dir(
        "data", create=True, fs=disk, config={"segment.ms": 1_000}
    ) as logdir:
        logdir.create_topic("t")
        logdir.partition("t", 0).append(b"x", timestamp_ms=disk.now_ms())
    with logcore.open_dir("data", fs=disk, config={"segment.ms": 1_000}) as logdir:

        class Logs(dict[Any, Any]):
            def __setitem__(self, key: Any, log: Any) -> None:
                logdir.tick()
                super().__setitem__(key, log)

        logdir._logs.known = Logs()
        log = logdir.partition("t", 0)
        logdir.tick()
        disk.advance(5_000)
        logdir.tick()
        assert log.statistics().rolls == 1


def test_interrupted_tick_visits_remaining_logs_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimulatedDisk()
    with logcore.open_dir("data", create=True, fs=disk) as logdir:
        logs = []
        for name in ("a", "b", "c"):
            logdir.create_topic(name)
            logs.append(logdir.partition(name, 0))
            logs[-1].append(b"x", durability="os")
        real = LogMaintenance.tick_without_recovery_point
        interrupts = [KeyboardInterrupt(), MemoryError()]

        def interrupted(self: LogMaintenance, now_ms: int | None = None) -> Any:
            if interrupts:
                raise interrupts.pop()
            return real(self, now_ms)

        monkeypatch.setattr(LogMaintenance, "tick_without_recovery_point", interrupted)
        for expected in (MemoryError, KeyboardInterrupt):
            with pytest.raises(expected):
                logdir.tick()
            disk.advance(1_500)
        logdir.tick()
        assert [log.high_watermark for log in logs] == [1, 1, 1], (
            "ticks sync the appends of all logs"
        )


def _compacted(disk: SimulatedDisk, incidents: list[Any]) -> Any:
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": 400,
        "min.cleanable.dirty.ratio": 0,
        "segment.ms": 10**12,
    }
    logdir = logcore.open_dir(
        "data", create=True, fs=disk, config=config, on_incident=incidents.append
    )
    if "t" not in logdir:
        logdir.create_topic("t")
        for number in range(40):
            logdir.partition("t", 0).append(
                b"%d" % number * 9, key=b"%d" % (number % 3)
            )
    return logdir


def _tick_for(logdir: Any, disk: SimulatedDisk, minutes: int) -> None:
    for _ in range(minutes * 4):
        disk.advance(15_000)
        for _ in range(3):
            logdir.tick()


def test_damage_found_by_compaction_is_reported() -> None:
    disk = SimulatedDisk()
    incidents = list[Any]()
    with _compacted(disk, incidents) as logdir:
        disk.flip(f"/data/t-0/{0:020d}.log", 80, 3)
        _tick_for(logdir, disk, 1)
        assert [
            (entry.work, entry.where, entry.kind, entry.count) for entry in incidents
        ] == [("compaction", "t-0", "CorruptBatchError", 1)]
        assert logdir.incidents() == tuple(incidents)


def test_failed_compaction_is_reported_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error was swallowed, and the partition was never compacted again."""
    disk = SimulatedDisk()
    incidents = list[Any]()
    with _compacted(disk, incidents) as logdir:
        log = logdir.partition("t", 0)
        size = log.statistics().size_bytes
        disk.faults = FaultPlan(
            Fault("pwrite", errno.EIO, path="*.cleaned", times=None)
        )
        with caplog.at_level("WARNING", logger="logcore"):
            _tick_for(logdir, disk, 5)
        (incident,) = (
            incident for incident in logdir.incidents() if incident.work == "compaction"
        )
        assert (incident.where, incident.kind) == ("t-0", "StorageWriteError")
        assert incident.count > 1, "the compaction was retried"
        assert [(entry.work, entry.count) for entry in incidents] == [
            ("compaction", 1)
        ], "and reported once"
        assert any(record.name == "logcore.compaction" for record in caplog.records)
        disk.faults = None
        _tick_for(logdir, disk, 70)
        assert log.statistics().size_bytes < size


def test_failure_in_tick_is_an_incident_and_stops_nothing() -> None:
    disk = SimulatedDisk()
    incidents = list[Any]()
    with _compacted(disk, incidents) as logdir:
        logdir.create_topic("u")
        disk.faults = FaultPlan(
            Fault("pwrite", errno.EIO, path="*point-offset-checkpoint*", times=None)
        )
        logdir.partition("u", 0).append(b"x", key=b"k")
        _tick_for(logdir, disk, 2)
        assert {(incident.work, incident.kind) for incident in logdir.incidents()} == {
            ("checkpoints", "StorageWriteError")
        }
        assert [entry.count for entry in incidents] == [
            10**number for number in range(len(incidents))
        ] and len(incidents) < 5
        disk.faults = None
        assert logdir.partition("u", 0).append(b"y", key=b"k").offset == 1


def test_incidents_are_bounded() -> None:
    with logcore.open_dir("data", create=True, fs=SimulatedDisk()) as logdir:
        for number in range(250):
            logdir._incidents.record("tick", f"t-{number}", OSError("x"))
        assert [incident.where for incident in logdir.incidents()] == [
            f"t-{number}" for number in range(150, 250)
        ]


def test_a_directory_that_cannot_be_removed_is_an_incident(data: str) -> None:
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("t")
    doomed = Path(data, "x." + "0" * 32 + "-delete")
    (doomed / "inside").mkdir(parents=True)
    with logcore.open_dir(data) as logdir:
        assert [(incident.work, incident.where) for incident in logdir.incidents()] == [
            ("deletion", doomed.name)
        ]
        logdir.partition("t", 0).append(b"x")


def test_background_work_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = SimulatedDisk()
    caplog.set_level("INFO", logger="logcore")
    with _compacted(disk, []) as logdir:
        log = logdir.partition("t", 0)
        _tick_for(logdir, disk, 1)
        log.delete_records(30)
        log.host.writer.commit.poison(OSError("as after a failed sync"))
        logdir.create_topic("u")
        logdir.partition("u", 0).append(b"x" * 99, key=b"k")
        logdir.delete_topic("t")
    path = f"/data/u-0/{0:020d}.log"
    handle = disk.open(path, write=True)
    disk.pwrite(handle, b"torn", disk.file_size(path))
    disk.close(handle)
    disk.unlink("/data/.kafka_cleanshutdown") if disk.exists(
        "/data/.kafka_cleanshutdown"
    ) else None
    with _compacted(disk, []) as logdir:
        assert logdir.partition("u", 0).log_end_offset == 1
    messages = {record.name: record.getMessage() for record in caplog.records}
    assert set(messages) == {
        f"logcore.{area}"
        for area in ("topics", "compaction", "deletion", "log", "recovery")
    }
    assert (
        "truncated 4 bytes" in messages["logcore.recovery"]
        and "quarantine" in messages["logcore.recovery"]
    )
    assert "refuses writes until it is opened again" in messages["logcore.log"]


def test_logging_is_silent_and_not_imported_by_default() -> None:
    code = """
import sys, logcore
from logcore.reporting import log_line
log_line("tick", 30, "no logger")
print("logging" in sys.modules)
import logging
log_line("tick", 30, "no handler for standard error")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("closing", ["deleted", "closed"])
def test_log_deleted_before_its_tick_is_not_an_incident(
    data: str, closing: str
) -> None:
    """Each deletion of a topic that was written logged `LogClosedError`, 40 lines for
    60 partitions.
    """
    with logcore.open_dir(data, create=True, durability="os") as logdir:
        logdir.create_topic(
            "t", partitions=20, config={"flush.ms": 0, "cleanup.policy": "compact"}
        )
        for number in range(20):
            logdir.partition("t", number).append(b"v", key=b"k")
        for number in range(20):
            if closing == "closed":
                logdir.partition("t", number).close()
        if closing == "deleted":
            logdir.delete_topic("t")
        for _ in range(5):
            logdir.tick()
        assert logdir.incidents() == ()
