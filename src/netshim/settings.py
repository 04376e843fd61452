"""Settings of a broker, by Kafka's names if Kafka has such a setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from logcore.config import INT32_MAX


def _between(low: int, high: int) -> Any:
    def check(_: object, attribute: Any, value: object) -> None:
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or not low <= value <= high
        ):
            raise ValueError(
                f"{attribute.name}: expected {low} to {high}, found {value!r}"
            )

    return check


def _setting(default: int, low: int, high: int = INT32_MAX, *, doc: str) -> Any:
    """Return a field for a number. `netshim serve --help` prints `doc` and the range."""
    return attrs.field(
        default=default,
        validator=_between(low, high),
        metadata={"doc": doc, "range": (low, high)},
    )


#: Kafka's defaults for topics that differ from the library's. A record with a time in
#: the future would not expire.
TOPIC_DEFAULTS: Final[Mapping[str, object]] = {
    "message.timestamp.after.max.ms": 3_600_000
}
#: The values of Kafka's group.consumer.migration.policy.
MIGRATION_POLICIES: Final = ("disabled", "upgrade", "downgrade", "bidirectional")


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of a broker.

    Names and defaults are Kafka's if Kafka has such a setting, except for defaults that
    would slow down tests or that suit large clusters only. For example, Kafka's
    rebalance_delay_ms is 3000, and its offsets_partitions are 50. docs/netshim.md has a
    table.

    The metadata of each field contains its description, which `netshim serve --help`
    prints.
    """

    #: Kafka's auto.create.topics.enable.
    auto_create_topics: bool = attrs.field(
        default=True,
        metadata={
            "doc": "Create a topic when a client requests one that does not exist."
        },
    )
    auto_create_limit: int = _setting(
        1_000,
        0,
        doc="Maximum number of topics that requests of one connection create implicitly; more are refused.",
    )
    num_partitions: int = _setting(
        1, 1, 100_000, doc="Partitions of a topic that is created without a number."
    )
    max_replication_factor: int = _setting(
        3,
        1,
        32_767,
        doc="Largest replication factor that CreateTopics accepts; outside a cluster there is always one replica.",
    )
    max_partitions_per_request: int = _setting(
        10_000,
        1,
        100_000,
        doc="Maximum number of partitions that one CreateTopics or CreatePartitions creates; fixed in Kafka.",
    )
    default_replication_factor: int = _setting(
        1, 1, 32_767, doc="Replicas of a topic that does not set them, in a cluster."
    )
    broker_session_timeout_ms: int = _setting(
        6_000,
        100,
        doc="Time after which the other brokers of a cluster replace one that is stuck.",
    )
    replica_lag_time_max_ms: int = _setting(
        30_000,
        100,
        doc="Time after which a follower that lags leaves the in-sync replicas.",
    )
    replica_fetch_wait_max_ms: int = _setting(
        500,
        1,
        20_000,
        doc="Maximum time that a fetch of a follower waits for records, if its previous fetch returned some.",
    )
    replica_fetch_max_bytes: int = _setting(
        1 << 20, 1, doc="Maximum bytes of a partition in one fetch of a follower."
    )
    #: Kafka's offsets.topic.num.partitions, whose default is 50.
    offsets_partitions: int = _setting(
        1, 1, 1_000, doc="Partitions of __consumer_offsets, when it is created."
    )
    #: Kafka's transaction.state.log.num.partitions, whose default is 50.
    transactions_partitions: int = _setting(
        1, 1, 1_000, doc="Partitions of __transaction_state, when it is created."
    )
    transaction_max_timeout_ms: int = _setting(
        900_000, 1, doc="Longest timeout that transactions may request."
    )
    #: Kafka's group.initial.rebalance.delay.ms, whose default is 3,000.
    rebalance_delay_ms: int = _setting(
        0, 0, doc="How long the first members of a group wait for others."
    )
    #: Kafka's log.cleaner.backoff.ms.
    cleaner_backoff_ms: int = _setting(
        15_000, 0, doc="Interval of checks for compaction while it finds no work."
    )
    #: Kafka's group.min.session.timeout.ms, whose default is 6,000.
    min_session_timeout_ms: int = _setting(
        100, 1, doc="Shortest session timeout that members of groups may request."
    )
    #: Kafka's group.max.session.timeout.ms.
    max_session_timeout_ms: int = _setting(
        1_800_000, 1, doc="Longest session timeout that members of groups may request."
    )
    group_max_size: int = _setting(
        INT32_MAX, 1, doc="Maximum number of members of a group."
    )
    group_consumer_session_timeout_ms: int = _setting(
        45_000,
        300,
        doc="Session timeout of members of the consumer protocol (KIP-848).",
    )
    group_consumer_heartbeat_interval_ms: int = _setting(
        5_000,
        100,
        doc="Heartbeat interval of members of the consumer protocol, at most a third of their session timeout.",
    )
    group_consumer_max_size: int = _setting(
        INT32_MAX,
        1,
        doc="Maximum number of members of a group of the consumer protocol.",
    )
    group_consumer_migration_policy: str = attrs.field(
        default="bidirectional",
        validator=attrs.validators.in_(MIGRATION_POLICIES),
        metadata={
            "doc": "Which groups change their protocol while they run.",
            "choices": MIGRATION_POLICIES,
        },
    )
    offset_metadata_max_bytes: int = _setting(
        4_096, 0, doc="Largest metadata text of a committed offset."
    )
    fetch_max_bytes: int = _setting(
        57_671_680,
        1_024,
        doc="Maximum bytes that one fetch returns. It always returns at least one batch.",
    )
    max_incremental_fetch_session_cache_slots: int = _setting(
        1_000,
        0,
        doc="Maximum number of fetch sessions; further clients list all their partitions in each fetch.",
    )
    #: Kafka's socket.request.max.bytes.
    max_request_bytes: int = _setting(
        104_857_600, 1_024, doc="Largest request; a larger one closes its connection."
    )
    #: Kafka has no such limit.
    max_request_entries: int = _setting(
        100_000,
        1_000,
        doc="Maximum number of partitions, topics and names in a request; one with more closes its connection.",
    )
    #: Similar to Kafka's queued.max.request.bytes (KIP-72).
    max_buffered_bytes: int = _setting(
        256 << 20,
        1 << 20,
        1 << 40,
        doc="Maximum bytes of unfinished requests of all connections; above it, the broker stops reading.",
    )
    #: Kafka has no such limit.
    max_remembered_bytes: int = _setting(
        128 << 20,
        1 << 20,
        1 << 40,
        doc="Maximum memory for members of groups and transactional ids; more are refused.",
    )
    max_connections: int = _setting(
        1_024, 1, doc="Maximum number of connections; more are refused."
    )
    #: Kafka's max.connections.per.ip.
    max_connections_per_address: int = _setting(
        1_024, 1, doc="Maximum number of connections from one address."
    )
    #: Kafka reads one request of a connection at a time.
    max_pipelined_requests: int = _setting(
        64,
        1,
        doc="Maximum number of requests of a connection that wait for their responses.",
    )
    #: Similar to Kafka's queued.max.requests.
    max_requests_in_work: int = _setting(
        500,
        1,
        doc="Maximum number of requests in progress, of all connections; waits for records or members do not count.",
    )
    max_unread_bytes: int = _setting(
        32 << 20,
        1 << 16,
        doc="Maximum bytes of responses that a client has not read; above it, its requests wait.",
    )
    request_timeout_ms: int = _setting(
        30_000,
        10,
        doc="Close a connection after this time if its request is below 1 KiB a second, or if it reads no response.",
    )
    #: Kafka's connections.max.idle.ms.
    idle_timeout_ms: int = _setting(
        600_000, 10, doc="Close a connection after this time without requests."
    )
