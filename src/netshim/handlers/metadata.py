"""Metadata, and other requests that describe the cluster (wire protocol section 6).

The topology (topology.py) returns the brokers and the replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar

from logcore import InvalidNameError, LogcoreError
from logcore.coordinators.stored_offsets import OFFSETS_CONFIG
from logcore.metadata.filenames import (
    INTERNAL_TOPICS,
    METADATA_LOG,
    OFFSETS_TOPIC,
    check_topic_name,
    is_topic_name,
)
from netshim import wire
from netshim.handlers.failures import code_of
from netshim.scheduling import ChunkCounter, PendingResponse, Steps, resolve_with
from netshim.state import BrokerState, Call
from netshim.topic_ids import NO_ID
from netshim.topology import NO_NODE
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        DescribeClusterRequest,
        DescribeClusterResponse,
        DescribeLogDirsRequest,
        DescribeLogDirsResponse,
        DescribeTopicPartitionsRequest,
        DescribeTopicPartitionsResponse,
        MetadataRequest,
        MetadataResponse,
    )

_T = TypeVar("_T")
#: Bits of the operations that all clients may do without access rules: 1 << Kafka's
#: AclOperation code.
_TOPIC_OPERATIONS: Final = sum(1 << code for code in (3, 4, 5, 6, 7, 8, 10, 11))
#: First version in which a request may have topic ids.
_IDS_SINCE: Final = 12
_CLUSTER_OPERATIONS: Final = sum(1 << code for code in (5, 7, 8, 9, 10, 11, 12))


def metadata(
    request: MetadataRequest, call: Call, state: BrokerState
) -> MetadataResponse | PendingResponse:
    """Return brokers and topics. If automatic creation is allowed, missing topics of the
    request are created first.
    """
    is_for_all = request.topics is None or (call.version == 0 and not request.topics)
    if call.version < _IDS_SINCE and any(
        topic.topic_id != NO_ID or topic.name is None for topic in request.topics or ()
    ):
        return _refused_ids(request)
    missing = []
    if (
        not is_for_all
        and request.allow_auto_topic_creation
        and state.settings.auto_create_topics
    ):
        names = {
            topic.name
            for topic in request.topics or ()
            if call.version < _IDS_SINCE or topic.topic_id == NO_ID
        }
        # METADATA_LOG is the log of Kafka's controllers. A client that reads its
        # metadata must not create a topic of this name.
        names.discard(METADATA_LOG)
        missing = sorted(
            name for name in names if is_topic_name(name) and name not in state.logdir
        )
    # A faulty or hostile client must not create topics without limit, because each
    # one takes a directory.
    allowed = max(0, state.settings.auto_create_limit - call.session.topics_created)
    refused = dict.fromkeys(missing[allowed:], codes.POLICY_VIOLATION)
    missing = missing[:allowed]
    if not missing:
        return _metadata_when_known(request, call, state, is_for_all, refused)
    # The topics are counted before their creation, because the client may send further
    # requests during the creation.
    call.session.topics_created += len(missing)
    pending = PendingResponse()

    def finish(failures: dict[str, int] | Exception) -> None:
        if isinstance(failures, Exception):
            pending.set(failures)
            return
        # Topics that were not created do not count.
        call.session.topics_created -= len(failures)
        resolve_with(
            lambda: _metadata_when_known(
                request, call, state, is_for_all, {**refused, **failures}
            ),
            pending,
        )

    # In a thread, because each topic needs several syncs.
    state.submit(lambda: _create_topics(missing, state, call), finish)
    return pending


def _refused_ids(request: MetadataRequest) -> MetadataResponse:
    """Return the error for topic ids in versions 10 and 11, which have the field but
    must not use it (KAFKA-10545). Kafka then returns no broker.
    """
    response_type = wire.METADATA.Response
    code = codes.INVALID_REQUEST
    topics = [
        response_type.Topic(
            error_code=code, name=topic.name or "", topic_id=topic.topic_id
        )
        for topic in request.topics or ()
    ]
    return response_type(controller_id=-1, topics=topics)


def _metadata_when_known(
    request: MetadataRequest,
    call: Call,
    state: BrokerState,
    is_for_all: bool,
    failures: dict[str, int],
) -> MetadataResponse | PendingResponse:
    if is_for_all:
        names: Iterable[str] = state.logdir.topics()
    else:
        names = [
            requested.name or state.topic_ids.name_of(requested.topic_id) or ""
            for requested in request.topics or ()
        ]
    return _when_epochs_are_known(
        names,
        lambda: state.run_in_steps(
            _metadata(request, call, state, is_for_all, failures)
        ),
        state,
    )


def _when_epochs_are_known(
    names: Iterable[str], handle: Callable[[], _T], state: BrokerState
) -> _T | PendingResponse:
    """Call handle() once the leader epochs of all partitions of these topics are known.
    Return a PendingResponse if they must be read.

    Until a log is open, its epoch is known only from a file of the partition. In a
    cluster, the epochs are in the registry, and most partitions may have no file here.
    """
    logdir = state.logdir
    if state.leadership.is_clustered:
        return handle()
    closed = [
        (name, number)
        for name in names
        for number in state.logs.numbers_of(name)
        if not logdir.host.knows_leader_epoch(name, number)
    ]
    # This is the usual case: the logs are open, or their epochs were read before.
    if not closed:
        return handle()

    def read() -> None:
        # A file of each partition is read, so a worker thread does it.
        for name, number in closed:
            # handle() reports the error for its partition.
            with contextlib.suppress(LogcoreError, OSError):
                logdir.host.leader_epoch(name, number)

    pending = PendingResponse()
    state.submit(read, lambda _: resolve_with(handle, pending))
    return pending


def _create_topics(names: list[str], state: BrokerState, call: Call) -> dict[str, int]:
    """Create topics for clients. Returns the topics that could not be created, with
    their codes.
    """
    failures = {}
    for name in names:
        try:
            # The partition count of this topic decides which partition stores a group, and
            # the topic must be compacted.
            if name == OFFSETS_TOPIC:
                is_new = state.logdir.create_topic(
                    name,
                    state.settings.offsets_partitions,
                    OFFSETS_CONFIG,
                    exist_ok=True,
                )
            else:
                is_new = state.logdir.create_topic(
                    name, state.settings.num_partitions, exist_ok=True
                )
            if is_new:
                state.journal.log_change(call, name, "created by a Metadata request")
        except LogcoreError as error:
            # The other topics are created nevertheless.
            failures[name] = code_of(error)
    return failures


def _metadata(
    request: MetadataRequest,
    call: Call,
    state: BrokerState,
    is_for_all: bool,
    failures: dict[str, int],
) -> Steps[MetadataResponse]:
    response_type = wire.METADATA.Response
    results = []
    chunk_counter = ChunkCounter()
    if is_for_all:
        for name in state.logdir.topics():
            results.append(
                (yield from _topic_metadata(name, request, state, chunk_counter))
            )
    # A topic that is requested twice is returned once.
    once = {
        (requested.name, requested.topic_id): requested
        for requested in request.topics or ()
    }
    for requested in () if is_for_all else once.values():
        if chunk_counter.is_over():
            yield
        name = requested.name or ""
        if call.version >= _IDS_SINCE and requested.topic_id != NO_ID:
            topic_name = state.topic_ids.name_of(requested.topic_id)
            # The topic was deleted, or created again with another id.
            if topic_name is None:
                unknown = codes.UNKNOWN_TOPIC_ID
                results.append(
                    response_type.Topic(
                        error_code=unknown, name=None, topic_id=requested.topic_id
                    )
                )
            else:
                results.append(
                    (
                        yield from _topic_metadata(
                            topic_name, request, state, chunk_counter
                        )
                    )
                )
        elif name in state.logdir:
            results.append(
                (yield from _topic_metadata(name, request, state, chunk_counter))
            )
        else:
            # As in Kafka, an invalid name has an error of its own, so that clients do
            # not retry.
            code = codes.UNKNOWN_TOPIC_OR_PARTITION
            try:
                check_topic_name(name)
            except InvalidNameError:
                code = codes.INVALID_TOPIC_EXCEPTION
            if name in failures:
                code = failures[name]
            results.append(response_type.Topic(error_code=code, name=name))
    return response_type(
        brokers=[
            response_type.Broker(
                node_id=broker.node_id,
                host=broker.host,
                port=broker.port,
                rack=broker.rack,
            )
            for broker in state.topology.brokers(call.session)
        ],
        cluster_id=state.logdir.cluster_id,
        controller_id=state.topology.controller_id,
        topics=results,
        cluster_authorized_operations=_operations_or_default(
            request.include_cluster_authorized_operations, _CLUSTER_OPERATIONS
        ),
    )


def _operations_or_default(are_requested: bool, operations: int) -> int:
    if are_requested:
        return operations
    # Kafka's value for operations that were not requested.
    return -(2**31)


def _topic_metadata(
    name: str,
    request: MetadataRequest | _NoOptions,
    state: BrokerState,
    chunk_counter: ChunkCounter,
) -> Steps[MetadataResponse.Topic]:
    topic_type = wire.METADATA.Response.Topic
    partition_type = topic_type.Partition
    try:
        numbers = state.logdir.partitions(name)
        topic_id = state.topic_ids.id_of(name)
    except LogcoreError as error:
        return topic_type(error_code=code_of(error), name=name)
    partitions = []
    for number in numbers:
        if chunk_counter.is_over():
            yield
        replicas = state.topology.partition(name, number)
        partitions.append(
            partition_type(
                # Clients retry after LEADER_NOT_AVAILABLE.
                error_code=_leader_code(replicas.leader),
                partition_index=number,
                leader_id=replicas.leader,
                leader_epoch=replicas.leader_epoch,
                replica_nodes=replicas.replicas,
                isr_nodes=replicas.isr,
                offline_replicas=replicas.offline,
            )
        )
    return topic_type(
        name=name,
        topic_id=topic_id,
        is_internal=name in INTERNAL_TOPICS,
        partitions=partitions,
        topic_authorized_operations=_operations_or_default(
            request.include_topic_authorized_operations, _TOPIC_OPERATIONS
        ),
    )


def _leader_code(leader: int) -> int:
    return codes.LEADER_NOT_AVAILABLE if leader == NO_NODE else codes.NONE


def describe_cluster(
    request: DescribeClusterRequest, call: Call, state: BrokerState
) -> DescribeClusterResponse:
    response_type = wire.DESCRIBE_CLUSTER.Response
    # 1 means brokers, and 2 means controllers, which have no port here.
    if request.endpoint_type != 1:
        mismatched = request.endpoint_type == 2
        return response_type(
            error_code=codes.MISMATCHED_ENDPOINT_TYPE
            if mismatched
            else codes.UNSUPPORTED_ENDPOINT_TYPE,
            error_message="this is a broker, not a controller"
            if mismatched
            else "unknown endpoint type",
        )
    return response_type(
        cluster_id=state.logdir.cluster_id,
        controller_id=state.topology.controller_id,
        endpoint_type=1,
        brokers=[
            response_type.Broker(
                broker_id=broker.node_id,
                host=broker.host,
                port=broker.port,
                rack=broker.rack,
            )
            for broker in state.topology.brokers(call.session)
        ],
        cluster_authorized_operations=_operations_or_default(
            request.include_cluster_authorized_operations, _CLUSTER_OPERATIONS
        ),
    )


def describe_topic_partitions(
    request: DescribeTopicPartitionsRequest, call: Call, state: BrokerState
) -> DescribeTopicPartitionsResponse | PendingResponse:
    """Handle the request of newer admin clients that replaces Metadata."""
    names = sorted({topic.name for topic in request.topics}) or state.logdir.topics()
    # No response contains such a cursor, so the request is invalid.
    if request.cursor is not None and request.cursor.partition_index < 0:
        topic_type = wire.DESCRIBE_TOPIC_PARTITIONS.Response.Topic
        refused = [
            topic_type(error_code=codes.INVALID_REQUEST, name=topic.name)
            for topic in request.topics
        ]
        return wire.DESCRIBE_TOPIC_PARTITIONS.Response(topics=refused)
    return _when_epochs_are_known(
        names,
        lambda: state.run_in_steps(_describe_topic_partitions(names, request, state)),
        state,
    )


def _describe_topic_partitions(
    names: Iterable[str], request: DescribeTopicPartitionsRequest, state: BrokerState
) -> Steps[DescribeTopicPartitionsResponse]:
    response_type = wire.DESCRIBE_TOPIC_PARTITIONS.Response
    topic_type = response_type.Topic
    cursor = request.cursor
    # 2,000 is Kafka's default of max.request.partition.size.limit. With a limit below
    # 1, a client would page forever.
    remaining = max(1, min(request.response_partition_limit, 2_000))
    topics: list[DescribeTopicPartitionsResponse.Topic] = []
    next_cursor = None
    chunk_counter = ChunkCounter()
    for name in names:
        if chunk_counter.is_over():
            yield
        # Topics are returned in the order of their names. An earlier response contained
        # this one.
        if cursor is not None and name < cursor.topic_name:
            continue
        if name not in state.logdir:
            code = codes.UNKNOWN_TOPIC_OR_PARTITION
            try:
                check_topic_name(name)
            except InvalidNameError:
                code = codes.INVALID_TOPIC_EXCEPTION
            topics.append(
                topic_type(
                    error_code=code,
                    name=name,
                    topic_authorized_operations=_TOPIC_OPERATIONS,
                )
            )
            continue
        first = 0
        if cursor is not None and name == cursor.topic_name:
            # The page continues within this topic.
            first = cursor.partition_index
        # The partitions are those of Metadata. The replicas of KIP-966 are added below.
        described = yield from _topic_metadata(name, _NO_OPTIONS, state, chunk_counter)
        partitions = [
            partition
            for partition in described.partitions
            if partition.partition_index >= first
        ]
        # The response is full. The next one begins at the first partition that does not
        # fit.
        if remaining <= 0 or len(partitions) > remaining:
            next_cursor = response_type.Cursor(
                topic_name=name,
                partition_index=partitions[remaining].partition_index
                if remaining > 0
                else first,
            )
        # A topic that does not fit is on the next page, whole or in part.
        if remaining > 0:
            topics.append(
                topic_type(
                    name=name,
                    topic_id=described.topic_id,
                    is_internal=described.is_internal,
                    topic_authorized_operations=_TOPIC_OPERATIONS,
                    partitions=[
                        topic_type.Partition(
                            error_code=partition.error_code,
                            partition_index=partition.partition_index,
                            leader_id=partition.leader_id,
                            leader_epoch=partition.leader_epoch,
                            replica_nodes=partition.replica_nodes,
                            isr_nodes=partition.isr_nodes,
                            # null makes the Java admin client fail
                            eligible_leader_replicas=state.topology.partition(
                                name, partition.partition_index
                            ).elr,
                            last_known_elr=[],
                            offline_replicas=partition.offline_replicas,
                        )
                        for partition in partitions[:remaining]
                    ],
                )
            )
        # May become negative, which also ends the page.
        remaining -= len(partitions)
        if next_cursor is not None:
            break
    return response_type(topics=topics, next_cursor=next_cursor)


class _NoOptions:
    """Replaces the request in _topic_metadata() for an API without its option."""

    include_topic_authorized_operations = False


_NO_OPTIONS: Final = _NoOptions()


def describe_log_dirs(
    request: DescribeLogDirsRequest, call: Call, state: BrokerState
) -> PendingResponse:
    # In a thread, because the sizes of files and of the disk are read.
    return state.in_background(lambda: _log_dirs(request, state))


def _log_dirs(
    request: DescribeLogDirsRequest, state: BrokerState
) -> DescribeLogDirsResponse:
    response_type = wire.DESCRIBE_LOG_DIRS.Response
    requested = {name: state.logs.numbers_of(name) for name in state.logdir.topics()}
    # null requests all topics.
    if request.topics is not None:
        requested = {topic.topic: tuple(topic.partitions) for topic in request.topics}
    dir_type = response_type.LogDir
    topics = []
    for name, numbers in requested.items():
        partitions = []
        for number in numbers:
            try:
                size = state.logdir.size_bytes(name, number)
            except LogcoreError:
                continue
            partitions.append(
                dir_type.Topic.Partition(partition_index=number, partition_size=size)
            )
        if partitions:
            topics.append(dir_type.Topic(name=name, partitions=partitions))
    total_bytes, free_bytes = state.logdir.space()
    return response_type(
        results=[
            dir_type(
                log_dir=state.logdir.path,
                topics=topics,
                total_bytes=total_bytes,
                usable_bytes=free_bytes,
            )
        ]
    )
