"""Cancel a coroutine at each of its awaits.

cancelled(make, at, late) runs a coroutine in a task, and cancels the task at its await
number `at`. With `late`, the task is cancelled after the awaited future is done and
before the task resumes.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any


class Cancelling:
    """Counts the awaits of a coroutine in `awaits`, and cancels the await number `at`,
    from 0.
    """

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
    """Return whether the task was cancelled before its end, and the result otherwise.

    Other exceptions of the coroutine are raised.
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
    """Call trial(at, late) for each await, and return the number of awaits.

    `trial` returns whether it has cancelled its task.
    """
    for late in (False, True):
        at = 0
        while await trial(at, late):
            at += 1
            assert at < 1_000, "each trial was cancelled"
    return at
