"""Real processes on one registry of files: SIGKILL and SIGSTOP at any time, forks, a
watch across processes.

LOGCORE_PROCESS_ROUNDS=n kills or stops a process n times instead of 12; `make slow`
does it ten times 500 times.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import logcore
from logcore.errors import (
    ForkedWriterError,
    LogcoreError,
    NodeNotFoundError,
    RegistryLockedError,
    SessionExpiredError,
)
from logcore.registry import open_registry

ROUNDS = int(os.environ.get("LOGCORE_PROCESS_ROUNDS", "12"))
MANY = int(os.environ.get("LOGCORE_PROCESS_ROUNDS", "500"))


class Child:
    """A forked process that runs a function and prints lines."""

    def __init__(self, run: Callable[[Callable[[object], None]], None]) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                run(lambda line: os.write(write, f"{line}\n".encode()) and None)
            finally:
                os._exit(0)
        os.close(write)
        self.lines = open(read)  # noqa: SIM115
        assert self.lines.readline() == "ready\n"

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def end_without_reading(self) -> None:
        """Kill the process without reading, because its children may still have the
        pipe open.
        """
        self.send(signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def end(self) -> str:
        """Kill the process and return the lines that were not read."""
        if self.lines.closed:
            return ""
        self.send(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        with self.lines:
            return self.lines.read()


def next_count(value: bytes | None) -> bytes:
    """Return the next count, padded to a value of any size."""
    count = int((value or b"0").split()[0]) + 1
    return b"%d " % count + b"x" * (count * 997 % 10_000)


def count_up(place: Path, tell: Callable[[object], None]) -> None:
    """Increase a counter, print each value, and hold an ephemeral node."""
    registry = open_registry(place, lock_timeout_ms=20_000)
    tell("ready")
    try:
        registry.create(f"/owners/{os.getpid()}", ephemeral=True)
        while True:
            node = registry.update("/count", next_count)
            assert node is not None
            tell(node.value.split()[0].decode())
    except SessionExpiredError:
        tell("expired")


def hold(place: Path, tell: Callable[[object], None]) -> None:
    """Hold a change open."""
    registry = open_registry(place)
    with registry.holding("/a"):
        tell("ready")
        time.sleep(60)


def fork(place: Path, tell: Callable[[object], None]) -> None:
    """Open a session, and fork a child."""
    registry = open_registry(place)
    registry.create("/e", ephemeral=True)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    tell("ready")
    tell(child)
    time.sleep(60)


def start(
    place: Path, body: Callable[[Path, Callable[[object], None]], None] = count_up
) -> Child:
    return Child(functools.partial(body, place))


@contextlib.contextmanager
def running(place: Path, count: int) -> Iterator[list[Child]]:
    processes = [start(place) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


def counts(told: str) -> list[int]:
    return [int(line) for line in told.splitlines() if line.isdigit()]


def rounds(place: Path, seed: int, count: int) -> None:
    """Kill processes that share a counter. No value is printed twice, and the counter
    has at least the last printed value.
    """
    rng = random.Random(seed)
    told: list[int] = []
    with running(place, 2) as processes:
        for _ in range(count):
            time.sleep(rng.uniform(0, 0.02))
            victim = rng.randrange(2)
            if rng.random() < 0.4:
                processes[victim].send(signal.SIGSTOP)
                time.sleep(rng.uniform(0, 0.01))
                processes[victim].send(signal.SIGCONT)
                continue
            told += counts(processes[victim].end())
            processes[victim] = start(place)
        for process in processes:
            told += counts(process.end())
    assert len(told) == len(set(told)), "a value was printed twice: an update was lost"
    with open_registry(place) as registry:
        last = int(registry.get("/count").value.split()[0])
        # A process that was killed after its write did not print the value.
        assert max(told) <= last <= max(told) + count + 2
        assert registry.children("/owners") == []
        registry.clean()
        assert [info.id for info in registry.sessions()] == [registry.session.id]


@pytest.mark.long
def test_counts_survive_kills_and_stops(tmp_path: Path) -> None:
    rounds(tmp_path / "data", 1, ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_counts_survive_many_kills_and_stops(tmp_path: Path, seed: int) -> None:
    rounds(tmp_path / "data", random.SystemRandom().randrange(1 << 30) + seed, MANY)


def test_nodes_of_a_killed_process_are_removed_and_waiters_wake(
    tmp_path: Path,
) -> None:
    with (
        running(tmp_path / "data", 1) as (process,),
        open_registry(tmp_path / "data") as registry,
    ):
        owner = f"/owners/{process.pid}"
        watch = registry.watch([owner])
        deadline = time.monotonic() + 20
        while not registry.children("/owners"):
            assert time.monotonic() < deadline
            watch.wait(1)
        process.end()
        while True:
            try:
                registry.get(owner)
            except NodeNotFoundError:
                break
            assert time.monotonic() < deadline
            assert watch.wait(20), "the death was not reported"
        watch.close()


def test_the_descriptor_of_a_watch_becomes_readable(tmp_path: Path) -> None:
    with (
        open_registry(tmp_path / "data") as first,
        open_registry(tmp_path / "data") as other,
    ):
        first.create("/a")
        watch = first.watch(["/a"])
        if watch.fileno() < 0:
            pytest.skip("no inotify left")
        other.set("/a", b"1")
        assert select.select([watch.fileno()], [], [], 10)[0]
        assert watch.wait(0)
        watch.close()


def test_stopped_process_learns_that_its_session_has_expired(tmp_path: Path) -> None:
    with (
        running(tmp_path / "data", 1) as (process,),
        open_registry(tmp_path / "data") as registry,
    ):
        (session,) = (
            info
            for info in registry.sessions()
            if info.record and info.record.pid == process.pid
        )
        process.send(signal.SIGSTOP)
        # The process was stopped during a change. Its session ends nevertheless.
        with contextlib.suppress(RegistryLockedError):
            registry._lock_timeout_ms = 200
            registry.expire(session.id)
        assert registry.children("/owners") == []
        process.send(signal.SIGCONT)
        assert "expired" in process.lines.read()


def test_process_stopped_inside_a_change_is_named(tmp_path: Path) -> None:
    open_registry(tmp_path / "data").close()
    process = start(tmp_path / "data", hold)
    try:
        with open_registry(tmp_path / "data", lock_timeout_ms=20) as registry:
            with pytest.raises(RegistryLockedError, match=str(process.pid)) as caught:
                registry.create("/a/b")
            assert caught.value.pids == (process.pid,)
            assert caught.value.retriable
            registry.create("/b")  # another domain
            process.end()
            registry.create("/a/b")
    finally:
        process.end()


def test_a_forked_child_does_not_keep_the_session_of_a_killed_parent(
    tmp_path: Path,
) -> None:
    process = start(tmp_path / "data", fork)
    child = int(process.lines.readline())
    try:
        with open_registry(tmp_path / "data") as registry:
            assert registry.children("/") == ["e"]
            process.end_without_reading()
            deadline = time.monotonic() + 10
            while registry.children("/"):
                assert time.monotonic() < deadline, "the child keeps the session"
                time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        process.lines.close()


def test_registry_that_is_open_at_exit_causes_no_warning(
    tmp_path: Path,
) -> None:
    program = (
        "from logcore.registry import open_registry\n"
        f"kept = open_registry({str(tmp_path / 'data')!r})\nkept.close()"
    )
    sources = str(Path(logcore.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_opens_the_registry_itself(tmp_path: Path) -> None:
    with open_registry(tmp_path / "data") as registry:
        registry.create("/e", ephemeral=True)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                registry.get("/e")
            except ForkedWriterError:
                os.write(write, b"refused")
            except LogcoreError:
                pass
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with open(read, "rb") as file:
            assert file.read() == b"refused"
        assert registry.get("/e").session == registry.session.id
        registry.set("/e", b"1")
