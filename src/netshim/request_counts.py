"""Counts of requests and of their times, for metrics.

A broker has them only if metrics are served. All methods are for the broker's thread;
another thread may copy the values.
"""

from __future__ import annotations

import bisect
from collections import Counter
from time import perf_counter
from typing import Any, Final

from netshim.response_errors import first_error
from netshim.wire import codes
from netshim.wire.codec import Api

#: Upper bounds of the histograms, in seconds.
BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip


class Histogram:
    """Numbers of values between the bounds of BUCKETS_S, and the sum of all values."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        #: For each bound, the values above the bound before it. The last number is for
        #: values above all bounds.
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(BUCKETS_S, value_s)] += 1
        self.sum_s += value_s


class RequestCounts:
    """The requests that were answered since the start."""

    def __init__(self) -> None:
        #: By the name of the API and the code of the first error, 0 for none.
        self.requests: Counter[tuple[str, int]] = Counter()
        #: Time from the request to its response, by API.
        self.seconds: dict[str, Histogram] = {}
        #: Time of requests that waited for records or members, by API.
        self.parked_seconds: dict[str, Histogram] = {}
        self.received_bytes = 0
        self.sent_bytes = 0
        #: Times of syncs.
        self.sync_seconds = Histogram()

    def count(
        self, api: Api[Any, Any], response: object, began_s: float, *, is_parked: bool
    ) -> None:
        """Count a request whose processing began at `began_s`, by perf_counter()."""
        code = codes.UNKNOWN_SERVER_ERROR
        if not isinstance(response, Exception):
            code = first_error(api, response)
        self.add(api.name, code, began_s, is_parked=is_parked)

    def add(self, api_name: str, code: int, began_s: float, *, is_parked: bool) -> None:
        """Count a request by the code of its first error."""
        self.requests[api_name, code] += 1
        histograms = self.parked_seconds if is_parked else self.seconds
        histogram = histograms.get(api_name)
        if histogram is None:
            histogram = histograms[api_name] = Histogram()
        histogram.add(perf_counter() - began_s)


def name_of(code: int) -> str:
    """Return Kafka's name of a code, as the label of a metric."""
    return "NONE" if code == codes.NONE else codes.name(code)
