"""Small HTML tables for notebooks, which `_repr_html_` methods return.

Rules:
- All text is escaped, because keys and values are untrusted.
- A table is small: long texts are truncated, and "…" and the length are added.

This module reads no log.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Final

_LONGEST_TEXT: Final = 60
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    note: str = "",
) -> str:
    """Return an HTML table. Numbers are aligned right; `note` is a line below the table."""
    from html import escape  # takes 2 ms to import, and few processes show tables

    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    body = "".join(_row(row, escape) for row in rows)
    below = ""
    if note:
        below = f"<p>{escape(note)}</p>"
    return (
        f"<div><p><b>{escape(caption)}</b></p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"
    )


def _row(row: Sequence[object], escape: Callable[[str], str]) -> str:
    cells = ""
    for value in row:
        if isinstance(value, int):
            cells += f'<td style="text-align: right">{value:,}</td>'
        else:
            # The name of a header may contain bytes that are not UTF-8.
            text = str(value).encode("utf-8", "replace").decode()
            cells += f'<td style="text-align: left">{escape(text)}</td>'
    return f"<tr>{cells}</tr>"


def shorten(text: str) -> str:
    """Return a text, or its first 60 characters with its length."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… ({len(text):,})"


def format_bytes(value: bytes | None) -> str:
    """Return a key or a value as text if it is printable UTF-8, otherwise as a Python
    literal, or "null" for None.
    """
    if value is None:
        return "null"
    start = value[: 4 * _LONGEST_TEXT]
    if len(start) < len(value):
        start = _without_partial_character(start)
    text = start.decode("utf-8", "surrogateescape")
    if not text.isprintable():
        text = repr(start)
    if len(start) < len(value):
        return f"{text[:_LONGEST_TEXT]}… ({len(value):,} bytes)"
    return text


def _without_partial_character(start: bytes) -> bytes:
    """Return the start of a longer text without an incomplete last character.

    At most three bytes of that character are removed.
    """
    for size in range(1, 4):
        byte = start[-size]
        # The first byte of a character encodes the number of its bytes.
        if byte & 0xC0 != 0x80:
            character_bytes = 1 + (byte >= 0xC2) + (byte >= 0xE0) + (byte >= 0xF0)
            if character_bytes > size:
                return start[:-size]
            return start
    return start


def format_time(timestamp_ms: int) -> str:
    """Return a time in UTC with milliseconds, or an empty text for a negative number."""
    if timestamp_ms < 0:
        return ""
    try:
        moment = datetime.datetime.fromtimestamp(timestamp_ms / 1000, datetime.UTC)
    except (OverflowError, ValueError, OSError):  # after the year 9999
        return f"{timestamp_ms} ms"
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{timestamp_ms % 1000:03d}"


def format_size(size_bytes: float) -> str:
    """Return a size in the largest unit in which the number is at least 1."""
    if size_bytes < 1024:
        return f"{size_bytes:,.0f} bytes"
    unit = 0
    while size_bytes >= 1024 and unit < len(_UNITS):
        size_bytes /= 1024
        unit += 1
    return f"{size_bytes:,.1f} {_UNITS[unit - 1]}"
