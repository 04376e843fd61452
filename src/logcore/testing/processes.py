"""Simulates several processes on one disk, scheduled by a seed.

    machine = Machine(SimulatedDisk(), seed=7)
    machine.start(lambda fs: ...)          # a program; fs is the disk of its process
    machine.start(lambda fs: ...)
    machine.run()                          # until all have ended

Each call on the disk is a step. Before each step, one of these events may happen, with
the probabilities in Chances:

- A process is killed. Its calls end, its files are closed, and its locks are released a
  few steps later. Its exception handlers have no effect on the disk.
- A process stops, and resumes some steps later.
- Time passes, the wall clock jumps, or all processes are paused together, like the
  processes of a container.
- The power is cut: all processes are killed. The disk then lists the crash states.

A write or a read may take two steps, so that other processes can observe half of it.
While a process waits for a lock, other processes run and time passes. Watches report a
change late or twice, or, with a given probability, not at all.

Rules:
- One process runs at a time. Each process has its own thread, which waits until it is
  scheduled, so that the same seed results in the same run.
- A program ends by returning or by raising an exception. run() raises that exception,
  except SimulatedKill.

This module does not depend on the programs that it runs.
"""

from __future__ import annotations

import posixpath
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import attrs

from logcore.fs import Data, Lock, SharedFS
from logcore.testing.disk import SimulatedDisk
from logcore.testing.locks import LockMembers, lock_among_processes

#: pytest hides the frames of this module in the traceback of a failure.
__tracebackhide__ = True

#: Calls that are not steps, because they do not interact with other processes.
_LOCAL_CALLS: Final = frozenset(
    {
        "now_ms",
        "monotonic_ms",
        "thread_us",
        "random_bytes",
        "real_path",
        "boot",
        "host_name",
        "after_fork",
    }
)
_REPORTED_CALLS: Final = frozenset({"unlink", "mkdir", "rmdir"})
#: Factor for the chances of a kill and a stop in the middle of a write. Few steps are
#: in the middle of a write, but kills at these steps find the most bugs.
_WRITE_DANGER: Final = 20
_JUMP_MS: Final = 3_600_000
#: Durations shorter and longer than the intervals of group members. All are shorter
#: than the time for which a change of a registry waits for another change.
_PAUSES_MS: Final = (500, 5_000, 9_000)


class SimulatedKill(BaseException):
    """SIGKILL.

    No `except Exception` catches it. Code that runs afterwards has no effect on the disk.
    """


@attrs.frozen
class Chances:
    """The chances of the events at a step, each from 0 to 1."""

    #: Another process is scheduled.
    switch: float = 0.3
    kill: float = 0.0
    stop: float = 0.0
    power: float = 0.0
    pass_time: float = 0.02
    #: A report of a watch is lost.
    lost: float = 0.0
    #: The wall clock jumps by an hour, forward or back.
    jump: float = 0.0
    #: All processes pause while time passes. This happens at most once in a run.
    pause: float = 0.0
    #: The numbers of steps for which a process may stop.
    stop_steps: tuple[int, ...] = (5, 50, 500)


class SimulatedProcess:
    """The disk of one process: an fs.SharedFS.

    `forks` increases when the process is killed; see FS.
    """

    def __init__(self, machine: Machine, number: int) -> None:
        self.forks = 0
        self.number = number
        self.is_killed = False
        self.has_ended = False
        self.stopped_until = 0  # a step of the machine
        self.error: BaseException | None = None
        self._machine = machine
        self._disk = machine.disk
        self.handles: dict[int, tuple[str, bool]] = {}
        self.may_run = threading.Semaphore(0)
        self.watches: list[SimulatedWatch] = []
        self._locks: dict[str, LockMembers] = {}

    def __repr__(self) -> str:
        return f"<SimulatedProcess {self.number}>"

    @property
    def fs(self) -> SharedFS:
        return cast(SharedFS, self)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._disk, name)
        if name in _LOCAL_CALLS:
            return call

        def step(*args: Any, **kwargs: Any) -> Any:
            self._machine.step(self)
            result = call(*args, **kwargs)
            if name in _REPORTED_CALLS:
                self._machine.report(name, args[0])
            return result

        self.__dict__[name] = step
        return step

    def open(self, path: str, **kwargs: Any) -> int:
        self._machine.step(self)
        is_new = bool(kwargs.get("create")) and not self._disk.exists(path)
        handle: int = self._disk.open(path, **kwargs)
        self.handles[handle] = path, bool(kwargs.get("write"))
        if is_new:
            self._machine.report("create", path)
        return handle

    def close(self, handle: int) -> None:
        """Close a handle. This is not a step, because the garbage collector calls this
        method in any thread and during other calls.
        """
        if handle not in self.handles:  # already closed when the process ended
            return
        path, is_writable = self.handles.pop(handle)
        self._disk.close(handle)
        if is_writable:
            self._machine.report("close", path)

    def pread(self, handle: int, size: int, position: int) -> bytes:
        """Read in two steps, between which other processes may write."""
        self._machine.step(self)
        cut = self._machine.cut(size)
        first = self._disk.pread(handle, cut, position)
        if cut == size or len(first) < cut:
            return first
        self._machine.step(self)
        return first + self._disk.pread(handle, size - cut, position + cut)

    def pwrite(self, handle: int, data: Data, position: int) -> None:
        self._machine.step(self)
        cut = self._machine.cut(len(data))
        self._disk.pwrite(handle, data[:cut], position)
        if cut < len(data):
            self._machine.step(self, danger=_WRITE_DANGER)
            self._disk.pwrite(handle, data[cut:], position + cut)
        self._machine.report("pwrite", self.handles[handle][0])

    def rename(self, source: str, target: str) -> None:
        self._machine.step(self)
        self._disk.rename(source, target)
        self._machine.report("rename", source)
        self._machine.report("rename", target)

    def lock(self, directory: str, member: str, *, shared: bool = False) -> Lock:
        return lock_among_processes(
            self.fs, self._locks, directory, member, shared=shared
        )

    def lock_byte(
        self, handle: int, byte: int, *, timeout_ms: int = 0, shared: bool = False
    ) -> bool:
        deadline = self._disk.monotonic_ms() + timeout_ms
        while True:
            self._machine.step(self)
            if self._disk.lock_byte(handle, byte, shared=shared):
                return True
            if self._disk.monotonic_ms() >= deadline:
                return False
            self._machine.idle(self)

    def watch(self, *directories: str, closing: Sequence[str] = ()) -> SimulatedWatch:
        self._machine.step(self)
        for directory in (*directories, *closing):
            self._disk.identity(directory)
        watch = SimulatedWatch(self, self._machine, directories, closing)
        self.watches.append(watch)
        return watch


class SimulatedWatch:
    """A watch like inotify's, with reports that are late, duplicated or lost."""

    def __init__(
        self,
        process: SimulatedProcess,
        machine: Machine,
        directories: Sequence[str],
        closing: Sequence[str],
    ) -> None:
        self.saw_close = False
        self.saw_removal = False
        self._process = process
        self._machine = machine
        self._directories = set(directories)
        self._closing = set(closing)
        self._due: list[tuple[int, str]] = []  # (step, kind)

    def wake(self) -> None:
        self._due.append((self._machine.steps, "wake"))

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        if self in self._process.watches:
            self._process.watches.remove(self)

    def report_change(
        self, kind: str, path: str, rng: random.Random, lost: float
    ) -> None:
        directory = posixpath.dirname(path)
        if kind == "rmdir" and path in self._directories | self._closing:
            self._directories.discard(path)
            self._closing.discard(path)
            self._due.append((self._machine.steps, "removal"))
        is_watched = directory in self._directories and kind != "close"
        is_close = directory in self._closing and kind in ("close", "rename", "unlink")
        if not (is_watched or is_close) or rng.random() < lost:
            return
        for _ in range(rng.choice([1, 1, 1, 2])):
            self._due.append((self._machine.steps + rng.choice([0, 0, 1, 5, 20]), kind))

    def wait(self, timeout: float | None) -> bool:
        disk = self._machine.disk
        deadline = None
        if timeout is not None:
            deadline = disk.monotonic_ms() + timeout * 1000
        while True:
            self._machine.step(self._process)
            due = [kind for at, kind in self._due if at <= self._machine.steps]
            if due:
                self._due = [
                    item for item in self._due if item[0] > self._machine.steps
                ]
                self.saw_close |= "close" in due
                self.saw_removal |= "removal" in due
                return True
            if deadline is not None and disk.monotonic_ms() >= deadline:
                return False
            self._machine.idle(self._process)


class Machine:
    """The machine on which the processes run; see the module docstring."""

    def __init__(
        self, disk: SimulatedDisk, *, seed: int = 0, chances: Chances | None = None
    ) -> None:
        self.disk = disk
        self.rng = random.Random(seed)
        if chances is None:
            self.chances = Chances()
        else:
            self.chances = chances
        # The events between two steps, each with its chance, and the sum of the
        # chances.
        self._events = (
            (self.chances.kill, self._kill_random),
            (self.chances.stop, self._stop_random),
            (
                self.chances.pass_time,
                lambda: self.disk.advance(self.rng.choice([1, 10, 100])),
            ),
            (self.chances.power, self.cut_power),
            (self.chances.jump, self._jump),
            (self.chances.pause, self._pause),
        )
        self._event_chance = sum(chance for chance, _ in self._events)
        #: Number of steps so far.
        self.steps = 0
        self.processes: list[SimulatedProcess] = []
        #: The killed processes, in order.
        self.killed: list[SimulatedProcess] = []
        #: Whether the power has been cut.
        self.is_powered_off = False
        #: Duration of the pause of all processes, 0 before it.
        self.paused_ms = 0
        #: A process that no random event kills.
        self.protected: SimulatedProcess | None = None
        #: Called with each process that is killed.
        self.on_kill: Callable[[SimulatedProcess], None] = lambda process: None
        #: Called with a killed process once its locks are released.
        self.on_locks_released: Callable[[SimulatedProcess], None] = lambda process: (
            None
        )
        # (step at which the locks are released, process)
        self._pending_lock_releases: list[tuple[int, SimulatedProcess]] = []
        self._threads: dict[SimulatedProcess, threading.Thread] = {}
        self._all_ended = threading.Semaphore(0)
        self._has_finished = False

    def start(self, program: Callable[[SharedFS], object]) -> SimulatedProcess:
        """Create a process that runs a program.

        Call it before run() or from a program.
        """
        process = SimulatedProcess(self, len(self.processes))
        self.processes.append(process)
        if (
            self._has_finished
        ):  # on_locks_released() of the last processes may start more
            process.has_ended = True
            return process

        def run_program() -> None:
            process.may_run.acquire()
            try:
                if not process.is_killed:
                    program(process.fs)
            except SimulatedKill:
                pass
            except BaseException as error:
                process.error = error
            process.has_ended = True
            if not process.is_killed:
                self._close_all(process)
            self._schedule_next()

        thread = threading.Thread(target=run_program, daemon=True)
        self._threads[process] = thread
        thread.start()
        return process

    def run(self) -> None:
        """Run until every program has ended.

        Raises the first exception of a program.
        """
        self._schedule_next()
        self._all_ended.acquire()
        for thread in self._threads.values():
            thread.join()
        self._has_finished = True
        self._free_locks(all_now=True)
        for process in self.processes:
            if process.error is not None:
                raise process.error

    # -- called by processes -----------------------------------------------------------

    def step(self, process: SimulatedProcess, *, danger: int = 1) -> None:
        """Trigger random events and run other processes before a call of `process`.

        `danger` multiplies the chances that this process is killed or stopped.

        Raises:
            SimulatedKill: The process was killed.
        """
        if process.is_killed:
            raise SimulatedKill
        self.steps += 1
        self._free_locks()
        chances = self.chances
        random_value = self.rng.random()
        if random_value < chances.kill * (danger - 1):
            if process is not self.protected:
                self.kill(process)
        elif random_value < chances.stop * (danger - 1):
            process.stopped_until = self.steps + 200
        random_value = self.rng.random()
        if random_value < self._event_chance:
            self._trigger_event(random_value)
        if process.is_killed:
            raise SimulatedKill
        if process.stopped_until > self.steps or self.rng.random() < chances.switch:
            self._switch(process)

    def idle(self, process: SimulatedProcess) -> None:
        """Run other processes and advance the clock while `process` waits."""
        self.disk.advance(1)
        self._switch(process, idle=True)

    def report(self, kind: str, path: str) -> None:
        for process in self.processes:
            for watch in process.watches:
                watch.report_change(kind, path, self.rng, self.chances.lost)

    def cut(self, size: int) -> int:
        """Return the number of bytes in the first of two steps of a write or a read."""
        if not size:
            return 0
        return self.rng.choice(
            [size, self.rng.randrange(size), min(size, 4096), max(0, size - 4)]
        )

    def kill(self, process: SimulatedProcess) -> None:
        """Kill a process now.

        If the caller is that process, its next call raises SimulatedKill.
        """
        if process.is_killed or process.has_ended:
            return
        process.is_killed = True
        process.forks += 1
        process.watches.clear()
        self.killed.append(process)
        self.on_kill(process)
        # Watches may report the end of the process before its locks are released.
        for path, is_writable in list(process.handles.values()):
            if is_writable:
                self.report("close", path)
        self._pending_lock_releases.append(
            (self.steps + self.rng.choice([0, 0, 1, 10, 100]), process)
        )

    def cut_power(self) -> None:
        """Kill every process now, including the protected one."""
        self.is_powered_off = True
        for process in self._running(include_protected=True):
            self.kill(process)

    # -- random events -----------------------------------------------------------------

    def _trigger_event(self, random_value: float) -> None:
        for chance, event in self._events:
            if random_value < chance:
                event()
                return
            random_value -= chance

    def _kill_random(self) -> None:
        candidates = self._running()
        if candidates:
            self.kill(self.rng.choice(candidates))

    def _stop_random(self) -> None:
        running = self._running(include_protected=True)
        if running:  # empty if the last process was just killed
            self.rng.choice(running).stopped_until = self.steps + self.rng.choice(
                self.chances.stop_steps
            )

    def _jump(self) -> None:
        self.disk.set_wall_clock(
            self.disk.now_ms() + self.rng.choice([-1, 1]) * _JUMP_MS
        )

    def _pause(self) -> None:
        if not self.paused_ms:
            self.paused_ms = self.rng.choice(_PAUSES_MS)
            self.disk.advance(self.paused_ms)

    # -- scheduling --------------------------------------------------------------------

    def _running(self, *, include_protected: bool = False) -> list[SimulatedProcess]:
        running = [
            process
            for process in self.processes
            if not process.has_ended and not process.is_killed
        ]
        if include_protected:
            return running
        return [process for process in running if process is not self.protected]

    def _free_locks(self, *, all_now: bool = False) -> None:
        for item in list(self._pending_lock_releases):
            if all_now or item[0] <= self.steps:
                self._pending_lock_releases.remove(item)
                self._close_all(item[1])
                self.on_locks_released(item[1])

    def _close_all(self, process: SimulatedProcess) -> None:
        # A loop over a copy would fail if the garbage collector closes a handle during
        # the loop; see SimulatedProcess.close().
        while process.handles:
            handle, _ = process.handles.popitem()
            self.disk.close(handle)

    def _switch(self, process: SimulatedProcess, *, idle: bool = False) -> None:
        """Run another process if one is ready. Return when this process is scheduled
        again.
        """
        next_process = self._choose(None if not idle else process)
        if next_process is not process:
            next_process.may_run.release()
            process.may_run.acquire()
        if process.is_killed:
            raise SimulatedKill

    def _choose(self, excluded: SimulatedProcess | None) -> SimulatedProcess:
        """Return the process to run next.

        Killed processes are chosen first, so that they end.
        """
        unfinished = [process for process in self.processes if not process.has_ended]
        killed = [process for process in unfinished if process.is_killed]
        if killed:
            return killed[0]
        ready = [
            process for process in unfinished if process.stopped_until <= self.steps
        ]
        if not ready:
            first = min(unfinished, key=lambda process: process.stopped_until)
            self.steps = first.stopped_until
            return first
        others = [process for process in ready if process is not excluded]
        if not others:
            # Only the waiting process is ready. Time and steps advance until a stopped
            # process resumes and can end the wait.
            self.disk.advance(10)
            self.steps += 1
            return ready[0]
        return self.rng.choice(others)

    def _schedule_next(self) -> None:
        if all(process.has_ended for process in self.processes):
            self._all_ended.release()
        else:
            self._choose(None).may_run.release()
