"""Groups that convert from the classic protocol to the consumer protocol while they
run, and back: each request and its answer.

There is no broker and no log: time is a number, and writes finish at once unless a test
holds them. Members of the classic protocol are cooperative if they list owned
partitions when they join, and eager otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from logcore.coordination.effects import GroupConverted
from logcore.coordination.group_requests import (
    Committer,
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


def join_ok(
    world: World, member_id: str = "", data: bytes | None = None, **more: Any
) -> Joined:
    result = world.replies[send_join(world, member_id, data, **more)]
    assert isinstance(result, Joined), result
    return result


def join_error(
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
    """Sync, and return the partition numbers of topic t, or the name of the error."""
    assignments = {}
    for name, numbers in (shares or {}).items():
        assignments[name] = assignment_value([("t", number) for number in numbers])
    return sync_result(
        world, world.sync(member_id, generation, assignments=assignments, **more)
    )


def sync_result(world: World, waiter: int) -> Any:
    result = world.replies.get(waiter)
    if isinstance(result, SyncResult):
        partitions = read_assignment(result.assignment)
        assert partitions is not None
        return sorted(number for _, number in partitions)
    assert isinstance(result, GroupError), result
    return result.name


def heartbeat_error(
    world: World, member_id: str, generation: int, instance_id: str | None = None
) -> str | None:
    error, effects = world.coordinator.heartbeat(
        "g", member_id, instance_id, generation, world.now_ms
    )
    world.act(effects)
    return None if error is None else error.name


def leave_error(
    world: World, member_id: str, instance_id: str | None = None
) -> str | None:
    (error,), effects = world.coordinator.leave(
        "g", [(member_id, instance_id)], world.now_ms
    )
    world.act(effects)
    return None if error is None else error.name


def classic_pair(world: World) -> tuple[str, str]:
    """Form a group of two members of the classic protocol at generation 2, with two
    partitions each.
    """
    one = join_ok(world).member_id
    sync(world, one, 1, {one: [0, 1, 2, 3]})
    waiter = send_join(world)
    assert heartbeat_error(world, one, 1) == LATER
    assert join_ok(world, one).generation == 2
    other = world.replies[waiter].member_id
    assert sync(world, one, 2, {one: [0, 1], other: [2, 3]}) == [0, 1]
    assert sync(world, other, 2) == [2, 3]
    return one, other


def upgrade_pair(world: World) -> tuple[str, str]:
    """Return the two classic members, after A joined with the consumer protocol. A
    waits for the partitions that they release.
    """
    pair = classic_pair(world)
    assert world.beat("A", 0) == (3, [])
    return pair


# -- upgrade --------------------------------------------------------------------------


def test_clients_are_replaced_one_by_one_without_shared_partitions(
    world: World,
) -> None:
    one, other = upgrade_pair(world)
    assert GroupConverted("g", "consumer") in world.events
    assert world.consumers().currents[one].assigned == of("t", 0, 1)
    # Both are eager: they release all partitions, and join again.
    assert heartbeat_error(world, one, 2) == LATER
    assert join_ok(world, one).generation == 3
    assert sync(world, one, 3) == [0, 1]
    assert heartbeat_error(world, one, 3) is None
    assert heartbeat_error(world, other, 2) == LATER
    assert join_ok(world, other).generation == 3
    assert sync(world, other, 3) == [2]
    assert world.beat("A", 3) == (3, [3])
    assert world.group().state == "Stable"
    # Now they leave, one after the other, and B joins.
    assert leave_error(world, one) is None
    assert world.beat("A", 3)[0] == 4
    assert world.beat("B", 0)[0] == 5
    assert leave_error(world, other) is None
    for _ in range(3):
        for name in ("A", "B"):
            current = world.consumers().currents[name]
            world.beat(name, current.member_epoch, owned=current.assigned)
    assert world.group().state == "Stable"
    assert {len(one.assigned) for one in world.consumers().currents.values()} == {2}


def test_upgrade_is_stored_as_one_batch(world: World) -> None:
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
    assert heartbeat_error(world, one, 2) == LATER


def test_failed_write_of_an_upgrade_undoes_it(world: World) -> None:
    """The group continues with the classic protocol, and its members join again."""
    one, _ = classic_pair(world)
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    assert world.refused("A", 0) == "COORDINATOR_NOT_AVAILABLE"
    world.disk_error = None
    assert world.group().consumers is None
    assert world.group().state == "PreparingRebalance"
    assert heartbeat_error(world, one, 2) == LATER
    world.restart()
    assert world.group().consumers is None and set(world.group().members) >= {one}


def test_waiting_requests_are_refused_with_rebalance_in_progress(world: World) -> None:
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
def test_group_without_plain_consumers_is_not_upgraded(
    world: World, fields: Any, shares: Any
) -> None:
    """The group has another protocol type, other metadata, or an assignor that
    distributes more than partitions.
    """
    one = join_ok(world, **fields).member_id
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
    assert heartbeat_error(world, one, 1) is None


def test_refused_new_member_leaves_the_group_unchanged(world: World) -> None:
    one, _ = classic_pair(world)
    state_ms = world.group().state_ms
    assert world.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert world.group().consumers is None
    assert (world.group().state, world.group().state_ms) == ("Stable", state_ms)
    assert heartbeat_error(world, one, 2) is None


def test_full_group_is_not_upgraded() -> None:
    world = World(may_upgrade=True, may_downgrade=True, consumer_max_size=1)
    classic_pair(world)
    assert world.refused("A", 0) == "GROUP_ID_NOT_FOUND"


def test_cooperative_member_keeps_partitions_until_it_is_notified(
    world: World,
) -> None:
    """Its assignment has fewer partitions than it listed, and it may not have received
    the assignment.
    """
    one = join_ok(world).member_id
    sync(world, one, 1, {one: [0, 1, 2, 3]})
    waiter = send_join(world)
    join_ok(world, one, metadata(0, 1, 2, 3))
    other = world.replies[waiter].member_id
    sync(world, one, 2, {one: [0, 1], other: []})
    world.beat("A", 0)
    assert world.consumers().currents[one].assigned == of("t", 0, 1, 2, 3)
    assert world.consumers().currents[other].assigned == of("t")


def test_partition_assigned_twice_gets_one_owner(world: World) -> None:
    one = join_ok(world).member_id
    sync(world, one, 1, {one: [0]})
    waiter = send_join(world)
    join_ok(world, one)
    other = world.replies[waiter].member_id
    sync(world, one, 2, {one: [0, 1], other: [1, 2]})
    world.beat("A", 0)
    assert world.consumers().currents[one].assigned == of("t", 0, 1)
    assert world.consumers().currents[other].assigned == of("t", 2)


def test_partitions_of_deleted_topics_have_no_owner(world: World) -> None:
    one, _ = classic_pair(world)
    world.set_topic("t", 0)
    world.beat("A", 0, topic_names=["u"])
    assert world.consumers().currents[one].assigned == of("t")


# -- members of the classic protocol in a consumer group -------------------------------


def test_classic_member_joins_a_consumer_group_with_its_id_first(
    world: World,
) -> None:
    world.beat("A", 0)
    result = world.replies[send_join(world, takes_id_first=True)]
    assert isinstance(result, JoinRefused) and result.error.name == "MEMBER_ID_REQUIRED"
    assert set(world.consumers().members) == {"A"}
    found = join_ok(world, result.member_id, metadata(rack_id="r"), takes_id_first=True)
    assert (found.generation, found.protocol, found.leader, found.members) == (
        2,
        "range",
        "",
        (),
    )
    assert world.consumers().members[found.member_id].rack_id == "r"
    assert sync(world, found.member_id, 2) == []
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    assert heartbeat_error(world, found.member_id, 2) is None
    assert world.beat("A", 1, owned=of("t", 0, 1)) == (2, None)
    # The partitions that it waited for are free, so that it must join once more.
    assert heartbeat_error(world, found.member_id, 2) == LATER
    assert join_ok(world, found.member_id).generation == 2
    assert sync(world, found.member_id, 2) == [2, 3]
    assert heartbeat_error(world, found.member_id, 2) is None


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
def test_invalid_classic_join_is_refused(world: World, more: Any, error: str) -> None:
    """The last case is a removed member that has not been notified and still uses a
    partition.
    """
    upgrade_pair(world)
    before = len(world.batches)
    assert join_error(world, **more) == error
    assert len(world.batches) == before


def test_full_consumer_group_refuses_a_classic_member() -> None:
    world = World(may_upgrade=True, may_downgrade=True, consumer_max_size=1)
    world.beat("A", 0)
    assert join_error(world) == "GROUP_MAX_SIZE_REACHED"


def test_cooperative_member_releases_first_and_joins_again(world: World) -> None:
    world.beat("A", 0)
    one = join_ok(world).member_id
    world.beat("A", 1, owned=of("t"))
    join_ok(world, one)
    assert sync(world, one, 2) == [2, 3]
    world.beat("B", 0)  # B must get one of these partitions
    world.beat("B", 3)
    assert heartbeat_error(world, one, 2) == LATER
    found = join_ok(world, one, metadata(2, 3))
    assert found.generation == 2, (
        "it keeps its generation until it has released the partition"
    )
    current = world.consumers().currents[one]
    assert current.state is MemberState.UNREVOKED
    assert sync(world, one, 2) == sorted(number for _, number in current.assigned)
    assert heartbeat_error(world, one, 2) == LATER
    (kept,) = current.assigned
    assert join_ok(world, one, metadata(kept[1])).generation == 3
    assert world.consumers().currents[one].state is MemberState.STABLE


def test_requests_of_a_classic_member_are_checked(world: World) -> None:
    one, other = upgrade_pair(world)
    assert sync(world, "nobody", 2) == "UNKNOWN_MEMBER_ID"
    assert sync(world, "A", 3) == "UNKNOWN_MEMBER_ID"
    assert sync(world, one, 1) == "ILLEGAL_GENERATION"
    assert sync(world, one, 2) == LATER
    assert heartbeat_error(world, one, 3) == "ILLEGAL_GENERATION"
    assert heartbeat_error(world, "A", 3) == "UNKNOWN_MEMBER_ID"
    assert heartbeat_error(world, one, 2, "i") == "UNKNOWN_MEMBER_ID"
    join_ok(world, one)
    assert sync(world, one, 3, protocol="other") == "INCONSISTENT_GROUP_PROTOCOL"
    assert sync(world, one, 3, protocol_type="connect") == "INCONSISTENT_GROUP_PROTOCOL"
    assert sync(world, one, 3, protocol="range", protocol_type="consumer") == [0, 1]
    assert leave_error(world, "A") == "UNKNOWN_MEMBER_ID"
    assert leave_error(world, other) is None
    assert leave_error(world, other) == "UNKNOWN_MEMBER_ID"


def test_consumer_heartbeat_of_a_classic_member_is_refused(world: World) -> None:
    one, _ = upgrade_pair(world)
    for epoch in (0, 2, 3, -1):
        assert world.refused(one, epoch) == "UNKNOWN_MEMBER_ID"
    assert world.consumers().is_classic(one)


@pytest.mark.parametrize(
    ("generation", "error"), [(2, None), (1, GroupError.ILLEGAL_GENERATION)]
)
def test_classic_member_commits_with_its_generation(
    world: World, generation: int, error: GroupError | None
) -> None:
    one, _ = upgrade_pair(world)
    found, _ = world.coordinator.check_commit(
        Committer("g", generation, one, None), world.now_ms
    )
    assert found is error


def test_classic_member_has_its_requested_session_timeout(world: World) -> None:
    one, other = upgrade_pair(world)
    world.sleep(SESSION_MS - 1)
    assert heartbeat_error(world, one, 2) == LATER
    world.sleep(1)
    assert set(world.consumers().members) == {one, "A"}
    assert world.now_ms == T0 + SESSION_MS
    assert other not in world.consumers().members


def test_classic_member_that_does_not_rejoin_in_time_is_removed(world: World) -> None:
    one, other = upgrade_pair(world)
    assert heartbeat_error(world, one, 2) == LATER
    for _ in range(REBALANCE_MS // 10_000):
        world.beat("A", 3)
        world.sleep(10_000)
        heartbeat_error(world, other, world.consumers().current(other).member_epoch)
        heartbeat_error(world, one, 2)
        if not world.consumers().rejoins & {other}:
            continue
        join_ok(world, other)
        sync(world, other, world.consumers().current(other).member_epoch)
    assert one not in world.consumers().members
    assert other in world.consumers().members


def test_classic_member_that_does_not_sync_in_time_is_removed(world: World) -> None:
    one, _ = upgrade_pair(world)
    join_ok(world, one)
    for _ in range(REBALANCE_MS // 10_000):
        assert one in world.consumers().members
        heartbeat_error(world, one, 3)
        world.beat("A", world.consumers().current("A").member_epoch)
        world.sleep(10_000)
    assert one not in world.consumers().members


def test_static_member_changes_its_protocol(world: World) -> None:
    one = join_ok(world, instance_id="i").member_id
    sync(world, one, 1, {one: [0, 1, 2, 3]}, instance_id="i")
    assert world.beat("A", 0, instance_id="i") == (2, [0, 1, 2, 3]), (
        "classic static members do not announce that they leave"
    )
    assert set(world.consumers().members) == {"A"}
    assert not world.consumers().is_classic("A")
    assert heartbeat_error(world, one, 1, "i") == "FENCED_INSTANCE_ID"
    world.beat("B", 0)
    found = join_ok(world, instance_id="i")
    assert set(world.consumers().members) == {found.member_id, "B"}
    assert world.consumers().is_classic(found.member_id)
    assert world.refused("A", 2, instance_id="i") == "FENCED_INSTANCE_ID"
    assert join_error(world, "other", instance_id="i") == "FENCED_INSTANCE_ID"
    assert leave_error(world, "", "i") is None
    assert set(world.consumers().members) == {"B"}


# -- downgrade ------------------------------------------------------------------------


def test_group_is_downgraded_after_the_last_consumer_member_leaves(
    world: World,
) -> None:
    one, other = upgrade_pair(world)
    for name in (one, other):
        join_ok(world, name)
        sync(world, name, 3)
    world.beat("A", 3)
    assert world.beat("A", -1) == (-1, None)
    assert GroupConverted("g", "classic") in world.events
    group = world.group()
    assert group.consumers is None and set(group.members) == {one, other}
    assert (group.state, group.generation) == ("PreparingRebalance", 3)
    assert heartbeat_error(world, one, 3) == LATER
    waiter = send_join(world, one)
    found = join_ok(world, other)
    leader = found.leader
    assert found.generation == world.replies[waiter].generation == 4
    shares = {one: [0, 1], other: [2, 3]}
    assert sync(world, leader, 4, shares) == shares[leader]
    assert not group.owed
    world.restart()
    assert world.group().consumers is None and world.group().generation == 4
    assert heartbeat_error(world, one, 4) is None


def test_downgrade_is_one_batch_and_is_retried_until_stored(
    world: World,
) -> None:
    one, other = upgrade_pair(world)
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
    join_ok(world, other)
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


def test_downgraded_member_keeps_partitions_that_no_member_subscribes_to(
    world: World,
) -> None:
    """The member subscribed to another topic, but has not rejoined. Until then, no
    other member gets its partitions.
    """
    one = join_ok(world).member_id
    sync(world, one, 1, {one: [0, 1, 2, 3]})
    world.set_topic("u", 1)
    send_join(world, one, metadata(topic="u"))
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    assert world.refused("A", 0, topic_names=["u"]) == "COORDINATOR_NOT_AVAILABLE"
    world.disk_error = None
    found = read_assignment(world.group().members[one].assignment)
    assert found == (("t", 0), ("t", 1), ("t", 2), ("t", 3))


def test_crash_before_the_downgrade_is_stored_only_delays_it(world: World) -> None:
    one, other = upgrade_pair(world)
    world.holds = True
    world.send("A", -1)
    world.disk()
    world.restart()
    world.holds = False
    assert world.group().consumers is None and set(world.group().members) == {
        one,
        other,
    }
    assert heartbeat_error(world, one, 2) == "ILLEGAL_GENERATION", (
        "the group has a newer generation"
    )


def test_group_that_may_not_be_downgraded_stays_a_consumer_group() -> None:
    world = World(may_upgrade=True)
    one, _ = upgrade_pair(world)
    world.beat("A", -1)
    assert world.group().consumers is not None
    assert heartbeat_error(world, one, 2) == LATER
    assert join_ok(world, one).generation == 4


def test_group_that_may_not_be_mixed_refuses_like_kafka() -> None:
    world = World()
    classic_pair(world)
    assert world.refused("A", 0) == "GROUP_ID_NOT_FOUND"
    world.send("A", 0, group="h")
    assert join_error(world, group_id="h") == "INCONSISTENT_GROUP_PROTOCOL"


def downgrade_without_deletion(world: World) -> tuple[str, str]:
    """Return the two members after A left and the group was downgraded, but the
    deletion of its old records failed. The disk still fails, and writes wait for
    disk().
    """
    pair = upgrade_pair(world)
    world.holds = True
    world.send("A", -1)
    world.disk()
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    world.disk()
    return pair


def test_deleting_a_group_deletes_its_leftover_records(world: World) -> None:
    one, other = downgrade_without_deletion(world)
    for name in (one, other):
        leave_error(world, name)
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


def test_upgrade_after_a_downgrade_deletes_leftover_records(
    world: World,
) -> None:
    one, other = downgrade_without_deletion(world)
    world.disk_error = None
    world.holds = False
    leave_error(world, other)
    world.beat("B", 0)
    assert (RecordKind.MEMBER, other, None) in world.last_batch()
    world.restart()
    assert set(world.consumers().members) == {one, "B"}


def begin_failing_deletion(world: World) -> None:
    """Begin to delete the group. The write waits for disk(), and will fail once."""
    world.holds = True
    world.act(world.coordinator.delete("g", "waiter"))
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE


def restore_disk(world: World) -> None:
    world.disk_error = None
    world.holds = False
    while world.stores:
        world.disk()


def test_classic_group_formed_during_a_failed_deletion_deletes_leftovers(
    world: World,
) -> None:
    world.beat("A", 0)
    world.send("A", -1)
    begin_failing_deletion(world)
    one = join_ok(world).member_id
    world.disk()
    restore_disk(world)
    sync(world, one, 1, {one: [0]})
    assert (RecordKind.GROUP, "", None) in world.last_batch()
    world.restart()
    assert world.group().consumers is None


def test_consumer_group_formed_during_a_failed_deletion_deletes_leftovers(
    world: World,
) -> None:
    one, other = classic_pair(world)
    for name in (one, other):
        leave_error(world, name)
    begin_failing_deletion(world)
    world.send("A", 0)
    world.disk()
    restore_disk(world)
    assert (RecordKind.CLASSIC, "", None) in world.last_batch()
    world.restart()
    assert world.consumers().epoch == 1
