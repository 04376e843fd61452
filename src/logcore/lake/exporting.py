"""Exports a topic to a table of a lakehouse, incrementally and exactly once.

    with logcore.open_dir("data", read_only=True) as logdir:
        lake.export(logdir, "orders", lake.DeltaTarget("lake/orders"))

Rules:
- A commit of the table holds rows and the progress of their partitions, so a killed
  export that is repeated neither loses nor repeats a row.
- Committed records are exported, up to the last stable offset at the beginning of the
  export. Control batches are never rows.
- Each difference between the topic and the progress is an error: a new topic of the same
  name, deleted records, a truncated log.
- Memory is bounded by the size of one commit, however large the topic is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from logcore.errors import (
    CommitConflictError,
    InvalidConfigError,
    LakeTableError,
    OffsetOutOfRangeError,
)
from logcore.format.columns import RecordColumns
from logcore.kernels import Record
from logcore.lake import rules
from logcore.lake.avro import avro_format, fields_of_schemas
from logcore.lake.rows import RowBuilder, record_schema
from logcore.lake.rules import ExportProgress, LogBounds, OnGap
from logcore.lake.target import LakeTarget, TableLayout, TableOwner, TableState
from logcore.lake.types import TypeMismatch, merged
from logcore.lake.values import (
    JSON,
    TEXT_COLUMN,
    ValueColumns,
    ValueFormat,
    column_of,
    fields_of,
    inferred,
    reserved_names,
)
from logcore.log import Log
from logcore.logdir import LogDir
from logcore.reader import Isolation, aborted_transactions, typed_columns
from logcore.shipping.forward_rules import fingerprint_offset, record_fingerprint

if TYPE_CHECKING:
    import pyarrow

    from logcore.schemas import DecodedPart

#: Size of the rows of one commit in Arrow's format, by default. A file is smaller.
COMMIT_BYTES: Final = 128 << 20
#: Limits of the records that are decoded at once.
_CHUNK_ROWS: Final = 24_576
_CHUNK_BYTES: Final = 3 << 20
#: How often a commit is repeated after commits of writers that export nothing.
_ATTEMPTS: Final = 10


@attrs.frozen(kw_only=True)
class ExportReport:
    """Result of an export."""

    table: str
    #: Number of exported records.
    record_count: int
    #: Number of commits of the table.
    commit_count: int
    #: The next offset of each partition.
    next_offsets: Mapping[int, int]


@attrs.frozen(kw_only=True)
class ExportOptions:
    """Options of export()."""

    #: The layout, which decides the columns of the table.
    layout: TableLayout = attrs.Factory(TableLayout)
    #: The offset in each partition at which the first export begins, by default the log
    #: start. Later exports begin where the previous one ended.
    start: Mapping[int, int] = attrs.Factory(dict)
    #: The offset in each partition at which the export ends, by default the last stable
    #: offset.
    end: Mapping[int, int] = attrs.Factory(dict)
    #: "skip" continues at the log start if records were deleted before they were
    #: exported.
    on_gap: OnGap = "fail"
    #: Avro schemas as parsed JSON. For values in JSON, None: SCHEMA defines columns.
    #: For values in Avro, None: SCHEMA decodes plain values, and ID: SCHEMA decodes
    #: values with that id of a schema registry.
    schemas: Mapping[int | None, Any] = attrs.Factory(dict)
    #: Decodes values by the schemas of a registry, for value="registry": see
    #: logcore.schemas.ValueDecoder.decode().
    decode: Callable[[bytes], DecodedPart] | None = None
    #: Returns the records to export. All other records count as exported.
    select: Callable[[RecordColumns], npt.NDArray[np.bool_]] | None = None
    #: Size of the rows of one commit in Arrow's format.
    commit_bytes: int = COMMIT_BYTES
    #: Called with the number of offsets that were read, and the total. The first call,
    #: with 0, comes before the first read.
    on_progress: Callable[[int, int], None] | None = None


class _Export:
    """One export."""

    def __init__(
        self, logdir: LogDir, topic: str, target: LakeTarget, options: ExportOptions
    ) -> None:
        self._logdir = logdir
        self._topic = topic
        self._target = target
        self._options = options
        self._format = _value_format(options)
        self._record_schema = record_schema(
            options.layout, needs_day_column=target.needs_day_column
        )
        logdir.refresh()
        self._numbers = logdir.partitions(topic)
        self._topic_id = self._current_topic_id()
        #: The progress in the table.
        self._stored: dict[int, ExportProgress] = {}
        #: The progress of the records that the next commit stores.
        self._pending: dict[int, ExportProgress] = {}
        self._record_count = 0
        self._commit_count = 0
        self._offsets_done = 0
        self._offsets_total = 0

    def run(self) -> ExportReport:
        state = self._opened_table()
        rules.check_topic_id(self._topic, state.owner.topic_id, self._topic_id)
        self._stored = dict(state.progress)
        logs = {number: self._refreshed(number) for number in self._numbers}
        ends = {
            number: min(log.last_stable_offset, self._options.end.get(number, 1 << 63))
            for number, log in logs.items()
        }
        starts = {number: self._start(number, log) for number, log in logs.items()}
        self._offsets_total = sum(
            max(0, ends[number] - starts[number]) for number in ends
        )
        self._report(0)
        self._builder = RowBuilder(
            self._options.layout, self._record_schema, self._value_columns(state)
        )
        for number, log in logs.items():
            self._export_partition(number, log, starts[number], ends[number])
        if self._pending:
            self._commit()
        return ExportReport(
            table=self._target.name,
            record_count=self._record_count,
            commit_count=self._commit_count,
            next_offsets={
                number: progress.next_offset
                for number, progress in sorted(self._stored.items())
            },
        )

    def _opened_table(self) -> TableState:
        """Return the state of the table, after creating it if it does not exist.

        Raises:
            LakeTableError: it is the table of another topic, or has another layout.
        """
        target = self._target
        layout = self._options.layout
        state = target.load(self._numbers)
        if state is None:
            owner = TableOwner(self._topic, self._topic_id, layout)
            target.create(self._first_schema(), owner)
            state = target.load(self._numbers)
        if state is None:
            raise LakeTableError("the table was deleted", path=target.name)
        if state.owner.topic != self._topic:
            raise LakeTableError(
                "the table is the export of another topic: choose another name",
                path=target.name,
                expected=f"topic {self._topic!r}",
                found=repr(state.owner.topic),
            )
        if state.owner.layout != layout:
            raise LakeTableError(
                "the table was created with other options: repeat them, or export to a new table",
                path=target.name,
                expected=_named(layout, state.owner.layout),
                found=_named(state.owner.layout, layout),
            )
        return state

    def _first_schema(self) -> pyarrow.Schema:
        """Return the columns with which the table is created."""
        import pyarrow as pa

        schema = self._record_schema
        if self._format is None:
            return schema
        if self._options.layout.on_error == "text":
            schema = schema.append(pa.field(TEXT_COLUMN, pa.string()))
        reserved = reserved_names(self._record_schema.names)
        for field in fields_of_schemas(self._options.schemas).fields:
            name = column_of(field.name, reserved)
            schema = schema.append(pa.field(name, field.type))
        return schema

    def _value_columns(self, state: TableState) -> ValueColumns | None:
        """Return the collector of values, None if values are one column.

        Raises:
            InvalidConfigError: the given schema does not fit the table.
        """
        if self._format is None:
            return None
        reserved = reserved_names(self._record_schema.names)
        held = fields_of(state.schema, reserved)
        try:
            fields = merged(held, fields_of_schemas(self._options.schemas), held)
        except TypeMismatch as error:
            raise InvalidConfigError(
                f"the schema does not fit the table: field {error.path!r}: {error.reason}",
                expected=error.expected,
                found=error.found,
            ) from error
        return ValueColumns(
            self._format, reserved, fields, self._options.layout.on_error
        )

    def _start(self, number: int, log: Log) -> int:
        """Return the offset at which the export of a partition begins.

        If the table has progress, a partition without progress was added to the topic
        after the last export, and must begin at offset 0.
        """
        bounds = LogBounds(
            path=log.path, start=log.log_start_offset, end=log.high_watermark
        )
        stored = self._stored.get(number)
        if stored is None and not self._stored:
            start = rules.first_offset(bounds, self._options.start.get(number))
            self._pending[number] = ExportProgress(start)
            return start
        if stored is None:
            stored = ExportProgress(0)
        offset = fingerprint_offset(stored.fingerprint)
        if offset is not None and bounds.start <= offset < bounds.end:
            own: Record | None = log.get(offset)
            if own is not None and own.offset != offset:
                own = None  # compaction has removed it
            rules.check_last_record(
                bounds, stored.fingerprint, own, is_compacted=log.config.is_compacted
            )
        start = rules.next_offset(bounds, stored, self._options.on_gap)
        if start != stored.next_offset:
            self._pending[number] = ExportProgress(start, stored.fingerprint)
        return start

    def _export_partition(self, number: int, log: Log, start: int, end: int) -> None:
        at = start
        fingerprint = self._stored.get(number, ExportProgress(0)).fingerprint
        for columns, types in self._chunks(log, start, end):
            last = int(columns.offsets[-1])
            fingerprint = record_fingerprint(next(columns[-1:].records()))
            if self._options.select is not None:
                passing = self._options.select(columns)
                columns = columns[passing]
                types = types[passing]
            if len(columns):
                self._builder.add(number, columns, types, log.path)
            self._pending[number] = ExportProgress(last + 1, fingerprint)
            self._report(last + 1 - at)
            at = last + 1
            if self._builder.size_bytes >= self._options.commit_bytes:
                self._commit()
        if at < end:  # markers or aborted records follow the last record
            self._pending[number] = ExportProgress(end, fingerprint)
            self._report(end - at)

    def _chunks(
        self, log: Log, start: int, end: int
    ) -> Iterator[tuple[RecordColumns, npt.NDArray[np.int32]]]:
        """Yield the committed records of a range.

        Raises:
            ShippingGapError: records of the range were deleted.
            DivergedError: the topic was deleted and created again.
        """
        at = start
        stopped = -1
        while at < end:
            try:
                # `end` is not above the last stable offset, so without aborted records
                # all records are committed. They are then decoded in runs of batches,
                # which takes a tenth of the time.
                isolation: Isolation = "read_uncommitted"
                if aborted_transactions(log, at, end):
                    isolation = "read_committed"
                for columns, types in typed_columns(
                    log,
                    at,
                    end,
                    isolation=isolation,
                    rows=_CHUNK_ROWS,
                    size_bytes=min(_CHUNK_BYTES, self._options.commit_bytes),
                ):
                    yield columns, types
                    at = int(columns.offsets[-1]) + 1
                return
            except OffsetOutOfRangeError:
                # Retention or compaction has replaced files while they were read.
                self._logdir.refresh()
                rules.check_topic_id(
                    self._topic, self._topic_id, self._current_topic_id()
                )
                log.refresh()
                bounds = LogBounds(
                    path=log.path, start=log.log_start_offset, end=log.high_watermark
                )
                progress = ExportProgress(at)
                at = rules.next_offset(bounds, progress, self._options.on_gap)
                if at == stopped:
                    raise
                stopped = at

    def _commit(self) -> None:
        """Store the collected rows and their progress.

        The commit is repeated if a writer that exports nothing has committed, such as a
        compaction of the table.

        Raises:
            CommitConflictError: another export has committed.
        """
        rows = self._builder.finish_table()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._target.commit(rows, self._pending)
                break
            except CommitConflictError:
                state = self._target.load(self._numbers)
                if state is None:
                    raise LakeTableError(
                        "the table was deleted while it was written",
                        path=self._target.name,
                    ) from None
                if dict(state.progress) != self._stored:
                    raise CommitConflictError(
                        "another export to this table is running and has committed; nothing was stored twice. "
                        "Run one export at a time",
                        path=self._target.name,
                    ) from None
                if attempt == _ATTEMPTS:
                    raise
        self._record_count += rows.num_rows
        self._commit_count += 1
        self._stored.update(self._pending)
        self._pending = {}

    def _current_topic_id(self) -> str:
        found = self._logdir.topic_id(self._topic)
        if not found.int:  # no file has it
            return ""
        return str(found)

    def _refreshed(self, number: int) -> Log:
        log = self._logdir.partition(self._topic, number)
        log.refresh()
        return log

    def _report(self, offsets: int) -> None:
        if self._options.on_progress is not None:
            self._offsets_done += offsets
            self._options.on_progress(self._offsets_done, self._offsets_total)


def _value_format(options: ExportOptions) -> ValueFormat | None:
    """Return the format of values that have columns.

    Raises:
        InvalidConfigError: the layout is invalid, or a schema is.
        MissingDependencyError: a package is not installed.
    """
    layout = options.layout
    layout.check()
    if layout.value == "avro":
        return avro_format(options.schemas)
    if layout.value == "json":
        return JSON
    if layout.value == "registry":
        return _registry_format(options.decode)
    if options.schemas:
        raise InvalidConfigError(
            "a schema is for values as columns: value='json' or 'avro' (--value)"
        )
    return None


def _registry_format(decode: Callable[[bytes], DecodedPart] | None) -> ValueFormat:
    if decode is None:
        raise InvalidConfigError(
            "value='registry' (--value registry)",
            expected="decode= (--schemas or --schema-registry)",
            found="none",
        )

    def decoded(value: bytes) -> Mapping[str, Any]:
        piece = decode(value)
        if piece.error is not None:
            raise TypeMismatch(piece.error)
        if piece.schema is None:
            raise TypeMismatch(
                "the value does not begin with the id of a schema",
                expected="a zero byte and four bytes",
                found=repr(value[:5]),
            )
        if not isinstance(piece.value, dict):
            raise TypeMismatch(
                "the value is not an object", found=repr(piece.value)[:40]
            )
        return piece.value

    return ValueFormat(decoded, inferred)


def export(
    logdir: LogDir, topic: str, target: LakeTarget, options: ExportOptions | None = None
) -> ExportReport:
    """Export the new committed records of a topic to a table, which is created.

    The first export begins at the log start, or at `options.start`. A later export begins
    where the previous one ended. The progress is stored in the table.

    Raises:
        TopicNotFoundError: there is no such topic.
        LakeTableError: the table cannot be written, or was created by something else.
        CommitConflictError: another export to the table is running.
        ShippingGapError: records were deleted before they were exported.
        DivergedError: the topic is not the exported one any more, or was truncated.
        RecordRefusedError: a record does not fit the columns of the table.
    """
    return _Export(logdir, topic, target, options or ExportOptions()).run()


def _named(layout: TableLayout, other: TableLayout) -> str:
    """Return the options of a layout that differ from those of another one."""
    theirs = attrs.asdict(other)
    return ", ".join(
        f"{name} {value!r}"
        for name, value in attrs.asdict(layout).items()
        if value != theirs[name]
    )
