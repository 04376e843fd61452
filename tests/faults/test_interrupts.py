"""An allocation that fails, and Ctrl-C, at any point of a log's life: the log continues
or refuses, and loses nothing.

There are two ways to stop in the middle of append (with and without a new segment),
roll, truncate, clean, read, close and recovery, at the nth point for every n:
- KeyboardInterrupt at the nth line that runs inside the library;
- the nth allocation fails (`_testcapi.set_nomemory`), alone or with some after it, in a
  child.

Afterwards the same log accepts another append or refuses all appends, is closed, and is
opened by the rules of logcore.testing.oracle. Half the points are lines, if an action
has enough lines, and the rest are allocations. Points are spread evenly over the whole
action, and only points that were reached are counted. LOGCORE_INTERRUPTS=n reaches n
instead of 150; `make slow` reaches 20,000.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import operator
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logcore
from logcore.cleaner import clean
from logcore.kernels import Record
from logcore.log import Log
from logcore.testing import FoundLog, LogHistory, SimulatedDisk
from logcore.testing.oracle import recover_log
from support import interrupting

_testcapi = pytest.importorskip("_testcapi")
COUNT = int(os.environ.get("LOGCORE_INTERRUPTS", "75"))
MANY = int(os.environ.get("LOGCORE_INTERRUPTS", "20000"))
POLICIES = ("group", "os")
CONFIG: dict[str, Any] = {
    "segment.bytes": 300,
    "index.interval.bytes": 50,
    "cleanup.policy": "compact",
}


class InterruptedLog:
    """A log with some records of three keys, and its history."""

    def __init__(self, durability: str) -> None:
        self.disk = SimulatedDisk()
        self.durability = durability
        self.history = LogHistory(durability)
        self.log: Log | None = self.open()
        for _ in range(7):
            self.append()
        self.history.acknowledge(len(self.history.records), "os")

    def open(self) -> Log:
        return logcore.open(
            "t-0", create=True, config=CONFIG, durability=self.durability, fs=self.disk
        )

    def append(self, times: int = 15) -> None:
        assert self.log is not None
        at = len(self.history.records)
        record = Record(at, 1_000 + at, b"k%d" % (at % 3), b"%d" % at * times)
        self.history.issue([record])
        receipt = self.log.append(
            record.value, key=record.key, timestamp_ms=record.timestamp_ms
        )
        self.history.acknowledge(at + 1, receipt.durability)

    def append_large(self) -> None:
        """One that begins a segment."""
        segments = self.log.statistics().segments if self.log is not None else 0
        self.append(200)
        assert self.log is not None and self.log.statistics().segments > segments

    def roll(self) -> None:
        assert self.log is not None
        self.log.roll()

    def truncate(self) -> None:
        assert self.log is not None
        self.history.truncate(4)
        self.log.truncate(4)
        self.history.truncated()

    def clean(self) -> None:
        assert self.log is not None
        self.history.compact(self.log.last_stable_offset, self.disk.now_ms(), 1 << 40)
        clean(self.log, force=True)

    def read(self) -> None:
        assert self.log is not None
        assert list(self.log.read(0)) == self.history.between(
            0, self.log.high_watermark
        )
        self.log.get(3)
        self.log.offset_for_timestamp(1_003)

    def close(self) -> None:
        assert self.log is not None
        self.log.close()

    def recover(self) -> None:
        """Open the files that a process left when it died."""
        self.disk.kill()
        self.log = None
        self.log = self.open()

    def go_on(self) -> None:
        """Continue as the program that caught the error: append again, close, and
        reopen.
        """
        if self.log is not None and not self.log.is_closed:
            self.history.continue_at_end(
                max(self.log.log_end_offset, self.history.written_end)
            )
            try:
                self.append()
            except (logcore.LogFailedError, logcore.LogClosedError):
                pass  # it refuses rather than guess
            self.log.close()
        self.log = None
        gc.collect()
        self.disk.kill()
        self.history.check(
            recover_log(
                self.disk, config=CONFIG, durability=self.durability, thorough=True
            ),
            "kill",
        )


ACTIONS: tuple[Callable[[InterruptedLog], None], ...] = (
    InterruptedLog.append, InterruptedLog.append_large, InterruptedLog.roll,
    InterruptedLog.truncate, InterruptedLog.clean, InterruptedLog.read,
    InterruptedLog.close, InterruptedLog.recover,
)  # fmt: skip

each_action = pytest.mark.parametrize(
    "action", ACTIONS, ids=lambda action: action.__name__
)
each_count = pytest.mark.parametrize(
    "count",
    [COUNT, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)


def interrupted(
    action: Callable[[InterruptedLog], None], durability: str, nth: int
) -> int:
    """Interrupts it at the nth line; how many lines were still to go, 0 when it was
    met.
    """
    interrupted_log = InterruptedLog(durability)
    trace = interrupting.interrupted(lambda: action(interrupted_log), nth)
    interrupted_log.go_on()
    return trace.left


def lines(action: Callable[[InterruptedLog], None]) -> list[tuple[str, int]]:
    """All points of an action: policy and number."""
    limit = 1 << 60
    return [
        (policy, nth)
        for policy in POLICIES
        for nth in range(1, limit - interrupted(action, policy, limit) + 1)
    ]


def shares(
    action: Callable[[InterruptedLog], None], count: int
) -> tuple[list[tuple[str, int]], int]:
    """Which lines, and how many allocations, of `count` points of all actions."""
    every = lines(action)
    share = -(-count // len(ACTIONS))
    chosen = min(len(every), share // 2)
    return [
        every[number * len(every) // chosen] for number in range(chosen)
    ], share - chosen


@each_count
@each_action
def test_an_interrupt_at_any_line(
    action: Callable[[InterruptedLog], None], count: int
) -> None:
    chosen, _ = shares(action, count)
    for durability, nth in chosen:
        try:
            assert interrupted(action, durability, nth) == 0, "not met"
        except BaseException as error:
            error.add_note(
                f"repeat with interrupted(Life.{action.__name__}, {durability!r}, {nth})"
            )
            raise
    print(f"{len(chosen)} interrupts met in {action.__name__}")


# -- allocations -----------------------------------------------------------------------

#: How many allocations in a row fail. Not all: Python 3.11 to 3.13 may search forever
#: for the memory to handle an error.
WIDTHS = (1, 4, 20)
#: Errors that a failed allocation may cause. Besides errors of the library: "can't
#: allocate lock", and errors that C code did not expect and numpy did not pass on.
FAILURES = (
    MemoryError,
    logcore.LogcoreError,
    ctypes.ArgumentError,
    RuntimeError,
    SystemError,
)
BATCH = 200  # points for one child
GOLDEN = (
    5**0.5 - 1
) / 2  # the fractional parts of its multiples are even in 0..1 after any number of them


class RealLife(InterruptedLog):
    """The same on real files: the simulated disk would be a victim too. Alone in its
    directory, for the lock's sake.
    """

    def __init__(self, path: Path, durability: str) -> None:
        self.path = path / "t-0"
        super().__init__(durability)

    def open(self) -> Log:
        return logcore.open(
            self.path, create=True, config=CONFIG, durability=self.durability
        )

    def die(self) -> None:
        """Leaves what recovery has to do something about."""
        assert self.log is not None
        self.log.close()
        self.log = None
        with next(self.path.glob("*.log")).open("ab") as file:
            file.write(b"torn")
        (self.path.parent / "recovery-point-offset-checkpoint").unlink()

    def recover(self) -> None:
        self.log = self.open()

    def go_on(self) -> None:
        if self.log is not None and not self.log.is_closed:
            # One that refuses writes may have the last record in the file, or not.
            with contextlib.suppress(logcore.LogFailedError, logcore.LogClosedError):
                writer = self.log.host.writer
                with writer.state.lock:
                    writer.check_writable_locked()
                self.history.continue_at_end(
                    max(self.log.log_end_offset, self.history.written_end)
                )
                self.append()
            self.log.close()
        self.log = None
        gc.collect()
        with self.open() as log:
            self.history.check(FoundLog.of(log), "kill")


def starved(
    action: Callable[[InterruptedLog], None],
    path: Path,
    durability: str,
    nth: int,
    width: int,
) -> int:
    """Runs it while `width` allocations fail, from the nth on; how many were still to
    come, 0 when it was met.
    """
    interrupted_log = RealLife(path, durability)
    if action is InterruptedLog.recover:
        interrupted_log.die()
    act = getattr(interrupted_log, action.__name__)
    got_through = False
    further = itertools.repeat(None, nth)
    try:
        try:
            _testcapi.set_nomemory(nth, nth + width)
            act()
            got_through = True
            for _ in further:  # the nth fails here, if it did not before
                bytes(100)
        finally:
            _testcapi.remove_mem_hooks()
    except FAILURES:
        pass
    interrupted_log.go_on()
    shutil.rmtree(path)
    left = operator.length_hint(further)
    return nth - left if got_through and left else 0


def starve(
    action: Callable[[InterruptedLog], None],
    path: Path,
    first: int,
    wanted: int,
    tell: Callable[[str], object],
) -> None:
    """Meets `wanted` points, of a sequence that covers all of the action ever more
    closely, from its first on.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit = 1 << 20
    totals = [limit - starved(action, path, policy, limit, 1) for policy in POLICIES]
    met = 0
    for turn in range(first, first + 2 * wanted):
        which = turn % len(POLICIES)
        width = WIDTHS[turn // len(POLICIES) % len(WIDTHS)]
        nth = 1 + int(turn * GOLDEN % 1 * totals[which])
        tell(
            f"\0starved(Life.{action.__name__}, path, {POLICIES[which]!r}, {nth}, {width})\n"
        )
        signal.alarm(20)  # a hang is a failure
        met += starved(action, path, POLICIES[which], nth, width) == 0
        if met == wanted:
            return
    raise AssertionError(f"of {2 * wanted} points only {met} were met")


@each_count
@each_action
def test_any_allocation_fails(
    action: Callable[[InterruptedLog], None], count: int, tmp_path: Path
) -> None:
    """Runs in child processes, because a failed allocation may end the process."""
    _, share = shares(action, count)
    for first in range(0, share, BATCH):
        output = in_child(
            lambda tell, first=first: starve(
                action, tmp_path / "data", 2 * first, min(BATCH, share - first), tell
            )  # type: ignore[misc]
        )
        assert output is None, output
    print(f"{share} failed allocations met in {action.__name__}")


def in_child(work: Callable[[Callable[[str], object]], None]) -> str | None:
    """Runs it in a child; if it failed, returns its last message."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                work(lambda text: os.write(send, text.encode()))
                code = 0
            except BaseException:
                os.write(send, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(send)
    with os.fdopen(receive, "rb") as output:
        message = output.read().decode().rsplit("\0", 1)[-1]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"exit {code}: {message}" if code else None
