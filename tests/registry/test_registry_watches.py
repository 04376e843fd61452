"""Watches of a registry of files: whoever looks behind each report sees the last state, whatever came between.

The processes and their disk are simulated: reports come late, twice or, where a test says so, not at all.
"""

from __future__ import annotations

import os
import random

import pytest

from logcore.errors import LogcoreError
from logcore.fs import SharedFS
from logcore.registry import FileRegistry, open_registry
from logcore.registry.watching import FileWatch
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine

ROUNDS = int(os.environ.get("LOGCORE_REGISTRY_ROUNDS", "15"))
LOOK_SECONDS = 1.0


class Watched:
    """A process that looks whenever its watch reports, and two that change things and are killed."""

    def __init__(self, seed: int, chances: Chances, *, looks_anyway: bool = False) -> None:
        self.looks_anyway = looks_anyway
        self.disk = SimulatedDisk({"data": None}, seed=seed)
        self.machine = Machine(self.disk, seed=seed, chances=chances)
        self.rng = random.Random(seed)
        self.seen: object = None
        self.missed = 0
        self.writers = [self.machine.start(self.write) for _ in range(2)]
        self.watcher = self.machine.start(self.look)

    def write(self, fs: SharedFS) -> None:
        with open_registry("/data", fs=fs, lock_timeout_ms=1_000) as registry:
            for _ in range(6):
                try:
                    self.change(registry)
                except LogcoreError:
                    pass

    def change(self, registry: FileRegistry) -> None:
        path = self.rng.choice(["/t/a", "/t/b", "/t/deep/c"])
        kind = self.rng.randrange(5)
        if kind == 0:
            registry.create(path, ephemeral=True)
        elif kind == 1:
            registry.update(path, lambda value: (value or b"") + b"x")
        elif kind == 2:
            registry.set(path, b"y" * self.rng.choice([1, 5_000]))
        elif kind == 3:
            registry.delete(path)
        else:
            registry.delete(self.rng.choice(["/t/deep", "/t"]))

    def state(self, registry: FileRegistry) -> object:
        nodes = []
        for path in ("/t/a", "/t/deep/c"):
            try:
                nodes.append(registry.get(path))
            except LogcoreError as error:
                nodes.append(type(error).__name__)
        return nodes, registry.children("/t")

    def look(self, fs: SharedFS) -> None:
        with open_registry("/data", fs=fs) as registry:
            watch = registry.watch(["/t/a", "/t/deep/c"], children=["/t"])
            while True:
                is_last = self.are_done()
                self.seen = self.state(registry)
                if is_last:
                    break
                while not watch.wait(LOOK_SECONDS) and not self.looks_anyway and not self.are_done():
                    pass
            for _ in range(20):  # reports that are on their way, and the echoes of a death
                if watch.wait(LOOK_SECONDS):
                    self.seen = self.state(registry)
            if self.looks_anyway:
                self.seen = self.state(registry)
            watch.close()
            assert self.seen == self.state(registry), f"stale: {self.seen}, now {self.state(registry)}"

    def are_done(self) -> bool:
        return all(writer.has_ended or writer.is_killed for writer in self.writers)


def explore(seeds: range, chances: Chances, *, looks_anyway: bool = False) -> None:
    for seed in seeds:
        watched = Watched(seed, chances, looks_anyway=looks_anyway)
        watched.machine.spared = watched.watcher
        try:
            watched.machine.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_look_behind_each_report_sees_the_last_state() -> None:
    explore(range(ROUNDS), Chances(switch=0.3, kill=0.002, stop=0.002))


def test_lost_reports_are_made_up_for_by_a_look_each_second() -> None:
    explore(range(ROUNDS // 2), Chances(switch=0.3, kill=0.002, lost=0.3), looks_anyway=True)


@pytest.mark.slow
def test_many_watches_see_the_last_state() -> None:
    first = random.SystemRandom().randrange(1 << 40)
    explore(range(first, first + 5_000), Chances(switch=0.3, kill=0.002, stop=0.002))


def test_without_events_the_state_is_compared() -> None:
    """The disk's own watch tells nothing of which file changed, and has no descriptor."""
    disk = SimulatedDisk({"data": None})
    with open_registry("/data", fs=disk) as one, open_registry("/data", fs=disk) as other:
        one.create("/a", b"0")
        watch = one.watch(["/a"])
        assert isinstance(watch, FileWatch)
        assert watch.fileno() == -1
        other.create("/b")
        assert not watch.wait(0.1), "another node"
        other.set("/a", b"1")
        assert watch.wait(10)
        assert not watch.wait(0.1)
        watch.close()
