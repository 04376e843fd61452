"""Threads that run work for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from netshim.workers import Workers


def deliver(done: Callable[[Any], None], outcome: Any) -> None:
    done(outcome)


async def all_of(count: int, results: list[Any]) -> None:
    """Wait until as many results were delivered."""
    while len(results) < count:
        await asyncio.sleep(0.001)


def test_every_result_is_delivered_once_in_the_loop() -> None:
    results: list[int] = []
    threads: set[int] = set()

    async def run() -> None:
        workers = Workers(
            asyncio.get_running_loop().call_soon_threadsafe, "test", 4, deliver
        )
        loop_thread = threading.get_ident()

        def done(number: int) -> None:
            assert threading.get_ident() == loop_thread
            results.append(number)

        def work(number: int) -> int:
            threads.add(threading.get_ident())
            return number

        for number in range(3000):
            workers.submit(lambda number=number: work(number), done)
            if number % 100 == 0:
                await asyncio.sleep(0)
        await all_of(3000, results)
        workers.shutdown()
        assert loop_thread not in threads

    asyncio.run(run())
    assert sorted(results) == list(range(3000))
    assert len(threads) <= 4


def test_work_that_a_result_submits_is_run() -> None:
    results: list[int] = []

    async def run() -> None:
        workers = Workers(
            asyncio.get_running_loop().call_soon_threadsafe, "test", 2, deliver
        )

        def done(left: int) -> None:
            results.append(left)
            if left:
                workers.submit(lambda: left - 1, done)

        workers.submit(lambda: 500, done)
        await all_of(501, results)
        workers.shutdown()

    asyncio.run(run())
    assert results == list(range(500, -1, -1))


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(1)])
def test_an_exception_is_a_result(error: BaseException) -> None:
    results: list[Any] = []

    async def run() -> None:
        workers = Workers(
            asyncio.get_running_loop().call_soon_threadsafe, "test", 1, deliver
        )

        def fail() -> None:
            raise error

        workers.submit(fail, results.append)
        workers.submit(lambda: "next", results.append)
        await all_of(2, results)
        workers.shutdown()

    asyncio.run(run())
    assert results == [error, "next"]


def test_shutdown_runs_the_submitted_work_and_refuses_more() -> None:
    results: list[int] = []

    async def run() -> None:
        workers = Workers(
            asyncio.get_running_loop().call_soon_threadsafe, "test", 2, deliver
        )
        for number in range(100):
            workers.submit(lambda number=number: number, results.append)
        workers.shutdown()
        with pytest.raises(RuntimeError):
            workers.submit(int, results.append)
        await all_of(100, results)
        assert workers._threads == []

    asyncio.run(run())
    assert sorted(results) == list(range(100))


def test_work_that_ends_after_its_loop_is_dropped() -> None:
    may_end = threading.Event()

    async def run() -> Workers:
        workers = Workers(
            asyncio.get_running_loop().call_soon_threadsafe, "test", 1, deliver
        )
        workers.submit(may_end.wait, print)
        return workers

    workers = asyncio.run(run())
    may_end.set()
    workers.shutdown()


@pytest.mark.parametrize("started", [0, 2])
def test_a_system_without_threads_loses_no_work(
    started: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[int] = []
    start = threading.Thread.start
    threads = 0

    def start_some(thread: threading.Thread) -> None:
        nonlocal threads
        threads += 1
        if threads > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def run() -> None:
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        workers = Workers(call_soon, "test", 4, deliver)
        monkeypatch.setattr(threading.Thread, "start", start_some)
        if not started:
            with pytest.raises(RuntimeError):
                workers.submit(int, results.append)
            return
        for number in range(100):
            workers.submit(lambda number=number: number, results.append)
        await all_of(100, results)
        workers.shutdown()

    asyncio.run(run())
    assert sorted(results) == list(range(100 if started else 0))
    assert len(caplog.records) == (1 if started else 0)
