"""Many partitions and connections on one broker."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import logcore
import netshim
from netshim import wire
from netshim.server import Server
from support.client import Client

#: More than the files that a process may open by default.
MANY = 2_000


def test_limits_of_each_connection_are_checked_in_turn(tmp_path: Path) -> None:
    """The checks of 2,000 connections in each tick occupied 12 % of a core."""
    server = Server(tmp_path)
    client_sockets: Any = set(range(MANY))
    server._connections.clients = client_sockets
    checked = [server._connections.next_checked() for _ in range(20)]
    assert [len(entry) for entry in checked] == [MANY // 20] * 20
    assert {
        client_socket for step in checked for client_socket in step
    } == client_sockets
    server._connections.clients = set()
    assert [server._connections.next_checked() for _ in range(2)] == [[], []]


def test_limits_of_few_connections_are_checked_in_each_tick(tmp_path: Path) -> None:
    server = Server(tmp_path)
    client_sockets: Any = {1, 2, 3}
    server._connections.clients = client_sockets
    assert [set(server._connections.next_checked()) for _ in range(3)] == [
        client_sockets
    ] * 3


@pytest.mark.slow
def test_many_connections_are_served(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "netshim", "serve", str(tmp_path / "data")]
    limits = ["--max-connections", "3000", "--max-connections-per-address", "3000"]
    with subprocess.Popen(
        [*command, "--port", "0", *limits], stdout=subprocess.PIPE, text=True
    ) as broker:
        assert broker.stdout is not None
        port = int(broker.stdout.readline().rpartition(":")[2])
        clients = [Client(port) for _ in range(MANY)]
        try:
            for _ in range(2):
                for client in clients:
                    client.ask(wire.API_VERSIONS, 0, wire.API_VERSIONS.Request())
        finally:
            for client in clients:
                client.close()
            broker.terminate()
    assert broker.returncode == 0


@pytest.mark.slow
def test_ten_thousand_partitions_are_listed(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topics({f"t{number}": (100, None) for number in range(100)})
    with (
        netshim.serve(tmp_path / "data") as server,
        closing(Client(server.port)) as client,
    ):
        request = wire.METADATA.Request(topics=None)
        response = client.ask(wire.METADATA, 9, request)
        assert sum(len(topic.partitions) for topic in response.topics) == 10_000
        assert len(server.logdir.host.open_logs()) == 0
