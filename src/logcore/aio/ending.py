"""Ends tails and polls when a service stops.

A web server waits for open responses before it stops an application. A response that
follows a log ends when its tail ends, so the tails must end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import weakref
from collections.abc import Generator, Iterable
from functools import partial
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
        #: Number of end_on_signals() blocks, and the handlers from before the first one.
        self._blocks = 0
        self._former: dict[int, Any] = {}

    def add(self, waiting: Waiting) -> None:
        """Register a tail or a consumer, with a weak reference.

        After end(), its first wait ends at once.
        """
        self._waiting.add(waiting)
        if self.is_ended:
            waiting.end_waits()

    def end(self) -> None:
        """End all waits, also waits that begin later."""
        self.is_ended = True
        for waiting in list(self._waiting):
            waiting.end_waits()

    def enter(self, loop: asyncio.AbstractEventLoop, signals: Iterable[int]) -> None:
        """Begin a block of end_on_signals(). In the main thread, install its handlers."""
        self._blocks += 1
        if threading.current_thread() is not threading.main_thread():
            return
        for number in set(signals) - self._former.keys():
            # Stored first, so that an interrupted call leaves no handler after the block.
            self._former[number] = signal.getsignal(number)
            signal.signal(number, partial(self._handle, loop))

    def leave(self) -> None:
        """End a block. The last block restores the handlers, and tails may begin again.

        Earlier blocks do not, because a tail of another block may not have ended yet.
        """
        self._blocks -= 1
        if self._blocks:
            return
        self.is_ended = False
        while self._former:
            number, former_handler = self._former.popitem()
            present = signal.getsignal(number)
            if getattr(present, "func", None) == self._handle:
                signal.signal(number, _settable(former_handler))

    def _handle(
        self, loop: asyncio.AbstractEventLoop, number: int, frame: FrameType | None
    ) -> None:
        # The loop may be waiting for sockets. call_soon_threadsafe() wakes it.
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(self.end)
        former_handler = self._former.get(number)
        if callable(former_handler):
            former_handler(number, frame)
        else:
            # A second signal has its former effect.
            signal.signal(number, _settable(former_handler))


def _settable(handler: Any) -> Any:
    """Return a handler for signal.signal(). None is a handler that C code installed."""
    return signal.SIG_DFL if handler is None else handler


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
) -> Generator[None, None, None]:
    """Call end_waits() when the process gets a signal, within a `with` block.

    The handler that was installed before is called too, such as the handler of a server.
    If there was none, the first signal does not end the process, but a second signal
    does. After the last such block of the loop, tails may begin again. In another thread
    than the main thread, this does nothing, because Python accepts no handlers there.

    Example: the lifespan of an ASGI application, see docs/aio.md.
    """
    loop = asyncio.get_running_loop()
    waits = waits_of(loop)
    try:
        waits.enter(loop, signals)
        yield
    finally:
        waits.leave()
