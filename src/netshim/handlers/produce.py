"""Produce: appends batches from clients to logs.

Rules (wire protocol section 5):
- Each partition of a request succeeds or fails independently.
- Batches are stored unchanged. The log validates a batch, and this module checks the
  rules of the Produce request.
- From version 12, a transaction starts at sequence 0 in each partition. If a batch is
  refused while its partition is being added to the transaction, its successor is
  refused too. If the successor were stored first, the log would refuse the first batch
  in each retry.
- In a cluster, a batch that is out of order because an earlier batch was refused gets the
  code of that earlier batch; see refused_batches.py.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from logcore import (
    CorruptBatchError,
    Log,
    LogcoreError,
    OutOfOrderSequenceError,
    Receipt,
)
from logcore.coordination.transaction_effects import TransactionError
from logcore.kernels.layout import HEADER_SIZE, TRANSACTIONAL_BIT
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import INTERNAL_TOPICS
from logcore.partition.coordinator_append import knows_producer
from logcore.recordbatch import RecordBatch
from netshim import wire
from netshim.coordinators import TransactionalProducer, TransactionErrors
from netshim.handlers.failures import code_of, message_of
from netshim.handlers.partitions import (
    ATTRIBUTES_POSITION,
    MAGIC_POSITION,
    ZSTD,
    name_leader,
)
from netshim.handlers.transactions import COORDINATOR_ERRORS, code_for_writer
from netshim.refused_batches import RETRIED
from netshim.scheduling import (
    ChunkCounter,
    CloseConnection,
    PendingResponse,
    Steps,
    resolve_with,
    without_tracebacks,
)
from netshim.state import BrokerState, Call
from netshim.wire import Buffer, codes

if TYPE_CHECKING:
    from netshim.wire.messages import (
        ProduceRequest,
        ProduceResponse,
    )

#: The result of an append.
_Outcome = Receipt | Exception | TransactionError
#: Producer id and epoch, and their position in a batch.
_PRODUCER: Final = struct.Struct(">qh")
_PRODUCER_POSITION: Final = 43
#: The sequence of the first record of a batch, and its position.
_SEQUENCE: Final = struct.Struct(">i")
_SEQUENCE_POSITION: Final = 53
#: First version in which Produce adds its partitions to the transaction, and first
#: version with TRANSACTION_ABORTABLE.
_ADDS_SINCE: Final = 12
_ABORTABLE_SINCE: Final = 11
#: First version that identifies topics by their ids.
_IDS_SINCE: Final = 13
#: First version that names the leader in a refusal.
_LEADERS_SINCE: Final = 10
_NO_ERRORS: Final[TransactionErrors] = {}
#: Refusals in which Kafka includes the log start offset, because its log has validated
#: the batch.
_HAS_LOG_START: Final = frozenset(
    (
        codes.INVALID_RECORD,
        codes.INVALID_TIMESTAMP,
        codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
        codes.INVALID_PRODUCER_EPOCH,
    )
)


def produce(
    request: ProduceRequest, call: Call, state: BrokerState
) -> ProduceResponse | PendingResponse | None:
    """Append the batches of a request.

    With acks=all, the response waits until the batches are as durable as the durability
    policy promises. A transactional request first waits until transactions are loaded,
    and from version 12 it adds its partitions to the transaction.
    """
    if call.version >= _IDS_SINCE:
        for topic in request.topic_data:
            # An unknown id gets the empty name, which no topic has.
            topic.name = state.topic_ids.name_of(topic.topic_id) or ""
    if request.transactional_id is None:
        return _produce_single_partition(request, call, state) or _produce_in_order(
            request, call, state
        )
    partitions, producers = _transactional(request)
    if not partitions:  # the request has a transactional id, but no such batch
        return _produce_in_order(request, call, state)
    # The batches of other producers are refused when they are verified.
    producer = request.transactional_id, *min(producers)
    adds = call.version >= _ADDS_SINCE and len(producers) == 1
    if state.transactions.is_prepared(producer, partitions, adds=adds):
        return _produce_in_order(request, call, state)
    _copy_records(request)
    pending = PendingResponse()
    state.transactions.prepare(
        producer,
        # A partition that does not exist is not added. Its append is refused later.
        {
            (name, number)
            for name, number in partitions
            if number in state.logs.numbers_of(name)
        },
        call.now_ms,
        lambda errors: resolve_with(
            lambda: _produce_in_order(request, call, state, errors), pending
        ),
        adds=adds,
    )
    return pending


def _transactional(
    request: ProduceRequest,
) -> tuple[set[tuple[str, int]], set[tuple[int, int]]]:
    """Return the partitions with transactional batches, and their producers.

    A producer is an id and an epoch.
    """
    partitions = set()
    producers = set()
    for topic in request.topic_data:
        for partition in topic.partition_data:
            records = partition.records
            if (
                records is None
                or len(records) < HEADER_SIZE
                or not records[ATTRIBUTES_POSITION] & TRANSACTIONAL_BIT
            ):
                continue
            partitions.add((topic.name, partition.index))
            producers.add(_PRODUCER.unpack_from(records, _PRODUCER_POSITION))
    return partitions, producers


def _produce_in_order(
    request: ProduceRequest,
    call: Call,
    state: BrokerState,
    errors: TransactionErrors = _NO_ERRORS,
) -> ProduceResponse | PendingResponse | None:
    # in_order() begins the requests of one partition in the order of their arrival.
    keys = [
        (topic.name, partition.index)
        for topic in request.topic_data
        for partition in topic.partition_data
    ]
    is_first_call = False

    def begin() -> Steps[ProduceResponse | PendingResponse | None]:
        nonlocal is_first_call
        is_first_call = True
        return _MultiPartitionProduce(request, call, state, errors).run()

    response = state.logs.in_order(keys, begin)
    # A request that has begun has already appended its batches.
    if not is_first_call:
        _copy_records(request)
    return response


def _copy_records(request: ProduceRequest) -> None:
    """Copy the records of a request that waits, because its buffer will be reused."""
    for topic in request.topic_data:
        for partition in topic.partition_data:
            if partition.records is not None:
                partition.records = bytes(partition.records)


def _produce_single_partition(
    request: ProduceRequest, call: Call, state: BrokerState
) -> ProduceResponse | PendingResponse | None:
    """Handle the usual request: one valid batch for one idle log.

    Return None for every other request, without any change. _MultiPartitionProduce
    handles these requests. It would also give the same response to the usual one.
    """
    topics = request.topic_data
    if (
        len(topics) != 1
        or len(topics[0].partition_data) != 1
        # With acks=0, there is no response.
        or request.acks not in (1, -1)
    ):
        return None
    (topic,) = topics
    (requested,) = topic.partition_data
    log = state.logs.free_log(topic.name, requested.index)
    records = requested.records or b""
    # There is no free log if another request is using it, or if it is not open.
    if (
        log is None
        or state.leadership.is_clustered
        or _check_batch(request, topic.name, records, call)[0]
        or _may_wait(log, records)
    ):
        return None
    response_type = wire.PRODUCE.Response
    result = response_type.Topic.Partition(index=requested.index, base_offset=-1)
    topic_result = response_type.Topic(
        name=topic.name, topic_id=topic.topic_id, partition_responses=[result]
    )
    response = response_type(responses=[topic_result])
    receipt = _append(log, records)
    if isinstance(receipt, Exception):
        refuse_batch(result, log, records, receipt, call, state)
        return response
    end = _accept(result, log, receipt)
    key = topic.name, requested.index
    state.leadership.appended(key, log, end, call.now_ms)
    if request.acks == 1 or state.leadership.is_committed(log, end):
        return response
    pending = PendingResponse()

    def synced(error: LogcoreError | None) -> None:
        if error is not None:
            refuse(result, code_of(error), message_of(error), call, state)
        pending.set(response)

    # Without a deadline: outside a cluster, only the disk of this broker can delay the
    # append.
    state.leadership.when_committed(key, log, end, synced)
    return pending


def _append(log: Log, records: Buffer) -> Receipt | Exception:
    try:
        return log.append_batch(records, durability="os")
    except LogcoreError as error:
        return without_tracebacks(error)


def _append_from_0(log: Log, records: Buffer) -> _Outcome:
    """Append a batch of a transaction that must start at sequence 0.

    If the log has no batch of the producer, another sequence is refused.
    """
    (sequence,) = _SEQUENCE.unpack_from(records, _SEQUENCE_POSITION)
    producer_id, _ = _PRODUCER.unpack_from(records, _PRODUCER_POSITION)
    try:
        if sequence != 0 and not knows_producer(log.host.writer, producer_id):
            return OutOfOrderSequenceError(
                f"the first batch of producer {producer_id} in this log is missing",
                expected="sequence 0",
                found=sequence,
            )
    except LogcoreError as error:
        return without_tracebacks(error)
    return _append(log, records)


def _append_verified(
    producer: TransactionalProducer,
    partition: tuple[str, int],
    state: BrokerState,
    append: Callable[[Log, Buffer], _Outcome],
    log: Log,
    records: Buffer,
) -> _Outcome:
    return state.transactions.verified(
        producer, partition, lambda: append(log, records)
    )


def _may_wait(log: Log, records: Buffer) -> bool:
    """Return whether the append may block, so that it must run outside the event loop."""
    # The largest timestamp of the batch.
    newest = int.from_bytes(records[35:43], "big", signed=True)
    return log.host.writer.may_wait(
        # Byte 43 begins the producer id, which is negative without a producer.
        len(records),
        newest,
        has_producer=records[43] < 0x80,
    )


def _accept(result: ProduceResponse.Topic.Partition, log: Log, receipt: Receipt) -> int:
    """Write the position of a batch into the result, and return its end offset."""
    result.base_offset = receipt.offset
    result.log_start_offset = log.log_start_offset
    if log.config.is_append_time:
        result.log_append_time_ms = receipt.timestamp_ms
    return receipt.last_offset + 1


def refuse(
    result: ProduceResponse.Topic.Partition,
    code: int,
    message: str | None,
    call: Call,
    state: BrokerState,
) -> None:
    result.error_code = code
    result.error_message = message
    # The batch has no offset, or clients must not rely on it.
    result.base_offset = -1
    state.journal.log_refusal(call, "Produce", code, message)


def name_leaders(response: ProduceResponse, call: Call, state: BrokerState) -> None:
    """Add the leaders of the partitions that this broker does not lead to a response."""
    # Earlier versions have no field for it.
    if call.version < _LEADERS_SINCE:
        return
    for topic in response.responses:
        for part in topic.partition_responses:
            if part.error_code == codes.NOT_LEADER_OR_FOLLOWER:
                name_leader(part, topic.name, part.index, response, call, state)


def record_refused_batch(
    state: BrokerState, key: Key, records: Buffer, code: int, now_ms: int
) -> None:
    """In a cluster, record a refused batch of an idempotent producer."""
    if (
        code in RETRIED
        and state.leadership.is_clustered
        and len(records) >= HEADER_SIZE
        and records[MAGIC_POSITION] == 2
    ):
        producer_id, epoch = _PRODUCER.unpack_from(records, _PRODUCER_POSITION)
        # Only an idempotent producer numbers its batches.
        if producer_id >= 0:
            (sequence,) = _SEQUENCE.unpack_from(records, _SEQUENCE_POSITION)
            state.refused_batches.add(key, producer_id, epoch, sequence, code, now_ms)


def refuse_batch(
    result: ProduceResponse.Topic.Partition,
    log: Log,
    records: Buffer,
    error: Exception,
    call: Call,
    state: BrokerState,
) -> None:
    """Write the error of a batch that the log refused into the result."""
    refuse(result, _code_of_batch(error, records), message_of(error), call, state)
    if result.error_code in _HAS_LOG_START:
        result.log_start_offset = log.log_start_offset
    # The records of the batch that are invalid (KIP-467).
    record_error = wire.PRODUCE.Response.Topic.Partition.RecordError
    refused = getattr(error, "record_errors", ())
    result.record_errors = [
        record_error(batch_index=at, batch_index_error_message=reason)
        for at, reason in refused
    ]


class _MultiPartitionProduce:
    """The partitions of one request, and the response that they complete.

        start -> append, or queue -> handle_outcome -> wait for the disk -> finish
          |                            |              |              ^
          +----------- refuse ---------+--------------+--------------+

    Each partition reaches finish() once. The last one sets the response.
    """

    def __init__(
        self,
        request: ProduceRequest,
        call: Call,
        state: BrokerState,
        errors: TransactionErrors,
    ) -> None:
        #: Partitions that the transaction of the request does not include.
        self.errors = errors
        self.request = request
        self.call = call
        self.state = state
        self.response = wire.PRODUCE.Response(responses=[])
        self.pending = PendingResponse()
        #: Partitions without a result, plus 1 until all of them are started.
        self._remaining = 1
        #: Whether a partition was refused. With acks=0, this closes the connection.
        self._has_failed = False

    def run(self) -> Steps[ProduceResponse | PendingResponse | None]:
        """Start each partition, in chunks. Return the response, or a PendingResponse."""
        topic_type = wire.PRODUCE.Response.Topic
        chunk_counter = ChunkCounter()
        are_copied = False
        for topic in self.request.topic_data:
            # If the request names a partition twice, the last entry counts.
            requested_once = {
                partition.index: partition for partition in topic.partition_data
            }
            results = [
                topic_type.Partition(index=index, base_offset=-1)
                for index in requested_once
            ]
            self.response.responses.append(
                topic_type(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partition_responses=results,
                )
            )
            for requested, result in zip(requested_once.values(), results, strict=True):
                if chunk_counter.is_over():
                    if not are_copied:
                        _copy_records(self.request)
                        are_copied = True
                    yield
                # Before the start, because the partition may be finished at once.
                self._remaining += 1
                self.start(topic, requested, result)
        self.finish()
        if not self.pending.is_set:
            return self.pending
        # A request with acks=0 has failed.
        if isinstance(self.pending.value, CloseConnection):
            raise self.pending.value
        value: ProduceResponse | None = self.pending.value
        return value

    def start(
        self,
        topic: ProduceRequest.Topic,
        requested: ProduceRequest.Topic.Partition,
        result: ProduceResponse.Topic.Partition,
    ) -> None:
        """Append a batch, or queue it after the earlier work on its log."""
        # Step 1: check the request, and find the log.
        state = self.state
        if self.request.acks not in (0, 1, -1):
            self.refuse(result, codes.INVALID_REQUIRED_ACKS, None)
            return
        if self.call.version >= _IDS_SINCE and not _is_still(topic, state):
            self.refuse(result, codes.UNKNOWN_TOPIC_ID, None)
            return
        records = requested.records or b""
        try:
            log = state.logs.log(topic.name, requested.index)
            if self.request.acks == -1:
                state.leadership.check_in_sync((topic.name, requested.index))
            code, message = _check_batch(self.request, topic.name, records, self.call)
        except LogcoreError as error:
            self._record_refused((topic.name, requested.index), records, code_of(error))
            self.refuse(result, code_of(error), message_of(error))
            return
        if code:
            self.refuse(result, code, message)
            return
        # Step 2: verify a transaction.
        key = topic.name, requested.index
        append: Callable[[Log, Buffer], _Outcome] = _append
        if records[ATTRIBUTES_POSITION] & TRANSACTIONAL_BIT:
            if self.call.version >= _ADDS_SINCE:
                # Since version 12, the request itself adds its partitions to the
                # transaction (KIP-890).
                append = _append_from_0
            producer_id, epoch = _PRODUCER.unpack_from(records, _PRODUCER_POSITION)
            producer = self.request.transactional_id or "", producer_id, epoch
            if key in self.errors:
                self.refuse(result, *_error_code_and_text(self.errors[key], self.call))
                return
            if state.is_shared:
                # Other threads of this process append markers, so the transaction is
                # verified in the same step as the append.
                append = partial(_append_verified, producer, key, state, append)
            else:
                # The batch enters the queue of its log in this step, so no marker comes
                # between the check and the append.
                refused = state.transactions.verified(producer, key, lambda: None)
                if refused is not None:
                    self.refuse(result, *_error_code_and_text(refused, self.call))
                    return
        followed = 0
        if state.refused_batches:
            followed = self.code_of_refused(topic.name, requested.index, records)
            # Its predecessor was refused, so a producer that is unknown to the log must
            # begin at 0.
            if followed and append is _append:
                append = _append_from_0
        # Step 3: append, outside of the event loop if that may block.
        # Without earlier work, the order is kept if the batch is appended here.
        if not state.work.is_busy(key) and not _may_wait(log, records):
            receipt = append(log, records)
            self.handle_outcome(topic.name, log, records, result, receipt, followed)
            return
        copy = bytes(records)  # the buffer of the connection will be reused
        state.work.submit(
            key,
            lambda: append(log, copy),
            lambda receipt: self.handle_outcome(
                topic.name, log, copy, result, receipt, followed
            ),
        )

    def handle_outcome(
        self,
        topic: str,
        log: Log,
        records: Buffer,
        result: ProduceResponse.Topic.Partition,
        receipt: _Outcome,
        followed: int,
    ) -> None:
        """Record the outcome of an append. With acks=all, wait until it is committed.

        `followed` is the code of a refused batch that this one follows, or 0.
        """
        if followed:
            producer_id, _ = _PRODUCER.unpack_from(records, _PRODUCER_POSITION)
            self.state.refused_batches.count_following(
                (topic, result.index), producer_id
            )
            if isinstance(receipt, OutOfOrderSequenceError):
                self.refuse(
                    result, followed, "an earlier batch of the producer was refused"
                )
                return
        if isinstance(receipt, TransactionError):
            self.refuse(result, *_error_code_and_text(receipt, self.call))
            return
        if isinstance(receipt, Exception):
            self._has_failed = True
            refuse_batch(result, log, records, receipt, self.call, self.state)
            self._record_refused((topic, result.index), records, result.error_code)
            self.finish()
            return
        end = _accept(result, log, receipt)
        key = topic, result.index
        leadership = self.state.leadership
        leadership.appended(key, log, end, self.call.now_ms)
        if self.request.acks != -1 or leadership.is_committed(log, end):
            self.finish()
            return
        # After the deadline the batch may still be committed. The client gets a
        # timeout.
        deadline_ms = self.call.now_ms + max(0, self.request.timeout_ms)
        leadership.when_committed(
            key, log, end, lambda error: self.handle_commit(result, error), deadline_ms
        )

    def handle_commit(
        self, result: ProduceResponse.Topic.Partition, error: LogcoreError | None
    ) -> None:
        """Record that an append was committed, or why that is unknown."""
        if error is None:
            self.finish()
        else:
            self.refuse(result, code_of(error), message_of(error))

    def _record_refused(self, key: Key, records: Buffer, code: int) -> None:
        record_refused_batch(self.state, key, records, code, self.call.now_ms)

    def code_of_refused(self, topic: str, number: int, records: Buffer) -> int:
        """Return the code of a refused batch that this one follows, or 0."""
        producer_id, epoch = _PRODUCER.unpack_from(records, _PRODUCER_POSITION)
        (sequence,) = _SEQUENCE.unpack_from(records, _SEQUENCE_POSITION)
        return self.state.refused_batches.code_for(
            (topic, number), producer_id, epoch, sequence, self.call.now_ms
        )

    def refuse(
        self,
        result: ProduceResponse.Topic.Partition,
        code: int,
        message: str | None,
    ) -> None:
        """Finish a partition with an error."""
        self._has_failed = True
        refuse(result, code, message, self.call, self.state)
        self.finish()

    def finish(self) -> None:
        """Count a partition, and set the answer after the last one."""
        self._remaining -= 1
        if self._remaining:
            return
        if self.request.acks:
            # Only refused partitions name a leader.
            if self._has_failed:
                name_leaders(self.response, self.call, self.state)
            self.pending.set(self.response)
        elif self._has_failed:
            # As in Kafka: a producer with acks=0 gets no responses.
            self.pending.set(CloseConnection("a produce request with acks=0 failed"))
        else:
            self.pending.set(None)


def _is_still(topic: ProduceRequest.Topic, state: BrokerState) -> bool:
    """Return whether the topic still has this id.

    It may have been deleted and created again while the request waited.
    """
    return (
        topic.name in state.logdir
        and state.topic_ids.id_of(topic.name) == topic.topic_id
    )


def _check_batch(
    request: ProduceRequest, topic: str, records: Buffer, call: Call
) -> tuple[int, str | None]:
    """Check the rules of the Produce request that the log does not check.

    Return (code, message), with code 0 if the batch is valid. Bytes that are no
    complete batch get a code that clients do not retry, because they would send the
    same bytes again.
    """
    if topic in INTERNAL_TOPICS and call.client_id != "__admin_client":
        return codes.INVALID_TOPIC_EXCEPTION, f"{topic} is written by the broker alone"
    size = len(records)
    # Most requests contain exactly one batch of magic 2. Only others are parsed.
    if (
        size < HEADER_SIZE
        or records[MAGIC_POSITION] != 2
        or int.from_bytes(records[8:12], "big") + 12 != size
    ):
        refusal = _single_batch_error(records)
        if refusal is not None:
            return codes.INVALID_RECORD, refusal
    # As in Kafka, the broker assigns the offsets.
    if any(records[:8]):
        return codes.INVALID_RECORD, "expected base offset 0"
    if (
        records[ATTRIBUTES_POSITION] & TRANSACTIONAL_BIT
        and request.transactional_id is None
    ):
        # Its transaction could never be ended, and readers would wait for its end.
        return (
            codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            "a transactional batch needs a transactional id",
        )
    if records[ATTRIBUTES_POSITION] & 7 == ZSTD and call.version < 7:
        return codes.UNSUPPORTED_COMPRESSION_TYPE, "zstd needs Produce version 7"
    return 0, None


def _error_code_and_text(error: TransactionError, call: Call) -> tuple[int, str | None]:
    """Return (code, message) for a transaction error of a write.

    The producer has no open transaction, or the transaction lacks the partition.
    """
    if error in COORDINATOR_ERRORS:
        # Old clients retry this code.
        return (
            codes.NOT_ENOUGH_REPLICAS,
            "the coordinator of the transaction is not available",
        )
    if error is TransactionError.CONCURRENT_TRANSACTIONS and call.version < _ADDS_SINCE:
        return (
            codes.NOT_ENOUGH_REPLICAS,
            "the last transaction of this id has not ended",
        )
    code = code_for_writer(error, call.version, _ABORTABLE_SINCE)
    if error is TransactionError.TRANSACTION_ABORTABLE:
        return code, "Partition was not added to the transaction"
    return code, None


def _single_batch_error(records: Buffer) -> str | None:
    """Return why bytes are not exactly one batch, or None if they are.

    An incomplete batch after the first one is dropped, as in Kafka.
    """
    try:
        batch = RecordBatch.parse(records)
        if batch is None:
            return f"expected exactly one batch, found no complete batch in {len(records)} bytes"
        if batch.magic != 2:
            return f"expected batches of magic 2, found {batch.magic}"
        if RecordBatch.parse(records, batch.size_bytes) is not None:
            return "expected exactly one batch, found more"
    except CorruptBatchError as error:
        return message_of(error)
    return None


def _code_of_batch(error: Exception, records: Buffer) -> int:
    """Return the error code of a batch that the log refused.

    If the CRC of an unreadable batch is valid, a retry would send the same bytes. It
    therefore gets a code that clients do not retry.
    """
    if isinstance(error, CorruptBatchError):
        with contextlib.suppress(LogcoreError):
            batch = RecordBatch.parse(records)
            if batch is not None:
                batch.verify()
                return codes.INVALID_RECORD
    return code_of(error)
