"""Visit queue: items with due times, so that maintenance need not check all logs.

Rules:
- An item is returned once: at its latest due time, or at once after make_due().
- Only one thread at a time may call schedule() and due(). Any thread may call
  make_due(), which never blocks.

This module reads no clock and runs no tasks.
"""

from __future__ import annotations

import itertools
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
        self._due_now: deque[ItemT] = deque()

    def make_due(self, item: ItemT) -> None:
        """Make an item due now."""
        self._due_now.append(item)

    def schedule(self, item: ItemT, time_ms: int) -> None:
        """Set the due time of an item, replacing its former due time."""
        self._deadlines.at(time_ms, item)

    def due(self, now_ms: int, limit: int) -> list[ItemT]:
        """Remove and return at most `limit` items that are due.

        They are sorted by due time; items of make_due() come last.
        """
        items = dict.fromkeys(itertools.islice(self._deadlines.due(now_ms), limit))
        # The whole queue is searched, because make_due() may have been called several
        # times for an item, which must be returned once.
        for _ in range(len(self._due_now)):
            item = self._due_now.popleft()
            if item in items:
                continue
            if len(items) < limit:
                self._deadlines.cancel(item)
                items[item] = None
            else:
                self._due_now.append(item)
        return list(items)
