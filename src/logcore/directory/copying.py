"""Plans a copy of a partition's log up to an offset, and writes it to a directory.

Rules:
- Sealed segments become hard links if the file system supports them, else copies. A
  sealed segment never changes, and is replaced only by rename.
- The last segment of the copy is always a separate file, because the copy appends to
  it.
- All files are durable when copy_log() returns. Only then does the caller turn the new
  directory into a partition.
- A log that is open for reading only is copied up to the last record in its files. This
  includes records that its writer has acknowledged and not synced yet.

This module creates the files of one copy. forking.py keeps an incomplete copy from being
used, and backup/ stores the planned files elsewhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence

import attrs

from logcore.errors import (
    CompactionAbandonedError,
    CorruptBatchError,
    OffsetOutOfRangeError,
    StorageReadError,
)
from logcore.fs import FS, copy_range, opened
from logcore.kernels import layout
from logcore.log import Log, rewriting_of
from logcore.metadata import checkpoint
from logcore.metadata.filenames import (
    LOG,
    SEGMENT_FILES,
    SNAPSHOT,
    base_offset_of,
    file_name,
)
from logcore.partition import epochs, order
from logcore.partition.segment_files import write_prefix
from logcore.partition.truncation import plan_truncation
from logcore.reader import acknowledged_end, fs_of, is_written_here, segments_between
from logcore.segment import Segment

#: Chooses the end of a copy: (segments, end) to an end that is not larger.
ChooseEnd = Callable[[Sequence[Segment], int], int]


@attrs.frozen
class CopyPlan:
    """The files of a copy. It is valid within planned_copy()."""

    fs: FS
    log_start: int
    end: int
    #: Segments that are copied whole.
    sealed: tuple[Segment, ...]
    #: The segment to append to: bytes of `growing` before `position`, then `tail`. It
    #: is empty and begins at `end` if `growing` is None.
    growing: Segment | None
    position: int
    tail: bytes
    #: Content of the other files by name. Each is a cache, or a file that later changes
    #: replace.
    files: Mapping[str, bytes]

    @property
    def growing_name(self) -> str:
        """The name of the .log file to append to."""
        base_offset = self.end
        if self.growing is not None:
            base_offset = self.growing.base_offset
        return file_name(base_offset, LOG)


@contextlib.contextmanager
def planned_copy(
    log: Log, at_offset: int | None = None, *, choose_end: ChooseEnd | None = None
) -> Generator[CopyPlan, None, None]:
    """Plan a copy of the records below `at_offset`; by default, of all records.

    A batch that contains `at_offset` is truncated. A transaction that is open at that
    point remains open in the copy. The copy is made in the `with` block, which checks
    at its end that the log was not truncated.

    Raises:
        OffsetOutOfRangeError: `at_offset` is outside the log.
        CompactionAbandonedError: the log was truncated or compacted concurrently;
            retriable.
        CorruptBatchError: the last segment is damaged.
    """
    if is_written_here(log):
        # The flush comes before reading the high watermark, because a sync moves it:
        # records acknowledged at "os" belong to the copy too.
        log.flush()
        with rewriting_of(log) as view:
            segments = [*view.sealed, view.growing]
            end = view.high_watermark
            yield _plan(log, segments, view.log_start, end, at_offset, choose_end)
            # A concurrent truncation may have removed records that the copy contains.
            view.check_unchanged()
        return
    log.refresh()
    before = log.times_truncated
    end = acknowledged_end(log)
    # With `end + 1`, the list includes an empty segment that begins at the end.
    segments = segments_between(log, log.log_start_offset, end + 1)
    yield _plan(log, segments, log.log_start_offset, end, at_offset, choose_end)
    log.refresh()
    if log.times_truncated != before:
        raise CompactionAbandonedError(
            "the log was truncated during the copy; copy it again", path=log.path
        )


def _plan(
    log: Log,
    segments: Sequence[Segment],
    log_start: int,
    limit: int,
    at_offset: int | None,
    choose_end: ChooseEnd | None,
) -> CopyPlan:
    end = limit
    if at_offset is not None:
        end = at_offset
    if not log_start <= end <= limit:
        raise OffsetOutOfRangeError(
            "a copy cannot end at that offset",
            path=log.path,
            offset=end,
            expected=f"{log_start} to {limit}",
            found=end,
        )
    if choose_end is not None:
        end = max(log_start, choose_end(segments, end))
    below = [segment for segment in segments if segment.base_offset <= end]
    # A new file even if the copy ends with a segment, because it must not append to a
    # file that it shares with the log.
    growing = None
    position, tail = 0, b""
    if below and below[-1].base_offset < end:
        growing = below[-1]
        position, tail = _copied_prefix(log, growing, end)
    sealed = below
    if growing is not None or (below and below[-1].base_offset == end):
        sealed = below[:-1]
    for segment in sealed:
        # The segment is opened here, so that check_current() compares with this file.
        segment.keep()
    files = _small_files(log, end, log_start)
    fs = fs_of(log)
    return CopyPlan(fs, log_start, end, tuple(sealed), growing, position, tail, files)


def _copied_prefix(log: Log, segment: Segment, end: int) -> tuple[int, bytes]:
    """Return (position, tail) of plan_truncation(), after checking the batches below `end`.

    A torn batch above `end` does not count as damage.

    Raises:
        CorruptBatchError: there is a damaged batch below `end`.
    """
    position = 0
    expected = segment.base_offset
    limit = order.reach(expected)
    for facts, _, stop_reason in segment.walk(0, crc=True):
        valid = facts[: order.in_order(facts, expected, limit)]
        below = valid[valid["last_offset"] < end]
        if len(below):
            position = int(below["position"][-1]) + int(below["size_bytes"][-1])
            expected = int(below["last_offset"][-1]) + 1
            if expected == end:
                return position, b""
        if len(below) < len(valid):
            break
        if stop_reason == layout.WALK_CRC or len(valid) < len(facts):
            raise CorruptBatchError(
                "a damaged batch cannot be copied; `logcore recover` saves the other batches",
                path=segment.path,
                position=position,
            )
    # `end` is inside a batch, or in a gap between batches.
    return plan_truncation(
        segment, end, log.config, checkpoint.read_epochs(segment.fs, log.path)
    )


def _small_files(log: Log, end: int, log_start: int) -> dict[str, bytes]:
    """Return the leader epochs, the producer snapshots and the policy by name.

    They are read after the end of the copy was chosen: a writer announces idempotent
    producers before it stores their first batch.
    """
    fs = fs_of(log)
    names = [checkpoint.POLICY]
    for name in fs.listdir(log.path):
        offset = base_offset_of(name, SNAPSHOT)
        if offset is not None and offset <= end:
            names.append(name)
    found = {name: checkpoint.read(fs, log.path, name) for name in names}
    remaining_epochs = epochs.truncate_end(checkpoint.read_epochs(fs, log.path), end)
    found[checkpoint.LEADER_EPOCH] = checkpoint.pack_epochs(
        remaining_epochs or [(0, log_start)]
    )
    return {name: content for name, content in found.items() if content is not None}


def check_current(segment: Segment) -> None:
    """Raise CompactionAbandonedError unless the name still refers to the opened file."""
    if not segment.is_current():
        raise CompactionAbandonedError(
            "a segment was compacted during the copy; copy the log again",
            path=segment.path,
        )


def copy_log(log: Log, directory: str, at_offset: int | None = None) -> CopyPlan:
    """Copy a log's records into an existing directory without segments.

    See planned_copy().

    Raises:
        StorageReadError, StorageWriteError, DiskFullError: the copy failed.
        OffsetOutOfRangeError, CompactionAbandonedError, CorruptBatchError: see
            planned_copy().
    """
    with planned_copy(log, at_offset) as plan:
        fs = plan.fs
        for segment in plan.sealed:
            _link_segment(fs, segment, directory)
        path = os.path.join(directory, plan.growing_name)
        if plan.growing is None:
            with opened(fs, path, write=True, create=True, exclusive=True) as handle:
                fs.fsync(handle)
        else:
            # The copy has no indexes. Opening it rebuilds them.
            write_prefix(fs, path, plan.growing, plan.position, plan.tail)
        for name, content in plan.files.items():
            checkpoint.write(fs, directory, name, content)
        fs.sync_dir(directory)
        return plan


def _link_segment(fs: FS, segment: Segment, directory: str) -> None:
    for suffix in SEGMENT_FILES:
        if suffix == LOG or fs.exists(segment.file(suffix)):
            _link(
                fs,
                segment.file(suffix),
                os.path.join(directory, file_name(segment.base_offset, suffix)),
            )
    check_current(segment)


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
