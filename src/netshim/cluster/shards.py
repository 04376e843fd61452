"""Group coordinators: one for each partition of `__consumer_offsets` that this broker leads.

Rules:
- A coordinator loads its partition when this broker begins to lead it, once the records
  of earlier epochs are committed again. Until then its groups answer
  COORDINATOR_LOAD_IN_PROGRESS.
- A commit is acknowledged once it is committed in the partition, so it is never lost by
  another election.
- A coordinator answers only while the lease of the broker's session holds. Otherwise a
  broker that was stopped could report committed offsets that have moved on.

Transactions are not served in a cluster yet: see NoTransactions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar

from logcore import Log, LogcoreError, NotLeaderError
from logcore.coordination.classic_group import Group
from logcore.coordination.group_requests import (
    Beat,
    BeatRefused,
    GroupError,
    Join,
    JoinRefused,
)
from logcore.coordination.transaction_effects import Request, TransactionError
from logcore.coordination.transaction_effects import Result as TransactionResult
from logcore.coordinators.group_host import GroupRequest, GroupStep
from logcore.coordinators.stored_offsets import OFFSETS_CONFIG
from logcore.format.group_records import partition_of
from logcore.format.transaction_records import Partition
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import OFFSETS_TOPIC
from netshim.cluster.member import ClusterMember
from netshim.coordinators import (
    Done,
    FoundTransactions,
    GroupOutcome,
    GroupService,
    TransactionService,
)
from netshim.groups import BrokerGroups
from netshim.scheduling import PendingResponse, Steps
from netshim.state import BrokerState

_log = logging.getLogger("netshim")

_T = TypeVar("_T")
#: Time after which groups that could not be read are read again.
_RETRY_MS: Final = 1_000


class GroupShards(GroupService):
    """The groups that this broker coordinates."""

    def __init__(
        self, state: BrokerState, member: ClusterMember, new_id: Callable[[], str]
    ) -> None:
        self._state = state
        self._member = member
        self._new_id = new_id
        self._shards: dict[int, BrokerGroups] = {}

    # -- partitions --------------------------------------------------------------------

    def lead(self, key: Key, log: Log, epoch_start: int) -> None:
        """Load the groups of a partition that this broker leads now."""
        topic, number = key
        if topic != OFFSETS_TOPIC:
            return
        shard = self._shards[number] = BrokerGroups(self._state, self._new_id, number)

        def load(now_ms: int) -> None:
            if self._shards.get(number) is shard:
                shard.load(now_ms, loaded)

        def loaded(is_loaded: bool) -> None:
            if not is_loaded:
                self._state.timers.at(self._state.now_ms + _RETRY_MS, load)

        def committed(error: LogcoreError | None) -> None:
            if error is None:
                load(self._state.now_ms)

        self._state.leadership.when_committed(key, log, epoch_start, committed)

    def resign(self, key: Key) -> None:
        """Drop the groups of a partition that this broker led."""
        topic, number = key
        shard = None
        if topic == OFFSETS_TOPIC:
            shard = self._shards.pop(number, None)
        if shard is not None:
            shard.close()

    def _shard_of(self, group_id: str) -> BrokerGroups | GroupError:
        """Return the coordinator of a group, or why there is none here."""
        count = len(self._state.logs.numbers_of(OFFSETS_TOPIC))
        if not count or not self._member.has_lease:
            return GroupError.NOT_COORDINATOR
        shard = self._shards.get(partition_of(group_id, count))
        if shard is None:
            return GroupError.NOT_COORDINATOR
        if not shard.is_loaded:
            return GroupError.COORDINATOR_LOAD_IN_PROGRESS
        return shard

    # -- requests ----------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        return all(shard.is_loaded for shard in self._shards.values())

    def load(self, now_ms: int, done: Callable[[bool], None]) -> None:
        done(self.is_loaded)

    def when_known(
        self,
        handle: Callable[[], _T | PendingResponse],
        refuse: Callable[[GroupError], _T],
        now_ms: int,
        group_ids: Iterable[str] = (),
    ) -> _T | PendingResponse:
        self._state.hear(now_ms)
        for group_id in group_ids:
            shard = self._shard_of(group_id)
            if isinstance(shard, GroupError):
                return refuse(shard)
        return handle()

    def in_pieces(self, steps: Steps[_T]) -> _T | PendingResponse:
        return self._state.in_pieces(steps)

    def ask(self, group_id: str, request: GroupRequest, done: Done) -> None:
        shard = self._shard_of(group_id)
        if isinstance(shard, GroupError):
            done(shard)
        else:
            shard.ask(group_id, request, done)

    def step(self, group_id: str, step: GroupStep) -> None:
        shard = self._shard_of(group_id)
        assert isinstance(shard, BrokerGroups), "when_known() has refused the request"
        shard.step(group_id, step)

    def join(self, request: Join, done: Done) -> None:
        def joined(result: Any) -> None:
            if isinstance(result, GroupError):
                result = JoinRefused(result, request.member_id)
            done(result)

        super().join(request, joined)

    def beat(self, request: Beat, done: Done, *, may_lack_id: bool) -> None:
        shard = self._shard_of(request.group_id)
        if isinstance(shard, GroupError):
            done(BeatRefused(shard, "another broker coordinates the group"))
        else:
            shard.beat(request, done, may_lack_id=may_lack_id)

    def get(self, group_id: str) -> Group | None:
        shard = self._shard_of(group_id)
        if isinstance(shard, GroupError):
            # None would mean that the group has committed nothing.
            raise NotLeaderError("another broker coordinates the group now")
        return shard.get(group_id)

    def all(self) -> list[Group]:
        return [
            group
            for shard in self._shards.values()
            if shard.is_loaded
            for group in shard.all()
        ]

    def create_topic(self) -> None:
        self._state.logdir.ensure_topic(
            OFFSETS_TOPIC, self._state.settings.offsets_partitions, OFFSETS_CONFIG
        )

    def transaction_ended(self, producer_id: int, number: int, *, commit: bool) -> None:
        shard = self._shards.get(number)
        if shard is not None and shard.is_loaded:
            shard.transaction_ended(producer_id, number, commit=commit)

    def topics_deleted(self, names: set[str], now_ms: int, done: GroupOutcome) -> None:
        left = 1
        failure: GroupError | None = None

        def one_done(error: GroupError | None) -> None:
            nonlocal left, failure
            left -= 1
            failure = failure or error
            if not left:
                done(failure)

        others = names - {OFFSETS_TOPIC}
        for shard in list(self._shards.values()):
            if others and shard.is_loaded:
                left += 1
                shard.topics_deleted(others, now_ms, one_done)
        one_done(None)

    def stop(self, now_ms: int) -> None:
        for shard in list(self._shards.values()):
            shard.stop(now_ms)


class NoTransactions(TransactionService):
    """Refuses transactions, which a cluster does not serve yet."""

    @property
    def is_loaded(self) -> bool:
        return True

    def begin(self, now_ms: int) -> None:
        pass

    def load(self, now_ms: int, done: Callable[[bool], None]) -> None:
        done(True)

    def ask(
        self, request: Request, now_ms: int, done: Callable[[TransactionResult], None]
    ) -> None:
        done(TransactionError.INVALID_REQUEST)

    def verified(
        self, who: tuple[str, int, int], partition: Partition, write: Callable[[], _T]
    ) -> _T | TransactionError:
        return TransactionError.INVALID_TXN_STATE

    def look(self, names: Collection[str] | None, done: FoundTransactions) -> None:
        done({})

    def stop(self, now_ms: int) -> None:
        pass
