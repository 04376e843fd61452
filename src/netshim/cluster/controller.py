"""The controller: elects leaders, creates states, deletes topics, ends reassignments.

    changes = review_cluster(registry, view, controller_epoch, waits_for_disk=True)

Rules:
- Decisions are those of logcore.replication.electing. Each is one compare-and-set of one
  node, from the version in the view. If the node has changed since, nothing is written.
  The partition is reported like a change, so that its node is read again.
- The controller keeps no state. Deletions and reassignments are steps that can be
  repeated, so the next controller completes them.
- The nodes of a deleted topic are removed in the order states, topic, settings, request.
  The request is last, so that an interrupted deletion is found again.
- The list of changes names a deleted topic before its first node is removed. Brokers
  remove replicas for that entry only. Missing nodes may have been lost by the registry.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from logcore.errors import (
    CorruptRegistryError,
    NodeNotEmptyError,
    NodeNotFoundError,
)
from logcore.metadata.checkpoint import Key
from logcore.registry import paths
from logcore.registry.protocol import NodeWrite, Registry
from logcore.replication import electing
from logcore.replication.state import LeaderAndIsr, ReplicationError, pack_state
from netshim.cluster import registry_nodes
from netshim.cluster.registry_nodes import DELETED, WHOLE_TOPIC, Change
from netshim.cluster.view import ClusterView, StoredState

_log = logging.getLogger("netshim")

#: The number of states that are written together. The session is renewed in between,
#: and with files each of them costs a sync.
_WRITES_AT_ONCE: Final = 32


@attrs.frozen
class _StateWrite:
    """A decision about a partition. `before` is None if its state is new."""

    #: Topic and partition.
    name: str
    number: int
    before: LeaderAndIsr | None
    new: LeaderAndIsr
    node: NodeWrite


def review_cluster(
    registry: Registry,
    view: ClusterView,
    controller_epoch: int,
    *,
    waits_for_disk: bool,
) -> Iterator[Change]:
    """Adapt each state to the registered brokers. Yield each change after its write.

    `waits_for_disk` is whether the durability policy waits for the disk. The caller
    must write a DELETED change to its list before it takes the next one. Raises the
    errors of the registry, except for lost races.
    """
    # Step 1: delete topics. This needs no decision about their partitions.
    live = view.live
    writes: list[_StateWrite] = []
    for name in view.deletions:
        yield from _delete_topic(registry, name)
    # Step 2: decide about each partition, and write the decisions in groups.
    for name, topic in view.topics.items():
        if name in view.deletions:
            continue
        settings = topic.for_elections(waits_for_disk=waits_for_disk)
        for number in topic.node.replicas:
            # A state that cannot be decoded is not replaced, because its leader may
            # still serve.
            if (name, number) in view.damaged:
                continue
            stored = view.states.get((name, number))
            before = version = None
            new: LeaderAndIsr | None
            if stored is None:
                path = registry_nodes.state_path(name, number, topic.node.topic_id)
                replicas = topic.node.replicas[number]
                new = electing.create_state(replicas, live, controller_epoch)
            else:
                path, version, before = stored.path, stored.version, stored.state
                new = electing.review(before, settings, live, controller_epoch)
            if new is not None and new is not before:
                write = NodeWrite(path, pack_state(new), version)
                writes.append(_StateWrite(name, number, before, new, write))
            if len(writes) == _WRITES_AT_ONCE:
                yield from _write_states(registry, writes)
                writes = []
    yield from _write_states(registry, writes)


def _write_states(
    registry: Registry, writes: Sequence[_StateWrite]
) -> Iterator[Change]:
    """Write states together, and yield each of them."""
    try:
        results = registry.write_many([write.node for write in writes])
    except Exception:
        # Any of them may have been written, even if the disk is full.
        for write in writes:
            yield write.name, write.number
        raise
    for write, result in zip(writes, results, strict=True):
        # The result is the new version, or the error of a lost race.
        if isinstance(result, int):
            if write.before is not None:
                _report(write.name, write.number, write.before, write.new)
            yield write.name, write.number
        else:
            yield write.name, WHOLE_TOPIC


def write_state(registry: Registry, stored: StoredState) -> int:
    """Replace a state whose node has the version `stored.version`.

    Returns the new version. Raises BadVersionError, and NodeNotFoundError after a
    deletion.
    """
    return registry.set(stored.path, pack_state(stored.state), version=stored.version)


def _report(name: str, number: int, old: LeaderAndIsr, new: LeaderAndIsr) -> None:
    if new.leader_epoch == old.leader_epoch:
        return
    _log.info(
        "%s-%d: leader %d in epoch %d, in sync: %s%s",
        name,
        number,
        new.leader,
        new.leader_epoch,
        ", ".join(map(str, new.isr)) or "none",
        "; an unclean election" if new.is_recovering else "",
    )


def _delete_topic(registry: Registry, name: str) -> Iterator[Change]:
    path = paths.topic(name)
    try:
        topic_id = registry_nodes.unpack_topic(registry.get(path).value, path).topic_id
    except NodeNotFoundError:
        pass  # an earlier controller has removed it
    except CorruptRegistryError as error:
        _log.error("topic %s is deleted, and its replicas are kept: %s", name, error)
    else:
        yield str(topic_id), DELETED
    # The states first. The request for the deletion remains until the end.
    parent = registry_nodes.partitions_path(name)
    for number in registry.children(parent):
        for state in registry.children(f"{parent}/{number}"):
            _delete(registry, f"{parent}/{number}/{state}")
        _delete(registry, f"{parent}/{number}")
    for path in (parent, paths.topic(name), paths.topic_config(name)):
        _delete(registry, path)
    _delete(registry, paths.deletion(name))
    yield name, WHOLE_TOPIC


def _delete(registry: Registry, path: str) -> None:
    # A state that was created since then is deleted in the next round.
    with contextlib.suppress(NodeNotFoundError, NodeNotEmptyError):
        registry.delete(path)


def elect_leader(
    registry: Registry,
    view: ClusterView,
    key: Key,
    controller_epoch: int,
    *,
    is_unclean: bool,
    waits_for_disk: bool,
) -> ReplicationError | None:
    """Elect the preferred leader, or any registered replica; return why not, or None.

    Raises BadVersionError if the state has changed since it was read.
    """
    stored = view.states[key]
    before, live = stored.state, view.live
    if is_unclean:
        settings = view.topics[key[0]].for_elections(waits_for_disk=waits_for_disk)
        # ElectLeaders with the type UNCLEAN: any registered replica, if there is no
        # leader.
        new = electing.elect_unclean(before, settings, live, controller_epoch)
    else:
        # ElectLeaders with the type PREFERRED: the first replica, if it is eligible.
        new = electing.prefer_leader(before, live, controller_epoch)
    if isinstance(new, ReplicationError):
        return new
    write_state(registry, attrs.evolve(stored, state=new))
    return None
