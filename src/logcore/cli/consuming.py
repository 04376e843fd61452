"""`logcore consume`: records of topics as they come, with a consumer group that remembers how far it came.

Rules:
- At least once: what was printed is committed after it has left this process, so a crash repeats some and skips none.
- While the group divides its partitions a commit is refused. It is owed then, and made before a partition is given up
  or the command ends.
- With a group the directory is opened for writing, since the group commits in it; without one, beside a writer.

reading.py says how a record looks.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import click

import logcore
from logcore.cli.opening import open_to_write, shared_option
from logcore.cli.program import full_option, json_option, log_directory_argument
from logcore.cli.reading import format_option, format_parts, print_formatted, print_lines
from logcore.cli.sources import complete_topic, isolation_option, place_in, place_within
from logcore.cli.terminal import Lines
from logcore.consumer import Consumer, RebalanceListener, TopicPartition
from logcore.errors import OffsetOutOfRangeError, RebalanceInProgressError

#: How long one poll waits; Ctrl-C comes through at once all the same.
_POLL_MS = 1_000
#: Between two attempts to commit what is owed at the end.
_RETRY_SECONDS = 0.05


class _Beginning:
    """Begins at a place, such as an offset or a time, in partitions for which nothing was committed."""

    def __init__(self, logdir: logcore.LogDir, consumer: Consumer, text: str, *, is_in_group: bool) -> None:
        self.logdir = logdir
        self.consumer = consumer
        self.text = text
        self.is_in_group = is_in_group
        self.now_ms = time.time_ns() // 1_000_000

    def check(self, topics: tuple[str, ...]) -> None:
        """Raises click.BadParameter for a text that is no place, and OffsetOutOfRangeError for an offset that the one
        partition does not have. Of several, each begins where it does.
        """
        logs = [self.logdir.partition(topic, number) for topic in topics for number in self.logdir.partitions(topic)]
        places = [place_in(log, self.text, self.now_ms) for log in logs]
        if len(logs) != 1:
            return
        start = logs[0].log_start_offset
        end = logs[0].high_watermark
        if not start <= places[0] <= end:
            raise OffsetOutOfRangeError(
                "--from is outside the log", path=logs[0].path, offset=places[0], expected=f"{start} to {end}"
            )

    def seek(self, partitions: frozenset[TopicPartition]) -> None:
        known: dict[TopicPartition, object] = {}
        if self.is_in_group:
            known.update(self.consumer.committed(partitions))
        for one in partitions:
            if known.get(one) is None:
                self.consumer.seek(one, place_within(self.logdir.partition(*one), self.text, self.now_ms))


class Printed(RebalanceListener):
    """Commits what was printed. beginning: None where auto_offset_reset says where to begin."""

    def __init__(self, consumer: Consumer, beginning: _Beginning | None) -> None:
        self.consumer = consumer
        self.beginning = beginning
        self.is_owed = False

    def commit(self) -> None:
        try:
            self.consumer.commit()
            self.is_owed = False
        except RebalanceInProgressError:
            self.is_owed = True

    def settle(self) -> None:
        """Commits what is owed, when the group has divided its partitions. Reads nothing more."""
        while self.is_owed:
            self.consumer.look_after()
            self.commit()
            if self.is_owed:
                time.sleep(_RETRY_SECONDS)

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        if self.beginning is not None:
            self.beginning.seek(partitions)

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        if self.is_owed:
            self.commit()

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Their new owners print again what is owed."""
        self.is_owed = False


@click.command()
@log_directory_argument
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True, shell_complete=complete_topic)
@click.option("--group", "group_id", metavar="GROUP", help="Go on where this group stopped, and commit for it.")
@click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    help="Where to begin without a committed offset: offset, earliest, latest, time, or age as -10m.",
)
@click.option("-n", "--count", type=click.IntRange(1), help="End after so many records.")
@click.option("--until-end", is_flag=True, help="End when there is nothing more to read.")
@shared_option
@isolation_option
@format_option
@full_option
@json_option
def consume(
    directory: str,
    topics: tuple[str, ...],
    group_id: str | None,
    start: str,
    count: int | None,
    until_end: bool,
    shared: bool,
    isolation: Any,
    form: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Print the records of topics as they come, until Ctrl-C. With --group, go on where the group stopped.

    A record is printed before it is committed: after a crash some come twice and none is missing.
    """
    left = count
    parts = None
    if form is not None:
        parts = format_parts(form)
    reset = start if start in ("earliest", "latest") else "earliest"
    with contextlib.ExitStack() as stack:
        if group_id is None:
            logdir = logcore.open_dir(directory, read_only=True)
        else:
            logdir = open_to_write(directory, shared=shared)
        stack.enter_context(logdir)
        for topic in topics:
            logdir.topic(topic)  # raises for one that does not exist
        consumer = stack.enter_context(
            logdir.consumer(
                group_id=group_id, auto_offset_reset=reset, isolation_level=isolation, enable_auto_commit=False
            )
        )
        beginning = None
        if start != reset:
            beginning = _Beginning(logdir, consumer, start, is_in_group=group_id is not None)
            beginning.check(topics)
        printed = Printed(consumer, beginning)
        consumer.subscribe(topics, listener=printed)
        out = stack.enter_context(Lines())
        while left is None or left > 0:
            found = consumer.poll(0 if until_end else _POLL_MS, left)
            if not found and until_end:
                break
            if parts is None:
                print_lines(out, found.records(), full, as_json)
            else:
                print_formatted(out, parts, found.records())
            out.flush()
            if group_id is not None and found:
                printed.commit()
            if left is not None:
                left -= found.count
        printed.settle()
