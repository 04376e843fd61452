"""Does the cost of a unit of work grow with a log, or with the number of partitions,
connections, groups and keys?

Method: the sizes exist at the same time and take turns. The cost of a unit at the large
size is divided by its cost at the small one; the figure of a size is its best turn.
- Logs of 10 MB, 1 GB and 8 GB with default settings: appends of one record,
  append_many of 1,000 records, both at level os, and log.get of random offsets in
  sealed segments, in ns per record. The 8 GB log is omitted with --quick, and if less
  than 20 GB are free. Random reads of a large log miss the processor's caches and its
  TLB more often, as reads of any large memory do.
- 10,000 partitions beside 100: a Produce and a Fetch request of one record each, to one
  partition after the other, as many requests at both sizes. CPU of a broker without
  sockets in this process, and CPU of a `netshim serve` process and time per request of
  a client on the same core with one request outstanding. Then the anonymous memory of
  that process for each partition that was written to, of the second half of them beside
  the first half, and the time to open each of them.
- 2,000 connections beside 20, with broker and client on one core: CPU of the process to
  accept a connection, answer one request and close the connection, as many connections
  at both sizes; memory for each; a Produce request on one of them while the others are
  idle, and on one after the other.
- 100,000 groups of one member each beside 1,000: CPU of a broker without sockets for a
  join of the classic protocol, a heartbeat and a commit, of one group after the other,
  memory for each, and the time to read them after a start.
- 100 million different keys beside 1 million: compaction of a log in which a tenth of
  the keys have a newer record, CPU and time for each record, with memory for all keys;
  and with the default limit of 128 MiB, which needs several rounds. Each round reads and
  writes the result of the rounds before it.

Not shown: logs larger than the page cache.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import common
import groups
import life
import numpy as np
from brokers import Served, exchange, netshim
from common import Result, Settings

import logcore
from logcore import recordbatch
from logcore.cleaner import CleaningReport, clean
from logcore.config import DEDUPE_BYTES
from netshim import wire
from netshim.broker import Broker
from netshim.scheduling import PendingResponse
from netshim.session import ClientSession
from netshim.settings import Settings as BrokerSettings

SIZES: Final = {"10 MB": 10_000_000, "1 GB": 1_000_000_000, "8 GB": 8_000_000_000}
FREE_BYTES: Final = 20_000_000_000
CALL_ROWS: Final = 1_000
READS: Final = 1_000
_TARGET: Final = 1.2
_TURNS: Final = 5
#: Turns that open and close all partitions.
_OPENINGS: Final = 3
#: Number of requests at both sizes, for each partition of the large one.
_REQUESTS_A_PARTITION: Final = 3
_SESSION_MS: Final = 600_000
#: The records have a fixed timestamp, so retention would delete them.
_KEPT: Final = {"retention.ms": -1}
#: Memory of the table of keys: enough for 100 million keys while it grows.
_TABLE_BYTES: Final = 6 << 30


def run(settings: Settings) -> Iterator[Result]:
    life.lift_file_limit()
    yield from _log_sizes(settings)
    counts = (10, 1_000) if settings.quick else (100, 10_000)
    with common.scratch(settings, "growth") as path:
        yield from _partitions(path, counts)
    counts = (2, 200) if settings.quick else (20, 2_000)
    with common.scratch(settings, "growth") as path, _one_core():
        yield from _connections(path, counts)
    counts = (100, 10_000) if settings.quick else (1_000, 100_000)
    with common.scratch(settings, "growth") as path:
        yield from _groups(path, counts)
    few = 10_000 if settings.quick else 1_000_000
    yield from _keys(settings, (few, 100 * few), _TABLE_BYTES)
    # The table has a slot of 24 bytes for each key, and a third more.
    yield from _keys(settings, (few, 100 * few), DEDUPE_BYTES * few // 1_000_000)


def _log_sizes(settings: Settings) -> Iterator[Result]:
    sizes = dict(SIZES)
    settings.directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(settings.directory).free
    if settings.quick or free < FREE_BYTES:
        print(
            f"skipping the 8 GB log: {'--quick' if settings.quick else f'only {free / 1e9:.0f} GB are free'}"
        )
        del sizes["8 GB"]
    rows = common.make_rows(20_000)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(common.scratch(settings, "growth"))
        logs = {}
        for number, (name, size) in enumerate(sizes.items()):
            log = stack.enter_context(
                logcore.open(path / f"log-{number}", create=True, durability="os")
            )
            common.fill(log, rows, size)
            log.roll()
            logs[name] = log
        common.settle()
        ends = {name: log.log_end_offset for name, log in logs.items()}
        jobs: dict[str, tuple[int, dict[str, Callable[[], object]]]] = {
            "random read (log.get)": (
                READS,
                {name: _reads(log, ends[name]) for name, log in logs.items()},
            ),
            "append, 1 a call": (
                1,
                {name: _appends(log, rows[0]) for name, log in logs.items()},
            ),
            "append_many, 1,000 a call": (
                CALL_ROWS,
                {
                    name: _many_appends(log, rows[:CALL_ROWS])
                    for name, log in logs.items()
                },
            ),
        }
        for job, (units, sides) in jobs.items():
            seconds = common.measure(sides, settings.repeats)
            first, *others = sides
            for name in others:
                yield Result(
                    question=f"{job}, log of {name}",
                    unit="ns",
                    ours=seconds[name] / units * 1e9,
                    peer_name=f"ns at {first}",
                    peer=seconds[first] / units * 1e9,
                    ratio=seconds[name] / seconds[first],
                    turns=seconds.ratios(name, first),
                    target=_TARGET,
                    bound="at most",
                    method=f"Time for each record, beside the same log at {first}.",
                )


def _reads(log: logcore.Log, end: int) -> Callable[[], None]:
    """Return a function that reads at new random places on each call."""
    source = random.Random(5)
    places = [[source.randrange(end) for _ in range(READS)] for _ in range(64)]
    turns = itertools.cycle(places)

    def read() -> None:
        get = log.get
        for offset in next(turns):
            get(offset)

    return read


def _appends(log: logcore.Log, row: tuple[bytes, bytes]) -> Callable[[], object]:
    key, value = row
    return lambda: log.append(value, key=key)


def _many_appends(
    log: logcore.Log, rows: list[tuple[bytes, bytes]]
) -> Callable[[], object]:
    return lambda: log.append_many(rows)


# -- units -----------------------------------------------------------------------------


def _row(
    question: str,
    unit: str,
    scale: float,
    figures: dict[int, list[float]],
    method: str = "",
) -> Result:
    """Compare the best turns of a small and a large number; less is better."""
    few, many = figures
    ours, peer = min(figures[many]), min(figures[few])
    return Result(
        question=f"{question} of {many:,}",
        unit=unit,
        ours=ours * scale,
        peer_name=f"{unit} of {few:,}",
        peer=peer * scale,
        ratio=ours / peer,
        turns=common.ratios(figures[many], figures[few]),
        target=_TARGET,
        bound="at most",
        method=method,
    )


def _memory_row(things: str, count: int, anonymous: list[float]) -> Result:
    """Compare the memory for the second half of `count` things and the first half.

    `anonymous` has the memory of the process before them, after half and after all.
    """
    before, half, end = anonymous
    ours, peer = max(end - half, 1.0), max(half - before, 1.0)
    return Result(
        question=f"memory of the broker for each, {things} of {count:,}",
        unit="KB",
        ours=ours / (count - count // 2) / 1e3,
        peer_name=f"KB of the first {count // 2:,}",
        peer=peer / (count // 2) / 1e3,
        ratio=ours / peer,
        target=_TARGET,
        bound="at most",
        method="For the second half of them, beside the first half.",
    )


def _anonymous_bytes(pid: int | str = "self") -> float:
    """Return the anonymous memory of a process, as the kernel counts it in pages."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024.0


class _Broker:
    """A broker without sockets. `seconds` is the CPU time in it."""

    def __init__(self, logdir: logcore.LogDir) -> None:
        settings = BrokerSettings(max_remembered_bytes=1 << 30)
        self.broker = Broker(logdir, settings, groups.at_once)
        self.session = ClientSession("127.0.0.1", 9092, "127.0.0.1")
        self.seconds = 0.0

    def answer(self, api: wire.Api[Any, Any], version: int, request: Any) -> Any:
        frame = wire.encode_request(api, version, 1, "bench", request)
        return wire.decode_response(api, version, self.exchange(frame))[1]

    def exchange(self, frame: bytes) -> bytes:
        """Return the response to a frame, both with the size before them."""
        view = memoryview(frame)[4:]
        began = time.process_time()
        reply = self.broker.handle(self.session, view, common.NOW_MS)
        self.seconds += time.process_time() - began
        pieces = reply.value if isinstance(reply, PendingResponse) else reply
        return b"".join(pieces)[4:]


# -- partitions ------------------------------------------------------------------------


def _frames(count: int) -> dict[str, list[bytes]]:
    """Return the Produce and the Fetch requests of all partitions of the topic t."""
    batch = recordbatch.encode([(None, b"v" * common.VALUE_SIZE)], now_ms=common.NOW_MS)
    produce, fetch = wire.PRODUCE.Request, wire.FETCH.Request
    frames: dict[str, list[bytes]] = {"Produce": [], "Fetch": []}
    for number in range(count):
        part = produce.Topic.Partition(index=number, records=batch)
        data = [produce.Topic(name="t", partition_data=[part])]
        request = produce(acks=-1, timeout_ms=30_000, topic_data=data)
        frames["Produce"].append(
            wire.encode_request(wire.PRODUCE, 9, 1, "bench", request)
        )
        wanted = fetch.Topic.Partition(
            partition=number, fetch_offset=0, partition_max_bytes=1
        )
        topics = [fetch.Topic(topic="t", partitions=[wanted])]
        request = fetch(max_wait_ms=0, min_bytes=1, max_bytes=1, topics=topics)
        frames["Fetch"].append(wire.encode_request(wire.FETCH, 11, 1, "bench", request))
    return frames


def _repeat(exchange: Callable[[bytes], bytes], frames: list[bytes], most: int) -> None:
    """Send the frames in turn, `most` requests in all."""
    for frame in itertools.islice(itertools.cycle(frames), most):
        exchange(frame)


def _check(send: Callable[[bytes], bytes], frames: dict[str, list[bytes]]) -> None:
    """Check that requests to one partition are answered without an error."""
    produced = wire.decode_response(wire.PRODUCE, 9, send(frames["Produce"][0]))[1]
    assert not produced.responses[0].partition_responses[0].error_code, produced
    fetched = wire.decode_response(wire.FETCH, 11, send(frames["Fetch"][0]))[1]
    assert len(fetched.responses[0].partitions[0].records) > common.VALUE_SIZE, fetched


def _partitions(path: Path, counts: tuple[int, int]) -> Iterator[Result]:
    frames = {count: _frames(count) for count in counts}
    for count in counts:
        with logcore.open_dir(
            path / f"{count}", create=True, durability="os"
        ) as logdir:
            logdir.create_topic("t", count, _KEPT)
    with _one_core():
        yield from _served_partitions(path, frames)
    cpu: dict[str, dict[int, list[float]]] = {}
    opened: dict[int, list[float]] = {}
    most = _REQUESTS_A_PARTITION * max(counts)
    for _ in range(_OPENINGS):
        for count in counts:
            began = time.perf_counter()
            with logcore.open_dir(path / f"{count}", durability="os") as logdir:
                for number in range(count):
                    logdir.partition("t", number)
                seconds = time.perf_counter() - began
                opened.setdefault(count, []).append(seconds / count)
                broker = _Broker(logdir)
                _check(broker.exchange, frames[count])
                for name, each in frames[count].items():
                    with common.collector_off():
                        _repeat(broker.exchange, each, most)  # fills caches
                        broker.seconds = 0.0
                        _repeat(broker.exchange, each, most)
                    spent = cpu.setdefault(name, {}).setdefault(count, [])
                    spent.append(broker.seconds / most)
    for name, each in cpu.items():
        yield _row(
            f"{name} request to one, CPU in process, partitions", "us", 1e6, each
        )
    yield _row("open, for each, partitions", "us", 1e6, opened, "After a clean close.")


def _served_partitions(
    path: Path, frames: dict[int, dict[str, list[bytes]]]
) -> Iterator[Result]:
    seconds: dict[tuple[str, str], dict[int, list[float]]] = {}
    memory: list[float]
    most = _REQUESTS_A_PARTITION * max(frames)
    with contextlib.ExitStack() as stack:
        sides: dict[int, tuple[Served, socket.socket]] = {}
        for count in frames:
            served = stack.enter_context(netshim(path / f"{count}", "os"))
            sides[count] = served, stack.enter_context(_connection(served))
        for count, (_, sock) in sides.items():
            _check(partial(exchange, sock), frames[count])
        count = max(sides)
        served, sock = sides[count]
        memory = [_anonymous_bytes(served.pid)]
        for used in (count // 2, count):
            _repeat(partial(exchange, sock), frames[count]["Produce"], used)
            memory.append(_anonymous_bytes(served.pid))
        for name in ("Produce", "Fetch"):
            for _ in range(_TURNS):
                for count, (served, sock) in sides.items():
                    send = partial(exchange, sock)
                    spent = served.cpu_seconds()
                    began = time.perf_counter()
                    _repeat(send, frames[count][name], most)
                    for measure, value in (
                        ("time", time.perf_counter() - began),
                        ("CPU", served.cpu_seconds() - spent),
                    ):
                        found = seconds.setdefault((name, measure), {})
                        found.setdefault(count, []).append(value / most)
    for (name, measure), each in seconds.items():
        yield _row(f"{name} request to one, {measure}, partitions", "us", 1e6, each)
    yield _memory_row("partitions", max(frames), memory)


@contextlib.contextmanager
def _one_core() -> Generator[None]:
    """Run this process, and those that it starts, on one core.

    A request that wakes a process on another core costs it three times as much, and
    where the kernel runs the two changes within a run.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def _connection(served: Served) -> Generator[socket.socket]:
    host, _, port = served.address.rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


# -- connections -----------------------------------------------------------------------


def _connections(path: Path, counts: tuple[int, int]) -> Iterator[Result]:
    frames = _frames(1)
    frame = frames["Produce"][0]
    limit = str(10 * max(counts))
    options = "--max-connections", limit, "--max-connections-per-address", limit
    most = max(counts)
    figures: dict[str, dict[int, list[float]]] = {}
    memory: list[float] = []

    def record(question: str, count: int, value: float) -> None:
        figures.setdefault(question, {}).setdefault(count, []).append(value)

    with contextlib.ExitStack() as stack:
        sides: dict[int, Served] = {}
        for count in counts:
            with logcore.open_dir(path / f"{count}", create=True) as logdir:
                logdir.create_topic("t", 1, _KEPT)
            served = stack.enter_context(netshim(path / f"{count}", "os", *options))
            sides[count] = served
            with _connection(served) as sock:
                _check(partial(exchange, sock), frames)
        socks: dict[int, list[socket.socket]] = {}
        for count, served in sides.items():
            # The last turn of the loop has the large number.
            memory = [_anonymous_bytes(served.pid)]
            socks[count] = []
            for used in (count // 2, count):
                while len(socks[count]) < used:
                    socks[count].append(stack.enter_context(_connection(served)))
                    exchange(socks[count][-1], frame)
                memory.append(_anonymous_bytes(served.pid))
        for _ in range(_TURNS):
            for count, served in sides.items():
                for name, used in (
                    ("Produce on one, the others idle", socks[count][:1]),
                    ("Produce on one after the other", socks[count]),
                ):
                    spent = served.cpu_seconds()
                    began = time.perf_counter()
                    for sock in itertools.islice(itertools.cycle(used), 2 * most):
                        exchange(sock, frame)
                    taken = time.perf_counter() - began
                    spent = served.cpu_seconds() - spent
                    record(f"{name}, time, connections", count, taken / 2 / most)
                    record(f"{name}, CPU, connections", count, spent / 2 / most)
        for sock in itertools.chain(*socks.values()):
            sock.close()
        for _ in range(_TURNS):
            for count, served in sides.items():
                spent = served.cpu_seconds()
                for _ in range(most // count):
                    with contextlib.ExitStack() as batch:
                        for _ in range(count):
                            exchange(batch.enter_context(_connection(served)), frame)
                time.sleep(0.2)  # until the broker has closed them
                spent = served.cpu_seconds() - spent
                record(
                    "accept, answer and close, CPU, connections", count, spent / most
                )
    for question, each in figures.items():
        yield _row(question, "us", 1e6, each)
    yield _memory_row("connections", most, memory)


# -- groups ----------------------------------------------------------------------------


class _Groups:
    """Groups of one member of the classic protocol each."""

    def __init__(self, broker: _Broker, count: int) -> None:
        self.broker = broker
        self.members = [""] * count
        self.generations = [0] * count

    def join(self, number: int) -> None:
        join, sync = wire.JOIN_GROUP.Request, wire.SYNC_GROUP.Request
        joined = self.broker.answer(
            wire.JOIN_GROUP,
            3,
            join(
                group_id=f"g{number}",
                session_timeout_ms=_SESSION_MS,
                rebalance_timeout_ms=_SESSION_MS,
                protocol_type="consumer",
                protocols=[join.Protocol(name="range", metadata=b"x" * 40)],
            ),
        )
        assert not joined.error_code, joined
        self.members[number] = joined.member_id
        self.generations[number] = joined.generation_id
        own = sync.Assignment(member_id=joined.member_id, assignment=b"x" * 40)
        synced = self.broker.answer(
            wire.SYNC_GROUP,
            3,
            sync(
                group_id=f"g{number}",
                generation_id=joined.generation_id,
                member_id=joined.member_id,
                assignments=[own],
            ),
        )
        assert not synced.error_code, synced

    def rejoin(self, number: int) -> None:
        request = wire.LEAVE_GROUP.Request(
            group_id=f"g{number}", member_id=self.members[number]
        )
        assert not self.broker.answer(wire.LEAVE_GROUP, 2, request).error_code
        self.join(number)

    def load(self) -> float:
        """Wait until the stored groups are known, and return the CPU seconds."""
        request = wire.OFFSET_FETCH.Request(group_id="g0", topics=[])
        self.broker.answer(wire.OFFSET_FETCH, 5, request)
        return self.broker.seconds

    def heartbeat(self, number: int) -> None:
        request = wire.HEARTBEAT.Request(
            group_id=f"g{number}",
            generation_id=self.generations[number],
            member_id=self.members[number],
        )
        assert not self.broker.answer(wire.HEARTBEAT, 3, request).error_code

    def commit(self, number: int) -> None:
        request = wire.OFFSET_COMMIT.Request
        part = request.Topic.Partition(
            partition_index=0, committed_offset=number, committed_metadata=""
        )
        asked = request(
            group_id=f"g{number}",
            generation_id_or_member_epoch=self.generations[number],
            member_id=self.members[number],
            topics=[request.Topic(name="t", partitions=[part])],
        )
        answer = self.broker.answer(wire.OFFSET_COMMIT, 7, asked)
        assert not answer.topics[0].partitions[0].error_code, answer


def _groups(path: Path, counts: tuple[int, int]) -> Iterator[Result]:
    figures: dict[str, dict[int, list[float]]] = {}
    memory: list[float] = []

    def record(question: str, count: int, value: float) -> None:
        figures.setdefault(question, {}).setdefault(count, []).append(value)

    with contextlib.ExitStack() as stack:
        sides: dict[int, _Groups] = {}
        for count in counts:
            place = path / f"{count}"
            with logcore.open_dir(place, create=True, durability="os") as logdir:
                logdir.create_topic("t")
                side = sides[count] = _Groups(_Broker(logdir), count)
                gc.collect()
                # As above, of the large number.
                memory = [_anonymous_bytes()]
                for numbers in (range(count // 2), range(count // 2, count)):
                    for number in numbers:
                        side.join(number)
                        side.commit(number)
                    gc.collect()
                    memory.append(_anonymous_bytes())
        for _ in range(_TURNS):
            for count in counts:
                with (
                    logcore.open_dir(path / f"{count}", durability="os") as logdir,
                    common.collector_off(),  # `netshim serve` almost turns it off
                ):
                    seconds = _Groups(_Broker(logdir), 0).load()
                record("start, CPU for each, groups", count, seconds / count)
        for count, side in sides.items():
            logdir = logcore.open_dir(path / f"{count}", durability="os")
            side.broker = _Broker(stack.enter_context(logdir))
            side.load()
        most = max(counts) // 5
        actions = {
            "heartbeat": _Groups.heartbeat,
            "commit": _Groups.commit,
            "leave and join": _Groups.rejoin,
        }
        for turn in range(_TURNS):
            for count, side in sides.items():
                for name, action in actions.items():
                    side.broker.seconds = 0.0
                    with common.collector_off():
                        for number in range(turn * most, (turn + 1) * most):
                            action(side, number % count)
                    question = f"{name}, CPU in process, groups"
                    record(question, count, side.broker.seconds / most)
    for question, each in figures.items():
        yield _row(question, "us", 1e6, each)
    yield _memory_row("groups", max(counts), memory)


# -- keys ------------------------------------------------------------------------------


def _keys(
    settings: Settings, counts: tuple[int, int], memory_bytes: int
) -> Iterator[Result]:
    cpu: dict[int, list[float]] = {}
    seconds: dict[int, list[float]] = {}
    memory: dict[int, list[float]] = {}
    rounds: list[CleaningReport] = []
    for count in counts:
        with (
            common.scratch(settings, "growth") as path,
            logcore.open(
                path / "log-0", create=True, config=life.CONFIG, durability="os"
            ) as log,
        ):
            _append_keys(log, 0, count)
            _append_keys(log, 0, count // 10)
            log.roll()
            common.settle()
            rounds = []
            with common.collector_off():
                began, spent = time.perf_counter(), time.process_time()
                while report := clean(log, memory_bytes=memory_bytes):
                    rounds.append(report)
                spent = time.process_time() - spent
                taken = time.perf_counter() - began
        cleaned = rounds[-1].end_offset
        cpu[count] = [spent / cleaned]
        seconds[count] = [taken / cleaned]
        memory[count] = [max(report.map_bytes for report in rounds) / count]
    table = f"table of {memory_bytes >> 20:,} MiB"
    method = (
        f"{len(rounds)} rounds, {sum(report.records_read for report in rounds):,} records read"
        f" and {sum(report.records_kept for report in rounds):,} kept, {cleaned:,} cleaned."
    )
    for name, each in (("CPU", cpu), ("time", seconds)):
        question = f"compact, {name} for each record, {table}, keys"
        yield _row(question, "ns", 1e9, each, method)
    if len(rounds) == 1:
        yield _row(f"compact, {table}, memory for each, keys", "bytes", 1, memory)


def _append_keys(log: logcore.Log, start: int, stop: int) -> None:
    """Append a record of 8 + 8 bytes for each of the keys."""
    piece = 1_000_000
    for first in range(start, stop, piece):
        numbers = np.arange(first, min(first + piece, stop), dtype=np.int64)
        data = numbers.tobytes()
        edges = np.arange(len(numbers) + 1, dtype=np.int64) * 8
        log.append_columns(keys=(data, edges), values=(data, edges))
