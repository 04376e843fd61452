"""Tests that Forwarder, Mirror and Spark's reader connect to a cluster with TLS and users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import logcore
from logcore.shipping import Forwarder, KafkaCluster, Mirror
from netshim.secured_testing import SecuredKafka
from pyspark_logcore.brokers import BrokerOrigin
from pyspark_logcore.options import parse_read


def client_of(kafka: SecuredKafka, user: str) -> dict[str, Any]:
    config = kafka.client_config(user)
    del config["bootstrap.servers"]
    return config


def test_forwarder_ships_to_a_secured_cluster(
    kafka_secured: SecuredKafka, tmp_path: Path
) -> None:
    kafka_secured.create_topic("orders")
    kafka_secured.allow("edge", "write", "describe", "read", topic="orders")
    kafka_secured.allow("edge", "write", "describe", transactional_id="*")
    kafka_secured.allow("edge", "read", "describe", group="*")
    kafka_secured.allow("edge", "describe", "describe_configs", cluster=True)
    with logcore.open_dir(tmp_path / "edge", create=True) as edge:
        edge.create_topic("orders")
        edge.append("orders", b"4 apples")
        cluster = KafkaCluster(
            kafka_secured.bootstrap_servers, client_of(kafka_secured, "edge")
        )
        with cluster, Forwarder(edge, cluster, topics=["orders"]) as forwarder:
            forwarder.run(until_end=True)
    assert [record.value for record in kafka_secured.wait_for("orders", 1)] == [
        b"4 apples"
    ]


def test_mirror_copies_from_a_secured_cluster(
    kafka_secured: SecuredKafka, tmp_path: Path
) -> None:
    kafka_secured.create_topic("orders")
    kafka_secured.logdir.append("orders", b"4 apples")
    kafka_secured.allow("backup", "read", "describe", topic="orders")
    kafka_secured.allow("backup", "read", "describe", group="*")
    with logcore.open_dir(tmp_path / "copy", create=True) as copy:
        cluster = KafkaCluster(
            kafka_secured.bootstrap_servers, client_of(kafka_secured, "backup")
        )
        with cluster, Mirror(copy, cluster, topics=["orders"]) as mirror:
            mirror.run(until_end=True)
        assert [record.value for record in copy.topic("orders").read()] == [b"4 apples"]


def test_spark_reads_through_a_secured_broker(kafka_secured: SecuredKafka) -> None:
    kafka_secured.create_topic("orders")
    kafka_secured.logdir.append("orders", b"4 apples")
    kafka_secured.allow("spark", "read", "describe", topic="orders")
    config = kafka_secured.client_config("spark")
    options = {
        "kafka.bootstrap.servers": config["bootstrap.servers"],
        "kafka.security.protocol": config["security.protocol"],
        "kafka.ssl.ca.location": config["ssl.ca.location"],
        "kafka.sasl.mechanism": config["sasl.mechanism"],
        "kafka.sasl.username": config["sasl.username"],
        "kafka.sasl.password": config["sasl.password"],
        "subscribe": "orders",
    }
    with BrokerOrigin(parse_read(options)) as origin:
        assert list(origin.topics()) == ["orders"]
        assert origin.partitions("orders") == (0,)
