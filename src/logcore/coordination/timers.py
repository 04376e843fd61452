"""Timers without a clock: the owner of one asks `next_ms` when the next is due, and takes `due()` then."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

#: A heap smaller than this is not worth cleaning.
_SMALL = 64


class Timers(Generic[Name]):
    """Timers by name. Setting one replaces that of the same name. Of equal times the one set first is due first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Name]] = []
        self._tokens: dict[Name, int] = {}  # of the entry that counts; cancelled and replaced ones stay in the heap
        self._next_token = itertools.count()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, name: Name) -> bool:
        return name in self._tokens

    def at(self, deadline_ms: int, name: Name) -> None:
        token = next(self._next_token)
        self._tokens[name] = token
        heapq.heappush(self._heap, (deadline_ms, token, name))
        # Cancelled entries leave the heap when they come to its top. Here when they are more than half of it.
        if len(self._heap) > _SMALL and len(self._heap) > 2 * len(self._tokens):
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def cancel(self, name: Name) -> None:
        self._tokens.pop(name, None)

    def _counts(self, entry: tuple[int, int, Name]) -> bool:
        return self._tokens.get(entry[2]) == entry[1]

    @property
    def next_ms(self) -> int | None:
        """When the next one is due."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        if self._heap:
            return self._heap[0][0]
        return None

    def due(self, now_ms: int) -> Iterator[Name]:
        """Takes out what is due, one by one, so that each may set and cancel others."""
        while True:
            next_ms = self.next_ms
            if next_ms is None or next_ms > now_ms:
                return
            _, _, name = heapq.heappop(self._heap)
            del self._tokens[name]
            yield name
