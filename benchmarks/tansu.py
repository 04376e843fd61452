"""How does netshim compare with Tansu, a broker in Rust with Kafka's protocol?

Method: Tansu 0.6.0 with its storage in memory and with libSQL, an SQLite file, and
`netshim serve` with durability="os", each in a process of its own, in turns. Tansu sets
SQLite to WAL and synchronous=normal, so it syncs at a checkpoint and not at a commit:
like "os", an acknowledged record survives the end of the process, and may not survive a
power cut. In memory it survives neither.

The program `tansu` is found on PATH, or by the environment variable TANSU.
- From the start of the process until a client on a plain socket, which retries to
  connect, has created a topic and received the response to a Produce with acks=all. For
  context, netshim.serve() in a process that has imported netshim.
- Resident memory of the idle process.
- 1,000 records of 100 bytes a second, as in apache.py, with default settings of the
  consumer. Tansu answers a fetch after a wait of up to half of fetch.wait.max.ms,
  although it has found records, so the row is also measured with a wait of 1 ms.
- As fast as the client sends and reads, as in apache.py, with that wait of 1 ms, which
  shortens the wait of Tansu.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import common
from brokers import Served, cost_row, exchange, latency, paced, throughput
from common import Result, Settings

import netshim
from logcore import recordbatch
from netshim import wire

sys.path.insert(0, str(common.ROOT / "tests"))

_OURS: Final = "os"
_IN_PROCESS: Final = "netshim.serve()"
#: URL of the storage by the name of the side. The database is in the working directory.
_STORAGES: Final = {
    "Tansu in memory": "memory://tansu/",
    "Tansu with libSQL": "sqlite://tansu.db",
}
_EQUAL: Final = {"produce": (1.0, 1.0), "consume": (1.0, 1.0)}
_WAIT: Final = {"fetch.wait.max.ms": 1}


@attrs.frozen
class _Tansu(Served):
    """Tansu, which creates topics only for CreateTopics."""

    def prepare(self, topic: str) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient(self.client_config)
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)


def run(settings: Settings) -> Iterator[Result]:
    program = os.environ.get("TANSU") or shutil.which("tansu")
    if program is None or common.peer("confluent_kafka", "confluent-kafka") is None:
        print(
            "skipping Tansu: install it with `cargo install tansu --version 0.6.0"
            " --features dynostore,libsql --locked`, and put it on PATH or into TANSU",
            file=sys.stderr,
        )
        return
    with common.scratch(settings, "tansu") as path:
        yield from _starts(program, path, settings.repeats)
    with common.scratch(settings, "tansu") as path, contextlib.ExitStack() as stack:
        ours, *theirs = (
            stack.enter_context(_served(program, name, path / name))
            for name in (_OURS, *_STORAGES)
        )
        yield from _idle_memory(ours, theirs)
        for rates in (ours, *theirs):
            latency(rates, "warm", 2)
        seconds = 2 if settings.quick else 10
        for wait in ({}, _WAIT):
            sides = [attrs.evolve(rates, settings=wait) for rates in (ours, *theirs)]
            yield from _latencies(sides, seconds, wait)
        size = (16 if settings.quick else 256) << 20
        for value_bytes in (1_000, 100):
            part = size if value_bytes == 1_000 else size // 8
            yield from throughput(sides[0], sides[1:], value_bytes, part, _EQUAL)


@contextlib.contextmanager
def _started(
    program: str, name: str, folder: Path, port: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start Tansu in a folder, or netshim if `name` is "os"."""
    folder.mkdir()
    if name == _OURS:
        command = [sys.executable, "-m", "netshim", "serve", ".", "--durability", name]
        command += ["--port", str(port)]
    else:
        url = f"tcp://127.0.0.1:{port}"
        command = [program, "broker", "--silent", "--storage-engine", _STORAGES[name]]
        command += ["--listener-url", url, "--advertised-listener-url", url]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=common.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _served(program: str, name: str, folder: Path) -> Iterator[Served]:
    from support.kafka_jvm import free_port

    port = free_port()
    with _started(program, name, folder, port) as process:
        _connected(port).close()
        kind = Served if name == _OURS else _Tansu
        yield kind(name, f"127.0.0.1:{port}", process.pid)


# -- start and memory ------------------------------------------------------------------


def _connected(port: int) -> socket.socket:
    """Retry until a broker listens, and connect."""
    for _ in range(60_000):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.0005)
    raise TimeoutError(f"no broker listens on port {port}")


def _acknowledged(port: int) -> None:
    """Create a topic and produce a record, and wait for both responses."""
    topics = wire.CREATE_TOPICS.Request
    topic = topics.Topic(name="t", num_partitions=1, replication_factor=1)
    records = wire.PRODUCE.Request
    batch = recordbatch.encode([(None, b"v")], now_ms=common.NOW_MS)
    part = records.Topic.Partition(index=0, records=batch)
    data = [records.Topic(name="t", partition_data=[part])]
    with _connected(port) as sock:
        created = _answer(
            sock, wire.CREATE_TOPICS, 5, topics(topics=[topic], timeout_ms=30_000)
        )
        assert not created.topics[0].error_code, created
        stored = _answer(
            sock, wire.PRODUCE, 9, records(acks=-1, timeout_ms=30_000, topic_data=data)
        )
        assert not stored.responses[0].partition_responses[0].error_code, stored


def _answer(
    sock: socket.socket, api: wire.Api[Any, Any], version: int, request: Any
) -> Any:
    answer = exchange(sock, wire.encode_request(api, version, 1, "bench", request))
    return wire.decode_response(api, version, answer)[1]


def _starts(program: str, path: Path, repeats: int) -> Iterator[Result]:
    from support.kafka_jvm import free_port

    names = (_OURS, _IN_PROCESS, *_STORAGES)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name in names:
            port = free_port()
            folder = path / f"{name}-{turn}"
            started = time.perf_counter()
            if name == _IN_PROCESS:
                with netshim.serve(folder, port=port, durability="os"):
                    _acknowledged(port)
                    seconds[name].append(time.perf_counter() - started)
            else:
                with _started(program, name, folder, port):
                    _acknowledged(port)
                    seconds[name].append(time.perf_counter() - started)
    # The first turn fills the page cache and the caches of byte code.
    seconds = {name: each[1:] for name, each in seconds.items()}
    for theirs in _STORAGES:
        question = "from the start of netshim serve until a record is acknowledged"
        yield cost_row(question, "ms", 1e3, seconds, _OURS, theirs, 1.0)
        question = f"from {_IN_PROCESS} until a record is acknowledged"
        yield cost_row(question, "ms", 1e3, seconds, _IN_PROCESS, theirs, None)


def _idle_memory(ours: Served, theirs: list[Served]) -> Iterator[Result]:
    time.sleep(2)
    figures = {rates.name: [_resident_bytes(rates.pid)] for rates in (ours, *theirs)}
    for entry in theirs:
        question = "resident memory of the idle process"
        yield cost_row(question, "MB", 1e-6, figures, ours.name, entry.name, 1.0)


def _resident_bytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024.0


# -- at 1,000 records a second ---------------------------------------------------------


def _latencies(
    sides: list[Served], seconds: float, wait: Mapping[str, Any]
) -> Iterator[Result]:
    latencies, cpu = paced(sides, seconds, f"paced{len(wait)}")
    waiting = ", ".join(f"{name}={value}" for name, value in wait.items())
    title = f"1,000 records a second, {waiting or 'default settings'}"
    for side in sides[1:]:
        for (what, name), figures in latencies.items():
            question = f"{title}, {what}, {name}"
            yield cost_row(question, "us", 1e6, figures, _OURS, side.name, 1.0)
        question = f"{title}, CPU of the broker for each"
        yield cost_row(question, "us", 1e6, cpu, _OURS, side.name, 1.0)
