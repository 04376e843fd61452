"""The command line: logcore demo | append | read | tail | dump | verify | scrub | recover | info | topic | compact |
retention | bench.

Rules:
- On a terminal, lines and tables for people; in a pipe or with --json, one JSON object a line (NDJSON) on stdout.
  `info` without a directory and `demo` are for people everywhere, unless --json asks otherwise.
- Progress goes to stderr, and only to a terminal. NO_COLOR is respected.
- Exit codes: 0 done, 1 damage found (verify, scrub), something lost (recover) or a check failed (demo), 2 wrong usage
  or an error, 130 interrupted, 141 the reader of our output went away.
- Errors of the LogcoreError tree are one line, and one on what to do next; a traceback is a bug.
- Bytes are shown as dump.shown() says: printable UTF-8 as text, all else as {"hex": "..."}. `append --format
  ndjson` takes what `read` gives.
- Reading opens the log read-only: no lock is taken and nothing is written, also while a writer runs.

This module needs click, and rich on a terminal (pip install 'logcore[cli]'); __main__.py copes without them. It knows
no file format (inspect/ and log.py do); inputs.py reads what is appended, terminal.py prints,
measure.py measures.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, NoReturn, TypeVar

import attrs
import click

import logcore
from logcore.cli.inputs import InputRow, LineError, row_groups
from logcore.cli.terminal import (
    Lines,
    plain_text,
    print_table,
    print_verdicts,
    progress,
    size_text,
    time_text,
    to_json,
    wants_json,
)
from logcore.directory.topicfile import id_text
from logcore.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    InvalidNameError,
    InvalidRecordError,
    LogcoreError,
    LogNotFoundError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    ResourceError,
    StorageReadError,
)
from logcore.logdir import unopened
from logcore.names import parse_partition_name, partition_name
from logcore.partition.seals import Progress

_T = TypeVar("_T")

DAMAGED, FAILED, INTERRUPTED, READER_GONE = 1, 2, 130, 141

#: What to do about an error, by its class.
NEXT_STEPS: Final[tuple[tuple[type[LogcoreError], str], ...]] = (
    (LogNotFoundError, "check the path; `append --create` makes a partition directory such as data/orders-0"),
    (CorruptBatchError, "run `logcore verify` on the directory to see what is whole"),
    (CorruptLogError, "run `logcore verify` on the directory to see what is whole, `logcore recover` to save it"),
    (OffsetOutOfRangeError, "run `logcore info` on the directory to see which offsets it holds"),
    (InvalidNameError, "name the directory <topic>-<number>, such as orders-0"),
    (DiskFullError, "free some space and repeat the command from where it stopped"),
    (ResourceError, "close some files or processes and repeat the command"),
)


class _Group(click.Group):
    """Turns what ends a command into its exit code and at most two lines."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except LogcoreError as error:
            _fail(str(error), next((step for kind, step in NEXT_STEPS if isinstance(error, kind)), None))
        except BrokenPipeError:
            # Python flushes stdout once more when it exits; let it go where it does no harm.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(READER_GONE)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except OSError as error:  # of the files that we read and write for the user; those of a log are LogcoreErrors
            _fail(f"{error.filename or 'input or output'}: {error.strerror}", None)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _fail(message: str, advice: str | None) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    if advice:
        click.echo(f"next:  {advice}", err=True)
    raise click.exceptions.Exit(FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(logcore.__version__, prog_name="logcore")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Apache Kafka's log format as files you own: append to it, read it, look into it.

    DIR is a partition directory such as data/orders-0. Output is one JSON object a line in a pipe or with --json. Exit
    codes: 0 done, 1 damage found or a check failed, 2 wrong usage or an error.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False


_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line, also on a terminal.")
_directory = click.argument("directory", metavar="DIR", type=click.Path())


# -- append ----------------------------------------------------------------------------------------------------------


@main.command()
@_directory
@click.argument("source", metavar="[FILE]", default="-", type=click.Path(allow_dash=True))
@click.option("--format", "form", type=click.Choice(["lines", "ndjson", "csv"]), default="lines", show_default=True)
@click.option("--key-field", metavar="NAME", help="ndjson: this field is the key and the whole object the value.")
@click.option("--key", "key_columns", metavar="COLUMN[,COLUMN]", help="csv: the key is these columns, joined by '-'.")
@click.option("--create", is_flag=True, help="Make the directory if it is not there.")
@click.option("--durability", default="group", show_default=True, help="always, group, every(M), interval(MS) or os.")
@click.option("--config", "configs", metavar="NAME=VALUE", multiple=True, help="A setting by Kafka's name. Repeatable.")
@click.option("--batch", "batch_rows", type=click.IntRange(1), default=1000, show_default=True, help="Records a call.")
@_json_option
def append(
    directory: str,
    source: str,
    form: str,
    key_field: str | None,
    key_columns: str | None,
    create: bool,
    durability: str,
    configs: tuple[str, ...],
    batch_rows: int,
    as_json: bool,
) -> None:
    """Append records from FILE, or from stdin for "-" and by default.

    \b
    lines   each line is a value
    ndjson  each line is {"value": ..., "key": ..., "headers": [{"key": ..., "value": ...}], "timestamp_ms": ...};
            a value is text, null, {"hex": "..."}, {"base64": "..."}, or any other JSON, which is stored as JSON text
    csv     the first row names the columns; each further row becomes a JSON object of its texts

    A line that makes no record ends the command with its number; what came before it stays appended.
    """
    if key_field is not None and form != "ndjson":
        raise click.UsageError("--key-field goes with --format ndjson")
    if key_columns is not None and form != "csv":
        raise click.UsageError("--key goes with --format csv")
    config = dict(_setting(text) for text in configs)
    started = time.perf_counter()
    done = _Appended()
    with contextlib.ExitStack() as stack:
        stream: Any = sys.stdin.buffer if source == "-" else stack.enter_context(open(source, "rb"))
        log = stack.enter_context(logcore.open(directory, create=create, config=config, durability=durability))
        total = None if source == "-" else os.path.getsize(source)
        tick = stack.enter_context(progress("appending", total))
        columns = key_columns.split(",") if key_columns else []
        groups = row_groups(stream, form, batch_rows, key_field=key_field, key_columns=columns, tick=tick)
        done.first_offset = log.log_end_offset
        try:
            for group in groups:
                done.append(log, group)
        except LineError as error:
            _fail(f"line {error.line}: {error.reason}", done.advice())
        except LogcoreError as error:
            _fail(str(error), done.advice())
    seconds = time.perf_counter() - started
    if wants_json(as_json):
        facts = {
            "path": directory,
            "records": done.count,
            "first_offset": done.first_offset if done.count else None,
            "last_offset": done.last_offset if done.count else None,
            "durability": done.durability,
            "seconds": round(seconds, 6),
        }
        with Lines() as out:
            out.write(to_json(facts))
    else:
        click.echo(f"{done.text()} appended to {directory} in {seconds:.2f} s ({done.durability})")


class _Appended:
    """What one append command has stored so far."""

    def __init__(self) -> None:
        self.count = 0
        self.first_offset = self.last_offset = -1
        self.durability: str | None = None

    def text(self) -> str:
        if not self.count:
            return "0 records"
        return f"{self.count:,} records (offsets {self.first_offset} to {self.last_offset})"

    def advice(self) -> str:
        return f"{self.text()} from before it are appended and stay; mend the input and append the rest"

    def append(self, log: logcore.Log, group: list[InputRow]) -> None:
        """Stores records in one call; when one of them is refused, those before it, and raises LineError for it."""
        try:
            self._note(log.append_many([one.row for one in group]))
        except (InvalidRecordError, RecordTooLargeError):  # raised before anything is written
            for one in group:
                try:
                    self._note(log.append_many([one.row]))
                except (InvalidRecordError, RecordTooLargeError) as error:
                    raise LineError(one.line, str(error)) from error

    def _note(self, receipt: logcore.Receipt) -> None:
        self.count += receipt.last_offset + 1 - receipt.offset
        self.last_offset, self.durability = receipt.last_offset, receipt.durability


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--config")
    return name.strip(), value.strip()


# -- read and tail ---------------------------------------------------------------------------------------------------

_RELATIVE: Final = re.compile(r"-(\d{1,12})(ms|s|m|h|d|w)")
_UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def place_in(log: logcore.Log, text: str, now_ms: int) -> int:
    """The offset that --from or --to means; raises click.BadParameter for what means nothing."""
    if text in ("earliest", "latest"):
        return log.log_start_offset if text == "earliest" else log.high_watermark
    if text.isascii() and text.isdigit():
        return int(text)
    relative = _RELATIVE.fullmatch(text)
    if relative is not None:
        timestamp_ms = now_ms - int(relative[1]) * _UNIT_MS[relative[2]]
    elif text == "now":
        timestamp_ms = now_ms
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise click.BadParameter(
                f"{text!r} is none of: an offset, earliest, latest, now, a time such as 2026-01-31T12:00:00Z "
                "(UTC unless it says otherwise), or an age such as -10m, -1h, -2d"
            ) from None
        timestamp_ms = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    found = log.offset_for_timestamp(timestamp_ms)
    return log.high_watermark if found is None else found


@main.command()
@_directory
@click.option("--from", "start", default="earliest", show_default=True, help="Offset, earliest, time, or age as -10m.")
@click.option("--to", "end", default="latest", show_default=True, help="The same; the record there is not given.")
@click.option("-n", "--count", type=click.IntRange(0), help="At most this many records.")
@click.option(
    "--isolation",
    type=click.Choice(["read_uncommitted", "read_committed"]),
    default="read_uncommitted",
    show_default=True,
    help="read_committed leaves out what transactions aborted or have not ended.",
)
@click.option("-f", "--format", "form", help="As kcat's: %o offset, %T ms, %k key, %s value, %h headers, %K %S sizes.")
@_json_option
def read(
    directory: str, start: str, end: str, count: int | None, isolation: Any, form: str | None, as_json: bool
) -> None:
    """Print records from one place to another; the end is fixed when the command starts.

    Times mean the first record that is as young. A time of day without zone is UTC.
    """
    with logcore.open(directory, read_only=True) as log:
        now_ms = time.time_ns() // 1_000_000
        records = log.read(place_in(log, start, now_ms), place_in(log, end, now_ms), isolation=isolation)
        with Lines() as out:
            _print_records(out, _first(records, count), form, as_json)


@main.command()
@_directory
@click.option("-n", "--count", type=click.IntRange(0), default=20, show_default=True, help="The last so many records.")
@click.option("-f", "--follow", is_flag=True, help="Then print new ones as they come.")
@click.option("--timeout", type=click.FloatRange(0), help="With -f: end after so many seconds without a new record.")
@_json_option
def tail(directory: str, count: int, follow: bool, timeout: float | None, as_json: bool) -> None:
    """Print the last records, and with -f what comes after them."""
    with logcore.open(directory, read_only=True) as log, Lines() as out:
        end = log.high_watermark
        _print_records(out, last_records(log, count), None, as_json)
        if follow:
            out.flush()
            for record in log.tail(end, timeout=timeout):
                _print_records(out, [record], None, as_json)
                if log.high_watermark <= record.offset + 1:  # nothing more to wait for: show it now
                    out.flush()


def _first(records: Iterator[logcore.Record], count: int | None) -> Iterator[logcore.Record]:
    if count == 0:
        return
    for number, record in enumerate(records, 1):
        yield record
        if number == count:
            return


def last_records(log: logcore.Log, count: int) -> list[logcore.Record]:
    """The last records below the high watermark: looks further back as long as gaps in the offsets hide some."""
    end, span = log.high_watermark, count
    while count:
        start = max(log.log_start_offset, end - span)
        records = list(log.read(start, end))
        if len(records) >= count or start == log.log_start_offset:
            return records[-count:]
        span *= 4
    return []


def _print_records(out: Lines, records: Iterable[logcore.Record], form: str | None, as_json: bool) -> None:
    from logcore.inspect.dump import shown_record

    if form is not None:
        parts = _format_parts(form)
        for record in records:
            out.write_bytes(b"".join(part if isinstance(part, bytes) else part(record) for part in parts))
    elif wants_json(as_json):
        for record in records:
            out.write(to_json(shown_record(record)))
    else:
        for record in records:
            row = shown_record(record)
            headers = " ".join(f"{plain_text(one['key'])}={plain_text(one['value'])}" for one in row["headers"])
            fields = (time_text(record.timestamp_ms), plain_text(row["key"]), plain_text(row["value"]), headers)
            out.write(f"{record.offset}  " + "  ".join(fields).rstrip())


_FORMATS: Final[dict[str, Callable[[logcore.Record], bytes]]] = {
    "o": lambda record: b"%d" % record.offset,
    "T": lambda record: b"%d" % record.timestamp_ms,
    "k": lambda record: record.key or b"",
    "s": lambda record: record.value or b"",
    "K": lambda record: b"%d" % (-1 if record.key is None else len(record.key)),
    "S": lambda record: b"%d" % (-1 if record.value is None else len(record.value)),
    "h": lambda record: b",".join(
        name.encode("utf-8", "surrogateescape") + b"=" + (value or b"") for name, value in record.headers
    ),
    "%": lambda record: b"%",
}
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


def _format_parts(form: str) -> list[bytes | Callable[[logcore.Record], bytes]]:
    """kcat's format string in pieces: bytes as they are, and functions of a record."""
    parts: list[bytes | Callable[[logcore.Record], bytes]] = []
    signs = iter(form)
    for sign in signs:
        if sign not in "%\\":
            parts.append(sign.encode("utf-8", "surrogateescape"))
            continue
        code = next(signs, "")
        known = _FORMATS.get(code) if sign == "%" else _ESCAPES.get(code)
        if known is None:
            known_codes = f"%{' %'.join(_FORMATS)} \\n \\t \\r \\0"
            raise click.BadParameter(f"unknown {sign + code!r}; known are {known_codes}", param_hint="-f")
        parts.append(known)
    return parts


# -- dump, verify, recover, info -------------------------------------------------------------------------------------


@main.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@click.option("--records", is_flag=True, help="Of .log files also the records.")
@_json_option
def dump(files: tuple[str, ...], records: bool, as_json: bool) -> None:
    """Show what files of a log hold: .log, .index, .timeindex, .txnindex, .snapshot, checkpoints and the small ones.

    A damaged batch is shown as such; `logcore verify` judges a whole directory.
    """
    from logcore.inspect.dump import dump as rows_of

    with Lines() as out:
        for file in files:
            if wants_json(as_json):
                for row in rows_of(file, records=records):
                    out.write(to_json({"file": file, **row}))
                continue
            out.write(file)
            for row in rows_of(file, records=records):
                fields = " ".join(f"{name}={plain_text(value)}" for name, value in row.items() if name != "type")
                indent = "      " if row["type"] == "record" else "  "
                out.write(f"{indent}{row['type']}  {fields}")


@main.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=click.Path())
@_json_option
def verify(directories: tuple[str, ...], as_json: bool) -> None:
    """Judge every file of a partition or log directory, read-only; exit code 1 when something is damaged.

    ok: as it should be. warning: opening the log mends it by itself. damaged: data may be lost or wrong. The .log files
    are walked batch by batch, CRCs included.
    """
    from logcore.inspect.verify import Verdict
    from logcore.inspect.verify import verify as verdicts_of

    found: list[Verdict] = []
    streaming = wants_json(as_json)
    with Lines() as out, progress("verifying", None) as tick:
        for directory in directories:
            for verdict in verdicts_of(directory):
                found.append(verdict)
                tick(1)
                if streaming:
                    out.write(to_json(verdict.as_dict()))
    counts = {status: sum(verdict.status == status for verdict in found) for status in ("damaged", "warning", "ok")}
    if not streaming:
        print_verdicts(found, within=directories[0].rstrip(os.sep) if len(directories) == 1 else "")
        batches, records = sum(one.batches for one in found), sum(one.records for one in found)
        size = size_text(sum(one.size_bytes for one in found if one.kind == "log"))
        click.echo(f"{batches:,} batches, {records:,} records, {size} checked: " + _counted(counts))
    if counts["damaged"]:
        raise click.exceptions.Exit(DAMAGED)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no files"


@main.command()
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="DST", type=click.Path())
@_json_option
def recover(source: str, target: str, as_json: bool) -> None:
    """Copy all that is whole of a damaged partition or log directory SRC to a new directory DST.

    Batches are copied as they are, around the damage, with their offsets; SRC is not changed, and no process may be
    writing it. Exit code 1 when something is lost; what is lost is listed, by bytes and by offsets.
    """
    from logcore.inspect.salvage import Part, salvage

    with progress("reading", None) as tick:
        report = salvage(source, target, tick=tick)
    if wants_json(as_json):
        with Lines() as out:
            out.write(to_json(report.as_dict()))
    else:
        headers = ("partition", "files", "batches", "records", "bytes", "start", "end", "losses")
        rows = [
            (
                os.path.basename(one.target),
                one.files,
                one.batches,
                one.records,
                one.size_bytes,
                one.log_start_offset,
                one.log_end_offset,
                len(one.lost),
            )
            for one in report.partitions
        ]
        print_table(headers, rows, right=range(1, len(headers)))

        def every(name: str) -> list[Part]:
            return [part for one in (report, *report.partitions) for part in getattr(one, name)]

        for part in every("lost"):
            click.echo(f"lost: {part}")
        for part in every("left_out"):
            click.echo(f"left out, no loss: {part}")
        click.echo("all of it was saved" if report.is_whole else "what is listed as lost is not in the copy")
    if not report.is_whole:
        raise click.exceptions.Exit(DAMAGED)


@main.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path())
@_json_option
def info(directory: str | None, as_json: bool) -> None:
    """Versions and what is installed; with DIR, the partition there or all partitions in a log directory."""
    if directory is None:
        from logcore.cli.installation import installation, installation_text

        click.echo(to_json(installation()) if as_json else installation_text())
        return
    from logcore.cli.glance import describe
    from logcore.inspect.survey import partitions

    found = [describe(path) for path in partitions(directory)]
    if wants_json(as_json):
        with Lines() as out:
            for one in found:
                out.write(to_json(one.as_dict()))
        return
    headers = (
        "partition",
        "segments",
        "bytes",
        "start",
        "end",
        "first time",
        "newest",
        "codecs",
    )
    rows = [
        (
            os.path.basename(os.path.realpath(one.path)),
            one.segments,
            one.size_bytes,
            one.log_start_offset,
            one.high_watermark,
            time_text(one.first_timestamp_ms, "seconds"),
            time_text(one.max_timestamp_ms, "seconds"),
            ", ".join(f"{count:,} {codec}" for codec, count in one.codecs.items()),
        )
        for one in found
    ]
    print_table(headers, rows, right=(1, 2, 3, 4))


# -- topics and their upkeep -----------------------------------------------------------------------------------------


@main.group(cls=_Group)
def topic() -> None:
    """Create, list, describe, alter and delete the topics of a log directory."""


_config_option = click.option(
    "--config", "configs", metavar="NAME=VALUE", multiple=True, help="A setting by Kafka's name. Repeatable."
)
_log_directory = click.argument("directory", metavar="DATA", type=click.Path())


@topic.command("create")
@_log_directory
@click.argument("name")
@click.option("--partitions", type=click.IntRange(1), default=1, show_default=True)
@_config_option
def topic_create(directory: str, name: str, partitions: int, configs: tuple[str, ...]) -> None:
    """Make the topic NAME in the log directory DATA, which is made if it is not there."""
    with logcore.open_dir(directory, create=True) as logdir:
        logdir.create_topic(name, partitions, dict(map(_setting, configs)))


@topic.command("list")
@_log_directory
@_json_option
def topic_list(directory: str, as_json: bool) -> None:
    """Names of the topics in DATA, with their partitions and bytes."""
    with logcore.open_dir(directory, read_only=True) as logdir:
        rows = []
        for name in logdir.topics():
            numbers = logdir.partitions(name)
            rows.append((name, len(numbers), sum(logdir.size_bytes(name, number) for number in numbers)))
    if wants_json(as_json):
        with Lines() as out:
            for name, count, size_bytes in rows:
                out.write(to_json({"topic": name, "partitions": count, "size_bytes": size_bytes}))
    else:
        print_table(("topic", "partitions", "bytes"), rows, right=(1, 2))


@topic.command("describe")
@_log_directory
@click.argument("name")
@_json_option
def topic_describe(directory: str, name: str, as_json: bool) -> None:
    """The id, settings and partitions of the topic NAME."""
    with logcore.open_dir(directory, read_only=True) as logdir:
        found = logdir.describe_topic(name)
        rows = []
        for part in found.partitions:
            log = logdir.partition(name, part.partition)
            facts = log.statistics()
            rows.append((part.partition, facts.segments, facts.size_bytes, log.log_start_offset, log.high_watermark))
    names = ("partition", "segments", "size_bytes", "log_start_offset", "high_watermark")
    if wants_json(as_json):
        with Lines() as out:
            partitions = [dict(zip(names, row, strict=True)) for row in rows]
            facts_ = {"topic": name, "topic_id": id_text(found.topic_id), "config": dict(found.overrides)}
            out.write(to_json({**facts_, "partitions": partitions}))
        return
    settings = ", ".join(f"{key}={value}" for key, value in sorted(found.overrides.items())) or "the defaults"
    click.echo(f"{name}  id {id_text(found.topic_id)}  {settings}")
    print_table(("partition", "segments", "bytes", "start", "end"), rows, right=range(5))


@topic.command("alter")
@_log_directory
@click.argument("name")
@_config_option
@click.option("--unset", metavar="NAME", multiple=True, help="Take a setting back to its default. Repeatable.")
@click.option("--partitions", type=click.IntRange(1), help="Raise their number to this.")
def topic_alter(
    directory: str, name: str, configs: tuple[str, ...], unset: tuple[str, ...], partitions: int | None
) -> None:
    """Change settings of the topic NAME, or its number of partitions."""
    changes: dict[str, object | None] = {**dict(map(_setting, configs)), **dict.fromkeys(unset)}
    if not changes and partitions is None:
        raise click.UsageError("say what to change: --config, --unset or --partitions")
    with logcore.open_dir(directory) as logdir:
        logdir.alter_topic(name, changes, check_only=True)
        if partitions is not None:
            logdir.add_partitions(name, partitions)
        if changes:
            logdir.alter_topic(name, changes)


@topic.command("delete")
@_log_directory
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def topic_delete(directory: str, name: str, yes: bool) -> None:
    """Delete the topic NAME with all its records."""
    with logcore.open_dir(directory) as logdir:
        count = len(logdir.partitions(name))
        if not yes:
            click.confirm(f"delete {name} with {count} partition{'s' * (count > 1)} and all records?", abort=True)
        logdir.delete_topic(name)


@topic.command("fork")
@_log_directory
@click.argument("name")
@click.argument("new_name")
@click.option("--at", "at_offset", type=click.IntRange(0), help="Up to this offset, else all that is there.")
def topic_fork(directory: str, name: str, new_name: str, at_offset: int | None) -> None:
    """Make the topic NEW_NAME with the records of NAME: hard links, so that it takes no room of its own."""
    with logcore.open_dir(directory) as logdir:
        logdir.fork(name, at_offset, new_name)


def _open_partitions(stack: contextlib.ExitStack, directory: str, configs: tuple[str, ...]) -> list[logcore.Log]:
    """The log of a partition directory, or all logs of a log directory, with their topics' settings."""
    return [opened() for _, opened in _partitions_to_open(stack, directory, configs)]


def _partitions_to_open(
    stack: contextlib.ExitStack, directory: str, configs: tuple[str, ...] = ()
) -> list[tuple[str, Callable[[], logcore.Log]]]:
    """The path of each such partition, and what opens it."""
    settings = dict(map(_setting, configs))
    real = os.path.realpath(directory)
    with contextlib.suppress(InvalidNameError):
        name, number = parse_partition_name(os.path.basename(real))
        logdir = stack.enter_context(logcore.open_dir(os.path.dirname(real), config=settings))
        if name in logdir and number in logdir.partitions(name):
            return [(real, functools.partial(logdir.partition, name, number))]
        raise LogNotFoundError("there is no such partition", path=directory)
    logdir = stack.enter_context(logcore.open_dir(real, config=settings))
    return [
        (os.path.join(real, partition_name(name, number)), functools.partial(logdir.partition, name, number))
        for name in logdir.topics()
        for number in logdir.partitions(name)
    ]


def _finished(steps: Generator[Progress, None, _T], tick: Callable[[int], None]) -> _T:
    """What work returns that is done in steps."""
    done = 0
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        tick(step.done_bytes - done)
        done = step.done_bytes


@main.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option(
    "--force", is_flag=True, help="Also logs that are not dirty enough yet, with what they hold rolled first."
)
@click.option("--memory", type=click.IntRange(1), default=128, show_default=True, help="MiB for the table of keys.")
@_config_option
@_json_option
def compact(directory: str, force: bool, memory: int, configs: tuple[str, ...], as_json: bool) -> None:
    """Compact a partition, or all partitions of a log directory whose cleanup.policy says so.

    Of each key the last record stays. --config cleanup.policy=compact sets what the directory itself does not say.
    """
    from logcore.cleaner import cleaning, plan_of

    with contextlib.ExitStack() as stack, Lines() as out:
        rows = []
        for log in _open_partitions(stack, directory, configs):
            if not log.config.is_compacted:
                continue
            if force:
                log.roll()
            plan = plan_of(log)
            with progress(os.path.basename(log.path), plan.clean_bytes + 2 * plan.cleanable_bytes) as tick:
                report = _finished(cleaning(log, force=force, memory_bytes=memory << 20), tick)
            if report is None:
                continue
            if wants_json(as_json):
                out.write(to_json(attrs.asdict(report)))
            rows.append(
                (
                    os.path.basename(log.path),
                    report.records_read,
                    report.records_kept,
                    report.bytes_before,
                    report.bytes_after,
                    report.segments_before,
                    report.segments_after,
                )
            )
    if not wants_json(as_json):
        headers = ("partition", "records", "kept", "bytes", "left", "segments", "left")
        print_table(headers, rows, right=range(1, 7))


@main.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@_json_option
def scrub(directory: str, as_json: bool) -> None:
    """Read every byte of a partition, or of all partitions of a log directory, and say what is damaged.

    A sealed segment has to be what was sealed, byte for byte; where there is no seal, or another program wrote the file
    since, its batches are checked, and it gets a seal. Exit code 1 when something is damaged. Takes the writer's lock;
    `logcore verify` checks the same beside a running writer, and makes no seals.
    """
    found: list[logcore.ScrubReport] = []
    with contextlib.ExitStack() as stack, Lines() as out:
        for path, opened in _partitions_to_open(stack, directory):
            try:
                log = opened()
                with progress(os.path.basename(path), log.statistics().size_bytes) as tick:
                    report = _finished(log.scrubbing(), tick)
            except (CorruptLogError, CorruptBatchError, StorageReadError) as error:
                report = unopened(path, error)  # the others are looked at all the same
            found.append(report)
            if wants_json(as_json):
                out.write(to_json({**attrs.asdict(report), "is_sound": report.is_sound}))
    if not wants_json(as_json):
        rows = [
            (os.path.basename(one.path), one.segments, one.sealed, one.skipped, one.checked_bytes, len(one.findings))
            for one in found
        ]
        print_table(("partition", "segments", "sealed", "skipped", "bytes", "damaged"), rows, right=range(1, 6))
        for one in found:
            for finding in one.findings:
                click.echo(str(finding))
    if not all(one.is_sound for one in found):
        raise click.exceptions.Exit(DAMAGED)


@main.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--delete", "is_delete", is_flag=True, help="Do it. Without this nothing is changed.")
@click.option("--hold", "groups", metavar="GROUP", multiple=True, help="Keep what this group has not read. Repeatable.")
@_config_option
@_json_option
def retention(
    directory: str, is_delete: bool, groups: tuple[str, ...], configs: tuple[str, ...], as_json: bool
) -> None:
    """Say which segments the settings would delete: retention.ms, retention.bytes, and the log start.

    --config retention.ms=... asks what other settings would do, for topics that do not set them.
    """
    from logcore.format.grouprecords import OFFSETS_TOPIC
    from logcore.groupoffsets import committed_in
    from logcore.retention import hold_for

    policy = hold_for(*groups)
    with contextlib.ExitStack() as stack, Lines() as out:
        rows = []
        logs = _open_partitions(stack, directory, configs)
        offsets_logs = [log for log in logs if parse_partition_name(os.path.basename(log.path))[0] == OFFSETS_TOPIC]
        committed = committed_in([*offsets_logs]) if groups else {}
        for log in logs:
            known = committed.get(parse_partition_name(os.path.basename(log.path)), {})
            facts = log.upkeep.facts(committed=known)
            count = max(0, min(policy(facts), facts.deletable))
            gone = facts.segments[:count]
            if is_delete:
                log.retain(policy=policy, committed=known)
            row = {
                "partition": os.path.basename(log.path),
                "segments": len(facts.segments),
                "deleted" if is_delete else "would_delete": count,
                "size_bytes": sum(one.size_bytes for one in gone),
                "log_start_offset": gone[-1].end_offset if gone else facts.log_start,
            }
            if wants_json(as_json):
                out.write(to_json(row))
            rows.append(tuple(row.values()))
    if not wants_json(as_json):
        done = "deleted" if is_delete else "would go"
        print_table(("partition", "segments", done, "bytes", "start then"), rows, right=range(1, 5))


# -- bench -----------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path(exists=True, file_okay=False))
@click.option("--seconds", type=click.FloatRange(0.01), default=1.0, show_default=True, help="For each measurement.")
@click.option("--records", type=click.IntRange(1), help="At most this many records for each measurement.")
@_json_option
def bench(directory: str, seconds: float, records: int | None, as_json: bool) -> None:
    """Measure logcore on the disk that holds DIR, each figure against the bare work in the same run.

    Records of 16 + 200 bytes, in a directory that is removed afterwards. ratio 1.00 would be as fast as the bare system
    calls (appending) or as copying the bytes once and computing their CRC-32C (the rest).
    """
    from logcore.cli.measure import measure

    place = tempfile.mkdtemp(prefix=".logcore-bench-", dir=directory)
    rows = []
    try:
        for row in measure(place, seconds, records or 1 << 62):
            rows.append(row)
            if wants_json(as_json):
                with Lines() as out:
                    out.write(to_json(row))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if not wants_json(as_json):
        headers = ("what", "records/s", "MB/s", "against", "records/s", "ratio")
        cells = [
            (
                row["what"],
                row["records_per_second"],
                f"{row['megabytes_per_second']:.1f}",
                row["against"],
                row["floor_records_per_second"],
                f"{row['ratio']:.2f}",
            )
            for row in rows
        ]
        print_table(headers, cells, right=(1, 2, 4, 5))


# -- demo ------------------------------------------------------------------------------------------------------------


@main.command()
@click.option(
    "--dir", "directory", type=click.Path(file_okay=False), help="Where to put the log, else a temporary place."
)
@click.option("--keep", is_flag=True, help="Leave the temporary directory when done.")
@click.option("--rows", type=click.IntRange(10), help="Only so many flights.")
@click.option("--worker-internal", "worker", hidden=True, type=click.Path())
def demo(directory: str | None, keep: bool, rows: int | None, worker: str | None) -> None:
    """The main job on real data: 336,776 flights appended, killed half way, recovered, read back in three shapes."""
    from logcore.cli.demo import run, work

    if worker is not None:
        work(worker, rows)
    elif not run(directory, keep=keep, rows=rows):
        raise click.exceptions.Exit(DAMAGED)
