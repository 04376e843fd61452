"""The HTTP calls of a schema registry.

Rules:
- Paths, JSON and error codes are those of Confluent's registry. docs/schemas.md lists
  the paths that are not served.
- A path is split at slashes before it is decoded, because subjects may contain a slash.
- A call that may use the disk runs in a thread. A registration is answered once its
  record is stored.
- Requests of web pages are refused; see netshim.http.host.

store.py makes the decisions. This module parses requests and formats responses.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Sequence
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import attrs
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from logcore import RecordTooLargeError
from logcore.errors import (
    InvalidRecordError,
    InvalidSchemaError,
    MissingDependencyError,
)
from logcore.format.schema_records import (
    LARGEST_NUMBER,
    SCHEMA_TYPES,
    SchemaVersion,
    read_references,
)
from logcore.schemas.parsing import canonical_text, serialized_protobuf
from logcore.schemas.state import SchemaState
from netshim.http.host import refusal_reason
from netshim.schemas.compatibility import compare, not_checked
from netshim.schemas.store import (
    DEFAULT_LEVEL,
    DEFAULT_MODE,
    Decision,
    RequestedSchema,
    SchemaRegistryError,
    SchemaStore,
    check_subject,
    compare_by_level,
    delete_subject,
    delete_version,
    find_registered,
    level_not_set,
    level_of,
    mode_not_set,
    mode_of,
    register,
    remove_level,
    remove_mode,
    resolve_schema,
    set_level,
    set_mode,
    subject_not_found,
    to_registry_error,
    version_number,
    version_of,
)

_log = logging.getLogger("netshim")
_T = TypeVar("_T")
#: Type of all responses, as in Confluent's registry.
MEDIA_TYPE: Final = "application/vnd.schemaregistry.v1+json"
#: Largest body of a request.
MAX_BYTES: Final = 1 << 20
#: Maximum number of responses in the cache, and the largest body of one.
_MAX_CACHED_RESPONSES: Final = 256
_MAX_CACHED_BYTES: Final = 64 << 10
#: The field `docs` of responses about compatibility levels.
_LEVEL_DOCS: Final = (
    "Avro schemas are compared. JSON and PROTOBUF schemas are parsed, but are not "
    "compared with earlier ones."
)
#: First parts of paths of Confluent's registry that are not served.
_NOT_SERVED: Final = ("associations", "exporters", "dek-registry", "catalog", "tags")


@attrs.frozen
class RegistryCall:
    """A request: the parameters in its path and query, and its JSON."""

    #: Parameters in the path, by their names in ROUTES.
    path: dict[str, str]
    query: dict[str, str]
    #: The decoded JSON. None if the body is empty.
    body: Any

    @property
    def subject(self) -> str:
        return self.path["subject"]

    def flag(self, *names: str) -> bool:
        """Return whether one of these parameters is true."""
        return any(self.query.get(name, "").lower() == "true" for name in names)

    def page(self, items: Sequence[_T]) -> list[_T]:
        """Return the items that `offset` and `limit` select."""
        # A negative limit means no limit, as in Confluent's registry.
        first = max(0, self._int("offset", 0))
        limit = self._int("limit", -1)
        return list(items[first:] if limit < 0 else items[first : first + limit])

    def _int(self, name: str, default: int) -> int:
        try:
            return int(self.query.get(name, default))
        except ValueError:
            raise SchemaRegistryError(
                400, f"{name}: expected a number, found {self.query[name]!r:.40}"
            ) from None

    def field(self, name: str) -> Any:
        """Return a field of the JSON object in the body."""
        if not isinstance(self.body, dict):
            raise SchemaRegistryError(
                422, f"expected a JSON object, found {self.body!r:.40}"
            )
        return self.body.get(name)

    def schema(self) -> RequestedSchema:
        """Return the schema in the body."""
        # Requests of old clients have no type, because Avro was the only one.
        schema_type = self.field("schemaType") or "AVRO"
        text = self.field("schema")
        if schema_type not in SCHEMA_TYPES:
            raise SchemaRegistryError(
                42201,
                f"Invalid schema type {schema_type!r:.40}: expected {', '.join(SCHEMA_TYPES)}",
            )
        if not isinstance(text, str) or not text.strip():
            raise SchemaRegistryError(42201, "Empty schema: expected a text as schema")
        if self.field("ruleSet"):
            # A client relies on the registry to enforce rules, so they are not dropped
            # silently.
            raise SchemaRegistryError(42210, "Rules of data contracts are not served")
        metadata = self.field("metadata") or None
        if metadata is not None and not isinstance(metadata, dict):
            raise SchemaRegistryError(42201, "Invalid metadata: expected an object")
        try:
            # JSON can contain lone surrogates, which no record can store.
            text.encode()
            json.dumps(metadata, ensure_ascii=False).encode()
            references = read_references(self.field("references"))
        except (InvalidRecordError, UnicodeEncodeError) as error:
            raise SchemaRegistryError(42201, f"Invalid schema: {error}") from error
        if self.flag("normalize"):
            text = canonical_text(schema_type, text)
            # Two schemas that differ only in the order of their references then have
            # one id.
            references = tuple(sorted(references, key=attrs.astuple))
        return RequestedSchema(
            type=schema_type,
            text=text,
            references=references,
            metadata=metadata,
            id=self._number("id"),
            version=self._number("version"),
        )

    def _number(self, name: str) -> int | None:
        number = self.field(name)
        # Clients of Confluent send 0 or -1 for a number that is not set.
        if number in (None, 0, -1):
            return None
        if type(number) is not int or not 0 < number <= LARGEST_NUMBER:
            raise SchemaRegistryError(
                42201, f"{name}: expected 1 to {LARGEST_NUMBER}, found {number!r:.40}"
            )
        return number


class RawText(str):
    """The text of a schema that is the whole body of a response."""


class SchemaRegistry:
    """An ASGI application with the calls."""

    def __init__(self, store: SchemaStore, *, checks_hosts: bool) -> None:
        self._store = store
        #: Whether requests to other hosts than this machine are refused.
        self._checks_hosts = checks_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, from the cache if possible. The server is uvicorn."""
        # Only HTTP scopes arrive, because the host disables lifespan and WebSockets.
        key = _cache_key(scope)
        responses = self._store.cached_responses
        if key in responses and self._store.is_current:
            response = responses[key]
        else:
            response = await self._respond(Request(scope, receive))
            if key is not None and response.status_code == 200:
                # A client that requests many schemas once must not fill the memory.
                if len(responses) >= _MAX_CACHED_RESPONSES:
                    responses.clear()
                if len(response.body) <= _MAX_CACHED_BYTES:
                    # If the state has changed since, the store has another dict, and
                    # this one has no readers any more.
                    responses[key] = response
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        try:
            refused = refusal_reason(request, checks_hosts=self._checks_hosts)
            if refused is not None:
                raise SchemaRegistryError(403, refused)
            method, name, path = _route(request)
            # The other methods have no body.
            body = await _body(request) if method in ("POST", "PUT") else b""
            # In a worker thread, a third of the time of such a request would be the change
            # of threads.
            runs_in_loop = method == "GET" and "format" not in request.query_params
            if runs_in_loop and self._store.is_current:
                return self._run(name, request, path, body)
            return await run_in_threadpool(self._run, name, request, path, body)
        except Exception as error:
            return _failure(error)

    def _run(
        self, name: str, request: Request, path: dict[str, str], body: bytes
    ) -> Response:
        call = RegistryCall(path, dict(request.query_params), _parse_json(body))
        result = getattr(self, name)(call)
        if isinstance(result, RawText):
            return Response(str(result), media_type=MEDIA_TYPE)
        return _response(200, result)

    # -- the registry ------------------------------------------------------------------

    def about(self, _: RegistryCall) -> Any:
        """Return how many records of `_schemas` were skipped, and why."""

        def describe(state: SchemaState) -> Any:
            return {"skipped_records": state.skipped, "skipped": state.reasons}

        return self._store.read(describe)

    def types(self, _: RegistryCall) -> Any:
        """List the types of schemas."""
        # The order of Confluent's registry.
        return ["JSON", "PROTOBUF", "AVRO"]

    def contexts(self, _: RegistryCall) -> Any:
        """List the contexts. There is only the default one."""
        return ["."]

    # -- schemas -----------------------------------------------------------------------

    def list_schemas(self, call: RegistryCall) -> Any:
        """List all versions."""
        prefix = call.query.get("subjectPrefix", "")

        def select(state: SchemaState) -> list[SchemaVersion]:
            versions: list[SchemaVersion] = []
            for subject in sorted(state.versions):
                if not subject.startswith(prefix):
                    continue
                # Deleted versions are listed only on request.
                of_subject = state.active(subject)
                if call.flag("deleted"):
                    of_subject = [
                        state.versions[subject][version]
                        for version in sorted(state.versions[subject])
                    ]
                versions += of_subject[-1:] if call.flag("latestOnly") else of_subject
            return versions

        return [
            _version_fields(version) for version in call.page(self._store.read(select))
        ]

    def by_id(self, call: RegistryCall) -> Any:
        """Return the schema of an id."""
        version = self._store.read(lambda state: _by_id(state, call))
        return self._formatted(call, _schema_fields(version), version)

    def text_by_id(self, call: RegistryCall) -> Any:
        """Return the text of the schema of an id."""
        return RawText(self.by_id(call)["schema"])

    def by_guid(self, call: RegistryCall) -> Any:
        """Return the schema of a GUID."""
        guid = call.path["guid"]
        version = self._store.read(lambda state: state.find_guid(guid.lower()))
        if version is None:
            raise SchemaRegistryError(40403, f"Schema {guid[:40]} not found")
        return self._formatted(call, _schema_fields(version), version)

    def ids_of_guid(self, call: RegistryCall) -> Any:
        """Return the ids of a GUID, by context."""
        return [{"context": ".", "id": self.by_guid(call)["id"]}]

    def subjects_of_id(self, call: RegistryCall) -> Any:
        """Return the subjects of an id."""
        return call.page(
            sorted({reference["subject"] for reference in self._uses(call)})
        )

    def versions_of_id(self, call: RegistryCall) -> Any:
        """Return the subjects and versions of an id."""
        return call.page(self._uses(call))

    def _uses(self, call: RegistryCall) -> list[dict[str, Any]]:
        def select(state: SchemaState) -> list[SchemaVersion]:
            return state.uses(_by_id(state, call).id)

        subject = call.query.get("subject")
        return [
            {"subject": version.subject, "version": version.version}
            for version in self._store.read(select)
            if (call.flag("deleted") or not version.is_deleted)
            and subject in (None, "", version.subject)
        ]

    def _formatted(
        self, call: RegistryCall, fields: dict[str, Any], schema: SchemaVersion
    ) -> dict[str, Any]:
        """Return the fields of a schema, with its text in the format of the request."""
        format_name = call.query.get("format", "")
        # Only Protobuf has a binary form of a schema: a file descriptor.
        if format_name == "serialized" and schema.type == "PROTOBUF":
            references = self._store.read(
                lambda state: state.resolve(schema.references)
            )
            data = serialized_protobuf(schema.text, references)
            return {**fields, "schema": base64.b64encode(data).decode()}
        if format_name not in ("", "default", "serialized"):
            # The client would parse the text as if it had this format.
            raise SchemaRegistryError(404, f"format {format_name!r:.40} is not served")
        return fields

    # -- subjects ----------------------------------------------------------------------

    def list_subjects(self, call: RegistryCall) -> Any:
        """List the subjects."""
        prefix = call.query.get("subjectPrefix", "")
        only_deleted = call.flag("deletedOnly", "deleted_only")

        def select(state: SchemaState) -> list[str]:
            names = (name for name in state.versions if name.startswith(prefix))
            if only_deleted:
                return [name for name in names if not state.active(name)]
            return [
                name for name in names if call.flag("deleted") or state.active(name)
            ]

        return call.page(sorted(self._store.read(select)))

    def look_up(self, call: RegistryCall) -> Any:
        """Return the version of a subject that has a schema."""
        requested = call.schema()
        include_deleted = call.flag("deleted")

        def select(state: SchemaState) -> SchemaVersion:
            existing = find_registered(
                state, call.subject, requested, include_deleted=include_deleted
            )
            if existing is not None:
                return existing
            # A missing subject has another code than a missing schema.
            if not (state.active(call.subject) or include_deleted) or (
                call.subject not in state.versions
            ):
                raise subject_not_found(call.subject)
            raise SchemaRegistryError(40403, "Schema not found")

        schema = self._store.read(select)
        return self._formatted(call, _version_fields(schema), schema)

    def remove_subject(self, call: RegistryCall) -> Any:
        """Delete a subject."""
        is_permanent = call.flag("permanent")
        return self._store.change(
            lambda state: delete_subject(state, call.subject, is_permanent=is_permanent)
        )

    def list_versions(self, call: RegistryCall) -> Any:
        """List the versions of a subject."""
        only_deleted = call.flag("deletedOnly", "deleted_only")

        def select(state: SchemaState) -> list[int]:
            versions = state.versions.get(call.subject, {})
            numbers = [
                number
                for number in sorted(versions)
                if (
                    versions[number].is_deleted
                    and (only_deleted or call.flag("deleted"))
                )
                or not (versions[number].is_deleted or only_deleted)
            ]
            if not numbers:
                raise subject_not_found(call.subject)
            return numbers

        return call.page(self._store.read(select))

    def add_version(self, call: RegistryCall) -> Any:
        """Register a schema."""
        check_subject(call.subject)
        requested = call.schema()
        # Outside of the decision, because parsing may take long and a decision may be
        # repeated.
        is_parsed = self._store.check(requested)

        def decide(state: SchemaState) -> Decision:
            return register(state, call.subject, requested)

        schema, messages = self._store.change(decide)
        if not is_parsed:
            # The schema is stored nevertheless: clients parse it themselves.
            messages = ("not parsed: install grpcio-tools to parse PROTOBUF texts",)
        result = {**_schema_fields(schema), "version": schema.version}
        if messages:
            result["messages"] = list(messages)
        return result

    def show_version(self, call: RegistryCall) -> Any:
        """Return a version of a subject."""
        version = self._store.read(lambda state: _version(state, call))
        return self._formatted(call, _version_fields(version), version)

    def text_of_version(self, call: RegistryCall) -> Any:
        """Return the text of a version."""
        return RawText(self.show_version(call)["schema"])

    def users_of_version(self, call: RegistryCall) -> Any:
        """Return the ids of the schemas that refer to a version."""

        def select(state: SchemaState) -> list[int]:
            version = _version(state, call)
            users = state.users(version.subject, version.version)
            return sorted({referrer.id for referrer in users})

        return call.page(self._store.read(select))

    def remove_version(self, call: RegistryCall) -> Any:
        """Delete a version."""
        is_permanent = call.flag("permanent")
        return self._store.change(
            lambda state: delete_version(
                state, call.subject, call.path["version"], is_permanent=is_permanent
            )
        )

    def with_metadata(self, call: RegistryCall) -> Any:
        """Return the latest version of a subject with some properties."""
        requested = {}
        if "key" in call.query:
            requested = {call.query["key"]: call.query.get("value")}

        def select(state: SchemaState) -> SchemaVersion:
            versions = state.active(call.subject)
            if not versions:
                raise subject_not_found(call.subject)
            # The latest version comes first.
            for version in reversed(versions):
                properties = (version.metadata or {}).get("properties") or {}
                # A version matches if it has all requested properties. Without
                # properties, the latest version matches.
                if requested.items() <= properties.items():
                    return version
            raise SchemaRegistryError(40403, "Schema not found")

        schema = self._store.read(select)
        return self._formatted(call, _version_fields(schema), schema)

    # -- compatibility and settings ----------------------------------------------------

    def compare_with_version(self, call: RegistryCall) -> Any:
        """Compare a schema with one version of a subject."""
        requested = call.schema()
        self._store.check(requested)

        def compare_one(state: SchemaState) -> Any:
            # The level only selects the direction. Other versions are not compared.
            other = version_of(state, call.subject, call.path["version"])
            level = level_of(state, call.subject)
            return compare(
                level,
                resolve_schema(state, "the new schema", requested),
                [resolve_schema(state, f"version {other.version}", other)],
            )

        return _comparison_result(call, requested, self._store.read(compare_one))

    def compare_with_all(self, call: RegistryCall) -> Any:
        """Compare a schema with the versions that the compatibility level requires."""
        requested = call.schema()
        self._store.check(requested)
        comparison = self._store.read(
            lambda state: compare_by_level(
                state, call.subject, requested, state.active(call.subject)
            )
        )
        return _comparison_result(call, requested, comparison)

    def show_level(self, call: RegistryCall) -> Any:
        """Return a compatibility level."""
        subject = call.path.get("subject")

        def select(state: SchemaState) -> str:
            if subject is None:
                return state.levels.get(None, DEFAULT_LEVEL)
            # As in Confluent's registry, a subject without a level of its own is an
            # error.
            if subject not in state.levels and not call.flag("defaultToGlobal"):
                raise level_not_set(subject)
            return level_of(state, subject)

        level = self._store.read(select)
        return {"compatibilityLevel": level, "docs": _LEVEL_DOCS}

    def change_level(self, call: RegistryCall) -> Any:
        """Set a compatibility level."""
        subject = _checked_subject(call)
        level = call.field("compatibility")
        return {
            "compatibility": self._store.change(lambda _: set_level(subject, level))
        }

    def reset_level(self, call: RegistryCall) -> Any:
        """Remove a compatibility level."""
        subject = call.path.get("subject")
        level = self._store.change(lambda state: remove_level(state, subject))
        return {"compatibilityLevel": level}

    def show_mode(self, call: RegistryCall) -> Any:
        """Return a mode."""
        subject = call.path.get("subject")

        def select(state: SchemaState) -> str:
            if subject is None:
                return state.modes.get(None, DEFAULT_MODE)
            if subject not in state.modes and not call.flag("defaultToGlobal"):
                raise mode_not_set(subject)
            return mode_of(state, subject)

        return {"mode": self._store.read(select)}

    def change_mode(self, call: RegistryCall) -> Any:
        """Set a mode."""
        subject = _checked_subject(call)
        mode = call.field("mode")
        is_forced = call.flag("force")
        return {
            "mode": self._store.change(
                lambda state: set_mode(state, subject, mode, is_forced=is_forced)
            )
        }

    def reset_mode(self, call: RegistryCall) -> Any:
        """Remove a mode."""
        subject = call.path.get("subject")
        mode = self._store.change(lambda state: remove_mode(state, subject))
        return {"mode": mode}


_SUBJECT: Final = "subjects/{subject}"
_VERSION: Final = "subjects/{subject}/versions/{version}"
#: Method, path, and the call of SchemaRegistry.
ROUTES: Final = (
    ("GET", "", "about"),
    ("GET", "contexts", "contexts"),
    ("GET", "schemas", "list_schemas"),
    ("GET", "schemas/types", "types"),
    ("GET", "schemas/ids/{id}", "by_id"),
    ("GET", "schemas/ids/{id}/schema", "text_by_id"),
    ("GET", "schemas/ids/{id}/subjects", "subjects_of_id"),
    ("GET", "schemas/ids/{id}/versions", "versions_of_id"),
    ("GET", "schemas/guids/{guid}", "by_guid"),
    ("GET", "schemas/guids/{guid}/ids", "ids_of_guid"),
    ("GET", "subjects", "list_subjects"),
    ("POST", _SUBJECT, "look_up"),
    ("DELETE", _SUBJECT, "remove_subject"),
    ("GET", f"{_SUBJECT}/metadata", "with_metadata"),
    ("GET", f"{_SUBJECT}/versions", "list_versions"),
    ("POST", f"{_SUBJECT}/versions", "add_version"),
    ("GET", _VERSION, "show_version"),
    ("DELETE", _VERSION, "remove_version"),
    ("GET", f"{_VERSION}/schema", "text_of_version"),
    ("GET", f"{_VERSION}/referencedby", "users_of_version"),
    ("POST", f"compatibility/{_SUBJECT}/versions", "compare_with_all"),
    ("POST", f"compatibility/{_VERSION}", "compare_with_version"),
    ("GET", "config", "show_level"),
    ("PUT", "config", "change_level"),
    ("DELETE", "config", "reset_level"),
    ("GET", "config/{subject}", "show_level"),
    ("PUT", "config/{subject}", "change_level"),
    ("DELETE", "config/{subject}", "reset_level"),
    ("GET", "mode", "show_mode"),
    ("PUT", "mode", "change_mode"),
    ("DELETE", "mode", "reset_mode"),
    ("GET", "mode/{subject}", "show_mode"),
    ("PUT", "mode/{subject}", "change_mode"),
    ("DELETE", "mode/{subject}", "reset_mode"),
)
#: The routes with their paths split at slashes.
_ROUTE_PARTS: Final = tuple(
    (method, path.split("/"), name) for method, path, name in ROUTES
)


def _cache_key(scope: Scope) -> tuple[bytes, bytes] | None:
    """Return the key of a request in the cache; None if it must not be cached.

    The response to a cached request depends on the state alone. The key contains the host,
    because some hosts are refused.
    """
    if scope["method"] != "GET" or scope["query_string"]:
        return None
    host = b""
    for name, value in scope["headers"]:
        if name == b"origin":
            return None
        if name == b"host":
            host = value
    # The undecoded path, because "a%2Fb" and "a/b" are different paths.
    return scope["raw_path"], host


def _route(request: Request) -> tuple[str, str, dict[str, str]]:
    """Return the method, the call and the parameters in the path of a request."""
    raw = request.scope.get("raw_path") or request.url.path.encode()
    path = raw.decode("ascii", "replace").partition("?")[0].strip("/")
    parts = path.split("/")
    methods = []
    for method, pattern, name in _ROUTE_PARTS:
        values = _match(pattern, parts)
        if values is not None:
            if method == request.method:
                return method, name, values
            methods.append(method)
    if methods:
        raise SchemaRegistryError(405, f"expected {', '.join(methods)} {path[:80]}")
    if parts[0] in _NOT_SERVED:
        raise SchemaRegistryError(404, f"/{parts[0]} is not served by this registry")
    raise SchemaRegistryError(404, f"not served: {path[:80]}")


def _match(pattern: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    if len(pattern) != len(parts):
        return None
    values = {}
    for segment, part in zip(pattern, parts, strict=True):
        if segment.startswith("{"):
            if not part:
                return None
            values[segment[1:-1]] = unquote(part)
        elif segment != part:
            return None
    return values


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        # Checked for each chunk, because the header may have no length.
        if len(body) > MAX_BYTES:
            raise SchemaRegistryError(413, f"a body has at most {MAX_BYTES} bytes")
    return bytes(body)


def _parse_json(body: bytes) -> Any:
    if not body:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SchemaRegistryError(400, f"the body is not JSON: {error}") from error


def _response(status: int, content: Any) -> Response:
    # The text of an error may repeat lone surrogates of a request, which UTF-8 cannot
    # encode.
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, media_type=MEDIA_TYPE)


def _failure(error: Exception) -> Response:
    """Return the response that reports an error."""
    match error:
        case RecordTooLargeError():
            error = SchemaRegistryError(413, f"the schema is too large: {error}")
        case InvalidSchemaError():
            error = SchemaRegistryError(42201, f"Invalid schema: {error}")
        case MissingDependencyError():
            error = SchemaRegistryError(501, str(error))
        case SchemaRegistryError():
            pass
        case _:
            # The others are errors of the client or of the installation.
            _log.error("schema registry: %r", error)
    refusal = to_registry_error(error)
    return _response(
        int(str(refusal.code)[:3]),
        {"error_code": refusal.code, "message": str(refusal)},
    )


def _checked_subject(call: RegistryCall) -> str | None:
    """Return the subject of a setting, or None for the setting of all subjects."""
    if "subject" in call.path:
        check_subject(call.subject)
    return call.path.get("subject")


def _by_id(state: SchemaState, call: RegistryCall) -> SchemaVersion:
    text = call.path["id"]
    version = None
    # An id is an int32. Longer numbers belong to no schema.
    if text.isascii() and text.isdecimal() and len(text) < 12:
        version = state.find(int(text))
    subject = call.query.get("subject")
    if version is not None and subject:
        of_subject = [
            candidate
            for candidate in state.uses(version.id)
            if candidate.subject == subject
        ]
        version = of_subject[-1] if of_subject else version
    if version is None:
        raise SchemaRegistryError(40403, f"Schema {text[:40]} not found")
    return version


def _version(state: SchemaState, call: RegistryCall) -> SchemaVersion:
    # Checked first: a malformed number has another code than a missing subject.
    version_number(call.path["version"])
    return version_of(
        state,
        call.subject,
        call.path["version"],
        include_deleted=call.flag("deleted"),
    )


def _schema_fields(schema: SchemaVersion) -> dict[str, Any]:
    """Return the fields of a schema that all its subjects share."""
    fields: dict[str, Any] = {"id": schema.id, "guid": schema.guid}
    # Confluent's registry omits the default type.
    if schema.type != "AVRO":
        fields["schemaType"] = schema.type
    if schema.references:
        fields["references"] = [
            attrs.asdict(reference) for reference in schema.references
        ]
    if schema.metadata is not None:
        fields["metadata"] = schema.metadata
    fields["schema"] = schema.text
    return fields


def _version_fields(schema: SchemaVersion) -> dict[str, Any]:
    """Return the fields of a version."""
    return {
        "subject": schema.subject,
        "version": schema.version,
        **_schema_fields(schema),
    }


def _comparison_result(
    call: RegistryCall, requested: RequestedSchema, comparison: Any
) -> Any:
    """Return the body of the response to a comparison."""
    result: dict[str, Any] = {"is_compatible": comparison.is_compatible}
    # A result that was not checked is never returned without this message.
    unchecked = [not_checked(requested.type)] if requested.type != "AVRO" else []
    if call.flag("verbose") or unchecked:
        result["messages"] = list(comparison.messages) or unchecked
    return result
