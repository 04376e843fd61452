"""Objects that an `async with` block closes."""

from __future__ import annotations

from typing import Self


class AsyncCloseable:
    """An object that an `async with` block closes, also after an exception."""

    __slots__ = ()

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
