"""The topics of a log directory that processes share: each process follows what the others make and delete.

Rules:
- Everything that belongs to no single partition is read again and changed under the directory's turn. The holder of a
  partition's turn may take that of the directory, so no partition is opened, closed or changed inside the latter: two
  processes would wait for each other.
- Work that a crash left half done is finished by a process that is alone, when it opens the directory.
- A topic is called deleting first; then the note of each of its partitions says so, for processes that have them open;
  then the files are removed.

This module opens no log. In a directory that is not shared it does nothing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Generator, Mapping
from typing import Protocol

from logcore import checkpoint
from logcore.checkpoint import Key
from logcore.claim import Claim
from logcore.config import LogConfig
from logcore.directory.incidents import Incidents
from logcore.directory.topicfile import read_topics
from logcore.directory.topics import TopicRegistry
from logcore.fs import FS
from logcore.log import Log
from logcore.names import partition_name


class Directory(Protocol):
    """The methods of a LogDir that are used here."""

    def known_logs(self) -> Mapping[Key, Log]: ...
    def stale_topics(self) -> Collection[str]: ...
    def close_logs(self, topics: Collection[str]) -> None: ...
    def settings(self, name: str) -> LogConfig: ...


class Sharing:
    """One process's part in a log directory that it may share. All is called under the lock of the LogDir."""

    def __init__(
        self, fs: FS, directory: Directory, claim: Claim | None, registry: TopicRegistry, incidents: Incidents
    ) -> None:
        self._fs = fs
        # Weak: a directory that was not closed warns as soon as it is dropped.
        self._directory: Directory = weakref.proxy(directory)
        self._claim = claim
        self._registry = registry
        self._incidents = incidents
        self._seen: tuple[object, ...] | None = None  # the file of topics, as it was when it was last read
        #: Whether topics have changed since the open logs were last brought in line with them. Written under the lock;
        #: read without it for each append, so that it is a plain attribute.
        self.is_behind = self.is_shared

    @property
    def is_shared(self) -> bool:
        return self._claim is not None and self._claim.is_shared

    @contextlib.contextmanager
    def changing(self) -> Generator[None, None, None]:
        """Keeps other processes from changing topics, and takes in what they did. Raises LogLockedError."""
        if self._claim is None or not self.is_shared:
            yield
            return
        with self._claim.changing():
            self.look()
            yield

    def look(self) -> None:
        """Takes in the topics that other processes have made, changed and deleted."""
        if not self.is_shared:
            return
        seen = self._state_of_file()
        if seen == self._seen:
            return
        self._registry.look()
        rows = {row.name for row in read_topics(self._fs, self._registry.path) if row.is_deleting}
        self._registry.deleting_elsewhere = rows - set(self._registry.deleting)
        self._seen = seen
        self.is_behind = True

    def follow(self) -> None:
        """As look(), and brings the open logs in line: closes those of deleted topics, and puts changed settings in
        force. Every tick calls this, so the logs are compared only if the file of topics has changed.
        """
        if not self.is_shared:
            return
        self.look()
        if not self.is_behind:
            return
        stale = self._directory.stale_topics()
        if stale:
            self._directory.close_logs(stale)
        is_in_line = True
        for (topic, number), log in list(self._directory.known_logs().items()):
            settings = self._directory.settings(topic)
            if not log.is_closed and not log.has_failed and log.config != settings:
                with self._incidents.going_on("settings", partition_name(topic, number)):
                    log.reconfigure(settings)
                is_in_line = is_in_line and log.config == settings
        self.is_behind = not is_in_line

    def finish_elsewhere(self, names: Collection[str]) -> None:
        """Removes topics that dead processes have left half made or half deleted, and whose offsets are forgotten. Not
        inside changing().
        """
        if self._claim is None or not self.is_shared:
            return
        with self.changing():
            left = {row.name: row for row in read_topics(self._fs, self._registry.path) if row.is_deleting}
        ours = {name: row for name, row in left.items() if name in names and name not in self._registry.deleting}
        for name, row in ours.items():
            self.say_deleted(name, row.numbers)
        with self.changing():
            self._registry.finish_rows(set(ours))
            self._seen = None
            self.look()

    def _state_of_file(self) -> tuple[object, ...]:
        path = os.path.join(self._registry.path, checkpoint.TOPICS)
        try:
            return self._fs.identity(path), self._fs.modified_ms(path), self._fs.file_size(path)
        except FileNotFoundError:
            return ()

    def say_deleted(self, topic: str, numbers: Collection[int]) -> None:
        """Tells processes that have partitions open that these will be deleted next. Not inside changing()."""
        if self._claim is None or not self.is_shared:
            return
        from logcore.partition.sharing import say_deleted  # late: few directories are shared

        for number in numbers:
            path = self._registry.partition_path(topic, number)
            if self._fs.is_directory(path):
                say_deleted(self._fs, self._claim.lock_handle, (topic, number), path)
