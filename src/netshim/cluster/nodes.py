"""Registry nodes of a cluster, besides those of logcore.registry.paths.

| path | value | kind |
|---|---|---|
| `/brokers/epochs/<n>` | decimal text: the latest epoch of the broker | persistent |
| `/brokers/ids/<n>` | see BrokerNode | ephemeral |
| `/brokers/topics/<t>` | see TopicNode | persistent |
| `/brokers/changes/<n>` | see ChangeNote: the latest changes of this broker | persistent, not synced |
| `/admin/delete_topics/<t>` | empty: the controller deletes the topic | persistent |
| `/producer_ids` | decimal text: the next block of producer ids | persistent |

Settings of topics are in `/config/topics/<t>`, and the states of partitions are those of
logcore.replication.state. An invalid value raises CorruptRegistryError.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

import attrs

from logcore.errors import CorruptRegistryError, InvalidNodeError
from logcore.registry.paths import (
    BROKERS,
    element_name,
    pack_json,
    topic,
    unpack_json,
)
from logcore.replication.electing import ReplicatedPartition
from logcore.replication.state import LiveBroker

EPOCHS: Final = "/brokers/epochs"
CHANGES: Final = "/brokers/changes"
DELETIONS: Final = "/admin/delete_topics"
PRODUCER_IDS: Final = "/producer_ids"
#: Number of changes in a note. A reader that missed more of them reads all topics.
MOST_CHANGES: Final = 200
#: The partition number of a change of the topic itself.
WHOLE_TOPIC: Final = -1

#: The partition number of a deletion. The id of the topic then takes the place of its
#: name.
DELETED: Final = -2

#: A topic, and a partition, WHOLE_TOPIC or DELETED.
Change = tuple[str, int]


@attrs.frozen
class BrokerNode:
    """A registered broker."""

    epoch: int
    disk: str
    host: str
    port: int
    rack: str | None = None
    is_leaving: bool = False
    was_clean: bool = False
    #: The host and port of each listener by its name. `host` and `port` are those for
    #: other brokers.
    endpoints: Mapping[str, tuple[str, int]] = attrs.field(factory=dict)

    def endpoint(self, listener: str) -> tuple[str, int] | None:
        """Return the address of a listener, None if the broker has no such listener."""
        if not self.endpoints:  # an earlier version has written the node
            return self.host, self.port
        return self.endpoints.get(listener)

    @property
    def live(self) -> LiveBroker:
        return LiveBroker(
            self.epoch, self.disk, self.rack, self.is_leaving, self.was_clean
        )


def pack_broker(node: BrokerNode) -> bytes:
    return pack_json({"version": 5, **attrs.asdict(node)})  # with tuples as lists


def unpack_broker(data: bytes, path: str) -> BrokerNode:
    values = unpack_json(data, path)
    kinds: dict[str, tuple[type, ...]] = {
        "epoch": (int,),
        "disk": (str,),
        "host": (str,),
        "port": (int,),
        "rack": (str, type(None)),
        "is_leaving": (bool,),
        "was_clean": (bool,),
    }
    if values.get("version") != 5 or any(
        type(values.get(name)) not in kind for name, kind in kinds.items()
    ):
        raise _corrupt("not a broker of a cluster", data, path)
    try:
        endpoints = {
            str(name): (str(host), int(port))
            for name, (host, port) in values.get("endpoints", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise _corrupt("no addresses of a broker", data, path) from error
    return BrokerNode(**{name: values[name] for name in kinds}, endpoints=endpoints)


@attrs.frozen
class TopicNode:
    """The assignment of a topic's partitions to brokers."""

    topic_id: uuid.UUID
    #: The brokers of each partition, the preferred leader first. During a reassignment:
    #: the target, then the brokers that will be removed.
    replicas: Mapping[int, tuple[int, ...]]
    adding: Mapping[int, tuple[int, ...]] = attrs.field(factory=dict)
    removing: Mapping[int, tuple[int, ...]] = attrs.field(factory=dict)

    def assigned_to(self, broker: int) -> tuple[int, ...]:
        """Return the partitions with a replica on a broker."""
        return tuple(
            number
            for number, brokers in sorted(self.replicas.items())
            if broker in brokers
        )

    def with_assignment(self, number: int, partition: ReplicatedPartition) -> TopicNode:
        """Return the topic with another assignment of one partition."""

        def changed(
            before: Mapping[int, tuple[int, ...]], brokers: tuple[int, ...]
        ) -> dict[int, tuple[int, ...]]:
            after = {**before, number: brokers}
            return {each: brokers for each, brokers in after.items() if brokers}

        return attrs.evolve(
            self,
            replicas={**self.replicas, number: partition.replicas},
            adding=changed(self.adding, partition.adding),
            removing=changed(self.removing, partition.removing),
        )


def pack_topic(node: TopicNode) -> bytes:
    return pack_json(
        {
            "version": 3,
            "topic_id": str(node.topic_id),
            "partitions": _lists(node.replicas),
            "adding_replicas": _lists(node.adding),
            "removing_replicas": _lists(node.removing),
        }
    )


def unpack_topic(data: bytes, path: str) -> TopicNode:
    values = unpack_json(data, path)
    try:
        if values["version"] != 3:
            raise ValueError
        node = TopicNode(
            uuid.UUID(values["topic_id"]),
            _tuples(values["partitions"]),
            _tuples(values["adding_replicas"]),
            _tuples(values["removing_replicas"]),
        )
        if sorted(node.replicas) != list(range(len(node.replicas))) or not all(
            brokers and len(set(brokers)) == len(brokers)
            for brokers in node.replicas.values()
        ):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _corrupt("not a topic of a cluster", data, path) from error
    return node


def _lists(brokers: Mapping[int, tuple[int, ...]]) -> dict[str, list[int]]:
    return {str(number): list(each) for number, each in sorted(brokers.items())}


def _tuples(values: Any) -> dict[int, tuple[int, ...]]:
    found = {int(number): tuple(brokers) for number, brokers in values.items()}
    if not all(type(each) is int for brokers in found.values() for each in brokers):
        raise TypeError
    return found


@attrs.frozen
class ChangeNote:
    """The latest changes of one writer, each with its number. Numbers only rise."""

    last: int = 0
    recent: tuple[tuple[int, str, int], ...] = ()

    def with_changes(self, changes: list[Change]) -> ChangeNote:
        numbered = tuple(
            (self.last + 1 + at, name, number)
            for at, (name, number) in enumerate(changes)
        )
        recent = (*self.recent, *numbered)[-MOST_CHANGES:]
        return ChangeNote(self.last + len(changes), recent)

    def since(self, last: int) -> set[Change] | None:
        """Return the changes above a number, None if some are no longer listed."""
        if self.last == last:
            return set()
        if last < 0 or not self.recent or self.recent[0][0] > last + 1:
            return None
        return {(name, number) for at, name, number in self.recent if at > last}

    @property
    def deleted_ids(self) -> set[str]:
        """The ids of the topics that were deleted, among the listed changes."""
        return {name for _, name, number in self.recent if number == DELETED}


def pack_changes(note: ChangeNote) -> bytes:
    return pack_json({"n": note.last, "recent": [list(one) for one in note.recent]})


def unpack_changes(data: bytes, path: str) -> ChangeNote:
    values = unpack_json(data, path)
    try:
        return ChangeNote(
            int(values["n"]),
            tuple((int(at), str(name), int(n)) for at, name, n in values["recent"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt("no list of changes", data, path) from error


def broker_epoch(number: int) -> str:
    return f"{EPOCHS}/{number}"


def changes_of(number: int) -> str:
    return f"{CHANGES}/{number}"


def broker_numbers(names: list[str]) -> list[int]:
    """Return the ids of nodes below BROKERS or EPOCHS, in their order."""
    numbers = sorted(int(name) for name in names if name.isdecimal())
    if len(numbers) < len(names):
        raise InvalidNodeError("a broker id is a number", path=BROKERS, found=names)
    return numbers


def topic_names(names: list[str]) -> list[str]:
    return [element_name(name) for name in names]


def partitions_path(name: str) -> str:
    return f"{topic(name)}/partitions"


def _corrupt(reason: str, data: bytes, path: str) -> CorruptRegistryError:
    return CorruptRegistryError(reason, path=path, found=repr(bytes(data))[:200])
