"""Produce, Fetch and what asks for offsets: requests about the records of partitions.

Rules (wire protocol section 5):
- Each partition of a request succeeds or fails by itself.
- Produced batches are stored as they came; fetched ones leave as they are stored, as views.
- A Fetch that has nothing to say yet waits for an append or its time, whichever is first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from logcore import CorruptBatchError, Log, LogcoreError
from logcore.kernels.layout import HEADER_SIZE, TRANSACTIONAL_BIT
from logcore.recordbatch import RecordBatch
from netshim import wire
from netshim.handlers.failures import code_of, message_of
from netshim.state import Answer, Call, CloseConnection, State, answer_with
from netshim.wire import codes

_PRODUCE: Final = wire.PRODUCE
_MAGIC_POSITION: Final = 16
_ATTRIBUTES_POSITION: Final = 22
_ZSTD: Final = 4
#: A fetch waits no longer than this, whatever its client would bear: a connection that is gone must be noticed.
_MAX_WAIT_MS: Final = 30_000
#: A consumer that reads at the end of a log is so little behind that walking is cheaper than another thread.
_WALKED_AT_ONCE: Final = 1_000
#: Written by the broker itself; a client that wrote there would change what groups have committed.
INTERNAL_TOPICS: Final = ("__consumer_offsets", "__transaction_state")


def produce(request: Any, call: Call, state: State) -> Any:
    """Appends; with acks=all the answer waits for what the directory's durability policy promises."""
    keys = [(topic.name, partition.index) for topic in request.topic_data for partition in topic.partition_data]
    has_begun = False

    def begin() -> Any:
        nonlocal has_begun
        has_begun = True
        return _produce(request, call, state)

    response = state.in_order(keys, begin)
    if not has_begun:
        for topic in request.topic_data:
            for partition in topic.partition_data:
                _keep(partition)
    return response


def _keep(partition: Any) -> None:
    """Copies the records of a request that waits: they lie in a buffer that will hold other requests."""
    if partition.records is not None:
        partition.records = bytes(partition.records)


def _produce(request: Any, call: Call, state: State) -> Any:
    response_type = _PRODUCE.Response
    partition_type = response_type.Topic.Partition
    acks = request.acks
    response = response_type(responses=[])
    answer = Answer()
    left = 1  # partitions that are not done with, and this call
    failed = False

    def fail(result: Any, code: int, message: str | None) -> None:
        nonlocal failed
        failed = True
        result.error_code = code
        result.error_message = message
        result.base_offset = -1
        state.journal.refused(call, "Produce", code, message)

    def done() -> None:
        nonlocal left
        left -= 1
        if left:
            return
        if acks:
            answer.set(response)
        elif failed:  # Kafka: the only way to tell a producer that hears no answers
            answer.set(CloseConnection("a produce request with acks=0 failed"))
        else:
            answer.set(None)

    def synced(result: Any, error: LogcoreError | None) -> None:
        if error is not None:
            fail(result, code_of(error), message_of(error))
        done()

    def stored(topic: str, log: Log, records: Any, result: Any, receipt: Any) -> None:
        if isinstance(receipt, Exception):
            fail(result, _code_of_batch(receipt, records), message_of(receipt))
            refused = getattr(receipt, "record_errors", ())
            result.record_errors = [
                partition_type.RecordError(batch_index=at, batch_index_error_message=why) for at, why in refused
            ]
            done()
            return
        result.base_offset = receipt.offset
        result.log_start_offset = log.log_start_offset
        if log.config.is_append_time:
            result.log_append_time_ms = receipt.timestamp_ms
        end = receipt.last_offset + 1
        state.appended(topic, result.index, log, end, call.now_ms)
        if acks == -1 and log.durability.waits and log.durable_end_offset < end:
            state.syncs.when_durable(log, end, lambda error: synced(result, error))
        else:
            done()

    def store(topic: str, asked: Any, result: Any) -> None:
        try:
            if acks not in (0, 1, -1):
                fail(result, codes.INVALID_REQUIRED_ACKS, None)
                done()
                return
            log = state.log(topic, asked.index)
            code, message = _check_batch(request, topic, asked.records, call)
        except LogcoreError as error:
            fail(result, code_of(error), message_of(error))
            done()
            return
        if code:
            fail(result, code, message)
            done()
            return
        head = memoryview(asked.records)
        newest, has_producer = int.from_bytes(head[35:43], "big", signed=True), len(head) > 43 and head[43] < 0x80
        key = topic, asked.index
        if state.has_turns(key) or log.may_wait(len(head), newest, has_producer=has_producer):
            _keep(asked)
            state.in_turn(
                key,
                lambda: log.append_batch(asked.records, durability="os"),
                lambda receipt: stored(topic, log, asked.records, result, receipt),
            )
            return
        try:
            receipt: Any = log.append_batch(asked.records, durability="os")
        except LogcoreError as error:
            receipt = error
        stored(topic, log, asked.records, result, receipt)

    for topic in request.topic_data:
        asked_once = {partition.index: partition for partition in topic.partition_data}  # the last one counts
        results = [partition_type(index=index, base_offset=-1) for index in asked_once]
        response.responses.append(response_type.Topic(name=topic.name, partition_responses=results))
        for partition, result in zip(asked_once.values(), results, strict=True):
            left += 1
            store(topic.name, partition, result)
    done()
    if not answer.is_set:
        return answer
    if isinstance(answer.value, CloseConnection):
        raise answer.value
    return answer.value


def _check_batch(request: Any, topic: str, records: Any, call: Call) -> tuple[int, str | None]:
    """What the Produce request asks beyond what the log checks: (code, message), code 0 for none.

    What is no whole batch gets a code that clients do not retry, for it would not become better.
    """
    if topic in INTERNAL_TOPICS and call.client_id != "__admin_client":
        return codes.INVALID_TOPIC_EXCEPTION, f"{topic} is written by the broker alone"
    if records is None:
        records = b""
    size = len(records)
    # Most are exactly one batch of magic 2; only others are looked at closely.
    if size < HEADER_SIZE or records[_MAGIC_POSITION] != 2 or int.from_bytes(records[8:12], "big") + 12 != size:
        refusal = _why_not_one_batch(records)
        if refusal is not None:
            return codes.INVALID_RECORD, refusal
    if any(records[:8]):
        return codes.INVALID_RECORD, "expected base offset 0"
    if records[_ATTRIBUTES_POSITION] & TRANSACTIONAL_BIT:  # nobody could end it, and readers would wait for that
        if request.transactional_id is None:
            return codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "a transactional batch needs a transactional id"
        return codes.INVALID_PRODUCER_ID_MAPPING, "there is no transaction of this id; transactions are not served"
    if records[_ATTRIBUTES_POSITION] & 7 == _ZSTD and call.version < 7:
        return codes.UNSUPPORTED_COMPRESSION_TYPE, "zstd needs Produce version 7"
    return 0, None


def _why_not_one_batch(records: Any) -> str | None:
    """What is wrong with what should be one batch. An incomplete one behind it is dropped, as in Kafka."""
    try:
        batch = RecordBatch.parse(records)
        if batch is None:
            return f"expected exactly one batch, found no whole one in {len(records)} bytes"
        if batch.magic != 2:
            return f"expected batches of magic 2, found {batch.magic}"
        if RecordBatch.parse(records, batch.size_bytes) is not None:
            return "expected exactly one batch, found more"
    except CorruptBatchError as error:
        return message_of(error)
    return None


def _code_of_batch(error: Exception, records: Any) -> int:
    """As code_of(). A batch that came as it was sent and cannot be read will not be better when it is sent again."""
    if isinstance(error, CorruptBatchError):
        with contextlib.suppress(LogcoreError):
            batch = RecordBatch.parse(records)
            if batch is not None:
                batch.verify()
                return codes.INVALID_RECORD
    return code_of(error)


# -- fetching ------------------------------------------------------------------------------------------------------


def fetch(request: Any, call: Call, state: State, *, opened: bool = False, looked: bool = False) -> Any:
    """Stored batches of the partitions asked for; waits up to max_wait_ms for min_bytes of them.

    Sessions (KIP-227) are declined by answering session id 0, which every client copes with.
    """
    response_type = wire.FETCH.Response
    asked = [
        (topic.topic if call.version < 13 else state.topic_of(topic.topic_id) or "", partition.partition)
        for topic in request.topics
        for partition in topic.partitions
    ]
    if not opened:
        return state.when_open(asked, lambda: fetch(request, call, state, opened=True))
    if request.isolation_level == 1 and not looked:
        later = _when_transactions_are_known(
            asked, lambda: fetch(request, call, state, opened=True, looked=True), state
        )
        if later is not None:
            return later
    if request.session_id and request.session_epoch > 0:
        return response_type(error_code=codes.FETCH_SESSION_ID_NOT_FOUND)
    wanted = []
    seen: set[tuple[str | None, int]] = set()
    for topic in request.topics:
        name = topic.topic if call.version < 13 else state.topic_of(topic.topic_id)
        for partition in topic.partitions:
            if (name, partition.partition) not in seen or name is None:  # once is enough
                seen.add((name, partition.partition))
                wanted.append((topic, name, partition))
    response, size, settled = _collect(request, wanted, call, state)
    deadline_ms = call.now_ms + min(request.max_wait_ms, _MAX_WAIT_MS)
    if settled or not wanted or request.max_wait_ms <= 0 or size >= min(request.min_bytes, request.max_bytes):
        return response
    return _park(request, wanted, call, state, deadline_ms, size)


def _when_transactions_are_known(
    asked: list[tuple[str, int]], handle: Callable[[], Any], state: State
) -> Answer | None:
    """None when they are, nearly. Else the answer that handle() gives once they are.

    A read_committed look at a log walks all that was not walked before, which is not for the broker's thread.
    """
    logs = []
    for name, number in asked:
        try:
            log = state.log(name, number)
        except LogcoreError:
            continue
        if log.unwalked_offsets > _WALKED_AT_ONCE:
            logs.append(log)
    if not logs:
        return None
    answer = Answer()

    def look() -> None:
        for log in logs:
            with contextlib.suppress(LogcoreError):  # the request itself will say so
                _ = log.last_stable_offset

    state.submit(look, lambda _: answer_with(handle, answer))
    return answer


def _park(request: Any, wanted: list[Any], call: Call, state: State, deadline_ms: int, size: int) -> Answer:
    answer = Answer()
    keys = [(name, partition.partition) for _, name, partition in wanted if name is not None]
    enough = min(request.min_bytes, request.max_bytes)
    missing = enough - size
    extent = _extent(keys, state)

    def forget() -> None:
        state.fetches.remove(keys, look)
        state.timers.cancel(timer)

    def finish(response: Any) -> None:
        forget()
        answer.set(response)

    def look(now_ms: int) -> None:
        nonlocal missing, extent
        if missing > 1 and now_ms < deadline_ms and not state.is_stopping:
            now = _extent(keys, state)
            if now is not None and extent is not None and now[1] == extent[1] and 0 <= now[0] - extent[0] < missing:
                return  # not enough can have come, and nothing has gone: no need to gather what there is
        try:
            response, size, settled = _collect(request, wanted, call, state)
        except Exception as error:  # it is not for whoever woke us
            finish(error)
            return
        if settled or now_ms >= deadline_ms or size >= enough:
            finish(response)
        else:
            missing = enough - size
            extent = _extent(keys, state)

    timer = state.timers.at(deadline_ms, look)
    state.fetches.add(keys, look)
    answer.when_cancelled(forget)
    return answer


def _extent(keys: list[tuple[str, int]], state: State) -> tuple[int, int] | None:
    """(bytes ever appended to some partitions, a number that changes when records of one are deleted or truncated);
    None when one of them is not there.
    """
    written = 0
    taken = 0
    for topic, partition in keys:
        log = state.logdir.opened(topic, partition)
        if log is None:
            return None
        written += log.written_bytes
        taken += log.log_start_offset + log.times_truncated
    return written, taken


def _collect(request: Any, wanted: list[Any], call: Call, state: State) -> tuple[Any, int, bool]:
    """(response, bytes of records in it, whether it has to go out at once)."""
    response_type = wire.FETCH.Response
    topic_type, partition_type = response_type.Topic, response_type.Topic.Partition
    topics: list[Any] = []
    total, settled = 0, state.is_stopping
    left = min(request.max_bytes, state.settings.fetch_max_bytes)
    committed = request.isolation_level == 1
    current = None
    for asked, name, partition in wanted:
        if asked is not current:
            current = asked
            topics.append(topic_type(topic=asked.topic, topic_id=asked.topic_id, partitions=[]))
        part = partition_type(partition_index=partition.partition, high_watermark=-1, records=b"")
        topics[-1].partitions.append(part)
        try:
            # A topic that was deleted while the request waited is gone, even if there is a new one of that name.
            if name is None or (
                call.version >= 13 and (name not in state.logdir or state.topic_id(name) != asked.topic_id)
            ):
                part.error_code = codes.UNKNOWN_TOPIC_ID
                settled = True
                continue
            log = state.log(name, partition.partition)
            part.error_code = _check_epoch(log, partition.current_leader_epoch)
            if part.error_code:
                settled = True
                continue
            if partition.last_fetched_epoch >= 0:
                epoch, end = log.end_of_epoch(partition.last_fetched_epoch)
                if end < 0 or partition.fetch_offset < log.log_start_offset:
                    part.error_code = codes.OFFSET_OUT_OF_RANGE
                    settled = True
                    continue
                if epoch < partition.last_fetched_epoch or end < partition.fetch_offset:
                    part.diverging_epoch = partition_type.DivergingEpoch(epoch=epoch, end_offset=end)
                    part.high_watermark, part.log_start_offset = log.high_watermark, log.log_start_offset
                    part.last_stable_offset = log.last_stable_offset if committed else log.high_watermark
                    settled = True
                    continue
            offset = partition.fetch_offset
            start, high_watermark = log.log_start_offset, log.high_watermark
            stable = log.last_stable_offset if committed else high_watermark
            if offset < stable or not start <= offset <= log.log_end_offset:
                most = min(left, partition.partition_max_bytes)
                pieces = log.stored(offset, stable, max_bytes=most, at_least_one=not total)
                size = sum(map(len, pieces))
                if size and call.version < 10 and _has_zstd(pieces):
                    part.error_code = codes.UNSUPPORTED_COMPRESSION_TYPE
                    settled = True
                    continue
                if size:
                    part.records = pieces if len(pieces) > 1 else pieces[0]
                    total += size
                    left -= size
            part.high_watermark, part.last_stable_offset, part.log_start_offset = high_watermark, stable, start
            if committed:
                part.aborted_transactions = [
                    partition_type.AbortedTransaction(producer_id=producer_id, first_offset=first)
                    for producer_id, first in (log.aborted_transactions(offset, stable) if part.records else ())
                ]
            else:
                part.aborted_transactions = None
        except LogcoreError as error:
            part.error_code = code_of(error)
            settled = True
            state.journal.refused(call, "Fetch", part.error_code, message_of(error))
    return response_type(responses=topics), total, settled


def _check_epoch(log: Log, leader_epoch: int) -> int:
    """What a client's idea of the leader epoch says about its metadata."""
    if leader_epoch < 0 or leader_epoch == log.leader_epoch:
        return codes.NONE
    return codes.FENCED_LEADER_EPOCH if leader_epoch < log.leader_epoch else codes.UNKNOWN_LEADER_EPOCH


def _has_zstd(pieces: list[memoryview]) -> bool:
    """Whether a batch among whole ones is compressed with zstd, which clients before Fetch 10 cannot read."""
    for piece in pieces:
        at = 0
        while at + _ATTRIBUTES_POSITION < len(piece):
            if piece[at + _MAGIC_POSITION] == 2 and piece[at + _ATTRIBUTES_POSITION] & 7 == _ZSTD:
                return True
            at += 12 + int.from_bytes(piece[at + 8 : at + 12], "big")
    return False


# -- offsets -------------------------------------------------------------------------------------------------------

_LATEST: Final = -1
_EARLIEST: Final = -2
_MAX_TIMESTAMP: Final = -3
_EARLIEST_LOCAL: Final = -4
_LATEST_TIERED: Final = -5
#: From which version of ListOffsets on a special timestamp may be asked.
_SINCE: Final = {_LATEST: 0, _EARLIEST: 0, _MAX_TIMESTAMP: 7, _EARLIEST_LOCAL: 8, _LATEST_TIERED: 9}


def list_offsets(request: Any, call: Call, state: State) -> Any:
    asked = [(topic.name, each.partition_index) for topic in request.topics for each in topic.partitions]
    return state.when_open(asked, lambda: _list_offsets(request, call, state, asked))


def _when_shown(asked: list[tuple[str, int]], handle: Callable[[], Any], state: State) -> Answer | None:
    """None when readers may see all that was written. Else the answer that handle() gives once what is written now is
    on disk: under `group` what came with acks=1 would be missing for up to 100 ms.
    """
    unsynced = []
    for name, number in dict.fromkeys(asked):
        with contextlib.suppress(LogcoreError):  # the request itself will say so
            log = state.log(name, number)
            if log.durability.waits and log.high_watermark < log.log_end_offset:
                unsynced.append(log)
    if not unsynced:
        return None
    answer = Answer()
    left = len(unsynced)

    def done(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            answer_with(handle, answer)

    for log in unsynced:
        state.syncs.when_durable(log, log.log_end_offset, done)
    return answer


def _list_offsets(
    request: Any,
    call: Call,
    state: State,
    asked: list[tuple[str, int]],
    *,
    shown: bool = False,
    looked: bool = False,
) -> Any:
    if not shown:
        later = _when_shown(asked, lambda: _list_offsets(request, call, state, asked, shown=True), state)
        if later is not None:
            return later
    if request.isolation_level == 1 and not looked:
        later = _when_transactions_are_known(
            asked, lambda: _list_offsets(request, call, state, asked, shown=True, looked=True), state
        )
        if later is not None:
            return later

    def answer(asked: Any, result: Any, log: Log) -> None:
        timestamp = asked.timestamp
        if timestamp < 0 and _SINCE.get(timestamp, 99) > call.version:
            result.error_code = codes.UNSUPPORTED_VERSION
            return
        result.leader_epoch = log.leader_epoch
        end = log.last_stable_offset if request.isolation_level == 1 else log.high_watermark
        if timestamp == _LATEST:
            result.offset = end
        elif timestamp in (_EARLIEST, _EARLIEST_LOCAL):
            result.offset = log.log_start_offset
        elif timestamp == _LATEST_TIERED:
            result.leader_epoch = -1
        elif timestamp == _MAX_TIMESTAMP:
            newest = log.newest()
            if newest is not None and newest[0] < end:
                result.offset, result.timestamp = newest
        else:
            offset = log.offset_for_timestamp(timestamp)
            if offset is not None and offset < end:
                result.offset, result.timestamp = offset, log.get(offset).timestamp_ms
        if result.offset < 0:
            result.leader_epoch = -1

    seen: set[tuple[str, int]] = set()
    twice: set[tuple[str, int]] = set()
    for topic in request.topics:
        for partition in topic.partitions:
            key = topic.name, partition.partition_index
            (twice if key in seen else seen).add(key)
    topic_type = wire.LIST_OFFSETS.Response.Topic
    response = wire.LIST_OFFSETS.Response(topics=[])
    work: list[Callable[[], None]] = []
    reads = False
    for topic in request.topics:
        results = []
        for partition in topic.partitions:
            result = topic_type.Partition(partition_index=partition.partition_index)
            results.append(result)
            if (topic.name, partition.partition_index) in twice:
                result.error_code = codes.INVALID_REQUEST
                continue
            log = _log_of(topic.name, partition.partition_index, partition, result, state)
            if log is not None:
                work.append(partial(_answer_into, result, partial(answer, partition, result, log)))
                reads = reads or partition.timestamp >= 0 or partition.timestamp == _MAX_TIMESTAMP
        response.topics.append(topic_type(name=topic.name, partitions=results))

    def answer_all() -> Any:
        for step in work:
            step()
        return response

    if not reads:
        return answer_all()
    later = Answer()
    state.submit(answer_all, later.set)  # a search by time reads indexes and batches
    return later


def _log_of(topic: str, number: int, asked: Any, result: Any, state: State) -> Log | None:
    """The log of a partition; None, with the code in the result, when it cannot be asked."""
    try:
        log = state.log(topic, number)
    except LogcoreError as error:
        result.error_code = code_of(error)
        return None
    result.error_code = _check_epoch(log, getattr(asked, "current_leader_epoch", -1))
    return None if result.error_code else log


def _answer_into(result: Any, step: Callable[[], None]) -> None:
    """Fills in one partition's result, or the code of what went wrong."""
    try:
        step()
    except LogcoreError as error:
        result.error_code = code_of(error)


def offset_for_leader_epoch(request: Any, call: Call, state: State) -> Any:
    asked = [(topic.topic, each.partition) for topic in request.topics for each in topic.partitions]
    return state.when_open(asked, lambda: _offset_for_leader_epoch(request, state))


def _offset_for_leader_epoch(request: Any, state: State) -> Any:
    def answer(asked: Any, result: Any, log: Log) -> None:
        result.leader_epoch, result.end_offset = log.end_of_epoch(asked.leader_epoch)

    topic_type = wire.OFFSET_FOR_LEADER_EPOCH.Response.Topic
    topics = []
    for topic in request.topics:
        results = []
        for partition in topic.partitions:
            result = topic_type.Partition(partition=partition.partition)
            results.append(result)
            log = _log_of(topic.topic, partition.partition, partition, result, state)
            if log is not None:
                _answer_into(result, partial(answer, partition, result, log))
        topics.append(topic_type(topic=topic.topic, partitions=results))
    return wire.OFFSET_FOR_LEADER_EPOCH.Response(topics=topics)


def delete_records(request: Any, call: Call, state: State) -> Any:
    asked = [(topic.name, each.partition_index) for topic in request.topics for each in topic.partitions]
    return state.when_open(asked, lambda: _delete_records(request, call, state))


def _delete_records(request: Any, call: Call, state: State) -> Answer:
    """What is deleted has to be on disk, and deleting renames files: in the background."""

    def delete(asked: Any, result: Any, log: Log) -> None:
        if "delete" not in log.config.cleanup_policy:
            result.error_code = codes.POLICY_VIOLATION
            return
        if log.durability.waits:  # what was written with acks=1 is shown when it is on disk, and may be deleted then
            log.flush()
        before = log.high_watermark if asked.offset == -1 else asked.offset
        result.low_watermark = log.delete_records(before)

    topic_type = wire.DELETE_RECORDS.Response.Topic
    response = wire.DELETE_RECORDS.Response(topics=[])
    work: list[tuple[Any, Any, Log]] = []
    for topic in request.topics:
        results = [
            topic_type.Partition(partition_index=each.partition_index, low_watermark=-1) for each in topic.partitions
        ]
        response.topics.append(topic_type(name=topic.name, partitions=results))
        for partition, result in zip(topic.partitions, results, strict=True):
            try:
                work.append((partition, result, state.log(topic.name, partition.partition_index)))
            except LogcoreError as error:
                result.error_code = code_of(error)

    def delete_all() -> None:
        for asked, result, log in work:
            try:
                delete(asked, result, log)
            except LogcoreError as error:
                result.error_code = code_of(error)

    answer = Answer()

    def done(error: Any) -> None:
        keys = [(topic.name, each.partition_index) for topic in request.topics for each in topic.partitions]
        state.fetches.wake(keys, call.now_ms)
        answer.set(error if isinstance(error, Exception) else response)

    state.submit(delete_all, done)
    return answer
