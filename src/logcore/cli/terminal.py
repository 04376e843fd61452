"""Output of the command line: lines and tables for people on a terminal, JSON lines in
a pipe.

Rules:
- Progress is written to stderr, and only to a terminal.
- On a terminal, rich draws the tables. Elsewhere, tables are aligned plain text.

This module depends on no log and no file format.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import UTC, datetime
from typing import IO, Any, Final

import click

#: Number of lines that are written to stdout at once.
_CHUNK_LINES: Final = 1000


def wants_json(as_json: bool) -> bool:
    return as_json or not sys.stdout.isatty()


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Lines:
    """Buffered writer of UTF-8 lines to stdout.

    It is a context manager, so that the last lines are always flushed.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out: IO[bytes] = sys.stdout.buffer
        self._waiting: list[bytes] = []

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def write(self, line: str) -> None:
        self.write_bytes(line.encode("utf-8", "replace") + b"\n")

    def write_bytes(self, data: bytes) -> None:
        self._waiting.append(data)
        if len(self._waiting) >= _CHUNK_LINES:
            self.flush()

    def flush(self) -> None:
        waiting = self._waiting
        self._waiting = []
        if waiting:
            self._out.write(b"".join(waiting))
        self._out.flush()


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[int] = (),
    full: bool = True,
) -> None:
    """Print a table: with rich on a terminal, as aligned plain text elsewhere.

    Args:
        headers: headings of the columns.
        rows: cells of each row.
        right: indexes of columns with numbers, which are aligned right.
        full: whether long cells wrap. Otherwise a row is one line, and its last column
            is shortened first.
    """
    texts = [[_cell(cell) for cell in row] for row in rows]
    numbers = set(right)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False)
        for slot, header in enumerate(headers):
            table.add_column(
                Text(header),
                justify="right" if slot in numbers else "left",
                overflow="fold" if full else "ellipsis",
                no_wrap=not full and slot < len(headers) - 1,
            )
        for row in texts:
            table.add_row(
                *(
                    Text(
                        _without_control_characters(cell),
                        style=_STYLES.get(cell, ""),
                        no_wrap=not full,
                    )
                    for cell in row
                )
            )
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headers, *texts, strict=True)]
    for row in [list(headers), *texts]:
        cells = (
            cell.rjust(w) if slot in numbers else cell.ljust(w)
            for slot, (cell, w) in enumerate(zip(row, widths))
        )
        print("  ".join(cells).rstrip())


def print_verdicts(
    found: Sequence[Any], *, within: str = "", full: bool = True
) -> None:
    """Print a table of verdicts; paths below `within` are shown relative to it."""
    rows = [
        (
            item.status,
            _path_within(item.path, within),
            item.batches or "",
            item.records or "",
            item.size_bytes,
            item.detail + _position_text(item),
        )
        for item in found
    ]
    headers = ("verdict", "file", "batches", "records", "bytes", "detail")
    print_table(headers, rows, right=(2, 3, 4), full=full)


def print_problems(found: Sequence[Any], *, within: str = "") -> None:
    """Print two lines for each verdict: the file, and the full description of its
    problem.
    """
    for item in found:
        color = {"damaged": "red", "warning": "yellow"}.get(item.status)
        click.echo(
            click.style(item.status, fg=color, bold=True)
            + "  "
            + _path_within(item.path, within)
        )
        click.echo(f"    {item.detail}{_position_text(item)}")


def _path_within(path: str, within: str) -> str:
    if within:
        return path.removeprefix(within + os.sep)
    return path


def _position_text(verdict: Any) -> str:
    if verdict.position is None:
        return ""
    offset = ""
    if verdict.offset is not None:
        offset = f", offset {verdict.offset}"
    return f" (position {verdict.position}{offset})"


_STYLES: Final = {"ok": "green", "warning": "yellow", "damaged": "bold red"}


def _without_control_characters(text: str) -> str:
    """Return text that is safe for a terminal.

    A value may hold control characters that recolor the terminal, clear it, or type
    into it.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else ascii(sign)[1:-1]
        for sign in text
    )


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


@contextlib.contextmanager
def progress(
    label: str, total: int | None
) -> Generator[Callable[[int], None], None, None]:
    """Yield a function to call with each completed amount.

    A progress bar is shown if stderr is a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)


def time_text(timestamp_ms: int, precision: str = "milliseconds") -> str:
    """Return a timestamp as ISO 8601 in UTC, or "-" if there is none."""
    if timestamp_ms < 0:
        return "-"
    try:
        return (
            datetime.fromtimestamp(timestamp_ms / 1000, UTC)
            .isoformat(timespec=precision)
            .replace("+00:00", "Z")
        )
    except (ValueError, OverflowError, OSError):
        return f"{timestamp_ms} ms"


def size_text(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            if unit == "B":
                return f"{size_bytes:.0f} {unit}"
            return f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError("the last unit has returned")


def terminal_columns() -> int | None:
    """Return the width of the terminal, or None if stdout is not a terminal."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def cells(text: str) -> int:
    """Return the number of columns of a text. A character takes two, one or none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fitted(text: str, columns: int) -> str:
    """Return text that takes at most this many columns; shortened text ends in an
    ellipsis.
    """
    if len(text) <= columns and cells(text) <= columns:
        return text
    from rich.cells import set_cell_size

    # Shorten the text first, because set_cell_size() measures all of it.
    return set_cell_size(text[: 2 * columns], max(0, columns - 1)) + "…"


def plain_text(value: object) -> str:
    """Return a value of shown() as text for one line, with control characters escaped."""
    text = "null"
    if isinstance(value, str):
        text = value
    elif value is not None:
        text = to_json(value)
    return (
        text.replace("\\", "\\\\")
        .replace("\n", "\\n")
        .replace("\r", "\\r")
        .replace("\t", "\\t")
    )
