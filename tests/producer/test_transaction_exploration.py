"""Simulated processes consume, transform and produce in transactions. Their steps run
in every order, and processes are killed, stopped or lose power, with exclusive and
shared directories.

LOGCORE_TRANSACTION_ROUNDS=n tries n schedules of each kind instead of 4; `make slow`
tries 500.
"""

from __future__ import annotations

import os

import pytest

import logcore
from logcore.consumer import TopicPartition
from logcore.coordination.transaction_effects import ProducerIdAndEpoch
from logcore.fs import SharedFS
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine
from support.schedules import GROUPS, run_first
from support.transaction_sharers import PATH

ROUNDS = int(os.environ.get("LOGCORE_TRANSACTION_ROUNDS", "4"))
MANY = int(os.environ.get("LOGCORE_TRANSACTION_ROUNDS", "500"))
LONG = pytest.param(
    MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", GROUPS)
def test_any_order_of_steps_splits_no_transaction(chances: str, rounds: int) -> None:
    run_first(f"transactions {chances}", rounds)


def test_no_two_producers_have_the_same_epoch() -> None:
    for seed in range(8):
        disk = SimulatedDisk({PATH: None}, seed=seed)
        with (
            logcore.open_dir(PATH, create=True, fs=disk) as data,
            data.producer(transactional_id="id") as producer,
        ):
            producer.init_transactions()
        machine = Machine(disk, seed=seed, chances=Chances(switch=0.5))
        found: list[ProducerIdAndEpoch | None] = []

        def take_over(
            fs: SharedFS, found: list[ProducerIdAndEpoch | None] = found
        ) -> None:
            with logcore.open_dir(PATH, shared=True, fs=fs) as data:
                for _ in range(3):
                    producer = data.producer(transactional_id="id", threaded=False)
                    producer.init_transactions()
                    found.append(producer._transaction_manager.identity)
                    producer.close()

        for _ in range(3):
            machine.start(take_over)
        machine.run()
        assert len(found) == len(set(found)) == 9, f"seed {seed}: {found}"


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("kind", ["shared", "alone"])
def test_power_cut_splits_no_transaction(kind: str, rounds: int) -> None:
    run_first(f"transactions power {kind}", rounds)


def test_open_transactions_use_one_clock_for_all_processes() -> None:
    """After a change of the wall clock, a second process aborted recent transactions of
    the first, and deleted the state of idle groups and producers, because each process
    compared timestamps with its own wall clock.
    """
    disk = SimulatedDisk({PATH: None})
    machine = Machine(disk, seed=1, chances=Chances(switch=0.5))
    hours_ms = 3_600_000
    is_over: list[bool] = []

    def work(fs: SharedFS) -> None:
        with logcore.open_dir(PATH, create=True, shared=True, fs=fs) as data:
            data.create_topic("t")
            with data.producer(transactional_id="idle", threaded=False) as idle:
                idle.init_transactions()
            with data.consumer(group_id="g") as consumer:
                consumer.commit({("t", 0): 7})
            with data.producer(
                transactional_id="id", transaction_timeout_ms=60_000, threaded=False
            ) as producer:
                producer.init_transactions()
                producer.begin_transaction()
                producer.send("t", b"v", partition=0)
                producer.flush()
                disk.set_wall_clock(disk.now_ms() + 30 * 24 * hours_ms)
                machine.start(expire_all)
                while not is_over:
                    fs.yield_thread()
                producer.commit_transaction()

    def expire_all(fs: SharedFS) -> None:
        with logcore.open_dir(PATH, shared=True, fs=fs) as data:
            data.tick()
            transactions = data.host.coordinators.transactions(data)
            transactions._expired_ms = 0  # check expiration now
            transactions.end_overdue()
            data.host.coordinators.groups(data).expire_offsets()
            data.tick()
            assert set(transactions.all()) == {"id", "idle"}
            with data.consumer(group_id="g") as consumer:
                found = consumer.committed([("t", 0)])[TopicPartition("t", 0)]
                assert found is not None and found.offset == 7
        is_over.append(True)

    machine.start(work)
    machine.run()
