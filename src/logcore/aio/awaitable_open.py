"""Objects that are opened with `await`, or with `async with`, which closes them.

This module does not depend on the opened objects.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

from logcore.aio.loop_thread import LoopThread


class Closing(Protocol):
    """An object that an `async with` block closes."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


_T = TypeVar("_T", bound=Closing)
_P = ParamSpec("_P")
_S = TypeVar("_S")


class Opening(Generic[_T]):
    """An object that is not open yet. `await` opens it; `async with` also closes it."""

    def __init__(self, begin: Callable[[], Awaitable[_T]]) -> None:
        """Create an opening. `begin` opens the object."""
        self._begin = begin
        self._opened: _T | None = None

    def __await__(self) -> Generator[Any, None, _T]:
        return self._begin().__await__()

    async def __aenter__(self) -> _T:
        self._opened = await self._begin()
        return await self._opened.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(kind, error, trace)


def open_in_thread(
    description: str,
    make: Callable[[], _S],
    close: Callable[[_S], object],
    wrap: Callable[[LoopThread, _S], _T],
) -> Opening[_T]:
    """Open a synchronous object in its own thread, and wrap it for the loop.

    `description` is the name of the object in error messages. If the task is cancelled
    while make() runs, close() closes the result.
    """

    async def begin() -> _T:
        loop_thread = LoopThread(description)
        try:
            made = await loop_thread.acquire(make, close)
        except BaseException:
            loop_thread.end()
            raise
        return wrap(loop_thread, made)

    return Opening(begin)


def opener(
    description: str,
    function: Callable[_P, _S],
    close: Callable[[_S], object],
    wrap: Callable[[LoopThread, _S], _T],
) -> Callable[_P, Opening[_T]]:
    """Return a function with the arguments of `function`, for open_in_thread()."""

    @functools.wraps(function)
    def begin(*args: _P.args, **kwargs: _P.kwargs) -> Opening[_T]:
        make = functools.partial(function, *args, **kwargs)
        return open_in_thread(description, make, close, wrap)

    return begin
