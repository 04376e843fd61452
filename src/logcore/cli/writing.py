"""`logcore append`: text as records of a log.

Rules:
- `append --format ndjson` takes what `read` gives.
- A record that is refused ends the command with the number of its line; what came before it stays.

This module parses nothing: inputs.py makes rows of lines.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Generator
from typing import Any

import click

import logcore
from logcore.cli.inputs import InputRow, LineError, row_groups
from logcore.cli.program import config_option, directory_argument, fail, json_option, setting
from logcore.cli.terminal import Lines, progress, to_json, wants_json
from logcore.errors import InvalidRecordError, LogcoreError, RecordTooLargeError


@click.command()
@directory_argument
@click.argument("source", metavar="[FILE]", default="-", type=click.Path(allow_dash=True))
@click.option("--format", "form", type=click.Choice(["lines", "ndjson", "csv"]), default="lines", show_default=True)
@click.option("--key-field", metavar="NAME", help="ndjson: this field is the key and the whole object the value.")
@click.option("--key", "key_columns", metavar="COLUMN[,COLUMN]", help="csv: the key is these columns, joined by '-'.")
@click.option("--create", is_flag=True, help="Make the directory if it is not there.")
@click.option("--durability", default="group", show_default=True, help="always, group, every(M), interval(MS) or os.")
@config_option
@click.option("--batch", "batch_rows", type=click.IntRange(1), default=1000, show_default=True, help="Records a call.")
@json_option
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
    config = dict(setting(text) for text in configs)
    started = time.perf_counter()
    done = _Appended()
    with done.telling_interruptions(), contextlib.ExitStack() as stack:
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
        except KeyboardInterrupt:
            done.note_end(log)
            raise
        except LineError as error:
            fail(f"line {error.line}: {error.reason}", done.advice())
        except LogcoreError as error:
            fail(str(error), done.advice())
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

    @contextlib.contextmanager
    def telling_interruptions(self) -> Generator[None, None, None]:
        """Says after Ctrl-C what is stored, when the log is closed and its records are on disk."""
        try:
            yield
        except KeyboardInterrupt:
            click.echo(f"interrupted: {self.text()} are appended and stay", err=True)
            raise

    def note_end(self, log: logcore.Log) -> None:
        """Counts what a call stored that was interrupted before it said so; no other process writes here."""
        stored = log.log_end_offset - 1
        if self.first_offset >= 0:
            self.count += max(0, stored - max(self.last_offset, self.first_offset - 1))
            self.last_offset = max(self.last_offset, stored)

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
