"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords.

Work that reads indexes or batches, or renames files, runs outside the broker's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from logcore import Log, LogcoreError
from logcore.coordinators.durable_queue import sync_present
from logcore.reader import list_offset_for_max_timestamp, list_offset_for_timestamp
from netshim import wire
from netshim.handlers.failures import code_of
from netshim.handlers.partitions import (
    log_of,
    resolve_into,
    when_transactions_are_known,
)
from netshim.scheduling import ChunkCounter, PendingResponse, Steps, resolve_with
from netshim.state import BrokerState, Call
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        DeleteRecordsRequest,
        DeleteRecordsResponse,
        ListOffsetsRequest,
        ListOffsetsResponse,
        OffsetForLeaderEpochRequest,
        OffsetForLeaderEpochResponse,
    )

#: Timestamps of ListOffsets with a special meaning.
_LATEST: Final = -1
_EARLIEST: Final = -2
_MAX_TIMESTAMP: Final = -3
_EARLIEST_LOCAL: Final = -4
_LATEST_TIERED: Final = -5
#: First version of ListOffsets with OFFSET_NOT_AVAILABLE.
_NOT_AVAILABLE_SINCE: Final = 5
#: First version of ListOffsets for each special timestamp.
_SINCE: Final = {
    _LATEST: 0,
    _EARLIEST: 0,
    _MAX_TIMESTAMP: 7,
    _EARLIEST_LOCAL: 8,
    _LATEST_TIERED: 9,
}


def list_offsets(
    request: ListOffsetsRequest, call: Call, state: BrokerState
) -> ListOffsetsResponse | PendingResponse:
    requested = [
        (topic.name, partition.partition_index)
        for topic in request.topics
        for partition in topic.partitions
    ]
    return state.logs.when_open(
        requested,
        lambda: state.run_in_steps(_list_offsets(request, call, state, requested)),
    )


def _when_visible(
    requested: list[tuple[str, int]], handle: Callable[[], object], state: BrokerState
) -> Steps[PendingResponse | None]:
    """Return None if readers may read all written records, else a PendingResponse.

    The PendingResponse receives the result of handle() once the current records are
    durable. With the durability `group`, records with acks=1 would otherwise be missing
    for up to 100 ms.
    """
    unsynced = []
    chunk_counter = ChunkCounter()
    # A partition may be named twice.
    for name, number in dict.fromkeys(requested):
        if chunk_counter.is_over():
            yield
        # handle() reports the error for its partition.
        with contextlib.suppress(LogcoreError):
            log = state.logs.log(name, number)
            # A client that has just produced with acks=1 expects its records below the
            # latest offset.
            if log.durability.waits and log.high_watermark < log.log_end_offset:
                unsynced.append(log)
    if not unsynced:
        return None
    pending = PendingResponse()
    remaining = len(unsynced)

    def finish(_: object) -> None:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            resolve_with(handle, pending)

    for log in unsynced:
        state.syncs.when_durable(log, log.log_end_offset, finish)
    return pending


def _list_offsets(
    request: ListOffsetsRequest,
    call: Call,
    state: BrokerState,
    requested: list[tuple[str, int]],
    *,
    is_visible: bool = False,
    knows_transactions: bool = False,
) -> Steps[ListOffsetsResponse | PendingResponse]:
    def list_again(knows_transactions: bool) -> ListOffsetsResponse | PendingResponse:
        return state.run_in_steps(
            _list_offsets(
                request,
                call,
                state,
                requested,
                is_visible=True,
                knows_transactions=knows_transactions,
            )
        )

    # Step 1: wait until the records that were appended before are visible.
    if not is_visible:
        pending = yield from _when_visible(
            requested, lambda: list_again(knows_transactions=False), state
        )
        if pending is not None:
            return pending
    # Step 2: read transactions, from which the last stable offset follows.
    if request.isolation_level == 1 and not knows_transactions:
        pending = when_transactions_are_known(
            requested, lambda: list_again(knows_transactions=True), state
        )
        if pending is not None:
            return pending

    def fill_result(
        key: tuple[str, int],
        requested: ListOffsetsRequest.Topic.Partition,
        result: ListOffsetsResponse.Topic.Partition,
        log: Log,
    ) -> None:
        timestamp = requested.timestamp
        # A negative number that this version does not define is not a time: a search for
        # it would find the first record.
        if timestamp < 0 and _SINCE.get(timestamp, 99) > call.version:
            result.error_code = codes.UNSUPPORTED_VERSION
            return
        result.leader_epoch = log.leader_epoch
        if request.isolation_level == 1:
            end = log.last_stable_offset
        else:
            end = log.high_watermark
        # A new leader gets the high watermark from the fetches of its followers (KIP-207).
        # If it used its own, which may be older, the latest offset would go backwards.
        if timestamp == _LATEST and not state.leadership.is_high_watermark_current(key):
            result.error_code = codes.LEADER_NOT_AVAILABLE
            if call.version >= _NOT_AVAILABLE_SINCE:
                result.error_code = codes.OFFSET_NOT_AVAILABLE
        elif timestamp == _LATEST:
            result.offset = end
        elif timestamp in (_EARLIEST, _EARLIEST_LOCAL):
            result.offset = log.log_start_offset
        # This broker has no remote storage. Kafka then responds with offset -1 and no
        # epoch.
        elif timestamp == _LATEST_TIERED:
            result.leader_epoch = -1
        elif timestamp == _MAX_TIMESTAMP:
            # Readers at this isolation level must be able to reach the record.
            newest = list_offset_for_max_timestamp(log)
            if newest is not None and newest[0] < end:
                result.offset, result.timestamp = newest
        else:
            record = list_offset_for_timestamp(log, timestamp)
            if record is not None and record[0] < end:
                result.offset, result.timestamp = record
        # No record was found, so there is no offset to which an epoch could belong.
        if result.offset < 0:
            result.leader_epoch = -1

    # Step 3: create a result for each partition, and collect the work.
    seen: set[tuple[str, int]] = set()
    duplicates: set[tuple[str, int]] = set()
    for topic in request.topics:
        for partition in topic.partitions:
            key = topic.name, partition.partition_index
            # Kafka refuses a partition that is named twice: the response has one entry
            # for each.
            (duplicates if key in seen else seen).add(key)
    topic_type = wire.LIST_OFFSETS.Response.Topic
    response = wire.LIST_OFFSETS.Response(topics=[])
    work: list[Callable[[], None]] = []
    reads = False
    chunk_counter = ChunkCounter()
    for topic in request.topics:
        results = []
        for partition in {
            partition_entry.partition_index: partition_entry
            for partition_entry in topic.partitions
        }.values():
            if chunk_counter.is_over():
                yield
            result = topic_type.Partition(partition_index=partition.partition_index)
            results.append(result)
            if (topic.name, partition.partition_index) in duplicates:
                result.error_code = codes.INVALID_REQUEST
                continue
            log = log_of(
                topic.name, partition.partition_index, partition, result, state
            )
            if log is not None:
                work.append(
                    partial(
                        resolve_into,
                        result,
                        partial(
                            fill_result,
                            (topic.name, partition.partition_index),
                            partition,
                            result,
                            log,
                        ),
                    )
                )
                reads = (
                    reads
                    or partition.timestamp >= 0
                    or partition.timestamp == _MAX_TIMESTAMP
                )
        response.topics.append(topic_type(name=topic.name, partitions=results))

    # The ends of logs are in memory, so a request for ends needs no other thread.
    if not reads:
        for step in work:
            if chunk_counter.is_over():
                yield
            step()
        return response

    def run_work() -> ListOffsetsResponse:
        for step in work:
            step()
        return response

    pending = PendingResponse()
    state.submit(run_work, pending.set)  # a search by time reads indexes and batches
    return pending


def offset_for_leader_epoch(
    request: OffsetForLeaderEpochRequest, call: Call, state: BrokerState
) -> OffsetForLeaderEpochResponse | PendingResponse:
    requested = [
        (topic.topic, partition.partition)
        for topic in request.topics
        for partition in topic.partitions
    ]
    return state.logs.when_open(
        requested, lambda: state.run_in_steps(_offset_for_leader_epoch(request, state))
    )


def _offset_for_leader_epoch(
    request: OffsetForLeaderEpochRequest, state: BrokerState
) -> Steps[OffsetForLeaderEpochResponse]:
    def fill_result(
        requested: OffsetForLeaderEpochRequest.Topic.Partition,
        result: OffsetForLeaderEpochResponse.Topic.Partition,
        log: Log,
    ) -> None:
        # The end of the largest epoch that is not above the requested one (KIP-320).
        result.leader_epoch, result.end_offset = log.end_of_epoch(
            requested.leader_epoch
        )

    topic_type = wire.OFFSET_FOR_LEADER_EPOCH.Response.Topic
    topics = []
    chunk_counter = ChunkCounter()
    for topic in request.topics:
        results = []
        for partition in topic.partitions:
            if chunk_counter.is_over():
                yield
            result = topic_type.Partition(partition=partition.partition)
            results.append(result)
            log = log_of(topic.topic, partition.partition, partition, result, state)
            if log is not None:
                resolve_into(result, partial(fill_result, partition, result, log))
        topics.append(topic_type(topic=topic.topic, partitions=results))
    return wire.OFFSET_FOR_LEADER_EPOCH.Response(topics=topics)


def delete_records(
    request: DeleteRecordsRequest, call: Call, state: BrokerState
) -> PendingResponse:
    requested = [
        (topic.name, partition.partition_index)
        for topic in request.topics
        for partition in topic.partitions
    ]
    return state.logs.when_open(
        requested, lambda: _delete_records(request, call, state)
    )


def _delete_records(
    request: DeleteRecordsRequest, call: Call, state: BrokerState
) -> PendingResponse:
    """Delete records in the background, because the deletion syncs the log and renames
    files.
    """

    def delete(
        requested: DeleteRecordsRequest.Topic.Partition,
        result: DeleteRecordsResponse.Topic.Partition,
        log: Log,
    ) -> None:
        # A compacted topic keeps the last value of each key. Keys that are not written
        # again would be lost.
        if "delete" not in log.config.cleanup_policy:
            result.error_code = codes.POLICY_VIOLATION
            return
        if log.durability.waits:
            # Records with acks=1 are visible, and may be deleted, once they are on
            # disk.
            sync_present(log)
        # -1 means the high watermark.
        if requested.offset == -1:
            before = log.high_watermark
        else:
            before = requested.offset
        result.low_watermark = log.delete_records(before)

    topic_type = wire.DELETE_RECORDS.Response.Topic
    response = wire.DELETE_RECORDS.Response(topics=[])
    work: list[
        tuple[
            DeleteRecordsRequest.Topic.Partition,
            DeleteRecordsResponse.Topic.Partition,
            Log,
        ]
    ] = []
    for topic in request.topics:
        results = [
            topic_type.Partition(
                partition_index=entry.partition_index, low_watermark=-1
            )
            for entry in topic.partitions
        ]
        response.topics.append(topic_type(name=topic.name, partitions=results))
        for partition, result in zip(topic.partitions, results, strict=True):
            try:
                work.append(
                    (
                        partition,
                        result,
                        state.logs.log(topic.name, partition.partition_index),
                    )
                )
            except LogcoreError as error:
                result.error_code = code_of(error)

    def delete_all() -> None:
        for requested, result, log in work:
            try:
                delete(requested, result, log)
            except LogcoreError as error:
                result.error_code = code_of(error)

    pending = PendingResponse()

    def finish(error: object) -> None:
        # Fetches that wait below the new start are refused now, not at the end of their
        # waits.
        keys = [
            (topic.name, entry.partition_index)
            for topic in request.topics
            for entry in topic.partitions
        ]
        state.fetches.wake(keys, call.now_ms)
        pending.set(error if isinstance(error, Exception) else response)

    state.submit(delete_all, finish)
    return pending
