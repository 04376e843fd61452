"""Conversion of the records of one poll to an Arrow table.

The columns topic and partition are dictionary-encoded: a row contains an index of 4
bytes instead of the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from logcore.consumer.topic_partition import TopicPartition
from logcore.format.columns import ARROW_COLUMNS, RecordColumns, arrow_schema

if TYPE_CHECKING:
    import pyarrow


def table_of(
    columns_by_partition: Mapping[TopicPartition, list[RecordColumns]],
) -> pyarrow.Table:
    """Return a table of all partitions, one after the other.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    plain = arrow_schema(ARROW_COLUMNS)
    import pyarrow as pa

    topics = sorted({partition.topic for partition in columns_by_partition})
    numbers = sorted({partition.partition for partition in columns_by_partition})
    names = pa.array(topics, pa.string())
    partitions = pa.array(numbers, pa.int32())
    schema = pa.schema(
        [
            ("topic", pa.dictionary(pa.int32(), pa.string())),
            ("partition", pa.dictionary(pa.int32(), pa.int32())),
            *plain,
        ]
    )
    batches = []
    for partition, chunks in columns_by_partition.items():
        for columns in chunks:
            arrays: list[Any] = [
                pa.DictionaryArray.from_arrays(
                    _constant(topics.index(partition.topic), len(columns)), names
                ),
                pa.DictionaryArray.from_arrays(
                    _constant(numbers.index(partition.partition), len(columns)),
                    partitions,
                ),
                *columns.to_arrow(ARROW_COLUMNS).columns,
            ]
            batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def _constant(index: int, rows: int) -> Any:
    return np.full(rows, index, np.int32)
