"""Target assignments of a consumer group (KIP-848): Kafka's assignors `uniform` and
`range`, pure.

Rules:
- Every partition of a subscribed topic is assigned to exactly one member, and that
  member subscribes to it.
- `uniform` balances: no two members differ by more than one partition if a move could
  help. It moves no more partitions than necessary.
- `range` gives each member adjacent partitions of each topic, whichever member had them
  before.

The caller decides the order of the members, which breaks ties. consumer_transitions.py decides
when a member may use its target.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from logcore.format.consumer_group_records import Partition, Partitions

#: Number of partitions of each topic, by topic id. Topics are assigned in this order.
Counts = Mapping[bytes, int]


@attrs.frozen(kw_only=True)
class Subscriber:
    """A member with its subscription."""

    member_id: str
    instance_id: str | None = None
    #: Ids of the existing topics that it subscribes to.
    topics: frozenset[bytes]
    #: Its target until now.
    target: Partitions = frozenset()


Targets = dict[str, Partitions]
Assignor = Callable[[Sequence[Subscriber], Counts], Targets]


def uniform(members: Sequence[Subscriber], counts: Counts) -> Targets:
    if not members:
        return {}
    # Groups of one application subscribe to the same topics. No search is needed for them.
    first = members[0].topics
    if all(member.topics is first or member.topics == first for member in members):
        return _same_topics(members, counts)
    return _Balance(members, counts).targets()


def range_(members: Sequence[Subscriber], counts: Counts) -> Targets:
    """Assign adjacent partitions.

    Static members come first, ordered by instance id, then the others by member id.
    """
    ordered = sorted(
        members,
        key=lambda member: (
            member.instance_id is None,
            member.instance_id or member.member_id,
        ),
    )
    given: dict[str, set[Partition]] = {member.member_id: set() for member in members}
    for topic_id, count in counts.items():
        takers = [member for member in ordered if topic_id in member.topics]
        if not takers:
            continue
        least, extra = divmod(count, len(takers))
        start = 0
        for place, member in enumerate(takers):
            stop = start + least + (place < extra)
            given[member.member_id].update(
                (topic_id, number) for number in range(start, stop)
            )
            start = stop
    return {member_id: frozenset(partitions) for member_id, partitions in given.items()}


#: Assignors by the names that members request. If no member requests one, the first is
#: used.
ASSIGNORS: Final[Mapping[str, Assignor]] = MappingProxyType(
    {"uniform": uniform, "range": range_}
)


# -- members with the same subscription


def _same_topics(members: Sequence[Subscriber], counts: Counts) -> Targets:
    """Let each member keep its partitions up to its quota, then assign the rest.

    If the partitions do not divide evenly, members that already have one more keep it
    first.
    """
    topics = members[0].topics
    everything = [
        (topic_id, number)
        for topic_id in counts
        if topic_id in topics
        for number in range(counts[topic_id])
    ]
    free = dict.fromkeys(everything)
    least, extra = divmod(len(everything), len(members))
    kept: dict[str, list[Partition]] = {}
    missing: list[tuple[str, int]] = []
    for place, member in enumerate(members):
        if extra:
            most = least + 1
        else:
            most = least
        keeps = [partition for partition in sorted(member.target) if partition in free][
            :most
        ]
        for partition in keeps:
            del free[partition]
        kept[member.member_id] = keeps
        # Only enough members remain for the extra partitions: this one takes one, even if
        # it has not kept so many.
        must_take_more = extra > len(members) - place - 1
        quota = least
        if extra and (len(keeps) > least or must_take_more):
            quota = least + 1
            extra -= 1
        if len(keeps) < quota:
            missing.append((member.member_id, quota - len(keeps)))
    # The quotas add up to all partitions, so that `left` is empty afterwards.
    left = iter(free)
    for member_id, count in missing:
        kept[member_id] += [next(left) for _ in range(count)]
    return {member_id: frozenset(partitions) for member_id, partitions in kept.items()}


# -- members with different subscriptions


class _Balance:
    """Balances members with different subscriptions; members are indexes.

    Each member keeps its partitions, and free partitions are assigned to the member
    with the fewest. Partitions then move along chains of members, from one to another
    that has at least two fewer, until no chain is left.
    """

    def __init__(self, members: Sequence[Subscriber], counts: Counts) -> None:
        self._members = members
        self._counts = counts
        self._loads = [0] * len(members)
        self._takers: dict[bytes, list[int]] = {topic_id: [] for topic_id in counts}
        for place, member in enumerate(members):
            for topic_id in member.topics:
                self._takers[topic_id].append(place)
        self._held: dict[bytes, dict[int, set[int]]] = {
            topic_id: {} for topic_id in counts
        }

    def targets(self) -> Targets:
        # 1. Members keep their partitions.
        free = self._keep()
        # 2. Free partitions are assigned. Topics with few subscribers come first, because
        # their partitions have the fewest possible owners.
        for topic_id in sorted(free, key=lambda topic_id: len(self._takers[topic_id])):
            self._give(topic_id, free[topic_id])
        # 3. Partitions move until no move helps.
        self._even_out()
        found: dict[int, set[Partition]] = {
            place: set() for place in range(len(self._members))
        }
        for topic_id, holders in self._held.items():
            for place, numbers in holders.items():
                found[place].update((topic_id, number) for number in numbers)
        return {
            member.member_id: frozenset(found[place])
            for place, member in enumerate(self._members)
        }

    def _keep(self) -> dict[bytes, list[int]]:
        """Let members keep their partitions; return the free partitions."""
        free = {
            topic_id: dict.fromkeys(range(count))
            for topic_id, count in self._counts.items()
        }
        for place, member in enumerate(self._members):
            for topic_id, number in sorted(member.target):
                if topic_id in member.topics and number in free[topic_id]:
                    del free[topic_id][number]
                    self._add(place, topic_id, number)
        return {
            topic_id: [*numbers]
            for topic_id, numbers in free.items()
            if self._takers[topic_id]
        }

    def _add(self, place: int, topic_id: bytes, number: int) -> None:
        self._held[topic_id].setdefault(place, set()).add(number)
        self._loads[place] += 1

    def _give(self, topic_id: bytes, numbers: Iterable[int]) -> None:
        # A heap, so that a topic with P partitions and M members takes P log M steps.
        waiting = [(self._loads[place], place) for place in self._takers[topic_id]]
        heapq.heapify(waiting)
        for number in numbers:
            load, place = waiting[0]
            self._add(place, topic_id, number)
            heapq.heapreplace(waiting, (load + 1, place))

    def _even_out(self) -> None:
        """Move partitions until no move helps.

        Each chain reduces the sum of the squared loads, so this terminates. Single
        moves come first because a chain moves one partition for each of its links.
        """
        for most_links in (1, len(self._members)):
            has_moved = True
            while has_moved:
                has_moved = self._fill_each(most_links)

    def _fill_each(self, most_links: int) -> bool:
        """Try to give each member a partition, starting with the smallest load.

        If no chain to a member exists, the members on the searched chains cannot gain
        either: their own chains are part of those.
        """
        richest = max(self._loads, default=0)
        fruitless: set[int] = set()
        has_moved = False
        for place in sorted(range(len(self._members)), key=self._loads.__getitem__):
            if self._loads[place] + 2 > richest or place in fruitless:
                continue
            seen = self._fill(place, most_links)
            if not seen:
                has_moved = True
                fruitless.clear()
            elif most_links > 1:
                fruitless |= seen
        return has_moved

    def _fill(self, poor: int, most_links: int) -> set[int]:
        """Move one partition to the member along the shortest chain from a richer
        member.

        That member must have at least two partitions more. If there is no such chain,
        return all members that the search reached.
        """
        # Giver -> receiver and topic of the partition.
        receivers: dict[int, tuple[int, bytes]] = {}
        seen: set[bytes] = set()
        links = {poor: 0}
        waiting = deque([poor])
        while waiting:
            receiver = waiting.popleft()
            if links[receiver] == most_links:
                continue
            for topic_id in sorted(self._members[receiver].topics - seen):
                seen.add(topic_id)
                for giver in self._held[topic_id]:
                    if giver in links:
                        continue
                    links[giver] = links[receiver] + 1
                    receivers[giver] = receiver, topic_id
                    waiting.append(giver)
                    if self._loads[giver] >= self._loads[poor] + 2:
                        self._pass_on(giver, receivers)
                        return set()
        return set(links)

    def _pass_on(self, rich: int, receivers: Mapping[int, tuple[int, bytes]]) -> None:
        giver = rich
        while giver in receivers:
            receiver, topic_id = receivers[giver]
            number = self._choose(giver, receiver, topic_id)
            numbers = self._held[topic_id][giver]
            numbers.remove(number)
            if not numbers:
                del self._held[topic_id][giver]
            self._loads[giver] -= 1
            self._add(receiver, topic_id, number)
            giver = receiver

    def _choose(self, giver: int, receiver: int, topic_id: bytes) -> int:
        """Return the partition to move.

        Prefer one that was in the receiver's target, then one that was not in the
        giver's.
        """
        before = self._members[giver].target
        wanted = self._members[receiver].target
        return min(
            self._held[topic_id][giver],
            key=lambda number: (
                (topic_id, number) not in wanted,
                (topic_id, number) in before,
                number,
            ),
        )
