"""The layout of a registry: Kafka's ZooKeeper paths, and the values of their nodes.

| path | value | kind |
|---|---|---|
| `/cluster/id` | `{"version":"1","id":"<22 characters>"}` | persistent |
| `/clock` | `{"boot":...,"clock_ms":...}` | persistent |
| `/brokers/ids/<n>` | `{"version":5,"host":...,"port":...,"endpoints":[...],"timestamp":"..."}` | ephemeral |
| `/brokers/topics/<t>` | `{"version":2,"partitions":{"0":[1]},"topic_id":...}` | persistent |
| `/brokers/topics/<t>/partitions/<p>/state` | `{"controller_epoch":1,"leader":1,...,"isr":[1]}` | persistent |
| `/consumers/<g>/ids/<consumer>` | `{"version":1,"subscription":{"orders":3},"pattern":"static",...}` | ephemeral |
| `/consumers/<g>/owners/<t>/<p>` | `<consumer>-<n>` | ephemeral |
| `/consumers/<g>/offsets/<t>/<p>` | decimal text | persistent |
| `/consumers/<g>/group` | the state of the group | persistent, not synced |
| `/controller` | `{"version":1,"brokerid":1,"timestamp":"..."}` | ephemeral |
| `/controller_epoch` | decimal text | persistent |
| `/config/topics/<t>`, `/config/clients/<id>` | `{"version":1,"config":{...}}` | persistent |
| `/admin/delete_topics/<t>` | empty | persistent |

Rules:
- JSON is UTF-8 without spaces. An invalid value raises CorruptRegistryError. An unpack
  function decodes the values of its pack function.
- In a name, such as the name of a group, the characters `/`, `%` and NUL are
  percent-encoded.
- elect() is the only function in this module that changes a registry; views.py writes
  brokers and topics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast, get_args

import attrs

from logcore.errors import CorruptRegistryError, InvalidNodeError, NodeExistsError
from logcore.registry.protocol import CONSUMERS, Registry

CLUSTER_ID: Final = "/cluster/id"
CLOCK: Final = "/clock"
BROKERS: Final = "/brokers/ids"
TOPICS: Final = "/brokers/topics"
TOPIC_CONFIGS: Final = "/config/topics"
CONTROLLER: Final = "/controller"
CONTROLLER_EPOCH: Final = "/controller_epoch"
_CLUSTER_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,22}")

#: Kinds of subscription: names of topics, an expression that topics must match, or an
#: expression that topics must not match.
Pattern = Literal["static", "white_list", "black_list"]


def element(name: str) -> str:
    """Encode a name as one element of a path."""
    if not name:
        raise InvalidNodeError("a name in a path must not be empty")
    return name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")


def element_name(text: str) -> str:
    """Decode a name that element() encoded."""
    return text.replace("%00", "\0").replace("%2F", "/").replace("%25", "%")


def broker(number: int) -> str:
    return f"{BROKERS}/{_count(number, 'a broker id')}"


def topic(name: str) -> str:
    return f"{TOPICS}/{element(name)}"


def partition_state(name: str, partition: int) -> str:
    return f"{topic(name)}/partitions/{_count(partition, 'a partition')}/state"


def group(name: str) -> str:
    """Return the path of a group's root node."""
    return f"/{CONSUMERS}/{element(name)}"


def group_state(name: str) -> str:
    return f"{group(name)}/group"


def member(name: str, consumer: str) -> str:
    return f"{group(name)}/ids/{element(consumer)}"


def owner(name: str, topic_name: str, partition: int) -> str:
    return (
        f"{group(name)}/owners/{element(topic_name)}/{_count(partition, 'a partition')}"
    )


def offset(name: str, topic_name: str, partition: int) -> str:
    return f"{group(name)}/offsets/{element(topic_name)}/{_count(partition, 'a partition')}"


def topic_config(name: str) -> str:
    return f"{TOPIC_CONFIGS}/{element(name)}"


def deletion(name: str) -> str:
    """Return the path of the request to the controller to delete a topic."""
    return f"/admin/delete_topics/{element(name)}"


def _count(number: int, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise InvalidNodeError(f"{what} is a number from 0", found=repr(number))
    return number


# -- values ----------------------------------------------------------------------------


def pack_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()


def unpack_json(data: bytes, path: str) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except ValueError as error:
        raise CorruptRegistryError("the value is no JSON", path=path) from error
    if not isinstance(values, dict):
        raise CorruptRegistryError(
            "the value is no JSON object", path=path, found=type(values).__name__
        )
    return values


def pack_number(number: int) -> bytes:
    """Encode an offset or an epoch."""
    return b"%d" % number


def unpack_number(data: bytes, path: str) -> int:
    if not re.fullmatch(rb"-?[0-9]{1,19}", data):
        raise CorruptRegistryError(
            "the value is not a number", path=path, found=data[:40]
        )
    return int(data)


def pack_cluster_id(cluster_id: str) -> bytes:
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise InvalidNodeError(
            "a cluster id has 1 to 22 letters, digits, '_' and '-'",
            found=cluster_id[:100],
        )
    return pack_json({"version": "1", "id": cluster_id})


def unpack_cluster_id(data: bytes) -> str:
    found = unpack_json(data, CLUSTER_ID).get("id")
    if not isinstance(found, str) or not _CLUSTER_ID.fullmatch(found):
        raise CorruptRegistryError("no cluster id", path=CLUSTER_ID, found=found)
    return found


def pack_clock(boot: str, clock_ms: int) -> bytes:
    """Encode the number that all processes of one boot add to the monotonic clock."""
    return pack_json({"boot": boot, "clock_ms": clock_ms})


def unpack_clock(data: bytes) -> tuple[str, int]:
    values = unpack_json(data, CLOCK)
    try:
        return str(values["boot"]), int(values["clock_ms"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRegistryError("no clock", path=CLOCK) from error


def pack_broker(
    host: str, port: int, *, endpoints: Sequence[str] = (), timestamp_ms: int
) -> bytes:
    values = {
        "version": 5,
        "host": host,
        "port": port,
        "endpoints": list(endpoints),
        "timestamp": str(timestamp_ms),
    }
    return pack_json(values)


def pack_topic(
    replicas: Mapping[int, Sequence[int]], *, topic_id: str | None = None
) -> bytes:
    """Encode a topic; `replicas` holds the broker ids of each partition."""
    partitions = {
        str(number): list(brokers) for number, brokers in sorted(replicas.items())
    }
    return pack_json({"version": 2, "partitions": partitions, "topic_id": topic_id})


def unpack_topic(data: bytes, path: str) -> dict[int, list[int]]:
    """Decode the broker ids of each partition."""
    try:
        partitions = unpack_json(data, path)["partitions"].items()
        return {
            int(number): [int(each) for each in brokers]
            for number, brokers in partitions
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptRegistryError(
            "not the partitions of a topic", path=path
        ) from error


def pack_partition_state(
    *, leader: int, leader_epoch: int, isr: Sequence[int], controller_epoch: int
) -> bytes:
    values = {
        "controller_epoch": controller_epoch,
        "leader": leader,
        "version": 1,
        "leader_epoch": leader_epoch,
        "isr": list(isr),
    }
    return pack_json(values)


@attrs.frozen
class ConsumerNode:
    """Content of a consumer's node below `ids`.

    `subscription` maps a topic, or the expression of a pattern, to the number of
    streams. `members` maps the number of a stream to its member id in the group. Kafka's
    own consumers do not write `members`.
    """

    subscription: Mapping[str, int]
    pattern: Pattern
    timestamp_ms: int
    members: Mapping[int, str]


def pack_consumer(
    subscription: Mapping[str, int],
    *,
    pattern: Pattern,
    timestamp_ms: int,
    members: Mapping[int, str],
) -> bytes:
    values = {
        "version": 1,
        "subscription": dict(sorted(subscription.items())),
        "pattern": pattern,
        "timestamp": str(timestamp_ms),
        "members": {
            str(number): member_id for number, member_id in sorted(members.items())
        },
    }
    return pack_json(values)


def unpack_consumer(data: bytes, path: str) -> ConsumerNode:
    """Decode a consumer's node, including nodes of Kafka's own consumers."""
    values = unpack_json(data, path)
    pattern = values.get("pattern", "static")
    try:
        subscription = {
            str(name): int(count) for name, count in values["subscription"].items()
        }
        members = {
            int(number): str(member_id)
            for number, member_id in values.get("members", {}).items()
        }
        timestamp_ms = int(values.get("timestamp", -1))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptRegistryError(
            "not the subscription of a consumer", path=path
        ) from error
    if pattern not in get_args(Pattern):
        raise CorruptRegistryError(
            "no kind of subscription",
            path=path,
            expected=get_args(Pattern),
            found=pattern,
        )
    return ConsumerNode(subscription, cast(Pattern, pattern), timestamp_ms, members)


def pack_owner(consumer_id: str, number: int) -> bytes:
    """Encode an owner; `number` is the number of the consumer's stream, from 0."""
    return f"{consumer_id}-{number}".encode()


def unpack_owner(data: bytes) -> tuple[str, int]:
    """Decode an owner to the consumer and the number of its stream."""
    consumer_id, _, number = data.decode("utf-8", "replace").rpartition("-")
    if not consumer_id or not re.fullmatch(r"[0-9]{1,9}", number):
        raise CorruptRegistryError(
            "not the owner of a partition",
            expected="<consumer>-<number>",
            found=data[:100],
        )
    return consumer_id, int(number)


def pack_controller(broker_id: int, timestamp_ms: int) -> bytes:
    return pack_json(
        {"version": 1, "brokerid": broker_id, "timestamp": str(timestamp_ms)}
    )


def unpack_controller(data: bytes) -> int:
    """Decode the broker id of the controller."""
    found = unpack_json(data, CONTROLLER).get("brokerid")
    if isinstance(found, bool) or not isinstance(found, int):
        raise CorruptRegistryError("no broker id", path=CONTROLLER, found=found)
    return found


def pack_config(config: Mapping[str, str]) -> bytes:
    return pack_json({"version": 1, "config": dict(sorted(config.items()))})


def unpack_config(data: bytes, path: str) -> dict[str, str]:
    found = unpack_json(data, path).get("config")
    if not isinstance(found, dict):
        raise CorruptRegistryError("no settings", path=path)
    return {str(name): str(value) for name, value in found.items()}


# -- the controller --------------------------------------------------------------------


def elect(registry: Registry, broker_id: int, timestamp_ms: int) -> int | None:
    """Make this process the controller, unless another controller is running.

    Return the epoch, or None if another process is the controller. The node is written
    before the epoch, so that only a controller increases the epoch. Kafka writes both in
    one ZooKeeper transaction. Errors are the same as in Registry.create() and update().

    Raises:
        SessionExpiredError: the session ended in between; another process may be the
            controller.
    """
    try:
        registry.create(
            CONTROLLER, pack_controller(broker_id, timestamp_ms), ephemeral=True
        )
    except NodeExistsError:
        return None
    raised = registry.update(CONTROLLER_EPOCH, _next_epoch)
    assert raised is not None
    return unpack_number(raised.value, CONTROLLER_EPOCH)


def _next_epoch(value: bytes | None) -> bytes:
    if value is None:
        return pack_number(1)
    return pack_number(unpack_number(value, CONTROLLER_EPOCH) + 1)
