"""Topics of the same name: which replicas belong to which topic.

A topic that is deleted and created again has another id. Its states begin again with the
same leader epochs, so only the id distinguishes the two. Ids are values that can be
compared, such as strings.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Hashable


class ReplicaTreatment(enum.Enum):
    """The treatment of the replicas of a topic on the disk of a broker."""

    KEEP = enum.auto()
    DELETE = enum.auto()
    #: Another topic has the name, and no deletion of the former one is known.
    SET_ASIDE = enum.auto()


def replica_treatment(
    own_id: Hashable, present_id: Hashable | None, deleted_ids: Container[Hashable]
) -> ReplicaTreatment:
    """Return the treatment of the replicas of the topic `own_id`.

    `present_id` is the id of the topic that has its name in the registry; None if there
    is none. A missing topic is no reason to delete replicas, because the registry may
    have lost its nodes. `deleted_ids` are the topics whose deletion is recorded.
    """
    if own_id == present_id:
        return ReplicaTreatment.KEEP
    if own_id in deleted_ids:
        return ReplicaTreatment.DELETE
    if present_id is None:
        return ReplicaTreatment.KEEP
    return ReplicaTreatment.SET_ASIDE


def is_replica_of(own_id: Hashable | None, topic_id: Hashable) -> bool:
    """Return whether replicas with an id may have a role in a topic.

    `own_id` is None for a topic that was not placed on this broker.
    """
    return own_id == topic_id
