"""The group coordinator and the transaction coordinator of a broker, as handlers see them.

Each has two implementations: one for a directory that only this broker writes
(groups.py, transactions.py), and one for a directory that it shares with other
processes (sharing.py).

A callback may be called before the method that got it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from logcore.coordination.classic_group import Group
from logcore.coordination.group_requests import GroupError
from logcore.coordination.transaction_effects import (
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
Done = Callable[[Any], None]
#: Called with None for success, or with the error.
GroupOutcome = Callable[[GroupError | None], None]
#: Called with stored transactions by transactional id, or with the error.
FoundTransactions = Callable[[dict[str, StoredTransaction] | Exception], None]


class GroupService(GroupHost[Done]):
    """All groups of a broker.

    Handlers call the methods of GroupHost inside of when_known(), which loads the groups
    and sets the time.
    """

    @property
    @abstractmethod
    def is_loaded(self) -> bool: ...

    @abstractmethod
    def load(self, now_ms: int, done: Callable[[bool], None]) -> None:
        """Read the stored groups. Call done(True), or done(False) if that failed."""

    @abstractmethod
    def when_known(
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
    def in_pieces(self, steps: Steps[_T]) -> _T | PendingResponse:
        """Return the response of a request that runs in steps inside of when_known()."""

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
    def topics_deleted(self, names: set[str], now_ms: int, done: GroupOutcome) -> None:
        """Delete the offsets of deleted topics.

        Call done(None) once that is durable, or done(error).
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
    def load(self, now_ms: int, done: Callable[[bool], None]) -> None:
        """Load the stored transactions. Call done(True), or done(False) if that failed."""

    @abstractmethod
    def ask(
        self, request: Request, now_ms: int, done: Callable[[TransactionResult], None]
    ) -> None:
        """Execute a request after load(), and deliver its result."""

    @abstractmethod
    def verified(
        self, who: tuple[str, int, int], partition: Partition, write: Callable[[], _T]
    ) -> _T | TransactionError:
        """Call write() and return its result if a producer may write now.

        Otherwise, return the error. The producer is identified by a transactional id, a
        producer id and its epoch.
        """

    @abstractmethod
    def look(self, names: Collection[str] | None, done: FoundTransactions) -> None:
        """Find the last durable records of transactional ids, or of all for None."""

    @abstractmethod
    def stop(self, now_ms: int) -> None:
        """Answer all requests that wait."""
