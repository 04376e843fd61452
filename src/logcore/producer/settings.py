"""Settings of a producer, the metadata of a stored record, and the producer's metrics.

Rules:
- Settings have the names of Kafka's Java client, with underscores. They are checked
  when the producer is created.
- `config=` also accepts Kafka's dotted names; see clientconfig.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, Protocol, TypedDict

import attrs

from logcore.clientconfig import Vocabulary, words
from logcore.coordination.transactions import MAX_TIMEOUT_MS
from logcore.errors import InvalidConfigError
from logcore.format.compression import codec_named
from logcore.kernels.layout import Level, Time
from logcore.producer.partitioners import PARTITIONERS, PartitionFunction

#: Kafka's records store the length of a text in 16 bits, one of which is the sign.
_MAX_ID_BYTES: Final = 32_767

Serializer = Callable[[Any], bytes | None]


class RecordMetadata(NamedTuple):
    """The position of a stored record, with its timestamp and sizes."""

    topic: str
    partition: int
    #: -1 after a failure.
    offset: int
    #: -1 after a failure if the log sets the timestamps.
    timestamp_ms: int
    #: "create", or "append" if the log sets the timestamps.
    timestamp_type: Literal["create", "append"]
    #: In bytes, -1 for a null key.
    serialized_key_size: int
    #: In bytes, -1 for a null value.
    serialized_value_size: int
    #: "disk" if a sync began after the write and succeeded, otherwise "os".
    durability: Level


class ProducerRecord(NamedTuple):
    """The arguments of send() before serialization. An interceptor may replace them."""

    topic: str
    value: Any
    key: Any
    partition: int | None
    headers: Any
    timestamp_ms: Time | None


class ProducerInterceptor(Protocol):
    """Processes each record of send(). Its errors are reported to sys.unraisablehook
    and have no other effect.
    """

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Return the record to send. Runs in the thread of send()."""
        ...

    def on_acknowledgement(
        self, metadata: RecordMetadata, error: Exception | None
    ) -> None:
        """Handle the outcome of a record, before the callbacks and in their thread."""
        ...


OnDelivery = Callable[[Exception | None, RecordMetadata], object]


@attrs.frozen(kw_only=True)
class ProducerMetrics:
    """A snapshot of the counters of a producer since it was created."""

    #: Acknowledged records.
    records: int
    #: Bytes of the keys, values and headers of the acknowledged records.
    bytes: int
    #: Acknowledged batches.
    batches: int
    #: Failed attempts that were retried.
    retries: int
    #: Number of failed records by the class name of the error.
    errors: Mapping[str, int]
    #: Records that were sent and have no outcome yet.
    queued_records: int
    #: Memory of the queued records.
    queued_bytes: int
    #: Threads that wait for memory now.
    waiting_threads: int
    #: Total time of all waits for memory.
    blocked_ms: int
    #: Requested fdatasync calls.
    syncs: int
    #: Median time from the creation of a batch to its outcome, over the last 1,024
    #: batches.
    latency_ms_p50: int
    #: 99th percentile of these times.
    latency_ms_p99: int
    #: Maximum of these times.
    latency_ms_max: int
    #: Mean stored size of these batches.
    batch_bytes_mean: int


class ProducerOptions(TypedDict, total=False):
    """The settings of LogDir.producer(), by the names of Kafka's Java client, with its
    defaults.

    Attributes:
        acks: With 0 or 1, a record has its outcome after the write. With "all"
            (default), it has its outcome after a sync that began after the write.
        durability: "os" means acks=1, and "disk" means acks="all".
        linger_ms: How long a batch waits for more records. Default: 5.
        batch_size: Maximum bytes of a batch. Default: 16,384.
        batch_records: Maximum records of a batch. Default: no limit.
        buffer_memory: Maximum bytes of records without an outcome. Default: 33,554,432.
        buffer_records: Maximum number of records without an outcome. Default: no limit.
        max_block_ms: How long send() waits for memory. Default: 60,000.
        delivery_timeout_ms: How long a batch may be retried. Default: 120,000.
        retry_backoff_ms: First pause between attempts. It doubles. Default: 100.
        retry_backoff_max_ms: Longest pause between attempts. Default: 1,000.
        max_request_size: Maximum bytes of a record. Default: 1,048,576.
        compression_type: A codec. Default: the codec in the topic's settings.
        partitioner: A name of producer/partitioners.py, or f(key, partitions) -> int.
            Default: "default".
        partitioner_ignore_keys: Choose partitions as if no record had a key. Default:
            False.
        key_serializer: f(key) -> bytes or None. It is never called with None.
        value_serializer: f(value) -> bytes or None. It is never called with None.
        interceptors: Objects with the methods of ProducerInterceptor.
        enable_idempotence: Default: True, unless acks is 0 or 1.
        client_id: A name for the metrics.
        on_delivery: f(error, metadata), called for each record.
        threaded: Whether a thread of the producer writes. Default: True.
    """

    acks: Literal[0, 1, -1, "0", "1", "-1", "all"]
    durability: Level
    linger_ms: int
    batch_size: int
    batch_records: int | None
    buffer_memory: int
    buffer_records: int | None
    max_block_ms: int
    delivery_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    max_request_size: int
    compression_type: str | None
    partitioner: str | PartitionFunction
    partitioner_ignore_keys: bool
    key_serializer: Serializer | None
    value_serializer: Serializer | None
    interceptors: Iterable[ProducerInterceptor]
    enable_idempotence: bool | None
    client_id: str
    on_delivery: OnDelivery | None
    threaded: bool


class TransactionOptions(ProducerOptions, total=False):
    """Further settings of LogDir.producer(), for a producer with a transactional_id.

    Attributes:
        transaction_timeout_ms: How long a transaction may be open before it is aborted,
            at most 900,000. Default: 60,000.
        two_phase: Whether transactions have no timeout, so that only the producer ends
            them; see prepare_transaction(). Default: False.
    """

    transaction_timeout_ms: int
    two_phase: bool


#: Accepted values of acks, as numbers or texts like in Kafka.
_ACKS: Final[Mapping[object, Literal[0, 1, -1]]] = {
    0: 0,
    1: 1,
    -1: -1,
    "0": 0,
    "1": 1,
    "-1": -1,
    "all": -1,
}
_ACKS_BY_DURABILITY: Final[Mapping[str, Literal[1, -1]]] = {"os": 1, "disk": -1}
#: Settings of Kafka's producer about its network, which have no meaning here. The
#: settings that producer and consumer share are in clientconfig.py.
_NETWORK_SETTINGS: Final = words("""
    max_in_flight_requests_per_connection retries partitioner_adaptive_partitioning_enable
    partitioner_availability_timeout_ms
""")
#: Names of the same settings in librdkafka and in Kafka 0.7's producer.
_ALIASES: Final = {
    "queue_buffering_max_ms": "linger_ms",
    "queue_buffering_max_messages": "buffer_records",
    "compression_codec": "compression_type",
    "request_required_acks": "acks",
    "message_timeout_ms": "delivery_timeout_ms",
    "message_max_bytes": "max_request_size",
}


def _integer_at_least(name: str, minimum: int) -> Any:
    def check(_settings: ProducerSettings, _attribute: object, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InvalidConfigError(
                name, expected=f"a whole number, at least {minimum}", found=repr(value)
            )

    return check


def _check_boolean(
    _settings: ProducerSettings, attribute: attrs.Attribute[bool], value: object
) -> None:
    if not isinstance(value, bool):
        raise InvalidConfigError(
            attribute.name, expected="True or False", found=repr(value)
        )


def _check_codec(
    _settings: ProducerSettings, _attribute: object, value: str | None
) -> None:
    if value is not None:
        codec_named("uncompressed" if value == "none" else value)


def _check_callable(
    _settings: ProducerSettings, attribute: attrs.Attribute[Any], value: object
) -> None:
    if value is not None and not callable(value):
        raise InvalidConfigError(
            attribute.name, expected="a function, or None", found=repr(value)
        )


def _convert_acks(value: object) -> Literal[0, 1, -1]:
    level = None
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        level = _ACKS.get(value)
    if level is None:
        raise InvalidConfigError("acks", expected="0, 1 or 'all'", found=repr(value))
    return level


@attrs.frozen(kw_only=True)
class ProducerSettings:
    """Checked settings; ProducerOptions documents them. `acks` is -1 for "all"."""

    acks: Literal[0, 1, -1] = attrs.field(default=-1, converter=_convert_acks)
    linger_ms: int = attrs.field(default=5, validator=_integer_at_least("linger_ms", 0))
    batch_size: int = attrs.field(
        default=16_384, validator=_integer_at_least("batch_size", 0)
    )
    batch_records: int | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(_integer_at_least("batch_records", 1)),
    )
    buffer_memory: int = attrs.field(
        default=33_554_432, validator=_integer_at_least("buffer_memory", 1)
    )
    buffer_records: int | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(_integer_at_least("buffer_records", 1)),
    )
    max_block_ms: int = attrs.field(
        default=60_000, validator=_integer_at_least("max_block_ms", 0)
    )
    delivery_timeout_ms: int = attrs.field(
        default=120_000, validator=_integer_at_least("delivery_timeout_ms", 0)
    )
    retry_backoff_ms: int = attrs.field(
        default=100, validator=_integer_at_least("retry_backoff_ms", 0)
    )
    retry_backoff_max_ms: int = attrs.field(
        default=1_000, validator=_integer_at_least("retry_backoff_max_ms", 0)
    )
    max_request_size: int = attrs.field(
        default=1_048_576, validator=_integer_at_least("max_request_size", 1)
    )
    compression_type: str | None = attrs.field(default=None, validator=_check_codec)
    partitioner: str | PartitionFunction = "default"
    partitioner_ignore_keys: bool = attrs.field(default=False, validator=_check_boolean)
    key_serializer: Serializer | None = attrs.field(
        default=None, validator=_check_callable
    )
    value_serializer: Serializer | None = attrs.field(
        default=None, validator=_check_callable
    )
    interceptors: tuple[ProducerInterceptor, ...] = attrs.field(
        default=(), converter=tuple
    )
    enable_idempotence: bool | None = None
    client_id: str = ""
    on_delivery: OnDelivery | None = attrs.field(
        default=None, validator=_check_callable
    )
    threaded: bool = attrs.field(default=True, validator=_check_boolean)
    transactional_id: str | None = None
    transaction_timeout_ms: int = attrs.field(
        default=60_000, validator=_integer_at_least("transaction_timeout_ms", 1)
    )
    two_phase: bool = attrs.field(default=False, validator=_check_boolean)

    def __attrs_post_init__(self) -> None:
        if self.delivery_timeout_ms < self.linger_ms:
            raise InvalidConfigError(
                "delivery_timeout_ms is below linger_ms",
                expected=f"at least {self.linger_ms}",
                found=self.delivery_timeout_ms,
            )
        if self.retry_backoff_max_ms < self.retry_backoff_ms:
            raise InvalidConfigError(
                "retry_backoff_max_ms is below retry_backoff_ms",
                expected=f"at least {self.retry_backoff_ms}",
                found=self.retry_backoff_max_ms,
            )
        if isinstance(self.partitioner, str) and self.partitioner not in PARTITIONERS:
            raise InvalidConfigError(
                "unknown partitioner",
                expected=f"one of {', '.join(PARTITIONERS)}, or a function",
                found=repr(self.partitioner),
            )
        if not isinstance(self.partitioner, str) and not callable(self.partitioner):
            raise InvalidConfigError(
                "partitioner",
                expected="a name, or a function",
                found=repr(self.partitioner),
            )
        if self.enable_idempotence and self.acks != -1:
            raise InvalidConfigError(
                "enable_idempotence needs acks='all'", expected="'all'", found=self.acks
            )
        if self.transactional_id is None:
            return
        if not isinstance(self.transactional_id, str) or not self.transactional_id:
            raise InvalidConfigError(
                "transactional_id", expected="a text", found=repr(self.transactional_id)
            )
        if len(self.transactional_id.encode("utf-8", "surrogatepass")) > _MAX_ID_BYTES:
            raise InvalidConfigError(
                "transactional_id is too long",
                expected=f"at most {_MAX_ID_BYTES} bytes",
                found=f"{len(self.transactional_id)} characters",
            )
        if any(
            "\ud800" <= character <= "\udfff" for character in self.transactional_id
        ):
            raise InvalidConfigError(
                "transactional_id",
                expected="valid Unicode",
                found=repr(self.transactional_id),
            )
        if not self.idempotent:
            raise InvalidConfigError(
                "transactional_id needs acks='all' and enable_idempotence"
            )
        if self.transaction_timeout_ms > MAX_TIMEOUT_MS:
            raise InvalidConfigError(
                "transaction_timeout_ms",
                expected=f"at most {MAX_TIMEOUT_MS}",
                found=self.transaction_timeout_ms,
            )

    @property
    def idempotent(self) -> bool:
        """Whether retries are idempotent: by default if acks is "all", as in Kafka."""
        if self.enable_idempotence is None:
            return self.acks == -1
        return self.enable_idempotence


_VOCABULARY: Final = Vocabulary(
    ProducerSettings, _NETWORK_SETTINGS, _ALIASES, unconverted=frozenset({"acks"})
)


def build_settings(
    config: Mapping[str, object] | None, keywords: Mapping[str, Any]
) -> ProducerSettings:
    """Return the settings for a dict with Kafka's names and for keyword arguments.
    Keyword arguments take precedence.

    Raises:
        InvalidConfigError: a setting is unknown or invalid.
    """
    arguments = _VOCABULARY.of_config(config)
    for name, value in keywords.items():
        if name == "durability":
            arguments["acks"] = _acks_of(value, "acks" in keywords)
            continue
        _VOCABULARY.check_keyword(name)
        arguments[name] = value
    return ProducerSettings(**arguments)


def _acks_of(durability: object, has_acks: bool) -> Literal[1, -1]:
    if has_acks:
        raise InvalidConfigError(
            "acks and durability exclude each other; pass one of them"
        )
    level = None
    if isinstance(durability, str):
        level = _ACKS_BY_DURABILITY.get(durability)
    if level is None:
        raise InvalidConfigError(
            "durability", expected="'os' or 'disk'", found=repr(durability)
        )
    return level
