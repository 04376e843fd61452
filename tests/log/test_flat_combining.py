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


class RecordingCombiner:
    """A combiner that records its operations."""

    def __init__(self) -> None:
        #: The executed operations by number, in order.
        self.executed: list[int] = []
        #: The number of executed operations at the end of each batch.
        self.finished: list[int] = []
        #: The operations that were executed before the last sync.
        self.durable: set[int] = set()
        self.sync_count = 0
        #: The error of each thread, or None.
        self.results: dict[int, BaseException | None] = {}
        self.threads: list[threading.Thread] = []
        self.all_queued = threading.Event()
        self.started: set[int] = set()
        self.combiner = FlatCombiner(
            threading.RLock(),
            lambda: self.finished.append(len(self.executed)),
            self.sync,
        )

    def sync(self) -> None:
        self.sync_count += 1
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
        return {request.step.args[0] for request in requests}

    def join(self) -> None:
        self.all_queued.set()
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "the thread sleeps forever"


def test_one_thread_syncs_for_all() -> None:
    recording = RecordingCombiner()
    recording.start(0, waits_for=6)
    for number in range(1, 7):
        recording.start(number)
    recording.join()
    assert recording.executed == [0, 1, 2, 3, 4, 5, 6], "in the order of the requests"
    assert recording.results == dict.fromkeys(range(7))
    assert recording.finished == [7]
    assert recording.sync_count == 1


def test_operations_queued_during_a_sync_are_combined_by_the_first() -> None:
    recording = RecordingCombiner()

    def sync() -> None:
        if not recording.sync_count:
            for number in (1, 2):
                recording.start(number)
        recording.sync()

    recording.combiner._wait_until_durable = sync
    recording.run(0)
    recording.join()
    assert recording.executed == [0, 1, 2]
    assert recording.results == dict.fromkeys(range(3))
    assert recording.sync_count == 2


def test_error_is_raised_in_the_thread_of_its_operation() -> None:
    recording = RecordingCombiner()
    error = ValueError("wrong")
    recording.start(0, waits_for=2)
    recording.start(1, error=error)
    recording.start(2)
    recording.join()
    assert recording.results == {0: None, 1: error, 2: None}


@pytest.mark.parametrize("during", ["step", "sync"])
def test_signal_handler_can_enqueue_in_the_combiner_thread(during: str) -> None:
    recording = RecordingCombiner()
    handled: list[str] = []

    def handle(phase: str) -> None:
        if phase == during and not handled:
            handled.append(phase)
            recording.run(7)

    def sync() -> None:
        handle("sync")
        recording.sync()

    def step() -> None:
        handle("step")
        recording.executed.append(0)

    recording.combiner._wait_until_durable = sync
    thread = threading.Thread(target=recording.combiner.run, args=(step,), daemon=True)
    recording.threads.append(thread)
    thread.start()
    recording.join()
    assert handled == [during]
    assert sorted(recording.executed) == [0, 7]
    assert recording.results == {7: None}


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
        recording = RecordingCombiner()
        trace = Interrupt(nth, module.__file__)
        traces = {interrupted: trace}
        for number in range(3):
            recording.start(number, waits_for=2 - number, trace=traces.get(number))
        recording.join()
        recording.run(3)
        recording.run(4)
        is_reached = trace.left <= 0
        assert recording.results[3] is None
        assert recording.results[4] is None
        assert len(recording.executed) == len(set(recording.executed)), (
            f"line {nth}: executed twice"
        )
        for number, result in recording.results.items():
            if number == interrupted and is_reached:
                assert isinstance(result, KeyboardInterrupt)
            else:
                assert result is None or isinstance(result, DurabilityUnknownError)
                assert result is not None or number in recording.executed
    assert nth > 8
