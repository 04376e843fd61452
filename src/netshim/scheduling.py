"""How the parts of a broker wait: for a response, a time, an append, a sync or a chunk.

Rules:
- The broker has one thread. Every function here is called from it, except for the work
  that is given to `submit`.
- This module reads no clock and never blocks. The time is an argument of each call, and
  delayed actions use a timer or a PendingResponse.
- An exception in one waiter must not reach the other waiters or the caller that woke
  them.
- Handlers process large requests in steps (Steps), because one request may list 100,000
  partitions. They yield to the event loop after each chunk of CHUNK_ENTRIES entries.
  The state may have changed by the next chunk.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeVar

import attrs

from logcore import Log, LogcoreError
from logcore.coordinators.durable_queue import DurableQueue
from logcore.deadlines import Deadlines
from logcore.metadata.checkpoint import Key

_log = logging.getLogger("netshim")

_T = TypeVar("_T")
#: Work on a request. The generator yields after each chunk and returns the response.
Steps = Generator[None, None, _T]
#: Number of partitions, topics or names of a request in one chunk. A chunk takes some
#: 10 ms with the most expensive kind of entry.
CHUNK_ENTRIES: Final = 1_000
#: Maximum number of requests that are processed in chunks at the same time. Each of
#: them holds its partial result in memory.
MAX_IN_STEPS: Final = 16

#: Runs work that may block on the disk, then calls callback(result or exception) in the
#: broker's thread.
Submit = Callable[[Callable[[], Any], Callable[[Any], None]], None]
#: Calls a function in another iteration of the event loop.
CallLater = Callable[[Callable[[], None]], object]


class Lifecycle:
    """The state that the host reports: the latest time, and whether the broker stops."""

    def __init__(self) -> None:
        #: The latest time that the host has reported.
        self.now_ms = 0
        self.is_stopping = False

    def advance_clock(self, now_ms: int) -> None:
        """Set the latest time. An earlier time has no effect."""
        self.now_ms = max(self.now_ms, now_ms)


class CloseConnection(Exception):
    """Raised to close the connection.

    The client does not speak the Kafka protocol, or no response describes the error.
    """


@attrs.frozen
class TruncatedResponse:
    """A response of which only the first bytes are sent. Fault rules create it."""

    response: Any
    #: Number of bytes that are sent.
    after_bytes: int

    def cut(
        self, buffers: Iterable[bytes | bytearray | memoryview]
    ) -> list[memoryview]:
        """Return the first bytes of the encoded response."""
        return [memoryview(b"".join(buffers))[: self.after_bytes]]


class PendingResponse:
    """A response that becomes available later. It is set once and passed to a callback.

    Once it is set or cancelled, it drops its callbacks. The callbacks refer to other
    pending responses and back to this one, so keeping them would leave every delayed
    response to the cycle collector.
    """

    __slots__ = (
        "_callback",
        "_cancel",
        "held_bytes",
        "is_cancelled",
        "is_parked",
        "is_set",
        "runs_in_steps",
        "value",
    )

    def __init__(self, *, is_parked: bool = False, runs_in_steps: bool = False) -> None:
        #: True while the request waits for records or for other members, for at most
        #: the time in the request. A parked request does not count as in progress.
        self.is_parked = is_parked
        #: True if the connection must start no other request until this one is set. A
        #: later request might overtake the remaining chunks.
        self.runs_in_steps = runs_in_steps
        #: Approximate number of bytes that the request occupies until it is answered.
        self.held_bytes = 0
        self.is_set = False
        self.is_cancelled = False
        self.value: Any = None
        self._callback: Callable[[Any], None] | None = None
        self._cancel: Callable[[], None] | None = None

    def set(self, value: Any) -> None:
        """Set the value and pass it to the callback. Later calls have no effect."""
        if not self.is_set:
            self.value = value
            self.is_set = True
            callback = self._callback
            self._callback = self._cancel = None
            if callback is not None:
                callback(value)

    def when_cancelled(self, action: Callable[[], None]) -> None:
        """Call `action` if the client disconnects before the response is set."""
        if not self.is_set:
            self._cancel = action

    def cancel(self) -> None:
        """Cancel the response because the client has disconnected.

        Work that cannot be undone continues, and its result is dropped.
        """
        action = self._cancel
        self._callback = self._cancel = None
        self.is_cancelled = True
        if not self.is_set and action is not None:
            action()

    def then(self, callback: Callable[[Any], None]) -> None:
        """Call callback(value) once the response is set, unless it is cancelled first."""
        if self.is_set:
            callback(self.value)
        elif not self.is_cancelled:
            self._callback = callback


_E = TypeVar("_E", bound=BaseException)


def without_tracebacks(error: _E) -> _E:
    """Return the error without tracebacks, so that it can be kept like a result.

    The tracebacks of its causes are removed too. The frames of a traceback, and their
    callers, refer to the object that holds the error. Such a cycle would keep the
    request and the bytes of its connection until the cycle collector runs.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def guarded(action: Callable[[Any], None], argument: Any) -> None:
    """Call one of several waiters and log its exception.

    The exception must not reach the other waiters or the caller that woke them.
    """
    try:
        action(argument)
    except Exception:
        _log.exception("a waiting action failed")


def chain_response(response: object, pending: PendingResponse) -> None:
    """Set a PendingResponse to a response, now or once that response is available."""
    if not isinstance(response, PendingResponse):
        pending.set(response)
        return
    pending.when_cancelled(response.cancel)
    response.then(pending.set)
    if pending.is_cancelled:
        pending.cancel()


def resolve_with(handle: Callable[[], object], pending: PendingResponse) -> None:
    """Set a PendingResponse to the result of handle().

    An exception of handle() becomes the value, because no caller would pass it to the
    client.
    """
    try:
        response = handle()
    except Exception as error:
        response = error
    chain_response(response, pending)


def map_response(response: Any, change: Callable[[Any], Any]) -> Any:
    """Return a changed response, now or once it is available."""
    if not isinstance(response, PendingResponse):
        return change(response)
    pending = PendingResponse(
        is_parked=response.is_parked, runs_in_steps=response.runs_in_steps
    )
    pending.held_bytes = response.held_bytes
    pending.when_cancelled(response.cancel)
    response.then(lambda value: resolve_with(lambda: change(value), pending))
    return pending


class ChunkCounter:
    """Counts the entries of one request and reports the end of each chunk."""

    __slots__ = ("_remaining",)

    def __init__(self) -> None:
        self._remaining = CHUNK_ENTRIES

    def is_over(self) -> bool:
        """Return whether the chunk is complete.

        Call this once for each partition, topic or name.
        """
        self._remaining -= 1
        if self._remaining > 0:
            return False
        self._remaining = CHUNK_ENTRIES
        return True


def run_all_steps(steps: Steps[_T]) -> _T:
    """Run all steps without yielding to the event loop, and return the response."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            response: _T = end.value
            return response


class StepRunner:
    """Runs requests in chunks.

    Each iteration of the event loop runs one chunk of one request.
    """

    def __init__(self, call_later: CallLater) -> None:
        self._call_later = call_later
        self._queue: deque[tuple[Steps[Any], PendingResponse]] = deque()
        self._is_called = False

    @property
    def is_full(self) -> bool:
        return len(self._queue) >= MAX_IN_STEPS

    def run(self, steps: Steps[_T]) -> _T | PendingResponse:
        """Run the first chunk and return the response if that completed the request.

        Otherwise, return the PendingResponse of the request. If MAX_IN_STEPS
        requests are already in progress, run all chunks at once. Exceptions of the
        chunks that run here are raised.
        """
        try:
            next(steps)
            while self.is_full:
                next(steps)
        except StopIteration as end:
            response: _T = end.value
            return response
        pending = PendingResponse(runs_in_steps=True)
        self._queue.append((steps, pending))
        self._call()
        return pending

    def _call(self) -> None:
        if self._queue and not self._is_called:
            self._is_called = True
            self._call_later(self._next)

    def finish(self) -> None:
        """Run all remaining chunks, because the event loop may not run again."""
        while self._queue:
            self._next()

    def _next(self) -> None:
        self._is_called = False
        if not self._queue:
            return
        steps, pending = self._queue.popleft()
        try:
            next(steps)
        except StopIteration as end:
            response = end.value
        except Exception as error:
            response = error
        else:
            self._queue.append((steps, pending))
            self._call()
            return
        self._call()
        guarded(partial(chain_response, response), pending)


class LoopTimers:
    """Actions that run at a deadline. Each timer has a name, by which it is cancelled."""

    def __init__(self) -> None:
        self._timers: Deadlines[Hashable] = Deadlines()
        #: The action of each timer that is set.
        self._actions: dict[Hashable, Callable[[int], None]] = {}
        #: Names for the timers of at().
        self._tokens = itertools.count(1)

    def set(
        self, name: Hashable, deadline_ms: int, action: Callable[[int], None]
    ) -> None:
        """Schedule action(now_ms) for a deadline, instead of the earlier one of that name.

        The action runs at the deadline or later.
        """
        self._actions[name] = action
        self._timers.at(deadline_ms, name)

    def at(self, deadline_ms: int, action: Callable[[int], None]) -> int:
        """Schedule action(now_ms) for a deadline, and return a new name of the timer."""
        token = next(self._tokens)
        self.set(token, deadline_ms, action)
        return token

    def cancel(self, name: Hashable) -> None:
        """Cancel a timer. This has no effect if no timer has the name."""
        if self._actions.pop(name, None) is not None:
            self._timers.cancel(name)

    @property
    def next_ms(self) -> int | None:
        """Return the deadline of the next timer, or None."""
        return self._timers.next_ms

    def run(self, now_ms: int) -> None:
        """Run the actions whose deadline has passed."""
        for name in self._timers.due(now_ms):
            guarded(self._actions.pop(name), now_ms)


class Waiters:
    """Actions that wait for events of keys, such as an append to a partition."""

    def __init__(self) -> None:
        #: A key is present while actions wait for it. The actions are in the order of
        #: their calls of add(), so a simulation of the same requests repeats exactly.
        self.by_key: dict[Key, dict[Callable[[int], None], None]] = {}

    def add(self, keys: list[Key], action: Callable[[int], None]) -> None:
        """Let an action wait for events of any of the keys."""
        for key in keys:
            self.by_key.setdefault(key, {})[action] = None

    def remove(self, keys: list[Key], action: Callable[[int], None]) -> None:
        """Remove an action that was added with these keys."""
        for key in keys:
            waiting = self.by_key.get(key)
            if waiting is not None:
                waiting.pop(action, None)
                if not waiting:
                    del self.by_key[key]

    def wake(self, keys: Iterable[Key], now_ms: int) -> None:
        """Call each action that waits for any of the keys, once."""
        if not self.by_key:
            return
        actions = {action: None for key in keys for action in self.by_key.get(key, ())}
        for action in actions:
            guarded(action, now_ms)

    def awaited_keys(self) -> list[Key]:
        """Return the keys that actions wait for."""
        return list(self.by_key)


class Syncs:
    """Waits until records are durable.

    At most one sync of a log runs at a time. It serves all waiters that were registered
    when it started.
    """

    def __init__(self, submit: Submit, *, policy_waits: bool = True) -> None:
        self._submit = submit
        #: Whether the durability policy makes an append wait for the disk.
        self._policy_waits = policy_waits
        #: Only the broker's thread uses the queue, so no lock is necessary.
        self._queue = DurableQueue(contextlib.nullcontext())
        #: Logs whose sync is running.
        self._running: set[Log] = set()
        #: Called with the time of each sync in seconds. Set by the host of metrics.
        self.on_sync: Callable[[float], None] | None = None

    def is_waiting_for(self, log: Log) -> bool:
        """Return whether a sync of the log is running or has waiters."""
        return log in self._running or self._queue.is_waiting_for(log)

    def when_durable(
        self, log: Log, end: int, callback: Callable[[LogcoreError | None], None]
    ) -> None:
        """Call callback(None) once all records below `end` are durable.

        If the sync failed, call callback(error).
        """
        if log.durable_end_offset >= end:
            callback(None)
            return
        self._queue.add(
            {log: end}, lambda failures: guarded(callback, failures.get(log))
        )
        if log not in self._running:
            self._start(log)

    def when_safe(
        self, log: Log, end: int, callback: Callable[[LogcoreError | None], None]
    ) -> None:
        """Call callback(None) once the records below `end` are safe.

        The durability policy defines whether that requires a sync. If the policy waits
        for the disk, this is when_durable(). Otherwise, callback(None) is called
        immediately.
        """
        if self._policy_waits:
            self.when_durable(log, end, callback)
        else:
            callback(None)

    def _start(self, log: Log) -> None:
        self._running.add(log)
        self._submit(partial(_timed_flush, log), partial(self._finished, log))

    def _finished(self, log: Log, result: object) -> None:
        self._running.discard(log)
        if isinstance(result, float) and self.on_sync is not None:
            self.on_sync(result)
        failure = None
        if isinstance(result, LogcoreError):
            failure = result
        elif isinstance(result, BaseException):
            failure = LogcoreError(f"a sync failed: {result!r}")
        self._queue.on_sync(log, failure)
        # Appends that were added while the sync was running may need another one.
        if self._queue.is_waiting_for(log) and log not in self._running:
            self._start(log)


def _timed_flush(log: Log) -> float:
    """Sync a log, and return how many seconds that took."""
    began_s = perf_counter()
    log.flush()
    return perf_counter() - began_s
