"""The log directory of a console, which each page opens read-only.

Rules:
- The console acquires no lock and writes nothing, even while a broker writes the directory.
- A name in a request is a key into the list of topics and never a part of a path.
- If the directory as a whole cannot be opened, its partitions are listed by their names,
  and `problem` names the damage.
- Topics that the user may not describe are left out. A page that shows records checks
  that the user may read them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from typing import Final

import attrs
from starlette.exceptions import HTTPException

import logcore
from logcore.config import KEEPS_ALL, LogConfig
from logcore.errors import LogcoreError, TopicNotFoundError
from logcore.fs import FS, OS
from logcore.inspect.catalog import partitions
from logcore.inspect.segmentmap import PartitionSize, PartitionSizes
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import Key
from logcore.metadata.filenames import INTERNAL_TOPICS, partition_of
from logcore.partition.persisted import value_or
from netshim.console.access import ConsoleAccess, ConsoleViewer
from netshim.console.broker import BrokerPageData, LiveGroup
from netshim.console.changes import ConsoleChanges
from netshim.console.lags import LagHistory
from netshim.security.acls import AclOperation

#: Time for one page. Partitions that are not read in this time are left out, and the page
#: mentions this.
PAGE_S: Final = 0.8
#: Time for a search, which can be continued.
SEARCH_S: Final = 2.0


@attrs.frozen
class TimeBudget:
    """The remaining time of a page."""

    fs: FS
    deadline_ms: int

    @classmethod
    def of(cls, fs: FS, seconds: float) -> TimeBudget:
        return cls(fs, fs.monotonic_ms() + int(seconds * 1000))

    def is_over(self) -> bool:
        return self.fs.monotonic_ms() >= self.deadline_ms


@attrs.define
class DirectoryView:
    """The directory of a console."""

    path: str
    #: Time for each page, in seconds.
    page_s: float = PAGE_S
    #: Time for a search, and for a check of all bytes.
    search_s: float = SEARCH_S
    #: The default settings of topics.
    config: Mapping[str, str] = attrs.Factory(dict)
    fs: FS = OS
    #: Sizes of partitions, cached between pages.
    sizes: PartitionSizes = attrs.Factory(PartitionSizes)
    #: Reads the state of the broker that serves the directory; None for no broker.
    broker: Callable[[], BrokerPageData] | None = None
    #: Reads the groups of that broker by name.
    live_groups: Callable[[], Mapping[str, LiveGroup]] | None = None
    #: Samples of the lags of the last ten minutes.
    lags: LagHistory = attrs.Factory(LagHistory)
    #: The users and their rules.
    access: ConsoleAccess = attrs.Factory(ConsoleAccess)
    #: Makes the changes of forms; None for a console that only reads.
    changes: ConsoleChanges | None = None

    @contextlib.contextmanager
    def open_directory(
        self, viewer: ConsoleViewer
    ) -> Generator[OpenDirectory, None, None]:
        """Open the directory for one page of a user.

        Raises:
            LogcoreError: it is not a log directory at all.
        """
        with contextlib.ExitStack() as stack:
            logdir: logcore.LogDir | None = None
            problem = ""
            try:
                logdir = stack.enter_context(
                    logcore.open_dir(
                        self.path, read_only=True, config=self.config, fs=self.fs
                    )
                )
                topics = {name: logdir.partitions(name) for name in logdir.topics()}
                paths = None
            except LogcoreError as error:
                problem = str(error)
                paths = _partition_paths(self.fs, self.path)
                topics = _numbers_by_topic(paths)
            if logdir is not None and not topics:
                # A directory of one partition opens as a directory without topics.
                paths = value_or({}, _partition_paths, self.fs, self.path)
                topics = _numbers_by_topic(paths)
            if viewer.rules is not None:
                topics = {
                    name: numbers
                    for name, numbers in topics.items()
                    if viewer.may_see_topic(name)
                }
                # The text of an error may name files of topics that the user may not
                # see.
                if problem and not viewer.may_see_cluster():
                    problem = "an administrator sees the reason"
            yield OpenDirectory(self, viewer, logdir, topics, paths, problem)


def _partition_paths(fs: FS, path: str) -> dict[Key, str]:
    """Return the partition directories at a path by topic and number."""
    by_partition = {}
    for partition in partitions(path, fs=fs):
        key = partition_of(os.path.basename(fs.real_path(partition)))
        if key is not None:
            by_partition[key] = partition
    return by_partition


def _numbers_by_topic(paths: Mapping[Key, str]) -> dict[str, tuple[int, ...]]:
    by_topic: dict[str, tuple[int, ...]] = {}
    for topic, number in sorted(paths):
        by_topic[topic] = (*by_topic.get(topic, ()), number)
    return by_topic


class OpenDirectory:
    """The directory, opened for one page."""

    def __init__(
        self,
        view: DirectoryView,
        viewer: ConsoleViewer,
        logdir: logcore.LogDir | None,
        topics: Mapping[str, tuple[int, ...]],
        paths: Mapping[Key, str] | None,
        problem: str,
    ) -> None:
        self.view = view
        #: The user of the page.
        self.viewer = viewer
        #: None if the directory as a whole cannot be opened.
        self.logdir = logdir
        #: Topic -> numbers of its partitions.
        self.topics = topics
        #: Why the directory cannot be opened, or "".
        self.problem = problem
        #: The directories of partitions that were listed by name; None if logdir has them.
        self._paths = paths
        #: Log start offsets in the checkpoint file, once they have been read.
        self._starts: Mapping[Key, int] | None = None

    def check(self, topic: str, number: int | None = None) -> None:
        """Raise TopicNotFoundError unless a topic, or its partition, exists."""
        if topic not in self.topics:
            raise TopicNotFoundError("there is no such topic", found=repr(topic))
        if number is not None and number not in self.topics[topic]:
            raise TopicNotFoundError(f"{topic} has no such partition", found=number)

    def check_readable(self, topic: str) -> None:
        """Raise HTTPException unless the user may read the records of a topic."""
        if not self.viewer.may_topic(AclOperation.READ, topic):
            raise HTTPException(403, f"You may not read the messages of {topic}.")

    def path_of(self, topic: str, number: int) -> str:
        """Return the directory of a partition that exists."""
        self.check(topic, number)
        if self._paths is not None:
            return self._paths[topic, number]
        return os.path.join(self.view.path, f"{topic}-{number}")

    def config(self, topic: str) -> LogConfig:
        """Return the settings of a topic; if they are unknown, nothing expires."""
        if self.logdir is not None and self._paths is None:
            return self.logdir.settings(topic)
        return LogConfig.parse(KEEPS_ALL)

    def overrides(self, topic: str) -> Mapping[str, str]:
        """Return the settings that were set for a topic."""
        if self.logdir is not None and self._paths is None:
            return self.logdir.describe_topic(topic).overrides
        return {}

    def open_log(self, topic: str, number: int) -> logcore.Log:
        """Open a partition read-only. The caller closes it. Raises LogcoreError."""
        return logcore.open(
            self.path_of(topic, number), read_only=True, fs=self.view.fs
        )

    def size(self, topic: str, number: int) -> PartitionSize:
        """Return the size of a partition and its offsets.

        Raises:
            LogcoreError, OSError: the files cannot be read.
        """
        # One file has the log start offsets of all partitions.
        if self._starts is None:
            self._starts = value_or(
                {},
                checkpoint.read_offsets,
                self.view.fs,
                self.view.path,
                checkpoint.LOG_START,
            )
        start = self._starts.get((topic, number), 0)
        return self.view.sizes.read(self.path_of(topic, number), start)


def is_internal(topic: str) -> bool:
    """Return whether a broker manages the topic itself."""
    return topic in INTERNAL_TOPICS
