"""A cluster of real processes with TLS, users and access control lists."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import trustme

from netshim.follow.connection import ClientSettings, LoginError, SourceConnection
from netshim.security import scram
from netshim.security.acls import Acl, AclOperation, Pattern, Permission, ResourceType
from netshim.security.stored import SecurityStore
from netshim.session import BROKER_USER
from support.clusters import Cluster, until

ADMIN = "admin"
ALICE = "alice"
ALLOW = Permission.ALLOW


def password_of(name: str) -> str:
    return f"a password of {name}"


def netshim(*arguments: object, expected: int = 0) -> str:
    """Run a command of netshim, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "netshim", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == expected, done.stderr
    return done.stdout + done.stderr


class SecuredCluster(Cluster):
    """Three brokers with SASL_SSL and access control lists.

    The user ADMIN may do everything. The user ALICE has the rules of allow().
    """

    def __init__(
        self, path: Path, *, options: tuple[str, ...] = (), **settings: Any
    ) -> None:
        authority = trustme.CA()
        path.mkdir(exist_ok=True)
        self.ca_file = path / "ca.pem"
        authority.cert_pem.write_to_path(self.ca_file)
        self.cert_file = path / "broker.pem"
        self.cert_file.touch(mode=0o600)
        authority.issue_cert(
            "localhost", "127.0.0.1"
        ).private_key_and_cert_chain_pem.write_to_path(self.cert_file)
        super().__init__(
            path,
            protocol="SASL_SSL",
            options=(
                *("--tls-cert", str(self.cert_file), "--acls"),
                *("--super-user", f"User:{ADMIN}", *options),
            ),
            client=self.settings_of(ADMIN),
            client_config=self.config_of(ADMIN),
            **settings,
        )

    def settings_of(self, user: str, password: str | None = None) -> ClientSettings:
        """Return the settings of ask() for a user."""
        return ClientSettings(
            protocol="SASL_SSL",
            mechanism="SCRAM-SHA-512",
            username=user,
            password=password or password_of(user),
            ca_file=str(self.ca_file),
        )

    def config_of(self, user: str) -> dict[str, Any]:
        """Return the settings of librdkafka for a user."""
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.ca_file),
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": user,
            "sasl.password": password_of(user),
        }

    def add_users(self, *names: str) -> None:
        """Create users, and wait until they can log in to every broker."""
        with self.store() as store:
            for name in names:
                credentials = scram.credentials_of(
                    password_of(name), scram.MIN_ITERATIONS, os.urandom
                )
                store.set_credentials(name, credentials)
        for name in names:
            for number in self.processes:
                until(
                    lambda name=name, number=number: self.logs_in(number, name),
                    f"{name} logs in to broker {number}",
                )

    def logs_in(self, number: int, user: str) -> bool:
        """Return whether a user can log in to a broker."""
        try:
            self.connect(number, self.settings_of(user)).close()
        except LoginError:
            return False
        return True

    def allow(
        self, user: str, kind: ResourceType, name: str, *operations: AclOperation
    ) -> None:
        """Store rules of a user, as the commands do."""
        with self.store() as store:
            store.add_acls(
                Acl(kind, Pattern.LITERAL, name, f"User:{user}", "*", operation, ALLOW)
                for operation in operations
            )

    @contextlib.contextmanager
    def store(self) -> Iterator[SecurityStore]:
        """Open the users, rules and quotas of the cluster, as the commands do."""
        place = self._registry if "://" in self._registry else self.path
        with contextlib.closing(SecurityStore(place)) as store:
            yield store

    def broker_settings(self) -> ClientSettings:
        """Return the settings with which the brokers log in to each other."""
        with self.store() as store:
            brokers = store.load().brokers
        assert brokers is not None
        return attrs.evolve(self.settings_of(BROKER_USER), password=brokers.password)

    def connect(self, number: int, client: ClientSettings) -> SourceConnection:
        return SourceConnection("127.0.0.1", self.ports[number], client)
