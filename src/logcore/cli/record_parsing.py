"""Text as records: lines, NDJSON or CSV become rows for append_many, each with the
number of its line.

Rules:
- Input is taken as it comes: a row is not held back because the next line is not there
  yet.
- A line that makes no record is a LineError with its number, after the rows that stood
  before it.
- NDJSON that dump.shown_record() made gives the same record again.

This module opens nothing and appends nothing.
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

from logcore.cli.terminal import to_json

#: Bytes taken from the stream at once.
_CHUNK_BYTES: Final = 1 << 20


class LineError(Exception):
    """A line of the input that makes no record."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason


class InputRow(NamedTuple):
    """One record and the line it came from."""

    line: int
    row: tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int | None]


def row_groups(
    stream: Any,
    form: str,
    most: int,
    *,
    key_delimiter: bytes | None = None,
    key_field: str | None,
    key_columns: list[str],
    tick: Callable[[int], None],
) -> Iterator[list[InputRow]]:
    """Rows of a binary stream in groups of at most that many, one group for each call
    of append_many.

    form: "lines", "ndjson" or "csv". key_delimiter: of lines, ends the key; a line
    without it is a value with a null key, as for kcat. key_field: of ndjson, the field
    that is the key, the whole object being the value.
    key_columns: of csv. tick is called with each number of bytes taken. Raises
    LineError.
    """
    lines = _lines(stream, tick)
    if form == "csv":
        inputs = _from_csv(lines, key_columns)
    else:
        parse: Callable[[bytes], Any] | None = None
        if form == "ndjson":
            parse = functools.partial(_from_json, key_field=key_field)
        elif key_delimiter is not None:
            parse = functools.partial(_from_keyed, delimiter=key_delimiter)
        inputs = _from_lines(lines, parse)
    return _groups(inputs, most)


def _lines(stream: Any, tick: Callable[[int], None]) -> Iterator[bytes | None]:
    """Lines without their end; None wherever the input has no more for now, so that
    what was read is not held back.
    """
    rest = b""
    while data := stream.read1(_CHUNK_BYTES):
        tick(len(data))
        *whole, rest = (rest + data).split(b"\n") if rest else data.split(b"\n")
        yield from whole
        if not _has_more(stream):
            yield None
    if rest:
        yield rest


def _has_more(stream: Any) -> bool:
    try:
        return bool(select.select([stream.fileno()], [], [], 0)[0])
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return True


def _groups(inputs: Iterator[InputRow | None], most: int) -> Iterator[list[InputRow]]:
    """Records in groups of at most that many; a bad line comes after the group of what
    was before it.
    """
    group: list[InputRow] = []
    trouble: LineError | None = None
    while True:
        try:
            one = next(inputs)
        except StopIteration:
            break
        except LineError as error:
            trouble = error
            break
        if one is not None:
            group.append(one)
        if group and (one is None or len(group) >= most):
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
    """A row from a line whose key ends at the first delimiter."""
    key, sign, value = line.partition(delimiter)
    if sign:
        return (key, value, [], None)
    return (None, line, [], None)


#: Those of what `read` gives; the places of a record are not taken over.
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
    """A row from one NDJSON line, None from a blank one; ValueError says what is wrong."""
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
    """[{"key": name, "value": ...}, ...], [[name, ...], ...] or {name: ...}."""
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
    """Rows as JSON objects of their texts. A quoted field may span lines, so csv has to
    see the lines itself.
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
        if twice:  # an object would keep the last of them and lose the others
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
