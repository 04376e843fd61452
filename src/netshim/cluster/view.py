"""The cluster as one broker sees it, in an immutable value.

`ClusterMember` is this broker's connection to the registry. Its thread reads the
registry and publishes a new `ClusterView`; handlers, replicas and the controller read
the latest view and never the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import attrs

from logcore.metadata.checkpoint import Key
from logcore.replication.state import LeaderAndIsr, LiveBroker


@attrs.frozen
class BrokerNode:
    """A registered broker."""

    registration: LiveBroker
    #: Listener name to host and port.
    endpoints: Mapping[str, tuple[str, int]]


@attrs.frozen
class PartitionNode:
    """The state of a partition, and the version of its registry node."""

    state: LeaderAndIsr
    version: int


@attrs.frozen
class ClusterTopic:
    """A topic of the cluster, with the partitions that all its brokers store."""

    topic_id: bytes
    #: Partition number to broker ids. The preferred leader is the first one. During a
    #: reassignment it holds the target, then the replicas that are removed.
    assignment: Mapping[int, tuple[int, ...]]
    adding: Mapping[int, tuple[int, ...]] = attrs.field(factory=dict)
    removing: Mapping[int, tuple[int, ...]] = attrs.field(factory=dict)
    #: The settings that were set for the topic, by Kafka's names.
    config: Mapping[str, str] = attrs.field(factory=dict)
    #: True from the request to delete the topic until the deletion ends.
    is_deleted: bool = False


@attrs.frozen
class ClusterView:
    """The cluster at one moment, as this broker has read it."""

    cluster_id: str
    node_id: int
    #: The epoch in this broker's own node. None while it is not registered.
    broker_epoch: int | None = None
    #: The id of the controller, or -1.
    controller: int = -1
    brokers: Mapping[int, BrokerNode] = attrs.field(factory=dict)
    topics: Mapping[str, ClusterTopic] = attrs.field(factory=dict)
    #: States by topic and partition. A new partition has no state until the controller
    #: has created it; a partition whose node is damaged has none either.
    partitions: Mapping[Key, PartitionNode] = attrs.field(factory=dict)


class ClusterMember(Protocol):
    """This broker's membership in a cluster. Methods do not block."""

    @property
    def view(self) -> ClusterView:
        """The latest view. It is replaced whole and never modified."""

    def on_change(self, listener: Callable[[ClusterView, ClusterView], None]) -> None:
        """Call `listener(old, new)` in the broker's thread after each new view."""

    def has_lease(self) -> bool:
        """Return whether the lease of the coordinators holds (docs/replication.md)."""

    def propose(
        self,
        key: Key,
        state: LeaderAndIsr,
        version: int,
        done: Callable[[PartitionNode], None],
    ) -> None:
        """Replace the state of a partition, if its node still has `version`.

        A write without an answer is repeated unchanged until it succeeded or a newer
        version was read. Then `done` is called in the broker's thread with the node as
        it is: with the proposed state, or with the state that another broker wrote.
        """
