"""Access control, compared with Apache Kafka: a user without rules gets the same
responses.

Needs Java 17 or later and Maven. Run by `make interop`.
"""

from __future__ import annotations

import base64
import random
import socket
import ssl
import subprocess
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import netshim
from netshim.secured_testing import SecuredKafka
from netshim.security import scram
from netshim.security.acls import (
    Acl,
    AclIndex,
    AclOperation,
    Pattern,
    Permission,
    ResourceType,
)
from netshim.security.principals import subject_of
from netshim.security.stored import SecurityStore
from netshim.testing import start
from support import kafka_jvm
from support.client import Client
from support.conformance import report

pytestmark = pytest.mark.interop

_PASSWORD = "pw"
_LOGIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    f'username="admin" password="{_PASSWORD}" user_admin="{_PASSWORD}";'
)

#: (API, step or *) -> the reason why the response differs from the response of Kafka.
REASONS = {
    ("Produce", "magic 3"): "Kafka checks records before permissions",
    ("Fetch", "*"): "fetch sessions are declined",
    ("FindCoordinator", "of share groups"): "share groups are not served",
    ("AlterConfigs", "a topic twice"): "Kafka does not answer",
    ("ListPartitionReassignments", "*"): "Kafka repeats the requested topics",
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def admin_of(port: int) -> Client:
    client = Client(port)
    client.log_in("admin", _PASSWORD)
    return client


def ask_kafka(folder: Path) -> report.Answers:
    inner = free_port()
    settings = {
        "listeners": f"PLAINTEXT://{{address}},INNER://127.0.0.1:{inner},"
        "CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{{address}},INNER://127.0.0.1:{inner}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INNER:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT",
        "inter.broker.listener.name": "INNER",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.inner.plain.sasl.jaas.config": _LOGIN,
        "listener.name.controller.plain.sasl.jaas.config": _LOGIN,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:admin",
    }
    with kafka_jvm.Broker(folder, more=settings) as broker:
        port = int(broker.address.rpartition(":")[2])
        return report.ask_all(port, report.served(), lambda: admin_of(inner))


def ask_netshim(folder: Path) -> report.Answers:
    folder.mkdir()
    store = SecurityStore(folder / "data")
    mechanism = "SCRAM-SHA-256"
    salted = scram.salted_password(mechanism, _PASSWORD, b"s" * 24, 4_096)
    credential = scram.credential_of(mechanism, salted, b"s" * 24, 4_096)
    store.set_credentials("admin", {mechanism: credential})
    store.close()
    security = netshim.SecuritySettings(
        mechanisms=("PLAIN",), super_users=("User:admin",), enforces_acls=True
    )
    kafka = start(
        folder / "data",
        listeners=["PLAINTEXT://127.0.0.1:0", "SASL_PLAINTEXT://127.0.0.1:0"],
        security=security,
        **report.SETTINGS,
    )
    try:
        plain, inner = (listener.port for listener in kafka.server.server.listeners)
        return report.ask_all(plain, report.served(), lambda: admin_of(inner))
    finally:
        kafka.stop()


def test_user_without_rules_gets_the_responses_of_kafka(tmp_path: Path) -> None:
    kafka_responses = ask_kafka(tmp_path / "kafka")
    own_responses = ask_netshim(tmp_path / "netshim")
    differing = report.differences(own_responses, kafka_responses)
    unexplained = [
        row
        for row in differing
        if (row[0], row[2]) not in REASONS and (row[0], "*") not in REASONS
    ]
    assert unexplained == []


# -- classes of Kafka and of Java ------------------------------------------------------


def authorizer_decisions(lines: list[str]) -> list[str]:
    """Return the output of tests/data/kafka/Authorization.java for lines."""
    program = kafka_jvm.SOURCES / "Authorization.java"
    command = ["java", "-cp", f"{kafka_jvm.kafka_jars()}/*", str(program)]
    result = subprocess.run(
        command,
        input="".join(f"{line}\n" for line in lines).encode(),
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert not result.returncode, result.stderr.decode()[-2_000:]
    return result.stdout.decode().splitlines()


def test_decisions_equal_those_of_the_standard_authorizer() -> None:
    rng = random.Random(42)
    names = ("orders", "orders-eu", "ord", "o", "*", "other", "ordinary")
    resource_types = [
        ResourceType.TOPIC,
        ResourceType.GROUP,
        ResourceType.TRANSACTIONAL_ID,
    ]
    lines: list[str] = []
    own_decisions: list[bool] = []
    for _ in range(200):
        rules = [
            Acl(
                rng.choice(resource_types),
                rng.choice((Pattern.LITERAL, Pattern.PREFIXED)),
                rng.choice(names),
                rng.choice(("User:alice", "User:bob", "User:*")),
                rng.choice(("*", "10.0.0.1", "10.0.0.2")),
                rng.choice([operation for operation in AclOperation if operation > 1]),
                rng.choice((Permission.ALLOW, Permission.ALLOW, Permission.DENY)),
            )
            for _ in range(rng.randrange(50))
        ]
        rules = list(dict.fromkeys(rules))  # Kafka refuses a rule twice
        lines.append("clear")
        for rule in rules:
            lines.append(
                f"acl\t{rule.resource_type:d}\t{rule.pattern:d}\t{rule.name}\t"
                f"{rule.principal}\t{rule.host}\t{rule.operation:d}\t{rule.permission:d}"
            )
        index = AclIndex(rules, ["User:admin"])
        for _ in range(10):
            user = rng.choice(("User:alice", "User:bob", "User:eve", "User:admin"))
            host = rng.choice(("10.0.0.1", "10.0.0.3"))
            resource_type = rng.choice(resource_types)
            name = rng.choice(("orders", "orders-eu", "order", "x", "o"))
            operation = rng.choice(
                [operation for operation in AclOperation if operation > 2]
            )
            lines.append(
                f"ask\t{user}\t{host}\t{operation:d}\t{resource_type:d}\t{name}"
            )
            own_decisions.append(
                index.allows(user, host, operation, resource_type, name)
            )
            lines.append(f"some\t{user}\t{host}")
            own_decisions.append(index.allows_some_topic(user, host))
    kafka_decisions = [decision == "true" for decision in authorizer_decisions(lines)]
    assert len(kafka_decisions) == len(own_decisions) == 4_000
    assert kafka_decisions == own_decisions


def test_subjects_of_certificates_have_the_text_of_java() -> None:
    rng = random.Random(7)
    oids = [
        NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME, NameOID.ORGANIZATION_NAME,
        NameOID.LOCALITY_NAME, NameOID.STATE_OR_PROVINCE_NAME, NameOID.STREET_ADDRESS,
        NameOID.DOMAIN_COMPONENT, NameOID.USER_ID, NameOID.EMAIL_ADDRESS, NameOID.TITLE,
    ]  # fmt: skip
    texts = (
        "alice", "a,b", "a+b", 'a"b', "a\\b", "a<b>", "a;b", " a ", "#a", "a=b", "ä", "x y",
        "日本", "a  b",
    )  # fmt: skip
    key = ec.generate_private_key(ec.SECP256R1())
    lines = []
    own_texts = []
    for _ in range(200):
        attributes = []
        for _ in range(rng.randrange(1, 5)):
            chosen_oids = rng.sample(oids, rng.choice((1, 1, 1, 2)))
            attributes.append(
                x509.RelativeDistinguishedName(
                    # IA5String holds ASCII only.
                    x509.NameAttribute(
                        object_identifier,
                        rng.choice(
                            [
                                text
                                for text in texts
                                if text.isascii()
                                or object_identifier
                                not in (NameOID.DOMAIN_COMPONENT, NameOID.EMAIL_ADDRESS)
                            ]
                        ),
                    )
                    for object_identifier in chosen_oids
                )
            )
        name = x509.Name(attributes)
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now)
            .not_valid_after(now + timedelta(days=1))
            .sign(key, hashes.SHA256())
        )
        der = certificate.public_bytes(serialization.Encoding.DER)
        lines.append(f"subject\t{base64.b64encode(der).decode()}")
        # getpeercert() of ssl, for a certificate that no connection has presented.
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:
            file.write(certificate.public_bytes(serialization.Encoding.PEM))
            file.flush()
            decoded = ssl._ssl._test_decode_cert(file.name)  # type: ignore[attr-defined]
        own_texts.append(subject_of(decoded, lambda der=der: der))  # type: ignore[misc]
    assert own_texts == authorizer_decisions(lines)


# -- Kafka's command-line tools -----------------------------------------------------


@pytest.fixture
def secured(kafka_secured: SecuredKafka, tmp_path: Path) -> tuple[SecuredKafka, Path]:
    """Return a secured broker, and the settings of its administrator for Java."""
    file = tmp_path / "admin.properties"
    config = kafka_secured.client_config("admin", "java")
    file.write_text("".join(f"{name}={value}\n" for name, value in config.items()))
    return kafka_secured, file


def test_kafka_acls_manages_rules(secured: tuple[SecuredKafka, Path]) -> None:
    kafka, file = secured
    options = (
        "--bootstrap-server", kafka.bootstrap_servers, "--command-config", str(file),
    )  # fmt: skip
    program = "org.apache.kafka.tools.AclCommand"
    rule = ("--allow-principal", "User:carol", "--producer", "--topic", "orders")
    kafka_jvm.run_tool(program, *options, "--add", *rule)
    listed = kafka_jvm.run_tool(program, *options, "--list")
    assert "principal=User:carol" in listed and "operation=WRITE" in listed
    kafka_jvm.run_tool(program, *options, "--remove", "--force", *rule)
    assert "User:carol" not in kafka_jvm.run_tool(program, *options, "--list")


def test_kafka_configs_manages_users_and_quotas(
    secured: tuple[SecuredKafka, Path],
) -> None:
    kafka, file = secured
    options = (
        "--bootstrap-server", kafka.bootstrap_servers, "--command-config", str(file),
        "--entity-type", "users", "--entity-name", "carol",
    )  # fmt: skip
    program = "kafka.admin.ConfigCommand"
    for change in (
        "SCRAM-SHA-256=[iterations=8192,password=pw]",
        "producer_byte_rate=1000000",
    ):
        kafka_jvm.run_tool(program, *options, "--alter", "--add-config", change)
    described = kafka_jvm.run_tool(program, *options, "--describe")
    assert "SCRAM-SHA-256=iterations=8192" in described
    assert "producer_byte_rate=1000000.0" in described
    config = kafka.client_config("admin")
    config.update({"sasl.username": "carol", "sasl.password": "pw"})
    topics = AdminClient(config).list_topics(timeout=30).topics
    assert topics == {}, "a user without rules sees no topic"


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_java_clients_log_in(
    secured: tuple[SecuredKafka, Path], tmp_path: Path, mechanism: Any
) -> None:
    kafka, _ = secured
    kafka.create_topic("orders")
    kafka.allow("alice", "write", "read", topic="orders")
    kafka.allow("alice", "read", group="readers")
    file = tmp_path / "alice.properties"
    config = kafka.client_config("alice", "java", mechanism)
    file.write_text("".join(f"{name}={value}\n" for name, value in config.items()))
    kafka.logdir.append("orders", b"4 apples")
    output = kafka_jvm.run_tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "--bootstrap-server", kafka.bootstrap_servers,
        "--consumer.config", str(file), "--topic", "orders", "--group", "readers",
        "--from-beginning", "--max-messages", "1",
    )  # fmt: skip
    assert output.strip() == "4 apples"
