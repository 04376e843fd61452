"""Partitions of a consumer: assigned manually, or its share in a group.

    subscribe() --> member of the group --> share --> owned --> read

The group assigns the share. The consumer owns a partition of its share once no other
member reads the partition.

Rules (clients reference 5):
- Before a partition is given up, its finished offset is committed and the listener is
  called. Only then may another member own the partition.
- Offsets of lost partitions are not committed, because another member may have
  committed later ones. They are reported.
- If a listener or the disk raises, the next poll continues at the same point.
- A partition that is added after the subscription is read from its start (is_added()).
  With auto_offset_reset="latest", its first records would otherwise be skipped.

All methods run under the consumer's lock or in an operation of logcore.aio, so the
fields need no lock. The listener is called during such an operation, and may seek and
commit.

This module does not divide the partitions of a group (group_member.py, assignors.py) or
write the owner nodes of the registry (registry_identity.py). It does not choose the
committed offsets (commits.py) or the initial positions (consumer.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

from logcore.consumer.commits import Commits
from logcore.consumer.group_member import (
    LOST,
    REJOIN,
    GroupMember,
    MembershipEvent,
    Share,
)
from logcore.consumer.positions import ReadPositions
from logcore.consumer.registry_identity import OwnerNodes, Registration
from logcore.consumer.settings import ConsumerSettings, RebalanceListener
from logcore.consumer.topic_partition import TopicPartition
from logcore.coordinators.process_groups import ProcessGroups
from logcore.coordinators.shared_groups import SharedGroups
from logcore.directory.interface import ClientDirectory
from logcore.errors import ConsumerStateError, LogcoreError, TopicNotFoundError
from logcore.fs import FS, SharedFS
from logcore.metadata.filenames import INTERNAL_TOPICS
from logcore.registry.paths import Pattern


class Assignment:
    """The assignment of one consumer. Only this class changes its GroupMembership."""

    def __init__(
        self,
        fs: FS,
        directory: ClientDirectory,
        settings: ConsumerSettings,
        groups: ProcessGroups | None,
        read_positions: ReadPositions,
        commits: Commits,
    ) -> None:
        self.rebalances = 0  # for the metrics
        self.is_calling_listener = False
        self._fs = fs
        self._forks = fs.forks
        self._directory = directory
        self._has_foreign_writers = directory.is_read_only or directory.is_shared
        self._settings = settings
        self._groups = groups
        self._read_positions = read_positions
        self._commits = commits
        self._membership = commits.membership
        #: The subscription: topics or a pattern. At most one of them is set.
        self._topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        self._listener = RebalanceListener()
        #: The partitions that the group has assigned.
        self._share: frozenset[TopicPartition] = frozenset()
        #: Whether the consumer owns its whole share. Otherwise, each poll tries to claim
        #: partitions that another member still owns.
        self._owns_share = True
        #: Assigned partitions for which the listener was not called yet.
        self._unannounced: frozenset[TopicPartition] = frozenset()
        #: Topic -> number of partitions when it was first subscribed to.
        self._initial_partition_counts: dict[str, int] = {}
        #: Node of the consumer in the registry, for members of a shared group.
        self._registration: Registration | None = None
        #: Number of this consumer among the streams of the registration.
        self._number = 0
        #: Whether this consumer, and not a connector, writes the subscription to the
        #: registry.
        self._announces = False
        self._ownership: OwnerNodes | None = None

    # -- subscription ------------------------------------------------------------------

    @property
    def is_subscribed(self) -> bool:
        """Whether topics or a pattern select the partitions, and not assign()."""
        return bool(self._topics) or self._pattern is not None

    def subscription(self) -> frozenset[str]:
        """Return the subscribed topics, or the topics that match the pattern now."""
        if self._pattern is None:
            return self._topics
        excluded = (
            INTERNAL_TOPICS if self._settings.exclude_internal_topics else frozenset()
        )
        names = self._directory.topics()
        return frozenset(
            name
            for name in names
            if name not in excluded and self._pattern.fullmatch(name)
        )

    def subscribe(
        self,
        topics: frozenset[str],
        pattern: re.Pattern[str] | None,
        listener: RebalanceListener | None,
    ) -> None:
        """Replace the subscription or the manual assignment.

        The next poll joins the group.
        """
        self._drop_assigned()
        self._topics = topics
        self._pattern = pattern
        self._listener = listener or RebalanceListener()
        self._register()
        if self._groups is not None and self._membership.member is None:
            self._membership.member = GroupMember(
                self._groups, self._settings, self._count
            )

    def unsubscribe(self) -> None:
        """Stop reading all partitions, and leave the group."""
        self._drop_assigned()
        if self._membership.member is not None:
            self.leave()
            self._membership.member = None
        self._read_positions.set_partitions(frozenset())
        self._topics = frozenset()
        self._pattern = None

    def assign(self, partitions: frozenset[TopicPartition]) -> None:
        """Read these partitions.

        Raises:
            ConsumerStateError: the consumer has subscribed to topics.
            TopicNotFoundError: a partition does not exist.
        """
        if self.is_subscribed:
            raise ConsumerStateError(
                "this consumer has subscribed to topics", expected="unsubscribe() first"
            )
        for partition in partitions:
            if partition.partition not in self._directory.partitions(partition.topic):
                raise TopicNotFoundError(
                    f"topic {partition.topic!r} has no such partition",
                    found=partition.partition,
                )
        self._stop_reading(self._current_partitions() - partitions)
        self._read_positions.set_partitions(partitions)

    def _drop_assigned(self) -> None:
        if self._current_partitions() and not self.is_subscribed:
            self._stop_reading(self._current_partitions())

    def _current_partitions(self) -> frozenset[TopicPartition]:
        return frozenset(self._read_positions.by_partition)

    # -- in the registry ---------------------------------------------------------------

    def register_with(
        self,
        registration: Registration | None,
        number: int,
        subscription: Mapping[str, int],
        pattern: Pattern,
    ) -> Registration | None:
        """Register a stream of a connector; see Consumer.register_with()."""
        if not isinstance(self._groups, SharedGroups):
            return None
        if registration is None:
            registration = self._new_registration()
            registration.announce(subscription, pattern)
        self._registration = registration
        self._number = number
        self._ownership = OwnerNodes(self._groups, registration, number)
        return registration

    def _register(self) -> None:
        """Write the current subscription to the registry."""
        if not isinstance(self._groups, SharedGroups):
            return
        if self._registration is None:
            self._registration = self._new_registration()
            self._announces = True
        if self._announces and self._pattern is None:
            self._registration.announce(dict.fromkeys(self._topics, 1), "static")
        elif self._announces and self._pattern is not None:
            self._registration.announce({self._pattern.pattern: 1}, "white_list")
        if self._ownership is None:
            self._ownership = OwnerNodes(self._groups, self._registration, self._number)
        self._ownership.reannounce()

    def _new_registration(self) -> Registration:
        return Registration(cast(SharedFS, self._fs), str(self._settings.group_id))

    def watched_paths(self) -> list[str]:
        """Return the directories to watch: the directory of the group and, while part of
        the share is not owned, the directories of the partitions' owners.
        """
        paths: list[str] = []
        if isinstance(self._groups, SharedGroups):
            paths.append(self._groups.watched(str(self._settings.group_id)))
        if self._ownership is not None and not self._owns_share:
            paths += self._ownership.watched(self._share)
        return paths

    def watched_sessions(self) -> list[str]:
        """Return the directories in which the death of another member closes a file."""
        if isinstance(self._groups, SharedGroups):
            return [self._groups.watched_sessions()]
        return []

    # -- changes -----------------------------------------------------------------------

    def check_for_changes(self) -> None:
        """Process changes of topics and of the group, and open failed logs again.

        This calls the listener.
        """
        if self.is_subscribed:
            self._check_group()
        self._read_positions.open_again(ignore_deleted=self.is_subscribed)

    def _check_group(self) -> None:
        if self._has_foreign_writers:
            self._directory.refresh()
        topics = self.subscription()
        for topic in topics:
            count = self._count(topic)
            # The count is 0 after the topic was deleted.
            self._initial_partition_counts[topic] = min(
                count, self._initial_partition_counts.get(topic, count)
            )
        # A consumer without a group reads all partitions of its topics.
        member = self._membership.member
        if member is None:
            self._share = frozenset(
                TopicPartition(topic, n)
                for topic in topics
                for n in range(self._count(topic))
            )
            self._apply_share()
            return
        assert self._groups is not None
        member.subscribe(topics)
        self._groups.poll()
        while True:
            event = member.step()
            if event is None:
                break
            self._apply_membership(member, event)
        if not self._owns_share:
            self._apply_share()

    def is_added(self, topic_partition: TopicPartition) -> bool:
        """Return whether a partition is newer than the subscription to its topic."""
        return topic_partition.partition >= self._initial_partition_counts.get(
            topic_partition.topic, topic_partition.partition + 1
        )

    def _count(self, topic: str) -> int:
        """Return the current number of partitions of a topic."""
        return len(self._directory.partitions(topic)) if topic in self._directory else 0

    def _apply_membership(
        self, member: GroupMember, event: MembershipEvent | Share
    ) -> None:
        current = self._current_partitions()
        if event is LOST:
            if self._settings.enable_auto_commit:
                self._commits.log_uncommitted(
                    self._commits.finished_offsets(),
                    "this consumer was removed from its group",
                )
            self._read_positions.set_partitions(frozenset())
            self._share = frozenset()
            if self._ownership is not None:
                self._ownership.forget()
            if current:
                self._call_listener(self._listener.on_partitions_lost, current)
                # The group must refuse the commits of the listener, because the
                # partitions are lost. Once the member has joined again, the group
                # would accept them.
                self._commits.store_queued()
        elif event is REJOIN:
            if not member.is_cooperative:
                self._stop_reading(current)
            self._share = self._current_partitions()
            # This releases the revoked partitions before the member joins.
            self._read_owned()
            member.join(self._current_partitions())
        elif isinstance(event, Share):
            self.rebalances += 1
            if current - event.partitions and member.is_cooperative:
                # First, because the member must join again even if a later step fails.
                member.rejoin()
            self._share = event.partitions
            # If the listener raises, the next poll continues.
            self._owns_share = False
            member.clear_share()
            self._apply_share()

    def _apply_share(self) -> None:
        """Stop reading the partitions outside of the share, and read the others."""
        self._stop_reading(self._current_partitions() - self._share)
        self._read_owned()

    def _read_owned(self) -> None:
        """Read the owned partitions of the share, and release all others.

        An exception of the listener is raised once. After an interrupt, the next poll
        calls the listener again.
        """
        owned = self._share
        if self._ownership is not None:
            self._owns_share = False
            owned = self._ownership.claim(
                self._share, self._membership.group_metadata()
            )
        self._unannounced = (self._unannounced & owned) | (
            owned - self._current_partitions()
        )
        self._read_positions.set_partitions(owned)
        if self._unannounced:
            # If an interrupt stops the listener, the next poll calls the listener again.
            self._owns_share = False
            try:
                self._call_listener(
                    self._listener.on_partitions_assigned, self._unannounced
                )
            except Exception:
                self._unannounced = frozenset()
                self._owns_share = owned == self._share
                raise
            self._unannounced = frozenset()
        self._owns_share = owned == self._share

    # -- revoking partitions -----------------------------------------------------------

    def _stop_reading(self, partitions: frozenset[TopicPartition]) -> None:
        """Commit finished offsets of partitions, call the listener, and stop reading."""
        if partitions:
            self._commits.commit_finished()
        try:
            self._revoke(partitions)
            # The commits of the listener belong to the ending generation.
            self._commits.store_queued()
        finally:
            self._read_positions.set_partitions(self._current_partitions() - partitions)

    def _revoke(self, partitions: frozenset[TopicPartition]) -> None:
        if partitions and self.is_subscribed:
            self._call_listener(self._listener.on_partitions_revoked, partitions)

    def _call_listener(
        self,
        method: Callable[[frozenset[TopicPartition]], None],
        partitions: frozenset[TopicPartition],
    ) -> None:
        self.is_calling_listener = True
        try:
            method(partitions)
        finally:
            self.is_calling_listener = False

    def leave(self, timeout: float | None = None) -> None:
        """Commit finished offsets, call the listener, and leave the group.

        The consumer leaves even if the listener raises. `timeout` has the meaning of
        Consumer.commit().
        """
        member = self._membership.member
        if member is None:
            self._commits.commit_finished(timeout)
            return
        self._membership.is_leaving = True
        try:
            self._commits.commit_finished(timeout)
            self._revoke(self._current_partitions())
            self._commits.store_queued()
        finally:
            self._membership.is_leaving = False
            self._read_positions.set_partitions(frozenset())
            self._share = frozenset()
            # In a forked child, the parent process is the member.
            if self._fs.forks == self._forks:
                self._end_ownership(member)

    def end(self) -> None:
        """Remove the listeners of the logs after the consumer was closed, and end an
        iteration.
        """
        self._read_positions.end()

    def _end_ownership(self, member: GroupMember) -> None:
        """Release the owner nodes in the registry, and leave the group."""
        ownership = self._ownership
        self._ownership = None
        try:
            if ownership is not None:
                ownership.end()
        except (LogcoreError, OSError):
            member.leave()
            raise
        member.leave()
