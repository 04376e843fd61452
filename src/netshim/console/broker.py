"""Facts about a broker for its page: clients, requests, errors and incidents.

The broker's thread copies its connections. Counts of requests are copied by the thread
of the page, as for metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import attrs

from logcore.reporting import Incident
from netshim.request_counts import BUCKETS_S, Histogram, RequestCounts, name_of
from netshim.wire import codes

if TYPE_CHECKING:
    from netshim.server_thread import ServerHandle

#: Rows of a table.
_MOST_ROWS: Final = 200


@attrs.frozen(kw_only=True)
class ApiCounts:
    """The requests of one API since the start. Times are in seconds."""

    api: str
    requests: int
    errors: int
    #: Bounds that half, and 99 of 100, of the requests did not exceed; None if they
    #: exceeded the largest bound.
    median_s: float | None
    p99_s: float | None


@attrs.frozen(kw_only=True)
class BrokerPageFacts:
    """The facts of one moment."""

    bootstrap_servers: str
    node_id: int
    #: (client library, address, user, connections), most connections first.
    clients: list[tuple[str, str, str, int]]
    apis: list[ApiCounts]
    #: (API, name of the error code, responses), most responses first.
    errors: list[tuple[str, str, int]]
    incidents: tuple[Incident, ...]
    received_bytes: int
    sent_bytes: int


def facts_reader(handle: ServerHandle) -> Callable[[], BrokerPageFacts]:
    """Return a function that reads the facts. It raises RuntimeError once the broker has
    stopped.
    """

    def read() -> BrokerPageFacts:
        server = handle.server
        counts = server.counts or RequestCounts()
        clients = handle.call(server.clients)
        rows = [(*key, count) for key, count in clients.most_common(_MOST_ROWS)]
        return BrokerPageFacts(
            bootstrap_servers=server.bootstrap_servers,
            node_id=server.logdir.node_id,
            clients=rows,
            apis=_apis(counts),
            errors=_errors(counts),
            incidents=server.logdir.incidents(),
            received_bytes=counts.received_bytes,
            sent_bytes=counts.sent_bytes,
        )

    return read


def _apis(counts: RequestCounts) -> list[ApiCounts]:
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
    bounds = zip(BUCKETS_S, totals)
    return next((bound for bound, total in bounds if total >= share * totals[-1]), None)


def _errors(counts: RequestCounts) -> list[tuple[str, str, int]]:
    rows = [
        (api, name_of(code), count)
        for (api, code), count in counts.requests.copy().items()
        if code != codes.NONE
    ]
    return sorted(rows, key=lambda row: -row[2])[:_MOST_ROWS]
