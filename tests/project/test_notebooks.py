"""Output in notebooks: tables of scans, topics and directories, and the example
notebook.
"""

from __future__ import annotations

import base64
import html
import io
import re
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.format import html as format_html

ROOT = Path(__file__).resolve().parents[2]


def cells_of(table: str) -> list[list[str]]:
    """Return the rows of an HTML table, the headings first."""
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
    return [
        [
            html.unescape(cell)
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
        ]
        for row in rows
    ]


@pytest.fixture
def logdir(tmp_path: Path) -> Any:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic("orders", partitions=2)
        yield logdir


def test_directory_and_topic_show_offsets_times_and_sizes(
    logdir: logcore.LogDir,
) -> None:
    for number in range(5):
        logdir.append(
            "orders",
            b"v%d" % number,
            partition=1,
            timestamp_ms=1_700_000_000_000 + 60_000 * number,
        )
    logdir.partition("orders", 1).delete_records(2)
    logdir.create_topic("empty")
    headings, empty, orders = cells_of(logdir._repr_html_())
    assert headings[:3] == ["topic", "partitions", "offsets"]
    assert empty == ["empty", "1", "0", "", "", "0 bytes"]
    assert orders[:5] == [
        "orders",
        "2",
        "3",
        "2023-11-14 22:15:20.000",
        "2023-11-14 22:17:20.000",
    ]
    _, first_row, second_row = cells_of(logdir.topic("orders")._repr_html_())
    assert first_row == ["0", "0", "0", "", "", "0 bytes", "0"]
    assert second_row[:3] == ["1", "2", "5"]
    with logcore.open_dir(logdir.path, read_only=True) as other_reader:
        assert cells_of(other_reader._repr_html_()) == cells_of(logdir._repr_html_())
    assert other_reader._repr_html_() is None, "a closed directory is shown as text"


def test_scan_shows_its_first_records(logdir: logcore.LogDir) -> None:
    log = logdir.partition("orders", 0)
    log.append(
        b"<b>&", key=b"\xff\x00", headers=[("h", b"1"), ("h", None)], timestamp_ms=0
    )
    log.append(None)
    log.append(b"x" * 5000)
    for number in range(20):
        logdir.append("orders", b"%d" % number, partition=1)
    headings, *rows = cells_of(logdir.scan("orders")._repr_html_())
    assert headings == [
        "topic",
        "partition",
        "offset",
        "timestamp",
        "key",
        "value",
        "headers",
    ]
    assert len(rows) == 10
    assert rows[0][:3] == ["orders", "0", "0"]
    assert rows[0][3:] == [
        "1970-01-01 00:00:00.000",
        r"b'\xff\x00'",
        "<b>&",
        "h=1, h=null",
    ]
    assert rows[1][4:6] == ["null", "null"]
    assert rows[2][5] == "x" * 60 + "… (5,000 bytes)"
    assert rows[3][:3] == ["orders", "1", "0"]
    assert "<b>&amp;" not in logdir.scan("orders")._repr_html_(), (
        "truncated values must be escaped completely"
    )
    assert cells_of(log.scan(columns=["offset"])._repr_html_()) == [
        ["offset"],
        ["0"],
        ["1"],
        ["2"],
    ]


def test_damaged_partition_is_a_row_with_the_damage(logdir: logcore.LogDir) -> None:
    for number in range(2):
        logdir.append("orders", b"v", partition=number)
    logdir.close()
    (segment,) = Path(logdir.path, "orders-0").glob("*.log")
    segment.unlink()
    with logcore.open_dir(logdir.path, read_only=True) as reader:
        _, first_row, second_row = cells_of(reader.topic("orders")._repr_html_())
        assert first_row[0] == "0"
        assert "missing" in first_row[1] or "gone" in first_row[1]
        assert second_row[:3] == ["1", "0", "1"]
        assert "orders" in reader._repr_html_()


def test_large_table_is_shortened_with_a_note(logdir: logcore.LogDir) -> None:
    logdir.create_topic("wide", partitions=60)
    table = logdir.topic("wide")._repr_html_()
    assert len(cells_of(table)) == 51
    assert "the first 50 of 60 partitions" in table


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"", ""),
        (b"caf\xc3\xa9", "café"),
        (b"a\nb", "b'a\\nb'"),
        (b"\xc3" * 3, r"b'\xc3\xc3\xc3'"),
        ("é".encode() * 200, "é" * 60 + "… (400 bytes)"),
        (b"x" + "é".encode() * 200, "x" + "é" * 59 + "… (401 bytes)"),
        ("xx€".encode() + "€".encode() * 100, "xx" + "€" * 58 + "… (305 bytes)"),
        (b"a\xff" * 200, "b'" + r"a\xff" * 11 + "a\\x… (400 bytes)"),
        (b"\x80" * 300, "b'" + r"\x80" * 14 + r"\x… (300 bytes)"),
    ],
)
def test_bytes_are_shown_as_text_or_escaped(value: bytes, expected: str) -> None:
    assert format_html.format_bytes(value) == expected


def test_header_that_is_not_utf8_is_shown(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "t-0", create=True, durability="os") as log:
        log.append(b"v", headers=[("\udcff", b"x")])
        assert (
            '<td style="text-align: left">?=x</td>'
            in log.scan()._repr_html_().encode().decode()
        )


@pytest.mark.slow  # 5 s of Jupyter
def test_example_notebook_runs_and_plots() -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    image = pytest.importorskip("matplotlib.image")
    pytest.importorskip("pandas")
    path = ROOT / "examples" / "kafka_directory.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), (
        "the notebook must be stored without outputs, because they contain paths"
    )
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    tables = [
        output["data"]["text/html"]
        for output in outputs
        if "text/html" in output.get("data", {})
    ]
    assert cells_of(tables[0])[1][:3] == ["orders", "2", "1,800"]
    assert [row[2] for row in cells_of(tables[1])[1:]] == ["321", "1,479"]
    assert len(cells_of(tables[2])) == 11
    assert "melons" in tables[3]
    (plot,) = [
        output["data"]["image/png"]
        for output in outputs
        if "image/png" in output.get("data", {})
    ]
    pixels = image.imread(io.BytesIO(base64.b64decode(plot)))
    blue = (pixels[:, :, 2] > pixels[:, :, 0] + 0.3).mean()
    assert 0.1 < blue < 0.6, "the plot is empty"
