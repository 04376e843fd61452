"""LogDir.sql(); tests/cli/test_sql.py has the queries themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import logcore

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[logcore.LogDir]:
    with logcore.open_dir(tmp_path, create=True, durability="os") as directory:
        directory.create_topic("orders", 2)
        for at in range(10):
            directory.append("orders", b'{"price": %d}' % at, key=b"k%d" % (at % 3))
        yield directory


def test_a_result_outlives_its_connection(directory: logcore.LogDir) -> None:
    query = "select key, sum((value->>'$.price')::int) as n from orders group by key order by key"
    result = directory.sql(query)
    gc.collect()
    assert result.fetchall() == [("k0", 18), ("k1", 12), ("k2", 15)]
    assert directory.sql(query).pl().columns == ["key", "n"]


def test_a_value_that_is_not_json_can_be_passed_over(directory: logcore.LogDir) -> None:
    directory.append("orders", b"\xff{", key=b"k")
    query = "select count(try(value->>'$.price')), count(*) from orders"
    assert directory.sql(query).fetchall() == [(10, 11)]


def test_bytes_are_blobs_without_text(directory: logcore.LogDir) -> None:
    query = "select key from orders where value = '{\"price\": 4}'::blob"
    assert directory.sql(query, text=False).fetchall() == [(b"k1",)]


def test_wrong_queries_name_the_topics(directory: logcore.LogDir) -> None:
    with pytest.raises(logcore.QueryError, match="did you mean 'orders'"):
        directory.sql("select * from ordrs")
    with pytest.raises(logcore.QueryError, match="syntax error"):
        directory.sql("select * form orders")
    directory.close()
    with pytest.raises(logcore.LogClosedError):
        directory.sql("select 1")
