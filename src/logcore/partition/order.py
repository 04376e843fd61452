"""Whether a batch continues the one before it.

No CRC covers the base offset in the head of a batch, so damage to it shows beside the neighbours only.

Rules:
- A batch ends at or above its own base offset.
- It begins above the last offset of the batch before it. The offset of a v0/v1 wrapper is that of its last record, so
  such a batch may begin anywhere above the one before, and no gap is ever seen in front of it.
- It ends below the limit: the base offset of the next segment, or the end of what relative offsets of 32 bits reach.
- It leaves no gap where there can be none: at or above dense_from, no offset is missing in front of a v2 batch.
- Leader epochs never fall from batch to batch.

Who asks, and what dense_from is for them:

| caller | gaps |
| --- | --- |
| a leader (Log.append_batch) | gives out the offsets itself, right behind its log end |
| a follower (partition/following.py) | allowed: compaction left them in the leader's log |
| recovery of the active segment | a loss from the noted dense_from on |
| recovery of sealed segments | allowed: only what a crash leaves is looked for |
| readers, the cleaner, scrubbing | a loss from the noted dense_from on |
| verify, salvage | as for readers |

One batch is judged by fault_of(), an array of batches by first_fault() and in_order(): the same rules twice, as a loop
over batches in Python would be 50 times slower. kernel.follow_on() and kernel.plan_run() are fast forms for the usual
case; whatever they stop at is judged here. tests/partition/test_order.py runs one table of cases over all of them and
over all callers.

Pure functions. Whether a gap below dense_from is a loss is not decided here but in partition/gaps.py.
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


class Fault(enum.Enum):
    """Why a batch does not continue the one before it. The first that applies counts."""

    FALLS = "its offsets lie before the end of the batch before it"
    FAR = "its offsets lie in a later segment, or behind batches that follow"
    GAP = "it does not continue the batch before it"


def reach(base_offset: int) -> int:
    """The limit of a segment that no other one follows."""
    return base_offset + layout.INT32_MAX + 1


def is_gap(expected: int, base_offset: int, dense_from: int) -> bool:
    """Whether offsets are lost where a v2 batch begins at base_offset and one at expected should."""
    return base_offset > max(expected, dense_from)


def fault_of(
    magic: int, base_offset: int, last_offset: int, expected: int, limit: int, dense_from: int
) -> Fault | None:
    """What is wrong with one batch behind which all ends below expected."""
    if magic == 2:
        base = base_offset
    else:
        base = last_offset
    if base < expected or last_offset < base:
        return Fault.FALLS
    if last_offset >= limit:
        return Fault.FAR
    if magic == 2 and is_gap(expected, base, dense_from):
        return Fault.GAP
    return None


def first_fault(facts: layout.Facts, expected: int, limit: int, *, dense_from: int = NEVER) -> tuple[int, Fault | None]:
    """(the first of some batches that does not continue the one before it, why), or (their count, None).

    expected: the offset behind the batch before the first.
    """
    if not len(facts):
        return 0, None
    last = facts["last_offset"]
    is_new = facts["magic"] == 2
    base = np.where(is_new, facts["base_offset"], last)  # a v0/v1 wrapper has the offset of its last record
    before = np.concatenate(([expected - 1], last[:-1]))  # the last offset of the batch before each
    falls = (base <= before) | (last < base)
    is_wrong = falls | (last >= limit)
    if dense_from < NEVER:
        is_wrong |= is_new & (base > np.maximum(before + 1, dense_from))
    if not is_wrong.any():
        return len(facts), None
    row = int(is_wrong.argmax())
    if falls[row]:
        return row, Fault.FALLS
    if last[row] >= limit:
        return row, Fault.FAR
    return row, Fault.GAP


def in_order(facts: layout.Facts, expected: int, limit: int, *, dense_from: int = NEVER) -> int:
    """How many of some batches continue each other from expected on."""
    return first_fault(facts, expected, limit, dense_from=dense_from)[0]


def end_of(facts: layout.Facts, expected: int) -> int:
    """The offset behind some batches, expected if there are none."""
    if len(facts):
        return int(facts["last_offset"][-1]) + 1
    return expected


def epochs_of(facts: layout.Facts) -> npt.NDArray[np.int32]:
    """The leader epoch of each batch, -1 where it names none: old formats and old leaders do not."""
    numbers: npt.NDArray[np.int32] = np.where(facts["magic"] == 2, facts["partition_leader_epoch"], -1)
    return numbers


def epochs_in_order(facts: layout.Facts, latest: int) -> int:
    """How many of some batches come before the first whose leader epoch is below one before it. latest: of the log."""
    numbers = epochs_of(facts)
    is_below = (numbers >= 0) & (numbers < np.maximum.accumulate(np.maximum(numbers, latest)))
    if is_below.any():
        return int(is_below.argmax())
    return len(facts)
