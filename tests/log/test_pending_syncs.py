"""Appends with a pending sync: each completion callback runs once the append is
durable, whichever thread synced it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import logcore
from logcore import Log
from logcore.coordinators.durable_queue import DurableQueue
from logcore.errors import LogcoreError, LogFailedError
from logcore.testing import Fault, FaultPlan, SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def log(disk: SimulatedDisk) -> Iterator[Log]:
    with logcore.open("/t-0", create=True, durability="os", fs=disk) as log:
        yield log


class Recorder:
    """Records each completion in order, as the number of the append and the failed
    logs.
    """

    def __init__(self) -> None:
        self.settling = DurableQueue(threading.RLock())
        self.completed: list[tuple[int, Mapping[Log, LogcoreError]]] = []

    def append(self, number: int, *logs: Log) -> None:
        ends = {log: log.append(b"v").last_offset + 1 for log in logs}
        self.settling.add(
            ends, lambda failures: self.completed.append((number, dict(failures)))
        )


def test_append_completes_after_its_sync(log: Log) -> None:
    recorder = Recorder()
    recorder.append(1, log)
    assert recorder.completed == []
    recorder.settling.wait_until_durable()
    assert recorder.completed == [(1, {})]
    assert log.durable_end_offset == 1


def test_append_to_no_log_completes_at_once() -> None:
    recorder = Recorder()
    recorder.append(1)
    assert recorder.completed == [(1, {})]


def test_append_during_a_sync_waits_for_the_next_sync(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append was treated as truncated, which a test with threads under load
    detected.
    """
    recorder = Recorder()
    recorder.append(1, log)
    flush = log.flush

    def flush_and_append() -> None:
        flush()
        monkeypatch.undo()
        recorder.append(2, log)

    monkeypatch.setattr(log, "flush", flush_and_append)
    recorder.settling.wait_until_durable()
    assert recorder.completed == [(1, {})], (
        "the second append completes when its own thread settles"
    )
    recorder.settling.wait_until_durable()
    assert recorder.completed == [(1, {}), (2, {})]
    assert log.durable_end_offset == 2


def test_settle_does_not_wait_for_appends_added_during_its_sync(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise 64 committing threads waited for one another, and each sync covered one
    append.
    """
    recorder = Recorder()
    recorder.append(0, log)
    flush = log.flush
    flushes = 0

    def flush_and_append() -> None:
        nonlocal flushes
        flushes += 1
        flush()
        recorder.append(flushes, log)

    monkeypatch.setattr(log, "flush", flush_and_append)
    recorder.settling.wait_until_durable()
    assert flushes == 1
    assert recorder.completed == [(0, {})]


def test_settle_waits_for_appends_made_by_callbacks(log: Log) -> None:
    """The end of a transaction relies on it: the markers are appended once the decision
    is durable.
    """
    recorder = Recorder()

    def append_next(remaining: int) -> None:
        recorder.completed.append((remaining, {}))
        if remaining:
            end = log.append(b"v").last_offset + 1
            recorder.settling.add(
                {log: end}, lambda failures: append_next(remaining - 1)
            )

    recorder.settling.add(
        {log: log.append(b"v").last_offset + 1}, lambda failures: append_next(2)
    )
    recorder.settling.wait_until_durable()
    assert recorder.completed == [(2, {}), (1, {}), (0, {})]
    assert log.durable_end_offset == 3


def test_failed_sync_is_reported_to_the_appends_of_its_log(
    disk: SimulatedDisk, log: Log
) -> None:
    recorder = Recorder()
    with logcore.open("/u-0", create=True, durability="os", fs=disk) as other:
        recorder.append(1, log, other)
        recorder.append(2, other)
        disk.faults = FaultPlan(Fault("fdatasync", path="/t-0/*.log"))
        recorder.settling.wait_until_durable()
    assert [number for number, _ in sorted(recorder.completed)] == [1, 2]
    failures: dict[int, Any] = dict(recorder.completed)
    assert list(failures[1]) == [log]
    assert failures[2] == {}


def test_truncated_append_completes_with_an_error(log: Log) -> None:
    recorder = Recorder()
    recorder.append(1, log)
    log.truncate(0)
    recorder.settling.wait_until_durable()
    assert [type(error) for error in recorder.completed[0][1].values()] == [
        LogFailedError
    ]


def test_interrupt_in_a_callback_keeps_later_appends_pending(log: Log) -> None:
    recorder = Recorder()

    def interrupt(failures: Mapping[Log, LogcoreError]) -> None:
        raise KeyboardInterrupt

    recorder.append(1, log)
    recorder.settling.add({log: log.append(b"v").last_offset + 1}, interrupt)
    recorder.append(3, log)
    with pytest.raises(KeyboardInterrupt):
        recorder.settling.wait_until_durable()
    assert recorder.completed == [(1, {})]
    recorder.settling.wait_until_durable()
    assert recorder.completed == [(1, {}), (3, {})]


def test_callback_that_syncs_again_completes_each_append_once(log: Log) -> None:
    """A broker whose disk work runs at once reports a sync inside a callback."""
    recorder = Recorder()
    first = log.append(b"v").last_offset + 1

    def sync_again(_: Mapping[Log, LogcoreError]) -> None:
        recorder.settling.on_sync(log, None)

    recorder.settling.add({log: first}, sync_again)
    recorder.append(2, log)
    recorder.append(3, log)
    log.flush()
    recorder.settling.on_sync(log, None)
    assert recorder.completed == [(2, {}), (3, {})]
    assert not recorder.settling.is_waiting_for(log)
