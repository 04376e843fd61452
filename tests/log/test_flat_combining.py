"""Flat combining: operations of several threads, executed by one of them. Each
operation runs once, in order, and is durable, at whatever line a thread is interrupted.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

import pytest

import logcore.coordinators.flat_combining as module
from logcore.coordinators.flat_combining import FlatCombiner
from logcore.errors import DurabilityUnknownError
from support.interrupting import Interrupt

#: Timeout for steps that normally take no time. A thread that hangs fails the test.
SECONDS = 300


class Trial:
    """A combiner that records its operations."""

    def __init__(self) -> None:
        #: The executed operations by number, in order.
        self.executed: list[int] = []
        #: The number of executed operations at the end of each batch.
        self.finished: list[int] = []
        #: The operations that were executed before the last sync.
        self.durable: set[int] = set()
        self.syncs = 0
        #: The error of each thread, or None.
        self.results: dict[int, BaseException | None] = {}
        self.threads: list[threading.Thread] = []
        self.all_queued = threading.Event()
        self.started: set[int] = set()
        self.combiner = FlatCombiner(
            threading.RLock(),
            lambda: self.finished.append(len(self.executed)),
            self.settle,
        )

    def settle(self) -> None:
        self.syncs += 1
        self.durable |= set(self.executed)

    def step(self, number: int, waits_for: int, error: Exception | None) -> None:
        self.started.add(number)
        while len(self.combiner._requests) < waits_for and not self.all_queued.wait(
            0.0005
        ):
            pass
        self.executed.append(number)
        if error is not None:
            raise error

    def run(
        self,
        number: int,
        waits_for: int = 0,
        trace: Any = None,
        error: Exception | None = None,
    ) -> None:
        """Run an operation that first waits until `waits_for` operations of other
        threads are queued.
        """
        result: BaseException | None = None
        before = sys.gettrace()
        sys.settrace(trace or before)
        try:
            self.combiner.run(functools.partial(self.step, number, waits_for, error))
        except BaseException as caught:
            result = caught
        finally:
            sys.settrace(before)
        self.results[number] = result
        if result is None:
            assert number in self.durable

    def start(self, number: int, **options: Any) -> None:
        """Start a thread, and return once its operation has begun or is queued, or once
        it was interrupted.
        """
        thread = threading.Thread(
            target=self.run, args=(number,), kwargs=options, daemon=True
        )
        self.threads.append(thread)
        thread.start()
        while thread.is_alive() and number not in self.started | self.waiting():
            time.sleep(0.0005)

    def waiting(self) -> set[int]:
        requests: list[Any] = list(self.combiner._requests.copy())
        return {entry.step.args[0] for entry in requests}

    def join(self) -> None:
        self.all_queued.set()
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "the thread sleeps forever"


def test_one_thread_syncs_for_all() -> None:
    trial = Trial()
    trial.start(0, waits_for=6)
    for number in range(1, 7):
        trial.start(number)
    trial.join()
    assert trial.executed == [0, 1, 2, 3, 4, 5, 6], "in the order of the requests"
    assert trial.results == dict.fromkeys(range(7))
    assert trial.finished == [7]
    assert trial.syncs == 1


def test_operations_queued_during_a_sync_are_combined_by_the_first() -> None:
    trial = Trial()

    def settle() -> None:
        if not trial.syncs:
            for number in (1, 2):
                trial.start(number)
        trial.settle()

    trial.combiner._wait_until_durable = settle
    trial.run(0)
    trial.join()
    assert trial.executed == [0, 1, 2]
    assert trial.results == dict.fromkeys(range(3))
    assert trial.syncs == 2


def test_error_is_raised_in_the_thread_of_its_operation() -> None:
    trial = Trial()
    error = ValueError("wrong")
    trial.start(0, waits_for=2)
    trial.start(1, error=error)
    trial.start(2)
    trial.join()
    assert trial.results == {0: None, 1: error, 2: None}


@pytest.mark.parametrize("during", ["step", "sync"])
def test_signal_handler_can_enqueue_in_the_combiner_thread(during: str) -> None:
    trial = Trial()
    handled: list[str] = []

    def handle(phase: str) -> None:
        if phase == during and not handled:
            handled.append(phase)
            trial.run(7)

    def settle() -> None:
        handle("sync")
        trial.settle()

    def step() -> None:
        handle("step")
        trial.executed.append(0)

    trial.combiner._wait_until_durable = settle
    thread = threading.Thread(target=trial.combiner.run, args=(step,), daemon=True)
    trial.threads.append(thread)
    thread.start()
    trial.join()
    assert handled == [during]
    assert sorted(trial.executed) == [0, 7]
    assert trial.results == {7: None}


def test_second_wake_has_no_effect() -> None:
    request = module._Request(lambda: None)
    request.wake()
    request.wake()
    assert request.wakeup_lock.acquire(timeout=0)


@pytest.mark.long
@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_interrupt_at_any_line_leaves_no_thread_waiting(
    interrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread 0 is the combiner, thread 1 waits to become the combiner, and thread 2
    sleeps.
    """
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.01)
    nth = 0
    is_reached = True
    while is_reached:
        nth += 1
        trial = Trial()
        trace = Interrupt(nth, module.__file__)
        traces = {interrupted: trace}
        for number in range(3):
            trial.start(number, waits_for=2 - number, trace=traces.get(number))
        trial.join()
        trial.run(3)
        trial.run(4)
        is_reached = trace.left <= 0
        assert trial.results[3] is None
        assert trial.results[4] is None
        assert len(trial.executed) == len(set(trial.executed)), (
            f"line {nth}: executed twice"
        )
        for number, result in trial.results.items():
            if number == interrupted and is_reached:
                assert isinstance(result, KeyboardInterrupt)
            else:
                assert result is None or isinstance(result, DurabilityUnknownError)
                assert result is not None or number in trial.executed
    assert nth > 8
