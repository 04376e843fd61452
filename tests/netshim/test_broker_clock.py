"""A broker over real files whose clock the test moves, with real clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore import InvalidConfigError
from logcore.fs import OS
from netshim import wire
from netshim.follow.connection import ClientSettings, SourceConnection
from netshim.testing import Kafka, start
from netshim.wire import codes

confluent_kafka = pytest.importorskip("confluent_kafka")

LIMIT_S = 60.0
MINUTE_MS = 60_000


@pytest.fixture
def virtual(kafka_factory: Callable[..., Kafka]) -> Kafka:
    return kafka_factory(clock="virtual")


def join(kafka: Kafka, connection: SourceConnection, group: str) -> None:
    """Join a group with a session of ten minutes, and send no heartbeat."""
    kind = wire.JOIN_GROUP.Request
    request = kind(
        group_id=group,
        session_timeout_ms=10 * MINUTE_MS,
        rebalance_timeout_ms=10 * MINUTE_MS,
        protocol_type="consumer",
        protocols=[kind.Protocol(name="range", metadata=b"")],
    )
    joined = connection.request(wire.JOIN_GROUP, request, max_version=3)
    assert joined.error_code == codes.NONE
    sync = wire.SYNC_GROUP.Request(
        group_id=group, generation_id=joined.generation_id, member_id=joined.member_id
    )
    assert connection.request(wire.SYNC_GROUP, sync, max_version=2).error_code == 0


def test_session_expires_after_ten_virtual_minutes(virtual: Kafka) -> None:
    connection = SourceConnection("127.0.0.1", virtual.port, ClientSettings())
    find = wire.FIND_COORDINATOR.Request(key_type=0, coordinator_keys=["g"])
    connection.request(wire.FIND_COORDINATOR, find)
    join(virtual, connection, "g")
    virtual.clock.advance(minutes=9)
    virtual.wait_for_group("g", state="Stable", members=1)
    virtual.clock.advance(minutes=2)
    virtual.wait_for_group("g", state="Empty", members=0)
    connection.close()


def test_open_transaction_is_aborted_at_its_timeout(virtual: Kafka) -> None:
    virtual.create_topic("t")
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": virtual.bootstrap_servers,
            "transactional.id": "tx",
            "transaction.timeout.ms": 10 * MINUTE_MS,
        }
    )
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    producer.produce("t", b"1")
    assert producer.flush(LIMIT_S) == 0
    virtual.clock.advance(minutes=9)
    log = virtual.logdir.partition("t", 0)
    assert log.last_stable_offset == 0
    virtual.clock.advance(minutes=2)
    assert log.last_stable_offset == log.high_watermark == 2
    assert virtual.records("t", isolation="read_committed") == []
    with pytest.raises(confluent_kafka.KafkaException):
        producer.commit_transaction(LIMIT_S)


def test_records_are_deleted_by_their_age(virtual: Kafka) -> None:
    virtual.create_topic("t", 1, {"retention.ms": str(60 * MINUTE_MS)})
    virtual.append("t", b"1")
    virtual.clock.advance(minutes=30)
    assert len(virtual.records("t")) == 1
    virtual.clock.advance(hours=2)
    assert virtual.records("t") == []
    virtual.append("t", b"2")
    assert [record.offset for record in virtual.records("t")] == [1]


@pytest.mark.long
def test_offsets_of_an_empty_group_expire(virtual: Kafka) -> None:
    virtual.create_topic("t")
    partition = confluent_kafka.TopicPartition("t", 0, 0)
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": virtual.bootstrap_servers, "group.id": "g"}
    )
    consumer.commit(offsets=[partition], asynchronous=False)
    virtual.clock.advance(days=6)
    assert consumer.committed([partition], LIMIT_S)[0].offset == 0
    virtual.clock.advance(days=2)
    assert consumer.committed([partition], LIMIT_S)[0].offset == -1001
    consumer.close()


def test_clients_remain_connected_over_skipped_time(virtual: Kafka) -> None:
    """The time for idle connections is ten minutes."""
    virtual.create_topic("t")
    connection = SourceConnection("127.0.0.1", virtual.port, ClientSettings())
    request = wire.METADATA.Request(topics=None)
    for _ in range(3):
        virtual.clock.advance(hours=1)
        assert connection.request(wire.METADATA, request).topics[0].name == "t"
    connection.close()


def test_timestamps_follow_the_clock(virtual: Kafka) -> None:
    virtual.append("t", b"1")
    before_ms = virtual.clock.now_ms
    virtual.clock.advance(days=1)
    virtual.append("t", b"2")
    first, second = virtual.records("t")
    assert second.timestamp_ms - first.timestamp_ms >= 86_400_000
    assert virtual.clock.now_ms >= before_ms + 86_400_000


@pytest.mark.parametrize(
    "given",
    [{}, {"minutes": -1}, {"milliseconds": 0.4}, {"days": 20_000}, {"days": math.inf},
     {"seconds": math.nan}],
)  # fmt: skip
def test_impossible_time_is_refused(virtual: Kafka, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError, match="1 ms to 10,000 days"):
        virtual.clock.advance(**given)


def test_clock_of_the_system_cannot_be_moved(kafka: Kafka) -> None:
    with pytest.raises(RuntimeError, match='clock="virtual"'):
        _ = kafka.clock


class OldClock:
    """A clock with a time of many years ago."""

    def now_ms(self) -> int:
        return 1_000_000_000_000

    def monotonic_ms(self) -> int:
        return OS.monotonic_ms()


def test_clock_object_replaces_the_clock_of_the_system(tmp_path: Path) -> None:
    """The check of the name "virtual" refused all other clocks."""
    kafka = start(tmp_path / "data", clock=OldClock())
    try:
        assert kafka.server.call(kafka.server.server.now_ms) < 1_000_001_000_000
    finally:
        kafka.stop()


def test_unknown_clock_is_refused(kafka_factory: Callable[..., Kafka]) -> None:
    with pytest.raises(logcore.InvalidConfigError, match="virtual"):
        kafka_factory(clock="real")


def test_rollback_keeps_the_clock(virtual: Kafka) -> None:
    virtual.create_topic("t", 1, {"retention.ms": str(60 * MINUTE_MS)})
    virtual.append("t", b"1")
    before = virtual.snapshot()
    virtual.clock.advance(hours=3)
    assert virtual.records("t") == []
    now_ms = virtual.clock.now_ms
    virtual.rollback(before)
    assert virtual.clock.now_ms >= now_ms
