"""Which types belong to which API: written by tools/wire_stubs.py. Do not edit."""

from collections.abc import Mapping
from typing import Any, Final

from netshim.wire.codec import Api, Message
from netshim.wire.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    AlterConfigsRequest,
    AlterConfigsResponse,
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    ApiVersionsRequest,
    ApiVersionsResponse,
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    CreateAclsRequest,
    CreateAclsResponse,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    EndTxnRequest,
    EndTxnResponse,
    FetchRequest,
    FetchResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    ProduceRequest,
    ProduceResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
    SyncGroupRequest,
    SyncGroupResponse,
    TransactionLogKey,
    TransactionLogValue,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

APIS: Final[Mapping[int, Api[Any, Any]]]
PRODUCE: Final[Api[ProduceRequest, ProduceResponse]]
FETCH: Final[Api[FetchRequest, FetchResponse]]
LIST_OFFSETS: Final[Api[ListOffsetsRequest, ListOffsetsResponse]]
METADATA: Final[Api[MetadataRequest, MetadataResponse]]
OFFSET_COMMIT: Final[Api[OffsetCommitRequest, OffsetCommitResponse]]
OFFSET_FETCH: Final[Api[OffsetFetchRequest, OffsetFetchResponse]]
FIND_COORDINATOR: Final[Api[FindCoordinatorRequest, FindCoordinatorResponse]]
JOIN_GROUP: Final[Api[JoinGroupRequest, JoinGroupResponse]]
HEARTBEAT: Final[Api[HeartbeatRequest, HeartbeatResponse]]
LEAVE_GROUP: Final[Api[LeaveGroupRequest, LeaveGroupResponse]]
SYNC_GROUP: Final[Api[SyncGroupRequest, SyncGroupResponse]]
DESCRIBE_GROUPS: Final[Api[DescribeGroupsRequest, DescribeGroupsResponse]]
LIST_CONFIG_RESOURCES: Final[Api[ListConfigResourcesRequest, ListConfigResourcesResponse]]
LIST_GROUPS: Final[Api[ListGroupsRequest, ListGroupsResponse]]
SASL_HANDSHAKE: Final[Api[SaslHandshakeRequest, SaslHandshakeResponse]]
API_VERSIONS: Final[Api[ApiVersionsRequest, ApiVersionsResponse]]
CREATE_TOPICS: Final[Api[CreateTopicsRequest, CreateTopicsResponse]]
DELETE_TOPICS: Final[Api[DeleteTopicsRequest, DeleteTopicsResponse]]
DELETE_RECORDS: Final[Api[DeleteRecordsRequest, DeleteRecordsResponse]]
INIT_PRODUCER_ID: Final[Api[InitProducerIdRequest, InitProducerIdResponse]]
OFFSET_FOR_LEADER_EPOCH: Final[Api[OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse]]
ADD_PARTITIONS_TO_TXN: Final[Api[AddPartitionsToTxnRequest, AddPartitionsToTxnResponse]]
ADD_OFFSETS_TO_TXN: Final[Api[AddOffsetsToTxnRequest, AddOffsetsToTxnResponse]]
END_TXN: Final[Api[EndTxnRequest, EndTxnResponse]]
WRITE_TXN_MARKERS: Final[Api[WriteTxnMarkersRequest, WriteTxnMarkersResponse]]
TXN_OFFSET_COMMIT: Final[Api[TxnOffsetCommitRequest, TxnOffsetCommitResponse]]
DESCRIBE_ACLS: Final[Api[DescribeAclsRequest, DescribeAclsResponse]]
CREATE_ACLS: Final[Api[CreateAclsRequest, CreateAclsResponse]]
DELETE_ACLS: Final[Api[DeleteAclsRequest, DeleteAclsResponse]]
DESCRIBE_CONFIGS: Final[Api[DescribeConfigsRequest, DescribeConfigsResponse]]
ALTER_CONFIGS: Final[Api[AlterConfigsRequest, AlterConfigsResponse]]
DESCRIBE_LOG_DIRS: Final[Api[DescribeLogDirsRequest, DescribeLogDirsResponse]]
SASL_AUTHENTICATE: Final[Api[SaslAuthenticateRequest, SaslAuthenticateResponse]]
CREATE_PARTITIONS: Final[Api[CreatePartitionsRequest, CreatePartitionsResponse]]
DELETE_GROUPS: Final[Api[DeleteGroupsRequest, DeleteGroupsResponse]]
ELECT_LEADERS: Final[Api[ElectLeadersRequest, ElectLeadersResponse]]
INCREMENTAL_ALTER_CONFIGS: Final[Api[IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse]]
ALTER_PARTITION_REASSIGNMENTS: Final[Api[AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse]]
LIST_PARTITION_REASSIGNMENTS: Final[Api[ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse]]
OFFSET_DELETE: Final[Api[OffsetDeleteRequest, OffsetDeleteResponse]]
DESCRIBE_CLIENT_QUOTAS: Final[Api[DescribeClientQuotasRequest, DescribeClientQuotasResponse]]
ALTER_CLIENT_QUOTAS: Final[Api[AlterClientQuotasRequest, AlterClientQuotasResponse]]
DESCRIBE_USER_SCRAM_CREDENTIALS: Final[Api[DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse]]
ALTER_USER_SCRAM_CREDENTIALS: Final[Api[AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse]]
DESCRIBE_CLUSTER: Final[Api[DescribeClusterRequest, DescribeClusterResponse]]
DESCRIBE_PRODUCERS: Final[Api[DescribeProducersRequest, DescribeProducersResponse]]
DESCRIBE_TRANSACTIONS: Final[Api[DescribeTransactionsRequest, DescribeTransactionsResponse]]
LIST_TRANSACTIONS: Final[Api[ListTransactionsRequest, ListTransactionsResponse]]
CONSUMER_GROUP_HEARTBEAT: Final[Api[ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse]]
CONSUMER_GROUP_DESCRIBE: Final[Api[ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse]]
DESCRIBE_TOPIC_PARTITIONS: Final[Api[DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse]]
CONSUMER_PROTOCOL_SUBSCRIPTION: Final[Message[ConsumerProtocolSubscription]]
CONSUMER_PROTOCOL_ASSIGNMENT: Final[Message[ConsumerProtocolAssignment]]
TRANSACTION_LOG_KEY: Final[Message[TransactionLogKey]]
TRANSACTION_LOG_VALUE: Final[Message[TransactionLogValue]]

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
