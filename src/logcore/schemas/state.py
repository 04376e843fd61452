"""The state of a schema registry, built from the records of `_schemas`.

Rules:
- A record that is not understood is skipped and counted. It changes nothing.
- Deleted versions remain, because stored values need their schemas. A permanent deletion
  removes them.
- One id has one schema. Subjects may share it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from logcore.errors import InvalidRecordError, InvalidSchemaError
from logcore.format.schema_records import (
    SchemaReference,
    SchemaVersion,
    StoredDeletion,
    StoredLevel,
    StoredMode,
    StoredVersion,
    read_row,
)
from logcore.schemas.parsing import Resolved, canonical_text

#: Skipped records of which the reasons are kept.
_MAX_REASONS: Final = 10
#: References of one schema, at any depth, and the depth itself.
MAX_REFERENCES: Final = 100
MAX_DEPTH: Final = 32
#: Subjects of other contexts than the default begin with this.
CONTEXT_PREFIX: Final = ":."

#: Type, canonical text, references and metadata.
Identity = tuple[str, str, tuple[SchemaReference, ...], str]


def identity_of(
    kind: str,
    text: str,
    references: tuple[SchemaReference, ...],
    metadata: Mapping[str, Any] | None = None,
) -> Identity:
    """Return the key that all schemas with one id share.

    Raises:
        InvalidSchemaError: the text is not JSON.
    """
    about = "" if not metadata else json.dumps(metadata, sort_keys=True)
    return kind, canonical_text(kind, text), references, about


class SchemaState:
    """Versions by subject, id and GUID, and settings. Not thread-safe.

    Attributes:
        versions: The versions of each subject by number, with deleted ones.
        levels, modes: Settings by subject. None is the setting of all others.
        max_id: The largest id so far.
        skipped: Number of records that were not understood.
        reasons: The reason for each of the first skipped records, by offset.
    """

    def __init__(self) -> None:
        self.versions: dict[str, dict[int, SchemaVersion]] = {}
        self.levels: dict[str | None, str] = {}
        self.modes: dict[str | None, str] = {}
        self.max_id = 0
        self.skipped = 0
        self.reasons: dict[int, str] = {}
        #: Subjects and versions that use an id, in the order of their records.
        self._uses: dict[int, dict[tuple[str, int], None]] = {}
        self._ids: dict[Identity, int] = {}
        self._guids: dict[str, int] = {}

    # -- transitions -------------------------------------------------------------------

    def apply(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        """Apply a record of `_schemas`, or skip it."""
        try:
            match read_row(key, value):
                case StoredVersion(subject, version, schema):
                    self._store(subject, version, schema)
                case StoredDeletion(subject, last):
                    self._delete(subject, last)
                case StoredLevel(subject, level):
                    _set(self.levels, subject, level)
                case StoredMode(subject, mode):
                    _set(self.modes, subject, mode)
                case None:
                    pass
        except (InvalidRecordError, InvalidSchemaError) as error:
            self.skipped += 1
            if len(self.reasons) < _MAX_REASONS:
                self.reasons[offset] = str(error)

    def _store(self, subject: str, version: int, schema: SchemaVersion | None) -> None:
        if subject.startswith(CONTEXT_PREFIX):
            raise InvalidRecordError("contexts are not supported", found=subject[:80])
        identity = None
        if schema is not None:
            identity = identity_of(
                schema.type, schema.text, schema.references, schema.metadata
            )
            known = self.find(schema.id)
            if known is not None and (known.type, known.text) != (
                schema.type,
                schema.text,
            ):
                raise InvalidRecordError(
                    f"{subject!r} version {version}: id {schema.id} has another schema"
                )
        self._forget(subject, version)
        if schema is None or identity is None:
            return
        self.versions.setdefault(subject, {})[version] = schema
        self._uses.setdefault(schema.id, {})[subject, version] = None
        self._ids.setdefault(identity, schema.id)
        self._guids.setdefault(schema.guid, schema.id)
        self.max_id = max(self.max_id, schema.id)

    def _delete(self, subject: str, last: int) -> None:
        versions = self.versions.get(subject, {})
        for version, schema in versions.items():
            if version <= last:
                versions[version] = attrs.evolve(schema, is_deleted=True)

    def _forget(self, subject: str, version: int) -> None:
        versions = self.versions.get(subject, {})
        former = versions.pop(version, None)
        if former is None:
            return
        if not versions:
            del self.versions[subject]
        uses = self._uses[former.id]
        del uses[subject, version]
        if not uses:
            del self._uses[former.id]
            self._guids = _without(self._guids, former.id)
            self._ids = _without(self._ids, former.id)

    # -- lookups -----------------------------------------------------------------------

    def find(self, number: int) -> SchemaVersion | None:
        """Return the schema of an id, as a version of one of its subjects."""
        for subject, version in self._uses.get(number, ()):
            return self.versions[subject][version]
        return None

    def find_guid(self, guid: str) -> SchemaVersion | None:
        """Return the schema of a GUID of 36 characters in lower case."""
        number = self._guids.get(guid)
        return None if number is None else self.find(number)

    def uses(self, number: int) -> list[SchemaVersion]:
        """Return the versions that have an id, sorted."""
        return [
            self.versions[subject][version]
            for subject, version in sorted(self._uses.get(number, ()))
        ]

    def id_of(self, identity: Identity) -> int | None:
        """Return the id of a schema that some subject has."""
        return self._ids.get(identity)

    def version(self, subject: str, version: int) -> SchemaVersion | None:
        """Return a version of a subject, also if it is deleted."""
        return self.versions.get(subject, {}).get(version)

    def all_versions(self, subject: str) -> list[SchemaVersion]:
        """Return the versions of a subject, with deleted ones, in order."""
        found = self.versions.get(subject, {})
        return [found[number] for number in sorted(found)]

    def active(self, subject: str) -> list[SchemaVersion]:
        """Return the versions of a subject that are not deleted, in order."""
        return [
            version for version in self.all_versions(subject) if not version.is_deleted
        ]

    def resolve(self, references: Iterable[SchemaReference]) -> Resolved:
        """Return the names and texts of references at any depth.

        Each text is after the texts to which it refers.

        Raises:
            InvalidSchemaError: a reference is missing, or is part of a cycle, or there
                are too many.
        """
        done: dict[SchemaReference, str] = {}
        for used in references:
            self._resolve(used, done, ())
        texts: dict[tuple[str, str], None] = {}
        for reference, text in done.items():
            texts[reference.name, text] = None
        return tuple(texts)

    def _resolve(
        self,
        reference: SchemaReference,
        done: dict[SchemaReference, str],
        path: tuple[tuple[str, int], ...],
    ) -> None:
        if reference in done:
            return
        place = reference.subject, reference.version
        found = self.version(*place)
        shown = f"reference {reference.name!r} to {place[0]!r} version {place[1]}"
        if found is None:
            raise InvalidSchemaError(f"{shown} does not exist")
        if place in path:
            raise InvalidSchemaError(f"{shown} is part of a cycle")
        if len(path) >= MAX_DEPTH or len(done) >= MAX_REFERENCES:
            raise InvalidSchemaError(
                "too many references",
                expected=f"{MAX_REFERENCES} in all, {MAX_DEPTH} deep",
            )
        for used in found.references:
            self._resolve(used, done, (*path, place))
        done[reference] = found.text

    def users(self, subject: str, version: int) -> Iterator[SchemaVersion]:
        """Yield the versions that refer to a version and are not deleted."""
        for name in self.versions:
            for active in self.active(name):
                if any(
                    (to.subject, to.version) == (subject, version)
                    for to in active.references
                ):
                    yield active


def _set(settings: dict[str | None, str], subject: str | None, new: str | None) -> None:
    if new is None:
        settings.pop(subject, None)
    else:
        settings[subject] = new


def _without(ids: dict[Any, int], number: int) -> dict[Any, int]:
    return {name: schema_id for name, schema_id in ids.items() if schema_id != number}
