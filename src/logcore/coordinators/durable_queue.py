"""Queue of appends that are waiting for an fsync, each with a completion callback.

Rules:
- The appending thread waits in wait_until_durable() after releasing the lock under which
  appends are decided. Other threads can therefore decide concurrently, and threads that
  wait for the same log share a sync.
- Callbacks run with the lock held, in the thread that finds the append durable. A
  callback may append more records.
- wait_until_durable() returns once every append added before the call, and every append
  added by their callbacks, is durable or has failed. It does not wait for later appends:
  64 threads that waited for each other shared no sync in a measurement, and each thread
  processed the appends of all others.
- A caller that makes a decision from the content of a log, and has appended nothing,
  calls sync_present().

This module never appends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import attrs

from logcore.errors import DurabilityUnknownError, LogcoreError, LogFailedError
from logcore.log import Log

#: Completion callback. Its argument maps the logs that could not be synced to the
#: errors.
CompletionCallback = Callable[[Mapping[Log, LogcoreError]], None]


@attrs.define(eq=False)
class _PendingAppend:
    """An append that is not durable yet."""

    #: Position in the order of add(). Appends added by its callback have the same
    #: number.
    number: int
    #: The offset up to which each log must be durable. Synced logs are removed.
    ends: dict[Log, int]
    #: Called once `ends` is empty.
    on_complete: CompletionCallback
    #: Logs whose sync failed, with the error.
    failures: dict[Log, LogcoreError] = attrs.Factory(dict)


class DurableQueue:
    """Appends that wait for a sync, in their order."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        """Create an empty queue. `lock` is the lock under which appends are decided. It
        must be reentrant.
        """
        self._lock = lock
        #: The appends that wait for a sync of each log, oldest first.
        self._waiting: dict[Log, deque[_PendingAppend]] = {}
        #: The last number that add() has used.
        self._added = 0
        #: The number of the append whose callback is running.
        self._parent_number: int | None = None

    def add(self, ends: Mapping[Log, int], on_complete: CompletionCallback) -> None:
        """Call `on_complete` once each log is durable up to its end, or its sync failed.

        The caller holds the lock. If `ends` is empty, the callback runs at once.
        """
        if not ends:
            on_complete({})
            return
        number = self._parent_number
        if number is None:
            self._added += 1
            number = self._added
        pending_append = _PendingAppend(number, dict(ends), on_complete)
        for log in ends:
            self._waiting.setdefault(log, deque()).append(pending_append)

    def is_waiting_for(self, log: Log) -> bool:
        """Return whether an append waits for a sync of the log."""
        return log in self._waiting

    def wait_until_durable(self) -> None:
        """Wait until all appends added so far are durable or have failed.

        The caller does not hold the lock.
        """
        with self._lock:
            last = self._added
        # A callback may add appends of other logs, so the logs are collected again.
        while True:
            with self._lock:
                logs = [
                    log
                    for log, waiting in self._waiting.items()
                    if any(append.number <= last for append in waiting)
                ]
                if not logs:
                    return
            for log in logs:
                failure = None
                try:
                    log.flush()
                except LogcoreError as error:
                    failure = error
                with self._lock:
                    self.on_sync(log, failure)

    def on_sync(self, log: Log, failure: LogcoreError | None) -> None:
        """Update the appends of a log after a sync has ended. The lock is held.

        An earlier sync may have made an append durable although this sync failed. If
        this sync began before an append, that append continues to wait.
        """
        # If this is interrupted, the remaining appends still wait.
        for append in tuple(self._waiting.get(log, ())):
            end = append.ends.get(log)
            if end is not None:
                if log.durable_end_offset < end:
                    # The sync began before this append. A later sync makes it durable.
                    if failure is None and end <= log.log_end_offset:
                        continue
                    append.failures[log] = failure or LogFailedError(
                        "the log was truncated before the sync", path=log.path
                    )
                del append.ends[log]
            # A callback may have synced the log and completed this append.
            waiting = self._waiting.get(log)
            if waiting is None or append not in waiting:
                continue
            waiting.remove(append)
            if not waiting:
                del self._waiting[log]
            if not append.ends:
                self._end(append)

    def _end(self, pending_append: _PendingAppend) -> None:
        previous = self._parent_number
        self._parent_number = pending_append.number
        try:
            pending_append.on_complete(pending_append.failures)
        finally:
            self._parent_number = previous


def sync_present(log: Log) -> None:
    """Wait until all present records of the log are durable.

    A decision that depends on the content of the log must be preceded by this call. If
    another process truncates or recovers the log concurrently, flush() raises, because
    the state of the earlier records is unknown. This function then syncs the remaining
    records.

    Raises:
        DurabilityUnknownError: a sync failed. Other errors are those of Log.flush().
    """
    while log.durable_end_offset < log.log_end_offset:
        try:
            log.flush()
        except DurabilityUnknownError:
            if log.has_failed:
                raise
