"""A Kafka cluster as the origin of a query: netshim, or any other Kafka broker.

It needs no jar and no directory. The client library kafka-python connects, with TLS and
SASL, and finds the leaders of partitions. The batches of a Fetch response are decoded
here to columns, like the batches of a file, without an object for each record.

Rules:
- A range is delivered whole or the task fails. Deleted records raise DataLossError, or
  a warning if the user chose so.
- If a leader has moved or is unavailable, the request is repeated until
  kafkaConsumer.pollTimeoutMs has passed without a response.
- The next chunk of a range is fetched while one is decoded. A task holds at most two
  chunks.
- Nothing is committed and no group is joined by a read.

This module makes no decisions about offsets (planning.py) and does not depend on
columns of a query (columns.py).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from logcore.closeable import Closeable
from logcore.distribution import install_command
from logcore.errors import (
    CorruptBatchError,
    LogcoreError,
    MissingDependencyError,
    TopicNotFoundError,
)
from logcore.format.columns import RecordColumns
from logcore.partition.fetch_data import fetched_columns, next_offset
from pyspark_logcore.options import EARLIEST, LATEST, Brokers, ReadOptions
from pyspark_logcore.ranges import Bounds, OffsetRange, TopicPartition, report_loss
from pyspark_logcore.tasks import NO_SIZES, SizeIndex

_FETCH_BYTES: Final = 8 << 20
_FETCH_WAIT_MS: Final = 500
#: Maximum age of metadata before a stream checks for new topics and partitions.
_METADATA_SECONDS: Final = 1.0
_INT32_MAX: Final = 0x7FFFFFFF
_RETRY_SECONDS: Final = 0.1
#: A new leader may report a lower end than the previous leader for a short time. If its
#: end is still lower after this time, records are lost.
_CATCH_UP_SECONDS: Final = 10.0
#: Fetch identifies topics by their ids since version 13, and ListOffsets supports tiered
#: storage since version 8. Neither is needed.
_FETCH_VERSION: Final = 12
_LIST_OFFSETS_VERSION: Final = 7
_METADATA_VERSION: Final = 12
_NO_TOPIC_ID: Final = uuid.UUID(int=0)

# Error codes of the protocol that have a meaning here. Others are reported by their
# names.
_NONE: Final = 0
_OFFSET_OUT_OF_RANGE: Final = 1
_UNKNOWN_TOPIC: Final = 3


class BrokerError(LogcoreError):
    """A cluster cannot be reached, or rejects a request."""


class OtherClusterError(BrokerError):
    """A task reaches another cluster than the one for which its query was planned."""


@attrs.frozen
class ClusterIdentity:
    """The topic and cluster of a range: Kafka's ids, "" if the brokers return none."""

    cluster_id: str
    topic_id: str


class BrokerOrigin(Closeable):
    """The cluster of a query; see origin.Origin. It connects at the first request."""

    def __init__(self, options: ReadOptions) -> None:
        assert options.brokers is not None
        self._options = options
        self._brokers: Brokers = options.brokers
        self._isolation = int(options.isolation == "read_committed")
        self._connected: _Cluster | None = None
        self._known: dict[str, Any] = {}  # metadata of topics, by name
        self._known_at = -_METADATA_SECONDS

    @property
    def location(self) -> str:
        return self._brokers.servers

    @property
    def _cluster(self) -> _Cluster:
        if self._connected is None:
            self._connected = _Cluster(self._brokers)
        return self._connected

    def refresh(self) -> bool:
        if time.monotonic() - self._known_at < _METADATA_SECONDS:
            return False
        self._known.clear()
        return True

    def topics(self) -> list[str]:
        if not self._known:
            found = self._cluster.metadata(None)
            self._known = {
                topic.name: topic for topic in found.topics if topic.error_code == _NONE
            }
            self._known_at = time.monotonic()
        return sorted(
            name for name, topic in self._known.items() if not topic.is_internal
        )

    def partitions(self, topic: str) -> tuple[int, ...]:
        found = self._known.get(topic)
        if found is None:
            found = self._cluster.topic(topic)
        return tuple(
            sorted(partition.partition_index for partition in found.partitions)
        )

    def bounds(
        self, requested: Sequence[TopicPartition]
    ) -> dict[TopicPartition, Bounds]:
        starts = self._cluster.list_offsets(
            dict.fromkeys(requested, EARLIEST), self._isolation
        )
        ends = self._cluster.list_offsets(
            dict.fromkeys(requested, LATEST), self._isolation
        )
        return {
            key: Bounds(starts[key], ends[key], self._cluster.topic_id(key[0]))
            for key in requested
            if key in starts and key in ends
        }

    def offsets_at(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        if times_ms:
            found = self._cluster.list_offsets(times_ms, self._isolation)
        else:
            found = {}
        return {key: None if found.get(key, -1) < 0 else found[key] for key in times_ms}

    def size_index(self, offset_range: OffsetRange) -> SizeIndex:
        return NO_SIZES

    def identity(self, topic: str, partition: int) -> ClusterIdentity:
        return self._cluster.identity(topic)

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        self._cluster.commit_offsets(group, offsets)

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def read(
        self, offset_range: OffsetRange, identity: ClusterIdentity
    ) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        try:
            found = self._cluster.identity(offset_range.topic)
        except TopicNotFoundError as error:
            self._report(offset_range, error.reason)
            return
        if identity.cluster_id and found.cluster_id != identity.cluster_id:
            raise OtherClusterError(
                "this machine reaches another cluster at these addresses than the query was planned with",
                path=self.location,
                expected=f"cluster id {identity.cluster_id}",
                found=found.cluster_id or "none",
            )
        if identity.topic_id and found.topic_id != identity.topic_id:
            self._report(
                offset_range,
                "the topic was deleted and made again since the query was planned",
            )
            return
        yield from self._columns(offset_range)

    def _report(self, offset_range: OffsetRange, reason: str) -> None:
        report_loss(
            self._options.fail_on_data_loss,
            self.location,
            offset_range.topic,
            offset_range.partition,
            reason,
        )

    def _columns(
        self, offset_range: OffsetRange
    ) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        cluster = self._cluster
        source = f"{self.location} {offset_range.topic}-{offset_range.partition}"
        size = _FETCH_BYTES
        at = offset_range.start
        retry = _RetryTimer(self._brokers.timeout_seconds)
        catch_up = _RetryTimer(_CATCH_UP_SECONDS)
        fetch = cluster.fetch(offset_range, at, size, self._isolation)
        while at < offset_range.end:
            answer = fetch()
            if answer is None or (
                answer.error_code != _NONE and cluster.is_passing(answer.error_code)
            ):
                retry.wait("no leader of this partition answered", source)
                cluster.metadata([offset_range.topic])
                fetch = cluster.fetch(offset_range, at, size, self._isolation)
                continue
            if answer.error_code == _OFFSET_OUT_OF_RANGE:
                held = cluster.list_offsets(
                    {(offset_range.topic, offset_range.partition): EARLIEST},
                    self._isolation,
                )
                start = held.get(
                    (offset_range.topic, offset_range.partition), offset_range.end
                )
                if start <= at:  # it ends before the planned end
                    self._report(
                        offset_range,
                        f"offset {at} was planned, and the log ends before it",
                    )
                    return
                self._report(
                    offset_range,
                    f"offset {at} was planned, and the log begins at {start}",
                )
                at = start
                fetch = cluster.fetch(offset_range, at, size, self._isolation)
                continue
            if answer.error_code == _UNKNOWN_TOPIC:
                self._report(offset_range, "the partition was deleted")
                return
            cluster.check(
                answer.error_code,
                f"Fetch of {offset_range.topic} partition {offset_range.partition}",
                source,
            )
            data = memoryview(answer.records or b"")
            after = next_offset(data, at)
            if after == at:
                if data:
                    size = cluster.larger(size, source, at)
                elif catch_up.has_expired:
                    self._report(
                        offset_range,
                        f"offsets to {offset_range.end} were planned, and the log ends at {answer.high_watermark}",
                    )
                    return
                fetch = cluster.fetch(offset_range, at, size, self._isolation)
                continue
            retry = _RetryTimer(self._brokers.timeout_seconds)
            catch_up = _RetryTimer(_CATCH_UP_SECONDS)
            if after < offset_range.end:
                fetch = cluster.fetch(offset_range, after, size, self._isolation)
            aborted = [
                (each.producer_id, each.first_offset)
                for each in answer.aborted_transactions or ()
            ]
            yield from fetched_columns(
                data, at, offset_range.end, aborted=aborted, source=source
            )
            at = after


class _RetryTimer:
    """The time for which requests are repeated without a result."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def wait(self, reason: str, source: str) -> None:
        """Sleep a little. Raises BrokerError once the time has passed."""
        if self.has_expired:
            raise BrokerError(
                f"{reason} for {self._seconds:g} s (option kafkaConsumer.pollTimeoutMs)",
                path=source,
            )
        time.sleep(_RETRY_SECONDS)

    @property
    def has_expired(self) -> bool:
        return time.monotonic() > self._deadline


class _Cluster:
    """Connections to the brokers of a cluster, and its metadata.

    All methods raise BrokerError.
    """

    def __init__(self, brokers: Brokers) -> None:
        try:
            from kafka.net.manager import KafkaConnectionManager
            from kafka.net.selector import NetworkSelector
        except ImportError as error:
            raise MissingDependencyError(
                f"reading through a broker needs the client library kafka-python 3: {install_command('broker')}"
            ) from error
        self._brokers = brokers
        self._net = NetworkSelector()
        self._manager = KafkaConnectionManager(
            self._net,
            bootstrap_servers=brokers.servers,
            client_id="logcore-spark",
            receive_message_max_bytes=_INT32_MAX,
            **brokers.settings,
        )
        self._leaders: dict[TopicPartition, int] = {}
        self._topics: dict[str, Any] = {}
        self._cluster_id = ""
        self._net.start()
        try:
            self._manager.bootstrap(int(brokers.timeout_seconds * 1000), refresh=False)
        except Exception as error:
            self.close()
            raise BrokerError(
                f"no broker answers: {_words(error)}", path=brokers.servers
            ) from error

    def close(self) -> None:
        self._manager.close()
        self._net.close()

    # -- metadata ----------------------------------------------------------------------

    def metadata(self, topics: Sequence[str] | None) -> Any:
        """Request the metadata of these topics, or of all, and keep the leaders."""
        from kafka.protocol.metadata import MetadataRequest

        requested = None
        if topics is not None:
            requested = [
                MetadataRequest.MetadataRequestTopic(name=name, topic_id=_NO_TOPIC_ID)
                for name in topics
            ]
        request = MetadataRequest(
            topics=requested,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
            max_version=_METADATA_VERSION,
        )
        retry = _RetryTimer(self._brokers.timeout_seconds)
        while True:
            try:
                answer = self._request(request, None)
                break
            except _NodeUnavailableError as error:
                retry.wait(f"no broker answers ({error.reason})", self._brokers.servers)
        self._manager.cluster.update_metadata(answer)
        self._cluster_id = answer.cluster_id or ""
        for topic in answer.topics:
            self._topics[topic.name] = topic
            for partition in topic.partitions:
                self._leaders[topic.name, partition.partition_index] = (
                    partition.leader_id
                )
        return answer

    def topic(self, name: str) -> Any:
        """Return the metadata of a topic. Raises TopicNotFoundError."""
        retry = _RetryTimer(self._brokers.timeout_seconds)
        while True:
            self.metadata([name])
            found = self._topics[name]
            if found.error_code == _UNKNOWN_TOPIC:
                raise TopicNotFoundError(
                    f"there is no topic {name!r}", path=self._brokers.servers
                )
            if found.error_code == _NONE:
                return found
            if not self.is_passing(found.error_code):
                self.check(found.error_code, f"topic {name}", self._brokers.servers)
            retry.wait(
                f"topic {name} is not ready: {_error_name(found.error_code)}",
                self._brokers.servers,
            )

    def identity(self, name: str) -> ClusterIdentity:
        self.topic(name)
        return ClusterIdentity(self._cluster_id, self.topic_id(name))

    def topic_id(self, name: str) -> str:
        """Return the id in the last metadata, or "" if it has none."""
        found = self._topics.get(name)
        topic_id = None
        if found is not None:
            topic_id = found.topic_id
        if topic_id and topic_id != _NO_TOPIC_ID:
            return str(topic_id)
        return ""

    def _leader(self, key: TopicPartition) -> int:
        """Return the leader of a partition, or -1 if there is none now."""
        if key not in self._leaders:
            self.metadata([key[0]])
        return self._leaders.get(key, -1)

    # -- requests ----------------------------------------------------------------------

    def list_offsets(
        self, times_ms: Mapping[TopicPartition, int], isolation: int
    ) -> dict[TopicPartition, int]:
        """Return for each partition the first offset at a time, EARLIEST or LATEST.

        The result is -1 if there is no such record. A deleted partition is missing in
        it.
        """
        found: dict[TopicPartition, int] = {}
        missing = set(times_ms)
        retry = _RetryTimer(self._brokers.timeout_seconds)
        while missing:
            for leader, keys in self._by_leader(missing).items():
                for key, (code, offset) in self._offsets_of(
                    leader, keys, times_ms, isolation
                ).items():
                    if code == _NONE:
                        found[key] = offset
                        missing.discard(key)
                    elif code == _UNKNOWN_TOPIC:
                        missing.discard(key)
                    elif not self.is_passing(code):
                        self.check(
                            code,
                            f"ListOffsets of {key[0]} partition {key[1]}",
                            self._brokers.servers,
                        )
            if missing:
                retry.wait(
                    f"no leader of {sorted(missing)[0]} answered", self._brokers.servers
                )
                self.metadata(sorted({topic for topic, _ in missing}))
        return found

    def _by_leader(self, keys: set[TopicPartition]) -> dict[int, list[TopicPartition]]:
        leaders: dict[int, list[TopicPartition]] = {}
        for key in sorted(keys):
            leader = self._leader(key)
            if leader >= 0:
                leaders.setdefault(leader, []).append(key)
        return leaders

    def _offsets_of(
        self,
        leader: int,
        keys: list[TopicPartition],
        times_ms: Mapping[TopicPartition, int],
        isolation: int,
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Return (error code, offset) of each partition, {} without a response."""
        from kafka.protocol.consumer import ListOffsetsRequest

        kind = ListOffsetsRequest.ListOffsetsTopic
        topics: dict[str, list[Any]] = {}
        for topic, partition in keys:
            partition_request = kind.ListOffsetsPartition(
                partition_index=partition,
                current_leader_epoch=-1,
                timestamp=times_ms[topic, partition],
            )
            topics.setdefault(topic, []).append(partition_request)
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation,
            topics=[
                kind(name=name, partitions=partitions)
                for name, partitions in topics.items()
            ],
            max_version=_LIST_OFFSETS_VERSION,
        )
        try:
            answer = self._request(request, leader)
        except _NodeUnavailableError:
            return {}
        return {
            (topic.name, partition.partition_index): (
                partition.error_code,
                partition.offset,
            )
            for topic in answer.topics
            for partition in topic.partitions
        }

    def fetch(
        self, offset_range: OffsetRange, offset: int, size_bytes: int, isolation: int
    ) -> Callable[[], Any]:
        """Request a chunk of a partition.

        The returned function waits for the chunk. It returns None if no response
        arrived.
        """
        from kafka.protocol.consumer import FetchRequest

        leader = self._leader((offset_range.topic, offset_range.partition))
        if leader < 0:
            return lambda: None
        kind = FetchRequest.FetchTopic
        partition_request = kind.FetchPartition(
            partition=offset_range.partition,
            current_leader_epoch=-1,
            last_fetched_epoch=-1,
            fetch_offset=offset,
            log_start_offset=-1,
            partition_max_bytes=size_bytes,
        )
        request = FetchRequest(
            max_wait_ms=_FETCH_WAIT_MS,
            min_bytes=1,
            max_bytes=size_bytes,
            isolation_level=isolation,
            session_id=0,
            session_epoch=-1,
            topics=[kind(topic=offset_range.topic, partitions=[partition_request])],
            forgotten_topics_data=[],
            rack_id="",
            max_version=_FETCH_VERSION,
        )
        future = self._manager.send(request, node_id=leader)

        def wait() -> Any:
            try:
                answer = self._wait(future)
            except _NodeUnavailableError:
                return None
            self.check(answer.error_code, "Fetch", self._brokers.servers)
            return answer.responses[0].partitions[0]

        return wait

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit like a consumer with assigned partitions, outside the group."""
        from kafka import KafkaConsumer, OffsetAndMetadata  # pyright: ignore[reportAttributeAccessIssue]
        from kafka import TopicPartition as Key  # pyright: ignore[reportAttributeAccessIssue]
        from kafka.errors import KafkaError

        try:
            consumer = KafkaConsumer(
                bootstrap_servers=self._brokers.servers,
                group_id=group,
                enable_auto_commit=False,
                **self._brokers.settings,
            )
        except KafkaError as error:
            raise BrokerError(
                f"no broker answers: {_words(error)}", path=self._brokers.servers
            ) from error
        try:
            consumer.assign([Key(*key) for key in offsets])
            consumer.commit(
                {
                    Key(*key): OffsetAndMetadata(offset, "", -1)
                    for key, offset in offsets.items()
                }
            )
        except KafkaError as error:
            raise BrokerError(
                f"the commit was refused: {_words(error)}", path=self._brokers.servers
            ) from error
        finally:
            consumer.close(autocommit=False)

    def larger(self, size_bytes: int, source: str, offset: int) -> int:
        """Return the next chunk size after a chunk without a whole batch.

        Raises:
            CorruptBatchError: It was the largest size.
        """
        if size_bytes >= _INT32_MAX:
            raise CorruptBatchError(
                "a piece of 2 GiB holds no whole batch", path=source, offset=offset
            )
        return min(size_bytes * 8, _INT32_MAX)

    def _request(self, request: Any, node: int | None) -> Any:
        return self._wait(self._manager.send(request, node_id=node))

    def _wait(self, future: Any) -> Any:
        """Wait for a response. Raises _AwayError for a transient error of a node."""
        from kafka.errors import KafkaError

        try:
            return self._manager.run(
                self._manager.wait_for,
                future,
                int(self._brokers.timeout_seconds * 1000),
            )
        except KafkaError as error:
            if getattr(error, "retriable", False):
                raise _NodeUnavailableError(
                    _words(error), path=self._brokers.servers
                ) from error
            raise BrokerError(_words(error), path=self._brokers.servers) from error

    # -- error codes -------------------------------------------------------------------

    def is_passing(self, code: int) -> bool:
        """Return whether another attempt, perhaps on another broker, may succeed."""
        from kafka.errors import for_code

        return code != _UNKNOWN_TOPIC and bool(
            getattr(for_code(code), "retriable", False)
        )

    def check(self, code: int, what: str, source: str) -> None:
        if code != _NONE:
            raise BrokerError(
                f"{what} was refused: {_error_name(code)}",
                path=source,
                found=f"error {code}",
            )


class _NodeUnavailableError(BrokerError):
    """A broker did not respond. Another broker, or a later attempt, may."""


def _error_name(code: int) -> str:
    from kafka.errors import for_code

    return str(for_code(code).__name__)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
