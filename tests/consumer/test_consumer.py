"""Consumers without group members: the records that they read, where they begin, and
when offsets are committed.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.consumer import OffsetAndMetadata, TopicPartition
from logcore.consumer import consumer as consumer_module
from logcore.consumer.positions import PartitionPosition
from logcore.errors import (
    CommitFailedError,
    ConsumerStateError,
    CorruptBatchError,
    InvalidConfigError,
    LogClosedError,
    LogTruncatedError,
    NoOffsetError,
    OffsetOutOfRangeError,
    ReadOnlyLogError,
    TopicNotFoundError,
    WakeupError,
)
from logcore.format.columns import RecordColumns
from logcore.logdir import LogDir
from logcore.recordbatch import encode
from support.pages import run_blocks

ONE = TopicPartition("t", 0)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as directory:
        directory.create_topic("t", 2)
        yield directory


def fill(data: LogDir, partition: int, count: int) -> None:
    log = data.partition("t", partition)
    end = log.log_end_offset
    log.append_many(
        [(None, b"%d-%d" % (partition, number)) for number in range(end, end + count)]
    )


def offsets(polled: object) -> list[tuple[int, int]]:
    return [(record.partition, record.offset) for record in polled.records()]  # type: ignore[attr-defined]


def test_consumer_without_a_group_reads_all_partitions(data: LogDir) -> None:
    fill(data, 0, 3)
    fill(data, 1, 2)
    with data.consumer(auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t"])
        assert offsets(consumer.poll()) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
        assert not consumer.poll()
        fill(data, 1, 1)
        assert offsets(consumer.poll()) == [(1, 2)]
        assert consumer.poll().next_offsets() == {}


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_poll_returns_the_same_records_as_read_from_every_offset(
    data: LogDir, codec: str
) -> None:
    """The offsets include offsets in the middle of a batch. Some batches are plain, and
    others are decoded one by one.
    """
    log = data.partition("t", 0)
    rows = [(b"k", None, [("h", b"1")], 1_000), (None, b"v"), (b"", b"w", [], 999)]
    for _ in range(3):
        log.append_batch(encode(rows, codec=codec))
    expected = [logcore.TopicRecord("t", 0, *record) for record in log.read(0)]
    assert len(expected) == 9
    with data.consumer(enable_auto_commit=False) as consumer:
        consumer.assign([ONE])
        for offset in range(9):
            consumer.seek(ONE, offset)
            polled = [
                *consumer.poll(max_records=2).records(),
                *consumer.poll().records(),
            ]
            assert polled == expected[offset:]
            assert {type(record) for record in polled} == {logcore.TopicRecord}


def test_consumer_reports_damage_like_read(data: LogDir) -> None:
    """The error contains the position in the file, even if reading began in the middle
    of the file.
    """
    for _ in range(4):
        fill(data, 0, 5)
    log = data.partition("t", 0)
    segment = next(Path(log.path).glob("*.log"))
    raw = bytearray(segment.read_bytes())
    raw[-1] ^= 1
    segment.write_bytes(raw)
    with pytest.raises(CorruptBatchError) as expected:
        list(log.read(17))
    with data.consumer(enable_auto_commit=False) as consumer:
        consumer.assign([ONE])
        consumer.seek(ONE, 17)
        with pytest.raises(CorruptBatchError) as caught:
            consumer.poll()
        assert consumer.position(ONE) == 17
    assert (caught.value.path, caught.value.position) == (
        expected.value.path,
        expected.value.position,
    )
    assert caught.value.position > 0


@pytest.mark.parametrize("method", ["poll", "columns", "iteration"])
def test_records_before_damage_are_returned_first(data: LogDir, method: str) -> None:
    """The position remains before the damage, so that each later call raises the error
    again.
    """
    for _ in range(4):
        fill(data, 0, 5)
    segment = next(Path(data.partition("t", 0).path).glob("*.log"))
    raw = bytearray(segment.read_bytes())
    raw[-1] ^= 1
    segment.write_bytes(raw)
    offsets_before_damage: list[int] = []
    with data.consumer(auto_offset_reset="earliest", consumer_timeout_ms=0) as consumer:
        consumer.assign([ONE])
        with pytest.raises(CorruptBatchError):
            while method == "poll":
                offsets_before_damage += [
                    record.offset for record in consumer.poll().records()
                ]
            while method == "columns":
                for columns in consumer.poll_columns()[TopicPartition(*ONE)]:
                    offsets_before_damage += columns.offsets.tolist()
            for record in consumer:
                offsets_before_damage.append(record.offset)
        assert offsets_before_damage == list(range(15))
        for _ in range(2):
            with pytest.raises(CorruptBatchError):
                consumer.poll()
            with pytest.raises(CorruptBatchError):
                consumer.poll_columns()
            assert consumer.position(ONE) == 15


def test_columns_read_before_the_log_start_moved_are_returned(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process deletes segments during a scan, and auto_offset_reset then moves
    the position.
    """
    for _ in range(2):
        fill(data, 0, 5)
    log = data.partition("t", 0)
    scan = type(log).scan

    def cut_short(
        self: object, start: int, *arguments: object, **options: object
    ) -> Iterator[RecordColumns]:
        yield next(iter(scan(log, start, 5)))
        raise OffsetOutOfRangeError("its segment was removed", offset=5)

    with data.consumer(auto_offset_reset="latest") as consumer:
        consumer.assign([ONE])
        consumer.seek(ONE, 0)
        monkeypatch.setattr(type(log), "scan", cut_short)
        (columns,) = consumer.poll_columns()[TopicPartition(*ONE)]
        assert columns.offsets.tolist() == list(range(5))
        assert consumer.position(ONE) == 5


def test_poll_continues_after_an_abandoned_iteration(data: LogDir) -> None:
    """The iteration reads ahead. The next read, by poll() or by another loop, returns
    the records that the iteration has not returned.
    """
    fill(data, 0, 300)
    with data.consumer(auto_offset_reset="earliest", max_poll_records=2) as consumer:
        consumer.assign([ONE])
        assert [
            record.offset for _, record in zip(range(2), consumer, strict=False)
        ] == [0, 1]
        assert offsets(consumer.poll()) == [(0, 2), (0, 3)]
        assert [
            record.offset for _, record in zip(range(2), consumer, strict=False)
        ] == [4, 5]
        assert [
            record.offset for _, record in zip(range(2), consumer, strict=False)
        ] == [6, 7]
        assert offsets(consumer.poll()) == [(0, 8), (0, 9)]


def test_latest_begins_at_the_end_except_for_new_partitions(
    data: LogDir,
) -> None:
    fill(data, 0, 3)
    with data.consumer() as consumer:
        consumer.subscribe(["t"])
        assert not consumer.poll()
        data.add_partitions("t", 3)
        fill(data, 2, 2)
        fill(data, 0, 1)
        assert sorted(offsets(consumer.poll())) == [(0, 3), (2, 0), (2, 1)]


def test_polls_return_records_of_partitions_in_turn(data: LogDir) -> None:
    fill(data, 0, 4)
    fill(data, 1, 4)
    with data.consumer(auto_offset_reset="earliest", max_poll_records=3) as consumer:
        consumer.assign([("t", 0), ("t", 1)])
        polled_offsets = [offsets(consumer.poll()) for _ in range(4)]
        assert polled_offsets == [
            [(0, 0), (0, 1), (0, 2)],
            [(1, 0), (1, 1), (1, 2)],
            [(0, 3), (1, 3)],
            [],
        ]


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_large_records_are_returned_a_few_at_a_time(data: LogDir, codec: str) -> None:
    for partition in range(2):
        for number in range(7):
            value = random.Random(number).randbytes(100_000)
            data.partition("t", partition).append_batch(
                encode([(None, value)], codec=codec)
            )
    with data.consumer(
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=250_000,
        fetch_max_bytes=350_000,
    ) as consumer:
        consumer.subscribe(["t"])
        assert offsets(consumer.poll()) == [(0, 0), (0, 1), (0, 2), (1, 0)]
        assert offsets(consumer.poll()) == [(0, 3), (0, 4), (0, 5), (1, 1)]
        assert offsets(consumer.poll()) == [(0, 6), (1, 2), (1, 3), (1, 4)]
        assert offsets(consumer.poll()) == [(1, 5), (1, 6)]
        assert not consumer.poll()
    with data.consumer(
        auto_offset_reset="earliest", max_partition_fetch_bytes=1, fetch_max_bytes=1
    ) as consumer:
        consumer.subscribe(["t"])
        assert [offsets(consumer.poll()) for _ in range(3)] == [
            [(0, 0)],
            [(1, 0)],
            [(0, 1)],
        ], "at least one batch"
        assert [
            (record.partition, record.offset)
            for record in itertools.islice(consumer, 11)
        ] == [
            *((1, offset) for offset in range(1, 7)),
            *((0, offset) for offset in range(2, 7)),
        ]


def test_seek_pause_and_lag_use_the_position(data: LogDir) -> None:
    fill(data, 0, 10)
    with data.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([ONE])
        assert consumer.position(ONE) == 0
        consumer.seek(ONE, 7)
        assert offsets(consumer.poll()) == [(0, 7), (0, 8), (0, 9)]
        consumer.seek_to_beginning()
        assert (consumer.position(ONE), consumer.lag()) == (0, 10)
        consumer.seek_to_end(ONE)
        assert (consumer.position(ONE), consumer.lag(ONE)) == (10, 0)
        assert consumer.beginning_offsets([ONE]) == {ONE: 0}
        assert consumer.end_offsets([ONE]) == {ONE: 10}
        consumer.seek(ONE, 2)
        consumer.pause(ONE)
        assert not consumer.poll() and consumer.paused() == {ONE}
        consumer.resume(ONE)
        assert offsets(consumer.poll(max_records=1)) == [(0, 2)]
        columns = consumer.poll_columns()[ONE]
        assert [int(offset) for column in columns for offset in column.offsets] == list(
            range(3, 10)
        )


def test_offset_outside_the_log_follows_auto_offset_reset(data: LogDir) -> None:
    fill(data, 0, 10)
    data.partition("t", 0).delete_records(4)
    for rule, expected in (("earliest", [4]), ("latest", [])):
        with data.consumer(auto_offset_reset=rule) as consumer:  # type: ignore[arg-type]
            consumer.assign([ONE])
            consumer.seek(ONE, 2)
            assert [
                offset for _, offset in offsets(consumer.poll(max_records=1))
            ] == expected
    with data.consumer(auto_offset_reset="none") as consumer:
        consumer.assign([ONE])
        with pytest.raises(NoOffsetError, match="nothing was committed for t-0"):
            consumer.poll()
        consumer.seek(ONE, 2)
        with pytest.raises(OffsetOutOfRangeError):
            consumer.poll()


def test_commit_is_found_by_the_next_consumer(data: LogDir) -> None:
    fill(data, 0, 6)
    with data.consumer(
        group_id="g", auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        consumer.subscribe(["t"])
        consumer.poll(max_records=4)
        consumer.commit()
        consumer.poll()
    with data.consumer(group_id="g", enable_auto_commit=False) as consumer:
        consumer.subscribe(["t"])
        assert offsets(consumer.poll()) == [(0, 4), (0, 5)]
        consumer.commit({ONE: OffsetAndMetadata(5, "here")})
        assert consumer.committed([ONE, ("t", 1)]) == {
            ONE: OffsetAndMetadata(5, "here"),
            TopicPartition("t", 1): OffsetAndMetadata(0),
        }


def test_auto_commit_stores_only_finished_records(data: LogDir) -> None:
    fill(data, 0, 6)

    def stored() -> int | None:
        with data.consumer(group_id="g") as observer:
            committed = observer.committed([ONE])[ONE]
            return None if committed is None else committed.offset

    def consume(count: int, *, fails: bool) -> None:
        with data.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
            consumer.subscribe(["t"])
            for number, _ in enumerate(consumer, 1):
                if number == count:
                    if fails:
                        raise ZeroDivisionError
                    return

    with pytest.raises(ZeroDivisionError):
        consume(3, fails=True)
    assert stored() == 2, "the current record is not finished"
    consume(2, fails=False)
    assert stored() == 4, "a block that ends without an error has finished all records"
    with pytest.raises(ZeroDivisionError), data.consumer(group_id="g") as consumer:
        consumer.subscribe(["t"])
        assert offsets(consumer.poll()) == [(0, 4), (0, 5)]
        raise ZeroDivisionError
    assert stored() == 4, "the current list is not finished"


def test_poll_waits_for_records(data: LogDir) -> None:
    polled: list[list[tuple[int, int]]] = []
    with data.consumer(auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t"])
        thread = threading.Thread(
            target=lambda: polled.append(offsets(consumer.poll(60)))
        )
        thread.start()
        fill(data, 1, 1)
        thread.join(60)
        assert polled == [[(1, 0)]]


def test_wakeup_ends_one_poll_and_loses_no_record(data: LogDir) -> None:
    raised: list[WakeupError] = []
    fill(data, 0, 2)
    with data.consumer(auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t"])
        consumer.wakeup()
        for poll in (consumer.poll, consumer.poll_columns):
            with pytest.raises(WakeupError):
                poll()
            consumer.wakeup()
        assert list(consumer) == [], "a wakeup ends an iteration without an error"
        assert offsets(consumer.poll()) == [(0, 0), (0, 1)]

        def wait_for_records() -> None:
            with pytest.raises(WakeupError) as error:
                consumer.poll(60)
            raised.append(error.value)

        thread = threading.Thread(target=wait_for_records)
        thread.start()
        consumer.wakeup()
        thread.join(60)
        assert len(raised) == 1
        assert not consumer.poll(), "only one poll ends"


@pytest.mark.parametrize(
    ("epoch", "offset", "reason"),
    [
        (1, 4, None),  # the end of the epoch
        (1, 5, "truncated below the committed offset.*leader epoch 1.*its end at 4"),
        (3, 6, None),
        (9, 4, "truncated below the committed offset.*leader epoch 9.*no such epoch"),
        (-1, 5, None),  # the committer stored no epoch
        (1, 7, "not in the log"),
    ],
)
def test_truncation_below_a_committed_offset_is_detected(
    data: LogDir, epoch: int, offset: int, reason: str | None
) -> None:
    """The log has offsets 0 to 3 of epoch 1, and 4 and 5 of epoch 3. A record of epoch 1
    at offset 4 or above was therefore truncated.
    """
    log = data.partition("t", 0)
    log.begin_epoch(1)
    fill(data, 0, 4)
    log.begin_epoch(3)
    fill(data, 0, 2)
    with data.consumer(
        group_id="g", auto_offset_reset="none", enable_auto_commit=False
    ) as consumer:
        consumer.assign([ONE])
        consumer.commit({ONE: OffsetAndMetadata(offset, leader_epoch=epoch)})
        if reason is None:
            assert consumer.position(ONE) == offset
            return
        with pytest.raises(OffsetOutOfRangeError, match=reason) as error:
            consumer.poll()
        assert isinstance(error.value, LogTruncatedError) == (offset <= 6)
    with data.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.assign([ONE])
        assert consumer.position(ONE) == 0, (
            "reading begins according to auto_offset_reset"
        )


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_columns_are_returned_in_bounded_chunks_without_a_gap(
    data: LogDir, isolation: str
) -> None:
    """A chunk of a scan has at most 3 MiB. Each poll returns one or two chunks, from
    one partition after another.
    """
    for partition in (0, 1):
        log = data.partition("t", partition)
        for _ in range(10):
            log.append_many([(None, b"x" * 1_000_000)])
    log.delete_records(1)
    with data.consumer(
        auto_offset_reset="earliest", isolation_level=isolation
    ) as consumer:  # type: ignore[arg-type]
        consumer.subscribe(["t"])
        offsets: dict[TopicPartition, list[int]] = {}
        polls = 0
        while polled := consumer.poll_columns(max_bytes=4_000_000):
            polls += 1
            size_bytes = sum(
                int(chunk.value_sizes.sum())
                for chunks in polled.values()
                for chunk in chunks
            )
            assert 1_000_000 <= size_bytes <= 7_000_000
            for row, chunks in polled.items():
                for chunk in chunks:
                    offsets.setdefault(row, []).extend(chunk.offsets.tolist())
                    assert consumer.position(row) >= offsets[row][-1] + 1
        assert offsets == {
            ONE: list(range(10)),
            TopicPartition("t", 1): list(range(1, 10)),
        }
        assert polls >= 4
        assert consumer.metrics().records == 19
        assert consumer.lag() == 0
        with pytest.raises(InvalidConfigError, match="max_bytes from 1"):
            consumer.poll_columns(max_bytes=0)


def test_poll_arrow_returns_a_table(data: LogDir) -> None:
    pa = pytest.importorskip("pyarrow")
    data.create_topic("u")
    data.append("u", None, key=b"k", headers=[("h", b"v")])
    fill(data, 1, 2)
    with data.consumer(auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t", "u"])
        table = consumer.poll_arrow()
        rows = table.to_pylist()
        assert [
            (row["topic"], row["partition"], row["offset"], row["key"], row["value"])
            for row in rows
        ] == [
            ("t", 1, 0, None, b"1-0"),
            ("t", 1, 1, None, b"1-1"),
            ("u", 0, 0, b"k", None),
        ]
        assert rows[2]["headers"] == [{"key": "h", "value": b"v"}]
        assert table.column("timestamp").type == pa.timestamp("ms", "UTC")
        assert pa.types.is_dictionary(table.column("topic").type)
        empty = consumer.poll_arrow()
        assert (empty.num_rows, empty.schema) == (0, table.schema)


def test_topics_partitions_and_metrics_of_a_consumer(data: LogDir) -> None:
    fill(data, 0, 3)
    with data.consumer(
        group_id="g", auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        consumer.subscribe(["t"])
        assert consumer.topics() == data.topics()
        assert consumer.partitions_for("t") == (0, 1)
        with pytest.raises(TopicNotFoundError):
            consumer.partitions_for("other")
        assert consumer.poll().count == 3
        consumer.pause(ONE)
        consumer.commit()
        consumer.commit_async()
        metrics = consumer.metrics()
        assert (
            metrics.records,
            metrics.commits,
            metrics.waiting_commits,
            metrics.rebalances,
        ) == (3, 1, 1, 1)
        assert (
            metrics.partitions,
            metrics.paused_partitions,
            metrics.refused_commits,
        ) == (
            2,
            1,
            0,
        )
        assert metrics.checks > 0


def test_deserializers_are_not_called_with_null(data: LogDir) -> None:
    data.append("t", b"7", key=b"k", partition=0)
    data.append("t", None, partition=0)
    with data.consumer(
        auto_offset_reset="earliest",
        key_deserializer=bytes.decode,
        value_deserializer=int,
    ) as consumer:
        consumer.subscribe(["t"])
        assert [(record.key, record.value) for record in consumer.poll().records()] == [
            ("k", 7),
            (None, None),
        ]


def test_consumer_at_damage_skips_no_record(data: LogDir) -> None:
    fill(data, 0, 5)
    fill(data, 1, 5)
    fill(data, 1, 5)
    path = next(Path(data.partition("t", 1).path).glob("*.log"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 80] ^= 1
    path.write_bytes(content)
    for poll in ("poll", "poll_columns"):
        with data.consumer(auto_offset_reset="earliest") as consumer:
            consumer.subscribe(["t"])
            first = getattr(consumer, poll)()
            assert ("t", 0) in first, "undamaged records are returned first"
            for _ in range(3):
                with pytest.raises(CorruptBatchError):
                    for _ in range(3):
                        getattr(consumer, poll)()
            assert consumer.position(("t", 1)) in (0, 5)
    with data.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([("t", 1)])
        returned = []
        for _ in range(3):
            with pytest.raises(CorruptBatchError):
                returned += [record.offset for record in consumer]
        assert returned in ([], list(range(5)))


def test_poll_returns_records_before_one_that_fails_to_deserialize(
    data: LogDir,
) -> None:
    """poll() raised the error, and did not return the earlier records of the partition."""
    for value in (b"1", b"two", b"3"):
        data.append("t", value, partition=0)
    with data.consumer(
        auto_offset_reset="earliest", value_deserializer=int
    ) as consumer:
        consumer.assign([ONE])
        assert [record.value for record in consumer.poll().records()] == [1]
        for _ in range(2):
            with pytest.raises(ValueError, match="two"):
                consumer.poll()
            assert consumer.position(ONE) == 1
        consumer.seek(ONE, 0)
        returned = []
        for _ in range(2):
            with pytest.raises(ValueError, match="two"):
                for record in consumer:
                    returned.append(record.value)
        assert returned == [1]
        consumer.seek(ONE, 2)
        assert [record.value for record in consumer.poll().records()] == [3]


def test_lag_of_an_undecided_position_is_an_error(data: LogDir) -> None:
    """The lag was counted from offset 0, even if retention had deleted those records."""
    fill(data, 0, 5)
    committed: Any = {
        "group_id": "g",
        "auto_offset_reset": "earliest",
        "isolation_level": "read_committed",
    }
    with (
        data.consumer(**committed) as consumer,
        data.producer(transactional_id="p") as producer,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        consumer.subscribe(["t"])
        consumer.poll()
        producer.send_offsets_to_transaction({ONE: 3}, consumer.group_metadata())
        with data.consumer(**committed) as other:
            other.assign([ONE])
            for query in (
                other.lag,
                lambda: other.lag(ONE),
                lambda: other.position(ONE),
            ):
                with pytest.raises(NoOffsetError, match="open transaction"):
                    query()
            producer.commit_transaction()
            assert (other.position(ONE), other.lag(ONE)) == (3, 2)


class _Interrupting:
    """Interrupts the first call for a record of partition 1, like Ctrl-C."""

    def __init__(self) -> None:
        self.is_left = True

    def __call__(self, value: bytes) -> bytes:
        if self.is_left and value.startswith(b"1-"):
            self.is_left = False
            raise KeyboardInterrupt
        return value

    def on_consume(self, records: Any) -> Any:
        for record in records.records():
            self(record.value)
        return records

    def on_commit(self, offsets: Any) -> None: ...


@pytest.mark.parametrize("interrupted_hook", ["value_deserializer", "interceptors"])
@pytest.mark.parametrize("method", ["poll", "iteration"])
def test_interrupted_poll_commits_no_record_that_it_did_not_return(
    data: LogDir, method: str, interrupted_hook: str
) -> None:
    """close() committed the records of partitions that the interrupted poll() had
    already read.
    """
    fill(data, 0, 10)
    fill(data, 1, 10)
    hook = _Interrupting()
    options: Any = {
        interrupted_hook: hook if interrupted_hook == "value_deserializer" else (hook,)
    }
    values = []
    with data.consumer(
        group_id="g", auto_offset_reset="earliest", consumer_timeout_ms=0, **options
    ) as consumer:
        consumer.subscribe(["t"])
        with pytest.raises(KeyboardInterrupt):
            if method == "poll":
                consumer.poll(max_records=15)
            for record in consumer:
                values.append(record.value)
    with data.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t"])
        values += [record.value for record in consumer.poll().records()]
    assert len(values) == len(set(values)) == 20


def test_poll_of_a_closed_directory_raises(data: LogDir) -> None:
    for group in (None, "g"):
        consumer = data.consumer(group_id=group)
        consumer.subscribe(["t"])
        consumer.poll()
        if group:
            data.close()
            with pytest.raises(LogClosedError):
                consumer.poll(60)
        consumer.close()


def test_pattern_matches_whole_names_and_new_topics(data: LogDir) -> None:
    with data.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(pattern="t.?")
        consumer.poll()
        consumer.commit()
        data.create_topic("t1")
        data.create_topic("other")
        data.append("t1", b"x")
        while not (polled := consumer.poll(1)):
            pass
        assert [record.topic for record in polled.records()] == ["t1"]
        assert consumer.subscription() == {"t", "t1"}


@pytest.mark.parametrize("pattern", ["t(", b"t"])
def test_invalid_pattern_is_refused_before_any_change(
    data: LogDir, pattern: Any
) -> None:
    with data.consumer(group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t"])
        consumer.poll()
        old_assignment = consumer.assignment()
        with pytest.raises(
            InvalidConfigError, match=r"subscribe.*a regular expression"
        ):
            consumer.subscribe(pattern=pattern)
        assert consumer.subscription() == {"t"}
        consumer.poll()
        assert consumer.assignment() == old_assignment != frozenset()


def test_metrics_are_countable_while_partitions_are_revoked(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may call metrics(), and so may the event loop during a step of
    logcore.aio.
    """
    with data.consumer(auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["t"])
        consumer.poll()
        read_positions = consumer._assignment._read_positions

        def give_up(_: object) -> bool:
            read_positions.set_partitions(frozenset())
            return False

        with monkeypatch.context() as patch:
            patch.setattr(PartitionPosition, "is_paused", property(give_up))
            assert consumer.metrics().paused_partitions == 0


def test_read_committed_ends_at_the_last_stable_offset(data: LogDir) -> None:
    log = data.partition("t", 0)
    fill(data, 0, 2)
    producer = data.host.next_producer_id()
    open_one = encode(
        [(None, b"open")],
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    log.append_batch(open_one)
    fill(data, 0, 1)
    with data.consumer(
        auto_offset_reset="earliest", isolation_level="read_committed"
    ) as consumer:
        consumer.assign([ONE])
        assert offsets(consumer.poll()) == [(0, 0), (0, 1)]
        log.end_transaction(producer, 0, commit=False)
        assert offsets(consumer.poll()) == [(0, 3)]
        assert consumer.lag() == 0


@pytest.mark.parametrize("reset", ["earliest", "latest", "none"])
def test_position_above_the_last_stable_offset_waits(data: LogDir, reset: str) -> None:
    """A read_uncommitted consumer of the group committed this position, or seek() set
    it. Moving back to the last stable offset would return records twice, and commit an
    offset below the committed one.
    """
    log = data.partition("t", 0)
    fill(data, 0, 2)
    producer = data.host.next_producer_id()
    open_one = encode(
        [(None, b"open")],
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    log.append_batch(open_one)
    fill(data, 0, 3)
    assert (log.last_stable_offset, log.high_watermark) == (2, 6)
    with data.consumer(group_id="g") as consumer:
        consumer.commit({ONE: 5})
    settings: dict[str, Any] = {
        "auto_offset_reset": reset,
        "isolation_level": "read_committed",
    }
    with data.consumer(group_id="g", consumer_timeout_ms=0, **settings) as consumer:
        consumer.assign([ONE])
        assert offsets(consumer.poll()) == []
        assert consumer.poll_columns() == {}
        assert list(consumer) == []
        assert (consumer.position(ONE), consumer.lag()) == (5, 0)
        consumer.seek(ONE, 4)
        assert offsets(consumer.poll()) == []
        assert consumer.position(ONE) == 4
        consumer.seek(ONE, 5)
    assert data.committed_offsets("t", 0) == {"g": 5}
    log.end_transaction(producer, 0, commit=True)
    with data.consumer(group_id="g", **settings) as consumer:
        consumer.assign([ONE])
        assert offsets(consumer.poll()) == [(0, 5)]


@pytest.mark.parametrize("method", ["read_only", "shared"])
def test_wakeup_ends_the_wait_for_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The wait ended only at the next check for changes."""
    monkeypatch.setattr(consumer_module, "_CHECK_SECONDS", 600)
    is_shared = method == "shared"
    with logcore.open_dir(
        tmp_path / "data", create=True, shared=is_shared
    ) as directory:
        directory.create_topic("t")
        directory.append("t", b"v")
    with (
        logcore.open_dir(
            tmp_path / "data", read_only=not is_shared, shared=is_shared
        ) as read_only_directory,
        read_only_directory.consumer(auto_offset_reset="earliest") as consumer,
    ):
        consumer.assign([("t", 0)])
        assert len(consumer.poll(60)) == 1
        for seconds in (0.0, 0.0, 0.01, 0.1):
            waker = threading.Timer(seconds, consumer.wakeup)
            waker.start()
            with pytest.raises(WakeupError):
                consumer.poll(500)
            waker.join()


@pytest.mark.long
def test_idle_consumer_of_a_shared_directory_rarely_checks(tmp_path: Path) -> None:
    """The consumer waits for events, also for the end of other processes. Earlier it
    checked 20 times a second.
    """
    with (
        logcore.open_dir(tmp_path / "data", create=True, shared=True) as data,
        data.consumer(group_id="g", auto_offset_reset="earliest") as consumer,
    ):
        data.create_topic("t")
        data.append("t", b"v")
        consumer.subscribe(["t"])
        while not consumer.poll(1):
            pass
        consumer.commit()
        before = consumer.metrics().checks
        for _ in range(3):
            assert not consumer.poll(0.5)
        assert consumer.metrics().checks - before <= 15


def test_read_only_directory_can_be_read_but_not_committed_to(data: LogDir) -> None:
    fill(data, 0, 2)
    with logcore.open_dir(data.path, read_only=True) as read_only_directory:
        with pytest.raises(ReadOnlyLogError):
            read_only_directory.consumer(group_id="g")
        with read_only_directory.consumer(auto_offset_reset="earliest") as consumer:
            consumer.subscribe(["t"])
            assert len(offsets(consumer.poll())) == 2
            fill(data, 1, 1)
            assert offsets(consumer.poll(60)) == [(1, 0)]


def test_invalid_settings_and_calls_are_refused(data: LogDir) -> None:
    for invalid in (
        {"group_id": ""},
        {"group_instance_id": "i"},
        {"auto_offset_reset": "smallest"},
        {"max_poll_records": 0},
        {"assignors": "range"},
        {"assignors": ["nearest"]},
        {"assignors": ["range", "cooperative-sticky"]},
        {"isolation_level": "serializable"},
    ):
        with pytest.raises(InvalidConfigError):
            data.consumer(**invalid)  # type: ignore[arg-type]
    with data.consumer() as consumer:
        with pytest.raises(ConsumerStateError, match="nothing to read"):
            consumer.poll()
        with pytest.raises(ConsumerStateError, match="has no group"):
            consumer.commit({ONE: 1})
        with pytest.raises(TopicNotFoundError):
            consumer.assign([("t", 9)])
        consumer.assign([ONE])
        with pytest.raises(ConsumerStateError, match="does not read that partition"):
            consumer.seek(("t", 1), 0)
        with pytest.raises(InvalidConfigError):
            consumer.seek(ONE, -1)
        for invalid in (-1, float("nan"), "1"):
            with pytest.raises(InvalidConfigError, match="in seconds"):
                consumer.poll(invalid)  # type: ignore[arg-type]
    with pytest.raises(ConsumerStateError, match="closed"):
        consumer.poll()


def test_non_member_commits_only_to_an_empty_group(data: LogDir) -> None:
    fill(data, 0, 2)
    with data.consumer(group_id="g", auto_offset_reset="earliest") as non_member:
        non_member.assign([ONE])
        non_member.poll()
        non_member.commit()
        with data.consumer(group_id="g") as member:
            member.subscribe(["t"])
            member.poll()
            with pytest.raises(CommitFailedError, match="not one of them"):
                non_member.commit({ONE: 1})
            assert member.committed([ONE])[ONE] == OffsetAndMetadata(2)


def test_documentation_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(Path(__file__).resolve().parents[2] / "docs" / "consumer.md", tmp_path)


def test_unknown_setting_error_suggests_the_nearest_setting(tmp_path: Path) -> None:
    with (
        logcore.open_dir(tmp_path / "data", create=True) as data,
        pytest.raises(InvalidConfigError, match="group_id"),
    ):
        data.consumer(groupid="g")  # type: ignore[call-arg]


@pytest.mark.parametrize("end", ["pause", "seek", "assign"])
def test_iteration_ends_at_once_after_pause_seek_or_assign(
    tmp_path: Path, end: str
) -> None:
    """Records that were read ahead are then neither returned nor skipped."""
    with logcore.open_dir(tmp_path / "data", create=True) as data:
        data.create_topic("t", 2)
        data.partition("t", 0).append_many(
            [(None, b"%d" % number) for number in range(50)]
        )
        data.partition("t", 1).append(b"other")
        consumer = data.consumer(auto_offset_reset="earliest")
        consumer.assign([("t", 0)])
        values = []
        for record in consumer:
            values.append((record.partition, record.offset))
            if len(values) == 3:
                match end:
                    case "pause":
                        consumer.pause(("t", 0))
                        assert not consumer.poll()
                        consumer.resume(("t", 0))
                    case "seek":
                        consumer.seek(("t", 0), 40)
                    case "assign":
                        consumer.assign([("t", 1)])
            if len(values) == 4:
                break
        expected = {"pause": [(0, 3)], "seek": [(0, 40)], "assign": [(1, 0)]}[end]
        assert values == [(0, 0), (0, 1), (0, 2), *expected]
        consumer.close()


def test_iteration_of_a_closed_consumer_is_refused(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as data:
        data.create_topic("t", 1)
        data.partition("t", 0).append_many([(None, b"v")] * 5)
        consumer = data.consumer(auto_offset_reset="earliest")
        consumer.assign([("t", 0)])
        records = iter(consumer)
        assert next(records).offset == 0
        consumer.close()
        with pytest.raises(ConsumerStateError, match="closed"):
            next(records)
