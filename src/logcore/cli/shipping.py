"""`logcore forward` ships topics to a Kafka cluster, `logcore mirror` brings topics of
one here.

Rules:
- At a terminal one line on stderr says how far it is; in a pipe, or with --json, stdout
  has a line of JSON a second.
- `forward` opens the directory read-only, beside any writer, unless something is to be
  written in it.

The work is done by shipping/.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from typing import Any, Final

import click

import logcore
from logcore.cli.opening import open_to_write, shared_option
from logcore.cli.options import json_option, log_directory_argument, setting
from logcore.cli.terminal import Lines, size_text, to_json, wants_json
from logcore.errors import ShippingError
from logcore.fs import OS

#: Between two lines.
_REPORT_MS: Final = 1_000

bootstrap_option = click.option(
    "--bootstrap",
    required=True,
    metavar="HOST:PORT[,...]",
    help="Where the cluster is reached.",
)
client_option = click.option(
    "--client",
    "clients",
    metavar="NAME=VALUE",
    multiple=True,
    help="A setting of librdkafka. Repeatable.",
)


def topic_names(texts: tuple[str, ...]) -> list[str]:
    """`--topics a,b --topics c`."""
    return [name for text in texts for name in text.split(",") if name]


def renaming(text: str | None) -> Callable[[str], str] | None:
    """`s/x/y/`: a function on names. x is a regular expression of Python, y what
    re.sub() takes.
    """
    if text is None:
        return None
    sign = text[1:2]
    if sign:
        parts = text.split(sign)
    else:
        parts = []
    if not text.startswith("s") or len(parts) != 4 or parts[3]:
        raise click.BadParameter(f"{text!r} is not s/from/to/", param_hint="--rename")
    try:
        pattern = re.compile(parts[1])
        pattern.sub(
            parts[2], ""
        )  # what it makes is read first, so that it is refused here and not at a topic
    except (re.error, IndexError) as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint="--rename") from None
    return lambda name: pattern.sub(parts[2], name)


class Reporter:
    """Says how far it is, about once a second, and at the end."""

    def __init__(self, out: Lines, as_json: bool, line: Callable[[Any], str]) -> None:
        self._out = out
        self._is_json = wants_json(as_json)
        self._line = line
        self._due_ms = 0
        self._width = 0
        self._failures: set[tuple[str, int]] = set()

    def is_due(self) -> bool:
        return OS.monotonic_ms() >= self._due_ms

    def report(self, metrics: Any) -> None:
        for partition, why in metrics.failures.items():
            if partition not in self._failures:
                self._failures.add(partition)
                self._clear()
                click.echo(f"stopped: {partition[0]}-{partition[1]}: {why}", err=True)
        self._due_ms = OS.monotonic_ms() + _REPORT_MS
        if self._is_json:
            self._out.write(to_json(metrics.as_dict()))
            self._out.flush()
            return
        if not sys.stderr.isatty():
            return
        text = self._line(metrics)
        click.echo("\r" + text.ljust(self._width), nl=False, err=True)
        self._width = len(text)

    def end(self) -> None:
        if self._width:
            click.echo(err=True)

    def _clear(self) -> None:
        if self._width:
            click.echo("\r" + " " * self._width + "\r", nl=False, err=True)


def _forward_line(metrics: Any) -> str:
    shown = f"{metrics.state}: {metrics.record_count:,} shipped, {metrics.lag_records:,} to go"
    if metrics.lag_records:
        shown += (
            f" ({size_text(metrics.lag_bytes)}, {metrics.lag_age_ms / 1000:,.0f} s old)"
        )
    return shown


@click.command()
@log_directory_argument
@bootstrap_option
@click.option(
    "--topics",
    metavar="NAME[,...]",
    multiple=True,
    help="Which topics; all but internal ones by default.",
)
@click.option(
    "--rename",
    metavar="s/x/y/",
    help="Names of topics in the cluster: a regular expression.",
)
@click.option(
    "--name",
    default="default",
    show_default=True,
    help="Of this forwarder; a second one takes over.",
)
@click.option(
    "--at-least-once",
    is_flag=True,
    help="Without transactions: a crash repeats some records.",
)
@click.option(
    "--create-topics", is_flag=True, help="Make what is missing in the cluster."
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "quarantine"]),
    default="fail",
    show_default=True,
    help="A record that is refused stops its partition, or is kept in TOPIC.dlq here.",
)
@click.option(
    "--on-gap",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="Records that were deleted here before they were shipped.",
)
@click.option(
    "--on-lost",
    type=click.Choice(["fail", "noted", "start"]),
    default="fail",
    show_default=True,
    help="The cluster has lost the progress: go on at what was noted here, or ship again.",
)
@click.option(
    "--hold",
    is_flag=True,
    help="Commit the progress for the local group forward-NAME: retention can wait.",
)
@click.option(
    "--buffer-memory",
    type=click.IntRange(1),
    default=32 << 20,
    show_default=True,
    help="Bytes.",
)
@click.option(
    "--until-end", is_flag=True, help="End when all that is there now is shipped."
)
@client_option
@json_option
def forward(
    directory: str,
    bootstrap: str,
    topics: tuple[str, ...],
    rename: str | None,
    clients: tuple[str, ...],
    until_end: bool,
    hold: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Ship topics of DATA to a Kafka cluster, in order per partition and exactly once,
    until Ctrl-C.

    It goes on where it stopped. While the cluster is away it waits and tries again.
    """
    from logcore.shipping import Forwarder, KafkaCluster

    names = topic_names(topics) or None
    renamed = renaming(rename)
    with contextlib.ExitStack() as stack:
        if hold or options["on_error"] == "quarantine":
            logdir = open_to_write(directory, shared=True)
        else:
            logdir = logcore.open_dir(directory, read_only=True)
        stack.enter_context(logdir)
        cluster = stack.enter_context(
            KafkaCluster(bootstrap, dict(map(setting, clients)))
        )
        out = stack.enter_context(Lines())
        forwarder = Forwarder(
            logdir, cluster, topics=names, rename=renamed, hold=hold, **options
        )
        stack.enter_context(forwarder)
        reporter = Reporter(out, as_json, _forward_line)

        def report() -> None:
            if reporter.is_due():
                reporter.report(forwarder.metrics())

        try:
            forwarder.run(until_end=until_end, after_step=report)
        except ShippingError:
            reporter.report(forwarder.metrics())
            raise
        else:
            reporter.report(forwarder.metrics())
        finally:
            reporter.end()


def _mirror_line(metrics: Any) -> str:
    return f"{metrics.state}: {metrics.record_count:,} mirrored, {metrics.lag_records:,} to go"


@click.command()
@log_directory_argument
@bootstrap_option
@click.option(
    "--topics",
    metavar="NAME[,...]",
    multiple=True,
    required=True,
    help="Which topics there.",
)
@click.option(
    "--offsets",
    type=click.Choice(["keep", "new"]),
    default="keep",
    show_default=True,
    help="Here.",
)
@click.option(
    "--rename", metavar="s/x/y/", help="Names of topics here: a regular expression."
)
@click.option(
    "--name",
    default="default",
    show_default=True,
    help="Of this mirror, whose progress is kept with new.",
)
@click.option(
    "--groups",
    metavar="GROUP[,...]",
    multiple=True,
    help="With keep: whose committed offsets are copied.",
)
@click.option(
    "--on-gap",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="Records that were deleted there before they were mirrored.",
)
@click.option(
    "--on-divergence",
    type=click.Choice(["fail", "truncate"]),
    default="fail",
    show_default=True,
    help="The cluster has lost records that are here: cut what is here, after asking.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "quarantine"]),
    default="fail",
    show_default=True,
    help="With new: a record that cannot be stored stops its partition, or is kept in TOPIC.dlq.",
)
@click.option(
    "--until-end", is_flag=True, help="End when all that is there now is mirrored."
)
@shared_option
@client_option
@json_option
def mirror(
    directory: str,
    bootstrap: str,
    topics: tuple[str, ...],
    rename: str | None,
    groups: tuple[str, ...],
    yes: bool,
    clients: tuple[str, ...],
    until_end: bool,
    shared: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Bring topics of a Kafka cluster into DATA, with the offsets they have there,
    until Ctrl-C.

    It goes on where it stopped. While the cluster is away it waits and tries again.
    """
    from logcore.shipping import KafkaCluster, Mirror

    options.update(
        topics=topic_names(topics), rename=renaming(rename), groups=topic_names(groups)
    )
    options["confirm"] = (
        None if yes else lambda question: click.confirm(question, err=True)
    )
    with contextlib.ExitStack() as stack:
        logdir = stack.enter_context(
            open_to_write(directory, shared=shared, create=True)
        )
        cluster = stack.enter_context(
            KafkaCluster(bootstrap, dict(map(setting, clients)))
        )
        out = stack.enter_context(Lines())
        mirrored = stack.enter_context(Mirror(logdir, cluster, **options))
        reporter = Reporter(out, as_json, _mirror_line)

        def report() -> None:
            logdir.tick()
            if reporter.is_due():
                reporter.report(mirrored.metrics())

        try:
            mirrored.run(until_end=until_end, after_step=report)
        except ShippingError:
            reporter.report(mirrored.metrics())
            raise
        else:
            reporter.report(mirrored.metrics())
        finally:
            reporter.end()
