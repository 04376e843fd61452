"""How long do pages of the console take, and what do they cost a broker?

Method:
- The topic has one partition with 6 GB (quick: 600 MB) of JSON records of about 300
  bytes, without compression, in segments of 1 GiB. A page is one HTTP request to a
  console in a process of its own; the median of requests at random places counts.
- Pages with a cold cache follow a call that drops the topic from the page cache.
- Search: for a text that no record contains, in 600 MB, beside `logcore read | grep`. The
  search follows its links to the end.
- List: topics with 10,000 partitions, of which each tenth has records. The first request
  after the start counts, with its continuations until all partitions are counted, and a
  later one.
- Broker: small Produce requests to a broker that also serves the console in its process,
  with and without a page of messages each 0.2 s. The 99th percentile counts.
- Idle: small Produce requests to a broker with a console and a registry without requests,
  beside one without them. The processor time of the broker for each request counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import common
from common import Result, Settings

import logcore

_BATCH_ROWS: Final = 50
_GIB: Final = 1 << 30


def run(settings: Settings) -> Iterator[Result]:
    size_bytes = 600_000_000 if settings.quick else 6_000_000_000
    with common.scratch(settings, "console") as path:
        with console_of(_filled(path / "large", size_bytes)) as get:
            yield from _pages(get, path / "large", size_bytes)
        yield from _search(settings, _filled(path / "searched", 600_000_000))
    with common.scratch(settings, "console") as path:
        count = 1_000 if settings.quick else 10_000
        yield from _list(_many(path / "many", count), count)
    with common.scratch(settings, "console") as path:
        yield _broker(settings, path)
        yield _idle(settings, path)


def _filled(path: Path, size_bytes: int) -> Path:
    """Create a topic of this size, with a record each millisecond."""
    choice = random.Random(1)
    keys = [f"order-{choice.randrange(10**6):06d}".encode() for _ in range(_BATCH_ROWS)]
    values = [
        json.dumps({"id": choice.getrandbits(60), "note": choice.randbytes(120).hex()})
        for _ in range(_BATCH_ROWS)
    ]
    rows = [(key, value.encode()) for key, value in zip(keys, values, strict=True)]
    with logcore.open_dir(path, create=True, durability="os") as logdir:
        logdir.create_topic("orders", 1, {"segment.bytes": _GIB, "retention.ms": -1})
        log = logdir.partition("orders", 0)
        now_ms = common.NOW_MS
        while log.statistics().size_bytes < size_bytes:
            for _ in range(1_000):
                log.append_many([(*row, (), now_ms) for row in rows])
                now_ms += _BATCH_ROWS
    return path


def _many(path: Path, count: int) -> Path:
    """Create topics with this number of partitions in all."""
    with logcore.open_dir(path, create=True, durability="os") as logdir:
        for number in range(count // 100):
            name = f"topic-{number:03d}"
            logdir.create_topic(name, 100)
            for partition in range(0, 100, 10):
                logdir.partition(name, partition).append_many([(b"k", b"v" * 100)] * 20)
    return path


@contextlib.contextmanager
def console_of(path: Path) -> Generator[Callable[[str], str], None, None]:
    """Start a console in a process, and return a function that gets a page."""
    process = subprocess.Popen(
        [sys.executable, "-m", "netshim", "console", str(path), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        yield _getter(url)
    finally:
        process.terminate()
        process.wait()


def _getter(url: str) -> Callable[[str], str]:
    def get(path: str) -> str:
        with urllib.request.urlopen(url + path) as response:
            text: str = response.read().decode()
        return text

    return get


def _timed(get: Callable[[str], str], path: str) -> float:
    started = time.perf_counter()
    get(path)
    return time.perf_counter() - started


def _pages(get: Callable[[str], str], path: Path, size_bytes: int) -> Iterator[Result]:
    choice = random.Random(2)
    with logcore.open(path / "orders-0", read_only=True) as log:
        end = log.high_watermark
    files = sorted((path / "orders-0").glob("*.log"))

    def offset() -> str:
        return f"/topics/orders/messages?from={choice.randrange(end - 100)}"

    def moment() -> str:
        place_ms = common.NOW_MS + choice.randrange(end - 100)
        seconds, rest = divmod(place_ms, 1000)
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        return f"/topics/orders/messages?from={text}.{rest:03d}"

    amount = f"{size_bytes / 1e9:g} GB"
    for name, address in (("offset", offset), ("time", moment)):
        times = [_timed(get, address()) for _ in range(25)]
        cold = []
        for _ in range(5):
            for file in files:
                _drop(file)
            cold.append(_timed(get, address()))
        yield common.in_time(
            f"page of 50 messages by {name}, {amount}",
            "ms",
            statistics.median(times) * 1000,
            200,
            f"The slowest of 25 took {max(times) * 1000:.0f} ms. With a cold cache, the "
            f"median of 5 is {statistics.median(cold) * 1000:.0f} ms.",
        )
    newest = [_timed(get, "/topics/orders/messages") for _ in range(25)]
    yield common.in_time(
        f"page of the 50 newest messages, {amount}",
        "ms",
        statistics.median(newest) * 1000,
        200,
        "",
    )
    segments = [_timed(get, "/segments") for _ in range(5)]
    yield common.in_time(
        f"segment map, {amount}", "ms", statistics.median(segments) * 1000, 1000, ""
    )


def _drop(path: Path) -> None:
    """Remove a file from the page cache, if it is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _search(settings: Settings, path: Path) -> Iterator[Result]:
    text = "no record has this"
    command = f"{sys.executable} -m logcore read {path} orders | grep -c '{text}'"
    with console_of(path) as get:
        ours, others = [], []
        for _ in range(1 if settings.quick else 2):
            started = time.perf_counter()
            page = get(f"/topics/orders/messages?q={urllib.parse.quote_plus(text)}")
            while found := re.search(r'href="([^"]*)">Continue with older', page):
                page = get(found[1].replace("&amp;", "&"))
            ours.append(time.perf_counter() - started)
            started = time.perf_counter()
            subprocess.run(
                command, check=False, shell=True, stdout=subprocess.DEVNULL
            )  # grep finds nothing, and exits with 1
            others.append(time.perf_counter() - started)
    yield Result(
        question="search in 600 MB",
        unit="s",
        ours=min(ours),
        peer_name="logcore read | grep",
        peer=min(others),
        ratio=min(ours) / min(others),
        target=0.5,
        bound="at most",
        turns=common.ratios(ours, others),
    )


def _list(path: Path, count: int) -> Iterator[Result]:
    with console_of(path) as get:
        get("/static/console.css")
        first = _timed(get, "/")
        requests = 1
        while "This page is partial" in get("/"):
            requests += 1
        later = [_timed(get, "/") for _ in range(5)]
    yield common.in_time(
        f"list {count:,} partitions, first request",
        "ms",
        first * 1000,
        1000,
        f"Complete after {requests} requests.",
    )
    yield common.in_time(
        f"list {count:,} partitions, later",
        "ms",
        statistics.median(later) * 1000,
        1000,
        "",
    )


def _broker(settings: Settings, path: Path) -> Result:
    """Compare the latency of a broker with and without readers of the console."""
    from confluent_kafka import Producer

    _filled(path / "data", 300_000_000)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "netshim", "serve", str(path / "data")),
            *("--port", "0", "--console", "0", "--durability", "os"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        get = _getter(process.stdout.readline().split()[-1])
        producer = Producer({"bootstrap.servers": address, "linger.ms": 0})

        def latencies(seconds: float) -> list[float]:
            found = []
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                started = time.perf_counter()
                producer.produce("small", b"x" * 100)
                producer.flush()
                found.append(time.perf_counter() - started)
            return found

        latencies(0.5)
        seconds = 2.0 if settings.quick else 6.0
        quiet, busy = [], []
        for _ in range(3):
            quiet += latencies(seconds)
            ending = threading.Event()
            reader = threading.Thread(target=_read_until, args=(get, ending))
            reader.start()
            busy += latencies(seconds)
            ending.set()
            reader.join()
    finally:
        process.terminate()
        process.wait()
    high = [statistics.quantiles(entry, n=100)[98] * 1000 for entry in (quiet, busy)]
    middle = [statistics.median(entry) * 1000 for entry in (quiet, busy)]
    return Result(
        question="produce beside readers of the console, p99",
        unit="ms",
        ours=high[1],
        peer_name="without readers",
        peer=high[0],
        ratio=high[1] / high[0],
        target=1.5,
        bound="at most",
        method=f"Medians: {middle[1]:.2f} ms and {middle[0]:.2f} ms. The processes share "
        "the cores with the reader.",
    )


def _idle(settings: Settings, path: Path) -> Result:
    """Compare the processor time of brokers with and without console and registry."""
    count = 2_000 if settings.quick else 10_000
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(_loaded_broker(path / "off", [])),
            stack.enter_context(
                _loaded_broker(
                    path / "on", ["--console", "0", "--schema-registry", "0"]
                )
            ),
        ]
        took: list[list[float]] = [[], []]
        for turn in range(2 * 5):
            for side in (0, 1) if turn % 2 else (1, 0):
                took[side].append(sides[side](count))
    off, on = map(statistics.median, took)
    return Result(
        question="processor time of a Produce request beside an idle console",
        unit="µs",
        ours=on * 1e6,
        peer_name="without console and registry",
        peer=off * 1e6,
        ratio=on / off,
        turns=common.ratios(took[1], took[0]),
        method=f"{count:,} requests of 100 bytes in each of 10 turns. Median.",
    )


@contextlib.contextmanager
def _loaded_broker(
    path: Path, options: list[str]
) -> Generator[Callable[[int], float], None, None]:
    """Give a function that sends requests, and returns the processor time of each."""
    from confluent_kafka import Producer

    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "netshim", "serve", str(path), "--port", "0"),
            *("--durability", "os", *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    producer = Producer({"bootstrap.servers": address, "linger.ms": 0})

    def used_s() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2]
        ticks = sum(map(int, fields.split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def send(count: int) -> float:
        before = used_s()
        for _ in range(count):
            producer.produce("small", b"x" * 100)
            producer.flush()
        return (used_s() - before) / count

    send(500)
    try:
        yield send
    finally:
        process.terminate()
        process.communicate()


def _read_until(get: Callable[[str], str], ending: threading.Event) -> None:
    while not ending.wait(0.2):
        get("/topics/orders/messages?from=oldest")
