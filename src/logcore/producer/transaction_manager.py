"""Transactions of one producer: state, identity and partitions.

Rules (clients reference 2.9, Kafka's TransactionManager):
- A call that is not allowed in the current state raises ProducerStateError and has no
  effect.
- After the first failure inside a transaction, no further batch of the transaction is
  written, and the transaction can only be aborted.
- A producer whose transactional id was taken over by another producer can only be
  closed.
- A partition is in the coordinator's record before its first batch is written.
- A request that the coordinator cannot execute now is retried until the deadline. Every
  request may be retried.

This module does not implement the coordinator's decisions (transactions.py) and writes
no batches (sender.py).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NoReturn

from logcore.coordination.transaction_effects import (
    AddPartitions,
    End,
    Initialize,
    ProducerIdAndEpoch,
    Request,
    TransactionError,
    Unended,
)
from logcore.coordinators.transactions import TransactionCoordinator
from logcore.errors import (
    InvalidConfigError,
    LogcoreError,
    LogLockedError,
    ProducerFencedError,
    ProducerStateError,
    ResourceError,
    TransactionAbortedError,
)
from logcore.fs import FS
from logcore.reporting import WARNING, log_line

#: First and longest delay before a request is retried. The delay doubles each time.
_FIRST_WAIT_MS: Final = 1
_LONGEST_WAIT_MS: Final = 100
#: How often the sender ends transactions that have been open for too long.
_CHECK_MS: Final = 1_000
#: All producers of this library get a new epoch for each transaction (KIP-890).
_VERSION: Final = 2
_LATER: Final = (
    TransactionError.COORDINATOR_NOT_AVAILABLE,
    TransactionError.CONCURRENT_TRANSACTIONS,
)
_FENCED: Final = (
    TransactionError.PRODUCER_FENCED,
    TransactionError.INVALID_PRODUCER_ID_MAPPING,
)


class TransactionState(enum.Enum):
    """The states of Kafka's TransactionManager, with the same names."""

    UNINITIALIZED = enum.auto()
    INITIALIZING = enum.auto()
    READY = enum.auto()
    IN_TRANSACTION = enum.auto()
    PREPARED = enum.auto()
    COMMITTING = enum.auto()
    ABORTING = enum.auto()
    ABORTABLE_ERROR = enum.auto()
    FATAL_ERROR = enum.auto()


#: The states that may follow each state. FATAL_ERROR may follow every state.
NEXT: Final[Mapping[TransactionState, frozenset[TransactionState]]] = MappingProxyType(
    {
        TransactionState.UNINITIALIZED: frozenset({TransactionState.INITIALIZING}),
        TransactionState.INITIALIZING: frozenset(
            {
                TransactionState.READY,
                TransactionState.INITIALIZING,
                TransactionState.PREPARED,
            }
        ),
        TransactionState.READY: frozenset({TransactionState.IN_TRANSACTION}),
        TransactionState.IN_TRANSACTION: frozenset(
            {
                TransactionState.PREPARED,
                TransactionState.COMMITTING,
                TransactionState.ABORTING,
                TransactionState.ABORTABLE_ERROR,
            }
        ),
        TransactionState.PREPARED: frozenset(
            {
                TransactionState.PREPARED,
                TransactionState.COMMITTING,
                TransactionState.ABORTING,
                TransactionState.ABORTABLE_ERROR,
            }
        ),
        TransactionState.COMMITTING: frozenset(
            {
                TransactionState.COMMITTING,
                TransactionState.READY,
                TransactionState.ABORTABLE_ERROR,
            }
        ),
        TransactionState.ABORTING: frozenset(
            {TransactionState.ABORTING, TransactionState.READY}
        ),
        TransactionState.ABORTABLE_ERROR: frozenset(
            {TransactionState.ABORTING, TransactionState.ABORTABLE_ERROR}
        ),
        TransactionState.FATAL_ERROR: frozenset(),
    }
)


class Transacting:
    """State machine of one transactional producer.

    `room` is the condition of the producer's memory. All fields change under its lock.
    """

    def __init__(
        self,
        fs: FS,
        coordinator: TransactionCoordinator,
        transactional_id: str,
        timeout_ms: int,
        room: threading.Condition,
    ) -> None:
        self.transactional_id = transactional_id
        self._fs = fs
        self._coordinator = coordinator
        self._timeout_ms = timeout_ms
        self._room = room
        self.state = TransactionState.UNINITIALIZED
        #: Producer id and epoch, or None before init_transactions().
        self.identity: ProducerIdAndEpoch | None = None
        #: The error after which the transaction, or the producer, cannot continue.
        self.failure: LogcoreError | None = None
        # Added by this producer to the open transaction.
        self._partitions: set[tuple[str, int]] = set()
        self._is_of_before = False  # an earlier producer opened the transaction
        self._checked_ms = fs.monotonic_ms()

    # -- states

    def check(self, wanted: TransactionState) -> None:
        """Check a state transition. The lock is held.

        Raises:
            ProducerStateError: the transition is not allowed.
            LogcoreError: the transaction or the producer has failed earlier.
        """
        if wanted in NEXT[self.state]:
            return
        if self.failure is not None:
            raise self.failure
        allowed = sorted(
            before.name for before, after in NEXT.items() if wanted in after
        )
        raise ProducerStateError(
            f"a producer cannot get to {wanted.name} from {self.state.name}",
            expected=" or ".join(allowed),
            found=self.state.name,
        )

    def enter(self, wanted: TransactionState) -> None:
        """Check and perform a state transition. The lock is held."""
        self.check(wanted)
        self.state = wanted
        if wanted in (TransactionState.READY, TransactionState.ABORTING):
            self.failure = None
        if wanted is TransactionState.READY:
            self._partitions.clear()
            self._is_of_before = False

    def check_sending(self) -> None:
        """Check that a record may be sent. The lock is held.

        Raises:
            ProducerStateError: no transaction is open.
            LogcoreError: the transaction can only be aborted.
        """
        if self.state is TransactionState.IN_TRANSACTION:
            return
        if self.failure is not None:
            raise self.failure
        raise ProducerStateError(
            "a producer with a transactional id sends inside a transaction: call begin_transaction()",
            expected=TransactionState.IN_TRANSACTION.name,
            found=self.state.name,
        )

    def check_completing(self) -> None:
        """Check that a transaction is prepared or being completed. The lock is held.

        Raises:
            ProducerStateError: no transaction is prepared.
        """
        if self.state not in (
            TransactionState.PREPARED,
            TransactionState.COMMITTING,
            TransactionState.ABORTING,
        ):
            raise self.failure or ProducerStateError(
                "no transaction is prepared",
                expected=TransactionState.PREPARED.name,
                found=self.state.name,
            )

    @property
    def has_failed(self) -> bool:
        return self.state in (
            TransactionState.ABORTABLE_ERROR,
            TransactionState.FATAL_ERROR,
        )

    @property
    def is_open(self) -> bool:
        """Whether close() must abort a transaction.

        A prepared transaction waits for its decision instead.
        """
        return self.state in (
            TransactionState.IN_TRANSACTION,
            TransactionState.COMMITTING,
            TransactionState.ABORTING,
            TransactionState.ABORTABLE_ERROR,
        )

    def fail(self, error: Exception) -> None:
        """Change to an error state after a permanent failure. The lock is held."""
        if isinstance(error, ProducerFencedError):
            self.state = TransactionState.FATAL_ERROR
            self.failure = error
        elif (
            TransactionState.ABORTABLE_ERROR in NEXT[self.state]
            and self.failure is None
        ):
            self.state = TransactionState.ABORTABLE_ERROR
            failure = TransactionAbortedError(
                f"the transaction can only be aborted, since a part of it failed: {error}",
            )
            failure.__cause__ = error
            self.failure = failure

    # -- requests

    def initialize(
        self, deadline_ms: int | None, *, keeps_prepared: bool = False
    ) -> None:
        """Fence earlier producers with this id, and end their open transaction.

        The state must be INITIALIZING. With `keeps_prepared`, the transaction remains
        open, and the state becomes PREPARED.
        """
        found = self._initialized(deadline_ms, keeps_prepared)
        with self._room:
            self.identity = ProducerIdAndEpoch(found.producer_id, found.producer_epoch)
            self._is_of_before = isinstance(found, Unended)
            if self._is_of_before:
                self.enter(TransactionState.PREPARED)
            else:
                self.enter(TransactionState.READY)

    def _initialized(
        self, deadline_ms: int | None, keeps_prepared: bool = False
    ) -> ProducerIdAndEpoch | Unended:
        asked = Initialize(
            transactional_id=self.transactional_id,
            timeout_ms=self._timeout_ms,
            keeps_open=keeps_prepared,
        )
        return self._request_until(deadline_ms, asked)

    def prepared(self) -> str:
        """Return the prepared transaction as text, or "" if it has no writes."""
        if not self._partitions and not self._is_of_before:
            return ""
        identity = self.known_identity()
        return f"{identity.producer_id}:{identity.producer_epoch}"

    def new_partitions(
        self, partitions: Iterable[tuple[str, int]]
    ) -> frozenset[tuple[str, int]]:
        """Return the partitions that are not in the transaction yet."""
        return frozenset(partitions) - self._partitions

    def add(self, partitions: Collection[tuple[str, int]]) -> None:
        """Add partitions to the open transaction. They are durable when this returns.

        Raises:
            ResourceError: the coordinator cannot add them now.
            ProducerFencedError: another producer has taken over the id.
        """
        identity = self.known_identity()
        self._request(
            AddPartitions(
                transactional_id=self.transactional_id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                partitions=frozenset(partitions),
                client_version=_VERSION,
            )
        )
        with self._room:
            self._partitions.update(partitions)

    def end(self, *, commit: bool, deadline_ms: int | None) -> None:
        """End the transaction. The state must be COMMITTING or ABORTING.

        Without partitions, the coordinator has no record of the transaction and gets no
        request.

        Raises:
            ResourceError: the deadline has passed. The caller may retry.
        """
        identity = self.known_identity()
        if self._partitions or self._is_of_before:
            ended = End(
                transactional_id=self.transactional_id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                commit=commit,
                client_version=_VERSION,
            )
            found = self._request_until(deadline_ms, ended)
            # The previous producer may have sent the same request and received the same
            # epoch. So this producer gets a new epoch.
            if self._is_of_before:
                found = self._initialized(deadline_ms)
            identity = ProducerIdAndEpoch(found.producer_id, found.producer_epoch)
        with self._room:
            self.identity = identity
            self.enter(TransactionState.READY)

    def end_overdue(self) -> None:
        """End overdue transactions of this directory, at most once a second.

        A failure does not stop the producer. Its next request raises the error itself.
        """
        now_ms = self._fs.monotonic_ms()
        if now_ms - self._checked_ms >= _CHECK_MS:
            self._checked_ms = now_ms
            try:
                self._coordinator.end_overdue()
            except LogcoreError as error:
                log_line(
                    "transactions",
                    WARNING,
                    "transactions that are overdue were not ended: %s",
                    error,
                )

    def known_identity(self) -> ProducerIdAndEpoch:
        """Return the identity. init_transactions() must have succeeded."""
        assert self.identity is not None, self.state
        return self.identity

    def _request_until(
        self, deadline_ms: int | None, request: Request
    ) -> ProducerIdAndEpoch | Unended:
        wait_ms = _FIRST_WAIT_MS
        while True:
            try:
                found = self._request(request)
            except (ResourceError, LogLockedError):
                if (
                    deadline_ms is not None
                    and self._fs.monotonic_ms() + wait_ms > deadline_ms
                ):
                    raise
                with self._room:
                    self._room.wait(wait_ms / 1000)
                wait_ms = min(2 * wait_ms, _LONGEST_WAIT_MS)
                continue
            assert found is not None, request
            return found

    def _request(self, request: Request) -> ProducerIdAndEpoch | Unended | None:
        result = self._coordinator.request(request)
        if isinstance(result, TransactionError):
            self._refuse(result)
        return result

    def _refuse(self, error: TransactionError) -> NoReturn:
        """Raise the exception for a refused request."""
        name = self.transactional_id
        if error in _LATER:
            raise ResourceError(
                f"the transactions of {name!r} cannot be used now: {error.name}"
            )
        if error is TransactionError.INVALID_TRANSACTION_TIMEOUT:
            raise InvalidConfigError(
                "transaction_timeout_ms",
                expected="1 to 900,000 ms",
                found=self._timeout_ms,
            )
        failure: LogcoreError
        if error in _FENCED:
            failure = ProducerFencedError(
                f"another producer has taken {name!r} over, or a transaction of this one was open for too long"
            )
        else:
            failure = TransactionAbortedError(
                f"the transaction of {name!r} was aborted, since it was open for too long: {error.name}"
            )
        with self._room:
            self.fail(failure)
        raise failure
