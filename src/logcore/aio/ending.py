"""The end of tails and polls when a service stops.

A server of web pages waits for open responses before it ends an application. A response
that follows a log ends with its tail, so the tails must end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, Protocol


class Waiting(Protocol):
    """A tail or a consumer whose waits can be ended. Its methods are called in the loop."""

    def end_waits(self) -> None: ...


class LoopWaits:
    """The tails and consumers of one event loop."""

    def __init__(self) -> None:
        self.is_ended = False
        self._waiting: weakref.WeakSet[Waiting] = weakref.WeakSet()

    def add(self, waiting: Waiting) -> None:
        """Register a tail or a consumer. It is dropped with its last reference."""
        self._waiting.add(waiting)

    def end(self) -> None:
        """End all waits, and those that begin later."""
        self.is_ended = True
        for one in list(self._waiting):
            one.end_waits()


_WAITS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaits]] = (
    weakref.WeakKeyDictionary()
)


def waits_of(loop: asyncio.AbstractEventLoop) -> LoopWaits:
    """Return the waits of an event loop."""
    found = _WAITS.get(loop)
    if found is None:
        found = _WAITS[loop] = LoopWaits()
    return found


def end_waits() -> None:
    """End all tails of the running event loop, and wake its consumers.

    A tail ends as if its log were closed, and so do tails that begin later. The waiting
    getmany() of a consumer, or its next one, raises WakeupError; an iteration ends. Logs,
    directories and consumers remain open.
    """
    waits_of(asyncio.get_running_loop()).end()


@contextlib.contextmanager
def end_on_signals(
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT),
) -> Iterator[None]:
    """Call end_waits() when the process gets a signal, within a `with` block.

    The handler that was installed before is called too, such as the handler of a server.
    If there was none, the first signal does not end the process, and a second one does.
    After the block, tails may begin again. Python accepts handlers in the main thread
    only; in another thread, this does nothing.

    Example: the lifespan of an ASGI application, see docs/aio.md.
    """
    loop = asyncio.get_running_loop()
    waits = waits_of(loop)
    former: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        # Also if the loop waits for sockets: a call from another thread wakes it.
        loop.call_soon_threadsafe(waits.end)
        then = former[number]
        if callable(then):
            then(number, frame)
        else:
            signal.signal(number, then)  # a second signal has its former effect

    with contextlib.suppress(ValueError):  # not in the main thread
        for number in signals:
            former[number] = signal.getsignal(number)
            signal.signal(number, handle)
    try:
        yield
    finally:
        waits.is_ended = False
        for number, then in former.items():
            with contextlib.suppress(ValueError):
                if signal.getsignal(number) is handle:
                    signal.signal(number, then)
