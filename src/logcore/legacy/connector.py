"""Streams of records, one for each thread: the high-level consumer of Kafka 0.7.

    with data.connector("totals") as connector:
        streams = connector.create_message_streams({"orders": 3})["orders"]
        # in a thread for each stream:
        for record in stream:
            ...

Rules (clients reference 5.9):
- Each stream is a member of the group, so each partition is assigned to one stream.
  Only one thread may use a stream.
- A stream ends when the connector is shut down. The last record that the stream returned
  is then not committed, because the thread may not have processed the record yet.
  commit_offsets() commits all returned records.
- All streams of a connector are created in one call, because another call would cause
  a rebalance.

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
        """Return the compiled expression. Raises InvalidConfigError."""
        return _compile_pattern(self.pattern)


@attrs.frozen
class Blacklist:
    """The topics whose whole name does not match a regular expression, except internal
    topics.
    """

    pattern: str

    def expression(self) -> re.Pattern[str]:
        _compile_pattern(self.pattern)
        return _compile_pattern(rf"(?!(?:{self.pattern})\Z).*")


TopicFilter = Whitelist | Blacklist


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return topic_pattern("a topic filter", pattern)


class Stream:
    """An iterator over the records of some partitions, for one thread. It ends after
    Connector.shutdown().

    A record counts as processed when the thread requests the next record. `name` is
    the name of the group member.
    """

    def __init__(self, name: str, consumer: Consumer) -> None:
        """Create a stream. Users call Connector.create_message_streams()."""
        self.name = name
        self._consumer = consumer
        self._records = iter(consumer)
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"

    def __iter__(self) -> Iterator[TopicRecord]:
        return self

    def __next__(self) -> TopicRecord:
        try:
            # A loop instead of next(): an interrupt between the return of next() and
            # this statement would lose the record, because the position has advanced.
            for record in () if self._has_ended else self._records:
                return record
        except ConsumerStateError:
            if not self._has_ended:
                raise
        except BaseException:
            # The next call returns the same record again.
            self._records = iter(self._consumer)
            raise
        if self._has_ended:
            # The request for the next record means that the last one is processed. If
            # the consumer is busy, shutdown() is closing it.
            with contextlib.suppress(ConsumerBusyError):
                self._consumer.close()
        raise StopIteration

    def commit(self) -> None:
        """See Connector.commit_offsets()."""
        if not self._has_ended:
            self._consumer.commit_from_other_thread()

    def announce_end(self) -> None:
        """Make the stream return no more records. Any thread may call this method."""
        self._has_ended = True

    def end(self) -> None:
        """Close the stream after announce_end(). Any thread may call this method.

        If a thread waits in the stream, that thread wakes and closes the stream.
        Otherwise, this call closes the stream.
        """
        self._consumer.wakeup()
        # ConsumerStateError: another thread reads the stream and will close it.
        with contextlib.suppress(ConsumerStateError):
            self._consumer.leave_unfinished()


class Connector:
    """A connector created by LogDir.connector(). A `with` block shuts it down. Any
    thread may call its methods.
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
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<Connector {self._name}, {len(self._streams or ())} streams>"

    def create_message_streams(
        self, topic_count_map: Mapping[str, int]
    ) -> dict[str, list[Stream]]:
        """Create the given number of streams for each topic. A stream without an
        assigned partition blocks.

        Raises InvalidConfigError for an invalid number, and ConsumerStateError if the
        connector already has streams.
        """
        for topic, count in topic_count_map.items():
            _check_count(topic, count)
        subscriptions = [
            (topic, {"topics": [topic]})
            for topic, count in topic_count_map.items()
            for _ in range(count)
        ]
        streams_by_topic: dict[str, list[Stream]] = {
            topic: [] for topic in topic_count_map
        }
        streams = self._create_streams(
            [subscription for _, subscription in subscriptions],
            topic_count_map,
            "static",
        )
        for (topic, _), stream in zip(subscriptions, streams, strict=True):
            streams_by_topic[topic].append(stream)
        return streams_by_topic

    def create_message_streams_by_filter(
        self, topic_filter: TopicFilter, count: int = 1
    ) -> list[Stream]:
        """Create `count` streams for all topics that a Whitelist or a Blacklist selects,
        including topics that are created later.

        Raises InvalidConfigError for an invalid argument, and ConsumerStateError if the
        connector already has streams.
        """
        if not isinstance(topic_filter, (Whitelist, Blacklist)):
            raise InvalidConfigError(
                "a topic filter",
                expected="Whitelist or Blacklist",
                found=repr(topic_filter),
            )
        _check_count("the filter", count)
        pattern_kind: Pattern = "black_list"
        if isinstance(topic_filter, Whitelist):
            pattern_kind = "white_list"
        return self._create_streams(
            [{"pattern": topic_filter.expression()}] * count,
            {topic_filter.pattern: count},
            pattern_kind,
        )

    def _create_streams(
        self,
        subscriptions: Iterable[Mapping[str, Any]],
        topic_counts: Mapping[str, int],
        pattern_kind: Pattern,
    ) -> list[Stream]:
        """Create the streams. `topic_counts` and `pattern_kind` are published in the registry."""
        with self._lock:
            if self._has_ended:
                raise ConsumerStateError("the connector was shut down")
            if self._streams is not None:
                raise ConsumerStateError(
                    "the streams of a connector are created in one call",
                    found=repr(self),
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
                    registration, number, topic_counts, pattern_kind
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
            self._has_ended = True
            streams = self._streams or []
            # All streams end before the first member leaves the group. Otherwise, its
            # partitions would be assigned to the other streams.
            for stream in streams:
                stream.announce_end()
            for stream in streams:
                stream.end()


def _check_count(subject: str, count: object) -> None:
    if not isinstance(count, int) or count < 1:
        raise InvalidConfigError(
            f"streams of {subject}", expected="a number from 1", found=repr(count)
        )
