"""Clients of several languages use a cluster of three brokers while brokers are killed.

Each client is two programs:
- The producer sends each line of its input with acks=all, as an idempotent producer. It
  prints "acked VALUE" or "failed VALUE ERROR", and ends after the end of its input.
- The consumer reads the topic as a member of a group and commits every 200 ms. It prints
  "read PARTITION OFFSET VALUE", and runs until it is stopped.

kcat does not report single records. Its exit code is 0 if all records were
acknowledged. Needs Java 17 or later with Maven, Go, npm, and kcat (or apt-get to
download it).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from support import debian, golang, kafka_jvm, npm
from support.cluster_load import confluent_kafka, read_all
from support.clusters import Cluster, until
from support.environments import ROOT
from support.vectors import DATA

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

PARTITIONS: Final = 2
KAFKAJS: Final = "kafkajs@2.2.4"
#: Records between two failures.
_RECORDS: Final = 200
_LIMIT_S: Final = 120
CLIENTS: Final = ("kcat", "franz-go", "kafka-python", "aiokafka", "kafkajs", "java")


def command_of(client: str, role: str, address: str, topic: str) -> list[str]:
    """Return the command of a program."""
    group = group_of(topic)
    arguments = [role, address, topic, group]
    if client == "franz-go":
        return [str(golang.program("franz")), *arguments]
    if client == "java":
        program = str(kafka_jvm.SOURCES / "FailoverClient.java")
        return ["java", "-cp", f"{kafka_jvm.kafka_jars()}/*", program, *arguments]
    if client == "kafkajs":
        return ["node", str(DATA / "kafkajs_cluster" / "client.js"), *arguments]
    if client != "kcat":
        job = str(ROOT / "tests" / "support" / "failover_job.py")
        return [sys.executable, job, client, *arguments]
    # -E: an error that the client can retry does not end the program.
    command = [*debian.program("kcat", "kcat", "librdkafka1", "libyajl2"), "-E"]
    command += ["-b", address]
    settings = {"enable.idempotence": "true", "message.timeout.ms": "180000"}
    last = ["-P", "-t", topic]
    if role == "consume":
        settings = {"auto.offset.reset": "earliest", "auto.commit.interval.ms": "200"}
        last = ["-u", "-f", "read %p %o %s\n", "-G", group, topic]
    for name, value in settings.items():
        command += ["-X", f"{name}={value}"]
    return [*command, *last]


def group_of(topic: str) -> str:
    return f"readers-of-{topic}"


class Program:
    """A running program, and the lines that it has printed."""

    def __init__(
        self, command: list[str], log: Path, variables: Mapping[str, str]
    ) -> None:
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **variables},
            )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def end(self, *, is_killed: bool) -> int:
        """Wait for the program, or kill it, and return its exit code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if is_killed:
            self.process.kill()
        try:
            code = self.process.wait(_LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._thread.join()
            self.process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        return code

    def errors(self) -> str:
        return self._log.read_text()[-3_000:]


class Feeder(threading.Thread):
    """Writes numbers to a producer, one every 5 ms."""

    def __init__(self, producer: Program) -> None:
        super().__init__()
        assert producer.process.stdin is not None
        self._stdin = producer.process.stdin
        self._is_over = threading.Event()
        self.count = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the test reports its exit code
            for number in itertools.count():
                if self._is_over.wait(0.005):
                    break
                self._stdin.write(f"{number}\n")
                self._stdin.flush()
                self.count = number + 1
            self._stdin.close()

    def end(self) -> int:
        """Stop, and return the number of values."""
        self._is_over.set()
        self.join()
        return self.count


class CommittedOffsets(threading.Thread):
    """Reads the committed offsets of a group, which must not become smaller."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        super().__init__()
        self._places = [
            confluent_kafka.TopicPartition(topic, number)
            for number in range(PARTITIONS)
        ]
        self._client: Any = confluent_kafka.Consumer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "group.id": group_of(topic),
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )
        self._is_over = threading.Event()
        self.offsets = dict.fromkeys(range(PARTITIONS), -1)
        self.reads = 0
        self.broken: list[str] = []
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(0.05):
            try:
                committed = self._client.committed(self._places, timeout=10)
            except confluent_kafka.KafkaException:
                continue
            self.reads += 1
            for partition in committed:
                before = self.offsets[partition.partition]
                if max(-1, partition.offset) < before:
                    self.broken.append(
                        f"{partition.partition}: {partition.offset} after {before}"
                    )
                self.offsets[partition.partition] = max(before, partition.offset)
        self._client.close()

    def ends(self) -> dict[int, int]:
        """Return the committed offsets, 0 for a partition without a commit."""
        return {number: max(0, offset) for number, offset in self.offsets.items()}

    def end(self) -> None:
        self._is_over.set()
        self.join()


def read_values(consumer: Program) -> dict[tuple[int, int], int]:
    """Return the records that a consumer has printed, by partition and offset."""
    values: dict[tuple[int, int], int] = {}
    for line in list(consumer.lines):
        first_word, *fields = line.split()
        if first_word == "read":
            partition, offset, value = map(int, fields)
            key = partition, offset
            assert values.setdefault(key, value) == value, key
    return values


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.mark.parametrize("client", CLIENTS)
def test_client_loses_no_record_while_brokers_are_killed(
    cluster: Cluster, tmp_path: Path, client: str
) -> None:
    """The leader is killed twice, and the coordinator of the group once."""
    topic = f"t-{client}"
    variables = {}
    if client == "kafkajs":
        variables["NODE_PATH"] = str(npm.modules("kafkajs", KAFKAJS))
    programs = {}
    for role in ("consume", "produce"):
        command_of(client, role, "", topic)  # builds the programs, or skips the test
    cluster.create(topic, PARTITIONS)
    for role in ("consume", "produce"):
        command = command_of(client, role, cluster.bootstrap_servers, topic)
        programs[role] = Program(command, tmp_path / f"{role}.log", variables)
    consumer, producer = programs["consume"], programs["produce"]
    feeder = Feeder(producer)
    committed = CommittedOffsets(cluster, topic)
    steps = []

    def until_more() -> None:
        before = len(read_values(consumer))
        until(
            lambda: len(read_values(consumer)) >= before + _RECORDS,
            f"{client} reads more records",
            _LIMIT_S,
        )

    try:
        until_more()
        for victim_topic in (topic, "__consumer_offsets", topic):
            number = cluster.until_in_sync(victim_topic, 3).leader_id
            start_s = time.monotonic()
            cluster.send(number, signal.SIGKILL)
            cluster.processes[number].wait()
            until_more()
            steps.append(f"{victim_topic} {time.monotonic() - start_s:.1f} s")
            cluster.start(number)
            for index in range(PARTITIONS):
                cluster.until_in_sync(topic, 3, index)
            cluster.until_in_sync("__consumer_offsets", 3)
            until_more()
        count = feeder.end()
        assert producer.end(is_killed=False) == 0, producer.errors()
        until(
            lambda: len(set(read_values(consumer).values())) >= count,
            f"{client} reads every record",
            _LIMIT_S,
        )
        stored = read_all(cluster, topic)
        ends = dict.fromkeys(range(PARTITIONS), 0)
        for number, offset in stored:
            ends[number] = max(ends[number], offset + 1)
        until(lambda: committed.ends() == ends, "the last commit", _LIMIT_S)
    except AssertionError:
        for program in programs.values():
            print(program.errors())
        raise
    finally:
        feeder.end()
        committed.end()
        for program in programs.values():
            program.end(is_killed=True)
    failed = [line for line in producer.lines if line.startswith("failed")]
    assert not failed, failed[:3]
    if client != "kcat":
        acknowledged = [int(line.split()[1]) for line in producer.lines]
        assert sorted(acknowledged) == list(range(count))
    values = sorted(stored.values())
    assert values == list(range(count)), "records are lost, or stored twice"
    for key, value in read_values(consumer).items():
        assert stored[key] == value, key
    assert not committed.broken, committed.broken[:3]
    print(f"{client}: {count} records, {committed.reads} reads, {', '.join(steps)}")
