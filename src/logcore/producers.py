"""What the batches of a partition say about transactions: which are open, which were aborted.

Rules (storage format sections 5.2, 5.3, 11.2):
- A transactional data batch opens its producer's transaction at its first offset if none is open.
- A COMMIT or ABORT marker closes it. Markers of producers without an open transaction change nothing.
- The last stable offset is the first offset of the oldest open transaction, or the high watermark when that is lower.

This module reads no file: segments hand it the facts of their batches, in order.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from logcore.kernels.layout import CONTROL_BIT, TRANSACTIONAL_BIT, Facts


@attrs.frozen
class AbortedTransaction:
    """Data batches of a producer in [first_offset, last_offset] that no committed reader may see."""

    producer_id: int
    first_offset: int
    last_offset: int


@attrs.define
class Transactions:
    """Transactions up to, and without, next_offset."""

    next_offset: int = 0
    open: dict[int, int] = attrs.Factory(dict)  # producer id -> first offset
    aborted: list[AbortedTransaction] = attrs.Factory(list)

    def add(self, facts: Facts, control_type: Callable[[int], str]) -> None:
        """Takes in batches that follow on the last ones. control_type(position): the type of the control batch
        there.
        """
        if not len(facts):
            return
        self.next_offset = int(facts["last_offset"][-1]) + 1
        marked = (facts["magic"] == 2) & ((facts["attributes"] & TRANSACTIONAL_BIT) != 0)
        for row in np.flatnonzero(marked):
            batch = facts[row]
            producer_id, base_offset = int(batch["producer_id"]), int(batch["base_offset"])
            if not batch["attributes"] & CONTROL_BIT:
                self.open.setdefault(producer_id, base_offset)
            elif batch["record_count"] and (kind := control_type(int(batch["position"]))) in ("ABORT", "COMMIT"):
                first = self.open.pop(producer_id, None)
                if first is not None and kind == "ABORT":
                    self.aborted.append(AbortedTransaction(producer_id, first, base_offset))

    def last_stable_offset(self, high_watermark: int) -> int:
        return min([high_watermark, *self.open.values()])

    def is_aborted(self, producer_id: int, base_offset: int) -> bool:
        """Whether a transactional data batch belongs to an aborted transaction."""
        return any(
            one.producer_id == producer_id and one.first_offset <= base_offset < one.last_offset for one in self.aborted
        )
