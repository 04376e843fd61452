"""The places of committed offsets: the log `__consumer_offsets`, the registry, or both
while offsets move.

| offsets_storage | dual_commit | commits to | reads |
|---|---|---|---|
| `"log"` | no | the log | the log |
| `"log"` | yes | the log, then the registry | the larger of both |
| `"registry"` | no | the registry | the registry |
| `"registry"` | yes | the registry, then the log | the larger of both |

So a group moves while it runs, as the first Kafka's groups did from ZooKeeper: all its
consumers are restarted with the new storage and dual commits, one after the other, and
when all have that, once more without dual commits.

Rules (clients reference 8.2):
- A commit counts when it is in the chosen storage. Only then is it written to the other
  one.
- In both a member of an older generation changes nothing. No rebalance comes between
  that check and the write.
- The larger of both is right while no offset moves back. Whoever moves one back on
  purpose writes both.
- Offsets in a transaction go to the log, whatever the storage is.

Not here: the nodes of offsets (registry/offsets.py), export and import at once
(cli/groups.py).
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

#: When an offset was committed that stands in the registry alone.
_UNKNOWN_MS: Final = -1


@attrs.frozen
class OffsetStores:
    """See the top of this module. registry: None where only the log is used."""

    groups: ProcessGroups
    registry: Registry | None = None
    storage: OffsetsStorage = "log"
    is_dual: bool = False

    def commit(
        self, who: Committer, rows: Mapping[OffsetKey, Committed]
    ) -> GroupError | None:
        """Returns when the offsets are stored, or why they are not. Raises what the
        registry raises.
        """
        if self.storage == "registry":
            error = self._commit_to_registry(who, rows)
            if error is None and self.is_dual:
                error = self.groups.commit(who, rows)
            return error
        error = self.groups.commit(who, rows)
        if error is None and self.is_dual:
            # Refused here, the commit has lost its partitions meanwhile, and counts all
            # the same.
            self._commit_to_registry(who, rows)
        return error

    def _commit_to_registry(
        self, who: Committer, rows: Mapping[OffsetKey, Committed]
    ) -> GroupError | None:
        assert self.registry is not None
        with self.groups.committing(who) as error:
            if error is None:
                offsets.commit(
                    self.registry,
                    who.group_id,
                    {key: each.offset for key, each in rows.items()},
                )
        return error

    def committed(self, group_id: str) -> dict[OffsetKey, Committed]:
        """All that a group has committed, on disk. Raises what the registry raises."""
        if self.registry is None:
            return self.groups.committed(group_id)
        found = {}
        if self.storage == "log" or self.is_dual:
            found = self.groups.committed(group_id)
        for key, offset in offsets.committed(self.registry, group_id).items():
            if key not in found or found[key].offset < offset:
                found[key] = Committed(offset, -1, "", _UNKNOWN_MS)
        return found


def committed_rows(
    given: Mapping[PartitionKey, int | OffsetAndMetadata], now_ms: int
) -> dict[OffsetKey, Committed]:
    """Offsets of a user as they are stored. Raises InvalidConfigError."""
    checked = {
        (str(topic), int(partition)): checked_offset(each)
        for (topic, partition), each in given.items()
    }
    return {
        key: Committed(each.offset, each.leader_epoch, each.metadata, now_ms)
        for key, each in checked.items()
    }


def delete(
    groups: ProcessGroups, registry: Registry | None, group_id: str
) -> GroupError | None:
    """Deletes a group without members, with all that it has committed anywhere; or says
    why not.
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
    """Sets what a group has committed, also backwards: in the log, and in the registry
    if it has offsets of the group.

    is_forced: also while the group has members, which join again and begin there.
    Returns why it was not done.
    """
    if is_forced:
        # First, because members that begin again read the larger of both.
        _set_back(registry, group_id, rows)
        error = groups.rewind(group_id, rows)
    else:
        error = groups.commit(Committer(group_id, -1, "", None), rows)
    if error is None:
        _set_back(registry, group_id, rows)  # also what was committed meanwhile
    return error


def _set_back(
    registry: Registry | None, group_id: str, rows: Mapping[OffsetKey, Committed]
) -> None:
    if registry is not None and offsets.committed(registry, group_id):
        offsets.rewind(
            registry, group_id, {key: each.offset for key, each in rows.items()}
        )
