"""Leader epochs: which leader wrote from which offset on, and where its reign ended.

Rules (storage format section 6, leader-epoch-checkpoint; section 11.4, OffsetForLeaderEpoch):
- Entries (epoch, start offset) rise strictly in the epoch and never fall in the offset.
- The latest epoch of a log that clients read never falls: they believe no smaller one than they know. Kafka's log
  forgets an epoch without records, and its leader begins one again; here a log leads itself, so it keeps the epoch.
- A follower cuts its log where its leader says that the last epoch they share has ended.

Functions over a list of entries: log.py keeps the list and its file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from logcore.segment import Segment

Entry = tuple[int, int]


def assign(entries: list[Entry], epoch: int, start_offset: int) -> list[Entry]:
    """Begins an epoch at start_offset, and drops entries that contradict it. A known epoch changes nothing."""
    assert epoch >= 0 and start_offset >= 0, (epoch, start_offset)
    if entries and epoch == entries[-1][0] and start_offset >= entries[-1][1]:
        return entries
    kept = [entry for entry in entries if entry[0] < epoch and entry[1] < start_offset]
    return [*kept, (epoch, start_offset)]


def truncate_end(entries: list[Entry], end_offset: int) -> list[Entry]:
    """Without epochs that began at or above end_offset, where the log ends now."""
    return [entry for entry in entries if entry[1] < end_offset]


def cut_end(entries: list[Entry], end_offset: int) -> list[Entry]:
    """As truncate_end(), for who leads: the latest epoch stays in force, and begins at end_offset if it began above."""
    kept = truncate_end(entries, end_offset)
    if len(kept) == len(entries):
        return kept
    return [*kept, (entries[-1][0], end_offset)]


def truncate_start(entries: list[Entry], start_offset: int) -> list[Entry]:
    """Entries for a log that starts at start_offset now: the epoch in force there begins there."""
    below = [entry for entry in entries if entry[1] <= start_offset]
    above = [entry for entry in entries if entry[1] > start_offset]
    if below:
        in_force_there, _ = below[-1]
        return [(in_force_there, start_offset), *above]
    return above


def in_force(entries: list[Entry], offset: int) -> int:
    """The epoch that an offset belongs to: the last one that begins at or below it, else the first."""
    epoch, _ = entries[0]
    for later, start_offset in entries[1:]:
        if start_offset > offset:
            break
        epoch = later
    return epoch


def end_of(entries: list[Entry], epoch: int, log_end: int) -> Entry:
    """(epoch, end offset): the largest known epoch at or below the one asked for, and where it ends; (-1, -1) when that
    is not known.
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
    """As the batches have them, for a log whose file of epochs is lost."""
    found: list[Entry] = [(0, log_start)]
    for segment in segments:
        for facts, _, _ in segment.walk(0, crc=False):
            # Only rows where the number rises: a stretch of a thousand batches has few of these.
            numbers = facts["partition_leader_epoch"]
            changes = np.flatnonzero(np.diff(numbers, prepend=-1) > 0)
            for row in changes[numbers[changes] > 0].tolist():
                if int(numbers[row]) > found[-1][0]:
                    found = assign(found, int(numbers[row]), int(facts["base_offset"][row]))
    return found
