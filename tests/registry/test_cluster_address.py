"""Addresses of the registry of a cluster, accepted and refused ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from logcore.errors import InvalidConfigError, MissingDependencyError
from logcore.fs import OS
from logcore.registry.cluster_address import (
    check_cluster_address,
    open_cluster_registry,
)
from netshim.command import main

GOOD = [
    "data/cluster",
    "/srv/cluster",
    "zk://zoo:2181/logcore",
    "zk://zoo1:2181,zoo2:2182,10.0.0.3/a/b",
    "zk://[::1]:2181/logcore",
    "zk://zoo",
    "zk://zoo/",
]
BAD = [
    "",
    "etcd://zoo:2181/logcore",
    "ZK://zoo:2181/logcore",
    "http://zoo",
    "zk://",
    "zk:///logcore",
    "zk://zoo:2181,/logcore",
    "zk://zoo:0/logcore",
    "zk://zoo:65536/logcore",
    "zk://zoo:port/logcore",
    "zk://zoo:2181/a//b",
    "zk://zoo:2181/logcore/",
    "zk://zoo:2181/../logcore",
    "zk://user@zoo:2181/logcore",
]


@pytest.mark.parametrize("address", GOOD)
def test_addresses_of_files_and_servers_are_accepted(address: str) -> None:
    check_cluster_address(address)


@pytest.mark.parametrize("address", BAD)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidConfigError, match="zk://HOST:PORT"):
        check_cluster_address(address)


@pytest.mark.parametrize("source", ["option", "file"])
def test_netshim_refuses_an_unknown_scheme(source: str, tmp_path: Path) -> None:
    directory = str(tmp_path / "1")
    command = ["serve", directory, "--registry", "etcd://zoo:2181", "--node-id", "1"]
    if source == "file":
        file = tmp_path / "netshim.toml"
        file.write_text(
            f'directory = "{directory}"\nregistry = "etcd://zoo:2181"\nnode_id = 1\n'
        )
        command = ["serve", "--config-file", str(file)]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 2
    assert "zk://HOST:PORT" in found.output and "etcd://zoo:2181" in found.output


def test_a_missing_client_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(MissingDependencyError, match=r"pip install.*zookeeper"):
        open_cluster_registry(
            "zk://127.0.0.1:1/logcore",
            session_timeout_ms=1_000,
            lock_timeout_ms=1_000,
            fs=OS,
        )
