"""Appends that wait for the disk: each is told once it is there, whoever synced."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import logcore
from logcore import Log
from logcore.coordinators.durable_queue import Settling
from logcore.errors import LogcoreError, LogFailedError
from logcore.testing import Fault, FaultPlan, SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def log(disk: SimulatedDisk) -> Iterator[Log]:
    with logcore.open("/t-0", create=True, durability="os", fs=disk) as log:
        yield log


class Told:
    """What settling said, in order: the number of an append, and the logs that failed."""

    def __init__(self) -> None:
        self.settling = Settling(threading.RLock())
        self.heard: list[tuple[int, Mapping[Log, LogcoreError]]] = []

    def append(self, number: int, *logs: Log) -> None:
        ends = {log: log.append(b"v").last_offset + 1 for log in logs}
        self.settling.add(
            ends, lambda failures: self.heard.append((number, dict(failures)))
        )


def test_an_append_is_told_once_it_is_on_disk(log: Log) -> None:
    told = Told()
    told.append(1, log)
    assert told.heard == []
    told.settling.settle()
    assert told.heard == [(1, {})]
    assert log.durable_end_offset == 1


def test_an_append_to_no_log_is_told_at_once() -> None:
    told = Told()
    told.append(1)
    assert told.heard == [(1, {})]


def test_an_append_behind_the_sync_of_another_waits_for_the_next(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by threads under load: it was taken for one that a truncation had removed."""
    told = Told()
    told.append(1, log)
    flush = log.flush

    def flush_and_append() -> None:
        flush()
        monkeypatch.undo()
        told.append(2, log)

    monkeypatch.setattr(log, "flush", flush_and_append)
    told.settling.settle()
    assert told.heard == [(1, {})], "the second one is for whoever appended it"
    told.settling.settle()
    assert told.heard == [(1, {}), (2, {})]
    assert log.durable_end_offset == 2


def test_nobody_waits_for_what_others_add_meanwhile(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 threads that committed waited for one another, and shared no sync: each sync
    found one append.
    """
    told = Told()
    told.append(0, log)
    flush = log.flush
    flushes = 0

    def flush_and_append() -> None:
        nonlocal flushes
        flushes += 1
        flush()
        told.append(flushes, log)

    monkeypatch.setattr(log, "flush", flush_and_append)
    told.settling.settle()
    assert flushes == 1
    assert told.heard == [(0, {})]


def test_what_an_append_leads_to_is_waited_for(log: Log) -> None:
    """As the end of a transaction does: its markers follow its decision."""
    told = Told()

    def go_on(left: int) -> None:
        told.heard.append((left, {}))
        if left:
            end = log.append(b"v").last_offset + 1
            told.settling.add({log: end}, lambda failures: go_on(left - 1))

    told.settling.add(
        {log: log.append(b"v").last_offset + 1}, lambda failures: go_on(2)
    )
    told.settling.settle()
    assert told.heard == [(2, {}), (1, {}), (0, {})]
    assert log.durable_end_offset == 3


def test_a_sync_that_fails_is_told_to_those_who_waited_for_it(
    disk: SimulatedDisk, log: Log
) -> None:
    told = Told()
    with logcore.open("/u-0", create=True, durability="os", fs=disk) as other:
        told.append(1, log, other)
        told.append(2, other)
        disk.faults = FaultPlan(Fault("fdatasync", path="/t-0/*.log"))
        told.settling.settle()
    assert [number for number, _ in sorted(told.heard)] == [1, 2]
    failures: dict[int, Any] = dict(told.heard)
    assert list(failures[1]) == [log]
    assert failures[2] == {}


def test_an_append_that_was_cut_away_is_told_so(log: Log) -> None:
    told = Told()
    told.append(1, log)
    log.truncate(0)
    told.settling.settle()
    assert [type(error) for error in told.heard[0][1].values()] == [LogFailedError]


def test_an_interrupt_leaves_the_others_waiting(log: Log) -> None:
    told = Told()

    def interrupt(failures: Mapping[Log, LogcoreError]) -> None:
        raise KeyboardInterrupt

    told.append(1, log)
    told.settling.add({log: log.append(b"v").last_offset + 1}, interrupt)
    told.append(3, log)
    with pytest.raises(KeyboardInterrupt):
        told.settling.settle()
    assert told.heard == [(1, {})]
    told.settling.settle()
    assert told.heard == [(1, {}), (3, {})]
