"""Writes the batches of a producer: their order, retries and outcomes.

Rules (clients reference 2.3, 2.4, 2.8):
- Only one round runs at a time. A round writes the ready batches of every partition.
  Then it syncs each log once, if acks requires durability, and sets the outcomes.
- A batch is compressed once, at its first attempt. Retries write the same bytes with
  the same producer id and sequence, so that the log can distinguish a retry from a new
  batch. buffer_pool.py states when the memory of the bytes is reused.
- After a failed write or sync, the log is opened again, at most once in
  retry_backoff_max_ms. If the log contains a batch, the batch is complete. Otherwise,
  the batch is written again. Without idempotence, the log cannot be searched for the
  batch, so the batch fails.
- If the log refuses a batch because of single records, the batch is split until only
  these records fail.
- If a batch fails and may be stored, its partition gets a new producer id. The
  following batches begin at sequence 0.
- A partition is added to the transaction before its first batch is written. After a
  failure, no further batch of the transaction is written.

Queues are in accumulator.py, callbacks in futures.py. This module starts no thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from typing import Final, NamedTuple

import attrs

from logcore.directory.interface import ClientDirectory
from logcore.errors import (
    DeliveryTimeoutError,
    DiskFullError,
    DurabilityUnknownError,
    InvalidRecordError,
    LogClosedError,
    LogcoreError,
    LogFailedError,
    LogLockedError,
    OutOfOrderSequenceError,
    ProducerClosedError,
    RecordTooLargeError,
    ResourceError,
    StorageWriteError,
    TopicNotFoundError,
    TransactionAbortedError,
)
from logcore.format.compression import Codec, codec_named
from logcore.fs import FS
from logcore.kernels import kernel
from logcore.kernels.layout import (
    INT32_MAX,
    TRANSACTIONAL_BIT,
    BatchEncoding,
    InputColumns,
    Level,
)
from logcore.kernels.sending import RECORD_BYTES
from logcore.log import Log
from logcore.producer.accumulator import (
    BATCH_BYTES,
    Accumulator,
    ProducerBatch,
    Queue,
    QueueIdentity,
    Row,
    UnsentColumns,
)
from logcore.producer.buffer_pool import BufferPool
from logcore.producer.futures import CallbackRunner, Delivery
from logcore.producer.settings import ProducerSettings
from logcore.producer.transaction_manager import TransactionManager
from logcore.recordbatch import RecordBatch, compressor, target_codec
from logcore.reporting import ERROR, WARNING, log_line

#: Maximum number of bytes that one round writes to a partition, so that other
#: partitions need not wait.
_ROUND_BYTES: Final = 1 << 20
#: Number of batches whose latencies and sizes are kept for metrics().
_SAMPLE_COUNT: Final = 1_024
#: After one of these errors of an append, the batch may be stored.
_MAYBE_STORED_ERRORS: Final = (LogFailedError, StorageWriteError)
#: After one of these errors, no record is stored and a later attempt may succeed.
_RETRIABLE: Final = (
    DiskFullError,
    ResourceError,
    LogLockedError,
    LogFailedError,
    StorageWriteError,
    MemoryError,
)
#: Errors that may have been caused by a single record of a batch.
_RECORD_ERRORS: Final = (InvalidRecordError, RecordTooLargeError)


class _WrittenBatch(NamedTuple):
    """A batch that a round has written, and the log that must be synced."""

    queue: Queue
    batch: ProducerBatch
    log: Log


class Counts:
    """The counters of metrics().

    Only the current round writes them, and only one round runs at a time.
    """

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self.batches = 0
        self.retries = 0
        self.syncs = 0
        self.errors: Counter[str] = Counter()
        self.latencies_ms: deque[int] = deque(maxlen=_SAMPLE_COUNT)
        self.sizes_bytes: deque[int] = deque(maxlen=_SAMPLE_COUNT)


@attrs.define(eq=False)
class Sender:
    """Runs the rounds of one producer."""

    _fs: FS
    _directory: ClientDirectory
    _settings: ProducerSettings
    _accumulator: Accumulator
    _callback_runner: CallbackRunner
    #: A condition of the accumulator's lock.
    _memory_freed: threading.Condition
    _transaction_manager: TransactionManager | None = None
    _buffers: BufferPool = attrs.field(init=False, factory=BufferPool)
    _producer_id: int | None = attrs.field(init=False, default=None)
    # The following two fields belong to the current round. In other threads,
    # deliveries_without_callbacks() only reads them and fail_remaining() only adds.
    #: Logs with invisible records of acks 0 and 1.
    _unsynced_logs: set[Log] = attrs.field(init=False, factory=set)
    #: Deliveries whose callbacks have not run.
    _resolved_deliveries: deque[Delivery] = attrs.field(init=False, factory=deque)
    counts: Counts = attrs.field(init=False, factory=Counts)

    def run_round(self, *, closed_only: bool = False) -> bool:
        """Write the ready batches, set their outcomes and run the callbacks.

        Return False if there was no work. With `closed_only`, batches that can accept
        more records are skipped.
        """
        # Step 1: select the ready batches, under the lock.
        now_ms = self._fs.monotonic_ms()
        ready: list[tuple[Queue, list[ProducerBatch]]] = []
        if self._transaction_manager is not None:
            self._transaction_manager.end_overdue()
            if self._transaction_manager.has_failed:
                self.fail_transaction(
                    "the transaction of the record failed and must be aborted"
                )
        with self._memory_freed:
            for queue in list(self._accumulator.active_queues):
                self._expire(queue, now_ms)
                batches = self._accumulator.ready(
                    queue, now_ms, _ROUND_BYTES, closed_only=closed_only
                )
                if batches:
                    ready.append((queue, batches))
        # Step 2: write and sync without the lock, so that other threads can send.
        if self._transaction_manager is not None:
            ready = self._add_to_transaction(self._transaction_manager, ready)
        written: list[_WrittenBatch] = []
        for queue, batches in ready:
            self._write_all(queue, batches, written)
        if written:
            self._sync(written)
        # Step 3: run the callbacks.
        is_idle = not ready and not self._resolved_deliveries
        self._run_callbacks()
        return not is_idle

    def deliveries_without_callbacks(self) -> list[Delivery]:
        """Return the deliveries with an outcome whose callbacks have not run."""
        return list(self._resolved_deliveries)

    def publish_unsynced(self) -> None:
        """Sync the logs of acks 0 and 1 when no batch is ready.

        Under the "group" policy, readers receive only synced records.
        """
        for log in list(self._unsynced_logs):
            self._unsynced_logs.discard(log)
            # The next batch reports the failure, and opens the log again.
            with contextlib.suppress(LogcoreError):
                log.flush()

    def fail_remaining(self) -> None:
        """Fail every batch after the timeout of close()."""
        with self._memory_freed:
            for queue, batch in list(self._accumulator.all()):
                error = ProducerClosedError(
                    "the producer was closed before the record was written"
                )
                self._fail_without_retry(queue, batch, error)
        # In a callback, the calling _run_callbacks() also runs the new callbacks.
        if not self._callback_runner.is_running_here:
            self._run_callbacks()

    def fail_transaction(self, reason: str) -> None:
        """Fail every batch of a transaction that will not be committed."""
        with self._memory_freed:
            for queue, batch in list(self._accumulator.all()):
                self._fail_permanently(queue, batch, TransactionAbortedError(reason))
        if not self._callback_runner.is_running_here:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Run the callbacks of completed deliveries.

        After an interrupt, the next call continues.
        """
        while self._resolved_deliveries:
            self._callback_runner.run_callbacks(self._resolved_deliveries[0])
            # Removed last: after an interrupt, the next call runs its other callbacks.
            self._resolved_deliveries.popleft()

    def _add_to_transaction(
        self,
        transaction_manager: TransactionManager,
        ready: list[tuple[Queue, list[ProducerBatch]]],
    ) -> list[tuple[Queue, list[ProducerBatch]]]:
        """Add new partitions to the transaction, and return the writable batches."""
        missing = transaction_manager.new_partitions(
            (queue.topic, queue.partition) for queue, _ in ready
        )
        if not missing:
            return ready
        try:
            transaction_manager.add(missing)
        except LogcoreError as error:
            # The failure belongs to the first batch of a queue, which delays the
            # following ones.
            with self._memory_freed:
                for queue, batches in ready:
                    if (queue.topic, queue.partition) in missing:
                        self._handle_failure(queue, batches[0], error)
            return [
                queued
                for queued in ready
                if (queued[0].topic, queued[0].partition) not in missing
            ]
        return ready

    # -- one queue ---------------------------------------------------------------------

    def _expire(self, queue: Queue, now_ms: int) -> None:
        """Fail the batches that are older than delivery_timeout_ms.

        The error states whether the batch may be stored.
        """
        while queue.batches and self._accumulator.is_expired(queue.batches[0], now_ms):
            batch = queue.batches[0]
            error = DeliveryTimeoutError(
                "the batch was not written in time",
                expected=f"within {self._settings.delivery_timeout_ms} ms",
                found=f"{batch.attempts} attempts in {now_ms - batch.created_ms} ms",
            )
            self._fail_without_retry(queue, batch, error)

    def _write_all(
        self, queue: Queue, batches: list[ProducerBatch], written: list[_WrittenBatch]
    ) -> None:
        """Write batches in order, up to the first one that must be retried."""
        for batch in batches:
            # An interrupt came between the outcome and the removal of the batch.
            if batch.delivery.is_resolved:
                with self._memory_freed:
                    self._remove(queue, batch)
                continue
            try:
                log = self._log(queue)
                self._check_previous_attempt(queue, batch, log)
                if batch.written is None:
                    self._write(queue, batch, log)
            except Exception as error:
                with self._memory_freed:
                    self._handle_failure(queue, batch, error)
                # The batch will be retried, whole or in halves. The following batches
                # must be written after it.
                if not batch.delivery.is_resolved:
                    return
                continue
            if self._settings.acks == -1:
                written.append(_WrittenBatch(queue, batch, log))
                continue
            if self._directory.durability.kind == "group":
                self._unsynced_logs.add(log)
            with self._memory_freed:
                self._complete(queue, batch, log)

    def _log(self, queue: Queue) -> Log:
        """Return the log of a partition. After a failure, the log is opened again.

        Raises:
            ResourceError: the log was opened again a short time ago.
        """
        log = self._directory.partition(queue.topic, queue.partition)
        if not log.has_failed:
            return log
        now_ms = self._fs.monotonic_ms()
        if (
            queue.reopened_ms is not None
            and now_ms - queue.reopened_ms < self._settings.retry_backoff_max_ms
        ):
            raise ResourceError(
                "a write or sync failed again; the log is opened again later",
                path=log.path,
            )
        queue.reopened_ms = now_ms
        log_line(
            "producer",
            ERROR,
            "%s: a write or sync failed; the log is opened again",
            log.path,
        )
        return self._directory.host.open_again(queue.topic, queue.partition)

    def _check_previous_attempt(
        self, queue: Queue, batch: ProducerBatch, log: Log
    ) -> None:
        """Check whether the log contains a batch that an earlier attempt has written.

        This is necessary after a failed sync. The log has been opened again since then.
        If the log does not contain the batch, the batch is marked to be written again.

        Raises:
            LogFailedError: the log cannot be read.
        """
        if batch.written is None:
            return
        try:
            if self._is_stored(log, batch):
                return
        except LogcoreError as error:
            raise LogFailedError(
                "the stored part of the batch cannot be read", path=log.path
            ) from error
        batch.written = None
        batch.may_be_stored = False
        # The failure of an earlier batch discarded the identity of this batch.
        if batch.identity is not queue.identity:
            batch.reset_attempt()

    def _is_stored(self, log: Log, batch: ProducerBatch) -> bool:
        """Return whether the log contains the batch at the offset of its receipt.

        The batch is identified by its producer id and sequence.
        """
        receipt = batch.written
        identity = batch.identity
        if receipt is None or identity is None:
            return False
        # Retention has deleted the batch, so it was stored.
        if receipt.last_offset < log.log_start_offset:
            return True
        if receipt.last_offset >= log.log_end_offset:
            return False
        blobs = log.stored(receipt.offset, up_to="log_end", max_bytes=1)
        stored_batch = RecordBatch.parse(blobs[0])
        assert stored_batch is not None  # stored() returns whole batches
        return (stored_batch.producer_id, stored_batch.base_sequence) == (
            identity.producer_id,
            batch.sequence,
        )

    def _write(self, queue: Queue, batch: ProducerBatch, log: Log) -> None:
        if batch.data is None:
            self._encode(queue, batch, log)
        assert batch.data is not None
        # Under "always", the policy applies whatever acks is. Otherwise, acks=all syncs
        # once for all batches of the round.
        level: Level | None = None
        if self._directory.durability.kind != "always":
            level = "os"
        was_maybe_stored = batch.may_be_stored
        # Set before the append, because an interrupt may end it after the write.
        batch.may_be_stored = True
        try:
            batch.written = log.append_batch(batch.data, durability=level)
        except LogClosedError as error:
            # The batch was not stored. The next attempt detects whether the topic was
            # deleted.
            batch.may_be_stored = was_maybe_stored
            raise ResourceError(
                "the log was closed before the batch was written", path=log.path
            ) from error
        except LogcoreError as error:
            # After any other error, this attempt has stored no record, but an earlier
            # attempt may have.
            batch.may_be_stored = was_maybe_stored or isinstance(
                error, _MAYBE_STORED_ERRORS
            )
            raise

    def _encode(self, queue: Queue, batch: ProducerBatch, log: Log) -> None:
        """Encode the records as a batch.

        Raises:
            LogcoreError: a record is invalid, or the batch is too large.
        """
        config = log.config
        if self._settings.compression_type is None:
            requested_codec = Codec.NONE
        else:
            requested_codec = codec_named(self._settings.compression_type)
        codec = target_codec(config, requested_codec)
        identity = None
        if self._settings.idempotent:
            identity = self._identity(queue)
        attributes = int(codec)
        if self._transaction_manager is not None:
            attributes |= TRANSACTIONAL_BIT
        encoding = BatchEncoding(
            # All records are in one batch.
            batch_bytes=INT32_MAX,
            max_bytes=min(config.max_message_bytes, config.segment_bytes),
            attributes=attributes,
            compress=compressor(codec, config),
            requires_key=config.is_compacted,
        )
        if identity is not None:
            encoding = encoding._replace(
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                base_sequence=identity.next_sequence,
            )
        buffer = self._buffers.acquire(batch.size_bytes)
        data = _encoded(buffer, batch.records, self._fs.now_ms(), encoding)
        if identity is not None:
            batch.identity = identity
            batch.sequence = identity.next_sequence
            identity.next_sequence = (batch.sequence + len(batch.records)) & INT32_MAX
        if codec is not Codec.NONE:
            with self._memory_freed:
                self._accumulator.ratios.observe(
                    queue.topic, codec, len(data) / batch.size_bytes
                )
        batch.data = data

    def _identity(self, queue: Queue) -> QueueIdentity:
        if queue.identity is None and self._transaction_manager is not None:
            transaction_identity = self._transaction_manager.initialized_identity()
            queue.identity = QueueIdentity(
                transaction_identity.producer_id, transaction_identity.producer_epoch
            )
        elif queue.identity is None:
            if self._producer_id is None:
                self._producer_id = self._directory.host.next_producer_id()
            queue.identity = QueueIdentity(self._producer_id)
        return queue.identity

    def _discard_identity(self, queue: Queue) -> None:
        """Make the next batch of the partition begin at sequence 0 of a new producer id.

        With the old id, the log would refuse the batch if an earlier one is missing.
        """
        queue.identity = None
        self._producer_id = None

    # -- outcomes ----------------------------------------------------------------------

    def _sync(self, written: list[_WrittenBatch]) -> None:
        """Sync each log once, and complete the batches that are durable."""
        failures: dict[Log, LogcoreError | None] = {}
        for written_batch in written:
            if written_batch.log in failures:
                continue
            failures[written_batch.log] = None
            self.counts.syncs += 1
            try:
                written_batch.log.flush()
            except LogcoreError as error:
                failures[written_batch.log] = error
        with self._memory_freed:
            for written_batch in written:
                failure = failures[written_batch.log]
                if failure is None:
                    self._complete(
                        written_batch.queue, written_batch.batch, written_batch.log
                    )
                else:
                    self._handle_failure(
                        written_batch.queue, written_batch.batch, failure
                    )

    def _complete(self, queue: Queue, batch: ProducerBatch, log: Log) -> None:
        """Complete a batch that is stored as acks requires."""
        receipt = batch.written
        assert receipt is not None
        counts = self.counts
        counts.records += len(batch.records)
        counts.bytes += (
            batch.size_bytes - BATCH_BYTES - RECORD_BYTES * len(batch.records)
        )
        counts.batches += 1
        counts.latencies_ms.append(self._fs.monotonic_ms() - batch.created_ms)
        counts.sizes_bytes.append(len(batch.data or b""))
        level: Level = "disk"
        if self._settings.acks != -1:
            level = receipt.durability
        batch.delivery.resolve(
            receipt, None, level=level, uses_append_time=log.config.is_append_time
        )
        self._remove(queue, batch)
        # The buffer is released last. If an interrupt prevents this, the buffer is freed
        # with the batch and not reused.
        if batch.data is not None:
            data = batch.data
            batch.data = None
            self._buffers.release(data)

    def _remove(self, queue: Queue, batch: ProducerBatch) -> None:
        """Remove a batch that has its outcome, and schedule its callbacks.

        After an interrupt between the steps, the next round repeats them.
        """
        self._resolved_deliveries.append(batch.delivery)
        self._accumulator.remove(queue, batch)
        self._memory_freed.notify_all()

    def _fail_without_retry(
        self, queue: Queue, batch: ProducerBatch, error: LogcoreError
    ) -> None:
        """Fail a batch without another attempt, after its timeout or in close().

        If the batch may be stored, its error is DurabilityUnknownError.
        """
        if batch.may_be_stored:
            error = DurabilityUnknownError(
                "the batch may be stored; no attempt could determine that in time"
            )
            self._discard_identity(queue)
        else:
            queue.renumber_after(batch)
        error.__cause__ = batch.failure
        self._fail_permanently(queue, batch, error)

    def _fail_permanently(
        self, queue: Queue, batch: ProducerBatch, error: Exception
    ) -> None:
        """Fail a batch permanently."""
        if self._transaction_manager is not None:
            self._transaction_manager.fail(error)
        self.counts.errors[type(error).__name__] += len(batch.records)
        batch.delivery.resolve(None, error, level="os", uses_append_time=False)
        self._remove(queue, batch)

    def _handle_failure(
        self, queue: Queue, batch: ProducerBatch, error: Exception
    ) -> None:
        """Retry, split or fail a batch after a failed attempt."""
        if not self._accumulator.is_open(
            queue, batch
        ):  # close() failed it concurrently
            return
        batch.failure = error
        # A missing topic is permanent: if the batch was stored, it is deleted as well.
        if isinstance(error, TopicNotFoundError):
            if batch.may_be_stored:
                self._discard_identity(queue)
            else:
                queue.renumber_after(batch)
            self._fail_permanently(queue, batch, error)
            return
        # The batch may be stored. Only an idempotent batch can be retried without a
        # duplicate.
        if batch.may_be_stored and not self._settings.idempotent:
            unknown = DurabilityUnknownError(
                "the batch may be stored; without idempotence it is not written again"
            )
            unknown.__cause__ = error
            self._fail_permanently(queue, batch, unknown)
        elif batch.may_be_stored or isinstance(error, _RETRIABLE):
            self.counts.retries += 1
            self._accumulator.delay_retry(batch, self._fs.monotonic_ms())
        elif len(batch.records) > 1 and (
            isinstance(error, _RECORD_ERRORS) or not isinstance(error, LogcoreError)
        ):
            queue.renumber_after(batch)
            self._accumulator.split(queue, batch)
        else:
            if isinstance(error, OutOfOrderSequenceError):
                log_line(
                    "producer",
                    WARNING,
                    "%s-%d: %s; a new producer id follows",
                    queue.topic,
                    queue.partition,
                    error,
                )
                self._discard_identity(queue)
            queue.renumber_after(batch)
            self._fail_permanently(queue, batch, error)


def _encoded(
    buffer: bytearray,
    records: list[Row] | UnsentColumns,
    now_ms: int,
    encoding: BatchEncoding,
) -> memoryview:
    """Encode one batch into a buffer, with offsets from 0 on and no leader epoch.

    Raises:
        InvalidRecordError: a record is invalid.
        InvalidTimestampError: a timestamp is invalid.
        RecordTooLargeError: the batch is too large.
    """
    if isinstance(records, UnsentColumns):
        columns = InputColumns(
            records.keys, records.values, records.times, records.count
        )
        size, _ = kernel.encode_columns(buffer, columns, 0, -1, now_ms, encoding)
    else:
        size, _ = kernel.encode_records(buffer, records, 0, -1, now_ms, encoding)
    return memoryview(buffer)[:size]
