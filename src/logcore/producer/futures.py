"""The outcome of a batch, and the futures of its records, which all wait for that
outcome.

Rules:
- A plain Future creates a lock of its own, which costs more than sending the record.
  Here all futures of a batch share the condition of its Delivery.
  concurrent.futures.wait(), as_completed() and asyncio.wrap_future() work with them.
- An outcome is final. Callbacks run once, outside all locks. The callbacks of a
  partition run in the order of its offsets.
- A batch that is split has two Deliveries instead of its own. They share its condition
  and its waiting threads. Records are numbered by their index in the original batch.

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
_MAKE: Final = functools.partial(tuple.__new__, RecordMetadata)
#: The names of concurrent.futures for states.
_PENDING: Final = "PENDING"
_FINISHED: Final = "FINISHED"


class CallbackRunner:
    """Runs the callbacks of one producer. `thread` is the thread that runs them now;
    only that thread writes it.
    """

    def __init__(self, interceptors: tuple[ProducerInterceptor, ...]) -> None:
        self.interceptors = interceptors
        self.thread: int | None = None

    @property
    def is_me(self) -> bool:
        """Return whether this thread runs a callback. Such a thread must not wait for
        another delivery.
        """
        return self.thread == threading.get_ident()

    def run_callbacks(self, delivery: Delivery) -> None:
        """Run the callbacks of a resolved delivery. The sender calls it in one thread
        at a time.
        """
        self.thread = threading.get_ident()
        try:
            delivery.run_callbacks(self.interceptors)
        finally:
            self.thread = None


class OutcomeSource(Protocol):
    """Waits for the outcomes of many batches."""

    def expect(self) -> None: ...
    def add(self, receipt: Receipt | None, error: Exception | None) -> None: ...


class Delivery:
    """The outcome of one batch. The sender writes it under the condition; any thread
    reads it.

    `first` is the number of the first record. `receipt` is the receipt of the append,
    and `error` the reason of the failure; `resolved` is whether one of them is final.
    `has_told` is whether its callbacks have run. `parts` contains the two parts of a
    split batch, and the first number of the second part. `gives_time` is whether the
    log has set the times of the records. `callbacks` contains the callbacks of records
    in their order, and `later` those of futures. `gathered` is the object that waits
    for the outcome of many batches.
    """

    __slots__ = (
        "callbacks",
        "condition",
        "error",
        "first",
        "gathered",
        "gives_time",
        "has_told",
        "later",
        "level",
        "partition",
        "parts",
        "receipt",
        "resolved",
        "teller",
        "topic",
        "waiting",
    )

    def __init__(
        self,
        topic: str,
        partition: int,
        teller: CallbackRunner,
        first: int = 0,
        origin: Delivery | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.teller = teller
        self.first = first
        self.condition: threading.Condition
        self.waiting: dict[RecordFuture, list[Any]]
        self.gathered: OutcomeSource | None
        if origin is None:
            self.condition = threading.Condition()
            self.waiting = {}
            self.gathered = None
        else:  # futures of a split batch wait at the origin, and its parts resolve them
            self.condition = origin.condition
            self.waiting = origin.waiting
            self.gathered = origin.gathered
        self.callbacks: deque[tuple[RecordFuture, OnDelivery | None]] = deque()
        self.later: list[tuple[RecordFuture, Callable[[Any], object]]] = []
        self.receipt: Receipt | None = None
        self.error: Exception | None = None
        self.gives_time = False
        self.level: Level = "os"
        self.resolved = False
        self.has_told = False
        self.parts: tuple[Delivery, Delivery, int] | None = None

    @property
    def has_run_callbacks(self) -> bool:
        """Return whether the outcome is final and the callbacks of all parts have run."""
        if self.parts is not None:
            return self.parts[0].has_run_callbacks and self.parts[1].has_run_callbacks
        return self.has_told

    def wait_for_callbacks(self, seconds: float | None) -> bool:
        """Wait until the callbacks have run; return whether that happened in time."""
        with self.condition:
            return self.condition.wait_for(lambda: self.has_run_callbacks, seconds)

    def split(self, at: int) -> tuple[Delivery, Delivery]:
        """Return two deliveries: for the records before number `at`, and for the
        others. The futures find the new deliveries through this delivery.
        """
        with self.condition:
            front = Delivery(self.topic, self.partition, self.teller, self.first, self)
            back = Delivery(self.topic, self.partition, self.teller, at, self)
            front.callbacks = deque(
                entry for entry in self.callbacks if entry[0].index < at
            )
            back.callbacks = deque(
                entry for entry in self.callbacks if entry[0].index >= at
            )
            front.later = [
                listener for listener in self.later if listener[0].index < at
            ]
            back.later = [
                listener for listener in self.later if listener[0].index >= at
            ]
            self.callbacks = deque()
            self.later = []
            if self.gathered is not None:
                self.gathered.expect()  # the two parts have two outcomes instead of one
            self.parts = (front, back, at)
            return front, back

    def resolve(
        self,
        receipt: Receipt | None,
        error: Exception | None,
        *,
        level: Level,
        gives_time: bool,
    ) -> None:
        """Make the outcome final, and wake the threads that wait for it.

        The caller then runs the callbacks with run_callbacks(), outside the sender's locks. A
        second call, after an interrupt, has no effect.
        """
        with self.condition:
            if self.resolved:
                self.condition.notify_all()
                return
            self.receipt = receipt
            self.error = error
            self.level = level
            self.gives_time = gives_time
            self.resolved = True
            for future, waiters in self.waiting.items():
                if future.delivery() is not self:  # the other part has its record
                    continue
                for waiter in waiters:
                    if error is None:
                        waiter.add_result(future)
                    else:
                        waiter.add_exception(future)
            self.condition.notify_all()

    def run_callbacks(self, interceptors: tuple[ProducerInterceptor, ...]) -> None:
        """Run the callbacks of the records, then the callbacks of the futures."""
        callbacks = self.callbacks
        error = self.error
        while callbacks:
            future, callback = callbacks.popleft()
            metadata = future.metadata(self)
            for interceptor in interceptors:
                call(interceptor.on_acknowledgement, metadata, error)
            if callback is None:
                continue
            # The body of call(), because a call takes a tenth of the time of a callback.
            try:
                callback(error, metadata)
            except Exception as raised:
                report(raised, callback)
        if self.gathered is not None:
            receipt = self.receipt
            if receipt is not None and receipt.durability != self.level:
                receipt = receipt._replace(durability=self.level)
            self.gathered.add(receipt, self.error)
            self.gathered = None
        while True:
            with self.condition:
                if not self.later:
                    self.has_told = True
                    self.condition.notify_all()
                    return
                later = self.later
                self.later = []
            for future, listener in later:
                call(listener, future)


class RecordFuture(FutureFields, Future[RecordMetadata]):
    """The future of one sent record, made by Producer.send().

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

        It does not call Future.__init__(), which creates a lock. _send_fast() does
        not call this method.
        """
        self.batch = delivery
        self.index = index
        self.sent_ms = sent_ms
        self.key_size = key_size
        self.value_size = value_size

    def delivery(self) -> Delivery:
        """Return the delivery with the outcome of this record: of its batch, or of a
        part of the batch.
        """
        found: Delivery = self.batch
        while found.parts is not None:
            front, back, at = found.parts
            if self.index < at:
                found = front
            else:
                found = back
        return found

    def metadata(self, delivery: Delivery) -> RecordMetadata:
        """Return the metadata of the record. The offset is -1 after a failure."""
        receipt = delivery.receipt
        offset = -1
        sent_ms = self.sent_ms
        kind = "create"
        if receipt is not None:
            offset = receipt.offset + self.index - delivery.first
        if delivery.gives_time:
            kind = "append"
            if receipt is None:
                sent_ms = -1
            else:
                sent_ms = receipt.timestamp_ms
        topic = delivery.topic
        partition = delivery.partition
        return _MAKE(
            (
                topic,
                partition,
                offset,
                sent_ms,
                kind,
                self.key_size,
                self.value_size,
                delivery.level,
            )
        )

    # -- like a Future -----------------------------------------------------------------

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        batch: Delivery = self.batch
        return batch.condition

    @property
    def _state(self) -> str:  # type: ignore[override]
        if self.delivery().resolved:
            return _FINISHED
        return _PENDING

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        batch: Delivery = self.batch
        return batch.waiting.setdefault(self, [])

    def __repr__(self) -> str:
        delivery = self.delivery()
        if not delivery.resolved:
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
        return self.delivery().resolved

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Return the metadata of the stored record. `timeout` is in seconds.

        Raises concurrent.futures.TimeoutError, the reason of the record's failure, or
        ProducerStateError in a callback of a delivery that would have to end first.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.metadata(self.delivery())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the reason of the record's failure, or None if it is stored. Waits and
        raises errors like result().
        """
        delivery = self.delivery()
        if not delivery.resolved:
            delivery = self._wait(timeout)
        return delivery.error

    def _wait(self, timeout: float | None) -> Delivery:
        if self.batch.teller.is_me:
            raise ProducerStateError(
                "a delivery callback waits for a delivery that comes after it"
            )
        with self.batch.condition:
            if not self.batch.condition.wait_for(self.done, timeout):
                raise FutureTimeoutError
        return self.delivery()

    def add_done_callback(self, fn: Callable[[Future[RecordMetadata]], object]) -> None:
        """Call fn(future) when the outcome is final, or at once if it is final already.
        An error of fn is reported to sys.unraisablehook.
        """
        with self.batch.condition:
            delivery = self.delivery()
            if not delivery.has_told:
                delivery.later.append((self, fn))
                return
        call(fn, self)

    def set_result(self, result: object) -> None:
        raise ProducerStateError("only the producer settles this future")

    def set_exception(self, exception: object) -> None:
        raise ProducerStateError("only the producer settles this future")
