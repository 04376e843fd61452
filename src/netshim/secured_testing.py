"""A broker for tests with TLS, users and access control lists.

    def test_orders_are_private(kafka_secured):
        kafka_secured.allow("alice", "write", topic="orders")
        Producer(kafka_secured.client_config("alice")).produce("orders", b"4 apples")

Rules:
- The broker has one listener, SASL_SSL, and enforces access control lists. The user
  `admin` may do everything; every other user may do what allow() allows.
- client_config() creates a user that does not exist yet, with a random password.
- Each broker has an authority of its own, which issues all certificates. No program
  outside of the test trusts it.

The fixture is in pytest_plugin.py. This module does not depend on pytest.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from logcore import InvalidConfigError
from netshim.listeners import TlsSettings
from netshim.security import scram
from netshim.security.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.service import SecuritySettings
from netshim.security.stored import SecurityStore
from netshim.server_thread import ServerHandle
from netshim.testing import Kafka, start

#: Libraries whose settings client_config() returns.
Client = Literal["confluent-kafka", "kafka-python", "aiokafka", "java"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

#: The user that may do everything.
ADMIN: Final = "admin"
#: Maximum time until the broker has stored a user or a rule.
_CHANGE_S: Final = 30.0


def start_secured(path: Path, **options: Any) -> SecuredKafka:
    """Start a broker with TLS and users. `options` are those of netshim.serve().

    The package trustme creates the certificates.
    """
    try:
        import trustme
    except ImportError:
        raise InvalidConfigError(
            "kafka_secured needs the package trustme",
            expected="pip install 'logcore-db[testing]'",
            found="no module trustme",
        ) from None
    authority = trustme.CA()
    folder = path.with_name(path.name + "-certificates")
    folder.mkdir(parents=True, exist_ok=True)
    ca_file = folder / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    cert_file = _write(authority.issue_cert("localhost", "127.0.0.1"), folder, "broker")
    options.setdefault("listeners", ["SASL_SSL://127.0.0.1:0"])
    options.setdefault(
        "tls",
        # A client certificate is optional, because most tests log in with a password.
        TlsSettings(cert=str(cert_file), client_ca=str(ca_file), client="requested"),
    )
    options.setdefault(
        "security",
        SecuritySettings(
            # Clients differ in the mechanisms that they support.
            mechanisms=("PLAIN", *scram.HASHES),
            super_users=(f"User:{ADMIN}",),
            enforces_acls=True,
        ),
    )
    kafka = start(path, **options)
    return SecuredKafka(kafka.server, ca_file, authority)


def _write(certificate: Any, folder: Path, name: str) -> Path:
    """Write a certificate with its key to a file that only this user can read."""
    path = folder / f"{name}.pem"
    # Before the write, so that the key is never readable by others.
    path.touch(mode=0o600)
    certificate.private_key_and_cert_chain_pem.write_to_path(path)
    return path


class SecuredKafka(Kafka):
    """A running broker with TLS, users and access control lists.

    The methods of Kafka read the broker's own directory, and need no permission.
    """

    def __init__(self, server: ServerHandle, ca_file: Path, authority: Any) -> None:
        """Create an instance. Tests use the fixture kafka_secured."""
        super().__init__(server)
        #: PEM file of the authority that issued all certificates.
        self.ca_file = ca_file
        #: Issues the certificates of clients.
        self._authority = authority
        #: The passwords of the users that were created here.
        self._passwords: dict[str, str] = {}

    def _change(self, change: Callable[[SecurityStore], object]) -> None:
        """Change stored users or rules, and wait until the broker uses the change."""
        finished = threading.Event()
        outcome: list[object] = []

        def begin() -> None:
            state = self.server.server.broker.state
            pending = state.change_security(
                lambda: change(state.security.store()), lambda result: result
            )

            def finish(result: object) -> None:
                outcome.append(result)
                finished.set()

            # finish() runs in the broker's thread, after the broker has published the
            # change.
            pending.then(finish)

        self.server.call(begin)
        if not finished.wait(_CHANGE_S):
            raise TimeoutError("the broker has not stored a user or a rule")
        if isinstance(outcome[0], BaseException):
            raise outcome[0]

    def add_user(self, name: str, password: str | None = None) -> str:
        """Create a user, or change the password; return the password.

        Without `password`, a random one is chosen.
        """
        if password is None:
            password = os.urandom(12).hex()
        # More iterations would only slow down the tests.
        credentials = scram.credentials_of(password, scram.MIN_ITERATIONS, os.urandom)
        self._change(lambda store: store.set_credentials(name, credentials))
        self._passwords[name] = password
        return password

    def allow(
        self,
        user: str,
        *operations: str,
        topic: str | None = None,
        group: str | None = None,
        transactional_id: str | None = None,
        cluster: bool = False,
        prefixed: bool = False,
        denies: bool = False,
    ) -> None:
        """Allow operations of a user on a topic, a group, an id or the cluster.

        Operations are Kafka's, for example "read" or "describe_configs". A name may be
        "*". With `prefixed`, it is the start of the allowed names.
        """
        pattern = Pattern.PREFIXED if prefixed else Pattern.LITERAL
        resources = [
            (ResourceType.TOPIC, topic),
            (ResourceType.GROUP, group),
            (ResourceType.TRANSACTIONAL_ID, transactional_id),
            (ResourceType.CLUSTER, CLUSTER_NAME if cluster else None),
        ]
        rules = [
            Acl(
                resource_type,
                pattern,
                name,
                f"User:{user}",
                WILDCARD,
                AclOperation[operation.upper()],
                Permission.DENY if denies else Permission.ALLOW,
            )
            for resource_type, name in resources
            if name is not None
            for operation in operations
        ]
        if not rules:
            raise ValueError("expected a resource and at least one operation")
        self._change(lambda store: store.add_acls(rules))

    def deny(self, user: str, *operations: str, **resource: Any) -> None:
        """Deny operations of a user. The arguments are those of allow()."""
        self.allow(user, *operations, denies=True, **resource)

    def client_config(
        self,
        user: str = ADMIN,
        client: Client = "confluent-kafka",
        mechanism: Mechanism = "SCRAM-SHA-256",
    ) -> dict[str, Any]:
        """Return the settings with which a client connects as a user.

        The result is a dict for confluent-kafka, keyword arguments for kafka-python and
        aiokafka, and properties for the Java client.
        """
        # A test may connect as a user that it did not create.
        password = self._passwords.get(user) or self.add_user(user)
        if client == "confluent-kafka":
            return {
                "bootstrap.servers": self.bootstrap_servers,
                "security.protocol": "SASL_SSL",
                "ssl.ca.location": str(self.ca_file),
                "sasl.mechanism": mechanism,
                "sasl.username": user,
                "sasl.password": password,
            }
        if client == "java":
            login = "scram.ScramLoginModule"
            if mechanism == "PLAIN":
                login = "plain.PlainLoginModule"
            return {
                "bootstrap.servers": self.bootstrap_servers,
                "security.protocol": "SASL_SSL",
                # The Java client reads PEM files since Kafka 2.7 (KIP-651).
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.ca_file),
                "sasl.mechanism": mechanism,
                "sasl.jaas.config": f"org.apache.kafka.common.security.{login} required "
                f'username="{user}" password="{password}";',
            }
        settings: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap_servers,
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": mechanism,
            "sasl_plain_username": user,
            "sasl_plain_password": password,
        }
        if client == "aiokafka":
            context = ssl.create_default_context(cafile=str(self.ca_file))
            return {**settings, "ssl_context": context}
        if client == "kafka-python":
            return {**settings, "ssl_cafile": str(self.ca_file)}
        raise ValueError(f"unknown client {client!r}")

    def client_certificate(self, user: str) -> Path:
        """Return a PEM file with a certificate of `CN=user` and its key.

        For listeners with client certificates.
        """
        certificate = self._authority.issue_cert(
            f"{user}@clients.test", common_name=user
        )
        return _write(certificate, self.ca_file.parent, f"client-{user}")
