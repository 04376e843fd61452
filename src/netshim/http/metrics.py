"""Metrics of a broker, in the format of Prometheus.

The broker's thread collects the values in chunks. The HTTP thread renders them.
Names and labels are in docs/netshim.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from logcore.coordination.classic_group import Group
from logcore.metadata.checkpoint import Key
from logcore.reporting import Incident
from netshim.request_counts import BUCKETS_S, Histogram, RequestCounts, name_of
from netshim.scheduling import ChunkCounter, Steps
from netshim.state import BrokerState

if TYPE_CHECKING:
    from netshim.server import Server

#: Maximum number of series of one metric with names from clients. The others are added
#: up in the series `other`.
MAX_SERIES: Final = 1_000
#: The label of the series for all other names.
OTHER: Final = "other"
#: Values of the labels of a series.
_Labels = tuple[str, ...]
#: Status of a transaction that is not over.
_OPEN: Final = ("Ongoing", "PrepareCommit", "PrepareAbort")


@attrs.frozen(kw_only=True)
class BrokerStatus:
    """Values from the broker's thread. The values of one chunk belong to one moment."""

    #: By listener.
    connections: Mapping[_Labels, int]
    #: Partitions of all topics of the directory.
    partitions: int
    open_logs: int
    #: Logs whose last write or sync failed.
    failed_logs: int
    #: Groups by state, and members of each group.
    groups: Mapping[_Labels, int]
    members: Mapping[_Labels, int]
    #: Records between the committed offset and the high watermark, by group, topic and
    #: partition.
    lags: Mapping[_Labels, int]
    #: Transactions with a status of _OPEN. 0 in a shared directory.
    open_transactions: int
    #: Partitions whose in-sync replicas are not all replicas.
    under_replicated_partitions: int
    #: Partitions without a leader.
    offline_partitions: int
    #: Since the start of the broker, like the two numbers below.
    appends: int
    isr_changes: int
    elections: int
    #: By mechanism.
    failed_authentications: Mapping[_Labels, int]
    #: Requests that exceeded a quota, by its key.
    throttled: Mapping[_Labels, int]
    #: The longest step of the event loop since the last scrape.
    longest_step_s: float
    #: Errors in work that no client waits for.
    incidents: tuple[Incident, ...]


def _groups(state: BrokerState) -> list[Group]:
    """Return the groups of this broker.

    In a shared directory there are none: reading them would block the event loop.
    """
    if state.is_shared or not state.groups.is_loaded:
        return []
    return list(state.groups.all())


def _committed(group: Group) -> Iterator[tuple[Key, int]]:
    """Yield the committed offsets of a group, which may commit in the meantime."""
    for name, partitions in list(group.offsets.items()):
        for number, committed in list(partitions.items()):
            yield (name, number), committed.offset


def group_keys(state: BrokerState) -> Steps[list[Key]]:
    """Return the partitions with committed offsets, at most MAX_SERIES."""
    # A dict, because several groups may read a partition.
    keys: dict[Key, None] = {}
    chunk_counter = ChunkCounter()
    for group in _groups(state):
        for key, _ in _committed(group):
            if chunk_counter.is_over():
                yield
            if len(keys) >= MAX_SERIES:
                return list(keys)
            keys[key] = None
    return list(keys)


def collect_status(server: Server) -> Steps[BrokerStatus]:
    """Collect the values of the metrics, in chunks, once the groups are loaded."""
    state = server.broker.state
    chunk_counter = ChunkCounter()
    groups: Counter[_Labels] = Counter()
    members: Counter[_Labels] = Counter()
    lags: Counter[_Labels] = Counter()
    for group in _groups(state):
        if chunk_counter.is_over():
            yield
        groups[group.state,] += 1
        members[bounded((group.group_id, group.state), members)] += _members_of(group)
        for (name, number), offset in _committed(group):
            if chunk_counter.is_over():
                yield
            log = state.logdir.host.opened(name, number)
            if log is not None:
                labels = bounded((group.group_id, name, str(number)), lags)
                lags[labels] += max(0, log.high_watermark - offset)
    partitions_count = under_replicated_partitions = offline_partitions = 0
    for name in state.logdir.topics():
        for number in state.logs.numbers_of(name):
            if chunk_counter.is_over():
                yield
            partitions_count += 1
            # Without a cluster, the only broker leads all partitions.
            if state.leadership.is_clustered:
                replicas = state.topology.partition(name, number)
                offline_partitions += replicas.leader < 0
                under_replicated_partitions += len(replicas.isr) < len(
                    replicas.replicas
                )
    # A copy, because other threads open logs.
    logs = list(state.logdir.host.known_logs().values())
    return BrokerStatus(
        connections=_labeled(server.connections()),
        partitions=partitions_count,
        open_logs=len(logs),
        failed_logs=sum(log.has_failed for log in logs),
        groups=groups,
        members=members,
        lags=lags,
        open_transactions=_open_transactions(state),
        under_replicated_partitions=under_replicated_partitions,
        offline_partitions=offline_partitions,
        appends=state.leadership.appends,
        isr_changes=state.leadership.isr_changes,
        elections=state.leadership.elections,
        failed_authentications=_labeled(state.security.failures),
        throttled=_labeled(state.security.quotas.throttled),
        longest_step_s=server.pop_longest_step_s(),
        incidents=server.logdir.incidents(),
    )


def _labeled(values: Mapping[str, int]) -> dict[_Labels, int]:
    return {(label,): value for label, value in values.items()}


def bounded(labels: _Labels, series: Mapping[_Labels, int]) -> _Labels:
    """Return the labels, or the labels of the series `other` if there are too many."""
    if labels in series or len(series) < MAX_SERIES:
        return labels
    return (OTHER,) * len(labels)


def _members_of(group: Group) -> int:
    if group.consumers is not None:
        return len(group.consumers.members)
    return len(group.members)


def _open_transactions(state: BrokerState) -> int:
    # find_stored() calls finish() before it returns, except in a shared directory.
    counts: list[int] = []
    if not state.is_shared:

        def finish(transactions: object) -> None:
            if isinstance(transactions, dict):
                labels = (
                    transaction.status.label for transaction in transactions.values()
                )
                counts.append(sum(label in _OPEN for label in labels))

        state.transactions.find_stored(None, finish)
    return sum(counts)


class BrokerCollector(Collector):
    """The metrics of one moment."""

    def __init__(
        self, status: BrokerStatus, counts: RequestCounts, disk: tuple[int, int]
    ) -> None:
        self._status = status
        self._counts = counts
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        status, counts = self._status, self._counts
        # Copied, because the broker's thread counts requests at the same time.
        requests: dict[_Labels, int] = {
            (api, name_of(code)): count
            for (api, code), count in counts.requests.copy().items()
        }
        yield _counter(
            "requests", "Answered requests.", ("api", "code"),
            requests,
        )  # fmt: skip
        yield _histograms(
            "request_seconds", "Time from a request to its response.", counts.seconds
        )
        yield _histograms(
            "request_parked_seconds",
            "Time of requests that waited for records or members.",
            counts.parked_seconds,
        )
        yield _counter(
            "bytes", "Bytes of requests and responses.", ("direction",),
            _labeled({"received": counts.received_bytes, "sent": counts.sent_bytes}),
        )  # fmt: skip
        yield CounterMetricFamily(
            "netshim_appends", "Appends to logs.", value=status.appends
        )
        sync = HistogramMetricFamily("netshim_sync_seconds", "Time of syncs of logs.")
        sync.add_metric([], *_buckets(counts.sync_seconds))
        yield sync
        yield _gauge(
            "connections", "Open connections.", ("listener",), status.connections
        )
        yield _single(
            "loop_held_seconds_max",
            "Longest step of the event loop since the last scrape.",
            status.longest_step_s,
        )
        yield _single("partitions", "Partitions.", status.partitions)
        yield _single("open_logs", "Logs that are open.", status.open_logs)
        yield _single(
            "failed_logs", "Logs whose last write or sync failed.", status.failed_logs
        )
        yield _single("disk_total_bytes", "Size of the disk.", self._disk[0])
        yield _single("disk_free_bytes", "Free space of the disk.", self._disk[1])
        yield _gauge("groups", "Groups by state.", ("state",), status.groups)
        yield _gauge(
            "group_members", "Members of groups.", ("group", "state"), status.members
        )
        yield _single(
            "transactions_open",
            "Transactions that are not over.",
            status.open_transactions,
        )
        yield _counter(
            "throttled", "Requests that exceeded a quota.", ("kind",), status.throttled
        )
        yield _counter(
            "authentication_failures", "Failed authentications.", ("mechanism",),
            status.failed_authentications,
        )  # fmt: skip
        incidents: Counter[_Labels] = Counter()
        for incident in status.incidents:
            incidents[incident.kind,] += incident.count
        yield _counter(
            "incidents",
            "Errors in work that no client waits for.",
            ("kind",),
            incidents,
        )
        yield _single(
            "under_replicated_partitions",
            "Partitions with replicas that are not in sync.",
            status.under_replicated_partitions,
        )
        yield _single(
            "partitions_without_leader",
            "Partitions that no broker leads.",
            status.offline_partitions,
        )
        yield CounterMetricFamily(
            "netshim_isr_changes", "Changes of in-sync replicas.",
            value=status.isr_changes,
        )  # fmt: skip
        yield CounterMetricFamily(
            "netshim_leader_elections", "Partitions that this broker began to lead.",
            value=status.elections,
        )  # fmt: skip


def render(status: BrokerStatus, counts: RequestCounts, disk: tuple[int, int]) -> bytes:
    """Return the metrics as text. `disk` is the size and the free space of the disk."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BrokerCollector(status, counts, disk))
    return generate_latest(registry) + _lag_text(status.lags)


def _lag_text(lags: Mapping[_Labels, int]) -> bytes:
    """Return the lags as text.

    This metric has the most series, and prometheus_client takes four times as long.
    """
    lines = [
        "# HELP netshim_group_lag Records between the committed offset and the high watermark.",
        "# TYPE netshim_group_lag gauge",
    ]
    for (group, topic, number), lag in lags.items():
        if "\\" in group or '"' in group or "\n" in group:
            group = group.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        lines.append(
            f'netshim_group_lag{{group="{group}",topic="{topic}",partition="{number}"}} {lag}'
        )
    return ("\n".join(lines) + "\n").encode()


def _single(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"netshim_{name}", text, value=value)


def _family(
    family_type: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: Mapping[_Labels, float],
) -> Metric:
    family = family_type(f"netshim_{name}", text, labels=labels)
    for row, value in values.items():
        family.add_metric(row, value)
    return family


_gauge: Final = partial(_family, GaugeMetricFamily)
_counter: Final = partial(_family, CounterMetricFamily)


def _histograms(name: str, text: str, values: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(f"netshim_{name}", text, labels=("api",))
    # A copy, because the broker's thread adds APIs.
    for api, histogram in list(values.items()):
        family.add_metric([api], *_buckets(histogram))
    return family


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return the cumulative buckets and the sum of a histogram."""
    # Prometheus counts in each bucket all values up to its bound.
    total = 0
    buckets = []
    for bound, count in zip(
        (*map(str, BUCKETS_S), "+Inf"), histogram.counts, strict=True
    ):
        total += count
        buckets.append((bound, float(total)))
    return buckets, histogram.sum_s
