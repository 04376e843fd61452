"""Columns of a read: Kafka's eight columns as Spark types and Arrow types, and their
construction from decoded records.

| column        | Spark                                   | null when                     |
|---------------|-----------------------------------------|-------------------------------|
| key, value    | binary                                  | it is null in the record      |
| topic         | string                                  | never                         |
| partition     | int                                     | never                         |
| offset        | long                                    | never                         |
| timestamp     | timestamp                               | never; -1 ms when it has none |
| timestampType | int: 0 CreateTime, 1 LogAppendTime, -1  | never                         |
| headers       | array<struct<key: string, value: binary>> | the record has none         |

Rules:
- Spark compares the first batch with its own schema: names, order, types and
  nullability must be exactly these.
- No Python per record, except for records that have headers.

This module reads no files: reader.py passes decoded records to it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from logcore.errors import InvalidConfigError, InvalidTimestampError
from logcore.format.columns import RecordColumns

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import DataType, StructType

#: In the order of Spark's Kafka source; headers only with includeHeaders=true.
PLAIN: Final = (
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
)
ALL: Final = (*PLAIN, "headers")
#: Milliseconds beyond which microseconds do not fit into 64 bits.
_MS_MAX: Final = 9_223_372_036_854_775


def spark_schema(names: Sequence[str]) -> StructType:
    """Return the columns as Spark types, all nullable."""
    from pyspark.sql.types import StructField, StructType

    types = _spark_types()
    return StructType([StructField(name, types[name], True) for name in names])


def _spark_types() -> dict[str, DataType]:
    from pyspark.sql import types as sql

    header = sql.StructType(
        [
            sql.StructField("key", sql.StringType()),
            sql.StructField("value", sql.BinaryType()),
        ]
    )
    return {
        "key": sql.BinaryType(),
        "value": sql.BinaryType(),
        "topic": sql.StringType(),
        "partition": sql.IntegerType(),
        "offset": sql.LongType(),
        "timestamp": sql.TimestampType(),
        "timestampType": sql.IntegerType(),
        "headers": sql.ArrayType(header),
    }


def chosen(schema: StructType, *, include_headers: bool) -> tuple[str, ...]:
    """Return the columns of a schema that was given to Spark.

    Raises:
        InvalidConfigError: a column of the schema is unknown.
    """
    if not schema.fields:
        raise InvalidConfigError(
            "a schema without columns; name at least one, such as offset BIGINT"
        )
    types = _spark_types()
    names = []
    for field in schema.fields:
        if field.name not in types:
            near = {name.lower(): name for name in types}.get(field.name.lower())
            if near:
                hint = f"write {near!r}"
            else:
                hint = f"there are {', '.join(types)}"
            raise InvalidConfigError(
                f"there is no column {field.name!r} in a log; {hint}"
            )
        if field.name == "headers" and not include_headers:
            raise InvalidConfigError(
                "the column headers needs the option includeHeaders=true"
            )
        if field.dataType.simpleString() != types[field.name].simpleString():
            raise InvalidConfigError(
                f"type of the column {field.name!r}; cast it after reading",
                expected=types[field.name].simpleString(),
                found=field.dataType.simpleString(),
            )
        if not field.nullable:
            raise InvalidConfigError(
                f"the column {field.name!r} must be nullable; leave NOT NULL out"
            )
        if field.name in names:
            raise InvalidConfigError(f"the column {field.name!r} is named twice")
        names.append(field.name)
    return tuple(names)


def arrow_schema(names: Sequence[str]) -> pyarrow.Schema:
    """Return the columns as the Arrow schema that Spark accepts for them."""
    types = _arrow_types()
    import pyarrow as pa

    return pa.schema([pa.field(name, types[name], True) for name in names])


@functools.cache
def _arrow_types() -> dict[str, Any]:
    import pyarrow as pa

    return {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestampType": pa.int32(),
        "headers": pa.list_(
            pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
        ),
    }


class BatchBuilder:
    """Makes Arrow batches of one partition's records. Columns that are equal in all
    rows are created once and sliced.
    """

    def __init__(self, names: Sequence[str], topic: str, partition: int) -> None:
        self.schema = arrow_schema(names)
        self._topic = topic
        self._partition = partition
        self._constants: tuple[int, Any, Any] = (0, None, None)

    def build(
        self, columns: RecordColumns, timestamp_types: npt.NDArray[np.int32]
    ) -> pyarrow.RecordBatch:
        """Return the batch for Spark. `timestamp_types` is the column timestampType, of
        shape (rows,).
        """
        import pyarrow as pa

        rows = len(columns)
        if rows > self._constants[0]:
            size = max(rows, 32_768)
            topic = pa.repeat(pa.scalar(self._topic, pa.string()), size)
            self._constants = (
                size,
                topic,
                pa.array(np.full(size, self._partition, np.int32)),
            )
        arrays: list[Any] = []
        for name in self.schema.names:
            if name in ("key", "value"):
                arrays.append(columns.arrow_array(name))
            elif name == "topic":
                arrays.append(self._constants[1].slice(0, rows))
            elif name == "partition":
                arrays.append(self._constants[2].slice(0, rows))
            elif name == "offset":
                arrays.append(pa.array(columns.offsets))
            elif name == "timestamp":
                arrays.append(_microseconds(columns))
            elif name == "timestampType":
                arrays.append(pa.array(timestamp_types))
            else:
                arrays.append(_headers(columns))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _microseconds(columns: RecordColumns) -> Any:
    import pyarrow as pa

    times = columns.timestamps_ms
    late = (times > _MS_MAX) | (times < -_MS_MAX)
    if late.any():
        row = int(late.argmax())
        raise InvalidTimestampError(
            "the record's time does not fit into Spark's microseconds; leave the column timestamp out with .schema()",
            offset=int(columns.offsets[row]),
            found=int(times[row]),
        )
    return pa.Array.from_buffers(
        _arrow_types()["timestamp"], len(times), [None, pa.py_buffer(times * 1000)]
    )


def _headers(columns: RecordColumns) -> Any:
    import pyarrow as pa

    kind = _arrow_types()["headers"]
    counts = columns.header_counts
    if not counts.any():
        return pa.nulls(len(columns), kind)
    lists = columns.arrow_array("headers")
    if counts.all():
        return lists
    validity = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    return pa.Array.from_buffers(
        kind, len(columns), [validity, lists.buffers()[1]], children=[lists.values]
    )
