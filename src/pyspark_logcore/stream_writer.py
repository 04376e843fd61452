"""Stream writer: writes each micro-batch once, identified by its query id and its batch
number.

Rules:
- Tasks read both ids from their Spark properties; a task without the ids fails. Spark
  creates a new object for each commit, so the messages contain everything that a commit
  needs.
- A replayed batch is written once, even if its tasks or rows differ: the first published
  batch remains.
- A batch without rows writes no records.
- Output mode complete appends each result, as Spark's Kafka sink does.

staged.py stages and publishes the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from pyspark.sql import datasource
from pyspark.sql.datasource import WriterCommitMessage

from logcore.errors import InvalidConfigError
from logcore.fs import OS
from logcore.staging.publishing import Staging
from pyspark_logcore.options import parse_stream_write
from pyspark_logcore.staged import StagedMessage, StagedWrite

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Before pyspark 4.1, Spark passes rows instead of Arrow batches to a stream writer.
_HAS_ARROW = hasattr(datasource, "DataSourceStreamArrowWriter")
_Base: Any = (
    datasource.DataSourceStreamArrowWriter
    if _HAS_ARROW
    else datasource.DataSourceStreamWriter
)
_ROWS = 10_000


class LogcoreStreamWriter(_Base):  # type: ignore[misc]
    """Writes one micro-batch; one object serves the tasks, and another one the commit."""

    def __init__(self, planned: StagedWrite, arrow: Any) -> None:
        """Create a writer.

        `arrow` is the schema for the conversion of rows, if Spark passes rows.
        """
        self.planned = planned
        self._arrow = arrow

    @classmethod
    def of(cls, given: Mapping[str, str], schema: StructType) -> LogcoreStreamWriter:
        """Check options and columns, and create the staging directory.

        Raises:
            LogcoreError: an option, a column or the directory is unsuitable.
        """
        planned = StagedWrite.plan(parse_stream_write(given), schema)
        return cls(
            planned, None if _HAS_ARROW else _arrow_schema(schema, planned.names)
        )

    def write(self, iterator: Iterator[Any]) -> StagedMessage:
        """Stage the rows of one task; runs in a worker of Spark.

        Raises:
            LogcoreError: a row cannot be staged.
        """
        from pyspark import TaskContext

        if self._arrow is None:
            batches = iterator
        else:
            batches = _batches(iterator, self._arrow)
        context = TaskContext.get()
        batch_id = None
        if context is not None:
            batch_id = context.getLocalProperty("streaming.sql.batchId")
        if batch_id is None:
            raise InvalidConfigError(
                "this is not a task of a stream: it has no streaming.sql.batchId"
            )
        return _numbered(self.planned, int(batch_id)).stage_here(batches)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Publish the batch once; runs on the driver after all tasks have succeeded.

        Raises:
            LogcoreError: the write was refused, failed or timed out.
        """
        staged = [message for message in messages if isinstance(message, StagedMessage)]
        if not staged:
            return
        names = {(message.query, message.batch_id, message.txid) for message in staged}
        query, batch_id, txid = next(iter(names))
        if len(names) != 1 or not query or batch_id != batchId:
            raise InvalidConfigError(
                "the tasks of this batch do not belong together",
                expected=f"one query, batch {batchId}",
                found=sorted(map(str, names)),
            )
        options = attrs.evolve(
            self.planned.options, app_id=query, version=batchId, given=True
        )
        planned = attrs.evolve(self.planned, options=options, txid=txid)
        staging = Staging(OS, options.path)
        staging.abort_files(self.planned.txid)  # created with this object, but unused
        done = staging.is_done(query, batchId)
        if done or all(message.is_empty for message in staged):
            staging.abort_files(txid)
            return
        planned.publish(staged, query)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Remove the staged files, unless they are published; runs on the driver after the
        batch failed, also in commit().

        Messages may be missing. The files that they would have named are garbage and are
        deleted after a day.
        """
        options = self.planned.options
        staging = Staging(OS, options.path)
        staging.abort_files(self.planned.txid)
        for query, txid in {
            (message.query, message.txid)
            for message in messages
            if isinstance(message, StagedMessage)
        }:
            if query:
                staging.abort(query, batchId, txid)


def _numbered(planned: StagedWrite, batch_id: int) -> StagedWrite:
    """Return the plan with the batch number as its version.

    The version makes each attempt choose the same partition for rows without a key.
    """
    return attrs.evolve(
        planned, options=attrs.evolve(planned.options, version=batch_id)
    )


def _arrow_schema(schema: StructType, names: tuple[str, ...]) -> Any:
    import pyarrow as pa

    header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    types = {
        "binary": pa.binary(),
        "string": pa.string(),
        "int": pa.int32(),
        "timestamp": pa.timestamp("us", "UTC"),
    }
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    return pa.schema(
        [pa.field(name, types.get(found[name], pa.list_(header))) for name in names]
    )


def _batches(rows: Iterator[Any], schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    waiting: list[dict[str, Any]] = []
    for row in rows:
        waiting.append({name: _plain(row[name]) for name in schema.names})
        if len(waiting) == _ROWS:
            yield pa.RecordBatch.from_pylist(waiting, schema=schema)
            waiting = []
    if waiting:
        yield pa.RecordBatch.from_pylist(waiting, schema=schema)


def _plain(value: Any) -> Any:
    """Convert a header, which is a Row, to a value that Arrow accepts."""
    if isinstance(value, list):
        return [offset if offset is None else offset.asDict() for offset in value]
    return value
