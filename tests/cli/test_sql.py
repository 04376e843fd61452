"""`logcore sql`: topics as tables, the parts of them that are read, and the errors of
invalid queries.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import logcore
from support.terminals import SOURCE, at_terminal

click_testing = pytest.importorskip("click.testing")
pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")
from logcore.cli.commands import main  # noqa: E402

T0 = 1700000000000


def run(*arguments: object) -> Any:
    done = click_testing.CliRunner().invoke(main, ["sql", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), (
        done.exception
    )
    return done


def rows(*arguments: object) -> list[dict[str, Any]]:
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("sql") / "data"
    with logcore.open_dir(path, create=True, durability="os") as logdir:
        logdir.create_topic("orders", 3)
        logdir.create_topic("my-topic")
        logdir.create_topic("empty", 2)
        for n in range(12):
            value = b'{"price":%d}' % n
            logdir.append(
                "orders",
                value,
                key=b"k%d" % (n % 4),
                partition=n % 3,
                timestamp_ms=T0 + n,
                headers=[("n", b"%d" % n)],
            )
        logdir.append(
            "my-topic",
            b"\xff\\a",
            key=None,
            headers=[("h", None), ("h", b"\xfe")],
            timestamp_ms=T0,
        )
    return path


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select count(*) as n from orders", [{"n": 12}]),
        ("select key, count(*) as n from orders group by key order by key limit 1", [{"key": "k0", "n": 3}]),
        ("select value from orders where key = 'k1' and \"offset\" = 0", [{"value": '{"price":1}'}]),
        ("select sum((value->>'$.price')::int)::int as s from orders where \"partition\" = 2", [{"s": 26}]),
        ("select count(*) as n from orders a join orders b using (key)", [{"n": 36}]),
        ("select max(header(headers, 'n')) as n from orders where \"offset\" = 3", [{"n": "9"}]),
        ("select max(timestamp) as t from ORDERS", [{"t": "2023-11-14T22:13:20.011Z"}]),
        ("select key, value from \"my-topic\"", [{"key": None, "value": "\\xFF\\x5Ca"}]),
        ("select headers[2] as h from \"my-topic\"", [{"h": {"key": "h", "value": "\\xFE"}}]),
        ("select count(*) as n from empty", [{"n": 0}]),
        ("with empty as (select 5 as n) select n from empty", [{"n": 5}]),
        ("select 1 as a; select 2 as b", [{"a": 1}, {"b": 2}]),
        ("select 1.5::decimal(5,2) as d, date '2026-01-31' as day", [{"d": 1.5, "day": "2026-01-31"}]),
        ("select \"offset\" from orders limit 0", []),
        ("", []),
    ],
)  # fmt: skip
def test_queries(data: Path, query: str, expected: list[dict[str, Any]]) -> None:
    assert rows(data, query) == expected


def test_all_columns(data: Path) -> None:
    (found,) = rows(data, "from orders order by timestamp limit 1")
    assert found == {
        "partition": 0,
        "offset": 0,
        "timestamp": "2023-11-14T22:13:20.000Z",
        "key": "k0",
        "value": '{"price":0}',
        "headers": [{"key": "n", "value": "0"}],
    }


def test_no_column_of_a_row_is_lost_and_each_is_json(data: Path) -> None:
    query = "select 1 as a, 2 as a, 3 as a_2, 'nan'::float as x, '-inf'::double as y"
    (row,) = rows(data, query)
    assert list(row.values()) == [1, 2, 3, "NaN", "-Infinity"]
    assert list(row)[:2] == ["a", "a_2"]


def test_a_record_without_a_time_has_none(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path, create=True) as logdir:
        logdir.create_topic("orders")
        logdir.append("orders", b"old", timestamp_ms=-1)
        logdir.append("orders", b"new", timestamp_ms=T0)
    query = "select epoch_ms(min(timestamp)) as first, count(*) - count(timestamp) as none from orders"
    assert rows(tmp_path, query) == [{"first": T0, "none": 1}]


def test_bytes_are_blobs(data: Path) -> None:
    assert rows(
        data, "--bytes", 'select typeof(value) as t, value from "my-topic"'
    ) == [{"t": "BLOB", "value": {"hex": "ff5c61"}}]


def test_csv(data: Path) -> None:
    text = run(
        data,
        "--csv",
        'select key, headers from "my-topic" union all select \'a,"b\', null',
    ).stdout
    assert list(csv.reader(io.StringIO(text))) == [
        ["key", "headers"],
        ["", '[{"key":"h","value":null},{"key":"h","value":"\\\\xFE"}]'],
        ['a,"b', ""],
    ]


def test_only_topics_in_the_query_are_read(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logcore.query.topic_dataset as module

    asked: list[tuple[list[int], list[str]]] = []
    real = module.batches_of

    def recording_scan(
        logs: Any, starts: Any, ends: Any, columns: Any, **rest: Any
    ) -> Any:
        asked.append((sorted(logs), list(columns)))
        return real(logs, starts, ends, columns, **rest)

    monkeypatch.setattr(module, "batches_of", recording_scan)
    rows(data, "select count(*) from orders")
    rows(data, "select key from orders where value like '%1%' and \"offset\" > 2")
    rows(data, "select 1")
    columns = [names for _, names in asked]
    assert columns[0] == ["partition"]
    assert set(columns[1]) == {"key", "value", "offset"}
    assert len(asked) == 2 and asked[0][0] == [0, 1, 2]


@pytest.mark.long
def test_a_limit_ends_a_long_reading(tmp_path: Path) -> None:
    """pyarrow's scanner reads ahead in threads: the program then hung at its end, or
    was aborted.
    """
    with logcore.open_dir(tmp_path, create=True, durability="os") as logdir:
        logdir.create_topic("t")
        for _ in range(150):
            logdir.partition("t", 0).append_many([(None, b"x" * 50)] * 2_000)
    command = [
        sys.executable,
        "-m",
        "logcore",
        "sql",
        str(tmp_path),
        'select "offset" from t limit 1',
    ]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, '{"offset":0}\n'), done.stderr


def test_all_scans_of_a_dataset_end_at_the_same_offset(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logcore.query.topic_dataset import TopicDataset

    with logcore.open_dir(data) as logdir:
        dataset = TopicDataset(logdir, "empty", ["offset"], is_text=True)
        assert dataset.scanner().to_reader().read_all().num_rows == 0
        logdir.append("empty", b"later", partition=0)
        assert dataset.scanner().to_reader().read_all().num_rows == 0
        logdir.partition("empty", 0).delete_records(1)


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("select * from ordrs", "there is no topic 'ordrs'; did you mean 'orders'?"),
        ("select * from xyz", "there are empty, my-topic, orders"),
        ("select * from my-topic", "double quotes"),
        ("select * form orders", "syntax error"),
        ("select price from orders", '"price" not found'),
        ("select value::int from orders", "Could not convert string"),
    ],
)
def test_invalid_queries_are_errors(data: Path, query: str, error: str) -> None:
    done = run(data, query)
    assert done.exit_code == 2 and error in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) <= 2


def test_topics_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    # Kafka accepts both names; create_topic() accepts only one.
    for name in (
        "orders-0",
        "Orders-0",
    ):
        (tmp_path / name).mkdir()
    assert "differ only in case" in run(tmp_path, "select * from orders").stderr
    assert rows(tmp_path, "select 1 as a") == [{"a": 1}]


def test_without_duckdb_the_error_names_the_extra(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    done = run(data, "select 1")
    assert (
        done.exit_code,
        re.search(r"pip install .*\[sql\]", done.stderr) is not None,
    ) == (2, True)


@pytest.mark.long
def test_a_terminal_gets_a_table(data: Path) -> None:
    code, text = at_terminal(
        "sql", data, "select key, count(*) as n from orders group by key order by key"
    )
    assert code == 0
    assert [
        line.split()
        for line in text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()[:2]
    ] == [
        ["key", "n"],
        ["k0", "3"],
    ]


@pytest.mark.long
def test_control_characters_of_values_are_escaped(data: Path) -> None:
    code, text = at_terminal(
        "sql", data, "select chr(27) || '[31mred' || chr(7) || chr(155) as v"
    )
    assert code == 0
    assert r"\x1b[31mred\x07\x9b" in text
    assert "\x1b[31m" not in text


def test_query_that_fails_at_a_later_row_reports_the_reason(data: Path) -> None:
    query = "select cast(case when n = 50000 then 'x' else '1' end as int) from range(60000) r(n)"
    done = run(data, query, "--csv")
    assert done.exit_code == 2
    assert "Could not convert string 'x' to INT32" in done.stderr


def test_a_query_sees_no_variables_of_the_program(data: Path) -> None:
    for name in ("query", "logdir", "connection", "result"):
        done = run(data, f"select * from {name}")
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: there is no topic '{name}'")
