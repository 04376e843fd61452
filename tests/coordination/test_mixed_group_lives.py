"""Random lives of groups whose clients go from one protocol to the other while they
run, and back.

Goal: in any order of requests, lost answers, silent members, disks that fail and power
cuts, no partition is with two members at once, whatever protocol they speak, and when
all is quiet again everything is assigned. Method: as test_consumer_group_lives.py, with
clients of the classic protocol among the others (support/mixedlives.py). Mistakes that
somebody might make are made on purpose below, and have to be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logcore.coordination import consumer_transitions, migration
from logcore.coordination.consumer_group import ConsumerGroup
from logcore.format.group_records import read_subscription
from support.consumerlives import NOTHING, STEPS
from support.mixedlives import MixedLife

CALMS = ("both", "consumer", "classic")


def live(seed: int) -> None:
    MixedLife(seed, CALMS[seed % len(CALMS)]).live()


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_no_partition_is_with_two_members_and_all_becomes_stable(first: int) -> None:
    for seed in range(first, first + 10):
        live(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 20_000, 1_000))
def test_the_same_in_many_more_lives(first: int) -> None:
    for seed in range(first, first + 1_000):
        live(seed)


def test_lives_meet_what_they_are_for() -> None:
    """So that the tests above do not pass because nothing happens."""
    met: set[str] = set()
    for seed in range(30):
        life = MixedLife(seed)
        for _ in range(STEPS):
            life.step()
            group = life.group
            if group is not None:
                kinds = {group.is_classic(name) for name in group.members}
                met |= {"mixed"} if len(kinds) == 2 else set()
                met |= {
                    f"classic {one.state.name}"
                    for name, one in group.currents.items()
                    if group.is_classic(name)
                }
            found = life.world.coordinator.get("g")
            met |= {"owed"} if found is not None and found.owed else set()
            met |= {
                f"{type(event).__name__} {getattr(event, 'to', '')}".strip()
                for event in life.world.events
            }
    assert met >= {
        "mixed",
        "owed",
        "classic STABLE",
        "classic UNREVOKED",
        "classic UNRELEASED",
    }
    assert met >= {
        "GroupConverted consumer",
        "GroupConverted classic",
        "LateMemberRemoved",
        "GroupFormed",
    }


# -- mistakes that have to be noticed --------------------------------------------------


def claims_are_passed_over(patch: pytest.MonkeyPatch) -> None:
    """In an upgrade only assignments count, as with Kafka: what a member has not heard
    that it lost is given away.
    """

    def careless(data: bytes) -> Any:
        found = read_subscription(data)
        return None if found is None else found._replace(owned=())

    patch.setattr(migration, "read_subscription", careless)


def assignments_are_passed_over(patch: pytest.MonkeyPatch) -> None:
    real = migration.read_whole_assignment
    patch.setattr(migration, "read_whole_assignment", lambda data: real(b""))


def joining_gives_all_up(patch: pytest.MonkeyPatch) -> None:
    """A cooperative member counts as one that owns nothing when it joins."""
    real = ConsumerGroup.reconciled

    def careless(self: ConsumerGroup, member_id: str, owned: Any) -> Any:
        return real(self, member_id, NOTHING if self.is_classic(member_id) else owned)

    patch.setattr(ConsumerGroup, "reconciled", careless)


def nobody_is_told_to_join_again(patch: pytest.MonkeyPatch) -> None:
    real = migration.heartbeat
    patch.setattr(
        migration, "heartbeat", lambda *arguments: (None, real(*arguments)[1])
    )


def what_was_converted_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    real = consumer_transitions.beat

    def forgetful(*arguments: Any, owed: Any = ()) -> Any:
        return real(*arguments)

    patch.setattr(consumer_transitions, "beat", forgetful)


def a_group_goes_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """While members of the consumer protocol are left."""
    patch.setattr(
        ConsumerGroup,
        "is_all_classic",
        property(lambda self: any(map(self.is_classic, self.members))),
    )


def waiting_requests_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(migration.classic_transitions, "end_rebalance", lambda group: [])


MISTAKES = [
    claims_are_passed_over,
    assignments_are_passed_over,
    joining_gives_all_up,
    nobody_is_told_to_join_again,
    pytest.param(
        what_was_converted_is_not_stored,
        marks=pytest.mark.slow,
        id="what_was_converted_is_not_stored",
    ),
    a_group_goes_back_too_early,
    waiting_requests_are_forgotten,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_lives_notice(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        for seed in range(400):
            live(seed)
