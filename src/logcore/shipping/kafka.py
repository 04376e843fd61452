"""A remote cluster, accessed with confluent-kafka (librdkafka).

librdkafka handles TLS, SASL, leaders and retries.

Rules:
- Only this module classifies the client's errors: the cluster cannot be reached,
  another producer has the transactional id, a record is refused, a partition is
  refused, or the transaction can only be aborted.
- Every call has a timeout. The caller decides whether to repeat the call.
- Calls and delivery reports run in the thread of the caller.
- librdkafka replaces a missing timestamp, and the timestamp 0, by the current time. It
  does not change other timestamps.

confluent-kafka is imported when a KafkaCluster is created. This module does not manage
progress.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from logcore.closeable import Closeable
from logcore.distribution import install_command
from logcore.errors import (
    InvalidConfigError,
    LogcoreError,
    MissingDependencyError,
    ProducerFencedError,
    RemoteTopicError,
    RemoteUnavailableError,
)
from logcore.kernels import Record
from logcore.shipping.cluster import (
    ClusterSender,
    FetchResult,
    Outcome,
    OutgoingBatch,
    Partition,
    RemoteRecord,
    RemoteSpan,
    RemoteTopic,
    ShippedProgress,
)

#: Timeout of one request to the cluster.
_REQUEST_TIMEOUT_S: Final = 10.0
#: Timeout of a call that ends a sender.
_CLOSE_TIMEOUT_S: Final = 2.0
#: The maximum of librdkafka's setting. The remote topic has the real limit.
_MAX_MESSAGE_BYTES: Final = 1_000_000_000
#: Time without progress after which the sender of a transaction is replaced.
_STALL_S: Final = 10.0
_FETCH_RECORDS: Final = 10_000
TRANSACTION_TIMEOUT_MS: Final = 60_000

#: Errors that apply to a single record of a partition.
_RECORD_ERRORS: Final = (
    "MSG_SIZE_TOO_LARGE",
    "RECORD_LIST_TOO_LARGE",
    "INVALID_MSG_SIZE",
    "INVALID_RECORD",
    "INVALID_TIMESTAMP",
    "INVALID_MSG",
    "_INVALID_DIFFERENT_RECORD",
    "UNSUPPORTED_FOR_MESSAGE_FORMAT",
)
#: Errors that apply to all records of a partition.
_PARTITION_ERRORS: Final = (
    "TOPIC_AUTHORIZATION_FAILED",
    "UNKNOWN_TOPIC_OR_PART",
    "TOPIC_EXCEPTION",
    "_UNKNOWN_TOPIC",
    "_UNKNOWN_PARTITION",
    "POLICY_VIOLATION",
    "INVALID_REQUIRED_ACKS",
)
#: Errors for a position outside the offsets of the partition, or a missing partition.
_POSITION_ERRORS: Final = (
    "_AUTO_OFFSET_RESET",
    "OFFSET_OUT_OF_RANGE",
    "_LOG_TRUNCATION",
    "UNKNOWN_TOPIC_OR_PART",
    "_UNKNOWN_TOPIC",
    "_UNKNOWN_PARTITION",
)
_FENCED_ERRORS: Final = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
#: Errors that a retry cannot resolve.
_PERMANENT_ERRORS: Final = (
    "_AUTHENTICATION",
    "SASL_AUTHENTICATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "_UNSUPPORTED_FEATURE",
    "UNSUPPORTED_VERSION",
    "INVALID_TRANSACTION_TIMEOUT",
)


def _client() -> Any:
    try:
        import confluent_kafka
    except ImportError:
        raise MissingDependencyError(
            f"shipping to or from a Kafka cluster needs confluent-kafka: {install_command('forward')}"
        ) from None
    return confluent_kafka


def _librdkafka_logger() -> logging.Logger:
    """Return the logger for librdkafka.

    The logger prints nothing unless a handler is set, because important errors are also
    raised as exceptions.
    """
    logger = logging.getLogger("logcore.shipping.librdkafka")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


class KafkaCluster(Closeable):
    """A Kafka cluster to ship to, or to mirror from.

    A `with` block closes it. Connections are opened when they are needed.

    `bootstrap_servers` contains addresses of brokers, "host:port,host:port". `config`
    contains additional settings of librdkafka, for example for TLS and SASL. They
    override the settings of logcore, except for the settings that delivery guarantees
    depend on.

    Raises:
        InvalidConfigError: librdkafka refuses a setting.
        MissingDependencyError: the client library is not installed.
    """

    def __init__(
        self, bootstrap_servers: str, config: Mapping[str, object] | None = None
    ) -> None:
        self._kafka = _client()
        self.bootstrap_servers = bootstrap_servers
        self._user_config = dict(config or {})
        self._last_error = ""  # last message of the client
        self._all_brokers_down = (
            False  # no broker could be reached since the last success
        )
        self._admin_client: Any = None
        self._group_consumers: dict[str, Any] = {}  # by group
        self._fetch_consumer: Any = None
        self._next_offsets: dict[
            Partition, int
        ] = {}  # the next offset of each partition that is fetched
        self.isolation_level = "read_committed"

    def __repr__(self) -> str:
        return f"<KafkaCluster {self.bootstrap_servers}>"

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        for reader in self._group_consumers.values():
            reader.close()
        self._group_consumers = {}
        self._close_fetch_consumer()
        self._admin_client = None

    def _config(self, **fixed: object) -> dict[str, object]:
        """Return the settings of a client.

        The names in `fixed` have `_` in place of `.`. The delivery guarantees depend on
        these settings, so they override the user's settings.
        """
        config: dict[str, object] = {
            "bootstrap.servers": self.bootstrap_servers,
            "error_cb": self._record_error,
            "logger": _librdkafka_logger(),
            "reconnect.backoff.max.ms": 1_000,
            **self._user_config,
        }
        config.update({name.replace("_", "."): value for name, value in fixed.items()})
        return config

    def _create_client(
        self, client_class: Callable[..., Any], config: Mapping[str, object]
    ) -> Any:
        try:
            return client_class(config)
        except self._kafka.KafkaException as error:
            raise InvalidConfigError(
                f"librdkafka refuses its settings: {_error_text(error)}"
            ) from error

    def _record_error(self, error: Any) -> None:
        self._last_error = error.str()
        if error.name() == "_ALL_BROKERS_DOWN":
            self._all_brokers_down = True

    def unavailable_error(self, error: Any = None) -> RemoteUnavailableError:
        """Return the exception for a cluster that does not respond."""
        if error is None:
            reason = self._last_error
        else:
            reason = _error_text(error)
        return RemoteUnavailableError(
            f"the cluster {self.bootstrap_servers} does not respond: {reason or 'no reason'}"
        )

    def convert_error(self, error: Any, transactional_id: str = "") -> LogcoreError:
        """Convert an exception of the client to an exception of logcore."""
        client_error = error.args[0]
        if client_error.name() in _FENCED_ERRORS:
            return ProducerFencedError(
                f"another forwarder has taken over the transactional id {transactional_id!r}"
            )
        if client_error.name() in _PERMANENT_ERRORS:
            return RemoteTopicError(
                f"the cluster {self.bootstrap_servers} refuses: {client_error.str()} ({client_error.name()})"
            )
        return self.unavailable_error(error)

    def _admin(self) -> Any:
        if self._admin_client is None:
            from confluent_kafka.admin import AdminClient

            self._admin_client = self._create_client(AdminClient, self._config())
        return self._admin_client

    # -- shipping records ---------------------------------------------------------------

    def partition_counts(self, topics: Collection[str]) -> dict[str, int]:
        """See TargetCluster.

        All topics are requested, because a cluster may create a missing topic that is
        requested by name.
        """
        try:
            all_topics = self._admin().list_topics(timeout=_REQUEST_TIMEOUT_S).topics
        except self._kafka.KafkaException as error:
            raise self.convert_error(error) from error
        return {
            name: len(all_topics[name].partitions)
            for name in topics
            if name in all_topics and all_topics[name].error is None
        }

    def create_topics(self, counts: Mapping[str, int]) -> None:
        """See TargetCluster. Replication is the cluster's default."""
        from confluent_kafka.cimpl import NewPartitions, NewTopic

        existing = self.partition_counts(counts)
        new = [
            NewTopic(name, num_partitions=count)
            for name, count in counts.items()
            if name not in existing
        ]
        more = [
            NewPartitions(name, count)
            for name, count in counts.items()
            if existing.get(name, count) < count
        ]
        futures = {}
        if new:
            futures.update(
                self._admin().create_topics(new, operation_timeout=_REQUEST_TIMEOUT_S)
            )
        if more:
            futures.update(
                self._admin().create_partitions(
                    more, operation_timeout=_REQUEST_TIMEOUT_S
                )
            )
        for name, future in futures.items():
            try:
                future.result(_REQUEST_TIMEOUT_S)
            except self._kafka.KafkaException as error:
                if error.args[0].name() == "TOPIC_ALREADY_EXISTS":
                    continue
                if error.args[0].retriable():
                    raise self.unavailable_error(error) from error
                raise RemoteTopicError(
                    f"topic {name!r} could not be created: {_error_text(error)}"
                ) from error

    def committed(
        self, group_id: str, partitions: Collection[Partition]
    ) -> dict[Partition, ShippedProgress]:
        """See TargetCluster.

        With isolation level read_committed, the request waits for transactions that are
        being committed.
        """
        requested = [
            self._kafka.TopicPartition(topic, number) for topic, number in partitions
        ]
        if not requested:
            return {}
        try:
            results = self.group_consumer(group_id).committed(
                requested, timeout=_REQUEST_TIMEOUT_S
            )
        except self._kafka.KafkaException as error:
            raise self.convert_error(error) from error
        for result in results:
            if result.error is not None:
                raise RemoteUnavailableError(
                    f"the offset of {result.topic}-{result.partition}: {result.error.str()}"
                )
        return {
            (result.topic, result.partition): ShippedProgress(
                result.offset, result.metadata or ""
            )
            for result in results
            if result.offset >= 0
        }

    def group_consumer(self, group_id: str) -> Any:
        """Return a consumer of a group that reads no records.

        The consumer is used to read and commit offsets, and for the group's metadata in
        transactions.
        """
        if group_id not in self._group_consumers:
            fixed = self._config(
                group_id=group_id,
                enable_auto_commit=False,
                isolation_level="read_committed",
            )
            self._group_consumers[group_id] = self._create_client(
                self._kafka.Consumer, fixed
            )
        return self._group_consumers[group_id]

    def transactional_sender(
        self, transactional_id: str, group_id: str
    ) -> ClusterSender:
        """See TargetCluster."""
        config = self._config(
            transactional_id=transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            # After it bootstraps again, librdkafka may wait indefinitely in
            # send_offsets_to_transaction() for a broker that it has dropped (librdkafka
            # issue 5456). A sender without a response is replaced as a whole instead.
            metadata_recovery_strategy="none",
            message_max_bytes=_MAX_MESSAGE_BYTES,
        )
        producer = self._create_client(self._kafka.Producer, config)
        try:
            producer.init_transactions(_REQUEST_TIMEOUT_S)
        except self._kafka.KafkaException as error:
            raise self.convert_error(error, transactional_id) from error
        return _TransactionalSender(self, producer, transactional_id, group_id)

    def plain_sender(self) -> ClusterSender:
        """See TargetCluster.

        Without a message timeout, records remain in the client while the cluster cannot
        be reached. A record that timed out would be sent again, and might be stored
        twice. With the gapless guarantee, records after a failed record are not sent.
        Otherwise a retry of that record would change the order.
        """
        config = self._config(
            enable_idempotence=True,
            enable_gapless_guarantee=True,
            message_timeout_ms=0,
            message_max_bytes=_MAX_MESSAGE_BYTES,
        )
        return _PlainSender(self, self._create_client(self._kafka.Producer, config))

    # -- mirroring records -------------------------------------------------------------

    def topics(self, names: Collection[str]) -> dict[str, RemoteTopic]:
        """See SourceCluster."""
        from confluent_kafka import TopicCollection

        topics_by_name = {}
        if not names:
            return {}
        futures = self._admin().describe_topics(
            TopicCollection(list(names)), request_timeout=_REQUEST_TIMEOUT_S
        )
        for name, future in futures.items():
            try:
                description = future.result(_REQUEST_TIMEOUT_S)
            except self._kafka.KafkaException as error:
                if error.args[0].name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
                    continue
                raise self.convert_error(error) from error
            topics_by_name[name] = RemoteTopic(
                _topic_id(description.topic_id),
                len(description.partitions),
                self._is_compacted(name),
            )
        return topics_by_name

    def _is_compacted(self, topic: str) -> bool:
        """Return whether a topic is compacted.

        If the cluster does not permit the request, return True, because gaps between
        offsets are then no error.
        """
        from confluent_kafka import admin

        client_class: Any = admin
        resource = client_class.ConfigResource("topic", topic)
        try:
            (future,) = (
                self._admin()
                .describe_configs([resource], request_timeout=_REQUEST_TIMEOUT_S)
                .values()
            )
            return (
                "compact" in future.result(_REQUEST_TIMEOUT_S)["cleanup.policy"].value
            )
        except self._kafka.KafkaException as error:
            if error.args[0].name() == "TOPIC_AUTHORIZATION_FAILED":
                return True
            raise self.convert_error(error) from error

    def span(self, partition: Partition) -> RemoteSpan:
        """See SourceCluster."""
        try:
            low, high = self._consumer().get_watermark_offsets(
                self._kafka.TopicPartition(*partition), timeout=_REQUEST_TIMEOUT_S
            )
        except self._kafka.KafkaException as error:
            raise self.convert_error(error) from error
        self._all_brokers_down = False
        return RemoteSpan(low, high)

    def fetch(
        self, positions: Mapping[Partition, int], timeout_s: float
    ) -> FetchResult:
        """See SourceCluster."""
        consumer = self._consumer()
        if dict(positions) != self._next_offsets:
            self._next_offsets = dict(positions)
            consumer.assign(
                [
                    self._kafka.TopicPartition(*key, offset)
                    for key, offset in positions.items()
                ]
            )
        records: dict[Partition, list[RemoteRecord]] = {}
        reached: dict[Partition, int] = {}
        lost: list[Partition] = []
        for message in consumer.consume(_FETCH_RECORDS, timeout_s):
            key = (message.topic(), message.partition())
            error = message.error()
            if error is None:
                record = _record(message)
                records.setdefault(key, []).append(record)
                self._next_offsets[key] = record.record.offset + 1
            elif error.name() == "_PARTITION_EOF":
                reached[key] = message.offset()
            elif error.name() in _PERMANENT_ERRORS:
                raise self.convert_error(self._kafka.KafkaException(error))
            else:
                # The leader has changed or cannot be reached. The next fetch() assigns
                # all positions again.
                self._last_error = error.str()
                self._next_offsets = {}
                if error.name() in _POSITION_ERRORS:
                    lost.append(key)
        if records or reached:
            self._all_brokers_down = False
        elif self._all_brokers_down and not lost:
            self._next_offsets = {}
            raise self.unavailable_error()
        return FetchResult(records, reached, lost)

    def cluster_id(self) -> str:
        """See SourceCluster."""
        try:
            cluster_id = (
                self._admin().list_topics(timeout=_REQUEST_TIMEOUT_S).cluster_id
            )
        except self._kafka.KafkaException as error:
            raise self.convert_error(error) from error
        return str(cluster_id or "")

    def _consumer(self) -> Any:
        if self._fetch_consumer is None:
            config = self._config(
                group_id="logcore-mirror",  # this group commits nothing
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                auto_offset_reset="error",
                enable_partition_eof=True,
                isolation_level=self.isolation_level,
                check_crcs=True,
            )
            self._fetch_consumer = self._create_client(self._kafka.Consumer, config)
            self._next_offsets = {}
        return self._fetch_consumer

    def _close_fetch_consumer(self) -> None:
        if self._fetch_consumer is not None:
            self._fetch_consumer.close()
            self._fetch_consumer = None

    def pause(self, seconds: float) -> None:
        """See TargetCluster."""
        self._admin().poll(seconds)


class _PlainSender:
    """Sends batches idempotently, without transactions."""

    def __init__(self, cluster: KafkaCluster, producer: Any) -> None:
        self._cluster = cluster
        self._kafka = _client()
        self._producer = producer
        #: The batch in progress.
        self._batch = OutgoingBatch({}, {})
        #: The next local offset, for each partition with delivered records.
        self._delivered: dict[Partition, int] = {}
        self._counts: dict[Partition, int] = {}
        #: Partitions with a record that the cluster rejects, with the reason.
        self._refused: dict[Partition, str] = {}
        #: Partitions that the cluster rejects entirely, with the reason.
        self._failed: dict[Partition, str] = {}
        self._other_error: Any = None

    def start(self, batch: OutgoingBatch) -> None:
        self._batch = batch
        self._delivered = {}
        self._counts = {}
        self._refused = {}
        self._failed = {}
        self._other_error = None
        try:
            self._begin()
            for key, records in batch.records.items():
                for record in records:
                    self._send(key, record)
        except (self._kafka.KafkaException, BufferError) as error:
            raise self._convert_error(error) from error

    def _begin(self) -> None:
        pass

    def _convert_error(self, error: Any) -> LogcoreError:
        if isinstance(error, BufferError):
            return self._cluster.unavailable_error()
        return self._cluster.convert_error(error)

    def _send(self, partition: Partition, record: Record) -> None:
        def report(error: Any, _: object) -> None:
            self._report(partition, record.offset, error)

        try:
            self._producer.produce(
                partition[0],
                record.value,
                record.key,
                partition[1],
                report,
                timestamp=record.timestamp_ms,
                headers=list(record.headers) or None,
            )
        except self._kafka.KafkaException as error:
            if error.args[0].name() not in _RECORD_ERRORS + _PARTITION_ERRORS:
                raise
            self._report(partition, record.offset, error.args[0])

    def _report(self, partition: Partition, offset: int, error: Any) -> None:
        """Record a delivery report.

        The reports of a partition arrive in order. Reports after an error are ignored.
        """
        has_error = partition in self._refused or partition in self._failed
        if error is None and not has_error:
            self._delivered[partition] = offset + 1
            self._counts[partition] = self._counts.get(partition, 0) + 1
        elif error is not None and error.name() in _RECORD_ERRORS:
            self._refused.setdefault(partition, f"{error.str()} ({error.name()})")
        elif error is not None and error.name() in _PARTITION_ERRORS:
            self._failed.setdefault(partition, f"{error.str()} ({error.name()})")
        elif error is not None:
            self._other_error = error

    def wait(self, timeout_s: float) -> Outcome | None:
        if self._missing_reports(timeout_s):
            return None
        # The progress of a batch may be above its last record, if the offsets between
        # need no shipping.
        for key, progress in self._batch.progress.items():
            if self._counts.get(key, 0) == len(self._batch.records.get(key, ())):
                self._delivered[key] = progress.offset
        if self._refused or self._failed or self._delivered:
            return Outcome(
                dict(self._delivered), dict(self._refused), dict(self._failed)
            )
        error = None
        if self._other_error:
            error = self._kafka.KafkaException(self._other_error)
        raise self._cluster.unavailable_error(error)

    def _missing_reports(self, timeout_s: float) -> int:
        """Wait for delivery reports. Return the number that is missing after the timeout."""
        try:
            missing: int = self._producer.flush(timeout_s)
        except self._kafka.KafkaException as error:
            raise self._convert_error(error) from error
        return missing

    def close(self) -> None:
        # A fatal error was raised before, and closing may raise it again.
        with contextlib.suppress(self._kafka.KafkaException):
            self._producer.purge()
            self._producer.flush(_CLOSE_TIMEOUT_S)


class _TransactionalSender(_PlainSender):
    """Sends each batch in one transaction."""

    def __init__(
        self, cluster: KafkaCluster, producer: Any, transactional_id: str, group_id: str
    ) -> None:
        super().__init__(cluster, producer)
        self._transactional_id = transactional_id
        self._group_id = group_id
        self._has_offsets = False
        self._last_missing = -1
        self._stalled_s = 0.0

    def _count_stall(self, timeout_s: float) -> None:
        """Count time without progress.

        Raises RemoteUnavailableError after _STALL_S, so that the caller creates a new
        sender. A new sender with the same id aborts the transaction.
        """
        self._stalled_s += timeout_s
        if self._stalled_s >= _STALL_S:
            raise self._cluster.unavailable_error()

    def _begin(self) -> None:
        self._has_offsets = False
        self._last_missing = -1
        self._stalled_s = 0.0
        self._producer.begin_transaction()

    def _convert_error(self, error: Any) -> LogcoreError:
        if isinstance(error, BufferError):
            return self._cluster.unavailable_error()
        return self._cluster.convert_error(error, self._transactional_id)

    def wait(self, timeout_s: float) -> Outcome | None:
        missing = self._missing_reports(timeout_s)
        if missing != self._last_missing:
            self._last_missing = missing
            self._stalled_s = 0.0
        if missing:
            self._count_stall(timeout_s)
            return None
        try:
            if self._refused or self._failed:
                self._producer.abort_transaction(_REQUEST_TIMEOUT_S)
                return Outcome({}, dict(self._refused), dict(self._failed))
            # After any other error of a record, the transaction can only be aborted,
            # and the next calls raise an exception.
            if not self._has_offsets:
                offsets = [
                    self._kafka.TopicPartition(*key, *progress)
                    for key, progress in self._batch.progress.items()
                ]
                group = self._cluster.group_consumer(
                    self._group_id
                ).consumer_group_metadata()
                self._producer.send_offsets_to_transaction(offsets, group, timeout_s)
                self._has_offsets = True
            self._producer.commit_transaction(timeout_s)
        except self._kafka.KafkaException as error:
            if error.args[0].retriable() and not error.args[0].txn_requires_abort():
                self._count_stall(timeout_s)
                return None  # the next wait() repeats the call, which then continues
            raise self._convert_error(error) from error
        return Outcome(
            {key: progress.offset for key, progress in self._batch.progress.items()}
        )

    def close(self) -> None:
        """Abort an open transaction if the cluster responds in time.

        Otherwise, the next sender with the same transactional id aborts it.
        """
        super().close()
        # This fails if no transaction is open, if the cluster cannot be reached, or if
        # another forwarder has the id.
        with contextlib.suppress(self._kafka.KafkaException):
            self._producer.abort_transaction(_CLOSE_TIMEOUT_S)


def _record(message: Any) -> RemoteRecord:
    client_class, timestamp_ms = message.timestamp()
    if not client_class:  # TIMESTAMP_NOT_AVAILABLE is 0
        timestamp_ms = -1
    headers = tuple((name, value) for name, value in message.headers() or ())
    leader_epoch = message.leader_epoch()
    if leader_epoch is None:
        leader_epoch = -1
    record = Record(
        message.offset(), timestamp_ms, message.key(), message.value(), headers
    )
    return RemoteRecord(record, leader_epoch)


def _topic_id(uuid: Any) -> str:
    """Return Kafka's topic id as text. It is empty for a missing id and the zero id."""
    if uuid is None:
        return ""
    max_limit = uuid.get_most_significant_bits()
    low_bits = uuid.get_least_significant_bits()
    if (max_limit, low_bits) == (0, 0):
        return ""
    return f"{max_limit & (1 << 64) - 1:016x}{low_bits & (1 << 64) - 1:016x}"


def _error_text(error: Any) -> str:
    client_error = error.args[0]
    return f"{client_error.str()} ({client_error.name()})"
