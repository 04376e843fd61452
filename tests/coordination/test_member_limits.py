"""Limits on the bytes of member metadata and assignments, which bound the memory of a
group.

Kafka has no such limits. They are small here to keep the tests short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from logcore.coordination.group_requests import (
    GroupError,
    Joined,
    JoinRefused,
    Rules,
    SyncResult,
)
from logcore.format.group_records import Subscription, subscription_value
from support.coordinator_simulation import CoordinatorSimulation

SUBSCRIPTION = subscription_value(Subscription(("t",)))


@pytest.fixture
def simulation() -> CoordinatorSimulation:
    return CoordinatorSimulation(member_max_bytes=100, members_max_bytes=250)


def join(simulation: CoordinatorSimulation, size: int, member_id: str = "") -> Any:
    """Send a JoinGroup with `size` bytes of metadata; return its response, if there is one."""
    protocols = (("some", SUBSCRIPTION.ljust(size - len("some"), b"\0")),)
    return simulation.replies.get(simulation.join(member_id, protocols=protocols))


def sync(
    simulation: CoordinatorSimulation, joined: Joined, assignments: Mapping[str, bytes]
) -> Any:
    return simulation.replies.get(
        simulation.sync(joined.member_id, joined.generation, assignments=assignments)
    )


@pytest.mark.parametrize(("size", "is_accepted"), [(100, True), (101, False)])
def test_metadata_of_a_member_is_limited(
    simulation: CoordinatorSimulation, size: int, is_accepted: bool
) -> None:
    result = join(simulation, size)
    assert isinstance(result, Joined) == is_accepted
    if not is_accepted:
        assert result == JoinRefused(GroupError.INVALID_REQUEST, "")
        assert simulation.coordinator.get("g") is None


def test_metadata_of_all_members_is_limited(simulation: CoordinatorSimulation) -> None:
    for _ in range(2):
        join(simulation, 100)
    assert join(simulation, 51) == JoinRefused(GroupError.INVALID_REQUEST, "")
    assert len(simulation.group().members) == 2
    assert join(simulation, 50) is None, "got a response before the others rejoined"
    assert len(simulation.group().members) == 3


def test_rejoining_member_counts_once(simulation: CoordinatorSimulation) -> None:
    first = join(simulation, 100)
    assert isinstance(first, Joined)
    for _ in range(3):
        again = join(simulation, 100, first.member_id)
        assert isinstance(again, Joined)


@pytest.mark.parametrize(
    ("sizes", "is_accepted"),
    [
        ((100,), True),
        ((101,), False),
        ((100, 100, 50), True),
        ((100, 100, 51), False),
        ((), True),
    ],
)
def test_assignments_of_a_leader_are_limited(
    simulation: CoordinatorSimulation, sizes: tuple[int, ...], is_accepted: bool
) -> None:
    leader = join(simulation, 50)
    names = (leader.member_id, "m2", "m3")
    result = sync(
        simulation,
        leader,
        {name: b"\0" * size for name, size in zip(names, sizes, strict=False)},
    )
    assert isinstance(result, SyncResult) == is_accepted
    if not is_accepted:
        assert result is GroupError.INVALID_REQUEST
        assert simulation.group().state == "CompletingRebalance", (
            "the leader may send smaller assignments"
        )


@pytest.mark.parametrize(("size", "is_accepted"), [(100, True), (101, False)])
def test_classic_members_of_a_consumer_group_have_the_same_limits(
    size: int, is_accepted: bool
) -> None:
    simulation = CoordinatorSimulation(
        member_max_bytes=100,
        members_max_bytes=150,
        may_upgrade=True,
        may_downgrade=True,
    )
    simulation.heartbeat("A", 0)
    assert isinstance(join(simulation, size), Joined) == is_accepted
    if is_accepted:
        assert join(simulation, 51) == JoinRefused(GroupError.INVALID_REQUEST, "")
        assert isinstance(join(simulation, 50), Joined)


def test_default_limits_are_one_and_sixteen_mebibytes() -> None:
    rules = Rules(min_session_timeout_ms=1, max_session_timeout_ms=1)
    assert (rules.member_max_bytes, rules.members_max_bytes) == (1_048_576, 16_777_216)
