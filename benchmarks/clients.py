"""What does a record cost a consumer and a producer of this process, beside confluent-kafka?

Method of the consumer: 200,000 records (20,000 with --quick) of 100 bytes in one partition. Ours is LogDir.consumer(),
with a group and without auto-commit; the peer is confluent-kafka's consume(10000), whose broker is a netshim in a
process of its own over a copy of the directory. Both sides in turns, without the garbage collector; CPU time of
this process, the peer's own threads included.
- Lists: poll(), 10,000 records at most.
- One by one: the iteration.
- Columns: poll_columns().

Method of the producer: 20,000 records (5,000 with --quick) of 100 bytes to one partition, linger_ms=5, acks=1, a
directory under durability="os"; the peer is confluent-kafka's produce() with on_delivery to librdkafka's mock cluster,
which is in this process too. Both sides in turns, each ends with flush(); the best of several.
- send(), with its future. The same with a callback. send_many() and send_columns() of 1,000 records.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import common
import numpy as np
from common import Result, Settings

import logcore
from logcore.consumer import Consumer

AT_ONCE = 10_000


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
        command = [sys.executable, "-m", "netshim", "serve", str(path / "copy"), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as broker:
            try:
                assert broker.stdout is not None
                servers = broker.stdout.readline().split()[-1]
                yield from compare(ours, servers, count, 3 if settings.quick else 5)
            finally:
                broker.terminate()
        yield from produce(str(path / "produced"), 5_000 if settings.quick else 20_000, 3 if settings.quick else 12)


def compare(path: str, servers: str, count: int, repeats: int) -> Iterator[Result]:
    sides: dict[str, tuple[Callable[[Consumer, int], None], float]] = {
        "lists": (by_lists, 8.0),
        "one by one": (one_by_one, 4.0),
        "columns": (by_columns, 20.0),
    }
    with logcore.open_dir(path) as directory:
        best = dict.fromkeys([*sides, "peer"], float("inf"))
        gc.disable()
        for _ in range(repeats):
            gc.collect()
            for name, (side, _) in sides.items():
                group = uuid.uuid4().hex
                with directory.consumer(
                    group_id=group, auto_offset_reset="earliest", enable_auto_commit=False
                ) as consumer:
                    consumer.subscribe(["t"])
                    started = time.process_time()
                    side(consumer, count)
                    best[name] = min(best[name], time.process_time() - started)
            best["peer"] = min(best["peer"], by_confluent(servers, count))
        gc.enable()
    for name, (_, target) in sides.items():
        yield Result(
            question=f"consume, {name}",
            unit="ns/record",
            ours=best[name] / count * 1e9,
            peer_name="confluent-kafka",
            peer=best["peer"] / count * 1e9,
            ratio=best["peer"] / best[name],
            target=target,
            method="CPU time beside consume(10000).",
        )


def produce(path: str, count: int, repeats: int) -> Iterator[Result]:
    from confluent_kafka import Producer as Peer

    value = b"x" * common.VALUE_SIZE
    rows = [(None, value)] * 1_000
    column = (value * 1_000, np.arange(0, 1_000 * len(value) + 1, len(value)))
    peer = Peer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "linger.ms": 5, "acks": 1})

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
            best = dict.fromkeys([*sides, "peer"], float("inf"))
            gc.disable()
            for _ in range(repeats):
                gc.collect()
                for name, (side, _) in sides.items():
                    started = time.process_time()
                    side()
                    producer.flush()
                    best[name] = min(best[name], time.process_time() - started)
                started = time.process_time()
                by_peer()
                best["peer"] = min(best["peer"], time.process_time() - started)
            gc.enable()
    for name, (_, target) in sides.items():
        yield Result(
            question=f"produce, {name}",
            unit="ns/record",
            ours=best[name] / count * 1e9,
            peer_name="confluent-kafka, mock cluster",
            peer=best["peer"] / count * 1e9,
            ratio=best["peer"] / best[name],
            target=target,
            method="CPU time beside produce() with on_delivery.",
        )


def by_lists(consumer: Consumer, count: int) -> None:
    seen = 0
    while seen < count:
        seen += consumer.poll(1000, AT_ONCE).count


def one_by_one(consumer: Consumer, count: int) -> None:
    for seen, _ in enumerate(consumer, 1):
        if seen == count:
            return


def by_columns(consumer: Consumer, count: int) -> None:
    seen = 0
    while seen < count:
        for found in consumer.poll_columns(1000).values():
            seen += sum(len(one.offsets) for one in found)


def by_confluent(servers: str, count: int) -> float:
    from confluent_kafka import Consumer as Peer

    options = {"bootstrap.servers": servers, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
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
