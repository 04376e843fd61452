"""`logcore read` and `logcore tail`: print records of a partition or a topic as lines.

Rules:
- dump.shown() formats bytes: printable UTF-8 as text, other bytes as {"hex": "..."}.
- The end of `read` is fixed when the command starts.
- Records of a topic are merged by timestamp; records of one partition keep the order of
  their offsets. Alternatively, partitions are printed one after the other.

arguments.py opens the named logs, and filters.py selects records.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

import logcore
from logcore.cli.arguments import (
    NamedLogs,
    from_option,
    isolation_option,
    open_source,
    to_option,
    topic_argument,
)
from logcore.cli.filters import Where, where_option
from logcore.cli.options import directory_argument, full_option, json_option
from logcore.cli.schemas import SchemaSource, schema_options
from logcore.cli.terminal import (
    Lines,
    cells,
    fitted,
    plain_text,
    terminal_columns,
    time_text,
    to_json,
    wants_json,
)

if TYPE_CHECKING:
    from logcore.schemas import ValueDecoder

#: Minimum number of columns of a shortened record, however narrow the terminal is.
_MIN_COLUMNS: Final = 24

#: A record to print: from the directory of one partition, or from a topic.
_Found = logcore.Record | logcore.TopicRecord
#: Function that formats a record for one code of a format string.
Part = Callable[[_Found], bytes]

format_option = click.option(
    "--format",
    "form",
    help="Format as in kcat: %t topic, %p partition, %o offset, %T ms, %k key, %s value, %h headers, %K %S sizes.",
)


@click.command()
@directory_argument
@topic_argument
@from_option
@to_option
@click.option(
    "-n", "--count", type=click.IntRange(0), help="At most this many records."
)
@where_option
@click.option(
    "--order",
    type=click.Choice(["time", "partition"]),
    default="time",
    show_default=True,
    help="Order of a topic's records: merged by time, or one partition after the other, which is faster.",
)
@isolation_option
@format_option
@schema_options
@full_option
@json_option
def read(
    directory: str,
    topic: str | None,
    start: str,
    end: str,
    count: int | None,
    conditions: tuple[str, ...],
    order: str,
    isolation: Any,
    form: str | None,
    schema_source: SchemaSource,
    full: bool,
    as_json: bool,
) -> None:
    """Print records from one place to another; the end is fixed when the command
    starts.

    DIR is the directory of a partition, such as data/orders-0, or a directory of topics
    that contains TOPIC. Places are looked up in each partition. A time means the first
    record with this or a later timestamp. A time of day without a zone is UTC.

    \b
    --where 'key=anna'         equal; != is not equal
    --where 'value~^[0-9]+$'   matches a regular expression; !~ has no match
    --where 'header.trace'     has the header; 'key' is not null, '!key' is null
    """
    where = Where.parse(conditions)
    with contextlib.ExitStack() as stack:
        source = open_source(stack, directory, topic)
        show = record_to_dict_with(schema_source.open_decoder(directory, source.logdir))
        now_ms = time.time_ns() // 1_000_000
        starts = source.places(start, now_ms)
        ends = source.places(end, now_ms)
        streams = {
            number: _matching_records(
                log, starts[number], ends[number], where, isolation
            )
            for number, log in source.logs.items()
        }
        with Lines() as out:
            printer = _RecordPrinter(out, source, form, full, as_json, show)
            printer.print(itertools.islice(_merged(source, streams, order), count))


@click.command()
@directory_argument
@topic_argument
@click.option(
    "-n",
    "--count",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Number of records to print.",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Then print new records as they arrive."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    help="With -f: end after this many seconds without a new record.",
)
@where_option
@schema_options
@full_option
@json_option
def tail(
    directory: str,
    topic: str | None,
    count: int,
    follow: bool,
    timeout: float | None,
    conditions: tuple[str, ...],
    schema_source: SchemaSource,
    full: bool,
    as_json: bool,
) -> None:
    """Print the last records of a partition or topic, and with -f also new records.

    DIR, TOPIC and --where work as in `logcore read`. The last records of a topic are
    the records with the latest timestamps.
    """
    where = Where.parse(conditions)
    with contextlib.ExitStack() as stack:
        source = open_source(stack, directory, topic)
        show = record_to_dict_with(schema_source.open_decoder(directory, source.logdir))
        ends = {number: log.high_watermark for number, log in source.logs.items()}
        streams = {
            number: iter(last_records(log, count, where))
            for number, log in source.logs.items()
        }
        if count:
            last = list(_merged(source, streams, "time"))[-count:]
        else:
            last = []
        with Lines() as out:
            printer = _RecordPrinter(out, source, None, full, as_json, show)
            printer.print(last)
            if follow:
                out.flush()
                for record in _following(source, ends, timeout):
                    if where is None or where.passes(record):
                        printer.print([record])
                    # No later record is known, so show this one now.
                    if _is_last(source, record):
                        out.flush()


def _following(
    source: NamedLogs, ends: Mapping[int, int], timeout: float | None
) -> Iterator[_Found]:
    if source.logdir is None:
        ((number, log),) = source.logs.items()
        return log.tail(ends[number], timeout=timeout)
    return source.logdir.tail(
        source.topic, ends, partitions=tuple(source.logs), timeout=timeout
    )


def _is_last(source: NamedLogs, record: _Found) -> bool:
    if isinstance(record, logcore.TopicRecord):
        number = record.partition
    else:
        number = next(iter(source.logs))
    return source.logs[number].high_watermark <= record.offset + 1


def _matching_records(
    log: logcore.Log,
    start: int,
    end: int,
    where: Where | None,
    isolation: Any = "read_uncommitted",
) -> Iterator[logcore.Record]:
    if where is None:
        return log.read(start, end, isolation=isolation)
    parts = log.scan(start, end, isolation=isolation)
    return (record for part in parts for record in where.select(part).records())


def _merged(
    source: NamedLogs, streams: Mapping[int, Iterator[logcore.Record]], order: str
) -> Iterator[_Found]:
    """Yield the records of all partitions; records of a topic include their partition."""
    if source.logdir is None:
        return itertools.chain.from_iterable(streams.values())
    named = [
        _with_topic(source.topic, number, stream) for number, stream in streams.items()
    ]
    if order == "partition":
        return itertools.chain.from_iterable(named)
    return heapq.merge(*named, key=attrgetter("timestamp_ms"))


def _with_topic(
    topic: str, partition: int, records: Iterable[logcore.Record]
) -> Iterator[logcore.TopicRecord]:
    return (logcore.TopicRecord(topic, partition, *record) for record in records)


def last_records(
    log: logcore.Log, count: int, where: Where | None = None
) -> list[logcore.Record]:
    """Return the last records below the high watermark.

    The search moves further back until it finds enough records.
    """
    end = log.high_watermark
    span = count
    while count:
        start = max(log.log_start_offset, end - span)
        records = collections.deque(
            _matching_records(log, start, end, where), maxlen=count
        )
        if len(records) == count or start == log.log_start_offset:
            return list(records)
        span *= 4
    return []


def _to_bytes(value: Any) -> bytes:
    """Return a key or value of a row as the bytes that --format prints."""
    text = value if isinstance(value, str) else to_json(value)
    return b"" if value is None else text.encode("utf-8", "replace")


def print_formatted(
    out: Lines, parts: Iterable[bytes | Part], records: Iterable[_Found]
) -> None:
    """Print records in the format that format_parts() parsed."""
    for record in records:
        out.write_bytes(
            b"".join(
                part if isinstance(part, bytes) else part(record) for part in parts
            )
        )


def _record_to_dict(record: _Found) -> dict[str, Any]:
    """Return a record as a dict for JSON."""
    from logcore.inspect.dump import shown_record

    if isinstance(record, logcore.TopicRecord):
        return {
            "topic": record.topic,
            "partition": record.partition,
            **shown_record(logcore.Record(*record[2:])),
        }
    return shown_record(record)


#: Function that returns a record as a dict for JSON.
RecordToDict = Callable[[_Found], dict[str, Any]]


@attrs.frozen
class _RecordPrinter:
    """Prints records according to the options of a command."""

    out: Lines
    source: NamedLogs
    #: Format as in kcat, None for lines.
    form: str | None
    full: bool
    as_json: bool
    show: RecordToDict

    def print(self, records: Iterable[_Found]) -> None:
        source = self.source
        show = self.show
        if self.form is None:
            print_lines(self.out, records, self.full, self.as_json, show)
            return
        own: dict[str, Part] = {"t": lambda _: source.topic.encode()}
        if show is not _record_to_dict:
            own["k"] = lambda record: _to_bytes(show(record)["key"])
            own["s"] = lambda record: _to_bytes(show(record)["value"])
        if source.logdir is None:
            ((number, _),) = source.logs.items()
            own["p"] = lambda _: b"%d" % number
        print_formatted(self.out, format_parts(self.form, own), records)


def record_to_dict_with(decoder: ValueDecoder | None) -> RecordToDict:
    """Return a function like _shown(), with decoded keys and values."""
    if decoder is None:
        return _record_to_dict

    def show(record: _Found) -> dict[str, Any]:
        row = _record_to_dict(record)
        for name, data, is_key in (
            ("key", record.key, True),
            ("value", record.value, False),
        ):
            piece = decoder.decode(data, record.headers, is_key=is_key)
            row[name] = piece.value
            if piece.schema is not None:
                row[f"{name}_schema"] = piece.schema
            if piece.error is not None:
                row[f"{name}_error"] = piece.error
        return row

    return show


def print_lines(
    out: Lines,
    records: Iterable[_Found],
    full: bool,
    as_json: bool,
    show: RecordToDict = _record_to_dict,
) -> None:
    """Print one line per record: JSON in a pipe, otherwise text for people.

    With `full`, lines are not shortened to the width of the terminal.
    """
    if wants_json(as_json):
        for record in records:
            out.write(to_json(show(record)))
        return
    columns = None
    if not full:
        columns = terminal_columns()
    for record in records:
        out.write(_line(record, columns, show))


def _line(record: _Found, columns: int | None, show: RecordToDict) -> str:
    """Return a record as a line of at most this many columns.

    Key, value and headers are shortened to fit.
    """
    row = show(record)
    if "partition" in row:
        place = f"{row['partition']}:{record.offset}"
    else:
        place = f"{record.offset}"
    head = f"{place}  {time_text(record.timestamp_ms)}  "
    key = plain_text(row["key"]) + _reason(row, "key_error")
    value = plain_text(row["value"]) + _reason(row, "value_error")
    headers = " ".join(
        f"{plain_text(header['key'])}={plain_text(header['value'])}"
        for header in row["headers"]
    )
    if columns is not None:
        left = max(_MIN_COLUMNS, columns - len(head))
        key = fitted(key, left // 3)
        headers = fitted(headers, left // 3)
        # Two blanks follow the key, and two precede the headers. The value gets the
        # remaining columns.
        value = fitted(value, left - cells(key) - cells(headers) - 4)
    return head + f"{key}  {value}  {headers}".rstrip()


def _reason(row: Mapping[str, Any], name: str) -> str:
    """Return why a key or value is not decoded, in brackets."""
    return f" [{plain_text(row[name])}]" if name in row else ""


_FORMATS: Final[dict[str, Callable[[_Found], bytes]]] = {
    "t": lambda record: record.topic.encode(),  # type: ignore[union-attr]  # of a topic; see format_parts()
    "p": lambda record: b"%d" % record.partition,  # type: ignore[union-attr]
    "o": lambda record: b"%d" % record.offset,
    "T": lambda record: b"%d" % record.timestamp_ms,
    "k": lambda record: record.key or b"",
    "s": lambda record: record.value or b"",
    "K": lambda record: b"%d" % (-1 if record.key is None else len(record.key)),
    "S": lambda record: b"%d" % (-1 if record.value is None else len(record.value)),
    "h": lambda record: b",".join(
        name.encode("utf-8", "surrogateescape") + b"=" + (value or b"")
        for name, value in record.headers
    ),
    "%": lambda record: b"%",
}
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def format_parts(
    form: str, own: Mapping[str, Part] = MappingProxyType({})
) -> list[bytes | Part]:
    """Split kcat's format string into literal bytes and functions of a record.

    `own` replaces the functions of some codes for records that are not from a topic.

    Raises:
        click.BadParameter: the format string is invalid.
    """
    known_forms = {**_FORMATS, **own}
    parts: list[bytes | Part] = []
    signs = iter(form)
    for sign in signs:
        if sign not in "%\\":
            parts.append(sign.encode("utf-8", "surrogateescape"))
            continue
        code = next(signs, "")
        known: bytes | Part | None
        if sign == "%":
            known = known_forms.get(code)
        else:
            known = _ESCAPES.get(code)
        if known is None:
            known_codes = f"%{' %'.join(known_forms)} \\n \\t \\r \\0"
            raise click.BadParameter(
                f"unknown {sign + code!r}; known are {known_codes}",
                param_hint="--format",
            )
        parts.append(known)
    return parts
