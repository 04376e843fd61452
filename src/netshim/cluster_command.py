"""`netshim cluster DIR`: several brokers on one machine, one process each.

    DIR/1, DIR/2, DIR/3        the log directories
    DIR/cluster.registry       the registry

The command starts the brokers, prints their addresses, and waits. Ctrl-C or TERM stops
them. A broker that ends is reported, and is started again by the next `netshim cluster`
or by hand: the line for that is printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Final

import click

from logcore.errors import InvalidConfigError

#: Limit for the start of all brokers.
_START_S: Final = 60.0
#: Limit for a broker to end after TERM: longer than its controlled shutdown.
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
@click.pass_context
def cluster(ctx: click.Context, directory: str, nodes: int, port: int) -> None:
    """Serve a cluster of several brokers on this machine, below the directory DIR.

    Each broker is a process of its own. All other options are passed to `netshim serve`.
    With three brokers or more, topics have three replicas by default, of which two must
    be in sync for acks=all.
    """
    os.makedirs(directory, exist_ok=True)
    options = list(ctx.args)
    if nodes >= _REPLICATED_FROM:
        options = [
            "--default-replication-factor",
            "3",
            "--config",
            "min.insync.replicas=2",
            *options,
        ]
    commands = {
        number: _command(directory, number, port + number - 1 if port else 0, options)
        for number in range(1, nodes + 1)
    }
    with _brokers(commands) as processes:
        addresses = [_address_of(number, one) for number, one in processes.items()]
        click.echo(f"netshim: serving {directory} at {','.join(addresses)}")
        sys.stdout.flush()
        _watch(processes, commands)


def _command(directory: str, number: int, port: int, options: list[str]) -> list[str]:
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
        "--port",
        str(port),
        *options,
    ]


@contextlib.contextmanager
def _brokers(
    commands: dict[int, list[str]],
) -> Generator[dict[int, subprocess.Popen[str]], None, None]:
    """Start the brokers, and stop those that are left at the end."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

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
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for one in processes.values():
            one.terminate()
        deadline_s = time.monotonic() + _END_S
        for one in processes.values():
            try:
                one.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:  # for example a stopped process
                one.kill()
                one.wait()


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


def _watch(
    processes: dict[int, subprocess.Popen[str]], commands: dict[int, list[str]]
) -> None:
    """Report brokers that end, until none is left."""
    left = dict(processes)
    while left:
        time.sleep(0.2)
        for number, one in list(left.items()):
            if one.poll() is not None:
                del left[number]
                click.echo(
                    f"netshim: broker {number} ended with {one.returncode}; to start it "
                    f"again: {' '.join(commands[number])}",
                    err=True,
                )
