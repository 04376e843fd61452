"""Decode keys and values by the schemas of a registry.

A value names its schema in one of two ways:
- it begins with a zero byte and the id of the schema in four bytes, or
- a header `__value_schema_id` or `__key_schema_id` has byte 1 and the GUID in 16 bytes.

Rules:
- Decoding never raises. A value that cannot be decoded is shown as bytes, with the
  reason.
- Schemas come from the topic `_schemas`, or from a registry over HTTP.
"""

from __future__ import annotations

import json
import struct
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import attrs

from logcore.errors import (
    InvalidConfigError,
    InvalidRecordError,
    LogcoreError,
    RemoteUnavailableError,
)
from logcore.format.schema_records import SchemaVersion, guid_of, read_references
from logcore.inspect.dump import shown, shown_value
from logcore.kernels import Record
from logcore.reporting import WARNING, log_line
from logcore.schemas.parsing import message_indexes, value_decoder
from logcore.schemas.state import SchemaState

VALUE_HEADER: Final = "__value_schema_id"
KEY_HEADER: Final = "__key_schema_id"
_FRAME: Final = struct.Struct(">bI")
_GUID_BYTES: Final = 16
#: Limits of a request to a registry: seconds, and bytes of the answer.
_RESPONSE_TIMEOUT_S: Final = 10
_MAX_RESPONSE_BYTES: Final = 16 << 20
#: Reasons that are counted one by one.
_MAX_REASONS: Final = 100
_OTHER: Final = "other reasons"
Headers = Sequence[tuple[str, bytes | None]]


def load_schemas(records: Iterable[Record]) -> SchemaState:
    """Return the schemas in the records of `_schemas`, in the order of their offsets."""
    state = SchemaState()
    for offset, _, key, value, _ in records:
        state.apply(offset, key, value)
    return state


class RemoteSchemas(SchemaState):
    """The schemas of a registry over HTTP. Each is fetched once."""

    def __init__(self, url: str) -> None:
        """Connect to a registry, such as http://127.0.0.1:8081.

        Raises:
            InvalidConfigError: the URL is not http or https.
            RemoteUnavailableError: the registry does not answer.
        """
        super().__init__()
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InvalidConfigError(
                "schema registry", expected="http://HOST:PORT", found=repr(url)
            )
        self._url = url.rstrip("/")
        self._found: dict[str, SchemaVersion | None] = {}
        # A wrong address is an error here. Later it would count as undecodable values.
        self._get("/schemas/types")

    def find(self, number: int) -> SchemaVersion | None:
        """Return the schema of an id."""
        return self._fetched(f"/schemas/ids/{number}", number)

    def find_guid(self, guid: str) -> SchemaVersion | None:
        """Return the schema of a GUID."""
        return self._fetched(f"/schemas/guids/{guid}", 0)

    def version(self, subject: str, version: int) -> SchemaVersion | None:
        """Return a version of a subject."""
        name = urllib.parse.quote(subject, safe="")
        # Schemas may refer to versions that were deleted since.
        return self._fetched(f"/subjects/{name}/versions/{version}?deleted=true", 0)

    def all_versions(self, subject: str) -> list[SchemaVersion]:
        """Return the versions of a subject."""
        name = urllib.parse.quote(subject, safe="")
        numbers = self._get(f"/subjects/{name}/versions?deleted=true") or []
        found = (self.version(subject, number) for number in numbers)
        return [version for version in found if version is not None]

    def _fetched(self, path: str, number: int) -> SchemaVersion | None:
        if path not in self._found:
            fields = self._get(path)
            # A missing schema is remembered too, because a topic may have millions of
            # values with its id.
            self._found[path] = None
            if isinstance(fields, dict):
                self._found[path] = _version_of(fields, number)
        return self._found[path]

    def _get(self, path: str) -> Any:
        """Return the answer to a request, or None if there is no such schema."""
        try:
            with urllib.request.urlopen(
                self._url + path, timeout=_RESPONSE_TIMEOUT_S
            ) as answer:
                return json.loads(answer.read(_MAX_RESPONSE_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return None
                raise RemoteUnavailableError(
                    f"the schema registry {self._url} answers {path} with {error.code}"
                ) from error
        except (OSError, ValueError) as error:
            raise RemoteUnavailableError(
                f"the schema registry {self._url} does not answer: {error}"
            ) from error


def _version_of(fields: dict[str, Any], number: int) -> SchemaVersion | None:
    text = fields.get("schema")
    kind = fields.get("schemaType") or "AVRO"
    if not isinstance(text, str):
        return None
    references = read_references(fields.get("references"))
    schema_id = fields.get("id")
    return SchemaVersion(
        subject="",
        version=0,
        id=schema_id if isinstance(schema_id, int) else number,
        guid=str(fields.get("guid") or guid_of(kind, text, references)),
        text=text,
        type=kind,
        references=references,
    )


@attrs.frozen
class DecodedPart:
    """A decoded key or value, for display and for programs."""

    #: The object in the data, which json.dumps() accepts.
    value: Any
    #: The id, GUID and type of the schema, or None if the data names no schema.
    schema: dict[str, Any] | None = None
    #: The reason why data that names a schema is not decoded. `value` then shows the
    #: bytes.
    error: str | None = None

    @property
    def text(self) -> str:
        """The value in one line: JSON, or the text that is stored.

        UTF-8 can encode the text, because half of a surrogate pair becomes an escape,
        as JSON allows.
        """
        is_stored = self.schema is None or self.error is not None
        if isinstance(self.value, str) and is_stored:
            return self.value
        text = json.dumps(self.value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace").decode()


@attrs.frozen
class _KnownSchema:
    """A schema that was found. `decode` is the reason if it cannot decode values."""

    named: dict[str, Any]
    is_protobuf: bool
    decode: Callable[[bytes, tuple[int, ...]], Any] | LogcoreError


class ValueDecoder:
    """Decodes keys and values of records."""

    def __init__(self, schemas: SchemaState) -> None:
        #: The schemas. A schema that was found is not requested again.
        self.schemas = schemas
        #: Number of keys and values that name a schema and were not decoded, by reason.
        self.failures: Counter[str] = Counter()
        self._known: dict[int | str, _KnownSchema] = {}

    def decode(
        self, data: bytes | None, headers: Headers = (), *, is_key: bool = False
    ) -> DecodedPart:
        """Decode a value, or a key if `is_key`. This never raises."""
        if data is None:
            return DecodedPart(None)
        named: dict[str, Any] = {}
        try:
            place = _schema_of(data, headers, KEY_HEADER if is_key else VALUE_HEADER)
            if place is None:
                return DecodedPart(shown(data))
            name, frame, at = place
            kind = "id" if isinstance(name, int) else "guid"
            named = {kind: name}
            known = self._known.get(name) or self._find(name)
            if known is None:
                return self._failed(data, named, f"unknown schema {kind} {name}")
            named = known.named
            return DecodedPart(_decoded(known, frame, data, at), named)
        except Exception as error:  # libraries raise many classes for invalid bytes
            reason = f"the value does not have its schema: {error}"
            if isinstance(error, LogcoreError):
                reason = str(error)
            return self._failed(data, named, reason[:300])

    def _failed(self, data: bytes, named: dict[str, Any], reason: str) -> DecodedPart:
        # Reasons contain text from the values. Without a limit, each damaged value
        # could add an entry and a log line.
        is_counted = reason in self.failures or len(self.failures) < _MAX_REASONS
        counted = reason if is_counted else _OTHER
        if counted not in self.failures:
            log_line("schemas", WARNING, "a value was not decoded: %s", counted)
        self.failures[counted] += 1
        return DecodedPart(shown(data), named, reason)

    def _find(self, name: int | str) -> _KnownSchema | None:
        """Return the schema of an id or a GUID."""
        if isinstance(name, int):
            schema = self.schemas.find(name)
        else:
            schema = self.schemas.find_guid(name)
        if schema is None:
            return None
        decode: Callable[[bytes, tuple[int, ...]], Any] | LogcoreError
        # A schema that cannot be parsed is kept with its error, so that it is not
        # parsed again for each value.
        try:
            references = self.schemas.resolve(schema.references)
            decode = value_decoder(schema.type, schema.text, references)
        except LogcoreError as error:
            decode = error
        known = _KnownSchema(
            {"id": schema.id, "guid": schema.guid, "type": schema.type},
            schema.type == "PROTOBUF",
            decode,
        )
        self._known[name] = known
        return known


def _decoded(known: _KnownSchema, frame: bytes, data: bytes, at: int) -> Any:
    """Return the object in `data` from `at` on; `frame` contains the id or GUID of the
    schema.

    The message indexes of Protobuf end the frame, or follow it in the value.
    """
    indexes: tuple[int, ...] = (0,)
    if known.is_protobuf:
        if at:
            indexes, at = message_indexes(data, at)
        elif len(frame) > 1 + _GUID_BYTES:
            indexes, _ = message_indexes(frame, 1 + _GUID_BYTES)
    if isinstance(known.decode, LogcoreError):
        raise known.decode
    return shown_value(known.decode(data[at:], indexes))


def _schema_of(
    data: bytes, headers: Headers, name: str
) -> tuple[int | str, bytes, int] | None:
    """Return the id or the GUID of a schema, its frame, and where the payload begins.

    Raises:
        InvalidRecordError: the header is damaged.
    """
    # 1. The header comes first: with it, the value has no frame, and may begin with a
    # zero byte of its own.
    for header, content in headers:
        if header == name:
            if content is None or len(content) <= _GUID_BYTES or content[0] != 1:
                raise InvalidRecordError(
                    f"header {name}",
                    expected="byte 1 and the 16 bytes of a GUID",
                    found=repr(content)[:80],
                )
            guid = uuid.UUID(bytes=bytes(content[1 : 1 + _GUID_BYTES]))
            return str(guid), content, 0
    # 2. The frame in the value. Other values are plain bytes.
    if len(data) < _FRAME.size or data[0]:
        return None
    return _FRAME.unpack_from(data)[1], data[: _FRAME.size], _FRAME.size
