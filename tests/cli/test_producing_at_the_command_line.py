"""`logcore produce`: the options of a producer, and other processes that write the same
directory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import logcore

click_testing = pytest.importorskip("click.testing")
from logcore.cli.commands import main  # noqa: E402


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t", 3)
    return path


def run(*arguments: object, typed: str = "", code: int = 0) -> Any:
    found = click_testing.CliRunner().invoke(
        main, ["produce", *map(str, arguments)], input=typed
    )
    assert found.exception is None or isinstance(found.exception, SystemExit), (
        found.exception
    )
    assert found.exit_code == code, found.output
    return found


def rows(found: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found.stdout.splitlines()]


def stored(data: Path) -> list[tuple[int, bytes | None, bytes | None, list[Any]]]:
    with logcore.open_dir(data, read_only=True) as directory:
        return [
            (number, record.key, record.value, list(record.headers))
            for number in directory.partitions("t")
            for record in directory.partition("t", number).read(0)
        ]


def test_records_get_the_key_the_headers_and_the_partition_that_are_given(
    data: Path,
) -> None:
    run(
        data / "t",
        "-k",
        "anna",
        "-H",
        "from=here",
        "-H",
        "empty=",
        "-p",
        2,
        typed="1\n2\n",
    )
    headers = [("from", b"here"), ("empty", b"")]
    assert stored(data) == [(2, b"anna", b"1", headers), (2, b"anna", b"2", headers)]


def test_a_record_that_has_a_key_and_headers_keeps_them(data: Path) -> None:
    line = '{"key": "ben", "value": "1", "headers": {"own": "x"}}'
    run(
        data / "t",
        "-k",
        "anna",
        "-H",
        "from=here",
        "-p",
        0,
        "--format",
        "ndjson",
        typed=f'{line}\n{{"value": "2"}}\n',
    )
    assert stored(data) == [
        (0, b"ben", b"1", [("own", b"x"), ("from", b"here")]),
        (0, b"anna", b"2", [("from", b"here")]),
    ]


def test_keys_choose_partitions_as_those_of_append_do(
    data: Path, tmp_path: Path
) -> None:
    lines = "".join(f"key {number}:{number}\n" for number in range(20))
    run(data / "t", "--key-separator", ":", typed=lines)
    other = tmp_path / "other"
    command = ["append", str(other), "t", "-K", ":", "--create", "--partitions", "3"]
    assert click_testing.CliRunner().invoke(main, command, input=lines).exit_code == 0
    assert stored(data) == stored(other)
    assert len({number for number, *_ in stored(data)}) == 3


def test_csv_and_files_are_accepted(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("id,name\n7,anna\n")
    run(data / "t", file, "--format", "csv", "--key-columns", "id", "-p", 0)
    assert stored(data) == [(0, b"7", b'{"id":"7","name":"anna"}', [])]


def test_verbose_prints_the_place_of_each_record(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(data / "t:1", typed="before\n")
    found = rows(run(data / "t", "-p", 1, "-v", "--batch", 2, typed="a\nb\nc\n"))
    assert found[:-1] == [
        {"line": line, "topic": "t", "partition": 1, "offset": offset}
        for line, offset in ((1, 1), (2, 2), (3, 3))
    ]
    assert found[-1]["records"] == 3
    monkeypatch.setattr("logcore.cli.append.wants_json", lambda as_json: as_json)
    first, last = run(data / "t", "-p", 1, "-v", typed="d\n").stdout.splitlines()
    assert first == "line 1: t:1 offset 4"
    assert last.startswith("1 records (t:1 offsets 4 to 4) appended to t")


@pytest.mark.parametrize(
    ("acks", "durability"), [("0", "os"), ("1", "os"), ("all", "disk"), ("-1", "disk")]
)
def test_acks_determine_the_wait_of_a_call(
    data: Path, acks: str, durability: str
) -> None:
    (reported,) = rows(run(data / "t", "--acks", acks, typed="1\n"))
    assert reported["durability"] == durability


def test_missing_topics_are_created_only_with_the_option(tmp_path: Path) -> None:
    run(tmp_path / "data" / "t", typed="1\n", code=2)
    assert not (tmp_path / "data").exists()
    run(
        tmp_path / "data" / "t",
        "--create",
        "--partitions",
        2,
        "--config",
        "retention.ms=5000",
        typed="1\n",
    )
    with logcore.open_dir(tmp_path / "data", read_only=True) as directory:
        assert directory.partitions("t") == (0, 1)
        assert directory.settings("t").retention_ms == 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-H", "none"], "NAME=VALUE"),
        (["-p", "7"], "no partition 7"),
        (["--key-columns", "a"], "--key-columns requires"),
        (["--acks", "2"], "all"),
    ],
)
def test_wrong_usage_stores_nothing(
    data: Path, arguments: list[str], words: str
) -> None:
    assert words in run(data / "t", *arguments, typed="1\n", code=2).stderr
    assert stored(data) == []


def test_partition_given_twice_is_refused(data: Path) -> None:
    assert "DIR/TOPIC" in run(data / "t:1", "-p", 1, typed="1\n", code=2).stderr
    assert "t:0" in run(data / "t-0", typed="1\n", code=2).stderr


def test_produce_shares_the_directory_with_other_processes(data: Path) -> None:
    command = [sys.executable, "-m", "logcore", "produce", str(data / "t"), "-p", "0"]
    with logcore.open_dir(data, shared=True) as directory:
        directory.append("t", b"here", partition=0)
        subprocess.run(
            command, input=b"there\n", check=True, capture_output=True, timeout=60
        )
        directory.append("t", b"here again", partition=0)
    assert [value for _, _, value, _ in stored(data)] == [
        b"here",
        b"there",
        b"here again",
    ]
