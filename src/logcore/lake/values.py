"""Values of records as columns of a table: JSON objects, or Avro records.

Rules:
- Each field of a value is a column. If its name is the name of a column of the record,
  the column is called value_NAME.
- A new field adds a column. A field that does not fit its column is refused with its
  offset and name. With on_error="text", such a value is stored in the column value_text
  as a whole, and its fields are null.
- A null value has null in all columns.

pyarrow and fastavro are imported in the functions that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from logcore.errors import RecordRefusedError
from logcore.format.json_values import parse_json
from logcore.lake.types import TypeMismatch, cast, check_finite, merged

if TYPE_CHECKING:
    import pyarrow

#: Column for values that do not fit the others.
TEXT_COLUMN: Final = "value_text"
_PREFIX: Final = "value_"


@attrs.frozen
class ValueFormat:
    """The decoder of values. Both functions raise TypeMismatch."""

    #: Decodes one value to an object with fields.
    decode: Callable[[bytes], Mapping[str, Any]]
    #: Makes an Arrow array of objects, some of which may be None.
    to_arrow: Callable[[list[Any]], Any]


class ValueColumns:
    """Collects values as columns, for one commit after the other.

    `form` decodes the values. For `reserved` see reserved_names(). `fields` are the
    fields that the table has, or that a schema defines. `on_error` is "fail" or "text".
    """

    def __init__(
        self, form: ValueFormat, reserved: frozenset[str], fields: Any, on_error: str
    ) -> None:
        self.size_bytes = 0
        self._format = form
        self._reserved = reserved
        self._on_error = on_error
        #: The type of all fields, and of those that the table or the schema has.
        self._kind = fields
        self._pinned = fields
        self._arrays: list[Any] = []
        self._texts: list[str | None] = []

    def add(
        self, values: Sequence[bytes | None], offsets: Sequence[int], path: str
    ) -> None:
        """Add the values of some records of the log at `path`.

        Raises:
            RecordRefusedError: a value does not fit, and on_error is "fail".
        """
        objects: list[Any] = []
        start = len(self._texts)
        for value, offset in zip(values, offsets, strict=True):
            self._texts.append(None)
            if value is None:
                objects.append(None)
                continue
            try:
                objects.append(self._format.decode(value))
            except TypeMismatch as error:
                self._texts[-1] = self._unfit(error, value, offset, path)
                objects.append(None)
        self._add(objects, start, values, offsets, path)

    def _add(
        self,
        objects: list[Any],
        start: int,
        values: Sequence[bytes | None],
        offsets: Sequence[int],
        path: str,
    ) -> None:
        """Add objects, and halve them until each one that does not fit is alone."""
        try:
            self._append(objects)
            return
        except TypeMismatch as error:
            if len(objects) == 1:
                self._texts[start] = self._unfit(
                    error, values[0] or b"", offsets[0], path
                )
                self._append([None])
                return
        half = len(objects) // 2
        self._add(objects[:half], start, values[:half], offsets[:half], path)
        self._add(objects[half:], start + half, values[half:], offsets[half:], path)

    def _append(self, objects: list[Any]) -> None:
        import pyarrow as pa

        found = self._format.to_arrow(objects)
        kind = self._kind
        if not pa.types.is_null(found.type):
            kind = merged(self._kind, found.type, self._pinned)
        array = cast(found, kind)
        if _is_wider(self._kind, kind):
            # The values collected so far must fit the wider numbers too.
            self._arrays = [cast(array, kind) for array in self._arrays]
        self._kind = kind
        self._arrays.append(array)
        self.size_bytes += array.nbytes

    def _unfit(self, error: TypeMismatch, value: bytes, offset: int, path: str) -> str:
        """Return the text of a value that does not fit.

        Raises:
            RecordRefusedError: on_error is "fail".
        """
        if self._on_error == "text":
            return value.decode("utf-8", "backslashreplace")
        where = ""
        if error.path:
            where = f"field {error.path!r}: "
        raise RecordRefusedError(
            f"{where}{error.reason}. Correct the schema, or export to a new table with on_error='text' "
            "(--on-error text)",
            path=path,
            offset=offset,
            expected=error.expected,
            found=error.found,
        ) from error

    def finish_columns(self) -> dict[str, Any]:
        """Return the columns by name, and begin again without values.

        From then on, the types are pinned, because the table has them.
        """
        import pyarrow as pa

        columns: dict[str, Any] = {}
        if self._on_error == "text":
            columns[TEXT_COLUMN] = pa.array(self._texts, pa.string())
        rows = [cast(array, self._kind) for array in self._arrays]
        chunks: list[Any] = [row.flatten() for row in rows]
        for slot, field in enumerate(self._kind.fields):
            columns[column_of(field.name, self._reserved)] = pa.chunked_array(
                [chunk[slot] for chunk in chunks], field.type
            )
        self._pinned = self._kind
        self._arrays = []
        self._texts = []
        self.size_bytes = 0
        return columns


def reserved_names(columns: Iterable[str]) -> frozenset[str]:
    """Return the names of columns that no field may have, in lower case.

    `columns` are the columns of the records.
    """
    return frozenset(name.lower() for name in (*columns, TEXT_COLUMN, "day"))


def column_of(field: str, reserved: frozenset[str]) -> str:
    """Return the column of a field: its name, with a prefix if the name is taken."""
    name = field.lower()
    while name not in reserved and name.startswith(_PREFIX):
        name = name.removeprefix(_PREFIX)
    if name in reserved:
        return _PREFIX + field
    return field


def fields_of(schema: pyarrow.Schema, reserved: frozenset[str]) -> Any:
    """Return the fields of values that a table has, as a struct type."""
    import pyarrow as pa

    fields = []
    for field in schema:
        if field.name.lower() in reserved:
            continue
        name = field.name
        if column_of(name.removeprefix(_PREFIX), reserved) == name:
            name = name.removeprefix(_PREFIX)
        fields.append((name, field.type))
    return pa.struct(fields)


def inferred(objects: list[Any]) -> Any:
    """Return objects as an Arrow array of the type that pyarrow infers.

    Raises:
        TypeMismatch: two values of one field have no common type, or a number is too large.
    """
    import pyarrow as pa

    failures = (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError)
    try:
        array = pa.array(objects)
        check_finite(array)
        return array
    except failures as error:
        path = ""
        if len(objects) == 1:
            for name, value in objects[0].items():
                try:
                    pa.array([value])
                except failures:
                    path = name
                    break
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise TypeMismatch(f"the value has no single type: {reason}", path) from error


def _is_wider(known: Any, new: Any) -> bool:
    """Return whether a field of `known` has another type in `new`, at any depth."""
    import pyarrow as pa

    if pa.types.is_struct(known):
        return any(
            _is_wider(field.type, new.field(field.name).type) for field in known.fields
        )
    if pa.types.is_list(known):
        return _is_wider(known.value_type, new.value_type)
    return bool(known != new)


def decode_json(value: bytes) -> Mapping[str, Any]:
    """Decode a value that is a JSON object in UTF-8.

    Raises:
        TypeMismatch: it is something else.
    """
    try:
        found = parse_json(value)
    except ValueError as error:
        raise TypeMismatch(
            f"the value is not JSON: {error}", found=repr(value[:40])
        ) from None
    if not isinstance(found, dict):
        raise TypeMismatch("the value is not a JSON object", found=repr(value[:40]))
    return found


JSON: Final = ValueFormat(decode_json, inferred)
