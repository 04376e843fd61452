"""Batch reader: the plan on the driver, and the tasks that turn ranges of offsets into
Arrow batches.

Rules:
- The plan consists of offsets, so that a task that runs again, or later, reads the same
  records.
- Arrow batches end at maxBatchRows or maxBatchBytes. Small batches are joined, because
  each batch costs Spark 0.15 ms.
- An error names topic, partition and offset, and has path and position from the
  library.

planning.py chooses offsets, columns.py defines columns, and origin.py opens files.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from logcore.errors import LogcoreError
from pyspark_logcore.columns import BatchBuilder
from pyspark_logcore.options import ReadOptions
from pyspark_logcore.origin import Origin, origin_of
from pyspark_logcore.planning import plan
from pyspark_logcore.ranges import OffsetRange

if TYPE_CHECKING:
    import pyarrow


class RangePartition(InputPartition):
    """The ranges of one task, each with the identity of its log.

    The object holds plain values, because Spark pickles it.
    """

    def __init__(self, ranges: Sequence[tuple[OffsetRange, Any]]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)

    def __repr__(self) -> str:
        return f"RangePartition({[entry for entry, _ in self.ranges]})"


class LogcoreReader(DataSourceReader):
    """Reads the ranges that its options name, as the given columns."""

    def __init__(self, options: ReadOptions, names: tuple[str, ...]) -> None:
        self.options = options
        self.names = names

    def partitions(self) -> list[InputPartition]:
        """Return one entry for each task.

        Raises:
            LogcoreError: the offsets cannot be planned.
        """
        with origin_of(self.options) as origin:
            return shares(plan(self.options, origin), origin)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read the ranges of one task; runs in a worker of Spark."""
        return read_share(self.options, self.names, partition)


def shares(
    tasks: Sequence[Sequence[OffsetRange]], origin: Origin
) -> list[InputPartition]:
    """Return the plan of each task. Spark sends it to the task.

    Raises:
        LogcoreError: the ranges cannot be divided.
    """
    keys = {
        (offset_range.topic, offset_range.partition)
        for task in tasks
        for offset_range in task
    }
    identities = {key: origin.identity(*key) for key in keys}
    return [
        RangePartition(
            [
                (offset_range, identities[offset_range.topic, offset_range.partition])
                for offset_range in task
            ]
        )
        for task in tasks
    ]


def read_share(
    options: ReadOptions, names: tuple[str, ...], partition: InputPartition
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the records of a task's ranges as Arrow batches.

    Errors are raised when the iteration reaches the failing range.
    """
    if not isinstance(partition, RangePartition):  # Spark's marker of an empty plan
        return
    if options.gc_freeze:
        freeze_gc()
    with origin_of(options) as origin:
        batches = (
            batch
            for entry in partition.ranges
            for batch in _batches(origin, names, *entry)
        )
        yield from _coalesced(batches, options)


def freeze_gc() -> None:
    """Exclude the objects of imported modules from garbage collections, once per worker.

    Spark's worker runs gc.collect() after each task. A collection takes 20 ms with the
    imports of this package, and 2 ms after freezing them.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()


def _batches(
    origin: Origin, names: tuple[str, ...], offset_range: OffsetRange, identity: Any
) -> Iterator[Any]:
    """Yield the Arrow batches of one range in the sizes that the origin returns."""
    builder = BatchBuilder(names, offset_range.topic, offset_range.partition)
    at = offset_range.start
    try:
        for columns, types in origin.read(offset_range, identity):
            next_offset = int(columns.offsets[-1]) + 1
            yield builder.build(columns, types)
            at = next_offset
    except LogcoreError as error:
        if error.offset is None:
            error.offset = at
        error.reason = f"topic {offset_range.topic} partition {offset_range.partition}: {error.reason}"
        raise


def _coalesced(batches: Iterator[Any], options: ReadOptions) -> Iterator[Any]:
    """Join small batches, such as batches of compressed logs, up to a quarter of the
    limits.
    """
    waiting: list[Any] = []
    rows = 0
    size = 0
    for batch in batches:
        if waiting and (
            rows + batch.num_rows > options.batch_rows
            or size + batch.nbytes > options.batch_bytes
        ):
            yield from _joined(waiting)
            waiting = []
            rows = 0
            size = 0
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows * 4 >= options.batch_rows or size * 4 >= options.batch_bytes:
            yield from _joined(waiting)
            waiting = []
            rows = 0
            size = 0
    if waiting:
        yield from _joined(waiting)


def _joined(batches: list[Any]) -> list[Any]:
    """Join batches into one, or into several if the values exceed 32-bit offsets."""
    import pyarrow as pa

    if len(batches) == 1:
        return batches
    combined: list[Any] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return combined
