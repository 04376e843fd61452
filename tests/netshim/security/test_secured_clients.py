"""Other people's clients connect to a broker with TLS, users and rules."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka
import kafka as kafka_python
import pytest
from confluent_kafka.admin import AclBinding, AclBindingFilter, AdminClient, NewTopic
from confluent_kafka.admin import AclOperation as Op
from confluent_kafka.admin import AclPermissionType as Permits
from confluent_kafka.admin import ResourcePatternType as Shape
from confluent_kafka.admin import ResourceType as Kind

import netshim
from netshim.listeners import TlsSettings
from netshim.secured_testing import SecuredKafka
from netshim.security.principals import MappingRules

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture
def orders(kafka_secured: SecuredKafka) -> SecuredKafka:
    kafka_secured.create_topic("orders")
    kafka_secured.allow("alice", "write", "read", topic="orders")
    kafka_secured.allow("alice", "read", group="readers")
    return kafka_secured


def produce(config: dict[str, Any], topic: str, value: bytes) -> Any:
    """Return the error of a delivery, or None."""
    errors: list[Any] = []
    producer = confluent_kafka.Producer(config)
    producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    producer.flush(30)
    return errors[0]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_confluent_kafka_logs_in(orders: SecuredKafka, mechanism: Any) -> None:
    config = orders.client_config("alice", mechanism=mechanism)
    assert produce(config, "orders", b"4 apples") is None
    (record,) = orders.wait_for("orders", 1)
    assert record.value == b"4 apples"


@pytest.mark.long
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafka_python_logs_in(orders: SecuredKafka, mechanism: Any) -> None:
    settings = orders.client_config("alice", "kafka-python", mechanism)
    producer = kafka_python.KafkaProducer(**settings)
    producer.send("orders", b"4 apples").get(30)
    producer.close()
    assert [record.value for record in orders.wait_for("orders", 1)] == [b"4 apples"]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_aiokafka_logs_in(orders: SecuredKafka, mechanism: Any) -> None:
    settings = orders.client_config("alice", "aiokafka", mechanism)

    async def send() -> None:
        async with aiokafka.AIOKafkaProducer(**settings) as producer:
            await producer.send_and_wait("orders", b"4 apples")

    asyncio.run(send())
    assert [record.value for record in orders.wait_for("orders", 1)] == [b"4 apples"]


def test_consumer_needs_its_group(orders: SecuredKafka) -> None:
    orders.logdir.append("orders", b"4 apples")

    def first(group: str) -> Any:
        consumer = confluent_kafka.Consumer(
            {
                **orders.client_config("alice"),
                "group.id": group,
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe(["orders"])
        try:
            while True:
                message = consumer.poll(30)
                assert message is not None, "no record and no error came"
                return message.error() or message.value()
        finally:
            consumer.close()

    assert first("readers") == b"4 apples"
    error = first("others")
    assert error.code() == confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED


def test_topic_without_a_rule_is_refused(orders: SecuredKafka) -> None:
    config = orders.client_config("alice")
    error = produce(config, "invoices", b"x")
    assert error.code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert "invoices" not in orders.topics()


def test_deny_takes_effect_on_open_connections(orders: SecuredKafka) -> None:
    config = orders.client_config("alice")
    producer = confluent_kafka.Producer(config)
    errors: list[Any] = []

    def send() -> Any:
        producer.produce(
            "orders", b"x", on_delivery=lambda error, _: errors.append(error)
        )
        producer.flush(30)
        return errors[-1]

    assert send() is None
    orders.deny("alice", "write", topic="orders")
    assert send().code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.mark.long
@pytest.mark.parametrize("user", ["alice", "nobody"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_wrong_password_and_unknown_user_get_the_same_error(
    orders: SecuredKafka, user: str, mechanism: Any
) -> None:
    config = orders.client_config("alice", mechanism=mechanism)
    config.update({"sasl.username": user, "sasl.password": "guessed"})
    errors: list[str] = []
    producer = confluent_kafka.Producer(
        {**config, "error_cb": lambda error: errors.append(error.str())}
    )
    while not any("Authentication failed" in error for error in errors):
        producer.poll(0.1)
    (text,) = {error.rpartition(": ")[2].split(" (after")[0] for error in errors[:1]}
    assert text == f"Authentication failed with {mechanism}"


def test_admin_client_manages_rules(orders: SecuredKafka) -> None:
    admin = AdminClient(orders.client_config("admin"))
    rule = AclBinding(
        Kind.TOPIC, "ord", Shape.PREFIXED, "User:bob", "*", Op.READ, Permits.ALLOW
    )
    admin.create_acls([rule])[rule].result(30)
    rule_filter = AclBindingFilter(
        Kind.TOPIC, "orders", Shape.MATCH, "User:bob", None, Op.ANY, Permits.ANY
    )
    assert admin.describe_acls(rule_filter).result(30) == [rule]
    assert admin.delete_acls([rule_filter])[rule_filter].result(30) == [rule]
    assert admin.describe_acls(rule_filter).result(30) == []


def test_user_without_rules_cannot_manage_topics(orders: SecuredKafka) -> None:
    admin = AdminClient(orders.client_config("alice"))
    with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_AUTHORIZATION"):
        admin.create_topics([NewTopic("new", 1)])["new"].result(30)
    assert "new" not in orders.topics()


@pytest.mark.long
def test_client_certificate_names_the_user(
    kafka_secured: SecuredKafka, tmp_path: Path
) -> None:
    certificate = str(kafka_secured.client_certificate("alice"))
    tls = TlsSettings(
        cert=str(kafka_secured.ca_file.parent / "broker.pem"),
        client_ca=str(kafka_secured.ca_file),
        client="required",
    )
    options = {
        "listeners": ["SSL://127.0.0.1:0"],
        "tls": tls,
        "security": netshim.SecuritySettings(
            super_users=("User:alice",),
            enforces_acls=True,
            principal_mapping=MappingRules.parse("RULE:.*CN=([^,]*).*/$1/,DEFAULT"),
        ),
    }
    with netshim.serve(tmp_path / "data", **options) as server:
        config = {
            "bootstrap.servers": server.bootstrap_servers,
            "security.protocol": "SSL",
            "ssl.ca.location": str(kafka_secured.ca_file),
        }
        own = {
            "ssl.certificate.location": certificate,
            "ssl.key.location": certificate,
        }
        assert produce({**config, **own}, "orders", b"x") is None
        other = confluent_kafka.Producer({**config, "message.timeout.ms": 1_000})
        errors: list[Any] = []
        other.produce("orders", b"y", on_delivery=lambda error, _: errors.append(error))
        other.flush(30)
        assert errors[0] is not None, "a client without a certificate was served"


def test_commands_change_a_running_broker(
    kafka_secured: SecuredKafka, tmp_path: Path
) -> None:
    """Users and rules of the command line take effect without a restart."""
    password = tmp_path / "password"
    password.write_text("from a file\n")
    directory = str(kafka_secured.logdir.path)
    kafka_secured.create_topic("orders")
    for arguments in (
        ("user", "add", directory, "carol", "--password-file", str(password)),
        ("acl", "add", directory, "User:carol", "--producer", "--topic", "orders"),
    ):
        subprocess.run([sys.executable, "-m", "netshim", *arguments], check=True)
    config = kafka_secured.client_config("admin")
    config.update({"sasl.username": "carol", "sasl.password": "from a file"})
    deadline_s = time.monotonic() + 60
    while produce({**config, "message.timeout.ms": 5_000}, "orders", b"x") is not None:
        assert time.monotonic() < deadline_s, "the broker does not use the new user"
    assert [record.value for record in kafka_secured.wait_for("orders", 1)] == [b"x"]
