"""The outcome of a batch, and the futures of its records, which all wait for that one
outcome.

Rules:
- A plain Future makes a lock of its own, which costs more than sending the record. Here
  all futures of a batch share the condition of its Delivery; concurrent.futures.wait(),
  as_completed() and asyncio.wrap_future() work with them.
- An outcome is final. Callbacks run once, those of one partition in the order of its
  offsets, outside all locks.
- A batch that is split has two Deliveries instead of its own, which share its condition
  and those who wait. Records are numbered by their place in the batch that they were
  sent in, also in the parts.

Nothing here sends or encodes.
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

#: Half the time of RecordMetadata(...), which is a function in Python.
_MAKE: Final = functools.partial(tuple.__new__, RecordMetadata)
#: States by the names that concurrent.futures gives them.
_PENDING: Final = "PENDING"
_FINISHED: Final = "FINISHED"


class Teller:
    """Runs the callbacks of one producer. thread: the one that runs them now; written
    by that thread alone.
    """

    def __init__(self, interceptors: tuple[ProducerInterceptor, ...]) -> None:
        self.interceptors = interceptors
        self.thread: int | None = None

    @property
    def is_me(self) -> bool:
        """Whether this thread runs a callback, and must not wait for another delivery."""
        return self.thread == threading.get_ident()

    def tell(self, delivery: Delivery) -> None:
        """Runs the callbacks of a delivery that is resolved. One thread at a time,
        which the sender sees to.
        """
        self.thread = threading.get_ident()
        try:
            delivery.tell(self.interceptors)
        finally:
            self.thread = None


class OutcomeSource(Protocol):
    """Waits for the outcomes of many batches."""

    def expect(self) -> None: ...
    def add(self, receipt: Receipt | None, error: Exception | None) -> None: ...


class Delivery:
    """The outcome of one batch. Written by the sender under the condition; read by
    anyone.

    first: number of its first record. receipt: of its append, once that is done. error:
    why it failed. resolved: one of them is final. has_told: its callbacks have run.
    parts: the two it was split into, and the number that the second begins with.
    gives_time: the log has set the times of the records. callbacks: those of records,
    in their order; later: those of futures. gathered: who waits for the outcome of many
    batches.
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
        teller: Teller,
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
        else:  # a part: the futures of the origin wait there, and are resolved by its parts
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
    def is_told(self) -> bool:
        """Whether the outcome is final and its callbacks have run, of all parts."""
        if self.parts is not None:
            return self.parts[0].is_told and self.parts[1].is_told
        return self.has_told

    def wait_told(self, seconds: float | None) -> bool:
        """Waits for that; whether it came in time."""
        with self.condition:
            return self.condition.wait_for(lambda: self.is_told, seconds)

    def split(self, at: int) -> tuple[Delivery, Delivery]:
        """Two for the records before number `at` and from it on. Their futures find
        their way from this one.
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
                self.gathered.expect()  # one outcome more: two parts instead of the one batch
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
        """Makes the outcome final, and wakes threads that wait for it. tell() follows,
        outside the sender's locks. A second call, after an interrupt, changes nothing.
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
                if future.delivery() is not self:  # its record went to the other part
                    continue
                for waiter in waiters:
                    if error is None:
                        waiter.add_result(future)
                    else:
                        waiter.add_exception(future)
            self.condition.notify_all()

    def tell(self, interceptors: tuple[ProducerInterceptor, ...]) -> None:
        """Runs the callbacks of the records, then those of the futures."""
        callbacks = self.callbacks
        error = self.error
        while callbacks:
            future, callback = callbacks.popleft()
            metadata = future.metadata(self)
            for interceptor in interceptors:
                call(interceptor.on_acknowledgement, metadata, error)
            if callback is None:
                continue
            # As call() does, without the call: a tenth of what a callback costs.
            try:
                callback(error, metadata)
            except Exception as raised:
                report(raised, callback)
        if self.gathered is not None:
            receipt = None
            if self.receipt is not None:
                receipt = self.receipt._replace(durability=self.level)
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
    """Of one record that was sent. Cannot be cancelled: a record is never taken out of
    its batch.

    Made by Producer.send(). All methods may be called from several threads.
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
        """Not for users. Does not call Future's, which makes a lock; nor does
        send_quickly() call this.
        """
        self.batch = delivery
        self.index = index
        self.sent_ms = sent_ms
        self.key_size = key_size
        self.value_size = value_size

    def delivery(self) -> Delivery:
        """The one whose outcome is this record's: that of its batch, or of the part it
        went to.
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
        """The metadata of the record; offset -1 after a failure."""
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

    # -- as of a Future ----------------------------------------------------------------

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
        """False: the record is on its way."""
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        return False

    def done(self) -> bool:
        return self.delivery().resolved

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """The metadata of the stored record. timeout: seconds.

        Raises concurrent.futures.TimeoutError, why the record failed, or
        ProducerStateError in a callback of a delivery that would have to end first.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self.metadata(self.delivery())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why the record failed, None where it is stored. Waits and raises as result()
        does.
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
        """Calls fn(future) when the outcome is final; at once if it is. Its errors go
        to sys.unraisablehook.
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
