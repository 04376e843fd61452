"""The consumer protocol (KIP-848) in a broker: the answer to each request by version,
the stored records, and an unmodified confluent-kafka.

The meaning of the answers is tested in tests/coordination. These tests check their
encoding. All but the last part run without sockets: time is a number, and the disk
finishes when the test requests it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.format.group_records import (
    Subscription,
    assignment_value,
    read_assignment,
    subscription_value,
)
from logcore.metadata.filenames import OFFSETS_TOPIC
from netshim import wire
from netshim.scheduling import PendingResponse
from netshim.testing import Kafka
from netshim.wire import codes
from support.client import Client
from support.group_harness import GroupHarness, code_of

HEARTBEAT = wire.CONSUMER_GROUP_HEARTBEAT
DEADLINE_S = 60


def send(
    group_harness: GroupHarness,
    member_id: str,
    epoch: int,
    version: int = 1,
    **fields: Any,
) -> PendingResponse:
    """Send a heartbeat. With epoch 0 it has the fields of a join. `owned` lists
    partitions of `orders`.
    """
    if epoch == 0:
        fields = {
            "rebalance_timeout_ms": 60_000,
            "owned": [],
            "subscribed_topic_names": ["orders"],
            **fields,
        }
    owned = fields.pop("owned", None)
    topic_type = HEARTBEAT.Request.Topic
    if owned is not None:
        topic_id = group_harness.state.topic_ids.id_of("orders")
        fields["topic_partitions"] = (
            [topic_type(topic_id=topic_id, partitions=owned)] if owned else []
        )
    request = HEARTBEAT.Request(
        **{"group_id": "g", "member_id": member_id, "member_epoch": epoch, **fields}
    )
    return group_harness.send(HEARTBEAT, version, request)


def heartbeat(
    group_harness: GroupHarness,
    member_id: str,
    epoch: int,
    version: int = 1,
    **fields: Any,
) -> Any:
    pending = send(group_harness, member_id, epoch, version, **fields)
    assert pending.is_set
    return pending.value


def epoch_and_partitions(
    group_harness: GroupHarness, response: Any
) -> tuple[int, list[int] | None]:
    """Return the member epoch and the assigned partitions of `orders`."""
    assert response.error_code == 0, response
    if response.assignment is None:
        return response.member_epoch, None
    assert {topic.topic_id for topic in response.assignment.topic_partitions} <= {
        group_harness.state.topic_ids.id_of("orders")
    }
    return response.member_epoch, [
        n for topic in response.assignment.topic_partitions for n in topic.partitions
    ]


def form_pair(group_harness: GroupHarness) -> None:
    """Form a group of A with partitions 0 and 1 of `orders`, and B with partition 2."""
    heartbeat(group_harness, "A", 0)
    heartbeat(group_harness, "B", 0)
    assert epoch_and_partitions(
        group_harness, heartbeat(group_harness, "A", 1, owned=[0, 1, 2])
    ) == (
        1,
        [0, 1],
    )
    assert epoch_and_partitions(
        group_harness, heartbeat(group_harness, "A", 1, owned=[0, 1])
    ) == (2, None)
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "B", 2)) == (
        2,
        [2],
    )


# -- heartbeats ------------------------------------------------------------------------


def test_two_members_exchange_partitions(group_harness: GroupHarness) -> None:
    first = heartbeat(group_harness, "A", 0)
    assert (first.member_id, first.heartbeat_interval_ms) == ("A", 5_000)
    assert epoch_and_partitions(group_harness, first) == (1, [0, 1, 2])
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "B", 0)) == (
        2,
        [],
    )
    assert epoch_and_partitions(
        group_harness, heartbeat(group_harness, "A", 1, owned=[0, 1, 2])
    ) == (
        1,
        [0, 1],
    )
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "A", 1)) == (
        1,
        None,
    )
    assert epoch_and_partitions(
        group_harness, heartbeat(group_harness, "A", 1, owned=[0, 1])
    ) == (2, None)
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "B", 2)) == (
        2,
        [2],
    )
    left = heartbeat(group_harness, "A", -1)
    assert (
        left.error_code,
        left.member_epoch,
        left.heartbeat_interval_ms,
        left.assignment,
    ) == (0, -1, 0, None)


def test_first_version_assigns_an_id_to_a_new_member(
    group_harness: GroupHarness,
) -> None:
    response = heartbeat(group_harness, "", 0, version=0)
    assert len(response.member_id) == 22
    assert epoch_and_partitions(group_harness, response) == (1, [0, 1, 2])
    assert heartbeat(group_harness, "", 0, version=0).member_id != response.member_id
    assert (
        heartbeat(group_harness, "", 0, version=1).error_code == codes.INVALID_REQUEST
    )


def test_heartbeat_interval_is_at_most_a_third_of_the_session(
    group_harness: GroupHarness,
) -> None:
    group_harness.stop()
    group_harness.settings["group_consumer_session_timeout_ms"] = 900
    group_harness.start()
    assert heartbeat(group_harness, "A", 0).heartbeat_interval_ms == 300


@pytest.mark.parametrize(
    ("member_id", "epoch", "fields", "code"),
    [
        ("A", 0, {"group_id": ""}, codes.INVALID_REQUEST),
        ("A", 0, {"server_assignor": "sticky"}, codes.UNSUPPORTED_ASSIGNOR),
        ("A", 1, {"group_id": "none"}, codes.GROUP_ID_NOT_FOUND),
        ("C", 1, {}, codes.UNKNOWN_MEMBER_ID),
        ("A", 9, {}, codes.FENCED_MEMBER_EPOCH),
        ("S", 0, {"instance_id": "i"}, codes.UNRELEASED_INSTANCE_ID),
        ("S", 2, {"instance_id": "i"}, codes.FENCED_INSTANCE_ID),
        ("C", 0, {}, codes.GROUP_MAX_SIZE_REACHED),
    ],
)
def test_refusals_have_the_codes_of_kafka_and_a_message(
    group_harness: GroupHarness,
    member_id: str,
    epoch: int,
    fields: dict[str, Any],
    code: int,
) -> None:
    group_harness.stop()
    group_harness.settings["group_consumer_max_size"] = (
        3 if code == codes.GROUP_MAX_SIZE_REACHED else 4
    )
    group_harness.start()
    form_pair(group_harness)
    heartbeat(group_harness, "I", 0, instance_id="i")
    response = heartbeat(group_harness, member_id, epoch, **fields)
    assert response.error_code == code
    assert response.error_message


def test_patterns_need_their_package_and_exclude_internal_topics(
    group_harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("re2")
    group_harness.groups.create_topic()
    response = heartbeat(
        group_harness,
        "A",
        0,
        subscribed_topic_names=[],
        subscribed_topic_regex="(^ord.*|_.*)",
    )
    assert epoch_and_partitions(group_harness, response) == (1, [0, 1, 2])
    refused = heartbeat(group_harness, "A", 1, subscribed_topic_regex="(")
    assert refused.error_code == codes.INVALID_REGULAR_EXPRESSION
    assert "missing )" in refused.error_message
    monkeypatch.setitem(__import__("sys").modules, "re2", None)
    refused = heartbeat(group_harness, "A", 1, subscribed_topic_regex="a.*")
    assert refused.error_code == codes.INVALID_REGULAR_EXPRESSION
    assert "[regex]" in refused.error_message


def test_new_topics_and_partitions_are_assigned_at_the_next_heartbeat(
    group_harness: GroupHarness,
) -> None:
    heartbeat(group_harness, "A", 0, subscribed_topic_names=["orders", "late"])
    group_harness.logdir.add_partitions("orders", 4)
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "A", 1)) == (
        2,
        [0, 1, 2, 3],
    )
    group_harness.logdir.create_topic("late", 1)
    response = heartbeat(group_harness, "A", 2)
    assert response.member_epoch == 3
    assert len(response.assignment.topic_partitions) == 2
    group_harness.logdir.delete_topic("late")
    heartbeat(group_harness, "A", 3)
    assert epoch_and_partitions(
        group_harness, heartbeat(group_harness, "A", 3, owned=[0, 1, 2, 3])
    ) == (
        4,
        None,
    )


def test_heartbeat_is_answered_once_durable(group_harness: GroupHarness) -> None:
    heartbeat(group_harness, "A", 0)
    group_harness.holds_disk = True
    waiting = [
        send(group_harness, "B", 0),
        send(group_harness, "A", 1, owned=[0, 1, 2]),
        send(group_harness, "A", 1),
    ]
    assert not any(pending.is_set for pending in waiting)
    group_harness.finish_disk()
    assert [pending.value.member_epoch for pending in waiting] == [2, 1, 1]


def test_records_of_a_heartbeat_are_one_batch(group_harness: GroupHarness) -> None:
    heartbeat(
        group_harness,
        "A",
        0,
        subscribed_topic_names=[
            "orders",
            *(f"{number:0100}" for number in range(1_000)),
        ],
    )
    log = group_harness.logdir.partition(OFFSETS_TOPIC, 0)
    (batch,) = log.batches(0, log.high_watermark)
    assert batch.record_count == 5


def test_group_survives_a_restart_and_its_sessions_start_over(
    group_harness: GroupHarness,
) -> None:
    form_pair(group_harness)
    group_harness.restart()
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "B", 2)) == (
        2,
        None,
    )
    group_harness.sleep(44_999)
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "B", 2)) == (
        2,
        None,
    )
    group_harness.sleep(1)
    assert heartbeat(group_harness, "A", 2).error_code == codes.UNKNOWN_MEMBER_ID
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "B", 2)) == (
        3,
        [0, 1, 2],
    )


# -- interaction with the classic protocol
# ----------------------------------------------


def test_classic_requests_find_no_consumer_member(group_harness: GroupHarness) -> None:
    form_pair(group_harness)
    assert code_of(group_harness.sync("A", 2)) == codes.UNKNOWN_MEMBER_ID
    assert group_harness.heartbeat("A", 2) == codes.UNKNOWN_MEMBER_ID
    assert group_harness.leave(("A", None)) == [codes.UNKNOWN_MEMBER_ID]


def test_empty_group_changes_its_protocol(group_harness: GroupHarness) -> None:
    ids, generation = group_harness.form(1)
    assert (
        code_of(
            group_harness.commit(
                {("orders", 0): 7}, member_id=ids[0], generation=generation
            )
        )
        == 0
    )
    group_harness.leave((ids[0], None))
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "A", 0)) == (
        1,
        [0, 1, 2],
    )
    group_harness.restart()
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "A", 1)) == (
        1,
        None,
    )
    assert group_harness.committed() == {("orders", 0): 7}
    heartbeat(group_harness, "A", -1)
    group_harness.form(1)
    group_harness.restart()
    assert group_harness.describe().group_state == "Stable"
    assert group_harness.committed() == {("orders", 0): 7}


def test_group_changes_its_protocol_while_it_runs(group_harness: GroupHarness) -> None:
    """First there is a classic member, then a consumer member joins, and then the
    classic one is alone again.
    """
    wants = subscription_value(Subscription(("orders",)))
    all_three = assignment_value([("orders", number) for number in range(3)])
    classic = group_harness.join(protocols={"range": wants}).value
    assert classic.leader == classic.member_id
    assert (
        code_of(
            group_harness.sync(
                classic.member_id, 1, assignments={classic.member_id: all_three}
            )
        )
        == 0
    )
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "A", 0)) == (
        2,
        [],
    )
    assert group_harness.heartbeat(classic.member_id, 1) == codes.REBALANCE_IN_PROGRESS
    again = group_harness.join(classic.member_id, protocols={"range": wants}).value
    assert (again.error_code, again.generation_id, again.leader, again.members) == (
        0,
        2,
        "",
        [],
    )
    synced = group_harness.sync(classic.member_id, 2).value
    assert read_assignment(synced.assignment) == (("orders", 0), ("orders", 1))
    assert epoch_and_partitions(group_harness, heartbeat(group_harness, "A", 2)) == (
        2,
        [2],
    )
    assert (
        code_of(
            group_harness.commit(
                {("orders", 0): 7}, member_id=classic.member_id, generation=2
            )
        )
        == 0
    )
    late = group_harness.commit(
        {("orders", 0): 8}, member_id=classic.member_id, generation=1
    )
    assert code_of(late) == codes.ILLEGAL_GENERATION
    (described,) = group_harness.ask(
        wire.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"]
    ).groups
    assert {member.member_id: member.member_type for member in described.members} == {
        classic.member_id: 0,
        "A": 1,
    }
    group_harness.restart()
    assert group_harness.heartbeat(classic.member_id, 2) == 0
    assert heartbeat(group_harness, "A", -1).error_code == 0
    assert group_harness.heartbeat(classic.member_id, 2) == codes.REBALANCE_IN_PROGRESS
    last = group_harness.join(classic.member_id, protocols={"range": wants}).value
    assert (last.error_code, last.generation_id, last.leader) == (
        0,
        3,
        classic.member_id,
    )
    assert (
        code_of(
            group_harness.sync(
                classic.member_id, 3, assignments={classic.member_id: all_three}
            )
        )
        == 0
    )
    group_harness.restart()
    assert group_harness.describe().group_state == "Stable"
    assert group_harness.committed() == {("orders", 0): 7}


@pytest.mark.parametrize(
    ("policy", "up", "into"),
    [
        ("disabled", codes.GROUP_ID_NOT_FOUND, codes.INCONSISTENT_GROUP_PROTOCOL),
        ("downgrade", codes.GROUP_ID_NOT_FOUND, 0),
        ("upgrade", 0, 0),
        ("bidirectional", 0, 0),
    ],
)
def test_migration_policy_decides_which_groups_change(
    tmp_path: Path, policy: str, up: int, into: int
) -> None:
    wants = subscription_value(Subscription(("orders",)))
    with GroupHarness(
        tmp_path, group_consumer_migration_policy=policy
    ) as group_harness:
        group_harness.logdir.create_topic("orders", 3)
        classic = group_harness.join(protocols={"range": wants}).value
        group_harness.sync(classic.member_id, 1, assignments={})
        assert heartbeat(group_harness, "A", 0).error_code == up
        heartbeat(group_harness, "B", 0, group_id="other")
        assert (
            code_of(group_harness.join(group="other", protocols={"range": wants}))
            == into
        )


# -- offsets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member_id", "epoch", "version", "code"),
    [
        ("A", 2, 9, codes.NONE),
        ("A", 2, 8, codes.UNSUPPORTED_VERSION),
        ("A", 1, 9, codes.STALE_MEMBER_EPOCH),
        ("C", 2, 9, codes.UNKNOWN_MEMBER_ID),
        ("", -1, 9, codes.UNKNOWN_MEMBER_ID),
    ],
)
def test_members_commit_with_their_epoch(
    group_harness: GroupHarness, member_id: str, epoch: int, version: int, code: int
) -> None:
    form_pair(group_harness)
    response = group_harness.commit(
        {("orders", 0): 7}, member_id=member_id, generation=epoch, version=version
    )
    assert code_of(response) == code
    assert group_harness.committed() == ({} if code else {("orders", 0): 7})


@pytest.mark.parametrize(
    ("member_id", "epoch", "code"),
    [
        (None, -1, codes.NONE),
        ("A", 2, codes.NONE),
        ("A", 1, codes.STALE_MEMBER_EPOCH),
        ("C", 2, codes.UNKNOWN_MEMBER_ID),
    ],
)
def test_members_fetch_offsets_with_their_epoch(
    group_harness: GroupHarness, member_id: str | None, epoch: int, code: int
) -> None:
    form_pair(group_harness)
    group_type = wire.OFFSET_FETCH.Request.Group
    asked = group_type(
        group_id="g", member_id=member_id, member_epoch=epoch, topics=None
    )
    (group,) = group_harness.ask(wire.OFFSET_FETCH, 9, groups=[asked]).groups
    assert group.error_code == code


def test_offsets_of_subscribed_topics_are_not_deleted(
    group_harness: GroupHarness,
) -> None:
    form_pair(group_harness)
    group_harness.commit(
        {("orders", 0): 7, ("other", 0): 8}, member_id="A", generation=2, version=9
    )
    topic_type = wire.OFFSET_DELETE.Request.Topic
    asked = [
        topic_type(name=name, partitions=[topic_type.Partition(partition_index=0)])
        for name in ("orders", "other")
    ]
    response = group_harness.ask(wire.OFFSET_DELETE, 0, group_id="g", topics=asked)
    error_codes = [
        partition.error_code
        for topic in response.topics
        for partition in topic.partitions
    ]
    assert error_codes == [codes.GROUP_SUBSCRIBED_TO_TOPIC, 0]
    assert group_harness.committed() == {("orders", 0): 7}


# -- requests of admin tools
# ------------------------------------------------------------


def test_groups_are_described_by_their_protocol(group_harness: GroupHarness) -> None:
    form_pair(group_harness)
    group_harness.form(1, group="old")

    def described(version: int, group: str) -> Any:
        (group_description,) = group_harness.ask(
            wire.CONSUMER_GROUP_DESCRIBE, version, group_ids=[group]
        ).groups
        return group_description

    for group in ("old", "none"):
        assert described(1, group).error_code == codes.GROUP_ID_NOT_FOUND
    group_description = described(1, "g")
    facts = (
        group_description.error_code,
        group_description.group_state,
        group_description.group_epoch,
        group_description.assignment_epoch,
        group_description.assignor_name,
    )
    assert facts == (0, "Stable", 2, 2, "uniform")
    member = group_description.members[0]
    assert (
        member.member_id,
        member.member_epoch,
        member.client_id,
        member.client_host,
    ) == ("A", 2, "cli", "/10.0.0.1")
    assert (member.subscribed_topic_names, member.subscribed_topic_regex) == (
        ["orders"],
        "",
    )
    assert member.member_type == 1
    for assignment in (member.assignment, member.target_assignment):
        assert [
            (topic.topic_name, topic.partitions)
            for topic in assignment.topic_partitions
        ] == [("orders", [0, 1])]
    assert described(0, "g").members[0].member_type == -1


@pytest.mark.parametrize(
    ("version", "group", "code", "text"),
    [
        (5, "g", 0, None),
        (6, "g", codes.GROUP_ID_NOT_FOUND, "Group g is not a classic group."),
        (5, "none", 0, None),
        (6, "none", codes.GROUP_ID_NOT_FOUND, "Group none not found."),
    ],
)
def test_classic_describe_does_not_find_a_consumer_group(
    group_harness: GroupHarness, version: int, group: str, code: int, text: str | None
) -> None:
    form_pair(group_harness)
    (described,) = group_harness.ask(
        wire.DESCRIBE_GROUPS, version, groups=[group]
    ).groups
    assert (described.error_code, described.error_message, described.group_state) == (
        code,
        text,
        "Dead",
    )


def test_groups_are_listed_with_type_and_state(group_harness: GroupHarness) -> None:
    heartbeat(group_harness, "A", 0)
    heartbeat(group_harness, "B", 0)
    heartbeat(group_harness, "C", 0, group_id="h")
    heartbeat(group_harness, "C", -1, group_id="h")
    heartbeat(group_harness, "D", 0, group_id="i")
    heartbeat(group_harness, "E", 0, group_id="i")
    heartbeat(group_harness, "E", -1, group_id="i")
    group_harness.form(1, group="old")

    def listed(**filters: Any) -> list[Any]:
        return [
            (group.group_id, group.protocol_type, group.group_state, group.group_type)
            for group in group_harness.ask(wire.LIST_GROUPS, 5, **filters).groups
        ]

    ours = [
        ("g", "consumer", "Reconciling", "consumer"),
        ("h", "consumer", "Empty", "consumer"),
        ("i", "consumer", "Assigning", "consumer"),
    ]
    assert listed() == [*ours, ("old", "consumer", "Stable", "classic")]
    assert listed(types_filter=["Consumer"]) == ours
    assert listed(states_filter=["reconciling"]) == ours[:1]
    assert listed(types_filter=["share", "streams"]) == []


def test_only_an_empty_consumer_group_is_deleted(group_harness: GroupHarness) -> None:
    form_pair(group_harness)
    (result,) = group_harness.ask(wire.DELETE_GROUPS, 2, groups_names=["g"]).results
    assert result.error_code == codes.NON_EMPTY_GROUP
    heartbeat(group_harness, "A", -1)
    heartbeat(group_harness, "B", -1)
    (result,) = group_harness.ask(wire.DELETE_GROUPS, 2, groups_names=["g"]).results
    assert result.error_code == 0
    group_harness.restart()
    assert group_harness.ask(wire.LIST_GROUPS, 5).groups == []


def test_protocol_feature_is_finalized(group_harness: GroupHarness) -> None:
    response = group_harness.ask(
        wire.API_VERSIONS, 3, client_software_name="x", client_software_version="1"
    )
    finalized = {
        each.name: each.max_version_level for each in response.finalized_features
    }
    assert finalized == {"group.version": 1, "transaction.version": 2}
    assert {68, 69} <= {each.api_key for each in response.api_keys}


# -- the directory after the broker
# -----------------------------------------------------


def test_next_process_continues_with_the_offsets_of_a_consumer_group(
    group_harness: GroupHarness,
) -> None:
    """The members of the group ended with the broker, like members of the classic
    protocol.
    """
    form_pair(group_harness)
    group_harness.commit({("orders", 0): 1}, member_id="A", generation=2, version=9)
    group_harness.logdir.append("orders", b"first", partition=0)
    group_harness.logdir.append("orders", b"second", partition=0)
    group_harness.stop()
    with (
        logcore.open_dir(group_harness.path) as directory,
        directory.consumer(group_id="g") as member,
    ):
        member.subscribe(["orders"])
        polled = member.poll(1).values()
        assert [record.value for records in polled for record in records] == [b"second"]
    group_harness.start()
    assert (
        group_harness.ask(wire.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"])
        .groups[0]
        .error_code
        == codes.GROUP_ID_NOT_FOUND
    )
    assert group_harness.committed()["orders", 0] in (1, 2)


def test_command_line_lists_and_deletes_consumer_groups(
    group_harness: GroupHarness,
) -> None:
    click_testing = pytest.importorskip("click.testing")
    from logcore.cli.commands import main

    form_pair(group_harness)
    group_harness.stop()

    def run(*arguments: str) -> str:
        done = click_testing.CliRunner().invoke(main, list(arguments))
        assert done.exit_code == 0, done.output
        return str(done.stdout)

    path = str(group_harness.path)
    listed = [
        json.loads(line) for line in run("group", "list", path, "--json").splitlines()
    ]
    assert [(entry["group"], entry["members"]) for entry in listed] == [("g", 2)]
    run("group", "delete", path, "g", "--yes")
    assert run("group", "list", path, "--json") == ""
    group_harness.start()


# -- confluent-kafka -------------------------------------------------------------------


def consumer(kafka: Kafka, **options: Any) -> Any:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": "g",
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            **options,
        }
    )


def poll_until(done: Callable[[], bool], member: Any, values: set[bytes]) -> None:
    """Poll a member until `done` returns true, and add the values that it gets."""
    until = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < until, member.assignment()
        message = member.poll(0.01)
        if message is not None:
            assert message.error() is None, message.error()
            values.add(message.value())


def kind_of_group(kafka: Kafka) -> str:
    client = Client(int(kafka.bootstrap_servers.rpartition(":")[2]))
    (group,) = client.ask(wire.LIST_GROUPS, 5, wire.LIST_GROUPS.Request()).groups
    client.sock.close()
    return str(group.group_type)


MEMBER = """
import sys, confluent_kafka
consumer = confluent_kafka.Consumer({
    "bootstrap.servers": sys.argv[1], "group.id": "g", "group.protocol": "consumer", "group.remote.assignor": "range"
})
consumer.subscribe(["^ord.*"] if sys.argv[2] == "pattern" else ["orders"])
printed = None
while True:
    consumer.poll(0.05)
    found = len(consumer.assignment())
    if found != printed:
        printed = found
        print(found, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("subscribes", ["names", "pattern"])
def test_confluent_members_take_over_from_a_killed_member(
    kafka_factory: Callable[..., Kafka], subscribes: str
) -> None:
    if subscribes == "pattern":
        pytest.importorskip("re2")
    kafka = kafka_factory(group_consumer_session_timeout_ms=1_000)
    kafka.create_topic("orders", 4)
    for number in range(40):
        kafka.append("orders", b"%d" % number, partition=number % 4)
    survivor = consumer(kafka)
    survivor.subscribe(["orders"])
    values: set[bytes] = set()
    poll_until(lambda: len(survivor.assignment()) == 4, survivor, values)
    victim = subprocess.Popen(
        [sys.executable, "-c", MEMBER, kafka.bootstrap_servers, subscribes],
        stdout=subprocess.PIPE,
        text=True,
    )
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(victim.stdout or ()))
    reader.start()
    try:
        # The survivor releases partitions only while it is polled: assignment() returns
        # two of them before that is finished.
        poll_until(lambda: "2\n" in output, survivor, values)
        assert len(survivor.assignment()) == 2
        poll_until(lambda: len(values) >= 20, survivor, values)
        survivor.commit(asynchronous=False)
        victim.kill()
        poll_until(lambda: len(survivor.assignment()) == 4, survivor, values)
        for number in range(40, 80):
            kafka.append("orders", b"%d" % number, partition=number % 4)
        poll_until(
            lambda: values >= {b"%d" % number for number in range(40, 80)},
            survivor,
            values,
        )
    finally:
        victim.kill()
        reader.join()
        victim.communicate()
        survivor.close()


@pytest.mark.long
def test_confluent_members_are_replaced_one_by_one_and_back(
    kafka_factory: Callable[..., Kafka],
) -> None:
    """The group changes from the classic to the consumer protocol and back, and always
    has members. No partition is assigned to two members, and each record is read.
    """
    kafka = kafka_factory()
    kafka.create_topic("orders", 4)
    classic = {
        "group.protocol": "classic",
        "partition.assignment.strategy": "range",
        "session.timeout.ms": 6_000,
    }
    classic["heartbeat.interval.ms"] = 100
    values: set[bytes] = set()
    written: set[bytes] = set()
    members: list[Any] = []

    def shares() -> list[int]:
        return sorted(
            part.partition for member in members for part in member.assignment()
        )

    def settle() -> None:
        """Poll until all partitions are assigned, and the records written by this call
        are read.
        """
        number = len(written)
        for partition in range(4):
            value = b"%d" % (number + partition)
            kafka.append("orders", value, partition=partition)
            written.add(value)
        until = time.monotonic() + DEADLINE_S
        while (
            shares() != [0, 1, 2, 3]
            or not written <= values
            or not all(member.assignment() for member in members)
        ):
            assert time.monotonic() < until, (shares(), written - values)
            for member in members:
                message = member.poll(0.02)
                if message is not None:
                    assert message.error() is None, message.error()
                    values.add(message.value())

    def comes(**options: Any) -> None:
        members.append(consumer(kafka, **options))
        members[-1].subscribe(["orders"])
        settle()

    def leaves() -> None:
        members.pop(0).close()
        settle()

    comes(**classic)
    comes(**classic)
    assert kind_of_group(kafka) == "classic"
    comes()
    assert kind_of_group(kafka) == "consumer"
    leaves()
    leaves()
    comes()
    comes(**classic)
    leaves()
    assert kind_of_group(kafka) == "consumer"
    leaves()
    assert kind_of_group(kafka) == "classic"
    members.pop().close()


def test_hundred_members_form_a_group_within_a_second(
    group_harness: GroupHarness,
) -> None:
    """Each member joins, and then all send heartbeats in turn until each has its
    partition. The limit is CPU time of this process.
    """
    group_harness.logdir.add_partitions("orders", 100)
    begun = time.process_time()
    epochs = {
        f"m{number:03}": heartbeat(group_harness, f"m{number:03}", 0).member_epoch
        for number in range(100)
    }
    held: dict[str, list[int]] = {name: [] for name in epochs}
    held["m000"] = list(range(100))
    rounds = 0
    while (
        sorted(number for numbers in held.values() for number in numbers)
        != list(range(100))
        or rounds < 2
    ):
        rounds += 1
        assert rounds < 10
        for name, owned in held.items():
            epochs[name], numbers = epoch_and_partitions(
                group_harness, heartbeat(group_harness, name, epochs[name], owned=owned)
            )
            if numbers is not None:
                held[name] = numbers
    assert {len(numbers) for numbers in held.values()} == {1}
    assert time.process_time() - begun < 1
