"""Producer: collects records into batches and writes them to the topics of a directory.

    with logcore.open_dir("data") as data, data.producer() as producer:
        future = producer.send("orders", b"value", key=b"key")
        print(future.result().offset)

Rules (clients reference 2):
- send() adds a record to the open batch of its partition and returns a future. A thread
  of the producer, which the first send() starts, writes ready batches. With
  threaded=False there is no thread: the send() that fills a batch writes it, and poll()
  writes batches that are ready.
- With idempotence, which is the default, a batch that is retried is stored once. The
  order of records in a partition never changes.
- Callbacks run in the thread that writes. An exception of a callback has no effect on
  other callbacks or batches.

Readiness and memory of batches are in accumulator.py, writing and outcomes in
sender.py, futures in futures.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from logcore.callbacks import call
from logcore.closeable import Closeable
from logcore.coordination.transaction_effects import NO_TIMEOUT
from logcore.coordinators.transactions import TransactionCoordinator
from logcore.deadlines import milliseconds
from logcore.directory.interface import ClientDirectory
from logcore.errors import (
    BufferFullError,
    DeliveryTimeoutError,
    ForkedWriterError,
    InvalidRecordError,
    LogcoreError,
    ProducerClosedError,
    ProducerStateError,
    RecordTooLargeError,
    SerializationError,
)
from logcore.format.columns import (
    ColumnInput,
    TimesInput,
    input_columns,
)
from logcore.fs import FS, offers_descriptors
from logcore.kernels import ProducerFields, Receipt, ThreadStateFields
from logcore.kernels.layout import HeadersInput, RecordInput, Time, header_pairs
from logcore.kernels.sending import RECORD_BYTES, RECORD_OVERHEAD_BYTES
from logcore.producer import bulk
from logcore.producer.accumulator import (
    HEADER_BYTES,
    NO_LIMIT,
    Accumulator,
    Queue,
    UnsentColumns,
)
from logcore.producer.futures import CallbackRunner, Delivery, RecordFuture
from logcore.producer.partitioners import RandomBelow
from logcore.producer.routing import Routes
from logcore.producer.sender import Sender
from logcore.producer.settings import (
    OnDelivery,
    ProducerMetrics,
    ProducerRecord,
    ProducerSettings,
    Serializer,
)
from logcore.producer.transaction_manager import TransactionManager
from logcore.recordbatch import time_ms
from logcore.reporting import ERROR, log_line

#: How long the exit of the interpreter waits for a producer that was not closed.
_EXIT_SECONDS: Final = 5.0
#: A batch of send_many() may be as large as this number of batches of send(), because
#: its cost is per batch.
_BULK_BATCHES: Final = 4
#: The sender checks for ready batches at least this often, even if no event wakes it.
_CHECK_MS: Final = 1_000


class _ThreadState(ThreadStateFields):
    """The part of a producer's state that its thread uses.

    The thread has a reference to this object but not to the producer, so that an unused
    producer can be garbage-collected.
    """

    lock: threading.Lock
    accumulator: Accumulator

    def __init__(
        self,
        fs: FS,
        directory: ClientDirectory,
        settings: ProducerSettings,
        random_below: RandomBelow,
        coordinator: TransactionCoordinator | None,
    ) -> None:
        self.fs = fs
        #: Guards the accumulator, the routes and the counters.
        self.lock = threading.Lock()
        #: Notified when memory is freed.
        self.memory_freed = threading.Condition(self.lock)
        #: Notified when a batch may have become ready.
        self.work_added = threading.Condition(self.lock)
        #: Held during a round.
        self.round_lock = threading.Lock()
        #: Whether new records are refused. Set under the lock, except in __del__().
        self.is_closing = False
        #: Whether the thread must end. Set under the lock.
        self.must_stop = False
        self.callback_runner = CallbackRunner(settings.interceptors)
        self.accumulator = Accumulator(settings, self.callback_runner, random_below)
        self.transaction_manager: TransactionManager | None = None
        if coordinator is not None:
            name = str(settings.transactional_id)
            if settings.two_phase:
                timeout_ms = NO_TIMEOUT
            else:
                timeout_ms = settings.transaction_timeout_ms
            self.transaction_manager = TransactionManager(
                fs, coordinator, name, timeout_ms, self.memory_freed
            )
        self.sender = Sender(
            fs,
            directory,
            settings,
            self.accumulator,
            self.callback_runner,
            self.memory_freed,
            self.transaction_manager,
        )

    def run_round(self, *, closed_only: bool = False) -> bool:
        """Write the ready batches, and return whether there were any.

        A callback is part of a round, so in a callback this has no effect.
        """
        if self.callback_runner.is_running_here:
            return False
        with self.round_lock:
            return self.sender.run_round(closed_only=closed_only)

    def time_until_ready_ms(self) -> int:
        """Return the time until the next batch is ready or expires, at most _CHECK_MS.

        The caller holds the lock.
        """
        next_ms = self.accumulator.next_ms()
        if next_ms is None:
            return _CHECK_MS
        return min(_CHECK_MS, max(0, next_ms - self.fs.monotonic_ms()))

    def run(self) -> None:
        """Run rounds until the producer is closed. This is the producer's thread."""
        while True:
            try:
                if self.run_round():
                    continue
                with self.round_lock:
                    self.sender.publish_unsynced()
            except Exception as error:
                # No batch is lost: batches without an outcome are retried.
                log_line("producer", ERROR, "a round of the sender failed: %r", error)
            with self.lock:
                if self.is_closing:
                    self.accumulator.close_all()
                if self.must_stop or (
                    self.is_closing and not self.accumulator.active_queues
                ):
                    return
                self.work_added.wait(self.time_until_ready_ms() / 1000)


class Producer(ProducerFields, Closeable):
    """A producer of records. LogDir.producer() creates it.

    A `with` block closes it. Any thread may call its methods.
    """

    _fs: FS
    _thread_state: _ThreadState

    def __init__(
        self,
        fs: FS,
        directory: ClientDirectory,
        settings: ProducerSettings,
        coordinator: TransactionCoordinator | None = None,
    ) -> None:
        """Initialize a producer. Users call LogDir.producer() instead."""
        self._fs = fs
        self._directory = directory
        self._settings = settings
        random_below = functools.partial(_random_number_below, fs)
        self._thread_state = _ThreadState(
            fs, directory, settings, random_below, coordinator
        )
        self._accumulator = self._thread_state.accumulator
        self._lock = self._thread_state.lock
        self._routes = Routes(directory, settings, self._accumulator, random_below)
        self._thread: threading.Thread | None = None
        self._blocked_ms = 0
        # Computed once, because each send() uses these values.
        self._max_memory_bytes = settings.buffer_memory
        self._max_memory_records = settings.buffer_records or NO_LIMIT
        self._max_record_bytes = min(
            settings.max_request_size, settings.buffer_memory - RECORD_OVERHEAD_BYTES
        )
        self._now_ms = fs.now_ms
        self._has_callbacks = (
            bool(settings.interceptors) or settings.on_delivery is not None
        )
        self._transforms_records = bool(
            settings.interceptors
            or settings.key_serializer
            or settings.value_serializer
        )
        self._forks = fs.forks
        # If records are only bytes and the result is only a future, send() can use the
        # fast path of kernels/sending.py.
        is_plain = (
            coordinator is None
            and not self._has_callbacks
            and not self._transforms_records
        )
        self._uses_fast_path = is_plain and offers_descriptors(fs)
        self._routes_by_topic = self._routes.by_topic
        self._future_type = RecordFuture
        self._at_exit = _AtExit(self)
        atexit.register(self._at_exit)

    # -- opening and closing -----------------------------------------------------------

    def __del__(self) -> None:
        thread_state = getattr(self, "_thread_state", None)
        if (
            thread_state is None
            or thread_state.is_closing
            or self._fs.forks != self._forks
        ):
            return
        # No lock is acquired here, because the garbage collector may run in a thread
        # that holds the lock.
        thread_state.is_closing = True
        atexit.unregister(self._at_exit)
        if thread_state.accumulator.active_queues:
            outcome = "is lost"
            if self._settings.threaded:
                outcome = "is written within a second"
            text = f"a producer of {self._directory.path} was not closed; its queued data {outcome}"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "closed"
        if not self._thread_state.is_closing:
            state = f"{self._accumulator.queued_records} records queued"
        return f"<Producer of {self._directory.path}, {state}>"

    def close(self, timeout: float | None = None) -> None:
        """Write the queued records, wait for their outcomes, and close the producer.

        Records that are not written within `timeout` seconds fail with
        ProducerClosedError. In a callback, the timeout is 0. A second call has no
        effect.
        """
        thread_state = self._thread_state
        if self._fs.forks != self._forks:  # the parent process writes the batches
            thread_state.is_closing = True
            return
        # Step 1: accept no more records, and close the open batches.
        with self._lock:
            if thread_state.must_stop:
                return
            thread_state.is_closing = True
            pending = self._closed_batches()
            thread_state.memory_freed.notify_all()
        # Step 2: wait for the outcomes. In a callback this is impossible: the current
        # round, which holds round_lock, must end before the next one begins.
        is_callback = thread_state.callback_runner.is_running_here
        if is_callback:
            timeout = 0.0
        is_done = self._wait_for(pending, timeout)
        # Step 3: end the thread, and fail the remaining batches.
        with self._lock:
            thread_state.must_stop = True
            thread_state.work_added.notify_all()
        with contextlib.ExitStack() as stack:
            if not is_callback:
                stack.enter_context(thread_state.round_lock)
            if not is_done:
                thread_state.sender.fail_remaining()
            thread_state.sender.publish_unsynced()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_EXIT_SECONDS)
        atexit.unregister(self._at_exit)

    def close_at_exit(self) -> None:
        """Close the producer at the exit of the interpreter, with a warning."""
        if self._thread_state.is_closing or self._fs.forks != self._forks:
            return
        text = f"a producer of {self._directory.path} was not closed"
        warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
        self.close(_EXIT_SECONDS)

    def _check_open(self) -> None:
        if self._fs.forks != self._forks:
            raise ForkedWriterError(
                "the producer was created by a parent process; create another one in the child",
                path=self._directory.path,
            )
        if self._thread_state.is_closing:
            raise ProducerClosedError(
                "the producer is closed", path=self._directory.path
            )
        if self._thread_state.transaction_manager is not None:
            self._thread_state.transaction_manager.check_sending()

    # -- sending -----------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: Any = None,
        *,
        key: Any = None,
        partition: int | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> RecordFuture:
        """Add a record to a batch. The future contains its offset or its error.

        `value` and `key` are bytes, arguments of the serializers, or None for null.
        `partition` is chosen by the partitioner by default, and `timestamp_ms` is the
        current time by default. `on_delivery` is called with (error, metadata), in
        addition to the producer's own callback. The call waits up to max_block_ms for
        memory.

        The errors below are raised before any effect. The future raises the errors of
        writing, such as DeliveryTimeoutError, DurabilityUnknownError,
        InvalidRecordError or RecordTooLargeError.

        Raises:
            InvalidRecordError: a key, value or header has another type.
            InvalidTimestampError: the timestamp is invalid.
            RecordTooLargeError: the record exceeds max_request_size or buffer_memory.
            SerializationError: a serializer failed.
            TopicNotFoundError: the topic or partition does not exist.
            BufferFullError: there was no memory within max_block_ms.
            ProducerClosedError: the producer is closed.
            ForkedWriterError: a parent process created the producer.
        """
        sent: RecordFuture | None = self._send_fast(
            topic, value, key, partition, headers, timestamp_ms, on_delivery
        )
        if sent is not None:
            return sent
        # Step 1: prepare and measure the record.
        if self._transforms_records:
            record = ProducerRecord(topic, value, key, partition, headers, timestamp_ms)
            topic, value, key, partition, headers, timestamp_ms = self._transform(
                record
            )
        key_size = -1
        value_size = -1
        size_bytes = RECORD_BYTES
        if key is not None:
            if type(key) is not bytes:
                key = _copy_bytes(key, "key")
            key_size = len(key)
            size_bytes += key_size
        if value is not None:
            if type(value) is not bytes:
                value = _copy_bytes(value, "value")
            value_size = len(value)
            size_bytes += value_size
        if headers:
            headers = _copy_headers(headers)
            size_bytes += sum(
                len(name.encode()) + len(content or b"") + HEADER_BYTES
                for name, content in headers
            )
        sent_ms: int | None
        if timestamp_ms is None:
            sent_ms = self._now_ms()
        else:
            sent_ms = time_ms(timestamp_ms)
        assert sent_ms is not None
        if size_bytes > self._max_record_bytes:
            self._refuse_size(size_bytes)
        # Step 2: reserve memory and add the record to the batch, under the lock.
        accumulator = self._accumulator
        thread_state = self._thread_state
        is_new = False
        with self._lock:
            if (
                thread_state.is_closing
                or thread_state.transaction_manager is not None
                or self._fs.forks != self._forks
            ):
                self._check_open()
            if accumulator.waiting or self._exceeds_memory(
                size_bytes + RECORD_OVERHEAD_BYTES, 1
            ):
                self._wait_for_memory(size_bytes + RECORD_OVERHEAD_BYTES, 1)
            queue = self._routes.queue(topic, key, partition, size_bytes)
            batch = queue.open_batch
            # Inlined ProducerBatch.fits(): the call would add 0.1 us to 2 us.
            if (
                batch is None
                or batch.size_bytes + size_bytes > batch.limit_bytes
                or len(batch.records) >= batch.max_records
            ):
                is_new = True
                self._routes.refresh(topic)
                batch = accumulator.begin(queue, self._fs.monotonic_ms())
            # Always a list, because a batch that accepts records has no columns.
            rows: Any = batch.records
            future = RecordFuture(
                batch.delivery, len(rows), sent_ms, key_size, value_size
            )
            rows.append((key, value, headers, sent_ms))
            batch.size_bytes += size_bytes
            accumulator.used_bytes += size_bytes + RECORD_OVERHEAD_BYTES
            accumulator.used_records += 1
            if on_delivery is not None:
                batch.delivery.record_callbacks.append((future, on_delivery))
            if self._has_callbacks:
                batch.delivery.record_callbacks.append(
                    (future, self._settings.on_delivery)
                )
            if is_new:
                thread_state.work_added.notify()
        if is_new:
            self._start_writing()
        return future

    def send_many(
        self,
        topic: str,
        records: Iterable[RecordInput],
        *,
        partition: int | None = None,
    ) -> Future[list[Receipt]]:
        """Send (key, value[, headers[, timestamp_ms]]) tuples, with one future for all.

        The result of the future is a list with a Receipt for each batch. This is
        cheaper than several calls of send(): a batch has up to four times batch_size.
        Records of one partition keep their order. Serializers, interceptors and
        callbacks are not called. The records must not change until the future is done.

        The future raises the first error, and the other batches are written
        nevertheless. This method raises the errors of send(), except BufferFullError:
        the future raises it, because some of the records may be queued already.
        """
        rows = list(records)
        keys, sizes = bulk.keys_and_sizes(rows)
        collector = bulk.BatchOutcomes()
        with self._lock:
            self._check_open()
            queue_shares = list(
                self._routes.divide_among_queues(
                    topic, partition, keys if partition is None else None, sizes
                )
            )
        for queue, indexes in queue_shares:
            if indexes is None:
                part = rows
            else:
                part = [rows[index] for index in indexes.tolist()]
            if not self._queue_share(
                queue, part, sizes if indexes is None else sizes[indexes], collector
            ):
                break
        collector.add(None, None)
        return collector.future

    def send_columns(
        self,
        topic: str,
        *,
        keys: ColumnInput | None = None,
        values: ColumnInput | None = None,
        timestamps_ms: TimesInput | None = None,
        partition: int | None = None,
    ) -> Future[list[Receipt]]:
        """Send records given as columns, in the format of Log.append_columns().

        The arrays must not change until the future is done. Everything else is as in
        send_many().
        """
        # Step 1: convert the arguments.
        columns = UnsentColumns(
            *input_columns("send_columns", keys, values, timestamps_ms)
        )
        # Step 2: divide the records among the partitions, and queue them.
        sizes = bulk.sizes_of_columns(columns)
        collector = bulk.BatchOutcomes()
        with self._lock:
            self._check_open()
            queue_shares = list(
                self._routes.divide_among_queues(topic, partition, columns.keys, sizes)
            )
        for queue, indexes in queue_shares:
            if indexes is None:
                part = columns
            else:
                part = bulk.select_rows(columns, indexes)
            if not self._queue_share(
                queue, part, sizes if indexes is None else sizes[indexes], collector
            ):
                break
        collector.add(None, None)
        return collector.future

    def _transform(self, record: ProducerRecord) -> ProducerRecord:
        """Apply the interceptors and serializers to a record."""
        for interceptor in self._settings.interceptors:
            replacement = call(interceptor.on_send, record)
            if isinstance(replacement, ProducerRecord):
                record = replacement
        key = _serialize(self._settings.key_serializer, record.key, "key_serializer")
        value = _serialize(
            self._settings.value_serializer, record.value, "value_serializer"
        )
        return record._replace(key=key, value=value)

    def _refuse_size(self, size_bytes: int) -> None:
        raise RecordTooLargeError(
            "the record is larger than max_request_size or buffer_memory",
            expected=f"at most {self._max_record_bytes} bytes",
            found=f"{size_bytes} bytes",
        )

    def _queue_share(
        self,
        queue: Queue,
        records: list[Any] | UnsentColumns,
        sizes: bulk.Sizes,
        collector: bulk.BatchOutcomes,
    ) -> bool:
        """Queue the records of one partition in batches that no other call shares.

        Return False if the producer was closed or its memory remained full.
        """
        settings = self._settings
        largest = int(sizes.max(initial=0))
        if largest > self._max_record_bytes:
            self._refuse_size(largest)
        max_bytes = min(
            _BULK_BATCHES * settings.batch_size,
            settings.max_request_size,
            settings.buffer_memory // 2,
        )
        accumulator = self._accumulator
        max_records = min(settings.batch_records or NO_LIMIT, self._max_memory_records)
        for start, stop, size_bytes in bulk.batch_ranges(sizes, max_bytes, max_records):
            memory_bytes = size_bytes + RECORD_OVERHEAD_BYTES * (stop - start)
            with self._lock:
                try:
                    self._check_open()
                    if accumulator.waiting or self._exceeds_memory(
                        memory_bytes, stop - start
                    ):
                        self._wait_for_memory(memory_bytes, stop - start)
                except LogcoreError as error:
                    collector.fail(error)
                    return False
                part: UnsentColumns | list[Any]
                if isinstance(records, UnsentColumns):
                    part = records.slice(start, stop)
                else:
                    part = records[start:stop]
                batch = accumulator.add(
                    queue, part, size_bytes, self._fs.monotonic_ms()
                )
                batch.delivery.collector = collector
                collector.add_pending()
                self._thread_state.work_added.notify()
            self._start_writing()
        return True

    def _exceeds_memory(self, memory_bytes: int, records: int) -> bool:
        """Return whether this addition would exceed buffer_memory or buffer_records."""
        accumulator = self._accumulator
        return (
            accumulator.used_bytes + memory_bytes > self._max_memory_bytes
            or accumulator.used_records + records > self._max_memory_records
        )

    def _wait_for_memory(self, memory_bytes: int, records: int) -> None:
        """Wait for memory. The caller holds the lock.

        Raises:
            BufferFullError: not enough memory was freed within max_block_ms.
        """
        thread_state = self._thread_state
        accumulator = self._accumulator
        if thread_state.callback_runner.is_running_here:
            raise BufferFullError(
                "the memory of the producer is full, and none is freed before this callback returns"
            )
        ticket = object()  # identifies this thread in the FIFO queue
        accumulator.waiting.append(ticket)
        began_ms = self._fs.monotonic_ms()
        try:
            # While a thread waits for memory, open batches are ready too.
            thread_state.work_added.notify()
            while accumulator.waiting[0] is not ticket or self._exceeds_memory(
                memory_bytes, records
            ):
                if not self._settings.threaded and self._round_unlocked():
                    continue
                remaining_ms = (
                    began_ms + self._settings.max_block_ms - self._fs.monotonic_ms()
                )
                if remaining_ms <= 0:
                    raise BufferFullError(
                        "the memory of the producer is full",
                        expected=f"memory for {memory_bytes} bytes, {records} records"
                        f" within {self._settings.max_block_ms} ms",
                        found=f"{accumulator.used_bytes} bytes, {accumulator.used_records} records in use",
                    )
                if not self._settings.threaded:
                    remaining_ms = min(
                        remaining_ms, max(1, thread_state.time_until_ready_ms())
                    )
                thread_state.memory_freed.wait(remaining_ms / 1000)
                self._check_open()
        finally:
            accumulator.waiting.remove(ticket)
            thread_state.memory_freed.notify_all()
            self._blocked_ms += self._fs.monotonic_ms() - began_ms

    def _round_unlocked(self) -> bool:
        """Run a round for a caller that holds the lock."""
        self._lock.release()
        try:
            return self._thread_state.run_round()
        finally:
            self._lock.acquire()

    # -- writing -----------------------------------------------------------------------

    def _start_writing(self) -> None:
        """Start the thread if necessary. With threaded=False, write the closed batches."""
        if not self._settings.threaded:
            self._thread_state.run_round(closed_only=True)
        elif self._thread is None:
            with self._lock:
                if self._thread is None and not self._thread_state.must_stop:
                    self._thread = threading.Thread(
                        target=self._thread_state.run,
                        name="logcore-producer",
                        daemon=True,
                    )
                    self._thread.start()

    def poll(self, timeout: float = 0) -> int:
        """Write ready batches and run callbacks for up to `timeout` seconds, or until a
        record has its outcome.

        Return the number of records that got their outcome. If the producer has a
        thread, this call only waits for the thread.

        Raises:
            ProducerStateError: a callback called this method.
            ForkedWriterError: a parent process created the producer.
        """
        self._check_caller("poll()")
        end_ms = self._fs.monotonic_ms() + milliseconds(timeout)
        previous_count = self._resolved_count()
        while True:
            if not self._settings.threaded:
                while self._thread_state.run_round():
                    pass
            with self._lock:
                remaining_ms = end_ms - self._fs.monotonic_ms()
                count = self._resolved_count() - previous_count
                if count or remaining_ms <= 0:
                    return count
                self._thread_state.memory_freed.wait(
                    min(remaining_ms, self._thread_state.time_until_ready_ms() or 1)
                    / 1000
                )

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all earlier records have their outcomes and their callbacks have
        run.

        Raises:
            DeliveryTimeoutError: some records had no outcome after `timeout` seconds.
            ProducerStateError: a callback called this method.
            ForkedWriterError: a parent process created the producer.
        """
        self._check_caller("flush()")
        with self._lock:
            pending = self._closed_batches()
        if not self._wait_for(pending, timeout):
            open_count = sum(not delivery.has_run_callbacks for delivery in pending)
            raise DeliveryTimeoutError(
                "flush() did not end in time",
                expected=f"within {timeout} s",
                found=f"{open_count} batches without an outcome",
            )
        if self._settings.acks != -1:
            with self._thread_state.round_lock:
                self._thread_state.sender.publish_unsynced()

    def _closed_batches(self) -> list[Delivery]:
        """Close all batches, and return the deliveries whose callbacks have not run.

        The caller holds the lock.
        """
        self._accumulator.close_all()
        self._thread_state.work_added.notify()
        return (
            self._accumulator.pending()
            + self._thread_state.sender.deliveries_without_callbacks()
        )

    def _wait_for(self, pending: Sequence[Delivery], timeout: float | None) -> bool:
        """Wait for the outcomes and callbacks of deliveries.

        Return False if the timeout has passed.
        """
        end_ms = None
        if timeout is not None:
            end_ms = self._fs.monotonic_ms() + milliseconds(timeout)
        # The last delivery first: the batches of a partition get their outcomes in
        # order, so this thread wakes once per partition and not twice per batch.
        for delivery in reversed(pending):
            while True:
                if not self._settings.threaded:
                    self._thread_state.run_round()
                if end_ms is None:
                    remaining_ms = _CHECK_MS
                else:
                    remaining_ms = end_ms - self._fs.monotonic_ms()
                # Without a sender thread, this thread runs the next round. It must wake
                # when a batch becomes ready.
                if not self._settings.threaded:
                    with self._lock:
                        remaining_ms = min(
                            remaining_ms, self._thread_state.time_until_ready_ms()
                        )
                if delivery.wait_for_callbacks(
                    max(0, min(remaining_ms, _CHECK_MS)) / 1000
                ):
                    break
                if end_ms is not None and self._fs.monotonic_ms() >= end_ms:
                    return False
        return True

    def _check_caller(self, call_name: str) -> None:
        if self._fs.forks != self._forks:
            self._check_open()
        if self._thread_state.callback_runner.is_running_here:
            raise ProducerStateError(
                f"{call_name} in a delivery callback would wait for itself"
            )

    # -- information -------------------------------------------------------------------

    def partitions_for(self, topic: str) -> tuple[int, ...]:
        """Return the numbers of a topic's partitions in ascending order.

        Raises:
            TopicNotFoundError: the topic does not exist.
        """
        return self._directory.partitions(topic)

    def metrics(self) -> ProducerMetrics:
        """Return the current counters."""
        counts = self._thread_state.sender.counts
        with self._lock:
            latencies = sorted(counts.latencies_ms) or [0]
            sizes = list(counts.sizes_bytes) or [0]
            return ProducerMetrics(
                records=counts.records,
                bytes=counts.bytes,
                batches=counts.batches,
                retries=counts.retries,
                errors=dict(counts.errors),
                queued_records=self._accumulator.queued_records,
                queued_bytes=self._accumulator.used_bytes,
                waiting_threads=len(self._accumulator.waiting),
                blocked_ms=self._blocked_ms,
                syncs=counts.syncs,
                latency_ms_p50=latencies[len(latencies) // 2],
                latency_ms_p99=latencies[len(latencies) * 99 // 100],
                latency_ms_max=latencies[-1],
                batch_bytes_mean=sum(sizes) // len(sizes),
            )

    def _resolved_count(self) -> int:
        counts = self._thread_state.sender.counts
        return counts.records + sum(counts.errors.values())


class _AtExit:
    """Closes a producer at the exit of the interpreter.

    Its reference to the producer is weak, so the producer can be garbage-collected.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = weakref.ref(producer)

    def __call__(self) -> None:
        producer = self._producer()
        if producer is not None:
            producer.close_at_exit()


def _random_number_below(fs: FS, below: int) -> int:
    """Return a random number from 0 to `below` - 1."""
    return int.from_bytes(fs.random_bytes(8)) % below


def _copy_bytes(value: object, role: str) -> bytes:
    """Return a copy of a key, a value or a header value, because the caller may change
    the original.

    Raises:
        InvalidRecordError: the value has another type.
    """
    if not isinstance(value, (bytes, bytearray, memoryview)):
        advice = ""
        if role in ("key", "value"):
            advice = f"; use {role}_serializer for other types"
        raise InvalidRecordError(
            f"a {role} must be bytes or None{advice}",
            expected="bytes",
            found=type(value).__name__,
        )
    return bytes(value)


def _copy_headers(value: HeadersInput) -> tuple[tuple[str, bytes | None], ...]:
    try:
        pairs = [(name, content) for name, content in header_pairs(value)]
    except (TypeError, ValueError) as error:
        raise InvalidRecordError(
            "headers must be a dict of names and bytes, or pairs",
            found=repr(value)[:80],
        ) from error
    for name, _ in pairs:
        if not isinstance(name, str):
            raise InvalidRecordError(
                "the name of a header must be a str", found=type(name).__name__
            )
    copied: list[tuple[str, bytes | None]] = []
    for name, content in pairs:
        if content is None:
            copied.append((name, None))
        else:
            copied.append((name, _copy_bytes(content, "header value")))
    return tuple(copied)


def _serialize(serializer: Serializer | None, value: Any, name: str) -> Any:
    """Apply a serializer to a key or value. None remains None.

    Raises:
        SerializationError: the serializer raised.
    """
    if serializer is None or value is None:
        return value
    try:
        return serializer(value)
    except Exception as error:
        raise SerializationError(
            f"{name} failed", found=f"{type(error).__name__}: {error}"
        ) from error
