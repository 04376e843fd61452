"""What each send of a producer changes, as plain attributes: bases of the classes that hold them, and the quick way.

The compiled kernels have the same classes, with these attributes as C fields, so that ProducerFields.send_quickly()
can look at them and change them within nanoseconds. There is one place for each number: whoever reads or sets the
attribute, in C or in Python, means the same.

This plain form has no quick way: each record goes the one of producer/producer.py, which is the rule book for the
other. See _sending.pxi for what the compiled one does, and when.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

#: What a record takes in a batch at most beside key, value and headers (Kafka: DefaultRecord).
RECORD_BYTES: Final = 21
#: What a record takes in memory beside its bytes in the batch: 64 beside key, value and headers.
HELD_BYTES: Final = 64 - RECORD_BYTES


class FutureFields:
    """The base of producer.futures.RecordFuture. index: of the record in its batch. Sizes are in bytes, -1 for null."""

    __slots__ = ("batch", "index", "key_size", "sent_ms", "value_size")
    batch: Any
    index: int
    sent_ms: int
    key_size: int
    value_size: int


class BatchFields:
    """The base of producer.accumulator.Batch, which documents its fields."""

    __slots__ = ("delivery", "limit_bytes", "most_records", "records", "size_bytes")
    delivery: Any
    records: Any
    size_bytes: int
    limit_bytes: int
    most_records: int


class QueueFields:
    """The base of producer.accumulator.Queue, which documents its fields."""

    __slots__ = ("filling",)
    filling: Any


class AccumulatorFields:
    """The base of producer.accumulator.Accumulator, which documents its fields."""

    __slots__ = ("used_bytes", "used_records", "waiting")
    used_bytes: int
    used_records: int
    waiting: deque[object]


class RouteFields:
    """The base of producer.routing.Route, which documents its fields."""

    __slots__ = ("hashes_keys", "queues", "sticky", "sticky_bytes")
    queues: list[Any]
    sticky: Any
    sticky_bytes: int
    hashes_keys: bool


class WorkFields:
    """The base of what the thread of a producer knows of it; documented there."""

    lock: Any
    accumulator: Any
    is_closing: bool


class ProducerFields:
    """The base of producer.producer.Producer.

    _work: what its thread knows of it. _known_routes: topic -> Route. _is_quick: whether a send may go the quick way;
    not in a transaction, with interceptors, serializers or a callback for all records, nor with a simulated clock.
    _future_type: RecordFuture. _memory_bytes: buffer_memory. _memory_records: buffer_records. _most_bytes: the largest
    record. _forks: how often the process had been forked when the producer was made. Written by the constructor alone.
    """

    _fs: Any
    _work: Any
    _known_routes: dict[str, Any]
    _is_quick: bool
    _future_type: Any
    _memory_bytes: int
    _memory_records: int
    _most_bytes: int
    _forks: int

    def _send_quickly(
        self,
        topic: object,
        value: object,
        key: object,
        partition: object,
        headers: object,
        timestamp_ms: object,
        on_delivery: object,
    ) -> Any:
        """Puts a record into the open batch of its partition, where nothing about it is unusual, and returns its
        RecordFuture; None where something is, and then nothing has happened. Takes what Producer.send() takes.
        """
        return None
