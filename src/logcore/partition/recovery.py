"""What to do about the end of a log after a crash: look, decide, act.

Rules (docs/format.md, "What opening believes"):
- Damage below the recovery point is damage to data that was on disk: an error, never a cut.
- Above it, a torn tail is what crashes leave. It is cut to the last whole batch; what is cut is first copied beside the
  segment unless it is all zeros, and reported.
- A failing disk is not damage: a read error ends the opening and changes nothing.
- Everything kept is on disk before it is served: a killed process leaves data that is only in the page cache.
- What was on disk is not read: the indexes say where it ends, and the batch they point at must confirm it.

`decide` is pure and knows only TailFacts. This module handles the active segment; sealed ones were synced when they
were sealed and are believed until they are read.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import attrs
import numpy as np

from logcore.config import INT64_MAX, Durability
from logcore.errors import CorruptLogError, DiskFullError, LogcoreError, StorageReadError, StorageWriteError
from logcore.fs import FS, copy_range, opened
from logcore.kernels import kernel, layout
from logcore.names import (
    CLEANED,
    LOG,
    SEGMENT_FILES,
    SNAPSHOT,
    SWAP,
    base_offset_of,
    file_name,
    parse_file_name,
    quarantine_name,
)
from logcore.partition.gaps import front_missing
from logcore.partition.order import Fault, end_of, first_fault, in_order, reach
from logcore.segment import ActiveSegment, Segment

#: What the files of indexes are worth: they lack nothing, a crash may have cut each of them, or they are of no use.
IndexState = Literal["whole", "fronts", "none"]

#: A file that exists from a failed sync until an opening has rewritten the log.
FAILED_SYNC: Final = "logcore.unsynced"
#: How far behind damage recovery looks for a whole batch, and how much it reads at once.
_SEARCH_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20


class Action(enum.Enum):
    KEEP = "keep"
    CUT = "cut"
    QUARANTINE_AND_CUT = "quarantine and cut"
    FAIL = "fail"


class TailFacts(NamedTuple):
    """What was found behind the last good batch of the active segment.

    bad_position: where it stops being good, None if it does not. recovery_position: below it all was on disk.
    only_zeros: nothing but zero bytes follow. next_batch_bytes: distance to a later batch that is whole and fits in
    order, None when none was found. policy: how the last writer promised durability.
    """

    bad_position: int | None
    recovery_position: int
    only_zeros: bool
    next_batch_bytes: int | None
    policy: Durability


def decide(facts: TailFacts) -> Action:
    """The decision table for the tail of the active segment."""
    if facts.bad_position is None:
        return Action.KEEP
    if facts.bad_position < facts.recovery_position:
        return Action.FAIL
    # A file that grew before its data was written: no record is in it, so nothing is worth a copy.
    if facts.only_zeros:
        return Action.CUT
    if facts.next_batch_bytes is None:
        return Action.QUARANTINE_AND_CUT
    # A later batch made it to disk and this one did not. Under a policy that lets several batches wait for one sync a
    # crash does that; where no two unsynced batches can be that far apart, acknowledged data was damaged.
    if facts.policy.kind == "always" or (
        facts.policy.kind == "group" and facts.next_batch_bytes > facts.policy.max_bytes
    ):
        return Action.FAIL
    return Action.QUARANTINE_AND_CUT


@attrs.frozen
class Damage:
    """What was on disk and is lost, in a log that was opened with on_corruption="quarantine".

    Reading the offsets from first_offset to next_offset raises CorruptBatchError or CorruptLogError, behind them the
    log goes on. next_offset is None where nothing whole follows: such a log takes no appends.
    """

    path: str
    position: int
    first_offset: int
    next_offset: int | None
    reason: str

    def __str__(self) -> str:
        end = "on"
        if self.next_offset is not None:
            end = f"to {self.next_offset - 1}"
        return (
            f"{self.path}: damaged at position {self.position}, offsets from {self.first_offset} {end} ({self.reason})"
        )


@attrs.frozen
class RecoveryReport:
    """What opening found and did. Offsets are of the log; sizes and positions are bytes of the file at path."""

    path: str
    checked_bytes: int
    cut_position: int | None = None
    cut_bytes: int = 0
    reason: str = ""
    quarantine_path: str | None = None
    damage: tuple[Damage, ...] = ()

    def __str__(self) -> str:
        if self.damage:
            return "; ".join(map(str, self.damage))
        if self.cut_position is None:
            return f"{self.path}: {self.checked_bytes} bytes checked, nothing cut"
        kept = ""
        if self.quarantine_path:
            kept = f", copied to {self.quarantine_path}"
        return f"{self.path}: cut {self.cut_bytes} bytes at position {self.cut_position} ({self.reason}){kept}"


def recover(
    fs: FS,
    segment: ActiveSegment,
    *,
    recovery_point: int,
    policy: Durability | None,
    dense_from: int,
    indexes: IndexState,
) -> RecoveryReport:
    """Checks the active segment and mends its tail: heads from an index entry below the recovery point on, and CRCs
    from that point on.

    policy: what the last writer noted, None when Kafka wrote the log. dense_from: from this offset on there are no
    gaps. Kafka may leave some (a follower, a truncation inside a batch), and so does compaction; this library appends
    without.
    indexes: without them all heads are walked, and tell of producers and markers.

    Afterwards the file ends with a whole batch, its indexes are right in memory, and all of it is on disk. Raises
    CorruptLogError where the damage cannot be what a crash left, with nothing changed (and look_past() goes on from
    there); StorageReadError and StorageWriteError when the disk fails.
    """
    # 1. Below the recovery point all was on disk: heads tell where that ends, from the last index entry below it on.
    size = segment.refresh()
    segment.reset(is_synced=indexes == "whole")
    start = 0
    if indexes != "none":
        start = segment.resume(recovery_point, is_whole=indexes == "whole")
    below, recovery_position = _walk_to(segment, start, recovery_point, dense_from <= segment.base_offset)
    # 2. Bring what lies above to the disk before it is read: a batch that is kept must be on disk, not in memory alone.
    is_on_disk = size <= recovery_position or _settle(fs, segment, recovery_position)
    # 3. Take note of both parts, up to the first batch that is not good. Above the point CRCs are checked.
    bad = next((at for facts in below if (at := _note(segment, facts)) is not None), None)
    why = layout.WALK_COUNT
    if bad is None:
        bad, why = _take(segment, recovery_position, size, crc=True, dense_from=dense_from)
    end_offset = segment.last_offset + 1
    if bad is None and end_offset >= recovery_point:
        if not is_on_disk:
            _keep(fs, segment, size)
        return RecoveryReport(segment.path, size - recovery_position)
    # 4. Something is wrong: a bad batch, or whole batches that end below the recovery point, so that some are gone.
    if bad is None:
        bad = size
        why = layout.WALK_SHORT
    reason = layout.WALK_REASONS[why]
    if bad == recovery_position:
        # Of the last batch below the point: as walked, else the one that resume() ended with.
        last = next((int(facts["position"][-1]) for facts in reversed(below) if len(facts)), None)
        if last is None:
            last = start - segment.since_entry_bytes
        _check_before(segment, last)
    only_zeros, next_batch_bytes = look_behind(segment, bad, end_offset)
    # An end below the recovery point is damage, wherever the point would have lain in the bytes that are gone. A
    # position behind the file makes decide() say so.
    if end_offset >= recovery_point:
        known = recovery_position
    else:
        known = size + 1
    # Kafka notes no policy and syncs rarely, so many batches may have waited for one sync.
    action = decide(TailFacts(bad, known, only_zeros, next_batch_bytes, policy or Durability("os")))
    if action is Action.FAIL:
        expected = None
        found = None
        if end_offset < recovery_point:
            expected = f"whole batches up to offset {recovery_point}"
            found = f"an end at offset {end_offset}"
        raise CorruptLogError(
            f"{reason}, but what stood here was on disk: this is damage and not what a crash leaves. "
            "Restore the file, or open with read_only=True to read what is whole",
            path=segment.path,
            position=bad,
            offset=end_offset,
            expected=expected,
            found=found,
        )
    # 5. Copy what is cut, on disk, before the cut.
    quarantine = None
    if action is Action.QUARANTINE_AND_CUT:
        quarantine = _copy_tail(fs, segment, bad)
    if is_on_disk:
        segment.cut(bad)
    else:
        _keep(fs, segment, bad)
    return RecoveryReport(segment.path, size - recovery_position, bad, size - bad, reason, quarantine)


def _check_before(segment: ActiveSegment, position: int) -> None:
    """Raises CorruptLogError when the last batch below the recovery point is not sound. If its length, which only its
    head says, is what was damaged, then what seems to be a torn tail may be a part of it.
    """
    if position < 0 or segment.last_offset < segment.base_offset:
        return  # there is no batch before the tail
    facts, _, why = kernel.walk(*segment.head(position), 1, True)
    if not len(facts):
        # Its head may be readable all the same, and then says from which offset on records are lost.
        heads, _, _ = kernel.walk(*segment.head(position), 1, False)
        offset = segment.last_offset
        if len(heads):
            offset = int(heads["base_offset"][0])
        raise CorruptLogError(
            f"{layout.WALK_REASONS[why]}, but this batch was on disk, and what follows it may be a part of it",
            path=segment.path,
            position=position,
            offset=offset,
        )


def look_past(segment: ActiveSegment, error: CorruptLogError, recovery_point: int) -> RecoveryReport:
    """Notes the whole batches behind the damage that recover() met, as far as lengths in damaged heads lead there."""
    # The file stays as it is, so it must not be in memory alone: written again, it reaches the disk or fails.
    if _has_failed_sync(segment):
        _rewrite(segment.fs, segment.path, segment.size_bytes)
        segment.reopen()
    bad = error.position
    assert bad is not None, "recover() names the position of what it meets"
    first_offset = segment.last_offset + 1
    next_offset = None
    if error.offset is not None:  # the batch itself may have been taken note of
        first_offset = min(first_offset, max(error.offset, segment.base_offset))
    at = bad
    while at < segment.size_bytes:
        # Over one damaged batch by the length in its head, then on as far as whole batches follow each other.
        facts, _, _ = kernel.walk(*segment.head(at), 1, False)
        next_offset = None
        if not len(facts):
            break
        at += int(facts["size_bytes"][0])
        for facts, position, _ in segment.walk(at, crc=True):
            misfit = _note(segment, facts)
            if len(facts) and misfit != at and next_offset is None:
                next_offset = int(facts["base_offset"][0])
            if misfit is not None:
                at = misfit
                break
            at = position
    if segment.last_offset + 1 < recovery_point:
        next_offset = None  # the log was longer than what is left, so where it ended is not known
    damage = Damage(segment.path, bad, first_offset, next_offset, error.reason.partition(", but")[0])
    return RecoveryReport(segment.path, segment.size_bytes - bad, damage=(damage,))


def note_failed_sync(fs: FS, directory: str) -> None:
    """Tells the next opening, by a file, that memory shows what the disk may not have.

    As far as a failing disk allows. The file is not synced: it need not outlive the memory of the system.
    """
    with contextlib.suppress(LogcoreError, OSError):
        fs.close(fs.open(os.path.join(directory, FAILED_SYNC), write=True, create=True))


def _has_failed_sync(segment: Segment) -> bool:
    return segment.fs.exists(os.path.join(segment.directory, FAILED_SYNC))


def _settle(fs: FS, segment: Segment, position: int) -> bool:
    """Brings a segment to the disk; returns whether what is read of it from position on is what the disk has.

    After a sync that failed, memory shows data that the disk does not have and calls it clean (ext4, xfs, btrfs), and
    another sync succeeds without writing it. Where such a failure was noted, only memory may have the data: it is kept.
    Else the system is asked to drop its cache and read from the disk, which also finds failures that no process
    survived to note.
    """
    if _has_failed_sync(segment):
        return False
    with opened(fs, segment.path) as handle:
        try:
            fs.fsync(handle)
            return fs.drop_cache(handle, position)
        except StorageWriteError:
            note_failed_sync(fs, segment.directory)
            raise


def check_front(segments: Sequence[Segment], log_start: int, *, keeps_damage: bool = False) -> tuple[Damage, ...]:
    """Checks that the first segment holds the log start. Returns what is missing, or raises CorruptLogError: what
    deletes segments from the front notes the new start first.
    """
    first = segments[0]
    if first.base_offset <= log_start:
        return ()
    damage = Damage(first.path, 0, log_start, first.base_offset, "the segments before this one are missing")
    if not keeps_damage:
        raise front_missing(first, log_start)
    return (damage,)


def check_sealed(
    fs: FS, segments: Sequence[Segment], *, recovery_point: int, keeps_damage: bool = False
) -> tuple[Damage, ...]:
    """Syncs the sealed segments that reach above the recovery point, and checks them from there on.

    A segment that this library sealed was synced then and the recovery point moved behind it, so there are none after a
    clean life: they come from a crash in the middle of a roll, from Kafka, or from a lost checkpoint. Returns what is
    damaged, or raises CorruptLogError: nothing that a crash leaves lies before a later segment.
    """
    damaged: list[Damage] = []
    for segment, following in itertools.pairwise(segments):
        end = following.base_offset
        if end <= recovery_point:
            continue
        # After a failed sync the system may call pages clean that never reached the disk. Written again, they do, or
        # fail.
        if _has_failed_sync(segment):
            _rewrite(fs, segment.path, fs.file_size(segment.path))
        start = segment.start_position(recovery_point)
        _settle(fs, segment, start)
        damage = _damage_in(segment, start, end)
        if damage is not None:
            damaged.append(damage)
            if not keeps_damage:
                raise CorruptLogError(
                    f"{damage.reason} in the middle of the log",
                    path=segment.path,
                    position=damage.position,
                    offset=damage.first_offset,
                )
    return tuple(damaged)


def _damage_in(segment: Segment, start: int, end: int) -> Damage | None:
    """The first damage in a sealed segment whose offsets end below end."""
    expected = segment.base_offset
    for facts, position, why in segment.walk(start, crc=True):
        count = in_order(facts, expected, end)
        expected = end_of(facts[:count], expected)
        if count < len(facts):
            return Damage(
                segment.path, int(facts["position"][count]), expected, end, layout.WALK_REASONS[layout.WALK_COUNT]
            )
        if why not in (layout.WALK_END, layout.WALK_LIMIT):
            return Damage(segment.path, position, expected, end, layout.WALK_REASONS[why])
    return None


class SwapAction(enum.Enum):
    FINISH = "finish"
    DISCARD = "discard"
    FAIL = "fail"


class SwapFacts(NamedTuple):
    """A `<base>.log.swap`, which is to replace the segments in [base offset, end offset).

    is_whole: every batch of it is sound. was_begun: some of its files are still .cleaned, so that it was not wholly
    renamed. has_retired: the first of the segments that it replaces was taken out of the log already.
    """

    is_whole: bool
    was_begun: bool
    has_retired: bool


def decide_swap(facts: SwapFacts) -> SwapAction:
    """The decision table for a compaction that a crash ended (storage format section 7, phase 1).

    The old segments are taken out only when all of the new one is on disk under its .swap names.
    """
    if facts.was_begun:
        if facts.has_retired:  # no order of our steps does that
            return SwapAction.FAIL
        return SwapAction.DISCARD
    if facts.is_whole:
        return SwapAction.FINISH
    if facts.has_retired:  # the new segment is damaged, and the old ones may be gone
        return SwapAction.FAIL
    return SwapAction.DISCARD


def finish_swaps(fs: FS, directory: str) -> None:
    """Ends what a crash left of compactions: afterwards the old segments exist or the new ones, whole.

    Raises CorruptLogError, with nothing changed, where neither is.
    """
    # Decide for every compaction before anything is changed, so that an error leaves all as it was.
    names = fs.listdir(directory)
    cleaned = [base for name in names if (base := _base_of(name, CLEANED)) is not None]
    plans: list[tuple[int, int, SwapAction]] = []  # (base offset, end offset, what to do)
    for base in sorted(base for name in names if (base := base_offset_of(name, LOG + SWAP)) is not None):
        new = Segment(fs, directory, base, SWAP)
        end = base + 1
        is_whole = True
        for facts, _, why in new.walk(0, crc=True):
            if len(facts):
                end = int(facts["last_offset"][-1]) + 1
            is_whole = why in (layout.WALK_END, layout.WALK_LIMIT)
        has_retired = file_name(base, LOG) not in names
        # As in Kafka, which may split a segment: a .cleaned file at or below this one says that not all were renamed.
        was_begun = any(base >= one for one in cleaned)
        action = decide_swap(SwapFacts(is_whole, was_begun, has_retired))
        if action is SwapAction.FAIL:
            raise CorruptLogError(
                "an interrupted compaction left neither the old segments nor a whole new one", path=new.path
            )
        plans.append((base, end, action))
    # A crash may keep any of the first renamings, also the one of an index and not that of its .log.
    begun = {base for name in names if (base := base_offset_of(name, LOG + CLEANED)) is not None}
    plans += [(base, base, SwapAction.DISCARD) for base in begun - {base for base, _, _ in plans}]
    # The process that made the .swap names may have died, or failed, before they were durable. They must be, before
    # the old segments are deleted.
    fs.sync_dir(directory)
    for base, end, action in plans:
        if action is SwapAction.DISCARD:
            for name in names:
                if _base_of(name, SWAP) == base:
                    fs.unlink(os.path.join(directory, name))
            continue
        for name in names:
            file = parse_file_name(name)
            is_old = file is not None and not file.state and base <= file.base_offset < end
            # The snapshot at the base is of what lies before it, and stays true.
            if is_old and name != file_name(base, SNAPSHOT):
                fs.unlink(os.path.join(directory, name))
    # The old names are gone, durably, before the new segments take names: no offset is ever in two segments.
    fs.sync_dir(directory)
    for name in fs.listdir(directory):
        target = os.path.join(directory, name.removesuffix(SWAP))
        if name.endswith(SWAP) and not fs.exists(target):
            fs.rename(os.path.join(directory, name), target)
        elif name.endswith(SWAP):
            fs.unlink(os.path.join(directory, name))
    fs.sync_dir(directory)


def _base_of(name: str, state: str) -> int | None:
    """The base offset of a segment's file in a state, None for other files."""
    file = parse_file_name(name)
    if file is None or file.state != state or file.suffix not in SEGMENT_FILES:
        return None
    return file.base_offset


def rebuild(segment: ActiveSegment) -> None:
    """Rebuilds the indexes from a segment that is known to be whole."""
    segment.reset()
    for facts, _, _ in segment.walk(0, crc=False):
        segment.note_all(facts)


def rebuild_sound(segment: ActiveSegment, end: int) -> bool:
    """Rebuilds the indexes from a sealed segment, if all of it is sound and lies below an offset; says whether."""
    segment.reset()
    for facts, _, why in segment.walk(0, crc=True):
        if _note(segment, facts) is not None or why not in (layout.WALK_END, layout.WALK_LIMIT):
            return False
    return segment.last_offset < end


def _note(segment: ActiveSegment, facts: layout.Facts) -> int | None:
    """Notes batches up to the first whose offset does not rise, and returns its position."""
    count = in_order(facts, segment.last_offset + 1, reach(segment.base_offset))
    segment.note_all(facts[:count])
    if count < len(facts):
        return int(facts["position"][count])
    return None


def _take(segment: ActiveSegment, start: int, stop: int, *, crc: bool, dense_from: int) -> tuple[int | None, int]:
    """Notes the good batches in [start, stop): (position of the first bad one or None, why it is bad)."""
    for facts, position, why in segment.walk(start, stop=stop, crc=crc):
        expected = segment.last_offset + 1
        count, fault = first_fault(facts, expected, reach(segment.base_offset), dense_from=dense_from)
        segment.note_all(facts[:count])
        if fault is Fault.GAP:
            # No crash makes a gap before a whole batch, so the offset in a head, which no CRC covers, is damaged.
            raise CorruptLogError(
                "a batch does not continue the one before it",
                path=segment.path,
                position=int(facts["position"][count]),
                expected=f"base offset {end_of(facts[:count], expected)}",
                found=int(facts["base_offset"][count]),
            )
        if fault is not None:
            return int(facts["position"][count]), layout.WALK_COUNT
        if why not in (layout.WALK_END, layout.WALK_LIMIT):
            return position, why
    return None, layout.WALK_END


def _walk_to(segment: ActiveSegment, start: int, recovery_point: int, dense: bool) -> tuple[list[layout.Facts], int]:
    """(the heads from start to the recovery point, its position in the active segment): all before it was on disk.

    The segment has already taken note of its batches up to start. If the batches follow each other up to the recovery
    point, the position is where they reach it, whatever a torn head says behind it. Otherwise it is behind the last
    whole batch that begins below the point, so that a damaged offset, which claims too much, hides none of those.
    """
    found = start
    base = segment.base_offset
    expected = segment.last_offset + 1
    walked: list[layout.Facts] = []
    if dense and recovery_point <= expected:
        return walked, start
    # From an index entry on it is not far, so little is read: what lies behind is read from the disk once more.
    if start:
        steps = {"step_bytes": max(segment.config.index_interval_bytes, 1 << 10)}
    else:
        steps = {}
    for facts, _, _ in segment.walk(start, crc=False, **steps):
        walked.append(facts)
        bases = facts["base_offset"]
        lasts = facts["last_offset"]
        if dense and len(facts):
            count = in_order(facts, expected, INT64_MAX, dense_from=0)
            # Exactly: the point is the end of an append, and a head that says to reach beyond it is damaged.
            reached = np.flatnonzero(lasts[:count] + 1 == recovery_point)
            if len(reached):
                found = int(facts["position"][reached[0]] + facts["size_bytes"][reached[0]])
                break
            dense = count == len(facts) and int(lasts[-1]) + 1 < recovery_point
            expected = int(lasts[-1]) + 1
        below = np.flatnonzero((bases >= base) & (bases < recovery_point))
        if len(below):
            last = facts[below[-1]]
            found = int(last["position"] + last["size_bytes"])
    return [facts[facts["position"] < found] for facts in walked], found


def look_behind(segment: ActiveSegment, position: int, expected: int) -> tuple[bool, int | None]:
    """(only zeros follow, distance to a later whole batch that continues the log)."""
    only_zeros = True
    end = segment.size_bytes
    at = position
    while at < end:
        chunk = segment.fs.pread(segment.handle, min(_CHUNK_BYTES, end - at), at)
        if not chunk or chunk.count(0) != len(chunk):  # a file that was shortened meanwhile ends here
            only_zeros = not chunk
            break
        at += len(chunk)
    if only_zeros:
        return True, None
    # Jump by the lengths in the heads, which damage inside a batch leaves alone.
    at = position
    end = min(end, position + _SEARCH_BYTES)
    while at < end:
        data, start, limit = segment.head(at)
        facts, _, _ = kernel.walk(data, start, limit, 1, False)
        if not len(facts):
            return False, None
        whole, _, _ = kernel.walk(data, start, limit, 1, True)
        if len(whole) and at > position and int(whole["base_offset"][0]) >= expected:
            return False, at - position
        at += int(facts["size_bytes"][0])
    return False, None


def _keep(fs: FS, segment: ActiveSegment, size: int) -> None:
    """Reduces the segment to its first size bytes, on disk, whatever the disk has now: in a new file that takes the
    name. If there is no room for one, the old file is cut and synced, which is as much as can be done.
    """
    try:
        _rewrite(fs, segment.path, size)
    except DiskFullError:
        segment.cut(size)
        return
    segment.reopen()


def _rewrite(fs: FS, path: str, size: int) -> None:
    """Replaces a file by a new one, on disk, with its first size bytes. Raises DiskFullError, with nothing changed."""
    temporary = path + ".tmp"
    try:
        with opened(fs, path) as source, opened(fs, temporary, write=True, create=True) as target:
            fs.truncate(target, 0)
            copied = copy_range(fs, source, target, 0, size)
            if copied < size:
                raise StorageReadError("the file became shorter", path=path, position=copied)
            fs.fsync(target)
    except DiskFullError:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(temporary)
        raise
    fs.rename(temporary, path)
    fs.sync_dir(os.path.dirname(path))


def _copy_tail(fs: FS, segment: ActiveSegment, position: int) -> str:
    """Copies what is about to be cut to a file beside the segment, durably."""
    numbers = itertools.count()
    path = ""
    while not path or fs.exists(path):  # what an earlier recovery put aside is kept
        path = os.path.join(segment.directory, quarantine_name(segment.base_offset, position, next(numbers)))
    try:
        with opened(fs, path, write=True, create=True, exclusive=True) as handle:
            copy_range(fs, segment.handle, handle, position, segment.size_bytes)
            fs.fsync(handle)
    except DiskFullError:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)  # each try to open the log would leave another one
        raise
    fs.sync_dir(os.path.dirname(path))
    return path
