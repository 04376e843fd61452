"""Groups of the consumer protocol (KIP-848), in tables: the answer to each heartbeat,
and the records that are stored.

There is no broker and no log: time is a number, and writes finish at once unless a test
holds them.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from logcore.coordination import consumer_transitions
from logcore.coordination.consumer_group import AWAY
from logcore.coordination.consumer_transitions import check_beat
from logcore.coordination.effects import Reply
from logcore.coordination.group_requests import (
    Beat,
    Committer,
    GroupError,
    JoinRefused,
)
from logcore.format.consumer_group_records import (
    ConsumerKey,
    Current,
    GroupEpoch,
    MemberState,
    RecordKind,
    Resolved,
    consumer_key,
    consumer_value,
)
from logcore.format.group_records import Committed, StoredGroup, group_key, group_value
from support.consumerworld import REBALANCE_MS, SESSION_MS, T0, World, of, topic_id

STABLE = MemberState.STABLE
UNREVOKED = MemberState.UNREVOKED
UNRELEASED = MemberState.UNRELEASED


@pytest.fixture
def world() -> World:
    return World()


def form_pair(world: World) -> None:
    """Form a group of A and B at epoch 2, each with two partitions."""
    world.beat("A", 0)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.beat("A", 1, owned=of("t", 0, 1))
    assert world.beat("B", 2) == (2, [2, 3])


# -- observed with Kafka
# ----------------------------------------------------------------


def test_six_steps_observed_with_kafka(world: World) -> None:
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    assert world.beat("B", 0) == (2, [])
    assert world.beat("A", 1, owned=of("t", 0, 1, 2, 3)) == (1, [0, 1])
    assert world.group().state == "Reconciling"
    assert world.consumers().targets["B"] == of("t", 2, 3)
    assert world.beat("A", 1) == (1, None)
    assert world.beat("A", 1, owned=of("t", 0, 1)) == (2, None)
    assert world.beat("B", 2) == (2, [2, 3])
    assert world.group().state == "Stable"


def test_empty_owned_list_confirms_too(world: World) -> None:
    world.beat("A", 0)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    assert world.beat("A", 1, owned=of("t")) == (2, None)
    assert world.beat("B", 2) == (2, [2, 3])


# -- before the group is checked
# --------------------------------------------------------

JOINS: dict[str, Any] = {
    "member_epoch": 0,
    "rebalance_timeout_ms": 1_000,
    "owned": frozenset(),
    "topic_names": ("t",),
}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({**JOINS}, None),
        ({**JOINS, "group_id": ""}, "INVALID_REQUEST"),
        ({**JOINS, "instance_id": ""}, "INVALID_REQUEST"),
        ({**JOINS, "rack_id": ""}, "INVALID_REQUEST"),
        ({**JOINS, "member_id": ""}, "INVALID_REQUEST"),
        ({**JOINS, "member_id": "m" * 40_000}, "INVALID_REQUEST"),
        ({**JOINS, "rebalance_timeout_ms": -1}, "INVALID_REQUEST"),
        ({**JOINS, "owned": None}, "INVALID_REQUEST"),
        ({**JOINS, "owned": of("t", 1)}, "INVALID_REQUEST"),
        ({**JOINS, "topic_names": None}, "INVALID_REQUEST"),
        ({**JOINS, "topic_names": None, "pattern": "t.*"}, None),
        ({**JOINS, "topic_names": ()}, None),
        ({**JOINS, "assignor": "sticky"}, "UNSUPPORTED_ASSIGNOR"),
        ({**JOINS, "assignor": "range"}, None),
        ({"member_epoch": 7}, None),
        ({"member_epoch": -1}, None),
        ({"member_epoch": -2}, "INVALID_REQUEST"),
        ({"member_epoch": -2, "instance_id": "i"}, None),
        ({"member_epoch": -3, "instance_id": "i"}, "INVALID_REQUEST"),
    ],
)
def test_heartbeat_fields_are_checked_first(
    fields: dict[str, Any], error: str | None
) -> None:
    refused = check_beat(
        Beat(**{"group_id": "g", "member_id": "m", **fields}), may_lack_id=False
    )
    assert (None if refused is None else refused.error.name) == error


@pytest.mark.parametrize(("epoch", "is_refused"), [(0, False), (1, True), (-1, True)])
def test_only_a_join_of_the_first_version_may_lack_an_id(
    epoch: int, is_refused: bool
) -> None:
    beat = Beat(**{"group_id": "g", "member_id": "", **JOINS, "member_epoch": epoch})
    assert (check_beat(beat, may_lack_id=True) is not None) == is_refused


# -- which group, which member ---------------------------------------------------------


def test_only_a_join_creates_a_group(world: World) -> None:
    for epoch in (1, -1):
        assert world.refused("A", epoch) == "GROUP_ID_NOT_FOUND"
    assert world.refused("A", -2, instance_id="i") == "GROUP_ID_NOT_FOUND"
    assert world.coordinator.all() == []
    world.beat("A", 0)
    assert world.refused("B", 1) == "UNKNOWN_MEMBER_ID"
    assert world.refused("B", -1) == "UNKNOWN_MEMBER_ID"


def test_full_group_refuses_a_new_member() -> None:
    world = World(consumer_max_size=1)
    world.beat("A", 0)
    assert world.refused("B", 0) == "GROUP_MAX_SIZE_REACHED"
    assert world.beat("A", 1) == (1, None)
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("epoch", "owned", "answer"),
    [
        (2, None, (2, None)),
        (3, None, None),
        (1, None, None),
        (1, of("t", 2, 3), (2, None)),
        (1, of("t", 2), (2, None)),
        (1, of("t", 0), None),
        (1, of("t"), (2, None)),
    ],
)
def test_heartbeat_epoch_is_current_or_one_answer_old(
    world: World, epoch: int, owned: Any, answer: tuple[int, None] | None
) -> None:
    world.beat("A", 0)
    # B then has an epoch before its present one.
    world.beat("B", 0, topic_names=[])
    assert world.consumers().currents["B"].member_epoch == 1
    world.beat("B", 1, topic_names=["t"])
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.beat("A", 1, owned=of("t", 0, 1))
    world.beat("B", 2)
    world.consumers().currents["B"] = Current(
        member_epoch=2, previous_epoch=1, assigned=of("t", 2, 3)
    )
    if answer is None:
        assert world.refused("B", epoch, owned=owned) == "FENCED_MEMBER_EPOCH"
    else:
        assert world.beat("B", epoch, owned=owned) == answer


def test_repeated_join_is_answered_until_the_member_advances(
    world: World,
) -> None:
    """Otherwise a delayed join request would count as a report that the member owns no
    partition.
    """
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    assert world.refused("A", 0) == "FENCED_MEMBER_EPOCH"
    assert world.consumers().owners[topic_id("t"), 3] == "A"


# -- static members --------------------------------------------------------------------


def test_static_member_leaves_temporarily_and_is_replaced(
    world: World,
) -> None:
    world.beat("A", 0, instance_id="i")
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3), instance_id="i")
    world.beat("A", 1, owned=of("t", 0, 1), instance_id="i")
    world.beat("B", 2)
    assert world.beat("A", -2, instance_id="i") == (-2, None)
    assert world.consumers().epoch == 2, "no other member gets its partitions"
    assert world.consumers().owners[topic_id("t"), 0] == "A"
    before = len(world.batches)
    assert world.beat("A", -2, instance_id="i") == (-2, None)
    assert len(world.batches) == before
    assert world.beat("C", 0, instance_id="i") == (2, [0, 1])
    assert [(kind, name) for kind, name, _ in world.last_batch()] == [
        (RecordKind.CURRENT, "A"),
        (RecordKind.TARGET, "A"),
        (RecordKind.MEMBER, "A"),
        (RecordKind.MEMBER, "C"),
        (RecordKind.TARGET, "C"),
        (RecordKind.CURRENT, "C"),
        (RecordKind.CURRENT, "C"),
    ]
    assert world.refused("A", 2, instance_id="i") == "FENCED_INSTANCE_ID"
    assert world.beat("B", 2) == (2, None)
    assert world.group().state == "Stable"


def test_static_instance_has_one_member(world: World) -> None:
    world.beat("A", 0, instance_id="i")
    assert world.refused("B", 0, instance_id="i") == "UNRELEASED_INSTANCE_ID"
    assert world.refused("B", 1, instance_id="i") == "FENCED_INSTANCE_ID"
    assert world.refused("B", -1, instance_id="i") == "FENCED_INSTANCE_ID"
    assert world.refused("B", -2, instance_id="i") == "FENCED_INSTANCE_ID"
    assert world.refused("B", 1, instance_id="other") == "UNKNOWN_MEMBER_ID"
    assert world.refused("B", -2, instance_id="other") == "UNKNOWN_MEMBER_ID"
    assert world.beat("A", 0, instance_id="i") == (1, [0, 1, 2, 3]), (
        "its own answer was lost"
    )
    world.beat("A", 1, topic_names=["t", "u"], instance_id="i")
    assert world.refused("A", 0, instance_id="i") == "UNRELEASED_INSTANCE_ID"
    world.beat("A", -2, instance_id="i")
    assert world.beat("A", 0, instance_id="i") == (3, [0, 1, 2, 3]), (
        "it subscribes to other topics than before"
    )


def test_static_member_that_does_not_return_is_removed(world: World) -> None:
    world.beat("A", 0, instance_id="i")
    world.beat("A", -2, instance_id="i")
    assert world.consumers().current("A").member_epoch == AWAY
    world.sleep(SESSION_MS)
    assert world.group().state == "Empty"


def test_leaving_static_member_releases_revoked_partitions(world: World) -> None:
    world.beat("A", 0, instance_id="i")
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3), instance_id="i")
    world.beat("A", -2, instance_id="i")
    assert world.beat("B", 2) == (2, [2, 3])


# -- reconciliation of a member --------------------------------------------------------

#: (state, member epoch, assigned, revoking), target, owned by others, owned list ->
#: (state, epoch, assigned, revoking) The epoch of the targets is 7.
RECONCILED: list[tuple[Any, ...]] = [
    # STABLE
    ((STABLE, 7, [0, 1], []), [0], [], None, (STABLE, 7, [0, 1], [])),
    ((STABLE, 5, [0, 1], []), [0], [], None, (UNREVOKED, 5, [0], [1])),
    ((STABLE, 5, [0, 1], []), [0], [], [0, 1], (UNREVOKED, 5, [0], [1])),
    ((STABLE, 5, [0, 1], []), [0], [], [0], (STABLE, 7, [0], [])),
    ((STABLE, 5, [0, 1], []), [0, 2], [], [0], (STABLE, 7, [0, 2], [])),
    ((STABLE, 5, [0], []), [0, 2], [], None, (STABLE, 7, [0, 2], [])),
    ((STABLE, 5, [0], []), [0, 2, 3], [3], None, (UNRELEASED, 7, [0, 2], [])),
    ((STABLE, 5, [0], []), [0, 3], [3], None, (UNRELEASED, 7, [0], [])),
    ((STABLE, 5, [0], []), [0], [], None, (STABLE, 7, [0], [])),
    # UNREVOKED
    ((UNREVOKED, 5, [0], [1]), [0], [], None, (UNREVOKED, 5, [0], [1])),
    ((UNREVOKED, 5, [0], [1]), [0], [], [0, 1], (UNREVOKED, 5, [0], [1])),
    ((UNREVOKED, 5, [0], [1]), [0], [], [0], (STABLE, 7, [0], [])),
    ((UNREVOKED, 5, [0], [1]), [0], [], [], (STABLE, 7, [0], [])),
    ((UNREVOKED, 5, [0], [1]), [2], [], [0], (UNREVOKED, 6, [], [0])),
    # The partition that it released is still its own.
    (
        (UNREVOKED, 5, [0], [1]),
        [0, 1],
        [],
        [0],
        (UNRELEASED, 7, [0], []),
    ),
    ((UNREVOKED, 7, [0], [1]), [0], [], None, (UNREVOKED, 7, [0], [1])),
    # UNRELEASED
    ((UNRELEASED, 7, [0], []), [0, 3], [3], None, (UNRELEASED, 7, [0], [])),
    ((UNRELEASED, 7, [0], []), [0, 3], [], None, (STABLE, 7, [0, 3], [])),
    ((UNRELEASED, 6, [0], []), [3], [], None, (UNREVOKED, 6, [], [0])),
    ((UNRELEASED, 6, [0], []), [0, 2, 3], [3], None, (UNRELEASED, 7, [0, 2], [])),
    # unknown
    ((MemberState.UNKNOWN, 3, [0], []), [0], [], [0], None),
    ((MemberState.UNKNOWN, 3, [0], []), [0], [], None, None),
    ((MemberState.UNKNOWN, 3, [0], []), [0], [], [], (STABLE, 7, [0], [])),
]


@pytest.mark.parametrize(("before", "target", "others", "owned", "after"), RECONCILED)
def test_reconciliation_of_a_member(
    world: World,
    before: Any,
    target: list[int],
    others: list[int],
    owned: list[int] | None,
    after: Any,
) -> None:
    world.beat("A", 0)
    consumers = world.consumers()
    state, epoch, assigned, revoking = before
    known = Current(
        member_epoch=epoch,
        previous_epoch=1,
        state=state,
        assigned=of("t", *assigned),
        revoking=of("t", *revoking),
    )
    consumers.put((RecordKind.CURRENT, "A"), known)
    consumers.put((RecordKind.CURRENT, "B"), Current(assigned=of("t", *others)))
    consumers.put((RecordKind.TARGET, "A"), of("t", *target))
    consumers.put((RecordKind.TARGET_EPOCH, ""), 7)
    found = consumers.reconciled("A", None if owned is None else of("t", *owned))
    if after is None:
        assert found is None
        return
    assert found is not None
    state, member_epoch, assigned, revoking = after
    if after == before:
        assert found is known
        return
    assert found == Current(
        member_epoch=member_epoch,
        previous_epoch=epoch,
        state=state,
        assigned=of("t", *assigned),
        revoking=of("t", *revoking),
    )


def test_member_of_an_unknown_state_starts_over(world: World) -> None:
    world.beat("A", 0)
    fact = (RecordKind.CURRENT, "A")
    world.consumers().put(
        fact, Current(member_epoch=1, state=MemberState.UNKNOWN, assigned=of("t", 0))
    )
    assert world.refused("A", 1, owned=of("t", 0)) == "FENCED_MEMBER_EPOCH"
    assert world.beat("A", 1, owned=of("t")) == (1, [0, 1, 2, 3])


# -- contents of an answer -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "gets_assignment"),
    [
        ({}, False),
        ({"owned": of("t", 0, 1, 2, 3)}, False),
        ({"topic_names": ["t"], "rebalance_timeout_ms": REBALANCE_MS}, False),
        ({"topic_names": ["t"], "owned": of("t", 0, 1, 2, 3)}, False),
        ({"rebalance_timeout_ms": REBALANCE_MS, "owned": of("t", 0, 1, 2, 3)}, False),
        (
            {
                "topic_names": ["t"],
                "rebalance_timeout_ms": REBALANCE_MS,
                "owned": of("t", 0, 1, 2, 3),
            },
            True,
        ),
        (
            {
                "pattern": "",
                "rebalance_timeout_ms": REBALANCE_MS,
                "owned": of("t", 0, 1, 2, 3),
            },
            True,
        ),
    ],
)
def test_full_request_gets_the_full_assignment(
    world: World, fields: dict[str, Any], gets_assignment: bool
) -> None:
    world.beat("A", 0)
    assert world.beat("A", 1, **fields) == (
        1,
        [0, 1, 2, 3] if gets_assignment else None,
    )


def test_answer_contains_the_interval_except_when_leaving(world: World) -> None:
    assert world.replies[world.send("A", 0)].heartbeat_interval_ms == 5_000
    left = world.replies[world.send("A", -1)]
    assert (left.member_epoch, left.heartbeat_interval_ms, left.assigned) == (
        -1,
        0,
        None,
    )


# -- changes that raise the epoch ------------------------------------------------------


def test_epoch_rises_with_members_subscriptions_and_topics(world: World) -> None:
    def epoch() -> int:
        return world.consumers().epoch

    world.set_topic("u", 2)
    world.beat("A", 0)
    assert epoch() == 1
    world.beat("A", 1, rebalance_timeout_ms=5, assignor="range", rack_id="r")
    assert epoch() == 1
    world.beat("A", 1, topic_names=["u", "t", "t"])
    assert epoch() == 2
    world.beat("A", 2, topic_names=["t", "u"])
    assert epoch() == 2, "in another order"
    world.set_topic("other", 1)
    world.beat("A", 2)
    assert epoch() == 2, "not a subscribed topic"
    world.set_topic("u", 3)
    world.beat("A", 2)
    assert epoch() == 3, "a topic has grown"
    world.set_topic("u", 0)
    world.beat("A", 3, owned=frozenset())
    assert epoch() == 4, "a topic was deleted"
    world.set_topic("u", 3)
    world.beat("A", 4)
    assert epoch() == 5, "the topic exists again"
    world.beat("B", 0)
    assert epoch() == 6
    world.beat("B", -1)
    assert epoch() == 7


def test_topic_created_later_is_assigned(world: World) -> None:
    world.set_topic("t", 0)
    assert world.beat("A", 0) == (1, [])
    world.set_topic("t", 2)
    assert world.beat("A", 1) == (2, [0, 1])


# -- regular expressions ---------------------------------------------------------------


def test_pattern_matches_whole_names_including_later_topics(world: World) -> None:
    world.set_topic("tt", 1)
    assert world.beat("A", 0, pattern="t") == (1, [0, 1, 2, 3])
    assert world.beat("A", 1, pattern="t+") == (2, [0, 0, 1, 2, 3])
    assert set(world.consumers().patterns) == {"t+"}
    world.set_topic("ttt", 1)
    assert world.beat("A", 2) == (3, [0, 0, 0, 1, 2, 3])
    assert world.consumers().patterns["t+"] == Resolved(("t", "tt", "ttt"), 3, T0)
    world.beat("A", 3, pattern="")
    assert world.consumers().subscribed() == frozenset()
    assert not world.consumers().patterns


def test_names_and_a_pattern_are_combined(world: World) -> None:
    world.set_topic("u", 1)
    world.beat("A", 0, pattern="t", topic_names=["u"])
    assert world.consumers().subscribed() == {"t", "u"}


def test_invalid_pattern_is_refused_without_a_change(world: World) -> None:
    assert world.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert world.coordinator.all() == [] and not world.batches
    world.beat("A", 0)
    before = len(world.batches)
    assert world.refused("A", 1, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert world.consumers().members["A"].pattern is None
    assert len(world.batches) == before
    assert world.beat("A", 1) == (1, None)


def test_pattern_stored_unresolved_is_resolved_later(world: World) -> None:
    """Kafka resolves patterns in the background, and may stop before it has stored the
    result.
    """
    world.beat("A", 0, pattern="t|u")
    key = consumer_key(ConsumerKey(RecordKind.PATTERN, "g", "t|u"))
    world.batches.append(((key, None),))
    world.restart()
    world.set_topic("u", 1)
    world.beat("A", 1)
    assert world.consumers().patterns["t|u"].topics == ("t", "u")


def test_unreadable_pattern_keeps_its_topics_and_blocks_no_member(
    world: World,
) -> None:
    world.beat("A", 0, pattern="t")
    fact = (RecordKind.MEMBER, "A")
    member = attrs.evolve(world.consumers().members["A"], pattern="(")
    meant = Resolved(("t",), 1, T0)
    consumers = world.consumers()
    world.batches.append(
        (
            consumers.record(fact, member),
            consumers.record((RecordKind.PATTERN, "("), meant),
        )
    )
    world.restart()
    world.set_topic("tt", 1)
    assert world.beat("B", 0) == (2, [])
    assert world.beat("A", 1) == (1, [0, 1])


def test_records_of_nonexistent_members_are_deleted(world: World) -> None:
    world.beat("A", 0)
    keys = [
        consumer_key(ConsumerKey(kind, "g", "B"))
        for kind in (RecordKind.TARGET, RecordKind.CURRENT)
    ]
    world.batches.append(tuple((key, consumer_value(of("t", 0))) for key in keys[:1]))
    world.batches.append(
        tuple((key, consumer_value(Current(assigned=of("t", 0)))) for key in keys[1:])
    )
    world.restart()
    assert world.consumers().owners[topic_id("t"), 0] == "A"
    world.beat("A", -1)
    assert {(key, None) for key in keys} <= set(world.batches[-1])


def test_pattern_is_deleted_with_its_last_subscriber(world: World) -> None:
    world.beat("A", 0, pattern="t")
    world.beat("B", 0, pattern="t")
    world.beat("B", -1)
    assert "t" in world.consumers().patterns
    world.beat("A", -1)
    assert [
        (kind, name) for kind, name, value in world.last_batch() if value is None
    ] == [
        (RecordKind.CURRENT, "A"),
        (RecordKind.TARGET, "A"),
        (RecordKind.MEMBER, "A"),
        (RecordKind.PATTERN, "t"),
    ]


# -- the assignor ----------------------------------------------------------------------


def test_assignor_is_the_one_that_most_members_request(world: World) -> None:
    world.beat("A", 0)
    assert world.consumers().assignor() == "uniform"
    world.beat("B", 0, assignor="range")
    assert world.consumers().assignor() == "range"
    world.beat("C", 0, assignor="uniform")
    world.beat("D", 0, assignor="uniform")
    assert world.consumers().assignor() == "uniform"


# -- time ------------------------------------------------------------------------------


def test_silent_member_is_removed_and_its_partitions_are_reassigned(
    world: World,
) -> None:
    form_pair(world)
    world.sleep(SESSION_MS - 1)
    world.beat("A", 2)
    world.sleep(1)
    assert set(world.consumers().members) == {"A"}
    assert world.group().state == "Assigning"
    assert world.refused("B", 2) == "UNKNOWN_MEMBER_ID"
    assert world.beat("A", 2) == (3, [0, 1, 2, 3])
    assert [
        (kind, name) for kind, name, _ in world.batches[-2] and world.last_batch()
    ] == [
        (RecordKind.TARGET, "A"),
        (RecordKind.TARGET_EPOCH, ""),
        (RecordKind.CURRENT, "A"),
    ]


def test_only_heartbeats_renew_a_session(world: World) -> None:
    world.beat("A", 0)
    world.sleep(SESSION_MS - 1)
    error, _ = world.coordinator.check_commit(
        Committer("g", 1, "A", None, knows_epochs=True), world.now_ms
    )
    assert error is None
    world.sleep(1)
    assert not world.consumers().members


def test_member_that_does_not_release_in_time_is_removed(world: World) -> None:
    world.beat("A", 0, rebalance_timeout_ms=10_000)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.sleep(9_999)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3), rack_id="r")
    assert "A" in world.consumers().members
    world.sleep(1)
    assert world.refused("A", 1) == "UNKNOWN_MEMBER_ID"
    assert world.beat("B", 2) == (3, [0, 1, 2, 3])


def test_member_that_releases_in_time_is_kept(world: World) -> None:
    world.beat("A", 0, rebalance_timeout_ms=10_000)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.sleep(9_999)
    world.beat("A", 1, owned=of("t", 0, 1))
    world.sleep(10_000)
    assert "A" in world.consumers().members


# -- stored records -------------------------------------------------------------------


def kinds(world: World) -> list[RecordKind]:
    return [kind for kind, _, _ in world.last_batch()]


def test_order_of_stored_records(world: World) -> None:
    world.beat("A", 0)
    assert kinds(world) == [
        RecordKind.MEMBER,
        RecordKind.GROUP,
        RecordKind.TARGET,
        RecordKind.TARGET_EPOCH,
        RecordKind.CURRENT,
    ]
    world.beat("B", 0)
    assert kinds(world) == [
        RecordKind.MEMBER,
        RecordKind.GROUP,
        *[RecordKind.TARGET] * 2,
        RecordKind.TARGET_EPOCH,
        RecordKind.CURRENT,
    ]
    world.beat("B", -1)
    assert kinds(world) == [
        RecordKind.CURRENT,
        RecordKind.TARGET,
        RecordKind.MEMBER,
        RecordKind.GROUP,
    ]
    count = len(world.batches)
    world.beat("A", 1)
    world.beat("A", 3)
    assert len(world.batches) == count + 1, "the second heartbeat changed nothing"


def test_group_is_restored_from_its_records(world: World) -> None:
    form_pair(world)
    world.beat(
        "C",
        0,
        pattern="t",
        instance_id="i",
        rack_id="r",
        client_id="c",
        client_host="/h",
        assignor="range",
    )
    before = world.consumers()
    world.restart()
    after = world.consumers()
    for name in (
        "epoch",
        "metadata_hash",
        "target_epoch",
        "members",
        "targets",
        "currents",
        "patterns",
        "owners",
    ):
        assert getattr(after, name) == getattr(before, name), name
    assert after.static == {"i": "C"}
    assert world.group().state == "Reconciling"
    world.sleep(SESSION_MS - 1)
    assert len(world.consumers().members) == 3, (
        "sessions begin when the group is loaded"
    )
    world.sleep(1)
    assert world.group().state == "Empty"


def test_revocation_timeout_continues_after_a_restart(world: World) -> None:
    world.beat("A", 0, rebalance_timeout_ms=10_000)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.restart()
    world.sleep(10_000)
    assert set(world.consumers().members) == {"B"}


def test_answer_waits_for_all_records_that_it_depends_on(world: World) -> None:
    world.holds = True
    first = world.send("A", 0)
    second = world.send("A", 1)
    third = world.send("B", 0)
    assert not world.replies
    world.disk()
    assert set(world.replies) == {first, second}
    assert world.replies[second].member_epoch == 1
    fourth = world.send("A", 1, owned=of("t", 0, 1, 2, 3))
    world.disk()
    assert set(world.replies) == {first, second, third}
    world.disk()
    assert set(world.replies) == {first, second, third, fourth}


def test_steps_during_a_write_share_the_next_batch(world: World) -> None:
    world.holds = True
    for name in "ABCDEFGH":
        world.send(name, 0)
    assert len(world.stores) == 1
    world.disk()
    assert len(world.stores) == 1
    world.disk()
    assert len(world.replies) == 8 and not world.stores


def test_steps_beyond_the_batch_size_are_stored_one_by_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_transitions, "_BATCH_BYTES", 1)
    world.holds = True
    waiters = [world.send(name, 0) for name in "ABC"]
    for count in range(1, 4):
        assert len(world.stores) == 1
        world.disk()
        assert set(world.replies) == set(waiters[:count])
    assert not world.stores


def test_failed_write_changes_nothing(world: World) -> None:
    form_pair(world)
    facts = world.consumers()
    before = (
        facts.epoch,
        dict(facts.members),
        dict(facts.targets),
        dict(facts.currents),
        dict(facts.owners),
    )
    world.holds = True
    waiters = [world.send("A", -1), world.send("C", 0), world.send("B", 2)]
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    world.disk()
    assert not world.stores
    assert {world.replies[waiter].error.name for waiter in waiters} == {
        "COORDINATOR_NOT_AVAILABLE"
    }
    assert before == (
        facts.epoch,
        facts.members,
        facts.targets,
        facts.currents,
        facts.owners,
    )
    world.disk_error = None
    world.holds = False
    assert world.beat("A", 2) == (2, None)
    world.sleep(SESSION_MS)
    assert world.group().state == "Empty", "the members have their timers again"


def test_records_of_a_failed_write_are_overwritten(world: World) -> None:
    """A sync fails, but the records exist when the log is opened again. Without the new
    record, B would get the partitions of C.
    """
    form_pair(world)
    world.holds = True
    world.send("C", 0)
    lost = world.stores[0].records
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    world.disk()
    world.batches.append(lost)
    world.disk_error = None
    world.holds = False
    world.beat("A", -1)
    world.restart()
    assert set(world.consumers().members) == {"B"}
    assert world.consumers().targets.keys() == {"B"}


def test_answers_wait_until_records_of_a_failed_write_are_overwritten(
    world: World,
) -> None:
    """B joins, and A, whose own join is not answered yet, repeats it, so that half of
    the partitions belong to B. This is on disk although the sync failed. If A were
    answered at once that it has all partitions, as before, and power failed then, the
    next coordinator would assign half of them to B.
    """
    world.holds = True
    world.send("A", 0)
    world.send("B", 0)
    world.send("A", 0)
    world.disk()
    lost = world.stores[0].records
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    world.disk()
    world.batches.append(lost)
    world.disk_error = None
    answer = world.send("A", 0)
    assert answer not in world.replies
    world.disk()
    assert world.replies[answer].assigned == of("t", 0, 1, 2, 3)
    world.restart()
    assert set(world.consumers().members) == {"A"}
    assert set(world.consumers().owners) == of("t", 0, 1, 2, 3)


def test_new_group_whose_write_fails_is_empty(world: World) -> None:
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    assert world.refused("A", 0) == "COORDINATOR_NOT_AVAILABLE"
    world.disk_error = None
    assert world.group().state == "Empty"
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])


# -- between the protocols -------------------------------------------------------------


def join(world: World, member_id: str = "") -> Any:
    return world.replies.get(world.join(member_id))


def commit(world: World, offset: int) -> None:
    committed = {("t", 0): Committed(offset, -1, "", world.now_ms)}
    world.waiters += 1
    world.act(world.coordinator.commit("g", committed, world.waiters))


def test_empty_group_changes_its_protocol_and_keeps_its_offsets(
    world: World,
) -> None:
    commit(world, 7)
    joined = join(world)
    assert joined.generation == 1
    assert world.refused("A", 0) == "GROUP_ID_NOT_FOUND", "it has a member"
    results, effects = world.coordinator.leave(
        "g", [(joined.member_id, None)], world.now_ms
    )
    world.act(effects)
    assert results == [None]
    assert world.refused("A", 1) == "GROUP_ID_NOT_FOUND"
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    assert world.last_batch()[0] == (RecordKind.CLASSIC, "", None)
    assert world.group().offsets["t"][0].offset == 7
    assert join(world) == JoinRefused(GroupError.INCONSISTENT_GROUP_PROTOCOL, "")
    world.restart()
    assert world.group().state == "Stable" and world.group().consumers is not None
    world.beat("A", -1)
    assert join(world, "A") == JoinRefused(GroupError.UNKNOWN_MEMBER_ID, "A")
    assert join(world).generation == 1
    assert world.group().consumers is None
    world.restart()
    assert world.group().consumers is None
    assert world.group().offsets["t"][0].offset == 7


def test_refused_join_keeps_the_protocol_of_an_empty_group(world: World) -> None:
    joined = join(world)
    _, effects = world.coordinator.leave("g", [(joined.member_id, None)], world.now_ms)
    world.act(effects)
    before = len(world.batches)
    assert world.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert len(world.batches) == before
    assert world.group().consumers is None and world.group().generation == 2
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    assert world.last_batch()[0] == (RecordKind.CLASSIC, "", None)


def test_records_of_both_protocols_are_distinguished_by_their_members(
    world: World,
) -> None:
    """Neither protocol's records were deleted when the others were written, because
    another program may write in this way.
    """
    world.beat("A", 0)
    empty = StoredGroup(protocol_type="consumer", generation=3)
    world.batches.append(((group_key("g"), group_value(empty)),))
    world.restart()
    assert set(world.consumers().members) == {"A"}
    world.beat("A", -1)
    assert (group_key("g"), None) in world.batches[-1]
    world.batches.append(((group_key("g"), group_value(empty)),))
    world.restart()
    assert world.group().consumers is None and world.group().generation == 3


def test_record_of_older_brokers_is_deleted(world: World) -> None:
    world.beat("A", 0)
    key = consumer_key(ConsumerKey(RecordKind.TOPICS, "g"))
    world.batches.append(((key, b"\0\0\1\0"),))
    world.restart()
    world.beat("A", -1)
    assert (key, None) in world.batches[-1]


def test_deleting_an_empty_group_deletes_all_its_records(world: World) -> None:
    world.beat("A", 0, pattern="t")
    world.waiters += 1
    world.act(world.coordinator.delete("g", world.waiters))
    assert world.replies[world.waiters] is GroupError.NON_EMPTY_GROUP
    world.beat("A", -1)
    world.act(world.coordinator.delete("g", "deleting"))
    assert world.replies["deleting"] is None  # type: ignore[index]
    assert [(kind, value) for kind, _, value in world.last_batch()] == [
        (RecordKind.TARGET_EPOCH, None),
        (RecordKind.GROUP, None),
    ]
    world.restart()
    assert world.coordinator.all() == []


def test_group_with_an_unfinished_write_is_not_deleted(
    world: World,
) -> None:
    world.beat("A", 0)
    world.holds = True
    world.send("A", -1)
    assert world.group().state == "Empty"
    world.act(world.coordinator.delete("g", "deleting"))
    assert world.replies["deleting"] is GroupError.COORDINATOR_NOT_AVAILABLE  # type: ignore[index]
    assert join(world) == JoinRefused(GroupError.COORDINATOR_NOT_AVAILABLE, "")
    world.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    world.disk()
    assert set(world.consumers().members) == {"A"}


def test_offsets_expire_once_their_topic_has_no_subscriber(world: World) -> None:
    commit(world, 7)
    world.beat("A", 0)
    world.now_ms += 8 * 24 * 3_600_000
    world.act(world.coordinator.expire_offsets(world.now_ms))
    assert world.group().offsets
    world.beat("A", -1)
    world.act(world.coordinator.expire_offsets(world.now_ms))
    assert world.coordinator.all() == []
    world.restart()
    assert world.coordinator.all() == []


# -- commits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member_id", "epoch", "knows_epochs", "error"),
    [
        ("A", 2, True, None),
        ("A", 2, False, "UNSUPPORTED_VERSION"),
        ("A", 1, True, "STALE_MEMBER_EPOCH"),
        ("A", 3, True, "STALE_MEMBER_EPOCH"),
        ("A", -1, True, "STALE_MEMBER_EPOCH"),
        ("C", 2, True, "UNKNOWN_MEMBER_ID"),
        ("C", 2, False, "UNKNOWN_MEMBER_ID"),
        ("", -1, True, "UNKNOWN_MEMBER_ID"),
    ],
)
def test_commit_requires_a_member_with_its_epoch(
    world: World, member_id: str, epoch: int, knows_epochs: bool, error: str | None
) -> None:
    form_pair(world)
    who = Committer("g", epoch, member_id, None, knows_epochs)
    found, effects = world.coordinator.check_commit(who, world.now_ms)
    assert (None if found is None else found.name) == error
    assert not effects


def test_commit_without_a_member_is_accepted_by_an_empty_group(world: World) -> None:
    world.beat("A", 0)
    world.beat("A", -1)
    assert world.coordinator.check_commit(
        Committer("g", -1, "", None), world.now_ms
    ) == (None, [])


def test_unloading_refuses_requests_whose_write_has_not_begun(
    world: World,
) -> None:
    world.holds = True
    first = world.send("A", 0)
    second = world.send("B", 0)
    effects = world.coordinator.unload()
    assert [effect.waiter for effect in effects if isinstance(effect, Reply)] == [
        second
    ]
    world.act(effects)
    world.disk()
    assert world.replies[first].error is GroupError.NOT_COORDINATOR
    assert len(world.timers) == 0


def test_zero_metadata_hash_is_omitted() -> None:
    assert consumer_value(GroupEpoch(3)) == bytes.fromhex(
        "0000 00000003 00".replace(" ", "")
    )
