"""The cluster that is copied: topics, leaders, settings, offsets and fetches.

Rules:
- The leader of a partition gets the requests about it. One fetch is outstanding for each
  leader.
- Partitions are fetched by topic id, so that a topic that was created again under the
  same name is not read into the old copy (KAFKA-14616).

Calls of this module block. rules.py makes the decisions.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any, Final

import attrs

from logcore.closeable import Closeable
from logcore.errors import RemoteTopicError, RemoteUnavailableError, ShippingError
from netshim import wire
from netshim.follow.connection import (
    ClientSettings,
    SourceConnection,
    parse_addresses,
)
from netshim.wire import codes

#: Topic and number of a partition.
Partition = tuple[str, int]

#: First version of Metadata with topic ids, and the version of Fetch that uses them:
#: Kafka 2.8 and 3.1.
_METADATA_IDS_SINCE: Final = 10
_FETCH_IDS_SINCE: Final = 13
#: The newest version of Fetch in which `replica_id` identifies a consumer.
_FETCH_VERSION: Final = 16
#: Type of a topic in DescribeConfigs.
_TOPIC: Final = 2
#: The config source of settings with Kafka's default, which logcore has too. All other
#: settings were set for the topic or for brokers, and are copied. Without the brokers'
#: retention, for example, the copy would apply its own.
_DEFAULT: Final = 5
#: Timestamps that ListOffsets takes for the log start and the high watermark.
_EARLIEST: Final = -2
_LATEST: Final = -1
#: Kafka's default for followers (replica.fetch.wait.max.ms).
_WAIT_MS: Final = 500
#: Limits of one response, for one partition and in total.
_PARTITION_BYTES: Final = 4 << 20
_MAX_BYTES: Final = 32 << 20
_INTERNAL: Final = ("__consumer_offsets", "__transaction_state")


@attrs.frozen
class SourceTopic:
    """A topic of the source."""

    name: str
    topic_id: bytes
    #: The leader of each partition; -1 if there is none.
    leaders: Mapping[int, int]


@attrs.frozen
class FetchPosition:
    """The position at which a copy continues. The epoch is -1 if the copy is empty."""

    topic_id: bytes
    offset: int
    last_epoch: int


class Source(Closeable):
    """A Kafka cluster. A `with` block closes it. Used by one thread."""

    def __init__(
        self, addresses: str, settings: Mapping[str, str] | None = None
    ) -> None:
        """Prepare connections to the brokers at `HOST:PORT[,...]`.

        `settings` have librdkafka's names, such as security.protocol.

        Raises:
            InvalidConfigError: an address or a setting is invalid.
        """
        #: The addresses as given.
        self.addresses = addresses
        self._bootstrap = parse_addresses(addresses)
        self._settings = ClientSettings.parse(settings or {})
        #: By node id, the addresses in the latest metadata.
        self._brokers: dict[int, tuple[str, int]] = {}
        #: By node id, the connections to leaders.
        self._connections: dict[int, SourceConnection] = {}
        #: For metadata and settings, which every broker serves.
        self._metadata_connection: SourceConnection | None = None
        self.cluster_id = ""

    def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._metadata_connection is not None:
            self._metadata_connection.close()
            self._metadata_connection = None

    # -- connections -------------------------------------------------------------------

    def _open_metadata_connection(self) -> SourceConnection:
        """Return a connection to some broker.

        Raises:
            RemoteUnavailableError: no broker answers.
        """
        if self._metadata_connection is not None:
            return self._metadata_connection
        failure: RemoteUnavailableError | None = None
        # The given addresses may have been replaced since the start. The brokers that
        # the last metadata named are tried after them.
        for host, port in [*self._bootstrap, *self._brokers.values()]:
            try:
                self._metadata_connection = SourceConnection(host, port, self._settings)
            except RemoteUnavailableError as error:
                failure = error
            else:
                return self._metadata_connection
        assert failure is not None, "there is no address"
        raise failure

    def _connection(self, broker: int) -> SourceConnection:
        connection = self._connections.get(broker)
        if connection is None:
            if broker not in self._brokers:
                raise RemoteUnavailableError(f"broker {broker} is unknown")
            host, port = self._brokers[broker]
            connection = SourceConnection(host, port, self._settings)
            self._connections[broker] = connection
        return connection

    # -- metadata ----------------------------------------------------------------------

    def topics(
        self, patterns: Iterable[str], *, with_internal: bool = False
    ) -> dict[str, SourceTopic]:
        """Return the topics with matching names.

        A pattern is a name, in which * and ? match any characters. Kafka's own topics
        are found only by their names or with `with_internal`.

        Raises:
            RemoteUnavailableError: no broker answers.
            ShippingError: the brokers are older than Kafka 3.1.
        """
        connection = self._open_metadata_connection()
        # All topics, because a pattern may match one that was created just now. A
        # request by name could create a missing topic in the source.
        request = wire.METADATA.Request(topics=None, allow_auto_topic_creation=False)
        if connection.version_of(wire.METADATA) < _METADATA_IDS_SINCE:
            raise ShippingError("the source needs Apache Kafka 3.1 or later")
        response = connection.request(wire.METADATA, request)
        self.cluster_id = response.cluster_id or ""
        self._brokers = {
            broker.node_id: (broker.host, broker.port) for broker in response.brokers
        }
        patterns = list(patterns)
        topics = {}
        for topic in response.topics:
            if not _is_selected(topic.name, topic.is_internal, patterns, with_internal):
                continue
            if topic.error_code:
                raise RemoteUnavailableError(
                    f"topic {topic.name}: {codes.name(topic.error_code)}"
                )
            topics[topic.name] = SourceTopic(
                topic.name,
                bytes(topic.topic_id),
                {
                    partition.partition_index: partition.leader_id
                    for partition in topic.partitions
                },
            )
        return topics

    def settings(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the settings that were set for topics or for their brokers.

        Raises:
            RemoteUnavailableError: no broker answers.
            RemoteTopicError: the source does not allow reading the settings of a topic.
        """
        resource = wire.DESCRIBE_CONFIGS.Request.Resource
        request = wire.DESCRIBE_CONFIGS.Request(
            resources=[
                resource(
                    resource_type=_TOPIC, resource_name=name, configuration_keys=None
                )
                for name in names
            ]
        )
        response = self._open_metadata_connection().request(
            wire.DESCRIBE_CONFIGS, request
        )
        settings = {}
        for result in response.results:
            if result.error_code:
                raise RemoteTopicError(
                    f"the settings of topic {result.resource_name} cannot be read: "
                    f"{codes.name(result.error_code)}"
                )
            settings[result.resource_name] = {
                config.name: config.value
                for config in result.configs
                if config.config_source != _DEFAULT and config.value is not None
            }
        missing = set(names) - settings.keys()
        if missing:
            raise RemoteUnavailableError(
                f"the source returned no settings of the topics {', '.join(sorted(missing))}"
            )
        return settings

    def starts(self, topics: Mapping[str, SourceTopic]) -> dict[Partition, int]:
        """Return the log start offsets of all partitions that have a leader."""
        return self._offsets(topics, _EARLIEST)

    def ends(self, topics: Mapping[str, SourceTopic]) -> dict[Partition, int]:
        """Return the high watermarks of all partitions that have a leader."""
        return self._offsets(topics, _LATEST)

    def _offsets(
        self, topics: Mapping[str, SourceTopic], timestamp: int
    ) -> dict[Partition, int]:
        """Return an offset of each partition, except for partitions whose leader has
        just moved.

        Raises:
            RemoteUnavailableError: a leader does not answer.
        """
        by_leader: dict[int, dict[str, list[int]]] = {}
        for topic in topics.values():
            for number, leader in topic.leaders.items():
                # During an election, a partition has no leader. The next refresh
                # requests its offset.
                if leader >= 0:
                    requested = by_leader.setdefault(leader, {})
                    requested.setdefault(topic.name, []).append(number)
        offsets = {}
        topic_type = wire.LIST_OFFSETS.Request.Topic
        for leader, partitions in by_leader.items():
            request = wire.LIST_OFFSETS.Request(
                replica_id=-1,
                topics=[
                    topic_type(
                        name=name,
                        partitions=[
                            topic_type.Partition(
                                partition_index=number, timestamp=timestamp
                            )
                            for number in numbers
                        ],
                    )
                    for name, numbers in partitions.items()
                ],
            )
            response = self._request(leader, wire.LIST_OFFSETS, request)
            for topic in response.topics:
                for partition in topic.partitions:
                    if not partition.error_code:
                        offsets[topic.name, partition.partition_index] = (
                            partition.offset
                        )
        return offsets

    def _request(self, broker: int, api: Any, request: Any) -> Any:
        try:
            return self._connection(broker).request(api, request)
        except RemoteUnavailableError:
            # The connection is closed. The next request needs a new one.
            self._connections.pop(broker, None)
            raise

    # -- records -----------------------------------------------------------------------

    def fetch(
        self, by_leader: Mapping[int, Mapping[Partition, FetchPosition]]
    ) -> Generator[tuple[Partition, Any], None, None]:
        """Fetch partitions, grouped by leader; yield each with its part of a response.

        Records are views, valid until the iterator yields the next partition. All
        leaders get their requests before the first response is read.

        Raises:
            RemoteUnavailableError: a leader does not answer.
            ShippingError: a leader is older than Kafka 3.1.
        """
        try:
            # 1. Send all requests first, so that the leaders read their disks concurrently.
            for leader, positions in by_leader.items():
                connection = self._connection(leader)
                if connection.version_of(wire.FETCH) < _FETCH_IDS_SINCE:
                    raise ShippingError("the source needs Apache Kafka 3.1 or later")
                connection.send(
                    wire.FETCH, _fetch_request(positions), max_version=_FETCH_VERSION
                )
            # 2. Read the responses in the same order.
            for leader, positions in by_leader.items():
                names = {
                    position.topic_id: name for (name, _), position in positions.items()
                }
                response = self._connection(leader).receive()
                if response.error_code:
                    raise RemoteUnavailableError(
                        f"broker {leader}: {codes.name(response.error_code)}"
                    )
                for topic in response.responses:
                    name = names[bytes(topic.topic_id)]
                    for part in topic.partitions:
                        yield (name, part.partition_index), part
        except BaseException:
            # Unread responses would be mistaken for responses to later requests.
            self.close()
            raise


def _fetch_request(positions: Mapping[Partition, FetchPosition]) -> Any:
    topic_type = wire.FETCH.Request.Topic
    topics: dict[bytes, Any] = {}
    for (_, number), position in positions.items():
        topic = topics.get(position.topic_id)
        if topic is None:
            topic = topic_type(topic_id=position.topic_id, partitions=[])
            topics[position.topic_id] = topic
        topic.partitions.append(
            topic_type.Partition(
                partition=number,
                fetch_offset=position.offset,
                last_fetched_epoch=position.last_epoch,
                partition_max_bytes=_PARTITION_BYTES,
            )
        )
    return wire.FETCH.Request(
        max_wait_ms=_WAIT_MS,
        min_bytes=1,
        max_bytes=_MAX_BYTES,
        # Read uncommitted: a byte-for-byte copy contains aborted records and markers.
        isolation_level=0,
        topics=list(topics.values()),
    )


def _is_selected(
    name: str, is_internal: bool, patterns: list[str], with_internal: bool
) -> bool:
    if name in patterns:
        return True
    if is_internal or name in _INTERNAL:
        return with_internal and name in _INTERNAL
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
