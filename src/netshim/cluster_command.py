"""`netshim cluster DIR`: several brokers on one machine, one process each.

    DIR/1, DIR/2, DIR/3        the log directories
    DIR/cluster.registry       the registry

The command starts the brokers, prints their addresses, and waits. Ctrl-C or TERM stops
them. If a broker ends, the command prints that, and the command line that starts the
broker again. A broker that was stopped by a signal during a change of the registry is
killed, because nothing else releases its lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Final

import click

from logcore.errors import InvalidConfigError
from logcore.registry import registry_path
from netshim.settings import Settings

#: Maximum time for a broker to end after TERM. Its controlled shutdown is shorter.
_END_S: Final = 40.0
#: From this number of brokers on, a topic has three replicas, two of them in sync.
_REPLICATED_FROM: Final = 3


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@click.option(
    "--nodes",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Number of brokers.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=9092,
    show_default=True,
    help="Port of the first broker; the others use the next ones. 0 for free ports.",
)
@click.option(
    "--listener",
    "listeners",
    metavar="NAME://HOST:PORT",
    multiple=True,
    help="Address of the first broker, as for `netshim serve`, instead of --port; may be "
    "repeated. The others use the next ports.",
)
@click.option(
    "--advertise",
    "advertised",
    metavar="NAME=HOST:PORT",
    multiple=True,
    help="Address of the first broker for clients of a listener. The others have the next "
    "ports.",
)
@click.pass_context
def cluster(
    ctx: click.Context,
    directory: str,
    nodes: int,
    port: int,
    listeners: tuple[str, ...],
    advertised: tuple[str, ...],
) -> None:
    """Serve a cluster of several brokers on this machine, below the directory DIR.

    Each broker is a process of its own. All other options are passed to `netshim serve`.
    With three brokers or more, topics have three replicas by default, of which two must
    be in sync for acks=all.
    """
    os.makedirs(directory, exist_ok=True)
    # Options of `netshim serve`, which click does not parse here.
    options = list(ctx.args)
    if nodes >= _REPLICATED_FROM:
        options = [
            "--default-replication-factor",
            "3",
            "--config",
            "min.insync.replicas=2",
            *options,
        ]
    # Broker N uses each port plus N - 1.
    _check_ports([*listeners], nodes)
    _check_ports([*advertised], nodes)
    commands = {
        number: _command(
            directory,
            number,
            [
                *_numbered("--port", [] if listeners else [f":{port}"], number),
                *_numbered("--listener", listeners, number),
                *_numbered("--advertise", advertised, number),
                *options,
            ],
        )
        for number in range(1, nodes + 1)
    }
    with _brokers(commands) as processes:
        addresses = [
            _address_of(number, process) for number, process in processes.items()
        ]
        click.echo(f"netshim: serving {directory} at {','.join(addresses)}")
        # A program that reads a pipe waits for this line.
        sys.stdout.flush()
        lock = f"{registry_path(os.path.join(directory, 'cluster'))}/.lock"
        _watch(processes, commands, LockHolders(lock, _session_timeout_s(options)))


def _numbered(option: str, texts: Iterable[str], number: int) -> list[str]:
    """Return an option with the ports of a broker. Port 0, for a free port, remains 0."""
    addresses = []
    for text in texts:
        before, separator, port = text.rpartition(":")
        if port.isdecimal() and int(port):
            port = str(int(port) + number - 1)
        # The text of --port is only the number.
        addresses += [option, before + separator + port if before else port]
    return addresses


def _check_ports(texts: list[str], nodes: int) -> None:
    """Check that no two addresses of brokers have the same port.

    Raises:
        InvalidConfigError: two have.
    """
    ports: dict[int, str] = {}
    for text in texts:
        first = text.rpartition(":")[2]
        if not first.isdecimal() or not int(first):
            continue  # any port, or a text that a broker refuses
        for port in range(int(first), int(first) + nodes):
            if port in ports:
                raise InvalidConfigError(
                    f"{nodes} brokers use the port {port} of two addresses",
                    expected=f"ports that are at least {nodes} apart",
                    found=f"{ports[port]} and {text}",
                )
            ports[port] = text


def _command(directory: str, number: int, options: list[str]) -> list[str]:
    """Return the command line of one broker."""
    return [
        sys.executable,
        "-m",
        "netshim",
        "serve",
        os.path.join(directory, str(number)),
        "--registry",
        os.path.join(directory, "cluster"),
        "--node-id",
        str(number),
        *options,
    ]


@contextlib.contextmanager
def _brokers(
    commands: dict[int, list[str]],
) -> Generator[dict[int, subprocess.Popen[str]], None, None]:
    """Start the brokers, and stop those that are left at the end."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # TERM ends the command like Ctrl-C, so that the brokers are stopped.
    signal.signal(signal.SIGTERM, stop)
    processes: dict[int, subprocess.Popen[str]] = {}
    try:
        for number, command in commands.items():
            processes[number] = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                # Ctrl-C at a terminal reaches only this process, which stops them.
                start_new_session=True,
            )
        yield processes
    except KeyboardInterrupt:
        click.echo("netshim: stopping", err=True)
    finally:
        # A second TERM must not leave brokers running.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for process in processes.values():
            # All brokers first, so that their controlled shutdowns run concurrently.
            process.terminate()
        deadline_s = time.monotonic() + _END_S
        for process in processes.values():
            try:
                process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:  # for example a stopped process
                process.kill()
                process.wait()


def _address_of(number: int, process: subprocess.Popen[str]) -> str:
    """Return the address that a broker prints when clients may connect."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        code = process.wait()
        raise InvalidConfigError(
            f"broker {number} did not start; its messages are above",
            expected="a broker that serves",
            found=f"exit code {code}",
        )
    return line.rsplit(" ", 1)[-1].strip()


def _session_timeout_s(options: list[str]) -> float:
    """Return the session timeout of the brokers, by the options of `netshim serve`."""
    name = "--broker-session-timeout-ms"
    for at, option in enumerate(options):
        if option == name and at + 1 < len(options):
            return int(options[at + 1]) / 1_000
        if option.startswith(f"{name}="):
            return int(option.removeprefix(f"{name}=")) / 1_000
    return Settings().broker_session_timeout_ms / 1_000


class LockHolders:
    """Finds processes that are stopped while they hold a lock of the registry.

    This works only on Linux. On other systems, no process is found.
    """

    def __init__(self, lock: str, limit_s: float) -> None:
        #: The file whose bytes are locked during changes.
        self._lock = os.path.realpath(lock)
        self._limit_s = limit_s
        #: For each process id, since when each check has found it stopped with a lock.
        self._since_s: dict[int, float] = {}

    def overdue(self, pid: int, now_s: float) -> bool:
        """Return whether each call for `limit_s` has found the process."""
        if not (_is_stopped(pid) and self._holds_lock(pid)):
            self._since_s.pop(pid, None)
            return False
        return now_s - self._since_s.setdefault(pid, now_s) >= self._limit_s

    def _holds_lock(self, pid: int) -> bool:
        folder = Path(f"/proc/{pid}")
        try:
            return any(
                # The kernel lists the locks of a descriptor in its fdinfo.
                os.readlink(file) == self._lock
                and "lock:" in (folder / "fdinfo" / file.name).read_text()
                for file in (folder / "fd").iterdir()
            )
        except OSError:  # the process has ended
            return False


def _is_stopped(pid: int) -> bool:
    try:
        # The name of the program, in parentheses, may contain spaces.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    # Stopped by a signal, or by a debugger.
    return state in "Tt"


def _watch(
    processes: dict[int, subprocess.Popen[str]],
    commands: dict[int, list[str]],
    holders: LockHolders,
) -> None:
    """Report brokers that end, until none is left."""
    running = dict(processes)
    while running:
        time.sleep(0.2)
        for number, process in running.items():
            if holders.overdue(process.pid, time.monotonic()):
                click.echo(
                    f"netshim: broker {number} was stopped while it changed the "
                    "registry, so it is killed",
                    err=True,
                )
                process.kill()
        for number, process in list(running.items()):
            if process.poll() is not None:
                del running[number]
                click.echo(
                    f"netshim: broker {number} ended with {process.returncode}; to start it "
                    f"again: {' '.join(commands[number])}",
                    err=True,
                )
