"""A batch write: tasks stage what they are given, the driver publishes all of it at once.

Rules:
- Columns and options are checked in LogcoreWriter.of(), before any task runs.
- A task's files have its attempt in their names, so that a retry, a twin or a latecomer never meets another's; only
  what the messages of a commit name is published.
- Past the moment of publishing nothing is removed any more, whatever Spark calls.

This module knows no format: logcore.staging writes the files and carries the write out; rows.py says where a
row goes.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

import logcore
from logcore.errors import CorruptLogError, InvalidConfigError, LogcoreError, LogLockedError
from logcore.fs import OS
from logcore.names import check_topic_name
from logcore.staging.applying import apply_ready
from logcore.staging.manifest import Manifest, StagedFile, read_state
from logcore.staging.publishing import Staging
from pyspark_logcore.options import WriteOptions, parse_write
from pyspark_logcore.reader import freeze
from pyspark_logcore.rows import RowStager, TopicPlan, check_columns

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

_POLL_SECONDS: Final = 0.02


class PublishTimeoutError(LogcoreError):
    """Another process holds the directory and did not take the write over in time; it was withdrawn."""


class OtherQueryError(LogcoreError):
    """The name of a write belongs to another stream, which has written that version."""


class StagedMessage(WriterCommitMessage):
    """What one task staged. query: the id of the stream whose batch this is, None where there is none."""

    def __init__(self, task: int, files: list[StagedFile], query: str | None = None) -> None:
        super().__init__()
        self.task = task
        self.files = files
        self.query = query


class LogcoreWriter(DataSourceArrowWriter):
    """Writes one DataFrame. Made by LogcoreDataSource.writer(); pickled to the tasks as it is then."""

    def __init__(self, options: WriteOptions, txid: str, topics: dict[str, TopicPlan], names: tuple[str, ...]) -> None:
        self.options = options
        self.txid = txid
        self.topics = topics
        self.names = names

    @classmethod
    def of(cls, given: Mapping[str, str], schema: StructType, overwrite: bool) -> LogcoreWriter:
        """Checks options and columns, and makes the staging directory. Raises LogcoreError."""
        options = parse_write(given)
        if overwrite:
            raise InvalidConfigError('a log is only appended to: write with .mode("append")')
        names = check_columns(schema, options)
        if not os.path.isdir(options.path):
            with logcore.open_dir(options.path, create=True):
                pass
        with logcore.open_dir(options.path, read_only=True) as directory:
            if options.topic is not None:
                check_topic_name(options.topic)
            wanted = directory.topics() if options.topic is None else [options.topic]
            topics = {}
            for name in wanted:
                if name in directory:
                    numbers = directory.partitions(name)
                    if numbers != tuple(range(len(numbers))):
                        raise InvalidConfigError(f"topic {name!r} has gaps in its partition numbers", found=numbers)
                    config = directory.describe_topic(name).config.as_mapping()
                    topics[name] = TopicPlan(len(numbers), config)
        txid = uuid.uuid4().hex
        Staging(OS, options.path).begin(txid)
        return cls(options, txid, topics, names)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedMessage:
        """Runs in a worker of Spark: stages the rows of one attempt of one task."""
        from pyspark import TaskContext

        if self.options.gc_freeze:
            freeze()
        context = TaskContext.get()
        task, attempt = (0, 0) if context is None else (context.partitionId(), context.taskAttemptId())
        # In foreachBatch too: it survives restarts from the same checkpoint, and no other checkpoint has it.
        query = None if context is None else context.getLocalProperty("sql.streaming.queryId")
        return self.stage(iterator, task, attempt, query)

    def stage(
        self, batches: Iterator[pyarrow.RecordBatch], task: int, attempt: int, query: str | None = None
    ) -> StagedMessage:
        """Stages batches as that attempt of that task. Raises LogcoreError."""
        stager = RowStager(self.options, self.txid, self.topics, self.names, task, attempt)
        for batch in batches:
            stager.add(batch)
        return StagedMessage(task, stager.close(), query)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver when every task has succeeded: publishes all of it. Raises LogcoreError."""
        staged = sorted((one for one in messages if isinstance(one, StagedMessage)), key=lambda one: one.task)
        files = [file for message in staged for file in message.files]
        query = next((message.query for message in staged if message.query), None)
        staging = Staging(OS, self.options.path)
        done = staging.outcome(self.options.app_id, self.options.version) == "done"
        if (not files and not self.options.given) or done:
            staging.abort_files(self.txid)
            self._check_query(staging, query)
            return
        manifest = Manifest(
            app_id=self.options.app_id,
            version=self.options.version,
            txid=self.txid,
            files=files,
            topics={
                name: self.options.partitions for name in {file.topic for file in files} if name not in self.topics
            },
            query=query,
        )
        try:
            staging.publish(manifest)
        except BaseException:  # its name may be there: not to be carried out after the job has failed
            staging.withdraw(manifest.app_id, manifest.version, self.txid)
            raise
        publish(staging, self.options, self.txid)
        self._check_query(staging, query)  # another may have written that version first
        if not self.options.given:
            staging.forget(self.options.app_id)

    def _check_query(self, staging: Staging, query: str | None) -> None:
        """Raises OtherQueryError when the version that is done was a batch of another stream, whose rows are others."""
        state = read_state(OS, staging.path, self.options.app_id)
        other = None if state is None else state.get("query")
        if state is not None and query and other and other != query and self.options.version <= state["version"]:
            raise OtherQueryError(
                f"version {self.options.version} of txnAppId {self.options.app_id!r} was not written: versions up to "
                f"{state['version']} were written by another query. A new checkpoint counts its batches from 0. Give "
                "it another txnAppId, or go on from the old checkpoint",
                path=staging.directory,
                expected=f"query {other}",
                found=f"query {query}",
            )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Runs on the driver when the write failed, also in commit(): removes what was staged, unless published."""
        Staging(OS, self.options.path).abort(self.options.app_id, self.options.version, self.txid)


def publish(staging: Staging, options: WriteOptions, txid: str) -> None:
    """Carries out a published manifest, or waits for the process that holds the directory to do so.

    On an error the manifest has been withdrawn, so that nothing is there; or, if somebody had begun by then, the error
    says that the write will be there.
    """
    deadline = time.monotonic() + options.publish_timeout
    app_id = options.app_id
    version = options.version
    while True:
        try:
            try:
                with logcore.open_dir(options.path) as directory:
                    apply_ready(OS, directory)
                if staging.outcome(app_id, version) == "done":
                    return
                raise CorruptLogError("the write was neither carried out nor refused", path=staging.path)
            except LogLockedError as error:
                if staging.outcome(app_id, version) == "done":
                    return
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                    continue
                raise PublishTimeoutError(
                    f"the write was not taken over within {options.publish_timeout:g} s (option publishTimeout): "
                    f"{error.reason}",
                    path=options.path,
                ) from error
        except BaseException as error:
            if staging.outcome(app_id, version) == "done" and isinstance(error, LogcoreError):
                return
            if not staging.withdraw(app_id, version, txid) and staging.outcome(app_id, version) == "pending":
                note = "The write is published, and will be there when the directory is next opened"
                if isinstance(error, LogcoreError):
                    error.reason += f". {note}"
                else:
                    error.add_note(note)
            raise
