"""Messages about idempotent producers and transactions, and the records of
`__transaction_state`.

wire/fields.py describes the rows.
"""

from __future__ import annotations

from netshim.wire.codec import api, data

#: Added by KIP-98. Version 3 adds the current id and epoch of the producer (KIP-360).
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

#: Added by KIP-98. Since version 4, brokers add and verify partitions for their
#: producers, for several transactions at once (KIP-890).
ADD_PARTITIONS_TO_TXN = api(
    24,
    "AddPartitionsToTxn",
    served=(0, 5),
    flexible=3,
    request="""
        transactions                   []Transaction  4+
          transactional_id             string
          producer_id                  int64
          producer_epoch               int16
          verify_only                  bool
          topics                       []Topic
            name                       string
            partitions                 []int32
        v3_and_below_transactional_id  string   0-3
        v3_and_below_producer_id       int64    0-3
        v3_and_below_producer_epoch    int16    0-3
        v3_and_below_topics            []Topic  0-3
          name                         string
          partitions                   []int32
    """,
    response="""
        throttle_time_ms               int32
        error_code                     int16  4+
        results_by_transaction         []Transaction  4+
          transactional_id             string
          topic_results                []Topic
            name                       string
            results_by_partition       []Partition
              partition_index          int32
              partition_error_code     int16
        results_by_topic_v3_and_below  []Topic  0-3
          name                         string
          results_by_partition         []Partition
            partition_index            int32
            partition_error_code       int16
    """,
)

#: Added by KIP-98.
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

#: Added by KIP-98. Version 5 returns the id and epoch for the next transaction
#: (KIP-890).
END_TXN = api(
    26,
    "EndTxn",
    served=(0, 5),
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
        producer_id       int64  5+ = -1
        producer_epoch    int16  5+ = -1
    """,
)

#: Added by KIP-98. Brokers send it to the leaders of partitions.
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

#: Added by KIP-98. Version 2 adds leader epochs (KIP-320), and 3 the member of the
#: group (KIP-447). In 5, the request also adds the group to the transaction (KIP-890).
TXN_OFFSET_COMMIT = api(
    28,
    "TxnOffsetCommit",
    served=(0, 5),
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

#: Added by KIP-664.
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

#: Added by KIP-664.
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

#: Added by KIP-664. Version 1 selects by duration (KIP-994), and 2 by a pattern of the
#: id (KIP-1152).
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
