"""Groups that go from the classic protocol to the consumer protocol while they run, and
back: each request and answer.

No broker and no log: time is a number, and the disk is done at once unless a test holds
it. Members of the classic protocol are cooperative where they say that they own
something when they join, and eager where they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from logcore.coordination.effects import (
    Committer,
    GroupConverted,
    GroupError,
    Joined,
    JoinRefused,
    SyncResult,
)
from logcore.format.consumer_group_records import ClassicMember, MemberState, RecordKind
from logcore.format.group_records import (
    Subscription,
    assignment_value,
    read_assignment,
    read_group,
    subscription_value,
)
from support.consumerworld import T0, World, of

SESSION_MS = 20_000
REBALANCE_MS = 50_000
LATER = "REBALANCE_IN_PROGRESS"


@pytest.fixture
def world() -> World:
    return World(may_upgrade=True, may_downgrade=True)


def metadata(*owned: int, topic: str = "t", rack_id: str | None = None) -> bytes:
    return subscription_value(
        Subscription(
            (topic,), None, tuple(("t", number) for number in owned), -1, rack_id
        )
    )


def send_join(
    world: World, member_id: str = "", data: bytes | None = None, **more: Any
) -> int:
    fields: dict[str, Any] = {
        "protocols": (("range", metadata() if data is None else data),),
        "session_timeout_ms": SESSION_MS,
        "rebalance_timeout_ms": REBALANCE_MS,
    }
    return world.join(member_id, **{**fields, **more})


def joined(
    world: World, member_id: str = "", data: bytes | None = None, **more: Any
) -> Joined:
    result = world.replies[send_join(world, member_id, data, **more)]
    assert isinstance(result, Joined), result
    return result


def refused(
    world: World, member_id: str = "", data: bytes | None = None, **more: Any
) -> str:
    result = world.replies[send_join(world, member_id, data, **more)]
    assert isinstance(result, JoinRefused), result
    return result.error.name


def sync(
    world: World,
    member_id: str,
    generation: int,
    shares: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """The numbers of the partitions of t, or the name of the error."""
    assignments = {}
    for name, numbers in (shares or {}).items():
        assignments[name] = assignment_value([("t", number) for number in numbers])
    return told(
        world, world.sync(member_id, generation, assignments=assignments, **more)
    )


def told(world: World, waiter: int) -> Any:
    result = world.replies.get(waiter)
    if isinstance(result, SyncResult):
        partitions = read_assignment(result.assignment)
        assert partitions is not None
        return sorted(number for _, number in partitions)
    assert isinstance(result, GroupError), result
    return result.name


def beats(
    world: World, member_id: str, generation: int, instance_id: str | None = None
) -> str | None:
    error, effects = world.coordinator.heartbeat(
        "g", member_id, instance_id, generation, world.now_ms
    )
    world.act(effects)
    return None if error is None else error.name


def leaves(world: World, member_id: str, instance_id: str | None = None) -> str | None:
    (error,), effects = world.coordinator.leave(
        "g", [(member_id, instance_id)], world.now_ms
    )
    world.act(effects)
    return None if error is None else error.name


def classic_pair(world: World) -> tuple[str, str]:
    """Two members of the classic protocol at generation 2, with two partitions each."""
    one = joined(world).member_id
    sync(world, one, 1, {one: [0, 1, 2, 3]})
    waiter = send_join(world)
    assert beats(world, one, 1) == LATER
    assert joined(world, one).generation == 2
    other = world.replies[waiter].member_id
    assert sync(world, one, 2, {one: [0, 1], other: [2, 3]}) == [0, 1]
    assert sync(world, other, 2) == [2, 3]
    return one, other


def upgraded(world: World) -> tuple[str, str]:
    """The two, and A beside them, which waits for what they give up."""
    pair = classic_pair(world)
    assert world.beat("A", 0) == (3, [])
    return pair


# -- up --------------------------------------------------------------------------------


def test_clients_are_exchanged_one_by_one_and_nobody_uses_what_another_has(
    world: World,
) -> None:
    one, other = upgraded(world)
    assert GroupConverted("g", "consumer") in world.events
    assert world.consumers().currents[one].assigned == of("t", 0, 1)
    # Both are eager: they give all up, and join again.
    assert beats(world, one, 2) == LATER
    assert joined(world, one).generation == 3
    assert sync(world, one, 3) == [0, 1]
    assert beats(world, one, 3) is None
    assert beats(world, other, 2) == LATER
    assert joined(world, other).generation == 3
    assert sync(world, other, 3) == [2]
    assert world.beat("A", 3) == (3, [3])
    assert world.group().state == "Stable"
    # Now they leave, one after the other, and B comes.
    assert leaves(world, one) is None
    assert world.beat("A", 3)[0] == 4
    assert world.beat("B", 0)[0] == 5
    assert leaves(world, other) is None
    for _ in range(3):
        for name in ("A", "B"):
            current = world.consumers().currents[name]
            world.beat(name, current.member_epoch, owned=current.assigned)
    assert world.group().state == "Stable"
    assert {len(one.assigned) for one in world.consumers().currents.values()} == {2}


def test_all_of_an_upgrade_is_one_batch(world: World) -> None:
    one, other = classic_pair(world)
    before = len(world.batches)
    world.beat("A", 0)
    assert len(world.batches) == before + 1
    found = world.last_batch()
    assert found[0] == (RecordKind.CLASSIC, "", None)
    members = {name: value for kind, name, value in found if kind is RecordKind.MEMBER}
    assert set(members) == {one, other, "A"}
    assert members[one].classic == ClassicMember(SESSION_MS, (("range", metadata()),))
    assert members["A"].classic is None
    assert {name for kind, name, _ in found if kind is RecordKind.CURRENT} == {
        one,
        other,
        "A",
    }
    world.restart()
    assert world.consumers().is_classic(one) and not world.consumers().is_classic("A")
    assert beats(world, one, 2) == LATER


def test_an_upgrade_that_cannot_be_stored_is_none(world: World) -> None:
    """The group goes on as it was, and its members join again."""
    one, _ = classic_pair(world)
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    assert world.refused("A", 0) == "COORDINATOR_NOT_AVAILABLE"
    world.disk_error = None
    assert world.group().consumers is None
    assert world.group().state == "PreparingRebalance"
    assert beats(world, one, 2) == LATER
    world.restart()
    assert world.group().consumers is None and set(world.group().members) >= {one}


def test_requests_that_wait_are_told_to_come_again(world: World) -> None:
    one, other = classic_pair(world)
    joining = send_join(world, one, metadata(0, 1, topic="u"))
    assert joining not in world.replies
    world.beat("A", 0)
    assert world.replies[joining] == JoinRefused(GroupError.REBALANCE_IN_PROGRESS, one)
    assert world.group().join_timer is None
    assert sync(world, other, 2) == LATER


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({"protocol_type": "connect"}, [0]),
        ({"data": b"\0"}, [0]),
        ({}, b"no assignment"),
        ({}, assignment_value([("t", 0)])[:-4] + b"\0\0\0\1u"),
    ],
)
def test_a_group_that_is_none_of_consumers_stays_what_it_is(
    world: World, fields: Any, shares: Any
) -> None:
    """Of another protocol type, with other metadata, or with an assignor that hands on
    more than partitions.
    """
    one = joined(world, **fields).member_id
    assignment = (
        shares
        if isinstance(shares, bytes)
        else assignment_value([("t", number) for number in shares])
    )
    world.sync(one, 1, assignments={one: assignment})
    before = len(world.batches)
    assert world.refused("A", 0) == "GROUP_ID_NOT_FOUND"
    assert len(world.batches) == before
    assert world.group().consumers is None and world.group().state == "Stable"
    assert beats(world, one, 1) is None


def test_a_refused_newcomer_leaves_the_group_what_it_is(world: World) -> None:
    one, _ = classic_pair(world)
    state_ms = world.group().state_ms
    assert world.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert world.group().consumers is None
    assert (world.group().state, world.group().state_ms) == ("Stable", state_ms)
    assert beats(world, one, 2) is None


def test_a_full_group_is_not_upgraded() -> None:
    world = World(may_upgrade=True, may_downgrade=True, consumer_max_size=1)
    classic_pair(world)
    assert world.refused("A", 0) == "GROUP_ID_NOT_FOUND"


def test_what_a_cooperative_member_has_not_heard_that_it_lost_stays_with_it(
    world: World,
) -> None:
    """Its assignment is less than what it said it had, and it may not have been told."""
    one = joined(world).member_id
    sync(world, one, 1, {one: [0, 1, 2, 3]})
    waiter = send_join(world)
    joined(world, one, metadata(0, 1, 2, 3))
    other = world.replies[waiter].member_id
    sync(world, one, 2, {one: [0, 1], other: []})
    world.beat("A", 0)
    assert world.consumers().currents[one].assigned == of("t", 0, 1, 2, 3)
    assert world.consumers().currents[other].assigned == of("t")


def test_a_partition_that_an_assignor_gave_to_two_is_with_one(world: World) -> None:
    one = joined(world).member_id
    sync(world, one, 1, {one: [0]})
    waiter = send_join(world)
    joined(world, one)
    other = world.replies[waiter].member_id
    sync(world, one, 2, {one: [0, 1], other: [1, 2]})
    world.beat("A", 0)
    assert world.consumers().currents[one].assigned == of("t", 0, 1)
    assert world.consumers().currents[other].assigned == of("t", 2)


def test_partitions_of_topics_that_are_gone_are_nobodys(world: World) -> None:
    one, _ = classic_pair(world)
    world.set_topic("t", 0)
    world.beat("A", 0, topic_names=["u"])
    assert world.consumers().currents[one].assigned == of("t")


# -- members of the classic protocol in a consumer group -------------------------------


def test_a_member_joins_by_the_classic_protocol_and_is_told_its_id_first(
    world: World,
) -> None:
    world.beat("A", 0)
    result = world.replies[send_join(world, takes_id_first=True)]
    assert isinstance(result, JoinRefused) and result.error.name == "MEMBER_ID_REQUIRED"
    assert set(world.consumers().members) == {"A"}
    found = joined(world, result.member_id, metadata(rack_id="r"), takes_id_first=True)
    assert (found.generation, found.protocol, found.leader, found.members) == (
        2,
        "range",
        "",
        (),
    )
    assert world.consumers().members[found.member_id].rack_id == "r"
    assert sync(world, found.member_id, 2) == []
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    assert beats(world, found.member_id, 2) is None
    assert world.beat("A", 1, owned=of("t", 0, 1)) == (2, None)
    # What it waited for is free, and so it is to join once more.
    assert beats(world, found.member_id, 2) == LATER
    assert joined(world, found.member_id).generation == 2
    assert sync(world, found.member_id, 2) == [2, 3]
    assert beats(world, found.member_id, 2) is None


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"protocol_type": "connect"}, "INCONSISTENT_GROUP_PROTOCOL"),
        ({"protocols": ()}, "INCONSISTENT_GROUP_PROTOCOL"),
        ({"protocols": (("other", metadata()),)}, "INCONSISTENT_GROUP_PROTOCOL"),
        ({"data": b"no subscription"}, "INCONSISTENT_GROUP_PROTOCOL"),
        ({"member_id": "A"}, "UNKNOWN_MEMBER_ID"),
        ({"member_id": "x", "instance_id": "i"}, "UNKNOWN_MEMBER_ID"),
        ({"member_id": "x" * 40_000}, "INVALID_REQUEST"),
        ({"member_id": "x", "data": metadata(0)}, "UNKNOWN_MEMBER_ID"),
    ],
)
def test_who_may_not_join(world: World, more: Any, error: str) -> None:
    """The last of them was removed and does not know: it still uses a partition."""
    upgraded(world)
    before = len(world.batches)
    assert refused(world, **more) == error
    assert len(world.batches) == before


def test_a_full_group_takes_no_member_of_the_classic_protocol() -> None:
    world = World(may_upgrade=True, may_downgrade=True, consumer_max_size=1)
    world.beat("A", 0)
    assert refused(world) == "GROUP_MAX_SIZE_REACHED"


def test_a_cooperative_member_gives_up_first_and_joins_again(world: World) -> None:
    world.beat("A", 0)
    one = joined(world).member_id
    world.beat("A", 1, owned=of("t"))
    joined(world, one)
    assert sync(world, one, 2) == [2, 3]
    world.beat("B", 0)  # who is to have one of them
    world.beat("B", 3)
    assert beats(world, one, 2) == LATER
    found = joined(world, one, metadata(2, 3))
    assert found.generation == 2, "it keeps its generation until it has given up"
    current = world.consumers().currents[one]
    assert current.state is MemberState.UNREVOKED
    assert sync(world, one, 2) == sorted(number for _, number in current.assigned)
    assert beats(world, one, 2) == LATER
    (kept,) = current.assigned
    assert joined(world, one, metadata(kept[1])).generation == 3
    assert world.consumers().currents[one].state is MemberState.STABLE


def test_its_requests_are_checked(world: World) -> None:
    one, other = upgraded(world)
    assert sync(world, "nobody", 2) == "UNKNOWN_MEMBER_ID"
    assert sync(world, "A", 3) == "UNKNOWN_MEMBER_ID"
    assert sync(world, one, 1) == "ILLEGAL_GENERATION"
    assert sync(world, one, 2) == LATER
    assert beats(world, one, 3) == "ILLEGAL_GENERATION"
    assert beats(world, "A", 3) == "UNKNOWN_MEMBER_ID"
    assert beats(world, one, 2, "i") == "UNKNOWN_MEMBER_ID"
    joined(world, one)
    assert sync(world, one, 3, protocol="other") == "INCONSISTENT_GROUP_PROTOCOL"
    assert sync(world, one, 3, protocol_type="connect") == "INCONSISTENT_GROUP_PROTOCOL"
    assert sync(world, one, 3, protocol="range", protocol_type="consumer") == [0, 1]
    assert leaves(world, "A") == "UNKNOWN_MEMBER_ID"
    assert leaves(world, other) is None
    assert leaves(world, other) == "UNKNOWN_MEMBER_ID"


def test_a_heartbeat_of_the_other_protocol_is_none_of_it(world: World) -> None:
    one, _ = upgraded(world)
    for epoch in (0, 2, 3, -1):
        assert world.refused(one, epoch) == "UNKNOWN_MEMBER_ID"
    assert world.consumers().is_classic(one)


@pytest.mark.parametrize(
    ("generation", "error"), [(2, None), (1, GroupError.ILLEGAL_GENERATION)]
)
def test_it_commits_with_its_generation(
    world: World, generation: int, error: GroupError | None
) -> None:
    one, _ = upgraded(world)
    found, _ = world.coordinator.check_commit(
        Committer("g", generation, one, None), world.now_ms
    )
    assert found is error


def test_its_session_is_the_one_that_it_asked_for(world: World) -> None:
    one, other = upgraded(world)
    world.sleep(SESSION_MS - 1)
    assert beats(world, one, 2) == LATER
    world.sleep(1)
    assert set(world.consumers().members) == {one, "A"}
    assert world.now_ms == T0 + SESSION_MS
    assert other not in world.consumers().members


def test_who_does_not_join_again_in_time_is_removed(world: World) -> None:
    one, other = upgraded(world)
    assert beats(world, one, 2) == LATER
    for _ in range(REBALANCE_MS // 10_000):
        world.beat("A", 3)
        world.sleep(10_000)
        beats(world, other, world.consumers().current(other).member_epoch)
        beats(world, one, 2)
        if not world.consumers().rejoins & {other}:
            continue
        joined(world, other)
        sync(world, other, world.consumers().current(other).member_epoch)
    assert one not in world.consumers().members
    assert other in world.consumers().members


def test_who_does_not_ask_for_its_assignment_in_time_is_removed(world: World) -> None:
    one, _ = upgraded(world)
    joined(world, one)
    for _ in range(REBALANCE_MS // 10_000):
        assert one in world.consumers().members
        beats(world, one, 3)
        world.beat("A", world.consumers().current("A").member_epoch)
        world.sleep(10_000)
    assert one not in world.consumers().members


def test_an_instance_goes_from_one_protocol_to_the_other(world: World) -> None:
    one = joined(world, instance_id="i").member_id
    sync(world, one, 1, {one: [0, 1, 2, 3]}, instance_id="i")
    assert world.beat("A", 0, instance_id="i") == (2, [0, 1, 2, 3]), (
        "classic members do not say that they leave"
    )
    assert set(world.consumers().members) == {"A"}
    assert not world.consumers().is_classic("A")
    assert beats(world, one, 1, "i") == "FENCED_INSTANCE_ID"
    world.beat("B", 0)
    found = joined(world, instance_id="i")
    assert set(world.consumers().members) == {found.member_id, "B"}
    assert world.consumers().is_classic(found.member_id)
    assert world.refused("A", 2, instance_id="i") == "FENCED_INSTANCE_ID"
    assert refused(world, "other", instance_id="i") == "FENCED_INSTANCE_ID"
    assert leaves(world, "", "i") is None
    assert set(world.consumers().members) == {"B"}


# -- and back --------------------------------------------------------------------------


def test_when_the_last_member_of_the_protocol_leaves_the_others_go_back(
    world: World,
) -> None:
    one, other = upgraded(world)
    for name in (one, other):
        joined(world, name)
        sync(world, name, 3)
    world.beat("A", 3)
    assert world.beat("A", -1) == (-1, None)
    assert GroupConverted("g", "classic") in world.events
    group = world.group()
    assert group.consumers is None and set(group.members) == {one, other}
    assert (group.state, group.generation) == ("PreparingRebalance", 3)
    assert beats(world, one, 3) == LATER
    waiter = send_join(world, one)
    found = joined(world, other)
    leader = found.leader
    assert found.generation == world.replies[waiter].generation == 4
    shares = {one: [0, 1], other: [2, 3]}
    assert sync(world, leader, 4, shares) == shares[leader]
    assert not group.owed
    world.restart()
    assert world.group().consumers is None and world.group().generation == 4
    assert beats(world, one, 4) is None


def test_the_way_back_is_one_batch_and_is_written_until_it_is_stored(
    world: World,
) -> None:
    one, other = upgraded(world)
    world.holds = True
    world.send("A", -1)
    world.disk()
    assert world.group().consumers is None
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    world.disk()
    world.disk_error = None
    world.holds = False
    assert world.group().owed
    waiter = send_join(world, one)
    joined(world, other)
    leader = world.replies[waiter].leader
    assert sync(world, leader, 4, {one: [0], other: [1, 2, 3]})
    found = world.last_batch()
    assert {kind for kind, _, _ in found} == {*RecordKind} - {
        RecordKind.TOPICS,
        RecordKind.PATTERN,
    }
    assert all(
        value is None for kind, _, value in found if kind is not RecordKind.CLASSIC
    )
    stored = read_group(found[-1][2])
    assert stored is not None and {member.member_id for member in stored.members} == {
        one,
        other,
    }
    assert not world.group().owed


def test_what_a_member_uses_goes_back_with_it_though_nobody_wants_it_any_more(
    world: World,
) -> None:
    """It wants another topic, and has not joined again: until it has, no other member
    gets its partitions.
    """
    one = joined(world).member_id
    sync(world, one, 1, {one: [0, 1, 2, 3]})
    world.set_topic("u", 1)
    send_join(world, one, metadata(topic="u"))
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    assert world.refused("A", 0, topic_names=["u"]) == "COORDINATOR_NOT_AVAILABLE"
    world.disk_error = None
    found = read_assignment(world.group().members[one].assignment)
    assert found == (("t", 0), ("t", 1), ("t", 2), ("t", 3))


def test_a_crash_before_the_way_back_is_stored_only_delays_it(world: World) -> None:
    one, other = upgraded(world)
    world.holds = True
    world.send("A", -1)
    world.disk()
    world.restart()
    world.holds = False
    assert world.group().consumers is None and set(world.group().members) == {
        one,
        other,
    }
    assert beats(world, one, 2) == "ILLEGAL_GENERATION", "the group was further"


def test_a_group_that_may_not_go_back_stays() -> None:
    world = World(may_upgrade=True)
    one, _ = upgraded(world)
    world.beat("A", -1)
    assert world.group().consumers is not None
    assert beats(world, one, 2) == LATER
    assert joined(world, one).generation == 4


def test_a_group_that_may_not_be_mixed_refuses_as_kafka_does() -> None:
    world = World()
    classic_pair(world)
    assert world.refused("A", 0) == "GROUP_ID_NOT_FOUND"
    world.send("A", 0, group="h")
    assert refused(world, group_id="h") == "INCONSISTENT_GROUP_PROTOCOL"


def indebted(world: World) -> tuple[str, str]:
    """The two, when A has left and the group has gone back, but its old records could
    not be deleted. The disk still fails, and waits for disk().
    """
    pair = upgraded(world)
    world.holds = True
    world.send("A", -1)
    world.disk()
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    world.disk()
    return pair


def test_deleting_a_group_deletes_what_it_owes(world: World) -> None:
    one, other = indebted(world)
    for name in (one, other):
        leaves(world, name)
    while world.stores:
        world.disk()
    world.disk_error = None
    assert world.group().state == "Empty"
    world.act(world.coordinator.delete("g", "waiter"))
    world.disk()
    assert (RecordKind.MEMBER, one, None) in world.last_batch()
    world.holds = False
    world.restart()
    assert world.coordinator.get("g") is None


def test_a_group_that_goes_back_and_up_again_deletes_what_is_left_of_before(
    world: World,
) -> None:
    one, other = indebted(world)
    world.disk_error = None
    world.holds = False
    leaves(world, other)
    world.beat("B", 0)
    assert (RecordKind.MEMBER, other, None) in world.last_batch()
    world.restart()
    assert set(world.consumers().members) == {one, "B"}


def deleted_in_vain(world: World) -> None:
    """Begins to delete the group. The disk waits for disk(), and will fail once."""
    world.holds = True
    world.act(world.coordinator.delete("g", "waiter"))
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE


def disk_works(world: World) -> None:
    world.disk_error = None
    world.holds = False
    while world.stores:
        world.disk()


def test_a_classic_group_that_comes_while_another_is_deleted_in_vain_deletes_what_is_left(
    world: World,
) -> None:
    world.beat("A", 0)
    world.send("A", -1)
    deleted_in_vain(world)
    one = joined(world).member_id
    world.disk()
    disk_works(world)
    sync(world, one, 1, {one: [0]})
    assert (RecordKind.GROUP, "", None) in world.last_batch()
    world.restart()
    assert world.group().consumers is None


def test_a_group_of_consumers_that_comes_while_another_is_deleted_in_vain_deletes_what_is_left(
    world: World,
) -> None:
    one, other = classic_pair(world)
    for name in (one, other):
        leaves(world, name)
    deleted_in_vain(world)
    world.send("A", 0)
    world.disk()
    disk_works(world)
    assert (RecordKind.CLASSIC, "", None) in world.last_batch()
    world.restart()
    assert world.consumers().epoch == 1
