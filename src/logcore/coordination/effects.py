"""Effects that a state transition of a group requests.

An effect is one of
    Reply: a request ends; answer its client.
    AppendRecords: append records to the group's partition of `__consumer_offsets`,
        then call Coordinator.stored().
    SetTimer, CancelTimer: set or cancel a timer. When the timer expires, call
        Coordinator.timed_out(). A new timer replaces one with the same name.
    Event: a change of the group; report it to the operator.

Effects are carried out in their order, and all effects of one transition before the
next transition.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from logcore.coordination.classic_group import ClassicGroupMember, Group
from logcore.coordination.group_requests import OffsetKey, Result, Timeout, Waiter
from logcore.format.group_records import Committed, GroupRecord

# -- changes that take effect once records are durable ---------------------------------


@attrs.frozen
class Assigned:
    """The leader's assignments for this generation."""

    generation: int
    assignments: Mapping[str, bytes]


@attrs.frozen(eq=False)
class Replaced:
    """A static member has joined again: `new` replaces `old`."""

    old: ClassicGroupMember
    new: ClassicGroupMember
    waiter: Waiter
    generation: int
    #: The leader at the time when `new` joined.
    previous_leader: str | None
    may_skip_assignment: bool


@attrs.frozen
class OffsetsCommitted:
    """Offsets of an ordinary commit."""

    offsets: Mapping[OffsetKey, Committed]
    waiter: Waiter
    #: The position of the records among the records of their group, see Group.order.
    order: int


@attrs.frozen
class OffsetsPending:
    """Offsets that take effect if a transaction commits."""

    producer_id: int
    offsets: Mapping[OffsetKey, Committed]
    waiter: Waiter
    order: int


@attrs.frozen
class OffsetsDeleted:
    """One batch of a deletion of offsets."""

    keys: tuple[OffsetKey, ...]
    #: None if no request waits for the deletion.
    waiter: Waiter | None
    #: The order of the whole deletion, like OffsetsCommitted.order.
    order: int
    #: Whether this is the last batch of the deletion.
    is_last: bool


@attrs.frozen
class GroupDeleted:
    """The last batch of a group's deletion."""

    #: See OffsetsDeleted.
    waiter: Waiter | None
    order: int
    #: The offsets that this batch deletes.
    keys: tuple[OffsetKey, ...]


@attrs.frozen
class ConsumersChanged:
    """Changes of a consumer group, in ConsumerGroup.storing."""


Pending = (
    Assigned
    | Replaced
    | OffsetsCommitted
    | OffsetsPending
    | OffsetsDeleted
    | GroupDeleted
    | ConsumersChanged
)


# -- effects ---------------------------------------------------------------------------


@attrs.frozen
class Reply:
    waiter: Waiter
    result: Result


@attrs.frozen(eq=False)
class AppendRecords:
    """Append these records."""

    group: Group
    records: tuple[GroupRecord, ...]
    #: The change that takes effect once the records are durable. None if no request
    #: waits for the records.
    then: Pending | None = None
    #: Id and epoch of the producer whose transaction the records belong to.
    producer: tuple[int, int] | None = None


@attrs.frozen
class SetTimer:
    group_id: str
    timeout: Timeout
    at_ms: int


@attrs.frozen
class CancelTimer:
    group_id: str
    timeout: Timeout


@attrs.frozen(kw_only=True)
class TargetsChanged:
    """The coordinator has computed new target assignments for a consumer group."""

    group_id: str
    #: The group epoch of the targets.
    epoch: int
    member_count: int
    assignor: str


@attrs.frozen
class RevocationEnded:
    """A member was removed because it did not give up its partitions in time."""

    group_id: str
    member_id: str


@attrs.frozen
class LateMemberRemoved:
    """A classic member of a consumer group was removed.

    The member did not rejoin, or did not send its Sync request, in time.
    """

    group_id: str
    member_id: str


@attrs.frozen
class GroupConverted:
    """A group with members changed its protocol."""

    group_id: str
    #: "consumer" or "classic".
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
Effect = Reply | AppendRecords | SetTimer | CancelTimer | Event
