"""The partitions that a consumer reads now: the log of each, and how far it was read.

Rules:
- A partition is added or removed while the consumer works for one caller alone: under its lock, or in a step of
  logcore.aio. Others, such as commit_elsewhere() and the loop of logcore.aio, look at copies of the mapping.
- Whoever moves a position, pauses a partition or takes it away drops the records that were read ahead, which also ends
  an iteration: Reading.drop().
- A topic that was deleted and created again is another topic, although it has the name: nothing that was read of the
  old one counts for it. Positions and commits compare topic ids.
- The consumer is woken by what is appended to these logs, unless other processes alone write them.

Not here: which partitions these are (assignment.py), and what is read of them (fetcher.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

import attrs

from logcore.consumer.groups import Directory
from logcore.consumer.membership import TopicPartition
from logcore.errors import LogClosedError, LogcoreError, TopicNotFoundError
from logcore.kernels import TopicRecord
from logcore.log import Log
from logcore.reader import listen_to


class Taken(NamedTuple):
    """Records that were taken from those ahead. size_bytes: of the batches that were begun for them. is_last: there are
    no more. is_stopped: an error stands behind them. Who reads from there again meets it.
    """

    records: list[TopicRecord]
    size_bytes: int
    is_last: bool = False
    is_stopped: bool = False


class Ahead:
    """The records from a position on, decoded as they are taken: a run of batches at a time."""

    def __init__(self, lists: Iterator[tuple[int, list[TopicRecord]]]) -> None:
        """lists: see logcore.reader.placed_lists()."""
        self._lists = lists
        self._records: list[TopicRecord] = []  # of the run that was begun last
        self._at = 0  # how many of them were taken

    def take(self, most: int, most_bytes: int) -> Taken:
        """At most so many of the next records. No run is begun once there are some, and those begun now have so many
        bytes. Raises what stands before the first record.
        """
        found = self._records[self._at : self._at + most]
        self._at += len(found)
        size_bytes = 0
        while len(found) < most and (size_bytes < most_bytes or not found):
            try:
                run_bytes, self._records = next(self._lists)
            except StopIteration:
                return Taken(found, size_bytes, is_last=True)
            except LogcoreError:
                if not found:
                    raise
                return Taken(found, size_bytes, is_stopped=True)
            size_bytes += run_bytes
            self._at = min(most - len(found), len(self._records))
            found += self._records[: self._at]
        return Taken(found, size_bytes)


@attrs.define
class Reading:
    """How far one partition is read. position, finished: None before the first poll has settled where it begins.

    topic_id: of the topic that these offsets are of. is_new: that topic replaced the one that was read before, and is
    read from its beginning.
    """

    log: Log
    topic_id: uuid.UUID
    position: int | None = None
    finished: int | None = None
    stored: int | None = None  # what was committed last
    is_paused: bool = False
    records: Ahead | None = None
    end: int = 0  # of those records
    is_new: bool = False
    is_ahead: bool = False  # records were taken from those ahead that no caller has yet

    def drop(self) -> None:
        self.records = None
        self.is_ahead = False

    def begin_again(self, topic_id: uuid.UUID) -> None:
        """In a topic that has replaced the one that was read."""
        self.position = self.finished = self.stored = None
        self.is_new = True
        self.topic_id = topic_id
        self.drop()

    def place(self, offset: int) -> None:
        """From a new position on, which nothing was processed before."""
        self.position = offset
        self.finished = offset
        self.drop()


class Move(NamedTuple):
    """A position that moves from start to end when the caller is given the records between them."""

    reading: Reading
    start: int
    end: int


class Readings:
    """by_partition: what is read now. Only this class adds to it and removes from it.

    _forgets: for each of these, the call after which its log wakes the consumer no more.
    """

    def __init__(self, directory: Directory, on_news: Callable[[], None], *, is_read_only: bool) -> None:
        """on_news: called when something is appended. is_read_only: nothing is, in this process."""
        self.by_partition: dict[TopicPartition, Reading] = {}
        self._directory = directory
        self._on_news = on_news
        self._is_read_only = is_read_only
        self._forgets: dict[TopicPartition, Callable[[], None]] = {}

    def choose(self, wanted: frozenset[TopicPartition]) -> None:
        """Reads these and no others. Those that were read before keep their positions."""
        for one in frozenset(self.by_partition) - wanted:
            self.by_partition.pop(one).drop()
            self._forgets.pop(one, lambda: None)()
        for one in sorted(wanted - frozenset(self.by_partition)):
            topic_id = self._directory.topic_id(one.topic)  # first: if the topic is replaced now, that is noticed
            log = self._directory.partition(*one)
            self._listen(one, log)
            self.by_partition[one] = Reading(log, topic_id)

    def is_of_another_topic(self, one: TopicPartition) -> bool:
        """Whether the topic was deleted since the partition was read, even if there is another one of its name now."""
        reading = self.by_partition.get(one)
        if reading is None:
            return False
        try:
            return self._directory.topic_id(one.topic) != reading.topic_id
        except TopicNotFoundError:
            return True
        except LogClosedError:  # by the directory; whatever is done with the partition raises that
            return False

    def open_again(self, *, may_be_gone: bool) -> None:
        """A log that failed was closed, and the directory has another. may_be_gone: a topic that was deleted is no
        error, for the group is about to take its partitions away.

        Raises LogClosedError when the directory is closed, and TopicNotFoundError.
        """
        for one, reading in self.by_partition.items():
            is_other = self.is_of_another_topic(one)
            if not reading.log.is_closed and not is_other:
                continue
            try:
                topic_id = self._directory.topic_id(one.topic)
                log = self._directory.partition(*one)
            except TopicNotFoundError:
                if not may_be_gone:
                    raise
                continue
            self._listen(one, log)
            if is_other:
                reading.begin_again(topic_id)
            reading.log = log
            reading.drop()

    def _listen(self, one: TopicPartition, log: Log) -> None:
        if self._is_read_only:
            return
        self._forgets.pop(one, lambda: None)()
        self._forgets[one] = listen_to(log, self._on_news)

    def end(self) -> None:
        """The consumer is closed. What it read stays known."""
        for reading in self.by_partition.values():
            reading.drop()
        for forget in self._forgets.values():
            forget()
