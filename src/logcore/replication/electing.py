"""The controller's decisions about one partition: ISR members, leaders, reassignments.

    new = review(state, settings, live, controller_epoch)
    if new is not state: set the state node to `new`, expecting the version of `state`

Each decision is one compare-and-set of one node, made from the value that was read. Two
controllers at the same time are therefore safe, and a controller keeps no state. The
assignment is in the same node: in a node of its own, a proposal of the leader could add
a broker to the ISR after the broker was unassigned.

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
- The end of a reassignment that removes a broker also begins an epoch. The broker deletes
  its replica then, so a leader that wakes up later must refuse the fetches it has sent.
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
class PartitionSettings:
    """The settings of a partition that elections depend on."""

    #: `min.insync.replicas` of the topic.
    min_insync_replicas: int = 1
    #: `unclean.leader.election.enable`.
    is_unclean_allowed: bool = False
    #: Whether the durability policy waits for the disk.
    is_durable_first: bool = True

    def min_isr(self, state: LeaderAndIsr) -> int:
        return min(self.min_insync_replicas, len(state.replicas))


def create_state(
    replicas: tuple[int, ...],
    live: Mapping[int, LiveBroker],
    controller_epoch: int,
) -> LeaderAndIsr | None:
    """Return the first state of a new partition, None if no replica is registered."""
    isr = {
        broker: InSyncReplica(live[broker].epoch, live[broker].disk)
        for broker in replicas
        if broker in live and not live[broker].is_leaving
    }
    if not isr:
        return None
    return LeaderAndIsr(
        leader=next(iter(isr)),
        leader_epoch=0,
        isr=isr,
        replicas=replicas,
        controller_epoch=controller_epoch,
    )


def review(
    state: LeaderAndIsr,
    settings: PartitionSettings,
    live: Mapping[int, LiveBroker],
    controller_epoch: int,
) -> LeaderAndIsr:
    """Return the state that fits the registered brokers, or `state` itself.

    It also ends the reassignment, if the target is in sync.
    """
    new = _remove_dead(state, settings, live)
    new = _review_elr(new, settings, live)
    leader = new.isr.get(new.leader)
    if leader is None:
        new = _elect(new, settings, live)
    elif live[new.leader].is_leaving or new.leader in new.removing:
        successor = next(eligible_members(new, live), None)
        if successor is not None:
            new = move_leader(new, successor)
    new = _finish_reassignment(new)
    if new is state:
        return state
    return attrs.evolve(new, controller_epoch=controller_epoch)


def _remove_dead(
    state: LeaderAndIsr,
    settings: PartitionSettings,
    live: Mapping[int, LiveBroker],
) -> LeaderAndIsr:
    isr = {
        broker: member
        for broker, member in state.isr.items()
        if broker in live and live[broker].epoch == member.broker_epoch
    }
    if len(isr) == len(state.isr):
        return state
    return replace_isr(state, isr, settings.min_isr(state))


def _review_elr(
    state: LeaderAndIsr,
    settings: PartitionSettings,
    live: Mapping[int, LiveBroker],
) -> LeaderAndIsr:
    def is_kept(broker: int, disk: str) -> bool:
        live_broker = live.get(broker)
        if live_broker is None:
            return True
        return live_broker.disk == disk and (
            settings.is_durable_first or live_broker.was_clean
        )

    elr = {broker: disk for broker, disk in state.elr.items() if is_kept(broker, disk)}
    return state if len(elr) == len(state.elr) else attrs.evolve(state, elr=elr)


def eligible_members(
    state: LeaderAndIsr, live: Mapping[int, LiveBroker]
) -> Iterator[int]:
    """Yield the ISR members that may become the leader, in the order of preference."""
    for broker in state.target:
        member, live_broker = state.isr.get(broker), live.get(broker)
        if member is None or live_broker is None or live_broker.is_leaving:
            continue
        if live_broker.epoch == member.broker_epoch:
            yield broker


def move_leader(state: LeaderAndIsr, leader: int) -> LeaderAndIsr:
    """Make another member of the ISR the leader, in a new epoch."""
    return attrs.evolve(state, leader=leader, leader_epoch=state.leader_epoch + 1)


def _elect(
    state: LeaderAndIsr,
    settings: PartitionSettings,
    live: Mapping[int, LiveBroker],
) -> LeaderAndIsr:
    """Elect a leader for a state whose leader is not in the ISR."""
    # A leaving member, which is only in the second part, is better than no leader.
    members = [*eligible_members(state, live), *state.isr]
    if members:
        return move_leader(state, members[0])
    candidates = [broker for broker in state.replicas if broker in live]
    for broker in candidates:
        if broker in state.elr:
            return _elect_single(state, settings, broker, live[broker])
    if settings.is_unclean_allowed and candidates:
        elected = _elect_single(state, settings, candidates[0], live[candidates[0]])
        return attrs.evolve(elected, elr={}, is_recovering=True)
    if state.leader == NO_LEADER:
        return state
    return move_leader(state, NO_LEADER)


def _elect_single(
    state: LeaderAndIsr,
    settings: PartitionSettings,
    broker: int,
    live_broker: LiveBroker,
) -> LeaderAndIsr:
    # If one in-sync member is enough, the other members of the ELR are removed, because
    # the high watermark advances without them.
    isr = {broker: InSyncReplica(live_broker.epoch, live_broker.disk)}
    return replace_isr(move_leader(state, broker), isr, settings.min_isr(state))


# -- requests --------------------------------------------------------------------------


def prefer_leader(
    state: LeaderAndIsr, live: Mapping[int, LiveBroker], controller_epoch: int
) -> LeaderAndIsr | ReplicationError:
    """Elect the preferred leader: ElectLeaders of type PREFERRED, and the balancer."""
    preferred = state.target[0]
    if state.leader == preferred:
        return ReplicationError.ELECTION_NOT_NEEDED
    if preferred not in eligible_members(state, live):
        return ReplicationError.PREFERRED_LEADER_NOT_AVAILABLE
    moved = move_leader(state, preferred)
    return attrs.evolve(moved, controller_epoch=controller_epoch)


def elect_unclean(
    state: LeaderAndIsr,
    settings: PartitionSettings,
    live: Mapping[int, LiveBroker],
    controller_epoch: int,
) -> LeaderAndIsr | ReplicationError:
    """Elect any registered replica: ElectLeaders of type UNCLEAN."""
    if state.leader != NO_LEADER:
        return ReplicationError.ELECTION_NOT_NEEDED
    allowed = attrs.evolve(settings, is_unclean_allowed=True)
    new = review(state, allowed, live, controller_epoch)
    if new.leader == NO_LEADER:
        return ReplicationError.ELIGIBLE_LEADERS_NOT_AVAILABLE
    return new


def reassign(
    state: LeaderAndIsr,
    target: tuple[int, ...] | None,
    known: frozenset[int] | set[int],
) -> LeaderAndIsr | ReplicationError:
    """Begin a reassignment to `target`, or cancel it with None.

    `known` contains every broker that has ever registered. A new target replaces the
    present one. Cancelling returns to the replicas before the first reassignment.
    """
    original = tuple(each for each in state.replicas if each not in state.adding)
    if target is None:
        if not state.adding and not state.removing:
            return ReplicationError.NO_REASSIGNMENT_IN_PROGRESS
        target = original
    elif not target or len(set(target)) < len(target) or not set(target) <= known:
        return ReplicationError.INVALID_REPLICA_ASSIGNMENT
    removing = tuple(each for each in state.replicas if each not in target)
    replicas = target + removing
    adding = tuple(each for each in replicas if each not in original)
    return attrs.evolve(state, replicas=replicas, adding=adding, removing=removing)


def _finish_reassignment(state: LeaderAndIsr) -> LeaderAndIsr:
    """Make the target the replicas, if it is in sync.

    The reassignment ends when all brokers of the target are in the ISR (KAFKA-15665), one
    of them leads, and no other broker is in the ISR. Brokers outside the target then
    delete their replica.
    """
    if not state.adding and not state.removing:
        return state
    target = state.target
    if state.isr.keys() != set(target) or state.leader not in target:
        return state
    epoch = state.leader_epoch + 1 if state.removing else state.leader_epoch
    # The ELR contains at most brokers that are removed: the others are in the ISR.
    return attrs.evolve(
        state, replicas=target, adding=(), removing=(), elr={}, leader_epoch=epoch
    )
