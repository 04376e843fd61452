"""The Kafka wire protocol: frames of requests and responses to values and back.

    header = wire.decode_header(frame)                     # the frame without its size
    request = wire.decode_request(header, frame)
    pieces = wire.encode_response(wire.APIS[header.api_key], header.api_version, header.correlation_id, response)

Values are light objects whose fields have Kafka's names and defaults:
`wire.PRODUCE.Response(throttle_time_ms=5)`,
`wire.PRODUCE.Response.Topic.Partition(index=0)`. They have the fields of all served
versions, so a handler is written once: what a version lacks holds its default after
decoding and is left out by encoding.

Rules:
- Bytes from outside raise ProtocolError or nothing; UnsupportedVersionError, a child of
  it, carries the header.
- Strings are str, bytes are bytes (copied), uuids are 16 bytes, all zero for none,
  arrays are lists.
- Records are never copied: decoding gives a view of the frame, encoding returns the
  buffers given, in their place.
- A value of the wrong shape is the caller's error: ValueError with the name of the
  field.

No sockets, no state: who reads frames and limits their size is the connection.
"""

from __future__ import annotations

import struct
import sys
from typing import Any, Final

from netshim.wire import codes, table
from netshim.wire.codec import (
    Api,
    Message,
    ProtocolError,
    RequestT,
    ResponseT,
    ValueT,
)
from netshim.wire.compiler import Buffer, Malformed, skip_tags
from netshim.wire.table import *  # noqa: F403  (all messages, by Kafka's names; table.__all__ lists them)

_REQUEST_HEAD: Final = struct.Struct(">hhih")
_RESPONSE_HEAD: Final = struct.Struct(">ii")
_RESPONSE_HEAD_FLEXIBLE: Final = struct.Struct(">iix")
_VERSION: Final = struct.Struct(">h")


class UnsupportedVersionError(ProtocolError):
    """A version we do not serve. header: of the request that asked for it, None when
    there was no request.
    """

    def __init__(
        self, reason: str, *, header: Header | None = None, **where: Any
    ) -> None:
        self.header = header
        super().__init__(reason, **where)


class Header:
    """The fields before the body of a request. A client without an id has the empty
    one.
    """

    __slots__ = ("api_key", "api_version", "body_start", "client_id", "correlation_id")

    def __init__(
        self,
        api_key: int,
        api_version: int,
        correlation_id: int,
        client_id: str,
        body_start: int,
    ) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.body_start = body_start

    def __repr__(self) -> str:
        return (
            f"Header(api_key={self.api_key}, api_version={self.api_version}, "
            f"correlation_id={self.correlation_id}, client_id={self.client_id!r}, body_start={self.body_start})"
        )


def decode_header(frame: memoryview) -> Header:
    """The header of a request frame (without the size in front of it).

    A version of ApiVersions that we do not serve still gives a header: its answer says
    what we do serve. body_start is without meaning then. Any other unserved version
    raises UnsupportedVersionError.
    """
    if len(frame) < _REQUEST_HEAD.size:
        raise ProtocolError(
            "request header: the frame is too short",
            position=0,
            expected="10 bytes or more",
            found=len(frame),
        )
    api_key, api_version, correlation_id, size_bytes = _REQUEST_HEAD.unpack_from(frame)
    api = table.APIS.get(api_key)
    if api is None:
        raise ProtocolError(
            "request header: unknown api key", position=0, found=api_key
        )
    client_id = ""
    body_start = 10
    if (
        size_bytes > 0
    ):  # -1 is null; and in every version of the header this length is an int16
        body_start += size_bytes
        try:
            client_id = str(frame[10:body_start], "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(
                f"request header, client_id: {error}", position=10
            ) from None
    if body_start > len(frame) or size_bytes < -1:
        raise ProtocolError(
            "request header: client_id is cut off",
            position=8,
            expected=f"-1 to {len(frame) - 10}",
            found=size_bytes,
        )
    served = api.min_version <= api_version <= api.max_version
    if served and api.flexible is not None and api_version >= api.flexible:
        if body_start < len(frame) and not frame[body_start]:
            body_start += 1
        else:
            try:
                body_start = skip_tags(frame, body_start, len(frame))
            except (IndexError, Malformed) as error:
                raise ProtocolError(
                    f"request header, tagged fields: {error}", position=body_start
                ) from None
    header = Header(api_key, api_version, correlation_id, client_id, body_start)
    if not served and api is not table.API_VERSIONS:
        raise UnsupportedVersionError(
            f"request header: {api.name} in a version we do not serve",
            header=header,
            position=2,
            expected=f"{api.min_version} to {api.max_version}",
            found=api_version,
        )
    return header


def decode_request(header: Header, frame: memoryview) -> Any:
    """The request behind a header. Records are views of the frame: use or copy them
    before it is overwritten.
    """
    request, _ = decode_counted_request(header, frame, sys.maxsize)
    return request


def decode_counted_request(
    header: Header, frame: memoryview, most_entries: int
) -> tuple[Any, int]:
    """As decode_request(), and the entries of the request: how many elements all its
    arrays have. More than most_entries are refused.
    """
    api = table.APIS[header.api_key]
    _check(api.request, header.api_version, header)
    return api.request.decode_counted(
        header.api_version, frame, header.body_start, most_entries
    )


def encode_response(
    api: Api[Any, ResponseT], version: int, correlation_id: int, body: ResponseT
) -> list[Buffer]:
    """A response frame, with its size in front, as pieces to send one after the other.

    Records may be bytes, a memoryview or a list of buffers; they become pieces as they
    are. Null records are encoded when asked for, but librdkafka drops a Fetch response
    that has some: give empty bytes.
    """
    pieces = api.response.encode(version, body)
    # The answer to ApiVersions has no tagged fields in its header: its reader may not
    # know yet what we speak.
    if api.flexible is None or version < api.flexible or api is table.API_VERSIONS:
        head = _RESPONSE_HEAD
        size_bytes = 4
    else:
        head = _RESPONSE_HEAD_FLEXIBLE
        size_bytes = 5
    for piece in pieces:
        size_bytes += len(piece)
    pieces[0] = head.pack(size_bytes, correlation_id) + pieces[0]
    return pieces


def encode_request(
    api: Api[RequestT, Any],
    version: int,
    correlation_id: int,
    client_id: str | None,
    body: RequestT,
) -> bytes:
    """A request frame with its size in front, as a client sends it."""
    if client_id is None:
        name = None
    else:
        name = client_id.encode()
    content = b"".join(
        (
            _REQUEST_HEAD.pack(
                api.key, version, correlation_id, -1 if name is None else len(name)
            ),
            name or b"",
            b"\0" if api.is_flexible(version) else b"",
            *api.request.encode(version, body),
        )
    )
    return len(content).to_bytes(4, "big") + content


def decode_response(
    api: Api[Any, ResponseT], version: int, frame: Buffer
) -> tuple[int, ResponseT]:
    """Correlation id and value of a response frame (without the size in front of it),
    as a client reads it.
    """
    _check(api.response, version)
    view = memoryview(frame)
    if len(view) < 4:
        raise ProtocolError(
            "response header: the frame is too short",
            position=0,
            expected="4 bytes",
            found=len(view),
        )
    correlation_id = int.from_bytes(view[:4], "big", signed=True)
    body_start = 4
    if api.is_flexible(version) and api is not table.API_VERSIONS:
        try:
            body_start = skip_tags(view, body_start, len(view))
        except (IndexError, Malformed) as error:
            raise ProtocolError(
                f"response header, tagged fields: {error}", position=body_start
            ) from None
    return correlation_id, api.response.decode(version, view, body_start)


def encode_data(message: Message[ValueT], version: int, value: ValueT) -> bytes:
    """The bytes of a message that is no request."""
    return b"".join(message.encode(version, value))


def decode_data(message: Message[ValueT], version: int, data: Buffer) -> ValueT:
    """The value in the bytes of a message that is no request."""
    _check(message, version)
    return message.decode(version, data)


def encode_versioned(message: Message[ValueT], version: int, value: ValueT) -> bytes:
    """As encode_data, with the version as an int16 in front: so are the internal topics
    and group members' bytes.
    """
    return _VERSION.pack(version) + encode_data(message, version, value)


def decode_versioned(message: Message[ValueT], data: Buffer) -> tuple[int, ValueT]:
    """Version and value of bytes that encode_versioned made.

    What a newer group member wrote (ConsumerProtocol...) is read in the newest version
    we know, as Kafka's clients do: new fields come behind the known ones. For records
    of internal topics a newer version is an error.
    """
    if len(data) < 2:
        raise ProtocolError(
            f"{message.name}: no version",
            position=0,
            expected="2 bytes",
            found=len(data),
        )
    version = int.from_bytes(data[:2], "big", signed=True)
    known = version
    if message in (
        table.CONSUMER_PROTOCOL_SUBSCRIPTION,
        table.CONSUMER_PROTOCOL_ASSIGNMENT,
    ):
        known = min(version, message.max_version)
    _check(message, known)
    return version, message.decode(known, data, 2)


def _check(message: Message[Any], version: int, header: Header | None = None) -> None:
    if not message.min_version <= version <= message.max_version:
        raise UnsupportedVersionError(
            f"{message.name}: a version we do not know",
            header=header,
            expected=f"{message.min_version} to {message.max_version}",
            found=version,
        )


__all__ = [
    "Api",
    "Buffer",
    "Header",
    "Message",
    "ProtocolError",
    "UnsupportedVersionError",
    "codes",
    "decode_counted_request",
    "decode_data",
    "decode_header",
    "decode_request",
    "decode_response",
    "decode_versioned",
    "encode_data",
    "encode_request",
    "encode_response",
    "encode_versioned",
]
__all__ += table.__all__
