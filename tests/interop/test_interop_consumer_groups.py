"""Groups of the consumer protocol (KIP-848) of Kafka's Java client on netshim, and the
output of Kafka's dump tool for the records of the broker.

Needs Java 17 or later and Maven. Run by `make interop`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.format.consumer_group_records import (
    Current,
    GroupEpoch,
    consumer_value,
    read_consumer_key,
    read_consumer_value,
)
from logcore.format.group_records import (
    Subscription,
    assignment_value,
    read_assignment,
    subscription_value,
)
from logcore.metadata.filenames import OFFSETS_TOPIC
from netshim import wire
from netshim.testing import start
from netshim.wire import codes
from support import kafka_jvm
from support.client import Client
from support.kafka_jvm import Storage
from support.vectors import DATA

pytestmark = pytest.mark.interop


def test_java_client_and_dump_tool_use_consumer_groups(tmp_path: Path) -> None:
    pytest.importorskip("re2")
    source = DATA / "kafka" / "ConsumerGroups.java"
    kafka = start(tmp_path / "data", group_consumer_session_timeout_ms=10_000)
    try:
        command = [
            "java",
            "-cp",
            f"{kafka_jvm.kafka_jars()}/*",
            str(source),
            kafka.bootstrap_servers,
        ]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300
        )
    finally:
        kafka.stop()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [
        "feature 1",
        "read 8",
        "committed 2",
        "shared 4",
        "described Stable Consumer 2 range",
        "listed Optional[Consumer]",
        "grown",
        "came back to its own true",
        "alone",
        "pattern refused",
        "deleted 0",
    ]
    with Storage() as storage:
        (path,) = (tmp_path / "data" / "__consumer_offsets-0").glob("*.log")
        text = storage.dump(path, "--offsets-decoder")
    for record_type in (3, 5, 6, 7, 8, 16):
        lines = re.findall(rf'"type":"?{record_type}"?.*', text)
        assert lines, (record_type, text[:3000])


# -- compared with a broker of Kafka ----------------------------------------------------

HEARTBEAT = wire.CONSUMER_GROUP_HEARTBEAT
JOIN: dict[str, Any] = {
    "rebalance_timeout_ms": 60_000,
    "subscribed_topic_names": ["t"],
    "owned": [],
}

#: Consecutive heartbeats: (member, epoch, fields). `owned` contains numbers of
#: partitions of t.
STEPS: list[tuple[str, int, dict[str, Any]]] = [
    ("A", 1, {}),
    ("A", -1, {}),
    ("A", 0, {**JOIN, "group_id": ""}),
    ("A", 0, {**JOIN, "rack_id": ""}),
    ("", 0, JOIN),
    ("A", 0, {**JOIN, "owned": [1]}),
    ("A", 0, {**JOIN, "rebalance_timeout_ms": -1}),
    ("A", 0, {**JOIN, "subscribed_topic_names": None}),
    ("A", -2, {}),
    ("A", -3, {"instance_id": "i"}),
    ("A", 0, {**JOIN, "server_assignor": "sticky"}),
    # the six steps
    ("A", 0, JOIN),
    ("B", 0, JOIN),
    ("A", 1, {"owned": [0, 1, 2, 3]}),
    ("A", 1, {}),
    ("A", 1, {"owned": [0, 1]}),
    ("B", 2, {}),
    # epochs
    ("A", 3, {}),
    ("A", 1, {}),
    ("A", 1, {"owned": [0, 1]}),
    ("A", 1, {"owned": [0, 1, 2]}),
    ("B", 1, {"owned": []}),
    (
        "B",
        2,
        {
            "rebalance_timeout_ms": 60_000,
            "subscribed_topic_names": ["t"],
            "owned": [2, 3],
        },
    ),
    ("B", 0, JOIN),
    ("B", 2, {"rack_id": "r"}),
    ("B", 2, {"subscribed_topic_names": ["t", "none"]}),
    ("A", 2, {}),
    ("C", 3, {}),
    # static members
    ("S", 0, {**JOIN, "instance_id": "i"}),
    ("Z", 0, {**JOIN, "instance_id": "i"}),
    ("Z", 4, {"instance_id": "i"}),
    ("Z", -1, {"instance_id": "i"}),
    ("Z", -2, {"instance_id": "other"}),
    ("S", -2, {"instance_id": "i"}),
    ("S", 0, {**JOIN, "instance_id": "i"}),
    ("S", -2, {"instance_id": "i"}),
    ("S2", 0, {**JOIN, "instance_id": "i"}),
    ("S", 4, {"instance_id": "i"}),
    ("S2", -1, {"instance_id": "i"}),
    ("A", 3, {"owned": [0, 1]}),
    ("B", -1, {}),
    ("A", 5, {}),
    ("A", -1, {}),
    ("A", -1, {}),
]


def heartbeat(
    client: Client, topic_id: bytes, member_id: str, epoch: int, fields: dict[str, Any]
) -> Any:
    fields = dict(fields)
    owned = fields.pop("owned", None)
    topic_type = HEARTBEAT.Request.Topic
    if owned is not None:
        fields["topic_partitions"] = (
            [topic_type(topic_id=topic_id, partitions=owned)] if owned else []
        )
    request = HEARTBEAT.Request(
        **{"group_id": "g", "member_id": member_id, "member_epoch": epoch, **fields}
    )
    response = client.ask(HEARTBEAT, 1, request)
    partitions = None
    if response.assignment is not None:
        partitions = sorted(
            number
            for topic in response.assignment.topic_partitions
            for number in topic.partitions
        )
    return (
        response.error_code,
        response.member_id,
        response.member_epoch,
        response.heartbeat_interval_ms,
        partitions,
    )


def other_responses(client: Client) -> Iterator[Any]:
    """Requests other than heartbeats, for a group with member A at epoch 1."""
    topic_type = wire.OFFSET_COMMIT.Request.Topic
    partition = topic_type.Partition(
        partition_index=0, committed_offset=1, committed_metadata=""
    )
    topics = [topic_type(name="t", partitions=[partition])]
    commit = wire.OFFSET_COMMIT.Request
    for member_id, epoch, version in (
        ("A", 1, 9),
        ("A", 1, 8),
        ("A", 2, 9),
        ("B", 1, 9),
        ("", -1, 9),
    ):
        request = commit(
            group_id="g",
            member_id=member_id,
            generation_id_or_member_epoch=epoch,
            topics=topics,
        )
        yield (
            client.ask(wire.OFFSET_COMMIT, version, request)
            .topics[0]
            .partitions[0]
            .error_code
        )
    fetch = wire.OFFSET_FETCH.Request
    for member, epoch in ((None, -1), ("A", 1), ("A", 2), ("B", 1)):
        fetched_group = fetch.Group(
            group_id="g", member_id=member, member_epoch=epoch, topics=None
        )
        yield (
            client.ask(wire.OFFSET_FETCH, 9, fetch(groups=[fetched_group]))
            .groups[0]
            .error_code
        )
    for version in (5, 6):
        request = wire.DESCRIBE_GROUPS.Request(groups=["g", "none"])
        for group in client.ask(wire.DESCRIBE_GROUPS, version, request).groups:
            yield group.error_code, group.error_message, group.group_state
    (group,) = client.ask(
        wire.CONSUMER_GROUP_DESCRIBE,
        1,
        wire.CONSUMER_GROUP_DESCRIBE.Request(group_ids=["g"]),
    ).groups
    yield (
        group.error_code,
        group.group_state,
        group.group_epoch,
        group.assignment_epoch,
        group.assignor_name,
    )
    for member in group.members:
        yield (
            member.member_id,
            member.member_epoch,
            member.subscribed_topic_names,
            member.member_type,
        )
        yield [
            (topic.topic_name, sorted(topic.partitions))
            for topic in member.assignment.topic_partitions
        ]
    (result,) = client.ask(
        wire.DELETE_GROUPS, 2, wire.DELETE_GROUPS.Request(groups_names=["g"])
    ).results
    yield result.error_code
    listed = client.ask(wire.LIST_GROUPS, 5, wire.LIST_GROUPS.Request()).groups
    yield sorted(
        (group.group_id, group.protocol_type, group.group_state, group.group_type)
        for group in listed
    )


def connect(address: str) -> Client:
    """Connect to a broker, and wait until it has loaded its groups."""
    client = Client(int(address.rpartition(":")[2]))
    find = wire.FIND_COORDINATOR.Request(coordinator_keys=["g"], key_type=0)
    while client.ask(wire.FIND_COORDINATOR, 4, find).coordinators[0].error_code:
        pass
    unready = (
        codes.COORDINATOR_LOAD_IN_PROGRESS,
        codes.NOT_COORDINATOR,
        codes.COORDINATOR_NOT_AVAILABLE,
    )
    while heartbeat(client, bytes(16), "nobody", 1, {})[0] in unready:
        pass
    return client


def make_topic(client: Client, count: int = 4) -> bytes:
    topic = wire.CREATE_TOPICS.Request.Topic(
        name="t", num_partitions=count, replication_factor=1
    )
    response = client.ask(
        wire.CREATE_TOPICS,
        7,
        wire.CREATE_TOPICS.Request(topics=[topic], timeout_ms=30_000),
    )
    assert response.topics[0].error_code == 0
    topic_id: bytes = response.topics[0].topic_id
    numbers = None
    while (
        not numbers
    ):  # the coordinator of Kafka gets the metadata of a topic later than netshim does
        numbers = heartbeat(client, topic_id, "W", 0, {**JOIN, "group_id": "waits"})[-1]
        assert heartbeat(client, topic_id, "W", -1, {"group_id": "waits"})[0] == 0
    return topic_id


def responses_of_group(address: str) -> list[Any]:
    """Return the responses of a broker to all steps, and then for a group of one
    member.
    """
    client = connect(address)
    topic_id = make_topic(client)
    steps_and_responses: list[Any] = [
        (step, heartbeat(client, topic_id, *step)) for step in STEPS
    ]
    steps_and_responses.append(
        heartbeat(client, topic_id, "A", 0, {**JOIN, "group_id": "h"})
    )
    steps_and_responses.append(heartbeat(client, topic_id, "A", -1, {"group_id": "h"}))
    first = heartbeat(client, topic_id, "A", 0, JOIN)
    steps_and_responses.append(first)
    steps_and_responses += other_responses(client)
    client.sock.close()
    return steps_and_responses


def comparable(value: Any) -> Any:
    match value:
        case GroupEpoch():
            return value.epoch
        case frozenset():
            return sorted(number for _, number in value)
        case Current():
            return (
                value.member_epoch,
                value.previous_epoch,
                value.state,
                comparable(value.assigned),
                comparable(value.revoking),
            )
    return value


def written_records(folder: Path) -> list[Any]:
    """Return the records of groups, batch by batch, without values that differ: ids of
    topics, hashes, hosts.
    """
    batches = []
    with logcore.open_dir(folder, read_only=True) as logdir:
        log = logdir.partition(OFFSETS_TOPIC, 0)
        for batch in log.batches(0, log.high_watermark):
            records = []
            for record in batch.records():
                key = None if record.key is None else read_consumer_key(record.key)
                if key is None or key.group_id == "waits":
                    continue
                value = None
                if record.value is not None:
                    value = read_consumer_value(key.kind, record.value)
                    encoded = consumer_value(value)
                    assert encoded == record.value, (key, value, record.value.hex(" "))
                records.append((key.kind, key.group_id, key.name, comparable(value)))
            if records:
                batches.append(records)
    return batches


def check_answers(folder: Path, ask: Callable[[str], list[Any]]) -> tuple[Path, Path]:
    """Query a broker of Kafka, and then netshim, and check that the responses are
    equal. Return both directories.
    """
    with kafka_jvm.Broker(folder) as broker:
        kafka_answers = ask(broker.address)
    netshim_path = folder / "netshim"
    kafka = start(
        netshim_path,
        group_consumer_heartbeat_interval_ms=5_000,
        group_consumer_session_timeout_ms=45_000,
    )
    own_answers = ask(kafka.bootstrap_servers)
    kafka.stop()
    assert own_answers == kafka_answers
    return netshim_path, broker.data


def test_kafka_sends_and_writes_the_same_for_groups(tmp_path: Path) -> None:
    own_path, kafka_path = check_answers(tmp_path, responses_of_group)
    assert written_records(own_path) == written_records(kafka_path)


class Member:
    """A client that moves from broker to broker. It sends complete heartbeats, so that
    it gets complete responses.
    """

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id
        self.epoch = 0
        self.owned: list[int] = []

    def heartbeat(self, client: Client, topic_id: bytes) -> list[int]:
        fields = {**JOIN, "owned": self.owned}
        code, _, self.epoch, _, numbers = heartbeat(
            client, topic_id, self.member_id, self.epoch, fields
        )
        assert code == 0
        self.owned = numbers
        return self.owned


def test_group_moves_from_kafka_to_netshim_and_back(tmp_path: Path) -> None:
    first, other = Member("A"), Member("B")
    with kafka_jvm.Broker(tmp_path) as broker:
        client = connect(broker.address)
        topic_id = make_topic(client)
        assert first.heartbeat(client, topic_id) == [0, 1, 2, 3]
        assert other.heartbeat(client, topic_id) == []
        for _ in range(2):
            first.heartbeat(client, topic_id)
        assert (first.owned, other.heartbeat(client, topic_id)) == ([0, 1], [2, 3])
        client.sock.close()
    kafka = start(broker.data, group_consumer_session_timeout_ms=45_000)
    client = connect(kafka.bootstrap_servers)
    for _ in range(
        2
    ):  # netshim computes another hash of the topics, so that the epoch rises once
        assert (
            first.heartbeat(client, topic_id),
            other.heartbeat(client, topic_id),
        ) == (
            [0, 1],
            [2, 3],
        )
    assert (first.epoch, other.epoch) == (3, 3)
    assert heartbeat(client, topic_id, "B", -1, {})[0] == 0
    assert first.heartbeat(client, topic_id) == [0, 1, 2, 3]
    client.sock.close()
    kafka.stop()
    with kafka_jvm.Broker(tmp_path) as broker:
        client = connect(broker.address)
        for _ in range(2):
            assert first.heartbeat(client, topic_id) == [0, 1, 2, 3]
        assert first.epoch == 5
        assert heartbeat(client, topic_id, "B", 3, {})[0] == codes.UNKNOWN_MEMBER_ID
        client.sock.close()


# -- from one protocol to the other while the group runs -------------------------------

SUBSCRIPTION = subscription_value(Subscription(("t",)))


class ClassicMember:
    """A member of the classic protocol, eager, in raw requests. `said` records the
    response to each request.
    """

    def __init__(self, client: Client, steps: list[Any]) -> None:
        self.client = client
        self.steps = steps
        self.member_id = ""
        self.generation = -1

    def join(self) -> None:
        request_type = wire.JOIN_GROUP.Request
        for _ in range(2):  # the first response may contain only the member id
            request = request_type(
                group_id="g",
                session_timeout_ms=30_000,
                rebalance_timeout_ms=60_000,
                member_id=self.member_id,
                protocol_type="consumer",
                protocols=[request_type.Protocol(name="range", metadata=SUBSCRIPTION)],
            )
            response = self.client.ask(wire.JOIN_GROUP, 7, request)
            self.member_id = response.member_id or self.member_id
            if response.error_code != codes.MEMBER_ID_REQUIRED:
                break
        self.generation = response.generation_id
        is_leader = response.leader == self.member_id
        self.steps.append(
            (
                "join",
                response.error_code,
                response.generation_id,
                response.protocol_name,
                is_leader,
            )
        )

    def sync(self, numbers: list[int] | None = None) -> None:
        """Synchronize. As the leader, the member assigns the partitions `numbers` to
        itself.
        """
        request_type = wire.SYNC_GROUP.Request
        assignments = []
        if numbers is not None:
            share = assignment_value([("t", number) for number in numbers])
            assignments.append(
                request_type.Assignment(member_id=self.member_id, assignment=share)
            )
        request = request_type(
            group_id="g",
            generation_id=self.generation,
            member_id=self.member_id,
            assignments=assignments,
        )
        response = self.client.ask(wire.SYNC_GROUP, 3, request)
        self.steps.append(
            (
                "sync",
                response.error_code,
                sorted(read_assignment(response.assignment) or ()),
            )
        )

    def heartbeat(self, ahead: int = 0) -> None:
        request = wire.HEARTBEAT.Request(
            group_id="g",
            generation_id=self.generation + ahead,
            member_id=self.member_id,
        )
        self.steps.append(
            ("heartbeat", self.client.ask(wire.HEARTBEAT, 3, request).error_code)
        )

    def leave(self) -> None:
        member = wire.LEAVE_GROUP.Request.Member(member_id=self.member_id)
        response = self.client.ask(
            wire.LEAVE_GROUP,
            3,
            wire.LEAVE_GROUP.Request(group_id="g", members=[member]),
        )
        self.steps.append(
            ("leave", response.error_code, response.members[0].error_code)
        )

    def commit(self, version: int, ahead: int = 0) -> None:
        topic_type = wire.OFFSET_COMMIT.Request.Topic
        partition = topic_type.Partition(
            partition_index=0, committed_offset=1, committed_metadata=""
        )
        request = wire.OFFSET_COMMIT.Request(
            group_id="g",
            member_id=self.member_id,
            generation_id_or_member_epoch=self.generation + ahead,
            topics=[topic_type(name="t", partitions=[partition])],
        )
        response = self.client.ask(wire.OFFSET_COMMIT, version, request)
        self.steps.append(("commit", response.topics[0].partitions[0].error_code))


def responses_during_exchange(address: str) -> list[Any]:
    """Return the responses of a broker while the clients of a group change to the
    consumer protocol and back.
    """
    client = connect(address)
    # 6 partitions are divisible by one, two and three members, so that their order does
    # not matter.
    topic_id = make_topic(client, 6)
    steps: list[Any] = []

    def send_heartbeat(member_id: str, epoch: int, **fields: Any) -> None:
        code, _, member_epoch, _, numbers = heartbeat(
            client, topic_id, member_id, epoch, fields
        )
        steps.append(("heartbeat", member_id, code, member_epoch, numbers))

    first = ClassicMember(client, steps)
    first.join()
    first.sync([*range(6)])
    first.heartbeat()
    send_heartbeat("A", 1)
    send_heartbeat("A", 0, **JOIN)  # to the consumer protocol
    first.heartbeat()
    first.heartbeat(ahead=1)
    first.commit(8)
    first.commit(8, ahead=1)
    send_heartbeat("A", 2)
    first.join()
    first.sync()
    first.heartbeat()
    send_heartbeat("A", 2)
    send_heartbeat("A", 2, owned=[3, 4, 5])
    other = ClassicMember(client, steps)
    other.join()
    other.sync()
    first.heartbeat()
    first.join()
    first.sync()
    send_heartbeat("A", 2, owned=[3, 4, 5])
    send_heartbeat("A", 2, owned=[3, 4])
    send_heartbeat("A", 3, owned=[3, 4])
    other.heartbeat()
    other.join()
    other.sync()
    other.heartbeat()
    describe = wire.CONSUMER_GROUP_DESCRIBE
    (group,) = client.ask(describe, 1, describe.Request(group_ids=["g"])).groups
    steps.append(
        (
            group.error_code,
            group.group_state,
            sorted(member.member_type for member in group.members),
        )
    )
    # The remaining two clients change back to the classic protocol.
    send_heartbeat("A", -1)
    first.heartbeat()
    other.leave()
    first.join()
    first.sync([*range(6)])
    first.heartbeat()
    listed = client.ask(
        wire.LIST_GROUPS, 5, wire.LIST_GROUPS.Request(states_filter=["Stable"])
    ).groups
    steps.append(
        sorted(
            (listed_group.group_id, listed_group.group_state, listed_group.group_type)
            for listed_group in listed
        )
    )
    client.sock.close()
    return steps


def test_kafka_sends_the_same_while_clients_change_the_protocol(
    tmp_path: Path,
) -> None:
    check_answers(tmp_path, responses_during_exchange)
