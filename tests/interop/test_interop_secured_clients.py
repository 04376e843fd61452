"""Six clients of Kafka and every way to authenticate over TLS.

The table is CLIENTS x METHODS. In each cell the client creates a topic, writes records,
and reads them as a member of a group. Only alice may do so. The test therefore also
checks that the broker identifies the user of the client.

Needs Java 17 or later with Maven, Go, and kcat (or apt-get to download it).
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiokafka
import attrs
import confluent_kafka
import kafka as kafka_python
import pytest
import trustme
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AiokafkaTopic
from confluent_kafka.admin import AdminClient, NewTopic
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from kafka.admin import KafkaAdminClient
from kafka.admin import NewTopic as KafkaPythonTopic

import netshim
from netshim.secured_testing import SecuredKafka, start_secured
from netshim.security.principals import MappingRules
from netshim.security.sasl import MECHANISMS
from support import debian, golang, kafka_jvm
from support.kafka_python import tls_context
from support.tokens import TokenIssuer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

MUTUAL_TLS: Final = "mutual TLS"
METHODS: Final = (*MECHANISMS, MUTUAL_TLS)
VALUES: Final = ["0", "1", "2"]
_TIMEOUT_S: Final = 120


class ClientError(Exception):
    """A client could not connect. The text is the error text of the client."""


@attrs.frozen
class Login:
    """How a user authenticates, for any client."""

    address: str
    ca_file: Path
    #: A SASL mechanism, or None for a client certificate.
    mechanism: str | None
    user: str
    password: str
    token: str
    #: PEM file with a certificate and its key.
    certificate: Path
    topic: str
    #: A folder for files of the client.
    folder: Path

    @property
    def protocol(self) -> str:
        return "SSL" if self.mechanism is None else "SASL_SSL"

    @property
    def group(self) -> str:
        return f"readers-of-{self.topic}"

    def librdkafka(self) -> dict[str, str]:
        """Return settings of librdkafka, except for the token of OAUTHBEARER."""
        settings = {
            "bootstrap.servers": self.address,
            "security.protocol": self.protocol,
            "ssl.ca.location": str(self.ca_file),
        }
        if self.mechanism is None:
            settings["ssl.certificate.location"] = str(self.certificate)
            settings["ssl.key.location"] = str(self.certificate)
        else:
            settings["sasl.mechanism"] = self.mechanism
        if self.mechanism not in (None, "OAUTHBEARER"):
            settings["sasl.username"] = self.user
            settings["sasl.password"] = self.password
        return settings

    def tls_context(self) -> ssl.SSLContext:
        context = tls_context(str(self.ca_file))
        if self.mechanism is None:
            context.load_cert_chain(self.certificate)
        return context

    def python(self, provider: type[Any]) -> dict[str, Any]:
        """Return settings that kafka-python and aiokafka share."""
        settings: dict[str, Any] = {
            "bootstrap_servers": self.address,
            "security_protocol": self.protocol,
            "ssl_context": self.tls_context(),
        }
        if self.mechanism == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = provider(self.token)
        elif self.mechanism is not None:
            settings["sasl_plain_username"] = self.user
            settings["sasl_plain_password"] = self.password
        if self.mechanism is not None:
            settings["sasl_mechanism"] = self.mechanism
        return settings

    def java(self) -> dict[str, str]:
        settings = {
            "bootstrap.servers": self.address,
            "security.protocol": self.protocol,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca_file),
        }
        if self.mechanism is None:
            settings["ssl.keystore.type"] = "PEM"
            settings["ssl.keystore.location"] = str(self._pkcs8())
            return settings
        package = "org.apache.kafka.common.security"
        settings["sasl.mechanism"] = self.mechanism
        if self.mechanism == "OAUTHBEARER":
            token_file = self.folder / "token.jwt"
            token_file.write_text(self.token)
            settings["sasl.jaas.config"] = (
                f"{package}.oauthbearer.OAuthBearerLoginModule required;"
            )
            settings["sasl.login.callback.handler.class"] = (
                f"{package}.oauthbearer.OAuthBearerLoginCallbackHandler"
            )
            settings["sasl.oauthbearer.jwt.retriever.class"] = (
                f"{package}.oauthbearer.FileJwtRetriever"
            )
            settings["sasl.oauthbearer.token.endpoint.url"] = token_file.as_uri()
            return settings
        module = "plain.Plain" if self.mechanism == "PLAIN" else "scram.Scram"
        settings["sasl.jaas.config"] = (
            f"{package}.{module}LoginModule required "
            f'username="{self.user}" password="{self.password}";'
        )
        return settings

    def _pkcs8(self) -> Path:
        """Write the certificate with its key in PKCS 8, the only form that Java reads."""
        pem = self.certificate.read_bytes()
        key = serialization.load_pem_private_key(pem, None)
        data = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        for certificate in x509.load_pem_x509_certificates(pem):
            data += certificate.public_bytes(serialization.Encoding.PEM)
        path = self.folder / "keystore.pem"
        path.touch(mode=0o600)
        path.write_bytes(data)
        return path


# -- clients, which write VALUES to a topic and return the values that they read ------


def confluent(login: Login) -> list[str]:
    settings: dict[str, Any] = login.librdkafka()
    errors: list[Any] = []
    settings["error_cb"] = errors.append
    if login.mechanism == "OAUTHBEARER":
        expires_s = time.time() + 300
        settings["oauth_cb"] = lambda _: (login.token, expires_s)
    return exchange_by_confluent(settings, login.topic, login.group, errors)


def exchange_by_confluent(
    settings: dict[str, Any], topic: str, group: str, errors: list[Any]
) -> list[str]:
    """Create a topic, write and read with settings whose error_cb fills `errors`."""
    admin = AdminClient(settings)
    created = admin.create_topics([NewTopic(topic, 1)])[topic]
    while not created.done():
        admin.poll(0.1)
        for error in errors:
            if error.code() in (
                confluent_kafka.KafkaError._AUTHENTICATION,
                confluent_kafka.KafkaError._SSL,
            ):
                raise ClientError(error.str())
    created.result()
    producer = confluent_kafka.Producer(settings)
    for value in VALUES:
        producer.produce(topic, value)
    assert producer.flush(_TIMEOUT_S) == 0
    consumer = confluent_kafka.Consumer(
        {**settings, "group.id": group, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    values = []
    while len(values) < len(VALUES):
        message = consumer.poll(_TIMEOUT_S)
        assert message is not None and message.error() is None, message
        values.append(message.value().decode())
    consumer.close()
    return values


@contextmanager
def reported_by(package: str, error: type[Exception]) -> Iterator[None]:
    """Raise ClientError with the log lines of a client that does not raise the
    cause.
    """
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(package)
    logger.addHandler(handler)
    try:
        yield
    except error as raised:
        raise ClientError("\n".join([*lines, repr(raised)])) from raised
    finally:
        logger.removeHandler(handler)


class KafkaPythonToken(kafka_python.net.sasl.oauth.AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def token(self) -> str:
        return self._token


def python(login: Login) -> list[str]:
    settings = login.python(KafkaPythonToken)
    with reported_by("kafka", kafka_python.errors.KafkaError):
        admin = KafkaAdminClient(**settings, bootstrap_timeout_ms=10_000)
    admin.create_topics([KafkaPythonTopic(login.topic, 1, 1)])
    admin.close()
    producer = kafka_python.KafkaProducer(**settings)
    for value in VALUES:
        producer.send(login.topic, value.encode()).get(_TIMEOUT_S)
    producer.close()
    consumer = kafka_python.KafkaConsumer(
        login.topic, group_id=login.group, auto_offset_reset="earliest", **settings
    )
    values = [next(consumer).value.decode() for _ in VALUES]
    consumer.close()
    return values


class AiokafkaToken(aiokafka.abc.AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token


def aio(login: Login) -> list[str]:
    async def run() -> list[str]:
        settings = login.python(AiokafkaToken)
        admin = AIOKafkaAdminClient(**settings)
        with reported_by("aiokafka", aiokafka.errors.KafkaError):
            await admin.start()
        await admin.create_topics([AiokafkaTopic(login.topic, 1, 1)])
        await admin.close()
        async with aiokafka.AIOKafkaProducer(**settings) as producer:
            for value in VALUES:
                await producer.send_and_wait(login.topic, value.encode())
        async with aiokafka.AIOKafkaConsumer(
            login.topic,
            group_id=login.group,
            auto_offset_reset="earliest",
            **settings,
        ) as consumer:
            return [(await consumer.getone()).value.decode() for _ in VALUES]

    return asyncio.run(run())


def run_program(command: list[str], text: str = "") -> str:
    """Run a client, and return its output. Raises: ClientError: the program failed."""
    result = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if result.returncode:
        raise ClientError(result.stdout + result.stderr)
    return result.stdout


def java(login: Login) -> list[str]:
    return exchange_by_java(login, login.java())


def exchange_by_java(login: Login, settings: dict[str, str]) -> list[str]:
    file = login.folder / "client.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    # The client reads tokens only from sources that these options list.
    source = settings.get("sasl.oauthbearer.token.endpoint.url", "")
    option = "-Dorg.apache.kafka.sasl.oauthbearer.allowed"
    command = [
        "java",
        f"{option}.urls={source}",
        f"{option}.files={source}",
        "-cp",
        f"{kafka_jvm.kafka_jars()}/*",
        str(kafka_jvm.SOURCES / "SecuredClient.java"),
        str(file),
        login.topic,
        login.group,
    ]
    (line,) = run_program(command, f"{len(VALUES)}\n").splitlines()
    return line.removeprefix("read ").split()


def franz(login: Login) -> list[str]:
    file = login.folder / "client.json"
    settings = {
        "Address": login.address,
        "CAFile": str(login.ca_file),
        "Certificate": str(login.certificate) if login.mechanism is None else "",
        "Mechanism": login.mechanism or "",
        "User": login.user,
        "Password": login.password,
        "Token": login.token,
        "Topic": login.topic,
        "Group": login.group,
        "Values": VALUES,
    }
    file.write_text(json.dumps(settings))
    return run_program([str(golang.program("franz")), str(file)]).splitlines()


def kcat(login: Login) -> list[str]:
    """Run kcat, which has no admin API. The broker creates the topic on the first
    use.
    """
    command = [*debian.program("kcat", "kcat", "librdkafka1", "libyajl2")]
    for name, value in login.librdkafka().items():
        command += ["-X", f"{name}={value}"]
    run_program([*command, "-L", "-m", "10"])
    run_program([*command, "-P", "-t", login.topic], "\n".join(VALUES))
    read_options = ["-X", "auto.offset.reset=earliest", "-c", str(len(VALUES))]
    return run_program(
        [*command, *read_options, "-G", login.group, login.topic]
    ).split()


CLIENTS: Final[dict[str, Callable[[Login], list[str]]]] = {
    "confluent-kafka": confluent,
    "kafka-python": python,
    "aiokafka": aio,
    "java": java,
    "franz-go": franz,
    "kcat": kcat,
}
#: Debian's librdkafka has no callback for tokens that kcat could set.
COMBINATIONS: Final = [
    (client, method)
    for client in CLIENTS
    for method in METHODS
    if (client, method) != ("kcat", "OAUTHBEARER")
]


@pytest.fixture(scope="module")
def issuer() -> TokenIssuer:
    return TokenIssuer()


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, issuer: TokenIssuer
) -> Iterator[SecuredKafka]:
    """A broker where alice may use topics and groups, and others may do nothing."""
    folder = tmp_path_factory.mktemp("clients")
    jwks = folder / "jwks.json"
    jwks.write_text(issuer.jwks())
    kafka = start_broker(folder / "data", str(jwks), issuer.audience)
    yield kafka
    kafka.stop()


def start_broker(path: Path, jwks: str, audience: str) -> SecuredKafka:
    kafka = start_secured(
        path,
        listeners=["SASL_SSL://127.0.0.1:0", "SSL://127.0.0.1:0"],
        security=netshim.SecuritySettings(
            mechanisms=MECHANISMS,
            super_users=("User:admin",),
            enforces_acls=True,
            principal_mapping=MappingRules.parse("RULE:.*CN=([^,]*).*/$1/,DEFAULT"),
            oauth_jwks=jwks,
            oauth_audience=audience,
        ),
    )
    kafka.allow("alice", "create", "read", "write", topic="orders", prefixed=True)
    kafka.allow("alice", "read", group="readers", prefixed=True)
    kafka.add_user("alice", "correct")
    return kafka


@pytest.fixture
def login_by(
    broker: SecuredKafka, issuer: TokenIssuer, tmp_path: Path
) -> Callable[[str, str], Login]:
    """Return a function of (client, method) that returns alice's login."""

    def login(client: str, method: str) -> Login:
        return login_of(broker, issuer, tmp_path, client, method)

    return login


def login_of(
    broker: SecuredKafka, issuer: TokenIssuer, folder: Path, client: str, method: str
) -> Login:
    port = broker.server.server.listeners[method == MUTUAL_TLS].port
    return Login(
        address=f"localhost:{port}",
        ca_file=broker.ca_file,
        mechanism=None if method == MUTUAL_TLS else method,
        user="alice",
        password="correct",
        token=issuer.token(),
        certificate=broker.client_certificate("alice"),
        topic=f"orders-{client}-{method.replace(' ', '-')}",
        folder=folder,
    )


@pytest.mark.parametrize(("client", "method"), COMBINATIONS)
def test_client_writes_and_reads(
    broker: SecuredKafka,
    login_by: Callable[[str, str], Login],
    client: str,
    method: str,
) -> None:
    login = login_by(client, method)
    assert CLIENTS[client](login) == VALUES
    stored = broker.wait_for(login.topic, len(VALUES))
    assert [(record.value or b"").decode() for record in stored] == VALUES


#: For each client, parts of its error texts for a wrong password and for an unknown
#: authority.
ERRORS: Final = {
    "confluent-kafka": ("Authentication failed", "certificate verify failed"),
    "kafka-python": ("SaslAuthenticationFailed", "certificate verify failed"),
    "aiokafka": ("AuthenticationFailed", "certificate verify failed"),
    "java": ("SaslAuthenticationException", "unable to find valid certification path"),
    "franz-go": ("SASL_AUTHENTICATION_FAILED", "signed by unknown authority"),
    "kcat": ("Authentication failed", "certificate verify failed"),
}
PASSWORD_CELLS: Final = [
    (client, method)
    for client, method in COMBINATIONS
    if method not in ("OAUTHBEARER", MUTUAL_TLS)
]


@pytest.mark.parametrize(("client", "method"), PASSWORD_CELLS)
def test_wrong_password_is_reported_by_the_client(
    login_by: Callable[[str, str], Login], client: str, method: str
) -> None:
    login = attrs.evolve(login_by(client, method), password="wrong")
    # kafka-python drops a response that it reads together with the end of the connection,
    # and the broker closes the connection after the response, like Kafka.
    attempts = 10 if client == "kafka-python" else 1
    texts = []
    while len(texts) < attempts and not any(
        ERRORS[client][0] in text for text in texts
    ):
        with pytest.raises(ClientError) as failure:
            CLIENTS[client](login)
        texts.append(str(failure.value))
    assert ERRORS[client][0] in texts[-1]


@pytest.mark.parametrize("client", CLIENTS)
def test_unknown_authority_is_reported_by_the_client(
    login_by: Callable[[str, str], Login], client: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    login = attrs.evolve(login_by(client, "PLAIN"), ca_file=other)
    with pytest.raises(ClientError) as failure:
        CLIENTS[client](login)
    assert ERRORS[client][1] in str(failure.value)


# kafka-python and aiokafka interpret the error message of the broker as the end of the
# exchange. They report the connection that the broker then closes.
@pytest.mark.parametrize("client", ["confluent-kafka", "java", "franz-go"])
def test_token_with_another_signature_is_reported_by_the_client(
    login_by: Callable[[str, str], Login], client: str
) -> None:
    login = attrs.evolve(login_by(client, "OAUTHBEARER"), token=TokenIssuer().token())
    with pytest.raises(ClientError, match="invalid_token"):
        CLIENTS[client](login)


# -- tokens and keys of an authorization server ----------------------------------------


def by_oidc(login: Login, url: str, ca_file: Path) -> list[str]:
    """Let librdkafka request its tokens."""
    errors: list[Any] = []
    settings = {
        **login.librdkafka(),
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "client",
        "sasl.oauthbearer.client.secret": "secret",
        "sasl.oauthbearer.token.endpoint.url": f"{url}/token",
        "https.ca.location": str(ca_file),
        "error_cb": errors.append,
    }
    return exchange_by_confluent(settings, login.topic, login.group, errors)


def by_java_retriever(login: Login, url: str, ca_file: Path) -> list[str]:
    """Let the Java client request its tokens."""
    settings = login.java()
    del settings["sasl.oauthbearer.jwt.retriever.class"]
    settings["sasl.oauthbearer.token.endpoint.url"] = f"{url}/token"
    settings["sasl.jaas.config"] = (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
        'clientId="client" clientSecret="secret" ssl.truststore.type="PEM" '
        f'ssl.truststore.location="{ca_file}";'
    )
    return exchange_by_java(login, settings)


@pytest.mark.parametrize("exchange", [by_oidc, by_java_retriever])
def test_client_and_broker_use_an_authorization_server(
    tmp_path: Path,
    broker: SecuredKafka,
    issuer: TokenIssuer,
    monkeypatch: pytest.MonkeyPatch,
    exchange: Callable[[Login, str, Path], list[str]],
) -> None:
    """The client requests its token, and the broker the keys, from one HTTPS server."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(broker.ca_file.parent / "broker.pem")
    # The broker trusts the authorities of the system. This file replaces them.
    monkeypatch.setenv("SSL_CERT_FILE", str(broker.ca_file))
    with issuer.serve(tls) as url:
        kafka = start_broker(tmp_path / "data", f"{url}/keys", issuer.audience)
        try:
            login = login_of(kafka, issuer, tmp_path, "oidc", "OAUTHBEARER")
            before = issuer.issued
            assert exchange(login, url, broker.ca_file) == VALUES
            assert issuer.issued > before
        finally:
            kafka.stop()
