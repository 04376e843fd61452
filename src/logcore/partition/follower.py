"""Stores in a copy what the leader of a log has stored.

Rules:
- following.py judges the batches before anything is written.
- Leader epochs are on disk before their batches: an epoch without records contradicts nothing, records without theirs
  do.
- The index of aborted transactions names in each segment what the markers in it aborted, as the leader's does.

Callers hold the log's lock.
"""

from __future__ import annotations

import os

from logcore import checkpoint
from logcore.errors import DiskFullError, ResourceError
from logcore.invariants import keeps_order, locked
from logcore.kernels import layout
from logcore.kernels.layout import Buffer, Level
from logcore.names import LOG, file_name
from logcore.partition import epochs, transactions
from logcore.partition.following import control_types_in, encoded, follow, is_marker
from logcore.partition.writer import Writer
from logcore.segment import ActiveSegment


@locked
def store_locked(writer: Writer, data: Buffer, *, begins_segment: bool, durability: Level | None, now_ms: int) -> int:
    """Stores the leader's batches; returns the first offset. begins_segment: the first of them begins a segment.

    Raises CorruptBatchError and OffsetOutOfRangeError before anything is written.
    """
    # An epoch in which nothing was stored says nothing: this log led in it, or an append failed.
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
    # Notes come before what they tell of: the gaps, or a reader would call them losses; then the leader epochs.
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
    writer: Writer, view: memoryview, run: layout.Facts, now_ms: int, durability: Level | None
) -> None:
    """Stores batches of which the last may be a marker; then the index of its segment names what it aborted."""
    start = int(run["position"][0])
    stop = int(run["position"][-1] + run["size_bytes"][-1])
    if int(run["last_offset"][-1]) > writer.active.limit_offset:
        # The next segment begins behind the gap, for its offsets are relative to its base, and 32 bits wide.
        writer.roll_locked(int(run["base_offset"][0]))
    before = writer.state.end
    writer.store_locked(view[start:stop], encoded(run, start), now_ms, durability)
    if writer.followed is not None and writer.followed.next_offset != before:
        writer.followed = None  # this log has led meanwhile, and its own appends are not in it
    # A log without markers never pays for this: the first one walks the whole log, later batches are added.
    if writer.followed is None and not is_marker(run):
        return
    try:
        if writer.followed is None:
            writer.followed = transactions.walked(writer.state.segments)
        else:
            writer.followed.add(run, control_types_in(view))
        for entry in writer.followed.entries_between(before, writer.state.end):
            writer.active.add_aborted(entry)
        writer.active.has_markers |= is_marker(run)
    except BaseException as error:
        # Kafka believes the file, so it must not lack an entry; opening the log again writes it.
        writer.commit.poison(error)
        raise


@keeps_order
def _begin_at_locked(writer: Writer, offset: int) -> None:
    """Makes an empty log one that begins at offset, as its leader's does."""
    old = writer.active
    path = os.path.join(writer.path, file_name(offset, LOG))
    # A crash may leave both segments and the old start: then the offsets between them must not look lost.
    writer.note_gaps_locked(offset)
    with writer.commit.held():
        try:
            writer.is_midway = True
            new = ActiveSegment(writer.fs, writer.path, offset, writer.state.config, create=True)
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
            # Lack of room or descriptors passes, as long as no file says that the log begins there.
            if isinstance(error, (DiskFullError, ResourceError)) and not writer.fs.exists(path):
                writer.is_midway = False
            else:
                writer.commit.poison(error)
            raise
    writer.files.remove(old)
    writer.set_epochs_locked(epochs.truncate_start(writer.epochs, offset))
