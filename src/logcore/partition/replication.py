"""Stores the batches of a leader in a copy of its log.

Rules:
- leader_transactions.py checks the batches before anything is written.
- Leader epochs are durable before their batches. An epoch without records is
  consistent; records without their epoch are not.
- In each segment, the index of aborted transactions lists the transactions that the
  markers in that segment aborted, as in the leader's log.

Callers hold the log's lock.
"""

from __future__ import annotations

import os

from logcore.debug_checks import keeps_order, locked
from logcore.errors import DiskFullError, ResourceError
from logcore.kernels import layout
from logcore.kernels.layout import Buffer, Level
from logcore.metadata import checkpoint
from logcore.metadata.filenames import LOG, file_name
from logcore.partition import aborted_transactions, epochs
from logcore.partition.leader_transactions import (
    control_types_in,
    encoded,
    follow,
    is_marker,
)
from logcore.partition.writer import Writer
from logcore.segment import ActiveSegment


@locked
def store_locked(
    writer: Writer,
    data: Buffer,
    *,
    begins_segment: bool,
    durability: Level | None,
    now_ms: int,
) -> int:
    """Store batches of the leader, and return the first offset.

    With begins_segment=True, the first batch begins a new segment.

    Raises:
        CorruptBatchError, OffsetOutOfRangeError: raised before anything is written.
    """
    # Drop an epoch without records: this log was the leader in it, or an append failed.
    entries = epochs.truncate_end(writer.epochs, writer.state.end)
    latest_epoch = -1
    if entries:
        latest_epoch = entries[-1][0]
    found = follow(data, log_end=writer.state.end, leader_epoch=latest_epoch)
    first = found.first_offset
    if found.has_producers:
        writer.expect_producers_locked()
    is_empty = len(writer.state.segments) == 1 and not writer.active.size_bytes
    if is_empty and first > writer.state.end:
        _begin_at_locked(writer, first)
    elif begins_segment and writer.active.size_bytes:
        writer.roll_locked()
    # Store the metadata before the batches: first the gaps, because readers would
    # report them as losses; then the leader epochs.
    if found.gap_end:
        writer.note_gaps_locked(found.gap_end)
    entries = epochs.truncate_end(writer.epochs, writer.state.end)
    for epoch, start in found.epochs:
        entries = epochs.assign(entries, epoch, start)
    writer.set_epochs_locked(entries or writer.epochs[:1])
    view = memoryview(data).cast("B")
    with writer.producers.storing(None, is_judged=not found.has_producers):
        for run in found.runs():
            _store_run_locked(writer, view, run, now_ms, durability)
    return first


@locked
def _store_run_locked(
    writer: Writer,
    view: memoryview,
    run: layout.Facts,
    now_ms: int,
    durability: Level | None,
) -> None:
    """Store a run of batches, and update the index of aborted transactions.

    The last batch of the run may be a transaction marker.
    """
    start = int(run["position"][0])
    stop = int(run["position"][-1] + run["size_bytes"][-1])
    if int(run["last_offset"][-1]) > writer.active.limit_offset:
        # The next segment begins after the gap, because offsets are stored relative to
        # the segment's base, in 32 bits.
        writer.roll_locked(int(run["base_offset"][0]))
    before = writer.state.end
    writer.store_locked(view[start:stop], encoded(run, start), now_ms, durability)
    if writer.followed is not None and writer.followed.next_offset != before:
        # This log was the leader in between. `followed` lacks the batches that it
        # appended.
        writer.followed = None
    # A log without markers avoids this cost. The first marker causes one pass over the
    # whole log, and later batches are added one by one.
    if writer.followed is None and not is_marker(run):
        return
    try:
        if writer.followed is None:
            writer.followed = aborted_transactions.walked(writer.state.segments)
        else:
            writer.followed.add(run, control_types_in(view))
        for entry in writer.followed.entries_between(before, writer.state.end):
            writer.active.add_aborted(entry)
        writer.active.has_markers |= is_marker(run)
    except BaseException as error:
        # Kafka trusts the index file, so it must not lack an entry. Opening the log
        # again writes the entry.
        writer.commit.poison(error)
        raise


@keeps_order
def _begin_at_locked(writer: Writer, offset: int) -> None:
    """Make an empty log begin at `offset`, like the log of its leader."""
    old = writer.active
    path = os.path.join(writer.path, file_name(offset, LOG))
    # A crash may leave both segments and the old start. The offsets in between must
    # then not be reported as lost.
    writer.note_gaps_locked(offset)
    with writer.commit.held():
        try:
            writer.is_midway = True
            new = ActiveSegment(
                writer.fs, writer.path, offset, writer.state.config, create=True
            )
            writer.fs.sync_dir(writer.path)
            writer.set_checkpoint(checkpoint.LOG_START, offset)
            writer.state.log_start = offset
            writer.state.end = offset
            writer.state.segments = [new]
            writer.active = new
            writer.commit.advance(offset, writer.written_bytes)
            writer.state.show(offset)
            writer.is_midway = False
        except BaseException as error:
            # A lack of space or descriptors is temporary, unless a file already claims
            # that the log begins at the offset.
            if isinstance(
                error, (DiskFullError, ResourceError)
            ) and not writer.fs.exists(path):
                writer.is_midway = False
            else:
                writer.commit.poison(error)
            raise
    writer.files.remove(old)
    writer.set_epochs_locked(epochs.truncate_start(writer.epochs, offset))
