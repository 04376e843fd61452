"""Parsers of records: turn lines, NDJSON or CSV into rows for append_many, each with its
line number.

Rules:
- Input is parsed as it arrives: a row is not delayed until the next line arrives.
- A line that is not a valid record raises LineError with its number, after all earlier
  rows were yielded.
- NDJSON written by dump.shown_record() is parsed to the same record.

This module opens no files and appends no records.
"""

from __future__ import annotations

import base64
import csv
import functools
import io
import json
import select
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import attrs

from logcore.cli.terminal import to_json

#: Maximum number of bytes read from the stream at once.
_CHUNK_BYTES: Final = 1 << 20


class LineError(Exception):
    """A line of the input is not a valid record."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


class InputRow(NamedTuple):
    """One record and its line number."""

    line: int
    row: tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int | None]


@attrs.frozen
class InputFormat:
    """How the lines of an input become records."""

    #: "lines", "ndjson" or "csv".
    form: str
    #: For lines, ends the key. A line without it has a null key, as in kcat.
    key_delimiter: bytes | None
    #: For ndjson: the field that is the key. The whole object is the value.
    key_field: str | None
    #: For csv: the columns that form the key.
    key_columns: list[str]
    #: Maximum number of records per group.
    batch_rows: int
    #: The key of records that have none.
    key: bytes | None = None
    #: Headers that are appended to the headers of each record.
    headers: tuple[tuple[str, bytes], ...] = ()

    def groups(
        self, stream: Any, tick: Callable[[int], None]
    ) -> Iterator[list[InputRow]]:
        """Yield the rows of a binary stream in groups, one group per call of append_many.

        `tick` is called with the number of bytes of each read.

        Raises:
            LineError: a line is not a valid record.
        """
        lines = _lines(stream, tick)
        if self.form == "csv":
            inputs = _from_csv(lines, self.key_columns)
        else:
            parse: Callable[[bytes], Any] | None = None
            if self.form == "ndjson":
                parse = functools.partial(_from_json, key_field=self.key_field)
            elif self.key_delimiter is not None:
                parse = functools.partial(_from_keyed, delimiter=self.key_delimiter)
            inputs = _from_lines(lines, parse)
        groups = _groups(inputs, self.batch_rows)
        if self.key is None and not self.headers:
            return groups
        return ([self._completed(row) for row in group] for group in groups)

    def _completed(self, input_row: InputRow) -> InputRow:
        key, value, headers, timestamp_ms = input_row.row
        if key is None:
            key = self.key
        return InputRow(
            input_row.line, (key, value, [*headers, *self.headers], timestamp_ms)
        )


def _lines(stream: Any, tick: Callable[[int], None]) -> Iterator[bytes | None]:
    """Yield lines without their line ends.

    None is yielded when no more input is available yet, so that the caller can store
    the rows that it has.
    """
    remainder = b""
    while data := stream.read1(_CHUNK_BYTES):
        tick(len(data))
        *complete, remainder = (
            (remainder + data).split(b"\n") if remainder else data.split(b"\n")
        )
        yield from complete
        if not _has_more(stream):
            yield None
    if remainder:
        yield remainder


def _has_more(stream: Any) -> bool:
    try:
        return bool(select.select([stream.fileno()], [], [], 0)[0])
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return True


def _groups(
    inputs: Iterator[InputRow | None], max_rows: int
) -> Iterator[list[InputRow]]:
    """Yield records in groups of at most `most`.

    A LineError is raised after the group of the preceding rows was yielded.
    """
    group: list[InputRow] = []
    trouble: LineError | None = None
    while True:
        try:
            row = next(inputs)
        except StopIteration:
            break
        except LineError as error:
            trouble = error
            break
        if row is not None:
            group.append(row)
        if group and (row is None or len(group) >= max_rows):
            yield group
            group = []
    if group:
        yield group
    if trouble is not None:
        raise trouble


def _from_lines(
    lines: Iterator[bytes | None], parse: Callable[[bytes], Any] | None
) -> Iterator[InputRow | None]:
    number = 0
    for line in lines:
        if line is None:
            yield None
            continue
        number += 1
        if parse is None:
            yield InputRow(number, (None, line, [], None))
            continue
        try:
            row = parse(line)
        except (ValueError, RecursionError) as error:
            raise LineError(number, str(error) or "nested too deeply") from error
        if row is not None:
            yield InputRow(number, row)


def _from_keyed(line: bytes, delimiter: bytes) -> tuple[Any, ...]:
    """Return a row from a line whose key ends at the first delimiter."""
    key, sign, value = line.partition(delimiter)
    if sign:
        return (key, value, [], None)
    return (None, line, [], None)


#: Fields in the output of `read`. Topic, partition and offset are ignored.
_FIELDS: Final = frozenset(
    {
        "key",
        "value",
        "headers",
        "timestamp_ms",
        "topic",
        "partition",
        "offset",
        "timestamp",
    }
)


def _from_json(line: bytes, key_field: str | None) -> tuple[Any, ...] | None:
    """Return the row of one NDJSON line, or None for a blank line.

    Raises:
        ValueError: the line is not a valid record; the text is the reason.
    """
    if not line.strip():
        return None
    try:
        found = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(found, dict):
        raise ValueError(f"a record must be a JSON object, not {type(found).__name__}")
    if key_field is not None:
        if key_field not in found:
            raise ValueError(f"there is no field {key_field!r}")
        return _to_bytes(found[key_field]), line.rstrip(b"\r"), [], None
    unknown = sorted(found.keys() - _FIELDS)
    if unknown or "value" not in found:
        raise ValueError(
            (
                f"unknown field {unknown[0]!r}"
                if unknown
                else "there is no field 'value'"
            )
            + "; known are value, key, headers, timestamp_ms. To store whole objects, give --key-field"
        )
    timestamp_ms = found.get("timestamp_ms")
    if timestamp_ms is not None and (
        isinstance(timestamp_ms, bool) or not isinstance(timestamp_ms, int)
    ):
        raise ValueError("timestamp_ms must be an integer of milliseconds")
    return (
        _to_bytes(found.get("key")),
        _to_bytes(found["value"]),
        _headers(found.get("headers")),
        timestamp_ms,
    )


def _to_bytes(value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and len(value) == 1:
        if isinstance(value.get("hex"), str):
            return bytes.fromhex(value["hex"])
        if isinstance(value.get("base64"), str):
            return base64.b64decode(value["base64"], validate=True)
    return to_json(value).encode()


def _headers(given: object) -> list[tuple[str, bytes | None]]:
    """Parse headers in one of three forms.

    The forms are [{"key": name, "value": ...}, ...], [[name, ...], ...] and {name: ...}.
    """
    if given is None:
        return []
    pairs: list[Any] = [None]
    if isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list):
        pairs = given
    headers = []
    for pair in pairs:
        if isinstance(pair, dict) and pair.keys() == {"key", "value"}:
            pair = pair["key"], pair["value"]
        name = None
        if isinstance(pair, (list, tuple)) and len(pair) == 2:
            name = _to_bytes(pair[0])
        if name is None:
            raise ValueError('headers must be [{"key": name, "value": ...}, ...]')
        headers.append((name.decode("utf-8", "surrogateescape"), _to_bytes(pair[1])))
    return headers


def _from_csv(
    lines: Iterator[bytes | None], key_columns: list[str]
) -> Iterator[InputRow | None]:
    """Yield each CSV row as a JSON object of its texts.

    A quoted field may span lines, so the csv module must read the lines itself.
    """

    def texts() -> Iterator[str]:
        for number, line in enumerate((line for line in lines if line is not None), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8") + "\n"
            except UnicodeDecodeError as error:
                raise LineError(
                    number, f"not UTF-8: {error.reason} at byte {error.start}"
                ) from error

    reader = csv.reader(texts(), strict=True)
    try:
        names = next(reader, None)
        if names is None:
            return
        twice = [name for slot, name in enumerate(names) if name in names[:slot]]
        if twice:  # a JSON object would keep only the last of equal names
            raise LineError(1, f"there are two columns {twice[0]!r}")
        missing = [name for name in key_columns if name not in names]
        if missing:
            raise LineError(
                1, f"there is no column {missing[0]!r}; there are {', '.join(names)}"
            )
        slots = [names.index(name) for name in key_columns]
        for row in reader:
            if not row:
                continue
            if len(row) != len(names):
                raise LineError(
                    reader.line_num,
                    f"{len(row)} fields, but the first row has {len(names)}",
                )
            key = None
            if slots:
                key = "-".join(row[slot] for slot in slots).encode()
            yield InputRow(
                reader.line_num,
                (key, to_json(dict(zip(names, row, strict=True))).encode(), [], None),
            )
    except csv.Error as error:
        raise LineError(reader.line_num, str(error)) from error
