"""The data of the pages about a broker: clients, requests, errors, users and replicas.

The broker's event loop copies the list of its connections. The thread of the page copies
the counts of requests, as the metrics do.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import attrs

from logcore.metadata.checkpoint import Key
from logcore.reporting import Incident
from netshim.request_counts import BUCKETS_S, Histogram, RequestCounts, name_of
from netshim.scheduling import ChunkCounter, PendingResponse, Steps, chain_response
from netshim.security.acls import (
    Acl,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.topology import NO_NODE
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.server_thread import ServerHandle
    from netshim.state import BrokerState

#: Maximum number of rows of a table.
_MAX_ROWS: Final = 200
#: How long a page waits for the broker's event loop.
WAIT_S: Final = 30.0
#: Maximum number of offsets of all groups that are copied for the history of lags.
MAX_OFFSETS: Final = 1_000


def wait_for(
    handle: ServerHandle, begin: Callable[[Callable[[Any], None]], None]
) -> Any:
    """Run begin() in the broker's event loop, and return the value that begin() passes to
    its callback.

    The thread of a page calls this function. The event loop must not, because it would
    wait for itself.

    Raises:
        RuntimeError: the broker has stopped.
        TimeoutError: there is no value after WAIT_S.
    """
    if not handle.is_running:
        raise RuntimeError("the broker is starting or stopping")
    result: Future[Any] = Future()

    def finish(value: Any) -> None:
        # Only the first result is used: begin() may raise after it has called finish().
        with contextlib.suppress(InvalidStateError):
            result.set_result(value)

    def run() -> None:
        try:
            begin(finish)
        except Exception as error:  # raised in the thread of the page
            finish(error)

    handle.post(run)
    value = result.result(WAIT_S)
    if isinstance(value, Exception):
        raise value
    return value


@attrs.frozen
class LiveGroup:
    """The current state of a group in the broker's coordinator."""

    #: By Kafka's names, such as "PreparingRebalance".
    state: str
    members: int
    #: Committed offsets. Empty if they would exceed MAX_OFFSETS for all groups together.
    offsets: Mapping[Key, int]


def groups_reader(handle: ServerHandle) -> Callable[[], dict[str, LiveGroup]]:
    """Return a function that reads the groups of the broker by name.

    It returns no groups of a shared directory, because each process has its own members.
    """

    def begin(callback: Callable[[Any], None]) -> None:
        server = handle.server
        state = server.broker.state
        if state.is_shared:
            callback({})
            return
        pending = PendingResponse()
        pending.then(callback)
        state.groups.load(
            server.now_ms(),
            lambda _: chain_response(state.run_in_steps(_live_groups(state)), pending),
        )

    return lambda: wait_for(handle, begin)


def _live_groups(state: BrokerState) -> Steps[dict[str, LiveGroup]]:
    live_groups: dict[str, LiveGroup] = {}
    remaining_offsets = MAX_OFFSETS
    chunk_counter = ChunkCounter()
    for group in list(state.groups.all()):
        if chunk_counter.is_over():
            yield
        count = sum(map(len, group.offsets.values()))
        offsets: dict[Key, int] = {}
        if count <= remaining_offsets:
            remaining_offsets -= count
            offsets = {
                (topic, number): committed.offset
                for topic, partitions in group.offsets.items()
                for number, committed in partitions.items()
            }
        # Groups of the consumer protocol have their members elsewhere (KIP-848).
        members = group.members if group.consumers is None else group.consumers.members
        live_groups[group.group_id] = LiveGroup(group.state, len(members), offsets)
    return live_groups


@attrs.frozen(kw_only=True)
class ApiCounts:
    """The requests of one API since the start. Times are in seconds."""

    api: str
    requests: int
    errors: int
    #: The bounds that 50 % and 99 % of the requests did not exceed; None if they
    #: exceeded the largest bound.
    median_s: float | None
    p99_s: float | None


@attrs.frozen
class AclRow:
    """An access control list as text."""

    permission: str
    principal: str
    operation: str
    #: Kind and name; a name that ends with * is a prefix.
    resource: str
    host: str


@attrs.frozen
class LaggingPartition:
    """A partition without a leader, or with replicas that are not in sync."""

    topic: str
    partition: int
    leader: int
    #: Node ids of the replicas that are in sync, and of the others.
    isr: list[int]
    lagging: list[int]


@attrs.frozen
class ClusterStatus:
    """The cluster, as this broker has read it from the registry."""

    #: Node id; -1 for none.
    controller: int
    #: For each broker: the number of partitions that it leads, and of its replicas.
    leaders: dict[int, tuple[int, int]]
    #: At most _MAX_ROWS partitions.
    lagging: list[LaggingPartition]
    #: The number of all partitions that are lagging.
    lagging_count: int


@attrs.frozen(kw_only=True)
class BrokerPageData:
    """The values that the page of the broker shows, at one moment."""

    #: HOST:PORT of the listener for clients.
    bootstrap_servers: str
    node_id: int
    #: (client library, address, user, connections), most connections first.
    clients: list[tuple[str, str, str, int]]
    apis: list[ApiCounts]
    #: (API, name of the error code, responses), most responses first.
    errors: list[tuple[str, str, int]]
    incidents: tuple[Incident, ...]
    #: Names of the users, and whether the rules are enforced.
    users: list[str]
    enforces_rules: bool
    rules: list[AclRow]
    #: None for a broker without a cluster.
    cluster: ClusterStatus | None
    #: Since the start of the broker, like all counts.
    received_bytes: int
    sent_bytes: int


def broker_data_reader(handle: ServerHandle) -> Callable[[], BrokerPageData]:
    """Return a function that reads the values of the page.

    It raises RuntimeError once the broker has stopped.
    """

    def begin(callback: Callable[[Any], None]) -> None:
        state = handle.server.broker.state
        pending = PendingResponse()
        pending.then(callback)
        chain_response(state.run_in_steps(_cluster_status(state)), pending)

    def read() -> BrokerPageData:
        server = handle.server
        # None if the server has no metrics. The page then shows no requests.
        counts = server.counts or RequestCounts()
        clients = handle.call(server.clients)
        security = server.security
        # In chunks, because a cluster may have 100,000 partitions.
        cluster = wait_for(handle, begin) if server.is_clustered else None
        rows = [(*key, count) for key, count in clients.most_common(_MAX_ROWS)]
        return BrokerPageData(
            bootstrap_servers=server.bootstrap_servers,
            node_id=server.logdir.node_id,
            clients=rows,
            apis=_apis(counts),
            errors=_errors(counts),
            incidents=server.logdir.incidents(),
            users=sorted(security.snapshot.users),
            enforces_rules=security.acls is not None,
            rules=[_acl_row(acl) for acl in security.snapshot.acls[:_MAX_ROWS]],
            cluster=cluster,
            received_bytes=counts.received_bytes,
            sent_bytes=counts.sent_bytes,
        )

    return read


def _acl_row(rule: Acl) -> AclRow:
    resource_type = ResourceType(rule.resource_type).name.lower().replace("_", " ")
    suffix = "*" if rule.pattern == Pattern.PREFIXED else ""
    return AclRow(
        Permission(rule.permission).name.lower(),
        rule.principal,
        AclOperation(rule.operation).name,
        f"{resource_type} {rule.name}{suffix}",
        rule.host,
    )


def _cluster_status(state: BrokerState) -> Steps[ClusterStatus]:
    leaders: Counter[int] = Counter()
    replicas: Counter[int] = Counter()
    lagging: list[LaggingPartition] = []
    count = 0
    chunk_counter = ChunkCounter()
    for topic in state.logdir.topics():
        for number in state.logs.numbers_of(topic):
            if chunk_counter.is_over():
                yield
            replica = state.topology.partition(topic, number)
            leaders[replica.leader] += 1
            replicas.update(replica.replicas)
            lagging_replicas = [
                node for node in replica.replicas if node not in replica.isr
            ]
            if lagging_replicas or replica.leader < 0:
                count += 1
                if len(lagging) < _MAX_ROWS:
                    lagging.append(
                        LaggingPartition(
                            topic, number, replica.leader, replica.isr, lagging_replicas
                        )
                    )
    nodes = {
        node: (leaders[node], replicas[node])
        for node in sorted({*leaders, *replicas} - {NO_NODE})
    }
    return ClusterStatus(state.topology.controller_id, nodes, lagging, count)


def _apis(counts: RequestCounts) -> list[ApiCounts]:
    # The broker's thread counts at the same time, and iteration over the dict itself
    # would fail.
    requests = counts.requests.copy()
    rows = []
    for api in sorted({api for api, _ in requests}):
        numbers = {
            code: count for (name, code), count in requests.items() if name == api
        }
        total = sum(numbers.values())
        histogram = counts.seconds.get(api, Histogram())
        rows.append(
            ApiCounts(
                api=api,
                requests=total,
                errors=total - numbers.get(codes.NONE, 0),
                median_s=_quantile(histogram, 0.5),
                p99_s=_quantile(histogram, 0.99),
            )
        )
    return rows


def _quantile(histogram: Histogram, share: float) -> float | None:
    """Return the first bound that this share of the values does not exceed."""
    totals = list(accumulate(histogram.counts))
    # Shorter than `totals`: the last bucket has no bound.
    bounds = zip(BUCKETS_S, totals)
    return next((bound for bound, total in bounds if total >= share * totals[-1]), None)


def _errors(counts: RequestCounts) -> list[tuple[str, str, int]]:
    rows = [
        (api, name_of(code), count)
        for (api, code), count in counts.requests.copy().items()
        if code != codes.NONE
    ]
    return sorted(rows, key=lambda row: -row[2])[:_MAX_ROWS]
