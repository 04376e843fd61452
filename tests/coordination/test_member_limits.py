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
from support.consumerworld import World

WANTS = subscription_value(Subscription(("t",)))


@pytest.fixture
def world() -> World:
    return World(member_max_bytes=100, members_max_bytes=250)


def join(world: World, size: int, member_id: str = "") -> Any:
    """Join, or rejoin, a member with `size` bytes of metadata."""
    protocols = (("some", WANTS.ljust(size - len("some"), b"\0")),)
    return world.replies.get(world.join(member_id, protocols=protocols))


def sync(world: World, joined: Joined, assignments: Mapping[str, bytes]) -> Any:
    return world.replies.get(
        world.sync(joined.member_id, joined.generation, assignments=assignments)
    )


@pytest.mark.parametrize(("size", "is_accepted"), [(100, True), (101, False)])
def test_metadata_of_a_member_is_limited(
    world: World, size: int, is_accepted: bool
) -> None:
    result = join(world, size)
    assert isinstance(result, Joined) == is_accepted
    if not is_accepted:
        assert result == JoinRefused(GroupError.INVALID_REQUEST, "")
        assert world.coordinator.get("g") is None


def test_metadata_of_all_members_is_limited(world: World) -> None:
    for _ in range(2):
        join(world, 100)
    assert join(world, 51) == JoinRefused(GroupError.INVALID_REQUEST, "")
    assert len(world.group().members) == 2
    assert join(world, 50) is None, "the member waits for the others"
    assert len(world.group().members) == 3


def test_rejoining_member_counts_once(world: World) -> None:
    first = join(world, 100)
    assert isinstance(first, Joined)
    for _ in range(3):
        again = join(world, 100, first.member_id)
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
    world: World, sizes: tuple[int, ...], is_accepted: bool
) -> None:
    leader = join(world, 50)
    names = (leader.member_id, "m2", "m3")
    result = sync(
        world,
        leader,
        {name: b"\0" * size for name, size in zip(names, sizes, strict=False)},
    )
    assert isinstance(result, SyncResult) == is_accepted
    if not is_accepted:
        assert result is GroupError.INVALID_REQUEST
        assert world.group().state == "CompletingRebalance", (
            "the leader may send smaller assignments"
        )


@pytest.mark.parametrize(("size", "is_accepted"), [(100, True), (101, False)])
def test_classic_members_of_a_consumer_group_have_the_same_limits(
    size: int, is_accepted: bool
) -> None:
    world = World(
        member_max_bytes=100,
        members_max_bytes=150,
        may_upgrade=True,
        may_downgrade=True,
    )
    world.beat("A", 0)
    assert isinstance(join(world, size), Joined) == is_accepted
    if is_accepted:
        assert join(world, 51) == JoinRefused(GroupError.INVALID_REQUEST, "")
        assert isinstance(join(world, 50), Joined)


def test_default_limits_are_one_and_sixteen_mebibytes() -> None:
    rules = Rules(min_session_timeout_ms=1, max_session_timeout_ms=1)
    assert (rules.member_max_bytes, rules.members_max_bytes) == (1_048_576, 16_777_216)
