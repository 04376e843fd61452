"""Transactions of foreign clients through the broker, and Kafka's dump tool on what the
broker wrote of them.

Clients: Kafka's Java client, by the second transaction protocol; kafka-python and
aiokafka, by the first. Needs Java 17 or later and Maven for the Java part. Run by `make
interop`.
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


def test_kafkas_java_clients_and_tools(tmp_path: Path) -> None:
    source = DATA / "kafka" / "Transactions.java"
    with netshim.serve(tmp_path / "data") as server:
        command = [
            "java",
            "-cp",
            f"{kafka_jvm.classes()}/*",
            str(source),
            server.bootstrap_servers,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        values = [f"turn {turn}" for turn in (0, 0, 2, 2, 4, 4)]
        assert done.stdout.splitlines() == [
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


def test_a_transaction_takes_as_many_requests_as_with_kafka(tmp_path: Path) -> None:
    """A broker that answers too early, that its markers are still on their way, makes
    the client ask again.
    """
    with netshim.serve(tmp_path / "data") as server:
        ours = kafka_jvm.small_transactions(server.bootstrap_servers, "one", 20, 300)
    (tmp_path / "kafka").mkdir()
    with kafka_jvm.Broker(tmp_path / "kafka") as broker:
        theirs = kafka_jvm.small_transactions(broker.address, "one", 20, 300)
    print(
        f"requests for a transaction: {ours['requests']:.2f}, with Kafka {theirs['requests']:.2f}"
    )
    assert 2 <= ours["requests"] <= theirs["requests"] + 0.05, (ours, theirs)


def test_kafka_python(tmp_path: Path) -> None:
    kafka = pytest.importorskip("kafka")
    with netshim.serve(tmp_path / "data") as server:
        server.logdir.create_topic("t")
        servers = server.bootstrap_servers
        producer = kafka.KafkaProducer(
            bootstrap_servers=servers, transactional_id="python"
        )
        producer.init_transactions()
        for turn in range(4):
            producer.begin_transaction()
            producer.send("t", b"%d" % turn, partition=0)
            producer.send_offsets_to_transaction(
                {kafka.TopicPartition("t", 0): kafka.OffsetAndMetadata(turn, "", -1)},
                "g",
            )
            if turn % 2:
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


def test_aiokafka(tmp_path: Path) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    partition = aiokafka.TopicPartition("t", 0)

    async def work(servers: str) -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=servers, transactional_id="aio"
        )
        await producer.start()
        for turn in range(4):
            await producer.begin_transaction()
            await producer.send_and_wait("t", b"%d" % turn, partition=0)
            await producer.send_offsets_to_transaction({partition: turn}, "g")
            if turn % 2:
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
        asyncio.run(work(server.bootstrap_servers))
        assert committed(server.logdir, "t") == [b"0", b"2"]
