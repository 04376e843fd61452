"""Commands that write to a directory which other processes have open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import logcore
from logcore import LogDir


def logcore_command(*words: str | Path, stdin: bytes = b"", code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "logcore", *map(str, words)],
        check=False,
        input=stdin,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr.decode()
    return (done.stdout if code == 0 else done.stderr).decode()


def values(data: LogDir, topic: str) -> list[bytes | None]:
    data.refresh()
    log = data.partition(topic, 0)
    log.refresh()
    return [record.value for record in log.read(0)]


@pytest.mark.long
def test_commands_write_beside_processes_that_share_the_directory(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True, shared=True) as data:
        logcore_command("topic", "create", path, "t")
        data.append("t", b"from here")
        logcore_command("append", path, "t", stdin=b"from there\n")
        data.append("t", b"from here again")
        assert values(data, "t") == [b"from here", b"from there", b"from here again"]
        logcore_command("append", path / "t-0", stdin=b"to the partition\n")
        logcore_command("topic", "alter", path, "t", "--config", "retention.ms=5000")
        data.refresh()
        assert data.settings("t").retention_ms == 5000
        logcore_command("topic", "delete", path, "t", "--yes")
        assert data.topics() == []


def test_directory_locked_exclusively_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as data:
        data.create_topic("t")
        assert "shared=True in both" in logcore_command(
            "append", path, "t", stdin=b"x\n", code=2
        )


@pytest.mark.long
def test_command_shares_the_directory_with_the_option(tmp_path: Path) -> None:
    path = tmp_path / "data"
    logcore_command("topic", "create", path, "t")
    command = [
        sys.executable,
        "-m",
        "logcore",
        "append",
        str(path),
        "t",
        "--shared",
        "--batch",
        "1",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as appending:
        assert appending.stdin is not None
        appending.stdin.write(b"1\n")
        appending.stdin.flush()
        with logcore.open_dir(path, read_only=True) as reader:
            tail = reader.tail("t", {0: 0}, timeout=30)
            assert next(tail).value == b"1"
            with logcore.open_dir(path, shared=True) as data:
                data.append("t", b"2")
            assert next(tail).value == b"2"
        appending.stdin.close()
        assert appending.wait(30) == 0


@pytest.mark.long
def test_an_append_counts_its_own_records_and_not_those_of_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    logcore_command("topic", "create", path, "t")
    command = [
        sys.executable,
        "-m",
        "logcore",
        "append",
        str(path),
        "t",
        "--shared",
        "--json",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as appending:
        assert appending.stdin is not None
        assert appending.stdout is not None
        appending.stdin.write(b"1\n")
        appending.stdin.flush()
        with logcore.open_dir(path, read_only=True) as reader:
            tail = reader.tail("t", {0: 0}, timeout=30)
            assert next(tail).value == b"1"
            with logcore.open_dir(path, shared=True) as data:
                data.append("t", b"of another")
                appending.stdin.write(b"2\n")
                appending.stdin.flush()
                assert [next(tail).value, next(tail).value] == [b"of another", b"2"]
                data.append("t", b"of another")
        appending.stdin.close()
        reported = json.loads(appending.stdout.read())
        assert appending.wait(30) == 0
    assert reported["records"] == 2
    assert reported["partitions"] == [
        {"partition": 0, "first_offset": 0, "last_offset": 2}
    ]
