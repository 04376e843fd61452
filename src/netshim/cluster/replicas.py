"""The replicas of this broker: their roles, high watermarks and changes of the ISR.

Rules:
- Decisions are those of logcore.replication.state and leading: this module keeps the
  books of the partitions that this broker leads, and carries out their effects.
- The role of a replica is evaluated when its state or the broker's own epoch changes.
  A change of role first ends the former one. After all queued work on the log, a thread
  prepares the next one. Until then, requests get NotLeaderError.
- An append is acknowledged only under the leadership that it was made for. After a
  change of role the log itself refuses such appends.
- Replicas are removed if a broker has published the deletion of the topic's id, or if
  the state of the partition no longer names this broker. The replicas of a topic or
  state that is missing for another reason, such as a registry that was emptied or
  restored, are kept. If another topic has the same name, they are renamed.
- A replica has a role only after it was created here for the topic with this id. A broker
  that was paused may read in one step that a topic was deleted and created again, or
  that the broker was unassigned and assigned again while its replica is being removed.

All methods are for the broker's thread.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import attrs

from logcore import Log, LogcoreError, LogDir, NotLeaderError
from logcore.errors import (
    BadVersionError,
    CommitTimeoutError,
    NodeNotFoundError,
    NotEnoughReplicasError,
    RegistryUnavailableError,
    TopicNotFoundError,
)
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import INTERNAL_TOPICS
from logcore.partition.replication import begin_to_follow
from logcore.replication import following, leading
from logcore.replication.identity import (
    ReplicaTreatment,
    is_replica_of,
    replica_treatment,
)
from logcore.replication.leading import FetchRefusal, FollowerFetch, LeaderState
from logcore.replication.state import ReplicationError, Role, role_of
from netshim.cluster.broker_connections import Connect
from netshim.cluster.fetcher import (
    FetcherSettings,
    FollowedPartition,
    LeaderFetcher,
    last_epoch,
)
from netshim.cluster.member import ClusterMember
from netshim.cluster.view import ClusterView, StoredState, TopicOfCluster
from netshim.leadership import Leadership, WhenCommitted
from netshim.scheduling import guarded
from netshim.state import BrokerState

_log = logging.getLogger("netshim")

#: Key of the work that creates and removes replicas.
_PLACING: Final = "placing"
#: Time after which a proposal with an unknown outcome is written again, and a role that
#: could not be prepared is prepared again.
_RETRY_MS: Final = 150

#: How long a new high watermark waits for records that followers get with it. Without the
#: wait, each record of a producer that sends one at a time costs each follower two
#: fetches instead of one.
_REPORT_MS: Final = 20

#: Role, leader, leader epoch and broker epoch.
_RoleInEpoch = tuple[Role, int, int, int | None]
_NO_ROLE: Final[_RoleInEpoch] = (Role.NONE, -1, -1, None)


@attrs.define(eq=False)
class _CommitWait:
    """An append that waits for the high watermark."""

    #: The offset after the append.
    end: int
    callback: WhenCommitted
    #: The deadline of the request. None without one.
    timer: int | None


@attrs.define(eq=False)
class _LedPartition:
    """A partition that this broker leads, in one epoch."""

    key: Key
    #: The path of the state.
    path: str
    log: Log
    #: Replaced by each change; see logcore.replication.leading.
    leader_state: LeaderState
    #: Appends with acks=all, in the order of their offsets.
    commit_waits: list[_CommitWait] = attrs.field(factory=list)
    #: Whether a change of the ISR is being written. There is one at a time.
    is_proposing: bool = False
    #: The high watermark in the last response to each follower.
    sent_high_watermarks: dict[int, int] = attrs.field(factory=dict)
    #: Timer after which followers get a new high watermark without records.
    report_timer: int | None = None


@attrs.frozen
class _LocalTopic:
    """The replicas of a topic that are on the disk of this broker."""

    topic_id: uuid.UUID
    numbers: frozenset[int]


@attrs.frozen
class _PlacementStep:
    """A topic for _place_topics(), with the partitions that this broker gets or loses."""

    topic: TopicOfCluster
    #: The partitions of which this broker gets or keeps replicas.
    assigned: frozenset[int]
    #: The partitions that it loses, including all of a former topic with this name.
    unassigned: frozenset[int]


@attrs.frozen(kw_only=True)
class RoleCallbacks:
    """What ClusterReplicas calls when a role of this broker changes."""

    #: This broker begins to lead a partition.
    on_lead: Callable[[Key, Log], None]
    #: This broker no longer leads a partition.
    on_resign: Callable[[Key], None]
    #: A log cannot be written.
    on_failure: Callable[[LogcoreError], None]


class ClusterReplicas(Leadership):
    """All replicas of this broker."""

    def __init__(
        self,
        state: BrokerState,
        local: LogDir,
        member: ClusterMember,
        connect: Connect,
        roles: RoleCallbacks,
    ) -> None:
        self._state = state
        self._local = local
        self._member = member
        self._lag_ms = state.settings.replica_lag_time_max_ms
        self._fetcher_settings = FetcherSettings(
            wait_ms=state.settings.replica_fetch_wait_max_ms,
            partition_bytes=state.settings.replica_fetch_max_bytes,
        )
        self._connect = connect
        self._roles = roles
        #: Whether the durability policy waits for the disk.
        self._waits_for_disk = local.durability.waits
        self._view = ClusterView()
        #: The registered brokers of the view. Each fetch of a follower needs them.
        self._live = self._view.live
        #: The role of each replica here, from the view that was evaluated last.
        self._current_roles: dict[Key, _RoleInEpoch] = {}
        #: The partitions that this broker leads.
        self._led_partitions: dict[Key, _LedPartition] = {}
        #: Copies the followed partitions, by the broker that leads them.
        self._fetchers: dict[int, LeaderFetcher] = {}
        #: The topics for which the local directory was changed last. A topic of which
        #: this broker has no replica has an empty set of numbers.
        self._local_topics: dict[str, _LocalTopic] = {}
        #: The topics whose replicas may differ from the view.
        self._topics_to_place: set[str] = set()
        #: Deleted topics that still have replicas here.
        self._deleted: set[str] = set()
        #: Whether a thread is changing the directory.
        self._is_placing = False
        self._is_closed = False
        state.fetches.has_other_writers = False
        self._review(state.now_ms)

    def close(self) -> None:
        """Stop following. This blocks until the threads have ended."""
        self._is_closed = True
        for fetcher in self._fetchers.values():
            fetcher.close()

    # -- views -------------------------------------------------------------------------

    def apply_view(self, view: ClusterView) -> None:
        """Compare all roles with a new view."""
        self.version += 1
        previous = self._view
        self._view = view
        self._live = view.live
        # Step 1: report missing topics.
        missing = previous.topics.keys() - view.topics.keys() - view.damaged_topics
        self._deleted = self._deleted_topics()
        self._report_strays(missing - self._deleted)
        # Step 2: compare the roles. A missing state ends the role.
        for key in [*self._current_roles.keys() - view.states.keys()]:
            self._evaluate(key)
        # Step 3: find the replicas to create or remove.
        changed = {
            name
            for name, topic in view.topics.items()
            if previous.topics.get(name) is not topic
        }
        self._topics_to_place |= changed
        for key, stored in view.states.items():
            self._evaluate(key)
            replicas = stored.state.replicas
            if key in previous.damaged or previous.replicas_of(key) != replicas:
                self._topics_to_place.add(key[0])
        # Step 4: apply changed settings to the led partitions.
        for key, led in self._led_partitions.items():
            topic = view.topics.get(key[0])
            if topic is not None and key[0] in changed:
                minimum = topic.config.min_insync_replicas
                leader_state = leading.change_min_insync_replicas(
                    led.leader_state, minimum
                )
                self._update(led, leader_state)
        self._start_placement()

    def _role_in_view(self, key: Key) -> _RoleInEpoch:
        """Return the role that the view gives to a replica."""
        view, node_id = self._view, self._member.settings.node_id
        topic, stored = view.topics.get(key[0]), view.states.get(key)
        if topic is None or stored is None:
            return _NO_ROLE
        local_topic = self._local_topics.get(key[0])
        if local_topic is None or key[1] not in local_topic.numbers:
            return _NO_ROLE
        if not is_replica_of(local_topic.topic_id, topic.node.topic_id):
            # The directory contains a replica of another topic of that name.
            return _NO_ROLE
        state, epoch = stored.state, self._member.epoch
        if node_id not in state.replicas:
            return _NO_ROLE  # another role would open the log
        role = role_of(state, node_id, epoch)
        return role, state.leader, state.leader_epoch, epoch

    def _evaluate(self, key: Key) -> None:
        """Compare the role of a replica with the view."""
        role_in_epoch = self._role_in_view(key)
        stored = self._view.states.get(key)
        if role_in_epoch == self._current_roles.get(key):
            if stored is None:
                return
            led = self._led_partitions.get(key)
            if led is not None:
                self._update(
                    led,
                    leading.read_state(led.leader_state, stored.state, stored.version),
                )
            elif (
                role_in_epoch[0] is Role.FOLLOWER and role_in_epoch[1] in self._fetchers
            ):
                self._fetchers[role_in_epoch[1]].read_state(key, stored.state)
            return
        # Before the log is prepared, so that no append of the former role is accepted.
        self._resign(key)
        # Most partitions of a large cluster have no replica here.
        if role_in_epoch is _NO_ROLE and key not in self._current_roles:
            return
        self._current_roles[key] = role_in_epoch
        # Appends of internal topics use the name of the topic as their key.
        queue: Any = key[0] if key[0] in INTERNAL_TOPICS else key
        self._state.work.submit(
            queue,
            lambda: self._prepare(key, role_in_epoch),
            lambda result: self._begin(key, role_in_epoch, result),
        )

    def _prepare(self, key: Key, role_in_epoch: _RoleInEpoch) -> Log | None:
        """End the former role of a log, and prepare the next one. Blocks."""
        self._stop_fetching(key[0], [key[1]])
        if role_in_epoch is _NO_ROLE:
            log = self._local.host.opened(*key)
            if log is not None:
                begin_to_follow(log.host.writer)
            return None
        log = self._local.partition(*key)
        begin_to_follow(log.host.writer)
        role, _, leader_epoch, _ = role_in_epoch
        if role is Role.LEADER:
            # The state of a leader begins with a durable log.
            log.flush()
            log.begin_epoch(leader_epoch)
        return log

    def _begin(self, key: Key, role_in_epoch: _RoleInEpoch, result: Any) -> None:
        """Begin a role whose log is prepared."""
        if self._current_roles.get(key) != role_in_epoch or self._is_closed:
            return  # another change of role is under way
        if role_in_epoch is _NO_ROLE:
            self._end_role(key)
            return
        if isinstance(result, Exception):
            self._end_role(key)
            if not isinstance(result, TopicNotFoundError):  # it is not created yet
                _log.error("%s-%d has no replica here: %s", *key, result)
                self._retry(key)
            return
        stored = self._view.states.get(key)
        topic = self._view.topics.get(key[0])
        if stored is None or topic is None or self._role_in_view(key) != role_in_epoch:
            return
        role, leader, _, broker_epoch = role_in_epoch
        if role is Role.LEADER:
            self._become_leader(key, result, stored, topic)
        elif role is Role.FOLLOWER:
            assert broker_epoch is not None
            self._become_follower(key, result, stored, topic, leader, broker_epoch)

    def _end_role(self, key: Key) -> None:
        del self._current_roles[key]
        if key[0] in self._topics_to_place or key[0] in self._deleted:
            self._start_placement()

    def _retry(self, key: Key) -> None:
        self._state.timers.at(
            self._state.now_ms + _RETRY_MS, lambda _: self._evaluate(key)
        )

    # -- leading -----------------------------------------------------------------------

    def _become_leader(
        self, key: Key, log: Log, stored: StoredState, topic: TopicOfCluster
    ) -> None:
        leader_state = leading.take_over(
            stored.state,
            stored.version,
            self._member.settings.node_id,
            min_insync_replicas=topic.config.min_insync_replicas,
            lag_ms=self._lag_ms,
            log_start=log.log_start_offset,
            log_end=log.log_end_offset,
            high_watermark=log.high_watermark,
            now_ms=self._state.now_ms,
        )
        led = self._led_partitions[key] = _LedPartition(
            key, stored.path, log, leader_state
        )
        self.version += 1
        self.elections += 1
        self._update(led, leader_state)
        self._state.fetches.wake([key], self._state.now_ms)
        self._roles.on_lead(key, log)

    def _resign(self, key: Key) -> None:
        led = self._led_partitions.pop(key, None)
        if led is None:
            return
        self.version += 1
        if led.report_timer is not None:
            self._state.timers.cancel(led.report_timer)
        # The clients of these appends retry with the next leader. The records may be
        # committed nevertheless.
        error = NotLeaderError("another broker leads this partition now")
        for wait in led.commit_waits:
            if wait.timer is not None:
                self._state.timers.cancel(wait.timer)
            guarded(wait.callback, error)
        self._roles.on_resign(key)
        self._state.fetches.wake([key], self._state.now_ms)

    def _update(self, led: _LedPartition, leader_state: LeaderState) -> None:
        """Store the next state of a partition, and execute its effects."""
        if leader_state.state is not led.leader_state.state:
            self.version += 1
        led.leader_state = leader_state
        if leader_state.high_watermark > led.log.high_watermark:
            try:
                led.log.advance_high_watermark(leader_state.high_watermark)
            except LogcoreError as error:
                # A write or sync has failed, and the broker ends. An exception here would
                # also prevent changes of the other partitions of a view.
                self._roles.on_failure(error)
                return
            end = led.log.high_watermark
            # The list is replaced first: a callback may add another wait.
            committed = [wait for wait in led.commit_waits if wait.end <= end]
            if committed:
                led.commit_waits = [wait for wait in led.commit_waits if wait.end > end]
            for wait in committed:
                if wait.timer is not None:
                    self._state.timers.cancel(wait.timer)
                guarded(wait.callback, None)
            self._state.fetches.wake_consumers(led.key, self._state.now_ms)
            # Followers that get records learn of the high watermark with them.
            if led.report_timer is None and leader_state.followers:
                led.report_timer = self._state.timers.at(
                    self._state.now_ms + _REPORT_MS, partial(self._report, led)
                )
        if leader_state.proposal is not None and not led.is_proposing:
            self._propose(led)

    def _report(self, led: _LedPartition, now_ms: int) -> None:
        """Let followers get the high watermark without records."""
        led.report_timer = None
        self._state.fetches.wake_followers(led.key, now_ms)

    def _propose(self, led: _LedPartition) -> None:
        proposal = led.leader_state.proposal
        if proposal is None or self._led_partitions.get(led.key) is not led:
            led.is_proposing = False
            return
        led.is_proposing = True
        stored = StoredState(proposal.state, proposal.version, led.path)
        self._state.work.submit(
            # In its own queue: the registry must not delay appends.
            ("proposal", led.key),
            lambda: self._member.propose(led.key, stored),
            lambda result: self._proposed(led, stored, result),
        )

    def _proposed(self, led: _LedPartition, stored: StoredState, result: Any) -> None:
        if self._led_partitions.get(led.key) is not led:
            return
        led.is_proposing = False
        if isinstance(result, int):
            self.isr_changes += stored.state.isr != led.leader_state.state.isr
            self._update(
                led, leading.read_state(led.leader_state, stored.state, result)
            )
            return
        # The member reports a registry that does not answer.
        if not isinstance(
            result, BadVersionError | NodeNotFoundError | RegistryUnavailableError
        ):
            _log.warning(
                "%s-%d: the in-sync replicas were not written: %s", *led.key, result
            )
        # A newer version of the state shows the outcome. Until then, it is written
        # again.
        led.is_proposing = True
        self._state.timers.at(
            self._state.now_ms + _RETRY_MS, lambda _: self._propose(led)
        )

    def _review(self, now_ms: int) -> None:
        """Propose to remove followers that are too slow."""
        if self._is_closed:
            return
        # Without a registration, the broker cannot change states.
        if self._member.epoch is not None:
            for led in list(self._led_partitions.values()):
                self._update(
                    led, leading.review_isr(led.leader_state, self._live, now_ms)
                )
        self._state.timers.set(self, now_ms + max(10, self._lag_ms // 2), self._review)

    # -- following ---------------------------------------------------------------------

    def _become_follower(
        self,
        key: Key,
        log: Log,
        stored: StoredState,
        topic: TopicOfCluster,
        leader: int,
        broker_epoch: int,
    ) -> None:
        follower_state = following.follow(
            stored.state,
            self._member.settings.node_id,
            broker_epoch,
            is_durable_first=self._waits_for_disk,
            log_start=log.log_start_offset,
            log_end=log.log_end_offset,
            last_epoch=last_epoch(log),
            high_watermark=log.high_watermark,
        )
        # One thread for each leader copies all partitions that the broker leads.
        fetcher = self._fetchers.get(leader)
        if fetcher is None:
            fetcher = self._fetchers[leader] = LeaderFetcher(
                leader,
                self._local.host.fs,
                self._fetcher_settings,
                self._connect,
                lambda key, error: self._roles.on_failure(error),
            )
        fetcher.follow(
            FollowedPartition(key, topic.node.topic_id.bytes, log, follower_state)
        )

    # -- placing -----------------------------------------------------------------------

    def _start_placement(self) -> None:
        """Create and remove replicas, so that they match the view."""
        if self._is_placing or self._is_closed:
            return
        deleted = {
            name
            for name in self._deleted_topics()
            if not self._has_roles(name, self._local_topics[name].numbers)
        }
        steps: dict[str, _PlacementStep] = {}
        waiting: set[str] = set()
        for name in sorted(self._topics_to_place & self._view.topics.keys()):
            step = self._placement_step(name, self._view.topics[name])
            if self._has_roles(name, step.unassigned):
                waiting.add(name)
            else:
                steps[name] = step
        self._topics_to_place = waiting
        if not steps and not deleted:
            return
        # One change of the directory at a time. _finish_placement() starts the next
        # one.
        self._is_placing = True
        for name, step in steps.items():
            # A removal that has begun is completed, also if the next view assigns the
            # partition again. Until then it has no role.
            local_topic = self._local_topics.get(name)
            if local_topic is not None:
                numbers = local_topic.numbers - step.unassigned
                self._local_topics[name] = attrs.evolve(local_topic, numbers=numbers)
        ids = {name: self._local_topics[name].topic_id for name in sorted(deleted)}
        self._state.work.submit(
            _PLACING,
            lambda: self._place_topics(steps, ids),
            lambda result: self._finish_placement(steps, deleted, result),
        )

    def _placement_step(self, name: str, topic: TopicOfCluster) -> _PlacementStep:
        view, node_id = self._view, self._member.settings.node_id
        assigned, unassigned = set(), set()
        for number in topic.node.replicas:
            key = name, number
            if key in view.damaged:
                continue  # its replica is kept
            if node_id in view.replicas_of(key):
                assigned.add(number)
            elif key in view.states:
                unassigned.add(number)
        local_topic = self._local_topics.get(name)
        # The replicas of a former topic of the name make room for the new ones.
        if local_topic is not None and local_topic.topic_id != topic.node.topic_id:
            unassigned |= local_topic.numbers
        return _PlacementStep(topic, frozenset(assigned), frozenset(unassigned))

    def _has_roles(self, name: str, numbers: Iterable[int]) -> bool:
        """Return whether work for the role of a replica is queued, or it has a role.

        Such work may open the log, so a removal waits until it has run.
        """
        return any((name, number) in self._current_roles for number in numbers)

    def _deleted_topics(self) -> set[str]:
        """Return the topics with replicas here that were deleted.

        Another topic may have the name of one of them.
        """
        topics = self._view.topics
        return {
            name
            for name, local_topic in self._local_topics.items()
            if self._replica_fate(
                local_topic.topic_id,
                topics[name].node.topic_id if name in topics else None,
            )
            is ReplicaTreatment.DELETE
        }

    def _replica_fate(
        self, local_id: uuid.UUID, current_id: uuid.UUID | None
    ) -> ReplicaTreatment:
        """Return the treatment of replicas whose topic has an id."""
        current = None if current_id is None else str(current_id)
        return replica_treatment(str(local_id), current, self._view.deleted_ids)

    def _place_topics(
        self, steps: Mapping[str, _PlacementStep], deleted: Mapping[str, uuid.UUID]
    ) -> None:
        """Change the local directory. Blocks.

        `deleted` contains deleted topics and their ids.

        Raises:
            LogcoreError: the directory cannot be changed.
        """
        local = self._local
        for name, topic_id in deleted.items():
            if name in local and local.topic_id(name) == topic_id:
                self._remove(name, local.partitions(name))
        for name, step in steps.items():
            node = step.topic.node
            if name in local:
                replica_fate = self._replica_fate(local.topic_id(name), node.topic_id)
                if replica_fate is ReplicaTreatment.DELETE:
                    self._remove(name, local.partitions(name))
                elif replica_fate is ReplicaTreatment.SET_ASIDE:
                    self._rename_to_stray(name)
                else:
                    extra = step.unassigned.intersection(local.partitions(name))
                    if extra:
                        self._remove(name, extra)
            if step.assigned:
                local.host.place_topic(
                    name,
                    node.topic_id,
                    len(node.replicas),
                    sorted(step.assigned),
                    step.topic.overrides,
                )

    def _remove(self, name: str, numbers: Iterable[int]) -> None:
        numbers = sorted(numbers)
        _log.info("replicas of %s are removed: %s", name, numbers)
        self._stop_fetching(name, numbers)
        self._local.host.remove_replicas(name, numbers)

    def _rename_to_stray(self, name: str) -> None:
        """Rename the replicas of another topic of that name."""
        _log.warning(
            "topic %s is another one than in %s; the former replicas are renamed to -stray",
            name,
            self._local.path,
        )
        self._stop_fetching(name, self._local.partitions(name))
        self._local.host.set_topic_aside(name)

    def _stop_fetching(self, name: str, numbers: Iterable[int]) -> None:
        for fetcher in list(self._fetchers.values()):
            for number in numbers:
                fetcher.drop((name, number))

    def _finish_placement(
        self, steps: Mapping[str, _PlacementStep], deleted: Iterable[str], result: Any
    ) -> None:
        self._is_placing = False
        if isinstance(result, Exception):
            _log.error("replicas cannot be created or removed: %s", result)
            self._topics_to_place.update(steps)
            self._state.timers.at(
                self._state.now_ms + 10 * _RETRY_MS, lambda _: self._start_placement()
            )
            return
        for name in deleted:
            self._local_topics.pop(name, None)
        for name, step in steps.items():
            node = step.topic.node
            self._local_topics[name] = _LocalTopic(node.topic_id, step.assigned)
            for number in node.replicas:
                self._evaluate((name, number))
        self._start_placement()

    def report_strays(self) -> None:
        """Log the topics of the directory that the cluster does not have."""
        topics = self._view.topics
        self._report_strays(
            topic for topic in self._local.topics() if topic not in topics
        )

    def _report_strays(self, names: Iterable[str]) -> None:
        for name in names:
            _log.warning(
                "topic %s is not in the registry of the cluster; its replicas are kept in %s",
                name,
                self._local.path,
            )

    # -- for handlers ------------------------------------------------------------------

    def is_leader(self, key: Key) -> bool:
        return key in self._led_partitions

    def check_serves(self, key: Key, leader_epoch: int) -> None:
        if key in self._led_partitions:
            return
        role_in_epoch = self._current_roles.get(key, _NO_ROLE)
        if leader_epoch < 0 or role_in_epoch is _NO_ROLE:
            raise NotLeaderError("another broker leads this partition, or none")

    def check_in_sync(self, key: Key) -> None:
        led = self._led_partitions.get(key)
        if led is not None and not led.leader_state.has_min_isr:
            raise NotEnoughReplicasError(
                "too few replicas are in sync",
                expected=f"{led.leader_state.min_isr}, see min.insync.replicas",
                found=len(led.leader_state.state.isr),
            )

    def leader_epoch(self, key: Key, log: Log) -> int:
        stored = self._view.states.get(key)
        return log.leader_epoch if stored is None else stored.state.leader_epoch

    def is_high_watermark_current(self, key: Key) -> bool:
        led = self._led_partitions.get(key)
        return (
            led is None
            or led.leader_state.high_watermark >= led.leader_state.epoch_start
        )

    def appended(self, key: Key, log: Log, end: int, now_ms: int) -> None:
        led = self._led_partitions.get(key)
        if led is None:
            return
        self.appends += 1
        self._read_end(led)
        # The leader counts as a replica that has the record only when its own disk has
        # it.
        if self._waits_for_disk:
            self._state.syncs.when_durable(log, end, partial(self._synced, led))
        self._state.fetches.wake_followers(key, now_ms)

    def _read_end(self, led: _LedPartition) -> None:
        """Record the current end of the log."""
        end = led.log.log_end_offset
        if end > led.leader_state.log_end:
            self._update(
                led,
                leading.appended(
                    led.leader_state,
                    end,
                    is_durable=not self._waits_for_disk,
                    now_ms=self._state.now_ms,
                ),
            )

    def _synced(self, led: _LedPartition, error: LogcoreError | None) -> None:
        if self._led_partitions.get(led.key) is not led:
            return
        if error is not None:
            self._roles.on_failure(error)
            return
        self._read_end(led)
        self._update(led, leading.synced(led.leader_state, led.log.durable_end_offset))

    def is_committed(self, log: Log, end: int) -> bool:
        return log.high_watermark >= end

    def when_committed(
        self,
        key: Key,
        log: Log,
        end: int,
        callback: WhenCommitted,
        deadline_ms: int | None = None,
    ) -> None:
        led = self._led_partitions.get(key)
        if led is None or led.log is not log:
            callback(NotLeaderError("another broker leads this partition now"))
            return
        if log.high_watermark >= end:
            callback(None)
            return
        wait = _CommitWait(end, callback, None)
        if deadline_ms is not None:
            wait.timer = self._state.timers.at(
                deadline_ms, lambda _: self._give_up(led, wait)
            )
        led.commit_waits.append(wait)

    def _give_up(self, led: _LedPartition, wait: _CommitWait) -> None:
        led.commit_waits.remove(wait)
        guarded(
            wait.callback,
            CommitTimeoutError(
                "the in-sync replicas did not confirm the append in time"
            ),
        )

    def when_safe(self, key: Key, log: Log, end: int, callback: WhenCommitted) -> None:
        self.when_committed(key, log, end, callback)

    def follower_fetched(
        self, key: Key, log: Log, fetch: FollowerFetch
    ) -> FetchRefusal | None:
        led = self._led_partitions.get(key)
        if led is None or led.log is not log:
            return FetchRefusal(ReplicationError.NOT_LEADER_OR_FOLLOWER)
        self._read_end(led)
        leader_state = led.leader_state
        log_start = log.log_start_offset
        if log_start != leader_state.log_start:
            # DeleteRecords and retention raise the start. Followers get the new one
            # with their records.
            leader_state = leader_state._replace(log_start=log_start)
        leader_state, refusal = leading.fetched(
            leader_state,
            fetch,
            log.end_of_epoch(fetch.last_epoch),
            self._live,
            self._state.now_ms,
        )
        if refusal is None and self._member.epoch is not None:
            # A follower that has caught up joins the in-sync replicas.
            leader_state = leading.expand_isr(leader_state, fetch, self._live)
        self._update(led, leader_state)
        return refusal

    def is_in_sync(self, key: Key, replica: int) -> bool:
        led = self._led_partitions.get(key)
        return led is not None and replica in led.leader_state.state.isr

    def must_send_high_watermark(
        self, key: Key, replica: int, high_watermark: int, *, has_records: bool
    ) -> bool:
        led = self._led_partitions.get(key)
        if led is None:
            return has_records
        is_known = led.sent_high_watermarks.get(replica) == high_watermark
        if not has_records and (is_known or led.report_timer is not None):
            return False
        led.sent_high_watermarks[replica] = high_watermark
        return True
