"""A batch read: the plan on the driver, and the tasks that turn ranges of offsets into Arrow batches.

Rules:
- The plan is made of numbers, so that a task that runs again, or later, reads the same records.
- A range is delivered whole or the task fails; what is gone is DataLossError, or a warning where the user said so.
- Arrow batches are cut at maxBatchRows or maxBatchBytes, and small ones are put together: each costs Spark 0.15 ms.
- An error names topic, partition and offset, and has path and position from the library.

This module decides nothing about offsets (planning.py) and knows no column (columns.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

import logcore
from logcore.errors import LogcoreError, LogNotFoundError, OffsetOutOfRangeError, ResourceError
from logcore.fs import OS
from logcore.reader import avoid_mapping, typed_columns
from pyspark_logcore.columns import BatchBuilder
from pyspark_logcore.options import ReadOptions
from pyspark_logcore.planning import Identity, OffsetRange, check_identity, plan, report_loss

if TYPE_CHECKING:
    import pyarrow


_UNKNOWN = Identity()


class RangePartition(InputPartition):
    """One task's share: plain values, because Spark pickles each."""

    def __init__(self, topic: str, partition: int, start: int, end: int, identity: Identity = _UNKNOWN) -> None:
        super().__init__(None)
        self.topic = topic
        self.partition = partition
        self.start = start
        self.end = end
        self.identity = identity

    def __repr__(self) -> str:
        return f"RangePartition({self.topic!r}, {self.partition}, {self.start}, {self.end})"


class LogcoreReader(DataSourceReader):
    """Reads the ranges that its options name, as the columns given."""

    def __init__(self, options: ReadOptions, names: tuple[str, ...]) -> None:
        self.options = options
        self.names = names

    def partitions(self) -> list[InputPartition]:
        """One entry for each task. Raises LogcoreError."""
        ranges = plan(self.options)
        identities = {
            key: Identity.of(self.options.path, *key) for key in {(one.topic, one.partition) for one in ranges}
        }
        return [
            RangePartition(one.topic, one.partition, one.start, one.end, identities[one.topic, one.partition])
            for one in ranges
        ]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Runs in a worker of Spark, once for each task."""
        if not isinstance(partition, RangePartition):  # how Spark says that there are none
            return iter(())
        if self.options.gc_freeze:
            freeze()
        wanted = OffsetRange(partition.topic, partition.partition, partition.start, partition.end)
        changed = check_identity(partition.identity, self.options.path, wanted.topic, wanted.partition)
        if changed is not None:
            report_loss(self.options.fail_on_data_loss, self.options.path, wanted.topic, wanted.partition, changed)
            return iter(())
        return read_range(self.options, self.names, wanted)


def freeze() -> None:
    """Takes what is imported by now out of the collector's sight, once in each worker.

    Spark's worker runs gc.collect() after each task, which with our imports takes 20 ms; frozen, 2 ms.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()


def read_range(options: ReadOptions, names: tuple[str, ...], wanted: OffsetRange) -> Iterator[pyarrow.RecordBatch]:
    """The records of one range as Arrow batches. Errors are raised when the iteration gets there."""
    path = os.path.join(options.path, f"{wanted.topic}-{wanted.partition}")
    builder = BatchBuilder(names, wanted.topic, wanted.partition)
    at = wanted.start
    try:
        for batch, behind in _coalesced(_batches(options, builder, path, wanted), options):
            yield batch
            at = behind
    except LogcoreError as error:
        if error.offset is None:
            error.offset = _offset_at(error, at, wanted.end)
        error.reason = f"topic {wanted.topic} partition {wanted.partition}: {error.reason}"
        raise


def _offset_at(error: LogcoreError, start: int, end: int) -> int:
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


def _batches(options: ReadOptions, builder: BatchBuilder, path: str, wanted: OffsetRange) -> Iterator[tuple[Any, int]]:
    """(Arrow batch, offset behind it), as the log has them."""
    at = wanted.start
    end = wanted.end
    try:
        log = logcore.open(path, read_only=True)
    except LogNotFoundError as error:
        report_loss(options.fail_on_data_loss, path, wanted.topic, wanted.partition, error.reason)
        return
    with log:
        if log.log_start_offset > at or log.high_watermark < end:
            report_loss(
                options.fail_on_data_loss,
                path,
                wanted.topic,
                wanted.partition,
                f"offsets {at} to {end} were planned, and the log holds {log.log_start_offset} to {log.high_watermark}",
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
                    yield builder.build(columns, types), behind
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
                report_loss(options.fail_on_data_loss, path, wanted.topic, wanted.partition, error.reason)
                at = log.log_start_offset


def _coalesced(batches: Iterator[tuple[Any, int]], options: ReadOptions) -> Iterator[tuple[Any, int]]:
    """Puts small batches together, such as those of compressed logs, until a quarter of the limits is reached."""
    import pyarrow as pa

    waiting: list[Any] = []
    rows = size = behind = 0

    def joined() -> Iterator[tuple[Any, int]]:
        # Several come of it where their values are too many for the 32-bit offsets of one. What was reached is said
        # with the last of them only.
        made = waiting if len(waiting) == 1 else pa.Table.from_batches(waiting).combine_chunks().to_batches()
        yield from ((one, before if one is not made[-1] else behind) for one in made)

    before = 0
    for batch, now_behind in batches:
        if waiting and (rows + batch.num_rows > options.batch_rows or size + batch.nbytes > options.batch_bytes):
            yield from joined()
            waiting = []
            rows = 0
            size = 0
            before = behind
        behind = now_behind
        waiting.append(batch)
        rows = rows + batch.num_rows
        size = size + batch.nbytes
        if rows * 4 >= options.batch_rows or size * 4 >= options.batch_bytes:
            yield from joined()
            waiting = []
            rows = 0
            size = 0
            before = behind
    if waiting:
        yield from joined()
