"""A group of the consumer protocol (KIP-848): its facts, and decisions from them.

Rules:
- A fact is the value of one record, and a group consists of facts only. Loading applies
  the same facts as a transition.
- The group epoch increases if the members, their subscriptions or the subscribed topics
  change. The targets, each member's intended partitions, are then computed again. Each
  heartbeat moves a member closer to its target.
- A partition is in `assigned` or `revoking` of at most one member, its owner. Another
  member gets the partition only after the owner has confirmed that it gave the
  partition up, or after the owner was removed.

States of a member (broker reference 4.4), as computed by reconciled():

    STABLE      has reached the target that it was sent
    UNREVOKED   must give up `revoking`, and confirm that with a heartbeat that lists
                its partitions
    UNRELEASED  waits for partitions that other members have not given up

Such a group may contain members of the classic protocol, so that its clients can be
upgraded one by one. Their facts are the same; migration.py translates their
requests and answers.

consumer_transitions.py decides which change a request causes. This module does not
return effects.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol, TypeVar

import attrs

from logcore.coordination.consumer_assignors import (
    ASSIGNORS,
    Counts,
    Subscriber,
    Targets,
)
from logcore.coordination.group_requests import (
    GroupError,
    Result,
    Waiter,
    check_member,
)
from logcore.coordination.memory_budget import ITEM_BYTES, MEMBER_BYTES
from logcore.format.consumer_group_records import (
    ConsumerKey,
    ConsumerMember,
    ConsumerValue,
    Current,
    GroupEpoch,
    MemberState,
    Partition,
    Partitions,
    RecordKind,
    Resolved,
    consumer_key,
    consumer_value,
)
from logcore.format.group_records import GroupRecord, group_key

#: Kafka's names of the states in which a member does not have its target yet.
ASSIGNING: Final = "Assigning"
RECONCILING: Final = "Reconciling"

#: The member epoch of a static member that left temporarily.
AWAY: Final = -2
NO_PARTITIONS: Final[Partitions] = frozenset()
#: The identity of a record in its group: its kind and name.
Fact = tuple[RecordKind, str]
_T = TypeVar("_T")


class Topics(Protocol):
    """The topics of the cluster. `version` changes with each change of the topics."""

    @property
    def version(self) -> int: ...

    def names(self) -> Iterable[str]:
        """Return the names that a pattern can match."""
        ...

    def id_and_count(self, name: str) -> tuple[bytes, int] | None:
        """Return id and number of partitions; None if the topic does not exist."""
        ...


#: Returns a function that tests whether a pattern matches the whole name of a topic.
#: Raises ValueError for an invalid pattern.
Compile = Callable[[str], Callable[[str], bool]]


class NoTopics:
    """No topics, for coordinators that load groups of this protocol but do not serve it."""

    version = 0

    def names(self) -> Iterable[str]:
        return ()

    def id_and_count(self, name: str) -> tuple[bytes, int] | None:
        return None


@attrs.define(eq=False)
class StepChanges:
    """The changes of one step."""

    #: Each changed fact with its former value, in the order of the changes.
    previous_values: list[tuple[Fact, ConsumerValue]] = attrs.Factory(
        list[tuple[Fact, ConsumerValue]]
    )
    #: The records of these changes.
    records: list[GroupRecord] = attrs.Factory(list[GroupRecord])
    #: Replies to send after the records are durable.
    answers: list[tuple[Waiter, Result]] = attrs.Factory(list[tuple[Waiter, Result]])


class ConsumerGroup:
    """The facts of one group, and its steps in progress."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        #: The group epoch, which a change of subscriptions or topics increases. A new
        #: group has 0.
        self.epoch = 0
        #: The hash_of() the subscribed topics at this epoch.
        self.metadata_hash = 0
        #: The group epoch for which the targets were computed.
        self.target_epoch = 0
        #: The data of each member, by member id.
        self.members: dict[str, ConsumerMember] = {}
        #: The partitions that each member should own.
        self.targets: dict[str, Partitions] = {}
        #: The partitions that each member owns, and its epoch.
        self.currents: dict[str, Current] = {}
        #: The topics that each pattern matches, by its text.
        self.patterns: dict[str, Resolved] = {}
        #: The owner of each partition.
        self.owners: dict[Partition, str] = {}
        #: The member id of each instance id.
        self.static: dict[str, str] = {}
        #: Steps whose records are being stored.
        self.storing: list[StepChanges] = []
        #: Steps whose records are stored next.
        self.queued: list[StepChanges] = []
        #: Facts whose records could not be stored, but may be on disk. They are written
        #: again with the next records.
        self.unsure: dict[Fact, None] = {}
        #: Version of the topics when they were last compared with the facts.
        self.applied_topics_version: int | None = None
        #: Version of the topics when each pattern was last resolved.
        self.pattern_versions: dict[str, int] = {}
        #: The end of each member's session.
        self.deadlines_ms: dict[str, int] = {}
        #: When the timer of each session expires, which can be before the session ends.
        self.timers_ms: dict[str, int] = {}
        #: Members with a timer for giving up partitions.
        self.revocations: set[str] = set()
        #: Classic members with a timer for rejoining, and for their Sync request.
        self.rejoins: set[str] = set()
        self.syncs: set[str] = set()

    def held_bytes(self) -> int:
        """Return the approximate memory use of the members."""
        size = 0
        for member in self.members.values():
            texts = (
                *member.topic_names,
                member.client_id,
                member.pattern or "",
                member.instance_id or "",
            )
            size += MEMBER_BYTES + sum(map(len, texts)) + ITEM_BYTES * len(texts)
            if member.classic is not None:
                size += sum(
                    len(name) + len(metadata)
                    for name, metadata in member.classic.protocols
                )
        return size

    # -- facts

    def value_of(self, fact: Fact) -> ConsumerValue:
        kind, name = fact
        match kind:
            case RecordKind.GROUP:
                if self.epoch:
                    return GroupEpoch(self.epoch, self.metadata_hash)
                return None
            case RecordKind.MEMBER:
                return self.members.get(name)
            case RecordKind.TARGET_EPOCH:
                return self.target_epoch or None
            case RecordKind.TARGET:
                return self.targets.get(name)
            case RecordKind.CURRENT:
                return self.currents.get(name)
            case RecordKind.PATTERN:
                return self.patterns.get(name)
            # Such records are only deleted.
            case RecordKind.CLASSIC | RecordKind.TOPICS:
                return None

    def apply_record(self, fact: Fact, value: ConsumerValue) -> None:
        """Set a fact; None deletes it."""
        kind, name = fact
        match kind:
            case RecordKind.GROUP:
                known = _checked_value(GroupEpoch, value) or GroupEpoch(0)
                self.epoch = known.epoch
                self.metadata_hash = known.metadata_hash
            case RecordKind.MEMBER:
                self._put_member(name, _checked_value(ConsumerMember, value))
            case RecordKind.TARGET_EPOCH:
                self.target_epoch = _checked_value(int, value) or 0
            case RecordKind.TARGET:
                _set_or_delete(self.targets, name, _checked_value(frozenset, value))
            case RecordKind.CURRENT:
                self._put_current(name, _checked_value(Current, value))
            case RecordKind.PATTERN:
                _set_or_delete(self.patterns, name, _checked_value(Resolved, value))
            case RecordKind.CLASSIC | RecordKind.TOPICS:
                pass

    def _put_member(self, member_id: str, member: ConsumerMember | None) -> None:
        # If another member has taken over the instance id, it remains with that member.
        before = self.members.get(member_id)
        if (
            before is not None
            and before.instance_id is not None
            and self.static.get(before.instance_id) == member_id
        ):
            del self.static[before.instance_id]
        _set_or_delete(self.members, member_id, member)
        if member is not None and member.instance_id is not None:
            self.static[member.instance_id] = member_id

    def _put_current(self, member_id: str, current: Current | None) -> None:
        before = self.currents.get(member_id)
        if before is not None:
            for partition in before.assigned | before.revoking:
                if self.owners.get(partition) == member_id:
                    del self.owners[partition]
        _set_or_delete(self.currents, member_id, current)
        if current is not None:
            # A partition that a member must revoke is not free yet.
            for partition in current.assigned | current.revoking:
                self.owners[partition] = member_id

    def facts(self) -> Iterator[Fact]:
        """Yield all facts with a record, members first and the group last.

        Kafka deletes them in this order.
        """
        yield from ((RecordKind.CURRENT, name) for name in self.currents)
        yield from ((RecordKind.TARGET, name) for name in self.targets)
        yield from ((RecordKind.MEMBER, name) for name in self.members)
        yield from ((RecordKind.PATTERN, text) for text in self.patterns)
        if self.target_epoch:
            yield RecordKind.TARGET_EPOCH, ""
        if self.epoch:
            yield RecordKind.GROUP, ""

    def record(self, fact: Fact, value: ConsumerValue) -> GroupRecord:
        kind, _ = fact
        # Only deleted here.
        if kind is RecordKind.CLASSIC:
            value = None
        return fact_key(self.group_id, fact), consumer_value(value)

    def tombstones(self) -> tuple[GroupRecord, ...]:
        """Return records that delete the whole group, including facts in `unsure`."""
        return tuple(
            self.record(fact, None)
            for fact in dict.fromkeys([*self.unsure, *self.facts()])
        )

    # -- decisions

    @property
    def is_busy(self) -> bool:
        """Whether records are being stored, so that the facts are ahead of the disk."""
        return bool(self.storing)

    @property
    def state(self) -> str:
        """The state of the group by Kafka's names. Computing it visits all members."""
        if not self.members:
            return "Empty"
        if self.epoch > self.target_epoch:
            return ASSIGNING
        for member_id in self.members:
            current = self.current(member_id)
            if (
                current.state is not MemberState.STABLE
                or current.member_epoch != self.target_epoch
            ):
                return RECONCILING
        return "Stable"

    def current(self, member_id: str) -> Current:
        return self.currents.get(member_id) or Current()

    def check_member(
        self, member_id: str, instance_id: str | None
    ) -> GroupError | None:
        """Check the two ids of a request that does not join."""
        return check_member(self.members, self.static, member_id, instance_id)

    def check_epoch(self, member_id: str, member_epoch: int) -> GroupError | None:
        """Check that a member that commits or fetches offsets has its present epoch."""
        member = self.members.get(member_id)
        if member is None:
            return GroupError.UNKNOWN_MEMBER_ID
        if self.current(member_id).member_epoch == member_epoch:
            return None
        # Classic clients do not know the error of the consumer protocol.
        if member.classic is not None:
            return GroupError.ILLEGAL_GENERATION
        return GroupError.STALE_MEMBER_EPOCH

    def is_classic(self, member_id: str) -> bool:
        """Return whether this is a member that uses the classic protocol."""
        member = self.members.get(member_id)
        return member is not None and member.classic is not None

    @property
    def is_all_classic(self) -> bool:
        """Whether the group has members, and all of them use the classic protocol."""
        return bool(self.members) and all(
            member.classic is not None for member in self.members.values()
        )

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Return whether a member with these classic protocols could be in the group.

        At least one protocol must be common to all classic members. If only they
        remain, the group is downgraded and needs it.
        """
        if protocol_type != "consumer":
            return False
        supported_protocols = [
            member.classic.protocols
            for member in self.members.values()
            if member.classic is not None
        ]
        common = set(names)
        for protocols in supported_protocols:
            common &= {name for name, _ in protocols}
        return bool(common)

    def waits_for_others(self, member_id: str) -> bool:
        """Return whether another member still owns a partition of this member's target."""
        missing = (
            self.targets.get(member_id, NO_PARTITIONS)
            - self.current(member_id).assigned
        )
        return any(partition in self.owners for partition in missing)

    def accepts_epoch(
        self, member_id: str, member_epoch: int, owned: Partitions | None
    ) -> bool:
        """Return whether a heartbeat has the member's present epoch, or the one before.

        A member sends the one before if an answer was lost. This applies to joining
        too: a Join that arrives late, when the member has partitions, must not count as
        a report that it owns none.
        """
        current = self.current(member_id)
        if member_epoch == current.member_epoch:
            return True
        has_previous_epoch = (
            member_epoch < current.member_epoch
            and member_epoch == current.previous_epoch
        )
        return has_previous_epoch and owned is not None and owned <= current.assigned

    def assignor(self) -> str:
        """Return the assignor that most members request, in a tie the first requested.

        If no member requests one, this is the first in ASSIGNORS.
        """
        votes = Counter(
            member.assignor
            for member in self.members.values()
            if member.assignor is not None
        )
        if not votes:
            return next(iter(ASSIGNORS))
        return votes.most_common(1)[0][0]

    def subscribed(self) -> frozenset[str]:
        """Return the names of all subscribed topics, including missing topics."""
        wanted = {
            (member.topic_names, member.pattern) for member in self.members.values()
        }
        return frozenset(
            name
            for names, pattern in wanted
            for name in self._subscribed_topics(names, pattern)
        )

    def _subscribed_topics(
        self, names: tuple[str, ...], pattern: str | None
    ) -> frozenset[str]:
        resolved = None
        if pattern is not None:
            resolved = self.patterns.get(pattern)
        if resolved is None:
            return frozenset(names)
        return frozenset((*names, *resolved.topics))

    def hash_of(self, topics: Topics) -> int:
        """Return a hash of the existing subscribed topics; 0 if there are none.

        Hashes are only compared for equality.
        """
        # Sorted, so that all brokers compute the same hash.
        found = [
            (name, topics.id_and_count(name)) for name in sorted(self.subscribed())
        ]
        known = [
            f"{name} {facts[0].hex()} {facts[1]}"
            for name, facts in found
            if facts is not None
        ]
        if not known:
            return 0
        digest = hashlib.blake2b("\n".join(known).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    def compute_targets(self, topics: Topics) -> Targets:
        """Return the target partitions of each member."""
        ids: dict[str, bytes] = {}
        counts: dict[bytes, int] = {}
        for name in sorted(self.subscribed()):
            facts = topics.id_and_count(name)
            if facts is not None:
                ids[name] = facts[0]
                counts[facts[0]] = facts[1]
        # Members with equal subscriptions share one set, because the assignors compare
        # sets by identity first.
        shared: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
        members = []
        for member_id, member in self.members.items():
            member_subscription = member.topic_names, member.pattern
            if member_subscription not in shared:
                shared[member_subscription] = frozenset(
                    ids[name]
                    for name in self._subscribed_topics(*member_subscription)
                    if name in ids
                )
            members.append(
                Subscriber(
                    member_id=member_id,
                    instance_id=member.instance_id,
                    topics=shared[member_subscription],
                    target=self.targets.get(member_id, NO_PARTITIONS),
                )
            )
        return self._assigned(members, counts)

    def _assigned(self, members: list[Subscriber], counts: Counts) -> Targets:
        return ASSIGNORS[self.assignor()](members, counts)

    def reconciled(self, member_id: str, owned: Partitions | None) -> Current | None:
        """Return the next state of a member that sent a heartbeat.

        `owned` contains the partitions that the member reports, None if it reports
        none. The result is None if the member's state is unknown and it must rejoin.
        """
        current = self.current(member_id)
        match current.state:
            case MemberState.STABLE if current.member_epoch == self.target_epoch:
                return current
            case MemberState.STABLE | MemberState.UNRELEASED:
                return self._next(member_id, current, current.member_epoch, owned)
            case MemberState.UNREVOKED:
                if owned is None or owned & current.revoking:
                    # The member has not given up all of `revoking` yet.
                    return current
                return self._next(member_id, current, current.member_epoch + 1, owned)
            case MemberState.UNKNOWN:
                if owned is None or owned:
                    return None
                return self._next(member_id, current, self.target_epoch, owned)

    def _next(
        self,
        member_id: str,
        current: Current,
        member_epoch: int,
        owned: Partitions | None,
    ) -> Current:
        target = self.targets.get(member_id, NO_PARTITIONS)
        keep = current.assigned & target
        give = current.assigned - keep
        new = target - keep
        unreleased = frozenset(
            partition for partition in new if partition in self.owners
        )
        revoking = NO_PARTITIONS
        # A member gives up partitions before it gets more. A member that does not
        # report the partitions in `give` has already given them up.
        if give and (owned is None or owned & give):
            state = MemberState.UNREVOKED
            revoking = give
            assigned = keep
        else:
            if unreleased:
                state = MemberState.UNRELEASED
            else:
                state = MemberState.STABLE
            member_epoch = self.target_epoch
            assigned = keep | (new - unreleased)
        is_same = (member_epoch, state, assigned, revoking) == (
            current.member_epoch,
            current.state,
            current.assigned,
            current.revoking,
        )
        if is_same:
            return current
        return Current(
            member_epoch=member_epoch,
            previous_epoch=current.member_epoch,
            state=state,
            assigned=assigned,
            revoking=revoking,
        )


def fact_key(group_id: str, fact: Fact) -> bytes:
    """Return the key of the fact's record."""
    kind, name = fact
    if kind is RecordKind.CLASSIC:
        return group_key(group_id)
    return consumer_key(ConsumerKey(kind, group_id, name))


def _checked_value(type_: type[_T], value: ConsumerValue) -> _T | None:
    assert value is None or isinstance(value, type_), (
        f"no value of such a record: {value!r}"
    )
    return value


def _set_or_delete(values: dict[str, _T], name: str, value: _T | None) -> None:
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value


def restored(group_id: str, facts: Mapping[Fact, ConsumerValue]) -> ConsumerGroup:
    """Return a group from its records; ignore members without a member record."""
    group = ConsumerGroup(group_id)
    for fact in sorted(facts):
        kind, name = fact
        has_no_member = (
            kind in (RecordKind.TARGET, RecordKind.CURRENT)
            and (RecordKind.MEMBER, name) not in facts
        )
        # TOPICS records come from an older Kafka. Facts in `unsure` are deleted with
        # the next records.
        if kind is RecordKind.TOPICS or has_no_member:
            group.unsure[fact] = None
        else:
            group.apply_record(fact, facts[fact])
    return group
