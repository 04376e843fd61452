"""The membership of one consumer in its group.

A GroupMember joins the group, detects rebalances, and assigns partitions if it is the
leader.

    step() --> None      no change: the member waits for other members, or its
                         assignment is current
               LOST      the group has removed the member, and other members may own its
                         partitions
               REJOIN    the group rebalances: give up partitions, then call join()
               Share     the partitions of the member in this generation

Rules:
- A member never waits in this module. The caller calls step() again when the groups
  have changed.
- A thread can be interrupted at any point. A request is recorded before it is sent, and
  its result is kept until the caller has received it. So the next step() or leave()
  continues at the same point.
- The leader runs the assignor without any lock, and the result is validated before
  other members see it.

Positions, commits and listeners are in consumer.py, and the decisions of the group in
logcore.coordination.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import attrs

from logcore.callbacks import call
from logcore.consumer.assignors import Assignor
from logcore.consumer.settings import ConsumerSettings
from logcore.consumer.topic_partition import Member, TopicPartition
from logcore.coordination.group_requests import (
    GroupError,
    Join,
    Joined,
    JoinRefused,
    Sync,
    SyncResult,
)
from logcore.coordinators.pending_result import PendingResult
from logcore.coordinators.process_groups import ProcessGroups
from logcore.errors import (
    ConsumerStateError,
    FencedInstanceError,
    InconsistentGroupError,
    InvalidConfigError,
)
from logcore.format.group_records import (
    Subscription,
    assignment_value,
    read_assignment,
    read_subscription,
    subscription_value,
)

_TYPE: Final = "consumer"


class MembershipEvent(enum.Enum):
    #: The group has removed the member.
    LOST = enum.auto()
    #: The group rebalances: the consumer gives partitions up, and joins again.
    REJOIN = enum.auto()


LOST: Final = MembershipEvent.LOST
REJOIN: Final = MembershipEvent.REJOIN


@attrs.frozen
class Share:
    """The event that the group has assigned partitions to the member."""

    partitions: frozenset[TopicPartition]


class GroupMember:
    """The membership of one consumer.

    `partitions_of` maps a topic to its number of partitions, or 0 if it does not exist.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        settings: ConsumerSettings,
        partitions_of: Callable[[str], int],
    ) -> None:
        assert settings.group_id is not None
        self.group_id = settings.group_id
        self.instance_id = settings.group_instance_id
        self.member_id = ""
        self.generation = -1
        self._groups = groups
        self._client_id = settings.client_id
        self._assignors = {assignor.name: assignor for assignor in settings.assignors}
        self._interval_ms = settings.max_poll_interval_ms
        self._absence_ms = None
        if self.instance_id is not None:
            self._absence_ms = settings.session_timeout_ms
        self._partitions_of = partitions_of
        self._topics: tuple[str, ...] = ()
        self._protocol = ""
        # The partition counts in this member's latest assignment as leader.
        self._assigned_counts: dict[str, int] | None = None
        # The request to join while it is sent. It remains set if an interrupt stops that.
        self._join_being_sent: PendingResult | None = None
        self._pending_join: PendingResult | None = None
        self._pending_sync: PendingResult | None = None
        self._share: Share | None = None  # the result of step() until clear_share()
        self._is_stable = False
        self._must_join = False
        # The group has removed the member, and it has not joined again.
        self.is_removed = False

    @property
    def is_cooperative(self) -> bool:
        """Whether the member keeps its partitions during a rebalance.

        Before the first rebalance, this depends on the preferred assignor.
        """
        chosen = self._assignors.get(self._protocol) or next(
            iter(self._assignors.values())
        )
        return chosen.is_cooperative

    @property
    def is_stable(self) -> bool:
        """Whether the member has received its share of the current generation."""
        return self._is_stable

    def subscribe(self, topics: Iterable[str]) -> None:
        """Set the subscribed topics. If they have changed, the member joins again."""
        sorted_topics = tuple(sorted(topics))
        if sorted_topics != self._topics:
            self._topics = sorted_topics
            self._must_join = True

    def rejoin(self) -> None:
        """Join again, because the member has given up partitions that others wait for."""
        self._must_join = True

    def join(self, owned: Iterable[TopicPartition]) -> None:
        """Request to join the next generation.

        `owned` contains the partitions that the member keeps during the rebalance.
        """
        owned_generation = -1
        if self._protocol:
            owned_generation = self.generation
        owned_partitions = tuple(sorted(owned))
        protocols = []
        for name, assignor in self._assignors.items():
            subscription = Subscription(
                self._topics,
                self._user_data(assignor),
                owned_partitions,
                owned_generation,
            )
            protocols.append((name, subscription_value(subscription)))
        pending = PendingResult(can_be_withdrawn=True)
        request = Join(
            group_id=self.group_id,
            member_id=self.member_id,
            instance_id=self.instance_id,
            client_id=self._client_id,
            client_host=f"/pid-{os.getpid()}",
            protocol_type=_TYPE,
            protocols=tuple(protocols),
            session_timeout_ms=self._interval_ms,
            rebalance_timeout_ms=self._interval_ms,
            requires_member_id=False,
            may_skip_assignment=False,
            absence_ms=self._absence_ms,
        )
        self._must_join = False
        self._is_stable = False
        self._pending_sync = None
        self._share = None
        self._join_being_sent = pending
        self._groups.join(request, pending)
        self._pending_join = pending
        self._join_being_sent = None

    def _user_data(self, assignor: Assignor) -> bytes | None:
        """Return the user data that a custom assignor adds to the subscription.

        Raises:
            InvalidConfigError: the assignor returned another type.
        """
        get_user_data = getattr(assignor, "subscription_user_data", None)
        user_data = None if get_user_data is None else get_user_data(self._topics)
        if user_data is not None and not isinstance(user_data, bytes):
            raise InvalidConfigError(
                f"subscription_user_data() of the assignor {assignor.name!r}",
                expected="bytes or None",
                found=repr(user_data),
            )
        return user_data

    def leave(self) -> None:
        """Leave the group. A static member remains a member for its session timeout."""
        self._withdraw_join(self._join_being_sent)
        if not self.member_id and self._pending_join is not None:
            self._withdraw_join(self._pending_join)
        if self.member_id and self.instance_id is None:
            self._groups.leave(self.group_id, [(self.member_id, None)])
        elif self.member_id:
            self._groups.absent(self.group_id, self.member_id)
        self._reset()

    def _withdraw_join(self, request: PendingResult | None) -> None:
        """Withdraw a request to join, which the group would otherwise wait for.

        If the request was answered concurrently, take the member id from the answer.
        """
        if request is not None:
            self._groups.withdraw(self.group_id, request)
            self._store_member_id(request)
        self._join_being_sent = None

    def _store_member_id(self, answered: PendingResult) -> None:
        result = answered.result
        if isinstance(result, Joined):
            self.member_id = result.member_id

    def _reset(self) -> None:
        self.member_id = ""
        self.generation = -1
        self._join_being_sent = None
        self._pending_join = None
        self._pending_sync = None
        self._share = None
        self._is_stable = False
        self._assigned_counts = None
        self._must_join = True

    def step(self) -> MembershipEvent | Share | None:
        """Return the next event for the consumer.

        Raises:
            FencedInstanceError: another consumer has the same group_instance_id.
            InconsistentGroupError: the group has no assignor in common.
            InvalidConfigError: the assignor failed.
            ConsumerStateError: the group refused a request for another reason.
        """
        # Step 1: finish a request to join.
        if (
            self._join_being_sent is not None
        ):  # an interrupt or an error stopped the request
            self._withdraw_join(self._join_being_sent)
        if self._pending_join is not None:
            if not self._pending_join.is_done:
                return None
            result = self._pending_join.result
            self._store_member_id(self._pending_join)
            self._pending_join = None
            event = self._handle_join_result(result)
            if self._pending_sync is None:
                return event
        # Step 2: finish the request for the assignment.
        if self._pending_sync is not None:
            if not self._pending_sync.is_done:
                return self._heartbeat()
            self._handle_sync_result(self._pending_sync.result)
            if self._share is None:
                error = self._pending_sync.result
                self._pending_sync = None
                return self._handle_refusal(error)
            self._pending_sync = None
        # Step 3: report the share or a change, and renew the session.
        if self._share is not None:
            return self._share
        if self._must_join or not self._is_stable:
            return REJOIN
        if self._assigned_counts is not None and self._assigned_counts != {
            name: self._partitions_of(name) for name in self._assigned_counts
        }:
            return REJOIN
        return self._heartbeat()

    def enter_generation(self) -> bool:
        """Enter the generation that the member has joined, if it has begun.

        Return whether it has begun. A later step() returns the share of the generation.

        Raises:
            InvalidConfigError: the assignor failed.
        """
        if self._pending_join is None or not isinstance(
            self._pending_join.result, Joined
        ):
            return False
        result = self._pending_join.result
        self._store_member_id(self._pending_join)
        self._pending_join = None
        self._handle_join_result(result)
        return True

    def clear_share(self) -> None:
        """Mark the share as received, so that step() does not return it again."""
        self._share = None

    def _heartbeat(self) -> MembershipEvent | None:
        error = self._groups.heartbeat(
            self.group_id, self.member_id, self.instance_id, self.generation
        )
        if error is None:
            return None
        return self._handle_refusal(error)

    def _handle_refusal(self, error: GroupError) -> MembershipEvent | None:
        match error:
            case GroupError.REBALANCE_IN_PROGRESS:
                return REJOIN
            case GroupError.UNKNOWN_MEMBER_ID | GroupError.ILLEGAL_GENERATION:
                self._reset()
                self.is_removed = True
                return LOST
            case GroupError.FENCED_INSTANCE_ID:
                raise FencedInstanceError(
                    "another consumer with this group_instance_id replaced this consumer",
                    found=f"{self.instance_id} in group {self.group_id}",
                )
            case GroupError.INCONSISTENT_GROUP_PROTOCOL:
                common = sorted(self._groups.common_protocols(self.group_id))
                raise InconsistentGroupError(
                    f"no assignor of this consumer is supported by all members of group {self.group_id!r}",
                    expected=f"one of {', '.join(common)}"
                    if common
                    else "a group of consumers",
                    found=", ".join(self._assignors),
                )
            case _:
                failure = self._groups.failure
                raise ConsumerStateError(
                    f"group {self.group_id!r} refused: {error.name}"
                ) from failure

    def _handle_join_result(
        self, result: Joined | JoinRefused
    ) -> MembershipEvent | None:
        if isinstance(result, JoinRefused):
            if result.error is GroupError.REBALANCE_IN_PROGRESS:
                self._must_join = True
                return REJOIN
            return self._handle_refusal(result.error)
        self.member_id = result.member_id
        self.generation = result.generation
        self.is_removed = False
        self._protocol = result.protocol
        self._assigned_counts = None
        assignments: Mapping[str, bytes] = {}
        if result.leader == result.member_id:
            assignments = self._compute_assignment(result)
        pending = PendingResult()
        self._groups.sync(
            Sync(
                group_id=self.group_id,
                member_id=self.member_id,
                instance_id=self.instance_id,
                generation=self.generation,
                protocol_type=_TYPE,
                protocol=result.protocol,
                assignments=assignments,
            ),
            pending,
        )
        self._pending_sync = pending
        return None

    def _compute_assignment(self, joined: Joined) -> dict[str, bytes]:
        members = []
        for member in joined.members:
            subscription = read_subscription(member.metadata) or Subscription(())
            owned = tuple(TopicPartition(*pair) for pair in subscription.owned)
            topics = frozenset(subscription.topics)
            members.append(
                Member(
                    member.member_id,
                    topics,
                    member.instance_id,
                    owned,
                    subscription.generation,
                    subscription.user_data,
                )
            )
        sorted_topics = sorted({topic for member in members for topic in member.topics})
        counts = {topic: self._partitions_of(topic) for topic in sorted_topics}
        self._assigned_counts = counts
        assignor = self._assignors[joined.protocol]
        assignment = assignor.assign(
            {topic: count for topic, count in counts.items() if count}, members
        )
        check_assignment(assignor, counts, members, assignment)
        return {
            member.member_id: assignment_value(assignment.get(member.member_id, ()))
            for member in members
        }

    def _handle_sync_result(self, result: SyncResult | GroupError) -> None:
        if isinstance(result, GroupError):
            if result is GroupError.REBALANCE_IN_PROGRESS:
                self._must_join = True
            return
        pairs = read_assignment(result.assignment) or ()
        partitions = frozenset(TopicPartition(*pair) for pair in pairs)
        on_assignment = getattr(
            self._assignors.get(self._protocol), "on_assignment", None
        )
        if on_assignment is not None:
            call(on_assignment, partitions, self.generation)
        self._share = Share(partitions)
        self._is_stable = True


def check_assignment(
    assignor: Assignor,
    counts: Mapping[str, int],
    members: Sequence[Member],
    assignment: Mapping[str, Sequence[TopicPartition]],
) -> None:
    """Raise InvalidConfigError if an assignor assigns an unknown partition, or assigns
    a partition twice.
    """
    subscribed = {member.member_id: member.topics for member in members}
    owners: dict[TopicPartition, str] = {}
    for member_id, assigned in assignment.items():
        for partition in assigned:
            problem = ""
            if member_id not in subscribed:
                problem = "no such member"
            elif not 0 <= partition[1] < counts.get(partition[0], 0):
                problem = "no such partition"
            elif partition[0] not in subscribed[member_id]:
                problem = "it does not subscribe to that topic"
            elif partition in owners:
                problem = f"{owners[partition]!r} has it too"
            if problem:
                raise InvalidConfigError(
                    f"the assignor {assignor.name!r} gave {partition[0]}-{partition[1]} to {member_id!r}",
                    expected="each partition of a subscribed topic once, to a member of the group",
                    found=problem,
                )
            owners[partition] = member_id
