"""Committed offsets of groups as nodes of a registry, `/consumers/<group>/offsets/<topic>/<partition>`: decimal text.

Consumers of the first Kafka kept them there. `__consumer_offsets` is their place now; consumer/offsetstores.py says
what a consumer does while they move from one to the other.

Rules:
- A node is on disk when commit() returns. Several are written one after the other: a kill may leave some unwritten.
- A partition named `<broker>-<partition>`, as in the oldest layout, is read and never written. Where two brokers name
  one partition it is an error: their offsets do not belong to one log. Beside a node without a broker, the larger
  counts.

All functions take any registry, of files or ZooKeeper's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from typing import Final

from logcore.errors import CorruptRegistryError, NodeExistsError, NodeNotEmptyError, NodeNotFoundError
from logcore.registry import paths
from logcore.registry.protocol import CONSUMERS, Registry

_PARTITION: Final = re.compile(r"(?:(?P<broker>[0-9]+)-)?(?P<partition>[0-9]{1,10})")


def committed(registry: Registry, group_id: str) -> dict[tuple[str, int], int]:
    """(topic, partition) -> the offset that a group has committed. CorruptRegistryError for what is none."""
    found: dict[tuple[str, int], int] = {}
    above = f"{paths.group(group_id)}/offsets"
    for element in registry.children(above):
        topic = paths.element_name(element)
        brokers: dict[int, str] = {}
        for name in registry.children(f"{above}/{element}"):
            path = f"{above}/{element}/{name}"
            match = _PARTITION.fullmatch(name)
            if match is None:
                raise CorruptRegistryError("no partition", path=path, expected="<partition> or <broker>-<partition>")
            partition = int(match["partition"])
            broker = match["broker"]
            if broker is not None and brokers.setdefault(partition, broker) != broker:
                raise CorruptRegistryError(
                    "two brokers have offsets of one partition; delete the nodes of all but one",
                    path=path,
                    found=f"brokers {brokers[partition]} and {broker}",
                )
            with contextlib.suppress(NodeNotFoundError):  # deleted meanwhile
                offset = paths.unpack_number(registry.get(path).value, path)
                found[topic, partition] = max(offset, found.get((topic, partition), 0))
    return found


def commit(registry: Registry, group_id: str, offsets: Mapping[tuple[str, int], int]) -> None:
    """Stores offsets of a group. Raises what the registry raises; some may be stored then."""
    for (topic, partition), offset in sorted(offsets.items()):
        path = paths.offset(group_id, topic, partition)
        value = paths.pack_number(offset)
        try:
            registry.set(path, value)
        except NodeNotFoundError:
            try:
                registry.create(path, value)
            except NodeExistsError:  # another was quicker
                registry.set(path, value)


def rewind(registry: Registry, group_id: str, offsets: Mapping[tuple[str, int], int]) -> None:
    """As commit(), also where an offset of the oldest layout is larger: its node goes."""
    commit(registry, group_id, offsets)
    for topic, partition in offsets:
        above = f"{paths.group(group_id)}/offsets/{paths.element(topic)}"
        for name in registry.children(above):
            match = _PARTITION.fullmatch(name)
            if match is not None and match["broker"] is not None and int(match["partition"]) == partition:
                with contextlib.suppress(NodeNotFoundError):
                    registry.delete(f"{above}/{name}")


def forget(registry: Registry, group_id: str) -> None:
    """Deletes all offsets of a group."""
    above = f"{paths.group(group_id)}/offsets"
    for element in registry.children(above):
        _forget_topic(registry, f"{above}/{element}")
    _delete(registry, above)


def forget_topics(registry: Registry, topics: Collection[str]) -> None:
    """Deletes the offsets that any group has committed for topics: a new one of that name begins without them."""
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
