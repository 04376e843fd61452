"""A group and its members: what is known of them, what can be decided from it, and small changes.

A group's states and what moves it from one to the next (wire protocol section 7):

    Empty                --join-->              PreparingRebalance
    PreparingRebalance   --all have rejoined, or their time is over-->  CompletingRebalance, Empty if none is left
    CompletingRebalance  --the leader's assignment is on disk-->        Stable
    CompletingRebalance, Stable  --a member joins, leaves or expires--> PreparingRebalance
    Empty                --deleted, or expired-->  Dead: no request finds it any more
    Dead                 --its deletion could not be stored-->          Empty

A group of the consumer protocol (KIP-848) has its members and states in `consumers`; `state` says how these stand.
A group may change its protocol: one that is Empty at any time, one with members as classicmembers.py says. Its
offsets stay what they are.

Which change follows on what is decided in membership.py and offsets.py. Nothing here asks for an effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import attrs

from logcore.coordination.consumergroup import ConsumerGroup, Fact, fact_key
from logcore.coordination.effects import (
    DelayEnds,
    GroupError,
    Join,
    Joined,
    JoinedMember,
    JoinEnds,
    OffsetKey,
    Synced,
    SyncEnds,
    Waiter,
)
from logcore.coordination.remembered import GROUP_BYTES, ITEM_BYTES, MEMBER_BYTES
from logcore.format.consumergrouprecords import Kind
from logcore.format.grouprecords import (
    Committed,
    GroupRecord,
    StoredGroup,
    StoredMember,
    group_key,
    group_value,
    subscribed_topics,
)

EMPTY: Final = "Empty"
PREPARING: Final = "PreparingRebalance"
COMPLETING: Final = "CompletingRebalance"
STABLE: Final = "Stable"
DEAD: Final = "Dead"

CONSUMER: Final = "consumer"
_RETENTION_MS: Final = 7 * 24 * 3_600_000


@attrs.define(eq=False)
class Member:
    """One member of a group.

    joining, syncing: its requests that wait; never more than one of each kind. is_new: until it is told its first
    generation. absence_ms: see Join. is_absent: whether it is gone, and was not heard since. deadline_ms: when its
    session, or its absence, ends. timer_ms: when that is checked next; it may be earlier, because a
    renewed session leaves the timer as it is. None when no timer is set.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes = b""
    is_new: bool = False
    absence_ms: int | None = None
    is_absent: bool = False
    joining: Waiter | None = None
    syncing: Waiter | None = None
    deadline_ms: int = 0
    timer_ms: int | None = None

    @property
    def kept_ms(self) -> int:
        """How long it keeps its place without being heard."""
        if self.is_absent and self.absence_ms is not None:
            return self.absence_ms
        return self.session_timeout_ms

    @property
    def is_waiting(self) -> bool:
        return self.joining is not None or self.syncing is not None

    def metadata(self, protocol: str | None) -> bytes:
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")


@attrs.define(eq=False)
class Group:
    """What is known of a group.

    state_ms: since when it has been in its state. static: instance id -> member id. pending: ids given out to members
    that have not joined with them. unsynced: members of this generation that have not asked for their assignment.
    topics: what its members subscribe to, None when that cannot be known. storing: how many commits of each offset are
    on their way to the disk. unstable: producer id -> what its open transaction would commit, with the order of its
    record. order: how many commits and deletions were asked to be stored. applied: which of these each offset comes
    from; none for offsets that were loaded. failed: deletions under way, by their order, of which some batch could not
    be stored. consumers: of a group of the consumer protocol. owed: facts of a time in that protocol whose records may
    still be on disk; they are deleted with the next record of the group. is_first: the rebalance under way began in an
    empty group. has_newcomer: a member joined that rebalance since its delay was set. join_timer, sync_timer: those
    that are set.
    """

    group_id: str
    state: str = EMPTY
    state_ms: int = -1
    generation: int = 0
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = attrs.Factory(dict[str, Member])
    static: dict[str, str] = attrs.Factory(dict[str, str])
    pending: set[str] = attrs.Factory(set[str])
    unsynced: set[str] = attrs.Factory(set[str])
    topics: frozenset[str] | None = None
    offsets: dict[str, dict[int, Committed]] = attrs.Factory(dict[str, dict[int, Committed]])
    storing: Counter[OffsetKey] = attrs.Factory(Counter[OffsetKey])
    unstable: dict[int, dict[OffsetKey, tuple[int, Committed]]] = attrs.Factory(
        dict[int, dict[OffsetKey, tuple[int, Committed]]]
    )
    order: int = 0
    applied: dict[OffsetKey, int] = attrs.Factory(dict[OffsetKey, int])
    failed: dict[int, GroupError] = attrs.Factory(dict[int, GroupError])
    consumers: ConsumerGroup | None = None
    owed: tuple[Fact, ...] = ()
    is_first: bool = False
    has_newcomer: bool = False
    join_timer: JoinEnds | DelayEnds | None = None
    sync_timer: SyncEnds | None = None

    # -- decisions

    def check_member(self, member_id: str, instance_id: str | None) -> GroupError | None:
        if instance_id is not None:
            present = self.static.get(instance_id)
            if present is None:
                return GroupError.UNKNOWN_MEMBER_ID
            if present != member_id:
                return GroupError.FENCED_INSTANCE_ID
        if member_id in self.members:
            return None
        return GroupError.UNKNOWN_MEMBER_ID

    def check_committer(self, member_id: str, instance_id: str | None, generation: int) -> GroupError | None:
        """As check_generation(), also for groups of the consumer protocol, where a generation is a member's epoch."""
        if self.consumers is not None:
            return self.consumers.check_epoch(member_id, generation)
        return self.check_generation(member_id, instance_id, generation)

    def check_generation(self, member_id: str, instance_id: str | None, generation: int) -> GroupError | None:
        error = self.check_member(member_id, instance_id)
        if error is None and generation != self.generation:
            return GroupError.ILLEGAL_GENERATION
        return error

    def has_room(self, member_id: str, instance_id: str | None, most: int) -> bool:
        """Whether a request to join finds a place among at most so many members."""
        # During a rebalance only members that have rejoined hold a place: the others may never come.
        if self.state == PREPARING:
            waiting = sum(member.joining is not None for member in self.members.values())
            member = self.members.get(member_id)
            return (member is not None and member.joining is not None) or waiting < most
        if self.state == EMPTY or member_id in self.members or len(self.members) < most:
            return True
        # A static member that comes back without its id takes the place it had.
        return not member_id and instance_id in self.static

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
        if self.protocol_type != CONSUMER:
            return None
        topics: set[str] = set()
        for member in self.members.values():
            subscribed = subscribed_topics(member.metadata(self.protocol))
            if subscribed is None:
                return None
            topics.update(subscribed)
        return frozenset(topics)

    def may_use(self, topic: str) -> bool:
        """Whether a member subscribes to a topic; True for consumers whose topics cannot be known."""
        if self.consumers is not None:
            return topic in self.consumers.subscribed()
        if self.protocol_type != CONSUMER:
            return False
        return bool(self.members) and (self.topics is None or topic in self.topics)

    @property
    def is_forgotten(self) -> bool:
        """Whether nothing is left of it but its generation, which no later one may have again."""
        return self.state == EMPTY and not (
            self.protocol_type or self.consumers or self.members or self.pending or self.offsets or self.unstable
        )

    @property
    def is_unused(self) -> bool:
        """Whether no member ever joined it and nothing was committed in it."""
        return (
            self.state == EMPTY
            and self.consumers is None
            and not self.generation
            and not (self.members or self.pending or self.offsets or self.storing or self.unstable)
        )

    def has_offset(self, topic: str, partition: int) -> bool:
        """Whether an offset is committed, or about to be."""
        return partition in self.offsets.get(topic, ()) or self.is_pending((topic, partition))

    def is_pending(self, key: OffsetKey) -> bool:
        """Whether a commit of it is on its way to the disk, or in an open transaction."""
        return key in self.storing or self.is_unstable(key)

    def is_unstable(self, key: OffsetKey) -> bool:
        """Whether an open transaction may commit it."""
        return any(key in offsets for offsets in self.unstable.values())

    def offset_keys(self) -> list[OffsetKey]:
        """All that is committed, or about to be."""
        pending = (topic for keys in self._pending_keys() for topic, _ in keys)
        return self.keys_of(dict.fromkeys([*self.offsets, *pending]))

    def keys_of(self, topics: Collection[str]) -> list[OffsetKey]:
        """As offset_keys(), of some topics."""
        found = {(topic, partition): None for topic in topics for partition in self.offsets.get(topic, ())}
        for keys in self._pending_keys():
            found.update((key, None) for key in keys if key[0] in topics)
        return [*found]

    def _pending_keys(self) -> list[Collection[OffsetKey]]:
        return [self.storing, *self.unstable.values()]

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether all known members have joined the rebalance under way."""
        return not self.pending and all(member.joining is not None for member in self.members.values())

    def expired(self, now_ms: int) -> list[OffsetKey]:
        """Offsets that have been kept long enough (wire protocol section 7, Offsets).

        Retention counts from the commit, in a group that once had members of the classic protocol from when it became
        empty. A group of consumers that is in use keeps what its members subscribe to. What is about to be committed
        again, or may be by an open transaction, is kept: the record that deletes it would stand behind that commit.
        """
        since_ms = None
        kept: frozenset[str] = frozenset()
        if self.consumers is not None:
            kept = self.consumers.subscribed()
        elif self.protocol_type:
            if self.state == EMPTY:
                if self.state_ms >= 0:
                    since_ms = self.state_ms
            elif self.state == STABLE and self.protocol_type == CONSUMER and self.topics is not None:
                kept = self.topics
            else:
                return []  # in use, and what its members want is not known, or changing

        def expires_ms(committed: Committed) -> int:
            if committed.expire_ms >= 0:  # the client of an old version has chosen it
                return committed.expire_ms
            if since_ms is None:
                return committed.commit_ms + _RETENTION_MS
            return since_ms + _RETENTION_MS

        old = [
            (topic, partition)
            for topic, partitions in self.offsets.items()
            if topic not in kept
            for partition, committed in partitions.items()
            if now_ms >= expires_ms(committed)
        ]
        return [key for key in old if not self.is_pending(key)]

    # -- views

    def held_bytes(self) -> int:
        """About how much memory its members take. Offsets are not counted: they are data on the disk."""
        if not (self.members or self.pending or self.consumers):
            return 0
        size = GROUP_BYTES + len(self.group_id) + len(self.pending) * ITEM_BYTES
        for member in self.members.values():
            size += MEMBER_BYTES + len(member.client_id) + len(member.instance_id or "") + len(member.assignment)
            size += sum(len(name) + len(metadata) for name, metadata in member.protocols)
        if self.consumers is not None:
            size += self.consumers.held_bytes()
        return size

    def joined(self, member: Member) -> Joined:
        """The answer to a member that is in the present generation; the leader learns of all members too."""
        members: Iterable[Member] = ()
        if self.leader == member.member_id:
            members = self.members.values()
        return Joined(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol or "",
            leader=self.leader or "",
            member_id=member.member_id,
            members=tuple(
                JoinedMember(each.member_id, each.instance_id, each.metadata(self.protocol)) for each in members
            ),
        )

    def synced(self, member: Member) -> Synced:
        return Synced(protocol_type=self.protocol_type, protocol=self.protocol, assignment=member.assignment)

    def record(self, assignments: Mapping[str, bytes] | None = None) -> GroupRecord:
        """The record of the group as it is now, or as it will be with these assignments."""
        if assignments is None:
            assignments = {member.member_id: member.assignment for member in self.members.values()}
        members = tuple(
            StoredMember(
                member_id=member.member_id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout_ms=member.rebalance_timeout_ms,
                # Who reads the record knows of no member that it is still there.
                session_timeout_ms=member.session_timeout_ms if member.absence_ms is None else member.absence_ms,
                subscription=member.metadata(self.protocol),
                assignment=assignments.get(member.member_id, b""),
            )
            for member in self.members.values()
        )
        stored = StoredGroup(
            protocol_type=self.protocol_type,
            generation=self.generation,
            protocol=self.protocol,
            leader=self.leader,
            state_ms=self.state_ms,
            members=members,
        )
        return group_key(self.group_id), group_value(stored)

    def records(self, assignments: Mapping[str, bytes] | None = None) -> tuple[GroupRecord, ...]:
        """record(), after those that delete what is owed."""
        return (*self.owed_records(), self.record(assignments))

    def owed_records(self) -> tuple[GroupRecord, ...]:
        return tuple((fact_key(self.group_id, fact), None) for fact in self.owed)

    # -- small changes

    def become(self, consumers: ConsumerGroup) -> None:
        """Makes it one of the consumer protocol. No request waits in it."""
        self.consumers = consumers
        self.owed = ()
        self.protocol_type = CONSUMER
        self.generation = 0
        self.protocol = None
        self.leader = None
        self.topics = None
        self.members = {}
        self.static = {}
        self.unsynced = set()

    def inherit(self, old: Group) -> tuple[GroupRecord, ...]:
        """Takes over what is still on disk of a group that had its id before. What was committed since counts more.
        Returns records to store, which delete what the other has left.
        """
        for topic, partitions in old.offsets.items():
            for partition, committed in partitions.items():
                self.offsets.setdefault(topic, {}).setdefault(partition, committed)
        for producer_id, keys in old.unstable.items():
            unstable = self.unstable.setdefault(producer_id, {})
            for key, (order, committed) in keys.items():
                unstable.setdefault(key, (order - old.order - 1, committed))  # before all of this group
        facts = [*old.owed]
        if old.consumers is not None:
            facts += [*old.consumers.unsure, *old.consumers.facts()]
        elif old.protocol_type and self.consumers is not None:
            facts.append((Kind.CLASSIC, ""))
        if self.consumers is not None:
            own = {*self.consumers.facts()}
            return tuple((fact_key(self.group_id, fact), None) for fact in dict.fromkeys(facts) if fact not in own)
        self.owed = tuple(dict.fromkeys([*self.owed, *facts]))
        if self.state == EMPTY and not self.generation:  # it has no record of its own yet
            self.protocol_type = old.protocol_type
            self.generation = old.generation
            self.state_ms = old.state_ms
        return ()

    def enter(self, state: str, now_ms: int) -> None:
        self.state = state
        self.state_ms = now_ms

    def elect(self) -> bool:
        """Keeps the leader if it has rejoined, else takes the first member that has; False when none has."""
        leader = self.members.get(self.leader or "")
        if leader is None or leader.joining is None:
            joined = (member for member in self.members.values() if member.joining is not None)
            leader = next(joined, None)
        if leader is None:
            return False
        self.leader = leader.member_id
        return True

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

    def swap(self, old: Member, new: Member) -> None:
        """Puts one member in the place of another, also in the order of joining."""
        members: dict[str, Member] = {}
        for member in self.members.values():
            if member is old:
                members[new.member_id] = new
            else:
                members[member.member_id] = member
        self.members = members
        if new.instance_id is not None:
            self.static[new.instance_id] = new.member_id
        if self.leader == old.member_id:
            self.leader = new.member_id
        if old.member_id in self.unsynced:
            self.unsynced.discard(old.member_id)
            self.unsynced.add(new.member_id)

    def put(self, key: OffsetKey, committed: Committed, order: int) -> None:
        """Takes over a commit, unless a later record has been applied already."""
        # Records are stored in the order of `order`, but a transaction's commits count only with its marker. What an
        # earlier record would commit is no longer in `unstable` once a deletion was applied.
        if key in self.applied and order < self.applied[key]:
            return
        topic, partition = key
        self.applied[key] = order
        self.offsets.setdefault(topic, {})[partition] = committed

    def next_order(self) -> int:
        self.order += 1
        return self.order

    def end_transaction(self, producer_id: int, *, commit: bool) -> None:
        """A marker of this producer is in the log."""
        for key, (order, committed) in self.unstable.pop(producer_id, {}).items():
            if commit:
                self.put(key, committed, order)

    def forget(self, keys: Collection[OffsetKey], order: int) -> None:
        """Takes over a deletion, except for what is committed by a later record."""
        for key in keys:
            for offsets in self.unstable.values():
                if key in offsets and offsets[key][0] < order:
                    del offsets[key]
        self.unstable = {producer_id: offsets for producer_id, offsets in self.unstable.items() if offsets}
        for key in keys:
            if self.applied.get(key, 0) > order:
                continue
            self.applied.pop(key, None)
            topic, partition = key
            partitions = self.offsets.get(topic)
            if partitions is not None:
                partitions.pop(partition, None)
                if not partitions:
                    del self.offsets[topic]


def rebalance_timeout_ms(of: Join | StoredMember) -> int:
    """How long a member may take to join again. Old versions of the request and of the record do not say, and mean the
    timeout of the session.
    """
    if of.rebalance_timeout_ms < 0:
        return of.session_timeout_ms
    return of.rebalance_timeout_ms
