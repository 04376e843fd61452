"""Transactions of one producer: state, identity and partitions.

Rules (clients reference 2.9, Kafka's TransactionManager):
- A call that is not allowed in the current state raises ProducerStateError and has no
  effect.
- After the first failure inside a transaction, no further batch of the transaction is
  written, and the transaction can only be aborted.
- A producer whose transactional id was taken over by another producer can only be
  closed.
- The coordinator stores a partition as part of the transaction before the partition's
  first batch is written.
- A request that the coordinator cannot execute now is retried until the deadline. All
  requests are idempotent.

The coordinator is in coordination/transactions.py. Batches are written by sender.py.
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
_MAX_WAIT_MS: Final = 100
#: How often the sender ends transactions that have been open for too long.
_CHECK_MS: Final = 1_000
#: All producers of this library get a new epoch for each transaction (KIP-890).
_VERSION: Final = 2
_RETRIABLE: Final = (
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
ALLOWED_TRANSITIONS: Final[Mapping[TransactionState, frozenset[TransactionState]]] = (
    MappingProxyType(
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
)


class TransactionManager:
    """State machine of one transactional producer. Its fields change under the
    producer's lock, which is the lock of `memory_freed`.
    """

    def __init__(
        self,
        fs: FS,
        coordinator: TransactionCoordinator,
        transactional_id: str,
        timeout_ms: int,
        memory_freed: threading.Condition,
    ) -> None:
        self.transactional_id = transactional_id
        self._fs = fs
        self._coordinator = coordinator
        self._timeout_ms = timeout_ms
        self._memory_freed = memory_freed
        self.state = TransactionState.UNINITIALIZED
        #: Producer id and epoch, or None before init_transactions().
        self.identity: ProducerIdAndEpoch | None = None
        #: The error after which the transaction, or the producer, cannot continue.
        self.failure: LogcoreError | None = None
        # Partitions that this producer has added to the open transaction.
        self._partitions: set[tuple[str, int]] = set()
        # Whether an earlier producer with this id began the open transaction.
        self._is_inherited = False
        self._checked_ms = fs.monotonic_ms()

    # -- states

    def check(self, target_state: TransactionState) -> None:
        """Check a state transition. The lock is held.

        Raises:
            ProducerStateError: the transition is not allowed.
            LogcoreError: the transaction or the producer has failed earlier.
        """
        if target_state in ALLOWED_TRANSITIONS[self.state]:
            return
        if self.failure is not None:
            raise self.failure
        allowed = sorted(
            before.name
            for before, after in ALLOWED_TRANSITIONS.items()
            if target_state in after
        )
        raise ProducerStateError(
            f"a producer cannot change from {self.state.name} to {target_state.name}",
            expected=" or ".join(allowed),
            found=self.state.name,
        )

    def enter(self, target_state: TransactionState) -> None:
        """Check and perform a state transition. The lock is held."""
        self.check(target_state)
        self.state = target_state
        if target_state in (TransactionState.READY, TransactionState.ABORTING):
            self.failure = None
        if target_state is TransactionState.READY:
            self._partitions.clear()
            self._is_inherited = False

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
            "a transactional producer can send only in a transaction; call begin_transaction() first",
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

        A prepared transaction remains open, because another store decides it.
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
            TransactionState.ABORTABLE_ERROR in ALLOWED_TRANSITIONS[self.state]
            and self.failure is None
        ):
            self.state = TransactionState.ABORTABLE_ERROR
            failure = TransactionAbortedError(
                f"the transaction can only be aborted, because a part of it failed: {error}",
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
        response = self._initialized(deadline_ms, keeps_prepared)
        with self._memory_freed:
            self.identity = ProducerIdAndEpoch(
                response.producer_id, response.producer_epoch
            )
            self._is_inherited = isinstance(response, Unended)
            if self._is_inherited:
                self.enter(TransactionState.PREPARED)
            else:
                self.enter(TransactionState.READY)

    def _initialized(
        self, deadline_ms: int | None, keeps_prepared: bool = False
    ) -> ProducerIdAndEpoch | Unended:
        request = Initialize(
            transactional_id=self.transactional_id,
            timeout_ms=self._timeout_ms,
            keeps_open=keeps_prepared,
        )
        return self._request_until(deadline_ms, request)

    def prepared(self) -> str:
        """Return the prepared transaction as text, or "" if it has no writes."""
        if not self._partitions and not self._is_inherited:
            return ""
        identity = self.initialized_identity()
        return f"{identity.producer_id}:{identity.producer_epoch}"

    def new_partitions(
        self, partitions: Iterable[tuple[str, int]]
    ) -> frozenset[tuple[str, int]]:
        """Return the partitions that are not in the transaction yet."""
        return frozenset(partitions) - self._partitions

    def add(self, partitions: Collection[tuple[str, int]]) -> None:
        """Add partitions to the open transaction, and wait until that is durable.

        Raises:
            ResourceError: the coordinator cannot add them now.
            ProducerFencedError: another producer has taken over the id.
        """
        identity = self.initialized_identity()
        self._request(
            AddPartitions(
                transactional_id=self.transactional_id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                partitions=frozenset(partitions),
                client_version=_VERSION,
            )
        )
        with self._memory_freed:
            self._partitions.update(partitions)

    def end(self, *, commit: bool, deadline_ms: int | None) -> None:
        """End the transaction. The state must be COMMITTING or ABORTING.

        Without partitions, the coordinator has no record of the transaction and gets no
        request.

        Raises:
            ResourceError: the deadline has passed. The caller may retry.
        """
        identity = self.initialized_identity()
        if self._partitions or self._is_inherited:
            request = End(
                transactional_id=self.transactional_id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                commit=commit,
                client_version=_VERSION,
            )
            response = self._request_until(deadline_ms, request)
            # The earlier producer may have sent the same request and received the same
            # epoch. Another Initialize request gives this producer a new epoch.
            if self._is_inherited:
                response = self._initialized(deadline_ms)
            identity = ProducerIdAndEpoch(response.producer_id, response.producer_epoch)
        with self._memory_freed:
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

    def initialized_identity(self) -> ProducerIdAndEpoch:
        """Return the identity. init_transactions() must have succeeded."""
        assert self.identity is not None, self.state
        return self.identity

    def _request_until(
        self, deadline_ms: int | None, request: Request
    ) -> ProducerIdAndEpoch | Unended:
        wait_ms = _FIRST_WAIT_MS
        while True:
            try:
                response = self._request(request)
            except (ResourceError, LogLockedError):
                if (
                    deadline_ms is not None
                    and self._fs.monotonic_ms() + wait_ms > deadline_ms
                ):
                    raise
                with self._memory_freed:
                    self._memory_freed.wait(wait_ms / 1000)
                wait_ms = min(2 * wait_ms, _MAX_WAIT_MS)
                continue
            assert response is not None, request
            return response

    def _request(self, request: Request) -> ProducerIdAndEpoch | Unended | None:
        result = self._coordinator.request(request)
        if isinstance(result, TransactionError):
            self._raise_error(result)
        return result

    def _raise_error(self, error: TransactionError) -> NoReturn:
        """Raise the exception for an error of the coordinator."""
        transactional_id = self.transactional_id
        if error in _RETRIABLE:
            raise ResourceError(
                f"the transactions of {transactional_id!r} cannot be used now: {error.name}"
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
                f"another producer has taken over {transactional_id!r}, or this one had a transaction open for too long"
            )
        else:
            failure = TransactionAbortedError(
                f"the transaction of {transactional_id!r} was open for too long and was aborted: {error.name}"
            )
        with self._memory_freed:
            self.fail(failure)
        raise failure
