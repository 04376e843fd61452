"""Transactional producer: commits records and consumer offsets atomically.

    with data.producer(transactional_id="totals-0") as producer:
        with producer.transaction():
            producer.send("totals", b"12", key=b"a")
            producer.send_offsets_to_transaction({("orders", 0): 17}, consumer.group_metadata())

Rules (clients reference 2.9):
- A transactional id has one producer at a time. A new producer aborts the open
  transaction of the earlier one, and fences it.
- Readers with isolation="read_committed" receive the records only after the transaction
  is committed.
- A result of send() means that the record is stored, not that its transaction is
  committed.
- An open transaction is aborted by close(), and after transaction_timeout_ms.

transaction_manager.py checks the order of calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any, Protocol, Self

from logcore.coordination.group_requests import (
    Committer,
    GroupError,
    OffsetKey,
)
from logcore.coordinators.transactions import TransactionCoordinator
from logcore.deadlines import milliseconds
from logcore.directory.interface import ClientDirectory
from logcore.errors import (
    CommitFailedError,
    InvalidConfigError,
    LogcoreError,
    RebalanceInProgressError,
)
from logcore.format.group_records import Committed
from logcore.fs import FS
from logcore.metadata.checkpoint import PartitionKey
from logcore.producer.producer import Producer
from logcore.producer.settings import ProducerSettings
from logcore.producer.transaction_manager import TransactionManager, TransactionState
from logcore.reporting import WARNING, log_line


class CommittingMember(Protocol):
    """The member of a group that commits; see Consumer.group_metadata()."""

    @property
    def group_id(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def member_id(self) -> str: ...
    @property
    def group_instance_id(self) -> str | None: ...


class OffsetToCommit(Protocol):
    """An offset to commit for a partition; see logcore.OffsetAndMetadata."""

    @property
    def offset(self) -> int: ...
    @property
    def metadata(self) -> str: ...
    @property
    def leader_epoch(self) -> int: ...


class CommitGroups(Protocol):
    """The group coordinator of a directory; only the methods that this module uses."""

    failure: Exception | None

    def offsets_partition(self, group_id: str) -> tuple[str, int]: ...
    def commit(
        self,
        committer: Committer,
        offsets: Mapping[OffsetKey, Committed],
        producer: tuple[int, int] | None = None,
    ) -> GroupError | None: ...


class TransactionCoordinators(Protocol):
    """The coordinators of the transactions and the groups of a directory."""

    def transactions(self, directory: Any) -> TransactionCoordinator: ...
    def groups(self, directory: Any) -> CommitGroups: ...


class TransactionalProducer(Producer):
    """A producer created by LogDir.producer(transactional_id=...)."""

    def __init__(
        self,
        fs: FS,
        directory: ClientDirectory,
        settings: ProducerSettings,
        coordinators: TransactionCoordinators,
    ) -> None:
        """Create a producer. Users call LogDir.producer()."""
        super().__init__(fs, directory, settings, coordinators.transactions(directory))
        assert self._thread_state.transaction_manager is not None
        self._transaction_manager: TransactionManager = (
            self._thread_state.transaction_manager
        )
        self._coordinators = coordinators

    def __enter__(self) -> Self:
        return self

    def close(self, timeout: float | None = None) -> None:
        """Abort an open transaction, and close the producer like Producer.close().
        Further calls have no effect.
        """
        is_own = self._fs.forks == self._forks and not self._thread_state.is_closing
        if (
            is_own
            and not self._thread_state.callback_runner.is_running_here
            and self._transaction_manager.is_open
        ):
            try:
                self.abort_transaction(timeout)
            except LogcoreError as error:
                text = "the open transaction of %r was not aborted and remains open until its timeout: %s"
                log_line(
                    "transactions",
                    WARNING,
                    text,
                    self._transaction_manager.transactional_id,
                    error,
                )
        super().close(timeout)

    # -- transactions ------------------------------------------------------------------

    def init_transactions(
        self, timeout: float | None = None, *, keep_prepared: bool = False
    ) -> None:
        """Take over the transactional id: abort the open transaction of an earlier
        producer, and fence that producer.

        Call this method once, before the first transaction. transaction() calls it if
        necessary. With `keep_prepared`, the open transaction remains open for
        complete_transaction() or abort_transaction(), which must be called next.
        `timeout` is in seconds, by default max_block_ms, as in all calls of this class.

        Raises:
            ProducerStateError: the producer is in a transaction, or was initialized.
            ProducerFencedError: another producer has taken over the id.
            ResourceError: the timeout has passed; the call may be repeated.
            LogcoreError: `__transaction_state` cannot be read.
        """
        self._check_caller("init_transactions()")
        self._change_state(TransactionState.INITIALIZING)
        self._transaction_manager.initialize(
            self._deadline_ms(timeout), keeps_prepared=keep_prepared
        )

    def begin_transaction(self) -> None:
        """Begin a transaction, so that records may be sent.

        Raises:
            ProducerStateError: before init_transactions(), or inside another
                transaction.
            ProducerFencedError: another producer has taken over the id.
        """
        self._check_caller("begin_transaction()")
        with self._lock:
            self._transaction_manager.enter(TransactionState.IN_TRANSACTION)
            for queue in self._accumulator.queues.values():
                queue.identity = None  # each transaction has another epoch

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Write the sent records and commit the transaction. On return, the records and
        the commit are durable.

        Raises:
            TransactionAbortedError: a record could not be stored; call
                abort_transaction().
            DeliveryTimeoutError: the timeout has passed; the call may be repeated.
            ResourceError: the timeout has passed; the call may be repeated.
            ProducerFencedError: another producer has taken over the id.
            ProducerStateError: no transaction is open.
        """
        self._check_caller("commit_transaction()")
        deadline_ms = self._deadline_ms(timeout)
        self._change_state(TransactionState.COMMITTING)
        self._write_all(deadline_ms)
        self._transaction_manager.end(commit=True, deadline_ms=deadline_ms)

    def prepare_transaction(self, timeout: float | None = None) -> str:
        """Prepare a two-phase commit with another store: write the sent records, and
        return a text that identifies the transaction.

        Commit the text in a transaction of that store, and then call
        complete_transaction(). Without two_phase=True, the prepared transaction is
        aborted after its timeout. Raises the same errors as commit_transaction().
        """
        self._check_caller("prepare_transaction()")
        self._change_state(TransactionState.PREPARED)
        self._write_all(self._deadline_ms(timeout))
        return self._transaction_manager.prepared()

    def complete_transaction(self, prepared: str, timeout: float | None = None) -> bool:
        """Commit the prepared transaction if `prepared` is its text, otherwise abort the
        transaction. Return whether it was committed.

        `prepared` is the text that the other store contains now. Raises the same errors
        as commit_transaction().
        """
        self._check_caller("complete_transaction()")
        with self._lock:
            self._transaction_manager.check_completing()
            must_commit = self._transaction_manager.prepared() == prepared
        if must_commit:
            self.commit_transaction(timeout)
        else:
            self.abort_transaction(timeout)
        return must_commit

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Abort the transaction. Records that are not written yet fail with
        TransactionAbortedError.

        Raises:
            ResourceError: the timeout has passed; the call may be repeated.
            ProducerFencedError: another producer has taken over the id.
            ProducerStateError: no transaction is open.
        """
        self._check_caller("abort_transaction()")
        self._change_state(TransactionState.ABORTING)
        with self._thread_state.round_lock:
            self._thread_state.sender.fail_transaction(
                "the transaction of the record was aborted"
            )
        self._transaction_manager.end(
            commit=False, deadline_ms=self._deadline_ms(timeout)
        )

    @contextlib.contextmanager
    def transaction(self) -> Generator[Self, None, None]:
        """Begin a transaction and commit it at the end of the block.

        The transaction is aborted if an exception leaves the block, or if the commit
        fails permanently.
        """
        if self._transaction_manager.state is TransactionState.UNINITIALIZED:
            self.init_transactions()
        self.begin_transaction()
        try:
            yield self
        except BaseException:
            self._abort_quietly()
            raise
        try:
            self.commit_transaction()
        except BaseException:
            if self._transaction_manager.state is TransactionState.ABORTABLE_ERROR:
                self._abort_quietly()
            raise

    def _abort_quietly(self) -> None:
        """Abort the transaction, and ignore errors, because another one is raised."""
        with contextlib.suppress(LogcoreError):
            self.abort_transaction()

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[PartitionKey, int | OffsetToCommit],
        group: CommittingMember | str,
    ) -> None:
        """Commit offsets of a group together with the transaction.

        `offsets` maps (topic, partition) to the next offset to process. `group` is a
        group id or the result of Consumer.group_metadata(). With the latter, the group
        checks the member and its generation.

        Raises CommitFailedError or RebalanceInProgressError if the group refuses the
        offsets; the transaction can then only be aborted. Raises also the errors of
        commit_transaction().
        """
        self._check_caller("send_offsets_to_transaction()")
        with self._lock:
            self._transaction_manager.check_sending()
        if not offsets:
            return
        now_ms = self._fs.now_ms()
        committed = {
            (topic, number): _committed(given, now_ms)
            for (topic, number), given in offsets.items()
        }
        groups = self._coordinators.groups(self._directory)
        if isinstance(group, str):
            group_id = group
        else:
            group_id = group.group_id
        offsets_partition = groups.offsets_partition(group_id)
        if self._transaction_manager.new_partitions([offsets_partition]):
            self._transaction_manager.add([offsets_partition])
        identity = self._transaction_manager.initialized_identity()
        producer = (identity.producer_id, identity.producer_epoch)
        committer = Committer(group_id, -1, "", None)
        if not isinstance(group, str):
            committer = Committer(
                group_id, group.generation, group.member_id, group.group_instance_id
            )
        group_error = groups.commit(committer, committed, producer)
        if group_error is not None:
            error = _commit_error(group_id, group_error)
            error.__cause__ = groups.failure
            with self._lock:
                self._transaction_manager.fail(error)
            raise error

    @property
    def is_prepared(self) -> bool:
        """Whether complete_transaction() must be called for a transaction of this
        producer or of an earlier one.
        """
        return self._transaction_manager.state is TransactionState.PREPARED

    # -- helpers -----------------------------------------------------------------------

    def _write_all(self, deadline_ms: int) -> None:
        """Write the sent records.

        Raises TransactionAbortedError if the transaction can only be aborted.
        """
        self.flush(self._remaining_seconds(deadline_ms))
        with self._lock:
            if self._transaction_manager.failure is not None:
                raise self._transaction_manager.failure

    def _change_state(self, state: TransactionState) -> None:
        with self._lock:
            self._transaction_manager.enter(state)

    def _deadline_ms(self, timeout: float | None) -> int:
        if timeout is None:
            remaining_ms = self._settings.max_block_ms
        else:
            remaining_ms = milliseconds(timeout)
        return self._fs.monotonic_ms() + remaining_ms

    def _remaining_seconds(self, deadline_ms: int) -> float:
        return max(0, deadline_ms - self._fs.monotonic_ms()) / 1000


def _committed(given: int | OffsetToCommit, now_ms: int) -> Committed:
    if isinstance(given, bool) or (isinstance(given, int) and given < 0):
        raise InvalidConfigError(
            "offsets", expected="an integer of at least 0", found=repr(given)
        )
    if isinstance(given, int):
        return Committed(given, -1, "", now_ms)
    return Committed(given.offset, given.leader_epoch, given.metadata, now_ms)


def _commit_error(group_id: str, error: GroupError) -> LogcoreError:
    if error is GroupError.REBALANCE_IN_PROGRESS:
        return RebalanceInProgressError(f"group {group_id!r} is rebalancing")
    return CommitFailedError(
        f"offsets of group {group_id!r} were not stored", found=error.name
    )
