"""Options of `netshim serve` for pages over HTTP, and the command `netshim health`.

The pages are imported only if an option asks for them; they need the extra `http`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from logcore.distribution import install_command
from logcore.errors import InvalidConfigError, ResourceError
from logcore.fs import FS, OS
from netshim.request_counts import RequestCounts
from netshim.server import Server

if TYPE_CHECKING:
    from netshim.http.host import HttpHost
    from netshim.listeners import TlsSettings
    from netshim.security.stored import SecuritySnapshot
    from netshim.server_thread import ServerHandle

#: Longest time of a health check. Container runtimes wait 30 s by default.
_HEALTH_S: Final = 5.0

#: Hosts of this machine.
LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "::1"))
#: Minimum number of characters of a token.
_MIN_TOKEN: Final = 16

_OPTIONS: Final = (
    click.option(
        "--metrics",
        metavar="[HOST:]PORT",
        help="Publish metrics for Prometheus, /health and /ready over HTTP. The host is 127.0.0.1 by default.",
    ),
    click.option(
        "--console",
        metavar="[HOST:]PORT",
        help="Show the directory and the broker in a browser. Outside of this machine, it needs --tls-cert and users.",
    ),
    click.option(
        "--console-login",
        is_flag=True,
        help="Require a login for the console on this machine too, as with --acls.",
    ),
    click.option(
        "--console-write",
        is_flag=True,
        help="Allow changes in the console: reset offsets, abort transactions, delete topics and records.",
    ),
    click.option(
        "--control",
        metavar="[HOST:]PORT",
        help="Let tests control the broker over HTTP: faults, waits and records. Prints the URL with a token.",
    ),
    click.option(
        "--control-token-file",
        metavar="FILE",
        help="File with the token of the control API. Outside of this machine, it is required, and --tls-cert.",
    ),
    click.option(
        "--schema-registry",
        metavar="[HOST:]PORT",
        help="Serve a schema registry over the topic _schemas. Outside of this machine, it requires --insecure.",
    ),
)


def http_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options, in the order of the help."""
    # click shows the options in the reverse order of their decorators.
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def files_for(control: str | None) -> FS:
    """Return the files of a broker.

    With a control API, tests control failures and the clock.
    """
    if control is None:
        return OS
    # Imported late: a broker without --control does not need the test kit.
    from netshim.testing import VirtualFiles

    return VirtualFiles()


@attrs.define(kw_only=True)
class HttpPages:
    """The pages of one `netshim serve`. Fields without a comment are its options."""

    metrics: str | None = None
    console: str | None = None
    control: str | None = None
    control_token_file: str | None = None
    schema_registry: str | None = None
    insecure: bool = False
    tls: TlsSettings | None = None
    #: The default settings of topics.
    config: Mapping[str, str] = attrs.Factory(dict)
    console_login: bool = False
    console_write: bool = False
    acls: bool = False
    super_users: tuple[str, ...] = ()
    _host: HttpHost | None = attrs.field(init=False, default=None)
    #: URLs of the pages by the name of their option, printed after the start line.
    urls: dict[str, str] = attrs.field(init=False, factory=dict)

    def start(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the ports and serve the pages, before the broker starts.

        Raises:
            InvalidConfigError: an address is invalid, or the extra `http` is missing.
            OSError: an address is not available.
        """
        # The option would have no effect, which may be a mistake.
        if self.control is None and self.control_token_file is not None:
            raise InvalidConfigError(
                "--control-token-file", expected="--control", found="none"
            )
        pages = (self.metrics, self.console, self.control, self.schema_registry)
        # The packages of the extra `http` are not needed.
        if all(page is None for page in pages):
            return
        try:
            from netshim.http.control import ControlApi
            from netshim.http.host import HttpHost, application, bind
            from netshim.http.pages import operation_routes
        except ImportError as error:
            raise InvalidConfigError(
                "--metrics, --console, --control and --schema-registry need packages that are not installed",
                expected="pip install 'logcore-db[http]'",
                found=str(error),
            ) from error
        from netshim.server_thread import ServerHandle

        # Pages call the broker through this object, in the broker's event loop.
        handle = ServerHandle(server, loop)
        self._host = HttpHost()
        if self.metrics is not None:
            # Before the broker starts, so that all requests are counted.
            server.counts = RequestCounts()
            routes = operation_routes(server)
            with bind("--metrics", self.metrics) as address:
                self.urls["metrics"] = self._host.add(address, application(routes))
        if self.control is not None:
            with bind("--control", self.control) as address:
                control = ControlApi(handle, self._token(address[0]))
                # Test programs of this machine need no certificate.
                tls = None if address[0] in LOOPBACK else self.tls
                url = self._host.add(address, application(control.routes()), tls)
            self.urls["control"] = url
            if self.control_token_file is None:
                # A token from a file is a secret, so it is not printed.
                self.urls["control"] += f" token {control.token}"
        if self.schema_registry is not None:
            from netshim.schemas.hosting import add_registry

            self.urls["schema registry"] = add_registry(
                self._host,
                server,
                "--schema-registry",
                self.schema_registry,
                is_open=self.insecure,
            )
        if self.console is not None:
            self._add_console(handle, self._host, self.console)
        # All ports are bound before the first page is served.
        self._host.start()

    def _add_console(self, handle: ServerHandle, host: HttpHost, text: str) -> None:
        """Bind the port of the console."""
        try:
            from netshim.console.broker import broker_data_reader, groups_reader
            from netshim.console.broker_changes import BrokerChanges
            from netshim.console.directory import DirectoryView
            from netshim.console.hosting import ConsoleSecurity
            from netshim.console.pages import add_console
        except ImportError as error:
            raise missing_packages(error) from error
        from netshim.http.host import bind

        server = handle.server
        # The page of the broker shows the counts of requests.
        if server.counts is None:
            server.counts = RequestCounts()

        def read_snapshot() -> SecuritySnapshot:
            # Without the users, a login could not be checked.
            if not handle.is_running:
                raise ResourceError("the broker is starting or stopping")
            return server.security.snapshot

        with bind("--console", text) as address:
            is_local = address[0] in LOOPBACK
            security = ConsoleSecurity(
                tls=None if is_local else self.tls,
                login=self.console_login,
                acls=self.acls,
                super_users=self.super_users,
            )
            view = DirectoryView(
                server.path,
                config=self.config,
                broker=broker_data_reader(handle),
                live_groups=groups_reader(handle),
                access=security.access("--console", address[0], read_snapshot),
                changes=BrokerChanges(handle) if self.console_write else None,
            )
            if view.access.needs_login and server.is_clustered:
                raise InvalidConfigError(
                    "--console with a login is not supported in a cluster yet",
                    expected="127.0.0.1 without --console-login",
                    found=address[0],
                )
            self.urls["console"] = add_console(host, address, view, security.tls)

    def _token(self, host: str) -> str:
        """Return the token of the control API, or "" for a new one.

        Raises:
            InvalidConfigError: a network could reach the control API, or the file is
                unusable.
        """
        if host not in LOOPBACK and (
            self.tls is None or self.control_token_file is None
        ):
            raise InvalidConfigError(
                "--control outside of this machine",
                expected="--tls-cert and --control-token-file",
                found=host,
            )
        if self.control_token_file is None:
            return ""
        try:
            with open(self.control_token_file, encoding="ascii") as file:
                # A limit, in case the option names a large file by mistake.
                token = file.read(1_000).strip()
        except (OSError, ValueError) as error:
            raise InvalidConfigError(f"--control-token-file: {error}") from error
        if len(token) < _MIN_TOKEN:
            raise InvalidConfigError(
                "--control-token-file",
                expected=f"at least {_MIN_TOKEN} characters",
                found=len(token),
            )
        return token

    async def stop(self) -> None:
        """Close the ports, while the broker's event loop answers the last pages."""
        if self._host is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._host.stop)


def missing_packages(error: ImportError) -> InvalidConfigError:
    """Return the error for a console whose packages are not installed."""
    return InvalidConfigError(
        "the console needs packages that are not installed",
        expected=install_command("console"),
        found=str(error),
    )


@click.command()
@click.argument("address", metavar="[HOST:]PORT")
def health(address: str) -> None:
    """Check a broker that serves --metrics at this address, for supervisors.

    The exit code is 0 if the broker is ready. Otherwise it is 1, as containers expect,
    and the reasons are printed.
    """
    import http.client

    # ":9090" has a separator without a host, which is refused.
    host, separator, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536 or (separator and not host):
        raise click.BadParameter(
            f"expected PORT or HOST:PORT, found {address!r}", param_hint="'ADDRESS'"
        )
    connection = http.client.HTTPConnection(
        (host or "127.0.0.1").strip("[]"), int(port), timeout=_HEALTH_S
    )
    try:
        connection.request("GET", "/ready")
        response = json.loads(connection.getresponse().read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        reasons = [
            f"{address} does not answer; is it the address of --metrics? {error}"
        ]
    else:
        reasons = response.get("reasons", [])
    finally:
        connection.close()
    for reason in reasons:
        click.echo(f"not ready: {reason}", err=True)
    if reasons:
        raise click.exceptions.Exit(1)
    click.echo("ready")
