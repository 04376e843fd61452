"""Kafka's own tools and clients use a cluster with TLS, users, rules and quotas.

Each change is sent to one broker, and tested at another one. Needs Java 17 or later with
Maven.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from netshim.follow.connection import LoginError
from support import kafka_jvm
from support.cluster_load import FAST_RETRIES, Load, check_load, check_replica_files
from support.clusters import until
from support.secured_clusters import ADMIN, ALICE, SecuredCluster, netshim, password_of
from support.zookeepers import ZooKeeper

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

ACLS = "org.apache.kafka.tools.AclCommand"
CONFIGS = "kafka.admin.ConfigCommand"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with SecuredCluster(tmp_path_factory.mktemp("secured") / "cluster") as cluster:
        cluster.add_users(ADMIN, ALICE)
        yield cluster


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[SecuredCluster]:
    """Start a cluster whose brokers the test may stop."""
    with SecuredCluster(tmp_path / "cluster") as cluster:
        cluster.add_users(ADMIN, ALICE)
        yield cluster


def properties(cluster: SecuredCluster, user: str) -> str:
    """Write the settings of Java's clients for a user, and return the file."""
    file = cluster.path / f"{user}.properties"
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    file.write_text(
        "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\n"
        f"ssl.truststore.type=PEM\nssl.truststore.location={cluster.ca_file}\n"
        f'sasl.jaas.config={module} required username="{user}" '
        f'password="{password_of(user)}";\n'
    )
    return str(file)


def tool(cluster: SecuredCluster, number: int, program: str, *arguments: str) -> str:
    """Run a tool of Kafka as the administrator, against one broker."""
    return kafka_jvm.run_tool(
        program,
        "--bootstrap-server",
        f"127.0.0.1:{cluster.ports[number]}",
        "--command-config",
        properties(cluster, ADMIN),
        *arguments,
    )


def test_rules_of_kafka_acls_reach_all_brokers(secured: SecuredCluster) -> None:
    rule = ("--allow-principal", "User:carol", "--producer", "--topic", "shared")
    tool(secured, 1, ACLS, "--add", *rule)
    for number in (1, 2, 3):
        listed = tool(secured, number, ACLS, "--list")
        assert "principal=User:carol" in listed and "operation=WRITE" in listed
    tool(secured, 2, ACLS, "--remove", "--force", *rule)
    assert "User:carol" not in tool(secured, 3, ACLS, "--list")


def test_users_and_quotas_of_kafka_configs_reach_all_brokers(
    secured: SecuredCluster,
) -> None:
    user = ("--entity-type", "users", "--entity-name", "dora")
    password = f"SCRAM-SHA-512=[password={password_of('dora')}]"
    tool(secured, 2, CONFIGS, *user, "--alter", "--add-config", password)
    tool(secured, 3, CONFIGS, *user, "--alter", "--add-config", "producer_byte_rate=9")
    described = tool(secured, 1, CONFIGS, *user, "--describe")
    assert "SCRAM-SHA-512=iterations=" in described
    assert "producer_byte_rate=9.0" in described
    for number in (1, 2, 3):
        secured.connect(number, secured.settings_of("dora")).close()
    tool(secured, 1, CONFIGS, *user, "--alter", "--delete-config", "SCRAM-SHA-512")
    for number in (1, 2, 3):

        def is_refused(number: int = number) -> bool:
            try:
                secured.connect(number, secured.settings_of("dora")).close()
            except LoginError:
                return True
            return False

        until(is_refused, "the deleted user is refused")


def test_java_clients_use_the_rules_of_each_broker(
    secured: SecuredCluster, tmp_path: Path
) -> None:
    secured.create("java", 3)
    for index in range(3):
        secured.until_in_sync("java", 3, index)
    for arguments in (
        ("--producer", "--topic", "java"),
        ("--consumer", "--topic", "java", "--group", "java"),
    ):
        tool(secured, 3, ACLS, "--add", "--allow-principal", "User:alice", *arguments)
    load = Load(secured, "java", **secured.config_of(ALICE))
    load.until_more(100)
    output = kafka_jvm.run_tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "--bootstrap-server", secured.bootstrap_servers,
        "--consumer.config", properties(secured, ALICE), "--topic", "java",
        "--group", "java", "--from-beginning", "--max-messages", "100",
    )  # fmt: skip
    assert len(output.split()) == 100
    check_load(secured, "java", load)


def test_other_tools_of_kafka_log_in(secured: SecuredCluster) -> None:
    secured.create("tools")
    secured.until_in_sync("tools", 3)
    topics = "org.apache.kafka.tools.TopicCommand"
    described = tool(secured, 1, topics, "--describe", "--topic", "tools")
    assert "Isr: " in described
    elect = "org.apache.kafka.tools.LeaderElectionCommand"
    output = kafka_jvm.run_tool(
        elect, "--bootstrap-server", f"127.0.0.1:{secured.ports[2]}",
        "--admin.config", properties(secured, ADMIN),
        "--election-type", "preferred", "--all-topic-partitions",
    )  # fmt: skip
    assert "Error" not in output


# -- failures --------------------------------------------------------------------------


def test_group_continues_while_leaders_and_coordinators_are_killed(
    own_cluster: SecuredCluster,
) -> None:
    """A user with rules for one topic and one group, over SCRAM and TLS."""
    own_cluster.create("t", 3)
    for name in ("--producer", "--consumer"):
        group = ("--group", "readers") if name == "--consumer" else ()
        netshim(
            "acl", "add", own_cluster.path, "User:alice", name, "--topic", "t", *group
        )
    config = own_cluster.config_of(ALICE)
    load = Load(own_cluster, "t", **config)
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": own_cluster.bootstrap_servers,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 10_000,
            **config,
            **{
                name: value
                for name, value in FAST_RETRIES.items()
                if "message" not in name
            },
        }
    )
    consumer.subscribe(["t"])
    consumed: set[int] = set()

    def read_more(count: int) -> None:
        before = len(consumed)
        end_s = time.monotonic() + 120
        while len(consumed) < before + count:
            assert time.monotonic() < end_s, "no more records within two minutes"
            message: Any = consumer.poll(1)
            if message is None:
                continue
            error = message.error()
            if error is None:
                consumed.add(int(message.value()))
            elif consumed:  # before, the rules may not have reached all brokers
                denied_code = confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED
                assert error.code() != denied_code, error

    read_more(100)
    for number in (1, 2, 3):
        own_cluster.kill(number)
        load.until_more(100)
        read_more(100)
        own_cluster.start(number)
        for index in range(3):
            own_cluster.until_in_sync("t", 3, index)
    load.pause()
    consumer.close()
    check_load(own_cluster, "t", load)
    check_replica_files(own_cluster, "t")


def test_user_that_is_deleted_while_a_broker_is_stopped_is_refused(
    own_cluster: SecuredCluster,
) -> None:
    """The broker registers again after its session has expired. The deleted user must
    not log in at that broker.
    """
    own_cluster.create("t", 3)
    own_cluster.send(3, signal.SIGSTOP)
    netshim("user", "remove", own_cluster.path, ALICE)
    until(
        lambda: (
            3
            not in {
                own_cluster.partition("t", number, 1).leader_id for number in range(3)
            }
        ),
        "the stopped broker is replaced",
    )
    own_cluster.send(3, signal.SIGCONT)

    def is_refused() -> bool:
        try:
            own_cluster.connect(3, own_cluster.settings_of(ALICE)).close()
        except LoginError:
            return True
        return False

    until(is_refused, "the deleted user is refused")
    for index in range(3):
        own_cluster.until_in_sync("t", 3, index)


def test_brokers_with_zookeeper_log_in_to_each_other(tmp_path: Path) -> None:
    """A user is added later, and a leader is killed under load."""
    pytest.importorskip("kazoo")
    with ZooKeeper(tmp_path / "zookeeper") as zookeeper:
        zookeeper.await_start()
        registry = f"zk://{zookeeper.server}/cluster"
        with SecuredCluster(tmp_path / "cluster", registry=registry) as cluster:
            cluster.add_users(ADMIN)
            cluster.create("t")
            leader = cluster.until_in_sync("t", 3).leader_id
            load = Load(cluster, "t")
            load.until_more()
            cluster.kill(leader)
            load.until_more()
            cluster.start(leader)
            cluster.until_in_sync("t", 3)
            cluster.add_users(ALICE)
            check_load(cluster, "t", load)
            check_replica_files(cluster, "t")
