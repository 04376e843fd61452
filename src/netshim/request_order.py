"""Order of the work of a broker: queues of blocking work, and of requests for logs.

Rules:
- Work that may block runs one item at a time for each key, in another thread.
- A request starts once it is the first in the queues of all its logs. Without this
  order, a request that waits for many logs would be overtaken by a later one that waits
  for fewer.
- The queues belong to the broker's thread. Only the work itself runs elsewhere.

This module opens no log.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, KeysView
from functools import partial
from typing import Any, Final

from logcore import LogcoreError
from logcore.metadata.checkpoint import Key
from netshim.scheduling import Submit, without_tracebacks

_log = logging.getLogger("netshim")

#: Work that may block on the disk, and the function to call with its result or
#: exception.
_Work = tuple[Callable[[], Any], Callable[[Any], None]]
#: Maximum number of work items of one key that one thread runs before other keys get a
#: thread.
_WORK_AT_ONCE: Final = 64
#: Maximum number of keys whose work is submitted to the threads at once. The other work
#: of the broker, such as syncs, waits for no more than these.
_MAX_RUNNING: Final = 8


def _outcome(work: Callable[[], Any]) -> Any:
    """Return the result of work(), or its exception."""
    try:
        return work()
    except (LogcoreError, OSError) as error:
        return without_tracebacks(error)
    except Exception as error:
        return error


class WorkQueues:
    """Work that may block on the disk, one queue for each key."""

    def __init__(self, submit: Submit) -> None:
        #: Runs work in another thread; see scheduling.Submit.
        self._submit = submit
        #: Waiting work; a key is present while its work runs.
        self._waiting: dict[Hashable, deque[_Work]] = {}
        #: Keys that wait for a thread.
        self._ready: deque[Hashable] = deque()
        #: Number of keys whose work runs in a thread.
        self._running = 0
        #: _start_ready() is running. A nested call returns immediately.
        self._is_starting = False

    def keys(self) -> KeysView[Hashable]:
        """Return a view of the keys whose work is not done."""
        return self._waiting.keys()

    def is_busy(self, key: Hashable) -> bool:
        """Return whether earlier work of that key is not done."""
        return key in self._waiting

    def submit(
        self,
        key: Hashable,
        work: Callable[[], Any],
        callback: Callable[[Any], None],
        *,
        is_urgent: bool = False,
    ) -> None:
        """Submit work that must run after the earlier work of the same key.

        The work of one key runs one item at a time. Work that arrives while other work
        of the key runs is executed as one batch. A thread for each append of a client
        that pipelines appends would cost more than the appends.

        Urgent work gets a thread before the waiting work of other keys. A response is
        then encoded before a thousand new logs are open.
        """
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append((work, callback))
            return
        self._waiting[key] = deque([(work, callback)])
        if is_urgent:
            self._ready.appendleft(key)
        else:
            self._ready.append(key)
        self._start_ready()

    def _start_ready(self) -> None:
        # A loop instead of recursion: if no thread takes work, it ends within submit.
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._ready and self._running < _MAX_RUNNING:
                self._running += 1
                self._start(self._ready.popleft())
        finally:
            self._is_starting = False

    def _start(self, key: Hashable) -> None:
        waiting = self._waiting[key]
        batch = [waiting.popleft() for _ in range(min(len(waiting), _WORK_AT_ONCE))]
        self._submit(
            lambda: [_outcome(work) for work, _ in batch],
            partial(self._end, key, batch),
        )

    def _end(self, key: Hashable, batch: list[_Work], outcomes: Any) -> None:
        # If the host is stopping, it runs no work and passes the error.
        if isinstance(outcomes, BaseException):
            outcomes = [outcomes] * len(batch)
        for (_, callback), outcome in zip(batch, outcomes, strict=True):
            try:
                callback(outcome)
            except Exception:
                _log.exception("the result of work in a thread could not be used")
        self._running -= 1
        if self._waiting[key]:
            self._ready.append(key)
        else:
            del self._waiting[key]
        self._start_ready()


class QueuedRequest:
    """A request that later requests for the same logs must not overtake."""

    def __init__(self, keys: list[Key], start: Callable[[QueuedRequest], None]) -> None:
        self.keys = keys
        #: Called once, when the request is the first in all its queues.
        self.start = start
        #: The request has ended.
        self.has_left = False


class RequestQueues:
    """Requests for logs, one queue for each log."""

    def __init__(self) -> None:
        #: Requests that have not left; the first of a queue may be running.
        self._queues: dict[Key, deque[QueuedRequest]] = {}
        #: Requests that are first in all their queues, and not started yet.
        self._next: deque[QueuedRequest] = deque()
        #: _start_first() is running. A nested call returns immediately.
        self._is_starting = False

    def keys(self) -> KeysView[Key]:
        """Return a view of the keys of all requests that have not left."""
        return self._queues.keys()

    def is_busy(self, key: Key) -> bool:
        """Return whether an earlier request of that key has not left."""
        return key in self._queues

    def enter(self, request: QueuedRequest) -> None:
        """Add a request at the end of its queues.

        It starts when it is the first in all of them, possibly before this returns.
        """
        for key in request.keys:
            self._queues.setdefault(key, deque()).append(request)
        self._start_first([request])

    def leave(self, request: QueuedRequest) -> None:
        """Remove a request that has ended, and start those that waited for it.

        Later calls have no effect.
        """
        if request.has_left:
            return
        request.has_left = True
        following = []
        for key in request.keys:
            queue = self._queues[key]
            queue.popleft()
            if queue:
                following.append(queue[0])
            else:
                del self._queues[key]
        self._start_first(following)

    def _start_first(self, candidates: Iterable[QueuedRequest]) -> None:
        """Start the candidates that are first in all their queues.

        A loop starts them one after the other instead of recursively: there may be
        hundreds, and each may start the next.
        """
        for request in dict.fromkeys(candidates):
            if all(self._queues[key][0] is request for key in request.keys):
                self._next.append(request)
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._next:
                request = self._next.popleft()
                request.start(request)
        finally:
            self._is_starting = False
