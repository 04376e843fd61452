"""Nodes of shared group members in the registry: member ids and owners.

    /consumers/g/ids/host-41-8f3a02c1
        {"version":1,"subscription":{"orders":3},"pattern":"static",...}
    /consumers/g/owners/orders/2          host-41-8f3a02c1-0

Rules (clients reference 7.4, seeds: steps 8 and 9 of the rebalancing):
- A member claims a partition before it returns the first record. It releases the
  partition after it has committed the finished offset, and before it joins again. So a
  partition has one owner, even while members are in different generations.
- A claim is one change under the lock of the group. Only a member of the current
  generation makes it.
- An owner is valid while its process is alive and the member is in the group. The group
  removes a member that is paused for too long.
- A member releases only partitions that it still owns, because another member may have
  claimed the others.
- If a partition cannot be claimed now, each poll tries again. This module never waits.

This module does not assign partitions (group_member.py, assignors.py). Commits are fenced by
generations, not by owners.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from logcore.consumer.settings import GroupMetadata
from logcore.consumer.topic_partition import TopicPartition
from logcore.coordination.classic_group import Group
from logcore.coordinators.shared_groups import SharedGroups
from logcore.errors import NodeNotFoundError
from logcore.fs import SharedFS
from logcore.registry import Node, Registry, paths
from logcore.registry.paths import Pattern


class Registration:
    """The node of a consumer below `ids`.

    The streams of a connector share one node. Each stream is a member, and has a number.
    """

    def __init__(self, fs: SharedFS, group_id: str) -> None:
        self.group_id = group_id
        self.consumer_id = f"{fs.host_name()}-{os.getpid()}-{fs.random_bytes(4).hex()}"
        self._path = paths.member(group_id, self.consumer_id)
        self._subscription: Mapping[str, int] = {}
        self._pattern: Pattern = "static"
        self._began_ms = fs.now_ms()
        #: Number -> member id. Changed under the lock of the group.
        self._members: dict[int, str] = {}
        #: The value of the node. Changed under the lock of the group.
        self._written = b""

    def announce(self, subscription: Mapping[str, int], pattern: Pattern) -> None:
        """Set the subscription that the next enter() writes to the node.

        The subscription maps a topic, or a regular expression, to the number of streams.
        """
        self._subscription = dict(subscription)
        self._pattern = pattern

    def enter(self, registry: Registry, number: int, member_id: str) -> None:
        """Write the member id of one stream. The caller holds the lock of the group."""
        self._members[number] = member_id
        value = paths.pack_consumer(
            self._subscription,
            pattern=self._pattern,
            timestamp_ms=self._began_ms,
            members=self._members,
        )
        if value == self._written:
            return
        try:
            registry.set(self._path, value)
        except NodeNotFoundError:
            registry.create(self._path, value, ephemeral=True)
        self._written = value

    def leave(self, registry: Registry, number: int) -> None:
        """Remove one stream, and delete the node with the last one.

        The caller holds the lock of the group.
        """
        self._members.pop(number, None)
        if not self._members and self._written:
            self._written = b""
            registry.delete(self._path)


class OwnerNodes:
    """The partitions that one member has claimed."""

    def __init__(
        self, groups: SharedGroups, registration: Registration, number: int
    ) -> None:
        self._groups = groups
        self._registration = registration
        self._number = number
        self._name = paths.pack_owner(registration.consumer_id, number)
        #: The claimed partitions.
        self._claimed: set[TopicPartition] = set()
        #: Partitions that the next call must release, if the member still owns them.
        #: After an error, partitions remain here.
        self._to_release: set[TopicPartition] = set()
        #: The member id in the node of the consumer, or None if the node must be
        #: written again.
        self._written_member_id: str | None = None

    def reannounce(self) -> None:
        """Write the node again after a change of the subscription."""
        self._written_member_id = None

    def forget(self) -> None:
        """Give up all claims after the group has removed the member.

        Another member may already own the partitions.
        """
        self._to_release |= self._claimed
        self._claimed.clear()

    def claim(
        self, requested: frozenset[TopicPartition], member: GroupMetadata
    ) -> frozenset[TopicPartition]:
        """Claim the requested partitions, release others, and return the owned ones.

        The result may have fewer partitions than `requested`. After an error, the next
        call continues at the same point.

        Raises:
            LogcoreError: the registry could not be changed.
        """
        is_entered = not member.member_id or member.member_id == self._written_member_id
        if requested == self._claimed and not self._to_release and is_entered:
            return requested
        self._to_release |= self._claimed - requested
        self._claimed &= requested
        registration = self._registration
        with self._groups.owning(registration.group_id) as (registry, group):
            for partition in sorted(self._to_release):
                self._release(registry, partition)
                self._to_release.discard(partition)
            if group is not None and _is_current(group, member):
                registration.enter(registry, self._number, member.member_id)
                self._written_member_id = member.member_id
                for partition in sorted(requested - self._claimed):
                    if self._claims(registry, group, partition):
                        self._claimed.add(partition)
        return frozenset(self._claimed)

    def watched(self, requested: frozenset[TopicPartition]) -> list[str]:
        """Return the directories that change when a requested partition is released."""
        registration = self._registration
        topics = sorted({partition.topic for partition in requested - self._claimed})
        return [
            self._groups.watched_owners(registration.group_id, topic)
            for topic in topics
        ]

    def end(self) -> None:
        """Release all partitions.

        Raises:
            LogcoreError: the registry could not be changed.
        """
        self.forget()
        registration = self._registration
        with self._groups.owning(registration.group_id) as (registry, _):
            for partition in sorted(self._to_release):
                self._release(registry, partition)
            self._to_release.clear()
            registration.leave(registry, self._number)

    def _release(self, registry: Registry, topic_partition: TopicPartition) -> None:
        path = self._path(topic_partition)
        node = _get_node(registry, path)
        if node is not None and node.value == self._name:
            registry.delete(path)

    def _claims(
        self, registry: Registry, group: Group, topic_partition: TopicPartition
    ) -> bool:
        """Claim a partition, and return whether the member owns it."""
        path = self._path(topic_partition)
        node = _get_node(registry, path)
        if node is not None and self._is_valid_owner(registry, group, node):
            return node.value == self._name
        if node is not None:
            # The node may be deleted concurrently, because the owner's process died.
            with contextlib.suppress(NodeNotFoundError):
                registry.delete(path)
        registry.create(path, self._name, ephemeral=True)
        return True

    def _is_valid_owner(self, registry: Registry, group: Group, node: Node) -> bool:
        """Return whether the owner in a node is a member of the group.

        The process of the owner is alive, because the node exists.
        """
        consumer_id, number = paths.unpack_owner(node.value)
        path = paths.member(group.group_id, consumer_id)
        consumer = _get_node(registry, path)
        if consumer is None:
            return False
        return (
            paths.unpack_consumer(consumer.value, path).members.get(number)
            in group.members
        )

    def _path(self, topic_partition: TopicPartition) -> str:
        return paths.owner(
            self._registration.group_id,
            topic_partition.topic,
            topic_partition.partition,
        )


def _is_current(group: Group, member: GroupMetadata) -> bool:
    return (
        group.check_generation(
            member.member_id, member.group_instance_id, member.generation
        )
        is None
    )


def _get_node(registry: Registry, path: str) -> Node | None:
    try:
        return registry.get(path)
    except NodeNotFoundError:
        return None
