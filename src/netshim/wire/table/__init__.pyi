"""The types of requests and responses by API. tools/wire_stubs.py generates this file."""

from collections.abc import Mapping
from typing import Any, Final

from netshim.wire import messages
from netshim.wire.codec import Api, Message

APIS: Final[Mapping[int, Api[Any, Any]]]
PRODUCE: Final[Api[messages.ProduceRequest, messages.ProduceResponse]]
FETCH: Final[Api[messages.FetchRequest, messages.FetchResponse]]
LIST_OFFSETS: Final[Api[messages.ListOffsetsRequest, messages.ListOffsetsResponse]]
METADATA: Final[Api[messages.MetadataRequest, messages.MetadataResponse]]
OFFSET_COMMIT: Final[Api[messages.OffsetCommitRequest, messages.OffsetCommitResponse]]
OFFSET_FETCH: Final[Api[messages.OffsetFetchRequest, messages.OffsetFetchResponse]]
FIND_COORDINATOR: Final[Api[messages.FindCoordinatorRequest, messages.FindCoordinatorResponse]]
JOIN_GROUP: Final[Api[messages.JoinGroupRequest, messages.JoinGroupResponse]]
HEARTBEAT: Final[Api[messages.HeartbeatRequest, messages.HeartbeatResponse]]
LEAVE_GROUP: Final[Api[messages.LeaveGroupRequest, messages.LeaveGroupResponse]]
SYNC_GROUP: Final[Api[messages.SyncGroupRequest, messages.SyncGroupResponse]]
DESCRIBE_GROUPS: Final[Api[messages.DescribeGroupsRequest, messages.DescribeGroupsResponse]]
LIST_CONFIG_RESOURCES: Final[Api[messages.ListConfigResourcesRequest, messages.ListConfigResourcesResponse]]
LIST_GROUPS: Final[Api[messages.ListGroupsRequest, messages.ListGroupsResponse]]
SASL_HANDSHAKE: Final[Api[messages.SaslHandshakeRequest, messages.SaslHandshakeResponse]]
API_VERSIONS: Final[Api[messages.ApiVersionsRequest, messages.ApiVersionsResponse]]
CREATE_TOPICS: Final[Api[messages.CreateTopicsRequest, messages.CreateTopicsResponse]]
DELETE_TOPICS: Final[Api[messages.DeleteTopicsRequest, messages.DeleteTopicsResponse]]
DELETE_RECORDS: Final[Api[messages.DeleteRecordsRequest, messages.DeleteRecordsResponse]]
INIT_PRODUCER_ID: Final[Api[messages.InitProducerIdRequest, messages.InitProducerIdResponse]]
OFFSET_FOR_LEADER_EPOCH: Final[Api[messages.OffsetForLeaderEpochRequest, messages.OffsetForLeaderEpochResponse]]
ADD_PARTITIONS_TO_TXN: Final[Api[messages.AddPartitionsToTxnRequest, messages.AddPartitionsToTxnResponse]]
ADD_OFFSETS_TO_TXN: Final[Api[messages.AddOffsetsToTxnRequest, messages.AddOffsetsToTxnResponse]]
END_TXN: Final[Api[messages.EndTxnRequest, messages.EndTxnResponse]]
WRITE_TXN_MARKERS: Final[Api[messages.WriteTxnMarkersRequest, messages.WriteTxnMarkersResponse]]
TXN_OFFSET_COMMIT: Final[Api[messages.TxnOffsetCommitRequest, messages.TxnOffsetCommitResponse]]
DESCRIBE_ACLS: Final[Api[messages.DescribeAclsRequest, messages.DescribeAclsResponse]]
CREATE_ACLS: Final[Api[messages.CreateAclsRequest, messages.CreateAclsResponse]]
DELETE_ACLS: Final[Api[messages.DeleteAclsRequest, messages.DeleteAclsResponse]]
DESCRIBE_CONFIGS: Final[Api[messages.DescribeConfigsRequest, messages.DescribeConfigsResponse]]
ALTER_CONFIGS: Final[Api[messages.AlterConfigsRequest, messages.AlterConfigsResponse]]
DESCRIBE_LOG_DIRS: Final[Api[messages.DescribeLogDirsRequest, messages.DescribeLogDirsResponse]]
SASL_AUTHENTICATE: Final[Api[messages.SaslAuthenticateRequest, messages.SaslAuthenticateResponse]]
CREATE_PARTITIONS: Final[Api[messages.CreatePartitionsRequest, messages.CreatePartitionsResponse]]
DELETE_GROUPS: Final[Api[messages.DeleteGroupsRequest, messages.DeleteGroupsResponse]]
ELECT_LEADERS: Final[Api[messages.ElectLeadersRequest, messages.ElectLeadersResponse]]
INCREMENTAL_ALTER_CONFIGS: Final[Api[messages.IncrementalAlterConfigsRequest, messages.IncrementalAlterConfigsResponse]]
ALTER_PARTITION_REASSIGNMENTS: Final[
    Api[messages.AlterPartitionReassignmentsRequest, messages.AlterPartitionReassignmentsResponse]
]
LIST_PARTITION_REASSIGNMENTS: Final[
    Api[messages.ListPartitionReassignmentsRequest, messages.ListPartitionReassignmentsResponse]
]
OFFSET_DELETE: Final[Api[messages.OffsetDeleteRequest, messages.OffsetDeleteResponse]]
DESCRIBE_CLIENT_QUOTAS: Final[Api[messages.DescribeClientQuotasRequest, messages.DescribeClientQuotasResponse]]
ALTER_CLIENT_QUOTAS: Final[Api[messages.AlterClientQuotasRequest, messages.AlterClientQuotasResponse]]
DESCRIBE_USER_SCRAM_CREDENTIALS: Final[
    Api[messages.DescribeUserScramCredentialsRequest, messages.DescribeUserScramCredentialsResponse]
]
ALTER_USER_SCRAM_CREDENTIALS: Final[
    Api[messages.AlterUserScramCredentialsRequest, messages.AlterUserScramCredentialsResponse]
]
DESCRIBE_CLUSTER: Final[Api[messages.DescribeClusterRequest, messages.DescribeClusterResponse]]
DESCRIBE_PRODUCERS: Final[Api[messages.DescribeProducersRequest, messages.DescribeProducersResponse]]
DESCRIBE_TRANSACTIONS: Final[Api[messages.DescribeTransactionsRequest, messages.DescribeTransactionsResponse]]
LIST_TRANSACTIONS: Final[Api[messages.ListTransactionsRequest, messages.ListTransactionsResponse]]
CONSUMER_GROUP_HEARTBEAT: Final[Api[messages.ConsumerGroupHeartbeatRequest, messages.ConsumerGroupHeartbeatResponse]]
CONSUMER_GROUP_DESCRIBE: Final[Api[messages.ConsumerGroupDescribeRequest, messages.ConsumerGroupDescribeResponse]]
DESCRIBE_TOPIC_PARTITIONS: Final[Api[messages.DescribeTopicPartitionsRequest, messages.DescribeTopicPartitionsResponse]]
CONSUMER_PROTOCOL_SUBSCRIPTION: Final[Message[messages.ConsumerProtocolSubscription]]
CONSUMER_PROTOCOL_ASSIGNMENT: Final[Message[messages.ConsumerProtocolAssignment]]
TRANSACTION_LOG_KEY: Final[Message[messages.TransactionLogKey]]
TRANSACTION_LOG_VALUE: Final[Message[messages.TransactionLogValue]]

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
    "CONSUMER_PROTOCOL_SUBSCRIPTION",
    "CONSUMER_PROTOCOL_ASSIGNMENT",
    "TRANSACTION_LOG_KEY",
    "TRANSACTION_LOG_VALUE",
]
