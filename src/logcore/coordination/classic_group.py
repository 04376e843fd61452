"""A group and its members: their state, decisions that depend on it, and small changes.

States of a group and the transitions between them (wire protocol section 7):

    Empty                --join-->              PreparingRebalance
    PreparingRebalance   --all rejoined or timed out--> CompletingRebalance,
                                                        or Empty without members
    CompletingRebalance  --the leader's assignment is durable-->        Stable
    CompletingRebalance, Stable  --a member joins, leaves or expires-->
    PreparingRebalance
    Empty                --deleted, or expired-->  Dead: requests no longer find it
    Dead                 --its deletion could not be stored-->          Empty

A group of the consumer protocol (KIP-848) stores its members and their states in
`consumers`; `state` is derived from them. A group can change its protocol: at any time
while it is Empty, and with members according to migration.py. Its offsets do not
change.

classic_transitions.py and offsets.py decide which change follows an event. This module
does not return effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import attrs

from logcore.coordination.consumer_group import ConsumerGroup, Fact, fact_key
from logcore.coordination.group_requests import (
    DelayEnds,
    GroupError,
    Join,
    Joined,
    JoinedMember,
    JoinEnds,
    OffsetKey,
    SyncEnds,
    SyncResult,
    Waiter,
    check_member,
)
from logcore.coordination.memory_budget import GROUP_BYTES, ITEM_BYTES, MEMBER_BYTES
from logcore.format.consumer_group_records import RecordKind
from logcore.format.group_records import (
    Committed,
    GroupRecord,
    StoredGroup,
    StoredMember,
    TopicWithId,
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
class ClassicGroupMember:
    """One member of a group."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes = b""
    #: True until the member has received its first generation.
    is_new: bool = False
    #: See Join.
    absence_ms: int | None = None
    #: Whether the member was reported absent and has sent no request since then.
    is_absent: bool = False
    #: Its waiting Join and Sync requests; at most one of each kind.
    joining: Waiter | None = None
    syncing: Waiter | None = None
    #: When the session, or the permitted absence, ends.
    deadline_ms: int = 0
    #: When the deadline is checked next; None if no timer is set. This can be before
    #: the deadline, because renewing a session does not change the timer.
    timer_ms: int | None = None

    @property
    def active_session_ms(self) -> int:
        """Time for which the member remains in the group without a request."""
        if self.is_absent and self.absence_ms is not None:
            return self.absence_ms
        return self.session_timeout_ms

    @property
    def is_waiting(self) -> bool:
        return self.joining is not None or self.syncing is not None

    def metadata(self, protocol: str | None) -> bytes:
        return next(
            (metadata for name, metadata in self.protocols if name == protocol), b""
        )


@attrs.define(eq=False)
class Group:
    """The state of one group."""

    group_id: str
    state: str = EMPTY
    #: When the group entered its state.
    state_ms: int = -1
    generation: int = 0
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, ClassicGroupMember] = attrs.Factory(
        dict[str, ClassicGroupMember]
    )
    #: Instance id -> member id.
    static: dict[str, str] = attrs.Factory(dict[str, str])
    #: Ids given to members that have not joined with them yet.
    pending: set[str] = attrs.Factory(set[str])
    #: Members of this generation that have not sent their Sync request.
    unsynced: set[str] = attrs.Factory(set[str])
    #: Topics that the members subscribe to; None if they are unknown.
    topics: frozenset[str] | None = None
    offsets: dict[str, dict[int, Committed]] = attrs.Factory(
        dict[str, dict[int, Committed]]
    )
    #: Number of commits of each offset that are not durable yet.
    storing: Counter[OffsetKey] = attrs.Factory(Counter[OffsetKey])
    #: Producer id -> pending offsets of its open transaction, each with the order of
    #: its record.
    unstable: dict[int, dict[OffsetKey, tuple[int, Committed]]] = attrs.Factory(
        dict[int, dict[OffsetKey, tuple[int, Committed]]]
    )
    #: Number of commits and deletions that were passed to storage.
    order: int = 0
    #: The order of the record that each offset comes from. Offsets loaded from disk
    #: have no entry.
    applied: dict[OffsetKey, int] = attrs.Factory(dict[OffsetKey, int])
    #: Deletions in progress, by their order, of which a batch could not be stored.
    failed: dict[int, GroupError] = attrs.Factory(dict[int, GroupError])
    #: Set if the group uses the consumer protocol.
    consumers: ConsumerGroup | None = None
    #: Facts of the consumer protocol, which the group used before, whose records may
    #: still be on disk. The next record of the group is preceded by their tombstones.
    pending_tombstones: tuple[Fact, ...] = ()
    #: Whether the present rebalance began in an empty group.
    is_first: bool = False
    #: Whether a member joined the present rebalance after its delay was set.
    has_new_member: bool = False
    #: The timers that are set.
    join_timer: JoinEnds | DelayEnds | None = None
    sync_timer: SyncEnds | None = None

    # -- decisions

    def check_member(
        self, member_id: str, instance_id: str | None
    ) -> GroupError | None:
        return check_member(self.members, self.static, member_id, instance_id)

    def check_committer(
        self, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        """Check the sender of a commit, in a group of either protocol.

        In the consumer protocol, `generation` is a member epoch.
        """
        if self.consumers is not None:
            return self.consumers.check_epoch(member_id, generation)
        return self.check_generation(member_id, instance_id, generation)

    def check_generation(
        self, member_id: str, instance_id: str | None, generation: int
    ) -> GroupError | None:
        error = self.check_member(member_id, instance_id)
        if error is None and generation != self.generation:
            return GroupError.ILLEGAL_GENERATION
        return error

    def has_capacity(
        self, member_id: str, instance_id: str | None, max_members: int
    ) -> bool:
        """Return whether a group of at most `max_members` can accept a Join request."""
        # During a rebalance, only rejoined members are counted, because the others may
        # never return.
        if self.state == PREPARING:
            waiting = sum(
                member.joining is not None for member in self.members.values()
            )
            member = self.members.get(member_id)
            return (
                member is not None and member.joining is not None
            ) or waiting < max_members
        if (
            self.state == EMPTY
            or member_id in self.members
            or len(self.members) < max_members
        ):
            return True
        # A static member that returns without its id replaces its former membership.
        return not member_id and instance_id in self.static

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Return whether a member with these protocols could be in the group.

        At least one protocol must be common to all members.
        """
        if not self.members:
            return bool(protocol_type) and any(True for _ in names)
        common = self.common_protocols()
        return protocol_type == self.protocol_type and any(
            name in common for name in names
        )

    def common_protocols(self) -> set[str]:
        return set.intersection(
            *(
                {name for name, _ in member.protocols}
                for member in self.members.values()
            )
        )

    def vote(self) -> str:
        """Return the common protocol that most members prefer.

        In a tie, the protocol of the first voter wins.
        """
        common = self.common_protocols()
        votes = (
            next(name for name, _ in member.protocols if name in common)
            for member in self.members.values()
        )
        return Counter(votes).most_common(1)[0][0]

    def subscribed(self) -> frozenset[str] | None:
        """Return the topics that members subscribe to.

        None if they are unknown, as in a group whose members are not consumers.
        """
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
        """Return whether a member subscribes to a topic; True if the topics are
        unknown.
        """
        if self.consumers is not None:
            return topic in self.consumers.subscribed()
        if self.protocol_type != CONSUMER:
            return False
        return bool(self.members) and (self.topics is None or topic in self.topics)

    @property
    def is_forgotten(self) -> bool:
        """Whether only the generation is left, which must not be used again."""
        return self.state == EMPTY and not (
            self.protocol_type
            or self.consumers
            or self.members
            or self.pending
            or self.offsets
            or self.unstable
        )

    @property
    def is_unused(self) -> bool:
        """Whether no member ever joined and nothing was committed."""
        return (
            self.state == EMPTY
            and self.consumers is None
            and not self.generation
            and not (
                self.members
                or self.pending
                or self.offsets
                or self.storing
                or self.unstable
            )
        )

    def has_offset(self, topic: str, partition: int) -> bool:
        """Return whether an offset is committed, or a commit of it is pending."""
        return partition in self.offsets.get(topic, ()) or self.is_pending(
            (topic, partition)
        )

    def is_pending(self, key: OffsetKey) -> bool:
        """Return whether a commit of this offset is not durable, or in an open
        transaction.
        """
        return key in self.storing or self.is_unstable(key)

    def is_unstable(self, key: OffsetKey) -> bool:
        """Return whether an open transaction may commit this offset."""
        return any(key in offsets for offsets in self.unstable.values())

    def offset_keys(self) -> list[OffsetKey]:
        """Return all keys that have a committed offset or a pending commit."""
        pending = (topic for keys in self._pending_keys() for topic, _ in keys)
        return self.keys_of(dict.fromkeys([*self.offsets, *pending]))

    def keys_of(self, topics: Collection[str]) -> list[OffsetKey]:
        """Return the keys of these topics, like offset_keys()."""
        found = {
            (topic, partition): None
            for topic in topics
            for partition in self.offsets.get(topic, ())
        }
        for keys in self._pending_keys():
            found.update((key, None) for key in keys if key[0] in topics)
        return [*found]

    def _pending_keys(self) -> list[Collection[OffsetKey]]:
        return [self.storing, *self.unstable.values()]

    @property
    def rebalance_timeout_ms(self) -> int:
        return max(
            (member.rebalance_timeout_ms for member in self.members.values()), default=0
        )

    @property
    def is_complete(self) -> bool:
        """Whether all known members have joined the present rebalance."""
        return not self.pending and all(
            member.joining is not None for member in self.members.values()
        )

    def expired(self, now_ms: int) -> list[OffsetKey]:
        """Return the offsets whose retention time is over (wire protocol section 7,
        Offsets).

        Retention counts from the commit. If the group once had members of the classic
        protocol, retention counts from the time when the group became empty. While
        consumers are in the group, the offsets of topics that they subscribe to are
        kept.

        An offset with a pending commit, also in an open transaction, is kept: the
        record that deletes it would follow that commit in the log.
        """
        since_ms = None
        retained_topics: frozenset[str] = frozenset()
        if self.consumers is not None:
            retained_topics = self.consumers.subscribed()
        elif self.protocol_type:
            if self.state == EMPTY:
                if self.state_ms >= 0:
                    since_ms = self.state_ms
            elif (
                self.state == STABLE
                and self.protocol_type == CONSUMER
                and self.topics is not None
            ):
                retained_topics = self.topics
            else:
                # The group is in use, and its subscriptions are unknown or changing.
                return []

        def expires_ms(committed: Committed) -> int:
            # A client of an old version chose the time.
            if committed.expire_ms >= 0:
                return committed.expire_ms
            if since_ms is None:
                return committed.commit_ms + _RETENTION_MS
            return since_ms + _RETENTION_MS

        old = [
            (topic, partition)
            for topic, partitions in self.offsets.items()
            if topic not in retained_topics
            for partition, committed in partitions.items()
            if now_ms >= expires_ms(committed)
        ]
        return [key for key in old if not self.is_pending(key)]

    # -- views

    def held_bytes(self) -> int:
        """Return the approximate memory use of the members.

        Offsets are not counted because they are data on the disk.
        """
        if not (self.members or self.pending or self.consumers):
            return 0
        size = GROUP_BYTES + len(self.group_id) + len(self.pending) * ITEM_BYTES
        for member in self.members.values():
            size += (
                MEMBER_BYTES
                + len(member.client_id)
                + len(member.instance_id or "")
                + len(member.assignment)
            )
            size += sum(
                len(name) + len(metadata) for name, metadata in member.protocols
            )
        if self.consumers is not None:
            size += self.consumers.held_bytes()
        return size

    def joined(self, member: ClassicGroupMember) -> Joined:
        """Return the answer to a member of the present generation.

        The answer to the leader contains all members.
        """
        members: Iterable[ClassicGroupMember] = ()
        if self.leader == member.member_id:
            members = self.members.values()
        return Joined(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol or "",
            leader=self.leader or "",
            member_id=member.member_id,
            members=tuple(
                JoinedMember(
                    each.member_id, each.instance_id, each.metadata(self.protocol)
                )
                for each in members
            ),
        )

    def synced(self, member: ClassicGroupMember) -> SyncResult:
        return SyncResult(
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            assignment=member.assignment,
        )

    def record(self, assignments: Mapping[str, bytes] | None = None) -> GroupRecord:
        """Return the record of the group, now or with these new assignments."""
        if assignments is None:
            assignments = {
                member.member_id: member.assignment for member in self.members.values()
            }
        members = tuple(
            StoredMember(
                member_id=member.member_id,
                instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout_ms=member.rebalance_timeout_ms,
                # When the record is loaded, it is unknown whether the member is alive.
                session_timeout_ms=member.session_timeout_ms
                if member.absence_ms is None
                else member.absence_ms,
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

    def records(
        self, assignments: Mapping[str, bytes] | None = None
    ) -> tuple[GroupRecord, ...]:
        """Return record(), preceded by the tombstones in `pending_tombstones`."""
        return (*self.pending_tombstone_records(), self.record(assignments))

    def pending_tombstone_records(self) -> tuple[GroupRecord, ...]:
        return tuple(
            (fact_key(self.group_id, fact), None) for fact in self.pending_tombstones
        )

    # -- small changes

    def become(self, consumers: ConsumerGroup) -> None:
        """Convert the group to the consumer protocol. No request may be waiting in it."""
        self.consumers = consumers
        self.pending_tombstones = ()
        self.protocol_type = CONSUMER
        self.generation = 0
        self.protocol = None
        self.leader = None
        self.topics = None
        self.members = {}
        self.static = {}
        self.unsynced = set()

    def inherit(self, old: Group) -> tuple[GroupRecord, ...]:
        """Add the stored state of an older group with the same id to this group.

        Commits in this group have priority. Return records to store, which delete the
        remaining facts of the older group.
        """
        for topic, partitions in old.offsets.items():
            for partition, committed in partitions.items():
                self.offsets.setdefault(topic, {}).setdefault(partition, committed)
        for producer_id, keys in old.unstable.items():
            unstable = self.unstable.setdefault(producer_id, {})
            for key, (order, committed) in keys.items():
                # A negative order is below the orders of all records of this group.
                unstable.setdefault(key, (order - old.order - 1, committed))
        facts = [*old.pending_tombstones]
        if old.consumers is not None:
            facts += [*old.consumers.unsure, *old.consumers.facts()]
        elif old.protocol_type and self.consumers is not None:
            facts.append((RecordKind.CLASSIC, ""))
        if self.consumers is not None:
            own = {*self.consumers.facts()}
            return tuple(
                (fact_key(self.group_id, fact), None)
                for fact in dict.fromkeys(facts)
                if fact not in own
            )
        self.pending_tombstones = tuple(
            dict.fromkeys([*self.pending_tombstones, *facts])
        )
        # This group has no record of its own yet.
        if self.state == EMPTY and not self.generation:
            self.protocol_type = old.protocol_type
            self.generation = old.generation
            self.state_ms = old.state_ms
        return ()

    def enter(self, state: str, now_ms: int) -> None:
        self.state = state
        self.state_ms = now_ms

    def elect(self) -> bool:
        """Choose the leader among the rejoined members; return False if there are none.

        The present leader is kept if it has rejoined. Otherwise the first rejoined
        member becomes the leader.
        """
        leader = self.members.get(self.leader or "")
        if leader is None or leader.joining is None:
            joined = (
                member for member in self.members.values() if member.joining is not None
            )
            leader = next(joined, None)
        if leader is None:
            return False
        self.leader = leader.member_id
        return True

    def add(self, member: ClassicGroupMember, protocol_type: str) -> None:
        if not self.members:
            self.protocol_type = protocol_type
        if self.leader is None:
            self.leader = member.member_id
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.static[member.instance_id] = member.member_id

    def remove_member(self, member: ClassicGroupMember) -> None:
        self.members.pop(member.member_id, None)
        self.unsynced.discard(member.member_id)
        if (
            member.instance_id is not None
            and self.static.get(member.instance_id) == member.member_id
        ):
            del self.static[member.instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    def swap(self, old: ClassicGroupMember, new: ClassicGroupMember) -> None:
        """Replace one member by another, at the same position in the order of joining."""
        members: dict[str, ClassicGroupMember] = {}
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

    def apply_record(self, key: OffsetKey, committed: Committed, order: int) -> None:
        """Apply a commit, unless a later record has already been applied."""
        # Records are stored by ascending `order`, but commits of a transaction take
        # effect at its marker. After a deletion, `unstable` no longer contains the
        # commits of earlier records.
        if key in self.applied and order < self.applied[key]:
            return
        topic, partition = key
        self.applied[key] = order
        self.offsets.setdefault(topic, {})[partition] = committed

    def has_commit_of(self, key: OffsetKey, topics: Collection[TopicWithId]) -> bool:
        """Return whether a stored commit, also of an open transaction, is of a topic."""
        topic, partition = key
        commits = [
            pending[key][1] for pending in self.unstable.values() if key in pending
        ]
        stored = self.offsets.get(topic, {}).get(partition)
        if stored is not None:
            commits.append(stored)
        return any((topic, commit.topic_id) in topics for commit in commits)

    def drop_topics(self, topics: Collection[TopicWithId]) -> list[OffsetKey]:
        """Remove the offsets that were committed for these topics, and return their keys."""
        keys = [
            (topic, partition)
            for topic, partitions in self.offsets.items()
            for partition, committed in partitions.items()
            if (topic, committed.topic_id) in topics
        ]
        for topic, partition in keys:
            del self.offsets[topic][partition]
            if not self.offsets[topic]:
                del self.offsets[topic]
        for producer_id, pending in [*self.unstable.items()]:
            dropped = [
                key
                for key, (_, committed) in pending.items()
                if (key[0], committed.topic_id) in topics
            ]
            for key in dropped:
                del pending[key]
            if not pending:
                del self.unstable[producer_id]
            keys += dropped
        return [*dict.fromkeys(keys)]

    def next_order(self) -> int:
        self.order += 1
        return self.order

    def end_transaction(self, producer_id: int, *, commit: bool) -> None:
        """Apply or drop the pending offsets of a producer whose marker is in the log."""
        if commit:
            for key, (order, committed) in self.unstable.get(producer_id, {}).items():
                self.apply_record(key, committed, order)
        # Last: after an interrupt, the next marker applies all offsets again.
        self.unstable.pop(producer_id, None)

    def forget(self, keys: Collection[OffsetKey], order: int) -> None:
        """Apply a deletion, except to offsets that a later record commits."""
        for key in keys:
            for offsets in self.unstable.values():
                if key in offsets and offsets[key][0] < order:
                    del offsets[key]
        self.unstable = {
            producer_id: offsets
            for producer_id, offsets in self.unstable.items()
            if offsets
        }
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


def rebalance_timeout_ms(source: Join | StoredMember) -> int:
    """Return how long a member may take to rejoin.

    Old versions of the request and of the record do not contain this timeout. They use
    the session timeout.
    """
    if source.rebalance_timeout_ms < 0:
        return source.session_timeout_ms
    return source.rebalance_timeout_ms
