"""Changes of the nodes that a running server advertises; see faults/nodes.py.

All functions run in the server's event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import attrs

from logcore.errors import InvalidConfigError, TopicNotFoundError
from logcore.metadata.checkpoint import Key
from netshim.faults.nodes import MAX_NODES, AdvertisedNode, AdvertisedNodes
from netshim.server import Server


async def set_node_count(server: Server, count: int) -> None:
    """Advertise this number of nodes, all running and without chosen leaders.

    The first node is the server itself. The others listen on free ports.

    Raises:
        InvalidConfigError: the number is not between 1 and 100, or the server shares its
            directory or belongs to a cluster.
        OSError: no port is available.
    """
    if type(count) is not int or not 1 <= count <= MAX_NODES:
        raise InvalidConfigError(
            "the number of nodes", expected=f"1 to {MAX_NODES}", found=repr(count)
        )
    state = server.broker.state
    if state.is_shared or state.leadership.is_clustered:
        raise InvalidConfigError(
            "several nodes",
            expected="a broker alone",
            found="one of a cluster or of a shared directory",
        )
    # A new number discards the former nodes with their chosen leaders.
    await server.forget_nodes()
    if count == 1:
        return
    first = state.node_id
    nodes = [AdvertisedNode(first, server.listeners)]
    for number in range(1, count):
        # A node has a port of its own, and no advertised address.
        target = [
            attrs.evolve(listener, port=0, advertised=None)
            for listener in server.listeners
        ]
        try:
            listeners = await server.listen_on_all(target)
        except BaseException:
            # The first node has the server's own ports, which remain open.
            for node in nodes[1:]:
                await server.close_node(node)
            raise
        nodes.append(AdvertisedNode(first + number, listeners))
    server.nodes = AdvertisedNodes(nodes)
    server.broker.advertise(server.nodes)


async def stop_node(server: Server, node_id: int) -> None:
    """Close the port and the connections of a node. Other nodes lead its partitions.

    Raises:
        InvalidConfigError: there is no such node, or no other one runs.
    """
    nodes = nodes_of(server)
    node = nodes.node(node_id)
    if nodes.running == [node]:
        raise InvalidConfigError("the last node that runs cannot stop", found=node_id)
    if node.is_running:
        before = _leaders(server)
        # Before the ports are closed, so that Metadata no longer names the node.
        node.is_running = False
        await server.close_node(node)
        await _begin_epochs(server, before)


async def start_node(server: Server, node_id: int) -> None:
    """Listen on the port of a node again. It leads its partitions again.

    Raises:
        InvalidConfigError: there is no such node.
        OSError: another program uses the port.
    """
    node = nodes_of(server).node(node_id)
    if not node.is_running:
        before = _leaders(server)
        # The ports are open before a client can read that the node leads again.
        await server.listen_on_all(node.listeners)
        node.is_running = True
        await _begin_epochs(server, before)


async def move_leader(server: Server, key: Key, node_id: int) -> None:
    """Let another node lead a partition, or coordinate if the topic is internal.

    Raises:
        InvalidConfigError: there is no such partition or node, or the node is stopped.
    """
    topic, number = key
    numbers = server.broker.state.logs.numbers_of(topic)
    if number not in numbers:
        raise InvalidConfigError(
            f"a partition of topic {topic!r}",
            expected=f"one of {list(numbers)}",
            found=repr(number),
        )
    before = _leaders(server)
    nodes_of(server).move_leader(key, node_id)
    await _begin_epochs(server, before)


def nodes_of(server: Server) -> AdvertisedNodes:
    """Return the nodes of a server.

    Raises:
        InvalidConfigError: it advertises only itself.
    """
    if server.nodes is None:
        raise InvalidConfigError(
            "the broker has one node", expected="several, by as_node_count()"
        )
    return server.nodes


def _leaders(server: Server) -> dict[Key, int]:
    """Return the leaders of all partitions."""
    state = server.broker.state
    nodes = nodes_of(server)
    return {
        (topic, number): nodes.leader((topic, number))
        for topic in state.logdir.topics()
        for number in state.logs.numbers_of(topic)
    }


async def _begin_epochs(server: Server, before: Mapping[Key, int]) -> None:
    """Begin a leader epoch of each partition whose leader has changed."""
    state = server.broker.state
    nodes = nodes_of(server)
    moved = [key for key, leader in before.items() if nodes.leader(key) != leader]

    def begin() -> None:
        for topic, number in moved:
            with contextlib.suppress(TopicNotFoundError):  # a client deleted it
                log = state.logdir.partition(topic, number)
                # Clients ignore metadata with an older leader epoch (KIP-320).
                log.begin_epoch(log.leader_epoch + 1)

    # In a thread, because an epoch is written to the disk.
    await server.loop.run_in_executor(None, begin)
    # Requests that wait at the former leader are answered, so that their clients move.
    state.fetches.wake(moved, server.now_ms())
