"""Appends that wait for the disk, and what is to happen once they are on it.

Rules:
- Whoever appended waits in settle(), without the lock under which appends are decided. So others decide meanwhile, and
  threads that wait for one log share its syncs.
- What is to happen happens under the lock, in the thread that finds the append on disk, and may append more.
- When settle() returns, nothing waits of what was added before it, nor of what that has led to. What others add
  meanwhile is theirs to wait for: 64 threads that waited for one another shared no sync, and each took in all others'.

- Who decides by what a log holds, and has appended nothing, calls sync_present().

Nothing here appends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import attrs

from logcore.errors import DurabilityUnknownError, LogcoreError, LogFailedError
from logcore.log import Log

#: Called with the logs that could not be synced, and why.
Then = Callable[[Mapping[Log, LogcoreError]], None]


@attrs.define(eq=False)
class _Waiting:
    """number: in the order of what was added; what it leads to has the same. ends: how far each log has to be on disk.
    failures: of logs whose sync failed.
    """

    number: int
    ends: dict[Log, int]
    then: Then
    failures: dict[Log, LogcoreError] = attrs.Factory(dict)

    def hear(self, log: Log, failure: LogcoreError | None) -> None:
        """A sync of the log has ended. One that failed may have come behind one that was enough, and one that succeeded
        may have begun before the append.
        """
        end = self.ends[log]
        if log.durable_end_offset < end <= log.log_end_offset and failure is None:
            return
        del self.ends[log]
        if log.durable_end_offset < end:
            self.failures[log] = failure or LogFailedError("the log was cut meanwhile", path=log.path)


class Settling:
    """Appends that wait for the disk, in their order. lock: see above; reentrant."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._waiting: deque[_Waiting] = deque()
        self._added = 0  # the last number
        self._cause: int | None = None  # the number of that whose then() runs

    def add(self, ends: Mapping[Log, int], then: Then) -> None:
        """Under the lock: calls then() once each log is on disk up to its end, or could not be synced; at once if there
        is none.
        """
        if not ends:
            then({})
            return
        number = self._cause
        if number is None:
            self._added += 1
            number = self._added
        self._waiting.append(_Waiting(number, dict(ends), then))

    def settle(self) -> None:
        """Waits for the disk until nothing waits of what was added so far. Not under the lock."""
        with self._lock:
            last = self._added
        while True:
            with self._lock:
                logs = {log for one in self._waiting if one.number <= last for log in one.ends}
                if not logs:
                    return
            for log in logs:
                failure = None
                try:
                    log.flush()
                except LogcoreError as error:
                    failure = error
                with self._lock:
                    self._hear(log, failure)

    def _hear(self, log: Log, failure: LogcoreError | None) -> None:
        for one in tuple(self._waiting):  # an interrupt in the middle leaves the others waiting
            if log in one.ends:
                one.hear(log, failure)
            if not one.ends:
                self._waiting.remove(one)
                self._end(one)

    def _end(self, one: _Waiting) -> None:
        before = self._cause
        self._cause = one.number
        try:
            one.then(one.failures)
        finally:
            self._cause = before


def sync_present(log: Log) -> None:
    """Returns when all that the log holds is on disk, for decisions that are made from it.

    Where another process cuts or recovers the log meanwhile, that is what it holds then. flush() raises there, because
    it cannot say what has become of the records of before.

    Raises DurabilityUnknownError when a sync failed; else as Log.flush().
    """
    while log.durable_end_offset < log.log_end_offset:
        try:
            log.flush()
        except DurabilityUnknownError:
            if log.has_failed:
                raise
