"""Several nodes that one broker advertises, so that tests see clients change leaders.

Rules:
- A node is an address of the broker. All nodes serve the same directory, and nothing is
  replicated.
- The leader of a partition, and the coordinator of a group or a transaction, is the node
  with the number of the partition modulo the number of nodes, or the next one that
  runs. move_leader() chooses another leader.
- A request at another node is refused as by a broker of a cluster:
  NOT_LEADER_OR_FOLLOWER or NOT_COORDINATOR.
- A leader epoch rises if the leader changes, because clients ignore older metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import attrs

from logcore.errors import InvalidConfigError
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from netshim import wire
from netshim.faults.refusals import Handler, refusal_response, refuse_partitions
from netshim.faults.requests import observe_request
from netshim.listeners import Listener
from netshim.scheduling import map_response
from netshim.session import ClientSession
from netshim.state import BrokerState, Call
from netshim.topology import BrokerAddress, PartitionReplicas, Placement, SoleTopology
from netshim.wire import codes

#: Largest number of nodes of a broker. Each has a port.
MAX_NODES: Final = 100
#: APIs that only the leader of a partition serves.
_OF_PARTITIONS: Final = wire.keys_of(
    wire.PRODUCE,
    wire.FETCH,
    wire.LIST_OFFSETS,
    wire.OFFSET_FOR_LEADER_EPOCH,
    wire.DELETE_RECORDS,
    wire.DESCRIBE_PRODUCERS,
)
#: APIs that only the coordinator of a group serves.
_OF_GROUPS: Final = wire.keys_of(
    wire.OFFSET_COMMIT,
    wire.OFFSET_FETCH,
    wire.JOIN_GROUP,
    wire.HEARTBEAT,
    wire.LEAVE_GROUP,
    wire.SYNC_GROUP,
    wire.DESCRIBE_GROUPS,
    wire.DELETE_GROUPS,
    wire.OFFSET_DELETE,
    wire.TXN_OFFSET_COMMIT,
    wire.CONSUMER_GROUP_HEARTBEAT,
    wire.CONSUMER_GROUP_DESCRIBE,
)
#: APIs that only the coordinator of a transactional id serves.
_OF_TRANSACTIONS: Final = wire.keys_of(
    wire.INIT_PRODUCER_ID,
    wire.ADD_PARTITIONS_TO_TXN,
    wire.ADD_OFFSETS_TO_TXN,
    wire.END_TXN,
    wire.DESCRIBE_TRANSACTIONS,
)


@attrs.define
class AdvertisedNode:
    """A node, with an address for each listener of the broker."""

    node_id: int
    listeners: Sequence[Listener]
    #: A node that is stopped has no port. Others lead its partitions.
    is_running: bool = True


class AdvertisedNodes:
    """The nodes of one broker, and the leaders that a test has chosen.

    The first node has the listeners of the broker itself.
    """

    def __init__(self, nodes: Sequence[AdvertisedNode]) -> None:
        #: The nodes by their ids.
        self.all = {node.node_id: node for node in nodes}
        #: Ids in the order in which leaders are assigned.
        self._order = list(self.all)
        #: The node id by each port.
        self._by_port = {
            listener.port: node.node_id for node in nodes for listener in node.listeners
        }
        #: The leaders that a test has chosen.
        self._leaders: dict[Key, int] = {}

    @property
    def running(self) -> list[AdvertisedNode]:
        return [node for node in self.all.values() if node.is_running]

    def node(self, node_id: int) -> AdvertisedNode:
        """Return a node.

        Raises:
            InvalidConfigError: no node has this id.
        """
        node = self.all.get(node_id)
        if node is None:
            raise InvalidConfigError(
                "a node", expected=f"one of {self._order}", found=repr(node_id)
            )
        return node

    def node_of(self, session: ClientSession) -> int:
        """Return the node to which a client is connected."""
        return self._by_port.get(session.port, self._order[0])

    def leader(self, key: Key) -> int:
        """Return the node that leads a partition."""
        first = self._leaders.get(key, self._order[key[1] % len(self._order)])
        return self._next_running(first)

    def coordinator(self, name: str, topic: str, state: BrokerState) -> int:
        """Return the coordinator of a group or a transactional id."""
        return self.leader((topic, state.coordinator_partition(topic, name)))

    def _next_running(self, first: int) -> int:
        # Kafka elects another replica. Here, all nodes have replicas of all partitions.
        at = self._order.index(first)
        for node_id in self._order[at:] + self._order[:at]:
            if self.all[node_id].is_running:
                return node_id
        return first

    def move_leader(self, key: Key, node_id: int) -> None:
        """Choose the leader of a partition.

        Raises:
            InvalidConfigError: the node does not exist, or is stopped.
        """
        if not self.node(node_id).is_running:
            raise InvalidConfigError(
                "the leader of a partition",
                expected=f"one of {[node.node_id for node in self.running]}",
                found=f"node {node_id}, which is stopped",
            )
        self._leaders[key] = node_id

    def topology(self, state: BrokerState) -> AdvertisedTopology:
        """Return the nodes as the clients of a broker see them."""
        return AdvertisedTopology(state, self)

    # -- requests ----------------------------------------------------------------------

    def handle(
        self, handler: Handler, request: Any, call: Call, state: BrokerState
    ) -> Any:
        """Call the handler of a request for the partitions and coordinators of one node."""
        node_id = self.node_of(call.session)
        key = call.api_key
        if key in _OF_PARTITIONS:
            return self._handle_partitions(handler, request, call, state, node_id)
        serve = partial(handler, request, call, state)
        # In Kafka, both lists contain only the groups or transactions that the node
        # coordinates. Clients send the request to every node.
        if key == wire.LIST_GROUPS.key:
            return map_response(serve(), partial(self._local_groups, node_id, state))
        if key == wire.LIST_TRANSACTIONS.key:
            return map_response(
                serve(), partial(self._local_transactions, node_id, state)
            )
        # Every node serves the other APIs, such as Metadata and FindCoordinator.
        if key not in _OF_GROUPS and key not in _OF_TRANSACTIONS:
            return serve()
        observed = observe_request(wire.APIS[key].name, request, call, state)
        topic, names = OFFSETS_TOPIC, observed.groups
        if key in _OF_TRANSACTIONS:
            topic, names = TRANSACTIONS_TOPIC, observed.transactional_ids
        # A request for groups of several coordinators is refused as a whole. Kafka's
        # clients send none.
        if any(self.coordinator(name, topic, state) != node_id for name in names):
            return refusal_response(request, codes.NOT_COORDINATOR, call, state)
        return serve()

    def _handle_partitions(
        self,
        handler: Handler,
        request: Any,
        call: Call,
        state: BrokerState,
        node_id: int,
    ) -> Any:

        def is_elsewhere(topic: str | None, number: int | None) -> bool:
            if topic is None or number is None:
                return False
            # The handler answers for partitions that do not exist.
            exists = number in state.logs.numbers_of(topic)
            return exists and self.leader((topic, number)) != node_id

        return refuse_partitions(
            is_elsewhere, codes.NOT_LEADER_OR_FOLLOWER, handler, request, call, state
        )

    def _local_groups(self, node_id: int, state: BrokerState, response: Any) -> Any:
        response.groups = [
            group
            for group in response.groups
            if self.coordinator(group.group_id, OFFSETS_TOPIC, state) == node_id
        ]
        return response

    def _local_transactions(
        self, node_id: int, state: BrokerState, response: Any
    ) -> Any:
        response.transaction_states = [
            transaction
            for transaction in response.transaction_states
            if self.coordinator(transaction.transactional_id, TRANSACTIONS_TOPIC, state)
            == node_id
        ]
        return response


class AdvertisedTopology(SoleTopology):
    """The nodes that a broker advertises, as clients see them."""

    def __init__(self, state: BrokerState, nodes: AdvertisedNodes) -> None:
        super().__init__(state.logdir, state.settings.max_replication_factor)
        self._nodes = nodes

    @property
    def controller_id(self) -> int:
        return self._nodes.running[0].node_id

    def node_of(self, session: ClientSession) -> int:
        return self._nodes.node_of(session)

    def brokers(self, session: ClientSession) -> list[BrokerAddress]:
        return [self._address(node, session) for node in self._nodes.running]

    def _address(self, node: AdvertisedNode, session: ClientSession) -> BrokerAddress:
        if node.node_id == self._nodes.node_of(session):
            return BrokerAddress(node.node_id, session.host, session.port)
        listener = next(
            listener for listener in node.listeners if listener.name == session.listener
        )
        # Without an advertised address, the client reaches all nodes at the host that
        # it used for this one.
        host, port = listener.advertised or (session.host, listener.port)
        return BrokerAddress(node.node_id, host, port)

    def partition(self, topic: str, number: int) -> PartitionReplicas:
        leader = self._nodes.leader((topic, number))
        # Kafka lists the preferred leader first.
        replicas = [
            leader,
            *(node_id for node_id in self._nodes.all if node_id != leader),
        ]
        offline = [
            replica for replica in replicas if not self._nodes.all[replica].is_running
        ]
        return PartitionReplicas(
            leader,
            super().partition(topic, number).leader_epoch,
            replicas,
            [replica for replica in replicas if replica not in offline],
            offline=offline,
        )

    def coordinator(
        self, topic: str, number: int, session: ClientSession
    ) -> BrokerAddress | None:
        node_id = self._nodes.leader((topic, number))
        return self._address(self._nodes.node(node_id), session)

    def check_placement(self, placement: Placement) -> tuple[int, str | None]:
        assignments = placement.assignments or {}
        nodes = self._nodes.all
        # The base class accepts only the number of a sole broker.
        if any(not {*replicas} <= nodes.keys() for replicas in assignments.values()):
            return codes.INVALID_REPLICA_ASSIGNMENT, f"the brokers are {list(nodes)}"
        return super().check_placement(attrs.evolve(placement, assignments=None))
