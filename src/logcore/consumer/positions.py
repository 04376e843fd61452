"""Read positions of a consumer: the log of each partition, and the next offset to read.

Rules:
- A partition is added or removed while the consumer works for a single caller: under
  its lock, or in an operation of logcore.aio. Other threads, such as those of
  commit_elsewhere() and the loop of logcore.aio, use copies of the mapping.
- A method that moves a position, pauses a partition or removes it drops the records
  that were read ahead, which also ends an iteration: PartitionPosition.drop().
- A topic that was deleted and created again is another topic of the same name.
  Positions and commits of the old topic are not used for the new one, because topic ids
  differ.
- Appends to these logs wake the consumer, unless only other processes write them.

This module does not choose the partitions (assignment.py) and reads no records
(fetcher.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

import attrs

from logcore.consumer.topic_partition import TopicPartition
from logcore.directory.interface import ClientDirectory
from logcore.errors import LogClosedError, LogcoreError, TopicNotFoundError
from logcore.kernels import PositionFields, TopicRecord
from logcore.log import Log
from logcore.reader import listen_to


class Taken(NamedTuple):
    """Records that Ahead.next_records() returns."""

    records: list[TopicRecord]
    #: Size of the batches that were started for these records.
    size_bytes: int
    #: There are no more records.
    is_last: bool = False
    #: An error follows these records. Reading from that offset again raises it.
    is_stopped: bool = False


class Ahead:
    """The records from a position on.

    They are decoded on demand, one run of batches at a time.
    """

    def __init__(self, lists: Iterator[tuple[int, list[TopicRecord]]]) -> None:
        """Initialize with the result of logcore.reader.topic_record_lists()."""
        self._lists = lists
        self._records: list[TopicRecord] = []  # the latest run
        self._at = 0  # number of its records that were taken

    def next_records(self, most: int, most_bytes: int) -> Taken:
        """Return at most `most` of the next records.

        After the first record, no further run is started once the runs of this call
        have most_bytes.

        Raises:
            LogcoreError: the next record cannot be read.
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
class PartitionPosition(PositionFields):
    """The read position of one partition."""

    log: Log
    #: The topic that the offsets belong to.
    topic_id: uuid.UUID
    stored: int | None = None  # the latest committed offset
    is_paused: bool = False
    end: int = 0  # end offset of `records`
    #: The topic has replaced the one that was read before, and is read from its start.
    is_new: bool = False
    # Records were taken from `records` that no caller has received yet.
    is_ahead: bool = False

    def __attrs_post_init__(self) -> None:
        self.position = self.finished = None
        self.records: Ahead | None = None

    def drop(self) -> None:
        self.records = None
        self.is_ahead = False

    def begin_again(self, topic_id: uuid.UUID) -> None:
        """Restart in a topic that has replaced the previous one."""
        self.position = self.finished = self.stored = None
        self.is_new = True
        self.topic_id = topic_id
        self.drop()

    def place(self, offset: int) -> None:
        """Set a new position. Earlier records count as processed."""
        self.position = offset
        self.finished = offset
        self.drop()


class Move(NamedTuple):
    """A position that moves from start to end when the caller receives the records."""

    reading: PartitionPosition
    start: int
    end: int


class Readings:
    """The read positions of a consumer, by partition."""

    def __init__(
        self,
        directory: ClientDirectory,
        on_news: Callable[[], None],
        *,
        is_read_only: bool,
    ) -> None:
        """Initialize without partitions.

        `on_news` is called after an append. With `is_read_only`, this process appends
        nothing.
        """
        #: Only this class adds and removes partitions.
        self.by_partition: dict[TopicPartition, PartitionPosition] = {}
        self._directory = directory
        self._on_news = on_news
        self._is_read_only = is_read_only
        #: For each partition, the function that removes the listener from its log.
        self._forgets: dict[TopicPartition, Callable[[], None]] = {}

    def choose(self, wanted: frozenset[TopicPartition]) -> None:
        """Read these partitions and no others.

        Partitions that were read before keep their positions.
        """
        for partition in frozenset(self.by_partition) - wanted:
            self.by_partition.pop(partition).drop()
            self._forgets.pop(partition, lambda: None)()
        for partition in sorted(wanted - frozenset(self.by_partition)):
            # The id is read first, so that a later replacement of the topic is
            # detected.
            topic_id = self._directory.topic_id(partition.topic)
            log = self._directory.partition(*partition)
            self._listen(partition, log)
            self.by_partition[partition] = PartitionPosition(log, topic_id)

    def is_of_another_topic(self, topic_partition: TopicPartition) -> bool:
        """Return whether the topic was deleted since the partition was read.

        A new topic of the same name does not change the result.
        """
        reading = self.by_partition.get(topic_partition)
        if reading is None:
            return False
        try:
            return self._directory.topic_id(topic_partition.topic) != reading.topic_id
        except TopicNotFoundError:
            return True
        except LogClosedError:
            # The directory is closed. Any use of the partition raises this error.
            return False

    def open_again(self, *, may_be_gone: bool) -> None:
        """Open logs again after a failure, or after their topic was replaced.

        With `may_be_gone`, a deleted topic is not an error, because the group will remove
        its partitions.

        Raises:
            LogClosedError: the directory is closed.
            TopicNotFoundError: a topic was deleted.
        """
        for partition, reading in self.by_partition.items():
            is_other = self.is_of_another_topic(partition)
            if not reading.log.is_closed and not is_other:
                continue
            try:
                topic_id = self._directory.topic_id(partition.topic)
                log = self._directory.partition(*partition)
            except TopicNotFoundError:
                if not may_be_gone:
                    raise
                continue
            self._listen(partition, log)
            if is_other:
                reading.begin_again(topic_id)
            reading.log = log
            reading.drop()

    def _listen(self, topic_partition: TopicPartition, log: Log) -> None:
        if self._is_read_only:
            return
        self._forgets.pop(topic_partition, lambda: None)()
        self._forgets[topic_partition] = listen_to(log, self._on_news)

    def end(self) -> None:
        """End iterations and remove the listeners after the consumer was closed.

        The positions remain available.
        """
        for reading in self.by_partition.values():
            reading.drop()
        for forget in self._forgets.values():
            forget()
