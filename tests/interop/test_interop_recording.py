"""A recording of netshim is replayed to Apache Kafka, which gives the same responses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netshim.recording.traffic_file import TrafficFile
from netshim.replay.replayer import ResponseDifference, TrafficReplayer
from netshim.testing import Kafka

confluent_kafka = pytest.importorskip("confluent_kafka")

from confluent_kafka.admin import AdminClient, NewTopic  # noqa: E402

from support.client_jobs import consume, copy_in_transactions, produce  # noqa: E402
from support.kafka_jvm import Broker  # noqa: E402

pytestmark = pytest.mark.interop

TOPICS = ("orders", "copies")


def values(servers: str, topic: str) -> list[bytes]:
    """Return the committed values of a topic, up to its current end offsets."""
    settings = {
        "bootstrap.servers": servers,
        "group.id": f"check {topic}",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    reader = confluent_kafka.Consumer(settings)
    reader.assign(
        [confluent_kafka.TopicPartition(topic, number, 0) for number in range(2)]
    )
    consumed, ends = [], 0
    while ends < 2:
        message: Any = reader.poll(60)
        if message.error() is None:
            consumed.append(message.value())
        else:
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
            ends += 1
    reader.close()
    return sorted(consumed)


def test_kafka_gives_the_recorded_responses(
    kafka_factory: Callable[..., Kafka], tmp_path: Path
) -> None:
    recorded = kafka_factory()
    for topic in TOPICS:
        recorded.create_topic(topic, 2)
    with recorded.record(tmp_path / "t.ksh"):
        servers = recorded.bootstrap_servers
        produce(servers, "orders", 1_000, **{"enable.idempotence": True})
        # Two members would join at the same time, and Kafka may process their requests
        # in another order.
        consume(servers, "orders", 1_000, 1, **{"group.id": "classic"})
        copy_in_transactions(servers, "orders", "copies")
        last = {"group.id": "last", "isolation.level": "read_committed"}
        consume(servers, "copies", 200, 1, **last)
    differing: list[ResponseDifference] = []
    with Broker(tmp_path / "kafka") as other:
        admin = AdminClient({"bootstrap.servers": other.address})
        futures = admin.create_topics([NewTopic(topic, 2, 1) for topic in TOPICS])
        for future in futures.values():
            future.result(60)
        # Kafka creates its internal topics.
        produce(other.address, "warm", 1)
        consume(other.address, "warm", 1, 1, **{"group.id": "warm"})
        host, port = other.address.split(":")
        replayer = TrafficReplayer(
            (host, int(port)), compares=True, report=differing.append
        )
        with TrafficFile(tmp_path / "t.ksh") as file:
            report = replayer.run(file)
        # Kafka serves other APIs and features.
        assert [
            difference for difference in differing if difference.api != "ApiVersions"
        ] == []
        assert report.apis["EndTxn"].responses == 3
        for topic in TOPICS:
            assert values(other.address, topic) == values(servers, topic) != []
