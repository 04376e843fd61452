"""How fast do Spark jobs read and write a log directory, beside Parquet files of the same rows?

Method: one session, local[2], set up by pyspark_logcore.tune(). Ten million records (one million with --quick) of
random 16-byte keys and 100-byte values, in two partitions; the Parquet files are what Spark writes of the same rows by
default. All of it is in the page cache. The sides take turns, and of three samples the best counts.
- Read: every column into the noop sink, which drops the rows after they became Spark's.
- Count: count() with .schema("offset BIGINT"). Parquet answers it from its footers.
- Group: groupBy("partition") and the sum of length(value), with .schema("partition INT, value BINARY").
- Write: key and value, read from the Parquet files, into a new directory each time, beside uncompressed Parquet.
  logcore syncs what it writes, and publishes it at once. Parquet does not sync; in one row its files are synced behind.

Not shown: cold files, clusters, and streaming.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Result, Settings, Side

import logcore

ROWS_PER_CALL = 100_000
PARTITIONS = 2
REPEATS = 3


def run(settings: Settings) -> Iterator[Result]:
    if common.peer("pyspark", "Spark") is None:
        return
    from pyspark.sql import SparkSession

    import pyspark_logcore

    os.environ["PYTHONPATH"] = os.pathsep.join([str(common.ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    try:
        builder = pyspark_logcore.tune(SparkSession.builder.master("local[2]"))
    except pyspark_logcore.JavaNotFoundError as error:
        print(f"skipping Spark: {error}", file=sys.stderr)
        return
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    for name, value in {**quiet, "spark.driver.memory": "4g", "spark.sql.shuffle.partitions": "2"}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        with common.scratch(settings, "spark") as path:
            yield from compare(spark, path, 1_000_000 if settings.quick else 10_000_000)
    finally:
        spark.stop()


def compare(spark: Any, path: Path, count: int) -> Iterator[Result]:
    from pyspark.sql import functions as F

    make_log(path / "log", count)
    files = str(path / "parquet")

    def log(schema: str | None = None) -> Any:
        reader = spark.read.format("logcore").option("subscribe", "rows")
        return (reader if schema is None else reader.schema(schema)).load(str(path / "log"))

    log().write.parquet(files)
    common.settle()
    parquet = spark.read.parquet(files)
    whole = log()
    offsets = log("offset BIGINT")
    sizes = log("partition INT, value BINARY")
    assert parquet.count() == offsets.count() == count

    def drop(frame: Any) -> Side:
        return lambda: frame.write.format("noop").mode("overwrite").save()

    def group(frame: Any) -> Side:
        return lambda: frame.groupBy("partition").agg(F.sum(F.length("value"))).collect()

    yield beside("Spark read, all columns", count, drop(whole), drop(parquet), 1.0, "To the noop sink.")
    yield beside("Spark count()", count, offsets.count, parquet.count, 0.4, 'With .schema("offset BIGINT"); footers.')
    yield beside("Spark groupBy partition", count, group(sizes), group(parquet), 0.9, "Sum of length(value).")
    pairs = parquet.select("key", "value")
    ours = str(path / "written")
    theirs = str(path / "written-parquet")

    def write_log() -> None:
        shutil.rmtree(ours, ignore_errors=True)
        pairs.write.format("logcore").mode("append").option("topic", "rows").save(ours)

    def write_parquet() -> None:
        shutil.rmtree(theirs, ignore_errors=True)
        pairs.write.option("compression", "none").parquet(theirs)

    def write_parquet_to_disk() -> None:
        write_parquet()
        for file in Path(theirs).iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())

    yield beside("Spark write, key and value", count, write_log, write_parquet, 1.2, "Synced; Parquet is not.")
    yield beside("Spark write to the disk", count, write_log, write_parquet_to_disk, 1.2, "Both synced.")
    with logcore.open(os.path.join(ours, "rows-0"), read_only=True) as written:
        assert written.high_watermark == count, "what was written is there"


def beside(question: str, count: int, ours: Side, theirs: Side, target: float, method: str) -> Result:
    seconds = common.measure({"logcore": ours, "Parquet": theirs}, REPEATS)
    return Result(
        question=question,
        unit="records/s",
        ours=count / seconds["logcore"],
        peer_name="Parquet",
        peer=count / seconds["Parquet"],
        ratio=seconds["Parquet"] / seconds["logcore"],
        target=target,
        method=method,
    )


def make_log(path: Path, count: int) -> None:
    source = np.random.default_rng(7)
    edges = np.arange(ROWS_PER_CALL + 1)
    with logcore.open_dir(path, create=True, durability="os") as directory:
        directory.create_topic("rows", PARTITIONS)
        for call in range(count // ROWS_PER_CALL):
            directory.partition("rows", call % PARTITIONS).append_columns(
                keys=(source.bytes(ROWS_PER_CALL * common.KEY_SIZE), edges * common.KEY_SIZE),
                values=(source.bytes(ROWS_PER_CALL * common.VALUE_SIZE), edges * common.VALUE_SIZE),
            )
