"""The commands at a pseudo-terminal. In a pipe they print JSON lines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import logcore
from support.terminals import at_terminal

pytest.importorskip("click")
from logcore.cli.terminal import cells, fitted

T0 = 1700000000000


def lines_of(text: str) -> list[str]:
    """The final lines, without colors and without progress bars that were erased."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    return [
        line
        for line in plain.splitlines()
        if line.strip() and not re.match(r"\r?(verifying|appending)", line)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with logcore.open(tmp_path / "t-0", create=True, durability="os") as log:
        log.append(b"short", key=b"k", timestamp_ms=T0)
        log.append(
            "漢字".encode() * 100,
            key=b"k" * 100,
            headers=[("trace", b"h" * 100)],
            timestamp_ms=T0,
        )
    return tmp_path / "t-0"


@pytest.mark.long
def test_long_values_are_shortened_to_the_width(path: Path) -> None:
    code, text = at_terminal("read", path, columns=70)
    first, second = lines_of(text)
    assert code == 0
    assert first == "0  2023-11-14T22:13:20.000Z  k  short"
    assert 60 < cells(second) <= 70
    assert (
        second.startswith("1  2023-11-14T22:13:20.000Z  kkk") and second.count("…") == 3
    )
    assert lines_of(at_terminal("tail", path, "-n", 1, columns=70)[1]) == [second]


@pytest.mark.long
def test_full_and_formats_are_never_shortened(path: Path) -> None:
    whole = "漢字" * 100
    for arguments in (["--full"], ["--format", "%s\\n"], ["--json"]):
        assert whole in at_terminal("read", path, *arguments, columns=40)[1]


@pytest.mark.parametrize("columns", [0, 1, 2, 5, 79, 80, 81, 160, 161])
def test_fitted_text_fits(columns: int) -> None:
    for text in ("", "a" * 80, "漢" * 80, "a漢" * 40):
        made = fitted(text, columns)
        assert cells(made) <= max(1, columns)
        assert (made == text) == (cells(text) <= columns)


@pytest.mark.long
def test_verify_prints_the_damage_and_a_summary(path: Path) -> None:
    code, text = at_terminal("verify", path)
    assert (code, len(lines_of(text))) == (0, 1)
    assert "2 records" in text and "ok" in text and ".index" not in text
    (path / f"{0:020d}.index").write_bytes(b"odd")
    log = path / f"{0:020d}.log"
    log.write_bytes(log.read_bytes()[:-1] + b"!")
    code, text = at_terminal("verify", path, columns=60)
    shown = lines_of(text)
    assert code == 1
    assert shown[0] == f"damaged  {log.name}" and "position" in text
    assert shown[-1].startswith("next:  `logcore recover")
    assert "partition.metadata" not in text


def test_verify_verbose_has_a_line_for_each_file(path: Path) -> None:
    code, text = at_terminal("verify", "-v", path, columns=200)
    assert code == 0
    for file in path.iterdir():
        if file.name != ".lock":
            assert file.name in text


@pytest.mark.long
def test_delete_asks_for_confirmation(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path, create=True) as logdir:
        logdir.create_topic("orders", 3)
    code, text = at_terminal("topic", "delete", tmp_path, "orders", typed="n\n")
    assert code == 1
    assert "Delete orders with 3 partitions, 0 B, and all its records? [y/N]" in text
    assert "nothing was deleted" in text
    assert (tmp_path / "orders-0").is_dir()
    code, _ = at_terminal("topic", "delete", tmp_path, "orders", typed="y\n")
    with logcore.open_dir(tmp_path, read_only=True) as logdir:
        assert (code, logdir.topics()) == (0, [])


def test_interrupted_append_reports_the_stored_records(tmp_path: Path) -> None:
    path = tmp_path / "t-0"
    with logcore.open(path, create=True) as log:
        log.append(b"before")
    command = [sys.executable, "-m", "logcore", "append", str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as writer:
        assert writer.stdin is not None
        writer.stdin.write(b"a\nb\n")
        writer.stdin.flush()
        with logcore.open(path, read_only=True) as log:
            followed = log.tail(1, timeout=20)
            assert [next(followed).value, next(followed).value] == [b"a", b"b"]
        writer.send_signal(signal.SIGINT)
        _, errors = writer.communicate(timeout=20)
        assert writer.returncode == 130
        assert errors == b"interrupted: 2 records (offsets 1 to 2) remain appended\n"


def test_a_pipe_gets_json_of_all_files(path: Path) -> None:
    command = [sys.executable, "-m", "logcore", "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 3 and {row["status"] for row in rows} == {"ok"}


def test_info_sorts_partitions_and_prints_totals(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with logcore.open_dir(data, create=True, durability="os") as logdir:
        logdir.create_topic("small", 1)
        logdir.create_topic("large", 2)
        logdir.append("small", b"1")
        for _ in range(5):
            logdir.partition("large", 1).append(bytes(1_000_000))
        code, text = at_terminal("info", data, "--sort", "size", columns=120)
    assert code == 0
    _, *rows, total, writer = lines_of(text)
    assert [row.split()[0] for row in rows] == ["large-1", "small-0", "large-0"]
    assert total.split()[:4] == ["total", "2", "4.8", "MiB"]
    assert writer.startswith(f"written by process {os.getpid()} ")
