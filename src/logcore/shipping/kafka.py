"""A remote cluster, accessed with confluent-kafka (librdkafka).

librdkafka handles TLS, SASL, leaders and retries.

Rules:
- Only this module classifies the client's errors: the cluster cannot be reached,
  another producer has the transactional id, a record is refused, a partition is
  refused, the transaction can only be aborted.
- Every call has a time limit. The caller repeats a call that reached it, or gives up.
- Calls run in the thread of the caller, delivery reports too.
- librdkafka stamps a record without a time, or of the time 0, with its own clock. All
  other times are kept.

confluent-kafka is imported when a cluster is made. This module decides nothing about
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
_ENDING_TIMEOUT_S: Final = 2.0
#: The largest message size that librdkafka allows, because the remote topic decides
#: which record is too large.
_LARGEST_MESSAGE_BYTES: Final = 1_000_000_000
#: Time without progress after which the sender of a transaction is replaced.
_STALL_S: Final = 10.0
_FETCH_RECORDS: Final = 10_000
TRANSACTION_TIMEOUT_MS: Final = 60_000

#: The cluster refuses this record, and accepts others of the partition.
_REFUSING: Final = (
    "MSG_SIZE_TOO_LARGE",
    "RECORD_LIST_TOO_LARGE",
    "INVALID_MSG_SIZE",
    "INVALID_RECORD",
    "INVALID_TIMESTAMP",
    "INVALID_MSG",
    "_INVALID_DIFFERENT_RECORD",
    "UNSUPPORTED_FOR_MESSAGE_FORMAT",
)
#: The cluster refuses all records of this partition.
_FAILING: Final = (
    "TOPIC_AUTHORIZATION_FAILED",
    "UNKNOWN_TOPIC_OR_PART",
    "TOPIC_EXCEPTION",
    "_UNKNOWN_TOPIC",
    "_UNKNOWN_PARTITION",
    "POLICY_VIOLATION",
    "INVALID_REQUIRED_ACKS",
)
#: The position of a consumer is outside the offsets of the partition, or the partition
#: does not exist.
_LOSING: Final = (
    "_AUTO_OFFSET_RESET",
    "OFFSET_OUT_OF_RANGE",
    "_LOG_TRUNCATION",
    "UNKNOWN_TOPIC_OR_PART",
    "_UNKNOWN_TOPIC",
    "_UNKNOWN_PARTITION",
)
_FENCING: Final = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
#: Errors that a retry cannot resolve. The caller gets them.
_REFUSED_ACCESS: Final = (
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


def _journal() -> logging.Logger:
    """Return the logger for librdkafka.

    Important errors of librdkafka are raised too, so the logger prints nothing unless a
    handler is set.
    """
    journal = logging.getLogger("logcore.shipping.librdkafka")
    if not journal.handlers:
        journal.addHandler(logging.NullHandler())
    return journal


class KafkaCluster(Closeable):
    """A Kafka cluster to ship to, or to mirror from.

    A with block closes it. Connections are opened when they are needed.
    `bootstrap_servers` are addresses of brokers, "host:port,host:port". `config`
    contains additional settings of librdkafka, such as settings of TLS and SASL. They
    override the settings of logcore, except for those that the guarantees depend on.

    Raises:
        InvalidConfigError: librdkafka refuses a setting.
        MissingDependencyError: the client library is not installed.
    """

    def __init__(
        self, bootstrap_servers: str, config: Mapping[str, object] | None = None
    ) -> None:
        self._kafka = _client()
        self.bootstrap_servers = bootstrap_servers
        self._given = dict(config or {})
        self._last_error = ""  # last message of the client
        self._is_down = False  # no broker could be reached since the last success
        self._admin_client: Any = None
        self._readers: dict[str, Any] = {}  # by group
        self._fetching: Any = None
        self._expected: dict[
            Partition, int
        ] = {}  # the next offset of each partition that is fetched
        self.isolation_level = "read_committed"

    def __repr__(self) -> str:
        return f"<KafkaCluster {self.bootstrap_servers}>"

    def close(self) -> None:
        """End the connections; a later call opens new ones."""
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
        self._stop_fetching()
        self._admin_client = None

    def _config(self, **fixed: object) -> dict[str, object]:
        """Return the settings of a client.

        `fixed` has `_` in place of `.`. The guarantees depend on these settings, so
        they override the user's settings.
        """
        config: dict[str, object] = {
            "bootstrap.servers": self.bootstrap_servers,
            "error_cb": self._record_error,
            "logger": _journal(),
            "reconnect.backoff.max.ms": 1_000,
            **self._given,
        }
        config.update({name.replace("_", "."): value for name, value in fixed.items()})
        return config

    def _made(self, kind: Callable[..., Any], config: Mapping[str, object]) -> Any:
        try:
            return kind(config)
        except self._kafka.KafkaException as error:
            raise InvalidConfigError(
                f"librdkafka does not take its settings: {_text(error)}"
            ) from error

    def _record_error(self, error: Any) -> None:
        self._last_error = error.str()
        if error.name() == "_ALL_BROKERS_DOWN":
            self._is_down = True

    def unavailable(self, error: Any = None) -> RemoteUnavailableError:
        """Return the error to raise when the cluster does not answer."""
        if error is None:
            why = self._last_error
        else:
            why = _text(error)
        return RemoteUnavailableError(
            f"the cluster {self.bootstrap_servers} does not answer: {why or 'no reason'}"
        )

    def raised(self, error: Any, transactional_id: str = "") -> LogcoreError:
        """Convert an exception of the client to an exception of logcore."""
        found = error.args[0]
        if found.name() in _FENCING:
            return ProducerFencedError(
                f"another forwarder has taken over the transactional id {transactional_id!r}"
            )
        if found.name() in _REFUSED_ACCESS:
            return RemoteTopicError(
                f"the cluster {self.bootstrap_servers} refuses: {found.str()} ({found.name()})"
            )
        return self.unavailable(error)

    def _admin(self) -> Any:
        if self._admin_client is None:
            from confluent_kafka.admin import AdminClient

            self._admin_client = self._made(AdminClient, self._config())
        return self._admin_client

    # -- shipping records ---------------------------------------------------------------

    def partition_counts(self, topics: Collection[str]) -> dict[str, int]:
        """See TargetCluster.

        Requests all topics, because a cluster may create a topic that is requested by
        name.
        """
        try:
            found = self._admin().list_topics(timeout=_REQUEST_TIMEOUT_S).topics
        except self._kafka.KafkaException as error:
            raise self.raised(error) from error
        return {
            name: len(found[name].partitions)
            for name in topics
            if name in found and found[name].error is None
        }

    def create_topics(self, wanted: Mapping[str, int]) -> None:
        """See TargetCluster. Replication is the cluster's default."""
        from confluent_kafka.cimpl import NewPartitions, NewTopic

        existing = self.partition_counts(wanted)
        new = [
            NewTopic(name, num_partitions=count)
            for name, count in wanted.items()
            if name not in existing
        ]
        more = [
            NewPartitions(name, count)
            for name, count in wanted.items()
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
                    raise self.unavailable(error) from error
                raise RemoteTopicError(
                    f"topic {name!r} could not be made: {_text(error)}"
                ) from error

    def committed(
        self, group_id: str, partitions: Collection[Partition]
    ) -> dict[Partition, ShippedProgress]:
        """See TargetCluster.

        Offsets of an ending transaction are waited for, by the isolation level of the
        reader.
        """
        wanted = [
            self._kafka.TopicPartition(topic, number) for topic, number in partitions
        ]
        if not wanted:
            return {}
        try:
            found = self.reader(group_id).committed(wanted, timeout=_REQUEST_TIMEOUT_S)
        except self._kafka.KafkaException as error:
            raise self.raised(error) from error
        for failure in found:
            if failure.error is not None:
                raise RemoteUnavailableError(
                    f"the offset of {failure.topic}-{failure.partition}: {failure.error.str()}"
                )
        return {
            (failure.topic, failure.partition): ShippedProgress(
                failure.offset, failure.metadata or ""
            )
            for failure in found
            if failure.offset >= 0
        }

    def reader(self, group_id: str) -> Any:
        """Return a consumer of a group that reads no records.

        The consumer is used to read and commit offsets, and for the group's metadata in
        transactions.
        """
        if group_id not in self._readers:
            fixed = self._config(
                group_id=group_id,
                enable_auto_commit=False,
                isolation_level="read_committed",
            )
            self._readers[group_id] = self._made(self._kafka.Consumer, fixed)
        return self._readers[group_id]

    def transactional_sender(
        self, transactional_id: str, group_id: str
    ) -> ClusterSender:
        """See TargetCluster."""
        config = self._config(
            transactional_id=transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            # After a new bootstrap send_offsets_to_transaction() may wait indefinitely
            # for a broker that was dropped (librdkafka issue 5456). A sender that gets
            # no answer is replaced as a whole.
            metadata_recovery_strategy="none",
            message_max_bytes=_LARGEST_MESSAGE_BYTES,
        )
        producer = self._made(self._kafka.Producer, config)
        try:
            producer.init_transactions(_REQUEST_TIMEOUT_S)
        except self._kafka.KafkaException as error:
            raise self.raised(error, transactional_id) from error
        return _TransactionalSender(self, producer, transactional_id, group_id)

    def plain_sender(self) -> ClusterSender:
        """See TargetCluster.

        Records wait in the client while the cluster cannot be reached: a record that
        timed out would have to be sent again, and might be stored twice.

        The gapless guarantee: records after a failed record are not sent, because
        repeating that record afterwards would change the order.
        """
        config = self._config(
            enable_idempotence=True,
            enable_gapless_guarantee=True,
            message_timeout_ms=0,
            message_max_bytes=_LARGEST_MESSAGE_BYTES,
        )
        return _PlainSender(self, self._made(self._kafka.Producer, config))

    # -- mirroring records -------------------------------------------------------------

    def topics(self, names: Collection[str]) -> dict[str, RemoteTopic]:
        """See SourceCluster."""
        from confluent_kafka import TopicCollection

        found = {}
        if not names:
            return {}
        futures = self._admin().describe_topics(
            TopicCollection(list(names)), request_timeout=_REQUEST_TIMEOUT_S
        )
        for name, future in futures.items():
            try:
                answer = future.result(_REQUEST_TIMEOUT_S)
            except self._kafka.KafkaException as error:
                if error.args[0].name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"):
                    continue
                raise self.raised(error) from error
            found[name] = RemoteTopic(
                _topic_id(answer.topic_id),
                len(answer.partitions),
                self._is_compacted(name),
            )
        return found

    def _is_compacted(self, topic: str) -> bool:
        """Return whether a topic is compacted.

        The result is True if the cluster does not allow the request, so that gaps are
        no error.
        """
        from confluent_kafka import admin

        kind: Any = admin
        resource = kind.ConfigResource("topic", topic)
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
            raise self.raised(error) from error

    def span(self, partition: Partition) -> RemoteSpan:
        """See SourceCluster."""
        try:
            low, high = self._consumer().get_watermark_offsets(
                self._kafka.TopicPartition(*partition), timeout=_REQUEST_TIMEOUT_S
            )
        except self._kafka.KafkaException as error:
            raise self.raised(error) from error
        self._is_down = False
        return RemoteSpan(low, high)

    def fetch(
        self, positions: Mapping[Partition, int], timeout_s: float
    ) -> FetchResult:
        """See SourceCluster."""
        consumer = self._consumer()
        if dict(positions) != self._expected:
            self._expected = dict(positions)
            consumer.assign(
                [
                    self._kafka.TopicPartition(*key, offset)
                    for key, offset in positions.items()
                ]
            )
        found: dict[Partition, list[RemoteRecord]] = {}
        reached: dict[Partition, int] = {}
        lost: list[Partition] = []
        for message in consumer.consume(_FETCH_RECORDS, timeout_s):
            key = (message.topic(), message.partition())
            error = message.error()
            if error is None:
                record = _record(message)
                found.setdefault(key, []).append(record)
                self._expected[key] = record.record.offset + 1
            elif error.name() == "_PARTITION_EOF":
                reached[key] = message.offset()
            elif error.name() in _REFUSED_ACCESS:
                raise self.raised(self._kafka.KafkaException(error))
            else:  # the leader has changed, or cannot be reached: the next fetch() assigns the positions again
                self._last_error = error.str()
                self._expected = {}
                if error.name() in _LOSING:
                    lost.append(key)
        if found or reached:
            self._is_down = False
        elif self._is_down and not lost:
            self._expected = {}
            raise self.unavailable()
        return FetchResult(found, reached, lost)

    def cluster_id(self) -> str:
        """See SourceCluster."""
        try:
            found = self._admin().list_topics(timeout=_REQUEST_TIMEOUT_S).cluster_id
        except self._kafka.KafkaException as error:
            raise self.raised(error) from error
        return str(found or "")

    def _consumer(self) -> Any:
        if self._fetching is None:
            config = self._config(
                group_id="logcore-mirror",  # this group commits nothing
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                auto_offset_reset="error",
                enable_partition_eof=True,
                isolation_level=self.isolation_level,
                check_crcs=True,
            )
            self._fetching = self._made(self._kafka.Consumer, config)
            self._expected = {}
        return self._fetching

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.close()
            self._fetching = None

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
        self._trouble: Any = None

    def start(self, batch: OutgoingBatch) -> None:
        self._batch = batch
        self._delivered = {}
        self._counts = {}
        self._refused = {}
        self._failed = {}
        self._trouble = None
        try:
            self._begin()
            for key, records in batch.records.items():
                for record in records:
                    self._send(key, record)
        except (self._kafka.KafkaException, BufferError) as error:
            raise self._raised(error) from error

    def _begin(self) -> None:
        pass

    def _raised(self, error: Any) -> LogcoreError:
        if isinstance(error, BufferError):
            return self._cluster.unavailable()
        return self._cluster.raised(error)

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
            if error.args[0].name() not in _REFUSING + _FAILING:
                raise
            self._report(partition, record.offset, error.args[0])

    def _report(self, partition: Partition, offset: int, error: Any) -> None:
        """Record a delivery report.

        The reports of a partition arrive in order. Reports after an error are ignored.
        """
        is_broken = partition in self._refused or partition in self._failed
        if error is None and not is_broken:
            self._delivered[partition] = offset + 1
            self._counts[partition] = self._counts.get(partition, 0) + 1
        elif error is not None and error.name() in _REFUSING:
            self._refused.setdefault(partition, f"{error.str()} ({error.name()})")
        elif error is not None and error.name() in _FAILING:
            self._failed.setdefault(partition, f"{error.str()} ({error.name()})")
        elif error is not None:
            self._trouble = error

    def wait(self, timeout_s: float) -> Outcome | None:
        if self._left(timeout_s):
            return None
        # The progress of a batch may be above its last record, because the offsets
        # between need no shipping.
        for key, progress in self._batch.progress.items():
            if self._counts.get(key, 0) == len(self._batch.records.get(key, ())):
                self._delivered[key] = progress.offset
        if self._refused or self._failed or self._delivered:
            return Outcome(
                dict(self._delivered), dict(self._refused), dict(self._failed)
            )
        error = None
        if self._trouble:
            error = self._kafka.KafkaException(self._trouble)
        raise self._cluster.unavailable(error)

    def _left(self, timeout_s: float) -> int:
        """Wait for reports, and return how many are missing after timeout_s."""
        try:
            left: int = self._producer.flush(timeout_s)
        except self._kafka.KafkaException as error:
            raise self._raised(error) from error
        return left

    def close(self) -> None:
        # The fatal error was raised before; closing may raise it again.
        with contextlib.suppress(self._kafka.KafkaException):
            self._producer.purge()
            self._producer.flush(_ENDING_TIMEOUT_S)


class _TransactionalSender(_PlainSender):
    """Sends each batch in one transaction."""

    def __init__(
        self, cluster: KafkaCluster, producer: Any, transactional_id: str, group_id: str
    ) -> None:
        super().__init__(cluster, producer)
        self._transactional_id = transactional_id
        self._group_id = group_id
        self._has_offsets = False
        self._seen_left = -1
        self._silent_s = 0.0

    def _silent(self, timeout_s: float) -> None:
        """Count time without progress.

        The method raises after _STALL_S, because a new sender with the same id then
        aborts the transaction.
        """
        self._silent_s += timeout_s
        if self._silent_s >= _STALL_S:
            raise self._cluster.unavailable()

    def _begin(self) -> None:
        self._has_offsets = False
        self._seen_left = -1
        self._silent_s = 0.0
        self._producer.begin_transaction()

    def _raised(self, error: Any) -> LogcoreError:
        if isinstance(error, BufferError):
            return self._cluster.unavailable()
        return self._cluster.raised(error, self._transactional_id)

    def wait(self, timeout_s: float) -> Outcome | None:
        left = self._left(timeout_s)
        if left != self._seen_left:
            self._seen_left = left
            self._silent_s = 0.0
        if left:
            self._silent(timeout_s)
            return None
        try:
            if self._refused or self._failed:
                self._producer.abort_transaction(_REQUEST_TIMEOUT_S)
                return Outcome({}, dict(self._refused), dict(self._failed))
            # After any other error of a record the two calls below raise: the
            # transaction can only be aborted.
            if not self._has_offsets:
                offsets = [
                    self._kafka.TopicPartition(*key, *its)
                    for key, its in self._batch.progress.items()
                ]
                group = self._cluster.reader(self._group_id).consumer_group_metadata()
                self._producer.send_offsets_to_transaction(offsets, group, timeout_s)
                self._has_offsets = True
            self._producer.commit_transaction(timeout_s)
        except self._kafka.KafkaException as error:
            if error.args[0].retriable() and not error.args[0].txn_requires_abort():
                self._silent(timeout_s)
                return None  # the next wait() makes the same call, which continues
            raise self._raised(error) from error
        return Outcome(
            {key: progress.offset for key, progress in self._batch.progress.items()}
        )

    def close(self) -> None:
        """Abort an open transaction if that is quick.

        The next sender of the id would do it too.
        """
        super().close()
        # It fails if no transaction is open, the cluster cannot be reached, or another
        # forwarder has the id.
        with contextlib.suppress(self._kafka.KafkaException):
            self._producer.abort_transaction(_ENDING_TIMEOUT_S)


def _record(message: Any) -> RemoteRecord:
    kind, timestamp_ms = message.timestamp()
    if not kind:  # TIMESTAMP_NOT_AVAILABLE is 0
        timestamp_ms = -1
    headers = tuple((name, value) for name, value in message.headers() or ())
    leader_epoch = message.leader_epoch()
    if leader_epoch is None:
        leader_epoch = -1
    record = Record(
        message.offset(), timestamp_ms, message.key(), message.value(), headers
    )
    return RemoteRecord(record, leader_epoch)


def _topic_id(given: Any) -> str:
    """Return Kafka's id of a topic as text, empty if it has none or the zero id."""
    if given is None:
        return ""
    most = given.get_most_significant_bits()
    least = given.get_least_significant_bits()
    if (most, least) == (0, 0):
        return ""
    return f"{most & (1 << 64) - 1:016x}{least & (1 << 64) - 1:016x}"


def _text(error: Any) -> str:
    found = error.args[0]
    return f"{found.str()} ({found.name()})"
