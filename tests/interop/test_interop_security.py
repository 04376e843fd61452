"""Access control beside Apache Kafka: a user without rules gets the same answers.

Needs Java 17 or later and Maven. Run by `make interop`.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import netshim
from netshim.security import scram
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

#: (API, step or *) -> why the answer differs from Kafka's.
REASONS = {
    ("Produce", "magic 3"): "Kafka checks records before permissions",
    ("Fetch", "*"): "fetch sessions are declined",
    ("FindCoordinator", "of share groups"): "share groups are not served",
    ("AlterConfigs", "a topic twice"): "Kafka does not answer",
    ("ListPartitionReassignments", "*"): "Kafka repeats the requested topics",
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


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
        plain, inner = (one.port for one in kafka.server.server.listeners)
        return report.ask_all(plain, report.served(), lambda: admin_of(inner))
    finally:
        kafka.stop()


def test_user_without_rules_gets_kafkas_answers(tmp_path: Path) -> None:
    theirs = ask_kafka(tmp_path / "kafka")
    ours = ask_netshim(tmp_path / "ours")
    found = report.differences(ours, theirs)
    unexplained = [
        one
        for one in found
        if (one[0], one[2]) not in REASONS and (one[0], "*") not in REASONS
    ]
    assert unexplained == []
