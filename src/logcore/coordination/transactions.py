"""All transactions of one coordinator: the state of each transactional id, without I/O.

    transactions = TransactionMachine()
    effects = transactions.load(found, now_ms)  # found: read from __transaction_state
    effects = transactions.handle(request, waiter, now_ms)

Rules (broker reference, sections 3.3 to 3.11; Kafka's TransactionCoordinator):
- A transition changes the state in memory when its record is durable. The prepare
  record is durable before a marker is written, and all markers before the complete
  record.
- If a record or markers are being written, a new request waits for them. If markers
  could not be written, the client gets a retriable error.
- A record that could not be stored may or may not be on disk. The coordinator therefore
  ends, and a new coordinator loads the stored records.
- An abort without a client request increases the epoch, which fences the producer.

This module contains no protocol messages or codes. It does not read or write logs, and
does not check which partitions exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from logcore.coordination.memory_budget import ID_BYTES, ITEM_BYTES, ClientMemoryBudget
from logcore.coordination.transaction_effects import (
    NO_TIMEOUT,
    AbortOrphan,
    AddPartitions,
    AllocateProducerId,
    CancelTransactionTimer,
    Effect,
    End,
    Initialize,
    Overdue,
    ProducerIdAndEpoch,
    Request,
    Result,
    SetTransactionTimer,
    StoreTransaction,
    TimedOut,
    TransactionError,
    TransactionReply,
    Unended,
    Waiter,
    WriteMarkers,
)
from logcore.format.transaction_records import (
    LONGEST_ID_BYTES,
    Partition,
    Status,
    StoredTransaction,
)

#: Kafka: transaction.max.timeout.ms.
MAX_TIMEOUT_MS: Final = 900_000
#: Kafka: transactional.id.expiration.ms.
EXPIRATION_MS: Final = 604_800_000
#: How often the caller should call expire(), as in Kafka.
EXPIRY_CHECK_MS: Final = 3_600_000
#: Delay before failed markers are written again.
RETRY_MS: Final = 1_000
#: The last epoch that a client may get. The next epoch is reserved for markers.
LAST_EPOCH: Final = 32_766
_TOP_EPOCH: Final = 32_767

#: No transaction is open or ending, so the id may expire.
_IDLE: Final = frozenset({Status.EMPTY, Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT})
#: The decision is durable, and markers may be missing.
_PREPARED: Final = frozenset({Status.PREPARE_COMMIT, Status.PREPARE_ABORT})


@attrs.define(eq=False)
class Transaction:
    """The state of one transactional id."""

    transactional_id: str
    #: The last durable record; None until the first record is durable.
    stored: StoredTransaction | None = None
    #: The previous epoch, which a retrying producer sends; never stored.
    last_epoch: int = -1
    #: The record that is being stored.
    storing: StoreTransaction | None = None
    #: Partitions whose markers are missing.
    remaining_partitions: frozenset[Partition] = frozenset()
    #: True after a marker could not be written. Requests then do not wait.
    is_stuck: bool = False
    #: Waiter and result of the request that is ending the transaction.
    ending: tuple[Waiter, Result] | None = None
    #: Requests that arrived while the id was busy.
    waiting: deque[tuple[Request, Waiter]] = attrs.Factory(
        deque[tuple[Request, Waiter]]
    )

    @property
    def is_busy(self) -> bool:
        # A crash can undo a record that is not durable, so no request is decided on it.
        if self.storing is not None:
            return True
        # Kafka refuses requests while markers are written, and clients retry. Here they
        # wait, unless a marker could not be written.
        return (
            self.stored is not None
            and self.stored.status in _PREPARED
            and not self.is_stuck
        )


class TransactionMachine:
    """The transactions of one coordinator, used by one thread at a time.

    The caller carries out the returned effects.
    """

    def __init__(
        self,
        max_timeout_ms: int = MAX_TIMEOUT_MS,
        *,
        is_two_phase: bool = False,
        memory_budget: ClientMemoryBudget | None = None,
    ) -> None:
        #: Limits the memory of all ids; None for no limit.
        self._memory_budget = memory_budget
        self._max_timeout_ms = max_timeout_ms
        #: Whether producers may request NO_TIMEOUT.
        self._is_two_phase = is_two_phase
        self._transactions: dict[str, Transaction] = {}
        #: Allocated producer ids that no producer has got yet.
        self._unused_producer_ids: list[int] = []
        #: Set once a record could not be stored, since it may be on disk nevertheless.
        #: All waiting requests have then been answered, further calls have no effect,
        #: and a new instance must load the stored records.
        self.is_over = False

    # -- views

    def get(self, transactional_id: str) -> StoredTransaction | None:
        """Return the last durable record of an id; None if the id is unknown."""
        transaction = self._transactions.get(transactional_id)
        if transaction is None:
            return None
        return transaction.stored

    def all(self) -> dict[str, StoredTransaction]:
        return {
            name: each.stored
            for name, each in self._transactions.items()
            if each.stored is not None
        }

    def held_bytes(self) -> int:
        """Return the approximate memory use of all ids."""
        return sum(
            ID_BYTES
            + len(name)
            + (
                ITEM_BYTES * len(each.stored.partitions)
                if each.stored is not None
                else 0
            )
            for name, each in self._transactions.items()
        )

    def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partition: Partition,
    ) -> TransactionError | None:
        """Check that a partition is in the producer's open transaction (section 3.6).

        Otherwise the producer may not write to the partition.
        """
        stored = self.get(transactional_id)
        error = _check_producer(stored, producer_id, producer_epoch)
        if error is not None or stored is None:
            return error
        # As in Kafka, the producer retries until the markers are written.
        if stored.status in _PREPARED:
            return TransactionError.CONCURRENT_TRANSACTIONS
        # The producer may abort and continue after this error (KIP-890).
        if stored.status is not Status.ONGOING or partition not in stored.partitions:
            return TransactionError.TRANSACTION_ABORTABLE
        return None

    def _verify_all(self, request: AddPartitions) -> TransactionError | None:
        """Return the first error of verify() for the partitions of a request."""
        identity = (
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
        )
        for partition in sorted(request.partitions):
            error = self.verify(*identity, partition)
            if error is not None:
                return error
        return None

    # -- stored state

    def load(self, found: Mapping[str, StoredTransaction], now_ms: int) -> list[Effect]:
        """Restore stored records, and write all markers of prepared transactions again.

        Another thread may call this, if no method except end() runs concurrently.
        """
        effects: list[Effect] = []
        transactions: dict[str, Transaction] = {}
        for name, stored in found.items():
            transaction = Transaction(name, stored)
            transactions[name] = transaction
            if stored.status is Status.ONGOING and stored.timeout_ms != NO_TIMEOUT:
                # This limits the wait even if the clock was set back.
                latest_ms = now_ms + stored.timeout_ms
                effects.append(
                    SetTransactionTimer(
                        name, min(stored.start_ms + stored.timeout_ms, latest_ms)
                    )
                )
            # No record lists the markers that were written. As in Kafka, all are
            # written again.
            elif stored.status in _PREPARED:
                transaction.remaining_partitions = stored.partitions
                effects += self._mark(transaction, now_ms)
        self._transactions = transactions
        return effects

    def adopt(
        self, found: Mapping[Partition, Iterable[tuple[int, int]]], now_ms: int
    ) -> list[Effect]:
        """Abort transactions that a power failure left open without a record (section
        3.11).

        Call this after load() and before any request. `found` maps a partition to the
        producer id and epoch of each transaction that is open there.

        The markers have a later epoch. With the same epoch, batches that the producer
        sends again would count as duplicates of the aborted batches, and a committed
        transaction would lack them.
        """
        epochs: dict[int, int] = {}
        partitions: dict[int, set[Partition]] = {}
        owners = {
            each.stored.producer_id: each
            for each in self._transactions.values()
            if each.stored is not None
        }
        for partition, producers in found.items():
            for producer_id, epoch in producers:
                # The coordinator itself ends a transaction with a matching record, now
                # or at its timeout.
                owner = owners.get(producer_id)
                if owner is None or not _contains(owner.stored, partition, epoch):
                    epochs[producer_id] = max(epoch, epochs.get(producer_id, 0))
                    partitions.setdefault(producer_id, set()).add(partition)
        effects: list[Effect] = []
        for producer_id, orphaned in partitions.items():
            epoch = min(epochs[producer_id] + 1, _TOP_EPOCH)
            owner = owners.get(producer_id)
            if owner is None or owner.is_busy:
                effects.append(AbortOrphan(producer_id, epoch, frozenset(orphaned)))
            else:
                effects += self._fence(owner, now_ms, frozenset(orphaned), epoch)
        return effects

    def stored(
        self, effect: StoreTransaction, now_ms: int, *, failed: bool = False
    ) -> list[Effect]:
        """Handle the end of a StoreTransaction effect. If it `failed`, the record may or
        may not be on disk.
        """
        if self.is_over:
            return []
        transaction = self._transactions[effect.transactional_id]
        assert transaction.storing is effect, (transaction.storing, effect)
        # The record may be on disk or not. Only a new instance, which reads the disk,
        # can decide that.
        if failed:
            return self.end()
        transaction.storing = None
        before = transaction.stored
        transaction.stored = effect.stored
        transaction.last_epoch = effect.last_epoch
        effects: list[Effect] = []
        # The client relies on the answer, so the record is durable first.
        if effect.waiter is not None:
            effects.append(TransactionReply(effect.waiter, effect.result))
        # The id has expired, and its tombstone is durable.
        if effect.stored is None:
            del self._transactions[transaction.transactional_id]
        elif effect.stored.status is Status.ONGOING:
            # The timeout counts from the first partition of a transaction, not from
            # later partitions.
            has_begun = before is None or before.status is not Status.ONGOING
            if has_begun and effect.stored.timeout_ms != NO_TIMEOUT:
                due_ms = effect.stored.start_ms + effect.stored.timeout_ms
                effects.append(
                    SetTransactionTimer(transaction.transactional_id, due_ms)
                )
        elif effect.stored.status in _PREPARED:
            # The decision is durable, so the transaction cannot time out any more.
            effects.append(CancelTransactionTimer(transaction.transactional_id))
            transaction.remaining_partitions = effect.stored.partitions
            effects += self._mark(transaction, now_ms)
        # The record of the completed transaction is durable.
        elif transaction.ending is not None:
            effects += self._reply_to_end(transaction)
        return [*effects, *self._resume_waiting(transaction, now_ms)]

    def _mark(self, transaction: Transaction, now_ms: int) -> list[Effect]:
        """Write the missing markers, or the complete record if no marker is missing."""
        stored = transaction.stored
        assert stored is not None and stored.status in _PREPARED, stored
        if transaction.remaining_partitions:
            commit = stored.status is Status.PREPARE_COMMIT
            return [
                WriteMarkers(
                    transaction.transactional_id,
                    stored.producer_id,
                    stored.producer_epoch,
                    commit,
                    transaction.remaining_partitions,
                ),
            ]
        transaction.is_stuck = False
        return self._store(
            transaction, _completed(stored, now_ms), last_epoch=transaction.last_epoch
        )

    def markers_written(
        self, effect: WriteMarkers, left: frozenset[Partition], now_ms: int
    ) -> list[Effect]:
        """Handle the outcome of WriteMarkers: all markers are durable except those of `left`.

        The missing markers are written again later.
        """
        if self.is_over:
            return []
        transaction = self._transactions[effect.transactional_id]
        transaction.remaining_partitions = left
        if not left:
            return self._mark(transaction, now_ms)
        # A partition without a leader can delay its marker for a long time.
        transaction.is_stuck = True
        effects: list[Effect] = []
        if transaction.ending is not None:
            # The decision is durable, so it will be carried out.
            effects += self._reply_to_end(transaction)
        effects.append(
            SetTransactionTimer(transaction.transactional_id, now_ms + RETRY_MS)
        )
        return [*effects, *self._resume_waiting(transaction, now_ms)]

    def producer_id_allocated(
        self, effect: AllocateProducerId, producer_id: int | None, now_ms: int
    ) -> list[Effect]:
        """Handle the outcome of AllocateProducerId: a producer id, or None if it failed."""
        # The client retries, which requests a producer id again.
        if self.is_over or producer_id is None:
            return _reply(effect.waiter, TransactionError.COORDINATOR_NOT_AVAILABLE)
        self._unused_producer_ids.append(producer_id)
        return self.handle(effect.request, effect.waiter, now_ms)

    def timed_out(self, transactional_id: str, now_ms: int) -> list[Effect]:
        """Handle the expiry of a SetTransactionTimer effect."""
        transaction = self._transactions.get(transactional_id)
        if self.is_over or transaction is None:
            return []
        # This is the timer of markers_written().
        if transaction.is_stuck and transaction.storing is None:
            return self._mark(transaction, now_ms)
        return self.handle(Overdue(transactional_id), None, now_ms)

    def expire(self, now_ms: int) -> list[Effect]:
        """Delete ids that have been unused for a week. Call this about every
        EXPIRY_CHECK_MS.
        """
        effects: list[Effect] = []
        for transaction in list(self._transactions.values()):
            stored = transaction.stored
            # As in Kafka, an id with an open transaction does not expire.
            if transaction.is_busy or stored is None or stored.status not in _IDLE:
                continue
            if now_ms - stored.update_ms >= EXPIRATION_MS:
                effects += self._store(transaction, None)
        return effects

    def end(self) -> list[Effect]:
        """Stop this coordinator: refuse all waiting requests and cancel all timers."""
        self.is_over = True
        effects: list[Effect] = []
        for transaction in self._transactions.values():
            effects.append(CancelTransactionTimer(transaction.transactional_id))
            if transaction.storing is not None:
                effects += _reply(
                    transaction.storing.waiter,
                    TransactionError.COORDINATOR_NOT_AVAILABLE,
                )
            if transaction.ending is not None:
                effects += _reply(
                    transaction.ending[0], TransactionError.COORDINATOR_NOT_AVAILABLE
                )
            for _, waiter in transaction.waiting:
                effects += _reply(waiter, TransactionError.COORDINATOR_NOT_AVAILABLE)
        self._transactions = {}
        return effects

    # -- requests

    def handle(self, request: Request, waiter: Waiter, now_ms: int) -> list[Effect]:
        """Handle a request; the answer is a TransactionReply.

        Initialize and End succeed with a ProducerIdAndEpoch, AddPartitions with None.
        Initialize with `keeps_open` can succeed with an Unended. Any request can fail
        with a TransactionError.
        """
        if self.is_over:
            return _reply(waiter, TransactionError.COORDINATOR_NOT_AVAILABLE)
        # A verification changes nothing, so it does not wait for a record.
        if isinstance(request, AddPartitions) and request.only_verifies:
            return _reply(waiter, self._verify_all(request))
        error = self._check(request, now_ms)
        if error is not None:
            return _reply(waiter, error)
        transaction = self._transactions.get(request.transactional_id)
        # Requests for one id are decided one after the other.
        if transaction is not None and transaction.is_busy:
            transaction.waiting.append((request, waiter))
            return []
        match request:
            case Initialize():
                return self._initialize(transaction, request, waiter, now_ms)
            case AddPartitions():
                return self._add(transaction, request, waiter, now_ms)
            case End():
                return self._end(transaction, request, waiter, now_ms)
            case Overdue():
                return self._overdue(transaction, now_ms)

    def _check(self, request: Request, now_ms: int) -> TransactionError | None:
        """Check a request independently of the state of its id."""
        if (
            not request.transactional_id
            or len(request.transactional_id.encode()) > LONGEST_ID_BYTES
        ):
            return TransactionError.INVALID_REQUEST
        # Clients that invent ids must not fill the memory of the broker.
        if self._memory_budget is not None:
            size_bytes = 0
            if isinstance(request, AddPartitions):
                size_bytes = ITEM_BYTES * len(request.partitions)
            elif (
                isinstance(request, Initialize)
                and request.transactional_id not in self._transactions
            ):
                size_bytes = ID_BYTES + len(request.transactional_id)
            if size_bytes and not self._memory_budget.admit(size_bytes, now_ms):
                return TransactionError.COORDINATOR_NOT_AVAILABLE
        if isinstance(request, Initialize):
            # As in Kafka, a producer sends both numbers or none (KIP-360).
            if (request.producer_id == -1) != (request.producer_epoch == -1):
                return TransactionError.INVALID_REQUEST
            # Consumers with read_committed wait for the end of open transactions.
            is_bounded = 0 < request.timeout_ms <= self._max_timeout_ms
            if not is_bounded and not (
                self._is_two_phase and request.timeout_ms == NO_TIMEOUT
            ):
                return TransactionError.INVALID_TRANSACTION_TIMEOUT
        return None

    def _resume_waiting(self, transaction: Transaction, now_ms: int) -> list[Effect]:
        """Process waiting requests until one of them makes the others wait."""
        effects: list[Effect] = []
        while transaction.waiting and not transaction.is_busy:
            request, waiter = transaction.waiting.popleft()
            current = self._transactions.get(transaction.transactional_id)
            # The id expired and was used again.
            if current is not None and current is not transaction:
                current.waiting.append((request, waiter))
                continue
            effects += self.handle(request, waiter, now_ms)
        return effects

    def _store(
        self,
        transaction: Transaction,
        stored: StoredTransaction | None,
        *,
        waiter: Waiter = None,
        result: Result = None,
        last_epoch: int = -1,
    ) -> list[Effect]:
        effect = StoreTransaction(
            transaction.transactional_id, stored, waiter, result, last_epoch
        )
        transaction.storing = effect
        return [effect]

    def _reply_to_end(self, transaction: Transaction) -> list[Effect]:
        assert transaction.ending is not None
        waiter, result = transaction.ending
        transaction.ending = None
        return _reply(waiter, result)

    def _initialize(
        self,
        transaction: Transaction | None,
        request: Initialize,
        waiter: Waiter,
        now_ms: int,
    ) -> list[Effect]:
        """Handle Initialize in the order of section 3.4."""
        if transaction is None or transaction.stored is None:
            return self._initialize_new(request, waiter, now_ms)
        stored = transaction.stored
        # A restarted producer commits or aborts its open transaction itself (KIP-939).
        if request.keeps_open and stored.status is Status.ONGOING:
            return _reply(waiter, Unended(stored.producer_id, stored.producer_epoch))
        expected = request.producer_epoch
        # The epochs of the former id were used up, and the answer with the new id was
        # lost.
        is_retry_of_change = (
            request.producer_id == stored.previous_producer_id
            and expected >= LAST_EPOCH
        )
        if (
            request.producer_id not in (-1, stored.producer_id)
            and not is_retry_of_change
        ):
            return _reply(waiter, TransactionError.PRODUCER_FENCED)
        if stored.status in _PREPARED:
            return _reply(waiter, TransactionError.CONCURRENT_TRANSACTIONS)
        if stored.status is Status.ONGOING:
            if expected not in (-1, stored.producer_epoch):
                # A replaced producer. It would be refused anyway, so it must not abort
                # the new producer's transaction.
                return _reply(waiter, TransactionError.PRODUCER_FENCED)
            # Abort first. This request is then processed again and finds the id idle.
            transaction.waiting.appendleft((request, waiter))
            return self._fence(transaction, now_ms)
        # A new producer of the id.
        if expected == -1:
            last_epoch = -1
        # The present producer requests the next epoch.
        elif expected == stored.producer_epoch and not is_retry_of_change:
            last_epoch = expected
        # A retry after a lost answer: return the same identity again.
        elif expected == transaction.last_epoch:
            return [
                TransactionReply(
                    waiter,
                    ProducerIdAndEpoch(stored.producer_id, stored.producer_epoch),
                )
            ]
        else:
            return _reply(waiter, TransactionError.PRODUCER_FENCED)
        producer_id = stored.producer_id
        previous = stored.previous_producer_id
        # The higher epoch fences all former producers of the id.
        epoch = stored.producer_epoch + 1
        if stored.producer_epoch >= LAST_EPOCH:
            if not self._unused_producer_ids:
                return [AllocateProducerId(request, waiter)]
            # A retry with the former id is recognized by this field.
            previous = producer_id
            producer_id = self._unused_producer_ids.pop()
            epoch = 0
        begun = StoredTransaction(
            producer_id=producer_id,
            producer_epoch=epoch,
            timeout_ms=request.timeout_ms,
            update_ms=now_ms,
            previous_producer_id=previous,
        )
        return self._store(
            transaction,
            begun,
            waiter=waiter,
            result=ProducerIdAndEpoch(producer_id, epoch),
            last_epoch=last_epoch,
        )

    def _initialize_new(
        self, request: Initialize, waiter: Waiter, now_ms: int
    ) -> list[Effect]:
        """Initialize an unknown id. As in Kafka, a producer id in the request is
        ignored.
        """
        if not self._unused_producer_ids:
            return [AllocateProducerId(request, waiter)]
        transaction = Transaction(request.transactional_id)
        self._transactions[request.transactional_id] = transaction
        producer_id = self._unused_producer_ids.pop()
        begun = StoredTransaction(
            producer_id=producer_id,
            producer_epoch=0,
            timeout_ms=request.timeout_ms,
            update_ms=now_ms,
        )
        return self._store(
            transaction, begun, waiter=waiter, result=ProducerIdAndEpoch(producer_id, 0)
        )

    def _add(
        self,
        transaction: Transaction | None,
        request: AddPartitions,
        waiter: Waiter,
        now_ms: int,
    ) -> list[Effect]:
        """Handle AddPartitions (section 3.5).

        The request is answered when the record is durable, so before the first batch.
        """
        stored = None
        if transaction is not None:
            stored = transaction.stored
        error = _check_producer(stored, request.producer_id, request.producer_epoch)
        if error is not None or stored is None or transaction is None:
            return _reply(waiter, error)
        if stored.status in _PREPARED:
            return _reply(waiter, TransactionError.CONCURRENT_TRANSACTIONS)
        partitions = request.partitions
        start_ms = now_ms
        if stored.status is Status.ONGOING:
            if request.partitions <= stored.partitions:
                # The transaction already contains all of them.
                return _reply(waiter, None)
            partitions = stored.partitions | request.partitions
            start_ms = stored.start_ms
        ongoing = attrs.evolve(
            stored,
            status=Status.ONGOING,
            partitions=partitions,
            update_ms=now_ms,
            start_ms=start_ms,
            client_version=request.client_version,
        )
        return self._store(
            transaction, ongoing, waiter=waiter, last_epoch=transaction.last_epoch
        )

    def _end(
        self, transaction: Transaction | None, request: End, waiter: Waiter, now_ms: int
    ) -> list[Effect]:
        stored = None
        if transaction is not None:
            stored = transaction.stored
        if transaction is None or stored is None:
            return _reply(waiter, TransactionError.INVALID_PRODUCER_ID_MAPPING)
        if request.client_version >= 2:
            decision = _decide_end_5(stored, request)
        else:
            decision = _decide_end_0_to_4(stored, request)
        if isinstance(decision, TransactionError):
            return _reply(waiter, decision)
        if not decision:
            return _reply(
                waiter, ProducerIdAndEpoch(stored.producer_id, stored.producer_epoch)
            )
        return self._prepare(transaction, request, waiter, now_ms)

    def _prepare(
        self, transaction: Transaction, request: End, waiter: Waiter, now_ms: int
    ) -> list[Effect]:
        """Store the decision to commit or abort.

        With version 2 the record, and therefore the markers, have the next epoch.
        """
        stored = transaction.stored
        assert stored is not None
        epoch = stored.producer_epoch
        last_epoch = -1
        next_id = -1
        identity = ProducerIdAndEpoch(stored.producer_id, epoch)
        if request.client_version >= 2:
            last_epoch = epoch
            epoch += 1
            identity = ProducerIdAndEpoch(stored.producer_id, epoch)
            # The epochs of this producer id are used up, so the producer gets a new id.
            if epoch > LAST_EPOCH:
                if not self._unused_producer_ids:
                    return [AllocateProducerId(request, waiter)]
                next_id = self._unused_producer_ids.pop()
                identity = ProducerIdAndEpoch(next_id, 0)
        # With version 2 a producer may abort without an open transaction. This
        # increases its epoch.
        partitions: frozenset[Partition] = frozenset()
        start_ms = now_ms
        if stored.status is Status.ONGOING:
            partitions = stored.partitions
            start_ms = stored.start_ms
        prepared = attrs.evolve(
            stored,
            producer_epoch=epoch,
            status=_prepared(request),
            partitions=partitions,
            update_ms=now_ms,
            start_ms=start_ms,
            next_producer_id=next_id,
            client_version=request.client_version,
        )
        transaction.ending = (waiter, identity)
        return self._store(transaction, prepared, last_epoch=last_epoch)

    def _fence(
        self,
        transaction: Transaction,
        now_ms: int,
        orphans: frozenset[Partition] = frozenset(),
        least_epoch: int = 0,
    ) -> list[Effect]:
        """Abort an open transaction without its producer, with an epoch that no
        producer gets.

        The partitions in `orphans` are ended too. The epoch is at least `least_epoch`.
        """
        stored = transaction.stored
        assert stored is not None and stored.status not in _PREPARED, stored
        is_ongoing = stored.status is Status.ONGOING
        assert is_ongoing or orphans, stored
        start_ms = now_ms
        if is_ongoing:
            start_ms = stored.start_ms
        prepared = attrs.evolve(
            stored,
            producer_epoch=max(min(stored.producer_epoch + 1, _TOP_EPOCH), least_epoch),
            status=Status.PREPARE_ABORT,
            partitions=stored.partitions | orphans,
            update_ms=now_ms,
            start_ms=start_ms,
            client_version=2,
        )
        return self._store(transaction, prepared)

    def _overdue(self, transaction: Transaction | None, now_ms: int) -> list[Effect]:
        stored = None
        if transaction is not None:
            stored = transaction.stored
        if transaction is None or stored is None or stored.status is not Status.ONGOING:
            return []
        due_ms = stored.start_ms + stored.timeout_ms
        # Another transaction has begun since the timer was set.
        if due_ms > now_ms and stored.start_ms <= now_ms:
            return [SetTransactionTimer(transaction.transactional_id, due_ms)]
        return [
            TimedOut(transaction.transactional_id),
            *self._fence(transaction, now_ms),
        ]


def _completed(stored: StoredTransaction, now_ms: int) -> StoredTransaction:
    """Return the record to store once all markers are durable.

    If the epochs are used up, the record contains the next producer id.
    """
    if stored.status is Status.PREPARE_COMMIT:
        status = Status.COMPLETE_COMMIT
    else:
        status = Status.COMPLETE_ABORT
    ended = attrs.evolve(
        stored, status=status, partitions=frozenset(), update_ms=now_ms
    )
    if stored.next_producer_id == -1:
        return ended
    return attrs.evolve(
        ended,
        producer_id=stored.next_producer_id,
        producer_epoch=0,
        previous_producer_id=stored.producer_id,
        next_producer_id=-1,
    )


def _check_producer(
    stored: StoredTransaction | None, producer_id: int, producer_epoch: int
) -> TransactionError | None:
    if stored is None or stored.producer_id != producer_id:
        return TransactionError.INVALID_PRODUCER_ID_MAPPING
    if stored.producer_epoch != producer_epoch:
        return TransactionError.PRODUCER_FENCED
    return None


def _decide_end_0_to_4(
    stored: StoredTransaction, request: End
) -> TransactionError | bool:
    """Decide EndTxn 0 to 4 (section 3.8).

    Return an error, True to end the transaction, or False if that was already done.
    """
    error = _check_producer(stored, request.producer_id, request.producer_epoch)
    if error is not None:
        return error
    if stored.status is Status.ONGOING:
        return True
    if request.commit:
        complete = Status.COMPLETE_COMMIT
    else:
        complete = Status.COMPLETE_ABORT
    # This is a retry after a lost answer.
    if stored.status is complete:
        return False
    if stored.status is _prepared(request):
        return TransactionError.CONCURRENT_TRANSACTIONS
    return TransactionError.INVALID_TXN_STATE


def _prepared(request: End) -> Status:
    """Return the status of the transaction while markers for this request are written."""
    if request.commit:
        return Status.PREPARE_COMMIT
    return Status.PREPARE_ABORT


def _decide_end_5(stored: StoredTransaction, request: End) -> TransactionError | bool:
    """Decide EndTxn 5 (section 3.8), with the results of _decide_first().

    A retry has the epoch before the present one.
    """
    epoch = stored.producer_epoch
    is_same = request.producer_id == stored.producer_id
    is_retry_of_change = (
        request.producer_id == stored.previous_producer_id
        and request.producer_epoch == LAST_EPOCH
        and epoch == 0
    )
    if not is_same and not is_retry_of_change:
        return TransactionError.INVALID_PRODUCER_ID_MAPPING
    is_retry = is_retry_of_change or request.producer_epoch == epoch - 1
    is_current = is_same and request.producer_epoch == epoch
    # A request with the former epoch is late: its transaction has ended.
    if stored.status in (Status.ONGOING, Status.EMPTY):
        is_valid = is_current
    # The prepared record already has the next epoch.
    elif stored.status in _PREPARED:
        is_valid = is_retry
    else:
        is_valid = is_retry or is_current
    if not is_valid:
        return TransactionError.PRODUCER_FENCED
    if stored.status is Status.ONGOING:
        return True
    if stored.status in _PREPARED:
        is_same_decision = request.commit == (stored.status is Status.PREPARE_COMMIT)
        if is_same_decision:
            return TransactionError.CONCURRENT_TRANSACTIONS
        return TransactionError.INVALID_TXN_STATE
    # No transaction is open, but an abort increases the epoch nevertheless.
    if is_current:
        if request.commit:
            return TransactionError.INVALID_TXN_STATE
        return True
    is_same_decision = request.commit == (stored.status is Status.COMPLETE_COMMIT)
    if not is_same_decision:
        return TransactionError.INVALID_TXN_STATE
    return False


def _contains(
    stored: StoredTransaction | None, partition: Partition, epoch: int
) -> bool:
    """Return whether the end of the recorded transaction ends this one in the partition.

    A marker does not end a transaction with a higher epoch, which a record that was
    lost may have given to the producer.
    """
    return (
        stored is not None
        and partition in stored.partitions
        and epoch <= stored.producer_epoch
    )


def _reply(waiter: Waiter, result: Result) -> list[Effect]:
    if waiter is None:
        return []
    return [TransactionReply(waiter, result)]
