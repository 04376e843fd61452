"""The connections of clients: their sockets, and the listeners that accept them.

Rules:
- A connection is served after its TLS handshake, if its listener uses TLS.
- The cost of a client is bounded; see docs/netshim.md.

server.py decides which connections are admitted, and ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from netshim.broker import reports_changes
from netshim.connection import Connection, ConnectionMemory, Workload
from netshim.handlers.authentication import SaslAuthentication
from netshim.listeners import Listener
from netshim.request_log import LINES
from netshim.scheduling import CloseConnection
from netshim.security.principals import CertificateError, subject_of
from netshim.session import MAX_UNAUTHENTICATED_BYTES, ClientSession

if TYPE_CHECKING:
    import ssl

    from netshim.broker import Broker
    from netshim.recording.recorder import TrafficRecorder
    from netshim.security.service import Security
    from netshim.settings import Settings

#: Time for the TLS handshake, and for the authentication after it.
_HANDSHAKE_S: Final = 10.0
#: How long a connection remains open for pending responses after its client has stopped
#: sending.
_HALF_OPEN_MS: Final = 1_000
#: A transport copies bytes that it cannot send at once. So it gets no more while it
#: holds this number of bytes.
_UNSENT_BYTES: Final = 256 << 10
#: How long the end of a TLS connection waits for the client to confirm it. asyncio's
#: own limit is 30 s, in which a client that does not answer keeps its connection.
_TLS_CLOSE_S: Final = 5.0
#: Receives the bytes of connections that are refused. Never read.
_DISCARDED: Final = bytearray(4_096)
#: The protocol of connections that have ended.
_NO_PROTOCOL: Final = asyncio.BufferedProtocol()
#: Time between two attempts to accept a connection after an error.
_ACCEPT_RETRY_S: Final = 0.05


class ClientSocketHost(Protocol):
    """The server of a connection. Server documents the methods."""

    broker: Broker
    budget: ConnectionMemory
    workload: Workload
    settings: Settings
    security: Security
    default_principal: str
    #: Whether another broker takes the place of the current one.
    is_replacing: bool
    tls_context: ssl.SSLContext
    recorder: TrafficRecorder | None
    loop: asyncio.AbstractEventLoop

    def now_ms(self) -> int: ...
    def admit(self, client: ClientSocket) -> float | None: ...
    def dismiss(self, client: ClientSocket) -> None: ...
    def run_step(
        self, name: str, step: Callable[..., object], *arguments: object
    ) -> None: ...
    def log(
        self,
        level: int,
        kind: str,
        text: str,
        *values: object,
        error: bool = False,
        max_lines: int = LINES,
    ) -> None: ...


class ClientSocket(asyncio.BufferedProtocol):
    """The socket of one connection."""

    transport: asyncio.Transport
    connection: Connection

    def __init__(self, server: ClientSocketHost, listener: Listener) -> None:
        self.server = server
        self.listener = listener
        self.session: ClientSession | None = None
        self.accepted_s = server.loop.time()
        #: The TLS handshake of a connection that is not open yet.
        self.handshake: asyncio.Task[None] | None = None
        #: The client's address, without the port.
        self.address = ""
        #: Whether the connection was admitted, has ended its handshake, and is not closed.
        self.is_open = False
        #: Whether reading is paused, because the connection has reached a limit.
        self.is_paused = False
        #: Whether the transport's buffer is full, because the client does not read.
        self.is_blocked = False
        #: Whether _flush_now() is scheduled.
        self._is_flush_scheduled = False
        #: Whether the client has stopped sending, and when.
        self._has_client_ended = False
        self._client_ended_ms = 0
        #: The unread bytes at the client's latest progress, and its time.
        self._unread_progress = (0, 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's classes
        transport = cast("asyncio.Transport", transport)
        self.transport = transport
        peer_name = transport.get_extra_info("peername") or ("?", 0)
        name = transport.get_extra_info("sockname") or ("127.0.0.1", 0)
        self.address = str(peer_name[0])
        self._local_address = str(name[0]), int(name[1])
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = self.server
        if self.listener.uses_tls:  # admitted before the handshake
            try:
                self._begin(self._principal())
            except CertificateError as error:
                self._report_handshake(error)
                transport.abort()
            return
        delay_s = server.admit(self)
        if delay_s is None:
            self._begin(server.default_principal)
        else:
            transport.pause_reading()
            server.loop.call_later(delay_s, transport.abort)

    async def run_handshake(self, sock: socket.socket) -> None:
        """Encrypt an accepted connection, and begin to serve it."""
        server = self.server
        try:
            await server.loop.connect_accepted_socket(
                lambda: self,
                sock,
                ssl=server.tls_context,
                ssl_handshake_timeout=_HANDSHAKE_S,
                ssl_shutdown_timeout=_TLS_CLOSE_S,
            )
        except OSError as error:
            self._report_handshake(error)
            # Its frames and the error refer to each other. They hold the TLS state.
            error.__traceback__ = None

    def end_handshake(self, sock: socket.socket, _: asyncio.Task[None]) -> None:
        """Close the socket of a handshake that has failed or was cancelled."""
        if not self.is_open:
            self.discard(sock)

    def discard(self, sock: socket.socket) -> None:
        """Close an accepted connection that is not served."""
        sock.close()
        self.server.dismiss(self)

    def _report_handshake(self, error: Exception) -> None:
        self.server.security.failures["TLS"] += 1
        self.server.log(
            logging.WARNING,
            f"TLS {self.address}",
            "no TLS connection with %s: %s",
            self.address,
            _reason_of(error),
            max_lines=1,
        )

    def _principal(self) -> str:
        """Return the principal of a client by its certificate.

        Raises:
            CertificateError: the certificate has no usable subject.
        """
        encryption = self.transport.get_extra_info("ssl_object")
        certificate = encryption.getpeercert()
        if not certificate:
            return self.server.default_principal

        def der() -> bytes:
            return bytes(encryption.getpeercert(binary_form=True))

        subject = subject_of(certificate, der)
        user = self.server.security.settings.principal_mapping.user_of(subject)
        if user is None:
            raise CertificateError(f"no mapping rule matches the subject {subject!r}")
        return f"User:{user}"

    def _begin(self, principal: str) -> None:
        """Serve the requests of the connection."""
        server = self.server
        self.transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        host, port = self.listener.advertised or self._local_address
        session = ClientSession(
            host, port, self.address, listener=self.listener.name, principal=principal
        )
        if self.listener.uses_sasl:
            session.authentication = SaslAuthentication(session, server.broker.state)
            session.frame_limit_bytes = min(
                MAX_UNAUTHENTICATED_BYTES, server.settings.max_request_bytes
            )
        self.session = session
        self.connection = Connection(
            partial(server.broker.handle, session),
            server.settings,
            server.budget,
            server.workload,
            server.now_ms(),
            self.flush_soon,
            reports_changes,
            session,
        )
        if server.is_replacing:
            self.pause()
        if server.recorder is not None:
            self.record(server.recorder)
        self.is_open = True

    def record(self, recorder: TrafficRecorder | None) -> None:
        """Record the requests and responses from now on, or no longer."""
        if recorder is None:
            self.connection.recorder = None
            return
        assert self.session is not None, "the connection is not open"
        _, port, *_ = self.transport.get_extra_info("peername") or ("?", 0)
        self.connection.recorder = recorder.connection(self.session, int(port))

    def skip(self, skipped_ms: int) -> None:
        """Do not count time that the clock has skipped."""
        if self.is_open:
            self.connection.skip(skipped_ms)
            self._client_ended_ms += skipped_ms
            self._unread_progress = (
                self._unread_progress[0],
                self._unread_progress[1] + skipped_ms,
            )

    def pause(self) -> None:
        """Start no requests until resume()."""
        if self.session is not None:
            self.session.pause_count += 1

    def resume(self) -> None:
        """Start requests again, for the current broker of the server."""
        if self.session is None or not self.is_open:
            return
        broker = self.server.broker
        if self.session.authentication is not None:
            self.session.authentication.use_state(broker.state)
        self.connection.use_handler(partial(broker.handle, self.session))
        self.session.pause_count -= 1
        self.connection.wake()

    @property
    def is_unauthenticated(self) -> bool:
        """Whether the client must still authenticate."""
        if self.session is None:
            return self.listener.uses_tls or self.listener.uses_sasl
        return (
            self.session.authentication is not None
            and not self.session.authentication.is_authenticated
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_open:
            self.is_open = False
            self.connection.close()
        if self.listener.uses_tls:
            # uvloop's TLS transport refers to its protocol forever. The cycle would
            # keep some 30 KB until a full garbage collection, which a broker rarely has.
            self.transport.set_protocol(_NO_PROTOCOL)
        self.server.dismiss(self)

    # -- received bytes

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:
        if not self.is_open:
            return _DISCARDED
        return self.connection.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if not self.is_open:
            # A connection that is refused, and closed soon. uvloop begins to read after
            # connection_made(), even if reading was paused there.
            self.transport.pause_reading()
            return
        self._run_step(self.connection.received, nbytes, self.server.now_ms())

    def eof_received(self) -> bool:
        if not self.is_open:
            return False
        self._has_client_ended = True
        self._client_ended_ms = self.server.now_ms()
        # The connection remains open for pending responses: the client may still read.
        # TLS has no such half-open state.
        return not self.listener.uses_tls and not self.connection.is_idle

    def _run_step(self, step: Callable[..., None], *arguments: int) -> None:
        try:
            self.server.run_step("requests of a connection", step, *arguments)
        except CloseConnection as reason:
            self.end(str(reason))
            return
        except Exception:
            self.server.log(
                logging.ERROR,
                "connection failed",
                "an internal error with a connection from %s",
                self.address,
                error=True,
            )
            self.end("an internal error")
            return
        self.flush()

    # -- responses

    def flush_soon(self) -> None:
        """Schedule a flush after a delayed response is ready.

        Responses that become ready in the same iteration of the event loop are sent
        together.
        """
        if not self._is_flush_scheduled and self.is_open:
            self._is_flush_scheduled = True
            self.server.loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flush_scheduled = False
        if not self.is_open:
            return
        if self.connection.has_input:
            # The responses may have freed room that received requests waited for.
            self._run_step(self.connection.process, self.server.now_ms())
        else:
            self.flush()

    def flush(self) -> None:
        connection = self.connection
        transport = self.transport
        if not self.is_open or transport.is_closing():
            return
        while connection.outgoing and not self.is_blocked:
            unsent_bytes = connection.unsent_bytes
            buffers = connection.next_buffers()
            if len(buffers) == 1:
                transport.write(buffers[0])
            else:
                transport.writelines(buffers)
            counts = self.server.broker.counts
            if counts is not None:
                counts.sent_bytes += unsent_bytes - connection.unsent_bytes
            connection.active_ms = self.server.now_ms()
        if connection.is_waiting and not connection.is_full:
            self.flush_soon()
        is_closing = self.session is not None and self.session.is_closing
        if (is_closing and connection.is_idle) or (
            self._has_client_ended and connection.is_idle and not connection.is_waiting
        ):
            transport.close()
        else:
            self.pause_or_resume()

    @property
    def has_unanswered(self) -> bool:
        """Whether there are requests that are not answered yet."""
        return self.is_open and not self.connection.is_idle

    @property
    def has_unread(self) -> bool:
        """Whether the client has not read all responses."""
        return self.is_open and bool(self.unread_bytes)

    @property
    def unread_bytes(self) -> int:
        """Number of response bytes that the client has not read, sent or not."""
        return self.transport.get_write_buffer_size() + self.connection.unsent_bytes

    def pause_or_resume(self) -> None:
        """Pause reading while the connection is at a limit, and resume it afterwards."""
        must_pause = self.connection.is_full or not self.connection.can_receive()
        if must_pause != self.is_paused:
            self.is_paused = must_pause
            if must_pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def close(self) -> None:
        """Close the connection after the bytes that were passed to its transport."""
        if not self.is_open:
            self.abort()
        elif not self.transport.is_closing():
            # Once only: after a second close(), asyncio's TLS transport cannot be
            # aborted, and its methods raise AttributeError.
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self.handshake is not None and not self.is_open:
            self.handshake.cancel()
        elif self.is_open or not self.listener.uses_tls:
            self.transport.abort()

    def drain(self) -> None:
        """Accept no more requests, and send the responses that are ready."""
        if self.is_unauthenticated:
            self.abort()  # a response to a failed attempt may be held back
        elif self.is_open:
            self.connection.drain()
            self.flush()

    def pause_writing(self) -> None:
        self.is_blocked = True

    def resume_writing(self) -> None:
        self.is_blocked = False
        self.flush_soon()

    def end(self, reason: str) -> None:
        self.server.log(
            logging.INFO,
            "connection ended",
            "connection from %s ended: %s",
            self.address,
            reason,
        )
        self.transport.abort()

    def check(self, now_ms: int) -> None:
        if not self.is_open:  # in the TLS handshake, which has a limit of its own
            return
        reason = self.connection.overdue(now_ms)
        age_s = self.server.loop.time() - self.accepted_s
        if self.is_unauthenticated and age_s > _HANDSHAKE_S:
            reason = f"not authenticated within {_HANDSHAKE_S:.0f} s"
        if (
            self._has_client_ended
            and now_ms - self._client_ended_ms >= _HALF_OPEN_MS
            and not self.unread_bytes
        ):
            # Most clients that stop sending do not read either.
            reason = "the client has left"
        unread, since_ms = self._unread_progress
        has_progress = not self.is_blocked or self.unread_bytes < unread
        if has_progress or not unread:
            unread = 0
            if self.is_blocked:
                unread = self.unread_bytes
            self._unread_progress = (unread, now_ms)
        elif now_ms - since_ms >= self.server.settings.request_timeout_ms:
            reason = f"the client has not read its responses for {now_ms - since_ms} ms"
        if reason:
            self.end(reason)
        else:
            # Other connections may have freed the room that this one waits for.
            self.pause_or_resume()


class ListeningSockets(Protocol):
    """Sockets that accept connections."""

    @property
    def sockets(self) -> Sequence[Any]: ...
    async def start_serving(self) -> None: ...
    def close(self) -> None: ...


class TlsListening:
    """Accepts the connections of a TLS listener.

    asyncio's own servers accept TLS connections too, but report neither a handshake
    that fails nor the number of handshakes in progress.
    """

    def __init__(
        self, server: ClientSocketHost, listener: Listener, *, start_serving: bool
    ) -> None:
        family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
        sock = socket.create_server(
            (listener.host, listener.port), family=family, backlog=512
        )
        sock.setblocking(False)
        self.sockets = [sock]
        self._server = server
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        if start_serving:
            self._accept_all()

    async def _accept(self) -> None:
        server = self._server
        while True:
            try:
                sock, address = await server.loop.sock_accept(self.sockets[0])
            except OSError as error:  # such as too many open files
                server.log(logging.ERROR, "accept", "no connection: %s", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            client = ClientSocket(server, self._listener)
            client.address = str(address[0])
            try:
                delay_s = server.admit(client)
            except Exception:  # the listener must not end with it
                server.log(logging.ERROR, "accept", "an internal error", error=True)
                client.discard(sock)
                continue
            if delay_s is None:
                client.handshake = server.loop.create_task(client.run_handshake(sock))
                # Not at the end of run_handshake(): a task that is cancelled before its
                # first step runs no line of it.
                client.handshake.add_done_callback(partial(client.end_handshake, sock))
            else:
                server.loop.call_later(delay_s, client.discard, sock)

    async def start_serving(self) -> None:
        """Accept connections. Until then, the kernel holds them."""
        if self._task is None:
            self._accept_all()

    def _accept_all(self) -> None:
        self._task = self._server.loop.create_task(self._accept())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.sockets[0].close()


def _reason_of(error: Exception) -> str:
    """Return why a TLS handshake failed, in words for the operator."""
    text = str(error)
    if "HTTP_REQUEST" in text or "WRONG_VERSION_NUMBER" in text:
        return (
            "the client does not speak TLS; it needs security.protocol=SSL or SASL_SSL"
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"the client certificate is not accepted: {text}"
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in text:
        return "the client sent no certificate, and one is required"
    if "ALERT_UNKNOWN_CA" in text or "CERTIFICATE_UNKNOWN" in text:
        return "the client does not trust the certificate of this broker"
    if isinstance(error, ConnectionError) and not isinstance(error, CertificateError):
        return "the handshake was not completed in time, or the client left"
    return text or type(error).__name__
