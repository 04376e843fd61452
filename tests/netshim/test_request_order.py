"""The order of work that may block on the disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from netshim.request_order import WorkQueues


class Threads:
    """Submitted work, which the test runs."""

    def __init__(self, *, are_closed: bool = False) -> None:
        self.submitted: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.are_closed = are_closed
        self.queues = WorkQueues(self.submit)
        self.done: list[Any] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        if self.are_closed:
            done(RuntimeError("the threads were shut down"))
        else:
            self.submitted.append((work, done))

    def add(self, key: str, result: object, **more: Any) -> None:
        self.queues.submit(key, partial(str, result), self.done.append, **more)

    def run_one(self) -> None:
        work, done = self.submitted.pop(0)
        done(work())


def test_many_keys_do_not_delay_other_work() -> None:
    threads = Threads()
    for number in range(1_000):
        threads.add(f"log {number}", number)
    most = len(threads.submitted)
    assert most <= 16
    threads.add("response", "urgent", is_urgent=True)
    while threads.submitted:
        assert len(threads.submitted) <= most
        threads.run_one()
    assert threads.done.index("urgent") <= most
    threads.done.remove("urgent")
    assert threads.done == [str(number) for number in range(1_000)]
    assert not threads.queues.keys()


def test_work_of_a_key_runs_in_order_one_at_a_time() -> None:
    threads = Threads()
    threads.add("log", 0)
    for number in range(1, 200):
        threads.add("log", number)
    assert len(threads.submitted) == 1
    while threads.submitted:
        assert len(threads.submitted) == 1
        threads.run_one()
    assert threads.done == [str(number) for number in range(200)]


def test_a_busy_key_does_not_keep_others_waiting() -> None:
    threads = Threads()
    for number in range(1_000):
        threads.add("busy", number)
    for number in range(20):
        threads.add(f"log {number}", f"other {number}")
    while "other 19" not in threads.done:
        threads.run_one()
    assert len(threads.done) < 1_000


def test_work_of_a_stopping_broker_ends_with_the_error() -> None:
    threads = Threads()
    threads.add("first", 1)
    for number in range(10_000):
        threads.add(f"log {number}", number)
    threads.are_closed = True
    while threads.submitted:
        threads.run_one()
    assert threads.done[0] == "1"
    assert len(threads.done) == 10_001
    errors = [error for error in threads.done if isinstance(error, RuntimeError)]
    assert len(errors) > 9_900
