"""The transactions of a partition, derived from its batches: open and aborted ones.

Rules (storage format sections 5.2, 5.3, 11.2):
- A transactional data batch opens its producer's transaction at its first offset if
  none is open.
- A COMMIT or ABORT marker closes it. A marker of a producer without an open transaction
  changes nothing.
- The last stable offset is the first offset of the oldest open transaction, or the high
  watermark if that is lower.

The state reads no files. Segments pass it the facts of their batches, in order.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs

from logcore.config import INT64_MAX
from logcore.index import AbortedTransaction
from logcore.kernels.layout import (
    CONTROL_BIT,
    CRC_START,
    TRANSACTIONAL_BIT,
    EncodedBatch,
    Facts,
)
from logcore.recordbatch import TRANSACTION_ENDS
from logcore.segment import ActiveSegment, Segment

#: Position of the low byte of a batch's attributes, and its bits for transactions.
_ATTRIBUTES_POSITION: Final = CRC_START + 1
_TRANSACTIONS_MASK: Final = TRANSACTIONAL_BIT | CONTROL_BIT


@attrs.define
class PartitionTransactions:
    """The transactions of all batches below `next_offset`."""

    next_offset: int = 0
    #: Producer id -> first offset of its open transaction.
    open: dict[int, int] = attrs.Factory(dict)
    #: Producer id -> (first offset, offset of the marker) of aborted ones, rising.
    aborted: dict[int, list[tuple[int, int]]] = attrs.Factory(dict)
    #: Aborted transactions in the order of their markers, as in .txnindex files (4.3).
    entries: list[AbortedTransaction] = attrs.Factory(list)

    def add(self, facts: Facts, control_type: Callable[[int], str]) -> None:
        """Add batches that follow the last ones.

        `control_type(position)` returns the type of the control batch there. If it
        raises, no batch was added.
        """
        if not len(facts):
            return
        rows = facts[
            (facts["magic"] == 2) & ((facts["attributes"] & TRANSACTIONAL_BIT) != 0)
        ]
        # Read all markers before any change, because reading one may fail.
        kinds: list[str] = []
        for row in rows:
            kind = ""  # data, or a control batch that compaction has emptied
            if row["attributes"] & CONTROL_BIT and row["record_count"]:
                kind = control_type(int(row["position"]))
            kinds.append(kind)
        for row, kind in zip(rows, kinds, strict=True):
            producer_id = int(row["producer_id"])
            base_offset = int(row["base_offset"])
            if not row["attributes"] & CONTROL_BIT:
                self.open.setdefault(producer_id, base_offset)
            elif kind in TRANSACTION_ENDS:
                first = self.open.pop(producer_id, None)
                if first is not None and kind == "ABORT":
                    self.aborted.setdefault(producer_id, []).append(
                        (first, base_offset)
                    )
                    # As in Kafka's .txnindex: the start of the oldest transaction that
                    # is still open, or the offset after the marker.
                    stable = min(self.open.values(), default=base_offset + 1)
                    self.entries.append(
                        AbortedTransaction(producer_id, first, base_offset, stable)
                    )
        self.next_offset = int(facts["last_offset"][-1]) + 1

    def last_stable_offset(self, high_watermark: int) -> int:
        """Return the offset of the oldest open transaction, or the high watermark."""
        return min([high_watermark, *self.open.values()])

    def aborted_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return (producer id, first offset) of aborted transactions in [start, end).

        The result is sorted by first offset.
        """
        found = [
            (producer_id, first)
            for producer_id, spans in self.aborted.items()
            for first, marker in spans
            if first < end and marker >= start
        ]
        return sorted(found, key=lambda each: each[1])

    def entries_between(self, start: int, end: int) -> list[AbortedTransaction]:
        """Return aborted transactions whose markers have an offset in [start, end)."""
        low = bisect_left(self.entries, start, key=lambda entry: entry.last_offset)
        high = bisect_left(self.entries, end, key=lambda entry: entry.last_offset)
        return self.entries[low:high]

    def is_aborted(self, producer_id: int, base_offset: int) -> bool:
        """Return whether a data batch belongs to an aborted transaction."""
        spans = self.aborted.get(producer_id, [])
        at = 0
        if spans:
            at = bisect_right(spans, (base_offset, base_offset))
        # The transactions of one producer follow each other. Only the last one that
        # began at or before the batch can contain it.
        neighbors = spans[max(0, at - 1) : at + 1]
        return any(first <= base_offset < last for first, last in neighbors)


def control_types(segment: Segment) -> Callable[[int], str]:
    """Return a function for PartitionTransactions.add(): the type of the control batch
    there.
    """

    def control_type(position: int) -> str:
        batch = segment.batch(position)
        if batch is not None:
            return batch.control_type()
        return "UNKNOWN"

    return control_type


def walked(segments: Iterable[Segment]) -> PartitionTransactions:
    """Return the transactions of a whole log, from its batches."""
    state = PartitionTransactions()
    add_batches(state, list(segments))
    return state


def add_batches(state: PartitionTransactions, segments: Sequence[Segment]) -> None:
    """Add all batches of a log from the end of a state on."""
    for segment, following in itertools.zip_longest(segments, segments[1:]):
        if following is not None and following.base_offset <= state.next_offset:
            continue  # the state contains all of it already
        start = 0
        if segment.base_offset < state.next_offset:
            start = segment.find(state.next_offset)
        for facts, _, _ in segment.walk(start, crc=False):
            state.add(facts, control_types(segment))


def index_aborted(active: ActiveSegment, segments: Iterable[Segment]) -> None:
    """Fill the transaction index of the active segment, if it has markers."""
    if active.has_markers:
        state = walked(segments)
    else:
        state = PartitionTransactions()
    active.set_aborted(state.entries_between(active.base_offset, INT64_MAX))


def may_change(
    data: bytes | memoryview, batches: Sequence[EncodedBatch] | None
) -> bool:
    """Return whether a batch is part of a transaction, or is a control batch.

    `batches` contains the position of each batch in `data`; None for a single batch.
    """
    if batches is None:
        return bool(data[_ATTRIBUTES_POSITION] & _TRANSACTIONS_MASK)
    return any(
        data[position + _ATTRIBUTES_POSITION] & _TRANSACTIONS_MASK
        for position, _, _, _ in batches
    )
