"""due() computes the due maintenance tasks of a log from a ScheduleState."""

from __future__ import annotations

import itertools

import pytest

from logcore.config import Durability
from logcore.partition.schedule import ScheduleState, due, due_times, sync_wait_ms
from logcore.partition.writer import RECOVERY_LAG_MS

LATER = 1 << 40
IDLE = ScheduleState(
    clock_ms=1_000,
    next_retention_ms=LATER,
    next_unlink_ms=LATER,
    has_unsynced=False,
    synced_ms=900,
    sync_wait_ms=100,
    recovery_point_lags=False,
    recovered_ms=1_000 - RECOVERY_LAG_MS,
    roll_in_ms=None,
)
#: Changes of IDLE by which exactly one task is due at 1,000 ms, and none at 999 ms.
DUE = {
    "retention": {"next_retention_ms": 1_000},
    "unlink": {"next_unlink_ms": 1_000},
    "sync": {"has_unsynced": True},
    "recovery point": {"recovery_point_lags": True},
    "roll": {"roll_in_ms": 0},
}


@pytest.mark.parametrize("count", range(len(DUE) + 1))
def test_each_combination_of_tasks_is_due_at_its_time(count: int) -> None:
    for names in itertools.combinations(DUE, count):
        facts = IDLE
        for name in names:
            facts = facts._replace(**DUE[name])
        assert set(due(facts, 1_000)) == set(names)
        assert due(facts, 999) == []


@pytest.mark.parametrize(
    "change",
    [
        {"has_unsynced": True, "synced_ms": 901},
        {"recovery_point_lags": True, "recovered_ms": 1_001 - RECOVERY_LAG_MS},
        {"roll_in_ms": 1},
        {"next_retention_ms": 1_001},
        {"next_unlink_ms": 1_001},
    ],
)
def test_pending_task_is_due_one_ms_later(change: dict[str, int]) -> None:
    facts = IDLE._replace(**change)
    assert due(facts, 1_000) == []
    assert len(due(facts, 1_001)) == 1
    assert min(due_times(facts).values()) == 1_001


def test_overdue_roll_is_due_now() -> None:
    facts = IDLE._replace(roll_in_ms=-5_000)
    assert due_times(facts)["roll"] == facts.clock_ms


@pytest.mark.parametrize(
    ("durability", "flush_ms", "wait_ms"),
    [
        ("os", 7, 7),
        ("os", LATER, LATER),
        ("group", LATER, 100),
        ("always", LATER, 100),
        ("group", 7, 7),
        ("interval(50)", LATER, 50),
        ("interval(50)", 7, 7),
        ("every(9)", LATER, LATER),
    ],
)
def test_data_remains_unsynced_for(
    durability: str, flush_ms: int, wait_ms: int
) -> None:
    assert sync_wait_ms(flush_ms, Durability.parse(durability)) == wait_ms
