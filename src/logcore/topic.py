"""A topic as one table: its partitions, appended to by key and read together.

Rules:
- Records of one partition are returned in the order of their offsets. Between
  partitions only the requested order applies.
- The start and the end of a read are fixed for all partitions when it is requested. It
  covers the partitions that exist then.

This module does not open logs (logdir.py does) and does not decode records.
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
from logcore.kernels.layout import Buffer, HeadersInput, Level, Time
from logcore.log import Log
from logcore.partition.scan import Scan
from logcore.reader import Isolation, record_lists, span_of, tail_together

#: Start or end of a read of a topic: a time, or offsets by partition, with a default
#: for partitions that are not named.
Position = datetime | Mapping[int, int]
Order = Literal["partition", "time"]


class TopicDirectory(Protocol):
    """The methods of a LogDir that its topics use."""

    path: str

    def partitions(self, name: str) -> tuple[int, ...]: ...
    def partition(self, topic: str, number: int) -> Log: ...
    def topic_html(self, name: str) -> str: ...
    def append(
        self,
        topic: str,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        partition: int | None = None,
        durability: Level | None = None,
    ) -> Receipt: ...


class Topic:
    """One topic of a directory, created by LogDir.topic().

    Any thread may call its methods. They raise TopicNotFoundError once the topic is
    deleted.
    """

    def __init__(self, directory: TopicDirectory, name: str) -> None:
        """Create a topic. Users call LogDir.topic()."""
        self.name = name
        self._directory = directory

    def __repr__(self) -> str:
        return f"<Topic {self.name} of {self._directory.path}>"

    def _repr_html_(self) -> str:
        return self._directory.topic_html(self.name)

    @property
    def partitions(self) -> tuple[int, ...]:
        """The sorted numbers of the partitions."""
        return self._directory.partitions(self.name)

    def partition(self, number: int) -> Log:
        """Return the log of one partition, like LogDir.partition()."""
        return self._directory.partition(self.name, number)

    def append(
        self,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: HeadersInput = (),
        timestamp_ms: Time | None = None,
        partition: int | None = None,
        durability: Level | None = None,
    ) -> Receipt:
        """Append a record, see LogDir.append()."""
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
        """Return the records of all partitions, or of those given, between two
        positions.

        `start` and `end` are a datetime with a time zone, or a mapping of partitions to
        offsets. A datetime means the first record at or after it in each partition. The
        default, also for partitions that a mapping does not name, is the log start and
        the high watermark.

        `order` "partition" returns one partition after the other. "time" merges them by
        their timestamps, and keeps the order of offsets within each partition.

        Raises the same errors as Log.read(), and TopicNotFoundError for a missing
        partition.
        """
        if order not in ("partition", "time"):
            raise InvalidConfigError(
                "order", expected="'partition' or 'time'", found=repr(order)
            )
        streams = []
        for number, log in self._logs(partitions, start, end):
            first, last = _bounds(number, log, start, end)
            streams.append(
                _named(self.name, number, log.read(first, last, isolation=isolation))
            )
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
        """Return the records as columns, one partition after the other.

        The result is a Scan with the columns topic and partition. `columns` selects
        from topic, partition, offset, timestamp, key, value, headers. Raises the same
        errors as read(), and InvalidConfigError for an unknown column.
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
        """Yield the records from `start` on, by default the present ends, then new ones
        as they arrive.

        `start` and `partitions` are those of read(), but partitions that a mapping does
        not name are followed from their end. Partitions added later are not followed.
        After `timeout` seconds without a new record the iteration ends; None waits
        indefinitely. It also ends when one of the logs is closed. Raises the same
        errors as read().
        """
        numbers, logs, offsets = self.begin_tail(start, partitions)
        return self._tail(numbers, tail_together(logs, offsets, timeout))

    def begin_tail(
        self, start: Position | None, partitions: Iterable[int] | None
    ) -> tuple[list[int], list[Log], list[int]]:
        """Return the partition numbers, their logs and start offsets for tail().

        Raises the same errors as read().
        """
        chosen = self._logs(partitions, start, None)
        numbers = [number for number, _ in chosen]
        logs = [log for _, log in chosen]
        offsets = [_begin_of_tail(number, log, start) for number, log in chosen]
        for log, offset in zip(logs, offsets, strict=True):
            # Raises errors of the iteration now instead of later.
            log.read(offset)
        return numbers, logs, offsets

    def _tail(
        self, numbers: Sequence[int], followed: Iterator[tuple[int, list[Record]]]
    ) -> Iterator[TopicRecord]:
        for at, records in followed:
            yield from kernel.to_topic_records(self.name, numbers[at], records)

    def record_lists(
        self,
        start: Position | None,
        end: Position | None,
        partitions: Iterable[int] | None,
    ) -> Iterator[list[TopicRecord]]:
        """Return the records of read() in lists of some hundred. Raises the same
        errors.
        """
        chosen: list[tuple[int, Iterator[list[Record]]]] = []
        for number, log in self._logs(partitions, start, end):
            first, last = _bounds(number, log, start, end)
            chosen.append((number, record_lists(log, first, last)))
        return (
            kernel.to_topic_records(self.name, number, records)
            for number, lists in chosen
            for records in lists
        )

    def _logs(
        self, partitions: Iterable[int] | None, start: object, end: object
    ) -> list[tuple[int, Log]]:
        """Return the requested partitions; read-only logs are refreshed."""
        logs = self._open_logs(partitions, start, end)
        # If another process has created the topic again, opening a partition closes the
        # logs of the former topic. Its records must not be mixed with new ones.
        if any(log.is_closed for _, log in logs):
            logs = self._open_logs(partitions, start, end)
        for _, log in logs:
            log.refresh()
        return logs

    def _open_logs(
        self, partitions: Iterable[int] | None, start: object, end: object
    ) -> list[tuple[int, Log]]:
        known = self.partitions
        if partitions is not None and not isinstance(partitions, Iterable):
            raise InvalidConfigError(
                "partitions is a list of numbers",
                expected=f"[{partitions}]",
                found=partitions,
            )
        if partitions is None:
            wanted = known
        else:
            wanted = tuple(partitions)
        if len(set(wanted)) < len(wanted):
            raise InvalidConfigError(
                "a partition is named twice",
                expected="each once",
                found=str(wanted)[:80],
            )
        for position in (start, end):
            _check_position(position, self.name, known)
        return [(number, self.partition(number)) for number in wanted]


def _named(
    topic: str, partition: int, records: Iterable[Record]
) -> Iterator[TopicRecord]:
    return map(functools.partial(kernel.to_topic_record, topic, partition), records)


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
            raise TopicNotFoundError(
                f"topic {topic!r} has no such partition",
                expected=f"one of {known}",
                found=number,
            )


def _bounds(
    number: int, log: Log, start: Position | None, end: Position | None
) -> tuple[int, int | None]:
    """Return (first offset, end offset) of a read in one partition."""
    first = _offset_at(number, log, start)
    return log.log_start_offset if first is None else first, _offset_at(
        number, log, end
    )


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
