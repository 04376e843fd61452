"""Groups of the consumer protocol (KIP-848) by their tables: what each heartbeat is
answered, and what is stored.

No broker and no log: time is a number, and the disk is done at once unless a test holds
it.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from logcore.coordination import consumer_transitions
from logcore.coordination.consumer_group import AWAY
from logcore.coordination.consumer_transitions import check_beat
from logcore.coordination.effects import Beat, Committer, GroupError, JoinRefused, Reply
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


def two(world: World) -> None:
    """A and B, each with two partitions, at epoch 2."""
    world.beat("A", 0)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.beat("A", 1, owned=of("t", 0, 1))
    assert world.beat("B", 2) == (2, [2, 3])


# -- what was seen of Kafka ------------------------------------------------------------


def test_the_six_steps_that_were_seen_with_kafka(world: World) -> None:
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    assert world.beat("B", 0) == (2, [])
    assert world.beat("A", 1, owned=of("t", 0, 1, 2, 3)) == (1, [0, 1])
    assert world.group().state == "Reconciling"
    assert world.consumers().targets["B"] == of("t", 2, 3)
    assert world.beat("A", 1) == (1, None)
    assert world.beat("A", 1, owned=of("t", 0, 1)) == (2, None)
    assert world.beat("B", 2) == (2, [2, 3])
    assert world.group().state == "Stable"


def test_to_own_nothing_confirms_too(world: World) -> None:
    world.beat("A", 0)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    assert world.beat("A", 1, owned=of("t")) == (2, None)
    assert world.beat("B", 2) == (2, [2, 3])


# -- before the group is looked at -----------------------------------------------------

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
def test_a_heartbeat_is_checked_by_itself_first(
    fields: dict[str, Any], error: str | None
) -> None:
    refused = check_beat(
        Beat(**{"group_id": "g", "member_id": "m", **fields}), may_lack_id=False
    )
    assert (None if refused is None else refused.error.name) == error


@pytest.mark.parametrize(("epoch", "is_refused"), [(0, False), (1, True), (-1, True)])
def test_only_a_newcomer_of_the_first_version_may_lack_an_id(
    epoch: int, is_refused: bool
) -> None:
    beat = Beat(**{"group_id": "g", "member_id": "", **JOINS, "member_epoch": epoch})
    assert (check_beat(beat, may_lack_id=True) is not None) == is_refused


# -- which group, which member ---------------------------------------------------------


def test_only_who_joins_makes_a_group(world: World) -> None:
    for epoch in (1, -1):
        assert world.refused("A", epoch) == "GROUP_ID_NOT_FOUND"
    assert world.refused("A", -2, instance_id="i") == "GROUP_ID_NOT_FOUND"
    assert world.coordinator.all() == []
    world.beat("A", 0)
    assert world.refused("B", 1) == "UNKNOWN_MEMBER_ID"
    assert world.refused("B", -1) == "UNKNOWN_MEMBER_ID"


def test_a_full_group_takes_no_newcomer() -> None:
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
def test_a_member_is_where_we_know_it_or_one_answer_behind(
    world: World, epoch: int, owned: Any, answer: tuple[int, None] | None
) -> None:
    world.beat("A", 0)
    world.beat(
        "B", 0, topic_names=[]
    )  # so that B has an epoch before the one that it gets now
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


def test_who_repeats_its_joining_is_answered_again_until_it_is_further(
    world: World,
) -> None:
    """A request to join that comes late would else count as the word that the member
    owns nothing.
    """
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    assert world.refused("A", 0) == "FENCED_MEMBER_EPOCH"
    assert world.consumers().owners[topic_id("t"), 3] == "A"


# -- static members --------------------------------------------------------------------


def test_a_static_member_leaves_for_a_while_and_another_takes_its_place(
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


def test_who_is_which_instance(world: World) -> None:
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
        "it wants other topics than before"
    )


def test_a_static_member_that_stays_away_is_removed(world: World) -> None:
    world.beat("A", 0, instance_id="i")
    world.beat("A", -2, instance_id="i")
    assert world.consumers().current("A").member_epoch == AWAY
    world.sleep(SESSION_MS)
    assert world.group().state == "Empty"


def test_a_static_member_that_leaves_has_given_up_what_it_had_to(world: World) -> None:
    world.beat("A", 0, instance_id="i")
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3), instance_id="i")
    world.beat("A", -2, instance_id="i")
    assert world.beat("B", 2) == (2, [2, 3])


# -- how far a member comes ------------------------------------------------------------

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
    (
        (UNREVOKED, 5, [0], [1]),
        [0, 1],
        [],
        [0],
        (UNRELEASED, 7, [0], []),
    ),  # what it gave up is its own until now
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
def test_how_far_a_member_comes(
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


def test_a_member_of_an_unknown_state_begins_anew(world: World) -> None:
    world.beat("A", 0)
    fact = (RecordKind.CURRENT, "A")
    world.consumers().put(
        fact, Current(member_epoch=1, state=MemberState.UNKNOWN, assigned=of("t", 0))
    )
    assert world.refused("A", 1, owned=of("t", 0)) == "FENCED_MEMBER_EPOCH"
    assert world.beat("A", 1, owned=of("t")) == (1, [0, 1, 2, 3])


# -- what an answer tells --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "is_told"),
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
def test_who_says_everything_is_told_everything(
    world: World, fields: dict[str, Any], is_told: bool
) -> None:
    world.beat("A", 0)
    assert world.beat("A", 1, **fields) == (1, [0, 1, 2, 3] if is_told else None)


def test_an_answer_names_the_interval_and_leaving_none(world: World) -> None:
    assert world.replies[world.send("A", 0)].heartbeat_interval_ms == 5_000
    gone = world.replies[world.send("A", -1)]
    assert (gone.member_epoch, gone.heartbeat_interval_ms, gone.assigned) == (
        -1,
        0,
        None,
    )


# -- what raises the epoch -------------------------------------------------------------


def test_the_epoch_rises_with_members_names_and_topics(world: World) -> None:
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
    assert epoch() == 2, "not its topic"
    world.set_topic("u", 3)
    world.beat("A", 2)
    assert epoch() == 3, "a topic has grown"
    world.set_topic("u", 0)
    world.beat("A", 3, owned=frozenset())
    assert epoch() == 4, "a topic is gone"
    world.set_topic("u", 3)
    world.beat("A", 4)
    assert epoch() == 5, "it is there again"
    world.beat("B", 0)
    assert epoch() == 6
    world.beat("B", -1)
    assert epoch() == 7


def test_a_topic_that_is_not_there_yet_comes_later(world: World) -> None:
    world.set_topic("t", 0)
    assert world.beat("A", 0) == (1, [])
    world.set_topic("t", 2)
    assert world.beat("A", 1) == (2, [0, 1])


# -- regular expressions ---------------------------------------------------------------


def test_a_pattern_means_whole_names_and_those_of_later_topics(world: World) -> None:
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


def test_names_and_a_pattern_add_up(world: World) -> None:
    world.set_topic("u", 1)
    world.beat("A", 0, pattern="t", topic_names=["u"])
    assert world.consumers().subscribed() == {"t", "u"}


def test_what_is_no_pattern_is_refused_and_changes_nothing(world: World) -> None:
    assert world.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert world.coordinator.all() == [] and not world.batches
    world.beat("A", 0)
    before = len(world.batches)
    assert world.refused("A", 1, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert world.consumers().members["A"].pattern is None
    assert len(world.batches) == before
    assert world.beat("A", 1) == (1, None)


def test_a_pattern_that_was_stored_unresolved_is_resolved_later(world: World) -> None:
    """Kafka resolves them in the background, and may end before."""
    world.beat("A", 0, pattern="t|u")
    key = consumer_key(ConsumerKey(RecordKind.PATTERN, "g", "t|u"))
    world.batches.append(((key, None),))
    world.restart()
    world.set_topic("u", 1)
    world.beat("A", 1)
    assert world.consumers().patterns["t|u"].topics == ("t", "u")


def test_a_pattern_that_we_cannot_read_means_what_it_meant_and_stops_nobody(
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


def test_records_of_nobody_are_deleted(world: World) -> None:
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


def test_a_pattern_goes_with_the_last_who_wants_it(world: World) -> None:
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


def test_the_assignor_is_the_one_that_most_name(world: World) -> None:
    world.beat("A", 0)
    assert world.consumers().assignor() == "uniform"
    world.beat("B", 0, assignor="range")
    assert world.consumers().assignor() == "range"
    world.beat("C", 0, assignor="uniform")
    world.beat("D", 0, assignor="uniform")
    assert world.consumers().assignor() == "uniform"


# -- time ------------------------------------------------------------------------------


def test_a_silent_member_is_removed_and_its_partitions_are_given_away(
    world: World,
) -> None:
    two(world)
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


def test_who_does_not_give_up_in_time_is_removed(world: World) -> None:
    world.beat("A", 0, rebalance_timeout_ms=10_000)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.sleep(9_999)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3), rack_id="r")
    assert "A" in world.consumers().members
    world.sleep(1)
    assert world.refused("A", 1) == "UNKNOWN_MEMBER_ID"
    assert world.beat("B", 2) == (3, [0, 1, 2, 3])


def test_who_gives_up_in_time_stays(world: World) -> None:
    world.beat("A", 0, rebalance_timeout_ms=10_000)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.sleep(9_999)
    world.beat("A", 1, owned=of("t", 0, 1))
    world.sleep(10_000)
    assert "A" in world.consumers().members


# -- what is stored --------------------------------------------------------------------


def kinds(world: World) -> list[RecordKind]:
    return [kind for kind, _, _ in world.last_batch()]


def test_the_order_of_records(world: World) -> None:
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
    assert len(world.batches) == count + 1, "the second one changed nothing"


def test_a_group_is_what_its_records_say(world: World) -> None:
    two(world)
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
    assert len(world.consumers().members) == 3, "sessions begin when the group is read"
    world.sleep(1)
    assert world.group().state == "Empty"


def test_time_to_give_up_is_measured_after_a_restart(world: World) -> None:
    world.beat("A", 0, rebalance_timeout_ms=10_000)
    world.beat("B", 0)
    world.beat("A", 1, owned=of("t", 0, 1, 2, 3))
    world.restart()
    world.sleep(10_000)
    assert set(world.consumers().members) == {"B"}


def test_an_answer_waits_for_all_that_it_rests_on(world: World) -> None:
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


def test_steps_that_came_meanwhile_are_stored_together(world: World) -> None:
    world.holds = True
    for name in "ABCDEFGH":
        world.send(name, 0)
    assert len(world.stores) == 1
    world.disk()
    assert len(world.stores) == 1
    world.disk()
    assert len(world.replies) == 8 and not world.stores


def test_steps_that_are_too_much_for_one_batch_are_stored_one_after_the_other(
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


def test_invalid_records_change_nothing(world: World) -> None:
    two(world)
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
    assert world.group().state == "Empty", "they have their timers again"


def test_what_may_be_on_disk_all_the_same_is_written_again(world: World) -> None:
    """A sync fails, and the records are there when the log is opened again: B would be
    given what C has.
    """
    two(world)
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


def test_nobody_is_answered_before_what_may_be_on_disk_is_written_over(
    world: World,
) -> None:
    """B joins, and A, whose own joining was not answered yet, repeats it: half of the
    partitions are B's. That is on disk, though the sync failed. If A were told at once
    that it has all partitions, as before, and power were lost then, the next
    coordinator would give half of them to B.
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


def test_a_new_group_that_cannot_be_stored_is_empty(world: World) -> None:
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


def test_an_empty_group_changes_its_protocol_and_keeps_its_offsets(
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


def test_who_is_refused_leaves_an_empty_group_its_protocol(world: World) -> None:
    joined = join(world)
    _, effects = world.coordinator.leave("g", [(joined.member_id, None)], world.now_ms)
    world.act(effects)
    before = len(world.batches)
    assert world.refused("A", 0, pattern="(") == "INVALID_REGULAR_EXPRESSION"
    assert len(world.batches) == before
    assert world.group().consumers is None and world.group().generation == 2
    assert world.beat("A", 0) == (1, [0, 1, 2, 3])
    assert world.last_batch()[0] == (RecordKind.CLASSIC, "", None)


def test_records_of_both_protocols_are_told_apart_by_their_members(
    world: World,
) -> None:
    """Neither of the two is deleted by what was written: another program may have done
    that.
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


def test_a_record_of_older_brokers_is_deleted(world: World) -> None:
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


def test_a_group_whose_last_change_is_not_on_disk_is_not_deleted_yet(
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


def test_offsets_expire_when_nobody_wants_their_topic(world: World) -> None:
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
def test_who_may_commit(
    world: World, member_id: str, epoch: int, knows_epochs: bool, error: str | None
) -> None:
    two(world)
    who = Committer("g", epoch, member_id, None, knows_epochs)
    found, effects = world.coordinator.check_commit(who, world.now_ms)
    assert (None if found is None else found.name) == error
    assert not effects


def test_nobody_in_particular_may_commit_while_a_group_is_empty(world: World) -> None:
    world.beat("A", 0)
    world.beat("A", -1)
    assert world.coordinator.check_commit(
        Committer("g", -1, "", None), world.now_ms
    ) == (None, [])


def test_unloading_turns_those_away_whose_records_did_not_begin_their_way(
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


def test_a_hash_of_nothing_is_left_out() -> None:
    assert consumer_value(GroupEpoch(3)) == bytes.fromhex(
        "0000 00000003 00".replace(" ", "")
    )
