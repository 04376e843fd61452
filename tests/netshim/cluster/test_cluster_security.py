"""Three brokers with TLS, users, access control lists and quotas, and their attackers."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logcore import recordbatch
from logcore.errors import RemoteUnavailableError
from netshim import wire
from netshim.follow.connection import ClientSettings, LoginError
from netshim.security import scram
from netshim.security.acls import AclOperation, Pattern, Permission, ResourceType
from netshim.session import BROKER_USER
from netshim.wire import codes
from support.cluster_load import Load, check_load
from support.clusters import until
from support.secured_clusters import ADMIN, ALICE, SecuredCluster, netshim, password_of

confluent_kafka = pytest.importorskip("confluent_kafka")

NUMBERS = (1, 2, 3)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with SecuredCluster(tmp_path_factory.mktemp("secured") / "cluster") as cluster:
        cluster.add_users(ADMIN, ALICE)
        yield cluster


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SecuredCluster]:
    """Return a cluster whose brokers a test may stop."""
    with SecuredCluster(tmp_path / "cluster") as cluster:
        cluster.add_users(ADMIN, ALICE)
        yield cluster


def rule(topic: str, operation: AclOperation, **fields: Any) -> dict[str, Any]:
    return {
        "resource_type": ResourceType.TOPIC,
        "resource_name": topic,
        "resource_pattern_type": Pattern.LITERAL,
        "principal": f"User:{ALICE}",
        "host": "*",
        "operation": operation,
        "permission_type": Permission.ALLOW,
        **fields,
    }


def allow(
    cluster: SecuredCluster, number: int, topic: str, *operations: AclOperation
) -> None:
    """Let a broker store rules for alice."""
    kind = wire.CREATE_ACLS.Request.Creation
    request = wire.CREATE_ACLS.Request(
        creations=[kind(**rule(topic, operation)) for operation in operations]
    )
    results = cluster.ask(number, wire.CREATE_ACLS, request).results
    assert [result.error_code for result in results] == [codes.NONE] * len(operations)


def forbid(cluster: SecuredCluster, number: int, topic: str) -> None:
    """Let a broker remove all rules of a topic."""
    kind = wire.DELETE_ACLS.Request.Filter
    entry = kind(
        resource_type_filter=ResourceType.TOPIC,
        resource_name_filter=topic,
        pattern_type_filter=Pattern.LITERAL,
        principal_filter=None,
        host_filter=None,
        operation=AclOperation.ANY,
        permission_type=Permission.ANY,
    )
    request = wire.DELETE_ACLS.Request(filters=[entry])
    (result,) = cluster.ask(number, wire.DELETE_ACLS, request).filter_results
    assert result.error_code == codes.NONE and result.matching_acls


def rules_at(cluster: SecuredCluster, number: int, topic: str) -> int:
    """Return how many rules of a topic a broker has."""
    request = wire.DESCRIBE_ACLS.Request(
        resource_type_filter=ResourceType.TOPIC,
        resource_name_filter=topic,
        pattern_type_filter=Pattern.LITERAL,
        principal_filter=None,
        host_filter=None,
        operation=AclOperation.ANY,
        permission_type=Permission.ANY,
    )
    described = cluster.ask(number, wire.DESCRIBE_ACLS, request)
    assert described.error_code == codes.NONE
    return sum(len(resource.acls) for resource in described.resources)


def until_known(cluster: SecuredCluster, topic: str, count: int) -> None:
    for number in NUMBERS:
        until(
            lambda number=number: rules_at(cluster, number, topic) == count,
            f"broker {number} knows the rules",
        )


def new_topic(cluster: SecuredCluster, name: str) -> tuple[int, bytes]:
    """Create a topic, and return its leader and its id."""
    cluster.create(name)
    leader = cluster.until_in_sync(name, 3).leader_id
    return leader, bytes(cluster.metadata(name, leader).topic_id)


def produce(cluster: SecuredCluster, leader: int, topic: str, topic_id: bytes) -> None:
    kind = wire.PRODUCE.Request.Topic
    part = kind.Partition(index=0, records=recordbatch.encode([(None, b"v")], now_ms=1))
    request = wire.PRODUCE.Request(
        acks=-1,
        timeout_ms=30_000,
        topic_data=[kind(name=topic, topic_id=topic_id, partition_data=[part])],
    )
    (topic_result,) = cluster.ask(leader, wire.PRODUCE, request).responses
    assert topic_result.partition_responses[0].error_code == codes.NONE


def fetch_request(
    topic_id: bytes, offset: int = 0, leader_epoch: int = -1, **fields: Any
) -> Any:
    kind = wire.FETCH.Request.Topic
    part = kind.Partition(
        partition=0,
        current_leader_epoch=leader_epoch,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=0,
        partition_max_bytes=100_000,
    )
    return wire.FETCH.Request(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1 << 20,
        topics=[kind(topic_id=topic_id, partitions=[part])],
        **fields,
    )


def as_follower(topic_id: bytes, replica: int, epoch: int, offset: int = 0) -> Any:
    state = wire.FETCH.Request.ReplicaState(replica_id=replica, replica_epoch=epoch)
    return fetch_request(topic_id, offset, 0, replica_state=state)


def code_of(response: Any) -> int:
    code: int = response.responses[0].partitions[0].error_code
    return code


@pytest.mark.long
def test_transactions_of_a_user_span_brokers(secured: SecuredCluster) -> None:
    """Brokers send each other markers and requests about transactions, on authenticated
    connections.
    """
    secured.create("paid", 3)
    leaders = {secured.until_in_sync("paid", 3, n).leader_id for n in range(3)}
    assert len(leaders) == 3
    call = AclOperation
    topic, own_id = ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID
    secured.allow(ALICE, own_id, "t", call.WRITE, call.DESCRIBE)
    secured.allow(ALICE, topic, "paid", call.READ, call.WRITE, call.DESCRIBE)
    until_known(secured, "paid", 3)
    config = {
        "bootstrap.servers": secured.bootstrap_servers,
        **secured.config_of(ALICE),
    }
    producer = confluent_kafka.Producer({**config, "transactional.id": "t"})
    producer.init_transactions(60)
    for value, commits in ((b"1", True), (b"2", False), (b"3", True)):
        producer.begin_transaction()
        for number in range(3):
            producer.produce("paid", value, partition=number)
        producer.flush(60)
        if commits:
            producer.commit_transaction(60)
        else:
            producer.abort_transaction(60)
    consumer = confluent_kafka.Consumer(
        {**config, "group.id": "check", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition("paid", n, 0) for n in range(3)])
    consumed: list[tuple[int, bytes]] = []
    while len(consumed) < 6:
        message = consumer.poll(60)
        assert message is not None, "no record within a minute"
        if message.error() is None:
            consumed.append((message.partition(), message.value()))
    consumer.close()
    assert sorted(consumed) == [(n, value) for n in range(3) for value in (b"1", b"3")]


# -- attackers -------------------------------------------------------------------------


def test_follower_without_a_login_is_disconnected(secured: SecuredCluster) -> None:
    """A follower's request without a login is closed without an answer."""
    _, topic_id = new_topic(secured, "strange")
    context = ssl.create_default_context(cafile=str(secured.ca_file))
    for request, api, version in (
        (as_follower(topic_id, 2, 1), wire.FETCH, 17),
        (markers("strange"), wire.WRITE_TXN_MARKERS, 1),
    ):
        raw = socket.create_connection(("127.0.0.1", secured.ports[1]), timeout=60)
        with context.wrap_socket(raw, server_hostname="localhost") as sock:
            sock.sendall(wire.encode_request(api, version, 1, "me", request))
            assert sock.recv(1) == b""


@pytest.mark.long
@pytest.mark.parametrize("user", [ALICE, BROKER_USER])
def test_a_wrong_password_reaches_no_broker(secured: SecuredCluster, user: str) -> None:
    for number in NUMBERS:
        with pytest.raises(LoginError):
            secured.connect(number, secured.settings_of(user, "wrong"))


def test_a_client_cannot_fetch_as_a_follower(secured: SecuredCluster) -> None:
    """This includes a user with all rights on the topic, whose fetches could confirm
    records for a replica.
    """
    leader, topic_id = new_topic(secured, "followed")
    allow(secured, leader, "followed", AclOperation.ALL)
    alice = secured.settings_of(ALICE)
    other = next(number for number in NUMBERS if number != leader)
    consumed = secured.ask(leader, wire.FETCH, fetch_request(topic_id), alice)
    assert code_of(consumed) == codes.NONE
    for request, version in (
        (as_follower(topic_id, other, 1), 17),
        (as_follower(topic_id, other, 1, 1_000), 17),
        (fetch_request(topic_id, replica_id=other), 13),
    ):
        response = secured.ask(leader, wire.FETCH, request, alice, max_version=version)
        assert code_of(response) == codes.TOPIC_AUTHORIZATION_FAILED
        assert not response.responses[0].partitions[0].records
    assert secured.until_in_sync("followed", 3).leader_id == leader


def markers(topic: str) -> Any:
    kind = wire.WRITE_TXN_MARKERS.Request.Marker
    entry = kind(
        producer_id=7,
        producer_epoch=0,
        transaction_result=True,
        topics=[kind.Topic(name=topic, partition_indexes=[0])],
        coordinator_epoch=0,
    )
    return wire.WRITE_TXN_MARKERS.Request(markers=[entry])


def test_a_client_cannot_write_markers(secured: SecuredCluster) -> None:
    leader, _ = new_topic(secured, "marked")
    allow(secured, leader, "marked", AclOperation.ALL)
    alice = secured.settings_of(ALICE)
    response = secured.ask(leader, wire.WRITE_TXN_MARKERS, markers("marked"), alice)
    (part,) = response.markers[0].topics[0].partitions
    assert part.error_code == codes.CLUSTER_AUTHORIZATION_FAILED
    asked = wire.LIST_OFFSETS.Request.Topic(
        name="marked",
        partitions=[
            wire.LIST_OFFSETS.Request.Topic.Partition(partition_index=0, timestamp=-1)
        ],
    )
    ends = secured.ask(
        leader, wire.LIST_OFFSETS, wire.LIST_OFFSETS.Request(topics=[asked])
    )
    assert ends.topics[0].partitions[0].offset == 0


def test_a_client_cannot_add_partitions_for_other_brokers(
    secured: SecuredCluster,
) -> None:
    kind = wire.ADD_PARTITIONS_TO_TXN.Request.Transaction
    topic = kind.Topic(name="added", partitions=[0])
    entry = kind(
        transactional_id="x",
        producer_id=1,
        producer_epoch=0,
        verify_only=True,
        topics=[topic],
    )
    request = wire.ADD_PARTITIONS_TO_TXN.Request(transactions=[entry])
    response = secured.ask(
        1, wire.ADD_PARTITIONS_TO_TXN, request, secured.settings_of(ALICE)
    )
    assert response.error_code == codes.CLUSTER_AUTHORIZATION_FAILED


def test_an_old_broker_epoch_is_refused(secured: SecuredCluster) -> None:
    """A recorded fetch of a former registration must confirm no record."""
    leader, topic_id = new_topic(secured, "replayed")
    other = next(number for number in NUMBERS if number != leader)
    broker = secured.broker_settings()
    for replica, epoch, expected in (
        (other, 1, codes.NONE),
        (other, 0, codes.NOT_LEADER_OR_FOLLOWER),
        (other, 2, codes.NOT_LEADER_OR_FOLLOWER),
        (99, 1, codes.UNKNOWN_LEADER_EPOCH),
    ):
        request = as_follower(topic_id, replica, epoch)
        response = secured.ask(leader, wire.FETCH, request, broker, max_version=17)
        assert code_of(response) == expected, (replica, epoch)


@pytest.mark.long
def test_no_user_can_take_the_name_of_the_brokers(secured: SecuredCluster) -> None:
    kind = wire.ALTER_USER_SCRAM_CREDENTIALS.Request
    salted = scram.salted_password("SCRAM-SHA-512", "mine", b"s" * 16, 4_096)
    for request in (
        kind(
            upsertions=[
                kind.Upsertion(
                    name=BROKER_USER,
                    mechanism=2,
                    iterations=4_096,
                    salt=b"s" * 16,
                    salted_password=salted,
                )
            ]
        ),
        kind(deletions=[kind.Deletion(name=BROKER_USER, mechanism=2)]),
    ):
        (result,) = secured.ask(1, wire.ALTER_USER_SCRAM_CREDENTIALS, request).results
        assert result.error_code == codes.UNACCEPTABLE_CREDENTIAL
    netshim("user", "add", secured.path, BROKER_USER, expected=2)
    assert secured.ask(
        1, wire.METADATA, wire.METADATA.Request(), secured.broker_settings()
    ).brokers


# -- changes reach all brokers ---------------------------------------------------------


@pytest.mark.long
def test_rules_of_one_broker_are_enforced_by_all(secured: SecuredCluster) -> None:
    secured.create("ruled")
    alice = secured.settings_of(ALICE)

    def code(number: int) -> int:
        request = wire.METADATA.Request(
            topics=[wire.METADATA.Request.Topic(name="ruled")],
            allow_auto_topic_creation=False,
        )
        (topic,) = secured.ask(number, wire.METADATA, request, alice).topics
        error_code: int = topic.error_code
        return error_code

    assert [code(number) for number in NUMBERS] == [29, 29, 29]
    allow(secured, 2, "ruled", AclOperation.DESCRIBE)
    assert code(2) == codes.NONE  # at once, at the broker that stored it
    for number in NUMBERS:
        until(lambda number=number: code(number) == codes.NONE, "the rule is known")
    forbid(secured, 3, "ruled")
    assert code(3) == codes.TOPIC_AUTHORIZATION_FAILED
    for number in NUMBERS:
        until(lambda number=number: code(number) == 29, "the rule is removed")


def test_users_of_one_broker_log_in_at_every_broker(secured: SecuredCluster) -> None:
    kind = wire.ALTER_USER_SCRAM_CREDENTIALS.Request
    salted = scram.salted_password("SCRAM-SHA-512", password_of("bob"), b"s" * 16, 4096)
    added = kind.Upsertion(
        name="bob",
        mechanism=2,
        iterations=4_096,
        salt=b"s" * 16,
        salted_password=salted,
    )
    request = kind(upsertions=[added])
    (result,) = secured.ask(1, wire.ALTER_USER_SCRAM_CREDENTIALS, request).results
    assert result.error_code == codes.NONE
    assert secured.logs_in(1, "bob")
    for number in NUMBERS:
        until(lambda number=number: secured.logs_in(number, "bob"), "bob logs in")
    request = kind(deletions=[kind.Deletion(name="bob", mechanism=2)])
    (result,) = secured.ask(2, wire.ALTER_USER_SCRAM_CREDENTIALS, request).results
    assert result.error_code == codes.NONE
    assert not secured.logs_in(2, "bob")
    for number in NUMBERS:
        until(lambda number=number: not secured.logs_in(number, "bob"), "no login")


@pytest.mark.long
def test_quotas_of_one_broker_are_those_of_all(secured: SecuredCluster) -> None:
    netshim("quota", "set", secured.path, "--user", ALICE, "producer_byte_rate=1000000")
    request = wire.DESCRIBE_CLIENT_QUOTAS.Request(components=[], strict=False)
    for number in NUMBERS:

        def found(number: int = number) -> Any:
            return secured.ask(number, wire.DESCRIBE_CLIENT_QUOTAS, request).entries

        (entry,) = until(found, f"broker {number} knows the quota")
        assert [(value.key, value.value) for value in entry.values] == [
            ("producer_byte_rate", 1e6)
        ]


@pytest.mark.long
def test_a_fetch_session_ends_to_serve_a_topic_without_a_rule(
    secured: SecuredCluster,
) -> None:
    leader, topic_id = new_topic(secured, "session")
    produce(secured, leader, "session", topic_id)
    allow(secured, leader, "session", AclOperation.READ)
    connection = secured.connect(leader, secured.settings_of(ALICE))
    try:
        begun = connection.request(
            wire.FETCH, fetch_request(topic_id, session_id=0, session_epoch=0)
        )
        assert begun.session_id and begun.responses[0].partitions[0].records
        # Changed at another broker, while the session is open here.
        other = next(number for number in NUMBERS if number != leader)
        until_known(secured, "session", 1)
        forbid(secured, other, "session")
        until_known(secured, "session", 0)
        produce(secured, leader, "session", topic_id)
        later = wire.FETCH.Request(
            max_wait_ms=0, session_id=begun.session_id, session_epoch=1, topics=[]
        )
        response = connection.request(wire.FETCH, later)
        assert code_of(response) == codes.TOPIC_AUTHORIZATION_FAILED
        assert not response.responses[0].partitions[0].records
    finally:
        connection.close()


def test_damaged_rules_deny_everything_of_their_topic(secured: SecuredCluster) -> None:
    secured.create("damaged")
    allow(secured, 1, "damaged", AclOperation.DESCRIBE)
    until_known(secured, "damaged", 1)
    (file,) = (secured.path / "cluster.registry").rglob("Topic/damaged.node")
    whole = file.read_bytes()
    file.write_bytes(whole[:60] + bytes(len(whole) - 60))
    # A change of another topic is in effect nevertheless.
    allow(secured, 2, "whole", AclOperation.READ)
    until_known(secured, "whole", 1)
    alice = secured.settings_of(ALICE)
    request = wire.METADATA.Request(
        topics=[wire.METADATA.Request.Topic(name="damaged")],
        allow_auto_topic_creation=False,
    )
    for number in NUMBERS:
        until(
            lambda number=number: (
                secured.ask(number, wire.METADATA, request, alice).topics[0].error_code
                == codes.TOPIC_AUTHORIZATION_FAILED
            ),
            f"broker {number} denies it",
        )
        assert "/kafka-acl/Topic/damaged" in secured.log(number)
    file.write_bytes(whole)
    allow(secured, 3, "whole", AclOperation.WRITE)
    until_known(secured, "damaged", 1)


def test_settings_of_clients_name_no_password(secured: SecuredCluster) -> None:
    broker = secured.broker_settings()
    assert isinstance(broker, ClientSettings)
    assert broker.password not in repr(broker)
    for number in NUMBERS:
        assert broker.password not in secured.log(number)


def test_records_survive_a_killed_leader(secured: SecuredCluster) -> None:
    secured.create("t")
    load = Load(secured, "t")
    load.until_more()
    leader = secured.until_in_sync("t", 3).leader_id
    secured.kill(leader)
    load.until_more()
    check_load(secured, "t", load)
    secured.start(leader)
    secured.until_in_sync("t", 3)


@pytest.mark.slow
def test_a_user_is_deleted_while_a_broker_is_stopped(own: SecuredCluster) -> None:
    own.send(3, signal.SIGSTOP)
    netshim("user", "remove", own.path, ALICE)
    own.send(3, signal.SIGCONT)
    alice = own.settings_of(ALICE)

    def is_refused() -> bool:
        try:
            own.connect(3, alice).close()
        except LoginError:
            return True
        except RemoteUnavailableError:
            pass
        return False

    until(is_refused, "the broker knows that the user is deleted")


@pytest.mark.slow
def test_killed_coordinators_and_leaders_lose_nothing(own: SecuredCluster) -> None:
    own.create("t", 3)
    load = Load(own, "t")
    for number in NUMBERS:
        load.until_more(100)
        own.kill(number)
        load.until_more(100)
        own.start(number)
        for index in range(3):
            own.until_in_sync("t", 3, index)
    check_load(own, "t", load)
