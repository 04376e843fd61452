"""Decides whether a batch continues the previous one.

No CRC covers the base offset in the header of a batch. Damage to it is therefore only
visible in comparison with the neighbors.

Rules:
- A batch ends at or above its own base offset.
- A batch begins above the last offset of the previous batch. The offset of a v0/v1
  wrapper is the offset of its last record. Such a batch may begin anywhere above the
  previous one, and a gap before it is never detected.
- A batch ends below the limit. The limit is the base offset of the next segment, or the
  end of the range of 32-bit relative offsets.
- A batch leaves no gap if there can be none: at or above dense_from, no offset is
  missing before a v2 batch.
- Leader epochs never decrease from batch to batch.

Callers, and their treatment of gaps (dense_from):

| caller | gaps |
| --- | --- |
| a leader (Log.append_batch) | assigns the offsets itself, from its log end on |
| a follower (partition/leader_transactions.py) | allowed: compaction left them in the leader's log |
| recovery of the active segment | a loss from the stored dense_from on |
| recovery of sealed segments | allowed: only the damage of a crash is searched for |
| readers, the cleaner, scrubbing | a loss from the stored dense_from on |
| verify, salvage | as for readers |

fault_of() checks one batch; first_fault() and in_order() check an array of batches. The
rules exist twice because a Python loop over batches would be 50 times slower.
kernel.are_consecutive() and kernel.plan_run() are fast checks for the usual case. A batch at
which they stop is checked here. tests/partition/test_order.py runs one table of cases
over all of these functions and over all callers.

This module contains pure functions. partition/gaps.py decides whether a gap below
dense_from is a loss.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from logcore.config import INT64_MAX
from logcore.kernels import layout

#: dense_from of a log that may have gaps anywhere.
NEVER: Final = INT64_MAX


class OrderFault(enum.Enum):
    """Why a batch does not continue the previous one: the first fault that applies."""

    FALLS = "its offsets are below the end of the previous batch"
    FAR = "its offsets are in a later segment, or above later batches"
    GAP = "it does not continue the batch before it"


def reach(base_offset: int) -> int:
    """Return the offset limit of a segment that is the last one."""
    return base_offset + layout.INT32_MAX + 1


def is_gap(expected: int, base_offset: int, dense_from: int) -> bool:
    """Return whether offsets are lost before a v2 batch at `base_offset`.

    `expected` is the offset at which the batch should begin.
    """
    return base_offset > max(expected, dense_from)


def fault_of(
    magic: int,
    base_offset: int,
    last_offset: int,
    expected: int,
    limit: int,
    dense_from: int,
) -> OrderFault | None:
    """Return the fault of a batch, or None. Earlier batches end below `expected`."""
    if magic == 2:
        base = base_offset
    else:
        base = last_offset
    if base < expected or last_offset < base:
        return OrderFault.FALLS
    if last_offset >= limit:
        return OrderFault.FAR
    if magic == 2 and is_gap(expected, base, dense_from):
        return OrderFault.GAP
    return None


def first_fault(
    facts: layout.Facts, expected: int, limit: int, *, dense_from: int = NEVER
) -> tuple[int, OrderFault | None]:
    """Return (index of the first batch with a fault, the fault), or (count, None).

    `expected` is the offset after the batch before the first one.
    """
    if not len(facts):
        return 0, None
    last = facts["last_offset"]
    is_new = facts["magic"] == 2
    # A v0/v1 wrapper has the offset of its last record.
    base = np.where(is_new, facts["base_offset"], last)
    before = np.concatenate(([expected - 1], last[:-1]))  # last offsets of predecessors
    falls = (base <= before) | (last < base)
    is_wrong = falls | (last >= limit)
    if dense_from < NEVER:
        is_wrong |= is_new & (base > np.maximum(before + 1, dense_from))
    if not is_wrong.any():
        return len(facts), None
    row = int(is_wrong.argmax())
    if falls[row]:
        return row, OrderFault.FALLS
    if last[row] >= limit:
        return row, OrderFault.FAR
    return row, OrderFault.GAP


def in_order(
    facts: layout.Facts, expected: int, limit: int, *, dense_from: int = NEVER
) -> int:
    """Return how many of these batches continue each other from `expected` on."""
    return first_fault(facts, expected, limit, dense_from=dense_from)[0]


def end_of(facts: layout.Facts, expected: int) -> int:
    """Return the offset after these batches, or `expected` if there are none."""
    if len(facts):
        return int(facts["last_offset"][-1]) + 1
    return expected


def epochs_of(facts: layout.Facts) -> npt.NDArray[np.int32]:
    """Return the leader epoch of each batch; -1 if it has none, as in old formats."""
    numbers: npt.NDArray[np.int32] = np.where(
        facts["magic"] == 2, facts["partition_leader_epoch"], -1
    )
    return numbers


def epochs_in_order(facts: layout.Facts, latest: int) -> int:
    """Return how many batches precede the first one with a decreasing leader epoch.

    `latest` is the latest leader epoch of the log.
    """
    numbers = epochs_of(facts)
    is_below = (numbers >= 0) & (
        numbers < np.maximum.accumulate(np.maximum(numbers, latest))
    )
    if is_below.any():
        return int(is_below.argmax())
    return len(facts)
