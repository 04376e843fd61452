"""A directory of partition logs in an event loop, with the names of logcore.LogDir.

This module makes no decisions. Each call is passed to the directory, in its thread if
it may wait.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from logcore import logdir as synchronous
from logcore.aio import consumer as consumers
from logcore.aio import producer as producers
from logcore.aio.awaitable_open import Opening, opener
from logcore.aio.closeable import AsyncCloseable
from logcore.aio.log import Log
from logcore.aio.loop_thread import LoopThread, in_thread
from logcore.aio.notify import (
    LogFollower,
    ReadLists,
    RecordLists,
    Tail,
    begin_to_follow,
)
from logcore.consumer.settings import ConsumerOptions, consumer_settings
from logcore.kernels import Receipt, Record, TopicRecord, kernel
from logcore.kernels.layout import Buffer, HeadersInput, Level, Time
from logcore.producer.settings import (
    ProducerOptions,
    TransactionOptions,
    build_settings,
)
from logcore.reporting import Incident
from logcore.topic import Position

if TYPE_CHECKING:
    import pyarrow

    from logcore.backup import SnapshotResult

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LogDir(AsyncCloseable):
    """A directory of partition logs, for tasks of one event loop.

    logcore.aio.open_dir() creates it.

    `sync` is the logcore.LogDir, whose other methods may be called in threads. All methods
    here raise WrongLoopError outside the loop. Their other errors are those of
    logcore.LogDir.
    """

    def __init__(self, loop_thread: LoopThread, directory: synchronous.LogDir) -> None:
        """Create a directory. Users call logcore.aio.open_dir()."""
        self.sync = self._sync = directory
        self._loop_thread = loop_thread
        self._call = loop_thread.call
        self._logs: dict[tuple[str, int], Log] = {}

    def __repr__(self) -> str:
        return f"<aio {self.sync!r}>"

    def __contains__(self, topic: object) -> bool:
        return topic in self.sync

    @property
    def path(self) -> str:
        return self.sync.path

    async def close(self) -> None:
        """Close every log and the directory.

        If the call is cancelled, closing continues in the background. Closing twice is
        allowed.
        """
        closing = self._loop_thread.begin(self.sync.close)
        self._loop_thread.end()
        try:
            await closing
        finally:
            for log in self._logs.values():
                log.release()

    # -- topics ------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the names of the topics, sorted."""
        return self.sync.topics()

    def partitions(self, name: str) -> tuple[int, ...]:
        """Return the partition numbers of a topic, sorted.

        Raises:
            TopicNotFoundError: the topic does not exist.
        """
        return self.sync.partitions(name)

    create_topic = in_thread(synchronous.LogDir.create_topic)
    delete_topic = in_thread(synchronous.LogDir.delete_topic)
    add_partitions = in_thread(synchronous.LogDir.add_partitions)
    alter_topic = in_thread(synchronous.LogDir.alter_topic)
    delete_group = in_thread(synchronous.LogDir.delete_group)
    groups = in_thread(synchronous.LogDir.groups)
    alter_group_offsets = in_thread(synchronous.LogDir.alter_group_offsets)

    async def sql(
        self, query: str, *, text: bool = True, schemas: bool | str = False
    ) -> pyarrow.Table:
        """Return the whole result of a query; see logcore.LogDir.sql().

        Raises:
            QueryError: see logcore.LogDir.sql(). It is also raised if a value cannot be
                converted to the type that the query requires.
        """
        from logcore.query.sql import read_table

        return await self._loop_thread.call(
            lambda: read_table(self.sync, query, is_text=text, schemas=schemas)
        )

    async def snapshot(
        self, backup: str | os.PathLike[str], *, keep: int | None = None
    ) -> SnapshotResult:
        """See logcore.LogDir.snapshot()."""
        return await self._loop_thread.call(
            functools.partial(self.sync.snapshot, backup, keep=keep)
        )

    refresh = in_thread(synchronous.LogDir.refresh)
    tick = in_thread(synchronous.LogDir.tick)

    def incidents(self) -> tuple[Incident, ...]:
        """See logcore.LogDir.incidents()."""
        return self.sync.incidents()

    # -- records -----------------------------------------------------------------------

    async def partition(self, topic: str, number: int) -> Log:
        """Return the log of a partition.

        The log is opened once, and closed with the directory.
        """
        log = await self._loop_thread.call(self.sync.partition, topic, number)
        known = self._logs.get((topic, number))
        if known is None or known.sync is not log:
            known = self._logs[topic, number] = Log(LoopThread("the log"), log)
        return known

    async def append(
        self,
        topic: str,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        partition: int | None = None,
        durability: Level | None = None,
        expected: Mapping[Buffer, int] | None = None,
    ) -> Receipt:
        """Append one record; see logcore.LogDir.append() and Log.append()."""
        if partition is None:
            partition = self.sync.choose_partition(topic, key, value, expected or ())
        log = self._logs.get((topic, partition))
        if log is None or log.is_closed:
            log = await self.partition(topic, partition)
        return await log.append(
            value,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            durability=durability,
            expected=expected,
        )

    async def history(
        self,
        topic: str,
        key: Buffer,
        start: int | None = None,
        end: int | None = None,
    ) -> list[Record]:
        """Return the records of a key; see logcore.LogDir.history()."""
        return await self._loop_thread.call(
            lambda: list(self.sync.history(topic, key, start, end))
        )

    def read(
        self,
        topic: str,
        start: Position | None = None,
        end: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
    ) -> RecordLists[TopicRecord]:
        """Return the records of a topic, for `async for`; see logcore.Topic.read()."""
        self._loop_thread.check()
        find = functools.partial(
            self.sync.topic(topic).record_lists, start, end, partitions
        )
        return ReadLists(self._loop_thread, None, find)

    async def tail(
        self,
        topic: str,
        start: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> RecordLists[TopicRecord]:
        """Return the records of a topic as they are appended, for `async for record in
        await data.tail(topic)`; see logcore.Topic.tail().
        """
        numbers, logs, offsets = await self._loop_thread.call(
            self.sync.topic(topic).begin_tail, start, partitions
        )

        def with_topic(at: int, records: list[Record]) -> list[TopicRecord]:
            return kernel.to_topic_records(topic, numbers[at], records)

        follower = LogFollower(self._loop_thread, self.sync.host.fs, logs)
        return Tail(
            self._loop_thread,
            follower,
            begin_to_follow(logs, offsets),
            timeout,
            with_topic,
        )

    @overload
    def producer(
        self,
        *,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[ProducerOptions],
    ) -> Opening[producers.Producer]: ...
    @overload
    def producer(
        self,
        *,
        transactional_id: str,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[TransactionOptions],
    ) -> Opening[producers.TransactionalProducer]: ...
    def producer(
        self, *, config: Mapping[str, object] | None = None, **settings: Any
    ) -> Opening[Any]:
        """Return a producer; see logcore.LogDir.producer().

        For `async with`, or with `await`.
        """
        self._loop_thread.check()
        self.sync.host.check_writable()
        return producers.opening(self.sync, build_settings(config, settings))

    def consumer(
        self,
        *,
        config: Mapping[str, object] | None = None,
        **settings: Unpack[ConsumerOptions],
    ) -> Opening[consumers.Consumer]:
        """Return a consumer of topics; see logcore.LogDir.consumer().

        For `async with`, or with `await`.
        """
        self._loop_thread.check()
        self.sync.host.check_open()
        return consumers.opening(self.sync, consumer_settings(config, settings))


open_dir = opener(
    "the log directory", synchronous.open_dir, synchronous.LogDir.close, LogDir
)
"""Open a directory like logcore.open_dir(), with `async with` or `await`."""
