"""Describes the consumer groups of a directory, for LogDir.groups() and `logcore group`.

Sources:
- `__consumer_offsets` contains the committed offsets. It also contains the members of a
  group at its last rebalance, if a broker or a process with exclusive access ran it.
- The registry of a shared directory contains the members in processes that share it.

Rules:
- Nothing is locked or written. A group may change during the call.
- A group that has neither members nor committed offsets is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import cast

import attrs

from logcore.coordinators.shared_groups import registered_members
from logcore.coordinators.stored_offsets import StoredGroups, stored_groups
from logcore.directory.interface import PartitionDirectory
from logcore.errors import LogNotFoundError, NodeNotFoundError
from logcore.format.consumer_group_records import (
    ConsumerMember,
    Current,
    Partitions,
    RecordKind,
)
from logcore.format.group_records import read_assignment
from logcore.fs import FS, SharedFS
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.registry import FileRegistry, Registry, open_registry, paths
from logcore.registry.protocol import CONSUMERS


@attrs.frozen
class GroupMemberDescription:
    """A member of a consumer group."""

    member_id: str
    #: None for a dynamic member.
    instance_id: str | None
    client_id: str
    client_host: str
    #: The process id. None unless the member's process shares the directory.
    pid: int | None
    #: Whether that process is alive. None unless it shares the directory.
    is_alive: bool | None
    #: (topic, partition) of its assignment.
    partitions: tuple[Key, ...]


@attrs.frozen
class GroupOffset:
    """The committed offset of a group for one partition."""

    topic: str
    partition: int
    #: The next offset to read.
    committed: int
    #: The text that was committed with the offset.
    metadata: str
    #: The time of the commit, in milliseconds since 1970.
    commit_ms: int
    #: The high watermark, or None if the partition is not in the directory.
    end: int | None
    #: The member that owns the partition in the registry, or None.
    owner: str | None = None

    @property
    def lag(self) -> int | None:
        """Number of offsets up to the high watermark, or None if `end` is None.

        Offsets of transaction markers and of compacted records count.
        """
        if self.end is None:
            return None
        return max(0, self.end - self.committed)


@attrs.frozen
class GroupDescription:
    """A consumer group of a directory."""

    group_id: str
    #: The members in the registry. If it contains none, the members of the last stored
    #: rebalance.
    members: tuple[GroupMemberDescription, ...]
    #: The committed offsets, by topic and partition.
    offsets: tuple[GroupOffset, ...]

    @property
    def lag(self) -> int:
        """Sum of the known lags of the partitions."""
        return sum(offset.lag or 0 for offset in self.offsets)


def read_groups(directory: PartitionDirectory) -> StoredGroups:
    """Read `__consumer_offsets` of a directory.

    Raises:
        LogcoreError: a log cannot be read.
    """
    if OFFSETS_TOPIC not in directory:
        return StoredGroups()
    return stored_groups(
        directory.partition(OFFSETS_TOPIC, number)
        for number in directory.partitions(OFFSETS_TOPIC)
    )


def describe_groups(
    fs: FS, directory: PartitionDirectory
) -> dict[str, GroupDescription]:
    """Return the groups of a directory by id, sorted."""
    stored = read_groups(directory)
    found: dict[str, GroupDescription] = {}
    with registry_of(fs, directory.path) as registry:
        names = {*stored.offsets, *stored.groups, *stored.consumers}
        for name in sorted(names.union(shared_group_names(registry))):
            members = members_of(directory, stored, registry, name)
            owners = owners_of(registry, name)
            offsets = tuple(_offsets(directory, stored, name, owners))
            if members or offsets:
                found[name] = GroupDescription(name, members, offsets)
    return found


@contextlib.contextmanager
def registry_of(fs: FS, path: str) -> Generator[FileRegistry | None]:
    """Open the registry of a directory read-only; None if it has none."""
    with contextlib.ExitStack() as stack:
        registry = None
        with contextlib.suppress(LogNotFoundError):
            registry = stack.enter_context(
                open_registry(path, read_only=True, fs=cast(SharedFS, fs))
            )
        yield registry


def shared_group_names(registry: FileRegistry | None) -> list[str]:
    """Return the names of the groups in the registry, which may have no members."""
    if registry is None:
        return []
    return list(map(paths.element_name, _children(registry, f"/{CONSUMERS}")))


def members_of(
    directory: PartitionDirectory,
    stored: StoredGroups,
    registry: FileRegistry | None,
    name: str,
) -> tuple[GroupMemberDescription, ...]:
    """Return the members of a group; see GroupDescription."""
    members: tuple[GroupMemberDescription, ...] = ()
    # The registry is newer: the log contains the members of the last rebalance.
    if registry is not None:
        members = shared_members(registry, name)
    return members or tuple(_stored_members(directory, stored, name))


def _children(registry: Registry, path: str) -> list[str]:
    # A node may be deleted at any time, and the first group creates the parent node.
    with contextlib.suppress(NodeNotFoundError):
        return list(registry.children(path))
    return []


def _offsets(
    directory: PartitionDirectory,
    stored: StoredGroups,
    name: str,
    owners: Mapping[Key, str],
) -> Iterator[GroupOffset]:
    for topic, partitions in sorted(stored.offsets.get(name, {}).items()):
        for number, committed in sorted(partitions.items()):
            end = None
            # A group may have offsets of a topic that does not exist.
            if topic in directory and number in directory.partitions(topic):
                end = directory.partition(topic, number).high_watermark
            yield GroupOffset(
                topic,
                number,
                committed.offset,
                committed.metadata,
                committed.commit_ms,
                end,
                owners.get((topic, number)),
            )


def shared_members(
    registry: FileRegistry | None, name: str
) -> tuple[GroupMemberDescription, ...]:
    """Return the members in processes that share the directory."""
    if registry is None:
        return ()
    return tuple(
        GroupMemberDescription(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            member.pid,
            member.is_alive,
            member.partitions,
        )
        for member in registered_members(registry, name)
    )


def _stored_members(
    directory: PartitionDirectory, stored: StoredGroups, name: str
) -> Iterator[GroupMemberDescription]:
    """Yield the members that the last rebalance stored, for both group protocols."""
    if name in stored.groups:
        for member in stored.groups[name].members:
            yield GroupMemberDescription(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                None,
                None,
                read_assignment(member.assignment) or (),
            )
    records = stored.consumers.get(name, {})
    topics = {directory.topic_id(topic).bytes: topic for topic in directory.topics()}
    for (kind, member_id), record in sorted(records.items()):
        if kind is not RecordKind.MEMBER or not isinstance(record, ConsumerMember):
            continue
        current = records.get((RecordKind.CURRENT, member_id))
        # A member may have no stored assignment yet.
        assigned: Partitions = frozenset()
        if isinstance(current, Current):
            assigned = current.assigned
        assigned_names = sorted(
            (topics[topic], number) for topic, number in assigned if topic in topics
        )
        yield GroupMemberDescription(
            member_id,
            record.instance_id,
            record.client_id,
            record.client_host,
            None,
            None,
            tuple(assigned_names),
        )


def owners_of(registry: Registry | None, name: str) -> dict[Key, str]:
    """Return the present owner of each partition, from the registry."""
    found: dict[Key, str] = {}
    if registry is None:
        return found
    above = f"{paths.group(name)}/owners"
    for topic in _children(registry, above):
        for number in _children(registry, f"{above}/{topic}"):
            # An owner may release its partition at any time.
            with contextlib.suppress(NodeNotFoundError):
                value = registry.get(f"{above}/{topic}/{number}").value
                found[paths.element_name(topic), int(number)] = value.decode(
                    "utf-8", "replace"
                )
    return found
