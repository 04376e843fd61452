"""Listeners: options that are refused, certificates, and peers that break off."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import select
import signal
import socket
import ssl
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import netshim
from logcore import InvalidConfigError
from netshim import wire
from netshim.listeners import Listener, TlsSettings, check_exposure
from netshim.secured_testing import SecuredKafka, start_secured
from netshim.security.principals import CertificateError, MappingRules, subject_of
from netshim.security.stored import SecurityStore
from netshim.server import Server
from support.client import Client
from support.secured_process import secured_process


@pytest.mark.parametrize(
    "text",
    [
        "", "PLAINTEXT", "PLAINTEXT://", "PLAINTEXT://:9092", "PLAINTEXT://host",
        "PLAINTEXT://host:70000", "PLAINTEXT://host:9092/x", "://host:9092", "MINE://host:1",
    ],
)  # fmt: skip
def test_malformed_listener_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError):
        Listener.parse(text)


def test_listener_may_have_a_name_of_its_own() -> None:
    listener = Listener.parse("mine://[::1]:9093", protocol="sasl_ssl")
    assert (listener.name, listener.host, listener.port) == ("MINE", "::1", 9093)
    assert listener.uses_tls and listener.uses_sasl and listener.is_local


TLS = TlsSettings(cert="c", client_ca="ca", client="required")


@pytest.mark.parametrize(
    ("text", "tls", "mechanisms", "is_allowed"),
    [
        ("PLAINTEXT://127.0.0.1:1", None, ("PLAIN",), True),
        ("PLAINTEXT://localhost:1", None, (), True),
        ("PLAINTEXT://[::1]:1", None, (), True),
        ("PLAINTEXT://0.0.0.0:1", None, (), False),
        ("PLAINTEXT://example.com:1", None, (), False),
        ("SSL://0.0.0.0:1", TlsSettings(cert="c"), (), False),
        ("SSL://0.0.0.0:1", TLS, (), True),
        ("SASL_PLAINTEXT://0.0.0.0:1", None, ("SCRAM-SHA-256",), True),
        ("SASL_PLAINTEXT://0.0.0.0:1", None, ("PLAIN",), False),
        ("SASL_PLAINTEXT://0.0.0.0:1", None, ("SCRAM-SHA-256", "OAUTHBEARER"), False),
        ("SASL_SSL://0.0.0.0:1", TlsSettings(cert="c"), ("PLAIN",), True),
    ],
)
def test_listener_outside_of_loopback_needs_authentication(
    text: str, tls: TlsSettings | None, mechanisms: tuple[str, ...], is_allowed: bool
) -> None:
    listeners = [Listener.parse(text)]
    if is_allowed:
        check_exposure(listeners, tls, mechanisms)
        return
    with pytest.raises(InvalidConfigError, match="--insecure"):
        check_exposure(listeners, tls, mechanisms)


def test_server_refuses_a_public_address_unless_insecure(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="would accept anyone"):
        netshim.Server(tmp_path, host="0.0.0.0")
    netshim.Server(tmp_path, host="0.0.0.0", insecure=True)


def test_tls_listener_needs_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="--tls-cert"):
        netshim.Server(tmp_path, listeners=["SSL://127.0.0.1:0"])


def test_unusable_certificate_files_are_named(
    kafka_secured: SecuredKafka, tmp_path: Path
) -> None:
    folder = kafka_secured.ca_file.parent
    broker = str(folder / "broker.pem")
    other = str(kafka_secured.client_certificate("other"))
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    open_key = tmp_path / "open.pem"
    open_key.write_bytes(Path(broker).read_bytes())
    open_key.chmod(0o644)
    for cert, key, expected in (
        (str(tmp_path / "none.pem"), None, "none.pem"),
        (str(junk), None, "junk.pem"),
        (broker, other, "belong together"),
        (str(open_key), None, "chmod 600"),
    ):
        with pytest.raises(InvalidConfigError, match=expected):
            TlsSettings(cert=cert, key=key).context()


@pytest.fixture
def address(kafka_secured: SecuredKafka) -> tuple[str, int]:
    return "127.0.0.1", kafka_secured.port


def encrypted(kafka: SecuredKafka, **options: Any) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(kafka.ca_file))
    raw = socket.create_connection(("127.0.0.1", kafka.port), timeout=60)
    return context.wrap_socket(raw, server_hostname="localhost", **options)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except (ConnectionError, ssl.SSLError):
        return True


def served(kafka: SecuredKafka) -> bool:
    """Return whether a new client gets an answer."""
    with encrypted(kafka) as sock:
        request = wire.API_VERSIONS.Request()
        sock.sendall(wire.encode_request(wire.API_VERSIONS, 0, 1, "t", request))
        return len(sock.recv(8)) > 0


def test_plain_bytes_on_a_tls_port_close_the_connection(
    kafka_secured: SecuredKafka,
    address: tuple[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(20):
        with socket.create_connection(address, timeout=60) as sock:
            request = wire.API_VERSIONS.Request()
            sock.sendall(wire.encode_request(wire.API_VERSIONS, 0, 1, "t", request))
            assert is_closed(sock)
    lines = [record.getMessage() for record in caplog.records]
    failures = [line for line in lines if "no TLS connection" in line]
    assert len(failures) == 1 and "does not speak TLS" in failures[0]
    assert served(kafka_secured)


def test_tls_bytes_on_a_plain_port_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "netshim")
    with netshim.serve(tmp_path / "data") as server:
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        with pytest.raises((ssl.SSLError, ConnectionError, OSError)):
            ssl.create_default_context().wrap_socket(raw, server_hostname="localhost")
        raw.close()
    assert any("speaks TLS" in record.getMessage() for record in caplog.records)


def test_old_tls_is_refused(kafka_secured: SecuredKafka) -> None:
    context = ssl.create_default_context(cafile=str(kafka_secured.ca_file))
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    raw = socket.create_connection(("127.0.0.1", kafka_secured.port), timeout=60)
    with context.wrap_socket(raw, server_hostname="localhost") as sock:
        assert sock.version() == "TLSv1.2"


@pytest.mark.long
def test_half_open_handshakes_do_not_stop_others(
    kafka_secured: SecuredKafka, address: tuple[str, int]
) -> None:
    """At most 256 connections may be without authentication."""
    waiting = [socket.create_connection(address, timeout=60) for _ in range(200)]
    try:
        for sock in waiting[:100]:
            sock.sendall(b"\x16\x03\x01")
        assert served(kafka_secured)
        more = [socket.create_connection(address, timeout=60) for _ in range(100)]
        refused = 0
        deadline_s = time.monotonic() + 60
        while not refused and time.monotonic() < deadline_s:
            for sock in more:
                sock.settimeout(0.01)
                try:
                    refused += is_closed(sock)
                except TimeoutError:
                    continue
        assert refused
        for sock in more:
            sock.close()
    finally:
        for sock in waiting:
            sock.close()
    deadline_s = time.monotonic() + 60
    while True:
        try:
            assert served(kafka_secured)
            break
        except (ConnectionError, ssl.SSLError):
            assert time.monotonic() < deadline_s, "the connections were not released"


def test_idle_logins_without_tls_count_as_unauthenticated(tmp_path: Path) -> None:
    security = netshim.SecuritySettings(mechanisms=("PLAIN",))
    listeners = ["SASL_PLAINTEXT://127.0.0.1:0"]
    with netshim.serve(
        tmp_path / "data", listeners=listeners, security=security
    ) as server:
        address = "127.0.0.1", server.port
        opened = [socket.create_connection(address, timeout=60) for _ in range(257)]
        try:
            assert is_closed(opened[-1])
        finally:
            for sock in opened:
                sock.close()


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_an_address_cannot_take_all_login_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Another address gets up to half of the places, and no more."""
    monkeypatch.setattr("netshim.client_sockets._HANDSHAKE_S", 3_600.0)
    with contextlib.ExitStack() as stack:
        kafka = start_secured(
            tmp_path / "data", listeners=[f"{protocol}://127.0.0.1:0"]
        )
        stack.callback(kafka.stop)

        def connect(source: str, count: int) -> list[socket.socket]:
            return [
                stack.enter_context(
                    socket.create_connection(
                        ("127.0.0.1", kafka.port),
                        timeout=60,
                        source_address=(source, 0),
                    )
                )
                for _ in range(count)
            ]

        first = connect("127.0.0.1", 256)
        second = connect("127.0.0.2", 129)
        # The broker admits connections in their order.
        assert is_closed(second.pop())
        assert all(is_closed(sock) for sock in first[:128])
        rest = first[128:] + second
        assert not select.select(rest, [], [], 0)[0]


def test_stop_does_not_wait_for_a_client_that_does_not_read(
    kafka_secured: SecuredKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client never confirms the end of its TLS connection."""
    monkeypatch.setattr(Server.stop, "__defaults__", (3_600.0,))
    with encrypted(kafka_secured):
        kafka_secured.stop()


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
def test_connection_accepted_while_the_broker_stops_is_closed(
    tmp_path: Path, protocol: str
) -> None:
    """asyncio accepts a connection in one iteration of the event loop, and makes its
    transport in a later one. stop() closed the listener between them. The connection
    remained open, and its client waited, until the garbage collector reported an
    unclosed transport, or an unclosed socket with TLS.
    """
    trustme = pytest.importorskip("trustme")
    cert = tmp_path / "broker.pem"
    cert.touch(mode=0o600)
    issued = trustme.CA().issue_cert("localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(cert)

    async def connect_and_stop() -> None:
        server = Server(
            tmp_path / "data",
            listeners=[f"{protocol}://127.0.0.1:0"],
            tls=TlsSettings(cert=str(cert)),
        )
        await server.start()
        await asyncio.sleep(0)  # the TLS listener begins to wait for connections
        address = "127.0.0.1", server.port
        with socket.create_connection(address, timeout=10) as client:
            # In the next iteration, this function continues before the connection is
            # accepted, so the iteration after it begins with stop().
            await asyncio.sleep(0)
            await asyncio.create_task(server.stop())
            assert is_closed(client)

    with warnings.catch_warnings(record=True) as raised_warnings:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(connect_and_stop())
        gc.collect()
    assert [str(warning_message.message) for warning_message in raised_warnings] == []


def test_large_frame_before_authentication_closes_the_connection(
    kafka_secured: SecuredKafka,
) -> None:
    with encrypted(kafka_secured) as sock:
        sock.sendall((524_289).to_bytes(4, "big"))
        assert is_closed(sock)


def test_new_connections_use_a_renewed_certificate(
    kafka_secured: SecuredKafka,
) -> None:
    path = kafka_secured.ca_file.parent / "broker.pem"

    def shown() -> bytes:
        with encrypted(kafka_secured) as sock:
            certificate = sock.getpeercert(binary_form=True)
            assert certificate is not None
            return certificate

    before = shown()
    renewed = kafka_secured._authority.issue_cert("localhost", "127.0.0.1")
    renewed.private_key_and_cert_chain_pem.write_to_path(path)
    server = kafka_secured.server
    server.call(server.server.reload_certificates)
    after = shown()
    assert after != before
    path.write_text("junk")
    with pytest.raises(InvalidConfigError):
        server.call(server.server.reload_certificates)
    assert shown() == after


@pytest.mark.long
def test_signal_renews_the_certificate(tmp_path: Path) -> None:
    with secured_process(tmp_path / "data") as broker:

        def shown() -> bytes | None:
            client = broker.connect()
            try:
                return client.sock.getpeercert(binary_form=True)
            finally:
                client.close()

        before = shown()
        broker.renew_certificate()
        broker.process.send_signal(signal.SIGHUP)
        broker.wait_for_line("renewed")
        after = shown()
        assert after != before
        broker.cert_file.write_text("junk")
        broker.process.send_signal(signal.SIGHUP)
        broker.wait_for_line("the former certificate remains")
        assert shown() == after


@pytest.mark.parametrize(
    ("rules", "subject", "user"),
    [
        ("DEFAULT", "CN=a,O=b", "CN=a,O=b"),
        ("", "CN=a", "CN=a"),
        ("RULE:^CN=(.*?),O=b$/$1/", "CN=Alice,O=b", "Alice"),
        ("RULE:^CN=(.*?),O=b$/$1@b/L", "CN=Alice,O=b", "alice@b"),
        ("RULE:^CN=(.*?)$/$1/U,DEFAULT", "CN=alice", "ALICE"),
        ("RULE:^CN=x$/y/", "CN=alice", None),
        ("RULE:^CN=x$/y/,RULE:^CN=(.*)$/z-$1/", "CN=alice", "z-alice"),
    ],
)
def test_mapping_rules(rules: str, subject: str, user: str | None) -> None:
    assert MappingRules.parse(rules).user_of(subject) == user


@pytest.mark.parametrize(
    "rules", ["RULE:", "RULE:a/b", "RULE:(/b/", "RULE:a/$1/", "OTHER", "RULE:a/b/X"]
)
def test_malformed_mapping_rules_are_refused(rules: str) -> None:
    with pytest.raises(InvalidConfigError):
        MappingRules.parse(rules)


def test_subject_of_java_order_and_escapes() -> None:
    certificate = {
        "subject": (
            (("countryName", "DE"),),
            (("organizationName", "A, B"),),
            (("commonName", "alice"), ("userId", "1")),
        )
    }
    assert subject_of(certificate, bytes) == "CN=alice+UID=1,O=A\\, B,C=DE"


@pytest.mark.parametrize(
    "certificate",
    [
        {},
        {"subject": ()},
        {"subject": ((("commonName", "x" * 70_000),),)},
        {"subject": ((("commonName", b"\0bits"),),)},
    ],
)
def test_unusable_subject_is_refused(certificate: dict[str, Any]) -> None:
    with pytest.raises(CertificateError):
        subject_of(certificate, bytes)


def test_each_listener_advertises_its_own_address(tmp_path: Path) -> None:
    listeners = [
        Listener.parse("PLAINTEXT://127.0.0.1:0"),
        Listener.parse(
            "OUTER://127.0.0.1:0",
            protocol="PLAINTEXT",
            advertised=("broker.example.com", 9093),
        ),
    ]
    with netshim.serve(tmp_path / "data", listeners=listeners) as server:
        addresses = []
        for listener in server.server.listeners:
            client = Client(listener.port)
            request = wire.METADATA.Request(topics=[])
            (broker,) = client.ask(wire.METADATA, 5, request).brokers
            addresses.append((broker.host, broker.port))
            client.sock.close()
        first = server.server.listeners[0].port
    assert addresses == [("127.0.0.1", first), ("broker.example.com", 9093)]


@pytest.mark.long
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_connections_above_the_quota_of_an_address_are_closed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    loop: str,
) -> None:
    """Bytes that they send while they are held are ignored. On uvloop, they raised an
    error, which closed the connection at once.
    """
    if loop == "uvloop":
        monkeypatch.delitem(sys.modules, "uvloop")
        pytest.importorskip("uvloop")
    store = SecurityStore(tmp_path / "data")
    store.set_quotas((None, None, "127.0.0.1"), {"connection_creation_rate": 1})
    store.close()
    with netshim.serve(tmp_path / "data") as server:
        address = "127.0.0.1", server.port
        opened = [socket.create_connection(address, timeout=60) for _ in range(30)]
        try:
            for sock in opened[11:]:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(b"x" * 10_000)
            for sock in opened[11:]:
                assert is_closed(sock)
            assert "Fatal error" not in caplog.text
            request = wire.API_VERSIONS.Request()
            frame = wire.encode_request(wire.API_VERSIONS, 0, 1, "t", request)
            opened[0].sendall(frame)
            assert opened[0].recv(4)
        finally:
            for sock in opened:
                sock.close()
