"""What does a record cost a consumer of this process, beside confluent-kafka, which asks a broker for the same?

Method: 200,000 records (20,000 with --quick) of 100 bytes in one partition. Ours is LogDir.consumer(), with a group
and without auto-commit; the peer is confluent-kafka's consume(10000), whose broker is a netshim in a process of its own
over a copy of the directory. Both sides in turns, without the garbage collector; CPU time of
this process, the peer's own threads included.
- Lists: poll(), 10,000 records at most.
- One by one: the iteration.
- Columns: poll_columns().
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
