"""How a broker behaves: what may be set when it is started, by Kafka's names where it has them."""

from __future__ import annotations

from typing import Any

import attrs


def _between(low: int, high: int) -> Any:
    def check(_: object, attribute: Any, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{attribute.name}: expected {low} to {high}, found {value!r}")

    return check


def _setting(default: int, low: int, high: int = 2**31 - 1) -> Any:
    return attrs.field(default=default, validator=_between(low, high))


@attrs.frozen(kw_only=True)
class Settings:
    """How a broker behaves; names and defaults are Kafka's where it has them, except where tests would wait for them.

    auto_create_topics: make topics that a client asks the metadata of, with num_partitions. rebalance_delay_ms: how
    long the first members of a group wait for others (Kafka: 3000). offsets_partitions: of `__consumer_offsets` when it
    is made; one broker has nothing to spread (Kafka: 50). max_replication_factor: the largest that CreateTopics accepts
    and then reports as 1. The limits of connections: docs/netshim.md.
    """

    auto_create_topics: bool = True
    num_partitions: int = _setting(1, 1, 100_000)
    max_replication_factor: int = _setting(3, 1, 32_767)
    offsets_partitions: int = _setting(1, 1, 1_000)
    rebalance_delay_ms: int = _setting(0, 0)
    cleaner_backoff_ms: int = _setting(15_000, 0)
    min_session_timeout_ms: int = _setting(100, 1)
    max_session_timeout_ms: int = _setting(1_800_000, 1)
    group_max_size: int = _setting(2**31 - 1, 1)
    offset_metadata_max_bytes: int = _setting(4_096, 0)
    fetch_max_bytes: int = _setting(57_671_680, 1_024)
    max_request_bytes: int = _setting(104_857_600, 1_024)
    max_buffered_bytes: int = _setting(256 << 20, 1 << 20, 1 << 40)
    max_connections: int = _setting(1_024, 1)
    max_connections_per_address: int = _setting(1_024, 1)
    max_pipelined_requests: int = _setting(64, 1)
    max_unread_bytes: int = _setting(32 << 20, 1 << 16)
    request_timeout_ms: int = _setting(30_000, 10)
    idle_timeout_ms: int = _setting(600_000, 10)
