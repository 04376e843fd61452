"""Answers that once differed from those of Kafka 4.1.1 to the same requests."""

from __future__ import annotations

from typing import Any

import pytest

from logcore.reader import list_offset_for_max_timestamp
from logcore.recordbatch import encode
from netshim import wire
from netshim.scheduling import PendingResponse
from netshim.wire import codes
from support.broker_harness import BrokerHarness


def batch_of(*values: bytes, **more: Any) -> bytes:
    return encode([(None, value) for value in values], now_ms=1_000, **more)


@pytest.mark.parametrize(
    ("partitions", "waits"),
    [((0,), True), ((0, 7), True), ((7, 0), True), ((7,), False), ((7, 8), False)],
)
@pytest.mark.parametrize("version", [12, 13])
def test_fetch_with_an_unknown_partition_waits_for_the_others(
    broker_harness: BrokerHarness,
    version: int,
    partitions: tuple[int, ...],
    waits: bool,
) -> None:
    """The broker waits as Kafka does. A client with stale metadata was answered at once
    and repeated its request at once, without end.
    """
    broker_harness.logdir.create_topic("t")
    request = broker_harness.fetch_request(range(0))
    request.max_wait_ms = 500
    request.min_bytes = 1
    request.topics[0].topic_id = broker_harness.logdir.topic_id("t").bytes
    request.topics[0].partitions += [
        request.Topic.Partition(partition=number, partition_max_bytes=1_000)
        for number in partitions
    ]
    reply = broker_harness.send(wire.FETCH, version, request)
    assert (isinstance(reply, PendingResponse) and not reply.is_set) == waits
    broker_harness.produce(batch_of(b"value"))
    reported = broker_harness.read(wire.FETCH, version, reply).responses[0].partitions
    unknown = codes.UNKNOWN_TOPIC_OR_PARTITION
    assert [part.error_code for part in reported] == [
        unknown if number else 0 for number in partitions
    ]
    assert [bool(part.records) for part in reported] == [
        not number for number in partitions
    ]


def test_fetch_of_an_unknown_topic_id_waits_for_the_others(
    broker_harness: BrokerHarness,
) -> None:
    broker_harness.logdir.create_topic("t")
    request = broker_harness.fetch_request(range(1))
    request.max_wait_ms = 500
    request.min_bytes = 1
    request.topics[0].topic_id = broker_harness.logdir.topic_id("t").bytes
    other = broker_harness.fetch_request(range(1)).topics[0]
    other.topic_id = b"1" * 16
    request.topics.append(other)
    reply = broker_harness.send(wire.FETCH, 13, request)
    assert not reply.is_set
    broker_harness.now_ms += 1_000
    broker_harness.broker.tick(broker_harness.now_ms)
    error_codes = [
        topic.partitions[0].error_code
        for topic in broker_harness.read(wire.FETCH, 13, reply).responses
    ]
    assert error_codes == [0, codes.UNKNOWN_TOPIC_ID]


def test_list_offsets_by_time_includes_transaction_markers(
    broker_harness: BrokerHarness,
) -> None:
    """The broker searches markers as Kafka does. Spark's strict
    `startingOffsetsByTimestamp` failed, while with Kafka it begins after the marker.
    """
    broker_harness.logdir.create_topic("t")
    log = broker_harness.logdir.partition("t", 0)
    log.append_batch(
        batch_of(
            b"v", producer_id=7, producer_epoch=0, base_sequence=0, transactional=True
        )
    )
    log.end_transaction(7, 0, commit=True, coordinator_epoch=0)
    newest = list_offset_for_max_timestamp(log)
    assert newest is not None and newest[0] == 1
    request = wire.LIST_OFFSETS.Request
    for timestamp, expected in (
        (1_000, (0, 1_000)),
        (1_001, newest),
        (newest[1] + 1, (-1, -1)),
        (-3, newest),
    ):
        part = request.Topic.Partition(partition_index=0, timestamp=timestamp)
        response = broker_harness.ask(
            wire.LIST_OFFSETS,
            7,
            request(topics=[request.Topic(name="t", partitions=[part])]),
        )
        partition = response.topics[0].partitions[0]
        assert (partition.error_code, partition.offset, partition.timestamp) == (
            0,
            *expected,
        )
    assert log.offset_for_timestamp(1_001) is None, (
        "in the Python API, a marker is not a record"
    )


@pytest.mark.parametrize("transactional_id", [None, "id"])
@pytest.mark.parametrize(("producer_id", "epoch"), [(5, -1), (-1, 3)])
def test_incomplete_producer_identity_is_refused(
    broker_harness: BrokerHarness,
    transactional_id: str | None,
    producer_id: int,
    epoch: int,
) -> None:
    asked = wire.INIT_PRODUCER_ID.Request(
        transactional_id=transactional_id,
        transaction_timeout_ms=1_000,
        producer_id=producer_id,
        producer_epoch=epoch,
    )
    response = broker_harness.ask(wire.INIT_PRODUCER_ID, 4, asked)
    assert (response.error_code, response.producer_id) == (codes.INVALID_REQUEST, -1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([("no.such", 1, None)], 0),
        ([("no.such", 1, None), ("retention.ms", 0, "5")], 0),
        ([("no.such", 0, "1")], codes.INVALID_CONFIG),
        ([("leader.replication.throttled.replicas", 2, "0:1")], 0),
        ([("leader.replication.throttled.replicas", 3, "0:1")], 0),
        ([("leader.replication.throttled.replicas", 2, "x")], codes.INVALID_CONFIG),
    ],
)
def test_incremental_config_changes_have_the_verdicts_of_kafka(
    broker_harness: BrokerHarness, changes: list[tuple[str, int, str | None]], code: int
) -> None:
    broker_harness.logdir.create_topic("t")
    request = wire.INCREMENTAL_ALTER_CONFIGS.Request
    configs = [
        request.Resource.Config(name=name, config_operation=how, value=value)
        for name, how, value in changes
    ]
    resource = request.Resource(resource_type=2, resource_name="t", configs=configs)
    asked = request(resources=[resource])
    assert (
        broker_harness.ask(wire.INCREMENTAL_ALTER_CONFIGS, 1, asked)
        .responses[0]
        .error_code
        == code
    )
    expected = {
        name: value
        for name, how, value in changes
        if value is not None and how != 3 and not code
    }
    assert (
        broker_harness.logdir.describe_topic("t").overrides.items() >= expected.items()
    )


@pytest.mark.parametrize(
    ("operation", "code"), [(1, codes.NONE), (0, codes.INVALID_REQUEST)]
)
def test_settings_of_brokers_can_be_deleted_but_not_set(
    broker_harness: BrokerHarness, operation: int, code: int
) -> None:
    """No broker has settings of its own, but kafka-reassign-partitions --verify deletes
    throttles.
    """
    request = wire.INCREMENTAL_ALTER_CONFIGS.Request
    config = request.Resource.Config(
        name="leader.replication.throttled.rate", config_operation=operation, value="1"
    )
    resource = request.Resource(resource_type=4, resource_name="1", configs=[config])
    asked = request(resources=[resource])
    response = broker_harness.ask(wire.INCREMENTAL_ALTER_CONFIGS, 1, asked)
    assert response.responses[0].error_code == code


def test_group_named_twice_gets_one_row(broker_harness: BrokerHarness) -> None:
    response = broker_harness.ask(
        wire.DELETE_GROUPS, 2, wire.DELETE_GROUPS.Request(groups_names=["g", "h", "g"])
    )
    assert [row.group_id for row in response.results] == ["g", "h"]


def test_cluster_has_only_the_settings_common_to_all_brokers(
    broker_harness: BrokerHarness,
) -> None:
    """Broker "" means the defaults of the cluster. Tools that show both listed each
    setting twice.
    """
    request = wire.DESCRIBE_CONFIGS.Request
    asked = request(
        resources=[
            request.Resource(resource_type=4, resource_name=name) for name in ("", "1")
        ]
    )
    cluster, broker = broker_harness.ask(wire.DESCRIBE_CONFIGS, 4, asked).results
    assert [
        (each.name, each.value, each.config_source) for each in cluster.configs
    ] == [("min.insync.replicas", "1", 3)]
    assert len(broker.configs) > 10


@pytest.mark.parametrize("version", range(4, 19))
def test_fetch_below_v10_gets_zstd_batches(
    broker_harness: BrokerHarness, version: int
) -> None:
    """Clients such as kafka-python 2.0 read zstd with an old Fetch. They got nothing,
    mostly without an error.

    Kafka refuses such a Fetch only if the topic's own `compression.type` is zstd.
    """
    batch = batch_of(b"value", codec="zstd")
    broker_harness.logdir.create_topic("t")
    broker_harness.logdir.create_topic("zstd", config={"compression.type": "zstd"})
    assert (
        broker_harness.produce(batch).error_code
        == broker_harness.produce(batch, topic="zstd").error_code
        == 0
    )
    ids = {
        "t": broker_harness.logdir.topic_id("t").bytes,
        "zstd": broker_harness.logdir.topic_id("zstd").bytes,
    }
    request = broker_harness.fetch_request(range(1))
    request.topics += broker_harness.fetch_request(range(1), "zstd").topics
    for topic in request.topics:
        topic.topic_id = ids[topic.topic]
    first, second = (
        topic.partitions[0]
        for topic in broker_harness.ask(wire.FETCH, version, request).responses
    )
    assert (first.error_code, bytes(first.records)[-20:]) == (0, batch[-20:])
    if version >= 10:
        assert second.error_code == 0 and second.records
    else:
        assert (
            second.error_code == codes.UNSUPPORTED_COMPRESSION_TYPE
            and not second.records
        )
