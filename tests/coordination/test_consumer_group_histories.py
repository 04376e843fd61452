"""Random histories of a group of the consumer protocol: simulated clients and a
coordinator that loses power.

Goal: no partition is assigned to two members at once, and every partition is assigned
in the end. This must hold for any order of heartbeats, lost answers, silent members,
created and deleted topics, failing disks, and power cuts before a sync.

Method: the next step is random (support/group_histories.py). The realistic mistakes below
are made on purpose, and the histories must detect them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logcore.coordination import consumer_transitions
from logcore.coordination.consumer_assignors import uniform
from logcore.coordination.consumer_group import ConsumerGroup
from logcore.coordination.group_requests import GroupError
from logcore.format.consumer_group_records import Current, Partitions
from support.group_histories import NO_PARTITIONS, STEPS, RandomHistory, run_history


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_partitions_have_one_owner_and_the_group_becomes_stable(first: int) -> None:
    for seed in range(first, first + 10):
        run_history(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 20_000, 1_000))
def test_many_more_histories(first: int) -> None:
    for seed in range(first, first + 1_000):
        run_history(seed)


@pytest.mark.long
def test_histories_without_shared_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_transitions, "_BATCH_BYTES", 1)
    for seed in range(1_000, 1_030):
        run_history(seed)


def test_histories_reach_all_states_and_events() -> None:
    """If histories reached few states, the tests above could pass without testing
    anything.
    """
    met: set[str] = set()
    for seed in range(12):
        history = RandomHistory(seed)
        for _ in range(STEPS):
            history.step()
            group = history.group
            if group is not None:
                met |= {current.state.name for current in group.currents.values()}
                met |= (
                    {"away"}
                    if any(
                        current.member_epoch == -2
                        for current in group.currents.values()
                    )
                    else set()
                )
                met |= {"unsure"} if group.unsure else set()
                met |= {"queued"} if group.queued else set()
            met |= {type(event).__name__ for event in history.simulation.events}
    assert met >= {"STABLE", "UNREVOKED", "UNRELEASED", "away", "unsure", "queued"}
    assert met >= {"SessionEnded", "RevocationEnded", "TargetsChanged", "GroupEmptied"}


# -- mistakes that must be detected ----------------------------------------------------


def owners_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """Partitions that another member still owns are assigned."""
    real = ConsumerGroup._next

    def hasty(self: ConsumerGroup, *arguments: Any) -> Current:
        owners = self.owners
        self.owners = {}
        try:
            return real(self, *arguments)
        finally:
            self.owners = owners

    patch.setattr(ConsumerGroup, "_next", hasty)


def missing_owned_list_confirms(patch: pytest.MonkeyPatch) -> None:
    """A missing list of owned partitions is handled like an empty list."""
    real = ConsumerGroup.reconciled
    patch.setattr(
        ConsumerGroup,
        "reconciled",
        lambda self, member_id, owned: real(self, member_id, owned or NO_PARTITIONS),
    )


def any_owned_list_confirms(patch: pytest.MonkeyPatch) -> None:
    """Any list of owned partitions confirms the assignment, whatever it contains."""
    real = ConsumerGroup.reconciled

    def hasty(
        self: ConsumerGroup, member_id: str, owned: Partitions | None
    ) -> Current | None:
        return real(self, member_id, NO_PARTITIONS if owned else owned)

    patch.setattr(ConsumerGroup, "reconciled", hasty)


def answered_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    real = consumer_transitions.HeartbeatStep.finish

    def hasty(self: consumer_transitions.HeartbeatStep, answers: Any) -> None:
        self.effects += [
            consumer_transitions.Reply(waiter, result) for waiter, result in answers
        ]
        real(self, [])

    patch.setattr(consumer_transitions.HeartbeatStep, "finish", hasty)


def unsure_records_are_not_rewritten(patch: pytest.MonkeyPatch) -> None:
    """Records that may be on disk after a failed write are not overwritten."""
    real = consumer_transitions.HeartbeatStep.have_failed

    def forgetful(self: consumer_transitions.HeartbeatStep, error: GroupError) -> None:
        real(self, error)
        self.consumers.unsure.clear()

    patch.setattr(consumer_transitions.HeartbeatStep, "have_failed", forgetful)


def revoking_partitions_have_no_owner(patch: pytest.MonkeyPatch) -> None:
    """Only assigned partitions have an owner."""
    real = ConsumerGroup._put_current

    def hasty(self: ConsumerGroup, member_id: str, current: Current | None) -> None:
        real(self, member_id, current)
        for partition in current.revoking if current is not None else ():
            del self.owners[partition]

    patch.setattr(ConsumerGroup, "_put_current", hasty)


def sessions_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        consumer_transitions.HeartbeatStep, "end_session", lambda self, member_id: None
    )


def revocations_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        consumer_transitions.HeartbeatStep,
        "end_revocation",
        lambda self, member_id: None,
    )


def topic_changes_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerGroup, "hash_of", lambda self, topics: 1)


def two_batches_are_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerGroup, "is_busy", False)


def one_partition_is_not_assigned(patch: pytest.MonkeyPatch) -> None:
    def careless(members: Any, counts: Any) -> Any:
        return {
            name: frozenset(sorted(had)[:2])
            for name, had in uniform(members, counts).items()
        }

    monkey = {"uniform": careless, "range": careless}
    patch.setattr("logcore.coordination.consumer_group.ASSIGNORS", monkey)


def sessions_do_not_begin_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer_transitions, "begin_sessions", lambda group, around: [])


MISTAKES = [
    owners_are_ignored,
    missing_owned_list_confirms,
    any_owned_list_confirms,
    answered_before_the_sync,
    unsure_records_are_not_rewritten,
    revoking_partitions_have_no_owner,
    sessions_never_end,
    revocations_never_end,
    topic_changes_are_ignored,
    two_batches_are_in_flight,
    one_partition_is_not_assigned,
    sessions_do_not_begin_after_a_restart,
]


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_histories_detect_the_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(400):
            run_history(seed)
