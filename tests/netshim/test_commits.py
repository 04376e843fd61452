"""Offset commits of groups: the time of their answers, the stored records, and
expiration.

All tests but one run without sockets: time is a number, and the disk finishes when the
test requests it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from pathlib import Path
from typing import Any

import crc32c
import pytest

import logcore
import netshim
from logcore import LogDir
from logcore.coordination import classic_group as machine
from logcore.format.group_records import (
    Committed,
    StoredGroup,
    StoredMember,
    commit_key,
    commit_value,
    group_key,
    group_value,
)
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.testing import Fault, FaultPlan, SimulatedCrash, SimulatedDisk
from netshim import wire
from netshim.wire import codes
from support import group_messages
from support.client import Client
from support.group_harness import (
    REBALANCE_MS,
    SESSION_MS,
    T0,
    GroupHarness,
    code_of,
    form_static,
    with_each_kind_of_directory,
)
from support.simulated_disk_broker import SimulatedDiskBroker

DAY_MS = 24 * 3_600_000


def subscription(*topics: str) -> bytes:
    value = wire.CONSUMER_PROTOCOL_SUBSCRIPTION.Value(topics=list(topics))
    return wire.encode_versioned(wire.CONSUMER_PROTOCOL_SUBSCRIPTION, 0, value)


# -- committing ------------------------------------------------------------------------


@with_each_kind_of_directory
def test_committed_offsets_are_fetched_unchanged(group_harness: GroupHarness) -> None:
    assert (
        code_of(
            group_harness.commit({("orders", 0): 5}, metadata="é\U0001f600", epoch=3)
        )
        == 0
    )
    assert code_of(group_harness.commit({("orders", 2): 0}, metadata=None)) == 0
    topic_type = wire.OFFSET_FETCH.Request.Topic
    asked = [
        topic_type(name="orders", partition_indexes=[0, 1, 2, 9]),
        topic_type(name="none", partition_indexes=[0]),
    ]
    expected = [
        [
            (0, 5, 3, "é\U0001f600", 0),
            (1, -1, -1, "", 0),
            (2, 0, -1, "", 0),
            (9, -1, -1, "", 0),
        ],
        [(0, -1, -1, "", 0)],
    ]

    def facts(topics: Any) -> Any:
        return [
            [
                (
                    p.partition_index,
                    p.committed_offset,
                    p.committed_leader_epoch,
                    p.metadata,
                    p.error_code,
                )
                for p in topic.partitions
            ]
            for topic in topics
        ]

    assert (
        facts(
            group_harness.ask(wire.OFFSET_FETCH, 5, group_id="g", topics=asked).topics
        )
        == expected
    )
    group_type = wire.OFFSET_FETCH.Request.Group
    asked8 = [
        group_type.Topic(name=topic.name, partition_indexes=topic.partition_indexes)
        for topic in asked
    ]
    response = group_harness.ask(
        wire.OFFSET_FETCH,
        9,
        groups=[
            group_type(group_id="g", topics=asked8),
            group_type(group_id="nobody", topics=None),
            group_type(group_id="g", topics=None),
        ],
        require_stable=True,
    )
    assert [group.group_id for group in response.groups] == ["g", "nobody", "g"]
    assert facts(response.groups[0].topics) == expected
    assert response.groups[1].topics == []
    assert [len(partitions) for partitions in facts(response.groups[2].topics)] == [2]
    assert group_harness.committed("nobody") == {}


@with_each_kind_of_directory
def test_P59_errors_of_invalid_commits(group_harness: GroupHarness) -> None:
    assert (
        code_of(group_harness.commit({("orders", 0): 1}, group="x" * 32_760))
        == codes.INVALID_GROUP_ID
    )
    assert (
        code_of(group_harness.commit({("orders", 0): 1}, generation=1))
        == codes.ILLEGAL_GENERATION
    )
    assert (
        code_of(group_harness.commit({("orders", 0): 1}, generation=1, version=9))
        == codes.GROUP_ID_NOT_FOUND
    )
    assert (
        code_of(group_harness.commit({("orders", 3): 1}, group=""))
        == codes.UNKNOWN_TOPIC_OR_PARTITION
    )
    assert (
        code_of(group_harness.commit({("nothing", 0): 1}))
        == codes.UNKNOWN_TOPIC_OR_PARTITION
    )
    assert (
        code_of(group_harness.commit({("orders", 0): 1}, metadata="x" * 4_097))
        == codes.OFFSET_METADATA_TOO_LARGE
    )
    assert code_of(group_harness.commit({("orders", 0): 1}, metadata="x" * 4_096)) == 0
    ids, generation = group_harness.form(1)
    # A commit without a member id is accepted only while the group has no member.
    assert code_of(group_harness.commit({("orders", 0): 1})) == codes.UNKNOWN_MEMBER_ID
    assert (
        code_of(group_harness.commit({("orders", 0): 1}, member_id="x", generation=1))
        == codes.UNKNOWN_MEMBER_ID
    )
    wrong = group_harness.commit(
        {("orders", 0): 1}, member_id=ids[0], generation=generation + 1
    )
    assert code_of(wrong) == codes.ILLEGAL_GENERATION
    fenced = group_harness.commit(
        {("orders", 0): 1},
        member_id=ids[0],
        generation=generation,
        group_instance_id="i",
    )
    assert code_of(fenced) == codes.UNKNOWN_MEMBER_ID
    mixed = group_harness.commit(
        {("orders", 1): 7, ("nothing", 0): 1}, member_id=ids[0], generation=generation
    ).value
    assert [topic.partitions[0].error_code for topic in mixed.topics] == [
        0,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    newcomer = group_harness.join()
    during = group_harness.commit(
        {("orders", 1): 8}, member_id=ids[0], generation=generation
    )
    assert code_of(during) == 0  # offsets processed before it rejoins
    group_harness.join(ids[0])
    late = group_harness.commit(
        {("orders", 1): 9},
        member_id=newcomer.value.member_id,
        generation=generation + 1,
    )
    assert code_of(late) == codes.REBALANCE_IN_PROGRESS
    assert group_harness.committed() == {("orders", 0): 1, ("orders", 1): 8}


@with_each_kind_of_directory
def test_commit_renews_the_session(group_harness: GroupHarness) -> None:
    ids, generation = group_harness.form(1)
    for _ in range(5):
        group_harness.sleep(SESSION_MS - 1)
        assert (
            code_of(
                group_harness.commit(
                    {("orders", 0): 1}, member_id=ids[0], generation=generation
                )
            )
            == 0
        )
    assert group_harness.heartbeat(ids[0], generation) == 0


def test_P60_commit_is_answered_and_visible_once_durable(
    group_harness: GroupHarness,
) -> None:
    group_harness.commit({("orders", 0): 1})
    group_harness.holds_disk = True
    second = group_harness.commit({("orders", 0): 2})
    third = group_harness.commit({("orders", 0): 3})
    assert not second.is_set and not third.is_set
    assert group_harness.committed() == {("orders", 0): 1}
    group_harness.finish_disk()
    assert code_of(second) == code_of(third) == 0
    assert group_harness.committed() == {("orders", 0): 3}


def test_assignment_is_returned_once_durable(group_harness: GroupHarness) -> None:
    first = group_harness.join().value.member_id
    group_harness.join(group="h")  # creates the topic
    group_harness.sync("cli-0002", 1, group="h")
    group_harness.holds_disk = True
    pending = group_harness.sync(first, 1, {first: b"1"})
    assert (
        not pending.is_set
        and group_harness.describe().group_state == machine.COMPLETING
    )
    newcomer = group_harness.join()  # joins first, so that the assignment is obsolete
    assert code_of(pending) == codes.REBALANCE_IN_PROGRESS
    group_harness.finish_disk()
    assert (
        group_harness.describe().group_state == machine.PREPARING
        and not newcomer.is_set
    )


def test_assignment_of_an_older_generation_is_not_returned(
    group_harness: GroupHarness,
) -> None:
    """The assignment becomes durable after another member has joined, while a newer
    assignment is being made.
    """
    leader = group_harness.join().value.member_id
    group_harness.holds_disk = True
    first = group_harness.sync(leader, 1, {leader: b"all"})
    newcomer = group_harness.join()
    assert code_of(first) == codes.REBALANCE_IN_PROGRESS
    assert (
        group_harness.join(leader).value.generation_id
        == newcomer.value.generation_id
        == 2
    )
    follower = group_harness.sync(newcomer.value.member_id, 2)
    group_harness.finish_disk()
    assert not follower.is_set
    group_harness.sync(
        leader, 2, {leader: b"half", newcomer.value.member_id: b"other half"}
    )
    assert follower.value.assignment == b"other half"


def test_disk_error_is_answered_with_a_retriable_error(
    group_harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_harness.form(1)
    group_harness.commit({("orders", 0): 1}, group="h")
    log = group_harness.logdir.partition(OFFSETS_TOPIC, 0)

    def full(*_: Any, **__: Any) -> Any:
        raise logcore.DiskFullError("no space left", path="x")

    with monkeypatch.context() as patch:
        patch.setattr("netshim.stored_offsets.append_atomically", full)
        assert (
            code_of(group_harness.commit({("orders", 0): 2}, group="h"))
            == codes.COORDINATOR_NOT_AVAILABLE
        )
        assert (
            code_of(group_harness.commit({("orders", 0): 2}, group="new"))
            == codes.COORDINATOR_NOT_AVAILABLE
        )
        assert group_harness.groups.get("new") is None
        member_id = group_harness.join(group="j").value.member_id
        assert (
            code_of(group_harness.sync(member_id, 1, group="j"))
            == codes.COORDINATOR_NOT_AVAILABLE
        )
        assert group_harness.describe("j").group_state == machine.PREPARING
    assert group_harness.committed("h") == {("orders", 0): 1}
    assert group_harness.join(member_id, group="j").value.generation_id == 2
    assert code_of(group_harness.sync(member_id, 2, group="j")) == 0

    with monkeypatch.context() as patch:
        patch.setattr(type(log), "flush", full)
        assert (
            code_of(group_harness.commit({("orders", 0): 3}, group="h"))
            == codes.COORDINATOR_NOT_AVAILABLE
        )
        assert group_harness.committed("h") == {("orders", 0): 1}


def test_static_member_is_restored_when_its_return_cannot_be_stored(
    group_harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, follower = form_static(group_harness)

    def full(*_: Any, **__: Any) -> Any:
        raise logcore.DiskFullError("no space left", path="x")

    with monkeypatch.context() as patch:
        patch.setattr("netshim.stored_offsets.append_atomically", full)
        assert (
            code_of(group_harness.join(instance="b", version=5))
            == codes.COORDINATOR_NOT_AVAILABLE
        )
    assert group_harness.heartbeat(follower, 2, instance="b") == 0


# -- stored records -------------------------------------------------------------------


def test_restart_is_invisible_to_members_that_return_in_time(
    group_harness: GroupHarness,
) -> None:
    ids, generation = group_harness.form(2)
    group_harness.commit(
        {("orders", 1): 7},
        member_id=ids[0],
        generation=generation,
        metadata="m",
        epoch=2,
    )
    group_harness.commit({("orders", 0): 9}, group="simple")
    before = group_harness.describe()
    group_harness.restart()
    assert group_harness.describe() == before
    assert group_harness.committed() == {("orders", 1): 7}
    assert group_harness.committed("simple") == {("orders", 0): 9}
    assert (
        group_harness.heartbeat(ids[0], generation)
        == group_harness.heartbeat(ids[1], generation)
        == 0
    )
    assert group_harness.sync(ids[1], generation).value.assignment == ids[1].encode()
    assert (
        code_of(
            group_harness.commit(
                {("orders", 1): 8}, member_id=ids[1], generation=generation
            )
        )
        == 0
    )
    group_harness.sleep(SESSION_MS)
    assert group_harness.describe().group_state == machine.EMPTY
    group_harness.restart()
    assert group_harness.describe().group_state == machine.EMPTY
    assert group_harness.join().value.generation_id == generation + 2
    assert group_harness.committed() == {("orders", 1): 8}


def test_member_that_does_not_return_after_a_restart_expires(
    group_harness: GroupHarness,
) -> None:
    group_harness.form()
    group_harness.restart()
    assert group_harness.describe().group_state == "Stable"
    group_harness.sleep(SESSION_MS)
    assert group_harness.describe().group_state == "Empty"


def test_requests_wait_while_stored_groups_are_loaded(
    group_harness: GroupHarness,
) -> None:
    ids, generation = group_harness.form(1)
    group_harness.restart()
    group_harness.holds_disk = True
    replies = [
        group_harness.send(
            wire.HEARTBEAT,
            3,
            wire.HEARTBEAT.Request(
                group_id="g", generation_id=generation, member_id=ids[0]
            ),
        ),
        group_harness.commit(
            {("orders", 0): 1}, member_id=ids[0], generation=generation
        ),
        group_harness.send(wire.LIST_GROUPS, 4, wire.LIST_GROUPS.Request()),
    ]
    assert not any(reply.is_set for reply in replies) and len(group_harness.held) == 1
    group_harness.finish_disk()
    assert code_of(replies[0]) == code_of(replies[1]) == 0
    assert [group.group_id for group in replies[2].value.groups] == ["g"]


def test_unreadable_groups_are_answered_with_a_retriable_error(
    group_harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_harness.form(1)
    group_harness.restart()

    def damaged(*_: Any, **__: Any) -> Any:
        raise logcore.CorruptLogError("damaged", path="x")

    with monkeypatch.context() as patch:
        patch.setattr(LogDir, "partition", damaged)
        topic = wire.OFFSET_FETCH.Request.Topic(name="orders", partition_indexes=[0])
        group_type = wire.OFFSET_FETCH.Request.Group
        assert code_of(group_harness.join(version=7)) == codes.COORDINATOR_NOT_AVAILABLE
        assert code_of(group_harness.sync("m", 1)) == codes.COORDINATOR_NOT_AVAILABLE
        assert group_harness.heartbeat("m", 1) == codes.COORDINATOR_NOT_AVAILABLE
        assert (
            code_of(group_harness.commit({("orders", 0): 1}))
            == codes.COORDINATOR_NOT_AVAILABLE
        )
        old = group_harness.send(
            wire.OFFSET_FETCH,
            1,
            wire.OFFSET_FETCH.Request(group_id="g", topics=[topic]),
        )
        assert (
            old.value.topics[0].partitions[0].error_code
            == codes.COORDINATOR_NOT_AVAILABLE
        )
        asked = group_type(group_id="g", topics=None)
        for response in (
            group_harness.ask(wire.OFFSET_FETCH, 7, group_id="g", topics=[topic]),
            group_harness.ask(wire.OFFSET_FETCH, 8, groups=[asked]).groups[0],
            group_harness.ask(wire.LEAVE_GROUP, 3, group_id="g", members=[]),
            group_harness.ask(wire.DESCRIBE_GROUPS, 5, groups=["g"]).groups[0],
            group_harness.ask(wire.LIST_GROUPS, 5),
            group_harness.ask(wire.DELETE_GROUPS, 2, groups_names=["g"]).results[0],
            group_harness.ask(wire.OFFSET_DELETE, 0, group_id="g", topics=[]),
        ):
            assert response.error_code == codes.COORDINATOR_NOT_AVAILABLE
    assert group_harness.describe().group_state == machine.STABLE


def test_records_of_unknown_kinds_and_versions_are_skipped(
    group_harness: GroupHarness,
) -> None:
    group_harness.commit({("orders", 0): 1})
    log = group_harness.logdir.partition(OFFSETS_TOPIC, 0)
    v4 = bytes.fromhex("0004000000000000001d00000004026d0000018bcfe5680000")
    log.append_many(
        [
            (b"\0\3\0\1g", b"\0\0\0\0\0\1\0"),
            (b"\0\x63new", b"?"),
            (b"", b""),
            (b"\0\1\0\1g\0\6orders\0\0\0\1", b"\0\x09future"),
            (b"\0\1\0\1g\0\6or", b"cut"),
            (b"\0\2\0\1h", b"\0\3cut"),
            (commit_key("v4", "orders", 0), v4),
            (
                b"\0\0" + commit_key("v0", "orders", 0)[2:],
                b"\0\0" + bytes(7) + b"\5\0\1m" + bytes(8),
            ),
            (
                b"\0\0" + commit_key("g", "orders", 0)[2:],
                b"\0\0" + bytes(7) + b"\5\0\1m" + bytes(8),
            ),
        ]
    )
    before = group_harness.records()
    group_harness.restart()
    assert group_harness.committed() == {("orders", 0): 1}
    assert group_harness.committed("v4") == {("orders", 0): 29}
    assert group_harness.committed("v0") == {("orders", 0): 5}
    assert group_harness.records() == before


def test_group_record_without_a_rebalance_timeout_uses_the_session_timeout(
    group_harness: GroupHarness,
) -> None:
    value_type = group_messages.GROUP_METADATA_VALUE.Value
    member = value_type.Member(
        member_id="m",
        client_id="c",
        client_host="/h",
        session_timeout=777,
        subscription=b"s",
        assignment=b"a",
    )
    value = value_type(
        protocol_type="consumer",
        generation=4,
        protocol="range",
        leader="m",
        members=[member],
    )
    group_harness.logdir.create_topic(OFFSETS_TOPIC)
    log = group_harness.logdir.partition(OFFSETS_TOPIC, 0)
    log.append(
        wire.encode_versioned(group_messages.GROUP_METADATA_VALUE, 0, value),
        key=group_key("old"),
    )
    assert group_harness.heartbeat("m", 4, group="old") == 0
    group = group_harness.groups.get("old")
    assert group is not None and group.members["m"].rebalance_timeout_ms == 777
    group_harness.sleep(777)
    assert group_harness.describe("old").group_state == machine.EMPTY


def test_stored_leader_that_is_not_a_member_is_replaced(
    group_harness: GroupHarness,
) -> None:
    member = StoredMember(
        member_id="m",
        client_id="c",
        client_host="/h",
        session_timeout_ms=777,
        rebalance_timeout_ms=1,
    )
    value = StoredGroup(
        protocol_type="consumer",
        generation=4,
        protocol=None,
        leader="x",
        members=(member,),
    )
    group_harness.logdir.create_topic(OFFSETS_TOPIC)
    group_harness.logdir.partition(OFFSETS_TOPIC, 0).append(
        group_value(value), key=group_key("g")
    )
    assert group_harness.heartbeat("m", 4) == 0
    assert code_of(group_harness.join("m")) == codes.INCONSISTENT_GROUP_PROTOCOL
    group = group_harness.groups.get("g")
    assert group is not None and group.leader == "m"


def test_group_too_large_for_a_record_is_refused(group_harness: GroupHarness) -> None:
    """As in Kafka, the error is not retriable. A commit cannot be that large."""
    member_id = group_harness.join(protocols={"range": b"x" * 900_000}).value.member_id
    assert (
        code_of(group_harness.sync(member_id, 1, {member_id: b"1" * 900_000}))
        == codes.UNKNOWN_SERVER_ERROR
    )
    assert group_harness.heartbeat(member_id, 1) == codes.REBALANCE_IN_PROGRESS


def test_transactional_commits_count_once_committed(
    tmp_path: Path,
) -> None:
    """As in Kafka, a committed offset counts from the position of its record. Offsets
    of an aborted or open transaction do not count.
    """

    def commit(producer_id: int, partition: int, offset: int) -> bytes:
        record = (
            commit_key("g", "orders", partition),
            commit_value(Committed(offset, -1, "", T0)),
        )
        return batch_of(record, producer_id, 0 if producer_id < 0 else TRANSACTIONAL)

    def marker(producer_id: int, kind: int) -> bytes:
        return batch_of(
            (b"\0\0" + kind.to_bytes(2, "big"), bytes(6)),
            producer_id,
            TRANSACTIONAL | CONTROL,
        )

    batches = [
        *(commit(-1, 0, 1), commit(-1, 1, 1), commit(-1, 2, 1)),
        *(commit(1, 0, 10), commit(2, 1, 11), commit(3, 2, 12)),
        commit(-1, 0, 20),
        *(marker(1, 1), marker(2, 0)),
        *(commit(4, 2, 14), marker(4, 1)),
        *(commit(5, 1, 15), commit(-1, 3, 30)),
    ]
    directory = tmp_path / f"{OFFSETS_TOPIC}-0"
    directory.mkdir()
    stored = b"".join(
        offset.to_bytes(8, "big") + batch[8:] for offset, batch in enumerate(batches)
    )
    (directory / f"{0:020}.log").write_bytes(stored)
    with GroupHarness(tmp_path) as group_harness:
        expected = {
            ("orders", 0): 20,
            ("orders", 1): 1,
            ("orders", 2): 14,
            ("orders", 3): 30,
        }
        assert group_harness.committed() == expected
        for (topic, partition), offset in expected.items():
            assert group_harness.logdir.committed_offsets(topic, partition) == {
                "g": offset
            }, "retention uses the same offset"


TRANSACTIONAL = 0x10
CONTROL = 0x20


def batch_of(record: tuple[bytes, bytes], producer_id: int, attributes: int) -> bytes:
    key, value = record
    body = (
        b"\0"
        + zigzag(0)
        + zigzag(0)
        + zigzag(len(key))
        + key
        + zigzag(len(value))
        + value
        + zigzag(0)
    )
    tail = (
        attributes.to_bytes(2, "big")
        + bytes(4)
        + T0.to_bytes(8, "big") * 2
        + producer_id.to_bytes(8, "big", signed=True)
        + (0 if producer_id >= 0 else -1).to_bytes(2, "big", signed=True)
        + (-1 if producer_id < 0 or attributes & CONTROL else 0).to_bytes(
            4, "big", signed=True
        )
        + (1).to_bytes(4, "big")
        + zigzag(len(body))
        + body
    )
    head = bytes(8) + (len(tail) + 9).to_bytes(4, "big") + bytes(4) + b"\2"
    return head + crc32c.crc32c(tail).to_bytes(4, "big") + tail


def zigzag(number: int) -> bytes:
    value = number << 1 if number >= 0 else (-number << 1) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_groups_are_spread_over_the_existing_partitions(tmp_path: Path) -> None:
    with GroupHarness(tmp_path, offsets_partitions=50) as group_harness:
        group_harness.logdir.create_topic("orders")
        group_harness.commit({("orders", 0): 3}, group="my-group")
        assert group_harness.records(12)[0][0] == commit_key("my-group", "orders", 0)
        group_harness.settings["offsets_partitions"] = 1
        group_harness.restart()
        group_harness.commit({("orders", 0): 4}, group="my-group")
        assert len(group_harness.records(12)) == 2
        assert group_harness.logdir.describe_topic(OFFSETS_TOPIC).overrides == {
            "cleanup.policy": "compact",
            "segment.bytes": "104857600",
            "compression.type": "producer",
        }


# -- deleting and expiring -------------------------------------------------------------


def test_empty_groups_can_be_deleted(group_harness: GroupHarness) -> None:
    ids, _ = group_harness.form(1)
    group_harness.commit({("orders", 0): 1}, member_id=ids[0], generation=1)
    group_harness.commit({("orders", 0): 2}, group="other")

    def delete(*names: str) -> list[tuple[str, int]]:
        results = group_harness.ask(
            wire.DELETE_GROUPS, 2, groups_names=list(names)
        ).results
        return [(result.group_id, result.error_code) for result in results]

    assert delete("g", "nobody") == [
        ("g", codes.NON_EMPTY_GROUP),
        ("nobody", codes.GROUP_ID_NOT_FOUND),
    ]
    assert delete() == []
    group_harness.leave((ids[0], None))
    group_harness.join(
        version=4
    )  # a member that only received an id does not keep the group
    assert delete("g") == [("g", 0)]
    assert group_harness.records()[-2:] == [
        (commit_key("g", "orders", 0), None),
        (group_key("g"), None),
    ]
    for _ in range(2):
        assert group_harness.committed() == {}
        assert group_harness.describe().group_state == machine.DEAD
        assert [
            group.group_id for group in group_harness.ask(wire.LIST_GROUPS, 0).groups
        ] == ["other"]
        group_harness.restart()
    assert group_harness.join().value.generation_id == 1


@with_each_kind_of_directory
def test_offsets_committed_before_a_group_deletion_are_deleted(
    group_harness: GroupHarness,
) -> None:
    group_harness.commit({("orders", 0): 1})
    group_harness.holds_disk = True
    commit = group_harness.commit({("orders", 1): 1})
    deleted = group_harness.send(
        wire.DELETE_GROUPS, 2, wire.DELETE_GROUPS.Request(groups_names=["g"])
    )
    again = group_harness.commit({("orders", 2): 5})
    group_harness.finish_disk()
    assert (
        code_of(commit) == code_of(again) == 0
        and deleted.value.results[0].error_code == 0
    )
    for _ in range(2):
        assert group_harness.committed() == {("orders", 2): 5}
        group_harness.restart()


def delete_offsets(group_harness: GroupHarness, **topics: list[int]) -> Any:
    topic_type = wire.OFFSET_DELETE.Request.Topic
    response = group_harness.ask(
        wire.OFFSET_DELETE,
        0,
        group_id="g",
        topics=[
            topic_type(
                name=name,
                partitions=[
                    topic_type.Partition(partition_index=number) for number in numbers
                ],
            )
            for name, numbers in topics.items()
        ],
    )
    if response.error_code:
        return response.error_code
    return [
        partition.error_code
        for topic in response.topics
        for partition in topic.partitions
    ]


@with_each_kind_of_directory
def test_deleting_offsets_of_unsubscribed_topics(group_harness: GroupHarness) -> None:
    assert delete_offsets(group_harness, orders=[0]) == codes.GROUP_ID_NOT_FOUND
    group_harness.commit({("orders", 0): 1, ("orders", 1): 2, ("other", 0): 3})
    assert delete_offsets(group_harness, orders=[0, 2, 9], nothing=[0]) == [0, 0, 3, 3]
    assert group_harness.committed() == {("orders", 1): 2, ("other", 0): 3}
    group_harness.form(1, protocols={"range": subscription("other")})
    assert delete_offsets(group_harness, orders=[1], other=[0]) == [
        0,
        codes.GROUP_SUBSCRIBED_TO_TOPIC,
    ]
    for _ in range(2):
        assert group_harness.committed() == {("other", 0): 3}
        group_harness.restart()


def test_offsets_of_a_group_with_unknown_subscriptions_are_kept(
    group_harness: GroupHarness,
) -> None:
    group_harness.commit({("orders", 0): 1})
    group_harness.form(1, protocols={"range": b"no subscription"})
    assert delete_offsets(group_harness, orders=[0]) == [
        codes.GROUP_SUBSCRIBED_TO_TOPIC
    ]
    group_harness.leave(("cli-0001", None))
    group_harness.form(1, kind="connect")
    assert delete_offsets(group_harness, orders=[0]) == codes.NON_EMPTY_GROUP


def test_deleting_a_topic_deletes_its_committed_offsets(
    group_harness: GroupHarness,
) -> None:
    group_harness.commit({("orders", 0): 1, ("other", 0): 3})
    group_harness.restart()  # also if no earlier request has loaded the groups
    group_harness.holds_disk = True
    group_harness.groups.topics_deleted({"orders", "third"}, group_harness.now_ms)
    group_harness.finish_disk()
    assert group_harness.committed() == {("other", 0): 3}
    group_harness.holds_disk = True
    group_harness.commit({("orders", 1): 1})
    group_harness.groups.topics_deleted({"orders"}, group_harness.now_ms)
    late = group_harness.commit({("orders", 2): 1})
    group_harness.finish_disk()
    assert code_of(late) == 0
    for _ in range(2):
        assert group_harness.committed() == {("other", 0): 3, ("orders", 2): 1}
        group_harness.restart()


def _commit_and_fetch(broker: SimulatedDiskBroker, *, commits: bool) -> int:
    """Return the committed offset of partition 0 of t."""
    if commits:
        topic_type = wire.OFFSET_COMMIT.Request.Topic
        part = topic_type.Partition(
            partition_index=0, committed_offset=5, committed_metadata=""
        )
        member = {"generation_id_or_member_epoch": -1, "member_id": ""}
        broker.ask(
            wire.OFFSET_COMMIT,
            7,
            group_id="g",
            topics=[topic_type(name="t", partitions=[part])],
            **member,
        )
    topic = wire.OFFSET_FETCH.Request.Topic(name="t", partition_indexes=[0])
    return int(
        broker.ask(wire.OFFSET_FETCH, 6, group_id="g", topics=[topic])
        .topics[0]
        .partitions[0]
        .committed_offset
    )


@pytest.mark.long
def test_broker_crash_during_topic_deletion_leaves_no_offsets_to_a_new_topic() -> None:
    for stop in itertools.count():
        disk = SimulatedDisk()
        broker = SimulatedDiskBroker(disk, disk.now_ms())
        broker.logdir.create_topic("t", 2)
        assert _commit_and_fetch(broker, commits=True) == 5
        disk.crash_in(stop)
        try:
            broker.ask(wire.DELETE_TOPICS, 4, topic_names=["t"], timeout_ms=1_000)
        except SimulatedCrash:
            for state in disk.after_crash(limit=2):
                again = SimulatedDiskBroker(state, state.now_ms())
                if "t" not in again.logdir:
                    again.logdir.create_topic("t", 2)
                    assert _commit_and_fetch(again, commits=False) == -1
                again.stop()
            continue
        disk.crash_in(None)
        broker.logdir.create_topic("t", 2)
        assert _commit_and_fetch(broker, commits=False) == -1
        broker.stop()
        assert stop > 10
        return


def test_offsets_are_deleted_after_a_topic_deletion_that_failed_first() -> None:
    disk = SimulatedDisk()
    broker = SimulatedDiskBroker(disk, disk.now_ms())
    broker.logdir.create_topic("t", 2)
    assert _commit_and_fetch(broker, commits=True) == 5
    broker.logdir.host.forget_topic = lambda name: (
        broker.broker.state.groups.topics_deleted({name}, broker.now_ms)
    )
    disk.faults = FaultPlan(Fault("rename", errno.ENOSPC, "*t-0*", times=None))
    response = broker.ask(wire.DELETE_TOPICS, 4, topic_names=["t"], timeout_ms=1_000)
    assert response.responses[0].error_code != 0
    disk.faults = None
    broker.logdir.tick()
    broker.tick()
    broker.logdir.create_topic("t", 2)
    assert _commit_and_fetch(broker, commits=False) == -1
    broker.stop()


def test_topic_deletion_in_a_served_directory_deletes_its_offsets(
    tmp_path: Path,
) -> None:
    with (
        netshim.serve(tmp_path / "data") as server,
        contextlib.closing(Client(server.port)) as client,
    ):
        topic_type = wire.OFFSET_COMMIT.Request.Topic
        part = topic_type.Partition(
            partition_index=0, committed_offset=5, committed_metadata=""
        )
        commit = wire.OFFSET_COMMIT.Request(
            group_id="g",
            generation_id_or_member_epoch=-1,
            member_id="",
            topics=[topic_type(name="t", partitions=[part])],
        )
        server.logdir.create_topic("t")
        assert (
            client.ask(wire.OFFSET_COMMIT, 7, commit).topics[0].partitions[0].error_code
            == 0
        )
        server.logdir.delete_topic("t")
        server.logdir.create_topic("t")
        response = client.ask(
            wire.OFFSET_FETCH, 6, wire.OFFSET_FETCH.Request(group_id="g", topics=None)
        )
        assert response.topics == []


def test_deleting_the_offsets_topic_removes_all_groups(
    group_harness: GroupHarness,
) -> None:
    group_harness.form(1)
    parked = group_harness.join()
    group_harness.logdir.delete_topic(OFFSETS_TOPIC)
    group_harness.groups.topics_deleted({OFFSETS_TOPIC}, group_harness.now_ms)
    assert code_of(parked) == codes.NOT_COORDINATOR
    assert group_harness.describe().group_state == machine.DEAD
    assert code_of(group_harness.commit({("orders", 0): 1})) == 0
    assert group_harness.committed() == {("orders", 0): 1}
    group_harness.sleep(10 * REBALANCE_MS)


def test_offsets_expire_a_week_after_the_last_member_left(
    group_harness: GroupHarness,
) -> None:
    ids, generation = group_harness.form(1, session_ms=1_800_000)
    group_harness.commit({("orders", 0): 1}, member_id=ids[0], generation=generation)
    for _ in range(8 * 48):
        group_harness.sleep(1_800_000)
        group_harness.heartbeat(ids[0], generation)
        if group_harness.describe().group_state != machine.STABLE:
            break
        group_harness.heartbeat(ids[0], generation)
    assert group_harness.committed() == {("orders", 0): 1}
    group_harness.leave((ids[0], None))
    group_harness.sleep(7 * DAY_MS - 600_000)
    assert group_harness.committed() == {("orders", 0): 1}
    group_harness.sleep(1_200_000)
    assert (
        group_harness.committed() == {}
        and group_harness.describe().group_state == machine.DEAD
    )
    group_harness.restart()
    assert (
        group_harness.committed() == {}
        and group_harness.describe().group_state == machine.DEAD
    )


def test_expiration_by_commit_time_retention_and_subscription(
    group_harness: GroupHarness,
) -> None:
    """Commits without a group expire by their own time, those with a requested
    retention by that retention, and offsets of topics once no subscriber is left.
    """
    group_harness.commit({("orders", 0): 1}, group="simple")
    group_harness.commit(
        {("orders", 0): 1}, group="brief", version=2, retention_time_ms=DAY_MS
    )
    group_harness.commit({("orders", 0): 1, ("other", 0): 1}, group="mixed")
    group_harness.restart()
    group_harness.join(
        group="mixed", protocols={"range": subscription("other")}, session_ms=1_800_000
    )
    group_harness.sync("cli-0001", 1, group="mixed")

    def pass_days(days: int) -> None:
        for _ in range(days * 72):
            group_harness.sleep(1_200_000)
            group_harness.heartbeat("cli-0001", 1, group="mixed")

    pass_days(2)
    assert group_harness.committed("simple") and not group_harness.committed("brief")
    group_harness.commit({("orders", 1): 1}, group="simple")
    pass_days(6)
    assert group_harness.committed("simple") == {("orders", 1): 1}
    assert group_harness.committed("mixed") == {("other", 0): 1}
    group_harness.join(group="mixed", protocols={"range": b"?"})
    assert group_harness.committed("mixed") == {("other", 0): 1}
