"""Records that wait to be written: batches per partition, and their memory.

Rules (clients reference 2.3, Kafka's RecordAccumulator):
- Only the last batch of a queue accepts records. A record that does not fit closes it
  and begins another batch. The first record of a batch always fits.
- A batch is ready when it is closed, when it is linger_ms old, or when a thread waits
  for memory. A batch that failed temporarily is delayed by its backoff. The following
  batches of the queue are delayed too, so the order of a partition never changes.
- Memory is counted from send() until the batch has its outcome. Threads that wait for
  memory are served in FIFO order.
- Each call receives the current time as an argument. A queue and its batches change
  only under the producer's lock.

This module does not encode, write or wait: sender.py and producer.py do.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from logcore.format.compression import Codec, codec_named
from logcore.kernels import AccumulatorFields, BatchFields, QueueFields, Receipt
from logcore.kernels.sending import RECORD_OVERHEAD_BYTES
from logcore.producer.futures import CallbackRunner, Delivery
from logcore.producer.partitioners import RandomBelow
from logcore.producer.settings import ProducerSettings

#: Size of the header of a batch, and maximum size of a record header in addition to its
#: name and value (Kafka: DefaultRecord).
BATCH_BYTES: Final = 61
HEADER_BYTES: Final = 10
#: A limit that no number of records reaches.
NO_LIMIT: Final = 1 << 62
#: Safety factor and steps of the estimated compression ratio, as in Kafka's
#: CompressionRatioEstimator.
_SAFETY_FACTOR: Final = 1.05
_WORSE_STEP: Final = 0.05
_BETTER_STEP: Final = 0.005

#: (key, value, headers, timestamp_ms): one record, as the encoders accept it.
Row = tuple[bytes | None, bytes | None, Any, int | None]


@attrs.frozen
class UnsentColumns:
    """Records as columns."""

    #: (data, edges, nulls), or None if all keys are null. The edges are int64 of shape
    #: (n + 1,), and the nulls are uint8 of shape (n,), or None without a null.
    keys: tuple[Any, npt.NDArray[np.int64], Any] | None
    #: Like keys, but the values.
    values: tuple[Any, npt.NDArray[np.int64], Any] | None
    #: Timestamps in ms, or None for the current time.
    times: npt.NDArray[np.int64] | None
    #: Number of records.
    count: int

    def __len__(self) -> int:
        return self.count

    def slice(self, start: int, stop: int) -> UnsentColumns:
        """Return rows `start` to `stop` - 1. The bytes are not copied."""
        keys = None
        if self.keys is not None:
            keys = _slice_column(self.keys, start, stop)
        values = None
        if self.values is not None:
            values = _slice_column(self.values, start, stop)
        times = None
        if self.times is not None:
            times = self.times[start:stop]
        return UnsentColumns(keys, values, times, stop - start)

    def size_bytes(self) -> int:
        """Return the size of all keys and values."""
        edges = [column[1] for column in (self.keys, self.values) if column is not None]
        return sum(int(edge[-1] - edge[0]) for edge in edges)


def _slice_column(
    column: tuple[Any, Any, Any], start: int, stop: int
) -> tuple[Any, Any, Any]:
    data, edges, nulls = column
    if nulls is not None:
        nulls = nulls[start:stop]
    return data, edges[start : stop + 1], nulls


class QueueIdentity:
    """Producer id, epoch and next sequence of one queue. Only the sender uses it."""

    __slots__ = ("next_sequence", "producer_epoch", "producer_id")

    def __init__(self, producer_id: int, producer_epoch: int = 0) -> None:
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.next_sequence = 0


class ProducerBatch(BatchFields):
    """Records that are written together. BatchFields declares the fields for kernels."""

    __slots__ = (
        "attempts",
        "created_ms",
        "data",
        "due_ms",
        "failure",
        "identity",
        "is_closed",
        "may_be_stored",
        "sequence",
        "written",
    )

    def __init__(
        self,
        delivery: Delivery,
        created_ms: int,
        limit_bytes: int = 0,
        max_records: int = 0,
    ) -> None:
        self.delivery = delivery
        self.created_ms = created_ms
        #: Limits of the encoded size and of the number of records.
        self.limit_bytes = limit_bytes
        self.max_records = max_records
        #: A list of rows, or columns from send_columns().
        self.records: list[Row] | UnsentColumns = []
        #: An upper bound of the encoded size.
        self.size_bytes = BATCH_BYTES
        #: Whether the batch accepts no more records.
        self.is_closed = False
        #: Number of failed attempts that may be retried.
        self.attempts = 0
        #: Earliest time of the next attempt.
        self.due_ms = 0
        #: The encoded batch, in a buffer that no other batch shares; None before the
        #: encoding. The encoding also sets the identity and the sequence.
        self.data: memoryview | None = None
        self.identity: QueueIdentity | None = None
        self.sequence = -1
        #: Receipt of an append whose outcome is not final yet.
        self.written: Receipt | None = None
        #: Whether an attempt may have stored the batch.
        self.may_be_stored = False
        #: The error of the latest attempt.
        self.failure: Exception | None = None

    @property
    def memory_bytes(self) -> int:
        """Number of bytes of buffer_memory that the batch occupies."""
        return self.size_bytes - BATCH_BYTES + RECORD_OVERHEAD_BYTES * len(self.records)

    def fits(self, size_bytes: int) -> bool:
        """Return whether another record of at most `size_bytes` fits."""
        return (
            self.size_bytes + size_bytes <= self.limit_bytes
            and len(self.records) < self.max_records
        )

    def reset_attempt(self) -> None:
        """Discard the encoding of a batch that is not stored.

        The next attempt encodes the batch again with another sequence.
        """
        self.data = None
        self.identity = None
        self.sequence = -1
        self.written = None
        self.may_be_stored = False

    def split(self) -> tuple[ProducerBatch, ProducerBatch]:
        """Return two closed batches, each with half of the records."""
        middle = len(self.records) // 2
        deliveries = self.delivery.split(self.delivery.first_index + middle)
        halves = (
            ProducerBatch(deliveries[0], self.created_ms),
            ProducerBatch(deliveries[1], self.created_ms),
        )
        if isinstance(self.records, UnsentColumns):
            halves[0].records = self.records.slice(0, middle)
            halves[1].records = self.records.slice(middle, len(self.records))
        else:
            halves[0].records = self.records[:middle]
            halves[1].records = self.records[middle:]
        content_bytes = self.size_bytes - BATCH_BYTES
        halves[0].size_bytes = BATCH_BYTES + content_bytes // 2
        halves[1].size_bytes = BATCH_BYTES + content_bytes - content_bytes // 2
        for half in halves:
            half.is_closed = True
        return halves


class Queue(QueueFields):
    """The batches of one partition, the oldest first."""

    __slots__ = ("batches", "identity", "partition", "reopened_ms", "topic")

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.batches: deque[ProducerBatch] = deque()
        #: The last batch, if it accepts records.
        self.open_batch = None
        #: Producer id and sequence of the next batches. The first write creates it.
        self.identity: QueueIdentity | None = None
        #: Monotonic time when the log was last opened again after a failure.
        self.reopened_ms: int | None = None

    def close(self) -> None:
        """Close the last batch, so that it accepts no more records."""
        if self.open_batch is not None:
            self.open_batch.is_closed = True
            self.open_batch = None

    def renumber_after(self, batch: ProducerBatch) -> None:
        """Reuse the sequence of a batch that failed permanently and is not stored.

        The following batches are encoded again from this sequence. Otherwise, the log
        would refuse them as out of order.
        """
        identity = batch.identity
        if identity is None or identity is not self.identity:
            return  # the batch was never encoded, or its identity was discarded
        identity.next_sequence = batch.sequence
        for following in itertools.islice(
            self.batches, self.batches.index(batch) + 1, None
        ):
            if following.identity is identity:
                following.reset_attempt()


class CompressionRatios:
    """Estimated compression ratios by topic and codec.

    The algorithm is that of Kafka's CompressionRatioEstimator. A ratio is compressed
    bytes divided by uncompressed bytes. The estimate is pessimistic.
    """

    def __init__(self) -> None:
        self._estimates: dict[tuple[str, Codec], float] = {}

    def estimate(self, topic: str, codec: Codec) -> float:
        """Return the ratio to expect for the next batch. It is 1 without compression."""
        if codec is Codec.NONE:
            return 1.0
        return min(1.0, self._estimates.get((topic, codec), 1.0) * _SAFETY_FACTOR)

    def observe(self, topic: str, codec: Codec, ratio: float) -> None:
        """Update the estimate with the ratio of an encoded batch."""
        estimate = self._estimates.get((topic, codec), 1.0)
        if ratio > estimate:
            estimate = max(estimate + _WORSE_STEP, ratio)
        elif ratio < estimate:
            estimate = max(estimate - _BETTER_STEP, ratio)
        self._estimates[topic, codec] = estimate


class Accumulator(AccumulatorFields):
    """All queues of a producer, and their memory."""

    def __init__(
        self,
        settings: ProducerSettings,
        callback_runner: CallbackRunner,
        random_below: RandomBelow,
    ) -> None:
        self._settings = settings
        self._callback_runner = callback_runner
        self._random_below = random_below
        self._max_records = settings.batch_records or NO_LIMIT
        codec = settings.compression_type
        if codec is None:
            self._codec = Codec.NONE
        else:
            self._codec = codec_named(codec)
        self.ratios = CompressionRatios()
        self.queues: dict[tuple[str, int], Queue] = {}
        #: Queues with batches, in the order in which they got their first one.
        self.active_queues: dict[Queue, None] = {}
        #: Use of buffer_memory and buffer_records.
        self.used_bytes = 0
        self.used_records = 0
        #: One ticket for each thread that waits for memory, in FIFO order.
        self.waiting = deque()

    def queue(self, topic: str, partition: int) -> Queue:
        """Return the queue of a partition. The first call creates it."""
        queue = self.queues.get((topic, partition))
        if queue is None:
            queue = self.queues[topic, partition] = Queue(topic, partition)
        return queue

    def begin(self, queue: Queue, now_ms: int) -> ProducerBatch:
        """Append an open batch to a queue."""
        queue.close()
        # batch_size limits the compressed batch, but records are counted uncompressed.
        limit_bytes = int(
            self._settings.batch_size / self.ratios.estimate(queue.topic, self._codec)
        )
        delivery = Delivery(queue.topic, queue.partition, self._callback_runner)
        batch = ProducerBatch(delivery, now_ms, limit_bytes, self._max_records)
        queue.batches.append(batch)
        queue.open_batch = batch
        self.active_queues[queue] = None
        return batch

    def add(
        self,
        queue: Queue,
        records: list[Row] | UnsentColumns,
        size_bytes: int,
        now_ms: int,
    ) -> ProducerBatch:
        """Append a closed batch of `records` to a queue.

        `size_bytes` is the maximum size of the encoded records.
        """
        batch = self.begin(queue, now_ms)
        queue.close()
        batch.records = records
        batch.size_bytes += size_bytes
        self.used_bytes += batch.memory_bytes
        self.used_records += len(batch.records)
        return batch

    def close_all(self) -> None:
        """Close all batches, so that all of them are ready."""
        for queue in self.active_queues:
            queue.close()

    def ready(
        self, queue: Queue, now_ms: int, max_bytes: int, *, closed_only: bool = False
    ) -> list[ProducerBatch]:
        """Return the ready batches from the start of a queue, up to the first batch
        that is not ready. An open batch among them is closed.

        The batches have at most `max_bytes` together. A single batch may be larger.
        """
        ready: list[ProducerBatch] = []
        total = 0
        for batch in queue.batches:
            total += batch.size_bytes
            if now_ms < self._ready_ms(batch) or (ready and total > max_bytes):
                break
            if closed_only and not batch.is_closed:
                break
            ready.append(batch)
        if ready and ready[-1] is queue.open_batch:
            queue.close()
        return ready

    def _ready_ms(self, batch: ProducerBatch) -> int:
        if batch.is_closed or self.waiting:
            return batch.due_ms
        return max(batch.due_ms, batch.created_ms + self._settings.linger_ms)

    def next_ms(self) -> int | None:
        """Return the time when the next batch is ready or expires, or None."""
        first_batches = [queue.batches[0] for queue in self.active_queues]
        if not first_batches:
            return None
        timeout_ms = self._settings.delivery_timeout_ms
        return min(
            min(self._ready_ms(batch), batch.created_ms + timeout_ms)
            for batch in first_batches
        )

    def is_expired(self, batch: ProducerBatch, now_ms: int) -> bool:
        """Return whether a batch is older than delivery_timeout_ms."""
        return now_ms - batch.created_ms > self._settings.delivery_timeout_ms

    def delay_retry(self, batch: ProducerBatch, now_ms: int) -> None:
        """Delay a batch after a failed attempt that may be retried (2.3, rule 7)."""
        batch.attempts += 1
        settings = self._settings
        wait_ms = min(
            settings.retry_backoff_ms * 2 ** min(batch.attempts - 1, 20),
            settings.retry_backoff_max_ms,
        )
        # A random delay of 80 to 120 %, so that producers that failed at the same time
        # do not retry at the same time.
        batch.due_ms = now_ms + wait_ms * (800 + self._random_below(401)) // 1000

    def is_open(self, queue: Queue, batch: ProducerBatch) -> bool:
        """Return whether a batch has no outcome yet and was not split."""
        return batch in queue.batches

    def remove(self, queue: Queue, batch: ProducerBatch) -> None:
        """Remove a batch that has its outcome, and free its memory."""
        if batch is queue.open_batch:
            queue.close()
        # A queue without batches must not be active, even after an interrupt between
        # these two steps.
        if len(queue.batches) == 1 and self.is_open(queue, batch):
            self.active_queues.pop(queue, None)
        queue.batches.remove(batch)
        self.used_bytes -= batch.memory_bytes
        self.used_records -= len(batch.records)

    def split(self, queue: Queue, batch: ProducerBatch) -> None:
        """Replace a batch by its two halves."""
        halves = batch.split()
        index = queue.batches.index(batch)
        queue.batches.remove(batch)
        for half in reversed(halves):
            queue.batches.insert(index, half)

    @property
    def queued_records(self) -> int:
        """Number of records without an outcome."""
        return sum(len(batch.records) for _, batch in self.all())

    def all(self) -> Iterator[tuple[Queue, ProducerBatch]]:
        """Return all batches without an outcome, with their queues."""
        return (
            (queue, batch)
            for queue in list(self.active_queues)
            for batch in list(queue.batches)
        )

    def pending(self) -> list[Delivery]:
        """Return the deliveries of all batches without an outcome."""
        return list(
            itertools.chain.from_iterable(
                [batch.delivery for batch in queue.batches]
                for queue in self.active_queues
            )
        )
