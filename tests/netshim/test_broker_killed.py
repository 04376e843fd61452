"""A broker that is killed under load, while unmodified clients consume, transform and
produce in transactions.

Two members of a group read records of topic "in" and write each to topic "out", in one
transaction with their offsets. A third client sends records to "in" and stores which of
them were acknowledged. In the end, each acknowledged record must be in "out" exactly
once.

`make slow` kills the broker 100 times, `make check` three times. LOGCORE_BROKER_KILLS=n
kills it n times.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.recordbatch import encode
from netshim import wire
from support.broker_harness import BrokerHarness
from support.client import Client

confluent_kafka = pytest.importorskip("confluent_kafka")

KILLS = int(os.environ.get("LOGCORE_BROKER_KILLS", "3"))
MANY = int(os.environ.get("LOGCORE_BROKER_KILLS", "100"))
SECONDS = 120  # time limit for events that must happen
#: Without these settings, librdkafka may wait forever after the broker was down; see
#: docs/netshim.md.
COMMON: dict[str, Any] = {
    "metadata.recovery.strategy": "none",
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 100,
    "log_level": 0,
}


class Broker:
    """The program netshim in a separate process with a fixed address. It can be killed
    and restarted.
    """

    def __init__(self, path: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.command = [
            sys.executable,
            "-m",
            "netshim",
            "serve",
            str(path),
            "--port",
            str(self.port),
        ]
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + SECONDS
        while True:
            assert process.poll() is None, process.returncode
            assert time.monotonic() < deadline, "the broker does not listen"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return process
            except OSError:
                time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_and_start(self) -> None:
        self.kill()
        self.process = self._started()


class Load:
    """The clients. Their threads end once is_over is set."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_over = threading.Event()
        self.sent: list[bytes] = []  # acknowledged
        # Sent, but neither acknowledged nor definitely refused.
        self.unknown: set[bytes] = set()
        self.committed = 0
        self.failures: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._guarded, args=(work,))
            for work in (
                self._send,
                lambda: self._process("id-0"),
                lambda: self._process("id-1"),
            )
        ]
        for thread in self.threads:
            thread.start()

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self.failures.append(error)

    def _send(self) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.address,
                "enable.idempotence": True,
                "linger.ms": 2,
                **COMMON,
            }
        )

        def on_delivery_report(error: Any, message: Any) -> None:
            if error is None:
                self.sent.append(message.value())
            else:
                self.unknown.add(message.value())

        number = 0
        while not self.is_over.is_set():
            producer.produce(
                "in",
                b"%d" % number,
                partition=number % 2,
                on_delivery=on_delivery_report,
            )
            number += 1
            producer.poll(0.002)
        assert producer.flush(SECONDS) == 0

    def _process(self, name: str) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 200,
                **COMMON,
            }
        )
        consumer.subscribe(["in"])
        producer = self._transactional(name)
        while not self.is_over.is_set():
            messages = [
                message
                for message in consumer.consume(50, 0.2)
                if message.error() is None
            ]
            if not messages:
                continue
            try:
                self._transact(producer, consumer, messages)
            except confluent_kafka.KafkaException as error:
                if not error.args[0].txn_requires_abort() or not self._aborted(
                    producer
                ):
                    producer = self._transactional(name)
                self._seek_to_committed(consumer)
        consumer.close()

    def _transact(self, producer: Any, consumer: Any, messages: list[Any]) -> None:
        producer.begin_transaction()
        offsets = {}
        for message in messages:
            producer.produce("out", message.value(), partition=message.partition())
            offsets[message.partition()] = message.offset() + 1
        places = [
            confluent_kafka.TopicPartition("in", number, offset)
            for number, offset in offsets.items()
        ]
        producer.send_offsets_to_transaction(
            places, consumer.consumer_group_metadata(), 20
        )
        while True:
            try:
                producer.commit_transaction(20)
                break
            except confluent_kafka.KafkaException as error:
                if not error.args[0].retriable():
                    raise
        self.committed += 1

    def _transactional(self, name: str) -> Any:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.address,
                "transactional.id": name,
                "transaction.timeout.ms": 10_000,
                "linger.ms": 1,
                **COMMON,
            }
        )
        until = time.monotonic() + SECONDS
        while True:
            try:
                producer.init_transactions(10)
                return producer
            except confluent_kafka.KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > until:
                    raise

    def _aborted(self, producer: Any) -> bool:
        try:
            producer.abort_transaction(20)
        except confluent_kafka.KafkaException:
            return False
        return True

    def _seek_to_committed(self, consumer: Any) -> None:
        """Seek to the committed offsets, because the records read since then do not
        count.
        """
        try:
            for partition in consumer.committed(consumer.assignment(), 20):
                partition.offset = max(partition.offset, 0)
                consumer.seek(partition)
        except confluent_kafka.KafkaException:
            consumer.unsubscribe()
            consumer.subscribe(["in"])

    def end(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a client hangs"
        assert not self.failures, self.failures


def results(path: Path) -> Counter[bytes]:
    with logcore.open_dir(path, read_only=True) as data:
        return Counter(
            bytes(record.value)
            for number in data.partitions("out")
            for record in data.partition("out", number).read(
                0, isolation="read_committed"
            )
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(KILLS, id="few"),
        pytest.param(
            MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many"
        ),
    ],
)
def test_each_record_counts_once_after_any_number_of_broker_kills(
    tmp_path: Path, kills: int
) -> None:
    path = tmp_path / "data"
    with logcore.open_dir(path, create=True) as data:
        data.create_topic("in", 2)
        data.create_topic("out", 2)
    rng = random.Random(5)
    broker = Broker(path)
    try:
        load = Load(broker.address)
        for _ in range(kills):
            before = load.committed
            until = time.monotonic() + SECONDS
            # Each run of the broker must complete some transactions.
            while load.committed < before + 2:
                assert time.monotonic() < until, (
                    f"{load.committed} transactions, {load.failures}"
                )
                time.sleep(0.01)
            time.sleep(rng.random() * 0.2)
            broker.kill_and_start()
        sent = None
        until = time.monotonic() + SECONDS
        while sent is None or not sent <= set(results(path)):
            assert time.monotonic() < until, (
                f"{len(sent or ())} sent, {len(results(path))} stored, {load.failures}"
            )
            time.sleep(0.2)
            if sent is None:
                sent = set(load.sent)
        load.end()
    finally:
        broker.kill()
    counts = results(path)
    assert [value for value, count in counts.items() if count != 1] == []
    assert sent <= set(counts) <= {*load.sent, *load.unknown}
    print(
        f"{kills} kills, {load.committed} transactions, {len(load.sent)} records acknowledged, {len(counts)} results"
    )


IN_A_THREAD = """
import asyncio, sys, threading
from netshim import Server

started = threading.Event()

async def main():
    async with Server(sys.argv[1]) as server:
        started.set()
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.close()
            except OSError:
                break
            await asyncio.sleep(0.02)
    print("no client can connect any more")

threading.Thread(target=lambda: asyncio.run(main())).start()
started.wait()
"""


@pytest.mark.long
def test_broker_in_a_thread_ends_with_the_interpreter(tmp_path: Path) -> None:
    """The thread of the broker outlived the main thread. From then on, the broker did
    no work on the disk, logged ten tracebacks a minute, and answered clients with
    errors.
    """
    command = [sys.executable, "-c", IN_A_THREAD, str(tmp_path / "data")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "no client can connect any more\n"), (
        done.stderr
    )
    assert (
        "Traceback" not in done.stderr
        and "the interpreter is shutting down" in done.stderr
    )
    with logcore.open_dir(tmp_path / "data") as directory:
        assert directory.host.was_clean


def test_stops_under_load_lose_no_acknowledged_record(tmp_path: Path) -> None:
    """Three times, TERM arrives while records are sent. The broker exits with 0."""
    acknowledged: list[bytes] = []
    for turn in range(3):
        with subprocess.Popen(
            [sys.executable, "-m", "netshim", "serve", str(tmp_path), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        ) as broker:
            assert broker.stdout is not None
            address = broker.stdout.readline().split()[-1]
            producer = confluent_kafka.Producer(
                {**COMMON, "bootstrap.servers": address, "linger.ms": 0}
            )

            def delivered(error: Any, message: Any) -> None:
                if error is None:
                    acknowledged.append(message.value())

            before = len(acknowledged)
            deadline = time.monotonic() + SECONDS
            number = 0
            is_stopping = False
            while broker.poll() is None:
                assert time.monotonic() < deadline
                producer.produce("t", b"%d-%d" % (turn, number), on_delivery=delivered)
                producer.poll(0)
                number += 1
                if number % 100 == 0:
                    time.sleep(0.001)
                if not is_stopping and len(acknowledged) >= before + 500:
                    is_stopping = True
                    broker.terminate()
            producer.purge()
            producer.flush(SECONDS)
        assert broker.returncode == 0
    with logcore.open_dir(tmp_path, read_only=True) as directory:
        stored = Counter(record.value for record in directory.read("t"))
    assert len(acknowledged) >= 1_500
    assert Counter(acknowledged) - stored == Counter()


def with_few_files(directory: Path) -> list[str]:
    """Return the command of a broker that may open 128 files."""
    limits = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
    )
    run = "sys.argv = ['netshim', 'serve', sys.argv[1], '--port', '0', '--durability', 'os']; "
    program = limits + run + "from netshim.__main__ import main; main()"
    return [sys.executable, "-c", program, str(directory)]


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit to set")
def test_recovery_leaves_files_for_clients(tmp_path: Path) -> None:
    """Recovery opened all logs. Then no client could connect, and the event loop
    occupied a core with attempts to accept one.
    """
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("t", 100)
        for number in range(100):
            directory.partition("t", number).append(b"%d" % number)
    (tmp_path / "data" / ".kafka_cleanshutdown").unlink()
    with subprocess.Popen(
        with_few_files(tmp_path / "data"), stdout=subprocess.PIPE, text=True
    ) as broker:
        assert broker.stdout is not None
        try:
            port = int(broker.stdout.readline().rpartition(":")[2])
            clients = [Client(port) for _ in range(20)]
            for number in range(100):
                part = clients[number % 20].fetch(partition=number)
                assert part.error_code == 0 and (b"%d" % number) in bytes(part.records)
            for client in clients:
                client.close()
        finally:
            broker.terminate()
    assert broker.returncode == 0


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit to set")
def test_a_consumer_reads_more_partitions_than_logs_can_be_open(tmp_path: Path) -> None:
    """Each fetch opened the same logs, and closed the others for them, so most
    partitions were answered with a retriable error forever.
    """
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("t", 100)
        for number in range(100):
            directory.partition("t", number).append(b"%d" % number)
    with subprocess.Popen(
        with_few_files(tmp_path / "data"), stdout=subprocess.PIPE, text=True
    ) as broker:
        assert broker.stdout is not None
        try:
            address = broker.stdout.readline().split()[-1]
            consumer = confluent_kafka.Consumer(
                {
                    **COMMON,
                    "bootstrap.servers": address,
                    "group.id": "g",
                    "auto.offset.reset": "earliest",
                    "fetch.error.backoff.ms": 10,
                }
            )
            consumer.subscribe(["t"])
            values: set[bytes] = set()
            deadline = time.monotonic() + SECONDS
            while len(values) < 100:
                assert time.monotonic() < deadline, len(values)
                message = consumer.poll(1)
                if message is not None and message.error() is None:
                    values.add(message.value())
            consumer.close()
        finally:
            broker.terminate()
    assert broker.returncode == 0


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit to set")
def test_more_partitions_than_file_descriptors_are_served(tmp_path: Path) -> None:
    """A container's hard limit may be 1,024. Partitions were answered with a retriable
    error forever, no client could connect, and the log did not contain the cause.
    """
    command = with_few_files(tmp_path / "data")
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("t", 100, {"retention.ms": -1})
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as broker:
        assert broker.stdout is not None and broker.stderr is not None
        try:
            port = int(broker.stdout.readline().rpartition(":")[2])
            clients = [Client(port) for _ in range(20)]
            for number in range(100):
                client = clients[number % len(clients)]
                request = BrokerHarness.produce_request(
                    encode([(None, b"%d" % number)], now_ms=1), acks=-1
                )
                request.topic_data[0].partition_data[0].index = number
                response = client.ask(wire.PRODUCE, 9, request)
                assert response.responses[0].partition_responses[0].error_code == 0, (
                    number
                )
            late = Client(port)
            for number in range(100):
                response = late.ask(
                    wire.FETCH,
                    11,
                    BrokerHarness.fetch_request(range(number, number + 1)),
                )
                part = response.responses[0].partitions[0]
                assert part.error_code == 0 and (b"%d" % number) in bytes(part.records)
            for client in [*clients, late]:
                client.sock.close()
        finally:
            broker.terminate()
            logged = broker.stderr.read()
    assert (
        "that were not used lately are closed" in logged and "Traceback" not in logged
    )
    assert broker.returncode == 0
