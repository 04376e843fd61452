"""How do one netshim broker and one Apache Kafka broker compare, for the same client?

Method: confluent-kafka, once with netshim and once with Apache Kafka 4.1.1 from Maven
as Kafka's own scripts start it, each in a process of its own, in turns; Kafka has
served for some seconds before. Needs Java and Maven.
- 1,000 records of 100 bytes a second for 60 s in all, acks=all, with a concurrent
  consumer: the time from produce() to the delivery report, the time from produce() to
  the return of poll(), and the processor time of the broker. netshim runs with
  durability="os", which does not sync, like Kafka, and with "group", which syncs.
- As fast as the client sends and reads, records of 1,000 and of 100 bytes, not
  compressed: rate, and the broker's processor time for each GB. The client is near its
  limit in each of these rows.
- A copy of a topic by netshim follow, compared with a consumer of the same topic.
- Transactions of one record each of Kafka's Java producer, one after the other: from
  begin to commit, and requests.
- With TLS and SCRAM-SHA-256: a connection with its login, until it is closed, and
  records of 1,000 bytes as fast as the client sends them. netshim also enforces access
  control lists and quotas here, and Kafka has none. The clients' costs of SCRAM are
  computed once and not in the measured time.
- Access control lists and quotas without TLS, beside netshim without security.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import common
from brokers import (
    TURNS,
    Served,
    consume,
    cost_row,
    latency,
    netshim,
    paced,
    produce,
    throughput,
)
from common import Result, Settings

import logcore
from netshim import wire
from netshim.follow import Follower, Source

sys.path.insert(0, str(common.ROOT / "tests"))

#: Time until the JVM has compiled the paths of its broker. After 2 s, one record took it
#: 100 ms. Our broker needs none of it.
_WARM_SECONDS: Final = 20
_KAFKA_OPTIONS: Final = ("-Xmx1g", "-XX:+UseG1GC")
#: Targets by durability: of p50, p99 and p99.9.
_LATENCY: Final = {"os": (0.9, 0.9, 0.7), "group": (1.5, 1.0, 1.0)}
#: Target of the p50 to the consumer with `os`.
_END_TO_END: Final = 0.6
#: Targets of the rate, and of the processor time for each GB.
_RATES: Final = {"produce": (1.2, 0.3), "consume": (1.2, 0.5)}


def run(settings: Settings) -> Iterator[Result]:
    if (
        common.peer("confluent_kafka", "confluent-kafka") is None
        or shutil.which("java") is None
    ):
        return
    with common.scratch(settings, "kafka") as path, contextlib.ExitStack() as stack:
        theirs = stack.enter_context(_kafka(path / "theirs"))
        ours = stack.enter_context(netshim(path / "os", "os"))
        grouped = stack.enter_context(netshim(path / "group", "group"))
        for rates, warm_seconds in ((theirs, _WARM_SECONDS), (ours, 2), (grouped, 2)):
            latency(rates, "warm", warm_seconds)
        seconds = 3 if settings.quick else 20
        yield from _latencies([ours, grouped, theirs], seconds)
        yield from _small_transactions(ours, theirs, 200 if settings.quick else 1_000)
        size = (64 if settings.quick else 512) << 20
        for value_bytes in (1_000, 100):
            part = size if value_bytes == 1_000 else size // 4
            yield from throughput(ours, [theirs], value_bytes, part, _RATES)
            if value_bytes == 1_000:
                yield _follow(theirs, "fast-1000-0", size // 1_000, path)
    with common.scratch(settings, "kafka") as path, contextlib.ExitStack() as stack:
        theirs = stack.enter_context(_secured_kafka(path / "theirs"))
        ours = stack.enter_context(_secured_netshim(path / "tls", "SASL_SSL"))
        yield from _connections(ours, theirs, 20 if settings.quick else 200)
        yield _secured_produce(ours, theirs, size, 0.6, "over TLS")
    with common.scratch(settings, "kafka") as path, contextlib.ExitStack() as stack:
        plain = stack.enter_context(netshim(path / "plain", "os"))
        ours = stack.enter_context(_secured_netshim(path / "acls", "SASL_PLAINTEXT"))
        yield _secured_produce(ours, plain, size, 1.05, "rules and quotas")


@contextlib.contextmanager
def _kafka(folder: Path) -> Iterator[Served]:
    from support.kafka_jvm import Broker

    folder.mkdir()
    with Broker(folder, _KAFKA_OPTIONS) as broker:
        yield Served("Apache Kafka", broker.address, broker.process.pid)


# -- at 1,000 records a second ---------------------------------------------------------


def _latencies(brokers: list[Served], seconds: float) -> Iterator[Result]:
    latencies, cpu = paced(brokers, seconds)
    theirs = brokers[-1].name
    for broker in brokers[:-1]:
        targets = dict(zip(("p50", "p99", "p99.9"), _LATENCY[broker.name], strict=True))
        for (what, name), figures in latencies.items():
            question = f"1,000 records a second, {broker.name}, {what}, {name}"
            target = targets[name]
            if broker.name == "os" and (what, name) == ("end to end", "p50"):
                target = _END_TO_END
            yield cost_row(question, "us", 1e6, figures, broker.name, theirs, target)
    for ours, target in zip(brokers[:-1], (0.5, 1.2), strict=True):
        question = f"1,000 records a second, {ours.name}, CPU of the broker for each"
        yield cost_row(question, "us", 1e6, cpu, ours.name, theirs, target)


# -- transactions ----------------------------------------------------------------------


def _small_transactions(ours: Served, theirs: Served, count: int) -> Iterator[Result]:
    from support.kafka_jvm import measure_small_transactions

    p50: dict[str, list[float]] = {}
    requests: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for rates in (ours, theirs):
            found = measure_small_transactions(
                rates.address, f"small-{turn}", count // 2, count
            )
            p50.setdefault(rates.name, []).append(found["p50"])
            requests.setdefault(rates.name, []).append(found["requests"])
    names = ours.name, theirs.name
    yield cost_row(
        "transaction of 1 record from the Java client, p50", "us", 1, p50, *names, 0.5
    )
    yield cost_row(
        "transaction of 1 record from the Java client, requests",
        "requests",
        1,
        requests,
        *names,
        1.02,
    )


# -- maximum rate ----------------------------------------------------------------------


def _follow(theirs: Served, topic: str, count: int, path: Path) -> Result:
    """Copy a topic into a directory, beside a consumer that drops the records."""
    seconds: dict[str, list[float]] = {"follow": [], "consume": []}
    for turn in range(TURNS):
        seconds["consume"].append(consume(theirs, topic, count)[0])
        with (
            logcore.open_dir(
                path / f"copy-{turn}", create=True, durability="os"
            ) as copy,
            Source(theirs.address) as source,
        ):
            began = time.perf_counter()
            Follower(copy, source, topics=[topic]).run(until_end=True)
            seconds["follow"].append(time.perf_counter() - began)
    best = {name: min(times) for name, times in seconds.items()}
    return Result(
        question="netshim follow, from Apache Kafka, 1,000 bytes a record",
        unit="MB/s",
        ours=count / best["follow"] / 1e3,
        peer_name="confluent-kafka that consumes",
        peer=count / best["consume"] / 1e3,
        ratio=best["consume"] / best["follow"],
        turns=common.ratios(seconds["consume"], seconds["follow"]),
        target=1.0,
        method="The copy is stored, the consumed records are dropped; the best of turns.",
    )


# -- with security ---------------------------------------------------------------------


@contextlib.contextmanager
def _secured_netshim(path: Path, protocol: str) -> Iterator[Served]:
    """Start netshim with logins, access control lists and quotas."""
    from support.secured_process import secured_process

    path.mkdir()
    with secured_process(path / "data", protocol, "--durability", "os") as broker:
        config = broker.client_config()
        address = config.pop("bootstrap.servers")
        yield Served("netshim", address, broker.process.pid, config)


@contextlib.contextmanager
def _secured_kafka(folder: Path) -> Iterator[Served]:
    """Start Apache Kafka with TLS and SCRAM-SHA-256, and create a user."""
    import trustme
    from confluent_kafka.admin import (
        AdminClient,
        ScramCredentialInfo,
        ScramMechanism,
        UserScramCredentialUpsertion,
    )
    from cryptography.hazmat.primitives import serialization

    from support.kafka_jvm import Broker, free_port
    from support.secured_process import PASSWORD, USER

    folder.mkdir()
    authority = trustme.CA()
    ca_file = folder / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    key = serialization.load_pem_private_key(
        certificate.private_key_pem.bytes(), password=None
    ).private_bytes(  # Kafka accepts only this form
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    keystore = folder / "broker.pem"
    chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
    keystore.write_bytes(key + chain)
    port = free_port()
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    settings = {
        "listeners": "PLAINTEXT://{address},CONTROLLER://{controller},"
        f"SECURED://127.0.0.1:{port}",
        "advertised.listeners": f"PLAINTEXT://{{address}},SECURED://localhost:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,"
        "CONTROLLER:PLAINTEXT,SECURED:SASL_SSL",
        "inter.broker.listener.name": "PLAINTEXT",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256",
        "listener.name.secured.scram-sha-256.sasl.jaas.config": login,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": keystore,
    }
    with Broker(folder / "kafka", _KAFKA_OPTIONS, settings) as broker:
        admin = AdminClient({"bootstrap.servers": broker.address})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4_096)
        user = UserScramCredentialUpsertion(USER, info, PASSWORD.encode())
        for done in admin.alter_user_scram_credentials([user]).values():
            done.result(60)
        config = {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(ca_file),
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }
        address = f"localhost:{port}"
        yield Served("Apache Kafka", address, broker.process.pid, config)


class _Login:
    """Opens TLS connections to a broker, and authenticates with SCRAM-SHA-256."""

    def __init__(self, served: Served) -> None:
        self.port = int(served.address.rpartition(":")[2])
        self.context = ssl.create_default_context(
            cafile=served.settings["ssl.ca.location"]
        )
        self.user = served.settings["sasl.username"]
        self.password = served.settings["sasl.password"]
        #: The salted passwords, by salt and iterations.
        self.salted: dict[tuple[bytes, int], bytes] = {}

    def connect(self) -> None:
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        with self.context.wrap_socket(raw, server_hostname="localhost") as sock:
            _ask(sock, wire.SASL_HANDSHAKE, mechanism="SCRAM-SHA-256")
            bare = f"n={self.user},r={os.urandom(12).hex()}"
            server = self._token(sock, f"n,,{bare}")
            parts = dict(address.split("=", 1) for address in server.split(","))
            final = f"c=biws,r={parts['r']}"
            signed = f"{bare},{server},{final}".encode()
            salted = self._salted(base64.b64decode(parts["s"]), int(parts["i"]))
            key = hmac.digest(salted, b"Client Key", "sha256")
            stored = hashlib.sha256(key).digest()
            signature = hmac.digest(stored, signed, "sha256")
            proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
            self._token(sock, f"{final},p={base64.b64encode(proof).decode()}")

    def _salted(self, salt: bytes, iterations: int) -> bytes:
        found = self.salted.get((salt, iterations))
        if found is None:
            password = self.password.encode()
            found = hashlib.pbkdf2_hmac("sha256", password, salt, iterations)
            self.salted[salt, iterations] = found
        return found

    def _token(self, sock: ssl.SSLSocket, token: str) -> str:
        response = _ask(sock, wire.SASL_AUTHENTICATE, auth_bytes=token.encode())
        assert not response.error_code, response
        return bytes(response.auth_bytes).decode()


def _ask(sock: ssl.SSLSocket, api: wire.Api[Any, Any], **fields: Any) -> Any:
    sock.sendall(wire.encode_request(api, 1, 1, "b", api.Request(**fields)))
    answer = b""
    while len(answer) < 4 or len(answer) < 4 + int.from_bytes(answer[:4], "big"):
        answer += sock.recv(4_096)
    return wire.decode_response(api, 1, answer[4:])[1]


def _connections(ours: Served, theirs: Served, count: int) -> Iterator[Result]:
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    logins = {rates.name: _Login(rates) for rates in (ours, theirs)}
    for login in logins.values():
        for _ in range(count * 5):  # Kafka compiles its code
            login.connect()
    for _ in range(TURNS):
        for rates in (ours, theirs):
            before = rates.cpu_seconds()
            began = time.perf_counter()
            for _ in range(count):
                logins[rates.name].connect()
            taken = time.perf_counter() - began
            seconds.setdefault(rates.name, []).append(taken / count)
            cpu.setdefault(rates.name, []).append(
                (rates.cpu_seconds() - before) / count
            )
    names = ours.name, theirs.name
    name = "TLS connection with a SCRAM login"
    yield cost_row(name, "ms", 1e3, seconds, *names, 1.0)
    yield cost_row(f"{name}, CPU of the broker", "ms", 1e3, cpu, *names, 1.0)


def _secured_produce(
    ours: Served, other: Served, size_bytes: int, target: float, name: str
) -> Result:
    """Compare the processor time of two brokers for the same records."""
    count = size_bytes // 1_000
    cpu: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for rates in (ours, other):
            _, taken = produce(rates, f"secured-{turn}", b"x" * 1_000, count)
            cpu.setdefault(rates.name, []).append(taken / size_bytes * 1e9)
    question = f"produce, 1,000 bytes a record, {name}, CPU of the broker for each GB"
    return cost_row(question, "s", 1, cpu, ours.name, other.name, target)
