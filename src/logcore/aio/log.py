"""One partition in an event loop; see logcore.Log, whose names these are.

Rules:
- What tasks append while the disk is busy is written together, and told to the loop together.
- An append that is cancelled before it was handed to the thread leaves no trace. A later one is carried out.
- Reading runs in the loop, in pieces of some hundred records.

How records are stored and read belongs to logcore.log.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

from logcore import log as synchronous
from logcore.aio.following import Following, Lists, Pieces, Tail, followed, plain
from logcore.aio.home import Home
from logcore.aio.opening import Opening
from logcore.config import Durability, LogConfig
from logcore.errors import InvalidRecordError, RecordTooLargeError
from logcore.format.columns import ColumnInput, TimesInput
from logcore.fs import FS, OS
from logcore.kernels import Receipt, Record
from logcore.kernels.layout import Buffer, HeadersInput, Level, Piece, RecordInput, Time
from logcore.reader import Isolation, fs_of, record_lists

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: Appends that are written together at most, so that their batch fits a segment and no caller waits long.
_MOST_TOGETHER: Final = 1_000
_MOST_BYTES: Final = 1 << 19
_RECORD_BYTES: Final = 64
#: Errors of one record, for which others are not to fail.
_OF_RECORDS: Final = (InvalidRecordError, RecordTooLargeError, TypeError, ValueError, OverflowError)


class Appended:
    """One append that waits. row: as Log.append_many() takes it. turn: how many other calls came before it."""

    __slots__ = ("durability", "expected_offset", "future", "row", "size_bytes", "turn")

    def __init__(
        self,
        row: tuple[Piece | None, Piece | None, HeadersInput, Time | None],
        durability: Level | None,
        expected_offset: int | None,
        future: asyncio.Future[Receipt],
    ) -> None:
        self.row = row
        self.durability: Level | None = durability
        self.expected_offset = expected_offset
        self.future = future
        self.turn = 0
        key, value, headers, _ = row
        self.size_bytes = _RECORD_BYTES + _size_bytes(key) + _size_bytes(value)
        if headers:
            self.size_bytes += _size_bytes(headers)


class Appending:
    """Appends of many tasks to one log, in the order of the calls."""

    def __init__(self, home: Home, log: synchronous.Log) -> None:
        self._home = home
        self._log = log
        self._waiting: deque[Appended] = deque()
        self._is_due = False
        self._turn = 0

    def add(self, one: Appended) -> None:
        """In the loop. The thread is asked once the tasks that are to run now have run."""
        one.turn = self._turn
        self._waiting.append(one)
        if not self._is_due:
            self._is_due = True
            self._home.loop.call_soon(self.hand_over)

    def hand_over(self) -> None:
        """In the loop: the thread writes what waits."""
        if self._is_due:
            self._is_due = False
            self._home.submit(functools.partial(self._write, self._turn))

    def let_pass(self) -> None:
        """In the loop: another call comes behind what waits now, and before what is added later."""
        self.hand_over()
        self._turn += 1

    def _write(self, turn: int) -> None:
        """In the thread."""
        while self._waiting and self._waiting[0].turn <= turn:
            together = self._next(turn)
            if together:
                outcomes = _outcomes(self._log, together)
                self._home.tell(functools.partial(_settle, together, outcomes))

    def _next(self, turn: int) -> list[Appended]:
        """Those that one batch may hold. The first of them decides how safe it is to be."""
        found: list[Appended] = []
        size_bytes = 0
        most = most_bytes(self._log)
        while self._waiting and len(found) < _MOST_TOGETHER:
            one = self._waiting[0]
            if one.turn > turn:
                break
            if one.future.cancelled():
                self._waiting.popleft()
                continue
            if found and size_bytes + one.size_bytes > most:
                break
            if found and (one.durability != found[0].durability or one.expected_offset is not None):
                break
            found.append(self._waiting.popleft())
            size_bytes += one.size_bytes
            if one.expected_offset is not None:
                break
        return found


def most_bytes(log: synchronous.Log) -> int:
    """Of records that Log.append_many() stores together or not at all: more goes in parts, of which a full disk may
    leave some. Half of what its limits say, for the headers of batches.
    """
    config = log.config
    durability = log.durability
    most = min(_MOST_BYTES, config.segment_bytes // 2)
    if durability.kind == "group":
        return min(most, durability.max_bytes // 2)
    if durability.kind == "always":
        return min(most, config.batch_size // 2)
    return most


def _size_bytes(piece: object) -> int:
    """At most what it takes in a record. 0 for what append() refuses."""
    if isinstance(piece, (bytes, bytearray)):
        return len(piece)
    if isinstance(piece, memoryview):
        return piece.nbytes
    if isinstance(piece, str):
        return 4 * len(piece)
    if isinstance(piece, (tuple, list)):
        return _RECORD_BYTES + sum(map(_size_bytes, piece))
    return 0


def _outcomes(log: synchronous.Log, together: list[Appended]) -> list[Receipt | BaseException]:
    """Appends records as one batch, or one by one where one of them is refused."""
    if len(together) == 1:
        return [_outcome(log, together[0])]
    try:
        receipt = log.append_many([one.row for one in together], durability=together[0].durability)
    except _OF_RECORDS:  # nothing was written
        return [_outcome(log, one) for one in together]
    except BaseException as error:
        return [error] * len(together)
    return [
        receipt._replace(offset=offset, last_offset=offset) for offset in range(receipt.offset, receipt.last_offset + 1)
    ]


def _outcome(log: synchronous.Log, one: Appended) -> Receipt | BaseException:
    key, value, headers, timestamp_ms = one.row
    try:
        return log.append(
            value,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            durability=one.durability,
            expected_offset=one.expected_offset,
        )
    except BaseException as error:
        return error


def _settle(together: list[Appended], outcomes: list[Receipt | BaseException]) -> None:
    for one, outcome in zip(together, outcomes, strict=True):
        if one.future.done():
            continue
        if isinstance(outcome, BaseException):
            one.future.set_exception(outcome)
        else:
            one.future.set_result(outcome)


def open(
    path: str | os.PathLike[str],
    *,
    create: bool = False,
    read_only: bool = False,
    config: Mapping[str, object] | None = None,
    durability: str | Durability = "group",
    on_corruption: synchronous.OnCorruption = "fail",
    shared: bool = False,
    fs: FS = OS,
) -> Opening[Log]:
    """Opens one partition directory as logcore.open() does, for `async with`, or with `await`."""

    async def begin() -> Log:
        home = Home("the log")
        try:
            log = await home.obtain(
                functools.partial(
                    synchronous.open_log,
                    path,
                    create=create,
                    read_only=read_only,
                    config=config,
                    durability=durability,
                    on_corruption=on_corruption,
                    shared=shared,
                    fs=fs,
                ),
                synchronous.Log.close,
            )
        except BaseException:
            home.end()
            raise
        return Log(home, log)

    return Opening(begin)


class Log:
    """One partition directory, for tasks of one event loop. Made by logcore.aio.open() and LogDir.partition().

    sync: the log without a loop, for what is not here: its methods may be called in threads, such as with
    asyncio.to_thread(log.sync.scrub). All methods here raise WrongLoopError outside the loop, and else what those of
    logcore.Log raise.
    """

    def __init__(self, home: Home, log: synchronous.Log) -> None:
        """Not for users."""
        self.sync = log
        self._home = home
        self._appending = Appending(home, log)
        self._following = Following(home, fs_of(log), [log])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<aio {self.sync!r}>"

    async def close(self) -> None:
        """Closes the log. Cancelled, it goes on in the background. Closing twice is fine."""
        closing = self._call(self.sync.close)
        try:
            await closing
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Of a log that its directory has closed."""
        self._following.wake()
        self._following.close()
        self._home.end()

    def _call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Coroutine[Any, Any, _T]:
        """In the thread, behind what was appended before."""
        self._home.check()
        self._appending.let_pass()
        return self._home.call(function, *args, **kwargs)

    # -- appending -----------------------------------------------------------------------------------------------

    async def append(
        self,
        value: Piece | None,
        *,
        key: Piece | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        durability: Level | None = None,
        expected_offset: int | None = None,
    ) -> Receipt:
        """Appends one record, together with those of other tasks; returns when it is as safe as the log's policy says.

        Records are stored in the order of the calls. Cancelled before its turn, it leaves no trace; after that the
        record is stored all the same.
        """
        self._home.check()
        if headers.__class__ is not tuple and isinstance(headers, Iterable):
            headers = tuple(headers)  # it is read again if another record of the batch is refused
        future: asyncio.Future[Receipt] = self._home.loop.create_future()
        self._appending.add(Appended((key, value, headers, timestamp_ms), durability, expected_offset, future))
        return await future

    async def append_many(
        self, records: Iterable[RecordInput], *, durability: Level | None = None, expected_offset: int | None = None
    ) -> Receipt:
        """See logcore.Log.append_many()."""
        if isinstance(records, (list, tuple)) or not isinstance(records, Iterable):
            rows = records
        else:
            rows = list(records)
        return await self._call(self.sync.append_many, rows, durability=durability, expected_offset=expected_offset)

    async def append_columns(
        self,
        *,
        keys: ColumnInput | None = None,
        values: ColumnInput | None = None,
        timestamps_ms: TimesInput | None = None,
        durability: Level | None = None,
        expected_offset: int | None = None,
    ) -> Receipt:
        """See logcore.Log.append_columns()."""
        return await self._call(
            self.sync.append_columns,
            keys=keys,
            values=values,
            timestamps_ms=timestamps_ms,
            durability=durability,
            expected_offset=expected_offset,
        )

    async def append_batch(self, data: Buffer, *, durability: Level | None = None) -> Receipt:
        """See logcore.Log.append_batch()."""
        return await self._call(self.sync.append_batch, data, durability=durability)

    async def flush(self) -> None:
        """Returns when all that was appended before the call is on disk."""
        await self._call(self.sync.flush)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(
        self,
        start: int,
        end: int | None = None,
        *,
        isolation: Isolation = "read_uncommitted",
        max_bytes: int | None = None,
    ) -> Lists[Record]:
        """The records in [start, end), for `async for`; see logcore.Log.read().

        Between pieces of some hundred records other tasks have their turn.
        """
        self._home.check()

        find = functools.partial(record_lists, self.sync, start, end, isolation=isolation, max_bytes=max_bytes)
        if isolation == "read_committed":  # it may walk the whole log for transactions
            return Pieces(self._home, None, find)
        return Pieces(self._home, find())

    async def get(self, offset: int) -> Record:
        """The record at offset, or the next one; see logcore.Log.get()."""
        self._home.check()
        return self.sync.get(offset)

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Lists[Record]:
        """Records from start on, by default the present end, and then new ones as they come, for `async for`.

        timeout: seconds without a new record after which the iteration ends. It also ends when the log is closed. All
        tails of a log share one listener or one inotify handle.
        """
        self._home.check()
        if start is None:
            offset = self.sync.high_watermark
        else:
            offset = start
        return Tail(self._home, self._following, followed([self.sync], [offset]), timeout, plain)

    async def offset_for_timestamp(self, timestamp_ms: Time) -> int | None:
        """See logcore.Log.offset_for_timestamp()."""
        return await self._call(self.sync.offset_for_timestamp, timestamp_ms)

    async def newest(self) -> tuple[int, int] | None:
        """See logcore.Log.newest()."""
        return await self._call(self.sync.newest)

    async def refresh(self) -> bool:
        """See logcore.Log.refresh()."""
        return await self._call(self.sync.refresh)

    # -- what is known -------------------------------------------------------------------------------------------

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

    # -- work in time, segments ------------------------------------------------------------------------------------

    async def tick(self, now_ms: Time | None = None) -> bool:
        """See logcore.Log.tick()."""
        return await self._call(self.sync.tick, now_ms)

    async def roll(self) -> None:
        """See logcore.Log.roll()."""
        await self._call(self.sync.roll)

    async def delete_records(self, before_offset: int) -> int:
        """See logcore.Log.delete_records()."""
        return await self._call(self.sync.delete_records, before_offset)

    async def truncate(self, offset: int) -> None:
        """See logcore.Log.truncate()."""
        await self._call(self.sync.truncate, offset)

    async def statistics(self) -> synchronous.LogStatistics:
        """See logcore.Log.statistics()."""
        return await self._call(self.sync.statistics)
