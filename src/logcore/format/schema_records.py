"""Encode and decode the records of `_schemas`, the topic of a schema registry.

Layout: key and value are JSON objects in UTF-8, as Confluent's registry writes them. The
key names a kind of record: SCHEMA (a version of a subject), CONFIG (a compatibility
level), MODE, DELETE_SUBJECT (all versions up to one are deleted) or NOOP. A null value
deletes the record of its key.

Rules:
- Fields that this module does not use are kept when a version is written again.
- Decoding an invalid record raises InvalidRecordError. The caller skips the record.
- This module reads no log.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any, Final

import attrs

from logcore.errors import InvalidRecordError

SCHEMAS_TOPIC: Final = "_schemas"
#: Types of schemas. A record without a type is AVRO.
SCHEMA_TYPES: Final = ("AVRO", "JSON", "PROTOBUF")
COMPATIBILITY_LEVELS: Final = (
    "NONE",
    "BACKWARD",
    "BACKWARD_TRANSITIVE",
    "FORWARD",
    "FORWARD_TRANSITIVE",
    "FULL",
    "FULL_TRANSITIVE",
)
MODES: Final = ("READWRITE", "READONLY", "READONLY_OVERRIDE", "IMPORT")
#: Largest id and version: Confluent's registry stores both in 32 bits.
LARGEST_NUMBER: Final = (1 << 31) - 1
_KINDS: Final = ("SCHEMA", "CONFIG", "MODE", "DELETE_SUBJECT", "NOOP")
#: Fields of a version that have an attribute in SchemaVersion.
_KNOWN: Final = frozenset(
    (
        "subject",
        "version",
        "id",
        "guid",
        "schemaType",
        "references",
        "metadata",
        "schema",
        "deleted",
    )
)

SchemaRecord = tuple[bytes, bytes | None]


@attrs.frozen
class SchemaReference:
    """A version of a subject that a schema uses under a name."""

    name: str
    subject: str
    version: int


@attrs.frozen(kw_only=True)
class SchemaVersion:
    """One version of a subject."""

    subject: str
    version: int
    id: int
    #: Id that is unique among all registries, as 36 characters.
    guid: str
    text: str
    type: str = "AVRO"
    references: tuple[SchemaReference, ...] = ()
    metadata: Mapping[str, Any] | None = None
    is_deleted: bool = False
    #: Fields that other programs have written.
    others: Mapping[str, Any] = attrs.Factory(dict)


@attrs.frozen
class StoredVersion:
    """Record of a version. `schema` is None if the version is deleted permanently."""

    subject: str
    version: int
    schema: SchemaVersion | None


@attrs.frozen
class StoredLevel:
    """Compatibility level of a subject. None as the subject means all subjects without a
    level of their own.
    """

    subject: str | None
    level: str | None


@attrs.frozen
class StoredMode:
    """Mode of a subject. None as the subject means all subjects without their own mode."""

    subject: str | None
    mode: str | None


@attrs.frozen
class StoredDeletion:
    """All versions of a subject up to `version` are deleted, but not permanently."""

    subject: str
    version: int


StoredRow = StoredVersion | StoredLevel | StoredMode | StoredDeletion | None


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def version_record(schema: SchemaVersion) -> SchemaRecord:
    """Encode a version."""
    fields: dict[str, Any] = {
        "subject": schema.subject,
        "version": schema.version,
        "id": schema.id,
        "guid": schema.guid,
    }
    if schema.type != "AVRO":
        fields["schemaType"] = schema.type
    if schema.references:
        fields["references"] = [
            attrs.asdict(reference) for reference in schema.references
        ]
    if schema.metadata is not None:
        fields["metadata"] = schema.metadata
    fields |= {"schema": schema.text, "deleted": schema.is_deleted, **schema.others}
    return _version_key(schema.subject, schema.version), _encoded(fields)


def removed_version_record(subject: str, version: int) -> SchemaRecord:
    """Encode the permanent deletion of a version."""
    return _version_key(subject, version), None


def _version_key(subject: str, version: int) -> bytes:
    return _encoded(
        {"keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1}
    )


def deletion_record(subject: str, version: int) -> SchemaRecord:
    """Encode the deletion of all versions of a subject up to `version`."""
    return (
        _encoded({"keytype": "DELETE_SUBJECT", "subject": subject, "magic": 0}),
        _encoded({"subject": subject, "version": version}),
    )


def level_record(subject: str | None, level: str | None) -> SchemaRecord:
    """Encode a compatibility level, or its removal."""
    return _setting_record("CONFIG", subject, "compatibilityLevel", level)


def mode_record(subject: str | None, mode: str | None) -> SchemaRecord:
    """Encode a mode, or its removal."""
    return _setting_record("MODE", subject, "mode", mode)


def _setting_record(
    kind: str, subject: str | None, name: str, value: str | None
) -> SchemaRecord:
    key = _encoded({"keytype": kind, "subject": subject, "magic": 0})
    if value is None:
        return key, None
    owner = {} if subject is None else {"subject": subject}
    return key, _encoded({**owner, name: value})


def read_row(key: bytes | None, value: bytes | None) -> StoredRow:
    """Decode a record. Return None for a NOOP record.

    Raises:
        InvalidRecordError: the record is damaged, or a registry does not write such
            records.
    """
    if key is None:
        raise InvalidRecordError("the record has no key")
    fields = _object(key, "key")
    kind = fields.get("keytype")
    if kind not in _KINDS:
        raise InvalidRecordError(
            "unknown keytype", expected=", ".join(_KINDS), found=repr(kind)[:80]
        )
    if kind == "NOOP":
        return None
    if kind in ("CONFIG", "MODE"):
        return _setting(kind, fields.get("subject"), value)
    subject = _text(fields, "subject")
    if kind == "DELETE_SUBJECT":
        if value is None:
            return None
        return StoredDeletion(subject, _number(_object(value, "value"), "version"))
    version = _number(fields, "version")
    if value is None:
        return StoredVersion(subject, version, None)
    return StoredVersion(
        subject, version, _version(subject, version, _object(value, "value"))
    )


def _setting(kind: str, subject: Any, value: bytes | None) -> StoredRow:
    if subject is not None and not isinstance(subject, str):
        raise InvalidRecordError(
            "subject", expected="a text or null", found=repr(subject)[:80]
        )
    found = None
    if kind == "CONFIG":
        if value is not None:
            found = _object(value, "value").get("compatibilityLevel")
        if found is not None and found not in COMPATIBILITY_LEVELS:
            raise InvalidRecordError("unknown level", found=repr(found)[:80])
        return StoredLevel(subject, found)
    if value is not None:
        found = _object(value, "value").get("mode")
    if found is not None and found not in MODES:
        raise InvalidRecordError("unknown mode", found=repr(found)[:80])
    return StoredMode(subject, found)


def _version(subject: str, version: int, fields: dict[str, Any]) -> SchemaVersion:
    kind = fields.get("schemaType") or "AVRO"
    if kind not in SCHEMA_TYPES:
        raise InvalidRecordError(
            "unknown schemaType",
            expected=", ".join(SCHEMA_TYPES),
            found=repr(kind)[:80],
        )
    text = _text(fields, "schema")
    references = read_references(fields.get("references"))
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidRecordError("metadata is not an object", found=repr(metadata)[:80])
    guid = fields.get("guid")
    if guid is None:
        guid = guid_of(kind, text, references, metadata)
    try:
        guid = str(uuid.UUID(guid))
    except (AttributeError, TypeError, ValueError):
        raise InvalidRecordError(
            "guid", expected="a UUID", found=repr(guid)[:80]
        ) from None
    return SchemaVersion(
        subject=subject,
        version=version,
        id=_number(fields, "id"),
        guid=guid,
        text=text,
        type=kind,
        references=references,
        metadata=metadata,
        is_deleted=bool(fields.get("deleted")),
        others={name: field for name, field in fields.items() if name not in _KNOWN},
    )


def read_references(rows: Any) -> tuple[SchemaReference, ...]:
    """Return the references in a list of JSON objects; None has no references.

    Raises:
        InvalidRecordError: `rows` is invalid.
    """
    if rows is None:
        return ()
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidRecordError(
            "references", expected="a list of objects", found=repr(rows)[:80]
        )
    return tuple(
        SchemaReference(
            _text(row, "name"), _text(row, "subject"), _number(row, "version")
        )
        for row in rows
    )


def guid_of(
    kind: str,
    text: str,
    references: tuple[SchemaReference, ...],
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """Return the GUID for a schema that was stored without a GUID: the MD5 of its content."""
    import hashlib

    content = hashlib.md5(text.encode(), usedforsecurity=False)
    for reference in references:
        content.update(reference.name.encode() + reference.subject.encode())
        content.update(reference.version.to_bytes(4, "big"))
    if kind != "AVRO":
        content.update(kind.encode())
    if metadata:
        content.update(json.dumps(metadata, sort_keys=True).encode())
    return str(uuid.UUID(bytes=content.digest()))


def _object(data: bytes, part: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(
            f"the {part} is not JSON", found=repr(bytes(data[:80]))
        ) from error
    if not isinstance(found, dict):
        raise InvalidRecordError(
            f"the {part} is not a JSON object", found=repr(bytes(data[:80]))
        )
    return found


def _text(fields: Mapping[str, Any], name: str) -> str:
    found = fields.get(name)
    try:
        if not isinstance(found, str) or not found:
            raise ValueError
        # JSON may contain halves of characters, which UTF-8 cannot encode.
        found.encode()
    except ValueError:
        raise InvalidRecordError(
            name, expected="a text", found=repr(found)[:80]
        ) from None
    return found


def _number(fields: Mapping[str, Any], name: str) -> int:
    found = fields.get(name)
    if type(found) is not int or not 0 < found <= LARGEST_NUMBER:
        raise InvalidRecordError(
            name, expected=f"1 to {LARGEST_NUMBER}", found=repr(found)[:80]
        )
    return found
