"""Watches of a registry of files: a reader that reads after each report sees the last
state.

The processes and their disk are simulated. Reports are late, repeated or, in some
tests, lost.
"""

from __future__ import annotations

import os
import random

import pytest

from logcore.registry import open_registry
from logcore.registry.watching import FileWatch
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances
from support.registry_watched import WatchSimulation

ROUNDS = int(os.environ.get("LOGCORE_REGISTRY_ROUNDS", "15"))


def explore(
    seeds: range, chances: Chances, *, reads_without_report: bool = False
) -> None:
    for seed in seeds:
        watched = WatchSimulation(
            seed, chances, reads_without_report=reads_without_report
        )
        watched.machine.protected = watched.watcher
        try:
            watched.machine.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_read_after_each_report_sees_the_last_state() -> None:
    explore(range(ROUNDS), Chances(switch=0.3, kill=0.002, stop=0.002))


def test_lost_reports_are_replaced_by_a_check_each_second() -> None:
    explore(
        range(ROUNDS // 2),
        Chances(switch=0.3, kill=0.002, lost=0.3),
        reads_without_report=True,
    )


@pytest.mark.slow
def test_many_watches_see_the_last_state() -> None:
    first = random.SystemRandom().randrange(1 << 40)
    explore(range(first, first + 5_000), Chances(switch=0.3, kill=0.002, stop=0.002))


def test_without_events_the_state_is_compared() -> None:
    """The disk's own watch does not name the changed file, and has no descriptor."""
    disk = SimulatedDisk({"data": None})
    with (
        open_registry("/data", fs=disk) as first,
        open_registry("/data", fs=disk) as other,
    ):
        first.create("/a", b"0")
        watch = first.watch(["/a"])
        assert isinstance(watch, FileWatch)
        assert watch.fileno() == -1
        other.create("/b")
        assert not watch.wait(0.1), "another node"
        other.set("/a", b"1")
        assert watch.wait(300)
        assert not watch.wait(0.1)
        watch.close()
