"""Opens a partition for writing, and repairs the damage of a crash.

open_partition() finds the files of the log and returns a description of the log.

Rules:
- All data that is served is durable, and durable data is never truncated. recovery.py
  decides which data is durable.
- If a crash removed records, the metadata and small files about them are removed too,
  because later records will have the same offsets.
- The log is never half open: open_partition() returns all of it, or raises and leaves
  the files that the next opening needs.

Steps: finish compactions, find the segments, read the metadata, recover the end, remove
leftovers, and update indexes, seals, snapshots and leader epochs to match the remaining
records. This module acquires no lock and starts no writing; log.py does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import NamedTuple

import attrs

from logcore.config import Durability, LogConfig
from logcore.errors import (
    CorruptBatchError,
    CorruptLogError,
    DiskFullError,
    InvalidRecordError,
    ResourceError,
)
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key, OffsetCheckpoints, PartitionMetadata
from logcore.metadata.filenames import (
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
from logcore.partition import (
    aborted_transactions,
    checksum_file,
    epochs,
    gaps,
    order,
    recovery,
)
from logcore.partition.aborted_transactions import PartitionTransactions
from logcore.partition.persisted import begin
from logcore.partition.producer_state import remove_snapshots_above
from logcore.partition.scan import batch_around
from logcore.partition.segment_files import (
    SegmentFiles,
    list_names,
    missing_segments_error,
)
from logcore.reporting import WARNING, log_line
from logcore.segment import ActiveSegment, Segment


@attrs.frozen(kw_only=True)
class OpenRequest:
    """Which partition to open, and how."""

    fs: FS
    #: The log directory.
    parent: str
    #: The partition's directory, in `parent`.
    path: str
    key: Key
    checkpoints: OffsetCheckpoints
    config: LogConfig
    durability: Durability
    #: Whether the log directory was closed cleanly, so that no file needs a check.
    is_clean: bool
    #: Whether to open a damaged log too.
    keeps_damage: bool
    is_replicated: bool
    #: Whether other processes may have the log open. They wait until this opening ends.
    is_shared: bool = False
    #: The end up to which other processes left the log in order; None to run recovery.
    trusted_end: int | None = None

    def checkpointed(self, name: str) -> int:
        """Return the partition's entry in a checkpoint of the log directory, or 0."""
        return self.checkpoints.get(name, self.key) or 0


class Opened(NamedTuple):
    """A log after opening."""

    #: Oldest first. The last segment is the active one.
    segments: list[Segment]
    active: ActiveSegment
    files: SegmentFiles
    log_start: int
    #: The log end offset. All records below it are durable.
    end: int
    #: The high watermark.
    visible: int
    #: The stored recovery point, but at most `end`.
    recovery_point: int
    epochs: list[epochs.Entry]
    #: The partition metadata of the last writer.
    stored_metadata: PartitionMetadata
    #: The metadata of this writer, which replaces `stored_metadata` before the first write.
    initial_metadata: PartitionMetadata
    gaps: gaps.PersistedGaps
    #: Base offsets below the log start of which an interrupted deletion left files.
    leftover_bases: list[int]
    report: recovery.RecoveryReport
    #: The damage after which no valid batch follows, so that appends are impossible;
    #: else None.
    lost: recovery.Damage | None

    @property
    def is_damaged_at_its_end(self) -> bool:
        """Whether the active segment is damaged, so that it accepts no appends."""
        return any(damage.path == self.active.path for damage in self.report.damage)


def open_partition(place: OpenRequest) -> Opened:
    """Open a partition for writing. The caller holds the lock of its log directory.

    Raises:
        CorruptLogError, StorageReadError, StorageWriteError, DiskFullError,
        ResourceError.
    """
    fs = place.fs
    # 1. Finish compactions. Afterwards, the segments in the directory form the log.
    names = sorted(list_names(fs, place.path))
    if any(name.endswith(SWAP) for name in names):
        recovery.finish_swaps(fs, place.path)
        names = sorted(list_names(fs, place.path))
    if checkpoint.LOCK_RECORD in names and not place.is_shared:
        # A writer without other processes keeps no lock record.
        fs.unlink(os.path.join(place.path, checkpoint.LOCK_RECORD))
    # 2. Find the segments and the metadata. If other processes left the log in order,
    # all data up to their end is trusted, like data below a recovery point.
    stored_recovery_point = place.checkpointed(checkpoint.RECOVERY_POINT)
    if place.trusted_end is None:
        recovery_point = stored_recovery_point
    else:
        recovery_point = place.trusted_end
    found = _find(place, names, recovery_point)
    stored_metadata = checkpoint.read_partition_metadata(fs, place.path)
    # Kafka may have written since. It does not change our metadata, but it leaves a
    # snapshot at each roll and close.
    has_producers = not found.is_new and (
        stored_metadata.producers or any(name.endswith(SNAPSHOT) for name in names)
    )
    is_sure = place.is_clean or place.trusted_end is not None
    if found.is_new or not is_sure or stored_metadata.policy is None:
        # A killed writer may have left names of files and directories that are not
        # durable, and Kafka does not always sync names.
        fs.sync_dir(place.path)
        fs.sync_dir(place.parent)
    # 3. Recover the end.
    report = _recover(
        place, found, names, stored_metadata, recovery_point, has_producers
    )
    if report.cut_position is not None or report.damage:
        log_line("recovery", WARNING, "%s", report)
    # 4. Remove leftovers. In a shared log, .cleaned files may belong to another process
    # that is compacting.
    if place.trusted_end is None:
        found.files.remove_leftovers(
            [name for name in names if not (place.is_shared and name.endswith(CLEANED))]
        )
    if recovery.FAILED_SYNC in names:
        # All remaining data has been synced.
        fs.unlink(os.path.join(place.path, recovery.FAILED_SYNC))
    # If damage is kept and no valid batch follows it, offsets up to the recovery point
    # were assigned nevertheless.
    lost = next(
        (damage for damage in report.damage if damage.next_offset is None), None
    )
    least_end = 0
    if lost is not None:
        least_end = recovery_point
    end = _end_of(place, found, least_end)
    # 5. Update indexes, seals, snapshots and (below) leader epochs to the remaining
    # records.
    has_producers |= found.active.has_producers or found.active.has_markers
    _write_active_indexes(
        place, found, end, was_truncated=report.cut_position is not None
    )
    dense_from = 0
    if not found.is_new:
        dense_from = stored_metadata.dense_from
    # Kafka removes CHECKSUMS_VALID when it loads the partition. Seals are then valid only
    # after the seals of replaced files are removed.
    has_seals = checkpoint.CHECKSUMS_VALID in names
    if 0 < dense_from < order.NEVER and not has_seals:
        has_seals = checksum_file.drop_stale_checksums(
            fs, place.path, found.segments[:-1]
        )
    read_persisted_gaps = gaps.PersistedGaps.of(
        dense_from, place.checkpointed(checkpoint.CLEANER), has_seals
    )
    remove_snapshots_above(fs, place.path, end)
    return Opened(
        segments=found.segments,
        active=found.active,
        files=found.files,
        log_start=found.log_start,
        end=end,
        visible=_high_watermark(place, found, stored_metadata, end),
        recovery_point=min(stored_recovery_point, end),
        epochs=_epochs_below(place, found, end),
        stored_metadata=stored_metadata,
        initial_metadata=PartitionMetadata(
            place.durability, dense_from, has_producers, place.is_replicated
        ),
        gaps=read_persisted_gaps,
        leftover_bases=found.leftover_bases,
        report=report,
        lost=lost,
    )


class _Found(NamedTuple):
    """The segments of a partition, as files."""

    segments: list[Segment]  # recovery replaces those whose indexes it rebuilds
    active: ActiveSegment
    files: SegmentFiles
    log_start: int
    leftover_bases: list[int]
    #: Whether there were no segments, and the first one was created.
    is_new: bool


def _find(place: OpenRequest, names: Sequence[str], recovery_point: int) -> _Found:
    """Open the segments of the log, or create the first one.

    Raises:
        CorruptLogError: there are no segments, although records existed.
    """
    fs = place.fs
    bases = bases_in(names)
    log_start = place.checkpointed(checkpoint.LOG_START)
    is_new = not bases
    if is_new:
        # Records were durable, and none were deleted: this is not a new partition.
        if recovery_point > log_start:
            raise missing_segments_error(place.path, recovery_point)
        bases = [log_start]
    # A crash during a deletion may keep any of the names below the start, with gaps.
    bases = bases[max(0, bisect_right(bases, log_start) - 1) :]
    if bases[0] > log_start:
        log_start = begin(fs, place.path, bases[0])
    # Files below the log start are left to the next retention, because the checkpoint
    # that declares them deleted may belong to other files, as after a restore.
    low = file_name(bases[0], "")
    kinds = (*SEGMENT_FILES, SNAPSHOT)
    below = {
        base_offset_of(name, kind)
        for name in names
        if name[:20] < low
        for kind in kinds
    }
    active = ActiveSegment(fs, place.path, bases[-1], place.config, create=is_new)
    return _Found(
        segments=[*(Segment(fs, place.path, base) for base in bases[:-1]), active],
        active=active,
        files=SegmentFiles(fs, place.path),
        log_start=log_start,
        leftover_bases=sorted(base for base in below if base is not None),
        is_new=is_new,
    )


def _recover(
    place: OpenRequest,
    found: _Found,
    names: Sequence[str],
    stored_metadata: PartitionMetadata,
    recovery_point: int,
    has_producers: bool,
) -> recovery.RecoveryReport:
    # After a crash, the front of an index is valid and saves reading its batches. It
    # does not cover producers and transactions. If there are any, all headers are read.
    indexes: recovery.IndexState = "fronts"
    if place.is_clean:
        indexes = "whole"
    elif has_producers:
        indexes = "none"
    successor = _successor(place, found.active, names)
    try:
        return _recover_once(
            place, found, stored_metadata, successor, recovery_point, indexes
        )
    except DiskFullError:  # leftovers may occupy the space that recovery needs
        if not found.files.remove_leftovers(names):
            raise
        return _recover_once(
            place, found, stored_metadata, successor, recovery_point, indexes
        )


def _recover_once(
    place: OpenRequest,
    found: _Found,
    stored_metadata: PartitionMetadata,
    successor: int | None,
    recovery_point: int,
    indexes: recovery.IndexState,
) -> recovery.RecoveryReport:
    """Check data that may not be durable, and truncate the active segment.

    `successor` is the base offset of the segment that must follow the active one, if
    any.

    Raises:
        CorruptLogError: there is damage, unless damage is kept.
    """
    fs = place.fs
    active = found.active
    cleaned_to = place.checkpointed(checkpoint.CLEANER)
    dense_from = gaps.PersistedGaps.of(
        stored_metadata.dense_from, cleaned_to, has_seals=False
    ).dense_from
    damage = recovery.check_start(
        found.segments, found.log_start, keeps_damage=place.keeps_damage
    )
    damage += recovery.check_sealed(
        fs,
        found.segments,
        recovery_point=recovery_point,
        keeps_damage=place.keeps_damage,
    )
    try:
        report = recovery.recover(
            fs,
            active,
            recovery_point=recovery_point,
            policy=stored_metadata.policy,
            dense_from=dense_from,
            indexes=indexes,
        )
        # Inside the try: if damage is kept, the log opens without the missing segment.
        if successor is not None:
            raise CorruptLogError(
                "the last segment was sealed, but the next one is missing",
                path=active.path,
                position=active.size_bytes,
                expected=file_name(successor, LOG),
                found="no such file",
            )
    except CorruptLogError as error:
        if not place.keeps_damage:
            raise
        report = recovery.index_valid_batches(active, error, recovery_point)
    # After a crash these indexes may disagree with their batches. Once the recovery
    # point has moved, no later opening would check them.
    if indexes != "whole":
        _index_unsynced(
            place, found.segments, recovery_point, {damaged.path for damaged in damage}
        )
    return attrs.evolve(report, damage=(*damage, *report.damage))


def _successor(
    place: OpenRequest, last: ActiveSegment, names: Sequence[str]
) -> int | None:
    """Return the base offset of the segment that followed the last one, by its seal.

    A seal that belongs to another file is deleted before the segment changes.
    """
    if file_name(last.base_offset, SEAL) in names:
        seal = checksum_file.read(place.fs, place.path, last.base_offset)
        # A seal is deleted before the segment after it. A seal that fits therefore
        # proves that the successor was lost.
        if seal is not None and seal.is_of(
            last.size_bytes, place.fs.modified_ms(last.path)
        ):
            return seal.next_base_offset
        place.fs.unlink(last.file(SEAL))
    return None


def _index_unsynced(
    place: OpenRequest,
    segments: list[Segment],
    recovery_point: int,
    damaged: Container[str],
) -> None:
    """Rebuild the indexes of sealed segments above the recovery point.

    After a crash of Kafka, they may disagree with the batches. No later opening would
    check them: the recovery point is about to advance, and a clean close would mark the
    directory as valid.
    """
    fs = place.fs
    found: PartitionTransactions | None = None
    for slot, (segment, following) in enumerate(itertools.pairwise(segments)):
        end = following.base_offset
        if end <= recovery_point or segment.path in damaged:
            continue
        rebuilt = ActiveSegment(
            fs, place.path, segment.base_offset, place.config, create=False
        )
        try:
            # A segment damaged below the recovery point keeps its indexes, because they
            # may lead past the damage.
            if not recovery.rebuild_indexes(rebuilt, end):
                continue
            # The whole log is read once, and only if a marker was found.
            if rebuilt.has_markers and found is None:
                found = aborted_transactions.walked(segments)
            if found is None:
                rebuilt.set_aborted(())
            else:
                rebuilt.set_aborted(found.entries_between(rebuilt.base_offset, end))
            segments[slot] = rebuilt.seal()
        except (CorruptBatchError, InvalidRecordError):  # its transactions are unknown
            continue
        except (
            DiskFullError,
            ResourceError,
        ):
            # Kafka rebuilds indexes that do not exist.
            for suffix in INDEXES:
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(segment.file(suffix))
            segments[slot] = Segment(fs, place.path, segment.base_offset)
        fs.sync_dir(place.path)  # durable before the recovery point advances


def _end_of(place: OpenRequest, found: _Found, least: int) -> int:
    """Return the log end offset, which is at least `least`.

    Raises:
        CorruptLogError: the end is below the log start.
    """
    end = max(found.active.last_offset + 1, found.active.base_offset, least)
    if found.log_start > end:
        raise CorruptLogError(
            "the log ends below its start offset",
            path=place.path,
            expected=f"at least {found.log_start}",
            found=end,
        )
    return end


def _write_active_indexes(
    place: OpenRequest, found: _Found, end: int, *, was_truncated: bool
) -> None:
    """Update the indexes of the active segment to the batches that recovery kept."""
    active = found.active
    if active.is_resumed and not active.resume_aborted(end, is_whole=place.is_clean):
        recovery.rebuild(active)  # the other indexes do not contain markers
    if not active.is_resumed:
        aborted_transactions.index_aborted(active, found.segments)
    # A log opens on a full disk too, so that records can be deleted from it; close()
    # tries again. After a clean close, additional entries in the file may be kept.
    # After a truncation they may not: they would be wrong for the next batches.
    with contextlib.suppress(DiskFullError, ResourceError):
        active.write_indexes(
            whole=True, keeps_other_entries=place.is_clean and not was_truncated
        )


def _high_watermark(
    place: OpenRequest, found: _Found, stored_metadata: PartitionMetadata, end: int
) -> int:
    """Return the high watermark after opening.

    For a log without copies, this is the end, because all records were visible. For a
    replicated log, it is the last known high watermark, because records that a killed
    writer has made visible must remain visible.
    """
    # This also covers a log that was written without copies until now.
    if not place.is_replicated or (
        stored_metadata.policy is not None and not stored_metadata.replicated
    ):
        return end
    high_watermark = place.checkpointed(checkpoint.HIGH_WATERMARK)
    visible_end = checkpoint.read_visible_end(place.fs, place.path)
    if visible_end is not None and visible_end.is_replicated:
        high_watermark = max(high_watermark, visible_end.offset)
    if high_watermark <= found.log_start:
        # The deleted records were below the high watermark, which is the end of a
        # batch.
        _, high_watermark = batch_around(found.segments, found.log_start)
    return min(end, high_watermark)


def _epochs_below(place: OpenRequest, found: _Found, end: int) -> list[epochs.Entry]:
    """Return the leader epochs of the remaining records; store them if they changed.

    An entry above the end is dropped, because it would apply to later records.
    """
    known = checkpoint.read_epochs(place.fs, place.path)
    # Without a valid file, the leader epochs are taken from the batches.
    cut = epochs.truncate_end_keeping_epoch(known, end) or epochs.walked(
        found.segments, found.log_start
    )
    kept = epochs.truncate_start(cut, found.log_start)
    if cut != known or len(kept) != len(cut):
        checkpoint.write_epochs(place.fs, place.path, kept, reserve=place.parent)
    return kept
