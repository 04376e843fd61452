"""Transactions of unmodified clients: the records that read_committed readers see, and
the fencing of producers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.coordination.coordinator import Coordinator
from logcore.coordination.transactions import TransactionMachine
from netshim.testing import Kafka
from netshim.transactions import TransactionHost

confluent_kafka = pytest.importorskip("confluent_kafka")

DEADLINE_S = 60  # a limit for events that must happen; no test depends on their speed


@pytest.fixture
def broker(kafka_factory: Callable[..., Kafka], tmp_path: Path) -> Kafka:
    started = kafka_factory(tmp_path / "data", num_partitions=1)
    started.logdir.create_topic("t", 2)
    started.logdir.create_topic("in", 1)
    return started


def transactional(servers: str, name: str = "x", **options: Any) -> Any:
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": servers,
            "linger.ms": 1,
            "transactional.id": name,
            **options,
        }
    )
    producer.init_transactions(DEADLINE_S)
    return producer


def send(
    producer: Any, values: list[bytes], *, topic: str = "t", partitions: int = 2
) -> None:
    for at, value in enumerate(values):
        producer.produce(topic, value, partition=at % partitions)


def committed(logdir: Any, topic: str = "t") -> list[bytes | None]:
    return [
        record.value
        for number in logdir.partitions(topic)
        for record in logdir.partition(topic, number).read(
            0, isolation="read_committed"
        )
    ]


def take(servers: str, count: int, topic: str = "t", **options: Any) -> list[Any]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            **options,
        }
    )
    parts = len(consumer.list_topics(topic, DEADLINE_S).topics[topic].partitions)
    consumer.assign(
        [confluent_kafka.TopicPartition(topic, number, 0) for number in range(parts)]
    )
    messages = []
    ends = 0
    until = time.monotonic() + DEADLINE_S
    while (len(messages) < count or ends < parts) and time.monotonic() < until:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            messages.append(message)
        elif message is not None:
            assert (
                message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
            ), message.error()
            ends += 1
    consumer.close()
    return messages


def test_stored_state_is_loaded_outside_the_event_loop(
    kafka_factory: Callable[..., Kafka], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading 100,000 transactional ids or groups takes most of a second, in which the
    loop could serve no other client.
    """
    with (
        logcore.open_dir(tmp_path / "data", create=True) as data,
        data.producer(transactional_id="x", threaded=False) as producer,
    ):
        producer.init_transactions()
        with data.consumer(group_id="g", enable_auto_commit=False) as consumer:
            data.create_topic("t")
            consumer.assign([("t", 0)])
            consumer.commit({("t", 0): 0})
    threads: dict[str, int] = {}

    def recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*given: Any) -> Any:
            threads[name] = threading.get_ident()
            return call(*given)

        return recorded

    monkeypatch.setattr(
        TransactionMachine, "load", recording("transactions", TransactionMachine.load)
    )
    monkeypatch.setattr(
        TransactionHost, "_on_loaded", recording("loop", TransactionHost._on_loaded)
    )
    monkeypatch.setattr(Coordinator, "take", recording("groups", Coordinator.take))
    servers = kafka_factory(tmp_path / "data").bootstrap_servers
    transactional(servers)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": "g"})
    (committed,) = consumer.committed(
        [confluent_kafka.TopicPartition("t", 0)], DEADLINE_S
    )
    consumer.close()
    assert committed.offset == 0
    assert set(threads) == {"transactions", "loop", "groups"}
    assert threads["loop"] not in (threads["transactions"], threads["groups"])


def test_committed_readers_see_committed_records_only(broker: Kafka) -> None:
    producer = transactional(broker.bootstrap_servers)
    for turn, commit in enumerate([True, False, True]):
        producer.begin_transaction()
        send(producer, [b"%d %d" % (turn, at) for at in range(6)])
        if commit:
            producer.commit_transaction(DEADLINE_S)
        else:
            producer.abort_transaction(DEADLINE_S)
    expected = sorted(b"%d %d" % (turn, at) for turn in (0, 2) for at in range(6))
    assert (
        sorted(message.value() for message in take(broker.bootstrap_servers, 12))
        == expected
    )
    assert (
        sorted(value for value in committed(broker.logdir) if value is not None)
        == expected
    )


def test_offsets_count_when_their_transaction_commits(broker: Kafka) -> None:
    servers = broker.bootstrap_servers
    feeder = confluent_kafka.Producer({"bootstrap.servers": servers})
    send(feeder, [b"a", b"b", b"c"], topic="in", partitions=1)
    assert feeder.flush(DEADLINE_S) == 0
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["in"])
    while consumer.poll(0.1) is None:
        pass
    producer = transactional(servers)
    partition = confluent_kafka.TopicPartition("in", 0)
    for offset, commit, expected in (
        (1, False, -1001),
        (2, True, 2),
        (3, False, 2),
        (3, True, 3),
    ):
        producer.begin_transaction()
        send(producer, [b"out"])
        position = confluent_kafka.TopicPartition("in", 0, offset)
        producer.send_offsets_to_transaction(
            [position], consumer.consumer_group_metadata(), DEADLINE_S
        )
        if commit:
            producer.commit_transaction(DEADLINE_S)
        else:
            producer.abort_transaction(DEADLINE_S)
        assert consumer.committed([partition], DEADLINE_S)[0].offset == expected
    consumer.close()
    assert committed(broker.logdir) == [b"out"] * 2


def test_second_producer_fences_the_first(broker: Kafka) -> None:
    first = transactional(broker.bootstrap_servers)
    first.begin_transaction()
    send(first, [b"lost"])
    assert first.flush(DEADLINE_S) == 0
    second = transactional(broker.bootstrap_servers)
    second.begin_transaction()
    send(second, [b"kept"])
    second.commit_transaction(DEADLINE_S)
    with pytest.raises(confluent_kafka.KafkaException) as met:
        first.commit_transaction(DEADLINE_S)
    assert met.value.args[0].fatal()
    assert committed(broker.logdir) == [b"kept"]


@pytest.mark.long
def test_transaction_of_a_silent_producer_is_aborted(broker: Kafka) -> None:
    producer = transactional(
        broker.bootstrap_servers, **{"transaction.timeout.ms": 1_000}
    )
    producer.begin_transaction()
    send(producer, [b"lost"])
    assert producer.flush(DEADLINE_S) == 0
    log = broker.logdir.partition("t", 0)
    until = time.monotonic() + DEADLINE_S
    while log.last_stable_offset < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert log.last_stable_offset == 2, "the marker is written"
    with pytest.raises(confluent_kafka.KafkaException):
        producer.commit_transaction(DEADLINE_S)
    assert committed(broker.logdir) == []
