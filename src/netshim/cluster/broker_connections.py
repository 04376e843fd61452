"""Connections between the brokers of a cluster: their listener, their login, their TLS.

Rules:
- A broker connects to the inter-broker listener of another one, by default its first
  listener. All brokers have a listener of that name and protocol.
- If the listener uses SASL, brokers log in as BROKER_USER with SCRAM-SHA-512. The
  password is a node of the registry, which the first broker creates. A process that can
  read the registry's directory can also change every user in it, so the password gives it
  no further rights.
- If the listener uses TLS, a broker verifies the certificate and the name of another one,
  and presents its own certificate if the other one requests it.
- With access control lists, the principal of the brokers must be a super user: other
  users may not fetch as a follower or write markers. Without SASL, it is User:ANONYMOUS
  or the subject of the certificate.
- A broker tests all of this at its start, by a handshake with itself. A broker that the
  others would refuse does not start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from logcore.errors import InvalidConfigError, RemoteUnavailableError
from netshim.follow.connection import ClientSettings, LoginError, SourceConnection
from netshim.listeners import Listener, TlsSettings, client_certificate_of
from netshim.security.principals import CertificateError, subject_of
from netshim.security.scram import BROKER_MECHANISM
from netshim.security.service import SecuritySettings
from netshim.security.stored import BrokerLogin
from netshim.session import ANONYMOUS, BROKER_USER

_log = logging.getLogger("netshim")

#: Addresses that mean all networks of this machine.
_ALL_NETWORKS: Final = ("0.0.0.0", "::")
#: Returns the host and port of a broker, None while it is not registered.
AddressOf = Callable[[int], tuple[str, int] | None]
#: Opens a connection to a broker. Blocks.
Connect = Callable[[int], SourceConnection]


@attrs.frozen
class BrokerListener:
    """The listener for the other brokers, and the files for connections to theirs."""

    listener: Listener
    tls: TlsSettings | None
    #: PEM file of the authorities of the brokers' certificates.
    ca_file: str | None

    @classmethod
    def choose(
        cls,
        listeners: Sequence[Listener],
        name: str | None,
        tls: TlsSettings | None,
        ca_file: str | None,
        security: SecuritySettings,
    ) -> BrokerListener:
        """Return the inter-broker listener: the one of a name, or the first one.

        Raises:
            InvalidConfigError: there is no such listener, a listener has no address for
                clients, or brokers could not log in.
        """
        for listener in listeners:
            if listener.advertised is None and listener.host in _ALL_NETWORKS:
                raise InvalidConfigError(
                    f"listener {listener.name} of a broker in a cluster needs an address for "
                    "clients",
                    expected=f"--advertise {listener.name}=HOST:{listener.port}",
                    found=listener.host,
                )
        # As in Kafka, where inter.broker.listener.name selects another one.
        chosen = listeners[0]
        if name is not None:
            matching = [
                listener for listener in listeners if listener.name == name.upper()
            ]
            if not matching:
                raise InvalidConfigError(
                    "--inter-broker-listener",
                    expected=" or ".join(listener.name for listener in listeners),
                    found=name,
                )
            (chosen,) = matching
        if chosen.uses_sasl and BROKER_MECHANISM not in security.mechanisms:
            raise InvalidConfigError(
                "--sasl: the brokers of a cluster log in to each other",
                expected=f"{BROKER_MECHANISM} among the mechanisms",
                found=",".join(security.mechanisms),
            )
        if chosen.uses_tls and ca_file is None and tls is not None:
            # Enough for brokers that share a certificate, and for a certificate file
            # that contains its issuer.
            ca_file = tls.cert
        return cls(chosen, tls, ca_file)

    def client_settings(self, login: BrokerLogin | None) -> ClientSettings:
        """Return the settings of connections to other brokers."""
        settings = ClientSettings(protocol=self.listener.protocol)
        if self.listener.uses_sasl and login is not None:
            settings = attrs.evolve(
                settings,
                mechanism=BROKER_MECHANISM,
                username=BROKER_USER,
                password=login.password,
            )
        if self.listener.uses_tls and self.tls is not None:
            settings = attrs.evolve(
                settings,
                ca_file=self.ca_file,
                certificate_file=self.tls.cert,
                key_file=self.tls.key,
            )
        return settings

    def check(self, security: SecuritySettings) -> None:
        """Check that another broker with the same settings would accept this one.

        Raises:
            InvalidConfigError: it would not.
        """
        principal = ANONYMOUS
        if self.listener.uses_tls and self.tls is not None:
            principal = self._principal_by_tls(self.tls, security)
        # With SASL, brokers have BROKER_PRINCIPAL, which may do everything.
        is_known = self.listener.uses_sasl or principal in security.super_users
        if security.enforces_acls and not is_known:
            raise InvalidConfigError(
                f"with --acls, other brokers would refuse {principal}, the principal of "
                f"this broker on listener {self.listener.name}",
                expected=f"an --inter-broker-listener with SASL, or --super-user '{principal}'",
                found=", ".join(security.super_users) or "no super user",
            )

    def _principal_by_tls(self, tls: TlsSettings, security: SecuritySettings) -> str:
        # The name that other brokers verify in the certificate.
        host, _ = self.listener.address
        try:
            peer_certificate = client_certificate_of(
                tls.context(), self.client_settings(None).tls_context(), host
            )
        except OSError as error:
            raise InvalidConfigError(
                f"other brokers would refuse a TLS connection with this one at {host}",
                expected="a certificate with this name, whose authority is in --tls-ca; "
                "with --tls-client-ca, also one for clients",
                found=str(error),
            ) from None
        # The listener requests no certificate of clients.
        if peer_certificate is None:
            return ANONYMOUS
        certificate, der = peer_certificate
        try:
            subject = subject_of(certificate, lambda: der)
        except CertificateError as error:
            raise InvalidConfigError(
                f"the certificate {tls.cert}", expected="a subject", found=str(error)
            ) from None
        user = security.principal_mapping.user_of(subject)
        return ANONYMOUS if user is None else f"User:{user}"


class BrokerConnections:
    """Opens connections to other brokers. Any thread may use it."""

    def __init__(
        self,
        listener: BrokerListener,
        address_of: AddressOf,
        login: Callable[[], BrokerLogin | None],
    ) -> None:
        self._listener = listener
        self._address_of = address_of
        #: Returns the password of the brokers, None before it is read.
        self._login = login
        self._mutex = threading.Lock()
        #: The last refusal by each broker, which is logged once.
        self._refusals: dict[int, str] = {}

    def connect(self, broker: int) -> SourceConnection:
        """Connect to a broker and log in.

        Raises:
            RemoteUnavailableError: the broker is not registered, does not answer, or
                refuses the login.
        """
        address = self._address_of(broker)
        if address is None:
            raise RemoteUnavailableError(f"broker {broker} is not registered")
        # Read for each connection, because the first broker creates the password later.
        login = self._login()
        if login is None and self._listener.listener.uses_sasl:
            raise RemoteUnavailableError("the password of the brokers is not known yet")
        try:
            connection = SourceConnection(
                *address, self._listener.client_settings(login)
            )
        except (LoginError, InvalidConfigError) as error:
            self._report(broker, str(error))
            raise RemoteUnavailableError(
                f"broker {broker} cannot be used: {error}"
            ) from error
        self._report(broker, "")
        return connection

    def _report(self, broker: int, reason: str) -> None:
        with self._mutex:
            # Fetchers retry periodically. Only a change is logged.
            if self._refusals.get(broker, "") == reason:
                return
            self._refusals[broker] = reason
        if reason:
            _log.error(
                "this broker cannot log in to broker %d, so it copies nothing from it: %s",
                broker,
                reason,
            )
        else:
            _log.info("this broker is logged in to broker %d again", broker)
