"""The brokers of a cluster and the replicas of partitions, as clients see them.

SoleTopology describes a broker without a cluster. For the brokers of a cluster, see
cluster/topology.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import attrs

from logcore.directory.topic_file import NewTopics
from netshim.served_directory import ServedDirectory
from netshim.session import ClientSession
from netshim.wire import codes

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
class PartitionReplicas:
    """The replicas of a partition, as node ids."""

    leader: int
    leader_epoch: int
    replicas: list[int]
    #: The in-sync replicas.
    isr: list[int]
    #: The eligible leader replicas of KIP-966, which may be elected although they are
    #: not in sync.
    elr: list[int] = attrs.field(factory=list)
    #: Replicas whose broker is not registered. Always empty without a cluster.
    offline: list[int] = attrs.field(factory=list)


@attrs.frozen
class Reassignment:
    """A partition that moves to other brokers."""

    #: All replicas, including those that are added and those that are removed.
    replicas: list[int]
    adding: list[int]
    removing: list[int]


@attrs.frozen
class Placement:
    """The requested replicas of a new topic, or of new partitions."""

    #: Number of replicas of each partition, or -1 for the default of the broker.
    factor: int = -1
    #: The node ids for each partition. None if the broker chooses them.
    assignments: Mapping[int, Sequence[int]] | None = None


class Topology(ABC):
    """The brokers and the replicas in responses to clients, and requests to move them."""

    @property
    @abstractmethod
    def controller_id(self) -> int: ...

    @property
    def is_member(self) -> bool:
        """Whether the broker is registered in its cluster, if it has one, and has read
        the registry within the session timeout.
        """
        return True

    @abstractmethod
    def node_of(self, session: ClientSession) -> int:
        """Return the broker to which the client of a session is connected."""

    @abstractmethod
    def brokers(self, session: ClientSession) -> list[BrokerAddress]:
        """Return the brokers, with addresses that the client of a session can use."""

    @abstractmethod
    def partition(self, topic: str, number: int) -> PartitionReplicas:
        """Return the replicas of an existing partition."""

    @abstractmethod
    def coordinator(
        self, topic: str, number: int, session: ClientSession
    ) -> BrokerAddress | None:
        """Return the leader of a partition of an internal topic, or None."""

    @abstractmethod
    def check_placement(self, placement: Placement) -> tuple[int, str | None]:
        """Return why a placement is refused, as (code, message).

        The code of a valid placement is 0.
        """

    @abstractmethod
    def factor_of(self, placement: Placement) -> int:
        """Return the replication factor of partitions with this placement."""

    @abstractmethod
    def create_topics(
        self,
        wanted: NewTopics,
        placements: Mapping[str, Placement],
        *,
        timeout_ms: int,
        check_only: bool = False,
    ) -> None:
        """Create topics like LogDir.create_topics(), with replicas. Blocks.

        Raises also:
            CommitTimeoutError: the topics were created, and the leaders are not known
                within `timeout_ms`.
        """

    @abstractmethod
    def add_partitions(
        self, name: str, count: int, placement: Placement, *, check_only: bool = False
    ) -> None:
        """Create more partitions like LogDir.add_partitions(), with replicas. Blocks."""

    @abstractmethod
    def elect(self, key: tuple[str, int], *, is_unclean: bool) -> int:
        """Elect a leader, and return 0 or the error code. Blocks."""

    @abstractmethod
    def reassign(
        self,
        key: tuple[str, int],
        target: Sequence[int] | None,
        *,
        may_change_factor: bool = True,
    ) -> int:
        """Begin to move a partition to other brokers, or cancel that with None.

        Without `may_change_factor`, the number of replicas must remain the same. Returns
        0 or the error code. Blocks.
        """

    @abstractmethod
    def reassignments(self) -> Mapping[tuple[str, int], Reassignment]:
        """Return the moves in progress."""


class SoleTopology(Topology):
    """One broker, which leads every partition and is the controller.

    A client gets the address by which it reached the broker.
    """

    def __init__(self, logdir: ServedDirectory, max_factor: int) -> None:
        self._logdir = logdir
        self._max_factor = max_factor
        self._node = [logdir.node_id]

    @property
    def controller_id(self) -> int:
        return self._logdir.node_id

    def node_of(self, session: ClientSession) -> int:
        return self._logdir.node_id

    def brokers(self, session: ClientSession) -> list[BrokerAddress]:
        return [BrokerAddress(self._logdir.node_id, session.host, session.port)]

    def partition(self, topic: str, number: int) -> PartitionReplicas:
        epoch = self._logdir.host.leader_epoch(topic, number)
        return PartitionReplicas(self._logdir.node_id, epoch, self._node, self._node)

    def coordinator(
        self, topic: str, number: int, session: ClientSession
    ) -> BrokerAddress | None:
        return BrokerAddress(self._logdir.node_id, session.host, session.port)

    def check_placement(self, placement: Placement) -> tuple[int, str | None]:
        node_id = self._logdir.node_id
        if placement.assignments is not None:
            if any(
                [*replicas] != [node_id] for replicas in placement.assignments.values()
            ):
                return (
                    codes.INVALID_REPLICA_ASSIGNMENT,
                    f"the only broker is {node_id}",
                )
            return codes.NONE, None
        factor = placement.factor
        # Test suites request the factor of their production cluster.
        if factor == 0 or factor < -1 or factor > self._max_factor:
            return (
                codes.INVALID_REPLICATION_FACTOR,
                f"expected a replication factor of 1 to {self._max_factor}, found {factor}",
            )
        return codes.NONE, None

    def factor_of(self, placement: Placement) -> int:
        return 1

    def create_topics(
        self,
        wanted: NewTopics,
        placements: Mapping[str, Placement],
        *,
        timeout_ms: int,
        check_only: bool = False,
    ) -> None:
        self._logdir.create_topics(wanted, check_only=check_only)

    def add_partitions(
        self, name: str, count: int, placement: Placement, *, check_only: bool = False
    ) -> None:
        self._logdir.add_partitions(name, count, check_only=check_only)

    def elect(self, key: tuple[str, int], *, is_unclean: bool) -> int:
        return codes.ELECTION_NOT_NEEDED

    def reassign(
        self,
        key: tuple[str, int],
        target: Sequence[int] | None,
        *,
        may_change_factor: bool = True,
    ) -> int:
        if target is None:
            return codes.NO_REASSIGNMENT_IN_PROGRESS
        if list(target) != self._node:
            return codes.INVALID_REPLICA_ASSIGNMENT
        return codes.NONE

    def reassignments(self) -> Mapping[tuple[str, int], Reassignment]:
        return {}
