"""The properties of a request that filters of fault rules compare.

A misspelled API, error or filter raises InvalidConfigError, with the nearest known
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs

from logcore.clientconfig import unknown
from logcore.errors import InvalidConfigError
from netshim import wire
from netshim.security.guards import GUARDS
from netshim.state import BrokerState, Call
from netshim.wire import codes

#: Matches every API.
ANY_API: Final = "*"
#: The type of topics in requests about settings.
TOPIC_RESOURCE: Final = 2
#: The fields of requests that contain topics, and of topics that contain partitions.
TOPIC_FIELDS: Final = (
    "topic_data", "topics", "v3_and_below_topics", "topic_partitions", "topic_names",
)  # fmt: skip
#: The fields of topics that contain partitions.
PARTITION_FIELDS: Final = ("partition_data", "partitions", "partition_indexes")
#: The fields of partitions that contain their number.
_NUMBER_FIELDS: Final = ("index", "partition", "partition_index")
#: The fields of requests that contain group ids.
_GROUP_FIELDS: Final = ("group_id", "groups", "group_ids", "groups_names")
#: The fields of requests that contain transactional ids.
_TRANSACTION_FIELDS: Final = (
    "transactional_id", "v3_and_below_transactional_id", "transactional_ids",
)  # fmt: skip
#: The names of filters.
_FILTERS: Final = (
    "client_id", "principal", "topic", "partition", "group", "transactional_id",
    "version", "node",
)  # fmt: skip
#: The filters that match the keys of FindCoordinator.
_COORDINATOR_KINDS: Final = ("group", "transactional_id")
#: A heartbeat contains the partitions that the member owns, and cannot fail for some.
_WITHOUT_TOPICS: Final = frozenset((wire.CONSUMER_GROUP_HEARTBEAT.name,))
#: Authentication answers these before any other part of the broker receives them.
_SASL: Final = frozenset((wire.SASL_HANDSHAKE.key, wire.SASL_AUTHENTICATE.key))


@attrs.define(eq=False)
class ObservedRequest:
    """A request that the broker handled while it had a fault plan."""

    #: Kafka's name of the API.
    api: str
    version: int
    client_id: str
    #: The user, such as "User:alice".
    principal: str
    #: Address of the client.
    peer: str
    #: The node to which the client is connected.
    node: int
    #: The broker's clock.
    now_ms: int
    #: Topics and partition numbers. The number is None if the API has no partitions.
    partitions: tuple[tuple[str, int | None], ...] = ()
    #: The ids of groups.
    groups: tuple[str, ...] = ()
    transactional_ids: tuple[str, ...] = ()
    #: The error codes in the response, empty for success. None until it is answered.
    codes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        names = [f"{topic}-{number}" for topic, number in self.partitions]
        parts = ", ".join((*names, *self.groups, *self.transactional_ids))
        return f"{self.api} v{self.version} of {self.client_id!r} ({parts})"


# -- properties of a request -----------------------------------------------------------


def observe_request(
    api: str, request: Any, call: Call, state: BrokerState
) -> ObservedRequest:
    """Return the properties of a request that filters compare."""
    fields = _fields_of(type(request))
    groups: list[str] = []
    for value in _values(request, fields.groups):
        groups.append(value if isinstance(value, str) else value.group_id)
    ids = _values(request, fields.transactional_ids)
    if fields.has_keys:
        # Version 4 and later have a list of keys (KIP-699).
        keys = request.coordinator_keys or [request.key]
        # The type is 0 for groups, and 1 for transactional ids.
        if request.key_type == 0:
            groups += keys
        else:
            ids += keys
    partitions: list[tuple[str, int | None]] = []
    if api not in _WITHOUT_TOPICS:
        _add_partitions(partitions, request, fields, state.topic_ids.name_of)
    session = call.session
    return ObservedRequest(
        api,
        call.version,
        call.client_id,
        session.principal,
        session.client_address,
        state.topology.node_of(session),
        call.now_ms,
        tuple(partitions),
        tuple(dict.fromkeys(filter(None, groups))) if groups else (),
        tuple(dict.fromkeys(filter(None, ids))) if ids else (),
    )


@attrs.frozen
class _NameFields:
    """Names of the attributes of a type that contain ids, topics or partitions."""

    groups: tuple[str, ...]
    transactional_ids: tuple[str, ...]
    #: Whether the keys of FindCoordinator are in the request.
    has_keys: bool
    #: Values that contain topics themselves.
    inner: tuple[str, ...]
    #: Resources in requests about settings, which may be topics.
    resources: tuple[str, ...]
    #: Topics, as names or as structs with partitions.
    topics: tuple[str, ...]
    #: The fields with the id, the name and the partitions of a topic.
    topic_id: tuple[str, ...]
    name: tuple[str, ...]
    partitions: tuple[str, ...]
    #: The fields with the number of a partition.
    number: tuple[str, ...]


#: The fields of each type that was looked up.
_FIELDS_OF_TYPE: Final[dict[type, _NameFields]] = {}


def _fields_of(type_: type) -> _NameFields:
    """Return the fields of a type, looked up once."""
    fields = _FIELDS_OF_TYPE.get(type_)
    # Cached, because a plan observes every request.
    if fields is None:
        fields = _FIELDS_OF_TYPE[type_] = _find_fields(type_)
    return fields


def _find_fields(type_: type) -> _NameFields:
    def existing(*fields: str) -> tuple[str, ...]:
        return tuple(field for field in fields if hasattr(type_, field))

    return _NameFields(
        existing(*_GROUP_FIELDS),
        existing(*_TRANSACTION_FIELDS),
        hasattr(type_, "key_type"),
        existing("groups", "markers"),
        existing("resources"),
        existing(*TOPIC_FIELDS),
        existing("topic_id"),
        existing("name", "topic"),
        existing(*PARTITION_FIELDS),
        existing(*_NUMBER_FIELDS),
    )


def _values(value: Any, fields: tuple[str, ...]) -> list[Any]:
    """Return the values of some fields. A list contributes each of its elements."""
    values: list[Any] = []
    for field in fields:
        inner = getattr(value, field)
        if isinstance(inner, list):
            values += inner
        elif inner is not None:
            values.append(inner)
    return values


def _add_partitions(
    partitions: list[tuple[str, int | None]],
    request: Any,
    fields: _NameFields,
    name_of: Callable[[bytes], str | None],
) -> None:
    for inner in _values(request, fields.inner):
        if not isinstance(inner, str):
            _add_partitions(partitions, inner, _fields_of(type(inner)), name_of)
    for value in _values(request, fields.resources):
        if value.resource_type == TOPIC_RESOURCE:
            partitions.append((value.resource_name, None))
    for topic in _values(request, fields.topics):
        name = topic_name(topic, name_of)
        if name is None:
            continue
        partition_fields = _fields_of(type(topic)).partitions
        if not partition_fields:
            partitions.append((name, None))
        for part in _values(topic, partition_fields):
            partitions.append((name, number_of(part)))


def topic_name(topic: Any, name_of: Callable[[bytes], str | None]) -> str | None:
    """Return the name of a topic in a request, or None if its id is unknown."""
    if isinstance(topic, str):
        return topic
    # An id of zeros means that the topic is identified by its name.
    fields = _fields_of(type(topic))
    if fields.topic_id and any(topic.topic_id):
        return name_of(bytes(topic.topic_id))
    for field in fields.name:
        name: str | None = getattr(topic, field)
        if name:
            return name
    return None


def number_of(part: Any) -> int:
    """Return the number of a partition in a request or a response."""
    if isinstance(part, int):
        return part
    (field, *_) = _fields_of(type(part)).number
    return int(getattr(part, field))


# -- names and filters -----------------------------------------------------------------


def _match_name(name: str, names: Iterable[str], kind: str) -> str:
    """Return the entry of `names` that equals a name without regard to case."""
    by_lower_name = {name.lower(): name for name in names}
    if name.lower() not in by_lower_name:
        raise unknown(name, by_lower_name.values(), kind)
    return by_lower_name[name.lower()]


def find_api(name: str | int) -> str:
    """Return Kafka's name of an API by its name or key, or ANY_API.

    Raises:
        InvalidConfigError: there is no such API, or it has no faults.
    """
    if name == ANY_API:
        return ANY_API
    names = {wire.APIS[key].name: key for key in GUARDS if key not in _SASL}
    if isinstance(name, int):
        names_by_key = {key: name for name, key in names.items()}
        if name not in names_by_key:
            raise InvalidConfigError("unknown API key", found=name)
        return names_by_key[name]
    return _match_name(name, names, "API")


def error_code(error: str | int) -> int:
    """Return the code of a Kafka error by its name or number.

    Raises:
        InvalidConfigError: there is no such error.
    """
    names = codes.NAMES
    if isinstance(error, str):
        by_name = {name: code for code, name in names.items()}
        return by_name[_match_name(error, by_name, "error")]
    if error not in names or error == codes.NONE:
        raise InvalidConfigError("unknown error code", found=error)
    return error


def check_filters(api: str, filters: Mapping[str, object]) -> dict[str, str]:
    """Return the patterns of a rule by filter.

    Raises:
        InvalidConfigError: a filter is unknown, or requests of the API never match it.
    """
    checked = {}
    for name, value in filters.items():
        filter_name = _match_name(name, _FILTERS, "filter")
        if api != ANY_API and filter_name not in filters_of(api):
            raise InvalidConfigError(
                f"requests of {api} have no {filter_name}",
                expected=f"a filter of {', '.join(filters_of(api))}",
                found=f"{filter_name}={value!r}",
            )
        checked[filter_name] = str(value)
    return checked


def filters_of(api: str) -> list[str]:
    """Return the filters that requests of an API may match."""
    names = ["client_id", "principal", "version", "node"]
    request = next(entry for entry in wire.APIS.values() if entry.name == api).Request
    fields = request.__slots__
    markers = getattr(request, "Marker", None)
    # WriteTxnMarkers lists topics in each marker.
    topic_type = getattr(request, "Topic", getattr(markers, "Topic", None))
    if api in _WITHOUT_TOPICS:
        topic_type = None
    if topic_type is not None or "resources" in fields or "topic_names" in fields:
        names.append("topic")
        topic_fields = getattr(topic_type, "__slots__", ())
        if api == wire.METADATA.name or any(
            field in topic_fields for field in PARTITION_FIELDS
        ):
            names.append("partition")
    if any(field in fields for field in _GROUP_FIELDS):
        names.append("group")
    if any(field in fields for field in _TRANSACTION_FIELDS):
        names.append("transactional_id")
    if "key_type" in fields:
        names += _COORDINATOR_KINDS
    return names
