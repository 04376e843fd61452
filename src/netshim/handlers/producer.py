"""InitProducerId: the identity of idempotent producers.

Ids come from the log directory, which never gives one out twice. Transactional producers need the transaction
coordinator, which is not part of this broker yet: they are told so.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from logcore import LogcoreError
from netshim import wire
from netshim.handlers.failures import code_of
from netshim.journal import shown
from netshim.state import Call, State
from netshim.waiting import Answer
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        InitProducerIdRequest,
        InitProducerIdResponse,
    )


def init_producer_id(request: InitProducerIdRequest, call: Call, state: State) -> InitProducerIdResponse | Answer:
    response_type = wire.INIT_PRODUCER_ID.Response
    if request.transactional_id is not None:
        empty = request.transactional_id == ""
        state.journal.say(
            logging.WARNING,
            "transactions",
            call.now_ms,
            "client %s at %s wants transactions, as %s; they are not there yet",
            shown(call.client_id),
            call.session.peer,
            shown(request.transactional_id),
        )
        return response_type(error_code=codes.INVALID_REQUEST if empty else codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)

    def work() -> InitProducerIdResponse:
        try:
            return response_type(producer_id=state.logdir.next_producer_id(), producer_epoch=0)
        except LogcoreError as error:
            return response_type(error_code=code_of(error))

    answer = Answer()
    state.submit(work, answer.set)  # ids are noted on disk before they are given out
    return answer
