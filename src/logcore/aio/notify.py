"""Lets tasks wait for new records of logs.

Tasks that follow the same logs share one listener or inotify handle.

Rules:
- A log that only this process writes notifies its listeners. Other logs are watched: the
  loop waits for the handle of the watch. It also polls each second, because a file system
  may not report writes of another machine.
- Events are not counted: a task that wakes checks whether there are records.
- Listening and watching end soon after the last task has stopped waiting.

This module reads no records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, Self, TypeVar

from logcore.aio.ending import waits_of
from logcore.aio.loop_thread import LoopThread
from logcore.consumer.change_watch import ChangeWatch
from logcore.errors import LogClosedError
from logcore.fs import FS
from logcore.kernels import Record
from logcore.reader import (
    LogReader,
    LogTail,
    follow,
    is_shared,
    is_written_elsewhere,
    is_written_here,
    listen_to,
    new_records_of,
)

#: The interval of polling in addition to a handle, because the handle may not report
#: writes of other machines.
_CHECK_SECONDS: Final = 1.0
#: The interval of polling if the system has no handle to wait for.
_POLL_SECONDS: Final = 0.01

_NOTHING: Final[tuple[tuple[str, ...], tuple[str, ...]]] = ((), ())

_T = TypeVar("_T")


class Wakeups:
    """Wakes the tasks of a loop.

    Any thread may call notify(). All other methods are called in the loop.
    """

    def __init__(self, loop_thread: LoopThread) -> None:
        self._loop_thread = loop_thread
        #: The futures of the tasks that wait.
        self._waiting: set[asyncio.Future[bool]] = set()
        #: Whether wake() is scheduled in the loop.
        self._is_scheduled = False
        #: Called in the loop before the tasks wake.
        self.on_wake: Callable[[], None] | None = None

    def notify(self) -> bool:
        """Schedule wake() in the loop. Return False if the loop is closed."""
        if self._is_scheduled:  # wake() is scheduled already
            return True
        self._is_scheduled = True
        return self._loop_thread.post_to_loop(self.wake)

    def wake(self) -> None:
        self._is_scheduled = False  # first: events from now on schedule another wake()
        if self.on_wake is not None:
            self.on_wake()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(True)

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiting)

    async def wait(self, seconds: float | None) -> bool:
        """Return True after an event, or False when `seconds` have passed.

        The caller checks for records immediately before, without an await in between.
        """
        waiter: asyncio.Future[bool] = self._loop_thread.loop.create_future()
        timer = None
        if seconds is not None:
            timer = self._loop_thread.loop.call_later(
                max(0.0, seconds), _expire, waiter
            )
        self._waiting.add(waiter)
        try:
            return await waiter
        finally:
            self._waiting.discard(waiter)
            if timer is not None:
                timer.cancel()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class DirectoryWatch:
    """Wakes tasks when files in directories change.

    All methods are called in the loop.
    """

    def __init__(self, loop_thread: LoopThread, fs: FS, wakeups: Wakeups) -> None:
        self._loop = loop_thread.loop
        self._changes = ChangeWatch(fs)
        self._wakeups = wakeups
        #: The watched directories, and the directories in which the death of a process
        #: closes a file.
        self._watched = _NOTHING
        self._end = contextlib.ExitStack()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, paths: Sequence[str], closing: Sequence[str] = ()) -> bool:
        """Watch these directories and no others; see SharedFS.watch().

        Return whether they differ from the previous directories. In that case, events
        may have been missed.
        """
        wanted = tuple(paths), tuple(closing)
        if self._changes.is_current(*wanted):
            return False
        # A directory that was removed and created again must be watched again. Its watch
        # is not different, because the caller could never wait while it does not exist.
        is_different = wanted != self._watched
        self.close()
        if not paths:
            return False
        self._changes.watch(*wanted)
        self._watched = wanted
        self._end.callback(self._changes.close)
        number = self._changes.fileno()
        if number >= 0:
            self._loop.add_reader(number, self._changed)
            self._end.callback(self._loop.remove_reader, number)
            self._poll_later(_CHECK_SECONDS)
        else:
            self._poll_later(_POLL_SECONDS)
        return is_different

    @property
    def reports_deaths(self) -> bool:
        """Whether the death of another process wakes the tasks."""
        return self._changes.reports_deaths

    def _changed(self) -> None:
        self._changes.wait(0.0)
        self._wakeups.wake()

    def _poll_later(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._poll, seconds)

    def _poll(self, seconds: float) -> None:
        if self._wakeups.has_waiters:
            self._poll_later(seconds)
            self._wakeups.wake()
        else:
            self.close()

    def __del__(self) -> None:
        if self._loop.is_closed():  # a timer of an open loop refers to this object
            self._end.close()

    def close(self) -> None:
        self._watched = _NOTHING
        if self._timer is not None:
            self._timer.cancel()
        self._end.close()


class LogFollower:
    """Follows some logs in one loop, for all tasks that wait for them."""

    def __init__(
        self, loop_thread: LoopThread, fs: FS, logs: Sequence[LogReader]
    ) -> None:
        self._loop_thread = loop_thread
        self._logs = tuple(logs)
        self._wakeups = Wakeups(loop_thread)
        self._wakeups.on_wake = self._on_wake
        self._directory_watch = DirectoryWatch(loop_thread, fs, self._wakeups)
        #: Logs that another process may write. They do not notify listeners of this
        #: process.
        self._watched = [log for log in logs if is_written_elsewhere(log)]
        self._is_shared = any(is_shared(log) for log in logs)
        self._stop_listening: list[Callable[[], None]] = []
        self._was_waited_for = False
        self._is_refreshed = False
        self._waits = waits_of(loop_thread.loop)
        self._waits.add(self)

    @property
    def is_ended(self) -> bool:
        """Whether the tails of the loop were ended."""
        return self._waits.is_ended

    def end_waits(self) -> None:
        """Wake the tasks, because the tails of the loop were ended."""
        self._wakeups.wake()

    async def prepare(self) -> None:
        """Register for events, and make records of other processes visible."""
        self._was_waited_for = True
        if not self._stop_listening:
            self._stop_listening = [
                listen_to(log, self._notify)
                for log in self._logs
                if is_written_here(log)
            ]
        if self._directory_watch.watch([log.path for log in self._watched]):
            self._is_refreshed = False
        if self.is_fresh:
            return
        if self._is_shared:  # may wait for the write lock of another process
            await self._loop_thread.call(self._refresh)
        else:
            self._refresh()

    def _refresh(self) -> None:
        # This is set first, because an event during the refresh requires another one.
        self._is_refreshed = True
        try:
            for log in self._watched:
                log.refresh()
        except BaseException:
            self._is_refreshed = False
            raise

    @property
    def is_fresh(self) -> bool:
        """Whether no event has occurred since the latest refresh began."""
        return self._is_refreshed or not self._watched

    async def wait(self, seconds: float | None) -> bool:
        return await self._wakeups.wait(seconds)

    def _notify(self) -> None:
        if not self._wakeups.notify():
            self.close()

    def _on_wake(self) -> None:
        self._is_refreshed = False
        if not self._was_waited_for and not self._wakeups.has_waiters:
            self.close()
        self._was_waited_for = False

    def close(self) -> None:
        """End listening and watching.

        Once the loop is closed, any thread may call this.
        """
        forgets = self._stop_listening
        self._stop_listening = []
        for forget in forgets:
            forget()
        if not self._loop_thread.loop.is_closed():
            self._directory_watch.close()

    def wake(self) -> None:
        self._wakeups.wake()


class RecordLists(Generic[_T]):
    """Returns one record at a time, from lists of some hundred records.

    This is an asynchronous iterator. If a task that waits for a record is cancelled,
    the record is not lost: the next task gets it.
    """

    def __init__(self, loop_thread: LoopThread) -> None:
        self._loop_thread = loop_thread
        #: The records that were read and not returned yet.
        self._records: Iterator[_T] = iter(())
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        for record in self._records:
            return record
        self._loop_thread.check()
        while True:
            if self._is_over:
                raise StopAsyncIteration
            await asyncio.sleep(0)  # other tasks run between two lists
            try:
                self._records = iter(await self._next_list())
            except Exception:  # this includes the end, but not a cancelled task
                self._is_over = True
                raise
            for record in self._records:
                return record

    async def _next_list(self) -> list[_T]:
        """Return the next list, or raise StopAsyncIteration at the end.

        An implementation must not remove a record before its last await.
        """
        raise NotImplementedError


class ReadLists(RecordLists[_T]):
    """Reads lists that exist already, or that a function returns at the first use.

    The function runs in the worker thread.
    """

    def __init__(
        self,
        loop_thread: LoopThread,
        lists: Iterator[list[_T]] | None,
        find: Callable[[], Iterator[list[_T]]] | None = None,
    ) -> None:
        super().__init__(loop_thread)
        self._lists = lists
        self._find = find

    async def _next_list(self) -> list[_T]:
        if self._lists is None:
            assert self._find is not None
            self._lists = await self._loop_thread.call(self._find)
        for records in self._lists:
            return records
        raise StopAsyncIteration


class Tail(RecordLists[_T]):
    """Records of some logs as they arrive.

    The iteration ends when one of the logs is closed, after `timeout` seconds without a
    record, and by end_waits().
    """

    def __init__(
        self,
        loop_thread: LoopThread,
        follower: LogFollower,
        tailed: Sequence[LogTail],
        timeout: float | None,
        with_topic: Callable[[int, list[Record]], list[_T]],
    ) -> None:
        super().__init__(loop_thread)
        self._follower = follower
        self._tailed = tailed
        self._timeout = timeout
        self._placed = with_topic
        self._lists: Iterator[tuple[int, list[Record]]] = iter(())

    async def _next_list(self) -> list[_T]:
        loop = self._loop_thread.loop
        deadline = None
        if self._timeout is not None:
            deadline = loop.time() + self._timeout
        while True:
            try:
                for number, records in self._lists:
                    return self._placed(number, records)
                await self._follower.prepare()
            except LogClosedError:
                raise StopAsyncIteration from None
            if self._follower.is_ended:
                raise StopAsyncIteration
            if any(tailed.log.is_closed for tailed in self._tailed):
                raise StopAsyncIteration
            if any(tailed.has_records for tailed in self._tailed):
                self._lists = new_records_of(self._tailed)
                continue
            if not self._follower.is_fresh:
                continue
            left = None
            if deadline is not None:
                left = deadline - loop.time()
            if left is not None and left <= 0:
                raise StopAsyncIteration
            await self._follower.wait(left)


def unchanged(_: int, records: list[Record]) -> list[Record]:
    """Return the records of one log unchanged."""
    return records


def begin_to_follow(logs: Sequence[LogReader], offsets: Sequence[int]) -> list[LogTail]:
    """Return each log with the offset to begin at.

    Raises:
        LogcoreError: reading at an offset failed.
    """
    for log, offset in zip(logs, offsets, strict=True):
        log.read(offset)
    return [follow(log, offset) for log, offset in zip(logs, offsets, strict=True)]
