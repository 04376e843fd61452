"""Changes that the forms of a console make: offsets of groups, transactions, topics and
records.

Rules:
- A change is durable when its function returns.
- A directory without a broker is opened for each change. It is opened shared if other
  processes share it, and exclusively otherwise. If another process holds its lock, the
  error names that process.
- Each change needs the permission that the same request to a broker needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
from starlette.exceptions import HTTPException

import logcore
from logcore.cli.opening import open_to_write
from logcore.metadata.checkpoint import Key
from netshim.console.access import ConsoleViewer
from netshim.security.acls import AclOperation, ResourceType


class ConsoleChanges(Protocol):
    """Makes the changes of one directory. The functions block.

    All functions raise HTTPException if the user may not make the change or it is
    refused, and LogcoreError if it fails.
    """

    def set_offsets(
        self, viewer: ConsoleViewer, group: str, offsets: Mapping[Key, int]
    ) -> None:
        """Set the committed offsets of a group without members."""
        ...

    def abort_transaction(
        self, viewer: ConsoleViewer, transactional_id: str, timeout_ms: int
    ) -> None:
        """Abort the open transaction of an id, and fence its producer."""
        ...

    def delete_topic(self, viewer: ConsoleViewer, topic: str) -> None:
        """Delete a topic with its records."""
        ...

    def delete_records(
        self, viewer: ConsoleViewer, topic: str, before: Mapping[int, int]
    ) -> None:
        """Delete the records of partitions below an offset each."""
        ...


def check_may(
    viewer: ConsoleViewer,
    operation: AclOperation,
    resource_type: ResourceType,
    name: str,
) -> None:
    """Raise HTTPException unless the user may perform an operation on a resource."""
    if not viewer.may(operation, resource_type, name):
        # "TRANSACTIONAL_ID" becomes "transactional id".
        type_name = resource_type.name.lower().replace("_", " ")
        raise HTTPException(
            403,
            f"{viewer.principal} may not {operation.name} the {type_name} {name!r:.80}.",
        )


@attrs.frozen
class DirectoryChanges:
    """Changes of a directory that no broker of this process serves."""

    path: str
    #: The default settings of topics.
    config: Mapping[str, str] = attrs.Factory(dict)

    def _open_directory(self) -> logcore.LogDir:
        # The lock is held for one change only, so that other programs can write in
        # between.
        return open_to_write(self.path, config=self.config)

    def set_offsets(
        self, viewer: ConsoleViewer, group: str, offsets: Mapping[Key, int]
    ) -> None:
        check_may(viewer, AclOperation.READ, ResourceType.GROUP, group)
        # As for OffsetCommit: READ on the group and on each topic.
        for topic in {topic for topic, _ in offsets}:
            check_may(viewer, AclOperation.READ, ResourceType.TOPIC, topic)
        with self._open_directory() as logdir:
            logdir.alter_group_offsets(group, offsets)

    def abort_transaction(
        self, viewer: ConsoleViewer, transactional_id: str, timeout_ms: int
    ) -> None:
        resource_type = ResourceType.TRANSACTIONAL_ID
        # `timeout_ms` is for requests to a broker. Here, the stored timeout remains.
        check_may(viewer, AclOperation.WRITE, resource_type, transactional_id)
        with self._open_directory() as logdir:
            logdir.end_transaction(transactional_id, commit=False)

    def delete_topic(self, viewer: ConsoleViewer, topic: str) -> None:
        check_may(viewer, AclOperation.DELETE, ResourceType.TOPIC, topic)
        with self._open_directory() as logdir:
            logdir.delete_topic(topic)

    def delete_records(
        self, viewer: ConsoleViewer, topic: str, before: Mapping[int, int]
    ) -> None:
        check_may(viewer, AclOperation.DELETE, ResourceType.TOPIC, topic)
        with self._open_directory() as logdir:
            for number, offset in before.items():
                logdir.partition(topic, number).delete_records(offset)
