"""A connection to a broker of the source, with TLS and SASL.

Rules:
- Settings have librdkafka's names and defaults.
- A request is sent in the newest version that both sides support.
- Every wait has a limit. An error closes the connection, because the next bytes could
  belong to an earlier request.

Calls of this module block. It contains the requests of a login, and no others.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import socket
import ssl
import struct
from collections.abc import Mapping
from typing import Any, Final

import attrs

from logcore.errors import (
    InvalidConfigError,
    RemoteUnavailableError,
    ShippingError,
)
from netshim import wire
from netshim.wire import codes
from netshim.wire.codec import Api

#: Client id of all requests.
_CLIENT: Final = "logcore-follow"
_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_SCRAM: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_MECHANISMS: Final = ("PLAIN", *_SCRAM)
#: Largest response. A peer that is not a broker could otherwise cause an allocation of
#: 2 GiB. Kafka's own clients have no limit.
_MAX_RESPONSE_BYTES: Final = 512 << 20
#: Limit of each wait for the socket.
_TIMEOUT_S: Final = 30.0
#: The value of SO_LINGER with which close() discards bytes not sent yet: on, 0 s.
_ABORT: Final = struct.pack("ii", 1, 0)


class LoginError(ShippingError):
    """The source refuses the login or the TLS connection."""


@attrs.frozen
class ClientSettings:
    """Settings of connections to the source."""

    protocol: str = "PLAINTEXT"
    mechanism: str = "PLAIN"
    username: str = ""
    password: str = attrs.field(default="", repr=False)
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    key_password: str | None = attrs.field(default=None, repr=False)
    #: Whether the certificate must contain the name of the broker.
    checks_name: bool = True

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> ClientSettings:
        """Return the settings with librdkafka's names.

        Raises:
            InvalidConfigError: a name is unknown, or a value is not served.
        """
        remaining = dict(settings)
        parsed = cls(
            protocol=remaining.pop("security.protocol", "PLAINTEXT").upper(),
            # librdkafka has both names for one setting.
            mechanism=remaining.pop(
                "sasl.mechanism", remaining.pop("sasl.mechanisms", "PLAIN")
            ),
            username=remaining.pop("sasl.username", ""),
            password=remaining.pop("sasl.password", ""),
            ca_file=remaining.pop("ssl.ca.location", None),
            certificate_file=remaining.pop("ssl.certificate.location", None),
            key_file=remaining.pop("ssl.key.location", None),
            key_password=remaining.pop("ssl.key.password", None),
            checks_name=remaining.pop("ssl.endpoint.identification.algorithm", "https")
            != "none",
        )
        # A misspelled setting of TLS must not lead to a connection without it.
        if remaining:
            raise InvalidConfigError(
                "unknown client settings",
                expected="names of librdkafka for security.protocol, ssl.* and sasl.*",
                found=", ".join(sorted(remaining)),
            )
        if parsed.protocol not in _PROTOCOLS:
            raise InvalidConfigError(
                "security.protocol",
                expected=", ".join(_PROTOCOLS),
                found=parsed.protocol,
            )
        if parsed.uses_sasl and parsed.mechanism not in _MECHANISMS:
            raise InvalidConfigError(
                "sasl.mechanism",
                expected=", ".join(_MECHANISMS),
                found=parsed.mechanism,
            )
        return parsed

    @property
    def uses_tls(self) -> bool:
        return self.protocol.endswith("SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.protocol.startswith("SASL")

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context.

        Raises:
            InvalidConfigError: a file cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(
                    self.certificate_file, self.key_file, self.key_password
                )
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfigError(
                f"a certificate file cannot be used: {error}",
                expected="PEM files in ssl.ca.location, ssl.certificate.location and ssl.key.location",
            ) from error
        context.check_hostname = self.checks_name
        if self.ca_file is not None:
            # The file may contain an issuer or a broker's certificate without its root.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


class SourceConnection:
    """An authenticated connection to one broker. Used by one thread."""

    def __init__(self, host: str, port: int, settings: ClientSettings) -> None:
        """Connect and log in.

        Raises:
            RemoteUnavailableError: the broker does not answer.
            LoginError: the broker refuses the login, or one side rejects the certificate
                of the other side.
            InvalidConfigError: a certificate file cannot be used.
        """
        self._address = f"{host}:{port}"
        self._correlation_id = 0
        #: By API key, the range of versions that the broker serves.
        self._versions: dict[int, tuple[int, int]] = {}
        #: Holds the latest response. It grows to the largest one.
        self._buffer = bytearray(1 << 16)
        #: Sent requests without a response: correlation id, API and version. Brokers
        #: answer in the order of the requests.
        self._waiting: list[tuple[int, Api[Any, Any], int]] = []
        try:
            self._sock = self._connect(host, port, settings)
        except ssl.SSLError as error:
            raise LoginError(
                f"no TLS connection with {self._address}: {error}"
            ) from error
        except OSError as error:
            raise self._unavailable(error) from error
        try:
            self._log_in(settings)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _connect(host: str, port: int, settings: ClientSettings) -> socket.socket:
        context = settings.tls_context() if settings.uses_tls else None
        sock = socket.create_connection((host, port), timeout=_TIMEOUT_S)
        try:
            # Nagle's algorithm would hold back a small request until the previous one
            # is acknowledged, which takes up to 40 ms with delayed acknowledgments.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                return context.wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Close the connection. Requests that wait for a response get none.

        Bytes of such a request that are not sent yet are discarded. Otherwise, the
        system would send them until it gives up, which takes minutes. The broker could
        then execute the request after the caller has repeated it in another connection
        and has acted on its response.
        """
        if self._waiting:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self._sock.close()

    def interrupt(self) -> None:
        """Make a request that waits in another thread fail. close() is still needed."""
        # SSLSocket.shutdown() would end the decryption. The other thread would then
        # read encrypted bytes as the rest of its response.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    # -- requests ----------------------------------------------------------------------

    def request(
        self, api: Api[Any, Any], request: Any, *, max_version: int = 99
    ) -> Any:
        """Send a request and return its response.

        Records in it are views of a buffer that the next response overwrites.

        Raises:
            RemoteUnavailableError: the broker does not answer, or its answer is
                malformed.
        """
        self.send(api, request, max_version=max_version)
        return self.receive()

    def version_of(self, api: Api[Any, Any], max_version: int = 99) -> int:
        """Return the version in which requests of an API are sent.

        Raises:
            ShippingError: the broker serves no version that this module supports.
        """
        min_served, max_served = self._versions.get(api.key, (0, -1))
        version = min(max_served, api.max_version, max_version)
        if version < max(min_served, api.min_version):
            raise ShippingError(
                f"{self._address} serves no usable version of {api.name}",
                expected=f"a version from {api.min_version} to {api.max_version}",
                found=f"{min_served} to {max_served}",
            )
        return version

    def send(self, api: Api[Any, Any], request: Any, *, max_version: int = 99) -> None:
        """Send a request. receive() returns its response."""
        self._send(api, self.version_of(api, max_version), request)

    def _send(self, api: Api[Any, Any], version: int, request: Any) -> None:
        self._correlation_id += 1
        frame = wire.encode_request(
            api, version, self._correlation_id, _CLIENT, request
        )
        self._waiting.append((self._correlation_id, api, version))
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise self._unavailable(error) from error

    def receive(self) -> Any:
        """Return the response to the oldest request without one.

        Raises the errors of request().
        """
        expected, api, version = self._waiting[0]
        try:
            frame = self._frame()
            correlation_id, response = wire.decode_response(api, version, frame)
        except (OSError, wire.ProtocolError) as error:
            raise self._unavailable(error) from error
        except BaseException:
            # After an interrupt, the rest of the response would be read as the next one.
            self.close()
            raise
        if correlation_id != expected:
            raise self._unavailable("a response to another request")
        del self._waiting[0]
        return response

    def _frame(self) -> memoryview:
        # The size does not include its own four bytes. A response has at least a
        # correlation id.
        size = int.from_bytes(self._receive_exactly(4), "big", signed=True)
        if not 4 <= size <= _MAX_RESPONSE_BYTES:
            raise ConnectionError(f"a response of {size} bytes")
        return self._receive_exactly(size)

    def _receive_exactly(self, size: int) -> memoryview:
        # One buffer for all responses. It is replaced, not resized: resizing fails
        # while a caller has views of it.
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        received = 0
        while received < size:
            count = self._sock.recv_into(view[received:])
            if not count:
                raise ConnectionError("the connection was closed")
            received += count
        return view

    def _unavailable(self, reason: object) -> RemoteUnavailableError:
        # The connection may have failed before there was a socket.
        if hasattr(self, "_sock"):
            self.close()
        return RemoteUnavailableError(f"{self._address}: {reason}")

    # -- login -------------------------------------------------------------------------

    def _log_in(self, settings: ClientSettings) -> None:
        # Every broker serves version 0.
        self._send(wire.API_VERSIONS, 0, wire.API_VERSIONS.Request())
        served = self.receive()
        self._versions = {
            key.api_key: (key.min_version, key.max_version) for key in served.api_keys
        }
        if not settings.uses_sasl:
            return
        chosen = self.request(
            wire.SASL_HANDSHAKE,
            wire.SASL_HANDSHAKE.Request(mechanism=settings.mechanism),
        )
        if chosen.error_code:
            raise LoginError(
                f"{self._address} does not serve {settings.mechanism}",
                expected=", ".join(chosen.mechanisms),
                found=settings.mechanism,
            )
        if settings.mechanism == "PLAIN":
            # RFC 4616: an empty authorization identity, the user and the password.
            self._authenticate(f"\0{settings.username}\0{settings.password}".encode())
        else:
            self._log_in_with_scram(settings)

    def _log_in_with_scram(self, settings: ClientSettings) -> None:
        """Authenticate by RFC 5802, and check that the broker has the credential."""
        # 1. The client sends its name and nonce. "=" and "," are escaped, because they
        # separate the attributes of a message.
        digest = _SCRAM[settings.mechanism]
        name = settings.username.replace("=", "=3D").replace(",", "=2C")
        nonce = base64.b64encode(os.urandom(24)).decode()
        client_first = f"n={name},r={nonce}"
        server_first = self._authenticate(f"n,,{client_first}".encode()).decode()
        # 2. The broker sends the salt and the iterations. "biws" is "n,," in base64:
        # the connection has no channel binding.
        try:
            attributes = dict(
                attribute.split("=", 1) for attribute in server_first.split(",")
            )
            salt, iterations = base64.b64decode(attributes["s"]), int(attributes["i"])
            client_final = f"c=biws,r={attributes['r']}"
        except (KeyError, ValueError) as error:
            raise LoginError(f"{self._address}: a malformed challenge") from error
        # A challenge without the nonce of this client may be a recorded one. With few
        # iterations, a false broker could guess the password from the proof. The
        # minimum of RFC 5802 is 4,096.
        if not attributes["r"].startswith(nonce) or iterations < 4_096:
            raise LoginError(f"{self._address}: an insecure challenge")
        salted_password = hashlib.pbkdf2_hmac(
            digest, settings.password.encode(), salt, iterations
        )
        # 3. The proof shows that the client has the password, without sending it.
        auth_message = f"{client_first},{server_first},{client_final}".encode()
        client_key = hmac.digest(salted_password, b"Client Key", digest)
        stored_key = hashlib.new(digest, client_key).digest()
        client_signature = hmac.digest(stored_key, auth_message, digest)
        client_proof = bytes(
            a ^ b for a, b in zip(client_key, client_signature, strict=True)
        )
        message = f"{client_final},p={base64.b64encode(client_proof).decode()}"
        server_final = self._authenticate(message.encode())
        # 4. The signature shows that the broker has the user's credential.
        server_key = hmac.digest(salted_password, b"Server Key", digest)
        expected = base64.b64encode(hmac.digest(server_key, auth_message, digest))
        if not hmac.compare_digest(server_final, b"v=" + expected):
            raise LoginError(f"{self._address} does not know the password")

    def _authenticate(self, token: bytes) -> bytes:
        response = self.request(
            wire.SASL_AUTHENTICATE, wire.SASL_AUTHENTICATE.Request(auth_bytes=token)
        )
        if response.error_code:
            raise LoginError(
                f"{self._address}: {response.error_message or codes.name(response.error_code)}"
            )
        return bytes(response.auth_bytes)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Return the addresses in `HOST:PORT[,...]`.

    Raises:
        InvalidConfigError: an address is malformed.
    """
    addresses = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise InvalidConfigError(
                "address of the source", expected="HOST:PORT[,...]", found=repr(part)
            )
        addresses.append((host.strip("[]"), int(port)))
    return addresses
