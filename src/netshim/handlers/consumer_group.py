"""Requests of the consumer protocol (KIP-848): heartbeats, and requests of admin tools
about its groups.

This module builds responses. logcore.coordination decides about heartbeats. Commits,
and requests about groups of both protocols, are in group.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from logcore.coordination.classic_group import Group
from logcore.coordination.consumer_group import NO_PARTITIONS, ConsumerGroup
from logcore.coordination.group_requests import (
    ConsumerHeartbeat,
    HeartbeatAccepted,
    HeartbeatRefused,
    Result,
)
from logcore.format.consumer_group_records import Partitions
from netshim import wire
from netshim.coordinators import GroupService
from netshim.groups import BrokerGroups
from netshim.handlers.group import (
    GROUP_OPERATIONS,
    NOT_REQUESTED,
    code_of_group,
    in_steps,
    when_loaded,
)
from netshim.scheduling import ChunkCounter, PendingResponse, Steps
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        ConsumerGroupDescribeRequest,
        ConsumerGroupDescribeResponse,
        ConsumerGroupHeartbeatRequest,
        ConsumerGroupHeartbeatResponse,
    )

#: First version in which members choose their ids.
_OWN_ID_SINCE: Final = 1
#: The kinds of members.
_CLASSIC_MEMBER: Final = 0
_CONSUMER_MEMBER: Final = 1


def _refuse_heartbeat(
    request: ConsumerGroupHeartbeatRequest, call: Call, code: int
) -> ConsumerGroupHeartbeatResponse:
    return wire.CONSUMER_GROUP_HEARTBEAT.Response(error_code=code)


@when_loaded(_refuse_heartbeat)
def consumer_group_heartbeat(
    request: ConsumerGroupHeartbeatRequest,
    call: Call,
    groups: GroupService,
    state: BrokerState,
) -> ConsumerGroupHeartbeatResponse | PendingResponse:
    # A broker that shares its directory does not serve this API.
    assert isinstance(groups, BrokerGroups)
    names = request.subscribed_topic_names
    owned = request.topic_partitions
    heartbeat = ConsumerHeartbeat(
        group_id=request.group_id,
        member_id=request.member_id,
        member_epoch=request.member_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        client_id=call.client_id,
        # The slash is a part of Java's text of an address.
        client_host="/" + call.session.client_address,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        # null means that the field did not change since the last heartbeat. An empty
        # list is a change.
        topic_names=None if names is None else tuple(names),
        pattern=request.subscribed_topic_regex,
        assignor=request.server_assignor,
        owned=None if owned is None else frozenset(_partitions_of(owned)),
        # A regular expression must not reveal topics that the user may not describe.
        may_see=partial(state.security.may_describe, call.session),
    )
    pending = PendingResponse()
    groups.consumer_heartbeat(
        heartbeat,
        lambda result: pending.set(_heartbeat_response(result, call)),
        may_omit_member_id=call.version < _OWN_ID_SINCE,
    )
    return pending


def _partitions_of(
    topics: Iterable[ConsumerGroupHeartbeatRequest.Topic],
) -> Iterator[tuple[bytes, int]]:
    return ((topic.topic_id, number) for topic in topics for number in topic.partitions)


def _heartbeat_response(result: Result, call: Call) -> ConsumerGroupHeartbeatResponse:
    response_type = wire.CONSUMER_GROUP_HEARTBEAT.Response
    if isinstance(result, HeartbeatRefused):
        return response_type(
            error_code=code_of_group(result.error, call), error_message=result.text
        )
    assert isinstance(result, HeartbeatAccepted), result
    assignment = None
    # An assignment is sent only if it changed, so that an idle heartbeat is small.
    if result.assigned is not None:
        topic_type = response_type.Assignment.Topic
        assignment = response_type.Assignment(
            topic_partitions=[
                topic_type(topic_id=topic_id, partitions=numbers)
                for topic_id, numbers in by_topic(result.assigned)
            ]
        )
    return response_type(
        member_id=result.member_id,
        member_epoch=result.member_epoch,
        heartbeat_interval_ms=result.heartbeat_interval_ms,
        assignment=assignment,
    )


def by_topic(partitions: Partitions) -> list[tuple[bytes, list[int]]]:
    """Return the topics with their partition numbers, both in ascending order."""
    numbers: dict[bytes, list[int]] = {}
    # Sorted, so that equal assignments have equal bytes.
    for topic_id, number in sorted(partitions):
        numbers.setdefault(topic_id, []).append(number)
    return list(numbers.items())


# -- requests of admin tools -----------------------------------------------------------


def _refuse_describe(
    request: ConsumerGroupDescribeRequest, call: Call, code: int
) -> ConsumerGroupDescribeResponse:
    response_type = wire.CONSUMER_GROUP_DESCRIBE.Response
    return response_type(
        groups=[
            response_type.Group(group_id=group_id, error_code=code)
            for group_id in request.group_ids
        ]
    )


@when_loaded(_refuse_describe)
@in_steps
def consumer_group_describe(
    request: ConsumerGroupDescribeRequest,
    call: Call,
    groups: GroupService,
    state: BrokerState,
) -> Steps[ConsumerGroupDescribeResponse]:
    operations = (
        GROUP_OPERATIONS if request.include_authorized_operations else NOT_REQUESTED
    )
    described = []
    chunk_counter = ChunkCounter()
    for group_id in request.group_ids:
        if chunk_counter.is_over():
            yield
        described.append(_described(group_id, groups.get(group_id), operations, state))
    return wire.CONSUMER_GROUP_DESCRIBE.Response(groups=described)


def _described(
    group_id: str, group: Group | None, operations: int, state: BrokerState
) -> ConsumerGroupDescribeResponse.Group:
    group_type = wire.CONSUMER_GROUP_DESCRIBE.Response.Group
    # No group can have an empty id.
    if not group_id:
        return group_type(group_id=group_id, error_code=codes.INVALID_GROUP_ID)
    if group is None or group.consumers is None:
        # DescribeGroups describes classic groups.
        text = f"Group {group_id} not found."
        if group is not None:
            text = f"Group {group_id} is not a consumer group."
        return group_type(
            group_id=group_id, error_code=codes.GROUP_ID_NOT_FOUND, error_message=text
        )
    consumers = group.consumers
    return group_type(
        group_id=group_id,
        group_state=group.state,
        group_epoch=consumers.epoch,
        # Lower than the group epoch until the target assignment is calculated again.
        assignment_epoch=consumers.target_epoch,
        assignor_name=consumers.assignor(),
        members=[
            _described_member(member_id, consumers, state)
            for member_id in consumers.members
        ],
        authorized_operations=operations,
    )


def _described_member(
    member_id: str, consumers: ConsumerGroup, state: BrokerState
) -> ConsumerGroupDescribeResponse.Group.Member:
    member = consumers.members[member_id]
    current = consumers.current(member_id)
    return wire.CONSUMER_GROUP_DESCRIBE.Response.Group.Member(
        member_id=member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=current.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topic_names),
        subscribed_topic_regex=member.pattern or "",
        assignment=_assignment(current.assigned, state),
        # The member reaches it after the former owners have released their partitions.
        target_assignment=_assignment(
            consumers.targets.get(member_id, NO_PARTITIONS), state
        ),
        # A group may have members of both protocols during a rolling upgrade.
        member_type=_CLASSIC_MEMBER
        if consumers.is_classic(member_id)
        else _CONSUMER_MEMBER,
    )


def _assignment(partitions: Partitions, state: BrokerState) -> Any:
    """Return an assignment without deleted topics, because they have no name."""
    assignment_type = wire.CONSUMER_GROUP_DESCRIBE.Response.Group.Member.Assignment
    topics = []
    for topic_id, numbers in by_topic(partitions):
        name = state.topic_ids.name_of(topic_id)
        if name is not None:
            topics.append(
                assignment_type.Topic(
                    topic_id=topic_id, topic_name=name, partitions=numbers
                )
            )
    return assignment_type(topic_partitions=topics)
