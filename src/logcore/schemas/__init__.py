"""Schemas of keys and values: the records of a registry, and decoding by schema.

ValueDecoder(load_schemas(records of `_schemas`)).decode(value, headers) returns the
object in a value. The schema registry itself is netshim.schemas.
"""

from __future__ import annotations

from logcore.schemas.decoding import (
    DecodedPart,
    RemoteSchemas,
    ValueDecoder,
    load_schemas,
)
from logcore.schemas.state import SchemaState

__all__ = [
    "DecodedPart",
    "RemoteSchemas",
    "SchemaState",
    "ValueDecoder",
    "load_schemas",
]
