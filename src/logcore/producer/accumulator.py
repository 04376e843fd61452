"""Records that wait to be written: batches per partition, and their memory.

Rules (clients reference 2.3, Kafka's RecordAccumulator):
- Only the last batch of a queue accepts records. A record that does not fit closes it
  and begins another batch. The first record of a batch always fits.
- A batch is ready when it is closed, when it is linger_ms old, or when a thread waits
  for memory. A batch that failed temporarily waits for its backoff, and the following
  batches wait with it. So the order of a partition never changes.
- Memory is counted from send() until the batch has its outcome. Threads that wait for
  memory are served in FIFO order.
- The time is an argument of each call. A queue and its batches change under the
  producer's lock only.

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
from logcore.kernels.sending import HELD_BYTES
from logcore.producer.futures import CallbackRunner, Delivery
from logcore.producer.partitioners import Draw
from logcore.producer.settings import ProducerSettings

#: Size of the header of a batch, and maximum size of a record header in addition to its
#: name and value (Kafka: DefaultRecord).
BATCH_BYTES: Final = 61
HEADER_BYTES: Final = 10
#: Larger than any possible number of records.
NO_LIMIT: Final = 1 << 62
#: Steps of the estimate of a compressed size, as in Kafka's CompressionRatioEstimator.
_CAUTION: Final = 1.05
_WORSE_STEP: Final = 0.05
_BETTER_STEP: Final = 0.005

#: (key, value, headers, timestamp_ms), as an argument of the encoders.
Row = tuple[bytes | None, bytes | None, Any, int | None]


@attrs.frozen
class UnsentColumns:
    """Records as columns.

    Keys and values are (data, edges, nulls), or None if all are null. The edges are
    int64 of shape (n + 1,), and the nulls are uint8 of shape (n,), or None. The times
    are int64, or None for the current time.
    """

    keys: tuple[Any, npt.NDArray[np.int64], Any] | None
    values: tuple[Any, npt.NDArray[np.int64], Any] | None
    times: npt.NDArray[np.int64] | None
    count: int

    def __len__(self) -> int:
        return self.count

    def cut(self, start: int, stop: int) -> UnsentColumns:
        """Return rows start to stop. The bytes are not copied."""
        keys = None
        if self.keys is not None:
            keys = _cut(self.keys, start, stop)
        values = None
        if self.values is not None:
            values = _cut(self.values, start, stop)
        times = None
        if self.times is not None:
            times = self.times[start:stop]
        return UnsentColumns(keys, values, times, stop - start)

    def size_bytes(self) -> int:
        """Return the size of keys and values."""
        edges = [column[1] for column in (self.keys, self.values) if column is not None]
        return sum(int(edge[-1] - edge[0]) for edge in edges)


def _cut(column: tuple[Any, Any, Any], start: int, stop: int) -> tuple[Any, Any, Any]:
    data, edges, nulls = column
    if nulls is not None:
        nulls = nulls[start:stop]
    return data, edges[start : stop + 1], nulls


class QueueIdentity:
    """Producer id, epoch and next sequence of the batches of one queue.

    Only the sender uses it.
    """

    __slots__ = ("next_sequence", "producer_epoch", "producer_id")

    def __init__(self, producer_id: int, producer_epoch: int = 0) -> None:
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.next_sequence = 0


class ProducerBatch(BatchFields):
    """Records that are written together.

    BatchFields declares the fields that the kernels use.
    """

    __slots__ = (
        "attempts",
        "created_ms",
        "data",
        "due_ms",
        "failure",
        "identity",
        "is_closed",
        "is_unknown",
        "sequence",
        "written",
    )

    def __init__(
        self,
        delivery: Delivery,
        created_ms: int,
        limit_bytes: int = 0,
        most_records: int = 0,
    ) -> None:
        self.delivery = delivery
        self.created_ms = created_ms
        #: Limits of the encoded size and of the number of records.
        self.limit_bytes = limit_bytes
        self.most_records = most_records
        #: Rows, or columns.
        self.records: list[Row] | UnsentColumns = []
        #: An upper bound of the encoded size.
        self.size_bytes = BATCH_BYTES
        #: The batch accepts no more records.
        self.is_closed = False
        #: Number of failed attempts that may be retried.
        self.attempts = 0
        #: Earliest time of the next attempt.
        self.due_ms = 0
        #: The encoded batch, in a buffer of its own. It has an identity and a sequence
        #: from then on.
        self.data: memoryview | None = None
        self.identity: QueueIdentity | None = None
        self.sequence = -1
        #: Receipt of the append while the outcome is open.
        self.written: Receipt | None = None
        #: An attempt may have stored the batch.
        self.is_unknown = False
        #: The error of the latest attempt.
        self.failure: Exception | None = None

    @property
    def held_bytes(self) -> int:
        """The part of buffer_memory that the batch occupies."""
        return self.size_bytes - BATCH_BYTES + HELD_BYTES * len(self.records)

    def fits(self, size_bytes: int) -> bool:
        """Return whether another record of at most `size_bytes` fits."""
        return (
            self.size_bytes + size_bytes <= self.limit_bytes
            and len(self.records) < self.most_records
        )

    def forget_attempt(self) -> None:
        """Reset a batch that is not stored.

        The next attempt encodes it with another sequence.
        """
        self.data = None
        self.identity = None
        self.sequence = -1
        self.written = None
        self.is_unknown = False

    def split(self) -> tuple[ProducerBatch, ProducerBatch]:
        """Return two batches with the first and the second half of the records."""
        middle = len(self.records) // 2
        deliveries = self.delivery.split(self.delivery.first + middle)
        halves = (
            ProducerBatch(deliveries[0], self.created_ms),
            ProducerBatch(deliveries[1], self.created_ms),
        )
        if isinstance(self.records, UnsentColumns):
            halves[0].records = self.records.cut(0, middle)
            halves[1].records = self.records.cut(middle, len(self.records))
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
        #: The last batch while it accepts records.
        self.filling = None
        #: Identity of the writer. The first write creates it.
        self.identity: QueueIdentity | None = None
        #: The time when the log was last opened again.
        self.reopened_ms: int | None = None

    def close(self) -> None:
        """Close the last batch, so that it accepts no more records."""
        if self.filling is not None:
            self.filling.is_closed = True
            self.filling = None

    def renumber_after(self, batch: ProducerBatch) -> None:
        """Reuse the sequence of a batch that is not stored and never will be.

        The following batches are encoded again from this sequence. Otherwise, the log
        would refuse them as out of order.
        """
        identity = batch.identity
        if identity is None or identity is not self.identity:
            return  # it was never encoded, or its identity was given up
        identity.next_sequence = batch.sequence
        for behind in itertools.islice(
            self.batches, self.batches.index(batch) + 1, None
        ):
            if behind.identity is identity:
                behind.forget_attempt()


class Ratios:
    """Estimated compression ratios by topic and codec.

    The estimate is that of Kafka's CompressionRatioEstimator. A ratio is compressed
    bytes divided by plain bytes. The estimate is pessimistic.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, Codec], float] = {}

    def of(self, topic: str, codec: Codec) -> float:
        """Return the factor for a plain size. It is 1 without compression."""
        if codec is Codec.NONE:
            return 1.0
        return min(1.0, self._known.get((topic, codec), 1.0) * _CAUTION)

    def observe(self, topic: str, codec: Codec, ratio: float) -> None:
        """Update the estimate with the ratio of an encoded batch."""
        known = self._known.get((topic, codec), 1.0)
        if ratio > known:
            known = max(known + _WORSE_STEP, ratio)
        elif ratio < known:
            known = max(known - _BETTER_STEP, ratio)
        self._known[topic, codec] = known


class Accumulator(AccumulatorFields):
    """All queues of a producer, and their memory."""

    def __init__(
        self, settings: ProducerSettings, teller: CallbackRunner, draw: Draw
    ) -> None:
        self._settings = settings
        self._teller = teller
        self._draw = draw
        self._most_records = settings.batch_records or NO_LIMIT
        codec = settings.compression_type
        if codec is None:
            self._codec = Codec.NONE
        else:
            self._codec = codec_named(codec)
        self.ratios = Ratios()
        self.queues: dict[tuple[str, int], Queue] = {}
        self.active: dict[Queue, None] = {}  # queues with batches
        #: Memory in use.
        self.used_bytes = 0
        self.used_records = 0
        #: Threads that wait for memory, in FIFO order.
        self.waiting = deque()

    def queue(self, topic: str, partition: int) -> Queue:
        """Return the queue of a partition. The first call creates it."""
        found = self.queues.get((topic, partition))
        if found is None:
            found = self.queues[topic, partition] = Queue(topic, partition)
        return found

    def begin(self, queue: Queue, now_ms: int) -> ProducerBatch:
        """Append an open batch to a queue."""
        queue.close()
        # batch_size limits the compressed batch, but records are counted uncompressed.
        limit_bytes = int(
            self._settings.batch_size / self.ratios.of(queue.topic, self._codec)
        )
        delivery = Delivery(queue.topic, queue.partition, self._teller)
        batch = ProducerBatch(delivery, now_ms, limit_bytes, self._most_records)
        queue.batches.append(batch)
        queue.filling = batch
        self.active[queue] = None
        return batch

    def add(
        self,
        queue: Queue,
        records: list[Row] | UnsentColumns,
        size_bytes: int,
        now_ms: int,
    ) -> ProducerBatch:
        """Append a closed batch of these records to a queue.

        The records occupy `size_bytes`.
        """
        batch = self.begin(queue, now_ms)
        queue.close()
        batch.records = records
        batch.size_bytes += size_bytes
        self.used_bytes += batch.held_bytes
        self.used_records += len(batch.records)
        return batch

    def close_all(self) -> None:
        """Close all batches, so that all of them are ready."""
        for queue in self.active:
            queue.close()

    def ready(
        self, queue: Queue, now_ms: int, most_bytes: int, *, closed_only: bool = False
    ) -> list[ProducerBatch]:
        """Return the batches at the front that are ready now. An open batch among them
        is closed.

        The batches have at most `most_bytes` together. A single batch may be larger.
        """
        found: list[ProducerBatch] = []
        total = 0
        for batch in queue.batches:
            total += batch.size_bytes
            if now_ms < self._ready_ms(batch) or (found and total > most_bytes):
                break
            if closed_only and not batch.is_closed:
                break
            found.append(batch)
        if found and found[-1] is queue.filling:
            queue.close()
        return found

    def _ready_ms(self, batch: ProducerBatch) -> int:
        if batch.is_closed or self.waiting:
            return batch.due_ms
        return max(batch.due_ms, batch.created_ms + self._settings.linger_ms)

    def next_ms(self) -> int | None:
        """Return the time when the next batch is ready or expires, or None."""
        fronts = [queue.batches[0] for queue in self.active]
        if not fronts:
            return None
        timeout_ms = self._settings.delivery_timeout_ms
        return min(
            min(self._ready_ms(front), front.created_ms + timeout_ms)
            for front in fronts
        )

    def is_expired(self, batch: ProducerBatch, now_ms: int) -> bool:
        """Return whether a batch is older than delivery_timeout_ms."""
        return now_ms - batch.created_ms > self._settings.delivery_timeout_ms

    def put_off(self, batch: ProducerBatch, now_ms: int) -> None:
        """Delay a batch after a failed attempt that may be retried (2.3, rule 7)."""
        batch.attempts += 1
        settings = self._settings
        wait_ms = min(
            settings.retry_backoff_ms * 2 ** min(batch.attempts - 1, 20),
            settings.retry_backoff_max_ms,
        )
        # 80 to 120 %, so that not all retry at the same time
        batch.due_ms = now_ms + wait_ms * (800 + self._draw(401)) // 1000

    def is_open(self, queue: Queue, batch: ProducerBatch) -> bool:
        """Return whether the batch has no outcome and was not split."""
        return batch in queue.batches

    def remove(self, queue: Queue, batch: ProducerBatch) -> None:
        """Remove a batch that has its outcome, and free its memory."""
        if batch is queue.filling:
            queue.close()
        # This is first, because a queue without batches must not be active.
        if len(queue.batches) == 1 and self.is_open(queue, batch):
            self.active.pop(queue, None)
        queue.batches.remove(batch)
        self.used_bytes -= batch.held_bytes
        self.used_records -= len(batch.records)

    def split(self, queue: Queue, batch: ProducerBatch) -> None:
        """Replace a batch by its two halves."""
        halves = batch.split()
        at = queue.batches.index(batch)
        queue.batches.remove(batch)
        for half in reversed(halves):
            queue.batches.insert(at, half)

    @property
    def queued_records(self) -> int:
        """Number of records without an outcome."""
        return sum(len(batch.records) for _, batch in self.all())

    def all(self) -> Iterator[tuple[Queue, ProducerBatch]]:
        """Return every batch without an outcome."""
        return (
            (queue, batch)
            for queue in list(self.active)
            for batch in list(queue.batches)
        )

    def pending(self) -> list[Delivery]:
        """Return the deliveries that are open now."""
        return list(
            itertools.chain.from_iterable(
                [batch.delivery for batch in queue.batches] for queue in self.active
            )
        )
