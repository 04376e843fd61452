"""Objects that are opened with `await`, or with `async with`, which closes them.

This module does not depend on the opened objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar


class Closing(Protocol):
    """Has a with block."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


_T = TypeVar("_T", bound=Closing)


class Opening(Generic[_T]):
    """Not open yet: `await` gives the object, and `async with` gives it for the block."""

    def __init__(self, begin: Callable[[], Awaitable[_T]]) -> None:
        """Not for users."""
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
