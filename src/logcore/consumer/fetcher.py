"""Reads the records of a consumer's partitions, one partition after the other.

Rules:
- Partitions are read round-robin, starting after the one that was read last.
- A position moves when the records are returned to the caller: in deliver(), or when
  an iteration yields. An error or interrupt before that leaves the position unchanged,
  so that no record is skipped.
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

from logcore.consumer.positions import Move, PartitionPosition, ReadAhead
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
#: Yields the records of a list between two indexes, and moves the position.
_YieldRecords = Callable[
    [PositionFields, list[TopicRecord], int, int], Iterator[TopicRecord]
]
#: Default max_bytes of Consumer.poll_columns().
MAX_COLUMN_BYTES: Final = 16 << 20
#: Maximum time for which an iteration runs before it checks the group.
_MAX_ITERATION_MS: Final = 100
#: Number of records that an iteration reads ahead.
_READ_AHEAD_RECORDS: Final = 128
#: Maximum number of records between two readings of the clock.
_RECORDS_PER_CHECK: Final = 16


@attrs.frozen
class Columns:
    """The records of a partition with offsets in [start, end), as columns."""

    partition: TopicPartition
    start: int
    end: int
    columns: list[RecordColumns]
    #: The size of the keys and values.
    size_bytes: int


def _records_until(check_ms: int, now_ms: int, previous_ms: int, count: int) -> int:
    """Return how many records to yield before the clock is read again.

    Reading the clock costs as much as yielding a record. `count` records have taken the
    time since previous_ms. The next ones may take a quarter of the time until check_ms.
    """
    took_ms = max(1, now_ms - previous_ms)
    fitting = count * (check_ms - now_ms) // (4 * took_ms)
    return min(_RECORDS_PER_CHECK, max(1, fitting))


class Fetcher:
    """Reads records from partitions."""

    def __init__(
        self,
        fs: FS,
        read_positions: Mapping[TopicPartition, PartitionPosition],
        settings: ConsumerSettings,
        *,
        is_read_only: bool,
        is_shared: bool,
    ) -> None:
        """Initialize the fetcher. The consumer adds and removes `read_positions`."""
        self._fs = fs
        self._read_positions = read_positions
        self._settings = settings
        self._is_read_only = is_read_only
        #: Makes appends of other processes to a log visible.
        self.follow: Callable[[Log], object] = (
            Log.refresh if is_shared else _do_not_refresh
        )
        self._next_partition = 0  # index of the next partition to read
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

    def set_initial_position(
        self,
        topic_partition: TopicPartition,
        read_position: PartitionPosition,
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
        read_position.seek_to(self._initial_position(read_position.log, rule))

    def _initial_position(self, log: Log, rule: str) -> int:
        """Return the position that auto_offset_reset defines."""
        if rule == "earliest":
            return log.log_start_offset
        end = self.end(log)
        duration_ms = self._settings.reset_duration_ms
        if rule == "latest" or duration_ms is None:
            return end
        offset = log.offset_for_timestamp(self._fs.now_ms() - duration_ms)
        if offset is None:  # all records are older
            return end
        return min(offset, end)

    def reset(
        self,
        topic_partition: TopicPartition,
        read_position: PartitionPosition,
        error: OffsetOutOfRangeError,
    ) -> None:
        """Set a new position after retention or truncation removed the current one.

        Raises:
            OffsetOutOfRangeError: auto_offset_reset is "none".
        """
        rule = self._settings.auto_offset_reset
        if rule == "none":
            raise error
        read_position.seek_to(self._initial_position(read_position.log, rule))
        group = self._settings.group_id
        log_line(
            "consumer",
            WARNING,
            "group %s continues %s at offset %d: %s",
            group,
            topic_partition,
            read_position.position,
            error,
        )

    # -- reading records ---------------------------------------------------------------

    def finish(self) -> None:
        """Mark all returned records as processed."""
        # A copy, because an operation in another thread may remove partitions; see
        # logcore.aio.
        for read_position in list(self._read_positions.values()):
            read_position.finished = read_position.position

    def has_records(self) -> bool:
        """Return whether any partition has records at its position."""
        return any(
            self._has_records(read_position)
            for read_position in list(self._read_positions.values())
        )

    def find_columns(self, max_bytes: int) -> list[Columns]:
        """Read the available columns of the partitions, round-robin, up to max_bytes.

        The size counts keys and values. No position moves, except one that is not in
        the log.
        """
        all_columns: list[Columns] = []
        order = list(self._read_positions)
        first = self._next_partition
        remaining_bytes = max_bytes
        for step in range(len(order)):
            partition = order[(first + step) % len(order)]
            try:
                columns = self._read_columns(
                    partition, self._read_positions[partition], remaining_bytes
                )
            except Exception:
                if all_columns:  # as in poll()
                    break
                raise
            if columns is not None:
                all_columns.append(columns)
                remaining_bytes -= columns.size_bytes
                self._next_partition = (first + step + 1) % len(order)
            if remaining_bytes <= 0:
                break
        return all_columns

    def moves_for(self, all_columns: list[Columns]) -> list[Move]:
        """Return the moves for deliver() after find_columns().

        The list is empty if there are no records, or if a position was moved since
        then. In that case, the caller must find columns again.
        """
        moves: list[Move] = []
        for columns in all_columns:
            read_position = self._read_positions.get(columns.partition)
            if read_position is None or read_position.position != columns.start:
                return []
            read_position.drop()
            if columns.columns:
                moves.append(Move(read_position, columns.start, columns.end))
            else:
                read_position.position = columns.end
        self.records += sum(
            len(part) for columns in all_columns for part in columns.columns
        )
        return moves

    def deliver(self, moves: Sequence[Move], result: _T) -> _T:
        """Move the positions and return `result`.

        The caller must return the result immediately, outside of any `with` block. An
        interrupt moves all positions back, because the user does not get the records. A
        position that has changed since the records were read is not moved, for example
        if an interceptor has called seek().
        """
        current = [move for move in moves if move.read_position.position == move.start]
        try:
            for read_position, _, end in current:
                read_position.position = end
                read_position.has_undelivered = False
            return result
        except BaseException:
            for read_position, start, _ in current:
                read_position.seek_to(start)
            raise

    def open_next_partition(self) -> PartitionPosition | None:
        """Return the next partition that has records, round-robin, or None."""
        order = list(self._read_positions)
        for step in range(len(order)):
            index = (self._next_partition + step) % len(order)
            read_position = self._read_positions[order[index]]
            if not read_position.is_paused and self._open(order[index], read_position):
                self._next_partition = (index + 1) % len(order)
                return read_position
        return None

    def runs(self, read_position: PartitionPosition) -> Iterator[Iterator[TopicRecord]]:
        """Yield iterators of records until the partition ends or the caller must stop.

        The iteration stops when the position is moved, the partition is removed, or the
        group must be checked. In these cases, the records that were read ahead are
        dropped.
        """
        records = read_position.records
        assert records is not None
        settings = self._settings
        is_plain = (
            settings.key_deserializer is None and settings.value_deserializer is None
        )
        # With a deserializer, an error must be raised after the records before it.
        batch_records = 1
        if is_plain:
            batch_records = _READ_AHEAD_RECORDS
        yield_records: _YieldRecords = kernel.yield_records
        if settings.interceptors:
            yield_records = self._yield_intercepted
        previous_ms = self._fs.monotonic_ms()
        check_ms = previous_ms + _MAX_ITERATION_MS
        # Records until the clock is read.
        count = 1
        while True:
            # Step 1: decode the next records ahead of the caller.
            read_position.has_undelivered = True
            try:
                next_records = records.next_records(
                    batch_records, settings.max_partition_fetch_bytes
                )
                records_ahead = self._deserialize(next_records.records)
            except BaseException:
                read_position.drop()
                raise
            if not records_ahead:
                read_position.position = read_position.end
                read_position.drop()
                return
            index = 0
            while index < len(records_ahead):
                # Step 2: yield some of them. The position advances just before each
                # record.
                stop = min(index + count, len(records_ahead))
                yield yield_records(read_position, records_ahead, index, stop)
                if read_position.records is not records:
                    return
                # An interceptor has raised, and the caller continues. The records that
                # the caller did not get must be read again.
                if read_position.position != records_ahead[stop - 1].offset + 1:
                    read_position.drop()
                    return
                index = stop
                # Step 3: end the iteration if the group must be checked.
                now_ms = self._fs.monotonic_ms()
                if now_ms >= check_ms:
                    read_position.drop()
                    return
                count = _records_until(check_ms, now_ms, previous_ms, count)
                previous_ms = now_ms
            if next_records.is_stopped:
                read_position.drop()
                return

    def _has_records(self, read_position: PartitionPosition) -> bool:
        if read_position.is_paused or read_position.log.is_closed:
            return False
        if self._is_read_only:
            read_position.log.refresh()
        if read_position.position is None:
            return False
        return read_position.records is not None or not _is_at_end(
            read_position.log, read_position.position, self.end(read_position.log)
        )

    def fetch(
        self, max_records: int
    ) -> tuple[dict[TopicPartition, list[TopicRecord]], list[Move]]:
        """Return records of the partitions, round-robin, and the moves for deliver().

        At most `max_records` records are returned. The limits are max_partition_fetch_bytes
        for each partition and fetch_max_bytes for all, but at least one run of batches
        is read.
        """
        records_by_partition: dict[TopicPartition, list[TopicRecord]] = {}
        moves: list[Move] = []
        order = list(self._read_positions)
        first = self._next_partition
        remaining = max_records
        remaining_bytes = self._settings.fetch_max_bytes
        for step in range(len(order)):
            partition = order[(first + step) % len(order)]
            read_position = self._read_positions[partition]
            if (
                read_position.is_paused
                or remaining == 0
                or (records_by_partition and remaining_bytes <= 0)
            ):
                continue
            try:
                records, size_bytes, end = self._next_records(
                    partition, read_position, remaining, remaining_bytes
                )
            except Exception:
                # The records of other partitions are returned now. The next call raises
                # the error again.
                if records_by_partition:
                    break
                raise
            if records:
                assert read_position.position is not None
                records_by_partition[partition] = records
                moves.append(Move(read_position, read_position.position, end))
                remaining -= len(records)
                remaining_bytes -= size_bytes
                self._next_partition = (first + step + 1) % len(order)
            elif end:
                read_position.position = end
        return records_by_partition, moves

    def _next_records(
        self,
        topic_partition: TopicPartition,
        read_position: PartitionPosition,
        max_records: int,
        max_bytes: int,
    ) -> tuple[list[TopicRecord], int, int]:
        """Return records of one partition, the size of their batches, and the new
        position, or 0 if the position does not move.
        """
        if not self._open(topic_partition, read_position):
            return [], 0, 0
        assert read_position.records is not None
        # deliver() resets this. After an interrupt before that, the records are read
        # again.
        read_position.has_undelivered = True
        try:
            next_records = read_position.records.next_records(
                max_records, min(max_bytes, self._settings.max_partition_fetch_bytes)
            )
            delivered = self._deserialize(next_records.records)
        except BaseException:
            read_position.drop()
            raise
        # A record could not be deserialized. The next call begins with this record.
        stopped_early = len(delivered) < len(next_records.records)
        if next_records.is_last or next_records.is_stopped or stopped_early:
            read_position.drop()
        end = read_position.end
        if not next_records.is_last or stopped_early:
            end = delivered[-1].offset + 1
        return delivered, next_records.size_bytes, end

    def _open(
        self, topic_partition: TopicPartition, read_position: PartitionPosition
    ) -> bool:
        """Load the records at the position, and return whether there are any."""
        # If a call or iteration ended before it returned these records, read them
        # again.
        if read_position.has_undelivered:
            read_position.drop()
        if read_position.records is not None:
            return True
        position = read_position.position
        read_position.end = self.end(read_position.log)
        if position is None or _is_at_end(
            read_position.log, position, read_position.end
        ):
            return False
        try:
            read_position.records = ReadAhead(
                topic_record_lists(
                    read_position.log,
                    position,
                    read_position.end,
                    *topic_partition,
                    isolation=self._settings.isolation_level,
                )
            )
        except OffsetOutOfRangeError as error:
            self.reset(topic_partition, read_position, error)
            return False
        return True

    def _deserialize(self, records: list[TopicRecord]) -> list[TopicRecord]:
        """Deserialize records, up to the first record that cannot be deserialized.

        If that is the first record, its error is raised.
        """
        settings = self._settings
        functions: list[tuple[str, Deserializer]] = []
        for name, function in (
            ("key", settings.key_deserializer),
            ("value", settings.value_deserializer),
        ):
            if function is not None:
                functions.append((name, function))
        deserialized = records
        if functions:
            deserialized = []
            try:
                for record in records:
                    for name, function in functions:
                        record = _deserialize_field(record, name, function)
                    deserialized.append(record)
            except Exception:
                if not deserialized:
                    raise
        self.records += len(deserialized)
        return deserialized

    def _yield_intercepted(
        self,
        read_position: PositionFields,
        records_ahead: list[TopicRecord],
        start: int,
        stop: int,
    ) -> Iterator[TopicRecord]:
        """Yield the records of kernel.yield_records() as the interceptors return them."""
        records = read_position.records
        for record in records_ahead[start:stop]:
            single = ConsumerRecords(
                {TopicPartition(record.topic, record.partition): [record]}
            )
            intercepted_records = list(
                intercepted(self._settings.interceptors, single).records()
            )
            yield from intercepted_records[:-1]
            last = intercepted_records[-1] if intercepted_records else None
            if read_position.records is not records:
                return
            read_position.finished = read_position.position
            read_position.position = record.offset + 1
            # No call here: an interrupt would lose the record.
            if last is not None:
                yield last
            if read_position.records is not records:
                return

    def _read_columns(
        self,
        topic_partition: TopicPartition,
        read_position: PartitionPosition,
        max_bytes: int,
    ) -> Columns | None:
        position = read_position.position
        if read_position.is_paused or position is None:
            return None
        end = self.end(read_position.log)
        if _is_at_end(read_position.log, position, end):
            return None
        column_list: list[RecordColumns] = []
        size_bytes = 0
        try:
            for columns in read_position.log.scan(
                position, end, isolation=self._settings.isolation_level
            ):
                column_list.append(columns)
                size_bytes += _size_bytes(columns)
                if size_bytes >= max_bytes:
                    # The next call continues after these columns. Only after a complete
                    # scan, the position may also skip offsets without records.
                    return Columns(
                        topic_partition,
                        position,
                        int(columns.offsets[-1]) + 1,
                        column_list,
                        size_bytes,
                    )
        except LogcoreError as error:
            # The columns before the error are returned first. The next call raises the
            # error or calls reset().
            if column_list:
                return Columns(
                    topic_partition,
                    position,
                    int(column_list[-1].offsets[-1]) + 1,
                    column_list,
                    size_bytes,
                )
            if not isinstance(error, OffsetOutOfRangeError):
                raise
            self.reset(topic_partition, read_position, error)
            return None
        return Columns(topic_partition, position, end, column_list, size_bytes)


def columns_of(
    all_columns: Sequence[Columns],
) -> dict[TopicPartition, list[RecordColumns]]:
    return {
        columns.partition: columns.columns for columns in all_columns if columns.columns
    }


def check_at_least_1(name: str, value: int) -> None:
    """Raise InvalidConfigError unless an argument that limits a read is at least 1."""
    if value < 1:
        raise InvalidConfigError("a read", expected=f"{name} from 1", found=value)


def position_error(
    log: Log, start: int, committed: Committed
) -> OffsetOutOfRangeError | None:
    """Return the error if reading cannot continue from a committed offset, or None.

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


def _deserialize_field(
    record: TopicRecord, name: str, function: Deserializer
) -> TopicRecord:
    """Apply a deserializer to the key or value of a record. A null remains null."""
    value = getattr(record, name)
    if value is None:
        return record
    return record._replace(**{name: function(value)})
