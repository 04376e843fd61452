"""Leader elections and replica moves.

Each partition has one replica, so neither is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from netshim import wire
from netshim.scheduling import Pace, PendingResponse, Steps
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        ElectLeadersRequest,
        ElectLeadersResponse,
        ListPartitionReassignmentsRequest,
        ListPartitionReassignmentsResponse,
    )

#: Election types: the preferred leader, and any live replica.
_ELECTIONS: Final = (0, 1)


def elect_leaders(
    request: ElectLeadersRequest, call: Call, state: BrokerState
) -> ElectLeadersResponse | PendingResponse:
    return state.in_pieces(_elect_leaders(request, state))


def _elect_leaders(
    request: ElectLeadersRequest, state: BrokerState
) -> Steps[ElectLeadersResponse]:
    """Respond that each partition has its leader.

    A request for all partitions gets an empty list, as from Kafka when no partition
    needs an election.
    """
    response_type = wire.ELECT_LEADERS.Response
    is_known = request.election_type in _ELECTIONS
    topics = []
    pace = Pace()
    for topic in request.topic_partitions or ():
        numbers = state.logs.numbers_of(topic.topic)
        results = []
        for number in topic.partitions:
            if pace.is_over():
                yield
            code = codes.ELECTION_NOT_NEEDED
            if not is_known:
                code = codes.INVALID_REQUEST
            elif number not in numbers:
                code = codes.UNKNOWN_TOPIC_OR_PARTITION
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


def list_partition_reassignments(
    request: ListPartitionReassignmentsRequest, call: Call, state: BrokerState
) -> ListPartitionReassignmentsResponse:
    return wire.LIST_PARTITION_REASSIGNMENTS.Response(error_message=None)
