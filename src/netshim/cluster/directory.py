"""The topics of a cluster, with the interface of a log directory.

Topics, settings and partitions come from the latest view of the cluster. Logs come from
this broker's own directory. A change is written to the registry, and the method
returns when the change has taken effect in the view of this broker.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Final

from logcore import LogConfig, LogDir, TopicDescription
from logcore.directory.topic_file import NewTopics, check_count, new_id
from logcore.directory.topics import check_new_name, confusable, merged_overrides
from logcore.errors import (
    CommitTimeoutError,
    InvalidConfigError,
    LogcoreError,
    NodeExistsError,
    NotLeaderError,
    TopicExistsError,
    TopicNotFoundError,
)
from logcore.log import Log
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import INTERNAL_TOPICS
from logcore.registry import paths
from logcore.registry.protocol import Registry
from logcore.replication.placing import place_partitions
from logcore.replication.state import ReplicationError
from netshim.cluster import registry_nodes
from netshim.cluster.member import ClusterMember
from netshim.cluster.registry_nodes import WHOLE_TOPIC, TopicNode
from netshim.cluster.view import ClusterView, TopicOfCluster
from netshim.topology import Placement

#: Maximum time until a change takes effect.
_CHANGE_S: Final = 20.0
#: Replication of internal topics, if there are as many brokers.
_INTERNAL_FACTOR: Final = 3
_INTERNAL_MIN_ISR: Final = 2
#: Producer ids that a broker allocates by one write to the registry, as in Kafka
#: (KIP-730).
_PRODUCER_ID_BLOCK: Final = 1_000


class ClusterDirectory:
    """See the description of the module."""

    def __init__(
        self,
        local: LogDir,
        member: ClusterMember,
        default_factor: int,
        on_failure: Callable[[LogcoreError], None],
    ) -> None:
        #: The directory of this broker.
        self.local = local
        self.path: Final = local.path
        self.config: Final = local.config
        self.given_config: Final = local.given_config
        self.durability: Final = local.durability
        self.cluster_id: Final = local.cluster_id
        self.node_id: Final = local.node_id
        self.is_read_only: Final = False
        self.is_shared: Final = False
        #: Reads and writes the registry, and publishes views.
        self._member = member
        #: Replication factor of topics that do not set one.
        self._default_factor = default_factor
        self.host = ClusterHost(self, member, on_failure)

    @property
    def _view(self) -> ClusterView:
        return self._member.view

    # -- the local directory -----------------------------------------------------------

    def space(self) -> tuple[int, int]:
        return self.local.space()

    def size_bytes(self, topic: str, number: int) -> int:
        return self.local.size_bytes(topic, number)

    def refresh(self) -> None:
        """Do nothing: the member publishes each view."""

    def partition(self, topic: str, number: int) -> Log:
        """Return the log of a partition with a replica here, and open it if necessary.

        Raises:
            TopicNotFoundError: the cluster has no such partition.
            NotLeaderError: the partition has no replica here.
            LogcoreError: the log could not be opened.
        """
        # The view decides whether a partition exists, and the local directory whether
        # it has a replica.
        if number not in self._topic(topic).node.replicas:
            raise TopicNotFoundError(
                f"topic {topic!r} has no such partition", found=number
            )
        try:
            return self.local.partition(topic, number)
        except TopicNotFoundError as error:
            raise NotLeaderError(
                f"broker {self.node_id} has no replica of {topic}-{number}"
            ) from error

    # -- topics ------------------------------------------------------------------------

    def __contains__(self, topic: object) -> bool:
        return topic in self._view.topics

    def _topic(self, name: str) -> TopicOfCluster:
        topic = self._view.topics.get(name)
        if topic is None:
            raise TopicNotFoundError(
                "there is no such topic",
                name=str(name),
                known=self._view.topics,
                found=repr(name),
            )
        return topic

    def topics(self) -> list[str]:
        return sorted(self._view.topics)

    def topic_id(self, name: str) -> uuid.UUID:
        return self._topic(name).node.topic_id

    def partitions(self, name: str) -> tuple[int, ...]:
        return tuple(self._topic(name).node.replicas)

    def settings(self, name: str) -> LogConfig:
        return self._topic(name).config

    def describe_topic(self, name: str) -> TopicDescription:
        topic = self._topic(name)
        return TopicDescription(
            name=name,
            topic_id=topic.node.topic_id,
            partitions=(),
            config=topic.config,
            overrides=topic.overrides,
        )

    # -- changes -----------------------------------------------------------------------

    def create_topics(self, wanted: NewTopics, *, check_only: bool = False) -> None:
        self.create_placed_topics(wanted, {}, check_only=check_only)

    def create_placed_topics(
        self,
        requested: NewTopics,
        placements: Mapping[str, Placement],
        *,
        timeout_ms: int = 0,
        check_only: bool = False,
    ) -> None:
        """Create topics like LogDir.create_topics(), and wait for their leaders.

        The wait ends after `timeout_ms`, and after 20 s at the latest. With 0 ms, the
        broker chooses the limit.

        Raises also:
            CommitTimeoutError: a topic was created, and has no leader yet.
        """
        # Step 1: check all topics and choose their replicas.
        existing = {confusable(name): name for name in self._view.topics}
        created = {}
        for name, (count, config) in requested.items():
            if name in self._view.topics:
                raise TopicExistsError("there is such a topic already", found=name)
            if name in self._view.deletions:
                raise TopicExistsError(
                    "the topic of that name is being deleted", found=name
                )
            check_new_name(name, existing)
            existing[confusable(name)] = name
            overrides = merged_overrides(self.given_config, {}, config or {})
            replicas = self._choose_replicas(
                check_count(count, 1), placements.get(name, Placement()), name
            )
            created[name] = TopicNode(new_id(self.local.host.fs), replicas), overrides
        if check_only:
            return
        registry = self._member.registry
        # Step 2: write the nodes. Several topics are not created together: an error
        # leaves the earlier ones.
        for name, (node, overrides) in created.items():
            self._create(registry, name, node, paths.pack_config(overrides))
        # Step 3: notify the brokers, and wait until the controller has elected leaders.
        self._member.publish_changes([(name, WHOLE_TOPIC) for name in created])
        self._wait(
            "a new topic has no leader yet",
            lambda view: all(
                view.leader_of((name, number)) >= 0
                for name, (node, _) in created.items()
                for number in node.replicas
            ),
            min(timeout_ms / 1_000, _CHANGE_S) if timeout_ms > 0 else _CHANGE_S,
        )

    def _create(
        self, registry: Registry, name: str, node: TopicNode, config: bytes
    ) -> None:
        """Write the settings of a new topic, then the topic."""
        exists = TopicExistsError("there is such a topic already", found=name)
        try:
            registry.create(paths.topic_config(name), config)
        except NodeExistsError:
            # Another broker creates the same topic, or was killed while it created it.
            if registry.children(paths.topic(name)):
                raise exists from None
        try:
            registry.create(paths.topic(name), registry_nodes.pack_topic(node))
        except NodeExistsError:
            raise exists from None
        # A broker that was killed may have left other settings.
        registry.update(paths.topic_config(name), lambda _: config)

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, object] | None = None,
        *,
        exist_ok: bool = False,
    ) -> bool:
        if exist_ok and name in self:
            return False
        settings = dict(config or {})
        placement = Placement()
        if name in INTERNAL_TOPICS:
            # Kafka's defaults for internal topics are 3 replicas and 2 in sync.
            factor = min(_INTERNAL_FACTOR, len(self._member.read_racks()))
            placement = Placement(factor)
            if factor >= _INTERNAL_FACTOR:
                settings["min.insync.replicas"] = _INTERNAL_MIN_ISR
        try:
            self.create_placed_topics({name: (partitions, settings)}, {name: placement})
        except TopicExistsError:
            if not exist_ok:
                raise
            # Another broker has created it. Its view is newer than the view here.
            self._wait("a new topic is not known yet", lambda view: name in view.topics)
            return False
        return True

    def factor_of(self, placement: Placement) -> int:
        """Return the replication factor of a placement."""
        if placement.assignments:
            # All partitions have the same number of replicas, see check_placement().
            return len(next(iter(placement.assignments.values())))
        if placement.factor > 0:
            return placement.factor
        return self._default_factor

    def _choose_replicas(
        self, count: int, placement: Placement, name: str, first: int = 0
    ) -> dict[int, tuple[int, ...]]:
        """Return the brokers of new partitions."""
        if placement.assignments is not None:
            return {n: tuple(replicas) for n, replicas in placement.assignments.items()}
        racks = self._member.read_racks()
        # Topics begin at different brokers.
        start = int.from_bytes(self.local.host.fs.random_bytes(4), "big")
        shift = int.from_bytes(self.local.host.fs.random_bytes(4), "big")
        chosen = place_partitions(
            racks,
            count,
            self.factor_of(placement),
            start=start,
            shift=shift,
            first_partition=first,
        )
        if isinstance(chosen, ReplicationError):
            raise InvalidConfigError(
                f"the replication factor of topic {name}",
                expected=f"1 to {len(racks)}, the number of brokers",
                found=self.factor_of(placement),
            )
        return dict(enumerate(chosen, first))

    def add_partitions(
        self, name: str, count: int, *, check_only: bool = False
    ) -> None:
        self.add_placed_partitions(name, count, Placement(), check_only=check_only)

    def add_placed_partitions(
        self, name: str, count: int, placement: Placement, *, check_only: bool = False
    ) -> None:
        """Create partitions like LogDir.add_partitions(), and wait for their leaders."""
        topic = self._topic(name)
        current_count = len(topic.node.replicas)
        check_count(count, current_count + 1)
        if placement.assignments is None:
            # New partitions have as many replicas as partition 0. During a
            # reassignment, its target counts.
            stored = self._view.states.get((name, 0))
            first = topic.node.replicas[0] if stored is None else stored.state.target
            placement = Placement(len(first))
        added = self._choose_replicas(
            count - current_count, placement, name, current_count
        )
        if check_only:
            return
        path = paths.topic(name)
        self._member.registry.update(
            path,
            lambda value: registry_nodes.add_partitions(value, path, topic.node, added),
        )
        self._member.publish_changes([(name, WHOLE_TOPIC)])
        self._wait(
            "a new partition has no leader yet",
            lambda view: all(view.leader_of((name, number)) >= 0 for number in added),
        )

    def alter_topic(
        self,
        name: str,
        changes: Mapping[str, object | None],
        *,
        check_only: bool = False,
    ) -> None:
        topic = self._topic(name)
        overrides = merged_overrides(self.given_config, topic.overrides, changes)
        if check_only:
            return

        def change(value: bytes | None) -> bytes:
            # Merged with the stored value, because another broker may have changed
            # other settings.
            current_overrides = {}
            if value is not None:
                current_overrides = paths.unpack_config(value, paths.topic_config(name))
            return paths.pack_config(
                merged_overrides(self.given_config, current_overrides, changes)
            )

        self._member.registry.update(paths.topic_config(name), change)
        self._member.publish_changes([(name, WHOLE_TOPIC)])
        # Only these keys are compared, because another client may change the others.
        changed = {key: overrides.get(key) for key in changes}
        self._wait(
            "the settings have not reached this broker yet",
            lambda view: (
                name not in view.topics
                or {key: view.topics[name].overrides.get(key) for key in changes}
                == changed
            ),
        )

    def delete_topic(self, name: str) -> None:
        """Delete a topic, and wait until the controller has removed it."""
        topic_id = self.topic_id(name)
        try:
            self._member.registry.create(paths.deletion(name))
        except NodeExistsError:
            pass  # another client has requested the same
        self._member.publish_changes([(name, WHOLE_TOPIC)])
        self._wait(
            "the topic is not deleted yet",
            lambda view: (
                # A client may create a topic of the same name at once.
                name not in view.topics or view.topics[name].node.topic_id != topic_id
            ),
        )

    def _wait(
        self,
        timeout_text: str,
        condition: Callable[[ClusterView], bool],
        limit_s: float = _CHANGE_S,
    ) -> None:
        if not self._member.wait_for(condition, limit_s):
            raise CommitTimeoutError(
                timeout_text, expected=f"within {limit_s:g} s", found="no such view"
            )


def _next_block(value: bytes | None) -> bytes:
    end = (
        0 if value is None else paths.unpack_number(value, registry_nodes.PRODUCER_IDS)
    )
    return paths.pack_number(end + _PRODUCER_ID_BLOCK)


class ClusterHost:
    """The methods of a ClusterDirectory for the parts of a broker, like DirectoryHost."""

    def __init__(
        self,
        directory: ClusterDirectory,
        member: ClusterMember,
        on_failure: Callable[[LogcoreError], None],
    ) -> None:
        self._directory = directory
        self._member = member
        #: Called if a log of this broker fails.
        self._on_failure = on_failure
        self._local = directory.local.host
        self.fs: Final = self._local.fs
        self.coordinators: Final = self._local.coordinators
        self.has_coordinator = True
        self.forget_topic: Callable[[str], None] | None = None
        #: Protects the two fields below: the block of producer ids of this broker.
        self._ids = threading.Lock()
        self._next_id = self._ids_end = 0

    @property
    def was_clean(self) -> bool:
        return self._local.was_clean

    @property
    def topics_version(self) -> int:
        return self._member.view.topics_version

    def trusted_ms(self, wall_ms: int) -> int:
        return self._local.trusted_ms(wall_ms)

    def opened(self, topic: str, number: int) -> Log | None:
        return self._local.opened(topic, number)

    def open_logs(self) -> dict[Key, Log]:
        return self._local.open_logs()

    def known_logs(self) -> Mapping[Key, Log]:
        return self._local.known_logs()

    def stale_topics(self) -> Collection[str]:
        return self._local.stale_topics()

    def close_logs(self, topics: Collection[str]) -> None:
        self._local.close_logs(topics)

    def open_again(self, topic: str, number: int) -> Log:
        """Report that a log has failed, which ends this broker.

        Opened again, the log may lack records that a follower has. So the broker must
        not lead in the same epoch, and registers again after a restart.
        """
        error = NotLeaderError(
            "a write or sync failed; the broker ends", path=f"{topic}-{number}"
        )
        self._on_failure(error)
        raise error

    def leader_epoch(self, topic: str, number: int) -> int:
        stored = self._member.view.states.get((topic, number))
        return -1 if stored is None else stored.state.leader_epoch

    def knows_leader_epoch(self, topic: str, number: int) -> bool:
        return True

    def start_deletion(self, name: str) -> None:
        """Delete a topic, and wait until the controller has removed it."""
        self._directory.delete_topic(name)

    def end_deletion(self, names: Collection[str], *, is_forgotten: bool) -> None:
        """Do nothing: each coordinator deletes the offsets of deleted topics."""

    def next_producer_id(self) -> int:
        """Return a producer id that no broker of the cluster has given out."""
        with self._ids:
            if self._next_id >= self._ids_end:
                node = self._member.registry.update(
                    registry_nodes.PRODUCER_IDS, _next_block
                )
                assert node is not None
                self._ids_end = paths.unpack_number(
                    node.value, registry_nodes.PRODUCER_IDS
                )
                self._next_id = self._ids_end - _PRODUCER_ID_BLOCK
            self._next_id += 1
            return self._next_id - 1
