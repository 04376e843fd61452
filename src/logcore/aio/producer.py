"""A producer for an event loop. Its names are those of logcore.producer.

Rules:
- send() queues a record, and waits only if the memory of the producer is full. Its
  future belongs to the loop. Cancelling that future has no effect, because the record
  is already queued.
- The thread of the producer passes each completed batch to the loop in one call. The
  loop completes the futures of its records.
- on_delivery is called in the loop, before the future is done. Interceptors are called
  in the writing thread.
- Calls that wait for the disk, such as flush(), run in one more thread, in the order of
  the calls.

Batches, retries and transactions are implemented in logcore.producer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final, Self

import attrs

from logcore.aio.awaitable_open import Opening, open_in_thread
from logcore.aio.closeable import AsyncCloseable
from logcore.aio.loop_thread import LoopThread, in_loop, in_thread
from logcore.callbacks import call
from logcore.errors import (
    BufferFullError,
    InvalidConfigError,
    ProducerClosedError,
    TransactionAbortedError,
)
from logcore.format.columns import ColumnInput, TimesInput
from logcore.kernels import Receipt
from logcore.kernels.layout import HeadersInput, RecordInput, Time, header_pairs
from logcore.logdir import LogDir
from logcore.metadata.checkpoint import PartitionKey
from logcore.producer import producer as synchronous
from logcore.producer import transactional_producer
from logcore.producer.futures import Delivery, RecordFuture
from logcore.producer.settings import (
    OnDelivery,
    ProducerRecord,
    ProducerSettings,
    RecordMetadata,
)

#: Maximum time for which the end of a loop waits for a producer that was not closed. The
#: exit of the interpreter waits as long.
_EXIT_SECONDS: Final = 5.0


#: Like asyncio.get_running_loop(), which is slower because it may raise.
_running_loop: Final = asyncio.events._get_running_loop
#: Number of records that tasks send before send() yields to the loop.
_RECORDS_PER_YIELD: Final = 1_024


class _MemoryFullError(Exception):
    """There is no memory for a record now. This error is never raised to users."""


class _NonBlocking:
    """Changes a producer for use in a loop: send() raises if there is no memory.

    In the thread that executes send_many(), it waits for memory. In the producer's queue
    for memory, one ticket represents all waiting tasks.
    """

    _thread_state: Any
    _accumulator: Any
    _directory: Any
    _settings: Any
    _transforms_records: bool

    def prepare(self, ticket: object) -> None:
        self._loop_thread = threading.get_ident()
        self._ticket = ticket
        self._transforms_records = (
            False  # records are prepared before send(), which may be repeated
        )

    @property
    def path(self) -> str:
        """The path of the directory."""
        path: str = self._directory.path
        return path

    @property
    def does_prepare(self) -> bool:
        """Whether interceptors or serializers process records before they are sent.

        The value applies until prepare().
        """
        return self._transforms_records

    @property
    def max_block_ms(self) -> int:
        block_ms: int = self._settings.max_block_ms
        return block_ms

    @property
    def used_bytes(self) -> int:
        """Memory used by waiting records."""
        used_bytes: int = self._accumulator.used_bytes
        return used_bytes

    def prepared(self, record: ProducerRecord) -> ProducerRecord:
        """Return the record after interceptors and serializers."""
        found: ProducerRecord = self._transform(record)  # type: ignore[attr-defined]
        return found

    def make_batches_ready(self, *, has_waiters: bool) -> None:
        """Make all batches ready while tasks wait for memory.

        `has_line` is whether tasks wait now.
        """
        waiting = self._accumulator.waiting
        with self._thread_state.lock:
            if has_waiters and self._ticket not in waiting:
                waiting.append(self._ticket)
                self._thread_state.work_added.notify()
            elif not has_waiters and self._ticket in waiting:
                waiting.remove(self._ticket)
                self._thread_state.memory_freed.notify_all()

    def _wait_for_memory(self, memory_bytes: int, records: int) -> None:
        if threading.get_ident() != self._loop_thread:
            super()._wait_for_memory(memory_bytes, records)  # type: ignore[misc]
            return
        first = self._ticket
        if self._accumulator.waiting:
            first = self._accumulator.waiting[0]
        if first is not self._ticket or self._exceeds_memory(memory_bytes, records):  # type: ignore[attr-defined]
            raise _MemoryFullError


class _PlainProducer(_NonBlocking, synchronous.Producer):
    pass


class _LoopTransactionalProducer(
    _NonBlocking, transactional_producer.TransactionalProducer
):
    pass


#: A sent record, its future in the loop, and its callback.
_Sent = tuple[RecordFuture, "asyncio.Future[RecordMetadata]", OnDelivery | None]


class Producer(AsyncCloseable):
    """A producer made by LogDir.producer(). An `async with` block closes it.

    Any number of tasks may call the methods. Outside the loop in which the producer was
    created, the methods raise WrongLoopError.
    """

    def __init__(
        self,
        loop_thread: LoopThread,
        producer: _PlainProducer | _LoopTransactionalProducer,
        on_delivery: OnDelivery | None,
    ) -> None:
        """Create a producer. Users call LogDir.producer()."""
        self._loop_thread = loop_thread
        self._call = loop_thread.call
        self._loop = loop_thread.loop
        self._sync: _PlainProducer | _LoopTransactionalProducer = producer
        self._on_delivery = on_delivery
        #: Represents all waiting tasks in the queue of the producer.
        self._ticket = object()
        self._does_prepare = producer.does_prepare
        producer.prepare(self._ticket)
        #: Sent records by their batch. Only the loop changes it.
        self._sent: dict[Delivery, list[_Sent]] = {}
        #: Tasks that wait for memory, in FIFO order.
        self._memory_waiters: deque[asyncio.Event] = deque()
        self._since_yield = 0  # records sent since the loop ran other tasks
        self._is_closed = False
        self._at_end = _at_end_of_loop(weakref.ref(self))
        with contextlib.suppress(StopIteration):
            # The first step registers the generator with the loop, which ends it when
            # it closes.
            self._at_end.asend(None).send(None)

    async def __aenter__(self) -> Self:
        self._loop_thread.check()
        return self

    def __repr__(self) -> str:
        return f"<aio {self._sync!r}>"

    # -- sending -----------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: Any = None,
        *,
        key: Any = None,
        partition: int | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Put a record into a batch, and return a future of its metadata.

        The call waits up to max_block_ms for memory. If it is cancelled during that wait,
        the record is not sent. The other behavior and the errors are those of
        logcore.producer.Producer.send().
        """
        if self._is_closed or _running_loop() is not self._loop:
            self._loop_thread.check()
            self._check_open()
        if self._does_prepare:
            record = self._sync.prepared(
                ProducerRecord(topic, value, key, partition, headers, timestamp_ms)
            )
            topic, value, key, partition, headers, timestamp_ms = record
        if not self._memory_waiters and self._since_yield < _RECORDS_PER_YIELD:
            try:
                record_future = self._sync.send(
                    topic,
                    value,
                    key=key,
                    partition=partition,
                    headers=headers,
                    timestamp_ms=timestamp_ms,
                )
            except _MemoryFullError:
                pass
            else:
                return self._expect(record_future, on_delivery)
        if headers.__class__ is not tuple:
            headers = tuple(header_pairs(headers))
        attempt = functools.partial(
            self._sync.send,
            topic,
            value,
            key=key,
            partition=partition,
            headers=headers,
            timestamp_ms=timestamp_ms,
        )
        return self._expect(await self._wait_for_memory_in_order(attempt), on_delivery)

    async def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        *,
        key: Any = None,
        partition: int | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
    ) -> RecordMetadata:
        """Send a record and wait for its result.

        The record is sent even if the call is cancelled.
        """
        return await (
            await self.send(
                topic,
                value,
                key=key,
                partition=partition,
                headers=headers,
                timestamp_ms=timestamp_ms,
            )
        )

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _check_open(self) -> None:
        """Raise ProducerClosedError if the producer is closed, or if close() was called
        but has not started yet.
        """
        if self._is_closed:
            raise ProducerClosedError("the producer is closed", path=self._sync.path)

    def _expect(
        self, record_future: RecordFuture, on_delivery: OnDelivery | None
    ) -> asyncio.Future[RecordMetadata]:
        future: asyncio.Future[RecordMetadata] = self._loop.create_future()
        delivery = record_future.batch
        sent = self._sent.get(delivery)
        if sent is None:
            sent = self._sent[delivery] = []
            record_future.add_done_callback(self._post_completed)
        sent.append((record_future, future, on_delivery))
        self._since_yield += 1
        return future

    def _post_completed(self, first: Future[RecordMetadata]) -> None:
        """Pass a completed batch to the loop, from the writing thread."""
        assert isinstance(first, RecordFuture)
        self._loop_thread.post_to_loop(functools.partial(self._complete, first.batch))

    def _complete(self, delivery: Delivery) -> None:
        """Complete the futures of a batch, or of its completed half, in the loop."""
        self._since_yield = 0
        sent = self._sent.pop(delivery)
        if delivery.parts is not None:
            later = [row for row in sent if not row[0].delivery().is_resolved]
            if later:
                self._sent[delivery] = later
                later[0][0].add_done_callback(self._post_completed)
                sent = [row for row in sent if row[0].delivery().is_resolved]
        is_whole = delivery.parts is None
        listener = self._on_delivery
        for record_future, future, on_delivery in sent:
            if is_whole:
                found = delivery
            else:
                found = record_future.delivery()
            metadata = record_future.metadata(found)
            if on_delivery is not None:
                call(on_delivery, found.error, metadata)
            if listener is not None:
                call(listener, found.error, metadata)
            if found.error is not None:
                self._fail(future, found.error)
            elif not future.done():
                future.set_result(metadata)
        if self._memory_waiters:
            self._memory_waiters[0].set()

    def _fail(self, future: asyncio.Future[RecordMetadata], error: Exception) -> None:
        if future.done():
            return
        future.set_exception(error)
        if isinstance(error, TransactionAbortedError):
            # Retrieved, so that the loop does not warn: the abort caused the error.
            future.exception()

    async def _wait_for_memory_in_order(
        self, attempt: Callable[[], RecordFuture]
    ) -> RecordFuture:
        """Try again whenever memory is freed, in the order of the calls.

        Raises:
            BufferFullError: max_block_ms have passed.
        """
        own = asyncio.Event()
        self._memory_waiters.append(own)
        try:
            if self._since_yield >= _RECORDS_PER_YIELD:
                self._since_yield = 0
                await asyncio.sleep(0)
            async with asyncio.timeout(self._sync.max_block_ms / 1000):
                while True:
                    self._check_open()
                    if self._memory_waiters[0] is own:
                        try:
                            return attempt()
                        except _MemoryFullError:
                            self._make_batches_ready()
                    own.clear()
                    await own.wait()
        except TimeoutError:
            raise BufferFullError(
                "the memory of the producer is full",
                expected=f"memory for the record within {self._sync.max_block_ms} ms",
                found=f"{self._sync.used_bytes} bytes in use",
            ) from None
        finally:
            self._memory_waiters.remove(own)
            if self._memory_waiters:
                self._memory_waiters[0].set()
            else:
                self._make_batches_ready()

    def _make_batches_ready(self) -> None:
        self._sync.make_batches_ready(has_waiters=bool(self._memory_waiters))

    async def send_many(
        self,
        topic: str,
        records: Iterable[RecordInput],
        *,
        partition: int | None = None,
    ) -> asyncio.Future[list[Receipt]]:
        """Send many records, with one future for all; see Producer.send_many()."""
        rows = list(records)
        return await self._gathered(
            functools.partial(self._sync.send_many, topic, rows, partition=partition)
        )

    async def send_columns(
        self,
        topic: str,
        *,
        keys: ColumnInput | None = None,
        values: ColumnInput | None = None,
        timestamps_ms: TimesInput | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[list[Receipt]]:
        """Send records in columns; see logcore.producer.Producer.send_columns()."""
        send = functools.partial(
            self._sync.send_columns,
            topic,
            keys=keys,
            values=values,
            timestamps_ms=timestamps_ms,
            partition=partition,
        )
        return await self._gathered(send)

    async def _gathered(
        self, send: Callable[[], Future[list[Receipt]]]
    ) -> asyncio.Future[list[Receipt]]:
        """Run a long call in the thread, because it may wait for memory."""
        future: asyncio.Future[list[Receipt]] = self._loop.create_future()
        gathered = await self._loop_thread.call(send)
        gathered.add_done_callback(
            lambda done: self._loop_thread.post_to_loop(
                functools.partial(self._complete_all, done, future)
            )
        )
        return future

    def _complete_all(
        self, done: Future[list[Receipt]], future: asyncio.Future[list[Receipt]]
    ) -> None:
        error = done.exception()
        if future.done():
            pass
        elif error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)
        if self._memory_waiters:
            self._memory_waiters[0].set()

    # -- writing -----------------------------------------------------------------------

    flush = in_thread(synchronous.Producer.flush)
    metrics = in_loop(synchronous.Producer.metrics)
    partitions_for = in_loop(synchronous.Producer.partitions_for)

    async def close(self, timeout: float | None = None) -> None:
        """Write the queued records, wait for them and close.

        If the call is cancelled, closing continues in the background. Records that are
        not written within `timeout` seconds fail with ProducerClosedError. Closing twice
        is allowed.
        """
        await self.end(timeout)
        await self._at_end.aclose()

    async def end(self, timeout: float | None) -> None:
        """Close the producer, for close() and for the end of the loop."""
        closing = self._loop_thread.begin(functools.partial(self._sync.close, timeout))
        self._is_closed = True
        self._loop_thread.end()
        self._loop.call_soon(self._wake_waiting)
        await closing

    def _wake_waiting(self) -> None:
        """Wake the tasks that wait for memory, because the producer is closed."""
        for event in self._memory_waiters:
            event.set()


async def _at_end_of_loop(
    producer: weakref.ref[Producer],
) -> AsyncGenerator[None, None]:
    """Wait until the loop shuts down, as asyncio.run() does, and then end the producer.

    Producer.close() closes this generator.
    """
    try:
        yield
    finally:
        found = producer()
        if found is not None and not found.is_closed:
            message = f"{found!r} was not closed before its event loop"
            warnings.warn(message, ResourceWarning, stacklevel=1, source=found)
            await found.end(_EXIT_SECONDS)


class TransactionalProducer(Producer):
    """A producer made by LogDir.producer(transactional_id=...).

    The calls are those of logcore's TransactionalProducer. A cancelled call is completed
    before later calls begin. After a cancelled commit, the transaction is committed, or
    the next commit raises the error.
    """

    def __init__(
        self,
        loop_thread: LoopThread,
        producer: _LoopTransactionalProducer,
        on_delivery: OnDelivery | None,
    ) -> None:
        """Create a producer. Users call LogDir.producer()."""
        super().__init__(loop_thread, producer, on_delivery)
        self._own = producer

    init_transactions = in_thread(
        transactional_producer.TransactionalProducer.init_transactions
    )
    begin_transaction = in_thread(
        transactional_producer.TransactionalProducer.begin_transaction
    )
    commit_transaction = in_thread(
        transactional_producer.TransactionalProducer.commit_transaction
    )
    abort_transaction = in_thread(
        transactional_producer.TransactionalProducer.abort_transaction
    )
    prepare_transaction = in_thread(
        transactional_producer.TransactionalProducer.prepare_transaction
    )
    complete_transaction = in_thread(
        transactional_producer.TransactionalProducer.complete_transaction
    )

    async def send_offsets_to_transaction(
        self,
        offsets: Mapping[PartitionKey, int | transactional_producer.OffsetToCommit],
        group: transactional_producer.CommittingMember | str,
    ) -> None:
        """Commit offsets of a group with the transaction.

        `group` is Consumer.group_metadata() or a group id.
        """
        await self._loop_thread.call(
            self._own.send_offsets_to_transaction, dict(offsets), group
        )

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Self, None]:
        """Begin a transaction and commit it at the end of the block.

        If an exception leaves the block, including the cancellation of the task, the
        transaction is aborted.
        """
        block = self._own.transaction()
        # If the task is cancelled here, the block was not entered and has no
        # transaction.
        await self._loop_thread.acquire(
            block.__enter__,
            lambda _: block.__exit__(asyncio.CancelledError, None, None),
        )
        try:
            yield self
        except BaseException as error:
            await self._loop_thread.call(
                block.__exit__, type(error), error, error.__traceback__
            )
            raise
        await self._loop_thread.call(block.__exit__, None, None, None)

    @property
    def is_prepared(self) -> bool:
        """Whether a transaction waits for complete_transaction()."""
        return self._own.is_prepared


def opening(directory: LogDir, settings: ProducerSettings) -> Opening[Any]:
    """Open a producer of an open directory, for the task that awaits it."""
    if not settings.threaded:
        raise InvalidConfigError(
            "a producer in an event loop has a thread",
            expected="threaded=True",
            found=False,
        )
    quiet = attrs.evolve(settings, on_delivery=None)

    def make() -> _PlainProducer | _LoopTransactionalProducer:
        if quiet.transactional_id is None:
            return _PlainProducer(directory.host.fs, directory, quiet)
        return _LoopTransactionalProducer(
            directory.host.fs, directory, quiet, directory.host.coordinators
        )

    def wrap(
        loop_thread: LoopThread, made: _PlainProducer | _LoopTransactionalProducer
    ) -> Producer:
        if isinstance(made, _LoopTransactionalProducer):
            return TransactionalProducer(loop_thread, made, settings.on_delivery)
        return Producer(loop_thread, made, settings.on_delivery)

    return open_in_thread("the producer", make, lambda made: made.close(0), wrap)
