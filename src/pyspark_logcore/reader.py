"""A batch read: the plan on the driver, and the tasks that turn ranges of offsets into Arrow batches.

Rules:
- The plan is made of numbers, so that a task that runs again, or later, reads the same records.
- Arrow batches are cut at maxBatchRows or maxBatchBytes, and small ones are put together: each costs Spark 0.15 ms.
- An error names topic, partition and offset, and has path and position from the library.

This module decides nothing about offsets (planning.py), knows no column (columns.py) and no file (origin.py).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from logcore.errors import LogcoreError
from pyspark_logcore.columns import BatchBuilder
from pyspark_logcore.identity import Identity
from pyspark_logcore.options import ReadOptions
from pyspark_logcore.origin import Origin, origin_of
from pyspark_logcore.planning import plan
from pyspark_logcore.ranges import OffsetRange

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
        with origin_of(self.options) as origin:
            ranges = plan(self.options, origin)
            keys = {(one.topic, one.partition) for one in ranges}
            identities = {key: origin.identity(*key) for key in keys}
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
        return read_range(self.options, self.names, wanted, partition.identity)


def freeze() -> None:
    """Takes what is imported by now out of the collector's sight, once in each worker.

    Spark's worker runs gc.collect() after each task, which with our imports takes 20 ms; frozen, 2 ms.
    """
    if gc.get_freeze_count() == 0:
        gc.freeze()


def read_range(
    options: ReadOptions, names: tuple[str, ...], wanted: OffsetRange, identity: Any
) -> Iterator[pyarrow.RecordBatch]:
    """The records of one range as Arrow batches. Errors are raised when the iteration gets there."""
    builder = BatchBuilder(names, wanted.topic, wanted.partition)
    at = wanted.start
    try:
        with origin_of(options) as origin:
            for batch, behind in _coalesced(_batches(origin, builder, wanted, identity), options):
                yield batch
                at = behind
    except LogcoreError as error:
        if error.offset is None:
            error.offset = at
        error.reason = f"topic {wanted.topic} partition {wanted.partition}: {error.reason}"
        raise


def _batches(origin: Origin, builder: BatchBuilder, wanted: OffsetRange, identity: Any) -> Iterator[tuple[Any, int]]:
    """(Arrow batch, offset behind it), as the origin has them."""
    for columns, types in origin.read(wanted, identity):
        behind = int(columns.offsets[-1]) + 1
        yield builder.build(columns, types), behind


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
