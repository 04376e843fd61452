"""examples/orders_workers.py, under load, while its workers get SIGTERM and SIGKILL.

Each acknowledged order must be stored, and each stored order must be confirmed exactly
once. `make check` sends two signals, `make slow` 200. LOGCORE_SERVICE_SIGNALS=n sends n.
"""

from __future__ import annotations

import http.client
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import logcore

pytest.importorskip("uvicorn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FEW = int(os.environ.get("LOGCORE_SERVICE_SIGNALS", "2"))
MANY = int(os.environ.get("LOGCORE_SERVICE_SIGNALS", "200"))
LIMIT_S = 240.0


def until(condition: Callable[[], Any], failure: str) -> Any:
    end_s = time.monotonic() + LIMIT_S
    while not (result := condition()):
        assert time.monotonic() < end_s, failure
        time.sleep(0.02)
    return result


class Service:
    """The service with four workers, on one port."""

    def __init__(self, path: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._environment = {**os.environ, "SHOP": str(path)}
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES)]
        command += ["orders_workers:app", "--port", str(self.port)]
        command += ["--workers", "4", "--log-level", "error"]
        command += ["--timeout-worker-healthcheck", "20"]
        self._process = subprocess.Popen(
            command, env=self._environment, start_new_session=True
        )
        until(lambda: self.health() == 200, "the service does not start")

    def request(self, method: str, path: str, body: bytes | None = None) -> int:
        """Send a request. Return the status, or 0 if the connection breaks."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def health(self) -> int:
        return self.request("GET", "/health")

    def workers(self) -> list[int]:
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [
            int(child)
            for child in children
            if b"multiprocessing" in _command_line(child)
            and b"resource_tracker" not in _command_line(child)
        ]

    def signal_worker(self, number: int, rng: random.Random) -> None:
        """Send a signal to one worker, which its supervisor replaces."""
        workers = until(
            lambda: len(running_workers := self.workers()) == 4 and running_workers,
            "a worker is missing",
        )
        pid = rng.choice(workers)
        os.kill(pid, number)
        until(lambda: pid not in self.workers(), "the worker does not end")

    def restart(self) -> None:
        """Stop the whole service like a service manager, and start it again."""
        self._process.terminate()
        assert self._process.wait(LIMIT_S) in (0, -signal.SIGTERM)
        self.start()

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Clients:
    """Threads that place orders, and a thread that follows the orders."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_stopping = threading.Event()
        self._numbers = itertools.count()
        self.accepted: list[int] = []
        self.followed = 0
        self._threads = [threading.Thread(target=self._place) for _ in range(3)]
        self._threads.append(threading.Thread(target=self._follow, daemon=True))
        for thread in self._threads:
            thread.start()

    def _place(self) -> None:
        while not self._is_stopping.is_set():
            number = next(self._numbers)
            path = f"/orders?customer=c{number % 7}"
            if self._service.request("POST", path, b"%d" % number) == 201:
                self.accepted.append(number)

    def _follow(self) -> None:
        """Follow the orders like a browser, and reconnect when the connection ends."""
        last_id = ""
        while not self._is_stopping.is_set():
            connection = http.client.HTTPConnection(
                "127.0.0.1", self._service.port, timeout=1
            )
            try:
                headers = {"Last-Event-ID": last_id}
                connection.request("GET", "/orders", headers=headers)
                response = connection.getresponse()
                while line := response.readline():
                    if line.startswith(b"id: "):
                        last_id = line[4:].decode().strip()
                        self.followed += 1
            except (OSError, http.client.HTTPException):
                continue
            finally:
                connection.close()

    def has_accepted(self, count: int) -> bool:
        return len(self.accepted) >= count

    def stop(self) -> None:
        self._is_stopping.set()
        for thread in self._threads:
            thread.join(LIMIT_S)


def values(path: Path, topic: str) -> Counter[tuple[bytes, bytes | None]]:
    """Return how often each (order, position) occurs in the committed records of a
    topic.
    """
    counts: Counter[tuple[bytes, bytes | None]] = Counter()
    with logcore.open_dir(path, read_only=True) as logdir:
        for partition in logdir.partitions(topic):
            log = logdir.partition(topic, partition)
            for record in log.read(0, isolation="read_committed"):
                position = b"%d:%d" % (partition, record.offset)
                if record.headers:
                    position = record.headers[0][1] or b""
                counts[record.value or b"", position] += 1
    return counts


@pytest.mark.long
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_orders_survive_signals_and_are_confirmed_once(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / "shop"
    rng = random.Random(count)
    service = Service(path)
    try:
        clients = Clients(service)
        try:
            for number in range(count):
                enough = len(clients.accepted) + 20
                until(partial(clients.has_accepted, enough), "no order is accepted")
                if number % 2:
                    service.signal_worker(signal.SIGKILL, rng)
                elif number % 20 == 10 or count < 10:
                    service.restart()
                else:
                    service.signal_worker(signal.SIGTERM, rng)
        finally:
            clients.stop()
        accepted = {b"%d" % number for number in clients.accepted}
        assert clients.followed > 20
        until(
            lambda: len(values(path, "confirmed")) >= len(values(path, "orders")),
            "orders are not confirmed",
        )
        assert service.health() == 200
    finally:
        service.kill()
    stored = values(path, "orders")
    assert accepted <= {value for value, _ in stored}
    # An order whose connection broke before the response may be stored, but not twice.
    assert set(Counter(value for value, _ in stored).values()) == {1}
    assert values(path, "confirmed") == stored
