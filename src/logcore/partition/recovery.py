"""Recovery of the end of a log after a crash: collect facts, decide, act.

Rules (docs/format.md, "Checks at opening"):
- Damage below the recovery point is damage to durable data. It is an error, and
  recovery never truncates there.
- A torn tail above the recovery point is the normal result of a crash. Recovery
  truncates it after the last valid batch and reports it. The removed bytes are first
  copied to a file beside the segment, unless they are all zeros.
- A failing disk is not damage: a read error ends the opening and changes nothing.
- All kept data is synced before it is served, because a killed process leaves data that
  is only in the page cache.
- Durable data is not read again. The indexes give its end, and the batch that they
  point to must confirm it.

`decide` is a pure function of TailFacts for the end of the active segment. Sealed segments
above the recovery point are checked by check_sealed(). Below it, they were synced when
they were sealed, and are trusted until they are read.
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
from logcore.errors import (
    CorruptLogError,
    DiskFullError,
    LogcoreError,
    StorageReadError,
    StorageWriteError,
)
from logcore.fs import FS, copy_range, opened
from logcore.kernels import kernel, layout
from logcore.metadata.filenames import (
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
from logcore.partition.gaps import missing_start_error
from logcore.partition.order import OrderFault, end_of, first_fault, in_order, reach
from logcore.segment import ActiveSegment, Segment

#: State of the index files: complete, possibly truncated by a crash, or unusable.
IndexState = Literal["whole", "fronts", "none"]

#: A file that exists from a failed sync until a later opening has rewritten the log.
FAILED_SYNC: Final = "logcore.unsynced"
#: How far after damage recovery searches for a valid batch, and the size of one read.
_SEARCH_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20


class Action(enum.Enum):
    """The possible actions on the tail of the active segment."""

    KEEP = "keep"
    CUT = "cut"
    QUARANTINE_AND_CUT = "quarantine and cut"
    FAIL = "fail"


class TailFacts(NamedTuple):
    """The state of the active segment after its last valid batch."""

    #: The position of the first invalid byte, or None if all batches are valid.
    bad_position: int | None
    #: All bytes below this position were durable.
    recovery_position: int
    #: Whether only zero bytes follow.
    only_zeros: bool
    #: The distance to a later valid batch in order, or None if none was found.
    next_batch_bytes: int | None
    #: The durability policy of the last writer.
    policy: Durability


def decide(facts: TailFacts) -> Action:
    """Return the action for the tail of the active segment, by a decision table."""
    if facts.bad_position is None:
        return Action.KEEP
    if facts.bad_position < facts.recovery_position:
        return Action.FAIL
    # The file grew before its data was written. It contains no record to copy.
    if facts.only_zeros:
        return Action.CUT
    if facts.next_batch_bytes is None:
        return Action.QUARANTINE_AND_CUT
    # A later batch reached the disk and this one did not. A crash can cause that under
    # a policy in which several batches wait for one sync. If two unsynced batches
    # cannot be that far apart, acknowledged data was damaged.
    if facts.policy.kind == "always" or (
        facts.policy.kind == "group" and facts.next_batch_bytes > facts.policy.max_bytes
    ):
        return Action.FAIL
    return Action.QUARANTINE_AND_CUT


@attrs.frozen
class Damage:
    """Durable data that is lost, in a log opened with on_corruption="quarantine".

    Reading offsets from `first_offset` up to `next_offset` raises CorruptBatchError or
    CorruptLogError. The log continues at `next_offset`.
    """

    #: The damaged file.
    path: str
    #: The position of the damage in the file.
    position: int
    first_offset: int
    #: None if no valid batch follows. Such a log accepts no appends.
    next_offset: int | None
    reason: str

    def __str__(self) -> str:
        end = "on"
        if self.next_offset is not None:
            end = f"to {self.next_offset - 1}"
        return (
            f"{self.path}: damaged at position {self.position}, "
            f"offsets from {self.first_offset} {end} ({self.reason})"
        )


@attrs.frozen
class RecoveryReport:
    """The findings and actions of recovery.

    Offsets are offsets of the log. Sizes and positions are bytes of the file at `path`.
    """

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
            return f"{self.path}: {self.checked_bytes} bytes checked, nothing truncated"
        kept = ""
        if self.quarantine_path:
            kept = f", copied to {self.quarantine_path}"
        return f"{self.path}: truncated {self.cut_bytes} bytes at position {self.cut_position} ({self.reason}){kept}"


def recover(
    fs: FS,
    segment: ActiveSegment,
    *,
    recovery_point: int,
    policy: Durability | None,
    dense_from: int,
    indexes: IndexState,
) -> RecoveryReport:
    """Check the active segment and repair its tail.

    Batch headers are checked from an index entry below the recovery point, and CRCs
    from the recovery point. Afterwards the file ends with a valid batch, its indexes
    are correct in memory, and all of the file is durable.

    `policy` is the durability policy of the last writer; None if Kafka wrote the log.
    `dense_from` is the offset from which the log has no gaps. Kafka may leave gaps (in
    a follower, or after a truncation inside a batch), and so does compaction. Appends
    of this library leave none. `indexes` is the state of the index files. With "none",
    all headers are read, and the producers and markers are taken from them.

    Raises:
        CorruptLogError: a crash cannot have caused the damage. The files are
            unchanged, and index_valid_batches() can continue from there.
        StorageReadError, StorageWriteError: the disk failed.
    """
    # 1. All data below the recovery point was durable. Find its end from the headers,
    # starting at the last index entry below the point.
    size = segment.refresh()
    segment.reset(is_synced=indexes == "whole")
    start = 0
    if indexes != "none":
        start = segment.resume(recovery_point, is_whole=indexes == "whole")
    below, recovery_position = _walk_to(
        segment, start, recovery_point, dense_from <= segment.base_offset
    )
    # 2. Sync the data above that before reading it: a kept batch must be on disk, and
    # not only in memory.
    is_on_disk = size <= recovery_position or _sync_and_reread(
        fs, segment, recovery_position
    )
    # 3. Index both parts up to the first invalid batch. Above the point, check the
    # CRCs.
    bad = next(
        (at for facts in below if (at := _index_batches(segment, facts)) is not None),
        None,
    )
    why = layout.WALK_COUNT
    if bad is None:
        bad, why = _index_valid_batches(
            segment, recovery_position, size, crc=True, dense_from=dense_from
        )
    end_offset = segment.last_offset + 1
    if bad is None and end_offset >= recovery_point:
        if not is_on_disk:
            _rewrite_start(fs, segment, size)
        return RecoveryReport(segment.path, size - recovery_position)
    # 4. Handle an error: an invalid batch, or valid batches that end below the recovery
    # point, so that some are missing.
    if bad is None:
        bad = size
        why = layout.WALK_SHORT
    reason = layout.WALK_REASONS[why]
    if bad == recovery_position:
        # The last batch below the point: as read, or the one that resume() ended with.
        last = next(
            (int(facts["position"][-1]) for facts in reversed(below) if len(facts)),
            None,
        )
        if last is None:
            last = start - segment.since_entry_bytes
        _check_before(segment, last)
    only_zeros, next_batch_bytes = search_after_damage(segment, bad, end_offset)
    # An end below the recovery point is damage, because durable data is missing. A
    # recovery position after the end of the file makes decide() return FAIL.
    if end_offset >= recovery_point:
        known = recovery_position
    else:
        known = size + 1
    # Kafka stores no policy and syncs rarely: many batches may have waited for one
    # sync.
    action = decide(
        TailFacts(bad, known, only_zeros, next_batch_bytes, policy or Durability("os"))
    )
    if action is Action.FAIL:
        expected = None
        found = None
        if end_offset < recovery_point:
            expected = f"whole batches up to offset {recovery_point}"
            found = f"an end at offset {end_offset}"
        raise CorruptLogError(
            f"{reason}, but these bytes were synced earlier, so they are damaged, and not cut off by a crash. "
            "Restore the file, or open with read_only=True to read the intact records",
            path=segment.path,
            position=bad,
            offset=end_offset,
            expected=expected,
            found=found,
        )
    # 5. Copy the tail durably before it is truncated.
    quarantine = None
    if action is Action.QUARANTINE_AND_CUT:
        quarantine = _copy_tail(fs, segment, bad)
    if is_on_disk:
        segment.cut(bad)
    else:
        _rewrite_start(fs, segment, bad)
    return RecoveryReport(
        segment.path, size - recovery_position, bad, size - bad, reason, quarantine
    )


def _check_before(segment: ActiveSegment, position: int) -> None:
    """Check that the last batch below the recovery point is valid.

    If the damage is in the length of that batch, which only its header contains, then
    an apparently torn tail may be a part of the batch.

    Raises:
        CorruptLogError: the batch is not valid.
    """
    if position < 0 or segment.last_offset < segment.base_offset:
        return  # there is no batch before the tail
    facts, _, why = kernel.walk(*segment.head(position), 1, True)
    if not len(facts):
        # Its header may still be readable. It then gives the first lost offset.
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


def index_valid_batches(
    segment: ActiveSegment, error: CorruptLogError, recovery_point: int
) -> RecoveryReport:
    """Index the valid batches after damage that recover() found.

    Continues as far as the lengths in damaged headers lead to valid batches.
    """
    # The file is kept as it is, so it must not be in memory only. Rewriting it either
    # brings it to the disk or fails.
    if _has_failed_sync(segment):
        _rewrite(segment.fs, segment.path, segment.size_bytes)
        segment.reopen()
    bad = error.position
    assert bad is not None, "recover() reports the position of the damage"
    first_offset = segment.last_offset + 1
    next_offset = None
    if error.offset is not None:  # the damaged batch itself may have been indexed
        first_offset = min(first_offset, max(error.offset, segment.base_offset))
    at = bad
    while at < segment.size_bytes:
        # Skip one damaged batch by the length in its header. Continue while valid
        # batches follow each other.
        facts, _, _ = kernel.walk(*segment.head(at), 1, False)
        next_offset = None
        if not len(facts):
            break
        at += int(facts["size_bytes"][0])
        for facts, position, _ in segment.walk(at, crc=True):
            unindexed_position = _index_batches(segment, facts)
            if len(facts) and unindexed_position != at and next_offset is None:
                next_offset = int(facts["base_offset"][0])
            if unindexed_position is not None:
                at = unindexed_position
                break
            at = position
    if segment.last_offset + 1 < recovery_point:
        next_offset = None  # the log was longer than this, so its end is unknown
    damage = Damage(
        segment.path, bad, first_offset, next_offset, error.reason.partition(", but")[0]
    )
    return RecoveryReport(segment.path, segment.size_bytes - bad, damage=(damage,))


def record_failed_sync(fs: FS, directory: str) -> None:
    """Create a file that warns the next opening about a failed sync.

    The page cache may then differ from the disk. Creating the file is best effort,
    because the disk is failing. The file is not synced: it only matters as long as the
    page cache exists.
    """
    with contextlib.suppress(LogcoreError, OSError):
        fs.close(fs.open(os.path.join(directory, FAILED_SYNC), write=True, create=True))


def _has_failed_sync(segment: Segment) -> bool:
    return segment.fs.exists(os.path.join(segment.directory, FAILED_SYNC))


def _sync_and_reread(fs: FS, segment: Segment, position: int) -> bool:
    """Sync a segment, and return whether reads from `position` on come from the disk.

    After a failed sync, the page cache contains data that the disk does not have, but
    the system treats it as clean (ext4, xfs, btrfs): another sync succeeds without
    writing it. If such a failure was recorded, the data may exist only in memory, so
    the cache is kept. Otherwise the system is asked to drop its cache and to read from
    the disk. That also finds failures that no process survived to record.
    """
    if _has_failed_sync(segment):
        return False
    with opened(fs, segment.path) as handle:
        try:
            fs.fsync(handle)
            return fs.drop_cache(handle, position)
        except StorageWriteError:
            record_failed_sync(fs, segment.directory)
            raise


def check_start(
    segments: Sequence[Segment], log_start: int, *, keeps_damage: bool = False
) -> tuple[Damage, ...]:
    """Check that the first segment contains the log start, and return the damage.

    A deletion at the front stores the new log start before it deletes segments. A later
    first segment therefore means that segments were lost.

    Raises:
        CorruptLogError: segments are missing, unless keeps_damage=True.
    """
    first = segments[0]
    if first.base_offset <= log_start:
        return ()
    damage = Damage(
        first.path,
        0,
        log_start,
        first.base_offset,
        "the segments before this one are missing",
    )
    if not keeps_damage:
        raise missing_start_error(first, log_start)
    return (damage,)


def check_sealed(
    fs: FS,
    segments: Sequence[Segment],
    *,
    recovery_point: int,
    keeps_damage: bool = False,
) -> tuple[Damage, ...]:
    """Sync the sealed segments that reach above the recovery point, and check them.

    The check starts at the recovery point. When this library seals a segment, it syncs
    the segment. The recovery point moves to its end then, or in a log directory at the
    next tick(). After a clean shutdown there are no such segments. They come from a crash
    before that, from Kafka, or from a lost checkpoint. Returns the damage.

    Raises:
        CorruptLogError: there is damage, unless keeps_damage=True. A crash cannot
            damage data before a later segment.
    """
    damaged: list[Damage] = []
    for segment, following in itertools.pairwise(segments):
        end = following.base_offset
        if end <= recovery_point:
            continue
        # After a failed sync, the system may treat pages as clean that never reached
        # the disk. Rewriting the file brings them to the disk, or fails.
        if _has_failed_sync(segment):
            _rewrite(fs, segment.path, fs.file_size(segment.path))
        start = segment.start_position(recovery_point)
        _sync_and_reread(fs, segment, start)
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
    """Return the first damage in a sealed segment that must end below `end`."""
    expected = segment.base_offset
    for facts, position, why in segment.walk(start, crc=True):
        count = in_order(facts, expected, end)
        expected = end_of(facts[:count], expected)
        if count < len(facts):
            return Damage(
                segment.path,
                int(facts["position"][count]),
                expected,
                end,
                layout.WALK_REASONS[layout.WALK_COUNT],
            )
        if why not in (layout.WALK_END, layout.WALK_LIMIT):
            return Damage(
                segment.path, position, expected, end, layout.WALK_REASONS[why]
            )
    return None


class SwapAction(enum.Enum):
    """The possible actions on an interrupted compaction."""

    FINISH = "finish"
    DISCARD = "discard"
    FAIL = "fail"


class SwapFacts(NamedTuple):
    """A `<base>.log.swap` file, which replaces segments from its base to its end."""

    #: Whether all of its batches are valid.
    is_whole: bool
    #: Whether some of its files are still named .cleaned: the renames did not finish.
    was_begun: bool
    #: Whether the first of the replaced segments was already removed from the log.
    has_retired: bool


def decide_swap(facts: SwapFacts) -> SwapAction:
    """Return the action for a compaction that a crash interrupted, by a decision table.

    See section 7, phase 1, of the storage format. The old segments are removed only
    when all files of the new one are durable under their .swap names.
    """
    if facts.was_begun:
        if facts.has_retired:  # no order of our own steps leaves this state
            return SwapAction.FAIL
        return SwapAction.DISCARD
    if facts.is_whole:
        return SwapAction.FINISH
    if facts.has_retired:  # the new segment is damaged, and old ones may be deleted
        return SwapAction.FAIL
    return SwapAction.DISCARD


def finish_swaps(fs: FS, directory: str) -> None:
    """Complete or undo compactions that a crash interrupted.

    Afterwards, either all of the old segments or all of the new ones exist.

    Raises:
        CorruptLogError: neither are complete. All files are unchanged.
    """
    # 1. Decide for every compaction before anything is changed, so that an error leaves
    # all files unchanged.
    names = fs.listdir(directory)
    cleaned = [base for name in names if (base := _base_of(name, CLEANED)) is not None]
    plans: list[tuple[int, int, SwapAction]] = []  # (base offset, end offset, action)
    for base in sorted(
        base for name in names if (base := base_offset_of(name, LOG + SWAP)) is not None
    ):
        new = Segment(fs, directory, base, SWAP)
        end = base + 1
        is_whole = True
        for facts, _, why in new.walk(0, crc=True):
            if len(facts):
                end = int(facts["last_offset"][-1]) + 1
            is_whole = why in (layout.WALK_END, layout.WALK_LIMIT)
        has_retired = file_name(base, LOG) not in names
        # Kafka may split a segment, so a .cleaned file at or below this one means that
        # not all files were renamed.
        was_begun = any(base >= offset for offset in cleaned)
        action = decide_swap(SwapFacts(is_whole, was_begun, has_retired))
        if action is SwapAction.FAIL:
            raise CorruptLogError(
                "an interrupted compaction left neither the old segments nor a whole new one",
                path=new.path,
            )
        plans.append((base, end, action))
    # A crash may keep any of the first renames: of an index, and not of its .log file.
    begun = {
        base
        for name in names
        if (base := base_offset_of(name, LOG + CLEANED)) is not None
    }
    plans += [
        (base, base, SwapAction.DISCARD)
        for base in begun - {base for base, _, _ in plans}
    ]
    # 2. Make the .swap names durable before the old segments are deleted. The process
    # that created them may have died or failed before it synced them.
    fs.sync_dir(directory)
    for base, end, action in plans:
        if action is SwapAction.DISCARD:
            for name in names:
                if _base_of(name, SWAP) == base:
                    fs.unlink(os.path.join(directory, name))
            continue
        for name in names:
            file = parse_file_name(name)
            is_old = (
                file is not None and not file.state and base <= file.base_offset < end
            )
            # The snapshot at the base describes earlier records, and remains valid.
            if is_old and name != file_name(base, SNAPSHOT):
                fs.unlink(os.path.join(directory, name))
    # 3. Delete the old names durably before the new segments take their names, so that
    # no offset is ever in two segments.
    fs.sync_dir(directory)
    for name in fs.listdir(directory):
        target = os.path.join(directory, name.removesuffix(SWAP))
        if name.endswith(SWAP) and not fs.exists(target):
            fs.rename(os.path.join(directory, name), target)
        elif name.endswith(SWAP):
            fs.unlink(os.path.join(directory, name))
    fs.sync_dir(directory)


def _base_of(name: str, state: str) -> int | None:
    """Return the base offset of a segment file in a state; None for other files."""
    file = parse_file_name(name)
    if file is None or file.state != state or file.suffix not in SEGMENT_FILES:
        return None
    return file.base_offset


def rebuild(segment: ActiveSegment) -> None:
    """Rebuild the indexes of a segment whose batches are all valid."""
    segment.reset()
    for facts, _, _ in segment.walk(0, crc=False):
        segment.record_all_batches(facts)


def rebuild_indexes(segment: ActiveSegment, end: int) -> bool:
    """Rebuild the indexes of a sealed segment.

    Returns whether all batches are valid and below the offset `end`.
    """
    segment.reset()
    for facts, _, why in segment.walk(0, crc=True):
        if _index_batches(segment, facts) is not None or why not in (
            layout.WALK_END,
            layout.WALK_LIMIT,
        ):
            return False
    return segment.last_offset < end


def _index_batches(segment: ActiveSegment, facts: layout.Facts) -> int | None:
    """Index batches while their offsets rise.

    Returns the position of the first batch whose offset does not, or None.
    """
    count = in_order(facts, segment.last_offset + 1, reach(segment.base_offset))
    segment.record_all_batches(facts[:count])
    if count < len(facts):
        return int(facts["position"][count])
    return None


def _index_valid_batches(
    segment: ActiveSegment, start: int, stop: int, *, crc: bool, dense_from: int
) -> tuple[int | None, int]:
    """Index the valid batches in [start, stop).

    Returns the position of the first invalid batch, or None, and the reason.
    """
    for facts, position, why in segment.walk(start, stop=stop, crc=crc):
        expected = segment.last_offset + 1
        count, fault = first_fault(
            facts, expected, reach(segment.base_offset), dense_from=dense_from
        )
        segment.record_all_batches(facts[:count])
        if fault is OrderFault.GAP:
            # A crash never leaves a gap before a valid batch. The offset in the header,
            # which no CRC covers, is therefore damaged.
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


def _walk_to(
    segment: ActiveSegment, start: int, recovery_point: int, dense: bool
) -> tuple[list[layout.Facts], int]:
    """Return the headers from `start` to the recovery point, and its position.

    All data before the position was durable. The segment has already indexed its
    batches up to `start`. If the batches follow each other up to the recovery point,
    the position is where they reach it; a torn header after it changes nothing.
    Otherwise the position is the end of the last complete batch that begins below the
    point. A damaged offset that is too high then hides none of those batches.
    """
    found = start
    base = segment.base_offset
    expected = segment.last_offset + 1
    walked: list[layout.Facts] = []
    if dense and recovery_point <= expected:
        return walked, start
    # From an index entry, the distance is short. Small reads suffice, because the data
    # after it is read from the disk once more.
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
            # Equality is required: the point is the end of an append, so a header that
            # reaches beyond it is damaged.
            reached = np.flatnonzero(lasts[:count] + 1 == recovery_point)
            if len(reached):
                found = int(
                    facts["position"][reached[0]] + facts["size_bytes"][reached[0]]
                )
                break
            dense = count == len(facts) and int(lasts[-1]) + 1 < recovery_point
            expected = int(lasts[-1]) + 1
        below = np.flatnonzero((bases >= base) & (bases < recovery_point))
        if len(below):
            last = facts[below[-1]]
            found = int(last["position"] + last["size_bytes"])
    return [facts[facts["position"] < found] for facts in walked], found


def search_after_damage(
    segment: ActiveSegment, position: int, expected: int
) -> tuple[bool, int | None]:
    """Search for valid data after damage.

    Returns whether only zeros follow, and the distance to a later valid batch that
    continues the log, or None.
    """
    only_zeros = True
    end = segment.size_bytes
    at = position
    while at < end:
        chunk = segment.fs.pread(segment.handle, min(_CHUNK_BYTES, end - at), at)
        # No data: the file was shortened concurrently, and ends here.
        if not chunk or chunk.count(0) != len(chunk):
            only_zeros = not chunk
            break
        at += len(chunk)
    if only_zeros:
        return True, None
    # Follow the lengths in the headers, which damage inside a batch does not change.
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


def _rewrite_start(fs: FS, segment: ActiveSegment, size: int) -> None:
    """Reduce the segment to its first `size` bytes, durably, in a new file.

    The new file takes the name of the old one, whatever the old one has on disk. If
    there is no room for a new file, the old file is truncated and synced instead.
    """
    try:
        _rewrite(fs, segment.path, size)
    except DiskFullError:
        segment.cut(size)
        return
    segment.reopen()


def _rewrite(fs: FS, path: str, size: int) -> None:
    """Replace a file durably by a new one with its first `size` bytes.

    Raises:
        DiskFullError: there is no room for the new file. The old one is unchanged.
    """
    temporary = path + ".tmp"
    try:
        with (
            opened(fs, path) as source,
            opened(fs, temporary, write=True, create=True) as target,
        ):
            fs.truncate(target, 0)
            copied = copy_range(fs, source, target, 0, size)
            if copied < size:
                raise StorageReadError(
                    "the file became shorter", path=path, position=copied
                )
            fs.fsync(target)
    except DiskFullError:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(temporary)
        raise
    fs.rename(temporary, path)
    fs.sync_dir(os.path.dirname(path))


def _copy_tail(fs: FS, segment: ActiveSegment, position: int) -> str:
    """Copy the bytes that are about to be truncated to a new file, durably.

    The file is beside the segment. Returns its path.
    """
    numbers = itertools.count()
    path = ""
    while not path or fs.exists(path):  # keep the copies of earlier recoveries
        path = os.path.join(
            segment.directory,
            quarantine_name(segment.base_offset, position, next(numbers)),
        )
    try:
        with opened(fs, path, write=True, create=True, exclusive=True) as handle:
            copy_range(fs, segment.handle, handle, position, segment.size_bytes)
            fs.fsync(handle)
    except DiskFullError:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(path)  # otherwise each attempt to open the log would leave one
        raise
    fs.sync_dir(os.path.dirname(path))
    return path
