"""Failure detector: how long a process must observe an inactive member until the member
is removed.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logcore.coordination.classic_group import ClassicGroupMember, Group
from logcore.coordination.group_requests import (
    DelayEnds,
    JoinEnds,
    SessionEnds,
    SyncEnds,
    Timeout,
)
from logcore.coordinators.stall_detector import StallDetector

SESSION_MS = 3_000
REBALANCE_MS = 60_000
M0 = SessionEnds("m0")
M1 = SessionEnds("m1")
#: A rebalance waits for members that join, and for members that request their
#: assignment.
REBALANCES: tuple[Timeout, ...] = (JoinEnds(), SyncEnds(3))


def group(*deadlines_ms: int) -> Group:
    group_with_members = Group("g")
    for number, deadline_ms in enumerate(deadlines_ms):
        member = ClassicGroupMember(
            f"m{number}", None, "c", "h", REBALANCE_MS, SESSION_MS, ()
        )
        member.deadline_ms = deadline_ms
        group_with_members.members[member.member_id] = member
    return group_with_members


def is_stuck_after(observed: list[tuple[int, int]]) -> bool:
    """Return whether a member is stuck after these observations, each with its time and
    the deadline of the member.
    """
    observations = StallDetector()
    for at_ms, deadline_ms in observed:
        observations.observe(group(deadline_ms), {}, at_ms)
    return observations.is_over(group(observed[-1][1]), {}, M0)


def test_member_is_stuck_after_its_session() -> None:
    assert not is_stuck_after([(at_ms, 0) for at_ms in range(0, 2_501, 500)])
    assert is_stuck_after([(at_ms, 0) for at_ms in range(0, 3_001, 500)])


def test_absent_member_has_its_own_timeout() -> None:
    first = group(0)
    first.members["m0"].absence_ms = 1_000
    for is_absent in (False, True):
        first.members["m0"].is_absent = is_absent
        observations = StallDetector()
        for at_ms in (0, 300, 600, 900, 1_200):
            observations.observe(first, {}, at_ms)
        assert observations.is_over(first, {}, M0) == is_absent


def test_pause_of_the_observer_counts_at_most_a_third_of_the_session() -> None:
    assert not is_stuck_after([(0, 0), (3_600_000, 0)])
    assert not is_stuck_after([(0, 0), (3_600_000, 0), (7_200_000, 0)])
    assert is_stuck_after([(0, 0), (3_600_000, 0), (7_200_000, 0), (10_800_000, 0)])


def test_member_that_renewed_its_session_is_counted_from_then() -> None:
    assert not is_stuck_after(
        [(0, 0), (1_000, 0), (2_000, 0), (3_000, 1), (4_000, 1), (5_000, 1)]
    )
    assert is_stuck_after([(0, 0), (2_900, 1), (3_900, 1), (4_900, 1), (5_900, 1)])


def test_detector_needs_observations_before_it_reports_a_member() -> None:
    observations = StallDetector()
    first = group(0, 0)
    assert not observations.is_over(first, {}, M0)
    observations.observe(first, {}, 0)
    for at_ms in (1_000, 2_000, 3_000):
        observations.observe(first, {}, at_ms)
    assert observations.is_over(first, {}, M1)
    assert not observations.is_over(group(0, 1), {}, M1), (
        "renewed since the last observation"
    )
    del first.members["m1"]
    observations.observe(first, {}, 3_100)
    assert not observations.is_over(group(0, 0), {}, M1), "it has left"
    observations.forget("g")
    assert not observations.is_over(first, {}, M0)


@pytest.mark.parametrize("timeout", REBALANCES)
def test_rebalance_is_over_after_its_deadline_was_observed(timeout: Timeout) -> None:
    observations = StallDetector()
    first = group(0)
    timers = {timeout: REBALANCE_MS}
    assert not observations.is_over(first, timers, timeout), (
        "a new detector has no observations"
    )
    observations.observe(first, timers, 0)
    observations.observe(first, timers, 3_600_000)
    assert not observations.is_over(first, timers, timeout), (
        "a pause counts as a third of the time"
    )
    observations.observe(first, timers, 3_600_000 + REBALANCE_MS // 3)
    assert not observations.is_over(first, timers, timeout)
    observations.observe(first, timers, 3_600_000 + REBALANCE_MS * 2 // 3)
    assert observations.is_over(first, timers, timeout)
    assert not observations.is_over(first, {timeout: REBALANCE_MS + 1}, timeout), (
        "the observations were of another rebalance"
    )


def test_deadlines_without_a_living_member_need_no_observation() -> None:
    observations = StallDetector()
    assert observations.is_over(group(0), {DelayEnds(0): 5}, DelayEnds(0))
    assert observations.is_over(group(), {M0: 5}, M0), "the group has no such member"


@given(st.lists(st.integers(0, 5_000), max_size=40), st.integers(0, 39))
def test_no_member_is_stuck_before_two_thirds_of_its_session(
    pauses_ms: list[int], renewed: int
) -> None:
    observations = StallDetector()
    at_ms = 0
    renewed_ms = 0
    deadline_ms = 0
    for number, pause_ms in enumerate(pauses_ms):
        if number == renewed:
            deadline_ms += 1
            renewed_ms = at_ms
        at_ms += pause_ms
        observations.observe(group(deadline_ms), {}, at_ms)
        if observations.is_over(group(deadline_ms), {}, M0):
            assert at_ms - renewed_ms >= SESSION_MS * 2 // 3
