"""The stores of committed offsets: the log `__consumer_offsets`, the registry, or both
while a group moves.

| offsets_storage | dual_commit | commits to | reads |
|---|---|---|---|
| `"log"` | no | the log | the log |
| `"log"` | yes | the log, then the registry | the larger of both |
| `"registry"` | no | the registry | the registry |
| `"registry"` | yes | the registry, then the log | the larger of both |

A group can therefore move while it runs, like groups of Kafka 0.8 moved from ZooKeeper.
All consumers are restarted one after the other with the new storage and dual commits,
and then once more without dual commits.

Rules (clients reference 8.2):
- A commit is valid once it is in the chosen storage. Only then is it written to the
  other one.
- In both stores, a member of an older generation changes nothing. No rebalance happens
  between that check and the write.
- The larger of both is correct as long as no offset moves back. An intended move back
  writes both stores.
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
    """The stores of a directory, see the module. `registry` is None if only the log is
    used.
    """

    groups: ProcessGroups
    registry: Registry | None = None
    storage: OffsetsStorage = "log"
    is_dual: bool = False

    def commit(
        self, committer: Committer, rows: Mapping[OffsetKey, Committed]
    ) -> GroupError | None:
        """Store offsets, and return the reason if they were refused. Raises the errors
        of the registry.
        """
        if self.storage == "registry":
            error = self._commit_to_registry(committer, rows)
            if error is None and self.is_dual:
                error = self.groups.commit(committer, rows)
            return error
        error = self.groups.commit(committer, rows)
        if error is None and self.is_dual:
            # If it is refused here, the member has lost its partitions since. The
            # commit is still valid.
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
        """Return all committed offsets of a group that are on disk. Raises the errors
        of the registry.
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
    """Return the offsets of a user in their stored form. Raises InvalidConfigError."""
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
    """Delete a group without members and all its committed offsets, or return the error."""
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
    """Set committed offsets of a group, also backward, in the log, and in the registry
    if it has offsets of the group.

    With `is_forced`, a group with members is changed too; its members join again and
    continue there. Returns the reason if nothing was changed.
    """
    if is_forced:
        # The registry first, because members that restart read the larger of both.
        _rewind_registry(registry, group_id, rows)
        error = groups.rewind(group_id, rows)
    else:
        error = groups.commit(Committer(group_id, -1, "", None), rows)
    if error is None:
        # Again, because of offsets that were committed in the meantime.
        _rewind_registry(registry, group_id, rows)
    return error


def _rewind_registry(
    registry: Registry | None, group_id: str, rows: Mapping[OffsetKey, Committed]
) -> None:
    if registry is not None and offsets.committed(registry, group_id):
        offsets.rewind(
            registry, group_id, {key: each.offset for key, each in rows.items()}
        )
