"""The producer of Kafka 0.7: its names and settings, on LogDir.producer().

    producer = Producer(data, {"producer.type": "async", "serializer.class": str.encode})
    producer.send(ProducerData("orders", "anna", ["4 apples", "a pear"]))
    producer.close()

Rules (clients reference 2.12):
- With producer.type=sync, the default, send() returns when the records are stored. With
  async, it returns once they are queued. A batch is written when it has batch.size
  records, or after queue.time.
- The queue has room for queue.size records. If it is full, queue.enqueue.timeout.ms
  decides: with -1 send() waits, with 0 it raises.
- The order in a partition is kept. Classes of Java are functions here, such as
  serializer.class.

Batches, retries and the default partitions are implemented in logcore.producer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, cast

from logcore.closeable import Closeable
from logcore.errors import InvalidConfigError, InvalidRecordError
from logcore.producer import Producer as PlainProducer
from logcore.producer import RecordFuture, RecordMetadata
from logcore.producer.settings import ProducerOptions

#: The settings of the producers of Kafka 0.7 and 0.8: name -> our name, or the action
#: of this module.
_NAMES: Final = {
    "producer.type": "type",
    "queue.time": "linger_ms",
    "queue.buffering.max.ms": "linger_ms",
    "batch.size": "batch_records",
    "batch.num.messages": "batch_records",
    "queue.size": "buffer_records",
    "queue.buffering.max.messages": "buffer_records",
    "queue.enqueue.timeout.ms": "max_block_ms",
    "queue.enqueueTimeout.ms": "max_block_ms",
    "serializer.class": "value_serializer",
    "key.serializer.class": "key_serializer",
    "partitioner.class": "partitioner",
    "event.handler": "interceptor",
    "callback.handler": "on_delivery",
    "compression.codec": "compression_type",
    "request.required.acks": "acks",
    "max.message.size": "max_request_size",
    "client.id": "client_id",
}
#: Settings that need a network, and are ignored with a warning.
_NETWORK: Final = (
    "zk.",
    "zookeeper.",
    "broker.",
    "metadata.",
    "socket.",
    "buffer.size",
    "connect.",
    "reconnect.",
)
#: The codecs by the numbers that they have in the format.
_CODECS: Final = {
    0: "none",
    1: "gzip",
    2: "snappy",
    "0": "none",
    "1": "gzip",
    "2": "snappy",
}
_NUMBERS: Final = (
    "linger_ms",
    "batch_records",
    "buffer_records",
    "max_block_ms",
    "max_request_size",
)
#: 24 days, the time that send() waits with -1. The wait for a lock may not be longer.
_INDEFINITE_MS: Final = 2**31 - 1


class LegacyDirectory(Protocol):
    """The methods of a LogDir that are used here."""

    @property
    def producer(self) -> Callable[..., PlainProducer]: ...
    def partitions(self, name: str) -> tuple[int, ...]: ...


class LegacyPartitioner(Protocol):
    """Chooses among partitions: returns an index from 0 to num_partitions - 1. `key` is
    the key given to send(), or None.
    """

    def __call__(self, key: Any, num_partitions: int, /) -> int: ...


class ProducerData(NamedTuple):
    """Values for one topic with one key. `data` is a value or a list of values."""

    topic: str
    key: Any
    data: Any

    def values(self) -> list[Any]:
        """Return the values as a list."""
        if isinstance(self.data, (list, tuple)):
            return list(self.data)
        return [self.data]


class SyncProducer:
    """Sends one record at a time, and waits for it."""

    def __init__(self, producer: PlainProducer) -> None:
        self._producer = producer

    def send(
        self,
        topic: str,
        value: Any = None,
        *,
        key: Any = None,
        partition: int | None = None,
    ) -> RecordMetadata:
        """Send a record and return its position. Raises the errors of send() and of its
        result; see logcore.producer.Producer.
        """
        return self._producer.send(topic, value, key=key, partition=partition).result()

    def close(self) -> None:
        """Close the producer."""
        self._producer.close()


class Producer(Closeable):
    """A producer whose `config` has the names of Kafka 0.7.

    A setting that names a class in Kafka takes a function here.

    producer.type is "sync" (default) or "async". queue.time or queue.buffering.max.ms
    (5,000) and batch.size or batch.num.messages (200) decide when an async batch is
    written. queue.size or queue.buffering.max.messages (10,000) limits the records
    without an outcome, and queue.enqueue.timeout.ms (-1) the time that send() waits for
    room. serializer.class and key.serializer.class are f(given) -> bytes.
    partitioner.class is a LegacyPartitioner; the default is the partitioner of
    LogDir.producer().
    callback.handler is f(error, metadata), and event.handler an interceptor.
    compression.codec is none, gzip, snappy, or their numbers.

    Settings that need a network are ignored with a warning. Raises InvalidConfigError.
    """

    def __init__(
        self, directory: LegacyDirectory, config: Mapping[str, object] | None = None
    ) -> None:
        chosen = _chosen(config or {})
        self.type = chosen.pop("type", "sync")
        if self.type not in ("sync", "async"):
            raise InvalidConfigError(
                "producer.type", expected="sync or async", found=repr(self.type)
            )
        chosen.setdefault("buffer_records", 10_000)
        if chosen.get("max_block_ms", -1) < 0:
            chosen["max_block_ms"] = _INDEFINITE_MS
        self._partitioner: LegacyPartitioner | None = chosen.pop("partitioner", None)
        if self._partitioner is not None and not callable(self._partitioner):
            raise InvalidConfigError(
                "partitioner.class",
                expected="a function",
                found=repr(self._partitioner),
            )
        if "interceptor" in chosen:
            chosen["interceptors"] = [chosen.pop("interceptor")]
        if self.type == "sync":
            chosen["linger_ms"] = 0
        else:
            chosen.setdefault("linger_ms", 5_000)
            chosen.setdefault("batch_records", 200)
        self._directory = directory
        self._producer = directory.producer(**cast("ProducerOptions", chosen))

    def __repr__(self) -> str:
        return f"<{self.type} {self._producer!r}>"

    def send(self, data: ProducerData | Iterable[ProducerData]) -> list[RecordFuture]:
        """Send the values of one or several ProducerData in their order; return a
        future for each.

        With producer.type=sync, this call returns after all records are stored, or
        raises the first error of a record that cannot be stored. Raises BufferFullError
        if the queue remains full (earlier records are sent), and the errors of
        logcore.producer.Producer.send().
        """
        if isinstance(data, ProducerData):
            given = [data]
        else:
            given = list(data)
        for producer_data in given:
            if not isinstance(producer_data, ProducerData):
                raise InvalidRecordError(
                    "send() takes ProducerData", found=type(producer_data).__name__
                )
        futures = [
            self._send(producer_data, value)
            for producer_data in given
            for value in producer_data.values()
        ]
        if self.type == "sync":
            # exception() waits until the record is stored or has failed.
            errors = [future.exception() for future in futures]
            for error in errors:
                if error is not None:
                    raise error
        return futures

    def _send(self, data: ProducerData, value: Any) -> RecordFuture:
        partition = None
        if self._partitioner is not None:
            partition = self._chosen_partition(self._partitioner, data)
        return self._producer.send(data.topic, value, key=data.key, partition=partition)

    def _chosen_partition(
        self, partitioner: LegacyPartitioner, data: ProducerData
    ) -> int:
        """Return the chosen partition. The index of a LegacyPartitioner refers to the
        sorted partitions.
        """
        numbers = self._directory.partitions(data.topic)
        index = partitioner(data.key, len(numbers))
        if not isinstance(index, int) or not 0 <= index < len(numbers):
            raise InvalidConfigError(
                "partitioner.class",
                expected=f"an index from 0 to {len(numbers) - 1}",
                found=repr(index),
            )
        return numbers[index]

    def close(self) -> None:
        """Write the queued records, wait for them and close the producer."""
        self._producer.close()


def _chosen(config: Mapping[str, object]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    ignored = []
    for name, value in config.items():
        if name.startswith(_NETWORK):
            ignored.append(name)
            continue
        ours = _NAMES.get(name)
        if ours is None:
            raise InvalidConfigError(
                f"unknown setting {name!r}", expected=", ".join(_NAMES)
            )
        if ours in chosen:
            raise InvalidConfigError(f"{name!r} is given under another name too")
        chosen[ours] = _whole(name, value) if ours in _NUMBERS else value
    if ignored:
        what = f"settings that need a network are ignored: {', '.join(sorted(ignored))}"
        warnings.warn(what, UserWarning, stacklevel=3)
    if "compression_type" in chosen:
        chosen["compression_type"] = _CODECS.get(
            chosen["compression_type"], chosen["compression_type"]
        )
    return chosen


def _whole(name: str, value: object) -> int:
    """Return a number, which a file of settings contains as text."""
    try:
        return int(cast("Any", value))
    except (TypeError, ValueError):
        raise InvalidConfigError(
            name, expected="a whole number", found=repr(value)
        ) from None
