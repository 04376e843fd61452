"""The topology of a cluster: its latest view, and changes of leaders and replicas."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import attrs

from logcore.directory.topic_file import NewTopics
from logcore.errors import BadVersionError, RegistryError
from logcore.metadata.checkpoint import Key
from logcore.replication import electing
from logcore.replication.state import ReplicationError
from netshim.cluster.controller import elect_leader, write_state
from netshim.cluster.directory import ClusterDirectory
from netshim.cluster.member import ClusterMember
from netshim.session import ClientSession
from netshim.topology import (
    NO_NODE,
    BrokerAddress,
    PartitionReplicas,
    Placement,
    Reassignment,
    Topology,
)
from netshim.wire import codes

_log = logging.getLogger("netshim")

#: Maximum number of attempts to change a node that another broker changes at the same
#: time.
_ATTEMPTS = 20
#: Maximum time until the view of this broker contains its own change.
_CHANGE_S = 5.0


class ClusterTopology(Topology):
    """The brokers and replicas of the latest view."""

    def __init__(self, member: ClusterMember, directory: ClusterDirectory) -> None:
        self._member = member
        self._directory = directory

    @property
    def controller_id(self) -> int:
        return self._member.view.controller

    @property
    def is_member(self) -> bool:
        return self._member.has_lease

    def node_of(self, session: ClientSession) -> int:
        return self._directory.node_id

    def brokers(self, session: ClientSession) -> list[BrokerAddress]:
        listener = session.listener
        return [
            BrokerAddress(number, *address, node.rack)
            for number, node in sorted(self._member.view.brokers.items())
            # A client gets the addresses of the listener that it uses.
            if (address := node.endpoint(listener)) is not None
        ]

    def partition(self, topic: str, number: int) -> PartitionReplicas:
        view = self._member.view
        replicas = list(view.replicas_of((topic, number)))
        # A broker without a registration is stopped, or has lost its session.
        offline = [replica for replica in replicas if replica not in view.brokers]
        stored = view.states.get((topic, number))
        if stored is None:
            # The controller has not made a state for the partition yet.
            return PartitionReplicas(NO_NODE, -1, replicas, [], [], offline)
        state = stored.state
        leader = state.leader
        # Clients cannot connect to a leader that the response does not list among the
        # brokers, and kafka-python fails. As in Kafka, they wait for the next leader.
        if leader not in view.brokers:
            leader = NO_NODE
        return PartitionReplicas(
            leader,
            state.leader_epoch,
            replicas,
            [replica for replica in replicas if replica in state.isr],
            [replica for replica in replicas if replica in state.elr],
            offline,
        )

    def coordinator(
        self, topic: str, number: int, session: ClientSession
    ) -> BrokerAddress | None:
        view = self._member.view
        leader = view.leader_of((topic, number))
        node = view.brokers.get(leader)
        address = None if node is None else node.endpoint(session.listener)
        # No leader, or the leader has no listener of this name.
        if node is None or address is None:
            return None
        return BrokerAddress(leader, *address, node.rack)

    # -- changes -----------------------------------------------------------------------

    def check_placement(self, placement: Placement) -> tuple[int, str | None]:
        try:
            # Read from the registry, because the view may lack a broker that has just
            # started.
            nodes = self._member.read_racks().keys()
        except RegistryError as error:
            return codes.REQUEST_TIMED_OUT, str(error)
        if placement.assignments is None:
            factor = self._directory.factor_of(placement)
            if 1 <= factor <= len(nodes):
                return codes.NONE, None
            return (
                codes.INVALID_REPLICATION_FACTOR,
                f"expected a replication factor of 1 to {len(nodes)}, found {factor}",
            )
        sizes = {len(replicas) for replicas in placement.assignments.values()}
        for brokers in placement.assignments.values():
            if not brokers or len({*brokers}) < len(brokers) or not nodes >= {*brokers}:
                return (
                    codes.INVALID_REPLICA_ASSIGNMENT,
                    f"expected different brokers of {sorted(nodes)}, found {list(brokers)}",
                )
        if len(sizes) > 1:
            return (
                codes.INVALID_REPLICA_ASSIGNMENT,
                "all partitions of a new topic have the same number of replicas",
            )
        return codes.NONE, None

    def factor_of(self, placement: Placement) -> int:
        return self._directory.factor_of(placement)

    def create_topics(
        self,
        wanted: NewTopics,
        placements: Mapping[str, Placement],
        *,
        timeout_ms: int,
        check_only: bool = False,
    ) -> None:
        self._directory.create_placed_topics(
            wanted, placements, timeout_ms=timeout_ms, check_only=check_only
        )

    def add_partitions(
        self, name: str, count: int, placement: Placement, *, check_only: bool = False
    ) -> None:
        self._directory.add_placed_partitions(
            name, count, placement, check_only=check_only
        )

    def elect(self, key: Key, *, is_unclean: bool) -> int:
        try:
            return self._elect(key, is_unclean=is_unclean)
        except RegistryError as error:
            return _failed("an election", key, error)

    def _elect(self, key: Key, *, is_unclean: bool) -> int:
        member = self._member
        for _ in range(_ATTEMPTS):
            view = member.view
            if key not in view.states:
                break
            # A newer view has a higher version of the state.
            before = view.states[key].version
            try:
                # A compare-and-set of the state in the view.
                refused = elect_leader(
                    member.registry,
                    view,
                    key,
                    member.controller_epoch,
                    is_unclean=is_unclean,
                    waits_for_disk=member.settings.waits_for_disk,
                )
            except BadVersionError:
                # Another broker has changed the state first. Decide again with the new
                # state.
                self._wait_for_newer(key, before)
                continue
            if refused is not None:
                return int(refused)
            member.publish_changes([key])
            self._wait_for_newer(key, before)
            return codes.NONE
        return codes.LEADER_NOT_AVAILABLE

    def _wait_for_newer(self, key: Key, version: int) -> None:
        self._member.wait_for(
            lambda view: key not in view.states or view.states[key].version > version,
            _CHANGE_S,
        )

    def reassign(
        self,
        key: Key,
        target: Sequence[int] | None,
        *,
        may_change_factor: bool = True,
    ) -> int:
        try:
            return self._reassign(key, target, may_change_factor=may_change_factor)
        except RegistryError as error:
            return _failed("a reassignment", key, error)

    def _reassign(
        self, key: Key, target: Sequence[int] | None, *, may_change_factor: bool
    ) -> int:
        member = self._member
        for _ in range(_ATTEMPTS):
            view = member.view
            stored = view.states.get(key)
            if stored is None:
                if not view.replicas_of(key):
                    return codes.UNKNOWN_TOPIC_OR_PARTITION
                # The topic is new, and the controller has not written a state for
                # the partition yet.
                return codes.LEADER_NOT_AVAILABLE
            # None cancels the reassignment.
            target_replicas = None if target is None else tuple(target)
            changed = electing.reassign(
                stored.state, target_replicas, view.known_brokers
            )
            if isinstance(changed, ReplicationError):
                return int(changed)
            # AlterPartitionReassignments, version 1, can forbid another number of
            # replicas (KIP-860).
            factor = len(stored.state.target)
            if (
                target_replicas is not None
                and len(target_replicas) != factor
                and not may_change_factor
            ):
                return codes.INVALID_REPLICATION_FACTOR
            try:
                write_state(member.registry, attrs.evolve(stored, state=changed))
            except BadVersionError:
                self._wait_for_newer(key, stored.version)
                continue
            member.publish_changes([key])
            return codes.NONE
        return codes.REQUEST_TIMED_OUT

    def reassignments(self) -> Mapping[Key, Reassignment]:
        return {
            key: Reassignment(
                list(state.replicas),
                # A replica in both lists was added by a reassignment that was cancelled
                # or replaced since.
                [node for node in state.adding if node not in state.removing],
                list(state.removing),
            )
            for key, stored in self._member.view.states.items()
            if (state := stored.state).adding or state.removing
        }


def _failed(action: str, key: Key, error: RegistryError) -> int:
    """Report that the registry refused a change; return the code for the client."""
    _log.warning("%s of %s-%d was not written: %s", action, *key, error)
    return codes.REQUEST_TIMED_OUT
