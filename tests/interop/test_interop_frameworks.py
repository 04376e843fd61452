"""Frameworks that are built on Kafka's clients run on the broker unmodified, and each
record counts once.

Kafka Streams with exactly_once_v2, killed, its state restored from its changelog; Kafka
Connect, distributed, with exactly-once source; Quix with exactly-once; FastStream.
Needs Java 17 and Maven for the first two; the Python ones are installed into a folder
of build/. Run by `make interop`.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logcore
import netshim
from support import kafka_jvm
from support.environments import ROOT, environment

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]
SECONDS = 120


def committed(data: logcore.LogDir, topic: str) -> list[Any]:
    """Records that readers of committed ones see, of all partitions."""
    if topic not in data.topics():
        return []
    return [
        record
        for number in data.partitions(topic)
        for record in data.partition(topic, number).read(0, isolation="read_committed")
    ]


def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def latest(data: logcore.LogDir) -> dict[bytes, int]:
    return {record.key: int(record.value) for record in committed(data, "counts")}


def test_kafka_streams_counts_each_word_once(tmp_path: Path) -> None:
    """Killed three times; after that its state is lost too, and restored from the
    changelog.
    """
    rng = random.Random(3)
    words = [b"apple", b"pear", b"plum", b"fig"]
    sent: Counter[bytes] = Counter()
    with netshim.serve(tmp_path / "data") as server:
        data = server.logdir
        data.create_topic("text", 2)
        data.create_topic("counts", 2)
        state = tmp_path / "state"

        def feed(count: int) -> None:
            for _ in range(count):
                line = rng.choices(words, k=3)
                sent.update(line)
                data.append("text", b" ".join(line), partition=rng.randrange(2))

        def has_counted() -> bool:
            return latest(data) == dict(sent)

        for life in range(4):
            with kafka_jvm.streams(
                server.bootstrap_servers,
                state if life < 3 else tmp_path / "other",
                f"life-{life}",
            ) as process:
                feed(100)
                until(
                    lambda: sum(latest(data).values()) > sum(sent.values()) - 250,
                    lambda: (latest(data), sent),
                )
                if life == 3:
                    until(has_counted, lambda: (latest(data), sent))
                process.send_signal(signal.SIGKILL)
        # Each change of a count was told once: they rise by what one line may hold.
        for word in words:
            seen = [
                int(record.value)
                for record in committed(data, "counts")
                if record.key == word
            ]
            assert seen == sorted(set(seen)), (word, seen)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def connect(server: Any, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A distributed worker of Kafka Connect."""
    converter = "org.apache.kafka.connect.storage.StringConverter"
    options = {
        "bootstrap.servers": server.bootstrap_servers,
        "group.id": "connect",
        "listeners": f"http://127.0.0.1:{port}",
        "key.converter": converter,
        "value.converter": converter,
        "exactly.once.source.support": "enabled",
        "session.timeout.ms": "6000",
        "heartbeat.interval.ms": "500",
        "offset.flush.interval.ms": "200",
        "scheduled.rebalance.max.delay.ms": "0",
        "plugin.discovery": "service_load",
        "plugin.path": str(kafka_jvm.frameworks()),
    }
    for kind in ("config", "offset", "status"):
        options[f"{kind}.storage.topic"] = f"connect-{kind}"
        options[f"{kind}.storage.replication.factor"] = "1"
    settings = folder / "worker.properties"
    settings.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    output = (folder / "connect.txt").open("ab")
    main = "org.apache.kafka.connect.cli.ConnectDistributed"
    with output:
        command = ["java", "-cp", f"{kafka_jvm.frameworks()}/*", main, str(settings)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def ask(port: int, path: str, body: object = None) -> Any:
    """What the worker answers; None while it does not."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except (urllib.error.URLError, OSError):
        return None


def test_kafka_connect_takes_each_line_of_a_file_once(tmp_path: Path) -> None:
    """A worker is killed in the middle of its transactions, three times."""
    source = tmp_path / "lines.txt"
    source.touch()
    expected: list[bytes] = []
    with netshim.serve(tmp_path / "data") as server:
        data = server.logdir
        data.create_topic("lines", 1)

        def feed(count: int) -> None:
            with source.open("ab") as file:
                for _ in range(count):
                    expected.append(b"line %d" % len(expected))
                    file.write(expected[-1] + b"\n")

        def seen() -> list[bytes]:
            return [bytes(record.value) for record in committed(data, "lines")]

        for life in range(4):
            port = free_port()
            with connect(server, tmp_path, port) as process:
                if life == 0:
                    connector = {
                        "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
                        "tasks.max": "1",
                        "file": str(source),
                        "topic": "lines",
                        "batch.size": "20",
                        "exactly.once.support": "required",
                    }
                    until(
                        lambda port=port: ask(port, "/connectors") is not None,
                        lambda: "no worker",
                    )
                    asked = {"name": "file", "config": connector}
                    until(
                        lambda asked=asked, port=port: bool(
                            ask(port, "/connectors", asked)
                        ),
                        lambda: "no connector",
                    )
                feed(200)
                most = len(expected) - 100

                def has_come(most: int = most) -> bool:
                    # The connector holds back up to one batch until the file grows.
                    feed(1)
                    return len(seen()) >= most

                until(has_come, lambda: (len(seen()), len(expected)))
                process.send_signal(signal.SIGKILL)
        found = seen()
        assert found == expected[: len(found)]
        assert len(found) >= 700


def test_quix_counts_each_record_once(tmp_path: Path) -> None:
    """Killed twice; after that its state is lost too, and restored from the changelog."""
    python = environment("quixstreams", "quixstreams")
    job = ROOT / "tests" / "support" / "quix_job.py"
    with netshim.serve(tmp_path / "data") as server:
        data = server.logdir
        data.create_topic("text", 2)
        data.create_topic("counts", 2)
        sent: Counter[bytes] = Counter()
        for life in range(3):
            for number in range(200):
                key = b"k%d" % (number % 5)
                sent[key] += 1
                data.append("text", b"%d" % number, key=key)
            state = tmp_path / ("state" if life < 2 else "other")
            output = (tmp_path / f"life-{life}.txt").open("wb")
            with output:
                command = [str(python), str(job), server.bootstrap_servers, str(state)]
                process = subprocess.Popen(command, stdout=output, stderr=output)
                try:
                    least = sum(sent.values()) - 120 * (life < 2)
                    until(
                        lambda least=least: sum(latest(data).values()) >= least,
                        lambda: (latest(data), sent),
                    )
                finally:
                    process.kill()
                    process.wait()
        for key, count in sent.items():
            seen = [
                int(record.value)
                for record in committed(data, "counts")
                if record.key == key
            ]
            assert seen == list(range(1, count + 1)), (key, seen)


@pytest.mark.parametrize("client", ["confluent", "aiokafka"])
def test_faststream(tmp_path: Path, client: str) -> None:
    python = environment("faststream", "faststream[confluent,kafka]")
    job = ROOT / "tests" / "support" / "faststream_job.py"
    with netshim.serve(tmp_path / "data") as server:
        command = [str(python), str(job), server.bootstrap_servers, client]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = [
            bytes(record.value).decode()
            for record in committed(server.logdir, f"{client}-out")
        ]
        assert found == [f"MESSAGE {number}" for number in range(20)]
