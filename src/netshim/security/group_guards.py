"""Guards of the APIs about groups and transactions; see guards.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from netshim import wire
from netshim.security.acls import AclOperation, ResourceType
from netshim.security.requester import (
    NOT_REQUESTED,
    Guard,
    Requester,
    complete_with,
    split,
)
from netshim.wire import codes

# -- groups ----------------------------------------------------------------------------


def group(
    api: wire.Api[Any, Any], operation: AclOperation = AclOperation.READ
) -> Guard:
    """Return the guard of an API about one group."""

    def guard(request: Any, requester: Requester) -> Any:
        if requester.may_group(operation, request.group_id):
            return None
        response = api.Response(error_code=codes.GROUP_AUTHORIZATION_FAILED)
        # Clients of older versions cannot read a null in this field.
        if api is wire.JOIN_GROUP and requester.version >= 7:
            response.protocol_name = None
        return response

    return guard


def _refused_topic(
    topic_type: Any, name: str, numbers: Iterable[int], **fields: Any
) -> Any:
    """Return a topic of a response whose partitions all have the same fields."""
    return topic_type(
        name=name,
        partitions=[
            topic_type.Partition(partition_index=number, **fields) for number in numbers
        ],
    )


def _topics_refused(api: wire.Api[Any, Any], topics: Iterable[Any], code: int) -> Any:
    """Return a list of topics whose partitions all have an error code."""
    return [
        _refused_topic(
            api.Response.Topic,
            topic.name,
            (partition.partition_index for partition in topic.partitions),
            error_code=code,
        )
        for topic in topics
    ]


def commit(api: wire.Api[Any, Any]) -> Guard:
    """Return the guard of OffsetCommit or TxnOffsetCommit."""

    def guard(request: Any, requester: Requester) -> Any:
        code = codes.NONE
        transactional_id = getattr(request, "transactional_id", None)
        # Only TxnOffsetCommit has this field.
        if transactional_id is not None and not requester.may_transact(
            AclOperation.WRITE, transactional_id
        ):
            code = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        # As in Kafka, a commit needs READ: a consumer both reads and commits.
        elif not requester.may_group(AclOperation.READ, request.group_id):
            code = codes.GROUP_AUTHORIZATION_FAILED
        if code:
            # These APIs have an error for each partition only.
            return api.Response(topics=_topics_refused(api, request.topics, code))
        request.topics, denied_topics = split(
            request.topics,
            lambda topic: requester.may_topic(AclOperation.READ, topic.name),
        )
        refused = _topics_refused(api, denied_topics, codes.TOPIC_AUTHORIZATION_FAILED)
        return complete_with(request.topics, refused, "topics", api.Response())

    return guard


def _fetched_topics(topic_type: Any, denied_topics: Iterable[Any]) -> list[Any]:
    return [
        _refused_topic(
            topic_type,
            topic.name,
            topic.partition_indexes,
            committed_offset=-1,
            metadata="",
            error_code=codes.TOPIC_AUTHORIZATION_FAILED,
        )
        for topic in denied_topics
    ]


def offset_fetch(request: Any, requester: Requester) -> Any:
    response_type = wire.OFFSET_FETCH.Response

    def may_see(topic: Any) -> bool:
        return requester.may_topic(AclOperation.DESCRIBE, topic.name)

    if requester.version < 8:
        if not requester.may_group(AclOperation.DESCRIBE, request.group_id):
            code = codes.GROUP_AUTHORIZATION_FAILED
            response = response_type(error_code=code)
            if requester.version >= 2:  # the error is of the whole response
                return response
            for topic in _fetched_topics(response_type.Topic, request.topics or ()):
                for partition in topic.partitions:
                    partition.error_code = code
                # Versions 0 and 1 have an error for each partition only.
                response.topics.append(topic)
            return response
        # All topics are requested. Only the response contains their names.
        if request.topics is None:

            def complete_all(response: Any) -> Any:
                response.topics = [topic for topic in response.topics if may_see(topic)]
                return response

            return complete_all
        request.topics, parts = split(request.topics, may_see)
        return complete_with(
            request.topics,
            _fetched_topics(response_type.Topic, parts),
            "topics",
            response_type(),
        )
    # A request of version 8 or later names several groups, each with its own error.
    group_type = response_type.Group
    # Step 1: refuse whole groups.
    request.groups, denied_groups = split(
        request.groups,
        lambda group: requester.may_group(AclOperation.DESCRIBE, group.group_id),
    )
    groups = [
        group_type(group_id=group.group_id, error_code=codes.GROUP_AUTHORIZATION_FAILED)
        for group in denied_groups
    ]
    # No group is left for the handler.
    if not request.groups:
        return response_type(groups=groups)
    # Step 2: refuse topics of the other groups.
    refused: dict[str, list[Any]] = {}
    for group in request.groups:
        if group.topics is not None:
            group.topics, parts = split(group.topics, may_see)
            refused[group.group_id] = _fetched_topics(group_type.Topic, parts)

    def complete(response: Any) -> Any:
        for group in response.groups:
            # The offsets of all topics were requested, or of the topics left.
            group.topics = [topic for topic in group.topics if may_see(topic)]
            # A refused group has no topics.
            if not group.error_code:
                group.topics.extend(refused.get(group.group_id, ()))
        response.groups.extend(groups)
        return response

    return complete


def find_coordinator(request: Any, requester: Requester) -> Any:
    response_type = wire.FIND_COORDINATOR.Response
    if request.key_type == 0:
        resource_type, code = ResourceType.GROUP, codes.GROUP_AUTHORIZATION_FAILED
    elif request.key_type == 1:
        resource_type = ResourceType.TRANSACTIONAL_ID
        code = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    else:
        return None  # the handler refuses it
    nowhere: dict[str, Any] = {
        "error_code": code,
        "node_id": -1,
        "host": "",
        "port": -1,
    }
    # Version 4 and later have a list of keys (KIP-699).
    if requester.version < 4:
        if requester.may(AclOperation.DESCRIBE, resource_type, request.key):
            return None
        return response_type(**nowhere)
    request.coordinator_keys, parts = split(
        request.coordinator_keys,
        lambda key: requester.may(AclOperation.DESCRIBE, resource_type, key),
    )
    refused = [response_type.Coordinator(key=key, **nowhere) for key in parts]
    return complete_with(
        request.coordinator_keys, refused, "coordinators", response_type()
    )


def _split_groups(
    names: Iterable[str], operation: AclOperation, requester: Requester, group_type: Any
) -> tuple[list[str], list[Any]]:
    """Return the allowed names, and the entries of the response for the others."""
    allowed, parts = split(names, lambda name: requester.may_group(operation, name))
    code = codes.GROUP_AUTHORIZATION_FAILED
    return allowed, [group_type(group_id=name, error_code=code) for name in parts]


def describe_groups(request: Any, requester: Requester) -> Any:
    response_type = wire.DESCRIBE_GROUPS.Response
    request.groups, refused = _split_groups(
        request.groups, AclOperation.DESCRIBE, requester, response_type.Group
    )
    return _described(request.groups, refused, response_type(), requester)


def consumer_group_describe(request: Any, requester: Requester) -> Any:
    response_type = wire.CONSUMER_GROUP_DESCRIBE.Response
    request.group_ids, refused = _split_groups(
        request.group_ids, AclOperation.DESCRIBE, requester, response_type.Group
    )
    # Topics are checked in the response, because the request names groups only.
    completed = _described(request.group_ids, refused, response_type(), requester)
    if not callable(completed):
        return completed

    def complete(response: Any) -> Any:
        # If the user may not see one topic of a group, the whole group is refused.
        for slot, group in enumerate(response.groups):
            names = {
                topic.topic_name
                for member in group.members
                for assignment in (member.assignment, member.target_assignment)
                for topic in assignment.topic_partitions
            }
            if not all(
                requester.may_topic(AclOperation.DESCRIBE, name) for name in names
            ):
                response.groups[slot] = response_type.Group(
                    group_id=group.group_id,
                    error_code=codes.TOPIC_AUTHORIZATION_FAILED,
                    error_message="The group has described topic(s) that the client "
                    "is not authorized to describe.",
                )
        return completed(response)

    return complete


def _described(
    allowed: list[str], refused: list[Any], response: Any, requester: Requester
) -> Any:
    """Return the result of a guard of groups whose operations may be requested."""
    if not allowed:
        response.groups = refused
        return response

    def complete(handler_response: Any) -> Any:
        for group in handler_response.groups:
            # The handler has no access to the user, so the guard replaces its value.
            if group.authorized_operations != NOT_REQUESTED:
                group.authorized_operations = requester.operations(
                    ResourceType.GROUP, group.group_id
                )
        handler_response.groups.extend(refused)
        return handler_response

    return complete


def list_groups(request: Any, requester: Requester) -> Any:
    return _listing(
        requester,
        "groups",
        lambda group: requester.may_group(AclOperation.DESCRIBE, group.group_id),
    )


def _listing(
    requester: Requester, field: str, may_describe: Callable[[Any], bool]
) -> Any:
    """Return the result of a guard that leaves entries out of a list.

    A user who may describe the cluster gets all entries.
    """
    # As in Kafka, one rule replaces rules for each entry.
    if requester.may_cluster(AclOperation.DESCRIBE):
        return None

    def complete(response: Any) -> Any:
        entries = [entry for entry in getattr(response, field) if may_describe(entry)]
        setattr(response, field, entries)
        return response

    return complete


def delete_groups(request: Any, requester: Requester) -> Any:
    response_type = wire.DELETE_GROUPS.Response
    request.groups_names, refused = _split_groups(
        request.groups_names, AclOperation.DELETE, requester, response_type.Group
    )
    return complete_with(request.groups_names, refused, "results", response_type())


def offset_delete(request: Any, requester: Requester) -> Any:
    # The error of the group is in the response itself, not in its partitions.
    if not requester.may_group(AclOperation.DELETE, request.group_id):
        return wire.OFFSET_DELETE.Response(error_code=codes.GROUP_AUTHORIZATION_FAILED)
    request.topics, parts = split(
        request.topics, lambda topic: requester.may_topic(AclOperation.READ, topic.name)
    )
    refused = _topics_refused(
        wire.OFFSET_DELETE, parts, codes.TOPIC_AUTHORIZATION_FAILED
    )
    return complete_with(
        request.topics, refused, "topics", wire.OFFSET_DELETE.Response()
    )


def consumer_group_heartbeat(request: Any, requester: Requester) -> Any:
    response_type = wire.CONSUMER_GROUP_HEARTBEAT.Response
    if not requester.may_group(AclOperation.READ, request.group_id):
        return response_type(error_code=codes.GROUP_AUTHORIZATION_FAILED)
    # A null means that the subscription has not changed since the last heartbeat.
    names = request.subscribed_topic_names or ()
    # As in KafkaApis.handleConsumerGroupHeartbeat, one refused topic refuses the
    # heartbeat.
    if not all(requester.may_topic(AclOperation.DESCRIBE, name) for name in names):
        return response_type(error_code=codes.TOPIC_AUTHORIZATION_FAILED)

    def may_see(name: str | None) -> bool:
        return name is None or requester.may_topic(AclOperation.DESCRIBE, name)

    def complete(response: Any) -> Any:
        # Another member may have resolved the same regular expression, and rules may
        # have changed since the member has joined.
        if response.assignment is not None:
            response.assignment.topic_partitions = [
                topic
                for topic in response.assignment.topic_partitions
                if may_see(requester.topic_of(bytes(topic.topic_id)))
            ]
        return response

    return complete


# -- transactions ----------------------------------------------------------------------


def init_producer_id(request: Any, requester: Requester) -> Any:
    response_type = wire.INIT_PRODUCER_ID.Response
    code = codes.NONE
    if request.transactional_id is not None:
        if not requester.may_transact(AclOperation.WRITE, request.transactional_id):
            code = codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    # Since KIP-679, a producer that may write some topic is idempotent without a rule
    # for the cluster.
    elif not (
        requester.may_cluster(AclOperation.IDEMPOTENT_WRITE)
        or requester.index.allows_some_topic(requester.principal, requester.host)
    ):
        code = codes.CLUSTER_AUTHORIZATION_FAILED
    if code:
        return response_type(error_code=code, producer_epoch=-1)
    return None


def add_partitions_to_txn(request: Any, requester: Requester) -> Any:
    response_type = wire.ADD_PARTITIONS_TO_TXN.Response
    topic_type = response_type.Topic
    topics = request.v3_and_below_topics
    if request.transactions:  # from another broker
        if requester.may_cluster(AclOperation.CLUSTER_ACTION):
            return None
        return response_type(error_code=codes.CLUSTER_AUTHORIZATION_FAILED)

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

    if not requester.may_transact(
        AclOperation.WRITE, request.v3_and_below_transactional_id
    ):
        return refusal(lambda topic: codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    # A transaction gets all partitions of a request or none, so the allowed ones fail,
    # too.
    denied = {
        topic.name
        for topic in topics
        if not requester.may_topic(AclOperation.WRITE, topic.name)
    }
    if not denied:
        return None

    def code_of(topic: Any) -> int:
        # All partitions are added or none.
        if topic.name in denied:
            return codes.TOPIC_AUTHORIZATION_FAILED
        return codes.OPERATION_NOT_ATTEMPTED

    return refusal(code_of)


def add_offsets_to_txn(request: Any, requester: Requester) -> Any:
    response_type = wire.ADD_OFFSETS_TO_TXN.Response
    if not requester.may_transact(AclOperation.WRITE, request.transactional_id):
        return response_type(error_code=codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    if not requester.may_group(AclOperation.READ, request.group_id):
        return response_type(error_code=codes.GROUP_AUTHORIZATION_FAILED)
    return None


def end_txn(request: Any, requester: Requester) -> Any:
    if requester.may_transact(AclOperation.WRITE, request.transactional_id):
        return None
    return wire.END_TXN.Response(error_code=codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)


def write_txn_markers(request: Any, requester: Requester) -> Any:
    # Other brokers have CLUSTER_ACTION. An admin tool that aborts a transaction has
    # ALTER.
    if requester.may_cluster(AclOperation.CLUSTER_ACTION) or requester.may_cluster(
        AclOperation.ALTER
    ):
        return None
    response_type = wire.WRITE_TXN_MARKERS.Response
    return response_type(
        markers=[
            response_type.Marker(
                producer_id=marker.producer_id,
                topics=[
                    _refused_topic(
                        response_type.Marker.Topic,
                        topic.name,
                        topic.partition_indexes,
                        error_code=codes.CLUSTER_AUTHORIZATION_FAILED,
                    )
                    for topic in marker.topics
                ],
            )
            for marker in request.markers
        ]
    )


def describe_producers(request: Any, requester: Requester) -> Any:
    response_type = wire.DESCRIBE_PRODUCERS.Response
    request.topics, parts = split(
        request.topics, lambda topic: requester.may_topic(AclOperation.READ, topic.name)
    )
    refused = [
        _refused_topic(
            response_type.Topic,
            topic.name,
            topic.partition_indexes,
            error_code=codes.TOPIC_AUTHORIZATION_FAILED,
        )
        for topic in parts
    ]
    return complete_with(request.topics, refused, "topics", response_type())


def describe_transactions(request: Any, requester: Requester) -> Any:
    response_type = wire.DESCRIBE_TRANSACTIONS.Response
    request.transactional_ids, parts = split(
        request.transactional_ids,
        lambda name: requester.may_transact(AclOperation.DESCRIBE, name),
    )
    refused = [
        response_type.TransactionState(
            transactional_id=name,
            error_code=codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        )
        for name in parts
    ]
    completed = complete_with(
        request.transactional_ids, refused, "transaction_states", response_type()
    )
    if completed is not None and not callable(completed):
        return completed

    def complete(response: Any) -> Any:
        # As in Kafka, refused topics are left out without an error.
        for state in response.transaction_states:
            state.topics = [
                topic
                for topic in state.topics
                if requester.may_topic(AclOperation.DESCRIBE, topic.topic)
            ]
        if completed is not None:
            return completed(response)
        return response

    return complete


def list_transactions(request: Any, requester: Requester) -> Any:
    return _listing(
        requester,
        "transaction_states",
        lambda transaction: requester.may_transact(
            AclOperation.DESCRIBE, transaction.transactional_id
        ),
    )
