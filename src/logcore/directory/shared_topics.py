"""Topics of a log directory shared between processes: each process follows the others'
changes.

Rules:
- State that belongs to no single partition is read again and changed under the
  directory's write lock. A process that holds a partition's write lock may acquire the
  directory's write lock, but not the other way round: two processes would deadlock. So
  no partition is opened, closed or changed while the directory's write lock is held.
- A process that opens the directory alone completes work that a crash interrupted.
- Deletion of a topic has three steps. The topic is marked as deleting, then the lock
  record of each partition is marked for processes that have it open, and then the files
  are removed.

This module does not open logs. In a directory that is not shared it does nothing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Generator

from logcore.claim import Claim
from logcore.directory.incidents import Incidents
from logcore.directory.interface import HostDirectory
from logcore.directory.topic_file import read_topics
from logcore.directory.topics import TopicRegistry
from logcore.fs import FS
from logcore.metadata import checkpoint
from logcore.metadata.filenames import partition_name


class SharedTopics:
    """One process's view of a log directory that may be shared.

    All methods are called under the lock of the LogDir.
    """

    def __init__(
        self,
        fs: FS,
        directory: HostDirectory,
        claim: Claim | None,
        registry: TopicRegistry,
        incidents: Incidents,
    ) -> None:
        self._fs = fs
        # Weak, so that a directory that was not closed warns as soon as it is dropped.
        self._directory: HostDirectory = weakref.proxy(directory)
        self._claim = claim
        self.is_shared = claim is not None and claim.is_shared
        self._registry = registry
        self._incidents = incidents
        # State of the file of topics when it was last read.
        self._last_file_state: tuple[object, ...] | None = None
        #: Whether topics have changed since the open logs were last updated. Written
        #: under the lock. Every append reads it without the lock, so it is a plain
        #: attribute.
        self.is_behind = self.is_shared

    @contextlib.contextmanager
    def changing(self) -> Generator[None, None, None]:
        """Lock out topic changes of other processes, and read their earlier changes.

        Raises:
            LogLockedError: another process holds the lock for too long.
        """
        if self._claim is None or not self.is_shared:
            yield
            return
        with self._claim.changing():
            self.read_changes()
            yield

    def read_changes(self) -> None:
        """Read topics that other processes created, changed or deleted."""
        if not self.is_shared:
            return
        file_state = self._state_of_file()
        if file_state == self._last_file_state:
            return
        self._registry.reload()
        rows = {
            row.name
            for row in read_topics(self._fs, self._registry.path)
            if row.is_deleting
        }
        self._registry.deleting_elsewhere = rows - set(self._registry.deleting)
        self._last_file_state = file_state
        self.is_behind = True

    def follow(self) -> None:
        """Read changes like read_changes(), and apply them to the open logs.

        Logs of deleted topics are closed, and changed settings take effect. Every tick
        calls this, so the logs are compared only if the file of topics has changed.
        """
        if not self.is_shared:
            return
        self.read_changes()
        if not self.is_behind:
            return
        stale = self._directory.host.stale_topics()
        if stale:
            self._directory.host.close_logs(stale)
        are_current = True
        for (topic, number), log in list(self._directory.host.known_logs().items()):
            settings = self._directory.settings(topic)
            if not log.is_closed and not log.has_failed and log.config != settings:
                with self._incidents.reporting_errors(
                    "settings", partition_name(topic, number)
                ):
                    log.reconfigure(settings)
                are_current = are_current and log.config == settings
        self.is_behind = not are_current

    def finish_crashed_deletions(self, names: Collection[str]) -> None:
        """Remove topics that crashed processes left incomplete, once their offsets are
        deleted.

        Must not be called inside changing().
        """
        if self._claim is None or not self.is_shared:
            return
        with self.changing():
            rows_in_deletion = {
                row.name: row
                for row in read_topics(self._fs, self._registry.path)
                if row.is_deleting
            }
        own_work = {
            name: row
            for name, row in rows_in_deletion.items()
            if name in names and name not in self._registry.deleting
        }
        for name, row in own_work.items():
            self.announce_deleted(name, row.numbers)
        with self.changing():
            self._registry.finish_rows(set(own_work))
            self._last_file_state = None
            self.read_changes()

    def _state_of_file(self) -> tuple[object, ...]:
        path = os.path.join(self._registry.path, checkpoint.TOPICS)
        try:
            return (
                self._fs.identity(path),
                self._fs.modified_ms(path),
                self._fs.file_size(path),
            )
        except FileNotFoundError:
            return ()

    def announce_deleted(self, topic: str, numbers: Collection[int]) -> None:
        """Notify processes that have partitions open that these will be deleted.

        Must not be called inside changing().
        """
        if self._claim is None or not self.is_shared:
            return
        # Imported late because few directories are shared.
        from logcore.partition.shared_writer import announce_deleted

        for number in numbers:
            path = self._registry.partition_path(topic, number)
            if self._fs.is_directory(path):
                announce_deleted(
                    self._fs, self._claim.lock_handle, (topic, number), path
                )
