"""When each of many things is due, so that work in time need not look at all of them.

Rules:
- A thing is due once: at the earliest time it was put down for, or at once after stir().
- put() and due() are for one thread at a time; stir() may be called by any thread, and never waits.

This module reads no clock and does nothing itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Agenda(Generic[T]):
    """Things that can be hashed, each with the time when it is due."""

    def __init__(self) -> None:
        self._times: dict[T, int] = {}
        self._heap: list[tuple[int, int, T]] = []  # what does not agree with _times is old
        self._stirred: deque[T] = deque()  # the only part that other threads touch
        self._numbers = itertools.count()

    def stir(self, thing: T) -> None:
        """It is due now."""
        self._stirred.append(thing)

    def put(self, thing: T, time: int) -> None:
        """It is due at a time, instead of when it was before."""
        # The number keeps the heap from comparing things of equal time.
        self._times[thing] = time
        heapq.heappush(self._heap, (time, next(self._numbers), thing))
        # Old entries stay in the heap until their time comes; here at the latest, so that it does not grow for ever.
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._times):
            self._heap = [entry for entry in self._heap if self._times.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def due(self, time: int) -> list[T]:
        """Takes off what is due at a time, the longest due first, what was stirred last."""
        found: dict[T, None] = {}
        while self._heap and self._heap[0][0] <= time:
            at, _, thing = heapq.heappop(self._heap)
            if self._times.get(thing) == at:
                del self._times[thing]
                found[thing] = None
        for _ in range(len(self._stirred)):
            thing = self._stirred.popleft()
            self._times.pop(thing, None)
            found[thing] = None
        return list(found)
