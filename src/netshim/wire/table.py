"""The messages of the wire protocol, as data: each field with its type and the versions it lives in.

Names of fields are those of Kafka's message schemas in snake case, structs have short names of our own. How a row reads
is said in codec.py. `served` is what a broker of ours answers; fields that only newer versions have are left out.

Not here: the headers (wire/__init__.py), and what the fields mean.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from netshim.wire.codec import Api, Message

_APIS: Final[dict[int, Api]] = {}


def api(
    key: int,
    name: str,
    *,
    served: tuple[int, int],
    advertised_min: int | None = None,
    flexible: int | None,
    request: str,
    response: str,
) -> Api:
    """Enters an API; flexible is the first version with compact lengths and tagged fields, None when there is none."""
    entry = _APIS[key] = Api(
        key,
        name,
        served=served,
        advertised_min=advertised_min,
        flexible=flexible,
        request=request,
        response=response,
    )
    return entry


def data(name: str, *, served: tuple[int, int], flexible: int | None, fields: str) -> Message:
    """A message that is no request: the content of a record, or bytes that group members hand each other."""
    return Message(name, "", served, flexible, fields)


PRODUCE = api(
    0,
    "Produce",
    served=(3, 11),
    advertised_min=0,
    flexible=9,
    request="""
        transactional_id  string?      3+ = null
        acks              int16
        timeout_ms        int32
        topic_data        []Topic
          name            string       0-12
          partition_data  []Partition
            index         int32
            records       records?
    """,
    response="""
        responses                        []Topic
          name                           string          0-12
          partition_responses            []Partition
            index                        int32
            error_code                   int16
            base_offset                  int64
            log_append_time_ms           int64           2+ = -1
            log_start_offset             int64           5+ = -1
            record_errors                []RecordError   8+
              batch_index                int32
              batch_index_error_message  string?         = null
            error_message                string?         8+ = null
            current_leader               CurrentLeader   10+ tag 0
              leader_id                  int32           = -1
              leader_epoch               int32           = -1
        throttle_time_ms                 int32           1+
        node_endpoints                   []NodeEndpoint  10+ tag 0
          node_id                        int32
          host                           string
          port                           int32
          rack                           string?         = null
    """,
)

FETCH = api(
    1,
    "Fetch",
    served=(4, 17),
    flexible=12,
    request="""
        cluster_id                string?           12+ tag 0 = null
        replica_id                int32             0-14 = -1
        replica_state             ReplicaState      15+ tag 1
          replica_id              int32             = -1
          replica_epoch           int64             = -1
        max_wait_ms               int32
        min_bytes                 int32
        max_bytes                 int32             3+ = 2147483647
        isolation_level           int8              4+
        session_id                int32             7+
        session_epoch             int32             7+ = -1
        topics                    []Topic
          topic                   string            0-12
          topic_id                uuid              13+
          partitions              []Partition
            partition             int32
            current_leader_epoch  int32             9+ = -1
            fetch_offset          int64
            last_fetched_epoch    int32             12+ = -1
            log_start_offset      int64             5+ = -1
            partition_max_bytes   int32
            replica_directory_id  uuid              17+ tag 0
        forgotten_topics_data     []ForgottenTopic  7+
          topic                   string            7-12
          topic_id                uuid              13+
          partitions              []int32
        rack_id                   string            11+
    """,
    response="""
        throttle_time_ms            int32                  1+
        error_code                  int16                  7+
        session_id                  int32                  7+
        responses                   []Topic
          topic                     string                 0-12
          topic_id                  uuid                   13+
          partitions                []Partition
            partition_index         int32
            error_code              int16
            high_watermark          int64
            last_stable_offset      int64                  4+ = -1
            log_start_offset        int64                  5+ = -1
            diverging_epoch         DivergingEpoch         12+ tag 0
              epoch                 int32                  = -1
              end_offset            int64                  = -1
            current_leader          CurrentLeader          12+ tag 1
              leader_id             int32                  = -1
              leader_epoch          int32                  = -1
            snapshot_id             SnapshotId             12+ tag 2
              end_offset            int64                  = -1
              epoch                 int32                  = -1
            aborted_transactions    []AbortedTransaction?  4+
              producer_id           int64
              first_offset          int64
            preferred_read_replica  int32                  11+ = -1
            records                 records?
        node_endpoints              []NodeEndpoint         16+ tag 0
          node_id                   int32
          host                      string
          port                      int32
          rack                      string?                = null
    """,
)

LIST_OFFSETS = api(
    2,
    "ListOffsets",
    served=(1, 10),
    flexible=6,
    request="""
        replica_id                int32
        isolation_level           int8         2+
        topics                    []Topic
          name                    string
          partitions              []Partition
            partition_index       int32
            current_leader_epoch  int32        4+ = -1
            timestamp             int64
        timeout_ms                int32        10+
    """,
    response="""
        throttle_time_ms     int32        2+
        topics               []Topic
          name               string
          partitions         []Partition
            partition_index  int32
            error_code       int16
            timestamp        int64        1+ = -1
            offset           int64        1+ = -1
            leader_epoch     int32        4+ = -1
    """,
)

METADATA = api(
    3,
    "Metadata",
    served=(0, 13),
    flexible=9,
    request="""
        topics                                 []Topic?1+
          topic_id                             uuid        10+
          name                                 string?10+
        allow_auto_topic_creation              bool        4+ = true
        include_cluster_authorized_operations  bool        8-10
        include_topic_authorized_operations    bool        8+
    """,
    response="""
        throttle_time_ms               int32        3+
        brokers                        []Broker
          node_id                      int32
          host                         string
          port                         int32
          rack                         string?      1+ = null
        cluster_id                     string?      2+ = null
        controller_id                  int32        1+ = -1
        topics                         []Topic
          error_code                   int16
          name                         string?12+
          topic_id                     uuid         10+
          is_internal                  bool         1+
          partitions                   []Partition
            error_code                 int16
            partition_index            int32
            leader_id                  int32
            leader_epoch               int32        7+ = -1
            replica_nodes              []int32
            isr_nodes                  []int32
            offline_replicas           []int32      5+
          topic_authorized_operations  int32        8+ = -2147483648
        cluster_authorized_operations  int32        8-10 = -2147483648
        error_code                     int16        13+
    """,
)

OFFSET_COMMIT = api(
    8,
    "OffsetCommit",
    served=(2, 9),
    flexible=8,
    request="""
        group_id                       string
        generation_id_or_member_epoch  int32        1+ = -1
        member_id                      string       1+
        group_instance_id              string?      7+ = null
        retention_time_ms              int64        2-4 = -1
        topics                         []Topic
          name                         string
          partitions                   []Partition
            partition_index            int32
            committed_offset           int64
            committed_leader_epoch     int32        6+ = -1
            committed_metadata         string?
    """,
    response="""
        throttle_time_ms     int32        3+
        topics               []Topic
          name               string
          partitions         []Partition
            partition_index  int32
            error_code       int16
    """,
)

OFFSET_FETCH = api(
    9,
    "OffsetFetch",
    served=(1, 9),
    flexible=6,
    request="""
        group_id               string       0-7
        topics                 []Topic?2-7  0-7
          name                 string
          partition_indexes    []int32
        groups                 []Group      8+
          group_id             string
          member_id            string?      9+ = null
          member_epoch         int32        9+ = -1
          topics               []Topic?
            name               string       8-9
            partition_indexes  []int32
        require_stable         bool         7+
    """,
    response="""
        throttle_time_ms              int32        3+
        topics                        []Topic      0-7
          name                        string
          partitions                  []Partition
            partition_index           int32
            committed_offset          int64
            committed_leader_epoch    int32        5-7 = -1
            metadata                  string?
            error_code                int16
        error_code                    int16        2-7
        groups                        []Group      8+
          group_id                    string
          topics                      []Topic
            name                      string       8-9
            partitions                []Partition
              partition_index         int32
              committed_offset        int64
              committed_leader_epoch  int32        = -1
              metadata                string?
              error_code              int16
          error_code                  int16
    """,
)

FIND_COORDINATOR = api(
    10,
    "FindCoordinator",
    served=(0, 5),
    flexible=3,
    request="""
        key               string    0-3
        key_type          int8      1+
        coordinator_keys  []string  4+
    """,
    response="""
        throttle_time_ms  int32          1+
        error_code        int16          0-3
        error_message     string?        1-3
        node_id           int32          0-3
        host              string         0-3
        port              int32          0-3
        coordinators      []Coordinator  4+
          key             string
          node_id         int32
          host            string
          port            int32
          error_code      int16
          error_message   string?
    """,
)

JOIN_GROUP = api(
    11,
    "JoinGroup",
    served=(0, 9),
    flexible=6,
    request="""
        group_id              string
        session_timeout_ms    int32
        rebalance_timeout_ms  int32       1+ = -1
        member_id             string
        group_instance_id     string?     5+ = null
        protocol_type         string
        protocols             []Protocol
          name                string
          metadata            bytes
        reason                string?     8+ = null
    """,
    response="""
        throttle_time_ms     int32      2+
        error_code           int16
        generation_id        int32      = -1
        protocol_type        string?    7+ = null
        protocol_name        string?7+
        leader               string
        skip_assignment      bool       9+
        member_id            string
        members              []Member
          member_id          string
          group_instance_id  string?    5+ = null
          metadata           bytes
    """,
)

HEARTBEAT = api(
    12,
    "Heartbeat",
    served=(0, 4),
    flexible=4,
    request="""
        group_id           string
        generation_id      int32
        member_id          string
        group_instance_id  string?  3+ = null
    """,
    response="""
        throttle_time_ms  int32  1+
        error_code        int16
    """,
)

LEAVE_GROUP = api(
    13,
    "LeaveGroup",
    served=(0, 5),
    flexible=4,
    request="""
        group_id             string
        member_id            string    0-2
        members              []Member  3+
          member_id          string
          group_instance_id  string?   = null
          reason             string?   5+ = null
    """,
    response="""
        throttle_time_ms     int32     1+
        error_code           int16
        members              []Member  3+
          member_id          string
          group_instance_id  string?
          error_code         int16
    """,
)

SYNC_GROUP = api(
    14,
    "SyncGroup",
    served=(0, 5),
    flexible=4,
    request="""
        group_id           string
        generation_id      int32
        member_id          string
        group_instance_id  string?       3+ = null
        protocol_type      string?       5+ = null
        protocol_name      string?       5+ = null
        assignments        []Assignment
          member_id        string
          assignment       bytes
    """,
    response="""
        throttle_time_ms  int32    1+
        error_code        int16
        protocol_type     string?  5+ = null
        protocol_name     string?  5+ = null
        assignment        bytes
    """,
)

DESCRIBE_GROUPS = api(
    15,
    "DescribeGroups",
    served=(0, 5),
    flexible=5,
    request="""
        groups                         []string
        include_authorized_operations  bool      3+
    """,
    response="""
        throttle_time_ms         int32     1+
        groups                   []Group
          error_code             int16
          group_id               string
          group_state            string
          protocol_type          string
          protocol_data          string
          members                []Member
            member_id            string
            group_instance_id    string?   4+ = null
            client_id            string
            client_host          string
            member_metadata      bytes
            member_assignment    bytes
          authorized_operations  int32     3+ = -2147483648
    """,
)

LIST_GROUPS = api(
    16,
    "ListGroups",
    served=(0, 5),
    flexible=3,
    request="""
        states_filter  []string  4+
        types_filter   []string  5+
    """,
    response="""
        throttle_time_ms  int32    1+
        error_code        int16
        groups            []Group
          group_id        string
          protocol_type   string
          group_state     string   4+
          group_type      string   5+
    """,
)

SASL_HANDSHAKE = api(
    17,
    "SaslHandshake",
    served=(0, 1),
    flexible=None,
    request="""
        mechanism  string
    """,
    response="""
        error_code  int16
        mechanisms  []string
    """,
)

API_VERSIONS = api(
    18,
    "ApiVersions",
    served=(0, 4),
    flexible=3,
    request="""
        client_software_name     string  3+
        client_software_version  string  3+
    """,
    response="""
        error_code                int16
        api_keys                  []ApiKey
          api_key                 int16
          min_version             int16
          max_version             int16
        throttle_time_ms          int32               1+
        supported_features        []SupportedFeature  3+ tag 0
          name                    string
          min_version             int16
          max_version             int16
        finalized_features_epoch  int64               3+ tag 1 = -1
        finalized_features        []FinalizedFeature  3+ tag 2
          name                    string
          max_version_level       int16
          min_version_level       int16
        zk_migration_ready        bool                3+ tag 3
    """,
)

CREATE_TOPICS = api(
    19,
    "CreateTopics",
    served=(2, 7),
    flexible=5,
    request="""
        topics                []Topic
          name                string
          num_partitions      int32
          replication_factor  int16
          assignments         []Assignment
            partition_index   int32
            broker_ids        []int32
          configs             []Config
            name              string
            value             string?
        timeout_ms            int32         = 60000
        validate_only         bool          1+
    """,
    response="""
        throttle_time_ms           int32      2+
        topics                     []Topic
          name                     string
          topic_id                 uuid       7+
          error_code               int16
          error_message            string?    1+
          topic_config_error_code  int16      5+ tag 0
          num_partitions           int32      5+ = -1
          replication_factor       int16      5+ = -1
          configs                  []Config?  5+
            name                   string
            value                  string?
            read_only              bool
            config_source          int8       = -1
            is_sensitive           bool
    """,
)

DELETE_TOPICS = api(
    20,
    "DeleteTopics",
    served=(1, 6),
    flexible=4,
    request="""
        topics       []Topic   6+
          name       string?   = null
          topic_id   uuid
        topic_names  []string  0-5
        timeout_ms   int32
    """,
    response="""
        throttle_time_ms  int32      1+
        responses         []Topic
          name            string?6+
          topic_id        uuid       6+
          error_code      int16
          error_message   string?    5+ = null
    """,
)

DELETE_RECORDS = api(
    21,
    "DeleteRecords",
    served=(0, 2),
    flexible=2,
    request="""
        topics               []Topic
          name               string
          partitions         []Partition
            partition_index  int32
            offset           int64
        timeout_ms           int32
    """,
    response="""
        throttle_time_ms     int32
        topics               []Topic
          name               string
          partitions         []Partition
            partition_index  int32
            low_watermark    int64
            error_code       int16
    """,
)

INIT_PRODUCER_ID = api(
    22,
    "InitProducerId",
    served=(0, 5),
    flexible=2,
    request="""
        transactional_id        string?
        transaction_timeout_ms  int32
        producer_id             int64    3+ = -1
        producer_epoch          int16    3+ = -1
    """,
    response="""
        throttle_time_ms  int32
        error_code        int16
        producer_id       int64  = -1
        producer_epoch    int16
    """,
)

OFFSET_FOR_LEADER_EPOCH = api(
    23,
    "OffsetForLeaderEpoch",
    served=(2, 4),
    flexible=4,
    request="""
        replica_id                int32        3+ = -2
        topics                    []Topic
          topic                   string
          partitions              []Partition
            partition             int32
            current_leader_epoch  int32        2+ = -1
            leader_epoch          int32
    """,
    response="""
        throttle_time_ms  int32        2+
        topics            []Topic
          topic           string
          partitions      []Partition
            error_code    int16
            partition     int32
            leader_epoch  int32        1+ = -1
            end_offset    int64        = -1
    """,
)

ADD_PARTITIONS_TO_TXN = api(
    24,
    "AddPartitionsToTxn",
    served=(0, 3),
    flexible=3,
    request="""
        v3_and_below_transactional_id  string
        v3_and_below_producer_id       int64
        v3_and_below_producer_epoch    int16
        v3_and_below_topics            []Topic
          name                         string
          partitions                   []int32
    """,
    response="""
        throttle_time_ms               int32
        results_by_topic_v3_and_below  []Topic
          name                         string
          results_by_partition         []Partition
            partition_index            int32
            partition_error_code       int16
    """,
)

ADD_OFFSETS_TO_TXN = api(
    25,
    "AddOffsetsToTxn",
    served=(0, 4),
    flexible=3,
    request="""
        transactional_id  string
        producer_id       int64
        producer_epoch    int16
        group_id          string
    """,
    response="""
        throttle_time_ms  int32
        error_code        int16
    """,
)

END_TXN = api(
    26,
    "EndTxn",
    served=(0, 4),
    flexible=3,
    request="""
        transactional_id  string
        producer_id       int64
        producer_epoch    int16
        committed         bool
    """,
    response="""
        throttle_time_ms  int32
        error_code        int16
    """,
)

WRITE_TXN_MARKERS = api(
    27,
    "WriteTxnMarkers",
    served=(1, 1),
    flexible=1,
    request="""
        markers                []Marker
          producer_id          int64
          producer_epoch       int16
          transaction_result   bool
          topics               []Topic
            name               string
            partition_indexes  []int32
          coordinator_epoch    int32
    """,
    response="""
        markers                []Marker
          producer_id          int64
          topics               []Topic
            name               string
            partitions         []Partition
              partition_index  int32
              error_code       int16
    """,
)

TXN_OFFSET_COMMIT = api(
    28,
    "TxnOffsetCommit",
    served=(0, 4),
    flexible=3,
    request="""
        transactional_id            string
        group_id                    string
        producer_id                 int64
        producer_epoch              int16
        generation_id               int32        3+ = -1
        member_id                   string       3+
        group_instance_id           string?      3+ = null
        topics                      []Topic
          name                      string
          partitions                []Partition
            partition_index         int32
            committed_offset        int64
            committed_leader_epoch  int32        2+ = -1
            committed_metadata      string?
    """,
    response="""
        throttle_time_ms     int32
        topics               []Topic
          name               string
          partitions         []Partition
            partition_index  int32
            error_code       int16
    """,
)

DESCRIBE_ACLS = api(
    29,
    "DescribeAcls",
    served=(1, 3),
    flexible=2,
    request="""
        resource_type_filter  int8
        resource_name_filter  string?
        pattern_type_filter   int8     1+ = 3
        principal_filter      string?
        host_filter           string?
        operation             int8
        permission_type       int8
    """,
    response="""
        throttle_time_ms     int32
        error_code           int16
        error_message        string?
        resources            []Resource
          resource_type      int8
          resource_name      string
          pattern_type       int8        1+ = 3
          acls               []Acl
            principal        string
            host             string
            operation        int8
            permission_type  int8
    """,
)

CREATE_ACLS = api(
    30,
    "CreateAcls",
    served=(1, 3),
    flexible=2,
    request="""
        creations                []Creation
          resource_type          int8
          resource_name          string
          resource_pattern_type  int8        1+ = 3
          principal              string
          host                   string
          operation              int8
          permission_type        int8
    """,
    response="""
        throttle_time_ms  int32
        results           []Result
          error_code      int16
          error_message   string?
    """,
)

DELETE_ACLS = api(
    31,
    "DeleteAcls",
    served=(1, 3),
    flexible=2,
    request="""
        filters                 []Filter
          resource_type_filter  int8
          resource_name_filter  string?
          pattern_type_filter   int8      1+ = 3
          principal_filter      string?
          host_filter           string?
          operation             int8
          permission_type       int8
    """,
    response="""
        throttle_time_ms     int32
        filter_results       []FilterResult
          error_code         int16
          error_message      string?
          matching_acls      []MatchingAcl
            error_code       int16
            error_message    string?
            resource_type    int8
            resource_name    string
            pattern_type     int8            1+ = 3
            principal        string
            host             string
            operation        int8
            permission_type  int8
    """,
)

DESCRIBE_CONFIGS = api(
    32,
    "DescribeConfigs",
    served=(1, 4),
    flexible=4,
    request="""
        resources              []Resource
          resource_type        int8
          resource_name        string
          configuration_keys   []string?
        include_synonyms       bool        1+
        include_documentation  bool        3+
    """,
    response="""
        throttle_time_ms   int32
        results            []Resource
          error_code       int16
          error_message    string?
          resource_type    int8
          resource_name    string
          configs          []Config
            name           string
            value          string?
            read_only      bool
            config_source  int8        1+ = -1
            is_sensitive   bool
            synonyms       []Synonym   1+
              name         string
              value        string?
              source       int8
            config_type    int8        3+
            documentation  string?     3+
    """,
)

ALTER_CONFIGS = api(
    33,
    "AlterConfigs",
    served=(0, 2),
    flexible=2,
    request="""
        resources        []Resource
          resource_type  int8
          resource_name  string
          configs        []Config
            name         string
            value        string?
        validate_only    bool
    """,
    response="""
        throttle_time_ms  int32
        responses         []Resource
          error_code      int16
          error_message   string?
          resource_type   int8
          resource_name   string
    """,
)

DESCRIBE_LOG_DIRS = api(
    35,
    "DescribeLogDirs",
    served=(1, 4),
    flexible=2,
    request="""
        topics        []Topic?
          topic       string
          partitions  []int32
    """,
    response="""
        throttle_time_ms       int32
        error_code             int16        3+
        results                []LogDir
          error_code           int16
          log_dir              string
          topics               []Topic
            name               string
            partitions         []Partition
              partition_index  int32
              partition_size   int64
              offset_lag       int64
              is_future_key    bool
          total_bytes          int64        4+ = -1
          usable_bytes         int64        4+ = -1
    """,
)

SASL_AUTHENTICATE = api(
    36,
    "SaslAuthenticate",
    served=(0, 2),
    flexible=2,
    request="""
        auth_bytes  bytes
    """,
    response="""
        error_code           int16
        error_message        string?
        auth_bytes           bytes
        session_lifetime_ms  int64    1+
    """,
)

CREATE_PARTITIONS = api(
    37,
    "CreatePartitions",
    served=(0, 3),
    flexible=2,
    request="""
        topics          []Topic
          name          string
          count         int32
          assignments   []Assignment?
            broker_ids  []int32
        timeout_ms      int32
        validate_only   bool
    """,
    response="""
        throttle_time_ms  int32
        results           []Topic
          name            string
          error_code      int16
          error_message   string?  = null
    """,
)

DELETE_GROUPS = api(
    42,
    "DeleteGroups",
    served=(0, 2),
    flexible=2,
    request="""
        groups_names  []string
    """,
    response="""
        throttle_time_ms  int32
        results           []Group
          group_id        string
          error_code      int16
    """,
)

ELECT_LEADERS = api(
    43,
    "ElectLeaders",
    served=(0, 2),
    flexible=2,
    request="""
        election_type     int8      1+
        topic_partitions  []Topic?
          topic           string
          partitions      []int32
        timeout_ms        int32     = 60000
    """,
    response="""
        throttle_time_ms          int32
        error_code                int16        1+
        replica_election_results  []Topic
          topic                   string
          partition_result        []Partition
            partition_id          int32
            error_code            int16
            error_message         string?
    """,
)

INCREMENTAL_ALTER_CONFIGS = api(
    44,
    "IncrementalAlterConfigs",
    served=(0, 1),
    flexible=1,
    request="""
        resources             []Resource
          resource_type       int8
          resource_name       string
          configs             []Config
            name              string
            config_operation  int8
            value             string?
        validate_only         bool
    """,
    response="""
        throttle_time_ms  int32
        responses         []Resource
          error_code      int16
          error_message   string?
          resource_type   int8
          resource_name   string
    """,
)

LIST_PARTITION_REASSIGNMENTS = api(
    46,
    "ListPartitionReassignments",
    served=(0, 0),
    flexible=0,
    request="""
        timeout_ms           int32     = 60000
        topics               []Topic?  = null
          name               string
          partition_indexes  []int32
    """,
    response="""
        throttle_time_ms       int32
        error_code             int16
        error_message          string?
        topics                 []Topic
          name                 string
          partitions           []Partition
            partition_index    int32
            replicas           []int32
            adding_replicas    []int32
            removing_replicas  []int32
    """,
)

OFFSET_DELETE = api(
    47,
    "OffsetDelete",
    served=(0, 0),
    flexible=None,
    request="""
        group_id             string
        topics               []Topic
          name               string
          partitions         []Partition
            partition_index  int32
    """,
    response="""
        error_code           int16
        throttle_time_ms     int32
        topics               []Topic
          name               string
          partitions         []Partition
            partition_index  int32
            error_code       int16
    """,
)

DESCRIBE_CLIENT_QUOTAS = api(
    48,
    "DescribeClientQuotas",
    served=(0, 1),
    flexible=1,
    request="""
        components     []Component
          entity_type  string
          match_type   int8
          match        string?
        strict         bool
    """,
    response="""
        throttle_time_ms  int32
        error_code        int16
        error_message     string?
        entries           []Entry?
          entity          []Entity
            entity_type   string
            entity_name   string?
          values          []Value
            key           string
            value         float64
    """,
)

ALTER_CLIENT_QUOTAS = api(
    49,
    "AlterClientQuotas",
    served=(0, 1),
    flexible=1,
    request="""
        entries          []Entry
          entity         []Entity
            entity_type  string
            entity_name  string?
          ops            []Op
            key          string
            value        float64
            remove       bool
        validate_only    bool
    """,
    response="""
        throttle_time_ms  int32
        entries           []Entry
          error_code      int16
          error_message   string?
          entity          []Entity
            entity_type   string
            entity_name   string?
    """,
)

DESCRIBE_USER_SCRAM_CREDENTIALS = api(
    50,
    "DescribeUserScramCredentials",
    served=(0, 0),
    flexible=0,
    request="""
        users   []User?
          name  string
    """,
    response="""
        throttle_time_ms    int32
        error_code          int16
        error_message       string?
        results             []User
          user              string
          error_code        int16
          error_message     string?
          credential_infos  []CredentialInfo
            mechanism       int8
            iterations      int32
    """,
)

ALTER_USER_SCRAM_CREDENTIALS = api(
    51,
    "AlterUserScramCredentials",
    served=(0, 0),
    flexible=0,
    request="""
        deletions          []Deletion
          name             string
          mechanism        int8
        upsertions         []Upsertion
          name             string
          mechanism        int8
          iterations       int32
          salt             bytes
          salted_password  bytes
    """,
    response="""
        throttle_time_ms  int32
        results           []User
          user            string
          error_code      int16
          error_message   string?
    """,
)

DESCRIBE_CLUSTER = api(
    60,
    "DescribeCluster",
    served=(0, 2),
    flexible=0,
    request="""
        include_cluster_authorized_operations  bool
        endpoint_type                          int8  1+ = 1
        include_fenced_brokers                 bool  2+
    """,
    response="""
        throttle_time_ms               int32
        error_code                     int16
        error_message                  string?   = null
        endpoint_type                  int8      1+ = 1
        cluster_id                     string
        controller_id                  int32     = -1
        brokers                        []Broker
          broker_id                    int32
          host                         string
          port                         int32
          rack                         string?   = null
          is_fenced                    bool      2+
        cluster_authorized_operations  int32     = -2147483648
    """,
)

DESCRIBE_PRODUCERS = api(
    61,
    "DescribeProducers",
    served=(0, 0),
    flexible=0,
    request="""
        topics               []Topic
          name               string
          partition_indexes  []int32
    """,
    response="""
        throttle_time_ms                int32
        topics                          []Topic
          name                          string
          partitions                    []Partition
            partition_index             int32
            error_code                  int16
            error_message               string?           = null
            active_producers            []ActiveProducer
              producer_id               int64
              producer_epoch            int32
              last_sequence             int32             = -1
              last_timestamp            int64             = -1
              coordinator_epoch         int32
              current_txn_start_offset  int64             = -1
    """,
)

DESCRIBE_TRANSACTIONS = api(
    65,
    "DescribeTransactions",
    served=(0, 0),
    flexible=0,
    request="""
        transactional_ids  []string
    """,
    response="""
        throttle_time_ms             int32
        transaction_states           []TransactionState
          error_code                 int16
          transactional_id           string
          transaction_state          string
          transaction_timeout_ms     int32
          transaction_start_time_ms  int64
          producer_id                int64
          producer_epoch             int16
          topics                     []Topic
            topic                    string
            partitions               []int32
    """,
)

LIST_TRANSACTIONS = api(
    66,
    "ListTransactions",
    served=(0, 2),
    flexible=0,
    request="""
        state_filters             []string
        producer_id_filters       []int64
        duration_filter           int64     1+ = -1
        transactional_id_pattern  string?   2+ = null
    """,
    response="""
        throttle_time_ms       int32
        error_code             int16
        unknown_state_filters  []string
        transaction_states     []TransactionState
          transactional_id     string
          producer_id          int64
          transaction_state    string
    """,
)

CONSUMER_GROUP_HEARTBEAT = api(
    68,
    "ConsumerGroupHeartbeat",
    served=(0, 1),
    flexible=0,
    request="""
        group_id                string
        member_id               string
        member_epoch            int32
        instance_id             string?    = null
        rack_id                 string?    = null
        rebalance_timeout_ms    int32      = -1
        subscribed_topic_names  []string?  = null
        subscribed_topic_regex  string?    1+ = null
        server_assignor         string?    = null
        topic_partitions        []Topic?   = null
          topic_id              uuid
          partitions            []int32
    """,
    response="""
        throttle_time_ms       int32
        error_code             int16
        error_message          string?      = null
        member_id              string?      = null
        member_epoch           int32
        heartbeat_interval_ms  int32
        assignment             Assignment?  = null
          topic_partitions     []Topic
            topic_id           uuid
            partitions         []int32
    """,
)

CONSUMER_GROUP_DESCRIBE = api(
    69,
    "ConsumerGroupDescribe",
    served=(0, 1),
    flexible=0,
    request="""
        group_ids                      []string
        include_authorized_operations  bool
    """,
    response="""
        throttle_time_ms            int32
        groups                      []Group
          error_code                int16
          error_message             string?     = null
          group_id                  string
          group_state               string
          group_epoch               int32
          assignment_epoch          int32
          assignor_name             string
          members                   []Member
            member_id               string
            instance_id             string?     = null
            rack_id                 string?     = null
            member_epoch            int32
            client_id               string
            client_host             string
            subscribed_topic_names  []string
            subscribed_topic_regex  string?     = null
            assignment              Assignment
              topic_partitions      []Topic
                topic_id            uuid
                topic_name          string
                partitions          []int32
            target_assignment       Assignment
            member_type             int8        1+ = -1
          authorized_operations     int32       = -2147483648
    """,
)

DESCRIBE_TOPIC_PARTITIONS = api(
    75,
    "DescribeTopicPartitions",
    served=(0, 0),
    flexible=0,
    request="""
        topics                    []Topic
          name                    string
        response_partition_limit  int32    = 2000
        cursor                    Cursor?  = null
          topic_name              string
          partition_index         int32
    """,
    response="""
        throttle_time_ms               int32
        topics                         []Topic
          error_code                   int16
          name                         string?
          topic_id                     uuid
          is_internal                  bool
          partitions                   []Partition
            error_code                 int16
            partition_index            int32
            leader_id                  int32
            leader_epoch               int32        = -1
            replica_nodes              []int32
            isr_nodes                  []int32
            eligible_leader_replicas   []int32?     = null
            last_known_elr             []int32?     = null
            offline_replicas           []int32
          topic_authorized_operations  int32        = -2147483648
        next_cursor                    Cursor?      = null
          topic_name                   string
          partition_index              int32
    """,
)

CONSUMER_PROTOCOL_SUBSCRIPTION = data(
    "ConsumerProtocolSubscription",
    served=(0, 3),
    flexible=None,
    fields="""
        topics            []string
        user_data         bytes?    = null
        owned_partitions  []Topic   1+
          topic           string
          partitions      []int32
        generation_id     int32     2+ = -1
        rack_id           string?   3+ = null
    """,
)

CONSUMER_PROTOCOL_ASSIGNMENT = data(
    "ConsumerProtocolAssignment",
    served=(0, 3),
    flexible=None,
    fields="""
        assigned_partitions  []Topic
          topic              string
          partitions         []int32
        user_data            bytes?   = null
    """,
)

TRANSACTION_LOG_KEY = data(
    "TransactionLogKey",
    served=(0, 0),
    flexible=None,
    fields="""
        transactional_id  string
    """,
)

TRANSACTION_LOG_VALUE = data(
    "TransactionLogValue",
    served=(0, 1),
    flexible=1,
    fields="""
        producer_id                           int64
        previous_producer_id                  int64     1+ tag 0 = -1
        next_producer_id                      int64     1+ tag 1 = -1
        producer_epoch                        int16
        transaction_timeout_ms                int32
        transaction_status                    int8
        transaction_partitions                []Topic?
          topic                               string
          partition_ids                       []int32
        transaction_last_update_timestamp_ms  int64
        transaction_start_timestamp_ms        int64
        client_transaction_version            int16     1+ tag 2
    """,
)

#: All APIs by key.
APIS: Final = MappingProxyType(_APIS)

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
