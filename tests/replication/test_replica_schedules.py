"""Random schedules of a replicated partition: every invariant holds, and seeded bugs are
found.

`make slow` runs 1,000,000 schedules; LOGCORE_REPLICA_SCHEDULES chooses another number. A
tenth as many schedules contain transactions, and as many replace the topic.
A failure prints its seed and its steps; run_schedule() with that seed repeats it.
"""

from __future__ import annotations

import os

import pytest

from support.replica_bugs import BUGS, Bug, find, seeded
from support.replica_topics import run_topics
from support.replica_transactions import run_transactions
from support.replica_world import InvariantBroken, World, run_schedule

#: Schedules in the fast tests, 5,000 in all: 8 to 15 ms of CPU each, and 45 ms with
#: transactions.
FAST = 4_300
FAST_TRANSACTIONS = 200
FAST_TOPICS = 500
SLOW = int(os.environ.get("LOGCORE_REPLICA_SCHEDULES", "1000000"))
#: Each part is a test, so that workers share the schedules.
PARTS = 8
#: A bug that needs more schedules is left to `make slow`.
FAST_WITHIN = 500


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules_keep_the_invariants(part: int) -> None:
    acknowledged = offset_reads = 0
    for seed in range(part, FAST, PARTS):
        world = run_schedule(seed)
        acknowledged += world.acknowledged
        offset_reads += world.offset_reads
    # The clients made progress: about 40 acknowledgements and 30 reads of offsets each.
    assert acknowledged > 20 * FAST // PARTS
    assert offset_reads > 15 * FAST // PARTS


@pytest.mark.slow
@pytest.mark.timeout(86_400)
@pytest.mark.parametrize("part", range(20))
def test_many_schedules_keep_the_invariants(part: int) -> None:
    for seed in range(FAST + part, FAST + SLOW, 20):
        run_schedule(seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_transactions_keep_the_invariants(part: int) -> None:
    ends = 0
    for seed in range(part, FAST_TRANSACTIONS, PARTS):
        ends += len(run_transactions(seed).outcomes)
    assert ends > FAST_TRANSACTIONS // PARTS


@pytest.mark.slow
@pytest.mark.timeout(86_400)
@pytest.mark.parametrize("part", range(20))
def test_many_transactions_keep_the_invariants(part: int) -> None:
    end = FAST_TRANSACTIONS + SLOW // 10
    for seed in range(FAST_TRANSACTIONS + part, end, 20):
        run_transactions(seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_topics_of_the_same_name_keep_the_invariants(part: int) -> None:
    creations = acknowledged = 0
    for seed in range(part, FAST_TOPICS, PARTS):
        world = run_topics(seed)
        creations += world.creations
        acknowledged += world.acknowledged
    assert creations > FAST_TOPICS // PARTS // 2
    assert acknowledged > 20 * FAST_TOPICS // PARTS


@pytest.mark.slow
@pytest.mark.timeout(86_400)
@pytest.mark.parametrize("part", range(20))
def test_many_topics_of_the_same_name_keep_the_invariants(part: int) -> None:
    for seed in range(FAST_TOPICS + part, FAST_TOPICS + SLOW // 10, 20):
        run_topics(seed)


def marked(bug: Bug) -> object:
    cost = 4 * bug.within if bug.run is run_transactions else bug.within
    marks = [pytest.mark.slow] if cost > FAST_WITHIN else []
    return pytest.param(bug, id=bug.name.replace(" ", "-"), marks=marks)


@pytest.mark.long
@pytest.mark.parametrize("bug", [marked(bug) for bug in BUGS])
def test_seeded_bug_is_found(bug: Bug) -> None:
    found = find(bug)
    assert found is not None, f"not found in {bug.within} schedules"
    _, rule = found
    assert rule in bug.rules.split()


@pytest.mark.slow
@pytest.mark.parametrize("bug", [marked(bug) for bug in BUGS])
def test_schedules_of_a_seeded_bug_pass_without_it(bug: Bug) -> None:
    """The options that find a bug must not fail without the bug."""
    if bug.options is not None:
        for seed in range(bug.within):
            bug.run(seed, bug.options)


def test_failing_schedule_reports_its_seed_and_steps() -> None:
    with seeded(*BUGS[0].changes), pytest.raises(InvariantBroken) as caught:
        run_schedule(0)
    repeat, steps = caught.value.__notes__
    assert "run_schedule(0, None)" in repeat
    assert "appends" in steps


def test_schedule_repeats_exactly() -> None:
    first: list[str] = []
    second: list[str] = []
    World(7, steps=first).run()
    World(7, steps=second).run()
    assert first == second
    assert len(first) > 20
