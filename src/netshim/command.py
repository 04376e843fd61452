"""The command line: `netshim serve DIR`.

Prints one line with the address once clients may connect; the log goes to standard
error, as text at a terminal and as JSON lines elsewhere. INT and TERM stop it cleanly;
a second one at once. Errors and exit codes are those of the command line of logcore.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import attrs
import click

import logcore
from logcore.cli.options import CommandGroup, config_option, fail, setting
from logcore.config import INT32_MAX
from logcore.errors import InvalidConfigError
from netshim.access_command import acl, quota, user
from netshim.follow_command import follow, promote_command
from netshim.listeners import CLIENT_CERTIFICATES, Listener, TlsSettings
from netshim.readiness import Readiness
from netshim.request_log import Repeated
from netshim.security.principals import MappingRules
from netshim.security.service import SecuritySettings
from netshim.server import Server, loop_factory
from netshim.settings import Settings


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "time_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            facts["error"] = self.formatException(record.exc_info)
        return json.dumps(facts)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(logcore.__version__, prog_name="netshim")
def main() -> None:
    """A Kafka broker over a directory of logs."""


for _command in (user, acl, quota, follow, promote_command):
    main.add_command(_command)


def _settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each field of Settings, with the words, range and default that
    stand there.
    """
    for field in reversed(attrs.fields(Settings)):
        option = "--" + field.name.replace("_", "-")
        doc = field.metadata["doc"]
        shape: dict[str, Any] = {"show_default": True, "metavar": "N"}
        shape["type"] = click.IntRange(*field.metadata.get("range", ()))
        if field.default == INT32_MAX:
            shape["show_default"] = "no limit"
        if isinstance(field.default, bool):
            option += "/--no-" + field.name.replace("_", "-")
            shape = {"show_default": True}
        elif "choices" in field.metadata:
            shape = {
                "show_default": True,
                "type": click.Choice(field.metadata["choices"]),
            }
        command = click.option(
            option, field.name, default=field.default, help=doc, **shape
        )(command)
    return command


@main.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=9092,
    show_default=True,
    help="Port to listen on; 0 for a free one.",
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Address to report to clients, if not the one that they use. With several listeners: NAME=HOST:PORT.",
    multiple=True,
)
@click.option(
    "--listener",
    "listeners",
    metavar="NAME://HOST:PORT",
    multiple=True,
    help="Address to listen on, instead of --host and --port; may be repeated. "
    "NAME is PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.",
)
@click.option(
    "--listener-protocol",
    "protocols",
    metavar="NAME=PROTOCOL",
    multiple=True,
    help="Protocol of a listener with a name of your own.",
)
@click.option("--tls-cert", help="PEM file of the certificate of TLS listeners.")
@click.option("--tls-key", help="PEM file of its key, if it is another file.")
@click.option(
    "--tls-client-ca", help="PEM file of the authorities of client certificates."
)
@click.option(
    "--tls-client",
    type=click.Choice(sorted(CLIENT_CERTIFICATES)),
    help="Whether clients present a certificate. Default: required with --tls-client-ca.",
)
@click.option(
    "--tls-principal-rules",
    default="DEFAULT",
    show_default=True,
    help="User names of client certificates, as Kafka's ssl.principal.mapping.rules.",
)
@click.option(
    "--sasl",
    default="SCRAM-SHA-256,SCRAM-SHA-512",
    show_default=True,
    help="Mechanisms of SASL listeners: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER.",
)
@click.option(
    "--reauthentication-ms",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Time after which clients authenticate again; 0 for never.",
)
@click.option("--oauth-jwks", help="Keys of bearer tokens: a file or an https URL.")
@click.option("--oauth-audience", help="Required audience of bearer tokens.")
@click.option("--oauth-issuer", help="Required issuer of bearer tokens.")
@click.option(
    "--oauth-claim",
    default="sub",
    show_default=True,
    help="Claim of bearer tokens that contains the user name.",
)
@click.option(
    "--super-user",
    "super_users",
    metavar="User:NAME",
    multiple=True,
    help="User that may do everything. May be repeated.",
)
@click.option(
    "--acls", is_flag=True, help="Allow only what access control lists allow."
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen outside of this machine without authentication.",
)
@click.option(
    "--durability",
    default="group",
    show_default=True,
    help="When an append counts as done: always, group, every(M), interval(MS) or os.",
)
@click.option(
    "--shared",
    is_flag=True,
    help="Let other processes write the directory too, with consumers in the same groups.",
)
@config_option
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Log level of standard error.",
)
@click.option(
    "--ready-fd",
    type=click.IntRange(3),
    metavar="N",
    help="Descriptor that gets the line `ready` when clients may connect.",
)
@_settings_options
def serve(
    directory: str,
    host: str,
    port: int,
    advertise: tuple[str, ...],
    listeners: tuple[str, ...],
    protocols: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
    tls_client: str | None,
    tls_principal_rules: str,
    sasl: str,
    reauthentication_ms: int,
    oauth_jwks: str | None,
    oauth_audience: str | None,
    oauth_issuer: str | None,
    oauth_claim: str,
    super_users: tuple[str, ...],
    acls: bool,
    insecure: bool,
    durability: str,
    shared: bool,
    configs: tuple[str, ...],
    log_level: str,
    ready_fd: int | None,
    **settings: Any,
) -> None:
    """Serve the log directory DIR to Kafka clients; it is made if it is not there.

    Prints its address once clients may connect. Ctrl-C or TERM stops it cleanly, a
    second one at once. --config sets what topics that do not set it themselves have.
    Sizes are in bytes, times in milliseconds.
    """
    handler = logging.StreamHandler()
    if not sys.stderr.isatty():
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(Repeated())
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    _lift_file_limit()
    # Requests leave no reference cycles, so the collector has little to find. Python's
    # own thresholds have it walk all objects of a large request again and again. With
    # higher ones than these, cycles that it does find hold the loop for longer: 60 ms
    # with 50,000, 7 ms with 10,000.
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000)
    try:
        server = Server(
            directory,
            listeners=_listeners(host, port, listeners, protocols, advertise),
            tls=_tls(tls_cert, tls_key, tls_client_ca, tls_client),
            security=SecuritySettings(
                mechanisms=tuple(one.strip() for one in sasl.split(",")),
                super_users=super_users,
                enforces_acls=acls,
                connections_max_reauth_ms=reauthentication_ms,
                principal_mapping=MappingRules.parse(tls_principal_rules),
                oauth_jwks=oauth_jwks,
                oauth_audience=oauth_audience,
                oauth_issuer=oauth_issuer,
                oauth_claim=oauth_claim,
            ),
            insecure=insecure,
            durability=durability,
            shared=shared,
            config=dict(map(setting, configs)),
            settings=Settings(**settings),
        )
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(server, Readiness(ready_fd)))
    except OSError as error:
        where = ", ".join(listeners) or f"{host}:{port}"
        fail(
            f"cannot listen on {where}: {error.strerror}",
            "choose another --port; 0 takes a free one",
        )


def _pairs(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """Return the values of NAME=VALUE texts by name."""
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise click.BadParameter(
                f"expected NAME=VALUE, found {text!r}", param_hint=f"'{option}'"
            )
        found[name.upper()] = value
    return found


def _listeners(
    host: str,
    port: int,
    texts: tuple[str, ...],
    protocols: tuple[str, ...],
    advertise: tuple[str, ...],
) -> list[Listener]:
    """Return the listeners that the options describe."""
    if not texts:
        if not host:
            raise InvalidConfigError(
                "host", expected="an address; 0.0.0.0 for all", found=repr(host)
            )
        address = None
        if advertise:
            address = _address(advertise[-1])
        return [Listener("PLAINTEXT", host, port, "PLAINTEXT", address)]
    kinds = _pairs(protocols, "--listener-protocol")
    addresses = _pairs(advertise, "--advertise")
    found = []
    for text in texts:
        name = text.partition("://")[0].upper()
        address = None
        if name in addresses:
            address = _address(addresses.pop(name))
        found.append(
            Listener.parse(text, protocol=kinds.pop(name, None), advertised=address)
        )
    for name in (*kinds, *addresses):
        raise InvalidConfigError(
            "the name of a listener",
            expected=" or ".join(one.name for one in found),
            found=repr(name),
        )
    return found


def _tls(
    cert: str | None, key: str | None, client_ca: str | None, client: str | None
) -> TlsSettings | None:
    """Return the TLS settings that the options describe."""
    if cert is None:
        if key or client_ca or client:
            raise InvalidConfigError("TLS", expected="--tls-cert", found="none")
        return None
    if client is None:
        client = "none"
        if client_ca is not None:
            client = "required"
    return TlsSettings(cert=cert, key=key, client_ca=client_ca, client=client)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise click.BadParameter(
            f"expected HOST:PORT, found {text!r}", param_hint="'--advertise'"
        )
    return host.strip("[]"), int(port)


async def _serve(server: Server, readiness: Readiness) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    drain = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            drain.set()
        stopping.set()

    def reload() -> None:
        try:
            server.reload_certificates()
        except InvalidConfigError as error:
            logging.getLogger("netshim").error(
                "the former certificate remains: %s", error
            )

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    await server.start()
    try:
        print(
            f"netshim: serving {server.logdir.path} at {server.bootstrap_servers}",
            flush=True,
        )
        readiness.ready()
        await stopping.wait()
        readiness.stopping()
        print("netshim: stopping", file=sys.stderr, flush=True)
    finally:
        ending = loop.create_task(server.stop())
        hurry = loop.create_task(drain.wait())
        await asyncio.wait({ending, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not ending.done():
            server.hurry()
        await ending


def _lift_file_limit() -> None:
    """As many files as the system allows: an open partition holds two, a client one,
    and the usual limit is 1,024.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
