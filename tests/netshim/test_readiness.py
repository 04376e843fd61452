"""A broker reports its state to its parent process and to systemd."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from logcore import InvalidConfigError
from netshim.readiness import Readiness
from support.client import DEADLINE_S

COMMAND = [sys.executable, "-m", "netshim", "serve"]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[socket.socket]:
    """A notification socket like the socket of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(DEADLINE_S)
        yield sock


@pytest.mark.long
def test_parent_is_notified_when_clients_may_connect(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    options = [str(tmp_path / "data"), "--port", "0", "--ready-fd", str(writing)]
    process = subprocess.Popen(
        [*COMMAND, *options],
        pass_fds=[writing],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            assert pipe.read() == "ready\n"
        assert process.stdout is not None
        port = process.stdout.readline().rpartition(":")[2]
        socket.create_connection(("127.0.0.1", int(port)), DEADLINE_S).close()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_systemd_is_notified_of_start_watchdog_and_stop(
    tmp_path: Path, receiver: socket.socket
) -> None:
    environment = {
        **os.environ,
        "NOTIFY_SOCKET": receiver.getsockname(),
        "WATCHDOG_USEC": "20000",
    }
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path / "data"), "--port", "0"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert receiver.recv(100) == b"READY=1"
        assert [receiver.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        process.send_signal(signal.SIGTERM)
        while (text := receiver.recv(100)) == b"WATCHDOG=1":
            pass
        assert text == b"STOPPING=1"
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_unusable_receivers_are_refused(tmp_path: Path) -> None:
    with open(os.devnull) as closed:
        number = os.dup(closed.fileno())
    os.close(number)
    with pytest.raises(InvalidConfigError, match="ready-fd"):
        Readiness(number, {})
    with pytest.raises(InvalidConfigError, match="WATCHDOG"):
        Readiness(None, {"WATCHDOG_USEC": "soon"})


def test_missing_receivers_are_ignored(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    readiness = Readiness(writing, {"NOTIFY_SOCKET": str(tmp_path / "nothing")})
    readiness.ready()
    readiness.stopping()


def test_watchdog_of_another_process_is_ignored(receiver: socket.socket) -> None:
    environment = {
        "NOTIFY_SOCKET": receiver.getsockname(),
        "WATCHDOG_USEC": "20000",
        "WATCHDOG_PID": "1",
    }
    readiness = Readiness(None, environment)
    readiness.ready()
    readiness.stopping()
    assert [receiver.recv(100) for _ in range(2)] == [b"READY=1", b"STOPPING=1"]
