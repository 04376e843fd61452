"""What the copy of a log makes of batches that its leader has stored.

Rules (Kafka's UnifiedLog.appendAsFollower):
- Offsets and leader epochs are the leader's. Nothing is stamped, so the files of both hold the same bytes.
- Offsets rise from the end of the copy on. A gap is one that compaction left in the leader's log.
- Leader epochs never fall.
- Each batch is whole and its CRC matches. Records are not decoded: the leader has judged them.

Pure functions over bytes: log.py stores what is accepted, and writes the epochs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import attrs
import numpy as np

from logcore.config import INT64_MAX
from logcore.errors import CorruptBatchError, OffsetOutOfRangeError
from logcore.kernels import kernel, layout
from logcore.kernels.layout import Buffer, EncodedBatch
from logcore.partition import epochs
from logcore.partition.order import end_of, epochs_in_order, epochs_of, in_order
from logcore.recordbatch import are_markers, read_batches

#: Beside a gap this wide the relative offsets of a segment may not fit into 32 bits.
_WIDE_GAP: Final = 1 << 30
_MOST_BATCHES: Final = 1 << 30  # no limit: as many as fit in 64 GiB


@attrs.frozen
class Continuation:
    """Batches that continue a log.

    facts: of the batches, an array of layout.BATCH_FACTS whose positions count in the data that was given. epochs: the
    leader epochs that begin in them. gap_end: the base offset behind the last gap, 0 if there is none.
    """

    facts: layout.Facts
    epochs: list[epochs.Entry]
    gap_end: int

    @property
    def first_offset(self) -> int:
        return int(self.facts["base_offset"][0])

    @property
    def has_producers(self) -> bool:
        """Whether any of them is of an idempotent producer, or a marker."""
        return bool(np.any((self.facts["producer_id"] >= 0) & (self.facts["magic"] == 2)))

    def runs(self) -> Iterator[layout.Facts]:
        """The batches in stretches that may be written together: a marker is the last of one, for the index of the
        segment that it is stored in names what it aborted; and none has a gap inside that one segment may not hold.
        """
        gaps = self.facts["base_offset"][1:] - self.facts["last_offset"][:-1]
        ends = are_markers(self.facts[:-1]) | (gaps > _WIDE_GAP)
        start = 0
        for stop in [*(np.flatnonzero(ends) + 1).tolist(), len(self.facts)]:
            yield self.facts[start:stop]
            start = stop


def is_marker(facts: layout.Facts) -> bool:
    """Whether the last of some batches is a control batch of a transaction."""
    return bool(are_markers(facts[-1:])[0])


def encoded(facts: layout.Facts, start: int) -> list[EncodedBatch]:
    """Where batches lie in a buffer that begins at position start of the data."""
    columns = (facts[name].tolist() for name in ("position", "size_bytes", "last_offset", "max_timestamp"))
    return [(position - start, size, last, newest) for position, size, last, newest in zip(*columns, strict=True)]


def control_types_in(data: Buffer) -> Callable[[int], str]:
    """As transactions.control_types(), for batches in a buffer."""

    def control_type(position: int) -> str:
        return next(read_batches(memoryview(data)[position:])).control_type()

    return control_type


def follow(data: Buffer, *, log_end: int, leader_epoch: int) -> Continuation:
    """Judges whole batches that are to be stored at log_end or behind it. leader_epoch: the latest of the log.

    Raises CorruptBatchError where bytes are no whole batches, and OffsetOutOfRangeError where batches do not continue
    the log; nothing is to be stored then.
    """
    size = len(memoryview(data).cast("B"))
    facts, position, why = kernel.walk(data, 0, size, _MOST_BATCHES, True)
    if not len(facts) or position < size:  # no batch at all, or bytes behind the last whole one
        raise CorruptBatchError(
            "not whole batches",
            position=position,
            expected="batches as a leader has stored them",
            found=layout.WALK_REASONS[why],
        )
    _check_offsets(facts, log_end)
    begun = _begun_epochs(facts, leader_epoch)
    bases = facts["base_offset"]
    expected = np.concatenate(([log_end], facts["last_offset"][:-1] + 1))  # of each batch, were there no gaps
    behind_gaps = bases[bases > expected]
    gap_end = 0
    if len(behind_gaps):
        gap_end = int(behind_gaps[-1])
    return Continuation(facts, begun, gap_end)


def _check_offsets(facts: layout.Facts, log_end: int) -> None:
    count = in_order(facts, log_end, INT64_MAX)
    if count == len(facts):
        return
    expected = end_of(facts[:count], log_end)
    raise OffsetOutOfRangeError(
        "a batch does not continue the log",
        position=int(facts["position"][count]),
        offset=expected,
        expected=f"base offset {expected} or above",
        found=int(facts["base_offset"][count]),
    )


def _begun_epochs(facts: layout.Facts, latest: int) -> list[epochs.Entry]:
    """The leader epochs above the latest that begin in some batches."""
    numbers = epochs_of(facts)
    row = epochs_in_order(facts, latest)
    if row < len(facts):
        raise OffsetOutOfRangeError(
            "the leader epoch of a batch is below one before it",
            position=int(facts["position"][row]),
            offset=int(facts["base_offset"][row]),
            expected=f"{max(latest, int(numbers[:row].max(initial=-1)))} or above",
            found=int(numbers[row]),
        )
    entries: list[epochs.Entry] = []
    for row in np.flatnonzero(np.diff(numbers, prepend=-1)).tolist():  # where the epoch changes
        epoch = int(numbers[row])
        if epoch > latest:
            entries.append((epoch, int(facts["base_offset"][row])))
            latest = epoch
    return entries
