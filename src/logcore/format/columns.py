"""Records as columns: numpy arrays that point into the bytes of their batches.

One decode serves all consumers: values, Record objects and Arrow arrays are built from
these columns.

Rules:
- Positions are byte positions in `data`. `data` is a view of a mapped segment, of bytes
  that were read, or of one inflated batch. The view remains valid as long as the columns
  exist, and is never written.
- A size of -1 is a null key or value; a size of 0 is an empty key or value.
- Rows are in log order. Offsets may have gaps (compaction), but in a valid log they
  increase.

The kernels decode batches. This module opens no files.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from logcore.distribution import install_command
from logcore.errors import (
    InvalidConfigError,
    InvalidRecordError,
    InvalidTimestampError,
    MissingDependencyError,
    nearest_name,
)
from logcore.kernels import Record, kernel, layout
from logcore.kernels.layout import InputColumn

if TYPE_CHECKING:
    import pyarrow

#: Arrow columns of a scan of one log, in their usual order.
ARROW_COLUMNS: Final = ("offset", "timestamp", "key", "value", "headers")
#: Arrow columns of a scan of a topic. A scan of one log has the first two only if they
#: are requested.
TOPIC_COLUMNS: Final = ("topic", "partition", *ARROW_COLUMNS)
#: Number of rows of a constant Arrow array that is kept for reuse. It is the maximum of
#: a run of decoded batches.
_CONSTANT_ROWS: Final = 32_768


@attrs.frozen(eq=False, repr=False)
class RecordColumns:
    """Decoded records of one or more batches, each array of shape (rows,) and
    C-contiguous.

    A size of -1 means null.
    """

    #: The bytes to which positions refer.
    data: memoryview
    offsets: npt.NDArray[np.int64]
    #: -1 if a record has no timestamp.
    timestamps_ms: npt.NDArray[np.int64]
    key_positions: npt.NDArray[np.int32]
    key_sizes: npt.NDArray[np.int32]
    value_positions: npt.NDArray[np.int32]
    value_sizes: npt.NDArray[np.int32]
    #: The start of the first header of each record.
    header_positions: npt.NDArray[np.int32]
    header_counts: npt.NDArray[np.int32]
    #: The topic of all rows. None in columns that were not created by a scan, or if the
    #: directory of the log is not named like a partition.
    topic: str | None = attrs.field(default=None, kw_only=True)
    #: The partition of all rows. None if `topic` is None.
    partition: int | None = attrs.field(default=None, kw_only=True)

    @classmethod
    def from_block(
        cls, data: memoryview, block: npt.NDArray[np.uint8], rows: int
    ) -> RecordColumns:
        """Create columns over a block that a kernel filled for exactly this many rows,
        without copies.
        """
        # The kernel fills two rows of int64, then six rows of int32. Unpacking a table
        # returns its rows as views. Eight separate slices and casts take twice the time.
        wide: npt.NDArray[np.int64] = np.ndarray((2, rows), np.int64, block)
        narrow: npt.NDArray[np.int32] = np.ndarray(
            (6, rows), np.int32, block, 16 * rows
        )
        return cls(data, *wide, *narrow)

    @classmethod
    def from_records(cls, records: Iterable[Record]) -> RecordColumns:
        """Create columns from Record objects, such as records of the old formats; their
        bytes are copied.
        """
        data = bytearray()
        rows = []
        for offset, timestamp_ms, key, value, headers in records:
            row = [offset, timestamp_ms]
            for piece in (key, value):
                size = -1
                if piece is not None:
                    size = len(piece)
                row += [len(data), size]
                data += piece or b""
            if headers:
                raise InvalidRecordError(
                    "records of the old formats have no headers", offset=offset
                )
            rows.append([*row, len(data), 0])
        table = np.array(rows, np.int64).reshape(len(rows), 8).T
        return cls(
            memoryview(bytes(data)),
            np.ascontiguousarray(table[0]),
            np.ascontiguousarray(table[1]),
            *(np.ascontiguousarray(column, np.int32) for column in table[2:]),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def __repr__(self) -> str:
        span = ""
        if len(self):
            span = f" offsets {self.offsets[0]}..{self.offsets[-1]}"
        return f"<RecordColumns rows={len(self)}{span}>"

    def __getitem__(self, rows: slice | npt.NDArray[np.bool_]) -> RecordColumns:
        """Return the rows of a slice or of a mask; a slice with step 1 copies nothing."""
        return self._with(np.ascontiguousarray(array[rows]) for array in self._arrays())

    def between(self, start: int, end: int) -> RecordColumns:
        """Return the records with start <= offset < end."""
        if not len(self) or (self.offsets[0] >= start and self.offsets[-1] < end):
            return self
        # In a valid log offsets increase, so the rows to keep are contiguous, and a slice
        # copies nothing. Otherwise a mask selects the rows.
        keep = np.flatnonzero((self.offsets >= start) & (self.offsets < end))
        if len(keep) and keep[-1] - keep[0] + 1 == len(keep):
            return self[int(keep[0]) : int(keep[-1]) + 1]
        return self._with(array[keep] for array in self._arrays())

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Return all fields except data, topic and partition."""
        return attrs.astuple(self, recurse=False)[1:-2]

    def _with(self, arrays: Iterable[npt.NDArray[Any]]) -> RecordColumns:
        columns = RecordColumns(self.data, *arrays)
        columns.name(self.topic, self.partition)
        return columns

    def name(self, topic: str | None, partition: int | None) -> None:
        """Set the topic and the partition; called by the scan that created the columns."""
        # A copy with the two fields would take 3 us, an eighth of the time for decoding
        # a batch of 16 KiB.
        object.__setattr__(self, "topic", topic)
        object.__setattr__(self, "partition", partition)

    def keys(self) -> list[bytes | None]:
        """Return the keys as new bytes objects."""
        return kernel.bytes_list(self.data, self.key_positions, self.key_sizes)

    def values(self) -> list[bytes | None]:
        """Return the values as new bytes objects."""
        return kernel.bytes_list(self.data, self.value_positions, self.value_sizes)

    def headers(self, row: int) -> layout.Headers:
        """Return the headers of one record, in order."""
        at = int(self.header_positions[row])
        headers = []
        for _ in range(int(self.header_counts[row])):
            size, at = _varint(self.data, at)
            name = str(self.data[at : at + size], "utf-8", layout.HEADER_NAME_ERRORS)
            size, at = _varint(self.data, at + size)
            value = None
            if size >= 0:
                value = bytes(self.data[at : at + size])
                at += size
            headers.append((name, value))
        return tuple(headers)

    def records(self) -> Iterator[Record]:
        """Yield the rows as Record objects."""
        keys = self.keys()
        values = self.values()
        times = self.timestamps_ms.tolist()
        for row, offset in enumerate(self.offsets.tolist()):
            yield Record(offset, times[row], keys[row], values[row], self.headers(row))

    def to_arrow(self, columns: Iterable[str] = ARROW_COLUMNS) -> pyarrow.RecordBatch:
        """Return a pyarrow.RecordBatch with these columns, of schema
        arrow_schema(columns).

        Keys and values are copied into Arrow's layout; offsets and timestamps are
        shared.

        Raises:
            MissingDependencyError: pyarrow is not installed.
        """
        schema = arrow_schema(columns)
        pa = _pyarrow()
        arrays = [_ARROW_BUILDERS[field.name](self, pa) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def arrow_array(self, column: str) -> Any:
        """Return one of ARROW_COLUMNS as a pyarrow array.

        A record without headers has an empty list.
        """
        return _ARROW_BUILDERS[column](self, _pyarrow())

    def _binary(
        self, pa: Any, positions: npt.NDArray[np.int32], sizes: npt.NDArray[np.int32]
    ) -> Any:
        offsets, joined = kernel.gather(self.data, positions, sizes)
        nulls = sizes < 0
        validity = None
        if nulls.any():
            validity = pa.py_buffer(np.packbits(~nulls, bitorder="little"))
        buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(joined)]
        return pa.Array.from_buffers(pa.binary(), len(self), buffers)

    def _header_lists(self, pa: Any) -> Any:
        counts = self.header_counts
        if not counts.any():
            return _no_headers(len(self))
        starts = np.zeros(len(self) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        pairs = [
            pair for row in np.flatnonzero(counts) for pair in self.headers(int(row))
        ]
        names = pa.array([_printable(name) for name, _ in pairs], pa.string())
        values = pa.array([value for _, value in pairs], pa.binary())
        items = pa.StructArray.from_arrays([names, values], ["key", "value"])
        return pa.ListArray.from_arrays(pa.array(starts), items)


def _printable(name: str) -> str:
    """Return a header name without surrogates, because Arrow's strings must be UTF-8.

    Surrogates represent bytes that are not UTF-8.
    """
    return name.encode("utf-8", layout.HEADER_NAME_ERRORS).decode("utf-8", "replace")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a varint of header fields that the decoder has already checked."""
    value = shift = 0
    while (byte := data[at]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    value = (value | byte << shift) & 0xFFFFFFFF
    return (value >> 1) ^ -(value & 1), at + 1


@functools.lru_cache(maxsize=64)
def _repeated(value: str | int | None, kind: str, rows: int) -> Any:
    pa = _pyarrow()
    return pa.repeat(pa.scalar(value, kind), rows)


def _constant(value: str | int | None, kind: str, rows: int) -> Any:
    """Return an Arrow array that repeats one value.

    The array is a slice of a cached array, because building one takes as long as
    building an array of offsets.
    """
    if rows > _CONSTANT_ROWS:
        return _repeated.__wrapped__(value, kind, rows)
    return _repeated(value, kind, _CONSTANT_ROWS).slice(0, rows)


@functools.lru_cache(maxsize=1)
def _no_headers_of_many() -> Any:
    pa = _pyarrow()
    kind = _schema(("headers",)).field(0).type
    none = pa.array([], kind.value_type)
    return pa.ListArray.from_arrays(
        pa.array(np.zeros(_CONSTANT_ROWS + 1, np.int32)), none
    )


def _no_headers(rows: int) -> Any:
    """Return an array with an empty list per row.

    The array is a slice of a cached array if that is long enough.
    """
    if rows <= _CONSTANT_ROWS:
        return _no_headers_of_many().slice(0, rows)
    pa = _pyarrow()
    none = pa.array([], _schema(("headers",)).field(0).type.value_type)
    return pa.ListArray.from_arrays(pa.array(np.zeros(rows + 1, np.int32)), none)


def _times(timestamps_ms: npt.NDArray[np.int64], pa: Any) -> Any:
    """Return times as an Arrow array, with null for a record without a timestamp."""
    missing = timestamps_ms == -1
    validity = None
    if missing.any():
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    kind = _schema(("timestamp",)).field(0).type
    return pa.Array.from_buffers(
        kind, len(timestamps_ms), [validity, pa.py_buffer(timestamps_ms)]
    )


_ARROW_BUILDERS: Final[dict[str, Any]] = {
    "topic": lambda self, pa: _constant(self.topic, "string", len(self)),
    "partition": lambda self, pa: _constant(self.partition, "int32", len(self)),
    "offset": lambda self, pa: pa.array(self.offsets),
    "timestamp": lambda self, pa: _times(self.timestamps_ms, pa),
    "key": lambda self, pa: self._binary(pa, self.key_positions, self.key_sizes),
    "value": lambda self, pa: self._binary(pa, self.value_positions, self.value_sizes),
    "headers": lambda self, pa: self._header_lists(pa),
}


def arrow_schema(columns: Iterable[str] = ARROW_COLUMNS) -> pyarrow.Schema:
    """Return the Arrow schema of these columns.

    The types are topic: string, partition: int32, offset: int64, timestamp:
    timestamp[ms, UTC] (null for a record without a timestamp), key and value: binary,
    headers: list<struct<key: string, value: binary>>.

    Raises:
        InvalidConfigError: a name is unknown; the error suggests the nearest name.
    """
    return _schema(checked_columns(columns))


@functools.lru_cache(maxsize=64)
def _schema(names: tuple[str, ...]) -> pyarrow.Schema:
    pa = _pyarrow()
    types = {
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("ms", "UTC"),
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    }
    return pa.schema([(name, types[name]) for name in names])


def checked_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of columns after checking them.

    Raises:
        InvalidConfigError: a name is not in TOPIC_COLUMNS, or is given twice.
    """
    if isinstance(columns, str):
        raise InvalidConfigError(
            "columns is a list of names", expected=f"[{columns!r}]", found=repr(columns)
        )
    names = tuple(columns)
    for at, name in enumerate(names):
        if name not in TOPIC_COLUMNS:
            nearest = nearest_name(str(name), TOPIC_COLUMNS)
            hint = ""
            if nearest is not None:
                hint = f"; did you mean {nearest!r}?"
            raise InvalidConfigError(
                f"unknown column{hint}",
                expected=f"some of {', '.join(TOPIC_COLUMNS)}",
                found=repr(name),
            )
        if name in names[:at]:
            raise InvalidConfigError("a column is named twice", found=repr(name))
    return names


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError(
            f"Arrow needs pyarrow: {install_command('arrow')}"
        ) from error
    return pyarrow


class _ArrowArray(Protocol):
    def __arrow_c_array__(self, requested_schema: Any = None) -> Any: ...


class _ArrowStream(Protocol):
    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


#: A column that append_columns() accepts: an Arrow array, or a pair (data, offsets); see
#: input_column().
ColumnInput = (
    _ArrowArray
    | _ArrowStream
    | tuple[
        bytes | bytearray | memoryview | npt.NDArray[np.uint8],
        Sequence[int] | npt.NDArray[np.integer[Any]],
    ]
)
#: Timestamps that append_columns() accepts; see input_timestamps().
TimesInput = (
    _ArrowArray
    | _ArrowStream
    | Sequence[int]
    | npt.NDArray[np.integer[Any]]
    | npt.NDArray[np.datetime64]
)


def input_column(given: Any, name: str) -> InputColumn:
    """Convert a column of bytes to the encoder's form: (data, offsets, nulls).

    Args:
        given: an Arrow array of binary or string type (any object with
            __arrow_c_array__ if pyarrow is installed), or a (data, offsets) pair. The
            data is bytes or uint8. The offsets are integers of shape (n + 1,) that start
            anywhere, never decrease and end inside the data.
        name: the name of the column, for errors.

    Raises:
        InvalidRecordError: the column has another type or shape.
    """
    if isinstance(given, tuple) and len(given) == 2:
        try:
            if not isinstance(given[0], np.ndarray):
                data = np.frombuffer(given[0], np.uint8)
            else:
                data = given[0]
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidRecordError(
                f"{name}: data must be bytes or a uint8 array",
                found=type(given[0]).__name__,
            ) from error
        if data.dtype != np.uint8 or data.ndim != 1:
            raise InvalidRecordError(
                f"{name}: data must be bytes or a uint8 array",
                found=f"{data.dtype}, {data.ndim} dimensions",
            )
        return _checked_column(np.ascontiguousarray(data), given[1], None, name)
    pa = _pyarrow()
    array: Any
    try:
        # Arrow would convert them to a column of numbers.
        if isinstance(given, (bytes, bytearray, memoryview, str)):
            raise TypeError(given)
        if isinstance(given, (pa.Array, pa.ChunkedArray)):
            array = given
        else:
            array = pa.array(given)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidRecordError(
            f"{name}: give an Arrow array or (data, offsets)",
            found=type(given).__name__,
        ) from error
    if isinstance(array, pa.ChunkedArray):  # such as a column of a Table
        if array.num_chunks != 1:
            array = array.combine_chunks()
        else:
            array = array.chunk(0)
    if pa.types.is_null(array.type):
        array = array.cast(pa.binary())
    if pa.types.is_fixed_size_binary(array.type) or str(array.type).endswith("_view"):
        # These two types have no buffer of offsets.
        array = array.cast(pa.large_binary())
    is_large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(
        array.type
    )
    if not (
        is_large or pa.types.is_binary(array.type) or pa.types.is_string(array.type)
    ):
        raise InvalidRecordError(
            f"{name}: an Arrow column must hold binary or strings",
            found=str(array.type),
        )
    offset_type: type[np.int64 | np.int32] = np.int32
    if is_large:
        offset_type = np.int64
    _, offsets, data = array.buffers()
    edges: npt.NDArray[Any] = np.zeros(1, np.int64)
    if offsets is not None:
        edges = np.frombuffer(offsets, offset_type)
    # A sliced array keeps the buffers of the whole array. An empty array may have an
    # empty buffer of offsets.
    edges = edges[array.offset : array.offset + len(array) + 1]
    if not len(array):
        edges = np.zeros(1, np.int64)
    nulls = None
    if array.null_count:
        nulls = np.ascontiguousarray(
            array.is_null().to_numpy(zero_copy_only=False), np.uint8
        )
    if data is not None and data.size:
        raw = np.frombuffer(data, np.uint8)
    else:
        raw = np.empty(0, np.uint8)
    return _checked_column(raw, edges, nulls, name)


def _checked_column(
    data: npt.NDArray[np.uint8],
    offsets: Any,
    nulls: npt.NDArray[np.uint8] | None,
    name: str,
) -> InputColumn:
    edges = np.asarray(offsets)
    if edges.ndim != 1 or len(edges) < 1 or edges.dtype.kind not in "iu":
        raise InvalidRecordError(
            f"{name}: offsets must be a list of integers, one more than there are records"
        )
    edges = np.ascontiguousarray(edges, np.int64)
    longest = kernel.longest_value(edges, data.size)
    if longest < 0:
        raise InvalidRecordError(
            f"{name}: offsets must not decrease and must end inside the data",
            expected=f"0 to {data.size}",
            found=f"{edges.min()} to {edges.max()}",
        )
    if longest > layout.INT32_MAX:
        raise InvalidRecordError(f"{name}: one value is larger than 2^31-1 bytes")
    return data, edges, nulls


def input_timestamps(given: Any, count: int) -> npt.NDArray[np.int64]:
    """Convert timestamps to the encoder's form: int64 milliseconds, shape (count,).

    `given` holds integers, an Arrow array of integers or timestamps, or numpy datetime64
    of any unit.
    """
    if hasattr(given, "type") and hasattr(given, "to_numpy"):
        pa = _pyarrow()
        if pa.types.is_timestamp(given.type):
            given = given.cast(pa.timestamp("ms", given.type.tz), safe=False).cast(
                pa.int64()
            )
        if isinstance(given, pa.Array):
            given = given.to_numpy(zero_copy_only=False)
        else:
            given = given.to_numpy()
    array = np.asarray(given)
    if array.dtype.kind == "M":
        # 2^63 milliseconds are 292 million years. numpy would wrap a later time without
        # an error.
        if np.any(np.abs(array.astype("datetime64[Y]").astype(np.int64)) > 200_000_000):
            raise InvalidTimestampError(
                "timestamps_ms are outside the range of 64-bit milliseconds"
            )
        array = array.astype("datetime64[ms]").view(np.int64)
    if array.dtype == np.uint64 and array.size and int(array.max()) > 2**63 - 1:
        raise InvalidTimestampError(
            "timestamps_ms are outside the range of 64-bit milliseconds",
            found=int(array.max()),
        )
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise InvalidTimestampError(
            "timestamps_ms must be integers, one for each record",
            expected=f"shape ({count},)",
            found=f"{array.dtype} {array.shape}",
        )
    return np.ascontiguousarray(array, np.int64)


def input_columns(
    method: str,
    keys: ColumnInput | None,
    values: ColumnInput | None,
    timestamps_ms: TimesInput | None,
) -> layout.InputColumns:
    """Convert the columns that were given to `method`.

    A missing column of keys or of values means nulls. Missing times mean now.

    Raises:
        InvalidRecordError: keys and values are missing, or differ in length.
    """
    if keys is None and values is None:
        raise InvalidRecordError(f"{method} needs keys or values")
    key_column = None if keys is None else input_column(keys, "keys")
    value_column = None if values is None else input_column(values, "values")
    counts = {
        len(column[1]) - 1
        for column in (key_column, value_column)
        if column is not None
    }
    if len(counts) != 1:
        raise InvalidRecordError(
            "keys and values must have the same number of rows",
            found=sorted(counts),
        )
    count = counts.pop()
    times = None if timestamps_ms is None else input_timestamps(timestamps_ms, count)
    return layout.InputColumns(key_column, value_column, times, count)


assert struct.calcsize(layout.HEADER_FORMAT) == layout.HEADER_SIZE
