"""Programs of Kafka use one broker that advertises several nodes."""

from __future__ import annotations

import re
import threading

import pytest

from netshim.testing import Kafka
from support import kafka_jvm

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]
_RECORDS = 100_000


def describe(kafka: Kafka) -> list[str]:
    """Return the leader, the replicas and the replicas in sync of each partition."""
    output = kafka_jvm.run_tool(
        "org.apache.kafka.tools.TopicCommand",
        *("--bootstrap-server", kafka.bootstrap_servers),
        *("--describe", "--topic", "t"),
    )
    return re.findall(r"Leader: (\d)\s+Replicas: (\S+)\s+Isr: (\S+)", output)


@pytest.mark.parametrize("release", [None, "2.8"])
def test_kafka_topics_shows_the_leaders(kafka: Kafka, release: str | None) -> None:
    kafka.create_topic("t", 3)
    kafka.as_node_count(3)
    kafka.as_version(release)
    assert describe(kafka) == [
        ("1", "1,2,3", "1,2,3"),
        ("2", "2,1,3", "2,1,3"),
        ("3", "3,1,2", "3,1,2"),
    ]
    kafka.stop_node(2)
    assert describe(kafka) == [
        ("1", "1,2,3", "1,3"),
        ("3", "3,1,2", "3,1"),
        ("3", "3,1,2", "3,1"),
    ]


def test_java_producer_follows_moving_leaders(kafka: Kafka) -> None:
    """Leaders move and nodes stop. Each record is stored once."""
    kafka.create_topic("t", 6)
    kafka.as_node_count(3)
    is_over = threading.Event()

    def move() -> None:
        step = 0
        while not is_over.wait(0.2):
            node = step % 3 + 1
            kafka.move_leader("t", step % 6, node)
            if step % 5 == 0:
                kafka.stop_node(node)
                is_over.wait(0.5)
                kafka.start_node(node)
            step += 1

    mover = threading.Thread(target=move)
    mover.start()
    try:
        kafka_jvm.run_tool(
            "org.apache.kafka.tools.ProducerPerformance",
            *("--topic", "t", "--num-records", str(_RECORDS)),
            *("--record-size", "100", "--throughput", "12000"),
            *("--producer-props", f"bootstrap.servers={kafka.bootstrap_servers}"),
            "acks=all",
        )
    finally:
        is_over.set()
        mover.join()
    assert kafka.count_offsets("t") == _RECORDS
    epochs = [kafka.logdir.partition("t", number).leader_epoch for number in range(6)]
    assert min(epochs) > 1, "expected moves of all leaders"
