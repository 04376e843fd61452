"""Disk faults: clients of a broker whose real files fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

import logcore
from logcore import InvalidConfigError, StorageWriteError
from logcore.testing import Fault, FaultPlan, SimulatedDisk
from logcore.testing.faults import Slow
from netshim.testing import Kafka


@pytest.mark.long
def test_producer_on_a_full_disk_delivers_after_space_is_freed(kafka: Kafka) -> None:
    kafka.create_topic("orders")
    kafka.append("orders", b"1 pear")
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap_servers, "enable.idempotence": True}
    )
    with kafka.faults() as faults:
        rule = faults.disk("pwrite", "ENOSPC", path="*/orders-0/*.log")
        producer.produce("orders", b"4 apples")
        rule.wait(timeout=60)
        assert [record.value for record in kafka.records("orders")] == [b"1 pear"]
    assert producer.flush(60) == 0
    assert [record.value for record in kafka.records("orders")] == [
        b"1 pear",
        b"4 apples",
    ]


def test_disk_fault_on_other_files_fails_nothing(kafka: Kafka) -> None:
    kafka.create_topic("orders")
    with kafka.faults() as faults:
        rule = faults.disk("pwrite", "EIO", path="*/others-0/*")
        kafka.append("orders", b"4 apples")
        assert rule.hits == 0
        with pytest.raises(AssertionError, match="expected 1 failed calls"):
            rule.wait(timeout=0)


@pytest.mark.parametrize(
    ("operation", "error", "text"),
    [
        ("pwrit", "EIO", "pwrite"),
        ("map", "EIO", "pwrite"),
        ("pwrite", "EFULL", "errno"),
    ],
)
def test_disk_fault_with_an_unknown_name_is_refused(
    kafka: Kafka, operation: str, error: str, text: str
) -> None:
    with kafka.faults() as faults, pytest.raises(InvalidConfigError, match=text):
        faults.disk(operation, error)


def test_slow_disk_delays_an_append(kafka: Kafka) -> None:
    kafka.create_topic("orders")
    with kafka.faults() as faults:
        rule = faults.disk("pwrite", delay_ms=300, path="*/orders-0/*.log", times=1)
        began = time.monotonic()
        kafka.append("orders", b"4 apples")
        assert time.monotonic() - began >= 0.3
        assert rule.hits == 1
    assert [record.value for record in kafka.records("orders")] == [b"4 apples"]


@pytest.mark.parametrize(
    "options",
    [{}, {"error": "EIO", "delay_ms": 5}, {"delay_ms": -1}, {"delay_ms": "5"}],
)
def test_disk_fault_is_an_error_or_a_delay(
    kafka: Kafka, options: dict[str, Any]
) -> None:
    with kafka.faults() as faults, pytest.raises(InvalidConfigError):
        faults.disk("pwrite", **options)


def test_simulated_disk_is_never_slow() -> None:
    disk = SimulatedDisk(faults=FaultPlan(Fault("*", Slow(5))))
    with pytest.raises(InvalidConfigError, match="clock does not run"):
        logcore.open("log-0", create=True, fs=disk)


def test_disk_fault_of_one_broker_leaves_the_files_of_others(
    kafka_factory: Callable[..., Kafka],
) -> None:
    faulty = kafka_factory()
    healthy = kafka_factory()
    for kafka in (faulty, healthy):
        kafka.create_topic("orders")
    with faulty.faults() as faults:
        rule = faults.disk("pwrite", "EIO", path="*/orders-0/*.log")
        healthy.append("orders", b"4 apples")
        assert rule.hits == 0
        with pytest.raises(StorageWriteError):
            faulty.append("orders", b"4 apples")
        assert rule.hits >= 1
