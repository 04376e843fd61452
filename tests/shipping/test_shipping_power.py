"""Tests of power failures during forwarding and mirroring. Every shipped record still
exists locally, and the restarted forwarder or mirror neither skips nor repeats records.

LOGCORE_SHIPPING_ROUNDS=n tries n schedules of each kind instead of 20; `make slow`
tries 2,000.
"""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

import pytest

import logcore
from logcore.shipping import Forwarder, Mirror
from logcore.testing import SimulatedCrash, SimulatedDisk
from support.model_cluster import ModelCluster, ModelSource

PATH = "place/data"
ROUNDS = int(os.environ.get("LOGCORE_SHIPPING_ROUNDS", "20"))
MANY = int(os.environ.get("LOGCORE_SHIPPING_ROUNDS", "2000"))
LONG = pytest.param(
    MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
)
ORDERS = ("orders", 0)


def after_power(disk: SimulatedDisk, chance: random.Random) -> SimulatedDisk:
    """Return one of the possible states of the disk after a power failure."""
    left = chance.choice(list(disk.after_crash(limit=12, seed=chance.randrange(10**6))))
    left.seed = chance.randrange(10**6)  # a restart creates other random ids
    return left


def mirror_through_power_cuts(seed: int, offsets: str) -> None:
    chance = random.Random(seed)
    disk = SimulatedDisk({"place": None}, seed=seed)
    source = ModelSource(chance, disk)
    source.create_topic("orders")
    log = source.logs[ORDERS]
    for _ in range(4):
        for _ in range(chance.randrange(8)):
            log.append(b"%d" % chance.randrange(10**9), gap=chance.choice([0, 0, 0, 2]))
        with (
            contextlib.suppress(SimulatedCrash),
            logcore.open_dir(PATH, create=True, fs=disk) as data,
        ):
            disk.crash_in(chance.randrange(60))
            mirror = Mirror(data, source, topics=["orders"], offsets=offsets, fs=disk)  # type: ignore[arg-type]
            for _ in range(10):
                mirror.step()
            mirror.close()
            disk.crash_in(None)
        if disk.is_dead:
            source.disk = disk = after_power(disk, chance)
    options: dict[str, Any] = {"topics": ["orders"], "offsets": offsets, "fs": disk}
    with logcore.open_dir(PATH, create=True, fs=disk) as data:
        with Mirror(data, source, **options) as mirror:
            mirror.run(until_end=True)
        found = list(data.partition(*ORDERS).read(0, isolation="read_committed"))
        wanted = [record.record for record in log.records]
        if offsets == "keep":
            assert found == wanted
        else:
            assert [record.value for record in found] == [
                record.value for record in wanted
            ]


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("offsets", ["keep", "new"])
def test_mirror_continues_after_a_power_cut(offsets: str, rounds: int) -> None:
    for seed in range(rounds):
        try:
            mirror_through_power_cuts(seed, offsets)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def forward_through_power_cuts(seed: int, at_least_once: bool) -> None:
    chance = random.Random(seed)
    disk = SimulatedDisk({"place": None}, seed=seed)
    cluster = ModelCluster(chance, disk, {"orders": 1})
    options: dict[str, Any] = {"at_least_once": at_least_once, "max_records": 3}
    with logcore.open_dir(PATH, create=True, fs=disk) as data:
        data.create_topic("orders")
    for turn in range(4):
        with (
            contextlib.suppress(SimulatedCrash),
            logcore.open_dir(PATH, fs=disk) as data,
        ):
            forwarder = Forwarder(data, cluster.client(), fs=disk, **options)
            disk.crash_in(chance.randrange(60))
            for at in range(8):
                data.append(
                    "orders",
                    b"%d-%d" % (turn, at),
                    durability=chance.choice(["os", "disk"]),
                )
                forwarder.step()
            forwarder.close()
            disk.crash_in(None)
        if disk.is_dead:
            cluster.disk = disk = after_power(disk, chance)
    with logcore.open_dir(PATH, fs=disk) as data:
        with Forwarder(data, cluster.client(), fs=disk, **options) as forwarder:
            forwarder.run(until_end=True)
        wanted = [record.value for record in data.read("orders")]
        found = cluster.values(ORDERS)
        if at_least_once:
            assert set(found) == set(wanted), (
                "a shipped record is missing locally or in the cluster"
            )
        else:
            assert found == wanted


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize(
    "at_least_once", [False, True], ids=["exactly-once", "at-least-once"]
)
def test_forwarder_continues_after_a_power_cut(
    at_least_once: bool, rounds: int
) -> None:
    for seed in range(rounds):
        try:
            forward_through_power_cuts(seed, at_least_once)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
