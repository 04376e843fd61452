"""Messages about consumer groups and their offsets, and the bytes that members
exchange.

wire/fields.py describes the rows.
"""

from __future__ import annotations

from netshim.wire.codec import api, data

#: Version 5 drops the retention time (KIP-211), 6 adds leader epochs (KIP-320), and 7
#: the instance id (KIP-345). In 9, members of the consumer protocol send their epoch as
#: generation (KIP-848).
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

#: Since version 2, null requests all partitions. 5 adds leader epochs (KIP-320), 7
#: waits for open transactions (KIP-447), 8 has several groups (KIP-709), and 9 the
#: member epoch (KIP-848).
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

#: Version 1 adds coordinators of transactions (KIP-98), 4 several keys (KIP-699), and 6
#: share groups (KIP-932).
FIND_COORDINATOR = api(
    10,
    "FindCoordinator",
    served=(0, 6),
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

#: Version 1 adds the rebalance timeout (KIP-62). In 4, a member first gets an id
#: (KIP-394). 5 adds the instance id (KIP-345), 7 the protocol type (KIP-559), 8 a
#: reason (KIP-800), and 9 lets the leader skip the assignment (KIP-814).
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

#: Version 3 adds the instance id (KIP-345).
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

#: Version 3 removes several members (KIP-345), and 5 adds a reason (KIP-800).
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

#: Version 3 adds the instance id (KIP-345), and 5 the protocol type (KIP-559).
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

#: Version 3 adds authorized operations (KIP-430), 4 the instance id (KIP-345), and 6 an
#: error for a missing group (KIP-1043).
DESCRIBE_GROUPS = api(
    15,
    "DescribeGroups",
    served=(0, 6),
    flexible=5,
    request="""
        groups                         []string
        include_authorized_operations  bool      3+
    """,
    response="""
        throttle_time_ms         int32     1+
        groups                   []Group
          error_code             int16
          error_message          string?   6+ = null
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

#: Version 4 selects groups by state (KIP-518), and 5 by type (KIP-848).
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

#: Added by KIP-229.
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

#: Added by KIP-496.
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

#: Added by KIP-848. In version 1, members make their own ids (KIP-1082), and may
#: subscribe to a pattern.
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

#: Added by KIP-848. Version 1 adds the protocol of each member (KIP-1099).
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
