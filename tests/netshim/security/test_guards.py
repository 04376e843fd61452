"""Responses to a user whose rules allow only some of the topics and groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logcore import recordbatch
from logcore.format.group_records import Subscription, subscription_value
from netshim import wire
from netshim.handlers.authentication import describe_user_scram_credentials
from netshim.handlers.quotas import alter_client_quotas
from netshim.security.acls import (
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.session import ANONYMOUS
from netshim.state import Call
from netshim.wire import codes
from support.broker_harness import SESSION, BrokerHarness


def allow(
    broker_harness: BrokerHarness, *rules: tuple[ResourceType, str, AclOperation]
) -> None:
    """Replace all rules."""
    broker_harness.broker.state.security.acls = AclIndex(
        Acl(kind, Pattern.LITERAL, name, ANONYMOUS, "*", operation, Permission.ALLOW)
        for kind, name, operation in rules
    )


@pytest.fixture
def broker_harness(tmp_path: Path) -> Iterator[BrokerHarness]:
    """A broker with the topics a, b, c and d, of which the user may describe b and d."""
    harness = BrokerHarness(tmp_path / "data")
    for name in "abcd":
        harness.logdir.create_topic(name, 2)
    describe = AclOperation.DESCRIBE
    allow(harness, *((ResourceType.TOPIC, name, describe) for name in "bd"))
    yield harness
    harness.close()


def test_pages_of_topics_skip_forbidden_topics(broker_harness: BrokerHarness) -> None:
    """The cursor of a page named the next topic, whether or not the user may see it."""
    request = wire.DESCRIBE_TOPIC_PARTITIONS.Request
    cursor: Any = None
    pages = []
    while not pages or cursor is not None:
        response = broker_harness.ask(
            wire.DESCRIBE_TOPIC_PARTITIONS,
            0,
            request(topics=[], response_partition_limit=1, cursor=cursor),
        )
        cursor = None
        if response.next_cursor is not None:
            cursor = request.Cursor(
                topic_name=response.next_cursor.topic_name,
                partition_index=response.next_cursor.partition_index,
            )
        (topic,) = response.topics
        (partition,) = topic.partitions
        pages.append((topic.name, partition.partition_index))
    assert pages == [("b", 0), ("b", 1), ("d", 0), ("d", 1)]


def test_user_without_describe_gets_no_page(broker_harness: BrokerHarness) -> None:
    allow(broker_harness)
    response = broker_harness.ask(
        wire.DESCRIBE_TOPIC_PARTITIONS,
        0,
        wire.DESCRIBE_TOPIC_PARTITIONS.Request(topics=[], response_partition_limit=1),
    )
    assert response.topics == [] and response.next_cursor is None


def test_refused_reassignment_names_each_partition(
    broker_harness: BrokerHarness,
) -> None:
    """Kafka repeats the error for each partition. Admin clients read only these."""
    request = wire.ALTER_PARTITION_REASSIGNMENTS.Request
    partition = request.Topic.Partition
    topic = request.Topic(
        name="a",
        partitions=[
            partition(partition_index=number, replicas=[0]) for number in (0, 1)
        ],
    )
    response = broker_harness.ask(
        wire.ALTER_PARTITION_REASSIGNMENTS, 0, request(topics=[topic])
    )
    refused = codes.CLUSTER_AUTHORIZATION_FAILED
    assert response.error_code == refused
    assert [
        (topic.name, part.partition_index, part.error_code)
        for topic in response.responses
        for part in topic.partitions
    ] == [("a", 0, refused), ("a", 1, refused)]


class CountedName(str):
    """A name that counts how often any name is compared with another."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)


def distinct_names() -> list[CountedName]:
    CountedName.comparisons = 0
    return [CountedName(f"n{number}") for number in range(2_000)]


CALL = Call(SESSION, 0, 0, "test", 0)


def test_many_named_users_are_not_compared_in_pairs(
    broker_harness: BrokerHarness,
) -> None:
    """A request of 100,000 names occupied the broker for minutes."""
    request = wire.DESCRIBE_USER_SCRAM_CREDENTIALS.Request
    response = describe_user_scram_credentials(
        request(users=[request.User(name=name) for name in distinct_names()]),
        CALL,
        broker_harness.broker.state,
    )
    assert {result.error_code for result in response.results} == {
        codes.RESOURCE_NOT_FOUND
    }
    assert CountedName.comparisons < 10_000


def test_many_named_quotas_are_not_compared_in_pairs(
    broker_harness: BrokerHarness,
) -> None:
    request = wire.ALTER_CLIENT_QUOTAS.Request
    entity = request.Entry.Entity
    entries = [
        request.Entry(entity=[entity(entity_type="user", entity_name=name)], ops=[])
        for name in distinct_names()
    ]
    response = alter_client_quotas(
        request(entries=entries, validate_only=True), CALL, broker_harness.broker.state
    )
    assert isinstance(response, wire.ALTER_CLIENT_QUOTAS.Response)
    assert {entry.error_code for entry in response.entries} == {0}
    assert CountedName.comparisons < 10_000


@pytest.mark.parametrize("version", [12, 13])
def test_fetch_that_waits_gets_no_records_after_its_rule_is_deleted(
    broker_harness: BrokerHarness, version: int
) -> None:
    allow(
        broker_harness,
        *((ResourceType.TOPIC, name, AclOperation.READ) for name in "ab"),
        (ResourceType.TOPIC, "a", AclOperation.WRITE),
    )
    request = wire.FETCH.Request
    part = request.Topic.Partition(partition=0, partition_max_bytes=1 << 20)
    topics = []
    for name in "ab":
        topic = request.Topic(partitions=[part])
        if version < 13:
            topic.topic = name
        else:
            topic.topic_id = broker_harness.broker.state.topic_ids.id_of(name)
        topics.append(topic)
    waits = broker_harness.send(
        wire.FETCH, version, request(topics=topics, max_wait_ms=10_000, min_bytes=1)
    )
    assert not waits.is_set
    allow(
        broker_harness,
        (ResourceType.TOPIC, "b", AclOperation.READ),
        (ResourceType.TOPIC, "a", AclOperation.WRITE),
    )
    records = recordbatch.encode([(None, b"private")], base_offset=0)
    assert broker_harness.produce(records, topic="a").error_code == 0
    broker_harness.broker.tick(broker_harness.now_ms)
    response = broker_harness.read(wire.FETCH, version, waits)
    parts = {
        entry.topic
        or broker_harness.broker.state.topic_ids.name_of(bytes(entry.topic_id)): (
            entry.partitions[0].error_code,
            bytes(entry.partitions[0].records),
        )
        for entry in response.responses
    }
    assert parts == {"a": (codes.TOPIC_AUTHORIZATION_FAILED, b""), "b": (0, b"")}


READ_GROUP = (ResourceType.GROUP, "g", AclOperation.READ)


def topic(name: str) -> tuple[ResourceType, str, AclOperation]:
    return ResourceType.TOPIC, name, AclOperation.DESCRIBE


def heartbeat(
    broker_harness: BrokerHarness, member_id: str, epoch: int = 0, **fields: Any
) -> Any:
    """Send a heartbeat of the consumer protocol; with epoch 0 it joins."""
    if epoch == 0:
        fields = {"rebalance_timeout_ms": 1_000, "topic_partitions": [], **fields}
    request = wire.CONSUMER_GROUP_HEARTBEAT.Request(
        group_id="g", member_id=member_id, member_epoch=epoch, **fields
    )
    response = broker_harness.ask(wire.CONSUMER_GROUP_HEARTBEAT, 1, request)
    assert response.error_code == 0, response
    return response


def assigned(broker_harness: BrokerHarness, response: Any) -> list[str | None]:
    """Return the names of the assigned topics."""
    return sorted(
        str(broker_harness.broker.state.topic_ids.name_of(bytes(partition.topic_id)))
        for partition in response.assignment.topic_partitions
    )


def test_regular_expression_matches_no_topic_that_the_member_may_not_see(
    broker_harness: BrokerHarness,
) -> None:
    allow(broker_harness, READ_GROUP, topic("b"), topic("d"))
    response = heartbeat(broker_harness, "m", subscribed_topic_regex=".*")
    assert assigned(broker_harness, response) == ["b", "d"]
    # A new topic matches too, as soon as a rule allows it.
    broker_harness.logdir.create_topic("e")
    allow(broker_harness, READ_GROUP, topic("b"), topic("d"), topic("e"))
    broker_harness.broker.state.security.rules_version += 1
    response = heartbeat(broker_harness, "m", response.member_epoch)
    assert assigned(broker_harness, response) == ["b", "d", "e"]


def test_heartbeat_of_one_member_keeps_the_topics_of_another_pattern(
    broker_harness: BrokerHarness,
) -> None:
    """Each pattern has the topics that its own members may see."""
    allow(broker_harness, READ_GROUP, topic("b"), topic("d"))
    first = heartbeat(broker_harness, "m", subscribed_topic_regex="b")
    assert assigned(broker_harness, first) == ["b"]
    # The second member may see d only.
    allow(broker_harness, READ_GROUP, topic("d"))
    broker_harness.broker.state.security.rules_version += 1
    second = heartbeat(broker_harness, "n", subscribed_topic_regex="d")
    assert assigned(broker_harness, second) == ["d"]
    group = broker_harness.broker.state.groups.get("g")
    assert group is not None and group.consumers is not None
    assert group.consumers.patterns["b"].topics == ("b",)


def test_assignment_leaves_out_a_topic_after_its_rule_is_deleted(
    broker_harness: BrokerHarness,
) -> None:
    """The response lists the whole assignment, because the request has all fields."""
    allow(broker_harness, READ_GROUP, topic("b"), topic("d"))
    whole = {
        "rebalance_timeout_ms": 1_000,
        "topic_partitions": [],
        "subscribed_topic_regex": "[bd]",
    }
    response = heartbeat(broker_harness, "m", **whole)
    assert assigned(broker_harness, response) == ["b", "d"]
    allow(broker_harness, READ_GROUP, topic("d"))
    response = heartbeat(broker_harness, "m", response.member_epoch, **whole)
    assert assigned(broker_harness, response) == ["d"]


def test_new_member_takes_no_topic_from_others_with_its_pattern(
    broker_harness: BrokerHarness,
) -> None:
    allow(broker_harness, READ_GROUP, topic("b"), topic("d"))
    response = heartbeat(broker_harness, "m", subscribed_topic_regex="[bd]")
    # The first heartbeat has created the topic of the offsets.
    heartbeat(broker_harness, "m", response.member_epoch)
    allow(broker_harness, READ_GROUP, topic("d"))
    heartbeat(broker_harness, "n", subscribed_topic_regex="[bd]")
    group = broker_harness.broker.state.groups.get("g")
    assert group is not None and group.consumers is not None
    assert group.consumers.patterns["[bd]"].topics == ("b", "d")


def test_classic_member_of_a_consumer_group_sees_no_forbidden_topic(
    broker_harness: BrokerHarness,
) -> None:
    """The broker computes the assignment of such a group from topic names that a member
    sent.
    """
    allow(broker_harness, READ_GROUP, topic("d"))
    heartbeat(broker_harness, "m", subscribed_topic_names=["d"])
    join = wire.JOIN_GROUP.Request
    metadata = subscription_value(Subscription(topics=("a", "d")))
    request = join(
        group_id="g",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[join.Protocol(name="range", metadata=metadata)],
    )
    request.member_id = broker_harness.ask(wire.JOIN_GROUP, 9, request).member_id
    joined = broker_harness.ask(wire.JOIN_GROUP, 9, request)
    assert joined.error_code == 0
    sync = wire.SYNC_GROUP.Request(
        group_id="g",
        member_id=joined.member_id,
        generation_id=joined.generation_id,
        protocol_type="consumer",
        protocol_name="range",
    )
    response = broker_harness.ask(wire.SYNC_GROUP, 5, sync)
    assert response.error_code == 0
    assert b"a" not in bytes(response.assignment)
