"""A topic as an Arrow dataset, for DuckDB.

DuckDB requests a scanner from the dataset for each read, with the columns and the filter
of the query. Columns that a query does not name are therefore not built. A table can be
joined with itself, and a topic that is not read is not opened.

This module needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset

from logcore.directory.interface import PartitionDirectory
from logcore.log import Log
from logcore.query.arrow_batches import batches_of, schema_of

if TYPE_CHECKING:
    from logcore.schemas import ValueDecoder


class TopicDataset(pyarrow.dataset.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """Dataset of one topic. All scanners end at the offsets of the first scanner."""

    def __init__(
        self,
        directory: PartitionDirectory,
        topic: str,
        columns: Sequence[str],
        *,
        is_text: bool,
        decoder: ValueDecoder | None = None,
    ) -> None:
        # super().__init__() cannot be called: pyarrow constructs its own datasets in C++.
        self._directory = directory
        self._topic = topic
        self._names = tuple(columns)
        self._is_text = is_text
        self._decoder = decoder
        self._ends: dict[int, int] | None = None

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self._names, is_text=self._is_text)

    def scanner(self, columns: Any = None, filter: Any = None, **_: Any) -> Any:
        """Return a scanner of these columns, for the rows that pass the filter."""
        if columns is None:
            wanted = list(self._names)
        else:
            wanted = list(columns)
        # A filter has no list of its columns, but its text contains their names. An
        # additional column does no harm.
        about = ""
        if filter is not None:
            about = str(filter)
        made = [name for name in self._names if name in wanted or name in about]
        logs = self._logs()
        if self._ends is None:
            self._ends = {number: log.high_watermark for number, log in logs.items()}
        starts = {number: log.log_start_offset for number, log in logs.items()}
        batches = batches_of(
            logs,
            starts,
            self._ends,
            made,
            is_text=self._is_text,
            decoder=self._decoder,
        )
        return _Scanner(batches, schema_of(wanted, is_text=self._is_text), filter)

    def _logs(self) -> dict[int, Log]:
        return {
            number: self._directory.partition(self._topic, number)
            for number in self._directory.partitions(self._topic)
        }


class _Scanner:
    """The part of a scanner that DuckDB uses.

    pyarrow's own scanner reads ahead in threads, which would wait forever if a LIMIT
    ended the query early.
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
