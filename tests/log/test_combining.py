"""Steps of several threads that one of them takes: each once, in order, on disk,
whoever is interrupted where.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

import pytest

import logcore.coordinators.flat_combining as module
from logcore.coordinators.flat_combining import Combined
from logcore.errors import DurabilityUnknownError
from support.interrupting import Interrupt

#: For what takes no time at all; a thread that hangs fails the test.
SECONDS = 300


class World:
    """taken: the steps, by number, in their order. on_disk: those that were taken when
    the disk was last waited for.
    told: what each thread was told.
    """

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.finished: list[int] = []  # how many were taken, each time
        self.on_disk: set[int] = set()
        self.syncs = 0
        self.told: dict[int, BaseException | None] = {}
        self.threads: list[threading.Thread] = []
        self.all_there = threading.Event()
        self.begun: set[int] = set()
        self.combined = Combined(
            threading.RLock(),
            lambda: self.finished.append(len(self.taken)),
            self.settle,
        )

    def settle(self) -> None:
        self.syncs += 1
        self.on_disk |= set(self.taken)

    def step(self, number: int, waits_for: int, error: Exception | None) -> None:
        self.begun.add(number)
        while len(self.combined._asked) < waits_for and not self.all_there.wait(0.0005):
            pass
        self.taken.append(number)
        if error is not None:
            raise error

    def ask(
        self,
        number: int,
        waits_for: int = 0,
        trace: Any = None,
        error: Exception | None = None,
    ) -> None:
        """waits_for: how many steps of other threads have to wait before this step goes
        on.
        """
        told: BaseException | None = None
        sys.settrace(trace)
        try:
            self.combined.take(functools.partial(self.step, number, waits_for, error))
        except BaseException as caught:
            told = caught
        finally:
            sys.settrace(None)
        self.told[number] = told
        if told is None:
            assert number in self.on_disk

    def start(self, number: int, **given: Any) -> None:
        """Returns once the step has begun or waits, or its thread was interrupted."""
        thread = threading.Thread(
            target=self.ask, args=(number,), kwargs=given, daemon=True
        )
        self.threads.append(thread)
        thread.start()
        while thread.is_alive() and number not in self.begun | self.waiting():
            time.sleep(0.0005)

    def waiting(self) -> set[int]:
        asked: list[Any] = list(self.combined._asked.copy())
        return {one.step.args[0] for one in asked}

    def join(self) -> None:
        self.all_there.set()
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "it sleeps for ever"


def test_one_thread_waits_for_the_disk_for_all() -> None:
    world = World()
    world.start(0, waits_for=6)
    for number in range(1, 7):
        world.start(number)
    world.join()
    assert world.taken == [0, 1, 2, 3, 4, 5, 6], (
        "in the order in which they were asked for"
    )
    assert world.told == dict.fromkeys(range(7))
    assert world.finished == [7]
    assert world.syncs == 1


def test_who_comes_while_the_disk_is_waited_for_is_led_by_the_first_of_them() -> None:
    world = World()

    def settle() -> None:
        if not world.syncs:
            for number in (1, 2):
                world.start(number)
        world.settle()

    world.combined._settle = settle
    world.ask(0)
    world.join()
    assert world.taken == [0, 1, 2]
    assert world.told == dict.fromkeys(range(3))
    assert world.syncs == 2


def test_an_error_is_told_to_who_asked() -> None:
    world = World()
    wrong = ValueError("wrong")
    world.start(0, waits_for=2)
    world.start(1, error=wrong)
    world.start(2)
    world.join()
    assert world.told == {0: None, 1: wrong, 2: None}


@pytest.mark.parametrize("moment", ["step", "sync"])
def test_a_signal_handler_asks_in_the_thread_that_leads(moment: str) -> None:
    world = World()
    handled: list[str] = []

    def handle(now: str) -> None:
        if now == moment and not handled:
            handled.append(now)
            world.ask(7)

    def settle() -> None:
        handle("sync")
        world.settle()

    def step() -> None:
        handle("step")
        world.taken.append(0)

    world.combined._settle = settle
    thread = threading.Thread(target=world.combined.take, args=(step,), daemon=True)
    world.threads.append(thread)
    thread.start()
    world.join()
    assert handled == [moment]
    assert sorted(world.taken) == [0, 7]
    assert world.told == {7: None}


def test_who_is_woken_twice_is_awake() -> None:
    asked = module._Asked(lambda: None)
    asked.wake()
    asked.wake()
    assert asked.gate.acquire(timeout=0)


@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_an_interrupt_at_any_line_keeps_nobody_waiting(
    interrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread 0 leads, thread 1 waits for its turn to lead, thread 2 sleeps."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    nth = 0
    is_met = True
    while is_met:
        nth += 1
        world = World()
        trace = Interrupt(nth, module.__file__)
        traces = {interrupted: trace}
        for number in range(3):
            world.start(number, waits_for=2 - number, trace=traces.get(number))
        world.join()
        world.ask(3)
        world.ask(4)
        is_met = trace.left <= 0
        assert world.told[3] is None
        assert world.told[4] is None
        assert len(world.taken) == len(set(world.taken)), f"line {nth}: taken twice"
        for number, told in world.told.items():
            if number == interrupted and is_met:
                assert isinstance(told, KeyboardInterrupt)
            else:
                assert told is None or isinstance(told, DurabilityUnknownError)
                assert told is not None or number in world.taken
    assert nth > 8
