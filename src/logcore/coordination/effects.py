"""The effects that a transition asks for, and the values of requests and results. No codes of any protocol.

An effect is one of
    Reply      a request ends: answer its client
    Store      append records to the group's partition of `__consumer_offsets`; then tell Coordinator.stored()
    At, Cancel a timer: at its time, tell Coordinator.timed_out(). A timer of the same name is replaced
    an event   something a person may want to read about

Effects are carried out in their order, and those of one transition before those of the next.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

import attrs

from logcore.format.consumergrouprecords import Partitions
from logcore.format.grouprecords import Committed, GroupRecord
from logcore.format.groupsettings import HEARTBEAT_INTERVAL, SESSION_TIMEOUT

if TYPE_CHECKING:
    from logcore.coordination.group import Group, Member

#: What the caller knows a request by. It comes back in the Reply, and is compared for identity only.
Waiter = Hashable
OffsetKey = tuple[str, int]  # topic, partition


class GroupError(enum.Enum):
    """Why a request fails. The names are Kafka's."""

    COORDINATOR_NOT_AVAILABLE = enum.auto()  # what is stored cannot be read or written: try again
    NOT_COORDINATOR = enum.auto()  # this one is stopping, or its groups are gone
    INVALID_GROUP_ID = enum.auto()
    INVALID_REQUEST = enum.auto()
    INVALID_SESSION_TIMEOUT = enum.auto()
    GROUP_ID_NOT_FOUND = enum.auto()
    GROUP_MAX_SIZE_REACHED = enum.auto()
    NON_EMPTY_GROUP = enum.auto()
    INCONSISTENT_GROUP_PROTOCOL = enum.auto()
    UNKNOWN_MEMBER_ID = enum.auto()
    MEMBER_ID_REQUIRED = enum.auto()  # join again, with the id that comes along
    FENCED_INSTANCE_ID = enum.auto()
    ILLEGAL_GENERATION = enum.auto()
    REBALANCE_IN_PROGRESS = enum.auto()
    RECORD_TOO_LARGE = enum.auto()  # no record can hold it: it is not worth trying again
    # of the consumer protocol
    FENCED_MEMBER_EPOCH = enum.auto()  # the member gives up what it has and joins again
    STALE_MEMBER_EPOCH = enum.auto()  # a commit or fetch of offsets: the member asks again after its next heartbeat
    UNRELEASED_INSTANCE_ID = enum.auto()  # a member that has not left is that instance
    UNSUPPORTED_ASSIGNOR = enum.auto()
    INVALID_REGULAR_EXPRESSION = enum.auto()
    UNSUPPORTED_VERSION = enum.auto()  # a member of the consumer protocol asks in words of the classic one


# -- requests and their results --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Join:
    """A member wants to be in the next generation. member_id: "" when it has none yet.

    rebalance_timeout_ms: -1 for the session's. takes_id_first: a dynamic member is told its id by an error and joins
    again with it, so that a lost response leaves no member behind. may_skip_assignment: the member understands that it
    leads and need not assign. absence_ms: of a static member that sends no heartbeats, how long it keeps its place once
    absent() has told that it is gone; None for one whose session says that.
    """

    group_id: str
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    takes_id_first: bool
    may_skip_assignment: bool
    absence_ms: int | None = None


@attrs.frozen(kw_only=True)
class Sync:
    """A member of a generation asks what it is assigned. The leader brings the assignments of all."""

    group_id: str
    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: Mapping[str, bytes] = attrs.Factory(dict[str, bytes])


@attrs.frozen
class Committer:
    """Who commits. generation: -1 for one that is no member; of a member of the consumer protocol, its epoch.

    knows_epochs: whether the request is one that can name an epoch. is_leaving: whether it leaves with this commit, and
    so does not ask again; said in this process, never in Kafka's protocol.
    """

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None
    knows_epochs: bool = False
    is_leaving: bool = False

    @property
    def is_member(self) -> bool:
        """Whether it says that it is one."""
        return self.generation >= 0 or bool(self.member_id) or self.instance_id is not None


@attrs.frozen
class JoinedMember:
    member_id: str
    instance_id: str | None
    metadata: bytes


@attrs.frozen(kw_only=True)
class Joined:
    """The generation a member is in. members: of all, for the leader; empty for others."""

    generation: int
    protocol_type: str
    protocol: str
    leader: str
    member_id: str
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


@attrs.frozen
class JoinRefused:
    """member_id: to join with again after MEMBER_ID_REQUIRED, else the one that was refused."""

    error: GroupError
    member_id: str


@attrs.frozen(kw_only=True)
class Synced:
    protocol_type: str
    protocol: str | None
    assignment: bytes


@attrs.frozen(kw_only=True)
class Beat:
    """A heartbeat of the consumer protocol. None, and -1 for the timeout, stand for "as before".

    member_epoch: 0 to join, -1 to leave, -2 for a static member that means to come back. owned: what the member still
    has, by its own account.
    """

    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topic_names: tuple[str, ...] | None = None
    pattern: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None


@attrs.frozen(kw_only=True)
class Beaten:
    """What a heartbeat is told. assigned: all that the member may use; None for "as before"."""

    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int
    assigned: Partitions | None = None


@attrs.frozen
class BeatRefused:
    """text: for a person."""

    error: GroupError
    text: str


#: How a request ends; None for success with nothing to tell.
Result = Joined | JoinRefused | Synced | Beaten | BeatRefused | GroupError | None


# -- timers ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class SessionEnds:
    """A member has been silent, if it was not heard in the meantime."""

    member_id: str


@attrs.frozen
class PendingEnds:
    """A member never came back with the id it was given."""

    member_id: str


@attrs.frozen
class DelayEnds:
    """The first members of a group have waited for others. left_ms: how much longer they may wait if others came."""

    left_ms: int


@attrs.frozen
class JoinEnds:
    """Members that have not rejoined are not waited for any longer."""


@attrs.frozen
class SyncEnds:
    """Members of this generation that have not asked for their assignment are not waited for any longer."""

    generation: int


@attrs.frozen
class RevocationEnds:
    """A member of the consumer protocol has not said that it gave up what it must give up."""

    member_id: str


@attrs.frozen
class RejoinEnds:
    """A member of the classic protocol in a consumer group was told to join again, and has not."""

    member_id: str


@attrs.frozen
class FirstSyncEnds:
    """Such a member has joined, and has not asked for its assignment."""

    member_id: str


Timeout = SessionEnds | PendingEnds | DelayEnds | JoinEnds | SyncEnds | RevocationEnds | RejoinEnds | FirstSyncEnds


# -- what becomes true once records are on disk ----------------------------------------------------------------------


@attrs.frozen
class Assigned:
    """The leader's assignment, of this generation."""

    generation: int
    assignments: Mapping[str, bytes]


@attrs.frozen(eq=False)
class Replaced:
    """A static member came back: `new` in the place of `old`. leader_before: as it was when `new` joined."""

    old: Member
    new: Member
    waiter: Waiter
    generation: int
    leader_before: str | None
    may_skip_assignment: bool


@attrs.frozen
class OffsetsCommitted:
    """order: the place of the records among those of their group, see Group.order."""

    offsets: Mapping[OffsetKey, Committed]
    waiter: Waiter
    order: int


@attrs.frozen
class OffsetsPending:
    """Offsets that a transaction commits, or does not, when it ends."""

    producer_id: int
    offsets: Mapping[OffsetKey, Committed]
    waiter: Waiter
    order: int


@attrs.frozen
class OffsetsDeleted:
    """One batch of a deletion. order: of the whole deletion, as in OffsetsCommitted. waiter: None when no request
    waits. is_last: whether no batch of the deletion follows.
    """

    keys: tuple[OffsetKey, ...]
    waiter: Waiter | None
    order: int
    is_last: bool


@attrs.frozen
class GroupDeleted:
    """The last batch of a group's deletion. waiter, order: as in OffsetsDeleted. keys: of the offsets in this batch."""

    waiter: Waiter | None
    order: int
    keys: tuple[OffsetKey, ...]


@attrs.frozen
class ConsumersChanged:
    """What some steps of a consumer group wrote; what they are answered with is in the group."""


Pending = Assigned | Replaced | OffsetsCommitted | OffsetsPending | OffsetsDeleted | GroupDeleted | ConsumersChanged


# -- effects ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Reply:
    waiter: Waiter
    result: Result


@attrs.frozen(eq=False)
class Store:
    """then: what becomes true once the records are on disk, None when no request waits for them. producer: id and epoch
    of the producer whose transaction they belong to.
    """

    group: Group
    records: tuple[GroupRecord, ...]
    then: Pending | None = None
    producer: tuple[int, int] | None = None


@attrs.frozen
class At:
    group: Group
    timeout: Timeout
    at_ms: int


@attrs.frozen
class Cancel:
    group: Group
    timeout: Timeout


@attrs.frozen(kw_only=True)
class TargetsChanged:
    """The coordinator has decided which member of a consumer group is to have what. epoch: of the group."""

    group_id: str
    epoch: int
    member_count: int
    assignor: str


@attrs.frozen
class RevocationEnded:
    """A member did not give up in time what it had to, and is removed."""

    group_id: str
    member_id: str


@attrs.frozen
class LateMemberRemoved:
    """A member of the classic protocol in a consumer group did not join again, or ask for its assignment, in time."""

    group_id: str
    member_id: str


@attrs.frozen
class GroupConverted:
    """A group with members goes on by another protocol. to: "consumer" or "classic"."""

    group_id: str
    to: str


@attrs.frozen(kw_only=True)
class GroupFormed:
    group_id: str
    generation: int
    member_count: int
    protocol: str | None


@attrs.frozen
class GroupRebalances:
    group_id: str


@attrs.frozen
class GroupEmptied:
    group_id: str


@attrs.frozen
class SessionEnded:
    group_id: str
    member_id: str


Event = (
    GroupFormed
    | GroupRebalances
    | GroupEmptied
    | SessionEnded
    | TargetsChanged
    | RevocationEnded
    | LateMemberRemoved
    | GroupConverted
)
Effect = Reply | Store | At | Cancel | Event


def _nothing_set(_: str) -> Mapping[str, int]:
    """The own settings of groups where no host keeps any."""
    return {}


@attrs.frozen(kw_only=True)
class Rules:
    """Limits and delays, by the names of Kafka's settings.

    rebalance_delay_ms: how long the first members of a group wait for others. consumer_...: of groups of the consumer
    protocol, whose members are told these times by the coordinator; own_settings(group id) gives those that a group has
    of its own, by Kafka's names. may_upgrade, may_downgrade: whether a group with
    members goes from the classic protocol to that one, and back. member_max_bytes, members_max_bytes: of what a member
    says of itself in the protocols it offers, or is assigned by its leader; and of all members of a group.
    """

    min_session_timeout_ms: int
    max_session_timeout_ms: int
    group_max_size: int = 2**31 - 1
    rebalance_delay_ms: int = 0
    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    consumer_max_size: int = 2**31 - 1
    member_max_bytes: int = 1 << 20
    members_max_bytes: int = 16 << 20
    may_upgrade: bool = False
    may_downgrade: bool = False
    own_settings: Callable[[str], Mapping[str, int]] = _nothing_set

    def session_timeout_ms_of(self, group_id: str) -> int:
        """Of members of the consumer protocol in this group."""
        return self.own_settings(group_id).get(SESSION_TIMEOUT, self.consumer_session_timeout_ms)

    def heartbeat_interval_ms_of(self, group_id: str) -> int:
        """How often they send heartbeats; three times in a session where what is set would be longer than that."""
        own = self.own_settings(group_id)
        interval_ms = own.get(HEARTBEAT_INTERVAL, self.consumer_heartbeat_interval_ms)
        session_ms = self.session_timeout_ms_of(group_id)
        if interval_ms < session_ms:
            return interval_ms
        return session_ms // 3

    @property
    def may_mix(self) -> bool:
        """Whether members of both protocols may be in one group."""
        return self.may_upgrade or self.may_downgrade
