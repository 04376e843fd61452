"""Tests of streams that need a JVM. test_streams_plain.py has the other tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
# Limits and AvailableNow need 4.2.
pytest.importorskip("pyspark.sql.streaming.datasource")

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import logcore
from pyspark_logcore.testing import forget_commit

T0 = 1_700_000_000_000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("orders", partitions=2)
    append(path, 0, 30)
    append(path, 1, 20)
    return path


def append(path: Path, partition: int, count: int) -> None:
    with logcore.open_dir(path) as directory:
        log = directory.partition("orders", partition)
        end = log.log_end_offset
        log.append_many(
            [
                (b"k%d" % (number % 3), b"%d" % number, [], T0 + number * 1000)
                for number in range(end, end + count)
            ]
        )


def stream(spark: SparkSession, path: Path, **given: object) -> Any:
    texts = {
        name: str(value) for name, value in {"subscribe": "orders", **given}.items()
    }
    return spark.readStream.format("logcore").options(**texts).load(str(path))


def run(frame: Any, checkpoint: Path, sink: Any, mode: str = "append") -> Any:
    """Run a query until it has read all existing records, and return the query."""
    query = (
        frame.writeStream.outputMode(mode)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .foreachBatch(sink)
        .start()
    )
    query.awaitTermination()
    return query


@pytest.mark.long
def test_stream_continues_from_its_checkpoint(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    rows: list[tuple[int, int, int]] = []

    def sink(frame: Any, batch_id: int) -> None:
        if batch_id == 1:
            append(data, 0, 7)  # after Spark fixed the target offsets
        rows.extend(
            (batch_id, row["partition"], row["offset"]) for row in frame.collect()
        )

    frame = stream(spark, data, startingOffsets="earliest", maxOffsetsPerTrigger=20)
    query = run(frame, tmp_path / "c", sink)
    assert sorted(row[1:] for row in rows) == [(0, offset) for offset in range(30)] + [
        (1, offset) for offset in range(20)
    ]
    assert max(batch_id for batch_id, _, _ in rows) == 2
    progress = query.lastProgress["sources"][0]
    assert json.loads(json.dumps(progress["latestOffset"])), (
        "the progress contains the lag"
    )
    rows.clear()
    run(frame, tmp_path / "c", sink)
    assert [row[1:] for row in rows] == [(0, offset) for offset in range(30, 37)]


@pytest.mark.slow  # test_streams_plain.py tests it without a JVM
def test_failed_first_batch_loses_no_record(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    offsets: list[int] = []
    fails = [True]

    def sink(frame: Any, _: int) -> None:
        if fails and fails.pop():
            append(data, 0, 400)
            raise RuntimeError("the sink fails")
        offsets.extend(row["offset"] for row in frame.collect())

    checkpoint = tmp_path / "c"
    frame = (
        spark.readStream.format("logcore")
        .option("assign", json.dumps({"orders": [0]}))
        .option("startingOffsets", json.dumps({"orders": {"0": -1}}))
        .option("checkpointLocation", str(checkpoint))
        .load(str(data))
    )
    with pytest.raises(Exception, match="the sink fails"):
        run(frame, checkpoint, sink)
    run(frame, checkpoint, sink)
    assert offsets == list(range(30, 430))


@pytest.mark.slow  # half a minute
def test_watermark_join_and_deduplication(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    frame = stream(spark, data, startingOffsets="earliest")
    keyed = frame.select(
        F.col("key").cast("string").alias("key"), F.col("timestamp"), F.col("offset")
    )
    counts = (
        keyed.withWatermark("timestamp", "5 seconds")
        .groupBy(F.window("timestamp", "10 seconds"), "key")
        .count()
        .select("key", F.col("window.start").alias("start"), "count")
    )
    rows: list[Any] = []
    run(
        counts,
        tmp_path / "counts",
        lambda frame, _: rows.extend(frame.collect()),
        "append",
    )
    assert rows and all(row["count"] > 0 for row in rows)

    other = stream(spark, data, startingOffsets="earliest").select(
        "offset", "partition", "value"
    )
    joined = frame.select("offset", "partition").join(other, ["offset", "partition"])
    pairs: list[Any] = []
    run(
        joined,
        tmp_path / "joined",
        lambda frame, _: pairs.extend(frame.collect()),
        "append",
    )
    assert sorted((row["partition"], row["offset"]) for row in pairs) == [
        (0, offset) for offset in range(30)
    ] + [(1, offset) for offset in range(20)]

    unique: list[Any] = []
    distinct = keyed.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(
        ["key"]
    )
    run(distinct, tmp_path / "unique", lambda frame, _: unique.extend(frame.collect()))
    assert sorted(row["key"] for row in unique) == ["k0", "k1", "k2"]


def values_in(spark: SparkSession, path: Path, topic: str) -> list[bytes]:
    rows = (
        spark.read.format("logcore")
        .schema("value BINARY")
        .option("subscribe", topic)
        .load(str(path))
        .collect()
    )
    return sorted(bytes(row["value"]) for row in rows)


@pytest.mark.slow  # 8 s; test_sink_kills.py also continues with other tasks
def test_batch_replayed_with_other_tasks_is_written_once(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "c"

    def copy(tasks: int) -> None:
        rows = stream(
            spark, data, startingOffsets="earliest", maxOffsetsPerTrigger=20
        ).select("key", "value")
        query = (
            rows.repartition(tasks)
            .writeStream.format("logcore")
            .option("topic", "copy")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start(str(data))
        )
        query.awaitTermination()

    copy(1)
    expected = sorted(
        [b"%d" % number for number in range(30)]
        + [b"%d" % number for number in range(20)]
    )
    assert values_in(spark, data, "copy") == expected
    assert forget_commit(checkpoint) == 2
    copy(3)
    assert values_in(spark, data, "copy") == expected
    append(data, 0, 5)
    copy(2)
    assert len(values_in(spark, data, "copy")) == 55


@pytest.mark.slow
def test_updates_are_written_to_a_compacted_topic(
    spark: SparkSession, data: Path, tmp_path: Path
) -> None:
    with logcore.open_dir(data) as directory:
        directory.create_topic("totals", config={"cleanup.policy": "compact"})

    def sink(rows: Any, batch_id: int) -> None:
        writer = (
            rows.write.format("logcore")
            .mode("append")
            .option("topic", "totals")
            .option("txnAppId", "totals")
        )
        writer.option("txnVersion", batch_id).save(str(data))

    frame = stream(spark, data, startingOffsets="earliest", maxOffsetsPerTrigger=20)
    sums = frame.groupBy("key").agg(
        F.sum(F.col("value").cast("string").cast("int")).cast("string").alias("value")
    )
    run(sums, tmp_path / "c", sink, "update")
    numbers = [*range(30), *range(20)]
    with logcore.open(data / "totals-0", read_only=True) as log:
        latest = {record.key: int(record.value) for record in log.read(0)}
    assert latest == {
        b"k%d" % key: sum(number for number in numbers if number % 3 == key)
        for key in range(3)
    }
