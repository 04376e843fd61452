"""The registry on a real ZooKeeper server passes the tests of the registry of files,
and so do its users, rules and quotas. Run by `make interop`. One Java process is the
server for all tests.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("kazoo")
from click.testing import CliRunner, Result

from logcore.errors import RegistryUnavailableError, SessionExpiredError
from logcore.fs import OS
from logcore.registry.cluster_address import open_cluster_registry
from logcore.registry.protocol import Node, Registry
from logcore.registry.zookeeper import connect
from netshim.command import main
from netshim.security.stored import SecurityStore
from support.registries import *  # noqa: F403
from support.registries import Registries, is_removed_soon
from support.security_stores import *  # noqa: F403
from support.security_stores import OpenStore
from support.zookeepers import ZooKeeper

pytestmark = pytest.mark.interop

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ZooKeeper(tmp_path_factory.mktemp("zookeeper") / "1") as zookeeper:
        zookeeper.await_start()
        yield zookeeper.server


@pytest.fixture
def registries(server: str) -> Iterator[Registries]:
    registries = []
    root_path = f"/test-{next(_numbers)}"

    def make() -> Registry:
        registry = connect(server + root_path)
        registries.append(registry)
        return registry

    yield make
    for registry in registries:
        registry.close()


@pytest.fixture
def open_store(server: str) -> Iterator[OpenStore]:
    root_path = f"/test-{next(_numbers)}"
    with contextlib.ExitStack() as stack:

        def open_one() -> SecurityStore:
            registry = connect(server + root_path)
            stack.callback(registry.close)
            store = SecurityStore.of_cluster(lambda: registry)
            stack.callback(store.close)
            return store

        yield open_one


def test_commands_change_the_users_of_a_cluster(server: str) -> None:
    address = f"zk://{server}/test-{next(_numbers)}"

    def netshim(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments], input="secret\nsecret\n")

    add = ("user", "add", address, "alice")
    refused = netshim(*add)
    assert refused.exit_code == 2
    assert "there is no cluster at zk://" in refused.stderr
    with open_cluster_registry(
        address, session_timeout_ms=10_000, lock_timeout_ms=10_000, fs=OS
    ) as registry:
        assert netshim(*add).exit_code == 0
        rule = ("acl", "add", address, "User:alice", "--consumer", "--topic", "t")
        assert netshim(*rule, "--group", "g").exit_code == 0
        security = SecurityStore.of_cluster(lambda: registry).load()
        assert list(security.users) == ["alice"]
        assert {acl.principal for acl in security.acls} == {"User:alice"}
        assert "alice" in netshim("user", "list", address).stdout


def test_expired_session_writes_no_node(server: str) -> None:
    """The server ends a session when another client with its id connects and
    disconnects.
    """
    from kazoo.client import KazooClient

    root_path = f"/test-{next(_numbers)}"
    with connect(server + root_path) as first, connect(server + root_path) as other:
        first.create("/e", b"one", ephemeral=True)
        first.create("/p", b"0")
        client_with_the_same_id = KazooClient(
            hosts=server, client_id=first._connection.client.client_id
        )
        client_with_the_same_id.start()
        client_with_the_same_id.stop()
        client_with_the_same_id.close()
        assert is_removed_soon(lambda: other.get("/e"))
        for _ in range(400):
            if first.session.state == "expired":
                break
            time.sleep(0.01)
        assert first.session.state == "expired"
        with pytest.raises(SessionExpiredError):
            first.set("/p", b"1")
        with pytest.raises(SessionExpiredError):
            first.create("/e", b"again", ephemeral=True)
        assert other.get("/p") == Node(b"0", 0)


def test_missing_server_raises_unavailable_error() -> None:
    with pytest.raises(RegistryUnavailableError):
        connect("127.0.0.1:1", connect_timeout_ms=300)


def test_node_of_the_server_is_hidden(server: str) -> None:
    with connect(server) as registry:
        assert "zookeeper" not in registry.children("/")
        registry.create("/zookeeper", b"test")
        assert "zookeeper" in registry.children("/")
        assert registry.get("/zookeeper").value == b"test"
        registry.delete("/zookeeper")
