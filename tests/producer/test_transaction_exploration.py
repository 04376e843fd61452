"""Simulated processes consume, transform and produce in transactions: in every order of their steps, killed, stopped,
cut off from power, alone and sharing a directory.

LOGCORE_TRANSACTION_ROUNDS=n tries n schedules of each kind instead of 4; `make slow` tries 500.
"""

from __future__ import annotations

import os

import pytest

import logcore
from logcore.coordination.transactioneffects import Identity
from logcore.fs import SharedFS
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine
from support.transactors import PATH, Pipeline

ROUNDS = int(os.environ.get("LOGCORE_TRANSACTION_ROUNDS", "4"))
MANY = int(os.environ.get("LOGCORE_TRANSACTION_ROUNDS", "500"))
LONG = pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many")
QUIET = Chances(switch=0.3)
KILLS = Chances(switch=0.3, kill=0.0007)
STOPS = Chances(switch=0.3, kill=0.0003, stop=0.003, lost=0.2)


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", [QUIET, KILLS, STOPS], ids=["quiet", "kills", "stops"])
def test_every_order_of_steps(chances: Chances, rounds: int) -> None:
    for seed in range(rounds):
        try:
            pipeline = Pipeline(seed, chances=chances, processes=1 + seed % 3, ids=1 + seed % 2)
            pipeline.run()
            pipeline.judge(pipeline.disk, after_power=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_no_two_producers_have_one_epoch() -> None:
    for seed in range(8):
        disk = SimulatedDisk({PATH: None}, seed=seed)
        with logcore.open_dir(PATH, create=True, fs=disk) as data, data.producer(transactional_id="id") as producer:
            producer.init_transactions()
        machine = Machine(disk, seed=seed, chances=Chances(switch=0.5))
        found: list[Identity | None] = []

        def take_over(fs: SharedFS, found: list[Identity | None] = found) -> None:
            with logcore.open_dir(PATH, shared=True, fs=fs) as data:
                for _ in range(3):
                    producer = data.producer(transactional_id="id", threaded=False)
                    producer.init_transactions()
                    found.append(producer._transacting.identity)
                    producer.close()

        for _ in range(3):
            machine.start(take_over)
        machine.run()
        assert len(found) == len(set(found)) == 9, f"seed {seed}: {found}"


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
def test_a_power_cut_splits_no_transaction(shared: bool, rounds: int) -> None:
    for seed in range(rounds):
        processes = 1 + seed % 2 if shared else 1
        chances = Chances(switch=0.3, power=0.002 if not shared else 0.0005)
        pipeline = Pipeline(seed, chances=chances, processes=processes, shared=shared)
        pipeline.run()
        pipeline.machine.cut_power()
        for state in pipeline.disk.crash_states(limit=6, seed=seed):
            try:
                pipeline.judge(state.disk(), after_power=True)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {state.what}: {error!r}") from error
