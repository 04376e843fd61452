"""The placement of the replicas of new partitions on brokers, by Kafka's rule.

The first replica of each partition moves one broker further, and the other replicas are
shifted by one more after each round of all brokers. With racks, brokers are ordered so
that neighbors are in different racks, and a replica skips a rack that already has a
replica of the partition while another rack has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from logcore.replication.state import ReplicationError


def place_partitions(
    brokers: Mapping[int, str | None],
    partitions: int,
    replication_factor: int,
    *,
    start: int = 0,
    shift: int = 0,
    first_partition: int = 0,
) -> list[tuple[int, ...]] | ReplicationError:
    """Return the replicas of each partition, the preferred leader first.

    `brokers` maps each broker that has ever registered to its rack. `start` and `shift`
    are random numbers, so that topics do not all begin at the same broker.
    `first_partition` is the number of the first new partition of an existing topic.
    """
    if not 1 <= replication_factor <= len(brokers):
        return ReplicationError.INVALID_REPLICATION_FACTOR
    racks = set(brokers.values())
    if None in racks:  # Kafka ignores racks unless every broker has one.
        brokers, racks = dict.fromkeys(brokers), {None}
    ordered = alternate_racks(brokers)
    placed = []
    for partition in range(first_partition, first_partition + partitions):
        if partition > 0 and partition % len(ordered) == 0:
            shift += 1
        first = (partition + start) % len(ordered)
        chosen = [ordered[first]]
        attempt = 0
        while len(chosen) < replication_factor:
            distance = 1 + (shift * len(racks) + attempt) % (len(ordered) - 1)
            broker = ordered[(first + distance) % len(ordered)]
            attempt += 1
            used = {brokers[each] for each in chosen}
            if broker not in chosen and (brokers[broker] not in used or used == racks):
                chosen.append(broker)
        placed.append(tuple(chosen))
    return placed


def alternate_racks(brokers: Mapping[int, str | None]) -> list[int]:
    """Return the brokers so that neighbors are in different racks."""
    by_rack: dict[str, list[int]] = {}
    for broker in sorted(brokers):
        by_rack.setdefault(brokers[broker] or "", []).append(broker)
    rows = itertools.zip_longest(*(by_rack[rack] for rack in sorted(by_rack)))
    return [broker for row in rows for broker in row if broker is not None]
