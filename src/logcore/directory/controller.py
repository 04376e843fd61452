"""The controller of a shared directory: the process that does the maintenance. The
controller also keeps the registry current.

Rules:
- The controller is elected on its first run_due_work(), by an ephemeral node, and
  publishes no topics before. Its epoch is higher than the epoch of every earlier
  controller.
- After the election, and after each change of topics, all topics are compared with the
  registry: a few with each run_due_work().
- Every ten seconds, nodes of ended sessions are removed.

registry/views.py defines the nodes. claim.py decides which process does the
maintenance.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Final

from logcore.directory.interface import HostDirectory
from logcore.directory.topic_file import id_text
from logcore.errors import TopicNotFoundError
from logcore.fs import FS
from logcore.registry import FileRegistry, paths, views
from logcore.registry.views import TopicView
from logcore.reporting import INFO, log_line

#: Maximum number of topics that one call publishes. A new topic costs one file for each
#: partition.
_TOPICS_PER_CALL: Final = 10
_ELECTION_MS: Final = 1_000
_GARBAGE_MS: Final = 10_000


class Controller:
    """Keeps the registry of one directory current.

    `epoch` is 0 until the process is elected. Fields are written under the lock.
    """

    def __init__(self, fs: FS, directory: HostDirectory) -> None:
        self.epoch = 0
        self._fs = fs
        self._directory = directory
        self._lock = threading.Lock()
        self._elect_ms = fs.monotonic_ms()
        self._clean_ms = fs.monotonic_ms() + _GARBAGE_MS
        # Version of the topics that are published or being published.
        self._version = -1
        self._publishing: Iterator[str] = iter(())

    def run_due_work(self, registry: FileRegistry) -> None:
        """Do part of the due work.

        If changing the registry raises an error, the next call starts again.
        """
        # Another thread is running this method.
        if not self._lock.acquire(blocking=False):
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
                    _remove_dead_nodes(registry)
        finally:
            self._lock.release()

    def _elect(self, registry: FileRegistry) -> None:
        directory = self._directory
        views.claim_cluster(registry, directory.cluster_id)
        epoch = paths.elect(registry, directory.node_id, self._fs.now_ms())
        # The session of the former controller has not ended yet.
        if epoch is None:
            return
        self.epoch = epoch
        log_line(
            "registry",
            INFO,
            "%s: this process is the controller, epoch %d",
            directory.path,
            epoch,
        )

    def _publish(self, registry: FileRegistry) -> None:
        directory = self._directory
        version = directory.host.topics_version
        if version != self._version:
            self._publishing = views.publishing(
                registry, directory.topics(), self._view, self.epoch
            )
            self._version = version
        try:
            for _ in itertools.islice(self._publishing, _TOPICS_PER_CALL):
                pass
        # The topic was deleted concurrently.
        except TopicNotFoundError:
            self._version = -1
        except BaseException:
            # The generator has ended, so start again.
            self._version = -1
            raise

    def _view(self, name: str) -> TopicView:
        directory = self._directory
        numbers = directory.partitions(name)
        return TopicView(
            topic_id=id_text(directory.topic_id(name)),
            replicas=dict.fromkeys(numbers, (directory.node_id,)),
            leader_epochs={
                number: directory.host.leader_epoch(name, number) for number in numbers
            },
            config=directory.describe_topic(name).overrides,
        )


def _remove_dead_nodes(registry: FileRegistry) -> None:
    if any(info.state != "alive" for info in registry.sessions()):
        registry.clean()
