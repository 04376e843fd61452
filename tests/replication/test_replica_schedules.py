"""Schedules of a replicated partition with faults: every invariant holds."""

from __future__ import annotations

from support.replicaworld import run_schedule

#: About 15 seconds on one core, shared by the workers of the test run.
SCHEDULES = 2_000
PARTS = 8


def test_short() -> None:
    for seed in range(200):
        run_schedule(seed)
