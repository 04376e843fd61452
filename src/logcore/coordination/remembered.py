"""Limit on the memory of what clients make coordinators remember: members, ids that were given out, transactional ids.

Each member and each group has a limit of its own. This one is for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: Coordinators are counted again after so long, or once this part of the limit was admitted since.
_RECOUNT_MS: Final = 5_000
_RECOUNT_PART: Final = 8
#: What Python takes for a group, a member, or a transactional id beside its texts; and for one text or partition.
GROUP_BYTES: Final = 2_000
MEMBER_BYTES: Final = 1_500
ID_BYTES: Final = 1_500
ITEM_BYTES: Final = 100


class Remembered:
    """Counts bytes that coordinators hold for clients, and refuses more than `max_bytes`.

    Counting visits every group and transaction. Coordinators therefore only add what they admit. The holders are asked
    for the true number when that sum reaches the limit, but not at every request that finds the memory full.

    holders: each returns what one coordinator holds now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.holders: list[Callable[[], int]] = []
        self._most_bytes = 0  # held at most: the last count, and what was admitted since
        self._counted_bytes = 0
        self._counted_ms: int | None = None

    def admits(self, size_bytes: int, now_ms: int) -> bool:
        """Whether there is room for so many bytes more, which count from now on."""
        if self._most_bytes + size_bytes > self.max_bytes and self._is_old(now_ms):
            self._most_bytes = self._counted_bytes = sum(held() for held in self.holders)
            self._counted_ms = now_ms
        if self._most_bytes + size_bytes > self.max_bytes:
            return False
        self._most_bytes += size_bytes
        return True

    def _is_old(self, now_ms: int) -> bool:
        """Whether the last count may be wrong by much."""
        if self._counted_ms is None or not 0 <= now_ms - self._counted_ms < _RECOUNT_MS:
            return True
        return self._most_bytes - self._counted_bytes > self.max_bytes // _RECOUNT_PART
