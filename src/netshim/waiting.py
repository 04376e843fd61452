"""How the parts of a broker wait: for an answer, a time, an append, a sync, their turn.

Rules:
- One thread. Everything here is called from the broker's thread, except the work given to `submit`.
- Nothing here reads a clock or waits: the time comes with each call, what must happen later is a timer or an Answer.
- An error of one waiter is not for the others, nor for the caller that woke them.
- A handler that goes through all a request names does so in Steps, for a request may name 100,000 partitions: after
  PIECE of them others have their turn. What it has seen may have changed by the next one.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from logcore import Log, LogcoreError
from logcore.checkpoint import Key
from logcore.coordination import timers

_log = logging.getLogger("netshim")

_T = TypeVar("_T")
#: Work on a request that yields where a piece of it is over, and returns the response.
Steps = Generator[None, None, _T]
#: So many partitions, topics or names of a request are a piece: some 10 ms where each costs most.
PIECE: Final = 1_000
#: Requests in pieces at a time, for each holds what it has so far.
MOST_IN_PIECES: Final = 16

#: Runs work where it may wait for the disk, then calls done(result or exception) in the broker's thread.
Submit = Callable[[Callable[[], Any], Callable[[Any], None]], None]
#: Calls a function in another turn of the loop.
Later = Callable[[Callable[[], None]], object]


class CloseConnection(Exception):
    """Raised to end the connection: its bytes are not our protocol, or no answer would be right."""


class Answer:
    """A response that comes later: set once, and told to the caller that asked for it.

    Once it is set or cancelled, an answer drops its callbacks. The callbacks refer to other answers and back to this
    one, so keeping them would leave every delayed response to the cycle collector.

    held_bytes: about how much memory its request takes until it is answered.
    is_parked: it waits for records or for other members, for as long as the client said, and nothing works on it.
    is_in_pieces: until it is set, its connection begins no other request, which might overtake the rest of it.
    """

    __slots__ = ("_cancel", "_then", "held_bytes", "is_cancelled", "is_in_pieces", "is_parked", "is_set", "value")

    def __init__(self, *, is_parked: bool = False, is_in_pieces: bool = False) -> None:
        self.is_parked = is_parked
        self.is_in_pieces = is_in_pieces
        self.held_bytes = 0
        self.is_set = False
        self.is_cancelled = False
        self.value: Any = None
        self._then: Callable[[Any], None] | None = None
        self._cancel: Callable[[], None] | None = None

    def set(self, value: Any) -> None:
        """Only the first value counts."""
        if not self.is_set:
            self.value = value
            self.is_set = True
            then = self._then
            self._then = self._cancel = None
            if then is not None:
                then(value)

    def when_cancelled(self, action: Callable[[], None]) -> None:
        """Calls action if the client leaves before the answer is set."""
        if not self.is_set:
            self._cancel = action

    def cancel(self) -> None:
        """The client is gone. What cannot be undone goes on, and its answer is dropped."""
        action = self._cancel
        self._then = self._cancel = None
        self.is_cancelled = True
        if not self.is_set and action is not None:
            action()

    def then(self, callback: Callable[[Any], None]) -> None:
        """Calls callback(value) once the answer is set, unless it is cancelled first."""
        if self.is_set:
            callback(self.value)
        elif not self.is_cancelled:
            self._then = callback


_E = TypeVar("_E", bound=BaseException)


def as_value(error: _E) -> _E:
    """The error without its traceback and those of its causes, for an error that is kept like a result.

    The frames of a traceback, and those that called them, refer to whatever holds the error. Such a cycle would keep
    the request and the bytes of its connection until the collector runs.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


def guarded(action: Callable[[Any], None], argument: Any) -> None:
    """Calls one of several waiters; an error of it is not for the others, nor for the caller that woke them."""
    try:
        action(argument)
    except Exception:
        _log.exception("a waiting action failed")


def pass_on(response: object, answer: Answer) -> None:
    """Sets an answer that was given out already, now or when the response has come."""
    if not isinstance(response, Answer):
        answer.set(response)
        return
    answer.when_cancelled(response.cancel)
    response.then(answer.set)
    if answer.is_cancelled:
        answer.cancel()


def answer_with(handle: Callable[[], object], answer: Answer) -> None:
    """Sets an answer that was given out already to the result of handle(), or to its error: no caller above would pass
    that to the client.
    """
    try:
        response = handle()
    except Exception as error:
        response = error
    pass_on(response, answer)


class Pace:
    """Says when a piece of a request is over. One for each request."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = PIECE

    def is_over(self) -> bool:
        """To be asked once for each partition, topic or name."""
        self._left -= 1
        if self._left > 0:
            return False
        self._left = PIECE
        return True


def whole(steps: Steps[_T]) -> _T:
    """The response of steps that are done at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            response: _T = end.value
            return response


class Pieces:
    """Requests in pieces. A turn of the loop does one piece of one of them, whatever their number."""

    def __init__(self, later: Later) -> None:
        self._later = later
        self._line: deque[tuple[Steps[Any], Answer]] = deque()
        self._is_called = False

    @property
    def is_full(self) -> bool:
        return len(self._line) >= MOST_IN_PIECES

    def run(self, steps: Steps[_T]) -> _T | Answer:
        """Does the first piece. The response if that was all, else the Answer that will hold it. Raises what the first
        piece raises. Where too many requests are in pieces, all is done at once.
        """
        try:
            next(steps)
            while self.is_full:
                next(steps)
        except StopIteration as end:
            response: _T = end.value
            return response
        answer = Answer(is_in_pieces=True)
        self._line.append((steps, answer))
        self._call()
        return answer

    def _call(self) -> None:
        if self._line and not self._is_called:
            self._is_called = True
            self._later(self._next)

    def finish(self) -> None:
        """Does all that is left, since no turn of the loop may come any more."""
        while self._line:
            self._next()

    def _next(self) -> None:
        self._is_called = False
        if not self._line:
            return
        steps, answer = self._line.popleft()
        try:
            next(steps)
        except StopIteration as end:
            response = end.value
        except Exception as error:
            response = error
        else:
            self._line.append((steps, answer))
            self._call()
            return
        self._call()
        guarded(partial(pass_on, response), answer)


class Timers:
    """Actions to be called at a time. A timer that is not wanted any more is cancelled by its token."""

    def __init__(self) -> None:
        self._timers: timers.Timers[int] = timers.Timers()
        self._actions: dict[int, Callable[[int], None]] = {}
        self._tokens = itertools.count(1)

    def at(self, deadline_ms: int, action: Callable[[int], None]) -> int:
        """Has action(now_ms) called at or after the deadline; returns the token."""
        token = next(self._tokens)
        self._actions[token] = action
        self._timers.at(deadline_ms, token)
        return token

    def cancel(self, token: int) -> None:
        if self._actions.pop(token, None) is not None:
            self._timers.cancel(token)

    @property
    def next_ms(self) -> int | None:
        """When the next one is due."""
        return self._timers.next_ms

    def run(self, now_ms: int) -> None:
        for token in self._timers.due(now_ms):
            guarded(self._actions.pop(token), now_ms)


class Waiting:
    """Actions that wait for something to happen to keys."""

    def __init__(self) -> None:
        self._by_key: dict[Key, set[Callable[[int], None]]] = {}

    def add(self, keys: list[Key], action: Callable[[int], None]) -> None:
        for key in keys:
            self._by_key.setdefault(key, set()).add(action)

    def remove(self, keys: list[Key], action: Callable[[int], None]) -> None:
        for key in keys:
            waiting = self._by_key.get(key)
            if waiting is not None:
                waiting.discard(action)
                if not waiting:
                    del self._by_key[key]

    def wake(self, keys: Iterable[Key], now_ms: int) -> None:
        """Calls those who wait for any of the keys, each once."""
        if not self._by_key:
            return
        for action in {action for key in keys for action in self._by_key.get(key, ())}:
            guarded(action, now_ms)

    def waited_for(self) -> list[Key]:
        """The keys that actions wait for."""
        return list(self._by_key)


class Syncs:
    """Waits for records to be on disk. One sync of a log runs at a time, for all that wait when it begins."""

    def __init__(self, submit: Submit, *, policy_waits: bool = True) -> None:
        """policy_waits: whether the durability policy has an append wait for the disk."""
        self._submit = submit
        self._policy_waits = policy_waits
        self._waiting: dict[Log, list[tuple[int, Callable[[LogcoreError | None], None]]]] = {}
        self._running: set[Log] = set()

    def is_waiting_for(self, log: Log) -> bool:
        """Whether a sync of the log runs or is waited for."""
        return log in self._running or log in self._waiting

    def when_durable(self, log: Log, end: int, done: Callable[[LogcoreError | None], None]) -> None:
        """Calls done(None) once all below offset end is on disk, or done(error) when that failed."""
        if log.durable_end_offset >= end:
            done(None)
            return
        self._waiting.setdefault(log, []).append((end, done))
        self._start(log)

    def when_safe(self, log: Log, end: int, done: Callable[[LogcoreError | None], None]) -> None:
        """As when_durable(), as far as the durability policy waits for the disk; else done(None) at once."""
        if self._policy_waits:
            self.when_durable(log, end, done)
        else:
            done(None)

    def _start(self, log: Log) -> None:
        if log in self._running or not self._waiting.get(log):
            return
        self._running.add(log)
        self._submit(log.flush, lambda result: self._finished(log, result))

    def _finished(self, log: Log, result: Any) -> None:
        self._running.discard(log)
        error = None
        if isinstance(result, BaseException):
            error = result
        waiting = self._waiting.pop(log, [])
        durable_end = log.durable_end_offset
        kept = []
        if error is not None and not isinstance(error, LogcoreError):
            error = LogcoreError(f"a sync failed: {error!r}")
        for end, done in waiting:
            if durable_end >= end:
                guarded(done, None)
            elif error is not None:
                guarded(done, error)
            else:  # came while the sync was running, which need not cover it
                kept.append((end, done))
        if kept:
            self._waiting.setdefault(log, [])[:0] = kept
            self._start(log)
