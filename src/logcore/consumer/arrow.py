"""The records of one poll as an Arrow table: the columns of a scan, with topic and
partition as dictionaries.

A dictionary holds each name once, and each row an index into it: a row of a topic costs
4 bytes, not its name.

Nothing here reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from logcore.consumer.topic_partition import TopicPartition
from logcore.format.columns import ARROW_COLUMNS, RecordColumns, arrow_schema

if TYPE_CHECKING:
    import pyarrow


def table_of(found: Mapping[TopicPartition, list[RecordColumns]]) -> pyarrow.Table:
    """All of it, one partition after the other. Raises MissingDependencyError without
    pyarrow.
    """
    plain = arrow_schema(ARROW_COLUMNS)
    import pyarrow as pa

    topics = sorted({partition.topic for partition in found})
    numbers = sorted({partition.partition for partition in found})
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
    for partition, pieces in found.items():
        for columns in pieces:
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
