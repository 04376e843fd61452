"""The sticky assignment for members that subscribe to different topics.

Rules (clients reference 7.5):
- A member keeps its partitions of topics to which it still subscribes. The other
  partitions are assigned, those with the fewest possible members first, to the member
  with the fewest partitions.
- Then partitions move, one at a time, while that makes the sizes more even. If two
  members would exchange partitions of one topic, the partition that came moves back
  instead.
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
    """The partitions that have moved, with their old and new members, so that no two
    members exchange partitions of a topic.
    """

    def __init__(self) -> None:
        self._moved: dict[TopicPartition, tuple[str, str]] = {}
        self._by_pair: dict[
            tuple[str, str, str], dict[TopicPartition, None]
        ] = {}  # topic, from, to -> in order

    def instead_of(
        self, one: TopicPartition, owner: str, target: str
    ) -> TopicPartition:
        """Return the partition to move from owner to target: one that moved the other
        way, if there is one.
        """
        if one in self._moved:
            source = self._moved[one][0]
        else:
            source = owner
        back = self._by_pair.get((one.topic, target, source))
        if back:
            return next(iter(back))
        return one

    def record(self, one: TopicPartition, owner: str, target: str) -> None:
        source = owner
        if one in self._moved:
            source, reached = self._moved.pop(one)
            pair = (one.topic, source, reached)
            del self._by_pair[pair][one]
            if not self._by_pair[pair]:
                del self._by_pair[pair]
            if source == target:
                return
        self._moved[one] = (source, target)
        self._by_pair.setdefault((one.topic, source, target), {})[one] = None


class _Balancing:
    """One assignment in progress. `owner` contains the member of each assigned
    partition, and `mine` the partitions of each member.
    """

    def __init__(
        self, known: Mapping[str, int], members: list[Member], claims: Claims
    ) -> None:
        self.known = known
        self.topics = {
            one.member_id: [topic for topic in sorted(one.topics) if topic in known]
            for one in members
        }
        self.candidates: dict[str, list[str]] = {topic: [] for topic in known}
        for member_id, topics in self.topics.items():
            for topic in topics:
                self.candidates[topic].append(member_id)
        self.before = claims.before
        self.mine = {member.member_id: claims.kept(member) for member in members}
        self.owner = {
            one: member_id for member_id, those in self.mine.items() for one in those
        }
        subscribed = {member.member_id: member.topics for member in members}
        self.must_revoke = any(
            one.topic not in subscribed[member_id]
            for one, member_id in claims.owners.items()
        )
        self.moves = _Moves()
        self.active = set(self.mine)

    def run(self) -> dict[str, list[TopicPartition]]:
        everything = [
            TopicPartition(topic, number)
            for topic, count in self.known.items()
            for number in range(count)
        ]
        everything.sort(
            key=lambda one: (
                len(self.candidates[one.topic]),
                java_order(one.topic),
                one.partition,
            )
        )
        is_new = not any(self.mine.values())
        free = [
            one
            for one in everything
            if one not in self.owner and self.candidates[one.topic]
        ]
        for one in free:
            self._assign(one, self._least(one.topic))
        self.active = {
            member_id for member_id in self.mine if self._may_change(member_id)
        }
        before = {member_id: list(those) for member_id, those in self.mine.items()}
        movable = [one for one in everything if self._is_movable(one.topic)]
        if not self.must_revoke:
            self._even_out([one for one in free if self._is_movable(one.topic)])
        has_moved = self._even_out(movable)
        if (
            not is_new
            and has_moved
            and self._unevenness(self.mine) >= self._unevenness(before)
        ):
            return before
        return self.mine

    def _order(self, member_id: str) -> tuple[int, bytes]:
        return len(self.mine[member_id]), java_order(member_id)

    def _least(self, topic: str) -> str:
        return min(
            (one for one in self.candidates[topic] if one in self.active),
            key=self._order,
        )

    def _assign(self, one: TopicPartition, member_id: str) -> None:
        self.mine[member_id].append(one)
        self.owner[one] = member_id

    def _is_movable(self, topic: str) -> bool:
        return len(self.candidates[topic]) > 1

    def _most(self, member_id: str) -> int:
        return sum(self.known[topic] for topic in self.topics[member_id])

    def _may_change(self, member_id: str) -> bool:
        mine = self.mine[member_id]
        return len(mine) < self._most(member_id) or any(
            self._is_movable(one.topic) for one in mine
        )

    def _even_out(self, movable: list[TopicPartition]) -> bool:
        """Move partitions while that helps; return whether any moved."""
        has_moved = False
        is_moving = True
        while is_moving:
            is_moving = False
            for one in movable:
                if self._is_even():
                    break
                target = self._better_owner(one)
                if target is not None:
                    self._move(one, target)
                    is_moving = True
                    has_moved = True
        return has_moved

    def _better_owner(self, one: TopicPartition) -> str | None:
        """Return the member that should have a partition instead, if sizes differ by
        more than one.
        """
        size = len(self.mine[self.owner[one]])
        former = self.before.get(one)
        # A former owner may have unsubscribed from the topic.
        if (
            former in self.active
            and one.topic in self.topics[former]
            and size > len(self.mine[former]) + 1
        ):
            return former
        if any(
            size > len(self.mine[other]) + 1 for other in self.candidates[one.topic]
        ):
            return self._least(one.topic)
        return None

    def _move(self, one: TopicPartition, target: str) -> None:
        owner = self.owner[one]
        moved = self.moves.instead_of(one, owner, target)
        owner = self.owner[moved]
        self.moves.record(moved, owner, target)
        self.mine[owner].remove(moved)
        self._assign(moved, target)

    def _is_even(self) -> bool:
        """Return whether no member can take a partition from one that has two more."""
        sizes = [len(self.mine[member_id]) for member_id in self.active]
        if not sizes or min(sizes) >= max(sizes) - 1:
            return True
        for member_id in self.active:
            size = len(self.mine[member_id])
            if size == self._most(member_id):
                continue
            for topic in self.topics[member_id]:
                for number in range(self.known[topic]):
                    owner = self.owner[TopicPartition(topic, number)]
                    if owner != member_id and size + 1 < len(self.mine[owner]):
                        return False
        return True

    def _unevenness(self, mine: Mapping[str, list[TopicPartition]]) -> int:
        sizes = [len(mine[member_id]) for member_id in self.active]
        return sum(abs(one - other) for one, other in itertools.combinations(sizes, 2))
