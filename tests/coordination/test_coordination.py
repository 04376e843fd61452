"""Tests of logcore.coordination alone: no broker, no log, a number as clock and a list
as disk.

Goal: every transition returns the right effects, and the invariants of World hold in
any order of requests, timeouts and syncs. Method: World executes the effects. An
AppendRecords effect waits there until the test finishes or fails the write, so that
requests, timeouts and syncs interleave as the test, or hypothesis, chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logcore.coordination import classic_transitions
from logcore.coordination.classic_group import (
    COMPLETING,
    DEAD,
    EMPTY,
    PREPARING,
    STABLE,
    Group,
)
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.effects import (
    AppendRecords,
    Assigned,
    CancelTimer,
    Effect,
    GroupFormed,
    Reply,
    SetTimer,
)
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    Join,
    Joined,
    JoinEnds,
    JoinRefused,
    PendingEnds,
    Rules,
    SessionEnds,
    Sync,
    SyncEnds,
    SyncResult,
    Timeout,
)
from logcore.coordinators.stored_offsets import StoredGroups
from logcore.deadlines import Deadlines
from logcore.format.group_records import (
    Committed,
    commit_key,
    commit_value,
    group_key,
    read_group,
)

T0 = 1_700_000_000_000
SESSION_MS = 10_000
REBALANCE_MS = 20_000
DAY_MS = 24 * 3_600_000
#: After this time every session, rebalance and delay that has begun is over.
LONG_MS = 3 * 300_000
PARTITIONS = range(6)


class CoordinatorSimulation:
    """A coordinator with its clock, its disk and its waiting requests. These invariants
    are checked after every step:

        one answer        no request is answered twice
        stored first      an assignment is returned, and a commit is visible, only after its record is on disk
        one owner         in one generation no partition is assigned to two members
        a timer each      each member that may be silent has a session timer; a phase that waits for
                          others has its timer; no other timer exists
        a group's shape   leader, static ids, unsynced members and waiters fit the members and the state
        no way back       a generation never decreases
    """

    def __init__(self, *, delay_ms: int = 0) -> None:
        self.now_ms = T0
        self.rules = Rules(
            min_session_timeout_ms=1,
            max_session_timeout_ms=1_800_000,
            rebalance_delay_ms=delay_ms,
        )
        self.durable: dict[bytes, bytes | None] = {}
        # Positions in the log of the records in `durable`.
        self.places: dict[bytes, int] = {}
        # Appends in the transaction of producer 7, with their positions.
        self.open: list[tuple[int, AppendRecords]] = []
        self.written = 0
        self.waiters = 0
        self.ids = 0
        self.start()

    def start(self) -> None:
        self.coordinator = Coordinator(self.rules, self.new_id)
        self.timers: Deadlines[tuple[str, Timeout]] = Deadlines()
        self.set: set[tuple[str, Timeout]] = set()
        self.stores: list[AppendRecords] = []
        # waiter -> the member id of the request, or "" if it has none
        self.asked: dict[int, str] = {}
        self.replies: dict[int, Any] = {}
        self.owners: dict[tuple[int, int], str] = {}  # generation, partition -> owner
        self.generations: dict[Group, int] = {}

    def restart(self) -> None:
        """End the process, and start another process with the records on disk."""
        self.start()
        found = StoredGroups()
        found.add_records(self.durable)
        self.act(self.coordinator.load(found.groups, found.offsets, self.now_ms))

    def new_id(self) -> str:
        self.ids += 1
        return f"{self.ids:03}"

    def waiter(self, member_id: str = "") -> int:
        self.waiters += 1
        self.asked[self.waiters] = member_id
        return self.waiters

    # -- effects

    def act(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(waiter, result):
                    assert waiter not in self.replies, "one answer"
                    self.replies[waiter] = result  # type: ignore[index]
                    if isinstance(result, SyncResult):
                        self.check_synced(self.asked[waiter], result)  # type: ignore[index]
                case AppendRecords():
                    self.stores.append(effect)
                case SetTimer(group_id, timeout, at_ms):
                    self.timers.at(at_ms, (group_id, timeout))
                    self.set.add((group_id, timeout))
                case CancelTimer(group_id, timeout):
                    assert (group_id, timeout) in self.set, (
                        "only a timer that is set is cancelled"
                    )
                    self.timers.cancel((group_id, timeout))
                    self.set.remove((group_id, timeout))
        self.check()

    def disk(self, error: GroupError | None = None) -> None:
        """Finish the first pending write: its record is now on disk, or the write
        failed.
        """
        if not self.stores:
            return
        effect = self.stores.pop(0)
        if error is None:
            self.write(effect)
        self.act(self.coordinator.stored(effect, error, self.now_ms))

    def write(self, effect: AppendRecords) -> None:
        self.written += 1
        if effect.producer is None:
            self.apply(self.written, effect)
        else:
            self.open.append((self.written, effect))

    def apply(self, place: int, effect: AppendRecords) -> None:
        """Apply records at their own position, not at the position of the transaction
        marker.
        """
        for key, value in effect.records:
            if self.places.get(key, 0) < place:
                self.places[key] = place
                self.durable[key] = value

    def commit_transaction(self) -> None:
        """Write the commit marker of producer 7."""
        for place, effect in self.open:
            self.apply(place, effect)
        self.open = []
        self.coordinator.transaction_ended(7, commit=True)
        self.check()

    def settle(self) -> None:
        while self.stores:
            self.disk()

    def sleep(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        while True:
            next_ms = self.timers.next_ms
            if next_ms is None or next_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, next_ms)
            for group_id, timeout in self.timers.due(self.now_ms):
                self.set.remove((group_id, timeout))
                self.act(self.coordinator.timed_out(group_id, timeout, self.now_ms))
        self.now_ms = end_ms

    # -- requests

    def join(
        self, member_id: str = "", *, instance: str | None = None, **more: Any
    ) -> int:
        request: dict[str, Any] = {
            "group_id": "g",
            "member_id": member_id,
            "instance_id": instance,
            "client_id": "cli",
            "client_host": "/h",
            "protocol_type": "consumer",
            "protocols": (("range", b"x"),),
            "session_timeout_ms": SESSION_MS,
            "rebalance_timeout_ms": REBALANCE_MS,
            "requires_member_id": False,
            "may_skip_assignment": True,
            **more,
        }
        waiter = self.waiter(member_id)
        self.act(self.coordinator.join(Join(**request), waiter, self.now_ms))
        return waiter

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: dict[str, bytes] | None = None,
        instance: str | None = None,
    ) -> int:
        request = Sync(
            group_id="g",
            member_id=member_id,
            instance_id=instance,
            generation=generation,
            assignments=assignments or {},
        )
        waiter = self.waiter(member_id)
        self.act(self.coordinator.sync(request, waiter, self.now_ms))
        return waiter

    def heartbeat(
        self, member_id: str, generation: int, instance: str | None = None
    ) -> GroupError | None:
        error, effects = self.coordinator.heartbeat(
            "g", member_id, instance, generation, self.now_ms
        )
        self.act(effects)
        return error

    def leave(self, member_id: str, instance: str | None = None) -> GroupError | None:
        (error,), effects = self.coordinator.leave(
            "g", [(member_id, instance)], self.now_ms
        )
        self.act(effects)
        return error

    def commit(
        self, offset: int, member_id: str = "", generation: int = -1
    ) -> GroupError | int | None:
        """Return the waiter of a commit, or the error if it was refused."""
        error, effects = self.coordinator.check_commit(
            Committer("g", generation, member_id, None), self.now_ms
        )
        self.act(effects)
        if error is not None:
            return error
        waiter = self.waiter(member_id)
        committed = Committed(offset, -1, "", self.now_ms)
        self.act(self.coordinator.commit("g", {("orders", 0): committed}, waiter))
        return waiter

    def commit_many(self, count: int) -> None:
        """Commit an offset for each of `count` partitions of the topic `many`."""
        offsets = {
            ("many", number): Committed(1, -1, "", self.now_ms)
            for number in range(count)
        }
        self.act(self.coordinator.commit("g", offsets, self.waiter()))
        self.settle()

    def commit_in_transaction(self, offset: int, partition: int = 0) -> int:
        """Return the waiter of a commit in the transaction of producer 7."""
        waiter = self.waiter()
        committed = Committed(offset, -1, "", self.now_ms)
        keys = {("orders", partition): committed}
        self.act(self.coordinator.commit_in_transaction("g", (7, 0), keys, waiter))
        return waiter

    def form(self, count: int = 1) -> tuple[list[str], int]:
        """Form a Stable group of `count` members, the first of them its leader. Return
        (ids, generation).
        """
        ids: list[str] = []
        while len(ids) < count:
            newcomer = self.join()
            others = [self.join(member_id) for member_id in ids]
            ids.append(self.replies[newcomer].member_id)
            assert all(isinstance(self.replies[other], Joined) for other in others)
        generation = self.group.generation
        waiters = [
            self.sync(member_id, generation, dict.fromkeys(ids, b""))
            for member_id in reversed(ids)
        ]
        self.settle()
        assert all(isinstance(self.replies[waiter], SyncResult) for waiter in waiters)
        return ids, generation

    @property
    def group(self) -> Group:
        group = self.coordinator.get("g")
        assert group is not None
        return group

    # -- invariants

    def check_synced(self, member_id: str, synced: SyncResult) -> None:
        group = self.group
        stored = read_group(self.durable[group_key("g")] or b"")
        assert stored is not None and stored.generation == group.generation, (
            "stored first"
        )
        assigned = {member.member_id: member.assignment for member in stored.members}
        # A static member that returned has the assignment of its former id until its
        # record is stored, too.
        assert synced.assignment in assigned.values(), "stored first"
        owner = group.members[member_id].instance_id or member_id
        for partition in synced.assignment:
            assert (
                self.owners.setdefault((group.generation, partition), owner) == owner
            ), "one owner"

    def check(self) -> None:
        for group in self.coordinator.all():
            self.check_shape(group)
            self.check_timers(group)
            for topic, partitions in group.offsets.items():
                for partition, committed in partitions.items():
                    stored = self.durable.get(
                        commit_key(group.group_id, topic, partition)
                    )
                    assert stored == commit_value(committed), "stored first"
            assert self.generations.get(group, 0) <= group.generation, "no way back"
            self.generations[group] = group.generation
        known = {group.group_id for group in self.coordinator.all()}
        assert all(group_id in known for group_id, _ in self.set), (
            "a timer each: none for a deleted group"
        )
        assert len(self.timers) == len(self.set)

    def check_shape(self, group: Group) -> None:
        members = group.members
        assert group.state != DEAD, "no request finds a dead group"
        assert (group.leader is None) == (not members) and (
            group.leader is None or group.leader in members
        )
        assert set(group.static.values()) == {
            m.member_id for m in members.values() if m.instance_id is not None
        }
        assert group.unsynced <= set(members)
        for member_id, member in members.items():
            assert member.member_id == member_id
            assert member.syncing is None or group.state == COMPLETING
            assert member.joining is None or group.state in (PREPARING, STABLE)
            for waiter in (member.joining, member.syncing):
                assert waiter not in self.replies, "an answered request does not wait"
        if group.state == EMPTY:
            assert not members
        if group.state in (COMPLETING, STABLE):
            assert group.protocol in group.common_protocols() and group.generation > 0

    def check_timers(self, group: Group) -> None:
        expected: set[Timeout] = {PendingEnds(member_id) for member_id in group.pending}
        for member in group.members.values():
            if member.timer_ms is not None:
                expected.add(SessionEnds(member.member_id))
            else:
                assert member.is_waiting and not member.is_new, (
                    "a timer each: for each member that may be silent"
                )
        if group.join_timer is not None:
            expected.add(group.join_timer)
        if group.sync_timer is not None:
            expected.add(group.sync_timer)
        assert (group.join_timer is not None) == (group.state == PREPARING), (
            "a timer each: for a rebalance"
        )
        if group.state == COMPLETING and group.unsynced:
            assert group.sync_timer is not None, "a timer each: for a generation"
        timeouts = {timeout for each, timeout in self.set if each == group.group_id}
        assert timeouts == expected, "a timer each"


# -- transitions, one by one -----------------------------------------------------------


def effects_of(kind: type, effects: Iterable[Effect]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_group_is_stable_once_the_assignment_is_stored() -> None:
    simulation = CoordinatorSimulation()
    waiter = simulation.join()
    joined = simulation.replies[waiter]
    assert (
        isinstance(joined, Joined)
        and joined.leader == joined.member_id
        and len(joined.members) == 1
    )
    assert simulation.group.state == COMPLETING
    syncing = simulation.sync(joined.member_id, 1, {joined.member_id: b"\1"})
    (store,) = simulation.stores
    assert store.then == Assigned(1, {joined.member_id: b"\1"})
    assert syncing not in simulation.replies and simulation.group.state == COMPLETING
    simulation.disk()
    assert simulation.group.state == STABLE
    assert simulation.replies[syncing] == SyncResult(
        protocol_type="consumer", protocol="range", assignment=b"\1"
    )


def test_forming_a_group_emits_an_event() -> None:
    simulation = CoordinatorSimulation()
    member_id = simulation.replies[simulation.join()].member_id
    simulation.sync(member_id, 1, {member_id: b""})
    (formed,) = effects_of(
        GroupFormed,
        simulation.coordinator.stored(simulation.stores[0], None, simulation.now_ms),
    )
    assert formed == GroupFormed(
        group_id="g", generation=1, member_count=1, protocol="range"
    )


def test_transition_depends_only_on_its_group() -> None:
    """The same calls on two equal groups give equal effects."""

    def run(group: Group) -> list[str]:
        rules = Rules(min_session_timeout_ms=1, max_session_timeout_ms=9_000_000)
        request = Join(
            group_id="g",
            member_id="",
            instance_id=None,
            client_id="c",
            client_host="/h",
            protocol_type="consumer",
            protocols=(("range", b""),),
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=-1,
            requires_member_id=False,
            may_skip_assignment=False,
        )
        effects = classic_transitions.join(
            group, request, "w", T0, rules=rules, new_id=lambda: "1"
        )
        effects += classic_transitions.heartbeat(
            group, "c-1", None, 1, T0 + 1, rules=rules
        )[1]
        effects += classic_transitions.timed_out(
            group, SyncEnds(1), T0 + SESSION_MS, rules=rules
        )
        return [repr(effect) for effect in effects]

    assert run(Group("g")) == run(Group("g"))


def test_new_member_gets_its_id_first_and_expires_without_a_join() -> None:
    simulation = CoordinatorSimulation()
    refused = simulation.replies[simulation.join(requires_member_id=True)]
    assert refused == JoinRefused(GroupError.MEMBER_ID_REQUIRED, "cli-001")
    assert simulation.group.pending == {"cli-001"}
    simulation.sleep(SESSION_MS)
    assert simulation.coordinator.all() == [] and not simulation.set


def test_heartbeats_set_no_timer_and_extend_the_session() -> None:
    simulation = CoordinatorSimulation()
    (member_id,), generation = simulation.form()
    for _ in range(5):
        simulation.sleep(SESSION_MS - 1)
        error, effects = simulation.coordinator.heartbeat(
            "g", member_id, None, generation, simulation.now_ms
        )
        assert error is None
        assert effects == []
    simulation.sleep(SESSION_MS)
    assert simulation.group.state == EMPTY


def test_second_join_of_a_member_ends_the_first() -> None:
    simulation = CoordinatorSimulation()
    (first, second), generation = simulation.form(2)
    simulation.join()
    waiting = simulation.join(second)
    assert simulation.group.state == PREPARING
    again = simulation.join(second)
    assert simulation.replies[waiting] == JoinRefused(
        GroupError.REBALANCE_IN_PROGRESS, second
    )
    simulation.join(first)
    assert simulation.replies[again].generation == generation + 1


def test_failed_write_of_an_assignment_begins_a_rebalance() -> None:
    simulation = CoordinatorSimulation()
    member_id = simulation.replies[simulation.join()].member_id
    syncing = simulation.sync(member_id, 1, {member_id: b"\1"})
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    assert simulation.replies[syncing] is GroupError.COORDINATOR_NOT_AVAILABLE
    assert (
        simulation.group.state == PREPARING
        and simulation.group.join_timer == JoinEnds()
    )


def test_returning_static_member_is_answered_after_the_write() -> None:
    simulation = CoordinatorSimulation()
    member_id = simulation.replies[simulation.join(instance="s")].member_id
    simulation.sync(member_id, 1, {member_id: b"\1"}, instance="s")
    simulation.settle()
    back = simulation.join(instance="s")
    assert back not in simulation.replies
    simulation.disk()
    assert (
        simulation.replies[back].generation == 1
        and simulation.replies[back].skip_assignment
    )
    assert simulation.heartbeat(member_id, 1, "s") is GroupError.FENCED_INSTANCE_ID
    failing = simulation.join(instance="s")
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    assert simulation.replies[failing].error is GroupError.COORDINATOR_NOT_AVAILABLE
    assert simulation.heartbeat(simulation.replies[back].member_id, 1, "s") is None


def test_absent_member_keeps_its_partitions_for_its_absence_time() -> None:
    simulation = CoordinatorSimulation()
    member_id = simulation.replies[
        simulation.join(instance="s", absence_ms=2_000)
    ].member_id
    simulation.sync(member_id, 1, {member_id: b"\1"}, instance="s")
    simulation.settle()

    def become_absent() -> None:
        simulation.act(
            simulation.coordinator.absent("g", [member_id, "nobody"], simulation.now_ms)
        )

    become_absent()
    simulation.sleep(1_500)
    become_absent()  # a second call does not restart the time
    assert simulation.heartbeat(member_id, 1, "s") is None
    simulation.sleep(SESSION_MS - 1)
    assert member_id in simulation.group.members, "its heartbeat ended the absence"
    become_absent()
    simulation.sleep(1_500)
    become_absent()
    simulation.sleep(499)
    assert member_id in simulation.group.members
    simulation.sleep(1)
    assert member_id not in simulation.group.members


@pytest.mark.parametrize("answer", ["rebalance", "stored", "failed"])
def test_answer_to_an_absent_member_does_not_end_its_absence(answer: str) -> None:
    """The process of the member died while the member waited for its assignment."""
    simulation = CoordinatorSimulation()
    leader = simulation.replies[simulation.join()].member_id
    away = simulation.join(instance="s", absence_ms=2_000)
    simulation.join(leader)
    member_id = simulation.replies[away].member_id
    generation = simulation.group.generation
    simulation.sync(member_id, generation, instance="s")
    simulation.act(simulation.coordinator.absent("g", [member_id], simulation.now_ms))
    simulation.sleep(1_000)
    if answer == "rebalance":
        simulation.join()
    else:
        simulation.sync(leader, generation, {leader: b"\1", member_id: b"\2"})
        simulation.disk(
            GroupError.COORDINATOR_NOT_AVAILABLE if answer == "failed" else None
        )
    assert simulation.group.members[member_id].is_absent
    simulation.sleep(1_000)
    assert member_id not in simulation.group.members


def test_absent_member_remains_absent_after_a_failed_replacement() -> None:
    simulation = CoordinatorSimulation()
    member_id = simulation.replies[
        simulation.join(instance="s", absence_ms=2_000)
    ].member_id
    simulation.sync(member_id, 1, {member_id: b"\1"}, instance="s")
    simulation.settle()
    simulation.act(simulation.coordinator.absent("g", [member_id], simulation.now_ms))
    simulation.join(instance="s", absence_ms=2_000)
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    assert simulation.group.members[member_id].is_absent
    simulation.sleep(2_000)
    assert member_id not in simulation.group.members


def test_withdrawn_join_removes_dynamic_but_not_static_members() -> None:
    simulation = CoordinatorSimulation()
    (first,), _ = simulation.form()
    newcomer = simulation.join()
    simulation.act(simulation.coordinator.withdraw("g", newcomer, simulation.now_ms))
    assert simulation.replies[newcomer].error is GroupError.UNKNOWN_MEMBER_ID
    assert list(simulation.group.members) == [first]
    static = simulation.join(instance="s", absence_ms=2_000)
    simulation.join(first)
    simulation.settle()
    member_id = simulation.replies[static].member_id
    simulation.join()  # a rebalance begins
    back = simulation.join(instance="s", absence_ms=2_000)
    simulation.act(simulation.coordinator.withdraw("g", back, simulation.now_ms))
    assert simulation.replies[back].error is GroupError.UNKNOWN_MEMBER_ID
    assert member_id not in simulation.group.members
    member_id = simulation.group.static["s"]
    simulation.sleep(1_999)
    assert member_id in simulation.group.members
    simulation.sleep(1)
    assert member_id not in simulation.group.members
    simulation.act(simulation.coordinator.withdraw("g", back, simulation.now_ms))
    simulation.act(simulation.coordinator.withdraw("nothing", back, simulation.now_ms))


def test_member_without_absence_time_is_never_absent() -> None:
    simulation = CoordinatorSimulation()
    member_id = simulation.replies[simulation.join(instance="s")].member_id
    simulation.settle()
    before = simulation.group.members[member_id].deadline_ms
    simulation.act(simulation.coordinator.absent("g", [member_id], simulation.now_ms))
    assert simulation.group.members[member_id].deadline_ms == before


def test_commits_are_visible_once_stored_and_survive_a_restart() -> None:
    simulation = CoordinatorSimulation()
    waiter = simulation.commit(5)
    assert isinstance(waiter, int) and waiter not in simulation.replies
    assert simulation.group.offsets == {} and simulation.group.has_offset("orders", 0)
    simulation.disk()
    assert simulation.replies[waiter] is None
    assert simulation.group.offsets["orders"][0].offset == 5
    simulation.restart()
    assert simulation.group.offsets["orders"][0].offset == 5


def test_failed_first_commit_leaves_no_group() -> None:
    simulation = CoordinatorSimulation()
    waiter = simulation.commit(5)
    simulation.disk(GroupError.RECORD_TOO_LARGE)
    assert simulation.replies[waiter] is GroupError.RECORD_TOO_LARGE
    assert simulation.coordinator.get("g") is None


def test_group_and_offsets_expire_a_week_after_the_group_is_empty() -> None:
    simulation = CoordinatorSimulation()
    (member_id,), generation = simulation.form()
    simulation.commit(5, member_id, generation)
    simulation.settle()
    simulation.leave(member_id)
    simulation.settle()
    simulation.sleep(7 * DAY_MS - 1)
    simulation.act(simulation.coordinator.expire_offsets(simulation.now_ms))
    assert simulation.group.offsets
    simulation.sleep(1)
    simulation.act(simulation.coordinator.expire_offsets(simulation.now_ms))
    simulation.settle()
    assert simulation.coordinator.all() == []
    assert set(simulation.durable.values()) == {None}


@pytest.mark.parametrize("in_transaction", [False, True])
def test_offset_with_a_pending_commit_does_not_expire(
    in_transaction: bool,
) -> None:
    simulation = CoordinatorSimulation()
    simulation.commit(1)
    simulation.settle()
    simulation.now_ms += 7 * DAY_MS
    if in_transaction:
        simulation.commit_in_transaction(77)
        simulation.settle()
    else:
        simulation.commit(77)
    simulation.act(simulation.coordinator.expire_offsets(simulation.now_ms))
    simulation.settle()
    simulation.commit_transaction()
    assert simulation.group.offsets["orders"][0].offset == 77
    assert None not in simulation.durable.values()


def test_offset_deletion_affects_only_earlier_commits() -> None:
    simulation = CoordinatorSimulation()
    simulation.commit(1)
    simulation.commit_in_transaction(2, partition=1)
    simulation.settle()
    keys = [("orders", 0), ("orders", 1)]
    simulation.act(
        simulation.coordinator.delete_offsets(
            simulation.group.group_id, keys, simulation.waiter()
        )
    )
    simulation.commit_in_transaction(77)
    simulation.settle()
    simulation.commit_transaction()
    for _ in range(2):
        assert {
            number: each.offset
            for number, each in simulation.group.offsets["orders"].items()
        } == {0: 77}
        simulation.restart()


def test_offset_deletion_does_not_affect_a_commit_reported_first() -> None:
    simulation = CoordinatorSimulation()
    simulation.commit(1)
    simulation.settle()
    simulation.act(
        simulation.coordinator.delete_offsets(
            simulation.group.group_id, [("orders", 0)], simulation.waiter()
        )
    )
    simulation.commit_in_transaction(77)
    deletion, commit = simulation.stores
    simulation.stores.clear()
    simulation.write(deletion)
    simulation.write(commit)
    simulation.commit_transaction()
    for effect in (deletion, commit):
        simulation.act(simulation.coordinator.stored(effect, None, simulation.now_ms))
    for _ in range(2):
        assert simulation.group.offsets["orders"][0].offset == 77
        simulation.restart()


def test_offsets_of_a_deleted_topic_are_neither_visible_nor_kept() -> None:
    simulation = CoordinatorSimulation()
    simulation.commit(1)
    simulation.settle()
    simulation.commit(2)
    simulation.commit_in_transaction(3, partition=1)
    group = simulation.group
    simulation.act(simulation.coordinator.forget_topics({"orders"}))
    while simulation.stores:
        assert group.offsets == {}
        simulation.disk()
    assert group.applied == {} and not group.is_pending(("orders", 0))


def test_offset_of_the_current_topic_outlives_one_of_the_former() -> None:
    """A transaction began before the topic was deleted, or another one afterwards."""
    simulation = CoordinatorSimulation()
    former, current = (
        Committed(1, -1, "", T0, topic_id=bytes(15) + number) for number in (b"f", b"c")
    )
    committed = {"orders": {0: current, 1: former, 2: former}}
    pending = {("orders", 0): (-3, former), ("orders", 1): (-2, current)}
    simulation.coordinator.take({}, {"g": committed}, {"g": {7: pending}}, {})
    (effect,) = simulation.coordinator.forget_former_topics(
        {("orders", former.topic_id)}
    )
    group = simulation.group
    assert group.offsets == {"orders": {0: current}}
    assert group.unstable == {7: {("orders", 1): (-2, current)}}
    # Only the key without a current offset gets a tombstone.
    assert isinstance(effect, AppendRecords)
    assert effect.records == ((commit_key("g", "orders", 2), None),)


def _forget_topic(simulation: CoordinatorSimulation) -> None:
    simulation.act(simulation.coordinator.forget_topics({"many"}))


def _delete_group(simulation: CoordinatorSimulation) -> None:
    simulation.act(simulation.coordinator.delete("g", simulation.waiter()))


def _delete_offsets(simulation: CoordinatorSimulation) -> None:
    simulation.act(
        simulation.coordinator.delete_offsets(
            simulation.group.group_id,
            simulation.group.offset_keys(),
            simulation.waiter(),
        )
    )


def _expire(simulation: CoordinatorSimulation) -> None:
    simulation.now_ms += 7 * DAY_MS
    simulation.act(simulation.coordinator.expire_offsets(simulation.now_ms))


_DELETIONS = pytest.mark.parametrize(
    "delete", [_forget_topic, _delete_group, _delete_offsets, _expire]
)


@_DELETIONS
def test_deletion_of_many_offsets_uses_several_batches(
    delete: Callable[[CoordinatorSimulation], None],
) -> None:
    simulation = CoordinatorSimulation()
    simulation.commit_many(5_000)
    delete(simulation)
    sizes = [
        sum(len(key) + 32 for key, _ in store.records) for store in simulation.stores
    ]
    assert len(sizes) > 3 and max(sizes) < 70_000
    simulation.settle()
    assert set(simulation.asked) == set(simulation.replies)
    assert set(simulation.durable.values()) == {None}
    simulation.restart()
    assert simulation.coordinator.get("g") is None


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_partly_failed_offset_deletion_is_reported(failing: int) -> None:
    simulation = CoordinatorSimulation()
    simulation.commit_many(5_000)
    _delete_offsets(simulation)
    for number in range(4):
        simulation.disk(
            GroupError.COORDINATOR_NOT_AVAILABLE if number == failing else None
        )
    assert (
        simulation.replies[simulation.waiters] is GroupError.COORDINATOR_NOT_AVAILABLE
    )
    left = simulation.group.offset_keys()
    assert 0 < len(left) < 5_000
    simulation.restart()
    assert sorted(simulation.group.offset_keys()) == sorted(left)


@pytest.mark.parametrize("delete", [_delete_group, _expire])
def test_group_remains_after_a_failed_deletion_and_can_be_deleted(
    delete: Callable[[CoordinatorSimulation], None],
) -> None:
    simulation = CoordinatorSimulation()
    (member_id,), generation = simulation.form()
    simulation.commit(5, member_id, generation)
    simulation.leave(member_id)
    simulation.settle()
    delete(simulation)
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    assert simulation.group.offsets["orders"][0].offset == 5
    generation = simulation.group.generation
    simulation.restart()
    assert (
        simulation.group.offsets["orders"][0].offset == 5
        and simulation.group.generation == generation
    )
    _delete_group(simulation)
    simulation.settle()
    simulation.restart()
    assert simulation.coordinator.all() == []


def test_group_keeps_remaining_offsets_after_a_partly_failed_deletion() -> None:
    simulation = CoordinatorSimulation()
    simulation.commit_many(5_000)
    _delete_group(simulation)
    simulation.disk()
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    simulation.settle()
    assert (
        simulation.replies[simulation.waiters] is GroupError.COORDINATOR_NOT_AVAILABLE
    )
    left = simulation.group.offset_keys()
    assert 0 < len(left) < 5_000
    simulation.restart()
    assert sorted(simulation.group.offset_keys()) == sorted(left)


def test_offsets_of_a_failed_deletion_are_merged_into_the_new_group() -> None:
    simulation = CoordinatorSimulation()
    simulation.commit_many(2)
    simulation.commit_in_transaction(3)
    simulation.commit_in_transaction(4, partition=1)
    simulation.settle()
    _delete_group(simulation)
    simulation.commit(77)
    simulation.act(simulation.coordinator.forget_topics({"nothing"}))
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    simulation.settle()
    simulation.commit_transaction()
    for _ in range(2):
        offsets = {
            topic: {n: committed.offset for n, committed in of.items()}
            for topic, of in simulation.group.offsets.items()
        }
        assert offsets == {"many": {0: 1, 1: 1}, "orders": {0: 77, 1: 4}}
        simulation.restart()


def test_offsets_of_a_failed_deletion_survive_deletion_of_the_next_group() -> None:
    simulation = CoordinatorSimulation()
    simulation.commit_many(1)
    simulation.commit(1)
    simulation.settle()
    _delete_group(simulation)
    simulation.commit(77)
    _delete_group(simulation)
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    simulation.settle()
    for _ in range(2):
        assert simulation.group.offset_keys() == [("many", 0)]
        simulation.restart()


def test_transaction_ended_during_a_failed_group_deletion_is_applied() -> None:
    simulation = CoordinatorSimulation()
    simulation.commit_in_transaction(3)
    simulation.settle()
    _delete_group(simulation)
    simulation.commit_transaction()
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    for _ in range(2):
        assert simulation.group.offsets["orders"][0].offset == 3
        simulation.restart()


def test_unloaded_group_does_not_return_after_a_failed_deletion() -> None:
    simulation = CoordinatorSimulation()
    simulation.commit_many(1)
    _delete_group(simulation)
    simulation.act(simulation.coordinator.unload())
    simulation.disk(GroupError.COORDINATOR_NOT_AVAILABLE)
    assert simulation.coordinator.all() == []


def test_unloading_answers_all_requests_and_cancels_all_timers() -> None:
    simulation = CoordinatorSimulation()
    simulation.form(2)
    simulation.join(requires_member_id=True)
    waiting = simulation.join()
    simulation.act(simulation.coordinator.unload())
    assert simulation.replies[waiting].error is GroupError.NOT_COORDINATOR
    assert not simulation.set and simulation.coordinator.all() == []


def test_late_write_for_an_old_group_does_not_change_a_new_group() -> None:
    simulation = CoordinatorSimulation()
    member_id = simulation.replies[simulation.join()].member_id
    simulation.sync(member_id, 1, {member_id: b"old"})
    (late,) = simulation.stores
    simulation.act(simulation.coordinator.unload())
    simulation.stores.clear()
    new_id = simulation.replies[simulation.join()].member_id
    syncing = simulation.sync(new_id, 1, {new_id: b"new"})
    simulation.act(simulation.coordinator.stored(late, None, simulation.now_ms))
    assert syncing not in simulation.replies and simulation.group.state == COMPLETING
    simulation.settle()
    assert simulation.replies[syncing].assignment == b"new"


def test_static_member_answered_by_a_rebalance_is_not_answered_twice() -> None:
    """The record of its new id is on disk only after the next generation has begun."""
    simulation = CoordinatorSimulation()
    first = simulation.join(instance="s0")
    member_id = simulation.replies[first].member_id
    simulation.sync(
        member_id, simulation.group.generation, {member_id: b""}, instance="s0"
    )
    simulation.settle()
    again = simulation.join(instance="s0")
    assert simulation.stores and again not in simulation.replies
    newcomer = simulation.join()
    assert isinstance(simulation.replies[again], Joined)
    assert isinstance(simulation.replies[newcomer], Joined)
    simulation.settle()
    assert simulation.group.state == COMPLETING


def test_session_timer_restarts_after_a_long_join() -> None:
    """The session timer does not run while a join waits. If the member is silent after
    the answer, the group must continue without it.
    """
    simulation = CoordinatorSimulation()
    ids, generation = simulation.form(2)
    waiting = simulation.join(ids[0])
    for _ in range(3):
        simulation.sleep(SESSION_MS // 2)
        assert (
            simulation.heartbeat(ids[1], generation) is GroupError.REBALANCE_IN_PROGRESS
        )
    assert waiting not in simulation.replies
    simulation.join(ids[1])
    assert isinstance(simulation.replies[waiting], Joined)
    simulation.sleep(SESSION_MS)
    assert ids[0] not in simulation.group.members


# -- any order of steps ----------------------------------------------------------------


class Client:
    """A consumer that takes its next step whenever `step` is called."""

    def __init__(self, simulation: CoordinatorSimulation, instance: str | None) -> None:
        self.simulation = simulation
        self.instance = instance
        self.member_id = ""
        self.generation = -1
        self.waiting: int | None = None

    def step(self, flavour: int) -> None:
        """Join, or process the answer and continue. `flavour` selects between permitted
        actions.
        """
        simulation = self.simulation
        if self.waiting is None:
            self.join(flavour)
            return
        if self.waiting not in simulation.replies:
            return
        result = simulation.replies[self.waiting]
        self.waiting = None
        match result:
            case Joined():
                self.member_id = result.member_id
                self.generation = result.generation
                names = [member.member_id for member in result.members]
                assignments: dict[str, bytes] = {}
                if result.leader == self.member_id and not result.skip_assignment:
                    for partition in PARTITIONS:
                        name = names[(partition + flavour) % len(names)]
                        assignments[name] = assignments.get(name, b"") + bytes(
                            [partition]
                        )
                self.waiting = simulation.sync(
                    self.member_id, self.generation, assignments, self.instance
                )
            case SyncResult():
                self.process_error(
                    simulation.heartbeat(self.member_id, self.generation, self.instance)
                )
            case JoinRefused(error, member_id):
                self.member_id = (
                    member_id if error is GroupError.MEMBER_ID_REQUIRED else ""
                )
            case _:
                self.process_error(result)

    def join(self, flavour: int) -> None:
        self.waiting = self.simulation.join(
            self.member_id,
            instance=self.instance,
            protocols=(("range", bytes([flavour % 2])),),
            requires_member_id=self.instance is None and flavour >= 2,
            may_skip_assignment=flavour % 2 == 0,
        )

    def process_error(self, error: GroupError | None) -> None:
        if error in (GroupError.UNKNOWN_MEMBER_ID, GroupError.FENCED_INSTANCE_ID):
            self.member_id = ""

    def heartbeat(self) -> None:
        self.process_error(
            self.simulation.heartbeat(self.member_id, self.generation, self.instance)
        )

    def commit(self, offset: int) -> None:
        result = self.simulation.commit(offset, self.member_id, self.generation)
        if isinstance(result, GroupError) and self.instance is None:
            self.process_error(result)

    def leave(self) -> None:
        self.simulation.leave(self.member_id, self.instance)
        self.forget()

    def forget(self) -> None:
        """Simulate a crash: the consumer starts again without its id."""
        self.member_id = ""
        self.generation = -1
        self.waiting = None


CLIENTS = st.integers(0, 4)
ERRORS = st.sampled_from(
    [
        None,
        None,
        None,
        None,
        GroupError.COORDINATOR_NOT_AVAILABLE,
        GroupError.RECORD_TOO_LARGE,
    ]
)
STEPS = st.one_of(
    st.tuples(st.just("step"), CLIENTS, st.integers(0, 3)),
    st.tuples(st.just("step"), CLIENTS, st.integers(0, 3)),
    st.tuples(st.just("step"), CLIENTS, st.integers(0, 3)),
    st.tuples(st.just("heartbeat"), CLIENTS),
    st.tuples(st.just("commit"), CLIENTS, st.integers(0, 99)),
    st.tuples(st.just("leave"), CLIENTS),
    st.tuples(st.just("forget"), CLIENTS),
    st.tuples(st.just("disk"), ERRORS),
    st.tuples(st.just("disk"), ERRORS),
    st.tuples(st.just("sleep"), st.sampled_from([1, 300, 3_000, 11_000, 21_000])),
    st.tuples(st.just("delete")),
    st.tuples(st.just("restart")),
)


@pytest.mark.long
@settings(max_examples=60)
@given(
    delay_ms=st.sampled_from([0, 500]),
    instances=st.lists(
        st.sampled_from([None, None, "s0", "s1"]), min_size=5, max_size=5
    ),
    steps=st.lists(STEPS, min_size=20, max_size=120),
)
def test_invariants_hold_in_any_order_and_every_request_is_answered(
    delay_ms: int, instances: list[str | None], steps: list[Any]
) -> None:
    simulation = CoordinatorSimulation(delay_ms=delay_ms)
    clients = [Client(simulation, instance) for instance in instances]
    for what, *arguments in steps:
        match what:
            case "disk":
                simulation.disk(*arguments)
            case "sleep":
                simulation.sleep(*arguments)
            case "delete":
                simulation.act(simulation.coordinator.delete("g", simulation.waiter()))
            case "restart":
                simulation.restart()
                for client in clients:
                    client.waiting = None  # the connection is lost, but not the id
            case _:
                index, *rest = arguments
                getattr(clients[index], what)(*rest)
    simulation.settle()
    simulation.sleep(LONG_MS)
    simulation.settle()
    assert set(simulation.asked) == set(simulation.replies), "every request is answered"
    assert not simulation.set, "an idle coordinator has no timers"
    before = simulation.coordinator.get("g")
    assert before is None or before.state == EMPTY
    simulation.restart()
    after = simulation.coordinator.get("g")
    assert (after.offsets if after else {}) == (before.offsets if before else {})
    if before is not None and before.generation and after is not None:
        assert after.state in (EMPTY, STABLE) and after.generation <= before.generation


# -- timers ----------------------------------------------------------------------------


def test_timers_are_due_in_order_and_can_be_replaced_or_cancelled() -> None:
    timers: Deadlines[str] = Deadlines()
    assert timers.next_ms is None
    timers.at(5, "b")
    timers.at(5, "c")
    timers.at(1, "a")
    timers.at(9, "a")
    timers.at(2, "gone")
    timers.cancel("gone")
    timers.cancel("never set")
    assert timers.next_ms == 5 and len(timers) == 3 and "gone" not in timers
    assert list(timers.due(4)) == []
    assert list(timers.due(5)) == ["b", "c"]
    assert timers.next_ms == 9
    due = timers.due(20)
    assert next(due) == "a"
    timers.at(20, "again")
    assert list(due) == ["again"] and timers.next_ms is None


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 50), st.booleans()), max_size=300
    )
)
def test_timers_agree_with_a_dict(calls: list[tuple[int, int, bool]]) -> None:
    timers: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for name, deadline_ms, is_set in calls:
        if is_set:
            timers.at(deadline_ms, name)
            model[name] = deadline_ms
        else:
            timers.cancel(name)
            model.pop(name, None)
        assert timers.next_ms == min(model.values(), default=None)
        assert len(timers._heap) <= 64 + 2 * len(model), (
            "cancelled timers are cleaned up"
        )
    due = list(timers.due(25))
    assert sorted(due) == sorted(
        name for name, deadline_ms in model.items() if deadline_ms <= 25
    )
    assert [model[name] for name in due] == sorted(model[name] for name in due)


@pytest.mark.parametrize("error", list(GroupError))
def test_every_error_has_a_kafka_code(error: GroupError) -> None:
    from netshim.handlers.group import _CODES
    from netshim.wire import codes

    assert codes.name(_CODES[error]) in (error.name, "INVALID_COMMIT_OFFSET_SIZE")
