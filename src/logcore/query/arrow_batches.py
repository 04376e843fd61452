"""Records as Arrow batches, for SQL and exports: chosen columns, keys and values as text
or bytes.

Rules:
- Text is decoded as UTF-8. In a key or value that is not UTF-8, each byte that is not
  printable ASCII is shown as \\xFF, as in DuckDB.
- Memory is bounded: a batch holds a few thousand records, however large the log is.

This module needs pyarrow, and imports it in the functions that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from logcore.format.columns import RecordColumns, arrow_schema
from logcore.log import Log

if TYPE_CHECKING:
    import pyarrow

    from logcore.schemas import ValueDecoder


def schema_of(columns: Sequence[str], *, is_text: bool) -> pyarrow.Schema:
    """Return the schema of the batches of batches_of().

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    schema = arrow_schema(columns)
    if not is_text:
        return schema
    import pyarrow as pa

    texts = {
        "key": pa.string(),
        "value": pa.string(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])),
    }
    return pa.schema(
        [(field.name, texts.get(field.name, field.type)) for field in schema]
    )


def batches_of(
    logs: Mapping[int, Log],
    starts: Mapping[int, int],
    ends: Mapping[int, int],
    columns: Sequence[str],
    *,
    is_text: bool,
    select: Callable[[RecordColumns], RecordColumns] | None = None,
    isolation: Any = "read_uncommitted",
    tick: Callable[[int], None] | None = None,
    decoder: ValueDecoder | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the records of some partitions, one partition after the other.

    `select` returns the records of a chunk that pass a filter. `tick` is called with the
    number of records of each chunk that was read. With a `decoder`, which needs
    `is_text`, keys and values with a schema are JSON.
    """
    schema = schema_of(columns, is_text=is_text)
    for number, log in logs.items():
        for part in log.scan(starts[number], ends[number], isolation=isolation):
            passing = part
            if select is not None:
                passing = select(part)
            if len(passing):
                batch = passing.to_arrow(columns)
                if is_text:
                    batch = _as_text(batch, schema)
                if decoder is not None:
                    batch = _decoded(batch, passing, decoder)
                yield batch
            if tick is not None:
                tick(len(part))


def grouped(
    batches: Iterable[pyarrow.RecordBatch], *, most_rows: int, most_bytes: int
) -> Iterator[list[pyarrow.RecordBatch]]:
    """Yield batches in groups; a group ends as soon as it reaches one of the limits."""
    group: list[pyarrow.RecordBatch] = []
    rows = 0
    size_bytes = 0
    for batch in batches:
        group.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
        if rows >= most_rows or size_bytes >= most_bytes:
            yield group
            group = []
            rows = 0
            size_bytes = 0
    if group:
        yield group


def _as_text(batch: pyarrow.RecordBatch, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    import pyarrow as pa

    arrays = []
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if name in ("key", "value"):
            array = _text_array(array)
        elif name == "headers":
            pairs = array.values
            named = [pairs.field("key"), _text_array(pairs.field("value"))]
            array = pa.ListArray.from_arrays(
                array.offsets, pa.StructArray.from_arrays(named, ["key", "value"])
            )
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _decoded(
    batch: pyarrow.RecordBatch, records: RecordColumns, decoder: ValueDecoder
) -> pyarrow.RecordBatch:
    """Return a batch with the decoded keys and values of its records."""
    import pyarrow as pa

    for name in {"key", "value"}.intersection(batch.schema.names):
        is_key = name == "key"
        texts = []
        for record in records.records():
            data = record.key if is_key else record.value
            piece = decoder.decode(data, record.headers, is_key=is_key)
            texts.append(None if data is None else piece.text)
        slot = batch.schema.get_field_index(name)
        batch = batch.set_column(slot, name, pa.array(texts, pa.string()))
    return batch


def _text_array(array: Any) -> Any:
    import pyarrow as pa

    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:  # some key or value is not UTF-8
        return pa.array(
            [None if piece is None else _text(piece) for piece in array.to_pylist()],
            pa.string(),
        )


def _text(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "".join(
            chr(byte) if 32 <= byte < 127 and byte != 92 else f"\\x{byte:02X}"
            for byte in piece
        )
