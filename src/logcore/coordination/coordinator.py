"""All groups of one coordinator: finds the group of a request, creates and deletes
groups.

    coordinator = Coordinator(rules, new_id)
    # The arguments are read from the log; see coordinators/stored_offsets.py.
    effects = coordinator.load(groups, committed, now_ms)
    effects = coordinator.join(request, waiter, now_ms)

The caller carries out the returned effects in their order: it answers waiters, stores
records and calls stored() with the outcome. When the timer of a SetTimer expires, the
caller calls timed_out(). A coordinator must be used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from logcore.coordination import (
    classic_transitions,
    consumer_transitions,
    migration,
    offsets,
)
from logcore.coordination.classic_group import (
    DEAD,
    EMPTY,
    STABLE,
    ClassicGroupMember,
    Group,
    rebalance_timeout_ms,
)
from logcore.coordination.consumer_group import (
    Compile,
    ConsumerGroup,
    Fact,
    NoTopics,
    Topics,
    restored,
)
from logcore.coordination.effects import (
    AppendRecords,
    Assigned,
    ConsumersChanged,
    Effect,
    GroupDeleted,
    OffsetsCommitted,
    OffsetsDeleted,
    OffsetsPending,
    Replaced,
    Reply,
)
from logcore.coordination.group_requests import (
    Committer,
    ConsumerHeartbeat,
    FirstSyncEnds,
    GroupError,
    HeartbeatRefused,
    Join,
    JoinRefused,
    OffsetKey,
    RejoinEnds,
    RevocationEnds,
    Rules,
    SessionEnds,
    Sync,
    Timeout,
    Waiter,
)
from logcore.coordination.memory_budget import (
    GROUP_BYTES,
    ITEM_BYTES,
    MEMBER_BYTES,
    ClientMemoryBudget,
)
from logcore.format.consumer_group_records import ConsumerValue, RecordKind
from logcore.format.group_records import Committed, StoredGroup, TopicWithId

#: How often the caller should call expire_offsets().
EXPIRY_CHECK_MS: Final = 600_000


def _no_waiter() -> None:
    return None


def _no_patterns(pattern: str) -> Callable[[str], bool]:
    raise ValueError("regular expressions are not served here")


class Coordinator:
    """The group coordinator: a state machine without I/O.

    `topics` and `compile` are needed only for groups of the consumer protocol.
    """

    def __init__(
        self,
        rules: Rules,
        new_id: Callable[[], str],
        topics: Topics | None = None,
        compile: Compile = _no_patterns,
        memory_budget: ClientMemoryBudget | None = None,
    ) -> None:
        self._rules = rules
        #: Limits the memory of all groups; None for no limit.
        self._memory_budget = memory_budget
        #: Returns the unique part of a member id.
        self._new_id = new_id
        self._topics: Topics = NoTopics()
        if topics is not None:
            self._topics = topics
        self._compile = compile
        self._groups: dict[str, Group] = {}
        # Groups whose deletion is not durable yet.
        self._in_deletion: dict[Group, None] = {}

    # -- views

    def get(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def all(self) -> list[Group]:
        return list(self._groups.values())

    def held_bytes(self) -> int:
        """Return the approximate memory use of the members of all groups."""
        return sum(group.held_bytes() for group in self._groups.values())

    def _admit(self, group_id: str, size_bytes: int, now_ms: int) -> bool:
        """Return whether the memory limit allows a request of a member.

        If the group is new, its own size counts too.
        """
        if self._memory_budget is None:
            return True
        if group_id not in self._groups:
            size_bytes += GROUP_BYTES + len(group_id)
        return self._memory_budget.admit(size_bytes, now_ms)

    def adopt(self, group: Group) -> None:
        """Add a group, with its present state, from another coordinator."""
        self._groups[group.group_id] = group

    # -- stored state

    def load(
        self,
        groups: Mapping[str, StoredGroup],
        committed: Mapping[str, dict[str, dict[int, Committed]]],
        now_ms: int,
        unstable: Mapping[
            str, dict[int, dict[OffsetKey, tuple[int, Committed]]]
        ] = MappingProxyType({}),
        consumers: Mapping[str, Mapping[Fact, ConsumerValue]] = MappingProxyType({}),
    ) -> list[Effect]:
        """Restore groups from stored records, like take(), and begin all sessions.

        Members from an earlier run get a full session timeout to return.
        """
        self.take(groups, committed, unstable, consumers)
        return self.begin_sessions(now_ms)

    def take(
        self,
        groups: Mapping[str, StoredGroup],
        committed: Mapping[str, dict[str, dict[int, Committed]]],
        unstable: Mapping[str, dict[int, dict[OffsetKey, tuple[int, Committed]]]],
        consumers: Mapping[str, Mapping[Fact, ConsumerValue]],
    ) -> None:
        """Restore groups from stored records; begin_sessions() must follow.

        Another thread may call this, if no method except stop() runs concurrently.

        `unstable` maps a group to producer ids and the pending offsets of their open
        transactions. Their order (see Group) is below that of later commits.
        `consumers` contains the facts of groups of the consumer protocol.
        """
        # Complete groups are added in one step: requests must not see a group without
        # its offsets.
        restored_groups: dict[str, Group] = {}
        for group_id in {**groups, **committed, **unstable, **consumers}:
            group = Group(group_id, offsets=committed.get(group_id, {}))
            restored_groups[group_id] = group
            for producer_id, keys in unstable.get(group_id, {}).items():
                group.unstable[producer_id] = dict(keys)
            found = restored(group_id, consumers.get(group_id, {}))
            # Records of both protocols: a conversion was interrupted. If the consumer
            # protocol has members, its records win.
            if found.members or (found.epoch and group_id not in groups):
                # The tombstone of the classic record was never written.
                if group_id in groups:
                    found.unsure[RecordKind.CLASSIC, ""] = None
                group.become(found)
                group.state = found.state
            elif group_id in groups:
                _restore(group, groups[group_id])
        self._groups.update(restored_groups)

    def begin_sessions(self, now_ms: int) -> list[Effect]:
        """Begin the sessions of all members after take()."""
        effects: list[Effect] = []
        for group in self.all():
            # If only classic members were stored, an interrupted downgrade ends now.
            if group.consumers is not None:
                effects += consumer_transitions.begin_sessions(
                    group, self._context(now_ms)
                )
                effects += migration.downgrade(group, self._context(now_ms))
            elif group.members:
                effects += classic_transitions.begin_sessions(
                    group, now_ms, rules=self._rules
                )
        return effects

    def _context(self, now_ms: int) -> consumer_transitions.StepContext:
        return consumer_transitions.StepContext(
            rules=self._rules, topics=self._topics, compile=self._compile, now_ms=now_ms
        )

    def stored(
        self, effect: AppendRecords, error: GroupError | None, now_ms: int
    ) -> list[Effect]:
        """Handle the end of an AppendRecords effect.

        Its records are durable, or `error` is set.
        """
        group = effect.group
        effects: list[Effect] = []
        if (
            error is None
            and group.pending_tombstones
            and effect.records[: len(group.pending_tombstones)]
            == group.pending_tombstone_records()
        ):
            # These records began with tombstones for all facts in `pending_tombstones`.
            group.pending_tombstones = ()
        match effect.then:
            case Assigned() as done:
                effects = classic_transitions.assigned(
                    group, done, error, now_ms, rules=self._rules
                )
            case Replaced() as done:
                effects = classic_transitions.replaced(
                    group, done, error, now_ms, rules=self._rules
                )
            case OffsetsCommitted() as done:
                effects = offsets.committed(group, done, error)
            case OffsetsPending() as done:
                effects = offsets.pending(group, done, error)
            case OffsetsDeleted() as done:
                effects = offsets.deleted(group, done, error)
            case ConsumersChanged():
                effects = consumer_transitions.stored(
                    group, error, self._context(now_ms)
                )
                effects += migration.downgrade(group, self._context(now_ms))
            case GroupDeleted() as done:
                failure, effects = offsets.group_deleted(group, done, error)
                effects += self._finish_deletion(group, failure)
            case None:
                pass
        # A deletion can have ended the group.
        self._drop_if_dead(group)
        return effects

    def timed_out(self, group_id: str, timeout: Timeout, now_ms: int) -> list[Effect]:
        """Handle the expiry of a timer. The group exists, because a group that is
        dropped cancels its timers.
        """
        group = self._groups[group_id]
        if group.consumers is not None:
            assert isinstance(
                timeout, SessionEnds | RevocationEnds | RejoinEnds | FirstSyncEnds
            ), timeout
            return consumer_transitions.timed_out(group, timeout, self._context(now_ms))
        effects = classic_transitions.timed_out(
            group, timeout, now_ms, rules=self._rules
        )
        self._drop_if_dead(group)
        return effects

    def _drop_if_dead(self, group: Group) -> None:
        # A new group may have the id by now.
        if group.state == DEAD and self._groups.get(group.group_id) is group:
            del self._groups[group.group_id]

    def _drop_deleted(self, group: Group) -> None:
        if group.state == DEAD:
            self._in_deletion[group] = None
        self._drop_if_dead(group)

    def _finish_deletion(
        self, group: Group, failure: GroupError | None
    ) -> list[Effect]:
        """Finish the deletion of a group, after its records are durable or could not be
        stored.

        If records of the group remain, they pass to the next group with that id, which
        may itself be in deletion. If there is no such group, the group exists again.
        """
        # All groups were unloaded before this deletion finished.
        if group not in self._in_deletion:
            return []
        del self._in_deletion[group]
        if failure is None and not (group.offsets or group.unstable):
            return []
        # A later group with this id may be in deletion too.
        later = (
            deleted_group
            for deleted_group in self._in_deletion
            if deleted_group.group_id == group.group_id
        )
        successor = next(later, self._groups.get(group.group_id))
        if successor is not None:
            records = successor.inherit(group)
            return [AppendRecords(successor, records)] if records else []
        # No later group has the id, so this one exists again.
        group.state = EMPTY
        if not group.is_unused:
            self._groups[group.group_id] = group
        return []

    # -- members

    def join(self, request: Join, waiter: Waiter, now_ms: int) -> list[Effect]:
        error = classic_transitions.check_join(request, self._rules)
        group = self._groups.get(request.group_id)
        # The member id is of a group that no longer exists. The client must join as a
        # new member.
        if error is None and group is None and request.member_id:
            error = GroupError.UNKNOWN_MEMBER_ID
        # Kafka has no such limit. A faulty client that joins in a loop could otherwise
        # use all memory.
        size_bytes = MEMBER_BYTES + classic_transitions.size_of(request.protocols)
        if error is None and not self._admit(request.group_id, size_bytes, now_ms):
            error = GroupError.COORDINATOR_NOT_AVAILABLE
        if error is not None:
            return [Reply(waiter, JoinRefused(error, request.member_id))]
        if group is None:
            group = Group(request.group_id)
        effects: list[Effect] = []
        # A rolling upgrade: members of both protocols share the group (KIP-848).
        if group.consumers is not None and group.state != EMPTY and self._rules.may_mix:
            return migration.join(
                group, request, waiter, self._context(now_ms), new_id=self._new_id
            )
        if group.consumers is not None:
            error = _check_return(group, request)
            if error is not None:
                return [Reply(waiter, JoinRefused(error, request.member_id))]
            # The group is Empty, and this member gives it the classic protocol.
            effects = _leave_consumers(group)
        effects += classic_transitions.join(
            group, request, waiter, now_ms, rules=self._rules, new_id=self._new_id
        )
        # A new group that refused its first member does not exist.
        if not group.is_unused:
            self._groups[group.group_id] = group
        return effects

    def consumer_heartbeat(
        self,
        request: ConsumerHeartbeat,
        waiter: Waiter,
        now_ms: int,
        *,
        may_omit_member_id: bool = False,
    ) -> list[Effect]:
        """Handle a heartbeat of the consumer protocol; the reply is HeartbeatAccepted or
        HeartbeatRefused.

        With `may_omit_member_id`, a new member without an id gets one.
        """
        refused = consumer_transitions.check_heartbeat(
            request, may_omit_member_id=may_omit_member_id
        )
        group = self._groups.get(request.group_id)
        if refused is None:
            refused = _check_protocol(group, request)
        # An ordinary heartbeat contains no subscription and adds no data.
        texts = (
            (*(request.topic_names or ()), request.pattern or "")
            if request.member_epoch >= 0
            else ()
        )
        if (
            refused is None
            and (request.topic_names is not None or request.pattern)
            and texts
        ):
            size_bytes = MEMBER_BYTES + sum(map(len, texts)) + ITEM_BYTES * len(texts)
            if not self._admit(request.group_id, size_bytes, now_ms):
                refused = HeartbeatRefused(
                    GroupError.COORDINATOR_NOT_AVAILABLE,
                    "the groups have no memory left",
                )
        if refused is not None:
            return [Reply(waiter, refused)]
        if group is None:
            group = Group(request.group_id)
        consumers = group.consumers
        context = self._context(now_ms)
        if consumers is not None:
            return consumer_transitions.heartbeat(group, request, waiter, context)
        # Classic members are in the group, so this is a rolling upgrade.
        if group.state != EMPTY:
            return migration.upgrade(group, request, waiter, context)
        # A new group, or an empty group of the classic protocol. The record of an empty
        # group must be deleted.
        pending_tombstones = [*group.pending_tombstones]
        if group.protocol_type:
            pending_tombstones.append((RecordKind.CLASSIC, ""))
        consumers = group.consumers = ConsumerGroup(request.group_id)
        effects = consumer_transitions.heartbeat(
            group, request, waiter, context, pending_tombstones=pending_tombstones
        )
        # The heartbeat was refused.
        if not consumers.members:
            group.consumers = None
            return effects
        self._groups[group.group_id] = group
        # Pending ids are of the classic protocol, which the group no longer has.
        effects[:0] = classic_transitions.forget_pending(group)
        group.become(consumers)
        return effects

    def sync(self, request: Sync, waiter: Waiter, now_ms: int) -> list[Effect]:
        if not request.group_id:
            return [Reply(waiter, GroupError.INVALID_GROUP_ID)]
        group = self._groups.get(request.group_id)
        if group is None:
            return [Reply(waiter, GroupError.UNKNOWN_MEMBER_ID)]
        # Only the leader sends assignments. Requests of other members add nothing.
        size_bytes = sum(map(len, request.assignments.values()))
        if size_bytes and not self._admit(request.group_id, size_bytes, now_ms):
            return [Reply(waiter, GroupError.COORDINATOR_NOT_AVAILABLE)]
        if group.consumers is not None:
            return migration.sync(group, request, waiter, self._context(now_ms))
        return classic_transitions.sync(
            group, request, waiter, now_ms, rules=self._rules
        )

    def heartbeat(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        now_ms: int,
    ) -> tuple[GroupError | None, list[Effect]]:
        if not group_id:
            return GroupError.INVALID_GROUP_ID, []
        group = self._groups.get(group_id)
        if group is None:
            return GroupError.UNKNOWN_MEMBER_ID, []
        if group.consumers is not None:
            return migration.heartbeat(
                group, member_id, instance_id, generation, self._context(now_ms)
            )
        return classic_transitions.heartbeat(
            group, member_id, instance_id, generation, now_ms, rules=self._rules
        )

    def leave(
        self, group_id: str, members: Sequence[tuple[str, str | None]], now_ms: int
    ) -> tuple[list[GroupError | None], list[Effect]]:
        """Remove members from a group, like classic_transitions.leave()."""
        group = self._groups.get(group_id)
        if group is None:
            return [GroupError.UNKNOWN_MEMBER_ID] * len(members), []
        if group.consumers is not None:
            return migration.leave(group, members, self._context(now_ms))
        results, effects = classic_transitions.leave(
            group, members, now_ms, rules=self._rules
        )
        self._drop_if_dead(group)
        return results, effects

    def absent(
        self, group_id: str, member_ids: Iterable[str], now_ms: int
    ) -> list[Effect]:
        """Report members as absent, like classic_transitions.absent()."""
        group = self._groups.get(group_id)
        if group is None or group.consumers is not None:
            return []
        return classic_transitions.absent(group, member_ids, now_ms, rules=self._rules)

    def withdraw(self, group_id: str, waiter: Waiter, now_ms: int) -> list[Effect]:
        """Withdraw a waiting request, like classic_transitions.withdraw()."""
        group = self._groups.get(group_id)
        # Only requests of classic members wait for other members.
        if group is None or group.consumers is not None:
            return []
        effects = classic_transitions.withdraw(group, waiter, now_ms, rules=self._rules)
        self._drop_if_dead(group)
        return effects

    # -- offsets

    def check_commit(
        self, committer: Committer, now_ms: int
    ) -> tuple[GroupError | None, list[Effect]]:
        """Check whether the sender may commit, like offsets.check_commit().

        If the group does not exist, only commits without a generation are allowed. The
        empty group id may commit, as in Kafka, because old clients use it.
        """
        # The record of the offset has the group id in its key.
        if classic_transitions.is_too_long(committer.group_id):
            return GroupError.INVALID_GROUP_ID, []
        group = self._groups.get(committer.group_id)
        if group is not None:
            return offsets.check_commit(group, committer, now_ms, rules=self._rules)
        # The client was a member of a group that does not exist any more.
        if committer.generation >= 0:
            return GroupError.GROUP_ID_NOT_FOUND, []
        return None, []

    def commit_as(
        self,
        committer: Committer,
        committed: Mapping[OffsetKey, Committed],
        waiter: Waiter,
        now_ms: int,
    ) -> list[Effect]:
        """Commit if the sender is allowed to; otherwise reply with the error.

        Check and commit are one step, so no rebalance can happen between them.
        """
        error, effects = self.check_commit(committer, now_ms)
        # A commit of no offsets needs no record, but reports the error.
        if error is not None or not committed:
            return [*effects, Reply(waiter, error)]
        return [*effects, *self.commit(committer.group_id, committed, waiter)]

    def rewind(
        self,
        group_id: str,
        committed: Mapping[OffsetKey, Committed],
        waiter: Waiter,
        now_ms: int,
    ) -> list[Effect]:
        """Commit, and remove all members in the same step.

        No commit of a removed member can therefore undo the new offsets. The members
        join again and start at these offsets.
        """
        effects: list[Effect] = []
        group = self._groups.get(group_id)
        # Each member must leave, because its next commit would undo the rewind.
        if group is not None and group.members:
            everyone = [
                (member.member_id, member.instance_id)
                for member in group.members.values()
            ]
            effects += self.leave(group_id, everyone, now_ms)[1]
        return [*effects, *self.commit(group_id, committed, waiter)]

    def commit_in_transaction_as(
        self,
        committer: Committer,
        producer: tuple[int, int],
        committed: Mapping[OffsetKey, Committed],
        waiter: Waiter,
    ) -> list[Effect]:
        """Commit offsets in a transaction, with the checks of commit_as().

        The offsets take effect when the transaction of `producer`, an id and an epoch,
        commits. A member is checked only if the request names one (broker reference
        3.7). As in commit_as(), a request without a generation is checked only if the
        group has members.
        """
        error = None
        if committer.is_member:
            error = self._check_producer(committer)
        if error is not None or not committed:
            return [Reply(waiter, error)]
        return self.commit_in_transaction(
            committer.group_id, producer, committed, waiter
        )

    def _check_producer(self, committer: Committer) -> GroupError | None:
        group = self._groups.get(committer.group_id)
        # A producer without a group may commit for any group id that is not in use.
        if committer.generation < 0 and (group is None or group.state == EMPTY):
            return None
        if group is None:
            return GroupError.ILLEGAL_GENERATION
        return group.check_committer(
            committer.member_id, committer.instance_id, committer.generation
        )

    def commit(
        self, group_id: str, committed: Mapping[OffsetKey, Committed], waiter: Waiter
    ) -> list[Effect]:
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
        """Commit offsets in a transaction, like offsets.commit_in_transaction().

        `producer` is an id and an epoch.
        """
        group = self._groups.get(group_id)
        if group is None:
            group = Group(group_id)
            self._groups[group_id] = group
        return offsets.commit_in_transaction(group, *producer, committed, waiter)

    def transaction_ended(
        self,
        producer_id: int,
        *,
        commit: bool,
        has_marker: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Apply or drop the pending offsets of a producer whose marker is in the log.

        `has_marker` returns whether the marker is in the log of a group.
        """
        # A failed deletion restores its group, which must not have lost a commit.
        for group in [*self.all(), *self._in_deletion]:
            if producer_id in group.unstable and has_marker(group.group_id):
                group.end_transaction(producer_id, commit=commit)
                if group.is_unused:
                    # The group had only the aborted offsets.
                    group.state = DEAD
                    self._drop_if_dead(group)

    def delete_offsets(
        self, group_id: str, keys: Sequence[OffsetKey], waiter: Waiter
    ) -> list[Effect]:
        """Delete committed offsets of an existing group."""
        group = self._groups.get(group_id)
        if group is None:
            return [Reply(waiter, GroupError.GROUP_ID_NOT_FOUND)]
        return offsets.delete(group, keys, waiter)

    def delete(self, group_id: str, waiter: Waiter) -> list[Effect]:
        """Delete an empty group and its offsets."""
        group = self._groups.get(group_id)
        if group is None:
            return [Reply(waiter, GroupError.GROUP_ID_NOT_FOUND)]
        if group.state != EMPTY:
            # Members would continue, and their commits would create the group again.
            return [Reply(waiter, GroupError.NON_EMPTY_GROUP)]
        # If the records of the last step cannot be stored, its members return.
        if group.consumers is not None and group.consumers.is_busy:
            return [Reply(waiter, GroupError.COORDINATOR_NOT_AVAILABLE)]
        effects = offsets.delete_group(group, waiter)
        self._drop_deleted(group)
        return effects

    def forget_topics(
        self,
        names: set[str],
        new_waiter: Callable[[], Waiter | None] = _no_waiter,
        current: Collection[TopicWithId] = (),
    ) -> list[Effect]:
        """Delete the committed offsets of deleted topics.

        `new_waiter` returns the waiter for the deletion in each group that has such
        offsets. Offsets of the `current` topics with such names are kept.
        """
        effects: list[Effect] = []
        # A group whose deletion fails must not keep offsets of a deleted topic.
        for group in [*self.all(), *self._in_deletion]:
            effects += offsets.forget_topics(group, names, new_waiter, current)
        return effects

    def forget_former_topics(self, former: Collection[TopicWithId]) -> list[Effect]:
        """Delete the stored offsets of topics that do not exist any more, after take().

        Another topic may have the name of one of them. It keeps its offsets.
        """
        if not former:
            return []
        return [
            effect
            for group in self.all()
            for effect in offsets.forget_former_topics(group, former)
        ]

    def expire_offsets(self, now_ms: int) -> list[Effect]:
        """Delete expired offsets. Call this about every EXPIRY_CHECK_MS."""
        effects: list[Effect] = []
        for group in self.all():
            effects += offsets.expire(group, now_ms)
            self._drop_deleted(group)
        return effects

    # -- shutdown

    def stop(self) -> list[Effect]:
        """Refuse all requests that wait for other members.

        Requests that wait for a sync are answered when the sync completes.
        """
        return [
            effect
            for group in self.all()
            for effect in classic_transitions.refuse_waiting(group)
        ]

    def unload(self) -> list[Effect]:
        """Drop all groups because the topic that stored them was deleted."""
        effects = self.stop()
        for group in self.all():
            effects += consumer_transitions.mark_dead(group)
        self._groups = {}
        self._in_deletion = {}
        return effects


def _check_protocol(
    group: Group | None, request: ConsumerHeartbeat
) -> HeartbeatRefused | None:
    """Refuse a heartbeat that does not join, unless the group uses the consumer
    protocol.
    """
    if group is not None and group.consumers is not None:
        return None
    if request.member_epoch == 0:
        return None
    if group is None:
        text = f"there is no group {request.group_id}"
    else:
        text = f"group {request.group_id} is of the classic protocol"
    return HeartbeatRefused(GroupError.GROUP_ID_NOT_FOUND, text)


def _check_return(group: Group, request: Join) -> GroupError | None:
    """Return why a classic member may not join an empty consumer group; None if it may.

    If the member joins, the group changes to the classic protocol.
    """
    assert group.consumers is not None
    if group.state != EMPTY or not (request.protocol_type and request.protocols):
        return GroupError.INCONSISTENT_GROUP_PROTOCOL
    if request.member_id:
        return GroupError.UNKNOWN_MEMBER_ID
    # If the records of the last step cannot be stored, its members return.
    if group.consumers.is_busy:
        return GroupError.COORDINATOR_NOT_AVAILABLE
    return None


def _leave_consumers(group: Group) -> list[Effect]:
    """Convert an empty consumer group to the classic protocol."""
    assert group.consumers is not None
    effects: list[Effect] = [AppendRecords(group, group.consumers.tombstones())]
    group.pending_tombstones = tuple(
        dict.fromkeys([*group.consumers.unsure, *group.consumers.facts()])
    )
    group.consumers = None
    group.protocol_type = ""
    group.state_ms = -1
    return effects


def _restore(group: Group, stored: StoredGroup) -> None:
    """Set the state of a group from its stored record."""
    group.protocol_type = stored.protocol_type
    group.generation = stored.generation
    group.state_ms = stored.state_ms
    if not stored.members:
        return
    group.state = STABLE
    group.protocol = stored.protocol
    group.leader = stored.leader
    for each in stored.members:
        member = ClassicGroupMember(
            member_id=each.member_id,
            instance_id=each.instance_id,
            client_id=each.client_id,
            client_host=each.client_host,
            rebalance_timeout_ms=rebalance_timeout_ms(each),
            session_timeout_ms=each.session_timeout_ms,
            protocols=((stored.protocol or "", each.subscription),),
            assignment=each.assignment,
        )
        group.add(member, stored.protocol_type)
    if group.leader not in group.members:
        group.leader = next(iter(group.members))
    group.topics = group.subscribed()
