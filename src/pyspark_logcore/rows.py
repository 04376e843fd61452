"""Writer of rows: checks the columns of a DataFrame, chooses the partition of each row,
and stages the records.

The rules are the same as in Spark's Kafka sink:
- The column value is required; key, headers, topic and partition are optional. Other
  columns are not written.
- The option topic overrides the column. A row without a topic is an error.
- A row with a partition is written to it. Otherwise the key chooses the partition, by
  murmur2 as in Kafka's Java client. Rows of a task without a key are written to one
  partition, which is the same for each attempt.
- The timestamp of a record is the time of the write. With useTimestampColumn=true, it is
  the value of the column timestamp.

This module publishes nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from logcore.config import LogConfig
from logcore.errors import InvalidConfigError, InvalidRecordError
from logcore.format.columns import input_column
from logcore.format.compression import Codec, codec_named
from logcore.fs import OS
from logcore.kernels.layout import InputColumns
from logcore.metadata.filenames import check_topic_name
from logcore.partitioner import murmur2
from logcore.staging.manifest import Carried, StagedFile
from logcore.staging.publishing import Staging
from logcore.staging.writing import StagedWriter
from pyspark_logcore.identity import OtherDirectoryError
from pyspark_logcore.options import WriteOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Maximum bytes per message of a task whose machine cannot access the staging
#: directory. Spark's limit for all messages is 1 GiB by default.
_MAX_CARRIED: Final = 512 << 20
#: Rows of one partition are collected up to this number of bytes, so that the sizes of
#: batches do not depend on Spark's batches.
_PENDING_BYTES: Final = 1 << 20
_HEADERS: Final = "array<struct<key:string,value:binary>>"
_ACCEPTED: Final = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (_HEADERS,),
}


@attrs.frozen
class TopicPlan:
    """Number of partitions and settings of a topic, for the tasks."""

    partitions: int
    overrides: Mapping[str, Any]


def check_columns(schema: StructType, options: WriteOptions) -> tuple[str, ...]:
    """Return the columns that will be written.

    Raises:
        InvalidConfigError: a column is missing or has a wrong type.
    """
    accepted = dict(_ACCEPTED)
    if options.use_timestamp:
        accepted["timestamp"] = ("timestamp",)
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    names = []
    for name, kinds in accepted.items():
        if name not in found:
            continue
        if found[name] not in kinds:
            raise InvalidConfigError(
                f"type of the column {name!r}; cast it before writing",
                expected=" or ".join(kinds),
                found=found[name],
            )
        names.append(name)
    if "value" not in found:
        raise InvalidConfigError(
            "a column named value is needed", found=", ".join(found) or "no columns"
        )
    if options.topic is None and "topic" not in found:
        raise InvalidConfigError(
            "the topic is missing: give the option topic, or a column named topic"
        )
    if options.use_timestamp and "timestamp" not in found:
        raise InvalidConfigError(
            "useTimestampColumn=true needs a column named timestamp"
        )
    return tuple(names)


class RowRouter:
    """Passes the rows of one attempt of one task to one writer per topic and partition.

    The rows are collected until they are large enough for a batch.
    """

    def __init__(
        self,
        options: WriteOptions,
        topics: Mapping[str, TopicPlan],
        names: tuple[str, ...],
        task: int,
    ) -> None:
        self._options = options
        self._topics = topics
        self._names = names
        self._task = task
        self._writers: dict[tuple[str, int], Any] = {}
        self._pending: dict[tuple[str, int], tuple[list[Any], int]] = {}

    def _open(self, topic: str, partition: int) -> Any:
        """Open the writer of a partition, at its first row."""
        raise NotImplementedError

    def _store(self, writer: Any, rows: Any) -> None:
        """Write rows, a pyarrow.RecordBatch, to the partition of the writer."""
        raise NotImplementedError

    def add(self, batch: Any) -> None:
        """Add a pyarrow.RecordBatch with the columns that check_columns() returned."""
        if not batch.num_rows:
            return
        for topic, rows in self._by_topic(batch):
            for partition, part in self._by_partition(topic, rows):
                key = topic, partition
                waiting, size = self._pending.setdefault(key, ([], 0))
                waiting.append(part)
                size += part.nbytes
                if size >= _PENDING_BYTES:
                    self._stage(key, waiting)
                    del self._pending[key]
                else:
                    self._pending[key] = waiting, size

    def flush(self) -> None:
        """Pass all collected rows to the writers."""
        for key, (waiting, _) in sorted(self._pending.items()):
            self._stage(key, waiting)
        self._pending = {}

    def _by_topic(self, batch: Any) -> list[tuple[str, Any]]:
        if self._options.topic is not None:
            return [(self._options.topic, batch)]
        import pyarrow as pa
        import pyarrow.compute as pc

        column = batch.column("topic")
        if column.null_count:
            raise InvalidRecordError(
                f"a row of task {self._task} has no topic, and the option topic is not given"
            )
        coded = column.dictionary_encode()
        names = coded.dictionary.to_pylist()
        if len(names) == 1:
            return [(check_topic_name(names[0]), batch)]
        return [
            (
                check_topic_name(name),
                batch.filter(
                    pc.call_function(
                        "equal", [coded.indices, pa.scalar(code, coded.indices.type)]
                    )
                ),
            )
            for code, name in enumerate(names)
        ]

    def _by_partition(self, topic: str, batch: Any) -> list[tuple[int, Any]]:
        plan = self._topics.get(topic)
        if plan is None:
            count = self._options.partitions
        else:
            count = plan.partitions
        numbers = self._numbers(topic, batch, count)
        low = int(numbers.min())
        high = int(numbers.max())
        if low == high:
            return [(low, batch)]
        import pyarrow as pa

        order = np.argsort(numbers, kind="stable")
        ordered = batch.take(pa.array(order))
        edges = np.flatnonzero(np.diff(numbers[order])) + 1
        boundaries = [0, *edges.tolist(), len(numbers)]
        return [
            (int(numbers[order[start]]), ordered.slice(start, stop - start))
            for start, stop in itertools.pairwise(boundaries)
        ]

    def _numbers(self, topic: str, batch: Any, count: int) -> npt.NDArray[np.int64]:
        """Return the partition of each row."""
        rows = batch.num_rows
        numbers = np.full(rows, -1, np.int64)
        if "partition" in self._names:
            given = batch.column("partition")
            numbers = np.asarray(
                given.fill_null(-1).to_numpy(zero_copy_only=False), np.int64
            )
            # A null lets the router choose the partition. Negative numbers are errors,
            # like numbers that are too large.
            is_invalid = (
                (numbers < 0) | (numbers >= count)
            ) & ~given.is_null().to_numpy(zero_copy_only=False)
            if is_invalid.any():
                raise InvalidRecordError(
                    f"topic {topic!r} has no such partition",
                    expected=f"0 to {count - 1}",
                    found=int(numbers[int(is_invalid.argmax())]),
                )
        free = numbers < 0
        if not free.any():
            return numbers
        if count == 1:
            return np.zeros(rows, np.int64)
        sticky = (self._task + self._options.version) % count
        if "key" not in self._names or batch.column("key").null_count == rows:
            return np.where(free, sticky, numbers)
        data, edges, nulls = input_column(batch.column("key"), "key")
        hashed = (murmur2(data, edges).astype(np.int64) & 0x7FFFFFFF) % count
        if nulls is not None:
            hashed = np.where(nulls != 0, sticky, hashed)
        return np.where(free, hashed, numbers)

    def _stage(self, key: tuple[str, int], parts: list[Any]) -> None:
        import pyarrow as pa

        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = self._open(*key)
        # The result is several batches if the values exceed 32-bit offsets.
        for rows in (
            parts
            if len(parts) == 1
            else pa.Table.from_batches(parts).combine_chunks().to_batches()
        ):
            self._store(writer, rows)

    def _times(self, rows: Any) -> npt.NDArray[np.int64] | None:
        """Return the timestamps in milliseconds, or None for the time of the write."""
        if self._options.use_timestamp:
            return _milliseconds(rows.column("timestamp"))
        return None

    def _has_headers(self, rows: Any) -> bool:
        return "headers" in self._names and _has_headers(rows.column("headers"))


class RowStager(RowRouter):
    """Stages the rows of one attempt of one task."""

    def __init__(
        self,
        options: WriteOptions,
        txid: str,
        topics: Mapping[str, TopicPlan],
        names: tuple[str, ...],
        task: int,
        attempt: int,
    ) -> None:
        super().__init__(options, topics, names, task)
        self._txid = txid
        self._attempt = attempt
        if options.codec is None:
            self._codec = Codec.NONE
        else:
            self._codec = codec_named(options.codec)
        # The planner created this directory. If it is missing here, this machine cannot
        # access the staging directory, and messages carry all records.
        self._has_directory = Staging(OS, options.path).is_begun(txid)
        self._holds = options.carry_bytes > 0 or not self._has_directory

    def close(self) -> tuple[list[StagedFile], list[Carried]]:
        """Stage the collected rows and return the durable files that hold all rows.

        If the task wrote little, return the encoded records instead of files.
        """
        self.flush()
        writers: list[StagedWriter] = [
            writer for _, writer in sorted(self._writers.items())
        ]
        if self._holds:
            return [], [
                piece
                for piece in (writer.carry() for writer in writers)
                if piece is not None
            ]
        return [file for writer in writers for file in writer.close()], []

    def _spill_if_large(self) -> None:
        """Move all records to files once the task has written more than a message may
        carry.
        """
        if not self._holds:
            return
        held_bytes = sum(writer.held_bytes for writer in self._writers.values())
        if not self._has_directory:
            if held_bytes > _MAX_CARRIED:
                raise OtherDirectoryError(
                    f"the machine {os.uname().nodename} does not see the staging directory of this write, so its tasks "
                    "send their records to the driver in messages, below spark.driver.maxResultSize in all. Share the "
                    "directory under this path, or use more and smaller tasks",
                    path=self._options.path,
                    expected=f"at most {_MAX_CARRIED} bytes of a task",
                    found=held_bytes,
                )
            return
        if held_bytes > self._options.carry_bytes:
            self._holds = False
            for writer in self._writers.values():
                writer.spill()

    def _store(self, writer: StagedWriter, rows: Any) -> None:
        times = self._times(rows)
        if self._has_headers(rows):
            writer.append_records(records_of(rows, self._names, times))
        else:
            keys = None
            if "key" in self._names:
                keys = input_column(rows.column("key"), "key")
            values = input_column(rows.column("value"), "value")
            writer.append_columns(InputColumns(keys, values, times, rows.num_rows))
        self._spill_if_large()

    def _open(self, topic: str, partition: int) -> StagedWriter:
        plan = self._topics.get(topic)
        return StagedWriter(
            OS,
            self._options.path,
            self._txid,
            topic,
            partition,
            f"{self._task}.{self._attempt}",
            LogConfig.parse(None if plan is None else plan.overrides),
            codec=self._codec,
            batch_bytes=self._options.batch_bytes,
            holds=self._holds,
        )


def _milliseconds(column: Any) -> npt.NDArray[np.int64]:
    """Convert microseconds of any time zone to milliseconds, rounded down as in Spark.

    Null becomes -1, which is the format's value for no timestamp.
    """
    import pyarrow as pa

    micros = column.cast(pa.int64())
    times = np.asarray(micros.fill_null(-1000).to_numpy(zero_copy_only=False), np.int64)
    return np.floor_divide(times, 1000)


def _has_headers(column: Any) -> bool:
    import pyarrow.compute as pc

    if column.null_count == len(column):
        return False
    lengths = pc.call_function("list_value_length", [column])
    return bool(pc.call_function("max", [lengths]).as_py())


def records_of(
    rows: Any, names: tuple[str, ...], times: npt.NDArray[np.int64] | None
) -> list[tuple[Any, ...]]:
    """Yield rows with headers as tuples, because the column encoder has no headers."""

    def cells(name: str) -> list[Any]:
        if name not in names:
            return [None] * rows.num_rows
        return [
            topic.encode() if isinstance(topic, str) else topic
            for topic in rows.column(name).to_pylist()
        ]

    headers = [
        [(header["key"], header["value"]) for header in headers or ()]
        for headers in rows.column("headers").to_pylist()
    ]
    if times is None:
        timestamps = [None] * rows.num_rows
    else:
        timestamps = times.tolist()
    return list(zip(cells("key"), cells("value"), headers, timestamps, strict=True))
