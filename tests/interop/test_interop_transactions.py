"""Transactions of other clients through the broker, and the output of Kafka's dump tool
for the records of the broker. Kafka's Java client uses the second version of the
transaction protocol, and kafka-python and aiokafka use the first. Needs Java 17 or
later and Maven for the Java part. Run by `make interop`.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

import netshim
from support import kafka_jvm
from support.kafka_jvm import Storage
from support.vectors import DATA

pytestmark = pytest.mark.interop


def committed(logdir: Any, topic: str) -> list[bytes | None]:
    return [
        record.value
        for number in logdir.partitions(topic)
        for record in logdir.partition(topic, number).read(
            0, isolation="read_committed"
        )
    ]


def test_transactions_of_java_clients_are_dumped_by_kafka(tmp_path: Path) -> None:
    source = DATA / "kafka" / "Transactions.java"
    with netshim.serve(tmp_path / "data") as server:
        command = [
            "java",
            "-cp",
            f"{kafka_jvm.kafka_jars()}/*",
            str(source),
            server.bootstrap_servers,
        ]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300
        )
        assert result.returncode == 0, result.stdout + result.stderr
        values = [f"turn {run}" for run in (0, 0, 2, 2, 4, 4)]
        assert result.stdout.splitlines() == [
            "feature 2",
            f"read [{', '.join(values)}]",
            "aborted null",
            "committed 8",
            "open Ongoing 2",
            "listed 1",
            "producer open true true",
            "fenced",
            "state Empty",
            "ends",
        ]
        assert (
            committed(server.logdir, "t")
            == [b"turn 0", b"turn 2", b"turn 4", b"last"] * 2
        )
    with Storage() as storage:
        (path,) = (tmp_path / "data" / "__transaction_state-0").glob("*.log")
        text = storage.dump(path, "--transaction-log-decoder")
    assert '"transactionalId":"one"' in text, text
    # Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort.
    for status in range(6):
        assert f'"transactionStatus":{status},' in text, text


def test_transaction_needs_as_many_requests_as_with_kafka(tmp_path: Path) -> None:
    """If the broker responds before its markers are written, the client must repeat its
    request.
    """
    with netshim.serve(tmp_path / "data") as server:
        own_count = kafka_jvm.measure_small_transactions(
            server.bootstrap_servers, "one", 20, 300
        )
    (tmp_path / "kafka").mkdir()
    with kafka_jvm.Broker(tmp_path / "kafka") as broker:
        kafka_count = kafka_jvm.measure_small_transactions(
            broker.address, "one", 20, 300
        )
    print(
        f"requests for a transaction: {own_count['requests']:.2f}, with Kafka {kafka_count['requests']:.2f}"
    )
    assert 2 <= own_count["requests"] <= kafka_count["requests"] + 0.05, (
        own_count,
        kafka_count,
    )


def test_transactions_of_kafka_python(tmp_path: Path) -> None:
    kafka = pytest.importorskip("kafka")
    with netshim.serve(tmp_path / "data") as server:
        server.logdir.create_topic("t")
        servers = server.bootstrap_servers
        producer = kafka.KafkaProducer(
            bootstrap_servers=servers, transactional_id="python"
        )
        producer.init_transactions()
        for run in range(4):
            producer.begin_transaction()
            producer.send("t", b"%d" % run, partition=0)
            producer.send_offsets_to_transaction(
                {kafka.TopicPartition("t", 0): kafka.OffsetAndMetadata(run, "", -1)},
                "g",
            )
            if run % 2:
                producer.flush()
                producer.abort_transaction()
            else:
                producer.commit_transaction()
        producer.close()
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=servers,
            group_id="g",
            isolation_level="read_committed",
            enable_auto_commit=False,
        )
        assert consumer.committed(kafka.TopicPartition("t", 0)) == 2
        consumer.close()
        assert committed(server.logdir, "t") == [b"0", b"2"]


def test_transactions_of_aiokafka(tmp_path: Path) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    partition = aiokafka.TopicPartition("t", 0)

    async def transact(servers: str) -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=servers, transactional_id="aio"
        )
        await producer.start()
        for run in range(4):
            await producer.begin_transaction()
            await producer.send_and_wait("t", b"%d" % run, partition=0)
            await producer.send_offsets_to_transaction({partition: run}, "g")
            if run % 2:
                await producer.abort_transaction()
            else:
                await producer.commit_transaction()
        await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=servers, group_id="g", enable_auto_commit=False
        )
        await consumer.start()
        assert await consumer.committed(partition) == 2
        await consumer.stop()

    with netshim.serve(tmp_path / "data") as server:
        server.logdir.create_topic("t")
        asyncio.run(transact(server.bootstrap_servers))
        assert committed(server.logdir, "t") == [b"0", b"2"]
