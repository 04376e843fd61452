"""A topic as one table: its partitions, appended to by key and read together.

Rules:
- Records of one partition come in the order of their offsets. Between partitions there is no order but the one asked
  for.
- Where a reading begins and ends is fixed for all partitions when it is asked for, those that there are then.

This module opens no log (logdir.py does) and decodes nothing.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Literal, Protocol

from logcore.errors import InvalidConfigError, TopicNotFoundError
from logcore.format.columns import TOPIC_COLUMNS
from logcore.kernels import Receipt, Record, TopicRecord, kernel
from logcore.kernels.layout import HeadersInput, Level, Piece, Time
from logcore.log import Log
from logcore.partition.scan import Scan
from logcore.reader import Isolation, record_lists, span_of, tail_together

#: Where a reading of a topic begins or ends: a time, or an offset for each partition that does not begin at its start.
Position = datetime | Mapping[int, int]
Order = Literal["partition", "time"]


class Directory(Protocol):
    """The methods of a LogDir that its topics use."""

    path: str

    def partitions(self, name: str) -> tuple[int, ...]: ...
    def partition(self, topic: str, number: int) -> Log: ...
    def topic_html(self, name: str) -> str: ...
    def append(
        self,
        topic: str,
        value: Piece | None,
        *,
        key: Piece | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        partition: int | None = None,
        durability: Level | None = None,
    ) -> Receipt: ...


class Topic:
    """One topic of a directory; made by LogDir.topic(). name: of the topic.

    All methods may be called from several threads. They raise TopicNotFoundError once the topic is deleted.
    """

    def __init__(self, directory: Directory, name: str) -> None:
        """Not for users."""
        self.name = name
        self._directory = directory

    def __repr__(self) -> str:
        return f"<Topic {self.name} of {self._directory.path}>"

    def _repr_html_(self) -> str:
        return self._directory.topic_html(self.name)

    @property
    def partitions(self) -> tuple[int, ...]:
        """Numbers of the partitions, rising."""
        return self._directory.partitions(self.name)

    def partition(self, number: int) -> Log:
        """The log of one partition, as LogDir.partition() gives it."""
        return self._directory.partition(self.name, number)

    def append(
        self,
        value: Piece | None,
        *,
        key: Piece | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        partition: int | None = None,
        durability: Level | None = None,
    ) -> Receipt:
        """See LogDir.append()."""
        return self._directory.append(
            self.name,
            value,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            partition=partition,
            durability=durability,
        )

    def read(
        self,
        start: Position | None = None,
        end: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
        isolation: Isolation = "read_uncommitted",
        order: Order = "partition",
    ) -> Iterator[TopicRecord]:
        """The records of all partitions, or of those given, between two positions.

        start, end: a datetime with a time zone, which is looked up in each partition (the first record at or after
        that), or a mapping of partitions to offsets; by default, and for partitions that the mapping does not name,
        their log start and their high watermark. order: "partition" gives one partition after the other; "time" merges
        them by their timestamps, each partition still in the order of its offsets. Errors as Log.read(), and
        TopicNotFoundError for a partition that there is not.
        """
        if order not in ("partition", "time"):
            raise InvalidConfigError("order", expected="'partition' or 'time'", found=repr(order))
        streams = []
        for number, log in self._logs(partitions, start, end):
            first, last = _bounds(number, log, start, end)
            streams.append(_named(self.name, number, log.read(first, last, isolation=isolation)))
        if order == "partition":
            return itertools.chain.from_iterable(streams)
        return heapq.merge(*streams, key=attrgetter("timestamp_ms"))

    def scan(
        self,
        start: Position | None = None,
        end: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
        isolation: Isolation = "read_uncommitted",
        columns: Iterable[str] = TOPIC_COLUMNS,
    ) -> Scan:
        """The same as columns, one partition after the other: a Scan with the columns topic and partition.

        columns: those wanted, of topic, partition, offset, timestamp, key, value, headers. Errors as read(), and
        InvalidConfigError for a column that there is not.
        """
        spans = []
        for number, log in self._logs(partitions, start, end):
            first, last = _bounds(number, log, start, end)
            spans.append(span_of(log, first, last, isolation))
        return Scan(spans, columns)

    def tail(
        self,
        start: Position | None = None,
        *,
        partitions: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> Iterator[TopicRecord]:
        """The records from start on, by default the present ends, and then new ones of any partition as they come.

        start, partitions: as for read(), but partitions that a mapping does not name are followed from their end.
        Partitions that are added later are not followed. timeout: seconds without a new record after which the
        iteration ends; None waits for ever. Ends when one of the logs is closed. Errors as read().
        """
        numbers, logs, offsets = self.begin_tail(start, partitions)
        return self._tail(numbers, tail_together(logs, offsets, timeout))

    def begin_tail(
        self, start: Position | None, partitions: Iterable[int] | None
    ) -> tuple[list[int], list[Log], list[int]]:
        """For tail(): the numbers of the partitions, their logs, and where each begins. Errors as read()."""
        chosen = list(self._logs(partitions, start, None))
        numbers = [number for number, _ in chosen]
        logs = [log for _, log in chosen]
        offsets = [_begin_of_tail(number, log, start) for number, log in chosen]
        for log, offset in zip(logs, offsets, strict=True):
            log.read(offset)  # raises now what the iteration would raise later
        return numbers, logs, offsets

    def _tail(self, numbers: Sequence[int], followed: Iterator[tuple[int, list[Record]]]) -> Iterator[TopicRecord]:
        for at, records in followed:
            yield from kernel.place_records(self.name, numbers[at], records)

    def record_lists(
        self, start: Position | None, end: Position | None, partitions: Iterable[int] | None
    ) -> Iterator[list[TopicRecord]]:
        """The records of read(), in lists of some hundred. Raises the same errors."""
        chosen: list[tuple[int, Iterator[list[Record]]]] = []
        for number, log in self._logs(partitions, start, end):
            first, last = _bounds(number, log, start, end)
            chosen.append((number, record_lists(log, first, last)))
        return (kernel.place_records(self.name, number, records) for number, lists in chosen for records in lists)

    def _logs(self, partitions: Iterable[int] | None, start: object, end: object) -> Iterator[tuple[int, Log]]:
        """The partitions asked for, read-only ones as they are now."""
        known = self.partitions
        if partitions is not None and not isinstance(partitions, Iterable):
            raise InvalidConfigError("partitions is a list of numbers", expected=f"[{partitions}]", found=partitions)
        if partitions is None:
            wanted = known
        else:
            wanted = tuple(partitions)
        if len(set(wanted)) < len(wanted):
            raise InvalidConfigError("a partition is named twice", expected="each once", found=str(wanted)[:80])
        for position in (start, end):
            _check_position(position, self.name, known)
        for number in wanted:
            log = self.partition(number)
            log.refresh()
            yield number, log


def _named(topic: str, partition: int, records: Iterable[Record]) -> Iterator[TopicRecord]:
    return map(functools.partial(kernel.place_record, topic, partition), records)


def _check_position(position: object, topic: str, known: Sequence[int]) -> None:
    if position is None or isinstance(position, datetime):
        return
    if not isinstance(position, Mapping):
        raise InvalidConfigError(
            "a position in a topic",
            expected="a datetime with a time zone, or offsets by partition, such as {0: 42}",
            found=repr(position),
        )
    for number in position:
        if number not in known:
            raise TopicNotFoundError(f"topic {topic!r} has no such partition", expected=f"one of {known}", found=number)


def _bounds(number: int, log: Log, start: Position | None, end: Position | None) -> tuple[int, int | None]:
    """(first offset, end offset) of a reading in one partition."""
    first = _offset_at(number, log, start)
    return log.log_start_offset if first is None else first, _offset_at(number, log, end)


def _begin_of_tail(number: int, log: Log, start: Position | None) -> int:
    first = _offset_at(number, log, start)
    if first is None:
        return log.high_watermark
    return first


def _offset_at(number: int, log: Log, position: Position | None) -> int | None:
    if position is None:
        return None
    if isinstance(position, Mapping):
        return position.get(number)
    found = log.offset_for_timestamp(position)
    if found is None:
        return log.high_watermark
    return found
