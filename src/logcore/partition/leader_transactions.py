"""Checks which batches of a leader the copy of a log may store.

Rules (Kafka's UnifiedLog.appendAsFollower):
- Offsets and leader epochs are the leader's. No timestamp is changed, so the files of
  both logs contain the same bytes.
- Offsets rise from the end of the copy on. A gap is a gap that compaction left in the
  leader's log.
- Leader epochs never decrease.
- Each batch is complete and its CRC matches. Records are not decoded, because the
  leader has checked them.

This module contains pure functions over bytes. replication.py stores the accepted batches,
and writes the epochs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import attrs
import numpy as np

from logcore.config import INT64_MAX
from logcore.errors import CorruptBatchError, OffsetOutOfRangeError
from logcore.kernels import kernel, layout
from logcore.kernels.layout import Buffer
from logcore.partition import epochs
from logcore.partition.order import end_of, epochs_in_order, epochs_of, in_order
from logcore.recordbatch import are_markers, read_batches

#: If a gap is wider than this, the relative offsets of a segment may exceed 32 bits.
_WIDE_GAP: Final = 1 << 30
_MAX_BATCHES: Final = 1 << 30  # no limit: the minimum size of this many is 64 GiB


@attrs.frozen
class Continuation:
    """Batches that continue a log."""

    #: The batches, an array of layout.BATCH_FACTS. Positions are relative to the data.
    facts: layout.Facts
    #: The leader epochs that begin in the batches.
    epochs: list[epochs.Entry]
    #: The base offset after the last gap; 0 if there is none.
    gap_end: int

    @property
    def first_offset(self) -> int:
        """The base offset of the first batch."""
        return int(self.facts["base_offset"][0])

    @property
    def has_producers(self) -> bool:
        """Whether any batch is a marker or comes from an idempotent producer."""
        return bool(
            np.any((self.facts["producer_id"] >= 0) & (self.facts["magic"] == 2))
        )

    def runs(self) -> Iterator[layout.Facts]:
        """Yield the batches in runs that may be written together.

        A marker is always the last batch of its run, because the segment in which it is
        stored indexes the transaction that it aborted. A run contains no gap that may
        be too wide for one segment.
        """
        gaps = self.facts["base_offset"][1:] - self.facts["last_offset"][:-1]
        ends = are_markers(self.facts[:-1]) | (gaps > _WIDE_GAP)
        start = 0
        for stop in [*(np.flatnonzero(ends) + 1).tolist(), len(self.facts)]:
            yield self.facts[start:stop]
            start = stop


def is_marker(facts: layout.Facts) -> bool:
    """Return whether the last of these batches is a control batch of a transaction."""
    return bool(are_markers(facts[-1:])[0])


def control_types_in(data: Buffer) -> Callable[[int], str]:
    """Return a function like transactions.control_types(), for batches in a buffer."""

    def control_type(position: int) -> str:
        return next(read_batches(memoryview(data)[position:])).control_type()

    return control_type


def follow(data: Buffer, *, log_end: int, leader_epoch: int) -> Continuation:
    """Check complete batches that will be stored at or above `log_end`.

    `leader_epoch` is the latest epoch of the log. On an error, no batch may be stored.

    Raises:
        CorruptBatchError: the bytes are not complete batches.
        OffsetOutOfRangeError: the batches do not continue the log.
    """
    size = len(memoryview(data).cast("B"))
    facts, position, why = kernel.walk(data, 0, size, _MAX_BATCHES, True)
    if not len(facts) or position < size:  # no batch, or bytes after the last whole one
        raise CorruptBatchError(
            "not whole batches",
            position=position,
            expected="batches as a leader has stored them",
            found=layout.WALK_REASONS[why],
        )
    if len(facts) == 1 and _continues(facts[0], log_end, leader_epoch):
        return Continuation(facts, [], 0)
    _check_offsets(facts, log_end)
    begun = _begun_epochs(facts, leader_epoch)
    bases = facts["base_offset"]
    # The base offset of each batch if there were no gaps.
    expected = np.concatenate(([log_end], facts["last_offset"][:-1] + 1))
    bases_after_gaps = bases[bases > expected]
    gap_end = 0
    if len(bases_after_gaps):
        gap_end = int(bases_after_gaps[-1])
    return Continuation(facts, begun, gap_end)


def _continues(batch: layout.Facts, log_end: int, leader_epoch: int) -> bool:
    """Return whether one batch passes all checks and begins no epoch.

    A follower usually gets one batch at a time, for which the checks of arrays take
    longer than the write.
    """
    return bool(
        batch["magic"] == 2
        and batch["partition_leader_epoch"] == leader_epoch
        and log_end == batch["base_offset"] <= batch["last_offset"] < INT64_MAX
    )


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
    """Return the leader epochs above `latest` that begin in these batches."""
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
    # Rows in which the epoch changes.
    for row in np.flatnonzero(np.diff(numbers, prepend=-1)).tolist():
        epoch = int(numbers[row])
        if epoch > latest:
            entries.append((epoch, int(facts["base_offset"][row])))
            latest = epoch
    return entries
