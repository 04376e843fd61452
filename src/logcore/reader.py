"""One partition as those who read it see it, in the process that writes it or in any other.

Rules:
- Readers take no lock and write nothing. What they see ends at the high watermark.
- A log that is only read looks at its files when it is opened, and again in refresh() and tail().
- What lies below the high watermark stays readable until it is deleted or truncated, and is never changed.

This module does not decode (partition/scan.py does) and does not append (log.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from logcore import checkpoint
from logcore.config import Durability, LogConfig
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
from logcore.invariants import VERIFIES
from logcore.kernels import Record, TopicRecord, kernel, layout
from logcore.kernels.layout import Time
from logcore.names import is_file_of_log, partition_of
from logcore.partition.gaps import Gaps, check_growing
from logcore.partition.looking import FileLook
from logcore.partition.noted import noted_gaps
from logcore.partition.scan import Cursor, Scan, Span, Stretch, slot_of
from logcore.partition.state import PartitionState
from logcore.partition.transactions import Transactions, control_types
from logcore.recordbatch import SLICE_ROWS, RecordBatch, time_ms
from logcore.segment import GrowingSegment, PiecedSegment, Segment

Isolation = Literal["read_uncommitted", "read_committed"]


def check_is_partition(fs: FS, directory: str) -> None:
    """Raises LogNotFoundError for a directory of something else: read as a log it would be an empty one.

    A partition has a file of one, or is empty, or about to get its first file, and has the name of one.
    """
    real = fs.real_path(directory)
    if not fs.is_directory(real):
        raise LogNotFoundError("there is no partition directory here", path=directory)
    names = fs.listdir(real)
    ours = (*checkpoint.PARTITION_FILES, checkpoint.TURN)
    if any(name.removesuffix(".tmp") in ours or is_file_of_log(name) for name in names):
        return
    if not names and partition_of(os.path.basename(real)) is not None:
        return
    inside = sorted(
        name for name in names if partition_of(name) is not None and fs.is_directory(os.path.join(real, name))
    )
    if inside:
        raise LogNotFoundError(
            f"this is a directory of partitions: open it with logcore.open_dir(), or one of them, such as "
            f"{os.path.join(directory, inside[0])}",
            path=directory,
        )
    raise LogNotFoundError(
        "this is no partition directory: it holds no file of a log",
        path=directory,
        expected="files like 00000000000000000000.log",
        found=", ".join(sorted(names)[:5]) or "nothing",
    )


class LogReader:
    """The reading half of a log. Users meet it as Log; all methods may be called from several threads."""

    def __init__(
        self, fs: FS, directory: str, state: PartitionState, policy: Durability, *, is_writing: bool = False
    ) -> None:
        """Not for users. state: as a writer has opened it, or empty; then refresh() fills it."""
        self.path = directory
        self.durability = policy
        self._fs = fs
        self._state = state
        self._is_writing = is_writing
        self._look = FileLook(fs, directory, state)
        self._forks = fs.forks
        fs.after_fork(self._begin_child)

    def _begin_child(self) -> None:
        self._state.make_locks()
        self._state.transactions = None  # half changed, if a thread of the parent was at it

    @property
    def config(self) -> LogConfig:
        """The settings."""
        return self._state.config

    def _check_open(self) -> None:
        if self._state.is_closed:
            raise LogClosedError("the log is closed", path=self.path)

    @property
    def is_closed(self) -> bool:
        return self._state.is_closed

    @property
    def times_truncated(self) -> int:
        """Grows when truncate() may have removed records since the log was opened; also when the writer replaced the
        last segment for another reason, which a reader in another process cannot tell apart.
        """
        return len(self._state.cuts) + self._look.replacements

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read."""
        return self._state.log_start

    @property
    def log_end_offset(self) -> int:
        """The offset the next record will get."""
        return self._state.end

    @property
    def high_watermark(self) -> int:
        """The end of what readers see: what is on disk where appends wait for it, else the log end."""
        return self._state.visible

    @property
    def last_stable_offset(self) -> int:
        """The end of what read_committed sees: the first offset of the oldest open transaction, or the high
        watermark.
        """
        return max(self._state.log_start, self._scan_transactions().last_stable_offset)

    def _scan_transactions(self) -> _Committed:
        """Walks heads that were not walked before; the first call walks the whole log.

        Raises CorruptLogError and CorruptBatchError where a batch is missing or damaged, because it may be a marker
        that makes aborted records of what would seem committed.
        """
        with self._state.scanning:
            segments, visible = self._bounded()
            state = self._state.transactions
            # From the first batch that exists: a transaction may begin below the log start and end above it.
            begin = self._state.log_start
            if segments and segments[0].base_offset < begin:
                begin = segments[0].base_offset
            # Where it ends below the log start, a marker may be among what was deleted, and its transaction would stay
            # open for ever. Where it ends above what is shown, the writer has cut the log, and may write there again.
            if state is None or not begin <= state.next_offset <= visible:
                state = self._state.transactions = Transactions(next_offset=begin)
            # Read after the bound. What this process has appended itself needs no walk, which costs a fetch a third.
            if self._state.plain_from <= state.next_offset < visible:
                if VERIFIES:
                    self._check_plain(segments, state.next_offset, visible)
                state.next_offset = visible
            if state.next_offset < visible:
                self._walk_transactions(state, segments, visible)
            # Without a noted end the files end where a walk over heads did, and damage may have ended it too early.
            if segments and not self._look.is_end_noted and not self._is_writing:
                self._check_no_head_behind(segments[-1], visible)
            return _Committed(state, state.last_stable_offset(visible), segments)

    def _check_plain(self, segments: list[Segment], start: int, end: int) -> None:
        """That nothing in [start, end) is about transactions; a walk that meets damage proves nothing."""
        with contextlib.suppress(LogcoreError, OSError):
            for _, facts in self._state.gaps.walk(segments[max(0, slot_of(segments, start)) :], start, end, crc=False):
                about = facts["attributes"] & (layout.TRANSACTIONAL_BIT | layout.CONTROL_BIT)
                assert not np.any((about != 0) & (facts["magic"] == 2)), (self.path, start, end)

    def _walk_transactions(self, state: Transactions, segments: list[Segment], end: int) -> None:
        """Takes in what lies between the end of the state and end."""
        held = segments[max(0, slot_of(segments, state.next_offset)) :]
        for segment, facts in self._state.gaps.walk(held, state.next_offset, end, crc=False):
            for row in np.flatnonzero(facts["attributes"] & layout.TRANSACTIONAL_BIT != 0).tolist():
                batch = segment.batch(int(facts["position"][row]))
                if batch is not None:  # a head that is damaged would take committed records for aborted ones
                    batch.verify()
            state.add(facts, control_types(segment))

    def _check_no_head_behind(self, segment: Segment, end: int) -> None:
        """Raises CorruptBatchError where the files of another writer go on behind the end with a head that no torn
        write leaves: the batches behind it may be markers.
        """
        for _, position, why in segment.walk(segment.find(end), crc=False):
            if why not in (layout.WALK_END, layout.WALK_LIMIT, layout.WALK_SHORT):
                raise CorruptBatchError(layout.WALK_REASONS[why], path=segment.path, position=position)

    def read(
        self,
        start: int,
        end: int | None = None,
        *,
        isolation: Isolation = "read_uncommitted",
        max_bytes: int | None = None,
    ) -> Iterator[Record]:
        """Records with start <= offset < end, in order; end is fixed by this call and by default the high watermark.

        isolation: "read_committed" stops at the last stable offset and leaves out aborted transactions. max_bytes: stop
        after about this many bytes of batches, but not before one batch. Control batches are never delivered. Every
        batch's CRC is checked. Raises OffsetOutOfRangeError at once; CorruptBatchError, InvalidRecordError,
        StorageReadError when the iteration gets there.
        """
        lists = record_lists(self, start, end, isolation=isolation, max_bytes=max_bytes)
        return itertools.chain.from_iterable(lists)

    def get(self, offset: int) -> Record:
        """The record at offset, or the next one where compaction or a marker left a gap.

        Raises OffsetOutOfRangeError when there is none before the high watermark.
        """
        # Three ways, each for what the one before cannot answer: compiled, from a mapping; one batch found by the index
        # of its segment; and reading on from the offset, which judges gaps and damage.
        record = kernel.get_quickly(self._state, offset)
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
                is_dense = offset >= self._state.gaps.noted.dense_from
                if not is_dense:
                    self._state.gaps.check_whole(segments[slot])
                try:
                    found = segments[slot].read_one(offset, end, is_dense)
                except (CorruptBatchError, InvalidRecordError) as error:
                    segments[slot].check_readable(error)
                    raise
                # Another offset, where there are no gaps, is a damaged head: reading on from here says so.
                if not isinstance(found, int) and found.offset < visible and (found.offset == offset or not is_dense):
                    return found
        for record in self.read(offset):
            return record
        raise OffsetOutOfRangeError(
            "there is no record at or after this offset",
            path=self.path,
            offset=offset,
            expected=f"below {self._state.visible}",
        )

    def batches(self, start: int, end: int | None = None, *, max_bytes: int | None = None) -> Iterator[RecordBatch]:
        """Whole batches, control batches too, from the one that holds start to the one that holds end - 1.

        The bytes are borrowed from a mapped or just read part of a segment and stay valid as long as the batch is kept.
        max_bytes: stop before the batch that would exceed it, but not before the first. Errors as read(); CRCs are
        checked when a batch's records or columns are asked for.
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
        """The bytes of whole batches as they lie in the files, from the one that holds start on: what a fetch sends.

        Those below end, an offset where a batch ends, and by default the high watermark. up_to: "log_end" for a
        follower, which copies what consumers may not read yet. At most max_bytes, but with at_least_one never less than
        one batch where there is one. The bytes are one view for each segment. Sealed segments give views of their
        mapping, the growing one bytes just read; both stay valid as long as they are kept. Nothing is decoded and no
        CRC is checked. Raises OffsetOutOfRangeError, CorruptBatchError where no batch can be made out,
        StorageReadError.
        """
        stretch = self._stretch(start, end, up_to=up_to)
        if start < stretch.end:
            self._state.gaps.check_front(stretch.segments, start)
        pieces: list[memoryview] = []
        offset = stretch.start  # the next one to send
        left = max(1, max_bytes)
        before: Segment | None = None
        for number, segment in enumerate(stretch.segments, 1):
            if before is not None:
                reached = before.next_offset()
                self._state.gaps.check_behind(before, reached, segment.base_offset)
                offset = max(offset, reached, segment.base_offset)  # a compaction may have joined this one to that
            if offset >= stretch.end or segment.base_offset >= stretch.end:
                break
            before = segment
            self._state.gaps.check_whole(segment)
            following = None
            if number < len(stretch.segments):
                following = stretch.segments[number]
            check = self._check_sent(segment, following, offset)
            position = 0
            if offset > segment.base_offset:
                position = segment.find(offset)
            piece, whole = segment.stored(position, left, stretch.end, at_least_one and not pieces, check)
            if piece:
                pieces.append(piece)
                left -= len(piece)
            if not whole:
                break
        if not pieces and at_least_one and offset < stretch.end:
            raise CorruptBatchError("no batch can be made out where the log has records", path=self.path, offset=offset)
        return pieces

    def _check_sent(self, segment: Segment, following: Segment | None, offset: int) -> Callable[[layout.Facts], None]:
        """A function for Segment.stored(), which calls it with the heads of all batches that it gives out: none may be
        missing from the one that holds offset on. Raises CorruptBatchError.
        """
        expected = offset
        is_first = offset > segment.base_offset  # offset may lie inside a batch

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
        """The records in [start, end) as columns: iterate for RecordColumns, or ask for pandas, polars or Arrow.

        start is by default the log start, end the high watermark; both are fixed by this call. columns: those wanted,
        of topic, partition, offset, timestamp, key, value, headers. See Scan. Errors as read(), and InvalidConfigError
        for a column that there is not.
        """
        return Scan([span_of(self, start, end, isolation)], columns)

    def tail(self, start: int | None = None, *, timeout: float | None = None) -> Iterator[Record]:
        """Records from start on, by default the present end, and then new ones as they come, each once and in order.

        Wakes on appends, also of another process. timeout: seconds without a new record after which the iteration ends;
        None waits for ever. Ends when the log is closed. Errors as read().
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
        """Of a log opened read-only or shared: looks at what other processes have added; True when the high watermark
        moved.

        Does nothing for a log that this process alone writes. Raises LogNotFoundError when the directory is gone.
        """
        self._check_open()
        if self._is_writing:
            return self._state.follow()
        with self._state.lock, self._state.scanning:  # a look at transactions sees the segments before this or after it
            before = self._state.visible
            self._look.again()
            return self._state.visible != before

    def offset_for_timestamp(self, timestamp_ms: Time) -> int | None:
        """Offset of the first record, in log order, with at least timestamp_ms; None when there is none.

        The rule is Kafka's (ListOffsets, storage format section 11.3): the first segment whose largest timestamp
        reaches it, and in it the first record that does. A datetime has to have a time zone.
        """
        found = self._place_of_timestamp(timestamp_ms, markers=False)
        return None if found is None else found[0]

    def _place_of_timestamp(self, timestamp_ms: Time, *, markers: bool) -> tuple[int, int] | None:
        """See place_of_timestamp()."""
        self._check_open()
        wanted = time_ms(timestamp_ms)
        assert wanted is not None, "the caller gives a time"
        segments, visible = self._bounded()

        def end_of_older(segment: Segment) -> int:
            """The end of a segment whose batches need not be read, because none is late enough; else -1."""
            if segment.max_timestamp() >= wanted:
                return -1
            return self._sound_end(segment, visible)

        # By the heads of one segment, 30 ns each; its time index could save a part of that, if it is right. Their CRCs
        # and their order are checked: a time or an offset that is damaged would hide what is looked for.
        log_start = self._state.log_start
        for segment, facts in self._state.gaps.walk(segments, log_start, visible, crc=True, passed=end_of_older):
            for row in np.flatnonzero(facts["max_timestamp"] >= wanted).tolist():
                batch = segment.batch(int(facts["position"][row]))
                if batch is None or (batch.is_control and not markers):
                    continue
                if batch.is_control:
                    place = int(facts["last_offset"][row]), int(facts["max_timestamp"][row])
                    if log_start <= place[0] < visible:
                        return place
                    continue
                for columns in batch.column_slices(SLICE_ROWS, max_size=self._state.config.max_decompressed_bytes):
                    late = columns.timestamps_ms >= wanted
                    late &= (columns.offsets >= log_start) & (columns.offsets < visible)
                    if late.any():
                        first = int(late.argmax())
                        return int(columns.offsets[first]), int(columns.timestamps_ms[first])
        return None

    def _bounded(self) -> tuple[list[Segment], int]:
        """The segments and the high watermark, which they reach: read again when a roll comes in between."""
        while True:
            segments = self._state.segments
            visible = self._state.visible
            if segments is self._state.segments:
                break
        if segments and visible < segments[-1].base_offset:  # of a replicated log
            segments = segments[: max(1, slot_of(segments, visible - 1) + 1)]
        return segments, visible

    def _sound_end(self, segment: Segment, visible: int) -> int:
        """The end of a segment, if its largest timestamp is known without a walk over its batches, else -1.

        Raises CorruptBatchError when the growing segment is damaged below the high watermark.
        """
        if isinstance(segment, GrowingSegment) and not isinstance(segment, PiecedSegment):
            is_end_noted = self._look.is_end_noted or self._is_writing
            return check_growing(segment, visible, self._state.gaps.dense_from, is_end_noted=is_end_noted)
        _ = segment.max_timestamp()
        if segment.is_newest_sure:
            return segment.next_offset()
        return -1

    def newest(self) -> tuple[int, int] | None:
        """(offset, timestamp_ms) of the record with the largest timestamp, the first of them; None in an empty log."""
        return self._newest(markers=False)

    def _newest(self, *, markers: bool) -> tuple[int, int] | None:
        """See newest_place()."""
        self._check_open()
        segments, visible = self._bounded()

        def end_of(segment: Segment) -> int:
            return self._sound_end(segment, visible)

        # A segment or a batch that is missing may have held the newest record.
        for _ in self._state.gaps.walk(segments, self._state.log_start, visible, crc=True, passed=end_of):
            pass
        largest = [segment.max_timestamp() for segment in segments]
        if not segments or max(largest) < 0:
            return None
        found = self._place_of_timestamp(max(largest), markers=markers)
        # The newest record lies below the log start, in a segment that is not deleted yet.
        if found is None:
            return self._newest_by_records()
        return found

    def _newest_by_records(self) -> tuple[int, int] | None:
        """As newest(), by looking at every record."""
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
    ) -> Stretch:
        """The stretch between two offsets, as the log is now. Raises OffsetOutOfRangeError, LogClosedError."""
        self._check_open()
        start = _as_offset(start, "start")
        if isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidConfigError(
                "isolation", expected="'read_uncommitted' or 'read_committed'", found=repr(isolation)
            )
        committed: Transactions | None = None
        if isolation == "read_committed":
            # One look at the log gives all three: what is appended later lies in no transaction that the state knows.
            committed, bound, segments = self._scan_transactions()
        elif up_to == "log_end":
            with self._state.lock:  # an append, a roll or a truncation moves the end and the segments together
                segments = self._state.segments
                bound = self._state.end
        else:
            segments, bound = self._bounded()
        # Behind the look at the segments: a deletion moves the start before it takes segments out.
        if not self._state.log_start <= start <= self._state.end:
            raise OffsetOutOfRangeError(
                "start lies outside the log",
                path=self.path,
                offset=start,
                expected=f"{self._state.log_start} to {self._state.end}",
                found=start,
            )
        if end is not None:
            bound = min(bound, _as_offset(end, "end"))
        most = self._state.config.max_decompressed_bytes
        held = segments[max(0, slot_of(segments, start)) :]
        return Stretch(held, start, bound, committed, most, self._state.gaps, cursor)


def _as_offset(given: object, what: str) -> int:
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidConfigError(
            f"{what} is no offset; offset_for_timestamp() finds that of a time", expected="an int", found=repr(given)
        ) from None


_Kind = TypeVar("_Kind", bound=LogReader)
#: Begins to listen for news of logs; what it returns blocks until there is some.
_Waiting = Callable[[contextlib.ExitStack, "Sequence[Tailed]", "float | None"], Callable[[], bool]]


# -- for hosts -------------------------------------------------------------------------------------------------------


def span_of(log: LogReader, start: int | None, end: int | None, isolation: Isolation) -> Span:
    """The part of a log that a scan reads. Raises the same errors as read()."""
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
        lambda: log._stretch(stretch.start, stretch.end, isolation),
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
    """The records of LogReader.read(), in lists of some hundred. Raises the same errors.

    cursor: where the reading before ended, which spares this one the search for its place.
    """
    return log._stretch(start, end, isolation, cursor=cursor).record_lists(max_bytes)


def placed_lists(
    log: LogReader, start: int, end: int, topic: str, partition: int, *, isolation: Isolation
) -> Iterator[tuple[int, list[TopicRecord]]]:
    """The records of LogReader.read(), with the topic and partition, in lists; before each how many bytes of stored
    batches it takes. Raises the same errors.
    """
    return log._stretch(start, end, isolation).placed_lists(topic, partition)


def typed_columns(
    log: LogReader, start: int, end: int, *, isolation: Isolation, rows: int, size_bytes: int
) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
    """The columns in [start, end) in chunks of at most that many rows and bytes, but not less than a batch, each
    with the timestamp types of its records. See Stretch.typed_columns(). Errors as read().
    """
    return log._stretch(start, end, isolation).typed_columns(rows, size_bytes)


def segments_between(log: LogReader, start: int, end: int) -> list[Segment]:
    """The segments that hold [start, end), in order."""
    segments = log._state.segments
    return segments[max(0, slot_of(segments, start)) : slot_of(segments, max(start, end - 1)) + 1]


def avoid_mapping(log: LogReader) -> None:
    """Of a log opened read-only: reads with pread from now on, for a process that may not map as much as a segment.

    A mapping counts against RLIMIT_AS in full, whatever of it is read.
    """
    assert not log._is_writing
    log.refresh()  # a compaction may have replaced files since
    segments: list[Segment] = []
    try:
        for one in log._state.segments:
            if isinstance(one, GrowingSegment):  # read with pread already
                segments.append(one)
            else:
                segments.append(PiecedSegment(log._fs, log.path, one.base_offset))
    except FileNotFoundError:
        raise OffsetOutOfRangeError("a segment was removed by its writer", path=log.path) from None
    log._state.segments = segments


def transactions_of(log: LogReader) -> Transactions:
    """Those up to the high watermark, and perhaps beyond. Errors as read() with read_committed."""
    return log._scan_transactions().state


def place_of_timestamp(log: LogReader, timestamp_ms: Time) -> tuple[int, int] | None:
    """As Log.offset_for_timestamp(), with the timestamp that was found. The end of a transaction counts as a record, as
    in Kafka's ListOffsets.
    """
    return log._place_of_timestamp(timestamp_ms, markers=True)


def newest_place(log: LogReader) -> tuple[int, int] | None:
    """As Log.newest(). The end of a transaction counts as a record, as in Kafka's ListOffsets."""
    return log._newest(markers=True)


def unwalked_offsets(log: LogReader) -> int:
    """How many offsets were not yet walked for transactions. The next read_committed look walks them, which waits
    for the disk: the first one walks the whole log, later ones what was appended since.
    """
    state = log._state.transactions
    if state is None:
        walked = log._state.log_start
    else:
        walked = state.next_offset
    return max(0, log.high_watermark - walked)


def aborted_transactions(log: LogReader, start: int, end: int) -> list[tuple[int, int]]:
    """(producer id, first offset) of aborted transactions that a reader of [start, end) must know of to leave them
    out.
    """
    with log._state.scanning:  # another thread's walk adds to the state
        return log._scan_transactions().state.aborted_between(start, end)


def open_reader(kind: type[_Kind], fs: FS, directory: str, config: LogConfig) -> _Kind:
    """A log opened read-only, as a LogReader or a kind of it. Errors as open_log()."""
    check_is_partition(fs, directory)
    gaps = Gaps(None, ask=functools.partial(noted_gaps, fs, directory))
    log = kind(fs, directory, PartitionState(config, gaps), Durability("os"))
    try:
        log._look.list_segments()
    except BaseException:
        log._state.segments = []
        raise
    return log


class _Committed(NamedTuple):
    """The transactions up to a high watermark, the last stable offset there, and the segments that reach it.

    The state is shared, and later looks add to it: what they add lies behind the last stable offset of this one.
    """

    state: Transactions
    last_stable_offset: int
    segments: list[Segment]


class Tailed:
    """One log that is followed, by tail_together() or in a loop; made by follow(). offset: the next to deliver."""

    def __init__(self, log: LogReader, state: PartitionState, look: FileLook, offset: int) -> None:
        """state, look: of the log."""
        self.log = log
        self.offset = offset
        self._state = state
        self._look = look
        self._cuts = len(state.cuts)
        self._shown = state.visible  # the largest end of what readers see, since this began
        self._replacements = look.replacements
        self._last: Record | None = None  # the newest that was delivered
        self._cursor = Cursor()

    @property
    def has_news(self) -> bool:
        """Whether there are records to deliver, or a truncation to report. Asked also while the log is shorter than the
        offset: once it has grown again, a log opened read-only cannot see that it was shorter.
        """
        return self._state.visible > self.offset or self._is_cut

    @property
    def _is_cut(self) -> bool:
        """Whether the log was truncated below the offset. Where a tail begins above the high watermark, this alone is
        no truncation.
        """
        state = self._state
        lowest_cut = min(state.cuts[self._cuts :], default=self.offset)
        return lowest_cut < self.offset or state.visible < min(self.offset, self._shown)

    def news(self) -> Iterator[list[Record]]:
        """Records up to the present end. Raises OffsetOutOfRangeError when the log was truncated below the offset."""
        bound = self._state.visible
        if self._is_cut or self._is_other():
            raise OffsetOutOfRangeError("the log was truncated below here", path=self.log.path, offset=self.offset)
        self._shown = max(self._shown, bound)
        if self.offset < bound:
            for records in record_lists(self.log, self.offset, bound, cursor=self._cursor):
                if records:
                    self._last = records[-1]
                yield records
            self.offset = bound

    def _is_other(self) -> bool:
        """Whether another process has cut the log below the offset and filled it again since the last look: another
        record stands where the newest was delivered. If compaction or deletion has removed that one, nothing is known.
        """
        if self._replacements == self._look.replacements:
            return False
        self._replacements = self._look.replacements
        last = self._last
        if last is None or not self.log.log_start_offset <= last.offset < self.log.high_watermark:
            return False
        found = self.log.get(last.offset)
        return found.offset == last.offset and found != last


def fs_of(log: LogReader) -> FS:
    """The disk that a log is on."""
    return log._fs


def follow(log: LogReader, offset: int) -> Tailed:
    """Begins to follow a log: a truncation counts from here on."""
    return Tailed(log, log._state, log._look, offset)


def is_written_here(log: LogReader) -> bool:
    """Whether this process has the log open for writing."""
    return log._is_writing


def is_shared(log: LogReader) -> bool:
    """Whether other processes write the log beside this one."""
    return log._state.is_shared


def is_written_elsewhere(log: LogReader) -> bool:
    """Whether another process may write the log, so that only a look at its files brings news."""
    return not log._is_writing or is_shared(log)


def listen_to(log: LogReader, listener: Callable[[], None]) -> Callable[[], None]:
    """Calls listener, in the thread at work, when this process makes records visible or closes the log; returns a
    function that ends this.
    """
    log._state.listen(listener)
    return functools.partial(log._state.forget, listener)


def wait_for_news(log: LogReader, offset: int, timeout: float) -> bool:
    """Waits until there is a record at or behind an offset; False when so many seconds are over, or the log is closed.

    Raises what refresh() raises.
    """
    tailed = [follow(log, offset)]
    with contextlib.ExitStack() as stack:
        return _waiting(tailed)(stack, tailed, timeout)()


def _waiting(tailed: Sequence[Tailed]) -> _Waiting:
    if is_written_elsewhere(tailed[0].log):
        return _wait_for_reader
    return _wait_for_writer


def segment_times(log: LogReader) -> list[tuple[int, int, int]]:
    """Of each segment, in order: its base offset, when its file was last written in milliseconds, its size in bytes."""
    found = []
    for segment in log._state.segments:
        with contextlib.suppress(FileNotFoundError):  # deleted by its writer since we looked
            facts = (log._fs.modified_ms(segment.path), log._fs.file_size(segment.path))
            found.append((segment.base_offset, *facts))
    return found


def tail_together(
    logs: Sequence[LogReader], offsets: Sequence[int], timeout: float | None
) -> Iterator[tuple[int, list[Record]]]:
    """Records of several logs of one process as they come, each with the number of its log; see LogReader.tail().

    logs: all open for writing, or all read-only. The records of one log are in order; nothing is said of those of two.
    A truncation counts from this call on. Ends when one of the logs is closed.
    """
    return _follow([follow(log, offset) for log, offset in zip(logs, offsets, strict=True)], timeout)


def _follow(tailed: Sequence[Tailed], timeout: float | None) -> Iterator[tuple[int, list[Record]]]:
    if not tailed:
        return
    with contextlib.ExitStack() as stack:
        is_there_more = _waiting(tailed)(stack, tailed, timeout)
        try:
            while True:
                yield from news_of(tailed)
                if not is_there_more():
                    return
        except LogClosedError:  # while the records of another log were taken, or by another thread just now
            return


def news_of(tailed: Sequence[Tailed]) -> Iterator[tuple[int, list[Record]]]:
    """The records that there are now, each list with the number of its log. Raises what Tailed.news() raises."""
    for number, one in enumerate(tailed):
        for records in one.news():
            yield number, records


def _wait_for_writer(
    stack: contextlib.ExitStack, tailed: Sequence[Tailed], timeout: float | None
) -> Callable[[], bool]:
    """Blocks until a log of this process has news; False when the time is over or a log is closed."""
    moved = threading.Condition(threading.RLock())

    def wake() -> None:
        with moved:
            moved.notify_all()

    for one in tailed:
        state = one.log._state
        state.listen(wake)
        stack.callback(state.forget, wake)

    def is_over() -> bool:
        return any(one.log.is_closed for one in tailed)

    def has_news() -> bool:
        return any(one.has_news for one in tailed)

    def wait() -> bool:
        with moved:
            moved.wait_for(lambda: has_news() or is_over(), timeout)
        return has_news() and not is_over()

    return wait


def _wait_for_reader(
    stack: contextlib.ExitStack, tailed: Sequence[Tailed], timeout: float | None
) -> Callable[[], bool]:
    """The same for logs that another process may write."""
    fs = tailed[0].log._fs
    watch = fs.watch(*(one.log.path for one in tailed))
    stack.callback(watch.close)
    # The watch keeps reports until it is asked. After the first look it is asked before each, so that records that were
    # taken are not followed by a look that finds nothing.
    is_watched = False

    def wait() -> bool:
        nonlocal is_watched
        deadline = None
        if timeout is not None:
            deadline = fs.monotonic_ms() + int(timeout * 1000)
        while not any(one.log.is_closed for one in tailed):
            if is_watched:
                # Wakes at least each second, in case a file system does not report another machine's writes.
                pause = 1.0
                if deadline is not None:
                    pause = min(pause, max(0.0, (deadline - fs.monotonic_ms()) / 1000))
                watch.wait(pause)
            is_watched = True
            for one in tailed:
                one.log.refresh()
            if any(one.has_news for one in tailed):
                return True
            if deadline is not None and fs.monotonic_ms() >= deadline:
                return False
        return False

    return wait
