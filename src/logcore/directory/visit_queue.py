"""Visit queue: items with due times, so that maintenance need not check all logs.

Rules:
- An item is due once: at the time set last, or at once after make_due().
- put() and due() are for one thread at a time. Any thread may call make_due(), which never
  blocks.

This module reads no clock and runs no tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from logcore.deadlines import Deadlines

ItemT = TypeVar("ItemT", bound=Hashable)


class VisitQueue(Generic[ItemT]):
    """Items with due times."""

    def __init__(self) -> None:
        self._deadlines: Deadlines[ItemT] = Deadlines()
        # The only field that other threads change.
        self._stirred: deque[ItemT] = deque()

    def make_due(self, item: ItemT) -> None:
        """Make an item due now."""
        self._stirred.append(item)

    def put(self, item: ItemT, time_ms: int) -> None:
        """Set the due time of an item, replacing its former due time."""
        self._deadlines.at(time_ms, item)

    def due(self, now_ms: int) -> list[ItemT]:
        """Remove and return the items that are due, by due time; stirred items last."""
        found = dict.fromkeys(self._deadlines.due(now_ms))
        for _ in range(len(self._stirred)):
            item = self._stirred.popleft()
            self._deadlines.cancel(item)
            found[item] = None
        return list(found)
