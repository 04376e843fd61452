"""Topic partitions, and the members of a group as an assignor receives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import attrs


class TopicPartition(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int


def java_order(text: str) -> bytes:
    """Return a key that sorts texts like Java, by UTF-16 units."""
    return text.encode("utf-16-be", "surrogatepass")


@attrs.frozen
class Member:
    """A member of a group."""

    member_id: str
    #: The subscription.
    topics: frozenset[str]
    instance_id: str | None = None
    #: The partitions that the member claims.
    owned: tuple[TopicPartition, ...] = ()
    #: The generation of the claim, or -1 if unknown.
    generation: int = -1
    #: The result of Assignor.subscription_user_data() in the member.
    user_data: bytes | None = None

    def order(self) -> tuple[bool, bytes]:
        """Return a sort key that places static members first, by their instance ids."""
        if self.instance_id is not None:
            return False, java_order(self.instance_id)
        return True, java_order(self.member_id)


@attrs.frozen
class Claims:
    """The earlier owners of partitions."""

    #: For each partition, the members whose claim has the newest generation.
    claimants: Mapping[TopicPartition, frozenset[str]]
    #: The claimant of each partition that has exactly one.
    owners: Mapping[TopicPartition, str]
    #: The member with the newest of the older claims.
    previous_owners: Mapping[TopicPartition, str]

    @classmethod
    def of(cls, members: Iterable[Member], known: Mapping[str, int]) -> Claims:
        """Return the claims of members. `known` maps topics to numbers of partitions;
        claims for other partitions are ignored.
        """
        by_partition: dict[TopicPartition, list[tuple[int, str]]] = {}
        for member in members:
            for partition in member.owned:
                if 0 <= partition.partition < known.get(partition.topic, 0):
                    by_partition.setdefault(partition, []).append(
                        (member.generation, member.member_id)
                    )
        claimants = {}
        previous_owners = {}
        for partition, claims in by_partition.items():
            newest = max(generation for generation, _ in claims)
            claimants[partition] = frozenset(
                member_id for generation, member_id in claims if generation == newest
            )
            older = [claim for claim in claims if claim[0] < newest]
            if older:
                previous_owners[partition] = max(older)[1]
        owners = {
            partition: min(member_ids)
            for partition, member_ids in claimants.items()
            if len(member_ids) == 1
        }
        return cls(claimants, owners, previous_owners)

    def retained_by(self, member: Member) -> list[TopicPartition]:
        """Return the partitions that a member may keep: it owns them, and still
        subscribes to their topics.
        """
        return [
            partition
            for partition in member.owned
            if self.owners.get(partition) == member.member_id
            and partition.topic in member.topics
        ]
