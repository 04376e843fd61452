"""The methods of an open log directory for brokers and coordinators, as `LogDir.host`.
Users need none of them.

Rules:
- One lock orders changes of topics and openings of logs. A fork replaces it.
- A method that changes the directory first checks that it is open for writing in this
  process.

logdir.py has the methods for users.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from logcore.claim import Claim
from logcore.coordinators.lookup import Coordinators
from logcore.coordinators.orphans import first_free_producer_id
from logcore.coordinators.topic_deletion import Deletions
from logcore.directory.identity import ProducerIds
from logcore.directory.incidents import Incidents
from logcore.directory.open_logs import OpenLogs
from logcore.directory.shared_topics import SharedTopics
from logcore.directory.topic_file import PartitionNumbers, TopicEntry, check_count
from logcore.directory.topics import TopicRegistry
from logcore.errors import (
    ForkedWriterError,
    InvalidConfigError,
    LogClosedError,
    LogcoreError,
    ReadOnlyLogError,
)
from logcore.fs import FS
from logcore.log import Log
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import partition_name

if TYPE_CHECKING:
    from logcore.directory.interface import HostDirectory


class DirectoryHost:
    """The methods of a log directory for hosts. Any thread may call them."""

    def __init__(
        self,
        fs: FS,
        directory: HostDirectory,
        claim: Claim | None,
        registry: TopicRegistry,
        logs: OpenLogs,
        sharing: SharedTopics,
        incidents: Incidents,
        *,
        is_replicated: bool,
    ) -> None:
        #: The files, the clock and the locks of the directory.
        self.fs = fs
        #: The coordinators of groups and transactions.
        self.coordinators = Coordinators(fs, claim)
        #: Set by a broker of this process, which then runs the groups and transactions.
        #: Always set in a directory of replicas: another broker may be their coordinator.
        self.has_coordinator = is_replicated
        #: Set by such a broker. It deletes the offsets that groups have committed for a
        #: deleted topic, and returns when the deletion is durable, or raises
        #: LogcoreError.
        self.forget_topic: Callable[[str], None] | None = None
        self.is_replicated = is_replicated
        #: True until the directory is open, so that close() does nothing before.
        self.is_closed = True
        self.deletions = Deletions(fs, registry, sharing, incidents, self.coordinators)
        self._path = directory.path
        # Weak, so that a directory that was not closed warns as soon as it is dropped.
        self._directory: HostDirectory = weakref.proxy(directory)
        self._claim = claim
        self._registry = registry
        self._logs = logs
        self._incidents = incidents
        self._producer_ids = ProducerIds(fs, self._path)
        self._forks = fs.forks
        self._make_lock()
        # A thread of the parent may hold the lock, and does not exist in the child.
        fs.after_fork(self._make_lock)

    def _make_lock(self) -> None:
        self.lock = threading.RLock()

    # -- checks ------------------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        """Whether a parent of this process opened the directory."""
        return self.fs.forks != self._forks

    @property
    def was_clean(self) -> bool:
        """Whether the last writer closed the directory cleanly; if not, opening its
        logs checks their ends.
        """
        return self._claim is None or self._claim.is_clean

    def check_open(self) -> None:
        """Raise LogClosedError if the directory is closed."""
        if self.is_closed:
            raise LogClosedError("the log directory is closed", path=self._path)

    def check_writable(self) -> Claim:
        """Return the claim of the directory.

        Raises:
            LogClosedError: the directory is closed.
            ForkedWriterError: a parent of this process opened it.
            ReadOnlyLogError: it was opened with read_only=True.
        """
        self.check_open()
        if self.is_forked:
            raise ForkedWriterError(
                "the log directory was opened by a parent process; open it again in the child",
                path=self._path,
            )
        if self._claim is None:
            raise ReadOnlyLogError(
                "the log directory was opened with read_only=True", path=self._path
            )
        return self._claim

    def check_standalone(self) -> None:
        """Raise the errors of check_writable(), and InvalidConfigError in a cluster."""
        self.check_writable()
        if self.is_replicated:
            raise InvalidConfigError(
                "the topics of a cluster are changed through its brokers",
                path=self._path,
            )

    def _check_replicated(self) -> Claim:
        claim = self.check_writable()
        if not self.is_replicated:
            raise InvalidConfigError(
                "replicas need a directory that was opened with replicated=True",
                path=self._path,
            )
        return claim

    # -- topics ------------------------------------------------------------------------

    @property
    def topics_version(self) -> int:
        """A number that changes whenever a topic is created, grown or deleted."""
        return self._registry.version

    def reconfigure(self, name: str) -> None:
        """Apply the settings of a topic to its open logs. The caller holds the lock."""
        settings = self._directory.settings(name)
        for (of, number), log in self._logs.known.items():
            if of == name and not log.is_closed:
                # A log that has failed gets the settings when it is opened again.
                with self._incidents.reporting_errors(
                    "settings", partition_name(of, number)
                ):
                    log.reconfigure(settings)

    def place_topic(
        self,
        name: str,
        topic_id: uuid.UUID,
        count: int,
        numbers: Iterable[int],
        config: Mapping[str, str],
    ) -> None:
        """Create the replicas of a topic of a cluster that are missing here.

        `count` is the number of all partitions of the topic, and `numbers` are those
        with a replica in this directory. `config` replaces the settings of the topic.
        Other replicas are kept; remove_replicas() removes them. A call that was
        interrupted can be repeated.

        Raises:
            TopicExistsError: there is a topic of that name with another id.
            InvalidConfigError: a setting is invalid, or the directory was not opened
                with replicated=True.
            CorruptLogError: the directory of a new replica contains records.
        """
        with self.lock:
            self._check_replicated()
            placed = TopicEntry(
                name,
                topic_id,
                check_count(count, 1),
                dict(config),
                PartitionNumbers(sorted(numbers)),
            )
            before = self._registry.known.get(name)
            self._registry.place(placed)
            if before is not None and before.overrides != config:
                self.reconfigure(name)

    def remove_replicas(self, name: str, numbers: Iterable[int]) -> None:
        """Remove replicas of a topic with their records.

        The last one removes the topic from this directory. Raises the errors of
        place_topic(), and TopicNotFoundError.
        """
        with self.lock:
            claim = self._check_replicated()
            deleted = list(numbers)
            with claim.batched_recovery_points():
                self._logs.close((name, number) for number in deleted)
            self._registry.remove_replicas(name, deleted)

    def set_topic_aside(self, name: str) -> None:
        """Rename the replicas of a topic, so that another topic can have its name.

        The directories `<topic>-<partition>.<id>-stray` keep the records, and are never
        opened or removed. Raises the errors of remove_replicas().
        """
        with self.lock:
            claim = self._check_replicated()
            numbers = self._directory.partitions(name)
            with claim.batched_recovery_points():
                self._logs.close((name, number) for number in numbers)
            self._registry.rename_to_stray(name)

    def start_deletion(self, name: str) -> None:
        """Begin to delete a topic like LogDir.delete_topic(), for brokers, which have
        their own groups.

        The name remains unavailable. Once the groups have deleted its offsets, or have
        failed to delete them, the broker must call end_deletion().
        """
        self.check_standalone()
        self._directory.partitions(name)
        self.deletions.start(self._directory, self.lock, name)

    def end_deletion(self, names: Collection[str], *, is_forgotten: bool) -> None:
        """Complete a deletion after start_deletion().

        `is_forgotten` means that the committed offsets of these topics are durably
        deleted. Otherwise tick() deletes them.
        """
        self.deletions.end(self.lock, names, is_forgotten=is_forgotten)

    def next_producer_id(self) -> int:
        """Return a producer id that this directory has never allocated.

        Each block of 1,000 ids is reserved on disk before its use. In a directory
        without a reserved block, the first id is above all ids in its logs, so all logs
        are opened.
        """
        claim = self.check_writable()
        least = 0
        if not self._producer_ids.has_reservation:
            # This may take long, so other threads must be able to acquire the lock.
            least = first_free_producer_id(self._directory)
        with self.lock, claim.changing():
            return self._producer_ids.next(least)

    def trusted_ms(self, wall_ms: int) -> int:
        """Return the time by which expired data may be deleted. It is at most
        `wall_ms`. See logcore.metadata.trusted_clock.
        """
        return self.check_writable().clock.now_ms(wall_ms)

    # -- logs --------------------------------------------------------------------------

    def open_again(self, topic: str, number: int) -> Log:
        """Close a log that a failed write or sync has poisoned, and open and recover it
        again.

        A record that was not acknowledged may be missing afterwards. Raises the errors
        of LogDir.partition().
        """
        with contextlib.suppress(LogcoreError):
            self._directory.partition(topic, number).close()
        return self._directory.partition(topic, number)

    def close_logs(self, topics: Collection[str]) -> None:
        """Close and forget the logs of topics that are being deleted. A failure is
        reported as an incident.
        """
        # Gathers recovery points without writing them: the logs are deleted.
        with self.check_writable().batched_recovery_points():
            self._logs.close_topics(topics)

    def stale_topics(self) -> Collection[str]:
        """Return the topics with an open log of a deleted topic of the same name."""
        return self._logs.stale_topics()

    def known_logs(self) -> Mapping[Key, Log]:
        """Return the logs that were opened. A user may have closed some of them."""
        return self._logs.known

    def open_logs(self) -> dict[Key, Log]:
        """Return the logs that are open now, by (topic, partition)."""
        return self._logs.all_open()

    def opened(self, topic: str, number: int) -> Log | None:
        """Return the log of a partition if it is open now."""
        return self._logs.opened((topic, number))

    def leader_epoch(self, topic: str, number: int) -> int:
        """Return the leader epoch of records that are appended to a partition. If the
        partition is not open, the epoch is read from its file.
        """
        return self._logs.leader_epoch((topic, number))

    def knows_leader_epoch(self, topic: str, number: int) -> bool:
        """Return whether leader_epoch() reads no file."""
        return self._logs.knows_leader_epoch((topic, number))
