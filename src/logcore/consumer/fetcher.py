"""Reads the records of a consumer's partitions, one partition after the other.

Rules:
- Partitions are read round-robin, starting after the one that was read last.
- A position moves when the records are returned to the caller: in hand_out(), or when
  an iteration yields. After an earlier error or interrupt the position is unchanged,
  and no record is skipped.
- Records before a damaged record, or before one that a deserializer rejects, are
  returned first. The next call raises.
- Records may be read ahead until PartitionPosition.drop() discards them.
- If a position is not in the log, auto_offset_reset defines the new position.

This module does not choose the partitions (assignment.py), commit (commits.py) or wait
(consumer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import attrs
import numpy as np

from logcore.consumer.positions import Ahead, Move, PartitionPosition
from logcore.consumer.settings import (
    ConsumerRecords,
    ConsumerSettings,
    Deserializer,
    intercepted,
)
from logcore.consumer.topic_partition import TopicPartition
from logcore.errors import (
    InvalidConfigError,
    LogcoreError,
    LogTruncatedError,
    NoOffsetError,
    OffsetOutOfRangeError,
)
from logcore.format.columns import RecordColumns
from logcore.format.group_records import Committed
from logcore.fs import FS
from logcore.kernels import PositionFields, TopicRecord, kernel
from logcore.log import Log
from logcore.reader import topic_record_lists
from logcore.reporting import WARNING, log_line

_T = TypeVar("_T")
#: Yields records of a list, from one index to another, and moves the position.
_YieldRecords = Callable[
    [PositionFields, list[TopicRecord], int, int], Iterator[TopicRecord]
]
#: Default size of one poll of columns; see Consumer.poll_columns().
MAX_COLUMN_BYTES: Final = 16 << 20
#: Maximum time for which an iteration runs before it checks the group.
_CHECK_WHILE_ITERATING_MS: Final = 100
#: Number of records that an iteration reads ahead, and number of records between two
#: readings of the clock while the loop is fast.
_READ_AHEAD: Final = 128
_RECORDS_PER_CHECK: Final = 16


@attrs.frozen
class Columns:
    """The columns in [start, end) of a partition."""

    partition: TopicPartition
    start: int
    end: int
    columns: list[RecordColumns]
    #: The size of the keys and values.
    size_bytes: int


def _records_until(check_ms: int, now_ms: int, before_ms: int, count: int) -> int:
    """Return how many records to yield before the clock is read again.

    Reading the clock costs as much as yielding a record. `count` records have taken the
    time since before_ms. The next ones may take a quarter of the time until check_ms.
    """
    took_ms = max(1, now_ms - before_ms)
    fitting = count * (check_ms - now_ms) // (4 * took_ms)
    return min(_RECORDS_PER_CHECK, max(1, fitting))


class Fetcher:
    """Reads records from partitions."""

    def __init__(
        self,
        fs: FS,
        readings: Mapping[TopicPartition, PartitionPosition],
        settings: ConsumerSettings,
        *,
        is_read_only: bool,
        is_shared: bool,
    ) -> None:
        """Initialize the fetcher.

        `readings` contains the read positions. The consumer adds and removes
        partitions.
        """
        self._fs = fs
        self._readings = readings
        self._settings = settings
        self._is_read_only = is_read_only
        #: Makes appends of other processes to a log visible.
        self.follow: Callable[[Log], object] = (
            Log.refresh if is_shared else _do_not_refresh
        )
        self._turn = 0  # index of the next partition to read
        self.records = 0  # number of decoded records, for the metrics

    # -- the readable part of a log ----------------------------------------------------

    def start(self, log: Log) -> int:
        self.follow(log)
        return log.log_start_offset

    def end(self, log: Log) -> int:
        """Return the end of the readable records at the isolation level."""
        self.follow(log)
        if self._settings.isolation_level == "read_committed":
            return log.last_stable_offset
        return log.high_watermark

    def begin(
        self,
        topic_partition: TopicPartition,
        reading: PartitionPosition,
        *,
        is_added: bool,
    ) -> None:
        """Set the position of a partition without a committed offset.

        With `is_added`, the partition is new in its topic and is read from its start.

        Raises:
            NoOffsetError: auto_offset_reset is "none".
        """
        rule = self._settings.auto_offset_reset
        if rule == "none":
            raise NoOffsetError(
                f"nothing was committed for {topic_partition.topic}-{topic_partition.partition}",
                expected='auto_offset_reset="earliest" or "latest", or a commit or a seek',
            )
        if is_added:
            rule = "earliest"
        reading.place(self._beginning(reading.log, rule))

    def _beginning(self, log: Log, rule: str) -> int:
        """Return the position that auto_offset_reset defines."""
        if rule == "earliest":
            return log.log_start_offset
        end = self.end(log)
        duration_ms = self._settings.reset_duration_ms
        if rule == "latest" or duration_ms is None:
            return end
        found = log.offset_for_timestamp(self._fs.now_ms() - duration_ms)
        if found is None:  # all records are older
            return end
        return min(found, end)

    def reset(
        self,
        topic_partition: TopicPartition,
        reading: PartitionPosition,
        error: OffsetOutOfRangeError,
    ) -> None:
        """Set a new position after retention or truncation removed the current one.

        Raises:
            OffsetOutOfRangeError: auto_offset_reset is "none".
        """
        rule = self._settings.auto_offset_reset
        if rule == "none":
            raise error
        reading.place(self._beginning(reading.log, rule))
        group = self._settings.group_id
        log_line(
            "consumer",
            WARNING,
            "group %s continues %s at offset %d: %s",
            group,
            topic_partition,
            reading.position,
            error,
        )

    # -- reading records ---------------------------------------------------------------

    def finish(self) -> None:
        """Mark all returned records as processed."""
        # An operation in another thread may remove some; see logcore.aio.
        for reading in list(self._readings.values()):
            reading.finished = reading.position

    def has_records(self) -> bool:
        """Return whether any partition has records at its position."""
        return any(
            self._has_records(reading) for reading in list(self._readings.values())
        )

    def find_columns(self, max_bytes: int) -> list[Columns]:
        """Read the available columns of the partitions, round-robin, up to max_bytes.

        The size counts keys and values. No position moves, except one that is not in
        the log.
        """
        found: list[Columns] = []
        order = list(self._readings)
        first = self._turn
        left = max_bytes
        for step in range(len(order)):
            partition = order[(first + step) % len(order)]
            try:
                columns = self._columns(partition, self._readings[partition], left)
            except Exception:
                if found:  # as in poll()
                    break
                raise
            if columns is not None:
                found.append(columns)
                left -= columns.size_bytes
                self._turn = (first + step + 1) % len(order)
            if left <= 0:
                break
        return found

    def moves_after(self, found: list[Columns]) -> list[Move]:
        """Return the moves for hand_out() after find_columns().

        The list is empty if there are no records, or if a position was moved since
        then. In that case, the caller must find columns again.
        """
        moves: list[Move] = []
        for each in found:
            reading = self._readings.get(each.partition)
            if reading is None or reading.position != each.start:
                return []
            reading.drop()
            if each.columns:
                moves.append(Move(reading, each.start, each.end))
            else:
                reading.position = each.end
        self.records += sum(len(columns) for each in found for columns in each.columns)
        return moves

    def hand_out(self, moves: Sequence[Move], given: _T) -> _T:
        """Move the positions and return `given`.

        The caller returns it immediately, outside of any `with` block. An interrupt
        moves all positions back, because the user never gets the records. A position
        that was moved since the records were found is not moved here. For example, an
        interceptor may have called seek().
        """
        current = [move for move in moves if move.reading.position == move.start]
        try:
            for reading, _, end in current:
                reading.position = end
                reading.is_ahead = False
            return given
        except BaseException:
            for reading, start, _ in current:
                reading.place(start)
            raise

    def opened(self) -> PartitionPosition | None:
        """Find the next partition, round-robin, with records, and open it."""
        order = list(self._readings)
        for step in range(len(order)):
            at = (self._turn + step) % len(order)
            reading = self._readings[order[at]]
            if not reading.is_paused and self._open(order[at], reading):
                self._turn = (at + 1) % len(order)
                return reading
        return None

    def runs(self, reading: PartitionPosition) -> Iterator[Iterator[TopicRecord]]:
        """Yield iterators of records until the partition ends or the caller must stop.

        The iteration stops when the position is moved, the partition is removed, or the
        group must be checked. In these cases, the records that were read ahead are
        dropped.
        """
        records = reading.records
        assert records is not None
        settings = self._settings
        is_plain = (
            settings.key_deserializer is None and settings.value_deserializer is None
        )
        # With a deserializer, an error must be raised after the records before it.
        at_once = 1
        if is_plain:
            at_once = _READ_AHEAD
        yield_records: _YieldRecords = kernel.yield_records
        if settings.interceptors:
            yield_records = self._intercepted_each
        before_ms = self._fs.monotonic_ms()
        check_ms = before_ms + _CHECK_WHILE_ITERATING_MS
        # Records until the clock is read.
        count = 1
        while True:
            # Step 1: decode the next records ahead of the caller.
            reading.is_ahead = True
            try:
                taken = records.next_records(
                    at_once, settings.max_partition_fetch_bytes
                )
                ahead = self._handed(taken.records)
            except BaseException:
                reading.drop()
                raise
            if not ahead:
                reading.position = reading.end
                reading.drop()
                return
            at = 0
            while at < len(ahead):
                # Step 2: yield some of them. The position advances just before each
                # record.
                stop = min(at + count, len(ahead))
                yield yield_records(reading, ahead, at, stop)
                if reading.records is not records:
                    return
                # The caller may continue after an error of an interceptor. The records
                # that it did not get must be read again.
                if reading.position != ahead[stop - 1].offset + 1:
                    reading.drop()
                    return
                at = stop
                # Step 3: end the iteration if the group must be checked.
                now_ms = self._fs.monotonic_ms()
                if now_ms >= check_ms:
                    reading.drop()
                    return
                count = _records_until(check_ms, now_ms, before_ms, count)
                before_ms = now_ms
            if taken.is_stopped:
                reading.drop()
                return

    def _has_records(self, reading: PartitionPosition) -> bool:
        if reading.is_paused or reading.log.is_closed:
            return False
        if self._is_read_only:
            reading.log.refresh()
        if reading.position is None:
            return False
        return reading.records is not None or not _is_at_end(
            reading.log, reading.position, self.end(reading.log)
        )

    def fetch(
        self, most: int
    ) -> tuple[dict[TopicPartition, list[TopicRecord]], list[Move]]:
        """Return records of the partitions, round-robin, and the moves for hand_out().

        At most `most` records are returned. The limits are max_partition_fetch_bytes
        for each partition and fetch_max_bytes for all, but at least one run of batches
        is read.
        """
        found: dict[TopicPartition, list[TopicRecord]] = {}
        moves: list[Move] = []
        order = list(self._readings)
        first = self._turn
        left = most
        left_bytes = self._settings.fetch_max_bytes
        for step in range(len(order)):
            partition = order[(first + step) % len(order)]
            reading = self._readings[partition]
            if reading.is_paused or left == 0 or (found and left_bytes <= 0):
                continue
            try:
                records, size_bytes, end = self._next_records(
                    partition, reading, left, left_bytes
                )
            except Exception:
                # The found records are returned now, and the next call raises the error
                # again.
                if found:
                    break
                raise
            if records:
                assert reading.position is not None
                found[partition] = records
                moves.append(Move(reading, reading.position, end))
                left -= len(records)
                left_bytes -= size_bytes
                self._turn = (first + step + 1) % len(order)
            elif end:
                reading.position = end
        return found, moves

    def _next_records(
        self,
        topic_partition: TopicPartition,
        reading: PartitionPosition,
        most: int,
        most_bytes: int,
    ) -> tuple[list[TopicRecord], int, int]:
        """Return records of one partition, their bytes, and the new position.

        The bytes are those of the batches that were started. The position is 0 if it
        does not move.
        """
        if not self._open(topic_partition, reading):
            return [], 0, 0
        assert reading.records is not None
        # This is set until the records are returned, so that an interrupt skips none of
        # them.
        reading.is_ahead = True
        try:
            taken = reading.records.next_records(
                most, min(most_bytes, self._settings.max_partition_fetch_bytes)
            )
            found = self._handed(taken.records)
        except BaseException:
            reading.drop()
            raise
        # The next call reaches the record that cannot be deserialized.
        is_cut = len(found) < len(taken.records)
        if taken.is_last or taken.is_stopped or is_cut:
            reading.drop()
        end = reading.end
        if not taken.is_last or is_cut:
            end = found[-1].offset + 1
        return found, taken.size_bytes, end

    def _open(
        self, topic_partition: TopicPartition, reading: PartitionPosition
    ) -> bool:
        """Load the records at the position, and return whether there are any."""
        # If a call or iteration ended before it returned these records, read them
        # again.
        if reading.is_ahead:
            reading.drop()
        if reading.records is not None:
            return True
        position = reading.position
        reading.end = self.end(reading.log)
        if position is None or _is_at_end(reading.log, position, reading.end):
            return False
        try:
            reading.records = Ahead(
                topic_record_lists(
                    reading.log,
                    position,
                    reading.end,
                    *topic_partition,
                    isolation=self._settings.isolation_level,
                )
            )
        except OffsetOutOfRangeError as error:
            self.reset(topic_partition, reading, error)
            return False
        return True

    def _handed(self, records: list[TopicRecord]) -> list[TopicRecord]:
        """Return deserialized records, up to the first one that cannot be deserialized.

        The error is raised if that is the first record.
        """
        settings = self._settings
        functions: list[tuple[str, Deserializer]] = []
        for name, function in (
            ("key", settings.key_deserializer),
            ("value", settings.value_deserializer),
        ):
            if function is not None:
                functions.append((name, function))
        found = records
        if functions:
            found = []
            try:
                for record in records:
                    for name, function in functions:
                        record = _with(record, name, function)
                    found.append(record)
            except Exception:
                if not found:
                    raise
        self.records += len(found)
        return found

    def _intercepted_each(
        self,
        reading: PositionFields,
        ahead: list[TopicRecord],
        start: int,
        stop: int,
    ) -> Iterator[TopicRecord]:
        """Do the same as kernel.yield_records(), with the interceptors' records."""
        records = reading.records
        for record in ahead[start:stop]:
            alone = ConsumerRecords(
                {TopicPartition(record.topic, record.partition): [record]}
            )
            given = list(intercepted(self._settings.interceptors, alone).records())
            yield from given[:-1]
            last = given[-1] if given else None
            if reading.records is not records:
                return
            reading.finished = reading.position
            reading.position = record.offset + 1
            # No call here: an interrupt would lose the record.
            if last is not None:
                yield last
            if reading.records is not records:
                return

    def _columns(
        self,
        topic_partition: TopicPartition,
        reading: PartitionPosition,
        max_bytes: int,
    ) -> Columns | None:
        position = reading.position
        if reading.is_paused or position is None:
            return None
        end = self.end(reading.log)
        if _is_at_end(reading.log, position, end):
            return None
        found: list[RecordColumns] = []
        size_bytes = 0
        try:
            for columns in reading.log.scan(
                position, end, isolation=self._settings.isolation_level
            ):
                found.append(columns)
                size_bytes += _size_bytes(columns)
                if size_bytes >= max_bytes:
                    # The next call continues from there. Only a complete scan may skip
                    # the offsets at its end that have no records.
                    return Columns(
                        topic_partition,
                        position,
                        int(columns.offsets[-1]) + 1,
                        found,
                        size_bytes,
                    )
        except LogcoreError as error:
            # The found records are returned first. The next call raises the error, or
            # reports deleted records.
            if found:
                return Columns(
                    topic_partition,
                    position,
                    int(found[-1].offsets[-1]) + 1,
                    found,
                    size_bytes,
                )
            if not isinstance(error, OffsetOutOfRangeError):
                raise
            self.reset(topic_partition, reading, error)
            return None
        return Columns(topic_partition, position, end, found, size_bytes)


def columns_of(found: Sequence[Columns]) -> dict[TopicPartition, list[RecordColumns]]:
    return {each.partition: each.columns for each in found if each.columns}


def check_at_least_1(name: str, value: int) -> None:
    """Raise InvalidConfigError unless an argument that limits a read is at least 1."""
    if value < 1:
        raise InvalidConfigError("a read", expected=f"{name} from 1", found=value)


def misplaced(
    log: Log, start: int, committed: Committed
) -> OffsetOutOfRangeError | None:
    """Return why reading cannot continue from a committed offset, or None.

    `start` is the start offset of the log.
    """
    end = log.high_watermark
    if not start <= committed.offset <= end:
        return OffsetOutOfRangeError(
            "the committed offset is not in the log",
            path=log.path,
            offset=committed.offset,
            expected=f"{start} to {end}",
        )
    if committed.leader_epoch < 0:
        return None
    epoch_end = log.log_end_offset
    if committed.leader_epoch <= log.leader_epoch:
        epoch_end = log.end_of_epoch(committed.leader_epoch)[1]
    elif committed.offset > start:
        # The log has no such epoch, because all of its records were truncated.
        epoch_end = -1
    if epoch_end >= committed.offset:
        return None
    return LogTruncatedError(
        f"the log was truncated below the committed offset: it has less of leader epoch {committed.leader_epoch}",
        path=log.path,
        offset=committed.offset,
        expected=f"an epoch that ends at {committed.offset} or later",
        found="no such epoch" if epoch_end < 0 else f"its end at {epoch_end}",
    )


def _is_at_end(log: Log, position: int, end: int) -> bool:
    """Return whether there is no record to read. `end` is the result of Fetcher.end().

    A position may be above the last stable offset, if seek() set it or a
    read_uncommitted consumer committed it. It remains there, because moving it back
    would return records twice. Above the high watermark it is outside the log, and
    reading raises.
    """
    return end <= position <= max(end, log.high_watermark)


def _do_not_refresh(log: Log) -> None:
    """Do nothing: no other process writes the log."""


def _size_bytes(columns: RecordColumns) -> int:
    """Return the size of keys and values. A null has the size -1 in the columns."""
    size_bytes = 0
    for sizes in (columns.key_sizes, columns.value_sizes):
        size_bytes += int(sizes.sum(dtype=np.int64)) + int(np.count_nonzero(sizes < 0))
    return size_bytes


def _with(record: TopicRecord, name: str, function: Deserializer) -> TopicRecord:
    """Apply a deserializer to the key or value of a record. A null remains null."""
    given = getattr(record, name)
    if given is None:
        return record
    return record._replace(**{name: function(given)})
