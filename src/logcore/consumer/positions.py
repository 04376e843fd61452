"""Read positions of a consumer: the log of each partition, and the next offset to read.

Rules:
- Partitions are added and removed only under the consumer's lock, or in an operation of
  logcore.aio. Other threads, such as those of commit_from_other_thread() and the loop of
  logcore.aio, use copies of the mapping.
- Records that were read ahead are dropped when a position is moved and when a partition
  is paused or removed. This also ends an iteration; see PartitionPosition.drop().
- If a topic was deleted and created again, its topic id has changed. Positions and
  commits of the old topic are not used for the new one.
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


class NextRecords(NamedTuple):
    """The result of ReadAhead.next_records()."""

    records: list[TopicRecord]
    #: Size of the batches that were started for these records.
    size_bytes: int
    #: Whether there are no more records.
    is_last: bool = False
    #: Whether the next record cannot be read. Another attempt raises the error.
    is_stopped: bool = False


class ReadAhead:
    """The records of a partition after a position, decoded one run of batches at a time."""

    def __init__(self, lists: Iterator[tuple[int, list[TopicRecord]]]) -> None:
        """Initialize with the result of logcore.reader.topic_record_lists()."""
        self._lists = lists
        self._records: list[TopicRecord] = []  # the latest run
        self._next_index = 0  # of the next record in the run

    def next_records(self, max_records: int, max_bytes: int) -> NextRecords:
        """Return up to `max_records` of the next records.

        If there are records already, no further run is started after `max_bytes`.

        Raises:
            LogcoreError: the next record cannot be read.
        """
        records = self._records[self._next_index : self._next_index + max_records]
        self._next_index += len(records)
        size_bytes = 0
        while len(records) < max_records and (size_bytes < max_bytes or not records):
            try:
                run_bytes, self._records = next(self._lists)
            except StopIteration:
                return NextRecords(records, size_bytes, is_last=True)
            except LogcoreError:
                if not records:
                    raise
                return NextRecords(records, size_bytes, is_stopped=True)
            size_bytes += run_bytes
            self._next_index = min(max_records - len(records), len(self._records))
            records += self._records[: self._next_index]
        return NextRecords(records, size_bytes)


@attrs.define
class PartitionPosition(PositionFields):
    """The read position of one partition."""

    log: Log
    #: Id of the topic to which the offsets belong.
    topic_id: uuid.UUID
    stored: int | None = None  # the latest committed offset
    is_paused: bool = False
    end: int = 0  # end offset of `records`
    #: Whether the topic was created again, so that it is read from its start.
    is_new: bool = False
    # Whether records were taken from `records` but not yet returned to the caller.
    has_undelivered: bool = False

    def __attrs_post_init__(self) -> None:
        self.position = self.finished = None
        self.records: ReadAhead | None = None

    def drop(self) -> None:
        self.records = None
        self.has_undelivered = False

    def restart_in_new_topic(self, topic_id: uuid.UUID) -> None:
        """Restart in a topic that has replaced the previous one."""
        self.position = self.finished = self.stored = None
        self.is_new = True
        self.topic_id = topic_id
        self.drop()

    def seek_to(self, offset: int) -> None:
        """Set a new position. Earlier records count as processed."""
        self.position = offset
        self.finished = offset
        self.drop()


class Move(NamedTuple):
    """A position that moves from start to end when the caller receives the records."""

    read_position: PartitionPosition
    start: int
    end: int


class ReadPositions:
    """The read positions of a consumer, by partition."""

    def __init__(
        self,
        directory: ClientDirectory,
        on_append: Callable[[], None],
        *,
        is_read_only: bool,
    ) -> None:
        """Initialize without partitions.

        `on_append` is called after an append to one of the logs. With `is_read_only`, no
        listeners are added, because this process cannot append.
        """
        #: Only this class adds and removes partitions.
        self.by_partition: dict[TopicPartition, PartitionPosition] = {}
        self._directory = directory
        self._on_append = on_append
        self._is_read_only = is_read_only
        #: For each partition, the function that removes the listener from its log.
        self._listener_removals: dict[TopicPartition, Callable[[], None]] = {}

    def set_partitions(self, partitions: frozenset[TopicPartition]) -> None:
        """Read these partitions and no others.

        Partitions that were read before keep their positions.
        """
        for partition in frozenset(self.by_partition) - partitions:
            self.by_partition.pop(partition).drop()
            self._listener_removals.pop(partition, lambda: None)()
        for partition in sorted(partitions - frozenset(self.by_partition)):
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
        read_position = self.by_partition.get(topic_partition)
        if read_position is None:
            return False
        try:
            return (
                self._directory.topic_id(topic_partition.topic)
                != read_position.topic_id
            )
        except TopicNotFoundError:
            return True
        except LogClosedError:
            # The directory is closed. Any use of the partition raises this error.
            return False

    def open_again(self, *, ignore_deleted: bool) -> None:
        """Open logs again after a failure, or after their topic was replaced.

        With `ignore_deleted`, a deleted topic is not an error, because the group will remove
        its partitions.

        Raises:
            LogClosedError: the directory is closed.
            TopicNotFoundError: a topic was deleted.
        """
        for partition, read_position in self.by_partition.items():
            is_other = self.is_of_another_topic(partition)
            if not read_position.log.is_closed and not is_other:
                continue
            try:
                topic_id = self._directory.topic_id(partition.topic)
                log = self._directory.partition(*partition)
            except TopicNotFoundError:
                if not ignore_deleted:
                    raise
                continue
            self._listen(partition, log)
            if is_other:
                read_position.restart_in_new_topic(topic_id)
            read_position.log = log
            read_position.drop()

    def _listen(self, topic_partition: TopicPartition, log: Log) -> None:
        if self._is_read_only:
            return
        self._listener_removals.pop(topic_partition, lambda: None)()
        self._listener_removals[topic_partition] = listen_to(log, self._on_append)

    def end(self) -> None:
        """End iterations and remove the listeners after the consumer was closed.

        The positions remain available.
        """
        for read_position in self.by_partition.values():
            read_position.drop()
        for forget in self._listener_removals.values():
            forget()
