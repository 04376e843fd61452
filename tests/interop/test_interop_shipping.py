"""Forwarders and mirrors against Apache Kafka, killed at random: each record once, in
order, with the same offsets.

Kafka and a consumer of confluent-kafka read the results.
Needs Java and Maven. Run by `make interop`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.errors import (
    DivergedError,
    RecordRefusedError,
    RemoteTopicError,
    ShippingGapError,
)
from logcore.kernels import Record
from logcore.shipping import Forwarder, KafkaCluster, Mirror
from support.kafka_jvm import Broker
from support.shippers import (
    PARTITIONS,
    TOPIC,
    check_repeats,
    contents,
    fill,
    kill_often,
)

confluent_kafka = pytest.importorskip("confluent_kafka")
from confluent_kafka.admin import AdminClient, NewTopic  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]
KILLS = 8


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def admin(broker: Broker) -> Iterator[Any]:
    """Return an admin client; delete the topic after the test."""
    client = AdminClient({"bootstrap.servers": broker.address})
    yield client
    if TOPIC in client.list_topics(timeout=30).topics:
        client.delete_topics([TOPIC])[TOPIC].result(30)


def create_topic(admin: Any, config: dict[str, str] | None = None) -> None:
    # Without retention, because the timestamps of the records are old.
    config = {"retention.ms": "-1", **(config or {})}
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, config=config)])[TOPIC].result(30)


def read(broker: Broker, number: int) -> list[tuple[Record, int]]:
    """Return the committed records of a partition, and their leader epochs."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": "check",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign(
        [
            confluent_kafka.TopicPartition(
                TOPIC, number, confluent_kafka.OFFSET_BEGINNING
            )
        ]
    )
    records_and_epochs = []
    while True:
        message = consumer.poll(30)
        assert message is not None, "the consumer received nothing for 30 s"
        if message.error() is not None:
            assert message.error().name() == "_PARTITION_EOF", message.error()
            break
        headers = tuple(message.headers() or ())
        record = Record(
            message.offset(),
            message.timestamp()[1],
            message.key(),
            message.value(),
            headers,
        )
        records_and_epochs.append((record, message.leader_epoch()))
    consumer.close()
    return records_and_epochs


@pytest.mark.parametrize("guarantee", ["exactly-once", "at-least-once"])
def test_killed_forwarder_loses_no_record(
    tmp_path: Path, broker: Broker, admin: Any, guarantee: str
) -> None:
    create_topic(admin)
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic(TOPIC, PARTITIONS)
        logs = [data.partition(TOPIC, number) for number in range(PARTITIONS)]

        def add(round_number: int) -> None:
            for log in logs:
                fill(log, 1_400)

        kill_often(
            guarantee, tmp_path / "data", broker.address, KILLS, seed=1, before_each=add
        )
        for number, log in enumerate(logs):
            source_records = list(log.read(0))
            forwarded = [record for record, _ in read(broker, number)]
            if guarantee == "exactly-once":
                assert contents(forwarded) == contents(source_records)
            else:
                assert check_repeats(forwarded, source_records) <= 40 * KILLS


@pytest.mark.parametrize("kind", ["keep", "new"])
def test_killed_mirror_loses_and_repeats_no_record(
    tmp_path: Path, broker: Broker, admin: Any, kind: str
) -> None:
    """The mirrored partitions contain committed and aborted transactions. Each marker
    takes an offset, so the offsets of the records have gaps.
    """
    create_topic(admin)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.address, "transactional.id": f"source-{kind}"}
    )
    producer.init_transactions(60)

    def add(round_number: int) -> None:
        for commit in (True, False, True):
            producer.begin_transaction()
            for index in range(2_000):
                headers = [("round", str(round_number).encode()), ("none", None)]
                time_ms = 1_700_000_000_000 + index
                producer.produce(
                    TOPIC,
                    b"%d-%d" % (round_number, index),
                    b"k",
                    index % PARTITIONS,
                    timestamp=time_ms,
                    headers=headers,
                )
            if commit:
                producer.commit_transaction(60)
            else:
                producer.flush(60)
                producer.abort_transaction(60)

    with logcore.open_dir(tmp_path / "copy", create=True):
        pass
    kill_often(kind, tmp_path / "copy", broker.address, KILLS, seed=2, before_each=add)
    with logcore.open_dir(tmp_path / "copy", read_only=True) as copy:
        for number in range(PARTITIONS):
            source_records = read(broker, number)
            assert len(source_records) == (KILLS + 1) * 2_000
            log = copy.partition(TOPIC, number)
            mirrored = list(log.read(0, isolation="read_committed"))
            if kind == "keep":
                assert mirrored == [record for record, _ in source_records]
                assert {batch.partition_leader_epoch for batch in log.batches(0)} == {
                    epoch for _, epoch in source_records
                }
            else:
                assert contents(mirrored) == contents(
                    [record for record, _ in source_records]
                )


def test_records_that_kafka_refuses_are_reported_or_quarantined(
    tmp_path: Path, broker: Broker, admin: Any
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True, durability="os") as data:
        data.create_topic(TOPIC, PARTITIONS)
        for size in (10, 5_000, 20):
            data.append(TOPIC, b"x" * size, partition=0)
        options: dict[str, Any] = {"topics": [TOPIC]}
        with KafkaCluster(broker.address) as cluster:
            with (
                Forwarder(data, cluster, **options) as forwarder,
                pytest.raises(
                    RemoteTopicError,
                    match="kafka-topics --create --topic orders --partitions 2",
                ),
            ):
                forwarder.run()
            create_topic(admin, {"max.message.bytes": "1000"})
            with (
                Forwarder(data, cluster, **options) as forwarder,
                pytest.raises(
                    RecordRefusedError, match=r"offset 1: .*MSG_SIZE_TOO_LARGE"
                ),
            ):
                forwarder.run(until_end=True)
            with Forwarder(
                data, cluster, on_error="quarantine", **options
            ) as forwarder:
                forwarder.run(until_end=True)
        assert [len(record.value or b"") for record, _ in read(broker, 0)] == [10, 20]
        assert [len(record.value or b"") for record in data.read(f"{TOPIC}.dlq")] == [
            5_000
        ]


def test_topic_that_kafka_recreated_is_detected(
    tmp_path: Path, broker: Broker, admin: Any
) -> None:
    create_topic(admin)
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.address})

    def produce(count: int) -> None:
        for number in range(count):
            producer.produce(TOPIC, b"%d" % number, partition=0)
        assert producer.flush(60) == 0

    def delete_below(offset: int) -> None:
        topic_partition = confluent_kafka.TopicPartition(TOPIC, 0, offset)
        next(iter(admin.delete_records([topic_partition]).values())).result(30)

    produce(10)
    delete_below(4)
    with (
        logcore.open_dir(tmp_path / "copy", create=True) as copy,
        KafkaCluster(broker.address) as cluster,
    ):
        for first, last, on_gap in ((4, 10, "fail"), (15, 20, "skip")):
            with Mirror(copy, cluster, topics=[TOPIC], on_gap=on_gap) as mirror:  # type: ignore[arg-type]
                mirror.run(until_end=True)
            offsets = [
                record.offset for record in copy.read(TOPIC) if record.offset >= first
            ]
            assert offsets == list(range(first, last))
            produce(10)
            delete_below(15)
            if on_gap == "fail":
                with (
                    Mirror(copy, cluster, topics=[TOPIC]) as mirror,
                    pytest.raises(ShippingGapError, match="deleted offsets 10 to 14"),
                ):
                    mirror.run(until_end=True)
        admin.delete_topics([TOPIC])[TOPIC].result(30)
        create_topic(admin)
        with (
            Mirror(copy, cluster, topics=[TOPIC], on_divergence="truncate") as mirror,
            pytest.raises(DivergedError, match="was deleted and created again"),
        ):
            mirror.run(until_end=True)
