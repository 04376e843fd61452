"""The controller: elects leaders, creates states, deletes topics, ends reassignments.

    changes = review_cluster(registry, view, controller_epoch, waits=True)

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
    BadVersionError,
    CorruptRegistryError,
    NodeNotEmptyError,
    NodeNotFoundError,
)
from logcore.registry import paths
from logcore.registry.protocol import NodeWrite, Registry
from logcore.replication import electing
from logcore.replication.state import LeaderAndIsr, ReplicationError, pack_state
from netshim.cluster import nodes
from netshim.cluster.nodes import DELETED, WHOLE_TOPIC, Change
from netshim.cluster.view import ClusterView, StoredState, TopicOfCluster

_log = logging.getLogger("netshim")

#: The number of states that are written together. The session is renewed in between,
#: and with files each of them costs a sync.
_WRITES_AT_ONCE: Final = 32


@attrs.frozen
class _StateWrite:
    """A decision about a partition. `stored` is the state before, None if it is new."""

    name: str
    number: int
    new: LeaderAndIsr
    stored: StoredState | None

    @property
    def node(self) -> NodeWrite:
        version = None if self.stored is None else self.stored.version
        path = paths.partition_state(self.name, self.number)
        return NodeWrite(path, pack_state(self.new), version)


def review_cluster(
    registry: Registry, view: ClusterView, controller_epoch: int, *, waits: bool
) -> Iterator[Change]:
    """Make each state fit the registered brokers; yield each change after its write.

    `waits` is whether the durability policy waits for the disk. The caller must write a
    DELETED change to its list before it takes the next one. Raises the errors of the
    registry, except for lost races.
    """
    live = view.live
    writes: list[_StateWrite] = []
    for name in view.deletions:
        yield from _delete_topic(registry, name)
    for name, topic in view.topics.items():
        if name in view.deletions:
            continue
        for number in topic.node.replicas:
            if (name, number) in view.damaged:
                continue
            partition = topic.partition(number, waits=waits)
            stored = view.states.get((name, number))
            if stored is None:
                new = electing.create_state(partition, live, controller_epoch)
                if new is not None:
                    writes.append(_StateWrite(name, number, new, None))
            else:
                new = electing.review(stored.state, partition, live, controller_epoch)
                if new is not stored.state:
                    writes.append(_StateWrite(name, number, new, stored))
                elif partition.adding or partition.removing:
                    try:
                        yield from _finish_reassignment(
                            registry, name, number, topic, partition, stored
                        )
                    except (BadVersionError, NodeNotFoundError):
                        yield name, WHOLE_TOPIC
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
        # Any of them may have been written, also if the disk is full.
        for write in writes:
            yield write.name, write.number
        raise
    for write, result in zip(writes, results, strict=True):
        if isinstance(result, int):
            if write.stored is not None:
                _report(write.name, write.number, write.stored.state, write.new)
            yield write.name, write.number
        else:
            yield write.name, WHOLE_TOPIC


def write_state(registry: Registry, name: str, number: int, stored: StoredState) -> int:
    """Replace a state whose node has the version `stored.version`.

    Returns the new version. Raises BadVersionError, and NodeNotFoundError after a
    deletion.
    """
    path = paths.partition_state(name, number)
    return registry.set(path, pack_state(stored.state), version=stored.version)


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


def _finish_reassignment(
    registry: Registry,
    name: str,
    number: int,
    topic: TopicOfCluster,
    partition: electing.ReplicatedPartition,
    stored: StoredState,
) -> Iterator[Change]:
    finished = electing.finish_reassignment(stored.state, partition)
    if finished is partition:
        return
    node = topic.node.with_assignment(number, finished)
    registry.set(paths.topic(name), nodes.pack_topic(node), version=topic.version)
    yield name, WHOLE_TOPIC


def _delete_topic(registry: Registry, name: str) -> Iterator[Change]:
    path = paths.topic(name)
    try:
        topic_id = nodes.unpack_topic(registry.get(path).value, path).topic_id
    except NodeNotFoundError:
        pass  # an earlier controller has removed it
    except CorruptRegistryError as error:
        _log.error("topic %s is deleted, and its replicas are kept: %s", name, error)
    else:
        yield str(topic_id), DELETED
    parent = nodes.partitions_path(name)
    for number in registry.children(parent):
        for path in (f"{parent}/{number}/state", f"{parent}/{number}"):
            _delete(registry, path)
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
    name: str,
    number: int,
    controller_epoch: int,
    *,
    is_unclean: bool,
    waits: bool,
) -> ReplicationError | None:
    """Elect the preferred leader, or any registered replica; return why not, or None.

    Raises BadVersionError if the state has changed since it was read.
    """
    stored = view.states[name, number]
    partition = view.topics[name].partition(number, waits=waits)
    elect = electing.elect_unclean if is_unclean else electing.prefer_leader
    new = elect(stored.state, partition, view.live, controller_epoch)
    if isinstance(new, ReplicationError):
        return new
    write_state(registry, name, number, StoredState(new, stored.version))
    return None
