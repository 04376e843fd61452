"""Requests of consumer groups: their coordinator, members and offsets, and requests of
admin tools.

Rules (wire protocol section 7):
- This module builds responses and chooses codes by version. logcore.coordination
  decides about groups.
- The first request waits until the stored groups have been read. If they cannot be
  read, the response is an error after which clients try again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logcore.coordination.classic_group import DEAD, EMPTY, STABLE, Group
from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    Join,
    Joined,
    JoinRefused,
    Result,
    Sync,
    SyncResult,
)
from logcore.format.group_records import Committed
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from netshim import wire
from netshim.coordinators import GroupService
from netshim.scheduling import (
    ChunkCounter,
    PendingResponse,
    Steps,
    resolve_with,
    run_all_steps,
)
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        DeleteGroupsRequest,
        DeleteGroupsResponse,
        DescribeGroupsRequest,
        DescribeGroupsResponse,
        FindCoordinatorRequest,
        FindCoordinatorResponse,
        HeartbeatRequest,
        HeartbeatResponse,
        JoinGroupRequest,
        JoinGroupResponse,
        LeaveGroupRequest,
        LeaveGroupResponse,
        ListGroupsRequest,
        ListGroupsResponse,
        OffsetCommitRequest,
        OffsetCommitResponse,
        OffsetDeleteRequest,
        OffsetDeleteResponse,
        OffsetFetchRequest,
        OffsetFetchResponse,
        SyncGroupRequest,
        SyncGroupResponse,
    )

#: The topics that store groups and transactions, by key type.
_COORDINATOR_TOPICS: Final = {0: OFFSETS_TOPIC, 1: TRANSACTIONS_TOPIC}
#: Bits of the operations on a group that all clients may do without access rules: READ,
#: DELETE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS.
GROUP_OPERATIONS: Final = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
#: Kafka's value of the authorized operations in a response if the request does not ask
#: for them.
NOT_REQUESTED: Final = -(2**31)
#: Maximum size in bytes of a commit's text, whatever the settings are: its record
#: stores the length in 16 bits.
_METADATA_BYTES_MAX: Final = 32_000

#: Codes of errors with another name in the protocol.
_OTHER_CODES: Final = {GroupError.RECORD_TOO_LARGE: codes.INVALID_COMMIT_OFFSET_SIZE}
_CODES: Final = {
    error: _OTHER_CODES.get(error) or getattr(codes, error.name) for error in GroupError
}
#: Other codes in some versions of an API: (error, API) -> (up to which version, code).
_CODES_BY_VERSION: Final = {
    # Kafka reports a missing group by its own code since OffsetCommit 9, the first
    # version for members of the consumer protocol.
    (GroupError.GROUP_ID_NOT_FOUND, wire.OFFSET_COMMIT.key): (
        8,
        codes.ILLEGAL_GENERATION,
    ),
    # INVALID_COMMIT_OFFSET_SIZE is an error of commits, which these three APIs do not
    # have.
    **dict.fromkeys(
        (
            (GroupError.RECORD_TOO_LARGE, wire.JOIN_GROUP.key),
            (GroupError.RECORD_TOO_LARGE, wire.SYNC_GROUP.key),
            (GroupError.RECORD_TOO_LARGE, wire.CONSUMER_GROUP_HEARTBEAT.key),
        ),
        (32_767, codes.UNKNOWN_SERVER_ERROR),
    ),
    # TxnOffsetCommit has no error for the epoch of a member.
    (GroupError.STALE_MEMBER_EPOCH, wire.TXN_OFFSET_COMMIT.key): (
        32_767,
        codes.ILLEGAL_GENERATION,
    ),
}
#: First version of JoinGroup in which a new dynamic member first receives its id, and
#: joins with a second request (KIP-394).
_MEMBER_ID_SINCE: Final = 4
#: First version of JoinGroup in which an error has no protocol name (KIP-559).
_NULL_PROTOCOL_SINCE: Final = 7
#: First version of JoinGroup in which a leader may skip the assignment (KIP-814).
_SKIP_ASSIGNMENT_SINCE: Final = 9
#: First version of OffsetCommit in which the generation may be the epoch of a member of
#: the consumer protocol.
_EPOCHS_SINCE: Final = 9
#: First version of DescribeGroups in which a missing group is an error (KIP-1043).
_MISSING_SINCE: Final = 6


def is_metadata_small_enough(metadata: str, state: BrokerState) -> bool:
    """Return whether a commit may have this text."""
    # As in Kafka, the setting counts characters. The record has its own limit in bytes.
    is_short = len(metadata) <= state.settings.offset_metadata_max_bytes
    return is_short and len(metadata.encode()) <= _METADATA_BYTES_MAX


def code_of_group(error: GroupError | None, call: Call) -> int:
    """Return the code for the outcome of a request about a group."""
    if error is None:
        return codes.NONE
    # An older client does not support the newer code.
    last, code = _CODES_BY_VERSION.get((error, call.api_key), (-1, codes.NONE))
    if call.version <= last:
        return code
    return _CODES[error]


RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Refuse = Callable[[RequestT, Call, int], ResponseT]
GroupHandler = Callable[
    [RequestT, Call, GroupService, BrokerState], ResponseT | PendingResponse
]
SteppedHandler = Callable[
    [RequestT, Call, GroupService, BrokerState], Steps[ResponseT | PendingResponse]
]
Handler = Callable[[RequestT, Call, BrokerState], ResponseT | PendingResponse]


def when_loaded(
    refuse: Refuse[RequestT, ResponseT],
) -> Callable[[GroupHandler[RequestT, ResponseT]], Handler[RequestT, ResponseT]]:
    """Decorate a handler so that it runs once the groups are loaded. `refuse` returns the
    response if they cannot be loaded.
    """

    def wrap(
        handler: GroupHandler[RequestT, ResponseT],
    ) -> Handler[RequestT, ResponseT]:
        def handle(
            request: RequestT, call: Call, state: BrokerState
        ) -> ResponseT | PendingResponse:
            groups = state.groups
            return groups.when_groups_loaded(
                lambda: handler(request, call, groups, state),
                lambda error: refuse(request, call, code_of_group(error, call)),
                call.now_ms,
                _group_ids(request),
            )

        return handle

    return wrap


def _group_ids(request: Any) -> list[str]:
    """Return the groups of a request."""
    # Requests of different APIs name their groups in different fields.
    ids = [getattr(request, "group_id", "")]
    ids += getattr(request, "groups_names", ())
    ids += [
        group_id if isinstance(group_id, str) else group_id.group_id
        for group_id in getattr(request, "groups", ())
    ]
    # The handler refuses an empty id.
    return [group for group in ids if group]


def in_steps(
    handler: SteppedHandler[RequestT, ResponseT],
) -> GroupHandler[RequestT, ResponseT]:
    """Return a handler that runs in steps, in the form for when_loaded()."""

    def handle(
        request: RequestT, call: Call, groups: GroupService, state: BrokerState
    ) -> ResponseT | PendingResponse:
        return groups.run_in_steps(handler(request, call, groups, state))

    return handle


def find_coordinator(
    request: FindCoordinatorRequest, call: Call, state: BrokerState
) -> FindCoordinatorResponse | PendingResponse:

    def find() -> FindCoordinatorResponse | PendingResponse:
        return state.run_in_steps(_find_coordinator(request, call, state))

    topic = _COORDINATOR_TOPICS.get(request.key_type)
    if topic is None or topic in state.logdir or not state.leadership.is_clustered:
        return find()
    # A coordinator is known once its partition has a leader.
    create = state.transactions.create_topic
    if topic == OFFSETS_TOPIC:
        create = state.groups.create_topic
    pending = PendingResponse()
    # If the topic cannot be created, find() returns COORDINATOR_NOT_AVAILABLE.
    state.submit(create, lambda _: resolve_with(find, pending))
    return pending


def _find_coordinator(
    request: FindCoordinatorRequest, call: Call, state: BrokerState
) -> Steps[FindCoordinatorResponse]:
    """Return the leader of the partition that stores each group or transaction."""
    response_type = wire.FIND_COORDINATOR.Response

    def coordinator_fields(key: str) -> dict[str, Any]:
        refused = {"node_id": -1, "host": "", "port": -1}
        if request.key_type not in _COORDINATOR_TOPICS:
            return {
                **refused,
                "error_code": codes.INVALID_REQUEST,
                "error_message": "only groups and transactions have coordinators here: share groups are not served",
            }
        topic = _COORDINATOR_TOPICS[request.key_type]
        if state.leadership.is_clustered and topic not in state.logdir:
            return {**refused, "error_code": codes.COORDINATOR_NOT_AVAILABLE}
        number = state.coordinator_partition(topic, key)
        broker = state.topology.coordinator(topic, number, call.session)
        if broker is None:
            return {**refused, "error_code": codes.COORDINATOR_NOT_AVAILABLE}
        return {"node_id": broker.node_id, "host": broker.host, "port": broker.port}

    if call.version < 4:
        return response_type(**coordinator_fields(request.key))
    coordinators = []
    chunk_counter = ChunkCounter()
    for key in request.coordinator_keys:
        if chunk_counter.is_over():
            yield
        coordinators.append(
            response_type.Coordinator(key=key, **coordinator_fields(key))
        )
    return response_type(coordinators=coordinators)


# -- members ---------------------------------------------------------------------------


def _refuse_join(request: JoinGroupRequest, call: Call, code: int) -> JoinGroupResponse:
    return _join_failure(call, code, request.member_id)


def _join_failure(call: Call, code: int, member_id: str) -> JoinGroupResponse:
    # Clients of older versions cannot read a null here.
    protocol_name = None
    if call.version < _NULL_PROTOCOL_SINCE:
        protocol_name = ""
    return wire.JOIN_GROUP.Response(
        error_code=code, member_id=member_id, protocol_name=protocol_name
    )


@when_loaded(_refuse_join)
def join_group(
    request: JoinGroupRequest, call: Call, groups: GroupService, state: BrokerState
) -> JoinGroupResponse | PendingResponse:
    join = Join(
        group_id=request.group_id,
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        client_id=call.client_id,
        # The form of Java's InetAddress, which admin tools print.
        client_host="/" + call.session.client_address,
        protocol_type=request.protocol_type,
        protocols=tuple(
            (protocol.name, protocol.metadata) for protocol in request.protocols
        ),
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        requires_member_id=call.version >= _MEMBER_ID_SINCE,
        may_skip_assignment=call.version >= _SKIP_ASSIGNMENT_SINCE,
    )
    pending = PendingResponse()
    groups.join(join, lambda result: pending.set(_join_response(result, call)))
    return pending


def _join_response(result: Result, call: Call) -> JoinGroupResponse:
    if isinstance(result, JoinRefused):
        return _join_failure(call, code_of_group(result.error, call), result.member_id)
    assert isinstance(result, Joined), result
    response_type = wire.JOIN_GROUP.Response
    return response_type(
        generation_id=result.generation,
        protocol_type=result.protocol_type,
        protocol_name=result.protocol,
        leader=result.leader,
        skip_assignment=result.skip_assignment,
        member_id=result.member_id,
        members=[
            response_type.Member(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                metadata=member.metadata,
            )
            for member in result.members
        ],
    )


@when_loaded(lambda request, call, code: wire.SYNC_GROUP.Response(error_code=code))
def sync_group(
    request: SyncGroupRequest, call: Call, groups: GroupService, state: BrokerState
) -> SyncGroupResponse | PendingResponse:
    sync = Sync(
        group_id=request.group_id,
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        generation=request.generation_id,
        protocol_type=request.protocol_type,
        protocol=request.protocol_name,
        assignments={
            assignment.member_id: assignment.assignment
            for assignment in request.assignments
        },
        # A leader may assign topics that the member must not see.
        may_see=partial(state.security.may_describe, call.session),
    )
    pending = PendingResponse()
    groups.sync(sync, lambda result: pending.set(_sync_response(result, call)))
    return pending


def _sync_response(result: Result, call: Call) -> SyncGroupResponse:
    if isinstance(result, GroupError):
        return wire.SYNC_GROUP.Response(error_code=code_of_group(result, call))
    assert isinstance(result, SyncResult), result
    return wire.SYNC_GROUP.Response(
        protocol_type=result.protocol_type,
        protocol_name=result.protocol,
        assignment=result.assignment,
    )


@when_loaded(lambda request, call, code: wire.HEARTBEAT.Response(error_code=code))
def heartbeat(
    request: HeartbeatRequest, call: Call, groups: GroupService, state: BrokerState
) -> HeartbeatResponse:
    error = groups.heartbeat(
        request.group_id,
        request.member_id,
        request.group_instance_id,
        request.generation_id,
    )
    return wire.HEARTBEAT.Response(error_code=code_of_group(error, call))


@when_loaded(lambda request, call, code: wire.LEAVE_GROUP.Response(error_code=code))
def leave_group(
    request: LeaveGroupRequest, call: Call, groups: GroupService, state: BrokerState
) -> LeaveGroupResponse:
    """Handle LeaveGroup: one member up to version 2, whose error is in the response,
    and then a list with an error for each member.
    """
    response_type = wire.LEAVE_GROUP.Response
    if not request.group_id:
        return response_type(error_code=codes.INVALID_GROUP_ID)
    # KIP-345 added several members, which an admin client may remove by their instance
    # ids.
    if call.version < 3:
        (error,) = groups.leave(request.group_id, [(request.member_id, None)])
        return response_type(error_code=code_of_group(error, call))
    requested = [
        (member.member_id, member.group_instance_id) for member in request.members
    ]
    results = groups.leave(request.group_id, requested)
    return response_type(
        members=[
            response_type.Member(
                member_id=member_id,
                group_instance_id=instance_id,
                error_code=code_of_group(error, call),
            )
            for (member_id, instance_id), error in zip(requested, results, strict=True)
        ]
    )


# -- offsets ---------------------------------------------------------------------------


def _refuse_commit(
    request: OffsetCommitRequest, call: Call, code: int
) -> OffsetCommitResponse:
    topic_type = wire.OFFSET_COMMIT.Response.Topic
    return wire.OFFSET_COMMIT.Response(
        topics=[
            topic_type(
                name=topic.name,
                partitions=[
                    topic_type.Partition(
                        partition_index=partition.partition_index, error_code=code
                    )
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


@when_loaded(_refuse_commit)
@in_steps
def offset_commit(
    request: OffsetCommitRequest, call: Call, groups: GroupService, state: BrokerState
) -> Steps[OffsetCommitResponse | PendingResponse]:
    """Handle OffsetCommit. Partitions that do not exist fail alone. If the group
    refuses the commit, all others fail.
    """
    # One entry for each partition in the order of the request, with no error yet.
    response = _refuse_commit(request, call, codes.NONE)
    expire_ms = -1
    if request.retention_time_ms >= 0:  # of versions 2 to 4
        # The limit keeps the sum within the int64 of the record.
        expire_ms = call.now_ms + min(request.retention_time_ms, 2**62)
    offsets, results = yield from offsets_in(
        request.topics, response.topics, call, state, expire_ms
    )
    # No partition of the request exists.
    if not results:
        return response
    committer = Committer(
        request.group_id,
        request.generation_id_or_member_epoch,
        request.member_id,
        request.group_instance_id,
        can_contain_epoch=call.version >= _EPOCHS_SINCE,
    )
    pending = PendingResponse()

    def finish(error: GroupError | None) -> None:
        code = code_of_group(error, call)
        for result in results:
            result.error_code = code or result.error_code
        pending.set(response)

    groups.request_commit(committer, offsets, finish)
    return pending


def offsets_in(
    topics: Sequence[Any],
    result_topics: Sequence[Any],
    call: Call,
    state: BrokerState,
    expire_ms: int = -1,
) -> Steps[tuple[dict[tuple[str, int], Committed], list[Any]]]:
    """Return the offsets of a commit, and the results of existing partitions. Other
    partitions, and those with too large metadata, get their codes here.
    """
    # Compared after the chunks, between which topics may change.
    version = state.logdir.host.topics_version
    offsets = yield from _offsets_in(topics, result_topics, call, state, expire_ms)
    if state.logdir.host.topics_version != version:
        # Topics were deleted or created between two chunks. A new topic must not
        # inherit offsets of an old one.
        offsets = run_all_steps(
            _offsets_in(topics, result_topics, call, state, expire_ms)
        )
    return offsets


def _offsets_in(
    topics: Sequence[Any],
    result_topics: Sequence[Any],
    call: Call,
    state: BrokerState,
    expire_ms: int,
) -> Steps[tuple[dict[tuple[str, int], Committed], list[Any]]]:
    offsets: dict[tuple[str, int], Committed] = {}
    results = []
    chunk_counter = ChunkCounter()
    for topic, result_topic in zip(topics, result_topics, strict=True):
        numbers = state.logs.numbers_of(topic.name)
        for partition, result in zip(
            topic.partitions, result_topic.partitions, strict=True
        ):
            if chunk_counter.is_over():
                yield
            if partition.partition_index not in numbers:
                result.error_code = codes.UNKNOWN_TOPIC_OR_PARTITION
                continue
            results.append(result)
            metadata = partition.committed_metadata or ""
            if not is_metadata_small_enough(metadata, state):
                result.error_code = codes.OFFSET_METADATA_TOO_LARGE
                continue
            result.error_code = codes.NONE
            offsets[topic.name, partition.partition_index] = Committed(
                partition.committed_offset,
                partition.committed_leader_epoch,
                metadata,
                call.now_ms,
                expire_ms,
            )
    return offsets, results


def _refuse_fetch(
    request: OffsetFetchRequest, call: Call, code: int
) -> OffsetFetchResponse:
    response_type = wire.OFFSET_FETCH.Response
    # Versions 0 and 1 have an error in each partition, versions 2 to 7 one in the
    # response, and later versions one in each group.
    if call.version >= 8:
        return response_type(
            groups=[
                response_type.Group(group_id=group.group_id, error_code=code)
                for group in request.groups
            ]
        )
    if call.version >= 2:
        return response_type(error_code=code)
    topic_type = response_type.Topic
    return response_type(
        topics=[
            topic_type(
                name=topic.name,
                partitions=[
                    topic_type.Partition(
                        partition_index=number,
                        # -1 means that nothing was committed.
                        committed_offset=-1,
                        metadata="",
                        error_code=code,
                    )
                    for number in topic.partition_indexes
                ],
            )
            for topic in request.topics or ()
        ]
    )


@when_loaded(_refuse_fetch)
@in_steps
def offset_fetch(
    request: OffsetFetchRequest, call: Call, groups: GroupService, state: BrokerState
) -> Steps[OffsetFetchResponse]:
    """Handle OffsetFetch. A partition without a commit has offset -1 and no error. Null
    topics request all commits.

    With require_stable, a partition that an open transaction may commit has an error,
    so that the client tries again.
    """
    response_type = wire.OFFSET_FETCH.Response
    is_strict = request.require_stable
    chunk_counter = ChunkCounter()
    if call.version < 8:
        group = groups.get(request.group_id)
        topics = yield from _fetched(
            response_type.Topic, request.topics, group, is_strict, chunk_counter
        )
        return response_type(topics=topics)
    fetched = []
    for requested in request.groups:
        if chunk_counter.is_over():
            yield
        fetched.append(
            (
                yield from _fetched_group(
                    requested,
                    call,
                    groups.get(requested.group_id),
                    is_strict,
                    chunk_counter,
                )
            )
        )
    return response_type(groups=fetched)


def _fetched_group(
    requested: OffsetFetchRequest.Group,
    call: Call,
    group: Group | None,
    is_strict: bool,
    chunk_counter: ChunkCounter,
) -> Steps[OffsetFetchResponse.Group]:
    """Return the offsets of a group. A request with the id of a member of the consumer
    protocol must also have its current epoch.
    """
    group_type = wire.OFFSET_FETCH.Response.Group
    # Admin clients name no member. A member with an old epoch must not start at offsets
    # that another member has passed (KIP-848).
    is_named = requested.member_id is not None or requested.member_epoch >= 0
    if is_named and group is not None and group.consumers is not None:
        error = group.consumers.check_epoch(
            requested.member_id or "", requested.member_epoch
        )
        if error is not None:
            return group_type(
                group_id=requested.group_id, error_code=code_of_group(error, call)
            )
    topics = yield from _fetched(
        group_type.Topic, requested.topics, group, is_strict, chunk_counter
    )
    return group_type(group_id=requested.group_id, topics=topics)


def _fetched(
    topic_type: Any,
    topics: Any,
    group: Group | None,
    is_strict: bool,
    chunk_counter: ChunkCounter,
) -> Steps[list[Any]]:
    if group is None:
        # As in Kafka, a group that does not exist has no offsets, and this is no error.
        offsets = {}
    else:
        offsets = group.offsets
    if topics is not None:
        requested = [(topic.name, topic.partition_indexes) for topic in topics]
    elif is_strict and group is not None:  # includes offsets of open transactions
        numbers_of: dict[str, list[int]] = {}
        for name, number in group.offset_keys():
            numbers_of.setdefault(name, []).append(number)
        requested = list(numbers_of.items())
    else:
        requested = [(name, list(partitions)) for name, partitions in offsets.items()]
    results = []
    for name, numbers in requested:
        partitions = []
        for number in numbers:
            if chunk_counter.is_over():
                yield
            partition = topic_type.Partition(
                partition_index=number, committed_offset=-1, metadata=""
            )
            partitions.append(partition)
            # The transaction may still commit a higher offset. A consumer that starts
            # at the lower one would process records twice (KIP-447).
            if is_strict and group is not None and group.is_unstable((name, number)):
                partition.error_code = codes.UNSTABLE_OFFSET_COMMIT
                continue
            committed = offsets.get(name, {}).get(number)
            if committed is not None:
                partition.committed_offset = committed.offset
                partition.committed_leader_epoch = committed.leader_epoch
                partition.metadata = committed.metadata
        results.append(topic_type(name=name, partitions=partitions))
    return results


def _refuse_delete_offsets(
    request: OffsetDeleteRequest, call: Call, code: int
) -> OffsetDeleteResponse:
    return wire.OFFSET_DELETE.Response(error_code=code)


@when_loaded(_refuse_delete_offsets)
@in_steps
def offset_delete(
    request: OffsetDeleteRequest, call: Call, groups: GroupService, state: BrokerState
) -> Steps[OffsetDeleteResponse | PendingResponse]:
    response_type = wire.OFFSET_DELETE.Response
    if not request.group_id:
        return response_type(error_code=codes.INVALID_GROUP_ID)
    topics = []
    # Step 1: make a result for each partition (KIP-496).
    existing = []
    chunk_counter = ChunkCounter()
    for topic in request.topics:
        numbers = state.logs.numbers_of(topic.name)
        results = []
        for partition in topic.partitions:
            if chunk_counter.is_over():
                yield
            result = response_type.Topic.Partition(
                partition_index=partition.partition_index
            )
            results.append(result)
            if partition.partition_index in numbers:
                existing.append((topic.name, result))
            else:
                result.error_code = codes.UNKNOWN_TOPIC_OR_PARTITION
        topics.append(response_type.Topic(name=topic.name, partitions=results))
    # Step 2: check the group. This is in the last chunk, because the group may be
    # deleted, or get members, between two chunks.
    group = groups.get(request.group_id)
    if group is None:
        return response_type(error_code=codes.GROUP_ID_NOT_FOUND)
    # Only consumers name the topics that they use. Others might use any.
    if group.state != EMPTY and group.protocol_type != "consumer":
        return response_type(error_code=codes.NON_EMPTY_GROUP)
    # A member would continue at its own position, and its next commit would restore the
    # offset.
    used = {topic.name for topic in request.topics if group.may_use(topic.name)}
    # Step 3: delete the offsets that exist. A partition without one has no error.
    keys = []
    stored = []
    for name, result in existing:
        if name in used:
            result.error_code = codes.GROUP_SUBSCRIBED_TO_TOPIC
        elif group.has_offset(name, result.partition_index):
            keys.append((name, result.partition_index))
            stored.append(result)
    pending = PendingResponse()

    def finish(error: GroupError | None) -> None:
        for result in stored:
            result.error_code = code_of_group(error, call)
        pending.set(response_type(topics=topics))

    groups.request_delete_offsets(request.group_id, keys, finish)
    return pending


# -- requests of admin tools -----------------------------------------------------------


def _refuse_describe(
    request: DescribeGroupsRequest, call: Call, code: int
) -> DescribeGroupsResponse:
    group_type = wire.DESCRIBE_GROUPS.Response.Group
    return wire.DESCRIBE_GROUPS.Response(
        groups=[
            group_type(group_id=group_id, error_code=code)
            for group_id in request.groups
        ]
    )


@when_loaded(_refuse_describe)
@in_steps
def describe_groups(
    request: DescribeGroupsRequest, call: Call, groups: GroupService, state: BrokerState
) -> Steps[DescribeGroupsResponse]:
    """Handle DescribeGroups. A group that does not exist, or is not of the classic
    protocol, is Dead. Only a Stable group has subscriptions and assignments.
    """
    group_type = wire.DESCRIBE_GROUPS.Response.Group
    operations = NOT_REQUESTED
    if request.include_authorized_operations:
        operations = GROUP_OPERATIONS
    results = []
    chunk_counter = ChunkCounter()
    for group_id in request.groups:
        if chunk_counter.is_over():
            yield
        group = groups.get(group_id)
        # ConsumerGroupDescribe describes groups of the consumer protocol.
        if group is None or group.consumers is not None:
            unknown_group = group_type(
                group_id=group_id, group_state=DEAD, authorized_operations=operations
            )
            if call.version >= _MISSING_SINCE:
                unknown_group.error_code = codes.GROUP_ID_NOT_FOUND
                unknown_group.error_message = f"Group {group_id} not found."
                if group is not None:
                    unknown_group.error_message = (
                        f"Group {group_id} is not a classic group."
                    )
            results.append(unknown_group)
            continue
        described = group_type(
            group_id=group_id,
            group_state=group.state,
            protocol_type=group.protocol_type,
            protocol_data="",
            members=[],
            authorized_operations=operations,
        )
        # As in Kafka. During a rebalance, subscriptions and assignments are about to
        # change.
        is_stable = group.state == STABLE
        if is_stable:
            described.protocol_data = group.protocol or ""
        for member in group.members.values():
            described_member = group_type.Member(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=b"",
                member_assignment=b"",
            )
            if is_stable:
                described_member.member_metadata = member.metadata(group.protocol)
                described_member.member_assignment = member.assignment
            described.members.append(described_member)
        results.append(described)
    return wire.DESCRIBE_GROUPS.Response(groups=results)


@when_loaded(lambda request, call, code: wire.LIST_GROUPS.Response(error_code=code))
@in_steps
def list_groups(
    request: ListGroupsRequest, call: Call, groups: GroupService, state: BrokerState
) -> Steps[ListGroupsResponse]:
    group_type = wire.LIST_GROUPS.Response.Group
    # As in Kafka, the filters ignore case. KIP-518 added states, and KIP-848 types.
    states = {name.lower() for name in request.states_filter}
    types = {name.lower() for name in request.types_filter}
    entries = []
    chunk_counter = ChunkCounter()
    # A copy, because groups may be created and deleted between two chunks.
    for group in list(groups.all()):
        if chunk_counter.is_over():
            yield
        if (not states or group.state.lower() in states) and (
            not types or _type_of(group) in types
        ):
            entries.append(
                group_type(
                    group_id=group.group_id,
                    protocol_type=group.protocol_type,
                    group_state=group.state,
                    group_type=_type_of(group),
                )
            )
    return wire.LIST_GROUPS.Response(groups=entries)


def _type_of(group: Group) -> str:
    if group.consumers is None:
        return "classic"
    return "consumer"


def _refuse_delete(
    request: DeleteGroupsRequest, call: Call, code: int
) -> DeleteGroupsResponse:
    group_type = wire.DELETE_GROUPS.Response.Group
    return wire.DELETE_GROUPS.Response(
        results=[
            group_type(group_id=name, error_code=code)
            for name in dict.fromkeys(request.groups_names)
        ]
    )


@when_loaded(_refuse_delete)
@in_steps
def delete_groups(
    request: DeleteGroupsRequest, call: Call, groups: GroupService, state: BrokerState
) -> Steps[DeleteGroupsResponse | PendingResponse]:
    response = _refuse_delete(request, call, codes.NONE)
    # The response waits for the records of all groups, which are deleted independently.
    remaining = len(response.results)
    if not remaining:
        return response
    pending = PendingResponse()

    def finish(result: DeleteGroupsResponse.Group, error: GroupError | None) -> None:
        nonlocal remaining
        result.error_code = code_of_group(error, call)
        remaining -= 1
        if not remaining:
            pending.set(response)

    chunk_counter = ChunkCounter()
    for result in response.results:
        if chunk_counter.is_over():
            yield
        groups.request_delete(result.group_id, partial(finish, result))
    return pending
