"""A consumer for an event loop. Its names are those of logcore.consumer.

Rules:
- The work before a read, such as a rebalance of the group or a due commit, is a step in
  the thread of the consumer. Records are read in the loop, in chunks of about 1 MiB.
- A position moves only when records are returned, without an await in between, so a
  cancelled task loses no records.
- A step of a cancelled call is completed before the next call begins. seek() and similar
  calls made in between take effect after that step.
- One task at a time reads. Listeners run in the loop, and may be coroutines.

logcore.consumer implements polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, Self, TypeVar

from logcore.aio.awaitable_open import Opening, open_in_thread
from logcore.aio.ending import waits_of
from logcore.aio.loop_thread import LoopThread, in_loop, in_thread
from logcore.aio.notify import DirectoryWatch, Wakeups
from logcore.callbacks import call
from logcore.consumer import consumer as synchronous
from logcore.consumer import settings as consumer_settings
from logcore.consumer.commits import OnCommit
from logcore.consumer.fetcher import (
    MAX_COLUMN_BYTES,
    Columns,
    Fetcher,
    check_at_least_1,
    columns_of,
)
from logcore.consumer.positions import Move, PartitionPosition
from logcore.consumer.settings import (
    ConsumerRecords,
    ConsumerSettings,
    OffsetAndMetadata,
    intercepted,
)
from logcore.consumer.topic_partition import TopicPartition
from logcore.deadlines import milliseconds
from logcore.errors import ConsumerBusyError, ConsumerStateError, WakeupError
from logcore.format.columns import RecordColumns
from logcore.fs import FS
from logcore.kernels import TopicRecord
from logcore.log import Log
from logcore.logdir import LogDir
from logcore.metadata.checkpoint import PartitionKey

if TYPE_CHECKING:
    import pyarrow

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: Maximum time for which records are read before the next step, as in the iteration of a
#: synchronous Consumer.
_CHECK_SECONDS: Final = 0.1
#: Maximum size that one read decodes, which takes about a millisecond. The second number
#: is the initial estimate of a record's size.
_CHUNK_BYTES: Final = 1 << 20
_RECORD_BYTES: Final = 65_536
#: Number of records that the iteration returns before it yields to other tasks.
_RECORDS_PER_YIELD: Final = 128


class RebalanceListener:
    """Receives, in the loop, the changes of a consumer's partitions.

    Subclasses override some of the methods. The methods may await commit() and other
    calls of the consumer, but no calls that read, subscribe or close.
    """

    async def on_partitions_assigned(
        self, partitions: frozenset[TopicPartition]
    ) -> None:
        """Handle new partitions. Their positions may be set with seek()."""

    async def on_partitions_revoked(
        self, partitions: frozenset[TopicPartition]
    ) -> None:
        """Handle partitions that are about to be revoked.

        They may still be committed.
        """

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Handle partitions that another consumer may already have.

        Commits are refused.
        """
        await self.on_partitions_revoked(partitions)


class Listener(Protocol):
    """A RebalanceListener of logcore.aio or of logcore.consumer.

    Its methods may be coroutines or plain functions.
    """

    def on_partitions_assigned(
        self, partitions: frozenset[TopicPartition]
    ) -> Awaitable[None] | None: ...
    def on_partitions_revoked(
        self, partitions: frozenset[TopicPartition]
    ) -> Awaitable[None] | None: ...
    def on_partitions_lost(
        self, partitions: frozenset[TopicPartition]
    ) -> Awaitable[None] | None: ...


class _LoopListener(consumer_settings.RebalanceListener):
    """Calls a listener in the loop.

    The thread of the consumer calls this object. Until the listener returns, the thread
    executes the calls that the listener makes.
    """

    def __init__(self, loop_thread: LoopThread, listener: Listener) -> None:
        self._loop_thread = loop_thread
        self._listener = listener

    def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self._loop_thread.call_in_loop(
            functools.partial(self._listener.on_partitions_assigned, partitions)
        )

    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._loop_thread.call_in_loop(
            functools.partial(self._listener.on_partitions_revoked, partitions)
        )

    def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        self._loop_thread.call_in_loop(
            functools.partial(self._listener.on_partitions_lost, partitions)
        )


class _StepwiseConsumer(synchronous.Consumer):
    """A consumer that does not lock its calls, with public methods for the loop."""

    def begin(self, wakeups: Wakeups) -> None:
        self._wakeups: Wakeups | None = wakeups
        #: How long to wait after the last step if all changes and deaths are reported.
        self._seconds_without_events = 0.0
        if self._is_shared:
            self._fetcher.follow = functools.partial(
                _refresh_in_thread, threading.get_ident()
            )

    @contextlib.contextmanager
    def _exclusively(
        self, *, refuse_in_listener: bool = False
    ) -> Generator[None, None, None]:
        yield

    def _wake(self) -> None:
        super()._wake()
        wakeups = getattr(self, "_wakeups", None)
        if wakeups is not None:
            wakeups.notify()

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
        """Whether other processes may write to the directory too."""
        return self._is_shared

    def check_open(self) -> None:
        self._check_open()

    def checked_max_records(self, max_records: int | None) -> int:
        return self._checked_max_records(max_records)

    def read_position(self, partition: tuple[str, int]) -> PartitionPosition:
        """Return the read position of a partition.

        Raises:
            ConsumerStateError: The partition is not read.
        """
        return self._read_position(partition)

    def check_seek(self, partition: tuple[str, int], offset: int) -> None:
        """Check the arguments of seek(), with the errors of seek()."""
        self._position_to_seek(partition, offset)

    def offsets_to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets that commit() stores by default."""
        return self._offsets_to_commit()

    def consume_wakeup(self) -> bool:
        return self._consume_wakeup()

    def end(self, *, is_done: bool, timeout: float | None) -> None:
        """Close the consumer; see close().

        `is_done` is whether the records returned last are finished.
        """
        self._close(is_done=is_done, timeout=timeout)

    def add_commit(
        self,
        offsets: synchronous.Offsets[PartitionKey] | None,
        callback: OnCommit | None,
    ) -> bool:
        """Add a commit like commit_async(), without waiting.

        Return whether the queue is full, so that a step is due.
        """
        return self._commits.add(self._checked_offsets(offsets), callback)

    def step(self) -> None:
        """Run all work before a read, in the thread. It may wait for the disk."""
        self.prepare_to_read()
        if not self.has_records() and self._is_shared:
            # In the thread, because another thread may hold the lock of the groups
            # while it waits for the disk.
            self._seconds_without_events = self.max_wait_seconds(reports_deaths=True)

    def seconds_to_next_step(self, *, reports_deaths: bool) -> float:
        """Return how long to wait for changes until step() must run anyway."""
        if self._is_shared and reports_deaths:
            return self._seconds_without_events
        return self.max_wait_seconds()

    def watched_sessions(self) -> list[str]:
        """Return the directories whose watch reports that another member has died."""
        return self._assignment.watched_sessions()


class Consumer:
    """A consumer made by LogDir.consumer(), and an asynchronous iterator of records.

    An `async with` block closes it. All methods must be called in the loop in which it
    was made; otherwise they raise WrongLoopError. One task at a time reads; a second
    one gets ConsumerStateError.
    """

    def __init__(self, loop_thread: LoopThread, consumer: _StepwiseConsumer) -> None:
        """Create a consumer. Users call LogDir.consumer()."""
        self._loop_thread = loop_thread
        self._loop = loop_thread.loop
        self._sync = consumer
        self._wakeups = Wakeups(loop_thread)
        self._directory_watch = DirectoryWatch(loop_thread, consumer.fs, self._wakeups)
        consumer.begin(self._wakeups)
        #: Whether a change was reported since the latest step began.
        self._has_changed = False
        self._wakeups.on_wake = self._record_change
        waits_of(loop_thread.loop).add(self)
        self._is_reading = False
        self._steps = 0  # running in the thread or queued for it
        self._deferred_calls: list[Callable[[], None]] = []
        self._next_step_s = 0.0  # time of the next step, by the clock of the loop
        self._records: Iterator[TopicRecord] | None = None  # of the iteration
        self._until_yield = 0
        self._record_bytes = _RECORD_BYTES

    async def __aenter__(self) -> Self:
        self._loop_thread.check()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._close(is_done=kind is None)

    def __repr__(self) -> str:
        return f"<aio {self._sync!r}>"

    async def close(self, timeout: float | None = None) -> None:
        """Mark all returned records as finished, auto-commit, and leave the group.

        `timeout` has the meaning of commit(). If the call is cancelled, closing continues
        in the background. Closing twice is allowed.
        """
        await self._close(is_done=True, timeout=timeout)

    async def _close(self, *, is_done: bool, timeout: float | None = None) -> None:
        self._refuse_listener("close()")
        self._records = None
        closing = self._begin_step(
            functools.partial(self._sync.end, is_done=is_done, timeout=timeout)
        )
        self._loop_thread.end()
        try:
            await closing
        finally:
            self._next_step_s = 0.0
            self._directory_watch.close()
            self._wakeups.wake()

    # -- steps -------------------------------------------------------------------------

    def _begin_step(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Start a call in the thread that changes the state of the consumer."""

        def run() -> _T:
            try:
                return function()
            finally:
                self._loop_thread.post_to_loop(self._end_step)

        step = self._loop_thread.begin(run)
        self._steps += 1
        return step

    async def _call(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        return await self._begin_step(functools.partial(function, *args, **kwargs))

    def _end_step(self) -> None:
        self._steps -= 1
        while self._deferred_calls and not self._steps:
            function = self._deferred_calls.pop(0)
            with contextlib.suppress(ConsumerStateError):  # the partition was revoked
                function()

    def _apply_change(self, function: Callable[[], None]) -> None:
        """Apply a change at once, or after the step of a call that was cancelled."""
        if self._steps and not self._loop_thread.is_answering:
            self._deferred_calls.append(function)
        else:
            function()
        self._next_step_s = 0.0
        self._wakeups.wake()

    @contextlib.contextmanager
    def _exclusively(self) -> Generator[None, None, None]:
        """Allow one task at a time to read."""
        self._refuse_listener("reading")
        if self._is_reading:
            raise ConsumerBusyError(
                "a consumer is read by one task at a time, and another reads this one"
            )
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False

    def _refuse_listener(self, description: str) -> None:
        self._loop_thread.check()
        if self._loop_thread.is_answering:
            raise ConsumerStateError(
                f"a listener may seek and commit; {description} must wait until it has returned"
            )

    # -- subscriptions -----------------------------------------------------------------

    def subscribe(
        self,
        topics: Iterable[str] = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Subscribe to topics, by name or pattern; see Consumer.subscribe()."""
        self._refuse_listener("subscribe()")
        listener_in_thread = None
        if listener is not None:
            listener_in_thread = _LoopListener(self._loop_thread, listener)
        self._apply_change(
            functools.partial(
                self._sync.subscribe,
                topics,
                pattern=pattern,
                listener=listener_in_thread,
            )
        )

    async def unsubscribe(self) -> None:
        """Give up all partitions and leave the group."""
        self._refuse_listener("unsubscribe()")
        await self._begin_step(self._sync.unsubscribe)

    async def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read these partitions, independently of a group.

        Raises:
            TopicNotFoundError: a partition does not exist.
        """
        self._refuse_listener("assign()")
        await self._begin_step(functools.partial(self._sync.assign, list(partitions)))

    subscription = in_loop(synchronous.Consumer.subscription)
    assignment = in_loop(synchronous.Consumer.assignment)
    paused = in_loop(synchronous.Consumer.paused)

    def pause(self, *partitions: tuple[str, int]) -> None:
        """Exclude partitions from reads until resume()."""
        self._check(partitions)
        self._apply_change(functools.partial(self._sync.pause, *partitions))

    def resume(self, *partitions: tuple[str, int]) -> None:
        self._check(partitions)
        self._apply_change(functools.partial(self._sync.resume, *partitions))

    def _check(self, partitions: Iterable[tuple[str, int]]) -> None:
        self._loop_thread.check()
        for partition in partitions:
            self._sync.read_position(partition)

    # -- positions ---------------------------------------------------------------------

    def position(self, partition: tuple[str, int]) -> int:
        """Return the offset of the next record that a read returns.

        Raises:
            NoOffsetError: an open transaction may still commit an offset.
        """
        self._loop_thread.check()
        found = self._sync.read_position(partition).position
        if found is None:
            return self._sync.position(partition)
        return found

    def seek(self, partition: tuple[str, int], offset: int) -> None:
        """Set the position to an offset. The next read of the partition checks it."""
        self._loop_thread.check()
        self._sync.check_seek(partition, offset)
        self._apply_change(functools.partial(self._sync.seek, partition, offset))

    seek_to_beginning = in_thread(synchronous.Consumer.seek_to_beginning)
    seek_to_end = in_thread(synchronous.Consumer.seek_to_end)
    lag = in_thread(synchronous.Consumer.lag)

    async def beginning_offsets(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, int]:
        return await self._loop_thread.call(
            self._sync.beginning_offsets, list(partitions)
        )

    async def end_offsets(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, int]:
        """Return the end offset for this consumer, by its isolation level."""
        return await self._loop_thread.call(self._sync.end_offsets, list(partitions))

    async def offsets_for_times(
        self, times_ms: Mapping[PartitionKey, int]
    ) -> dict[TopicPartition, int | None]:
        """Return the offset of the first record at or after each time, or None."""
        return await self._loop_thread.call(
            self._sync.offsets_for_times, dict(times_ms)
        )

    topics = in_loop(synchronous.Consumer.topics)
    partitions_for = in_loop(synchronous.Consumer.partitions_for)
    metrics = in_loop(synchronous.Consumer.metrics)

    # -- commits -----------------------------------------------------------------------

    async def commit(
        self,
        offsets: synchronous.Offsets[PartitionKey] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Commit the positions at this call, or the given offsets.

        The offsets are durable when the call returns, including the offsets of earlier
        commit_async() calls. If the call is cancelled, the commit may or may not happen.
        The errors are those of logcore.consumer.Consumer.commit().
        """
        self._loop_thread.check()
        self._sync.check_open()
        chosen: dict[tuple[str, int], int | OffsetAndMetadata] = {}
        if offsets is None:
            for partition, each in self._sync.offsets_to_commit().items():
                chosen[partition] = each
        else:
            for key, given in offsets.items():
                chosen[key] = given
        await self._loop_thread.call(self._sync.commit, chosen, timeout)

    def commit_async(
        self,
        offsets: synchronous.Offsets[PartitionKey] | None = None,
        callback: OnCommit | None = None,
    ) -> None:
        """Queue a commit without waiting.

        The next step of the consumer stores all queued commits with one sync. Reads,
        commit() and close() make such steps. `callback(error, offsets)` is then called
        in the loop.

        Raises:
            ConsumerStateError: The consumer is closed or has no group.
            InvalidConfigError: An offset is invalid.
        """
        self._loop_thread.check()
        self._sync.check_open()
        callback_in_thread: OnCommit | None = None
        if callback is not None:
            callback_in_thread = functools.partial(self._report_commit, callback)
        if self._sync.add_commit(offsets, callback_in_thread):
            self._next_step_s = 0.0
            self._wakeups.wake()

    def _report_commit(
        self,
        callback: OnCommit,
        error: Exception | None,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> None:
        """Pass the result of a commit to the callback.

        This runs in the thread or in the loop.
        """
        self._loop_thread.post_to_loop(
            functools.partial(call, callback, error, offsets)
        )

    async def committed(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offsets of the group, None for a partition without one."""
        return await self._loop_thread.call(self._sync.committed, list(partitions))

    group_metadata = in_loop(synchronous.Consumer.group_metadata)

    # -- reading -----------------------------------------------------------------------

    async def getmany(
        self, timeout: float = 0, max_records: int | None = None
    ) -> ConsumerRecords:
        """Return the next records of the assigned partitions.

        At most `max_records` (default max_poll_records) and about 1 MiB are returned.
        The call waits up to `timeout` seconds for the first record. It marks the
        records of the previous call as finished. Errors are those of
        logcore.consumer.Consumer.poll().
        """
        most = self._sync.checked_max_records(max_records)
        timeout_ms = milliseconds(timeout)
        given = ConsumerRecords({})
        moves: list[Move] = []
        with self._exclusively():
            self._records = None
            self._sync.fetcher.finish()
            deadline = self._loop.time() + timeout_ms / 1000
            while not moves and await self._prepare(deadline):
                found, moves = self._sync.fetcher.fetch(
                    max(1, min(most, _CHUNK_BYTES // self._record_bytes))
                )
                if found:
                    self._measure(found)
                    given = intercepted(
                        self._sync.settings.interceptors, ConsumerRecords(found)
                    )
        return self._sync.fetcher.deliver(moves, given)

    poll = getmany

    def _measure(self, found: Mapping[TopicPartition, list[TopicRecord]]) -> None:
        """Update the estimated record size from one record of each partition."""
        sizes = [_size_bytes(records[-1]) for records in found.values()]
        self._record_bytes = 64 + sum(sizes) // len(sizes)

    async def poll_columns(
        self, timeout: float = 0, max_bytes: int = MAX_COLUMN_BYTES
    ) -> dict[TopicPartition, list[RecordColumns]]:
        """Return records as columns, decoded in the thread.

        The result has about `max_bytes` of the records that are in the partitions now.
        """
        return await self._poll_columns(timeout, max_bytes, dict)

    async def poll_arrow(
        self, timeout: float = 0, max_bytes: int = MAX_COLUMN_BYTES
    ) -> pyarrow.Table:
        """Return records as one Arrow table, made in the thread.

        See logcore.consumer.Consumer.poll_arrow().
        """
        from logcore.consumer.arrow import table_of

        return await self._poll_columns(timeout, max_bytes, table_of)

    async def _poll_columns(
        self,
        timeout: float,
        max_bytes: int,
        make: Callable[[dict[TopicPartition, list[RecordColumns]]], _T],
    ) -> _T:
        """Return make(columns), which runs in the thread.

        make() is also called without columns before any record is read, so that a
        missing package is reported before positions move.
        """

        def find() -> tuple[list[Columns], _T]:
            found = self._sync.fetcher.find_columns(max_bytes)
            return found, make(columns_of(found))

        check_at_least_1("max_bytes", max_bytes)
        timeout_ms = milliseconds(timeout)
        given = make({})
        moves: list[Move] = []
        with self._exclusively():
            self._records = None
            self._sync.fetcher.finish()
            deadline = self._loop.time() + timeout_ms / 1000
            while not moves and await self._prepare(deadline):
                found, result = await self._begin_step(find)
                moves = self._sync.fetcher.moves_for(found)
                if moves:
                    given = result
        return self._sync.fetcher.deliver(moves, given)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicRecord:
        """Yield records as they arrive.

        The iteration ends after wakeup(), and after consumer_timeout_ms without a
        record. A record is finished when the loop requests the next one.
        """
        self._until_yield -= 1
        if self._until_yield > 0 and not self._steps and not self._is_reading:
            record = self._next()
            if record is not None:
                return record
        with self._exclusively():
            while True:
                self._until_yield = _RECORDS_PER_YIELD
                await asyncio.sleep(0)
                record = None
                if not self._steps:
                    record = self._next()
                if record is not None:
                    return record
                self._sync.fetcher.finish()
                timeout_ms = self._sync.settings.consumer_timeout_ms
                deadline = None
                if timeout_ms is not None:
                    deadline = self._loop.time() + timeout_ms / 1000
                try:
                    is_more = await self._prepare(deadline)
                except WakeupError:
                    is_more = False
                if not is_more:
                    raise StopAsyncIteration
                chosen = self._sync.fetcher.open_next_partition()
                if chosen is not None:
                    runs = self._sync.fetcher.runs(chosen)
                    self._records = chain.from_iterable(runs)

    def _next(self) -> TopicRecord | None:
        if self._records is not None:
            for record in self._records:
                return record
            self._records = None
        return None

    async def _prepare(self, deadline: float | None) -> bool:
        """Return whether there are records now.

        This runs the work before a read in steps.
        """
        await asyncio.sleep(0)  # yields to the loop even if there are always records
        while True:
            if self._is_check_due or not self._sync.has_records():
                self._has_changed = False
                await self._begin_step(self._sync.step)
                self._next_step_s = self._loop.time() + _CHECK_SECONDS
                if self._steps:  # a step of another task was queued after this one
                    continue
            if self._sync.consume_wakeup():
                raise WakeupError("wakeup() was called")
            if self._sync.has_records():
                return True
            if deadline is not None and self._loop.time() >= deadline:
                return False
            is_new = self._directory_watch.watch(
                self._sync.watched_paths(), self._sync.watched_sessions()
            )
            if is_new or self._sync.has_changed or self._has_changed:
                continue
            left = self._sync.seconds_to_next_step(
                reports_deaths=self._directory_watch.reports_deaths
            )
            if deadline is not None:
                left = min(left, deadline - self._loop.time())
            await self._wakeups.wait(left)

    def _record_change(self) -> None:
        # An event during a step wakes no task, because no task waits then.
        self._has_changed = True

    @property
    def _is_check_due(self) -> bool:
        return (
            bool(self._steps)
            or self._sync.is_shared
            or self._loop.time() >= self._next_step_s
        )

    def wakeup(self) -> None:
        """Interrupt a read. Any thread may call it.

        The waiting getmany(), or the next one, raises WakeupError; an iteration ends.
        """
        self._sync.wakeup()
        self._wakeups.notify()

    end_waits = wakeup


def _refresh_in_thread(loop_thread: int, log: Log) -> None:
    """Make appends of other processes visible, but not in the loop, because this may wait
    for the disk.
    """
    if threading.get_ident() != loop_thread:
        log.refresh()


def _size_bytes(record: TopicRecord) -> int:
    sizes = [
        len(piece)
        for piece in (record.key, record.value)
        if isinstance(piece, (bytes, str))
    ]
    return sum(sizes)


def opening(directory: LogDir, settings: ConsumerSettings) -> Opening[Consumer]:
    """Open a consumer of an open directory, for the task that awaits it."""

    def make() -> _StepwiseConsumer:
        groups: Any = None
        registry = None
        if settings.group_id is not None:
            directory.host.check_writable()
            groups = directory.host.coordinators.groups(directory)
        if settings.uses_registry:
            registry = directory.host.coordinators.registry(directory)
        return _StepwiseConsumer(
            directory.host.fs, directory, groups, settings, registry
        )

    return open_in_thread("the consumer", make, synchronous.Consumer.close, Consumer)
