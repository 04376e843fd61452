"""Assignors, compared with the results of Kafka's classes
(tests/data/vectors/assignors.json), and the bytes of Kafka's group protocol.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logcore.consumer.assignors import ASSIGNORS, COOPERATIVE_STICKY, STICKY
from logcore.consumer.topic_partition import Member, TopicPartition
from logcore.format.group_records import (
    Subscription,
    assignment_value,
    read_assignment,
    read_subscription,
    subscription_value,
)
from support.vectors import VECTORS

VECTOR_FILE: dict[str, Any] = json.loads((VECTORS / "assignors.json").read_text())
CASES = [case for case in VECTOR_FILE["cases"] if case["assignor"] in ASSIGNORS]


def member(vector: dict[str, Any]) -> Member:
    owned = [
        TopicPartition(topic, number)
        for topic, numbers in vector.get("owned", {}).items()
        for number in numbers
    ]
    topics = frozenset(vector["topics"])
    return Member(
        vector["id"],
        topics,
        vector.get("instance_id"),
        tuple(owned),
        vector.get("generation", -1),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_assignments_equal_the_assignments_of_kafka(case: dict[str, Any]) -> None:
    members = [member(vector) for vector in case["members"]]
    assignment = ASSIGNORS[case["assignor"]].assign(case["topics"], members)
    if case["exact"]:
        expected = {
            member_id: sorted(
                TopicPartition(topic, number)
                for topic, numbers in numbers_by_topic.items()
                for number in numbers
            )
            for member_id, numbers_by_topic in case["assignment"].items()
        }
        assert {
            member_id: sorted(partitions)
            for member_id, partitions in assignment.items()
        } == expected
        return
    assert sorted(map(len, assignment.values())) in case["sizes"]
    kept_count = sum(
        len(set(assignment[member.member_id]) & set(member.owned)) for member in members
    )
    assert kept_count in case["kept"]


NAMES = st.sampled_from(["a", "b", "c"])


@st.composite
def groups(draw: st.DrawFn) -> tuple[dict[str, int], list[Member]]:
    counts = draw(st.dictionaries(NAMES, st.integers(1, 6), min_size=1))
    members = []
    for number in range(draw(st.integers(1, 5))):
        topics = draw(st.frozensets(st.sampled_from([*counts, "missing"]), min_size=1))
        all_partitions = [
            TopicPartition(topic, number)
            for topic, count in counts.items()
            for number in range(count)
        ]
        owned = draw(st.lists(st.sampled_from(all_partitions), unique=True, max_size=5))
        members.append(
            Member(
                f"m{number}",
                topics,
                None,
                tuple(owned),
                draw(st.integers(1, 3)) if owned else -1,
            )
        )
    return counts, members


@given(groups(), st.sampled_from(sorted(ASSIGNORS)))
def test_each_partition_has_one_owner(
    group: tuple[dict[str, int], list[Member]], name: str
) -> None:
    counts, members = group
    assignment = ASSIGNORS[name].assign(counts, members)
    assigned = [partition for owned in assignment.values() for partition in owned]
    assert len(assigned) == len(set(assigned))
    topics = {member.member_id: member.topics for member in members}
    assert all(
        partition.topic in topics[member_id]
        for member_id, owned in assignment.items()
        for partition in owned
    )
    assignable = {
        TopicPartition(topic, number)
        for topic, count in counts.items()
        for number in range(count)
        if any(topic in member.topics for member in members)
    }
    if name != "cooperative-sticky":
        assert set(assigned) == assignable


def test_former_owner_without_subscription_gets_no_partition() -> None:
    """A partition moved back to the member that had owned it in an earlier generation,
    although that member had unsubscribed from the topic.
    """
    topic_partition = TopicPartition("b", 0)
    members = [
        Member("m0", frozenset({"a", "b"}), None, (), -1),
        Member("m1", frozenset({"a", "b"}), None, (TopicPartition("a", 0),), 1),
        Member("m2", frozenset({"a"}), None, (topic_partition,), 1),
        Member("m3", frozenset({"a"}), None, (topic_partition,), 2),
    ]
    assignment = STICKY.assign({"a": 1, "b": 3}, members)
    for member in members:
        assert {
            assigned.topic for assigned in assignment[member.member_id]
        } <= member.topics


@given(groups())
def test_second_assignment_moves_no_partition(
    group: tuple[dict[str, int], list[Member]],
) -> None:
    counts, members = group
    first = STICKY.assign(counts, members)
    members_with_owned = [
        Member(member.member_id, member.topics, None, tuple(first[member.member_id]), 7)
        for member in members
    ]
    second = STICKY.assign(counts, members_with_owned)
    assert {name: sorted(owned) for name, owned in second.items()} == {
        member_id: sorted(owned) for member_id, owned in first.items()
    }


@given(groups())
def test_cooperative_rounds_assign_all_partitions_in_the_end(
    group: tuple[dict[str, int], list[Member]],
) -> None:
    """A member gets no partition that another member still owns. Once all owners have
    revoked their partitions, all partitions are assigned.
    """
    counts, members = group
    owned = {member.member_id: frozenset(member.owned) for member in members}
    generation = 7
    for _ in range(3):
        assignment = COOPERATIVE_STICKY.assign(counts, members)
        for member_id, partitions in assignment.items():
            for partition in partitions:
                newest = max(
                    (other.generation for other in members if partition in other.owned),
                    default=-1,
                )
                newest_claimants = {
                    other.member_id
                    for other in members
                    if partition in other.owned and other.generation == newest
                }
                assert newest_claimants <= {member_id}
        generation += 1
        owned = {
            member_id: frozenset(partitions)
            for member_id, partitions in assignment.items()
        }
        members = [
            Member(
                member.member_id,
                member.topics,
                None,
                tuple(owned[member.member_id]),
                generation,
            )
            for member in members
        ]
    all_partitions = {
        TopicPartition(topic, number)
        for topic, count in counts.items()
        for number in range(count)
        if any(topic in member.topics for member in members)
    }
    assert set().union(*owned.values()) == all_partitions


def test_subscription_has_the_bytes_of_kafka() -> None:
    vectors = VECTOR_FILE["protocol"]
    owned = (("a", 0), ("a", 2), ("b", 1))
    for version in range(4):
        parsed = read_subscription(bytes.fromhex(vectors[f"subscription_v{version}"]))
        assert parsed is not None
        assert (parsed.topics, parsed.user_data) == (("a", "b"), b"\1\2")
        assert parsed.owned == (owned if version >= 1 else ())
        assert parsed.generation == (7 if version >= 2 else -1)
    assert (
        subscription_value(Subscription(("a",))).hex()
        == vectors["subscription_v3_minimal"]
    )
    packed = subscription_value(Subscription(("a", "b"), b"\1\2", owned, 7)).hex()
    assert packed == vectors["subscription_v3"].removesuffix("00057261636b31") + "ffff"


def test_assignment_has_the_bytes_of_kafka() -> None:
    vectors = VECTOR_FILE["protocol"]
    owned = (("a", 0), ("a", 2), ("b", 1))
    for version in range(4):
        assert (
            read_assignment(bytes.fromhex(vectors[f"assignment_v{version}"])) == owned
        )
    assert assignment_value(owned).hex() == vectors["assignment_v3"]
    assert assignment_value(()).hex() == vectors["assignment_empty"]
    assert read_assignment(b"") == ()
    assert read_assignment(b"\0\3\0\0") is None
