"""A range of a log as columns, and the offsets at which the range may be divided.

Rules:
- A range is delivered whole or the task fails. Deleted records raise DataLossError, or
  a warning with failOnDataLoss=false.

This module opens no log: origins do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from logcore.errors import LogcoreError, OffsetOutOfRangeError, ResourceError
from logcore.format.columns import RecordColumns
from logcore.fs import FS, OS
from logcore.reader import LogReader, avoid_mapping, segments_between, typed_columns
from pyspark_logcore.options import ReadOptions
from pyspark_logcore.ranges import OffsetRange, report_loss
from pyspark_logcore.tasks import SizeIndex


def columns_of(
    log: LogReader,
    offset_range: OffsetRange,
    options: ReadOptions,
    location: str,
    fs: FS = OS,
) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
    """Yield the records of a range in order.

    Deleted records are reported by report_loss(), with the location.
    """
    at = offset_range.start
    end = offset_range.end
    if log.log_start_offset > at or log.high_watermark < end:
        held = f"the log holds {log.log_start_offset} to {log.high_watermark}"
        report_loss(
            options.fail_on_data_loss,
            location,
            offset_range.topic,
            offset_range.partition,
            f"offsets {at} to {end} were planned, and {held}",
        )
        at = max(at, log.log_start_offset)
        end = min(end, log.high_watermark)
    mapping = True
    stopped = -1
    while at < end:
        try:
            for columns, types in typed_columns(
                log,
                at,
                end,
                isolation=options.isolation,
                rows=options.batch_rows,
                size_bytes=options.batch_bytes,
            ):
                behind = int(columns.offsets[-1]) + 1
                yield columns, types
                at = behind
            return
        except ResourceError:
            if not mapping:
                raise
            # A memory limit counts a mapping in full, so read in chunks instead.
            mapping = False
            avoid_mapping(log)
        except OffsetOutOfRangeError as error:
            log.refresh()
            if log.log_start_offset <= at and at != stopped:
                stopped = (
                    at  # a concurrent compaction may have replaced files without a loss
                )
                continue
            if log.log_start_offset <= at:
                raise
            report_loss(
                options.fail_on_data_loss,
                location,
                offset_range.topic,
                offset_range.partition,
                error.reason,
            )
            at = log.log_start_offset
        except LogcoreError as error:
            if error.offset is None:
                error.offset = _offset_of(fs, error, at, end)
            raise


def _offset_of(fs: FS, error: LogcoreError, start: int, end: int) -> int:
    """Return the offset in the head of the batch that caused an error, if it is plausible.

    Otherwise return the start of the read.
    """
    if error.path is not None and error.position is not None:
        with contextlib.suppress(OSError, LogcoreError):
            handle = fs.open(error.path)
            try:
                found = int.from_bytes(fs.pread(handle, 8, error.position), "big")
            finally:
                fs.close(handle)
            if start <= found < end:
                return found
    return start


def size_index_of(log: LogReader, start: int, end: int) -> SizeIndex:
    """Return the batches of a range that have an entry in the offset index."""
    segments = segments_between(log, start, end)
    empty = np.zeros(0, np.int64)
    total = 0
    before = [empty]
    numbers = [empty]
    positions = [empty]
    for number, segment in enumerate(segments):
        low = 0
        if segment.base_offset < start:
            low = segment.find(start)
        if number == len(segments) - 1:
            high = segment.find(end)
        else:
            high = segment.size_bytes
        entries = segment.offset_index.array()["position"].astype(np.int64)
        here = np.concatenate([[low], entries[(entries > low) & (entries < high)]])
        before.append(here - low + total)
        numbers.append(np.full(len(here), number, np.int64))
        positions.append(here)
        total += max(0, high - low)
    segment_of = np.concatenate(numbers)
    position_of = np.concatenate(positions)

    def offset_at(row: int) -> int | None:
        try:
            batch = segments[int(segment_of[row])].batch(int(position_of[row]))
        except LogcoreError:  # an index may be wrong, and the task reports real damage
            return None
        if batch is None:
            return None
        return batch.base_offset

    return SizeIndex(total, np.concatenate(before), offset_at)
