"""Decodes keys and values of records with the schemas in the topic `_schemas`.

Rules:
- The stored bytes are shown if the directory has no `_schemas`, if the extra `schemas` is
  not installed, or if a value does not match its schema. The page of the message names
  the reason.
- The schemas are read again when `_schemas` has grown.
"""

from __future__ import annotations

from typing import Final

import attrs

from logcore.errors import LogcoreError
from logcore.format.schema_records import SCHEMAS_TOPIC
from logcore.kernels import Record
from logcore.schemas import ValueDecoder, load_schemas
from netshim.console.directory import OpenDirectory
from netshim.security.acls import AclOperation

_TYPES: Final = {"AVRO": "Avro", "JSON": "JSON", "PROTOBUF": "Protobuf"}


@attrs.frozen
class DecodedContent:
    """A key or value for a page."""

    #: JSON of the decoded value, or the stored bytes.
    data: bytes | None
    #: The type and id of its schema, or why it is not decoded; "" without a schema.
    note: str = ""


@attrs.define
class SchemaCache:
    """The decoder of one directory. Several pages may use it at the same time."""

    #: The end offset of `_schemas`, and the decoder of the records below it. They are one
    #: value, so that no thread sees a new end with an old decoder.
    _cached: tuple[int, ValueDecoder] | None = None

    def decoder(self, directory: OpenDirectory) -> ValueDecoder | None:
        """Return the decoder of the directory.

        None if it has no schemas, or the user may not read them.
        """
        if SCHEMAS_TOPIC not in directory.topics:
            return None
        if not directory.viewer.may_topic(AclOperation.READ, SCHEMAS_TOPIC):
            return None
        try:
            with directory.open_log(SCHEMAS_TOPIC, 0) as log:
                end = log.high_watermark
                cached = self._cached
                if cached is None or cached[0] != end:
                    records = log.read(log.log_start_offset, end)
                    cached = end, ValueDecoder(load_schemas(records))
                    self._cached = cached
        except LogcoreError:
            # The pages of _schemas show the damage.
            return None
        return cached[1]


def content_of(
    decoder: ValueDecoder | None, record: Record, *, is_key: bool
) -> DecodedContent:
    """Return the key or the value of a record for a page."""
    data = record.key if is_key else record.value
    if decoder is None or data is None:
        return DecodedContent(data)
    decoded = decoder.decode(data, record.headers, is_key=is_key)
    if decoded.schema is None:
        return DecodedContent(data)
    if decoded.error is not None:
        return DecodedContent(data, f"not decoded: {decoded.error}")
    type_name = _TYPES.get(decoded.schema["type"], "")
    return DecodedContent(
        decoded.text.encode(), f"{type_name} schema {decoded.schema['id']}"
    )
