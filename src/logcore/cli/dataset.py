"""A topic as a dataset of Arrow, for DuckDB.

DuckDB asks a dataset for a scanner each time it reads it, with the columns and the
filter of the query. So what a query does not name is not made, a table can be joined
with itself, and a topic that is not read is not opened.

This module needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset

from logcore.cli.arrow import batches_of, schema_of
from logcore.log import Log
from logcore.logdir import LogDir


class TopicDataset(pyarrow.dataset.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """One topic. Every scanner ends where the first one did."""

    def __init__(
        self, logdir: LogDir, topic: str, columns: Sequence[str], *, is_text: bool
    ) -> None:
        # The class above has no __init__ to call: pyarrow makes its own datasets
        # elsewhere.
        self._logdir = logdir
        self._topic = topic
        self._names = tuple(columns)
        self._is_text = is_text
        self._ends: dict[int, int] | None = None

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self._names, is_text=self._is_text)

    def scanner(self, columns: Any = None, filter: Any = None, **_: Any) -> Any:
        """What DuckDB reads: the columns that it wants, of the rows that pass its
        filter.
        """
        if columns is None:
            wanted = list(self._names)
        else:
            wanted = list(columns)
        # A filter does not tell the columns it is about, but its text has their names
        # in it. One too many is no harm.
        about = ""
        if filter is not None:
            about = str(filter)
        made = [name for name in self._names if name in wanted or name in about]
        logs = self._logs()
        if self._ends is None:
            self._ends = {number: log.high_watermark for number, log in logs.items()}
        starts = {number: log.log_start_offset for number, log in logs.items()}
        batches = batches_of(logs, starts, self._ends, made, is_text=self._is_text)
        return _Scanner(batches, schema_of(wanted, is_text=self._is_text), filter)

    def _logs(self) -> dict[int, Log]:
        return {
            number: self._logdir.partition(self._topic, number)
            for number in self._logdir.partitions(self._topic)
        }


class _Scanner:
    """What DuckDB asks of a scanner. pyarrow's own reads ahead in threads, which wait
    for ever where a LIMIT ends the query before them.
    """

    def __init__(
        self, batches: Iterator[pa.RecordBatch], schema: pa.Schema, filter: Any
    ) -> None:
        self.projected_schema = schema
        self._batches = batches
        self._filter = filter

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._passing())

    def _passing(self) -> Iterator[pa.RecordBatch]:
        names = self.projected_schema.names
        for batch in self._batches:
            if self._filter is not None:
                batch = batch.filter(self._filter)
            if batch.num_rows:
                yield batch.select(names)
