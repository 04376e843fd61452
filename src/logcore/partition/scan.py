"""Reading a stretch of a log: from segments to records, columns, batches and Arrow.

Rules:
- A Stretch is fixed when it is made: its segments and its end do not move, so every reading ends.
- Runs of plain batches are decoded together, each other batch alone. The CRC of every batch is checked.
- All that lies in the stretch is delivered or an error is raised; a part that cannot be read never ends it quietly.
- Control batches are steps in the offsets, never records.

This module does not know how a log grows or who writes it.
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

from logcore import htmltable
from logcore.config import INT64_MAX
from logcore.errors import CorruptBatchError, CorruptLogError, LogcoreError, MissingDependencyError
from logcore.format.columns import ARROW_COLUMNS, RecordColumns, arrow_schema, checked_columns
from logcore.kernels import Record, TopicRecord, kernel, layout
from logcore.partition.gaps import Gaps, readable
from logcore.partition.order import NEVER, Fault, fault_of
from logcore.partition.transactions import Transactions
from logcore.recordbatch import SLICE_ROWS, RecordBatch
from logcore.segment import Segment

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

#: Records decoded at once: few enough that they are still in the cache when they are used.
_OBJECT_BYTES: Final = 64 << 10
#: Rows and bytes of one chunk of columns. The memory of larger ones comes from the system for each and goes back, and
#: its pages are mapped again: with a third more, a scan takes 36 instead of 21 ns for each record.
_COLUMN_ROWS: Final = 24_576
_COLUMN_BYTES: Final = 3 << 20
#: Read at once from a segment that is not mapped: little first, because many readings want one record.
_FIRST_PIECE_BYTES: Final = 32 << 10
_PIECE_BYTES: Final = 1 << 20
#: Records of a scan that a notebook shows.
_SHOWN_ROWS: Final = 10
_SHOWN_NAMES: Final = 3


class Run(NamedTuple):
    """Consecutive plain batches in borrowed bytes: data[at:stop], which is byte origin + at of the file at path."""

    data: memoryview
    at: int
    stop: int
    rows: int
    origin: int
    path: str

    @property
    def size_bytes(self) -> int:
        return self.stop - self.at

    def record_slices(self, rows: int, *, max_size: int) -> Iterator[list[Record]]:
        """One list: a run has no more records than its maker asked for."""
        with self._placed():
            records = kernel.decode_objects(self.data, self.at, self.stop, self.path)
        yield records

    def placed_records(self, topic: str, partition: int) -> list[TopicRecord]:
        """As record_slices(), with the topic and partition, in one step: a fifth less of what poll() takes."""
        with self._placed():
            return kernel.decode_placed(self.data, self.at, self.stop, topic, partition, self.path)

    def column_slices(self, rows: int, *, max_size: int) -> Iterator[RecordColumns]:
        """All of it at once, as for record_slices()."""
        yield self.columns()

    def columns(self) -> RecordColumns:
        block = np.empty(self.rows * layout.ROW_SIZE, np.uint8)
        with self._placed():
            rows = kernel.decode_columns(self.data, self.at, self.stop, block, self.rows, self.path)
        assert rows == self.rows, (rows, self.rows)
        return RecordColumns.from_block(self.data, block, rows)

    def timestamp_types(self) -> npt.NDArray[np.int32]:
        """Of each record, as Stretch.typed_columns() gives them."""
        facts, _, _ = kernel.walk(self.data, self.at, self.stop, (self.stop - self.at) // layout.HEADER_SIZE + 1, False)
        types = ((facts["attributes"] & layout.APPEND_TIME_BIT) != 0).astype(np.int32)
        if types.any():
            return np.repeat(types, facts["record_count"])
        return np.zeros(self.rows, np.int32)

    def batches(self) -> Iterator[RecordBatch]:
        at = self.at
        while at < self.stop:
            batch = RecordBatch.parse(self.data, at, self.stop, path=self.path, origin=self.origin)
            assert batch is not None, "a run holds whole batches"
            yield batch
            at += batch.size_bytes

    @contextlib.contextmanager
    def _placed(self) -> Generator[None, None, None]:
        """Turns positions in the bytes read into positions in the file."""
        try:
            yield
        except LogcoreError as error:
            if error.position is not None:
                error.position += self.origin
            raise


def slot_of(segments: Sequence[Segment], offset: int) -> int:
    """Which segment an offset belongs to: the last whose base offset is at or below it, -1 for none."""
    return bisect_right(segments, offset, key=_BASE_OFFSET) - 1


def batch_around(segments: Sequence[Segment], offset: int) -> tuple[int, int]:
    """(base, end) of the batch that an offset lies inside of; the offset twice where one batch ends there."""
    segment = segments[max(0, slot_of(segments, offset))]
    batch = segment.batch(segment.find(offset))
    if batch is None or not batch.base_offset < offset <= batch.last_offset:
        return offset, offset
    return batch.base_offset, batch.last_offset + 1


_BASE_OFFSET = attrgetter("base_offset")
_Item = TypeVar("_Item", Run | RecordBatch, RecordBatch)
_Placed = TypeVar("_Placed", Record, TopicRecord)


class Cursor:
    """The place in a file where a reading ended, for the next one of the same reader to go on from. All that was read
    was visible, so the place stays where a batch ends. Written by Stretch.
    """

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._position = 0
        self._offset = -1

    def set(self, segment: Segment, position: int, offset: int) -> None:
        self._segment = segment
        self._position = position
        self._offset = offset

    def position(self, segment: Segment, offset: int) -> int | None:
        """Where the batch begins that holds an offset; None where the last reading did not end before it."""
        if segment is self._segment and offset == self._offset:
            return self._position
        return None


class Stretch(NamedTuple):
    """What lies in [start, end) of some segments, which stand in order and are the log's from start on.

    committed: for read_committed, what is known of transactions; end is then at most the last stable offset. max_size:
    the most that one batch may inflate to. gaps: which gaps in the offsets are losses. cursor: where the last reading
    ended, and this one.
    """

    segments: Sequence[Segment]
    start: int
    end: int
    committed: Transactions | None
    max_size: int
    gaps: Gaps
    cursor: Cursor | None = None

    def record_lists(self, max_bytes: int | None = None) -> Iterator[list[Record]]:
        """Lists of records, a few hundred each."""
        return readable(self.segments, self._record_lists(max_bytes))

    def _record_lists(self, max_bytes: int | None) -> Iterator[list[Record]]:
        for item in self._decodable(max_bytes):
            for records in item.record_slices(SLICE_ROWS, max_size=self.max_size):
                yield self._within(records)

    def placed_lists(self, topic: str, partition: int) -> Iterator[tuple[int, list[TopicRecord]]]:
        """As record_lists(), with the topic and partition that the records are in; and before each list how many bytes
        of stored batches it takes.
        """
        return readable(self.segments, self._placed_lists(topic, partition))

    def _placed_lists(self, topic: str, partition: int) -> Iterator[tuple[int, list[TopicRecord]]]:
        for item in self._decodable(None):
            if isinstance(item, Run):
                yield item.size_bytes, self._within(item.placed_records(topic, partition))
                continue
            for records in item.record_slices(SLICE_ROWS, max_size=self.max_size):
                yield item.size_bytes, kernel.place_records(topic, partition, self._within(records))

    def _decodable(self, max_bytes: int | None) -> Iterator[Run | RecordBatch]:
        """What holds records, in pieces of a size to make objects of."""
        # Under a limit, in runs of a quarter of it, because a run that would exceed the limit is left out whole.
        if max_bytes is None:
            run_bytes = _OBJECT_BYTES
        else:
            run_bytes = max(1, min(_OBJECT_BYTES, max_bytes // 4))
        for item in self._limited(max_bytes, self._runs(run_bytes, SLICE_ROWS)):
            if isinstance(item, RecordBatch) and item.is_control:
                item.verify()  # only a right CRC says that it is one
                continue
            yield item

    def _within(self, records: list[_Placed]) -> list[_Placed]:
        """Those in [start, end), of records that lie together."""
        start = self.start
        end = self.end
        if records and not (start <= records[0].offset and records[-1].offset < end):
            return [record for record in records if start <= record.offset < end]
        return records

    def columns(self) -> Iterator[RecordColumns]:
        """Chunks of columns; none is empty."""
        return readable(self.segments, self._column_chunks())

    def _column_chunks(self) -> Iterator[RecordColumns]:
        for item in self._runs(_COLUMN_BYTES, _COLUMN_ROWS):
            if isinstance(item, RecordBatch) and item.is_control:
                item.verify()  # only a right CRC says that it is one
                continue
            for part in item.column_slices(SLICE_ROWS, max_size=self.max_size):
                columns = part.between(self.start, self.end)
                if len(columns):
                    yield columns

    def typed_columns(self, rows: int, size_bytes: int) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        """Chunks of columns, each with the timestamp types of its records: 0 CreateTime, 1 LogAppendTime, -1 none.

        rows, size_bytes: of a chunk at most, but not less than a batch.
        """
        return readable(self.segments, self._typed_chunks(rows, size_bytes))

    def _typed_chunks(self, rows: int, size_bytes: int) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        for item in self._runs(size_bytes, rows):
            if isinstance(item, RecordBatch) and item.is_control:
                item.verify()  # only a right CRC says that it is one
                continue
            for part in item.column_slices(SLICE_ROWS, max_size=self.max_size):
                columns = part.between(self.start, self.end)
                if not len(columns):
                    continue
                if isinstance(item, RecordBatch):
                    types = np.full(len(columns), item.timestamp_type, np.int32)
                else:  # all of it, or cut at the start of the stretch, which only a run of one batch is
                    types = item.timestamp_types()[: len(columns)]
                yield columns, types

    def batches(self, max_bytes: int | None = None) -> Iterator[RecordBatch]:
        """Whole batches, control batches too."""

        def single() -> Iterator[RecordBatch]:
            for item in self._runs(_COLUMN_BYTES, _COLUMN_ROWS):
                if isinstance(item, Run):
                    yield from item.batches()
                else:
                    yield item

        return readable(self.segments, self._limited(max_bytes, single()))

    @staticmethod
    def _limited(max_bytes: int | None, items: Iterator[_Item]) -> Iterator[_Item]:
        """Items until the one that would exceed max_bytes, but at least one."""
        used = 0
        for item in items:
            if max_bytes is not None and used and used + item.size_bytes > max_bytes:
                return
            used += item.size_bytes
            yield item

    def _runs(self, run_bytes: int, run_rows: int) -> Iterator[Run | RecordBatch]:
        """All of the stretch in order: runs of plain batches, and each other batch alone.

        A run ends before the batch that reaches the end, so only lone batches hold records to leave out there; the
        first item may begin before the start. The first run is one batch, because many readings want one record. With
        committed, aborted data is left out and there are no runs.
        """
        start = self.start
        end = self.end
        committed = self.committed
        most = 1  # bytes of a run: the first one is one batch
        want = _FIRST_PIECE_BYTES
        before: Segment | None = None
        ran = False  # whether the last item was a run, whose end no batch head has confirmed yet
        expected = -1  # the offset that the next batch continues with; -1 where nothing but its head tells
        if start < end:
            self.gaps.check_front(self.segments, start)
        for number, segment in enumerate(self.segments, 1):
            if number < len(self.segments):
                next_base = self.segments[number].base_offset
            else:
                next_base = INT64_MAX
            reached = -1
            if before is not None:
                reached = before.next_offset()
            if before is not None:
                self.gaps.check_behind(before, reached, segment.base_offset)
            # A segment that a compaction joined to the one before, after this stretch was made, comes twice.
            start = max(start, reached)
            if segment.base_offset >= end or start >= end:
                return
            if next_base <= start and not segment.is_there():  # all of it was in the one before; its file may be gone
                continue
            before = segment
            self.gaps.check_whole(segment)
            dense = True  # until a gap shows that compaction was here
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
            # Piece by piece of the file, and in each piece as many runs and batches as it holds whole.
            while position < size:
                if ran and expected >= end:  # the file may have been cut behind it since its size was read
                    return
                piece = segment.lasting_piece(position, min(want, size - position))
                want = _PIECE_BYTES
                data = piece.data
                at = piece.at
                limit = piece.limit
                origin = piece.origin
                begin = at
                while at < limit:
                    stop = at
                    rows = 0
                    following = expected
                    if committed is None:
                        stop, rows, following = kernel.plan_run(
                            data, at, limit, run_rows, most, min(end, next_base), expected, dense
                        )
                    # A batch of very many records is no run: it is decoded alone, in slices. Nor is a first batch
                    # that begins above the start: only its neighbours tell whether that is a gap or damage.
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
                    if ran and expected >= end:  # what follows is not ours to read: the torn tail of a writer, say
                        return
                    ran = False
                    batch = RecordBatch.parse(data, at, limit, path=segment.path, origin=origin)
                    if batch is None and at == begin:  # larger than the piece, or not whole at all
                        batch = segment.batch(position)
                    if batch is None:  # it goes on in the next piece
                        break
                    if batch.last_offset >= next_base and not self.segments[number].is_there():
                        next_base = INT64_MAX  # a compaction joined them since this stretch was made
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
                if at == begin:  # nothing in the piece, and no whole batch at its position: the loop would not end
                    raise CorruptBatchError(
                        layout.WALK_REASONS[layout.WALK_SHORT], path=segment.path, position=position
                    )
                position = origin + at
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
        """(position of the batch that holds start, the base offset that it must have by its neighbours). A batch whose
        offset is damaged may claim offsets of others. end: of the segment's offsets.
        """
        position = segment.find(start)
        before = segment.start_position(start)  # where the index leads: from there on heads are walked
        index = segment.offset_index
        heads, _, _ = kernel.walk(*segment.head(position), 1, False)
        if not len(heads):
            return position, -1
        base, last, behind = (int(heads[name][0]) for name in ("base_offset", "last_offset", "size_bytes"))
        if 0 < before == position:  # the index says in which offset the batch ends, unless Kafka has written the entry
            relative, _ = index.entry(index.find(start - segment.base_offset))
            if last == segment.base_offset + relative:
                return position, base
            before = 0
        expected = segment.base_offset
        for facts, _, _ in segment.walk(before, stop=position, crc=False):
            if len(facts):
                expected = int(facts["last_offset"][-1]) + 1
        if base <= start and base != expected:
            # This batch or the one before it is damaged. The base offset of the batch behind decides, or the end of the
            # segment if there is none.
            piece = segment.piece(position + behind, 8)
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
        """Whether the first batch begins above the start, where it would hold it unless there is a gap."""
        return int.from_bytes(data[at : at + 8], "big") > self.start

    def _check_order(self, batch: RecordBatch, expected: int, next_base: int, dense: bool) -> bool:
        """Compares the offset in a head, which no CRC covers, with its neighbours: a damaged one would give the records
        other offsets, or hide all that follow. Returns whether gaps still count as a loss.

        Raises CorruptBatchError.
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
        if fault is Fault.GAP:
            if not self.gaps.is_loss(first, base):
                return False  # compaction was here: from now on gaps are not asked about
            allowed = f"base offset {first}"
        raise CorruptBatchError(
            "the offset of a batch does not continue the one before it",
            path=batch.path,
            position=batch.position,
            offset=first,
            expected=allowed,
            found=base,
        )


def _is_aborted(batch: RecordBatch, committed: Transactions) -> bool:
    return batch.is_transactional and committed.is_aborted(batch.producer_id, batch.base_offset)


class Span(NamedTuple):
    """What a scan reads of one partition: the records in [start, end). open: looks at the log at the time of the call,
    so that a scan that is kept for long reads no deleted segments.
    """

    topic: str | None
    partition: int | None
    start: int
    end: int
    open: Callable[[], Stretch]


def _shown(column: str, columns: RecordColumns, record: Record) -> object:
    """A cell of a table in a notebook."""
    if column in ("topic", "partition"):
        return getattr(columns, column)
    if column == "timestamp":
        return htmltable.shown_time(record.timestamp_ms)
    if column == "headers":
        return htmltable.cut(", ".join(f"{name}={htmltable.shown_bytes(value)}" for name, value in record.headers))
    value = getattr(record, column)
    if isinstance(value, int):
        return value
    return htmltable.shown_bytes(value)


class Scan:
    """The records of one or more partitions between two offsets as columns, decoded as they are asked for; may be read
    several times.

    Iterating gives RecordColumns, some thousand rows each, over borrowed memory that stays valid as long as they are
    kept; the columns know their topic and partition. polars, duckdb and pyarrow.table take the object itself: it has
    __arrow_c_stream__ (which needs pyarrow). columns: what Arrow, pandas and polars are given; others are not made.
    """

    def __init__(self, spans: Sequence[Span], columns: Iterable[str] = ARROW_COLUMNS) -> None:
        """Not for users. Raises InvalidConfigError for a column that there is not."""
        self.columns = checked_columns(columns)
        self._spans = spans

    def __repr__(self) -> str:
        parts = [f"offsets {span.start}..{span.end}" for span in self._spans[:1]]
        if len(self._spans) != 1:
            parts = [f"{len(self._spans)} partitions"]
        return f"<Scan {parts[0]} columns={list(self.columns)}>"

    def _repr_html_(self) -> str:
        """The first records as a table: a notebook shows it."""
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
        return htmltable.table(caption, self.columns, rows, note=note)

    def _where(self) -> str:
        names = [f"{span.topic}-{span.partition}" for span in self._spans if span.topic is not None]
        if len(names) > _SHOWN_NAMES:
            return f"{', '.join(names[:_SHOWN_NAMES])} and {len(names) - _SHOWN_NAMES} more"
        return ", ".join(names) or "a log"

    def select(self, *columns: str) -> Scan:
        """The same scan giving only these columns, of: topic, partition, offset, timestamp, key, value, headers."""
        return Scan(self._spans, columns)

    def __iter__(self) -> Iterator[RecordColumns]:
        for span in self._spans:
            topic = span.topic
            partition = span.partition
            for columns in span.open().columns():
                columns.name(topic, partition)
                yield columns

    def to_reader(self) -> pyarrow.RecordBatchReader:
        """A pyarrow.RecordBatchReader that decodes as it is read. Raises MissingDependencyError without pyarrow."""
        schema = arrow_schema(self.columns)
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(schema, (columns.to_arrow(self.columns) for columns in self))

    def to_table(self) -> pyarrow.Table:
        """All of it as one pyarrow.Table."""
        return self.to_reader().read_all()

    def to_pandas(self) -> pandas.DataFrame:
        """All of it as a pandas.DataFrame: timestamps with the time zone UTC, keys and values as bytes, None for null.

        Raises MissingDependencyError without pandas or pyarrow.
        """
        import importlib.util

        if importlib.util.find_spec("pandas") is None:  # pyarrow's own message does not say how to get it
            raise MissingDependencyError("to_pandas needs pandas: pip install pandas")
        frame: pandas.DataFrame = self.to_table().to_pandas()
        return frame

    def to_polars(self) -> polars.DataFrame:
        """All of it as a polars.DataFrame. Raises MissingDependencyError without polars or pyarrow."""
        try:
            import polars
        except ImportError as error:
            raise MissingDependencyError("to_polars needs polars: pip install polars") from error
        return polars.DataFrame(self.to_table())

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        """Refuses: numpy, and pandas.DataFrame(scan), which asks numpy, would make one cell of the whole scan."""
        raise TypeError(
            "a scan is no array: write scan.to_pandas(), scan.to_polars() or scan.to_table(), or iterate over it for "
            "columns of numpy arrays"
        )

    def __arrow_c_schema__(self) -> object:
        return arrow_schema(self.columns).__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)
