"""A group of the consumer protocol (KIP-848): its facts, decisions from them, and small changes.

Rules:
- A fact is the value of one record, and nothing else is known of a group: loading puts the same facts as a transition
  does.
- A change of the members, of their subscriptions or of the topics in these raises the epoch of the group. For a raised
  epoch the targets are computed: the partitions that each member shall have. Each heartbeat of a member brings it
  nearer to its target.
- A partition is in `assigned` or `revoking` of at most one member, its owner. No other member gets it before the owner
  has said that it gave it up, or is removed.

A member's states (broker reference 4.4), by what reconciled() makes of them:

    STABLE      at the target that it was told
    UNREVOKED   has to give up `revoking`, and to say so with a heartbeat that lists what it owns
    UNRELEASED  waits for partitions that others have not given up

Members of the classic protocol may be in such a group, so that its clients can be exchanged one by one. Their facts are
the same; classicmembers.py translates their requests and answers.

Which change follows on which request is decided in heartbeats.py. Nothing here asks for an effect.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol, TypeVar

import attrs

from logcore.coordination.effects import GroupError, Result, Waiter
from logcore.coordination.remembered import ITEM_BYTES, MEMBER_BYTES
from logcore.coordination.targets import ASSIGNORS, Counts, Subscriber, Targets
from logcore.format.consumergrouprecords import (
    ConsumerKey,
    ConsumerMember,
    ConsumerValue,
    Current,
    GroupEpoch,
    Kind,
    MemberState,
    Partition,
    Partitions,
    Resolved,
    consumer_key,
    consumer_value,
)
from logcore.format.grouprecords import GroupRecord, group_key

ASSIGNING: Final = "Assigning"
RECONCILING: Final = "Reconciling"

#: The member epoch of a static member that left and means to come back.
AWAY: Final = -2
NOTHING: Final[Partitions] = frozenset()
#: A record without its group: its kind and name.
Fact = tuple[Kind, str]
_T = TypeVar("_T")


class Topics(Protocol):
    """The topics of the cluster. version: another one after each change of them."""

    @property
    def version(self) -> int: ...

    def names(self) -> Iterable[str]:
        """Those that a pattern may mean."""
        ...

    def facts(self, name: str) -> tuple[bytes, int] | None:
        """Id and number of partitions; None when there is no such topic."""
        ...


#: Gives the test whether a pattern means a topic's whole name. Raises ValueError for a pattern that is none.
Compile = Callable[[str], Callable[[str], bool]]


class NoTopics:
    """For coordinators that serve no group of this protocol, but keep those they find."""

    version = 0

    def names(self) -> Iterable[str]:
        return ()

    def facts(self, name: str) -> tuple[bytes, int] | None:
        return None


@attrs.define(eq=False)
class Written:
    """What one step changed: the values of before, in order, and the answers to give once that is on disk."""

    before: list[tuple[Fact, ConsumerValue]] = attrs.Factory(list[tuple[Fact, ConsumerValue]])
    records: list[GroupRecord] = attrs.Factory(list[GroupRecord])
    answers: list[tuple[Waiter, Result]] = attrs.Factory(list[tuple[Waiter, Result]])


class ConsumerGroup:
    """members, targets, currents, by member id; patterns by their text: the facts. owners: of each partition.

    storing: steps whose records are on their way to the disk; queued: those whose records follow. unsure: facts whose
    records could not be stored, and may be on disk all the same; they are written again with the next ones.
    seen_version: of the topics, when they were last compared with the facts. deadlines_ms: when sessions end;
    timers_ms: when that is checked next, which may be earlier. revocations: members with a timer for giving up
    partitions. rejoins, syncs: members of the classic protocol with a timer for joining again, and for asking for their
    assignment.
    """

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.epoch = 0
        self.metadata_hash = 0
        self.target_epoch = 0
        self.members: dict[str, ConsumerMember] = {}
        self.targets: dict[str, Partitions] = {}
        self.currents: dict[str, Current] = {}
        self.patterns: dict[str, Resolved] = {}
        self.owners: dict[Partition, str] = {}
        self.static: dict[str, str] = {}
        self.storing: list[Written] = []
        self.queued: list[Written] = []
        self.unsure: dict[Fact, None] = {}
        self.seen_version: int | None = None
        self.deadlines_ms: dict[str, int] = {}
        self.timers_ms: dict[str, int] = {}
        self.revocations: set[str] = set()
        self.rejoins: set[str] = set()
        self.syncs: set[str] = set()

    def held_bytes(self) -> int:
        """About how much memory its members take."""
        size = 0
        for member in self.members.values():
            texts = (*member.topic_names, member.client_id, member.pattern or "", member.instance_id or "")
            size += MEMBER_BYTES + sum(map(len, texts)) + ITEM_BYTES * len(texts)
            if member.classic is not None:
                size += sum(len(name) + len(metadata) for name, metadata in member.classic.protocols)
        return size

    # -- facts

    def value_of(self, fact: Fact) -> ConsumerValue:
        kind, name = fact
        match kind:
            case Kind.GROUP:
                if self.epoch:
                    return GroupEpoch(self.epoch, self.metadata_hash)
                return None
            case Kind.MEMBER:
                return self.members.get(name)
            case Kind.TARGET_EPOCH:
                return self.target_epoch or None
            case Kind.TARGET:
                return self.targets.get(name)
            case Kind.CURRENT:
                return self.currents.get(name)
            case Kind.PATTERN:
                return self.patterns.get(name)
            case Kind.CLASSIC | Kind.TOPICS:  # they are only ever deleted
                return None

    def put(self, fact: Fact, value: ConsumerValue) -> None:
        """Takes a fact over. None takes it away."""
        kind, name = fact
        match kind:
            case Kind.GROUP:
                known = _of(GroupEpoch, value) or GroupEpoch(0)
                self.epoch = known.epoch
                self.metadata_hash = known.metadata_hash
            case Kind.MEMBER:
                self._put_member(name, _of(ConsumerMember, value))
            case Kind.TARGET_EPOCH:
                self.target_epoch = _of(int, value) or 0
            case Kind.TARGET:
                _set(self.targets, name, _of(frozenset, value))
            case Kind.CURRENT:
                self._put_current(name, _of(Current, value))
            case Kind.PATTERN:
                _set(self.patterns, name, _of(Resolved, value))
            case Kind.CLASSIC | Kind.TOPICS:
                pass

    def _put_member(self, member_id: str, member: ConsumerMember | None) -> None:
        # Another member may have taken over the instance id since, and keeps it.
        before = self.members.get(member_id)
        if before is not None and before.instance_id is not None and self.static.get(before.instance_id) == member_id:
            del self.static[before.instance_id]
        _set(self.members, member_id, member)
        if member is not None and member.instance_id is not None:
            self.static[member.instance_id] = member_id

    def _put_current(self, member_id: str, current: Current | None) -> None:
        before = self.currents.get(member_id)
        if before is not None:
            for partition in before.assigned | before.revoking:
                if self.owners.get(partition) == member_id:
                    del self.owners[partition]
        _set(self.currents, member_id, current)
        if current is not None:
            for partition in current.assigned | current.revoking:
                self.owners[partition] = member_id

    def facts(self) -> Iterator[Fact]:
        """All that have a record, members first and the group last, as Kafka deletes them."""
        yield from ((Kind.CURRENT, name) for name in self.currents)
        yield from ((Kind.TARGET, name) for name in self.targets)
        yield from ((Kind.MEMBER, name) for name in self.members)
        yield from ((Kind.PATTERN, text) for text in self.patterns)
        if self.target_epoch:
            yield Kind.TARGET_EPOCH, ""
        if self.epoch:
            yield Kind.GROUP, ""

    def record(self, fact: Fact, value: ConsumerValue) -> GroupRecord:
        kind, _ = fact
        if kind is Kind.CLASSIC:  # only ever deleted here
            value = None
        return fact_key(self.group_id, fact), consumer_value(value)

    def tombstones(self) -> tuple[GroupRecord, ...]:
        """Records that delete all of the group, also what may be on disk unknown to us."""
        return tuple(self.record(fact, None) for fact in dict.fromkeys([*self.unsure, *self.facts()]))

    # -- decisions

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way to the disk, so that the facts are ahead of it."""
        return bool(self.storing)

    @property
    def state(self) -> str:
        """By Kafka's names. It looks at all members."""
        if not self.members:
            return "Empty"
        if self.epoch > self.target_epoch:
            return ASSIGNING
        for member_id in self.members:
            current = self.current(member_id)
            if current.state is not MemberState.STABLE or current.member_epoch != self.target_epoch:
                return RECONCILING
        return "Stable"

    def current(self, member_id: str) -> Current:
        return self.currents.get(member_id) or Current()

    def check_member(self, member_id: str, instance_id: str | None) -> GroupError | None:
        """Checks the two ids of a request that does not join."""
        if instance_id is not None:
            present = self.static.get(instance_id)
            if present is None:
                return GroupError.UNKNOWN_MEMBER_ID
            if present != member_id:
                return GroupError.FENCED_INSTANCE_ID
        if member_id in self.members:
            return None
        return GroupError.UNKNOWN_MEMBER_ID

    def check_epoch(self, member_id: str, member_epoch: int) -> GroupError | None:
        """Checks a member that commits or fetches offsets: it has to know its present epoch."""
        member = self.members.get(member_id)
        if member is None:
            return GroupError.UNKNOWN_MEMBER_ID
        if self.current(member_id).member_epoch == member_epoch:
            return None
        if member.classic is not None:
            return GroupError.ILLEGAL_GENERATION
        return GroupError.STALE_MEMBER_EPOCH

    def is_classic(self, member_id: str) -> bool:
        """Whether there is such a member, and it speaks the classic protocol."""
        member = self.members.get(member_id)
        return member is not None and member.classic is not None

    @property
    def is_all_classic(self) -> bool:
        """Whether it has members, and all of them speak the classic protocol."""
        return bool(self.members) and all(member.classic is not None for member in self.members.values())

    def supports(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Whether a member with these classic protocols could be in the group. One of them must be common to all such
        members, in case only they are left: the group then goes back to the classic protocol.
        """
        if protocol_type != "consumer":
            return False
        theirs = [member.classic.protocols for member in self.members.values() if member.classic is not None]
        common = set(names)
        for protocols in theirs:
            common &= {name for name, _ in protocols}
        return bool(common)

    def waits_for_others(self, member_id: str) -> bool:
        """Whether another member still owns a partition of this member's target."""
        missing = self.targets.get(member_id, NOTHING) - self.current(member_id).assigned
        return any(partition in self.owners for partition in missing)

    def accepts_epoch(self, member_id: str, member_epoch: int, owned: Partitions | None) -> bool:
        """Whether a heartbeat names the present epoch of the member, or the one before because an answer was lost.

        This holds for joining too: a request to join that arrives late, when the member has partitions, must not be
        taken as its statement that it owns nothing.
        """
        current = self.current(member_id)
        if member_epoch == current.member_epoch:
            return True
        is_one_behind = member_epoch < current.member_epoch and member_epoch == current.previous_epoch
        return is_one_behind and owned is not None and owned <= current.assigned

    def assignor(self) -> str:
        """The assignor that most members ask for; of equals the one that was asked for first. If no member asks, the
        first that there is.
        """
        votes = Counter(member.assignor for member in self.members.values() if member.assignor is not None)
        if not votes:
            return next(iter(ASSIGNORS))
        return votes.most_common(1)[0][0]

    def subscribed(self) -> frozenset[str]:
        """Names of topics that the members want, also those that do not exist."""
        wanted = {(member.topic_names, member.pattern) for member in self.members.values()}
        return frozenset(name for names, pattern in wanted for name in self._wanted(names, pattern))

    def _wanted(self, names: tuple[str, ...], pattern: str | None) -> frozenset[str]:
        resolved = None
        if pattern is not None:
            resolved = self.patterns.get(pattern)
        if resolved is None:
            return frozenset(names)
        return frozenset((*names, *resolved.topics))

    def hash_of(self, topics: Topics) -> int:
        """Of the topics that the members want and that exist; 0 for none. Only whether two are the same counts."""
        found = [(name, topics.facts(name)) for name in sorted(self.subscribed())]
        known = [f"{name} {facts[0].hex()} {facts[1]}" for name, facts in found if facts is not None]
        if not known:
            return 0
        digest = hashlib.blake2b("\n".join(known).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    def compute_targets(self, topics: Topics) -> Targets:
        """The partitions that each member shall have."""
        ids: dict[str, bytes] = {}
        counts: dict[bytes, int] = {}
        for name in sorted(self.subscribed()):
            facts = topics.facts(name)
            if facts is not None:
                ids[name] = facts[0]
                counts[facts[0]] = facts[1]
        # Members with equal subscriptions share one set: the assignors compare sets by identity first.
        shared: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
        members = []
        for member_id, member in self.members.items():
            wish = member.topic_names, member.pattern
            if wish not in shared:
                shared[wish] = frozenset(ids[name] for name in self._wanted(*wish) if name in ids)
            members.append(
                Subscriber(
                    member_id=member_id,
                    instance_id=member.instance_id,
                    topics=shared[wish],
                    target=self.targets.get(member_id, NOTHING),
                )
            )
        return self._assigned(members, counts)

    def _assigned(self, members: list[Subscriber], counts: Counts) -> Targets:
        return ASSIGNORS[self.assignor()](members, counts)

    def reconciled(self, member_id: str, owned: Partitions | None) -> Current | None:
        """The next state of a member with this heartbeat; None when a member of an unknown state must join again.

        owned: what it says that it still has, None when it says nothing.
        """
        current = self.current(member_id)
        match current.state:
            case MemberState.STABLE if current.member_epoch == self.target_epoch:
                return current
            case MemberState.STABLE | MemberState.UNRELEASED:
                return self._next(member_id, current, current.member_epoch, owned)
            case MemberState.UNREVOKED:
                if owned is None or owned & current.revoking:
                    return current  # it has not given up everything yet
                return self._next(member_id, current, current.member_epoch + 1, owned)
            case MemberState.UNKNOWN:
                if owned is None or owned:
                    return None
                return self._next(member_id, current, self.target_epoch, owned)

    def _next(self, member_id: str, current: Current, member_epoch: int, owned: Partitions | None) -> Current:
        target = self.targets.get(member_id, NOTHING)
        keep = current.assigned & target
        give = current.assigned - keep
        new = target - keep
        unreleased = frozenset(partition for partition in new if partition in self.owners)
        revoking = NOTHING
        # Giving up comes before getting more. A member that says that it does not own those has given them up already.
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
    """Of its record."""
    kind, name = fact
    if kind is Kind.CLASSIC:
        return group_key(group_id)
    return consumer_key(ConsumerKey(kind, group_id, name))


def _of(type_: type[_T], value: ConsumerValue) -> _T | None:
    assert value is None or isinstance(value, type_), f"no value of such a record: {value!r}"
    return value


def _set(values: dict[str, _T], name: str, value: _T | None) -> None:
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value


def restored(group_id: str, facts: Mapping[Fact, ConsumerValue]) -> ConsumerGroup:
    """A group as its records say. Records of a member without its member record are ignored."""
    group = ConsumerGroup(group_id)
    for fact in sorted(facts):
        kind, name = fact
        is_lone = kind in (Kind.TARGET, Kind.CURRENT) and (Kind.MEMBER, name) not in facts
        # TOPICS comes from an older Kafka. In `unsure` both are deleted with the next records.
        if kind is Kind.TOPICS or is_lone:
            group.unsure[fact] = None
        else:
            group.put(fact, facts[fact])
    return group
