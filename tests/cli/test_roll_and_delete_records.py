"""`logcore roll` and `logcore delete-records`: space on a full disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import logcore
from logcore.cli.commands import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def rows(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with logcore.open_dir(tmp_path / "data", create=True) as logdir:
        logdir.create_topic("t", partitions=2, config={"segment.bytes": "2000"})
        logdir.create_topic("other")
        for number in range(40):
            for partition in range(2):
                logdir.append("t", b"%d" % number * 100, partition=partition)
        logdir.append("other", b"x")
    return tmp_path / "data"


def size_of(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.glob("*.log*"))


def test_records_before_a_place_are_deleted_and_space_is_free(data: Path) -> None:
    before = size_of(data / "t-1")
    (row,) = rows(run("delete-records", data, "t:1", "--before", "20"))
    assert (row["partition"], row["start_before"]) == ("t-1", 0)
    assert row["log_start_offset"] == 20
    assert size_of(data / "t-1") == before - int(str(row["freed_bytes"])) < before
    with logcore.open_dir(data) as logdir:
        assert [logdir.partition("t", n).log_start_offset for n in range(2)] == [0, 20]


def test_roll_lets_all_records_be_deleted(data: Path) -> None:
    assert len(rows(run("roll", data, "t"))) == 2
    rows(run("roll", data / "t-0"))
    found = rows(run("delete-records", data, "t", "--before", "latest"))
    assert [row["log_start_offset"] for row in found] == [40, 40]
    assert size_of(data / "t-0") == size_of(data / "t-1") == 0
    assert size_of(data / "other-0") > 0


def test_commands_accept_a_topic_or_a_partition(data: Path) -> None:
    assert len(rows(run("scrub", data, "t:0", "--json"))) > 0
    found = rows(run("retention", data, "t", "--json"))
    assert [row["partition"] for row in found] == ["t-0", "t-1"]
    for command in (("roll",), ("delete-records", "--before", "1"), ("scrub",)):
        result = run(command[0], data / "t-0", "t", *command[1:])
        assert result.exit_code == 2
        assert "directory of one partition" in result.output
        result = run(command[0], data, "missing", *command[1:])
        assert result.exit_code == 2
        assert "no such topic" in result.output or "no topic" in result.output


def test_delete_records_needs_a_topic(data: Path) -> None:
    result = run("delete-records", data, "--before", "latest")
    assert result.exit_code == 2
    assert "name one of them" in result.output
    with logcore.open_dir(data) as logdir:
        assert logdir.partition("t", 0).log_start_offset == 0
