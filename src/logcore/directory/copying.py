"""Copies a partition's log up to an offset, with the same offsets: for forks and snapshots.

Rules:
- Sealed segments are hard links if the file system has them: they never change, and whatever replaces one does so by
  rename. Else they are copied.
- The last segment of the copy is a file of its own, because it will be appended to.
- Everything is on disk when this returns; only then does the caller make the new directory a partition.

This module makes the files of one copy. forking.py and snapshots.py keep half a copy from being mistaken for a whole
one.
"""

from __future__ import annotations

import os

from logcore import checkpoint
from logcore.errors import CompactionAbandonedError, OffsetOutOfRangeError, StorageReadError
from logcore.fs import FS, copy_range, opened
from logcore.log import Log, rewriting_of
from logcore.names import LOG, SEGMENT_FILES, SNAPSHOT, base_offset_of, file_name
from logcore.partition import epochs
from logcore.partition.rewriting import Rewriting
from logcore.partition.segmentfiles import write_front
from logcore.segment import Segment


def copy_log(log: Log, directory: str, at_offset: int | None = None) -> int:
    """Puts a log's records below at_offset, by default its high watermark, into an existing directory without segments.
    Returns the end of the copy.

    A batch that at_offset lies in is cut. A transaction that is open there stays open in the copy. Raises
    OffsetOutOfRangeError outside [log start, high watermark], CompactionAbandonedError (retriable) when the log is
    truncated meanwhile, and what reading and writing raise.
    """
    # Before the high watermark is read, because a sync moves it: records acknowledged at "os" belong to the copy too.
    # The recovery point of the copy will call these files durable.
    log.flush()
    with rewriting_of(log) as view:
        if at_offset is None:
            end = view.high_watermark
        else:
            end = at_offset
        if not view.log_start <= end <= view.high_watermark:
            raise OffsetOutOfRangeError(
                "cannot copy up to there",
                path=log.path,
                offset=end,
                expected=f"{view.log_start} to {view.high_watermark}",
                found=end,
            )
        segments = [*view.sealed, view.growing]
        ends = [*(segment.base_offset for segment in segments[1:]), end]
        for segment, after in zip(segments[:-1], ends, strict=False):
            if after <= end:
                _link_segment(view.fs, segment, directory)
        # A new file also if the cut is the end of a segment: the copy must not append to a file that the log shares.
        last = next(segment for segment in reversed(segments) if segment.base_offset <= end)
        if last.base_offset < end:
            _copy_front(view, last, end, directory)
        else:
            _create(view.fs, os.path.join(directory, file_name(end, LOG)))
        _copy_notes(view, end, directory)
        # A truncation meanwhile may have taken back records that the copy has.
        view.check_unchanged()
        view.fs.sync_dir(directory)
    return end


def _link_segment(fs: FS, segment: Segment, directory: str) -> None:
    segment.keep()  # opened, so that is_current() below compares with this very file
    for suffix in SEGMENT_FILES:
        if suffix == LOG or fs.exists(segment.file(suffix)):
            _link(fs, segment.file(suffix), os.path.join(directory, file_name(segment.base_offset, suffix)))
    if not segment.is_current():
        raise CompactionAbandonedError("a segment was compacted meanwhile; copy the log again", path=segment.path)


def _link(fs: FS, source: str, target: str) -> None:
    try:
        if fs.link(source, target):
            return
        with opened(fs, source) as handle, opened(fs, target, write=True, create=True, exclusive=True) as out:
            size = fs.size(handle)
            if copy_range(fs, handle, out, 0, size) < size:
                raise StorageReadError("the file became shorter", path=source, expected=f"{size} bytes")
            fs.fsync(out)
    except FileNotFoundError:
        raise CompactionAbandonedError("a segment went away meanwhile; copy the log again", path=source) from None


def _copy_front(view: Rewriting, segment: Segment, end: int, directory: str) -> None:
    """The segment that is to be appended to: without indexes, which opening it makes."""
    path = os.path.join(directory, file_name(segment.base_offset, LOG))
    write_front(view.fs, path, segment, *view.plan_cut(segment, end))


def _create(fs: FS, path: str) -> None:
    with opened(fs, path, write=True, create=True, exclusive=True) as handle:
        fs.fsync(handle)


def _copy_notes(view: Rewriting, end: int, directory: str) -> None:
    """Epochs, producers and the policy; each a cache, or a file of its own that a later change replaces."""
    fs = view.fs
    kept = epochs.truncate_end(view.epochs(), end) or [(0, view.log_start)]
    checkpoint.write_epochs(fs, directory, kept)
    checkpoint.write_notes(fs, directory, view.notes)
    for name in fs.listdir(view.path):
        offset = base_offset_of(name, SNAPSHOT)
        if offset is not None and offset <= end:
            content = checkpoint.read(fs, view.path, name)
            if content is not None:
                checkpoint.write(fs, directory, name, content)
