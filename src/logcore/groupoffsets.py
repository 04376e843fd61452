"""What the records of Kafka's `__consumer_offsets` say, for people and for retention.

Layout (storage format section 12.1): key and value begin with their version, an int16. Strings have an int16 length,
in values of version 4 a varint of length + 1.

Rules:
- A record that is not understood is left as bytes; nothing is raised for it.
- Of a key the last record counts; a null value takes it back.

This module reads; netshim writes these records, and knows what groups are.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from logcore.reader import LogReader

OFFSETS_TOPIC: Final = "__consumer_offsets"
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")


class _Fields:
    """Fields one after the other. Raises ValueError, struct.error or UnicodeDecodeError where they do not fit."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return int(value)

    def taken(self, size: int) -> bytes | None:
        if size < 0:
            return None
        if size > len(self.data) - self.at:
            raise ValueError("a length is longer than what is left")
        self.at += size
        return self.data[self.at - size : self.at]

    def text(self, *, compact: bool = False) -> str | None:
        raw = self.taken(self._varint() - 1 if compact else self.number(_SHORT))
        return None if raw is None else raw.decode()

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a varint is too long")


def group_record(key: bytes | None, value: bytes | None) -> dict[str, Any] | None:
    """A record of the topic as a dict that JSON can say; None for one that is not understood.

    {"group", "topic", "partition", "committed": {"offset", "leader_epoch", "metadata", "commit_timestamp_ms",
    "expire_timestamp_ms"} or None}, or {"group", "metadata": {"protocol_type", "generation", "protocol", "leader",
    "members": [...]} or None}.
    """
    if key is None:
        return None
    try:
        fields = _Fields(key)
        version = fields.number(_SHORT)
        if version in (0, 1):
            found: dict[str, Any] = {
                "group": fields.text(),
                "topic": fields.text(),
                "partition": fields.number(_INT),
            }
            return {**found, "committed": None if value is None else _commit(_Fields(value))}
        if version == 2:
            return {"group": fields.text(), "metadata": None if value is None else _metadata(_Fields(value))}
    except (ValueError, IndexError, struct.error):
        pass
    return None


def _commit(fields: _Fields) -> dict[str, Any]:
    version = fields.number(_SHORT)
    if not 0 <= version <= 4:
        raise ValueError("unknown version of a commit")
    return {
        "offset": fields.number(_LONG),
        "leader_epoch": fields.number(_INT) if version >= 3 else -1,
        "metadata": fields.text(compact=version == 4),
        "commit_timestamp_ms": fields.number(_LONG),
        "expire_timestamp_ms": fields.number(_LONG) if version == 1 else -1,
    }


def _metadata(fields: _Fields) -> dict[str, Any]:
    version = fields.number(_SHORT)
    if not 0 <= version <= 3:
        raise ValueError("unknown version of group metadata")
    found: dict[str, Any] = {
        "protocol_type": fields.text(),
        "generation": fields.number(_INT),
        "protocol": fields.text(),
        "leader": fields.text(),
    }
    if version >= 2:
        found["current_state_timestamp_ms"] = fields.number(_LONG)
    members = []
    for _ in range(max(0, fields.number(_INT))):
        member: dict[str, Any] = {"member_id": fields.text()}
        if version >= 3:
            member["group_instance_id"] = fields.text()
        member["client_id"], member["client_host"] = fields.text(), fields.text()
        if version >= 1:
            member["rebalance_timeout_ms"] = fields.number(_INT)
        member["session_timeout_ms"] = fields.number(_INT)
        fields.taken(fields.number(_INT))  # subscription
        fields.taken(fields.number(_INT))  # assignment
        members.append(member)
    return {**found, "members": members}


def committed_offsets(log: LogReader) -> dict[tuple[str, int], dict[str, int]]:
    """(topic, partition) -> group -> committed offset, by one partition of the topic.

    What a transaction commits counts when it has committed. Raises what reading raises.
    """
    found: dict[tuple[str, int], dict[str, int]] = {}
    for record in log.read(log.log_start_offset, isolation="read_committed"):
        said = group_record(record.key, record.value)
        if said is None or "committed" not in said:
            continue
        groups = found.setdefault((said["topic"], said["partition"]), {})
        if said["committed"] is None:
            groups.pop(said["group"], None)
        else:
            groups[said["group"]] = said["committed"]["offset"]
    return found


def committed_in(logs: list[LogReader]) -> dict[tuple[str, int], dict[str, int]]:
    """The same over all partitions of the topic; those that cannot be read are an error, or groups would be missed."""
    found: dict[tuple[str, int], dict[str, int]] = {}
    for log in logs:
        for key, groups in committed_offsets(log).items():
            found.setdefault(key, {}).update(groups)
    return found
