"""Values of a producer: its settings, the metadata of a stored record, its counters.

Rules:
- Settings have the names of Kafka's Java client, with underscores. They are checked
  when they are given.
- `config=` accepts Kafka's dotted names too; see clientconfig.py.

This module neither sends nor waits.
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
from logcore.producer.partitioners import PARTITIONERS, Choose

#: The length of a text in Kafka's records has 16 bits.
_LONGEST_ID_BYTES: Final = 32_767

Serializer = Callable[[Any], bytes | None]


class RecordMetadata(NamedTuple):
    """The position of a stored record. After a failure, `offset` is -1, and so is a
    `timestamp_ms` that the log would set.

    `timestamp_type` is "create", or "append" if the topic uses the clock of the log.
    `serialized_key_size` and `serialized_value_size` are in bytes, -1 for null.
    `durability` is "disk" after a sync that began after the write, else "os".
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: Literal["create", "append"]
    serialized_key_size: int
    serialized_value_size: int
    durability: Level


class ProducerRecord(NamedTuple):
    """The arguments of send(), before any serializer. An interceptor receives them, and
    may replace them.
    """

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
    """A snapshot of the counters of a producer since it was created.

    `records`, `bytes` (of keys, values and headers) and `batches` count acknowledged
    records and batches. `retries` counts batches that were tried again. `errors`
    contains the failed records by class name. `queued_records` and `queued_bytes` are
    sent and not yet acknowledged. `waiting_threads` wait for memory now, and
    `blocked_ms` is the time of all such waits. `syncs` counts the requested fdatasync
    calls. `latency_ms_p50`, `latency_ms_p99` and `latency_ms_max` are the times from
    the creation of a batch to its outcome, over the last 1,024 batches, and
    `batch_bytes_mean` is their stored size.
    """

    records: int
    bytes: int
    batches: int
    retries: int
    errors: Mapping[str, int]
    queued_records: int
    queued_bytes: int
    waiting_threads: int
    blocked_ms: int
    syncs: int
    latency_ms_p50: int
    latency_ms_p99: int
    latency_ms_max: int
    batch_bytes_mean: int


class ProducerOptions(TypedDict, total=False):
    """The settings of LogDir.producer(), by the names of Kafka's Java client, with its
    defaults.

    Attributes:
        acks: 0 or 1: a result waits for the write. "all" (default): for a sync that
            began after it.
        durability: "os" means acks 1, and "disk" means "all".
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
        partitioner_ignore_keys: Choose partitions as for records without a key.
            Default: False.
        key_serializer: f(given) -> bytes or None. It is never called with null.
        value_serializer: f(given) -> bytes or None. It is never called with null.
        interceptors: Objects such as ProducerInterceptor.
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
    partitioner: str | Choose
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


#: The level of each value of acks, which Kafka accepts as number or text.
_ACKS: Final[Mapping[object, Literal[0, 1, -1]]] = {
    0: 0,
    1: 1,
    -1: -1,
    "0": 0,
    "1": 1,
    "-1": -1,
    "all": -1,
}
_LEVELS: Final[Mapping[str, Literal[1, -1]]] = {"os": 1, "disk": -1}
#: Settings of Kafka's producer that need a network or threads of their own, and that
#: its consumer lacks.
_NETWORK: Final = words("""
    max_in_flight_requests_per_connection retries partitioner_adaptive_partitioning_enable
    partitioner_availability_timeout_ms
""")
#: Names of librdkafka and of the seeds.
_OTHER_NAMES: Final = {
    "queue_buffering_max_ms": "linger_ms",
    "queue_buffering_max_messages": "buffer_records",
    "compression_codec": "compression_type",
    "request_required_acks": "acks",
    "message_timeout_ms": "delivery_timeout_ms",
    "message_max_bytes": "max_request_size",
}


def _whole(name: str, least: int) -> Any:
    def check(_settings: ProducerSettings, _attribute: object, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidConfigError(
                name, expected=f"a whole number, at least {least}", found=repr(value)
            )

    return check


def _flag(
    _settings: ProducerSettings, attribute: attrs.Attribute[bool], value: object
) -> None:
    if not isinstance(value, bool):
        raise InvalidConfigError(
            attribute.name, expected="True or False", found=repr(value)
        )


def _codec(_settings: ProducerSettings, _attribute: object, value: str | None) -> None:
    if value is not None:
        codec_named("uncompressed" if value == "none" else value)


def _callable(
    _settings: ProducerSettings, attribute: attrs.Attribute[Any], value: object
) -> None:
    if value is not None and not callable(value):
        raise InvalidConfigError(
            attribute.name, expected="a function, or None", found=repr(value)
        )


def _acks(given: object) -> Literal[0, 1, -1]:
    found = None
    if isinstance(given, (int, str)) and not isinstance(given, bool):
        found = _ACKS.get(given)
    if found is None:
        raise InvalidConfigError("acks", expected="0, 1 or 'all'", found=repr(given))
    return found


@attrs.frozen(kw_only=True)
class ProducerSettings:
    """See LogDir.producer(). `acks` is 0, 1, or -1 for all. `idempotent` is
    enable_idempotence, if acks allows it.
    """

    acks: Literal[0, 1, -1] = attrs.field(default=-1, converter=_acks)
    linger_ms: int = attrs.field(default=5, validator=_whole("linger_ms", 0))
    batch_size: int = attrs.field(default=16_384, validator=_whole("batch_size", 0))
    batch_records: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_whole("batch_records", 1))
    )
    buffer_memory: int = attrs.field(
        default=33_554_432, validator=_whole("buffer_memory", 1)
    )
    buffer_records: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_whole("buffer_records", 1))
    )
    max_block_ms: int = attrs.field(default=60_000, validator=_whole("max_block_ms", 0))
    delivery_timeout_ms: int = attrs.field(
        default=120_000, validator=_whole("delivery_timeout_ms", 0)
    )
    retry_backoff_ms: int = attrs.field(
        default=100, validator=_whole("retry_backoff_ms", 0)
    )
    retry_backoff_max_ms: int = attrs.field(
        default=1_000, validator=_whole("retry_backoff_max_ms", 0)
    )
    max_request_size: int = attrs.field(
        default=1_048_576, validator=_whole("max_request_size", 1)
    )
    compression_type: str | None = attrs.field(default=None, validator=_codec)
    partitioner: str | Choose = "default"
    partitioner_ignore_keys: bool = attrs.field(default=False, validator=_flag)
    key_serializer: Serializer | None = attrs.field(default=None, validator=_callable)
    value_serializer: Serializer | None = attrs.field(default=None, validator=_callable)
    interceptors: tuple[ProducerInterceptor, ...] = attrs.field(
        default=(), converter=tuple
    )
    enable_idempotence: bool | None = None
    client_id: str = ""
    on_delivery: OnDelivery | None = attrs.field(default=None, validator=_callable)
    threaded: bool = attrs.field(default=True, validator=_flag)
    transactional_id: str | None = None
    transaction_timeout_ms: int = attrs.field(
        default=60_000, validator=_whole("transaction_timeout_ms", 1)
    )
    two_phase: bool = attrs.field(default=False, validator=_flag)

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
        if (
            len(self.transactional_id.encode("utf-8", "surrogatepass"))
            > _LONGEST_ID_BYTES
        ):
            raise InvalidConfigError(
                "transactional_id is too long",
                expected=f"at most {_LONGEST_ID_BYTES} bytes",
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
        """On by default if acks allows it, as in Kafka's Java client."""
        if self.enable_idempotence is None:
            return self.acks == -1
        return self.enable_idempotence


_VOCABULARY: Final = Vocabulary(
    ProducerSettings, _NETWORK, _OTHER_NAMES, kept=frozenset({"acks"})
)


def chosen_settings(
    config: Mapping[str, object] | None, given: Mapping[str, Any]
) -> ProducerSettings:
    """Return the settings of a configuration with Kafka's names, and of keywords.
    Keywords take precedence.

    durability="os" or "disk" means acks 1 or all. Raises InvalidConfigError.
    """
    chosen = _VOCABULARY.of_config(config)
    for name, value in given.items():
        if name == "durability":
            chosen["acks"] = _acks_of(value, "acks" in given)
            continue
        _VOCABULARY.check_keyword(name)
        chosen[name] = value
    return ProducerSettings(**chosen)


def _acks_of(durability: object, has_acks: bool) -> Literal[1, -1]:
    if has_acks:
        raise InvalidConfigError("acks and durability say the same; give one of them")
    found = None
    if isinstance(durability, str):
        found = _LEVELS.get(durability)
    if found is None:
        raise InvalidConfigError(
            "durability", expected="'os' or 'disk'", found=repr(durability)
        )
    return found
