"""The destinations of a producer's records: the partitions of its topics, and their
queues.

Rules:
- PartitionDirectory are looked up when a topic is first used, whenever a batch begins, and when
  a record names one that is not known.
- Records without a key stay with the sticky partition until it has had batch_size bytes
  and its batch is full.
- Changed under the lock of the producer.

This module puts nothing into a queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from logcore.directory.interface import PartitionDirectory
from logcore.errors import TopicNotFoundError
from logcore.format.columns import InputColumn
from logcore.kernels import RouteFields
from logcore.producer.accumulator import Accumulator, Queue
from logcore.producer.partitioners import Chooser, Draw
from logcore.producer.settings import ProducerSettings

#: Places of records among those given, int64; None for all of them.
Places = npt.NDArray[np.int64] | None


class Route(RouteFields):
    """One topic. queues: of its partitions, by number. hashes_keys: whether a key goes
    to the partition of its murmur2.

    sticky: the queue of records without a key, None where the chooser places these too;
    sticky_bytes: that went there since it was drawn.
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
        """The queue of a partition, None where the topic has no such one."""
        if not 0 <= number < len(self.queues):
            return None
        queue: Queue = self.queues[number]
        return queue


class Routes:
    """The topics that a producer has sent to. known: topic -> its route."""

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
        """That of one record. Raises TopicNotFoundError, and InvalidConfigError where
        no partition can be chosen.
        """
        route = self.known.get(topic) or self._look(topic)
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
        """The queues of many records, each with the places of its own, rising. sizes:
        of the records, in bytes.

        keys: of the records; None where they have none, or where partition is given.
        """
        assert sizes is not None
        if partition is not None:
            yield self.queue(topic, None, partition, 0), None
            return
        route = self.known.get(topic) or self._look(topic)
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
            # As many as the sticky partition takes before another is drawn.
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

    def _look(self, topic: str) -> Route:
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
        return self._look(topic)

    def refresh(self, topic: str) -> None:
        """When a batch begins: partitions may have been added. A topic that was deleted
        is told by the write.
        """
        route = self.known.get(topic)
        if route is None:
            return
        try:
            self._refreshed(topic, route)
        except TopicNotFoundError:
            del self.known[topic]

    def _added(self, topic: str, partition: int) -> Queue:
        queue = self._look(topic).at(partition)
        if queue is None:
            raise TopicNotFoundError(
                f"topic {topic!r} has no such partition",
                path=self._directory.path,
                expected=f"0 to {len(self._directory.partitions(topic)) - 1}",
                found=partition,
            )
        return queue

    def _move(self, route: Route, size_bytes: int) -> None:
        """Draws another sticky partition, unless the batch of the present one still
        takes the next record.
        """
        assert route.sticky is not None
        batch = route.sticky.filling
        if batch is not None and batch.fits(size_bytes):
            return
        route.chooser.move()
        route.sticky = route.queues[route.chooser.sticky]
        route.sticky_bytes = 0
