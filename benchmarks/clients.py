"""What does a record cost a consumer and a producer of this process, beside
confluent-kafka?

Method of the consumer: 200,000 records (20,000 with --quick) of 100 bytes in one
partition. Ours is LogDir.consumer(), with a group and without auto-commit; the peer is
confluent-kafka's consume(10000), whose broker is a netshim in a process of its own over
a copy of the directory. Both sides in turns, without the garbage collector; CPU time of
this process, the peer's own threads included.
- Lists: poll(), 10,000 records at most.
- One by one: the iteration.
- Columns: poll_columns().

Method of the producer: 20,000 records (5,000 with --quick) of 100 bytes to one
partition, linger_ms=5, acks=1, a directory under durability="os"; the peer is
confluent-kafka's produce() with on_delivery to librdkafka's mock cluster, which is in
this process too. Both sides in turns, each ends with flush(); the best of several.
- send() with its future, send() with a callback, and send_many() and send_columns() of
  1,000 records.
- logcore.aio's send() with 100 records outstanding: the oldest is awaited before the
  next is sent. The peers are the plain send() with as many records outstanding,
  asyncio.wrap_future() of its future, and asyncio.to_thread(send) with a hundred calls
  at once.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import common
import numpy as np
from common import Result, Settings

import logcore
from logcore import aio
from logcore.consumer import Consumer
from logcore.producer import RecordFuture

AT_ONCE = 10_000
#: Number of outstanding records in an event loop.
OUTSTANDING = 100


def run(settings: Settings) -> Iterator[Result]:
    if common.peer("confluent_kafka", "confluent-kafka") is None:
        return
    count = 20_000 if settings.quick else 200_000
    with common.scratch(settings, "clients") as path:
        ours = str(path / "data")
        with logcore.open_dir(ours, create=True) as directory:
            directory.create_topic("t")
            values = [(None, b"x" * common.VALUE_SIZE)] * AT_ONCE
            for _ in range(count // AT_ONCE):
                directory.partition("t", 0).append_many(values)
        shutil.copytree(ours, path / "copy")
        command = [
            sys.executable,
            "-m",
            "netshim",
            "serve",
            str(path / "copy"),
            "--port",
            "0",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as broker:
            try:
                assert broker.stdout is not None
                servers = broker.stdout.readline().split()[-1]
                yield from compare(ours, servers, count, 3 if settings.quick else 5)
            finally:
                broker.terminate()
        produced = 5_000 if settings.quick else 20_000
        repeats = 3 if settings.quick else 12
        yield from produce(str(path / "produced"), produced, repeats)
        yield from in_loops(str(path / "looped"), produced, repeats)


def compare(path: str, servers: str, count: int, repeats: int) -> Iterator[Result]:
    sides: dict[str, tuple[Callable[[Consumer, int], None], float]] = {
        "lists": (by_lists, 8.0),
        "one by one": (one_by_one, 4.0),
        "columns": (by_columns, 20.0),
    }
    with logcore.open_dir(path) as directory:
        spent: dict[str, list[float]] = {name: [] for name in (*sides, "peer")}
        gc.disable()
        for _ in range(repeats):
            gc.collect()
            for name, (side, _) in sides.items():
                group = uuid.uuid4().hex
                with directory.consumer(
                    group_id=group,
                    auto_offset_reset="earliest",
                    enable_auto_commit=False,
                ) as consumer:
                    consumer.subscribe(["t"])
                    started = time.process_time()
                    side(consumer, count)
                    spent[name].append(time.process_time() - started)
            spent["peer"].append(by_confluent(servers, count))
        gc.enable()
    best = {name: min(times) for name, times in spent.items()}
    for name, (_, target) in sides.items():
        yield Result(
            question=f"consume, {name}",
            unit="ns/record",
            ours=best[name] / count * 1e9,
            peer_name="confluent-kafka",
            peer=best["peer"] / count * 1e9,
            ratio=best["peer"] / best[name],
            turns=common.ratios(spent["peer"], spent[name]),
            target=target,
            method="CPU time beside consume(10000).",
        )


def produce(path: str, count: int, repeats: int) -> Iterator[Result]:
    from confluent_kafka import Producer as Peer

    value = b"x" * common.VALUE_SIZE
    rows = [(None, value)] * 1_000
    column = (value * 1_000, np.arange(0, 1_000 * len(value) + 1, len(value)))
    peer = Peer(
        {
            "test.mock.num.brokers": 1,
            "bootstrap.servers": "mock",
            "linger.ms": 5,
            "acks": 1,
        }
    )

    def ignore(error: object, metadata: object) -> None:
        return None

    def by_peer() -> None:
        for number in range(count):
            peer.produce("t", value, on_delivery=ignore)
            if number % 1_000 == 0:
                peer.poll(0)
        peer.flush()

    with logcore.open_dir(path, create=True, durability="os") as directory:
        directory.create_topic("t")
        with directory.producer(acks=1) as producer:

            def by_send() -> None:
                for _ in range(count):
                    producer.send("t", value)

            def by_send_with_callback() -> None:
                for _ in range(count):
                    producer.send("t", value, on_delivery=ignore)

            def by_many() -> None:
                for _ in range(count // 1_000):
                    producer.send_many("t", rows)

            def by_column() -> None:
                for _ in range(count // 1_000):
                    producer.send_columns("t", values=column)

            sides: dict[str, tuple[Callable[[], None], float | None]] = {
                "send": (by_send, 1.5),
                "send with a callback": (by_send_with_callback, None),
                "send_many": (by_many, 10.0),
                "send_columns": (by_column, None),
            }
            by_peer()
            spent: dict[str, list[float]] = {name: [] for name in (*sides, "peer")}
            gc.disable()
            for _ in range(repeats):
                gc.collect()
                for name, (side, _) in sides.items():
                    started = time.process_time()
                    side()
                    producer.flush()
                    spent[name].append(time.process_time() - started)
                started = time.process_time()
                by_peer()
                spent["peer"].append(time.process_time() - started)
            gc.enable()
    best = {name: min(times) for name, times in spent.items()}
    for name, (_, target) in sides.items():
        yield Result(
            question=f"produce, {name}",
            unit="ns/record",
            ours=best[name] / count * 1e9,
            peer_name="confluent-kafka, mock cluster",
            peer=best["peer"] / count * 1e9,
            ratio=best["peer"] / best[name],
            turns=common.ratios(spent["peer"], spent[name]),
            target=target,
            method="CPU time beside produce() with on_delivery.",
        )


def in_loops(path: str, count: int, repeats: int) -> Iterator[Result]:
    """Measure the cost of futures in an event loop."""
    value = b"x" * common.VALUE_SIZE

    async def by_aio(data: aio.LogDir) -> None:
        async with data.producer(acks=1) as producer:
            await window(count, lambda: producer.send("t", value))

    async def by_wrapping(data: aio.LogDir) -> None:
        with data.sync.producer(acks=1) as producer:

            async def send() -> asyncio.Future[Any]:
                return asyncio.wrap_future(producer.send("t", value))

            await window(count, send)

    async def by_threads(data: aio.LogDir) -> None:
        with data.sync.producer(acks=1) as producer:
            for _ in range(count // OUTSTANDING):
                await asyncio.gather(
                    *(
                        asyncio.to_thread(producer.send, "t", value)
                        for _ in range(OUTSTANDING)
                    )
                )

    async def by_send(data: aio.LogDir) -> None:
        with data.sync.producer(acks=1) as producer:
            waiting: deque[RecordFuture] = deque()
            for _ in range(count):
                waiting.append(producer.send("t", value))
                if len(waiting) == OUTSTANDING:
                    waiting.popleft().result()
            producer.flush()

    sides = {
        "send": by_send,
        "aio.send": by_aio,
        "wrap_future": by_wrapping,
        "to_thread": by_threads,
    }
    best = dict.fromkeys(sides, float("inf"))

    async def measure() -> None:
        async with aio.open_dir(path, create=True, durability="os") as data:
            await data.create_topic("t")
            gc.disable()
            for _ in range(repeats):
                for name, side in sides.items():
                    gc.collect()
                    started = time.process_time()
                    await side(data)
                    best[name] = min(best[name], time.process_time() - started)
            gc.enable()

    asyncio.run(measure())
    each = {name: seconds / count * 1e9 for name, seconds in best.items()}
    yield Result(
        question="produce, aio.send, 100 outstanding",
        unit="ns/record",
        ours=each["aio.send"],
        peer_name="send",  # with as many outstanding
        peer=each["send"],
        ratio=(each["aio.send"] - each["send"]) / 1_000,
        target=3.0,
        bound="at most",
        ratio_unit=" us more",
        method="CPU time; in both the oldest future is waited for before the next record is sent.",
    )
    for name in ("wrap_future", "to_thread"):
        yield Result(
            question=f"produce, aio.send beside {name}",
            unit="ns/record",
            ours=each["aio.send"],
            peer_name=f"send and asyncio.{name}",
            peer=each[name],
            ratio=each[name] / each["aio.send"],
            method="CPU time, 100 outstanding.",
        )


async def window(
    count: int, send: Callable[[], Awaitable[asyncio.Future[Any]]]
) -> None:
    """Send records, and await the oldest when the window of outstanding records is full."""
    waiting: deque[asyncio.Future[Any]] = deque()
    for _ in range(count):
        waiting.append(await send())
        if len(waiting) == OUTSTANDING:
            await waiting.popleft()
    for future in waiting:
        await future


def by_lists(consumer: Consumer, count: int) -> None:
    seen = 0
    while seen < count:
        seen += consumer.poll(1, AT_ONCE).count


def one_by_one(consumer: Consumer, count: int) -> None:
    for seen, _ in enumerate(consumer, 1):
        if seen == count:
            return


def by_columns(consumer: Consumer, count: int) -> None:
    seen = 0
    while seen < count:
        for found in consumer.poll_columns(1).values():
            seen += sum(len(record_columns.offsets) for record_columns in found)


def by_confluent(servers: str, count: int) -> float:
    from confluent_kafka import Consumer as Peer

    options = {
        "bootstrap.servers": servers,
        "group.id": uuid.uuid4().hex,
        "auto.offset.reset": "earliest",
    }
    peer = Peer({**options, "enable.auto.commit": False})
    peer.subscribe(["t"])
    try:
        first = peer.consume(1, 30)
        started = time.process_time()
        seen = len(first)
        while seen < count:
            seen += len(peer.consume(AT_ONCE, 1))
        return time.process_time() - started
    finally:
        peer.close()
