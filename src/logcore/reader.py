"""The reading half of a partition, in its writing process or in any other.

Rules:
- Readers acquire no lock and write nothing. They see records up to the high watermark.
- A read-only log reads the state of its files when it is opened, and again in refresh()
  and tail().
- Records below the high watermark remain readable until they are deleted or truncated,
  and are never changed.

This module does not decode (partition/scan.py does) and does not append (log.py does).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from logcore.config import Durability, LogConfig
from logcore.debug_checks import VERIFIES
from logcore.errors import (
    CorruptBatchError,
    InvalidConfigError,
    InvalidRecordError,
    LogClosedError,
    LogcoreError,
    LogNotFoundError,
    OffsetOutOfRangeError,
)
from logcore.format.columns import ARROW_COLUMNS, RecordColumns
from logcore.fs import FS
from logcore.kernels import Record, TopicRecord, kernel, layout
from logcore.kernels.layout import Time
from logcore.metadata import checkpoint
from logcore.metadata.filenames import is_file_of_log, partition_of
from logcore.partition.aborted_transactions import PartitionTransactions, control_types
from logcore.partition.file_view import FileView
from logcore.partition.gaps import Gaps, check_growing
from logcore.partition.persisted import read_persisted_gaps
from logcore.partition.scan import Cursor, LogRange, Scan, Span, slot_of
from logcore.partition.state import PartitionState
from logcore.recordbatch import SLICE_ROWS, RecordBatch, time_ms
from logcore.segment import GrowingSegment, PreadSegment, Segment

Isolation = Literal["read_uncommitted", "read_committed"]


def check_is_partition(fs: FS, directory: str) -> None:
    """Raise LogNotFoundError unless a directory is a partition.

    Another directory, opened as a log, would appear as an empty log. A partition
    contains a file of a log. A directory that is empty, because the first file is about
    to be created, must have the name of a partition.
    """
    real = fs.real_path(directory)
    if not fs.is_directory(real):
        raise LogNotFoundError("there is no partition directory here", path=directory)
    names = fs.listdir(real)
    known_names = (*checkpoint.PARTITION_FILES, checkpoint.LOCK_RECORD)
    if any(
        name.removesuffix(".tmp") in known_names or is_file_of_log(name)
        for name in names
    ):
        return
    if not names and partition_of(os.path.basename(real)) is not None:
        return
    partitions = sorted(
        name
        for name in names
        if partition_of(name) is not None and fs.is_directory(os.path.join(real, name))
    )
    if partitions:
        raise LogNotFoundError(
            f"this is a directory of partitions: open it with logcore.open_dir(), or one of them, such as "
            f"{os.path.join(directory, partitions[0])}",
            path=directory,
        )
    raise LogNotFoundError(
        "this is not a partition directory: it contains no file of a log",
        path=directory,
        expected="files like 00000000000000000000.log",
        found=", ".join(sorted(names)[:5]) or "nothing",
    )


class LogReader:
    """The reading half of a log. Users work with it through Log.

    All methods may be called from several threads.
    """

    def __init__(
        self,
        fs: FS,
        directory: str,
        state: PartitionState,
        policy: Durability,
        *,
        is_writing: bool = False,
    ) -> None:
        """Create a reader. Users call logcore.open().

        `state` is the state that a writer has opened, or an empty one that refresh()
        fills.
        """
        self.path = directory
        self.durability = policy
        self._fs = fs
        self._state = state
        self._is_writing = is_writing
        self._view = FileView(fs, directory, state)
        self._forks = fs.forks
        fs.after_fork(self._begin_child)

    def _begin_child(self) -> None:
        self._state.make_locks()
        # A thread of the parent may have been changing it during the fork.
        self._state.transactions = None

    @property
    def config(self) -> LogConfig:
        """The settings."""
        return self._state.config

    def _check_open(self) -> None:
        if self._state.is_closed:
            raise LogClosedError("the log is closed", path=self.path)

    @property
    def is_closed(self) -> bool:
        """Whether the log is closed."""
        return self._state.is_closed

    @property
    def times_truncated(self) -> int:
        """A number that grows when truncate() may have removed records.

        It also grows when the writer replaced the last segment for another reason,
        because a reader in another process cannot distinguish the two.
        """
        return len(self._state.truncations) + self._view.replacements

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read."""
        return self._state.log_start

    @property
    def log_end_offset(self) -> int:
        """The offset of the next record."""
        return self._state.end

    @property
    def high_watermark(self) -> int:
        """The end of the visible records.

        This is the durable end if appends wait for a sync, else the log end.
        """
        return self._state.visible

    @property
    def last_stable_offset(self) -> int:
        """The end of the records that read_committed returns.

        This is the first offset of the oldest open transaction, or the high watermark.
        """
        return max(self._state.log_start, self._scan_transactions().last_stable_offset)

    @property
    def known_stable_offset(self) -> int | None:
        """last_stable_offset if no transaction is open and no batch must be read to know
        that, else None.
        """
        state = self._state
        transactions = state.transactions
        # In this order: a scan in another thread adds an open transaction before it
        # raises next_offset, and a writer raises no_transactions_from before visible.
        visible = state.visible
        if (
            transactions is None
            or not state.no_transactions_from <= transactions.next_offset <= visible
            or transactions.open
            # A truncation replaces the state before anything is appended again.
            or transactions is not state.transactions
        ):
            return None
        return visible

    def _scan_transactions(self) -> _Committed:
        """Read the batch headers that were not read before, and return the state.

        The first call reads the headers of the whole log.

        Raises:
            CorruptLogError, CorruptBatchError: a batch is missing or damaged. It may be
                a marker, and records that it aborted would appear as committed.
        """
        with self._state.scanning:
            segments, visible = self._visible_segments()
            state = self._state.transactions
            # Begin at the first existing batch: a transaction may begin below the log
            # start and end above it.
            begin = self._state.log_start
            if segments and segments[0].base_offset < begin:
                begin = segments[0].base_offset
            # If the state ends below the log start, a marker may have been deleted, and
            # its transaction would remain open forever. If it ends above the visible
            # end, the writer has truncated the log, and may append there again.
            if state is None or not begin <= state.next_offset <= visible:
                state = self._state.transactions = PartitionTransactions(
                    next_offset=begin
                )
            # Read `no_transactions_from` after the bound. At and above it, this process
            # has appended no transaction, so the headers need not be read: reading them
            # would make a fetch a third slower.
            if self._state.no_transactions_from <= state.next_offset < visible:
                if VERIFIES:
                    self._check_plain(segments, state.next_offset, visible)
                state.next_offset = visible
            if state.next_offset < visible:
                self._walk_transactions(state, segments, visible)
            # Without a stored end, the end is found by reading headers, and a damaged
            # header ends the search too early.
            if segments and not self._view.is_end_persisted and not self._is_writing:
                self._check_header_at_end(segments[-1], visible)
            return _Committed(state, state.last_stable_offset(visible), segments)

    def _check_plain(self, segments: list[Segment], start: int, end: int) -> None:
        """Assert that no batch in [start, end) belongs to a transaction.

        Errors are ignored, because a damaged batch does not show that the assertion is false.
        """
        with contextlib.suppress(LogcoreError, OSError):
            for _, facts in self._state.gaps.walk(
                segments[max(0, slot_of(segments, start)) :], start, end, crc=False
            ):
                about = facts["attributes"] & (
                    layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT
                )
                assert not np.any((about != 0) & (facts["magic"] == 2)), (
                    self.path,
                    start,
                    end,
                )

    def _walk_transactions(
        self, state: PartitionTransactions, segments: list[Segment], end: int
    ) -> None:
        """Add the batches between the end of the state and `end` to the state."""
        segments = segments[max(0, slot_of(segments, state.next_offset)) :]
        for segment, facts in self._state.gaps.walk(
            segments, state.next_offset, end, crc=False
        ):
            for row in np.flatnonzero(
                facts["attributes"] & layout.TRANSACTIONAL_BIT != 0
            ).tolist():
                batch = segment.batch(int(facts["position"][row]))
                # A damaged header could make committed records appear aborted.
                if batch is not None:
                    batch.verify()
            state.add(facts, control_types(segment))

    def _check_header_at_end(self, segment: Segment, end: int) -> None:
        """Check the batch header after the end, in a log that another process writes.

        Raises:
            CorruptBatchError: the header is not the result of a torn write. The batches
                after it may be markers.
        """
        for _, position, why in segment.walk(segment.find(end), crc=False):
            if why not in (layout.WALK_END, layout.WALK_LIMIT, layout.WALK_SHORT):
                raise CorruptBatchError(
                    layout.WALK_REASONS[why], path=segment.path, position=position
                )

    def read(
        self,
        start: int,
        end: int | None = None,
        *,
        isolation: Isolation = "read_uncommitted",
        max_bytes: int | None = None,
    ) -> Iterator[Record]:
        """Return an iterator over the records with start <= offset < end, in order.

        `end` is fixed by this call; by default it is the high watermark. With isolation
        "read_committed", the read stops at the last stable offset and leaves out
        aborted transactions. With `max_bytes`, it stops after about that many bytes of
        batches, but not before one batch. Control batches are never delivered. The CRC
        of every batch is checked.

        Raises:
            OffsetOutOfRangeError: raised by this call.
            CorruptBatchError, InvalidRecordError, StorageReadError: raised by the
                iteration when it reaches the batch.
        """
        lists = record_lists(self, start, end, isolation=isolation, max_bytes=max_bytes)
        return itertools.chain.from_iterable(lists)

    def get(self, offset: int) -> Record:
        """Return the record at `offset`, or the next one after a gap.

        Compaction and markers leave gaps.

        Raises:
            OffsetOutOfRangeError: there is no record before the high watermark.
        """
        # There are three ways, each for the cases that the previous one cannot handle:
        # a compiled read from a mapping; one batch, found by the index of its segment;
        # and a read from the offset on, which checks gaps and damage.
        record = kernel.get_fast(self._state, offset)
        if record is not None:
            return record
        visible = self._state.visible
        if self._state.log_start <= offset < visible and not self._state.is_closed:
            segments = self._state.segments
            slot = slot_of(segments, offset)
            if 0 <= slot < len(segments):
                if slot + 1 < len(segments):
                    end = segments[slot + 1].base_offset
                else:
                    end = self._state.end
                is_dense = offset >= self._state.gaps.persisted.dense_from
                if not is_dense:
                    self._state.gaps.check_not_truncated(segments[slot])
                try:
                    found = segments[slot].read_one(offset, end, is_dense)
                except (CorruptBatchError, InvalidRecordError) as error:
                    segments[slot].check_readable(error)
                    raise
                # Without gaps, another offset means a damaged header. Reading from here
                # on reports it.
                if (
                    not isinstance(found, int)
                    and found.offset < visible
                    and (found.offset == offset or not is_dense)
                ):
                    return found
        for record in self.read(offset):
            return record
        raise OffsetOutOfRangeError(
            "there is no record at or after this offset",
            path=self.path,
            offset=offset,
            expected=f"below {self._state.visible}",
        )

    def __iter__(self) -> Iterator[Record]:
        """Iterate over all records up to the high watermark, like read()."""
        return self.read(self.log_start_offset)

    @overload
    def __getitem__(self, place: int) -> Record: ...
    @overload
    def __getitem__(self, place: slice) -> list[Record]: ...
    def __getitem__(self, place: int | slice) -> Record | list[Record]:
        """Return the record at an offset, or the records in a range of offsets.

        A negative offset counts from the high watermark, so log[-1] is the newest record
        unless it was compacted or is a marker. A slice is limited to the log, like one of
        a list, and has no step.

        Raises:
            OffsetOutOfRangeError: there is no record at this offset. The error names the
                next one, if compaction or a marker left a gap.
            InvalidConfigError: the slice has a step.
        """
        start, high_watermark = self.log_start_offset, self.high_watermark
        if isinstance(place, slice):
            if place.step not in (None, 1):
                raise InvalidConfigError(
                    "a slice of a log has no step", found=place.step
                )
            first, stop, _ = place.indices(high_watermark)
            first = max(first, start)
            if first >= stop:
                return []
            return list(self.read(first, stop))
        offset = operator.index(place)
        if offset < 0:
            offset += high_watermark
        found = self.get(offset)
        if found.offset != offset:
            raise OffsetOutOfRangeError(
                "there is no record at this offset, because compaction or a marker left "
                "a gap; get() returns the next one",
                path=self.path,
                offset=offset,
                expected=f"an offset such as {found.offset}",
                found=offset,
            )
        return found

    def batches(
        self, start: int, end: int | None = None, *, max_bytes: int | None = None
    ) -> Iterator[RecordBatch]:
        """Return an iterator over complete batches, control batches included.

        The first batch contains `start`, and the last one contains end - 1. The bytes
        are borrowed from a mapped part of a segment, or from a part that was just read.
        They remain valid as long as the batch is kept. `max_bytes`: stop before the
        batch that would exceed it, but not before the first. A CRC is checked when the
        batch's records or columns are requested.

        Raises the same errors as read().
        """
        return self._stretch(start, end).batches(max_bytes)

    def stored(
        self,
        start: int,
        end: int | None = None,
        *,
        max_bytes: int,
        at_least_one: bool = True,
        up_to: Literal["high_watermark", "log_end"] = "high_watermark",
    ) -> list[memoryview]:
        """Return the bytes of complete batches as stored, for a fetch response.

        The first batch contains `start`. The last one ends at or below `end`, which
        must be the end of a batch; by default, it is the high watermark.
        up_to="log_end" is for a follower, which copies records that consumers may not
        read yet. The result has at most `max_bytes`, but with at_least_one=True it has
        at least one batch if there is one.

        There is one view for each segment. Sealed segments return views of their
        mapping, and the growing segment returns bytes that were just read. Both remain
        valid as long as they are kept. No batch is decoded, and no CRC is checked.

        Raises:
            OffsetOutOfRangeError: `start` is outside the log.
            CorruptBatchError: there is no recognizable batch.
            StorageReadError: a segment cannot be read.
        """
        stretch = self._stretch(start, end, up_to=up_to)
        if start < stretch.end:
            self._state.gaps.check_start(stretch.segments, start)
        views: list[memoryview] = []
        offset = stretch.start  # the next offset to send
        remaining = max(1, max_bytes)
        before: Segment | None = None
        for number, segment in enumerate(stretch.segments, 1):
            if before is not None:
                reached = before.next_offset()
                self._state.gaps.check_segment_end(before, reached, segment.base_offset)
                # A compaction may have joined this segment to the previous one.
                offset = max(offset, reached, segment.base_offset)
            if offset >= stretch.end or segment.base_offset >= stretch.end:
                break
            before = segment
            self._state.gaps.check_not_truncated(segment)
            following = None
            if number < len(stretch.segments):
                following = stretch.segments[number]
            check = self._check_sent(segment, following, offset)
            position = 0
            if offset > segment.base_offset:
                position = segment.find(offset)
            piece, whole = segment.stored(
                position, remaining, stretch.end, at_least_one and not views, check
            )
            if piece:
                views.append(piece)
                remaining -= len(piece)
            if not whole:
                break
        if not views and at_least_one and offset < stretch.end:
            raise CorruptBatchError(
                "no batch can be made out where the log has records",
                path=self.path,
                offset=offset,
            )
        return views

    def _check_sent(
        self, segment: Segment, following: Segment | None, offset: int
    ) -> Callable[[layout.Facts], None]:
        """Return a function that checks the headers in Segment.stored().

        Segment.stored() calls it with the headers of all batches that it returns. The
        function raises CorruptBatchError if a batch is missing from `offset` on.
        """
        expected = offset
        is_first = offset > segment.base_offset  # offset may be inside a batch

        def check(facts: layout.Facts) -> None:
            nonlocal expected, is_first
            if not len(facts):
                return
            if is_first:
                expected = min(offset, int(facts["base_offset"][0]))
            is_first = False
            self._state.gaps.check_order(segment, following, facts, expected)
            expected = int(facts["last_offset"][-1]) + 1

        return check

    def scan(
        self,
        start: int | None = None,
        end: int | None = None,
        *,
        isolation: Isolation = "read_uncommitted",
        columns: Iterable[str] = ARROW_COLUMNS,
    ) -> Scan:
        """Return the records in [start, end) as columns.

        Iterate over the result for RecordColumns, or convert it to pandas, polars or
        Arrow; see Scan. `start` is by default the log start, and `end` the high
        watermark; both are fixed by this call. `columns` selects some of topic,
        partition, offset, timestamp, key, value and headers.

        Raises:
            InvalidConfigError: a column does not exist.
            LogcoreError: the same as for read().
        """
        return Scan([span_of(self, start, end, isolation)], columns)

    def tail(
        self, start: int | None = None, *, timeout: float | None = None
    ) -> Iterator[Record]:
        """Return an iterator over the records from `start` on, and then over new ones.

        `start` is by default the present end. Each record is delivered once, in order.
        The iterator wakes up on appends, including those by other processes. `timeout`
        is the number of seconds without a new record after which the iteration ends;
        None waits forever. The iteration also ends when the log is closed.

        Raises the same errors as read().
        """
        if start is None:
            offset = self._state.visible
        else:
            offset = start
        self._stretch(offset, None)
        return self._tail(tail_together([self], [offset], timeout))

    def _tail(self, followed: Iterator[tuple[int, list[Record]]]) -> Iterator[Record]:
        for _, records in followed:
            yield from records

    def refresh(self) -> bool:
        """Load the changes of other processes; return whether the high watermark moved.

        For logs that are read-only or shared. Does nothing for a log that only this
        process writes.

        Raises:
            LogNotFoundError: the directory was deleted.
        """
        self._check_open()
        if self._is_writing:
            return self._state.follow()
        # A concurrent search for transactions sees the segments before or after the
        # refresh, not a mixture.
        with self._state.lock, self._state.scanning:
            before = self._state.visible
            self._view.refresh()
            return self._state.visible != before

    def offset_for_timestamp(self, timestamp_ms: Time) -> int | None:
        """Return the offset of the first record with at least `timestamp_ms`, or None.

        The rule is Kafka's (ListOffsets, storage format section 11.3): take the first
        segment whose largest timestamp reaches the time, and in it the first record
        that does. A datetime must have a time zone.
        """
        found = self._list_offset_for_timestamp(timestamp_ms, markers=False)
        return None if found is None else found[0]

    def _list_offset_for_timestamp(
        self, timestamp_ms: Time, *, markers: bool
    ) -> tuple[int, int] | None:
        """Return (offset, timestamp) or None; see list_offset_for_timestamp()."""
        self._check_open()
        wanted = time_ms(timestamp_ms)
        assert wanted is not None, "the caller gives a time"
        segments, visible = self._visible_segments()

        def end_of_older(segment: Segment) -> int:
            """Return the end of a segment without late enough batches, else -1."""
            if segment.max_timestamp() >= wanted:
                return -1
            return self._end_if_times_exact(segment, visible)

        # Reads the headers of one segment, at 30 ns each. Its time index could save a
        # part of that, if it is correct. CRCs and order are checked, because a damaged
        # time or offset would hide the record.
        log_start = self._state.log_start
        for segment, facts in self._state.gaps.walk(
            segments, log_start, visible, crc=True, passed=end_of_older
        ):
            for row in np.flatnonzero(facts["max_timestamp"] >= wanted).tolist():
                batch = segment.batch(int(facts["position"][row]))
                if batch is None or (batch.is_control and not markers):
                    continue
                if batch.is_control:
                    place = (
                        int(facts["last_offset"][row]),
                        int(facts["max_timestamp"][row]),
                    )
                    if log_start <= place[0] < visible:
                        return place
                    continue
                for columns in batch.column_slices(
                    SLICE_ROWS, max_size=self._state.config.max_decompressed_bytes
                ):
                    matches = columns.timestamps_ms >= wanted
                    matches &= (columns.offsets >= log_start) & (
                        columns.offsets < visible
                    )
                    if matches.any():
                        first = int(matches.argmax())
                        return int(columns.offsets[first]), int(
                            columns.timestamps_ms[first]
                        )
        return None

    def _visible_segments(self) -> tuple[list[Segment], int]:
        """Return the segments up to the high watermark, and the high watermark."""
        segments, _, visible = self._state.snapshot()
        # A replicated log may have later segments.
        if segments and visible < segments[-1].base_offset:
            segments = segments[: max(1, slot_of(segments, visible - 1) + 1)]
        return segments, visible

    def _end_if_times_exact(self, segment: Segment, visible: int) -> int:
        """Return the end of a segment if its largest timestamp is reliable, else -1.

        It is reliable if it is known without reading the batches.

        Raises:
            CorruptBatchError: the growing segment is damaged below the high watermark.
        """
        if isinstance(segment, GrowingSegment) and not isinstance(
            segment, PreadSegment
        ):
            is_end_persisted = self._view.is_end_persisted or self._is_writing
            return check_growing(
                segment,
                visible,
                self._state.gaps.dense_from,
                is_end_persisted=is_end_persisted,
            )
        _ = segment.max_timestamp()
        if segment.is_max_timestamp_exact:
            return segment.next_offset()
        return -1

    def newest(self) -> tuple[int, int] | None:
        """Return (offset, timestamp_ms) of the record with the largest timestamp.

        Of several, it is the first. Returns None for an empty log.
        """
        return self._newest(markers=False)

    def _newest(self, *, markers: bool) -> tuple[int, int] | None:
        """Return (offset, timestamp_ms) or None; see list_offset_for_max_timestamp()."""
        self._check_open()
        segments, visible = self._visible_segments()

        def end_of(segment: Segment) -> int:
            return self._end_if_times_exact(segment, visible)

        # Check for missing segments and batches, which may have contained the newest
        # record.
        for _ in self._state.gaps.walk(
            segments, self._state.log_start, visible, crc=True, passed=end_of
        ):
            pass
        largest = [segment.max_timestamp() for segment in segments]
        if not segments or max(largest) < 0:
            return None
        found = self._list_offset_for_timestamp(max(largest), markers=markers)
        # The newest record is below the log start, in a segment that is not deleted
        # yet.
        if found is None:
            return self._newest_by_records()
        return found

    def _newest_by_records(self) -> tuple[int, int] | None:
        """Return the result of newest() by reading every record."""
        best: tuple[int, int] | None = None
        for columns in self.scan():
            row = int(columns.timestamps_ms.argmax())
            if best is None or int(columns.timestamps_ms[row]) > best[1]:
                best = int(columns.offsets[row]), int(columns.timestamps_ms[row])
        return best

    def _stretch(
        self,
        start: int,
        end: int | None,
        isolation: Isolation = "read_uncommitted",
        up_to: Literal["high_watermark", "log_end"] = "high_watermark",
        cursor: Cursor | None = None,
    ) -> LogRange:
        """Return the range between two offsets, as the log is now.

        Raises:
            OffsetOutOfRangeError: `start` is outside the log.
            LogClosedError: the log is closed.
            InvalidConfigError: an argument is not valid.
        """
        self._check_open()
        start = _as_offset(start, "start")
        if isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidConfigError(
                "isolation",
                expected="'read_uncommitted' or 'read_committed'",
                found=repr(isolation),
            )
        committed: PartitionTransactions | None = None
        if isolation == "read_committed":
            # All three come from one search, so they match. Records that are appended
            # later belong to no transaction in the state.
            committed, bound, segments = self._scan_transactions()
        elif up_to == "log_end":
            # An append, a roll or a truncation changes the end and the segments
            # together.
            with self._state.lock:
                segments = self._state.segments
                bound = self._state.end
        else:
            segments, bound = self._visible_segments()
        # Checked after the segments were read, because a deletion moves the start
        # before it removes segments.
        if not self._state.log_start <= start <= self._state.end:
            raise OffsetOutOfRangeError(
                "start is outside the log",
                path=self.path,
                offset=start,
                expected=f"{self._state.log_start} to {self._state.end}",
                found=start,
            )
        if end is not None:
            bound = min(bound, _as_offset(end, "end"))
        most = self._state.config.max_decompressed_bytes
        segments = segments[max(0, slot_of(segments, start)) :]
        return LogRange(
            segments, start, bound, committed, most, self._state.gaps, cursor
        )


def _as_offset(given: object, what: str) -> int:
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidConfigError(
            f"{what} is not an offset; offset_for_timestamp() finds the offset of a time",
            expected="an int",
            found=repr(given),
        ) from None


_Kind = TypeVar("_Kind", bound=LogReader)
#: Begins to listen for changes of logs. Returns a function that blocks until there are
#: new records.
_Waiting = Callable[
    [contextlib.ExitStack, "Sequence[LogTail]", "float | None"], Callable[[], bool]
]


# -- for hosts -------------------------------------------------------------------------


def span_of(
    log: LogReader, start: int | None, end: int | None, isolation: Isolation
) -> Span:
    """Return the part of a log that a scan reads. Raises the same errors as read()."""
    if start is None:
        first = log._state.log_start
    else:
        first = start
    stretch = log._stretch(first, end, isolation)
    topic, partition = partition_of(os.path.basename(log.path)) or (None, None)
    return Span(
        topic,
        partition,
        stretch.start,
        stretch.end,
        lambda first, last: log._stretch(first, last, isolation),
        log.offset_for_timestamp,
    )


def record_lists(
    log: LogReader,
    start: int,
    end: int | None = None,
    *,
    isolation: Isolation = "read_uncommitted",
    max_bytes: int | None = None,
    cursor: Cursor | None = None,
) -> Iterator[list[Record]]:
    """Return the records of LogReader.read(), in lists of some hundred.

    `cursor` is the position at which the previous read ended. With it, this read need
    not search for its position. Raises the same errors as read().
    """
    return log._stretch(start, end, isolation, cursor=cursor).record_lists(max_bytes)


def topic_record_lists(
    log: LogReader,
    start: int,
    end: int,
    topic: str,
    partition: int,
    *,
    isolation: Isolation,
) -> Iterator[tuple[int, list[TopicRecord]]]:
    """Return the records of LogReader.read(), with topic and partition, in lists.

    Each list comes with the size in bytes of the stored batches that it was read from.
    Raises the same errors as read().
    """
    return log._stretch(start, end, isolation).topic_record_lists(topic, partition)


def typed_columns(
    log: LogReader,
    start: int,
    end: int,
    *,
    isolation: Isolation,
    rows: int,
    size_bytes: int,
) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
    """Return the columns of [start, end) in chunks, with the timestamp types.

    A chunk has at most `rows` rows and `size_bytes` bytes, but at least one batch. See
    Stretch.typed_columns(). Raises the same errors as read().
    """
    return log._stretch(start, end, isolation).typed_columns(rows, size_bytes)


def segments_between(log: LogReader, start: int, end: int) -> list[Segment]:
    """Return the segments that contain [start, end), in order."""
    segments = log._state.segments
    return segments[
        max(0, slot_of(segments, start)) : slot_of(segments, max(start, end - 1)) + 1
    ]


def avoid_mapping(log: LogReader) -> None:
    """Read segments with pread from now on, instead of mapping them.

    For a read-only log, in a process that may not map a whole segment: a mapping counts
    against RLIMIT_AS in full, however little of it is read.
    """
    assert not log._is_writing
    log.refresh()  # a compaction may have replaced files since
    segments: list[Segment] = []
    try:
        for segment in log._state.segments:
            if isinstance(segment, GrowingSegment):  # already read with pread
                segments.append(segment)
            else:
                segments.append(PreadSegment(log._fs, log.path, segment.base_offset))
    except FileNotFoundError:
        raise OffsetOutOfRangeError(
            "a segment was removed by its writer", path=log.path
        ) from None
    log._state.publish(segments=segments)


def transactions_of(log: LogReader) -> PartitionTransactions:
    """Return the transactions up to the high watermark, and possibly later ones.

    Raises the same errors as read() with read_committed.
    """
    return log._scan_transactions().state


def list_offset_for_timestamp(
    log: LogReader, timestamp_ms: Time
) -> tuple[int, int] | None:
    """Return the result of Log.offset_for_timestamp(), and the record's timestamp.

    As in Kafka's ListOffsets, the end of a transaction counts as a record.
    """
    return log._list_offset_for_timestamp(timestamp_ms, markers=True)


def list_offset_for_max_timestamp(log: LogReader) -> tuple[int, int] | None:
    """Return the result of Log.newest().

    As in Kafka's ListOffsets, the end of a transaction counts as a record.
    """
    return log._newest(markers=True)


def unsearched_offsets(log: LogReader) -> int:
    """Return the number of offsets that were not searched for transactions yet.

    The next read with read_committed searches them, which waits for the disk. The first
    search reads the whole log, and later ones read the records appended since.
    """
    state = log._state.transactions
    if state is None:
        walked = log._state.log_start
    else:
        walked = state.next_offset
    return max(0, log.high_watermark - walked)


def aborted_transactions(log: LogReader, start: int, end: int) -> list[tuple[int, int]]:
    """Return (producer id, first offset) of the aborted transactions in a range.

    These are the transactions that a reader of [start, end) must leave out.
    """
    with log._state.scanning:  # a search in another thread adds to the state
        return log._scan_transactions().state.aborted_between(start, end)


def open_reader(kind: type[_Kind], fs: FS, directory: str, config: LogConfig) -> _Kind:
    """Open a log read-only, as a LogReader or a subclass. Raises like open_log()."""
    check_is_partition(fs, directory)
    gaps = Gaps(None, reload=functools.partial(read_persisted_gaps, fs, directory))
    log = kind(fs, directory, PartitionState(config, gaps), Durability("os"))
    try:
        log._view.list_segments()
    except BaseException:
        log._state.publish(segments=[])
        raise
    return log


class _Committed(NamedTuple):
    """The transactions up to a high watermark, with the matching end and segments.

    The end is the last stable offset, and the segments reach it. The state is shared,
    and later searches add to it. Their additions are above this last stable offset.
    """

    state: PartitionTransactions
    last_stable_offset: int
    segments: list[Segment]


class LogTail:
    """One log that is followed by tail_together() or in a loop; created by follow()."""

    def __init__(
        self, log: LogReader, state: PartitionState, view: FileView, offset: int
    ) -> None:
        """Follow a log from `offset` on; `state` and `view` belong to the log."""
        self.log = log
        #: The next offset to deliver.
        self.offset = offset
        self._state = state
        self._view = view
        self._seen_truncations = len(state.truncations)
        self._largest_visible = (
            state.visible
        )  # the largest visible end since this was created
        self._replacements = view.replacements
        self._last: Record | None = None  # the newest delivered record
        self._cursor = Cursor()

    @property
    def has_records(self) -> bool:
        """Whether there are records to deliver, or a truncation to report.

        This is also checked while the log is shorter than the offset: once it has grown
        again, a read-only log cannot detect that it was shorter.
        """
        return self._state.visible > self.offset or self._is_truncated

    @property
    def _is_truncated(self) -> bool:
        """Whether the log was truncated below the offset.

        If a tail begins above the high watermark, that alone is not a truncation.
        """
        state = self._state
        lowest_truncation = min(
            state.truncations[self._seen_truncations :], default=self.offset
        )
        return lowest_truncation < self.offset or state.visible < min(
            self.offset, self._largest_visible
        )

    def new_records(self) -> Iterator[list[Record]]:
        """Yield the records up to the present end, in lists.

        Raises:
            OffsetOutOfRangeError: the log was truncated below the offset.
        """
        bound = self._state.visible
        if self._is_truncated or self._is_last_record_replaced():
            raise OffsetOutOfRangeError(
                "the log was truncated below here",
                path=self.log.path,
                offset=self.offset,
            )
        self._largest_visible = max(self._largest_visible, bound)
        if self.offset < bound:
            for records in record_lists(
                self.log, self.offset, bound, cursor=self._cursor
            ):
                if records:
                    self._last = records[-1]
                yield records
            self.offset = bound

    def _is_last_record_replaced(self) -> bool:
        """Return whether another process truncated the log and appended again.

        This is the case if the newest delivered record was replaced by another one. If
        compaction or deletion removed that record, the answer is unknown, and False.
        """
        if self._replacements == self._view.replacements:
            return False
        self._replacements = self._view.replacements
        last = self._last
        if (
            last is None
            or not self.log.log_start_offset <= last.offset < self.log.high_watermark
        ):
            return False
        found = self.log.get(last.offset)
        return found.offset == last.offset and found != last


def fs_of(log: LogReader) -> FS:
    """Return the file system of a log."""
    return log._fs


def follow(log: LogReader, offset: int) -> LogTail:
    """Begin to follow a log: truncations from now on are reported."""
    return LogTail(log, log._state, log._view, offset)


def stored_batches(log: LogReader, start: int, end: int) -> Iterator[RecordBatch]:
    """Yield the batches that overlap [start, end), control batches excluded.

    `end` may be above the high watermark: the records between are not synced yet. The
    CRC of a batch is checked when its records are requested.

    Raises:
        CorruptBatchError: a batch head is invalid.
        StorageReadError: a segment cannot be read.
    """
    if start >= end:
        return
    for segment in segments_between(log, start, end):
        for facts, _, _ in segment.walk(segment.start_position(start), crc=False):
            is_inside = (facts["last_offset"] >= start) & (facts["base_offset"] < end)
            for position in facts["position"][is_inside].tolist():
                batch = segment.batch(position)
                if batch is not None and not batch.is_control:
                    yield batch
            if len(facts) and int(facts["last_offset"][-1]) >= end - 1:
                return


def acknowledged_end(log: LogReader) -> int:
    """Return the end of the records of a read-only log that may be acknowledged.

    Above the high watermark, they are in the files and not synced yet.
    """
    assert not log._is_writing
    return log._view.acknowledged_end


def is_written_here(log: LogReader) -> bool:
    """Return whether this process has the log open for writing."""
    return log._is_writing


def is_shared(log: LogReader) -> bool:
    """Return whether other processes write the log too."""
    return log._state.is_shared


def is_written_elsewhere(log: LogReader) -> bool:
    """Return whether another process may write the log.

    If so, only reading its files reveals new records.
    """
    return not log._is_writing or is_shared(log)


def listen_to(log: LogReader, listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` when this process makes records visible or closes the log.

    The call is made in the thread that does so. Returns a function that ends this.
    """
    log._state.listen(listener)
    return functools.partial(log._state.forget, listener)


def wait_for_records_or_end(log: LogReader, offset: int, timeout: float) -> bool:
    """Wait until there is a record at or above `offset`.

    Returns False after `timeout` seconds, or if the log is closed. Raises the errors of
    refresh().
    """
    tails = [follow(log, offset)]
    with contextlib.ExitStack() as stack:
        return _waiting(tails)(stack, tails, timeout)()


def _waiting(tails: Sequence[LogTail]) -> _Waiting:
    if is_written_elsewhere(tails[0].log):
        return _wait_for_reader
    return _wait_for_writer


def segment_times(log: LogReader) -> list[tuple[int, int, int]]:
    """Return (base offset, modification time in ms, size in bytes) of each segment."""
    found = []
    for segment in log._state.segments:
        # The file may have been deleted by its writer since the log was listed.
        with contextlib.suppress(FileNotFoundError):
            facts = (log._fs.modified_ms(segment.path), log._fs.file_size(segment.path))
            found.append((segment.base_offset, *facts))
    return found


def tail_together(
    logs: Sequence[LogReader], offsets: Sequence[int], timeout: float | None
) -> Iterator[tuple[int, list[Record]]]:
    """Follow several logs of one process, and yield lists of records as they arrive.

    Each list comes with the number of its log. The logs must be all open for writing,
    or all read-only. The records of one log are in order; there is no order between
    two logs. Truncations count from this call on. The iteration ends when one of the
    logs is closed. See LogReader.tail().
    """
    return _follow(
        [follow(log, offset) for log, offset in zip(logs, offsets, strict=True)],
        timeout,
    )


def _follow(
    tails: Sequence[LogTail], timeout: float | None
) -> Iterator[tuple[int, list[Record]]]:
    if not tails:
        return
    with contextlib.ExitStack() as stack:
        has_more_records = _waiting(tails)(stack, tails, timeout)
        try:
            while True:
                yield from new_records_of(tails)
                if not has_more_records():
                    return
        except LogClosedError:
            # While records of another log were read, or by another thread just now.
            return


def new_records_of(tails: Sequence[LogTail]) -> Iterator[tuple[int, list[Record]]]:
    """Yield the present records, in lists with the number of their log.

    Raises the errors of LogTail.new_records().
    """
    for number, tail in enumerate(tails):
        for records in tail.new_records():
            yield number, records


def _wait_for_writer(
    stack: contextlib.ExitStack, tails: Sequence[LogTail], timeout: float | None
) -> Callable[[], bool]:
    """Return a function that blocks until a log of this process has new records.

    The function returns False when the time is over or a log is closed.
    """
    changed = threading.Condition(threading.RLock())

    def wake() -> None:
        with changed:
            changed.notify_all()

    for tail in tails:
        state = tail.log._state
        state.listen(wake)
        stack.callback(state.forget, wake)

    def has_closed_log() -> bool:
        return any(tail.log.is_closed for tail in tails)

    def has_records() -> bool:
        return any(tail.has_records for tail in tails)

    def wait() -> bool:
        with changed:
            changed.wait_for(lambda: has_records() or has_closed_log(), timeout)
        return has_records() and not has_closed_log()

    return wait


def _wait_for_reader(
    stack: contextlib.ExitStack, tails: Sequence[LogTail], timeout: float | None
) -> Callable[[], bool]:
    """Do the same as _wait_for_writer(), for logs that another process may write."""
    fs = tails[0].log._fs
    watch = fs.watch(*(tail.log.path for tail in tails))
    stack.callback(watch.close)
    # The watch keeps reports until it is read. After the first refresh, it is read
    # before each refresh, so that a report about delivered records causes no empty
    # refresh.
    is_watch_read = False

    def wait() -> bool:
        nonlocal is_watch_read
        deadline = None
        if timeout is not None:
            deadline = fs.monotonic_ms() + int(timeout * 1000)
        while not any(tail.log.is_closed for tail in tails):
            if is_watch_read:
                # Wakes at least each second, in case a file system does not report
                # another machine's writes.
                pause = 1.0
                if deadline is not None:
                    pause = min(pause, max(0.0, (deadline - fs.monotonic_ms()) / 1000))
                watch.wait(pause)
            is_watch_read = True
            for tail in tails:
                tail.log.refresh()
            if any(tail.has_records for tail in tails):
                return True
            if deadline is not None and fs.monotonic_ms() >= deadline:
                return False
        return False

    return wait
