"""All groups that one coordinator looks after: which group a request means, and when one comes and goes.

    coordinator = Coordinator(rules, new_id)
    effects = coordinator.load(found, now_ms)          # what groupoffsets.stored_groups() read, if there was any
    effects = coordinator.join(request, waiter, now_ms)

Its holder carries out the effects it returns, in their order: tells waiters, stores records and reports with
stored() how that went, and calls timed_out() when the time of an At has come. It is to be used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from logcore.coordination import membership, offsets
from logcore.coordination.effects import (
    Assigned,
    Effect,
    GroupDeleted,
    GroupError,
    Join,
    JoinRefused,
    OffsetKey,
    OffsetsCommitted,
    OffsetsDeleted,
    OffsetsPending,
    Replaced,
    Reply,
    Rules,
    Store,
    Sync,
    Timeout,
    Waiter,
)
from logcore.coordination.group import DEAD, EMPTY, STABLE, Group, Member
from logcore.format.grouprecords import Committed, StoredGroup

#: How often expire_offsets() is to be called.
EXPIRY_CHECK_MS: Final = 600_000


class Coordinator:
    """new_id: gives the part of a member id that no other has."""

    def __init__(self, rules: Rules, new_id: Callable[[], str]) -> None:
        self._rules = rules
        self._new_id = new_id
        self._groups: dict[str, Group] = {}

    # -- looking

    def get(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def all(self) -> list[Group]:
        return list(self._groups.values())

    def adopt(self, group: Group) -> None:
        """Takes over a group as it is, from a coordinator that looked after it before."""
        self._groups[group.group_id] = group

    # -- what is stored

    def load(
        self,
        groups: Mapping[str, StoredGroup],
        committed: Mapping[str, dict[str, dict[int, Committed]]],
        now_ms: int,
        unstable: Mapping[str, dict[int, dict[OffsetKey, Committed]]] = MappingProxyType({}),
    ) -> list[Effect]:
        """Takes over what was stored. Sessions begin now: members of before have their time to come back.

        unstable: group -> producer id -> what its open transaction would commit.
        """
        effects: list[Effect] = []
        for group_id in {**groups, **committed, **unstable}:
            group = Group(group_id, offsets=committed.get(group_id, {}))
            self._groups[group_id] = group
            for producer_id, keys in unstable.get(group_id, {}).items():
                group.unstable[producer_id] = {key: (0, each) for key, each in keys.items()}
            if group_id in groups:
                _restore(group, groups[group_id])
                effects += membership.begin_sessions(group, now_ms, rules=self._rules)
        return effects

    def stored(self, effect: Store, error: GroupError | None, now_ms: int) -> list[Effect]:
        """The records of a Store are on disk, or could not be stored."""
        group = effect.group
        effects: list[Effect] = []
        match effect.then:
            case Assigned() as done:
                effects = membership.assigned(group, done, error, now_ms, rules=self._rules)
            case Replaced() as done:
                effects = membership.replaced(group, done, error, now_ms, rules=self._rules)
            case OffsetsCommitted() as done:
                effects = offsets.committed(group, done, error)
            case OffsetsPending() as done:
                effects = offsets.pending(group, done, error)
            case OffsetsDeleted() as done:
                effects = offsets.deleted(group, done, error)
            case GroupDeleted(waiter):
                effects = [Reply(waiter, error)]
            case None:
                pass
        self._drop_if_dead(group)
        return effects

    def timed_out(self, group: Group, timeout: Timeout, now_ms: int) -> list[Effect]:
        """The time of an At has come. A group that is Dead has cancelled its timers."""
        effects = membership.timed_out(group, timeout, now_ms, rules=self._rules)
        self._drop_if_dead(group)
        return effects

    def _drop_if_dead(self, group: Group) -> None:
        if group.state == DEAD and self._groups.get(group.group_id) is group:
            del self._groups[group.group_id]

    # -- members

    def join(self, request: Join, waiter: Waiter, now_ms: int) -> list[Effect]:
        error = membership.check_join(request, self._rules)
        group = self._groups.get(request.group_id)
        if error is None and group is None and request.member_id:
            error = GroupError.UNKNOWN_MEMBER_ID
        if error is not None:
            return [Reply(waiter, JoinRefused(error, request.member_id))]
        if group is None:
            group = Group(request.group_id)
        effects = membership.join(group, request, waiter, now_ms, rules=self._rules, new_id=self._new_id)
        if not group.is_unused:  # a new group that refused its first member is nothing yet
            self._groups[group.group_id] = group
        return effects

    def sync(self, request: Sync, waiter: Waiter, now_ms: int) -> list[Effect]:
        if not request.group_id:
            return [Reply(waiter, GroupError.INVALID_GROUP_ID)]
        group = self._groups.get(request.group_id)
        if group is None:
            return [Reply(waiter, GroupError.UNKNOWN_MEMBER_ID)]
        return membership.sync(group, request, waiter, now_ms, rules=self._rules)

    def heartbeat(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int, now_ms: int
    ) -> tuple[GroupError | None, list[Effect]]:
        if not group_id:
            return GroupError.INVALID_GROUP_ID, []
        group = self._groups.get(group_id)
        if group is None:
            return GroupError.UNKNOWN_MEMBER_ID, []
        return membership.heartbeat(group, member_id, instance_id, generation, now_ms, rules=self._rules)

    def leave(
        self, group_id: str, members: Sequence[tuple[str, str | None]], now_ms: int
    ) -> tuple[list[GroupError | None], list[Effect]]:
        """As membership.leave()."""
        group = self._groups.get(group_id)
        if group is None:
            return [GroupError.UNKNOWN_MEMBER_ID] * len(members), []
        results, effects = membership.leave(group, members, now_ms, rules=self._rules)
        self._drop_if_dead(group)
        return results, effects

    # -- offsets

    def check_commit(
        self, group_id: str, generation: int, member_id: str, instance_id: str | None, now_ms: int
    ) -> tuple[GroupError | None, list[Effect]]:
        """As offsets.check_commit(). In a group that does not exist only those may commit who are no members.

        The empty group id may commit, as in Kafka, for the sake of old clients.
        """
        if membership.is_too_long(group_id):
            return GroupError.INVALID_GROUP_ID, []
        group = self._groups.get(group_id)
        if group is None:
            return GroupError.GROUP_ID_NOT_FOUND if generation >= 0 else None, []
        return offsets.check_commit(group, generation, member_id, instance_id, now_ms, rules=self._rules)

    def commit(self, group_id: str, committed: Mapping[OffsetKey, Committed], waiter: Waiter) -> list[Effect]:
        group = self._groups.get(group_id)
        if group is None:
            group = Group(group_id)
            self._groups[group_id] = group
        return offsets.commit(group, committed, waiter)

    def commit_in_transaction(
        self,
        group_id: str,
        producer: tuple[int, int],
        committed: Mapping[OffsetKey, Committed],
        waiter: Waiter,
    ) -> list[Effect]:
        """As offsets.commit_in_transaction(). producer: its id and epoch."""
        group = self._groups.get(group_id)
        if group is None:
            group = Group(group_id)
            self._groups[group_id] = group
        return offsets.commit_in_transaction(group, *producer, committed, waiter)

    def transaction_ended(self, producer_id: int, *, commit: bool) -> None:
        """A marker of this producer is in the log: its commits count now, or never."""
        for group in self.all():
            if producer_id in group.unstable:
                group.end_transaction(producer_id, commit=commit)
                if group.is_unused:
                    group.state = DEAD
                    self._drop_if_dead(group)

    def delete_offsets(self, group: Group, keys: Sequence[OffsetKey], waiter: Waiter) -> list[Effect]:
        return offsets.delete(group, keys, waiter)

    def delete(self, group_id: str, waiter: Waiter) -> list[Effect]:
        """Deletes an empty group with its offsets."""
        group = self._groups.get(group_id)
        if group is None:
            return [Reply(waiter, GroupError.GROUP_ID_NOT_FOUND)]
        if group.state != EMPTY:
            return [Reply(waiter, GroupError.NON_EMPTY_GROUP)]
        effects = offsets.delete_group(group, waiter)
        self._drop_if_dead(group)
        return effects

    def forget_topics(self, names: set[str]) -> list[Effect]:
        """Deletes what was committed for topics that are deleted."""
        return [effect for group in self.all() for effect in offsets.forget_topics(group, names)]

    def expire_offsets(self, now_ms: int) -> list[Effect]:
        """To be called every EXPIRY_CHECK_MS or so."""
        effects: list[Effect] = []
        for group in self.all():
            effects += offsets.expire(group, now_ms)
            self._drop_if_dead(group)
        return effects

    # -- ending

    def stop(self) -> list[Effect]:
        """Ends what waits for other members. What waits for the disk is answered when that is done."""
        return [effect for group in self.all() for effect in membership.turn_away(group)]

    def unload(self) -> list[Effect]:
        """Forgets all groups, because the topic that held them was deleted."""
        effects = self.stop()
        for group in self.all():
            effects += membership.bury(group)
        self._groups = {}
        return effects


def _restore(group: Group, stored: StoredGroup) -> None:
    """Gives a group the state its record tells."""
    group.protocol_type = stored.protocol_type
    group.generation = stored.generation
    group.state_ms = stored.state_ms
    if not stored.members:
        return
    group.state = STABLE
    group.protocol = stored.protocol
    group.leader = stored.leader
    for each in stored.members:
        rebalance_timeout_ms = each.rebalance_timeout_ms
        if rebalance_timeout_ms < 0:
            rebalance_timeout_ms = each.session_timeout_ms
        member = Member(
            member_id=each.member_id,
            instance_id=each.instance_id,
            client_id=each.client_id,
            client_host=each.client_host,
            rebalance_timeout_ms=rebalance_timeout_ms,
            session_timeout_ms=each.session_timeout_ms,
            protocols=((stored.protocol or "", each.subscription),),
            assignment=each.assignment,
        )
        group.add(member, stored.protocol_type)
    if group.leader not in group.members:
        group.leader = next(iter(group.members))
    group.topics = group.subscribed()
