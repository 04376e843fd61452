"""Streams of records, one for each thread: the high-level consumer of Kafka 0.7.

    with data.connector("totals") as connector:
        streams = connector.create_message_streams({"orders": 3})["orders"]
        # in a thread for each stream:
        for record in stream:
            ...

Rules (clients reference 5.9):
- Each stream is a member of the group, so a partition belongs to one stream. One thread
  uses a stream.
- A stream ends when the connector is shut down. Its last record is then not committed,
  because the thread may not have processed it yet. commit_offsets() commits all
  returned records.
- The streams of a connector are created once, because another call would divide the
  partitions again.

Positions, commits and rebalances are implemented in consumer.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, Self, Unpack, cast

import attrs

from logcore.consumer.consumer import Consumer
from logcore.consumer.registry_identity import Registration
from logcore.consumer.settings import ConsumerOptions, topic_pattern
from logcore.errors import ConsumerBusyError, ConsumerStateError, InvalidConfigError
from logcore.kernels import TopicRecord
from logcore.registry.paths import Pattern


class ConnectorDirectory(Protocol):
    """The methods of a LogDir that this module uses."""

    def consumer(self, **settings: Unpack[ConsumerOptions]) -> Consumer: ...


@attrs.frozen
class Whitelist:
    """The topics whose whole name matches a regular expression."""

    pattern: str

    def expression(self) -> re.Pattern[str]:
        """Return the expression for the names of topics. Raises InvalidConfigError."""
        return _compiled(self.pattern)


@attrs.frozen
class Blacklist:
    """The topics whose whole name does not match a regular expression, without Kafka's
    own topics.
    """

    pattern: str

    def expression(self) -> re.Pattern[str]:
        _compiled(self.pattern)
        return _compiled(rf"(?!(?:{self.pattern})\Z).*")


TopicFilter = Whitelist | Blacklist


def _compiled(pattern: str) -> re.Pattern[str]:
    return topic_pattern("a topic filter", pattern)


class Stream:
    """An iterator over records of some partitions, for one thread. It ends with
    Connector.shutdown().

    `name` is the name of the member. A record is finished when the next one is
    requested.
    """

    def __init__(self, name: str, consumer: Consumer) -> None:
        """Create a stream. Users call Connector.create_message_streams()."""
        self.name = name
        self._consumer = consumer
        self._records = iter(consumer)
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"

    def __iter__(self) -> Iterator[TopicRecord]:
        return self

    def __next__(self) -> TopicRecord:
        try:
            # Not next(), which is a call: an interrupt after it would lose the record,
            # whose position has moved.
            for record in () if self._is_over else self._records:
                return record
        except ConsumerStateError:
            if not self._is_over:
                raise
        except BaseException:
            self._records = iter(self._consumer)  # the same record is tried again
            raise
        if self._is_over:
            # The caller requests the next record, so it has finished the last one. If
            # the consumer is busy, shutdown() is closing it at this moment.
            with contextlib.suppress(ConsumerBusyError):
                self._consumer.close()
        raise StopIteration

    def commit(self) -> None:
        """See Connector.commit_offsets()."""
        if not self._is_over:
            self._consumer.commit_elsewhere()

    def announce_end(self) -> None:
        """Make the stream return no more records. Any thread may call it."""
        self._is_over = True

    def end(self) -> None:
        """Close the stream after announce_end(). Any thread may call it.

        A thread that waits in the stream leaves it and closes it. Without such a
        thread, this call closes it.
        """
        self._consumer.wakeup()
        # ConsumerStateError: a thread is reading the stream, and closes it itself.
        with contextlib.suppress(ConsumerStateError):
            self._consumer.leave_unfinished()


class Connector:
    """A connector made by LogDir.connector(). A `with` block shuts it down. Any thread
    may call its methods.
    """

    def __init__(
        self, directory: ConnectorDirectory, group_id: str, settings: Mapping[str, Any]
    ) -> None:
        """Create a connector. Users call LogDir.connector()."""
        if "group_id" in settings:
            raise InvalidConfigError("group_id is the first argument of connector()")
        self._directory = directory
        self._settings: dict[str, Any] = {
            "assignors": ("range",),
            **settings,
            "group_id": group_id,
        }
        self._name = str(self._settings.get("client_id") or f"{group_id}_{os.getpid()}")
        self._lock = threading.Lock()
        self._streams: list[Stream] | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<Connector {self._name}, {len(self._streams or ())} streams>"

    def create_message_streams(
        self, topic_count_map: Mapping[str, int]
    ) -> dict[str, list[Stream]]:
        """Create this number of streams for each topic. A stream without a partition
        waits.

        Raises InvalidConfigError, and ConsumerStateError if the connector has streams
        already.
        """
        for topic, count in topic_count_map.items():
            _check_count(topic, count)
        wanted = [
            (topic, {"topics": [topic]})
            for topic, count in topic_count_map.items()
            for _ in range(count)
        ]
        made: dict[str, list[Stream]] = {topic: [] for topic in topic_count_map}
        streams = self._make([how for _, how in wanted], topic_count_map, "static")
        for (topic, _), stream in zip(wanted, streams, strict=True):
            made[topic].append(stream)
        return made

    def create_message_streams_by_filter(
        self, topic_filter: TopicFilter, count: int = 1
    ) -> list[Stream]:
        """Create this number of streams for all topics that a Whitelist or a Blacklist
        selects, including topics that are created later.

        Raises InvalidConfigError, and ConsumerStateError if the connector has streams
        already.
        """
        if not isinstance(topic_filter, (Whitelist, Blacklist)):
            raise InvalidConfigError(
                "a topic filter",
                expected="Whitelist or Blacklist",
                found=repr(topic_filter),
            )
        _check_count("the filter", count)
        kind: Pattern = "black_list"
        if isinstance(topic_filter, Whitelist):
            kind = "white_list"
        return self._make(
            [{"pattern": topic_filter.expression()}] * count,
            {topic_filter.pattern: count},
            kind,
        )

    def _make(
        self,
        subscriptions: Iterable[Mapping[str, Any]],
        announced: Mapping[str, int],
        kind: Pattern,
    ) -> list[Stream]:
        """Create the streams. `announced` and `kind` are published in the registry."""
        with self._lock:
            if self._is_over:
                raise ConsumerStateError("the connector was shut down")
            if self._streams is not None:
                raise ConsumerStateError(
                    "the streams of a connector are made in one call", found=repr(self)
                )
            streams: list[Stream] = []
            self._streams = streams
            registration: Registration | None = None
            for number, subscription in enumerate(subscriptions):
                name = f"{self._name}-{number}"
                settings = {**self._settings, "client_id": name}
                consumer = self._directory.consumer(**cast("ConsumerOptions", settings))
                streams.append(Stream(name, consumer))
                registration = consumer.register_with(
                    registration, number, announced, kind
                )
                consumer.subscribe(**subscription)
            return list(streams)

    def commit_offsets(self) -> None:
        """Commit all records that the streams have returned. Raises the same errors as
        Consumer.commit().
        """
        with self._lock:
            for stream in self._streams or ():
                stream.commit()

    def shutdown(self) -> None:
        """End all streams and leave the group. A second call has no effect."""
        with self._lock:
            self._is_over = True
            streams = self._streams or []
            # All streams end before one leaves, because the group would give the
            # partitions of that one to the others.
            for stream in streams:
                stream.announce_end()
            for stream in streams:
                stream.end()


def _check_count(what: str, count: object) -> None:
    if not isinstance(count, int) or count < 1:
        raise InvalidConfigError(
            f"streams of {what}", expected="a number from 1", found=repr(count)
        )
