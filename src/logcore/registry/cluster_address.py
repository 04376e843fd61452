"""The registry of a cluster, by its address: files, or a ZooKeeper server.

    check_cluster_address("zk://zoo1:2181,zoo2:2181/logcore")
    registry = open_cluster_registry(
        "zk://zoo1:2181,zoo2:2181/logcore", session_timeout_ms=6_000, fs=fs
    )

Rules:
- An address without `://` is the path of a registry of files, which works on one machine.
- In ZooKeeper, the value of `/cluster` marks a registry of this library. It is created
  before all other nodes, so a path that has nodes and no mark belongs to another program.
  Apache Kafka before version 4 has nodes of the same names.
"""

from __future__ import annotations

import re
from typing import Final

from logcore.errors import (
    InvalidConfigError,
    InvalidNodeError,
    NodeExistsError,
    NodeNotFoundError,
    UnsupportedRegistryError,
)
from logcore.fs import SharedFS
from logcore.registry.files import open_registry
from logcore.registry.protocol import Registry, split
from logcore.registry.zookeeper import connect

#: How an address in ZooKeeper begins.
ZOOKEEPER_SCHEME: Final = "zk://"
#: A name, an IPv4 address or a bracketed IPv6 address, with an optional port.
_SERVER: Final = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::([0-9]{1,5}))?")
_EXPECTED: Final = (
    "zk://HOST:PORT,.../PATH for ZooKeeper, or the path of files on one machine"
)
_MARK_PATH: Final = "/cluster"
_MARK: Final = b"logcore registry 1 of a cluster"
#: Limit for the connection to a server.
_CONNECT_TIMEOUT_MS: Final = 10_000


def check_cluster_address(address: str) -> None:
    """Check the form of an address.

    Raises:
        InvalidConfigError: the address has another form.
    """
    if "://" not in address:
        if not address:
            raise _invalid(address)
        return
    if not address.startswith(ZOOKEEPER_SCHEME):
        raise _invalid(address)
    servers, slash, below = address.removeprefix(ZOOKEEPER_SCHEME).partition("/")
    for server in servers.split(","):
        found = _SERVER.fullmatch(server)
        if found is None or not 0 < int(found[1] or 1) <= 65_535:
            raise _invalid(address)
    if slash and not below:
        return
    try:
        names = split(f"/{below}")
    except InvalidNodeError as error:
        raise _invalid(address) from error
    if {".", ".."} & {*names}:
        raise _invalid(address)


def _invalid(address: str) -> InvalidConfigError:
    return InvalidConfigError(
        "the registry of the cluster", expected=_EXPECTED, found=repr(address)[:200]
    )


def open_cluster_registry(
    address: str,
    *,
    session_timeout_ms: int,
    fs: SharedFS,
    lock_timeout_ms: int,
    create: bool = True,
) -> Registry:
    """Open the registry of a cluster, and create it if it does not exist.

    Without `create`, a path in ZooKeeper must have been created by a broker.

    Raises:
        InvalidConfigError: the address has another form, or has no cluster.
        MissingDependencyError: kazoo is not installed.
        RegistryUnavailableError: no ZooKeeper server answers.
        UnsupportedRegistryError: the path in ZooKeeper belongs to another program, or
            the files were created by another version.
        LogcoreError: the files cannot be opened; see open_registry().
    """
    check_cluster_address(address)
    if not address.startswith(ZOOKEEPER_SCHEME):
        return open_registry(
            address,
            topics="truth",
            max_poll_interval_ms=session_timeout_ms,
            lock_timeout_ms=lock_timeout_ms,
            fs=fs,
        )
    registry = connect(
        address.removeprefix(ZOOKEEPER_SCHEME),
        session_timeout_ms=session_timeout_ms,
        connect_timeout_ms=_CONNECT_TIMEOUT_MS,
    )
    try:
        _claim_path(registry, address, create=create)
    except BaseException:
        registry.close()
        raise
    return registry


def _claim_path(registry: Registry, address: str, *, create: bool) -> None:
    """Mark an empty path, or check the mark of another one."""
    found = _read_mark(registry)
    if found is None and set(registry.children("/")) - {_MARK_PATH[1:]}:
        # Another broker may have created the mark and further nodes since.
        found = _read_mark(registry) or b"none"
    if found is None and not create:
        raise InvalidConfigError(
            f"there is no cluster at {address}",
            expected="the --registry of a broker that was started before",
        )
    if found is None:
        try:
            registry.create(_MARK_PATH, _MARK)
            return
        except NodeExistsError:
            found = registry.get(_MARK_PATH).value
    if found != _MARK:
        raise UnsupportedRegistryError(
            f"{address} belongs to another program, such as Apache Kafka, or to another "
            "version; choose a path of its own, which is created",
            path=_MARK_PATH,
            expected=_MARK.decode(),
            found=repr(found)[:100],
        )


def _read_mark(registry: Registry) -> bytes | None:
    try:
        return registry.get(_MARK_PATH).value
    except NodeNotFoundError:
        return None
