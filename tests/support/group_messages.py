"""The records of `__consumer_offsets` as tables of the wire codec: a second
implementation, with which tests compare logcore.format.group_records.

Tests of the wire codec compare the tables with records that Kafka and other clients have
written.
"""

from netshim.wire.codec import Message, data

OFFSET_COMMIT_KEY = data(
    "OffsetCommitKey",
    served=(0, 1),
    flexible=None,
    fields="""
        group      string
        topic      string
        partition  int32
    """,
)

OFFSET_COMMIT_VALUE = data(
    "OffsetCommitValue",
    served=(0, 4),
    flexible=4,
    fields="""
        offset            int64
        leader_epoch      int32   3+ = -1
        metadata          string
        commit_timestamp  int64
        expire_timestamp  int64   1 = -1
        topic_id          uuid    4+ tag 0
    """,
)

GROUP_METADATA_KEY = data(
    "GroupMetadataKey",
    served=(2, 2),
    flexible=None,
    fields="""
        group  string
    """,
)

GROUP_METADATA_VALUE = data(
    "GroupMetadataValue",
    served=(0, 4),
    flexible=4,
    fields="""
        protocol_type            string
        generation               int32
        protocol                 string?
        leader                   string?
        current_state_timestamp  int64     2+ = -1
        members                  []Member
          member_id              string
          group_instance_id      string?   3+ = null
          client_id              string
          client_host            string
          rebalance_timeout      int32     1+ = -1
          session_timeout        int32
          subscription           bytes
          assignment             bytes
    """,
)

MESSAGES: tuple[Message, ...] = (
    OFFSET_COMMIT_KEY,
    OFFSET_COMMIT_VALUE,
    GROUP_METADATA_KEY,
    GROUP_METADATA_VALUE,
)
