"""Decode the records of `__cluster_metadata`, the log of a KRaft quorum.

A value is a frame version, the number of a type and its version, each a varint, and the
fields of the type. All types are flexible: lengths are varints of length + 1, and tagged
fields end each struct. The control records of the quorum have the same fields without a
frame.

Rules:
- Dicts have the form of Kafka's own dump tool: names in camel case, UUIDs and bytes in
  base64.
- A record of an unknown type or with an invalid layout reads as None, without an error.

This module reads no log, and writes no records.
"""

from __future__ import annotations

import base64
import functools
import re
import struct
from typing import Any, Final

import attrs

from logcore.errors import InvalidRecordError
from logcore.format.varint import FieldReader

#: A row for each field: name, type, `?` if it may be null, first version if it is not 0,
#: and `tag N` for a tagged field. Rows of a struct's fields are indented.
_TABLE: Final = """
0 RegisterBrokerRecord
 brokerId int32
 isMigratingZkBroker bool 2
 incarnationId uuid
 brokerEpoch int64
 endPoints []
  name string
  host string
  port uint16
  securityProtocol int16
 features []
  name string
  minSupportedVersion int16
  maxSupportedVersion int16
 rack string?
 fenced bool
 inControlledShutdown bool 1
 logDirs []uuid 3 tag 0
1 UnregisterBrokerRecord
 brokerId int32
 brokerEpoch int64
2 TopicRecord
 name string
 topicId uuid
3 PartitionRecord
 partitionId int32
 topicId uuid
 replicas []int32
 isr []int32
 removingReplicas []int32
 addingReplicas []int32
 leader int32
 leaderRecoveryState int8 tag 0
 leaderEpoch int32
 partitionEpoch int32
 directories []uuid 1
 eligibleLeaderReplicas []int32? 2 tag 1
 lastKnownElr []int32? 2 tag 2
4 ConfigRecord
 resourceType int8
 resourceName string
 name string
 value string?
5 PartitionChangeRecord
 partitionId int32
 topicId uuid
 isr []int32? tag 0
 leader int32 tag 1
 replicas []int32? tag 2
 removingReplicas []int32? tag 3
 addingReplicas []int32? tag 4
 leaderRecoveryState int8 tag 5
 directories []uuid? 1 tag 8
 eligibleLeaderReplicas []int32? 2 tag 6
 lastKnownElr []int32? 2 tag 7
7 FenceBrokerRecord
 id int32
 epoch int64
8 UnfenceBrokerRecord
 id int32
 epoch int64
9 RemoveTopicRecord
 topicId uuid
10 DelegationTokenRecord
 owner string
 requester string
 renewers []string
 issueTimestamp int64
 maxTimestamp int64
 expirationTimestamp int64
 tokenId string
11 UserScramCredentialRecord
 name string
 mechanism int8
 salt bytes
 storedKey bytes
 serverKey bytes
 iterations int32
12 FeatureLevelRecord
 name string
 featureLevel int16
14 ClientQuotaRecord
 entity []
  entityType string
  entityName string?
 key string
 value float64
 remove bool
15 ProducerIdsRecord
 brokerId int32
 brokerEpoch int64
 nextProducerId int64
17 BrokerRegistrationChangeRecord
 brokerId int32
 brokerEpoch int64
 fenced int8 tag 0
 inControlledShutdown int8 1 tag 1
 logDirs []uuid 2 tag 2
18 AccessControlEntryRecord
 id uuid
 resourceType int8
 resourceName string
 patternType int8
 principal string
 host string
 operation int8
 permissionType int8
19 RemoveAccessControlEntryRecord
 id uuid
20 NoOpRecord
21 ZkMigrationStateRecord
 zkMigrationState int8
22 RemoveUserScramCredentialRecord
 name string
 mechanism int8
23 BeginTransactionRecord
 name string? tag 0
24 EndTransactionRecord
25 AbortTransactionRecord
 reason string? tag 0
26 RemoveDelegationTokenRecord
 tokenId string
27 RegisterControllerRecord
 controllerId int32
 incarnationId uuid
 zkMigrationReady bool
 endPoints []
  name string
  host string
  port uint16
  securityProtocol int16
 features []
  name string
  minSupportedVersion int16
  maxSupportedVersion int16
28 ClearElrRecord
 topicName string
102 LeaderChange
 version int16
 leaderId int32
 voters []
  voterId int32
  voterDirectoryId uuid 1
 grantingVoters []
  voterId int32
  voterDirectoryId uuid 1
103 SnapshotHeader
 version int16
 lastContainedLogTimestamp int64
104 SnapshotFooter
 version int16
105 KRaftVersion
 version int16
 kRaftVersion int16
106 KRaftVoters
 version int16
 voters []
  voterId int32
  voterDirectoryId uuid
  endpoints []
   name string
   host string
   port uint16
  kRaftVersionFeature {}
   minSupportedVersion int16
   maxSupportedVersion int16
"""
#: The number of a control record in the table is this number plus the record's type.
_CONTROL: Final = 100
_FRAME_VERSION: Final = 1
_NUMBERS: Final = {
    "bool": struct.Struct(">?"),
    "int8": struct.Struct(">b"),
    "int16": struct.Struct(">h"),
    "uint16": struct.Struct(">H"),
    "int32": struct.Struct(">i"),
    "int64": struct.Struct(">q"),
    "float64": struct.Struct(">d"),
}
_UUID_BYTES: Final = 16
_DECODE_ERRORS: Final = (ValueError, IndexError, struct.error, InvalidRecordError)
_ROW: Final = re.compile(r"( +)(\w+) (\S+?)\??(?: (\d+))?(?: tag (\d+))?")


@attrs.frozen
class _MetadataField:
    """A field of a type."""

    name: str
    type: str
    first_version: int
    tag: int | None
    inner: list[_MetadataField] = attrs.Factory(list)


@functools.cache
def _types() -> dict[int, tuple[str, list[_MetadataField]]]:
    """Return the name and the fields of each type, by the number of the type."""
    found: dict[int, tuple[str, list[_MetadataField]]] = {}
    levels: list[list[_MetadataField]] = []
    for line in _TABLE.strip().splitlines():
        row = _ROW.fullmatch(line)
        if row is None:
            number, name = line.split()
            levels = [[]]
            found[int(number)] = name, levels[0]
            continue
        indent, name, kind, first, tag = row.groups()
        field = _MetadataField(
            name, kind, int(first or 0), None if tag is None else int(tag)
        )
        levels = levels[: len(indent)]
        levels[-1].append(field)
        levels.append(field.inner)
    return found


def describe_metadata(value: bytes | None) -> dict[str, Any] | None:
    """Return a record as a dict for JSON, or None if its type or layout is unknown.

    {"type": such as "TOPIC_RECORD", "version", "data": the fields by name}.
    """
    try:
        fields = _MetadataBytes(value or b"")
        frame, number, version = (fields.varint() for _ in range(3))
        if frame != _FRAME_VERSION or number not in _types() or number >= _CONTROL:
            return None
        name, rows = _types()[number]
        data = fields.struct(rows, version)
    except _DECODE_ERRORS:
        return None
    return {
        "type": re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper(),
        "version": version,
        "data": data,
    }


def describe_control(kind: int, value: bytes | None) -> dict[str, Any] | None:
    """Return a control record of the quorum as a dict, or None for other control records.

    `kind` is the number of the record's type, at least 2. The dict has the name of the
    type and the fields, such as {"type": "LeaderChange", "data": {...}}.
    """
    if _CONTROL + kind not in _types():
        return None
    name, rows = _types()[_CONTROL + kind]
    try:
        fields = _MetadataBytes(value or b"")
        (version,) = _NUMBERS["int16"].unpack_from(value or b"")
        return {"type": name, "data": fields.struct(rows, version)}
    except _DECODE_ERRORS:
        return None


class _MetadataBytes(FieldReader):
    """Decodes a record. Invalid bytes raise one of _DECODE_ERRORS."""

    def struct(self, rows: list[_MetadataField], version: int) -> dict[str, Any]:
        """Decode a struct. A tagged field that was not written has no key."""
        values: dict[str, Any] = {}
        for row in rows:
            if row.tag is None and row.first_version <= version:
                values[row.name] = self._value(row, row.type, version)
        tagged = {row.tag: row for row in rows if row.tag is not None}
        for _ in range(self.varint()):
            tag, size = self.varint(), self.varint()
            end = self.at + size
            if end > len(self.data):
                raise ValueError(f"expected {size} bytes at {self.at}")
            if tag in tagged:
                row = tagged[tag]
                values[row.name] = self._value(row, row.type, version)
            self.at = end
        return values

    def _value(self, row: _MetadataField, kind: str, version: int) -> Any:
        if kind == "{}":
            return self.struct(row.inner, version)
        if kind.startswith("[]"):
            count = self.varint() - 1
            if count > len(self.data):
                raise ValueError(f"expected at most {len(self.data)} elements")
            if count < 0:
                return None
            inner = kind.removeprefix("[]") or "{}"
            return [self._value(row, inner, version) for _ in range(count)]
        if kind == "uuid":
            return _base64(self.read_bytes(_UUID_BYTES))
        if kind in ("string", "bytes"):
            size = self.varint() - 1
            if size < 0:
                return None
            data = self.read_bytes(size)
            return (
                str(data, "utf-8")
                if kind == "string"
                else base64.b64encode(data).decode()
            )
        number = _NUMBERS[kind]
        return number.unpack(self.read_bytes(number.size))[0]


def _base64(uuid: bytes) -> str:
    """Return a UUID as Kafka writes it: 22 characters that are safe in URLs."""
    return base64.urlsafe_b64encode(uuid).decode().rstrip("=")
