"""Target assignments of a consumer group (KIP-848): Kafka's assignors `uniform` and
`range`, pure.

Rules:
- Every partition of a subscribed topic is assigned to exactly one member, and that
  member subscribes to it.
- `uniform` balances: the numbers of partitions of two members differ by at most one,
  unless no move could help. It moves no more partitions than necessary.
- `range` assigns adjacent partitions of each topic to each member, regardless of the
  previous owners.

The order of the members, which the caller defines, breaks ties. consumer_transitions.py
decides when a member may use its target.
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
    #: Ids of the existing topics to which the member subscribes.
    topics: frozenset[bytes]
    #: The current target of the member.
    target: Partitions = frozenset()


Targets = dict[str, Partitions]
Assignor = Callable[[Sequence[Subscriber], Counts], Targets]


def uniform(members: Sequence[Subscriber], counts: Counts) -> Targets:
    if not members:
        return {}
    # The usual case: all members subscribe to the same topics, and no search is needed.
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
    assigned: dict[str, set[Partition]] = {
        member.member_id: set() for member in members
    }
    for topic_id, count in counts.items():
        subscribers = [member for member in ordered if topic_id in member.topics]
        if not subscribers:
            continue
        minimum, extra = divmod(count, len(subscribers))
        start = 0
        for index, member in enumerate(subscribers):
            stop = start + minimum + (index < extra)
            assigned[member.member_id].update(
                (topic_id, number) for number in range(start, stop)
            )
            start = stop
    return {
        member_id: frozenset(partitions) for member_id, partitions in assigned.items()
    }


#: Assignors by the names that members request. If no member requests one, the first is
#: used.
ASSIGNORS: Final[Mapping[str, Assignor]] = MappingProxyType(
    {"uniform": uniform, "range": range_}
)


# -- members with the same subscription


def _same_topics(members: Sequence[Subscriber], counts: Counts) -> Targets:
    """Let each member keep its partitions up to its quota, then assign the others.

    If the partitions do not divide evenly, members that already have one partition more
    are preferred for the higher quota.
    """
    topics = members[0].topics
    all_partitions = [
        (topic_id, number)
        for topic_id in counts
        if topic_id in topics
        for number in range(counts[topic_id])
    ]
    free = dict.fromkeys(all_partitions)
    minimum, extra = divmod(len(all_partitions), len(members))
    retained: dict[str, list[Partition]] = {}
    missing: list[tuple[str, int]] = []
    for index, member in enumerate(members):
        if extra:
            quota_limit = minimum + 1
        else:
            quota_limit = minimum
        retained_by_member = [
            partition for partition in sorted(member.target) if partition in free
        ][:quota_limit]
        for partition in retained_by_member:
            del free[partition]
        retained[member.member_id] = retained_by_member
        # If each of the remaining members must have an extra partition, this member
        # gets one too.
        gets_extra = extra > len(members) - index - 1
        quota = minimum
        if extra and (len(retained_by_member) > minimum or gets_extra):
            quota = minimum + 1
            extra -= 1
        if len(retained_by_member) < quota:
            missing.append((member.member_id, quota - len(retained_by_member)))
    # The quotas add up to all partitions, so that `remaining` is empty afterwards.
    remaining = iter(free)
    for member_id, count in missing:
        retained[member_id] += [next(remaining) for _ in range(count)]
    return {
        member_id: frozenset(partitions) for member_id, partitions in retained.items()
    }


# -- members with different subscriptions


class _Balance:
    """Balances members with different subscriptions; members are indexes.

    Each member keeps its partitions, and free partitions are assigned to the member
    with the fewest. Partitions then move along chains of members, from one member to a
    member that has at least two fewer, until no such chain exists.
    """

    def __init__(self, members: Sequence[Subscriber], counts: Counts) -> None:
        self._members = members
        self._counts = counts
        self._loads = [0] * len(members)
        self._subscribers: dict[bytes, list[int]] = {
            topic_id: [] for topic_id in counts
        }
        for index, member in enumerate(members):
            for topic_id in member.topics:
                self._subscribers[topic_id].append(index)
        self._assigned: dict[bytes, dict[int, set[int]]] = {
            topic_id: {} for topic_id in counts
        }

    def targets(self) -> Targets:
        # 1. Members keep their partitions.
        free = self._retain()
        # 2. Free partitions are assigned. Topics with few subscribers come first, because
        # their partitions have the fewest possible owners.
        for topic_id in sorted(
            free, key=lambda topic_id: len(self._subscribers[topic_id])
        ):
            self._assign_free(topic_id, free[topic_id])
        # 3. Partitions move until no move helps.
        self._even_out()
        targets: dict[int, set[Partition]] = {
            index: set() for index in range(len(self._members))
        }
        for topic_id, holders in self._assigned.items():
            for index, numbers in holders.items():
                targets[index].update((topic_id, number) for number in numbers)
        return {
            member.member_id: frozenset(targets[index])
            for index, member in enumerate(self._members)
        }

    def _retain(self) -> dict[bytes, list[int]]:
        """Let members keep their partitions; return the free partitions."""
        free = {
            topic_id: dict.fromkeys(range(count))
            for topic_id, count in self._counts.items()
        }
        for index, member in enumerate(self._members):
            for topic_id, number in sorted(member.target):
                if topic_id in member.topics and number in free[topic_id]:
                    del free[topic_id][number]
                    self._add(index, topic_id, number)
        return {
            topic_id: [*numbers]
            for topic_id, numbers in free.items()
            if self._subscribers[topic_id]
        }

    def _add(self, index: int, topic_id: bytes, number: int) -> None:
        self._assigned[topic_id].setdefault(index, set()).add(number)
        self._loads[index] += 1

    def _assign_free(self, topic_id: bytes, numbers: Iterable[int]) -> None:
        # A heap, so that a topic with P partitions and M members takes P log M steps.
        queue = [(self._loads[index], index) for index in self._subscribers[topic_id]]
        heapq.heapify(queue)
        for number in numbers:
            load, index = queue[0]
            self._add(index, topic_id, number)
            heapq.heapreplace(queue, (load + 1, index))

    def _even_out(self) -> None:
        """Move partitions until no move helps.

        Each chain reduces the sum of the squared loads, so this terminates. Single
        moves come first because a chain moves one partition for each of its links.
        """
        for max_links in (1, len(self._members)):
            has_moved = True
            while has_moved:
                has_moved = self._gain_partitions(max_links)

    def _gain_partitions(self, max_links: int) -> bool:
        """Try to give each member a partition, starting with the smallest load.

        If no chain to a member exists, no chain to the members on the searched chains
        exists either, so they are skipped.
        """
        largest_load = max(self._loads, default=0)
        unreachable: set[int] = set()
        has_moved = False
        for index in sorted(range(len(self._members)), key=self._loads.__getitem__):
            if self._loads[index] + 2 > largest_load or index in unreachable:
                continue
            searched_members = self._gain_partition(index, max_links)
            if not searched_members:
                has_moved = True
                unreachable.clear()
            elif max_links > 1:
                unreachable |= searched_members
        return has_moved

    def _gain_partition(self, gaining_member: int, max_links: int) -> set[int]:
        """Move one partition to the member along the shortest chain from a richer
        member.

        The first member of the chain must have at least two partitions more. If there
        is no such chain, return all members that the search reached.
        """
        # Donor -> receiver and topic of the partition.
        receivers: dict[int, tuple[int, bytes]] = {}
        searched: set[bytes] = set()
        links = {gaining_member: 0}
        queue = deque([gaining_member])
        while queue:
            receiver = queue.popleft()
            if links[receiver] == max_links:
                continue
            for topic_id in sorted(self._members[receiver].topics - searched):
                searched.add(topic_id)
                for donor in self._assigned[topic_id]:
                    if donor in links:
                        continue
                    links[donor] = links[receiver] + 1
                    receivers[donor] = receiver, topic_id
                    queue.append(donor)
                    if self._loads[donor] >= self._loads[gaining_member] + 2:
                        self._move_along_chain(donor, receivers)
                        return set()
        return set(links)

    def _move_along_chain(
        self, chain_start: int, receivers: Mapping[int, tuple[int, bytes]]
    ) -> None:
        donor = chain_start
        while donor in receivers:
            receiver, topic_id = receivers[donor]
            number = self._choose(donor, receiver, topic_id)
            numbers = self._assigned[topic_id][donor]
            numbers.remove(number)
            if not numbers:
                del self._assigned[topic_id][donor]
            self._loads[donor] -= 1
            self._add(receiver, topic_id, number)
            donor = receiver

    def _choose(self, donor: int, receiver: int, topic_id: bytes) -> int:
        """Return the partition to move.

        Prefer a partition that was in the receiver's target, then a partition that was
        not in the donor's target.
        """
        donor_target = self._members[donor].target
        receiver_target = self._members[receiver].target
        return min(
            self._assigned[topic_id][donor],
            key=lambda number: (
                (topic_id, number) not in receiver_target,
                (topic_id, number) in donor_target,
                number,
            ),
        )
