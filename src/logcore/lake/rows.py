"""Rows of a table: records as Arrow columns, with a column that partitions the table.

The columns are partition, offset, timestamp, timestamp_type, key, value and headers. Keys
and values are binary or text. The formats of tables have microseconds, so `timestamp` has
them too.

Rules:
- A text is decoded as UTF-8. A key or value that is not UTF-8 is refused, because its
  bytes could not be restored from the text.
- `timestamp_type` is 0 for CreateTime, 1 for LogAppendTime and -1 for none.

pyarrow is imported in the functions that use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from logcore.errors import InvalidTimestampError, RecordRefusedError
from logcore.format.columns import RecordColumns
from logcore.lake.target import TableLayout
from logcore.lake.values import ValueColumns

if TYPE_CHECKING:
    import pyarrow

#: The first and the last millisecond of the years 1 to 9999. pyiceberg fails at other
#: years, without naming the record.
_MS_MIN: Final = -62_135_596_800_000
_MS_MAX: Final = 253_402_300_799_999
_DAY_MS: Final = 86_400_000
#: Minimum number of rows of a batch that is written, except the last one.
_BATCH_ROWS: Final = 16_384


def record_schema(layout: TableLayout, *, needs_day_column: bool) -> pyarrow.Schema:
    """Return the columns of a table before any columns of values."""
    import pyarrow as pa

    kinds = {"bytes": pa.binary(), "text": pa.string()}
    fields = [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestamp_type", pa.int32()),
        ("key", kinds[layout.key]),
    ]
    if layout.value in kinds:
        fields.append(("value", kinds[layout.value]))
    pair = pa.struct([("key", pa.string()), ("value", kinds[layout.key])])
    fields.append(("headers", pa.list_(pair)))
    if layout.header_name is not None:
        fields.append((layout.partition_column, pa.string()))
    elif layout.partition_by == "day" and needs_day_column:
        fields.append(("day", pa.date32()))
    return pa.schema(fields)


class RowBuilder:
    """Collects the rows of one commit after the other.

    `schema` contains the columns of the records. `values` collects the columns of
    values, and is None if the values are one column of `schema`.
    """

    def __init__(
        self, layout: TableLayout, schema: pyarrow.Schema, values: ValueColumns | None
    ) -> None:
        self._layout = layout
        self._schema = schema
        self._values = values
        self._batches: list[pyarrow.RecordBatch] = []
        #: Batches that are joined when they have enough rows: pyiceberg takes a
        #: millisecond for each batch.
        self._small: list[pyarrow.RecordBatch] = []
        self._small_rows = 0
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The size of the collected rows in Arrow's format."""
        if self._values is None:
            return self._size_bytes
        return self._size_bytes + self._values.size_bytes

    def add(
        self,
        partition: int,
        columns: RecordColumns,
        timestamp_types: npt.NDArray[np.int32],
        path: str,
    ) -> None:
        """Add records of one partition, of the log at `path`.

        `timestamp_types` has shape (rows,).

        Raises:
            RecordRefusedError: a key or value is not text, or does not fit the columns.
            InvalidTimestampError: a timestamp does not fit the table.
        """
        import pyarrow as pa

        rows = len(columns)
        arrays: dict[str, Any] = {
            "partition": pa.array(np.full(rows, partition, np.int32)),
            "offset": pa.array(columns.offsets),
            "timestamp": _microseconds(columns, path),
            "timestamp_type": pa.array(timestamp_types),
            "key": columns.arrow_array("key"),
            "headers": columns.arrow_array("headers"),
        }
        if self._layout.key == "text":
            arrays["key"] = _text(arrays["key"], "key", columns, path)
            arrays["headers"] = _text_headers(arrays["headers"], columns, path)
        if "value" in self._schema.names:
            arrays["value"] = columns.arrow_array("value")
            if self._layout.value == "text":
                arrays["value"] = _text(arrays["value"], "value", columns, path)
        name = self._layout.header_name
        if name is not None:
            arrays[self._layout.partition_column] = _header_values(columns, name, path)
        elif "day" in self._schema.names:
            arrays["day"] = _days(columns)
        batch = pa.RecordBatch.from_arrays(
            [arrays[field.name] for field in self._schema], schema=self._schema
        )
        if self._values is not None:
            self._values.add(columns.values(), columns.offsets.tolist(), path)
        self._small.append(batch)
        self._small_rows += rows
        if self._small_rows >= _BATCH_ROWS:
            self._join_small()
        self._size_bytes += batch.nbytes

    def finish_table(self) -> pyarrow.Table:
        """Return the collected rows, and begin again without rows."""
        import pyarrow as pa

        self._join_small()
        table = pa.Table.from_batches(self._batches, self._schema)
        if self._values is not None:
            for name, column in self._values.finish_columns().items():
                table = table.append_column(name, column)
        self._batches = []
        self._size_bytes = 0
        return table

    def _join_small(self) -> None:
        import pyarrow as pa

        if self._small:
            self._batches.append(pa.concat_batches(self._small))
        self._small = []
        self._small_rows = 0


def _microseconds(columns: RecordColumns, path: str) -> Any:
    import pyarrow as pa

    times = columns.timestamps_ms
    outside = (times > _MS_MAX) | (times < _MS_MIN)
    if outside.any():
        row = int(outside.argmax())
        raise InvalidTimestampError(
            "the record's time does not fit a table; is it in microseconds instead of milliseconds?",
            path=path,
            offset=int(columns.offsets[row]),
            expected="the years 1 to 9999",
            found=f"{times[row]} ms",
        )
    return pa.array(times * 1000, pa.timestamp("us", "UTC"), mask=times == -1)


def _days(columns: RecordColumns) -> Any:
    import pyarrow as pa

    times = columns.timestamps_ms
    days = (times // _DAY_MS).astype(np.int32)
    return pa.array(days, pa.date32(), mask=times == -1)


def _text(array: Any, what: str, columns: RecordColumns, path: str) -> Any:
    import pyarrow as pa

    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid as error:
        named = ((row, what, value) for row, value in enumerate(array.to_pylist()))
        raise _not_utf8(named, columns, path) from error


def _not_utf8(
    values: Iterable[tuple[int, str, bytes | None]], columns: RecordColumns, path: str
) -> RecordRefusedError:
    """Return the error for the first value that is not UTF-8.

    Each element of `values` is a row, the name of its value for the error, and the value.
    """
    for row, what, value in values:
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            return RecordRefusedError(
                f"the {what} is not UTF-8: export bytes instead of text to a new table",
                path=path,
                offset=int(columns.offsets[row]),
                found=repr((value or b"")[:40]),
            )
    raise AssertionError("one of the values is not UTF-8")


def _text_headers(array: Any, columns: RecordColumns, path: str) -> Any:
    import pyarrow as pa

    values = array.values.field("value")
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid as error:
        named = (
            (row, f"header {pair['key']!r}", pair["value"])
            for row, pairs in enumerate(array.to_pylist())
            for pair in pairs
        )
        raise _not_utf8(named, columns, path) from error
    pairs = pa.StructArray.from_arrays(
        [array.values.field("key"), texts], ["key", "value"]
    )
    return pa.ListArray.from_arrays(array.offsets, pairs)


def _header_values(columns: RecordColumns, name: str, path: str) -> Any:
    """Return the first header of this name of each record as text, null if none."""
    import pyarrow as pa

    values: list[str | None] = [None] * len(columns)
    for row in np.flatnonzero(columns.header_counts).tolist():
        for header, value in columns.headers(row):
            if header != name:
                continue
            try:
                if value is not None:
                    values[row] = value.decode()
            except UnicodeDecodeError as error:
                raise RecordRefusedError(
                    f"the header {name!r} is not UTF-8 and cannot name a partition of the table",
                    path=path,
                    offset=int(columns.offsets[row]),
                    found=repr((value or b"")[:40]),
                ) from error
            break
    return pa.array(values, pa.string())
