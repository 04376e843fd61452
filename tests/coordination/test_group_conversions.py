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
from support.coordinator_simulation import T0, CoordinatorSimulation, partitions_of

SESSION_MS = 20_000
REBALANCE_MS = 50_000
LATER = "REBALANCE_IN_PROGRESS"


@pytest.fixture
def simulation() -> CoordinatorSimulation:
    return CoordinatorSimulation(may_upgrade=True, may_downgrade=True)


def metadata(*owned: int, topic: str = "t", rack_id: str | None = None) -> bytes:
    return subscription_value(
        Subscription(
            (topic,), None, tuple(("t", number) for number in owned), -1, rack_id
        )
    )


def send_join(
    simulation: CoordinatorSimulation,
    member_id: str = "",
    data: bytes | None = None,
    **more: Any,
) -> int:
    fields: dict[str, Any] = {
        "protocols": (("range", metadata() if data is None else data),),
        "session_timeout_ms": SESSION_MS,
        "rebalance_timeout_ms": REBALANCE_MS,
    }
    return simulation.join(member_id, **{**fields, **more})


def join_ok(
    simulation: CoordinatorSimulation,
    member_id: str = "",
    data: bytes | None = None,
    **more: Any,
) -> Joined:
    result = simulation.replies[send_join(simulation, member_id, data, **more)]
    assert isinstance(result, Joined), result
    return result


def join_error(
    simulation: CoordinatorSimulation,
    member_id: str = "",
    data: bytes | None = None,
    **more: Any,
) -> str:
    result = simulation.replies[send_join(simulation, member_id, data, **more)]
    assert isinstance(result, JoinRefused), result
    return result.error.name


def sync(
    simulation: CoordinatorSimulation,
    member_id: str,
    generation: int,
    shares: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Send a SyncGroup request. Return the partition numbers of topic t, or the name of
    the error.
    """
    assignments = {}
    for name, numbers in (shares or {}).items():
        assignments[name] = assignment_value([("t", number) for number in numbers])
    return sync_result(
        simulation,
        simulation.sync(member_id, generation, assignments=assignments, **more),
    )


def sync_result(simulation: CoordinatorSimulation, waiter: int) -> Any:
    result = simulation.replies.get(waiter)
    if isinstance(result, SyncResult):
        partitions = read_assignment(result.assignment)
        assert partitions is not None
        return sorted(number for _, number in partitions)
    assert isinstance(result, GroupError), result
    return result.name


def heartbeat_error(
    simulation: CoordinatorSimulation,
    member_id: str,
    generation: int,
    instance_id: str | None = None,
) -> str | None:
    error, effects = simulation.coordinator.heartbeat(
        "g", member_id, instance_id, generation, simulation.now_ms
    )
    simulation.act(effects)
    return None if error is None else error.name


def leave_error(
    simulation: CoordinatorSimulation, member_id: str, instance_id: str | None = None
) -> str | None:
    (error,), effects = simulation.coordinator.leave(
        "g", [(member_id, instance_id)], simulation.now_ms
    )
    simulation.act(effects)
    return None if error is None else error.name


def classic_pair(simulation: CoordinatorSimulation) -> tuple[str, str]:
    """Form a group of two members of the classic protocol at generation 2, with two
    partitions each.
    """
    first = join_ok(simulation).member_id
    sync(simulation, first, 1, {first: [0, 1, 2, 3]})
    waiter = send_join(simulation)
    assert heartbeat_error(simulation, first, 1) == LATER
    assert join_ok(simulation, first).generation == 2
    other = simulation.replies[waiter].member_id
    assert sync(simulation, first, 2, {first: [0, 1], other: [2, 3]}) == [0, 1]
    assert sync(simulation, other, 2) == [2, 3]
    return first, other


def upgrade_pair(simulation: CoordinatorSimulation) -> tuple[str, str]:
    """Return the two classic members, after A joined with the consumer protocol. A
    waits for the partitions that they release.
    """
    pair = classic_pair(simulation)
    assert simulation.heartbeat("A", 0) == (3, [])
    return pair


# -- upgrade --------------------------------------------------------------------------


def test_clients_are_replaced_one_by_one_without_shared_partitions(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = upgrade_pair(simulation)
    assert GroupConverted("g", "consumer") in simulation.events
    assert simulation.consumers().currents[first].assigned == partitions_of("t", 0, 1)
    # Both are eager: they release all partitions, and join again.
    assert heartbeat_error(simulation, first, 2) == LATER
    assert join_ok(simulation, first).generation == 3
    assert sync(simulation, first, 3) == [0, 1]
    assert heartbeat_error(simulation, first, 3) is None
    assert heartbeat_error(simulation, other, 2) == LATER
    assert join_ok(simulation, other).generation == 3
    assert sync(simulation, other, 3) == [2]
    assert simulation.heartbeat("A", 3) == (3, [3])
    assert simulation.group().state == "Stable"
    # Now they leave, one after the other, and B joins.
    assert leave_error(simulation, first) is None
    assert simulation.heartbeat("A", 3)[0] == 4
    assert simulation.heartbeat("B", 0)[0] == 5
    assert leave_error(simulation, other) is None
    for _ in range(3):
        for name in ("A", "B"):
            current = simulation.consumers().currents[name]
            simulation.heartbeat(name, current.member_epoch, owned=current.assigned)
    assert simulation.group().state == "Stable"
    assert {
        len(current.assigned) for current in simulation.consumers().currents.values()
    } == {2}


def test_upgrade_is_stored_as_one_batch(simulation: CoordinatorSimulation) -> None:
    first, other = classic_pair(simulation)
    before = len(simulation.batches)
    simulation.heartbeat("A", 0)
    assert len(simulation.batches) == before + 1
    found = simulation.last_batch()
    assert found[0] == (RecordKind.CLASSIC, "", None)
    members = {name: value for kind, name, value in found if kind is RecordKind.MEMBER}
    assert set(members) == {first, other, "A"}
    assert members[first].classic == ClassicMember(SESSION_MS, (("range", metadata()),))
    assert members["A"].classic is None
    assert {name for kind, name, _ in found if kind is RecordKind.CURRENT} == {
        first,
        other,
        "A",
    }
    simulation.restart()
    assert simulation.consumers().is_classic(
        first
    ) and not simulation.consumers().is_classic("A")
    assert heartbeat_error(simulation, first, 2) == LATER


def test_failed_write_of_an_upgrade_undoes_it(
    simulation: CoordinatorSimulation,
) -> None:
    """The group continues with the classic protocol, and its members join again."""
    name, _ = classic_pair(simulation)
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    assert simulation.refused("A", 0) == "COORDINATOR_NOT_AVAILABLE"
    simulation.disk_error = None
    assert simulation.group().consumers is None
    assert simulation.group().state == "PreparingRebalance"
    assert heartbeat_error(simulation, name, 2) == LATER
    simulation.restart()
    assert simulation.group().consumers is None and set(simulation.group().members) >= {
        name
    }


def test_waiting_requests_are_refused_with_rebalance_in_progress(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = classic_pair(simulation)
    joining = send_join(simulation, first, metadata(0, 1, topic="u"))
    assert joining not in simulation.replies
    simulation.heartbeat("A", 0)
    assert simulation.replies[joining] == JoinRefused(
        GroupError.REBALANCE_IN_PROGRESS, first
    )
    assert simulation.group().join_timer is None
    assert sync(simulation, other, 2) == LATER


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
    simulation: CoordinatorSimulation, fields: Any, shares: Any
) -> None:
    """The group has another protocol type, other metadata, or an assignor that
    distributes more than partitions.
    """
    name = join_ok(simulation, **fields).member_id
    assignment = (
        shares
        if isinstance(shares, bytes)
        else assignment_value([("t", number) for number in shares])
    )
    simulation.sync(name, 1, assignments={name: assignment})
    before = len(simulation.batches)
    assert simulation.refused("A", 0) == "GROUP_ID_NOT_FOUND"
    assert len(simulation.batches) == before
    assert simulation.group().consumers is None and simulation.group().state == "Stable"
    assert heartbeat_error(simulation, name, 1) is None


def test_refused_new_member_leaves_the_group_unchanged(
    simulation: CoordinatorSimulation,
) -> None:
    name, _ = classic_pair(simulation)
    state_ms = simulation.group().state_ms
    assert simulation.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert simulation.group().consumers is None
    assert (simulation.group().state, simulation.group().state_ms) == (
        "Stable",
        state_ms,
    )
    assert heartbeat_error(simulation, name, 2) is None


def test_full_group_is_not_upgraded() -> None:
    simulation = CoordinatorSimulation(
        may_upgrade=True, may_downgrade=True, consumer_max_size=1
    )
    classic_pair(simulation)
    assert simulation.refused("A", 0) == "GROUP_ID_NOT_FOUND"


def test_cooperative_member_keeps_partitions_until_it_is_notified(
    simulation: CoordinatorSimulation,
) -> None:
    """The assignment of the member has fewer partitions than the member listed, and the
    member may not have received the assignment.
    """
    first = join_ok(simulation).member_id
    sync(simulation, first, 1, {first: [0, 1, 2, 3]})
    waiter = send_join(simulation)
    join_ok(simulation, first, metadata(0, 1, 2, 3))
    other = simulation.replies[waiter].member_id
    sync(simulation, first, 2, {first: [0, 1], other: []})
    simulation.heartbeat("A", 0)
    assert simulation.consumers().currents[first].assigned == partitions_of(
        "t", 0, 1, 2, 3
    )
    assert simulation.consumers().currents[other].assigned == partitions_of("t")


def test_partition_assigned_twice_gets_one_owner(
    simulation: CoordinatorSimulation,
) -> None:
    first = join_ok(simulation).member_id
    sync(simulation, first, 1, {first: [0]})
    waiter = send_join(simulation)
    join_ok(simulation, first)
    other = simulation.replies[waiter].member_id
    sync(simulation, first, 2, {first: [0, 1], other: [1, 2]})
    simulation.heartbeat("A", 0)
    assert simulation.consumers().currents[first].assigned == partitions_of("t", 0, 1)
    assert simulation.consumers().currents[other].assigned == partitions_of("t", 2)


def test_partitions_of_deleted_topics_have_no_owner(
    simulation: CoordinatorSimulation,
) -> None:
    name, _ = classic_pair(simulation)
    simulation.set_topic("t", 0)
    simulation.heartbeat("A", 0, topic_names=["u"])
    assert simulation.consumers().currents[name].assigned == partitions_of("t")


# -- members of the classic protocol in a consumer group -------------------------------


def test_classic_member_joins_a_consumer_group_with_its_id_first(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0)
    result = simulation.replies[send_join(simulation, requires_member_id=True)]
    assert isinstance(result, JoinRefused) and result.error.name == "MEMBER_ID_REQUIRED"
    assert set(simulation.consumers().members) == {"A"}
    found = join_ok(
        simulation, result.member_id, metadata(rack_id="r"), requires_member_id=True
    )
    assert (found.generation, found.protocol, found.leader, found.members) == (
        2,
        "range",
        "",
        (),
    )
    assert simulation.consumers().members[found.member_id].rack_id == "r"
    assert sync(simulation, found.member_id, 2) == []
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    assert heartbeat_error(simulation, found.member_id, 2) is None
    assert simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1)) == (2, None)
    # The partitions that it waited for are free, so that it must join once more.
    assert heartbeat_error(simulation, found.member_id, 2) == LATER
    assert join_ok(simulation, found.member_id).generation == 2
    assert sync(simulation, found.member_id, 2) == [2, 3]
    assert heartbeat_error(simulation, found.member_id, 2) is None


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
def test_invalid_classic_join_is_refused(
    simulation: CoordinatorSimulation, more: Any, error: str
) -> None:
    """The last case is a removed member that has not been notified and still uses a
    partition.
    """
    upgrade_pair(simulation)
    before = len(simulation.batches)
    assert join_error(simulation, **more) == error
    assert len(simulation.batches) == before


def test_full_consumer_group_refuses_a_classic_member() -> None:
    simulation = CoordinatorSimulation(
        may_upgrade=True, may_downgrade=True, consumer_max_size=1
    )
    simulation.heartbeat("A", 0)
    assert join_error(simulation) == "GROUP_MAX_SIZE_REACHED"


def test_cooperative_member_releases_first_and_joins_again(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0)
    name = join_ok(simulation).member_id
    simulation.heartbeat("A", 1, owned=partitions_of("t"))
    join_ok(simulation, name)
    assert sync(simulation, name, 2) == [2, 3]
    simulation.heartbeat("B", 0)  # B must get one of these partitions
    simulation.heartbeat("B", 3)
    assert heartbeat_error(simulation, name, 2) == LATER
    found = join_ok(simulation, name, metadata(2, 3))
    assert found.generation == 2, (
        "a member keeps its generation until it has released the partition"
    )
    current = simulation.consumers().currents[name]
    assert current.state is MemberState.UNREVOKED
    assert sync(simulation, name, 2) == sorted(number for _, number in current.assigned)
    assert heartbeat_error(simulation, name, 2) == LATER
    (kept,) = current.assigned
    assert join_ok(simulation, name, metadata(kept[1])).generation == 3
    assert simulation.consumers().currents[name].state is MemberState.STABLE


def test_requests_of_a_classic_member_are_checked(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = upgrade_pair(simulation)
    assert sync(simulation, "nobody", 2) == "UNKNOWN_MEMBER_ID"
    assert sync(simulation, "A", 3) == "UNKNOWN_MEMBER_ID"
    assert sync(simulation, first, 1) == "ILLEGAL_GENERATION"
    assert sync(simulation, first, 2) == LATER
    assert heartbeat_error(simulation, first, 3) == "ILLEGAL_GENERATION"
    assert heartbeat_error(simulation, "A", 3) == "UNKNOWN_MEMBER_ID"
    assert heartbeat_error(simulation, first, 2, "i") == "UNKNOWN_MEMBER_ID"
    join_ok(simulation, first)
    assert sync(simulation, first, 3, protocol="other") == "INCONSISTENT_GROUP_PROTOCOL"
    assert (
        sync(simulation, first, 3, protocol_type="connect")
        == "INCONSISTENT_GROUP_PROTOCOL"
    )
    assert sync(simulation, first, 3, protocol="range", protocol_type="consumer") == [
        0,
        1,
    ]
    assert leave_error(simulation, "A") == "UNKNOWN_MEMBER_ID"
    assert leave_error(simulation, other) is None
    assert leave_error(simulation, other) == "UNKNOWN_MEMBER_ID"


def test_consumer_heartbeat_of_a_classic_member_is_refused(
    simulation: CoordinatorSimulation,
) -> None:
    name, _ = upgrade_pair(simulation)
    for epoch in (0, 2, 3, -1):
        assert simulation.refused(name, epoch) == "UNKNOWN_MEMBER_ID"
    assert simulation.consumers().is_classic(name)


@pytest.mark.parametrize(
    ("generation", "error"), [(2, None), (1, GroupError.ILLEGAL_GENERATION)]
)
def test_classic_member_commits_with_its_generation(
    simulation: CoordinatorSimulation, generation: int, error: GroupError | None
) -> None:
    name, _ = upgrade_pair(simulation)
    found, _ = simulation.coordinator.check_commit(
        Committer("g", generation, name, None), simulation.now_ms
    )
    assert found is error


def test_classic_member_has_its_requested_session_timeout(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = upgrade_pair(simulation)
    simulation.sleep(SESSION_MS - 1)
    assert heartbeat_error(simulation, first, 2) == LATER
    simulation.sleep(1)
    assert set(simulation.consumers().members) == {first, "A"}
    assert simulation.now_ms == T0 + SESSION_MS
    assert other not in simulation.consumers().members


def test_classic_member_that_does_not_rejoin_in_time_is_removed(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = upgrade_pair(simulation)
    assert heartbeat_error(simulation, first, 2) == LATER
    for _ in range(REBALANCE_MS // 10_000):
        simulation.heartbeat("A", 3)
        simulation.sleep(10_000)
        heartbeat_error(
            simulation, other, simulation.consumers().current(other).member_epoch
        )
        heartbeat_error(simulation, first, 2)
        if not simulation.consumers().rejoins & {other}:
            continue
        join_ok(simulation, other)
        sync(simulation, other, simulation.consumers().current(other).member_epoch)
    assert first not in simulation.consumers().members
    assert other in simulation.consumers().members


def test_classic_member_that_does_not_sync_in_time_is_removed(
    simulation: CoordinatorSimulation,
) -> None:
    name, _ = upgrade_pair(simulation)
    join_ok(simulation, name)
    for _ in range(REBALANCE_MS // 10_000):
        assert name in simulation.consumers().members
        heartbeat_error(simulation, name, 3)
        simulation.heartbeat("A", simulation.consumers().current("A").member_epoch)
        simulation.sleep(10_000)
    assert name not in simulation.consumers().members


def test_static_member_changes_its_protocol(simulation: CoordinatorSimulation) -> None:
    name = join_ok(simulation, instance_id="i").member_id
    sync(simulation, name, 1, {name: [0, 1, 2, 3]}, instance_id="i")
    assert simulation.heartbeat("A", 0, instance_id="i") == (2, [0, 1, 2, 3]), (
        "classic static members do not announce that they leave"
    )
    assert set(simulation.consumers().members) == {"A"}
    assert not simulation.consumers().is_classic("A")
    assert heartbeat_error(simulation, name, 1, "i") == "FENCED_INSTANCE_ID"
    simulation.heartbeat("B", 0)
    found = join_ok(simulation, instance_id="i")
    assert set(simulation.consumers().members) == {found.member_id, "B"}
    assert simulation.consumers().is_classic(found.member_id)
    assert simulation.refused("A", 2, instance_id="i") == "FENCED_INSTANCE_ID"
    assert join_error(simulation, "other", instance_id="i") == "FENCED_INSTANCE_ID"
    assert leave_error(simulation, "", "i") is None
    assert set(simulation.consumers().members) == {"B"}


# -- downgrade ------------------------------------------------------------------------


def test_group_is_downgraded_after_the_last_consumer_member_leaves(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = upgrade_pair(simulation)
    for name in (first, other):
        join_ok(simulation, name)
        sync(simulation, name, 3)
    simulation.heartbeat("A", 3)
    assert simulation.heartbeat("A", -1) == (-1, None)
    assert GroupConverted("g", "classic") in simulation.events
    group = simulation.group()
    assert group.consumers is None and set(group.members) == {first, other}
    assert (group.state, group.generation) == ("PreparingRebalance", 3)
    assert heartbeat_error(simulation, first, 3) == LATER
    waiter = send_join(simulation, first)
    found = join_ok(simulation, other)
    leader = found.leader
    assert found.generation == simulation.replies[waiter].generation == 4
    shares = {first: [0, 1], other: [2, 3]}
    assert sync(simulation, leader, 4, shares) == shares[leader]
    assert not group.pending_tombstones
    simulation.restart()
    assert simulation.group().consumers is None and simulation.group().generation == 4
    assert heartbeat_error(simulation, first, 4) is None


def test_downgrade_is_one_batch_and_is_retried_until_stored(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = upgrade_pair(simulation)
    simulation.holds_writes = True
    simulation.send("A", -1)
    simulation.finish_write()
    assert simulation.group().consumers is None
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    simulation.finish_write()
    simulation.disk_error = None
    simulation.holds_writes = False
    assert simulation.group().pending_tombstones
    waiter = send_join(simulation, first)
    join_ok(simulation, other)
    leader = simulation.replies[waiter].leader
    assert sync(simulation, leader, 4, {first: [0], other: [1, 2, 3]})
    found = simulation.last_batch()
    assert {kind for kind, _, _ in found} == {*RecordKind} - {
        RecordKind.TOPICS,
        RecordKind.PATTERN,
    }
    assert all(
        value is None for kind, _, value in found if kind is not RecordKind.CLASSIC
    )
    stored = read_group(found[-1][2])
    assert stored is not None and {member.member_id for member in stored.members} == {
        first,
        other,
    }
    assert not simulation.group().pending_tombstones


def test_downgraded_member_keeps_partitions_that_no_member_subscribes_to(
    simulation: CoordinatorSimulation,
) -> None:
    """The member subscribed to another topic, but has not rejoined. Until then, no
    other member gets its partitions.
    """
    name = join_ok(simulation).member_id
    sync(simulation, name, 1, {name: [0, 1, 2, 3]})
    simulation.set_topic("u", 1)
    send_join(simulation, name, metadata(topic="u"))
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    assert simulation.refused("A", 0, topic_names=["u"]) == "COORDINATOR_NOT_AVAILABLE"
    simulation.disk_error = None
    found = read_assignment(simulation.group().members[name].assignment)
    assert found == (("t", 0), ("t", 1), ("t", 2), ("t", 3))


def test_crash_before_the_downgrade_is_stored_only_delays_it(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = upgrade_pair(simulation)
    simulation.holds_writes = True
    simulation.send("A", -1)
    simulation.finish_write()
    simulation.restart()
    simulation.holds_writes = False
    assert simulation.group().consumers is None and set(simulation.group().members) == {
        first,
        other,
    }
    assert heartbeat_error(simulation, first, 2) == "ILLEGAL_GENERATION", (
        "the group has a newer generation"
    )


def test_group_that_may_not_be_downgraded_remains_a_consumer_group() -> None:
    simulation = CoordinatorSimulation(may_upgrade=True)
    name, _ = upgrade_pair(simulation)
    simulation.heartbeat("A", -1)
    assert simulation.group().consumers is not None
    assert heartbeat_error(simulation, name, 2) == LATER
    assert join_ok(simulation, name).generation == 4


def test_group_that_may_not_be_mixed_refuses_like_kafka() -> None:
    simulation = CoordinatorSimulation()
    classic_pair(simulation)
    assert simulation.refused("A", 0) == "GROUP_ID_NOT_FOUND"
    simulation.send("A", 0, group="h")
    assert join_error(simulation, group_id="h") == "INCONSISTENT_GROUP_PROTOCOL"


def downgrade_without_deletion(simulation: CoordinatorSimulation) -> tuple[str, str]:
    """Return the two members after A left and the group was downgraded, but the
    deletion of its old records failed. Writes still fail, and wait for
    finish_write().
    """
    pair = upgrade_pair(simulation)
    simulation.holds_writes = True
    simulation.send("A", -1)
    simulation.finish_write()
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    simulation.finish_write()
    return pair


def test_deleting_a_group_deletes_its_leftover_records(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = downgrade_without_deletion(simulation)
    for name in (first, other):
        leave_error(simulation, name)
    while simulation.stores:
        simulation.finish_write()
    simulation.disk_error = None
    assert simulation.group().state == "Empty"
    simulation.act(simulation.coordinator.delete("g", "waiter"))
    simulation.finish_write()
    assert (RecordKind.MEMBER, first, None) in simulation.last_batch()
    simulation.holds_writes = False
    simulation.restart()
    assert simulation.coordinator.get("g") is None


def test_upgrade_after_a_downgrade_deletes_leftover_records(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = downgrade_without_deletion(simulation)
    simulation.disk_error = None
    simulation.holds_writes = False
    leave_error(simulation, other)
    simulation.heartbeat("B", 0)
    assert (RecordKind.MEMBER, other, None) in simulation.last_batch()
    simulation.restart()
    assert set(simulation.consumers().members) == {first, "B"}


def begin_failing_deletion(simulation: CoordinatorSimulation) -> None:
    """Begin to delete the group. Its write waits for finish_write(), and all writes
    fail until restore_disk() is called.
    """
    simulation.holds_writes = True
    simulation.act(simulation.coordinator.delete("g", "waiter"))
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE


def restore_disk(simulation: CoordinatorSimulation) -> None:
    simulation.disk_error = None
    simulation.holds_writes = False
    while simulation.stores:
        simulation.finish_write()


def test_classic_group_formed_during_a_failed_deletion_deletes_leftovers(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0)
    simulation.send("A", -1)
    begin_failing_deletion(simulation)
    name = join_ok(simulation).member_id
    simulation.finish_write()
    restore_disk(simulation)
    sync(simulation, name, 1, {name: [0]})
    assert (RecordKind.GROUP, "", None) in simulation.last_batch()
    simulation.restart()
    assert simulation.group().consumers is None


def test_consumer_group_formed_during_a_failed_deletion_deletes_leftovers(
    simulation: CoordinatorSimulation,
) -> None:
    first, other = classic_pair(simulation)
    for name in (first, other):
        leave_error(simulation, name)
    begin_failing_deletion(simulation)
    simulation.send("A", 0)
    simulation.finish_write()
    restore_disk(simulation)
    assert (RecordKind.CLASSIC, "", None) in simulation.last_batch()
    simulation.restart()
    assert simulation.consumers().epoch == 1
