"""The rules of replication one by one: roles, fetches, elections, reassignments."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from logcore.errors import CorruptRegistryError
from logcore.replication import electing, following, leading
from logcore.replication.electing import PartitionSettings
from logcore.replication.following import FollowerState, LeaderResponse
from logcore.replication.leading import FollowerFetch, LeaderState
from logcore.replication.placing import place_partitions
from logcore.replication.state import (
    NO_LEADER,
    InSyncReplica,
    LeaderAndIsr,
    LiveBroker,
    ReplicationError,
    Role,
    pack_state,
    replace_isr,
    role_of,
    unpack_state,
)

PATH = "/brokers/topics/t/partitions/0/7b2e"


def state_of(
    leader: int, *isr: int, elr: tuple[int, ...] = (), epoch: int = 5
) -> LeaderAndIsr:
    """Replicas 1, 2 and 3. Each broker has its own number as broker epoch, and the disk
    `d<broker>`.
    """
    return LeaderAndIsr(
        leader=leader,
        leader_epoch=epoch,
        isr={broker: InSyncReplica(broker, f"d{broker}") for broker in isr},
        replicas=(1, 2, 3),
        elr={broker: f"d{broker}" for broker in elr},
        controller_epoch=1,
    )


def live_of(*brokers: int, **others: LiveBroker) -> dict[int, LiveBroker]:
    live = {broker: LiveBroker(broker, f"d{broker}") for broker in brokers}
    live.update({int(name[1:]): value for name, value in others.items()})
    return live


def fetched(
    leader: LeaderState, fetch: FollowerFetch, live: dict[int, LiveBroker], now_ms: int
) -> LeaderState:
    """Handle a fetch that is not refused, as a leader with a session does."""
    leader, refusal = leading.fetched(leader, fetch, (4, leader.log_end), live, now_ms)
    assert refusal is None
    return leading.expand_isr(leader, fetch, live)


# -- the state -------------------------------------------------------------------------


def test_state_is_packed_as_documented() -> None:
    state = state_of(2, 2, 3, elr=(1,))
    assert pack_state(state) == (
        b'{"version":3,"controller_epoch":1,"leader":2,"leader_epoch":5,'
        b'"replicas":[1,2,3],"adding":[],"removing":[],'
        b'"isr":{"2":[2,"d2"],"3":[3,"d3"]},"elr":{"1":"d1"},"recovering":false}'
    )
    assert unpack_state(pack_state(state), PATH) == state


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"version":3', b'"version":2'),
        (b"[1,2,3]", b"[2,3]"),
        (b"[1,2,3]", b"[1,2,3,3]"),
        (b"[1,2,3]", b'["1",2,3]'),
        (b"[1,2,3]", b"3"),
        (b'"adding":[]', b'"adding":[4]'),
        (b'"removing":[]', b'"removing":[4]'),
        (b'"leader":2', b'"leader":"2"'),
        (b'"leader":2', b'"leader":7'),
        (b'"leader":2', b'"leader":-2'),
        (b'"leader_epoch":5,', b""),
        (b"[2,", b"[true,"),
        (b'"2":[', b'"02":['),
        (b'"2":[', b'"x":['),
        (b'[2,"d2"]', b"[2]"),
        (b'[2,"d2"]', b"null"),
        (b'"1":"d1"', b'"1":1'),
        (b'"1":"d1"', b'"3":"d3"'),
        (b"false", b"0"),
        (b"}", b""),
    ],
)
def test_damaged_state_raises_with_its_path(old: bytes, new: bytes) -> None:
    data = pack_state(state_of(2, 2, 3, elr=(1,)))
    assert old in data
    with pytest.raises(CorruptRegistryError) as caught:
        unpack_state(data.replace(old, new), PATH)
    assert caught.value.path == PATH


@pytest.mark.parametrize(
    ("leader", "broker", "broker_epoch", "role"),
    [
        (1, 1, 1, Role.LEADER),
        (1, 1, 9, Role.NONE),  # registered again since the election
        (1, 1, None, Role.NONE),  # not registered yet
        (1, 2, 2, Role.FOLLOWER),
        (1, 3, 3, Role.FOLLOWER),  # not in the ISR
        (NO_LEADER, 2, 2, Role.NONE),
    ],
)
def test_role_of(
    leader: int, broker: int, broker_epoch: int | None, role: Role
) -> None:
    assert role_of(state_of(leader, 1, 2), broker, broker_epoch) is role


def test_elr_follows_from_isr() -> None:
    full = state_of(1, 1, 2, 3)
    two = replace_isr(full, state_of(1, 1, 2).isr, 2)
    assert two.elr == {}
    first = replace_isr(two, state_of(1, 1).isr, 2)
    assert first.elr == {2: "d2"}
    back = replace_isr(first, state_of(1, 1, 3).isr, 2)
    assert back.elr == {}


# -- the leader ------------------------------------------------------------------------


def book_of(state: LeaderAndIsr, **values: Any) -> LeaderState:
    arguments: dict[str, Any] = {
        "min_insync_replicas": 2,
        "lag_ms": 1_000,
        "log_start": 0,
        "log_end": 10,
        "high_watermark": 4,
        "now_ms": 0,
    }
    arguments.update(values)
    return leading.take_over(state, 7, 1, **arguments)


def fetch_of(replica: int, offset: int, **values: int) -> FollowerFetch:
    arguments = {"broker_epoch": replica, "leader_epoch": 5, "last_epoch": 4}
    arguments.update(values)
    return FollowerFetch(replica, offset=offset, **arguments)


@pytest.mark.parametrize(
    ("fetch", "end_of_epoch", "error", "diverging"),
    [
        (fetch_of(9, 10), (4, 10), 75, None),
        (fetch_of(2, 10, leader_epoch=4), (4, 10), 74, None),
        (fetch_of(2, 10, leader_epoch=6), (4, 10), 75, None),
        (fetch_of(2, 10, broker_epoch=8), (4, 10), 6, None),
        (fetch_of(2, 1), (4, 10), 1, None),
        (fetch_of(2, 10), (-1, -1), 1, None),
        (fetch_of(2, 11, last_epoch=-1), (-1, -1), 1, None),
        (fetch_of(2, 10), (3, 8), None, (3, 8)),
        (fetch_of(2, 10), (4, 9), None, (4, 9)),
    ],
)
def test_refused_fetch_has_kafkas_code_and_changes_nothing(
    fetch: FollowerFetch,
    end_of_epoch: tuple[int, int],
    error: int | None,
    diverging: tuple[int, int] | None,
) -> None:
    leader = book_of(state_of(1, 1, 2), log_start=2)
    after, refusal = leading.fetched(leader, fetch, end_of_epoch, live_of(1, 2, 3), 50)
    assert refusal is not None
    assert refusal.error == error
    assert refusal.diverging == diverging
    assert after is leader


def test_high_watermark_is_the_lowest_end_of_both_isrs() -> None:
    live = live_of(1, 2, 3)
    leader = book_of(state_of(1, 1, 2))
    assert leader.high_watermark == 4  # the end of follower 2 is unknown
    leader = fetched(leader, fetch_of(2, 8), live, 10)
    assert leader.high_watermark == 8
    leader = fetched(leader, fetch_of(3, 10), live, 20)
    assert leader.proposal is not None
    assert set(leader.proposal.state.isr) == {1, 2, 3}
    assert leader.proposal.version == 7
    leader = leading.appended(leader, 20, is_durable=False, now_ms=0)
    leader = fetched(leader, fetch_of(2, 20), live, 30)
    assert leader.high_watermark == 10  # durable end of the leader, and end of 3
    leader = leading.synced(leader, 20)
    assert leader.high_watermark == 10
    leader = leading.read_state(
        leader, state_of(1, 1, 2), 8
    )  # the proposal was refused
    assert leader.high_watermark == 20


def test_follower_joins_only_above_the_epoch_start() -> None:
    leader = book_of(state_of(1, 1, 2))
    live = live_of(1, 2, 3)
    for offset, joins in [(4, False), (9, False), (10, True)]:
        after = fetched(leader, fetch_of(3, offset), live, 10)
        assert (after.proposal is not None) is joins
    live = live_of(1, 2, _3=LiveBroker(3, "d3", is_leaving=True))
    after = fetched(leader, fetch_of(3, 10), live, 10)
    assert after.proposal is None


def test_slow_member_leaves_after_the_lag_time() -> None:
    live = live_of(1, 2, 3)
    leader = book_of(state_of(1, 1, 2, 3))
    leader = fetched(leader, fetch_of(2, 10), live, 500)
    leader = leading.appended(leader, 11, is_durable=False, now_ms=0)
    assert leading.review_isr(leader, live, 1_000) is leader
    leader = leading.review_isr(leader, live, 1_001)
    assert leader.proposal is not None
    assert set(leader.proposal.state.isr) == {1, 2}
    assert leading.review_isr(leader, live, 9_999) is leader  # one proposal at a time


def test_follower_is_caught_up_since_its_previous_fetch() -> None:
    """A follower that always lacks the latest append of a busy leader is in sync."""
    live = live_of(1, 2)
    leader = book_of(state_of(1, 1, 2))
    for now_ms in range(0, 10_000, 500):
        leader = fetched(leader, fetch_of(2, leader.log_end), live, now_ms)
        leader = leading.appended(leader, leader.log_end + 1, is_durable=True, now_ms=0)
        late = fetch_of(2, leader.log_end - 1)
        leader = fetched(leader, late, live, now_ms + 400)
    assert leading.review_isr(leader, live, 10_400) is leader


def test_leaving_member_is_removed_after_it_fetched_in_this_epoch() -> None:
    live = live_of(1, 2, _3=LiveBroker(3, "d3", is_leaving=True))
    leader = book_of(state_of(1, 1, 2, 3))
    assert leading.review_isr(leader, live, 10) is leader
    leader = fetched(leader, fetch_of(3, 10), live, 20)
    leader = leading.review_isr(leader, live, 30)
    assert leader.proposal is not None
    assert set(leader.proposal.state.isr) == {1, 2}


# -- the follower ----------------------------------------------------------------------


def follower_of(**values: Any) -> FollowerState:
    arguments: dict[str, Any] = {
        "is_durable_first": True,
        "log_start": 0,
        "log_end": 10,
        "last_epoch": 4,
        "high_watermark": 6,
    }
    state = attrs.evolve(
        state_of(1, 1, 2), is_recovering=values.pop("recovering", False)
    )
    arguments.update(values)
    return following.follow(state, 2, 2, **arguments)


def fetching(follower: FollowerState) -> tuple[FollowerState, FollowerFetch]:
    step = following.next_step(following.synced(follower, follower.log_end))
    assert isinstance(step, following.SendFetch)
    synced = following.synced(follower, follower.log_end)
    return following.sent(synced, step.fetch), step.fetch


def test_first_fetch_of_a_role_follows_a_sync() -> None:
    follower = follower_of()
    assert following.next_step(follower) == following.SyncLog()
    follower, fetch = fetching(follower)
    assert (fetch.offset, fetch.last_epoch, fetch.leader_epoch) == (10, 4, 5)
    assert following.next_step(follower) is None
    assert following.next_step(following.gave_up(follower)) == following.SendFetch(
        fetch
    )


def test_high_watermark_of_a_follower_waits_for_the_sync() -> None:
    follower, fetch = fetching(follower_of())
    answer = LeaderResponse(records=["r"], high_watermark=11, log_start=3)
    follower, effects = following.answered(follower, fetch, answer, (-1, -1))
    assert effects == [
        following.AppendFetched(["r"]),
        following.DeleteRecordsBelow(3),
    ]
    follower = following.changed_log(follower, 3, 11, 5)
    assert follower.high_watermark == 10
    assert following.next_step(follower) == following.SyncLog()
    assert following.synced(follower, 11).high_watermark == 11


def test_answer_to_another_fetch_is_ignored() -> None:
    follower, fetch = fetching(follower_of())
    answer = LeaderResponse(records=["r"], high_watermark=11)
    other = fetch._replace()
    assert following.answered(follower, other, answer, (-1, -1)) == (follower, [])
    longer = following.changed_log(follower, 0, 12, 5)
    assert following.answered(longer, fetch, answer, (-1, -1)) == (longer, [])


@pytest.mark.parametrize(
    ("diverging", "own", "stops"),
    [((3, 8), (3, 9), False), ((3, 8), (2, 6), False), ((3, 8), (3, 5), True), ((3, 5), (-1, -1), True)],
)  # fmt: skip
def test_truncation_below_the_high_watermark_stops_the_replica(
    diverging: tuple[int, int], own: tuple[int, int], stops: bool
) -> None:
    answer = LeaderResponse(diverging=diverging, high_watermark=20)
    follower, fetch = fetching(follower_of())
    after, effects = following.answered(follower, fetch, answer, own)
    assert (after.stopped is not None) is stops
    if stops:
        assert isinstance(effects[0], following.StopReplica)
        assert following.next_step(after) is None
    else:
        assert effects == [following.TruncateToEpoch(*diverging)]
        assert after.high_watermark == 6
    follower, fetch = fetching(follower_of(recovering=True))
    after, effects = following.answered(follower, fetch, answer, own)
    assert effects == [following.TruncateToEpoch(*diverging)]


def test_log_start_above_the_end_restarts_the_log() -> None:
    follower, fetch = fetching(follower_of())
    error = ReplicationError.OFFSET_OUT_OF_RANGE
    after, effects = following.answered(
        follower, fetch, LeaderResponse(error, log_start=30), (-1, -1)
    )
    assert effects == [following.RestartLog(30)]
    assert after.high_watermark == 30
    after, effects = following.answered(
        follower, fetch, LeaderResponse(error, log_start=5), (-1, -1)
    )
    assert isinstance(effects[0], following.StopReplica)
    fenced = LeaderResponse(ReplicationError.FENCED_LEADER_EPOCH)
    _, effects = following.answered(follower, fetch, fenced, (-1, -1))
    assert effects == [following.BackOff()]


# -- the controller --------------------------------------------------------------------

SETTINGS = PartitionSettings(min_insync_replicas=2)


@pytest.mark.parametrize(
    ("state", "live", "leader", "epoch", "isr", "elr"),
    [
        # A follower has died: the epoch remains.
        (state_of(1, 1, 2, 3), live_of(1, 2), 1, 5, {1, 2}, set()),
        (state_of(1, 1, 2), live_of(1, 3), 1, 5, {1}, {2}),
        # The leader has died.
        (state_of(1, 1, 2, 3), live_of(2, 3), 2, 6, {2, 3}, set()),
        (state_of(1, 1), live_of(2, 3), NO_LEADER, 6, set(), {1}),
        # The leader registered again, and is the only candidate.
        (state_of(1, 1), live_of(_1=LiveBroker(8, "d1")), 1, 6, {1}, set()),
        # The disk of the leader was replaced.
        (state_of(1, 1), live_of(_1=LiveBroker(8, "new")), NO_LEADER, 6, set(), set()),
        # A member of the ELR returns.
        (state_of(-1, elr=(1, 2)), live_of(2, 3), 2, 6, {2}, {1}),
        (state_of(-1, elr=(1, 2)), live_of(3), -1, 5, set(), {1, 2}),
        # The leader shuts down: it remains in the ISR until the next leader removes it.
        (state_of(1, 1, 2), live_of(2, _1=LiveBroker(1, "d1", is_leaving=True)), 2, 6, {1, 2}, set()),
        (state_of(1, 1), live_of(_1=LiveBroker(1, "d1", is_leaving=True)), 1, 5, {1}, set()),
    ],
)  # fmt: skip
def test_review_elects_a_leader_and_updates_the_isr(
    state: LeaderAndIsr,
    live: dict[int, LiveBroker],
    leader: int,
    epoch: int,
    isr: set[int],
    elr: set[int],
) -> None:
    new = electing.review(state, SETTINGS, live, 3)
    assert (new.leader, new.leader_epoch) == (leader, epoch)
    assert (set(new.isr), set(new.elr)) == (isr, elr)
    assert electing.review(new, SETTINGS, live, 3) is new
    assert new is state or new.controller_epoch == 3


def test_leader_that_satisfies_min_isr_alone_empties_the_elr() -> None:
    """The leader alone then advances the high watermark, so the other members of the
    ELR may lack records.
    """
    settings = attrs.evolve(SETTINGS, min_insync_replicas=1)
    new = electing.review(state_of(-1, elr=(1, 2)), settings, live_of(1), 3)
    assert (new.leader, set(new.isr), new.elr) == (1, {1}, {})


def test_unclean_shutdown_leaves_the_elr_if_the_policy_does_not_wait() -> None:
    settings = attrs.evolve(SETTINGS, is_durable_first=False)
    state = state_of(-1, elr=(1,))
    for was_clean, leader in [(True, 1), (False, NO_LEADER)]:
        live = live_of(_1=LiveBroker(8, "d1", was_clean=was_clean))
        assert electing.review(state, settings, live, 3).leader == leader


def test_unclean_election_needs_the_setting_or_a_request() -> None:
    state, live = state_of(-1, elr=(1,)), live_of(3)
    assert electing.review(state, SETTINGS, live, 3) is state
    allowed = attrs.evolve(SETTINGS, is_unclean_allowed=True)
    new = electing.review(state, allowed, live, 3)
    assert (new.leader, set(new.isr), new.elr, new.is_recovering) == (3, {3}, {}, True)
    assert electing.elect_unclean(state, SETTINGS, live, 3) == new
    assert electing.elect_unclean(state, SETTINGS, {}, 3) == 83
    assert electing.elect_unclean(new, SETTINGS, live, 3) == 84


def test_preferred_leader() -> None:
    live = live_of(1, 2, 3)
    assert electing.prefer_leader(state_of(1, 1, 2), live, 3) == 84
    assert electing.prefer_leader(state_of(2, 2, 3), live, 3) == 80
    new = electing.prefer_leader(state_of(2, 1, 2), live, 3)
    assert isinstance(new, LeaderAndIsr)
    assert (new.leader, new.leader_epoch) == (1, 6)


def test_new_partition_needs_one_registered_replica() -> None:
    state = electing.create_state((1, 2, 3), live_of(2, 3), 3)
    assert state is not None
    assert (state.leader, state.leader_epoch, set(state.isr)) == (2, 0, {2, 3})
    assert electing.create_state((1, 2, 3), live_of(4), 3) is None


def test_reassignment_ends_when_the_target_is_in_sync() -> None:
    began = electing.reassign(state_of(1, 1, 2, 3), (4, 2), {1, 2, 3, 4})
    assert isinstance(began, LeaderAndIsr)
    assert began.replicas == (4, 2, 1, 3)
    assert (began.adding, began.removing) == ((4,), (1, 3))
    live = live_of(1, 2, 3, 4)
    moved = electing.review(began, SETTINGS, live, 3)
    assert (moved.leader, moved.replicas) == (2, began.replicas)
    in_sync = attrs.evolve(moved, isr=state_of(2, 2, 4).isr, elr={3: "d3"})
    done = electing.review(in_sync, SETTINGS, live, 3)
    assert (done.replicas, done.adding, done.removing) == ((4, 2), (), ())
    assert (done.leader, set(done.isr), done.elr) == (2, {2, 4}, {})


def test_end_of_a_reassignment_that_removes_a_broker_begins_an_epoch() -> None:
    """A leader that was paused must refuse the last fetches of that broker."""
    live = live_of(1, 2, 3, 4)
    for target, isr, began in [((1, 2), (1, 2), 1), ((1, 2, 3, 4), (1, 2, 3, 4), 0)]:
        moving = electing.reassign(state_of(1, *isr), target, {1, 2, 3, 4})
        assert isinstance(moving, LeaderAndIsr)
        done = electing.review(moving, SETTINGS, live, 3)
        assert done.replicas == target
        assert done.leader_epoch == moving.leader_epoch + began


def test_cancelled_reassignment_removes_the_added_brokers() -> None:
    moving = electing.reassign(state_of(1, 1, 2, 3), (4, 2), {1, 2, 3, 4})
    assert isinstance(moving, LeaderAndIsr)
    cancelled = electing.reassign(moving, None, set())
    assert isinstance(cancelled, LeaderAndIsr)
    assert cancelled.target == (2, 1, 3)
    assert cancelled.removing == (4,)
    # Broker 4 was not a replica before, so a second cancellation does not keep it.
    for target in [(2, 1, 3), (5, 1, 2)]:
        again = electing.reassign(moving, target, {1, 2, 3, 4, 5})
        assert isinstance(again, LeaderAndIsr)
        assert 4 in again.removing
        cancelled = electing.reassign(again, None, set())
        assert isinstance(cancelled, LeaderAndIsr)
        assert sorted(cancelled.target) == [1, 2, 3]
    assert electing.reassign(state_of(1, 1), None, set()) == 85


@pytest.mark.parametrize("target", [(), (1, 1), (1, 9)])
def test_reassignment_needs_different_known_brokers(target: tuple[int, ...]) -> None:
    assert electing.reassign(state_of(1, 1), target, {1, 2, 3}) == 39


def test_leader_removes_replaced_members_once_the_target_is_in_sync() -> None:
    live = live_of(1, 2, 3, 4)
    state = state_of(1, 1, 2, 3)
    leader = book_of(state)
    leader = fetched(leader, fetch_of(3, 10), live, 10)
    moving = electing.reassign(state, (1, 2, 4), {1, 2, 3, 4})
    assert isinstance(moving, LeaderAndIsr)
    leader = leading.read_state(leader, moving, 8)
    assert leading.review_isr(leader, live, 20) is leader
    leader = fetched(leader, fetch_of(4, 10), live, 30)
    assert leader.proposal is not None
    leader = leading.read_state(leader, leader.proposal.state, 9)
    leader = leading.review_isr(leader, live, 40)
    assert leader.proposal is not None
    assert set(leader.proposal.state.isr) == {1, 2, 4}


def test_leader_removes_a_broker_that_is_no_longer_assigned() -> None:
    live = live_of(1, 2, 3)
    leader = book_of(state_of(1, 1, 2))
    leader = leading.read_state(leader, attrs.evolve(leader.state, replicas=(1, 2)), 8)
    _, refusal = leading.fetched(leader, fetch_of(3, 10), (4, 10), live, 10)
    assert refusal is not None
    assert refusal.error == ReplicationError.UNKNOWN_LEADER_EPOCH


def test_min_insync_replicas_may_change_while_leading() -> None:
    leader = book_of(state_of(1, 1), min_insync_replicas=2)
    assert not leader.has_min_isr
    leader = leading.change_min_insync_replicas(leader, 1)
    assert leader.has_min_isr
    assert leader.high_watermark == leader.own_end


# -- placement -------------------------------------------------------------------------


def test_placement_without_racks() -> None:
    """The example in the documentation of Kafka's AdminUtils: 5 brokers, 10 partitions."""
    assert place_partitions(dict.fromkeys(range(5)), 10, 3) == [
        (0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 0), (4, 0, 1),
        (0, 2, 3), (1, 3, 4), (2, 4, 0), (3, 0, 1), (4, 1, 2),
    ]  # fmt: skip


def test_placement_with_racks() -> None:
    """Kafka's example: 6 brokers in 3 racks; the second round uses another order."""
    racks = {0: "a", 1: "c", 2: "c", 3: "b", 4: "b", 5: "a"}
    placed = place_partitions(racks, 7, 3)
    assert placed == [
        (0, 3, 1), (3, 1, 5), (1, 5, 4), (5, 4, 2), (4, 2, 0), (2, 0, 3), (0, 4, 2),
    ]  # fmt: skip
    assert place_partitions(racks, 1, 3, first_partition=6, shift=0) == [(0, 4, 2)]
    # One rack alone has two brokers: a second replica in it comes last.
    assert place_partitions({0: "a", 1: "a", 2: "b"}, 1, 3) == [(0, 2, 1)]


@pytest.mark.parametrize("factor", [0, 4])
def test_placement_refuses_an_impossible_factor(factor: int) -> None:
    assert place_partitions(dict.fromkeys(range(3)), 1, factor) == 38
