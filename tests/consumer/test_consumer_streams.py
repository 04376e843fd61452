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
    found: queue.Queue[tuple[str, TopicRecord]] = queue.Queue()

    def work(stream: Stream) -> None:
        for record in stream:
            found.put((stream.name, record))

    working = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in working:
        thread.start()
    yield found
    for thread in working:
        thread.join()


def test_partition_belongs_to_one_stream(data: LogDir) -> None:
    connector = data.connector("g", auto_offset_reset="earliest")
    streams = connector.create_message_streams({"t": 2})["t"]
    fill(data, "t", 20)
    with threads(streams) as found:
        records = [found.get() for _ in range(80)]
        connector.shutdown()
    places = [(record.partition, record.offset) for _, record in records]
    assert sorted(places) == [
        (partition, offset) for partition in range(4) for offset in range(20)
    ]
    for partition in range(4):
        assert [offset for number, offset in places if number == partition] == list(
            range(20)
        )


def test_streams_of_several_topics_return_their_own_records(data: LogDir) -> None:
    fill(data, "t", 1)
    fill(data, "u", 1)
    connector = data.connector("g", auto_offset_reset="earliest", client_id="c")
    made = connector.create_message_streams({"t": 1, "u": 2})
    assert [stream.name for stream in made["t"] + made["u"]] == ["c-0", "c-1", "c-2"]
    with threads(made["t"] + made["u"]) as found:
        records = [found.get() for _ in range(5)]
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
    """Topics created later are read too, but `__consumer_offsets` is not."""
    data.create_topic("tt")
    for topic in ("t", "u", "tt"):
        fill(data, topic, 1)
    connector = data.connector("g", auto_offset_reset="earliest")
    streams = connector.create_message_streams_by_filter(topic_filter, 2)
    with threads(streams) as found:
        seen: set[str] = set()
        while seen != names:
            seen.add(found.get()[1].topic)
        connector.shutdown()
    assert seen == names


def test_stream_reads_topics_created_later(data: LogDir) -> None:
    connector = data.connector("g", auto_offset_reset="earliest")
    streams = connector.create_message_streams_by_filter(Whitelist("new.*"))
    with threads(streams) as found:
        data.create_topic("newer")
        fill(data, "newer", 2)
        assert [found.get()[1].offset for _ in range(2)] == [0, 1]
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
        with threads(connector.create_message_streams({"t": 2})["t"]) as found:
            places = {
                (record.partition, record.offset)
                for _, record in (found.get() for _ in range(20))
            }
            connector.shutdown()
        assert places == {
            (partition, offset) for partition in range(4) for offset in range(5)
        }


def test_shutdown_does_not_commit_the_current_record(data: LogDir) -> None:
    """The thread of the stream may still be processing the record. Earlier records are
    finished.
    """
    fill(data, "u", 5)

    def first(count: int) -> list[int]:
        with data.connector("g", auto_offset_reset="earliest") as connector:
            stream = connector.create_message_streams({"u": 1})["u"][0]
            return [next(stream).offset for _ in range(count)]

    assert first(3) == [0, 1, 2]
    assert first(3) == [2, 3, 4]


def test_request_for_the_next_record_finishes_the_last(data: LogDir) -> None:
    fill(data, "u", 3)
    connector = data.connector("g", auto_offset_reset="earliest")
    with threads(connector.create_message_streams({"u": 1})["u"]) as found:
        assert [found.get()[1].offset for _ in range(3)] == [0, 1, 2]
        data.append("u", b"last", partition=0)
        found.get()
        connector.shutdown()
    with data.consumer(group_id="g") as observer:
        stored = observer.committed([("u", 0)])[TopicPartition("u", 0)]
    assert stored is not None
    assert stored.offset >= 3


def test_stream_ends_while_shutdown_closes_its_consumer(
    data: LogDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the stream requests a record during shutdown(), and gets none."""
    fill(data, "u", 1)
    connector = data.connector("g", auto_offset_reset="earliest")
    stream = connector.create_message_streams({"u": 1})["u"][0]
    assert next(stream).offset == 0
    rest: list[list[TopicRecord]] = []
    leave = Assignment.leave

    def leave_slowly(assignment: Assignment, timeout: float | None) -> None:
        reading = threading.Thread(target=lambda: rest.append(list(stream)))
        reading.start()
        reading.join()
        leave(assignment, timeout)

    monkeypatch.setattr(Assignment, "leave", leave_slowly)
    connector.shutdown()
    assert rest == [[]]


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
    for again in (
        lambda: connector.create_message_streams({"t": 1}),
        lambda: connector.create_message_streams_by_filter(Whitelist("t")),
    ):
        with pytest.raises(ConsumerStateError):
            again()
    connector.shutdown()
    connector.shutdown()
    assert list(streams[0]) == []
    connector.commit_offsets()
    with pytest.raises(ConsumerStateError):
        connector.create_message_streams({"t": 1})


def test_invalid_stream_requests_are_refused(data: LogDir) -> None:
    for wrong in (0, -1, "2", 1.5):
        with pytest.raises(InvalidConfigError):
            data.connector("g").create_message_streams({"t": wrong})  # type: ignore[dict-item]
    for wrong_filter in (Whitelist("("), Blacklist("("), Blacklist(")|(")):
        with pytest.raises(InvalidConfigError):
            data.connector("g").create_message_streams_by_filter(wrong_filter)
    with pytest.raises(InvalidConfigError):
        data.connector("g").create_message_streams_by_filter("t.*")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError):
        data.connector("g", group="h").create_message_streams({"t": 1})  # type: ignore[call-arg]
    with pytest.raises(InvalidConfigError):
        data.connector("g", group_id="h")
