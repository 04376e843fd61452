"""Future results of requests to the coordinators of this process."""

from __future__ import annotations

from typing import Any


class PendingResult:
    """The future result of a request. It is set under the lock of the coordinator."""

    __slots__ = ("can_be_withdrawn", "id_end", "is_awaited", "is_done", "result")

    def __init__(
        self, *, is_awaited: bool = True, can_be_withdrawn: bool = False
    ) -> None:
        #: Whether other threads may sleep until the result is available.
        self.is_awaited = is_awaited
        #: Whether withdraw() must find the request after it was interrupted or failed.
        #: The member then holds this object before it sends the request.
        self.can_be_withdrawn = can_be_withdrawn
        #: The random part of the member id that a request to join has received.
        self.id_end = ""
        #: Whether `result` is set.
        self.is_done = False
        self.result: Any = None

    def set(self, result: object) -> None:
        """Set the result. `is_done` is written last, because threads read it unlocked."""
        self.result = result
        self.is_done = True
