"""Copies a partition's log up to an offset, with the same offsets, for forks and
snapshots.

Rules:
- Sealed segments become hard links if the file system supports them, else copies. They
  never change, and they are replaced only by rename.
- The last segment of the copy is always a separate file, because the copy appends to
  it.
- All files are durable when this returns. Only then does the caller turn the new
  directory into a partition.

This module creates the files of one copy. forking.py and snapshots.py keep an
incomplete copy from being used.
"""

from __future__ import annotations

import os

from logcore.errors import (
    CompactionAbandonedError,
    OffsetOutOfRangeError,
    StorageReadError,
)
from logcore.fs import FS, copy_range, opened
from logcore.log import Log, rewriting_of
from logcore.metadata import checkpoint
from logcore.metadata.filenames import (
    LOG,
    SEGMENT_FILES,
    SNAPSHOT,
    base_offset_of,
    file_name,
)
from logcore.partition import epochs
from logcore.partition.rewriting import Rewriting
from logcore.partition.segment_files import write_front
from logcore.segment import Segment


def copy_log(log: Log, directory: str, at_offset: int | None = None) -> int:
    """Copy a log's records below `at_offset` into an existing directory without
    segments.

    By default `at_offset` is the high watermark. A batch that contains `at_offset` is
    truncated. A transaction that is open at that point remains open in the copy.
    Returns the end of the copy.

    Raises:
        OffsetOutOfRangeError: `at_offset` is outside [log start, high watermark].
        CompactionAbandonedError: the log was truncated or compacted concurrently;
            retriable.
        StorageReadError, StorageWriteError, DiskFullError: the copy failed.
    """
    # The flush comes before reading the high watermark, because a sync moves it:
    # records acknowledged at "os" belong to the copy too. The copy's recovery point
    # will mark these files as durable.
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
        # A new file even if the copy ends with a segment, because it must not append to
        # a file that it shares with the log.
        last = next(
            segment for segment in reversed(segments) if segment.base_offset <= end
        )
        if last.base_offset < end:
            _copy_front(view, last, end, directory)
        else:
            _create(view.fs, os.path.join(directory, file_name(end, LOG)))
        _copy_notes(view, end, directory)
        # A concurrent truncation may have removed records that the copy contains.
        view.check_unchanged()
        view.fs.sync_dir(directory)
    return end


def _link_segment(fs: FS, segment: Segment, directory: str) -> None:
    # Opened, so that is_current() below compares with this file.
    segment.keep()
    for suffix in SEGMENT_FILES:
        if suffix == LOG or fs.exists(segment.file(suffix)):
            _link(
                fs,
                segment.file(suffix),
                os.path.join(directory, file_name(segment.base_offset, suffix)),
            )
    if not segment.is_current():
        raise CompactionAbandonedError(
            "a segment was compacted during the copy; copy the log again",
            path=segment.path,
        )


def _link(fs: FS, source: str, target: str) -> None:
    try:
        if fs.link(source, target):
            return
        with (
            opened(fs, source) as handle,
            opened(fs, target, write=True, create=True, exclusive=True) as out,
        ):
            size = fs.size(handle)
            if copy_range(fs, handle, out, 0, size) < size:
                raise StorageReadError(
                    "the file became shorter", path=source, expected=f"{size} bytes"
                )
            fs.fsync(out)
    except FileNotFoundError:
        raise CompactionAbandonedError(
            "a segment was removed during the copy; copy the log again", path=source
        ) from None


def _copy_front(view: Rewriting, segment: Segment, end: int, directory: str) -> None:
    """Copy the segment to append to, without indexes, which opening rebuilds."""
    path = os.path.join(directory, file_name(segment.base_offset, LOG))
    write_front(view.fs, path, segment, *view.plan_cut(segment, end))


def _create(fs: FS, path: str) -> None:
    with opened(fs, path, write=True, create=True, exclusive=True) as handle:
        fs.fsync(handle)


def _copy_notes(view: Rewriting, end: int, directory: str) -> None:
    """Copy the leader epochs, the producer snapshots and the policy.

    Each is a cache, or a separate file that later changes replace.
    """
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
