"""Committed offsets of groups as registry nodes: decimal text in
`/consumers/<group>/offsets/<topic>/<partition>`.

The first versions of Kafka stored offsets there. They are now in `__consumer_offsets`.
consumer/offset_stores.py defines the behavior of a consumer during the migration.

Rules:
- When commit() returns, its nodes are durable. They are written one after the other, so
  a kill may leave some unwritten.
- A partition named `<broker>-<partition>`, as in the oldest layout, is read and never
  written. Two brokers with the same partition are an error, because their offsets
  belong to different logs. If there is also a node without a broker, the larger offset
  is used.

All functions accept any registry, on files or ZooKeeper.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from typing import Final

from logcore.errors import (
    CorruptRegistryError,
    NodeExistsError,
    NodeNotEmptyError,
    NodeNotFoundError,
)
from logcore.registry import paths
from logcore.registry.protocol import CONSUMERS, Registry

_PARTITION: Final = re.compile(r"(?:(?P<broker>[0-9]+)-)?(?P<partition>[0-9]{1,10})")


def committed(registry: Registry, group_id: str) -> dict[tuple[str, int], int]:
    """Return (topic, partition) -> the committed offset of a group.

    Raises:
        CorruptRegistryError: a node is not a partition or its value is not an offset.
    """
    found: dict[tuple[str, int], int] = {}
    above = f"{paths.group(group_id)}/offsets"
    for element in registry.children(above):
        topic = paths.element_name(element)
        brokers: dict[int, str] = {}
        for name in registry.children(f"{above}/{element}"):
            path = f"{above}/{element}/{name}"
            match = _PARTITION.fullmatch(name)
            if match is None:
                raise CorruptRegistryError(
                    "no partition",
                    path=path,
                    expected="<partition> or <broker>-<partition>",
                )
            partition = int(match["partition"])
            broker = match["broker"]
            if broker is not None and brokers.setdefault(partition, broker) != broker:
                raise CorruptRegistryError(
                    "two brokers have offsets of one partition; delete the nodes of all but one",
                    path=path,
                    found=f"brokers {brokers[partition]} and {broker}",
                )
            # Deleted concurrently.
            with contextlib.suppress(NodeNotFoundError):
                offset = paths.unpack_number(registry.get(path).value, path)
                found[topic, partition] = max(offset, found.get((topic, partition), 0))
    return found


def commit(
    registry: Registry, group_id: str, offsets: Mapping[tuple[str, int], int]
) -> None:
    """Store offsets of a group. If the registry raises an error, some may be stored."""
    for (topic, partition), offset in sorted(offsets.items()):
        path = paths.offset(group_id, topic, partition)
        value = paths.pack_number(offset)
        try:
            registry.set(path, value)
        except NodeNotFoundError:
            try:
                registry.create(path, value)
            # Another process created it first.
            except NodeExistsError:
                registry.set(path, value)


def rewind(
    registry: Registry, group_id: str, offsets: Mapping[tuple[str, int], int]
) -> None:
    """Store offsets like commit(), even if an offset in the oldest layout is larger.

    The node of the larger offset is deleted.
    """
    commit(registry, group_id, offsets)
    for topic, partition in offsets:
        above = f"{paths.group(group_id)}/offsets/{paths.element(topic)}"
        for name in registry.children(above):
            match = _PARTITION.fullmatch(name)
            if (
                match is not None
                and match["broker"] is not None
                and int(match["partition"]) == partition
            ):
                with contextlib.suppress(NodeNotFoundError):
                    registry.delete(f"{above}/{name}")


def forget(registry: Registry, group_id: str) -> None:
    """Delete all offsets of a group."""
    above = f"{paths.group(group_id)}/offsets"
    for element in registry.children(above):
        _forget_topic(registry, f"{above}/{element}")
    _delete(registry, above)


def forget_topics(registry: Registry, topics: Collection[str]) -> None:
    """Delete the offsets of all groups for topics, so that new topics start without
    them.
    """
    elements = {paths.element(topic) for topic in topics}
    for group in registry.children(f"/{CONSUMERS}"):
        above = f"/{CONSUMERS}/{group}/offsets"
        for element in elements.intersection(registry.children(above)):
            _forget_topic(registry, f"{above}/{element}")


def _forget_topic(registry: Registry, path: str) -> None:
    for name in registry.children(path):
        _delete(registry, f"{path}/{name}")
    _delete(registry, path)


def _delete(registry: Registry, path: str) -> None:
    with contextlib.suppress(NodeNotFoundError, NodeNotEmptyError):
        registry.delete(path)
