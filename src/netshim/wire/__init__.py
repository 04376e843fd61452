"""The Kafka wire protocol: converts frames of requests and responses to values and
back.

    header = wire.decode_header(frame)                     # the frame without its size
    request = wire.decode_request(header, frame)
    buffers = wire.encode_response(wire.APIS[header.api_key], header.api_version, header.correlation_id, response)

Values are small objects whose fields have Kafka's names and defaults:
`wire.PRODUCE.Response(throttle_time_ms=5)`,
`wire.PRODUCE.Response.Topic.Partition(index=0)`. They have the fields of all served
versions, so a handler is written once. If a version lacks a field, decoding sets it to
its default, and encoding omits it.

Rules:
- Invalid bytes of a peer raise only ProtocolError. Its subclass UnsupportedVersionError
  contains the header.
- Strings are str, bytes are bytes (copied), uuids are 16 bytes (all zero for none),
  arrays are lists.
- Records are never copied: decoding returns a view of the frame, and encoding returns
  the given buffers at their position.
- A value of the wrong shape is an error of the caller: ValueError with the name of the
  field.

This package has no sockets and no state. The connection reads frames and limits their
size.
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

#: API key, version, correlation id, and the size of the client id.
_REQUEST_HEADER: Final = struct.Struct(">hhih")
#: Size and correlation id.
_RESPONSE_HEADER: Final = struct.Struct(">ii")
#: The same with empty tagged fields, which are one zero byte.
_FLEXIBLE_RESPONSE_HEADER: Final = struct.Struct(">iix")
#: Version in front of a message in encode_versioned().
_VERSION: Final = struct.Struct(">h")


class UnsupportedVersionError(ProtocolError):
    """A version that is not served. `header` is the header of the request, or None
    without a request.
    """

    def __init__(
        self, reason: str, *, header: Header | None = None, **details: Any
    ) -> None:
        self.header = header
        super().__init__(reason, **details)


class Header:
    """The fields before the body of a request. A client without an id has the empty id."""

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
        #: Position of the first byte of the body in the frame.
        self.body_start = body_start

    def __repr__(self) -> str:
        return (
            f"Header(api_key={self.api_key}, api_version={self.api_version}, "
            f"correlation_id={self.correlation_id}, client_id={self.client_id!r}, body_start={self.body_start})"
        )


def keys_of(*apis: Api[Any, Any]) -> frozenset[int]:
    """Return the numbers of APIs."""
    return frozenset(api.key for api in apis)


def decode_header(frame: memoryview) -> Header:
    """Return the header of a request frame, which begins after its size.

    For ApiVersions, a version that is not served also returns a header, because the
    response contains the served versions. Its `body_start` is then undefined. For other
    APIs, it raises UnsupportedVersionError.
    """
    if len(frame) < _REQUEST_HEADER.size:
        raise ProtocolError(
            "request header: the frame is too short",
            position=0,
            expected="10 bytes or more",
            found=len(frame),
        )
    api_key, api_version, correlation_id, size_bytes = _REQUEST_HEADER.unpack_from(
        frame
    )
    api = table.APIS.get(api_key)
    if api is None:
        raise ProtocolError(
            "request header: unknown api key", position=0, found=api_key
        )
    client_id = ""
    body_start = 10
    # -1 means null. This length is an int16 in every version of the header.
    if size_bytes > 0:
        body_start += size_bytes
        try:
            client_id = str(frame[10:body_start], "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(
                f"request header, client_id: {error}", position=10
            ) from None
    # A slice may end after the frame without an error, so the size is checked here.
    if body_start > len(frame) or size_bytes < -1:
        raise ProtocolError(
            "request header: client_id is cut off",
            position=8,
            expected=f"-1 to {len(frame) - 10}",
            found=size_bytes,
        )
    # Whether a version that is not served has tagged fields is unknown.
    served = api.min_version <= api_version <= api.max_version
    if served and api.flexible is not None and api_version >= api.flexible:
        # The tagged fields are usually empty: one byte, 0.
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
    # A newer client sends its newest version of ApiVersions first, and then a version
    # from the response.
    if not served and api is not table.API_VERSIONS:
        raise UnsupportedVersionError(
            f"request header: this version of {api.name} is not served",
            header=header,
            position=2,
            expected=f"{api.min_version} to {api.max_version}",
            found=api_version,
        )
    return header


def decode_request(header: Header, frame: memoryview) -> Any:
    """Return the request after a header. Its records are views of the frame: use or copy
    them before the frame is overwritten.
    """
    request, _ = decode_and_count_request(header, frame, sys.maxsize)
    return request


def decode_and_count_request(
    header: Header, frame: memoryview, max_entries: int
) -> tuple[Any, int]:
    """Decode like decode_request(), and also return the number of elements of all arrays.
    A request with more than max_entries elements is refused.
    """
    api = table.APIS[header.api_key]
    _check(api.request, header.api_version, header)
    return api.request.decode_and_count(
        header.api_version, frame, header.body_start, max_entries
    )


def encode_response(
    api: Api[Any, ResponseT], version: int, correlation_id: int, body: ResponseT
) -> list[Buffer]:
    """Return a response frame with its size, as buffers to send one after the other.

    Records may be bytes, a memoryview or a list of buffers. These buffers become part of
    the result without a copy. None is encoded as null records. librdkafka drops a Fetch
    response that contains null records, so a handler of Fetch must use empty bytes.
    """
    buffers = api.response.encode(version, body)
    # The response to ApiVersions has no tagged fields in its header, because the
    # client that reads it does not have the served versions yet.
    if api.flexible is None or version < api.flexible or api is table.API_VERSIONS:
        header = _RESPONSE_HEADER
        # The size excludes its own four bytes and includes the correlation id.
        size_bytes = 4
    else:
        header = _FLEXIBLE_RESPONSE_HEADER
        # One byte more, for the empty tagged fields of the header.
        size_bytes = 5
    for buffer in buffers:
        size_bytes += len(buffer)
    buffers[0] = header.pack(size_bytes, correlation_id) + buffers[0]
    return buffers


def encode_request(
    api: Api[RequestT, Any],
    version: int,
    correlation_id: int,
    client_id: str | None,
    body: RequestT,
) -> bytes:
    """Return a request frame with its size, as a client sends it."""
    if client_id is None:
        name = None
    else:
        name = client_id.encode()
    content = b"".join(
        (
            _REQUEST_HEADER.pack(
                api.key, version, correlation_id, -1 if name is None else len(name)
            ),
            name or b"",
            # The empty tagged fields of the header.
            b"\0" if api.is_flexible(version) else b"",
            *api.request.encode(version, body),
        )
    )
    return len(content).to_bytes(4, "big") + content


def decode_response(
    api: Api[Any, ResponseT], version: int, frame: Buffer
) -> tuple[int, ResponseT]:
    """Return the correlation id and the value of a response frame without its size, for
    a client.
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
    # See encode_response() about ApiVersions.
    if api.is_flexible(version) and api is not table.API_VERSIONS:
        try:
            body_start = skip_tags(view, body_start, len(view))
        except (IndexError, Malformed) as error:
            raise ProtocolError(
                f"response header, tagged fields: {error}", position=body_start
            ) from None
    return correlation_id, api.response.decode(version, view, body_start)


def encode_data(message: Message[ValueT], version: int, value: ValueT) -> bytes:
    """Return the bytes of a message that is not a request."""
    return b"".join(message.encode(version, value))


def decode_data(message: Message[ValueT], version: int, data: Buffer) -> ValueT:
    """Return the value of a message that is not a request."""
    _check(message, version)
    return message.decode(version, data)


def encode_versioned(message: Message[ValueT], version: int, value: ValueT) -> bytes:
    """Encode like encode_data(), after the version as an int16. Internal topics and
    group members use this form.
    """
    return _VERSION.pack(version) + encode_data(message, version, value)


def decode_versioned(message: Message[ValueT], data: Buffer) -> tuple[int, ValueT]:
    """Return the version and the value of bytes in the form of encode_versioned().

    Bytes of a newer group member (ConsumerProtocol...) are read in the newest known
    version, as in Kafka's clients, because new fields follow the known ones. For
    records of internal topics, a newer version is an error.
    """
    if len(data) < 2:
        raise ProtocolError(
            f"{message.name}: no version",
            position=0,
            expected="2 bytes",
            found=len(data),
        )
    version = int.from_bytes(data[:2], "big", signed=True)
    read_version = version
    if message in (
        table.CONSUMER_PROTOCOL_SUBSCRIPTION,
        table.CONSUMER_PROTOCOL_ASSIGNMENT,
    ):
        read_version = min(version, message.max_version)
    _check(message, read_version)
    return version, message.decode(read_version, data, 2)


def _check(message: Message[Any], version: int, header: Header | None = None) -> None:
    if not message.min_version <= version <= message.max_version:
        raise UnsupportedVersionError(
            f"{message.name}: unknown version",
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
    "decode_and_count_request",
    "decode_data",
    "decode_header",
    "decode_request",
    "decode_response",
    "decode_versioned",
    "encode_data",
    "encode_request",
    "encode_response",
    "encode_versioned",
    "keys_of",
]
__all__ += table.__all__
