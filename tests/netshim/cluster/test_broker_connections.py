"""The listener for the brokers of a cluster: its checks, and the login to other
brokers.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trustme

import netshim
from logcore.errors import InvalidConfigError, RemoteUnavailableError
from logcore.registry import open_registry
from netshim import wire
from netshim.cluster.broker_connections import BrokerConnections, BrokerListener
from netshim.cluster.node import ClusterSettings
from netshim.cluster_command import _check_ports, _numbered
from netshim.follow.connection import ClientSettings, LoginError, SourceConnection
from netshim.listeners import Listener, TlsSettings
from netshim.security.service import SecuritySettings
from netshim.security.stored import SecuritySnapshot, SecurityStore
from netshim.session import BROKER_PRINCIPAL
from support.clusters import until

SCRAM = SecuritySettings()
ACLS = SecuritySettings(enforces_acls=True)


def write(path: Path, certificate: trustme.LeafCert) -> str:
    path.touch(mode=0o600)
    certificate.private_key_and_cert_chain_pem.write_to_path(path)
    return str(path)


class Files:
    """Certificates of two authorities."""

    def __init__(self, folder: Path) -> None:
        own, other = trustme.CA(), trustme.CA()
        self.ca = str(folder / "ca.pem")
        own.cert_pem.write_to_path(self.ca)
        self.other_ca = str(folder / "other-ca.pem")
        other.cert_pem.write_to_path(self.other_ca)
        self.broker = write(folder / "broker.pem", own.issue_cert("127.0.0.1"))
        self.elsewhere = write(
            folder / "elsewhere.pem", own.issue_cert("broker.example.com")
        )
        self.named = write(
            folder / "named.pem", own.issue_cert("127.0.0.1", common_name="broker")
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


def choose(
    *texts: str,
    name: str | None = None,
    tls: TlsSettings | None = None,
    ca: str | None = None,
    security: SecuritySettings = SCRAM,
) -> BrokerListener:
    listeners = [Listener.parse(text) for text in texts]
    return BrokerListener.choose(listeners, name, tls, ca, security)


def test_brokers_use_the_first_listener_unless_another_is_named() -> None:
    texts = "PLAINTEXT://127.0.0.1:1", "SASL_PLAINTEXT://127.0.0.1:2"
    assert choose(*texts).listener.port == 1
    chosen = choose(*texts, name="sasl_plaintext")
    assert chosen.listener.port == 2
    with pytest.raises(InvalidConfigError, match="PLAINTEXT or SASL_PLAINTEXT"):
        choose(*texts, name="SSL")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a_listener_on_all_networks_needs_an_address(host: str) -> None:
    """Otherwise, other brokers and clients would be sent to 0.0.0.0, and each would
    connect to its own machine.
    """
    with pytest.raises(InvalidConfigError, match="--advertise PLAINTEXT=HOST:1"):
        choose(f"PLAINTEXT://{host}:1")
    listener = Listener.parse(
        f"PLAINTEXT://{host}:1", advertised=("b1.example.com", 9092)
    )
    chosen = BrokerListener.choose([listener], None, None, None, SCRAM)
    assert chosen.listener.address == ("b1.example.com", 9092)


def test_the_mechanism_of_the_brokers_is_served() -> None:
    with pytest.raises(InvalidConfigError, match="SCRAM-SHA-512"):
        choose(
            "SASL_PLAINTEXT://127.0.0.1:1",
            security=SecuritySettings(mechanisms=("PLAIN", "SCRAM-SHA-256")),
        )


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SASL_PLAINTEXT"])
@pytest.mark.parametrize("security", [SCRAM, ACLS])
def test_brokers_without_a_login_are_refused_by_rules(
    protocol: str, security: SecuritySettings
) -> None:
    chosen = choose(f"{protocol}://127.0.0.1:1", security=security)
    if protocol == "PLAINTEXT" and security is ACLS:
        with pytest.raises(InvalidConfigError, match="User:ANONYMOUS"):
            chosen.check(security)
    else:
        chosen.check(security)
    chosen.check(SecuritySettings(enforces_acls=True, super_users=("User:ANONYMOUS",)))


def test_certificate_that_brokers_would_refuse_fails_at_startup(
    files: Files,
) -> None:
    address = "SASL_SSL://127.0.0.1:1"
    # One file for all brokers needs no authority.
    choose(address, tls=TlsSettings(cert=files.broker)).check(SCRAM)
    choose(address, tls=TlsSettings(cert=files.broker), ca=files.ca).check(SCRAM)
    for tls, ca in (
        (TlsSettings(cert=files.elsewhere), files.ca),
        (TlsSettings(cert=files.broker), files.other_ca),
        (
            TlsSettings(cert=files.broker, client_ca=files.other_ca, client="required"),
            files.ca,
        ),
    ):
        with pytest.raises(InvalidConfigError, match="other brokers would refuse"):
            choose(address, tls=tls, ca=ca).check(SCRAM)


def test_brokers_with_client_certificates_are_super_users(files: Files) -> None:
    tls = TlsSettings(cert=files.named, client_ca=files.ca, client="required")
    chosen = choose("SSL://127.0.0.1:1", tls=tls, ca=files.ca)
    chosen.check(SCRAM)
    with pytest.raises(InvalidConfigError) as refused:
        chosen.check(ACLS)
    principal = str(refused.value).partition("--super-user '")[2].partition("'")[0]
    assert "CN=broker" in principal
    chosen.check(SecuritySettings(enforces_acls=True, super_users=(principal,)))


# -- connections -----------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path) -> Iterator[SecuritySnapshot]:
    with open_registry(tmp_path / "cluster", topics="truth") as registry:
        store = SecurityStore.of_cluster(lambda: registry)
        store.ensure_broker_login()
        store.ensure_broker_login()  # the first login remains
        yield store.load()
        store.close()


def publish(
    server: netshim.Server, snapshot: SecuritySnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a server use these facts instead of reading its own."""
    monkeypatch.setattr(server.security, "refresh", lambda now_ms: None)
    server.security.publish(snapshot)


def test_refused_broker_reports_the_refusal_once(
    snapshot: SecuritySnapshot,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert snapshot.brokers is not None
    with netshim.serve(
        tmp_path / "data", listeners=["SASL_PLAINTEXT://127.0.0.1:0"]
    ) as alone:
        logins = [snapshot.brokers]
        connections = BrokerConnections(
            choose("SASL_PLAINTEXT://127.0.0.1:1"),
            lambda _: ("127.0.0.1", alone.port),
            lambda: logins[0] if logins else None,
        )
        caplog.set_level(logging.INFO)
        for _ in range(2):  # the password belongs to no user there
            with pytest.raises(RemoteUnavailableError, match="broker 2 cannot be used"):
                connections.connect(2)
        assert caplog.text.count("cannot log in to broker 2") == 1
        assert snapshot.brokers.password not in caplog.text
        # Later the broker joins the cluster.
        server = alone.server
        alone.call(lambda: publish(server, snapshot, monkeypatch))
        connection = connections.connect(2)
        assert caplog.text.count("logged in to broker 2 again") == 1
        principals = [
            client.session.principal
            for client in server._connections.clients
            if client.session
        ]
        assert BROKER_PRINCIPAL in principals
        connection.close()
        logins.clear()
        with pytest.raises(RemoteUnavailableError, match="not known yet"):
            connections.connect(2)


def test_brokers_log_in_by_one_mechanism_without_expiration(
    snapshot: SecuritySnapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The login of brokers never expires. No client can delete it, and replication
    would stop briefly at each expiration.
    """
    assert snapshot.brokers is not None
    options = SecuritySettings(
        mechanisms=("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
        connections_max_reauth_ms=1,
    )
    with netshim.serve(
        tmp_path / "data", listeners=["SASL_PLAINTEXT://127.0.0.1:0"], security=options
    ) as alone:
        alone.call(lambda: publish(alone.server, snapshot, monkeypatch))
        settings = choose("SASL_PLAINTEXT://127.0.0.1:1").client_settings(
            snapshot.brokers
        )
        connection = SourceConnection("127.0.0.1", alone.port, settings)
        for _ in range(20):  # for longer than the lifetime of an ordinary login
            connection.request(wire.METADATA, wire.METADATA.Request())
        connection.close()
        for mechanism in ("PLAIN", "SCRAM-SHA-256"):
            other = attrs.evolve(settings, mechanism=mechanism)
            with pytest.raises(LoginError):
                SourceConnection("127.0.0.1", alone.port, other)


def test_an_interrupted_request_takes_no_encrypted_bytes(files: Files) -> None:
    """The response that was cut off must not be completed by bytes of the TLS stream."""
    context = TlsSettings(cert=files.broker).context()
    listening = socket.create_server(("127.0.0.1", 0))
    settings = ClientSettings(protocol="SSL", ca_file=files.ca)
    results: list[Any] = []

    def serve() -> None:
        sock, _ = listening.accept()
        with context.wrap_socket(sock, server_side=True) as sslsocket:
            sslsocket.recv(1_000)  # ApiVersions 0
            sslsocket.sendall(
                (10).to_bytes(4, "big") + (1).to_bytes(4, "big") + bytes(6)
            )
            sslsocket.sendall((1_000).to_bytes(4, "big") + b"x" * 100)
            results.append(sslsocket.recv(1))

    serving = threading.Thread(target=serve)
    serving.start()
    connection = SourceConnection(*listening.getsockname(), settings)
    outcome: list[BaseException] = []

    def read() -> None:
        try:
            connection._frame()
        except BaseException as error:
            outcome.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    while serving.is_alive() and reading.is_alive():
        connection.interrupt()
        assert connection._sock._sslobj is not None  # type: ignore[attr-defined]
        reading.join(0.05)
    reading.join()
    serving.join()
    assert isinstance(outcome[0], OSError)
    connection.close()
    listening.close()


# -- the command -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "number", "expected"),
    [
        (["SSL://127.0.0.1:9093"], 1, ["SSL://127.0.0.1:9093"]),
        (["SSL://127.0.0.1:9093"], 3, ["SSL://127.0.0.1:9095"]),
        (["SSL://[::1]:9093", "A://h:0"], 2, ["SSL://[::1]:9094", "A://h:0"]),
        ([":9092"], 2, ["9093"]),
        ([":0"], 2, ["0"]),
        (["nonsense"], 2, ["nonsense"]),
    ],
)
def test_each_broker_has_the_next_ports(
    texts: list[str], number: int, expected: list[str]
) -> None:
    arguments = _numbered("--x", texts, number)
    assert arguments == [part for text in expected for part in ("--x", text)]


def test_ports_of_two_listeners_must_not_meet() -> None:
    _check_ports(["A://h:9092", "B://h:9095", "C://h:0", "D://h:0"], 3)
    with pytest.raises(InvalidConfigError, match="at least 3 apart"):
        _check_ports(["A://h:9092", "B://h:9094"], 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shared": True}, "--shared"),
        ({"host": "0.0.0.0", "insecure": True}, "--advertise"),
        ({"security": ACLS}, "--inter-broker-listener"),
    ],
)
def test_a_broker_that_cannot_join_does_not_start(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    settings = ClusterSettings(registry=str(tmp_path / "cluster"), node_id=1)
    with (
        pytest.raises(InvalidConfigError, match=text),
        netshim.serve(tmp_path / "1", cluster=settings, **options),
    ):
        pass
    assert not (tmp_path / "cluster.registry").exists()


@pytest.mark.long
def test_a_cluster_without_security_reads_no_users_until_a_quota_is_set(
    tmp_path: Path,
) -> None:
    settings = ClusterSettings(registry=str(tmp_path / "cluster"), node_id=1)
    with netshim.serve(tmp_path / "1", cluster=settings) as server_thread:
        security = server_thread.server.security
        assert not security.has_store
        with open_registry(tmp_path / "cluster", topics="truth") as registry:
            assert registry.children("/security") == []
        store = SecurityStore(tmp_path / "cluster")
        store.set_quotas(("alice", None, None), {"producer_byte_rate": 1e6})
        store.close()
        until(lambda: security.snapshot.quotas, "the broker has read the quota")
        assert security.snapshot.brokers is None
