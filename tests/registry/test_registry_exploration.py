"""Processes on one registry of files, interleaved, killed, stopped and cut off from power at any step.

The invariants are named in tests/support/registry_histories.py. `make slow` tries many more schedules.
"""

from __future__ import annotations

import os
import random

import pytest

from logcore.errors import SessionExpiredError
from logcore.fs import SharedFS
from logcore.registry import Node, open_registry
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine
from support.registry_exploring import PATHS, World

ROUNDS = int(os.environ.get("LOGCORE_REGISTRY_ROUNDS", "15"))

QUIET = Chances(switch=0.3)
KILLS = Chances(switch=0.3, kill=0.004)
STOPS = Chances(switch=0.3, kill=0.002, stop=0.01)


def explore(seeds: range, chances: Chances) -> None:
    for seed in seeds:
        paths = PATHS if seed % 3 else PATHS[2:3]
        world = World(seed, chances=chances, processes=2 + seed % 2, paths=paths)
        world.run()
        try:
            world.judge()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def cut_power(seeds: range) -> int:
    states = 0
    for seed in seeds:
        chances = Chances(switch=0.3, kill=0.001, power=0.003)
        world = World(seed, chances=chances, processes=2 + seed % 2, operations=8, ephemerals=seed % 4 < 2)
        world.run()
        world.machine.cut_power()
        for state in world.disk.crash_states(limit=8, seed=seed):
            states += 1
            try:
                world.judge_after_power(state)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {state.what}: {error}") from error
    return states


def test_who_was_declared_over_writes_nothing_more() -> None:
    """One process writes, and stops anywhere. Another declares it over: two reads behind that are the same."""
    for seed in range(ROUNDS):
        machine = Machine(SimulatedDisk({"data": None}, seed=seed), seed=seed, chances=Chances(switch=0.2, stop=0.01))
        sessions: list[str] = []
        reads: list[Node] = []

        def write(fs: SharedFS, sessions: list[str] = sessions) -> None:
            with open_registry("/data", fs=fs) as registry:
                registry.create("/p", b"0")
                sessions.append(registry.session.id)
                with pytest.raises(SessionExpiredError):
                    while True:
                        registry.set("/p", b"x" * 500)

        def expire(
            fs: SharedFS, machine: Machine = machine, sessions: list[str] = sessions, reads: list[Node] = reads
        ) -> None:
            with open_registry("/data", fs=fs) as registry:
                while not sessions:
                    registry.poll()
                until = machine.steps + machine.rng.randrange(40)
                while machine.steps < until:
                    registry.poll()
                registry.expire(sessions[0])
                reads.append(registry.get("/p"))
                until = machine.steps + 1_000
                while machine.steps < until:
                    registry.poll()
                reads.append(registry.get("/p"))

        machine.start(write)
        machine.start(expire)
        machine.run()
        assert reads[0] == reads[1], f"fenced: seed {seed}"


@pytest.mark.parametrize("chances", [QUIET, KILLS, STOPS], ids=["quiet", "kills", "stops"])
def test_every_order_of_steps_fits_a_plain_registry(chances: Chances) -> None:
    explore(range(ROUNDS), chances)


def test_a_power_cut_loses_nothing_that_was_acked() -> None:
    assert cut_power(range(ROUNDS // 2)) > ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("chances", [QUIET, KILLS, STOPS], ids=["quiet", "kills", "stops"])
def test_many_orders_of_steps_fit_a_plain_registry(chances: Chances) -> None:
    first = random.SystemRandom().randrange(1 << 40)
    explore(range(first, first + 20_000), chances)


@pytest.mark.slow
def test_many_power_cuts_lose_nothing_that_was_acked() -> None:
    first = random.SystemRandom().randrange(1 << 40)
    cut_power(range(first, first + 5_000))
