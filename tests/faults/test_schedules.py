"""Schedules of simulated processes that share a directory, a registry and groups. `make
slow` continues from its last stop (build/schedules.json) up to 1,000,000 schedules.
LOGCORE_SCHEDULES sets another goal, and LOGCORE_SCHEDULES_SECONDS limits the time. A
failure prints the kind and the seed, with which support.schedules.run() repeats it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from support import schedules

GOAL = int(os.environ.get("LOGCORE_SCHEDULES", "1000000"))
SECONDS = float(os.environ.get("LOGCORE_SCHEDULES_SECONDS", "1800"))
PROGRESS_FILE = Path(os.environ.get("LOGCORE_SCHEDULES_FILE", "build/schedules.json"))
#: Number of schedules in `make check`, and in each of its tests. A core runs 15 to 30
#: schedules in a second.
FAST_COUNT = 200
COUNT_PER_TEST = 100
#: Schedules that once removed members that were paused in the middle of a rebalance,
#: because of the deadline of JoinGroup or of SyncGroup.
PAUSED_IN_A_REBALANCE = (("groups clocks", 10_000_338), ("groups clocks", 10_000_373))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, FAST_COUNT, COUNT_PER_TEST))
def test_schedules_of_each_kind_keep_all_invariants(first: int) -> None:
    tested_kinds = Counter(
        kind.split()[0]
        for kind in map(kind_of_number, range(first, first + COUNT_PER_TEST))
    )
    assert set(tested_kinds) == {kind.split()[0] for kind in schedules.KINDS}
    for number in range(first, first + COUNT_PER_TEST):
        schedules.run(*schedules.numbered(number))


@pytest.mark.parametrize(("kind", "seed"), PAUSED_IN_A_REBALANCE)
def test_pause_in_a_rebalance_removes_no_member(kind: str, seed: int) -> None:
    schedules.run(kind, seed)


def kind_of_number(number: int) -> str:
    kind, _ = schedules.numbered(number)
    return kind


@pytest.mark.slow
def test_million_schedules_keep_all_invariants() -> None:
    count = 0
    if PROGRESS_FILE.exists():
        count = json.loads(PROGRESS_FILE.read_text("utf-8"))["schedules"]
    deadline = time.monotonic() + SECONDS
    while count < GOAL and time.monotonic() < deadline:
        schedules.run(*schedules.numbered(count))
        count += 1
        if count % 1_000 == 0:
            PROGRESS_FILE.parent.mkdir(exist_ok=True)
            PROGRESS_FILE.write_text(json.dumps({"schedules": count}), "utf-8")
    print(f"{count} of {GOAL} schedules")
