"""`logcore append` and `logcore produce`: store lines of text as records of a partition
or of a topic.

Rules:
- Both commands store records in the same way. `append` locks the directory exclusively
  if possible. `produce` shares the directory, and its options are named as in Kafka's
  producer.
- `append --format ndjson` accepts the output of `read`.
- A refused record ends the command with the number of its line. Records of earlier
  lines remain stored.
- In a topic, the key chooses the partition as in Kafka's Java client; see
  partitioner.py.

This module does not parse: record_parsing.py turns lines into rows.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final

import attrs
import click

import logcore
from logcore.cli.arguments import complete_topic_or_file, named_partitions
from logcore.cli.opening import open_log_to_write, open_to_write, shared_option
from logcore.cli.options import (
    config_option,
    directory_argument,
    fail,
    json_option,
    setting,
)
from logcore.cli.record_parsing import InputFormat, InputRow, LineError
from logcore.cli.terminal import Lines, progress, to_json, wants_json
from logcore.errors import InvalidRecordError, LogcoreError, RecordTooLargeError
from logcore.metadata.filenames import partition_of

#: Durability for each value of a producer's setting `acks`.
_ACKS = {"0": "os", "1": "os", "all": "group", "-1": "group"}


@attrs.frozen
class _NewTopic:
    """Options of a topic that does not exist yet."""

    #: Whether a missing directory and topic are created.
    create: bool
    #: Number of partitions.
    partitions: int
    #: Settings.
    config: Mapping[str, str]


@attrs.frozen
class _Target:
    """Destination of the records."""

    #: A log directory, or the directory of one partition.
    directory: str
    #: TOPIC or TOPIC:PARTITION; None if the directory is one partition.
    topic: str | None
    new_topic: _NewTopic
    #: Durability of each append.
    durability: str
    #: Whether other processes may open the directory for writing.
    shared: bool

    def open(
        self, stack: contextlib.ExitStack
    ) -> tuple[str | None, dict[int, logcore.Log]]:
        """Open the destination; return the topic and the log of each partition."""
        options = {
            "create": self.new_topic.create,
            "config": self.new_topic.config,
            "durability": self.durability,
        }
        if self.topic is None:
            return None, {
                0: stack.enter_context(
                    open_log_to_write(self.directory, shared=self.shared, **options)
                )
            }
        logdir = stack.enter_context(
            open_to_write(self.directory, shared=self.shared, **options)
        )
        return _partitions_of(logdir, self.topic, self.new_topic)


_INPUT_OPTIONS: Final = (
    click.option(
        "--format",
        "form",
        type=click.Choice(["lines", "ndjson", "csv"]),
        default="lines",
        show_default=True,
    ),
    click.option(
        "-K",
        "--key-delimiter",
        "--key-separator",
        "key_delimiter",
        metavar="TEXT",
        help="lines: the text before it is the key. \\t and \\0 are recognized.",
    ),
    click.option(
        "--key-field",
        metavar="NAME",
        help="ndjson: this field is the key; the whole object is the value.",
    ),
    click.option(
        "--create",
        is_flag=True,
        help="Create the directory and the topic if they are missing.",
    ),
    click.option(
        "--partitions",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Number of partitions of a topic that is created.",
    ),
    config_option,
    click.option(
        "--batch",
        "batch_rows",
        type=click.IntRange(1),
        default=1000,
        show_default=True,
        help="Records per call.",
    ),
)


def _input_options(
    columns_option: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options that both commands have.

    The command gets them as `records` and `new_topic`. `columns_option` is the name of
    its option for the key columns of csv.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(
            *,
            form: str,
            create: bool,
            partitions: int,
            configs: tuple[str, ...],
            batch_rows: int,
            **options: Any,
        ) -> None:
            key_delimiter = options.pop("key_delimiter")
            key_field = options.pop("key_field")
            key_columns = options.pop("key_columns")
            _check_input(form, key_delimiter, key_field, key_columns, columns_option)
            records = InputFormat(
                form,
                _delimiter(key_delimiter),
                key_field,
                _columns(key_columns),
                batch_rows,
            )
            config = dict(map(setting, configs))
            new_topic = _NewTopic(create, partitions, config)
            command(records=records, new_topic=new_topic, **options)

        columns = click.option(
            columns_option,
            "key_columns",
            metavar="COLUMN[,COLUMN]",
            help="csv: the key is these columns, joined by '-'.",
        )
        for option in (columns, *reversed(_INPUT_OPTIONS)):
            run = option(run)
        return run

    return add


@click.command()
@directory_argument
@click.argument(
    "words",
    metavar="[TOPIC[:PARTITION]] [FILE]",
    nargs=-1,
    shell_complete=complete_topic_or_file,
)
@_input_options("--key")
@click.option(
    "--durability",
    default="group",
    show_default=True,
    help="always, group, every(M), interval(MS) or os.",
)
@shared_option
@json_option
def append(
    directory: str,
    words: tuple[str, ...],
    records: InputFormat,
    new_topic: _NewTopic,
    durability: str,
    shared: bool,
    as_json: bool,
) -> None:
    """Append records from FILE, or from stdin if FILE is "-" or missing.

    DIR is the directory of a partition, such as data/orders-0, or a directory of topics
    that contains TOPIC. In a topic, the key chooses the partition as in Kafka's Java
    client. Records without a key are appended to one partition for 16 KiB, then to
    another.

    \b
    lines   each line is a value; with -K: the text before the delimiter is the key, a line without it has a null key
    ndjson  each line is {"value": ..., "key": ..., "headers": [{"key": ..., "value": ...}], "timestamp_ms": ...};
            a value is text, null, {"hex": "..."}, {"base64": "..."}, or any other JSON, which is stored as JSON text
    csv     the first row names the columns; each further row becomes a JSON object of its texts

    If a line is not a valid record, the command stops and prints the line number.
    Records of earlier lines remain stored.
    """
    topic, source = _topic_and_file(directory, words)
    target = _Target(directory, topic, new_topic, durability, shared)
    _store(target, source, records, as_json=as_json, is_verbose=False)


@click.command()
@click.argument("place", metavar="DIR/TOPIC", type=click.Path())
@click.argument("source", metavar="[FILE]", default="-", type=click.Path())
@click.option(
    "-k", "--record-key", metavar="KEY", help="The key of records that have none."
)
@click.option(
    "-H",
    "--header",
    "headers",
    metavar="NAME=VALUE",
    multiple=True,
    help="A header of each record.",
)
@click.option(
    "-p",
    "--partition",
    type=click.IntRange(0),
    help="The partition of all records; by default, keys choose it.",
)
@click.option(
    "--acks",
    type=click.Choice(list(_ACKS)),
    default="all",
    show_default=True,
    help="all, -1: each call waits for the disk; 0, 1: for the operating system only.",
)
@_input_options("--key-columns")
@click.option(
    "-v",
    "--verbose",
    "is_verbose",
    is_flag=True,
    help="Print the partition and offset of each record.",
)
@json_option
def produce(
    place: str,
    source: str,
    record_key: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    acks: str,
    records: InputFormat,
    new_topic: _NewTopic,
    is_verbose: bool,
    as_json: bool,
) -> None:
    """Send records to a topic that other processes may write, from FILE, or from stdin
    if FILE is "-" or missing.

    The command works like `append`, but its options are named as in Kafka's producer.
    DIR/TOPIC is a topic in a directory of topics. Other processes can write the
    directory if they share it as well. `logcore append --help` describes the formats.
    """
    key = None
    if record_key is not None:
        key = record_key.encode("utf-8", "surrogateescape")
    records = attrs.evolve(records, key=key, headers=tuple(map(_header, headers)))
    directory, topic = os.path.split(place)
    if not topic or (":" in topic and partition is not None):
        raise click.BadParameter(
            f"expected DIR/TOPIC, with -p for a partition; found {place!r}",
            param_hint="'DIR/TOPIC'",
        )
    if partition is not None:
        topic = f"{topic}:{partition}"
    target = _Target(directory or ".", topic, new_topic, _ACKS[acks], shared=True)
    _store(target, source, records, as_json=as_json, is_verbose=is_verbose)


def _store(
    target: _Target,
    source: str,
    records: InputFormat,
    *,
    as_json: bool,
    is_verbose: bool,
) -> None:
    """Store all records of a file or of stdin, and print how many were stored."""
    started = time.perf_counter()
    done = _AppendCounts(target.directory)
    with done.reporting_interruptions(), contextlib.ExitStack() as stack:
        stream: Any = (
            sys.stdin.buffer
            if source == "-"
            else stack.enter_context(open(source, "rb"))
        )
        done.set_target(*target.open(stack))
        total = None
        if source != "-":
            total = os.path.getsize(source)
        tick: Callable[[int], None] = _show_no_progress
        if is_verbose:  # a progress bar would mix with its lines
            done.print_rows = _receipt_printer(
                stack.enter_context(Lines()), as_json=wants_json(as_json)
            )
        else:
            tick = stack.enter_context(progress("appending", total))
        stack.callback(done.record_ends)  # before the logs are closed
        try:
            for group in records.groups(stream, tick):
                done.append(group)
        except LineError as error:
            done.record_ends()
            fail(f"line {error.line}: {error.reason}", done.advice())
        except LogcoreError as error:
            done.record_ends()
            fail(str(error), done.advice())
    seconds = time.perf_counter() - started
    if wants_json(as_json):
        with Lines() as out:
            out.write(
                to_json(
                    {
                        **done.facts(),
                        "durability": done.durability,
                        "seconds": round(seconds, 6),
                    }
                )
            )
    else:
        click.echo(
            f"{done.text()} appended to {done.name} in {seconds:.2f} s ({done.durability})"
        )


def _show_no_progress(_: object) -> None:
    """Do nothing: the progress callback if no progress is shown."""


def _receipt_printer(
    out: Lines, *, as_json: bool
) -> Callable[[list[InputRow], logcore.Receipt], None]:
    """Return a function that prints the partition and offset of each record of a call."""

    def print_rows(rows: list[InputRow], receipt: logcore.Receipt) -> None:
        for offset, row in enumerate(rows, receipt.offset):
            if as_json:
                facts = {
                    "line": row.line,
                    "topic": receipt.topic,
                    "partition": receipt.partition,
                    "offset": offset,
                }
                out.write(to_json(facts))
            else:
                out.write(
                    f"line {row.line}: {receipt.topic}:{receipt.partition} offset {offset}"
                )
        out.flush()

    return print_rows


def _check_input(
    form: str,
    key_delimiter: str | None,
    key_field: str | None,
    key_columns: str | None,
    columns_option: str,
) -> None:
    if key_delimiter is not None and form != "lines":
        raise click.UsageError("--key-delimiter requires --format lines")
    if key_field is not None and form != "ndjson":
        raise click.UsageError("--key-field requires --format ndjson")
    if key_columns is not None and form != "csv":
        raise click.UsageError(f"{columns_option} requires --format csv")


def _columns(text: str | None) -> list[str]:
    if not text:
        return []
    return text.split(",")


def _header(text: str) -> tuple[str, bytes]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise click.BadParameter(
            f"expected NAME=VALUE, found {text!r}", param_hint="'-H'"
        )
    return name, value.encode("utf-8", "surrogateescape")


def _topic_and_file(directory: str, words: tuple[str, ...]) -> tuple[str | None, str]:
    """Return the topic, or None if DIR is the directory of a partition, and the input."""
    is_partition = (
        partition_of(os.path.basename(os.path.realpath(directory))) is not None
        and len(words) < 2
    )
    if os.path.isdir(directory):
        from logcore.inspect.catalog import partitions

        with contextlib.suppress(LogcoreError):
            is_partition = partitions(directory) == [directory]
    max_words = 2
    if is_partition:
        max_words = 1
    if len(words) > max_words:
        raise click.UsageError(f"too many arguments: {' '.join(words[max_words:])}")
    if is_partition:
        return None, words[0] if words else "-"
    if not words:
        fail(
            f"{directory} is not the directory of a partition, such as data/orders-0",
            f"add the name of a topic after {directory}",
        )
    return words[0], words[1] if len(words) > 1 else "-"


def _partitions_of(
    logdir: logcore.LogDir, text: str, new_topic: _NewTopic
) -> tuple[str, dict[int, logcore.Log]]:
    """Return the topic and the logs of TOPIC[:PARTITION]."""
    name = text.partition(":")[0]
    if new_topic.create and name not in logdir:
        logdir.create_topic(name, new_topic.partitions, new_topic.config)
    name, numbers = named_partitions(logdir, text)
    return name, {number: logdir.partition(name, number) for number in numbers}


_ESCAPES = {"\\t": "\t", "\\n": "\n", "\\r": "\r", "\\0": "\0", "\\\\": "\\"}


def _delimiter(text: str | None) -> bytes | None:
    if text is None:
        return None
    if not text:
        raise click.BadParameter(
            "expected some text, but it is empty", param_hint="'--key-delimiter'"
        )
    delimiter = _ESCAPES.get(text, text).encode("utf-8", "surrogateescape")
    if b"\n" in delimiter:
        raise click.BadParameter(
            "it must not contain a newline, because a newline ends the line",
            param_hint="'--key-delimiter'",
        )
    return delimiter


@attrs.define
class _Span:
    """Range of offsets that this command stored in one partition."""

    first: int
    last: int
    #: Number of records that this command stored. It is smaller than the range if other
    #: processes stored records in between.
    count: int

    def text(self) -> str:
        share = ""
        if self.count <= self.last - self.first:
            share = f", {self.count:,} of them"
        return f"offsets {self.first} to {self.last}{share}"


class _AppendCounts:
    """Counts of the records that one command has stored so far."""

    def __init__(self, directory: str) -> None:
        #: Called with the records and the receipt of each call.
        self.print_rows: Callable[[list[InputRow], logcore.Receipt], None] = (
            lambda rows, receipt: None
        )
        #: Name of the destination, for messages.
        self.name = directory
        self.durability: str | None = None
        self._directory = directory
        self._topic: str | None = None
        self._logs: dict[int, logcore.Log] = {}
        #: For each log, the offset after the last record known to be from this command.
        self._ends: dict[int, int] = {}
        self._spans: dict[int, _Span] = {}

    def set_target(self, topic: str | None, logs: dict[int, logcore.Log]) -> None:
        from logcore.partitioner import Partitioner

        self._topic = topic
        self._logs = logs
        self._ends = {number: log.log_end_offset for number, log in logs.items()}
        if topic is not None:
            self.name = f"{topic} in {self._directory}"
        self._partitioner: Partitioner | None = None
        if len(logs) > 1:
            self._partitioner = Partitioner(tuple(logs))

    def record_ends(self) -> None:
        """Count all records up to the end of each log that only this process can write.

        That includes records of a call that was interrupted before it returned.
        """
        for number, log in self._logs.items():
            if (
                not log.is_closed
                and log.host.writer.sharing is None
                and log.log_end_offset > self._ends[number]
            ):
                self._count_rows(number, self._ends[number], log.log_end_offset - 1)

    def _count_rows(self, number: int, first: int, last: int) -> None:
        self._ends[number] = last + 1
        span = self._spans.setdefault(number, _Span(first, last, 0))
        span.last = last
        span.count += last - first + 1

    @contextlib.contextmanager
    def reporting_interruptions(self) -> Generator[None, None, None]:
        """Print the stored records after Ctrl-C, when the logs are closed and their
        records are on disk.
        """
        try:
            yield
        except KeyboardInterrupt:
            click.echo(f"interrupted: {self.text()} remain appended", err=True)
            raise

    @property
    def count(self) -> int:
        return sum(span.count for span in self._spans.values())

    def text(self) -> str:
        if not self._spans:
            return "0 records"
        if self._topic is None:
            (span,) = self._spans.values()
            places = span.text()
        else:
            places = ", ".join(
                f"{self._topic}:{number} {span.text()}"
                for number, span in sorted(self._spans.items())
            )
        return f"{self.count:,} records ({places})"

    def facts(self) -> dict[str, Any]:
        if self._topic is None:
            span = next(iter(self._spans.values()), None)
            first = None if span is None else span.first
            last = None if span is None else span.last
            return {
                "path": self._directory,
                "records": self.count,
                "first_offset": first,
                "last_offset": last,
            }
        found = [
            {"partition": number, "first_offset": span.first, "last_offset": span.last}
            for number, span in sorted(self._spans.items())
        ]
        return {
            "path": self._directory,
            "topic": self._topic,
            "records": self.count,
            "partitions": found,
        }

    def advice(self) -> str:
        if self._partitioner is None:
            return f"{self.text()} of earlier lines remain appended; fix the input and append the rest"
        return (
            f"{self.text()} remain appended, possibly including later lines of other partitions; "
            "--batch 1 stores line by line"
        )

    def append(self, group: list[InputRow]) -> None:
        """Store records, in one call for each partition.

        If one record is refused, the records before it are stored.

        Raises:
            LineError: a record was refused.
        """
        for number, rows in self._by_partition(group):
            try:
                self._store(number, rows)
            except (
                InvalidRecordError,
                RecordTooLargeError,
            ):
                # The group was refused before a write. Append record by record, to find
                # which one is refused.
                for row in rows:
                    try:
                        self._store(number, [row])
                    except (InvalidRecordError, RecordTooLargeError) as error:
                        raise LineError(row.line, str(error)) from error

    def _store(self, number: int, rows: list[InputRow]) -> None:
        receipt = self._logs[number].append_many([row.row for row in rows])
        self.durability = receipt.durability
        self._count_rows(number, receipt.offset, receipt.last_offset)
        self.print_rows(rows, receipt)

    def _by_partition(
        self, group: list[InputRow]
    ) -> Iterable[tuple[int, list[InputRow]]]:
        if self._partitioner is None:
            (number,) = self._logs
            return [(number, group)]
        found: dict[int, list[InputRow]] = {}
        now_ms = time.time_ns() // 1_000_000
        for row in group:
            key, value, headers, timestamp_ms = row.row
            # All partitions get the same time, so that a read that merges by time keeps
            # the records of a group together.
            if timestamp_ms is None:
                row = InputRow(row.line, (key, value, headers, now_ms))
            found.setdefault(self._partitioner.choose(key, value), []).append(row)
        return found.items()
