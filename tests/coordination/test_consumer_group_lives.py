"""Random lives of a group of the consumer protocol: members as clients are, against a
coordinator that loses power.

Goal: in any order of heartbeats, lost answers, silent members, topics that come and go,
disks that fail, and power cuts before the disk is done, no partition is with two
members at once, and when all is quiet again everything is assigned.
Method: chance decides what happens next (support/consumerlives.py). Mistakes that
somebody might make are made on purpose below, and have to be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logcore.coordination import consumer_transitions
from logcore.coordination.consumer_assignors import uniform
from logcore.coordination.consumer_group import ConsumerGroup
from logcore.coordination.effects import GroupError
from logcore.format.consumer_group_records import Current, Partitions
from support.consumerlives import NOTHING, STEPS, Life, live


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_no_partition_is_with_two_members_and_all_becomes_stable(first: int) -> None:
    for seed in range(first, first + 10):
        live(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 20_000, 1_000))
def test_the_same_in_many_more_lives(first: int) -> None:
    for seed in range(first, first + 1_000):
        live(seed)


def test_the_same_when_no_two_steps_share_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_transitions, "_BATCH_BYTES", 1)
    for seed in range(1_000, 1_030):
        live(seed)


def test_lives_meet_what_they_are_for() -> None:
    """So that the tests above do not pass because nothing happens."""
    met: set[str] = set()
    for seed in range(12):
        life = Life(seed)
        for _ in range(STEPS):
            life.step()
            group = life.group
            if group is not None:
                met |= {one.state.name for one in group.currents.values()}
                met |= (
                    {"away"}
                    if any(one.member_epoch == -2 for one in group.currents.values())
                    else set()
                )
                met |= {"unsure"} if group.unsure else set()
                met |= {"queued"} if group.queued else set()
            met |= {type(event).__name__ for event in life.world.events}
    assert met >= {"STABLE", "UNREVOKED", "UNRELEASED", "away", "unsure", "queued"}
    assert met >= {"SessionEnded", "RevocationEnded", "TargetsChanged", "GroupEmptied"}


# -- mistakes that have to be noticed --------------------------------------------------


def owners_ignored(patch: pytest.MonkeyPatch) -> None:
    """What another member still has is given away."""
    real = ConsumerGroup._next

    def hasty(self: ConsumerGroup, *arguments: Any) -> Current:
        owners = self.owners
        self.owners = {}
        try:
            return real(self, *arguments)
        finally:
            self.owners = owners

    patch.setattr(ConsumerGroup, "_next", hasty)


def silence_confirms(patch: pytest.MonkeyPatch) -> None:
    """A heartbeat that says nothing of what the member owns counts as if it owned
    nothing.
    """
    real = ConsumerGroup.reconciled
    patch.setattr(
        ConsumerGroup,
        "reconciled",
        lambda self, member_id, owned: real(self, member_id, owned or NOTHING),
    )


def any_word_confirms(patch: pytest.MonkeyPatch) -> None:
    """A list of what the member owns confirms, whatever is in it."""
    real = ConsumerGroup.reconciled

    def hasty(
        self: ConsumerGroup, member_id: str, owned: Partitions | None
    ) -> Current | None:
        return real(self, member_id, NOTHING if owned else owned)

    patch.setattr(ConsumerGroup, "reconciled", hasty)


def answered_before_the_disk(patch: pytest.MonkeyPatch) -> None:
    real = consumer_transitions.HeartbeatStep.finish

    def hasty(self: consumer_transitions.HeartbeatStep, answers: Any) -> None:
        self.effects += [
            consumer_transitions.Reply(waiter, result) for waiter, result in answers
        ]
        real(self, [])

    patch.setattr(consumer_transitions.HeartbeatStep, "finish", hasty)


def not_written_again(patch: pytest.MonkeyPatch) -> None:
    """What may be on disk though that failed stays there."""
    real = consumer_transitions.HeartbeatStep.have_failed

    def forgetful(self: consumer_transitions.HeartbeatStep, error: GroupError) -> None:
        real(self, error)
        self.consumers.unsure.clear()

    patch.setattr(consumer_transitions.HeartbeatStep, "have_failed", forgetful)


def revoking_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Only what a member may use has an owner."""
    real = ConsumerGroup._put_current

    def hasty(self: ConsumerGroup, member_id: str, current: Current | None) -> None:
        real(self, member_id, current)
        for partition in current.revoking if current is not None else ():
            del self.owners[partition]

    patch.setattr(ConsumerGroup, "_put_current", hasty)


def nobody_is_silent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        consumer_transitions.HeartbeatStep, "end_session", lambda self, member_id: None
    )


def nobody_is_slow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        consumer_transitions.HeartbeatStep,
        "end_revocation",
        lambda self, member_id: None,
    )


def topics_stay_what_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerGroup, "hash_of", lambda self, topics: 1)


def two_batches_at_a_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerGroup, "is_busy", False)


def one_partition_is_left_out(patch: pytest.MonkeyPatch) -> None:
    def careless(members: Any, counts: Any) -> Any:
        return {
            name: frozenset(sorted(had)[:2])
            for name, had in uniform(members, counts).items()
        }

    monkey = {"uniform": careless, "range": careless}
    patch.setattr("logcore.coordination.consumer_group.ASSIGNORS", monkey)


def sessions_do_not_begin_with_the_process(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer_transitions, "begin_sessions", lambda group, around: [])


MISTAKES = [
    owners_ignored,
    silence_confirms,
    any_word_confirms,
    answered_before_the_disk,
    not_written_again,
    revoking_is_forgotten,
    nobody_is_silent,
    nobody_is_slow,
    topics_stay_what_they_were,
    two_batches_at_a_time,
    one_partition_is_left_out,
    sessions_do_not_begin_with_the_process,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_lives_notice(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(400):
            live(seed)
