"""Requests to a group, their results and errors, the names of timers, and the limits.

This module does not contain protocol error codes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Hashable, Mapping

import attrs

from logcore.format.consumer_group_records import Partitions
from logcore.format.group_settings import HEARTBEAT_INTERVAL, SESSION_TIMEOUT

#: The caller's handle of a request. The Reply contains it. It is compared for identity
#: only.
Waiter = Hashable
OffsetKey = tuple[str, int]  # topic, partition


class GroupError(enum.Enum):
    """The reason why a request failed. The names are Kafka's."""

    # The stored state cannot be read or written: try again.
    COORDINATOR_NOT_AVAILABLE = enum.auto()
    # This coordinator is stopping, its groups were deleted, or another broker has them.
    NOT_COORDINATOR = enum.auto()
    # The coordinator reads the stored groups: try again.
    COORDINATOR_LOAD_IN_PROGRESS = enum.auto()
    INVALID_GROUP_ID = enum.auto()
    INVALID_REQUEST = enum.auto()
    INVALID_SESSION_TIMEOUT = enum.auto()
    GROUP_ID_NOT_FOUND = enum.auto()
    GROUP_MAX_SIZE_REACHED = enum.auto()
    NON_EMPTY_GROUP = enum.auto()
    INCONSISTENT_GROUP_PROTOCOL = enum.auto()
    UNKNOWN_MEMBER_ID = enum.auto()
    # Join again with the id in the response.
    MEMBER_ID_REQUIRED = enum.auto()
    FENCED_INSTANCE_ID = enum.auto()
    ILLEGAL_GENERATION = enum.auto()
    REBALANCE_IN_PROGRESS = enum.auto()
    # The data does not fit in one record, so a retry fails too.
    RECORD_TOO_LARGE = enum.auto()
    # For the consumer protocol.
    # The member must give up its partitions and join again.
    FENCED_MEMBER_EPOCH = enum.auto()
    # For commits and fetches of offsets: the member retries after its next heartbeat.
    STALE_MEMBER_EPOCH = enum.auto()
    # A member that has not left uses this instance id.
    UNRELEASED_INSTANCE_ID = enum.auto()
    UNSUPPORTED_ASSIGNOR = enum.auto()
    INVALID_REGULAR_EXPRESSION = enum.auto()
    # A member of the consumer protocol sent a request of the classic protocol.
    UNSUPPORTED_VERSION = enum.auto()


def check_member(
    members: Container[str],
    static: Mapping[str, str],
    member_id: str,
    instance_id: str | None,
) -> GroupError | None:
    """Check the two ids of a request that does not join.

    `static` maps the instance ids of static members to their current member ids. A
    process is fenced if a newer process uses the same instance id.
    """
    if instance_id is not None:
        present = static.get(instance_id)
        if present is None:
            return GroupError.UNKNOWN_MEMBER_ID
        if present != member_id:
            return GroupError.FENCED_INSTANCE_ID
    if member_id in members:
        return None
    return GroupError.UNKNOWN_MEMBER_ID


def _sees_all(topic: str) -> bool:
    """Allow every topic. This is the default without access control."""
    return True


# -- requests and their results --------------------------------------------------------


@attrs.frozen(kw_only=True)
class Join:
    """A request to be a member of the next generation."""

    group_id: str
    #: "" if the member has no id yet.
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    session_timeout_ms: int
    #: -1 if it equals the session timeout.
    rebalance_timeout_ms: int
    #: True if a dynamic member first gets its id in an error and joins again with it. A
    #: lost response then leaves no unused member in the group.
    requires_member_id: bool
    #: True if the client supports a response in which the member is the leader but must
    #: not assign.
    may_skip_assignment: bool
    #: How long a static member that sends no heartbeats remains in the group after
    #: absent() has reported it. None if the session timeout applies.
    absence_ms: int | None = None


@attrs.frozen(kw_only=True)
class Sync:
    """A member's request for its assignment.

    The leader's request contains the assignments of all members.
    """

    group_id: str
    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: Mapping[str, bytes] = attrs.Factory(dict[str, bytes])
    #: Whether the sender may see a topic. A group of the consumer protocol leaves
    #: other topics out of the assignment that it sends.
    may_see: Callable[[str], bool] = attrs.field(default=_sees_all, eq=False)


@attrs.frozen
class Committer:
    """The identity of the sender of a commit."""

    group_id: str
    #: -1 if the sender is not a member. The member epoch in the consumer protocol.
    generation: int
    member_id: str
    instance_id: str | None
    #: Whether this version of the request can contain a member epoch.
    can_contain_epoch: bool = False
    #: Whether the member leaves with this commit, so that it does not retry. Set only
    #: in this process; Kafka's protocol has no such field.
    is_leaving: bool = False

    @property
    def is_member(self) -> bool:
        """Whether the sender claims to be a member."""
        return (
            self.generation >= 0 or bool(self.member_id) or self.instance_id is not None
        )


@attrs.frozen
class JoinedMember:
    member_id: str
    instance_id: str | None
    metadata: bytes


@attrs.frozen(kw_only=True)
class Joined:
    """The generation that a member belongs to."""

    generation: int
    protocol_type: str
    protocol: str
    leader: str
    member_id: str
    #: All members if the receiver is the leader, else empty.
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


@attrs.frozen
class JoinRefused:
    """The error that ends a Join."""

    error: GroupError
    #: The id to join with after MEMBER_ID_REQUIRED, else the id that was refused.
    member_id: str


@attrs.frozen(kw_only=True)
class SyncResult:
    protocol_type: str
    protocol: str | None
    assignment: bytes


@attrs.frozen(kw_only=True)
class ConsumerHeartbeat:
    """A heartbeat of the consumer protocol.

    None means that a value has not changed. The timeout uses -1 instead.
    """

    group_id: str
    member_id: str
    #: 0 to join, -1 to leave, -2 if a static member leaves temporarily.
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topic_names: tuple[str, ...] | None = None
    pattern: str | None = None
    assignor: str | None = None
    #: The partitions that the member reports as its own.
    owned: Partitions | None = None
    #: Whether the member may see a topic. Its pattern matches no other topics.
    may_see: Callable[[str], bool] = attrs.field(default=_sees_all, eq=False)


@attrs.frozen(kw_only=True)
class HeartbeatAccepted:
    """The answer to a heartbeat."""

    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int
    #: All partitions that the member may use. None if they have not changed.
    assigned: Partitions | None = None


@attrs.frozen
class HeartbeatRefused:
    """The error that ends a heartbeat."""

    error: GroupError
    #: An explanation for the log of the client.
    text: str


#: The outcome of a request; None for success without data.
Result = (
    Joined
    | JoinRefused
    | SyncResult
    | HeartbeatAccepted
    | HeartbeatRefused
    | GroupError
    | None
)


# -- timers ----------------------------------------------------------------------------


@attrs.frozen
class SessionEnds:
    """The session of a member expires, unless a heartbeat has renewed it."""

    member_id: str


@attrs.frozen
class PendingEnds:
    """A member has not joined in time with the id in the coordinator's response."""

    member_id: str


@attrs.frozen
class DelayEnds:
    """The delay ends in which the first members of a group wait for others."""

    #: Remaining time to wait if further members joined during the delay.
    left_ms: int


@attrs.frozen
class JoinEnds:
    """The coordinator stops waiting for members that have not rejoined."""


@attrs.frozen
class SyncEnds:
    """The coordinator stops waiting for Sync requests of members of this generation."""

    generation: int


@attrs.frozen
class RevocationEnds:
    """A member of the consumer protocol has not confirmed its revocations in time."""

    member_id: str


@attrs.frozen
class RejoinEnds:
    """A classic member of a consumer group was asked to rejoin and has not done so."""

    member_id: str


@attrs.frozen
class FirstSyncEnds:
    """A classic member of a consumer group has joined, but has sent no Sync request."""

    member_id: str


Timeout = (
    SessionEnds
    | PendingEnds
    | DelayEnds
    | JoinEnds
    | SyncEnds
    | RevocationEnds
    | RejoinEnds
    | FirstSyncEnds
)


# -- limits ----------------------------------------------------------------------------


def _no_own_settings(_: str) -> Mapping[str, int]:
    """Return no settings. This is the default if groups have no own settings."""
    return {}


@attrs.frozen(kw_only=True)
class Rules:
    """Limits and delays, named after Kafka's settings."""

    min_session_timeout_ms: int
    max_session_timeout_ms: int
    group_max_size: int = 2**31 - 1
    #: How long the first members of a group wait for others.
    rebalance_delay_ms: int = 0
    #: The consumer_ fields are for groups of the consumer protocol. The coordinator
    #: sends the two times to the members.
    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    consumer_max_size: int = 2**31 - 1
    #: Maximum size of the data of one member: the protocols that it offers, and its
    #: assignment.
    member_max_bytes: int = 1 << 20
    #: Maximum size of this data for all members of a group.
    members_max_bytes: int = 16 << 20
    #: Whether a group with members may change from the classic to the consumer
    #: protocol.
    may_upgrade: bool = False
    #: Whether a group with members may change back to the classic protocol.
    may_downgrade: bool = False
    #: Return a group's own settings by Kafka's names, given its id.
    own_settings: Callable[[str], Mapping[str, int]] = _no_own_settings

    def session_timeout_ms_of(self, group_id: str) -> int:
        """Return the session timeout of consumer-protocol members of this group."""
        return self.own_settings(group_id).get(
            SESSION_TIMEOUT, self.consumer_session_timeout_ms
        )

    def heartbeat_interval_ms_of(self, group_id: str) -> int:
        """Return the heartbeat interval of consumer-protocol members of this group.

        If the configured interval is not shorter than the session, the interval is a
        third of the session.
        """
        own = self.own_settings(group_id)
        interval_ms = own.get(HEARTBEAT_INTERVAL, self.consumer_heartbeat_interval_ms)
        session_ms = self.session_timeout_ms_of(group_id)
        if interval_ms < session_ms:
            return interval_ms
        return session_ms // 3

    @property
    def may_mix(self) -> bool:
        """Whether one group may contain members of both protocols."""
        return self.may_upgrade or self.may_downgrade
