"""What members of a shared group say of themselves in the registry: who they are, and which partitions are their own.

    /consumers/g/ids/host-41-8f3a02c1     {"version":1,"subscription":{"orders":3},"pattern":"static",...}
    /consumers/g/owners/orders/2          host-41-8f3a02c1-0

Rules (clients reference 7.4, seeds: steps 8 and 9 of the rebalancing):
- A member claims a partition before it hands out the first record, and lets go of it when all that it finished is
  committed, before it joins again. So a partition has one owner, also while members know different generations.
- A claim is one change under the lock of the group. Only a member of the present generation makes it.
- An owner counts while its process lives and the group has it as a member. One that was stopped for too long does not.
- A member lets go only of what is still its own: another may have taken it over.
- What cannot be claimed now is asked for again at each poll. Nothing here waits.

Not here: who gets which partition (member.py, assignors.py). Commits are fenced by generations, not by owners.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from logcore.consumer.membership import TopicPartition
from logcore.consumer.sharedgroups import SharedGroups
from logcore.consumer.values import GroupMetadata
from logcore.coordination.group import Group
from logcore.errors import NodeNotFoundError
from logcore.fs import SharedFS
from logcore.registry import Node, Registry, paths
from logcore.registry.paths import Pattern


class Registration:
    """The node of a consumer below `ids`. The streams of a connector share one; each of them is a member with a number.

    Fields that change, all under the lock of the group: _members (number -> member id), _written (the node's value).
    """

    def __init__(self, fs: SharedFS, group_id: str) -> None:
        self.group_id = group_id
        self.consumer_id = f"{fs.host_name()}-{os.getpid()}-{fs.random_bytes(4).hex()}"
        self._path = paths.member(group_id, self.consumer_id)
        self._subscription: Mapping[str, int] = {}
        self._pattern: Pattern = "static"
        self._began_ms = fs.now_ms()
        self._members: dict[int, str] = {}
        self._written = b""

    def announce(self, subscription: Mapping[str, int], pattern: Pattern) -> None:
        """What its node says from the next enter() on: topic, or expression -> how many streams."""
        self._subscription = dict(subscription)
        self._pattern = pattern

    def enter(self, registry: Registry, number: int, member_id: str) -> None:
        """Says which member of the group one of its streams is now. Under the lock of the group."""
        self._members[number] = member_id
        value = paths.pack_consumer(
            self._subscription, pattern=self._pattern, timestamp_ms=self._began_ms, members=self._members
        )
        if value == self._written:
            return
        try:
            registry.set(self._path, value)
        except NodeNotFoundError:
            registry.create(self._path, value, ephemeral=True)
        self._written = value

    def leave(self, registry: Registry, number: int) -> None:
        """One of its streams has ended; the last one takes the node away. Under the lock of the group."""
        self._members.pop(number, None)
        if not self._members and self._written:
            self._written = b""
            registry.delete(self._path)


class Ownership:
    """The partitions that one member has claimed.

    _held: what was claimed. _left: what is to be let go of, if it is still its own; some, while that failed. _entered:
    under which member id the node of the consumer has it; None when that node is to be written again.
    """

    def __init__(self, groups: SharedGroups, registration: Registration, number: int) -> None:
        self._groups = groups
        self._registration = registration
        self._number = number
        self._name = paths.pack_owner(registration.consumer_id, number)
        self._held: set[TopicPartition] = set()
        self._left: set[TopicPartition] = set()
        self._entered: str | None = None

    def announce_again(self) -> None:
        """The subscription is another."""
        self._entered = None

    def forget(self) -> None:
        """It is no member any more: what it had may be another's already."""
        self._left |= self._held
        self._held.clear()

    def settle(self, wanted: frozenset[TopicPartition], member: GroupMetadata) -> frozenset[TopicPartition]:
        """Lets go of what is not wanted and claims what is; returns what is its own then, which may be less.

        Raises what changing the registry raises; the next call goes on where this one stopped.
        """
        is_entered = not member.member_id or member.member_id == self._entered
        if wanted == self._held and not self._left and is_entered:
            return wanted
        self._left |= self._held - wanted
        self._held &= wanted
        registration = self._registration
        with self._groups.owning(registration.group_id) as (registry, group):
            for one in sorted(self._left):
                self._let_go(registry, one)
                self._left.discard(one)
            if group is not None and _is_current(group, member):
                registration.enter(registry, self._number, member.member_id)
                self._entered = member.member_id
                for one in sorted(wanted - self._held):
                    if self._claims(registry, group, one):
                        self._held.add(one)
        return frozenset(self._held)

    def watched(self, wanted: frozenset[TopicPartition]) -> list[str]:
        """Directories in which something changes when another lets go of what this one waits for."""
        registration = self._registration
        topics = sorted({one.topic for one in wanted - self._held})
        return [self._groups.watched_owners(registration.group_id, topic) for topic in topics]

    def end(self) -> None:
        """Lets go of all. Raises what changing the registry raises."""
        self.forget()
        registration = self._registration
        with self._groups.owning(registration.group_id) as (registry, _):
            for one in sorted(self._left):
                self._let_go(registry, one)
            self._left.clear()
            registration.leave(registry, self._number)

    def _let_go(self, registry: Registry, one: TopicPartition) -> None:
        path = self._path(one)
        node = _found(registry, path)
        if node is not None and node.value == self._name:
            registry.delete(path)

    def _claims(self, registry: Registry, group: Group, one: TopicPartition) -> bool:
        """Whether a partition is its own now."""
        path = self._path(one)
        node = _found(registry, path)
        if node is not None and self._counts(registry, group, node):
            return node.value == self._name
        if node is not None:
            with contextlib.suppress(NodeNotFoundError):  # its process may have died
                registry.delete(path)
        registry.create(path, self._name, ephemeral=True)
        return True

    def _counts(self, registry: Registry, group: Group, node: Node) -> bool:
        """Whether the owner of a node whose process lives is a member of the group."""
        consumer_id, number = paths.unpack_owner(node.value)
        path = paths.member(group.group_id, consumer_id)
        consumer = _found(registry, path)
        if consumer is None:
            return False
        return paths.unpack_consumer(consumer.value, path).members.get(number) in group.members

    def _path(self, one: TopicPartition) -> str:
        return paths.owner(self._registration.group_id, one.topic, one.partition)


def _is_current(group: Group, member: GroupMetadata) -> bool:
    return group.check_generation(member.member_id, member.group_instance_id, member.generation) is None


def _found(registry: Registry, path: str) -> Node | None:
    try:
        return registry.get(path)
    except NodeNotFoundError:
        return None
