"""How the partitions of a group's topics are divided among its members: pure functions,
as Kafka's assignors do it.

| name | |
|---|---|
| `range` | of each topic a stretch for each member, in the order of members |
| `roundrobin` | all partitions dealt out one by one |
| `sticky` | as even as can be, and what a member had stays with it |
| `cooperative-sticky` | the same; a partition that moves stays unassigned until its owner has given it up |

Rules (clients reference 7.5):
- Members are in the order of their instance ids, then of their member ids, compared as
  Java compares text.
- Topics that there are not, and topics without partitions, are passed over. Racks are
  not used.
- A member that subscribes to nothing gets nothing.

Nothing here knows a group's state, or the bytes that members exchange
(format/group_records.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol

import attrs

from logcore.consumer.sticky_assignor import balance
from logcore.consumer.topic_partition import Claims, Member, TopicPartition, java_order

Assignment = dict[str, list[TopicPartition]]


class Assignor(Protocol):
    """What a group may be divided by. name: as members name it to one another.
    is_cooperative: members keep what they have while a rebalance goes on.

    It may have two more methods, which are called if they exist:
    subscription_user_data(topics) -> bytes or None says something to the member that
    divides, which finds it in Member.user_data; on_assignment(partitions, generation)
    hears what a member was given, in its thread.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_cooperative(self) -> bool: ...

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Mapping[str, list[TopicPartition]]:
        """Member id -> partitions. partitions: topic -> how many it has."""
        ...


@attrs.frozen
class RangeAssignor:
    name: str = "range"
    is_cooperative: bool = False

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Assignment:
        ordered = sorted(members, key=Member.order)
        found: Assignment = {member.member_id: [] for member in ordered}
        topics = {topic for member in ordered for topic in member.topics}
        for topic in sorted(topics, key=java_order):
            subscribed = [member for member in ordered if topic in member.topics]
            count = partitions.get(topic, 0)
            each, surplus = divmod(count, len(subscribed))
            first = 0
            for number, member in enumerate(subscribed):
                last = first + each + (number < surplus)
                found[member.member_id] += [
                    TopicPartition(topic, one) for one in range(first, last)
                ]
                first = last
        return found


@attrs.frozen
class RoundRobinAssignor:
    name: str = "roundrobin"
    is_cooperative: bool = False

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Assignment:
        ordered = sorted(members, key=Member.order)
        found: Assignment = {member.member_id: [] for member in ordered}
        topics = {topic for member in ordered for topic in member.topics}
        ring = itertools.cycle(ordered)
        for topic in sorted(topics, key=java_order):
            for number in range(partitions.get(topic, 0)):
                member = next(one for one in ring if topic in one.topics)
                found[member.member_id].append(TopicPartition(topic, number))
        return found


@attrs.frozen
class StickyAssignor:
    name: str = "sticky"
    is_cooperative: bool = False

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Assignment:
        return _sticky(partitions, list(members))


@attrs.frozen
class CooperativeStickyAssignor:
    name: str = "cooperative-sticky"
    is_cooperative: bool = True

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Assignment:
        given = list(members)
        return withheld(Claims.of(given, partitions), _sticky(partitions, given))


def withheld(claims: Claims, found: Assignment) -> Assignment:
    """An assignment without the partitions that somebody else still has: their owners
    revoke them first.
    """
    return {
        member_id: [
            one
            for one in those
            if claims.claimants.get(one, {member_id}) == {member_id}
        ]
        for member_id, those in found.items()
    }


def _sticky(partitions: Mapping[str, int], members: list[Member]) -> Assignment:
    known = {topic: count for topic, count in partitions.items() if count > 0}
    claims = Claims.of(members, known)
    subscriptions = {frozenset(member.topics) for member in members}
    if len(subscriptions) == 1:
        return _constrained(known, members, claims)
    return balance(known, members, claims)


class _Bounds(NamedTuple):
    """low, high: the least and the most that a member gets; extra: how many get the
    most.
    """

    low: int
    high: int
    extra: int


def _constrained(
    known: Mapping[str, int], members: list[Member], claims: Claims
) -> Assignment:
    """For members that all subscribe to the same topics."""
    ordered = sorted(members, key=lambda member: java_order(member.member_id))
    topics = sorted(
        (topic for topic in ordered[0].topics if topic in known), key=java_order
    )
    total = sum(known[topic] for topic in topics)
    low, extra = divmod(total, len(ordered))
    bounds = _Bounds(low, low + bool(extra), extra)
    found: Assignment = {member.member_id: [] for member in ordered}
    under: list[str] = []
    exact: list[str] = []
    full = 0
    for member in ordered:
        mine = sorted(
            claims.kept(member), key=lambda one: (one.partition, java_order(one.topic))
        )
        if len(mine) < bounds.low:
            kept = mine
            under.append(member.member_id)
        elif len(mine) >= bounds.high and full < bounds.extra:
            kept = mine[: bounds.high]
            full += 1
            if full == bounds.extra:
                exact.clear()
        else:
            kept = mine[: bounds.low]
            if full < bounds.extra:
                exact.append(member.member_id)
        found[member.member_id] = kept
    taken = {one for those in found.values() for one in those}
    free = [
        TopicPartition(topic, number)
        for topic in topics
        for number in range(known[topic])
        if TopicPartition(topic, number) not in taken
    ]
    _deal(free, found, under, exact, bounds)
    return found


def _deal(
    free: list[TopicPartition],
    found: Assignment,
    under: list[str],
    exact: list[str],
    bounds: _Bounds,
) -> None:
    """First to those that have too few, in turns; then one each to those that may have
    one more.
    """
    waiting = list(under)
    at = 0
    for one in free:
        if waiting:
            at %= len(waiting)
            member_id = waiting[at]
            found[member_id].append(one)
            if len(found[member_id]) == bounds.low:
                waiting.pop(at)
                exact.append(member_id)
            else:
                at += 1
        else:
            found[exact.pop(0)].append(one)


COOPERATIVE_STICKY: Final = CooperativeStickyAssignor()
STICKY: Final = StickyAssignor()
_ALL: Final[tuple[Assignor, ...]] = (
    RangeAssignor(),
    RoundRobinAssignor(),
    STICKY,
    COOPERATIVE_STICKY,
)
#: Those that can be named.
ASSIGNORS: Final[Mapping[str, Assignor]] = {
    assignor.name: assignor for assignor in _ALL
}
