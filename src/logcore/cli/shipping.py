"""`logcore forward` ships topics to a Kafka cluster; `logcore mirror` copies topics from
a cluster.

Rules:
- At a terminal, one line on stderr shows the progress. In a pipe, or with --json, stdout
  gets one line of JSON per second.
- `forward` opens the directory read-only, even while another process writes, unless an
  option requires writing.

The work is done by shipping/.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

import logcore
from logcore.cli.opening import open_to_write, shared_option
from logcore.cli.options import json_option, log_directory_argument, setting
from logcore.cli.terminal import Lines, size_text, to_json, wants_json
from logcore.fs import OS

_F = TypeVar("_F", bound=Callable[..., Any])

#: Delay between two progress lines.
_REPORT_MS: Final = 1_000

bootstrap_option = click.option(
    "--bootstrap",
    required=True,
    metavar="HOST:PORT[,...]",
    help="Addresses of brokers of the cluster.",
)
client_option = click.option(
    "--client",
    "clients",
    metavar="NAME=VALUE",
    multiple=True,
    help="Setting of librdkafka. Repeatable.",
)


def _rename_option(place: str) -> Callable[[_F], _F]:
    return click.option(
        "--rename",
        metavar="s/x/y/",
        help=f"Rename topics in {place}, with a regular expression.",
    )


def _on_gap_option(which: str, done: str) -> Callable[[_F], _F]:
    return click.option(
        "--on-gap",
        type=click.Choice(["fail", "skip"]),
        default="fail",
        show_default=True,
        help=f"Policy if {which} were deleted before they were {done}.",
    )


def _on_error_option(text: str) -> Callable[[_F], _F]:
    return click.option(
        "--on-error",
        type=click.Choice(["fail", "quarantine"]),
        default="fail",
        show_default=True,
        help=text,
    )


def _name_option(text: str) -> Callable[[_F], _F]:
    return click.option("--name", default="default", show_default=True, help=text)


def until_end_option(done: str) -> Callable[[_F], _F]:
    return click.option(
        "--until-end", is_flag=True, help=f"End when all present records are {done}."
    )


def topic_names(texts: tuple[str, ...]) -> list[str]:
    """Return the names in the texts of `--topics a,b --topics c`."""
    return [name for text in texts for name in text.split(",") if name]


def renaming(text: str | None) -> Callable[[str], str] | None:
    """Parse `s/x/y/` into a function that renames topics.

    x is a regular expression of Python, and y is a replacement for re.sub().
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
        # sub() parses the replacement, so that an invalid one is refused here.
        pattern.sub(parts[2], "")
    except (re.error, IndexError) as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint="--rename") from None
    return lambda name: pattern.sub(parts[2], name)


class Reporter:
    """Prints the progress about once a second, and at the end."""

    def __init__(self, out: Lines, as_json: bool, line: Callable[[Any], str]) -> None:
        self._out = out
        self._is_json = wants_json(as_json)
        self._line = line
        self._due_ms = 0
        self._width = 0
        self._failures: set[tuple[str, int]] = set()

    def run(
        self,
        work: Any,
        *,
        until_end: bool,
        after_step: Callable[[], object] | None = None,
    ) -> None:
        """Run a Forwarder, Mirror or Follower, and print its progress."""

        def report() -> None:
            if after_step is not None:
                after_step()
            if OS.monotonic_ms() >= self._due_ms:
                self._report(work.metrics())

        try:
            work.run(until_end=until_end, after_step=report)
        finally:
            # The last line has the final counts, also after an error or Ctrl-C.
            self._report(work.metrics())
            if self._width:
                click.echo(err=True)

    def _report(self, metrics: Any) -> None:
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
    help="Topics to ship; all except internal topics by default.",
)
@_rename_option("the cluster")
@_name_option("Name of this forwarder; a second forwarder of this name takes over.")
@click.option(
    "--at-least-once",
    is_flag=True,
    help="Without transactions: a crash repeats some records.",
)
@click.option(
    "--create-topics", is_flag=True, help="Create missing topics in the cluster."
)
@_on_error_option(
    "A refused record stops its partition, or is stored in the local topic TOPIC.dlq."
)
@_on_gap_option("local records", "shipped")
@click.option(
    "--on-lost",
    type=click.Choice(["fail", "noted", "start"]),
    default="fail",
    show_default=True,
    help="If the cluster has lost the progress: continue at the locally stored progress, or ship again.",
)
@click.option(
    "--hold",
    is_flag=True,
    help="Commit the progress for the local group forward-NAME, so that retention can wait for it.",
)
@click.option(
    "--buffer-memory",
    type=click.IntRange(1),
    default=32 << 20,
    show_default=True,
    help="Bytes.",
)
@until_end_option("shipped")
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
    """Ship topics of DIR to a Kafka cluster, in order per partition and exactly once,
    until Ctrl-C.

    The command continues where the previous run stopped. While the cluster is
    unreachable, it waits and retries.
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
        reporter.run(forwarder, until_end=until_end)


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
    help="Topics of the cluster to mirror.",
)
@click.option(
    "--offsets",
    type=click.Choice(["keep", "new"]),
    default="keep",
    show_default=True,
    help="Offsets of the mirrored records: the cluster's, or new ones.",
)
@_rename_option("DIR")
@_name_option("With new: name of this mirror; its progress is stored under the name.")
@click.option(
    "--groups",
    metavar="GROUP[,...]",
    multiple=True,
    help="With keep: groups whose committed offsets are copied.",
)
@_on_gap_option("records of the cluster", "mirrored")
@click.option(
    "--on-divergence",
    type=click.Choice(["fail", "truncate"]),
    default="fail",
    show_default=True,
    help="If the cluster has lost records that DIR has: truncate DIR, after asking.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@_on_error_option(
    "With new: a record that cannot be stored stops its partition, or is stored in TOPIC.dlq."
)
@until_end_option("mirrored")
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
    """Copy topics of a Kafka cluster into DIR, with the offsets of the cluster, until
    Ctrl-C.

    The command continues where the previous run stopped. While the cluster is
    unreachable, it waits and retries.
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
        reporter.run(mirrored, until_end=until_end, after_step=logdir.tick)
