"""Several simulated processes write one partition: in every order of their steps, killed, stopped, cut off from power.

LOGCORE_SHARING_ROUNDS=n tries n schedules of each kind instead of 3; `make slow` tries 1,000.
"""

from __future__ import annotations

import errno
import os

import pytest

from logcore.testing import Fault, FaultPlan
from logcore.testing.processes import Chances
from support.sharers import Sharers

ROUNDS = int(os.environ.get("LOGCORE_SHARING_ROUNDS", "3"))
MANY = int(os.environ.get("LOGCORE_SHARING_ROUNDS", "1000"))
LONG = pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many")
QUIET = Chances(switch=0.3)
KILLS = Chances(switch=0.3, kill=0.003)
STOPS = Chances(switch=0.3, kill=0.001, stop=0.01)
POLICIES = ("group", "os", "always", "every(3)")


def sharers(seed: int, chances: Chances, kinds: str) -> Sharers:
    return Sharers(
        seed, chances=chances, processes=2 + seed % 2, durability=POLICIES[seed % len(POLICIES)], kinds=kinds
    )


def explore(seeds: range, chances: Chances, kinds: str) -> None:
    for seed in seeds:
        world = sharers(seed, chances, kinds)
        try:
            world.run()
            world.judge(world.disk, after_power=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


KINDS = {
    "appends": "amo",
    "retries": "ab",
    "files": "aamrdf",
    "cuts": "amtfr",
    "compactions": "amrc",
    "transactions": "ax",
}


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("chances", [QUIET, KILLS, STOPS], ids=["quiet", "kills", "stops"])
def test_every_order_of_steps(chances: Chances, kinds: str, rounds: int) -> None:
    explore(range(rounds), chances, kinds)


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
def test_a_power_cut_loses_nothing_that_was_acked(rounds: int) -> None:
    states = 0
    for seed in range(rounds):
        world = sharers(seed, Chances(switch=0.3, kill=0.001, power=0.002), "amorbdf")
        world.run()
        world.machine.cut_power()
        for state in world.disk.crash_states(limit=8, seed=seed):
            states += 1
            try:
                world.judge(state.disk(), after_power=True)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {state.what}: {error!r}") from error
    assert states > 2 * rounds


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
def test_a_failed_sync_in_one_process_stops_acks_in_all(rounds: int) -> None:
    for seed in range(rounds):
        world = sharers(seed, QUIET, "amorf")
        world.disk.faults = FaultPlan(Fault("fdatasync", errno.EIO, at=1 + seed % 9))
        world.run()
        world.machine.cut_power()
        for state in world.disk.crash_states(limit=8, seed=seed):
            try:
                world.judge(state.disk(), after_power=True)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {state.what}: {error!r}") from error
