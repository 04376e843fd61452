"""The members of a group: joining, syncing, heartbeats, leaving, and timeouts.

Rules (the classic protocol, wire protocol section 7; classic_group.py lists the states):
- A request that must wait for other members is stored as the member's waiter. A second
  request of the same kind ends the first.
- Records come first: a group becomes Stable when its record is durable.
- A lost connection does not remove a member. Sessions end only by timeout. Requests
  renew a session, and waiting suspends it.
- The bytes that members send to each other are not interpreted, except for the
  subscribed topics.

Each function changes one group and returns the effects. If the group is Dead
afterwards, requests must no longer find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import attrs

from logcore.coordination.classic_group import (
    COMPLETING,
    DEAD,
    EMPTY,
    PREPARING,
    STABLE,
    ClassicGroupMember,
    Group,
    rebalance_timeout_ms,
)
from logcore.coordination.effects import (
    AppendRecords,
    Assigned,
    CancelTimer,
    Effect,
    GroupEmptied,
    GroupFormed,
    GroupRebalances,
    Replaced,
    Reply,
    SessionEnded,
    SetTimer,
)
from logcore.coordination.group_requests import (
    DelayEnds,
    FirstSyncEnds,
    GroupError,
    Join,
    JoinEnds,
    JoinRefused,
    PendingEnds,
    RejoinEnds,
    Result,
    RevocationEnds,
    Rules,
    SessionEnds,
    Sync,
    SyncEnds,
    Timeout,
    Waiter,
)

#: How long a new member may wait for its first generation. It has no id yet, so it
#: cannot send heartbeats.
_NEW_MEMBER_MS: Final = 300_000
#: Minimum interval between checks whether to wait for static members that have not
#: rejoined.
_MIN_WAIT_MS: Final = 1_000
_LAST_GENERATION: Final = 2**31 - 1
#: The longest text in a record, whose length is an int16. The limit is lower because
#: ids consist of such texts and a suffix.
_TEXT_BYTES: Final = 32_000
#: Maximum length of the client id in a member id, which each record repeats.
_CLIENT_ID_CHARACTERS: Final = 255


def is_too_long(text: str) -> bool:
    """Return whether a text is too long for a record."""
    # A character has at most four bytes, so most texts need not be encoded.
    return (
        len(text) > _TEXT_BYTES // 4
        and len(text.encode("utf-8", "surrogatepass")) > _TEXT_BYTES
    )


def check_join(request: Join, rules: Rules) -> GroupError | None:
    """Check a Join without its group; return None if it is valid."""
    if not request.group_id or is_too_long(request.group_id):
        return GroupError.INVALID_GROUP_ID
    if (
        not rules.min_session_timeout_ms
        <= request.session_timeout_ms
        <= rules.max_session_timeout_ms
    ):
        return GroupError.INVALID_SESSION_TIMEOUT
    if is_too_long(request.instance_id or "") or is_too_long(request.protocol_type):
        return GroupError.INVALID_REQUEST
    if any(is_too_long(name) for name, _ in request.protocols):
        return GroupError.INVALID_REQUEST
    # Each generation stores this data again.
    if size_of(request.protocols) > rules.member_max_bytes:
        return GroupError.INVALID_REQUEST
    return None


def size_of(protocols: Iterable[tuple[str, bytes]]) -> int:
    """Return the size of the protocols that a member offers."""
    return sum(len(name) + len(metadata) for name, metadata in protocols)


def exceeds_limit(
    request: Join, others: Iterable[Sequence[tuple[str, bytes]]], rules: Rules
) -> bool:
    """Return whether the member data of a group would exceed its memory limit.

    `others` contains the protocols of the other members.
    """
    return (
        size_of(request.protocols) + sum(map(size_of, others)) > rules.members_max_bytes
    )


def are_assignments_too_large(assignments: Mapping[str, bytes], rules: Rules) -> bool:
    sizes = [len(assignment) for assignment in assignments.values()]
    return (
        max(sizes, default=0) > rules.member_max_bytes
        or sum(sizes) > rules.members_max_bytes
    )


def new_member_id(request: Join, new_id: Callable[[], str]) -> str:
    """Return an id for a member that has none yet."""
    if request.instance_id is None:
        return f"{request.client_id[:_CLIENT_ID_CHARACTERS]}-{new_id()}"
    return f"{request.instance_id}-{new_id()}"


# -- transitions -----------------------------------------------------------------------


def join(
    group: Group,
    request: Join,
    waiter: Waiter,
    now_ms: int,
    *,
    rules: Rules,
    new_id: Callable[[], str],
) -> list[Effect]:
    """Handle a request that check_join() accepted: it waits for the next generation, or
    is refused.
    """
    step = ClassicStep(group, rules, now_ms)
    step.join(request, waiter, new_id)
    return step.effects


def sync(
    group: Group, request: Sync, waiter: Waiter, now_ms: int, *, rules: Rules
) -> list[Effect]:
    step = ClassicStep(group, rules, now_ms)
    step.sync(request, waiter)
    return step.effects


def heartbeat(
    group: Group,
    member_id: str,
    instance_id: str | None,
    generation: int,
    now_ms: int,
    *,
    rules: Rules,
) -> tuple[GroupError | None, list[Effect]]:
    error = group.check_generation(member_id, instance_id, generation)
    if error is not None:
        return error, []
    step = ClassicStep(group, rules, now_ms)
    step.renew(group.members[member_id])
    if group.state == PREPARING:
        # The error makes the member rejoin.
        error = GroupError.REBALANCE_IN_PROGRESS
    return error, step.effects


def leave(
    group: Group,
    members: Sequence[tuple[str, str | None]],
    now_ms: int,
    *,
    rules: Rules,
) -> tuple[list[GroupError | None], list[Effect]]:
    """Remove (member id, instance id) pairs; return an error or None for each.

    An instance id alone is sufficient.
    """
    step = ClassicStep(group, rules, now_ms)
    results = [step.leave(member_id, instance_id) for member_id, instance_id in members]
    if any(error is None for error in results):
        if group.state in (STABLE, COMPLETING):
            step.prepare()
        else:
            step.finish_removal()
    return results, step.effects


def absent(
    group: Group, member_ids: Iterable[str], now_ms: int, *, rules: Rules
) -> list[Effect]:
    """Record that static members are absent: they were closed, or their processes died.

    The group removes a member that does not return within its absence_ms.
    """
    step = ClassicStep(group, rules, now_ms)
    for member_id in member_ids:
        member = group.members.get(member_id)
        if (
            # A second report must not extend the absence.
            member is not None
            and member.absence_ms is not None
            and not member.is_absent
        ):
            step.renew(member, member.absence_ms)
            member.is_absent = True
    return step.effects


def withdraw(
    group: Group, waiter: Waiter, now_ms: int, *, rules: Rules
) -> list[Effect]:
    """Withdraw a Join whose sender no longer waits for it.

    A static member that was in the group before remains in it for its absence_ms. If
    the request has been answered, this has no effect.
    """
    member = next(
        (member for member in group.members.values() if member.joining == waiter), None
    )
    if member is None:
        return []
    # No process can return as this member, so other members must not wait for it.
    if member.instance_id is None or member.is_new:
        return leave(group, [(member.member_id, None)], now_ms, rules=rules)[1]
    step = ClassicStep(group, rules, now_ms)
    step.end_join(member, GroupError.UNKNOWN_MEMBER_ID)
    return [*step.effects, *absent(group, [member.member_id], now_ms, rules=rules)]


def timed_out(
    group: Group, timeout: Timeout, now_ms: int, *, rules: Rules
) -> list[Effect]:
    """Handle the expiry of a SetTimer effect."""
    step = ClassicStep(group, rules, now_ms)
    match timeout:
        case SessionEnds(member_id):
            step.end_session(group.members[member_id])
        case PendingEnds(member_id):
            group.pending.discard(member_id)
            step.finish_removal()
        case DelayEnds(remaining_ms):
            group.join_timer = None
            step.end_delay(remaining_ms)
        case JoinEnds():
            group.join_timer = None
            step.complete_join()
        case SyncEnds(generation):
            group.sync_timer = None
            step.end_syncs(generation)
        # Only groups of the consumer protocol set these timers.
        case RevocationEnds() | RejoinEnds() | FirstSyncEnds():
            raise AssertionError("members of this protocol have no such timer")
    return step.effects


def assigned(
    group: Group,
    stored_effect: Assigned,
    error: GroupError | None,
    now_ms: int,
    *,
    rules: Rules,
) -> list[Effect]:
    """Handle the outcome of storing the leader's assignment."""
    step = ClassicStep(group, rules, now_ms)
    step.assigned(stored_effect, error)
    return step.effects


def replaced(
    group: Group,
    stored_effect: Replaced,
    error: GroupError | None,
    now_ms: int,
    *,
    rules: Rules,
) -> list[Effect]:
    """Handle the outcome of storing the record of a group with a replaced static
    member.
    """
    step = ClassicStep(group, rules, now_ms)
    step.replaced(stored_effect, error)
    return step.effects


def begin_sessions(group: Group, now_ms: int, *, rules: Rules) -> list[Effect]:
    """Begin the sessions of all members of a group that was read from disk."""
    step = ClassicStep(group, rules, now_ms)
    for member in group.members.values():
        step.renew(member)
    return step.effects


def restart_rebalance(group: Group, now_ms: int, *, rules: Rules) -> list[Effect]:
    """Begin all sessions and a rebalance: all members must rejoin."""
    step = ClassicStep(group, rules, now_ms)
    for member in group.members.values():
        step.renew(member)
    step.prepare()
    return step.effects


def refuse_waiting(group: Group) -> list[Effect]:
    """Answer all waiting requests with NOT_COORDINATOR."""
    return _reply_to_waiting(group, GroupError.NOT_COORDINATOR)


def end_rebalance(group: Group) -> list[Effect]:
    """Answer all requests that wait for other members; these members must rejoin."""
    return _reply_to_waiting(group, GroupError.REBALANCE_IN_PROGRESS)


def _reply_to_waiting(group: Group, error: GroupError) -> list[Effect]:
    step = ClassicStep(group, None, 0)
    for member in group.members.values():
        step.end_join(member, error)
        step.end_sync(member, error)
    return step.effects


def forget_pending(group: Group) -> list[Effect]:
    """Drop the member ids that were issued and have not joined yet."""
    effects: list[Effect] = [
        CancelTimer(group.group_id, PendingEnds(member_id))
        for member_id in sorted(group.pending)
    ]
    group.pending.clear()
    return effects


def mark_dead(group: Group) -> list[Effect]:
    """Make a group Dead and cancel all its timers. No request is answered."""
    effects = forget_timers(group)
    group.state = DEAD
    return effects


def forget_timers(group: Group) -> list[Effect]:
    step = ClassicStep(group, None, 0)
    for member in group.members.values():
        step.cancel_session(member)
    step.effects += forget_pending(group)
    step.cancel_join_timer()
    step.cancel_sync_timer()
    return step.effects


class ClassicStep:
    """One transition in progress: the group it changes, its time, and the effects so
    far.
    """

    def __init__(self, group: Group, rules: Rules | None, now_ms: int) -> None:
        self.group = group
        self.now_ms = now_ms
        self.effects: list[Effect] = []
        self._rules = rules

    @property
    def rules(self) -> Rules:
        assert self._rules is not None, "this transition depends on no rules"
        return self._rules

    def reply(self, waiter: Waiter, result: Result) -> None:
        self.effects.append(Reply(waiter, result))

    # -- joining

    def join(self, request: Join, waiter: Waiter, new_id: Callable[[], str]) -> None:
        group = self.group
        member_id = request.member_id
        if not group.has_capacity(
            member_id, request.instance_id, self.rules.group_max_size
        ):
            if member_id in group.members:
                self.remove(group.members[member_id])
                self.rebalance_after_loss()
            self.reply(waiter, JoinRefused(GroupError.GROUP_MAX_SIZE_REACHED, ""))
        elif self._exceeds_limit(request):
            self.reply(waiter, JoinRefused(GroupError.INVALID_REQUEST, member_id))
        # One protocol must be common to all members.
        elif not group.supports(
            request.protocol_type, (name for name, _ in request.protocols)
        ):
            self.reply(
                waiter, JoinRefused(GroupError.INCONSISTENT_GROUP_PROTOCOL, member_id)
            )
        elif not member_id:
            self._join_unknown(request, waiter, new_id)
        elif member_id in group.pending:
            self._join_pending(request, waiter)
        else:
            error = group.check_member(member_id, request.instance_id)
            if error is not None:
                self.reply(waiter, JoinRefused(error, member_id))
            else:
                self._join_known(group.members[member_id], request, waiter)

    def _exceeds_limit(self, request: Join) -> bool:
        members = self.group.members.values()
        others = (
            member.protocols
            for member in members
            if member.member_id != request.member_id
        )
        return exceeds_limit(request, others, self.rules)

    def _join_unknown(
        self, request: Join, waiter: Waiter, new_id: Callable[[], str]
    ) -> None:
        """Handle a Join without a member id, from a new or a restarted static member."""
        group = self.group
        instance_id = request.instance_id
        member_id = new_member_id(request, new_id)
        if instance_id is None:
            # A lost response then leaves only a pending id, not a member that all
            # others wait for.
            if request.requires_member_id:
                group.pending.add(member_id)
                self.effects.append(
                    SetTimer(
                        group.group_id,
                        PendingEnds(member_id),
                        self.now_ms + request.session_timeout_ms,
                    )
                )
                self.reply(
                    waiter, JoinRefused(GroupError.MEMBER_ID_REQUIRED, member_id)
                )
                return
        else:
            # A static member that was restarted sends its instance id only.
            present = group.static.get(instance_id)
            if present is not None:
                self._replace_static(group.members[present], member_id, request, waiter)
                return
        self._join_new(member_id, request, waiter)

    def _join_pending(self, request: Join, waiter: Waiter) -> None:
        # Only dynamic members have pending ids.
        if request.instance_id is not None:
            self.reply(
                waiter, JoinRefused(GroupError.UNKNOWN_MEMBER_ID, request.member_id)
            )
            return
        self._forget_pending(request.member_id)
        self._join_new(request.member_id, request, waiter)

    def _forget_pending(self, member_id: str) -> None:
        self.group.pending.discard(member_id)
        self.effects.append(CancelTimer(self.group.group_id, PendingEnds(member_id)))

    def _join_new(self, member_id: str, request: Join, waiter: Waiter) -> None:
        group = self.group
        member = ClassicGroupMember(
            member_id=member_id,
            instance_id=request.instance_id,
            client_id=request.client_id,
            client_host=request.client_host,
            # _park_join() sets these three from the request.
            rebalance_timeout_ms=0,
            session_timeout_ms=0,
            protocols=(),
            is_new=True,
        )
        self._park_join(member, request, waiter)
        if group.state == PREPARING and group.is_first:
            # Restarts the delay of the first members.
            group.has_new_member = True
        group.add(member, request.protocol_type)
        # A new member sends no heartbeats before it has received its id.
        self.renew(member, _NEW_MEMBER_MS)
        self._rebalance()

    def _park_join(
        self, member: ClassicGroupMember, request: Join, waiter: Waiter
    ) -> None:
        """Store the member data of a Join and let it wait for the next generation."""
        # An earlier Join of the member ends, because the member has sent another one.
        self.end_join(member, GroupError.REBALANCE_IN_PROGRESS)
        member.protocols = request.protocols
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = rebalance_timeout_ms(request)
        member.absence_ms = request.absence_ms
        member.joining = waiter

    def _join_known(
        self, member: ClassicGroupMember, request: Join, waiter: Waiter
    ) -> None:
        group = self.group
        is_leader = group.leader == member.member_id
        may_reply_at_once = group.state == COMPLETING or (
            group.state == STABLE and not is_leader
        )
        if may_reply_at_once and member.protocols == request.protocols:
            # The last response may have been lost, so it is sent again. A leader that
            # joins a Stable group requests a rebalance, for example because the number
            # of partitions of a topic has changed.
            self.renew(member)
            self.reply(waiter, group.joined(member))
            return
        self._park_join(member, request, waiter)
        self.renew(member)
        self._rebalance()

    def _replace_static(
        self, old: ClassicGroupMember, member_id: str, request: Join, waiter: Waiter
    ) -> None:
        """Replace a static member that has joined again without its id.

        The new member gets a new id, and the assignment of the old member.
        """
        group = self.group
        previous_leader = group.leader
        self.cancel_session(old)
        self.end_join(old, GroupError.FENCED_INSTANCE_ID)
        self.end_sync(old, GroupError.FENCED_INSTANCE_ID)
        member = attrs.evolve(
            old,
            member_id=member_id,
            client_id=request.client_id,
            client_host=request.client_host,
            is_new=False,
        )
        group.swap(old, member)
        self._park_join(member, request, waiter)
        self.renew(member)
        # If the protocol remains the same, no rebalance begins, so that the restart of
        # the member does not affect the other members.
        if group.state != STABLE or group.vote() != group.protocol:
            self._rebalance()
            return
        group.topics = group.subscribed()
        stored_effect = Replaced(
            old,
            member,
            waiter,
            group.generation,
            previous_leader,
            request.may_skip_assignment,
        )
        self.effects.append(AppendRecords(group, group.records(), stored_effect))

    def replaced(self, stored_effect: Replaced, error: GroupError | None) -> None:
        group = self.group
        member = stored_effect.new
        if (
            member.joining is not stored_effect.waiter
            or group.generation != stored_effect.generation
            or group.state != STABLE
        ):
            # A rebalance has begun and will answer the request.
            return
        member.joining = None
        # The record does not contain the new id, so the old one is valid again.
        if error is not None:
            self.cancel_session(member)
            group.swap(member, stored_effect.old)
            is_absent = stored_effect.old.is_absent
            self.renew(
                stored_effect.old, stored_effect.old.absence_ms if is_absent else None
            )
            stored_effect.old.is_absent = is_absent
            self.reply(stored_effect.waiter, JoinRefused(error, ""))
            return
        self.renew(member)
        joined = group.joined(member)
        if stored_effect.may_skip_assignment:
            joined = attrs.evolve(
                joined, skip_assignment=group.leader == member.member_id
            )
        # A response that names the member as the leader would make it assign again.
        else:
            joined = attrs.evolve(
                joined, members=(), leader=stored_effect.previous_leader or ""
            )
        self.reply(stored_effect.waiter, joined)

    # -- rebalancing

    def _rebalance(self) -> None:
        """Begin a rebalance, or complete the present one if all members have joined."""
        if self.group.state != PREPARING:
            self.prepare()
        elif self.group.is_complete and not self.group.is_first:
            self.complete_join()

    def rebalance_after_loss(self) -> None:
        # An Empty group has no members that could rejoin.
        if self.group.state in (STABLE, COMPLETING, PREPARING):
            self._rebalance()

    def prepare(self) -> None:
        """Begin a rebalance: all members must rejoin."""
        group = self.group
        ended = [
            member for member in group.members.values() if member.syncing is not None
        ]
        # The assignments of this generation were never published.
        if group.state == COMPLETING:
            for member in group.members.values():
                member.assignment = b""
        self.cancel_sync_timer()
        group.is_first = group.state == EMPTY
        group.has_new_member = False
        # The first generation takes partitions from no member.
        if not group.is_first:
            self.effects.append(GroupRebalances(group.group_id))
        group.enter(PREPARING, self.now_ms)
        delay_ms = self.rules.rebalance_delay_ms
        # The members of a service start one after the other. Without a delay, each of
        # them would cause a rebalance.
        if group.is_first and delay_ms:
            remaining_ms = max(group.rebalance_timeout_ms - delay_ms, 0)
            self._set_join_timer(DelayEnds(remaining_ms), delay_ms)
        elif group.is_first or group.is_complete:
            self.complete_join()
        else:
            self._set_join_timer(JoinEnds(), group.rebalance_timeout_ms)
        for member in ended:
            # complete_join() may have removed the member and answered it.
            if member.syncing is not None:
                self._restart_session(member)
                self.end_sync(member, GroupError.REBALANCE_IN_PROGRESS)

    def _set_join_timer(self, timeout: JoinEnds | DelayEnds, wait_ms: int) -> None:
        self.group.join_timer = timeout
        self.effects.append(
            SetTimer(self.group.group_id, timeout, self.now_ms + wait_ms)
        )

    def cancel_join_timer(self) -> None:
        if self.group.join_timer is not None:
            self.effects.append(CancelTimer(self.group.group_id, self.group.join_timer))
            self.group.join_timer = None

    def end_delay(self, remaining_ms: int) -> None:
        """Complete the join phase, or wait again if members joined during the delay."""
        group = self.group
        if not (group.has_new_member and remaining_ms):
            self.complete_join()
            return
        group.has_new_member = False
        delay_ms = self.rules.rebalance_delay_ms
        self._set_join_timer(
            DelayEnds(max(remaining_ms - delay_ms, 0)), min(delay_ms, remaining_ms)
        )

    def complete_join(self) -> None:
        """End the join phase: the members that joined form the next generation."""
        group = self.group
        self.cancel_join_timer()
        assert group.state == PREPARING, group.state
        # A static member remains until its session ends, because it may be
        # restarting.
        for member in list(group.members.values()):
            if member.joining is None and member.instance_id is None:
                self.remove(member)
        if group.members and not group.elect():
            # Only static members are left, and none has joined. Wait until one joins or
            # their sessions end.
            self._set_join_timer(
                JoinEnds(), max(group.rebalance_timeout_ms, _MIN_WAIT_MS)
            )
            return
        # After the largest int32 the generation restarts at 1.
        group.generation = group.generation % _LAST_GENERATION + 1
        group.is_first = False
        group.unsynced.clear()
        if group.members:
            self._begin_generation()
        else:
            self._empty()

    def _empty(self) -> None:
        group = self.group
        # As in Kafka, the protocol type remains in the record of an empty group.
        group.protocol = None
        group.leader = None
        group.topics = group.subscribed()
        group.enter(EMPTY, self.now_ms)
        self.effects.append(GroupEmptied(group.group_id))
        self.effects.append(AppendRecords(group, group.records()))

    def _begin_generation(self) -> None:
        group = self.group
        group.protocol = group.vote()
        group.topics = group.subscribed()
        group.enter(COMPLETING, self.now_ms)
        group.unsynced.update(group.members)
        # A leader that never sends the assignment would block all members.
        group.sync_timer = SyncEnds(group.generation)
        self.effects.append(
            SetTimer(
                group.group_id,
                group.sync_timer,
                self.now_ms + group.rebalance_timeout_ms,
            )
        )
        for member in group.members.values():
            if member.joining is not None:
                self.reply(member.joining, group.joined(member))
                # Its session was suspended while it waited.
                member.joining = None
                self._restart_session(member)
            member.is_new = False

    def end_syncs(self, generation: int) -> None:
        """Remove members that joined but sent no Sync request, because they block the
        others.
        """
        group = self.group
        if (
            group.generation != generation
            or group.state not in (COMPLETING, STABLE)
            or not group.unsynced
        ):
            return
        for member_id in sorted(group.unsynced):
            if member_id in group.members:
                self.remove(group.members[member_id])
        self.prepare()

    def cancel_sync_timer(self) -> None:
        if self.group.sync_timer is not None:
            self.effects.append(CancelTimer(self.group.group_id, self.group.sync_timer))
            self.group.sync_timer = None

    # -- syncing

    def sync(self, request: Sync, waiter: Waiter) -> None:
        group = self.group
        error = self._check_sync(request)
        if error is None and are_assignments_too_large(request.assignments, self.rules):
            error = GroupError.INVALID_REQUEST
        if error is not None:
            self.reply(waiter, error)
            return
        member = group.members[request.member_id]
        self.renew(member)
        if group.state == PREPARING:
            self.reply(waiter, GroupError.REBALANCE_IN_PROGRESS)
            return
        group.unsynced.discard(member.member_id)
        if group.state == STABLE:
            self.reply(waiter, group.synced(member))
            return
        # The member has sent its request again over another connection.
        self.end_sync(member, GroupError.REBALANCE_IN_PROGRESS)
        member.syncing = waiter
        # The leader waits too: assigned() answers all members once the assignments are
        # durable.
        if group.leader == member.member_id:
            stored_effect = Assigned(group.generation, request.assignments)
            self.effects.append(
                AppendRecords(group, group.records(request.assignments), stored_effect)
            )

    def _check_sync(self, request: Sync) -> GroupError | None:
        group = self.group
        error = group.check_generation(
            request.member_id, request.instance_id, request.generation
        )
        if error is not None:
            return error
        if request.protocol_type not in (
            None,
            group.protocol_type,
        ) or request.protocol not in (None, group.protocol):
            return GroupError.INCONSISTENT_GROUP_PROTOCOL
        return None

    def assigned(self, stored_effect: Assigned, error: GroupError | None) -> None:
        group = self.group
        if group.state != COMPLETING or group.generation != stored_effect.generation:
            # A member joined or left in the meantime, and all requests were answered
            # then.
            return
        waiting = [
            member for member in group.members.values() if member.syncing is not None
        ]
        if error is not None:
            for member in waiting:
                self._restart_session(member)
                self.end_sync(member, error)
            self._rebalance()
            return
        for member in group.members.values():
            member.assignment = stored_effect.assignments.get(member.member_id, b"")
        group.enter(STABLE, self.now_ms)
        self.effects.append(
            GroupFormed(
                group_id=group.group_id,
                generation=group.generation,
                member_count=len(group.members),
                protocol=group.protocol,
            )
        )
        for member in waiting:
            waiter = member.syncing
            member.syncing = None
            self._restart_session(member)
            self.reply(waiter, group.synced(member))

    # -- leaving and sessions

    def leave(self, member_id: str, instance_id: str | None) -> GroupError | None:
        group = self.group
        if not member_id and instance_id is not None:
            member_id = group.static.get(instance_id, "")
        if member_id in group.pending:
            self._forget_pending(member_id)
            return None
        error = group.check_member(member_id, instance_id)
        if error is None:
            self.remove(group.members[member_id])
        return error

    def finish_removal(self) -> None:
        """Continue after a member or a pending id was removed: complete a rebalance that
        waited for it, and mark an unused group as Dead.
        """
        if self.group.state == PREPARING:
            self._rebalance()
        elif self.group.is_unused:
            self.group.state = DEAD

    def renew(self, member: ClassicGroupMember, timeout_ms: int | None = None) -> None:
        """Restart a session. A timer that expires before the new deadline is not
        changed.

        When such a timer expires, end_session() sets it again. So most heartbeats set
        no timer.
        """
        if timeout_ms is None:
            timeout_ms = member.session_timeout_ms
        member.is_absent = False
        member.deadline_ms = self.now_ms + timeout_ms
        if member.timer_ms is None or member.timer_ms > member.deadline_ms:
            self._set_session(member)

    def _restart_session(self, member: ClassicGroupMember) -> None:
        """Restart the session of a member whose request is answered.

        The session was suspended while the request waited. The deadline of an absent
        member is not changed.
        """
        if not member.is_absent:
            self.renew(member)

    def _set_session(self, member: ClassicGroupMember) -> None:
        member.timer_ms = member.deadline_ms
        self.effects.append(
            SetTimer(
                self.group.group_id, SessionEnds(member.member_id), member.deadline_ms
            )
        )

    def cancel_session(self, member: ClassicGroupMember) -> None:
        if member.timer_ms is not None:
            self.effects.append(
                CancelTimer(self.group.group_id, SessionEnds(member.member_id))
            )
            member.timer_ms = None

    def end_session(self, member: ClassicGroupMember) -> None:
        member.timer_ms = None
        if self.now_ms < member.deadline_ms:  # renewed since the timer was set
            self._set_session(member)
            return
        # A member with a waiting request cannot send heartbeats; the reply renews its
        # session. New and absent members are removed even while they wait, because
        # they may be dead.
        if member.is_waiting and not member.is_new and not member.is_absent:
            return
        self.effects.append(SessionEnded(self.group.group_id, member.member_id))
        self.remove(member)
        self.rebalance_after_loss()

    def remove(self, member: ClassicGroupMember) -> None:
        self.cancel_session(member)
        self.group.remove_member(member)
        self.end_join(member, GroupError.UNKNOWN_MEMBER_ID)
        self.end_sync(member, GroupError.UNKNOWN_MEMBER_ID)

    def end_join(self, member: ClassicGroupMember, error: GroupError) -> None:
        if member.joining is not None:
            self.reply(member.joining, JoinRefused(error, member.member_id))
            member.joining = None

    def end_sync(self, member: ClassicGroupMember, error: GroupError) -> None:
        if member.syncing is not None:
            self.reply(member.syncing, error)
            member.syncing = None
