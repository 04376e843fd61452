"""Registry nodes of brokers, topics, a clock and a controller, and their writers.

| nodes | written by | |
|---|---|---|
| `/cluster/id` | the first controller | claim_cluster() |
| `/clock` | the first process since the machine was started | agree_on_clock() |
| `/brokers/ids/<n>` | each broker | register_broker() |
| `/brokers/topics/<t>` with its partitions' states | the controller | publishing() |
| `/config/topics/<t>` | the controller | publishing() |
| `/controller`, `/controller_epoch` | the elected controller | paths.elect() |

Rules:
- Topics are a view of the log directory. After a kill or a power failure, the next
  controller compares the whole view and repairs it.
- The node of a topic is deleted last, so that an interrupted deletion is found again.
- A node with the correct value is not written.

paths.py defines values and paths. All functions accept any registry, on files or
ZooKeeper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs

from logcore.errors import InvalidConfigError, NodeExistsError, NodeNotFoundError
from logcore.registry import paths
from logcore.registry.protocol import Registry


@attrs.frozen
class TopicView:
    """A topic as the registry represents it."""

    topic_id: str
    #: The broker ids of each partition, the leader first.
    replicas: Mapping[int, Sequence[int]]
    #: The leader epoch of each partition.
    leader_epochs: Mapping[int, int]
    #: The settings of the topic itself.
    config: Mapping[str, str]


def topic_nodes(name: str, view: TopicView, controller_epoch: int) -> dict[str, bytes]:
    """Return paths and values of all nodes of a topic, the topic first."""
    nodes = {paths.topic(name): paths.pack_topic(view.replicas, topic_id=view.topic_id)}
    for partition, brokers in sorted(view.replicas.items()):
        nodes[paths.partition_state(name, partition)] = paths.pack_partition_state(
            leader=brokers[0],
            leader_epoch=view.leader_epochs.get(partition, 0),
            isr=brokers,
            controller_epoch=controller_epoch,
        )
    nodes[paths.topic_config(name)] = paths.pack_config(view.config)
    return nodes


def agree_on_clock(registry: Registry, boot: str, clock_ms: int) -> int:
    """Return the difference of wall clock and monotonic clock that all processes use.

    Processes that compute the difference themselves disagree if the wall clock is set
    in between. All use the value of the first process since the boot. `clock_ms` is the
    value of this process. Raises the errors of Registry.update().
    """

    def agree(value: bytes | None) -> bytes | None:
        if value is not None and paths.unpack_clock(value)[0] == boot:
            return None
        return paths.pack_clock(boot, clock_ms)

    node = registry.update(paths.CLOCK, agree)
    assert node is not None
    return paths.unpack_clock(node.value)[1]


def register_broker(
    registry: Registry,
    node_id: int,
    host: str,
    port: int,
    *,
    endpoints: Sequence[str] = (),
    timestamp_ms: int,
) -> None:
    """Publish the address of a broker for the life of this session.

    `endpoints` defaults to `PLAINTEXT://host:port`.

    Raises:
        NodeExistsError: another running broker has this number.

    Other errors are those of Registry.create().
    """
    told = endpoints or (f"PLAINTEXT://{host}:{port}",)
    path = paths.broker(node_id)
    value = paths.pack_broker(host, port, endpoints=told, timestamp_ms=timestamp_ms)
    try:
        registry.create(path, value, ephemeral=True)
    except NodeExistsError:
        other = "one that has just ended"
        with contextlib.suppress(NodeNotFoundError):
            other = registry.get(path).value.decode("utf-8", "replace")
        raise NodeExistsError(
            f"another broker has the number {node_id}; give this one another, or stop that one",
            path=path,
            found=other,
        ) from None


def claim_cluster(registry: Registry, cluster_id: str) -> None:
    """Write the cluster that the registry belongs to.

    Raises:
        InvalidConfigError: the registry belongs to another cluster.
    """
    packed = paths.pack_cluster_id(cluster_id)

    def claim(value: bytes | None) -> bytes | None:
        if value is None:
            return packed
        # Keep the present value.
        return None

    node = registry.update(paths.CLUSTER_ID, claim)
    assert node is not None
    found = paths.unpack_cluster_id(node.value)
    if found != cluster_id:
        raise InvalidConfigError(
            "the registry is of another cluster; remove it, or give it back to its directory",
            path=paths.CLUSTER_ID,
            expected=cluster_id,
            found=found,
        )


def publishing(
    registry: Registry,
    names: Collection[str],
    view_of: Callable[[str], TopicView],
    controller_epoch: int,
) -> Iterator[str]:
    """Make the topics in a registry equal to a directory's topics, one topic per step.

    Each step yields the name of the topic. `names` contains all topics. Raises the
    errors of view_of() and the registry.
    """
    known = {*registry.children(paths.TOPICS), *registry.children(paths.TOPIC_CONFIGS)}
    for element in sorted(known - {paths.element(name) for name in names}):
        name = paths.element_name(element)
        _remove(registry, name)
        yield name
    for name in sorted(names):
        _publish(registry, name, topic_nodes(name, view_of(name), controller_epoch))
        yield name


def _publish(registry: Registry, name: str, nodes: Mapping[str, bytes]) -> None:
    for path, value in nodes.items():
        _put(registry, path, value)
    states = {path for path in nodes if path.endswith("/state")}
    for number in registry.children(f"{paths.topic(name)}/partitions"):
        partition = f"{paths.topic(name)}/partitions/{number}"
        # The topic was deleted and created again with fewer partitions.
        if f"{partition}/state" not in states:
            _delete(registry, f"{partition}/state", partition)


def _remove(registry: Registry, name: str) -> None:
    topic = paths.topic(name)
    for number in registry.children(f"{topic}/partitions"):
        _delete(
            registry,
            f"{topic}/partitions/{number}/state",
            f"{topic}/partitions/{number}",
        )
    _delete(registry, f"{topic}/partitions", paths.topic_config(name), topic)


def _put(registry: Registry, path: str, value: bytes) -> None:
    try:
        if registry.get(path).value != value:
            registry.set(path, value)
    except NodeNotFoundError:
        registry.create(path, value)


def _delete(registry: Registry, *nodes: str) -> None:
    for path in nodes:
        with contextlib.suppress(NodeNotFoundError):
            registry.delete(path)
