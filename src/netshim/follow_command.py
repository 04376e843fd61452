"""The commands `netshim follow` and `netshim promote`."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import click

import logcore
from logcore.cli.options import json_option, setting
from logcore.cli.shipping import Reporter, client_option, until_end_option
from logcore.cli.terminal import Lines, size_text
from netshim.follow import Follower, Source, promote

#: The log directory of the copies.
_DIRECTORY: Final = click.argument(
    "directory", metavar="DIR", type=click.Path(file_okay=False)
)


def _line(metrics: Any) -> str:
    return (
        f"{metrics.state}: {size_text(metrics.size_bytes)} copied, "
        f"{metrics.lag_records:,} records to go"
    )


@click.command("follow")
@_DIRECTORY
@click.option(
    "--from",
    "source",
    metavar="HOST:PORT[,...]",
    required=True,
    help="Addresses of brokers of the cluster to copy.",
)
@click.option(
    "--topic",
    "topics",
    metavar="NAME",
    multiple=True,
    required=True,
    help="Topic to copy; * and ? match any characters. Repeatable.",
)
@click.option(
    "--internal", is_flag=True, help="Copy committed offsets and transactions too."
)
@click.option(
    "--on-divergence",
    type=click.Choice(["truncate", "stop"]),
    default="truncate",
    show_default=True,
    help="After an unclean election in the cluster.",
)
@click.option(
    "--on-gap",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="If the cluster has deleted records before they were copied.",
)
@until_end_option("copied")
@client_option
@json_option
def follow(
    directory: str,
    source: str,
    topics: tuple[str, ...],
    internal: bool,
    until_end: bool,
    clients: tuple[str, ...],
    as_json: bool,
    **choices: Any,
) -> None:
    """Copy topics of a Kafka cluster to DIR byte for byte, until Ctrl-C.

    The command continues at the end of the copies. Other programs may read them while
    it runs. `netshim promote` makes them writable.
    """
    with contextlib.ExitStack() as stack:
        # Closed in the reverse order: the connections first, and then the directory.
        logdir = stack.enter_context(logcore.open_dir(directory, create=True))
        cluster = stack.enter_context(Source(source, dict(map(setting, clients))))
        follower = Follower(
            logdir, cluster, topics=topics, with_internal=internal, **choices
        )
        # Prints the metrics once a second, as text or as JSON lines.
        reporter = Reporter(stack.enter_context(Lines()), as_json, _line)
        reporter.run(follower, until_end=until_end)


@click.command("promote")
@_DIRECTORY
@click.option(
    "--from",
    "source",
    metavar="HOST:PORT[,...]",
    help="Addresses of brokers of the cluster that was copied.",
)
@click.option(
    "--anyway",
    is_flag=True,
    help="Even if the cluster has more records, does not answer, or the copy is partial.",
)
@client_option
def promote_command(
    directory: str, source: str | None, anyway: bool, clients: tuple[str, ...]
) -> None:
    """Make the copies in DIR normal topics, which `netshim serve` and Python write to."""
    with contextlib.ExitStack() as stack:
        logdir = stack.enter_context(logcore.open_dir(directory))
        cluster = None
        # Without --from, only --anyway can promote.
        if source is not None:
            settings = dict(map(setting, clients))
            cluster = stack.enter_context(Source(source, settings))
        for name in promote(logdir, cluster, anyway=anyway):
            click.echo(f"promoted {name}")
