"""Assignors, which divide the partitions of a group among its members, as in Kafka.

| name | assignment |
|---|---|
| `range` | of each topic, a range of partitions for each member, in the order of members |
| `roundrobin` | all partitions in turn |
| `sticky` | as even as possible; members keep their partitions |
| `cooperative-sticky` | like `sticky`, but a moved partition remains unassigned until its owner has revoked it |

Rules (clients reference 7.5):
- Members are ordered by their instance ids, then by their member ids, in Java's order
  of text.
- Unknown topics, and topics without partitions, are ignored. Racks are not used.
- A member without subscriptions receives no partitions.

All functions are pure. Groups and the bytes that members exchange are in
logcore.coordination and format/group_records.py.
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
    """A rule that divides partitions among members.

    `name` is the name in the protocol of the group. If `is_cooperative`, members keep
    their partitions during a rebalance.

    Two more methods are called if they exist. subscription_user_data(topics) returns
    bytes or None. The leader of the group, whose assignor runs, receives the bytes as
    Member.user_data. on_assignment(partitions, generation) receives the partitions of
    the member, in the thread that uses the consumer.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_cooperative(self) -> bool: ...

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Mapping[str, list[TopicPartition]]:
        """Return the partitions of each member by its id. `partitions` maps topics to
        their numbers of partitions.
        """
        ...


@attrs.frozen
class RangeAssignor:
    name: str = "range"
    is_cooperative: bool = False

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Assignment:
        ordered = sorted(members, key=Member.order)
        assignment: Assignment = {member.member_id: [] for member in ordered}
        topics = {topic for member in ordered for topic in member.topics}
        for topic in sorted(topics, key=java_order):
            subscribed = [member for member in ordered if topic in member.topics]
            count = partitions.get(topic, 0)
            each, surplus = divmod(count, len(subscribed))
            first = 0
            for number, member in enumerate(subscribed):
                last = first + each + (number < surplus)
                assignment[member.member_id] += [
                    TopicPartition(topic, number) for number in range(first, last)
                ]
                first = last
        return assignment


@attrs.frozen
class RoundRobinAssignor:
    name: str = "roundrobin"
    is_cooperative: bool = False

    def assign(
        self, partitions: Mapping[str, int], members: Iterable[Member]
    ) -> Assignment:
        ordered = sorted(members, key=Member.order)
        assignment: Assignment = {member.member_id: [] for member in ordered}
        topics = {topic for member in ordered for topic in member.topics}
        ring = itertools.cycle(ordered)
        for topic in sorted(topics, key=java_order):
            for number in range(partitions.get(topic, 0)):
                member = next(
                    candidate for candidate in ring if topic in candidate.topics
                )
                assignment[member.member_id].append(TopicPartition(topic, number))
        return assignment


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
        member_list = list(members)
        return withhold_claimed(
            Claims.of(member_list, partitions), _sticky(partitions, member_list)
        )


def withhold_claimed(claims: Claims, assignment: Assignment) -> Assignment:
    """Return an assignment without the partitions that another member still owns, and
    must revoke first.
    """
    return {
        member_id: [
            partition
            for partition in owned
            if claims.claimants.get(partition, {member_id}) == {member_id}
        ]
        for member_id, owned in assignment.items()
    }


def _sticky(partitions: Mapping[str, int], members: list[Member]) -> Assignment:
    known = {topic: count for topic, count in partitions.items() if count > 0}
    claims = Claims.of(members, known)
    subscriptions = {frozenset(member.topics) for member in members}
    if len(subscriptions) == 1:
        return _assign_equal_subscriptions(known, members, claims)
    return balance(known, members, claims)


class _Bounds(NamedTuple):
    """`low` and `high` are the fewest and the most partitions of a member; `extra`
    members have `high`.
    """

    low: int
    high: int
    extra: int


def _assign_equal_subscriptions(
    known: Mapping[str, int], members: list[Member], claims: Claims
) -> Assignment:
    """Assign partitions to members that subscribe to the same topics."""
    ordered = sorted(members, key=lambda member: java_order(member.member_id))
    topics = sorted(
        (topic for topic in ordered[0].topics if topic in known), key=java_order
    )
    total = sum(known[topic] for topic in topics)
    low, extra = divmod(total, len(ordered))
    bounds = _Bounds(low, low + bool(extra), extra)
    assignment: Assignment = {member.member_id: [] for member in ordered}
    below_low: list[str] = []
    at_low: list[str] = []
    at_high_count = 0
    for member in ordered:
        previous_partitions = sorted(
            claims.retained_by(member),
            key=lambda partition: (partition.partition, java_order(partition.topic)),
        )
        if len(previous_partitions) < bounds.low:
            retained = previous_partitions
            below_low.append(member.member_id)
        elif len(previous_partitions) >= bounds.high and at_high_count < bounds.extra:
            retained = previous_partitions[: bounds.high]
            at_high_count += 1
            if at_high_count == bounds.extra:
                at_low.clear()
        else:
            retained = previous_partitions[: bounds.low]
            if at_high_count < bounds.extra:
                at_low.append(member.member_id)
        assignment[member.member_id] = retained
    assigned_partitions = {
        partition for owned in assignment.values() for partition in owned
    }
    free = [
        TopicPartition(topic, number)
        for topic in topics
        for number in range(known[topic])
        if TopicPartition(topic, number) not in assigned_partitions
    ]
    _assign_remaining(free, assignment, below_low, at_low, bounds)
    return assignment


def _assign_remaining(
    free: list[TopicPartition],
    assignment: Assignment,
    below_low: list[str],
    at_low: list[str],
    bounds: _Bounds,
) -> None:
    """Assign partitions in turn to the members with fewer than bounds.low. Then assign
    one partition each to members with exactly bounds.low.
    """
    waiting = list(below_low)
    index = 0
    for partition in free:
        if waiting:
            index %= len(waiting)
            member_id = waiting[index]
            assignment[member_id].append(partition)
            if len(assignment[member_id]) == bounds.low:
                waiting.pop(index)
                at_low.append(member_id)
            else:
                index += 1
        else:
            assignment[at_low.pop(0)].append(partition)


COOPERATIVE_STICKY: Final = CooperativeStickyAssignor()
STICKY: Final = StickyAssignor()
_ALL: Final[tuple[Assignor, ...]] = (
    RangeAssignor(),
    RoundRobinAssignor(),
    STICKY,
    COOPERATIVE_STICKY,
)
#: The built-in assignors by name.
ASSIGNORS: Final[Mapping[str, Assignor]] = {
    assignor.name: assignor for assignor in _ALL
}
