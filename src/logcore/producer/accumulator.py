"""Records on their way to the log: a queue of batches for each partition, and the memory they take.

Rules (clients reference 2.3, Kafka's RecordAccumulator):
- Only the last batch of a queue takes records. A record that does not fit closes it and begins another; the first
  record of a batch always fits.
- A batch is ready when it is closed, when it is linger_ms old, or when a thread waits for memory. A batch that failed
  for the time being waits for its backoff, and those behind it wait with it: the order of a partition always holds.
- Memory is counted from send() until the batch has its outcome. Threads that wait for it are served in the order of
  their arrival.
- Time comes with each call; a queue and its batches change under the producer's lock alone.

Nothing here encodes, writes, or waits: sender.py and producer.py do.
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
from logcore.producer.futures import Delivery, Teller
from logcore.producer.partitioners import Draw
from logcore.producer.values import ProducerSettings

#: The head of a batch, and what a header takes at most beside its name and value (Kafka: DefaultRecord).
BATCH_BYTES: Final = 61
HEADER_BYTES: Final = 10
#: More records than there can be.
NO_LIMIT: Final = 1 << 62
#: The estimate of a compressed size, as Kafka's CompressionRatioEstimator moves it.
_CAUTION: Final = 1.05
_WORSE_STEP: Final = 0.05
_BETTER_STEP: Final = 0.005

#: (key, value, headers, timestamp_ms), as the encoders take it.
Row = tuple[bytes | None, bytes | None, Any, int | None]


@attrs.frozen
class Columns:
    """Records as columns: (data, edges, nulls) of keys and of values, or None for all null; times int64, None for now.

    edges: int64 of shape (n + 1,); nulls: uint8 of shape (n,), or None.
    """

    keys: tuple[Any, npt.NDArray[np.int64], Any] | None
    values: tuple[Any, npt.NDArray[np.int64], Any] | None
    times: npt.NDArray[np.int64] | None
    count: int

    def __len__(self) -> int:
        return self.count

    def cut(self, start: int, stop: int) -> Columns:
        """Rows start to stop. The bytes are not copied."""
        keys = None
        if self.keys is not None:
            keys = _cut(self.keys, start, stop)
        values = None
        if self.values is not None:
            values = _cut(self.values, start, stop)
        times = None
        if self.times is not None:
            times = self.times[start:stop]
        return Columns(keys, values, times, stop - start)

    def size_bytes(self) -> int:
        """Of keys and values."""
        edges = [column[1] for column in (self.keys, self.values) if column is not None]
        return sum(int(one[-1] - one[0]) for one in edges)


def _cut(column: tuple[Any, Any, Any], start: int, stop: int) -> tuple[Any, Any, Any]:
    data, edges, nulls = column
    if nulls is not None:
        nulls = nulls[start:stop]
    return data, edges[start : stop + 1], nulls


class Identity:
    """The identity of the batches of one queue: producer id and epoch, and the next sequence. For the sender
    alone.
    """

    __slots__ = ("next_sequence", "producer_epoch", "producer_id")

    def __init__(self, producer_id: int, producer_epoch: int = 0) -> None:
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.next_sequence = 0


class Batch(BatchFields):
    """Records that are written together.

    records: rows, or columns. size_bytes: an upper bound for the encoded batch. limit_bytes, most_records: how much it
    may hold. is_closed: it takes no more records. attempts: the failed ones that may be repeated; due_ms: when the next
    may follow. data: the encoded batch, which has the identity and sequence from then on. written: where an append put
    it, while its outcome is open. is_unknown: an attempt may have stored it. failure: of the last attempt.
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

    def __init__(self, delivery: Delivery, created_ms: int, limit_bytes: int = 0, most_records: int = 0) -> None:
        self.delivery = delivery
        self.created_ms = created_ms
        self.limit_bytes = limit_bytes
        self.most_records = most_records
        self.records: list[Row] | Columns = []
        self.size_bytes = BATCH_BYTES
        self.is_closed = False
        self.attempts = 0
        self.due_ms = 0
        self.data: bytes | None = None
        self.identity: Identity | None = None
        self.sequence = -1
        self.written: Receipt | None = None
        self.is_unknown = False
        self.failure: Exception | None = None

    @property
    def held_bytes(self) -> int:
        """Its part of buffer_memory."""
        return self.size_bytes - BATCH_BYTES + HELD_BYTES * len(self.records)

    def fits(self, size_bytes: int) -> bool:
        """Whether it takes another record of at most so many bytes."""
        return self.size_bytes + size_bytes <= self.limit_bytes and len(self.records) < self.most_records

    def forget_attempt(self) -> None:
        """For a batch that is not stored: the next attempt encodes it again, with another sequence."""
        self.data = None
        self.identity = None
        self.sequence = -1
        self.written = None
        self.is_unknown = False

    def split(self) -> tuple[Batch, Batch]:
        """Two with its first and its second half."""
        middle = len(self.records) // 2
        deliveries = self.delivery.split(self.delivery.first + middle)
        halves = Batch(deliveries[0], self.created_ms), Batch(deliveries[1], self.created_ms)
        if isinstance(self.records, Columns):
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
    """The batches of one partition, the oldest first.

    filling: the last of them, while it takes records. identity: of the writer, made with its first write. reopened_ms:
    when the log was opened again.
    """

    __slots__ = ("batches", "identity", "partition", "reopened_ms", "topic")

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.batches: deque[Batch] = deque()
        self.filling = None
        self.identity: Identity | None = None
        self.reopened_ms: int | None = None

    def close(self) -> None:
        """The last batch takes no more records."""
        if self.filling is not None:
            self.filling.is_closed = True
            self.filling = None

    def renumber_behind(self, batch: Batch) -> None:
        """batch is not stored and never will be: its sequence is used again by the batches behind it. Otherwise the log
        would refuse these as out of order.
        """
        identity = batch.identity
        if identity is None or identity is not self.identity:
            return  # it was never encoded, or by an identity that was given up
        identity.next_sequence = batch.sequence
        for behind in itertools.islice(self.batches, self.batches.index(batch) + 1, None):
            if behind.identity is identity:
                behind.forget_attempt()


class Ratios:
    """(topic, codec) -> the ratio of compressed to plain bytes, worst first (Kafka: CompressionRatioEstimator)."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Codec], float] = {}

    def of(self, topic: str, codec: Codec) -> float:
        """To multiply a plain size with; 1 where nothing is compressed."""
        if codec is Codec.NONE:
            return 1.0
        return min(1.0, self._known.get((topic, codec), 1.0) * _CAUTION)

    def observe(self, topic: str, codec: Codec, ratio: float) -> None:
        """Of a batch that was encoded."""
        known = self._known.get((topic, codec), 1.0)
        if ratio > known:
            known = max(known + _WORSE_STEP, ratio)
        elif ratio < known:
            known = max(known - _BETTER_STEP, ratio)
        self._known[topic, codec] = known


class Accumulator(AccumulatorFields):
    """All queues of a producer. used_bytes, used_records: of its memory. waiting: threads that wait for some, in their
    order.
    """

    def __init__(self, settings: ProducerSettings, teller: Teller, draw: Draw) -> None:
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
        self.active: dict[Queue, None] = {}  # those with batches
        self.used_bytes = 0
        self.used_records = 0
        self.waiting = deque()

    def queue(self, topic: str, partition: int) -> Queue:
        """That of a partition, made when it is first asked for."""
        found = self.queues.get((topic, partition))
        if found is None:
            found = self.queues[topic, partition] = Queue(topic, partition)
        return found

    def begin(self, queue: Queue, now_ms: int) -> Batch:
        """A batch that takes records, behind those of the queue."""
        queue.close()
        # batch_size limits the compressed batch, and records are counted uncompressed.
        limit_bytes = int(self._settings.batch_size / self.ratios.of(queue.topic, self._codec))
        delivery = Delivery(queue.topic, queue.partition, self._teller)
        batch = Batch(delivery, now_ms, limit_bytes, self._most_records)
        queue.batches.append(batch)
        queue.filling = batch
        self.active[queue] = None
        return batch

    def add(self, queue: Queue, records: list[Row] | Columns, size_bytes: int, now_ms: int) -> Batch:
        """A batch of its own for records that take so many bytes, behind those of the queue."""
        batch = self.begin(queue, now_ms)
        queue.close()
        batch.records = records
        batch.size_bytes += size_bytes
        self.used_bytes += batch.held_bytes
        self.used_records += len(batch.records)
        return batch

    def close_all(self) -> None:
        """No batch takes more records: everything is ready."""
        for queue in self.active:
            queue.close()

    def ready(self, queue: Queue, now_ms: int, most_bytes: int, *, closed_only: bool = False) -> list[Batch]:
        """The batches to write now, from the front: at most so many bytes, or one batch. Open ones are closed."""
        found: list[Batch] = []
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

    def _ready_ms(self, batch: Batch) -> int:
        if batch.is_closed or self.waiting:
            return batch.due_ms
        return max(batch.due_ms, batch.created_ms + self._settings.linger_ms)

    def next_ms(self) -> int | None:
        """When the next batch is ready, or is too old; None if there is none."""
        fronts = [queue.batches[0] for queue in self.active]
        if not fronts:
            return None
        timeout_ms = self._settings.delivery_timeout_ms
        return min(min(self._ready_ms(one), one.created_ms + timeout_ms) for one in fronts)

    def is_expired(self, batch: Batch, now_ms: int) -> bool:
        """Whether it is older than delivery_timeout_ms."""
        return now_ms - batch.created_ms > self._settings.delivery_timeout_ms

    def put_off(self, batch: Batch, now_ms: int) -> None:
        """After a failed attempt that may be repeated (2.3, rule 7)."""
        batch.attempts += 1
        settings = self._settings
        wait_ms = min(settings.retry_backoff_ms * 2 ** min(batch.attempts - 1, 20), settings.retry_backoff_max_ms)
        batch.due_ms = now_ms + wait_ms * (800 + self._draw(401)) // 1000  # 80 to 120 %, so that not all come at once

    def is_open(self, queue: Queue, batch: Batch) -> bool:
        """Whether the batch is still in its queue: it has no outcome, and was not split."""
        return batch in queue.batches

    def remove(self, queue: Queue, batch: Batch) -> None:
        """It has its outcome: its memory is free."""
        if batch is queue.filling:
            queue.close()
        if len(queue.batches) == 1 and self.is_open(queue, batch):  # first: no queue without batches is active
            self.active.pop(queue, None)
        queue.batches.remove(batch)
        self.used_bytes -= batch.held_bytes
        self.used_records -= len(batch.records)

    def split(self, queue: Queue, batch: Batch) -> None:
        """Its halves take its place."""
        halves = batch.split()
        at = queue.batches.index(batch)
        queue.batches.remove(batch)
        for half in reversed(halves):
            queue.batches.insert(at, half)

    @property
    def queued_records(self) -> int:
        """Records without an outcome."""
        return sum(len(batch.records) for _, batch in self.all())

    def all(self) -> Iterator[tuple[Queue, Batch]]:
        """Every batch that has no outcome yet."""
        return ((queue, batch) for queue in list(self.active) for batch in list(queue.batches))

    def pending(self) -> list[Delivery]:
        """The outcomes that are open now."""
        return list(itertools.chain.from_iterable([one.delivery for one in queue.batches] for queue in self.active))
