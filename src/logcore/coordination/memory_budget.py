"""Memory limit for the client state of coordinators: members, pending member ids and
transactional ids.

Each member and each group has its own limit. This limit is for their total.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: The memory is counted again once this time has passed, or once the limit divided by
#: this number was admitted.
_RECOUNT_MS: Final = 5_000
_RECOUNT_FRACTION: Final = 8
#: Python's memory for a group, a member or a transactional id, without its texts.
GROUP_BYTES: Final = 2_000
MEMBER_BYTES: Final = 1_500
ID_BYTES: Final = 1_500
#: Python's memory for one text or partition.
ITEM_BYTES: Final = 100


class ClientMemoryBudget:
    """Limits the memory of the coordinators' client state to `max_bytes`.

    A count visits every group and transaction, so requests only add their sizes to an
    upper bound. When the bound reaches the limit, the true size is counted, but not at
    every request while the memory is full.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        #: One function per coordinator that returns its current size.
        self.size_functions: list[Callable[[], int]] = []
        # The last count plus the sizes admitted since.
        self._upper_bound_bytes = 0
        self._counted_bytes = 0
        self._counted_ms: int | None = None

    def admit(self, size_bytes: int, now_ms: int) -> bool:
        """Return whether `size_bytes` are within the limit. If so, add them."""
        if self._upper_bound_bytes + size_bytes > self.max_bytes and self._is_old(
            now_ms
        ):
            self._upper_bound_bytes = self._counted_bytes = sum(
                size_function() for size_function in self.size_functions
            )
            self._counted_ms = now_ms
        if self._upper_bound_bytes + size_bytes > self.max_bytes:
            return False
        self._upper_bound_bytes += size_bytes
        return True

    def _is_old(self, now_ms: int) -> bool:
        """Return whether the last count may be far from the true size."""
        if self._counted_ms is None or not 0 <= now_ms - self._counted_ms < _RECOUNT_MS:
            return True
        return (
            self._upper_bound_bytes - self._counted_bytes
            > self.max_bytes // _RECOUNT_FRACTION
        )
