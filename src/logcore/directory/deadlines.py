"""Deadline queue: items ordered by due time, so that maintenance need not check all
logs.

Rules:
- An item is due once: at the time set last, or at once after stir().
- put() and due() are for one thread at a time. Any thread may call stir(), which never
  blocks.

This module reads no clock and runs no tasks.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Agenda(Generic[T]):
    """Hashable items with due times."""

    def __init__(self) -> None:
        self._times: dict[T, int] = {}
        # Entries that do not match _times are outdated.
        self._heap: list[tuple[int, int, T]] = []
        # The only field that other threads change.
        self._stirred: deque[T] = deque()
        self._numbers = itertools.count()

    def stir(self, thing: T) -> None:
        """Make an item due now."""
        self._stirred.append(thing)

    def put(self, thing: T, time: int) -> None:
        """Set the due time of an item, replacing its former due time."""
        # The number keeps the heap from comparing items with equal times.
        self._times[thing] = time
        heapq.heappush(self._heap, (time, next(self._numbers), thing))
        # Outdated entries leave the heap at their time, or here, so that the heap does
        # not grow without limit.
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._times):
            self._heap = [
                entry for entry in self._heap if self._times.get(entry[2]) == entry[0]
            ]
            heapq.heapify(self._heap)

    def due(self, time: int) -> list[T]:
        """Remove and return the items that are due, by due time; stirred items come
        last.
        """
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
