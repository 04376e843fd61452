"""Clients of confluent-kafka for tests of a broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from netshim.server_thread import ServerHandle
from netshim.testing import Kafka

confluent_kafka = pytest.importorskip("confluent_kafka")

LIMIT_S = 60.0


def until(condition: Callable[[], Any], description: str) -> Any:
    end_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end_s, description
        time.sleep(0.01)
    return found


def producer(kafka: Kafka | ServerHandle, **settings: Any) -> Any:
    return confluent_kafka.Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 0, **settings}
    )


def produce(client: Any, topic: str, *values: bytes) -> None:
    errors: list[Any] = []
    for value in values:
        client.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    assert client.flush(LIMIT_S) == 0
    assert errors == [None] * len(values)


def consumer(kafka: Kafka | ServerHandle, group: str, **settings: Any) -> Any:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **settings,
        }
    )


def read(client: Any, count: int) -> list[bytes]:
    """Read and return `count` values."""
    found: list[bytes] = []
    end_s = time.monotonic() + LIMIT_S
    while len(found) < count:
        assert time.monotonic() < end_s, found
        message = client.poll(0.5)
        if message is not None and message.error() is None:
            found.append(message.value())
    return found
