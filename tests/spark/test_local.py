"""Tests of local writes that need a JVM. test_local_plain.py has the other tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql import SparkSession

import logcore
from logcore.errors import InvalidConfigError
from pyspark_logcore import gather, write_local
from pyspark_logcore.testing import failing, forget_commit
from support.simulated_local_writes import values


@pytest.mark.slow
def test_local_writes_of_a_stream_and_a_batch_job_are_gathered_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("orders", partitions=2)
        for number in range(2):
            directory.partition("orders", number).append_many(
                [(None, b"%d-%d" % (number, row)) for row in range(10)]
            )
    stream = spark.readStream.format("logcore").options(
        subscribe="orders", startingOffsets="earliest", packBytes="0"
    )
    frame = stream.load(str(tmp_path / "data")).select("value", "partition")
    reports = []

    def sink(frame: Any, batch_id: int) -> None:
        with pytest.raises(InvalidConfigError, match="leave job and batch out"):
            write_local(frame, str(tmp_path / "local"), "t", job="own")
        fail_first_attempt = frame.mapInArrow(failing(task=1), frame.schema)
        rows = write_local(
            fail_first_attempt, str(tmp_path / "local"), "t", partitions=2
        ).collect()
        reports.append(
            [
                (row["batch"], row["task"], row["tasks"], row["records"], row["host"])
                for row in rows
            ]
        )
        gather(rows, str(tmp_path / "into"))

    for _ in range(2):
        (
            frame.writeStream.option("checkpointLocation", str(tmp_path / "c"))
            .trigger(availableNow=True)
            .foreachBatch(sink)
            .start()
            .awaitTermination()
        )
        forget_commit(tmp_path / "c")
    host = os.uname().nodename
    assert [sorted(report) for report in reports] == [
        [(0, 0, 2, 10, host), (0, 1, 2, 10, host)]
    ] * 2
    assert values(tmp_path / "into") == {
        number: [b"%d-%d" % (number, row) for row in range(10)] for number in range(2)
    }
    empty = write_local(
        spark.range(1).selectExpr("'' AS value").where("1 = 0"),
        str(tmp_path / "local"),
        "t",
        job="none",
    )
    assert gather(empty, str(tmp_path / "into"))[0].records == 0
