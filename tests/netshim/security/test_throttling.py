"""Quotas of a running broker, with a clock that the test advances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logcore import recordbatch
from netshim import wire
from netshim.security import quotas
from netshim.security.stored import Entity
from netshim.testing import Kafka
from netshim.wire import codes
from support.broker_harness import SESSION, BrokerHarness
from support.client import Client

RECORDS = recordbatch.encode([(None, b"x" * 1_000)], base_offset=0)
ANONYMOUS: Entity = ("ANONYMOUS", None, None)


@pytest.fixture
def broker_harness(tmp_path: Path) -> Iterator[BrokerHarness]:
    harness = BrokerHarness(tmp_path / "data")
    harness.logdir.create_topic("t")
    SESSION.pause_count = 0
    yield harness
    SESSION.pause_count = 0
    harness.logdir.close()


def limit(broker_harness: BrokerHarness, key: str, bound: float) -> None:
    broker_harness.broker.state.security.quotas.set_bounds({ANONYMOUS: {key: bound}})


def produce(broker_harness: BrokerHarness) -> Any:
    return broker_harness.ask(wire.PRODUCE, 9, broker_harness.produce_request(RECORDS))


def test_producer_above_its_quota_is_delayed_and_muted(
    broker_harness: BrokerHarness,
) -> None:
    limit(broker_harness, quotas.PRODUCE, 100)
    response = produce(broker_harness)
    assert response.responses[0].partition_responses[0].error_code == 0
    delay_ms = response.throttle_time_ms
    assert 0 < delay_ms < 10_000
    assert SESSION.pause_count == 1
    broker_harness.now_ms += delay_ms - 1
    broker_harness.broker.tick(broker_harness.now_ms)
    assert SESSION.pause_count == 1
    broker_harness.now_ms += 1
    broker_harness.broker.tick(broker_harness.now_ms)
    assert SESSION.pause_count == 0


def test_pipelined_producer_is_delayed_at_the_first_excess(
    kafka_factory: Callable[..., Kafka],
) -> None:
    """The broker handles no later request while the first request waits for the disk."""
    kafka = kafka_factory(durability="group")
    kafka.create_topic("t", 1)
    bounds = {ANONYMOUS: {quotas.PRODUCE: 1.0}}
    kafka.server.call(lambda: kafka.server.server.security.quotas.set_bounds(bounds))
    client = Client(kafka.port)
    part = wire.PRODUCE.Request.Topic.Partition(index=0, records=RECORDS)
    topic = wire.PRODUCE.Request.Topic(name="t", partition_data=[part])
    request = wire.PRODUCE.Request(acks=-1, timeout_ms=1_000, topic_data=[topic])
    frame = wire.encode_request(wire.PRODUCE, 9, 1, "c", request)
    client.sock.sendall(frame * 20)
    response = client.receive(wire.PRODUCE, 9)
    assert response.throttle_time_ms > 100_000
    assert kafka.logdir.partition("t", 0).log_end_offset == 1
    client.close()


def fetch(broker_harness: BrokerHarness) -> Any:
    request = wire.FETCH.Request
    part = request.Topic.Partition(partition=0, fetch_offset=0, partition_max_bytes=1)
    topic = request.Topic(topic="t", partitions=[part])
    return broker_harness.ask(
        wire.FETCH, 12, request(topics=[topic], max_wait_ms=0, min_bytes=1)
    )


def test_fetch_above_its_quota_has_no_records(broker_harness: BrokerHarness) -> None:
    produce(broker_harness)
    limit(broker_harness, quotas.FETCH, 10)
    response = fetch(broker_harness)
    assert response.responses == [] and response.throttle_time_ms > 0
    assert SESSION.pause_count == 1


def test_fetch_within_its_quota_has_records(broker_harness: BrokerHarness) -> None:
    produce(broker_harness)
    limit(broker_harness, quotas.FETCH, 1_000_000)
    response = fetch(broker_harness)
    assert response.throttle_time_ms == 0
    assert response.responses[0].partitions[0].records


def test_fetches_that_wait_together_share_one_quota(
    broker_harness: BrokerHarness,
) -> None:
    """One append answers all waiting fetches, and each fetch alone is within the quota."""
    limit(broker_harness, quotas.FETCH, 300)
    request = wire.FETCH.Request
    part = request.Topic.Partition(partition=0, partition_max_bytes=1 << 20)
    topics = [request.Topic(topic="t", partitions=[part])]
    waiting = [
        broker_harness.send(
            wire.FETCH, 12, request(topics=topics, max_wait_ms=60_000, min_bytes=1)
        )
        for _ in range(50)
    ]
    assert produce(broker_harness).throttle_time_ms == 0
    broker_harness.broker.tick(broker_harness.now_ms)
    responses = [broker_harness.read(wire.FETCH, 12, entry) for entry in waiting]
    served = [response for response in responses if response.responses]
    # 3,000 bytes are ten seconds of the quota.
    assert len(served) == 3_000 // len(RECORDS)
    assert all(
        response.throttle_time_ms for response in responses if not response.responses
    )


def create(broker_harness: BrokerHarness, name: str, count: int, version: int) -> Any:
    request = wire.CREATE_TOPICS.Request
    topic = request.Topic(name=name, num_partitions=count, replication_factor=1)
    return broker_harness.ask(wire.CREATE_TOPICS, version, request(topics=[topic]))


def test_creation_above_the_quota_is_refused_once_overdrawn(
    broker_harness: BrokerHarness,
) -> None:
    limit(broker_harness, quotas.MUTATION, 1)
    assert create(broker_harness, "a", 30, 7).topics[0].error_code == 0
    refused = create(broker_harness, "b", 30, 7)
    assert refused.topics[0].error_code == codes.THROTTLING_QUOTA_EXCEEDED
    assert refused.throttle_time_ms == 19_000
    assert "b" not in broker_harness.logdir


def test_old_version_of_creation_is_delayed_only(broker_harness: BrokerHarness) -> None:
    limit(broker_harness, quotas.MUTATION, 1)
    response = create(broker_harness, "a", 30, 5)
    assert response.topics[0].error_code == 0
    assert response.throttle_time_ms == 19_000
    assert "a" in broker_harness.logdir and SESSION.pause_count == 1


@pytest.mark.parametrize("version", [4, 6])
def test_deletion_above_the_quota(broker_harness: BrokerHarness, version: int) -> None:
    """A bound of 1 allows 11 partitions at once, and a debt."""
    for name in ("a", "b"):
        create(broker_harness, name, 30, 7)
    limit(broker_harness, quotas.MUTATION, 1)

    def delete(name: str) -> Any:
        request = wire.DELETE_TOPICS.Request
        given = request(topic_names=[name])
        if version >= 6:
            given = request(topics=[request.Topic(name=name)])
        return broker_harness.ask(wire.DELETE_TOPICS, version, given)

    assert delete("a").responses[0].error_code == 0
    second = delete("b")
    assert second.throttle_time_ms >= 19_000
    is_refused = version >= 5
    assert ("b" in broker_harness.logdir) is is_refused
    expected = codes.THROTTLING_QUOTA_EXCEEDED if is_refused else 0
    assert second.responses[0].error_code == expected


def test_request_time_is_limited(broker_harness: BrokerHarness) -> None:
    limit(broker_harness, quotas.REQUEST, 0.000_1)
    request = wire.METADATA.Request(topics=[])
    response = broker_harness.ask(wire.METADATA, 9, request)
    assert response.throttle_time_ms == 1_000
