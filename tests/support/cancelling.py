"""Cancels a coroutine at each of its awaits.

cancelled(make, at, late) runs a coroutine in a task, and cancels the task when it
awaits for the at-th time: at once, or, if late, after the awaited future is done and
before the task resumes.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any


class Cancelling:
    """at: the await that is cancelled, from 0. awaits: how many there were."""

    def __init__(self, awaited: Awaitable[Any], at: int, *, late: bool) -> None:
        self._awaited = awaited
        self._at = at
        self._late = late
        self.awaits = 0

    @types.coroutine
    def run(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        steps = self._awaited.__await__()
        throw: BaseException | None = None
        while True:
            try:
                found = next(steps) if throw is None else steps.throw(throw)
            except StopIteration as end:
                return end.value
            if self.awaits == self._at:
                if self._late and found is not None:
                    found.add_done_callback(lambda _: task.cancel())
                else:
                    task.cancel()
            self.awaits += 1
            throw = None
            try:
                yield found
            except BaseException as error:
                throw = error


async def cancelled(
    make: Callable[[], Awaitable[Any]], at: int, *, late: bool
) -> tuple[bool, Any]:
    """Return whether the task was cancelled before it had ended, or else its result.
    Raises every exception of the coroutine.
    """
    cancelling = Cancelling(make(), at, late=late)

    async def run() -> Any:
        return await cancelling.run()

    task = asyncio.ensure_future(run())
    try:
        return False, await task
    except asyncio.CancelledError:
        assert cancelling.awaits > at, "cancelled by other code than this test"
        return True, None


async def at_each_await(trial: Callable[[int, bool], Awaitable[bool]]) -> int:
    """Call trial(at, late) until nothing is left to cancel; return the number of awaits.
    trial returns whether it cancelled anything.
    """
    for late in (False, True):
        at = 0
        while await trial(at, late):
            at += 1
            assert at < 1_000, "it never ends"
    return at
