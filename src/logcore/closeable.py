"""Objects that a with block closes."""

from __future__ import annotations

from typing import Self


class Closeable:
    """Closes the object at the end of a with block, also after an exception."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
