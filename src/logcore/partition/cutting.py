"""Records that are taken out of a log that is written: at its front by deletion, at its end by truncation.

Rules:
- A new log start is on disk before the first file goes.
- Segments behind a cut are removed from the last on; then the segment with the cut is replaced by a copy of its front.
  So a crash leaves a longer log, or the one that was asked for.
- A batch that the cut lies in is cut, not lost: its front gets a head of its own.
- Who reads a segment that was taken out goes on reading it.

Callers hold the log's lock. This module does not say what is to go: users, leaders and retention do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logcore import checkpoint
from logcore.config import LogConfig
from logcore.errors import CorruptBatchError, DiskFullError, OffsetOutOfRangeError, ResourceError
from logcore.invariants import keeps_order, locked
from logcore.notices import INFO, tell
from logcore.partition import epochs, order, recovery, transactions
from logcore.partition.scan import slot_of
from logcore.partition.writer import Writer
from logcore.recordbatch import empty_batch, front_of
from logcore.segment import ActiveSegment, Segment

#: What a truncation leaves of the leader epochs: epochs.cut_end or epochs.truncate_end.
CutEpochs = Callable[[list[epochs.Entry], int], list[epochs.Entry]]


@keeps_order
def delete_below_locked(writer: Writer, offset: int) -> None:
    """Moves the log start up to an offset, on disk first, and takes out the segments wholly below it."""
    state = writer.state
    if offset > writer.commit.durable_end:  # else a power cut leaves a start above the end
        writer.sync_locked()
    writer.set_checkpoint(checkpoint.LOG_START, offset, may_use_reserve=True)
    state.log_start = offset
    count = max(0, slot_of(state.segments, offset))
    if count:
        _retire_locked(writer, state.segments[:count], state.segments[count:])
        tell("deletion", INFO, "%s: %d segments deleted, the log begins at offset %d", writer.path, count, offset)
    kept = epochs.truncate_start(writer.epochs, offset)
    # If the checkpoint is lost, the start of the first epoch still tells that the segments before it were deleted and
    # not lost. While no segment is deleted, that is not worth two syncs. On a full disk it waits for the next opening:
    # deleting is what makes room.
    try:
        writer.set_epochs_locked(kept, write=bool(count) or len(kept) < len(writer.epochs))
    except (DiskFullError, ResourceError):
        writer.set_epochs_locked(kept, write=False)


@locked
def _retire_locked(writer: Writer, old: Sequence[Segment], remaining: Sequence[Segment]) -> None:
    """Takes segments out of the log. Their files get another name at once, and are removed when readers in other
    processes have had file.delete.delay.ms to open them.
    """
    for segment in old:
        segment.keep()
    writer.state.segments = list(remaining)
    writer.files.retire([segment.base_offset for segment in old], writer.state.config.file_delete_delay_ms)
    writer.stir_locked()
    writer.fs.sync_dir(writer.path)


@keeps_order
def truncate_locked(writer: Writer, offset: int, cut_epochs: CutEpochs) -> None:
    """Removes all records at and above an offset. Raises OffsetOutOfRangeError outside [log start, log end]."""
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
        if cut_epochs is epochs.truncate_end:  # a follower forgets epochs in which it led and stored nothing
            writer.set_epochs_locked(cut_epochs(writer.epochs, offset) or writer.epochs[:1])
        return
    # All of it on disk first: the durable end may then be set to the cut, and no sync under way claims more.
    writer.sync_locked()
    with writer.commit.held():
        slot = max(0, slot_of(state.segments, offset))
        position, tail = plan_cut(state.segments[slot], offset, state.config, writer.epochs)
        try:
            with state.scanning:  # a look at transactions sees the log before the cut or after it
                _cut_locked(writer, offset, slot, position, tail)
            writer.set_epochs_locked(cut_epochs(writer.epochs, offset) or writer.epochs[:1])
        except BaseException as error:  # half done: the files are sound, but memory does not mirror them
            writer.commit.poison(error)
            raise


def plan_cut(segment: Segment, offset: int, config: LogConfig, entries: list[epochs.Entry]) -> tuple[int, bytes]:
    """(position, tail): the segment is to keep its bytes before position, and tail behind them.

    entries: the leader epochs of the log. Raises CorruptBatchError when damage stands in the way; what lies behind it
    is not given up for a truncation. Raises OffsetOutOfRangeError inside a gap that is wider than a segment.
    """
    position = segment.find(offset)  # of the first batch that reaches offset: all before it stay
    batch = segment.batch(position)
    if batch is None and position < segment.size_bytes:
        raise CorruptBatchError("damaged batch before the offset to cut at", path=segment.path, position=position)
    tail = b""
    if batch is not None:
        tail = front_of(batch, offset, config)  # its records below offset; empty when it begins there
    end = segment.base_offset  # behind the last batch that stays
    for facts, _, _ in segment.walk(0, stop=position, crc=False):
        if len(facts):
            end = int(facts["last_offset"][-1]) + 1
    # Compaction left a gap here. Its offsets were given out, so an empty batch holds their place: the next append must
    # not get one of them.
    if not tail and end < offset:
        if offset > order.reach(segment.base_offset):
            raise OffsetOutOfRangeError(
                "cannot truncate inside a gap that is wider than a segment",
                path=segment.path,
                offset=offset,
                expected=f"at most {order.reach(segment.base_offset)}, or where the gap ends",
                found=offset,
            )
        # With the epoch before the gap: the latest may begin behind the cut, and later batches may be of one between.
        tail = empty_batch(end, offset - 1, epochs.in_force(entries, end))
    return position, tail


@locked
def _cut_locked(writer: Writer, offset: int, slot: int, position: int, tail: bytes) -> None:
    """Cuts the segment in a slot as plan_cut() says, and removes those behind it."""
    fs = writer.fs
    state = writer.state
    # Below the cut everything is on disk, above it nothing is promised any more.
    if max(writer.recovery_point, writer.own_checkpoint(checkpoint.RECOVERY_POINT)) > offset:
        writer.recovery_point = offset  # first: a LogDir that has gathered the old one looks here before it writes
        writer.set_checkpoint(checkpoint.RECOVERY_POINT, offset)
    if writer.own_checkpoint(checkpoint.CLEANER) > offset:  # the records that follow were never compacted
        writer.set_checkpoint(checkpoint.CLEANER, offset)
    _lower_visible_locked(writer, offset)
    writer.files.unseal(state.segments[slot:])
    cut = state.segments[slot]
    fills_gap = bool(tail) and position == cut.size_bytes
    # The empty batch that fills a gap comes first: after a crash between the removals and it, the log would end below
    # offset, and below the recovery point.
    if fills_gap:
        writer.files.replace_front(cut, position, tail)
    # The last one first: a crash then leaves a shorter log, and no hole.
    while len(state.segments) > slot + 1:
        last = state.segments[-1]
        state.segments = state.segments[:-1]
        writer.files.remove(last)
    # Snapshots above the cut tell of removed records, and must be gone before others get their offsets.
    writer.producers.remove_above(offset)
    if not fills_gap:
        writer.files.replace_front(cut, position, tail)
    # The files are as they are to be. What memory knows of them is found again, as at opening.
    active = ActiveSegment(fs, writer.path, cut.base_offset, state.config, create=False)
    writer.active = active
    recovery.rebuild(active)
    state.segments = [*state.segments[:-1], active]
    transactions.index_aborted(active, state.segments)
    active.write_indexes(whole=True)
    state.end = offset
    if not writer.is_replicated:
        state.visible = offset
    writer.followed = None
    state.cuts.append(offset)
    writer.commit.set_back(offset)
    state.transactions = None
    writer.producers.forget()


@locked
def _lower_visible_locked(writer: Writer, offset: int) -> None:
    """Before records at and above offset are removed: lowers the visible end for readers here and elsewhere, and in
    what is noted on disk.
    """
    state = writer.state
    state.visible = min(state.visible, offset)
    state.wake()
    if writer.sharing is not None:
        writer.sharing.cut(offset)
    else:
        # Synced for a replicated log, whose high watermark the next opening takes from there.
        writer.shown.show(state.visible, sync=writer.is_replicated)
    if writer.is_replicated and writer.own_checkpoint(checkpoint.HIGH_WATERMARK) > offset:
        # The leader writes other records here next, and the next opening takes the larger of the two for shown.
        writer.set_checkpoint(checkpoint.HIGH_WATERMARK, offset)
