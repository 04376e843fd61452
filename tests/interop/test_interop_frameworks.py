"""Frameworks that use Kafka's clients run on netshim without changes, and count each
record once. The frameworks are Kafka Streams with exactly_once_v2, distributed Kafka
Connect with an exactly-once source, Quix with exactly-once, and FastStream. The first
two need Java 17 and Maven. The Python frameworks are installed into a directory of
build/. Run by `make interop`.
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
    """Return the committed records of all partitions."""
    if topic not in data.topics():
        return []
    return [
        record
        for number in data.partitions(topic)
        for record in data.partition(topic, number).read(0, isolation="read_committed")
    ]


def wait_until(condition: Callable[[], bool], describe: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.05)


def latest(data: logcore.LogDir) -> dict[bytes, int]:
    return {record.key: int(record.value) for record in committed(data, "counts")}


def test_kafka_streams_counts_each_word_once(tmp_path: Path) -> None:
    """The application is killed three times. Then its state is lost, and restored from
    the changelog.
    """
    rng = random.Random(3)
    words = [b"apple", b"pear", b"plum", b"fig"]
    sent_words: Counter[bytes] = Counter()
    with netshim.serve(tmp_path / "data") as server:
        data = server.logdir
        data.create_topic("text", 2)
        data.create_topic("counts", 2)
        state = tmp_path / "state"

        def feed(count: int) -> None:
            for _ in range(count):
                line = rng.choices(words, k=3)
                sent_words.update(line)
                data.append("text", b" ".join(line), partition=rng.randrange(2))

        def has_counted() -> bool:
            return latest(data) == dict(sent_words)

        for run in range(4):
            with kafka_jvm.run_streams(
                server.bootstrap_servers,
                state if run < 3 else tmp_path / "other",
                f"life-{run}",
            ) as process:
                feed(100)
                wait_until(
                    lambda: sum(latest(data).values()) > sum(sent_words.values()) - 250,
                    lambda: (latest(data), sent_words),
                )
                if run == 3:
                    wait_until(has_counted, lambda: (latest(data), sent_words))
                process.send_signal(signal.SIGKILL)
        # Each change of a count was reported once. A count rises by at most the words
        # of one line.
        for word in words:
            counts = [
                int(record.value)
                for record in committed(data, "counts")
                if record.key == word
            ]
            assert counts == sorted(set(counts)), (word, counts)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def connect(server: Any, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a distributed worker of Kafka Connect."""
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
        "plugin.path": str(kafka_jvm.framework_jars()),
    }
    for topic_name in ("config", "offset", "status"):
        options[f"{topic_name}.storage.topic"] = f"connect-{topic_name}"
        options[f"{topic_name}.storage.replication.factor"] = "1"
    settings = folder / "worker.properties"
    settings.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    output = (folder / "connect.txt").open("ab")
    main = "org.apache.kafka.connect.cli.ConnectDistributed"
    with output:
        command = [
            "java",
            "-cp",
            f"{kafka_jvm.framework_jars()}/*",
            main,
            str(settings),
        ]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def request_worker(port: int, path: str, body: object = None) -> Any:
    """Return the response of the worker, or None if it does not respond."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError):
        return None


def test_kafka_connect_copies_each_line_of_a_file_once(tmp_path: Path) -> None:
    """The worker is killed three times in the middle of a transaction."""
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

        def stored_lines() -> list[bytes]:
            return [bytes(record.value) for record in committed(data, "lines")]

        for run in range(4):
            port = free_port()
            with connect(server, tmp_path, port) as process:
                if run == 0:
                    connector = {
                        "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
                        "tasks.max": "1",
                        "file": str(source),
                        "topic": "lines",
                        "batch.size": "20",
                        "exactly.once.support": "required",
                    }
                    wait_until(
                        lambda port=port: (
                            request_worker(port, "/connectors") is not None
                        ),
                        lambda: "no worker",
                    )
                    definition = {"name": "file", "config": connector}
                    wait_until(
                        lambda definition=definition, port=port: bool(
                            request_worker(port, "/connectors", definition)
                        ),
                        lambda: "no connector",
                    )
                feed(200)
                minimum = len(expected) - 100

                def has_arrived(minimum: int = minimum) -> bool:
                    # The connector sends its last batch only after the file grows.
                    feed(1)
                    return len(stored_lines()) >= minimum

                wait_until(has_arrived, lambda: (len(stored_lines()), len(expected)))
                process.send_signal(signal.SIGKILL)
        stored = stored_lines()
        assert stored == expected[: len(stored)]
        assert len(stored) >= 700


def test_quix_counts_each_record_once(tmp_path: Path) -> None:
    """The application is killed twice. Then its state is lost, and restored from the
    changelog.
    """
    python = environment("quixstreams", "quixstreams")
    job = ROOT / "tests" / "support" / "quix_job.py"
    with netshim.serve(tmp_path / "data") as server:
        data = server.logdir
        data.create_topic("text", 2)
        data.create_topic("counts", 2)
        sent_keys: Counter[bytes] = Counter()
        for run in range(3):
            for number in range(200):
                key = b"k%d" % (number % 5)
                sent_keys[key] += 1
                data.append("text", b"%d" % number, key=key)
            state = tmp_path / ("state" if run < 2 else "other")
            output = (tmp_path / f"life-{run}.txt").open("wb")
            with output:
                command = [str(python), str(job), server.bootstrap_servers, str(state)]
                process = subprocess.Popen(command, stdout=output, stderr=output)
                try:
                    minimum = sum(sent_keys.values()) - 120 * (run < 2)
                    wait_until(
                        lambda minimum=minimum: sum(latest(data).values()) >= minimum,
                        lambda: (latest(data), sent_keys),
                    )
                finally:
                    process.kill()
                    process.wait()
        for key, count in sent_keys.items():
            counts = [
                int(record.value)
                for record in committed(data, "counts")
                if record.key == key
            ]
            assert counts == list(range(1, count + 1)), (key, counts)


@pytest.mark.parametrize("client", ["confluent", "aiokafka"])
def test_faststream_processes_each_message(tmp_path: Path, client: str) -> None:
    python = environment("faststream", "faststream[confluent,kafka]")
    job = ROOT / "tests" / "support" / "faststream_job.py"
    with netshim.serve(tmp_path / "data") as server:
        command = [str(python), str(job), server.bootstrap_servers, client]
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        assert result.returncode == 0, result.stdout + result.stderr
        values = [
            bytes(record.value).decode()
            for record in committed(server.logdir, f"{client}-out")
        ]
        assert values == [f"MESSAGE {number}" for number in range(20)]
