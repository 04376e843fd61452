"""The controller's decisions about one partition: ISR members, leaders, reassignments.

    new = review(state, partition, live, controller_epoch)
    if new is not state: set the state node to `new`, expecting the version of `state`

Each decision is one compare-and-set of one node, made from the value that was read. Two
controllers at the same time are therefore safe, and a controller keeps no state.

Rules:
- An ISR entry is removed when its broker is no longer registered, or is registered with
  another epoch. A live member remains: it may not know yet that it no longer leads, so only
  the new leader removes it (leading.py).
- An ELR entry is removed when its broker is registered with another disk. If the policy
  does not wait for the disk, it is also removed after an unclean shutdown.
- A new leader comes from the ISR, else from the ELR. From the other replicas it comes
  only if `unclean.leader.election.enable` is set.
- Each election begins a new leader epoch, also if the same broker is elected again, and
  also if there is no leader. A change of the ISR alone keeps the epoch (KAFKA-15021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from logcore.replication.state import (
    NO_LEADER,
    InSyncReplica,
    LeaderAndIsr,
    LiveBroker,
    ReplicationError,
    replace_isr,
)


@attrs.frozen
class ReplicatedPartition:
    """The assignment and the settings of a partition, from the node of its topic."""

    #: The preferred leader first. During a reassignment: the target, then the brokers
    #: that will be removed.
    replicas: tuple[int, ...]
    #: `min.insync.replicas` of the topic.
    min_insync_replicas: int = 1
    #: `unclean.leader.election.enable`.
    is_unclean_allowed: bool = False
    #: Whether the durability policy waits for the disk.
    is_durable_first: bool = True
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()

    @property
    def min_isr(self) -> int:
        return min(self.min_insync_replicas, len(self.replicas))

    @property
    def target(self) -> tuple[int, ...]:
        return tuple(each for each in self.replicas if each not in self.removing)


def create_state(
    partition: ReplicatedPartition,
    live: Mapping[int, LiveBroker],
    controller_epoch: int,
) -> LeaderAndIsr | None:
    """Return the first state of a new partition, None if no replica is registered."""
    isr = {
        broker: InSyncReplica(live[broker].epoch, live[broker].disk)
        for broker in partition.replicas
        if broker in live and not live[broker].is_leaving
    }
    if not isr:
        return None
    return LeaderAndIsr(
        leader=next(iter(isr)),
        leader_epoch=0,
        isr=isr,
        controller_epoch=controller_epoch,
    )


def review(
    state: LeaderAndIsr,
    partition: ReplicatedPartition,
    live: Mapping[int, LiveBroker],
    controller_epoch: int,
) -> LeaderAndIsr:
    """Return the state that fits the registered brokers, or `state` itself."""
    new = _remove_dead(state, partition, live)
    new = _review_elr(new, partition, live)
    leader = new.isr.get(new.leader)
    if leader is None:
        new = _elect(new, partition, live)
    elif live[new.leader].is_leaving or new.leader in partition.removing:
        successor = next(eligible_members(new, partition, live), None)
        if successor is not None:
            new = move_leader(new, successor)
    if new is state:
        return state
    return attrs.evolve(new, controller_epoch=controller_epoch)


def _remove_dead(
    state: LeaderAndIsr,
    partition: ReplicatedPartition,
    live: Mapping[int, LiveBroker],
) -> LeaderAndIsr:
    isr = {
        broker: member
        for broker, member in state.isr.items()
        if broker in live and live[broker].epoch == member.broker_epoch
    }
    if len(isr) == len(state.isr):
        return state
    return replace_isr(state, isr, partition.min_isr)


def _review_elr(
    state: LeaderAndIsr,
    partition: ReplicatedPartition,
    live: Mapping[int, LiveBroker],
) -> LeaderAndIsr:
    def is_kept(broker: int, disk: str) -> bool:
        found = live.get(broker)
        if found is None:
            return True
        return found.disk == disk and (partition.is_durable_first or found.was_clean)

    elr = {broker: disk for broker, disk in state.elr.items() if is_kept(broker, disk)}
    return state if len(elr) == len(state.elr) else attrs.evolve(state, elr=elr)


def eligible_members(
    state: LeaderAndIsr,
    partition: ReplicatedPartition,
    live: Mapping[int, LiveBroker],
) -> Iterator[int]:
    """Yield the ISR members that may become the leader, in the order of preference."""
    for broker in partition.target:
        member, found = state.isr.get(broker), live.get(broker)
        if member is None or found is None or found.is_leaving:
            continue
        if found.epoch == member.broker_epoch:
            yield broker


def move_leader(state: LeaderAndIsr, leader: int) -> LeaderAndIsr:
    """Make another member of the ISR the leader, in a new epoch."""
    return attrs.evolve(state, leader=leader, leader_epoch=state.leader_epoch + 1)


def _elect(
    state: LeaderAndIsr,
    partition: ReplicatedPartition,
    live: Mapping[int, LiveBroker],
) -> LeaderAndIsr:
    """Elect a leader for a state whose leader is not in the ISR."""
    # A leaving member, which is only in the second part, is better than no leader.
    members = [*eligible_members(state, partition, live), *state.isr]
    if members:
        return move_leader(state, members[0])
    candidates = [broker for broker in partition.replicas if broker in live]
    for broker in candidates:
        if broker in state.elr:
            return _lead_alone(state, partition, broker, live[broker])
    if partition.is_unclean_allowed and candidates:
        alone = _lead_alone(state, partition, candidates[0], live[candidates[0]])
        return attrs.evolve(alone, elr={}, is_recovering=True)
    if state.leader == NO_LEADER:
        return state
    return move_leader(state, NO_LEADER)


def _lead_alone(
    state: LeaderAndIsr,
    partition: ReplicatedPartition,
    broker: int,
    found: LiveBroker,
) -> LeaderAndIsr:
    # If one member is enough, the high watermark moves without the rest of the ELR.
    isr = {broker: InSyncReplica(found.epoch, found.disk)}
    return replace_isr(move_leader(state, broker), isr, partition.min_isr)


# -- requests --------------------------------------------------------------------------


def prefer_leader(
    state: LeaderAndIsr,
    partition: ReplicatedPartition,
    live: Mapping[int, LiveBroker],
    controller_epoch: int,
) -> LeaderAndIsr | ReplicationError:
    """Elect the preferred leader: ElectLeaders of type PREFERRED, and the balancer."""
    preferred = partition.target[0]
    if state.leader == preferred:
        return ReplicationError.ELECTION_NOT_NEEDED
    if preferred not in eligible_members(state, partition, live):
        return ReplicationError.PREFERRED_LEADER_NOT_AVAILABLE
    moved = move_leader(state, preferred)
    return attrs.evolve(moved, controller_epoch=controller_epoch)


def elect_unclean(
    state: LeaderAndIsr,
    partition: ReplicatedPartition,
    live: Mapping[int, LiveBroker],
    controller_epoch: int,
) -> LeaderAndIsr | ReplicationError:
    """Elect any registered replica: ElectLeaders of type UNCLEAN."""
    if state.leader != NO_LEADER:
        return ReplicationError.ELECTION_NOT_NEEDED
    allowed = attrs.evolve(partition, is_unclean_allowed=True)
    new = review(state, allowed, live, controller_epoch)
    if new.leader == NO_LEADER:
        return ReplicationError.ELIGIBLE_LEADERS_NOT_AVAILABLE
    return new


def reassign(
    partition: ReplicatedPartition,
    target: tuple[int, ...] | None,
    known: frozenset[int] | set[int],
) -> ReplicatedPartition | ReplicationError:
    """Begin a reassignment to `target`, or cancel it with None.

    `known` contains every broker that has ever registered. A new target replaces the
    present one. Cancelling returns to the replicas that are not being added.
    """
    if target is None:
        if not partition.adding and not partition.removing:
            return ReplicationError.NO_REASSIGNMENT_IN_PROGRESS
        kept = tuple(
            each for each in partition.replicas if each not in partition.adding
        )
        return attrs.evolve(
            partition,
            replicas=kept + partition.adding,
            adding=(),
            removing=partition.adding,
        )
    if not target or len(set(target)) < len(target) or not set(target) <= known:
        return ReplicationError.INVALID_REPLICA_ASSIGNMENT
    removing = tuple(each for each in partition.replicas if each not in target)
    original = {each for each in partition.replicas if each not in partition.adding}
    adding = tuple(each for each in target if each not in original)
    return attrs.evolve(
        partition, replicas=target + removing, adding=adding, removing=removing
    )


def finish_reassignment(
    state: LeaderAndIsr, partition: ReplicatedPartition
) -> ReplicatedPartition:
    """Return the partition with the target as its replicas, or `partition` itself.

    Call it after review(), with the state as it was written. The reassignment ends when
    all brokers of the target are in the ISR (KAFKA-15665), one of them leads, and no
    other broker is in the ISR. Brokers outside the target then delete their replica.
    """
    if not partition.adding and not partition.removing:
        return partition
    target = partition.target
    if state.isr.keys() != set(target) or state.leader not in target:
        return partition
    return attrs.evolve(partition, replicas=target, adding=(), removing=())
