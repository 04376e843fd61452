"""Assignors of consumer groups: their guarantees for random members and topics, and
cases worked out by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logcore.coordination.consumer_assignors import (
    ASSIGNORS,
    Subscriber,
    Targets,
    range_,
    uniform,
)
from logcore.format.consumer_group_records import Partition
from support.coordinator_simulation import partitions_of, topic_id

NAMES = "uvwxyz"


def member(
    member_id: str,
    topics: str = "t",
    target: frozenset[Partition] = frozenset(),
    instance_id: str | None = None,
) -> Subscriber:
    return Subscriber(
        member_id=member_id,
        instance_id=instance_id,
        topics=frozenset(map(topic_id, topics)),
        target=target,
    )


def counts_of(**counts: int) -> dict[bytes, int]:
    return {topic_id(name): count for name, count in counts.items()}


def sizes(targets: Targets) -> list[int]:
    return [len(partitions) for partitions in targets.values()]


# -- any members, any topics -----------------------------------------------------------

Case = tuple[list[Subscriber], dict[bytes, int]]


@st.composite
def cases(draw: st.DrawFn, same: bool = False) -> Case:
    """Draw members with disjoint targets. Some targets are of topics that the member
    does not subscribe to, or that were deleted.
    """
    counts = {
        topic_id(name): draw(st.integers(0, 7))
        for name in NAMES[: draw(st.integers(1, 4))]
    }
    topics = sorted(counts)
    count = draw(st.integers(1, 6))
    shared = draw(st.sets(st.sampled_from(topics)))
    owners = {}
    for topic in [*topics, topic_id("gone")]:
        for number in range(counts.get(topic, 2) + 1):
            owners[topic, number] = draw(st.integers(-1, count - 1))
    members = []
    for place in range(count):
        wanted = shared if same else draw(st.sets(st.sampled_from(topics)))
        target = frozenset(
            partition for partition, owner in owners.items() if owner == place
        )
        members.append(
            Subscriber(member_id=f"m{place}", topics=frozenset(wanted), target=target)
        )
    return members, counts


def check_whole(
    members: Sequence[Subscriber], counts: Mapping[bytes, int], targets: Targets
) -> None:
    """Check that every subscribed partition has one member, and that this member
    subscribes to it.
    """
    assert list(targets) == [each.member_id for each in members]
    given_out = [
        partition for partitions in targets.values() for partition in partitions
    ]
    wanted = {topic for each in members for topic in each.topics}
    assert sorted(given_out) == sorted(
        (topic, number) for topic in wanted for number in range(counts[topic])
    )
    for each in members:
        assert {topic for topic, _ in targets[each.member_id]} <= each.topics


def check_even(members: Sequence[Subscriber], targets: Targets) -> None:
    """Check that no member has two partitions more than another member that could take
    over one of the partitions.
    """
    for rich in members:
        for poor in members:
            if len(targets[rich.member_id]) > len(targets[poor.member_id]) + 1:
                assert not {topic for topic, _ in targets[rich.member_id]} & poor.topics


@pytest.mark.long
@pytest.mark.parametrize("assignor", sorted(ASSIGNORS))
@given(cases())
def test_every_subscribed_partition_has_one_subscribed_member(
    assignor: str, case: Case
) -> None:
    members, counts = case
    check_whole(members, counts, ASSIGNORS[assignor](members, counts))


@given(st.one_of(cases(), cases(same=True)))
def test_uniform_is_even(case: Case) -> None:
    members, counts = case
    check_even(members, uniform(members, counts))


@given(st.one_of(cases(), cases(same=True)))
def test_uniform_keeps_its_own_result(case: Case) -> None:
    members, counts = case
    targets = uniform(members, counts)
    again = [
        Subscriber(
            member_id=each.member_id, topics=each.topics, target=targets[each.member_id]
        )
        for each in members
    ]
    assert uniform(again, counts) == targets


@given(cases(same=True))
def test_uniform_moves_no_more_partitions_than_needed(case: Case) -> None:
    """If all members subscribe to the same topics, each member keeps up to `least` of
    its partitions, and up to `extra` members with more partitions keep one more.
    """
    members, counts = case
    targets = uniform(members, counts)
    wanted = members[0].topics
    total = sum(counts[topic] for topic in wanted)
    had = [
        sum(topic in wanted and number < counts[topic] for topic, number in each.target)
        for each in members
    ]
    least, extra = divmod(total, len(members))
    most = sum(min(count, least) for count in had) + min(
        extra, sum(count > least for count in had)
    )
    assert sum(len(each.target & targets[each.member_id]) for each in members) == most


@given(cases())
def test_range_assigns_adjacent_partitions(case: Case) -> None:
    members, counts = case
    for partitions in range_(members, counts).values():
        for topic in {topic for topic, _ in partitions}:
            numbers = sorted(number for each, number in partitions if each == topic)
            assert numbers == list(range(numbers[0], numbers[-1] + 1))


# -- by hand ---------------------------------------------------------------------------


def test_new_member_gets_its_share_and_no_other_partition_moves() -> None:
    targets = uniform(
        [member("A", target=partitions_of("t", 0, 1, 2, 3)), member("B")],
        counts_of(t=4),
    )
    assert targets == {"A": partitions_of("t", 0, 1), "B": partitions_of("t", 2, 3)}


def test_member_with_an_extra_partition_keeps_it() -> None:
    members = [
        member("A", target=partitions_of("t", 0)),
        member("B", target=partitions_of("t", 1, 2)),
        member("C"),
    ]
    assert uniform(members, counts_of(t=4)) == {
        "A": partitions_of("t", 0),
        "B": partitions_of("t", 1, 2),
        "C": partitions_of("t", 3),
    }


def test_extra_partitions_are_assigned_to_distinct_members() -> None:
    targets = uniform([member("A"), member("B"), member("C")], counts_of(t=5))
    assert sizes(targets) == [1, 2, 2]


def test_members_with_different_topics_are_balanced_along_chains() -> None:
    """A has three partitions, C has none, and they share no topic. B passes a
    partition to C, and takes over a partition of A.
    """
    members = [
        member("A", "u", partitions_of("u", 0, 1, 2)),
        member("B", "uv", partitions_of("v", 0, 1)),
        member("C", "v"),
    ]
    targets = uniform(members, counts_of(u=3, v=2))
    assert sizes(targets) == [2, 2, 1]
    assert targets["A"] < partitions_of("u", 0, 1, 2)


def test_member_without_topics_gets_no_partition() -> None:
    for assignor in ASSIGNORS.values():
        assert sizes(assignor([member("A"), member("B", "")], counts_of(t=3))) == [3, 0]
    assert uniform([], counts_of(t=3)) == {}


def test_range_orders_static_members_first_and_others_by_id() -> None:
    members = [member("A"), member("C", instance_id="z"), member("B", instance_id="y")]
    assert range_(members, counts_of(t=4)) == {
        "A": partitions_of("t", 3),
        "C": partitions_of("t", 2),
        "B": partitions_of("t", 0, 1),
    }


def test_uniform_with_a_thousand_members_and_different_topics() -> None:
    counts = counts_of(**dict.fromkeys(NAMES[:5], 200))
    members = [
        member(f"m{place:04}", NAMES[place % 5] + NAMES[(place + 1) % 5])
        for place in range(1_000)
    ]
    targets = uniform(members, counts)
    check_whole(members, counts, targets)
    assert set(sizes(targets)) == {1}


def test_large_topic_with_one_subscriber_does_not_block_others() -> None:
    counts = counts_of(t=1_000, u=300)
    members = [member("rich"), *(member(f"m{place:03}", "u") for place in range(300))]
    assert set(sizes(uniform(members, counts))) == {1_000, 1}
