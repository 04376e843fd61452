"""Failed allocations and Ctrl-C at any point of an action of a log: the log continues
or refuses appends, and loses no acknowledged record. The actions are append (with and
without a new segment), roll, truncate, clean, read, close and recovery. Each action is
stopped at the nth point for every n, in two ways:
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
        offset = len(self.history.records)
        record = Record(
            offset, 1_000 + offset, b"k%d" % (offset % 3), b"%d" % offset * times
        )
        self.history.issue([record])
        receipt = self.log.append(
            record.value, key=record.key, timestamp_ms=record.timestamp_ms
        )
        self.history.acknowledge(offset + 1, receipt.durability)

    def append_large(self) -> None:
        """Append a record that begins a segment."""
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
        """Open the files that a killed process left."""
        self.disk.kill()
        self.log = None
        self.log = self.open()

    def check_after_error(self) -> None:
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
                pass  # the log refuses appends because its state is unknown
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
    """Interrupt an action at the nth line. Return the number of lines that were missing
    until the nth line, which is 0 if the action was interrupted.
    """
    interrupted_log = InterruptedLog(durability)
    trace = interrupting.interrupted(lambda: action(interrupted_log), nth)
    interrupted_log.check_after_error()
    return trace.left


def interruption_points(
    action: Callable[[InterruptedLog], None],
) -> list[tuple[str, int]]:
    """Return the policy and the line number of each point of an action."""
    limit = 1 << 60
    return [
        (policy, nth)
        for policy in POLICIES
        for nth in range(1, limit - interrupted(action, policy, limit) + 1)
    ]


def points_to_test(
    action: Callable[[InterruptedLog], None], count: int
) -> tuple[list[tuple[str, int]], int]:
    """Return the lines of an action to interrupt, and the number of allocations to
    fail, for a total of `count` points of all actions.
    """
    points = interruption_points(action)
    points_per_action = -(-count // len(ACTIONS))
    line_count = min(len(points), points_per_action // 2)
    return [
        points[number * len(points) // line_count] for number in range(line_count)
    ], points_per_action - line_count


@each_count
@each_action
def test_interrupt_at_any_line_loses_no_acknowledged_record(
    action: Callable[[InterruptedLog], None], count: int
) -> None:
    points, _ = points_to_test(action, count)
    for durability, nth in points:
        try:
            assert interrupted(action, durability, nth) == 0, "not interrupted"
        except BaseException as error:
            error.add_note(
                f"repeat with interrupted(InterruptedLog.{action.__name__}, {durability!r}, {nth})"
            )
            raise
    print(f"{len(points)} interrupts in {action.__name__}")


# -- allocations -----------------------------------------------------------------------

#: The number of consecutive allocations that fail. If all failed, Python 3.11 to 3.13
#: might try forever to allocate memory for the error.
WIDTHS = (1, 4, 20)
#: Errors that a failed allocation may cause: errors of the library, "can't allocate
#: lock", and errors of C code that does not report a lack of memory.
FAILURES = (
    MemoryError,
    logcore.LogcoreError,
    ctypes.ArgumentError,
    RuntimeError,
    SystemError,
)
#: Number of points for one child process.
POINTS_PER_CHILD = 200
#: The fractional parts of the first n multiples of the golden ratio are spread evenly
#: between 0 and 1, for any n.
GOLDEN = (5**0.5 - 1) / 2


class InterruptedFileLog(InterruptedLog):
    """An InterruptedLog on real files, because a failed allocation would also affect
    the simulated disk. It is alone in its directory, because the directory has a lock.
    """

    def __init__(self, path: Path, durability: str) -> None:
        self.path = path / "t-0"
        super().__init__(durability)

    def open(self) -> Log:
        return logcore.open(
            self.path, create=True, config=CONFIG, durability=self.durability
        )

    def leave_torn_log(self) -> None:
        """Leave files that need recovery."""
        assert self.log is not None
        self.log.close()
        self.log = None
        with next(self.path.glob("*.log")).open("ab") as file:
            file.write(b"torn")
        (self.path.parent / "recovery-point-offset-checkpoint").unlink()

    def recover(self) -> None:
        self.log = self.open()

    def check_after_error(self) -> None:
        if self.log is not None and not self.log.is_closed:
            # A log that refuses writes may have the last record in its file or not.
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


def fail_allocations(
    action: Callable[[InterruptedLog], None],
    path: Path,
    durability: str,
    nth: int,
    width: int,
) -> int:
    """Run an action while `width` allocations fail, from the nth on. Return the number
    of allocations that were missing until the nth, which is 0 if an allocation failed.
    """
    interrupted_log = InterruptedFileLog(path, durability)
    if action is InterruptedLog.recover:
        interrupted_log.leave_torn_log()
    run_action = getattr(interrupted_log, action.__name__)
    is_complete = False
    remaining = itertools.repeat(None, nth)
    try:
        try:
            _testcapi.set_nomemory(nth, nth + width)
            run_action()
            is_complete = True
            for _ in remaining:  # the nth allocation fails here at the latest
                bytes(100)
        finally:
            _testcapi.remove_mem_hooks()
    except FAILURES:
        pass
    interrupted_log.check_after_error()
    shutil.rmtree(path)
    unused = operator.length_hint(remaining)
    return nth - unused if is_complete and unused else 0


def fail_allocations_at_points(
    action: Callable[[InterruptedLog], None],
    path: Path,
    first: int,
    target: int,
    report: Callable[[str], object],
) -> None:
    """Let `target` allocations fail. The points of the golden-ratio sequence from index
    `first` on are spread evenly over the action.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit = 1 << 20
    totals = [
        limit - fail_allocations(action, path, policy, limit, 1) for policy in POLICIES
    ]
    failed_count = 0
    for index in range(first, first + 2 * target):
        policy_index = index % len(POLICIES)
        policy = POLICIES[policy_index]
        width = WIDTHS[index // len(POLICIES) % len(WIDTHS)]
        nth = 1 + int(index * GOLDEN % 1 * totals[policy_index])
        report(
            f"\0fail_allocations(InterruptedFileLog.{action.__name__}, path, {policy!r}, {nth}, {width})\n"
        )
        signal.alarm(20)  # a test that hangs fails
        failed_count += fail_allocations(action, path, policy, nth, width) == 0
        if failed_count == target:
            return
    raise AssertionError(
        f"allocations failed at {failed_count} of {2 * target} points, not at {target}"
    )


@each_count
@each_action
def test_failed_allocation_loses_no_acknowledged_record(
    action: Callable[[InterruptedLog], None], count: int, tmp_path: Path
) -> None:
    """The allocations fail in child processes, because they may end a process."""
    _, allocation_count = points_to_test(action, count)
    for first in range(0, allocation_count, POINTS_PER_CHILD):
        output = in_child(
            lambda report, first=first: fail_allocations_at_points(
                action,
                tmp_path / "data",
                2 * first,
                min(POINTS_PER_CHILD, allocation_count - first),
                report,
            )  # type: ignore[misc]
        )
        assert output is None, output
    print(f"{allocation_count} failed allocations in {action.__name__}")


def in_child(work: Callable[[Callable[[str], object]], None]) -> str | None:
    """Run `work` in a child process. Return its last message if it failed, or None."""
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
