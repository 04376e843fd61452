"""Transaction coordinator for the producers of a log directory.

It executes the effects of logcore.coordination.

Rules (clients reference 2.9):
- A record of `__transaction_state` is durable before the write that it allows. The
  partitions of a transaction are durable before its first batch, and the decision
  before a marker. Only the final record, after all markers, need not be durable.
- One lock guards the decisions. It is held while records and markers are appended, but
  not while a thread waits for the disk.
- In a directory that several processes write, a request holds a lock of all processes. It
  acquires this lock before it reads the records of other processes, and releases it after
  the last sync. If a process dies while it holds the lock, the next process executes its
  stored decisions.
- If a record could not be stored, it is unknown whether the log contains it. The state in
  memory is therefore discarded, and the log is read again.
- No thread runs in the background: end_overdue() ends transactions that have been open for
  too long.

logcore.coordination defines how a request changes a transaction. The state of a producer
is in transaction_manager.py. A broker of this process coordinates its own transactions
(netshim).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Final, TypeVar

from logcore.coordination.transaction_effects import (
    AbortOrphan,
    AllocateProducerId,
    CancelTransactionTimer,
    Effect,
    End,
    Request,
    Result,
    SetTransactionTimer,
    StoreTransaction,
    TimedOut,
    TransactionError,
    TransactionReply,
    WriteMarkers,
)
from logcore.coordination.transactions import EXPIRY_CHECK_MS, TransactionMachine
from logcore.coordinators.durable_queue import DurableQueue, sync_present
from logcore.coordinators.orphans import find_orphans
from logcore.coordinators.pending_result import PendingResult
from logcore.coordinators.stored_transactions import (
    TRANSACTIONS_CONFIG,
    stored_transactions,
)
from logcore.deadlines import Deadlines
from logcore.directory.interface import HostDirectory
from logcore.errors import (
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    LogcoreError,
    ProducerStateError,
    ResourceError,
    TopicNotFoundError,
)
from logcore.format.group_records import partition_of
from logcore.format.transaction_records import (
    Partition,
    Status,
    StoredTransaction,
    transaction_key,
    transaction_value,
)
from logcore.fs import FS
from logcore.log import Log
from logcore.metadata.filenames import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from logcore.partition.coordinator_append import marker_epoch
from logcore.reporting import ERROR, WARNING, log_line

_COMPLETE: Final = frozenset({Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT})
#: Errors after which a marker is not retried: its partition was deleted, or has a later
#: marker. CoordinatorFencedError is not included, because there is no other
#: coordinator. If a marker with that error counted as written, its records would remain
#: undecided.
_MARKER_UNNEEDED_ERRORS: Final = (TopicNotFoundError, InvalidProducerEpochError)


T = TypeVar("T")


class TransactionCoordinator:
    """All transactions of one directory.

    The first producer with a transactional id, or the first tick(), creates this
    object. Any thread may call its methods.
    """

    def __init__(
        self,
        fs: FS,
        directory: HostDirectory,
        deciding: Callable[[], AbstractContextManager[None]],
        on_marker: Callable[[int, bool], None],
        clock_ms: int,
    ) -> None:
        self._fs = fs
        self._directory = directory
        #: Excludes the decisions of other processes. May raise LogLockedError.
        self._deciding = deciding
        #: Called for each marker in `__consumer_offsets`, with its producer id and
        #: whether it commits.
        self._on_marker = on_marker
        self._lock = threading.RLock()
        #: Added to the monotonic clock. It is the same in all processes that share the
        #: directory, because they compare the start times of transactions.
        self._clock_ms = clock_ms
        self._unsynced = DurableQueue(self._lock)
        # The following fields are written under the lock.
        self._machine = TransactionMachine(is_two_phase=True)
        self._timers: Deadlines[str] = Deadlines()
        self._effects: deque[Effect] = deque()
        self._is_loaded = False
        #: Partition -> its log, and the offset up to which it was read or written.
        self._ends: dict[int, tuple[Log, int]] = {}
        self._expired_ms = self.now_ms()
        # After a power loss, transactions may be open without a record, see
        # TransactionMachine.adopt(). A shared directory has none: its processes sync
        # the record before they write. It also never counts as clean.
        self._expects_orphans = not directory.host.was_clean and not directory.is_shared

    def now_ms(self) -> int:
        """Return the monotonic clock plus the offset of the constructor."""
        return self._clock_ms + self._fs.monotonic_ms()

    # -- requests

    def request(self, request: Request) -> Result:
        """Execute a request and return its durable result.

        The result is a ProducerIdAndEpoch, None or a TransactionError.

        Raises:
            ProducerStateError: a broker of this process serves the directory.
            LogLockedError: another process decides.
            LogcoreError: `__transaction_state` could not be read.
        """
        pending = PendingResult()
        self._do(lambda now_ms: self._machine.handle(request, pending, now_ms))
        assert pending.is_done, request
        result: Result = pending.result
        return result

    def end_overdue(self) -> None:
        """End transactions that have timed out, and transactions whose end a crashed
        process began.

        This raises the errors of request().
        """
        if TRANSACTIONS_TOPIC in self._directory:
            self._do(self._expire)

    def _expire(self, now_ms: int) -> list[Effect]:
        if now_ms - self._expired_ms < EXPIRY_CHECK_MS:
            return []
        self._expired_ms = now_ms
        return self._machine.expire(self._directory.host.trusted_ms(now_ms))

    def end(self, transactional_id: str, *, commit: bool) -> None:
        """End the open transaction of an id on behalf of its producer.

        This raises the errors of request() too.

        Raises:
            InvalidTransactionStateError: no transaction is open.
            ResourceError: the transaction cannot be ended now.
        """
        stored = self.all().get(transactional_id)
        result: Result = TransactionError.INVALID_TXN_STATE
        if stored is not None and stored.status is Status.ONGOING:
            result = self.request(
                End(
                    transactional_id=transactional_id,
                    producer_id=stored.producer_id,
                    producer_epoch=stored.producer_epoch,
                    commit=commit,
                    # With version 2, the end raises the producer epoch. So the producer
                    # is fenced, and cannot write outside of a transaction.
                    client_version=2,
                )
            )
        if (
            result is TransactionError.INVALID_TXN_STATE
            or result is TransactionError.PRODUCER_FENCED
        ):
            raise InvalidTransactionStateError(
                f"no transaction of {transactional_id!r} is open"
            )
        if isinstance(result, TransactionError):
            raise ResourceError(
                f"the transaction of {transactional_id!r} cannot be ended now: {result.name}"
            )

    def verified(
        self,
        producer: tuple[str, int, int],
        partition: Partition,
        write: Callable[[], T],
    ) -> T | TransactionError:
        """Call write() and return its result if the producer may write now.

        Otherwise, return the error. The producer is identified by a transactional id, a
        producer id and its epoch. No marker of this process is appended between the
        check and the write. A marker of another process raises the epoch, so that the
        log refuses later batches. write() must not call this object.
        """
        with self._lock:
            error = self._machine.verify(*producer, partition)
            if error is None:
                return write()
            return error

    def get(self, transactional_id: str) -> StoredTransaction | None:
        """Return the latest record of an id in the memory of this process."""
        with self._lock:
            return self._machine.get(transactional_id)

    def all(self) -> dict[str, StoredTransaction]:
        """Return the latest record of each transactional id.

        This raises the errors of request().
        """
        if TRANSACTIONS_TOPIC not in self._directory:
            return {}
        self._do(lambda _: [])
        with self._lock:
            return self._machine.all()

    def _do(self, step: Callable[[int], Iterable[Effect]]) -> None:
        if self._directory.host.has_coordinator:
            raise ProducerStateError(
                "a broker of this process serves the directory, and coordinates its transactions: use a Kafka client",
                path=self._directory.path,
            )
        # Another process may have decided since the last step: its records are read
        # first.
        with self._deciding():
            try:
                with self._lock:
                    now_ms = self.now_ms()
                    self._catch_up(now_ms)
                    for name in self._timers.due(now_ms):
                        self._act(self._machine.timed_out(name, now_ms))
                    self._act(step(now_ms))
                self._unsynced.wait_until_durable()
            except BaseException:
                # After an interrupt within a transaction, the stored records define its
                # progress.
                with self._lock:
                    self._is_loaded = False
                raise
            if self._directory.is_shared:
                # The records of this step need not be read again.
                with self._lock:
                    self._record_ends()

    # -- stored records

    def _catch_up(self, now_ms: int) -> None:
        """Read the stored records if the state in memory is not current.

        Raises:
            LogcoreError: a log cannot be read, or a record cannot be decoded.
        """
        if self._is_loaded and not (
            self._directory.is_shared and self._has_new_records()
        ):
            return
        logs = [self._open_log(number) for number in self._numbers()]
        for log in logs:
            log.refresh()
            sync_present(log)
        found = stored_transactions(logs)
        self._effects.clear()  # effects of an interrupted operation
        # Requests that wait for records of the old state get a retriable error.
        self._act(self._machine.end())
        self._machine = TransactionMachine(is_two_phase=True)
        self._timers = Deadlines()
        self._is_loaded = True
        self._record_ends()
        self._act(self._machine.load(found, now_ms))
        if self._expects_orphans:
            self._expects_orphans = False
            self._act(self._machine.adopt(find_orphans(self._directory), now_ms))

    def _numbers(self) -> tuple[int, ...]:
        if TRANSACTIONS_TOPIC in self._directory:
            return self._directory.partitions(TRANSACTIONS_TOPIC)
        return ()

    def _has_new_records(self) -> bool:
        """Return whether another process has appended records."""
        for number in self._numbers():
            log = self._open_log(number)
            log.refresh()
            if self._ends.get(number) != (log, log.log_end_offset):
                return True
        return False

    def _record_ends(self) -> None:
        for number in self._numbers():
            log = self._open_log(number)
            self._ends[number] = (log, log.log_end_offset)

    def _open_log(self, number: int) -> Log:
        log = self._directory.partition(TRANSACTIONS_TOPIC, number)
        if log.has_failed:
            return self._directory.host.open_again(TRANSACTIONS_TOPIC, number)
        return log

    def _log_of(self, transactional_id: str) -> Log:
        """Return the log of an id, and create the topic if necessary."""
        self._directory.create_topic(
            TRANSACTIONS_TOPIC, 1, TRANSACTIONS_CONFIG, exist_ok=True
        )
        return self._open_log(partition_of(transactional_id, len(self._numbers())))

    # -- effects

    def _act(self, effects: Iterable[Effect]) -> None:
        """Execute effects after the earlier ones. The lock is held."""
        self._effects.extend(effects)
        while self._effects:
            match self._effects.popleft():
                case TransactionReply(PendingResult() as pending, result):
                    pending.set(result)
                case TransactionReply():  # only requests with a PendingResult exist
                    raise AssertionError("a reply without a request")
                case StoreTransaction() as store:
                    self._store(self._machine, store)
                case WriteMarkers() as markers:
                    self._write_markers(self._machine, markers)
                case AbortOrphan() as orphan:
                    self._abort_orphan(orphan)
                case AllocateProducerId() as allocation:
                    self._allocate_producer_id(allocation)
                case SetTransactionTimer(name, at_ms):
                    self._timers.at(at_ms, name)
                case CancelTransactionTimer(name):
                    self._timers.cancel(name)
                case TimedOut(name):
                    log_line(
                        "transactions",
                        WARNING,
                        "the transaction of %r was open too long and is aborted",
                        name,
                    )

    def _store(self, machine: TransactionMachine, effect: StoreTransaction) -> None:
        if machine.is_over:  # an earlier record failed
            return
        name = effect.transactional_id
        if effect.stored is None:
            value = None
        else:
            value = transaction_value(effect.stored)
        try:
            log = self._log_of(name)
            receipt = log.append(
                value,
                key=transaction_key(name),
                timestamp_ms=self._fs.now_ms(),
                durability="os",
            )
        except (LogcoreError, OSError) as error:
            # The stored records are read again before the next decision.
            self._on_stored(machine, effect, error)
            return
        # This record need not be durable: after a crash, the markers are written again,
        # which has no effect.
        if effect.stored is None or effect.stored.status in _COMPLETE:
            self._on_stored(machine, effect, None)
            return
        ends = {log: receipt.last_offset + 1}
        self._unsynced.add(
            ends, lambda failures: self._on_stored(machine, effect, failures.get(log))
        )

    def _on_stored(
        self,
        machine: TransactionMachine,
        effect: StoreTransaction,
        failure: Exception | None,
    ) -> None:
        if failure is not None and not machine.is_over:
            name = effect.transactional_id
            log_line(
                "transactions",
                ERROR,
                "%s: a record of %r was not stored: %s",
                TRANSACTIONS_TOPIC,
                name,
                failure,
            )
            self._is_loaded = False
        self._act(machine.stored(effect, self.now_ms(), failed=failure is not None))

    def _write_markers(self, machine: TransactionMachine, effect: WriteMarkers) -> None:
        # Partitions whose marker must be written again.
        unwritten: set[Partition] = set()
        written: dict[Partition, Log] = {}
        ends: dict[Log, int] = {}
        for partition in sorted(effect.partitions):
            try:
                home_epoch = self._log_of(effect.transactional_id).leader_epoch
                log = self._log_for_marker(partition)
                receipt = log.end_transaction(
                    effect.producer_id,
                    effect.producer_epoch,
                    commit=effect.commit,
                    coordinator_epoch=marker_epoch(
                        log.host.writer, effect.producer_id, home_epoch
                    ),
                    durability="os",
                )
            except _MARKER_UNNEEDED_ERRORS:
                continue
            except (LogcoreError, OSError) as error:
                self._record_unwritten(partition, error, unwritten)
                continue
            written[partition] = log
            # One sync for the markers of all partitions of a log.
            ends[log] = receipt.last_offset + 1
        self._unsynced.add(
            ends,
            functools.partial(
                self._on_markers_durable, machine, effect, written, unwritten
            ),
        )

    def _abort_orphan(self, orphan: AbortOrphan) -> None:
        for partition in sorted(orphan.partitions):
            try:
                log = self._log_for_marker(partition)
                log.end_transaction(
                    orphan.producer_id,
                    orphan.producer_epoch,
                    commit=False,
                    coordinator_epoch=marker_epoch(
                        log.host.writer, orphan.producer_id, 0
                    ),
                )
            except (LogcoreError, OSError) as error:
                log_line(
                    "transactions",
                    ERROR,
                    "%s-%d: an open transaction was not aborted: %s",
                    *partition,
                    error,
                )
                continue
            # Groups in memory wait for the end of the transactions of these offsets.
            if partition[0] == OFFSETS_TOPIC:
                self._on_marker(orphan.producer_id, False)

    def _log_for_marker(self, partition: Partition) -> Log:
        """Return the log that gets a marker. A failed log is opened again."""
        log = self._directory.partition(*partition)
        if log.has_failed:
            return self._directory.host.open_again(*partition)
        return log

    def _record_unwritten(
        self, partition: Partition, error: Exception, unwritten: set[Partition]
    ) -> None:
        log_line(
            "transactions",
            ERROR,
            "%s-%d: the marker of a transaction was not stored: %s",
            *partition,
            error,
        )
        unwritten.add(partition)

    def _on_markers_durable(
        self,
        machine: TransactionMachine,
        effect: WriteMarkers,
        written: Mapping[Partition, Log],
        unwritten: set[Partition],
        failures: Mapping[Log, LogcoreError],
    ) -> None:
        for partition, log in written.items():
            if log in failures:
                self._record_unwritten(partition, failures[log], unwritten)
            elif partition[0] == OFFSETS_TOPIC:
                self._on_marker(effect.producer_id, effect.commit)
        self._act(machine.markers_written(effect, frozenset(unwritten), self.now_ms()))

    def _allocate_producer_id(self, effect: AllocateProducerId) -> None:
        producer_id = None
        try:
            producer_id = self._directory.host.next_producer_id()
        except (LogcoreError, OSError) as error:
            log_line(
                "transactions", ERROR, "no producer id could be allocated: %s", error
            )
        self._act(
            self._machine.producer_id_allocated(effect, producer_id, self.now_ms())
        )
