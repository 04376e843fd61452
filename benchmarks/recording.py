"""What does a recording of all traffic cost the broker?

Method:
- Two brokers run in processes of their own, one with a recording and one without. The
  same client drives them in turns. CPU seconds are the server process's, with the thread
  of the recorder, as counted by the system.
- small requests: one connection keeps 16 Produce v9 requests outstanding, each with one
  batch of one 1 KB record of random bytes. Policy group.
- client: confluent-kafka produces JSON records of 200 bytes and reads them back in a
  group.
- large responses: one connection fetches 1 MB at a time from a topic of random bytes, in
  bursts of 32 MB, because a recording that is faster than the disk ends. The broker
  sends views of its files, and the recording writes a copy of these bytes.

Not shown: recordings on a slow disk, which end with an error.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import common
import shim
from common import Result, Settings

import logcore
import netshim
from logcore import recordbatch
from netshim import wire

_FETCH_BYTES: Final = 1 << 20
_TARGET: Final = 1.15
#: Time for the recorder to write its blocks.
_DRAIN_S: Final = 0.5

#: Port and CPU seconds of a server.
_Server = tuple[int, Callable[[], float]]


def run(settings: Settings) -> Iterator[Result]:
    yield small_requests(settings)
    kafka = common.peer("confluent_kafka", "the row with confluent-kafka")
    if kafka is not None:
        yield client(settings, kafka)
    yield large_responses(settings)


def _serve(pipe: Any, path: str, file: str) -> None:
    """Serve a directory, with a recording if a file is given."""
    with netshim.serve(path, durability="group", num_partitions=4) as server:
        if file:
            from netshim.recording.recorder import TrafficRecorder

            recorder = TrafficRecorder(file)
            server.call(lambda: server.server.record(recorder))
        pipe.send(server.port)
        pipe.recv()
        if file:
            assert recorder.failure is None, recorder.failure


def _ratio(
    settings: Settings,
    path: Path,
    question: str,
    method: str,
    work: Callable[[int], float],
    *,
    unit: str,
    target: float | None,
) -> Result:
    """Compare the CPU seconds of both brokers. work(port) returns its units of work."""
    spent: dict[str, list[float]] = {"on": [], "off": []}
    with (
        shim._process(_serve, str(path / "on"), str(path / "t.ksh")) as on,
        shim._process(_serve, str(path / "off"), "") as off,
    ):
        sides: dict[str, _Server] = {"on": on, "off": off}
        order = list(sides)
        for _ in range(5 if settings.quick else 9):
            for name in order:
                port, cpu_seconds = sides[name]
                before = cpu_seconds()
                units = work(port)
                time.sleep(_DRAIN_S)
                spent[name].append((cpu_seconds() - before) / units)
            order.reverse()
    turns = common.ratios(spent["on"], spent["off"])
    best = {name: min(values) for name, values in spent.items()}
    return Result(
        question=question,
        unit=unit,
        ours=best["on"] * 1e6,
        peer_name=f"{unit} without",
        peer=best["off"] * 1e6,
        ratio=best["on"] / best["off"],
        turns=turns,
        target=target,
        bound="at most",
        method=method,
    )


def small_requests(settings: Settings) -> Result:
    source = random.Random(7)
    request_type = wire.PRODUCE.Request
    frames = []
    for _ in range(1_000):
        batch = recordbatch.encode([(None, source.randbytes(1_000))], now_ms=1)
        partition = request_type.Topic.Partition(index=0, records=batch)
        topics = [request_type.Topic(name="t", partition_data=[partition])]
        request = request_type(acks=-1, timeout_ms=1_000, topic_data=topics)
        frames.append(wire.encode_request(wire.PRODUCE, 9, 7, "bench", request))
    count = 20_000 if settings.quick else 60_000

    def work(port: int) -> float:
        shim._pipelined(port, itertools.cycle(frames), count, 16)
        return count

    with common.scratch(settings, "recording") as path:
        for name in ("on", "off"):
            with logcore.open_dir(path / name, create=True) as logdir:
                logdir.create_topic("t")
        return _ratio(
            settings, path, "recording: 1 KB produce requests, 16 outstanding",
            "CPU of the server process for a request; random bytes.",
            work, unit="us", target=_TARGET,
        )  # fmt: skip


def client(settings: Settings, kafka: Any) -> Result:
    source = random.Random(7)
    values = [
        json.dumps(
            {"id": number, "user": source.randbytes(8).hex(), "text": "x" * 100}
        ).encode()
        for number in range(1_000)
    ]
    count = 300_000 if settings.quick else 600_000
    numbers = itertools.count()

    def work(port: int) -> float:
        topic = f"t{next(numbers)}"
        address = {"bootstrap.servers": f"127.0.0.1:{port}"}
        producer = kafka.Producer({**address, "queue.buffering.max.messages": count})
        for number in range(count):
            producer.produce(topic, values[number % 1_000])
        assert producer.flush(60) == 0
        consumer = kafka.Consumer(
            {**address, "group.id": topic, "auto.offset.reset": "earliest"}
        )
        consumer.subscribe([topic])
        left = count
        while left > 0:
            left -= len(consumer.consume(10_000, 1))
        consumer.close()
        return count

    with common.scratch(settings, "recording") as path:
        return _ratio(
            settings, path, "recording: confluent-kafka produces and consumes",
            "CPU of the server process for a record of 150 bytes, written and read.",
            work, unit="us", target=_TARGET,
        )  # fmt: skip


def large_responses(settings: Settings) -> Result:
    source = random.Random(7)
    size = 32 << 20
    request_type = wire.FETCH.Request
    with common.scratch(settings, "recording") as path:
        for name in ("on", "off"):
            with logcore.open_dir(path / name, create=True, durability="os") as logdir:
                logdir.create_topic("t")
                log = logdir.partition("t", 0)
                for _ in range(size // 100_000):
                    log.append(source.randbytes(100_000))
        frames = []
        for offset in range(0, size // 100_000 - 10, 10):
            partition = request_type.Topic.Partition(
                partition=0, fetch_offset=offset, partition_max_bytes=_FETCH_BYTES
            )
            topics = [request_type.Topic(topic="t", partitions=[partition])]
            request = request_type(max_wait_ms=100, min_bytes=1, topics=topics)
            frames.append(wire.encode_request(wire.FETCH, 11, 7, "bench", request))
        bursts = 8

        def work(port: int) -> float:
            for _ in range(bursts):
                shim._pipelined(port, iter(frames), len(frames), 4)
                time.sleep(_DRAIN_S)
            return bursts * len(frames)

        return _ratio(
            settings, path, "recording: fetches of 1 MB",
            "CPU of the server process for a response of 1 MB of random bytes.",
            work, unit="us", target=None,
        )  # fmt: skip
