"""The cluster as one broker has read it from the registry.

A view is immutable. Each change creates another one. It may be older than the registry:
each write is a compare-and-set, so a decision from an old view fails and is made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from logcore.config import LogConfig
from logcore.metadata.checkpoint import Key
from logcore.replication.electing import PartitionSettings
from logcore.replication.state import LeaderAndIsr, LiveBroker
from netshim.cluster.registry_nodes import BrokerNode, TopicNode
from netshim.topology import NO_NODE


@attrs.frozen
class StoredState:
    """The state of a partition, and the path and version of its node."""

    state: LeaderAndIsr
    version: int
    path: str


@attrs.frozen
class TopicOfCluster:
    """A topic and its settings."""

    node: TopicNode
    overrides: Mapping[str, str]
    #: The effective settings.
    config: LogConfig

    def for_elections(self, *, waits_for_disk: bool) -> PartitionSettings:
        """Return the settings that elections depend on.

        `waits_for_disk` is whether the durability policy waits for the disk.
        """
        return PartitionSettings(
            min_insync_replicas=self.config.min_insync_replicas,
            is_unclean_allowed=self.config.unclean_leader_election_enable,
            is_durable_first=waits_for_disk,
        )


_NO_MAP: Final[Mapping[Any, Any]] = {}


@attrs.frozen
class ClusterView:
    """All brokers, topics and states."""

    brokers: Mapping[int, BrokerNode] = _NO_MAP
    #: Brokers that have ever registered.
    known_brokers: frozenset[int] = frozenset()
    controller: int = NO_NODE
    topics: Mapping[str, TopicOfCluster] = _NO_MAP
    #: Topics whose deletion was requested. Some may not exist any more.
    deletions: frozenset[str] = frozenset()
    states: Mapping[Key, StoredState] = _NO_MAP
    #: Ids of topics that were deleted, as far as brokers have published them. A topic that is
    #: missing for another reason is not in it.
    deleted_ids: frozenset[str] = frozenset()
    #: Partitions whose state cannot be read, and topics whose node cannot, with the
    #: number WHOLE_TOPIC. They are offline until the node is repaired.
    damaged: frozenset[Key] = frozenset()
    #: Rises with each change of a topic.
    topics_version: int = 0

    @property
    def live(self) -> dict[int, LiveBroker]:
        return {number: node.live for number, node in self.brokers.items()}

    @property
    def damaged_topics(self) -> set[str]:
        """The topics that have a damaged node."""
        return {name for name, _ in self.damaged}

    def replicas_of(self, key: Key) -> tuple[int, ...]:
        """Return the brokers of a partition; empty if there is no such partition."""
        stored, topic = self.states.get(key), self.topics.get(key[0])
        if stored is not None:
            return stored.state.replicas
        return () if topic is None else topic.node.replicas.get(key[1], ())

    def leader_of(self, key: Key) -> int:
        stored = self.states.get(key)
        return NO_NODE if stored is None else stored.state.leader
