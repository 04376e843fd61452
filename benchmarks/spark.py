"""How fast do Spark jobs read and write a log directory, beside Parquet files of the
same rows?

Method: one session, local[2], set up by pyspark_logcore.tune(). Ten million records
(one million with --quick) of random 16-byte keys and 100-byte values, in two
partitions; Spark writes the same rows to the Parquet files with its defaults. All files
are in the page cache. The sides take turns, and of three samples the best counts.
- Read: every column into the noop sink, which drops the rows after Spark has converted
  them.
- Count: count() with .schema("offset BIGINT"). Parquet answers it from its footers.
- Group: groupBy("partition") and the sum of length(value), with .schema("partition INT,
  value BINARY").
- Write: key and value, read from the Parquet files, into a new directory each time,
  compared with uncompressed Parquet. logcore syncs its files and publishes all rows at
  once. Parquet does not sync; in one row its files are synced after the write.
- Commit: the driver's part of a write of 1 GiB that tasks have staged in four files,
  beside reading these files and checking their CRCs. This row and the next one run
  without Spark.
- Idle: CPU time of a streaming query's check of 500 idle partitions, compared with a
  check of one partition.

Not shown: cold files, clusters, and streaming; connector.py measures beside Spark's
Kafka connector.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Result, Settings, Side

import logcore
from logcore.format.columns import input_columns
from logcore.fs import OS
from logcore.kernels.checksum import crc32c
from logcore.metadata.filenames import staging_path
from logcore.staging.applying import apply_ready
from logcore.staging.manifest import Manifest
from logcore.staging.publishing import Staging
from logcore.staging.writing import StagedWriter

ROWS_PER_CALL = 100_000
PARTITIONS = 2
REPEATS = 3


def run(settings: Settings) -> Iterator[Result]:
    if common.peer("pyspark", "Spark") is None:
        return
    with common.scratch(settings, "spark-commit") as path:
        yield commit(path, (128 if settings.quick else 1024) << 20)
    with common.scratch(settings, "spark-idle") as path:
        yield idle(path)
    from pyspark.sql import SparkSession

    import pyspark_logcore

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(common.ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    )
    try:
        builder = pyspark_logcore.tune(SparkSession.builder.master("local[2]"))
    except pyspark_logcore.JavaNotFoundError as error:
        print(f"skipping Spark: {error}", file=sys.stderr)
        return
    quiet = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    for name, value in {
        **quiet,
        "spark.driver.memory": "4g",
        "spark.sql.shuffle.partitions": "2",
    }.items():
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
        return (reader if schema is None else reader.schema(schema)).load(
            str(path / "log")
        )

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
        return lambda: (
            frame.groupBy("partition").agg(F.sum(F.length("value"))).collect()
        )

    yield beside(
        "Spark read, all columns",
        count,
        drop(whole),
        drop(parquet),
        1.0,
        "To the noop sink.",
    )
    yield ceiling(
        "Spark read, all columns, beside a source of prebuilt batches",
        count,
        drop(whole),
        drop(prebuilt(spark, whole.schema, count)),
        0.97,
    )
    yield beside(
        "Spark count()",
        count,
        offsets.count,
        parquet.count,
        0.4,
        'With .schema("offset BIGINT"); footers.',
    )
    yield beside(
        "Spark groupBy partition",
        count,
        group(sizes),
        group(parquet),
        0.9,
        "Sum of length(value).",
    )
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

    yield beside(
        "Spark write, key and value",
        count,
        write_log,
        write_parquet,
        1.2,
        "Synced; Parquet is not.",
    )
    yield beside(
        "Spark write to the disk",
        count,
        write_log,
        write_parquet_to_disk,
        1.2,
        "Both synced.",
    )
    dropping = dropped(spark)
    yield ceiling(
        "Spark write, key and value, beside a writer that drops batches",
        count,
        write_log,
        lambda: pairs.write.format(dropping).mode("append").save(),
        0.75,
    )
    with logcore.open(os.path.join(ours, "rows-0"), read_only=True) as written:
        assert written.high_watermark == count, "the log contains all written records"


def beside(
    question: str, count: int, ours: Side, theirs: Side, target: float, method: str
) -> Result:
    seconds = common.measure({"logcore": ours, "Parquet": theirs}, REPEATS)
    return Result(
        question=question,
        unit="records/s",
        ours=count / seconds["logcore"],
        peer_name="Parquet",
        peer=count / seconds["Parquet"],
        ratio=seconds["Parquet"] / seconds["logcore"],
        turns=seconds.ratios("Parquet", "logcore"),
        target=target,
        method=method,
    )


def ceiling(
    question: str, count: int, ours: Side, limit: Side, target: float
) -> Result:
    seconds = common.measure({"logcore": ours, "ceiling": limit}, REPEATS)
    return Result(
        question=question,
        unit="records/s",
        ours=count / seconds["logcore"],
        peer_name="the ceiling",
        peer=count / seconds["ceiling"],
        ratio=seconds["ceiling"] / seconds["logcore"],
        turns=seconds.ratios("ceiling", "logcore"),
        target=target,
        method="A Python data source in Spark without any work of its own: the rest is Spark.",
    )


def prebuilt(spark: Any, schema: Any, count: int) -> Any:
    """Return a frame with this number of rows, from a source that cycles 48 batches.

    48 batches exceed the caches, because the bytes of a log are in no cache either.
    """
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    sizes = {
        "key": common.KEY_SIZE,
        "value": common.VALUE_SIZE,
    }  # Spark's workers cannot import that module

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(PARTITIONS)]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            import pyarrow as pa
            from pyspark.sql.pandas.types import to_arrow_schema

            rows = 10_000
            wanted = to_arrow_schema(schema, timezone="UTC")
            rng = np.random.default_rng(partition.value)
            random = {
                name: np.frombuffer(rng.bytes(rows * size), np.uint8)
                for name, size in sizes.items()
            }
            batches = []
            for _ in range(48):
                arrays = []
                for field in wanted:
                    if pa.types.is_binary(field.type):
                        size = sizes[field.name]
                        offsets = pa.py_buffer(
                            np.arange(rows + 1, dtype=np.int32) * size
                        )
                        data = pa.py_buffer(random[field.name].copy())
                        arrays.append(
                            pa.Array.from_buffers(
                                field.type, rows, [None, offsets, data]
                            )
                        )
                    elif pa.types.is_string(field.type):
                        arrays.append(pa.array(["rows"] * rows, field.type))
                    elif pa.types.is_nested(field.type):
                        arrays.append(pa.array([[]] * rows, field.type))
                    else:
                        arrays.append(
                            pa.array(np.arange(rows), pa.int64()).cast(
                                field.type, safe=False
                            )
                        )
                batches.append(pa.RecordBatch.from_arrays(arrays, schema=wanted))
            for number in range(count // PARTITIONS // rows):
                yield batches[number % 48]

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "prebuilt"

        def schema(self) -> Any:
            return schema

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader()

    spark.dataSource.register(Source)
    return spark.read.format("prebuilt").load()


def dropped(spark: Any) -> str:
    """Return the name of a format that drops all batches."""
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        WriterCommitMessage,
    )

    class Writer(DataSourceArrowWriter):
        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            for _ in iterator:
                pass
            return WriterCommitMessage()

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "dropped"

        def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
            return Writer()

    spark.dataSource.register(Source)
    return "dropped"


def commit(path: Path, size_bytes: int) -> Result:
    """Take one sample of each side per turn; each commit needs its own staged files."""
    samples: dict[str, list[float]] = {"commit": [], "read": []}
    for number in range(REPEATS):
        where = str(path / f"commit{number}")
        manifest = stage(where, size_bytes)
        staged = [f"{staging_path(where)}/{file.name}.log" for file in manifest.files]
        started = time.perf_counter()
        for name in staged:
            with open(name, "rb") as handle:
                crc32c(handle.read())
        samples["read"].append(time.perf_counter() - started)
        started = time.perf_counter()
        Staging(OS, where).publish(manifest)
        with logcore.open_dir(where) as directory:
            apply_ready(OS, directory)
        samples["commit"].append(time.perf_counter() - started)
        with logcore.open_dir(where, read_only=True) as directory:
            count = sum(
                directory.partition("rows", number).high_watermark
                for number in range(PARTITIONS)
            )
        assert count == sum(file.count for file in manifest.files), (
            "the log contains all committed records"
        )
        shutil.rmtree(where)
        shutil.rmtree(staging_path(where))
    ours = min(samples["commit"])
    theirs = min(samples["read"])
    return Result(
        question="commit of a staged write",
        unit="ms",
        ours=ours * 1000,
        peer_name="one reading",
        peer=theirs * 1000,
        ratio=ours / theirs,
        target=1.0,
        bound="at most",
        method="Its files, read once and checked.",
    )


def stage(where: str, size_bytes: int) -> Manifest:
    """Stage the files of two tasks, each with one file per partition."""
    with logcore.open_dir(where, create=True) as directory:
        directory.create_topic("rows", PARTITIONS)
    txid = uuid.uuid4().hex
    Staging(OS, where).begin(txid)
    values = np.random.default_rng(7).bytes(ROWS_PER_CALL * common.VALUE_SIZE)
    edges = np.arange(ROWS_PER_CALL + 1) * common.VALUE_SIZE
    columns = input_columns("a benchmark", None, (values, edges), None)
    files = []
    for task in range(2):
        for partition in range(PARTITIONS):
            writer = StagedWriter(
                OS, where, txid, "rows", partition, f"{task}.0", logcore.LogConfig()
            )
            for _ in range(size_bytes // (2 * PARTITIONS * len(values))):
                writer.append_columns(columns)
            files += writer.close()
    return Manifest(
        app_id="benchmark", version=0, txid=txid, files=files, topics={}, query=None
    )


def idle(path: Path) -> Result:
    """Measure the CPU time of a check of partitions that did not change for a while."""
    from pyspark_logcore.options import parse_stream
    from pyspark_logcore.stream_reader import LogcoreStreamReader

    many = 500
    with logcore.open_dir(path / "log", create=True) as directory:
        directory.create_topic("many", many)
        directory.create_topic("one", 1)
    seconds = {}
    for topic in ("many", "one"):
        options = parse_stream(
            {
                "path": str(path / "log"),
                "subscribe": topic,
                "startingoffsets": "earliest",
            }
        )
        reader = LogcoreStreamReader(options, ("value",))
        at = reader.initialOffset()
        samples = []
        deadline = (
            time.monotonic() + 2.5
        )  # partitions that have just changed are checked closely for a second
        while time.monotonic() < deadline or len(samples) < 20:
            started = time.process_time()
            at = reader.latestOffset(at, reader.getDefaultReadLimit())
            samples.append(time.process_time() - started)
        reader.stop()
        seconds[topic] = min(samples)
    return Result(
        question="idle check of 500 partitions",
        unit="ms",
        ours=seconds["many"] * 1000,
        peer_name="one partition",
        peer=seconds["one"] * 1000,
        ratio=seconds["many"] * 1000,
        target=5.0,
        bound="at most",
        ratio_unit=" ms",
        method="CPU time.",
    )


def make_log(path: Path, count: int) -> None:
    source = np.random.default_rng(7)
    edges = np.arange(ROWS_PER_CALL + 1)
    with logcore.open_dir(path, create=True, durability="os") as directory:
        directory.create_topic("rows", PARTITIONS)
        for call in range(count // ROWS_PER_CALL):
            directory.partition("rows", call % PARTITIONS).append_columns(
                keys=(
                    source.bytes(ROWS_PER_CALL * common.KEY_SIZE),
                    edges * common.KEY_SIZE,
                ),
                values=(
                    source.bytes(ROWS_PER_CALL * common.VALUE_SIZE),
                    edges * common.VALUE_SIZE,
                ),
            )
