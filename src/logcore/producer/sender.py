"""Writes the batches of a producer: which are ready, in what order, and what their outcome is.

Rules (clients reference 2.3, 2.4, 2.8):
- One round at a time. A round writes what is ready to every partition, then syncs each log once where acks asks for the
  disk, then settles the outcomes.
- A batch is compressed once, at its first attempt. It keeps its producer id and sequence while its outcome is unknown,
  so that the log tells a retry from a new batch.
- After a failed write or sync the log is opened again, at most once in retry_backoff_max_ms, and says what it holds:
  the batch is done if it is stored there, and written again if not. Without idempotence nothing tells the two apart, so
  it fails.
- A batch that is refused for some of its records is split, until these fail alone.
- An outcome that stays unknown ends the producer id of its partition: what follows has a new one, from sequence 0.
- In a transaction a partition is added to it before its first batch is written. After a failure nothing more of the
  transaction is written.

The queues belong to accumulator.py, callbacks to futures.py. This module starts no thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from typing import Any, Final, NamedTuple, Protocol

from logcore.config import Durability
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
from logcore.kernels.layout import INT32_MAX, TRANSACTIONAL_BIT, Level
from logcore.kernels.sending import RECORD_BYTES
from logcore.log import Log
from logcore.notices import ERROR, WARNING, tell
from logcore.producer.accumulator import BATCH_BYTES, Accumulator, Batch, Columns, Identity, Queue, Row
from logcore.producer.futures import Delivery, Teller
from logcore.producer.transacting import Transacting
from logcore.producer.values import ProducerSettings
from logcore.recordbatch import RecordBatch, compressor, target_codec

#: The most that one round writes to a partition, so that others are not kept waiting.
_ROUND_BYTES: Final = 1 << 20
#: The latencies and sizes of so many batches are kept for metrics().
_KEPT: Final = 1_024
#: Errors of an append after which the batch may be stored.
_UNKNOWN: Final = (LogFailedError, StorageWriteError)
#: Errors after which nothing is stored, and a later attempt may succeed.
_LATER: Final = (DiskFullError, ResourceError, LogLockedError, LogFailedError, StorageWriteError, MemoryError)
#: Errors that a single record of a batch may cause.
_OF_RECORDS: Final = (InvalidRecordError, RecordTooLargeError)


class Directory(Protocol):
    """The methods of a LogDir that are used here."""

    durability: Durability

    def partition(self, topic: str, number: int) -> Log: ...
    def open_again(self, topic: str, number: int) -> Log: ...
    def next_producer_id(self) -> int: ...


class _Written(NamedTuple):
    """A batch that a round wrote, and the log that is to be synced."""

    queue: Queue
    batch: Batch
    log: Log


class Counts:
    """The counters of metrics(); written by the round under way, of which there is one at a time."""

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self.batches = 0
        self.retries = 0
        self.syncs = 0
        self.errors: Counter[str] = Counter()
        self.latencies_ms: deque[int] = deque(maxlen=_KEPT)
        self.sizes_bytes: deque[int] = deque(maxlen=_KEPT)


class Sender:
    """Does the rounds of one producer. lock: of the accumulator; room: notified when memory was freed."""

    def __init__(
        self,
        fs: FS,
        directory: Directory,
        settings: ProducerSettings,
        accumulator: Accumulator,
        teller: Teller,
        room: threading.Condition,
        transacting: Transacting | None = None,
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._settings = settings
        self._accumulator = accumulator
        self._teller = teller
        self._room = room
        self._transacting = transacting
        self._scratch = bytearray()
        self._producer_id: int | None = None
        # Both belong to the round under way; untold() and fail_all() of other threads only read, or add.
        self._unsynced: set[Log] = set()  # logs in which records of acks 0 and 1 are not visible yet
        self._ended: deque[Delivery] = deque()  # outcomes whose callbacks have not run
        self.counts = Counts()

    def round(self, *, closed_only: bool = False) -> bool:
        """Writes and settles what is ready, and runs callbacks; False if there was nothing to do.

        closed_only: passes over batches that may take more records.
        """
        now_ms = self._fs.monotonic_ms()
        work: list[tuple[Queue, list[Batch]]] = []
        if self._transacting is not None:
            self._transacting.look()
            if self._transacting.has_failed:
                self.end_all("the transaction of the record failed, and is to be aborted")
        with self._room:
            for queue in list(self._accumulator.active):
                self._expire(queue, now_ms)
                batches = self._accumulator.ready(queue, now_ms, _ROUND_BYTES, closed_only=closed_only)
                if batches:
                    work.append((queue, batches))
        # From here on without the lock, so that others send meanwhile.
        if self._transacting is not None:
            work = self._admitted(self._transacting, work)
        written: list[_Written] = []
        for queue, batches in work:
            self._write_all(queue, batches, written)
        if written:
            self._sync(written)
        is_idle = not work and not self._ended
        self._tell()
        return not is_idle

    def untold(self) -> list[Delivery]:
        """The deliveries with an outcome whose callbacks have not run."""
        return list(self._ended)

    def rest(self) -> None:
        """When nothing is ready: makes visible what acks 0 and 1 left unsynced, where readers see what is synced."""
        for log in list(self._unsynced):
            self._unsynced.discard(log)
            # A failure poisons the log, which logs it; the next batch opens the log again.
            with contextlib.suppress(LogcoreError):
                log.flush()

    def fail_all(self) -> None:
        """Ends every batch, as close() does after its timeout."""
        with self._room:
            for queue, batch in list(self._accumulator.all()):
                error = ProducerClosedError("the producer was closed before the record was written")
                self._give_up(queue, batch, error)
        if not self._teller.is_me:  # in a callback _tell() is running already, and takes these up
            self._tell()

    def end_all(self, why: str) -> None:
        """Ends every batch of a transaction that will not be committed."""
        with self._room:
            for queue, batch in list(self._accumulator.all()):
                self._end(queue, batch, TransactionAbortedError(why))
        if not self._teller.is_me:
            self._tell()

    def _tell(self) -> None:
        """Runs the callbacks of deliveries that have ended; an interrupt leaves the rest for the next time."""
        while self._ended:
            self._teller.tell(self._ended[0])
            self._ended.popleft()  # only now: tell() goes on where an interrupt ended it

    def _admitted(
        self, transacting: Transacting, work: list[tuple[Queue, list[Batch]]]
    ) -> list[tuple[Queue, list[Batch]]]:
        """Adds new partitions to the transaction, and returns the batches that may be written then."""
        new = transacting.new_partitions((queue.topic, queue.partition) for queue, _ in work)
        if not new:
            return work
        try:
            transacting.add(new)
        except LogcoreError as error:
            # The first batch of a queue has the failure, and holds up those behind it.
            with self._room:
                for queue, batches in work:
                    if (queue.topic, queue.partition) in new:
                        self._take_failure(queue, batches[0], error)
            return [one for one in work if (one[0].topic, one[0].partition) not in new]
        return work

    # -- one queue -----------------------------------------------------------------------------------------------

    def _expire(self, queue: Queue, now_ms: int) -> None:
        """Ends the batches that are too old. One that may be stored says so."""
        while queue.batches and self._accumulator.is_expired(queue.batches[0], now_ms):
            batch = queue.batches[0]
            error = DeliveryTimeoutError(
                "the batch was not written in time",
                expected=f"within {self._settings.delivery_timeout_ms} ms",
                found=f"{batch.attempts} attempts in {now_ms - batch.created_ms} ms",
            )
            self._give_up(queue, batch, error)

    def _write_all(self, queue: Queue, batches: list[Batch], written: list[_Written]) -> None:
        """Writes batches in their order, up to the first that is to be tried again."""
        for batch in batches:
            if batch.delivery.resolved:  # an interrupt came before it was taken out
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
                if not batch.delivery.resolved:  # to be tried again, whole or in halves; those behind it wait
                    return
                continue
            if self._settings.acks == -1:
                written.append(_Written(queue, batch, log))
                continue
            if self._directory.durability.kind == "group":
                self._unsynced.add(log)
            with self._room:
                self._finish(queue, batch, log)

    def _log(self, queue: Queue) -> Log:
        """The log of a partition, opened again if it is poisoned. Raises ResourceError if that was just done."""
        log = self._directory.partition(queue.topic, queue.partition)
        if not log.has_failed:
            return log
        now_ms = self._fs.monotonic_ms()
        if queue.reopened_ms is not None and now_ms - queue.reopened_ms < self._settings.retry_backoff_max_ms:
            raise ResourceError("a write or sync failed again; the log is opened again later", path=log.path)
        queue.reopened_ms = now_ms
        tell("producer", ERROR, "%s: a write or sync failed; the log is opened again", log.path)
        return self._directory.open_again(queue.topic, queue.partition)

    def _settle_attempt(self, queue: Queue, batch: Batch, log: Log) -> None:
        """After a sync that failed: whether the log, opened again, still holds what was written.

        Raises LogFailedError where it cannot be read.
        """
        if batch.written is None:
            return
        try:
            if self._is_stored(log, batch):
                return
        except LogcoreError as error:
            raise LogFailedError("what the log holds of the batch cannot be read", path=log.path) from error
        batch.written = None
        batch.is_unknown = False
        if batch.identity is not queue.identity:  # a batch before it has given up the identity: it needs the new one
            batch.forget_attempt()

    def _is_stored(self, log: Log, batch: Batch) -> bool:
        """Whether the log still holds the batch where it was written, by its producer id and its sequence."""
        receipt = batch.written
        identity = batch.identity
        if receipt is None or identity is None:
            return False
        if receipt.last_offset < log.log_start_offset:  # deleted since, and so stored before
            return True
        if receipt.last_offset >= log.log_end_offset:
            return False
        pieces = log.stored(receipt.offset, up_to="log_end", max_bytes=1)
        found = RecordBatch.parse(pieces[0])
        assert found is not None  # stored() gives whole batches
        return (found.producer_id, found.base_sequence) == (identity.producer_id, batch.sequence)

    def _write(self, queue: Queue, batch: Batch, log: Log) -> None:
        if batch.data is None:
            self._encode(queue, batch, log)
        assert batch.data is not None
        # Under "always" the policy holds whatever acks says; else acks=all syncs once for all batches of the round.
        level: Level | None = None
        if self._directory.durability.kind != "always":
            level = "os"
        was_unknown = batch.is_unknown
        batch.is_unknown = True  # also when an interrupt ends the append
        try:
            batch.written = log.append_batch(batch.data, durability=level)
        except LogClosedError as error:  # nothing was stored; the next attempt finds out whether the topic is gone
            batch.is_unknown = was_unknown
            raise ResourceError("the log was closed before the batch was written", path=log.path) from error
        except LogcoreError as error:
            # All other errors say that this attempt stored nothing. They say nothing of those before it.
            batch.is_unknown = was_unknown or isinstance(error, _UNKNOWN)
            raise

    def _encode(self, queue: Queue, batch: Batch, log: Log) -> None:
        """Turns the records into the bytes of a batch. Raises what is wrong with a record, or too large."""
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
        producer = (-1, -1, -1)
        if identity is not None:
            producer = (identity.producer_id, identity.producer_epoch, identity.next_sequence)
        most = min(config.max_message_bytes, config.segment_bytes)
        # What the encoders take behind the records: offsets begin at 0, and all records go into one batch.
        head = (0, -1, self._fs.now_ms(), INT32_MAX, most, attributes, *producer)
        data = _encoded(self._scratch, batch.records, (*head, compressor(codec, config), config.is_compacted))
        if identity is not None:
            batch.identity = identity
            batch.sequence = identity.next_sequence
            identity.next_sequence = (batch.sequence + len(batch.records)) & INT32_MAX
        if codec is not Codec.NONE:
            with self._room:
                self._accumulator.ratios.observe(queue.topic, codec, len(data) / batch.size_bytes)
        batch.data = data

    def _identity(self, queue: Queue) -> Identity:
        if queue.identity is None and self._transacting is not None:
            known = self._transacting.known_identity()
            queue.identity = Identity(known.producer_id, known.producer_epoch)
        elif queue.identity is None:
            if self._producer_id is None:
                self._producer_id = self._directory.next_producer_id()
            queue.identity = Identity(self._producer_id)
        return queue.identity

    def _end_identity(self, queue: Queue) -> None:
        """Gives the next batch of the partition a new producer id and sequence 0: batches before it may be missing."""
        queue.identity = None
        self._producer_id = None

    # -- outcomes ------------------------------------------------------------------------------------------------

    def _sync(self, written: list[_Written]) -> None:
        """Syncs each log once, and ends the batches that are on disk."""
        failures: dict[Log, LogcoreError | None] = {}
        for one in written:
            if one.log in failures:
                continue
            failures[one.log] = None
            self.counts.syncs += 1
            try:
                one.log.flush()
            except LogcoreError as error:
                failures[one.log] = error
        with self._room:
            for one in written:
                failure = failures[one.log]
                if failure is None:
                    self._finish(one.queue, one.batch, one.log)
                else:
                    self._take_failure(one.queue, one.batch, failure)

    def _finish(self, queue: Queue, batch: Batch, log: Log) -> None:
        """The batch is stored, as safe as acks asks."""
        receipt = batch.written
        assert receipt is not None
        counts = self.counts
        counts.records += len(batch.records)
        counts.bytes += batch.size_bytes - BATCH_BYTES - RECORD_BYTES * len(batch.records)
        counts.batches += 1
        counts.latencies_ms.append(self._fs.monotonic_ms() - batch.created_ms)
        counts.sizes_bytes.append(len(batch.data or b""))
        level: Level = "disk"
        if self._settings.acks != -1:
            level = receipt.durability
        batch.delivery.resolve(receipt, None, level=level, gives_time=log.config.is_append_time)
        self._leave(queue, batch)

    def _leave(self, queue: Queue, batch: Batch) -> None:
        """Takes out a batch that has its outcome. In this order: after an interrupt the next round finds it."""
        self._ended.append(batch.delivery)
        self._accumulator.remove(queue, batch)
        self._room.notify_all()

    def _give_up(self, queue: Queue, batch: Batch, error: LogcoreError) -> None:
        """There is no time for another attempt. A batch that may be stored says so."""
        if batch.is_unknown:
            error = DurabilityUnknownError("the batch may be stored, and no attempt could find out in time")
            self._end_identity(queue)
        else:
            queue.renumber_behind(batch)
        error.__cause__ = batch.failure
        self._end(queue, batch, error)

    def _end(self, queue: Queue, batch: Batch, error: Exception) -> None:
        """The batch failed for good."""
        if self._transacting is not None:
            self._transacting.fail(error)
        self.counts.errors[type(error).__name__] += len(batch.records)
        batch.delivery.resolve(None, error, level="os", gives_time=False)
        self._leave(queue, batch)

    def _take_failure(self, queue: Queue, batch: Batch, error: Exception) -> None:
        """Decides about a batch after a failed attempt: it is tried again, split, or ended."""
        if not self._accumulator.is_open(queue, batch):  # close() ended it meanwhile
            return
        batch.failure = error
        if isinstance(error, TopicNotFoundError):  # for good: what was stored of the batch is deleted too
            if batch.is_unknown:
                self._end_identity(queue)
            else:
                queue.renumber_behind(batch)
            self._end(queue, batch, error)
            return
        # It may be stored. Tried again, only an idempotent batch is not stored twice.
        if batch.is_unknown and not self._settings.idempotent:
            unknown = DurabilityUnknownError("the batch may be stored; without idempotence it is not written again")
            unknown.__cause__ = error
            self._end(queue, batch, unknown)
        elif batch.is_unknown or isinstance(error, _LATER):
            self.counts.retries += 1
            self._accumulator.put_off(batch, self._fs.monotonic_ms())
        elif len(batch.records) > 1 and (isinstance(error, _OF_RECORDS) or not isinstance(error, LogcoreError)):
            queue.renumber_behind(batch)
            self._accumulator.split(queue, batch)
        else:
            if isinstance(error, OutOfOrderSequenceError):
                tell("producer", WARNING, "%s-%d: %s; a new producer id follows", queue.topic, queue.partition, error)
                self._end_identity(queue)
            queue.renumber_behind(batch)
            self._end(queue, batch, error)


def _encoded(scratch: bytearray, records: list[Row] | Columns, head: tuple[Any, ...]) -> bytes:
    """One batch. head: as kernel.encode_records() takes it behind the records. Raises InvalidRecordError,
    InvalidTimestampError, RecordTooLargeError.
    """
    if isinstance(records, Columns):
        size, _ = kernel.encode_columns(scratch, records.keys, records.values, records.times, records.count, *head)
    else:
        size, _ = kernel.encode_records(scratch, records, *head)
    return bytes(memoryview(scratch)[:size])
