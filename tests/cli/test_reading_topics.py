"""`read`, `tail` and `append` with a topic: the partitions, their order, and the error
for a missing topic.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import logcore

click_testing = pytest.importorskip("click.testing")
from logcore.cli.commands import main  # noqa: E402

T0 = 1700000000000


def run(*arguments: object, stdin: str | bytes | None = None) -> Any:
    done = click_testing.CliRunner().invoke(
        main, list(map(str, arguments)), input=stdin
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), (
        done.exception
    )
    return done


def rows(*arguments: object) -> list[dict[str, Any]]:
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def places(*arguments: object) -> list[tuple[int, int]]:
    return [(row["partition"], row["offset"]) for row in rows(*arguments)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Topic t: partition 0 at seconds 0, 2, 4; partition 1 at 1, 3, 5; partition 2 is
    empty.
    """
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as logdir:
        logdir.create_topic("t", 3)
        logdir.create_topic("orders")
        for second in range(6):
            logdir.append(
                "t",
                b"v%d" % second,
                key=b"k%d" % second,
                partition=second % 2,
                timestamp_ms=T0 + 1000 * second,
            )
    return tmp_path / "data"


def test_a_topic_is_read_by_time(data: Path) -> None:
    found = rows("read", data, "t")
    assert [row["value"] for row in found] == [f"v{n}" for n in range(6)]
    assert found[1] == {
        "topic": "t",
        "partition": 1,
        "offset": 0,
        "timestamp_ms": T0 + 1000,
        "key": "k1",
        "value": "v1",
        "headers": [],
    }


def test_a_topic_is_read_by_partition(data: Path) -> None:
    assert places("read", data, "t", "--order", "partition") == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["t:1"], [(1, 0), (1, 1), (1, 2)]),
        (["t:2"], []),
        (["t", "-n", 2], [(0, 0), (1, 0)]),
        (["t", "-n", 0], []),
        (["t", "--from", 2], [(0, 2), (1, 2)]),
        (["t", "--from", 9], []),
        (["t", "--to", 1], [(0, 0), (1, 0)]),
        (
            ["t", "--from", "2023-11-14T22:13:22Z", "--to", "2023-11-14T22:13:24Z"],
            [(0, 1), (1, 1)],
        ),
        (["t", "--where", "key=k3"], [(1, 1)]),
        (
            ["t", "--where", "value~v[1-4]", "--where", "key!=k2"],
            [(1, 0), (1, 1), (0, 2)],
        ),
        (["t:0", "--where", "value~[34]"], [(0, 2)]),
        (["t", "--where", "value~[345]", "-n", 1], [(1, 1)]),
    ],
)
def test_arguments_select_the_records_to_read(
    data: Path, arguments: list[object], expected: list[tuple[int, int]]
) -> None:
    assert places("read", data, *arguments) == expected


def test_where_filters_the_directory_of_a_partition(data: Path) -> None:
    found = rows("read", data / "t-1", "--where", "key=k3")
    assert [row["offset"] for row in found] == [1] and "partition" not in found[0]


def test_formats_contain_topic_and_partition(data: Path) -> None:
    form = r"%t/%p/%o %s\n"
    assert (
        run("read", data, "t", "-n", 2, "--format", form).stdout
        == "t/0/0 v0\nt/1/0 v1\n"
    )
    assert run("read", data / "t-1", "-n", 1, "--format", form).stdout == "t/1/0 v1\n"


def test_the_last_records_of_a_topic(data: Path) -> None:
    assert places("tail", data, "t", "-n", 3) == [(1, 1), (0, 2), (1, 2)]
    assert places("tail", data, "t:0", "-n", 1) == [(0, 2)]
    assert places("tail", data, "t", "-n", 1, "--where", "key~[02]") == [(0, 1)]
    assert places("tail", data, "t", "-n", 0) == []
    assert len(places("tail", data, "t", "-n", 100)) == 6


def test_tail_follows_all_partitions(data: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "logcore",
        "tail",
        str(data),
        "t",
        "-n",
        "1",
        "-f",
        "--timeout",
        "20",
    ]
    with subprocess.Popen(
        [*command, "--where", "key!=no"], stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        assert json.loads(reader.stdout.readline())["value"] == "v5"
        with logcore.open_dir(data) as logdir:
            for number, key in itertools.product(range(3), (b"no", b"yes")):
                logdir.append("t", b"new", key=key, partition=number)
                if key == b"yes":
                    found = json.loads(reader.stdout.readline())
                    assert (found["partition"], found["key"]) == (number, "yes")
        reader.kill()


@pytest.mark.parametrize("command", ["read", "tail"])
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["{}", "ordres"], "did you mean 'orders'"),
        (["{}", "t-1"], "write t:1 for partition 1 of t"),
        (["{}", "t:7"], "it has 0, 1, 2"),
        (["{}", "t:x"], "expected TOPIC or TOPIC:PARTITION"),
        (["{}"], "orders, t"),
        (["{}/t-0", "t"], "the directory of one partition"),
    ],
)
def test_unknown_name_is_an_error_with_advice(
    data: Path, command: str, words: list[str], error: str
) -> None:
    done = run(command, *(word.format(data) for word in words))
    assert done.exit_code == 2 and error in done.stderr
    assert "Traceback" not in done.stderr


# -- append ----------------------------------------------------------------------------


def test_append_chooses_partitions_as_kafka_does(tmp_path: Path) -> None:
    lines = "".join(f"key-{n}:{n}\n" for n in range(50))
    done = run(
        "append",
        tmp_path,
        "o",
        "-K",
        ":",
        "--create",
        "--partitions",
        4,
        "--batch",
        7,
        stdin=lines,
    )
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["topic"], facts["records"]) == ("o", 50)
    with logcore.open_dir(tmp_path, read_only=True) as logdir:
        found = {record.key: record.partition for record in logdir.read("o")}
        assert [part["last_offset"] + 1 for part in facts["partitions"]] == [
            logdir.partition("o", part["partition"]).log_end_offset
            for part in facts["partitions"]
        ]
    with logcore.open_dir(tmp_path / "other", create=True, durability="os") as logdir:
        logdir.create_topic("o", 4)
        assert found == {
            b"key-%d" % n: logdir.append("o", b"", key=b"key-%d" % n).partition
            for n in range(50)
        }


def test_a_delimiter_ends_the_key(tmp_path: Path) -> None:
    """Like kcat -K: the first delimiter ends the key, and a line without a delimiter is a
    value with a null key.
    """
    run(
        "append",
        tmp_path / "t-0",
        "--create",
        "--key-delimiter",
        "::",
        stdin="a::b\nno\n::v\nk::\nx::y::z\n",
    )
    run("append", tmp_path / "t-0", "-K", r"\t", stdin="tab\tbed\n")
    with logcore.open(tmp_path / "t-0", read_only=True) as log:
        assert [record[2:4] for record in log.read(0)] == [
            (b"a", b"b"),
            (None, b"no"),
            (b"", b"v"),
            (b"k", b""),
            (b"x", b"y::z"),
            (b"tab", b"bed"),
        ]


def test_append_to_one_partition_and_from_a_file(data: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("x\ny\n")
    assert rows("append", data, "t:2", tmp_path / "lines")[0]["partitions"] == [
        {"partition": 2, "first_offset": 0, "last_offset": 1}
    ]
    assert [row["value"] for row in rows("read", data, "t:2")] == ["x", "y"]


def test_append_accepts_the_output_of_read(data: Path) -> None:
    text = run("read", data, "t").stdout
    assert (
        run(
            "append", data, "copy", "--create", "--format", "ndjson", stdin=text
        ).exit_code
        == 0
    )
    assert [
        (row["key"], row["timestamp_ms"]) for row in rows("read", data, "copy")
    ] == [(f"k{n}", T0 + 1000 * n) for n in range(6)]


def test_created_topic_has_the_given_settings(tmp_path: Path) -> None:
    run(
        "append",
        tmp_path,
        "t",
        "--create",
        "--config",
        "segment.bytes=2000",
        stdin="x\n",
    )
    assert rows("topic", "describe", tmp_path, "t")[0]["config"] == {
        "segment.bytes": "2000"
    }


def test_refused_line_reports_the_stored_records(data: Path) -> None:
    lines = "k1:a\nk2:" + "x" * 2_000 + "\nk3:c\n"
    arguments = ("append", data, "t", "-K", ":", "--config", "max.message.bytes=500")
    done = run(*arguments, "--batch", 1, stdin=lines)
    assert done.exit_code == 2 and done.stderr.startswith("error: line 2: ")
    assert "1 records (t:" in done.stderr and "--batch 1" in done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["{}", "ordres"], "did you mean 'orders'"),
        (["{}"], "add the name of a topic after"),
        (["{}", "t:9"], "it has 0, 1, 2"),
        (["{}", "t-1"], "write t:1"),
        (["{}", "t", "-K", ""], "expected some text"),
        (["{}", "t", "-K", r"\n"], "a newline ends the line"),
        (["{}", "t", "-K", ":", "--format", "ndjson"], "requires --format lines"),
        (["{}", "t", "-", "more"], "too many arguments: more"),
        (["{}/t-0", "-", "more"], "too many arguments: more"),
        (["{}/nowhere", "t"], "there is no log directory"),
    ],
)
def test_invalid_appends_store_nothing(
    data: Path, words: list[str], error: str
) -> None:
    done = run("append", *(word.format(data) for word in words), stdin="x\n")
    assert done.exit_code == 2 and error in done.stderr, done.stderr
    assert len(rows("read", data, "t")) == 6


# -- completion ------------------------------------------------------------------------


def test_the_shell_completes_topics(data: Path) -> None:
    from click.shell_completion import ShellComplete

    def completed(*arguments: str) -> set[str]:
        *words, last = arguments
        complete = ShellComplete(main, {}, "logcore", "_LOGCORE_COMPLETE")
        return {item.value for item in complete.get_completions(words, last)}

    assert completed("read", str(data), "") == {"orders", "t"}
    assert completed("tail", str(data), "or") == {"orders"}
    assert "orders" in completed("append", str(data), "or")
    assert completed("topic", "describe", str(data), "or") == {"orders"}
    assert completed("read", str(data / "nowhere"), "") == set()
    assert completed("rea") == {"read"}
