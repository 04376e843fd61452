"""The messages of the wire protocol as data: each field with its type and its versions.

Fields have the names of Kafka's message schemas in snake case. Structs have shorter names
than in Kafka. wire/fields.py describes the rows. `served` contains the versions that the
broker answers; fields of newer versions are left out.

Headers are in wire/__init__.py. The meaning of the fields is in netshim.handlers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from netshim.wire.codec import Api
from netshim.wire.table.admin import (
    ALTER_CONFIGS,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    LIST_CONFIG_RESOURCES,
)
from netshim.wire.table.cluster import (
    ALTER_PARTITION_REASSIGNMENTS,
    API_VERSIONS,
    DESCRIBE_CLUSTER,
    DESCRIBE_LOG_DIRS,
    DESCRIBE_TOPIC_PARTITIONS,
    ELECT_LEADERS,
    LIST_PARTITION_REASSIGNMENTS,
    METADATA,
)
from netshim.wire.table.data import (
    DELETE_RECORDS,
    FETCH,
    LIST_OFFSETS,
    OFFSET_FOR_LEADER_EPOCH,
    PRODUCE,
)
from netshim.wire.table.groups import (
    CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT,
    CONSUMER_PROTOCOL_ASSIGNMENT,
    CONSUMER_PROTOCOL_SUBSCRIPTION,
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    FIND_COORDINATOR,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_GROUPS,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    SYNC_GROUP,
)
from netshim.wire.table.security import (
    ALTER_CLIENT_QUOTAS,
    ALTER_USER_SCRAM_CREDENTIALS,
    CREATE_ACLS,
    DELETE_ACLS,
    DESCRIBE_ACLS,
    DESCRIBE_CLIENT_QUOTAS,
    DESCRIBE_USER_SCRAM_CREDENTIALS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
)
from netshim.wire.table.transactions import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    END_TXN,
    INIT_PRODUCER_ID,
    LIST_TRANSACTIONS,
    TRANSACTION_LOG_KEY,
    TRANSACTION_LOG_VALUE,
    TXN_OFFSET_COMMIT,
    WRITE_TXN_MARKERS,
)

#: All APIs by key.
APIS: Final[Mapping[int, Api[Any, Any]]] = MappingProxyType(
    dict(
        sorted(
            (api.key, api) for api in list(globals().values()) if isinstance(api, Api)
        )
    )
)

__all__ = [
    "APIS",
    "PRODUCE",
    "FETCH",
    "LIST_OFFSETS",
    "METADATA",
    "OFFSET_COMMIT",
    "OFFSET_FETCH",
    "FIND_COORDINATOR",
    "JOIN_GROUP",
    "HEARTBEAT",
    "LEAVE_GROUP",
    "SYNC_GROUP",
    "DESCRIBE_GROUPS",
    "LIST_CONFIG_RESOURCES",
    "LIST_GROUPS",
    "SASL_HANDSHAKE",
    "API_VERSIONS",
    "CREATE_TOPICS",
    "DELETE_TOPICS",
    "DELETE_RECORDS",
    "INIT_PRODUCER_ID",
    "OFFSET_FOR_LEADER_EPOCH",
    "ADD_PARTITIONS_TO_TXN",
    "ADD_OFFSETS_TO_TXN",
    "END_TXN",
    "WRITE_TXN_MARKERS",
    "TXN_OFFSET_COMMIT",
    "DESCRIBE_ACLS",
    "CREATE_ACLS",
    "DELETE_ACLS",
    "DESCRIBE_CONFIGS",
    "ALTER_CONFIGS",
    "DESCRIBE_LOG_DIRS",
    "SASL_AUTHENTICATE",
    "CREATE_PARTITIONS",
    "DELETE_GROUPS",
    "ELECT_LEADERS",
    "INCREMENTAL_ALTER_CONFIGS",
    "ALTER_PARTITION_REASSIGNMENTS",
    "LIST_PARTITION_REASSIGNMENTS",
    "OFFSET_DELETE",
    "DESCRIBE_CLIENT_QUOTAS",
    "ALTER_CLIENT_QUOTAS",
    "DESCRIBE_USER_SCRAM_CREDENTIALS",
    "ALTER_USER_SCRAM_CREDENTIALS",
    "DESCRIBE_CLUSTER",
    "DESCRIBE_PRODUCERS",
    "DESCRIBE_TRANSACTIONS",
    "LIST_TRANSACTIONS",
    "CONSUMER_GROUP_HEARTBEAT",
    "CONSUMER_GROUP_DESCRIBE",
    "DESCRIBE_TOPIC_PARTITIONS",
    # Messages without an API key follow.
    "CONSUMER_PROTOCOL_SUBSCRIPTION",
    "CONSUMER_PROTOCOL_ASSIGNMENT",
    "TRANSACTION_LOG_KEY",
    "TRANSACTION_LOG_VALUE",
]
