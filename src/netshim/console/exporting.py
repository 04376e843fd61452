"""Messages of a page as files, and commands that read one message outside the console.

NDJSON and CSV contain text, and hex digits of bytes that are not text. Parquet contains the
stored bytes, and needs the extra `arrow`.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Iterable
from typing import Final

import attrs

from logcore.format.columns import TOPIC_COLUMNS, arrow_schema
from logcore.format.html import format_time
from logcore.inspect.dump import shown_record
from netshim.console.messages import MessageRow

#: Names of the file formats, with their media types.
EXPORT_FORMATS: Final = {
    "ndjson": "application/x-ndjson",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
}
#: Columns of CSV.
_COLUMNS: Final = (
    "partition",
    "offset",
    "timestamp_ms",
    "time_utc",
    "key",
    "value",
    "headers",
)


def export_messages(
    messages: Iterable[MessageRow], topic: str, file_format: str
) -> bytes:
    """Return messages as a file of one of the EXPORT_FORMATS.

    NDJSON has the lines of `logcore read --json`.

    Raises:
        MissingDependencyError: Parquet needs a package that is not installed.
    """
    if file_format == "parquet":
        return _parquet(list(messages), topic)
    if file_format == "csv":
        out = io.StringIO()
        table = csv.writer(out)
        table.writerow(_COLUMNS)
        table.writerows(_cells(message) for message in messages)
        # Names of headers may have lone surrogates, which UTF-8 cannot encode.
        return out.getvalue().encode("utf-8", "replace")
    lines = [
        json.dumps(
            {
                "topic": topic,
                "partition": message.partition,
                **shown_record(message.record),
            },
            ensure_ascii=False,
        )
        for message in messages
    ]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def _parquet(messages: list[MessageRow], topic: str) -> bytes:
    """Return messages in the columns of `logcore export`."""
    schema = arrow_schema(TOPIC_COLUMNS)
    # After arrow_schema(), which raises MissingDependencyError without the package.
    import pyarrow as pa
    import pyarrow.parquet

    rows = [
        {
            "topic": topic,
            "partition": message.partition,
            "offset": message.record.offset,
            # -1 means no timestamp.
            "timestamp": message.timestamp_ms if message.timestamp_ms >= 0 else None,
            "key": message.record.key,
            "value": message.record.value,
            "headers": [
                {"key": name.encode("utf-8", "replace").decode(), "value": value}
                for name, value in message.record.headers
            ],
        }
        for message in messages
    ]
    out = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=schema)
    pyarrow.parquet.write_table(table, out, compression="zstd")
    return out.getvalue()


def _cells(message: MessageRow) -> list[object]:
    row = shown_record(message.record)
    return [
        message.partition,
        row["offset"],
        # The number for programs, and the time for people.
        row["timestamp_ms"],
        format_time(row["timestamp_ms"]),
        _text(row["key"]),
        _text(row["value"]),
        json.dumps(row["headers"], ensure_ascii=False) if row["headers"] else "",
    ]


def _text(value: object) -> str:
    """Return text unchanged, null as an empty text, and other bytes as hex:..."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"hex:{value['hex']}"
    return str(value)


@attrs.frozen
class ReadCommand:
    """A command that reads one message."""

    name: str
    text: str


def commands_for(
    *, path: str, directory: str, topic: str, partition: int, offset: int,
    url: str, bootstrap: str,
) -> list[ReadCommand]:  # fmt: skip
    """Return commands that read a message: from a broker, from this console, and from
    the files.
    """
    quoted = shlex.quote(topic)
    python = (
        "import logcore\n"
        f"with logcore.open({path!r}, read_only=True) as log:\n"
        f"    print(log.get({offset}))"
    )
    commands = [
        ReadCommand(
            "logcore",
            f"logcore read {shlex.quote(directory)} {quoted}:{partition} "
            f"--from {offset} -n 1",
        ),
        ReadCommand("Python", python),
        # The console answers this address with NDJSON.
        ReadCommand("curl", f"curl -s {shlex.quote(url)}"),
    ]
    # First, because most readers use a client of Kafka.
    if bootstrap:
        commands.insert(
            0,
            ReadCommand(
                "kcat",
                f"kcat -C -b {bootstrap} -t {quoted} -p {partition} -o {offset} -c 1",
            ),
        )
    return commands
