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
from support.schedules import GROUPS, run_first
from support.transactors import PATH

ROUNDS = int(os.environ.get("LOGCORE_TRANSACTION_ROUNDS", "4"))
MANY = int(os.environ.get("LOGCORE_TRANSACTION_ROUNDS", "500"))
LONG = pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many")


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", GROUPS)
def test_every_order_of_steps(chances: str, rounds: int) -> None:
    run_first(f"transactions {chances}", rounds)


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
@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_a_power_cut_splits_no_transaction(kind: str, rounds: int) -> None:
    run_first(f"transactions power {kind}", rounds)
