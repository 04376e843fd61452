"""The command line: `netshim serve DIR`.

It prints one line with the address once clients may connect. The log is written to
standard error, as text at a terminal and as JSON lines elsewhere. INT and TERM stop the
broker cleanly, and a second signal stops it without a wait for clients. Errors and exit
codes are the same as in the `logcore` command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs
import click
from click.core import ParameterSource

import logcore
from logcore.cli.options import CommandGroup, config_option, fail, setting
from logcore.config import INT32_MAX
from logcore.errors import InvalidConfigError
from logcore.fs import FS, OS
from netshim.access_command import acl, quota, user
from netshim.cluster_command import cluster
from netshim.config_file import (
    ConfiguredTopic,
    FileSettings,
    OptionSpec,
    read_config_file,
)
from netshim.console_command import console as console_command
from netshim.follow_command import follow, promote_command
from netshim.http_command import HttpPages, files_for, health, http_options
from netshim.listeners import CLIENT_CERTIFICATES, Listener, TlsSettings
from netshim.readiness import Readiness
from netshim.reloading import changes_of
from netshim.replay_command import replay
from netshim.request_log import LOG_FIELDS, RepeatedLineFilter
from netshim.security.principals import MappingRules
from netshim.security.service import SecuritySettings
from netshim.server import Server, loop_factory
from netshim.settings import Settings

if TYPE_CHECKING:
    from netshim.cluster.node import ClusterSettings


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(getattr(record, LOG_FIELDS, None) or {}),
        }
        if record.exc_info:
            # A traceback in one JSON text, because each line of the log is one object.
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(logcore.__version__, prog_name="netshim")
def main() -> None:
    """A Kafka broker over a directory of logs."""


for _command in (
    user, acl, quota, follow, promote_command, cluster, health, replay, console_command,
):  # fmt: skip
    main.add_command(_command)


def _settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each field of Settings, with its description, range and default."""
    # click shows the options in the reverse order of their decorators.
    for field in reversed(attrs.fields(Settings)):
        option = "--" + field.name.replace("_", "-")
        doc = field.metadata["doc"]
        click_options: dict[str, Any] = {"show_default": True, "metavar": "N"}
        click_options["type"] = click.IntRange(*field.metadata.get("range", ()))
        # The help would show 2147483647.
        if field.default == INT32_MAX:
            click_options["show_default"] = "no limit"
        # A flag that is on by default needs a form that turns it off.
        if isinstance(field.default, bool):
            option += "/--no-" + field.name.replace("_", "-")
            click_options = {"show_default": True}
        elif "choices" in field.metadata:
            click_options = {
                "show_default": True,
                "type": click.Choice(field.metadata["choices"]),
            }
        command = click.option(
            option, field.name, default=field.default, help=doc, **click_options
        )(command)
    return command


#: Time after which a thread of the maintenance or of a page must let the event loop run.
#: The loop may wait that long after each system call, which is 5 ms by Python's default.
_SWITCH_S: Final = 0.0005
#: Key of the configuration file in the context of a command.
_FILE: Final = "netshim.config_file"


def _file_key(param: click.Parameter) -> str:
    """Return the name of an option or argument in a configuration file."""
    return param.opts[0].lstrip("-").replace("-", "_")


def _described(params: Sequence[click.Parameter]) -> list[click.Parameter]:
    """Return the parameters that a configuration file may set with one key."""
    # The file has tables for settings of topics, and cannot name another file.
    others = ("config", "config_file", "all")
    return [param for param in params if _file_key(param) not in others]


def _option_spec(option: click.Option) -> OptionSpec:
    """Describe the values of an option for the reader of configuration files."""
    type_ = option.type
    if isinstance(type_, click.IntRange):
        return OptionSpec(int, low=type_.min, high=type_.max)
    if isinstance(type_, click.Choice):
        return OptionSpec(str, choices=tuple(map(str, type_.choices)))
    if option.is_flag:
        return OptionSpec(bool)
    return OptionSpec(str, is_list=option.multiple)


def _file_options() -> dict[str, click.Option]:
    """Return the options that a configuration file may set, by name."""
    return {
        _file_key(option): option
        for option in _described(serve.params)
        # The argument DIR is the key `directory`, which the reader handles.
        if isinstance(option, click.Option)
    }


def _read_file(ctx: click.Context, _: click.Parameter, path: str | None) -> None:
    """Use the values of a configuration file as the defaults of the other options."""
    if path is None:
        return
    options = _file_options()
    file = read_config_file(
        path, {key: _option_spec(option) for key, option in options.items()}
    )
    # Read by _file_of(). The command itself gets only the values.
    ctx.meta[_FILE] = file
    defaults = {options[key].name: value for key, value in file.options.items()}
    if file.directory is not None:
        defaults["directory"] = file.directory
    # Options of the command line and the environment have priority over defaults.
    ctx.default_map = defaults


def _file_of(ctx: click.Context) -> FileSettings:
    """Return the configuration file of a command, or an empty one."""
    file: FileSettings = ctx.meta.get(_FILE, FileSettings(""))
    return file


class _Reloader:
    """Applies changes of the certificates and the configuration file."""

    def __init__(self, ctx: click.Context, server: Server) -> None:
        self._server = server
        self._file = _file_of(ctx)
        #: Options that the file cannot set.
        self._fixed = {
            _file_key(param)
            for param in ctx.command.params
            if ctx.get_parameter_source(param.name or "")
            in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
        }
        #: The reload in progress. The loop itself keeps no reference to a task.
        self._task: asyncio.Task[None] | None = None

    @property
    def has_files(self) -> bool:
        """Whether reload() has a file to read."""
        return bool(self._file.path) or self._server.tls_settings is not None

    def reload(self) -> None:
        """Begin to reload, unless it is in progress. For the event loop's thread.

        A broker that is starting or stopping ignores it.
        """
        # Two signals may arrive in quick succession.
        is_free = self._task is None or self._task.done()
        if is_free and self._server.is_serving:
            self._task = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        log = logging.getLogger("netshim")
        server = self._server
        # Step 1: read the certificates again.
        try:
            server.reload_certificates()
        except InvalidConfigError as error:
            log.error("the former certificate remains: %s", error)
        if not self._file.path:
            return
        loop = asyncio.get_running_loop()
        # Step 2: read the file in a thread, and compare it with the settings in use.
        option_specs = {
            key: _option_spec(option) for key, option in _file_options().items()
        }
        try:
            file = await loop.run_in_executor(
                None, read_config_file, self._file.path, option_specs
            )
            changes = changes_of(self._file, file, self._fixed)
            # Step 3: create new topics. Existing topics are not changed.
            for topic in changes.topics:
                await loop.run_in_executor(None, _ensure_topic, server, topic)
        except (logcore.LogcoreError, OSError) as error:
            log.error("the former settings remain: %s", error)
            return
        # Step 4: use the settings. Only now, so that an invalid file changes nothing.
        server.use_settings(changes.settings)
        self._file = changes.applied
        new = {
            **changes.settings,
            **{f"topics.{topic.name}": "created" for topic in changes.topics},
        }
        if changes.log_level is not None:
            logging.getLogger().setLevel(changes.log_level.upper())
            new["log_level"] = changes.log_level
        log.info(
            "%s was read again: %s",
            file.path,
            ", ".join(f"{key} = {value}" for key, value in new.items()) or "no changes",
        )
        # Step 5: report the options that take effect later.
        for key in changes.need_restart:
            log.warning("%s: %s takes effect at the next start", file.path, key)


#: The options of `serve` and `check`, except for those of Settings.
_SERVE_OPTIONS: Final = (
    click.argument("directory", metavar="DIR", type=click.Path(file_okay=False)),
    click.option(
        "--config-file",
        metavar="FILE",
        type=click.Path(dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help="TOML file with options: `port = 9092`, and with topics to create.",
    ),
    click.option(
        "--host", default="127.0.0.1", show_default=True, help="Address to listen on."
    ),
    click.option(
        "--port",
        type=click.IntRange(0, 65_535),
        default=9092,
        show_default=True,
        help="Port to listen on; 0 for a free one.",
    ),
    click.option(
        "--advertise",
        metavar="HOST:PORT",
        help="Address to report to clients, if not the one that they use. With several listeners: NAME=HOST:PORT.",
        multiple=True,
    ),
    click.option(
        "--listener",
        "listeners",
        metavar="NAME://HOST:PORT",
        multiple=True,
        help="Address to listen on, instead of --host and --port; may be repeated. "
        "NAME is PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.",
    ),
    click.option(
        "--listener-protocol",
        "protocols",
        metavar="NAME=PROTOCOL",
        multiple=True,
        help="Protocol of a listener with a name of your own.",
    ),
    click.option("--tls-cert", help="PEM file of the certificate of TLS listeners."),
    click.option("--tls-key", help="PEM file of its key, if it is another file."),
    click.option(
        "--tls-client-ca", help="PEM file of the authorities of client certificates."
    ),
    click.option(
        "--tls-client",
        type=click.Choice(sorted(CLIENT_CERTIFICATES)),
        help="Whether clients present a certificate. Default: required with --tls-client-ca.",
    ),
    click.option(
        "--tls-principal-rules",
        default="DEFAULT",
        show_default=True,
        help="User names of client certificates, as Kafka's ssl.principal.mapping.rules.",
    ),
    click.option(
        "--sasl",
        default="SCRAM-SHA-256,SCRAM-SHA-512",
        show_default=True,
        help="Mechanisms of SASL listeners: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER.",
    ),
    click.option(
        "--reauthentication-ms",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Time after which clients authenticate again; 0 for never.",
    ),
    click.option("--oauth-jwks", help="Keys of bearer tokens: a file or an https URL."),
    click.option("--oauth-audience", help="Required audience of bearer tokens."),
    click.option("--oauth-issuer", help="Required issuer of bearer tokens."),
    click.option(
        "--oauth-claim",
        default="sub",
        show_default=True,
        help="Claim of bearer tokens that contains the user name.",
    ),
    click.option(
        "--super-user",
        "super_users",
        metavar="User:NAME",
        multiple=True,
        help="User that may do everything. May be repeated.",
    ),
    click.option(
        "--acls", is_flag=True, help="Allow only what access control lists allow."
    ),
    click.option(
        "--insecure",
        is_flag=True,
        help="Listen outside of this machine without authentication.",
    ),
    click.option(
        "--durability",
        default="group",
        show_default=True,
        help="When an append counts as done: always, group, every(M), interval(MS) or os.",
    ),
    click.option(
        "--shared",
        is_flag=True,
        help="Let other processes write the directory too, with consumers in the same groups.",
    ),
    click.option(
        "--registry",
        metavar="PATH|zk://HOST:PORT/PATH",
        help="Join the cluster whose registry is PATH.registry, a directory that all its brokers use, or a path of "
        "ZooKeeper servers.",
    ),
    click.option(
        "--node-id",
        type=click.IntRange(0, INT32_MAX),
        metavar="N",
        help="Number of this broker in the cluster.",
    ),
    click.option("--rack", help="Rack of this broker, for the placement of replicas."),
    click.option(
        "--inter-broker-listener",
        metavar="NAME",
        help="Listener that the other brokers of the cluster use. Default: the first one.",
    ),
    click.option(
        "--tls-ca",
        help="PEM file of the authorities of the other brokers' certificates. Default: --tls-cert.",
    ),
    config_option,
)


def _server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a server, in the order of the help."""
    command = _settings_options(command)
    for option in reversed(_SERVE_OPTIONS):
        command = option(command)
    return command


def _fields(type_: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of a class."""
    # The other options are left unread: a test finds an option that nothing reads.
    return {name: options[name] for name in attrs.fields_dict(type_) if name in options}


def _new_server(file: FileSettings, options: Mapping[str, Any], fs: FS = OS) -> Server:
    """Return the server that the options describe. It is not started."""
    return Server(
        options["directory"],
        listeners=_listeners(options),
        tls=_tls(options),
        security=SecuritySettings(
            mechanisms=tuple(
                mechanism.strip() for mechanism in options["sasl"].split(",")
            ),
            enforces_acls=options["acls"],
            connections_max_reauth_ms=options["reauthentication_ms"],
            principal_mapping=MappingRules.parse(options["tls_principal_rules"]),
            **_fields(SecuritySettings, options),
        ),
        insecure=options["insecure"],
        durability=options["durability"],
        shared=options["shared"],
        cluster=_cluster(options),
        config=_topic_config(file, options["configs"]),
        settings=Settings(**_fields(Settings, options)),
        fs=fs,
    )


def _new_pages(
    server: Server, file: FileSettings, options: Mapping[str, Any]
) -> HttpPages:
    """Return the pages that the options describe. They are not started."""
    return HttpPages(
        tls=server.tls_settings,
        config=_topic_config(file, options["configs"]),
        **_fields(HttpPages, options),
    )


def _cluster(options: Mapping[str, Any]) -> ClusterSettings | None:
    """Return the settings of a broker in a cluster, or None."""
    if options["registry"] is None:
        names = ("node_id", "rack", "inter_broker_listener", "tls_ca")
        # A broker that was meant for a cluster must not start alone.
        if any(options[name] is not None for name in names):
            raise InvalidConfigError(
                "--node-id, --rack, --inter-broker-listener and --tls-ca are for a cluster",
                expected="--registry",
                found="none",
            )
        return None
    if options["node_id"] is None:
        raise InvalidConfigError("--registry", expected="--node-id", found="none")
    from netshim.cluster.node import ClusterSettings

    return ClusterSettings(**_fields(ClusterSettings, options))


def _topic_config(file: FileSettings, texts: tuple[str, ...]) -> dict[str, str]:
    """Return the default settings of topics. Options have priority over the file."""
    return {**file.config, **dict(map(setting, texts))}


@main.command()
@_server_options
@http_options
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Log level of standard error.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    help="Format of standard error. Default: text at a terminal, JSON elsewhere.",
)
@click.option(
    "--ready-fd",
    type=click.IntRange(3),
    metavar="N",
    help="Descriptor that gets the line `ready` when clients may connect.",
)
@click.option(
    "--record",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Record all requests and responses to this new file, for `netshim replay`.",
)
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    log_level: str,
    log_format: str | None,
    ready_fd: int | None,
    record: str | None,
    **options: Any,
) -> None:
    """Serve the log directory DIR to Kafka clients; it is created if it does not exist.

    Prints its address once clients may connect. Ctrl-C or TERM stops it cleanly, a
    second one at once. --config sets defaults of topics.
    Sizes are in bytes, times in milliseconds. Each option may also be set in a file,
    see --config-file, or by an environment variable such as NETSHIM_PORT.
    """
    # Step 1: set up the log.
    handler = logging.StreamHandler()
    if log_format is None:
        log_format = "text" if sys.stderr.isatty() else "json"
    if log_format == "json":
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(RepeatedLineFilter())
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    # Step 2: adapt the limits of the process.
    _lift_file_limit()
    # Requests leave no reference cycles, so the cycle collector has little to find. With
    # Python's own thresholds, it would visit all objects of a large request repeatedly.
    # With higher thresholds than these, the cycles that it does find occupy the event
    # loop for longer: 60 ms with 50,000, and 7 ms with 10,000.
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000)
    sys.setswitchinterval(_SWITCH_S)
    # Step 3: serve until a signal arrives.
    try:
        file = _file_of(ctx)
        server = _new_server(file, options, files_for(options["control"]))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            pages = _new_pages(server, file, options)
            reloader = _Reloader(ctx, server)
            runner.run(
                _serve(
                    server, Readiness(ready_fd), file.topics, pages, reloader, record
                )
            )
    except OSError as error:
        _fail_to_listen(error, options)


def _fail_to_listen(error: OSError, options: Mapping[str, Any]) -> NoReturn:
    """Report that a listener's address is not available."""
    addresses = (
        ", ".join(options["listeners"]) or f"{options['host']}:{options['port']}"
    )
    fail(
        f"cannot listen on {addresses}: {error.strerror}",
        "choose another --port; 0 takes a free one",
    )


def _pairs(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """Return the values of NAME=VALUE texts by name."""
    pairs = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name or not value:
            raise click.BadParameter(
                f"expected NAME=VALUE, found {text!r}", param_hint=f"'{option}'"
            )
        pairs[name.upper()] = value
    return pairs


def _listeners(options: Mapping[str, Any]) -> list[Listener]:
    """Return the listeners that the options describe."""
    texts = options["listeners"]
    advertise = options["advertise"]
    if not texts:
        host = options["host"]
        if not host:
            raise InvalidConfigError(
                "host", expected="an address; 0.0.0.0 for all", found=repr(host)
            )
        address = None
        if advertise:
            address = _address(advertise[-1])
        # A single listener, so the last --advertise has priority over earlier ones.
        return [Listener("PLAINTEXT", host, options["port"], "PLAINTEXT", address)]
    kinds = _pairs(options["protocols"], "--listener-protocol")
    addresses = _pairs(advertise, "--advertise")
    listeners = []
    for text in texts:
        name = text.partition("://")[0].upper()
        address = None
        if name in addresses:
            address = _address(addresses.pop(name))
        listeners.append(
            Listener.parse(text, protocol=kinds.pop(name, None), advertised=address)
        )
    # Names that no listener has taken. A misspelled name must not be ignored.
    for name in (*kinds, *addresses):
        raise InvalidConfigError(
            "the name of a listener",
            expected=" or ".join(listener.name for listener in listeners),
            found=repr(name),
        )
    return listeners


def _tls(options: Mapping[str, Any]) -> TlsSettings | None:
    """Return the TLS settings that the options describe."""
    cert, key, client_ca, client = (
        options[f"tls_{name}"] for name in ("cert", "key", "client_ca", "client")
    )
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


async def _serve(
    server: Server,
    readiness: Readiness,
    topics: Sequence[ConfiguredTopic],
    pages: HttpPages,
    reloader: _Reloader,
    recording: str | None,
) -> None:
    # Before the broker, so that /health and /ready report a start that takes long.
    pages.start(server, asyncio.get_running_loop())
    try:
        await _serve_clients(server, readiness, topics, pages.urls, reloader, recording)
    finally:
        await pages.stop()


async def _serve_clients(
    server: Server,
    readiness: Readiness,
    topics: Sequence[ConfiguredTopic],
    urls: Mapping[str, str],
    reloader: _Reloader,
    recording: str | None,
) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    drain = asyncio.Event()

    def stop() -> None:
        # The second signal ends the wait for clients.
        if stopping.is_set():
            drain.set()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if reloader.has_files:
        loop.add_signal_handler(signal.SIGHUP, reloader.reload)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # The terminal was closed, and the broker was not started by nohup.
        loop.add_signal_handler(signal.SIGHUP, stop)
    await server.start()
    try:
        if recording is not None:
            # The file is created only if the broker has started.
            from netshim.recording.recorder import TrafficRecorder

            server.record(TrafficRecorder(recording, fs=server.files))
        # Before the address is printed, so that clients find the topics.
        for topic in topics:
            await loop.run_in_executor(None, partial(_ensure_topic, server, topic))
        print(
            f"netshim: serving {server.logdir.path} at {server.bootstrap_servers}",
            flush=True,
        )
        for name, url in urls.items():
            print(f"netshim: {name} {url}", flush=True)
        readiness.ready()
        tasks = [loop.create_task(event.wait()) for event in (stopping, server.failed)]
        # `failed` is set if a log of a cluster's broker has failed.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        readiness.stopping()
        print("netshim: stopping", file=sys.stderr, flush=True)
    finally:
        # The stop waits for clients until a second signal arrives.
        stopping_task = loop.create_task(server.stop())
        drain_task = loop.create_task(drain.wait())
        await asyncio.wait(
            {stopping_task, drain_task}, return_when=asyncio.FIRST_COMPLETED
        )
        drain_task.cancel()
        if not stopping_task.done():
            server.stop_draining()
        await stopping_task
    if server.failure is not None:
        raise server.failure


def _ensure_topic(server: Server, topic: ConfiguredTopic) -> None:
    """Create a topic of the configuration file, unless it exists."""
    if not server.logdir.create_topic(
        topic.name, topic.partitions, topic.config, exist_ok=True
    ):
        count = len(server.logdir.partitions(topic.name))
        if count != topic.partitions:
            logging.getLogger("netshim").warning(
                "topic %s exists with %d partitions; the configuration file has %d",
                topic.name,
                count,
                topic.partitions,
            )


def _lift_file_limit() -> None:
    """Raise the limit of open files to the maximum that the system allows.

    An open partition needs up to three files and a client one, and the usual limit is
    1,024.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- check -----------------------------------------------------------------------------


@main.command()
@_server_options
@click.option("--all", "shows_all", is_flag=True, help="Print defaults too.")
@click.pass_context
def check(ctx: click.Context, /, shows_all: bool, **options: Any) -> None:
    """Check the options and the directory of `serve`, and start nothing.

    Prints the options that `serve` would use, as a configuration file, each with the
    place that sets it.
    """
    file = _file_of(ctx)
    for param in _described(check.params):
        name = param.name or ""
        source = ctx.get_parameter_source(name) or ParameterSource.DEFAULT
        value = ctx.params[name]
        if value is not None and (shows_all or source is not ParameterSource.DEFAULT):
            key = _file_key(param)
            click.echo(
                f"{key} = {_toml(value)}  # {_setting_source(file, source, key)}"
            )
    server = _new_server(file, options)
    _print_table("config", _topic_config(file, options["configs"]))
    for topic in file.topics:
        table = {"partitions": topic.partitions, **topic.config}
        _print_table(f"topics.{_toml(topic.name)}", table)
    # To standard error, because standard output is a configuration file.
    click.echo(f"# {_directory_summary(server)}", err=True)
    try:
        server.check()
    except OSError as error:
        _fail_to_listen(error, options)


def _print_table(name: str, values: Mapping[str, Any]) -> None:
    """Print a table of a configuration file, unless it is empty."""
    if values:
        click.echo(f"\n[{name}]")
        for key, value in values.items():
            click.echo(f"{_toml(key)} = {_toml(value)}")


def _toml(value: Any) -> str:
    """Return a value of an option in the syntax of TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON would escape characters above U+FFFF as two surrogates, which TOML refuses.
    return json.dumps(value, ensure_ascii=False)


def _setting_source(file: FileSettings, source: ParameterSource, key: str) -> str:
    """Return the place that sets an option."""
    if source is ParameterSource.DEFAULT_MAP:
        return f"{file.path}, line {file.lines[key]}"
    if source is ParameterSource.ENVIRONMENT:
        return f"NETSHIM_{key.upper()}"
    return "command line" if source is ParameterSource.COMMANDLINE else "default"


def _directory_summary(server: Server) -> str:
    """Return a line about the log directory.

    Raises:
        LogcoreError: the directory is damaged.
    """
    if not os.path.exists(server.path):
        return f"{server.path} does not exist, and is created by serve"
    with logcore.open_dir(server.path, read_only=True) as logdir:
        topics = logdir.topics()
        count = sum(len(logdir.partitions(name)) for name in topics)
    return f"{server.path}: {len(topics)} topics with {count} partitions"


# Both commands read the same environment variables.
for _param in (*serve.params, *check.params):
    _param.envvar = f"NETSHIM_{_file_key(_param).upper()}"
