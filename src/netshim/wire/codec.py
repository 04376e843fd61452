"""Messages and APIs: tables of fields, and functions that encode and decode them by
version.

wire/fields.py describes the rows of a table, and wire/compiler.py generates the
functions.

Rules:
- A message is parsed and compiled at its first use, which takes about a millisecond for
  each version.
- A value has the fields of all served versions. encode() ignores absent ones, and
  decode() sets them to their defaults.
- Decoding foreign bytes returns a value or raises ProtocolError. The error contains the
  field, which is found from the line of generated code that raised.

This module depends on no message, no header and no socket.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Final, Generic, TypeVar

from logcore.errors import LogcoreError
from netshim.wire.compiler import Buffer, Decoder, Encoder, Malformed, has_records
from netshim.wire.fields import LAST, Struct, make_class, parse

ValueT = TypeVar("ValueT")
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

#: The errors that a generated function raises for foreign bytes.
_DECODE_ERRORS: Final = (Malformed, IndexError, struct.error, UnicodeDecodeError)
#: The errors that a generated function raises for a value of the wrong shape.
_ENCODE_ERRORS: Final = (
    struct.error,
    TypeError,
    AttributeError,
    ValueError,
    OverflowError,
)


class ProtocolError(LogcoreError):
    """Bytes of a peer that are not a valid message. Its connection must be closed.

    The text contains message, version and field. `position` counts from the start of
    the frame.
    """


class Message(Generic[ValueT]):
    """A request, a response, or the content of a record: its table, its values, and its
    functions by version.

    The type parameter is the class of its values, see wire/messages.pyi.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        served: tuple[int, int],
        flexible: int | None,
        table: str,
    ) -> None:
        self.name = name
        self.min_version, self.max_version = served
        #: "request", "response" or "".
        self.kind = kind
        #: First version with compact lengths. Above all versions if there is none.
        self._flexible = LAST + 1 if flexible is None else flexible
        self._table = table
        #: By version, filled at their first use.
        self._encoders: dict[int, Callable[..., list[Buffer]]] = {}
        self._decoders: dict[int, Callable[..., Any]] = {}
        #: File name of generated code -> the field of each line.
        self._fields: dict[str, list[str]] = {}

    def __repr__(self) -> str:
        return f"<{self.name}{self.kind and ' ' + self.kind} {self.min_version}-{self.max_version}>"

    @cached_property
    def schema(self) -> Struct:
        schema = parse(self._table)
        make_class(schema, f"{self.name}.{self.kind.capitalize() or 'Value'}")
        return schema

    @property
    def type_name(self) -> str:
        """The name of the class of its values: FetchRequest, TransactionLogKey."""
        return self.name + self.kind.capitalize()

    @cached_property
    def Value(self) -> type[ValueT]:
        """The class of the values of this message."""
        return self.schema.cls

    @cached_property
    def has_records(self) -> bool:
        return has_records(self.schema)

    def is_flexible(self, version: int) -> bool:
        return version >= self._flexible

    def encode(self, version: int, value: ValueT) -> list[Buffer]:
        """Return the buffers of the body: encoded fields, and the given records between
        them.

        Raises ValueError with the name of the field for a value of the wrong shape.
        """
        encode = self._encoders.get(version) or self._compile(
            version, Encoder, self._encoders
        )
        try:
            return encode(value)
        except _ENCODE_ERRORS as error:
            field, _ = self._locate_error(error)
            raise ValueError(f"{self._title(version, field)}: {error}") from error

    def decode(self, version: int, data: Buffer, position: int = 0) -> ValueT:
        """Return the value whose bytes start at `position`. Bytes after it are ignored,
        as in Kafka.

        Records are views of `data`, and are valid as long as `data` is. All other
        fields are copied.
        """
        value, _ = self.decode_and_count(version, data, position, sys.maxsize)
        return value

    def decode_and_count(
        self, version: int, data: Buffer, position: int, max_elements: int
    ) -> tuple[ValueT, int]:
        """Decode like decode(), and also return the number of elements of all arrays.
        If there are more than `max_elements`, raise ProtocolError before the next array
        is read.
        """
        decode = self._decoders.get(version) or self._compile(
            version, Decoder, self._decoders
        )
        # A string is decoded from bytes in half the time, but records would be copied.
        content = memoryview(data) if self.has_records else bytes(data)
        try:
            value, remaining = decode(content, position, len(content), max_elements)
            return value, max_elements - remaining
        except _DECODE_ERRORS as error:
            field, error_position = self._locate_error(error)
            reason = (
                "the bytes end too early"
                if isinstance(error, IndexError | struct.error)
                else str(error)
            )
            raise ProtocolError(
                f"{self._title(version, field)}: {reason}",
                position=position if error_position is None else error_position,
                expected=getattr(error, "expected", None),
                found=getattr(error, "found", None),
            ) from None

    def _compile(
        self,
        version: int,
        compiler: type[Any],
        functions: dict[int, Callable[..., Any]],
    ) -> Callable[..., Any]:
        if not self.min_version <= version <= self.max_version:
            raise ValueError(f"{self!r} has no version {version}")
        writer = compiler(self.schema, version, self.is_flexible(version))
        # Unique, because _locate_error() finds the fields by this name.
        filename = f"<netshim.wire {compiler.__name__} {self._title(version, '')}>"
        self._fields[filename] = writer.source.fields
        functions[version] = writer.source.function(filename)
        return functions[version]

    def _title(self, version: int, field: str) -> str:
        return f"{self.name} v{version}{self.kind and ' ' + self.kind}{field and ', ' + field}"

    def _locate_error(self, error: BaseException) -> tuple[str, int | None]:
        """Return the field whose line of generated code raised an error, and the position
        in the bytes.
        """
        field = ""
        position = None
        # The last frame of generated code counts. Helpers that it calls have no fields.
        for frame, line in _frames(error):
            fields = self._fields.get(frame.f_code.co_filename)
            if fields:
                field = fields[line - 1]
                position = frame.f_locals.get("pos")
        return field, position


def data(
    name: str, *, served: tuple[int, int], flexible: int | None, fields: str
) -> Message[Any]:
    """Return a message that is not a request: the content of a record, or bytes that
    group members exchange.
    """
    return Message(name, "", served, flexible, fields)


def _frames(error: BaseException) -> Iterator[tuple[Any, int]]:
    trace = error.__traceback__
    while trace:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


class Api(Generic[RequestT, ResponseT]):
    """One API key: the served versions, its request and its response. The type
    parameters are the classes of both.
    """

    def __init__(
        self,
        key: int,
        name: str,
        *,
        served: tuple[int, int],
        advertised_min: int | None = None,
        flexible: int | None,
        request: str,
        response: str,
    ) -> None:
        self.key = key
        self.name = name
        self.min_version, self.max_version = served
        #: It may be lower than min_version: such a version is announced for old
        #: clients, but refused.
        self.advertised_min = (
            self.min_version if advertised_min is None else advertised_min
        )
        #: The first version with compact lengths and tagged fields, or None.
        self.flexible = flexible
        self.request: Message[RequestT] = Message(
            name, "request", served, flexible, request
        )
        self.response: Message[ResponseT] = Message(
            name, "response", served, flexible, response
        )

    def __repr__(self) -> str:
        return f"<{self.name} ({self.key}) {self.min_version}-{self.max_version}>"

    def is_flexible(self, version: int) -> bool:
        return self.flexible is not None and version >= self.flexible

    @property
    def Request(self) -> type[RequestT]:
        """The class of request values; inner structs are its attributes."""
        return self.request.Value

    @property
    def Response(self) -> type[ResponseT]:
        """The class of response values; inner structs are its attributes."""
        return self.response.Value


#: Creates an API of the table. Type checkers find its types in table/__init__.pyi.
api: Final = Api[Any, Any]
