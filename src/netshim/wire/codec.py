"""Messages and APIs: tables of fields with the functions that encode and decode them,
by version.

wire/fields.py says how a row of a table reads, wire/compiler.py writes the functions.

Rules:
- Nothing is parsed or compiled before its first use; a message and version costs about
  a millisecond then.
- A value has the fields of all served versions. Absent ones are ignored by encode and
  set to their default by decode.
- Decoding foreign bytes returns a value or raises ProtocolError, which names the field:
  it is known from the line of generated code that raised.

This module knows no message, no header and no socket.
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

#: All that foreign bytes can make a generated function raise.
_FOREIGN: Final = (Malformed, IndexError, struct.error, UnicodeDecodeError)
#: What a value of the wrong shape can make one raise.
_WRONG: Final = (struct.error, TypeError, AttributeError, ValueError, OverflowError)


class ProtocolError(LogcoreError):
    """Bytes of a peer that are no message of ours. Its connection cannot go on.

    The reason names message, version and field; position counts from the start of the
    frame.
    """


class Message(Generic[ValueT]):
    """A request, a response, or the content of a record: its table, its values, its
    functions by version.

    kind: "request", "response" or "". The type parameter is the class of its values,
    see wire/messages.pyi.
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
        self.kind = kind
        self._flexible = LAST + 1 if flexible is None else flexible
        self._table = table
        self._encoders: dict[int, Callable[..., list[Buffer]]] = {}
        self._decoders: dict[int, Callable[..., Any]] = {}
        self._fields: dict[
            str, list[str]
        ] = {}  # by file name of generated code: the field of each line

    def __repr__(self) -> str:
        return f"<{self.name}{self.kind and ' ' + self.kind} {self.min_version}-{self.max_version}>"

    @cached_property
    def shape(self) -> Struct:
        shape = parse(self._table)
        make_class(shape, f"{self.name}.{self.kind.capitalize() or 'Value'}")
        return shape

    @property
    def type_name(self) -> str:
        """The name of the class of its values in messages: FetchRequest,
        TransactionLogKey.
        """
        return self.name + self.kind.capitalize()

    @cached_property
    def Value(self) -> type[ValueT]:
        """The class of this message's values."""
        return self.shape.cls

    @cached_property
    def has_records(self) -> bool:
        return has_records(self.shape)

    def is_flexible(self, version: int) -> bool:
        return version >= self._flexible

    def encode(self, version: int, value: ValueT) -> list[Buffer]:
        """The pieces of the body: our own bytes, and between them records as they were
        given.

        ValueError names the field of a value that does not fit.
        """
        encode = self._encoders.get(version) or self._compile(
            version, Encoder, self._encoders
        )
        try:
            return encode(value)
        except _WRONG as error:
            field, _ = self._place(error)
            raise ValueError(f"{self._title(version, field)}: {error}") from error

    def decode(self, version: int, data: Buffer, position: int = 0) -> ValueT:
        """The value whose bytes start at position. Bytes behind it are ignored, as
        Kafka does.

        Records are views of data and valid as long as it is; everything else is copied.
        """
        value, _ = self.decode_counted(version, data, position, sys.maxsize)
        return value

    def decode_counted(
        self, version: int, data: Buffer, position: int, most: int
    ) -> tuple[ValueT, int]:
        """As decode(), and how many elements all arrays have together; more than `most`
        are refused unread.
        """
        decode = self._decoders.get(version) or self._compile(
            version, Decoder, self._decoders
        )
        content = memoryview(data) if self.has_records else bytes(data)
        try:
            value, left = decode(content, position, len(content), most)
            return value, most - left
        except _FOREIGN as error:
            field, found_at = self._place(error)
            reason = (
                "the bytes end too early"
                if isinstance(error, IndexError | struct.error)
                else str(error)
            )
            raise ProtocolError(
                f"{self._title(version, field)}: {reason}",
                position=position if found_at is None else found_at,
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
        writer = compiler(self.shape, version, self.is_flexible(version))
        filename = f"<netshim.wire {compiler.__name__} {self._title(version, '')}>"
        self._fields[filename] = writer.source.fields
        functions[version] = writer.source.function(filename)
        return functions[version]

    def _title(self, version: int, field: str) -> str:
        return f"{self.name} v{version}{self.kind and ' ' + self.kind}{field and ', ' + field}"

    def _place(self, error: BaseException) -> tuple[str, int | None]:
        """The field whose generated line raised an error, and the position it had
        reached.
        """
        field = ""
        position = None
        for frame, line in _frames(error):
            fields = self._fields.get(frame.f_code.co_filename)
            if fields:
                field = fields[line - 1]
                position = frame.f_locals.get("pos")
        return field, position


def data(
    name: str, *, served: tuple[int, int], flexible: int | None, fields: str
) -> Message[Any]:
    """A message that is no request: the content of a record, or bytes that group
    members hand each other.
    """
    return Message(name, "", served, flexible, fields)


def _frames(error: BaseException) -> Iterator[tuple[Any, int]]:
    trace = error.__traceback__
    while trace:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


class Api(Generic[RequestT, ResponseT]):
    """One API key: the versions we serve, its request and its response. The type
    parameters are the classes of both.

    flexible: the first version with compact lengths and tagged fields, None when there
    is none. advertised_min may be lower than min_version: a version announced for old
    clients to see, yet refused.
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
        self.advertised_min = (
            self.min_version if advertised_min is None else advertised_min
        )
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


def api(
    key: int,
    name: str,
    *,
    served: tuple[int, int],
    advertised_min: int | None = None,
    flexible: int | None,
    request: str,
    response: str,
) -> Api[Any, Any]:
    """An API of the table. Its types are known to type checkers from
    table/__init__.pyi.
    """
    return Api(
        key,
        name,
        served=served,
        advertised_min=advertised_min,
        flexible=flexible,
        request=request,
        response=response,
    )
