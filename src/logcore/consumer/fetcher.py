"""Records of the partitions that a consumer reads: one partition after the other, from its position on.

Rules:
- Partitions are served in turns, beginning behind the one that was served last.
- A position moves when the caller is given the records, in the call that returns them: hand_out(), or the step of an
  iteration that yields. After an error or an interrupt before that it is unchanged, and nothing is passed over.
- Records before damage, and before one that a deserializer refuses, are handed out first. The next call raises.
- Records may be read ahead, until somebody drops them: Reading.drop().
- Where a position is not in the log, auto_offset_reset says where reading goes on.

Not here: which partitions are read (assignment.py), commits (commits.py) and waiting (consumer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import attrs
import numpy as np

from logcore.consumer.membership import TopicPartition
from logcore.consumer.readings import Ahead, Move, Reading
from logcore.consumer.values import ConsumerRecords, ConsumerSettings, Deserializer, intercepted
from logcore.errors import InvalidConfigError, LogcoreError, LogTruncatedError, NoOffsetError, OffsetOutOfRangeError
from logcore.format.columns import RecordColumns
from logcore.format.grouprecords import Committed
from logcore.fs import FS
from logcore.kernels import TopicRecord
from logcore.log import Log
from logcore.notices import WARNING, tell
from logcore.reader import placed_lists

_T = TypeVar("_T")
#: What one poll of columns takes by default; see Consumer.poll_columns().
MAX_COLUMN_BYTES: Final = 16 << 20
#: How long the iteration goes on before it looks after the group.
_LOOK_WHILE_ITERATING_MS: Final = 100
#: Records that the iteration reads ahead, and those between two looks at the clock while the loop is fast.
_READ_AHEAD: Final = 128
_RECORDS_A_LOOK: Final = 16


@attrs.frozen
class Columns:
    """What lies in [start, end) of a partition. size_bytes: of keys and values."""

    partition: TopicPartition
    start: int
    end: int
    columns: list[RecordColumns]
    size_bytes: int


class Fetcher:
    """Takes records from partitions. follow: brings what other processes have appended to a log into view."""

    def __init__(
        self,
        fs: FS,
        readings: Mapping[TopicPartition, Reading],
        settings: ConsumerSettings,
        *,
        is_read_only: bool,
        is_shared: bool,
    ) -> None:
        """readings: what is read now; the consumer adds and removes partitions."""
        self._fs = fs
        self._readings = readings
        self._settings = settings
        self._is_read_only = is_read_only
        self.follow: Callable[[Log], object] = Log.refresh if is_shared else _stay
        self._turn = 0  # where the next reading begins
        self.records = 0  # that were decoded, for the metrics

    # -- how far a log goes ------------------------------------------------------------------------------------------

    def start(self, log: Log) -> int:
        self.follow(log)
        return log.log_start_offset

    def end(self, log: Log) -> int:
        """Up to where this consumer may read, by its isolation level."""
        self.follow(log)
        if self._settings.isolation_level == "read_committed":
            return log.last_stable_offset
        return log.high_watermark

    def begin(self, one: TopicPartition, reading: Reading, *, is_added: bool) -> None:
        """Places a partition for which nothing was committed. is_added: it is new in its topic, and is read whole."""
        rule = self._settings.auto_offset_reset
        if rule == "none":
            raise NoOffsetError(
                f"nothing was committed for {one.topic}-{one.partition}",
                expected='auto_offset_reset="earliest" or "latest", or a commit or a seek',
            )
        if is_added:
            rule = "earliest"
        reading.place(self._beginning(reading.log, rule))

    def _beginning(self, log: Log, rule: str) -> int:
        """Where auto_offset_reset says that reading begins."""
        if rule == "earliest":
            return log.log_start_offset
        end = self.end(log)
        duration_ms = self._settings.reset_duration_ms
        if rule == "latest" or duration_ms is None:
            return end
        found = log.offset_for_timestamp(self._fs.now_ms() - duration_ms)
        if found is None:  # all is older
            return end
        return min(found, end)

    def reset(self, one: TopicPartition, reading: Reading, error: OffsetOutOfRangeError) -> None:
        """The position is not in the log: retention deleted it, or the log was truncated."""
        rule = self._settings.auto_offset_reset
        if rule == "none":
            raise error
        reading.place(self._beginning(reading.log, rule))
        group = self._settings.group_id
        tell("consumer", WARNING, "group %s continues %s at offset %d: %s", group, one, reading.position, error)

    # -- what is handed out ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All that was handed out is finished."""
        for reading in list(self._readings.values()):  # a step in another thread may give some up; see logcore.aio
            reading.finished = reading.position

    def has_records(self) -> bool:
        """Whether there is anything to read behind the positions."""
        return any(self._has_records(reading) for reading in list(self._readings.values()))

    def find_columns(self, max_bytes: int) -> list[Columns]:
        """What there is now, of the partitions in turns, until so many bytes of keys and values were found. No position
        moves, but for those that are not in the log.
        """
        found: list[Columns] = []
        order = list(self._readings)
        first = self._turn
        left = max_bytes
        for step in range(len(order)):
            one = order[(first + step) % len(order)]
            try:
                columns = self._columns(one, self._readings[one], left)
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

    def moves_behind(self, found: list[Columns]) -> list[Move]:
        """The moves for hand_out(). Empty if there are no records, or a position was moved since: find again then."""
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
        """Moves the positions and returns `given`, which the caller returns at once, outside of any `with` block.

        An interrupt moves all positions back, because the caller's caller never gets the records. A position that was
        moved since the records were found, as an interceptor may do with seek(), is not moved here.
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

    def opened(self) -> Reading | None:
        """The next partition in turn that has records, with those of them that there are now."""
        order = list(self._readings)
        for step in range(len(order)):
            at = (self._turn + step) % len(order)
            reading = self._readings[order[at]]
            if not reading.is_paused and self._open(order[at], reading):
                self._turn = (at + 1) % len(order)
                return reading
        return None

    def one_by_one(self, reading: Reading) -> Iterator[TopicRecord]:
        """Until the records end, somebody moves the position or takes the partition, or the group has to be checked.

        Those who do so drop what is read ahead.
        """
        records = reading.records
        assert records is not None
        settings = self._settings
        is_plain = settings.key_deserializer is None and settings.value_deserializer is None
        at_once = 1  # a record that cannot be decoded comes after those before it
        if is_plain:
            at_once = _READ_AHEAD
        look_ms = self._fs.monotonic_ms() + _LOOK_WHILE_ITERATING_MS
        until_look = 1
        while True:
            reading.is_ahead = True
            try:
                taken = records.take(at_once, settings.max_partition_fetch_bytes)
                ahead = self._handed(taken.records)
            except BaseException:
                reading.drop()
                raise
            if not ahead:
                reading.position = reading.end
                reading.drop()
                return
            for record in ahead:
                last: TopicRecord | None = record
                if settings.interceptors:
                    given = self._intercepted(record)
                    yield from given[:-1]
                    last = given[-1] if given else None
                    if reading.records is not records:
                        return
                reading.finished = reading.position
                reading.position = record.offset + 1
                if last is not None:
                    yield last
                if reading.records is not records:
                    return
                until_look -= 1
                if until_look:
                    continue
                now_ms = self._fs.monotonic_ms()
                if now_ms >= look_ms:
                    reading.drop()
                    return
                # The clock takes as long as the rest: while the loop is fast, it is asked less often.
                until_look = 1
                if look_ms - now_ms > _LOOK_WHILE_ITERATING_MS // 2:
                    until_look = _RECORDS_A_LOOK
            if taken.is_stopped:
                reading.drop()
                return

    def _has_records(self, reading: Reading) -> bool:
        if reading.is_paused or reading.log.is_closed:
            return False
        if self._is_read_only:
            reading.log.refresh()
        if reading.position is None:
            return False
        return reading.records is not None or not _is_at_end(reading.log, reading.position, self.end(reading.log))

    def fetch(self, most: int) -> tuple[dict[TopicPartition, list[TopicRecord]], list[Move]]:
        """Records of the partitions in turns, beginning behind the one that was served last: at most so many, of each
        partition of max_partition_fetch_bytes and of all of fetch_max_bytes, but at least of one run of batches. Also
        the moves for hand_out().
        """
        found: dict[TopicPartition, list[TopicRecord]] = {}
        moves: list[Move] = []
        order = list(self._readings)
        first = self._turn
        left = most
        left_bytes = self._settings.fetch_max_bytes
        for step in range(len(order)):
            one = order[(first + step) % len(order)]
            reading = self._readings[one]
            if reading.is_paused or left == 0 or (found and left_bytes <= 0):
                continue
            try:
                records, size_bytes, end = self._take(one, reading, left, left_bytes)
            except Exception:
                if found:  # what others gave is handed out; the error comes again with the next call
                    break
                raise
            if records:
                assert reading.position is not None
                found[one] = records
                moves.append(Move(reading, reading.position, end))
                left -= len(records)
                left_bytes -= size_bytes
                self._turn = (first + step + 1) % len(order)
            elif end:
                reading.position = end
        return found, moves

    def _take(
        self, one: TopicPartition, reading: Reading, most: int, most_bytes: int
    ) -> tuple[list[TopicRecord], int, int]:
        """Records of one partition, the bytes of the batches that were begun for them, and where the position is to be
        behind them: 0 if it stays.
        """
        if not self._open(one, reading):
            return [], 0, 0
        assert reading.records is not None
        reading.is_ahead = True  # until they are handed out, so that an interrupt passes none of them over
        try:
            taken = reading.records.take(most, min(most_bytes, self._settings.max_partition_fetch_bytes))
            found = self._handed(taken.records)
        except BaseException:
            reading.drop()
            raise
        is_cut = len(found) < len(taken.records)  # the next call meets the record that cannot be deserialized
        if taken.is_last or taken.is_stopped or is_cut:
            reading.drop()
        end = reading.end
        if not taken.is_last or is_cut:
            end = found[-1].offset + 1
        return found, taken.size_bytes, end

    def _open(self, one: TopicPartition, reading: Reading) -> bool:
        """Whether there are records behind the position; reading.records are those."""
        if reading.is_ahead:  # those of a call or an iteration that ended before it handed them out are read again
            reading.drop()
        if reading.records is not None:
            return True
        position = reading.position
        reading.end = self.end(reading.log)
        if position is None or _is_at_end(reading.log, position, reading.end):
            return False
        try:
            reading.records = Ahead(
                placed_lists(reading.log, position, reading.end, *one, isolation=self._settings.isolation_level)
            )
        except OffsetOutOfRangeError as error:
            self.reset(one, reading, error)
            return False
        return True

    def _handed(self, records: list[TopicRecord]) -> list[TopicRecord]:
        """Records as the deserializers give them, up to the first that cannot be deserialized. Raises the error if that
        is the first of all.
        """
        settings = self._settings
        functions: list[tuple[str, Deserializer]] = []
        for name, function in (("key", settings.key_deserializer), ("value", settings.value_deserializer)):
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

    def _intercepted(self, record: TopicRecord) -> list[TopicRecord]:
        """A record of an iteration as the interceptors give it."""
        alone = ConsumerRecords({TopicPartition(record.topic, record.partition): [record]})
        return list(intercepted(self._settings.interceptors, alone).records())

    def _columns(self, one: TopicPartition, reading: Reading, max_bytes: int) -> Columns | None:
        position = reading.position
        if reading.is_paused or position is None:
            return None
        end = self.end(reading.log)
        if _is_at_end(reading.log, position, end):
            return None
        found: list[RecordColumns] = []
        size_bytes = 0
        try:
            for columns in reading.log.scan(position, end, isolation=self._settings.isolation_level):
                found.append(columns)
                size_bytes += _size_bytes(columns)
                if size_bytes >= max_bytes:
                    # The rest is found from there on. Only a whole stretch steps over what is at its end and no record.
                    return Columns(one, position, int(columns.offsets[-1]) + 1, found, size_bytes)
        except LogcoreError as error:
            if found:  # handed out first; the next call meets the error, or what has removed the records since
                return Columns(one, position, int(found[-1].offsets[-1]) + 1, found, size_bytes)
            if not isinstance(error, OffsetOutOfRangeError):
                raise
            self.reset(one, reading, error)
            return None
        return Columns(one, position, end, found, size_bytes)


def columns_of(found: Sequence[Columns]) -> dict[TopicPartition, list[RecordColumns]]:
    return {each.partition: each.columns for each in found if each.columns}


def check_columns(timeout_ms: int, max_bytes: int) -> None:
    """Raises InvalidConfigError."""
    if timeout_ms < 0 or max_bytes < 1:
        raise InvalidConfigError(
            "poll_columns", expected="timeout_ms from 0, max_bytes from 1", found=f"{timeout_ms}, {max_bytes}"
        )


def misplaced(log: Log, start: int, committed: Committed) -> OffsetOutOfRangeError | None:
    """Why reading cannot go on from what was committed, or None. start: where the log begins."""
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
        # The log knows no such epoch: all of it was cut off.
        epoch_end = -1
    if epoch_end >= committed.offset:
        return None
    return LogTruncatedError(
        f"the log was cut below the committed offset: it holds less of leader epoch {committed.leader_epoch}",
        path=log.path,
        offset=committed.offset,
        expected=f"an epoch that ends at {committed.offset} or later",
        found="no such epoch" if epoch_end < 0 else f"its end at {epoch_end}",
    )


def _is_at_end(log: Log, position: int, end: int) -> bool:
    """Whether there is nothing to read. end: as Fetcher.end() says.

    A position may lie behind the last stable offset, where a consumer that reads what is not committed, or seek(), put
    it. It waits there: going back would give records again. Behind the high watermark it is outside the log, which the
    reading says.
    """
    return end <= position <= max(end, log.high_watermark)


def _stay(log: Log) -> None:
    """This process alone writes the log: there is nothing to follow."""


def _size_bytes(columns: RecordColumns) -> int:
    """Of keys and values; a null has the size -1."""
    size_bytes = 0
    for sizes in (columns.key_sizes, columns.value_sizes):
        size_bytes += int(sizes.sum(dtype=np.int64)) + int(np.count_nonzero(sizes < 0))
    return size_bytes


def _with(record: TopicRecord, name: str, function: Deserializer) -> TopicRecord:
    """A record with its key or value as the function gives it; null stays null."""
    given = getattr(record, name)
    if given is None:
        return record
    return record._replace(**{name: function(given)})
