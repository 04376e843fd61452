"""The partitions of each member of a consumer group (KIP-848): Kafka's assignors `uniform` and `range`, pure.

Rules:
- Every partition of a subscribed topic gets exactly one member, and that member subscribes to it.
- `uniform` evens out: no two members differ by more than one partition where moving one could help. It moves no
  partition that need not move.
- `range` gives each member neighbouring partitions of each topic, whichever member had them before.

Members come in an order of the caller's, which decides between equals. When a member may use its target is decided
in heartbeats.py, not here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from logcore.format.consumergrouprecords import Partition, Partitions

#: How many partitions each topic has, by its id. The order of topics is that in which they are given out.
Counts = Mapping[bytes, int]


@attrs.frozen(kw_only=True)
class Subscriber:
    """A member. topics: ids of those that it subscribes to and that exist. target: what it was to have until now."""

    member_id: str
    instance_id: str | None = None
    topics: frozenset[bytes]
    target: Partitions = frozenset()


Targets = dict[str, Partitions]
Assignor = Callable[[Sequence[Subscriber], Counts], Targets]


def uniform(members: Sequence[Subscriber], counts: Counts) -> Targets:
    if not members:
        return {}
    first = members[0].topics
    if all(member.topics is first or member.topics == first for member in members):
        return _same_topics(members, counts)
    return _Balance(members, counts).targets()


def range_(members: Sequence[Subscriber], counts: Counts) -> Targets:
    """Static members come first, by instance id, then the others by member id."""
    ordered = sorted(members, key=lambda member: (member.instance_id is None, member.instance_id or member.member_id))
    given: dict[str, set[Partition]] = {member.member_id: set() for member in members}
    for topic_id, count in counts.items():
        takers = [member for member in ordered if topic_id in member.topics]
        if not takers:
            continue
        least, extra = divmod(count, len(takers))
        start = 0
        for place, member in enumerate(takers):
            stop = start + least + (place < extra)
            given[member.member_id].update((topic_id, number) for number in range(start, stop))
            start = stop
    return {member_id: frozenset(partitions) for member_id, partitions in given.items()}


#: By the names that members ask for them with. The first is taken when none asks.
ASSIGNORS: Final[Mapping[str, Assignor]] = MappingProxyType({"uniform": uniform, "range": range_})


# -- members that want the same topics -------------------------------------------------------------------------------


def _same_topics(members: Sequence[Subscriber], counts: Counts) -> Targets:
    """Each keeps what it had up to its quota. The one more than the least that some may have goes first to those that
    have it already.
    """
    topics = members[0].topics
    everything = [(topic_id, number) for topic_id in counts if topic_id in topics for number in range(counts[topic_id])]
    free = dict.fromkeys(everything)
    least, extra = divmod(len(everything), len(members))
    kept: dict[str, list[Partition]] = {}
    missing: list[tuple[str, int]] = []
    for place, member in enumerate(members):
        if extra:
            most = least + 1
        else:
            most = least
        keeps = [partition for partition in sorted(member.target) if partition in free][:most]
        for partition in keeps:
            del free[partition]
        kept[member.member_id] = keeps
        must_take_more = extra > len(members) - place - 1  # too few are left behind it
        quota = least
        if extra and (len(keeps) > least or must_take_more):
            quota = least + 1
            extra -= 1
        if len(keeps) < quota:
            missing.append((member.member_id, quota - len(keeps)))
    left = iter(free)
    for member_id, count in missing:
        kept[member_id] += [next(left) for _ in range(count)]
    return {member_id: frozenset(partitions) for member_id, partitions in kept.items()}


# -- members that want different topics ------------------------------------------------------------------------------


class _Balance:
    """Members by their places. Each keeps what it had; what no member has goes to who has least; then partitions move
    along chains of members, from one that has too many to one that has two fewer, until no chain is left.
    """

    def __init__(self, members: Sequence[Subscriber], counts: Counts) -> None:
        self._members = members
        self._counts = counts
        self._loads = [0] * len(members)
        self._takers: dict[bytes, list[int]] = {topic_id: [] for topic_id in counts}
        for place, member in enumerate(members):
            for topic_id in member.topics:
                self._takers[topic_id].append(place)
        self._held: dict[bytes, dict[int, set[int]]] = {topic_id: {} for topic_id in counts}

    def targets(self) -> Targets:
        free = self._keep()
        for topic_id in sorted(free, key=lambda topic_id: len(self._takers[topic_id])):
            self._give(topic_id, free[topic_id])
        self._even_out()
        found: dict[int, set[Partition]] = {place: set() for place in range(len(self._members))}
        for topic_id, holders in self._held.items():
            for place, numbers in holders.items():
                found[place].update((topic_id, number) for number in numbers)
        return {member.member_id: frozenset(found[place]) for place, member in enumerate(self._members)}

    def _keep(self) -> dict[bytes, list[int]]:
        """Lets members keep what they had; returns what no member has."""
        free = {topic_id: dict.fromkeys(range(count)) for topic_id, count in self._counts.items()}
        for place, member in enumerate(self._members):
            for topic_id, number in sorted(member.target):
                if topic_id in member.topics and number in free[topic_id]:
                    del free[topic_id][number]
                    self._add(place, topic_id, number)
        return {topic_id: [*numbers] for topic_id, numbers in free.items() if self._takers[topic_id]}

    def _add(self, place: int, topic_id: bytes, number: int) -> None:
        self._held[topic_id].setdefault(place, set()).add(number)
        self._loads[place] += 1

    def _give(self, topic_id: bytes, numbers: Iterable[int]) -> None:
        waiting = [(self._loads[place], place) for place in self._takers[topic_id]]
        heapq.heapify(waiting)
        for number in numbers:
            load, place = waiting[0]
            self._add(place, topic_id, number)
            heapq.heapreplace(waiting, (load + 1, place))

    def _even_out(self) -> None:
        """Each chain makes the sum of the squares of the loads smaller, so this ends. Single moves come first, since a
        chain moves as many partitions as it has links.
        """
        for most_links in (1, len(self._members)):
            has_moved = True
            while has_moved:
                has_moved = self._fill_each(most_links)

    def _fill_each(self, most_links: int) -> bool:
        """Those with least come first. Who stands on chains that brought nothing to one of these gets nothing by its
        own, which are parts of them.
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
        """Gives the member one partition along the shortest chain from a member that has two more. If there is none,
        returns all that chains lead to.
        """
        receivers: dict[int, tuple[int, bytes]] = {}  # who gives -> to whom, and of which topic
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
        """Rather one that the receiver had before, or that the giver had not."""
        before = self._members[giver].target
        wanted = self._members[receiver].target
        return min(
            self._held[topic_id][giver],
            key=lambda number: ((topic_id, number) not in wanted, (topic_id, number) in before, number),
        )
