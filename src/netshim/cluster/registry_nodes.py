"""Registry nodes of a cluster, besides those of logcore.registry.paths.

| path | value | kind |
|---|---|---|
| `/brokers/epochs/<n>` | decimal text: the latest epoch of the broker | persistent |
| `/brokers/ids/<n>` | see BrokerNode | ephemeral |
| `/brokers/topics/<t>` | see TopicNode | persistent |
| `/brokers/topics/<t>/partitions/<p>/<topic id>` | see logcore.replication.state | persistent |
| `/brokers/changes/<n>` | see PublishedChanges: the latest changes of this broker | persistent, not synced |
| `/admin/delete_topics/<t>` | empty: the controller deletes the topic | persistent |
| `/producer_ids` | decimal text: the next block of producer ids | persistent |

The path of a state contains the id of its topic. Versions of nodes begin again after a
topic was deleted and created again, so a broker that was paused inside a write could
otherwise replace the state of the new topic.

Settings of topics are in `/config/topics/<t>`. An invalid value raises
CorruptRegistryError.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final

import attrs

from logcore.errors import BadVersionError, CorruptRegistryError, InvalidNodeError
from logcore.registry import paths
from logcore.registry.paths import BROKERS, element_name, pack_json, unpack_json
from logcore.replication.state import LiveBroker

#: Parents of the nodes in the table above.
EPOCHS: Final = "/brokers/epochs"
CHANGES: Final = "/brokers/changes"
DELETIONS: Final = "/admin/delete_topics"
PRODUCER_IDS: Final = "/producer_ids"
#: Maximum number of changes in the list of one writer. A reader that missed more of
#: them reads all topics.
MAX_CHANGES: Final = 200
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

    #: Increases with each registration, so that an earlier run of the broker is fenced.
    epoch: int
    disk: str
    host: str
    port: int
    rack: str | None = None
    #: Whether the broker is shutting down, and hands over its partitions.
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
        type(values.get(name)) not in type_ for name, type_ in kinds.items()
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
    """A topic and its partitions."""

    topic_id: uuid.UUID
    #: The brokers that each partition was created on, the preferred leader first. Once
    #: a partition has a state, the brokers are those in the state.
    replicas: Mapping[int, tuple[int, ...]]
    #: The id as in records of commits. One object, which all offsets of the topic share.
    id_bytes: bytes = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "id_bytes", self.topic_id.bytes)


def pack_topic(node: TopicNode) -> bytes:
    return paths.pack_topic(node.replicas, topic_id=str(node.topic_id))


def unpack_topic(data: bytes, path: str) -> TopicNode:
    values = unpack_json(data, path)
    try:
        if values["version"] != 2:
            raise ValueError
        replicas = {
            int(number): tuple(brokers)
            for number, brokers in values["partitions"].items()
        }
        if sorted(replicas) != list(range(len(replicas))) or not all(
            brokers
            and len(set(brokers)) == len(brokers)
            and all(type(broker) is int for broker in brokers)
            for brokers in replicas.values()
        ):
            raise ValueError
        return TopicNode(uuid.UUID(values["topic_id"]), replicas)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _corrupt("not a topic of a cluster", data, path) from error


def add_partitions(
    data: bytes | None,
    path: str,
    known_topic: TopicNode,
    added: Mapping[int, tuple[int, ...]],
) -> bytes:
    """Return the value of the topic's node with more partitions.

    `data` is the current value, and `known_topic` the topic that the partitions were placed
    for. The versions of two topics of the same name may be equal, so the values are
    compared. Raises BadVersionError if they differ.
    """
    current = None if data is None else unpack_topic(data, path)
    if current != known_topic:
        raise BadVersionError(
            "the topic was changed or deleted at the same time; try again", path=path
        )
    return pack_topic(
        attrs.evolve(known_topic, replicas={**known_topic.replicas, **added})
    )


@attrs.frozen
class PublishedChanges:
    """The latest changes of one writer, each with its number. Numbers only rise."""

    last: int = 0
    recent: tuple[tuple[int, str, int], ...] = ()

    def with_changes(self, changes: list[Change]) -> PublishedChanges:
        numbered = tuple(
            (self.last + 1 + at, name, number)
            for at, (name, number) in enumerate(changes)
        )
        recent = (*self.recent, *numbered)[-MAX_CHANGES:]
        return PublishedChanges(self.last + len(changes), recent)

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


def pack_changes(published: PublishedChanges) -> bytes:
    return pack_json(
        {"n": published.last, "recent": [list(entry) for entry in published.recent]}
    )


def unpack_changes(data: bytes, path: str) -> PublishedChanges:
    values = unpack_json(data, path)
    try:
        return PublishedChanges(
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
    return f"{paths.topic(name)}/partitions"


def state_path(name: str, number: int, topic_id: uuid.UUID) -> str:
    return f"{partitions_path(name)}/{number}/{topic_id}"


def _corrupt(reason: str, data: bytes, path: str) -> CorruptRegistryError:
    return CorruptRegistryError(reason, path=path, found=repr(bytes(data))[:200])
