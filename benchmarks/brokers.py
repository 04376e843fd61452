"""Brokers in processes of their own, and clients of confluent-kafka that measure them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import common
from common import Result

TURNS: Final = 3
PACE: Final = 1_000  # records a second


@attrs.frozen
class Served:
    """A broker: its address, and the processor time that it has used."""

    name: str
    address: str
    pid: int
    #: Settings of the clients besides the address.
    settings: Mapping[str, Any] = attrs.Factory(dict)

    @property
    def client_config(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.address, "log_level": 0, **self.settings}

    def cpu_seconds(self) -> float:
        return cpu_seconds_of(self.pid)

    def prepare(self, topic: str) -> None:
        """Create a topic, if the broker does not create it for its first record."""


def cpu_seconds_of(pid: int) -> float:
    """Return the processor time of a process.

    This is clock_getcpuclockid(3) of Linux. The times in /proc have steps of 10 ms.
    """
    return time.clock_gettime(~pid << 3 | 2)


@contextlib.contextmanager
def netshim(path: Path, durability: str, *options: str) -> Iterator[Served]:
    """Start netshim as a user would, with its thresholds of the garbage collector."""
    command = [
        sys.executable,
        "-m",
        "netshim",
        "serve",
        str(path),
        "--port",
        "0",
        "--durability",
        durability,
        *options,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield Served(durability, process.stdout.readline().split()[-1], process.pid)
        finally:
            process.terminate()


def exchange(sock: socket.socket, frame: bytes) -> bytes:
    """Send a request and return its response, without the size before it."""
    sock.sendall(frame)
    size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
    return sock.recv(size, socket.MSG_WAITALL)


# -- at 1,000 records a second ---------------------------------------------------------


def latency(
    served: Served, topic: str, seconds: float
) -> tuple[list[float], list[float], float]:
    """Measure each record's seconds to the delivery report and to the consumer.

    Both begin at produce(). Also return the broker's processor seconds per record.
    """
    import confluent_kafka

    count = int(PACE * seconds)
    consumer = confluent_kafka.Consumer(
        {
            **served.client_config,
            "group.id": topic,
            "auto.offset.reset": "earliest",
        }
    )
    producer = confluent_kafka.Producer(
        {
            **served.client_config,
            "acks": "all",
            "linger.ms": 0,
        }
    )
    served.prepare(topic)
    producer.produce(topic, b"0")
    producer.flush(30)
    consumer.subscribe([topic])
    while consumer.poll(0.1) is None:
        pass
    acked: list[float] = []
    found: list[float] = []

    def told(error: Any, message: Any) -> None:
        assert error is None, error
        acked.append(time.perf_counter() - float(message.value().rstrip(b".")))

    def read() -> None:
        while len(found) < count:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                found.append(time.perf_counter() - float(message.value().rstrip(b".")))

    reader = threading.Thread(target=read)
    reader.start()
    before = served.cpu_seconds()
    started = time.perf_counter()
    for number in range(count):
        while time.perf_counter() < started + number / PACE:
            producer.poll(0.0002)
        value = repr(time.perf_counter()).encode().ljust(common.VALUE_SIZE, b".")
        producer.produce(topic, value, on_delivery=told)
    producer.flush(30)
    reader.join()
    spent = served.cpu_seconds() - before
    consumer.close()
    return acked, found, spent / count


def paced(
    brokers: list[Served], seconds: float, topic: str = "paced"
) -> tuple[dict[tuple[str, str], dict[str, list[float]]], dict[str, list[float]]]:
    """Run latency() with each broker in turns.

    Return the percentiles by their kind and the broker's name, and the processor seconds
    per record by the broker's name, with one figure per turn.
    """
    latencies: dict[tuple[str, str], dict[str, list[float]]] = {}
    cpu: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for broker in brokers:
            acked, found, spent = latency(broker, f"{topic}-{turn}", seconds)
            for what, each in (("produce", acked), ("end to end", found)):
                cuts = statistics.quantiles(each, n=1_000)
                for name, cut in (
                    ("p50", cuts[499]),
                    ("p99", cuts[989]),
                    ("p99.9", cuts[998]),
                ):
                    latencies.setdefault((what, name), {}).setdefault(
                        broker.name, []
                    ).append(cut)
            cpu.setdefault(broker.name, []).append(spent)
    return latencies, cpu


def cost_row(
    question: str,
    unit: str,
    scale: float,
    figures: dict[str, list[float]],
    ours: str,
    theirs: str,
    target: float | None,
) -> Result:
    mine = statistics.median(figures[ours])
    other = statistics.median(figures[theirs])
    return Result(
        question=question,
        unit=unit,
        ours=mine * scale,
        peer_name=theirs,
        peer=other * scale,
        ratio=mine / other,
        turns=common.ratios(figures[ours], figures[theirs]),
        target=target,
        bound="at most",
        method=f"The median of {len(figures[ours])} turns; less is better.",
    )


# -- maximum rate ----------------------------------------------------------------------


def produce(
    served: Served, topic: str, value: bytes, count: int
) -> tuple[float, float]:
    """Produce records; return the seconds, and the broker's processor seconds."""
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {
            **served.client_config,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    served.prepare(topic)
    producer.produce(topic, value)
    producer.flush(30)
    before = served.cpu_seconds()
    started = time.perf_counter()
    for _ in range(count):
        while True:
            try:
                producer.produce(topic, value)
                break
            except BufferError:
                producer.poll(0.01)
    producer.flush(60)
    return time.perf_counter() - started, served.cpu_seconds() - before


def consume(served: Served, topic: str, count: int) -> tuple[float, float]:
    """Consume records; return the seconds, and the broker's processor seconds."""
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            **served.client_config,
            "group.id": "g",
            "enable.auto.commit": False,
            # By default, librdkafka pauses for up to 1 s once 100,000 messages are
            # queued, so it measures its pauses if the broker is faster than the reader.
            "fetch.queue.backoff.ms": 1,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    left = count - len(consumer.consume(1, 30))
    before = served.cpu_seconds()
    started = time.perf_counter()
    while left > 0:
        left -= len(consumer.consume(min(left, 10_000), 1.0))
    spent = time.perf_counter() - started, served.cpu_seconds() - before
    consumer.close()
    return spent


def throughput(
    ours: Served,
    peers: Sequence[Served],
    value_bytes: int,
    size_bytes: int,
    targets: Mapping[str, tuple[float, float]],
) -> Iterator[Result]:
    """Produce and consume with each broker in turns.

    `targets` has the target of the rate, and of the processor time for each GB.
    """
    count = size_bytes // value_bytes
    value = b"x" * value_bytes
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(TURNS):
        for peer in (ours, *peers):
            topic = f"fast-{value_bytes}-{turn}"
            samples.setdefault(("produce", peer.name), []).append(
                produce(peer, topic, value, count)
            )
            samples.setdefault(("consume", peer.name), []).append(
                consume(peer, topic, count)
            )
    gigabytes = size_bytes / 1e9
    for theirs, what in itertools.product(peers, ("produce", "consume")):
        seconds = {
            server.name: [each for each, _ in samples[what, server.name]]
            for server in (ours, theirs)
        }
        cpu = {
            server.name: [each for _, each in samples[what, server.name]]
            for server in (ours, theirs)
        }
        best = {name: min(times) for name, times in seconds.items()}
        least = {name: min(times) for name, times in cpu.items()}
        rate, cost = targets[what]
        yield Result(
            question=f"{what}, {value_bytes:,} bytes a record",
            unit="records/s",
            ours=count / best[ours.name],
            peer_name=theirs.name,
            peer=count / best[theirs.name],
            ratio=best[theirs.name] / best[ours.name],
            turns=common.ratios(seconds[theirs.name], seconds[ours.name]),
            target=rate,
            method="acks=all; the best of turns."
            if what == "produce"
            else "consume(10000); the best of turns.",
        )
        yield Result(
            question=f"{what}, {value_bytes:,} bytes a record, CPU of the broker for each GB",
            unit="s",
            ours=least[ours.name] / gigabytes,
            peer_name=theirs.name,
            peer=least[theirs.name] / gigabytes,
            ratio=least[ours.name] / least[theirs.name],
            turns=common.ratios(cpu[ours.name], cpu[theirs.name]),
            target=cost,
            bound="at most",
            method="The least of turns; less is better.",
        )
