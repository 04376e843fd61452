"""Load on a cluster by real clients, and checks of its records."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import logcore
from support.clusters import Cluster, until

confluent_kafka = pytest.importorskip("confluent_kafka")

#: Settings of a client that detects a new leader soon.
FAST_RETRIES = {
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 100,
    "reconnect.backoff.max.ms": 100,
    "topic.metadata.refresh.fast.interval.ms": 50,
    "message.timeout.ms": 120_000,
    "socket.timeout.ms": 10_000,
}


class Load:
    """A producer with acks=all that sends until end(), and its acknowledged records."""

    def __init__(
        self, cluster: Cluster, topic: str, *, padding: bytes = b"", **settings: Any
    ) -> None:
        self._topic = topic
        self._headers = [("padding", padding)] if padding else None
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                **cluster.client_config,
                **FAST_RETRIES,
                **settings,
            }
        )
        #: The partition and offset of each value. The offset is None if librdkafka
        #: concludes from the acknowledgement of a later batch that a batch is stored.
        self.acknowledged: dict[int, tuple[int, int | None]] = {}
        self.errors: list[Any] = []
        self._is_over = threading.Event()
        # A daemon thread, because a test that fails does not call end().
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            self.acknowledged[int(message.value())] = (
                message.partition(),
                message.offset(),
            )

    def _run(self) -> None:
        number = 0
        while not self._is_over.is_set():
            self._producer.produce(
                self._topic,
                str(number).encode(),
                headers=self._headers,
                on_delivery=self._delivered,
            )
            number += 1
            self._producer.poll(0)
            time.sleep(0.002)

    def until_more(self, count: int = 50) -> None:
        """Wait until `count` further records are acknowledged."""
        before = len(self.acknowledged)
        until(lambda: len(self.acknowledged) >= before + count, "more acknowledgements")

    def makes_progress(self) -> bool:
        """Return whether records are acknowledged within a second."""
        before = len(self.acknowledged)
        time.sleep(1)
        return len(self.acknowledged) > before

    def pause(self) -> None:
        """Send no more records. end() must still be called."""
        self._is_over.set()
        self._thread.join()

    def end(self) -> dict[int, tuple[int, int | None]]:
        self.pause()
        assert self._producer.flush(120) == 0
        assert not self.errors, self.errors[:3]
        del self._producer  # its metadata requests would create a deleted topic again
        return self.acknowledged


class OffsetLoad:
    """A client that commits increasing offsets, and another client that reads them.

    A read never returns less than a commit that was acknowledged before it began, or
    than another read that ended before it began (R13 of docs/replication.md).
    """

    def __init__(self, cluster: Cluster, topic: str = "t") -> None:
        self._topic = topic
        self._servers = cluster.bootstrap_servers
        self._is_over = threading.Event()
        #: The largest offset that is known to be committed.
        self._floor = -1
        self.commits = 0
        self.reads = 0
        self.broken: list[str] = []
        self._threads = [
            threading.Thread(target=call, daemon=True)
            for call in (self._commit, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def _client(self) -> Any:
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "offsets",
                "enable.auto.commit": False,
                "reconnect.backoff.max.ms": 100,
                "log_level": 0,
            }
        )

    def _commit(self) -> None:
        client = self._client()
        position = confluent_kafka.TopicPartition(self._topic, 0, 0)
        while not self._is_over.is_set():
            position.offset += 1
            try:
                client.commit(offsets=[position], asynchronous=False)
            except confluent_kafka.KafkaException:
                time.sleep(0.05)
            else:
                self._floor = max(self._floor, position.offset)
                self.commits += 1
        client.close()

    def _read(self) -> None:
        client = self._client()
        position = confluent_kafka.TopicPartition(self._topic, 0)
        while not self._is_over.is_set():
            floor = self._floor
            try:
                (found,) = client.committed([position], timeout=10)
            except confluent_kafka.KafkaException:
                time.sleep(0.05)
                continue
            offset = max(-1, found.offset)  # -1001 if the group has no offset
            if offset < floor:
                self.broken.append(f"read {offset} after {floor}")
            self._floor = max(self._floor, offset)
            self.reads += 1
        client.close()

    def makes_progress(self) -> bool:
        """Return whether offsets are committed within a second."""
        before = self.commits
        time.sleep(1)
        return self.commits > before

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        self.stop()
        assert not self.broken, self.broken[:5]


def read_all(cluster: Cluster, topic: str) -> dict[tuple[int, int], int]:
    """Read a topic to its end. Return the value at each (partition, offset)."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "check",
            **cluster.client_config,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    numbers = [
        partition.partition_index for partition in cluster.metadata(topic).partitions
    ]
    consumer.assign(
        [confluent_kafka.TopicPartition(topic, number, 0) for number in numbers]
    )
    found: dict[tuple[int, int], int] = {}
    ended: set[int] = set()
    while ended != set(numbers):
        message = consumer.poll(60)
        assert message is not None, "no message within a minute"
        if message.error() is None:
            found[message.partition(), message.offset()] = int(message.value())
        elif message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
            ended.add(message.partition())
    consumer.close()
    return found


def check_load(cluster: Cluster, topic: str, load: Load) -> None:
    """End a load, and check the records that were acknowledged."""
    check_records(cluster, topic, load.end())


def check_records(
    cluster: Cluster, topic: str, acknowledged: dict[int, tuple[int, int | None]]
) -> None:
    """Check that each acknowledged record is at its offset, and that no record is stored
    twice.
    """
    found = read_all(cluster, topic)
    positions: dict[int, list[tuple[int, int]]] = {}
    for position, value in found.items():
        positions.setdefault(value, []).append(position)
    lost = {
        value: (number, offset)
        for value, (number, offset) in acknowledged.items()
        if not any(
            position[0] == number and offset in (None, position[1])
            for position in positions.get(value, ())
        )
    }
    assert not lost, (
        f"{len(lost)} of {len(acknowledged)} are lost: {[*lost.items()][:5]}"
    )
    duplicates = {
        value: value_positions
        for value, value_positions in positions.items()
        if len(value_positions) > 1
    }
    assert not duplicates, (
        f"records are stored twice: {describe_batches(cluster, topic, duplicates)}"
    )


def describe_batches(
    cluster: Cluster, topic: str, positions: dict[int, list[tuple[int, int]]]
) -> dict[int, list[str]]:
    """Describe the batches of values that are stored twice, with their producer epochs."""
    found: dict[int, list[str]] = {}
    for value, value_positions in [*positions.items()][:5]:
        for number, offset in value_positions:
            batch = _batch_at(cluster, topic, number, offset)
            found.setdefault(value, []).append(f"{topic}-{number}: {batch}")
    return found


def _batch_at(cluster: Cluster, topic: str, number: int, offset: int) -> str:
    for broker in cluster.processes:
        folder = cluster.path / str(broker) / f"{topic}-{number}"
        if folder.exists():
            with logcore.open(folder, read_only=True) as log:
                batch = next(iter(log.batches(offset)))
                return (
                    f"offset {offset}, producer {batch.producer_id} in epoch"
                    f" {batch.producer_epoch}, sequences {batch.base_sequence} to"
                    f" {batch.last_sequence}"
                )
    return "no replica"


def check_replica_files(cluster: Cluster, topic: str, index: int = 0) -> None:
    """Stop the brokers, and check that replicas are equal up to the end of the shortest."""
    for number in cluster.processes:
        cluster.stop(number)
    folders = [cluster.path / str(n) / f"{topic}-{index}" for n in cluster.processes]
    logs = [
        b"".join(file.read_bytes() for file in sorted(folder.glob("*.log")))
        for folder in folders
        if folder.exists()
    ]
    shortest = min(map(len, logs))
    assert shortest > 0
    assert len({log[:shortest] for log in logs}) == 1, "the replicas differ"
