"""Binds the port of a schema registry."""

from __future__ import annotations

from logcore.distribution import install_command
from logcore.errors import InvalidConfigError
from netshim.http.host import LOOPBACK, HttpHost, bind
from netshim.schemas.routes import SchemaRegistry
from netshim.schemas.store import SchemaStore, missing_packages
from netshim.server import Server


def add_registry(
    host: HttpHost, server: Server, option: str, text: str, *, is_open: bool
) -> str:
    """Add a schema registry to a host, and return its URL.

    `option` and `text` are the name and the value of the option, [HOST:]PORT. `is_open`
    allows an address outside of this machine. The broker may start later.

    Raises:
        InvalidConfigError: the address is invalid, not available or not allowed, a
            package is missing, or the broker is in a cluster.
    """
    missing = missing_packages()
    if missing:
        raise InvalidConfigError(
            f"{option} needs packages that are not installed",
            expected=install_command("http,schemas"),
            found=f"no {', '.join(missing)}",
        )
    # The store appends to the log of this broker, which need not lead the partition.
    if server.is_clustered:
        raise InvalidConfigError(
            f"{option} is not supported in a cluster yet",
            expected="a broker without --registry",
        )
    with bind(option, text) as address:
        is_local = address[0] in LOOPBACK
        if not is_local and not is_open:
            raise InvalidConfigError(
                f"{option} outside of this machine, without authentication",
                expected="--insecure",
                found=address[0],
            )
        # From other machines, the registry may be reached by any host name.
        registry = SchemaRegistry(SchemaStore(server), checks_hosts=is_local)
        return host.add(address, registry)
