"""The controller of a directory that processes share: the one of them that does the upkeep. It keeps the registry.

Rules:
- It is elected when it first looks, by an ephemeral node, and writes nothing of topics before. Its epoch is higher than
  that of every controller before it.
- All topics are compared when it begins, and again when one was made, changed or deleted: some of them with each look.
- What dead sessions left in the registry is removed every ten seconds, if there is any.

What the nodes say is in registry/views.py. Which process does the upkeep is decided in claim.py.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from logcore.directory.topicfile import id_text
from logcore.errors import TopicNotFoundError
from logcore.fs import FS
from logcore.notices import INFO, tell
from logcore.registry import FileRegistry, paths, views
from logcore.registry.views import TopicView

#: A topic costs a file for each partition the first time.
_TOPICS_A_LOOK: Final = 10
_ELECTION_MS: Final = 1_000
_GARBAGE_MS: Final = 10_000


class Described(Protocol):
    """What is asked of the description of a topic."""

    @property
    def overrides(self) -> Mapping[str, str]: ...


class Directory(Protocol):
    """The methods of a LogDir that are used here."""

    @property
    def path(self) -> str: ...
    @property
    def cluster_id(self) -> str: ...
    @property
    def node_id(self) -> int: ...
    @property
    def topics_version(self) -> int: ...
    def topics(self) -> list[str]: ...
    def partitions(self, name: str) -> tuple[int, ...]: ...
    def topic_id(self, name: str) -> uuid.UUID: ...
    def describe_topic(self, name: str) -> Described: ...
    def leader_epoch(self, topic: str, number: int) -> int: ...


class Controller:
    """See the top of this module. epoch: 0 until it is elected. Fields are written under the lock."""

    def __init__(self, fs: FS, directory: Directory) -> None:
        self.epoch = 0
        self._fs = fs
        self._directory = directory
        self._lock = threading.Lock()
        self._elect_ms = fs.monotonic_ms()
        self._clean_ms = fs.monotonic_ms() + _GARBAGE_MS
        self._version = -1  # of the topics that are published, or being published
        self._publishing: Iterator[str] = iter(())

    def look(self, registry: FileRegistry) -> None:
        """Does a piece of what is due. Raises what changing the registry raises; the next look begins again."""
        if not self._lock.acquire(blocking=False):  # another thread does it now
            return
        try:
            now_ms = self._fs.monotonic_ms()
            if not self.epoch and now_ms >= self._elect_ms:
                self._elect_ms = now_ms + _ELECTION_MS
                self._elect(registry)
            if self.epoch:
                self._publish(registry)
                if now_ms >= self._clean_ms:
                    self._clean_ms = now_ms + _GARBAGE_MS
                    _clean(registry)
        finally:
            self._lock.release()

    def _elect(self, registry: FileRegistry) -> None:
        directory = self._directory
        views.claim_cluster(registry, directory.cluster_id)
        epoch = paths.elect(registry, directory.node_id, self._fs.now_ms())
        if epoch is None:  # the session of the controller before has not ended yet
            return
        self.epoch = epoch
        tell("registry", INFO, "%s: this process is the controller, epoch %d", directory.path, epoch)

    def _publish(self, registry: FileRegistry) -> None:
        directory = self._directory
        version = directory.topics_version
        if version != self._version:
            self._publishing = views.publishing(registry, directory.topics(), self._view, self.epoch)
            self._version = version
        try:
            for _ in itertools.islice(self._publishing, _TOPICS_A_LOOK):
                pass
        except TopicNotFoundError:  # deleted meanwhile
            self._version = -1
        except BaseException:
            self._version = -1  # the generator has ended: begin again
            raise

    def _view(self, name: str) -> TopicView:
        directory = self._directory
        numbers = directory.partitions(name)
        return TopicView(
            topic_id=id_text(directory.topic_id(name)),
            replicas=dict.fromkeys(numbers, (directory.node_id,)),
            leader_epochs={number: directory.leader_epoch(name, number) for number in numbers},
            config=directory.describe_topic(name).overrides,
        )


def _clean(registry: FileRegistry) -> None:
    if any(info.state != "alive" for info in registry.sessions()):
        registry.clean()
