"""Several simulated processes share a group: in every order of their steps, killed, stopped, cut off from power.

LOGCORE_GROUP_ROUNDS=n tries n schedules of each kind instead of 4; `make slow` tries 500.
"""

from __future__ import annotations

import os

import pytest

from logcore.testing.processes import Chances
from support.groupsharers import Group

ROUNDS = int(os.environ.get("LOGCORE_GROUP_ROUNDS", "2"))
MANY = int(os.environ.get("LOGCORE_GROUP_ROUNDS", "500"))
LONG = pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many")
QUIET = Chances(switch=0.3)
KILLS = Chances(switch=0.3, kill=0.0007)
STOPS = Chances(switch=0.3, kill=0.0003, stop=0.003, lost=0.2)


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", [QUIET, KILLS, STOPS], ids=["quiet", "kills", "stops"])
def test_every_order_of_steps(chances: Chances, rounds: int) -> None:
    for seed in range(rounds):
        try:
            group = Group(seed, chances=chances, processes=1 + seed % 3)
            group.run()
            group.judge(group.disk, after_power=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", [QUIET, KILLS, STOPS], ids=["quiet", "kills", "stops"])
def test_owners_keep_others_out_when_partitions_move_at_once(chances: Chances, rounds: int) -> None:
    """The assignor is one that gives a partition away before its owner let go: the nodes of owners are all there is."""
    for seed in range(rounds):
        try:
            group = Group(seed, chances=chances, processes=1 + seed % 3, is_hasty=True)
            group.run()
            group.judge(group.disk, after_power=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", [QUIET, KILLS, STOPS], ids=["quiet", "kills", "stops"])
def test_static_members_keep_their_places_for_a_while(chances: Chances, rounds: int) -> None:
    for seed in range(rounds):
        try:
            group = Group(seed, chances=chances, processes=1 + seed % 3, is_static=True)
            group.run()
            group.judge(group.disk, after_power=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", [QUIET, KILLS, STOPS], ids=["quiet", "kills", "stops"])
@pytest.mark.parametrize("is_dual", [False, True], ids=["log", "dual"])
def test_no_commit_undoes_a_rewind(chances: Chances, is_dual: bool, rounds: int) -> None:
    stores = [{"dual_commit": True}] if is_dual else [{}]
    for seed in range(rounds):
        try:
            group = Group(seed, chances=chances, processes=1 + seed % 3, rewinds=True, stores=stores)
            group.run()
            group.judge(group.disk, after_power=False)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


DUAL = {"dual_commit": True}
REGISTRY = {"offsets_storage": "registry"}
BACK = {"offsets_storage": "registry", "dual_commit": True}
STORES = {
    "to the log": [REGISTRY, DUAL],
    "in the log": [{}, DUAL],
    "to the registry": [{}, BACK],
    "back": [REGISTRY, BACK],
}


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("power", [False, True], ids=["kills", "power"])
@pytest.mark.parametrize("stores", STORES)
def test_offsets_move_while_the_group_runs(stores: str, power: bool, rounds: int) -> None:
    """Some members commit as before, others as they will; whatever happens, the larger of both is what was told."""
    for seed in range(rounds):
        chances = Chances(switch=0.3, kill=0.0005, power=0.0003 if power else 0.0)
        group = Group(seed, chances=chances, processes=1 + seed % 3, stores=STORES[stores])
        try:
            group.run()
            if not power:
                group.judge(group.disk, after_power=False)
                continue
            group.machine.cut_power()
            for state in group.disk.crash_states(limit=4, seed=seed):
                group.judge(state.disk(), after_power=True)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
def test_a_power_cut_loses_no_commit(rounds: int) -> None:
    for seed in range(rounds):
        group = Group(seed, chances=Chances(switch=0.3, kill=0.0003, power=0.0003), processes=1 + seed % 2)
        group.run()
        group.machine.cut_power()
        for state in group.disk.crash_states(limit=4, seed=seed):
            try:
                group.judge(state.disk(), after_power=True)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {state.what}: {error!r}") from error
