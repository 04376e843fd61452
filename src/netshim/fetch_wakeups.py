"""Wakes fetches that wait for records, after appends of clients and of other processes.

Rules:
- A fetch is woken once new records are visible to readers, that is, below the high
  watermark. The fetch of a follower is woken by the append itself.
- In a shared directory, the partitions that fetches wait for are checked for appends of
  other processes. A timer repeats the check while any fetch waits.

This module does not read records (handlers/fetch.py does).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from logcore import Log, LogcoreError
from logcore.metadata.checkpoint import Key
from netshim.fetch_sessions import RecentChanges
from netshim.request_order import WorkQueues
from netshim.scheduling import LoopTimers, Syncs, Waiters
from netshim.served_directory import ServedDirectory

_log = logging.getLogger("netshim")

#: The key of actions that wait for an event of any partition.
ANY_PARTITION: Final[Key] = ("", -1)
#: Minimum interval of checks for appends of other processes.
_FOLLOW_MS: Final = 5
#: Approximate time of the check of one partition.
_CHECK_MS: Final = 0.01
#: The share of one processor that all checks may use.
_CHECK_SHARE: Final = 0.02


class WaitingFetches(Waiters):
    """Fetches that wait for records. Their keys are partitions."""

    def __init__(
        self,
        logdir: ServedDirectory,
        timers: LoopTimers,
        queues: WorkQueues,
        syncs: Syncs,
    ) -> None:
        super().__init__()
        self._logdir = logdir
        self._timers = timers
        self._queues = queues
        self._syncs = syncs
        #: Whether a timer for the next follow() is set.
        self._follows = False
        #: Whether programs in this process may append, too. False in a cluster.
        self.has_other_writers = True
        #: Changes, unless there are other writers. Only the retention changes the
        #: offsets of a led log without an entry here.
        self.changes = RecentChanges()
        #: Fetches of followers, which get records above the high watermark.
        self.of_followers = Waiters()
        #: High watermarks at the last wake_readers().
        self._visible: dict[tuple[str, int], int] = {}

    def wake(self, keys: Iterable[Key], now_ms: int) -> None:
        """Call each action that waits for any of the keys, or for any partition, once."""
        keys = [*keys]
        if not self.has_other_writers:
            self.changes.add(keys)
        if self.by_key or self.of_followers.by_key:
            keys.append(ANY_PARTITION)
            self.of_followers.wake(keys, now_ms)
            super().wake(keys, now_ms)

    def wake_consumers(self, key: Key, now_ms: int) -> None:
        """Wake fetches like wake(), except for those of followers."""
        self.changes.add((key,))
        if self.by_key:
            super().wake((key, ANY_PARTITION), now_ms)

    def wake_followers(self, key: Key, now_ms: int) -> None:
        """Call each action of a follower that waits for the partition, once."""
        self.changes.add((key,))
        if self.of_followers.by_key:
            self.of_followers.wake((key, ANY_PARTITION), now_ms)

    def awaited_keys(self) -> list[Key]:
        return [*super().awaited_keys(), *self.of_followers.awaited_keys()]

    def appended(
        self, topic: str, partition: int, log: Log, end: int, now_ms: int
    ) -> None:
        """Wake the fetches of a partition once appended records are visible to readers.

        Call this after each append.
        """
        key = topic, partition
        if log.high_watermark >= end:
            self.wake([key], now_ms)
        else:
            self._syncs.when_durable(log, end, lambda _: self.wake([key], now_ms))

    def follow(self, now_ms: int) -> None:
        """Refresh the partitions that fetches wait for.

        This makes appends of other processes visible. A timer repeats this while any
        fetch waits.
        """
        if not self._logdir.is_shared or self._follows:
            return
        keys = self.awaited_keys()
        for key in keys:
            log = self._logdir.host.opened(*key)
            if (
                log is None
                or log.has_failed
                or self._queues.is_busy(key)
                or not log.host.writer.state.is_behind()
            ):
                continue
            self._queues.submit(key, log.refresh, partial(self._followed, key, now_ms))
        if keys:
            self._follows = True
            self._timers.at(
                now_ms + max(_FOLLOW_MS, int(len(keys) * _CHECK_MS / _CHECK_SHARE)),
                self._follow_again,
            )

    def _follow_again(self, now_ms: int) -> None:
        self._follows = False
        self.follow(now_ms)

    def _followed(self, key: Key, now_ms: int, result: Any) -> None:
        if isinstance(result, LogcoreError | OSError):
            _log.error(
                "%s-%d: the changes of other processes cannot be read: %s", *key, result
            )
        self.wake([key], now_ms)

    def wake_readers(self, now_ms: int) -> None:
        """Wake the fetches of partitions with a changed high watermark.

        These are appends that did not come from clients of this broker.
        """
        if not self.has_other_writers:
            return
        before = self._visible
        now = {}
        for key in self.awaited_keys():
            now[key] = -1
            log = self._logdir.host.opened(*key)
            if log is not None:
                now[key] = log.high_watermark
        self._visible = now
        self.wake([key for key, end in now.items() if before.get(key) != end], now_ms)
