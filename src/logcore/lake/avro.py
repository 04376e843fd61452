"""Avro values: their schemas as types of columns, and their decoder.

Rules:
- A value is decoded with the schema of its writer. Without a schema registry, this
  is the given schema. With a registry, the value begins with a zero byte and the id of its
  schema in four bytes.
- A value must end where its schema ends. Otherwise it has another schema.
- A union of null and one other type becomes a column. Other unions cannot be columns.
- Logical types: date, timestamp-millis, timestamp-micros and decimal. A value of another
  logical type is stored as its base type.

fastavro and pyarrow are imported in the functions that use them.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any, Final

from logcore.distribution import install_command
from logcore.errors import InvalidConfigError, MissingDependencyError
from logcore.lake.types import TypeMismatch, merged
from logcore.lake.values import ValueFormat

_FRAME: Final = struct.Struct(">bI")
_LOGICAL: Final = {"date", "timestamp-millis", "timestamp-micros", "decimal"}
_PRIMITIVE: Final = {
    "boolean": "bool_",
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "string": "string",
    "bytes": "binary",
}


def fields_of_schemas(schemas: Mapping[int | None, Any]) -> Any:
    """Return the fields of all schemas as a struct type.

    `schemas` contains the parsed JSON of Avro schemas by id, or under None for values
    without ids.

    Raises:
        InvalidConfigError: a schema is invalid, is not a record, or has no columns.
    """
    import pyarrow as pa

    kind = pa.struct([])
    for schema in schemas.values():
        try:
            kind = merged(kind, _type(_parsed(schema), {}, ""), None)
        except TypeMismatch as error:
            raise InvalidConfigError(
                f"field {error.path!r} of the Avro schema: {error.reason}",
                expected=error.expected,
                found=error.found,
            ) from error
    return kind


def avro_format(schemas: Mapping[int | None, Any]) -> ValueFormat:
    """Return the format of Avro values with these schemas.

    Raises:
        InvalidConfigError: a schema is invalid, or schemas with and without id are mixed.
        MissingDependencyError: fastavro is not installed.
    """
    parsed = {number: _parsed(schema) for number, schema in schemas.items()}
    if not parsed or (None in parsed and len(parsed) > 1):
        raise InvalidConfigError(
            "Avro values need one schema, or a schema for each id of the registry"
        )
    read = _fastavro().schemaless_reader

    def decode(value: bytes) -> Mapping[str, Any]:
        number = None
        at = 0
        if None not in parsed:
            number, at = _frame(value)
            if number not in parsed:
                raise TypeMismatch(
                    f"the value has schema id {number}: give its schema (--schema {number}=FILE)"
                )
        stream = io.BytesIO(value)
        stream.seek(at)
        try:
            found: Mapping[str, Any] = read(stream, parsed[number], None)
        except Exception as error:  # fastavro raises errors of many classes
            raise TypeMismatch(
                f"the value does not have the Avro schema: {error!r}",
                found=repr(value[:40]),
            ) from error
        if stream.tell() != len(value):
            raise TypeMismatch(
                "the value does not have the Avro schema: bytes are left",
                expected=f"{len(value)} bytes",
                found=stream.tell(),
            )
        return found

    kind = fields_of_schemas(schemas)

    def to_arrow(objects: list[Any]) -> Any:
        import pyarrow as pa

        try:
            return pa.array(objects, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise TypeMismatch(
                f"the value does not fit the columns: {error}"
            ) from error

    return ValueFormat(decode, to_arrow)


def _frame(value: bytes) -> tuple[int, int]:
    if len(value) < _FRAME.size or value[0]:
        raise TypeMismatch(
            "the value does not begin with the id of a schema",
            expected="a zero byte and four bytes",
            found=repr(value[:5]),
        )
    return _FRAME.unpack_from(value)[1], _FRAME.size


def _fastavro() -> Any:
    try:
        import fastavro
    except ImportError as error:
        raise MissingDependencyError(
            f"Avro values need fastavro: {install_command('lake')}"
        ) from error
    return fastavro


def _parsed(schema: Any) -> Any:
    """Return a schema as fastavro needs it.

    Raises:
        InvalidConfigError: it is not the schema of a record.
    """
    fastavro = _fastavro()
    try:
        found = fastavro.parse_schema(_simplified(schema))
    except Exception as error:  # errors of many classes
        raise InvalidConfigError(
            f"the Avro schema is invalid: {error}", found=repr(schema)[:80]
        ) from error
    if not isinstance(found, dict) or found.get("type") != "record":
        raise InvalidConfigError(
            "the Avro schema is not a record", found=repr(schema)[:80]
        )
    return found


def _simplified(schema: Any) -> Any:
    """Return a schema without the logical types that are stored as their base type."""
    if isinstance(schema, list):
        return [_simplified(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: value
        for name, value in schema.items()
        if name != "logicalType" or value in _LOGICAL
    }
    for name in ("type", "items", "values"):
        if name in kept:
            kept[name] = _simplified(kept[name])
    if "fields" in kept:
        kept["fields"] = [_simplified(field) for field in kept["fields"]]
    return kept


def _type(schema: Any, named: dict[str, Any], path: str) -> Any:
    """Return the type of a column for a parsed schema.

    Raises:
        TypeMismatch: there is no such type.
    """
    import pyarrow as pa

    if isinstance(schema, list):
        others = [branch for branch in schema if branch != "null"]
        if len(others) != 1:
            raise TypeMismatch(
                "the union has no type of a column",
                path,
                "null and one other type",
                f"{len(others)} other types",
            )
        return _type(others[0], named, path)
    if isinstance(schema, str):
        if schema in _PRIMITIVE:
            return getattr(pa, _PRIMITIVE[schema])()
        if named.get(schema) is not None:
            return named[schema]
        raise TypeMismatch("the type contains itself or is null", path, found=schema)
    logical = schema.get("logicalType")
    if logical == "date":
        return pa.date32()
    if logical == "decimal":
        return pa.decimal128(schema["precision"], schema.get("scale", 0))
    if logical is not None:
        return pa.timestamp("us", "UTC")
    base = schema["type"]
    if base == "array":
        return pa.list_(_type(schema["items"], named, path))
    if base == "map":
        return pa.map_(pa.string(), _type(schema["values"], named, path))
    if base in ("enum", "fixed"):
        kind = pa.string() if base == "enum" else pa.binary()
        named[schema["name"]] = kind
        return kind
    if base == "record":
        named[schema["name"]] = None  # until it is complete: it may contain itself
        kind = pa.struct(
            [
                (
                    field["name"],
                    _type(
                        field["type"],
                        named,
                        f"{path}.{field['name']}" if path else field["name"],
                    ),
                )
                for field in schema["fields"]
            ]
        )
        named[schema["name"]] = kind
        return kind
    return _type(base, named, path)
