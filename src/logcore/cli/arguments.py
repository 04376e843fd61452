"""Source of a command: DIR for the directory of one partition, or DIR TOPIC[:PARTITION]
for a topic in a directory of topics.

Rules:
- Logs are opened read-only: no lock is acquired and no file is written, even while
  another process writes.
- A place in a log has one notation in all commands: an offset, earliest, latest, now, a
  time, or an age. In a topic, the place is looked up in each partition.

This module reads no records.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import attrs
import click
import click.shell_completion

import logcore
from logcore.cli.options import fail
from logcore.errors import LogcoreError, LogNotFoundError
from logcore.inspect.catalog import partitions
from logcore.metadata.filenames import partition_of

_RELATIVE: Final = re.compile(r"-(\d{1,12})(ms|s|m|h|d|w)")
_UNIT_MS: Final = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}


def complete_topic(
    ctx: click.Context, _: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of topics that begin with the text, for shell completion."""
    try:
        with logcore.open_dir(ctx.params["directory"], read_only=True) as logdir:
            return [name for name in logdir.topics() if name.startswith(incomplete)]
    except (LogcoreError, OSError, KeyError, TypeError):
        return []


def complete_topic_or_file(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[click.shell_completion.CompletionItem]:
    """Return the names of topics, or of files if no topic matches."""
    topics = complete_topic(ctx, parameter, incomplete)
    return [
        click.shell_completion.CompletionItem(incomplete, type="file"),
        *map(click.shell_completion.CompletionItem, topics),
    ]


topic_argument = click.argument(
    "topic",
    metavar="[TOPIC[:PARTITION]]",
    required=False,
    shell_complete=complete_topic,
)
from_option = click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    help="Offset, earliest, time, or age as -10m.",
)
to_option = click.option(
    "--to",
    "end",
    default="latest",
    show_default=True,
    help="Same notation as --from; the record at this place is excluded.",
)
isolation_option = click.option(
    "--isolation",
    type=click.Choice(["read_uncommitted", "read_committed"]),
    default="read_uncommitted",
    show_default=True,
    help="read_committed omits records of aborted and open transactions.",
)


@attrs.frozen
class NamedLogs:
    """Logs that the arguments of a command name.

    `logs` maps the number of each partition to its log. `logdir` is None for the
    directory of one partition.
    """

    topic: str
    logs: Mapping[int, logcore.Log]
    logdir: logcore.LogDir | None = None

    def places(self, text: str, now_ms: int) -> dict[int, int]:
        """Return the offset in each partition for the text of --from or --to.

        With several partitions, an offset outside a log becomes its start or end, and is
        not an error.
        """
        if len(self.logs) > 1:
            return {
                number: offset_within(log, text, now_ms)
                for number, log in self.logs.items()
            }
        return {
            number: parse_offset(log, text, now_ms) for number, log in self.logs.items()
        }


def open_source(
    stack: contextlib.ExitStack, directory: str, topic: str | None
) -> NamedLogs:
    """Open the logs that the arguments name.

    Raises:
        LogNotFoundError: the directory is missing or has no logs.
        TopicNotFoundError: the topic is missing; the error lists the topics.
    """
    if topic is None:
        try:
            log = stack.enter_context(logcore.open(directory, read_only=True))
        except LogNotFoundError:
            _fail_for_topics(directory)
            raise
        name, number = partition_of(os.path.basename(log.path)) or ("", 0)
        return NamedLogs(name, {number: log})
    logdir = stack.enter_context(logcore.open_dir(directory, read_only=True))
    name, numbers = named_partitions(logdir, topic)
    return NamedLogs(
        name, {number: logdir.partition(name, number) for number in numbers}, logdir
    )


def named_partitions(logdir: logcore.LogDir, text: str) -> tuple[str, tuple[int, ...]]:
    """Return the topic and the partitions that TOPIC[:PARTITION] names.

    Raises:
        TopicNotFoundError: the topic or the partition does not exist.
    """
    name, sign, number = text.partition(":")
    parts = partition_of(name)
    if name not in logdir and parts is not None and parts[0] in logdir:
        fail(
            f"there is no topic {name}",
            f"write {parts[0]}:{parts[1]} for partition {parts[1]} of {parts[0]}",
        )
    known = logdir.partitions(name)
    if not sign:
        return name, known
    if not (number.isascii() and number.isdigit()):
        raise click.BadParameter(
            f"expected TOPIC or TOPIC:PARTITION, found {text!r}", param_hint="'TOPIC'"
        )
    if int(number) not in known:
        fail(
            f"{name} has no partition {number}",
            f"it has {some_of(list(map(str, known)))}",
        )
    return name, (int(number),)


def named_directories(directory: str, topic: str | None) -> list[str]:
    """Return the partition directories that DIR [TOPIC[:PARTITION]] names.

    No log is opened, so that this works on a damaged directory.

    Raises:
        LogNotFoundError: there is no such directory.
    """
    found = partitions(directory)
    if topic is None:
        return found
    name, sign, number = topic.partition(":")
    of_topic = {
        number_of: path
        for path in found
        for topic_of, number_of in [partition_of(os.path.basename(path)) or ("", -1)]
        if topic_of == name
    }
    if not of_topic:
        names = {(partition_of(os.path.basename(path)) or ("",))[0] for path in found}
        fail(
            f"there is no topic {name} in {directory}",
            f"there are {some_of(sorted(names))}",
        )
    if not sign:
        return list(of_topic.values())
    if not (number.isascii() and number.isdigit() and int(number) in of_topic):
        fail(
            f"{name} has no partition {number}",
            f"it has {some_of(list(map(str, of_topic)))}",
        )
    return [of_topic[int(number)]]


def some_of(names: Sequence[str]) -> str:
    """Return a list of names for a message, with the first ten of them."""
    if len(names) > 10:
        return f"{', '.join(names[:10])}, ..."
    return ", ".join(names)


def _fail_for_topics(directory: str) -> None:
    """End the command if a directory of topics was given without a topic."""
    try:
        with logcore.open_dir(directory, read_only=True) as logdir:
            topics = logdir.topics()
    except (LogcoreError, OSError):
        return
    if topics:
        fail(
            f"{directory} is a directory of topics: name one of them",
            f"add its name after {directory}; there are {some_of(topics)}",
        )


def offset_within(log: logcore.Log, text: str, now_ms: int) -> int:
    """Return parse_offset(), limited to the start and the end of the log."""
    return min(
        max(parse_offset(log, text, now_ms), log.log_start_offset), log.high_watermark
    )


def parse_offset(log: logcore.Log, text: str, now_ms: int) -> int:
    """Return the offset for the text of --from or --to.

    Raises:
        click.BadParameter: the text is not a place.
    """
    if text in ("earliest", "latest"):
        if text == "earliest":
            return log.log_start_offset
        return log.high_watermark
    if text.isascii() and text.isdigit():
        return int(text)
    timestamp_ms = timestamp_of(text, now_ms)
    if timestamp_ms is None:
        raise click.BadParameter(
            f"expected an offset, earliest, latest, now, a time such as 2026-01-31T12:00:00Z "
            f"(UTC unless it has a zone), or an age such as -10m, -1h, -2d; found {text!r}"
        )
    found = log.offset_for_timestamp(timestamp_ms)
    if found is None:
        return log.high_watermark
    return found


def timestamp_of(text: str, now_ms: int) -> int | None:
    """Return the milliseconds of `now`, an age or a time, or None for other texts."""
    if text == "now":
        return now_ms
    relative = _RELATIVE.fullmatch(text)
    if relative is not None:
        return now_ms - int(relative[1]) * _UNIT_MS[relative[2]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
