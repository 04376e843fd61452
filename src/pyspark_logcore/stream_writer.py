"""A stream that is written: each micro-batch once, by the id of its query and its
number.

Rules:
- The ids come from the tasks, in whose properties Spark has them; a task that finds
  none fails. Spark makes a new object for each commit, so all that a commit needs is in
  the messages.
- A batch that is replayed is written once, with other tasks or other rows too: the
  first that was published stays.
- A batch without rows writes nothing.
- Output mode complete appends each result, as Spark's Kafka sink does.

staged.py says how rows get into the log.
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

#: Before pyspark 4.1 a stream's writer gets rows instead of Arrow batches.
_HAS_ARROW = hasattr(datasource, "DataSourceStreamArrowWriter")
_Base: Any = (
    datasource.DataSourceStreamArrowWriter
    if _HAS_ARROW
    else datasource.DataSourceStreamWriter
)
_ROWS = 10_000


class LogcoreStreamWriter(_Base):  # type: ignore[misc]
    """Writes one micro-batch. Made for its tasks, and made again for its commit."""

    def __init__(self, planned: StagedWrite, arrow: Any) -> None:
        """arrow: the schema of the batches that rows are turned into, where Spark gives
        rows.
        """
        self.planned = planned
        self._arrow = arrow

    @classmethod
    def of(cls, given: Mapping[str, str], schema: StructType) -> LogcoreStreamWriter:
        """Checks options and columns, and makes the staging directory. Raises
        LogcoreError.
        """
        planned = StagedWrite.plan(parse_stream_write(given), schema)
        return cls(
            planned, None if _HAS_ARROW else _arrow_schema(schema, planned.names)
        )

    def write(self, iterator: Iterator[Any]) -> StagedMessage:
        """Runs in a worker of Spark. Raises LogcoreError."""
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
                "this is no task of a stream: it has no streaming.sql.batchId"
            )
        return _numbered(self.planned, int(batch_id)).stage_here(batches)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Runs on the driver when every task has succeeded: publishes the batch, once.
        Raises LogcoreError.
        """
        staged = [one for one in messages if isinstance(one, StagedMessage)]
        if not staged:
            return
        names = {(one.query, one.batch_id, one.txid) for one in staged}
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
        staging.abort_files(self.planned.txid)  # made with this object, and not used
        done = staging.is_done(query, batchId)
        if done or all(one.is_empty for one in staged):
            staging.abort_files(txid)
            return
        planned.publish(staged, query)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Runs on the driver when the batch failed, also in commit(): removes what was
        staged, unless published.

        Messages may be missing; what they would have named is garbage and goes after a
        day.
        """
        options = self.planned.options
        staging = Staging(OS, options.path)
        staging.abort_files(self.planned.txid)
        for query, txid in {
            (one.query, one.txid) for one in messages if isinstance(one, StagedMessage)
        }:
            if query:
                staging.abort(query, batchId, txid)


def _numbered(planned: StagedWrite, batch_id: int) -> StagedWrite:
    """With the batch as its version: rows without a key go to a partition that each
    attempt chooses alike.
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
    """A header is a Row, which Arrow does not know."""
    if isinstance(value, list):
        return [one if one is None else one.asDict() for one in value]
    return value
