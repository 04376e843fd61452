"""How fast are processes that share a directory: their appends to disk, notifications,
groups, commits and registry?

Method: real processes. Rows that wait use wall time; rows of costs use CPU time. The
sides take turns, and the median counts.
- Four processes append batches of 100 records of 100 bytes at level "disk", each for
  the same time, beside a single process.
- A tail in another process reads the steady clock when a record arrives. The record
  contains the time before its append ("os"). The CPU time is measured in the
  process with the tail, for each record.
- Four running processes join a group at once. The time ends when each has its share of
  12 partitions.
- A member is stopped by SIGSTOP. The time ends when another process has all partitions.
- 64 threads commit for 64 groups, in a directory that this process has for itself and
  in a shared one, and one consumer commits without waiting; beside a write and an
  fdatasync for each.
- set() of an ephemeral node and of a group's node, beside a file that is written and
  renamed.
- The time from a start until committed offsets are loaded, beside a scan of the same
  log.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
from common import Result, Settings

import logcore
from logcore.coordinators.stored_offsets import stored_groups
from logcore.format.group_records import Committed, commit_key, commit_value
from logcore.registry import open_registry

ROWS = [(b"k%d" % number, b"x" * common.VALUE_SIZE) for number in range(100)]
PROCESSES = 4
PARTITIONS = 12
THREADS = 64
INTERVAL_MS = 1_000
#: Earlier figure of a tail that did not keep its position: the middle of 233 to 309
#: microseconds.
_EARLIER_WAKE_US = 270.0
_CONTEXT = multiprocessing.get_context("fork")


def run(settings: Settings) -> Iterator[Result]:
    few = settings.quick
    with common.scratch(settings, "members") as path:
        yield disk_rates(path / "disk", 0.5 if few else 2.0, 3 if few else 5)
        yield from news(str(path / "news"), 300 if few else 2_000)
        yield forming(path / "forming", 3 if few else 7)
        yield stopped(str(path / "stopped"), 2 if few else 3)
        yield from commits(path, 2_000 if few else 20_000)
        yield from nodes(path / "nodes", 200 if few else 1_000)
        yield loading(path / "loading", 50_000 if few else 1_000_000)


class Child:
    """A forked process that reports that it is ready, waits for a message, and answers."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        self.here, there = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=body, args=(there, *arguments), daemon=True
        )
        self.process.start()
        assert self.here.recv() == "ready"

    def begin(self) -> None:
        self.here.send("go")

    def send(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.send(signal.SIGKILL)
        self.process.join()


# -- appends ---------------------------------------------------------------------------


def disk_rates(path: Path, seconds: float, repeats: int) -> Result:
    with logcore.open_dir(path, create=True, shared=True) as data:
        data.create_topic("t")
    rates: dict[int, list[float]] = {1: [], PROCESSES: []}
    for _ in range(repeats):
        for count, found in rates.items():
            children = [Child(_append, str(path), seconds) for _ in range(count)]
            for child in children:
                child.begin()
            found.append(sum(child.here.recv() for child in children) / seconds)
            for child in children:
                child.process.join()
    median = statistics.median(rates[1])
    four = statistics.median(rates[PROCESSES])
    return Result(
        question="append at level disk, 100 a call, 4 processes",
        unit="calls/s",
        ours=four,
        peer_name="one process",
        peer=median,
        ratio=four / median,
        target=2.5,
        method="Calls of all processes in the same time.",
    )


def _append(there: Connection, path: str, seconds: float) -> None:
    with logcore.open_dir(path, shared=True) as data:
        log = data.partition("t", 0)
        there.send("ready")
        there.recv()
        until = time.monotonic() + seconds
        count = 0
        while time.monotonic() < until:
            log.append_many(ROWS, durability="disk")
            count += 1
        there.send(count)


# -- notifications ---------------------------------------------------------------------


def news(path: str, count: int) -> Iterator[Result]:
    with logcore.open_dir(path, create=True, shared=True, durability="os") as data:
        data.create_topic("t")
        log = data.partition("t", 0)
        child = Child(_follow, path, count)
        child.begin()
        for _ in range(count):
            time.sleep(0.002)  # the other process waits again before each record
            log.append(time.monotonic_ns().to_bytes(8, "big"))
        delays, cpu_us = child.here.recv()
        child.process.join()
    for name, at, target in (("p50", 0.5, 0.5), ("p99", 0.99, 5.0)):
        found_ms = sorted(delays)[int(at * (len(delays) - 1))] * 1e3
        question = f"an append is noticed in another process, {name}"
        method = "From before the append to the record in the other process."
        yield common.in_time(question, "ms", found_ms, target, method)
    yield Result(
        question="a tail elsewhere wakes up",
        unit="us",
        ours=cpu_us,
        peer_name="an earlier tail",
        peer=_EARLIER_WAKE_US,
        ratio=cpu_us / _EARLIER_WAKE_US,
        target=0.1,
        bound="at most",
        method="CPU time of the process that waits, for each record; the earlier figure is one of another day.",
    )


def _follow(there: Connection, path: str, count: int) -> None:
    delays = []
    with logcore.open_dir(path, read_only=True) as data:
        following = data.partition("t", 0).tail(0)
        there.send("ready")
        there.recv()
        started = time.process_time()
        for _ in range(count):
            sent = int.from_bytes(next(following).value, "big")
            delays.append((time.monotonic_ns() - sent) / 1e9)
        there.send((delays, (time.process_time() - started) / count * 1e6))


# -- groups ----------------------------------------------------------------------------


def forming(path: Path, repeats: int) -> Result:
    times = []
    for number in range(repeats):
        place = str(path / str(number))
        with logcore.open_dir(place, create=True, shared=True) as data:
            data.create_topic("t", partitions=PARTITIONS)
            children = [
                Child(_member, place, PARTITIONS // PROCESSES) for _ in range(PROCESSES)
            ]
            started = time.perf_counter()
            for child in children:
                child.begin()
            for child in children:
                assert child.here.recv() == "divided"
            times.append(time.perf_counter() - started)
            for child in children:
                child.end()
    found_ms = statistics.median(times) * 1e3
    method = "From the first subscribe() until each has its share."
    return common.in_time("4 processes form a group", "ms", found_ms, 200.0, method)


def _member(there: Connection, path: str, share: int) -> None:
    with (
        logcore.open_dir(path, shared=True) as data,
        data.consumer(group_id="g", max_poll_interval_ms=INTERVAL_MS) as consumer,
    ):
        there.send("ready")
        there.recv()
        consumer.subscribe(["t"])
        while len(consumer.assignment()) != share:
            consumer.poll(0.005)
        there.send("divided")
        while True:
            consumer.poll(0.05)


def stopped(path: str, repeats: int) -> Result:
    times = []
    with logcore.open_dir(path, create=True, shared=True) as data:
        data.create_topic("t", partitions=PARTITIONS)
        with data.consumer(group_id="g", max_poll_interval_ms=INTERVAL_MS) as consumer:
            consumer.subscribe(["t"])
            for _ in range(repeats):
                child = Child(_member, path, PARTITIONS // 2)
                child.begin()
                while (
                    not child.here.poll()
                    or len(consumer.assignment()) != PARTITIONS // 2
                ):
                    consumer.poll(0.005)
                child.send(signal.SIGSTOP)
                started = time.perf_counter()
                while len(consumer.assignment()) != PARTITIONS:
                    consumer.poll(0.005)
                times.append(time.perf_counter() - started)
                child.end()
    found_ms = statistics.median(times) * 1e3
    method = "From SIGSTOP until the other member has all partitions."
    limit = "max_poll_interval_ms + 200"
    return common.in_time(
        "a stopped member is replaced",
        "ms",
        found_ms,
        INTERVAL_MS + 200.0,
        method,
        limit_name=limit,
    )


# -- commits ---------------------------------------------------------------------------


def commits(path: Path, count: int) -> Iterator[Result]:
    alone = _synced_writes(path / "plain", count // 20)
    for name, shared in (("", False), (", shared directory", True)):
        rate = _committing(
            str(path / f"commits-{shared}"),
            count if not shared else count // 10,
            shared=shared,
        )
        method = "Each thread commits for a group of its own."
        yield _commit_rate(
            f"commits of 64 threads{name}",
            rate,
            alone,
            None if shared else 20.0,
            method,
        )
    for name, shared in (("", False), (", shared directory", True)):
        rate = _committing_without_waiting(
            str(path / f"waiting-{shared}"), count * 5, shared=shared
        )
        method = "One consumer; a thousand are stored at a time, until the last one is on disk."
        yield _commit_rate(
            f"commit_async of one thread{name}",
            rate,
            alone,
            None if shared else 80.0,
            method,
        )


def _commit_rate(
    question: str, rate: float, alone: float, target: float | None, method: str
) -> Result:
    return Result(
        question=question,
        unit="commits/s",
        ours=rate,
        peer_name="a write and fdatasync each",
        peer=alone,
        ratio=rate / alone,
        target=target,
        method=method,
    )


def _synced_writes(path: Path, count: int) -> float:
    with open(path, "wb", buffering=0) as file:
        started = time.perf_counter()
        for _ in range(count):
            file.write(b"x" * 150)
            os.fdatasync(file.fileno())
        return count / (time.perf_counter() - started)


def _committing(path: str, count: int, *, shared: bool) -> float:
    each = max(1, count // THREADS)
    with logcore.open_dir(path, create=True, shared=shared) as data:
        data.create_topic("t")
        data.append("t", b"1", partition=0)
        consumers = [
            data.consumer(group_id=f"g{number}", enable_auto_commit=False)
            for number in range(THREADS)
        ]
        for consumer in consumers:
            consumer.assign([("t", 0)])
            consumer.commit({("t", 0): 0})

        def commit(consumer: logcore.Consumer) -> None:
            for number in range(each):
                consumer.commit({("t", 0): number % 2})

        threads = [
            threading.Thread(target=commit, args=(consumer,)) for consumer in consumers
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        for consumer in consumers:
            consumer.close()
    return each * THREADS / seconds


def _committing_without_waiting(path: str, count: int, *, shared: bool) -> float:
    heard = []
    with logcore.open_dir(path, create=True, shared=shared) as data:
        data.create_topic("t")
        with data.consumer(group_id="g", enable_auto_commit=False) as consumer:
            consumer.assign([("t", 0)])
            consumer.commit({("t", 0): 0})
            started = time.perf_counter()
            for number in range(count):
                consumer.commit_async(
                    {("t", 0): number % 2}, lambda error, _: heard.append(error)
                )
            consumer.commit({("t", 0): 0})
            seconds = time.perf_counter() - started
    assert heard == [None] * count
    return count / seconds


# -- the registry ----------------------------------------------------------------------


def nodes(path: Path, count: int) -> Iterator[Result]:
    value = b"x" * 1_000
    path.mkdir()
    with open_registry(path / "data") as registry:
        registry.create("/owners/one", value, ephemeral=True)
        registry.create("/consumers/g/group", value)

        def rename() -> None:
            with open(path / "new", "wb", buffering=0) as file:
                file.write(value)
            os.rename(path / "new", path / "old")

        sides: dict[str, Callable[[], object]] = {
            "an ephemeral node": lambda: registry.set("/owners/one", value),
            "a group's node": lambda: registry.set("/consumers/g/group", value),
            "rename": rename,
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(count):
            for name, side in sides.items():
                started = time.perf_counter()
                side()
                times[name].append(time.perf_counter() - started)
    renames = times.pop("rename")
    peer = statistics.median(renames)
    for name, found in times.items():
        ours = statistics.median(found)
        yield Result(
            question=f"registry: set {name}",
            unit="us",
            ours=ours * 1e6,
            peer_name="replace by rename",
            peer=peer * 1e6,
            ratio=peer / ours,
            turns=common.ratios(renames, found),
            target=20.0,
            method="1,000 bytes, not synced.",
        )


def loading(path: Path, count: int) -> Result:
    """Measure the load of `count` commits by 1,000 groups, for 10 partitions each."""
    with logcore.open_dir(path, create=True, durability="os") as data:
        data.create_topic("__consumer_offsets")
        log = data.partition("__consumer_offsets", 0)
        at = 0
        while at < count:
            rows = []
            for number in range(at, min(at + 1_000, count)):
                key = commit_key(f"g{number % 1_000}", "t", number // 1_000 % 10)
                rows.append(
                    (key, commit_value(Committed(number, -1, "", common.NOW_MS)))
                )
            log.append_many(rows)
            at += len(rows)
        started = time.perf_counter()
        found = stored_groups([log])
        ours = time.perf_counter() - started
        started = time.perf_counter()
        for columns in log.scan(0):
            columns.keys()
            columns.values()
        scan = time.perf_counter() - started
    assert len(found.offsets) == 1_000
    return Result(
        question=f"load {common.figure(count)} commits",
        unit="ms",
        ours=ours * 1e3,
        peer_name="a scan to keys and values",
        peer=scan * 1e3,
        ratio=ours / scan,
        target=None,
        method="The ratio is the cost, so that less is better.",
    )
