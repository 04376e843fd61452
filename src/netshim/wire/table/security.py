"""Messages about authentication, access control lists and quotas.

wire/fields.py describes the rows.
"""

from __future__ import annotations

from netshim.wire.codec import api

#: After version 0, the client sends the tokens of SASL without a header. After 1, it
#: sends them by SaslAuthenticate (KIP-152).
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

#: Version 1 adds prefixed patterns (KIP-290), and 3 users as resources (KIP-373).
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

#: Its versions add the same fields as those of DescribeAcls.
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

#: Its versions add the same fields as those of DescribeAcls.
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

#: Added by KIP-152. Version 1 adds the lifetime of the session (KIP-368).
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

#: Added by KIP-546.
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

#: Added by KIP-546.
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

#: Added by KIP-554. The response has no secret, only the mechanism and its iterations.
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

#: Added by KIP-554. The client sends the salted password, never the password.
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
