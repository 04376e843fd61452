"""InitProducerId: the identity of idempotent producers.

The log directory allocates the ids, and never allocates one twice. For transactional
producers, the transaction coordinator does this (transactions.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logcore import LogcoreError
from netshim import wire
from netshim.handlers.failures import code_of
from netshim.handlers.transactions import init_transactional_id
from netshim.scheduling import PendingResponse
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        InitProducerIdRequest,
        InitProducerIdResponse,
    )


def init_producer_id(
    request: InitProducerIdRequest, call: Call, state: BrokerState
) -> InitProducerIdResponse | PendingResponse:
    response_type = wire.INIT_PRODUCER_ID.Response
    # As in KafkaApis.handleInitProducerIdRequest: both or none (KIP-360).
    if (request.producer_id == -1) != (request.producer_epoch == -1):
        return response_type(error_code=codes.INVALID_REQUEST, producer_epoch=-1)
    if request.transactional_id is not None:
        return init_transactional_id(request, call, state)

    pending = PendingResponse()

    def respond(result: object) -> None:
        if isinstance(result, int):
            pending.set(response_type(producer_id=result, producer_epoch=0))
        elif isinstance(result, LogcoreError):
            pending.set(response_type(error_code=code_of(result)))
        else:
            pending.set(result)

    # The disk may block: an id is recorded there before it is returned.
    state.allocate_producer_id(respond)
    return pending
