"""The group coordinator and the transaction coordinator of a broker, as handlers see them.

Each has three implementations: one for a directory that only this broker writes
(groups.py, transactions.py), one for a directory that it shares with other processes
(sharing.py), and one for a broker in a cluster (cluster/shards.py).

A callback may be called before the method that got it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from logcore.coordination.classic_group import Group
from logcore.coordination.group_requests import GroupError
from logcore.coordination.transaction_effects import (
    AddPartitions,
    Request,
    TransactionError,
)
from logcore.coordination.transaction_effects import Result as TransactionResult
from logcore.coordinators.group_host import GroupHost
from logcore.format.transaction_records import Partition, StoredTransaction
from netshim.scheduling import PendingResponse, Steps

_T = TypeVar("_T")
#: Called with the result of a request about a group. The coordinator identifies the
#: request by this callable.
Callback = Callable[[Any], None]
#: Called with None for success, or with the error.
GroupOutcome = Callable[[GroupError | None], None]
#: A transactional id, and the id and the epoch of its producer.
TransactionalProducer = tuple[str, int, int]
#: Why a producer must not write to partitions.
TransactionErrors = Mapping[Partition, TransactionError]
#: Called with stored transactions by transactional id, or with the error.
TransactionsCallback = Callable[[dict[str, StoredTransaction] | Exception], None]


class GroupService(GroupHost[Callback]):
    """All groups of a broker.

    Handlers call the methods of GroupHost inside of when_groups_loaded(), which loads
    the groups and sets the time.
    """

    @property
    @abstractmethod
    def is_loaded(self) -> bool: ...

    @abstractmethod
    def load(self, now_ms: int, callback: Callable[[bool], None]) -> None:
        """Read the stored groups. Call callback(True), or callback(False) if that failed."""

    @abstractmethod
    def when_groups_loaded(
        self,
        handle: Callable[[], _T | PendingResponse],
        refuse: Callable[[GroupError], _T],
        now_ms: int,
        group_ids: Iterable[str] = (),
    ) -> _T | PendingResponse:
        """Call handle() once the stored groups are known, and return its result.

        The result is refuse(error) if they cannot be read, or if another broker
        coordinates one of `group_ids`, the groups of the request.
        """

    @abstractmethod
    def run_in_steps(self, steps: Steps[_T]) -> _T | PendingResponse:
        """Return the response of a request that runs in steps inside of
        when_groups_loaded().
        """

    @abstractmethod
    def get(self, group_id: str) -> Group | None: ...

    @abstractmethod
    def all(self) -> list[Group]: ...

    @abstractmethod
    def create_topic(self) -> None:
        """Create `__consumer_offsets` if it does not exist. This blocks on the disk.

        Raises:
            LogcoreError: the topic could not be created.
        """

    @abstractmethod
    def transaction_ended(self, producer_id: int, number: int, *, commit: bool) -> None:
        """Handle the marker of a producer in a partition of `__consumer_offsets`."""

    @abstractmethod
    def topics_deleted(
        self, names: set[str], now_ms: int, callback: GroupOutcome
    ) -> None:
        """Delete the offsets of deleted topics.

        Call callback(None) once that is durable, or callback(error).
        """

    @abstractmethod
    def stop(self, now_ms: int) -> None:
        """Answer all requests that wait for other members."""


class TransactionService(ABC):
    """All transactions of a broker."""

    @property
    @abstractmethod
    def is_loaded(self) -> bool: ...

    @abstractmethod
    def begin(self, now_ms: int) -> None:
        """Load the stored transactions if their topic exists, when the broker starts."""

    @abstractmethod
    def load(self, now_ms: int, callback: Callable[[bool], None]) -> None:
        """Load the stored transactions.

        Call callback(True), or callback(False) if that failed.
        """

    @abstractmethod
    def request(
        self,
        request: Request,
        now_ms: int,
        callback: Callable[[TransactionResult], None],
    ) -> None:
        """Execute a request after load(), and deliver its result."""

    @abstractmethod
    def create_topic(self) -> None:
        """Create `__transaction_state` if it does not exist. This blocks on the disk.

        Raises:
            LogcoreError: the topic could not be created.
        """

    def is_prepared(
        self,
        producer: TransactionalProducer,
        partitions: Collection[Partition],
        *,
        adds: bool,
    ) -> bool:
        """Return whether verified() can be called now. Otherwise, call prepare() first."""
        # A verification only reads state in memory. Adding partitions is a request.
        return self.is_loaded and not adds

    def prepare(
        self,
        producer: TransactionalProducer,
        partitions: Collection[Partition],
        now_ms: int,
        callback: Callable[[TransactionErrors], None],
        *,
        adds: bool,
    ) -> None:
        """Load or request the state that verified() reads, then call callback(errors).

        With `adds`, first add the partitions to the open transaction of the producer, or
        begin one (KIP-890). The producer must not write to partitions with an error.
        Callbacks of one producer are called in the order of the calls.
        """

        def add(is_loaded: bool) -> None:
            # Clients retry after this error.
            if not is_loaded:
                error = TransactionError.COORDINATOR_NOT_AVAILABLE
                callback(dict.fromkeys(partitions, error))
                return
            # verified() checks each partition when it is written.
            if not adds:
                callback({})
                return
            request = AddPartitions(
                transactional_id=producer[0],
                producer_id=producer[1],
                producer_epoch=producer[2],
                partitions=frozenset(partitions),
                # Only producers of transaction version 2 let the broker add partitions
                # (KIP-890).
                client_version=2,
            )
            self.request(request, now_ms, added)

        def added(result: TransactionResult) -> None:
            if isinstance(result, TransactionError):
                callback(dict.fromkeys(partitions, result))
            else:
                callback({})

        self.load(now_ms, add)

    @abstractmethod
    def verified(
        self,
        producer: TransactionalProducer,
        partition: Partition,
        write: Callable[[], _T],
    ) -> _T | TransactionError:
        """Call write() and return its result if a producer may write now.

        Otherwise, return the error.
        """

    def marker_follows(self, producer_id: int, partition: Partition) -> None:
        """Handle a marker that is about to be appended to a partition.

        A cluster must not rely on an earlier verification any more.
        """
        return

    @abstractmethod
    def find_stored(
        self, names: Collection[str] | None, callback: TransactionsCallback
    ) -> None:
        """Find the last durable records of transactional ids. None requests all."""

    @abstractmethod
    def stop(self, now_ms: int) -> None:
        """Answer all requests that wait, because the broker stops."""
