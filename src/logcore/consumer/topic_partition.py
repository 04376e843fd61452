"""What an assignor knows of the members of a group: their subscriptions, and what they
had before.

Nothing here decides who gets what.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import attrs


class TopicPartition(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int


def java_order(text: str) -> bytes:
    """A key that sorts texts as Java does: by their UTF-16 units."""
    return text.encode("utf-16-be", "surrogatepass")


@attrs.frozen
class Member:
    """A member of a group. topics: its subscription. owned: what it says it has.
    generation: of that claim, -1 when it does not say. user_data: what its assignor
    says of it besides.
    """

    member_id: str
    topics: frozenset[str]
    instance_id: str | None = None
    owned: tuple[TopicPartition, ...] = ()
    generation: int = -1
    user_data: bytes | None = None

    def order(self) -> tuple[bool, bytes]:
        """Static members come first, by their instance ids."""
        if self.instance_id is not None:
            return False, java_order(self.instance_id)
        return True, java_order(self.member_id)


@attrs.frozen
class Claims:
    """Who had which partition. claimants: those whose claim is the newest, of each
    partition. owners: the same where that is one member. before: who had it by an older
    claim.
    """

    claimants: Mapping[TopicPartition, frozenset[str]]
    owners: Mapping[TopicPartition, str]
    before: Mapping[TopicPartition, str]

    @classmethod
    def of(cls, members: Iterable[Member], known: Mapping[str, int]) -> Claims:
        """known: topic -> how many partitions it has; claims on others do not count."""
        by_partition: dict[TopicPartition, list[tuple[int, str]]] = {}
        for member in members:
            for one in member.owned:
                if 0 <= one.partition < known.get(one.topic, 0):
                    by_partition.setdefault(one, []).append(
                        (member.generation, member.member_id)
                    )
        claimants = {}
        before = {}
        for one, claims in by_partition.items():
            newest = max(generation for generation, _ in claims)
            claimants[one] = frozenset(
                member_id for generation, member_id in claims if generation == newest
            )
            older = [claim for claim in claims if claim[0] < newest]
            if older:
                before[one] = max(older)[1]
        owners = {
            one: min(those) for one, those in claimants.items() if len(those) == 1
        }
        return cls(claimants, owners, before)

    def kept(self, member: Member) -> list[TopicPartition]:
        """What a member may keep: it owns it, and still subscribes to the topic."""
        return [
            one
            for one in member.owned
            if self.owners.get(one) == member.member_id and one.topic in member.topics
        ]
