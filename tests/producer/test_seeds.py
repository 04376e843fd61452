"""The producer of the first Kafka version: its results and errors, its queue and its
settings.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.errors import (
    BufferFullError,
    InvalidConfigError,
    InvalidRecordError,
    ProducerClosedError,
    RecordTooLargeError,
    SerializationError,
    TopicNotFoundError,
)
from logcore.legacy.producer import Producer, ProducerData, SyncProducer
from logcore.logdir import LogDir
from logcore.producer import RecordMetadata


@pytest.fixture
def data(tmp_path: Path) -> Iterator[LogDir]:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as directory:
        directory.create_topic("t", 3)
        yield directory


def stored(data: LogDir) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.partition, record.key, record.value) for record in data.read("t")]


def test_sync_producer_returns_when_records_are_stored(data: LogDir) -> None:
    with Producer(data) as producer:
        futures = producer.send(ProducerData("t", b"k", [b"1", b"2"]))
        assert all(future.done() for future in futures)
        assert [value for _, _, value in stored(data)] == [b"1", b"2"]
        assert len({partition for partition, _, _ in stored(data)}) == 1
        assert (
            producer.send(
                [ProducerData("t", b"k", b"3"), ProducerData("t", b"k", (b"4",))]
            )[1]
            .result()
            .offset
            == 3
        )
        assert producer.send([]) == []


def test_async_producer_returns_when_records_are_queued(data: LogDir) -> None:
    producer = Producer(
        data, {"producer.type": "async", "queue.time": 60_000, "batch.size": 3}
    )
    first = producer.send(ProducerData("t", b"k", [b"1", b"2"]))
    assert not any(future.done() for future in first)
    producer.send(ProducerData("t", b"k", [b"3", b"4"]))
    assert first[0].result().offset == 0  # the third record fills the batch
    producer.close()
    assert [value for _, _, value in stored(data)] == [b"1", b"2", b"3", b"4"]
    with pytest.raises(ProducerClosedError):
        producer.send(ProducerData("t", None, b"late"))


def test_batch_contains_two_hundred_records_by_default(data: LogDir) -> None:
    with Producer(data, {"producer.type": "async", "queue.time": 60_000}) as producer:
        futures = producer.send(ProducerData("t", b"k", [b"v"] * 201))
        assert futures[199].result().offset == 199
        assert not futures[200].done()


def test_keys_values_and_partitions_are_chosen_by_functions_of_the_settings(
    data: LogDir,
) -> None:
    calls: list[tuple[Any, int]] = []

    def partition(key: Any, count: int) -> int:
        calls.append((key, count))
        return count - 1 if key is None else len(key) % count

    settings = {
        "serializer.class": str.encode,
        "key.serializer.class": str.encode,
        "partitioner.class": partition,
    }
    with Producer(data, settings) as producer:
        producer.send(
            [
                ProducerData("t", "anna", "a"),
                ProducerData("t", None, "b"),
                ProducerData("t", "abc", "c"),
            ]
        )
    assert stored(data) == [(0, b"abc", b"c"), (1, b"anna", b"a"), (2, None, b"b")]
    assert calls == [("anna", 3), (None, 3), ("abc", 3)]


@pytest.mark.parametrize("index", [-1, 3, "0", None])
def test_nonexistent_partition_is_refused(data: LogDir, index: Any) -> None:
    producer = Producer(data, {"partitioner.class": lambda key, count: index})
    with producer, pytest.raises(InvalidConfigError):
        producer.send(ProducerData("t", b"k", b"v"))
    assert stored(data) == []


def test_queue_size_is_limited(data: LogDir) -> None:
    settings = {
        "producer.type": "async",
        "queue.size": 2,
        "queue.time": "60000",
        "queue.enqueue.timeout.ms": "0",
    }
    with Producer(data, settings) as producer:
        futures = producer.send(ProducerData("t", b"k", [b"1", b"2"]))
        with pytest.raises(BufferFullError):
            producer.send(ProducerData("t", b"k", b"3"))
        producer._producer.flush()
        assert all(future.done() for future in futures)
        producer.send(ProducerData("t", b"k", [b"4"]))
    assert [value for _, _, value in stored(data)] == [b"1", b"2", b"4"]


def test_send_waits_while_the_queue_is_full(data: LogDir) -> None:
    settings = {
        "producer.type": "async",
        "queue.size": 2,
        "queue.time": 60_000,
        "batch.num.messages": 100,
    }
    with Producer(data, settings) as producer:
        sending = threading.Thread(
            target=producer.send,
            args=(ProducerData("t", b"k", [b"%d" % n for n in range(5)]),),
        )
        sending.start()
        while sending.is_alive():
            producer._producer.flush()
        sending.join()
    assert [value for _, _, value in stored(data)] == [b"0", b"1", b"2", b"3", b"4"]


def test_failed_record_frees_its_place_in_the_queue(data: LogDir) -> None:
    settings = {
        "queue.size": 1,
        "queue.enqueue.timeout.ms": 0,
        "serializer.class": lambda given: given.encode(),
    }
    with Producer(data, settings) as producer:
        for _ in range(3):
            with pytest.raises(SerializationError):
                producer.send(ProducerData("t", None, 5))
            with pytest.raises(TopicNotFoundError):
                producer.send(ProducerData("u", None, "v"))
        producer.send(ProducerData("t", None, "v"))


def test_sync_producer_raises_the_error_of_a_record(data: LogDir) -> None:
    data.alter_topic("t", {"max.message.bytes": 1_000})
    calls: list[tuple[Exception | None, RecordMetadata]] = []
    producer = Producer(
        data,
        {"callback.handler": lambda error, metadata: calls.append((error, metadata))},
    )
    with producer, pytest.raises(RecordTooLargeError):
        producer.send(ProducerData("t", b"k", [b"1", b"x" * 5_000, b"3"]))
    assert [value for _, _, value in stored(data)] == [b"1", b"3"]
    # A refused record is reported at once, before or after those that wait for a sync.
    assert Counter(type(error) for error, _ in calls) == {
        type(None): 2,
        RecordTooLargeError: 1,
    }


def test_compression_acks_and_event_handler_are_applied(data: LogDir) -> None:
    class Doubling:
        def on_send(self, record: Any) -> Any:
            return record._replace(value=record.value * 2)

        def on_acknowledgement(self, metadata: Any, error: Any) -> None:
            pass

    settings = {
        "compression.codec": "1",
        "request.required.acks": 1,
        "event.handler": Doubling(),
        "client.id": "c",
    }
    with pytest.warns(UserWarning, match="zk.connect"):
        producer = Producer(data, {**settings, "zk.connect": "localhost:2181"})
    with producer:
        metadata = producer.send(ProducerData("t", b"k", b"v"))[0].result()
    assert (metadata.durability, [value for _, _, value in stored(data)]) == (
        "os",
        [b"vv"],
    )
    batch = next(data.partition("t", metadata.partition).batches(0))
    assert batch.attributes & 7 == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"producer.type": "later"}, {"queue.size": 0}, {"queue.time": "soon"}, {"partitioner.class": "Hash"},
        {"no.such": 1}, {"queue.time": 1, "queue.buffering.max.ms": 1}, {"batch.size": None},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_refused(data: LogDir, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidConfigError):
        Producer(data, wrong)


def test_send_accepts_only_producer_data(data: LogDir) -> None:
    with Producer(data) as producer, pytest.raises(InvalidRecordError):
        producer.send(["text"])  # type: ignore[list-item]


def test_sync_producer_sends_one_record_at_a_time(data: LogDir) -> None:
    producer = SyncProducer(data.producer(linger_ms=0))
    assert producer.send("t", b"v", key=b"k", partition=1).offset == 0
    producer.close()
