"""The sticky assignment for members that subscribe to different topics.

Rules (clients reference 7.5):
- A member keeps its partitions of topics to which it still subscribes. The other
  partitions are assigned, those with the fewest possible members first, to the member
  with the fewest partitions.
- Then partitions move, one at a time, while that makes the sizes more even. If two
  members would exchange partitions of one topic, the partition that moved first moves
  back instead.
- If the result is not more even than before these moves, they are undone.

Members with the same subscription are divided by a simpler rule, see assignors.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from logcore.consumer.topic_partition import Claims, Member, TopicPartition, java_order


def balance(
    known: Mapping[str, int], members: Iterable[Member], claims: Claims
) -> dict[str, list[TopicPartition]]:
    """Return the partitions by member id. `known` maps topics to numbers of partitions."""
    return _Balancing(known, list(members), claims).run()


class _Moves:
    """The partitions that have moved, with their old and new members.

    It prevents that two members exchange partitions of a topic.
    """

    def __init__(self) -> None:
        self._moved: dict[TopicPartition, tuple[str, str]] = {}
        self._by_pair: dict[
            tuple[str, str, str], dict[TopicPartition, None]
        ] = {}  # topic, from, to -> in order

    def partition_to_move(
        self, topic_partition: TopicPartition, owner: str, target: str
    ) -> TopicPartition:
        """Return the partition to move from owner to target: a partition that moved in
        the other direction, if there is one, or else the given one.
        """
        if topic_partition in self._moved:
            source = self._moved[topic_partition][0]
        else:
            source = owner
        back = self._by_pair.get((topic_partition.topic, target, source))
        if back:
            return next(iter(back))
        return topic_partition

    def record(self, topic_partition: TopicPartition, owner: str, target: str) -> None:
        source = owner
        if topic_partition in self._moved:
            source, reached = self._moved.pop(topic_partition)
            pair = (topic_partition.topic, source, reached)
            del self._by_pair[pair][topic_partition]
            if not self._by_pair[pair]:
                del self._by_pair[pair]
            if source == target:
                return
        self._moved[topic_partition] = (source, target)
        self._by_pair.setdefault((topic_partition.topic, source, target), {})[
            topic_partition
        ] = None


class _Balancing:
    """One assignment in progress."""

    def __init__(
        self, known: Mapping[str, int], members: list[Member], claims: Claims
    ) -> None:
        self.known = known
        self.topics = {
            member.member_id: [
                topic for topic in sorted(member.topics) if topic in known
            ]
            for member in members
        }
        #: The members that subscribe to each topic.
        self.candidates: dict[str, list[str]] = {topic: [] for topic in known}
        for member_id, topics in self.topics.items():
            for topic in topics:
                self.candidates[topic].append(member_id)
        self.previous_owners = claims.previous_owners
        #: The partitions of each member.
        self.assigned = {
            member.member_id: claims.retained_by(member) for member in members
        }
        #: The member of each assigned partition.
        self.owner = {
            partition: member_id
            for member_id, owned in self.assigned.items()
            for partition in owned
        }
        subscribed = {member.member_id: member.topics for member in members}
        #: Whether an owner has unsubscribed from the topic of its partition.
        self.must_revoke = any(
            partition.topic not in subscribed[member_id]
            for partition, member_id in claims.owners.items()
        )
        self.moves = _Moves()
        #: The members whose partitions may change.
        self.active = set(self.assigned)

    def run(self) -> dict[str, list[TopicPartition]]:
        all_partitions = [
            TopicPartition(topic, number)
            for topic, count in self.known.items()
            for number in range(count)
        ]
        all_partitions.sort(
            key=lambda partition: (
                len(self.candidates[partition.topic]),
                java_order(partition.topic),
                partition.partition,
            )
        )
        is_new = not any(self.assigned.values())
        free = [
            partition
            for partition in all_partitions
            if partition not in self.owner and self.candidates[partition.topic]
        ]
        for partition in free:
            self._assign(partition, self._smallest_member(partition.topic))
        self.active = {
            member_id for member_id in self.assigned if self._may_change(member_id)
        }
        initial = {member_id: list(owned) for member_id, owned in self.assigned.items()}
        movable = [
            partition
            for partition in all_partitions
            if self._is_movable(partition.topic)
        ]
        if not self.must_revoke:
            self._even_out(
                [partition for partition in free if self._is_movable(partition.topic)]
            )
        has_moved = self._even_out(movable)
        if (
            not is_new
            and has_moved
            and self._unevenness(self.assigned) >= self._unevenness(initial)
        ):
            return initial
        return self.assigned

    def _order(self, member_id: str) -> tuple[int, bytes]:
        return len(self.assigned[member_id]), java_order(member_id)

    def _smallest_member(self, topic: str) -> str:
        return min(
            (
                candidate
                for candidate in self.candidates[topic]
                if candidate in self.active
            ),
            key=self._order,
        )

    def _assign(self, topic_partition: TopicPartition, member_id: str) -> None:
        self.assigned[member_id].append(topic_partition)
        self.owner[topic_partition] = member_id

    def _is_movable(self, topic: str) -> bool:
        return len(self.candidates[topic]) > 1

    def _max_partitions(self, member_id: str) -> int:
        return sum(self.known[topic] for topic in self.topics[member_id])

    def _may_change(self, member_id: str) -> bool:
        assigned = self.assigned[member_id]
        return len(assigned) < self._max_partitions(member_id) or any(
            self._is_movable(partition.topic) for partition in assigned
        )

    def _even_out(self, movable: list[TopicPartition]) -> bool:
        """Move partitions while the sizes become more even; return whether any moved."""
        has_moved = False
        is_moving = True
        while is_moving:
            is_moving = False
            for partition in movable:
                if self._is_even():
                    break
                target = self._better_owner(partition)
                if target is not None:
                    self._move(partition, target)
                    is_moving = True
                    has_moved = True
        return has_moved

    def _better_owner(self, first: TopicPartition) -> str | None:
        """Return the member that should have a partition instead, if sizes differ by
        more than one.
        """
        size = len(self.assigned[self.owner[first]])
        former = self.previous_owners.get(first)
        # A former owner may have unsubscribed from the topic.
        if (
            former in self.active
            and first.topic in self.topics[former]
            and size > len(self.assigned[former]) + 1
        ):
            return former
        if any(
            size > len(self.assigned[other]) + 1
            for other in self.candidates[first.topic]
        ):
            return self._smallest_member(first.topic)
        return None

    def _move(self, topic_partition: TopicPartition, target: str) -> None:
        owner = self.owner[topic_partition]
        moved = self.moves.partition_to_move(topic_partition, owner, target)
        owner = self.owner[moved]
        self.moves.record(moved, owner, target)
        self.assigned[owner].remove(moved)
        self._assign(moved, target)

    def _is_even(self) -> bool:
        """Return whether no member can get a partition from a member with at least two
        more.
        """
        sizes = [len(self.assigned[member_id]) for member_id in self.active]
        if not sizes or min(sizes) >= max(sizes) - 1:
            return True
        for member_id in self.active:
            size = len(self.assigned[member_id])
            if size == self._max_partitions(member_id):
                continue
            for topic in self.topics[member_id]:
                for number in range(self.known[topic]):
                    owner = self.owner[TopicPartition(topic, number)]
                    if owner != member_id and size + 1 < len(self.assigned[owner]):
                        return False
        return True

    def _unevenness(self, assigned: Mapping[str, list[TopicPartition]]) -> int:
        sizes = [len(assigned[member_id]) for member_id in self.active]
        return sum(
            abs(size - other) for size, other in itertools.combinations(sizes, 2)
        )
