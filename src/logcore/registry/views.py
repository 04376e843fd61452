"""The nodes of brokers, topics, a clock and a controller in a registry, and who writes them.

| nodes | written by | |
|---|---|---|
| `/cluster/id` | the first controller | claim_cluster() |
| `/clock` | the first process since the machine was started | agree_on_clock() |
| `/brokers/ids/<n>` | each broker | register_broker() |
| `/brokers/topics/<t>`, its partitions' states, `/config/topics/<t>` | the controller | publishing() |
| `/controller`, `/controller_epoch` | who becomes the controller | paths.elect() |

Rules:
- Topics are a view: the log directory says which there are. What a kill or a power cut leaves of the view is mended by
  the next controller, which compares all of it.
- The node of a topic is deleted last, so that a deletion that was cut off is found again.
- A node that is as it should be is not written.

Values and paths are in paths.py. All functions take any registry, of files or ZooKeeper's.
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
    """A topic as the registry shows it. replicas: broker ids of each partition, the leader first. leader_epochs: of
    each partition. config: what was set for it.
    """

    topic_id: str
    replicas: Mapping[int, Sequence[int]]
    leader_epochs: Mapping[int, int]
    config: Mapping[str, str]


def topic_nodes(name: str, view: TopicView, controller_epoch: int) -> dict[str, bytes]:
    """Paths and values of all nodes of a topic, the topic first."""
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
    """What to add to the steady clock for times that processes compare: the value of the first process of this boot.

    Each process has read the wall clock at another time, and somebody may have set that in between. clock_ms: this
    process's value. Raises what the registry raises.
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
    """Says where a broker is, as long as this session lives. endpoints: by default `PLAINTEXT://host:port`.

    NodeExistsError when a living broker has the number; else as Registry.create().
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
    """Writes the cluster that the registry belongs to. InvalidConfigError when it belongs to another one already."""
    packed = paths.pack_cluster_id(cluster_id)

    def claim(value: bytes | None) -> bytes | None:
        if value is None:
            return packed
        return None  # as it is

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
    registry: Registry, names: Collection[str], view_of: Callable[[str], TopicView], controller_epoch: int
) -> Iterator[str]:
    """Makes the topics in a registry those of a directory: a topic with each step, whose name it gives.

    names: of all topics. Raises what view_of() and the registry raise.
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
        if f"{partition}/state" not in states:  # a topic that was deleted and made again with fewer
            _delete(registry, f"{partition}/state", partition)


def _remove(registry: Registry, name: str) -> None:
    topic = paths.topic(name)
    for number in registry.children(f"{topic}/partitions"):
        _delete(registry, f"{topic}/partitions/{number}/state", f"{topic}/partitions/{number}")
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
