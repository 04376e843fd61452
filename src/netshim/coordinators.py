"""The group coordinator and the transaction coordinator of a broker, as handlers see them.

Each has two implementations: one for a directory that only this broker writes
(groups.py, transactions.py), and one for a directory that it shares with other
processes (sharing.py).

In all methods, `done` may be called before the method returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from logcore.coordination.classic_group import Group
from logcore.coordination.effects import (
    Committer,
    GroupError,
    Join,
    OffsetKey,
    Result,
    Sync,
)
from logcore.coordination.transaction_effects import (
    Request,
    TransactionError,
    WriteMarkers,
)
from logcore.coordination.transaction_effects import Result as TransactionResult
from logcore.format.group_records import Committed
from logcore.format.transaction_records import Partition, StoredTransaction
from netshim.scheduling import PendingResponse, Steps

_T = TypeVar("_T")
#: Called with None for success, or with the error.
GroupOutcome = Callable[[GroupError | None], None]
#: Called with stored transactions by transactional id, or with the error.
FoundTransactions = Callable[[dict[str, StoredTransaction] | Exception], None]


class GroupService(Protocol):
    """All groups of a broker.

    Handlers call all methods except load() and stop() inside of when_known().
    """

    @property
    def is_loaded(self) -> bool: ...
    def load(self, now_ms: int, done: GroupOutcome) -> None: ...
    def when_known(
        self,
        handle: Callable[[], _T | PendingResponse],
        refuse: Callable[[GroupError], _T],
        now_ms: int,
    ) -> _T | PendingResponse: ...
    def in_pieces(self, steps: Steps[_T]) -> _T | PendingResponse: ...
    def get(self, group_id: str) -> Group | None: ...
    def all(self) -> list[Group]: ...
    def create_topic(self) -> None: ...
    def join(
        self, request: Join, now_ms: int, done: Callable[[Result], None]
    ) -> None: ...
    def sync(
        self, request: Sync, now_ms: int, done: Callable[[Result], None]
    ) -> None: ...
    def heartbeat(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        now_ms: int,
    ) -> GroupError | None: ...
    def leave(
        self, group_id: str, members: Sequence[tuple[str, str | None]], now_ms: int
    ) -> list[GroupError | None]: ...
    def commit(
        self,
        who: Committer,
        offsets: Mapping[OffsetKey, Committed],
        now_ms: int,
        done: GroupOutcome,
    ) -> None: ...
    def commit_in_transaction(
        self,
        who: Committer,
        producer: tuple[int, int],
        offsets: Mapping[OffsetKey, Committed],
        now_ms: int,
        done: GroupOutcome,
    ) -> None: ...
    def transaction_ended(
        self, producer_id: int, number: int, *, commit: bool
    ) -> None: ...
    def delete_offsets(
        self,
        group_id: str,
        keys: Sequence[OffsetKey],
        now_ms: int,
        done: GroupOutcome,
    ) -> None: ...
    def delete(self, group_id: str, now_ms: int, done: GroupOutcome) -> None: ...
    def stop(self, now_ms: int) -> None: ...


class TransactionService(Protocol):
    """All transactions of a broker."""

    @property
    def is_loaded(self) -> bool: ...
    def begin(self, now_ms: int) -> None: ...
    def load(self, now_ms: int, done: Callable[[bool], None]) -> None: ...
    def ask(
        self, request: Request, now_ms: int, done: Callable[[TransactionResult], None]
    ) -> None: ...
    def verified(
        self, who: tuple[str, int, int], partition: Partition, write: Callable[[], _T]
    ) -> _T | TransactionError: ...
    def look(self, names: Collection[str] | None, done: FoundTransactions) -> None: ...
    def write_markers(
        self,
        effect: WriteMarkers,
        coordinator_epoch: int,
        now_ms: int,
        told: Callable[[Partition, Exception | None], None],
    ) -> None: ...
    def stop(self, now_ms: int) -> None: ...
