"""Parses the values of records as JSON. An invalid value does not end the iteration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, NoReturn

from logcore.errors import InvalidRecordError
from logcore.format.columns import RecordColumns


class JsonRecord(NamedTuple):
    """A record with its value parsed as JSON."""

    #: None for a log outside a directory of topics.
    topic: str | None
    partition: int | None
    offset: int
    #: Milliseconds since 1970, or -1 if the record has no timestamp.
    timestamp_ms: int
    key: bytes | None
    #: The parsed value. None if the value is null, or if `error` is set.
    value: Any
    #: An InvalidRecordError that names the offset, if the value is not JSON.
    error: InvalidRecordError | None = None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)


def parse_json(value: bytes) -> Any:
    """Parse bytes that are one JSON value in UTF-8, without NaN and infinities.

    Raises:
        ValueError: the bytes are not such a value, or the value is nested too deeply.
    """
    try:
        return _DECODER.decode(value.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_records(chunks: Iterable[RecordColumns]) -> Iterator[JsonRecord]:
    """Yield each record with its value parsed as JSON."""
    for columns in chunks:
        topic = columns.topic
        partition = columns.partition
        for offset, timestamp_ms, key, value, _ in columns.records():
            parsed: Any = None
            error = None
            if value is not None:
                try:
                    parsed = parse_json(value)
                except ValueError as reason:
                    name = None
                    if topic is not None:
                        name = f"{topic}-{partition}"
                    error = InvalidRecordError(
                        f"the value is not JSON: {reason}",
                        path=name,
                        offset=offset,
                        found=repr(value[:40]),
                    )
            yield JsonRecord(topic, partition, offset, timestamp_ms, key, parsed, error)
