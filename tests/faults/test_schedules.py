"""Schedules of simulated processes that share a directory, a registry and groups, all
kinds in turn.

`make slow` continues towards 1,000,000 from its last stop (build/schedules.json);
LOGCORE_SCHEDULES sets another goal, LOGCORE_SCHEDULES_SECONDS limits the time. A failure
names the kind and the seed: support.schedules.run() repeats it.
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
FILE = Path(os.environ.get("LOGCORE_SCHEDULES_FILE", "build/schedules.json"))
#: Of `make check`, and of each of its tests. 15 to 30 of them take a second of a core.
SOME = 200
SHARE = 100
#: They once removed members that were paused in the middle of a rebalance: by the
#: deadline of those who join, and by that of those who ask for their share, which runs
#: on while the group is stable.
PAUSED_IN_A_REBALANCE = (("groups clocks", 10_000_338), ("groups clocks", 10_000_373))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, SOME, SHARE))
def test_some_schedules_of_each_world_keep_all_invariants(first: int) -> None:
    worlds = Counter(
        kind.split()[0] for kind in map(of_number, range(first, first + SHARE))
    )
    assert set(worlds) == {kind.split()[0] for kind in schedules.KINDS}
    for number in range(first, first + SHARE):
        schedules.run(*schedules.numbered(number))


@pytest.mark.parametrize(("kind", "seed"), PAUSED_IN_A_REBALANCE)
def test_pause_in_a_rebalance_removes_no_member(kind: str, seed: int) -> None:
    schedules.run(kind, seed)


def of_number(number: int) -> str:
    kind, _ = schedules.numbered(number)
    return kind


@pytest.mark.slow
def test_a_million_schedules_keep_all_invariants() -> None:
    done = 0
    if FILE.exists():
        done = json.loads(FILE.read_text("utf-8"))["schedules"]
    until = time.monotonic() + SECONDS
    while done < GOAL and time.monotonic() < until:
        schedules.run(*schedules.numbered(done))
        done += 1
        if done % 1_000 == 0:
            FILE.parent.mkdir(exist_ok=True)
            FILE.write_text(json.dumps({"schedules": done}), "utf-8")
    print(f"{done} of {GOAL} schedules")
