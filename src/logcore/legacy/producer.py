"""The producer of Kafka 0.7: its names and settings, on LogDir.producer().

    producer = Producer(data, {"producer.type": "async", "serializer.class": str.encode})
    producer.send(ProducerData("orders", "anna", ["4 apples", "a pear"]))
    producer.close()

Rules (clients reference 2.12):
- With producer.type=sync, the default, send() returns after the records are stored.
  With async, send() returns after they are queued. A batch is written when it has
  batch.size records, or after queue.time.
- The queue has a capacity of queue.size records. If it is full, send() waits with
  queue.enqueue.timeout.ms=-1, and raises an error with 0.
- The order of records in a partition is preserved. A setting such as serializer.class
  is a function here, not the name of a Java class.

Batches, retries and the default partitioner are implemented in logcore.producer.
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

#: The settings of the producers of Kafka 0.7 and 0.8. The value is the name of the
#: setting in ProducerOptions, or a name that only this module uses.
_SETTING_NAMES: Final = {
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
_NETWORK_PREFIXES: Final = (
    "zk.",
    "zookeeper.",
    "broker.",
    "metadata.",
    "socket.",
    "buffer.size",
    "connect.",
    "reconnect.",
)
#: Codecs by their numbers in Kafka 0.7.
_CODECS: Final = {
    0: "none",
    1: "gzip",
    2: "snappy",
    "0": "none",
    "1": "gzip",
    "2": "snappy",
}
_INTEGER_SETTINGS: Final = (
    "linger_ms",
    "batch_records",
    "buffer_records",
    "max_block_ms",
    "max_request_size",
)
#: Time that send() waits with -1: 24 days, the maximum for a lock.
_INDEFINITE_MS: Final = 2**31 - 1


class LegacyDirectory(Protocol):
    """The methods of a LogDir that this module uses."""

    @property
    def producer(self) -> Callable[..., PlainProducer]: ...
    def partitions(self, name: str) -> tuple[int, ...]: ...


class LegacyPartitioner(Protocol):
    """Returns an index from 0 to num_partitions - 1. `key` is the key of the
    ProducerData, or None.
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
    without an outcome. queue.enqueue.timeout.ms (-1) limits the time that send() waits
    for free capacity. serializer.class and key.serializer.class are f(value) -> bytes.
    partitioner.class is a LegacyPartitioner; the default is the partitioner of
    LogDir.producer().
    callback.handler is f(error, metadata), and event.handler an interceptor.
    compression.codec is none, gzip, snappy, or their numbers.

    Settings that need a network are ignored with a warning. Raises InvalidConfigError.
    """

    def __init__(
        self, directory: LegacyDirectory, config: Mapping[str, object] | None = None
    ) -> None:
        settings = _convert_config(config or {})
        self.type = settings.pop("type", "sync")
        if self.type not in ("sync", "async"):
            raise InvalidConfigError(
                "producer.type", expected="sync or async", found=repr(self.type)
            )
        settings.setdefault("buffer_records", 10_000)
        if settings.get("max_block_ms", -1) < 0:
            settings["max_block_ms"] = _INDEFINITE_MS
        self._partitioner: LegacyPartitioner | None = settings.pop("partitioner", None)
        if self._partitioner is not None and not callable(self._partitioner):
            raise InvalidConfigError(
                "partitioner.class",
                expected="a function",
                found=repr(self._partitioner),
            )
        if "interceptor" in settings:
            settings["interceptors"] = [settings.pop("interceptor")]
        if self.type == "sync":
            settings["linger_ms"] = 0
        else:
            settings.setdefault("linger_ms", 5_000)
            settings.setdefault("batch_records", 200)
        self._directory = directory
        self._producer = directory.producer(**cast("ProducerOptions", settings))

    def __repr__(self) -> str:
        return f"<{self.type} {self._producer!r}>"

    def send(self, data: ProducerData | Iterable[ProducerData]) -> list[RecordFuture]:
        """Send the values of one or several ProducerData in order. Return a future for
        each value.

        With producer.type=sync, this call returns after all records are stored, or
        raises the error of the first record that cannot be stored. Raises
        BufferFullError if the queue remains full; earlier records are sent then. Raises
        also the errors of logcore.producer.Producer.send().
        """
        if isinstance(data, ProducerData):
            data_list = [data]
        else:
            data_list = list(data)
        for producer_data in data_list:
            if not isinstance(producer_data, ProducerData):
                raise InvalidRecordError(
                    "send() takes ProducerData", found=type(producer_data).__name__
                )
        futures = [
            self._send(producer_data, value)
            for producer_data in data_list
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
            partition = self._choose_partition(self._partitioner, data)
        return self._producer.send(data.topic, value, key=data.key, partition=partition)

    def _choose_partition(
        self, partitioner: LegacyPartitioner, data: ProducerData
    ) -> int:
        """Return the partition for the index that a LegacyPartitioner returns."""
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
        """Write the queued records, wait for their outcomes, and close the producer."""
        self._producer.close()


def _convert_config(config: Mapping[str, object]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    ignored = []
    for name, value in config.items():
        if name.startswith(_NETWORK_PREFIXES):
            ignored.append(name)
            continue
        setting = _SETTING_NAMES.get(name)
        if setting is None:
            raise InvalidConfigError(
                f"unknown setting {name!r}", expected=", ".join(_SETTING_NAMES)
            )
        if setting in settings:
            raise InvalidConfigError(f"{name!r} is also set under another name")
        settings[setting] = (
            _parse_integer(name, value) if setting in _INTEGER_SETTINGS else value
        )
    if ignored:
        text = f"settings that need a network are ignored: {', '.join(sorted(ignored))}"
        warnings.warn(text, UserWarning, stacklevel=3)
    if "compression_type" in settings:
        settings["compression_type"] = _CODECS.get(
            settings["compression_type"], settings["compression_type"]
        )
    return settings


def _parse_integer(name: str, value: object) -> int:
    """Return a number. A properties file contains it as text."""
    try:
        return int(cast("Any", value))
    except (TypeError, ValueError):
        raise InvalidConfigError(
            name, expected="a whole number", found=repr(value)
        ) from None
