"""A topic that is read and appended to as one table: it contains the records of its
partitions, each in order.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.partitioner import STICKY_BYTES
from support.partitions import reference_murmur2

T0 = 1_700_000_000_000


def utc_datetime(timestamp_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=timestamp_ms)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[logcore.LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as directory:
        directory.create_topic("orders", partitions=3)
        yield directory


def fill(directory: logcore.LogDir, seed: int) -> None:
    """Append records with and without keys and with unordered timestamps, and an
    aborted transaction. Then delete records, so that a log start is above 0.
    """
    rng = random.Random(seed)
    for number in range(rng.randrange(20, 200)):
        key = rng.choice([None, b"k%d" % rng.randrange(9)])
        directory.append(
            "orders",
            b"v%d" % number,
            key=key,
            timestamp_ms=T0 + 100 * number + rng.randrange(-300, 300),
        )
    log = directory.partition("orders", rng.randrange(3))
    batch = logcore.recordbatch.encode(
        [(b"k", b"aborted")],
        producer_id=5,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
        now_ms=T0,
    )
    log.append_batch(batch)
    log.end_transaction(5, 0, commit=False)
    log.delete_records(rng.randrange(log.high_watermark))


def expected(
    directory: logcore.LogDir,
    number: int,
    start: int | None = None,
    end: int | None = None,
    **more: Any,
) -> list[logcore.TopicRecord]:
    log = directory.partition("orders", number)
    first = log.log_start_offset if start is None else start
    return [
        logcore.TopicRecord("orders", number, *record)
        for record in log.read(first, end, **more)
    ]


@pytest.mark.parametrize("seed", range(10))
def test_topic_contains_the_records_of_its_partitions(
    directory: logcore.LogDir, seed: int
) -> None:
    fill(directory, seed)
    for isolation in ("read_uncommitted", "read_committed"):
        rows = [
            row
            for number in range(3)
            for row in expected(directory, number, isolation=isolation)
        ]
        assert list(directory.read("orders", isolation=isolation)) == rows  # type: ignore[arg-type]
        columns = list(directory.scan("orders", isolation=isolation))  # type: ignore[arg-type]
        scanned = [
            (partition_columns.topic, partition_columns.partition, *record)
            for partition_columns in columns
            for record in partition_columns.records()
        ]
        assert scanned == rows
        table = directory.scan("orders", isolation=isolation).to_table()  # type: ignore[arg-type]
        assert table.column("topic").to_pylist() == ["orders"] * len(rows)
        assert table.column("partition").to_pylist() == [row.partition for row in rows]
        assert table.column("offset").to_pylist() == [row.offset for row in rows]
        assert table.column("value").to_pylist() == [row.value for row in rows]
    merged = list(directory.read("orders", order="time"))
    assert sorted(merged) == sorted(directory.read("orders"))
    for number in range(3):  # each partition keeps the order of its offsets
        assert [row for row in merged if row.partition == number] == expected(
            directory, number
        )


def test_read_merges_partitions_by_time(
    directory: logcore.LogDir,
) -> None:
    for number in range(30):
        directory.append(
            "orders", b"%d" % number, partition=number * 7 % 3, timestamp_ms=T0 + number
        )
    assert [row.value for row in directory.read("orders", order="time")] == [
        b"%d" % number for number in range(30)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_read_between_timestamps_and_between_offsets(
    directory: logcore.LogDir, seed: int
) -> None:
    fill(directory, seed)
    rng = random.Random(seed)
    topic = directory.topic("orders")
    since, until = sorted(rng.randrange(T0, T0 + 15_000) for _ in range(2))
    rows = []
    for number in topic.partitions:
        log = topic.partition(number)
        bounds = [log.offset_for_timestamp(time) for time in (since, until)]
        rows += expected(
            directory,
            number,
            *(log.high_watermark if bound is None else bound for bound in bounds),
        )
    assert list(topic.read(utc_datetime(since), utc_datetime(until))) == rows
    ends = {
        number: topic.partition(number).high_watermark for number in topic.partitions
    }
    starts = {1: max(topic.partition(1).log_start_offset, ends[1] - 3)}
    assert list(topic.read(starts, partitions=[1])) == expected(directory, 1, starts[1])
    selected = [row for number in (2, 0) for row in expected(directory, number)]
    assert list(topic.read(starts, ends, partitions=[2, 0])) == selected
    table = topic.scan(
        starts, {1: ends[1] - 1}, partitions=[1], columns=["offset"]
    ).to_table()
    assert table.column_names == ["offset"]
    assert table.column("offset").to_pylist() == [
        row.offset for row in expected(directory, 1, starts[1], ends[1] - 1)
    ]


def test_key_chooses_the_same_partition_as_kafka(directory: logcore.LogDir) -> None:
    for number in range(50):
        key = b"key-%d" % number
        receipt = directory.append("orders", b"v", key=memoryview(key))
        assert (receipt.topic, receipt.partition) == (
            "orders",
            reference_murmur2(key) % 3,
        )
        assert (
            directory.partition("orders", receipt.partition).get(receipt.offset).key
            == key
        )
    assert directory.append("orders", b"v", key=b"key-1", partition=2).partition == 2
    directory.add_partitions("orders", 7)
    assert (
        directory.append("orders", b"v", key=b"key-1").partition
        == reference_murmur2(b"key-1") % 7
    )


def test_records_without_a_key_change_partition_after_a_batch(
    directory: logcore.LogDir,
) -> None:
    size = STICKY_BYTES // 4
    numbers = [directory.append("orders", b"x" * size).partition for _ in range(40)]
    assert set(numbers) == {0, 1, 2}
    changes = sum(first != other for first, other in itertools.pairwise(numbers))
    assert changes == 9, "four records for one partition"


def test_topic_with_missing_partitions_requires_a_partition(tmp_path: Path) -> None:
    for number in (0, 2):
        with logcore.open(tmp_path / f"orders-{number}", create=True) as log:
            log.append(b"%d" % number)
    with logcore.open_dir(tmp_path) as directory:
        assert [row.partition for row in directory.read("orders")] == [0, 2]
        with pytest.raises(
            logcore.InvalidConfigError,
            match=r"partitions of the topic are missing.*partition=",
        ):
            directory.append("orders", b"v", key=b"k")
        assert directory.append("orders", b"v", partition=2).offset == 1


def test_tail_returns_each_record_of_all_partitions_once(
    directory: logcore.LogDir,
) -> None:
    directory.append("orders", b"before", partition=1)
    tail = directory.tail("orders", {0: 0}, timeout=30)
    thread = threading.Thread(
        target=lambda: [
            directory.append("orders", b"%d" % index, partition=index % 3)
            for index in range(60)
        ]
    )
    thread.start()
    rows = [next(tail) for _ in range(60)]
    thread.join()
    assert sorted(int(row.value or b"") for row in rows) == list(range(60))
    for number in range(3):
        offsets = [row.offset for row in rows if row.partition == number]
        assert offsets == sorted(offsets)
    directory.append("orders", b"last", partition=2)
    assert next(tail).value == b"last"
    assert list(directory.tail("orders", timeout=0.01)) == []
    assert (
        len(list(directory.tail("orders", dict.fromkeys(range(3), 0), timeout=0.01)))
        == 62
    )


def test_tail_ends_when_the_directory_is_closed(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic("orders", partitions=3)
        tail = directory.tail("orders")
        thread = threading.Thread(target=lambda: list(tail))
        thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_tail_that_is_not_waiting_ends_when_the_directory_is_closed(
    tmp_path: Path,
) -> None:
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic("orders", partitions=2)
        for number in (0, 1):
            directory.append("orders", b"v", partition=number)
        tail = directory.tail("orders", {0: 0, 1: 0})
        assert next(tail).partition == 0
    assert list(tail) == []


def test_tail_detects_records_replaced_between_two_reads(
    tmp_path: Path,
) -> None:
    """When the reader reads again, the log is longer than at its last read."""
    for truncated_to, is_detected in ((5, True), (11, False)):
        path = tmp_path / str(truncated_to)
        with logcore.open_dir(path, create=True, durability="os") as directory:
            directory.create_topic("orders")
            for _ in range(10):
                directory.append("orders", b"old")
            with logcore.open_dir(path, read_only=True) as reading_directory:
                tail = reading_directory.tail("orders", {0: 0}, timeout=30)
                assert [next(tail).offset for _ in range(10)] == list(range(10))
                for _ in range(3):
                    directory.append("orders", b"unseen")
                directory.partition("orders", 0).truncate(truncated_to)
                for _ in range(9):
                    directory.append("orders", b"new")
                if is_detected:
                    with pytest.raises(
                        logcore.OffsetOutOfRangeError, match="truncated below here"
                    ):
                        next(tail)
                else:
                    assert [next(tail).value for _ in range(3)] == [
                        b"unseen",
                        b"new",
                        b"new",
                    ]


def test_tail_from_the_log_end_waits_for_the_high_watermark(tmp_path: Path) -> None:
    with logcore.open(
        tmp_path / "orders-0", create=True, replicated=True, durability="os"
    ) as log:
        log.append(b"0")
        log.append(b"1")
        tail = log.tail(2, timeout=30)
        thread = threading.Thread(
            target=lambda: (log.append(b"2"), log.advance_high_watermark(3))
        )
        thread.start()
        assert next(tail).value == b"2"
        thread.join()


def test_waiting_tail_raises_after_a_truncation(tmp_path: Path) -> None:
    with logcore.open(tmp_path / "orders-0", create=True, durability="os") as log:
        for _ in range(3):
            log.append(b"v")
        tail = log.tail(timeout=30)
        thread = threading.Thread(target=log.truncate, args=(1,))
        thread.start()
        with pytest.raises(logcore.OffsetOutOfRangeError, match="truncated below here"):
            list(tail)
        thread.join()


def test_tail_of_no_partitions_ends(directory: logcore.LogDir) -> None:
    assert list(directory.tail("orders", partitions=[])) == []


def test_partition_named_twice_is_refused(directory: logcore.LogDir) -> None:
    directory.append("orders", b"v", partition=0)
    for read in (directory.read, directory.scan, directory.tail):
        with pytest.raises(
            logcore.InvalidConfigError, match=r"named twice.*found \(0, 0\)"
        ):
            read("orders", partitions=[0, 0])


@pytest.mark.parametrize("read_only", [False, True])
def test_tail_raises_after_a_truncation_before_the_log_has_grown(
    tmp_path: Path, read_only: bool
) -> None:
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic("orders")
        for _ in range(10):
            directory.append("orders", b"old")
        source = logcore.open_dir(tmp_path, read_only=True) if read_only else directory
        with source:
            tail = source.tail("orders", {0: 9}, timeout=30)
            assert next(tail).offset == 9
            directory.partition("orders", 0).truncate(5)
            with pytest.raises(
                logcore.OffsetOutOfRangeError, match="truncated below here"
            ):
                next(tail)


WRITE_PROGRAM = """
import sys, logcore
with logcore.open_dir(sys.argv[1]) as directory:
    print(flush=True)
    for line in sys.stdin:
        directory.append("orders", line.strip().encode(), partition=int(line) % 3)
"""


def test_tail_wakes_for_another_process(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic("orders", partitions=3)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdout.readline()
    with logcore.open_dir(tmp_path, read_only=True) as directory:
        tail = directory.tail("orders", dict.fromkeys(range(3), 0), timeout=60)
        for number in range(30):
            print(number, file=writer.stdin, flush=True)
            row = next(tail)
            assert (row.partition, row.offset, row.value) == (
                number % 3,
                number // 3,
                b"%d" % number,
            )
        writer.communicate()
        # A read-only directory reads the present records, including those appended
        # after it was opened.
        assert len(list(directory.read("orders"))) == 30


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (5, "a position in a topic.*offsets by partition, such as {0: 42}.*found 5"),
        ("yesterday", "a position in a topic"),
        (datetime(2026, 1, 1), "not a timestamp.*with a time zone"),
        ({7: 1}, "no such partition.*found 7"),
        ({0: 99}, "outside the log"),
    ],
)
def test_invalid_position_error_explains_valid_positions(
    directory: logcore.LogDir, start: Any, message: str
) -> None:
    for read in (directory.read, directory.scan, directory.tail):
        with pytest.raises(logcore.LogcoreError, match=message):
            read("orders", start)


def test_misspelled_name_error_suggests_the_nearest_name(
    directory: logcore.LogDir,
) -> None:
    for action in (directory.read, directory.scan, directory.tail, directory.topic):
        with pytest.raises(logcore.TopicNotFoundError, match="did you mean 'orders'"):
            action("ordres")
    with pytest.raises(logcore.TopicNotFoundError, match="did you mean 'orders'"):
        directory.append("ordres", b"v")
    with pytest.raises(logcore.TopicNotFoundError, match="no such partition"):
        directory.append("orders", b"v", partition=3)
    with pytest.raises(logcore.TopicNotFoundError, match="no such partition"):
        directory.read("orders", partitions=[3])
    with pytest.raises(logcore.InvalidConfigError, match="'partition' or 'time'"):
        directory.read("orders", order="offset")  # type: ignore[arg-type]
    with pytest.raises(logcore.InvalidConfigError, match="did you mean 'value'"):
        directory.scan("orders", columns=["vaule"])
    with pytest.raises(logcore.InvalidRecordError, match="key must be bytes"):
        directory.append("orders", b"v", key="text")  # type: ignore[arg-type]
    with pytest.raises(logcore.InvalidRecordError, match="value must be bytes"):
        directory.append("orders", "text")  # type: ignore[arg-type]


def test_deleted_topic_is_unusable_until_it_is_recreated(
    directory: logcore.LogDir,
) -> None:
    topic = directory.topic("orders")
    topic.append(b"v")
    directory.delete_topic("orders")
    with pytest.raises(logcore.TopicNotFoundError):
        topic.append(b"v")
    with pytest.raises(logcore.TopicNotFoundError):
        topic.read()
    directory.create_topic("orders", partitions=2)
    assert topic.append(b"v", key=b"key-3").partition == reference_murmur2(b"key-3") % 2


# -- appends with an expected offset ---------------------------------------------------


def test_append_with_a_wrong_expected_offset_stores_nothing(
    directory: logcore.LogDir,
) -> None:
    log = directory.partition("orders", 0)
    assert log.append(b"a", expected_offset=0).offset == 0
    assert (
        log.append_many([(None, b"b"), (None, b"c")], expected_offset=1).last_offset
        == 2
    )
    assert log.append_columns(values=(b"d", [0, 1]), expected_offset=3).offset == 3

    def check(append: Callable[..., logcore.Receipt], wrong_offset: int) -> None:
        with pytest.raises(
            logcore.OffsetConflictError, match="does not end where"
        ) as caught:
            append(expected_offset=wrong_offset)
        assert (caught.value.expected, caught.value.found) == (wrong_offset, 4)
        unpickled = pickle.loads(pickle.dumps(caught.value))
        assert (unpickled.expected, unpickled.found, str(unpickled)) == (
            wrong_offset,
            4,
            str(caught.value),
        )

    for wrong_offset in (0, 3, 5):
        check(functools.partial(log.append, b"x"), wrong_offset)
        check(functools.partial(log.append_many, [(None, b"x")]), wrong_offset)
        check(
            functools.partial(log.append_columns, values=(b"x", [0, 1])), wrong_offset
        )
    assert log.log_end_offset == 4


def test_one_of_several_appends_with_the_same_expected_offset_succeeds(
    directory: logcore.LogDir,
) -> None:
    """Each thread increments the last record. If an append in between were accepted, an
    increment would be lost.
    """
    log = directory.partition("orders", 0)
    log.append(b"0")

    def increment() -> None:
        appended = 0
        while appended < 50:
            last = log.get(log.high_watermark - 1)
            try:
                log.append(
                    b"%d" % (int(last.value or b"") + 1),
                    expected_offset=last.offset + 1,
                )
                appended += 1
            except logcore.OffsetConflictError:
                continue

    threads = [threading.Thread(target=increment) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(record.value or b"") for record in log.read(0)] == list(range(201))


# -- frames ----------------------------------------------------------------------------


def test_scans_are_convertible_to_frames(directory: logcore.LogDir) -> None:
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    for number in range(5):
        directory.append(
            "orders",
            b"v%d" % number,
            partition=number % 2,
            timestamp_ms=utc_datetime(T0 + number),
            headers=[("h", None)],
        )
    scan = directory.scan(
        "orders", columns=["partition", "offset", "timestamp", "value"]
    )
    frame = scan.to_pandas()
    assert list(frame.columns) == ["partition", "offset", "timestamp", "value"]
    assert frame["value"].tolist() == [b"v0", b"v2", b"v4", b"v1", b"v3"]
    assert [time.to_pydatetime() for time in frame["timestamp"]] == [
        utc_datetime(T0 + number) for number in (0, 2, 4, 1, 3)
    ]
    assert scan.to_polars().rows() == [
        tuple(row) for row in polars.DataFrame(scan).rows()
    ]
    assert scan.to_polars()["partition"].to_list() == [0, 0, 0, 1, 1]
    log = directory.partition("orders", 1)
    assert log.scan(columns=["topic", "partition", "offset"]).to_polars().rows() == [
        ("orders", 1, 0),
        ("orders", 1, 1),
    ]
    assert log.scan().to_polars().columns == [
        "offset",
        "timestamp",
        "key",
        "value",
        "headers",
    ]
    with pytest.raises(TypeError, match=r"scan\.to_pandas\(\)"):
        pandas.DataFrame(scan)
    record_frame = pandas.DataFrame(list(log.read(0)))
    assert list(record_frame.columns) == [
        "offset",
        "timestamp_ms",
        "key",
        "value",
        "headers",
    ]
    match log.get(0):
        case (offset, time, _, value, _):
            assert (offset, time, value) == (0, T0 + 1, b"v1")
        case _:
            pytest.fail("a record matches a sequence pattern")


@pytest.mark.parametrize("columns", ["offset", ["offset", "offset"], ["ofset"]])
def test_invalid_columns_are_refused(directory: logcore.LogDir, columns: Any) -> None:
    for scan in (directory.topic("orders").scan, directory.partition("orders", 0).scan):
        with pytest.raises(logcore.InvalidConfigError, match="column"):
            scan(columns=columns)


def test_datetimes_are_accepted_as_timestamps_in_every_call(
    directory: logcore.LogDir,
) -> None:
    log = directory.partition("orders", 0)
    log.append(b"v", timestamp_ms=utc_datetime(T0))
    log.append_many([(None, b"v", None, utc_datetime(T0 + 1))])
    assert [record.timestamp_ms for record in log.read(0)] == [T0, T0 + 1]
    assert log.offset_for_timestamp(utc_datetime(T0 + 1)) == 1
    log.tick(utc_datetime(T0))
    directory.tick(utc_datetime(T0))
    log.reconfigure({"retention.ms": 1000, "cleanup.policy": "delete,compact"})
    assert logcore.clean(log, now_ms=utc_datetime(T0)) is None
    assert log.retain(utc_datetime(T0)) == 0
    assert log.retain(utc_datetime(T0 + 5000)) == 1
    for invalid in (datetime(2026, 1, 1), "2026-01-01", 1.5):
        with pytest.raises(
            logcore.InvalidTimestampError, match="datetime with a time zone"
        ):
            log.tick(invalid)  # type: ignore[arg-type]


def test_topic_created_while_names_are_compared_causes_no_error(
    directory: logcore.LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_and_match(word: str, names: Iterable[str], number: int) -> list[str]:
        remaining = iter(names)
        next(remaining)
        directory.create_topic("another")
        return list(remaining)

    directory.create_topic("first")
    monkeypatch.setattr("difflib.get_close_matches", create_and_match)
    with pytest.raises(logcore.TopicNotFoundError):
        directory.append("missing", b"v")
