"""Members of the classic protocol in a consumer group, and conversions of groups with
members, so that the clients of a group can be upgraded one by one (broker reference
4.8, KIP-848's online migration):

    classic group --a member of the consumer protocol joins-->
        consumer group, with members of both protocols
    consumer group --its last member of that protocol leaves, others remain-->
        classic group, which rebalances

Rules:
- Members keep their partitions when a group changes its protocol. They must rejoin, and
  then reach their new targets like all members.
- A classic member has the same facts as other members, and additionally the data of its
  Join. Its generation is its epoch. The coordinator assigns the partitions, so that no
  classic member is the leader.
- A classic member reports its partitions when it joins and receives its assignment when
  it syncs. Its heartbeats return REBALANCE_IN_PROGRESS in three cases: the group has a
  higher epoch, the member must give up partitions, or partitions that it waited for are
  free. If it does not rejoin within its rebalance timeout, it is removed.
- An upgrade is stored in one batch with the step that causes it. If the batch cannot be
  stored, the group still has members of both protocols. The facts of the former members
  are stored with the next records.
- A group is downgraded when none of its records is being stored. One batch deletes the
  records of the consumer protocol and contains the first classic record.

A group is not upgraded if its assignor distributes data besides partitions, because
that data would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from logcore.coordination import classic_transitions, consumer_transitions
from logcore.coordination.classic_group import (
    CONSUMER,
    STABLE,
    ClassicGroupMember,
    Group,
    rebalance_timeout_ms,
)
from logcore.coordination.consumer_group import ConsumerGroup, Fact, Topics
from logcore.coordination.consumer_transitions import Refused, StepContext
from logcore.coordination.effects import (
    AppendRecords,
    Effect,
    GroupConverted,
    Reply,
    SetTimer,
)
from logcore.coordination.group_requests import (
    ConsumerHeartbeat,
    FirstSyncEnds,
    GroupError,
    Join,
    Joined,
    JoinRefused,
    RejoinEnds,
    Sync,
    SyncResult,
    Waiter,
)
from logcore.format.consumer_group_records import (
    ClassicMember,
    ConsumerMember,
    Current,
    GroupEpoch,
    MemberState,
    Partition,
    Partitions,
    RecordKind,
)
from logcore.format.group_records import (
    Subscription,
    assignment_value,
    read_subscription,
    read_whole_assignment,
)

#: Order of the records in a batch, as Kafka writes them: the group, the targets of its
#: members, and their progress.
_ORDER: Final = (
    RecordKind.CLASSIC,
    RecordKind.MEMBER,
    RecordKind.GROUP,
    RecordKind.TARGET,
    RecordKind.TARGET_EPOCH,
    RecordKind.CURRENT,
)


# -- from one protocol to the other ----------------------------------------------------


def upgrade(
    group: Group, request: ConsumerHeartbeat, waiter: Waiter, context: StepContext
) -> list[Effect]:
    """Upgrade a classic group because a member of the consumer protocol joins.

    If the member is refused, the group does not change.
    """
    try:
        consumers = _upgraded(group, context)
    except Refused as refused:
        return [Reply(waiter, refused.result)]
    pending_tombstones: list[Fact] = [(RecordKind.CLASSIC, ""), *consumers.facts()]
    pending_tombstones.sort(key=lambda fact: _ORDER.index(fact[0]))
    # The heartbeat decides. It needs a consumer group, so the conversion is undone if
    # the heartbeat is refused.
    former_state = group.state
    former_ms = group.state_ms
    group.consumers = consumers
    joining = consumer_transitions.heartbeat(
        group,
        request,
        waiter,
        context,
        pending_tombstones=[*group.pending_tombstones, *pending_tombstones],
    )
    # A heartbeat that is accepted stores the new member.
    if not consumers.is_busy:
        group.consumers = None
        group.enter(former_state, former_ms)
        return joining
    # Waiting requests of the classic protocol are answered before the new member.
    effects = classic_transitions.end_rebalance(group)
    effects += classic_transitions.forget_timers(group)
    members = [*group.members]
    group.become(consumers)
    # Each classic member gets a session in the new protocol.
    step = consumer_transitions.HeartbeatStep(group, context)
    step.update_timers((RecordKind.CURRENT, member_id) for member_id in members)
    return [*effects, *step.effects, *joining, GroupConverted(group.group_id, CONSUMER)]


def _upgraded(group: Group, context: StepContext) -> ConsumerGroup:
    """Return the consumer group with the members of a classic group; may raise Refused."""
    text = ""
    if not context.rules.may_upgrade:
        text = "is of the classic protocol"
    elif group.protocol_type != CONSUMER:
        text = f"is one of protocol type {group.protocol_type}"
    elif len(group.members) > context.rules.consumer_max_size:
        text = "has more members than a consumer group may have"
    if text:
        raise _refuse_upgrade(group, text)
    consumers = ConsumerGroup(group.group_id)
    # As in KIP-848, the generation becomes the epoch of the group and of its members.
    # The next epoch is then new for each of them.
    consumers.apply_record((RecordKind.GROUP, ""), GroupEpoch(group.generation))
    consumers.apply_record((RecordKind.TARGET_EPOCH, ""), group.generation)
    member_data = {
        member_id: _read_member(group, member)
        for member_id, member in group.members.items()
    }
    # A partition has one owner. If a client's assignor assigned it to two members, the
    # second member loses it when it rejoins.
    taken: set[Partition] = set()
    shares: dict[str, Partitions] = {}
    for member_id, (_, partitions) in member_data.items():
        shares[member_id] = _with_ids(partitions, context.topics).difference(taken)
        taken |= shares[member_id]
    # A cooperative member revokes partitions only when it rejoins. Until then it keeps
    # the partitions that it owned when it joined, unless another member has them.
    for member_id, (subscription, _) in member_data.items():
        kept = _with_ids(subscription.owned, context.topics).difference(taken)
        shares[member_id] |= kept
        taken |= kept
    for member_id, member in group.members.items():
        _put_classic(
            consumers,
            group.generation,
            member,
            member_data[member_id][0],
            shares[member_id],
        )
    return consumers


def _read_member(
    group: Group, member: ClassicGroupMember
) -> tuple[Subscription, Sequence[tuple[str, int]]]:
    """Return the subscription and the assignment of a member; may raise Refused."""
    subscription = read_subscription(
        member.metadata(group.protocol) or member.protocols[0][1]
    )
    assignment = read_whole_assignment(member.assignment)
    # The metadata of another client cannot be translated to topics and partitions.
    if subscription is None or assignment is None:
        raise _refuse_upgrade(
            group,
            f"has a member, {member.member_id}, whose metadata is not a consumer's",
        )
    # The client needs this data, and a consumer group cannot return it.
    if assignment.user_data:
        raise _refuse_upgrade(
            group,
            "has a custom assignor, whose assignments contain more than partitions",
        )
    return subscription, assignment.partitions


def _put_classic(
    consumers: ConsumerGroup,
    generation: int,
    member: ClassicGroupMember,
    subscription: Subscription,
    assigned: Partitions,
) -> None:
    consumers.apply_record(
        (RecordKind.MEMBER, member.member_id),
        ConsumerMember(
            instance_id=member.instance_id,
            rack_id=subscription.rack_id,
            client_id=member.client_id,
            client_host=member.client_host,
            topic_names=tuple(sorted(set(subscription.topics))),
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            classic=ClassicMember(member.session_timeout_ms, member.protocols),
        ),
    )
    consumers.apply_record((RecordKind.TARGET, member.member_id), assigned)
    current = Current(
        member_epoch=generation, previous_epoch=generation, assigned=assigned
    )
    consumers.apply_record((RecordKind.CURRENT, member.member_id), current)


def _refuse_upgrade(group: Group, text: str) -> Refused:
    return Refused(GroupError.GROUP_ID_NOT_FOUND, f"group {group.group_id} {text}")


def _with_ids(partitions: Sequence[tuple[str, int]], topics: Topics) -> Partitions:
    """Return the partitions of existing topics, with topic ids."""
    ids: dict[str, bytes] = {}
    for name in {name for name, _ in partitions}:
        facts = topics.id_and_count(name)
        # A deleted topic has no partitions that a member could keep.
        if facts is not None:
            ids[name] = facts[0]
    return frozenset((ids[name], number) for name, number in partitions if name in ids)


def downgrade(group: Group, context: StepContext) -> list[Effect]:
    """Downgrade a consumer group that has only classic members and no pending records."""
    consumers = group.consumers
    if consumers is None or not context.rules.may_downgrade:
        return []
    # Records that are being stored can fail, which would undo the departure of the last
    # consumer member.
    if consumers.is_busy or consumers.queued or not consumers.is_all_classic:
        return []
    # A classic group needs a protocol that is common to all members.
    if len(consumers.members) > context.rules.group_max_size or not consumers.supports(
        CONSUMER, _first_protocols(consumers)
    ):
        return []
    effects = consumer_transitions.forget_timers(group, consumers)
    group.consumers = None
    # All records of the consumer protocol must be deleted with the next record.
    stored = dict.fromkeys([*consumers.unsure, *consumers.facts()])
    group.pending_tombstones = tuple(
        fact for fact in stored if fact[0] is not RecordKind.CLASSIC
    )
    # No member's epoch is above the target epoch, so the next generation is new for all
    # members.
    group.generation = consumers.target_epoch
    # A member may still use partitions of a topic that no member subscribes to now.
    names = _names({*context.topics.names(), *consumers.subscribed()}, context.topics)
    for member_id, member in consumers.members.items():
        group.add(_classic(member_id, member, consumers, names), CONSUMER)
    group.protocol = group.vote()
    group.topics = group.subscribed()
    group.enter(STABLE, context.now_ms)
    # The first of these records delete the records of the consumer protocol.
    effects.append(AppendRecords(group, group.records()))
    effects.append(GroupConverted(group.group_id, "classic"))
    return effects + classic_transitions.restart_rebalance(
        group, context.now_ms, rules=context.rules
    )


def _first_protocols(consumers: ConsumerGroup) -> Sequence[str]:
    """Return the protocols of the first member."""
    member = next(iter(consumers.members.values()))
    assert member.classic is not None
    return [name for name, _ in member.classic.protocols]


def _classic(
    member_id: str,
    member: ConsumerMember,
    consumers: ConsumerGroup,
    names: Mapping[bytes, str],
) -> ClassicGroupMember:
    assert member.classic is not None
    current = consumers.current(member_id)
    return ClassicGroupMember(
        member_id=member_id,
        instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        session_timeout_ms=member.classic.session_timeout_ms,
        protocols=member.classic.protocols,
        # The member may use partitions of both sets. It does not receive this
        # assignment, because the group rebalances at once.
        assignment=_encoded(current.assigned | current.revoking, names),
    )


def _names(names: Iterable[str], topics: Topics) -> dict[bytes, str]:
    """Return the names of existing topics by topic id."""
    found: dict[bytes, str] = {}
    for name in names:
        facts = topics.id_and_count(name)
        if facts is not None:
            found[facts[0]] = name
    return found


def _encoded(partitions: Partitions, names: Mapping[bytes, str]) -> bytes:
    """Encode an assignment for members of the classic protocol."""
    # Sorted, so that an unchanged assignment has the same bytes.
    return assignment_value(
        sorted(
            (names[topic_id], number)
            for topic_id, number in partitions
            if topic_id in names
        )
    )


# -- requests of members of the classic protocol ---------------------------------------


def join(
    group: Group,
    request: Join,
    waiter: Waiter,
    context: StepContext,
    *,
    new_id: Callable[[], str],
) -> list[Effect]:
    """Carry out a Join that classic_transitions.check_join() accepted.

    The reply is Joined or JoinRefused.
    """
    step = _ClassicStep(group, context)
    member_id = request.member_id
    if not member_id:
        member_id = classic_transitions.new_member_id(request, new_id)
        # A lost answer must not leave a member that never returns. No pending id is
        # stored: any id may join.
        if request.requires_member_id and request.instance_id is None:
            error = step.check_join(request, member_id)
            return [
                Reply(
                    waiter,
                    JoinRefused(error or GroupError.MEMBER_ID_REQUIRED, member_id),
                )
            ]
    try:
        result: Joined | JoinRefused = step.join(request, member_id)
    except Refused as refused:
        step.undo()
        result = JoinRefused(refused.error, request.member_id)
    step.finish([(waiter, result)])
    return step.effects


def sync(
    group: Group, request: Sync, waiter: Waiter, context: StepContext
) -> list[Effect]:
    step = _ClassicStep(group, context)
    step.finish([(waiter, step.sync(request))])
    return step.effects


def heartbeat(
    group: Group,
    member_id: str,
    instance_id: str | None,
    generation: int,
    context: StepContext,
) -> tuple[GroupError | None, list[Effect]]:
    step = _ClassicStep(group, context)
    error = step.heartbeat(member_id, instance_id, generation)
    return error, step.effects


def leave(
    group: Group, members: Sequence[tuple[str, str | None]], context: StepContext
) -> tuple[list[GroupError | None], list[Effect]]:
    """Remove (member id, instance id) pairs; return an error or None for each.

    An instance id alone is sufficient.
    """
    step = _ClassicStep(group, context)
    results = [step.leave(member_id, instance_id) for member_id, instance_id in members]
    step.finish([])
    return results, step.effects


class _ClassicStep(consumer_transitions.HeartbeatStep):
    """A step caused by a request of the classic protocol."""

    # -- joining

    def check_join(self, request: Join, member_id: str) -> GroupError | None:
        """Check a Join against the group; return None if the member may join."""
        consumers = self.consumers
        names = [name for name, _ in request.protocols]
        if classic_transitions.is_too_long(member_id):
            return GroupError.INVALID_REQUEST
        if (
            # A member that rejoins is counted already.
            member_id not in consumers.members
            and len(consumers.members) >= self.context.rules.consumer_max_size
        ):
            return GroupError.GROUP_MAX_SIZE_REACHED
        others = [
            member.classic.protocols
            for name, member in consumers.members.items()
            if name != member_id and member.classic
        ]
        if classic_transitions.exceeds_limit(request, others, self.context.rules):
            return GroupError.INVALID_REQUEST
        if (
            not consumers.supports(request.protocol_type, names)
            or self._subscription(request) is None
        ):
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
        return None

    def _subscription(self, request: Join) -> Subscription | None:
        """Return the subscription of the member's preferred protocol, which it will
        use.
        """
        # The subscription is in the metadata of a protocol.
        if not request.protocols:
            return None
        return read_subscription(request.protocols[0][1])

    def join(self, request: Join, member_id: str) -> Joined:
        error = self.check_join(request, member_id)
        if error is not None:
            raise Refused(error, "")
        subscription = self._subscription(request)
        assert subscription is not None, "check_join() has checked this"
        if member_id not in self.consumers.members and subscription.owned:
            # The member was removed, and its partitions may have new owners. The error
            # makes the client give them up.
            raise consumer_transitions.unknown(member_id)
        self._check_joining_ids(request, member_id)
        is_changed = self._store_classic_member(request, member_id, subscription)
        self._bump_epoch(is_changed)
        self._compute_targets()
        owned = _with_ids(subscription.owned, self.context.topics)
        current = self._reconcile(member_id, owned)
        self._renew(member_id)
        self.stop_rejoin(member_id)
        self.stop_sync(member_id)
        # A member that never requests its assignment would keep its partitions.
        self.consumers.syncs.add(member_id)
        self._set_timer(FirstSyncEnds(member_id), member_id)
        return Joined(
            generation=current.member_epoch,
            protocol_type=CONSUMER,
            protocol=request.protocols[0][0],
            # The broker assigns partitions, so no member leads.
            leader="",
            member_id=member_id,
        )

    def _check_joining_ids(self, request: Join, member_id: str) -> None:
        """Check the ids of a member that joins.

        A static member that returns without its id replaces its old member.
        """
        consumers = self.consumers
        instance_id = request.instance_id
        # The id belongs to a member of the consumer protocol.
        if member_id in consumers.members and not consumers.is_classic(member_id):
            raise consumer_transitions.unknown(member_id)
        if instance_id is None:
            return
        holder = consumers.static.get(instance_id)
        if not request.member_id:
            # The static member was restarted, and has lost its id.
            if holder is not None:
                self._replace(holder, member_id)
        elif holder is None:
            raise consumer_transitions.unknown(member_id)
        elif holder != member_id:
            raise Refused(
                GroupError.FENCED_INSTANCE_ID,
                f"another member is instance {instance_id}",
            )

    def _store_classic_member(
        self, request: Join, member_id: str, subscription: Subscription
    ) -> bool:
        """Store the member data of a Join; return whether the subscription has changed."""
        before = self.consumers.members.get(member_id)
        member = ConsumerMember(
            instance_id=request.instance_id,
            rack_id=subscription.rack_id,
            client_id=request.client_id,
            client_host=request.client_host,
            topic_names=tuple(sorted(set(subscription.topics))),
            rebalance_timeout_ms=rebalance_timeout_ms(request),
            classic=ClassicMember(request.session_timeout_ms, request.protocols),
        )
        if member != before:
            self._put((RecordKind.MEMBER, member_id), member)
        if before is None:
            return True
        # Classic members subscribe to names only.
        self._forget_pattern(before.pattern)
        return (member.topic_names, member.pattern) != (
            before.topic_names,
            before.pattern,
        )

    # -- requests of a member that has joined

    def _check(
        self, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        consumers = self.consumers
        error = consumers.check_member(member_id, instance_id)
        if error is not None:
            return error
        if not consumers.is_classic(member_id):
            return GroupError.UNKNOWN_MEMBER_ID
        # The generation of a classic member is its member epoch.
        if generation != consumers.current(member_id).member_epoch:
            return GroupError.ILLEGAL_GENERATION
        return None

    def sync(self, request: Sync) -> SyncResult | GroupError:
        member_id = request.member_id
        error = self._check(member_id, request.instance_id, request.generation)
        if error is not None:
            return error
        current = self.consumers.current(member_id)
        # A member that must give up partitions gets its assignment. Its client then
        # gives up all other partitions and rejoins.
        if (
            self.consumers.epoch > current.member_epoch
            and current.state is not MemberState.UNREVOKED
        ):
            self._request_rejoin(member_id)
            return GroupError.REBALANCE_IN_PROGRESS
        classic = self.consumers.members[member_id].classic
        assert classic is not None, "_check() has checked this"
        protocol = classic.protocols[0][0]
        if request.protocol_type not in (None, CONSUMER) or request.protocol not in (
            None,
            protocol,
        ):
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
        self.stop_sync(member_id)
        self._renew(member_id)
        # The response must not contain topics that the client may not describe.
        visible_topics = filter(request.may_see, self.consumers.subscribed())
        names = _names(visible_topics, self.context.topics)
        assignment = _encoded(current.assigned, names)
        return SyncResult(
            protocol_type=CONSUMER, protocol=protocol, assignment=assignment
        )

    def heartbeat(
        self, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        error = self._check(member_id, instance_id, generation)
        if error is not None:
            return error
        self._renew(member_id)
        consumers = self.consumers
        current = consumers.current(member_id)
        # Another member has released the partitions that this member waits for.
        is_free = (
            current.state is MemberState.UNRELEASED
            and not consumers.waits_for_others(member_id)
        )
        if (
            current.member_epoch < consumers.epoch
            or current.state is MemberState.UNREVOKED
            or is_free
        ):
            self._request_rejoin(member_id)
            return GroupError.REBALANCE_IN_PROGRESS
        return None

    def _request_rejoin(self, member_id: str) -> None:
        if member_id not in self.consumers.rejoins:
            self.consumers.rejoins.add(member_id)
            self._set_timer(RejoinEnds(member_id), member_id)

    def _set_timer(self, timeout: RejoinEnds | FirstSyncEnds, member_id: str) -> None:
        timeout_ms = max(0, self.consumers.members[member_id].rebalance_timeout_ms)
        self.effects.append(
            SetTimer(self.group.group_id, timeout, self.context.now_ms + timeout_ms)
        )

    def leave(self, member_id: str, instance_id: str | None) -> GroupError | None:
        consumers = self.consumers
        if not member_id and instance_id is not None:
            member_id = consumers.static.get(instance_id, "")
        error = consumers.check_member(member_id, instance_id)
        if error is not None:
            return error
        if not consumers.is_classic(member_id):
            return GroupError.UNKNOWN_MEMBER_ID
        self._remove(member_id)
        return None
