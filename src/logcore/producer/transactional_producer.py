"""A producer with transactions: its records, and the offsets of the records that they
were made from, are committed together or not at all.

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
- close() aborts an open transaction, and so does its timeout.

The order of calls is checked in transaction_manager.py.
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
from logcore.producer.transaction_manager import Transacting, TransactionState
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
    """A commit for a partition; see logcore.OffsetAndMetadata."""

    @property
    def offset(self) -> int: ...
    @property
    def metadata(self) -> str: ...
    @property
    def leader_epoch(self) -> int: ...


class CommitGroups(Protocol):
    """The methods of the groups of a directory that this module uses."""

    failure: Exception | None

    def home(self, group_id: str) -> tuple[str, int]: ...
    def commit(
        self,
        who: Committer,
        offsets: Mapping[OffsetKey, Committed],
        producer: tuple[int, int] | None = None,
    ) -> GroupError | None: ...


class TransactionCoordinators(Protocol):
    """The coordinators of the transactions and the groups of a directory."""

    def transactions(self, directory: Any) -> TransactionCoordinator: ...
    def groups(self, directory: Any) -> CommitGroups: ...


class TransactionalProducer(Producer):
    """A producer made by LogDir.producer(transactional_id=...)."""

    def __init__(
        self,
        fs: FS,
        directory: ClientDirectory,
        settings: ProducerSettings,
        coordinators: TransactionCoordinators,
    ) -> None:
        """Create a producer. Users call LogDir.producer()."""
        super().__init__(fs, directory, settings, coordinators.transactions(directory))
        assert self._work.transacting is not None
        self._transacting: Transacting = self._work.transacting
        self._coordinators = coordinators

    def __enter__(self) -> Self:
        return self

    def close(self, timeout: float | None = None) -> None:
        """Abort an open transaction and close the producer like Producer.close().
        Closing twice is allowed.
        """
        is_own = self._fs.forks == self._forks and not self._work.is_closing
        if is_own and not self._work.teller.is_me and self._transacting.is_open:
            try:
                self.abort_transaction(timeout)
            except LogcoreError as error:
                text = "the open transaction of %r was not aborted, and waits for its timeout: %s"
                log_line(
                    "transactions",
                    WARNING,
                    text,
                    self._transacting.transactional_id,
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
        self._enter(TransactionState.INITIALIZING)
        self._transacting.initialize(
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
            self._transacting.enter(TransactionState.IN_TRANSACTION)
            for queue in self._accumulator.queues.values():
                queue.identity = None  # each transaction has an epoch of its own

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Write the sent records and commit the transaction. On return, both are on
        disk.

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
        self._enter(TransactionState.COMMITTING)
        self._write_all(deadline_ms)
        self._transacting.end(commit=True, deadline_ms=deadline_ms)

    def prepare_transaction(self, timeout: float | None = None) -> str:
        """Write the sent records, and wait for the decision of another store.

        Store the returned text in a transaction of that store, and then call
        complete_transaction(). A producer with two_phase=True has no timeout; without
        it, the transaction may be aborted while it waits. Raises the same errors as
        commit_transaction().
        """
        self._check_caller("prepare_transaction()")
        self._enter(TransactionState.PREPARED)
        self._write_all(self._deadline_ms(timeout))
        return self._transacting.prepared()

    def complete_transaction(self, prepared: str, timeout: float | None = None) -> bool:
        """Commit the prepared transaction if `prepared` is its text, else abort it.
        Returns whether it was committed.

        `prepared` is the text in the other store. Raises the same errors as
        commit_transaction().
        """
        self._check_caller("complete_transaction()")
        with self._lock:
            self._transacting.check_completing()
            is_wanted = self._transacting.prepared() == prepared
        if is_wanted:
            self.commit_transaction(timeout)
        else:
            self.abort_transaction(timeout)
        return is_wanted

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Abort the transaction. Records that were not written yet fail with
        TransactionAbortedError.

        Raises:
            ResourceError: the timeout has passed; the call may be repeated.
            ProducerFencedError: another producer has taken over the id.
            ProducerStateError: no transaction is open.
        """
        self._check_caller("abort_transaction()")
        self._enter(TransactionState.ABORTING)
        with self._work.writing:
            self._work.sender.end_all("the transaction of the record was aborted")
        self._transacting.end(commit=False, deadline_ms=self._deadline_ms(timeout))

    @contextlib.contextmanager
    def transaction(self) -> Generator[Self, None, None]:
        """Begin a transaction and commit it at the end of the block.

        The transaction is aborted if an exception leaves the block, or if the commit
        fails permanently.
        """
        if self._transacting.state is TransactionState.UNINITIALIZED:
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
            if self._transacting.state is TransactionState.ABORTABLE_ERROR:
                self._abort_quietly()
            raise

    def _abort_quietly(self) -> None:
        """Abort after an error that is raised anyway."""
        with contextlib.suppress(LogcoreError):
            self.abort_transaction()

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[PartitionKey, int | OffsetToCommit],
        group: CommittingMember | str,
    ) -> None:
        """Commit offsets of a group together with the transaction.

        `offsets` maps (topic, partition) to the next offset to process. `group` is
        Consumer.group_metadata(), which is checked as in a commit, or a group id.

        Raises CommitFailedError and RebalanceInProgressError if the group refuses; the
        transaction can then only be aborted. Otherwise it raises the same errors as
        commit_transaction().
        """
        self._check_caller("send_offsets_to_transaction()")
        with self._lock:
            self._transacting.check_sending()
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
        home = groups.home(group_id)
        if self._transacting.new_partitions([home]):
            self._transacting.add([home])
        identity = self._transacting.known_identity()
        producer = (identity.producer_id, identity.producer_epoch)
        who = Committer(group_id, -1, "", None)
        if not isinstance(group, str):
            who = Committer(
                group_id, group.generation, group.member_id, group.group_instance_id
            )
        refused = groups.commit(who, committed, producer)
        if refused is not None:
            error = _refusal(group_id, refused)
            error.__cause__ = groups.failure
            with self._lock:
                self._transacting.fail(error)
            raise error

    @property
    def is_prepared(self) -> bool:
        """Whether a transaction of this producer, or of an earlier one, waits for
        complete_transaction().
        """
        return self._transacting.state is TransactionState.PREPARED

    # -- parts of these ----------------------------------------------------------------

    def _write_all(self, deadline_ms: int) -> None:
        """Write the sent records. Raises the reason why the transaction can only be
        aborted.
        """
        self.flush(self._left_seconds(deadline_ms))
        with self._lock:
            if self._transacting.failure is not None:
                raise self._transacting.failure

    def _enter(self, state: TransactionState) -> None:
        with self._lock:
            self._transacting.enter(state)

    def _deadline_ms(self, timeout: float | None) -> int:
        if timeout is None:
            left_ms = self._settings.max_block_ms
        else:
            left_ms = milliseconds(timeout)
        return self._fs.monotonic_ms() + left_ms

    def _left_seconds(self, deadline_ms: int) -> float:
        return max(0, deadline_ms - self._fs.monotonic_ms()) / 1000


def _committed(given: int | OffsetToCommit, now_ms: int) -> Committed:
    if isinstance(given, bool) or (isinstance(given, int) and given < 0):
        raise InvalidConfigError(
            "offsets", expected="numbers of at least 0", found=repr(given)
        )
    if isinstance(given, int):
        return Committed(given, -1, "", now_ms)
    return Committed(given.offset, given.leader_epoch, given.metadata, now_ms)


def _refusal(group_id: str, error: GroupError) -> LogcoreError:
    if error is GroupError.REBALANCE_IN_PROGRESS:
        return RebalanceInProgressError(f"group {group_id!r} divides its partitions")
    return CommitFailedError(
        f"offsets of group {group_id!r} were not stored", found=error.name
    )
