"""LogDir.sql(): results, errors and asyncio. The queries are tested in
tests/cli/test_sql.py.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

import logcore
from logcore import aio
from support.avro_schemas import APPLES, add_schema

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


def test_try_returns_null_for_a_value_that_is_not_json(
    directory: logcore.LogDir,
) -> None:
    directory.append("orders", b"\xff{", key=b"k")
    query = "select count(try(value->>'$.price')), count(*) from orders"
    assert directory.sql(query).fetchall() == [(10, 11)]


def test_bytes_are_blobs_without_text(directory: logcore.LogDir) -> None:
    query = "select key from orders where value = '{\"price\": 4}'::blob"
    assert directory.sql(query, text=False).fetchall() == [(b"k1",)]


def test_values_are_decoded_by_their_schemas(
    directory: logcore.LogDir, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fastavro")
    directory.create_topic("framed")
    directory.append("framed", b"\0" + (1).to_bytes(4, "big") + APPLES)
    query = "select value->>'$.item', (value->>'$.amount')::int from framed"
    with pytest.raises(logcore.LogNotFoundError, match="schemas=URL"):
        directory.sql(query, schemas=True)
    directory.create_topic("_schemas")
    add_schema(directory, 1, 1)
    assert directory.sql(query, schemas=True).fetchall() == [("apples", 4)]
    directory.append("framed", b"\0" + (7).to_bytes(4, "big") + APPLES)
    found = directory.sql("select value from framed", schemas=True).fetchall()
    assert found[1] == ('{"hex":"00000000070c6170706c657308"}',)
    assert "a value was not decoded: unknown schema id 7" in caplog.text


def test_asyncio_has_the_same_calls(directory: logcore.LogDir, tmp_path: Path) -> None:
    with directory.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["orders"])
        found = 0
        while found < 10:
            found += consumer.poll(timeout=60).count
        consumer.commit()
    directory.close()

    async def main() -> None:
        async with aio.open_dir(tmp_path) as opened:
            table = await opened.sql("select count(*) as n from orders")
            assert table.to_pylist() == [{"n": 10}]
            with pytest.raises(logcore.QueryError, match="Conversion"):
                await opened.sql("select key::int from orders")
            assert (await opened.groups())["g"].lag == 0
            await opened.alter_group_offsets("g", {("orders", 0): 0, ("orders", 1): 0})
            assert (await opened.groups())["g"].lag == 10
            await opened.snapshot(tmp_path.parent / "backup")
        logcore.restore(tmp_path.parent / "backup", tmp_path.parent / "restored")

    asyncio.run(main())
    with logcore.open_dir(tmp_path.parent / "restored", read_only=True) as restored:
        assert len(list(restored.read("orders"))) == 10


def test_wrong_queries_name_the_topics(directory: logcore.LogDir) -> None:
    with pytest.raises(logcore.QueryError, match="did you mean 'orders'"):
        directory.sql("select * from ordrs")
    with pytest.raises(logcore.QueryError, match="syntax error"):
        directory.sql("select * form orders")
    directory.close()
    with pytest.raises(logcore.LogClosedError):
        directory.sql("select 1")
