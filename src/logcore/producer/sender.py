"""Writes the batches of a producer: their order, retries and outcomes.

Rules (clients reference 2.3, 2.4, 2.8):
- Only one round runs at a time. A round writes the ready batches of every partition.
  Then it syncs each log once, if acks requires durability, and sets the outcomes.
- A batch is compressed once, at its first attempt. It keeps its bytes, producer id and
  sequence while its outcome is unknown, so that the log can distinguish a retry from a
  new batch. buffer_pool.py states when the memory of the bytes is reused.
- After a failed write or sync, the log is opened again, at most once in
  retry_backoff_max_ms. A batch is done if the log contains it, and is written again if
  not. Without idempotence the two cases cannot be distinguished, so the batch fails.
- A batch that is refused because of some of its records is split until only these fail.
- An outcome that remains unknown ends the producer id of its partition. The following
  batches have a new producer id, from sequence 0.
- A partition is added to the transaction before its first batch is written. After a
  failure, no further batch of the transaction is written.

The queues belong to accumulator.py, callbacks to futures.py. This module starts no
thread.
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
from logcore.producer.transaction_manager import Transacting
from logcore.recordbatch import RecordBatch, compressor, target_codec
from logcore.reporting import ERROR, WARNING, log_line

#: Maximum number of bytes that one round writes to a partition, so that other
#: partitions need not wait.
_ROUND_BYTES: Final = 1 << 20
#: Number of batches whose latencies and sizes are kept for metrics().
_KEPT: Final = 1_024
#: After one of these errors of an append, the batch may be stored.
_UNKNOWN: Final = (LogFailedError, StorageWriteError)
#: After one of these errors, no record is stored and a later attempt may succeed.
_LATER: Final = (
    DiskFullError,
    ResourceError,
    LogLockedError,
    LogFailedError,
    StorageWriteError,
    MemoryError,
)
#: Errors that a single record of a batch may cause.
_OF_RECORDS: Final = (InvalidRecordError, RecordTooLargeError)


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
        self.latencies_ms: deque[int] = deque(maxlen=_KEPT)
        self.sizes_bytes: deque[int] = deque(maxlen=_KEPT)


@attrs.define(eq=False)
class Sender:
    """Runs the rounds of one producer.

    `room` is a condition of the accumulator's lock, and is notified when memory is
    freed.
    """

    _fs: FS
    _directory: ClientDirectory
    _settings: ProducerSettings
    _accumulator: Accumulator
    _teller: CallbackRunner
    _room: threading.Condition
    _transacting: Transacting | None = None
    _buffers: BufferPool = attrs.field(init=False, factory=BufferPool)
    _producer_id: int | None = attrs.field(init=False, default=None)
    # The following two fields belong to the current round. In other threads,
    # without_callbacks() only reads them and fail_all() only adds.
    #: Logs with invisible records of acks 0 and 1.
    _unsynced: set[Log] = attrs.field(init=False, factory=set)
    #: Deliveries whose callbacks have not run.
    _ended: deque[Delivery] = attrs.field(init=False, factory=deque)
    counts: Counts = attrs.field(init=False, factory=Counts)

    def round(self, *, closed_only: bool = False) -> bool:
        """Write the ready batches, set their outcomes and run the callbacks.

        Return False if there was no work. With `closed_only`, batches that can accept
        more records are skipped.
        """
        # Step 1: select the ready batches, with the lock.
        now_ms = self._fs.monotonic_ms()
        work: list[tuple[Queue, list[ProducerBatch]]] = []
        if self._transacting is not None:
            self._transacting.end_overdue()
            if self._transacting.has_failed:
                self.end_all("the transaction of the record failed and must be aborted")
        with self._room:
            for queue in list(self._accumulator.active):
                self._expire(queue, now_ms)
                batches = self._accumulator.ready(
                    queue, now_ms, _ROUND_BYTES, closed_only=closed_only
                )
                if batches:
                    work.append((queue, batches))
        # Step 2: write and sync without the lock, so that other threads can send.
        if self._transacting is not None:
            work = self._admitted(self._transacting, work)
        written: list[_WrittenBatch] = []
        for queue, batches in work:
            self._write_all(queue, batches, written)
        if written:
            self._sync(written)
        # Step 3: run the callbacks.
        is_idle = not work and not self._ended
        self._run_callbacks()
        return not is_idle

    def without_callbacks(self) -> list[Delivery]:
        """Return the deliveries with an outcome whose callbacks have not run."""
        return list(self._ended)

    def publish_unsynced(self) -> None:
        """Make the records of acks 0 and 1 visible when no batch is ready.

        This is necessary if readers see only synced records.
        """
        for log in list(self._unsynced):
            self._unsynced.discard(log)
            # A failed log reports its failure itself, and the next batch opens it
            # again.
            with contextlib.suppress(LogcoreError):
                log.flush()

    def fail_all(self) -> None:
        """Fail every batch after the timeout of close()."""
        with self._room:
            for queue, batch in list(self._accumulator.all()):
                error = ProducerClosedError(
                    "the producer was closed before the record was written"
                )
                self._give_up(queue, batch, error)
        # In a callback, a running _run_callbacks() calls the new callbacks.
        if not self._teller.is_me:
            self._run_callbacks()

    def end_all(self, why: str) -> None:
        """Fail every batch of a transaction that will not be committed."""
        with self._room:
            for queue, batch in list(self._accumulator.all()):
                self._end(queue, batch, TransactionAbortedError(why))
        if not self._teller.is_me:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Run the callbacks of completed deliveries.

        After an interrupt, the next call continues.
        """
        while self._ended:
            self._teller.run_callbacks(self._ended[0])
            self._ended.popleft()  # last, because run_callbacks() continues after an interrupt

    def _admitted(
        self, transacting: Transacting, work: list[tuple[Queue, list[ProducerBatch]]]
    ) -> list[tuple[Queue, list[ProducerBatch]]]:
        """Add new partitions to the transaction, and return the writable batches."""
        new = transacting.new_partitions(
            (queue.topic, queue.partition) for queue, _ in work
        )
        if not new:
            return work
        try:
            transacting.add(new)
        except LogcoreError as error:
            # The failure belongs to the first batch of a queue, which delays the
            # following ones.
            with self._room:
                for queue, batches in work:
                    if (queue.topic, queue.partition) in new:
                        self._take_failure(queue, batches[0], error)
            return [
                queued
                for queued in work
                if (queued[0].topic, queued[0].partition) not in new
            ]
        return work

    # -- one queue ---------------------------------------------------------------------

    def _expire(self, queue: Queue, now_ms: int) -> None:
        """Fail the batches that are too old.

        If a batch may be stored, its error reports that.
        """
        while queue.batches and self._accumulator.is_expired(queue.batches[0], now_ms):
            batch = queue.batches[0]
            error = DeliveryTimeoutError(
                "the batch was not written in time",
                expected=f"within {self._settings.delivery_timeout_ms} ms",
                found=f"{batch.attempts} attempts in {now_ms - batch.created_ms} ms",
            )
            self._give_up(queue, batch, error)

    def _write_all(
        self, queue: Queue, batches: list[ProducerBatch], written: list[_WrittenBatch]
    ) -> None:
        """Write batches in order, up to the first one that must be retried."""
        for batch in batches:
            if batch.delivery.resolved:  # an interrupt prevented its removal
                with self._room:
                    self._leave(queue, batch)
                continue
            try:
                log = self._log(queue)
                self._settle_attempt(queue, batch, log)
                if batch.written is None:
                    self._write(queue, batch, log)
            except Exception as error:
                with self._room:
                    self._take_failure(queue, batch, error)
                # The batch will be retried, whole or in halves, and the following
                # batches wait.
                if not batch.delivery.resolved:
                    return
                continue
            if self._settings.acks == -1:
                written.append(_WrittenBatch(queue, batch, log))
                continue
            if self._directory.durability.kind == "group":
                self._unsynced.add(log)
            with self._room:
                self._finish(queue, batch, log)

    def _log(self, queue: Queue) -> Log:
        """Return the log of a partition, opened again after a failure.

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

    def _settle_attempt(self, queue: Queue, batch: ProducerBatch, log: Log) -> None:
        """Check after a failed sync whether the log contains the written batch.

        The log has been opened again. A batch that the log does not contain is written
        again.

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
        batch.is_unknown = False
        # An earlier batch gave up the identity, so this batch needs a new identity.
        if batch.identity is not queue.identity:
            batch.forget_attempt()

    def _is_stored(self, log: Log, batch: ProducerBatch) -> bool:
        """Return whether the log contains the batch at its offset.

        It is identified by producer id and sequence.
        """
        receipt = batch.written
        identity = batch.identity
        if receipt is None or identity is None:
            return False
        # Deleted since then, so it was stored.
        if receipt.last_offset < log.log_start_offset:
            return True
        if receipt.last_offset >= log.log_end_offset:
            return False
        pieces = log.stored(receipt.offset, up_to="log_end", max_bytes=1)
        found = RecordBatch.parse(pieces[0])
        assert found is not None  # stored() returns whole batches
        return (found.producer_id, found.base_sequence) == (
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
        was_unknown = batch.is_unknown
        batch.is_unknown = True  # set first, because an interrupt may end the append
        try:
            batch.written = log.append_batch(batch.data, durability=level)
        except LogClosedError as error:
            # The batch was not stored. The next attempt detects whether the topic was
            # deleted.
            batch.is_unknown = was_unknown
            raise ResourceError(
                "the log was closed before the batch was written", path=log.path
            ) from error
        except LogcoreError as error:
            # All other errors mean that this attempt stored no record. Earlier attempts
            # are not covered.
            batch.is_unknown = was_unknown or isinstance(error, _UNKNOWN)
            raise

    def _encode(self, queue: Queue, batch: ProducerBatch, log: Log) -> None:
        """Encode the records as a batch.

        Raises:
            LogcoreError: a record is invalid, or the batch is too large.
        """
        config = log.config
        if self._settings.compression_type is None:
            wanted = Codec.NONE
        else:
            wanted = codec_named(self._settings.compression_type)
        codec = target_codec(config, wanted)
        identity = None
        if self._settings.idempotent:
            identity = self._identity(queue)
        attributes = int(codec)
        if self._transacting is not None:
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
        buffer = self._buffers.take(batch.size_bytes)
        data = _encoded(buffer, batch.records, self._fs.now_ms(), encoding)
        if identity is not None:
            batch.identity = identity
            batch.sequence = identity.next_sequence
            identity.next_sequence = (batch.sequence + len(batch.records)) & INT32_MAX
        if codec is not Codec.NONE:
            with self._room:
                self._accumulator.ratios.observe(
                    queue.topic, codec, len(data) / batch.size_bytes
                )
        batch.data = data

    def _identity(self, queue: Queue) -> QueueIdentity:
        if queue.identity is None and self._transacting is not None:
            known = self._transacting.known_identity()
            queue.identity = QueueIdentity(known.producer_id, known.producer_epoch)
        elif queue.identity is None:
            if self._producer_id is None:
                self._producer_id = self._directory.host.next_producer_id()
            queue.identity = QueueIdentity(self._producer_id)
        return queue.identity

    def _end_identity(self, queue: Queue) -> None:
        """Give the next batch of the partition a new producer id and sequence 0.

        Earlier batches may be missing from the log.
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
        with self._room:
            for written_batch in written:
                failure = failures[written_batch.log]
                if failure is None:
                    self._finish(
                        written_batch.queue, written_batch.batch, written_batch.log
                    )
                else:
                    self._take_failure(
                        written_batch.queue, written_batch.batch, failure
                    )

    def _finish(self, queue: Queue, batch: ProducerBatch, log: Log) -> None:
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
            receipt, None, level=level, gives_time=log.config.is_append_time
        )
        self._leave(queue, batch)
        # Last: after an interrupt, the buffer is freed with the batch.
        if batch.data is not None:
            data = batch.data
            batch.data = None
            self._buffers.give_back(data)

    def _leave(self, queue: Queue, batch: ProducerBatch) -> None:
        """Remove a batch that has its outcome.

        The order of the steps matters: after an interrupt, the next round finds the
        batch.
        """
        self._ended.append(batch.delivery)
        self._accumulator.remove(queue, batch)
        self._room.notify_all()

    def _give_up(self, queue: Queue, batch: ProducerBatch, error: LogcoreError) -> None:
        """Fail a batch that has no time for another attempt.

        If the batch may be stored, its error reports that.
        """
        if batch.is_unknown:
            error = DurabilityUnknownError(
                "the batch may be stored, and no attempt could determine that in time"
            )
            self._end_identity(queue)
        else:
            queue.renumber_after(batch)
        error.__cause__ = batch.failure
        self._end(queue, batch, error)

    def _end(self, queue: Queue, batch: ProducerBatch, error: Exception) -> None:
        """Fail a batch permanently."""
        if self._transacting is not None:
            self._transacting.fail(error)
        self.counts.errors[type(error).__name__] += len(batch.records)
        batch.delivery.resolve(None, error, level="os", gives_time=False)
        self._leave(queue, batch)

    def _take_failure(
        self, queue: Queue, batch: ProducerBatch, error: Exception
    ) -> None:
        """Retry, split or fail a batch after a failed attempt."""
        if not self._accumulator.is_open(queue, batch):  # close() ended it concurrently
            return
        batch.failure = error
        # A missing topic is permanent: the stored part of the batch was deleted too.
        if isinstance(error, TopicNotFoundError):
            if batch.is_unknown:
                self._end_identity(queue)
            else:
                queue.renumber_after(batch)
            self._end(queue, batch, error)
            return
        # The batch may be stored. Only an idempotent batch can be retried without a
        # duplicate.
        if batch.is_unknown and not self._settings.idempotent:
            unknown = DurabilityUnknownError(
                "the batch may be stored; without idempotence it is not written again"
            )
            unknown.__cause__ = error
            self._end(queue, batch, unknown)
        elif batch.is_unknown or isinstance(error, _LATER):
            self.counts.retries += 1
            self._accumulator.put_off(batch, self._fs.monotonic_ms())
        elif len(batch.records) > 1 and (
            isinstance(error, _OF_RECORDS) or not isinstance(error, LogcoreError)
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
                self._end_identity(queue)
            queue.renumber_after(batch)
            self._end(queue, batch, error)


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
