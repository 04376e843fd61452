"""Processes on one registry of files, interleaved, killed, stopped and cut off from
power at any step.

The invariants are named in tests/support/registry_histories.py. `make slow` tries many
more schedules.
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
from support.schedules import REGISTRY, run, run_first

ROUNDS = int(os.environ.get("LOGCORE_REGISTRY_ROUNDS", "15"))


def test_ended_session_writes_nothing() -> None:
    """One process writes, and stops at any step. Another process expires its session.
    Two later reads return the same value.
    """
    for seed in range(ROUNDS):
        machine = Machine(
            SimulatedDisk({"data": None}, seed=seed),
            seed=seed,
            chances=Chances(switch=0.2, stop=0.01),
        )
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
            fs: SharedFS,
            machine: Machine = machine,
            sessions: list[str] = sessions,
            reads: list[Node] = reads,
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


@pytest.mark.long
@pytest.mark.parametrize("chances", REGISTRY)
def test_every_order_of_steps_fits_a_plain_registry(chances: str) -> None:
    run_first(f"registry {chances}", ROUNDS)


def test_power_cut_loses_no_acknowledged_record() -> None:
    states = [
        count
        for count in run_first("registry power", ROUNDS // 2)
        if isinstance(count, int)
    ]
    assert sum(states) > ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("chances", REGISTRY)
def test_many_orders_of_steps_fit_a_plain_registry(chances: str) -> None:
    first = random.SystemRandom().randrange(1 << 40)
    for seed in range(first, first + 20_000):
        run(f"registry {chances}", seed)


@pytest.mark.slow
def test_many_power_cuts_lose_nothing_that_was_acked() -> None:
    first = random.SystemRandom().randrange(1 << 40)
    for seed in range(first, first + 5_000):
        run("registry power", seed)
