"""What does a broker cost until a first delivery, per request and per byte, compared
with brokers that store nothing?

Method:
- The broker and its peer run in separate processes and are driven by the same client
  over loopback, in turns. CPU seconds are the server process's, as counted by the
  system.
- produce requests: one connection keeps 16 Produce v9 requests outstanding, each with
  one batch of one 1 KB record. The bare loop is an asyncio.BufferedProtocol that splits
  frames, decodes the request and encodes a response with the same codec, without a log.
  Our side uses policy os, because the bare loop has no disk; group is shown too.
- fetch: one connection keeps 4 Fetch v11 requests of 1 MB outstanding over a sealed log
  of 512 MB. The bare loop writes a view of the mapped file of the same size for each
  request, without reading the request.
- idle: a broker whose 1,000 partitions were each written to once, and one without
  partitions, both left alone.
- callbacks: durations of callbacks in the broker's event loop while confluent-kafka
  produces and three consumers read as fast as they can. During a callback, no other
  client is served.
- large requests: latency of ApiVersions while eight connections request committed
  offsets of 99,000 partitions each, which the broker processes in chunks.
- confluent-kafka: 1 KB messages through its Producer, and back through its Consumer,
  compared with librdkafka's mock cluster. The mock cluster runs in a client's process
  and keeps messages in memory: the last 5 MB of a partition. On both sides, consumers
  therefore read 4 MB of each of many partitions.

Not shown: several machines, TLS, many connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import common
from common import Result, Settings

import logcore
import netshim
from logcore import recordbatch
from netshim import wire

_VALUE: Final = b"v" * 1_000
_OUTSTANDING: Final = 16
_FETCH_BYTES: Final = 1 << 20
_FETCH_OUTSTANDING: Final = 4
_REPEATS: Final = 5
_KEPT: Final = 4_000


def run(settings: Settings) -> Iterator[Result]:
    yield from starting(settings)
    yield from produce_requests(settings)
    yield fetch_bytes(settings)
    yield from idle(settings)
    yield from callbacks(settings)
    yield large_requests(settings)
    yield from clients(settings)


# -- starting --------------------------------------------------------------------------


def starting(settings: Settings) -> Iterator[Result]:
    import subprocess

    script = (
        "import sys, time, resource\n"
        "import confluent_kafka\n"
        "from netshim import serve\n"
        "started = time.perf_counter()\n"
        "with serve(sys.argv[1]) as server:\n"
        "    producer = confluent_kafka.Producer({'bootstrap.servers': server.bootstrap_servers})\n"
        "    reports = []\n"
        "    producer.produce('t', b'v', on_delivery=lambda error, message: reports.append(error))\n"
        "    producer.flush(10)\n"
        "    assert reports == [None], reports\n"
        "    print(time.perf_counter() - started)\n"
    )
    idle = (
        "import sys, netshim\n"
        "with netshim.serve(sys.argv[1]):\n"
        "    text = open('/proc/self/status').read()\n"
        "    print(int(text.split('VmRSS:')[1].split()[0]) / 1024)\n"
    )
    times = []
    sizes = []
    for turn in range(settings.repeats):
        with common.scratch(settings, "shim") as path:
            for code, into in ((script, times), (idle, sizes)):
                done = subprocess.run(
                    [sys.executable, "-c", code, str(path / f"data{turn}")],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                into.append(float(done.stdout))
    times.sort()
    best = times[len(times) // 2] * 1e3
    yield Result(
        question="serve to first delivery acknowledged",
        unit="ms",
        ours=best,
        peer_name="the limit",
        peer=0,
        ratio=best,
        target=100,
        bound="at most",
        ratio_unit=" ms",
        method="netshim.serve, a confluent-kafka Producer, one message, its delivery report. Median.",
    )
    size = min(sizes)
    yield Result(
        question="memory of an idle broker's process",
        unit="MB",
        ours=size,
        peer_name="the limit",
        peer=0,
        ratio=size,
        target=60,
        bound="at most",
        ratio_unit=" MB",
        method="Resident size of a Python process with netshim serving an empty directory.",
    )


# -- processes -------------------------------------------------------------------------


@contextlib.contextmanager
def _process(
    target: Callable[..., None], *arguments: Any
) -> Iterator[tuple[int, Callable[[], float]]]:
    """Start a server in a separate process; yield its port and a clock of its CPU time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    port = ours.recv()

    def cpu_seconds() -> float:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    try:
        yield port, cpu_seconds
    finally:
        ours.send(None)
        process.join(20)
        if process.is_alive():
            process.kill()


def _serve_shim(pipe: Any, path: str, durability: str, shared: bool = False) -> None:
    with netshim.serve(
        path, durability=durability, num_partitions=4, shared=shared
    ) as server:
        pipe.send(server.port)
        pipe.recv()


class _BareProtocol(asyncio.BufferedProtocol):
    """Protocol that splits frames and answers each."""

    def __init__(self, answer: Callable[[asyncio.Transport, memoryview], None]) -> None:
        self.answer = answer
        self.buffer = bytearray(1 << 20)
        self.view = memoryview(self.buffer)
        self.end = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(
            asyncio.Transport, transport
        )  # uvloop's is not a subclass

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view[self.end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.end += nbytes
        at = 0
        while self.end - at >= 4:
            size = int.from_bytes(self.view[at : at + 4], "big")
            if self.end - at - 4 < size:
                break
            self.answer(self.transport, self.view[at + 4 : at + 4 + size])
            at += 4 + size
        if at:
            self.buffer[: self.end - at] = self.buffer[at : self.end]
            self.end -= at


def _serve_bare(pipe: Any, path: str) -> None:
    """Answer Produce requests without storing records.

    If path names a file, answer each request with a view of the file.
    """
    response_type = wire.PRODUCE.Response

    if path:
        with open(path, "rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        at = 0

        def answer(transport: asyncio.Transport, frame: memoryview) -> None:
            nonlocal at
            correlation_id = int.from_bytes(frame[4:8], "big")
            view = mapped[at : at + _FETCH_BYTES]
            at = at + _FETCH_BYTES if at + 2 * _FETCH_BYTES <= len(mapped) else 0
            transport.write(
                (len(view) + 4).to_bytes(4, "big") + correlation_id.to_bytes(4, "big")
            )
            transport.write(view)
    else:

        def answer(transport: asyncio.Transport, frame: memoryview) -> None:
            header = wire.decode_header(frame)
            request = wire.decode_request(header, frame)
            topics = [
                response_type.Topic(
                    name=topic.name,
                    partition_responses=[
                        response_type.Topic.Partition(index=partition.index)
                        for partition in topic.partition_data
                    ],
                )
                for topic in request.topic_data
            ]
            response = response_type(responses=topics)
            pieces = wire.encode_response(
                wire.PRODUCE, header.api_version, header.correlation_id, response
            )
            transport.write(b"".join(pieces))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _BareProtocol(answer), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        while not pipe.poll():
            await asyncio.sleep(0.1)

    from netshim.server import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())


def _pipelined(
    port: int, requests: Iterator[bytes], count: int, outstanding: int
) -> None:
    """Send count requests and read their responses, with a limit of outstanding requests."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(4 << 20)
        view = memoryview(buffer)
        start = end = answered = 0
        for _ in range(min(outstanding, count)):
            sock.sendall(next(requests))
        sent = min(outstanding, count)
        left = 0  # remaining bytes of a large response, which are only counted
        while answered < count:
            got = sock.recv_into(view[end:])
            assert got, "the server hung up"
            end += got
            done = 0
            while True:
                if left:
                    step = min(left, end - start)
                    left -= step
                    start += step
                    if left:
                        break
                    done += 1
                if end - start < 4:
                    break
                left = int.from_bytes(view[start : start + 4], "big")
                start += 4
            answered += done
            if start == end:
                start = end = 0
            more = min(done, count - sent)
            if more:
                sock.sendall(b"".join(next(requests) for _ in range(more)))
                sent += more
            if end == len(buffer):
                buffer[: end - start] = buffer[start:end]
                start, end = 0, end - start


# -- requests --------------------------------------------------------------------------


def _produce_frame() -> bytes:
    batch = recordbatch.encode([(None, _VALUE)], now_ms=common.NOW_MS)
    request_type = wire.PRODUCE.Request
    partition = request_type.Topic.Partition(index=0, records=batch)
    request = request_type(
        acks=-1,
        timeout_ms=1000,
        topic_data=[request_type.Topic(name="t", partition_data=[partition])],
    )
    return wire.encode_request(wire.PRODUCE, 9, 7, "bench", request)


def produce_requests(settings: Settings) -> Iterator[Result]:
    import itertools

    frame = _produce_frame()
    count = 20_000 if settings.quick else 60_000
    with common.scratch(settings, "shim") as path:
        for name in ("os", "group", "shared"):
            with logcore.open_dir(path / name, create=True) as logdir:
                logdir.create_topic("t")
        with (
            _process(_serve_shim, str(path / "os"), "os") as (ours, _),
            _process(_serve_shim, str(path / "group"), "group") as (grouped, _),
            _process(_serve_shim, str(path / "shared"), "os", True) as (shared, _),
            _process(_serve_bare, "") as (bare, _),
        ):
            rates: dict[str, list[float]] = {}
            for _ in range(_REPEATS):
                for name, port in (
                    ("ours", ours),
                    ("bare", bare),
                    ("group", grouped),
                    ("shared", shared),
                ):
                    started = time.perf_counter()
                    _pipelined(port, itertools.repeat(frame), count, _OUTSTANDING)
                    rates.setdefault(name, []).append(
                        count / (time.perf_counter() - started)
                    )
    best = {name: max(values) for name, values in rates.items()}
    for name, question, target in (
        ("ours", "1 KB produce requests, 16 outstanding", 0.5),
        ("group", "1 KB produce requests, 16 outstanding, to disk (group)", None),
        ("shared", "1 KB produce requests, 16 outstanding, the directory shared", None),
    ):
        yield Result(
            question=question,
            unit="requests/s",
            ours=best[name],
            peer_name="bare BufferedProtocol, no log",
            peer=best["bare"],
            ratio=best[name] / best["bare"],
            turns=common.ratios(rates[name], rates["bare"]),
            target=target,
            method="Produce v9, one record a batch, one connection; the best of turns.",
        )


def fetch_bytes(settings: Settings) -> Result:
    size = (128 if settings.quick else 512) << 20
    with common.scratch(settings, "shim") as path:
        with logcore.open_dir(
            path / "data", create=True, durability="os", config={"segment.bytes": size}
        ) as logdir:
            logdir.create_topic("t")
            log = logdir.partition("t", 0)
            common.fill(log, common.make_rows(1_000), size)
            log.roll()
            starts = [batch.base_offset for batch in log.batches(0)]
            per_request = max(1, _FETCH_BYTES // (size // len(starts)))
            offsets = starts[::per_request][:-2]
            segment = path / "data" / "t-0" / f"{0:020d}.log"
        request_type = wire.FETCH.Request
        frames = []
        for offset in offsets:
            partition = request_type.Topic.Partition(
                partition=0, fetch_offset=offset, partition_max_bytes=_FETCH_BYTES
            )
            request = request_type(
                max_wait_ms=100,
                min_bytes=1,
                topics=[request_type.Topic(topic="t", partitions=[partition])],
            )
            frames.append(wire.encode_request(wire.FETCH, 11, 7, "bench", request))
        rates: dict[str, list[float]] = {}
        with (
            _process(_serve_shim, str(path / "data"), "os") as ours,
            _process(_serve_bare, str(segment)) as bare,
        ):
            for _ in range(_REPEATS):
                for name, (port, cpu_seconds) in (("ours", ours), ("bare", bare)):
                    before = cpu_seconds()
                    for _ in range(4):
                        _pipelined(port, iter(frames), len(frames), _FETCH_OUTSTANDING)
                    spent = cpu_seconds() - before
                    rates.setdefault(name, []).append(
                        4 * len(frames) * _FETCH_BYTES / 1e6 / spent
                    )
    best = {name: max(values) for name, values in rates.items()}
    return Result(
        question="fetch, MB per CPU second",
        unit="MB/s",
        ours=best["ours"],
        peer_name="bare loop writing mapped views",
        peer=best["bare"],
        ratio=best["ours"] / best["bare"],
        turns=common.ratios(rates["ours"], rates["bare"]),
        target=0.6,
        method="Fetch v11 of 1 MB each over a sealed segment; CPU of the server process.",
    )


# -- a real client ---------------------------------------------------------------------


def idle(settings: Settings) -> Iterator[Result]:
    kafka = common.peer("confluent_kafka", "the row of idle brokers")
    if kafka is None:
        return
    seconds = 4 if settings.quick else 15
    with common.scratch(settings, "shim") as path:
        with logcore.open_dir(path / "full", create=True) as logdir:
            logdir.create_topics({f"t{number}": (100, {}) for number in range(10)})
        with (
            _process(_serve_shim, str(path / "full"), "os") as (full, full_cpu),
            _process(_serve_shim, str(path / "empty"), "os") as (_, empty_cpu),
        ):
            producer = kafka.Producer(
                {"bootstrap.servers": f"127.0.0.1:{full}", "linger.ms": 50}
            )
            for number in range(10):
                for partition in range(100):
                    producer.produce(f"t{number}", b"v", partition=partition)
            assert producer.flush(60) == 0
            del producer
            time.sleep(3)  # until the maintenance after an append is done
            before = full_cpu(), empty_cpu()
            time.sleep(seconds)
            ours = full_cpu() - before[0]
            peer = empty_cpu() - before[1]
    yield Result(
        question="CPU of an idle broker, 1,000 partitions written once",
        unit="s a minute",
        ours=ours * 60 / seconds,
        peer_name="no partition",
        peer=peer * 60 / seconds,
        ratio=ours / peer,
        target=1.5,
        bound="at most",
        method=f"CPU of both servers in the same {seconds} s.",
    )


def _serve_timed(pipe: Any, path: str) -> None:
    """Serve like _serve_shim(), and send the 99.9th percentile of the durations of
    callbacks at the end, in seconds.
    """
    seconds: list[float] = []
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        started = time.perf_counter()
        run(handle)
        seconds.append(time.perf_counter() - started)

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    with netshim.serve(path, durability="group", num_partitions=4) as server:
        pipe.send(server.port)
        pipe.recv()
        seconds.sort()
        pipe.send(seconds[int(len(seconds) * 0.999)])
        pipe.recv()


def callbacks(settings: Settings) -> Iterator[Result]:
    kafka = common.peer("confluent_kafka", "the row of callbacks")
    if kafka is None:
        return
    seconds = 4 if settings.quick else 15
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with common.scratch(settings, "shim") as path:
        process = context.Process(
            target=_serve_timed, args=(theirs, str(path / "data")), daemon=True
        )
        process.start()
        address = f"127.0.0.1:{ours.recv()}"
        producer = kafka.Producer({"bootstrap.servers": address, "linger.ms": 5})
        readers = [
            kafka.Consumer(
                {
                    "bootstrap.servers": address,
                    "group.id": f"g{number}",
                    "auto.offset.reset": "earliest",
                }
            )
            for number in range(3)
        ]
        for reader in readers:
            reader.subscribe(["t"])
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(BufferError):
                for _ in range(1_000):
                    producer.produce("t", _VALUE)
            producer.poll(0.001)
            for reader in readers:
                reader.consume(2_000, 0.001)
        ours.send(None)
        longest = ours.recv()
        producer.flush(30)
        del producer
        for reader in readers:
            reader.close()
        ours.send(None)
        process.join(20)
    yield Result(
        question="longest callback of the loop under load, p99.9",
        unit="ms",
        ours=longest * 1e3,
        peer_name="the limit",
        peer=0,
        ratio=longest * 1e3,
        target=50,
        bound="at most",
        ratio_unit=" ms",
        method="One producer and three consumers of confluent-kafka, as fast as they can; policy group.",
    )


def _answer_s(sock: socket.socket, frame: bytes) -> float:
    """Send a request and read its response; return the seconds that this took."""
    began = time.perf_counter()
    sock.sendall(frame)
    left = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
    while left:
        left -= len(sock.recv(min(left, 1 << 20)))
    return time.perf_counter() - began


def large_requests(settings: Settings) -> Result:
    """Measure the latency of a small request while other clients list very many
    partitions.
    """
    rounds = 2 if settings.quick else 8
    request = wire.OFFSET_FETCH.Request
    asked = request(
        group_id="g",
        topics=[request.Topic(name="t", partition_indexes=list(range(99_000)))],
    )
    large = wire.encode_request(wire.OFFSET_FETCH, 5, 1, "large", asked)
    who = wire.API_VERSIONS.Request(
        client_software_name="small", client_software_version="1"
    )
    small = wire.encode_request(wire.API_VERSIONS, 3, 1, "small", who)
    with common.scratch(settings, "shim") as path:
        command = [
            sys.executable,
            "-m",
            "netshim",
            "serve",
            str(path / "data"),
            "--port",
            "0",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as broker:
            assert broker.stdout is not None
            port = int(broker.stdout.readline().rpartition(":")[2])
            socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(9)]
            waits = []
            for _ in range(rounds):
                threads = [
                    threading.Thread(target=_answer_s, args=(sock, large))
                    for sock in socks[1:]
                ]
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    waits.append(_answer_s(socks[0], small))
                    time.sleep(0.002)
            for sock in socks:
                sock.close()
            broker.terminate()
    waits.sort()
    p99_ms = waits[int(len(waits) * 0.99)] * 1e3
    return Result(
        question="a small request beside eight for 99,000 partitions each, p99",
        unit="ms",
        ours=p99_ms,
        peer_name="the limit",
        peer=0,
        ratio=p99_ms,
        target=50,
        bound="at most",
        ratio_unit=" ms",
        method="ApiVersions every 2 ms, while eight connections ask for committed offsets, one after the other.",
    )


def clients(settings: Settings) -> Iterator[Result]:
    kafka = common.peer("confluent_kafka", "the rows with confluent-kafka")
    if kafka is None:
        return
    count = 100_000 if settings.quick else 300_000
    turns = 3 if settings.quick else _REPEATS
    fast = {
        "linger.ms": 5,
        "batch.num.messages": 10_000,
        "queue.buffering.max.messages": count,
    }
    produced: dict[str, list[float]] = {}
    consumed: dict[str, list[float]] = {}
    with (
        common.scratch(settings, "shim") as path,
        _process(_serve_shim, str(path / "data"), "group") as (port, _),
    ):
        mock = kafka.Producer({"test.mock.num.brokers": 1, **fast})
        broker = next(iter(mock.list_topics(timeout=10).brokers.values()))
        sides = {"ours": f"127.0.0.1:{port}", "mock": f"{broker.host}:{broker.port}"}
        producers = {
            name: kafka.Producer({"bootstrap.servers": address, **fast})
            for name, address in sides.items()
        }
        # Four partitions each, as in the topics that the mock cluster creates.
        topics = [f"read{n}" for n in range(4 if settings.quick else 16)]
        for producer in producers.values():
            for topic in topics:
                producer.list_topics(topic, timeout=10)
                for partition in range(4):
                    _produce(producer, topic, _KEPT, partition)
        for turn in range(turns):
            for name, address in sides.items():
                topic = f"write{turn}"
                producers[name].list_topics(topic, timeout=10)
                produced.setdefault(name, []).append(
                    count / _produce(producers[name], topic, count)
                )
                wanted = [
                    kafka.TopicPartition(topic, n, 0)
                    for topic in topics
                    for n in range(4)
                ]
                total = len(wanted) * _KEPT
                consumed.setdefault(name, []).append(
                    total / _consume(kafka, address, wanted, total)
                )
        del producers, mock
    for question, rates, target in (
        ("produce 1 KB messages through confluent-kafka", produced, 0.5),
        ("consume 1 KB messages through confluent-kafka", consumed, 2.0),
    ):
        ours = max(rates["ours"])
        peer = max(rates["mock"])
        yield Result(
            question=question,
            unit="messages/s",
            ours=ours,
            peer_name="librdkafka's mock cluster",
            peer=peer,
            ratio=ours / peer,
            turns=common.ratios(rates["ours"], rates["mock"]),
            target=target,
            method="acks=all; to disk under group on our side, to memory in the mock. The best of turns.",
        )


def _produce(producer: Any, topic: str, count: int, partition: int = -1) -> float:
    failed: list[Any] = []

    def told(error: Any, message: Any) -> None:
        if error is not None:
            failed.append(error)

    started = time.perf_counter()
    for _ in range(count):
        while True:
            try:
                producer.produce(topic, _VALUE, partition=partition, on_delivery=told)
                break
            except BufferError:
                producer.poll(0.01)
    left = producer.flush(120)
    spent = time.perf_counter() - started
    assert not left and not failed, (left, failed[:3])
    return spent


def _consume(kafka: Any, address: str, wanted: list[Any], count: int) -> float:
    consumer = kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "bench",
            "enable.auto.commit": False,
            "queued.min.messages": 10 * count,
            "queued.max.messages.kbytes": 2_000_000,
        }
    )
    consumer.assign(wanted)
    seen = 0
    started = time.perf_counter()
    while seen < count:
        messages = consumer.consume(min(10_000, count - seen), timeout=1)
        assert messages or time.perf_counter() - started < 60, f"{seen} of {count} came"
        if messages:
            assert messages[-1].error() is None, messages[-1].error()
        seen += len(messages)
    spent = time.perf_counter() - started
    consumer.close()
    return spent
