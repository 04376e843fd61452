"""One partition in an event loop. Its names are those of logcore.Log.

Rules:
- Appends of tasks that arrive while the disk is busy are written together, and
  completed in the loop together.
- If an append is cancelled before it was passed to the thread, it has no effect. If it
  is cancelled later, it is completed.
- Reads run in the loop, in chunks of some hundred records.

logcore.log stores and reads the records.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from logcore import log as synchronous
from logcore.aio.awaitable_open import opener
from logcore.aio.closeable import AsyncCloseable
from logcore.aio.loop_thread import LoopThread, in_thread
from logcore.aio.notify import (
    LogFollower,
    ReadLists,
    RecordLists,
    Tail,
    begin_to_follow,
    unchanged,
)
from logcore.config import LogConfig
from logcore.errors import InvalidRecordError, RecordTooLargeError
from logcore.kernels import Receipt, Record
from logcore.kernels.layout import (
    Buffer,
    HeadersInput,
    Level,
    RecordInput,
    Time,
    header_pairs,
)
from logcore.reader import Isolation, fs_of, record_lists

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: Maximum number of appends that are written together, so that their batch fits a
#: segment and no caller waits long.
_MAX_TOGETHER: Final = 1_000
_MAX_BYTES: Final = 1 << 19
_RECORD_BYTES: Final = 64
#: These errors affect one record, and must not fail other records.
_OF_RECORDS: Final = (
    InvalidRecordError,
    RecordTooLargeError,
    TypeError,
    ValueError,
    OverflowError,
)


class QueuedAppend:
    """One queued append.

    `row` is in the form of Log.append_many(). `barrier` is the number of other calls
    before this append.
    """

    __slots__ = (
        "barrier",
        "durability",
        "expected",
        "expected_offset",
        "future",
        "row",
        "size_bytes",
    )

    def __init__(
        self,
        row: tuple[Buffer | None, Buffer | None, HeadersInput, Time | None],
        durability: Level | None,
        expected_offset: int | None,
        expected: Mapping[Buffer, int] | None,
        future: asyncio.Future[Receipt],
    ) -> None:
        self.row = row
        self.durability: Level | None = durability
        self.expected_offset = expected_offset
        self.expected = expected
        self.future = future
        self.barrier = 0
        key, value, headers, _ = row
        self.size_bytes = _RECORD_BYTES + _size_bytes(key) + _size_bytes(value)
        if headers:
            self.size_bytes += _size_bytes(headers)

    @property
    def depends_on_others(self) -> bool:
        """Whether the append may fail because of other records."""
        return self.expected_offset is not None or self.expected is not None


class AppendQueue:
    """Queues appends of many tasks to one log, in the order of the calls."""

    def __init__(self, loop_thread: LoopThread, log: synchronous.Log) -> None:
        self._loop_thread = loop_thread
        self._log = log
        #: Appends that were not passed to the thread yet.
        self._waiting: deque[QueuedAppend] = deque()
        self._is_due = False
        self._turn = 0

    def add(self, appended: QueuedAppend) -> None:
        """Queue an append. Call this in the loop.

        Writing starts after the tasks that are ready now have run.
        """
        appended.barrier = self._turn
        self._waiting.append(appended)
        if not self._is_due:
            self._is_due = True
            self._loop_thread.loop.call_soon(self.start_writing)

    def start_writing(self) -> None:
        """Make the thread write the queued appends. Call this in the loop."""
        if self._is_due:
            self._is_due = False
            self._loop_thread.submit(functools.partial(self._write, self._turn))

    def add_barrier(self) -> None:
        """Make another call run between the queued appends and later appends.

        Call this in the loop.
        """
        self.start_writing()
        self._turn += 1

    def _write(self, barrier: int) -> None:
        """Write the queued appends, in the thread."""
        while self._waiting and self._waiting[0].barrier <= barrier:
            batch = self._next(barrier)
            if batch:
                outcomes = _outcomes(self._log, batch)
                self._loop_thread.post_to_loop(
                    functools.partial(_complete, batch, outcomes)
                )

    def _next(self, barrier: int) -> list[QueuedAppend]:
        """Return the appends for one batch. The first one determines the durability."""
        found: list[QueuedAppend] = []
        size_bytes = 0
        most = max_batch_bytes(self._log)
        while self._waiting and len(found) < _MAX_TOGETHER:
            appended = self._waiting[0]
            if appended.barrier > barrier:
                break
            if appended.future.cancelled():
                self._waiting.popleft()
                continue
            if found and size_bytes + appended.size_bytes > most:
                break
            if found and (
                appended.durability != found[0].durability or appended.depends_on_others
            ):
                break
            found.append(self._waiting.popleft())
            size_bytes += appended.size_bytes
            if appended.depends_on_others:
                break
        return found


def max_batch_bytes(log: synchronous.Log) -> int:
    """Return the maximum size of records that Log.append_many() stores atomically.

    Larger appends are written in parts, and if the disk is full only some of the parts
    may be stored. The result is half of the log's limits, which leaves space for the
    heads of batches.
    """
    config = log.config
    durability = log.durability
    most = min(_MAX_BYTES, config.segment_bytes // 2)
    if durability.kind == "group":
        return min(most, durability.max_bytes // 2)
    if durability.kind == "always":
        return min(most, config.batch_size // 2)
    return most


def _size_bytes(piece: object) -> int:
    """Return an upper bound of the size of a part of a record, 0 for an invalid one."""
    if isinstance(piece, (bytes, bytearray)):
        return len(piece)
    if isinstance(piece, memoryview):
        return piece.nbytes
    if isinstance(piece, str):
        return 4 * len(piece)
    if isinstance(piece, (tuple, list)):
        return _RECORD_BYTES + sum(map(_size_bytes, piece))
    return 0


def _outcomes(
    log: synchronous.Log, batch: list[QueuedAppend]
) -> list[Receipt | BaseException]:
    """Append records as one batch, or one by one if one of them is rejected."""
    if len(batch) == 1:
        return [_outcome(log, batch[0])]
    try:
        receipt = log.append_many(
            [appended.row for appended in batch], durability=batch[0].durability
        )
    except _OF_RECORDS:  # nothing was written
        return [_outcome(log, appended) for appended in batch]
    except BaseException as error:
        return [error] * len(batch)
    return [
        receipt._replace(offset=offset, last_offset=offset)
        for offset in range(receipt.offset, receipt.last_offset + 1)
    ]


def _outcome(log: synchronous.Log, appended: QueuedAppend) -> Receipt | BaseException:
    key, value, headers, timestamp_ms = appended.row
    try:
        return log.append(
            value,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            durability=appended.durability,
            expected_offset=appended.expected_offset,
            expected=appended.expected,
        )
    except BaseException as error:
        return error


def _complete(
    batch: list[QueuedAppend], outcomes: list[Receipt | BaseException]
) -> None:
    for appended, outcome in zip(batch, outcomes, strict=True):
        if appended.future.done():
            continue
        if isinstance(outcome, BaseException):
            appended.future.set_exception(outcome)
        else:
            appended.future.set_result(outcome)


class Log(AsyncCloseable):
    """One partition directory, for tasks of one event loop.

    logcore.aio.open() and LogDir.partition() create it.

    `sync` is the logcore.Log, whose other methods may be called in threads, for example
    with asyncio.to_thread(log.sync.scrub). All methods here raise WrongLoopError outside
    the loop. Their other errors are those of logcore.Log.
    """

    def __init__(self, loop_thread: LoopThread, log: synchronous.Log) -> None:
        """Create a log. Users call logcore.aio.open() or LogDir.partition()."""
        self.sync = self._sync = log
        self._loop_thread = loop_thread
        self._appending = AppendQueue(loop_thread, log)
        self._follower = LogFollower(loop_thread, fs_of(log), [log])

    def __repr__(self) -> str:
        return f"<aio {self.sync!r}>"

    async def close(self) -> None:
        """Close the log.

        If the call is cancelled, closing continues in the background. Closing twice is
        allowed.
        """
        closing = self._call(self.sync.close)
        try:
            await closing
        finally:
            self.release()

    def release(self) -> None:
        """Release the resources of a log that its directory has closed."""
        self._follower.wake()
        self._follower.close()
        self._loop_thread.end()

    def _call(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> Coroutine[Any, Any, _T]:
        """Run a call in the thread, after all earlier appends."""
        self._loop_thread.check()
        self._appending.add_barrier()
        return self._loop_thread.call(function, *args, **kwargs)

    # -- appending ---------------------------------------------------------------------

    async def append(
        self,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        durability: Level | None = None,
        expected_offset: int | None = None,
        expected: Mapping[Buffer, int] | None = None,
    ) -> Receipt:
        """Append one record, in one batch with records of other tasks.

        The call returns when the record has the durability of the log's policy. Records
        are stored in the order of the calls. If the call is cancelled before the record
        is passed to the thread, the record is not stored. Otherwise it is stored.
        """
        self._loop_thread.check()
        if headers.__class__ is not tuple and isinstance(headers, Iterable):
            # A tuple, because the headers are read twice if another record of the batch
            # is rejected.
            headers = tuple(header_pairs(headers))
        future: asyncio.Future[Receipt] = self._loop_thread.loop.create_future()
        self._appending.add(
            QueuedAppend(
                (key, value, headers, timestamp_ms),
                durability,
                expected_offset,
                expected,
                future,
            )
        )
        return await future

    async def append_many(
        self,
        records: Iterable[RecordInput],
        *,
        durability: Level | None = None,
        expected_offset: int | None = None,
        expected: Mapping[Buffer, int] | None = None,
    ) -> Receipt:
        """See logcore.Log.append_many()."""
        if isinstance(records, (list, tuple)) or not isinstance(records, Iterable):
            rows = records
        else:
            rows = list(records)
        return await self._call(
            self.sync.append_many,
            rows,
            durability=durability,
            expected_offset=expected_offset,
            expected=expected,
        )

    append_columns = in_thread(synchronous.Log.append_columns)
    append_batch = in_thread(synchronous.Log.append_batch)
    flush = in_thread(synchronous.Log.flush)

    # -- reading -----------------------------------------------------------------------

    def read(
        self,
        start: int,
        end: int | None = None,
        *,
        isolation: Isolation = "read_uncommitted",
        max_bytes: int | None = None,
    ) -> RecordLists[Record]:
        """Return the records in [start, end), for `async for`; see logcore.Log.read().

        Between chunks of some hundred records other tasks run.
        """
        self._loop_thread.check()

        find = functools.partial(
            record_lists,
            self.sync,
            start,
            end,
            isolation=isolation,
            max_bytes=max_bytes,
        )
        if isolation == "read_committed":  # this may read the whole log
            return ReadLists(self._loop_thread, None, find)
        return ReadLists(self._loop_thread, find())

    async def history(
        self, key: Buffer, start: int | None = None, end: int | None = None
    ) -> list[Record]:
        """Return the records of a key; see logcore.Log.history()."""
        return await self._call(lambda: list(self.sync.history(key, start, end)))

    async def get(self, offset: int) -> Record:
        """Return the record at an offset, or the next one; see logcore.Log.get()."""
        self._loop_thread.check()
        return self.sync.get(offset)

    def tail(
        self, start: int | None = None, *, timeout: float | None = None
    ) -> RecordLists[Record]:
        """Return records from `start` on and new ones as they arrive, for `async for`.

        The default of `start` is the present end. The iteration ends after `timeout`
        seconds without a new record, and when the log is closed. All tails of a log
        share one listener or one inotify handle.
        """
        self._loop_thread.check()
        if start is None:
            offset = self.sync.high_watermark
        else:
            offset = start
        return Tail(
            self._loop_thread,
            self._follower,
            begin_to_follow([self.sync], [offset]),
            timeout,
            unchanged,
        )

    offset_for_timestamp = in_thread(synchronous.Log.offset_for_timestamp)
    newest = in_thread(synchronous.Log.newest)
    refresh = in_thread(synchronous.Log.refresh)

    # -- attributes --------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self.sync.path

    @property
    def config(self) -> LogConfig:
        return self.sync.config

    @property
    def is_closed(self) -> bool:
        return self.sync.is_closed

    @property
    def has_failed(self) -> bool:
        return self.sync.has_failed

    @property
    def log_start_offset(self) -> int:
        return self.sync.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self.sync.log_end_offset

    @property
    def high_watermark(self) -> int:
        return self.sync.high_watermark

    @property
    def durable_end_offset(self) -> int:
        return self.sync.durable_end_offset

    # -- maintenance and segments ------------------------------------------------------

    tick = in_thread(synchronous.Log.tick)
    roll = in_thread(synchronous.Log.roll)
    delete_records = in_thread(synchronous.Log.delete_records)
    truncate = in_thread(synchronous.Log.truncate)
    statistics = in_thread(synchronous.Log.statistics)


open = opener("the log", synchronous.open_log, synchronous.Log.close, Log)
"""Open a partition directory like logcore.open(), with `async with` or `await`."""
