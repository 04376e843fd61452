"""A broker that works for half an hour: its memory and its descriptors do not grow
after the first minutes.

Clients of librdkafka produce, read in groups of both protocols with changing members,
consume, transform and produce in transactions, and create and delete topics. Other
connections open and close beside them, some with garbage. Retention removes old
records, so that nothing has a reason to grow.

It runs without security, and with TLS, logins, rules and quotas.

`make slow` runs each for 30 minutes; LOGCORE_SOAK_SECONDS changes the duration. It does
not test speed: the clients pause.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from netshim import wire
from support.client import Client
from support.secured_process import secured_process

confluent_kafka = pytest.importorskip("confluent_kafka")
from confluent_kafka.admin import AdminClient, NewTopic  # noqa: E402

SECONDS = float(os.environ.get("LOGCORE_SOAK_SECONDS", "1800"))
SAMPLE_S = 2.0
#: Growth of more than this counts as a leak: half an hour that leaks one kilobyte a
#: second makes 2 MB.
SLACK_BYTES = 6 << 20
SLACK_DESCRIPTORS = 8
CONFIG = {
    "segment.bytes": 1 << 20,
    "retention.bytes": 2 << 20,
    "file.delete.delay.ms": 1_000,
}


@attrs.frozen
class Sample:
    """The resources that the process of the broker holds."""

    resident_bytes: int
    anonymous_bytes: int
    descriptors: int
    threads: int


def sample(pid: int) -> Sample:
    kilobytes = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "Threads"):
            kilobytes[name] = int(value.split()[0])
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(
        kilobytes["VmRSS"] << 10,
        kilobytes["RssAnon"] << 10,
        descriptors,
        kilobytes["Threads"],
    )


class Crowd:
    """The clients, each in a thread that ends when is_over is set.

    done: how often each kind of work was done.
    """

    def __init__(self, connect: Callable[[], Client], settings: dict[str, Any]) -> None:
        self.connect = connect
        self.settings = {**settings, "log_level": 0}
        self.is_over = threading.Event()
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []
        self.threads: list[threading.Thread] = []
        kinds: list[Callable[[], None]] = [
            self.produce,
            self.transact,
            self.administer,
            self.connect_and_disconnect,
            *[
                lambda protocol=protocol: self.consume(protocol)
                for protocol in ("classic", "consumer") * 2
            ],
        ]
        for kind in kinds:
            thread = threading.Thread(target=self._guarded, args=(kind,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _guarded(self, kind: Callable[[], None]) -> None:
        try:
            while not self.is_over.is_set():
                kind()
        except BaseException as error:
            self.failures.append(repr(error))

    def end(self) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"

    def produce(self) -> None:
        """Run a producer for some time."""
        settings = {
            **self.settings,
            "enable.idempotence": True,
            "linger.ms": 5,
        }
        producer = confluent_kafka.Producer(settings)
        for _ in range(500):
            if self.is_over.is_set():
                break
            for number in range(4):
                producer.produce("in", os.urandom(1_000), partition=number % 2)
            producer.poll(0.02)
            self.done["produced"] += 4
        assert producer.flush(30) == 0

    def consume(self, protocol: str) -> None:
        """Run a member of a group for some time."""
        settings = {
            **self.settings,
            "group.id": f"of-the-{protocol}-protocol",
            "group.protocol": protocol,
            "auto.offset.reset": "latest",
        }
        consumer = confluent_kafka.Consumer(settings)
        consumer.subscribe(["in"])
        until = time.monotonic() + random.uniform(5, 40)
        while time.monotonic() < until and not self.is_over.is_set():
            self.done[f"read by {protocol}"] += sum(
                message.error() is None for message in consumer.consume(100, 0.2)
            )
        consumer.close()

    def transact(self) -> None:
        """Consume, transform and produce for some time, and abort each fifth
        transaction.
        """
        consumer = confluent_kafka.Consumer(
            {
                **self.settings,
                "group.id": "of-transactions",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
            }
        )
        consumer.subscribe(["in"])
        producer = confluent_kafka.Producer(
            {**self.settings, "transactional.id": "soaked", "linger.ms": 1}
        )
        producer.init_transactions(30)
        for turn in range(150):
            polled = [
                message
                for message in consumer.consume(20, 0.2)
                if message.error() is None
            ]
            if self.is_over.is_set():
                break
            if not polled:
                continue
            producer.begin_transaction()
            for entry in polled:
                producer.produce("out", entry.value()[:100])
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()),
                consumer.consumer_group_metadata(),
                30,
            )
            if turn % 5:
                producer.commit_transaction(30)
                self.done["committed"] += 1
            else:
                producer.abort_transaction(30)
                self.done["aborted"] += 1
        consumer.close()

    def administer(self) -> None:
        admin = AdminClient(self.settings)
        for number in range(10):
            name = f"for-now-{number}"
            for future in admin.create_topics([NewTopic(name, 3)]).values():
                future.result(30)
            admin.list_topics(timeout=30)
            admin.list_consumer_groups().result(30)
            for gone in admin.delete_topics([name]).values():
                gone.result(30)
            self.done["topics"] += 1
            if self.is_over.wait(2):
                return

    def connect_and_disconnect(self) -> None:
        """Open connections: some send a request, some send garbage, and some are reset
        in the middle of a request.
        """
        for number in itertools.count():
            if self.is_over.wait(0.1):
                return
            client = self.connect()
            with contextlib.suppress(OSError, EOFError):
                if number % 3 == 0:
                    client.ask(wire.METADATA, 1, wire.METADATA.Request(topics=None))
                elif number % 3 == 1:
                    client.sock.sendall(os.urandom(100))
                else:
                    client.sock.sendall((50_000).to_bytes(4, "big") + bytes(10_000))
            client.close()
            self.done["connections"] += 1


@attrs.frozen
class Served:
    """A broker that everyone may use, in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int

    def connect(self) -> Client:
        return Client(self.port)

    def client_config(self) -> dict[str, Any]:
        return {"bootstrap.servers": f"127.0.0.1:{self.port}"}


@contextlib.contextmanager
def open_process(data: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "netshim", "serve", str(data), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield Served(process, int(process.stdout.readline().rpartition(b":")[2]))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="memory of a process is read from /proc",
)
@pytest.mark.parametrize("start", [open_process, secured_process])
def test_memory_and_descriptors_of_a_broker_do_not_grow(
    tmp_path: Path, start: Callable[[Path], Any]
) -> None:
    with logcore.open_dir(tmp_path / "data", create=True) as data:
        data.create_topic("in", 2, CONFIG)
        data.create_topic("out", 2, CONFIG)
    samples: list[Sample] = []
    with start(tmp_path / "data") as broker:
        crowd = Crowd(broker.connect, broker.client_config())
        until = time.monotonic() + SECONDS
        before_end = Counter[str]()
        while time.monotonic() < until:
            time.sleep(SAMPLE_S)
            assert broker.process.poll() is None, broker.process.returncode
            assert not crowd.failures, crowd.failures
            samples.append(sample(broker.process.pid))
            if time.monotonic() < until - SECONDS / 4:
                before_end = Counter(crowd.done)
        crowd.end()
        assert not crowd.failures, crowd.failures
        idle = crowd.done.keys() - (crowd.done - before_end).keys()
        assert not idle, f"no longer done at the end: {idle}"
    part = len(samples) // 10
    early = samples[3 * part : 5 * part]
    late = samples[-2 * part :]
    medians = {}
    for name in ("resident_bytes", "anonymous_bytes", "descriptors", "threads"):
        medians[name] = (
            int(statistics.median(getattr(sample, name) for sample in early)),
            int(statistics.median(getattr(sample, name) for sample in late)),
        )
    print(
        f"{SECONDS:.0f} s: {dict(crowd.done)}; early and late: {medians}; first {samples[0]}, last {samples[-1]}"
    )
    for name in ("resident_bytes", "anonymous_bytes"):
        assert medians[name][1] - medians[name][0] < SLACK_BYTES, medians
    for name in ("descriptors", "threads"):
        assert medians[name][1] - medians[name][0] < SLACK_DESCRIPTORS, medians
