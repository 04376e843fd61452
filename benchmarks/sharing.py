"""What does it cost that several processes write one directory, and how soon do they
see each other's records?

Method: durability="os", batches of 100 records of 100 bytes and single ones; CPU time
of this process, both sides in turns, the best of several. This process opens the
directory a second time in place of another process: the kernel treats the locks of both
separately.
- A shared log to which only this process appends, compared with a log that is not shared.
- A shared log to which two open handles append alternately, so that each reads the
  other's batches.
- CPU of a tail in another process per record, compared with the CPU of the append.
- The time from the kill of a group member, in a separate process, until another process
  has all partitions.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import common
from common import Result, Settings

import logcore
from logcore.fs import OsFS

ROWS = [(b"k%d" % number, b"x" * common.VALUE_SIZE) for number in range(100)]


def run(settings: Settings) -> Iterator[Result]:
    with common.scratch(settings, "sharing") as path:
        yield from appends(
            str(path), 300 if settings.quick else 3_000, 3 if settings.quick else 7
        )
        yield tail(str(path / "tailed-0"), 300 if settings.quick else 3_000)
        yield take_over(str(path / "data"), 2 if settings.quick else 5)


def appends(path: str, count: int, repeats: int) -> Iterator[Result]:
    with (
        logcore.open(f"{path}/plain/t-0", create=True, durability="os") as plain,
        logcore.open(
            f"{path}/shared/t-0", create=True, durability="os", shared=True
        ) as shared,
        logcore.open(
            f"{path}/two/t-0", create=True, durability="os", shared=True, fs=OsFS()
        ) as first,
        logcore.open(
            f"{path}/two/t-0", create=True, durability="os", shared=True, fs=OsFS()
        ) as other,
    ):
        calls: dict[str, Callable[[logcore.Log], object]] = {
            "100 a call": lambda log: log.append_many(ROWS),
            "1 a call": lambda log: log.append(b"x" * common.VALUE_SIZE, key=b"k"),
        }
        for size, call in calls.items():
            sides = {
                "plain": [plain, plain],
                "shared": [shared, shared],
                "alternating": [first, other],
            }
            spent: dict[str, list[float]] = {name: [] for name in sides}
            gc.disable()
            for _ in range(repeats):
                gc.collect()
                for name, logs in sides.items():
                    started = time.process_time()
                    for number in range(count):
                        call(logs[number % 2])
                    spent[name].append(time.process_time() - started)
            gc.enable()
            best = {name: min(times) for name, times in spent.items()}
            for name, target in (
                ("shared", 1.5 if size == "100 a call" else None),
                ("alternating", None),
            ):
                yield Result(
                    question=f"append, {size}, {name}",
                    unit="us/call",
                    ours=best[name] / count * 1e6,
                    peer_name="not shared",
                    peer=best["plain"] / count * 1e6,
                    ratio=best[name] / best["plain"],
                    turns=common.ratios(spent[name], spent["plain"]),
                    target=target,
                    bound="at most",
                    method="CPU time; the ratio is the cost, so that less is better.",
                )


def tail(path: str, count: int) -> Result:
    with (
        logcore.open(path, create=True, durability="os") as log,
        logcore.open(path, read_only=True) as reader,
    ):
        following = reader.tail(0)
        waking = 0.0
        writing = 0.0
        for _ in range(count):
            started = time.process_time()
            log.append(b"x" * common.VALUE_SIZE)
            written = time.process_time()
            next(following)
            waking += time.process_time() - written
            writing += written - started
    return Result(
        question="a tail elsewhere takes a record",
        unit="us/record",
        ours=waking / count * 1e6,
        peer_name="the append",
        peer=writing / count * 1e6,
        ratio=waking / writing,
        target=None,
        method="CPU time; the ratio is the cost, so that less is better.",
    )


def take_over(path: str, repeats: int) -> Result:
    context = multiprocessing.get_context("fork")
    times = []
    with logcore.open_dir(path, create=True, shared=True) as directory:
        directory.create_topic("t", partitions=4)
        with directory.consumer(group_id="g") as consumer:
            consumer.subscribe(["t"])
            for _ in range(repeats):
                here, there = context.Pipe()
                other = context.Process(target=_member, args=(path, there), daemon=True)
                other.start()
                while not here.poll() or len(consumer.assignment()) != 2:
                    consumer.poll(0.005)
                started = time.perf_counter()
                assert other.pid is not None
                os.kill(other.pid, signal.SIGKILL)
                while len(consumer.assignment()) != 4:
                    consumer.poll(0.005)
                times.append(time.perf_counter() - started)
                other.join()
    found_ms = sorted(times)[len(times) // 2] * 1e3
    method = (
        "Wall time from kill -9 until the other member has all partitions, the median."
    )
    return common.in_time("a killed member is replaced", "ms", found_ms, 200.0, method)


def _member(path: str, there: Connection) -> None:
    with (
        logcore.open_dir(path, shared=True) as directory,
        directory.consumer(group_id="g") as consumer,
    ):
        consumer.subscribe(["t"])
        while len(consumer.assignment()) != 2:
            consumer.poll(0.05)
        there.send("joined")
        while True:
            consumer.poll(0.05)
