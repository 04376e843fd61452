"""Tests of reads from object stores that need a JVM. test_stores_plain.py has the other
tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql import SparkSession

import logcore
from support.s3 import SECRET, upload


@pytest.mark.slow  # test_stores_plain.py tests it without a JVM
def test_spark_reads_an_archive_and_logs_no_secret(
    spark: SparkSession, s3_server: dict[str, str], tmp_path: Path
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("orders", partitions=2)
        for number in range(2):
            directory.partition("orders", number).append_many(
                [(None, b"%d" % row) for row in range(100)]
            )
    upload(s3_server, tmp_path / "data", "spark/logs")
    reader = spark.read.format("logcore").options(
        subscribe="orders", packBytes="0", **s3_server
    )
    frame = reader.load("s3://spark/logs")
    assert sorted(row["value"] for row in frame.collect()) == sorted(
        b"%d" % row for row in range(100) for _ in range(2)
    )
    plan_text = frame._jdf.queryExecution().toString()
    assert "logcore" in plan_text
    assert SECRET not in plan_text
    with pytest.raises(Exception, match="bucket does not exist") as caught:
        reader.load("s3://elsewhere/logs").collect()
    assert SECRET not in str(caught.value)
