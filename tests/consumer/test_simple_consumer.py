"""The low-level consumer: whole batches from an offset, several fetches in one call,
and offsets before a timestamp.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import logcore
from logcore.errors import InvalidConfigError, OffsetOutOfRangeError, TopicNotFoundError
from logcore.legacy import EARLIEST, LATEST, Fetched, FetchRequest
from logcore.legacy.simple_consumer import offsets_before_time
from logcore.logdir import LogDir


@pytest.fixture
def data(tmp_path: Path) -> Iterator[LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as directory:
        directory.create_topic("t", 2)
        yield directory


def offsets(fetched: object) -> list[int]:
    assert isinstance(fetched, Fetched)
    return [record.offset for record in fetched.records()]


def fill(data: LogDir, batches: int, partition: int = 0) -> None:
    for _ in range(batches):
        data.partition("t", partition).append_many([(None, b"x" * 100)] * 3)


def test_fetch_returns_whole_batches_from_an_offset(data: LogDir) -> None:
    fill(data, 4)
    simple = data.simple_consumer()
    all_batches = simple.fetch("t", 0, 0)
    assert offsets(all_batches) == list(range(12))
    assert (
        all_batches.next_offset,
        all_batches.high_watermark,
        all_batches.last_stable_offset,
    ) == (
        12,
        12,
        12,
    )
    first = all_batches.size_bytes // 4
    assert offsets(simple.fetch("t", 0, 0, first)) == [0, 1, 2]
    two_batches = simple.fetch("t", 0, 4, 2 * first + 1)
    assert (offsets(two_batches), two_batches.next_offset) == ([4, 5, 6, 7, 8], 9)
    assert (
        bytes(two_batches.batches[0])
        == bytes(all_batches.batches[0])[first : 3 * first]
    )
    end = simple.fetch("t", 0, 12)
    assert (end.batches, offsets(end), end.next_offset) == ((), [], 12)


def test_fetch_returns_a_batch_larger_than_its_limit(data: LogDir) -> None:
    fill(data, 2)
    fetched = data.simple_consumer().fetch("t", 0, 0, 1)
    assert (offsets(fetched), fetched.next_offset) == ([0, 1, 2], 3)


def test_fetch_continues_across_segments(data: LogDir) -> None:
    for _ in range(3):
        fill(data, 1)
        data.partition("t", 0).roll()
    fetched = data.simple_consumer().fetch("t", 0, 1)
    assert (len(fetched.batches), offsets(fetched), fetched.next_offset) == (
        3,
        list(range(1, 9)),
        9,
    )


def test_each_fetch_of_a_multifetch_has_its_own_result(data: LogDir) -> None:
    fill(data, 1)
    results = data.simple_consumer().multifetch(
        [
            FetchRequest("t", 0, 0, 100),
            ("t", 0, 99, 100),
            ("u", 0, 0, 100),
            ("t", 1, 0, 100),
        ]
    )
    assert offsets(results[0]) == [0, 1, 2]
    assert isinstance(results[1], OffsetOutOfRangeError)
    assert "0 to 3" in str(results[1])
    assert isinstance(results[2], TopicNotFoundError)
    assert offsets(results[3]) == []


def test_fetch_waits_for_min_bytes(data: LogDir) -> None:
    fill(data, 1)
    size = data.simple_consumer().fetch("t", 0, 0).size_bytes
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            fill(data, 1)

    writing = threading.Thread(target=write)
    start_offset = data.partition("t", 0).high_watermark
    writing.start()
    try:
        fetched = data.simple_consumer().fetch(
            "t", 0, start_offset, wait_ms=60_000, min_bytes=3 * size
        )
    finally:
        is_over.set()
        writing.join()
    assert fetched.size_bytes >= 3 * size
    assert data.simple_consumer().fetch("t", 1, 0, wait_ms=1).batches == ()


def test_fetch_waits_for_a_writer_of_another_directory_object(data: LogDir) -> None:
    with logcore.open_dir(data.path, read_only=True) as reader:
        fetching: list[list[int]] = []
        thread = threading.Thread(
            target=lambda: fetching.append(
                offsets(reader.simple_consumer().fetch("t", 0, 0, wait_ms=60_000))
            )
        )
        thread.start()
        fill(data, 1)
        thread.join()
    assert fetching == [[0, 1, 2]]


def test_read_committed_fetch_returns_committed_records_only(data: LogDir) -> None:
    with data.producer(transactional_id="x") as producer:
        with producer.transaction():
            producer.send("t", b"a", partition=0)
        with pytest.raises(ZeroDivisionError), producer.transaction():
            producer.send("t", b"b", partition=0).result()
            raise ZeroDivisionError
        producer.begin_transaction()
        producer.send("t", b"c", partition=0).result()
        simple = data.simple_consumer(isolation_level="read_committed")
        fetched = simple.fetch("t", 0, 0)
        assert [record.value for record in fetched.records()] == [b"a"]
        assert (
            fetched.next_offset,
            fetched.last_stable_offset,
            fetched.high_watermark,
        ) == (4, 4, 5)
        assert simple.fetch("t", 0, 4, wait_ms=1).batches == ()
        assert [
            record.value for record in data.simple_consumer().fetch("t", 0, 0).records()
        ] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("time_ms", "max_offsets", "expected"),
    [
        (LATEST, 1, [30]), (LATEST, 9, [30, 20, 10, 3]), (EARLIEST, 9, [3]), (99, 9, []), (100, 9, [3]),
        (250, 9, [10, 3]), (300, 2, [20, 10]), (1_000, 1, [30]), (999, 1, [20]),
    ],
)  # fmt: skip
def test_offsets_before_a_timestamp_are_chosen_by_segment(
    time_ms: int, max_offsets: int, expected: list[int]
) -> None:
    """As in Kafka, the result has the newest segment whose last write was at or before
    the timestamp, and all earlier segments.
    """
    segments = [(0, 100, 5), (10, 200, 5), (20, 300, 5)]
    assert (
        offsets_before_time(segments, (3, 30), 1_000, time_ms, max_offsets) == expected
    )


def test_empty_last_segment_has_no_separate_end() -> None:
    assert offsets_before_time(
        [(0, 100, 5), (10, 200, 0)], (0, 10), 1_000, LATEST, 9
    ) == [
        10,
        0,
    ]
    assert offsets_before_time([], (0, 0), 1_000, EARLIEST, 9) == []


def test_offsets_before_a_timestamp_in_a_log(data: LogDir) -> None:
    log = data.partition("t", 0)
    for _ in range(3):
        fill(data, 1)
        log.roll()
    fill(data, 1)
    log.delete_records(4)
    simple = data.simple_consumer()
    assert simple.offsets_before("t", 0, LATEST, 9) == [12, 9, 6, 4]
    assert simple.offsets_before("t", 0, EARLIEST) == [4]
    assert simple.offsets_before("t", 0, 0, 9) == []
    assert simple.offsets_before("t", 1, LATEST, 9) == [0]


def test_invalid_fetch_requests_are_refused(data: LogDir) -> None:
    simple = data.simple_consumer()
    with pytest.raises(InvalidConfigError):
        simple.fetch("t", 0, 0, 0)
    with pytest.raises(InvalidConfigError):
        simple.fetch("t", 0, 0, wait_ms=-1)
    with pytest.raises(InvalidConfigError):
        simple.offsets_before("t", 0, -3)
    with pytest.raises(InvalidConfigError):
        simple.offsets_before("t", 0, 0, 0)
    with pytest.raises(InvalidConfigError):
        data.simple_consumer(isolation_level="serializable")  # type: ignore[arg-type]
    with pytest.raises(OffsetOutOfRangeError):
        simple.fetch("t", 0, 5)


def test_fetch_returns_once_max_bytes_are_available(tmp_path: Path) -> None:
    """The fetch waited for min_bytes, although max_bytes allowed only a part of
    them.
    """
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic("t")
        for _ in range(5):
            data.append("t", bytes(100), partition=0)
        fetched = data.simple_consumer().fetch(
            "t", 0, 0, 200, wait_ms=600_000, min_bytes=10_000
        )
        assert 0 < fetched.next_offset < 5
