"""What the batches of a partition say about transactions: which are open, which were aborted.

Rules (storage format sections 5.2, 5.3, 11.2):
- A transactional data batch opens its producer's transaction at its first offset if none is open.
- A COMMIT or ABORT marker closes it. Markers of producers without an open transaction change nothing.
- The last stable offset is the first offset of the oldest open transaction, or the high watermark when that is lower.

The state reads no file: segments hand it the facts of their batches, in order.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

import attrs

from logcore.config import INT64_MAX
from logcore.index import AbortedTransaction
from logcore.kernels.layout import CONTROL_BIT, TRANSACTIONAL_BIT, Facts
from logcore.recordbatch import TRANSACTION_ENDS
from logcore.segment import ActiveSegment, Segment


@attrs.define
class Transactions:
    """Transactions up to, and without, next_offset.

    open: producer id -> first offset. aborted: producer id -> (first offset, offset of the marker), rising. entries:
    the same in the order of their markers, as .txnindex files have them (section 4.3).
    """

    next_offset: int = 0
    open: dict[int, int] = attrs.Factory(dict)
    aborted: dict[int, list[tuple[int, int]]] = attrs.Factory(dict)
    entries: list[AbortedTransaction] = attrs.Factory(list)

    def add(self, facts: Facts, control_type: Callable[[int], str]) -> None:
        """Takes in batches that follow on the last ones. control_type(position): the type of the control batch there.

        All or nothing: when control_type raises, nothing was taken in.
        """
        if not len(facts):
            return
        rows = facts[(facts["magic"] == 2) & ((facts["attributes"] & TRANSACTIONAL_BIT) != 0)]
        # All markers before any change: reading one may fail.
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
                    self.aborted.setdefault(producer_id, []).append((first, base_offset))
                    # As Kafka has it in .txnindex: the oldest transaction still open, or what follows the marker.
                    stable = min(self.open.values(), default=base_offset + 1)
                    self.entries.append(AbortedTransaction(producer_id, first, base_offset, stable))
        self.next_offset = int(facts["last_offset"][-1]) + 1

    def last_stable_offset(self, high_watermark: int) -> int:
        return min([high_watermark, *self.open.values()])

    def aborted_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of aborted transactions that reach into [start, end), by first offset."""
        found = [
            (producer_id, first)
            for producer_id, spans in self.aborted.items()
            for first, marker in spans
            if first < end and marker >= start
        ]
        return sorted(found, key=lambda each: each[1])

    def entries_between(self, start: int, end: int) -> list[AbortedTransaction]:
        """Aborted transactions whose markers have an offset in [start, end)."""
        low = bisect_left(self.entries, start, key=lambda entry: entry.last_offset)
        high = bisect_left(self.entries, end, key=lambda entry: entry.last_offset)
        return self.entries[low:high]

    def is_aborted(self, producer_id: int, base_offset: int) -> bool:
        """Whether a transactional data batch belongs to an aborted transaction."""
        spans = self.aborted.get(producer_id, [])
        at = 0
        if spans:
            at = bisect_right(spans, (base_offset, base_offset))
        # One producer's transactions follow each other, so only the last that began at or before can hold it.
        near = spans[max(0, at - 1) : at + 1]
        return any(first <= base_offset < last for first, last in near)


def control_types(segment: Segment) -> Callable[[int], str]:
    """What Transactions.add() asks for: the type of the control batch at a position."""

    def control_type(position: int) -> str:
        batch = segment.batch(position)
        if batch is not None:
            return batch.control_type()
        return "UNKNOWN"

    return control_type


def walked(segments: Iterable[Segment]) -> Transactions:
    """The transactions of a whole log, as its batches have them."""
    state = Transactions()
    walk_on(state, list(segments))
    return state


def walk_on(state: Transactions, segments: Sequence[Segment]) -> None:
    """Takes in all batches of a log from where a state ends."""
    for segment, following in itertools.zip_longest(segments, segments[1:]):
        if following is not None and following.base_offset <= state.next_offset:
            continue  # the state has all of it already
        start = 0
        if segment.base_offset < state.next_offset:
            start = segment.find(state.next_offset)
        for facts, _, _ in segment.walk(start, crc=False):
            state.add(facts, control_types(segment))


def index_aborted(active: ActiveSegment, segments: Iterable[Segment]) -> None:
    """Fills the transaction index of the active segment of a log from its batches, when it has markers."""
    if active.has_markers:
        state = walked(segments)
    else:
        state = Transactions()
    active.set_aborted(state.entries_between(active.base_offset, INT64_MAX))
