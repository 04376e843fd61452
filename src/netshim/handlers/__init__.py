"""The handlers of requests: functions of (request, call, state) that return the
response.

A handler returns the response, a PendingResponse, or None if the protocol has no
response. It raises CloseConnection when Kafka closes the connection.
Requests and responses are values of netshim.wire.

HANDLERS contains the served APIs; no other API is advertised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from netshim import wire
from netshim.handlers import (
    access,
    authentication,
    configs,
    consumer_group,
    fetch,
    group,
    metadata,
    offsets,
    produce,
    producer,
    quotas,
    replicas,
    topics,
    transactions,
)
from netshim.security.guards import GUARDS
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.kafka_releases import KafkaRelease
    from netshim.wire.messages import ApiVersionsRequest, ApiVersionsResponse

#: Features and their highest levels. The lowest level is 0.
_FEATURES: Final = {"group.version": 1, "transaction.version": 2}
#: APIs that a broker does not serve if it shares its directory with other processes,
#: whose members use the classic protocol.
NOT_SHARED: Final = frozenset(
    (wire.CONSUMER_GROUP_HEARTBEAT.key, wire.CONSUMER_GROUP_DESCRIBE.key)
)
_FEATURES_NOT_SHARED: Final = frozenset(("group.version",))

#: The request and the response belong to the API of the handler.
Handler = Callable[[Any, Call, BrokerState], Any]


def api_versions(
    request: ApiVersionsRequest, call: Call, state: BrokerState
) -> ApiVersionsResponse:
    """Return the served versions and the features of the broker.

    The features allow the second transaction protocol (KIP-890) and the consumer protocol
    of groups (KIP-848). As in Kafka, version 3 leaves out supported features with the
    minimum 0, because older Java clients cannot read them.
    """
    # As in Kafka, a client with another name is refused.
    if call.version >= 3 and not (
        _is_software(request.client_software_name)
        and _is_software(request.client_software_version)
    ):
        return wire.API_VERSIONS.Response(error_code=codes.INVALID_REQUEST)
    if call.version >= 3:
        call.session.client_software = (
            f"{request.client_software_name} {request.client_software_version}"
        )
    served = frozenset(HANDLERS)
    features = _FEATURES
    if state.is_shared:
        served = served - NOT_SHARED
        features = {
            name: level
            for name, level in features.items()
            if name not in _FEATURES_NOT_SHARED
        }
    if state.release is not None and not state.release.has_features:
        features = {}
    response = served_versions(sorted(served), state.release)
    if call.session.authentication is not None:
        call.session.authentication.record_versions()
    response_type = wire.API_VERSIONS.Response
    # Clients use finalized features only with an epoch of 0 or more.
    response.finalized_features_epoch = 0
    response.finalized_features = [
        response_type.FinalizedFeature(
            name=name, max_version_level=level, min_version_level=level
        )
        for name, level in features.items()
    ]
    if call.version >= 4:
        response.supported_features = [
            response_type.SupportedFeature(name=name, min_version=0, max_version=level)
            for name, level in features.items()
        ]
    return response


def served_versions(
    keys: Iterable[int], release: KafkaRelease | None = None, error_code: int = 0
) -> ApiVersionsResponse:
    """Return the versions of these APIs, limited to a Kafka release."""
    response_type = wire.API_VERSIONS.Response
    api_keys = []
    for key in keys:
        api = wire.APIS[key]
        # advertised_min may be lower than the served versions, because clients such as
        # librdkafka derive features from it.
        oldest, latest = api.advertised_min, api.max_version
        if release is not None:
            # A release that lacks the API has an empty range.
            first, last = release.ranges.get(key, (0, -1))
            oldest, latest = max(oldest, first), min(latest, last)
        if oldest <= latest:
            api_keys.append(
                response_type.ApiKey(
                    api_key=key, min_version=oldest, max_version=latest
                )
            )
    return response_type(error_code=error_code, api_keys=api_keys)


def refused_versions(release: KafkaRelease | None) -> ApiVersionsResponse:
    """Return the response to a request of ApiVersions in an unknown version."""
    # As in Kafka since KIP-511, the response contains the versions of ApiVersions.
    # Older releases return no versions.
    keys = [wire.API_VERSIONS.key]
    if release is not None and not release.names_versions:
        keys = []
    return served_versions(keys, release, codes.UNSUPPORTED_VERSION)


def _is_software(name: str) -> bool:
    r"""Return whether a text matches `[a-zA-Z0-9](?:[a-zA-Z0-9\\-.]*[a-zA-Z0-9])?`,
    Kafka's rule for name and version of a client.
    """
    return (
        name.isascii()
        and name.replace("-", "a").replace(".", "a").isalnum()
        and name[0].isalnum()
        and name[-1].isalnum()
    )


HANDLERS: Final[Mapping[int, Handler]] = MappingProxyType(
    {
        api.key: handler
        for api, handler in (
            (wire.PRODUCE, produce.produce),
            (wire.FETCH, fetch.fetch),
            (wire.LIST_OFFSETS, offsets.list_offsets),
            (wire.METADATA, metadata.metadata),
            (wire.OFFSET_COMMIT, group.offset_commit),
            (wire.OFFSET_FETCH, group.offset_fetch),
            (wire.FIND_COORDINATOR, group.find_coordinator),
            (wire.JOIN_GROUP, group.join_group),
            (wire.HEARTBEAT, group.heartbeat),
            (wire.LEAVE_GROUP, group.leave_group),
            (wire.SYNC_GROUP, group.sync_group),
            (wire.DESCRIBE_GROUPS, group.describe_groups),
            (wire.LIST_GROUPS, group.list_groups),
            (wire.API_VERSIONS, api_versions),
            (wire.CREATE_TOPICS, topics.create_topics),
            (wire.DELETE_TOPICS, topics.delete_topics),
            (wire.DELETE_RECORDS, offsets.delete_records),
            (wire.INIT_PRODUCER_ID, producer.init_producer_id),
            (wire.ADD_PARTITIONS_TO_TXN, transactions.add_partitions_to_txn),
            (wire.ADD_OFFSETS_TO_TXN, transactions.add_offsets_to_txn),
            (wire.END_TXN, transactions.end_txn),
            (wire.WRITE_TXN_MARKERS, transactions.write_txn_markers),
            (wire.TXN_OFFSET_COMMIT, transactions.txn_offset_commit),
            (wire.DESCRIBE_PRODUCERS, transactions.describe_producers),
            (wire.DESCRIBE_TRANSACTIONS, transactions.describe_transactions),
            (wire.LIST_TRANSACTIONS, transactions.list_transactions),
            (wire.OFFSET_FOR_LEADER_EPOCH, offsets.offset_for_leader_epoch),
            (wire.DESCRIBE_CONFIGS, configs.describe_configs),
            (wire.ALTER_CONFIGS, configs.alter_configs),
            (wire.DESCRIBE_LOG_DIRS, metadata.describe_log_dirs),
            (wire.CREATE_PARTITIONS, topics.create_partitions),
            (wire.DELETE_GROUPS, group.delete_groups),
            (wire.INCREMENTAL_ALTER_CONFIGS, configs.incremental_alter_configs),
            (wire.OFFSET_DELETE, group.offset_delete),
            (wire.DESCRIBE_CLUSTER, metadata.describe_cluster),
            (wire.CONSUMER_GROUP_HEARTBEAT, consumer_group.consumer_group_heartbeat),
            (wire.CONSUMER_GROUP_DESCRIBE, consumer_group.consumer_group_describe),
            (wire.LIST_CONFIG_RESOURCES, configs.list_config_resources),
            (wire.DESCRIBE_TOPIC_PARTITIONS, metadata.describe_topic_partitions),
            (wire.ELECT_LEADERS, replicas.elect_leaders),
            (
                wire.ALTER_PARTITION_REASSIGNMENTS,
                replicas.alter_partition_reassignments,
            ),
            (wire.LIST_PARTITION_REASSIGNMENTS, replicas.list_partition_reassignments),
            (wire.SASL_HANDSHAKE, authentication.sasl_handshake),
            (wire.SASL_AUTHENTICATE, authentication.sasl_authenticate),
            (
                wire.DESCRIBE_USER_SCRAM_CREDENTIALS,
                authentication.describe_user_scram_credentials,
            ),
            (
                wire.ALTER_USER_SCRAM_CREDENTIALS,
                authentication.alter_user_scram_credentials,
            ),
            (wire.DESCRIBE_CLIENT_QUOTAS, quotas.describe_client_quotas),
            (wire.ALTER_CLIENT_QUOTAS, quotas.alter_client_quotas),
            (wire.DESCRIBE_ACLS, access.describe_acls),
            (wire.CREATE_ACLS, access.create_acls),
            (wire.DELETE_ACLS, access.delete_acls),
        )
    }
)

_UNGUARDED: Final = HANDLERS.keys() - GUARDS.keys()
# An API without a guard would be open to every user.
if _UNGUARDED:
    raise ImportError(f"security/guards.py has no entry for the APIs {_UNGUARDED}")
