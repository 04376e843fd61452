"""Several simulated processes write one partition. Their steps run in random order.
Processes are killed or stopped, or the machine loses power.

LOGCORE_SHARING_ROUNDS=n tries n schedules of most kinds instead of 3; `make slow` tries
1,000.
"""

from __future__ import annotations

import os

import pytest

from support.schedules import ACTS, SHARING, run_first

ROUNDS = int(os.environ.get("LOGCORE_SHARING_ROUNDS", "3"))
MANY = int(os.environ.get("LOGCORE_SHARING_ROUNDS", "1000"))
LONG = pytest.param(
    MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("acts", ACTS)
@pytest.mark.parametrize("chances", SHARING)
def test_any_order_of_steps_loses_no_acknowledged_record(
    chances: str, acts: str, rounds: int
) -> None:
    run_first(f"sharing {acts} {chances}", rounds)


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
def test_power_cut_loses_no_acknowledged_record(rounds: int) -> None:
    states = [
        count for count in run_first("sharing power", rounds) if isinstance(count, int)
    ]
    assert sum(states) > 2 * rounds


@pytest.mark.long
@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
@pytest.mark.parametrize("kind", ["acks", "acks cuts", "acks flushed"])
def test_acknowledged_records_are_on_disk(kind: str, rounds: int) -> None:
    run_first(f"sharing {kind}", 3 * rounds)


@pytest.mark.parametrize("rounds", [ROUNDS, LONG])
def test_failed_sync_in_one_process_stops_acks_in_all(rounds: int) -> None:
    run_first("sharing failed sync", rounds)
