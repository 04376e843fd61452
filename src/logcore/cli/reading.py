"""`logcore read` and `logcore tail`: records of a log, as lines.

Rules:
- The log is opened read-only: no lock is taken and nothing is written, also while a writer runs.
- Bytes are shown as dump.shown() says: printable UTF-8 as text, all else as {"hex": "..."}.
- The end of `read` is fixed when the command starts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import click

import logcore
from logcore.cli.program import directory_argument, full_option, json_option
from logcore.cli.terminal import Lines, cells, fitted, plain_text, terminal_columns, time_text, to_json, wants_json

#: Of a record that is cut, so many columns stay however narrow the terminal is.
_LEAST_COLUMNS: Final = 24
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


@click.command()
@directory_argument
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
@full_option
@json_option
def read(
    directory: str,
    start: str,
    end: str,
    count: int | None,
    isolation: Any,
    form: str | None,
    full: bool,
    as_json: bool,
) -> None:
    """Print records from one place to another; the end is fixed when the command starts.

    Times mean the first record that is as young. A time of day without zone is UTC.
    """
    with logcore.open(directory, read_only=True) as log:
        now_ms = time.time_ns() // 1_000_000
        records = log.read(place_in(log, start, now_ms), place_in(log, end, now_ms), isolation=isolation)
        with Lines() as out:
            _print_records(out, _first(records, count), form, full, as_json)


@click.command()
@directory_argument
@click.option("-n", "--count", type=click.IntRange(0), default=20, show_default=True, help="The last so many records.")
@click.option("-f", "--follow", is_flag=True, help="Then print new ones as they come.")
@click.option("--timeout", type=click.FloatRange(0), help="With -f: end after so many seconds without a new record.")
@full_option
@json_option
def tail(directory: str, count: int, follow: bool, timeout: float | None, full: bool, as_json: bool) -> None:
    """Print the last records, and with -f what comes after them."""
    with logcore.open(directory, read_only=True) as log, Lines() as out:
        end = log.high_watermark
        _print_records(out, last_records(log, count), None, full, as_json)
        if follow:
            out.flush()
            for record in log.tail(end, timeout=timeout):
                _print_records(out, [record], None, full, as_json)
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


def _print_records(out: Lines, records: Iterable[logcore.Record], form: str | None, full: bool, as_json: bool) -> None:
    if form is not None:
        parts = _format_parts(form)
        for record in records:
            out.write_bytes(b"".join(part if isinstance(part, bytes) else part(record) for part in parts))
    elif wants_json(as_json):
        from logcore.inspect.dump import shown_record

        for record in records:
            out.write(to_json(shown_record(record)))
    else:
        columns = None if full else terminal_columns()
        for record in records:
            out.write(_line(record, columns))


def _line(record: logcore.Record, columns: int | None) -> str:
    """A record as a line; key, value and headers are cut so that it takes no more than so many columns."""
    from logcore.inspect.dump import shown_record

    row = shown_record(record)
    head = f"{record.offset}  {time_text(record.timestamp_ms)}  "
    key = plain_text(row["key"])
    value = plain_text(row["value"])
    headers = " ".join(f"{plain_text(one['key'])}={plain_text(one['value'])}" for one in row["headers"])
    if columns is not None:
        left = max(_LEAST_COLUMNS, columns - len(head))
        key = fitted(key, left // 3)
        headers = fitted(headers, left // 3)
        # Two blanks behind the key, two before the headers; what key and headers leave is the value's.
        value = fitted(value, left - cells(key) - cells(headers) - 4)
    return head + f"{key}  {value}  {headers}".rstrip()


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
