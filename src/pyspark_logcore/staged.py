"""The common part of batch writes and streams: tasks stage rows, and the driver
publishes all of them at once.

Rules:
- Columns and options are checked in StagedWrite.plan(), before any task runs.
- The names of a task's files contain its attempt, so that two attempts of a task never
  write the same file. Only files that the messages of a commit name are published.
- Once a process has begun to carry out a published write, none of its files is removed,
  whatever method Spark calls. Before that, an error in publishing or a timeout
  withdraws the write.

This module knows no format: logcore.staging writes the files and carries the write out;
rows.py chooses the partition of each row.
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs
from pyspark.sql.datasource import WriterCommitMessage

import logcore
from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    LogcoreError,
    LogLockedError,
    StorageWriteError,
)
from logcore.fs import FS, OS
from logcore.metadata.filenames import check_topic_name
from logcore.staging.applying import apply_ready
from logcore.staging.manifest import Carried, Manifest, StagedFile
from logcore.staging.publishing import Staging
from pyspark_logcore.options import WriteOptions
from pyspark_logcore.reader import freeze_gc
from pyspark_logcore.rows import RowStager, TopicPlan, check_columns

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

_POLL_SECONDS: Final = 0.02


class PublishTimeoutError(LogcoreError):
    """Another process holds the directory and did not carry out the write in time.

    The write was withdrawn.
    """


class StagedMessage(WriterCommitMessage):
    """Result of one task: the files that it staged, or the records in this message.

    `query` and `batch_id` name the stream and its batch; both are None for a batch
    write.
    """

    def __init__(
        self,
        txid: str,
        task: int,
        files: list[StagedFile],
        carried: list[Carried],
        query: str | None = None,
        batch_id: int | None = None,
    ) -> None:
        super().__init__()
        self.txid = txid
        self.task = task
        self.files = files
        self.carried = carried
        self.query = query
        self.batch_id = batch_id

    @property
    def is_empty(self) -> bool:
        return not self.files and not self.carried


@attrs.frozen
class StagedWrite:
    """Plan of one write, which Spark pickles to the tasks.

    `topics` holds the topics that existed when the write was planned.
    """

    options: WriteOptions
    txid: str
    topics: dict[str, TopicPlan]
    names: tuple[str, ...]

    @classmethod
    def plan(cls, options: WriteOptions, schema: StructType) -> StagedWrite:
        """Check columns and topics, and create the staging directory.

        Raises:
            LogcoreError: a column, a topic or the directory is unsuitable.
        """
        names = check_columns(schema, options)
        if not os.path.isdir(options.path):
            with logcore.open_dir(options.path, create=True):
                pass
        with logcore.open_dir(options.path, read_only=True) as directory:
            if options.topic is not None:
                check_topic_name(options.topic)
            if options.topic is None:
                requested = directory.topics()
            else:
                requested = [options.topic]
            topics = {}
            for name in requested:
                if name in directory:
                    numbers = directory.partitions(name)
                    if numbers != tuple(range(len(numbers))):
                        raise InvalidConfigError(
                            f"topic {name!r} has gaps in its partition numbers",
                            found=numbers,
                        )
                    config = directory.describe_topic(name).config.as_mapping()
                    topics[name] = TopicPlan(len(numbers), config)
        txid = uuid.uuid4().hex
        Staging(OS, options.path).begin(txid)
        return cls(options, txid, topics, names)

    def stage_here(self, batches: Iterator[pyarrow.RecordBatch]) -> StagedMessage:
        """Stage the rows of the running attempt; runs in a worker of Spark.

        Raises:
            LogcoreError: a row cannot be staged.
        """
        from pyspark import TaskContext

        if self.options.gc_freeze:
            freeze_gc()
        context = TaskContext.get()
        if context is None:
            return self.stage(batches, 0, 0)
        # Spark also sets the id in foreachBatch. The id of a query survives restarts and
        # is unique to its checkpoint.
        query = context.getLocalProperty("sql.streaming.queryId")
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        number = None
        if batch_id is not None:
            number = int(batch_id)
        return self.stage(
            batches, context.partitionId(), context.taskAttemptId(), query, number
        )

    def stage(
        self,
        batches: Iterator[pyarrow.RecordBatch],
        task: int,
        attempt: int,
        query: str | None = None,
        batch_id: int | None = None,
    ) -> StagedMessage:
        """Stage batches as the given attempt of the given task.

        Raises:
            LogcoreError: a row cannot be staged.
        """
        stager = RowStager(
            self.options, self.txid, self.topics, self.names, task, attempt
        )
        for batch in batches:
            stager.add(batch)
        files, carried = stager.close()
        return StagedMessage(self.txid, task, files, carried, query, batch_id)

    def publish(self, messages: Sequence[StagedMessage], query: str | None) -> None:
        """Publish all staged rows; runs on the driver after all tasks have succeeded.

        Raises:
            LogcoreError: the write was refused, failed or timed out.
        """
        options = self.options
        staging = Staging(OS, options.path)
        stored = iter(
            staging.store(
                self.txid, [piece for message in messages for piece in message.carried]
            )
        )
        by_task = {
            message.task: [
                *message.files,
                *itertools.islice(stored, len(message.carried)),
            ]
            for message in messages
        }
        files = [
            file for _, task_files in sorted(by_task.items()) for file in task_files
        ]
        manifest = Manifest(
            app_id=options.app_id,
            version=options.version,
            txid=self.txid,
            files=files,
            topics={
                name: options.partitions
                for name in {file.topic for file in files}
                if name not in self.topics
            },
            query=query,
        )
        try:
            staging.publish(manifest)
        except BaseException:
            # The manifest may exist; withdraw it, because the job has failed.
            staging.withdraw(manifest.app_id, manifest.version, self.txid)
            raise
        carry_out(
            OS,
            staging,
            options.app_id,
            options.version,
            self.txid,
            options.publish_timeout,
        )


def carry_out(
    fs: FS,
    staging: Staging,
    app_id: str,
    version: int,
    txid: str,
    timeout_seconds: float,
) -> None:
    """Carry out a published manifest, or wait until the process that holds the directory
    has carried it out.

    On an error, the manifest is withdrawn, so that no record is written. If a process
    has already begun to carry it out, the error reports that the write will be
    published.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            try:
                with logcore.open_dir(staging.directory, fs=fs) as directory:
                    apply_ready(fs, directory)
                    failures = [
                        incident
                        for incident in directory.incidents()
                        if incident.work == "staging"
                    ]
                if staging.outcome(app_id, version) == "done":
                    return
                if failures:  # opening the directory failed, for example on a full disk
                    cause = failures[-1]
                    raise StorageWriteError(
                        f"the write could not be appended: {cause.kind}: {cause.reason}"
                    )
                raise CorruptLogError(
                    "the write was neither carried out nor refused", path=staging.path
                )
            except LogLockedError as error:
                if staging.outcome(app_id, version) == "done":
                    return
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                raise PublishTimeoutError(
                    f"the write was not taken over within {timeout_seconds:g} s (option publishTimeout): "
                    f"{error.reason}",
                    path=staging.directory,
                ) from error
        except BaseException as error:
            if staging.outcome(app_id, version) == "done" and isinstance(
                error, LogcoreError
            ):
                return
            if (
                not staging.withdraw(app_id, version, txid)
                and staging.outcome(app_id, version) == "pending"
            ):
                hint = "The write is published; its records appear when the directory is opened next"
                if isinstance(error, LogcoreError):
                    error.reason += f". {hint}"
                else:
                    error.add_note(hint)
            raise
