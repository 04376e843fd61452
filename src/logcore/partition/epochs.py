"""Leader epochs: the offsets at which each leader began and ended.

Rules (storage format section 6, leader-epoch-checkpoint, and section 11.4,
OffsetForLeaderEpoch):
- Entries (epoch, start offset) strictly increase in the epoch and never decrease in the
  offset.
- The latest epoch of a log that clients read never decreases, because clients reject a
  smaller epoch than they have seen. Kafka drops an epoch without records, and its
  leader begins a new one. Here a log is its own leader, so it keeps the epoch.
- A follower truncates its log at the end of the last epoch that it shares with its
  leader.

This module contains functions over a list of entries. writer.py keeps the list and its
file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from logcore.segment import Segment

Entry = tuple[int, int]


def assign(entries: list[Entry], epoch: int, start_offset: int) -> list[Entry]:
    """Begin an epoch at `start_offset`, and drop entries that contradict it.

    A known epoch changes nothing.
    """
    assert epoch >= 0 and start_offset >= 0, (epoch, start_offset)
    if entries and epoch == entries[-1][0] and start_offset >= entries[-1][1]:
        return entries
    kept = [entry for entry in entries if entry[0] < epoch and entry[1] < start_offset]
    return [*kept, (epoch, start_offset)]


def truncate_end(entries: list[Entry], end_offset: int) -> list[Entry]:
    """Remove the epochs that began at or above `end_offset`, the new end of the log."""
    return [entry for entry in entries if entry[1] < end_offset]


def truncate_end_keeping_epoch(entries: list[Entry], end_offset: int) -> list[Entry]:
    """Truncate the epochs of a leader at `end_offset`.

    Like truncate_end(), but the latest epoch remains in force. If it began above
    `end_offset`, it begins there now.
    """
    kept = truncate_end(entries, end_offset)
    if len(kept) == len(entries):
        return kept
    return [*kept, (entries[-1][0], end_offset)]


def truncate_start(entries: list[Entry], start_offset: int) -> list[Entry]:
    """Return the entries for a log that now starts at `start_offset`.

    The epoch in force at `start_offset` begins there.
    """
    below = [entry for entry in entries if entry[1] <= start_offset]
    above = [entry for entry in entries if entry[1] > start_offset]
    if below:
        epoch_at_start, _ = below[-1]
        return [(epoch_at_start, start_offset), *above]
    return above


def in_force(entries: list[Entry], offset: int) -> int:
    """Return the last epoch that begins at or below an offset, else the first."""
    epoch, _ = entries[0]
    for later, start_offset in entries[1:]:
        if start_offset > offset:
            break
        epoch = later
    return epoch


def end_of(entries: list[Entry], epoch: int, log_end: int) -> Entry:
    """Return the largest known epoch at or below `epoch`, and its end offset.

    Returns (-1, -1) if that is unknown.
    """
    if epoch < 0 or not entries or epoch > entries[-1][0]:
        return -1, -1
    if epoch == entries[-1][0]:
        return epoch, log_end
    slot = bisect_right(entries, epoch, key=lambda entry: entry[0]) - 1
    if slot < 0:
        return (epoch, entries[0][1])
    return (entries[slot][0], entries[slot + 1][1])


def walked(segments: Iterable[Segment], log_start: int) -> list[Entry]:
    """Return the entries according to the batches, for a log without an epoch file."""
    found: list[Entry] = [(0, log_start)]
    for segment in segments:
        for facts, _, _ in segment.walk(0, crc=False):
            # Only rows in which the number rises: a thousand batches have few of them.
            numbers = facts["partition_leader_epoch"]
            changes = np.flatnonzero(np.diff(numbers, prepend=-1) > 0)
            for row in changes[numbers[changes] > 0].tolist():
                if int(numbers[row]) > found[-1][0]:
                    found = assign(
                        found, int(numbers[row]), int(facts["base_offset"][row])
                    )
    return found
