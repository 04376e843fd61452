"""The permissions that each API needs, and the response for parts that are refused.

    | API | needs |
    |---|---|
    | Produce | WRITE topic; for transactional batches WRITE transactional id |
    | Fetch | READ topic; from a follower CLUSTER_ACTION |
    | ListOffsets, OffsetForLeaderEpoch, Metadata, DescribeTopicPartitions | DESCRIBE topic |
    | OffsetCommit | READ group, READ topic |
    | TxnOffsetCommit | WRITE transactional id, READ group, READ topic |
    | OffsetFetch | DESCRIBE group, DESCRIBE topic |
    | JoinGroup, SyncGroup, Heartbeat, LeaveGroup | READ group |
    | ... | see GUARDS and the function of each API |

Rules:
- A guard removes the refused parts from the request, so that the handler never sees
  them, and adds their error codes to the response. A handler knows nothing of access
  control.
- The result of a guard is None (the request is allowed), a response (nothing is left to
  handle), or a function that completes the handler's response.
- Refused parts do not reveal whether a resource exists: an unknown topic and a
  forbidden one have the same error.
- An API without an entry in GUARDS cannot be served: the import fails.

The codes are those that Apache Kafka 4.1.1 returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs

from netshim import wire
from netshim.scheduling import CloseConnection
from netshim.security.acls import (
    CLUSTER_NAME,
    LEGAL,
    AclIndex,
    AclOperation,
    ResourceType,
)
from netshim.wire import codes

#: Completes the response of a handler.
Complete = Callable[[Any], Any]
_NOT_ASKED: Final = -(2**31)
_NO_ID: Final = bytes(16)
#: Bit of the attributes of a batch that belongs to a transaction, and its position.
_TRANSACTIONAL_BIT: Final = 0x10
_ATTRIBUTES_POSITION: Final = 22
#: Position and value of the version of batches that have this bit.
_MAGIC_POSITION: Final = 16
_MAGIC: Final = 2


@attrs.frozen
class Asker:
    """The user of one request, with the rules at its time."""

    index: AclIndex
    principal: str
    #: Address of the client.
    host: str
    version: int
    #: Returns the name of a topic with an id, or None.
    topic_of: Callable[[bytes], str | None]
    #: Returns whether a topic exists.
    exists: Callable[[str], bool]

    def may(self, operation: AclOperation, kind: ResourceType, name: str) -> bool:
        """Return whether the user may perform an operation."""
        return self.index.allows(self.principal, self.host, operation, kind, name)

    def may_topic(self, operation: AclOperation, name: str) -> bool:
        """Return whether the user may perform an operation on a topic."""
        return self.may(operation, ResourceType.TOPIC, name)

    def may_group(self, operation: AclOperation, name: str) -> bool:
        """Return whether the user may perform an operation on a group."""
        return self.may(operation, ResourceType.GROUP, name)

    def may_transact(self, operation: AclOperation, name: str) -> bool:
        """Return whether the user may perform an operation on a transactional id."""
        return self.may(operation, ResourceType.TRANSACTIONAL_ID, name)

    def may_cluster(self, operation: AclOperation) -> bool:
        """Return whether the user may perform an operation on the cluster."""
        return self.may(operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def operations(self, kind: ResourceType, name: str) -> int:
        """Return the bits of the operations that the user may perform."""
        bits = 0
        for operation in LEGAL[kind]:
            if self.may(operation, kind, name):
                bits |= 1 << operation
        return bits


Guard = Callable[[Any, Asker], Any]


def _split(
    parts: Iterable[Any], is_allowed: Callable[[Any], bool]
) -> tuple[list[Any], list[Any]]:
    """Return the allowed and the refused parts."""
    allowed: list[Any] = []
    refused: list[Any] = []
    for part in parts:
        (allowed if is_allowed(part) else refused).append(part)
    return allowed, refused


def _complete(allowed: list[Any], refused: list[Any], field: str, response: Any) -> Any:
    """Return a guard's result: refused parts are added to a field of the response.

    `response` has the default values of the API. It is returned if no part is allowed.
    """
    if not refused:
        return None
    if not allowed:
        setattr(response, field, refused)
        return response

    def complete(handled: Any) -> Any:
        getattr(handled, field).extend(refused)
        return handled

    return complete


# -- records ---------------------------------------------------------------------------


def _name_in(asker: Asker, topic: Any, field: str) -> str | None:
    """Return the name of a topic in a request by name or id; None for an unknown id."""
    name: str | None = getattr(topic, field)
    if name:
        return name
    return asker.topic_of(bytes(topic.topic_id))


def _produce(request: Any, asker: Asker) -> Any:
    response_type = wire.PRODUCE.Response

    def refusal(topic: Any, code: int) -> Any:
        return response_type.Topic(
            name=topic.name,
            topic_id=topic.topic_id,
            partition_responses=[
                response_type.Topic.Partition(
                    index=one.index, error_code=code, base_offset=-1
                )
                for one in topic.partition_data
            ],
        )

    has_transactional = any(
        one.records is not None
        and len(one.records) > _ATTRIBUTES_POSITION
        and one.records[_MAGIC_POSITION] == _MAGIC
        and one.records[_ATTRIBUTES_POSITION] & _TRANSACTIONAL_BIT
        for topic in request.topic_data
        for one in topic.partition_data
    )
    refused: list[Any]
    if has_transactional and not (
        request.transactional_id
        and asker.may_transact(AclOperation.WRITE, request.transactional_id)
    ):
        code = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        refused = list(request.topic_data)
        request.topic_data = []
    else:
        code = codes.TOPIC_AUTHORIZATION_FAILED

        def is_allowed(topic: Any) -> bool:
            name = _name_in(asker, topic, "name")
            return name is None or asker.may_topic(AclOperation.WRITE, name)

        request.topic_data, refused = _split(request.topic_data, is_allowed)
    if refused and request.acks == 0:
        # A producer without acknowledgements notices nothing but a closed connection.
        raise CloseConnection("a producer with acks=0 may not write to a topic")
    return _complete(
        request.topic_data,
        [refusal(topic, code) for topic in refused],
        "responses",
        response_type(),
    )


def _fetch(request: Any, asker: Asker) -> Any:
    response_type = wire.FETCH.Response
    replica = max(request.replica_id, request.replica_state.replica_id)
    if replica >= 0:
        may_follow = asker.may_cluster(AclOperation.CLUSTER_ACTION)

    def is_allowed(topic: Any) -> bool:
        if replica >= 0:
            return may_follow
        name = _name_in(asker, topic, "topic")
        return name is None or asker.may_topic(AclOperation.READ, name)

    request.topics, refused = _split(request.topics, is_allowed)
    if refused:
        request.max_wait_ms = 0  # Kafka answers a refusal at once
    return _complete(
        request.topics,
        [
            response_type.Topic(
                topic=topic.topic,
                topic_id=topic.topic_id,
                partitions=[
                    response_type.Topic.Partition(
                        partition_index=one.partition,
                        error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                        high_watermark=-1,
                        last_stable_offset=-1,
                        log_start_offset=-1,
                        records=b"",
                    )
                    for one in topic.partitions
                ],
            )
            for topic in refused
        ],
        "responses",
        response_type(),
    )


def _partitions(
    api: wire.Api[Any, Any],
    operation: AclOperation,
    *,
    name: str = "name",
    index: str = "partition_index",
    **defaults: int,
) -> Guard:
    """Return the guard of an API that lists partitions by topic.

    `name` and `index` are the fields of a topic's name and a partition's number.
    `defaults` are further fields of a refused partition.
    """
    topic_type = api.Response.Topic

    def guard(request: Any, asker: Asker) -> Any:
        request.topics, refused = _split(
            request.topics, lambda one: asker.may_topic(operation, getattr(one, name))
        )
        topics = [
            topic_type(
                **{
                    name: getattr(topic, name),
                    "partitions": [
                        topic_type.Partition(
                            **{index: getattr(one, index)},
                            error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                            **defaults,
                        )
                        for one in topic.partitions
                    ],
                }
            )
            for topic in refused
        ]
        return _complete(request.topics, topics, "topics", api.Response())

    return guard


# -- topics ----------------------------------------------------------------------------


def _metadata(request: Any, asker: Asker) -> Any:
    topic_type = wire.METADATA.Response.Topic
    names_all = request.topics is None or (asker.version == 0 and not request.topics)
    refused: list[Any] = []
    named: set[str] = set()
    if not names_all:
        may_create = asker.may_cluster(AclOperation.CREATE)

        def has_id(topic: Any) -> bool:
            return topic.name is None or bytes(topic.topic_id) != _NO_ID

        def is_allowed(topic: Any) -> bool:
            name = topic.name
            if has_id(topic):
                if asker.version < 12:  # the handler refuses each of these
                    return True
                known = asker.topic_of(bytes(topic.topic_id))
                return known is None or asker.may_topic(AclOperation.DESCRIBE, known)
            if not asker.may_topic(AclOperation.DESCRIBE, name):
                return False
            is_new = request.allow_auto_topic_creation and not asker.exists(name)
            return (
                not is_new or may_create or asker.may_topic(AclOperation.CREATE, name)
            )

        request.topics, parts = _split(request.topics, is_allowed)
        named = {topic.name for topic in request.topics if topic.name is not None}
        # A topic that is named twice has one entry.
        shown = {
            (None, bytes(one.topic_id)) if has_id(one) else (one.name, _NO_ID): None
            for one in parts
        }
        refused = [
            topic_type(
                error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                name=name,
                topic_id=topic_id,
            )
            for name, topic_id in shown
        ]

    def complete(response: Any) -> Any:
        topics = response.topics
        if names_all:
            topics = [
                one
                for one in topics
                if asker.may_topic(AclOperation.DESCRIBE, one.name)
            ]
        elif asker.version == 0:  # without names, the handler returned all topics
            topics = [one for one in topics if one.name in named]
        response.topics = [*_with_operations(topics, asker), *refused]
        return _cluster_operations(response, asker)

    return complete


def _with_operations(topics: Iterable[Any], asker: Asker) -> list[Any]:
    """Return topics with the operations that the user may perform on each."""
    found = list(topics)
    for topic in found:
        if topic.topic_authorized_operations != _NOT_ASKED and topic.name:
            topic.topic_authorized_operations = asker.operations(
                ResourceType.TOPIC, topic.name
            )
    return found


def _cluster_operations(response: Any, asker: Asker) -> Any:
    if response.cluster_authorized_operations != _NOT_ASKED:
        bits = 0
        if asker.may_cluster(AclOperation.DESCRIBE):
            bits = asker.operations(ResourceType.CLUSTER, CLUSTER_NAME)
        response.cluster_authorized_operations = bits
    return response


def _describe_cluster(request: Any, asker: Asker) -> Any:
    return lambda response: _cluster_operations(response, asker)


def _describe_topic_partitions(request: Any, asker: Asker) -> Any:
    response_type = wire.DESCRIBE_TOPIC_PARTITIONS.Response
    if request.cursor is not None and request.cursor.partition_index < 0:
        return None  # the handler refuses it without a look at the topics
    if not request.topics:

        def complete_all(response: Any) -> Any:
            response.topics = _with_operations(
                (
                    one
                    for one in response.topics
                    if asker.may_topic(AclOperation.DESCRIBE, one.name)
                ),
                asker,
            )
            return response

        return complete_all
    request.topics, parts = _split(
        request.topics, lambda one: asker.may_topic(AclOperation.DESCRIBE, one.name)
    )
    refused = [
        response_type.Topic(
            error_code=codes.TOPIC_AUTHORIZATION_FAILED, name=one.name, topic_id=_NO_ID
        )
        for one in parts
    ]
    if not request.topics:
        return response_type(topics=refused)

    def complete(response: Any) -> Any:
        response.topics = [*_with_operations(response.topics, asker), *refused]
        return response

    return complete


def _codes_by_name(names: Iterable[str]) -> dict[str, int]:
    """Return the error of each refused topic.

    Kafka refuses a topic that is named twice before it asks for permissions.
    """
    return {
        name: codes.INVALID_REQUEST if count > 1 else codes.TOPIC_AUTHORIZATION_FAILED
        for name, count in Counter(names).items()
    }


def _create_topics(request: Any, asker: Asker) -> Any:
    response_type = wire.CREATE_TOPICS.Response
    may_all = asker.may_cluster(AclOperation.CREATE)
    request.topics, parts = _split(
        request.topics,
        lambda one: may_all or asker.may_topic(AclOperation.CREATE, one.name),
    )
    refused = [
        response_type.Topic(
            name=name, error_code=code, error_message="Authorization failed."
        )
        for name, code in _codes_by_name(one.name for one in parts).items()
    ]
    if not request.topics:
        return response_type(topics=refused)

    def complete(response: Any) -> Any:
        for topic in response.topics:
            if not topic.error_code and not asker.may_topic(
                AclOperation.DESCRIBE_CONFIGS, topic.name
            ):
                topic.configs = []
                topic.num_partitions = topic.replication_factor = -1
                topic.topic_config_error_code = codes.TOPIC_AUTHORIZATION_FAILED
        response.topics.extend(refused)
        return response

    return complete


def _delete_topics(request: Any, asker: Asker) -> Any:
    response_type = wire.DELETE_TOPICS.Response
    may_all = asker.may_cluster(AclOperation.DELETE)
    if asker.version < 6:
        request.topic_names, names = _split(
            request.topic_names,
            lambda name: may_all or asker.may_topic(AclOperation.DELETE, name),
        )
        return _complete(
            request.topic_names,
            [
                response_type.Topic(name=name, error_code=code)
                for name, code in _codes_by_name(names).items()
            ],
            "responses",
            response_type(),
        )

    def is_allowed(topic: Any) -> bool:
        name = topic.name
        if name is None:
            name = asker.topic_of(bytes(topic.topic_id))
        return may_all or name is None or asker.may_topic(AclOperation.DELETE, name)

    request.topics, parts = _split(request.topics, is_allowed)
    refused = []
    named = Counter((one.name, bytes(one.topic_id)) for one in parts)
    for (topic_name, topic_id), count in named.items():
        code = codes.TOPIC_AUTHORIZATION_FAILED
        if count > 1 or (topic_name is not None and topic_id != _NO_ID):
            code = codes.INVALID_REQUEST
        refused.append(
            response_type.Topic(name=topic_name, topic_id=topic_id, error_code=code)
        )
    return _complete(request.topics, refused, "responses", response_type())


def _create_partitions(request: Any, asker: Asker) -> Any:
    response_type = wire.CREATE_PARTITIONS.Response
    request.topics, parts = _split(
        request.topics, lambda one: asker.may_topic(AclOperation.ALTER, one.name)
    )
    return _complete(
        request.topics,
        [
            response_type.Topic(name=name, error_code=code)
            for name, code in _codes_by_name(one.name for one in parts).items()
        ],
        "results",
        response_type(),
    )


#: Kind of a resource in the APIs of settings -> its kind in rules, and the error code.
#: Brokers (4), loggers (8) and client metrics (16) belong to the cluster.
_CONFIG_KINDS: Final = {
    2: (ResourceType.TOPIC, codes.TOPIC_AUTHORIZATION_FAILED),
    32: (ResourceType.GROUP, codes.GROUP_AUTHORIZATION_FAILED),
}


#: Kinds that belong to the cluster.
_CLUSTER_KINDS: Final = (4, 8, 16)


def _config_code(resource: Any) -> int:
    """Return the error of a resource whose settings the user may not see or change.

    Kafka refuses an unknown kind, a missing value and a setting that is named twice
    before it asks for permissions.
    """
    if resource.resource_type not in (*_CONFIG_KINDS, *_CLUSTER_KINDS):
        return codes.INVALID_REQUEST
    settings = getattr(resource, "configs", ())
    names = [one.name for one in settings]
    has_value = all(
        one.value is not None or getattr(one, "config_operation", 0) == 1
        for one in settings
    )
    if len(set(names)) < len(names) or not has_value:
        return codes.INVALID_REQUEST
    if resource.resource_type in _CONFIG_KINDS:
        return _CONFIG_KINDS[resource.resource_type][1]
    return codes.CLUSTER_AUTHORIZATION_FAILED


def _configs(api: wire.Api[Any, Any], operation: AclOperation, field: str) -> Guard:
    """Return the guard of an API that lists resources with settings."""

    def is_allowed(asker: Asker, one: Any) -> bool:
        kind, _ = _CONFIG_KINDS.get(one.resource_type, (None, 0))
        if kind is None:
            return asker.may_cluster(operation)
        return asker.may(operation, kind, one.resource_name)

    def guard(request: Any, asker: Asker) -> Any:
        request.resources, parts = _split(
            request.resources, lambda one: is_allowed(asker, one)
        )
        refused = [
            api.Response.Resource(
                error_code=_config_code(one),
                error_message="Authorization failed.",
                resource_type=one.resource_type,
                resource_name=one.resource_name,
            )
            for one in parts
        ]
        return _complete(request.resources, refused, field, api.Response())

    return guard


# -- groups ----------------------------------------------------------------------------


def _group(
    api: wire.Api[Any, Any], operation: AclOperation = AclOperation.READ
) -> Guard:
    """Return the guard of an API about one group."""

    def guard(request: Any, asker: Asker) -> Any:
        if asker.may_group(operation, request.group_id):
            return None
        response = api.Response(error_code=codes.GROUP_AUTHORIZATION_FAILED)
        if api is wire.JOIN_GROUP and asker.version >= 7:
            response.protocol_name = None
        return response

    return guard


def _topics_refused(api: wire.Api[Any, Any], topics: Iterable[Any], code: int) -> Any:
    """Return a list of topics whose partitions all have an error code."""
    topic_type = api.Response.Topic
    return [
        topic_type(
            name=topic.name,
            partitions=[
                topic_type.Partition(
                    partition_index=one.partition_index, error_code=code
                )
                for one in topic.partitions
            ],
        )
        for topic in topics
    ]


def _commit(api: wire.Api[Any, Any]) -> Guard:
    """Return the guard of OffsetCommit or TxnOffsetCommit."""

    def guard(request: Any, asker: Asker) -> Any:
        code = codes.NONE
        transactional_id = getattr(request, "transactional_id", None)
        if transactional_id is not None and not asker.may_transact(
            AclOperation.WRITE, transactional_id
        ):
            code = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        elif not asker.may_group(AclOperation.READ, request.group_id):
            code = codes.GROUP_AUTHORIZATION_FAILED
        if code:
            return api.Response(topics=_topics_refused(api, request.topics, code))
        request.topics, parts = _split(
            request.topics, lambda one: asker.may_topic(AclOperation.READ, one.name)
        )
        refused = _topics_refused(api, parts, codes.TOPIC_AUTHORIZATION_FAILED)
        return _complete(request.topics, refused, "topics", api.Response())

    return guard


def _fetched_topics(topic_type: Any, parts: Iterable[Any]) -> list[Any]:
    return [
        topic_type(
            name=topic.name,
            partitions=[
                topic_type.Partition(
                    partition_index=number,
                    committed_offset=-1,
                    metadata="",
                    error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                )
                for number in topic.partition_indexes
            ],
        )
        for topic in parts
    ]


def _offset_fetch(request: Any, asker: Asker) -> Any:
    response_type = wire.OFFSET_FETCH.Response

    def may_see(topic: Any) -> bool:
        return asker.may_topic(AclOperation.DESCRIBE, topic.name)

    if asker.version < 8:
        if not asker.may_group(AclOperation.DESCRIBE, request.group_id):
            code = codes.GROUP_AUTHORIZATION_FAILED
            response = response_type(error_code=code)
            if asker.version >= 2:  # the error is of the whole response
                return response
            for topic in _fetched_topics(response_type.Topic, request.topics or ()):
                for one in topic.partitions:
                    one.error_code = code
                response.topics.append(topic)
            return response
        if request.topics is None:

            def complete_all(response: Any) -> Any:
                response.topics = [one for one in response.topics if may_see(one)]
                return response

            return complete_all
        request.topics, parts = _split(request.topics, may_see)
        return _complete(
            request.topics,
            _fetched_topics(response_type.Topic, parts),
            "topics",
            response_type(),
        )
    group_type = response_type.Group
    request.groups, without = _split(
        request.groups, lambda one: asker.may_group(AclOperation.DESCRIBE, one.group_id)
    )
    groups = [
        group_type(group_id=one.group_id, error_code=codes.GROUP_AUTHORIZATION_FAILED)
        for one in without
    ]
    if not request.groups:
        return response_type(groups=groups)
    refused: dict[str, list[Any]] = {}
    for group in request.groups:
        if group.topics is not None:
            group.topics, parts = _split(group.topics, may_see)
            refused[group.group_id] = _fetched_topics(group_type.Topic, parts)

    def complete(response: Any) -> Any:
        for group in response.groups:
            # The offsets of all topics were requested, or of the topics left.
            group.topics = [one for one in group.topics if may_see(one)]
            if not group.error_code:
                group.topics.extend(refused.get(group.group_id, ()))
        response.groups.extend(groups)
        return response

    return complete


def _find_coordinator(request: Any, asker: Asker) -> Any:
    response_type = wire.FIND_COORDINATOR.Response
    if request.key_type == 0:
        kind, code = ResourceType.GROUP, codes.GROUP_AUTHORIZATION_FAILED
    elif request.key_type == 1:
        kind = ResourceType.TRANSACTIONAL_ID
        code = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    else:
        return None  # the handler refuses it
    nowhere: dict[str, Any] = {
        "error_code": code,
        "node_id": -1,
        "host": "",
        "port": -1,
    }
    if asker.version < 4:
        if asker.may(AclOperation.DESCRIBE, kind, request.key):
            return None
        return response_type(**nowhere)
    request.coordinator_keys, parts = _split(
        request.coordinator_keys,
        lambda key: asker.may(AclOperation.DESCRIBE, kind, key),
    )
    refused = [response_type.Coordinator(key=key, **nowhere) for key in parts]
    return _complete(request.coordinator_keys, refused, "coordinators", response_type())


def _describe_groups(request: Any, asker: Asker) -> Any:
    response_type = wire.DESCRIBE_GROUPS.Response
    request.groups, parts = _split(
        request.groups, lambda name: asker.may_group(AclOperation.DESCRIBE, name)
    )
    refused = [
        response_type.Group(group_id=name, error_code=codes.GROUP_AUTHORIZATION_FAILED)
        for name in parts
    ]
    return _described(request.groups, refused, response_type(), asker)


def _consumer_group_describe(request: Any, asker: Asker) -> Any:
    response_type = wire.CONSUMER_GROUP_DESCRIBE.Response
    request.group_ids, parts = _split(
        request.group_ids, lambda name: asker.may_group(AclOperation.DESCRIBE, name)
    )
    refused = [
        response_type.Group(group_id=name, error_code=codes.GROUP_AUTHORIZATION_FAILED)
        for name in parts
    ]
    completed = _described(request.group_ids, refused, response_type(), asker)
    if not callable(completed):
        return completed

    def complete(response: Any) -> Any:
        # A group with a topic that the user may not see is refused whole.
        for slot, group in enumerate(response.groups):
            names = {
                topic.topic_name
                for member in group.members
                for assignment in (member.assignment, member.target_assignment)
                for topic in assignment.topic_partitions
            }
            if not all(asker.may_topic(AclOperation.DESCRIBE, name) for name in names):
                response.groups[slot] = response_type.Group(
                    group_id=group.group_id,
                    error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                    error_message="The group has described topic(s) that the client "
                    "is not authorized to describe.",
                )
        return completed(response)

    return complete


def _described(
    allowed: list[str], refused: list[Any], response: Any, asker: Asker
) -> Any:
    """Return the result of a guard of groups whose operations may be requested."""
    if not allowed:
        response.groups = refused
        return response

    def complete(handled: Any) -> Any:
        for group in handled.groups:
            if group.authorized_operations != _NOT_ASKED:
                group.authorized_operations = asker.operations(
                    ResourceType.GROUP, group.group_id
                )
        handled.groups.extend(refused)
        return handled

    return complete


def _list_groups(request: Any, asker: Asker) -> Any:
    if asker.may_cluster(AclOperation.DESCRIBE):
        return None

    def complete(response: Any) -> Any:
        response.groups = [
            one
            for one in response.groups
            if asker.may_group(AclOperation.DESCRIBE, one.group_id)
        ]
        return response

    return complete


def _delete_groups(request: Any, asker: Asker) -> Any:
    response_type = wire.DELETE_GROUPS.Response
    request.groups_names, parts = _split(
        request.groups_names, lambda name: asker.may_group(AclOperation.DELETE, name)
    )
    refused = [
        response_type.Group(group_id=name, error_code=codes.GROUP_AUTHORIZATION_FAILED)
        for name in parts
    ]
    return _complete(request.groups_names, refused, "results", response_type())


def _offset_delete(request: Any, asker: Asker) -> Any:
    if not asker.may_group(AclOperation.DELETE, request.group_id):
        return wire.OFFSET_DELETE.Response(error_code=codes.GROUP_AUTHORIZATION_FAILED)
    request.topics, parts = _split(
        request.topics, lambda one: asker.may_topic(AclOperation.READ, one.name)
    )
    refused = _topics_refused(
        wire.OFFSET_DELETE, parts, codes.TOPIC_AUTHORIZATION_FAILED
    )
    return _complete(request.topics, refused, "topics", wire.OFFSET_DELETE.Response())


def _consumer_group_heartbeat(request: Any, asker: Asker) -> Any:
    response_type = wire.CONSUMER_GROUP_HEARTBEAT.Response
    if not asker.may_group(AclOperation.READ, request.group_id):
        return response_type(error_code=codes.GROUP_AUTHORIZATION_FAILED)
    names = request.subscribed_topic_names or ()
    if not all(asker.may_topic(AclOperation.DESCRIBE, name) for name in names):
        return response_type(error_code=codes.TOPIC_AUTHORIZATION_FAILED)
    return None


# -- transactions ----------------------------------------------------------------------


def _init_producer_id(request: Any, asker: Asker) -> Any:
    response_type = wire.INIT_PRODUCER_ID.Response
    code = codes.NONE
    if request.transactional_id is not None:
        if not asker.may_transact(AclOperation.WRITE, request.transactional_id):
            code = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    elif not (
        asker.may_cluster(AclOperation.IDEMPOTENT_WRITE)
        or asker.index.allows_some_topic(asker.principal, asker.host)
    ):
        code = codes.CLUSTER_AUTHORIZATION_FAILED
    if code:
        return response_type(error_code=code, producer_epoch=-1)
    return None


def _add_partitions_to_txn(request: Any, asker: Asker) -> Any:
    response_type = wire.ADD_PARTITIONS_TO_TXN.Response
    topic_type = response_type.Topic
    topics = request.v3_and_below_topics

    def refusal(code_of: Callable[[Any], int]) -> Any:
        return response_type(
            results_by_topic_v3_and_below=[
                topic_type(
                    name=topic.name,
                    results_by_partition=[
                        topic_type.Partition(
                            partition_index=number, partition_error_code=code_of(topic)
                        )
                        for number in topic.partitions
                    ],
                )
                for topic in topics
            ]
        )

    if not asker.may_transact(
        AclOperation.WRITE, request.v3_and_below_transactional_id
    ):
        return refusal(lambda topic: codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    denied = {
        topic.name
        for topic in topics
        if not asker.may_topic(AclOperation.WRITE, topic.name)
    }
    if not denied:
        return None

    def code_of(topic: Any) -> int:
        # All partitions are added or none.
        if topic.name in denied:
            return codes.TOPIC_AUTHORIZATION_FAILED
        return codes.OPERATION_NOT_ATTEMPTED

    return refusal(code_of)


def _add_offsets_to_txn(request: Any, asker: Asker) -> Any:
    response_type = wire.ADD_OFFSETS_TO_TXN.Response
    if not asker.may_transact(AclOperation.WRITE, request.transactional_id):
        return response_type(error_code=codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if not asker.may_group(AclOperation.READ, request.group_id):
        return response_type(error_code=codes.GROUP_AUTHORIZATION_FAILED)
    return None


def _end_txn(request: Any, asker: Asker) -> Any:
    if asker.may_transact(AclOperation.WRITE, request.transactional_id):
        return None
    return wire.END_TXN.Response(error_code=codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)


def _write_txn_markers(request: Any, asker: Asker) -> Any:
    if asker.may_cluster(AclOperation.CLUSTER_ACTION) or asker.may_cluster(
        AclOperation.ALTER
    ):
        return None
    response_type = wire.WRITE_TXN_MARKERS.Response
    topic_type = response_type.Marker.Topic
    return response_type(
        markers=[
            response_type.Marker(
                producer_id=marker.producer_id,
                topics=[
                    topic_type(
                        name=topic.name,
                        partitions=[
                            topic_type.Partition(
                                partition_index=number,
                                error_code=codes.CLUSTER_AUTHORIZATION_FAILED,
                            )
                            for number in topic.partition_indexes
                        ],
                    )
                    for topic in marker.topics
                ],
            )
            for marker in request.markers
        ]
    )


def _describe_producers(request: Any, asker: Asker) -> Any:
    response_type = wire.DESCRIBE_PRODUCERS.Response
    topic_type = response_type.Topic
    request.topics, parts = _split(
        request.topics, lambda one: asker.may_topic(AclOperation.READ, one.name)
    )
    refused = [
        topic_type(
            name=topic.name,
            partitions=[
                topic_type.Partition(
                    partition_index=number,
                    error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                )
                for number in topic.partition_indexes
            ],
        )
        for topic in parts
    ]
    return _complete(request.topics, refused, "topics", response_type())


def _describe_transactions(request: Any, asker: Asker) -> Any:
    response_type = wire.DESCRIBE_TRANSACTIONS.Response
    request.transactional_ids, parts = _split(
        request.transactional_ids,
        lambda name: asker.may_transact(AclOperation.DESCRIBE, name),
    )
    refused = [
        response_type.TransactionState(
            transactional_id=name,
            error_code=codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        )
        for name in parts
    ]
    completed = _complete(
        request.transactional_ids, refused, "transaction_states", response_type()
    )
    if completed is not None and not callable(completed):
        return completed

    def complete(response: Any) -> Any:
        for state in response.transaction_states:
            state.topics = [
                one
                for one in state.topics
                if asker.may_topic(AclOperation.DESCRIBE, one.topic)
            ]
        if completed is not None:
            return completed(response)
        return response

    return complete


def _list_transactions(request: Any, asker: Asker) -> Any:
    if asker.may_cluster(AclOperation.DESCRIBE):
        return None

    def complete(response: Any) -> Any:
        response.transaction_states = [
            one
            for one in response.transaction_states
            if asker.may_transact(AclOperation.DESCRIBE, one.transactional_id)
        ]
        return response

    return complete


# -- the cluster -----------------------------------------------------------------------


def _cluster(
    api: wire.Api[Any, Any],
    operation: AclOperation,
    refuse: Callable[[Any, dict[str, Any]], Any] | None = None,
) -> Guard:
    """Return the guard of an API that needs an operation on the cluster.

    `refuse(request, error)` returns the response if the API has no error code of its
    own; `error` has the fields error_code and error_message.
    """
    error = {
        "error_code": codes.CLUSTER_AUTHORIZATION_FAILED,
        "error_message": f"the user may not {operation.name} the cluster",
    }

    def guard(request: Any, asker: Asker) -> Any:
        if asker.may_cluster(operation):
            return None
        if refuse is not None:
            return refuse(request, error)
        response = api.Response(error_code=error["error_code"])
        if hasattr(response, "error_message"):
            response.error_message = error["error_message"]
        return response

    return guard


def _refuse_election(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.ELECT_LEADERS.Response
    topic_type = response_type.Topic
    return response_type(
        error_code=error["error_code"],
        replica_election_results=[
            topic_type(
                topic=topic.topic,
                partition_result=[
                    topic_type.Partition(partition_id=number, **error)
                    for number in topic.partitions
                ],
            )
            for topic in request.topic_partitions or ()
        ],
    )


def _refuse_user_list(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.DESCRIBE_USER_SCRAM_CREDENTIALS.Response
    return response_type(
        **error,
        results=[response_type.User(user="", **error) for _ in request.users or ()],
    )


def _refuse_creations(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.CREATE_ACLS.Response
    return response_type(
        results=[response_type.Result(**error) for _ in request.creations]
    )


def _refuse_filters(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.DELETE_ACLS.Response
    return response_type(
        filter_results=[response_type.FilterResult(**error) for _ in request.filters]
    )


def _refuse_users(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.ALTER_USER_SCRAM_CREDENTIALS.Response
    names = dict.fromkeys(one.name for one in (*request.deletions, *request.upsertions))
    return response_type(
        results=[response_type.User(user=name, **error) for name in names]
    )


def _refuse_quotas(request: Any, error: dict[str, Any]) -> Any:
    entry_type = wire.ALTER_CLIENT_QUOTAS.Response.Entry
    return wire.ALTER_CLIENT_QUOTAS.Response(
        entries=[
            entry_type(
                entity=[
                    entry_type.Entity(
                        entity_type=one.entity_type, entity_name=one.entity_name
                    )
                    for one in entry.entity
                ],
                **error,
            )
            for entry in request.entries
        ]
    )


def _refuse_quota_list(request: Any, error: dict[str, Any]) -> Any:
    return wire.DESCRIBE_CLIENT_QUOTAS.Response(entries=None, **error)


def _free(request: Any, asker: Asker) -> None:
    """Allow the request to every user."""


GUARDS: Final[dict[int, Guard]] = {
    api.key: guard
    for api, guard in (
        (wire.PRODUCE, _produce),
        (wire.FETCH, _fetch),
        (
            wire.LIST_OFFSETS,
            _partitions(
                wire.LIST_OFFSETS, AclOperation.DESCRIBE, timestamp=-1, offset=-1
            ),
        ),
        (wire.METADATA, _metadata),
        (wire.OFFSET_COMMIT, _commit(wire.OFFSET_COMMIT)),
        (wire.OFFSET_FETCH, _offset_fetch),
        (wire.FIND_COORDINATOR, _find_coordinator),
        (wire.JOIN_GROUP, _group(wire.JOIN_GROUP)),
        (wire.HEARTBEAT, _group(wire.HEARTBEAT)),
        (wire.LEAVE_GROUP, _group(wire.LEAVE_GROUP)),
        (wire.SYNC_GROUP, _group(wire.SYNC_GROUP)),
        (wire.DESCRIBE_GROUPS, _describe_groups),
        (wire.LIST_GROUPS, _list_groups),
        (wire.SASL_HANDSHAKE, _free),
        (wire.SASL_AUTHENTICATE, _free),
        (wire.API_VERSIONS, _free),
        (wire.CREATE_TOPICS, _create_topics),
        (wire.DELETE_TOPICS, _delete_topics),
        (
            wire.DELETE_RECORDS,
            _partitions(wire.DELETE_RECORDS, AclOperation.DELETE, low_watermark=-1),
        ),
        (wire.INIT_PRODUCER_ID, _init_producer_id),
        (
            wire.OFFSET_FOR_LEADER_EPOCH,
            _partitions(
                wire.OFFSET_FOR_LEADER_EPOCH,
                AclOperation.DESCRIBE,
                name="topic",
                index="partition",
            ),
        ),
        (wire.ADD_PARTITIONS_TO_TXN, _add_partitions_to_txn),
        (wire.ADD_OFFSETS_TO_TXN, _add_offsets_to_txn),
        (wire.END_TXN, _end_txn),
        (wire.WRITE_TXN_MARKERS, _write_txn_markers),
        (wire.TXN_OFFSET_COMMIT, _commit(wire.TXN_OFFSET_COMMIT)),
        (
            wire.DESCRIBE_ACLS,
            _cluster(wire.DESCRIBE_ACLS, AclOperation.DESCRIBE),
        ),
        (
            wire.CREATE_ACLS,
            _cluster(wire.CREATE_ACLS, AclOperation.ALTER, _refuse_creations),
        ),
        (
            wire.DELETE_ACLS,
            _cluster(wire.DELETE_ACLS, AclOperation.ALTER, _refuse_filters),
        ),
        (
            wire.DESCRIBE_CONFIGS,
            _configs(wire.DESCRIBE_CONFIGS, AclOperation.DESCRIBE_CONFIGS, "results"),
        ),
        (
            wire.ALTER_CONFIGS,
            _configs(wire.ALTER_CONFIGS, AclOperation.ALTER_CONFIGS, "responses"),
        ),
        (
            wire.INCREMENTAL_ALTER_CONFIGS,
            _configs(
                wire.INCREMENTAL_ALTER_CONFIGS, AclOperation.ALTER_CONFIGS, "responses"
            ),
        ),
        (
            wire.DESCRIBE_LOG_DIRS,
            _cluster(wire.DESCRIBE_LOG_DIRS, AclOperation.DESCRIBE),
        ),
        (wire.CREATE_PARTITIONS, _create_partitions),
        (wire.DELETE_GROUPS, _delete_groups),
        (
            wire.ELECT_LEADERS,
            _cluster(wire.ELECT_LEADERS, AclOperation.ALTER, _refuse_election),
        ),
        (
            wire.LIST_PARTITION_REASSIGNMENTS,
            _cluster(wire.LIST_PARTITION_REASSIGNMENTS, AclOperation.DESCRIBE),
        ),
        (wire.OFFSET_DELETE, _offset_delete),
        (
            wire.DESCRIBE_CLIENT_QUOTAS,
            _cluster(
                wire.DESCRIBE_CLIENT_QUOTAS,
                AclOperation.DESCRIBE_CONFIGS,
                _refuse_quota_list,
            ),
        ),
        (
            wire.ALTER_CLIENT_QUOTAS,
            _cluster(
                wire.ALTER_CLIENT_QUOTAS, AclOperation.ALTER_CONFIGS, _refuse_quotas
            ),
        ),
        (
            wire.DESCRIBE_USER_SCRAM_CREDENTIALS,
            _cluster(
                wire.DESCRIBE_USER_SCRAM_CREDENTIALS,
                AclOperation.DESCRIBE,
                _refuse_user_list,
            ),
        ),
        (
            wire.ALTER_USER_SCRAM_CREDENTIALS,
            _cluster(
                wire.ALTER_USER_SCRAM_CREDENTIALS, AclOperation.ALTER, _refuse_users
            ),
        ),
        (wire.DESCRIBE_CLUSTER, _describe_cluster),
        (wire.DESCRIBE_PRODUCERS, _describe_producers),
        (wire.DESCRIBE_TRANSACTIONS, _describe_transactions),
        (wire.LIST_TRANSACTIONS, _list_transactions),
        (wire.CONSUMER_GROUP_HEARTBEAT, _consumer_group_heartbeat),
        (wire.CONSUMER_GROUP_DESCRIBE, _consumer_group_describe),
        (
            wire.LIST_CONFIG_RESOURCES,
            _cluster(wire.LIST_CONFIG_RESOURCES, AclOperation.DESCRIBE_CONFIGS),
        ),
        (wire.DESCRIBE_TOPIC_PARTITIONS, _describe_topic_partitions),
    )
}
