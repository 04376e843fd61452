"""Coordinators of a cluster: one for each partition of an internal topic that is led here.

Rules:
- A coordinator loads its partition when this broker begins to lead it, once its records
  are committed again. Until then, its response is COORDINATOR_LOAD_IN_PROGRESS.
- A record is acknowledged once it is committed in the partition, so it is never lost by
  another election.
- Each offset is stored with the id of its topic. If a coordinator ends before it has
  deleted the offsets of a deleted topic, the next one deletes them when it loads them.
- A coordinator answers only while the lease of the broker's session holds. Otherwise a
  broker that was stopped could report state that has changed since.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

from logcore import NotLeaderError
from logcore.coordination.classic_group import Group
from logcore.coordination.group_requests import (
    Committer,
    ConsumerHeartbeat,
    GroupError,
    HeartbeatRefused,
    Join,
    JoinRefused,
    OffsetKey,
)
from logcore.coordinators.group_host import GroupRequest, GroupStep
from logcore.coordinators.stored_offsets import OFFSETS_CONFIG
from logcore.errors import CorruptRegistryError, NodeNotFoundError
from logcore.format.group_records import Committed, TopicWithId, partition_of
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import OFFSETS_TOPIC
from logcore.registry import paths
from netshim.cluster import registry_nodes
from netshim.cluster.member import ClusterMember
from netshim.cluster.view import ClusterView
from netshim.coordinators import Callback, GroupOutcome, GroupService
from netshim.groups import BrokerGroups
from netshim.scheduling import PendingResponse, Steps
from netshim.state import BrokerState

_log = logging.getLogger("netshim")

_T = TypeVar("_T")
#: Time after which a partition that could not be read is read again.
_RETRY_MS: Final = 1_000


class NoShard(enum.Enum):
    """The reason why this broker cannot coordinate an id. The names are Kafka's."""

    NOT_COORDINATOR = enum.auto()
    COORDINATOR_LOAD_IN_PROGRESS = enum.auto()


class Shard(Protocol):
    """The coordinator of one partition."""

    @property
    def is_loaded(self) -> bool: ...
    def load(self, now_ms: int, callback: Callable[[bool], None]) -> None: ...
    def close(self) -> None: ...


_Shard = TypeVar("_Shard", bound=Shard)


class Shards(Generic[_Shard]):
    """The coordinators of one topic."""

    def __init__(
        self,
        topic: str,
        state: BrokerState,
        member: ClusterMember,
        create: Callable[[int], _Shard],
    ) -> None:
        self._topic = topic
        self._state = state
        self._member = member
        #: Creates the coordinator of a partition.
        self._create = create
        #: The coordinators by partition, while this broker leads it.
        self._shards: dict[int, _Shard] = {}
        #: Actions on a coordinator that wait until it is loaded.
        self._after_load: dict[int, list[Callable[[_Shard], None]]] = {}

    def lead(self, key: Key) -> None:
        """Load a partition that this broker leads now."""
        topic, number = key
        if topic != self._topic:
            return
        # A new coordinator for each leadership, because the records may have changed
        # since the last one.
        shard = self._shards[number] = self._create(number)

        def load(now_ms: int) -> None:
            # This broker may have resigned since then, or lead in a later epoch.
            if self._shards.get(number) is shard:
                shard.load(now_ms, loaded)

        def loaded(is_loaded: bool) -> None:
            if not is_loaded:
                self._state.timers.at(self._state.now_ms + _RETRY_MS, load)
                return
            for action in self._after_load.pop(number, ()):
                action(shard)

        load(self._state.now_ms)

    def resign(self, key: Key) -> None:
        """Drop the coordinator of a partition that this broker led."""
        topic, number = key
        if topic == self._topic and number in self._shards:
            # The next leader reads the records that these actions wait for.
            self._after_load.pop(number, None)
            self._shards.pop(number).close()

    def partition_of(self, name: str) -> int:
        """Return the partition of an id, -1 while the topic does not exist."""
        count = len(self._state.logs.numbers_of(self._topic))
        # The number of partitions never changes, because it assigns ids to
        # coordinators.
        return partition_of(name, count) if count else -1

    def find(self, name: str) -> _Shard | NoShard:
        """Return the coordinator of an id, or why there is none here."""
        shard = self._shards.get(self.partition_of(name))
        # Without the lease, another broker may coordinate the id already.
        if shard is None or not self._member.has_lease:
            return NoShard.NOT_COORDINATOR
        if not shard.is_loaded:
            return NoShard.COORDINATOR_LOAD_IN_PROGRESS
        return shard

    def when_loaded(self, number: int, action: Callable[[_Shard], None]) -> None:
        """Call action() with the coordinator of a partition, if it is here, once loaded."""
        shard = self._shards.get(number)
        if shard is None:
            return
        if shard.is_loaded:
            action(shard)
        else:
            self._after_load.setdefault(number, []).append(action)

    def after_load(self, action: Callable[[_Shard], None]) -> None:
        """Call action() with each coordinator that is being loaded, once it is loaded."""
        for number, shard in self._shards.items():
            if not shard.is_loaded:
                self.when_loaded(number, action)

    @property
    def is_loading(self) -> bool:
        return not all(shard.is_loaded for shard in self._shards.values())

    def loaded(self) -> list[_Shard]:
        """Return the coordinators that are loaded."""
        return [shard for shard in self._shards.values() if shard.is_loaded]


def _report_error(error: GroupError | None) -> None:
    if error is not None:
        _log.error("offsets of deleted topics were not deleted: %s", error)


class GroupShards(GroupService):
    """The groups that this broker coordinates."""

    def __init__(
        self, state: BrokerState, member: ClusterMember, new_id: Callable[[], str]
    ) -> None:
        self._state = state
        self._member = member
        #: The view of the last apply_view().
        self._view = ClusterView()
        #: Topics that are missing in the view, but may not be deleted, and their ids.
        self._missing: dict[str, uuid.UUID] = {}
        self.shards = Shards(
            OFFSETS_TOPIC,
            state,
            member,
            lambda number: BrokerGroups(state, new_id, number, self._former_of),
        )

    def _find(self, group_id: str) -> BrokerGroups | GroupError:
        """Return the coordinator of a group, or why there is none here."""
        shard = self.shards.find(group_id)
        return GroupError[shard.name] if isinstance(shard, NoShard) else shard

    def _former_of(self, topics: Collection[TopicWithId]) -> set[TopicWithId]:
        """Return those of these topics that do not exist any more. Blocks.

        Raises:
            LogcoreError: the registry could not be read.
        """
        view, registry = self._member.view, self._member.registry
        uncertain = {
            (name, topic_id)
            for name, topic_id in topics
            if name not in view.topics or view.topics[name].node.id_bytes != topic_id
        }
        if not uncertain:
            return uncertain
        # The former coordinator may have read a newer topic than this broker's view has.
        registry.sync()
        former = set()
        for name, topic_id in uncertain:
            path = paths.topic(name)
            try:
                current = registry_nodes.unpack_topic(registry.get(path).value, path)
            except NodeNotFoundError:
                # The registry may have lost the node. Then the offsets are kept, like
                # the replicas.
                if str(uuid.UUID(bytes=topic_id)) in view.deleted_ids:
                    former.add((name, topic_id))
            except CorruptRegistryError:
                pass  # the same until it is repaired
            else:
                if current.id_bytes != topic_id:
                    former.add((name, topic_id))
        return former

    # -- requests ----------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        return True

    def load(self, now_ms: int, callback: Callable[[bool], None]) -> None:
        """Call callback(True) immediately: partitions are loaded one by one."""
        callback(True)

    def when_groups_loaded(
        self,
        handle: Callable[[], _T | PendingResponse],
        refuse: Callable[[GroupError], _T],
        now_ms: int,
        group_ids: Iterable[str] = (),
    ) -> _T | PendingResponse:
        self._state.advance_clock(now_ms)
        # Refused as a whole, because clients send only groups of one coordinator in a
        # request.
        for group_id in group_ids:
            shard = self._find(group_id)
            if isinstance(shard, GroupError):
                return refuse(shard)
        # A list of all groups would lack the groups of partitions that are being loaded.
        if not group_ids and self.shards.is_loading:
            return refuse(GroupError.COORDINATOR_LOAD_IN_PROGRESS)
        return handle()

    def run_in_steps(self, steps: Steps[_T]) -> _T | PendingResponse:
        return self._state.run_in_steps(steps)

    def request(self, group_id: str, request: GroupRequest, done: Callback) -> None:
        shard = self._find(group_id)
        if isinstance(shard, GroupError):
            done(shard)
        else:
            shard.request(group_id, request, done)

    def step(self, group_id: str, step: GroupStep) -> None:
        shard = self._find(group_id)
        assert isinstance(shard, BrokerGroups), "when_groups_loaded() refuses others"
        shard.step(group_id, step)

    def request_commit(
        self,
        committer: Committer,
        offsets: Mapping[OffsetKey, Committed],
        done: Callback,
        producer: tuple[int, int] | None = None,
    ) -> None:
        # A later topic with this name has another id, so it does not get the offsets.
        offsets = {
            key: committed._replace(topic_id=self._topic_id(key[0]))
            for key, committed in offsets.items()
        }
        super().request_commit(committer, offsets, done, producer)

    def _topic_id(self, name: str) -> bytes:
        """Return the id of a topic, or b"" if it is unknown."""
        # Another thread sets member.view, so that view may already contain a later topic
        # of this name. apply_view() would drop a pending commit for it, because pending
        # commits are dropped by name.
        for view in (self._view, self._member.view):
            if name in view.topics:
                return view.topics[name].node.id_bytes
        return b""

    def join(self, request: Join, done: Callback) -> None:
        def joined(result: Any) -> None:
            if isinstance(result, GroupError):
                # The response to a refused Join contains the member id.
                result = JoinRefused(result, request.member_id)
            done(result)

        super().join(request, joined)

    def consumer_heartbeat(
        self,
        request: ConsumerHeartbeat,
        callback: Callback,
        *,
        may_omit_member_id: bool,
    ) -> None:
        shard = self._find(request.group_id)
        if isinstance(shard, GroupError):
            callback(HeartbeatRefused(shard, "another broker coordinates the group"))
        else:
            shard.consumer_heartbeat(
                request, callback, may_omit_member_id=may_omit_member_id
            )

    def get(self, group_id: str) -> Group | None:
        shard = self._find(group_id)
        if isinstance(shard, GroupError):
            # None would mean that the group has committed nothing.
            raise NotLeaderError("another broker coordinates the group now")
        return shard.get(group_id)

    def all(self) -> list[Group]:
        # In Kafka, too, ListGroups returns only the groups of its broker.
        return [group for shard in self.shards.loaded() for group in shard.all()]

    def create_topic(self) -> None:
        self._state.logdir.create_topic(
            OFFSETS_TOPIC,
            self._state.settings.offsets_partitions,
            OFFSETS_CONFIG,
            exist_ok=True,
        )

    def transaction_ended(self, producer_id: int, number: int, *, commit: bool) -> None:
        # A load that runs now may have read the partition before the marker.
        self.shards.when_loaded(
            number,
            lambda shard: shard.transaction_ended(producer_id, number, commit=commit),
        )

    def topics_deleted(
        self, names: set[str], now_ms: int, callback: GroupOutcome
    ) -> None:
        self._state.advance_clock(now_ms)
        self._delete_offsets(names, self._member.view, callback)

    def apply_view(self, view: ClusterView) -> None:
        """Delete the offsets of topics that were deleted since the last view.

        Topics of a view are compared, and not replicas: a topic may be deleted before
        this broker has created its replicas.
        """
        previous, self._view = self._view, view
        former = dict(self._missing)
        for name, topic in previous.topics.items():
            if view.topics.get(name) is not topic:
                former[name] = topic.node.topic_id
        deleted: set[str] = set()
        self._missing.clear()
        for name, topic_id in former.items():
            current = view.topics.get(name)
            if current is not None:
                if current.node.topic_id != topic_id:
                    deleted.add(name)
            elif str(topic_id) in view.deleted_ids:
                deleted.add(name)
            else:
                self._missing[name] = topic_id
        if deleted:
            self._delete_offsets(deleted, view, _report_error)

    def _delete_offsets(
        self, names: set[str], view: ClusterView, callback: GroupOutcome
    ) -> None:
        """Delete the offsets of these names, except those of topics in the view."""
        current = {
            (name, view.topics[name].node.id_bytes)
            for name in names
            if name in view.topics
        }
        # One more than the coordinators, so that callback() is not called before all are
        # started.
        remaining = 1
        failure: GroupError | None = None

        def finish_one(error: GroupError | None) -> None:
            nonlocal remaining, failure
            remaining -= 1
            failure = failure or error
            if not remaining:
                callback(failure)

        # A deleted `__consumer_offsets` has no offsets to delete.
        group_topics = names - {OFFSETS_TOPIC}
        for shard in self.shards.loaded() if group_topics else ():
            remaining += 1
            shard.topics_deleted(group_topics, self._state.now_ms, finish_one, current)
        # A coordinator that is being loaded may have read the offsets already. It
        # deletes them before its first request, so callback() does not wait for the
        # load, which may take as long as too few replicas are in sync.
        if group_topics:
            self.shards.after_load(
                lambda shard: shard.topics_deleted(
                    group_topics, self._state.now_ms, current=current
                )
            )
        finish_one(None)

    def stop(self, now_ms: int) -> None:
        for shard in self.shards.loaded():
            shard.stop(now_ms)
