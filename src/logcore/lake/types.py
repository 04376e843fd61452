"""Types of the columns of a table, and how they change when records have new fields.

Rules:
- A column is never removed, and its type in the table never changes. So old readers of
  the table continue to work.
- A type that no commit has stored yet may become wider: int to long, and both to double.
- null, an empty object and an empty list do not determine a type. A field that has only
  these has no column.
- A value is stored exactly, or it is refused.

pyarrow is imported in the functions that use it.
"""

from __future__ import annotations

import re
from typing import Any, Final

#: Characters that Delta refuses in the names of columns.
_FORBIDDEN: Final = re.compile(r"[ ,;{}()\n\t=]")
#: Numbers from the narrowest to the widest.
_WIDTH: Final = {"int32": 0, "int64": 1, "float": 2, "double": 3}


class TypeMismatch(Exception):
    """A value that does not fit the columns of a table.

    `path` is the field, such as "address.city", or "" for the whole value. `expected`
    and `found` are types or values.
    """

    def __init__(
        self, reason: str, path: str = "", expected: object = None, found: object = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.expected = expected
        self.found = found


def is_unknown(kind: Any) -> bool:
    """Return whether a type is that of nulls, empty objects or empty lists only."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return all(is_unknown(field.type) for field in kind.fields)
    if pa.types.is_list(kind):
        return is_unknown(kind.value_type)
    return bool(pa.types.is_null(kind))


def merged(known: Any, new: Any, pinned: Any, path: str = "") -> Any:
    """Return the type that holds the values of two types, or None if both are unknown.

    `known` is the type so far, or None if there is none. `pinned` is the type in the
    table, or None if the table has no such column.

    Raises:
        TypeMismatch: there is no such type, or a name cannot be the name of a column.
    """
    import pyarrow as pa

    if pa.types.is_null(new):
        return known
    if known is None:
        if is_unknown(new):
            return None
        if pa.types.is_list(new):
            return pa.list_(merged(None, new.value_type, None, path))
        if not pa.types.is_struct(new):
            return new
        known = pa.struct([])
    if pa.types.is_struct(new) and pa.types.is_struct(known):
        return _merged_structs(known, new, pinned, path)
    if pa.types.is_list(new) and pa.types.is_list(known):
        inside = None
        if pinned is not None:
            inside = pinned.value_type
        return pa.list_(merged(known.value_type, new.value_type, inside, path))
    if known == new:
        return known
    if str(known) in _WIDTH and str(new) in _WIDTH:
        if pinned is not None or _WIDTH[str(known)] > _WIDTH[str(new)]:
            return known
        return new
    raise TypeMismatch("the value does not fit the column", path, known, new)


def _merged_structs(known: Any, new: Any, pinned: Any, path: str) -> Any:
    import pyarrow as pa

    kinds = {field.name: field.type for field in known.fields}
    folded = {name.lower(): name for name in kinds}
    for field in new.fields:
        inner = f"{path}.{field.name}" if path else field.name
        if is_unknown(field.type) and field.name not in kinds:
            continue
        other_name = folded.setdefault(field.name.lower(), field.name)
        if other_name != field.name:
            raise TypeMismatch(
                "the field differs from another one only in case, which SQL does not distinguish",
                inner,
                repr(other_name),
                repr(field.name),
            )
        if not field.name or _FORBIDDEN.search(field.name):
            raise TypeMismatch(
                "the field cannot be the name of a column",
                inner,
                "a name without spaces and , ; { } ( ) =",
                repr(field.name),
            )
        held = None
        if pinned is not None and pinned.get_field_index(field.name) >= 0:
            held = pinned.field(field.name).type
        kinds[field.name] = merged(kinds.get(field.name), field.type, held, inner)
    return pa.struct(list(kinds.items()))


def cast(array: Any, kind: Any, path: str = "") -> Any:
    """Return an array, converted to a type that merged() has returned.

    Raises:
        TypeMismatch: a value would change.
    """
    import pyarrow as pa

    if array.type == kind:
        return array
    if is_unknown(array.type) and pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if pa.types.is_struct(kind):
        held = dict(zip((field.name for field in array.type.fields), array.flatten()))
        children = []
        for field in kind.fields:
            inner = f"{path}.{field.name}" if path else field.name
            child = held.get(field.name)
            if child is None:
                children.append(pa.nulls(len(array), field.type))
            else:
                children.append(cast(child, field.type, inner))
        return _struct_array(array, children, kind)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(
            array.offsets,
            cast(array.values, kind.value_type, path),
            type=kind,
            mask=array.is_null() if array.null_count else None,
        )
    try:
        return array.cast(kind)
    except pa.ArrowInvalid as error:
        raise TypeMismatch(
            "the number would change in the column", path, kind, array.type
        ) from error


def _struct_array(array: Any, children: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    if not children:
        return pa.array([{}] * len(array), kind)
    mask = None
    if array.null_count:
        mask = array.is_null()
    return pa.StructArray.from_arrays(children, fields=list(kind.fields), mask=mask)


def check_finite(array: Any, path: str = "") -> None:
    """Check that no number has become infinite because it is too large for a double.

    Raises:
        TypeMismatch: a number has become infinite.
    """
    import numpy as np
    import pyarrow as pa

    if pa.types.is_struct(array.type):
        for field, child in zip(array.type.fields, array.flatten(), strict=True):
            check_finite(child, f"{path}.{field.name}" if path else field.name)
    elif pa.types.is_list(array.type):
        check_finite(array.flatten(), path)
    elif pa.types.is_floating(array.type):
        numbers = array.to_numpy(zero_copy_only=False)
        if np.isinf(numbers).any():
            raise TypeMismatch("the number is too large", path, "a double")
