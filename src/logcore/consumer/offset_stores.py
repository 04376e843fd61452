"""The stores of committed offsets: the log `__consumer_offsets`, the registry, or both
while a group moves from one to the other.

| offsets_storage | dual_commit | commits to | reads |
|---|---|---|---|
| `"log"` | no | the log | the log |
| `"log"` | yes | the log, then the registry | the larger of both |
| `"registry"` | no | the registry | the registry |
| `"registry"` | yes | the registry, then the log | the larger of both |

A group can therefore move while it runs, as groups of Kafka 0.8 moved from ZooKeeper:
restart its consumers one after the other with the new storage and dual commits, and
then once more without dual commits.

Rules (clients reference 8.2):
- A commit is valid once it is in the chosen storage. Only then is it written to the
  other one.
- Both stores refuse the commit of a member of an older generation. No rebalance happens
  between that check and the write.
- The larger offset is the newer one as long as commits only move forward. alter() can
  move an offset back, and writes both stores.
- Offsets in a transaction are stored in the log, whatever the storage is.

Nodes of offsets are in registry/offsets.py, and export and import in cli/groups.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from logcore.consumer.settings import OffsetAndMetadata, OffsetsStorage, checked_offset
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    OffsetKey,
)
from logcore.coordinators.process_groups import ProcessGroups
from logcore.format.group_records import Committed
from logcore.metadata.checkpoint import PartitionKey
from logcore.registry import Registry, offsets

#: The commit time of an offset that only the registry contains.
_UNKNOWN_MS: Final = -1


@attrs.frozen
class OffsetStores:
    """The stores of a directory. `registry` is None if only the log is used."""

    groups: ProcessGroups
    registry: Registry | None = None
    storage: OffsetsStorage = "log"
    is_dual: bool = False

    def commit(
        self, committer: Committer, rows: Mapping[OffsetKey, Committed]
    ) -> GroupError | None:
        """Store offsets, and return the reason if they were refused.

        Raises:
            LogcoreError: the registry could not be changed.
        """
        if self.storage == "registry":
            error = self._commit_to_registry(committer, rows)
            if error is None and self.is_dual:
                error = self.groups.commit(committer, rows)
            return error
        error = self.groups.commit(committer, rows)
        if error is None and self.is_dual:
            # A refusal here means that the member lost its partitions after the first
            # write. The commit is still valid.
            self._commit_to_registry(committer, rows)
        return error

    def _commit_to_registry(
        self, committer: Committer, rows: Mapping[OffsetKey, Committed]
    ) -> GroupError | None:
        assert self.registry is not None
        with self.groups.committing(committer) as error:
            if error is None:
                offsets.commit(
                    self.registry,
                    committer.group_id,
                    {key: each.offset for key, each in rows.items()},
                )
        return error

    def committed(self, group_id: str) -> dict[OffsetKey, Committed]:
        """Return all durable committed offsets of a group.

        Raises:
            LogcoreError: the registry could not be read.
        """
        if self.registry is None:
            return self.groups.committed(group_id)
        stored = {}
        if self.storage == "log" or self.is_dual:
            stored = self.groups.committed(group_id)
        for key, offset in offsets.committed(self.registry, group_id).items():
            if key not in stored or stored[key].offset < offset:
                stored[key] = Committed(offset, -1, "", _UNKNOWN_MS)
        return stored


def committed_rows(
    offsets: Mapping[PartitionKey, int | OffsetAndMetadata], now_ms: int
) -> dict[OffsetKey, Committed]:
    """Return the offsets of a user in the form of the log.

    Raises:
        InvalidConfigError: an offset is invalid.
    """
    checked = {
        (str(topic), int(partition)): checked_offset(offset)
        for (topic, partition), offset in offsets.items()
    }
    return {
        key: Committed(offset.offset, offset.leader_epoch, offset.metadata, now_ms)
        for key, offset in checked.items()
    }


def delete(
    groups: ProcessGroups, registry: Registry | None, group_id: str
) -> GroupError | None:
    """Delete a group and all its committed offsets.

    Return the reason if nothing was deleted, for example because the group has members.
    """
    error = groups.delete(group_id)
    if registry is None or error not in (None, GroupError.GROUP_ID_NOT_FOUND):
        return error
    if offsets.committed(registry, group_id):
        offsets.forget(registry, group_id)
        return None
    return error


def alter(
    groups: ProcessGroups,
    registry: Registry | None,
    group_id: str,
    rows: Mapping[OffsetKey, Committed],
    *,
    is_forced: bool,
) -> GroupError | None:
    """Set committed offsets of a group, also to smaller ones.

    This writes the log, and also the registry if it contains offsets of the group.
    Without `is_forced`, a group with members is refused; with it, the members join
    again and continue at the new offsets. Return the reason if nothing was changed.
    """
    if is_forced:
        # The registry first, because members that join again use the larger offset.
        _rewind_registry(registry, group_id, rows)
        error = groups.rewind(group_id, rows)
    else:
        error = groups.commit(Committer(group_id, -1, "", None), rows)
    if error is None:
        # Again, because members may have committed to the registry since the first call.
        _rewind_registry(registry, group_id, rows)
    return error


def _rewind_registry(
    registry: Registry | None, group_id: str, rows: Mapping[OffsetKey, Committed]
) -> None:
    if registry is not None and offsets.committed(registry, group_id):
        offsets.rewind(
            registry, group_id, {key: each.offset for key, each in rows.items()}
        )
