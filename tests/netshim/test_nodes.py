"""Several nodes that one broker advertises: leaders that move, and nodes that stop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import netshim
from logcore import InvalidConfigError, LogNotFoundError, ResourceError
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from netshim import wire
from netshim.testing import Kafka
from netshim.wire import codes
from support.client import Client
from support.confluent import LIMIT_S, consumer, produce, producer, read, until

confluent_kafka = pytest.importorskip("confluent_kafka")
admin_client = pytest.importorskip("confluent_kafka.admin")
#: The leaders of six partitions on three nodes.
LEADERS = {0: 1, 1: 2, 2: 3, 3: 1, 4: 2, 5: 3}


@pytest.fixture
def three_nodes(kafka: Kafka) -> Kafka:
    kafka.create_topic("t", 6)
    kafka.as_node_count(3)
    return kafka


def metadata(kafka: Kafka, topic: str = "t") -> Any:
    client = admin_client.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    return client.list_topics(topic, timeout=LIMIT_S)


def leaders(kafka: Kafka, topic: str = "t") -> dict[int, int]:
    return {
        number: partition.leader
        for number, partition in metadata(kafka, topic).topics[topic].partitions.items()
    }


@contextlib.contextmanager
def at_node(kafka: Kafka, node: int) -> Iterator[Client]:
    client = Client(
        int(kafka.bootstrap_servers.split(",")[node - 1].rpartition(":")[2])
    )
    try:
        yield client
    finally:
        client.close()


def test_partitions_have_leaders_on_all_nodes(three_nodes: Kafka) -> None:
    listed = metadata(three_nodes)
    assert {number: broker.port for number, broker in listed.brokers.items()} == {
        number: int(address.rpartition(":")[2])
        for number, address in enumerate(three_nodes.bootstrap_servers.split(","), 1)
    }
    assert leaders(three_nodes) == LEADERS
    assert sorted(listed.topics["t"].partitions[1].isrs) == [1, 2, 3]


@pytest.mark.long
def test_records_arrive_through_all_nodes(three_nodes: Kafka) -> None:
    """Each node serves its partitions only."""
    fetches = three_nodes.requests("Fetch")
    assert fetches == []
    client = producer(three_nodes)
    for number in range(30):
        client.produce("t", b"%d" % number, partition=number % 6)
    assert client.flush(LIMIT_S) == 0
    reader = consumer(three_nodes, "g")
    reader.subscribe(["t"])
    assert sorted(read(reader, 30)) == sorted(b"%d" % number for number in range(30))
    reader.close()
    fetched = {
        (request.node, number)
        for request in three_nodes.requests("Fetch")
        for _, number in request.partitions
    }
    assert fetched == {(node, number) for number, node in LEADERS.items()}


def test_another_node_refuses_and_stores_nothing(three_nodes: Kafka) -> None:
    with at_node(three_nodes, 2) as client:
        refused = client.produce([b"lost"])
        assert refused.error_code == codes.NOT_LEADER_OR_FOLLOWER
        client.produce([b"lost too"], acks=0)
        assert client.is_closed_by_broker(), (
            "expected the end of the connection, as in Kafka"
        )
    with at_node(three_nodes, 1) as client:
        assert client.produce([b"kept"]).error_code == codes.NONE
    assert [record.value for record in three_nodes.records("t")] == [b"kept"]


def test_a_fetch_at_another_node_is_answered_at_once(three_nodes: Kafka) -> None:
    """The fetch allows a wait of an hour."""
    with at_node(three_nodes, 2) as client:
        partition = client.fetch(max_wait_ms=3_600_000, min_bytes=1)
        assert partition.error_code == codes.NOT_LEADER_OR_FOLLOWER


def test_a_request_is_served_for_the_partitions_of_its_node(three_nodes: Kafka) -> None:
    request = wire.LIST_OFFSETS.Request(
        replica_id=-1,
        topics=[
            wire.LIST_OFFSETS.Request.Topic(
                name="t",
                partitions=[
                    wire.LIST_OFFSETS.Request.Topic.Partition(
                        partition_index=number, timestamp=-1
                    )
                    for number in (0, 1, 99)
                ],
            )
        ],
    )
    with at_node(three_nodes, 2) as client:
        response = client.ask(wire.LIST_OFFSETS, 5, request)
    assert {
        partition.partition_index: partition.error_code
        for partition in response.topics[0].partitions
    } == {
        0: codes.NOT_LEADER_OR_FOLLOWER,
        1: codes.NONE,
        99: codes.UNKNOWN_TOPIC_OR_PARTITION,
    }


def test_a_producer_follows_a_leader(three_nodes: Kafka) -> None:
    """The leader of its partition moves, and the leader epoch rises with each move."""
    client = producer(three_nodes, **{"enable.idempotence": True})
    with three_nodes.faults() as faults:
        observer = faults.observe("Produce", partition=0)
        for node in (1, 3, 2, 1):
            three_nodes.move_leader("t", 0, node)
            client.produce("t", b"at %d" % node, partition=0)
            assert client.flush(LIMIT_S) == 0
        nodes = [request.node for request in observer.requests if not request.codes]
    assert nodes == [1, 3, 2, 1]
    assert [record.value for record in three_nodes.records("t")] == [
        b"at 1",
        b"at 3",
        b"at 2",
        b"at 1",
    ]
    assert three_nodes.logdir.partition("t", 0).leader_epoch == 3


@pytest.mark.long
def test_a_consumer_follows_a_node_that_stops(three_nodes: Kafka) -> None:
    """The coordinator and the leaders of the consumer stop. No record is lost or read
    twice.
    """
    reader = consumer(three_nodes, "g")
    reader.subscribe(["t"])
    client = producer(three_nodes)
    expected = []
    for node in (1, 2):
        for number in range(6):
            client.produce("t", b"%d-%d" % (node, number), partition=number)
            expected.append(b"%d-%d" % (node, number))
        assert client.flush(LIMIT_S) == 0
        assert sorted(read(reader, 6)) == sorted(expected[-6:])
        reader.commit(asynchronous=False)
        three_nodes.stop_node(node)
        assert len(three_nodes.bootstrap_servers.split(",")) == 2
        assert set(leaders(three_nodes).values()) <= {1, 2, 3} - {node}
        for number in range(6):
            client.produce("t", b"after %d-%d" % (node, number), partition=number)
        assert client.flush(LIMIT_S) == 0
        assert sorted(read(reader, 6)) == [
            b"after %d-%d" % (node, number) for number in range(6)
        ]
        until(lambda: not committed(reader), "a commit at the new coordinator")
        three_nodes.start_node(node)
        assert leaders(three_nodes) == LEADERS
    reader.close()


def committed(reader: Any) -> Exception | None:
    try:
        reader.commit(asynchronous=False)
    except confluent_kafka.KafkaException as error:
        return error  # the coordinator is found again
    return None


def test_coordinators_are_the_leaders_of_internal_partitions(
    three_nodes: Kafka,
) -> None:
    request = wire.FIND_COORDINATOR.Request(key="g", key_type=0)
    with at_node(three_nodes, 1) as client:
        assert client.ask(wire.FIND_COORDINATOR, 1, request).node_id == 1
        three_nodes.logdir.create_topic(OFFSETS_TOPIC, 1, exist_ok=True)
        three_nodes.move_leader(OFFSETS_TOPIC, 0, 3)
        coordinator = client.ask(wire.FIND_COORDINATOR, 1, request)
        assert coordinator.node_id == 3
        assert coordinator.port == int(three_nodes.bootstrap_servers.rpartition(":")[2])
        heartbeat = wire.HEARTBEAT.Request(group_id="g", member_id="m")
        refused = client.ask(wire.HEARTBEAT, 3, heartbeat)
        assert refused.error_code == codes.NOT_COORDINATOR
    with at_node(three_nodes, 3) as client:
        response = client.ask(wire.HEARTBEAT, 3, heartbeat)
        assert response.error_code == codes.UNKNOWN_MEMBER_ID


@pytest.mark.long
def test_a_transaction_ends_at_its_new_coordinator(three_nodes: Kafka) -> None:
    client = producer(three_nodes, **{"transactional.id": "x"})
    client.init_transactions(LIMIT_S)
    client.begin_transaction()
    client.produce("t", b"a", partition=1)
    client.flush(LIMIT_S)
    three_nodes.move_leader(TRANSACTIONS_TOPIC, 0, 2)
    client.produce("t", b"b", partition=2)
    client.commit_transaction(LIMIT_S)
    assert sorted(str(record.value) for record in three_nodes.records("t")) == [
        "b'a'",
        "b'b'",
    ]


def test_groups_are_listed_once(three_nodes: Kafka) -> None:
    reader = consumer(three_nodes, "g")
    reader.subscribe(["t"])
    until(lambda: reader.assignment() or reader.poll(0.1), "an assignment")
    admin = admin_client.AdminClient(
        {"bootstrap.servers": three_nodes.bootstrap_servers}
    )
    listed = admin.list_consumer_groups(request_timeout=LIMIT_S).result().valid
    assert [entry.group_id for entry in listed] == ["g"]
    reader.close()


def test_rules_can_select_a_node(three_nodes: Kafka) -> None:
    with three_nodes.faults() as faults:
        rule = faults.answer("Metadata", "LEADER_NOT_AVAILABLE", node=3, topic="t")
        request = wire.METADATA.Request(topics=[wire.METADATA.Request.Topic(name="t")])
        error_codes = []
        for node in (1, 2, 3):
            with at_node(three_nodes, node) as client:
                response = client.ask(wire.METADATA, 9, request)
                error_codes.append(response.topics[0].error_code)
        assert error_codes == [codes.NONE, codes.NONE, codes.LEADER_NOT_AVAILABLE]
        assert {request.node for request in rule.requests} == {3}


def test_single_running_node_leads_all_partitions(three_nodes: Kafka) -> None:
    three_nodes.stop_node(1)
    three_nodes.as_node_count(1)
    assert three_nodes.bootstrap_servers == f"127.0.0.1:{three_nodes.port}"
    assert set(leaders(three_nodes).values()) == {1}
    produce(producer(three_nodes), "t", b"a")


def test_rollback_resets_nodes_and_the_release(kafka: Kafka) -> None:
    kafka.create_topic("t", 3)
    before = kafka.snapshot()
    kafka.as_node_count(3)
    kafka.as_version("2.8")
    kafka.move_leader("t", 0, 3)
    kafka.rollback(before)
    assert leaders(kafka) == {0: 1, 1: 1, 2: 1}
    assert kafka.server.server.release is None


def test_a_refused_rollback_changes_nothing(
    three_nodes: Kafka, kafka_factory: Callable[..., Kafka]
) -> None:
    other = kafka_factory()
    with pytest.raises(LogNotFoundError, match="not a snapshot of this broker"):
        three_nodes.rollback(other.snapshot())
    before = three_nodes.snapshot()
    three_nodes.as_version("2.8")
    server = three_nodes.server.server

    async def refused(_: Any) -> None:
        server.is_replacing = True
        try:
            await server.rollback(before)
        finally:
            server.is_replacing = False

    with pytest.raises(ResourceError, match="no snapshot is made or restored now"):
        three_nodes.server.run(refused)
    assert server.release is not None
    assert leaders(three_nodes) == LEADERS


def test_node_whose_port_is_in_use_can_start_later(three_nodes: Kafka) -> None:
    """Listeners that were opened before the failure are closed again."""
    port = int(three_nodes.bootstrap_servers.split(",")[1].rpartition(":")[2])
    three_nodes.stop_node(2)
    node = three_nodes.server.server.nodes.node(2)  # type: ignore[union-attr]
    (listener,) = node.listeners
    free = attrs.evolve(listener, host="127.0.0.2", port=0)
    node.listeners = [free, listener]
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(OSError, match="in use"):
            three_nodes.start_node(2)
        assert len(three_nodes.server.server._listening) == 2
    node.listeners = [listener]
    three_nodes.start_node(2)
    assert leaders(three_nodes) == LEADERS


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda kafka: kafka.as_node_count(0), "1 to 100"),
        (lambda kafka: kafka.as_node_count(101), "1 to 100"),
        (lambda kafka: kafka.as_node_count(True), "1 to 100"),
        (lambda kafka: kafka.move_leader("t", 0, 9), r"one of \[1, 2, 3\]"),
        (lambda kafka: kafka.move_leader("t", 6, 1), r"one of \[0, 1, 2, 3, 4, 5\]"),
        (lambda kafka: kafka.move_leader("none", 0, 1), r"one of \[\]"),
        (lambda kafka: kafka.stop_node(-1), r"one of \[1, 2, 3\]"),
        (lambda kafka: kafka.start_node(4), r"one of \[1, 2, 3\]"),
    ],
)
def test_mistakes_are_refused(three_nodes: Kafka, call: Any, text: str) -> None:
    with pytest.raises(InvalidConfigError, match=text):
        call(three_nodes)
    assert leaders(three_nodes) == LEADERS


def test_the_last_node_cannot_stop(three_nodes: Kafka) -> None:
    three_nodes.stop_node(1)
    three_nodes.stop_node(2)
    with pytest.raises(InvalidConfigError, match="last node"):
        three_nodes.stop_node(3)
    with pytest.raises(InvalidConfigError, match=r"one of \[3\]"):
        three_nodes.move_leader("t", 0, 2)


def test_a_broker_with_one_node_has_none_to_stop(kafka: Kafka) -> None:
    for call in (kafka.stop_node, kafka.start_node):
        with pytest.raises(InvalidConfigError, match="as_node_count"):
            call(0)


def test_a_shared_directory_has_one_node(tmp_path: Path) -> None:
    with (
        netshim.serve(tmp_path, shared=True) as server,
        pytest.raises(InvalidConfigError, match="a broker alone"),
    ):
        Kafka(server).as_node_count(2)
