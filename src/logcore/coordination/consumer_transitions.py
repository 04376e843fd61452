"""Heartbeats of the consumer protocol (KIP-848), with which members join, subscribe,
get partitions and leave.

Rules (broker reference 4.3 and 4.4; consumer_group.py defines a group):
- A step changes the facts at once and returns their records. Steps made while a batch
  is being stored are stored together in the next batch. A request is answered when all
  facts that its answer depends on are durable.
- If records cannot be stored, the facts get their former values, and all waiting
  members get an error and retry. Such records may be on disk nevertheless, so the facts
  are written again before the next answer.
- A partition moves from one member to another in two steps. In the first step its
  owner confirms that it gave the partition up, or the owner is removed.
- Only heartbeats renew a session.

Each function changes one group and returns the effects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Final

import attrs

from logcore.coordination import classic_transitions
from logcore.coordination.classic_group import DEAD, EMPTY, Group
from logcore.coordination.consumer_assignors import ASSIGNORS
from logcore.coordination.consumer_group import (
    AWAY,
    NO_PARTITIONS,
    Compile,
    ConsumerGroup,
    Fact,
    StepChanges,
    Topics,
)
from logcore.coordination.effects import (
    AppendRecords,
    CancelTimer,
    ConsumersChanged,
    Effect,
    GroupEmptied,
    LateMemberRemoved,
    Reply,
    RevocationEnded,
    SessionEnded,
    SetTimer,
    TargetsChanged,
)
from logcore.coordination.group_requests import (
    ConsumerHeartbeat,
    FirstSyncEnds,
    GroupError,
    HeartbeatAccepted,
    HeartbeatRefused,
    Joined,
    JoinRefused,
    RejoinEnds,
    Result,
    RevocationEnds,
    Rules,
    SessionEnds,
    Waiter,
)
from logcore.format.consumer_group_records import (
    ConsumerMember,
    ConsumerValue,
    Current,
    GroupEpoch,
    Partitions,
    RecordKind,
    Resolved,
)

#: Member epochs with a special meaning; AWAY of consumer_group.py is another one.
_JOINS: Final = 0
_LEAVES: Final = -1
#: Maximum size of the steps that are stored together. By Kafka's defaults a batch has
#: at most 1 MiB.
_BATCH_BYTES: Final = 256 << 10


@attrs.frozen(kw_only=True)
class StepContext:
    """The inputs of a step besides the group and the request."""

    rules: Rules
    topics: Topics
    compile: Compile
    now_ms: int


def check_heartbeat(
    request: ConsumerHeartbeat, *, may_omit_member_id: bool
) -> HeartbeatRefused | None:
    """Check a heartbeat without its group; return None if it is valid.

    With `may_omit_member_id`, a new member without an id gets one.
    """
    text = _find_flaw(request, may_omit_member_id)
    if text:
        return HeartbeatRefused(GroupError.INVALID_REQUEST, text)
    # The broker assigns, so a client cannot bring its own assignor.
    if request.assignor is not None and request.assignor not in ASSIGNORS:
        return HeartbeatRefused(
            GroupError.UNSUPPORTED_ASSIGNOR,
            f"assignor {request.assignor} is not among {', '.join(ASSIGNORS)}",
        )
    return None


def _find_flaw(request: ConsumerHeartbeat, may_omit_member_id: bool) -> str:
    # null means that the field is not set. An empty text is a mistake.
    for name, text in (
        ("group id", request.group_id),
        ("instance id", request.instance_id),
        ("rack id", request.rack_id),
    ):
        if text == "":
            return f"the {name} is empty"
    texts = (
        request.group_id,
        request.member_id,
        request.instance_id or "",
        request.pattern or "",
    )
    if any(map(classic_transitions.is_too_long, texts)):
        return "a text is too long"
    # Since KIP-1082, a member chooses its id before it joins.
    if not request.member_id and (
        not may_omit_member_id
        or request.member_epoch > 0
        or request.member_epoch == _LEAVES
    ):
        return "the member id is empty"
    # Kafka requires these fields of a new member, which has nothing that they could
    # default to.
    if request.member_epoch == _JOINS:
        if request.rebalance_timeout_ms == -1:
            return "a joining member must give its rebalance timeout"
        # A member that was fenced must have given up its partitions, because another
        # member may have them.
        if request.owned is None or request.owned:
            return "a joining member must report that it owns no partition"
        if request.topic_names is None and request.pattern is None:
            return "a joining member must give its subscription"
    # The partitions of the member remain reserved for its instance id.
    if request.member_epoch == AWAY and request.instance_id is None:
        return "only a member with an instance id may leave temporarily"
    if request.member_epoch < AWAY:
        return f"there is no member epoch {request.member_epoch}"
    return ""


# -- transitions -----------------------------------------------------------------------


def heartbeat(
    group: Group,
    request: ConsumerHeartbeat,
    waiter: Waiter,
    context: StepContext,
    *,
    pending_tombstones: Iterable[Fact] = (),
) -> list[Effect]:
    """Carry out a heartbeat that check_heartbeat() accepted.

    A refused heartbeat changes nothing. `pending_tombstones` contains facts without
    records, because the group used the classic protocol before. Their records are
    stored with the records of the first step that is not refused.
    """
    step = HeartbeatStep(group, context)
    try:
        result: Result = step.consumer_heartbeat(request)
    # The checks run during the step, after some changes were made.
    except Refused as refused:
        step.undo()
        result = refused.result
    else:
        step.consumers.unsure.update(dict.fromkeys(pending_tombstones))
    step.finish([(waiter, result)])
    return step.effects


def timed_out(
    group: Group,
    timeout: SessionEnds | RevocationEnds | RejoinEnds | FirstSyncEnds,
    context: StepContext,
) -> list[Effect]:
    """Handle the expiry of a SetTimer effect."""
    step = HeartbeatStep(group, context)
    match timeout:
        case SessionEnds(member_id):
            step.end_session(member_id)
        case RevocationEnds(member_id):
            step.end_revocation(member_id)
        # A classic member has not rejoined, and the others wait for its partitions.
        case RejoinEnds(member_id):
            step.consumers.rejoins.discard(member_id)
            step.remove_late(member_id)
        case FirstSyncEnds(member_id):
            step.consumers.syncs.discard(member_id)
            step.remove_late(member_id)
    step.finish([])
    return step.effects


def stored(
    group: Group, error: GroupError | None, context: StepContext
) -> list[Effect]:
    """Handle the end of an AppendRecords effect.

    Its records are durable, or `error` is set.
    """
    step = HeartbeatStep(group, context)
    if group.state == DEAD:
        # The group was deleted while its records were being stored. The members must
        # find another group.
        step.answer_stored(error or GroupError.NOT_COORDINATOR)
    elif error is None:
        step.have_stored()
    else:
        step.have_failed(error)
    return step.effects


def begin_sessions(group: Group, context: StepContext) -> list[Effect]:
    """Begin the sessions and revocation timers of a group that was read from disk."""
    step = HeartbeatStep(group, context)
    step.update_timers(
        [(RecordKind.CURRENT, member_id) for member_id in step.consumers.members]
    )
    return step.effects


def mark_dead(group: Group) -> list[Effect]:
    """Make a group of either protocol Dead and cancel all its timers.

    Requests that wait for queued records are refused. stored() answers requests that
    wait for records which are being stored.
    """
    effects: list[Effect] = []
    consumers = group.consumers
    if consumers is not None:
        # The expiry of a timer looks up its group, which no longer exists.
        effects += forget_timers(group, consumers)
        for changes in consumers.queued:
            for waiter, result in changes.answers:
                effects.append(
                    Reply(
                        waiter,
                        error_result(
                            result, GroupError.NOT_COORDINATOR, "the group was deleted"
                        ),
                    )
                )
        consumers.queued.clear()
    return effects + classic_transitions.mark_dead(group)


def forget_timers(group: Group, consumers: ConsumerGroup) -> list[Effect]:
    """Cancel the timers of all members."""
    effects: list[Effect] = []
    for member_ids, timeout in (
        (list(consumers.timers_ms), SessionEnds),
        (sorted(consumers.revocations), RevocationEnds),
        (sorted(consumers.rejoins), RejoinEnds),
        (sorted(consumers.syncs), FirstSyncEnds),
    ):
        effects += [
            CancelTimer(group.group_id, timeout(member_id)) for member_id in member_ids
        ]
    consumers.timers_ms.clear()
    consumers.revocations.clear()
    consumers.rejoins.clear()
    consumers.syncs.clear()
    return effects


def error_result(result: Result, error: GroupError, text: str) -> Result:
    """Return an error of the same request type as `result`."""
    # Each protocol has its own form of a refused request.
    if isinstance(result, HeartbeatAccepted | HeartbeatRefused):
        return HeartbeatRefused(error, text)
    if isinstance(result, Joined | JoinRefused):
        return JoinRefused(error, "")
    return error


class Refused(Exception):
    """Ends a step; its changes are undone."""

    def __init__(self, error: GroupError, text: str) -> None:
        super().__init__(text)
        self.error = error
        self.result = HeartbeatRefused(error, text)


class HeartbeatStep:
    """One transition in progress: the group it changes, its time, and the effects so
    far.
    """

    def __init__(self, group: Group, context: StepContext) -> None:
        assert group.consumers is not None
        self.group = group
        self.consumers: ConsumerGroup = group.consumers
        self.context = context
        self.effects: list[Effect] = []
        #: The changes of this step and their records.
        self._changes = StepChanges()
        #: Reports about the step, which undo() drops.
        self._events: list[Effect] = []

    # -- facts and their records

    def _put(self, fact: Fact, value: ConsumerValue) -> None:
        # The former value is read before apply_record() replaces it.
        self._changes.previous_values.append((fact, self.consumers.value_of(fact)))
        self._changes.records.append(self.consumers.record(fact, value))
        self.consumers.apply_record(fact, value)

    def undo(self) -> None:
        """Undo the changes of this step."""
        self._undo(self._changes)
        self._changes = StepChanges()
        self._events = []

    def _undo(self, changes: StepChanges) -> None:
        # In reverse, because a step may change a fact twice.
        for fact, value in reversed(changes.previous_values):
            self.consumers.apply_record(fact, value)
        # Both depend on the facts, and are computed again.
        self.consumers.applied_topics_version = None
        self.consumers.pattern_versions.clear()

    def finish(self, answers: list[tuple[Waiter, Result]]) -> None:
        """Queue the records, and the answers to send once these and all earlier records
        are durable.
        """
        consumers = self.consumers
        changes = self._changes
        if changes.records:
            changes.answers = answers
            consumers.queued.append(changes)
            self.update_timers(fact for fact, _ in changes.previous_values)
            self._enter()
        elif consumers.is_busy:
            last = consumers.storing[-1]
            # This step changed nothing, but its answer may depend on records that are
            # being stored. The answer is sent with the last of them.
            if consumers.queued:
                last = consumers.queued[-1]
            last.answers += answers
        elif consumers.unsure and answers:
            # The disk may contain other facts. If a crash restored those, they would
            # contradict the answer.
            changes.answers = answers
            consumers.queued.append(changes)
        else:
            self.effects += [Reply(waiter, result) for waiter, result in answers]
        self.effects += self._events
        self._store()

    def _enter(self) -> None:
        """Update the state of the Group from the state of its members."""
        before = self.group.state
        self.group.enter(self.consumers.state, self.context.now_ms)
        # Only the transition is reported, not each step of an empty group.
        if self.group.state == EMPTY != before:
            self.effects.append(GroupEmptied(self.group.group_id))

    def _store(self) -> None:
        consumers = self.consumers
        # One batch at a time: steps that arrive while it is stored share the next one.
        if consumers.is_busy or not consumers.queued:
            return
        count = _fitting(consumers.queued)
        consumers.storing = consumers.queued[:count]
        consumers.queued = consumers.queued[count:]
        changed = {
            fact for changes in consumers.storing for fact, _ in changes.previous_values
        }
        # value_of() returns the newest values. These must belong to this batch, not to
        # a later one.
        assert not (consumers.unsure and consumers.queued), (
            "after a failure, all queued steps fit into one batch"
        )
        again = [fact for fact in consumers.unsure if fact not in changed]
        records = [consumers.record(fact, consumers.value_of(fact)) for fact in again]
        for changes in consumers.storing:
            records += changes.records
        self.effects.append(
            AppendRecords(self.group, tuple(records), ConsumersChanged())
        )

    def have_stored(self) -> None:
        # The batch began with all unsure facts, so that the disk agrees with memory
        # again.
        self.consumers.unsure.clear()
        self.answer_stored(None)
        self._store()

    def have_failed(self, error: GroupError) -> None:
        consumers = self.consumers
        # The queued steps fail too: they were decided on facts that are undone here.
        failed_steps = [*consumers.storing, *consumers.queued]
        # Newest first, so that each fact ends at its value before the first of these
        # steps.
        for changes in reversed(failed_steps):
            self._undo(changes)
        consumers.storing = failed_steps
        consumers.queued = []
        changed_facts = dict.fromkeys(
            fact for changes in failed_steps for fact, _ in changes.previous_values
        )
        consumers.unsure.update(changed_facts)
        self.answer_stored(error)
        # The members are the same as before the failed steps again, so their timers
        # are restored.
        self.update_timers(changed_facts)
        self._enter()

    def answer_stored(self, error: GroupError | None) -> None:
        for changes in self.consumers.storing:
            for waiter, result in changes.answers:
                response = result
                if error is not None:
                    response = error_result(
                        result, error, "the group's records could not be stored"
                    )
                self.effects.append(Reply(waiter, response))
        # From here on, the next batch may be stored.
        self.consumers.storing = []

    # -- timers

    def update_timers(self, changed_facts: Iterable[Fact]) -> None:
        """Set and cancel the timers of the members of these facts."""
        consumers = self.consumers
        for kind, name in dict.fromkeys(changed_facts):
            if kind not in (RecordKind.MEMBER, RecordKind.CURRENT):
                continue
            # The step has removed the member.
            if name not in consumers.members:
                self._forget_timers(name)
                continue
            # The member is new, or was read from disk.
            if name not in consumers.deadlines_ms:
                self._renew(name)
            if kind is RecordKind.CURRENT:
                self._update_revocation_timer(name)
            if not consumers.is_classic(name):
                self._forget_classic_timers(name)

    def _update_revocation_timer(self, member_id: str) -> None:
        consumers = self.consumers
        if consumers.current(member_id).revoking:
            # Others wait for these partitions, so a member has limited time to revoke
            # them.
            timeout_ms = max(0, consumers.members[member_id].rebalance_timeout_ms)
            consumers.revocations.add(member_id)
            self.effects.append(
                SetTimer(
                    self.group.group_id,
                    RevocationEnds(member_id),
                    self.context.now_ms + timeout_ms,
                )
            )
        else:
            self._cancel(consumers.revocations, RevocationEnds(member_id))

    def _forget_timers(self, member_id: str) -> None:
        consumers = self.consumers
        consumers.deadlines_ms.pop(member_id, None)
        if consumers.timers_ms.pop(member_id, None) is not None:
            self.effects.append(
                CancelTimer(self.group.group_id, SessionEnds(member_id))
            )
        self._cancel(consumers.revocations, RevocationEnds(member_id))
        self._forget_classic_timers(member_id)

    def _forget_classic_timers(self, member_id: str) -> None:
        self.stop_rejoin(member_id)
        self.stop_sync(member_id)

    def stop_rejoin(self, member_id: str) -> None:
        self._cancel(self.consumers.rejoins, RejoinEnds(member_id))

    def stop_sync(self, member_id: str) -> None:
        self._cancel(self.consumers.syncs, FirstSyncEnds(member_id))

    def _cancel(
        self,
        awaited_members: set[str],
        timeout: RevocationEnds | RejoinEnds | FirstSyncEnds,
    ) -> None:
        """Cancel a timer, if its member is one of those that have it."""
        if timeout.member_id in awaited_members:
            awaited_members.remove(timeout.member_id)
            self.effects.append(CancelTimer(self.group.group_id, timeout))

    def _renew(self, member_id: str) -> None:
        """Restart a session. A timer that expires before the new deadline is not
        changed.

        When such a timer expires, end_session() sets it again. So most heartbeats set
        no timer.
        """
        timeout_ms = self.context.rules.session_timeout_ms_of(self.group.group_id)
        classic = self.consumers.members[member_id].classic
        if classic is not None:
            timeout_ms = classic.session_timeout_ms
        deadline_ms = self.context.now_ms + timeout_ms
        self.consumers.deadlines_ms[member_id] = deadline_ms
        timer_ms = self.consumers.timers_ms.get(member_id)
        if timer_ms is None or timer_ms > deadline_ms:
            self._set_session(member_id, deadline_ms)

    def _set_session(self, member_id: str, deadline_ms: int) -> None:
        self.consumers.timers_ms[member_id] = deadline_ms
        self.effects.append(
            SetTimer(self.group.group_id, SessionEnds(member_id), deadline_ms)
        )

    def end_session(self, member_id: str) -> None:
        consumers = self.consumers
        consumers.timers_ms.pop(member_id, None)
        deadline_ms = consumers.deadlines_ms[member_id]
        # Heartbeats have moved the deadline since the timer was set.
        if self.context.now_ms < deadline_ms:
            self._set_session(member_id, deadline_ms)
            return
        self._events.append(SessionEnded(self.group.group_id, member_id))
        self._remove(member_id)

    def end_revocation(self, member_id: str) -> None:
        self.consumers.revocations.discard(member_id)
        self._events.append(RevocationEnded(self.group.group_id, member_id))
        self._remove(member_id)

    def remove_late(self, member_id: str) -> None:
        self._events.append(LateMemberRemoved(self.group.group_id, member_id))
        self._remove(member_id)

    # -- a heartbeat

    def consumer_heartbeat(self, request: ConsumerHeartbeat) -> HeartbeatAccepted:
        # Negative epochs announce that the member leaves.
        if request.member_epoch < _JOINS:
            return self._leave(request)
        consumers = self.consumers
        member_id = request.member_id
        if (
            member_id not in consumers.members
            and len(consumers.members) >= self.context.rules.consumer_max_size
        ):
            raise Refused(
                GroupError.GROUP_MAX_SIZE_REACHED,
                "the group has its maximum number of members",
            )
        if request.instance_id is None:
            self._check_dynamic(request)
        else:
            self._check_static(request, request.instance_id)
        before = consumers.current(member_id)
        if not consumers.accepts_epoch(member_id, request.member_epoch, request.owned):
            raise Refused(
                GroupError.FENCED_MEMBER_EPOCH,
                f"the member is at epoch {before.member_epoch}, not at {request.member_epoch}",
            )
        # The order matters: the member's data, the group epoch, all targets, then the
        # progress of this member.
        is_changed = self._store_member_data(request)
        # If this broker cannot parse a pattern that another broker accepted, the
        # topics of the pattern do not change.
        with contextlib.suppress(ValueError):
            pattern = consumers.members[member_id].pattern
            is_changed |= self._refresh_pattern(pattern, request)
        self._bump_epoch(is_changed)
        self._compute_targets()
        current = self._reconcile(member_id, request.owned)
        self._renew(member_id)
        # An unchanged assignment is not sent again, unless the member sent all its
        # fields, as after a lost answer.
        assigned = None
        if _is_full_heartbeat(request) or current.assigned != before.assigned:
            assigned = current.assigned
        return HeartbeatAccepted(
            member_id=member_id,
            member_epoch=current.member_epoch,
            heartbeat_interval_ms=self.context.rules.heartbeat_interval_ms_of(
                self.group.group_id
            ),
            assigned=assigned,
        )

    def _check_dynamic(self, request: ConsumerHeartbeat) -> None:
        is_known = request.member_id in self.consumers.members
        if self.consumers.is_classic(request.member_id) or (
            request.member_epoch != _JOINS and not is_known
        ):
            raise unknown(request.member_id)

    def _check_static(self, request: ConsumerHeartbeat, instance_id: str) -> None:
        """Check the instance id of a static member.

        A member that joins replaces a member that left temporarily. It also replaces a
        classic member, because such a member never announces that it leaves. Unlike
        Kafka, this accepts a member that repeats its own join after a lost answer. In
        Kafka that member must wait until its session expires.
        """
        consumers = self.consumers
        if request.member_epoch != _JOINS:
            self._check_identity(request)
            return
        holder = consumers.static.get(instance_id)
        if holder is None:
            return
        if consumers.is_classic(holder):
            self._replace(holder, request.member_id)
            return
        if holder == request.member_id and consumers.accepts_epoch(
            holder, _JOINS, request.owned
        ):
            return
        if consumers.current(holder).member_epoch != AWAY:
            raise Refused(
                GroupError.UNRELEASED_INSTANCE_ID,
                f"member {holder} is instance {instance_id} and has not left",
            )
        self._replace(holder, request.member_id)

    def _check_identity(self, request: ConsumerHeartbeat) -> None:
        error = self.consumers.check_member(request.member_id, request.instance_id)
        if error is GroupError.FENCED_INSTANCE_ID:
            raise Refused(error, f"another member is instance {request.instance_id}")
        if error is not None or self.consumers.is_classic(request.member_id):
            raise unknown(request.member_id)

    def _replace(self, old_id: str, new_id: str) -> None:
        """Transfer all facts of a member to the new member with the same instance id."""
        consumers = self.consumers
        # The new member uses the consumer protocol.
        member = attrs.evolve(consumers.members[old_id], classic=None)
        target = consumers.targets.get(old_id, NO_PARTITIONS)
        # The new member has not reached any epoch yet.
        current = attrs.evolve(consumers.current(old_id), member_epoch=0)
        self._delete_member(old_id)
        self._put((RecordKind.MEMBER, new_id), member)
        self._put((RecordKind.TARGET, new_id), target)
        self._put((RecordKind.CURRENT, new_id), current)

    def _store_member_data(self, request: ConsumerHeartbeat) -> bool:
        """Store the member data of a request; return whether the subscription has
        changed.
        """
        member_id = request.member_id
        before = self.consumers.members.get(member_id)
        known = before or ConsumerMember()
        given: dict[str, Any] = {
            "client_id": request.client_id,
            "client_host": request.client_host,
        }
        if request.instance_id is not None:
            given["instance_id"] = request.instance_id
        if request.rack_id is not None:
            given["rack_id"] = request.rack_id
        if request.rebalance_timeout_ms != -1:
            given["rebalance_timeout_ms"] = request.rebalance_timeout_ms
        if request.topic_names is not None:
            given["topic_names"] = tuple(sorted(set(request.topic_names)))
        if request.pattern is not None:
            # An empty pattern ends the subscription by pattern.
            given["pattern"] = request.pattern or None
        if request.assignor is not None:
            given["assignor"] = request.assignor
        member = attrs.evolve(known, **given)
        # Most heartbeats change nothing, and then no record is written.
        if member != before:
            self._put((RecordKind.MEMBER, member_id), member)
        if member.pattern != known.pattern:
            self._forget_pattern(known.pattern)
            try:
                self._refresh_pattern(member.pattern, request)
            except ValueError as error:
                raise Refused(
                    GroupError.INVALID_REGULAR_EXPRESSION, str(error)
                ) from error
        return (member.topic_names, member.pattern) != (
            known.topic_names,
            known.pattern,
        )

    # -- topics

    def _refresh_pattern(self, pattern: str | None, request: ConsumerHeartbeat) -> bool:
        """Find the topics that the sender's pattern matches, once for each version of
        the topics; return whether they have changed.

        Topics that the sender may not see are left out. Patterns of other members are
        therefore resolved by the heartbeats of those members.

        Raises:
            ValueError: the pattern is invalid.
        """
        seen = self.consumers.pattern_versions
        if pattern is None or seen.get(pattern) == self.context.topics.version:
            return False
        topics = self.context.topics
        matches = self.context.compile(pattern)
        found = tuple(
            sorted(
                name
                for name in topics.names()
                if matches(name) and request.may_see(name)
            )
        )
        seen[pattern] = topics.version
        before = self.consumers.patterns.get(pattern)
        if before is not None and before.topics == found:
            return False
        self._put(
            (RecordKind.PATTERN, pattern),
            Resolved(found, topics.version, self.context.now_ms),
        )
        return True

    def _forget_pattern(self, pattern: str | None) -> None:
        """Delete the topics of a pattern, unless a member still uses it."""
        if pattern is None or pattern not in self.consumers.patterns:
            return
        if all(member.pattern != pattern for member in self.consumers.members.values()):
            self._put((RecordKind.PATTERN, pattern), None)
            self.consumers.pattern_versions.pop(pattern, None)

    def _bump_epoch(self, is_changed: bool) -> None:
        """Increase the group epoch if a subscription or a subscribed topic has changed.

        A new group gets its first epoch here.
        """
        consumers = self.consumers
        topics = self.context.topics
        is_current = consumers.applied_topics_version == topics.version
        if is_current and not is_changed and consumers.epoch:
            return
        # A new topic changes the epoch only if the group subscribes to it.
        metadata_hash = consumers.hash_of(topics)
        consumers.applied_topics_version = topics.version
        if (
            is_changed
            or not consumers.epoch
            or metadata_hash != consumers.metadata_hash
        ):
            self._put(
                (RecordKind.GROUP, ""), GroupEpoch(consumers.epoch + 1, metadata_hash)
            )

    def _compute_targets(self) -> None:
        consumers = self.consumers
        # The targets were computed for this epoch already.
        if consumers.epoch <= consumers.target_epoch:
            return
        for member_id, target in consumers.compute_targets(self.context.topics).items():
            # Only changed targets are written: a group may have thousands of members.
            if consumers.targets.get(member_id) != target:
                self._put((RecordKind.TARGET, member_id), target)
        self._put((RecordKind.TARGET_EPOCH, ""), consumers.epoch)
        changed = TargetsChanged(
            group_id=self.group.group_id,
            epoch=consumers.epoch,
            member_count=len(consumers.members),
            assignor=consumers.assignor(),
        )
        self._events.append(changed)

    def _reconcile(self, member_id: str, owned: Partitions | None) -> Current:
        current = self.consumers.reconciled(member_id, owned)
        if current is None:
            raise Refused(GroupError.FENCED_MEMBER_EPOCH, "the member must join again")
        if current != self.consumers.currents.get(member_id):
            self._put((RecordKind.CURRENT, member_id), current)
        return current

    # -- leaving

    def _leave(self, request: ConsumerHeartbeat) -> HeartbeatAccepted:
        self._check_identity(request)
        member_id = request.member_id
        if request.member_epoch == AWAY:
            self._leave_temporarily(member_id)
        else:
            self._remove(member_id)
        return HeartbeatAccepted(
            member_id=member_id,
            member_epoch=request.member_epoch,
            heartbeat_interval_ms=0,
        )

    def _leave_temporarily(self, member_id: str) -> None:
        """Record that a static member left temporarily.

        The member keeps its assignment. By leaving it has given up the partitions it
        had to revoke.
        """
        current = self.consumers.current(member_id)
        if current.member_epoch == AWAY:
            return
        self._put(
            (RecordKind.CURRENT, member_id),
            attrs.evolve(current, member_epoch=AWAY, revoking=NO_PARTITIONS),
        )

    def _remove(self, member_id: str) -> None:
        consumers = self.consumers
        pattern = consumers.members[member_id].pattern
        self._delete_member(member_id)
        self._forget_pattern(pattern)
        self._put(
            (RecordKind.GROUP, ""),
            GroupEpoch(consumers.epoch + 1, consumers.hash_of(self.context.topics)),
        )

    def _delete_member(self, member_id: str) -> None:
        for kind in (RecordKind.CURRENT, RecordKind.TARGET, RecordKind.MEMBER):
            self._put((kind, member_id), None)


def _fitting(queued: list[StepChanges]) -> int:
    """Return how many steps, at least one, fit into one batch."""
    size_bytes = 0
    for count, changes in enumerate(queued):
        size_bytes += sum(
            len(key) + len(value or b"") for key, value in changes.records
        )
        if size_bytes > _BATCH_BYTES and count:
            return count
    return len(queued)


def unknown(member_id: str) -> Refused:
    return Refused(
        GroupError.UNKNOWN_MEMBER_ID, f"member {member_id} is not in the group"
    )


def _is_full_heartbeat(request: ConsumerHeartbeat) -> bool:
    """Return whether a request has all fields, as after a lost answer.

    The answer then contains all fields too.
    """
    if request.member_epoch == _JOINS:
        return True
    subscribes = request.topic_names is not None or request.pattern is not None
    return (
        request.rebalance_timeout_ms != -1 and subscribes and request.owned is not None
    )
