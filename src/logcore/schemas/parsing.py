"""Parse schemas of values: Avro, JSON Schema and Protobuf.

Rules:
- A schema comes with the schemas to which it refers, each after those that it needs.
- Every error in a schema raises InvalidSchemaError.
- Protobuf schemas are a text, or a FileDescriptorProto in base64. A text is compiled by
  protoc of grpcio-tools in a process of its own.

fastavro, jsonschema, protobuf and grpcio-tools are imported in the functions that use
them.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import urljoin

from logcore.distribution import install_command
from logcore.errors import InvalidSchemaError, MissingDependencyError
from logcore.format import varint
from logcore.schemas.protoc import compiled

#: Names and texts of the schemas to which a schema refers.
Resolved = tuple[tuple[str, str], ...]
#: Returns the object that the bytes of a value contain. Raises any error for other bytes.
Decoder = Callable[[bytes], Any]

_PARSED: Final = 256
#: One registration needs the same text four times.
_CANONICAL: Final = 16
_PRIMITIVES: Final = frozenset(
    ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
)
#: Keys of Avro schemas in the order of Avro's own texts.
_AVRO_KEYS: Final = ("type", "name", "namespace", "doc", "aliases", "fields")
#: Tokens of Protobuf texts: comments, strings and the rest.
_PROTOBUF_TOKENS: Final = re.compile(
    # An unterminated comment or string extends to the end, so that no text is
    # scanned twice.
    r"//[^\n]*|/\*(?:.*?\*/|.*)|\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?|[\w.]+|\s+|.",
    re.DOTALL,
)
_METASCHEMAS: Final = ("http://json-schema.org/", "https://json-schema.org/")
#: Directory of the files that protobuf and protoc include.
_WELL_KNOWN: Final = "google/protobuf/"


def _missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"these schemas need {package}: {install_command('schemas')}"
    )


def parse_json(text: str) -> Any:
    """Return the JSON of a schema.

    Raises:
        InvalidSchemaError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSchemaError(
            f"the schema is not JSON: {error}", found=repr(text[:80])
        ) from error


# -- canonical texts -------------------------------------------------------------------


@functools.lru_cache(maxsize=_CANONICAL)
def canonical_text(kind: str, text: str) -> str:
    """Return the text that all schemas with the same content have.

    Whitespace, comments of Protobuf, and the order of keys in JSON do not matter.

    Raises:
        InvalidSchemaError: the text is not JSON.
    """
    if kind == "PROTOBUF":
        return _canonical_protobuf(text)
    document = parse_json(text)
    try:
        if kind == "AVRO":
            return json.dumps(
                _canonical_avro(document), ensure_ascii=False, separators=(",", ":")
            )
        return json.dumps(
            document, ensure_ascii=False, separators=(",", ":"), sort_keys=True
        )
    except RecursionError as error:
        raise InvalidSchemaError("the schema is nested too deep") from error


def _canonical_avro(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_canonical_avro(branch) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.keys() == {"type"} and schema["type"] in _PRIMITIVES:
        return schema["type"]
    first = [name for name in _AVRO_KEYS if name in schema]
    last = sorted(schema.keys() - set(first))
    return {
        # A default is a value, not a schema.
        name: schema[name] if name == "default" else _canonical_avro(schema[name])
        for name in (*first, *last)
    }


def _canonical_protobuf(text: str) -> str:
    parts: list[str] = []
    for token in _PROTOBUF_TOKENS.findall(text):
        if token.isspace() or token.startswith(("//", "/*")):
            continue
        if parts and _is_word(parts[-1]) and _is_word(token):
            parts.append(" ")
        parts.append(token)
    return "".join(parts)


def _is_word(token: str) -> bool:
    return token[-1].isalnum() or token[-1] in "_."


# -- Avro ------------------------------------------------------------------------------


def parse_avro(text: str, references: Resolved = ()) -> Any:
    """Return a schema as fastavro needs it.

    Raises:
        InvalidSchemaError: the schema is invalid, or names a type that is missing.
        MissingDependencyError: fastavro is not installed.
    """
    try:
        import fastavro
    except ImportError as error:
        raise _missing("fastavro") from error
    named: dict[str, Any] = {}
    try:
        for _, source in references:
            fastavro.parse_schema(parse_json(source), named)
        return fastavro.parse_schema(parse_json(text), named)
    except InvalidSchemaError:
        raise
    except Exception as error:  # fastavro raises errors of many classes
        raise InvalidSchemaError(
            f"the Avro schema is invalid: {error}", found=repr(text[:80])
        ) from error


def inlined_avro(text: str, references: Resolved) -> Any:
    """Return the JSON of a schema in which each type of a reference is defined.

    Raises:
        InvalidSchemaError: a text is not JSON.
    """
    missing: dict[str, Any] = {}
    for _, source in references:
        schema = parse_json(source)
        if isinstance(schema, dict):
            missing[_full_name(schema)] = schema

    def inlined(schema: Any, namespace: str) -> Any:
        if isinstance(schema, str):
            name = schema if "." in schema or not namespace else f"{namespace}.{schema}"
            found = missing.pop(name, None) or missing.pop(schema, None)
            if found is None:
                return schema
            own = {"namespace": "", **found}
            return inlined(own, _namespace(own, ""))
        if isinstance(schema, list):
            return [inlined(branch, namespace) for branch in schema]
        if not isinstance(schema, dict):
            return schema
        namespace = _namespace(schema, namespace)
        return {
            name: inlined(value, namespace)
            if name in ("type", "items", "values", "fields")
            else value
            for name, value in schema.items()
        }

    return inlined(parse_json(text), "")


def _namespace(schema: dict[str, Any], outer: str) -> str:
    """Return the namespace of the types in a schema."""
    name = str(schema.get("name", ""))
    if schema.get("type") not in ("record", "enum", "fixed"):
        return outer
    if "." in name:
        return name.rpartition(".")[0]
    return str(schema.get("namespace", outer) or "")


def _full_name(schema: dict[str, Any]) -> str:
    name = str(schema.get("name", ""))
    namespace = _namespace(schema, "")
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _avro_decoder(text: str, references: Resolved) -> Decoder:
    import fastavro

    schema = parse_avro(text, references)

    def decode(payload: bytes) -> Any:
        stream = io.BytesIO(payload)
        found = fastavro.schemaless_reader(stream, schema, None)
        if stream.tell() != len(payload):
            raise ValueError(
                f"the schema ends at byte {stream.tell()} of {len(payload)}"
            )
        return found

    return decode


# -- JSON Schema -----------------------------------------------------------------------


def check_json_schema(text: str, references: Resolved = ()) -> None:
    """Check a JSON Schema, and that each $ref names a part of the schema or one of
    `references`.

    Raises:
        InvalidSchemaError: the schema is invalid, or a reference is missing.
        MissingDependencyError: jsonschema is not installed.
    """
    try:
        from jsonschema import SchemaError, validators
    except ImportError as error:
        raise _missing("jsonschema") from error
    schema = parse_json(text)
    if not isinstance(schema, dict | bool):
        raise InvalidSchemaError(
            "the JSON Schema is not an object", found=repr(schema)[:80]
        )
    try:
        kind: Any = validators.validator_for(schema, default=validators.Draft7Validator)
        kind.check_schema(schema)
        names = {name for name, _ in references}
        found = list(_json_references(schema))
    except SchemaError as error:
        raise InvalidSchemaError(
            f"the JSON Schema is invalid at {error.json_path}: {error.message[:200]}"
        ) from error
    except Exception as error:  # a schema that is nested too deep, or a wrong pattern
        raise InvalidSchemaError(f"the JSON Schema is invalid: {error!r}"[:300]) from (
            error
        )
    own = {name for is_id, name in found if is_id}
    for is_id, name in found:
        place = name.partition("#")[0]
        places = {place, *(urljoin(base, place) for base in own)}
        is_known = not places.isdisjoint(names | own) or place.startswith(_METASCHEMAS)
        if not is_id and place and not is_known:
            raise InvalidSchemaError(
                "a $ref names a schema that is not in the references",
                expected=", ".join(sorted(names)) or "no references",
                found=repr(name)[:80],
            )


def _json_references(schema: Any) -> Iterator[tuple[bool, str]]:
    """Yield the ids (True) and references (False) of a schema."""
    if isinstance(schema, list):
        for branch in schema:
            yield from _json_references(branch)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("$ref", "$id") and isinstance(value, str):
                yield name == "$id", value
            elif name not in ("enum", "const", "default", "examples"):
                yield from _json_references(value)


# -- Protobuf --------------------------------------------------------------------------


def has_protoc() -> bool:
    """Return whether Protobuf texts can be compiled."""
    return importlib.util.find_spec("grpc_tools") is not None


@functools.lru_cache(maxsize=_PARSED)
def serialized_protobuf(text: str, references: Resolved = ()) -> bytes:
    """Return a Protobuf schema as a serialized FileDescriptorProto.

    Raises:
        InvalidSchemaError: the schema is invalid.
        MissingDependencyError: protobuf, or grpcio-tools for a text, is not installed.
    """
    found = _protobuf_files(text, references)[-1]
    data: bytes = found.SerializeToString(deterministic=True)
    return data


def _protobuf_files(text: str, references: Resolved) -> list[Any]:
    """Return the files of a schema as FileDescriptorProtos; its own file is the last."""
    try:
        from google.protobuf import descriptor_pb2
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise _missing("protobuf") from error
    files: list[Any] = []
    for name, source in (*references, ("", text)):
        try:
            data = base64.b64decode(source, validate=True)
            found = descriptor_pb2.FileDescriptorProto.FromString(data)
        except (ValueError, DecodeError):
            found = _compiled(source, files)
        # Other files import it under the name of the reference.
        found.name = name or found.name or "schema.proto"
        files.append(found)
    _pool(files)
    return files


def _compiled(text: str, files: Sequence[Any]) -> Any:
    """Compile the text of a Protobuf file that may import the others."""
    from google.protobuf import descriptor_pb2

    if not has_protoc():
        raise MissingDependencyError(
            "texts of Protobuf schemas need grpcio-tools: pip install grpcio-tools"
        )
    known = descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()
    return descriptor_pb2.FileDescriptorSet.FromString(compiled(text, known)).file[0]


def _pool(files: Sequence[Any]) -> Any:
    """Return a pool of descriptors with these files and the well-known ones."""
    from google.protobuf import descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add_known(name: str) -> None:
        """Add a file of protobuf, after those that it imports."""
        if name in added or not name.startswith(_WELL_KNOWN):
            return
        added.add(name)
        for wellknown in ("any", "duration", "empty", "field_mask", "source_context", "struct",
                    "timestamp", "type", "wrappers", "api", "descriptor"):  # fmt: skip
            if name == f"{_WELL_KNOWN}{wellknown}.proto":
                module = importlib.import_module(f"google.protobuf.{wellknown}_pb2")
                for other in module.DESCRIPTOR.dependencies:
                    add_known(other.name)
                pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)

    try:
        for file in files:
            if file.name in added:
                continue
            for name in file.dependency:
                add_known(name)
            added.add(file.name)
            pool.AddSerializedFile(file.SerializeToString())
        pool.FindFileByName(files[-1].name)
    except Exception as error:  # TypeError and KeyError, by the implementation
        raise InvalidSchemaError(
            f"the Protobuf schema is invalid: {error!r}"[:300]
        ) from error
    return pool


def _protobuf_decoder(text: str, references: Resolved) -> Callable[..., Any]:
    """Return a function of a payload and message indexes; see message_indexes()."""
    from google.protobuf import json_format, message_factory

    files = _protobuf_files(text, references)
    pool = _pool(files)
    file = pool.FindFileByName(files[-1].name)

    @functools.cache
    def message_of(indexes: tuple[int, ...]) -> Any:
        # The descriptor of a file has no order, its proto has.
        scope: Any = files[-1].message_type
        names = []
        for index in indexes:
            if not 0 <= index < len(scope):
                raise ValueError(f"the schema has no message {list(indexes)}")
            names.append(scope[index].name)
            scope = scope[index].nested_type
        package = [file.package] if file.package else []
        found = pool.FindMessageTypeByName(".".join((*package, *names)))
        return message_factory.GetMessageClass(found)

    def decode(payload: bytes, indexes: tuple[int, ...]) -> Any:
        message = message_of(indexes).FromString(payload)
        return json_format.MessageToDict(
            message, preserving_proto_field_name=True, descriptor_pool=pool
        )

    return decode


def message_indexes(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """Return the path to a message in its Protobuf file, and the position after it.

    For example (1, 0) is the first message inside the second one.

    Raises:
        ValueError, IndexError, InvalidRecordError: the bytes are not a path.
    """
    count, at = _zigzag(data, at)
    if count == 0:
        return (0,), at
    if not 0 < count <= len(data):
        raise ValueError(f"{count} message indexes")
    found = []
    for _ in range(count):
        index, at = _zigzag(data, at)
        found.append(index)
    return tuple(found), at


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    number, at = varint.decode_unsigned(data, at)
    return (number >> 1) ^ -(number & 1), at


# -- all types -------------------------------------------------------------------------


def check_schema(kind: str, text: str, references: Resolved) -> bool:
    """Check a schema, and return whether it was parsed.

    Only the text of a Protobuf schema without protoc is not parsed.

    Raises:
        InvalidSchemaError: the schema is invalid, or a reference is missing.
        MissingDependencyError: a package for this type is not installed.
    """
    if kind == "AVRO":
        parse_avro(text, references)
    elif kind == "JSON":
        check_json_schema(text, references)
    else:
        try:
            serialized_protobuf(text, references)
        except MissingDependencyError:
            if has_protoc():
                raise
            return False
    return True


def value_decoder(
    kind: str, text: str, references: Resolved
) -> Callable[[bytes, tuple[int, ...]], Any]:
    """Return a function that decodes values with a schema.

    It has the arguments payload and message indexes, which only Protobuf uses. Errors
    are those of check_schema().
    """
    if kind == "PROTOBUF":
        return _protobuf_decoder(text, references)
    decode: Decoder = json.loads
    if kind == "AVRO":
        decode = _avro_decoder(text, references)
    return lambda payload, _: decode(payload)
