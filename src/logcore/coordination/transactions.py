"""All transactions of one coordinator: the state of each transactional id, and how requests change it. Pure.

    transactions = Transactions()
    effects = transactions.load(found, now_ms)          # what was read from __transaction_state, if it exists
    effects = transactions.ask(request, waiter, now_ms)

Rules (broker reference, sections 3.3 to 3.11; Kafka's TransactionCoordinator):
- A transition is made in memory once its record is on disk. The prepare record is on disk before a marker is written,
  all markers before the complete record.
- A request that meets a record on its way, or markers on their way, waits for them. If markers could not be written, it
  is told to come again.
- A record that could not be stored may be on disk or not. So its coordinator ends, and another loads the stored ones.
- An abort that no client asked for raises the epoch, so that the producer finds itself fenced.

Not here: shapes and codes of the protocol, the log that stores the records, the partitions' own state, which partitions
exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from logcore.coordination.remembered import ID_BYTES, ITEM_BYTES, Remembered
from logcore.coordination.transactioneffects import (
    NO_TIMEOUT,
    AbortOrphan,
    AddPartitions,
    At,
    Cancel,
    Effect,
    End,
    Identity,
    Initialize,
    Overdue,
    Reply,
    Request,
    Result,
    Store,
    TakeProducerId,
    TimedOut,
    TransactionError,
    Unended,
    Waiter,
    WriteMarkers,
)
from logcore.format.transactionrecords import LONGEST_ID_BYTES, Partition, Status, StoredTransaction

#: Kafka: transaction.max.timeout.ms.
MAX_TIMEOUT_MS: Final = 900_000
#: Kafka: transactional.id.expiration.ms.
EXPIRATION_MS: Final = 604_800_000
#: How often expire() is to be called, as in Kafka.
EXPIRY_CHECK_MS: Final = 3_600_000
#: How long after a failure markers are tried again.
RETRY_MS: Final = 1_000
#: The last epoch that a client is given; the one above it is for markers alone.
LAST_EPOCH: Final = 32_766
_TOP_EPOCH: Final = 32_767

_IDLE: Final = frozenset({Status.EMPTY, Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT})
_PREPARED: Final = frozenset({Status.PREPARE_COMMIT, Status.PREPARE_ABORT})


@attrs.define(eq=False)
class Transaction:
    """One transactional id.

    stored: its last record on disk, None while its first one is on its way. last_epoch: the epoch before the present
    one, for a producer that asks again; never on disk. storing: the record on its way. left: partitions whose markers
    are missing. is_stuck: a marker could not be written, so requests are not kept waiting. ending: (waiter, result) of
    the request that ends the transaction now. waiting: requests that came meanwhile.
    """

    transactional_id: str
    stored: StoredTransaction | None = None
    last_epoch: int = -1
    storing: Store | None = None
    left: frozenset[Partition] = frozenset()
    is_stuck: bool = False
    ending: tuple[Waiter, Result] | None = None
    waiting: deque[tuple[Request, Waiter]] = attrs.Factory(deque[tuple[Request, Waiter]])

    @property
    def is_busy(self) -> bool:
        if self.storing is not None:
            return True
        return self.stored is not None and self.stored.status in _PREPARED and not self.is_stuck


class Transactions:
    """The transactions of one coordinator. To be used by one thread.

    Its holder carries out the effects it returns. is_over: a record could not be stored; all who waited have been told,
    what is still called does nothing, and another instance is to load what is stored.
    """

    def __init__(
        self,
        max_timeout_ms: int = MAX_TIMEOUT_MS,
        *,
        is_two_phase: bool = False,
        remembered: Remembered | None = None,
    ) -> None:
        """is_two_phase: producers may ask for NO_TIMEOUT. remembered: the limit of what ids hold; none by default."""
        self._remembered = remembered
        self._max_timeout_ms = max_timeout_ms
        self._is_two_phase = is_two_phase
        self._transactions: dict[str, Transaction] = {}
        self._spare_ids: list[int] = []
        self.is_over = False

    # -- looking

    def get(self, transactional_id: str) -> StoredTransaction | None:
        """The last record of an id that is on disk; None for an unknown id."""
        transaction = self._transactions.get(transactional_id)
        if transaction is None:
            return None
        return transaction.stored

    def all(self) -> dict[str, StoredTransaction]:
        return {name: each.stored for name, each in self._transactions.items() if each.stored is not None}

    def held_bytes(self) -> int:
        """About how much memory all ids take."""
        return sum(
            ID_BYTES + len(name) + (ITEM_BYTES * len(each.stored.partitions) if each.stored is not None else 0)
            for name, each in self._transactions.items()
        )

    @property
    def has_open(self) -> bool:
        """Whether a transaction is open, or not ended in all its partitions."""
        return any(
            each.is_busy or (each.stored and each.stored.status not in _IDLE) for each in self._transactions.values()
        )

    def verify(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partition: Partition
    ) -> TransactionError | None:
        """Whether a producer may write to a partition now: it has to be in its open transaction (section 3.6)."""
        stored = self.get(transactional_id)
        error = _check_producer(stored, producer_id, producer_epoch)
        if error is not None or stored is None:
            return error
        if stored.status in _PREPARED:
            return TransactionError.CONCURRENT_TRANSACTIONS
        if stored.status is not Status.ONGOING or partition not in stored.partitions:
            return TransactionError.TRANSACTION_ABORTABLE
        return None

    # -- what is stored

    def load(self, found: Mapping[str, StoredTransaction], now_ms: int) -> list[Effect]:
        """Takes over what was stored: markers of what was prepared are written again, in all its partitions.

        May be called by another thread, as long as nothing but end() is called meanwhile.
        """
        effects: list[Effect] = []
        transactions: dict[str, Transaction] = {}
        for name, stored in found.items():
            transaction = Transaction(name, stored)
            transactions[name] = transaction
            if stored.status is Status.ONGOING and stored.timeout_ms != NO_TIMEOUT:
                latest_ms = now_ms + stored.timeout_ms  # also where the clock was set back meanwhile
                effects.append(At(name, min(stored.start_ms + stored.timeout_ms, latest_ms)))
            elif stored.status in _PREPARED:
                transaction.left = stored.partitions
                effects += self._mark(transaction, now_ms)
        self._transactions = transactions
        return effects

    def adopt(self, found: Mapping[Partition, Iterable[tuple[int, int]]], now_ms: int) -> list[Effect]:
        """Aborts what a loss of power has left open without a record of it (section 3.11). After load(), before any
        request. found: partition -> producer id and epoch of each transaction that is open there.

        The markers have a later epoch: with the same one, what the producer sends again would look like what was
        just aborted, and be missing in a transaction that commits.
        """
        epochs: dict[int, int] = {}
        partitions: dict[int, set[Partition]] = {}
        owners = {each.stored.producer_id: each for each in self._transactions.values() if each.stored is not None}
        for partition, producers in found.items():
            for producer_id, epoch in producers:
                # One that a record names is ended by that record, now or at its timeout.
                owner = owners.get(producer_id)
                if owner is None or not _holds(owner.stored, partition, epoch):
                    epochs[producer_id] = max(epoch, epochs.get(producer_id, 0))
                    partitions.setdefault(producer_id, set()).add(partition)
        effects: list[Effect] = []
        for producer_id, those in partitions.items():
            epoch = min(epochs[producer_id] + 1, _TOP_EPOCH)
            owner = owners.get(producer_id)
            if owner is None or owner.is_busy:
                effects.append(AbortOrphan(producer_id, epoch, frozenset(those)))
            else:
                effects += self._fence(owner, now_ms, frozenset(those), epoch)
        return effects

    def stored(self, effect: Store, now_ms: int, *, failed: bool = False) -> list[Effect]:
        """The record of a Store is on disk. failed: it may be on disk or not."""
        if self.is_over:
            return []
        transaction = effect.transaction
        assert transaction.storing is effect, (transaction.transactional_id, effect)
        if failed:
            return self.end()
        transaction.storing = None
        before = transaction.stored
        transaction.stored = effect.stored
        transaction.last_epoch = effect.last_epoch
        effects: list[Effect] = []
        if effect.waiter is not None:
            effects.append(Reply(effect.waiter, effect.result))
        if effect.stored is None:
            del self._transactions[transaction.transactional_id]
        elif effect.stored.status is Status.ONGOING:
            # The timeout counts from the first partition of a transaction, not from later ones.
            has_begun = before is None or before.status is not Status.ONGOING
            if has_begun and effect.stored.timeout_ms != NO_TIMEOUT:
                due_ms = effect.stored.start_ms + effect.stored.timeout_ms
                effects.append(At(transaction.transactional_id, due_ms))
        elif effect.stored.status in _PREPARED:
            effects.append(Cancel(transaction.transactional_id))
            transaction.left = effect.stored.partitions
            effects += self._mark(transaction, now_ms)
        elif transaction.ending is not None:
            effects += self._tell_ending(transaction)
        return [*effects, *self._go_on(transaction, now_ms)]

    def _mark(self, transaction: Transaction, now_ms: int) -> list[Effect]:
        """Writes the missing markers, or the complete record if none is missing."""
        stored = transaction.stored
        assert stored is not None and stored.status in _PREPARED, stored
        if transaction.left:
            commit = stored.status is Status.PREPARE_COMMIT
            return [
                WriteMarkers(transaction, stored.producer_id, stored.producer_epoch, commit, transaction.left),
            ]
        transaction.is_stuck = False
        return self._store(transaction, _completed(stored, now_ms), last_epoch=transaction.last_epoch)

    def marked(self, effect: WriteMarkers, left: frozenset[Partition], now_ms: int) -> list[Effect]:
        """The markers are on disk, but for those of `left`, which are tried again."""
        if self.is_over:
            return []
        transaction = effect.transaction
        transaction.left = left
        if not left:
            return self._mark(transaction, now_ms)
        transaction.is_stuck = True
        effects: list[Effect] = []
        if transaction.ending is not None:
            effects += self._tell_ending(transaction)  # the decision is on disk, so it will be carried out
        effects.append(At(transaction.transactional_id, now_ms + RETRY_MS))
        return [*effects, *self._go_on(transaction, now_ms)]

    def taken(self, effect: TakeProducerId, producer_id: int | None, now_ms: int) -> list[Effect]:
        """The outcome of TakeProducerId: a producer id, None if none could be had."""
        if self.is_over or producer_id is None:
            return _reply(effect.waiter, TransactionError.COORDINATOR_NOT_AVAILABLE)
        self._spare_ids.append(producer_id)
        return self.ask(effect.request, effect.waiter, now_ms)

    def timed_out(self, transactional_id: str, now_ms: int) -> list[Effect]:
        """The time of an At has come."""
        transaction = self._transactions.get(transactional_id)
        if self.is_over or transaction is None:
            return []
        if transaction.is_stuck and transaction.storing is None:
            return self._mark(transaction, now_ms)
        return self.ask(Overdue(transactional_id), None, now_ms)

    def expire(self, now_ms: int) -> list[Effect]:
        """Deletes ids that have not been used for a week. To be called every EXPIRY_CHECK_MS or so."""
        effects: list[Effect] = []
        for transaction in list(self._transactions.values()):
            stored = transaction.stored
            if transaction.is_busy or stored is None or stored.status not in _IDLE:
                continue
            if now_ms - stored.update_ms >= EXPIRATION_MS:
                effects += self._store(transaction, None)
        return effects

    def end(self) -> list[Effect]:
        """Ends this coordinator: all who wait are told to try again, and no timer is left."""
        self.is_over = True
        effects: list[Effect] = []
        for transaction in self._transactions.values():
            effects.append(Cancel(transaction.transactional_id))
            if transaction.storing is not None:
                effects += _reply(transaction.storing.waiter, TransactionError.COORDINATOR_NOT_AVAILABLE)
                transaction.storing = None  # refers to the transaction: a cycle
            if transaction.ending is not None:
                effects += _reply(transaction.ending[0], TransactionError.COORDINATOR_NOT_AVAILABLE)
            for _, waiter in transaction.waiting:
                effects += _reply(waiter, TransactionError.COORDINATOR_NOT_AVAILABLE)
        self._transactions = {}
        return effects

    # -- requests

    def ask(self, request: Request, waiter: Waiter, now_ms: int) -> list[Effect]:
        """The answer is a Reply with an Identity, None or an error: of Initialize and End an Identity, or of Initialize
        with keeps_open an Unended.
        """
        if self.is_over:
            return _reply(waiter, TransactionError.COORDINATOR_NOT_AVAILABLE)
        error = self._check(request, now_ms)
        if error is not None:
            return _reply(waiter, error)
        transaction = self._transactions.get(request.transactional_id)
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
        """What is wrong with a request whatever the id's state."""
        if not request.transactional_id or len(request.transactional_id.encode()) > LONGEST_ID_BYTES:
            return TransactionError.INVALID_REQUEST
        if self._remembered is not None:
            size_bytes = 0
            if isinstance(request, AddPartitions):
                size_bytes = ITEM_BYTES * len(request.partitions)
            elif isinstance(request, Initialize) and request.transactional_id not in self._transactions:
                size_bytes = ID_BYTES + len(request.transactional_id)
            if size_bytes and not self._remembered.admits(size_bytes, now_ms):
                return TransactionError.COORDINATOR_NOT_AVAILABLE
        if isinstance(request, Initialize):
            if (request.producer_id == -1) != (request.producer_epoch == -1):
                return TransactionError.INVALID_REQUEST
            is_bounded = 0 < request.timeout_ms <= self._max_timeout_ms
            if not is_bounded and not (self._is_two_phase and request.timeout_ms == NO_TIMEOUT):
                return TransactionError.INVALID_TRANSACTION_TIMEOUT
        return None

    def _go_on(self, transaction: Transaction, now_ms: int) -> list[Effect]:
        """Takes up the requests that waited, until one of them makes others wait."""
        effects: list[Effect] = []
        while transaction.waiting and not transaction.is_busy:
            request, waiter = transaction.waiting.popleft()
            current = self._transactions.get(transaction.transactional_id)
            if current is not None and current is not transaction:  # the id expired and came back
                current.waiting.append((request, waiter))
                continue
            effects += self.ask(request, waiter, now_ms)
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
        effect = Store(transaction, stored, waiter, result, last_epoch)
        transaction.storing = effect
        return [effect]

    def _tell_ending(self, transaction: Transaction) -> list[Effect]:
        assert transaction.ending is not None
        waiter, result = transaction.ending
        transaction.ending = None
        return _reply(waiter, result)

    def _initialize(
        self, transaction: Transaction | None, request: Initialize, waiter: Waiter, now_ms: int
    ) -> list[Effect]:
        """Section 3.4, in its order."""
        if transaction is None or transaction.stored is None:
            return self._first(request, waiter, now_ms)
        stored = transaction.stored
        if request.keeps_open and stored.status is Status.ONGOING:
            return _reply(waiter, Unended(stored.producer_id, stored.producer_epoch))
        expected = request.producer_epoch
        is_retry_of_change = request.producer_id == stored.previous_producer_id and expected >= LAST_EPOCH
        if request.producer_id not in (-1, stored.producer_id) and not is_retry_of_change:
            return _reply(waiter, TransactionError.PRODUCER_FENCED)
        if stored.status in _PREPARED:
            return _reply(waiter, TransactionError.CONCURRENT_TRANSACTIONS)
        if stored.status is Status.ONGOING:
            if expected not in (-1, stored.producer_epoch):
                # A producer that was replaced: it would be refused in the end, so it does not abort the other's.
                return _reply(waiter, TransactionError.PRODUCER_FENCED)
            # First the abort; then this request comes up again, and finds the id idle.
            transaction.waiting.appendleft((request, waiter))
            return self._fence(transaction, now_ms)
        if expected == -1:  # a new producer of the id
            last_epoch = -1
        elif expected == stored.producer_epoch and not is_retry_of_change:  # the present one asks for the next epoch
            last_epoch = expected
        elif expected == transaction.last_epoch:  # it asked before, and the answer was lost: the same one again
            return [Reply(waiter, Identity(stored.producer_id, stored.producer_epoch))]
        else:
            return _reply(waiter, TransactionError.PRODUCER_FENCED)
        producer_id = stored.producer_id
        previous = stored.previous_producer_id
        epoch = stored.producer_epoch + 1
        if stored.producer_epoch >= LAST_EPOCH:
            if not self._spare_ids:
                return [TakeProducerId(request, waiter)]
            previous = producer_id
            producer_id = self._spare_ids.pop()
            epoch = 0
        begun = StoredTransaction(
            producer_id=producer_id,
            producer_epoch=epoch,
            timeout_ms=request.timeout_ms,
            update_ms=now_ms,
            previous_producer_id=previous,
        )
        return self._store(
            transaction, begun, waiter=waiter, result=Identity(producer_id, epoch), last_epoch=last_epoch
        )

    def _first(self, request: Initialize, waiter: Waiter, now_ms: int) -> list[Effect]:
        """Initializes an unknown id; a producer id in the request is ignored, as in Kafka."""
        if not self._spare_ids:
            return [TakeProducerId(request, waiter)]
        transaction = Transaction(request.transactional_id)
        self._transactions[request.transactional_id] = transaction
        producer_id = self._spare_ids.pop()
        begun = StoredTransaction(
            producer_id=producer_id, producer_epoch=0, timeout_ms=request.timeout_ms, update_ms=now_ms
        )
        return self._store(transaction, begun, waiter=waiter, result=Identity(producer_id, 0))

    def _add(
        self, transaction: Transaction | None, request: AddPartitions, waiter: Waiter, now_ms: int
    ) -> list[Effect]:
        """Section 3.5. The answer comes once the record is on disk, so before the first batch can be written."""
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
                return _reply(waiter, None)  # all of them are in it already
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
        return self._store(transaction, ongoing, waiter=waiter, last_epoch=transaction.last_epoch)

    def _end(self, transaction: Transaction | None, request: End, waiter: Waiter, now_ms: int) -> list[Effect]:
        stored = None
        if transaction is not None:
            stored = transaction.stored
        if transaction is None or stored is None:
            return _reply(waiter, TransactionError.INVALID_PRODUCER_ID_MAPPING)
        if request.client_version >= 2:
            decision = _decide_second(stored, request)
        else:
            decision = _decide_first(stored, request)
        if isinstance(decision, TransactionError):
            return _reply(waiter, decision)
        if not decision:
            return _reply(waiter, Identity(stored.producer_id, stored.producer_epoch))
        return self._prepare(transaction, request, waiter, now_ms)

    def _prepare(self, transaction: Transaction, request: End, waiter: Waiter, now_ms: int) -> list[Effect]:
        """Decides the transaction. With version 2 the record, and so the markers, have the next epoch."""
        stored = transaction.stored
        assert stored is not None
        epoch = stored.producer_epoch
        last_epoch = -1
        next_id = -1
        identity = Identity(stored.producer_id, epoch)
        if request.client_version >= 2:
            last_epoch = epoch
            epoch += 1
            identity = Identity(stored.producer_id, epoch)
            if epoch > LAST_EPOCH:  # the epochs of this producer id are used up: the producer goes on with another
                if not self._spare_ids:
                    return [TakeProducerId(request, waiter)]
                next_id = self._spare_ids.pop()
                identity = Identity(next_id, 0)
        # With version 2 a producer may abort though nothing was begun, which raises its epoch.
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
        """Aborts an open transaction that its producer did not end. No producer is given the epoch of the fence.

        orphans: partitions that are to be ended too, by an epoch of at least least_epoch.
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
        if due_ms > now_ms and stored.start_ms <= now_ms:  # another transaction has begun since the timer was set
            return [At(transaction.transactional_id, due_ms)]
        return [TimedOut(transaction.transactional_id), *self._fence(transaction, now_ms)]


def _completed(stored: StoredTransaction, now_ms: int) -> StoredTransaction:
    """The record to store once all markers are on disk. If the epochs are used up, it has the next producer id."""
    if stored.status is Status.PREPARE_COMMIT:
        status = Status.COMPLETE_COMMIT
    else:
        status = Status.COMPLETE_ABORT
    done = attrs.evolve(stored, status=status, partitions=frozenset(), update_ms=now_ms)
    if stored.next_producer_id == -1:
        return done
    return attrs.evolve(
        done,
        producer_id=stored.next_producer_id,
        producer_epoch=0,
        previous_producer_id=stored.producer_id,
        next_producer_id=-1,
    )


def _check_producer(stored: StoredTransaction | None, producer_id: int, producer_epoch: int) -> TransactionError | None:
    if stored is None or stored.producer_id != producer_id:
        return TransactionError.INVALID_PRODUCER_ID_MAPPING
    if stored.producer_epoch != producer_epoch:
        return TransactionError.PRODUCER_FENCED
    return None


def _decide_first(stored: StoredTransaction, request: End) -> TransactionError | bool:
    """EndTxn 0 to 4 (section 3.8): an error, True to end the transaction, False where that was done before."""
    error = _check_producer(stored, request.producer_id, request.producer_epoch)
    if error is not None:
        return error
    if stored.status is Status.ONGOING:
        return True
    if request.commit:
        complete = Status.COMPLETE_COMMIT
    else:
        complete = Status.COMPLETE_ABORT
    if stored.status is complete:
        return False
    if stored.status is _prepared(request):
        return TransactionError.CONCURRENT_TRANSACTIONS
    return TransactionError.INVALID_TXN_STATE


def _prepared(request: End) -> Status:
    """The status that a request asks for, while its markers are being written."""
    if request.commit:
        return Status.PREPARE_COMMIT
    return Status.PREPARE_ABORT


def _decide_second(stored: StoredTransaction, request: End) -> TransactionError | bool:
    """EndTxn 5 (section 3.8), as _decide_first(). A retry comes with the epoch before the present one."""
    epoch = stored.producer_epoch
    is_same = request.producer_id == stored.producer_id
    is_retry_of_change = (
        request.producer_id == stored.previous_producer_id and request.producer_epoch == LAST_EPOCH and epoch == 0
    )
    if not is_same and not is_retry_of_change:
        return TransactionError.INVALID_PRODUCER_ID_MAPPING
    is_retry = is_retry_of_change or request.producer_epoch == epoch - 1
    is_current = is_same and request.producer_epoch == epoch
    if stored.status in (Status.ONGOING, Status.EMPTY):
        is_valid = is_current
    elif stored.status in _PREPARED:
        is_valid = is_retry
    else:
        is_valid = is_retry or is_current
    if not is_valid:
        return TransactionError.PRODUCER_FENCED
    if stored.status is Status.ONGOING:
        return True
    if stored.status in _PREPARED:
        is_alike = request.commit == (stored.status is Status.PREPARE_COMMIT)
        if is_alike:
            return TransactionError.CONCURRENT_TRANSACTIONS
        return TransactionError.INVALID_TXN_STATE
    if is_current:  # nothing was begun: an abort raises the epoch all the same
        if request.commit:
            return TransactionError.INVALID_TXN_STATE
        return True
    is_alike = request.commit == (stored.status is Status.COMPLETE_COMMIT)
    if not is_alike:
        return TransactionError.INVALID_TXN_STATE
    return False


def _holds(stored: StoredTransaction | None, partition: Partition, epoch: int) -> bool:
    """Whether ending the transaction of a record also ends what a producer of this epoch has open in the partition.
    Not if its epoch is higher: a record that was lost may have raised it.
    """
    return stored is not None and partition in stored.partitions and epoch <= stored.producer_epoch


def _reply(waiter: Waiter, result: Result) -> list[Effect]:
    if waiter is None:
        return []
    return [Reply(waiter, result)]
