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
from logcore.coordination.consumer_transitions import check_heartbeat
from logcore.coordination.effects import Reply
from logcore.coordination.group_requests import (
    Committer,
    ConsumerHeartbeat,
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
from support.coordinator_simulation import (
    REBALANCE_MS,
    SESSION_MS,
    T0,
    CoordinatorSimulation,
    partitions_of,
    topic_id,
)

STABLE = MemberState.STABLE
UNREVOKED = MemberState.UNREVOKED
UNRELEASED = MemberState.UNRELEASED


@pytest.fixture
def simulation() -> CoordinatorSimulation:
    return CoordinatorSimulation()


def form_pair(simulation: CoordinatorSimulation) -> None:
    """Form a group of A and B at epoch 2, each with two partitions."""
    simulation.heartbeat("A", 0)
    simulation.heartbeat("B", 0)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1))
    assert simulation.heartbeat("B", 2) == (2, [2, 3])


# -- observed with Kafka
# ----------------------------------------------------------------


def test_six_steps_observed_with_kafka(simulation: CoordinatorSimulation) -> None:
    assert simulation.heartbeat("A", 0) == (1, [0, 1, 2, 3])
    assert simulation.heartbeat("B", 0) == (2, [])
    assert simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3)) == (
        1,
        [0, 1],
    )
    assert simulation.group().state == "Reconciling"
    assert simulation.consumers().targets["B"] == partitions_of("t", 2, 3)
    assert simulation.heartbeat("A", 1) == (1, None)
    assert simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1)) == (2, None)
    assert simulation.heartbeat("B", 2) == (2, [2, 3])
    assert simulation.group().state == "Stable"


def test_empty_owned_list_confirms_a_release(simulation: CoordinatorSimulation) -> None:
    simulation.heartbeat("A", 0)
    simulation.heartbeat("B", 0)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    assert simulation.heartbeat("A", 1, owned=partitions_of("t")) == (2, None)
    assert simulation.heartbeat("B", 2) == (2, [2, 3])


# -- fields of a heartbeat -----------------------------------------------------------

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
        ({**JOINS, "owned": partitions_of("t", 1)}, "INVALID_REQUEST"),
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
    refused = check_heartbeat(
        ConsumerHeartbeat(**{"group_id": "g", "member_id": "m", **fields}),
        may_omit_member_id=False,
    )
    assert (None if refused is None else refused.error.name) == error


@pytest.mark.parametrize(("epoch", "is_refused"), [(0, False), (1, True), (-1, True)])
def test_only_a_join_of_the_first_version_may_lack_an_id(
    epoch: int, is_refused: bool
) -> None:
    heartbeat = ConsumerHeartbeat(
        **{"group_id": "g", "member_id": "", **JOINS, "member_epoch": epoch}
    )
    assert (
        check_heartbeat(heartbeat, may_omit_member_id=True) is not None
    ) == is_refused


# -- groups and members ----------------------------------------------------------------


def test_only_a_join_creates_a_group(simulation: CoordinatorSimulation) -> None:
    for epoch in (1, -1):
        assert simulation.refused("A", epoch) == "GROUP_ID_NOT_FOUND"
    assert simulation.refused("A", -2, instance_id="i") == "GROUP_ID_NOT_FOUND"
    assert simulation.coordinator.all() == []
    simulation.heartbeat("A", 0)
    assert simulation.refused("B", 1) == "UNKNOWN_MEMBER_ID"
    assert simulation.refused("B", -1) == "UNKNOWN_MEMBER_ID"


def test_full_group_refuses_a_new_member() -> None:
    simulation = CoordinatorSimulation(consumer_max_size=1)
    simulation.heartbeat("A", 0)
    assert simulation.refused("B", 0) == "GROUP_MAX_SIZE_REACHED"
    assert simulation.heartbeat("A", 1) == (1, None)
    assert simulation.heartbeat("A", 0) == (1, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("epoch", "owned", "answer"),
    [
        (2, None, (2, None)),
        (3, None, None),
        (1, None, None),
        (1, partitions_of("t", 2, 3), (2, None)),
        (1, partitions_of("t", 2), (2, None)),
        (1, partitions_of("t", 0), None),
        (1, partitions_of("t"), (2, None)),
    ],
)
def test_heartbeat_epoch_is_current_or_previous(
    simulation: CoordinatorSimulation,
    epoch: int,
    owned: Any,
    answer: tuple[int, None] | None,
) -> None:
    simulation.heartbeat("A", 0)
    # After these heartbeats, B has a previous epoch too.
    simulation.heartbeat("B", 0, topic_names=[])
    assert simulation.consumers().currents["B"].member_epoch == 1
    simulation.heartbeat("B", 1, topic_names=["t"])
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1))
    simulation.heartbeat("B", 2)
    simulation.consumers().currents["B"] = Current(
        member_epoch=2, previous_epoch=1, assigned=partitions_of("t", 2, 3)
    )
    if answer is None:
        assert simulation.refused("B", epoch, owned=owned) == "FENCED_MEMBER_EPOCH"
    else:
        assert simulation.heartbeat("B", epoch, owned=owned) == answer


def test_repeated_join_is_answered_until_the_member_advances(
    simulation: CoordinatorSimulation,
) -> None:
    """Without this rule, a delayed join request would count as a report that the member
    owns no partition.
    """
    assert simulation.heartbeat("A", 0) == (1, [0, 1, 2, 3])
    assert simulation.heartbeat("A", 0) == (1, [0, 1, 2, 3])
    simulation.heartbeat("B", 0)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    assert simulation.refused("A", 0) == "FENCED_MEMBER_EPOCH"
    assert simulation.consumers().owners[topic_id("t"), 3] == "A"


# -- static members --------------------------------------------------------------------


def test_static_member_leaves_temporarily_and_is_replaced(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, instance_id="i")
    simulation.heartbeat("B", 0)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3), instance_id="i")
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1), instance_id="i")
    simulation.heartbeat("B", 2)
    assert simulation.heartbeat("A", -2, instance_id="i") == (-2, None)
    assert simulation.consumers().epoch == 2, "no other member gets its partitions"
    assert simulation.consumers().owners[topic_id("t"), 0] == "A"
    before = len(simulation.batches)
    assert simulation.heartbeat("A", -2, instance_id="i") == (-2, None)
    assert len(simulation.batches) == before
    assert simulation.heartbeat("C", 0, instance_id="i") == (2, [0, 1])
    assert [(kind, name) for kind, name, _ in simulation.last_batch()] == [
        (RecordKind.CURRENT, "A"),
        (RecordKind.TARGET, "A"),
        (RecordKind.MEMBER, "A"),
        (RecordKind.MEMBER, "C"),
        (RecordKind.TARGET, "C"),
        (RecordKind.CURRENT, "C"),
        (RecordKind.CURRENT, "C"),
    ]
    assert simulation.refused("A", 2, instance_id="i") == "FENCED_INSTANCE_ID"
    assert simulation.heartbeat("B", 2) == (2, None)
    assert simulation.group().state == "Stable"


def test_static_instance_has_one_member(simulation: CoordinatorSimulation) -> None:
    simulation.heartbeat("A", 0, instance_id="i")
    assert simulation.refused("B", 0, instance_id="i") == "UNRELEASED_INSTANCE_ID"
    assert simulation.refused("B", 1, instance_id="i") == "FENCED_INSTANCE_ID"
    assert simulation.refused("B", -1, instance_id="i") == "FENCED_INSTANCE_ID"
    assert simulation.refused("B", -2, instance_id="i") == "FENCED_INSTANCE_ID"
    assert simulation.refused("B", 1, instance_id="other") == "UNKNOWN_MEMBER_ID"
    assert simulation.refused("B", -2, instance_id="other") == "UNKNOWN_MEMBER_ID"
    assert simulation.heartbeat("A", 0, instance_id="i") == (1, [0, 1, 2, 3]), (
        "its own answer was lost"
    )
    simulation.heartbeat("A", 1, topic_names=["t", "u"], instance_id="i")
    assert simulation.refused("A", 0, instance_id="i") == "UNRELEASED_INSTANCE_ID"
    simulation.heartbeat("A", -2, instance_id="i")
    assert simulation.heartbeat("A", 0, instance_id="i") == (3, [0, 1, 2, 3]), (
        "it subscribes to other topics than before"
    )


def test_static_member_that_does_not_return_is_removed(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, instance_id="i")
    simulation.heartbeat("A", -2, instance_id="i")
    assert simulation.consumers().current("A").member_epoch == AWAY
    simulation.sleep(SESSION_MS)
    assert simulation.group().state == "Empty"


def test_leaving_static_member_releases_revoked_partitions(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, instance_id="i")
    simulation.heartbeat("B", 0)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3), instance_id="i")
    simulation.heartbeat("A", -2, instance_id="i")
    assert simulation.heartbeat("B", 2) == (2, [2, 3])


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
    # A released partition remains assigned to the member.
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
    simulation: CoordinatorSimulation,
    before: Any,
    target: list[int],
    others: list[int],
    owned: list[int] | None,
    after: Any,
) -> None:
    simulation.heartbeat("A", 0)
    consumers = simulation.consumers()
    state, epoch, assigned, revoking = before
    known = Current(
        member_epoch=epoch,
        previous_epoch=1,
        state=state,
        assigned=partitions_of("t", *assigned),
        revoking=partitions_of("t", *revoking),
    )
    consumers.apply_record((RecordKind.CURRENT, "A"), known)
    consumers.apply_record(
        (RecordKind.CURRENT, "B"), Current(assigned=partitions_of("t", *others))
    )
    consumers.apply_record((RecordKind.TARGET, "A"), partitions_of("t", *target))
    consumers.apply_record((RecordKind.TARGET_EPOCH, ""), 7)
    found = consumers.reconciled(
        "A", None if owned is None else partitions_of("t", *owned)
    )
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
        assigned=partitions_of("t", *assigned),
        revoking=partitions_of("t", *revoking),
    )


def test_member_of_an_unknown_state_starts_over(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0)
    fact = (RecordKind.CURRENT, "A")
    simulation.consumers().apply_record(
        fact,
        Current(
            member_epoch=1, state=MemberState.UNKNOWN, assigned=partitions_of("t", 0)
        ),
    )
    assert (
        simulation.refused("A", 1, owned=partitions_of("t", 0)) == "FENCED_MEMBER_EPOCH"
    )
    assert simulation.heartbeat("A", 1, owned=partitions_of("t")) == (1, [0, 1, 2, 3])


# -- contents of an answer -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "gets_assignment"),
    [
        ({}, False),
        ({"owned": partitions_of("t", 0, 1, 2, 3)}, False),
        ({"topic_names": ["t"], "rebalance_timeout_ms": REBALANCE_MS}, False),
        ({"topic_names": ["t"], "owned": partitions_of("t", 0, 1, 2, 3)}, False),
        (
            {
                "rebalance_timeout_ms": REBALANCE_MS,
                "owned": partitions_of("t", 0, 1, 2, 3),
            },
            False,
        ),
        (
            {
                "topic_names": ["t"],
                "rebalance_timeout_ms": REBALANCE_MS,
                "owned": partitions_of("t", 0, 1, 2, 3),
            },
            True,
        ),
        (
            {
                "pattern": "",
                "rebalance_timeout_ms": REBALANCE_MS,
                "owned": partitions_of("t", 0, 1, 2, 3),
            },
            True,
        ),
    ],
)
def test_full_request_gets_the_full_assignment(
    simulation: CoordinatorSimulation, fields: dict[str, Any], gets_assignment: bool
) -> None:
    simulation.heartbeat("A", 0)
    assert simulation.heartbeat("A", 1, **fields) == (
        1,
        [0, 1, 2, 3] if gets_assignment else None,
    )


def test_answer_contains_the_interval_except_when_leaving(
    simulation: CoordinatorSimulation,
) -> None:
    assert simulation.replies[simulation.send("A", 0)].heartbeat_interval_ms == 5_000
    left = simulation.replies[simulation.send("A", -1)]
    assert (left.member_epoch, left.heartbeat_interval_ms, left.assigned) == (
        -1,
        0,
        None,
    )


# -- changes that raise the epoch ------------------------------------------------------


def test_epoch_rises_with_members_subscriptions_and_topics(
    simulation: CoordinatorSimulation,
) -> None:
    def epoch() -> int:
        return simulation.consumers().epoch

    simulation.set_topic("u", 2)
    simulation.heartbeat("A", 0)
    assert epoch() == 1
    simulation.heartbeat("A", 1, rebalance_timeout_ms=5, assignor="range", rack_id="r")
    assert epoch() == 1
    simulation.heartbeat("A", 1, topic_names=["u", "t", "t"])
    assert epoch() == 2
    simulation.heartbeat("A", 2, topic_names=["t", "u"])
    assert epoch() == 2, "in another order"
    simulation.set_topic("other", 1)
    simulation.heartbeat("A", 2)
    assert epoch() == 2, "not a subscribed topic"
    simulation.set_topic("u", 3)
    simulation.heartbeat("A", 2)
    assert epoch() == 3, "a topic has grown"
    simulation.set_topic("u", 0)
    simulation.heartbeat("A", 3, owned=frozenset())
    assert epoch() == 4, "a topic was deleted"
    simulation.set_topic("u", 3)
    simulation.heartbeat("A", 4)
    assert epoch() == 5, "the topic exists again"
    simulation.heartbeat("B", 0)
    assert epoch() == 6
    simulation.heartbeat("B", -1)
    assert epoch() == 7


def test_topic_created_later_is_assigned(simulation: CoordinatorSimulation) -> None:
    simulation.set_topic("t", 0)
    assert simulation.heartbeat("A", 0) == (1, [])
    simulation.set_topic("t", 2)
    assert simulation.heartbeat("A", 1) == (2, [0, 1])


# -- regular expressions ---------------------------------------------------------------


def test_pattern_matches_whole_names_including_later_topics(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.set_topic("tt", 1)
    assert simulation.heartbeat("A", 0, pattern="t") == (1, [0, 1, 2, 3])
    assert simulation.heartbeat("A", 1, pattern="t+") == (2, [0, 0, 1, 2, 3])
    assert set(simulation.consumers().patterns) == {"t+"}
    simulation.set_topic("ttt", 1)
    assert simulation.heartbeat("A", 2) == (3, [0, 0, 0, 1, 2, 3])
    assert simulation.consumers().patterns["t+"] == Resolved(("t", "tt", "ttt"), 3, T0)
    simulation.heartbeat("A", 3, pattern="")
    assert simulation.consumers().subscribed() == frozenset()
    assert not simulation.consumers().patterns


def test_names_and_a_pattern_are_combined(simulation: CoordinatorSimulation) -> None:
    simulation.set_topic("u", 1)
    simulation.heartbeat("A", 0, pattern="t", topic_names=["u"])
    assert simulation.consumers().subscribed() == {"t", "u"}


def test_invalid_pattern_is_refused_without_a_change(
    simulation: CoordinatorSimulation,
) -> None:
    assert simulation.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert simulation.coordinator.all() == [] and not simulation.batches
    simulation.heartbeat("A", 0)
    before = len(simulation.batches)
    assert simulation.refused("A", 1, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert simulation.consumers().members["A"].pattern is None
    assert len(simulation.batches) == before
    assert simulation.heartbeat("A", 1) == (1, None)


def test_pattern_stored_unresolved_is_resolved_later(
    simulation: CoordinatorSimulation,
) -> None:
    """Kafka resolves patterns in the background, and may stop before it has stored the
    result.
    """
    simulation.heartbeat("A", 0, pattern="t|u")
    key = consumer_key(ConsumerKey(RecordKind.PATTERN, "g", "t|u"))
    simulation.batches.append(((key, None),))
    simulation.restart()
    simulation.set_topic("u", 1)
    simulation.heartbeat("A", 1)
    assert simulation.consumers().patterns["t|u"].topics == ("t", "u")


def test_unreadable_pattern_keeps_its_topics_and_blocks_no_member(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, pattern="t")
    fact = (RecordKind.MEMBER, "A")
    member = attrs.evolve(simulation.consumers().members["A"], pattern="(")
    meant = Resolved(("t",), 1, T0)
    consumers = simulation.consumers()
    simulation.batches.append(
        (
            consumers.record(fact, member),
            consumers.record((RecordKind.PATTERN, "("), meant),
        )
    )
    simulation.restart()
    simulation.set_topic("tt", 1)
    assert simulation.heartbeat("B", 0) == (2, [])
    assert simulation.heartbeat("A", 1) == (1, [0, 1])


def test_records_of_nonexistent_members_are_deleted(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0)
    keys = [
        consumer_key(ConsumerKey(kind, "g", "B"))
        for kind in (RecordKind.TARGET, RecordKind.CURRENT)
    ]
    simulation.batches.append(
        tuple((key, consumer_value(partitions_of("t", 0))) for key in keys[:1])
    )
    simulation.batches.append(
        tuple(
            (key, consumer_value(Current(assigned=partitions_of("t", 0))))
            for key in keys[1:]
        )
    )
    simulation.restart()
    assert simulation.consumers().owners[topic_id("t"), 0] == "A"
    simulation.heartbeat("A", -1)
    assert {(key, None) for key in keys} <= set(simulation.batches[-1])


def test_pattern_is_deleted_with_its_last_subscriber(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, pattern="t")
    simulation.heartbeat("B", 0, pattern="t")
    simulation.heartbeat("B", -1)
    assert "t" in simulation.consumers().patterns
    simulation.heartbeat("A", -1)
    assert [
        (kind, name) for kind, name, value in simulation.last_batch() if value is None
    ] == [
        (RecordKind.CURRENT, "A"),
        (RecordKind.TARGET, "A"),
        (RecordKind.MEMBER, "A"),
        (RecordKind.PATTERN, "t"),
    ]


# -- the assignor ----------------------------------------------------------------------


def test_group_uses_the_most_requested_assignor(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0)
    assert simulation.consumers().assignor() == "uniform"
    simulation.heartbeat("B", 0, assignor="range")
    assert simulation.consumers().assignor() == "range"
    simulation.heartbeat("C", 0, assignor="uniform")
    simulation.heartbeat("D", 0, assignor="uniform")
    assert simulation.consumers().assignor() == "uniform"


# -- time ------------------------------------------------------------------------------


def test_silent_member_is_removed_and_its_partitions_are_reassigned(
    simulation: CoordinatorSimulation,
) -> None:
    form_pair(simulation)
    simulation.sleep(SESSION_MS - 1)
    simulation.heartbeat("A", 2)
    simulation.sleep(1)
    assert set(simulation.consumers().members) == {"A"}
    assert simulation.group().state == "Assigning"
    assert simulation.refused("B", 2) == "UNKNOWN_MEMBER_ID"
    assert simulation.heartbeat("A", 2) == (3, [0, 1, 2, 3])
    assert [
        (kind, name)
        for kind, name, _ in simulation.batches[-2] and simulation.last_batch()
    ] == [
        (RecordKind.TARGET, "A"),
        (RecordKind.TARGET_EPOCH, ""),
        (RecordKind.CURRENT, "A"),
    ]


def test_only_heartbeats_renew_a_session(simulation: CoordinatorSimulation) -> None:
    simulation.heartbeat("A", 0)
    simulation.sleep(SESSION_MS - 1)
    error, _ = simulation.coordinator.check_commit(
        Committer("g", 1, "A", None, can_contain_epoch=True), simulation.now_ms
    )
    assert error is None
    simulation.sleep(1)
    assert not simulation.consumers().members


def test_member_that_does_not_release_in_time_is_removed(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, rebalance_timeout_ms=10_000)
    simulation.heartbeat("B", 0)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    simulation.sleep(9_999)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3), rack_id="r")
    assert "A" in simulation.consumers().members
    simulation.sleep(1)
    assert simulation.refused("A", 1) == "UNKNOWN_MEMBER_ID"
    assert simulation.heartbeat("B", 2) == (3, [0, 1, 2, 3])


def test_member_that_releases_in_time_is_kept(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, rebalance_timeout_ms=10_000)
    simulation.heartbeat("B", 0)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    simulation.sleep(9_999)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1))
    simulation.sleep(10_000)
    assert "A" in simulation.consumers().members


# -- stored records -------------------------------------------------------------------


def kinds(simulation: CoordinatorSimulation) -> list[RecordKind]:
    return [kind for kind, _, _ in simulation.last_batch()]


def test_order_of_stored_records(simulation: CoordinatorSimulation) -> None:
    simulation.heartbeat("A", 0)
    assert kinds(simulation) == [
        RecordKind.MEMBER,
        RecordKind.GROUP,
        RecordKind.TARGET,
        RecordKind.TARGET_EPOCH,
        RecordKind.CURRENT,
    ]
    simulation.heartbeat("B", 0)
    assert kinds(simulation) == [
        RecordKind.MEMBER,
        RecordKind.GROUP,
        *[RecordKind.TARGET] * 2,
        RecordKind.TARGET_EPOCH,
        RecordKind.CURRENT,
    ]
    simulation.heartbeat("B", -1)
    assert kinds(simulation) == [
        RecordKind.CURRENT,
        RecordKind.TARGET,
        RecordKind.MEMBER,
        RecordKind.GROUP,
    ]
    count = len(simulation.batches)
    simulation.heartbeat("A", 1)
    simulation.heartbeat("A", 3)
    assert len(simulation.batches) == count + 1, "the second heartbeat changed nothing"


def test_group_is_restored_from_its_records(simulation: CoordinatorSimulation) -> None:
    form_pair(simulation)
    simulation.heartbeat(
        "C",
        0,
        pattern="t",
        instance_id="i",
        rack_id="r",
        client_id="c",
        client_host="/h",
        assignor="range",
    )
    before = simulation.consumers()
    simulation.restart()
    after = simulation.consumers()
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
    assert simulation.group().state == "Reconciling"
    simulation.sleep(SESSION_MS - 1)
    assert len(simulation.consumers().members) == 3, (
        "sessions begin when the group is loaded"
    )
    simulation.sleep(1)
    assert simulation.group().state == "Empty"


def test_revocation_timeout_continues_after_a_restart(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, rebalance_timeout_ms=10_000)
    simulation.heartbeat("B", 0)
    simulation.heartbeat("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    simulation.restart()
    simulation.sleep(10_000)
    assert set(simulation.consumers().members) == {"B"}


def test_answer_waits_for_all_records_that_it_depends_on(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.holds_writes = True
    first = simulation.send("A", 0)
    second = simulation.send("A", 1)
    third = simulation.send("B", 0)
    assert not simulation.replies
    simulation.finish_write()
    assert set(simulation.replies) == {first, second}
    assert simulation.replies[second].member_epoch == 1
    fourth = simulation.send("A", 1, owned=partitions_of("t", 0, 1, 2, 3))
    simulation.finish_write()
    assert set(simulation.replies) == {first, second, third}
    simulation.finish_write()
    assert set(simulation.replies) == {first, second, third, fourth}


def test_steps_during_a_write_share_the_next_batch(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.holds_writes = True
    for name in "ABCDEFGH":
        simulation.send(name, 0)
    assert len(simulation.stores) == 1
    simulation.finish_write()
    assert len(simulation.stores) == 1
    simulation.finish_write()
    assert len(simulation.replies) == 8 and not simulation.stores


def test_steps_beyond_the_batch_size_are_stored_one_by_one(
    simulation: CoordinatorSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_transitions, "_BATCH_BYTES", 1)
    simulation.holds_writes = True
    waiters = [simulation.send(name, 0) for name in "ABC"]
    for count in range(1, 4):
        assert len(simulation.stores) == 1
        simulation.finish_write()
        assert set(simulation.replies) == set(waiters[:count])
    assert not simulation.stores


def test_failed_write_changes_nothing(simulation: CoordinatorSimulation) -> None:
    form_pair(simulation)
    facts = simulation.consumers()
    before = (
        facts.epoch,
        dict(facts.members),
        dict(facts.targets),
        dict(facts.currents),
        dict(facts.owners),
    )
    simulation.holds_writes = True
    waiters = [
        simulation.send("A", -1),
        simulation.send("C", 0),
        simulation.send("B", 2),
    ]
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    simulation.finish_write()
    assert not simulation.stores
    assert {simulation.replies[waiter].error.name for waiter in waiters} == {
        "COORDINATOR_NOT_AVAILABLE"
    }
    assert before == (
        facts.epoch,
        facts.members,
        facts.targets,
        facts.currents,
        facts.owners,
    )
    simulation.disk_error = None
    simulation.holds_writes = False
    assert simulation.heartbeat("A", 2) == (2, None)
    simulation.sleep(SESSION_MS)
    assert simulation.group().state == "Empty", "the members have their timers again"


def test_records_of_a_failed_write_are_overwritten(
    simulation: CoordinatorSimulation,
) -> None:
    """A sync fails, but the records exist when the log is opened again. Without the new
    record, B would get the partitions of C.
    """
    form_pair(simulation)
    simulation.holds_writes = True
    simulation.send("C", 0)
    lost = simulation.stores[0].records
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    simulation.finish_write()
    simulation.batches.append(lost)
    simulation.disk_error = None
    simulation.holds_writes = False
    simulation.heartbeat("A", -1)
    simulation.restart()
    assert set(simulation.consumers().members) == {"B"}
    assert simulation.consumers().targets.keys() == {"B"}


def test_answers_wait_until_records_of_a_failed_write_are_overwritten(
    simulation: CoordinatorSimulation,
) -> None:
    """B joins. A repeats its own join, which is not answered yet, and half of the
    partitions are assigned to B. These records are on disk although the sync failed. An
    immediate answer would still assign all partitions to A. After a power cut, the next
    coordinator would then assign half of them to B as well.
    """
    simulation.holds_writes = True
    simulation.send("A", 0)
    simulation.send("B", 0)
    simulation.send("A", 0)
    simulation.finish_write()
    lost = simulation.stores[0].records
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    simulation.finish_write()
    simulation.batches.append(lost)
    simulation.disk_error = None
    answer = simulation.send("A", 0)
    assert answer not in simulation.replies
    simulation.finish_write()
    assert simulation.replies[answer].assigned == partitions_of("t", 0, 1, 2, 3)
    simulation.restart()
    assert set(simulation.consumers().members) == {"A"}
    assert set(simulation.consumers().owners) == partitions_of("t", 0, 1, 2, 3)


def test_new_group_whose_write_fails_is_empty(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    assert simulation.refused("A", 0) == "COORDINATOR_NOT_AVAILABLE"
    simulation.disk_error = None
    assert simulation.group().state == "Empty"
    assert simulation.heartbeat("A", 0) == (1, [0, 1, 2, 3])


# -- between the protocols -------------------------------------------------------------


def join(simulation: CoordinatorSimulation, member_id: str = "") -> Any:
    return simulation.replies.get(simulation.join(member_id))


def commit(simulation: CoordinatorSimulation, offset: int) -> None:
    committed = {("t", 0): Committed(offset, -1, "", simulation.now_ms)}
    simulation.waiters += 1
    simulation.act(simulation.coordinator.commit("g", committed, simulation.waiters))


def test_empty_group_changes_its_protocol_and_keeps_its_offsets(
    simulation: CoordinatorSimulation,
) -> None:
    commit(simulation, 7)
    joined = join(simulation)
    assert joined.generation == 1
    assert simulation.refused("A", 0) == "GROUP_ID_NOT_FOUND", "it has a member"
    results, effects = simulation.coordinator.leave(
        "g", [(joined.member_id, None)], simulation.now_ms
    )
    simulation.act(effects)
    assert results == [None]
    assert simulation.refused("A", 1) == "GROUP_ID_NOT_FOUND"
    assert simulation.heartbeat("A", 0) == (1, [0, 1, 2, 3])
    assert simulation.last_batch()[0] == (RecordKind.CLASSIC, "", None)
    assert simulation.group().offsets["t"][0].offset == 7
    assert join(simulation) == JoinRefused(GroupError.INCONSISTENT_GROUP_PROTOCOL, "")
    simulation.restart()
    assert (
        simulation.group().state == "Stable"
        and simulation.group().consumers is not None
    )
    simulation.heartbeat("A", -1)
    assert join(simulation, "A") == JoinRefused(GroupError.UNKNOWN_MEMBER_ID, "A")
    assert join(simulation).generation == 1
    assert simulation.group().consumers is None
    simulation.restart()
    assert simulation.group().consumers is None
    assert simulation.group().offsets["t"][0].offset == 7


def test_refused_join_keeps_the_protocol_of_an_empty_group(
    simulation: CoordinatorSimulation,
) -> None:
    joined = join(simulation)
    _, effects = simulation.coordinator.leave(
        "g", [(joined.member_id, None)], simulation.now_ms
    )
    simulation.act(effects)
    before = len(simulation.batches)
    assert simulation.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert len(simulation.batches) == before
    assert simulation.group().consumers is None and simulation.group().generation == 2
    assert simulation.heartbeat("A", 0) == (1, [0, 1, 2, 3])
    assert simulation.last_batch()[0] == (RecordKind.CLASSIC, "", None)


def test_records_of_both_protocols_are_distinguished_by_their_members(
    simulation: CoordinatorSimulation,
) -> None:
    """Neither protocol's records were deleted when the others were written, because
    another program may write in this way.
    """
    simulation.heartbeat("A", 0)
    empty = StoredGroup(protocol_type="consumer", generation=3)
    simulation.batches.append(((group_key("g"), group_value(empty)),))
    simulation.restart()
    assert set(simulation.consumers().members) == {"A"}
    simulation.heartbeat("A", -1)
    assert (group_key("g"), None) in simulation.batches[-1]
    simulation.batches.append(((group_key("g"), group_value(empty)),))
    simulation.restart()
    assert simulation.group().consumers is None and simulation.group().generation == 3


def test_record_of_older_brokers_is_deleted(simulation: CoordinatorSimulation) -> None:
    simulation.heartbeat("A", 0)
    key = consumer_key(ConsumerKey(RecordKind.TOPICS, "g"))
    simulation.batches.append(((key, b"\0\0\1\0"),))
    simulation.restart()
    simulation.heartbeat("A", -1)
    assert (key, None) in simulation.batches[-1]


def test_deleting_an_empty_group_deletes_all_its_records(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0, pattern="t")
    simulation.waiters += 1
    simulation.act(simulation.coordinator.delete("g", simulation.waiters))
    assert simulation.replies[simulation.waiters] is GroupError.NON_EMPTY_GROUP
    simulation.heartbeat("A", -1)
    simulation.act(simulation.coordinator.delete("g", "deleting"))
    assert simulation.replies["deleting"] is None  # type: ignore[index]
    assert [(kind, value) for kind, _, value in simulation.last_batch()] == [
        (RecordKind.TARGET_EPOCH, None),
        (RecordKind.GROUP, None),
    ]
    simulation.restart()
    assert simulation.coordinator.all() == []


def test_group_with_an_unfinished_write_is_not_deleted(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0)
    simulation.holds_writes = True
    simulation.send("A", -1)
    assert simulation.group().state == "Empty"
    simulation.act(simulation.coordinator.delete("g", "deleting"))
    assert simulation.replies["deleting"] is GroupError.COORDINATOR_NOT_AVAILABLE  # type: ignore[index]
    assert join(simulation) == JoinRefused(GroupError.COORDINATOR_NOT_AVAILABLE, "")
    simulation.disk_error = GroupError.COORDINATOR_NOT_AVAILABLE
    simulation.finish_write()
    assert set(simulation.consumers().members) == {"A"}


def test_offsets_expire_once_their_topic_has_no_subscriber(
    simulation: CoordinatorSimulation,
) -> None:
    commit(simulation, 7)
    simulation.heartbeat("A", 0)
    simulation.now_ms += 8 * 24 * 3_600_000
    simulation.act(simulation.coordinator.expire_offsets(simulation.now_ms))
    assert simulation.group().offsets
    simulation.heartbeat("A", -1)
    simulation.act(simulation.coordinator.expire_offsets(simulation.now_ms))
    assert simulation.coordinator.all() == []
    simulation.restart()
    assert simulation.coordinator.all() == []


# -- commits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member_id", "epoch", "can_contain_epoch", "error"),
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
    simulation: CoordinatorSimulation,
    member_id: str,
    epoch: int,
    can_contain_epoch: bool,
    error: str | None,
) -> None:
    form_pair(simulation)
    committer = Committer("g", epoch, member_id, None, can_contain_epoch)
    found, effects = simulation.coordinator.check_commit(committer, simulation.now_ms)
    assert (None if found is None else found.name) == error
    assert not effects


def test_commit_without_a_member_is_accepted_by_an_empty_group(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.heartbeat("A", 0)
    simulation.heartbeat("A", -1)
    assert simulation.coordinator.check_commit(
        Committer("g", -1, "", None), simulation.now_ms
    ) == (None, [])


def test_unloading_refuses_requests_whose_write_has_not_begun(
    simulation: CoordinatorSimulation,
) -> None:
    simulation.holds_writes = True
    first = simulation.send("A", 0)
    second = simulation.send("B", 0)
    effects = simulation.coordinator.unload()
    assert [effect.waiter for effect in effects if isinstance(effect, Reply)] == [
        second
    ]
    simulation.act(effects)
    simulation.finish_write()
    assert simulation.replies[first].error is GroupError.NOT_COORDINATOR
    assert len(simulation.timers) == 0


def test_zero_metadata_hash_is_omitted() -> None:
    assert consumer_value(GroupEpoch(3)) == bytes.fromhex(
        "0000 00000003 00".replace(" ", "")
    )
