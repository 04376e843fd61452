"""Leader elections and reassignments of replicas. The topology performs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from netshim import wire
from netshim.scheduling import ChunkCounter, PendingResponse, Steps, run_all_steps
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        AlterPartitionReassignmentsRequest,
        AlterPartitionReassignmentsResponse,
        ElectLeadersRequest,
        ElectLeadersResponse,
        ListPartitionReassignmentsRequest,
        ListPartitionReassignmentsResponse,
    )

#: Election types: the preferred leader, and any live replica.
_ELECTIONS: Final = (0, 1)
_UNCLEAN: Final = 1
#: Messages of refused reassignments, by code.
_REFUSALS: Final = {
    codes.INVALID_REPLICA_ASSIGNMENT: "expected different brokers of this cluster",
    codes.NO_REASSIGNMENT_IN_PROGRESS: "the partition is not being reassigned",
    codes.INVALID_REPLICATION_FACTOR: "the number of replicas must not change",
    codes.REQUEST_TIMED_OUT: "other requests are changing the topic; try again",
}


def elect_leaders(
    request: ElectLeadersRequest, call: Call, state: BrokerState
) -> ElectLeadersResponse | PendingResponse:
    if not state.leadership.is_clustered:
        return state.run_in_steps(_elect_leaders(request, state))
    # Each election writes to the registry.
    return state.in_background(lambda: run_all_steps(_elect_leaders(request, state)))


def _elect_leaders(
    request: ElectLeadersRequest, state: BrokerState
) -> Steps[ElectLeadersResponse]:
    """Elect the requested leaders.

    As in Kafka, the response to a request for all partitions lists only partitions that
    needed an election.
    """
    response_type = wire.ELECT_LEADERS.Response
    is_known = request.election_type in _ELECTIONS
    is_unclean = request.election_type == _UNCLEAN
    topics = []
    chunk_counter = ChunkCounter()
    # null requests all partitions.
    if request.topic_partitions is None and is_known and state.leadership.is_clustered:
        for name in state.logdir.topics():
            codes_by_number = {
                number: state.topology.elect((name, number), is_unclean=is_unclean)
                for number in state.logs.numbers_of(name)
            }
            topics.append(
                response_type.Topic(
                    topic=name,
                    partition_result=[
                        response_type.Topic.Partition(
                            partition_id=number, error_code=code, error_message=None
                        )
                        for number, code in codes_by_number.items()
                        # With thousands of partitions, those without a change would
                        # hide the others.
                        if code != codes.ELECTION_NOT_NEEDED
                    ],
                )
            )
        topics = [topic for topic in topics if topic.partition_result]
    for topic in request.topic_partitions or ():
        numbers = state.logs.numbers_of(topic.topic)
        results = []
        for number in topic.partitions:
            if chunk_counter.is_over():
                yield
            # The error of the request is also the error of each partition, because some
            # tools read only that.
            if not is_known:
                code = codes.INVALID_REQUEST
            elif number not in numbers:
                code = codes.UNKNOWN_TOPIC_OR_PARTITION
            else:
                key = topic.topic, number
                code = state.topology.elect(key, is_unclean=is_unclean)
            results.append(
                response_type.Topic.Partition(
                    partition_id=number, error_code=code, error_message=None
                )
            )
        topics.append(response_type.Topic(topic=topic.topic, partition_result=results))
    code = codes.NONE
    if not is_known:
        code = codes.INVALID_REQUEST
    return response_type(error_code=code, replica_election_results=topics)


def alter_partition_reassignments(
    request: AlterPartitionReassignmentsRequest, call: Call, state: BrokerState
) -> AlterPartitionReassignmentsResponse | PendingResponse:
    if not state.leadership.is_clustered:
        return state.run_in_steps(_reassign(request, state))
    # Each change writes to the registry.
    return state.in_background(lambda: run_all_steps(_reassign(request, state)))


def _reassign(
    request: AlterPartitionReassignmentsRequest, state: BrokerState
) -> Steps[AlterPartitionReassignmentsResponse]:
    """Begin or cancel the requested reassignments."""
    response_type = wire.ALTER_PARTITION_REASSIGNMENTS.Response
    topic_type = response_type.Topic
    topics = []
    chunk_counter = ChunkCounter()
    for topic in request.topics:
        numbers = state.logs.numbers_of(topic.name)
        results = []
        for requested in topic.partitions:
            if chunk_counter.is_over():
                yield
            code, message = codes.NONE, None
            if requested.partition_index not in numbers:
                code = codes.UNKNOWN_TOPIC_OR_PARTITION
                message = "The topic or the partition does not exist."
            else:
                key = topic.name, requested.partition_index
                # null replicas cancel a reassignment.
                code = state.topology.reassign(
                    key,
                    requested.replicas,
                    may_change_factor=request.allow_replication_factor_change,
                )
                message = _REFUSALS.get(code)
            results.append(
                topic_type.Partition(
                    partition_index=requested.partition_index,
                    error_code=code,
                    error_message=message,
                )
            )
        topics.append(topic_type(name=topic.name, partitions=results))
    return response_type(
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_message=None,
        responses=topics,
    )


def list_partition_reassignments(
    request: ListPartitionReassignmentsRequest, call: Call, state: BrokerState
) -> ListPartitionReassignmentsResponse:
    response_type = wire.LIST_PARTITION_REASSIGNMENTS.Response
    requested = None
    if request.topics is not None:
        requested = {
            (topic.name, number)
            for topic in request.topics
            for number in topic.partition_indexes
        }
    topics: dict[str, ListPartitionReassignmentsResponse.Topic] = {}
    for (name, number), move in sorted(state.topology.reassignments().items()):
        # null topics request all reassignments.
        if requested is not None and (name, number) not in requested:
            continue
        topic = topics.setdefault(name, response_type.Topic(name=name, partitions=[]))
        topic.partitions.append(
            response_type.Topic.Partition(
                partition_index=number,
                replicas=move.replicas,
                adding_replicas=move.adding,
                removing_replicas=move.removing,
            )
        )
    return response_type(error_message=None, topics=list(topics.values()))
