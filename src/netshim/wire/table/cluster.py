"""Messages about the cluster: its brokers, their APIs and the partitions that they
lead.

wire/fields.py describes the rows.
"""

from __future__ import annotations

from netshim.wire.codec import api

#: Version 1 adds racks and the controller, 2 the cluster id (KIP-78), 4 whether topics
#: are created, 5 offline replicas (KIP-112), 7 leader epochs (KIP-320), 8 authorized
#: operations (KIP-430), 10 topic ids, and 12 requests by topic id (KIP-516). 13 adds an
#: error of the whole response (KIP-1102).
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

#: Version 3 adds the name of the client software (KIP-511), and features (KIP-584).
#: Until version 3, a feature could not have the minimum 0 (KAFKA-17011). The header of
#: the response has no tagged fields in any version, because a client parses
#: the response before it has the served versions.
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

#: Added by KIP-113. Version 4 adds the size of the disk (KIP-827).
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

#: Added by KIP-183. Version 1 adds unclean elections (KIP-460).
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

#: Added by KIP-455. Version 1 can forbid a change of the replication factor (KIP-860).
ALTER_PARTITION_REASSIGNMENTS = api(
    45,
    "AlterPartitionReassignments",
    served=(0, 1),
    flexible=0,
    request="""
        timeout_ms                        int32  = 60000
        allow_replication_factor_change   bool  1+ = true
        topics                            []Topic
          name                            string
          partitions                      []Partition
            partition_index               int32
            replicas                      []int32?  = null
    """,
    response="""
        throttle_time_ms                  int32
        allow_replication_factor_change   bool  1+ = true
        error_code                        int16
        error_message                     string?
        responses                         []Topic
          name                            string
          partitions                      []Partition
            partition_index               int32
            error_code                    int16
            error_message                 string?
    """,
)

#: Added by KIP-455.
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

#: Added by KIP-700. Version 1 adds controllers as endpoints (KIP-919), and 2 fenced
#: brokers (KIP-1073).
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

#: Added by KIP-966. The response has the eligible leader replicas, and a cursor for the
#: next page.
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
