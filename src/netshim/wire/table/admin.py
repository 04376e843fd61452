"""Messages of admin clients about topics and settings.

wire/fields.py describes the rows.
"""

from __future__ import annotations

from netshim.wire.codec import api

#: Since version 4, -1 requests the default number of partitions and replicas (KIP-464).
#: 5 returns the settings of the topic (KIP-525), and 7 its id (KIP-516).
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

#: Version 5 adds error messages, and 6 topic ids (KIP-516).
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

#: Version 1 adds the sources of a value (KIP-226), and 3 its type and documentation
#: (KIP-569).
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

#: The older request, which resets all settings that it does not name. KIP-339 replaced
#: it.
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

#: Added by KIP-195.
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

#: Added by KIP-339.
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

#: Version 0 lists only resources of client metrics (KIP-714), and 1 other types too
#: (KIP-1142).
LIST_CONFIG_RESOURCES = api(
    74,
    "ListConfigResources",
    served=(0, 1),
    flexible=0,
    request="""
        resource_types  []int8  1+
    """,
    response="""
        throttle_time_ms  int32
        error_code        int16
        config_resources  []Resource
          resource_name   string
          resource_type   int8        1+ = 16
    """,
)
