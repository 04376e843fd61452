"""From a directory to a log that may be written: finds the files, repairs what a crash left, and reports what the log
holds.

Rules:
- Nothing is served that is not on disk, and nothing is cut that was on disk; recovery.py decides which is which.
- What notes and small files say of records that a crash took is removed, for later records will have their offsets.
- The log is not half open at any time: open_partition() returns all of it, or raises and leaves what the next opening
  needs.

Steps: finish compactions, find the segments, read the notes, recover the end, remove leftovers, bring indexes, seals,
snapshots and leader epochs in step with what is left. This module takes no lock and starts no writing; log.py does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import NamedTuple

import attrs

from logcore import checkpoint
from logcore.checkpoint import Key, Notes, OffsetCheckpoints
from logcore.config import Durability, LogConfig
from logcore.errors import CorruptBatchError, CorruptLogError, DiskFullError, InvalidRecordError, ResourceError
from logcore.fs import FS
from logcore.names import (
    CLEANED,
    INDEXES,
    LOG,
    SEAL,
    SEGMENT_FILES,
    SNAPSHOT,
    SWAP,
    base_offset_of,
    bases_in,
    file_name,
)
from logcore.notices import WARNING, tell
from logcore.partition import epochs, gaps, order, recovery, seals, transactions
from logcore.partition.noted import begin
from logcore.partition.producerstate import remove_snapshots_above
from logcore.partition.scan import batch_around
from logcore.partition.segmentfiles import SegmentFiles, list_names, segments_gone
from logcore.partition.transactions import Transactions
from logcore.segment import ActiveSegment, Segment


@attrs.frozen(kw_only=True)
class Place:
    """Which partition is opened, and how.

    path: of its directory, which lies in the log directory parent. is_clean: whether nothing in parent needs checking.
    keeps_damage: open a damaged log too. is_shared: other processes may have the log open, and do nothing in it until
    this is over. believed_end: up to there they have left it in order; None to look as after a crash.
    """

    fs: FS
    parent: str
    path: str
    key: Key
    checkpoints: OffsetCheckpoints
    config: LogConfig
    durability: Durability
    is_clean: bool
    keeps_damage: bool
    is_replicated: bool
    is_shared: bool = False
    believed_end: int | None = None

    def checkpointed(self, name: str) -> int:
        """The partition's entry in a file that all partitions of the directory share; 0 when there is none."""
        return self.checkpoints.get(name, self.key) or 0


class Opened(NamedTuple):
    """A log as opening has left it.

    segments: oldest first; the last is active. end: the log end offset; all below it is on disk. visible: the high
    watermark. recovery_point: as it is noted, at most the end. notes: as the last writer left them. own_notes: those of
    this writer, which replace them before it writes. left_below: base offsets below the log start, of which a crash in
    a deletion left files. lost: the damage behind which nothing whole follows, so that no append is possible; else
    None.
    """

    segments: list[Segment]
    active: ActiveSegment
    files: SegmentFiles
    log_start: int
    end: int
    visible: int
    recovery_point: int
    epochs: list[epochs.Entry]
    notes: Notes
    own_notes: Notes
    gaps: gaps.Noted
    left_below: list[int]
    report: recovery.RecoveryReport
    lost: recovery.Damage | None

    @property
    def is_damaged_at_its_end(self) -> bool:
        """Whether the active segment is damaged, so that no byte may be added to it."""
        return any(one.path == self.active.path for one in self.report.damage)


def open_partition(place: Place) -> Opened:
    """Opens the partition at a place for writing; the caller holds the lock of its log directory.

    Raises CorruptLogError, StorageReadError, StorageWriteError, DiskFullError, ResourceError.
    """
    fs = place.fs
    # 1. Finish compactions: after this the segments in the directory are the log's.
    names = sorted(list_names(fs, place.path))
    if any(name.endswith(SWAP) for name in names):
        recovery.finish_swaps(fs, place.path)
        names = sorted(list_names(fs, place.path))
    if checkpoint.TURN in names and not place.is_shared:
        fs.unlink(os.path.join(place.path, checkpoint.TURN))  # a writer that is alone leaves no notes in it
    # 2. Find the segments and the notes. Where other processes have left the log in order, all up to their end is
    # believed, as what lies below a recovery point.
    noted_point = place.checkpointed(checkpoint.RECOVERY_POINT)
    if place.believed_end is None:
        recovery_point = noted_point
    else:
        recovery_point = place.believed_end
    found = _find(place, names, recovery_point)
    notes = checkpoint.read_notes(fs, place.path)
    # Kafka, which may have written since, does not touch our notes, but leaves a snapshot at each roll and close.
    has_producers = not found.is_new and (notes.producers or any(name.endswith(SNAPSHOT) for name in names))
    is_sure = place.is_clean or place.believed_end is not None
    if found.is_new or not is_sure or notes.policy is None:
        # A killed writer may have made files and directories and not their names durable, and Kafka does not always.
        fs.sync_dir(place.path)
        fs.sync_dir(place.parent)
    # 3. Recover the end.
    report = _recover(place, found, names, notes, recovery_point, has_producers)
    if report.cut_position is not None or report.damage:
        tell("recovery", WARNING, "%s", report)
    # 4. Remove leftovers. In a shared log .cleaned files may be the work of another process that is compacting.
    if place.believed_end is None:
        found.files.remove_leftovers([name for name in names if not (place.is_shared and name.endswith(CLEANED))])
    if recovery.FAILED_SYNC in names:
        fs.unlink(os.path.join(place.path, recovery.FAILED_SYNC))  # all that is kept was brought to the disk
    # Where damage is kept and nothing whole follows it, offsets up to the recovery point were given out all the same.
    lost = next((one for one in report.damage if one.next_offset is None), None)
    least_end = 0
    if lost is not None:
        least_end = recovery_point
    end = _end_of(place, found, least_end)
    # 5. Bring in step with what is left: indexes, seals, snapshots, and below the leader epochs.
    has_producers |= found.active.has_producers or found.active.has_markers
    _write_active_indexes(place, found, end, was_cut=report.cut_position is not None)
    dense_from = 0
    if not found.is_new:
        dense_from = notes.dense_from
    # Kafka removes SEALS_HOLD when it loads the partition. Then seals count only once those of other files are removed.
    has_seals = checkpoint.SEALS_HOLD in names
    if 0 < dense_from < order.NEVER and not has_seals:
        has_seals = seals.drop_stale(fs, place.path, found.segments[:-1])
    noted_gaps = gaps.Noted.of(dense_from, place.checkpointed(checkpoint.CLEANER), has_seals)
    remove_snapshots_above(fs, place.path, end)
    return Opened(
        segments=found.segments,
        active=found.active,
        files=found.files,
        log_start=found.log_start,
        end=end,
        visible=_high_watermark(place, found, notes, end),
        recovery_point=min(noted_point, end),
        epochs=_epochs_below(place, found, end),
        notes=notes,
        own_notes=Notes(place.durability, dense_from, has_producers, place.is_replicated),
        gaps=noted_gaps,
        left_below=found.left_below,
        report=report,
        lost=lost,
    )


class _Found(NamedTuple):
    """The segments of a partition, as files. is_new: there were none, and the first was made."""

    segments: list[Segment]  # recovery replaces those whose indexes it rebuilds
    active: ActiveSegment
    files: SegmentFiles
    log_start: int
    left_below: list[int]
    is_new: bool


def _find(place: Place, names: Sequence[str], recovery_point: int) -> _Found:
    """Opens the segments of the log, or makes the first. Raises CorruptLogError when there should be some."""
    fs = place.fs
    bases = bases_in(names)
    log_start = place.checkpointed(checkpoint.LOG_START)
    is_new = not bases
    if is_new:
        if recovery_point > log_start:  # records were on disk, and none were deleted: this is no new partition
            raise segments_gone(place.path, recovery_point)
        bases = [log_start]
    # A crash in the middle of a deletion may keep any of the names below the start, with gaps between them.
    bases = bases[max(0, bisect_right(bases, log_start) - 1) :]
    if bases[0] > log_start:
        log_start = begin(fs, place.path, bases[0])
    # Files below the log start are left to the next retention: the checkpoint that calls them deleted may have come
    # with other files.
    low = file_name(bases[0], "")
    kinds = (*SEGMENT_FILES, SNAPSHOT)
    below = {base_offset_of(name, kind) for name in names if name[:20] < low for kind in kinds}
    active = ActiveSegment(fs, place.path, bases[-1], place.config, create=is_new)
    return _Found(
        segments=[*(Segment(fs, place.path, base) for base in bases[:-1]), active],
        active=active,
        files=SegmentFiles(fs, place.path),
        log_start=log_start,
        left_below=sorted(base for base in below if base is not None),
        is_new=is_new,
    )


def _recover(
    place: Place, found: _Found, names: Sequence[str], notes: Notes, recovery_point: int, has_producers: bool
) -> recovery.RecoveryReport:
    # After a crash the front of an index is good, and saves the walk over its batches. Of producers and transactions it
    # says nothing: where there are any, all heads of the segment are walked.
    indexes: recovery.IndexState = "fronts"
    if place.is_clean:
        indexes = "whole"
    elif has_producers:
        indexes = "none"
    successor = _successor(place, found.active, names)
    try:
        return _recover_once(place, found, notes, successor, recovery_point, indexes)
    except DiskFullError:  # leftovers may hold the room that recovery needs
        if not found.files.remove_leftovers(names):
            raise
        return _recover_once(place, found, notes, successor, recovery_point, indexes)


def _recover_once(
    place: Place,
    found: _Found,
    notes: Notes,
    successor: int | None,
    recovery_point: int,
    indexes: recovery.IndexState,
) -> recovery.RecoveryReport:
    """Checks what may not be on disk, and cuts the end of the active segment to what is whole.

    successor: of the active segment, when there has to be one. Raises CorruptLogError, unless damage is kept.
    """
    fs = place.fs
    active = found.active
    cleaned_to = place.checkpointed(checkpoint.CLEANER)
    dense_from = gaps.Noted.of(notes.dense_from, cleaned_to, has_seals=False).dense_from
    damage = recovery.check_front(found.segments, found.log_start, keeps_damage=place.keeps_damage)
    damage += recovery.check_sealed(fs, found.segments, recovery_point=recovery_point, keeps_damage=place.keeps_damage)
    try:
        report = recovery.recover(
            fs,
            active,
            recovery_point=recovery_point,
            policy=notes.policy,
            dense_from=dense_from,
            indexes=indexes,
        )
        # Inside the try: where damage is kept, this is damage too, and the log opens without what is gone.
        if successor is not None:
            raise CorruptLogError(
                "the last segment was sealed, but the one that followed is gone",
                path=active.path,
                position=active.size_bytes,
                expected=file_name(successor, LOG),
                found="no such file",
            )
    except CorruptLogError as error:
        if not place.keeps_damage:
            raise
        report = recovery.look_past(active, error, recovery_point)
    # After a crash these indexes may disagree with their batches, and once the recovery point has moved nothing
    # would check them again.
    if indexes != "whole":
        _index_unsynced(place, found.segments, recovery_point, {one.path for one in damage})
    return attrs.evolve(report, damage=(*damage, *report.damage))


def _successor(place: Place, last: ActiveSegment, names: Sequence[str]) -> int | None:
    """The base offset of the segment that followed the last one, by its seal. A seal of another file is removed, before
    the file changes.
    """
    if file_name(last.base_offset, SEAL) in names:
        seal = seals.read(place.fs, place.path, last.base_offset)
        # A seal is removed before its successor is, so one that fits tells that the successor was lost.
        if seal is not None and seal.is_of(last.size_bytes, place.fs.modified_ms(last.path)):
            return seal.next_base_offset
        place.fs.unlink(last.file(SEAL))
    return None


def _index_unsynced(place: Place, segments: list[Segment], recovery_point: int, damaged: Container[str]) -> None:
    """Rebuilds the indexes of sealed segments above the recovery point.

    After a crash of Kafka they may disagree with the batches, and nothing would check them again: the recovery point is
    about to advance, and a clean close would mark the directory as sound.
    """
    fs = place.fs
    found: Transactions | None = None
    for slot, (segment, following) in enumerate(itertools.pairwise(segments)):
        end = following.base_offset
        if end <= recovery_point or segment.path in damaged:
            continue
        rebuilt = ActiveSegment(fs, place.path, segment.base_offset, place.config, create=False)
        try:
            # A segment damaged below the recovery point keeps its indexes: they may lead past the damage.
            if not recovery.rebuild_sound(rebuilt, end):
                continue
            # The whole log is walked once, and only if a marker was found.
            if rebuilt.has_markers and found is None:
                found = transactions.walked(segments)
            if found is None:
                rebuilt.set_aborted(())
            else:
                rebuilt.set_aborted(found.entries_between(rebuilt.base_offset, end))
            segments[slot] = rebuilt.seal()
        except (CorruptBatchError, InvalidRecordError):  # which transactions were aborted cannot be determined
            continue
        except (DiskFullError, ResourceError):  # Kafka rebuilds indexes that do not exist
            for suffix in INDEXES:
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(segment.file(suffix))
            segments[slot] = Segment(fs, place.path, segment.base_offset)
        fs.sync_dir(place.path)  # removed names are gone before the recovery point advances


def _end_of(place: Place, found: _Found, least: int) -> int:
    """The log end offset, at least what is known to have been given out."""
    end = max(found.active.last_offset + 1, found.active.base_offset, least)
    if found.log_start > end:
        raise CorruptLogError(
            "the log ends below its start offset",
            path=place.path,
            expected=f"at least {found.log_start}",
            found=end,
        )
    return end


def _write_active_indexes(place: Place, found: _Found, end: int, *, was_cut: bool) -> None:
    """Brings the indexes of the active segment in step with what recovery has left of it."""
    active = found.active
    if active.is_resumed and not active.resume_aborted(end, is_whole=place.is_clean):
        recovery.rebuild(active)  # the other indexes say nothing of markers
    if not active.is_resumed:
        transactions.index_aborted(active, found.segments)
    # A log opens on a full disk too, so that something can be deleted from it; close() tries again. Entries that a file
    # has beyond these may stay after a clean close, but not after a cut: they would be wrong about the next batches.
    with contextlib.suppress(DiskFullError, ResourceError):
        active.write_indexes(whole=True, keeps_rest=place.is_clean and not was_cut)


def _high_watermark(place: Place, found: _Found, notes: Notes, end: int) -> int:
    """Where the high watermark begins: at the end for a log without copies, of which all was shown. Else where it was,
    as far as is known: what a killed writer has shown must stay visible.
    """
    # Also for a log that this library wrote without copies until now.
    if not place.is_replicated or (notes.policy is not None and not notes.replicated):
        return end
    noted = place.checkpointed(checkpoint.HIGH_WATERMARK)
    shown = checkpoint.read_shown_end(place.fs, place.path)
    if shown is not None and shown.is_replicated:
        noted = max(noted, shown.offset)
    if noted <= found.log_start:
        # What was deleted lay below it, and it is where a batch ends.
        _, noted = batch_around(found.segments, found.log_start)
    return min(end, noted)


def _epochs_below(place: Place, found: _Found, end: int) -> list[epochs.Entry]:
    """The leader epochs of what is left. An entry above the end would apply to later records once they get there."""
    known = checkpoint.read_epochs(place.fs, place.path)
    # Without a file, or with none that can be understood, the batches say which leader wrote them.
    cut = epochs.cut_end(known, end) or epochs.walked(found.segments, found.log_start)
    kept = epochs.truncate_start(cut, found.log_start)
    if cut != known or len(kept) != len(cut):
        checkpoint.write_epochs(place.fs, place.path, kept, reserve=place.parent)
    return kept
