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
- A guard removes the refused parts from the request before the handler runs, and adds
  their error codes to the response. Handlers contain no access control.
- The result of a guard is None (the request is allowed), a response (nothing is left to
  handle), or a function that completes the handler's response.
- Refused parts do not reveal whether a resource exists: an unknown topic and a
  forbidden one have the same error.
- An API without an entry in GUARDS cannot be served: the import fails.

The codes are those that Apache Kafka 4.1.1 returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from netshim import wire
from netshim.security import group_guards, topic_guards
from netshim.security.acls import AclOperation
from netshim.security.requester import Guard, Requester
from netshim.wire import codes

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

    def guard(request: Any, requester: Requester) -> Any:
        if requester.may_cluster(operation):
            return None
        if refuse is not None:
            return refuse(request, error)
        # Older APIs have a code only.
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
            # null requests all partitions, and the user may not learn which exist.
            for topic in request.topic_partitions or ()
        ],
    )


def _refuse_reassignments(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.ALTER_PARTITION_REASSIGNMENTS.Response
    topic_type = response_type.Topic
    return response_type(
        **error,
        responses=[
            topic_type(
                name=topic.name,
                partitions=[
                    topic_type.Partition(
                        partition_index=partition.partition_index, **error
                    )
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )


def _refuse_user_list(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.DESCRIBE_USER_SCRAM_CREDENTIALS.Response
    return response_type(
        **error,
        # As in Kafka, the entries have no names.
        results=[response_type.User(user="", **error) for _ in request.users or ()],
    )


def _refuse_creations(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.CREATE_ACLS.Response
    return response_type(
        # Results have no keys. A client pairs them with its rules by their order.
        results=[response_type.Result(**error) for _ in request.creations]
    )


def _refuse_filters(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.DELETE_ACLS.Response
    return response_type(
        # Paired with the filters by their order.
        filter_results=[response_type.FilterResult(**error) for _ in request.filters]
    )


def _refuse_users(request: Any, error: dict[str, Any]) -> Any:
    response_type = wire.ALTER_USER_SCRAM_CREDENTIALS.Response
    # A user with several mechanisms has one entry.
    names = dict.fromkeys(
        deletion.name for deletion in (*request.deletions, *request.upsertions)
    )
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
                        entity_type=part.entity_type, entity_name=part.entity_name
                    )
                    for part in entry.entity
                ],
                **error,
            )
            for entry in request.entries
        ]
    )


def _refuse_quota_list(request: Any, error: dict[str, Any]) -> Any:
    # null entries mean an error. An empty list would mean that there are no quotas.
    return wire.DESCRIBE_CLIENT_QUOTAS.Response(entries=None, **error)


def _free(request: Any, requester: Requester) -> None:
    """Allow the request to every user."""


GUARDS: Final[dict[int, Guard]] = {
    api.key: guard
    for api, guard in (
        (wire.PRODUCE, topic_guards.produce),
        (wire.FETCH, topic_guards.fetch),
        (
            wire.LIST_OFFSETS,
            topic_guards.partitions(
                # The values of a refused partition: no timestamp and no offset.
                wire.LIST_OFFSETS,
                AclOperation.DESCRIBE,
                timestamp=-1,
                offset=-1,
            ),
        ),
        (wire.METADATA, topic_guards.metadata),
        (wire.OFFSET_COMMIT, group_guards.commit(wire.OFFSET_COMMIT)),
        (wire.OFFSET_FETCH, group_guards.offset_fetch),
        (wire.FIND_COORDINATOR, group_guards.find_coordinator),
        (wire.JOIN_GROUP, group_guards.group(wire.JOIN_GROUP)),
        # Heartbeats need READ as well, so that removed rules end a membership.
        (wire.HEARTBEAT, group_guards.group(wire.HEARTBEAT)),
        (wire.LEAVE_GROUP, group_guards.group(wire.LEAVE_GROUP)),
        (wire.SYNC_GROUP, group_guards.group(wire.SYNC_GROUP)),
        (wire.DESCRIBE_GROUPS, group_guards.describe_groups),
        (wire.LIST_GROUPS, group_guards.list_groups),
        # A client has no user before these.
        (wire.SASL_HANDSHAKE, _free),
        (wire.SASL_AUTHENTICATE, _free),
        (wire.API_VERSIONS, _free),
        # CREATE on the cluster allows all topics.
        (wire.CREATE_TOPICS, topic_guards.create_topics),
        (wire.DELETE_TOPICS, topic_guards.delete_topics),
        (
            wire.DELETE_RECORDS,
            topic_guards.partitions(
                wire.DELETE_RECORDS, AclOperation.DELETE, low_watermark=-1
            ),
        ),
        (wire.INIT_PRODUCER_ID, group_guards.init_producer_id),
        (
            wire.OFFSET_FOR_LEADER_EPOCH,
            topic_guards.partitions(
                wire.OFFSET_FOR_LEADER_EPOCH,
                AclOperation.DESCRIBE,
                # This API has other names for both fields.
                name="topic",
                index="partition",
            ),
        ),
        (wire.ADD_PARTITIONS_TO_TXN, group_guards.add_partitions_to_txn),
        (wire.ADD_OFFSETS_TO_TXN, group_guards.add_offsets_to_txn),
        (wire.END_TXN, group_guards.end_txn),
        (wire.WRITE_TXN_MARKERS, group_guards.write_txn_markers),
        (wire.TXN_OFFSET_COMMIT, group_guards.commit(wire.TXN_OFFSET_COMMIT)),
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
            topic_guards.configs(
                wire.DESCRIBE_CONFIGS, AclOperation.DESCRIBE_CONFIGS, "results"
            ),
        ),
        (
            wire.ALTER_CONFIGS,
            topic_guards.configs(
                wire.ALTER_CONFIGS, AclOperation.ALTER_CONFIGS, "responses"
            ),
        ),
        (
            wire.INCREMENTAL_ALTER_CONFIGS,
            topic_guards.configs(
                wire.INCREMENTAL_ALTER_CONFIGS, AclOperation.ALTER_CONFIGS, "responses"
            ),
        ),
        (
            wire.DESCRIBE_LOG_DIRS,
            _cluster(wire.DESCRIBE_LOG_DIRS, AclOperation.DESCRIBE),
        ),
        (wire.CREATE_PARTITIONS, topic_guards.create_partitions),
        (wire.DELETE_GROUPS, group_guards.delete_groups),
        (
            wire.ELECT_LEADERS,
            _cluster(wire.ELECT_LEADERS, AclOperation.ALTER, _refuse_election),
        ),
        (
            wire.ALTER_PARTITION_REASSIGNMENTS,
            _cluster(
                wire.ALTER_PARTITION_REASSIGNMENTS,
                AclOperation.ALTER,
                _refuse_reassignments,
            ),
        ),
        (
            wire.LIST_PARTITION_REASSIGNMENTS,
            _cluster(wire.LIST_PARTITION_REASSIGNMENTS, AclOperation.DESCRIBE),
        ),
        (wire.OFFSET_DELETE, group_guards.offset_delete),
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
        # Served to every user. Only the authorized operations depend on rules.
        (wire.DESCRIBE_CLUSTER, topic_guards.describe_cluster),
        (wire.DESCRIBE_PRODUCERS, group_guards.describe_producers),
        (wire.DESCRIBE_TRANSACTIONS, group_guards.describe_transactions),
        (wire.LIST_TRANSACTIONS, group_guards.list_transactions),
        (wire.CONSUMER_GROUP_HEARTBEAT, group_guards.consumer_group_heartbeat),
        (wire.CONSUMER_GROUP_DESCRIBE, group_guards.consumer_group_describe),
        (
            wire.LIST_CONFIG_RESOURCES,
            _cluster(wire.LIST_CONFIG_RESOURCES, AclOperation.DESCRIBE_CONFIGS),
        ),
        (wire.DESCRIBE_TOPIC_PARTITIONS, topic_guards.describe_topic_partitions),
    )
}
