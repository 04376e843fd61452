"""Several processes on one simulated disk: each call of the disk is a step, and a seed chooses whose step is next.

    machine = Machine(SimulatedDisk(), seed=7)
    machine.start(lambda fs: ...)          # a program; fs is the disk as its process sees it
    machine.start(lambda fs: ...)
    machine.run()                          # until all have ended

What may happen between any two steps, by the chances that are given:

- A process is killed: its calls end, what it had open is closed, its locks are free a few steps later. Nothing that it
  does on its way out has an effect.
- A process stops, and goes on some steps later.
- Time passes. The wall clock jumps. All processes are paused together, as those of a container are.
- The power is cut: all are killed. What a crash may leave is then the disk's to say.

A write is two steps, and a read too, so that others see one half done. A lock that is waited for lets others run, and
time pass. Watches report late, twice or, by a chance, not at all.

Rules:
- One process runs at a time, each in a thread of its own that waits for its turn: the same seed gives the same run.
- A program ends by returning, or by an exception, which run() raises; SimulatedKill is none.

This module knows nothing of what the programs do.
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

#: pytest leaves frames of this module out of what it shows of a failure.
__tracebackhide__ = True

#: Calls that are no step: they meet no other process.
_QUIET: Final = frozenset(
    {"now_ms", "monotonic_ms", "thread_us", "random_bytes", "real_path", "boot", "host_name", "after_fork"}
)
_REPORTED: Final = frozenset({"unlink", "mkdir", "rmdir"})
#: The middle of a write is one step of many, and the one that matters most.
_DANGER: Final = 20
_JUMP_MS: Final = 3_600_000
#: Shorter and longer than the intervals of members, and shorter than what a change of a registry waits for another.
_PAUSES_MS: Final = (500, 5_000, 9_000)


class SimulatedKill(BaseException):
    """SIGKILL: no `except Exception` catches it, and whatever runs on its way out changes nothing."""


@attrs.frozen
class Chances:
    """Of what happens at a step, each from 0 to 1. switch: another process goes on; lost: a report of a watch; jump:
    the wall clock, an hour to either side; pause: all processes stand still while time passes, once in a run.
    stop_steps: for how many steps a process may stop.
    """

    switch: float = 0.3
    kill: float = 0.0
    stop: float = 0.0
    power: float = 0.0
    pass_time: float = 0.02
    lost: float = 0.0
    jump: float = 0.0
    pause: float = 0.0
    stop_steps: tuple[int, ...] = (5, 50, 500)


class SimulatedProcess:
    """The disk as one process sees it: an fs.SharedFS. forks: as for FS, rises when the process is killed."""

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
        if name in _QUIET:
            return call

        def step(*args: Any, **named: Any) -> Any:
            self._machine.step(self)
            result = call(*args, **named)
            if name in _REPORTED:
                self._machine.report(name, args[0])
            return result

        self.__dict__[name] = step
        return step

    def open(self, path: str, **named: Any) -> int:
        self._machine.step(self)
        is_new = bool(named.get("create")) and not self._disk.exists(path)
        handle: int = self._disk.open(path, **named)
        self.handles[handle] = path, bool(named.get("write"))
        if is_new:
            self._machine.report("create", path)
        return handle

    def close(self, handle: int) -> None:
        """No step of its own: the collector calls it too, in any thread and in the middle of other calls."""
        if handle not in self.handles:  # the end of the process has closed it
            return
        path, is_writable = self.handles.pop(handle)
        self._disk.close(handle)
        if is_writable:
            self._machine.report("close", path)

    def pread(self, handle: int, size: int, position: int) -> bytes:
        """In two steps, between which others may write."""
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
            self._machine.step(self, danger=_DANGER)
            self._disk.pwrite(handle, data[cut:], position + cut)
        self._machine.report("pwrite", self.handles[handle][0])

    def rename(self, source: str, target: str) -> None:
        self._machine.step(self)
        self._disk.rename(source, target)
        self._machine.report("rename", source)
        self._machine.report("rename", target)

    def lock(self, directory: str, member: str, *, shared: bool = False) -> Lock:
        return lock_among_processes(self.fs, self._locks, directory, member, shared=shared)

    def lock_byte(self, handle: int, byte: int, *, timeout_ms: int = 0, shared: bool = False) -> bool:
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
    """As inotify's, with reports that are late, doubled or lost."""

    def __init__(
        self, process: SimulatedProcess, machine: Machine, directories: Sequence[str], closing: Sequence[str]
    ) -> None:
        self.saw_close = False
        self.saw_removal = False
        self._process = process
        self._machine = machine
        self._directories = set(directories)
        self._closing = set(closing)
        self._due: list[tuple[int, str]] = []  # (step, kind)

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        if self in self._process.watches:
            self._process.watches.remove(self)

    def hear(self, kind: str, path: str, rng: random.Random, lost: float) -> None:
        place = posixpath.dirname(path)
        if kind == "rmdir" and path in self._directories | self._closing:
            self._directories.discard(path)
            self._closing.discard(path)
            self._due.append((self._machine.steps, "removal"))
        is_wanted = place in self._directories and kind != "close"
        is_end = place in self._closing and kind in ("close", "rename", "unlink")
        if not (is_wanted or is_end) or rng.random() < lost:
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
                self._due = [item for item in self._due if item[0] > self._machine.steps]
                self.saw_close |= "close" in due
                self.saw_removal |= "removal" in due
                return True
            if deadline is not None and disk.monotonic_ms() >= deadline:
                return False
            self._machine.idle(self._process)


class Machine:
    """See the top of this module. steps: how many there were; killed: processes, in their order; is_off: since a power
    cut; paused_ms: how long all stood still; spared: a process that chance does not kill. on_kill: called with each
    process that is killed; on_freed: called when its locks are free.
    """

    def __init__(self, disk: SimulatedDisk, *, seed: int = 0, chances: Chances | None = None) -> None:
        self.disk = disk
        self.rng = random.Random(seed)
        if chances is None:
            self.chances = Chances()
        else:
            self.chances = chances
        # What may happen between two steps, the chance of each, and that of any.
        self._events = (
            (self.chances.kill, self._kill_one),
            (self.chances.stop, self._stop_one),
            (self.chances.pass_time, lambda: self.disk.advance(self.rng.choice([1, 10, 100]))),
            (self.chances.power, self.cut_power),
            (self.chances.jump, self._jump),
            (self.chances.pause, self._pause),
        )
        self._likely = sum(chance for chance, _ in self._events)
        self.steps = 0
        self.processes: list[SimulatedProcess] = []
        self.killed: list[SimulatedProcess] = []
        self.is_off = False
        self.paused_ms = 0
        self.spared: SimulatedProcess | None = None
        self.on_kill: Callable[[SimulatedProcess], None] = lambda process: None
        self.on_freed: Callable[[SimulatedProcess], None] = lambda process: None
        self._dying: list[tuple[int, SimulatedProcess]] = []  # (step at which its locks are freed, process)
        self._threads: dict[SimulatedProcess, threading.Thread] = {}
        self._over = threading.Semaphore(0)
        self._is_over = False

    def start(self, program: Callable[[SharedFS], object]) -> SimulatedProcess:
        """A process that runs a program; before run(), or from inside another program."""
        process = SimulatedProcess(self, len(self.processes))
        self.processes.append(process)
        if self._is_over:  # on_freed() of the last ones may ask for more
            process.has_ended = True
            return process

        def body() -> None:
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
            self._pass_on()

        thread = threading.Thread(target=body, daemon=True)
        self._threads[process] = thread
        thread.start()
        return process

    def run(self) -> None:
        """Until every program has ended; raises the first exception of one."""
        self._pass_on()
        self._over.acquire()
        for thread in self._threads.values():
            thread.join()
        self._is_over = True
        self._free_locks(all_of_them=True)
        for process in self.processes:
            if process.error is not None:
                raise process.error

    # -- for processes -----------------------------------------------------------------------------------------------

    def step(self, process: SimulatedProcess, *, danger: int = 1) -> None:
        """Before each call of a process: others may go on, things may happen. danger: how much likelier that it dies or
        stops than elsewhere.
        """
        if process.is_killed:
            raise SimulatedKill
        self.steps += 1
        self._free_locks()
        chances = self.chances
        chance = self.rng.random()
        if chance < chances.kill * (danger - 1):
            if process is not self.spared:
                self.kill(process)
        elif chance < chances.stop * (danger - 1):
            process.stopped_until = self.steps + 200
        chance = self.rng.random()
        if chance < self._likely:
            self._happen(chance)
        if process.is_killed:
            raise SimulatedKill
        if process.stopped_until > self.steps or self.rng.random() < chances.switch:
            self._switch(process)

    def idle(self, process: SimulatedProcess) -> None:
        """A process waits: others go on, and time passes."""
        self.disk.advance(1)
        self._switch(process, idle=True)

    def report(self, kind: str, path: str) -> None:
        for process in self.processes:
            for watch in process.watches:
                watch.hear(kind, path, self.rng, self.chances.lost)

    def cut(self, size: int) -> int:
        """How much of a write or a read is its first step."""
        if not size:
            return 0
        return self.rng.choice([size, self.rng.randrange(size), min(size, 4096), max(0, size - 4)])

    def kill(self, process: SimulatedProcess) -> None:
        """Ends a process now. The caller, if it is this one, gets SimulatedKill from its next call."""
        if process.is_killed or process.has_ended:
            return
        process.is_killed = True
        process.forks += 1
        process.watches.clear()
        self.killed.append(process)
        self.on_kill(process)
        # The events of the end may come before the locks are free.
        for path, is_writable in list(process.handles.values()):
            if is_writable:
                self.report("close", path)
        self._dying.append((self.steps + self.rng.choice([0, 0, 1, 10, 100]), process))

    def cut_power(self) -> None:
        """Ends every process now."""
        self.is_off = True
        for process in self._living(spared=True):
            self.kill(process)

    # -- what may happen ---------------------------------------------------------------------------------------------

    def _happen(self, chance: float) -> None:
        for likelihood, event in self._events:
            if chance < likelihood:
                event()
                return
            chance -= likelihood

    def _kill_one(self) -> None:
        victims = self._living()
        if victims:
            self.kill(self.rng.choice(victims))

    def _stop_one(self) -> None:
        living = self._living(spared=True)
        if living:  # else the last one has just been killed
            self.rng.choice(living).stopped_until = self.steps + self.rng.choice(self.chances.stop_steps)

    def _jump(self) -> None:
        self.disk.set_wall_clock(self.disk.now_ms() + self.rng.choice([-1, 1]) * _JUMP_MS)

    def _pause(self) -> None:
        if not self.paused_ms:
            self.paused_ms = self.rng.choice(_PAUSES_MS)
            self.disk.advance(self.paused_ms)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _living(self, *, spared: bool = False) -> list[SimulatedProcess]:
        living = [process for process in self.processes if not process.has_ended and not process.is_killed]
        if spared:
            return living
        return [process for process in living if process is not self.spared]

    def _free_locks(self, *, all_of_them: bool = False) -> None:
        for item in list(self._dying):
            if all_of_them or item[0] <= self.steps:
                self._dying.remove(item)
                self._close_all(item[1])
                self.on_freed(item[1])

    def _close_all(self, process: SimulatedProcess) -> None:
        while process.handles:  # the collector may close others meanwhile, see SimulatedProcess.close()
            handle, _ = process.handles.popitem()
            self.disk.close(handle)

    def _switch(self, process: SimulatedProcess, *, idle: bool = False) -> None:
        """Lets another process go on, if one can; returns when it is this one's turn again."""
        following = self._choose(None if not idle else process)
        if following is not process:
            following.may_run.release()
            process.may_run.acquire()
        if process.is_killed:
            raise SimulatedKill

    def _choose(self, but: SimulatedProcess | None) -> SimulatedProcess:
        """Whose turn is next. Those that were killed come first: they have to end."""
        waiting = [process for process in self.processes if not process.has_ended]
        killed = [process for process in waiting if process.is_killed]
        if killed:
            return killed[0]
        ready = [process for process in waiting if process.stopped_until <= self.steps]
        if not ready:
            first = min(waiting, key=lambda process: process.stopped_until)
            self.steps = first.stopped_until
            return first
        others = [process for process in ready if process is not but]
        if not others:
            # It waits, and the process that could end its waiting is stopped.
            self.disk.advance(10)
            self.steps += 1
            return ready[0]
        return self.rng.choice(others)

    def _pass_on(self) -> None:
        if all(process.has_ended for process in self.processes):
            self._over.release()
        else:
            self._choose(None).may_run.release()
