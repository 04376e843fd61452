"""Functions that several handlers use for each partition of a request: find the log, check
the leader epoch, name the leader, load transactions.

Each partition of a request succeeds or fails alone, so an error becomes the code of its
result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final, Protocol

from logcore import Log, LogcoreError
from logcore.reader import unsearched_offsets
from netshim.handlers.failures import code_of
from netshim.scheduling import PendingResponse, resolve_with
from netshim.state import BrokerState, Call
from netshim.wire import codes

#: Positions of two fields in a batch, and Kafka's number of the codec zstd.
MAGIC_POSITION: Final = 16
ATTRIBUTES_POSITION: Final = 22
ZSTD: Final = 4
#: Maximum number of offsets whose batches are read in the event loop. A consumer at the
#: end of a log has few unread batches, and reading them costs less than the switch to
#: another thread.
_MAX_OFFSETS_IN_LOOP: Final = 1_000


class Coded(Protocol):
    """A part of a response with a code of its own."""

    error_code: int


def log_of(
    topic: str, number: int, requested: object, result: Coded, state: BrokerState
) -> Log | None:
    """Return the log of a partition, or None with the code in the result if the log
    cannot be used.
    """
    try:
        log = state.logs.log(topic, number)
    except LogcoreError as error:
        result.error_code = code_of(error)
        return None
    # KIP-320: a client with another epoch may have stale metadata.
    leader_epoch = state.leadership.leader_epoch((topic, number), log)
    result.error_code = check_epoch(
        leader_epoch, getattr(requested, "current_leader_epoch", -1)
    )
    if result.error_code:
        return None
    return log


def check_epoch(leader_epoch: int, requested: int) -> int:
    """Return the code for the leader epoch in a request, -1 if it has none."""
    if requested < 0 or requested == leader_epoch:
        return codes.NONE
    if requested < leader_epoch:
        return codes.FENCED_LEADER_EPOCH
    return codes.UNKNOWN_LEADER_EPOCH


def name_leader(
    part: Any, topic: str, number: int, response: Any, call: Call, state: BrokerState
) -> None:
    """Add the leader of a partition, and its address, to a response (KIP-951).

    A client that sent the request to another broker then needs no Metadata request.
    """
    try:
        replicas = state.topology.partition(topic, number)
    except LogcoreError:  # the topic was deleted
        return
    part.current_leader = type(part).CurrentLeader(
        leader_id=replicas.leader, leader_epoch=replicas.leader_epoch
    )
    # Several partitions of a response may have one leader.
    if any(endpoint.node_id == replicas.leader for endpoint in response.node_endpoints):
        return
    response.node_endpoints += [
        type(response).NodeEndpoint(
            node_id=broker.node_id, host=broker.host, port=broker.port, rack=broker.rack
        )
        for broker in state.topology.brokers(call.session)
        if broker.node_id == replicas.leader
    ]


def resolve_into(result: Coded, step: Callable[[], None]) -> None:
    """Fill the result of one partition, or its error code."""
    try:
        step()
    except LogcoreError as error:
        result.error_code = code_of(error)


def when_transactions_are_known(
    requested: list[tuple[str, int]], handle: Callable[[], object], state: BrokerState
) -> PendingResponse | None:
    """Return None if nearly all transactions are loaded. Otherwise, return a
    PendingResponse that receives the result of handle() once they are.

    A read_committed reader reads all batches that were not read before, which takes too
    long for the event loop.
    """
    logs = []
    for name, number in requested:
        try:
            log = state.logs.log(name, number)
        except LogcoreError:
            continue
        if unsearched_offsets(log) > _MAX_OFFSETS_IN_LOOP:
            logs.append(log)
    if not logs:
        return None
    pending = PendingResponse()

    def read_transactions() -> None:
        for log in logs:
            # handle() reports the error for its partition.
            with contextlib.suppress(LogcoreError):
                # Reads the batches up to the end of the log. The log keeps the open
                # transactions in memory.
                _ = log.last_stable_offset

    state.submit(read_transactions, lambda _: resolve_with(handle, pending))
    return pending
