"""What do TLS, users, access control lists and quotas cost?

Method:
- access control lists: 10,000 rules of 100 users, half with literal names and half with
  prefixes. `fresh` asks each question once on a new index; `again` repeats one question.
- produce: the handler of the broker without sockets gets the same Produce request with
  16 records of 1 KB, in turns with and without rules and quotas. Policy os.
- first record: from the start of a broker to the delivery of a first record by
  confluent-kafka, as the fixtures kafka and kafka_secured start it. Certificates are
  created each time.
- connection: a client in the same process opens a TLS connection, authenticates with
  PLAIN and closes. Processor time of client and server together.

Not shown: several machines, and Apache Kafka, whose connections have not been measured.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import common
import confluent_kafka
from common import Result, Settings

import logcore
import netshim
from logcore import recordbatch
from netshim import wire
from netshim.broker import Broker
from netshim.secured_testing import start_secured
from netshim.security.acls import (
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.session import ClientSession
from netshim.testing import start

_RULES: Final = 10_000


def run(settings: Settings) -> Iterator[Result]:
    yield from decisions()
    with common.scratch(settings, "security") as path:
        yield produce(settings, path)
    with common.scratch(settings, "security") as path:
        yield first_record(settings, path)
    with common.scratch(settings, "security") as path:
        yield connection(settings, path)


def rules() -> list[Acl]:
    return [
        Acl(
            ResourceType.TOPIC,
            Pattern.PREFIXED if number % 2 else Pattern.LITERAL,
            f"topic-{number:05}" + "x" * (number % 7),
            f"User:user{number % 100}",
            "*",
            AclOperation.READ,
            Permission.ALLOW,
        )
        for number in range(_RULES)
    ]


def decisions() -> Iterator[Result]:
    index = AclIndex(rules())
    questions = [
        (
            f"User:user{number % 100}",
            "127.0.0.1",
            AclOperation.READ,
            ResourceType.TOPIC,
            f"topic-{number:05}-part",
        )
        for number in range(5_000)
    ]

    def ask_all() -> None:
        index._decisions.clear()
        for question in questions:
            index.allows(*question)

    def ask_again() -> None:
        question = questions[0]
        for _ in range(5_000):
            index.allows(*question)

    for name, side, limit_us in (("fresh", ask_all, 5), ("again", ask_again, 0.3)):
        took = common.measure({name: side}, 5)
        yield common.in_time(
            f"a decision by {_RULES:,} rules, {name}",
            "us",
            took[name] / len(questions) * 1e6,
            limit_us,
            "one AclIndex, 5,000 questions",
        )


def produce(settings: Settings, path: Path) -> Result:
    sides: dict[str, Callable[[], None]] = {}
    opened = []
    data = recordbatch.encode([(None, b"v" * 1_000)] * 16, base_offset=0)
    part = wire.PRODUCE.Request.Topic.Partition(index=0, records=data)
    topic = wire.PRODUCE.Request.Topic(name="t", partition_data=[part])
    request = wire.PRODUCE.Request(acks=1, timeout_ms=1_000, topic_data=[topic])
    frame = memoryview(wire.encode_request(wire.PRODUCE, 9, 1, "bench", request))[4:]

    def submit(work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        done(work())

    for name in ("plain", "limited"):
        logdir = logcore.open_dir(path / name, create=True, durability="os")
        logdir.create_topic("t")
        broker = Broker(logdir, netshim.Settings(), submit)
        opened.append(logdir)
        session = ClientSession("127.0.0.1", 9092, "127.0.0.1")
        if name == "limited":
            allow = Acl(
                ResourceType.TOPIC, Pattern.LITERAL, "t", "User:ANONYMOUS", "*",
                AclOperation.WRITE, Permission.ALLOW,
            )  # fmt: skip
            broker.state.security.acls = AclIndex([*rules(), allow])
            broker.state.security.quotas.set_bounds(
                {("ANONYMOUS", None, None): {"producer_byte_rate": 1e15}}
            )

        def side(broker: Broker = broker, session: ClientSession = session) -> None:
            for _ in range(200):
                broker.handle(session, frame, 1_000_000)

        sides[name] = side
    took = common.measure(sides, settings.repeats)
    for logdir in opened:
        logdir.close()
    return Result(
        question="16 records of 1 KB in a Produce request, rules and quotas",
        unit="us",
        ours=took["limited"] / 200 * 1e6,
        peer_name="us without",
        peer=took["plain"] / 200 * 1e6,
        ratio=took["limited"] / took["plain"],
        target=1.05,
        bound="at most",
        method="Broker.handle() without sockets",
        turns=took.ratios("limited", "plain"),
    )


def _deliver(config: dict[str, Any]) -> None:
    producer = confluent_kafka.Producer({**config, "linger.ms": 0})
    producer.produce("orders", b"4 apples")
    assert not producer.flush(30)


def first_record(settings: Settings, path: Path) -> Result:
    plain_ms = []
    secured_ms = []
    for number in range(settings.repeats):
        began = time.perf_counter()
        kafka = start(path / f"plain{number}")
        _deliver({"bootstrap.servers": kafka.bootstrap_servers})
        plain_ms.append((time.perf_counter() - began) * 1e3)
        kafka.stop()
        began = time.perf_counter()
        secured = start_secured(path / f"secured{number}")
        secured.allow("alice", "write", "create", topic="orders")
        _deliver(secured.client_config("alice"))
        secured_ms.append((time.perf_counter() - began) * 1e3)
        secured.stop()
    more_ms = sorted(b - a for a, b in zip(plain_ms, secured_ms, strict=True))
    return common.in_time(
        "start to first record, kafka_secured more than kafka",
        "ms",
        more_ms[len(more_ms) // 2],
        60,
        "median; certificates, a user and two rules are created each time",
    )


def connection(settings: Settings, path: Path) -> Result:
    kafka = start_secured(path / "data")
    password = kafka.add_user("alice", "secret")
    context = ssl.create_default_context(cafile=str(kafka.ca_file))
    handshake = wire.encode_request(
        wire.SASL_HANDSHAKE, 1, 1, "b", wire.SASL_HANDSHAKE.Request(mechanism="PLAIN")
    )
    token = f"\0alice\0{password}".encode()
    login = wire.encode_request(
        wire.SASL_AUTHENTICATE,
        1,
        2,
        "b",
        wire.SASL_AUTHENTICATE.Request(auth_bytes=token),
    )

    def connect() -> None:
        raw = socket.create_connection(("127.0.0.1", kafka.port), timeout=30)
        with context.wrap_socket(raw, server_hostname="localhost") as sock:
            for request in (handshake, login):
                sock.sendall(request)
                size = int.from_bytes(sock.recv(4), "big")
                while size > 0:
                    size -= len(sock.recv(size))

    connect()
    count = 20 if settings.quick else 200
    began = time.process_time()
    for _ in range(count):
        connect()
    took_ms = (time.process_time() - began) / count * 1e3
    kafka.stop()
    return common.in_time(
        "a TLS connection with a login, processor time of both ends",
        "ms",
        took_ms,
        3,
        f"{count} connections, one after the other",
    )
