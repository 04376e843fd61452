"""A consumer in an event loop; see logcore.consumer, whose names these are.

Rules:
- What comes before a reading, such as a group's rebalance or a commit that is due, is a step in the thread of the
  consumer. Records are read in the loop, in pieces of about 1 MiB.
- A position moves only when records are returned, without an await in between: a task that is cancelled loses none.
- A step of a call that was cancelled is carried out, and the next call comes behind it. What is said meanwhile by
  seek() and the like takes effect behind it too.
- One task at a time reads. Listeners run in the loop, and may be coroutines.

What a poll does belongs to logcore.consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from logcore.aio.following import News, Watching
from logcore.aio.home import Home
from logcore.aio.opening import Opening
from logcore.callbacks import call
from logcore.consumer import consumer as synchronous
from logcore.consumer import values
from logcore.consumer.commits import OnCommit
from logcore.consumer.fetcher import MAX_COLUMN_BYTES, Columns, Fetcher, check_columns, columns_of
from logcore.consumer.membership import TopicPartition
from logcore.consumer.readings import Move, Reading
from logcore.consumer.values import (
    ConsumerMetrics,
    ConsumerRecords,
    ConsumerSettings,
    GroupMetadata,
    OffsetAndMetadata,
    intercepted,
)
from logcore.errors import ConsumerBusyError, ConsumerStateError, WakeupError
from logcore.format.columns import RecordColumns
from logcore.fs import FS
from logcore.kernels import TopicRecord
from logcore.log import Log
from logcore.logdir import LogDir, check_writable, fs_of

if TYPE_CHECKING:
    import pyarrow

_T = TypeVar("_T")
#: How long records are read before the consumer looks after its group again, as the iteration of a Consumer does.
_LOOK_SECONDS: Final = 0.1
#: What one reading decodes, about a millisecond of the loop; and how large records are thought to be at first.
_PIECE_BYTES: Final = 1 << 20
_RECORD_BYTES: Final = 65_536
#: Records that the iteration hands out before other tasks have their turn.
_AT_ONCE: Final = 128


class RebalanceListener:
    """Is told, in the loop, what a consumer gets and gives up. Override what is of interest.

    The methods may await commit() and other calls of the consumer, but not those that read, subscribe or close.
    """

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """These are new; positions may be set with seek()."""

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """These are to be given up, and may still be committed."""

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """These may be another's already; commits are refused."""
        await self.on_partitions_revoked(partitions)


class Listener(Protocol):
    """A RebalanceListener of logcore.aio or of logcore.consumer; its methods may be coroutines or not."""

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> Awaitable[None] | None: ...
    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> Awaitable[None] | None: ...
    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> Awaitable[None] | None: ...


class _InLoop(values.RebalanceListener):
    """Tells a listener in the loop; called in the thread, which carries out meanwhile what the listener asks for."""

    def __init__(self, home: Home, listener: Listener) -> None:
        self._home = home
        self._listener = listener

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self._home.ask(functools.partial(self._listener.on_partitions_assigned, partitions))

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._home.ask(functools.partial(self._listener.on_partitions_revoked, partitions))

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        self._home.ask(functools.partial(self._listener.on_partitions_lost, partitions))


class _Stepped(synchronous.Consumer):
    """A consumer whose calls a loop keeps apart; what of it the loop uses has public names here."""

    def begin(self, news: News) -> None:
        self._news: News | None = news
        if self._is_shared:
            self._fetcher.follow = functools.partial(_follow_elsewhere, threading.get_ident())

    @contextlib.contextmanager
    def _alone(self, *, is_whole: bool = False) -> Generator[None, None, None]:
        yield

    def _wake(self) -> None:
        super()._wake()
        news = getattr(self, "_news", None)
        if news is not None:
            news.tell()

    @property
    def fs(self) -> FS:
        return self._fs

    @property
    def settings(self) -> ConsumerSettings:
        return self._settings

    @property
    def fetcher(self) -> Fetcher:
        return self._fetcher

    @property
    def is_shared(self) -> bool:
        """Whether other processes write the directory too."""
        return self._is_shared

    def check_open(self) -> None:
        self._check_open()

    def checked_most(self, timeout_ms: int, max_records: int | None) -> int:
        return self._checked_most(timeout_ms, max_records)

    def reading(self, partition: tuple[str, int]) -> Reading:
        """Raises ConsumerStateError for a partition that is not read."""
        return self._reading(partition)

    def check_seek(self, partition: tuple[str, int], offset: int) -> None:
        """Raises what seek() raises."""
        self._sought(partition, offset)

    def take_positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The offsets that commit() stores by default."""
        return self._take_positions()

    def take_wakeup(self) -> bool:
        return self._take_wakeup()

    def end(self, *, is_done: bool, timeout: float | None) -> None:
        """See close(); is_done: what was handed out last is finished."""
        self._close(is_done=is_done, timeout=timeout)

    def add_commit(self, offsets: synchronous.Offsets | None, callback: OnCommit | None) -> bool:
        """As commit_async(), but that it never waits. Whether so many wait that a step is due."""
        return self._commits.add(self._chosen(offsets), callback)

    def step(self) -> None:
        """In the thread: everything that comes before a reading, also what only the first look has to wait for."""
        self.look_after()
        self.has_records()


class Consumer:
    """Made by LogDir.consumer(). An `async with` block closes it; an asynchronous iterator of records.

    All methods are called in the loop that it was made in. Else they raise WrongLoopError. One task at a time reads;
    others get ConsumerStateError meanwhile.
    """

    def __init__(self, home: Home, consumer: _Stepped) -> None:
        """Not for users."""
        self._home = home
        self._loop = home.loop
        self._sync = consumer
        self._news = News(home)
        self._watching = Watching(home, consumer.fs, self._news)
        consumer.begin(self._news)
        self._is_reading = False
        self._steps = 0  # in the thread, or on their way there
        self._later: list[Callable[[], None]] = []
        self._look_at = 0.0  # by the clock of the loop
        self._records: Iterator[TopicRecord] | None = None  # of the iteration
        self._until_turn = 0
        self._record_bytes = _RECORD_BYTES

    async def __aenter__(self) -> Self:
        self._home.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(is_done=kind is None)

    def __repr__(self) -> str:
        return f"<aio {self._sync!r}>"

    async def close(self, timeout: float | None = None) -> None:
        """Says that all that was handed out is finished, commits it if auto-commit is on, and leaves the group.

        timeout: as for commit(). Cancelled, it goes on in the background. Closing twice is fine.
        """
        await self._close(is_done=True, timeout=timeout)

    async def _close(self, *, is_done: bool, timeout: float | None = None) -> None:
        self._refuse_listener("close()")
        self._records = None
        closing = self._begin_step(functools.partial(self._sync.end, is_done=is_done, timeout=timeout))
        self._home.end()
        try:
            await closing
        finally:
            self._look_at = 0.0
            self._watching.close()
            self._news.wake()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _begin_step(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """A call that changes what the consumer is about, in the thread."""

        def run() -> _T:
            try:
                return function()
            finally:
                self._home.tell(self._end_step)

        step = self._home.begin(run)
        self._steps += 1
        return step

    def _end_step(self) -> None:
        self._steps -= 1
        while self._later and not self._steps:
            function = self._later.pop(0)
            with contextlib.suppress(ConsumerStateError):  # a partition that this consumer has no more
                function()

    def _say(self, function: Callable[[], None]) -> None:
        """Something that takes effect at once, or behind the step of a call that was cancelled."""
        if self._steps and not self._home.is_asking:
            self._later.append(function)
        else:
            function()
        self._look_at = 0.0
        self._news.wake()

    @contextlib.contextmanager
    def _alone(self) -> Generator[None, None, None]:
        """While one task reads."""
        self._refuse_listener("reading")
        if self._is_reading:
            raise ConsumerBusyError("a consumer is read by one task at a time, and another reads this one")
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False

    def _refuse_listener(self, what: str) -> None:
        self._home.check()
        if self._home.is_asking:
            raise ConsumerStateError(f"a listener may seek and commit; {what} has to wait until it has returned")

    # -- what is read --------------------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Iterable[str] = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Reads these topics, or those that match a pattern; see logcore.consumer.Consumer.subscribe()."""
        self._refuse_listener("subscribe()")
        told = None
        if listener is not None:
            told = _InLoop(self._home, listener)
        self._say(functools.partial(self._sync.subscribe, topics, pattern=pattern, listener=told))

    async def unsubscribe(self) -> None:
        """Gives up all partitions and leaves the group."""
        self._refuse_listener("unsubscribe()")
        await self._begin_step(self._sync.unsubscribe)

    async def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Reads these partitions, whatever a group does. Raises TopicNotFoundError."""
        self._refuse_listener("assign()")
        await self._begin_step(functools.partial(self._sync.assign, list(partitions)))

    def subscription(self) -> frozenset[str]:
        """The topics that are subscribed to; with a pattern, those that match now."""
        self._home.check()
        return self._sync.subscription()

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that this consumer reads now."""
        self._home.check()
        return self._sync.assignment()

    def pause(self, *partitions: tuple[str, int]) -> None:
        """Readings pass them over until resume()."""
        self._check(partitions)
        self._say(functools.partial(self._sync.pause, *partitions))

    def resume(self, *partitions: tuple[str, int]) -> None:
        self._check(partitions)
        self._say(functools.partial(self._sync.resume, *partitions))

    def paused(self) -> frozenset[TopicPartition]:
        self._home.check()
        return self._sync.paused()

    def _check(self, partitions: Iterable[tuple[str, int]]) -> None:
        self._home.check()
        for one in partitions:
            self._sync.reading(one)

    # -- positions -----------------------------------------------------------------------------------------------

    def position(self, partition: tuple[str, int]) -> int:
        """The next offset that is handed out. Raises NoOffsetError."""
        self._home.check()
        found = self._sync.reading(partition).position
        if found is None:
            return self._sync.position(partition)
        return found

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Goes on from an offset. It is looked for when a reading comes to it."""
        self._home.check()
        self._sync.check_seek(partition, offset)
        self._say(functools.partial(self._sync.seek, partition, offset))

    async def seek_to_beginning(self, *partitions: tuple[str, int]) -> None:
        """Of all partitions that are read, when none is named."""
        await self._begin_step(functools.partial(self._sync.seek_to_beginning, *partitions))

    async def seek_to_end(self, *partitions: tuple[str, int]) -> None:
        await self._begin_step(functools.partial(self._sync.seek_to_end, *partitions))

    async def lag(self, partition: tuple[str, int] | None = None) -> int:
        """How many offsets lie between the position and the end, of one partition or of all. Raises NoOffsetError."""
        return await self._begin_step(functools.partial(self._sync.lag, partition))

    async def beginning_offsets(self, partitions: Iterable[tuple[str, int]]) -> dict[TopicPartition, int]:
        return await self._home.call(self._sync.beginning_offsets, list(partitions))

    async def end_offsets(self, partitions: Iterable[tuple[str, int]]) -> dict[TopicPartition, int]:
        """Up to where this consumer may read, by its isolation level."""
        return await self._home.call(self._sync.end_offsets, list(partitions))

    async def offsets_for_times(self, times_ms: Mapping[tuple[str, int], int]) -> dict[TopicPartition, int | None]:
        """The first offset of a record that is not older; None where all are older."""
        return await self._home.call(self._sync.offsets_for_times, dict(times_ms))

    def topics(self) -> list[str]:
        """The topics of the directory."""
        self._home.check()
        return self._sync.topics()

    def partitions_for(self, topic: str) -> tuple[int, ...]:
        """Numbers of a topic's partitions. Raises TopicNotFoundError."""
        self._home.check()
        return self._sync.partitions_for(topic)

    def metrics(self) -> ConsumerMetrics:
        """Counters since it was made."""
        self._home.check()
        return self._sync.metrics()

    # -- commits -------------------------------------------------------------------------------------------------

    async def commit(self, offsets: synchronous.Offsets | None = None, timeout: float | None = None) -> None:
        """Stores how far the group came: the positions at this call, or these offsets. On disk when it returns, with
        those of commit_async() before it.

        Cancelled, it is carried out or not; the next commit comes behind it. Errors as for
        logcore.consumer.Consumer.commit().
        """
        self._home.check()
        self._sync.check_open()
        chosen: dict[tuple[str, int], int | OffsetAndMetadata] = {}
        if offsets is None:
            chosen = {one: each for one, each in self._sync.take_positions().items()}  # noqa: C416  # for the types
        else:
            chosen.update(offsets)
        await self._home.call(self._sync.commit, chosen, timeout)

    def commit_async(self, offsets: synchronous.Offsets | None = None, callback: OnCommit | None = None) -> None:
        """As commit(), without waiting: what waits is stored with one sync by the next step of the consumer, such as a
        reading's, commit() or close(). callback(error, offsets): called in the loop then.

        Raises ConsumerStateError and InvalidConfigError.
        """
        self._home.check()
        self._sync.check_open()
        told: OnCommit | None = None
        if callback is not None:
            told = functools.partial(self._tell_committed, callback)
        if self._sync.add_commit(offsets, told):
            self._look_at = 0.0
            self._news.wake()

    def _tell_committed(
        self, callback: OnCommit, error: Exception | None, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> None:
        """In the thread, or in the loop."""
        self._home.tell(functools.partial(call, callback, error, offsets))

    async def committed(self, partitions: Iterable[tuple[str, int]]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed, by whomever; None where nothing was."""
        return await self._home.call(self._sync.committed, list(partitions))

    def group_metadata(self) -> GroupMetadata:
        """Which member of its group this consumer is now, for TransactionalProducer.send_offsets_to_transaction()."""
        self._home.check()
        return self._sync.group_metadata()

    # -- reading -------------------------------------------------------------------------------------------------

    async def getmany(self, timeout_ms: int = 0, max_records: int | None = None) -> ConsumerRecords:
        """The next records of the share, at most max_records (max_poll_records) and about 1 MiB; waits up to
        timeout_ms for the first of them.

        The list of the call before is finished with this call. Errors as for logcore.consumer.Consumer.poll().
        """
        most = self._sync.checked_most(timeout_ms, max_records)
        given = ConsumerRecords({})
        moves: list[Move] = []
        with self._alone():
            self._records = None
            self._sync.fetcher.finish()
            deadline = self._loop.time() + timeout_ms / 1000
            while not moves and await self._prepare(deadline):
                found, moves = self._sync.fetcher.fetch(max(1, min(most, _PIECE_BYTES // self._record_bytes)))
                if found:
                    self._measure(found)
                    given = intercepted(self._sync.settings.interceptors, ConsumerRecords(found))
        return self._sync.fetcher.hand_out(moves, given)

    poll = getmany

    def _measure(self, found: Mapping[TopicPartition, list[TopicRecord]]) -> None:
        """Takes a record of each partition for the size of the others."""
        sizes = [_size_bytes(records[-1]) for records in found.values()]
        self._record_bytes = 64 + sum(sizes) // len(sizes)

    async def poll_columns(
        self, timeout_ms: int = 0, max_bytes: int = MAX_COLUMN_BYTES
    ) -> dict[TopicPartition, list[RecordColumns]]:
        """The same as columns, about max_bytes of what there is in the partitions now. Decoded in the thread."""
        return await self._poll_columns(timeout_ms, max_bytes, dict)

    async def poll_arrow(self, timeout_ms: int = 0, max_bytes: int = MAX_COLUMN_BYTES) -> pyarrow.Table:
        """The same as one Arrow table, made in the thread. See logcore.consumer.Consumer.poll_arrow()."""
        from logcore.consumer.tables import table_of

        return await self._poll_columns(timeout_ms, max_bytes, table_of)

    async def _poll_columns(
        self, timeout_ms: int, max_bytes: int, make: Callable[[dict[TopicPartition, list[RecordColumns]]], _T]
    ) -> _T:
        """The columns as make() gives them in the thread. It is called with none first, before anything is read."""

        def find() -> tuple[list[Columns], _T]:
            found = self._sync.fetcher.find_columns(max_bytes)
            return found, make(columns_of(found))

        check_columns(timeout_ms, max_bytes)
        given = make({})
        moves: list[Move] = []
        with self._alone():
            self._records = None
            self._sync.fetcher.finish()
            deadline = self._loop.time() + timeout_ms / 1000
            while not moves and await self._prepare(deadline):
                found, made = await self._begin_step(find)
                moves = self._sync.fetcher.moves_behind(found)
                if moves:
                    given = made
        return self._sync.fetcher.hand_out(moves, given)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicRecord:
        """Records as they come. wakeup() ends it, and consumer_timeout_ms without a record. A record is finished when
        the loop asks for the next.
        """
        self._until_turn -= 1
        if self._until_turn > 0 and not self._steps and not self._is_reading:
            record = self._next()
            if record is not None:
                return record
        with self._alone():
            while True:
                self._until_turn = _AT_ONCE
                await asyncio.sleep(0)
                record = None
                if not self._steps:
                    record = self._next()
                if record is not None:
                    return record
                self._sync.fetcher.finish()
                waits_ms = self._sync.settings.consumer_timeout_ms
                deadline = None
                if waits_ms is not None:
                    deadline = self._loop.time() + waits_ms / 1000
                try:
                    is_more = await self._prepare(deadline)
                except WakeupError:
                    is_more = False
                if not is_more:
                    raise StopAsyncIteration
                chosen = self._sync.fetcher.opened()
                if chosen is not None:
                    self._records = self._sync.fetcher.one_by_one(chosen)

    def _next(self) -> TopicRecord | None:
        if self._records is not None:
            for record in self._records:
                return record
            self._records = None
        return None

    async def _prepare(self, deadline: float | None) -> bool:
        """Whether there are records now; as the method of that name of logcore's Consumer, in steps."""
        await asyncio.sleep(0)  # while there are always records, the loop has its turn here
        while True:
            if self._is_look_due or not self._sync.has_records():
                await self._begin_step(self._sync.step)
                self._look_at = self._loop.time() + _LOOK_SECONDS
                if self._steps:  # that of another task came behind it
                    continue
            if self._sync.take_wakeup():
                raise WakeupError("wakeup() was called")
            if self._sync.has_records():
                return True
            left = self._sync.look_again_seconds()
            if deadline is not None:
                left = min(left, deadline - self._loop.time())
            if left <= 0:
                return False
            is_new = self._watching.watch(self._sync.watched_paths())
            if not is_new and not self._sync.has_moved:
                await self._news.wait(left)

    @property
    def _is_look_due(self) -> bool:
        return bool(self._steps) or self._sync.is_shared or self._loop.time() >= self._look_at

    def wakeup(self) -> None:
        """May be called in any thread: the getmany() that waits, or the next one, raises WakeupError; an iteration
        ends.
        """
        self._sync.wakeup()
        self._news.tell()


def _follow_elsewhere(loop_thread: int, log: Log) -> None:
    """Looks at what other processes have appended, which waits for the disk: never in the thread of the loop."""
    if threading.get_ident() != loop_thread:
        log.refresh()


def _size_bytes(record: TopicRecord) -> int:
    sizes = [len(piece) for piece in (record.key, record.value) if isinstance(piece, (bytes, str))]
    return sum(sizes)


def opening(directory: LogDir, settings: ConsumerSettings) -> Opening[Consumer]:
    """A consumer of a directory that is open, for the task that awaits it."""

    def make() -> _Stepped:
        groups: Any = None
        registry = None
        if settings.group_id is not None:
            check_writable(directory)
            groups = directory.coordinators.groups(directory)
        if settings.uses_registry:
            registry = directory.coordinators.registry(directory)
        return _Stepped(fs_of(directory), directory, groups, settings, registry)

    async def begin() -> Consumer:
        home = Home("the consumer")
        try:
            made = await home.obtain(make, synchronous.Consumer.close)
        except BaseException:
            home.end()
            raise
        return Consumer(home, made)

    return Opening(begin)
