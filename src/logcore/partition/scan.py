"""Reads a range of a log: from segments to records, columns, batches and Arrow.

Rules:
- A Stretch is fixed when it is created: its segments and its end do not change, so
  every read ends.
- Runs of plain batches are decoded together, and each other batch alone. The CRC of
  every decoded batch is checked.
- All records in the range are delivered, or an error is raised. Unreadable data never
  ends a read silently.
- Control batches advance the offset. They are never delivered as records.

This module does not depend on how the log grows or is written.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from logcore.config import INT64_MAX
from logcore.errors import (
    CorruptBatchError,
    CorruptLogError,
    LogcoreError,
    MissingDependencyError,
)
from logcore.format import html
from logcore.format.columns import (
    ARROW_COLUMNS,
    RecordColumns,
    arrow_schema,
    checked_columns,
)
from logcore.format.json_values import JsonRecord, json_records
from logcore.kernels import Record, TopicRecord, kernel, layout
from logcore.partition.aborted_transactions import PartitionTransactions
from logcore.partition.gaps import Gaps, readable
from logcore.partition.order import NEVER, OrderFault, fault_of
from logcore.recordbatch import SLICE_ROWS, RecordBatch
from logcore.segment import ActiveSegment, Segment

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

    from logcore.partition.polars_source import FilterBounds

#: Bytes decoded at once: few enough that the records are still in the cache when used.
_OBJECT_BYTES: Final = 64 << 10
#: Rows and bytes of one chunk of columns. Larger chunks get their memory from the
#: system and return it each time, and the pages are mapped again. With chunks a third
#: larger, a scan takes 36 instead of 21 ns per record.
_COLUMN_ROWS: Final = 24_576
_COLUMN_BYTES: Final = 3 << 20
#: Read sizes for a segment that is not mapped. The first is small, because many reads
#: need one record only.
_FIRST_PIECE_BYTES: Final = 32 << 10
_PIECE_BYTES: Final = 1 << 20
#: Number of records of a scan that a notebook displays.
_SHOWN_ROWS: Final = 10
_SHOWN_NAMES: Final = 3


class Run(NamedTuple):
    """Consecutive plain batches in borrowed bytes.

    The bytes are data[at:stop]. Their position in the file at `path` is `origin` + at.
    """

    data: memoryview
    at: int
    stop: int
    rows: int
    origin: int
    path: str

    @property
    def size_bytes(self) -> int:
        """The stored size of the batches."""
        return self.stop - self.at

    def record_slices(self, rows: int, *, max_size: int) -> Iterator[list[Record]]:
        """Yield one list. A run never contains more records than were requested."""
        with self._placed():
            records = kernel.decode_objects(self.data, self.at, self.stop, self.path)
        yield records

    def placed_records(self, topic: str, partition: int) -> list[TopicRecord]:
        """Return all records, with their topic and partition.

        Doing this in one step saves a fifth of the time of poll().
        """
        with self._placed():
            return kernel.decode_topic_records(
                self.data, self.at, self.stop, topic, partition, self.path
            )

    def column_slices(self, rows: int, *, max_size: int) -> Iterator[RecordColumns]:
        """Yield one chunk of columns, as for record_slices()."""
        yield self.columns()

    def columns(self) -> RecordColumns:
        """Decode all records to columns."""
        block = np.empty(self.rows * layout.ROW_SIZE, np.uint8)
        with self._placed():
            rows = kernel.decode_columns(
                self.data, self.at, self.stop, block, self.rows, self.path
            )
        assert rows == self.rows, (rows, self.rows)
        return RecordColumns.from_block(self.data, block, rows)

    def timestamp_types(self) -> npt.NDArray[np.int32]:
        """Return the timestamp type of each record, as in Stretch.typed_columns()."""
        facts, _, _ = kernel.walk(
            self.data,
            self.at,
            self.stop,
            (self.stop - self.at) // layout.HEADER_SIZE + 1,
            False,
        )
        types = ((facts["attributes"] & layout.APPEND_TIME_BIT) != 0).astype(np.int32)
        if types.any():
            return np.repeat(types, facts["record_count"])
        return np.zeros(self.rows, np.int32)

    def batches(self) -> Iterator[RecordBatch]:
        """Yield the batches one by one."""
        at = self.at
        while at < self.stop:
            batch = RecordBatch.parse(
                self.data, at, self.stop, path=self.path, origin=self.origin
            )
            assert batch is not None, "a run holds whole batches"
            yield batch
            at += batch.size_bytes

    @contextlib.contextmanager
    def _placed(self) -> Generator[None, None, None]:
        """Convert positions in errors from the bytes that were read to the file."""
        try:
            yield
        except LogcoreError as error:
            if error.position is not None:
                error.position += self.origin
            raise


def slot_of(segments: Sequence[Segment], offset: int) -> int:
    """Return the index of the segment that contains an offset, or -1.

    This is the last segment whose base offset is at or below the offset.
    """
    return bisect_right(segments, offset, key=_BASE_OFFSET) - 1


def batch_end_at_or_below(segments: Sequence[Segment], offset: int) -> int:
    """Return the last end of a batch that is at most `offset`, which is below the end."""
    active = segments[-1]
    if isinstance(active, ActiveSegment) and active.begins_recent_batch(offset):
        return offset
    end, _ = batch_around(segments, offset)
    return end


def batch_around(segments: Sequence[Segment], offset: int) -> tuple[int, int]:
    """Return (base, end) of the batch that contains an offset inside.

    Returns the offset twice if a batch begins at the offset.
    """
    segment = segments[max(0, slot_of(segments, offset))]
    batch = segment.batch(segment.find(offset))
    if batch is None or not batch.base_offset < offset <= batch.last_offset:
        return offset, offset
    return batch.base_offset, batch.last_offset + 1


_BASE_OFFSET = attrgetter("base_offset")
_Item = TypeVar("_Item", Run | RecordBatch, RecordBatch)
_RecordT = TypeVar("_RecordT", Record, TopicRecord)


class Cursor:
    """The position at which a read ended, for the next read of the same reader.

    All records that were read were visible, so a batch always ends at the position.
    Written by Stretch.
    """

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._position = 0
        self._offset = -1

    def set(self, segment: Segment, position: int, offset: int) -> None:
        """Store the position in a segment at which the batch of `offset` begins."""
        self._segment = segment
        self._position = position
        self._offset = offset

    def position(self, segment: Segment, offset: int) -> int | None:
        """Return the position of the batch at `offset`.

        Returns None if the last read did not end there.
        """
        if segment is self._segment and offset == self._offset:
            return self._position
        return None


class LogRange(NamedTuple):
    """The range [start, end) of a log, as a list of segments in order."""

    #: The segments of the log from `start` on.
    segments: Sequence[Segment]
    start: int
    end: int
    #: The transactions, for read_committed. `end` is then at most the last stable
    #: offset.
    committed: PartitionTransactions | None
    #: Maximum size to which one batch may inflate.
    max_size: int
    #: Decides which gaps in the offsets are losses.
    gaps: Gaps
    #: The position at which the last read ended; updated by this read.
    cursor: Cursor | None = None

    def record_lists(self, max_bytes: int | None = None) -> Iterator[list[Record]]:
        """Yield lists of some hundred records."""
        return readable(self.segments, self._record_lists(max_bytes))

    def _record_lists(self, max_bytes: int | None) -> Iterator[list[Record]]:
        for item in self._decodable(max_bytes):
            for records in item.record_slices(SLICE_ROWS, max_size=self.max_size):
                yield self._within(records)

    def topic_record_lists(
        self, topic: str, partition: int
    ) -> Iterator[tuple[int, list[TopicRecord]]]:
        """Yield lists of records with their topic and partition.

        Each list comes with the size in bytes of the stored batches that it was read
        from.
        """
        return readable(self.segments, self._placed_lists(topic, partition))

    def _placed_lists(
        self, topic: str, partition: int
    ) -> Iterator[tuple[int, list[TopicRecord]]]:
        for item in self._decodable(None):
            if isinstance(item, Run):
                yield (
                    item.size_bytes,
                    self._within(item.placed_records(topic, partition)),
                )
                continue
            for records in item.record_slices(SLICE_ROWS, max_size=self.max_size):
                yield (
                    item.size_bytes,
                    kernel.to_topic_records(topic, partition, self._within(records)),
                )

    def _decodable(self, max_bytes: int | None) -> Iterator[Run | RecordBatch]:
        """Yield runs and batches with records, in sizes for decoding to objects."""
        # With a limit, a run is a quarter of it, because a run that would exceed the
        # limit is left out as a whole.
        if max_bytes is None:
            run_bytes = _OBJECT_BYTES
        else:
            run_bytes = max(1, min(_OBJECT_BYTES, max_bytes // 4))
        for item in self._limited(max_bytes, self._runs(run_bytes, SLICE_ROWS)):
            if isinstance(item, RecordBatch) and item.is_control:
                item.verify()  # only a valid CRC proves that it is one
                continue
            yield item

    def _within(self, records: list[_RecordT]) -> list[_RecordT]:
        """Return the records in [start, end) of consecutive records."""
        start = self.start
        end = self.end
        if records and not (start <= records[0].offset and records[-1].offset < end):
            return [record for record in records if start <= record.offset < end]
        return records

    def columns(self) -> Iterator[RecordColumns]:
        """Yield chunks of columns, none of them empty."""
        return readable(self.segments, self._column_chunks())

    def _column_chunks(self) -> Iterator[RecordColumns]:
        for item in self._runs(_COLUMN_BYTES, _COLUMN_ROWS):
            if isinstance(item, RecordBatch) and item.is_control:
                item.verify()  # only a valid CRC proves that it is one
                continue
            for part in item.column_slices(SLICE_ROWS, max_size=self.max_size):
                columns = part.between(self.start, self.end)
                if len(columns):
                    yield columns

    def typed_columns(
        self, rows: int, size_bytes: int
    ) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        """Yield chunks of columns, each with the timestamp types of its records.

        A type is 0 for CreateTime, 1 for LogAppendTime and -1 for none. `rows` and
        `size_bytes` limit a chunk, but a chunk contains at least one batch.
        """
        return readable(self.segments, self._typed_chunks(rows, size_bytes))

    def _typed_chunks(
        self, rows: int, size_bytes: int
    ) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        for item in self._runs(size_bytes, rows):
            if isinstance(item, RecordBatch) and item.is_control:
                item.verify()  # only a valid CRC proves that it is one
                continue
            for part in item.column_slices(SLICE_ROWS, max_size=self.max_size):
                columns = part.between(self.start, self.end)
                if not len(columns):
                    continue
                if isinstance(item, RecordBatch):
                    types = np.full(len(columns), item.timestamp_type, np.int32)
                else:
                    # All of the run, or its end: a run that was cut at `start` has one
                    # batch.
                    types = item.timestamp_types()[: len(columns)]
                yield columns, types

    def batches(self, max_bytes: int | None = None) -> Iterator[RecordBatch]:
        """Yield complete batches, control batches included."""

        def single() -> Iterator[RecordBatch]:
            for item in self._runs(_COLUMN_BYTES, _COLUMN_ROWS):
                if isinstance(item, Run):
                    yield from item.batches()
                else:
                    yield item

        return readable(self.segments, self._limited(max_bytes, single()))

    @staticmethod
    def _limited(max_bytes: int | None, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yield items until one would exceed `max_bytes`, but at least one."""
        used = 0
        for item in items:
            if max_bytes is not None and used and used + item.size_bytes > max_bytes:
                return
            used += item.size_bytes
            yield item

    def _runs(self, run_bytes: int, run_rows: int) -> Iterator[Run | RecordBatch]:
        """Yield the range in order: runs of plain batches, and other batches alone.

        A run ends before the batch that reaches `end`. Therefore, only single batches
        may contain records after the range. The first item may begin before `start`.
        The first run has one batch, because many reads need one record only. With
        `committed`, aborted data is left out and there are no runs.
        """
        start = self.start
        end = self.end
        committed = self.committed
        most = 1  # maximum bytes of a run; with 1, the first run has one batch
        want = _FIRST_PIECE_BYTES
        before: Segment | None = None
        ran = False  # whether the last item was a run, with an unconfirmed end
        # The offset at which the next batch must begin; -1 if only its header contains
        # it.
        expected = -1
        if start < end:
            self.gaps.check_start(self.segments, start)
        # Step 1: choose the segments of the range, and check the gaps between them.
        for number, segment in enumerate(self.segments, 1):
            if number < len(self.segments):
                next_base = self.segments[number].base_offset
            else:
                next_base = INT64_MAX
            reached = -1
            if before is not None:
                reached = before.next_offset()
            if before is not None:
                self.gaps.check_segment_end(before, reached, segment.base_offset)
            # If a compaction joined a segment to the previous one after this object was
            # created, the segment appears twice.
            start = max(start, reached)
            if segment.base_offset >= end or start >= end:
                return
            # The previous one contained all of it, and its file may be deleted.
            if next_base <= start and not segment.exists():
                continue
            before = segment
            self.gaps.check_not_truncated(segment)
            # Step 2: find the position of the first batch: by the cursor, by the index,
            # or at the beginning of the file.
            dense = True  # until a gap proves that compaction was here
            position = 0
            known = None
            if self.cursor is not None:
                known = self.cursor.position(segment, start)
            if known is not None:
                position = known
                expected = start
            elif segment.base_offset < start:
                position, expected = self._find(segment, start, min(end, next_base))
            else:
                expected = max(expected, segment.base_offset)
            size = segment.size_bytes
            # Step 3: read the file in pieces, and in each piece all complete runs and
            # batches.
            while position < size:
                # The file may have been truncated after `end` since its size was read.
                if ran and expected >= end:
                    return
                piece = segment.retained_bytes_at(position, min(want, size - position))
                want = _PIECE_BYTES
                data = piece.data
                at = piece.at
                limit = piece.limit
                origin = piece.origin
                begin = at
                while at < limit:
                    # Step 4: take a run of plain batches.
                    stop = at
                    rows = 0
                    following = expected
                    if committed is None:
                        stop, rows, following = kernel.plan_run(
                            data,
                            at,
                            limit,
                            run_rows,
                            most,
                            min(end, next_base),
                            expected,
                            dense,
                        )
                    # A batch with very many records is not a run: it is decoded alone,
                    # in slices. A first batch that begins above `start` is not a run
                    # either: only its neighbors show whether that is a gap or damage.
                    is_run = stop > at and rows <= run_rows
                    if is_run and (expected >= 0 or not self._begins_late(data, at)):
                        most = run_bytes
                        ran = True
                        expected = following
                        yield Run(data, at, stop, rows, origin, segment.path)
                        at = stop
                        if self.cursor is not None:
                            self.cursor.set(segment, origin + at, expected)
                        continue
                    # Step 5: take one batch. Later data is not part of the range; it
                    # may be the torn tail of a write.
                    if ran and expected >= end:
                        return
                    ran = False
                    batch = RecordBatch.parse(
                        data, at, limit, path=segment.path, origin=origin
                    )
                    # The batch is larger than the piece, or not complete at all.
                    if batch is None and at == begin:
                        batch = segment.batch(position)
                    if batch is None:  # it continues in the next piece
                        break
                    if (
                        batch.last_offset >= next_base
                        and not self.segments[number].exists()
                    ):
                        # A compaction joined them after this object was created.
                        next_base = INT64_MAX
                        continue
                    dense = self._check_order(batch, expected, next_base, dense)
                    if batch.magic == 2 and batch.base_offset >= end:
                        return
                    if committed is None or not _is_aborted(batch, committed):
                        yield batch
                    else:
                        batch.verify()
                    expected = batch.next_offset
                    at += batch.size_bytes
                    if self.cursor is not None:
                        self.cursor.set(segment, origin + at, expected)
                    if expected >= end:
                        return
                # There is no complete batch at the position, so the loop would not end.
                if at == begin:
                    raise CorruptBatchError(
                        layout.WALK_REASONS[layout.WALK_SHORT],
                        path=segment.path,
                        position=position,
                    )
                position = origin + at
        # Step 6: check that the range was complete.
        if before is not None and max(start, expected) < end:
            raise CorruptLogError(
                "the end of the log is missing",
                path=before.path,
                offset=max(start, expected),
                expected=f"records up to offset {end}",
                found=f"an end at offset {max(start, expected)}",
            )

    @staticmethod
    def _find(segment: Segment, start: int, end: int) -> tuple[int, int]:
        """Find the batch that contains `start`.

        Returns its position and the base offset that it must have according to its
        neighbors. A batch with a damaged offset may claim the offsets of others. `end`
        is the end of the segment's offsets.
        """
        position = segment.find(start)
        before = segment.start_position(start)  # headers are read from here
        index = segment.offset_index
        heads, _, _ = kernel.walk(*segment.head(position), 1, False)
        if not len(heads):
            return position, -1
        base, last, behind = (
            int(heads[name][0]) for name in ("base_offset", "last_offset", "size_bytes")
        )
        # The index gives the last offset of the batch, unless Kafka has written the
        # entry.
        if 0 < before == position:
            relative, _ = index.entry(index.find(start - segment.base_offset))
            if last == segment.base_offset + relative:
                return position, base
            before = 0
        expected = segment.base_offset
        for facts, _, _ in segment.walk(before, stop=position, crc=False):
            if len(facts):
                expected = int(facts["last_offset"][-1]) + 1
        if base <= start and base != expected:
            # This batch or the previous one is damaged. The base offset of the next
            # batch decides, or the end of the segment if there is none.
            piece = segment.bytes_at(position + behind, 8)
            head = piece.data[piece.at : piece.at + 8]
            following = -1
            if len(head) == 8:
                following = int.from_bytes(head, "big", signed=True)
            continues_at = following
            if following < 0:
                continues_at = end
            if last + 1 == continues_at:
                return position, base
            if 0 <= following <= last:
                return position, last + 1
        return position, expected

    def _begins_late(self, data: memoryview, at: int) -> bool:
        """Return whether the first batch begins above `start`.

        Without a gap, it would contain `start`.
        """
        return int.from_bytes(data[at : at + 8], "big") > self.start

    def _check_order(
        self, batch: RecordBatch, expected: int, next_base: int, dense: bool
    ) -> bool:
        """Compare the offset in a header, which no CRC covers, with its neighbors.

        A damaged offset would give the records other offsets, or hide all later ones.
        Returns whether gaps still count as a loss.

        Raises:
            CorruptBatchError: the offset is damaged, or batches are missing.
        """
        base = batch.base_offset
        last = batch.last_offset
        if expected < 0:
            first = min(base, self.start)
        else:
            first = expected
        if base == first <= last < next_base:
            return dense  # the usual case, in a fifth of the time
        dense_from = NEVER
        if dense:
            dense_from = 0
        fault = fault_of(batch.magic, base, last, first, next_base, dense_from)
        if fault is None:
            return dense
        allowed = f"at least {first} and below {next_base}"
        if fault is OrderFault.GAP:
            if not self.gaps.is_loss(first, base):
                return False  # compaction was here: later gaps are not checked
            allowed = f"base offset {first}"
        raise CorruptBatchError(
            "the offset of a batch does not continue the one before it",
            path=batch.path,
            position=batch.position,
            offset=first,
            expected=allowed,
            found=base,
        )


def _is_aborted(batch: RecordBatch, committed: PartitionTransactions) -> bool:
    return batch.is_transactional and committed.is_aborted(
        batch.producer_id, batch.base_offset
    )


class Span(NamedTuple):
    """The records in [start, end) of one partition, as the input of a scan.

    `open` lists the segments of a range at the time of the call. A scan that is kept for
    a long time therefore reads no deleted segments. `find_time` returns the first offset
    with this or a later timestamp in milliseconds, or None.
    """

    topic: str | None
    partition: int | None
    start: int
    end: int
    open: Callable[[int, int], LogRange]
    find_time: Callable[[int], int | None]

    def within(self, bounds: FilterBounds) -> Span:
        """Return the part that may have records within bounds. It may be empty."""
        start = max(self.start, bounds.offset[0])
        end = min(self.end, bounds.offset[1])
        first, last = bounds.partition
        if self.partition is not None and not first <= self.partition < last:
            end = start
        since_ms = bounds.timestamp[0]
        if since_ms > 0 and start < end:
            found = self.find_time(since_ms)
            if found is None:
                end = start
            else:
                start = max(start, found)
        return self._replace(start=start, end=end)


def _shown(column: str, columns: RecordColumns, record: Record) -> object:
    """Return a cell of a table in a notebook."""
    if column in ("topic", "partition"):
        return getattr(columns, column)
    if column == "timestamp":
        return html.format_time(record.timestamp_ms)
    if column == "headers":
        return html.shorten(
            ", ".join(
                f"{name}={html.format_bytes(value)}" for name, value in record.headers
            )
        )
    value = getattr(record, column)
    if isinstance(value, int):
        return value
    return html.format_bytes(value)


class Scan:
    """The records of one or more partitions between two offsets, as columns.

    Records are decoded on demand, and a scan may be read several times. Iteration
    yields RecordColumns of some thousand rows each. Their borrowed memory remains valid
    as long as they are kept, and they contain their topic and partition. polars, duckdb
    and pyarrow.table accept the scan itself, because it has __arrow_c_stream__ (which
    needs pyarrow). `columns` are the columns passed to Arrow, pandas and polars; others
    are not created.
    """

    def __init__(
        self, spans: Sequence[Span], columns: Iterable[str] = ARROW_COLUMNS
    ) -> None:
        """Create a scan. Users call Log.scan() or Topic.scan().

        Raises:
            InvalidConfigError: a column does not exist.
        """
        self.columns = checked_columns(columns)
        self._spans = spans

    def __repr__(self) -> str:
        parts = [f"offsets {span.start}..{span.end}" for span in self._spans[:1]]
        if len(self._spans) != 1:
            parts = [f"{len(self._spans)} partitions"]
        return f"<Scan {parts[0]} columns={list(self.columns)}>"

    def _repr_html_(self) -> str:
        """Return the first records as a table, for notebooks."""
        rows: list[tuple[object, ...]] = []
        for columns in self:
            part = columns[:_SHOWN_ROWS]
            rows += [
                tuple(_shown(column, columns, record) for column in self.columns)
                for record in itertools.islice(part.records(), _SHOWN_ROWS - len(rows))
            ]
            if len(rows) == _SHOWN_ROWS:
                break
        offsets = sum(span.end - span.start for span in self._spans)
        caption = f"scan of {self._where()}: {offsets:,} offsets"
        note = ""
        if len(rows) < offsets:
            note = f"the first {len(rows)} records"
        return html.table(caption, self.columns, rows, note=note)

    def _where(self) -> str:
        names = [
            f"{span.topic}-{span.partition}"
            for span in self._spans
            if span.topic is not None
        ]
        if len(names) > _SHOWN_NAMES:
            return f"{', '.join(names[:_SHOWN_NAMES])} and {len(names) - _SHOWN_NAMES} more"
        return ", ".join(names) or "a log"

    @property
    def schema(self) -> pyarrow.Schema:
        """The Arrow schema of `columns`. No record is read.

        Raises:
            MissingDependencyError: pyarrow is not installed.
        """
        return arrow_schema(self.columns)

    def select(self, *columns: str) -> Scan:
        """Return the same scan with only these columns.

        They are some of: topic, partition, offset, timestamp, key, value, headers.
        """
        return Scan(self._spans, columns)

    def __iter__(self) -> Iterator[RecordColumns]:
        for span in self._spans:
            topic = span.topic
            partition = span.partition
            for columns in span.open(span.start, span.end).columns():
                columns.name(topic, partition)
                yield columns

    def json(self) -> Iterator[JsonRecord]:
        """Return an iterator over the records, with values parsed as JSON.

        A value that is not JSON ends nothing: its JsonRecord has an `error`, which
        names the offset.
        """
        return json_records(self)

    def to_reader(self) -> pyarrow.RecordBatchReader:
        """Return a pyarrow.RecordBatchReader that decodes while it is read.

        Raises:
            MissingDependencyError: pyarrow is not installed.
        """
        schema = self.schema
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(
            schema, (columns.to_arrow(self.columns) for columns in self)
        )

    def to_table(self) -> pyarrow.Table:
        """Return all records as one pyarrow.Table."""
        return self.to_reader().read_all()

    def to_pandas(self) -> pandas.DataFrame:
        """Return all records as a pandas.DataFrame.

        Timestamps have the time zone UTC, keys and values are bytes, and null is None.

        Raises:
            MissingDependencyError: pandas or pyarrow is not installed.
        """
        import importlib.util

        # pyarrow's own message does not explain how to install pandas.
        if importlib.util.find_spec("pandas") is None:
            raise MissingDependencyError("to_pandas needs pandas: pip install pandas")
        frame: pandas.DataFrame = self.to_table().to_pandas()
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Return all records as a polars.DataFrame.

        Raises:
            MissingDependencyError: polars or pyarrow is not installed.
        """
        try:
            import polars
        except ImportError as error:
            raise MissingDependencyError(
                "to_polars needs polars: pip install polars"
            ) from error
        return polars.DataFrame(self.to_table())

    def to_lazyframe(self) -> polars.LazyFrame:
        """Return the records as a polars.LazyFrame, which reads when it is collected.

        Columns that a query does not need are not built. FilterBounds of partition and
        offset, and lower bounds of timestamp, limit the records that are read. Memory
        is bounded if the query is collected with engine="streaming".

        Raises:
            MissingDependencyError: polars or pyarrow is not installed.
        """
        from logcore.partition.polars_source import lazy_frame

        return lazy_frame(self.columns, self._within)

    def _within(self, columns: list[str], bounds: FilterBounds) -> Scan:
        """Return the part of the scan that may have records within bounds."""
        spans = [span.within(bounds) for span in self._spans]
        return Scan([span for span in spans if span.start < span.end], columns)

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        """Refuse conversion to a numpy array.

        numpy, and pandas.DataFrame(scan), which calls numpy, would make one cell of the
        whole scan.
        """
        raise TypeError(
            "a scan is not an array: write scan.to_pandas(), scan.to_polars() or scan.to_table(), or iterate over it "
            "for columns of numpy arrays"
        )

    def __arrow_c_schema__(self) -> object:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)
