"""Base classes for the state that each send changes, with plain attributes.

The compiled kernels have the same classes with these attributes as C fields, so that
ProducerFields._send_fast() can read and change them within nanoseconds. Each number
is stored once: C and Python read and set the same attribute.

This plain form has no fast path. Each record takes the path of producer/producer.py,
which defines the behavior of the fast one. See _sending.pxi for the conditions and the
steps of the compiled fast path.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

#: Maximum size of a record in a batch in addition to key, value and headers (Kafka:
#: DefaultRecord).
RECORD_BYTES: Final = 21
#: Size of a record in memory in addition to its bytes in the batch. The total is 64
#: plus key, value and headers.
RECORD_OVERHEAD_BYTES: Final = 64 - RECORD_BYTES


class FutureFields:
    """The base of producer.futures.RecordFuture. `index` is the position in its batch.

    Sizes are in bytes, -1 for null.
    """

    __slots__ = ("batch", "index", "key_size", "sent_ms", "value_size")
    batch: Any
    index: int
    sent_ms: int
    key_size: int
    value_size: int


class BatchFields:
    """The base of producer.accumulator.Batch, which documents its fields."""

    __slots__ = ("delivery", "limit_bytes", "max_records", "records", "size_bytes")
    delivery: Any
    records: Any
    size_bytes: int
    limit_bytes: int
    max_records: int


class QueueFields:
    """The base of producer.accumulator.Queue, which documents its fields."""

    __slots__ = ("open_batch",)
    open_batch: Any


class AccumulatorFields:
    """The base of producer.accumulator.Accumulator, which documents its fields."""

    __slots__ = ("used_bytes", "used_records", "waiting")
    used_bytes: int
    used_records: int
    waiting: deque[object]


class RouteFields:
    """The base of producer.routing.Route, which documents its fields."""

    __slots__ = ("queues", "sticky", "sticky_bytes", "uses_murmur2")
    queues: list[Any]
    sticky: Any
    sticky_bytes: int
    uses_murmur2: bool


class ThreadStateFields:
    """The base of the state of a producer's thread, which documents its fields."""

    lock: Any
    accumulator: Any
    is_closing: bool


class ProducerFields:
    """The base of producer.producer.Producer.

    Only the constructor sets these fields.
    """

    _fs: Any
    #: The state of the producer's thread.
    _thread_state: Any
    #: Topic to Route.
    _routes_by_topic: dict[str, Any]
    #: Whether a send may take the fast path. It is false in a transaction, with
    #: interceptors, with serializers, with a callback for all records, and with a
    #: simulated clock.
    _uses_fast_path: bool
    #: RecordFuture.
    _future_type: Any
    #: buffer_memory.
    _max_memory_bytes: int
    #: buffer_records.
    _max_memory_records: int
    #: Maximum size of a record.
    _max_record_bytes: int
    #: Number of forks of the process before the producer was created.
    _forks: int

    def _send_fast(
        self,
        topic: object,
        value: object,
        key: object,
        partition: object,
        headers: object,
        timestamp_ms: object,
        on_delivery: object,
    ) -> Any:
        """Put a record into the open batch of its partition if nothing is unusual.

        Returns its RecordFuture, or None without any effect if something is unusual.
        The arguments are those of Producer.send().
        """
        return None
