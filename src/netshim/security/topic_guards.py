"""Guards of the APIs about records, topics and settings; see guards.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from netshim import wire
from netshim.scheduling import CloseConnection
from netshim.security.acls import CLUSTER_NAME, AclOperation, ResourceType
from netshim.security.requester import (
    NOT_REQUESTED,
    Guard,
    Requester,
    complete_with,
    split,
)
from netshim.wire import codes

#: The id in entries that name their topic.
_NO_ID: Final = bytes(16)
#: Bit of the attributes of a batch that belongs to a transaction, and its position.
_TRANSACTIONAL_BIT: Final = 0x10
_ATTRIBUTES_POSITION: Final = 22
#: Position and value of the version of batches that have this bit.
_MAGIC_POSITION: Final = 16
_MAGIC: Final = 2


# -- records ---------------------------------------------------------------------------


def _name_in(requester: Requester, topic: Any, field: str) -> str | None:
    """Return the name of a topic in a request by name or id; None for an unknown id."""
    name: str | None = getattr(topic, field)
    if name:
        return name
    return requester.topic_of(bytes(topic.topic_id))


def produce(request: Any, requester: Requester) -> Any:
    response_type = wire.PRODUCE.Response

    def refusal(topic: Any, code: int) -> Any:
        return response_type.Topic(
            name=topic.name,
            topic_id=topic.topic_id,
            partition_responses=[
                response_type.Topic.Partition(
                    index=partition.index, error_code=code, base_offset=-1
                )
                for partition in topic.partition_data
            ],
        )

    # As in KafkaApis.handleProduceRequest, one transactional batch makes the request
    # transactional.
    has_transactional = False
    for topic in request.topic_data:
        for partition in topic.partition_data:
            # Only two bytes of the first batch are read here. The handler validates
            # all.
            data = partition.records
            if (
                data is not None
                and len(data) > _ATTRIBUTES_POSITION
                and data[_ATTRIBUTES_POSITION] & _TRANSACTIONAL_BIT
                and data[_MAGIC_POSITION] == _MAGIC
            ):
                has_transactional = True
    refused: list[Any]
    if has_transactional and not (
        request.transactional_id
        and requester.may_transact(AclOperation.WRITE, request.transactional_id)
    ):
        code = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        refused = list(request.topic_data)
        request.topic_data = []
    else:
        code = codes.TOPIC_AUTHORIZATION_FAILED

        def is_allowed(topic: Any) -> bool:
            name = _name_in(requester, topic, "name")
            return name is None or requester.may_topic(AclOperation.WRITE, name)

        request.topic_data, refused = split(request.topic_data, is_allowed)
    if refused and request.acks == 0:
        # A producer without acknowledgements notices nothing but a closed connection.
        raise CloseConnection("a producer with acks=0 may not write to a topic")
    return complete_with(
        request.topic_data,
        [refusal(topic, code) for topic in refused],
        "responses",
        response_type(),
    )


def fetch(request: Any, requester: Requester) -> Any:
    response_type = wire.FETCH.Response
    # Version 15 moved the id of the replica. A consumer has -1 in both fields.
    replica = max(request.replica_id, request.replica_state.replica_id)
    may_follow = replica >= 0 and requester.may_cluster(AclOperation.CLUSTER_ACTION)

    def is_allowed(topic: Any) -> bool:
        if replica >= 0:
            return may_follow
        name = _name_in(requester, topic, "topic")
        return name is None or requester.may_topic(AclOperation.READ, name)

    def refusal(topic: Any, numbers: Iterable[int]) -> Any:
        return response_type.Topic(
            topic=topic.topic,
            topic_id=topic.topic_id,
            partitions=[
                response_type.Topic.Partition(
                    partition_index=number,
                    error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                    high_watermark=-1,
                    last_stable_offset=-1,
                    log_start_offset=-1,
                    records=b"",
                )
                for number in numbers
            ],
        )

    request.topics, parts = split(request.topics, is_allowed)
    if parts:
        request.max_wait_ms = 0  # Kafka refuses at once
    refused = [
        refusal(topic, (partition.partition for partition in topic.partitions))
        for topic in parts
    ]
    if not request.topics:
        return complete_with(request.topics, refused, "responses", response_type())
    # A fetch may wait for records, and rules may change in this time.
    rules = requester.index

    def complete(response: Any) -> Any:
        if requester.index is not rules:  # they have changed while the request waited
            response.responses, newly_refused = split(response.responses, is_allowed)
            response.responses += [
                refusal(
                    topic, [partition.partition_index for partition in topic.partitions]
                )
                for topic in newly_refused
            ]
        response.responses.extend(refused)
        return response

    return complete


def partitions(
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

    def guard(request: Any, requester: Requester) -> Any:
        request.topics, refused = split(
            request.topics,
            lambda topic: requester.may_topic(operation, getattr(topic, name)),
        )
        topics = [
            topic_type(
                **{
                    name: getattr(topic, name),
                    "partitions": [
                        topic_type.Partition(
                            **{index: getattr(partition, index)},
                            error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                            **defaults,
                        )
                        for partition in topic.partitions
                    ],
                }
            )
            for topic in refused
        ]
        return complete_with(request.topics, topics, "topics", api.Response())

    return guard


# -- topics ----------------------------------------------------------------------------


def metadata(request: Any, requester: Requester) -> Any:
    topic_type = wire.METADATA.Response.Topic
    # Version 0 has no null. An empty list means all topics there, and none later.
    names_all = request.topics is None or (
        requester.version == 0 and not request.topics
    )
    refused: list[Any] = []
    requested_names: set[str] = set()
    if not names_all:
        # CREATE on the cluster allows all topics.
        may_create = requester.may_cluster(AclOperation.CREATE)

        def has_id(topic: Any) -> bool:
            return topic.name is None or bytes(topic.topic_id) != _NO_ID

        def is_allowed(topic: Any) -> bool:
            name = topic.name
            if has_id(topic):
                if requester.version < 12:  # the handler refuses each of these
                    return True
                topic_name = requester.topic_of(bytes(topic.topic_id))
                return topic_name is None or requester.may_topic(
                    AclOperation.DESCRIBE, topic_name
                )
            if not requester.may_topic(AclOperation.DESCRIBE, name):
                return False
            # A request that names a missing topic may create it.
            is_new = request.allow_auto_topic_creation and not requester.exists(name)
            return (
                not is_new
                or may_create
                or requester.may_topic(AclOperation.CREATE, name)
            )

        request.topics, parts = split(request.topics or (), is_allowed)
        requested_names = {
            topic.name for topic in request.topics if topic.name is not None
        }
        # A topic that is named twice has one entry.
        refused_keys = {
            (None, bytes(part.topic_id)) if has_id(part) else (part.name, _NO_ID): None
            for part in parts
        }
        refused = [
            topic_type(
                error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                name=name,
                topic_id=topic_id,
            )
            for name, topic_id in refused_keys
        ]

    def complete(response: Any) -> Any:
        topics = response.topics
        if names_all:
            topics = [
                topic
                for topic in topics
                if requester.may_topic(AclOperation.DESCRIBE, topic.name)
            ]
        elif requester.version == 0:  # without names, the handler returned all topics
            topics = [topic for topic in topics if topic.name in requested_names]
        response.topics = [*_with_operations(topics, requester), *refused]
        return _cluster_operations(response, requester)

    return complete


def _with_operations(topics: Iterable[Any], requester: Requester) -> list[Any]:
    """Return topics with the operations that the user may perform on each."""
    listed = list(topics)
    for topic in listed:
        if topic.topic_authorized_operations != NOT_REQUESTED and topic.name:
            topic.topic_authorized_operations = requester.operations(
                ResourceType.TOPIC, topic.name
            )
    return listed


def _cluster_operations(response: Any, requester: Requester) -> Any:
    if response.cluster_authorized_operations != NOT_REQUESTED:
        bits = 0
        if requester.may_cluster(AclOperation.DESCRIBE):
            # As in Kafka, a user who may not describe the cluster gets no operations.
            bits = requester.operations(ResourceType.CLUSTER, CLUSTER_NAME)
        response.cluster_authorized_operations = bits
    return response


def describe_cluster(request: Any, requester: Requester) -> Any:
    return lambda response: _cluster_operations(response, requester)


def describe_topic_partitions(request: Any, requester: Requester) -> Any:
    response_type = wire.DESCRIBE_TOPIC_PARTITIONS.Response
    if request.cursor is not None and request.cursor.partition_index < 0:
        return None  # the handler refuses it before it reads the topics
    if not request.topics:
        # All topics. The handler gets the names, because the cursor of its response
        # contains the next name.
        request.topics = [
            wire.DESCRIBE_TOPIC_PARTITIONS.Request.Topic(name=name)
            for name in requester.topics()
            if requester.may_topic(AclOperation.DESCRIBE, name)
        ]
    request.topics, parts = split(
        request.topics,
        lambda topic: requester.may_topic(AclOperation.DESCRIBE, topic.name),
    )
    refused = [
        response_type.Topic(
            error_code=codes.TOPIC_AUTHORIZATION_FAILED, name=part.name, topic_id=_NO_ID
        )
        for part in parts
    ]
    if not request.topics:
        return response_type(topics=refused)

    def complete(response: Any) -> Any:
        response.topics = [*_with_operations(response.topics, requester), *refused]
        return response

    return complete


def _codes_by_name(names: Iterable[str]) -> dict[str, int]:
    """Return the error of each refused topic.

    Kafka refuses a topic that is named twice before it checks permissions.
    """
    return {
        name: codes.INVALID_REQUEST if count > 1 else codes.TOPIC_AUTHORIZATION_FAILED
        for name, count in Counter(names).items()
    }


def create_topics(request: Any, requester: Requester) -> Any:
    response_type = wire.CREATE_TOPICS.Response
    may_all = requester.may_cluster(AclOperation.CREATE)
    request.topics, parts = split(
        request.topics,
        lambda topic: may_all or requester.may_topic(AclOperation.CREATE, topic.name),
    )
    refused = [
        response_type.Topic(
            name=name, error_code=code, error_message="Authorization failed."
        )
        for name, code in _codes_by_name(part.name for part in parts).items()
    ]
    if not request.topics:
        return response_type(topics=refused)

    def complete(response: Any) -> Any:
        # The response to a creator contains the settings of the new topic, which have a
        # permission of their own (KIP-525).
        for topic in response.topics:
            if not topic.error_code and not requester.may_topic(
                AclOperation.DESCRIBE_CONFIGS, topic.name
            ):
                topic.configs = []
                topic.num_partitions = topic.replication_factor = -1
                topic.topic_config_error_code = codes.TOPIC_AUTHORIZATION_FAILED
        response.topics.extend(refused)
        return response

    return complete


def delete_topics(request: Any, requester: Requester) -> Any:
    response_type = wire.DELETE_TOPICS.Response
    may_all = requester.may_cluster(AclOperation.DELETE)
    # Version 6 has topic ids (KIP-516), and a list of structs.
    if requester.version < 6:
        request.topic_names, names = split(
            request.topic_names,
            lambda name: may_all or requester.may_topic(AclOperation.DELETE, name),
        )
        return complete_with(
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
            name = requester.topic_of(bytes(topic.topic_id))
        return may_all or name is None or requester.may_topic(AclOperation.DELETE, name)

    request.topics, parts = split(request.topics, is_allowed)
    refused = []
    counts = Counter((part.name, bytes(part.topic_id)) for part in parts)
    for (topic_name, topic_id), count in counts.items():
        # An entry that is repeated, or has both a name and an id, is invalid for every
        # user.
        code = codes.TOPIC_AUTHORIZATION_FAILED
        if count > 1 or (topic_name is not None and topic_id != _NO_ID):
            code = codes.INVALID_REQUEST
        refused.append(
            response_type.Topic(name=topic_name, topic_id=topic_id, error_code=code)
        )
    return complete_with(request.topics, refused, "responses", response_type())


def create_partitions(request: Any, requester: Requester) -> Any:
    response_type = wire.CREATE_PARTITIONS.Response
    request.topics, parts = split(
        request.topics,
        lambda topic: requester.may_topic(AclOperation.ALTER, topic.name),
    )
    return complete_with(
        request.topics,
        [
            response_type.Topic(name=name, error_code=code)
            for name, code in _codes_by_name(part.name for part in parts).items()
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
    before it checks permissions.
    """
    if resource.resource_type not in (*_CONFIG_KINDS, *_CLUSTER_KINDS):
        return codes.INVALID_REQUEST
    settings = getattr(resource, "configs", ())
    names = [setting.name for setting in settings]
    has_value = all(
        setting.value is not None or getattr(setting, "config_operation", 0) == 1
        for setting in settings
    )
    if len(set(names)) < len(names) or not has_value:
        return codes.INVALID_REQUEST
    if resource.resource_type in _CONFIG_KINDS:
        return _CONFIG_KINDS[resource.resource_type][1]
    return codes.CLUSTER_AUTHORIZATION_FAILED


def configs(api: wire.Api[Any, Any], operation: AclOperation, field: str) -> Guard:
    """Return the guard of an API that lists resources with settings."""

    def is_allowed(requester: Requester, resource: Any) -> bool:
        resource_type, _ = _CONFIG_KINDS.get(resource.resource_type, (None, 0))
        # Settings of brokers and loggers are protected by the rules of the cluster.
        if resource_type is None:
            return requester.may_cluster(operation)
        return requester.may(operation, resource_type, resource.resource_name)

    def guard(request: Any, requester: Requester) -> Any:
        request.resources, parts = split(
            request.resources, lambda resource: is_allowed(requester, resource)
        )
        refused = [
            api.Response.Resource(
                error_code=_config_code(part),
                error_message="Authorization failed.",
                resource_type=part.resource_type,
                resource_name=part.resource_name,
            )
            for part in parts
        ]
        return complete_with(request.resources, refused, field, api.Response())

    return guard
