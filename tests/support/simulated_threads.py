"""Threads of a simulation: one thread runs at a time, and a seed determines which one.

    with SimulatedThreads(seed=7) as threads:
        threads.spawn(work, "a worker", process)
        threads.sleep_ms(500)          # other threads run, and time passes
        threads.kill(process)

While the simulation is active, locks, conditions, events and threads of the module
`threading` belong to it, so code that uses them runs unchanged. Each thread of the
simulation is a thread of the operating system that waits until it is chosen.

Rules:
- Another thread may be chosen when a thread waits, when it acquires a lock, and when it
  calls maybe_switch().
- Time is simulated. It passes while all threads wait, and sometimes by a millisecond when
  a thread is chosen.
- A thread of a killed process ends with SimulatedKill when it waits, or when it is chosen
  again. A paused process runs no thread until its pause is over.
- The thread that enters the context is also a thread of the simulation. It belongs to no
  process.
"""

from __future__ import annotations

import _thread
import gc
import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, Final, Self
from unittest import mock

import attrs

from logcore.testing.processes import SimulatedKill

#: The probability that another thread is chosen when a thread acquires a free lock.
_SWITCH_AT_LOCK_PROBABILITY: Final = 0.02
#: The probability that a millisecond passes when a thread is chosen.
_PASS_TIME_PROBABILITY: Final = 0.05
#: A simulation ends with an error after this time, because a thread waits forever.
_MAX_MS: Final = 1_000_000
#: The number of choices after which a simulation ends with an error, because a thread
#: does not end.
_MAX_STEPS: Final = 2_000_000


class SimulationStuck(Exception):
    """No thread can ever run again, or the simulation takes too long."""


@attrs.define(eq=False)
class SimulatedProcess:
    """A process of the simulation."""

    name: str
    is_killed: bool = False
    paused_until_ms: int = 0


@attrs.define(eq=False)
class _Thread:
    """A thread that waits while its `run_lock` is locked."""

    name: str
    process: SimulatedProcess | None
    #: None once it has ended.
    work: Callable[[], object] | None = None
    run_lock: Any = attrs.field(factory=_thread.allocate_lock)
    #: The condition that it waits for. None if it only waits to be chosen.
    condition: Callable[[], bool] | None = None
    deadline_ms: int | None = None
    has_ended: bool = False
    #: An attribute of threading.Thread.
    daemon: bool = True

    @property
    def is_killed(self) -> bool:
        return self.process is not None and self.process.is_killed


class SimulatedThreads:
    """The threads, their time and their schedule. See the top of this module."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.steps = 0
        #: Called with the number of milliseconds that have passed.
        self.on_time: Callable[[int], None] = lambda passed_ms: None
        self._main = _Thread("main", None)
        self._main.run_lock.acquire()
        self._current = self._main
        self._threads = [self._main]
        self._idents = {_thread.get_ident()}
        #: The calls of at(): due time, number, call. Numbers keep the order of at().
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        #: The names of threads that have failed, and their errors.
        self.errors: list[tuple[str, BaseException]] = []
        self._stuck: SimulationStuck | None = None
        self._patches: list[Any] = []
        self._is_active = False

    def __enter__(self) -> Self:
        real_lock = threading.Lock

        def lock() -> Any:
            # The threads of a test runner are not scheduled.
            if _thread.get_ident() in self._idents:
                return SimulatedLock(self)
            return real_lock()

        real_current = threading.current_thread

        def current_thread() -> Any:
            if self.is_running_here():
                return self._current
            return real_current()

        self._patches = [
            mock.patch.object(threading, "current_thread", current_thread),
            mock.patch.object(threading, "Lock", lock),
            mock.patch.object(threading, "_allocate_lock", lock),
            mock.patch.object(threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
            mock.patch.object(threading, "Thread", self._thread_class()),
        ]
        for patch in self._patches:
            patch.start()
        # Finalizers would run in the middle of a choice.
        self._is_gc_enabled = gc.isenabled()
        gc.disable()
        self._is_active = True
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end_all()
        finally:
            self._is_active = False
            if self._is_gc_enabled:
                gc.enable()
            for patch in reversed(self._patches):
                patch.stop()

    def _end_all(self) -> None:
        """End all threads that are still running."""
        ending = SimulatedProcess("ending", is_killed=True)
        for thread in self._threads:
            if thread is not self._main:
                thread.process = ending
        self._stuck = None
        while len(self._threads) > 1:
            self._switch(self._main)

    # -- called by threads -------------------------------------------------------------

    @property
    def process(self) -> SimulatedProcess | None:
        """The process of the running thread."""
        return self._current.process

    @property
    def name(self) -> str:
        """The name of the running thread."""
        return self._current.name

    def is_running_here(self) -> bool:
        """Return whether the calling thread is the one that runs."""
        return self._is_active and _thread.get_ident() in self._idents

    def wait(
        self, condition: Callable[[], bool], deadline_ms: int | None = None
    ) -> bool:
        """Wait until a condition is true, and return whether it is.

        The condition is called between the steps of other threads. It must change
        nothing.

        Raises:
            SimulatedKill: the process of this thread was killed.
        """
        thread = self._current
        if thread.is_killed:
            raise SimulatedKill
        thread.condition, thread.deadline_ms = condition, deadline_ms
        self._switch(thread)
        thread.condition = thread.deadline_ms = None
        if thread.is_killed:
            raise SimulatedKill
        return condition()

    def sleep_ms(self, milliseconds: int) -> None:
        self.wait(lambda: False, self.now_ms + milliseconds)

    def maybe_switch(self, chance: float) -> None:
        """Let another thread run, with a probability of `chance`."""
        if self._current.is_killed:
            raise SimulatedKill
        if self.rng.random() < chance:
            self.wait(lambda: True)

    def at(self, due_ms: int, call: Callable[[], None]) -> None:
        """Call a function when time reaches `due_ms`. The function must not wait."""
        heapq.heappush(self._due, (due_ms, next(self._numbers), call))

    def spawn(
        self, work: Callable[[], object], name: str, process: SimulatedProcess | None
    ) -> _Thread:
        """Start a thread of a process."""
        thread = _Thread(name, process, work)
        thread.run_lock.acquire()
        self._threads.append(thread)
        _thread.start_new_thread(self._run, (thread,))
        return thread

    def kill(self, process: SimulatedProcess) -> None:
        """Kill a process, and wait until its threads have ended."""
        process.is_killed = True
        self.wait(
            lambda: not any(thread.process is process for thread in self._threads)
        )

    # -- scheduling --------------------------------------------------------------------

    def _run(self, thread: _Thread) -> None:
        thread.run_lock.acquire()
        self._idents.add(_thread.get_ident())
        try:
            if not thread.is_killed and thread.work is not None:
                thread.work()
        except SimulatedKill:
            pass
        except BaseException as error:
            # A killed thread may find locks that other killed threads still hold.
            if not thread.is_killed:
                self.errors.append((thread.name, error))
        # Objects that only this thread uses must be freed before another thread runs.
        thread.work = None
        thread.has_ended = True
        self._threads.remove(thread)
        self._idents.discard(_thread.get_ident())
        self._current = self._choose()
        self._current.run_lock.release()

    def _switch(self, thread: _Thread) -> None:
        """Let the next thread run. Return when this thread is chosen again."""
        chosen = self._choose()
        if chosen is not thread:
            self._current = chosen
            chosen.run_lock.release()
            thread.run_lock.acquire()
        if self._stuck is not None and thread is self._main:
            raise self._stuck

    def _choose(self) -> _Thread:
        self.steps += 1
        if self._stuck is None and (self.steps > _MAX_STEPS or self.now_ms > _MAX_MS):
            self._stuck = SimulationStuck(
                f"{self.steps} steps and {self.now_ms} ms: {self._waiting()}"
            )
        if self._stuck is not None:
            return self._main
        if self.rng.random() < _PASS_TIME_PROBABILITY:
            self._pass_time(1)
        while True:
            killed = [thread for thread in self._threads if thread.is_killed]
            if killed:
                return killed[0]
            ready = [thread for thread in self._threads if self._is_ready(thread)]
            if ready:
                return self.rng.choice(ready)
            wake_times_ms = [
                wake_time_ms
                for thread in self._threads
                if (wake_time_ms := self._wake_time_ms(thread)) is not None
            ]
            if self._due:
                wake_times_ms.append(self._due[0][0])
            if not wake_times_ms:
                self._stuck = SimulationStuck(f"all threads wait: {self._waiting()}")
                return self._main
            self._pass_time(max(0, min(wake_times_ms) - self.now_ms))

    def _is_ready(self, thread: _Thread) -> bool:
        process = thread.process
        if process is not None and process.paused_until_ms > self.now_ms:
            return False
        if thread.condition is None or thread.condition():
            return True
        return thread.deadline_ms is not None and thread.deadline_ms <= self.now_ms

    def _wake_time_ms(self, thread: _Thread) -> int | None:
        process = thread.process
        if process is not None and process.paused_until_ms > self.now_ms:
            return process.paused_until_ms
        return thread.deadline_ms

    def _pass_time(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.on_time(passed_ms)
        while self._due and self._due[0][0] <= self.now_ms:
            heapq.heappop(self._due)[2]()

    def _waiting(self) -> str:
        return ", ".join(thread.name for thread in self._threads)

    def _thread_class(self) -> type:
        """Return the class of threads that code in the simulation starts."""
        simulation = self

        class SimulatedThread:
            def __init__(
                self,
                target: Callable[..., object],
                name: str = "thread",
                args: tuple[Any, ...] = (),
                daemon: bool | None = None,
            ) -> None:
                self.name = name
                self._work = lambda: target(*args)
                self._thread: _Thread | None = None

            def start(self) -> None:
                process = simulation.process
                self._thread = simulation.spawn(self._work, self.name, process)

            def is_alive(self) -> bool:
                return self._thread is not None and not self._thread.has_ended

            def join(self, timeout: float | None = None) -> None:
                deadline_ms = None
                if timeout is not None:
                    deadline_ms = simulation.now_ms + round(timeout * 1_000)
                simulation.wait(lambda: not self.is_alive(), deadline_ms)

        return SimulatedThread


class SimulatedLock:
    """A lock for threads of the simulation."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._threads = threads
        self._is_locked = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        threads = self._threads
        if threads.is_running_here():
            if not self._is_locked and blocking:
                threads.maybe_switch(_SWITCH_AT_LOCK_PROBABILITY)
            if self._is_locked:
                if not blocking:
                    return False
                deadline_ms = None
                if timeout >= 0:
                    deadline_ms = threads.now_ms + round(timeout * 1_000)
                if not threads.wait(lambda: not self._is_locked, deadline_ms):
                    return False
        self._is_locked = True
        return True

    def release(self) -> None:
        self._is_locked = False

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._is_locked = False
