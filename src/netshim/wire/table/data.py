"""Messages about the records of partitions: Produce, Fetch and offsets.

wire/fields.py describes the rows.
"""

from __future__ import annotations

from netshim.wire.codec import api

#: Version 3 is the first with v2 batches. 8 adds errors of single records (KIP-467),
#: and 10 the current leader (KIP-951). In 12, the request also adds its partitions to
#: the transaction (KIP-890). 13 has topic ids instead of names (KIP-516).
PRODUCE = api(
    0,
    "Produce",
    served=(3, 13),
    advertised_min=0,
    flexible=9,
    request="""
        transactional_id  string?      3+ = null
        acks              int16
        timeout_ms        int32
        topic_data        []Topic
          name            string       0-12
          topic_id        uuid         13+
          partition_data  []Partition
            index         int32
            records       records?
    """,
    response="""
        responses                        []Topic
          name                           string          0-12
          topic_id                       uuid            13+
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

#: Version 4 adds the isolation level (KIP-98), 7 fetch sessions (KIP-227), 9 the leader
#: epoch that the client knows (KIP-320), and 11 its rack (KIP-392). 12 detects
#: diverging logs (KIP-595), 13 has topic ids instead of names (KIP-516), 15 adds the
#: epoch of a replica (KIP-903), 16 the addresses of leaders (KIP-951), and 18 the high
#: watermark of a follower (KIP-1166).
FETCH = api(
    1,
    "Fetch",
    served=(4, 18),
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
            high_watermark        int64             18+ tag 1 = 9223372036854775807
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

#: Version 2 adds the isolation level (KIP-98), 4 leader epochs (KIP-320), and 10 a
#: timeout (KIP-1075). 7, 8 and 9 add special timestamps (KIP-734, KIP-405 and
#: KIP-1005).
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

#: Added by KIP-107.
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

#: Added by KIP-101. Version 2 adds the leader epoch that the client knows (KIP-320).
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
