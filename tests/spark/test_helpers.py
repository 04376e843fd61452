"""Tests of the helpers that pyspark_logcore provides for tests of Spark jobs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql import SparkSession
from pyspark.sql.readwriter import DataFrameReader

import logcore
from logcore.errors import InvalidConfigError, LogNotFoundError
from pyspark_logcore.options import parse_read
from pyspark_logcore.testing import failing, forget_commit, kafka_alias
from support import kafka_job


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("orders", partitions=2)
        for partition in (0, 1):
            directory.partition("orders", partition).append_many(
                [(b"anna", b"4"), (b"ben", b"7")]
            )
    return path


@pytest.mark.slow
def test_kafka_job_runs_unchanged_with_the_alias(
    spark: SparkSession, data: Path
) -> None:
    with kafka_alias(data):
        kafka_job.totals(spark, "orders", "totals", kafka_job.SECURITY)
    assert dict(pairs(data, "totals-0")) == {b"anna": b"8", b"ben": b"14"}


def pairs(data: Path, name: str) -> list[tuple[bytes, bytes]]:
    with logcore.open(data / name, read_only=True) as log:
        return [(record.key or b"", record.value or b"") for record in log.read(0)]


@pytest.mark.slow  # it runs the job of the test above again, with edited source text
def test_kafka_job_runs_after_two_edits(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    text = inspect.getsource(kafka_job)
    text = text.replace('format("kafka")', 'format("logcore")')
    text = text.replace(repr(kafka_job.SERVERS).replace("'", '"'), repr(str(data)))
    edited: dict[str, Any] = {}
    exec(compile(text, "edited_job.py", "exec"), edited)
    assert edited["SERVERS"] == str(data)
    edited["totals"](spark, "orders", "totals", {})
    assert dict(pairs(data, "totals-0")) == {b"anna": b"8", b"ben": b"14"}
    checkpoint = str(tmp_path / "checkpoint")
    edited["copied"](spark, "orders", "copy", checkpoint)
    assert sorted(pairs(data, "copy-0")) == [(b"anna", b"4")] * 2 + [(b"ben", b"7")] * 2
    with logcore.open_dir(data) as directory:
        directory.partition("orders", 1).append(key=b"carl", value=b"1")
    edited["copied"](spark, "orders", "copy", checkpoint)
    assert pairs(data, "copy-0")[4:] == [(b"carl", b"1")]


def test_alias_ends_with_its_block(data: Path) -> None:
    before = DataFrameReader.format
    with pytest.raises(ZeroDivisionError), kafka_alias(data):
        assert DataFrameReader.format is not before
        raise ZeroDivisionError
    assert DataFrameReader.format is before


def test_security_options_are_ignored_only_on_request(data: Path) -> None:
    options = {
        "path": str(data),
        "subscribe": "orders",
        "kafka.security.protocol": "SSL",
    }
    with pytest.raises(InvalidConfigError, match="protected only by their permissions"):
        parse_read(options)
    assert parse_read({**options, "ignoresecurityoptions": "true"}).subscribe == (
        "orders",
    )


@pytest.mark.slow  # tests/spark/test_local.py tests this in a job
def test_failed_task_is_retried(spark: SparkSession, data: Path) -> None:
    rows = spark.range(40).selectExpr("cast(id as string) as value").repartition(2)
    faulty = rows.mapInArrow(failing(task=1, attempts=2), rows.schema)
    faulty.write.format("logcore").mode("append").option("topic", "copy").save(
        str(data)
    )
    with logcore.open(data / "copy-0", read_only=True) as log:
        assert sorted(int(record.value) for record in log.read(0)) == list(range(40))


def test_forget_commit_removes_the_file_of_a_batch(tmp_path: Path) -> None:
    commits = tmp_path / "commits"
    with pytest.raises(LogNotFoundError, match="no such batch"):
        forget_commit(tmp_path)
    commits.mkdir()
    for name in ("0", "9", "10", ".10.crc"):
        (commits / name).write_text("v1")
    assert forget_commit(tmp_path) == 10
    assert forget_commit(tmp_path, 0) == 0
    assert sorted(path.name for path in commits.iterdir()) == ["9"]
    with pytest.raises(LogNotFoundError, match="no such batch"):
        forget_commit(tmp_path, 7)
