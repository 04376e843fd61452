"""Packs a group, its timers and unfetched answers into the text of a registry node.

Rules:
- Every field is named and typed. A missing, extra or mistyped field, or another
  version, raises an error, so the state machine gets only states that it wrote.
- Waiters are texts. A node contains no pending writes: the caller completes them before
  packing.
- Committed offsets are not packed, because the log contains them.

These are pure functions. coordinators/shared_groups.py stores the node.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from logcore.coordination import group_requests
from logcore.coordination.classic_group import (
    COMPLETING,
    EMPTY,
    PREPARING,
    STABLE,
    ClassicGroupMember,
    Group,
)
from logcore.coordination.group_requests import (
    GroupError,
    HeartbeatAccepted,
    HeartbeatRefused,
    Joined,
    JoinedMember,
    JoinRefused,
    Result,
    SyncResult,
    Timeout,
)
from logcore.errors import UnsupportedRegistryError

#: Processes with different releases may share a directory. A process refuses the nodes of
#: another version, because it could not preserve their fields.
_VERSION: Final = 1
_TEXT_OR_NONE: Final = (str, type(None))
#: Names and types of the fields of a node.
_NODE: Final[Mapping[str, tuple[type, ...]]] = {
    "version": (int,),
    "boot": (str,),
    "clock_ms": (int,),
    "state": (str,),
    "state_ms": (int,),
    "generation": (int,),
    "protocol_type": (str,),
    "protocol": _TEXT_OR_NONE,
    "leader": _TEXT_OR_NONE,
    "members": (list,),
    "pending": (list,),
    "unsynced": (list,),
    "topics": (list, type(None)),
    "is_first": (bool,),
    "has_newcomer": (bool,),
    "join_timer": (dict, type(None)),
    "sync_timer": (dict, type(None)),
    "timers": (list,),
    "sessions": (dict,),
    "mail": (dict,),
}
#: Names and types of the fields of a member.
_MEMBER: Final[Mapping[str, tuple[type, ...]]] = {
    "member_id": (str,),
    "instance_id": _TEXT_OR_NONE,
    "client_id": (str,),
    "client_host": (str,),
    "rebalance_timeout_ms": (int,),
    "session_timeout_ms": (int,),
    "protocols": (list,),
    "assignment": (str,),
    "is_new": (bool,),
    "absence_ms": (int, type(None)),
    "is_absent": (bool,),
    "joining": _TEXT_OR_NONE,
    "syncing": _TEXT_OR_NONE,
    "deadline_ms": (int,),
    "timer_ms": (int, type(None)),
}
#: Names and types of the fields of an answer to a JoinGroup request.
_JOINED: Final[Mapping[str, tuple[type, ...]]] = {
    "kind": (str,),
    "generation": (int,),
    "protocol_type": (str,),
    "protocol": (str,),
    "leader": (str,),
    "member_id": (str,),
    "members": (list,),
    "skip_assignment": (bool,),
}
#: Names and types of the fields of an answer to a SyncGroup request.
_SYNCED: Final[Mapping[str, tuple[type, ...]]] = {
    "kind": (str,),
    "protocol_type": (str,),
    "protocol": _TEXT_OR_NONE,
    "assignment": (str,),
}
#: Names and types of the fields of all timeouts. A kind of timeout has some of them.
_TIMEOUT_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "kind": (str,),
    "member_id": (str,),
    "left_ms": (int,),
    "generation": (int,),
}
#: States of a group in a node. DEAD is not among them: a deleted group becomes EMPTY.
_STATES: Final = (EMPTY, PREPARING, COMPLETING, STABLE)
#: Classes of timeouts by name, the field `kind`.
_TIMEOUTS: Final = {
    kind.__name__: kind
    for kind in (
        group_requests.SessionEnds,
        group_requests.PendingEnds,
        group_requests.DelayEnds,
        group_requests.JoinEnds,
        group_requests.SyncEnds,
    )
}


@attrs.define
class GroupNode:
    """The content of a registry node of a group."""

    group: Group
    #: The boot id of the machine at the time of writing.
    boot: str
    #: Added to the monotonic clock to get the group's time.
    clock_ms: int
    #: The due time of each timer.
    timers: dict[Timeout, int] = attrs.Factory(dict[Timeout, int])
    #: Member id -> session of its process.
    sessions: dict[str, str] = attrs.Factory(dict[str, str])
    #: Waiter -> result of its request, until its process has fetched the result.
    unfetched_results: dict[str, Result] = attrs.Factory(dict[str, Result])

    def pack(self) -> bytes:
        group = self.group
        # Another process could not complete a pending write.
        assert not group.storing, "a commit is not stored yet"
        facts = {
            "version": _VERSION,
            "boot": self.boot,
            "clock_ms": self.clock_ms,
            "state": group.state,
            "state_ms": group.state_ms,
            "generation": group.generation,
            "protocol_type": group.protocol_type,
            "protocol": group.protocol,
            "leader": group.leader,
            "members": [_member(member) for member in group.members.values()],
            "pending": sorted(group.pending),
            "unsynced": sorted(group.unsynced),
            "topics": None if group.topics is None else sorted(group.topics),
            "is_first": group.is_first,
            "has_newcomer": group.has_new_member,
            "join_timer": None
            if group.join_timer is None
            else _timeout(group.join_timer),
            "sync_timer": None
            if group.sync_timer is None
            else _timeout(group.sync_timer),
            "timers": [
                [_timeout(timeout), at_ms] for timeout, at_ms in self.timers.items()
            ],
            "sessions": self.sessions,
            "mail": {
                waiter: _result(result)
                for waiter, result in self.unfetched_results.items()
            },
        }
        return json.dumps(facts, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, group_id: str, value: bytes) -> GroupNode:
        """Return the group of a node.

        Raises:
            UnsupportedRegistryError: this version does not write such a node.
        """
        try:
            facts = json.loads(value)
            if facts["version"] != _VERSION:
                raise ValueError(f"version {facts['version']!r}")
            return cls._read(group_id, facts)
        except (
            # Reading the JSON of another program can raise each of these errors.
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            RecursionError,
        ) as error:
            raise UnsupportedRegistryError(
                f"the node of group {group_id!r} cannot be read by this version: {error}",
                expected=f"the state of a group, version {_VERSION}",
                found=repr(value[:80]),
            ) from error

    @classmethod
    def _read(cls, group_id: str, facts: Mapping[str, Any]) -> GroupNode:
        # 1. The fields of the group.
        _check(facts, _NODE)
        if facts["state"] not in _STATES:
            raise ValueError(f"state {facts['state']!r}")
        for name in ("pending", "unsynced", "topics"):
            _check_all(facts[name] or (), str)
        _check_all(facts["sessions"].values(), str)
        group = Group(
            group_id,
            state=facts["state"],
            state_ms=facts["state_ms"],
            generation=facts["generation"],
            protocol_type=facts["protocol_type"],
            protocol=facts["protocol"],
            leader=facts["leader"],
            pending=set(facts["pending"]),
            unsynced=set(facts["unsynced"]),
            topics=None if facts["topics"] is None else frozenset(facts["topics"]),
            is_first=facts["is_first"],
            has_new_member=facts["has_newcomer"],
        )
        # 2. Its members.
        for row in facts["members"]:
            _check(row, _MEMBER)
            for pair in row["protocols"]:
                _check_all(pair, str)
            facts_of_member: dict[str, Any] = dict(row)
            facts_of_member["protocols"] = tuple(
                (name, _from_base64(text)) for name, text in row["protocols"]
            )
            member = ClassicGroupMember(**facts_of_member)
            member.assignment = _from_base64(row["assignment"])
            group.members[member.member_id] = member
            if member.instance_id is not None:
                # The index is not stored, so it cannot contradict the members.
                group.static[member.instance_id] = member.member_id
        # 3. Its timers.
        join_timer = _read_timeout(facts["join_timer"])
        if not isinstance(
            join_timer, group_requests.JoinEnds | group_requests.DelayEnds | None
        ):
            raise ValueError("join_timer is of another kind")
        group.join_timer = join_timer
        sync_timer = _read_timeout(facts["sync_timer"])
        if not isinstance(sync_timer, group_requests.SyncEnds | None):
            raise ValueError("sync_timer is of another kind")
        group.sync_timer = sync_timer
        _check_all((at_ms for _, at_ms in facts["timers"]), int)
        timers = {
            timeout: at_ms
            for row, at_ms in facts["timers"]
            if (timeout := _read_timeout(row)) is not None
        }
        # 4. The results that processes have not fetched.
        unfetched_results = {
            waiter: _read_result(row) for waiter, row in facts["mail"].items()
        }
        return cls(
            group,
            facts["boot"],
            facts["clock_ms"],
            timers,
            facts["sessions"],
            unfetched_results,
        )


def _check(row: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Raise ValueError unless a row has exactly these fields with these types."""
    if set(row) != set(kinds):
        raise ValueError(f"fields missing or unknown: {sorted(set(row) ^ set(kinds))}")
    for name, kind in kinds.items():
        # A bool does not count as an int here.
        if type(row[name]) not in kind:
            raise ValueError(f"{name} is {row[name]!r}")


def _check_all(values: Iterable[Any], kind: type) -> None:
    for value in values:
        if type(value) is not kind:
            raise ValueError(f"{value!r} is no {kind.__name__}")


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    # Without `validate`, characters outside the alphabet are ignored.
    return base64.b64decode(text, validate=True)


def _member(member: ClassicGroupMember) -> dict[str, Any]:
    facts = attrs.asdict(member, recurse=False)
    facts["protocols"] = [
        [name, _to_base64(metadata)] for name, metadata in member.protocols
    ]
    facts["assignment"] = _to_base64(member.assignment)
    return facts


def _timeout(timeout: Timeout) -> dict[str, Any]:
    return {"kind": type(timeout).__name__, **attrs.asdict(timeout)}


def _read_timeout(row: dict[str, Any] | None) -> Timeout | None:
    if row is None:
        return None
    _check(row, {name: kinds for name, kinds in _TIMEOUT_FIELDS.items() if name in row})
    fields: dict[str, Any] = {
        name: value for name, value in row.items() if name != "kind"
    }
    # The constructor refuses fields that its kind does not have.
    return _TIMEOUTS[row["kind"]](**fields)


def _result(result: Result) -> dict[str, Any] | None:
    match result:
        case None:
            return None
        case GroupError():
            return {"kind": "error", "error": result.name}
        case JoinRefused():
            return {
                "kind": "refused",
                "error": result.error.name,
                "member_id": result.member_id,
            }
        case SyncResult():
            facts = attrs.asdict(result)
            return {
                **facts,
                "kind": "synced",
                "assignment": _to_base64(result.assignment),
            }
        case Joined():
            members = [
                [member.member_id, member.instance_id, _to_base64(member.metadata)]
                for member in result.members
            ]
            return {
                **attrs.asdict(result, recurse=False),
                "kind": "joined",
                "members": members,
            }
        case HeartbeatAccepted() | HeartbeatRefused():
            raise AssertionError("a group of the consumer protocol has no node")


def _read_result(row: dict[str, Any] | None) -> Result:
    if row is None:
        return None
    fields: dict[str, Any] = {
        name: value for name, value in row.items() if name != "kind"
    }
    match row["kind"]:
        case "error":
            _check(row, {"kind": (str,), "error": (str,)})
            return GroupError[row["error"]]
        case "refused":
            _check(row, {"kind": (str,), "error": (str,), "member_id": (str,)})
            return JoinRefused(GroupError[row["error"]], row["member_id"])
        case "synced":
            _check(row, _SYNCED)
            fields["assignment"] = _from_base64(row["assignment"])
            return SyncResult(**fields)
        case "joined":
            _check(row, _JOINED)
            fields["members"] = tuple(
                _read_joined_member(*member) for member in row["members"]
            )
            return Joined(**fields)
        case kind:
            raise ValueError(f"an answer of kind {kind!r}")


def _read_joined_member(
    member_id: Any, instance_id: Any, metadata: Any
) -> JoinedMember:
    _check_all((member_id, metadata), str)
    if instance_id is not None:
        _check_all((instance_id,), str)
    return JoinedMember(member_id, instance_id, _from_base64(metadata))
