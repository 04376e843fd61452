"""Producer: collects records into batches and writes them to the topics of a directory.

    with logcore.open_dir("data") as data, data.producer() as producer:
        future = producer.send("orders", b"value", key=b"key")
        print(future.result().offset)

Rules (clients reference 2):
- send() adds a record to the open batch of its partition and returns a future. The
  producer's own thread, which the first send() starts, writes ready batches. With
  threaded=False there is no thread: the call that fills a batch writes it, and poll()
  writes due batches.
- With idempotence, which is the default, a batch that is retried is stored once. The
  order of records in a partition never changes.
- Callbacks run in the thread that writes. An exception of a callback has no effect on
  other callbacks or batches.

Readiness and memory belong to accumulator.py, writing and outcomes to sender.py,
futures to futures.py.
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
from logcore.kernels import ProducerFields, Receipt, WorkFields
from logcore.kernels.layout import HeadersInput, RecordInput, Time, header_pairs
from logcore.kernels.sending import HELD_BYTES, RECORD_BYTES
from logcore.producer import bulk
from logcore.producer.accumulator import (
    HEADER_BYTES,
    NO_LIMIT,
    Accumulator,
    Queue,
    UnsentColumns,
)
from logcore.producer.futures import CallbackRunner, Delivery, RecordFuture
from logcore.producer.partitioners import Draw
from logcore.producer.routing import Routes
from logcore.producer.sender import Sender
from logcore.producer.settings import (
    OnDelivery,
    ProducerMetrics,
    ProducerRecord,
    ProducerSettings,
    Serializer,
)
from logcore.producer.transaction_manager import Transacting
from logcore.recordbatch import time_ms
from logcore.reporting import ERROR, log_line

#: How long the exit of the interpreter waits for a producer that was not closed.
_EXIT_SECONDS: Final = 5.0
#: A batch of send_many() may be as large as this number of batches of send(), because
#: its cost is per batch.
_BULK_BATCHES: Final = 4
#: Maximum time after which the sender checks for work, in case no event wakes it.
_CHECK_MS: Final = 1_000


class _Work(WorkFields):
    """The part of a producer that its thread refers to.

    The thread refers to this object only, so that an unused producer can be
    garbage-collected.
    """

    lock: threading.Lock
    accumulator: Accumulator

    def __init__(
        self,
        fs: FS,
        directory: ClientDirectory,
        settings: ProducerSettings,
        draw: Draw,
        coordinator: TransactionCoordinator | None,
    ) -> None:
        self.fs = fs
        #: Guards the accumulator, the routes and the counters.
        self.lock = threading.Lock()
        #: Notified when memory is freed.
        self.room = threading.Condition(self.lock)
        #: Notified when the sender has work.
        self.news = threading.Condition(self.lock)
        #: Held during a round.
        self.writing = threading.Lock()
        #: Whether records are refused. Written under the lock, but by the garbage
        #: collector without it.
        self.is_closing = False
        #: Whether the thread must end. Written under the lock.
        self.is_over = False
        self.teller = CallbackRunner(settings.interceptors)
        self.accumulator = Accumulator(settings, self.teller, draw)
        self.transacting: Transacting | None = None
        if coordinator is not None:
            name = str(settings.transactional_id)
            if settings.two_phase:
                timeout_ms = NO_TIMEOUT
            else:
                timeout_ms = settings.transaction_timeout_ms
            self.transacting = Transacting(fs, coordinator, name, timeout_ms, self.room)
        self.sender = Sender(
            fs,
            directory,
            settings,
            self.accumulator,
            self.teller,
            self.room,
            self.transacting,
        )

    def round(self, *, closed_only: bool = False) -> bool:
        """Write the ready batches, and return whether there were any.

        A callback is part of a round, so in a callback this has no effect.
        """
        if self.teller.is_me:
            return False
        with self.writing:
            return self.sender.round(closed_only=closed_only)

    def due_ms(self) -> int:
        """Return the time until a batch is ready if no record arrives.

        The lock is held.
        """
        next_ms = self.accumulator.next_ms()
        if next_ms is None:
            return _CHECK_MS
        return min(_CHECK_MS, max(0, next_ms - self.fs.monotonic_ms()))

    def run(self) -> None:
        """Run rounds until the producer is closed. This is the producer's thread."""
        while True:
            try:
                if self.round():
                    continue
                with self.writing:
                    self.sender.publish_unsynced()
            except Exception as error:
                # No batch is lost: batches without an outcome are retried.
                log_line("producer", ERROR, "a round of the sender failed: %r", error)
            with self.lock:
                if self.is_closing:
                    self.accumulator.close_all()
                if self.is_over or (self.is_closing and not self.accumulator.active):
                    return
                self.news.wait(self.due_ms() / 1000)


class Producer(ProducerFields, Closeable):
    """A producer of records. LogDir.producer() creates it.

    A `with` block closes it. Any thread may call its methods.
    """

    _fs: FS
    _work: _Work

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
        draw = functools.partial(_drawn, fs)
        self._work = _Work(fs, directory, settings, draw, coordinator)
        self._accumulator = self._work.accumulator
        self._lock = self._work.lock
        self._routes = Routes(directory, settings, self._accumulator, draw)
        self._thread: threading.Thread | None = None
        self._blocked_ms = 0
        # Computed once, because each send() uses these values.
        self._memory_bytes = settings.buffer_memory
        self._memory_records = settings.buffer_records or NO_LIMIT
        self._most_bytes = min(
            settings.max_request_size, settings.buffer_memory - HELD_BYTES
        )
        self._now_ms = fs.now_ms
        self._is_told = bool(settings.interceptors) or settings.on_delivery is not None
        self._prepares = bool(
            settings.interceptors
            or settings.key_serializer
            or settings.value_serializer
        )
        self._forks = fs.forks
        # If records are only bytes and the result is only a future, send() can use the
        # fast path of kernels/sending.py.
        is_plain = coordinator is None and not self._is_told and not self._prepares
        self._uses_fast_path = is_plain and offers_descriptors(fs)
        self._known_routes = self._routes.known
        self._future_type = RecordFuture
        self._at_exit = _AtExit(self)
        atexit.register(self._at_exit)

    # -- opening and closing -----------------------------------------------------------

    def __del__(self) -> None:
        work = getattr(self, "_work", None)
        if work is None or work.is_closing or self._fs.forks != self._forks:
            return
        # No lock is acquired here: the garbage collector runs in any thread, at any
        # point.
        work.is_closing = True
        atexit.unregister(self._at_exit)
        if work.accumulator.active:
            outcome = "is lost"
            if self._settings.threaded:
                outcome = "is written within a second"
            what = f"a producer of {self._directory.path} was not closed; its queued data {outcome}"
            warnings.warn(what, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "closed"
        if not self._work.is_closing:
            state = f"{self._accumulator.queued_records} records queued"
        return f"<Producer of {self._directory.path}, {state}>"

    def close(self, timeout: float | None = None) -> None:
        """Write the queued records, wait for their outcomes, and close the producer.

        Records that are not written within `timeout` seconds fail with
        ProducerClosedError. In a callback, the timeout is 0. A second call has no
        effect.
        """
        work = self._work
        if self._fs.forks != self._forks:  # the parent process writes the queue
            work.is_closing = True
            return
        # Step 1: accept no more records, and close the open batches.
        with self._lock:
            if work.is_over:
                return
            work.is_closing = True
            pending = self._closed_batches()
            work.room.notify_all()
        # Step 2: wait for the outcomes. A callback is part of a round: it cannot wait
        # for other records, and the lock of the round is held already.
        is_callback = work.teller.is_me
        if is_callback:
            timeout = 0.0
        is_done = self._wait_for(pending, timeout)
        # Step 3: end the thread, and fail the remaining batches.
        with self._lock:
            work.is_over = True
            work.news.notify_all()
        with contextlib.ExitStack() as stack:
            if not is_callback:
                stack.enter_context(work.writing)
            if not is_done:
                work.sender.fail_all()
            work.sender.publish_unsynced()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_EXIT_SECONDS)
        atexit.unregister(self._at_exit)

    def close_at_exit(self) -> None:
        """Close the producer at the exit of the interpreter, with a warning."""
        if self._work.is_closing or self._fs.forks != self._forks:
            return
        what = f"a producer of {self._directory.path} was not closed"
        warnings.warn(what, ResourceWarning, stacklevel=2, source=self)
        self.close(_EXIT_SECONDS)

    def _check_open(self) -> None:
        if self._fs.forks != self._forks:
            raise ForkedWriterError(
                "the producer was made by a parent process; make another in the child",
                path=self._directory.path,
            )
        if self._work.is_closing:
            raise ProducerClosedError(
                "the producer is closed", path=self._directory.path
            )
        if self._work.transacting is not None:
            self._work.transacting.check_sending()

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
        future: RecordFuture | None = self._send_fast(
            topic, value, key, partition, headers, timestamp_ms, on_delivery
        )
        if future is not None:
            return future
        # Step 1: prepare and measure the record.
        if self._prepares:
            record = ProducerRecord(topic, value, key, partition, headers, timestamp_ms)
            topic, value, key, partition, headers, timestamp_ms = self._prepared(record)
        key_size = -1
        value_size = -1
        size_bytes = RECORD_BYTES
        if key is not None:
            if type(key) is not bytes:
                key = _copied(key, "key")
            key_size = len(key)
            size_bytes += key_size
        if value is not None:
            if type(value) is not bytes:
                value = _copied(value, "value")
            value_size = len(value)
            size_bytes += value_size
        if headers:
            headers = _copied_headers(headers)
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
        if size_bytes > self._most_bytes:
            self._refuse_size(size_bytes)
        # Step 2: reserve memory and add the record to the batch, with the lock.
        accumulator = self._accumulator
        work = self._work
        is_new = False
        with self._lock:
            if (
                work.is_closing
                or work.transacting is not None
                or self._fs.forks != self._forks
            ):
                self._check_open()
            if accumulator.waiting or self._lacks_room(size_bytes + HELD_BYTES, 1):
                self._wait_for_room(size_bytes + HELD_BYTES, 1)
            queue = self._routes.queue(topic, key, partition, size_bytes)
            batch = queue.filling
            # Inlined ProducerBatch.fits(): the call would take 0.1 of 2 us.
            if (
                batch is None
                or batch.size_bytes + size_bytes > batch.limit_bytes
                or len(batch.records) >= batch.most_records
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
            accumulator.used_bytes += size_bytes + HELD_BYTES
            accumulator.used_records += 1
            if on_delivery is not None:
                batch.delivery.callbacks.append((future, on_delivery))
            if self._is_told:
                batch.delivery.callbacks.append((future, self._settings.on_delivery))
            if is_new:
                work.news.notify()
        if is_new:
            self._start()
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
        gathered = bulk.BatchOutcomes()
        with self._lock:
            self._check_open()
            shares = list(
                self._routes.divide(
                    topic, partition, keys if partition is None else None, sizes
                )
            )
        for queue, places in shares:
            if places is None:
                part = rows
            else:
                part = [rows[place] for place in places.tolist()]
            if not self._send_part(
                queue, part, sizes if places is None else sizes[places], gathered
            ):
                break
        gathered.add(None, None)
        return gathered.future

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

        The arrays must not change until the future is done. In all other respects, the
        method behaves as send_many().
        """
        # Step 1: convert the arguments.
        columns = UnsentColumns(
            *input_columns("send_columns", keys, values, timestamps_ms)
        )
        # Step 2: divide the records among the partitions, and queue them.
        sizes = bulk.sizes_of_columns(columns)
        gathered = bulk.BatchOutcomes()
        with self._lock:
            self._check_open()
            shares = list(self._routes.divide(topic, partition, columns.keys, sizes))
        for queue, places in shares:
            if places is None:
                part = columns
            else:
                part = bulk.taken(columns, places)
            if not self._send_part(
                queue, part, sizes if places is None else sizes[places], gathered
            ):
                break
        gathered.add(None, None)
        return gathered.future

    def _prepared(self, record: ProducerRecord) -> ProducerRecord:
        """Apply the interceptors and serializers to a record."""
        for interceptor in self._settings.interceptors:
            found = call(interceptor.on_send, record)
            if isinstance(found, ProducerRecord):
                record = found
        key = _serialized(self._settings.key_serializer, record.key, "key_serializer")
        value = _serialized(
            self._settings.value_serializer, record.value, "value_serializer"
        )
        return record._replace(key=key, value=value)

    def _refuse_size(self, size_bytes: int) -> None:
        raise RecordTooLargeError(
            "the record is larger than max_request_size or buffer_memory",
            expected=f"at most {self._most_bytes} bytes",
            found=f"{size_bytes} bytes",
        )

    def _send_part(
        self,
        queue: Queue,
        records: list[Any] | UnsentColumns,
        sizes: bulk.Sizes,
        gathered: bulk.BatchOutcomes,
    ) -> bool:
        """Queue the records of one partition as separate batches.

        Return False if there was no room.
        """
        settings = self._settings
        largest = int(sizes.max(initial=0))
        if largest > self._most_bytes:
            self._refuse_size(largest)
        most_bytes = min(
            _BULK_BATCHES * settings.batch_size,
            settings.max_request_size,
            settings.buffer_memory // 2,
        )
        accumulator = self._accumulator
        most_records = min(settings.batch_records or NO_LIMIT, self._memory_records)
        for start, stop, size_bytes in bulk.cuts(sizes, most_bytes, most_records):
            held_bytes = size_bytes + HELD_BYTES * (stop - start)
            with self._lock:
                try:
                    self._check_open()
                    if accumulator.waiting or self._lacks_room(
                        held_bytes, stop - start
                    ):
                        self._wait_for_room(held_bytes, stop - start)
                except LogcoreError as error:
                    gathered.fail(error)
                    return False
                part: UnsentColumns | list[Any]
                if isinstance(records, UnsentColumns):
                    part = records.cut(start, stop)
                else:
                    part = records[start:stop]
                batch = accumulator.add(
                    queue, part, size_bytes, self._fs.monotonic_ms()
                )
                batch.delivery.gathered = gathered
                gathered.expect()
                self._work.news.notify()
            self._start()
        return True

    def _lacks_room(self, held_bytes: int, records: int) -> bool:
        """Return whether this addition would exceed buffer_memory or buffer_records."""
        accumulator = self._accumulator
        return (
            accumulator.used_bytes + held_bytes > self._memory_bytes
            or accumulator.used_records + records > self._memory_records
        )

    def _wait_for_room(self, held_bytes: int, records: int) -> None:
        """Wait until there is room. The lock is held.

        Raises:
            BufferFullError: there was no room within max_block_ms.
        """
        work = self._work
        accumulator = self._accumulator
        if work.teller.is_me:
            raise BufferFullError(
                "the memory of the producer is full, and callbacks must end before any is freed"
            )
        ticket = object()  # this thread's place in the queue
        accumulator.waiting.append(ticket)
        began_ms = self._fs.monotonic_ms()
        try:
            work.news.notify()  # while a thread waits, open batches are ready too
            while accumulator.waiting[0] is not ticket or self._lacks_room(
                held_bytes, records
            ):
                if not self._settings.threaded and self._round_unlocked():
                    continue
                left_ms = (
                    began_ms + self._settings.max_block_ms - self._fs.monotonic_ms()
                )
                if left_ms <= 0:
                    raise BufferFullError(
                        "the memory of the producer is full",
                        expected=f"room for {held_bytes} bytes, {records} records in {self._settings.max_block_ms} ms",
                        found=f"{accumulator.used_bytes} bytes, {accumulator.used_records} records in use",
                    )
                if not self._settings.threaded:
                    left_ms = min(left_ms, max(1, work.due_ms()))
                work.room.wait(left_ms / 1000)
                self._check_open()
        finally:
            accumulator.waiting.remove(ticket)
            work.room.notify_all()
            self._blocked_ms += self._fs.monotonic_ms() - began_ms

    def _round_unlocked(self) -> bool:
        """Run a round for a caller that holds the lock."""
        self._lock.release()
        try:
            return self._work.round()
        finally:
            self._lock.acquire()

    # -- writing -----------------------------------------------------------------------

    def _start(self) -> None:
        """Make sure that a new batch is written.

        This starts the thread. Without a thread, it writes the full batches.
        """
        if not self._settings.threaded:
            self._work.round(closed_only=True)
        elif self._thread is None:
            with self._lock:
                if self._thread is None and not self._work.is_over:
                    self._thread = threading.Thread(
                        target=self._work.run, name="logcore-producer", daemon=True
                    )
                    self._thread.start()

    def poll(self, timeout: float = 0) -> int:
        """Write due batches and run callbacks, or wait up to `timeout` seconds for
        such work.

        Return the number of records that got their outcome. A producer with a thread
        only waits.

        Raises:
            ProducerStateError: a callback called this method.
            ForkedWriterError: a parent process created the producer.
        """
        self._check_caller("poll()")
        end_ms = self._fs.monotonic_ms() + milliseconds(timeout)
        before = self._settled()
        while True:
            if not self._settings.threaded:
                while self._work.round():
                    pass
            with self._lock:
                left_ms = end_ms - self._fs.monotonic_ms()
                count = self._settled() - before
                if count or left_ms <= 0:
                    return count
                self._work.room.wait(min(left_ms, self._work.due_ms() or 1) / 1000)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all earlier records have their outcomes.

        Their callbacks have run too.

        Raises:
            DeliveryTimeoutError: some records were left after `timeout` seconds.
            ProducerStateError: a callback called this method.
            ForkedWriterError: a parent process created the producer.
        """
        self._check_caller("flush()")
        with self._lock:
            pending = self._closed_batches()
        if not self._wait_for(pending, timeout):
            left = sum(not delivery.has_run_callbacks for delivery in pending)
            raise DeliveryTimeoutError(
                "flush() did not end in time",
                expected=f"within {timeout} s",
                found=f"{left} batches left",
            )
        if self._settings.acks != -1:
            with self._work.writing:
                self._work.sender.publish_unsynced()

    def _closed_batches(self) -> list[Delivery]:
        """Close all batches, and return the deliveries to wait for. The lock is held."""
        self._accumulator.close_all()
        self._work.news.notify()
        return self._accumulator.pending() + self._work.sender.without_callbacks()

    def _wait_for(self, pending: Sequence[Delivery], timeout: float | None) -> bool:
        """Wait for the outcomes and callbacks of deliveries.

        Return False if the timeout has passed.
        """
        end_ms = None
        if timeout is not None:
            end_ms = self._fs.monotonic_ms() + milliseconds(timeout)
        # The last one first: the batches of a partition end in order, so this thread
        # wakes once for a partition and not twice for each batch.
        for delivery in reversed(pending):
            while True:
                if not self._settings.threaded:
                    self._work.round()
                if end_ms is None:
                    left_ms = _CHECK_MS
                else:
                    left_ms = end_ms - self._fs.monotonic_ms()
                # Without a thread, this thread runs the next round, so it wakes when a
                # batch is due.
                if not self._settings.threaded:
                    with self._lock:
                        left_ms = min(left_ms, self._work.due_ms())
                if delivery.wait_for_callbacks(max(0, min(left_ms, _CHECK_MS)) / 1000):
                    break
                if end_ms is not None and self._fs.monotonic_ms() >= end_ms:
                    return False
        return True

    def _check_caller(self, what: str) -> None:
        if self._fs.forks != self._forks:
            self._check_open()
        if self._work.teller.is_me:
            raise ProducerStateError(
                f"{what} in a delivery callback would wait for itself"
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
        counts = self._work.sender.counts
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

    def _settled(self) -> int:
        counts = self._work.sender.counts
        return counts.records + sum(counts.errors.values())


class _AtExit:
    """Closes a producer at the exit of the interpreter.

    It does not keep the producer alive until then.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = weakref.ref(producer)

    def __call__(self) -> None:
        producer = self._producer()
        if producer is not None:
            producer.close_at_exit()


def _drawn(fs: FS, below: int) -> int:
    """Return a random number from 0 to `below` - 1."""
    return int.from_bytes(fs.random_bytes(8)) % below


def _copied(given: object, what: str) -> bytes:
    """Return a copy of bytes that their owner may change.

    Raises:
        InvalidRecordError: the value has another type.
    """
    if not isinstance(given, (bytes, bytearray, memoryview)):
        raise InvalidRecordError(
            f"a {what} must be bytes or None; {what}_serializer turns other things into bytes",
            expected="bytes",
            found=type(given).__name__,
        )
    return bytes(given)


def _copied_headers(given: HeadersInput) -> tuple[tuple[str, bytes | None], ...]:
    try:
        pairs = [(name, content) for name, content in header_pairs(given)]
    except (TypeError, ValueError) as error:
        raise InvalidRecordError(
            "headers are a dict, or pairs, of a name and bytes", found=repr(given)[:80]
        ) from error
    for name, _ in pairs:
        if not isinstance(name, str):
            raise InvalidRecordError(
                "the name of a header is a text", found=type(name).__name__
            )
    copied: list[tuple[str, bytes | None]] = []
    for name, content in pairs:
        if content is None:
            copied.append((name, None))
        else:
            copied.append((name, _copied(content, "header")))
    return tuple(copied)


def _serialized(serializer: Serializer | None, given: Any, what: str) -> Any:
    """Apply a serializer to a key or value. None remains None.

    Raises:
        SerializationError: the serializer raised.
    """
    if serializer is None or given is None:
        return given
    try:
        return serializer(given)
    except Exception as error:
        raise SerializationError(
            f"{what} failed", found=f"{type(error).__name__}: {error}"
        ) from error
