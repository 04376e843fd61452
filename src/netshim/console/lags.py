"""The lag of groups over the last ten minutes, from samples in memory.

Rules:
- A sample is taken every INTERVAL_S while the console runs, and MAX_SAMPLES are kept.
- At most MAX_SERIES committed offsets have samples. The samples are deleted with the
  group or its offset.
- The lag counts offsets up to the log end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

#: Time between two samples.
INTERVAL_S: Final = 10.0
#: Ten minutes of samples, and one more for the start of the line.
MAX_SAMPLES: Final = 61
MAX_SERIES: Final = 1_000

#: A committed offset: group, topic and partition.
LagKey = tuple[str, str, int]
#: Time in milliseconds, and lag.
LagSample = tuple[int, int]


@attrs.define
class LagHistory:
    """The samples of one console. Threads of pages may use it at the same time."""

    _lock: threading.Lock = attrs.Factory(threading.Lock)
    #: The samples of each committed offset, oldest first.
    _series: dict[LagKey, deque[LagSample]] = attrs.Factory(dict)

    def add(self, time_ms: int, lags: Mapping[LagKey, int]) -> None:
        """Add the lags at one time. Samples of all other committed offsets are deleted."""
        with self._lock:
            for key in self._series.keys() - lags.keys():
                del self._series[key]
            for key, lag in lags.items():
                series = self._series.get(key)
                if series is None:
                    if len(self._series) >= MAX_SERIES:
                        continue
                    series = self._series[key] = deque(maxlen=MAX_SAMPLES)
                series.append((time_ms, lag))

    def of_partition(self, key: LagKey) -> list[LagSample]:
        """Return the samples of a partition, oldest first."""
        with self._lock:
            return list(self._series.get(key, ()))

    def of_group(self, group: str, topics: Iterable[str]) -> list[LagSample]:
        """Return the sum of the partitions of a group in some topics, oldest first."""
        existing = set(topics)
        total: dict[int, int] = {}
        with self._lock:
            for (name, topic, _), series in self._series.items():
                if name == group and topic in existing:
                    for time_ms, lag in series:
                        total[time_ms] = total.get(time_ms, 0) + lag
        return sorted(total.items())
