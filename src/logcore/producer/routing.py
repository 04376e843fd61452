"""Routing of a producer's records: chooses the partition and queue of each record.

Rules:
- The partitions of a topic are read when the producer first uses the topic, whenever a
  batch begins, and when a record names an unknown partition.
- Records without a key use the sticky partition until it has received batch_size bytes
  and its batch is full.
- Routes change only under the lock of the producer.

This module adds no records to queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from logcore.directory.interface import PartitionDirectory
from logcore.errors import TopicNotFoundError
from logcore.kernels import RouteFields
from logcore.kernels.layout import InputColumn
from logcore.producer.accumulator import Accumulator, Queue
from logcore.producer.partitioners import RandomBelow, TopicPartitioner
from logcore.producer.settings import ProducerSettings

#: Indexes of records, int64; None for all records.
RecordIndexes = npt.NDArray[np.int64] | None


class Route(RouteFields):
    """The partitions of one topic, and their queues."""

    __slots__ = ("numbers", "partitioner")

    def __init__(
        self,
        numbers: tuple[int, ...],
        partitioner: TopicPartitioner,
        queues: list[Queue],
    ) -> None:
        self.numbers = numbers
        self.partitioner = partitioner
        #: The queue of each partition, by number.
        self.queues = queues
        #: Whether the partition of a key is its murmur2 hash modulo their number.
        self.uses_murmur2 = partitioner.uses_murmur2
        #: The queue of records without a key, or None if the partitioner chooses a
        #: partition for each of them.
        self.sticky = None
        if partitioner.choose(None) < 0:
            self.sticky = queues[partitioner.sticky]
        #: Number of bytes that the sticky queue has received.
        self.sticky_bytes = 0

    def queue_at(self, number: int) -> Queue | None:
        """Return the queue of a partition, or None if the partition does not exist."""
        if not 0 <= number < len(self.queues):
            return None
        queue: Queue = self.queues[number]
        return queue


class Routes:
    """The routes of a producer, by topic."""

    def __init__(
        self,
        directory: PartitionDirectory,
        settings: ProducerSettings,
        accumulator: Accumulator,
        random_below: RandomBelow,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._accumulator = accumulator
        self._random_below = random_below
        self._batch_size = settings.batch_size
        self.by_topic: dict[str, Route] = {}

    def queue(
        self, topic: str, key: bytes | None, partition: int | None, size_bytes: int
    ) -> Queue:
        """Return the queue of one record.

        Raises TopicNotFoundError if the topic or the partition does not exist, and
        InvalidConfigError if no partition can be chosen.
        """
        route = self.by_topic.get(topic) or self._find_route(topic)
        if partition is not None:
            return route.queue_at(partition) or self._queue_after_refresh(
                topic, partition
            )
        if key is not None or route.sticky is None:
            number = route.partitioner.choose(key)
            if number >= 0:
                chosen: Queue = route.queues[number]
                return chosen
        if route.sticky_bytes >= self._batch_size:
            self._change_sticky(route, size_bytes)
        route.sticky_bytes += size_bytes
        assert route.sticky is not None, "choose() returned no sticky partition"
        sticky: Queue = route.sticky
        return sticky

    def divide_among_queues(
        self,
        topic: str,
        partition: int | None,
        keys: Sequence[bytes | None] | InputColumn | None,
        sizes: RecordIndexes,
    ) -> Iterator[tuple[Queue, RecordIndexes]]:
        """Divide many records among queues. Return each queue with the indexes of its
        records in ascending order; None means all records.

        `sizes` contains the sizes of the records in bytes. `keys` is None if no record
        has a key or if `partition` is given.
        """
        assert sizes is not None
        if partition is not None:
            yield self.queue(topic, None, partition, 0), None
            return
        route = self.by_topic.get(topic) or self._find_route(topic)
        route = self._refresh_route(topic, route)
        numbers = self._numbers(route, keys, len(sizes))
        if isinstance(numbers, int) and numbers >= 0:
            yield route.queues[numbers], None
            return
        if not isinstance(numbers, int):
            for number in np.unique(numbers[numbers >= 0]).tolist():
                yield route.queues[number], np.flatnonzero(numbers == number)
        if isinstance(numbers, int):
            keyless_indexes = np.arange(len(sizes))
        else:
            keyless_indexes = np.flatnonzero(numbers < 0)
        while len(keyless_indexes):
            # The sticky partition receives records of batch_size bytes. Then another
            # sticky partition is chosen.
            cumulative_bytes = np.cumsum(sizes[keyless_indexes])
            count = max(1, int(np.searchsorted(cumulative_bytes, self._batch_size)))
            if route.sticky_bytes:
                self._change_sticky(route, self._batch_size)
            assert route.sticky is not None
            yield route.sticky, keyless_indexes[:count]
            keyless_indexes = keyless_indexes[count:]
            route.sticky_bytes = self._batch_size

    def _numbers(
        self,
        route: Route,
        keys: Sequence[bytes | None] | InputColumn | None,
        count: int,
    ) -> npt.NDArray[np.int64] | int:
        if not isinstance(keys, tuple):
            return route.partitioner.choose_all(keys, count)
        data, edges, nulls = cast("InputColumn", keys)
        if not route.partitioner.uses_murmur2:
            key_bytes = memoryview(cast("Any", data))
            key_list: list[bytes | None] = [
                bytes(key_bytes[edges[index] : edges[index + 1]])
                for index in range(count)
            ]
            for index in np.flatnonzero(nulls).tolist() if nulls is not None else ():
                key_list[index] = None
            return route.partitioner.choose_all(key_list, count)
        numbers = route.partitioner.choose_columns(data, edges)
        if nulls is not None:
            numbers[nulls != 0] = -1
        return numbers

    def _find_route(self, topic: str) -> Route:
        numbers = self._directory.partitions(topic)
        partitioner = TopicPartitioner(
            self._settings.partitioner,
            self._settings.partitioner_ignore_keys,
            numbers,
            self._random_below,
        )
        queues = [self._accumulator.queue(topic, number) for number in numbers]
        route = self.by_topic[topic] = Route(numbers, partitioner, queues)
        return route

    def _refresh_route(self, topic: str, route: Route) -> Route:
        if self._directory.partitions(topic) == route.numbers:
            return route
        return self._find_route(topic)

    def refresh(self, topic: str) -> None:
        """Read the partitions of a topic again when a batch begins, because some may
        have been added. A write to a deleted topic fails later.
        """
        route = self.by_topic.get(topic)
        if route is None:
            return
        try:
            self._refresh_route(topic, route)
        except TopicNotFoundError:
            del self.by_topic[topic]

    def _queue_after_refresh(self, topic: str, partition: int) -> Queue:
        queue = self._find_route(topic).queue_at(partition)
        if queue is None:
            raise TopicNotFoundError(
                f"topic {topic!r} has no such partition",
                path=self._directory.path,
                expected=f"0 to {len(self._directory.partitions(topic)) - 1}",
                found=partition,
            )
        return queue

    def _change_sticky(self, route: Route, size_bytes: int) -> None:
        """Choose another sticky partition, unless the next record fits into the open
        batch of the current one.
        """
        assert route.sticky is not None
        batch = route.sticky.open_batch
        if batch is not None and batch.fits(size_bytes):
            return
        route.partitioner.choose_sticky()
        route.sticky = route.queues[route.partitioner.sticky]
        route.sticky_bytes = 0
