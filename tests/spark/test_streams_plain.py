"""Tests of the stream reader without Spark. They call its methods like Spark, in the
orders that docs/spark.md describes.

`Query` simulates Spark: it stores offsets and commits, and can stop between any two calls.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import logcore
from logcore import recordbatch
from logcore.errors import (
    InvalidConfigError,
    LogcoreError,
    LogNotFoundError,
    TopicNotFoundError,
)
from netshim.testing import start as start_broker
from pyspark_logcore import admission
from pyspark_logcore.identity import OtherDirectoryError
from pyspark_logcore.options import parse_stream
from pyspark_logcore.ranges import DataLossError
from pyspark_logcore.source import LogcoreDataSource
from pyspark_logcore.stream_reader import (
    HAS_LIMITS,
    FirstBatchError,
    LogcoreStreamReader,
)

if HAS_LIMITS:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

needs_limits = pytest.mark.skipif(
    not HAS_LIMITS, reason="pyspark before 4.2 has no limits"
)
Offsets = dict[str, dict[str, int]]


def reader_of(path: Path | str, **given: object) -> LogcoreStreamReader:
    texts = {name.lower(): str(value) for name, value in given.items()}
    source_options = (
        {"path": str(path)}
        if isinstance(path, Path)
        else {"kafka.bootstrap.servers": path}
    )
    data_source = LogcoreDataSource({**source_options, **texts})
    return data_source.streamReader(data_source.schema())


def json_copy(offsets: Any) -> Any:
    """Encode a value as JSON and decode it, as Spark does to transfer it."""
    return json.loads(json.dumps(offsets))


class Query:
    """One streaming query."""

    def __init__(self, path: Path | str, **options: object) -> None:
        self.path = path
        self.options = options
        self.first: Offsets | None = None
        #: The end offsets and the number of committed batches in the checkpoint.
        self.offsets: list[Offsets] = []
        self.commits = 0
        #: The rows that the sink has received: (topic, partition, offset, value).
        self.rows: list[tuple[str, int, int, bytes]] = []
        self.reader = reader_of(path, **options)

    def restart(self) -> None:
        self.reader.stop()
        self.reader = reader_of(self.path, **self.options)

    def begin(self, available_now: bool = False) -> None:
        """Call the methods that Spark calls at the start of a query."""
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        if len(self.offsets) > self.commits:  # an unfinished batch
            if self.commits == 0:
                self.first = json_copy(self.reader.initialOffset())
            self.run(self.offsets[-1])

    def trigger(self, limit: Any = None) -> bool:
        """Run one micro-batch. Return False if there were no records."""
        end = self.plan(limit)
        if end is None:
            return False
        self.run(end)
        return True

    def plan(self, limit: Any = None) -> Offsets | None:
        """Plan a batch, and store its offsets."""
        if not self.offsets:
            self.first = json_copy(self.reader.initialOffset())
        before = self.start()
        if limit is None:
            limit = self.reader.getDefaultReadLimit() if HAS_LIMITS else None
        end = json_copy(self.reader.latestOffset(before, limit))
        if end == before and self.offsets:
            return None  # Spark creates batch 0 even without records
        self.offsets.append(end)
        if len(self.offsets) == 1:
            self.first = json_copy(self.reader.initialOffset())
        else:
            self.reader.commit(before)
        return end

    def start(self) -> Offsets:
        committed = self.offsets[self.commits - 1] if self.commits else self.first
        assert committed is not None
        return committed

    def run(self, end: Offsets, commit: bool = True) -> None:
        """Run the tasks of a batch, and commit it."""
        rows = self.tasks(self.start(), end)
        if commit:
            self.rows += rows
            self.commits += 1

    def tasks(self, start: Offsets, end: Offsets) -> list[tuple[str, int, int, bytes]]:
        rows = []
        remote = pickle.loads(pickle.dumps(reader_of(self.path, **self.options)))
        for input_partition in self.reader.partitions(start, end):
            for batch in remote.read(pickle.loads(pickle.dumps(input_partition))):
                rows += [
                    (
                        row["topic"],
                        row["partition"],
                        row["offset"],
                        row["value"],
                    )
                    for row in batch.to_pylist()
                ]
        return rows


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("orders", partitions=2)
    append(path, "orders", 0, 30)
    append(path, "orders", 1, 20)
    return path


def append(path: Path, topic: str, partition: int, count: int) -> None:
    with logcore.open_dir(path) as directory:
        log = directory.partition(topic, partition)
        end = log.log_end_offset
        log.append_many([(None, b"%d" % number) for number in range(end, end + count)])


def expected(
    *spans: tuple[int, int, int], topic: str = "orders"
) -> list[tuple[str, int, int, bytes]]:
    return [
        (topic, partition, offset, b"%d" % offset)
        for partition, first, end in spans
        for offset in range(first, end)
    ]


# -- offsets and starts ----------------------------------------------------------------


def test_offsets_have_the_json_form_of_kafka(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("b", partitions=11)
        directory.create_topic("a")
    initial_offsets = reader_of(
        tmp_path / "data", subscribePattern="[ab]"
    ).initialOffset()
    assert json.dumps(initial_offsets) == json.dumps(
        {"a": {"0": 0}, "b": {str(number): 0 for number in range(11)}}
    )


@pytest.mark.parametrize(
    "offsets",
    [
        [],
        {"t": 1},
        {"t": {"x": 1}},
        {"t": {"0": -1}},
        {"t": {"0": True}},
        {"t": {"0": "1"}},
    ],
)
def test_invalid_offsets_are_refused(offsets: Any) -> None:
    with pytest.raises(InvalidConfigError, match="offsets of a checkpoint"):
        admission.from_json(offsets)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, (30, 20)),
        ({"startingOffsets": "latest"}, (30, 20)),
        ({"startingOffsets": "earliest"}, (0, 0)),
        ({"startingOffsets": json.dumps({"orders": {"0": 7, "1": -1}})}, (7, 20)),
        ({"startingOffsets": json.dumps({"orders": {"0": -2, "1": 3}})}, (0, 3)),
        ({"startingTimestamp": 0}, (0, 0)),
        (
            {
                "startingTimestamp": 10**15,
                "startingOffsetsByTimestampStrategy": "latest",
            },
            (30, 20),
        ),
        (
            {"startingOffsetsByTimestamp": json.dumps({"orders": {"0": 0, "1": 0}})},
            (0, 0),
        ),
    ],
)
def test_options_select_the_start_offsets(
    data: Path, options: dict[str, str], first: tuple[int, int]
) -> None:
    query = Query(data, subscribe="orders", **options)
    start = query.reader.initialOffset()
    query.first = json_copy(start)
    assert start == {"orders": {"0": first[0], "1": first[1]}}
    append(data, "orders", 0, 2)
    assert query.trigger()
    assert query.rows == expected((0, first[0], 32), (1, first[1], 20))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"endingOffsets": "latest"}, "endingOffsets is for batch reads"),
        ({"endingTimestamp": "1"}, "endingTimestamp is for batch reads"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        (
            {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            "higher than maxOffsetsPerTrigger",
        ),
        ({"maxTriggerDelay": "soon"}, "such as 15m"),
        ({"commitOffsets": "true"}, "needs the option kafka.group.id"),
        ({"checkpointLocation": "hdfs://x/y"}, "not at a URL"),
        ({"maxOffsetPerTrigger": "9"}, "did you mean maxOffsetsPerTrigger"),
    ],
)
def test_unsupported_stream_options_are_errors(
    data: Path, options: dict[str, str], match: str
) -> None:
    with pytest.raises(InvalidConfigError, match=match):
        reader_of(data, subscribe="orders", **options)


def test_delay_is_parsed_like_sparks_durations() -> None:
    texts = {"15m": 900, "100ms": 0.1, "2h": 7200, "30 s": 30, "7": 0.007, "1d": 86_400}
    delays = {
        text: parse_stream(
            {"path": "/x", "subscribe": "t", "maxtriggerdelay": text}
        ).max_delay_seconds
        for text in texts
    }
    assert delays == pytest.approx(texts)


def test_unknown_topic_is_reported_by_name(data: Path) -> None:
    with pytest.raises(TopicNotFoundError, match="nothing"):
        reader_of(data, subscribe="nothing").initialOffset()


# -- limits ----------------------------------------------------------------------------

KEYS = st.tuples(st.sampled_from("ab"), st.integers(0, 3))


@given(
    st.dictionaries(
        KEYS, st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1
    ),
    st.integers(1, 10**5),
)
@example({("a", 0): (0, 1_000_000), ("a", 1): (0, 1)}, 10)
def test_limit_is_divided_like_in_kafkas_source(
    partitions: dict[Any, tuple[int, int]], limit: int
) -> None:
    start = {key: first for key, (first, _) in partitions.items()}
    ends = {key: first + size for key, (first, size) in partitions.items()}
    limited = admission.at_most(start, ends, limit)
    sizes = {key: limited[key] - start[key] for key in limited}
    total = sum(size for _, size in partitions.values())
    assert limited.keys() == ends.keys()
    assert all(start[key] <= limited[key] <= ends[key] for key in limited)
    assert all((sizes[key] > 0) == (partitions[key][1] > 0) for key in sizes)
    assert sum(sizes.values()) <= limit + len(partitions)
    for key, (_, size) in partitions.items():
        if total > limit and size:
            # The formula of KafkaMicroBatchStream.rateLimit, which computes with
            # doubles.
            share = limit * size / total
            assert abs(sizes[key] - min(size, 1 if share < 1 else int(share))) <= 1


@needs_limits
def test_batches_are_limited_until_all_is_read(data: Path) -> None:
    query = Query(
        data, subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger=10
    )
    while query.trigger():
        pass
    assert sorted(query.rows) == sorted(expected((0, 0, 30), (1, 0, 20)))
    assert query.offsets[0] == {"orders": {"0": 6, "1": 4}}
    assert len(query.offsets) == 5


@needs_limits
@pytest.mark.parametrize(
    "options",
    [
        {"maxOffsetsPerTrigger": 1, "minOffsetsPerTrigger": 1},
        {"minOffsetsPerTrigger": 100},
    ],
)
def test_trigger_once_reads_all_records_despite_limits(
    data: Path, options: dict[str, int]
) -> None:
    query = Query(data, subscribe="orders", startingOffsets="earliest", **options)
    assert query.trigger(ReadAllAvailable())
    append(data, "orders", 1, 2)
    assert query.trigger(ReadAllAvailable())
    assert query.rows == expected((0, 0, 30), (1, 0, 20), (1, 20, 22))


@pytest.mark.long
@needs_limits
@pytest.mark.parametrize(
    "options", [{"maxOffsetsPerTrigger": 8}, {"minOffsetsPerTrigger": 1_000}, {}]
)
def test_available_now_ends_at_its_target(data: Path, options: dict[str, int]) -> None:
    query = Query(data, subscribe="orders", startingOffsets="earliest", **options)
    query.begin(available_now=True)
    with logcore.open_dir(data) as directory:
        directory.create_topic("late")
    while query.trigger():
        append(data, "orders", 0, 3)
        append(data, "orders", 1, 1)
    assert sorted(query.rows) == sorted(expected((0, 0, 30), (1, 0, 20)))


def test_batch_waits_for_the_minimum_or_the_maximum_delay(data: Path) -> None:
    now = [0.0]
    query = Query(
        data,
        subscribe="orders",
        startingOffsets="earliest",
        minOffsetsPerTrigger=10,
        maxTriggerDelay="1m",
    )
    query.reader.clock = lambda: now[0]
    assert query.trigger(), "the first batch does not wait"
    append(data, "orders", 0, 4)
    assert not query.trigger()
    append(data, "orders", 1, 6)
    assert query.trigger()
    append(data, "orders", 1, 1)
    now[0] = 59.0
    assert not query.trigger()
    now[0] = 60.0
    assert query.trigger()
    assert sorted(query.rows) == sorted(expected((0, 0, 34), (1, 0, 27)))


def test_limits_are_refused_before_spark_4_2(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark_logcore.stream_reader.HAS_LIMITS", False)
    with pytest.raises(InvalidConfigError, match=r"needs pyspark 4\.2"):
        reader_of(data, subscribe="orders", maxOffsetsPerTrigger=5)
    reader = reader_of(data, subscribe="orders")
    assert reader.latestOffset() == {"orders": {"0": 30, "1": 20}}


def test_stream_metrics_contain_the_lag(data: Path) -> None:
    query = Query(
        data, subscribe="orders", startingOffsets="earliest", minOffsetsPerTrigger=100
    )
    query.trigger()
    append(data, "orders", 0, 5)
    assert not query.trigger()
    assert query.reader.reportLatestOffset() == {"orders": {"0": 35, "1": 20}}


# -- restarts --------------------------------------------------------------------------


def test_replayed_batch_reads_the_same_records(data: Path) -> None:
    query = Query(data, subscribe="orders", startingOffsets="earliest")
    query.trigger()
    append(data, "orders", 0, 3)
    end = query.plan()
    assert end is not None
    before = query.tasks(query.start(), end)
    append(data, "orders", 0, 50)
    append(data, "orders", 1, 50)
    query.restart()
    assert query.tasks(query.start(), end) == before == expected((0, 30, 33))
    query.begin()
    query.trigger()
    assert sorted(query.rows) == sorted(expected((0, 0, 83), (1, 0, 70)))


@pytest.mark.parametrize("grown", [0, 400])
def test_failed_first_batch_loses_no_record(
    data: Path, grown: int, tmp_path: Path
) -> None:
    """Measured with Spark 4.3: after the restart, Spark requests the new start offsets,
    and combines them with the old end offsets.
    """
    query = Query(data, subscribe="orders", checkpointLocation=tmp_path / "checkpoint")
    query.first = json_copy(query.reader.initialOffset())
    append(data, "orders", 0, 10)
    assert query.plan() == {"orders": {"0": 40, "1": 20}}
    append(data, "orders", 0, grown)
    query.restart()
    query.begin()
    query.trigger()
    assert query.rows == expected((0, 30, 40 + grown))


@pytest.mark.parametrize(
    "options", ["latest", json.dumps({"orders": {"0": -1, "1": 0}})]
)
def test_failed_first_batch_without_a_checkpoint_location_is_an_error(
    data: Path, options: str, tmp_path: Path
) -> None:
    query = Query(data, subscribe="orders", startingOffsets=options)
    query.plan()
    append(data, "orders", 0, 10)
    query.restart()
    with pytest.raises(
        FirstBatchError, match=r"batch 0.*new checkpoint.*checkpointLocation"
    ):
        query.begin()
    query.options = {**query.options, "checkpointLocation": tmp_path / "late"}
    query.restart()
    with pytest.raises(FirstBatchError, match="batch 0"):
        query.begin()
    assert not (tmp_path / "late").exists(), (
        "the current end is not stored as the start of batch 0"
    )
    query.options = {**query.options, "failOnDataLoss": "false"}
    query.restart()
    with pytest.warns(UserWarning, match="batch 0"):
        query.begin()
    query.trigger()
    assert [row[:3] for row in query.rows if row[1] == 0] == [
        ("orders", 0, offset) for offset in range(30, 40)
    ]


def test_first_batch_from_fixed_offsets_is_replayed(data: Path) -> None:
    query = Query(data, subscribe="orders", startingOffsets="earliest")
    query.plan()
    append(data, "orders", 0, 10)
    query.restart()
    query.begin()
    assert query.rows == expected((0, 0, 30), (1, 0, 20))


def first_offsets(path: Path, **given: object) -> Any:
    """Stop a query at the moment when Spark stores the end of batch 0."""
    reader = reader_of(path, **given)
    first = reader.initialOffset()
    reader.latestOffset(first)
    second = reader.initialOffset()
    reader.stop()
    assert second == first
    return first


def test_first_offsets_are_computed_again_for_other_options(
    data: Path, tmp_path: Path
) -> None:
    source_options = {"checkpointLocation": f"file://{tmp_path / 'checkpoint'}"}
    assert first_offsets(data, subscribe="orders", **source_options) == {
        "orders": {"0": 30, "1": 20}
    }
    append(data, "orders", 0, 5)
    assert first_offsets(data, subscribe="orders", **source_options) == {
        "orders": {"0": 30, "1": 20}
    }
    limited = {"maxOffsetsPerTrigger": 5} if HAS_LIMITS else {"minOffsetsPerTrigger": 5}
    assert first_offsets(data, subscribe="orders", **limited, **source_options) == {
        "orders": {"0": 30, "1": 20}
    }
    assert first_offsets(data, subscribePattern="orders", **source_options) == {
        "orders": {"0": 35, "1": 20}
    }
    assert len(os.listdir(tmp_path / "checkpoint" / "logcore")) == 2


def test_damaged_first_offsets_are_an_error(data: Path, tmp_path: Path) -> None:
    first_offsets(data, subscribe="orders", checkpointLocation=tmp_path / "c")
    (stored_file,) = (tmp_path / "c" / "logcore").iterdir()
    stored_file.write_bytes(stored_file.read_bytes().replace(b"30", b"31"))
    with pytest.raises(LogcoreError, match="first offsets of this stream are damaged"):
        reader_of(
            data, subscribe="orders", checkpointLocation=tmp_path / "c"
        ).initialOffset()


# -- partitions, topics and losses -----------------------------------------------------


def test_new_partitions_and_topics_are_read_from_their_beginning(data: Path) -> None:
    query = Query(data, subscribePattern="orders|more.*", startingOffsets="latest")
    query.trigger()
    with logcore.open_dir(data) as directory:
        directory.add_partitions("orders", 3)
        directory.create_topic("more")
    append(data, "orders", 2, 5)
    append(data, "more", 0, 4)
    query.trigger()
    query.restart()
    append(data, "more", 0, 1)
    query.trigger()
    assert sorted(query.rows) == sorted(
        expected((2, 0, 5)) + expected((0, 0, 5), topic="more")
    )


def check_loss(query: Query, cause_loss: Callable[[], None], match: str) -> None:
    """Check that a loss ends the query, unless an option accepts the loss."""
    cause_loss()
    with pytest.raises(DataLossError, match=match):
        query.trigger()
    query.options = {**query.options, "failOnDataLoss": "false"}
    query.restart()
    with pytest.warns(UserWarning, match=match):
        query.trigger()


def test_records_deleted_before_they_were_read_are_a_loss(data: Path) -> None:
    query = Query(data, subscribe="orders", startingOffsets="earliest")
    query.trigger()

    def cause_loss() -> None:
        append(data, "orders", 0, 20)
        with logcore.open_dir(data) as directory:
            directory.partition("orders", 0).delete_records(40)

    check_loss(
        query,
        cause_loss,
        "topic orders partition 0: the log begins at 40, and offset 30 is the next",
    )
    assert query.rows == expected((0, 0, 30), (1, 0, 20), (0, 40, 50))


def test_log_that_ends_below_the_read_offset_is_a_loss(data: Path) -> None:
    query = Query(data, subscribe="orders", startingOffsets="earliest")
    query.trigger()

    def cause_loss() -> None:
        with logcore.open_dir(data) as directory:
            directory.delete_topic("orders")
            directory.create_topic("orders", partitions=2)
        append(data, "orders", 0, 5)

    check_loss(query, cause_loss, "topic orders partition [01]: .*made again")
    assert query.rows[50:] == expected((0, 0, 5))


def test_recreated_topic_with_more_records_is_a_loss(data: Path) -> None:
    options = {
        "subscribe": "orders",
        "startingOffsets": "earliest",
        "failOnDataLoss": "false",
    }
    query = Query(data, **options)
    query.trigger()
    with logcore.open_dir(data) as directory:
        directory.delete_topic("orders")
        directory.create_topic("orders", partitions=2)
    append(data, "orders", 0, 100)
    with pytest.warns(UserWarning, match="made again"):
        query.trigger()
    query.trigger()
    assert query.rows[50:] == expected((0, 0, 100))


def test_recreated_topic_is_read_without_waiting_for_its_old_offsets(
    data: Path,
) -> None:
    query = Query(
        data,
        subscribe="orders",
        startingOffsets="earliest",
        failOnDataLoss="false",
        minOffsetsPerTrigger=100,
    )
    query.trigger()
    with logcore.open_dir(data) as directory:
        directory.delete_topic("orders")
        directory.create_topic("orders", partitions=2)
    append(data, "orders", 0, 70)
    with pytest.warns(UserWarning, match="made again"):
        query.trigger()
    append(data, "orders", 0, 130)
    query.trigger()
    assert query.rows[50:] == expected((0, 0, 200))


def test_deleted_partition_is_a_loss(data: Path) -> None:
    with logcore.open_dir(data) as directory:
        directory.create_topic("other")
    append(data, "other", 0, 3)
    query = Query(data, subscribe="orders,other", startingOffsets="earliest")
    query.trigger()

    def cause_loss() -> None:
        with logcore.open_dir(data) as directory:
            directory.delete_topic("other")
        append(data, "orders", 1, 1)

    check_loss(
        query,
        cause_loss,
        "topic other partition 0: the partition was deleted; offset 3 was reached",
    )
    assert query.rows[-1:] == expected((1, 20, 21))


def test_added_partition_without_its_first_records_is_a_loss(data: Path) -> None:
    query = Query(data, subscribe="orders", startingOffsets="earliest")
    query.trigger()

    def cause_loss() -> None:
        with logcore.open_dir(data) as directory:
            directory.add_partitions("orders", 3)
        append(data, "orders", 2, 5)
        with logcore.open_dir(data) as directory:
            directory.partition("orders", 2).delete_records(2)

    check_loss(
        query,
        cause_loss,
        "partition 2: the partition was added, and its log begins at 2, not at 0",
    )
    assert query.rows[50:] == expected((2, 2, 5))


def test_records_deleted_between_plan_and_replay_are_a_loss(data: Path) -> None:
    query = Query(data, subscribe="orders", startingOffsets="earliest")
    query.plan()
    with logcore.open_dir(data) as directory:
        directory.delete_topic("orders")
        directory.create_topic("orders")
    query.restart()
    with pytest.raises(DataLossError, match="deleted with the partition"):
        query.begin()


@pytest.mark.parametrize("loss", ["true", "false"])
def test_missing_or_other_directory_is_always_an_error(data: Path, loss: str) -> None:
    query = Query(
        data, subscribe="orders", startingOffsets="earliest", failOnDataLoss=loss
    )
    query.trigger()
    other_path = data.with_name("away")
    data.rename(other_path)
    with pytest.raises(LogNotFoundError, match="log directory is missing"):
        query.trigger()
    with logcore.open_dir(data, create=True) as directory:
        directory.create_topic("orders", partitions=2)
    if "directory.id" in (other_path / "meta.properties").read_text():
        with pytest.raises(OtherDirectoryError, match="another log directory"):
            query.trigger()
    shutil.rmtree(data)
    other_path.rename(data)
    assert not query.trigger()


# -- visible records -------------------------------------------------------------------


def test_streams_read_committed_or_all_transactions(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("t")
        log = directory.partition("t", 0)

        def batch(producer_id: int, *values: bytes) -> None:
            producer = {
                "producer_id": producer_id,
                "producer_epoch": 0,
                "base_sequence": 0,
                "transactional": True,
            }
            log.append_batch(
                recordbatch.encode(
                    [(None, value) for value in values], now_ms=1, **producer
                )
            )

        options = {"subscribe": "t", "startingOffsets": "earliest"}
        committed = Query(
            path, **options, **{"kafka.isolation.level": "read_committed"}
        )
        uncommitted = Query(path, **options)
        batch(1, b"a", b"b")
        log.flush()
        assert committed.trigger()
        assert uncommitted.trigger()
        assert (len(committed.rows), len(uncommitted.rows)) == (0, 2)
        log.end_transaction(1, 0, commit=True)
        batch(2, b"dropped")
        log.end_transaction(2, 0, commit=False)
        log.append(b"plain")
        for query in (committed, uncommitted):
            while query.trigger():
                pass
        assert [row[3] for row in committed.rows] == [b"a", b"b", b"plain"]
        assert [row[3] for row in uncommitted.rows] == [
            b"a",
            b"b",
            b"dropped",
            b"plain",
        ]
        log.end_transaction(3, 0, commit=True)
        assert committed.trigger(), "a marker moves the offset"
        assert len(committed.rows) == 3


def test_trigger_without_changes_reads_no_log(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    query = Query(data, subscribe="orders", startingOffsets="earliest")
    origin = query.reader._origin
    origin._clock = lambda: now[0]  # type: ignore[attr-defined]
    query.trigger()
    refreshed: list[Any] = []
    refresh = logcore.Log.refresh
    monkeypatch.setattr(
        logcore.Log, "refresh", lambda log: refreshed.append(log) or refresh(log)
    )
    query.trigger()
    assert refreshed, (
        "modification times are coarse, so that the files are read again soon after a change"
    )
    now[0] += 2
    refreshed.clear()
    assert not query.trigger()
    assert refreshed == []
    append(data, "orders", 0, 1)
    assert query.trigger()
    assert {log.path for log in refreshed} == {str(data / "orders-0")}
    assert query.rows[-1:] == expected((0, 30, 31))


def test_offsets_are_committed_to_a_group(
    data: Path, recwarn: pytest.WarningsRecorder
) -> None:
    group = {"commitOffsets": "true", "kafka.group.id": "g"}
    query = Query(data, subscribe="orders", startingOffsets="earliest", **group)

    def committed() -> dict[str, int]:
        with logcore.open_dir(data, read_only=True) as directory:
            return directory.committed_offsets("orders", 0)

    assert query.trigger()
    append(data, "orders", 0, 3)
    assert query.trigger()
    assert committed() == {"g": 30}
    with logcore.open_dir(data) as holder:
        holder.partition("orders", 0).append(b"33")
        assert query.trigger()
        assert committed() == {"g": 30}, (
            "no offset is committed while another process has the directory open"
        )
    append(data, "orders", 0, 1)
    assert query.trigger()
    assert committed() == {"g": 34}
    (warned,) = recwarn.list
    assert "not committed to group 'g'" in str(warned.message)


def test_stream_reads_through_a_broker(data: Path) -> None:
    broker = start_broker(data)
    try:
        query = Query(
            broker.bootstrap_servers,
            subscribe="orders",
            startingOffsets="earliest",
            commitOffsets="true",
            **{"kafka.group.id": "g"},
        )
        assert query.trigger()
        broker.logdir.partition("orders", 1).append(b"20")
        assert query.trigger()
        assert query.rows == expected((0, 0, 30), (1, 0, 20), (1, 20, 21))
        assert broker.logdir.committed_offsets("orders", 0) == {"g": 30}
        query.reader.stop()
    finally:
        broker.stop()


# -- a random history ------------------------------------------------------------------

STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 2), st.integers(1, 9)),
    st.tuples(st.just("grow"), st.just(0), st.just(0)),
    st.tuples(st.just("plan"), st.just(0), st.just(0)),
    st.tuples(st.just("fail"), st.just(0), st.just(0)),
    st.tuples(st.just("batch"), st.just(0), st.just(0)),
    st.tuples(st.just("restart"), st.booleans().map(int), st.just(0)),
)


@pytest.mark.long
@settings(max_examples=15)
@given(
    st.lists(STEP, min_size=3, max_size=25),
    st.sampled_from(["earliest", "latest"]),
    st.integers(1, 12),
)
def test_random_queries_read_each_row_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]],
    begins: str,
    max_offsets: int,
) -> None:
    """The query may end between any two calls, with appends in between."""
    root = tmp_path_factory.mktemp("life")
    data = root / "data"
    with logcore.open_dir(data, create=True) as directory:
        directory.create_topic("orders")
    append(data, "orders", 0, 3)
    options = {"maxOffsetsPerTrigger": max_offsets} if HAS_LIMITS else {}
    query = Query(
        data,
        subscribe="orders",
        startingOffsets=begins,
        checkpointLocation=root / "c",
        **options,
    )
    query.trigger()
    assert query.commits == 1
    skipped = 3 if begins == "latest" else 0
    counts = [3]
    planned = False
    for action, number, count in steps:
        if action == "append":
            partition = number % len(counts)
            append(data, "orders", partition, count)
            counts[partition] += count
        elif action == "grow" and len(counts) < 3:
            counts.append(0)
            with logcore.open_dir(data) as directory:
                directory.add_partitions("orders", len(counts))
        elif action in ("plan", "fail", "batch") and not planned:
            end = query.plan()
            planned = end is not None and action != "batch"
            if end is not None and action == "fail":
                query.run(end, commit=False)
            elif end is not None and action == "batch":
                query.run(end)
        elif action == "restart":
            query.restart()
            query.begin(available_now=HAS_LIMITS and bool(number))
            planned = False
    query.restart()
    query.begin()
    while query.trigger():
        pass
    for partition, count in enumerate(counts):
        rows = [row for row in query.rows if row[1] == partition]
        assert rows == expected((partition, skipped if partition == 0 else 0, count))
    query.reader.stop()
