"""The coordinator of consumer groups: who is in a group, what each is assigned, and how far it has come.

The classic protocol (wire protocol section 7), a group's states and what moves it from one to the next:

    Empty                --join-->              PreparingRebalance
    PreparingRebalance   --all have rejoined, or their time is over-->  CompletingRebalance, Empty if nobody is left
    CompletingRebalance  --the leader's assignment is on disk-->        Stable
    CompletingRebalance, Stable  --somebody joins, leaves or expires--> PreparingRebalance
    Empty                --deleted, or expired-->  Dead: no request finds it any more

Rules:
- Requests that have to wait for others are Answers in their member; a member never has more than one of each kind.
- What is stored comes first: a group is Stable, and a commit is seen, once its records are on disk (offsets.py).
- A lost connection removes nobody. A session ends only by its timeout, which requests renew and waiting suspends.
- What clients hand to one another in bytes is not looked into, except for the topics they subscribe to.

Not here: the shapes of requests (handlers/group.py), which topics exist, the protocol of KIP-848. Transactional commits
are not taken yet: a group would hold them beside `offsets`, and Groups.commit() would be told of their producer.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs

from logcore.format.grouprecords import (
    OFFSETS_TOPIC,
    Committed,
    Record,
    StoredGroup,
    StoredMember,
    commit_key,
    commit_value,
    group_key,
    group_value,
    subscribed_topics,
)
from logcore.groupoffsets import StoredGroups
from netshim import wire
from netshim.journal import shown
from netshim.offsets import OffsetsTopic
from netshim.state import Answer, Call, State
from netshim.wire import codes

_log = logging.getLogger("netshim")

EMPTY: Final = "Empty"
PREPARING: Final = "PreparingRebalance"
COMPLETING: Final = "CompletingRebalance"
STABLE: Final = "Stable"
DEAD: Final = "Dead"

#: How long a new member may wait for its first generation; it cannot send heartbeats, having no id yet.
_NEW_MEMBER_MS: Final = 300_000
#: How often at most it is looked whether static members that did not rejoin are still to be waited for.
_LEAST_WAIT_MS: Final = 1_000
_RETENTION_MS: Final = 7 * 24 * 3_600_000
_RETENTION_CHECK_MS: Final = 600_000
_CONSUMER: Final = "consumer"
#: Since which version of JoinGroup a new dynamic member is first told its id, and an error has no protocol name.
_MEMBER_ID_SINCE: Final = 4
_NULL_PROTOCOL_SINCE: Final = 7
_SKIP_ASSIGNMENT_SINCE: Final = 9
#: What fits into the records' texts, whose length is an int16, with room for what ids are made longer by.
_TEXT_BYTES: Final = 32_000
_CLIENT_ID_CHARACTERS: Final = 255


# -- one group -----------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Member:
    """One member. joining, syncing: its requests that wait. is_new: until it is told its first generation.

    deadline_ms: when its session ends. timer: looks whether it has, at timer_ms, which may be earlier.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: list[tuple[str, bytes]]
    assignment: bytes = b""
    is_new: bool = False
    joining: Answer | None = None
    join_version: int = 0
    syncing: Answer | None = None
    deadline_ms: int = 0
    timer: int | None = None
    timer_ms: int = 0

    @property
    def is_waiting(self) -> bool:
        return self.joining is not None or self.syncing is not None

    def metadata(self, protocol: str | None) -> bytes:
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")


@attrs.define(eq=False)
class Group:
    """What is known of a group. pending: ids given out to members that have not joined with them, and their timers.

    unsynced: members of this generation that have not asked for their assignment. is_first: the rebalance under way
    began in an empty group. state_ms: since when the group has been in its state. storing: how many commits of each
    offset are on their way to the disk.
    """

    group_id: str
    state: str = EMPTY
    state_ms: int = -1
    generation: int = 0
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = attrs.Factory(dict)
    static: dict[str, str] = attrs.Factory(dict)
    pending: dict[str, int] = attrs.Factory(dict)
    unsynced: set[str] = attrs.Factory(set)
    topics: frozenset[str] | None = None
    offsets: dict[str, dict[int, Committed]] = attrs.Factory(dict)
    storing: Counter[tuple[str, int]] = attrs.Factory(Counter)
    is_first: bool = False
    has_newcomer: bool = False
    join_timer: int | None = None
    sync_timer: int | None = None

    # -- decisions

    def check_member(self, member_id: str, instance_id: str | None) -> int:
        if instance_id is not None:
            present = self.static.get(instance_id)
            if present is None:
                return codes.UNKNOWN_MEMBER_ID
            if present != member_id:
                return codes.FENCED_INSTANCE_ID
        return codes.NONE if member_id in self.members else codes.UNKNOWN_MEMBER_ID

    def has_room(self, member_id: str, instance_id: str | None, most: int) -> bool:
        if self.state == PREPARING:
            waiting = sum(member.joining is not None for member in self.members.values())
            member = self.members.get(member_id)
            return (member is not None and member.joining is not None) or waiting < most
        if self.state == EMPTY or member_id in self.members or len(self.members) < most:
            return True
        return not member_id and instance_id in self.static  # takes the place of the one who was here before

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Whether a member with these protocols could be in the group: one of them has to be everybody's."""
        if not self.members:
            return bool(protocol_type) and any(True for _ in names)
        common = self.common_protocols()
        return protocol_type == self.protocol_type and any(name in common for name in names)

    def common_protocols(self) -> set[str]:
        return set.intersection(*({name for name, _ in member.protocols} for member in self.members.values()))

    def vote(self) -> str:
        """The protocol that most members like best among those that all of them have; of equals, the first voter's."""
        common = self.common_protocols()
        votes = (next(name for name, _ in member.protocols if name in common) for member in self.members.values())
        return Counter(votes).most_common(1)[0][0]

    def subscribed(self) -> frozenset[str] | None:
        """Topics that its members subscribe to; None when that cannot be known, as in a group of no consumers."""
        if self.protocol_type != _CONSUMER:
            return None
        topics: set[str] = set()
        for member in self.members.values():
            subscribed = subscribed_topics(member.metadata(self.protocol))
            if subscribed is None:
                return None
            topics.update(subscribed)
        return frozenset(topics)

    def may_use(self, topic: str) -> bool:
        """Whether a member subscribes to a topic, as far as one can tell."""
        if self.protocol_type != _CONSUMER:
            return False
        return bool(self.members) and (self.topics is None or topic in self.topics)

    @property
    def is_unused(self) -> bool:
        """Whether nobody ever joined it or committed anything."""
        return (
            self.state == EMPTY
            and not self.generation
            and not (self.members or self.pending or self.offsets or self.storing)
        )

    def has_offset(self, topic: str, partition: int) -> bool:
        """Whether an offset is committed, or about to be."""
        return partition in self.offsets.get(topic, ()) or (topic, partition) in self.storing

    def offset_keys(self) -> list[tuple[str, int]]:
        """(topic, partition) of all that is committed, or about to be."""
        present = {(topic, partition) for topic, partitions in self.offsets.items() for partition in partitions}
        return [*present, *(key for key in self.storing if key not in present)]

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether everybody who is known has joined the rebalance under way."""
        return not self.pending and all(member.joining is not None for member in self.members.values())

    def elect(self) -> bool:
        """The leader stays if it has rejoined, else the first who has; False when nobody has."""
        leader = self.members.get(self.leader or "")
        if leader is None or leader.joining is None:
            joined = (member for member in self.members.values() if member.joining is not None)
            leader = next(joined, None)
        if leader is None:
            return False
        self.leader = leader.member_id
        return True

    def expired(self, now_ms: int) -> list[tuple[str, int]]:
        """(topic, partition) of offsets that have been kept long enough (wire protocol section 7, Offsets)."""
        if not self.protocol_type:
            since_ms, kept = -1, frozenset[str]()
        elif self.state == EMPTY:
            since_ms, kept = self.state_ms, frozenset[str]()
        elif self.state == STABLE and self.protocol_type == _CONSUMER and self.topics is not None:
            since_ms, kept = -1, self.topics
        else:
            return []
        return [
            (topic, partition)
            for topic, partitions in self.offsets.items()
            if topic not in kept
            for partition, committed in partitions.items()
            if now_ms
            >= (
                committed.expire_ms
                if committed.expire_ms >= 0
                else (committed.commit_ms if since_ms < 0 else since_ms) + _RETENTION_MS
            )
        ]

    # -- views

    def join_members(self) -> list[Any]:
        """What the leader is told of the members."""
        member_type = wire.JOIN_GROUP.Response.Member
        return [
            member_type(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                metadata=member.metadata(self.protocol),
            )
            for member in self.members.values()
        ]

    def record(self, assignments: Mapping[str, bytes] | None = None) -> Record:
        """The record of the group as it stands, or as it will be with these assignments."""
        members = tuple(
            StoredMember(
                member_id=member.member_id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout_ms=member.rebalance_timeout_ms,
                session_timeout_ms=member.session_timeout_ms,
                subscription=member.metadata(self.protocol),
                assignment=member.assignment if assignments is None else assignments.get(member.member_id, b""),
            )
            for member in self.members.values()
        )
        value = StoredGroup(
            protocol_type=self.protocol_type,
            generation=self.generation,
            protocol=self.protocol,
            leader=self.leader,
            state_ms=self.state_ms,
            members=members,
        )
        return group_key(self.group_id), group_value(value)

    # -- small changes

    def enter(self, state: str, now_ms: int) -> None:
        self.state, self.state_ms = state, now_ms

    def add(self, member: Member, protocol_type: str) -> None:
        if not self.members:
            self.protocol_type = protocol_type
        if self.leader is None:
            self.leader = member.member_id
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.static[member.instance_id] = member.member_id

    def take_out(self, member: Member) -> None:
        self.members.pop(member.member_id, None)
        self.unsynced.discard(member.member_id)
        if member.instance_id is not None and self.static.get(member.instance_id) == member.member_id:
            del self.static[member.instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    def put(self, key: tuple[str, int], committed: Committed) -> None:
        self.offsets.setdefault(key[0], {})[key[1]] = committed

    def forget(self, keys: Iterable[tuple[str, int]]) -> None:
        for topic, partition in keys:
            partitions = self.offsets.get(topic)
            if partitions is not None:
                partitions.pop(partition, None)
                if not partitions:
                    del self.offsets[topic]


# -- all groups ----------------------------------------------------------------------------------------------------


def _new_id() -> str:
    return str(uuid.uuid4())


class Groups:
    """All groups of a broker. new_id: gives the part of a member id that no other has.

    Before anything else is asked of it, load() has to have succeeded.
    """

    def __init__(self, state: State, new_id: Callable[[], str] = _new_id) -> None:
        self._state = state
        self._new_id = new_id
        self._topic = OffsetsTopic(state)
        self._groups: dict[str, Group] = {}
        self._now_ms = 0  # the latest time heard of, for what happens when a disk is done
        self._is_loaded = False
        self._loading: list[Callable[[int], None]] | None = None
        self._check_timer: int | None = None

    # -- loading

    @property
    def is_loaded(self) -> bool:
        return self._is_loaded

    def load(self, now_ms: int, done: Callable[[int], None]) -> None:
        """Reads what is stored, once; done(0) when that is known, done(code) when it cannot be read."""
        self._tell(now_ms)
        if self._is_loaded:
            done(codes.NONE)
        elif self._loading is not None:
            self._loading.append(done)
        else:
            self._loading = [done]
            if self._topic.exists:
                self._state.submit(self._topic.read, self._have_loaded)
            else:
                self._have_loaded(StoredGroups())

    def _have_loaded(self, found: Any) -> None:
        waiting, self._loading = self._loading or [], None
        code = codes.NONE
        if isinstance(found, StoredGroups):
            self._take(found)
            self._is_loaded = True
            self._check_later(self._now_ms)
        else:
            _log.error("%s cannot be read, so no group can be served: %s", OFFSETS_TOPIC, found)
            code = codes.COORDINATOR_NOT_AVAILABLE
        for done in waiting:
            done(code)

    def _take(self, found: StoredGroups) -> None:
        now_ms = self._now_ms
        for group_id in {**found.groups, **found.offsets}:
            group = self._groups[group_id] = Group(group_id, offsets=found.offsets.get(group_id, {}))
            value = found.groups.get(group_id)
            if value is None:
                continue
            group.protocol_type, group.generation = value.protocol_type, value.generation
            group.state_ms = value.state_ms
            if not value.members:
                continue
            group.state = STABLE
            group.protocol, group.leader = value.protocol, value.leader
            for each in value.members:
                timeout_ms = each.session_timeout_ms
                member = Member(
                    each.member_id,
                    each.instance_id,
                    each.client_id,
                    each.client_host,
                    each.rebalance_timeout_ms if each.rebalance_timeout_ms >= 0 else timeout_ms,
                    timeout_ms,
                    [(value.protocol or "", each.subscription)],
                    each.assignment,
                )
                group.add(member, value.protocol_type)
                self._renew(group, member, now_ms)
            if group.leader not in group.members:
                group.leader = next(iter(group.members))
            group.topics = group.subscribed()

    def _say(self, kind: str, now_ms: int, text: str, *values: object) -> None:
        self._state.journal.say(logging.INFO, f"group {kind}", now_ms, text, *values)

    def _tell(self, now_ms: int) -> None:
        self._now_ms = max(self._now_ms, now_ms)

    # -- looking

    def get(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def all(self) -> list[Group]:
        return list(self._groups.values())

    # -- joining

    def join(self, request: Any, call: Call) -> Any:
        """A JoinGroup response, or the Answer that will hold it."""
        now_ms, member_id = call.now_ms, request.member_id
        self._tell(now_ms)
        fail = partial(_join_failure, call.version)
        code = self._check_join(request)
        if code:
            return fail(code, member_id)
        group = self._groups.get(request.group_id)
        if group is None:
            if member_id:
                return fail(codes.UNKNOWN_MEMBER_ID, member_id)
            group = Group(request.group_id)
        if not group.has_room(member_id, request.group_instance_id, self._state.settings.group_max_size):
            if member_id in group.members:
                self._remove(group, group.members[member_id])
                self._rebalance_after_loss(group, now_ms)
            return fail(codes.GROUP_MAX_SIZE_REACHED, "")
        protocols = [(protocol.name, protocol.metadata) for protocol in request.protocols]
        if not group.supports(request.protocol_type, (name for name, _ in protocols)):
            return fail(codes.INCONSISTENT_GROUP_PROTOCOL, member_id)
        self._groups[group.group_id] = group
        if not member_id:
            return self._join_unknown(group, request, protocols, call)
        if member_id in group.pending:
            if request.group_instance_id is not None:  # such an id was given to a dynamic member
                return fail(codes.UNKNOWN_MEMBER_ID, member_id)
            self._state.timers.cancel(group.pending.pop(member_id))
            return self._join_new(group, member_id, request, protocols, call)
        code = group.check_member(member_id, request.group_instance_id)
        if code:
            return fail(code, member_id)
        return self._join_known(group, group.members[member_id], request, protocols, call)

    def _check_join(self, request: Any) -> int:
        if not request.group_id or _is_long(request.group_id):
            return codes.INVALID_GROUP_ID
        settings = self._state.settings
        if not settings.min_session_timeout_ms <= request.session_timeout_ms <= settings.max_session_timeout_ms:
            return codes.INVALID_SESSION_TIMEOUT
        if _is_long(request.group_instance_id or "") or _is_long(request.protocol_type):
            return codes.INVALID_REQUEST
        return codes.INVALID_REQUEST if any(_is_long(each.name) for each in request.protocols) else codes.NONE

    def _join_unknown(self, group: Group, request: Any, protocols: list[tuple[str, bytes]], call: Call) -> Any:
        instance_id = request.group_instance_id
        name = call.client_id[:_CLIENT_ID_CHARACTERS] if instance_id is None else instance_id
        member_id = f"{name}-{self._new_id()}"
        if instance_id is not None:
            present = group.static.get(instance_id)
            if present is not None:
                return self._replace_static(group, group.members[present], member_id, request, protocols, call)
        elif call.version >= _MEMBER_ID_SINCE:
            group.pending[member_id] = self._state.timers.at(
                call.now_ms + request.session_timeout_ms, lambda now_ms: self._expire_pending(group, member_id, now_ms)
            )
            return _join_failure(call.version, codes.MEMBER_ID_REQUIRED, member_id)
        return self._join_new(group, member_id, request, protocols, call)

    def _join_new(
        self, group: Group, member_id: str, request: Any, protocols: list[tuple[str, bytes]], call: Call
    ) -> Answer:
        member = Member(
            member_id, request.group_instance_id, call.client_id, "/" + call.peer, 0, 0, protocols, is_new=True
        )
        answer = self._park_join(group, member, request, protocols, call)
        if group.state == PREPARING and group.is_first:
            group.has_newcomer = True
        group.add(member, request.protocol_type)
        self._renew(group, member, call.now_ms, _NEW_MEMBER_MS)
        self._rebalance(group, call.now_ms)
        return answer

    def _park_join(
        self, group: Group, member: Member, request: Any, protocols: list[tuple[str, bytes]], call: Call
    ) -> Answer:
        """Lets the request wait for the next generation, with what it says of the member."""
        if member.joining is not None:  # the same member asks again, over another connection: that one is heard
            _end_join(member, codes.REBALANCE_IN_PROGRESS)
        member.protocols = protocols
        member.session_timeout_ms = request.session_timeout_ms
        timeout_ms = request.rebalance_timeout_ms
        member.rebalance_timeout_ms = request.session_timeout_ms if timeout_ms < 0 else timeout_ms
        member.joining, member.join_version = Answer(), call.version
        return member.joining

    def _join_known(
        self, group: Group, member: Member, request: Any, protocols: list[tuple[str, bytes]], call: Call
    ) -> Any:
        is_same = member.protocols == protocols
        is_leader = group.leader == member.member_id
        if is_same and (group.state == COMPLETING or (group.state == STABLE and not is_leader)):
            # It may not have heard the answer to its last request.
            self._renew(group, member, call.now_ms)
            return self._joined(group, member, told=is_leader)
        answer = self._park_join(group, member, request, protocols, call)
        self._renew(group, member, call.now_ms)
        self._rebalance(group, call.now_ms)
        return answer

    def _joined(self, group: Group, member: Member, *, told: bool, **changed: Any) -> Any:
        """The response that tells a member its generation; told: of the other members too."""
        facts: dict[str, Any] = {
            "generation_id": group.generation,
            "protocol_type": group.protocol_type,
            "protocol_name": group.protocol or "",
            "leader": group.leader or "",
            "member_id": member.member_id,
            "members": group.join_members() if told else [],
            **changed,
        }
        return wire.JOIN_GROUP.Response(**facts)

    def _replace_static(
        self, group: Group, old: Member, member_id: str, request: Any, protocols: list[tuple[str, bytes]], call: Call
    ) -> Any:
        """A static member came back without its id: it gets a new one, and what the old one had."""
        now_ms, leader_before = call.now_ms, group.leader
        self._cancel_timer(old)
        _end_join(old, codes.FENCED_INSTANCE_ID)
        _end_sync(old, codes.FENCED_INSTANCE_ID)
        member = attrs.evolve(
            old, member_id=member_id, client_id=call.client_id, client_host="/" + call.peer, is_new=False
        )
        self._swap(group, old, member)
        answer = self._park_join(group, member, request, protocols, call)
        self._renew(group, member, now_ms)
        if group.state != STABLE or group.vote() != group.protocol:
            self._rebalance(group, now_ms)
            return answer

        generation = group.generation
        group.topics = group.subscribed()

        def stored(code: int) -> None:
            if member.joining is not answer or group.generation != generation or group.state != STABLE:
                return  # a rebalance has begun, and answers it
            if code:
                reverted = attrs.evolve(old, timer=None)
                member.joining = None
                self._cancel_timer(member)
                self._swap(group, member, reverted)
                self._renew(group, reverted, self._now_ms)
                answer.set(_join_failure(call.version, code, ""))
                return
            is_leader = group.leader == member_id
            member.joining = None
            self._renew(group, member, self._now_ms)
            if call.version >= _SKIP_ASSIGNMENT_SINCE:
                answer.set(self._joined(group, member, told=is_leader, skip_assignment=is_leader))
            else:  # not to be told that it leads: it would assign anew
                answer.set(self._joined(group, member, told=False, leader=leader_before or ""))

        self._topic.append(group.group_id, [group.record()], now_ms, stored)
        return answer

    def _swap(self, group: Group, old: Member, new: Member) -> None:
        """Puts one member in the place of another, also in the order of joining."""
        group.members = {
            new.member_id if member is old else member_id: new if member is old else member
            for member_id, member in group.members.items()
        }
        if new.instance_id is not None:
            group.static[new.instance_id] = new.member_id
        if group.leader == old.member_id:
            group.leader = new.member_id
        if old.member_id in group.unsynced:
            group.unsynced.discard(old.member_id)
            group.unsynced.add(new.member_id)

    # -- rebalancing

    def _rebalance(self, group: Group, now_ms: int) -> None:
        """Begins a rebalance, or ends the one under way if that waited for nobody else."""
        if group.state != PREPARING:
            self._prepare(group, now_ms)
        elif group.is_complete and not group.is_first:
            self._complete_join(group, now_ms)

    def _rebalance_after_loss(self, group: Group, now_ms: int) -> None:
        if group.state in (STABLE, COMPLETING, PREPARING):
            self._rebalance(group, now_ms)

    def _prepare(self, group: Group, now_ms: int) -> None:
        timers = self._state.timers
        ended = [member for member in group.members.values() if member.syncing is not None]
        if group.state == COMPLETING:
            for member in group.members.values():
                member.assignment = b""
        self._cancel_sync_timer(group)
        group.is_first, group.has_newcomer = group.state == EMPTY, False
        if not group.is_first:
            self._say("rebalances", now_ms, "group %s rebalances: members came, left or changed", shown(group.group_id))
        group.enter(PREPARING, now_ms)
        delay_ms = self._state.settings.rebalance_delay_ms
        if group.is_first and delay_ms:
            left_ms = max(group.rebalance_timeout_ms - delay_ms, 0)
            group.join_timer = timers.at(now_ms + delay_ms, lambda now_ms: self._end_delay(group, left_ms, now_ms))
        elif group.is_first or group.is_complete:
            self._complete_join(group, now_ms)
        else:
            self._await_joins(group, now_ms)
        for member in ended:
            if member.syncing is not None:
                self._renew(group, member, now_ms)
                _end_sync(member, codes.REBALANCE_IN_PROGRESS)

    def _await_joins(self, group: Group, now_ms: int, least_ms: int = 0) -> None:
        group.join_timer = self._state.timers.at(
            now_ms + max(group.rebalance_timeout_ms, least_ms), lambda now_ms: self._complete_join(group, now_ms)
        )

    def _end_delay(self, group: Group, left_ms: int, now_ms: int) -> None:
        """The first members have waited; if others came meanwhile, they wait on for more."""
        group.join_timer = None
        self._tell(now_ms)
        if not (group.has_newcomer and left_ms):
            self._complete_join(group, now_ms)
            return
        group.has_newcomer = False
        delay_ms = min(self._state.settings.rebalance_delay_ms, left_ms)
        left_ms = max(left_ms - self._state.settings.rebalance_delay_ms, 0)
        group.join_timer = self._state.timers.at(
            now_ms + delay_ms, lambda now_ms: self._end_delay(group, left_ms, now_ms)
        )

    def _complete_join(self, group: Group, now_ms: int) -> None:
        """Ends the phase of joining: those who came make the next generation."""
        self._tell(now_ms)
        if group.join_timer is not None:
            self._state.timers.cancel(group.join_timer)
            group.join_timer = None
        assert group.state == PREPARING, group.state
        for member in list(group.members.values()):
            if member.joining is None and member.instance_id is None:
                self._remove(group, member)
        if group.members and not group.elect():  # only static members are left, and none has come: wait for sessions
            self._await_joins(group, now_ms, _LEAST_WAIT_MS)
            return
        group.generation = group.generation % (2**31 - 1) + 1
        group.is_first = False
        group.unsynced.clear()
        if not group.members:
            group.protocol = group.leader = None
            group.topics = group.subscribed()
            group.enter(EMPTY, now_ms)
            self._say("emptied", now_ms, "group %s has no members any more", shown(group.group_id))
            self._topic.append(group.group_id, [group.record()], now_ms, _ignore)
            return
        group.protocol = group.vote()
        group.topics = group.subscribed()
        group.enter(COMPLETING, now_ms)
        group.unsynced.update(group.members)
        generation = group.generation
        group.sync_timer = self._state.timers.at(
            now_ms + group.rebalance_timeout_ms, lambda now_ms: self._expire_syncs(group, generation, now_ms)
        )
        answers = []
        for member in group.members.values():
            if member.joining is not None:
                answers.append((member.joining, self._joined(group, member, told=group.leader == member.member_id)))
                member.joining = None
                self._renew(group, member, now_ms)
            member.is_new = False
        for answer, response in answers:
            answer.set(response)

    def _expire_syncs(self, group: Group, generation: int, now_ms: int) -> None:
        """Members that joined and then never asked for their assignment hold up the others: they go."""
        group.sync_timer = None
        self._tell(now_ms)
        if group.generation != generation or group.state not in (COMPLETING, STABLE) or not group.unsynced:
            return
        for member_id in sorted(group.unsynced):
            if member_id in group.members:
                self._remove(group, group.members[member_id])
        self._prepare(group, now_ms)

    def _cancel_sync_timer(self, group: Group) -> None:
        if group.sync_timer is not None:
            self._state.timers.cancel(group.sync_timer)
            group.sync_timer = None

    # -- members

    def _renew(self, group: Group, member: Member, now_ms: int, timeout_ms: int | None = None) -> None:
        """Begins the session anew. A timer that will come too early is left to find that out."""
        member.deadline_ms = now_ms + (member.session_timeout_ms if timeout_ms is None else timeout_ms)
        if member.timer is None or member.timer_ms > member.deadline_ms:
            self._cancel_timer(member)
            self._set_timer(group, member)

    def _set_timer(self, group: Group, member: Member) -> None:
        member.timer_ms = member.deadline_ms
        member.timer = self._state.timers.at(member.deadline_ms, lambda now_ms: self._expire(group, member, now_ms))

    def _cancel_timer(self, member: Member) -> None:
        if member.timer is not None:
            self._state.timers.cancel(member.timer)
            member.timer = None

    def _expire(self, group: Group, member: Member, now_ms: int) -> None:
        member.timer = None
        self._tell(now_ms)
        assert group.members.get(member.member_id) is member, "who is taken out takes the timer along"
        if now_ms < member.deadline_ms:
            self._set_timer(group, member)
        elif member.is_new or not member.is_waiting:  # who waits for us cannot send heartbeats; its answer renews it
            self._say(
                "session",
                now_ms,
                "group %s: the session of member %s ended",
                shown(group.group_id),
                shown(member.member_id),
            )
            self._remove(group, member)
            self._rebalance_after_loss(group, now_ms)

    def _expire_pending(self, group: Group, member_id: str, now_ms: int) -> None:
        self._tell(now_ms)
        if group.pending.pop(member_id, None) is not None:
            self._after_pending(group, now_ms)

    def _after_pending(self, group: Group, now_ms: int) -> None:
        if group.state == PREPARING:
            self._rebalance(group, now_ms)
        elif group.is_unused:
            self._drop(group)

    def _drop(self, group: Group) -> None:
        group.state = DEAD
        if self._groups.get(group.group_id) is group:
            del self._groups[group.group_id]

    def _remove(self, group: Group, member: Member, code: int = codes.UNKNOWN_MEMBER_ID) -> None:
        self._cancel_timer(member)
        group.take_out(member)
        _end_join(member, code)
        _end_sync(member, code)

    # -- the other requests of members

    def sync(self, request: Any, call: Call) -> Any:
        """A SyncGroup response, or the Answer that will hold it."""
        now_ms, member_id = call.now_ms, request.member_id
        self._tell(now_ms)
        fail = wire.SYNC_GROUP.Response
        if not request.group_id:
            return fail(error_code=codes.INVALID_GROUP_ID)
        group, code = self._find(request.group_id, member_id, request.group_instance_id, request.generation_id)
        if code or group is None:
            return fail(error_code=code)
        if request.protocol_type not in (None, group.protocol_type) or request.protocol_name not in (
            None,
            group.protocol,
        ):
            return fail(error_code=codes.INCONSISTENT_GROUP_PROTOCOL)
        member = group.members[member_id]
        self._renew(group, member, now_ms)
        if group.state == PREPARING:
            return fail(error_code=codes.REBALANCE_IN_PROGRESS)
        group.unsynced.discard(member_id)
        if group.state == STABLE:
            return self._synced(group, member)
        _end_sync(member, codes.REBALANCE_IN_PROGRESS)  # it asks again, over another connection: that one is heard
        answer = member.syncing = Answer()
        if group.leader == member_id:
            assignments = {each.member_id: each.assignment for each in request.assignments}
            self._topic.append(
                group.group_id,
                [group.record(assignments)],
                now_ms,
                partial(self._have_assigned, group, group.generation, assignments),
            )
        return answer

    def _find(
        self, group_id: str, member_id: str, instance_id: str | None, generation: int
    ) -> tuple[Group | None, int]:
        """The group in which that member is of that generation, or the code of what is wrong."""
        group = self._groups.get(group_id)
        if group is None:
            return None, codes.UNKNOWN_MEMBER_ID
        code = group.check_member(member_id, instance_id)
        if not code and generation != group.generation:
            code = codes.ILLEGAL_GENERATION
        return group, code

    def _have_assigned(self, group: Group, generation: int, assignments: Mapping[str, bytes], code: int) -> None:
        """The leader's assignment is on disk, or could not be brought there."""
        if group.state != COMPLETING or group.generation != generation:
            return  # somebody has joined or left meanwhile, and all were told
        now_ms = self._now_ms
        waiting = [member for member in group.members.values() if member.syncing is not None]
        if code:
            code = codes.UNKNOWN_SERVER_ERROR if code == codes.INVALID_COMMIT_OFFSET_SIZE else code
            for member in waiting:
                self._renew(group, member, now_ms)
                _end_sync(member, code)
            self._rebalance(group, now_ms)
            return
        for member in group.members.values():
            member.assignment = assignments.get(member.member_id, b"")
        group.enter(STABLE, now_ms)
        self._say(
            "formed",
            now_ms,
            "group %s formed: generation %d, %d members, %s",
            shown(group.group_id),
            group.generation,
            len(group.members),
            shown(group.protocol),
        )
        for member in waiting:
            answer, member.syncing = member.syncing, None
            self._renew(group, member, now_ms)
            if answer is not None:
                answer.set(self._synced(group, member))

    def _synced(self, group: Group, member: Member) -> Any:
        return wire.SYNC_GROUP.Response(
            protocol_type=group.protocol_type, protocol_name=group.protocol, assignment=member.assignment
        )

    def heartbeat(self, request: Any, call: Call) -> int:
        self._tell(call.now_ms)
        if not request.group_id:
            return codes.INVALID_GROUP_ID
        group, code = self._find(request.group_id, request.member_id, request.group_instance_id, request.generation_id)
        if code or group is None:
            return code
        self._renew(group, group.members[request.member_id], call.now_ms)
        return codes.REBALANCE_IN_PROGRESS if group.state == PREPARING else codes.NONE

    def leave(self, group_id: str, members: Sequence[tuple[str, str | None]], now_ms: int) -> list[int]:
        """Takes (member id, static id) pairs out of a group; a code for each. A static id alone is enough."""
        self._tell(now_ms)
        group = self._groups.get(group_id)
        if group is None:
            return [codes.UNKNOWN_MEMBER_ID] * len(members)
        results = []
        is_changed = False
        for member_id, instance_id in members:
            if not member_id and instance_id is not None:
                member_id = group.static.get(instance_id, "")
            if member_id in group.pending:
                self._state.timers.cancel(group.pending.pop(member_id))
                is_changed = True
                results.append(codes.NONE)
                continue
            code = group.check_member(member_id, instance_id)
            if not code:
                self._remove(group, group.members[member_id])
                is_changed = True
            results.append(code)
        if is_changed:
            if group.state in (STABLE, COMPLETING):
                self._prepare(group, now_ms)
            else:
                self._after_pending(group, now_ms)
        return results

    # -- offsets

    def check_commit(self, group_id: str, generation: int, member_id: str, instance_id: str | None, call: Call) -> int:
        """Whether this member, or nobody with generation -1, may commit now. A commit renews the session."""
        self._tell(call.now_ms)
        if _is_long(group_id):  # an empty one may commit, as in Kafka, for the sake of old clients
            return codes.INVALID_GROUP_ID
        group = self._groups.get(group_id)
        if group is None:
            if generation >= 0:
                return codes.GROUP_ID_NOT_FOUND if call.version >= 9 else codes.ILLEGAL_GENERATION
            return codes.NONE
        if generation < 0 and group.state == EMPTY:
            return codes.NONE
        if generation < 0 and not member_id and instance_id is None:
            return codes.UNKNOWN_MEMBER_ID
        code = group.check_member(member_id, instance_id)
        if not code and generation != group.generation:
            code = codes.ILLEGAL_GENERATION
        if code:
            return code
        if group.state == COMPLETING:
            return codes.REBALANCE_IN_PROGRESS
        self._renew(group, group.members[member_id], call.now_ms)
        return codes.NONE

    def commit(
        self, group_id: str, offsets: Mapping[tuple[str, int], Committed], now_ms: int, done: Callable[[int], None]
    ) -> None:
        """Stores offsets that check_commit() let pass; done(0) once they are on disk and seen, else done(code)."""
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = Group(group_id)
        records: list[Record] = [(commit_key(group_id, *key), commit_value(each)) for key, each in offsets.items()]
        group.storing.update(offsets.keys())

        def stored(code: int) -> None:
            for key, committed in offsets.items():
                group.storing[key] -= 1
                if not group.storing[key]:
                    del group.storing[key]
                if not code:
                    group.put(key, committed)
            if group.is_unused:
                self._drop(group)
            done(code)

        self._topic.append(group_id, records, now_ms, stored)

    def delete_offsets(
        self, group: Group, keys: Iterable[tuple[str, int]], now_ms: int, done: Callable[[int], None]
    ) -> None:
        """Takes offsets back; done as in commit()."""
        keys = list(keys)

        def stored(code: int) -> None:
            if not code:
                group.forget(keys)
            done(code)

        records: list[Record] = [(commit_key(group.group_id, *key), None) for key in keys]
        if records:
            self._topic.append(group.group_id, records, now_ms, stored)
        else:
            done(codes.NONE)

    def delete(self, group_id: str, now_ms: int, done: Callable[[int], None]) -> None:
        """Deletes an empty group with its offsets."""
        self._tell(now_ms)
        group = self._groups.get(group_id)
        if group is None:
            done(codes.GROUP_ID_NOT_FOUND)
        elif group.state != EMPTY:
            done(codes.NON_EMPTY_GROUP)
        else:
            self._bury(group, now_ms, done)

    def _bury(self, group: Group, now_ms: int, done: Callable[[int], None]) -> None:
        for token in group.pending.values():
            self._state.timers.cancel(token)
        group.pending.clear()
        records: list[Record] = [(commit_key(group.group_id, *key), None) for key in group.offset_keys()]
        records.append((group_key(group.group_id), None))
        self._drop(group)
        self._topic.append(group.group_id, records, now_ms, done)

    def topics_deleted(self, names: set[str], now_ms: int) -> None:
        """What was committed for topics that are gone is gone with them."""
        self._tell(now_ms)
        if OFFSETS_TOPIC in names:
            self._unload()
            return
        self.load(now_ms, lambda code: None if code else self._forget_topics(names))

    def _forget_topics(self, names: set[str]) -> None:
        for group in self.all():
            keys = [(topic, partition) for topic in names for partition in group.offsets.get(topic, ())]
            keys += [key for key in group.storing if key[0] in names and key not in keys]
            if keys:
                group.forget(keys)  # at once: a new topic of that name begins without offsets
                self.delete_offsets(group, keys, self._now_ms, _ignore)

    def _check_later(self, now_ms: int) -> None:
        self._check_timer = self._state.timers.at(now_ms + _RETENTION_CHECK_MS, self._check_retention)

    def _check_retention(self, now_ms: int) -> None:
        self._tell(now_ms)
        self._check_later(now_ms)
        for group in self.all():
            keys = group.expired(now_ms)
            is_all = len(keys) == sum(map(len, group.offsets.values()))
            if group.state == EMPTY and is_all and not (group.pending or group.storing):
                self._bury(group, now_ms, _ignore)
            elif keys:
                self.delete_offsets(group, keys, now_ms, _ignore)

    # -- ending

    def stop(self, now_ms: int) -> None:
        """Answers all who wait for other members. What waits for the disk is answered when that is done."""
        self._tell(now_ms)
        for group in self.all():
            self._turn_away(group)

    def _turn_away(self, group: Group) -> None:
        for member in list(group.members.values()):
            _end_join(member, codes.NOT_COORDINATOR)
            _end_sync(member, codes.NOT_COORDINATOR)

    def _unload(self) -> None:
        """The topic of offsets was deleted, and with it all that groups were."""
        timers = self._state.timers
        for group in self.all():
            self._turn_away(group)
            for member in group.members.values():
                self._cancel_timer(member)
            for token in (*group.pending.values(), group.join_timer, group.sync_timer):
                if token is not None:
                    timers.cancel(token)
            group.state = DEAD
        self._groups = {}


def _ignore(code: int) -> None:
    """Nobody waits to hear of it; that it failed was logged, and it is tried again or no harm."""


def _is_long(text: str) -> bool:
    return len(text) > _TEXT_BYTES // 4 and len(text.encode("utf-8", "surrogatepass")) > _TEXT_BYTES


def _join_failure(version: int, code: int, member_id: str) -> Any:
    return wire.JOIN_GROUP.Response(
        error_code=code, member_id=member_id, protocol_name=None if version >= _NULL_PROTOCOL_SINCE else ""
    )


def _end_join(member: Member, code: int) -> None:
    answer, member.joining = member.joining, None
    if answer is not None:
        answer.set(_join_failure(member.join_version, code, member.member_id))


def _end_sync(member: Member, code: int) -> None:
    answer, member.syncing = member.syncing, None
    if answer is not None:
        answer.set(wire.SYNC_GROUP.Response(error_code=code))
