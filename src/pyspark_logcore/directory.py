"""A log directory of this machine as the origin of a query.

Rules:
- Files are read as they are, without a lock, beside whoever writes them.
- A range is delivered whole or the task fails; what is gone is DataLossError, or a warning where the user said so.
- Before a task reads, it checks that it sees the directory that the query was planned with.

This module decides nothing about offsets (planning.py) and knows no column (columns.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

import logcore
from logcore.errors import LogcoreError, LogNotFoundError, OffsetOutOfRangeError, ResourceError
from logcore.format.columns import RecordColumns
from logcore.fs import OS
from logcore.names import partition_name
from logcore.reader import LogReader, avoid_mapping, segments_between, typed_columns
from pyspark_logcore.identity import Identity, check_identity
from pyspark_logcore.options import ReadOptions
from pyspark_logcore.ranges import Bounds, OffsetRange, TopicPartition, report_loss
from pyspark_logcore.tasks import Marks

if TYPE_CHECKING:
    from types import TracebackType


class DirectoryOrigin:
    """See origin.Origin."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._opened: logcore.LogDir | None = None

    @property
    def location(self) -> str:
        return self._options.path

    @property
    def _directory(self) -> logcore.LogDir:
        if self._opened is None:
            self._opened = logcore.open_dir(self._options.path, read_only=True)
        return self._opened

    def topics(self) -> list[str]:
        return sorted(self._directory.topics())

    def partitions(self, topic: str) -> tuple[int, ...]:
        return self._directory.partitions(topic)

    def bounds(self, wanted: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        return {key: self._bounds(self._directory.partition(*key)) for key in wanted}

    def _bounds(self, log: LogReader) -> Bounds:
        committed = self._options.isolation == "read_committed"
        return Bounds(log.log_start_offset, log.last_stable_offset if committed else log.high_watermark)

    def offsets_at(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        return {key: self._directory.partition(*key).offset_for_timestamp(time_ms) for key, time_ms in times_ms.items()}

    def marks(self, one: OffsetRange) -> Marks:
        return marks_of(self._directory.partition(one.topic, one.partition), one.start, one.end)

    def identity(self, topic: str, partition: int) -> Identity:
        return Identity.of(self._options.path, topic, partition)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, one: OffsetRange, identity: Identity) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        changed = check_identity(identity, self._options.path, one.topic, one.partition)
        if changed is not None:
            self._report(one, changed)
            return
        path = os.path.join(self._options.path, partition_name(one.topic, one.partition))
        try:
            log = logcore.open(path, read_only=True)
        except LogNotFoundError as error:
            self._report(one, error.reason)
            return
        with log:
            yield from self._columns(log, one)

    def _report(self, one: OffsetRange, reason: str) -> None:
        report_loss(self._options.fail_on_data_loss, self._options.path, one.topic, one.partition, reason)

    def _columns(self, log: LogReader, one: OffsetRange) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        options = self._options
        at = one.start
        end = one.end
        if log.log_start_offset > at or log.high_watermark < end:
            held = f"the log holds {log.log_start_offset} to {log.high_watermark}"
            self._report(one, f"offsets {at} to {end} were planned, and {held}")
            at = max(at, log.log_start_offset)
            end = min(end, log.high_watermark)
        mapping = True
        stopped = -1
        while at < end:
            try:
                for columns, types in typed_columns(
                    log, at, end, isolation=options.isolation, rows=options.batch_rows, size_bytes=options.batch_bytes
                ):
                    behind = int(columns.offsets[-1]) + 1
                    yield columns, types
                    at = behind
                return
            except ResourceError:
                if not mapping:
                    raise
                mapping = False  # a memory limit counts a mapping in full: read piece by piece instead
                avoid_mapping(log)
            except OffsetOutOfRangeError as error:
                log.refresh()
                if log.log_start_offset <= at and at != stopped:
                    stopped = at  # a compaction may have replaced files meanwhile, and lost nothing
                    continue
                if log.log_start_offset <= at:
                    raise
                self._report(one, error.reason)
                at = log.log_start_offset
            except LogcoreError as error:
                if error.offset is None:
                    error.offset = _offset_of(error, at, end)
                raise


def _offset_of(error: LogcoreError, start: int, end: int) -> int:
    """The offset in the head of the batch that an error is about, if that can be right, else where reading began."""
    if error.path is not None and error.position is not None:
        with contextlib.suppress(OSError, LogcoreError):
            handle = OS.open(error.path)
            try:
                found = int.from_bytes(OS.pread(handle, 8, error.position), "big")
            finally:
                OS.close(handle)
            if start <= found < end:
                return found
    return start


def marks_of(log: LogReader, start: int, end: int) -> Marks:
    """The entries of the offset indexes in a stretch of a log."""
    stretch = segments_between(log, start, end)
    empty = np.zeros(0, np.int64)
    total = 0
    before = [empty]
    numbers = [empty]
    positions = [empty]
    for number, segment in enumerate(stretch):
        low = segment.find(start) if segment.base_offset < start else 0
        high = segment.find(end) if number == len(stretch) - 1 else segment.size_bytes
        entries = segment.offset_index.array()["position"].astype(np.int64)
        here = np.concatenate([[low], entries[(entries > low) & (entries < high)]])
        before.append(here - low + total)
        numbers.append(np.full(len(here), number, np.int64))
        positions.append(here)
        total += max(0, high - low)
    segment_of = np.concatenate(numbers)
    position_of = np.concatenate(positions)

    def offset_at(mark: int) -> int | None:
        try:
            batch = stretch[int(segment_of[mark])].batch(int(position_of[mark]))
        except LogcoreError:  # an index is no evidence, and damage is for the task to meet
            return None
        return None if batch is None else batch.base_offset

    return Marks(total, np.concatenate(before), offset_at)
