"""Removes records from a writable log: deletion at the front, truncation at the end.

Rules:
- A new log start is durable before the first file is deleted.
- Segments above a truncation are removed from the last one on. Then the segment with
  the truncation offset is replaced by a copy of its front. A crash therefore leaves
  either a longer log or the requested one.
- A batch that contains the truncation offset is shortened, not dropped: its front gets
  a new header.
- Readers of a removed segment can continue to read it.

Callers hold the log's lock. This module does not decide which records are removed:
users, leaders and retention do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logcore.config import LogConfig
from logcore.debug_checks import keeps_order, locked
from logcore.errors import (
    CorruptBatchError,
    DiskFullError,
    OffsetOutOfRangeError,
    ResourceError,
)
from logcore.metadata import checkpoint
from logcore.partition import aborted_transactions, epochs, order, recovery
from logcore.partition.scan import slot_of
from logcore.partition.writer import Writer
from logcore.recordbatch import empty_batch, front_of
from logcore.reporting import INFO, log_line
from logcore.segment import ActiveSegment, Segment

#: Truncates the leader epochs: epochs.truncate_end_keeping_epoch or epochs.truncate_end.
TruncatedEpochs = Callable[[list[epochs.Entry], int], list[epochs.Entry]]


@keeps_order
def delete_below_locked(writer: Writer, offset: int) -> None:
    """Raise the log start to `offset`, durably, and remove segments below it."""
    state = writer.state
    # Sync first. Otherwise a power cut could leave a log start above the log end.
    if offset > writer.commit.durable_end:
        writer.sync_locked()
    writer.set_checkpoint(checkpoint.LOG_START, offset, may_use_reserve=True)
    writer.replace_segments_locked(state.segments, log_start=offset)
    count = max(0, slot_of(state.segments, offset))
    if count:
        _retire_locked(writer, state.segments[:count], state.segments[count:])
        log_line(
            "deletion",
            INFO,
            "%s: %d segments deleted, the log begins at offset %d",
            writer.path,
            count,
            offset,
        )
    kept = epochs.truncate_start(writer.metadata.epochs, offset)
    # If the checkpoint is lost, the start of the first epoch still shows that the
    # segments before it were deleted and not lost. While no segment is deleted, that is
    # not worth two syncs. On a full disk, this is left to the next opening, because the
    # deletion is needed to free space.
    try:
        writer.set_epochs_locked(
            kept, write=bool(count) or len(kept) < len(writer.metadata.epochs)
        )
    except (DiskFullError, ResourceError):
        writer.set_epochs_locked(kept, write=False)


@locked
def _retire_locked(
    writer: Writer, old: Sequence[Segment], remaining: Sequence[Segment]
) -> None:
    """Remove segments from the log.

    Their files are renamed at once. They are deleted after file.delete.delay.ms, so
    that readers in other processes can still open them.
    """
    for segment in old:
        segment.keep()
    writer.replace_segments_locked(list(remaining))
    writer.files.retire(
        [segment.base_offset for segment in old],
        writer.state.config.file_delete_delay_ms,
    )
    writer.wake_maintenance_locked()
    writer.fs.sync_dir(writer.path)


@keeps_order
def truncate_locked(
    writer: Writer, offset: int, truncate_epochs: TruncatedEpochs
) -> None:
    """Remove all records at and above `offset`.

    Raises:
        OffsetOutOfRangeError: `offset` is outside [log start, log end].
    """
    state = writer.state
    if not state.log_start <= offset <= state.end:
        raise OffsetOutOfRangeError(
            "cannot truncate there",
            path=writer.path,
            offset=offset,
            expected=f"{state.log_start} to {state.end}",
            found=offset,
        )
    if offset == state.end:
        # A follower drops epochs in which it was the leader and stored no records.
        if truncate_epochs is epochs.truncate_end:
            writer.set_epochs_locked(
                truncate_epochs(writer.metadata.epochs, offset)
                or writer.metadata.epochs[:1]
            )
        return
    # Sync everything first. The durable end may then be set to the truncation offset,
    # and no running sync can report a higher one.
    writer.sync_locked()
    with writer.commit.held():
        slot = max(0, slot_of(state.segments, offset))
        position, tail = plan_truncation(
            state.segments[slot], offset, state.config, writer.metadata.epochs
        )
        try:
            # A search for transactions sees the log before or after the truncation.
            with state.scanning:
                _truncate_locked(writer, offset, slot, position, tail)
            writer.set_epochs_locked(
                truncate_epochs(writer.metadata.epochs, offset)
                or writer.metadata.epochs[:1]
            )
        except BaseException as error:
            # Half done: the files are valid, but the state in memory does not match
            # them.
            writer.commit.poison(error)
            raise


def plan_truncation(
    segment: Segment, offset: int, config: LogConfig, entries: list[epochs.Entry]
) -> tuple[int, bytes]:
    """Return (position, tail): how to truncate `segment` at `offset`.

    The segment keeps its bytes before `position`, followed by `tail`. `entries` are the
    leader epochs of the log.

    Raises:
        CorruptBatchError: there is damage below the offset. A truncation does not give
            up the records after the damage.
        OffsetOutOfRangeError: `offset` is inside a gap that is wider than a segment.
    """
    # The position of the first batch that reaches the offset. All earlier ones remain.
    position = segment.find(offset)
    batch = segment.batch(position)
    if batch is None and position < segment.size_bytes:
        raise CorruptBatchError(
            "damaged batch before the offset to cut at",
            path=segment.path,
            position=position,
        )
    tail = b""
    if batch is not None:
        # The batch's records below the offset; empty if the batch begins at the offset.
        tail = front_of(batch, offset, config)
    end = segment.base_offset  # becomes the end of the last remaining batch
    for facts, _, _ in segment.walk(0, stop=position, crc=False):
        if len(facts):
            end = int(facts["last_offset"][-1]) + 1
    # Compaction left a gap here. Its offsets were assigned, so an empty batch reserves
    # them: the next append must not reuse one.
    if not tail and end < offset:
        if offset > order.reach(segment.base_offset):
            raise OffsetOutOfRangeError(
                "cannot truncate inside a gap that is wider than a segment",
                path=segment.path,
                offset=offset,
                expected=f"at most {order.reach(segment.base_offset)}, or where the gap ends",
                found=offset,
            )
        # Use the epoch before the gap. The latest epoch may begin above the truncation,
        # and later batches may have an epoch between the two.
        tail = empty_batch(end, offset - 1, epochs.in_force(entries, end))
    return position, tail


@locked
def _truncate_locked(
    writer: Writer, offset: int, slot: int, position: int, tail: bytes
) -> None:
    """Truncate the segment in a slot as planned, and remove the later segments."""
    state = writer.state
    # 1. Lower the checkpoints. Records below the offset are durable; above it, none
    # are.
    if (
        max(
            writer.progress.recovery_point,
            writer.own_checkpoint(checkpoint.RECOVERY_POINT),
        )
        > offset
    ):
        # Set first: a LogDir that has collected the old value checks it before it
        # writes.
        writer.progress.set_recovery_point(offset)
        writer.set_checkpoint(checkpoint.RECOVERY_POINT, offset)
    # Records that are appended next were never compacted.
    if writer.own_checkpoint(checkpoint.CLEANER) > offset:
        writer.set_checkpoint(checkpoint.CLEANER, offset)
    _lower_visible_locked(writer, offset)
    writer.files.unseal(state.segments[slot:])
    cut = state.segments[slot]
    fills_gap = bool(tail) and position == cut.size_bytes
    # 2. Write the empty batch that fills a gap. If it were written after the removals,
    # a crash in between would leave a log that ends below its recovery point.
    if fills_gap:
        writer.files.replace_with_prefix(cut, position, tail)
    # 3. Remove the later segments, the last one first. A crash then leaves a shorter
    # log without a hole.
    while len(state.segments) > slot + 1:
        last = state.segments[-1]
        writer.replace_segments_locked(state.segments[:-1])
        writer.files.remove(last)
    # Snapshots above the offset describe removed records. They must be deleted before
    # new records get the same offsets.
    writer.producers.remove_above(offset)
    if not fills_gap:
        writer.files.replace_with_prefix(cut, position, tail)
    # 4. The files are final. Rebuild the state in memory from them, as at opening.
    active = ActiveSegment(
        writer.fs, writer.path, cut.base_offset, state.config, create=False
    )
    recovery.rebuild(active)
    writer.set_active_locked(active, [*state.segments[:-1], active])
    aborted_transactions.index_aborted(active, state.segments)
    active.write_indexes(whole=True)
    writer.end_at_locked(offset)


@locked
def _lower_visible_locked(writer: Writer, offset: int) -> None:
    """Lower the visible end, in memory and on disk, before records are removed.

    Readers in this process and in others then stop below `offset`.
    """
    writer.lower_visible_locked(offset)
    if writer.sharing is not None:
        writer.sharing.record_truncation(offset)
    else:
        # Synced for a replicated log, whose next opening reads the high watermark
        # there.
        writer.watermark_file.write(writer.state.visible, sync=writer.is_replicated)
    if (
        writer.is_replicated
        and writer.own_checkpoint(checkpoint.HIGH_WATERMARK) > offset
    ):
        # The leader writes other records here next. The next opening uses the larger of
        # the two stored values as the high watermark.
        writer.set_checkpoint(checkpoint.HIGH_WATERMARK, offset)
