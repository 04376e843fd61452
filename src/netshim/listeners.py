"""Listeners of a broker: addresses, TLS, and which of them may leave the machine.

Rules:
- A listener has a name and one of four protocols: PLAINTEXT, SSL, SASL_PLAINTEXT and
  SASL_SSL. Responses to clients of a listener contain the advertised address of that
  listener.
- TLS is at least 1.2. Certificates are read again on request, for new connections.
- A listener outside loopback must authenticate its clients: by SASL, or by required
  client certificates. PLAIN and OAUTHBEARER send secrets, so they need TLS there.
  `--insecure` switches these checks off.

This module opens no socket; server.py does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from typing import Any, Final

import attrs

from logcore.errors import InvalidConfigError
from netshim.security import sasl

#: Kafka's names of the security protocols.
PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
#: Values of TlsSettings.client.
CLIENT_CERTIFICATES: Final = {
    "none": ssl.CERT_NONE,
    "requested": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
#: The name, the host (an IPv6 address in brackets) and the port.
_LISTENER: Final = re.compile(r"([A-Za-z0-9_]+)://(\[[^\]]*\]|[^\[\]:]*):(\d{1,5})")
#: More messages in each direction than any handshake has.
_MAX_FLIGHTS: Final = 6
#: Permission bits of a key file that others may read.
_OTHERS_READ: Final = 0o044


@attrs.frozen
class Listener:
    """An address on which clients are accepted."""

    name: str
    host: str
    port: int
    #: One of PROTOCOLS.
    protocol: str
    #: (host, port) for clients. Without one, each gets the address that it has used.
    advertised: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The address for clients."""
        return self.advertised or (self.host, self.port)

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        """Whether clients authenticate by SASL."""
        return self.protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine can connect."""
        # A name is not resolved, because its address may change. Only this name is
        # known to be local.
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        protocol: str | None = None,
        advertised: tuple[str, int] | None = None,
    ) -> Listener:
        """Read `NAME://HOST:PORT`. The name is the protocol, unless one is given.

        Raises:
            InvalidConfigError: the text has another form, or the protocol is unknown.
        """
        match = _LISTENER.fullmatch(text)
        if match is None or not match[2] or int(match[3]) > 65_535:
            raise InvalidConfigError(
                "listener",
                expected="NAME://HOST:PORT, for example SASL_SSL://0.0.0.0:9093",
                found=repr(text),
            )
        name = match[1].upper()
        protocol_name = (protocol or name).upper()
        if protocol_name not in PROTOCOLS:
            raise InvalidConfigError(
                f"the protocol of listener {name}",
                expected=" or ".join(PROTOCOLS)
                + f"; for a name of your own add --listener-protocol {name}=SASL_SSL",
                found=repr(protocol_name),
            )
        return cls(name, match[2].strip("[]"), int(match[3]), protocol_name, advertised)


@attrs.frozen(kw_only=True)
class TlsSettings:
    """Certificates of the TLS listeners, as PEM files."""

    #: The certificate, followed by the certificates of its issuers.
    cert: str
    #: The private key. It may be in the file of the certificate.
    key: str | None = None
    #: Certificates of the authorities whose client certificates are accepted.
    client_ca: str | None = None
    #: Whether clients present a certificate: "none", "requested" or "required".
    client: str = "none"

    def __attrs_post_init__(self) -> None:
        if self.client not in CLIENT_CERTIFICATES:
            raise InvalidConfigError(
                "client certificates",
                expected=" or ".join(CLIENT_CERTIFICATES),
                found=repr(self.client),
            )
        if self.client != "none" and self.client_ca is None:
            raise InvalidConfigError(
                "client certificates need the authorities that issue them",
                expected="--tls-client-ca",
                found="none",
            )

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of a server with these certificates.

        Raises:
            InvalidConfigError: a file cannot be read, or the key does not belong to the
                certificate, or other users may read the key.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Renegotiation costs the server more than the client. Compression reveals
        # secrets (CRIME).
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        self.load_into(context)
        context.verify_mode = CLIENT_CERTIFICATES[self.client]
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise InvalidConfigError(
                    f"the certificates of {self.client_ca}",
                    expected="a PEM file of authorities",
                    found=str(error),
                ) from None
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Read the certificate and the key again, for new connections of a context.

        Raises:
            InvalidConfigError: as for context(). The context keeps the former files.
        """
        key = self.key or self.cert
        try:
            mode = os.stat(key).st_mode
            # Tried with another context first, which a wrong pair of files would leave
            # unusable.
            for sslcontext in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                sslcontext.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise InvalidConfigError(
                f"the certificate {self.cert} with the key {key}",
                expected="PEM files that belong together",
                found=str(error),
            ) from None
        if mode & _OTHERS_READ and os.name == "posix":
            raise InvalidConfigError(
                f"the private key {key} is readable by other users",
                expected=f"chmod 600 {key}",
                found=f"mode {mode & 0o777:o}",
            )


def _no_password() -> str:
    """Refuse a key with a password: OpenSSL would ask for it at the terminal."""
    raise ValueError("the private key has a password")


def client_certificate_of(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str
) -> tuple[dict[str, Any], bytes] | None:
    """Let a client connect to a server in memory, and return the client's certificate.

    The result is that of getpeercert() in both forms, or None if the server requests no
    certificate. `host` is the name by which the client knows the server.

    Raises:
        ssl.SSLError: one side refuses the other.
    """
    # No socket is needed: each side reads the bytes that the other side has written.
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepted = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [accepted, client.wrap_bio(to_client, to_server, server_hostname=host)]
    # The client reads the server's refusal of its certificate with the first data.
    for _ in range(_MAX_FLIGHTS):
        for sslobject in list(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                sslobject.do_handshake()
                waiting.remove(sslobject)
    certificate = accepted.getpeercert()
    der = accepted.getpeercert(binary_form=True)
    return None if not certificate or der is None else (dict(certificate), der)


def check_exposure(
    listeners: Sequence[Listener],
    tls: TlsSettings | None,
    mechanisms: Sequence[str],
) -> None:
    """Refuse listeners that would give strangers access.

    Raises:
        InvalidConfigError: a listener outside loopback does not authenticate its
            clients, or its mechanisms send secrets without TLS.
    """
    for listener in listeners:
        if listener.is_local:
            continue
        has_certificates = (
            listener.uses_tls and tls is not None and tls.client == "required"
        )
        if not listener.uses_sasl and not has_certificates:
            raise InvalidConfigError(
                f"listener {listener.name} on {listener.host} would accept anyone",
                expected=f"--listener SASL_SSL://{listener.host}:{listener.port} with --tls-cert, "
                "or --insecure if this is meant",
                found=listener.protocol,
            )
        # SCRAM and certificates do not send the secret itself.
        secret = [
            mechanism
            for mechanism in mechanisms
            if mechanism in (sasl.PLAIN, sasl.OAUTHBEARER)
        ]
        if listener.uses_sasl and not listener.uses_tls and secret:
            raise InvalidConfigError(
                f"{' and '.join(secret)} on {listener.host} would send secrets unencrypted",
                expected=f"--listener SASL_SSL://{listener.host}:{listener.port} with --tls-cert, "
                "or --insecure if this is meant",
                found=listener.protocol,
            )


def check_listeners(listeners: Sequence[Listener], tls: TlsSettings | None) -> None:
    """Check that listeners have different names, and certificates if they use TLS.

    Raises:
        InvalidConfigError: two have the same name, or the certificates are missing.
    """
    names = [listener.name for listener in listeners]
    if len(set(names)) < len(names):
        raise InvalidConfigError(
            "listeners", expected="different names", found=", ".join(names)
        )
    for listener in listeners:
        if listener.uses_tls and tls is None:
            raise InvalidConfigError(
                f"listener {listener.name} uses TLS",
                expected="--tls-cert",
                found="none",
            )
