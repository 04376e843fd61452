"""Topic deletion: removes a topic's row, its files, and all offsets committed for it.

Rules:
- A topic is deleted in one step. Its files are removed afterwards, which frees space on
  a full disk.
- The name becomes available only after the committed offsets are durably deleted too.
  After a crash, a new topic with that name therefore cannot inherit them, which would
  make groups skip its first records.
- tick() and the next opening retry failed steps; until then the name is unavailable.
- Offsets are never deleted under the directory's lock: groups acquire it while they
  hold their own lock.

This module decides the order of these steps. directory/topics.py changes rows and files,
and the group coordinators delete the offsets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from logcore.coordinators.lookup import Coordinators
from logcore.directory.incidents import Incidents
from logcore.directory.shared_topics import SharedTopics
from logcore.directory.topics import TopicRegistry
from logcore.fs import FS
from logcore.metadata.filenames import OFFSETS_TOPIC, partition_name
from logcore.reporting import INFO, log_line

if TYPE_CHECKING:
    from logcore.directory.interface import HostDirectory

#: Interval of retry_forgetting(), because it reads the offsets of all groups.
_RETRY_INTERVAL_MS: Final = 1_000


class Deletions:
    """The deletions of one directory.

    The methods get the lock of the directory as `lock`, because a fork replaces it.
    """

    def __init__(
        self,
        fs: FS,
        registry: TopicRegistry,
        sharing: SharedTopics,
        incidents: Incidents,
        coordinators: Coordinators,
    ) -> None:
        self._fs = fs
        self._registry = registry
        self._sharing = sharing
        self._incidents = incidents
        self._coordinators = coordinators
        #: Deleted topics whose offsets are being deleted.
        self._forgetting: set[str] = set()
        #: Monotonic time at which retry_forgetting() may run again.
        self._forget_from_ms = 0

    def start(
        self,
        directory: HostDirectory,
        lock: contextlib.AbstractContextManager[object],
        name: str,
    ) -> None:
        """Delete a topic and its files; the caller must call end() afterwards.

        Raises:
            TopicNotFoundError: there is no such topic.
            LogLockedError: a partition is open elsewhere, or the directory is locked.
            LogcoreError, OSError: files could not be removed or written.
        """
        with lock, contextlib.ExitStack() as claims:
            with self._sharing.changing():
                topic = self._registry.topic(name)
                # This claim fails if the process has opened a partition with
                # logcore.open(), so that a partition in use is not deleted.
                for number in topic.numbers:
                    if directory.host.opened(name, number) is None:
                        member = partition_name(name, number)
                        partition_lock = self._fs.lock(
                            self._registry.path, member, shared=self._sharing.is_shared
                        )
                        try:
                            # Twice: the second call completes a release that an
                            # interrupt cut short.
                            claims.callback(partition_lock.release)
                            claims.callback(partition_lock.release)
                        except BaseException:
                            partition_lock.release()
                            raise
                self._registry.start_deleting(topic)
            log_line("topics", INFO, "%s: topic %s deleted", self._registry.path, name)
            directory.host.close_logs({name})
            self._sharing.announce_deleted(name, topic.numbers)
            claims.close()
            self._forgetting.add(name)
        try:
            self._finish(lock)
        except BaseException:
            # retry_forgetting() completes the deletion.
            self._forgetting.discard(name)
            raise

    def end(
        self,
        lock: contextlib.AbstractContextManager[object],
        names: Collection[str],
        *,
        is_forgotten: bool,
    ) -> None:
        """Complete a deletion after start().

        `is_forgotten` means that no group has a stored offset of these topics.
        """
        self._forgetting.difference_update(names)
        if is_forgotten:
            self._registry.with_committed_offsets.difference_update(names)
            self.finish(lock)

    def finish(self, lock: contextlib.AbstractContextManager[object]) -> None:
        """Remove remaining files and unneeded rows. An error is reported as an
        incident.
        """
        with self._incidents.reporting_errors(
            "deletion", ", ".join(sorted(self._registry.deleting))
        ):
            self._finish(lock)

    def _finish(self, lock: contextlib.AbstractContextManager[object]) -> None:
        with lock, self._sharing.changing():
            self._registry.finish_deleting()

    def forget_and_end(
        self,
        directory: HostDirectory,
        lock: contextlib.AbstractContextManager[object],
        name: str,
    ) -> None:
        """Delete the offsets and call end(), after start().

        An offset that cannot be deleted now is reported as an incident, and deleted
        later.
        """
        is_forgotten = False
        try:
            with self._incidents.reporting_errors("deletion", name):
                self.forget(directory, name)
                is_forgotten = True
        finally:
            self.end(lock, {name}, is_forgotten=is_forgotten)

    def forget(self, directory: HostDirectory, name: str) -> None:
        """Delete the offsets of a deleted topic in all coordinators and in the
        registry.

        Raises:
            LogcoreError: offsets could not be deleted.
        """
        if directory.host.forget_topic is not None:
            directory.host.forget_topic(name)
        if self._coordinators.has_groups or (
            OFFSETS_TOPIC in directory and not directory.host.has_coordinator
        ):
            self._coordinators.groups(directory).forget_topics({name})
        if not directory.host.has_coordinator:
            self._coordinators.forget_registered(directory, {name})

    def forget_remaining(self, directory: HostDirectory, names: set[str]) -> None:
        """Delete stored offsets of topics whose deletion an error or a crash interrupted.

        Raises:
            LogcoreError: the offsets cannot be read or deleted.
        """
        # If `__consumer_offsets` itself was deleted, its offsets were deleted with it, and
        # groups may be creating it again.
        forgotten = names - {OFFSETS_TOPIC}
        if forgotten:
            self._coordinators.forget_stored(directory, forgotten)

    def retry_forgetting(
        self,
        directory: HostDirectory,
        lock: contextlib.AbstractContextManager[object],
    ) -> None:
        """Delete remaining offsets of deleted topics, and make their names available."""
        names = self._registry.with_committed_offsets - self._forgetting
        clock_ms = self._fs.monotonic_ms()
        if not names or clock_ms < self._forget_from_ms:
            return
        self._forget_from_ms = clock_ms + _RETRY_INTERVAL_MS
        with self._incidents.reporting_errors("deletion", ", ".join(sorted(names))):
            # Offsets in memory.
            if directory.host.forget_topic is not None or self._coordinators.has_groups:
                for name in names:
                    self.forget(directory, name)
            # Offsets on disk.
            self.forget_remaining(directory, names)
            self._registry.with_committed_offsets -= names
            self._finish(lock)
