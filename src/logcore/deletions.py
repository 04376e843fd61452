"""The deletion of a topic, from its last row to the last offset that a group has committed for it.

Rules:
- The topic is gone in one step. Then its files go, which makes room on a full disk.
- Its name is free only when the offsets are forgotten too, on disk. So no crash in between leaves them to a new topic
  of that name, whose first records the groups would pass over.
- What fails is tried again by tick() and at the next opening; until then the name is taken.
- Offsets are never forgotten under the lock of the directory: groups take it while they hold theirs.

Not here: rows and files (directory/topics.py), what groups do (coordinators.py, and a broker's own).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Final, Protocol

from logcore.coordinators import Coordinators
from logcore.directory.incidents import Incidents
from logcore.directory.sharing import Sharing
from logcore.directory.topics import TopicRegistry
from logcore.fs import FS
from logcore.names import OFFSETS_TOPIC, partition_name
from logcore.notices import INFO, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from logcore.coordinators import Directory as CoordinatedDirectory
    from logcore.log import Log

    class Directory(CoordinatedDirectory, Protocol):
        """The methods of a LogDir that are used here."""

        forget_topic: Callable[[str], None] | None

        def opened(self, topic: str, number: int) -> Log | None: ...
        def close_logs(self, topics: Collection[str]) -> None: ...


#: How often forget_again() tries: it reads the offsets of all groups.
_FORGET_AGAIN_MS: Final = 1_000


class Deletions:
    """Those of one directory. lock: here and below, that of the directory, which is another one after a fork."""

    def __init__(
        self, fs: FS, registry: TopicRegistry, sharing: Sharing, incidents: Incidents, coordinators: Coordinators
    ) -> None:
        self._fs = fs
        self._registry = registry
        self._sharing = sharing
        self._incidents = incidents
        self._coordinators = coordinators
        self._forgetting: set[str] = set()  # deleted topics whose offsets are being forgotten
        self._forget_from_ms = 0  # by the steady clock

    def start(self, directory: Directory, lock: contextlib.AbstractContextManager[object], name: str) -> None:
        """Deletes a topic and its files; end() is to follow. Raises what that raises."""
        with lock, contextlib.ExitStack() as claims:
            with self._sharing.changing():
                topic = self._registry.topic(name)
                # If this process opened a partition with logcore.open(), claiming it fails, so it is not deleted under
                # its user.
                for number in topic.numbers:
                    if directory.opened(name, number) is None:
                        member = partition_name(name, number)
                        held = self._fs.lock(self._registry.path, member, shared=self._sharing.is_shared)
                        try:
                            claims.callback(held.release)
                        except BaseException:
                            held.release()
                            raise
                self._registry.start_deleting(topic)
            tell("topics", INFO, "%s: topic %s deleted", self._registry.path, name)
            directory.close_logs({name})
            self._sharing.say_deleted(name, topic.numbers)
            claims.close()
            self._forgetting.add(name)
        try:
            self._finish(lock)
        except BaseException:
            self._forgetting.discard(name)  # forget_again() does the rest
            raise

    def end(
        self, lock: contextlib.AbstractContextManager[object], names: Collection[str], *, is_forgotten: bool
    ) -> None:
        """After start(). is_forgotten: whether no group has an offset of these topics any more, on disk."""
        self._forgetting.difference_update(names)
        if is_forgotten:
            self._registry.remembered.difference_update(names)
            self.finish(lock)

    def finish(self, lock: contextlib.AbstractContextManager[object]) -> None:
        """Removes what is left of files, and rows that nothing needs."""
        with self._incidents.going_on("deletion", ", ".join(sorted(self._registry.deleting))):
            self._finish(lock)

    def _finish(self, lock: contextlib.AbstractContextManager[object]) -> None:
        with lock, self._sharing.changing():
            self._registry.finish_deleting()

    def forget_and_end(self, directory: Directory, lock: contextlib.AbstractContextManager[object], name: str) -> None:
        """After start(). An offset that cannot be deleted now is an incident, and deleted later."""
        is_forgotten = False
        try:
            with self._incidents.going_on("deletion", name):
                self.forget(directory, name)
                is_forgotten = True
        finally:
            self.end(lock, {name}, is_forgotten=is_forgotten)

    def forget(self, directory: Directory, name: str) -> None:
        """Has all who know offsets of a deleted topic delete them. Raises what that raises."""
        if directory.forget_topic is not None:
            directory.forget_topic(name)
        if self._coordinators.has_groups or (OFFSETS_TOPIC in directory and not directory.has_coordinator):
            self._coordinators.groups(directory).forget_topics({name})
        if not directory.has_coordinator:
            self._coordinators.forget_registered(directory, {name})

    def forget_left(self, directory: Directory, names: set[str]) -> None:
        """Deletes what is stored for topics whose deletion was begun, by a process that died or in vain. Raises what
        that raises.
        """
        forgotten = names - {OFFSETS_TOPIC}  # what was committed is gone with it, and groups may be creating it again
        if forgotten:
            self._coordinators.forget_stored(directory, forgotten)

    def forget_again(self, directory: Directory, lock: contextlib.AbstractContextManager[object]) -> None:
        """Forgets the offsets of deleted topics that still have any, and frees their names."""
        names = self._registry.remembered - self._forgetting
        clock_ms = self._fs.monotonic_ms()
        if not names or clock_ms < self._forget_from_ms:
            return
        self._forget_from_ms = clock_ms + _FORGET_AGAIN_MS
        with self._incidents.going_on("deletion", ", ".join(sorted(names))):
            if directory.forget_topic is not None or self._coordinators.has_groups:  # what they know
                for name in names:
                    self.forget(directory, name)
            self.forget_left(directory, names)  # what is on disk
            self._registry.remembered -= names
            self._finish(lock)
