"""Several simulated processes share a group: their steps run in every order, and
processes are killed, stopped or lose power.

LOGCORE_GROUP_ROUNDS=n tries n schedules of each kind instead of 1; `make slow` tries
500.
"""

from __future__ import annotations

import os

import pytest

from support.schedules import GROUPS, STORES, run_first

ROUNDS = int(os.environ.get("LOGCORE_GROUP_ROUNDS", "1"))
MANY = int(os.environ.get("LOGCORE_GROUP_ROUNDS", "500"))
LONG = pytest.param(
    MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", GROUPS)
def test_any_order_of_steps_keeps_the_rules_of_groups(
    chances: str, rounds: int
) -> None:
    run_first(f"groups {chances}", rounds)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", GROUPS)
def test_owner_nodes_exclude_others_when_partitions_move_at_once(
    chances: str, rounds: int
) -> None:
    """The assignor assigns a partition to a new member before its owner has released
    it, so that only the nodes of owners protect it.
    """
    run_first(f"groups hasty {chances}", rounds)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", GROUPS)
def test_static_members_keep_their_partitions_until_the_session_timeout(
    chances: str, rounds: int
) -> None:
    run_first(f"groups static {chances}", rounds)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("chances", GROUPS)
@pytest.mark.parametrize("kind", ["rewind", "rewind dual"])
def test_no_commit_undoes_a_rewind(chances: str, kind: str, rounds: int) -> None:
    run_first(f"groups {kind} {chances}", rounds)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("kind", ["kills", "power"])
@pytest.mark.parametrize("stores", STORES)
def test_offsets_move_while_the_group_runs(stores: str, kind: str, rounds: int) -> None:
    """Some members use the old offset store, and others the new one. The larger of the
    two offsets is always the acknowledged one.
    """
    run_first(f"groups {stores} {kind}", rounds)


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
def test_power_cut_loses_no_commit(rounds: int) -> None:
    run_first("groups power", rounds)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
def test_member_that_stopped_in_a_commit_changes_no_offset(rounds: int) -> None:
    run_first("groups hasty freezes", 5 * rounds)
