"""Streams for threads: assignment of partitions, topic filters, commits and shutdown."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import logcore
from logcore.consumer import TopicPartition
from logcore.consumer.assignment import Assignment
from logcore.errors import ConsumerStateError, InvalidConfigError
from logcore.kernels import TopicRecord
from logcore.legacy import Blacklist, Stream, Whitelist
from logcore.logdir import LogDir


@pytest.fixture
def data(tmp_path: Path) -> Iterator[LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as directory:
        directory.create_topic("t", 4)
        directory.create_topic("u")
        yield directory


def fill(data: LogDir, topic: str, count: int) -> None:
    for partition in data.partitions(topic):
        for number in range(count):
            data.append(topic, b"%d" % number, partition=partition)


@contextmanager
def threads(streams: list[Stream]) -> Iterator[queue.Queue[tuple[str, TopicRecord]]]:
    """Run a thread for each stream until the streams end. Yield a queue of (name of the
    stream, record).
    """
    records: queue.Queue[tuple[str, TopicRecord]] = queue.Queue()

    def consume_stream(stream: Stream) -> None:
        for record in stream:
            records.put((stream.name, record))

    running = [
        threading.Thread(target=consume_stream, args=(stream,)) for stream in streams
    ]
    for thread in running:
        thread.start()
    yield records
    for thread in running:
        thread.join()


def test_partition_belongs_to_one_stream(data: LogDir) -> None:
    connector = data.connector("g", auto_offset_reset="earliest")
    streams = connector.create_message_streams({"t": 2})["t"]
    fill(data, "t", 20)
    with threads(streams) as queued:
        records = [queued.get() for _ in range(80)]
        connector.shutdown()
    positions = [(record.partition, record.offset) for _, record in records]
    assert sorted(positions) == [
        (partition, offset) for partition in range(4) for offset in range(20)
    ]
    for partition in range(4):
        assert [offset for number, offset in positions if number == partition] == list(
            range(20)
        )


def test_streams_of_several_topics_return_their_own_records(data: LogDir) -> None:
    fill(data, "t", 1)
    fill(data, "u", 1)
    connector = data.connector("g", auto_offset_reset="earliest", client_id="c")
    streams = connector.create_message_streams({"t": 1, "u": 2})
    assert [stream.name for stream in streams["t"] + streams["u"]] == [
        "c-0",
        "c-1",
        "c-2",
    ]
    with threads(streams["t"] + streams["u"]) as queued:
        records = [queued.get() for _ in range(5)]
        connector.shutdown()
    assert {
        (name, record.topic) for name, record in records if record.topic == "t"
    } == {("c-0", "t")}
    assert {name for name, record in records if record.topic == "u"} <= {"c-1", "c-2"}


@pytest.mark.parametrize(
    ("topic_filter", "names"),
    [
        (Whitelist("t"), {"t"}), (Whitelist("t.*"), {"t", "tt"}), (Blacklist("t"), {"u", "tt"}),
        (Blacklist("t.*|x"), {"u"}),
    ],
)  # fmt: skip
def test_filters_match_whole_names(
    data: LogDir, topic_filter: Whitelist | Blacklist, names: set[str]
) -> None:
    """The streams also read topics that are created later, but not
    `__consumer_offsets`.
    """
    data.create_topic("tt")
    for topic in ("t", "u", "tt"):
        fill(data, topic, 1)
    connector = data.connector("g", auto_offset_reset="earliest")
    streams = connector.create_message_streams_by_filter(topic_filter, 2)
    with threads(streams) as queued:
        topics: set[str] = set()
        while topics != names:
            topics.add(queued.get()[1].topic)
        connector.shutdown()
    assert topics == names


def test_stream_reads_topics_created_later(data: LogDir) -> None:
    connector = data.connector("g", auto_offset_reset="earliest")
    streams = connector.create_message_streams_by_filter(Whitelist("new.*"))
    with threads(streams) as queued:
        data.create_topic("newer")
        fill(data, "newer", 2)
        assert [queued.get()[1].offset for _ in range(2)] == [0, 1]
        connector.shutdown()


def test_commit_offsets_commits_all_returned_records(data: LogDir) -> None:
    fill(data, "u", 5)
    with data.connector(
        "g", auto_offset_reset="earliest", enable_auto_commit=False
    ) as connector:
        stream = connector.create_message_streams({"u": 1})["u"][0]
        assert [next(stream).offset for _ in range(3)] == [0, 1, 2]
        committing = threading.Thread(target=connector.commit_offsets)
        committing.start()
        committing.join()
        with data.consumer(group_id="g") as observer:
            stored = observer.committed([("u", 0)])[TopicPartition("u", 0)]
        assert stored is not None
        assert stored.offset == 3


def test_streams_work_in_a_shared_directory(tmp_path: Path) -> None:
    with logcore.open_dir(
        tmp_path / "shared", create=True, shared=True, durability="os"
    ) as data:
        data.create_topic("t", 4)
        fill(data, "t", 5)
        connector = data.connector("g", auto_offset_reset="earliest")
        with threads(connector.create_message_streams({"t": 2})["t"]) as queued:
            positions = {
                (record.partition, record.offset)
                for _, record in (queued.get() for _ in range(20))
            }
            connector.shutdown()
        assert positions == {
            (partition, offset) for partition in range(4) for offset in range(5)
        }


def test_shutdown_does_not_commit_the_current_record(data: LogDir) -> None:
    """The thread of the stream may still be processing the record. Earlier records are
    finished.
    """
    fill(data, "u", 5)

    def read_first(count: int) -> list[int]:
        with data.connector("g", auto_offset_reset="earliest") as connector:
            stream = connector.create_message_streams({"u": 1})["u"][0]
            return [next(stream).offset for _ in range(count)]

    assert read_first(3) == [0, 1, 2]
    assert read_first(3) == [2, 3, 4]


def test_request_for_the_next_record_finishes_the_previous_one(data: LogDir) -> None:
    fill(data, "u", 3)
    connector = data.connector("g", auto_offset_reset="earliest")
    with threads(connector.create_message_streams({"u": 1})["u"]) as queued:
        assert [queued.get()[1].offset for _ in range(3)] == [0, 1, 2]
        data.append("u", b"last", partition=0)
        queued.get()
        connector.shutdown()
    with data.consumer(group_id="g") as observer:
        stored = observer.committed([("u", 0)])[TopicPartition("u", 0)]
    assert stored is not None
    assert stored.offset >= 3


def test_stream_ends_while_shutdown_closes_its_consumer(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the stream requests a record during shutdown(), and gets no
    record.
    """
    fill(data, "u", 1)
    connector = data.connector("g", auto_offset_reset="earliest")
    stream = connector.create_message_streams({"u": 1})["u"][0]
    assert next(stream).offset == 0
    remaining: list[list[TopicRecord]] = []
    leave = Assignment.leave

    def leave_slowly(assignment: Assignment, timeout: float | None) -> None:
        reading_thread = threading.Thread(target=lambda: remaining.append(list(stream)))
        reading_thread.start()
        reading_thread.join()
        leave(assignment, timeout)

    monkeypatch.setattr(Assignment, "leave", leave_slowly)
    connector.shutdown()
    assert remaining == [[]]


def test_failed_stream_continues_at_the_same_record(data: LogDir) -> None:
    fill(data, "u", 2)
    fails = [True]

    def decode(value: bytes) -> bytes:
        if fails and fails.pop():
            raise ZeroDivisionError
        return value

    with data.connector(
        "g", auto_offset_reset="earliest", value_deserializer=decode
    ) as connector:
        stream = connector.create_message_streams({"u": 1})["u"][0]
        with pytest.raises(ZeroDivisionError):
            next(stream)
        assert [next(stream).offset for _ in range(2)] == [0, 1]


def test_streams_are_created_once_and_end_once(data: LogDir) -> None:
    connector = data.connector("g")
    streams = connector.create_message_streams({"t": 1})["t"]
    for second_call in (
        lambda: connector.create_message_streams({"t": 1}),
        lambda: connector.create_message_streams_by_filter(Whitelist("t")),
    ):
        with pytest.raises(ConsumerStateError):
            second_call()
    connector.shutdown()
    connector.shutdown()
    assert list(streams[0]) == []
    connector.commit_offsets()
    with pytest.raises(ConsumerStateError):
        connector.create_message_streams({"t": 1})


def test_invalid_stream_requests_are_refused(data: LogDir) -> None:
    for invalid_count in (0, -1, "2", 1.5):
        with pytest.raises(InvalidConfigError):
            data.connector("g").create_message_streams({"t": invalid_count})  # type: ignore[dict-item]
    for invalid_filter in (Whitelist("("), Blacklist("("), Blacklist(")|(")):
        with pytest.raises(InvalidConfigError):
            data.connector("g").create_message_streams_by_filter(invalid_filter)
    with pytest.raises(InvalidConfigError):
        data.connector("g").create_message_streams_by_filter("t.*")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError):
        data.connector("g", group="h").create_message_streams({"t": 1})  # type: ignore[call-arg]
    with pytest.raises(InvalidConfigError):
        data.connector("g", group_id="h")
