"""The brokers of a cluster and the replicas of partitions, as clients see them.

SoleTopology describes a broker without a cluster. The brokers of a cluster use
cluster/view.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import attrs

from logcore import LogDir
from netshim.session import ClientSession

#: The leader of a partition that has none, and the controller of a cluster without one.
NO_NODE = -1


@attrs.frozen
class BrokerAddress:
    """A broker, and an address by which clients can reach it."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@attrs.frozen
class PartitionFacts:
    """The replicas of a partition, as node ids."""

    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    elr: list[int] = attrs.field(factory=list)
    offline: list[int] = attrs.field(factory=list)


class Topology(ABC):
    """The brokers and the replicas in responses to clients."""

    @property
    @abstractmethod
    def controller_id(self) -> int: ...

    @abstractmethod
    def brokers(self, session: ClientSession) -> list[BrokerAddress]:
        """Return the brokers, with addresses that the client of a session can use."""

    @abstractmethod
    def partition(self, topic: str, number: int) -> PartitionFacts:
        """Return the replicas of an existing partition."""

    @abstractmethod
    def coordinator(
        self, topic: str, number: int, session: ClientSession
    ) -> BrokerAddress | None:
        """Return the leader of a partition of an internal topic, None if it has none."""


class SoleTopology(Topology):
    """One broker, which leads every partition and is the controller.

    A client gets the address by which it reached the broker.
    """

    def __init__(self, logdir: LogDir) -> None:
        self._logdir = logdir
        self._node = [logdir.node_id]

    @property
    def controller_id(self) -> int:
        return self._logdir.node_id

    def brokers(self, session: ClientSession) -> list[BrokerAddress]:
        return [BrokerAddress(self._logdir.node_id, session.host, session.port)]

    def partition(self, topic: str, number: int) -> PartitionFacts:
        epoch = self._logdir.leader_epoch(topic, number)
        return PartitionFacts(self._logdir.node_id, epoch, self._node, self._node)

    def coordinator(
        self, topic: str, number: int, session: ClientSession
    ) -> BrokerAddress | None:
        return BrokerAddress(self._logdir.node_id, session.host, session.port)
