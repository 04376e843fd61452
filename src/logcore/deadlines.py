"""Timeouts in milliseconds, and deadlines without a clock: the owner waits until
`next_ms`, then calls due().
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from logcore.errors import InvalidConfigError

Name = TypeVar("Name", bound=Hashable)

#: A smaller heap is not cleaned.
_SMALL = 64
#: Longest timeout, 31 years. A larger one, also infinity, counts as this.
_MAX_SECONDS = 1e9


def milliseconds(timeout: float) -> int:
    """Return a timeout in seconds as milliseconds, rounded.

    Raises:
        InvalidConfigError: the timeout is negative or not a number.
    """
    # NaN is not at least 0 either.
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise InvalidConfigError(
            "a timeout is in seconds", expected="a number from 0", found=repr(timeout)
        )
    return round(1000 * min(timeout, _MAX_SECONDS))


class Deadlines(Generic[Name]):
    """Deadlines by name. A new deadline replaces one with the same name.

    Among equal times, the deadline that was set first is due first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Name]] = []
        # Token of the valid entry of each name. Cancelled and replaced entries remain
        # in the heap.
        self._tokens: dict[Name, int] = {}
        self._next_token = itertools.count()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, name: Name) -> bool:
        return name in self._tokens

    def at(self, deadline_ms: int, name: Name) -> None:
        token = next(self._next_token)
        self._tokens[name] = token
        heapq.heappush(self._heap, (deadline_ms, token, name))
        # Cancelled entries leave the heap at its top, or here if they are more than
        # half of it.
        if len(self._heap) > _SMALL and len(self._heap) > 2 * len(self._tokens):
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def cancel(self, name: Name) -> None:
        self._tokens.pop(name, None)

    def _counts(self, entry: tuple[int, int, Name]) -> bool:
        return self._tokens.get(entry[2]) == entry[1]

    @property
    def next_ms(self) -> int | None:
        """The earliest deadline, or None."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        if self._heap:
            return self._heap[0][0]
        return None

    def due(self, now_ms: int) -> Iterator[Name]:
        """Remove and yield names that are due, one at a time.

        The caller may set and cancel other deadlines between them.
        """
        while True:
            next_ms = self.next_ms
            if next_ms is None or next_ms > now_ms:
                return
            _, _, name = heapq.heappop(self._heap)
            del self._tokens[name]
            yield name
