"""Local writes: each task writes a log directory on the disk of its own machine, and
returns a receipt for it.

    <path>/<job>@<batch>/<topic>/<task>                       a log directory with <topic>-0 and logcore.local in it
    <path>/<job>@<batch>/<topic>/<task>.<run>.<attempt>.part  the same while an attempt writes it

Rules:
- Each task writes its own directory, so tasks do not wait for each other's locks. An
  attempt writes to a directory with a unique name and renames it at the end. The first
  attempt to rename wins, and the other attempts return its receipt.
- The files of a receipt are durable.
- If a write is repeated under the same name, it replaces the files of the earlier run:
  a directory never contains rows of two runs. The file logcore.local contains the id of
  the run and the checksums of all segments.

gathering.py combines the directories into one log directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

import logcore
from logcore.config import LogConfig
from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    LogcoreError,
    StorageWriteError,
)
from logcore.fs import FS, OS
from logcore.kernels.checksum import crc32c
from logcore.metadata import checkpoint
from logcore.metadata.checkpoint import make_directories
from logcore.metadata.filenames import check_topic_name, partition_name
from logcore.staging.manifest import app_name
from logcore.staging.shipping import SealedSegment, survey
from pyspark_logcore.options import WriteOptions, parse_write
from pyspark_logcore.reader import freeze_gc
from pyspark_logcore.rows import RowRouter, TopicPlan, check_columns, records_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

#: The report in each directory.
REPORT_FILE: Final = "logcore.local"
_FORMAT: Final = 1
_PART: Final = ".part"
_OLD: Final = ".old"
RECEIPT_SCHEMA: Final = (
    "host string, path string, topic string, partition int, first_offset long, last_offset long, records long, "
    "bytes long, checksum long, job string, batch long, task int, tasks int, run string"
)


@attrs.frozen(kw_only=True)
class WriteReceipt:
    """Receipt for the records that one task wrote to one partition.

    A task without rows has a receipt too, with 0 records.
    """

    #: Machine and path of the log directory.
    host: str
    path: str
    topic: str
    partition: int
    first_offset: int
    last_offset: int
    records: int
    #: Size of the segments.
    bytes: int
    #: CRC-32C over the checksums of the segments.
    checksum: int
    #: The name of the write.
    job: str
    batch: int
    #: Number of the task, and number of all tasks.
    task: int
    tasks: int
    #: Id of the attempt to write this batch.
    run: str


@attrs.frozen(kw_only=True)
class TaskReport:
    """Report of one task, as stored in the file in its directory."""

    host: str
    topic: str
    job: str
    batch: int
    task: int
    run: str
    is_compacted: bool
    #: From the number of a partition to its segments with records.
    partitions: Mapping[int, Sequence[SealedSegment]]

    def pack(self) -> bytes:
        facts = attrs.asdict(self, recurse=False)
        facts["format"] = _FORMAT
        facts["partitions"] = {
            str(number): [attrs.astuple(segment) for segment in sealed]
            for number, sealed in self.partitions.items()
        }
        return checkpoint.pack_checked(facts, copies=2)

    def receipts(self, path: str, tasks: int) -> list[WriteReceipt]:
        """Return a receipt per partition with records.

        A task without any records has one receipt with 0 records.
        """
        held = {
            number: sealed for number, sealed in self.partitions.items() if sealed
        } or {0: []}
        found = []
        for number, sealed in sorted(held.items()):
            count = sum(segment.count for segment in sealed)
            found.append(
                WriteReceipt(
                    host=self.host,
                    path=path,
                    topic=self.topic,
                    partition=number,
                    first_offset=0,
                    last_offset=count - 1,
                    records=count,
                    bytes=sum(segment.size_bytes for segment in sealed),
                    checksum=checksum_of(sealed),
                    job=self.job,
                    batch=self.batch,
                    task=self.task,
                    tasks=tasks,
                    run=self.run,
                )
            )
        return found


def checksum_of(sealed: Sequence[SealedSegment]) -> int:
    """Return the checksum of a partition, from the checksums of its segments."""
    return crc32c(b"".join(segment.crc.to_bytes(4, "big") for segment in sealed))


def read_report(fs: FS, path: str) -> TaskReport | None:
    """Read the report file in a directory; return None if it is missing.

    Raises:
        CorruptLogError: the file is damaged.
    """
    content = checkpoint.read(fs, path, REPORT_FILE)
    if content is None:
        return None
    facts = checkpoint.unpack_checked(content)
    where = os.path.join(path, REPORT_FILE)
    try:
        if facts is None or facts.pop("format") != _FORMAT:
            raise ValueError
        facts["partitions"] = {
            int(number): [SealedSegment(*entry) for entry in sealed]
            for number, sealed in facts["partitions"].items()
        }
        return TaskReport(**facts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptLogError(
            "the report of a task is damaged",
            path=where,
            found=repr(content[:40]),
        ) from error


def write_local(
    df: DataFrame,
    path: str,
    topic: str,
    *,
    partitions: int = 1,
    job: str | None = None,
    batch: int | None = None,
    config: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
) -> DataFrame:
    """Write rows to the disks of the executors.

    Each task creates a complete log directory below `path`, on its machine. The columns
    are the columns of df.write.format("logcore"). `partitions` is the number of
    partitions of the topic in each directory. `job` and `batch` name the write; the
    batches of a job count from 0. In foreachBatch the name is the query and its batch,
    and neither argument may be given. Elsewhere the default is a new job. `config`
    contains settings of the topic, and `options` contains options of a batch write,
    such as useTimestampColumn or kafka.compression.type.

    This function runs the job. It returns the receipts as a DataFrame with the columns
    of RECEIPT_SCHEMA, for gather(). All rows are then on the executors' disks.

    Raises:
        LogcoreError: an argument is wrong. A failed task raises Spark's error.
    """
    spark = df.sparkSession
    query = _query_here(spark)
    if query is not None and (job is not None or batch is not None):
        raise InvalidConfigError(
            "in foreachBatch the query and the batch name a local write; leave job and batch out"
        )
    if query is None and job is None and batch:
        raise InvalidConfigError(
            "a batch number needs a job that it belongs to; give job too", found=batch
        )
    if query is not None:
        job, batch = query
    writer = LocalWriter.of(
        path,
        topic,
        df.schema,
        partitions=partitions,
        job=job if job is not None else uuid.uuid4().hex,
        batch=batch or 0,
        config=config,
        options=options,
    )
    rows = df.mapInArrow(writer, RECEIPT_SCHEMA).collect()
    tasks = {row["task"] for row in rows}
    if tasks != set(range(len(tasks))):
        raise CorruptLogError(
            "receipts of a local write are missing", path=path, found=sorted(tasks)
        )
    found = [{**row.asDict(), "tasks": len(tasks)} for row in rows]
    # A frame that Spark plans as empty has no tasks, but its batch gets a receipt.
    if not found:
        found = [
            attrs.asdict(receipt) for receipt in writer.report(0, {}).receipts("", 1)
        ]
    names = [field.split()[0] for field in RECEIPT_SCHEMA.split(",")]
    return spark.createDataFrame(
        [tuple(report[name] for name in names) for report in found], RECEIPT_SCHEMA
    )


def _query_here(spark: Any) -> tuple[str, int] | None:
    """Return the query and the batch whose foreachBatch runs in this thread.

    Returns None if none runs, or if Spark does not expose it.
    """
    try:
        context = spark.sparkContext
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
    except Exception:
        # Spark Connect has no context; its tasks get the name as an argument.
        return None
    if query is None or batch is None:
        return None
    return (str(query), int(batch))


@attrs.frozen(kw_only=True)
class LocalWriter:
    """Pickled function of a task, which writes the rows of its partition and yields
    receipts.
    """

    options: WriteOptions
    topic: str
    names: tuple[str, ...]
    job: str
    batch: int
    run: str
    config: Mapping[str, str]

    @classmethod
    def of(
        cls,
        path: str,
        topic: str,
        schema: Any,
        *,
        partitions: int,
        job: str,
        batch: int,
        config: Mapping[str, object] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> LocalWriter:
        """Check all options and columns.

        Raises:
            LogcoreError: an option or a column is unsuitable.
        """
        given = {name: _text(value) for name, value in (options or {}).items()}
        for name in given:
            if name.lower() in (
                "path",
                "topic",
                "numpartitions",
                "txnappid",
                "txnversion",
                "publishtimeout",
            ):
                raise InvalidConfigError(
                    f"option {name} is not one of a local write; see the arguments of write_local()"
                )
        parsed = parse_write(
            {
                **given,
                "path": path,
                "topic": check_topic_name(topic),
                "numPartitions": str(partitions),
            }
        )
        settings = {name: _text(value) for name, value in (config or {}).items()}
        if parsed.codec is not None:
            # Producers use the name none, and settings of topics the name uncompressed.
            settings.setdefault(
                "compression.type", parsed.codec.replace("none", "uncompressed")
            )
        settings.setdefault("batch.size", str(parsed.batch_bytes))
        LogConfig.parse(settings)
        if not job or batch < 0:
            raise InvalidConfigError(
                "a local write needs a name",
                expected="a job, and a batch of at least 0",
                found=batch,
            )
        return cls(
            options=attrs.evolve(parsed, version=batch),
            topic=topic,
            names=check_columns(schema, parsed),
            job=job,
            batch=batch,
            run=uuid.uuid4().hex,
            config=settings,
        )

    def __call__(
        self, batches: Iterator[pyarrow.RecordBatch]
    ) -> Iterator[pyarrow.RecordBatch]:
        from pyspark import TaskContext

        if self.options.gc_freeze:
            freeze_gc()
        context = TaskContext.get()
        writer = self
        task = 0
        attempt = 0
        if context is not None:
            task = context.partitionId()
            attempt = context.taskAttemptId()
            query = context.getLocalProperty("sql.streaming.queryId")
            batch = context.getLocalProperty("streaming.sql.batchId")
            if query is not None and batch is not None:
                version = int(batch)
                options = attrs.evolve(self.options, version=version)
                writer = attrs.evolve(self, job=query, batch=version, options=options)
        yield _as_batch(writer.write(batches, task, attempt))

    def report(
        self, task: int, partitions: Mapping[int, Sequence[SealedSegment]]
    ) -> TaskReport:
        return TaskReport(
            host=os.uname().nodename,
            topic=self.topic,
            job=self.job,
            batch=self.batch,
            task=task,
            run=self.run,
            is_compacted=LogConfig.parse(self.config).is_compacted,
            partitions=partitions,
        )

    def write(
        self,
        batches: Iterator[pyarrow.RecordBatch],
        task: int,
        attempt: int,
        fs: FS = OS,
    ) -> list[WriteReceipt]:
        """Write rows as the given attempt of the given task.

        The receipts have 0 as the number of tasks, because only the driver has the
        number.

        Raises:
            LogcoreError: a row cannot be written.
        """
        parent = os.path.join(
            self.options.path, f"{app_name(self.job)}@{self.batch:020d}", self.topic
        )
        final = os.path.join(parent, str(task))
        report = None
        if fs.exists(final):
            report = read_report(fs, final)
        if report is not None and report.run == self.run:
            # An earlier attempt wrote the rows. Spark's worker still requires that its
            # input is read.
            for _ in batches:
                pass
            return report.receipts(final, 0)
        make_directories(fs, parent)
        part = f"{final}.{self.run}.{attempt}{_PART}"
        try:
            partitions = self._fill(batches, task, part, fs)
            checkpoint.write(
                fs, part, REPORT_FILE, self.report(task, partitions).pack()
            )
            report = self._put_in_place(fs, part, final)
        except BaseException:
            with contextlib.suppress(LogcoreError, OSError):
                remove_directory(fs, part)
            raise
        return report.receipts(final, 0)

    def _fill(
        self, batches: Iterator[pyarrow.RecordBatch], task: int, part: str, fs: FS
    ) -> dict[int, list[SealedSegment]]:
        """Write a log directory and return the segments of its partitions.

        The directory is closed and durable when this method returns.
        """
        count = self.options.partitions
        # Closing syncs the files, and the directory has its final name only afterwards.
        with logcore.open_dir(part, create=True, durability="os", fs=fs) as directory:
            directory.create_topic(self.topic, count, self.config)
            router = _LocalRouter(
                self.options,
                {self.topic: TopicPlan(count, self.config)},
                self.names,
                task,
            )
            router.directory = directory
            for batch in batches:
                router.add(batch)
            router.flush()
        return {
            number: survey(fs, os.path.join(part, partition_name(self.topic, number)))
            for number in range(count)
        }

    def _put_in_place(self, fs: FS, part: str, final: str) -> TaskReport:
        """Rename a directory to its final name.

        Returns the report of the directory that has this name afterwards.
        """
        parent = os.path.dirname(final)
        old = part[: -len(_PART)] + _OLD
        while True:
            if not fs.exists(final):
                try:
                    fs.rename(part, final)
                except (StorageWriteError, OSError):
                    if not fs.exists(final):
                        raise
                    continue  # another attempt was faster
                fs.sync_dir(parent)
                self._remove_leftovers(fs, final)
                break
            report = read_report(fs, final)
            if report is not None and report.run == self.run:
                remove_directory(fs, part)
                fs.sync_dir(parent)
                return report
            # Move the result of an earlier run away; the new one takes its name.
            with contextlib.suppress(FileNotFoundError):
                fs.rename(final, old)
        found = read_report(fs, final)
        assert found is not None
        return found

    def _remove_leftovers(self, fs: FS, final: str) -> None:
        """Remove directories of this task that other runs or earlier steps left.

        Another attempt of this run may still write.
        """
        parent, task = os.path.split(final)
        for name in fs.listdir(parent):
            other, _, rest = name.partition(".")
            if (
                other == task
                and rest
                and (rest.endswith(_OLD) or not rest.startswith(self.run))
            ):
                with contextlib.suppress(LogcoreError, OSError):
                    remove_directory(fs, os.path.join(parent, name))


class _LocalRouter(RowRouter):
    """Rows of one task into the logs of its own directory."""

    directory: logcore.LogDir

    def _open(self, topic: str, partition: int) -> logcore.Log:
        return self.directory.partition(topic, partition)

    def _store(self, writer: logcore.Log, rows: Any) -> None:
        times = self._times(rows)
        if self._has_headers(rows):
            writer.append_many(records_of(rows, self._names, times))
            return
        keys = None
        if "key" in self._names:
            keys = rows.column("key")
        writer.append_columns(
            keys=keys, values=rows.column("value"), timestamps_ms=times
        )


def _as_batch(receipts: Sequence[WriteReceipt]) -> pyarrow.RecordBatch:
    import pyarrow as pa

    kinds = {"string": pa.string(), "int": pa.int32(), "long": pa.int64()}
    fields = [pa.field(*_split(field, kinds)) for field in RECEIPT_SCHEMA.split(",")]
    return pa.RecordBatch.from_pylist(
        [attrs.asdict(receipt) for receipt in receipts], schema=pa.schema(fields)
    )


def _split(field: str, kinds: Mapping[str, Any]) -> tuple[str, Any]:
    name, kind = field.split()
    return name, kinds[kind]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    return json.dumps(value)


def remove_directory(fs: FS, path: str) -> None:
    """Remove a directory and its content, the report file last, if it exists."""
    if not fs.is_directory(path):
        return
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(fs.listdir(path), key=lambda name: name == REPORT_FILE):
            inside = os.path.join(path, name)
            if fs.is_directory(inside):
                remove_directory(fs, inside)
            else:
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(inside)
        fs.rmdir(path)
