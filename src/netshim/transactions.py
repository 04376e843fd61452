"""Runs the broker's transaction coordinator.

It executes the effects of logcore.coordination.transactions.

Rules:
- A record is appended to `__transaction_state`. It is durable before the coordinator is
  notified, if the durability policy makes an append wait for the disk. With other
  policies, the next start aborts transactions that a power loss left open.
- A marker is appended to its partition after all earlier appends. It is as durable as a
  record before the coordinator is notified. After a marker in a partition of
  `__consumer_offsets`, the committed offsets of that partition are valid immediately.
- When a record could not be stored, the coordinator ends and its effects are dropped.
  Another coordinator loads the stored records, after all work that is queued.
- The stored records are read when the broker starts, because there may be transactions
  to end.

This module does not decide how a request changes a transaction (logcore.coordination
does), and maps no requests and codes (handlers/transactions.py does).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Final, TypeVar

import attrs

from logcore import (
    CoordinatorFencedError,
    InvalidProducerEpochError,
    InvalidRecordError,
    Log,
    LogcoreError,
    Receipt,
    TopicNotFoundError,
)
from logcore.coordination.transaction_effects import (
    AbortOrphan,
    AddPartitions,
    AllocateProducerId,
    CancelTransactionTimer,
    Effect,
    Request,
    Result,
    SetTransactionTimer,
    StoreTransaction,
    TimedOut,
    TransactionError,
    TransactionReply,
    WriteMarkers,
)
from logcore.coordination.transactions import (
    EXPIRY_CHECK_MS,
    RETRY_MS,
    TransactionMachine,
)
from logcore.coordinators.durable_queue import sync_present
from logcore.coordinators.orphans import find_orphans
from logcore.coordinators.stored_transactions import (
    TRANSACTIONS_CONFIG,
    stored_transactions,
)
from logcore.format.group_records import partition_of
from logcore.format.transaction_records import (
    Partition,
    StoredTransaction,
    transaction_key,
    transaction_value,
)
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from logcore.partition.coordinator_append import marker_epoch
from netshim.coordinators import (
    TransactionalProducer,
    TransactionErrors,
    TransactionsCallback,
    TransactionService,
)
from netshim.internal_topics import InternalTopic
from netshim.loop_host import LoopHost
from netshim.request_log import quoted
from netshim.scheduling import ChunkCounter, Steps, guarded, without_tracebacks
from netshim.state import BrokerState

_log = logging.getLogger("netshim")

#: Approximate number of bytes of a marker.
_MARKER_BYTES: Final = 100

#: Called with a coordinator, and the partitions whose markers must be written again.
Marked = Callable[[TransactionMachine, frozenset[Partition]], None]
#: Called with the result of a request. The coordinator identifies a request by this
#: function.
Callback = Callable[[Result], None]
T = TypeVar("T")


class TransactionHost(LoopHost[Effect], TransactionService):
    """The transaction coordinator of a broker.

    In a cluster, there is one for each partition of `__transaction_state` that the
    broker leads. `only` is that partition.
    """

    def __init__(self, state: BrokerState, only: int | None = None) -> None:
        super().__init__(
            state,
            InternalTopic(
                state,
                TRANSACTIONS_TOPIC,
                state.settings.transactions_partitions,
                TRANSACTIONS_CONFIG,
                always_syncs=False,
                only=only,
            ),
            EXPIRY_CHECK_MS,
        )
        #: Replaced when a record could not be stored, see _restart().
        self._coordinator = self._new()
        state.remembered.size_functions.append(self.held_bytes)
        #: begin() was called.
        self._has_begun = False
        #: Another broker coordinates the transactions of this partition.
        self._is_closed = False
        #: A power loss may have left transactions open. In a cluster, another replica
        #: has their records.
        self._expects_orphans = only is None and not state.logdir.host.was_clean

    def _new(self) -> TransactionMachine:
        remembered = self._state.remembered
        return TransactionMachine(
            self._state.settings.transaction_max_timeout_ms, memory_budget=remembered
        )

    def held_bytes(self) -> int:
        """Return the approximate number of bytes that all transactional ids occupy."""
        return self._coordinator.held_bytes()

    # -- effects

    def _act(self, effects: Iterable[Effect]) -> None:
        super()._act(effects)
        # A call of _act() that is in progress executes the effects, and then restarts.
        if self._is_acting or self._state.is_stopping or self._is_closed:
            return
        if self._coordinator.is_over:
            self._restart()

    def _execute(self, effect: Effect) -> None:
        state = self._state
        match effect:
            case TransactionReply(waiter, result):
                assert callable(waiter), waiter
                guarded(waiter, result)
            case StoreTransaction():
                self._append(self._coordinator, effect)
            case WriteMarkers():
                marked = partial(self._on_marked, effect)
                self._write_markers(self._coordinator, effect, marked)
            case AbortOrphan(producer_id, epoch, partitions):
                # The transactional id of an orphan is unknown.
                markers = WriteMarkers("", producer_id, epoch, False, partitions)
                Markers(state, None, markers, state.now_ms).write()
            case AllocateProducerId():
                state.allocate_producer_id(
                    partial(self._on_producer_id, self._coordinator, effect)
                )
            case SetTransactionTimer(name, at_ms):
                timer = partial(self._time_out, name)
                state.timers.set((self, name), at_ms, timer)
            case CancelTransactionTimer(name):
                state.timers.cancel((self, name))
            case TimedOut(name):
                state.journal.log(
                    logging.WARNING,
                    "transaction timed out",
                    state.now_ms,
                    "the transaction of %s was open too long and is aborted",
                    quoted(name),
                )

    def _append(
        self, coordinator: TransactionMachine, effect: StoreTransaction
    ) -> None:
        name = effect.transactional_id
        key = transaction_key(name)
        value = None if effect.stored is None else transaction_value(effect.stored)
        now_ms = self._state.now_ms

        def write(log: Log) -> Receipt:
            # After a failed record, the coordinator has ended, and another one reads the
            # stored records.
            if coordinator.is_over:
                raise LogcoreError("the coordinator of this record has ended")
            return log.append(value, key=key, timestamp_ms=now_ms, durability="os")

        def finish(error: Exception | None) -> None:
            if error is not None and not coordinator.is_over:
                _log.error(
                    "%s: a record of %r was not stored: %s",
                    TRANSACTIONS_TOPIC,
                    name,
                    error,
                )
            self._act(
                coordinator.stored(effect, self._state.now_ms, failed=error is not None)
            )

        self._topic.append(
            # The size of the record is approximate. It decides whether the append may
            # block.
            name,
            len(key) + len(value or b"") + 32,
            write,
            now_ms,
            finish,
        )

    def _write_markers(
        self, coordinator: TransactionMachine, effect: WriteMarkers, callback: Marked
    ) -> None:
        Markers(self._state, coordinator, effect, self._state.now_ms, callback).write()

    def _on_marked(
        self,
        effect: WriteMarkers,
        coordinator: TransactionMachine,
        failed: frozenset[Partition],
    ) -> None:
        self._act(coordinator.markers_written(effect, failed, self._state.now_ms))

    def _on_producer_id(
        self, coordinator: TransactionMachine, effect: AllocateProducerId, result: Any
    ) -> None:
        # None refuses the request. The client retries.
        producer_id = result if isinstance(result, int) else None
        self._act(
            coordinator.producer_id_allocated(effect, producer_id, self._state.now_ms)
        )

    def _time_out(self, name: str, now_ms: int) -> None:
        self._state.advance_clock(now_ms)
        self._act(self._coordinator.timed_out(name, now_ms))

    def _restart(self) -> None:
        self._coordinator = self._new()
        self._is_loaded = False
        self._stop_expiry()
        self._state.timers.at(self._state.now_ms + RETRY_MS, self._retry_load)

    def _retry_load(self, now_ms: int) -> None:
        if not self._is_closed:
            self.load(now_ms, lambda _: None)

    # -- loading

    def begin(self, now_ms: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            # Without the topic, there was never a transaction.
            if self._topic.exists:
                self.load(now_ms, lambda _: None)

    def _read(self) -> list[Effect]:
        now_ms = self._state.now_ms
        logs = list(self._topic.logs())
        for log in logs:
            # The next records will depend on records that were not synced before a
            # failure.
            sync_present(log)
        effects = self._coordinator.load(stored_transactions(logs), now_ms)
        if self._expects_orphans:
            effects += self._coordinator.adopt(find_orphans(self._state.logdir), now_ms)
        return effects

    def _begin(self, effects: list[Effect]) -> list[Effect]:
        self._expects_orphans = False
        return effects

    def _expire(self, trusted_ms: int) -> list[Effect]:
        return self._coordinator.expire(trusted_ms)

    # -- requests

    def request(self, request: Request, now_ms: int, callback: Callback) -> None:
        self._state.advance_clock(now_ms)
        if self._is_loaded:
            self._act(self._coordinator.handle(request, callback, now_ms))
        else:  # the previous coordinator has ended, and its successor is not loaded yet
            callback(TransactionError.COORDINATOR_NOT_AVAILABLE)

    def create_topic(self) -> None:
        self._topic.create()

    def verified(
        self,
        producer: TransactionalProducer,
        partition: Partition,
        write: Callable[[], T],
    ) -> T | TransactionError:
        if not self._is_loaded:
            return TransactionError.COORDINATOR_NOT_AVAILABLE
        # write() runs in the same iteration of the event loop, so no marker comes
        # between.
        error = self._coordinator.verify(*producer, partition)
        return write() if error is None else error

    def find_stored(
        self, names: Collection[str] | None, callback: TransactionsCallback
    ) -> None:
        callback(self.stored(names))

    def stored(self, names: Collection[str] | None) -> dict[str, StoredTransaction]:
        """Return the last durable records of transactional ids, by default of all."""
        if names is None:
            return self._coordinator.all()
        transactions = {name: self._coordinator.get(name) for name in names}
        return {
            name: stored for name, stored in transactions.items() if stored is not None
        }

    def stop(self, now_ms: int) -> None:
        # The next broker reads the records that are being written.
        self._state.advance_clock(now_ms)
        self._act(self._coordinator.end())

    def close(self) -> None:
        """Drop all transactions, because another broker coordinates them."""
        self._is_closed = True
        self._act(self._coordinator.end())
        self._stop_expiry()
        self._state.remembered.size_functions.remove(self.held_bytes)


def add_or_verify(
    transactions: TransactionService,
    producer: TransactionalProducer,
    partitions: Collection[Partition],
    now_ms: int,
    callback: Callable[[TransactionErrors], None],
    *,
    adds: bool,
) -> None:
    """Check with the coordinator of this broker whether a producer may write to partitions.

    With `adds`, the partitions are added to its transaction, all or none. Otherwise, each
    one is verified.
    """
    errors: dict[Partition, TransactionError] = {}
    groups = [frozenset(partitions)]
    if not adds:
        # Verified one by one, because each partition has its own result.
        groups = [frozenset({partition}) for partition in partitions]
    remaining = len(groups)

    def collect(group: frozenset[Partition], result: Result) -> None:
        nonlocal remaining
        if isinstance(result, TransactionError):
            errors.update(dict.fromkeys(group, result))
        remaining -= 1
        if not remaining:
            callback(errors)

    for group in groups:
        request = AddPartitions(
            transactional_id=producer[0],
            producer_id=producer[1],
            producer_epoch=producer[2],
            partitions=group,
            client_version=2,
            only_verifies=not adds,
        )
        transactions.request(request, now_ms, partial(collect, group))
    if not groups:
        callback(errors)


@attrs.define(eq=False)
class Markers:
    """Appends the markers of one transaction to its partitions."""

    _state: BrokerState
    #: None for markers without a retry.
    _coordinator: TransactionMachine | None
    _effect: WriteMarkers
    _now_ms: int
    #: Called with the coordinator and the partitions whose markers must be retried.
    _callback: Callable[[Any, frozenset[Partition]], None] | None = None
    #: The epoch in the request of an admin tool. None for the broker's own markers.
    _coordinator_epoch: int | None = attrs.field(
        default=None, kw_only=True, alias="coordinator_epoch"
    )
    _on_marker: Callable[[Partition, Exception | None], None] | None = attrs.field(
        default=None, kw_only=True, alias="on_marker"
    )
    #: The partitions whose markers are not written yet.
    _unfinished: set[Partition] = attrs.field(init=False)
    #: The partitions whose markers must be retried.
    _failed: set[Partition] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._unfinished = set(self._effect.partitions)

    def write(self) -> None:
        """Start to append the markers, in chunks if there are very many partitions."""
        pending = self._state.run_in_steps(self._begin_partitions())
        if pending is not None:
            pending.then(_log_failure)

    def _begin_partitions(self) -> Steps[None]:
        chunk_counter = ChunkCounter()
        # Sorted, so that a simulation of the same requests repeats exactly.
        for partition in sorted(self._effect.partitions):
            if chunk_counter.is_over():
                yield
            if partition[0] == OFFSETS_TOPIC:
                # Groups that are loaded before the marker is stored, but used
                # afterwards, would lack the offsets of the transaction.
                self._state.groups.load(
                    self._now_ms, partial(self._on_groups_loaded, partition)
                )
            else:
                self._when_open(partition)

    def _on_groups_loaded(self, partition: Partition, is_loaded: bool) -> None:
        if is_loaded:
            self._when_open(partition)
        else:
            self._finish_partition(partition, LogcoreError("the groups cannot be read"))

    def _when_open(self, partition: Partition) -> None:
        pending = self._state.logs.when_open(
            [partition], lambda: self._append_or_queue(partition)
        )
        if pending is not None:
            pending.then(partial(self._on_opened, partition))

    def _on_opened(self, partition: Partition, result: Any) -> None:
        """Complete the partition if _append_or_queue() raised an exception."""
        if isinstance(result, Exception):
            self._finish_partition(partition, result)

    def _append_or_queue(self, partition: Partition) -> None:
        """Append the marker after the earlier appends of the partition."""
        state = self._state
        # The successor writes the markers of all unfinished transactions again.
        if self._coordinator is not None and self._coordinator.is_over:
            return
        topic, number = partition
        state.transactions.marker_follows(self._effect.producer_id, partition)
        try:
            log = state.logs.log(topic, number)
            # A marker needs as many in-sync replicas as a record with acks=all.
            state.leadership.check_in_sync(partition)
        except LogcoreError as error:
            self._finish_partition(partition, error)
            return
        key: Any = partition
        if topic == OFFSETS_TOPIC:
            key = topic  # commits to all its partitions share one queue
        work = partial(self._append, log)
        finish = partial(self._written, partition, log)
        if state.work.is_busy(key) or log.host.writer.may_wait(
            _MARKER_BYTES, self._now_ms, has_producer=True
        ):
            state.work.submit(key, work, finish)
            return
        try:
            result: Any = work()
        except (LogcoreError, OSError) as error:
            result = without_tracebacks(error)
        finish(result)

    def _append(self, log: Log) -> Receipt:
        effect = self._effect
        epoch = self._coordinator_epoch
        if epoch is None:
            epoch = marker_epoch(
                log.host.writer, effect.producer_id, self._coordinator_leader_epoch()
            )
        return log.end_transaction(
            effect.producer_id,
            effect.producer_epoch,
            commit=effect.commit,
            coordinator_epoch=max(0, epoch),
            durability="os",
        )

    def _coordinator_leader_epoch(self) -> int:
        """Return the leader epoch of the log of the transaction, or 0."""
        name = self._effect.transactional_id
        logdir = self._state.logdir
        if not name or TRANSACTIONS_TOPIC not in logdir:
            return 0
        number = partition_of(name, logdir.partitions(TRANSACTIONS_TOPIC)[-1] + 1)
        log = logdir.host.opened(TRANSACTIONS_TOPIC, number)
        if log is None:
            return 0
        return log.leader_epoch

    def _written(self, partition: Partition, log: Log, result: Any) -> None:
        if isinstance(result, Exception):
            self._finish_partition(partition, result)
            return
        end = result.last_offset + 1
        leadership = self._state.leadership
        leadership.appended(partition, log, end, self._now_ms)
        # The transaction may end only when all its markers are safe.
        leadership.when_safe(
            partition, log, end, partial(self._finish_partition, partition)
        )

    def _finish_partition(self, partition: Partition, error: Exception | None) -> None:
        if error is None and partition[0] == OFFSETS_TOPIC:
            self._state.groups.transaction_ended(
                self._effect.producer_id, partition[1], commit=self._effect.commit
            )
        if self._on_marker is not None:
            self._on_marker(partition, error)
        if error is not None and not self._is_refused(error):
            _log.error(
                "%s-%d: the marker of a transaction was not stored: %s",
                *partition,
                error,
            )
            # The coordinator retries these markers after a delay.
            self._failed.add(partition)
        self._unfinished.discard(partition)
        if not self._unfinished and self._callback is not None:
            self._callback(self._coordinator, frozenset(self._failed))

    def _is_refused(self, error: Exception) -> bool:
        """Return whether the marker is refused permanently and not retried."""
        if isinstance(error, InvalidRecordError | CoordinatorFencedError):
            # A client's request may contain invalid producer numbers or an old
            # coordinator epoch. The broker's own coordinator is always the current one.
            # If its marker counted as done, the transaction would remain open.
            return self._coordinator is None
        return isinstance(error, TopicNotFoundError | InvalidProducerEpochError)


def _log_failure(result: Any) -> None:
    if isinstance(result, Exception):
        _log.error("markers of a transaction were not begun", exc_info=result)
