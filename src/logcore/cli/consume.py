"""`logcore consume`: print records of topics as they arrive, optionally as a member of
a consumer group, which stores its read positions.

Rules:
- Records are delivered at least once: a record is committed after it was printed. A
  crash repeats some records and skips none.
- A commit is refused while the group rebalances. The command retries the commit before
  it releases a partition or ends.
- With --until-end, a group ends when no member has records left to read. A command that
  joined other members waits for its partitions, and then until the other members have
  committed their records.
- With a group, the directory is opened for writing, because the group commits in it.
  Without a group, it is opened read-only, even while another process writes.

read.py formats the records.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping

import click

import logcore
from logcore.cli.arguments import (
    complete_topic,
    isolation_option,
    offset_within,
    parse_offset,
)
from logcore.cli.opening import open_to_write, shared_option
from logcore.cli.options import full_option, json_option, log_directory_argument
from logcore.cli.read import (
    format_option,
    format_parts,
    print_formatted,
    print_lines,
)
from logcore.cli.terminal import Lines
from logcore.consumer import (
    Consumer,
    OffsetAndMetadata,
    RebalanceListener,
    TopicPartition,
)
from logcore.errors import OffsetOutOfRangeError, RebalanceInProgressError
from logcore.reader import Isolation

#: Maximum duration of one poll. Ctrl-C interrupts it at once.
_POLL_SECONDS = 1.0
#: Delay between two attempts to commit at the end.
_RETRY_SECONDS = 0.05


class _Beginning:
    """Start position, such as an offset or a time, of partitions without a committed
    offset.
    """

    def __init__(
        self,
        logdir: logcore.LogDir,
        consumer: Consumer,
        text: str,
        *,
        is_in_group: bool,
    ) -> None:
        self.logdir = logdir
        self.consumer = consumer
        self.text = text
        self.is_in_group = is_in_group
        self.now_ms = time.time_ns() // 1_000_000

    def check(self, topics: tuple[str, ...]) -> None:
        """Check the text of --from before any record is read.

        With several partitions, an offset outside a log is not an error: that partition
        begins at its nearest end.

        Raises:
            click.BadParameter: the text is not a place.
            OffsetOutOfRangeError: the only partition does not contain the offset.
        """
        logs = [
            self.logdir.partition(topic, number)
            for topic in topics
            for number in self.logdir.partitions(topic)
        ]
        places = [parse_offset(log, self.text, self.now_ms) for log in logs]
        if len(logs) != 1:
            return
        start = logs[0].log_start_offset
        end = logs[0].high_watermark
        if not start <= places[0] <= end:
            raise OffsetOutOfRangeError(
                "--from is outside the log",
                path=logs[0].path,
                offset=places[0],
                expected=f"{start} to {end}",
            )

    def seek(self, partitions: frozenset[TopicPartition]) -> None:
        """Seek to the start position in each partition without a committed offset."""
        known = self._committed(partitions)
        for partition in partitions:
            if known.get(partition) is None:
                self.consumer.seek(partition, self._place(partition))

    def _committed(
        self, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, OffsetAndMetadata | None]:
        if not self.is_in_group:
            return {}
        return self.consumer.committed(partitions)

    def _place(self, topic_partition: TopicPartition) -> int:
        return offset_within(
            self.logdir.partition(*topic_partition), self.text, self.now_ms
        )

    def is_all_read(self, topics: tuple[str, ...], isolation: Isolation) -> bool:
        """Return whether the partitions of all other members are read and committed.

        The caller's last poll returned no records, so that this member's own partitions
        are read. A partition is read if no record follows its committed offset. This
        includes partitions that another member must still release to this one.
        """
        present = {
            TopicPartition(topic, number)
            for topic in topics
            for number in self.logdir.partitions(topic)
        }
        others = present - self.consumer.assignment()
        known = self._committed(others)
        ends = self.consumer.end_offsets(others)
        for partition in others:
            log = self.logdir.partition(*partition)
            committed = known.get(partition)
            if committed is None:
                start = self._place(partition)
            else:
                start = max(committed.offset, log.log_start_offset)
            # The remaining offsets may hold no records, only transaction markers.
            if (
                start < ends[partition]
                and next(
                    iter(log.read(start, ends[partition], isolation=isolation)), None
                )
                is not None
            ):
                return False
        return True


class Printed(RebalanceListener):
    """Commits the records that were printed."""

    def __init__(self, consumer: Consumer, beginning: _Beginning | None) -> None:
        self.consumer = consumer
        #: Start position, or None if `auto_offset_reset` selects it.
        self.beginning = beginning
        #: Whether a commit was refused and must be retried.
        self.needs_retry = False

    def commit(self) -> None:
        try:
            self.consumer.commit()
            self.needs_retry = False
        except RebalanceInProgressError:
            self.needs_retry = True

    def retry_commit(self) -> None:
        """Retry a refused commit until the group has rebalanced, without reading."""
        while self.needs_retry:
            self.consumer.prepare_to_read()
            self.commit()
            if self.needs_retry:
                time.sleep(_RETRY_SECONDS)

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        if self.beginning is not None:
            self.beginning.seek(partitions)

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        if self.needs_retry:
            self.commit()

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Drop the pending commit: the new owners print its records again."""
        self.needs_retry = False


@click.command()
@log_directory_argument
@click.argument(
    "topics", metavar="TOPIC...", nargs=-1, required=True, shell_complete=complete_topic
)
@click.option(
    "--group",
    "group_id",
    metavar="GROUP",
    help="Continue at the committed offsets of this group, and commit for it.",
)
@click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    help="Start of partitions without a committed offset: offset, earliest, latest, time, or age as -10m.",
)
@click.option(
    "-n", "--count", type=click.IntRange(1), help="End after this many records."
)
@click.option(
    "--until-end",
    is_flag=True,
    help="End when all records are read, by the whole group if there is one.",
)
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
    isolation: Isolation,
    form: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Print the records of topics as they arrive, until Ctrl-C. With --group, continue
    at the committed offsets of the group.

    A record is printed before it is committed. After a crash some records are printed
    twice, and none is missing.
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
                group_id=group_id,
                auto_offset_reset=reset,
                isolation_level=isolation,
                enable_auto_commit=False,
            )
        )
        beginning = _Beginning(
            logdir, consumer, start, is_in_group=group_id is not None
        )
        begins_elsewhere = start != reset
        if begins_elsewhere:
            beginning.check(topics)
        printed = Printed(consumer, beginning if begins_elsewhere else None)
        consumer.subscribe(topics, listener=printed)
        out = stack.enter_context(Lines())
        wait = 0.0 if until_end else _POLL_SECONDS
        while left is None or left > 0:
            found = consumer.poll(wait, left)
            if not found and until_end:
                if beginning.is_all_read(topics, isolation):
                    break
                wait = _POLL_SECONDS
            if parts is None:
                print_lines(out, found.records(), full, as_json)
            else:
                print_formatted(out, parts, found.records())
            out.flush()
            if group_id is not None and found:
                printed.commit()
            if left is not None:
                left -= found.count
        printed.retry_commit()
