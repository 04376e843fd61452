"""The destinations of a producer's records: the partitions of its topics, and their
queues.

Rules:
- The partitions of a topic are read when it is first used, whenever a batch begins, and
  when a record names an unknown partition.
- Records without a key use the sticky partition until it has received batch_size bytes
  and its batch is full.
- Routes are changed under the lock of the producer.

This module puts no records into queues.
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
from logcore.producer.partitioners import Chooser, Draw
from logcore.producer.settings import ProducerSettings

#: Indexes of records, int64; None for all records.
Places = npt.NDArray[np.int64] | None


class Route(RouteFields):
    """One topic. `queues` contains the queues of its partitions by number.
    `hashes_keys` is whether the partition of a key is its murmur2.

    `sticky` is the queue of records without a key, or None if the chooser also places
    these records. `sticky_bytes` is the number of bytes that the sticky queue has
    received.
    """

    __slots__ = ("chooser", "numbers")

    def __init__(
        self, numbers: tuple[int, ...], chooser: Chooser, queues: list[Queue]
    ) -> None:
        self.numbers = numbers
        self.chooser = chooser
        self.queues = queues
        self.hashes_keys = chooser.hashes_columns
        self.sticky = None
        if chooser.choose(None) < 0:
            self.sticky = queues[chooser.sticky]
        self.sticky_bytes = 0

    def at(self, number: int) -> Queue | None:
        """Return the queue of a partition, None if the topic has no such partition."""
        if not 0 <= number < len(self.queues):
            return None
        queue: Queue = self.queues[number]
        return queue


class Routes:
    """The topics of a producer's records. `known` contains the route of each topic."""

    def __init__(
        self,
        directory: PartitionDirectory,
        settings: ProducerSettings,
        accumulator: Accumulator,
        draw: Draw,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._accumulator = accumulator
        self._draw = draw
        self._batch_size = settings.batch_size
        self.known: dict[str, Route] = {}

    def queue(
        self, topic: str, key: bytes | None, partition: int | None, size_bytes: int
    ) -> Queue:
        """Return the queue of one record.

        Raises TopicNotFoundError, and InvalidConfigError if no partition can be chosen.
        """
        route = self.known.get(topic) or self._find_route(topic)
        if partition is not None:
            return route.at(partition) or self._added(topic, partition)
        if key is not None or route.sticky is None:
            number = route.chooser.choose(key)
            if number >= 0:
                chosen: Queue = route.queues[number]
                return chosen
        if route.sticky_bytes >= self._batch_size:
            self._move(route, size_bytes)
        route.sticky_bytes += size_bytes
        assert route.sticky is not None, "without one the chooser has chosen"
        sticky: Queue = route.sticky
        return sticky

    def divide(
        self,
        topic: str,
        partition: int | None,
        keys: Sequence[bytes | None] | InputColumn | None,
        sizes: Places,
    ) -> Iterator[tuple[Queue, Places]]:
        """Return the queues of many records, each with the rising indexes of its
        records.

        `sizes` contains the bytes of the records. `keys` contains their keys, or is
        None if they have none or if `partition` is given.
        """
        assert sizes is not None
        if partition is not None:
            yield self.queue(topic, None, partition, 0), None
            return
        route = self.known.get(topic) or self._find_route(topic)
        route = self._refreshed(topic, route)
        numbers = self._numbers(route, keys, len(sizes))
        if isinstance(numbers, int) and numbers >= 0:
            yield route.queues[numbers], None
            return
        if not isinstance(numbers, int):
            for number in np.unique(numbers[numbers >= 0]).tolist():
                yield route.queues[number], np.flatnonzero(numbers == number)
        if isinstance(numbers, int):
            keyless = np.arange(len(sizes))
        else:
            keyless = np.flatnonzero(numbers < 0)
        while len(keyless):
            # The records that the sticky partition receives before another
            # partition is chosen.
            reached = np.cumsum(sizes[keyless])
            count = max(1, int(np.searchsorted(reached, self._batch_size)))
            if route.sticky_bytes:
                self._move(route, self._batch_size)
            assert route.sticky is not None
            yield route.sticky, keyless[:count]
            keyless = keyless[count:]
            route.sticky_bytes = self._batch_size

    def _numbers(
        self,
        route: Route,
        keys: Sequence[bytes | None] | InputColumn | None,
        count: int,
    ) -> npt.NDArray[np.int64] | int:
        if not isinstance(keys, tuple):
            return route.chooser.choose_all(keys, count)
        data, edges, nulls = cast("InputColumn", keys)
        if not route.chooser.hashes_columns:
            raw = memoryview(cast("Any", data))
            pieces: list[bytes | None] = [
                bytes(raw[edges[at] : edges[at + 1]]) for at in range(count)
            ]
            for at in np.flatnonzero(nulls).tolist() if nulls is not None else ():
                pieces[at] = None
            return route.chooser.choose_all(pieces, count)
        numbers = route.chooser.choose_packed(data, edges)
        if nulls is not None:
            numbers[nulls != 0] = -1
        return numbers

    def _find_route(self, topic: str) -> Route:
        numbers = self._directory.partitions(topic)
        chooser = Chooser(
            self._settings.partitioner,
            self._settings.partitioner_ignore_keys,
            numbers,
            self._draw,
        )
        queues = [self._accumulator.queue(topic, number) for number in numbers]
        route = self.known[topic] = Route(numbers, chooser, queues)
        return route

    def _refreshed(self, topic: str, route: Route) -> Route:
        if self._directory.partitions(topic) == route.numbers:
            return route
        return self._find_route(topic)

    def refresh(self, topic: str) -> None:
        """Read the partitions again when a batch begins, because some may have been
        added. A deleted topic is detected by the write.
        """
        route = self.known.get(topic)
        if route is None:
            return
        try:
            self._refreshed(topic, route)
        except TopicNotFoundError:
            del self.known[topic]

    def _added(self, topic: str, partition: int) -> Queue:
        queue = self._find_route(topic).at(partition)
        if queue is None:
            raise TopicNotFoundError(
                f"topic {topic!r} has no such partition",
                path=self._directory.path,
                expected=f"0 to {len(self._directory.partitions(topic)) - 1}",
                found=partition,
            )
        return queue

    def _move(self, route: Route, size_bytes: int) -> None:
        """Choose another sticky partition, unless the next record fits into the batch
        of the present partition.
        """
        assert route.sticky is not None
        batch = route.sticky.filling
        if batch is not None and batch.fits(size_bytes):
            return
        route.chooser.move()
        route.sticky = route.queues[route.chooser.sticky]
        route.sticky_bytes = 0
