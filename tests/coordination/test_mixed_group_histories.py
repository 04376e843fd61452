"""Random histories of groups whose clients change from one protocol to the other while
they run, and back.

Goal: no partition is assigned to two members at once, whatever their protocols are, and
every partition is assigned in the end. This must hold for any order of requests, lost
answers, silent members, failing disks and power cuts. Method: as in
test_consumer_group_histories.py, with additional clients of the classic protocol
(support/mixed_histories.py). The realistic mistakes below are made on purpose, and the
histories must detect them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logcore.coordination import consumer_transitions, migration
from logcore.coordination.consumer_group import ConsumerGroup
from logcore.format.group_records import read_subscription
from support.group_histories import NO_PARTITIONS, STEPS
from support.mixed_histories import MixedHistory

REMAINING = ("both", "consumer", "classic")


def run_history(seed: int) -> None:
    MixedHistory(seed, REMAINING[seed % len(REMAINING)]).run()


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_partitions_have_one_owner_and_the_group_becomes_stable(first: int) -> None:
    for seed in range(first, first + 10):
        run_history(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 20_000, 1_000))
def test_many_more_histories_keep_the_invariants(first: int) -> None:
    for seed in range(first, first + 1_000):
        run_history(seed)


def test_histories_reach_all_states_and_events() -> None:
    """If histories reached few states, the tests above could pass without testing
    anything.
    """
    reached: set[str] = set()
    for seed in range(30):
        history = MixedHistory(seed)
        for _ in range(STEPS):
            history.step()
            group = history.group
            if group is not None:
                kinds = {group.is_classic(name) for name in group.members}
                reached |= {"mixed"} if len(kinds) == 2 else set()
                reached |= {
                    f"classic {current.state.name}"
                    for name, current in group.currents.items()
                    if group.is_classic(name)
                }
            found = history.simulation.coordinator.get("g")
            reached |= (
                {"pending tombstones"}
                if found is not None and found.pending_tombstones
                else set()
            )
            reached |= {
                f"{type(event).__name__} {getattr(event, 'to', '')}".strip()
                for event in history.simulation.events
            }
    assert reached >= {
        "mixed",
        "pending tombstones",
        "classic STABLE",
        "classic UNREVOKED",
        "classic UNRELEASED",
    }
    assert reached >= {
        "GroupConverted consumer",
        "GroupConverted classic",
        "LateMemberRemoved",
        "GroupFormed",
    }


# -- mistakes that must be detected ----------------------------------------------------


def owned_lists_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """An upgrade uses assignments alone, as Kafka does, so that partitions are
    reassigned before their owner is notified.
    """

    def careless(data: bytes) -> Any:
        found = read_subscription(data)
        return None if found is None else found._replace(owned=())

    patch.setattr(migration, "read_subscription", careless)


def assignments_are_ignored(patch: pytest.MonkeyPatch) -> None:
    real = migration.read_whole_assignment
    patch.setattr(migration, "read_whole_assignment", lambda data: real(b""))


def join_releases_all_partitions(patch: pytest.MonkeyPatch) -> None:
    """A cooperative member counts as owning no partition when it joins."""
    real = ConsumerGroup.reconciled

    def careless(self: ConsumerGroup, member_id: str, owned: Any) -> Any:
        return real(
            self, member_id, NO_PARTITIONS if self.is_classic(member_id) else owned
        )

    patch.setattr(ConsumerGroup, "reconciled", careless)


def no_member_is_told_to_rejoin(patch: pytest.MonkeyPatch) -> None:
    real = migration.heartbeat
    patch.setattr(
        migration, "heartbeat", lambda *arguments: (None, real(*arguments)[1])
    )


def conversion_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    real = consumer_transitions.heartbeat

    def forgetful(*arguments: Any, owed: Any = ()) -> Any:
        return real(*arguments)

    patch.setattr(consumer_transitions, "heartbeat", forgetful)


def group_is_downgraded_too_early(patch: pytest.MonkeyPatch) -> None:
    """The downgrade happens while members of the consumer protocol remain."""
    patch.setattr(
        ConsumerGroup,
        "is_all_classic",
        property(lambda self: any(map(self.is_classic, self.members))),
    )


def waiting_requests_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(migration.classic_transitions, "end_rebalance", lambda group: [])


MISTAKES = [
    owned_lists_are_ignored,
    assignments_are_ignored,
    join_releases_all_partitions,
    no_member_is_told_to_rejoin,
    pytest.param(
        conversion_is_not_stored,
        marks=pytest.mark.slow,
        id="conversion_is_not_stored",
    ),
    group_is_downgraded_too_early,
    waiting_requests_are_forgotten,
]


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_histories_detect_the_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        for seed in range(400):
            run_history(seed)
