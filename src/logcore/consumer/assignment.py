"""Which partitions a consumer reads: those that it was given by hand, or its share of what it subscribes to.

    subscribe() --> member of the group --> share --> owned --> read
                                            what the group gave it
                                                      what of that no other member still reads

Rules (clients reference 5):
- Before a partition is given up, what is finished of it is committed and the listener is told. Only then may another
  member own it.
- What was lost is not committed, for another member may have committed more. It is reported.
- Whatever a listener or the disk raises, the next look goes on where this one stopped.
- A partition that was added to a topic later begins at its start (is_added()), or its first records would be lost.

Everything here runs while the consumer works for one caller alone: under its lock, or in a step of logcore.aio. So no
field has a lock of its own. The listener is called in the middle, and may seek and commit.

Not here: how a group divides its partitions (member.py, assignors.py), the nodes of owners in the registry
(ownership.py), what is committed (commits.py), and where reading begins (consumer.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from logcore.consumer.commits import Commits
from logcore.consumer.groups import Directory as GroupDirectory
from logcore.consumer.groups import Groups
from logcore.consumer.member import LOST, REJOIN, GroupMember, Heard, Share
from logcore.consumer.membership import TopicPartition
from logcore.consumer.ownership import Ownership, Registration
from logcore.consumer.readings import Readings
from logcore.consumer.sharedgroups import SharedGroups
from logcore.consumer.values import ConsumerSettings, RebalanceListener
from logcore.errors import ConsumerStateError, LogcoreError, TopicNotFoundError
from logcore.fs import FS, SharedFS
from logcore.names import INTERNAL_TOPICS
from logcore.registry.paths import Pattern


class Directory(GroupDirectory, Protocol):
    """What is asked of the LogDir."""

    @property
    def is_read_only(self) -> bool: ...
    @property
    def is_shared(self) -> bool: ...
    def topics(self) -> list[str]: ...
    def refresh(self) -> None: ...


class Assignment:
    """The assignment of one consumer, and its place in its group (that of its Commits), which this class alone changes.

    _topics, _pattern: the subscription; at most one of them says something. _share: what the group gave it.
    _is_share_taken: all of that is read; otherwise each look asks again for what another member still owns.
    _registration, _ownership: in the registry, of members of a shared group; _number: of the stream that it is there.
    _first_seen: topic -> how many partitions it had when it was first subscribed to.
    """

    def __init__(
        self,
        fs: FS,
        directory: Directory,
        settings: ConsumerSettings,
        groups: Groups | SharedGroups | None,
        readings: Readings,
        commits: Commits,
    ) -> None:
        self.rebalances = 0  # for the metrics
        self.is_telling = False  # the listener is at work
        self._fs = fs
        self._forks = fs.forks
        self._directory = directory
        self._has_foreign_writers = directory.is_read_only or directory.is_shared
        self._settings = settings
        self._groups = groups
        self._readings = readings
        self._commits = commits
        self._place = commits.place
        self._topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        self._listener = RebalanceListener()
        self._share: frozenset[TopicPartition] = frozenset()
        self._is_share_taken = True
        self._untold: frozenset[TopicPartition] = frozenset()  # assigned, and the listener does not know it yet
        self._first_seen: dict[str, int] = {}
        self._registration: Registration | None = None
        self._number = 0
        self._announces = False  # its own subscription in the registry, and not that of a connector
        self._ownership: Ownership | None = None

    # -- what is asked for ---------------------------------------------------------------------------------------

    @property
    def is_subscribed(self) -> bool:
        """Whether topics or a pattern say what is read, and not assign()."""
        return bool(self._topics) or self._pattern is not None

    def subscription(self) -> frozenset[str]:
        """The topics that are subscribed to; with a pattern, those that match now."""
        if self._pattern is None:
            return self._topics
        left_out = INTERNAL_TOPICS if self._settings.exclude_internal_topics else frozenset()
        names = self._directory.topics()
        return frozenset(name for name in names if name not in left_out and self._pattern.fullmatch(name))

    def subscribe(
        self, topics: frozenset[str], pattern: re.Pattern[str] | None, listener: RebalanceListener | None
    ) -> None:
        """In place of what was subscribed to or assigned before. The next look joins the group."""
        self._drop_assigned()
        self._topics = topics
        self._pattern = pattern
        self._listener = listener or RebalanceListener()
        self._register()
        if self._groups is not None and self._place.member is None:
            settings = self._settings
            assert settings.group_id is not None
            self._place.member = GroupMember(
                self._groups,
                settings.group_id,
                instance_id=settings.group_instance_id,
                client_id=settings.client_id,
                assignors=settings.assignors,
                max_poll_interval_ms=settings.max_poll_interval_ms,
                session_timeout_ms=settings.session_timeout_ms,
                partitions_of=self._count,
            )

    def unsubscribe(self) -> None:
        """Gives up all partitions and leaves the group."""
        self._drop_assigned()
        if self._place.member is not None:
            self.leave()
            self._place.member = None
        self._readings.choose(frozenset())
        self._topics = frozenset()
        self._pattern = None

    def assign(self, wanted: frozenset[TopicPartition]) -> None:
        """Raises ConsumerStateError for a consumer that has subscribed, and TopicNotFoundError."""
        if self.is_subscribed:
            raise ConsumerStateError("this consumer has subscribed to topics", expected="unsubscribe() first")
        for one in wanted:
            if one.partition not in self._directory.partitions(one.topic):
                raise TopicNotFoundError(f"topic {one.topic!r} has no such partition", found=one.partition)
        self._give_up(self._read() - wanted)
        self._readings.choose(wanted)

    def _drop_assigned(self) -> None:
        if self._read() and not self.is_subscribed:
            self._give_up(self._read())

    def _read(self) -> frozenset[TopicPartition]:
        return frozenset(self._readings.by_partition)

    # -- in the registry -----------------------------------------------------------------------------------------

    def register_with(
        self, of: Registration | None, number: int, subscription: Mapping[str, int], pattern: Pattern
    ) -> Registration | None:
        """See Consumer.register_with()."""
        if not isinstance(self._groups, SharedGroups):
            return None
        if of is None:
            of = self._new_registration()
            of.announce(subscription, pattern)
        self._registration = of
        self._number = number
        self._ownership = Ownership(self._groups, of, number)
        return of

    def _register(self) -> None:
        """What it subscribes to now, for the registry."""
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
            self._ownership = Ownership(self._groups, self._registration, self._number)
        self._ownership.announce_again()

    def _new_registration(self) -> Registration:
        return Registration(cast(SharedFS, self._fs), str(self._settings.group_id))

    def watched_paths(self) -> list[str]:
        """Directories in which something changes when other members move: the group, and what they own of its share."""
        paths: list[str] = []
        if isinstance(self._groups, SharedGroups):
            paths.append(self._groups.watched(str(self._settings.group_id)))
        if self._ownership is not None and not self._is_share_taken:
            paths += self._ownership.watched(self._share)
        return paths

    # -- what has changed ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """What has changed: topics, the place in the group, logs that failed. Calls the listener."""
        if self.is_subscribed:
            self._look_at_group()
        self._readings.open_again(may_be_gone=self.is_subscribed)

    def _look_at_group(self) -> None:
        if self._has_foreign_writers:
            self._directory.refresh()
        wanted = self.subscription()
        for topic in wanted:
            count = self._count(topic)
            self._first_seen[topic] = min(count, self._first_seen.get(topic, count))  # 0 after a deletion
        member = self._place.member
        if member is None:
            self._share = frozenset(TopicPartition(topic, n) for topic in wanted for n in range(self._count(topic)))
            self._take_share()
            return
        assert self._groups is not None
        member.subscribe(wanted)
        self._groups.look()
        while True:
            heard = member.step()
            if heard is None:
                break
            self._hear(member, heard)
        if not self._is_share_taken:
            self._take_share()

    def is_added(self, one: TopicPartition) -> bool:
        """Whether its topic had no such partition when it was first subscribed to."""
        return one.partition >= self._first_seen.get(one.topic, one.partition + 1)

    def _count(self, topic: str) -> int:
        """How many partitions a topic has now."""
        return len(self._directory.partitions(topic)) if topic in self._directory else 0

    def _hear(self, member: GroupMember, heard: Heard | Share) -> None:
        mine = self._read()
        if heard is LOST:
            if self._settings.enable_auto_commit:
                self._commits.tell_uncommitted(self._commits.finished(), "this consumer was removed from its group")
            self._readings.choose(frozenset())
            self._share = frozenset()
            if self._ownership is not None:
                self._ownership.forget()
            if mine:
                self._tell(self._listener.on_partitions_lost, mine)
                self._commits.settle()  # refused now; after it has joined again it would count
        elif heard is REJOIN:
            if not member.is_cooperative:
                self._give_up(mine)
            self._share = self._read()
            self._take_owned()  # lets go of what it gave up, before it joins
            member.join(self._read())
        elif isinstance(heard, Share):
            self.rebalances += 1
            if mine - heard.partitions and member.is_cooperative:
                member.rejoin()  # first: if what follows fails, it joins with all that it still has
            self._share = heard.partitions
            self._is_share_taken = False  # whatever the listener raises, the next look goes on
            member.take_share()
            self._take_share()

    def _take_share(self) -> None:
        """Gives up what is not in its share, and reads what is."""
        self._give_up(self._read() - self._share)
        self._take_owned()

    def _take_owned(self) -> None:
        """Reads what of its share no other owns, and lets go of what is not in it. What the listener raises is raised
        once; after an interrupt the next look calls it again.
        """
        owned = self._share
        if self._ownership is not None:
            self._is_share_taken = False
            owned = self._ownership.settle(self._share, self._place.group_metadata())
        self._untold = (self._untold & owned) | (owned - self._read())
        self._readings.choose(owned)
        if self._untold:
            self._is_share_taken = False  # an interrupt comes before the listener ends: the next look tells it again
            try:
                self._tell(self._listener.on_partitions_assigned, self._untold)
            except Exception:
                self._untold = frozenset()
                self._is_share_taken = owned == self._share
                raise
            self._untold = frozenset()
        self._is_share_taken = owned == self._share

    # -- what is given up ----------------------------------------------------------------------------------------

    def _give_up(self, partitions: frozenset[TopicPartition]) -> None:
        """Commits what is finished of them, tells the listener, and reads them no more."""
        if partitions:
            self._commits.commit_finished()
        try:
            self._revoke(partitions)
            self._commits.settle()  # what the listener commits is of the generation that ends
        finally:
            self._readings.choose(self._read() - partitions)

    def _revoke(self, partitions: frozenset[TopicPartition]) -> None:
        if partitions and self.is_subscribed:
            self._tell(self._listener.on_partitions_revoked, partitions)

    def _tell(self, method: Callable[[frozenset[TopicPartition]], None], partitions: frozenset[TopicPartition]) -> None:
        self.is_telling = True
        try:
            method(partitions)
        finally:
            self.is_telling = False

    def leave(self, timeout: float | None = None) -> None:
        """Commits what is finished, tells the listener, and gives the place up, whatever the listener raises.

        timeout: as for Consumer.commit().
        """
        member = self._place.member
        if member is None:
            self._commits.commit_finished(timeout)
            return
        self._place.is_leaving = True
        try:
            self._commits.commit_finished(timeout)
            self._revoke(self._read())
            self._commits.settle()
        finally:
            self._place.is_leaving = False
            self._readings.choose(frozenset())
            self._share = frozenset()
            if self._fs.forks == self._forks:  # else the place is the parent's
                self._end_ownership(member)

    def end(self) -> None:
        """The consumer is closed: its logs wake it no more, and an iteration ends."""
        self._readings.end()

    def _end_ownership(self, member: GroupMember) -> None:
        """Lets go of what it owns in the registry, and of its place."""
        ownership = self._ownership
        self._ownership = None
        try:
            if ownership is not None:
                ownership.end()
        except (LogcoreError, OSError):
            member.leave()
            raise
        member.leave()
