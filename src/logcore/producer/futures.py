"""The outcome of a batch (Delivery), and the futures of its records.

Rules:
- Each concurrent.futures.Future creates a lock, which costs more than sending the
  record. A RecordFuture uses the condition of its batch's Delivery instead.
  concurrent.futures.wait(), as_completed() and asyncio.wrap_future() work with them.
- An outcome is final. Callbacks run once, outside all locks. The callbacks of a
  partition run in the order of its offsets.
- Splitting a batch replaces its Delivery by two new ones, which share the condition and
  the waiting threads. Records keep their index in the original batch.

This module neither sends nor encodes.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, Protocol

from logcore.callbacks import call, report
from logcore.errors import ProducerStateError
from logcore.kernels import FutureFields, Receipt
from logcore.kernels.layout import Level
from logcore.producer.settings import OnDelivery, ProducerInterceptor, RecordMetadata

#: Takes half the time of RecordMetadata(...), which is a Python function.
_NEW_METADATA: Final = functools.partial(tuple.__new__, RecordMetadata)
#: States, with the names of concurrent.futures.
_PENDING: Final = "PENDING"
_FINISHED: Final = "FINISHED"


class CallbackRunner:
    """Runs the callbacks of one producer."""

    def __init__(self, interceptors: tuple[ProducerInterceptor, ...]) -> None:
        self.interceptors = interceptors
        #: The thread that runs callbacks now, or None. Only that thread sets the field.
        self.thread_id: int | None = None

    @property
    def is_running_here(self) -> bool:
        """Return whether the current thread runs a callback. It must not wait for a
        delivery then, because later callbacks run in the same thread.
        """
        return self.thread_id == threading.get_ident()

    def run_callbacks(self, delivery: Delivery) -> None:
        """Run the callbacks of a resolved delivery. The sender calls it in one thread
        at a time.
        """
        self.thread_id = threading.get_ident()
        try:
            delivery.run_callbacks(self.interceptors)
        finally:
            self.thread_id = None


class OutcomeCollector(Protocol):
    """Combines the outcomes of several batches; see bulk.BatchOutcomes."""

    def add_pending(self) -> None: ...
    def add(self, receipt: Receipt | None, error: Exception | None) -> None: ...


class Delivery:
    """The outcome of one batch. The sender sets it under the condition; any thread
    reads it.
    """

    __slots__ = (
        "callback_runner",
        "collector",
        "condition",
        "error",
        "first_index",
        "future_callbacks",
        "future_waiters",
        "is_resolved",
        "level",
        "own_callbacks_have_run",
        "partition",
        "parts",
        "receipt",
        "record_callbacks",
        "topic",
        "uses_append_time",
    )

    def __init__(
        self,
        topic: str,
        partition: int,
        callback_runner: CallbackRunner,
        first_index: int = 0,
        origin: Delivery | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.callback_runner = callback_runner
        #: Index of the first record. It is not 0 in the second part of a split batch.
        self.first_index = first_index
        self.condition: threading.Condition
        #: For each future, the waiters of concurrent.futures.wait() and as_completed().
        self.future_waiters: dict[RecordFuture, list[Any]]
        #: Combines the outcomes of all batches of a send_many() or send_columns().
        self.collector: OutcomeCollector | None
        if origin is None:
            self.condition = threading.Condition()
            self.future_waiters = {}
            self.collector = None
        else:  # a future keeps the condition of its original batch
            self.condition = origin.condition
            self.future_waiters = origin.future_waiters
            self.collector = origin.collector
        #: Callbacks of send(), in the order of the records.
        self.record_callbacks: deque[tuple[RecordFuture, OnDelivery | None]] = deque()
        #: Callbacks of RecordFuture.add_done_callback().
        self.future_callbacks: list[tuple[RecordFuture, Callable[[Any], object]]] = []
        #: Receipt of the append, or None after a failure.
        self.receipt: Receipt | None = None
        #: The reason of the failure, or None.
        self.error: Exception | None = None
        #: Whether the log has set the timestamps of the records.
        self.uses_append_time = False
        self.level: Level = "os"
        #: Whether the receipt or the error is final.
        self.is_resolved = False
        #: Whether the callbacks have run. It remains False for a batch that was split.
        self.own_callbacks_have_run = False
        #: The two parts of a split batch, and the first index of the second part.
        self.parts: tuple[Delivery, Delivery, int] | None = None

    @property
    def has_run_callbacks(self) -> bool:
        """Return whether the outcome is final and the callbacks of all parts have run."""
        if self.parts is not None:
            return self.parts[0].has_run_callbacks and self.parts[1].has_run_callbacks
        return self.own_callbacks_have_run

    def wait_for_callbacks(self, seconds: float | None) -> bool:
        """Wait until the callbacks have run. Return False after `seconds`."""
        with self.condition:
            return self.condition.wait_for(lambda: self.has_run_callbacks, seconds)

    def split(self, split_index: int) -> tuple[Delivery, Delivery]:
        """Return two deliveries: one for the records before `split_index`, and one for
        the other records. A future gets its new delivery from the field `parts`.
        """
        with self.condition:
            first_part = Delivery(
                self.topic, self.partition, self.callback_runner, self.first_index, self
            )
            second_part = Delivery(
                self.topic, self.partition, self.callback_runner, split_index, self
            )
            first_part.record_callbacks = deque(
                entry for entry in self.record_callbacks if entry[0].index < split_index
            )
            second_part.record_callbacks = deque(
                entry
                for entry in self.record_callbacks
                if entry[0].index >= split_index
            )
            first_part.future_callbacks = [
                listener
                for listener in self.future_callbacks
                if listener[0].index < split_index
            ]
            second_part.future_callbacks = [
                listener
                for listener in self.future_callbacks
                if listener[0].index >= split_index
            ]
            self.record_callbacks = deque()
            self.future_callbacks = []
            if self.collector is not None:
                self.collector.add_pending()  # the batch now has two outcomes
            self.parts = (first_part, second_part, split_index)
            return first_part, second_part

    def resolve(
        self,
        receipt: Receipt | None,
        error: Exception | None,
        *,
        level: Level,
        uses_append_time: bool,
    ) -> None:
        """Make the outcome final, and wake the threads that wait for it.

        The caller then runs the callbacks with run_callbacks(), without the sender's
        locks. After an interrupt, the sender calls this again: a second call only
        notifies the waiting threads.
        """
        with self.condition:
            if self.is_resolved:
                self.condition.notify_all()
                return
            self.receipt = receipt
            self.error = error
            self.level = level
            self.uses_append_time = uses_append_time
            self.is_resolved = True
            for future, waiters in self.future_waiters.items():
                # The record is in the other part of a split batch.
                if future.delivery() is not self:
                    continue
                for waiter in waiters:
                    if error is None:
                        waiter.add_result(future)
                    else:
                        waiter.add_exception(future)
            self.condition.notify_all()

    def run_callbacks(self, interceptors: tuple[ProducerInterceptor, ...]) -> None:
        """Run the callbacks of the records, then the callbacks of the futures."""
        callbacks = self.record_callbacks
        error = self.error
        while callbacks:
            future, callback = callbacks.popleft()
            metadata = future.metadata(self)
            for interceptor in interceptors:
                call(interceptor.on_acknowledgement, metadata, error)
            if callback is None:
                continue
            # Inlined callbacks.call(): the call would add a tenth of the time of a
            # callback.
            try:
                callback(error, metadata)
            except Exception as raised:
                report(raised, callback)
        if self.collector is not None:
            receipt = self.receipt
            if receipt is not None and receipt.durability != self.level:
                receipt = receipt._replace(durability=self.level)
            self.collector.add(receipt, self.error)
            self.collector = None
        while True:
            with self.condition:
                if not self.future_callbacks:
                    self.own_callbacks_have_run = True
                    self.condition.notify_all()
                    return
                future_callbacks = self.future_callbacks
                self.future_callbacks = []
            for future, listener in future_callbacks:
                call(listener, future)


class RecordFuture(FutureFields, Future[RecordMetadata]):
    """The future of one sent record. Producer.send() creates it.

    It cannot be cancelled, because a record is never removed from its batch. All
    methods may be called from several threads.
    """

    __slots__ = ()

    def __init__(
        self,
        delivery: Delivery,
        index: int,
        sent_ms: int,
        key_size: int,
        value_size: int,
    ) -> None:
        """Create a future. Users call Producer.send().

        It does not call Future.__init__(), which would create a lock. The compiled
        _send_fast() creates a future without this method.
        """
        self.batch = delivery
        self.index = index
        self.sent_ms = sent_ms
        self.key_size = key_size
        self.value_size = value_size

    def delivery(self) -> Delivery:
        """Return the delivery of the record's batch. If the batch was split, return the
        delivery of the part that contains the record.
        """
        delivery: Delivery = self.batch
        while delivery.parts is not None:
            first_part, second_part, split_index = delivery.parts
            if self.index < split_index:
                delivery = first_part
            else:
                delivery = second_part
        return delivery

    def metadata(self, delivery: Delivery) -> RecordMetadata:
        """Return the metadata of the record. The offset is -1 after a failure."""
        receipt = delivery.receipt
        offset = -1
        sent_ms = self.sent_ms
        timestamp_type = "create"
        if receipt is not None:
            offset = receipt.offset + self.index - delivery.first_index
        if delivery.uses_append_time:
            timestamp_type = "append"
            if receipt is None:
                sent_ms = -1
            else:
                sent_ms = receipt.timestamp_ms
        topic = delivery.topic
        partition = delivery.partition
        return _NEW_METADATA(
            (
                topic,
                partition,
                offset,
                sent_ms,
                timestamp_type,
                self.key_size,
                self.value_size,
                delivery.level,
            )
        )

    # -- the interface of concurrent.futures.Future ------------------------------------

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        batch: Delivery = self.batch
        return batch.condition

    @property
    def _state(self) -> str:  # type: ignore[override]
        if self.delivery().is_resolved:
            return _FINISHED
        return _PENDING

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        batch: Delivery = self.batch
        return batch.future_waiters.setdefault(self, [])

    def __repr__(self) -> str:
        delivery = self.delivery()
        if not delivery.is_resolved:
            return f"<RecordFuture of {delivery.topic}-{delivery.partition}, pending>"
        if delivery.error is not None:
            return f"<RecordFuture {delivery.error!r}>"
        return f"<RecordFuture {self.metadata(delivery)}>"

    def cancel(self) -> bool:
        """Return False, because a record cannot be cancelled."""
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        return False

    def done(self) -> bool:
        return self.delivery().is_resolved

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Return the metadata of the stored record. `timeout` is in seconds.

        Raises the reason of the record's failure, concurrent.futures.TimeoutError, or,
        in a delivery callback, ProducerStateError if the record has no outcome yet.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.metadata(self.delivery())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the reason of the record's failure, or None if the record is stored.
        Waits and raises errors like result().
        """
        delivery = self.delivery()
        if not delivery.is_resolved:
            delivery = self._wait(timeout)
        return delivery.error

    def _wait(self, timeout: float | None) -> Delivery:
        if self.batch.callback_runner.is_running_here:
            raise ProducerStateError(
                "a delivery callback cannot wait for a later delivery"
            )
        with self.batch.condition:
            if not self.batch.condition.wait_for(self.done, timeout):
                raise FutureTimeoutError
        return self.delivery()

    def add_done_callback(self, fn: Callable[[Future[RecordMetadata]], object]) -> None:
        """Call fn(future) when the outcome is final, or at once if it is final already.
        An exception of fn is reported to sys.unraisablehook.
        """
        with self.batch.condition:
            delivery = self.delivery()
            if not delivery.own_callbacks_have_run:
                delivery.future_callbacks.append((self, fn))
                return
        call(fn, self)

    def set_result(self, result: object) -> None:
        raise ProducerStateError("only the producer sets the result of this future")

    def set_exception(self, exception: object) -> None:
        raise ProducerStateError("only the producer sets the result of this future")
