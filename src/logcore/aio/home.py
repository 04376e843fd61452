"""Where an object of logcore.aio belongs: the loop it was made in, and one thread in which its calls wait for the disk.

Rules:
- Calls run in the thread one after another, in the order in which they were made.
- A call that was handed to the thread is carried out, also when the task that waits for it is cancelled.
- The thread ends with Home.end(), and with the object.

Nothing here knows a log.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import queue
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from logcore.callbacks import call
from logcore.errors import WrongLoopError

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: How often a thread that waits for the loop looks whether it was closed.
_LOOK_SECONDS: Final = 1.0

Job = Callable[[], None]


class _Asked:
    """Something that the thread has asked of the loop. jobs: calls that the loop makes meanwhile; None ends them.

    is_over: it was answered. Written in the loop. Tasks that the answer has started may live longer.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False


#: What the present task answers, if a thread has asked it.
_ASKED: Final[contextvars.ContextVar[_Asked | None]] = contextvars.ContextVar("logcore-asked", default=None)


class Home:
    """Made in a task; what: the words for the object in errors."""

    def __init__(self, what: str) -> None:
        self.loop = asyncio.get_running_loop()
        self._what = what
        self._pool = ThreadPoolExecutor(1, "logcore-aio")
        self._is_ended = False
        self._questions: set[asyncio.Task[Any]] = set()

    def check(self) -> None:
        """Raises WrongLoopError outside the loop."""
        try:
            present = asyncio.get_running_loop()
        except RuntimeError:
            present = None
        if present is not self.loop:
            raise WrongLoopError(
                f"{self._what} belongs to the event loop that it was made in",
                expected="a call in that loop",
                found="another loop" if present is not None else "no loop",
            )

    @property
    def is_asking(self) -> bool:
        """Whether the thread waits for the present task, or for one that has started it; see ask()."""
        return self._asked() is not None

    def _asked(self) -> _Asked | None:
        asked = _ASKED.get()
        if asked is None or asked.home is not self or asked.is_over:
            return None
        return asked

    async def call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs a function in the thread and returns what it returns. Raises what it raises, and WrongLoopError."""
        return await self.begin(functools.partial(function, *args, **kwargs))

    async def obtain(self, function: Callable[[], _T], unwanted: Callable[[_T], object]) -> _T:
        """As call(), for what has to be given back: if the task is cancelled, unwanted() gets the result in the
        thread; what it raises goes to sys.unraisablehook.
        """
        found: list[_T] = []

        def run() -> _T:
            found.append(function())
            return found[0]

        def give_back() -> None:
            for one in found:
                call(unwanted, one)

        try:
            return await self.begin(run)
        except asyncio.CancelledError:
            self.submit(give_back)  # behind the function, and before what the next task asks for
            raise

    def begin(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Hands a function to the thread; the future is of this loop."""
        self.check()
        future: asyncio.Future[_T] = self.loop.create_future()
        job = functools.partial(self._run, function, future)
        asked = self._asked()
        if asked is not None:
            asked.jobs.put(job)
        else:
            self.submit(job)
        return future

    def submit(self, job: Callable[[], object]) -> None:
        """Hands a function without a result to the thread. It must not raise."""
        if self._is_ended:  # what the thread looked after is closed, and says so at once
            job()
        else:
            self._pool.submit(job)

    def _run(self, function: Callable[[], _T], future: asyncio.Future[_T]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as caught:  # the caller has it; a thread of a pool would keep it
            error = caught
        self.tell(functools.partial(_settle, future, result, error))

    def tell(self, function: Callable[[], object]) -> bool:
        """Calls a function in the loop, from any thread; False when the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            return False
        return True

    # -- the other way -------------------------------------------------------------------------------------------

    def ask(self, function: Callable[[], Awaitable[object] | object]) -> Any:
        """In the thread: calls a function in the loop, awaits what it returns if that can be awaited, and returns the
        result. Calls that it makes to the thread meanwhile are carried out here. Raises what it raises.
        """
        asked = _Asked(self)
        if not self.tell(functools.partial(self._begin_answer, function, asked)):
            raise WrongLoopError(f"the event loop of {self._what} is closed")
        while True:
            try:
                job = asked.jobs.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if self.loop.is_closed():
                    raise WrongLoopError(f"the event loop of {self._what} is closed") from None
                continue
            if job is None:
                break
            job()
        if asked.error is not None:
            raise asked.error
        return asked.result

    def _begin_answer(self, function: Callable[[], Awaitable[object] | object], asked: _Asked) -> None:
        task = self.loop.create_task(_answer(function, asked))
        self._questions.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(functools.partial(self._end_answer, asked))

    def _end_answer(self, asked: _Asked, task: asyncio.Task[Any]) -> None:
        self._questions.discard(task)
        asked.is_over = True
        if task.cancelled():
            asked.error = WrongLoopError(f"what the thread of {self._what} asked the loop was cancelled")
        elif task.exception() is not None:
            asked.error = task.exception()
        else:
            asked.result = task.result()
        asked.jobs.put(None)

    def end(self) -> None:
        """No call is to come any more. Those that were made are carried out first, then the thread ends."""
        self.submit(functools.partial(self.tell, self._end))

    def _end(self) -> None:
        self._is_ended = True
        self._pool.shutdown(wait=False)


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(_storable(error))
    else:
        future.set_result(result)


async def _answer(function: Callable[[], Awaitable[object] | object], asked: _Asked) -> object:
    _ASKED.set(asked)
    found = function()
    if isinstance(found, Awaitable):
        found = await found
    return found


def _storable(error: BaseException) -> BaseException:
    """A future refuses StopIteration."""
    if isinstance(error, StopIteration):
        wrapped = RuntimeError("a function in a thread raised StopIteration")
        wrapped.__cause__ = error
        return wrapped
    return error
