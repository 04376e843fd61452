"""Draw the pictures of the documents as SVG files in docs/pictures.

    python tools/pictures.py            compare the files with new drawings
    python tools/pictures.py --update   draw them again
    python tools/pictures.py --record   also run `make demo` and record its output

Rules:
- Numbers are not written here. The picture of a batch uses kernels/layout.py, the bars
  use the table in docs/benchmarks.md, and the terminal uses the recording demo.cast.
- A picture is readable on a light and on a dark page, loads no font, and has a title
  and a description for screen readers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from logcore.kernels.layout import CRC_START, HEADER, HEADER_SIZE

ROOT: Final = Path(__file__).resolve().parents[1]
PICTURES: Final = ROOT / "docs" / "pictures"
RECORDING: Final = PICTURES / "demo.cast"
WIDTH: Final = 760
#: Name of a colour: on a light page, on a dark page.
COLOURS: Final = {
    "back": ("#ffffff", "#1b1f27"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#57606a", "#9aa4b0"),
    "line": ("#8c959f", "#6b7683"),
    "soft": ("#eef1f4", "#2a303a"),
    "good": ("#0b6e6e", "#4fd1c5"),
    "good-soft": ("#d7efee", "#143d3c"),
    "warm": ("#8a5a00", "#e3b341"),
    "warm-soft": ("#fdeecb", "#40330f"),
    "bad": ("#a40e26", "#ff8389"),
    "bad-soft": ("#ffdfe1", "#4a1d22"),
}
SANS: Final = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',sans-serif"
MONO: Final = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def _style() -> str:
    def rules(which: int) -> str:
        return "".join(
            f".{name}{{fill:{both[which]}}}.s-{name}{{stroke:{both[which]}}}"
            for name, both in COLOURS.items()
        )

    return (
        f"text{{font:13px {SANS}}}.small{{font-size:11.5px}}.bold{{font-weight:600}}"
        f".code{{font-family:{MONO};font-size:12px}}.tiny{{font-family:{MONO};font-size:10px}}"
        ".peer{font-size:10.5px}"
        ".s{fill:none;stroke-width:1.5}.thick{stroke-width:2.5}.dash{stroke-dasharray:4 4}"
        f"{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}"
    )


class Picture:
    """An SVG file that grows by shapes. Positions and sizes are in pixels."""

    def __init__(self, height: int, title: str, description: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>{_style()}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="ink" d="M0 0 8 4 0 8z"/></marker></defs>',
        ]
        self.box(0, 0, WIDTH, height, "back", radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        edge: str = "",
        radius: float = 4,
    ) -> None:
        stroke = f' s-{edge}" stroke-width="1.5' if edge else ""
        self._parts.append(
            f'<rect class="{fill}{stroke}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(
        self, x: float, y: float, words: str, kind: str = "ink", at: str = "start"
    ) -> None:
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{at}">{escape(words)}</text>'
        )

    def line(self, points: str, kind: str = "s-line", arrow: bool = False) -> None:
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self._parts.append(f'<path class="s {kind}" d="{points}"{tip}/>')

    def dot(self, x: float, y: float, label: str, kind: str = "good") -> None:
        self._parts.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="9"/>')
        self.text(x, y + 4, label, "back small bold", "middle")

    def raw(self, part: str) -> None:
        self._parts.append(part)

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


# -- three doors -----------------------------------------------------------------------


def doors() -> str:
    made = Picture(
        222,
        "Three doors to one directory",
        "A directory of partitions in Kafka's own files. Your process opens it with import logcore, unmodified Kafka "
        "clients reach it through the broker netshim, and Spark jobs read and write it with the format logcore.",
    )
    for x, users, how, door in (
        (28, "your process", "import logcore", "logcore"),
        (270, "Kafka clients", "any, unmodified", "netshim"),
        (512, "Spark jobs", 'format("logcore")', "pyspark_logcore"),
    ):
        made.box(x, 18, 220, 52, "soft", radius=8)
        made.text(x + 110, 39, users, "ink bold", "middle")
        made.text(x + 110, 58, how, "ink code", "middle")
        made.line(f"M{x + 110} 70V130", "s-ink", arrow=True)
        made.box(x + 110 - 4 * len(door), 86, 8 * len(door), 22, "back")
        made.text(x + 110, 101, door, "good code bold", "middle")
    made.box(28, 134, 704, 72, "good-soft", "good", radius=8)
    for y, name in ((160, "data/orders-0/"), (190, "data/orders-1/")):
        made.text(44, y, name, "ink code bold")
        made.text(168, y, "00000000000000000000.log  .index  .timeindex", "ink code")
    made.text(716, 160, "Kafka's own files,", "ink small", "end")
    made.text(716, 190, "byte for byte", "ink small", "end")
    return str(made)


# -- one record's road -----------------------------------------------------------------


def road() -> str:
    made = Picture(
        418,
        "The road of one record",
        "append encodes the record into a batch and writes it at the end of the segment, into the page cache of the "
        "operating system. fdatasync brings it to the disk. Then the durable end rises, append returns, and readers "
        "in any process read it from the page cache.",
    )
    for y, height, name in (
        (16, 124, "writing process"),
        (156, 92, "operating system"),
        (264, 92, "disk"),
    ):
        made.box(16, y, 546, height, "soft", radius=8)
        made.text(28, y + 20, name, "muted small bold")
    made.box(578, 16, 166, 232, "soft", radius=8)
    made.text(590, 36, "reading process", "muted small bold")

    def step(x: float, y: float, width: float, number: int, *lines: str) -> None:
        made.box(x, y, width, 24 + 16 * len(lines), "back", "line")
        made.dot(x + 16, y + 20, str(number), "good")
        for place, line in enumerate(lines):
            kind = "ink code" if line.endswith(")") else "ink small"
            made.text(x + 32, y + 24 + 16 * place, line, kind)

    step(30, 50, 144, 1, "log.append(v)", "is called", "by a thread")
    step(194, 50, 166, 2, "encode a batch:", "61 bytes of head,", "CRC-32C, the record")
    step(408, 50, 140, 6, "append returns", "the offset, and", "“disk”")
    made.line("M174 86H190", "s-ink", arrow=True)
    made.box(194, 186, 196, 48, "back", "line")
    made.text(206, 206, "page cache of 0…0.log", "ink code")
    made.text(206, 224, "the batch, at its end", "ink small")
    made.box(408, 186, 140, 48, "back", "line")
    made.text(420, 206, "logcore.durable", "ink code")
    made.text(420, 224, "the durable end", "ink small")
    made.line("M277 122V182", "s-ink", arrow=True)
    made.dot(277, 148, "3")
    made.text(293, 152, "pwrite", "ink code")
    made.box(194, 294, 196, 48, "back", "line")
    made.text(206, 314, "0…0.log", "ink code")
    made.text(206, 331, "the batch, on the disk", "ink small")
    made.line("M277 234V290", "s-ink", arrow=True)
    made.dot(277, 256, "4")
    made.text(293, 260, "fdatasync", "ink code")
    made.line("M390 318H478V238", "s-good dash", arrow=True)
    made.dot(478, 278, "5")
    made.text(494, 282, "rises", "ink small")
    made.line("M478 186V126", "s-good dash", arrow=True)
    made.box(590, 50, 142, 72, "back", "line")
    made.dot(606, 70, "7")
    made.text(622, 74, "log.read(0)", "ink code")
    made.text(602, 94, "reads records below", "ink small")
    made.text(602, 110, "the durable end", "ink small")
    made.line("M548 210H661V126", "s-ink", arrow=True)
    made.text(590, 230, "mapped, or pread", "muted small")
    made.line("M16 374H28", "s-warm thick")
    made.text(
        34,
        378,
        "From 3 on, a killed process loses nothing: the page cache belongs to the operating system.",
        "ink small",
    )
    made.line("M16 398H28", "s-good thick")
    made.text(
        34,
        402,
        "From 4 on, a power cut loses nothing. Under the policy “os”, step 6 follows step 3.",
        "ink small",
    )
    return str(made)


# -- the reach of a sync ---------------------------------------------------------------


def syncs() -> str:
    made = Picture(
        500,
        "The reach of a sync under each durability policy",
        "Under always, each append waits for a sync of its own. Under group, appends that were written before a sync "
        "began share it, and appends that arrive while it runs share the next one. Under every(3), each third record "
        "waits for a sync. Under interval(500), the first append after 500 milliseconds syncs. Under os, none does.",
    )
    made.dot(36, 26, "1", "good")
    made.text(52, 30, "is written", "ink small")
    made.box(130, 18, 40, 16, "warm-soft", "warm")
    made.text(178, 30, "fdatasync of these appends", "ink small")
    made.line("M352 18V34", "s-good thick")
    made.text(360, 30, "appends that wait for it return", "ink small")
    made.text(744, 30, "a power cut loses", "muted small bold", "end")
    left, right, height = 128, 576, 88

    def x_of(moment: float) -> float:
        return left + moment * (right - left) / 10

    def lane(
        row: int,
        name: str,
        lines: list[str],
        written: list[float],
        ran: list[tuple[float, float, str]],
        loss: list[str],
    ) -> None:
        y = 52 + row * height
        made.box(16, y, WIDTH - 32, height - 8, "soft", radius=8)
        made.text(28, y + 22, name, "ink code bold")
        for place, line in enumerate(lines):
            made.text(28, y + 40 + 15 * place, line, "muted small")
        made.line(f"M{x_of(0):g} {y + 26}H{x_of(10):g}", "s-line")
        for number, moment in enumerate(written, 1):
            made.dot(x_of(moment), y + 26, str(number), "good")
        for begin, end, covered in ran:
            made.box(
                x_of(begin), y + 46, x_of(end) - x_of(begin), 16, "warm-soft", "warm"
            )
            made.line(f"M{x_of(end):g} {y + 14}V{y + 68}", "s-good thick")
            made.text(
                (x_of(begin) + x_of(end)) / 2,
                y + 58,
                covered,
                "ink small bold",
                "middle",
            )
        for place, line in enumerate(loss):
            made.text(744 - 12, y + 30 + 16 * place, line, "ink small", "end")

    lane(
        0,
        "always",
        ["each append", "syncs alone"],
        [0.3, 3.1, 5.9],
        [(0.6, 2.7, "1"), (3.4, 5.5, "2"), (6.2, 8.3, "3")],
        ["nothing", "acknowledged"],
    )
    lane(
        1,
        "group",
        ["the default;", "syncs are shared"],
        [0.3, 0.9, 1.5, 2.1, 5.6],
        [(0.6, 2.7, "1"), (2.9, 5.0, "2, 3, 4"), (5.9, 8.0, "5")],
        ["nothing", "acknowledged"],
    )
    lane(
        2,
        "every(3)",
        ["each third", "record syncs"],
        [0.3, 0.9, 1.5, 4.0, 4.6, 5.2, 7.9],
        [(1.8, 3.6, "1, 2, 3"), (5.5, 7.3, "4, 5, 6")],
        ["at most 2 records,", "and a running sync"],
    )
    lane(
        3,
        "interval(500)",
        ["synced when", "500 ms passed"],
        [0.3, 0.9, 1.5, 5.2, 8.6],
        [(5.5, 7.3, "1 to 4")],
        ["records since", "the last sync"],
    )
    lane(
        4,
        "os",
        ["no sync"],
        [0.3, 0.9, 1.5, 2.1, 2.7, 3.3, 3.9],
        [],
        ["no bound"],
    )
    return str(made)


# -- a group ---------------------------------------------------------------------------


def group() -> str:
    made = Picture(
        388,
        "A consumer group when a process dies",
        "Two processes share a directory and divide four partitions. Process A is killed. The operating system "
        "releases its locks, process B detects that, and takes over partitions 0 and 1. It continues at the "
        "committed offset, so the records that A had processed after its last commit are processed again.",
    )
    left, dies, seen, right = 132, 330, 402, 744
    made.text(28, 34, "process A", "ink bold")
    made.text(28, 51, "in group “billing”", "muted small")
    made.text(28, 116, "process B", "ink bold")
    made.text(28, 133, "in group “billing”", "muted small")
    for row, (owner, begin, end) in enumerate(
        [("A", left, dies), ("A", left, dies), ("B", left, right), ("B", left, right)]
    ):
        y = 20 + 22 * row + (38 if row > 1 else 0)
        kind = "warm" if owner == "A" else "good"
        made.box(begin, y, end - begin, 18, f"{kind}-soft", kind)
        made.text(begin + 8, y + 13, f"partition {row}", "ink small")
    for row in (0, 1):
        y = 146 + 22 * row
        made.box(seen, y, right - seen, 18, "good-soft", "good")
        made.text(seen + 8, y + 13, f"partition {row}", "ink small")
    made.line(f"M{dies} 14V196", "s-bad thick")
    made.text(dies + 8, 34, "kill -9: the operating system releases", "bad small bold")
    made.text(dies + 8, 51, "the locks of A", "bad small bold")
    made.line(f"M{seen} 66V196", "s-good dash")
    made.text(seen + 8, 78, "B detects it by a free lock", "good small bold")
    made.text(28, 204, "time", "muted small")
    made.line("M60 200H744", "s-line", arrow=True)
    made.text(28, 240, "partition 0", "ink bold")
    size, first = 40, 132
    for offset in range(12):
        x = first + size * offset
        if offset < 5:
            kind = "warm"
        elif offset < 8:
            kind = "bad"
        else:
            kind = "good"
        made.box(x, 222, size - 4, 28, f"{kind}-soft", kind)
        made.text(x + size / 2 - 2, 241, str(offset), "ink code", "middle")
    committed = first + 5 * size - 2
    made.line(f"M{committed} 214V284", "s-ink thick")
    made.text(
        committed, 300, "committed offset of the group: 5", "ink small bold", "middle"
    )
    made.text(first, 272, "processed by A", "warm small")
    made.text(committed + 10, 272, "by A, and again by B", "bad small")
    made.text(first + 8 * size + 28, 272, "by B", "good small")
    made.text(
        28,
        334,
        "The position of A is lost, its commit is not. After a commit of each record, one record is processed twice.",
        "ink small",
    )
    made.text(
        28,
        354,
        "If A is only stopped, it keeps its locks: B waits for max_poll_interval_ms. Then commits of A are refused.",
        "ink small",
    )
    made.text(
        28,
        374,
        "A program that stores the offset with its result repeats nothing (delivery.md).",
        "ink small",
    )
    return str(made)


# -- a batch on disk -------------------------------------------------------------------

#: Fields whose names are too long for their cells.
_SHORT: Final = {
    "partition_leader_epoch": "leader epoch",
    "last_offset_delta": "last offset Δ",
    "base_sequence": "sequence",
    "record_count": "record count",
    "crc": "CRC-32C",
    "producer_epoch": "prod. epoch",
    "attributes": "attributes",
}
_STAMPED: Final = ("base_offset", "partition_leader_epoch")
_ROW_BYTES: Final = 16


def batch() -> str:
    made = Picture(
        360,
        "The bytes of a batch on disk",
        "The head of a batch has "
        f"{HEADER_SIZE} bytes: "
        + "; ".join(f"byte {at}: {name}" for name, at, _ in _fields())
        + f". The CRC covers the bytes from {CRC_START} on. The records follow.",
    )
    cell, left, top, height = 42, 64, 34, 44
    for byte in range(_ROW_BYTES):
        made.text(
            left + (byte + 0.5) * cell, top - 8, f"+{byte}", "muted tiny", "middle"
        )
    for row in range(4):
        made.text(
            left - 8,
            top + row * (height + 6) + 27,
            str(row * _ROW_BYTES),
            "muted tiny",
            "end",
        )
    for name, at, size in _fields():
        kind = "good" if at >= CRC_START else "line"
        fill = "good-soft" if at >= CRC_START else "soft"
        if name in _STAMPED:
            kind, fill = "warm", "warm-soft"
        pieces = list(_pieces(at, size))
        widest = max(pieces, key=lambda piece: piece[2])
        for piece in pieces:
            row, column, count = piece
            x, y = left + column * cell, top + row * (height + 6)
            made.box(x + 1, y, count * cell - 2, height, fill, kind)
            made.text(x + 6, y + 13, str(row * _ROW_BYTES + column), "muted tiny")
            if piece is widest:
                words = _SHORT.get(name, name.replace("_", " "))
                kind_of_text = "ink tiny" if count < 3 else "ink small"
                made.text(x + count * cell / 2, y + 31, words, kind_of_text, "middle")
            else:
                made.text(x + count * cell / 2, y + 31, "…", "ink small", "middle")
    row, column = divmod(HEADER_SIZE, _ROW_BYTES)
    x, y = left + column * cell, top + row * (height + 6)
    width = (_ROW_BYTES - column) * cell
    made.box(x + 1, y, width - 2, height, "back", "good")
    made.text(x + 6, y + 13, str(HEADER_SIZE), "muted tiny")
    made.text(x + width / 2, y + 31, "records …", "ink small bold", "middle")
    made.text(28, 256, "a record", "ink small bold")
    parts = [
        ("length", 52),
        ("attributes", 74),
        ("time Δ", 54),
        ("offset Δ", 60),
        ("key length", 74),
        ("key", 66),
        ("value length", 86),
        ("value", 110),
        ("headers", 96),
    ]
    at_x = 64.0
    for name, wide in parts:
        made.box(at_x + 1, 266, wide - 2, 30, "good-soft", "good")
        made.text(at_x + wide / 2, 285, name, "ink small", "middle")
        at_x += wide
    for x, kind, words in (
        (64, "warm", "set by the log when it stores the batch"),
        (342, "good", "covered by the CRC-32C"),
        (530, "line", "neither"),
    ):
        fill = {"warm": "warm-soft", "good": "good-soft", "line": "soft"}[kind]
        made.box(x, 312, 14, 14, fill, kind)
        made.text(x + 22, 323, words, "ink small")
    made.text(
        64,
        347,
        "Numbers of the head are big-endian. Numbers of a record are varints, except the one byte of attributes.",
        "muted small",
    )
    return str(made)


def _fields() -> Iterator[tuple[str, int, int]]:
    """Yield name, position and size in bytes of each field of the head."""
    for name in HEADER.names or ():
        kind, at = HEADER.fields[name][:2]  # type: ignore[index]
        yield name, at, kind.itemsize


def _pieces(at: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (row, column, bytes) of a field that may continue in the next row."""
    while size:
        row, column = divmod(at, _ROW_BYTES)
        count = min(size, _ROW_BYTES - column)
        yield row, column, count
        at += count
        size -= count


# -- benchmarks ------------------------------------------------------------------------


def rates(page: str) -> list[tuple[str, str, str, float]]:
    """Return work, peer, result as written, and how many times as fast logcore is."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if len(cells) != 3 or not cells[1]:
            continue
        rate = re.match(r"([\d.]+)x", cells[2])
        part = re.match(r"([\d.]+) times the (?:time|CPU)", cells[2])
        if rate is not None:
            found.append((*cells, float(rate[1])))
        elif part is not None:
            found.append((*cells, 1 / float(part[1])))
    return found  # type: ignore[return-value]


def bars() -> str:
    rows = rates((ROOT / "docs" / "benchmarks.md").read_text("utf-8"))
    step, top = 34, 66
    height = top + step * len(rows) + 14
    made = Picture(
        height,
        "Benchmarks: logcore beside other software",
        "; ".join(f"{work}, beside {peer}: {result}" for work, peer, result, _ in rows),
    )
    first, scale = 470.0, 68.0  # pixels: the axis at 1x, and a doubling
    made.text(28, 28, "how many times as fast as the other side", "ink bold")
    made.text(28, 46, "one step to the right doubles", "muted small")
    for power in (-1, 0, 1, 2, 3, 4):
        x = first + power * scale * 0.82
        made.line(
            f"M{x:g} {top - 8}V{height - 12}", "s-ink" if power == 0 else "s-soft"
        )
        label = "½" if power < 0 else str(2**power)
        made.text(x, top - 14, f"{label}×", "muted small", "middle")
    for place, (work, peer, result, ratio) in enumerate(rows):
        y = top + step * place
        length = math.log2(ratio) * scale * 0.82
        kind = "good" if ratio >= 1 else "bad"
        made.text(28, y + 13, work, "ink small")
        made.text(28, y + 26, f"beside {peer}", "muted peer")
        made.box(
            min(first, first + length), y + 6, max(abs(length), 2), 16, kind, radius=2
        )
        shown = result.partition(",")[0].replace(" times the ", "× the ")
        shown = re.sub(r"(?<=\d)x", "×", shown)
        if ratio >= 1:
            made.text(first + length + 6, y + 18, shown, "ink small bold")
        else:
            made.text(first + 6, y + 18, shown, "ink small bold")
    return str(made)


# -- a recording of a terminal ---------------------------------------------------------

COLUMNS: Final = 100
_SHOWN_LINES: Final = 26
_LINE_PX: Final = 17
_MARGIN_PX: Final = 24
#: Longest pause that is kept, and how long the last screen is shown, in seconds.
_LONGEST_S: Final = 0.7
_HOLD_S: Final = 8.0
_TERMINAL: Final = {
    "": "#d6dde6",
    "1": "#ffffff",
    "2": "#8a94a3",
    "32": "#5fd38d",
}
#: A colour of the terminal, or a part of a line between two.
_ESCAPE: Final = re.compile(r"\x1b\[([\d;]*)m")


def record() -> None:
    """Run the demo in a terminal, and write its output as an asciicast, version 2."""
    lines: list[list[object]] = []
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    parent, child = pty.openpty()
    begin = time.monotonic()
    with subprocess.Popen(
        ["make", "demo"],
        cwd=ROOT,
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment,
    ) as process:
        os.close(child)
        while True:
            try:
                data = os.read(parent, 65_536)
            except OSError:  # Linux reports the end of a terminal as an error
                break
            if not data:
                break
            text = data.decode("utf-8", "replace")
            lines.append([round(time.monotonic() - begin, 2), "o", text])
    os.close(parent)
    if process.returncode:
        sys.exit(f"make demo failed: {lines}")
    head = {"version": 2, "width": COLUMNS, "height": _SHOWN_LINES}
    rows = [json.dumps(line, ensure_ascii=False) for line in (head, *lines)]
    RECORDING.write_text("\n".join(rows) + "\n", encoding="utf-8")


def recorded() -> list[tuple[float, str]]:
    """Return (seconds, line) of the recording, with the colours of the terminal."""
    lines: list[tuple[float, str]] = []
    unfinished = ""
    rows = RECORDING.read_text("utf-8").splitlines()[1:]
    for moment, _, text in map(json.loads, rows):
        *whole, unfinished = (unfinished + text.replace("\r\n", "\n")).split("\n")
        lines += [(moment, line.rpartition("\r")[2]) for line in whole]
    return lines


def _coloured(line: str, colour: str) -> Iterator[tuple[str, str]]:
    """Yield (colour, text) of the parts of a line that begins in a colour.

    The last part may be empty. Its colour is the first colour of the next line.
    """
    at = 0
    for match in _ESCAPE.finditer(line):
        if match.start() > at:
            yield colour, line[at : match.start()]
        colour = match[1] if match[1] in _TERMINAL else ""
        at = match.end()
    yield colour, line[at:]


def demo() -> str:
    lines = [(0.0, "\x1b[1m$ make demo\x1b[0m"), *recorded()]
    moments = [0.0]
    for (before, _), (after, _) in itertools.pairwise(lines):
        moments.append(moments[-1] + min(after - before, _LONGEST_S) + 0.02)
    whole = moments[-1] + _HOLD_S
    height = _SHOWN_LINES * _LINE_PX + 56
    plain = [_ESCAPE.sub("", line) for _, line in lines]
    character = min(7.1, (WIDTH - 2 * _MARGIN_PX) / max(map(len, plain)))
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description">',
        '<title id="title">A recording of make demo in a terminal</title>',
        f'<desc id="description">{escape(chr(10).join(plain))}</desc>',
    ]
    cover, scroll = [], []
    for place, moment in enumerate(moments, 1):
        share = 100 * moment / whole
        cover.append(f"{share:.2f}%{{transform:translateY({place * _LINE_PX}px)}}")
        up = max(0, place - _SHOWN_LINES) * _LINE_PX
        scroll.append(f"{share:.2f}%{{transform:translateY({-up}px)}}")
    last = len(lines) * _LINE_PX
    up = max(0, len(lines) - _SHOWN_LINES) * _LINE_PX
    made.append(
        f"<style>text{{font:{1.65 * character:.1f}px {MONO};white-space:pre}}"
        + "".join(f".c{code}{{fill:{colour}}}" for code, colour in _TERMINAL.items())
        + ".c1{font-weight:700}"
        f"#cover{{transform:translateY({last}px);animation:cover {whole:.2f}s step-end infinite}}"
        f"#lines{{transform:translateY({-up}px);animation:scroll {whole:.2f}s step-end infinite}}"
        f"@keyframes cover{{{''.join(cover)}}}@keyframes scroll{{{''.join(scroll)}}}"
        "@media(prefers-reduced-motion:reduce){#cover,#lines{animation:none}}</style>"
    )
    made.append(
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#12161d"/>'
        '<circle cx="20" cy="18" r="5" fill="#f0625d"/><circle cx="38" cy="18" r="5" fill="#e8b84a"/>'
        '<circle cx="56" cy="18" r="5" fill="#57c26a"/>'
        f'<svg y="36" width="{WIDTH}" height="{_SHOWN_LINES * _LINE_PX + 6}"><g id="lines">'
    )
    first = ""
    for place, (_, line) in enumerate(lines):
        spans, column = [], 0
        parts = list(_coloured(line, first))
        first = parts[-1][0]
        for colour, part in parts:
            if part.strip():
                x = _MARGIN_PX + column * character
                wide = len(part) * character
                spans.append(
                    f'<tspan class="c{colour}" x="{x:g}" textLength="{wide:g}">{escape(part)}</tspan>'
                )
            column += len(part)
        if spans:
            made.append(f'<text y="{place * _LINE_PX + 13}">{"".join(spans)}</text>')
    made.append(
        f'<rect id="cover" width="{WIDTH}" height="{last}" fill="#12161d"/></g></svg></svg>'
    )
    return "\n".join([*made, ""])


# -- files -----------------------------------------------------------------------------

DRAWN: Final[Mapping[str, Callable[[], str]]] = {
    "doors.svg": doors,
    "road.svg": road,
    "syncs.svg": syncs,
    "group.svg": group,
    "batch.svg": batch,
    "bars.svg": bars,
    "demo.svg": demo,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="draw the files again")
    parser.add_argument("--record", action="store_true", help="record the demo first")
    arguments = parser.parse_args()
    if arguments.record:
        record()
    old = 0
    for name, draw in DRAWN.items():
        path = PICTURES / name
        drawn = draw()
        if path.exists() and path.read_text("utf-8") == drawn:
            continue
        if arguments.update or arguments.record:
            path.write_text(drawn, encoding="utf-8")
            continue
        print(
            f"{path.relative_to(ROOT)} is not current; run tools/pictures.py --update"
        )
        old = 1
    return old


if __name__ == "__main__":
    sys.exit(main())
