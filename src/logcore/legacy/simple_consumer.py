"""The low-level consumer of Kafka 0.7: fetches stored batches from a given offset, and
lists offsets by the age of segments.

    simple = data.simple_consumer()
    fetched = simple.fetch("orders", 0, offset=0, max_bytes=65_536)
    for record in fetched.records():
        ...
    offset = fetched.next_offset

Rules (clients reference 5.9):
- A SimpleConsumer has no position and no group, because each call has an offset.
  Several threads may use it.
- A fetch returns whole batches, and at least one batch of any size. So max_bytes cannot
  be too small.
- multifetch() returns an error as a value, so that other fetches of the call succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import attrs

from logcore.consumer.settings import IsolationLevel
from logcore.directory.interface import PartitionDirectory
from logcore.errors import InvalidConfigError, LogcoreError
from logcore.format.columns import RecordColumns
from logcore.fs import FS
from logcore.kernels import TopicRecord, kernel
from logcore.log import Log
from logcore.partition.fetch_data import fetched_columns, next_offset
from logcore.reader import aborted_transactions, segment_times, wait_for_records_or_end

#: Kafka's special times for the end and the start of a log.
LATEST: Final = -1
EARLIEST: Final = -2


class FetchRequest(NamedTuple):
    """An argument of SimpleConsumer.multifetch()."""

    topic: str
    partition: int
    offset: int
    max_bytes: int


@attrs.frozen(kw_only=True)
class Fetched:
    """The result of one fetch."""

    topic: str
    partition: int
    #: The requested offset.
    offset: int
    #: The stored bytes, one view per segment. The first batch may begin below `offset`.
    batches: tuple[memoryview, ...]
    #: The offset of the next fetch.
    next_offset: int
    #: Its value before the records were read.
    high_watermark: int
    #: Its value before the records were read.
    last_stable_offset: int
    #: Producer id and first offset of each aborted transaction in `batches`.
    aborted: tuple[tuple[int, int], ...] = attrs.field(repr=False)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.batches))

    def columns(self) -> Iterator[RecordColumns]:
        """Return the records from `offset` on, without control records.

        Raises CorruptBatchError, InvalidRecordError, UnsupportedCodecError,
        RecordTooLargeError.
        """
        source = f"{self.topic}-{self.partition}"
        for view in self.batches:
            columns_of_view = fetched_columns(
                view,
                self.offset,
                self.next_offset,
                aborted=self.aborted,
                source=source,
            )
            for columns, _ in columns_of_view:
                yield columns

    def records(self) -> Iterator[TopicRecord]:
        """Return the records with topic and partition. Raises the same errors as
        columns().
        """
        for columns in self.columns():
            yield from kernel.to_topic_records(
                self.topic, self.partition, list(columns.records())
            )


class SimpleConsumer:
    """A consumer created by LogDir.simple_consumer()."""

    def __init__(
        self, fs: FS, directory: PartitionDirectory, isolation_level: IsolationLevel
    ) -> None:
        """Create a consumer. Users call LogDir.simple_consumer()."""
        if isolation_level not in ("read_uncommitted", "read_committed"):
            raise InvalidConfigError(
                "isolation_level",
                expected="read_uncommitted or read_committed",
                found=repr(isolation_level),
            )
        self._fs = fs
        self._directory = directory
        self._reads_committed = isolation_level == "read_committed"

    def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        max_bytes: int = 1 << 20,
        *,
        wait_ms: int = 0,
        min_bytes: int = 1,
    ) -> Fetched:
        """Return whole batches, beginning with the batch that contains `offset`: at most
        `max_bytes`, but at least one batch if there is one.

        The call waits up to `wait_ms` for at least `min_bytes`.

        Raises:
            OffsetOutOfRangeError: the offset is outside the log. The message contains
                the bounds of the log.
            TopicNotFoundError: the partition does not exist.
            CorruptBatchError: a batch is missing.
            StorageReadError: a file cannot be read.
            InvalidConfigError: an argument is invalid.
        """
        if max_bytes < 1 or wait_ms < 0 or min_bytes < 1:
            raise InvalidConfigError(
                "fetch",
                expected="max_bytes and min_bytes from 1, wait_ms from 0",
                found=f"{max_bytes}, {min_bytes}, {wait_ms}",
            )
        log = self._directory.partition(topic, partition)
        log.refresh()
        deadline_ms = self._fs.monotonic_ms() + wait_ms
        while True:
            fetched = self._fetch(topic, partition, log, offset, max_bytes)
            remaining_ms = deadline_ms - self._fs.monotonic_ms()
            end = (
                fetched.last_stable_offset
                if self._reads_committed
                else fetched.high_watermark
            )
            is_full = fetched.next_offset < end  # the next batch does not fit
            if (
                is_full
                or fetched.size_bytes >= min(min_bytes, max_bytes)
                or remaining_ms <= 0
            ):
                return fetched
            if not wait_for_records_or_end(
                log, fetched.high_watermark, remaining_ms / 1000
            ):
                return self._fetch(topic, partition, log, offset, max_bytes)

    def _fetch(
        self, topic: str, partition: int, log: Log, offset: int, max_bytes: int
    ) -> Fetched:
        # Both are read before the records, so that a later append ends the wait.
        high_watermark = log.high_watermark
        last_stable_offset = log.last_stable_offset
        if self._reads_committed:
            end = last_stable_offset
        else:
            end = high_watermark
        views = log.stored(offset, end, max_bytes=max_bytes)
        next_fetch_offset = offset
        for view in views:
            next_fetch_offset = next_offset(view, next_fetch_offset)
        next_fetch_offset = min(next_fetch_offset, max(offset, end))
        aborted: Sequence[tuple[int, int]] = ()
        if self._reads_committed and next_fetch_offset > offset:
            aborted = aborted_transactions(log, offset, next_fetch_offset)
        return Fetched(
            topic=topic,
            partition=partition,
            offset=offset,
            batches=tuple(views),
            next_offset=next_fetch_offset,
            high_watermark=high_watermark,
            last_stable_offset=last_stable_offset,
            aborted=tuple(aborted),
        )

    def multifetch(
        self, requests: Iterable[FetchRequest | tuple[str, int, int, int]]
    ) -> list[Fetched | LogcoreError]:
        """Call fetch() for each request. Return a list with a Fetched, or the error that
        fetch() raised, for each request.
        """
        results: list[Fetched | LogcoreError] = []
        for request in requests:
            try:
                results.append(self.fetch(*request))
            except LogcoreError as error:
                results.append(error)
        return results

    def offsets_before(
        self, topic: str, partition: int, time_ms: int, max_count: int = 1
    ) -> list[int]:
        """Return the base offsets of segments that were last written at or before
        `time_ms`, in descending order, at most `max_count`.

        With LATEST (-1), the first offset is the log end. With EARLIEST (-2), only the
        log start is returned. The result is empty if all segments are newer. This is
        the rule of Kafka 0.7, whose precision is one segment.
        Log.offset_for_timestamp() finds single records.

        Raises TopicNotFoundError, InvalidConfigError.
        """
        if max_count < 1 or time_ms < EARLIEST:
            raise InvalidConfigError(
                "offsets_before",
                expected="max_count from 1, time_ms from -2",
                found=f"{max_count}, {time_ms}",
            )
        log = self._directory.partition(topic, partition)
        log.refresh()
        bounds = (log.log_start_offset, log.high_watermark)
        return offsets_before_time(
            segment_times(log), bounds, self._fs.now_ms(), time_ms, max_count
        )


def offsets_before_time(
    segments: Sequence[tuple[int, int, int]],
    bounds: tuple[int, int],
    now_ms: int,
    time_ms: int,
    max_count: int,
) -> list[int]:
    """Implement Kafka's legacyFetchOffsetsBefore.

    `segments` contains (base offset, time of the last write, size in bytes) for each
    segment in order. `bounds` contains the log start and the log end.
    """
    log_start, log_end = bounds
    entries = [
        (max(base, log_start), modified_ms)
        for base, modified_ms, _ in segments
        if base <= log_end
    ]
    if segments and segments[-1][2]:
        entries.append((log_end, now_ms))
    if time_ms == LATEST:
        count = len(entries)
    elif time_ms == EARLIEST:
        count = min(1, len(entries))
    else:
        count = max(
            (index for index, entry in enumerate(entries, 1) if entry[1] <= time_ms),
            default=0,
        )
    offsets = [offset for offset, _ in entries[:count]]
    return sorted(offsets[-max_count:], reverse=True)
