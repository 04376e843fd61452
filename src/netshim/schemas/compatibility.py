"""Checks whether readers with one schema can read values of another schema.

Rules:
- Avro schemas are compared by the library avro, with the schemas to which they refer.
- JSON Schemas and Protobuf schemas are not compared. A message of the result reports this.
- A new schema of another type than the earlier ones is incompatible.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import attrs

from logcore.errors import InvalidSchemaError
from logcore.schemas.parsing import Resolved, parse_json

#: Levels at which new schemas must read old values.
_READS_OLD: Final = ("BACKWARD", "FULL")
#: Levels at which old schemas must read new values.
_READS_NEW: Final = ("FORWARD", "FULL")
#: Maximum number of parsed Avro schemas that are kept in memory.
_PARSED: Final = 256


@attrs.frozen
class ComparedSchema:
    """A schema with the schemas to which it refers, and its name in messages."""

    name: str
    type: str
    text: str
    references: Resolved


@attrs.frozen
class Comparison:
    """The result of a comparison."""

    is_compatible: bool
    messages: tuple[str, ...] = ()


def compare(
    level: str, new: ComparedSchema, earlier: Sequence[ComparedSchema]
) -> Comparison:
    """Return whether a schema may follow the `earlier` ones, of which the oldest is first.

    Raises:
        InvalidSchemaError: an Avro schema is invalid.
    """
    if level == "NONE" or not earlier:
        return Comparison(True)
    # BACKWARD compares with the latest version, and BACKWARD_TRANSITIVE with all
    # versions.
    base, _, transitive = level.partition("_")
    versions = earlier if transitive else earlier[-1:]
    if any(compared_schema.type != new.type for compared_schema in versions):
        return Comparison(
            False,
            (f"the schema is {new.type}, and earlier ones of the subject are not",),
        )
    if new.type != "AVRO":
        return Comparison(True, (not_checked(new.type),))
    messages: list[str] = []
    for compared_schema in reversed(versions):
        if base in _READS_OLD:
            messages += _problems(new, compared_schema)
        if base in _READS_NEW:
            messages += _problems(compared_schema, new)
    return Comparison(not messages, tuple(messages))


def not_checked(schema_type: str) -> str:
    """Return the message about a type of schemas that is not compared."""
    return f"not checked: {schema_type} schemas are parsed, but are not compared"


def _problems(reader: ComparedSchema, writer: ComparedSchema) -> list[str]:
    """Return why readers with one schema cannot read values of the other."""
    # Imported only if Avro schemas are compared, because the import takes some 70 ms.
    from avro.compatibility import (
        ReaderWriterCompatibilityChecker,
        SchemaCompatibilityType,
    )

    checker: Any = ReaderWriterCompatibilityChecker
    result = checker().get_compatibility(
        parsed_avro(reader.text, reader.references),
        parsed_avro(writer.text, writer.references),
    )
    if result.compatibility is SchemaCompatibilityType.compatible:
        return []
    kinds = ", ".join(
        str(incompatibility.value) for incompatibility in result.incompatibilities or []
    )
    details = "; ".join(sorted(result.messages or ()))
    locations = ", ".join(sorted(result.locations or ()))
    return [
        f"{reader.name} cannot read {writer.name}: {kinds}: {details} at {locations}"
    ]


@functools.lru_cache(maxsize=_PARSED)
def parsed_avro(text: str, references: Resolved) -> Any:
    """Return a schema as an object of the library avro.

    Raises:
        InvalidSchemaError: the schema is invalid.
    """
    from avro.name import Names
    from avro.schema import make_avsc_object

    names = Names()
    try:
        # Each schema can refer to the names of the schemas before it.
        for _, source in references:
            make_avsc_object(parse_json(source), names)
        return make_avsc_object(parse_json(text), names)
    except InvalidSchemaError:
        raise
    except Exception as error:  # the library raises errors of many classes
        raise InvalidSchemaError(
            f"the Avro schema is invalid: {error}", found=repr(text[:80])
        ) from error
