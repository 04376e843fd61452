"""The pictures of the documents, which tools/pictures.py draws, are current,
self-contained and used. Their numbers equal the numbers of the pages.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: mkdocs.yml names logo.svg.
PICTURES = [
    path
    for path in sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    if path.name != "logo.svg"
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"


def texts_of(name: str) -> list[str]:
    tree = ElementTree.parse(ROOT / "docs" / "pictures" / name)
    return ["".join(element.itertext()) for element in tree.iter(f"{SVG}text")]


def test_pictures_are_current() -> None:
    """If this fails, run `python tools/pictures.py --update`."""
    command = [sys.executable, ROOT / "tools" / "pictures.py"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_picture_describes_itself_and_loads_nothing(picture: Path) -> None:
    source = picture.read_text("utf-8")
    root = ElementTree.fromstring(source)
    assert root.get("role") == "img"
    for name in ("title", "desc"):
        assert (root.findtext(f"{SVG}{name}") or "").strip()
    loaded = source.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|@import|@font-face|<image|<script|href=", loaded)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_picture_is_used_with_a_text_for_screen_readers(picture: Path) -> None:
    uses = [
        match[1]
        for page in PAGES
        for match in re.finditer(
            rf"!\[([^\]]*)\]\([\w/:.-]*pictures/{picture.name}\)",
            page.read_text("utf-8"),
        )
    ]
    assert uses
    assert all(len(text) > 30 for text in uses)


def test_picture_of_a_batch_has_the_positions_of_the_page() -> None:
    page = (ROOT / "docs" / "format.md").read_text("utf-8")
    table = page.partition("## A batch")[2].partition("The CRC does not cover")[0]
    positions = [
        int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    ]
    assert len(positions) == 14
    texts = texts_of("batch.svg")
    numbers = [int(text) for text in texts if text.isdecimal()]
    # Lines at the left edge, and at the cells of fields that continue in a new row.
    rows_of_16 = [0, 16, 32, 48]
    continued = [row for row in rows_of_16 if row not in positions]
    assert sorted(numbers) == sorted(rows_of_16 + positions + continued)
    for name in ("base offset", "batch length", "magic", "max timestamp", "CRC-32C"):
        assert name in texts


def test_bars_equal_the_ratios_of_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([\d.]+)(x| times the (?:time|CPU))",
        page.replace("`", ""),
        flags=re.MULTILINE,
    )
    assert len(rows) > 20
    tree = ElementTree.parse(ROOT / "docs" / "pictures" / "bars.svg")
    texts = texts_of("bars.svg")
    widths = [
        float(element.get("width", "0"))
        for element in tree.iter(f"{SVG}rect")
        if element.get("class") in ("good", "bad")
    ]
    assert len(widths) == len(rows)
    drawn_bars = {}
    for position, (work, peer, number, unit) in enumerate(rows):
        assert work in texts and f"beside {peer}" in texts
        assert [text for text in texts if text.startswith(f"{number}×")]
        ratio = float(number) if unit == "x" else 1 / float(number)
        drawn_bars[max(ratio, 1 / ratio)] = widths[position]
    # Longer bars belong to ratios that differ more from 1.
    assert [drawn_bars[ratio] for ratio in sorted(drawn_bars)] == sorted(
        drawn_bars.values()
    )


def test_recording_has_the_steps_of_the_demo() -> None:
    rows = (ROOT / "docs" / "pictures" / "demo.cast").read_text("utf-8").splitlines()
    assert json.loads(rows[0])["version"] == 2
    output = "".join(json.loads(row)[2] for row in rows[1:])
    source = (ROOT / "src" / "logcore" / "cli" / "demo.py").read_text("utf-8")
    steps = re.findall(
        r"^\d\. (\w+): (.*?)\x1b", output.replace("\r", ""), re.MULTILINE
    )
    assert len(steps) == 7
    flat = re.sub(r'"\s+f?"', "", source)
    for name, description in steps:
        assert name in flat
        assert description in flat
