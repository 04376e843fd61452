"""Counts of requests and of their times, for metrics.

A broker has them only if metrics are served. All methods are for the broker's thread;
another thread may copy the values.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from itertools import islice
from time import perf_counter
from typing import Any, Final

from netshim.wire import codes
from netshim.wire.codec import Api
from netshim.wire.fields import Struct

#: Upper bounds of the histograms, in seconds.
BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
#: Entries of a list in which an error code is searched. All of 100,000 partitions would
#: hold the event loop.
_MOST_ENTRIES: Final = 100


class Histogram:
    """Numbers of values up to each bound of BUCKETS_S, and their sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float) -> None:
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


def first_error(api: Api[Any, Any], response: object) -> int:
    """Return the first error code of a response, or 0.

    At most 100 entries of each list are searched.
    """
    if response is None:
        return codes.NONE
    for path in _paths(api):
        code = _first(response, path, 0)
        if code:
            return code
    return codes.NONE


def errors_of(api: Api[Any, Any], response: object) -> tuple[int, ...]:
    """Return all error codes of a response, by the fields that contain them."""
    found: list[int] = []
    if response is not None:
        for path in _paths(api):
            _add_errors(found, response, path, 0)
    return tuple(found)


def _add_errors(
    found: list[int], value: Any, path: tuple[str, ...], depth: int
) -> None:
    inner = getattr(value, path[depth], None)
    if depth == len(path) - 1:
        if inner:
            found.append(inner)
        return
    for one in inner or ():
        _add_errors(found, one, path, depth + 1)


def _first(value: Any, path: tuple[str, ...], depth: int) -> int:
    inner = getattr(value, path[depth], None)
    if depth == len(path) - 1:
        return inner or codes.NONE
    for one in islice(inner or (), _MOST_ENTRIES):
        code = _first(one, path, depth + 1)
        if code:
            return code
    return codes.NONE


@functools.cache
def _paths(api: Api[Any, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the fields that lead to each error code of a response."""
    return tuple(_paths_in(api.response.shape))


def _paths_in(struct: Struct) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for field in struct.fields:
        if field.name.endswith("error_code"):
            found.append((field.name,))
        elif field.is_array and field.struct is not None:
            found += [(field.name, *path) for path in _paths_in(field.struct)]
    return found


def name_of(code: int) -> str:
    """Return Kafka's name of a code, as the label of a metric."""
    return "NONE" if code == codes.NONE else codes.name(code)
