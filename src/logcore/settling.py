"""Appends that wait for the disk, and what is to happen once they are on it.

Rules:
- Whoever appended waits in settle(), without the lock under which appends are decided. So others decide meanwhile, and
  threads that wait for one log share its syncs.
- What is to happen happens under the lock, in the thread that finds the append on disk, and may append more.
- When settle() returns, nothing waits of what was added before.

Nothing here appends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import attrs

from logcore.errors import LogcoreError, LogFailedError
from logcore.log import Log

#: Called with the logs that could not be synced, and why.
Then = Callable[[Mapping[Log, LogcoreError]], None]


@attrs.define
class _Waiting:
    """ends: how far each log has to be on disk. failures: of logs whose sync failed."""

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
    """What waits for the disk, in the order of its appends. lock: see above; reentrant."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._waiting: deque[_Waiting] = deque()

    def add(self, ends: Mapping[Log, int], then: Then) -> None:
        """Under the lock: calls then() once each log is on disk up to its end, or could not be synced; at once if there
        is none.
        """
        if ends:
            self._waiting.append(_Waiting(dict(ends), then))
        else:
            then({})

    def settle(self) -> None:
        """Waits for the disk until nothing waits any more. Not under the lock."""
        while True:
            with self._lock:
                logs = {log for one in self._waiting for log in one.ends}
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
        waiting = list(self._waiting)
        self._waiting.clear()
        for one in waiting:
            if log in one.ends:
                one.hear(log, failure)
            if one.ends:
                self._waiting.append(one)
            else:
                one.then(one.failures)
