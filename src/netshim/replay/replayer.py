"""Sends the requests of a recording to a broker.

Rules:
- Each recorded connection becomes a connection. Its requests keep their order.
- A request is sent when all responses that were recorded before it have arrived. So the
  broker of the replay receives requests in the recorded order, except for requests that
  were in progress at the same time.
- With a speed, a request is also not sent before its recorded time, divided by the
  speed.
- The broker of the replay may be slower. Until a time limit, a request is sent again if
  a fetch returns fewer records, or if a coordinator is not ready. After the
  limit has passed once for an API, its responses are compared at once.
- Frames without their secrets are not sent: the replay needs a listener without SASL.

This module blocks, and uses one thread.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import attrs

from logcore.errors import RemoteUnavailableError
from netshim import wire
from netshim.recording.traffic_file import TrafficKind, TrafficRecord
from netshim.replay.comparison import FieldDifference, differences, should_retry
from netshim.replay.full_fetches import with_full_fetches
from netshim.replay.id_mapping import IdMapping
from netshim.response_errors import first_error
from netshim.wire import codes
from netshim.wire.codec import Api

#: Largest response. A peer that is not a broker could otherwise cause an
#: allocation of 2 GiB.
_MAX_RESPONSE_BYTES: Final = 512 << 20
#: Time between two requests to a broker that is not ready.
_RETRY_S: Final = 0.02
#: Longest wait for the broker to close a connection.
_CLOSE_TIMEOUT_S: Final = 5.0
_CLOSED: Final = "the broker has closed the connection"
#: Connections whose client has left and whose broker may still process requests.
_MAX_HALF_CLOSED: Final = 100


@attrs.frozen
class ResponseDifference:
    """A response that differs from the recorded one."""

    #: Number of the recorded connection.
    connection: int
    #: Recorded time of the request, in nanoseconds.
    time_ns: int
    api: str
    version: int
    correlation_id: int
    fields: tuple[FieldDifference, ...]


@attrs.define
class ApiCount:
    """Counts of one API."""

    versions: set[int] = attrs.Factory(set)
    requests: int = 0
    responses: int = 0
    #: Responses that differ from the recorded ones.
    differences: int = 0


@attrs.define
class ReplayReport:
    """Counts of a replay."""

    #: By the name of the API.
    apis: dict[str, ApiCount] = attrs.Factory(dict)
    #: Recorded connections that have sent a request.
    connections: int = 0
    #: Requests that were not sent, because the recording has no secrets.
    redacted: int = 0
    elapsed_s: float = 0.0

    def total(self, name: str) -> int:
        """Return the sum of a field of all APIs."""
        return sum(getattr(api_count, name) for api_count in self.apis.values())


@attrs.frozen
class _SentRequest:
    """A request that was sent and has no response yet."""

    api: Api[Any, Any] | None
    version: int
    #: The frame that was sent, with its size.
    data: bytes
    time_ns: int
    #: Number of requests of other connections that were sent before it.
    other_requests: int

    @property
    def name(self) -> str:
        return "unknown" if self.api is None else self.api.name


class _ReplayConnection:
    """A connection of the replay. A lost one is opened again for its next request."""

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        #: Requests that may still get a response, by correlation id, oldest first.
        self.sent: dict[int, _SentRequest] = {}
        #: Number of requests that were sent.
        self.sent_count = 0
        #: Responses that arrived before receive() was called for them.
        self._responses: dict[int, bytes] = {}
        #: Why the responses to requests in `sent` will not arrive.
        self._lost_reasons: dict[int, str] = {}
        self._open()

    def _open(self) -> None:
        try:
            self._sock = socket.create_connection(self._address, self._timeout_s)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            host, port = self._address
            raise RemoteUnavailableError(f"{host}:{port}: {error}") from error
        self._is_open = True

    def _lose(self, reason: str) -> str:
        """Close the socket. Its requests get no response."""
        self._sock.close()
        self._is_open = False
        # The first reason remains.
        self._lost_reasons = dict.fromkeys(self.sent, reason) | self._lost_reasons
        return reason

    def send(self, data: bytes) -> None:
        """Send a frame. A connection that was lost is opened again.

        Raises:
            RemoteUnavailableError: the broker does not accept a connection.
        """
        if not self._is_open:
            self._open()
        try:
            self._sock.sendall(data)
        except OSError:
            self._lose(_CLOSED)

    def add(self, correlation_id: int, request: _SentRequest) -> None:
        """Expect a response to a request that is sent next."""
        # A client may use a correlation id again. The request becomes the latest of the
        # table.
        self._lost_reasons.pop(correlation_id, None)
        self.sent.pop(correlation_id, None)
        self.sent[correlation_id] = request

    def forget(self, correlation_id: int) -> None:
        """Expect no response to a request and to earlier ones.

        The recorded broker has answered in the order of the requests.
        """
        for number in list(self.sent):
            for table in (self.sent, self._responses, self._lost_reasons):
                table.pop(number, None)
            if number == correlation_id:
                break

    def receive(self, correlation_id: int) -> bytes | str:
        """Return a response without its size, or why there is none."""
        while correlation_id not in self._responses:
            if correlation_id in self._lost_reasons:
                return self._lost_reasons[correlation_id]
            try:
                size = int.from_bytes(self._receive_exactly(4), "big", signed=True)
                if not 4 <= size <= _MAX_RESPONSE_BYTES:
                    return self._lose(f"a response of {size} bytes")
                frame = self._receive_exactly(size)
            except TimeoutError:
                return self._lose("no response within the time limit")
            except OSError:
                return self._lose(_CLOSED)
            received_id = int.from_bytes(frame[:4], "big", signed=True)
            # Others are late responses to requests that forget() has removed.
            if received_id in self.sent:
                self._responses[received_id] = frame
        return self._responses.pop(correlation_id)

    def _receive_exactly(self, size: int) -> bytes:
        parts = []
        remaining = size
        while remaining:
            # A limit for one call, because recv() allocates that many bytes first.
            data = self._sock.recv(min(remaining, 1 << 20))
            if not data:
                raise ConnectionError
            parts.append(data)
            remaining -= len(data)
        return b"".join(parts)

    def shut_down_sending(self) -> None:
        """Send no more requests. The broker still processes the requests so far."""
        with contextlib.suppress(OSError):
            # A full close could make the broker drop requests that it has not read.
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait until the broker has processed all requests, and close the socket."""
        with contextlib.suppress(OSError):
            self._sock.settimeout(_CLOSE_TIMEOUT_S)
            while self._sock.recv(1 << 16):
                pass
        self._sock.close()


@attrs.define(eq=False)
class TrafficReplayer:
    """One replay to the broker at the address (host, port)."""

    _address: tuple[str, int]
    #: Divides the recorded times. None sends as fast as the order allows.
    _speed: float | None = attrs.field(default=None, kw_only=True, alias="speed")
    #: Whether responses are compared. Each difference is passed to `report`.
    _compares: bool = attrs.field(default=False, kw_only=True, alias="compares")
    #: Limit of the wait for a response.
    _timeout_s: float = attrs.field(default=30.0, kw_only=True, alias="timeout_s")
    _report: Callable[[ResponseDifference], None] = attrs.field(
        default=lambda _: None, kw_only=True, alias="report"
    )
    _clock_s: Callable[[], float] = attrs.field(
        default=time.monotonic, kw_only=True, alias="clock_s"
    )
    _sleep: Callable[[float], None] = attrs.field(
        default=time.sleep, kw_only=True, alias="sleep"
    )
    #: Filled by the responses so far.
    _ids: IdMapping = attrs.field(init=False, factory=IdMapping)
    #: Connections whose recording has not ended yet, by their number.
    _connections: dict[int, _ReplayConnection] = attrs.field(init=False, factory=dict)
    #: Connections that send no more requests, oldest first.
    _half_closed: deque[_ReplayConnection] = attrs.field(init=False, factory=deque)
    #: APIs whose time limit has passed.
    _timed_out_apis: set[str] = attrs.field(init=False, factory=set)
    #: Number of requests that were sent on all connections.
    _sent_count: int = attrs.field(init=False, default=0)
    result: ReplayReport = attrs.field(init=False, factory=ReplayReport)

    def run(self, records: Iterable[TrafficRecord]) -> ReplayReport:
        """Send the requests of a recording, and return the numbers.

        Raises:
            RemoteUnavailableError: the broker does not accept a connection.
        """
        began_s = self._clock_s()
        try:
            # Sessions have random ids, and their contents depend on timing.
            for record in with_full_fetches(records):
                if record.kind is TrafficKind.REQUEST:
                    self._wait_until(began_s, record)
                    self._send(record)
                elif record.kind is TrafficKind.RESPONSE:
                    self._receive(record)
                elif record.kind is TrafficKind.CLOSE:
                    self._stop_sending(record.connection)
        finally:
            for number in list(self._connections):
                self._stop_sending(number)
            for connection in self._half_closed:
                connection.close()
        self.result.elapsed_s = self._clock_s() - began_s
        return self.result

    def _wait_until(self, began_s: float, record: TrafficRecord) -> None:
        if self._speed is not None:
            due_s = began_s + record.time_ns / 1e9 / self._speed
            # A replay that is late does not wait, until it has caught up.
            self._sleep(max(0.0, due_s - self._clock_s()))

    def _stop_sending(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        connection.shut_down_sending()
        self._half_closed.append(connection)
        # Sockets of long recordings would use up the file descriptors.
        if len(self._half_closed) > _MAX_HALF_CLOSED:
            self._half_closed.popleft().close()

    def _connection_of(self, number: int) -> _ReplayConnection:
        connection = self._connections.get(number)
        if connection is None:
            connection = self._connections[number] = _ReplayConnection(
                self._address, self._timeout_s
            )
            self.result.connections += 1
        return connection

    def _count_other_requests(self, connection: _ReplayConnection) -> int:
        """Return the number of requests that were sent on other connections."""
        return self._sent_count - connection.sent_count

    def _count(self, name: str) -> ApiCount:
        return self.result.apis.setdefault(name, ApiCount())

    # -- requests ----------------------------------------------------------------------

    def _send(self, record: TrafficRecord) -> None:
        if record.is_redacted:
            self.result.redacted += 1
            return
        frame = record.frame
        api = None
        try:
            header = wire.decode_header(frame)
        except wire.ProtocolError:
            content = bytes(frame)
        else:
            api = wire.APIS[header.api_key]
            if api.min_version <= header.api_version <= api.max_version:
                # The broker assigns other ids to topics, producers and members.
                content = self._ids.rewrite(header, frame)
            else:
                content = bytes(frame)
        # The positions of the version and of the correlation id are equal in all
        # headers.
        version = int.from_bytes(content[2:4], "big", signed=True)
        correlation_id = int.from_bytes(content[4:8], "big", signed=True)
        data = len(content).to_bytes(4, "big") + content
        connection = self._connection_of(record.connection)
        sent = _SentRequest(
            api, version, data, record.time_ns, self._count_other_requests(connection)
        )
        connection.sent_count += 1
        self._sent_count += 1
        count = self._count(sent.name)
        count.requests += 1
        count.versions.add(version)
        if not _is_unanswered(content):
            connection.add(correlation_id, sent)
        connection.send(data)

    # -- responses ---------------------------------------------------------------------

    def _receive(self, record: TrafficRecord) -> None:
        """Wait for the response to a request that has one in the recording."""
        # None if no request of the connection was sent.
        connection = self._connections.get(record.connection)
        frame = record.frame
        correlation_id = int.from_bytes(frame[:4], "big", signed=True)
        if (
            record.is_redacted
            or connection is None
            or correlation_id not in connection.sent
        ):
            return
        sent = connection.sent[correlation_id]
        response = self._receive_ready(connection, correlation_id, sent, frame)
        connection.forget(correlation_id)
        count = self._count(sent.name)
        count.responses += not isinstance(response, str)
        fields = self._compare(connection, sent, frame, response)
        if fields:
            count.differences += 1
            self._report(
                ResponseDifference(
                    record.connection,
                    sent.time_ns,
                    sent.name,
                    sent.version,
                    correlation_id,
                    tuple(fields),
                )
            )

    def _receive_ready(
        self,
        connection: _ReplayConnection,
        correlation_id: int,
        sent: _SentRequest,
        recorded: memoryview,
    ) -> bytes | str:
        """Return the response, or why there is none.

        While the broker is not ready, the request is sent again.
        """
        deadline_s = self._clock_s() + self._timeout_s
        while True:
            response = connection.receive(correlation_id)
            if isinstance(response, str) or not self._should_retry(
                sent, recorded, response
            ):
                return response
            if sent.name in self._timed_out_apis or self._clock_s() >= deadline_s:
                self._timed_out_apis.add(sent.name)
                return response
            self._sleep(_RETRY_S)
            connection.send(sent.data)

    @staticmethod
    def _should_retry(
        sent: _SentRequest, recorded: memoryview, replayed: bytes
    ) -> bool:
        decoded = _decoded(sent, recorded, replayed)
        return decoded is not None and should_retry(*decoded)

    def _compare(
        self,
        connection: _ReplayConnection,
        sent: _SentRequest,
        recorded: memoryview,
        replayed: bytes | str,
    ) -> list[FieldDifference]:
        """Return the differences of a response, and record the ids that it contains."""
        if isinstance(replayed, str):
            return [FieldDifference("response", "a response", replayed)]
        decoded = _decoded(sent, recorded, replayed)
        if decoded is None:
            if not self._compares or bytes(recorded) == replayed:
                return []
            other = f"{len(replayed)} other bytes"
            return [FieldDifference("response", f"{len(recorded)} bytes", other)]
        api, recorded_response, replayed_response = decoded
        fields = []
        if self._compares:
            fields = differences(
                api,
                sent.version,
                recorded_response,
                replayed_response,
                self._ids,
                is_concurrent=self._count_other_requests(connection)
                > sent.other_requests,
            )
        self._ids.record_ids(api.response.schema, recorded_response, replayed_response)
        return fields


def _is_unanswered(content: bytes) -> bool:
    """Return whether a request is a Produce with acks=0, which has no response."""
    view = memoryview(content)
    try:
        header = wire.decode_header(view)
        return header.api_key == wire.PRODUCE.key and not (
            wire.decode_request(header, view).acks
        )
    except wire.ProtocolError:
        return False


def _decoded(
    sent: _SentRequest, recorded: memoryview, replayed: bytes
) -> tuple[Api[Any, Any], Any, Any] | None:
    """Return the API and both responses, or None if one cannot be decoded."""
    if sent.api is None:
        return None
    return decode_pair(sent.api, sent.version, recorded, replayed)


def decode_pair(
    api: Api[Any, Any], version: int, recorded: memoryview, replayed: bytes
) -> tuple[Api[Any, Any], Any, Any] | None:
    """Return an API and two of its responses, or None if one cannot be decoded."""
    recorded_response = decode_response(api, version, recorded)
    other = decode_response(api, version, memoryview(replayed))
    if recorded_response is None or other is None:
        return None
    return api, recorded_response, other


def decode_response(api: Api[Any, Any], version: int, frame: memoryview) -> Any:
    """Return a decoded response, or None if it is malformed."""
    if api is wire.API_VERSIONS and not (
        api.min_version <= version <= api.max_version
        and frame[4:6] != codes.UNSUPPORTED_VERSION.to_bytes(2, "big")
    ):
        version = 0  # the form in which a broker refuses a version
    try:
        _, value = wire.decode_response(api, version, frame)
    except (wire.ProtocolError, ValueError):
        return None
    return value


def error_of(api: Api[Any, Any], version: int, frame: memoryview) -> str | None:
    """Return the name of the first error in a response, if any."""
    response = decode_response(api, version, frame)
    code = codes.NONE if response is None else first_error(api, response)
    return None if code == codes.NONE else codes.name(code)
