"""Clients authenticate again on open connections, and no record is lost or repeated.

The broker's clock for lifetimes runs at a tenth of the real time. Therefore a client
that is late on a busy machine is not disconnected, and a test can require that all
connections remain open.

Needs Java 17 or later with Maven.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import pytest

import netshim
from logcore.fs import OS
from netshim import wire
from netshim.handlers.authentication import SaslAuthentication
from netshim.secured_testing import SecuredKafka, start_secured
from support import kafka_jvm
from support.tokens import TokenIssuer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

TOPIC: Final = "orders"
GROUP: Final = "readers"
LIFETIME_S: Final = 2
#: Number of times that a producer and a consumer authenticate again.
LIFETIMES: Final = 10
#: Number of records after which the counts are compared.
RECORDS: Final = 20
#: Writes and reads a number of records, and returns the values that it has read.
Exchange = Callable[[int], list[str]]


class SlowClock:
    """A clock whose time for waits and lifetimes runs at a tenth of the real time.

    `slows_tokens` also slows the wall clock, so that a token is valid for ten times its
    lifetime. librdkafka needs that, because it gets a new token only when the program
    polls.
    """

    def __init__(self, *, slows_tokens: bool) -> None:
        self._start_ms = OS.now_ms()
        self._slows_tokens = slows_tokens

    def now_ms(self) -> int:
        now_ms = OS.now_ms()
        if self._slows_tokens:
            return self._start_ms + (now_ms - self._start_ms) // 10
        return now_ms

    def now_s(self) -> float:
        return self.now_ms() / 1000

    def monotonic_ms(self) -> int:
        return OS.monotonic_ms() // 10


@pytest.fixture
def handshakes(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the SaslHandshake requests of each connection, by the number of the
    connection.
    """
    counts: Counter[int] = Counter()
    connection_numbers: dict[SaslAuthentication, int] = {}
    handle = SaslAuthentication.handle

    def count_handshake(
        authentication: SaslAuthentication, frame: memoryview, now_ms: int
    ) -> Any:
        if wire.decode_header(frame).api_key == wire.SASL_HANDSHAKE.key:
            counts[
                connection_numbers.setdefault(authentication, len(connection_numbers))
            ] += 1
        return handle(authentication, frame, now_ms)

    monkeypatch.setattr(SaslAuthentication, "handle", count_handshake)
    return counts


@contextmanager
def broker(
    folder: Path, issuer: TokenIssuer, reauth_ms: int, clock: SlowClock
) -> Iterator[SecuredKafka]:
    jwks = folder / "jwks.json"
    jwks.write_text(issuer.jwks())
    kafka = start_secured(
        folder / "data",
        clock=clock,
        security=netshim.SecuritySettings(
            mechanisms=("SCRAM-SHA-256", "OAUTHBEARER"),
            super_users=("User:admin",),
            enforces_acls=True,
            connections_max_reauth_ms=reauth_ms,
            oauth_jwks=str(jwks),
        ),
    )
    kafka.allow("alice", "create", "read", "write", topic=TOPIC)
    kafka.allow("alice", "read", group=GROUP)
    yield kafka
    kafka.stop()


# -- clients ---------------------------------------------------------------------------


@contextmanager
def librdkafka(
    kafka: SecuredKafka, issuer: TokenIssuer, mechanism: str, folder: Path
) -> Iterator[Exchange]:
    settings: dict[str, Any] = kafka.client_config("alice")
    if mechanism == "OAUTHBEARER":
        del settings["sasl.username"], settings["sasl.password"]
        settings["sasl.mechanism"] = mechanism
        settings["oauth_cb"] = lambda _: (
            issuer.token(),
            time.time() + issuer.lifetime_s,
        )
    kafka.create_topic(TOPIC)
    producer = confluent_kafka.Producer({**settings, "enable.idempotence": True})
    consumer = confluent_kafka.Consumer(
        {
            **settings,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
        }
    )
    consumer.subscribe([TOPIC])
    sent_count = 0

    def exchange(count: int) -> list[str]:
        nonlocal sent_count
        for _ in range(count):
            producer.produce(TOPIC, str(sent_count))
            sent_count += 1
        while producer.flush(1):
            pass
        values: list[str] = []
        while len(values) < count:
            message = consumer.poll(1)
            producer.poll(0)
            if message is not None:
                assert message.error() is None, message.error()
                values.append(message.value().decode())
        return values

    yield exchange
    consumer.close()


@contextmanager
def java(
    kafka: SecuredKafka, issuer: TokenIssuer, mechanism: str, folder: Path
) -> Iterator[Exchange]:
    settings = kafka.client_config("alice", "java")
    settings["fetch.max.wait.ms"] = "10"
    with issuer.serve() as url:
        if mechanism == "OAUTHBEARER":
            package = "org.apache.kafka.common.security.oauthbearer"
            settings |= {
                "sasl.mechanism": mechanism,
                "sasl.jaas.config": f"{package}.OAuthBearerLoginModule required "
                'clientId="client" clientSecret="secret";',
                "sasl.login.callback.handler.class": f"{package}.OAuthBearerLoginCallbackHandler",
                "sasl.oauthbearer.token.endpoint.url": f"{url}/token",
                "sasl.login.refresh.min.period.seconds": "0",
                "sasl.login.refresh.buffer.seconds": "0",
            }
        file = folder / "client.properties"
        file.write_text(
            "".join(f"{name}={value}\n" for name, value in settings.items())
        )
        with subprocess.Popen(
            [
                "java",
                f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={url}/token",
                "-cp",
                f"{kafka_jvm.kafka_jars()}/*",
                str(kafka_jvm.SOURCES / "SecuredClient.java"),
                str(file),
                TOPIC,
                GROUP,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None

            def exchange(count: int) -> list[str]:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(f"{count}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                assert line.startswith("read "), "the client ended with an error"
                return line.split()[1:]

            try:
                yield exchange
                process.stdin.close()
                assert process.wait(60) == 0
            finally:
                process.kill()


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "OAUTHBEARER"])
@pytest.mark.parametrize("client", [librdkafka, java])
def test_records_survive_reauthentication(
    tmp_path: Path,
    handshakes: Counter[int],
    client: Callable[..., Any],
    mechanism: str,
) -> None:
    """With OAUTHBEARER, tokens limit the lifetime. The broker sets no limit."""
    is_scram = mechanism == "SCRAM-SHA-256"
    # The Java client compares the times of its tokens with the real time.
    clock = SlowClock(slows_tokens=client is librdkafka)
    issuer = TokenIssuer(lifetime_s=LIFETIME_S, now_s=clock.now_s)
    reauth_ms = LIFETIME_S * 1_000 if is_scram else 0
    values: list[str] = []
    with (
        broker(tmp_path, issuer, reauth_ms, clock) as kafka,
        client(kafka, issuer, mechanism, tmp_path) as exchange,
    ):
        values += exchange(RECORDS)
        connections = set(handshakes)
        while sum(count > LIFETIMES for count in handshakes.values()) < 2:
            values += exchange(RECORDS)
            assert set(handshakes) == connections, "a client has connected again"
        assert values == [str(number) for number in range(len(values))]
        stored = kafka.wait_for(TOPIC, len(values))
        assert [(record.value or b"").decode() for record in stored] == values
