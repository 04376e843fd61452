"""Binds a logcore.aio object to its event loop and to one worker thread.

The worker thread performs the blocking calls.

Rules:
- The worker thread runs calls one at a time, in the order in which they were made.
- A call that was passed to the thread is executed, even if the task that awaits it is
  cancelled.
- The thread ends with LoopThread.end(), and when the object is deleted.

This module does not depend on logs.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import queue
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from logcore.callbacks import call
from logcore.errors import WrongLoopError

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: How often a thread that waits for the event loop checks whether the loop was closed.
_CHECK_SECONDS: Final = 1.0

Job = Callable[[], None]


class _LoopRequest:
    """A request of the worker thread to the event loop.

    Tasks that the function in the loop has started may outlive the request.
    """

    def __init__(self, loop_thread: LoopThread) -> None:
        self.loop_thread = loop_thread
        #: Calls for the worker thread from tasks that work on the answer. None is the
        #: last item.
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.result: Any = None
        self.error: BaseException | None = None
        #: Whether the request is answered. Written in the event loop.
        self.is_over = False


#: The request that the current task answers, if there is one.
_CURRENT_REQUEST: Final[contextvars.ContextVar[_LoopRequest | None]] = (
    contextvars.ContextVar("logcore-asked", default=None)
)


def in_thread(
    method: Callable[Concatenate[Any, _P], _T],
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Return a coroutine method that calls a method of `self._sync` in its thread.

    It has the name, arguments and documentation of that method. `self._call()` performs
    the call.
    """
    name = method.__name__

    @functools.wraps(method)
    async def run(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        result: _T = await self._call(getattr(self._sync, name), *args, **kwargs)
        return result

    return run


def in_loop(
    method: Callable[Concatenate[Any, _P], _T],
) -> Callable[Concatenate[Any, _P], _T]:
    """Return a method that calls a method of `self._sync` at once.

    Outside the loop it raises WrongLoopError.
    """
    name = method.__name__

    @functools.wraps(method)
    def run(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._loop_thread.check()
        result: _T = getattr(self._sync, name)(*args, **kwargs)
        return result

    return run


class LoopThread:
    """The event loop and the worker thread of one object.

    Create it in a task. `description` is the name of the object in error messages.
    """

    def __init__(self, description: str) -> None:
        self.loop = asyncio.get_running_loop()
        self._description = description
        self._pool = ThreadPoolExecutor(1, "logcore-aio")
        self._is_ended = False
        self._answering: set[asyncio.Task[Any]] = set()

    def check(self) -> None:
        """Raise WrongLoopError unless the caller runs in the loop."""
        try:
            present = asyncio.get_running_loop()
        except RuntimeError:
            present = None
        if present is not self.loop:
            raise WrongLoopError(
                f"{self._description} belongs to the event loop that created it",
                expected="a call in that loop",
                found="another loop" if present is not None else "no loop",
            )

    @property
    def is_answering(self) -> bool:
        """Whether the worker thread waits for the current task or its parent task.

        See call_in_loop().
        """
        return self._current_request() is not None

    def _current_request(self) -> _LoopRequest | None:
        request = _CURRENT_REQUEST.get()
        if request is None or request.loop_thread is not self or request.is_over:
            return None
        return request

    async def call(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Run a function in the worker thread and return its result.

        Raises:
            WrongLoopError: the caller runs outside the loop.
            Exception: the function raised it.
        """
        return await self.begin(functools.partial(function, *args, **kwargs))

    async def acquire(
        self, function: Callable[[], _T], release: Callable[[_T], object]
    ) -> _T:
        """Run a function like call(), and release its result if the task is cancelled.

        In that case the worker thread calls release(result). Exceptions of release()
        are passed to sys.unraisablehook.
        """
        found: list[_T] = []

        def run() -> _T:
            found.append(function())
            return found[0]

        def release_result() -> None:
            for item in found:
                call(release, item)

        try:
            return await self.begin(run)
        except asyncio.CancelledError:
            # The queue runs this after the function, and before calls of the next task.
            self.submit(release_result)
            raise

    def begin(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Submit a function to the worker thread, and return a future of this loop."""
        self.check()
        future: asyncio.Future[_T] = self.loop.create_future()
        job = functools.partial(self._run, function, future)
        request = self._current_request()
        if request is not None:
            request.jobs.put(job)
        else:
            self.submit(job)
        return future

    def submit(self, job: Callable[[], object]) -> None:
        """Submit a function without a result to the worker thread.

        It must not raise.
        """
        # The object is closed, so that the function raises immediately.
        if self._is_ended:
            job()
        else:
            self._pool.submit(job)

    def _run(self, function: Callable[[], _T], future: asyncio.Future[_T]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as caught:
            # The future gets the error. A thread of a pool would keep a reference to it.
            error = caught
        self.post_to_loop(functools.partial(_complete, future, result, error))

    def post_to_loop(self, function: Callable[[], object]) -> bool:
        """Call a function in the loop. Return False if the loop is closed.

        Any thread may call this.
        """
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:
            return False
        return True

    # -- from the thread to the loop ---------------------------------------------------

    def call_in_loop(self, function: Callable[[], Awaitable[object] | object]) -> Any:
        """Call a function in the loop from the worker thread, and return its result.

        If the result is awaitable, it is awaited. While the worker thread waits, it
        executes the calls that the function submits. Exceptions of the function are
        raised here.

        Raises:
            WrongLoopError: the loop is closed.
        """
        request = _LoopRequest(self)
        if not self.post_to_loop(
            functools.partial(self._start_request, function, request)
        ):
            raise WrongLoopError(f"the event loop of {self._description} is closed")
        while True:
            try:
                job = request.jobs.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                if self.loop.is_closed():
                    raise WrongLoopError(
                        f"the event loop of {self._description} is closed"
                    ) from None
                continue
            if job is None:
                break
            job()
        if request.error is not None:
            raise request.error
        return request.result

    def _start_request(
        self, function: Callable[[], Awaitable[object] | object], request: _LoopRequest
    ) -> None:
        task = self.loop.create_task(_run_request(function, request))
        self._answering.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(functools.partial(self._finish_request, request))

    def _finish_request(self, request: _LoopRequest, task: asyncio.Task[Any]) -> None:
        self._answering.discard(task)
        request.is_over = True
        if task.cancelled():
            request.error = WrongLoopError(
                f"a call from the thread of {self._description} to the loop was cancelled"
            )
        elif task.exception() is not None:
            request.error = task.exception()
        else:
            request.result = task.result()
        request.jobs.put(None)

    def end(self) -> None:
        """End the worker thread after all submitted calls have been executed.

        The caller must submit no further calls.
        """
        self.submit(functools.partial(self.post_to_loop, self._end))

    def _end(self) -> None:
        self._is_ended = True
        self._pool.shutdown(wait=False)


def _complete(
    future: asyncio.Future[Any], result: object, error: BaseException | None
) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(_storable(error))
    else:
        future.set_result(result)


async def _run_request(
    function: Callable[[], Awaitable[object] | object], request: _LoopRequest
) -> object:
    _CURRENT_REQUEST.set(request)
    result = function()
    if isinstance(result, Awaitable):
        result = await result
    return result


def _storable(error: BaseException) -> BaseException:
    """Wrap StopIteration, which a future does not accept."""
    if isinstance(error, StopIteration):
        wrapped = RuntimeError("a function in a thread raised StopIteration")
        wrapped.__cause__ = error
        return wrapped
    return error
